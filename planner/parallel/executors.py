"""One function over many items: in this process, in processes of this machine, or on a cluster.

    serial        one item after the other, here
    threads:N     here too, N items at a time; what Numba has compiled runs side by side
    processes:N   processes of this machine (loky), by default one per CPU
    ray           a running Ray cluster,  address auto, host:6379 or ray://host:10001, or $RAY_ADDRESS
    dask          a running Dask cluster, address tcp://host:8786, or $DASK_SCHEDULER_ADDRESS

The workers of this module are processes that compute, not the workers of a fleet. The workers of one
executor are called a crew. A value that many items share, such as a trace, travels to a crew once, not with
every item: processes map its arrays from a file in memory, `ray.put` and Dask's `scatter` copy it to the
cluster. A result that later items need, such as a trace that a worker drew, stays with the crew too.

Every worker must have the same versions of fleetplan, Python, NumPy and Numba as this process, or nothing is
computed at all. The item of a worker that dies is given to another one, three times at most; after that a
PlannerError is raised.

Joblib, Ray and Dask are imported within functions: most commands compute here, and Ray and Dask may be
missing.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import metadata
from itertools import count
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Protocol, TypeVar

from planner import __version__
from planner.errors import InputError, PlannerError
from planner.files.interrupts import tidy_at_end

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")

EXAMPLE_ADDRESSES = {"ray": "auto, host:6379 or ray://host:10001", "dask": "tcp://host:8786"}
# The variables from which the clients of Ray and Dask take an address themselves.
ADDRESS_VARIABLES = {"ray": "RAY_ADDRESS", "dask": "DASK_SCHEDULER_ADDRESS"}
EXECUTOR_NAMES = ("serial", "threads", "processes", *EXAMPLE_ADDRESSES)
WITH_NUMBER = ("threads", "processes")  # These may be followed by a number of workers: `threads:4`.
PARENT_CHECK_S = 1.0  # A process checks this often that its parent is alive.
CONNECT_TIMEOUT_S = 10.0  # A scheduler that runs answers within this time.
FIRST_WORKER_TIMEOUT_S = 60.0  # A Dask cluster may take this time to start its first worker.
TRIES = 4  # Tries of one item: the first, and three after workers died.
LONGEST_REASON_CHARS = 300  # Longer texts of foreign errors are cut in our messages.
MOST_WORKERS = 1024  # A larger number is a typing error: no machine has more CPUs for one plan.
MAPPED_VALUES = 32  # A worker process keeps the files of this many shared values mapped. Set by hand.
# Loky's tracker of shared resources warns of what an interrupt leaves, although it removes that itself.
IGNORE_LEAK_WARNINGS = "ignore:resource_tracker:UserWarning"
MEMORY_FOLDER = Path("/dev/shm")  # A file system in memory, on Linux.
CREW_PREFIX, LOCK_NAME = "fleetplan-crew-", "lock"  # A run holds the lock in its folder until it ends.
LEAST_FREE_BYTES = 2**30  # With less memory free in MEMORY_FOLDER, files go to the temporary folder.
COMPUTED_WITH = ("numpy", "numba")  # Other versions of these may round differently.


@cache
def deciding_versions() -> str:
    """The versions on this machine that may change the last bit of a result."""
    names = [f"fleetplan {__version__}", f"Python {sys.version.split()[0]}"]
    return ", ".join([*names, *(f"{name} {metadata.version(name)}" for name in COMPUTED_WITH)])


@dataclass(frozen=True, slots=True)
class Executor:
    """Where to compute.

    `name` is one of EXECUTOR_NAMES, perhaps with a number of workers (`processes:4`). `address` is that of a
    Ray or Dask cluster, by default the value of its variable in ADDRESS_VARIABLES.
    """

    name: str = "serial"
    address: str | None = None

    def __post_init__(self) -> None:
        kind, _, number = self.name.partition(":")
        if kind not in EXECUTOR_NAMES or (":" in self.name and kind not in WITH_NUMBER):
            names = ", ".join(f"{name}[:N]" if name in WITH_NUMBER else name for name in EXECUTOR_NAMES)
            raise InputError(f"--executor: must be one of {names}, found {self.name!r}")
        if ":" in self.name and not (number.isdecimal() and 1 <= int(number) <= MOST_WORKERS):
            raise InputError(
                f"--executor {self.name}: expected a number from 1 to {MOST_WORKERS} after {kind}:"
            )
        if kind not in EXAMPLE_ADDRESSES:
            if self.address is not None:
                raise InputError(f"--address {self.address}: is for ray and dask, not for {self.name}")
            return
        if self.address is None:
            object.__setattr__(self, "address", os.environ.get(ADDRESS_VARIABLES[kind]) or None)
        if self.address is None:
            raise InputError(
                f"--executor {kind}: needs the cluster's --address, {EXAMPLE_ADDRESSES[kind]}, or "
                f"{ADDRESS_VARIABLES[kind]}; processes uses the CPUs of this machine"
            )
        if self.address != "auto" or kind == "dask":
            self.host_and_port()  # Raises for a malformed address; Ray alone knows "auto".

    @property
    def kind(self) -> str:
        """The name without a number of workers."""
        return self.name.partition(":")[0]

    @property
    def workers(self) -> int:
        """How many processes or threads of this machine compute; 1 for serial, ray and dask."""
        if self.kind not in WITH_NUMBER:
            return 1
        return int(self.name.partition(":")[2] or os.cpu_count() or 1)

    def host_and_port(self) -> tuple[str, int]:
        """Host and port of the address; raises InputError for a malformed one."""
        match = re.fullmatch(r"(?:\w+://)?\[?([^/\s\[\]]+)\]?:(\d{1,5})", self.address or "")
        if match is None or int(match[2]) > 65535:
            raise InputError(f"--address {self.address}: expected {EXAMPLE_ADDRESSES[self.kind]}")
        return match[1], int(match[2])


SERIAL = Executor()


class Crew(Protocol):
    """Workers in other processes. A value lives there as long as a reference to it lives here."""

    workers: int

    def put_value(self, value: Any) -> Any:
        """Put a value where every worker can read it; returns a reference."""

    def put_result(self, function: Callable[[Any, Any], Any], reference: Any, item: Any) -> Any:
        """Compute function(value, item) on a worker and leave the result there; returns a reference to it."""

    def start_item(self, function: Callable[[Any, Any], Any], reference: Any, item: Any) -> Callable[[], Any]:
        """Start function(value, item) on a worker; returns a function that waits for the result."""


# What `working_on` has chosen in this context: a crew, a number of threads, or neither; and the semaphore of
# `current_slot`, which is the one of this process where no number of threads is chosen.
_crew: ContextVar[Crew | None] = ContextVar("crew", default=None)
_threads: ContextVar[int | None] = ContextVar("threads", default=None)
_process_slots = threading.Semaphore(os.cpu_count() or 1)
_slots: ContextVar[threading.Semaphore] = ContextVar("slots", default=_process_slots)


def current_crew() -> Crew | None:
    """The workers that simulations in this context use; None for this process itself."""
    return _crew.get()


def is_executor_set() -> bool:
    """Whether `working_on` has chosen where to compute."""
    return _crew.get() is not None or _threads.get() is not None


def parallel_width() -> int:
    """How many computations may run at a time."""
    if (crew := _crew.get()) is not None:
        return crew.workers
    return _threads.get() or os.cpu_count() or 1


def current_slot() -> threading.Semaphore:
    """A semaphore that a computation in this process holds while it runs: it bounds threads and memory."""
    return _slots.get()


@contextmanager
def working_on(executor: Executor) -> Iterator[None]:
    """Let simulations inside the block use the workers of `executor`.

    Raises InputError if the package, the cluster or the right version is missing.
    """
    with ExitStack() as stack:
        if executor.kind in ("serial", "threads"):
            crew, threads = None, executor.workers
        else:
            crew, threads = stack.enter_context(_open_crew(executor)), None
        slots = _process_slots if threads is None else threading.Semaphore(threads)
        crew_before, threads_before, slots_before = _crew.set(crew), _threads.set(threads), _slots.set(slots)
        try:
            yield
        finally:
            _crew.reset(crew_before)
            _threads.reset(threads_before)
            _slots.reset(slots_before)


def run_items(
    function: Callable[[Shared, Item], Result],
    items: Sequence[Item],
    *,
    shared: Shared,
    executor: Executor | None = None,
) -> list[Result]:
    """[function(shared, item) for item in items], whatever the executor: same order, same values.

    `function` is defined at the top of a module, depends on its arguments alone and changes neither of them.
    An error that it raises is raised here; if several items fail, it is the error of any one. Without
    `executor` the workers are those of `working_on`. Raises InputError if package or cluster are missing,
    PlannerError if workers die.
    """
    if executor is not None:
        if executor.kind == "processes" and items:
            executor = Executor(f"processes:{min(executor.workers, len(items))}")
        with working_on(executor):
            return run_items(function, items, shared=shared)
    if (crew := current_crew()) is None:
        threads = min(_threads.get() or 1, len(items))
        if threads <= 1:
            return [function(shared, item) for item in items]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(partial(function, shared), items))
    reference = crew.put_value(shared)
    waits = [crew.start_item(function, reference, item) for item in items]
    return [wait() for wait in waits]


def _open_crew(executor: Executor) -> Any:
    """The context manager that opens the crew of an executor; serial and threads have none."""
    return {"processes": _open_processes, "ray": _open_ray, "dask": _open_dask}[executor.kind](executor)


# -- what a worker does


class OtherVersionError(InputError):
    """A worker computes with other versions than the process that sent the item."""


def _check_versions(parent_versions: str) -> None:
    """Raise OtherVersionError where this worker's versions are not those of the process that sends items."""
    if (own := deciding_versions()) != parent_versions:
        raise OtherVersionError(
            f"--executor: a worker has {own}, and this machine {parent_versions}; install the same on "
            "all of them"
        )


