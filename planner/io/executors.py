"""One function over many items: in this process, in processes of this machine, or on a cluster.

    serial   one item after the other, here
    loky     processes of this machine, one per CPU (joblib)
    ray      a running Ray cluster,  address auto, host:6379 or ray://host:10001
    dask     a running Dask cluster, address tcp://host:8786

What all items share (a trace, a fleet) travels once, not with every item: joblib maps its large arrays into
memory, `ray.put` and Dask's `scatter` lay it onto the cluster. A cluster's workers need this package, in the
version of whoever asks.

A worker that dies: Ray and Dask give its item to another one, three times at most. loky gives up at once, as
a process of one's own machine mostly dies of want of memory. Both end in one PlannerError.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from planner import __version__
from planner.errors import InputError, PlannerError

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")

EXAMPLES = {"ray": "auto, host:6379 or ray://host:10001", "dask": "tcp://host:8786"}
NAMES = ("serial", "loky", *EXAMPLES)
ANSWER_S = 10.0  # a cluster that takes longer to say hello is not there
FIRST_WORKER_S = 60.0
LONGEST_REASON = 300
NO_LEAKS_TOLD = "ignore:resource_tracker:UserWarning"  # by loky's tracker, which cleans up after an interrupt
MAPPED = "64K"  # arrays above this go to loky's processes as a file mapped into memory


@dataclass(frozen=True, slots=True)
class Executor:
    """Where to compute; `address` is that of a Ray or Dask cluster, and must be given for these two."""

    name: str = "serial"
    address: str | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise InputError(f"--executor: must be one of {', '.join(NAMES)}, found {self.name!r}")
        if self.name not in EXAMPLES:
            if self.address is not None:
                raise InputError(f"--address {self.address}: is for ray and dask, not for {self.name}")
        elif self.address is None:
            raise InputError(
                f"--executor {self.name}: needs the cluster's --address, {EXAMPLES[self.name]}; "
                "loky uses the CPUs of this machine"
            )
        elif self.address != "auto" or self.name == "dask":
            self.host_and_port()

    def host_and_port(self) -> tuple[str, int]:
        """Of the address; raises InputError for what is none."""
        match = re.fullmatch(r"(?:\w+://)?\[?([^/\s\[\]]+)\]?:(\d{1,5})", self.address or "")
        if match is None or int(match[2]) > 65535:
            raise InputError(f"--address {self.address}: expected {EXAMPLES[self.name]}")
        return match[1], int(match[2])


SERIAL = Executor()


def run(
    function: Callable[[Shared, Item], Result],
    items: Sequence[Item],
    *,
    shared: Shared,
    executor: Executor = SERIAL,
) -> list[Result]:
    """[function(shared, item) for item in items], whatever the executor: same order, same values.

    `function` is one of a module, depends on nothing but its arguments and changes neither. What it raises is
    raised here, of several errors any one. Raises InputError where package or cluster are missing,
    PlannerError where workers die.
    """
    if executor.name == "loky":
        return _loky(function, items, shared)
    if executor.name == "ray":
        return _ray(function, items, shared, executor)
    if executor.name == "dask":
        return _dask(function, items, shared, executor)
    return [function(shared, item) for item in items]


def _loky(function: Callable[[Any, Any], Any], items: Sequence[Any], shared: Any) -> list[Any]:
    from joblib import Parallel, cpu_count, delayed

    workers = max(1, min(cpu_count(), len(items)))
    # copy on write: to a compiled function a read-only array is of another type
    parallel = Parallel(n_jobs=workers, backend="loky", max_nbytes=MAPPED, mmap_mode="c")
    try:
        with parallel:
            with _deaf_to_interrupts():
                parallel([delayed(int)()])  # starts all workers
            return list(parallel(delayed(function)(shared, item) for item in items))
    except BrokenProcessPool:
        raise PlannerError(
            f"--executor loky: one of {workers} processes died, most likely of want of memory; "
            "use a smaller --window, or --executor serial"
        ) from None


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Workers started in here inherit it: Ctrl-C reaches every process of a terminal, and we end them."""
    resource_tracker.ensure_running()  # its start would undo it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    known = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{known},{NO_LEAKS_TOLD}" if known else NO_LEAKS_TOLD
    try:
        yield
    finally:
        if known is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = known
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ray(
    function: Callable[[Any, Any], Any], items: Sequence[Any], shared: Any, executor: Executor
) -> list[Any]:
    try:
        import ray
    except ModuleNotFoundError:
        raise _not_installed("ray") from None
    if executor.address != "auto":
        _check_answer(executor)
    try:
        ray.init(executor.address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        raise InputError(f"--address {executor.address}: no Ray cluster to use ({_line(error)})") from None
    try:
        held = ray.put(shared)
        task = ray.remote(function)
        return list(ray.get([task.remote(held, item) for item in items]))
    except ray.exceptions.RayTaskError as error:
        if "failed to import on the worker" in str(error.cause):
            raise _cannot_import(executor) from None
        raise error.cause from None
    except ModuleNotFoundError:  # by its client
        raise _cannot_import(executor) from None
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise _lost_workers(executor, error) from None
    finally:
        ray.shutdown()


def _dask(
    function: Callable[[Any, Any], Any], items: Sequence[Any], shared: Any, executor: Executor
) -> list[Any]:
    try:
        from distributed import Client, KilledWorker
        from distributed.comm.core import CommClosedError
    except ModuleNotFoundError:
        raise _not_installed("dask") from None
    _check_answer(executor)
    try:
        client = Client(executor.address, timeout=ANSWER_S, set_as_default=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"--address {executor.address}: no Dask cluster to use ({_line(error)})") from None
    with client:
        try:
            client.wait_for_workers(1, timeout=FIRST_WORKER_S)
        except TimeoutError:
            raise InputError(
                f"--address {executor.address}: the Dask cluster has no worker; start one with `dask worker`"
            ) from None
        try:
            client.run(exec, f"import {function.__module__}")  # a worker that cannot would die of the task
            held = client.scatter(shared, broadcast=True, hash=False)
            futures = client.map(function, [held] * len(items), items, pure=False)
            return list(client.gather(futures))
        except ModuleNotFoundError:
            raise _cannot_import(executor) from None
        except (KilledWorker, CancelledError, CommClosedError, TimeoutError) as error:
            raise _lost_workers(executor, error) from None


def _check_answer(executor: Executor) -> None:
    """Both clients wait for minutes, or end the process, where nobody listens."""
    try:
        socket.create_connection(executor.host_and_port(), timeout=ANSWER_S).close()
    except OSError as error:
        raise InputError(
            f"--address {executor.address}: nobody answers there ({error.strerror or error}); "
            f"expected a {executor.name} cluster at {EXAMPLES[executor.name]}"
        ) from None


def _not_installed(name: str) -> InputError:
    return InputError(
        f"--executor {name}: {name} is not installed; pip install 'fleetplan[cluster]' or use --executor loky"
    )


def _cannot_import(executor: Executor) -> InputError:
    return InputError(
        f"--address {executor.address}: the {executor.name} workers there cannot import what they are to do; "
        f"install fleetplan {__version__} on them"
    )


def _lost_workers(executor: Executor, error: BaseException) -> PlannerError:
    return PlannerError(
        f"--executor {executor.name}: workers of {executor.address} died and it gave up ({_line(error)}); "
        "look for want of memory in the cluster's logs"
    )


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."