def _run_item(parent_versions: str, function: Callable[[Any, Any], Any], value: Any, item: Any) -> Any:
    """function(value, item), once the versions are seen to be the same."""
    _check_versions(parent_versions)
    return function(value, item)


@lru_cache(maxsize=MAPPED_VALUES)
def _map_file(path: str) -> Any:
    """The value in a file of the crew's folder, its arrays mapped."""
    from joblib import load

    # Copy-on-write ("c") rather than read-only, because Numba compiles anew for read-only arrays.
    return load(path, mmap_mode="c")


def _run_item_on_file(
    parent_versions: str,
    function: Callable[[Any, Any], Any],
    path: str,
    item: Any,
    result_path: str | None = None,
) -> Any:
    """function(value in the file, item); the result is returned, or written to `result_path`."""
    from joblib import dump

    result = _run_item(parent_versions, function, _map_file(path), item)
    if result_path is None:
        return result
    dump(result, f"{result_path}.part")  # Renamed when complete: a worker that dies leaves no half file.
    Path(f"{result_path}.part").replace(result_path)
    return None


# -- processes


def _exit_after_parent(parent: int) -> None:
    """Start a thread that ends this process soon after its parent was killed."""

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch_parent, daemon=True).start()


class _ValueFile:
    """A value in a file of the crew's folder; the file is deleted with the last reference."""

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        self.path = path

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


class _ProcessCrew:
    """A pool of loky's processes, replaced by a new pool when one of its processes has died. References are
    files in `folder`.
    """

    def __init__(self, workers: int, folder: Path) -> None:
        self.workers, self.folder = workers, folder
        self._lock, self._number = threading.Lock(), count()
        self._pool, self._is_closed = self._start_pool(), False

    def _start_pool(self) -> Any:
        """A pool of processes that leave interrupts to this one."""
        from joblib.externals.loky import ProcessPoolExecutor

        with _workers_ignore_interrupts():
            return ProcessPoolExecutor(
                self.workers, timeout=None, initializer=_exit_after_parent, initargs=(os.getpid(),)
            )

    def put_value(self, value: Any) -> _ValueFile:
        from joblib import dump

        path = self.folder / str(next(self._number))
        try:
            dump(value, path)
        except OSError as error:
            raise PlannerError(
                f"--executor processes: {self.folder}: {error.strerror or error}; make room there, or use "
                "--executor threads"
            ) from None
        return _ValueFile(path)

    def put_result(self, function: Callable[[Any, Any], Any], reference: _ValueFile, item: Any) -> _ValueFile:
        """Like `Crew.put_result`, but waits until the result's file is written, so that any later item can
        read it.
        """
        result = _ValueFile(self.folder / str(next(self._number)))
        wait = self._start_call(
            _run_item_on_file, deciding_versions(), function, str(reference.path), item, str(result.path)
        )
        wait()
        return result

    def start_item(
        self, function: Callable[[Any, Any], Any], reference: _ValueFile, item: Any
    ) -> Callable[[], Any]:
        wait = self._start_call(_run_item_on_file, deciding_versions(), function, str(reference.path), item)

        # The default value refers to the file, which is therefore not deleted before the item is done.
        def wait_with_reference(reference: _ValueFile = reference) -> Any:
            return wait()

        return wait_with_reference

    def _start_call(self, *call: Any) -> Callable[[], Any]:
        """Start call[0](*call[1:]) in the pool; the returned function waits for the result.

        Where a process died meanwhile, it repeats the call in a new pool, up to TRIES times in all.
        """
        pool, pending = self._submit(call)

        def wait() -> Any:
            nonlocal pool, pending
            for _ in range(TRIES - 1):
                try:
                    return pending.result()
                except BrokenProcessPool:
                    self._replace(pool)
                    pool, pending = self._submit(call)
            try:
                return pending.result()
            except BrokenProcessPool:
                raise PlannerError(
                    f"--executor processes: one of {self.workers} processes died {TRIES} times, most likely "
                    "of want of memory; use fewer, a smaller --window, or --executor serial"
                ) from None

        return wait

    def _submit(self, call: tuple[Any, ...]) -> tuple[Any, Any]:
        """Submit a call to the pool; returns the pool and the pending result."""
        for _ in range(TRIES):
            with self._lock, _workers_ignore_interrupts():  # `submit` may start worker processes.
                pool = self._pool
                try:
                    return pool, pool.submit(*call)
                except BrokenProcessPool:
                    self._pool = self._start_pool()
        return pool, pool.submit(*call)  # Every new pool broke at once: raises BrokenProcessPool.

    def _replace(self, broken: Any) -> None:
        """Start a new pool in place of a broken one, unless another thread already has."""
        with self._lock:
            if self._is_closed:
                raise PlannerError("--executor processes: it was ended")
            if self._pool is broken:
                self._pool = self._start_pool()

    def close(self) -> None:
        """End all processes, also those that still compute."""
        with self._lock:
            self._is_closed = True
        threading.excepthook = partial(_ignore_loky_manager, threading.excepthook)
        self._pool.shutdown(kill_workers=True)


def _ignore_loky_manager(excepthook: Callable[[Any], object], raised: Any) -> None:
    """A hook for errors in threads, which passes them on to `excepthook`, except those of Loky's manager.

    That thread fails when a shutdown takes away the items that it waits for.
    """
    if raised.thread is None or raised.thread.name != "ExecutorManagerThread":
        excepthook(raised)


@contextmanager
def _open_processes(executor: Executor) -> Iterator[_ProcessCrew]:
    """Open a crew of processes, with a folder of its own for shared values."""
    has_room = os.access(MEMORY_FOLDER, os.W_OK) and shutil.disk_usage(MEMORY_FOLDER).free >= LEAST_FREE_BYTES
    parent = MEMORY_FOLDER if has_room else Path(tempfile.gettempdir())
    _remove_killed_runs(parent)
    folder = Path(tempfile.mkdtemp(prefix=CREW_PREFIX, dir=parent))
    with (
        tidy_at_end(lambda: shutil.rmtree(folder, ignore_errors=True)),
        (folder / LOCK_NAME).open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        crew = _ProcessCrew(executor.workers, folder)
        try:
            yield crew
        finally:
            crew.close()


def _remove_killed_runs(parent: Path) -> None:
    """Delete the folders of runs that were killed, known by a lock that no process holds."""
    for lock in parent.glob(f"{CREW_PREFIX}*/{LOCK_NAME}"):
        with suppress(OSError), lock.open("a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


@contextmanager
def _workers_ignore_interrupts() -> Iterator[None]:
    """Let processes that are started in the block ignore SIGINT and SIGTERM.

    Ctrl-C reaches every process of a terminal, but this process ends its workers itself. Trackers of shared
    resources are started here too, and their warnings silenced (IGNORE_LEAK_WARNINGS).
    """
    from joblib.externals.loky.backend import resource_tracker as loky_tracker

    warnings = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{warnings},{IGNORE_LEAK_WARNINGS}" if warnings else IGNORE_LEAK_WARNINGS
    for tracker in (resource_tracker, loky_tracker):
        tracker.ensure_running()  # Done first, because the start of a tracker unblocks the signals.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        with _postpone_interrupts():
            yield
    finally:
        if warnings is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = warnings
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _postpone_interrupts() -> Iterator[None]:
    """Raise interrupts that come in the block when it ends.

    A signal that this thread blocks may still reach another thread of this process. Python then raises
    KeyboardInterrupt in the main thread, perhaps after a worker was started and before the pool has it in its
    list; the pool would not end that worker.
    """
    if threading.current_thread() is not threading.main_thread():  # Only the main thread may set handlers.
        yield
        return
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda signal_number, _: received.append(signal_number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            # None: the handler was not set from Python and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if received:
            signal.raise_signal(received[0])


# -- Ray


_NO_MODULE = "No module named"  # Part of the text of Python's ModuleNotFoundError, inside errors of Ray.


class _RayCrew:
    """The workers of a Ray cluster; references are Ray's own."""

    def __init__(self, ray: Any, executor: Executor) -> None:
        self.ray, self.executor = ray, executor
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self.workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._work = ray.remote(max_retries=TRIES - 1)(_run_item)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._ray_errors_as_ours():  # Check the versions on every node with CPUs.
            versions = deciding_versions()
            check = ray.remote(max_retries=TRIES - 1)(_check_versions)
            # `soft`: a node that is gone meanwhile is left out, and any other checks itself twice.
            node_ids = [node["NodeID"] for node in nodes if node["Resources"].get("CPU")]
            strategies = [NodeAffinitySchedulingStrategy(node_id, soft=True) for node_id in node_ids]
            ray.get([check.options(scheduling_strategy=node).remote(versions) for node in strategies])

    def put_value(self, value: Any) -> Any:
        return self.ray.put(value)

    def put_result(self, function: Callable[[Any, Any], Any], reference: Any, item: Any) -> Any:
        with self._ray_errors_as_ours():
            return self._work.remote(deciding_versions(), function, reference, item)

    def start_item(self, function: Callable[[Any, Any], Any], reference: Any, item: Any) -> Callable[[], Any]:
        with self._ray_errors_as_ours():
            pending = self._work.remote(deciding_versions(), function, reference, item)

        def wait() -> Any:
            with self._ray_errors_as_ours():
                return self.ray.get(pending)

        return wait

    @contextmanager
    def _ray_errors_as_ours(self) -> Iterator[None]:
        """Raise errors of Ray as errors of ours, with advice."""
        errors = self.ray.exceptions
        try:
            yield
        except errors.RayTaskError as error:
            is_missing = isinstance(error.cause, errors.RaySystemError) and _NO_MODULE in str(error.cause)
            if is_missing or "failed to import on the worker" in str(error.cause):
                raise _cannot_import(self.executor) from None
            raise error.cause from None
        except ModuleNotFoundError:  # Ray's client raises it.
            raise _cannot_import(self.executor) from None
        except (errors.RayError, ConnectionError) as error:
            if _NO_MODULE in str(error):
                raise _cannot_import(self.executor) from None
            raise _lost_workers(self.executor, error) from None


@contextmanager
def _open_ray(executor: Executor) -> Iterator[_RayCrew]:
    """Connect to a Ray cluster that runs."""
    try:
        import ray
    except ModuleNotFoundError:
        raise _not_installed("ray") from None
    if executor.address != "auto":
        _check_listening(executor)
    try:
        ray.init(executor.address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        raise InputError(
            f"--address {executor.address}: no Ray cluster to use ({_one_line(error)})"
        ) from None
    try:
        yield _RayCrew(ray, executor)
    finally:
        ray.shutdown()


# -- Dask


class _DaskValue:
    """A value on Dask's workers, and the function `put` that puts it there.

    A scattered value is lost with the last worker that has it, and everything that waits for it is cancelled.
    The value is then put on the workers again. `source` is the value that this one was computed from, if any.
    """

    def __init__(self, put: Callable[[], Any], source: _DaskValue | None = None) -> None:
        self._put, self._source, self._lock = put, source, threading.Lock()
        self.future = put()

    def put_again(self, lost: Any) -> None:
        """Put the value on the workers again, its source first if that is lost too.

        `lost` is the future that was cancelled. If another thread has replaced it already, nothing is done.
        """
        with self._lock:
            if self.future is not lost:
                return
            if self._source is not None and (source := self._source.future).status in ("cancelled", "lost"):
                self._source.put_again(source)
            self.future = self._put()


class _DaskCrew:
    """The workers of a Dask cluster; references are _DaskValue."""

    def __init__(self, client: Any, executor: Executor) -> None:
        self.client, self.executor = client, executor
        try:
            client.wait_for_workers(1, timeout=FIRST_WORKER_TIMEOUT_S)
        except TimeoutError:
            raise InputError(
                f"--address {executor.address}: the Dask cluster has no worker; start one with `dask worker`"
            ) from None
        with self._dask_errors_as_ours():
            client.run(_check_versions, deciding_versions())
        self.workers = max(1, sum(client.nthreads().values()))
        self._imported_modules: set[str] = set()

    def put_value(self, value: Any) -> _DaskValue:
        with self._dask_errors_as_ours():
            return _DaskValue(lambda: self.client.scatter(value, broadcast=True, hash=False))

    def put_result(self, function: Callable[[Any, Any], Any], reference: _DaskValue, item: Any) -> _DaskValue:
        with self._dask_errors_as_ours():
            self._check_importable(function)
            return _DaskValue(
                lambda: self.client.submit(
                    _run_item, deciding_versions(), function, reference.future, item, pure=False
                ),
                reference,
            )

    def start_item(
        self, function: Callable[[Any, Any], Any], reference: _DaskValue, item: Any
    ) -> Callable[[], Any]:
        pending = self.put_result(function, reference, item)

        def wait() -> Any:
            with self._dask_errors_as_ours():
                for _ in range(TRIES - 1):
                    future = pending.future
                    with suppress(CancelledError):
                        return future.result()
                    pending.put_again(future)
                return pending.future.result()

        return wait

    def _check_importable(self, function: Callable[[Any, Any], Any]) -> None:
        """Import the function's module on the workers: an item whose module is missing would end them."""
        if (module := function.__module__) not in self._imported_modules:
            self.client.run(exec, f"import {module}")
            self._imported_modules.add(module)

    @contextmanager
    def _dask_errors_as_ours(self) -> Iterator[None]:
        """Raise errors of Dask as errors of ours, with advice."""
        from distributed import KilledWorker
        from distributed.comm.core import CommClosedError

        try:
            yield
        except ModuleNotFoundError:
            raise _cannot_import(self.executor) from None
        except (KilledWorker, CancelledError, CommClosedError, TimeoutError) as error:
            raise _lost_workers(self.executor, error) from None


@contextmanager
def _open_dask(executor: Executor) -> Iterator[_DaskCrew]:
    """Connect to a Dask cluster that runs."""
    try:
        from distributed import Client
    except ModuleNotFoundError:
        raise _not_installed("dask") from None
    _check_listening(executor)
    try:
        client = Client(executor.address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"--address {executor.address}: no Dask cluster to use ({_one_line(error)})"
        ) from None
    with client:
        yield _DaskCrew(client, executor)


# -- what is wrong with a cluster


def _check_listening(executor: Executor) -> None:
    """Refuse an address where nobody listens.

    Ray's and Dask's clients would wait for minutes there, or end this process.
    """
    try:
        socket.create_connection(executor.host_and_port(), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise InputError(
            f"--address {executor.address}: nobody answers there ({error.strerror or error}); "
            f"expected a {executor.name} cluster at {EXAMPLE_ADDRESSES[executor.name]}"
        ) from None


def _not_installed(name: str) -> InputError:
    """The error for a package that is missing here."""
    return InputError(
        f"--executor {name}: {name} is not installed; pip install 'fleetplan[cluster]' or use --executor "
        "processes"
    )


def _cannot_import(executor: Executor) -> InputError:
    """The error for a package that is missing on the cluster."""
    return InputError(
        f"--address {executor.address}: the {executor.name} workers there cannot import what they are to do; "
        f"install fleetplan {__version__} on them"
    )


def _lost_workers(executor: Executor, error: BaseException) -> PlannerError:
    """The error for workers of a cluster that died more often than it retries."""
    return PlannerError(
        f"--executor {executor.name}: workers of {executor.address} died and it gave up "
        f"({_one_line(error)}); look for want of memory in the cluster's logs"
    )


def _one_line(error: BaseException) -> str:
    """The error's text on one line, cut after LONGEST_REASON_CHARS."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON_CHARS else f"{text[:LONGEST_REASON_CHARS]} ..."
