"""Executors: the same list whatever computes it, on real processes and real local clusters."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from planner.errors import InputError, PlannerError
from planner.parallel import executors
from planner.parallel.executors import EXECUTOR_NAMES, SERIAL, Executor, current_crew, run_items, working_on

Numbers = npt.NDArray[np.int64]

RAY_HEAD = """
import sys
from ray.cluster_utils import Cluster
arguments = {"num_cpus": 2, "include_dashboard": False, "ray_client_server_port": int(sys.argv[1])}
cluster = Cluster(initialize_head=True, head_node_args=arguments)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def processes() -> Executor:
    return Executor("processes:2")


@pytest.fixture
def threads() -> Executor:
    return Executor("threads:2")


@pytest.fixture(scope="module")
def dask() -> Iterator[Executor]:
    """A scheduler and two worker processes."""
    distributed = pytest.importorskip("distributed", reason="dask is not installed (extra `cluster`)")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=logging.CRITICAL
    ) as cluster:
        yield Executor("dask", cluster.scheduler_address)


@pytest.fixture(scope="module")
def ray_addresses() -> Iterator[tuple[str, str]]:
    """A head node of two CPUs, as `ray start --head` makes it: its address, and its client server's."""
    pytest.importorskip("ray", reason="ray is not installed (extra `cluster`)")
    port = free_port()
    command = [sys.executable, "-c", RAY_HEAD, str(port)]
    here = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=here
    ) as head:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        wait_for(port)
        yield address, f"ray://127.0.0.1:{port}"
        head.communicate(timeout=60)  # its input ends, and with it the cluster


@pytest.fixture
def ray(ray_addresses: tuple[str, str]) -> Executor:
    return Executor("ray", ray_addresses[0])


@pytest.fixture(params=EXECUTOR_NAMES)
def executor(request: pytest.FixtureRequest) -> Executor:
    return the(str(request.param), request)


def the(name: str, request: pytest.FixtureRequest) -> Executor:
    """The executor of this name, its cluster started."""
    found: Executor = SERIAL if name == "serial" else request.getfixturevalue(name)
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def wait_for(port: int) -> None:
    """Until somebody listens there, a minute at most."""
    for _ in range(600):
        with socket.socket() as caller:
            if caller.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)


def slow_first_sum(numbers: Numbers, item: int) -> tuple[int, int]:
    """Later items are done earlier."""
    time.sleep(max(0.0, 0.2 - 0.05 * item))
    return item, int(numbers.sum()) + item


def process(folder: Path | None, item: int) -> int:
    """Where this item is computed. With a folder it waits for an item that another process computes, a minute
    at most: the first process could do all items before the second has started.
    """
    if folder is not None:
        (folder / str(os.getpid())).touch()
        until_s = time.monotonic() + 60
        while len(list(folder.iterdir())) < 2 and time.monotonic() < until_s:
            time.sleep(0.02)
    return os.getpid()


def times(numbers: Numbers, item: int) -> Numbers:
    return numbers * item


def refuse(limit: int, item: int) -> int:
    if item > limit:
        raise InputError(f"item {item} is above {limit}")
    return item


def touch(_: None, path: Path) -> None:
    path.touch()


def die(folder: Path, item: int) -> int:
    """Item 1 takes its process along, as often as there is no file to say that it has."""
    if item == 1 and not (folder / "died").exists():
        if (folder / "once").exists():
            (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


@pytest.mark.long
def test_results_come_in_the_order_of_the_items(executor: Executor) -> None:
    """0 + 1 + ... + 99,999 = 4,999,950,000, plus the item; the array (800 kB) is mapped by processes."""
    numbers = np.arange(100_000)
    total = 4_999_950_000
    results = run_items(slow_first_sum, range(6), shared=numbers, executor=executor)
    assert results == [(item, total + item) for item in range(6)]


ENDS_AT_ONCE = """
import operator, os
from planner.parallel.executors import Executor, current_crew, working_on

if __name__ == "__main__":
    with working_on(Executor("processes:2")):
        assert current_crew().start_item(operator.add, current_crew().put_value(3), 4)() == 7
        os._exit(0)
"""


def test_processes_whose_parent_ends_at_once_say_nothing(tmp_path: Path) -> None:
    """As after an interrupt that nothing heard for seconds: the trackers of what processes share tidy up."""
    (tmp_path / "ends.py").write_text(ENDS_AT_ONCE)
    done = subprocess.run(
        [sys.executable, "ends.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_items_give_no_results(executor: Executor) -> None:
    assert run_items(refuse, [], shared=0, executor=executor) == []


def test_work_is_done_elsewhere_unless_serial(executor: Executor, tmp_path: Path) -> None:
    is_here = executor.kind in ("serial", "threads")
    folder = None if is_here or os.cpu_count() == 1 else tmp_path
    processes = set(run_items(process, range(4), shared=folder, executor=executor))
    assert (os.getpid() in processes) == is_here
    if os.cpu_count() != 1:
        assert len(processes) == (1 if is_here else 2)


def test_an_error_of_the_function_is_raised_as_it_is(executor: Executor) -> None:
    with pytest.raises(InputError, match=r"^item 3 is above 2$"):
        run_items(refuse, range(4), shared=2, executor=executor)


@pytest.mark.long
@pytest.mark.parametrize("name", ["processes", "ray", "dask"])
def test_a_crew_gives_the_item_of_a_dead_worker_to_another(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    (tmp_path / "once").touch()
    assert run_items(die, range(3), shared=tmp_path, executor=the(name, request)) == [0, 1, 2]
    assert (tmp_path / "died").exists()


@pytest.mark.long
def test_what_lay_on_a_dead_dask_worker_is_laid_out_again() -> None:
    """Dask's memory manager leaves one copy of a value that was scattered; here the worker that has it dies,
    with what was computed from it. The sums are 0 + 1 + ... + 999 = 499,500, and twice that."""
    distributed = pytest.importorskip("distributed", reason="dask is not installed (extra `cluster`)")
    dask_config = pytest.importorskip("dask.config")
    with (
        dask_config.set({"distributed.scheduler.active-memory-manager.interval": "100ms"}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=logging.CRITICAL
        ) as cluster,
        working_on(Executor("dask", cluster.scheduler_address)),
    ):
        workers: Any = current_crew()
        held = workers.put_value(np.arange(1000))
        made = workers.put_result(times, held, 2)
        assert workers.start_item(slow_first_sum, made, 4)() == (4, 999_004)
        for _ in range(100):
            (has,) = workers.client.who_has([held.future]).values()
            if len(has) == 1:
                break
            time.sleep(0.1)
        os.kill(workers.client.run(os.getpid)[has[0]], signal.SIGKILL)
        waits = [
            workers.start_item(slow_first_sum, one, item) for item in range(4, 7) for one in (held, made)
        ]
        sums = [499_500, 999_000]
        assert [wait() for wait in waits] == [(i, total + i) for i in range(4, 7) for total in sums]


@pytest.mark.parametrize("name", ["processes", "ray", "dask"])
def test_a_worker_of_another_version_is_refused_before_anything_is_computed(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To the workers we are the odd one."""
    executor = the(name, request)
    monkeypatch.setattr(executors, "deciding_versions", lambda: "fleetplan 0.0.1")
    with pytest.raises(InputError, match=r"a worker has fleetplan .*numba .* this machine fleetplan 0\.0\.1"):
        run_items(touch, [tmp_path / "computed"], shared=None, executor=executor)
    assert not (tmp_path / "computed").exists()


@pytest.mark.parametrize("name", ["ray", "dask"])
def test_workers_without_the_code_are_told_apart(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that only this process has."""
    executor = the(name, request)
    here = types.ModuleType("here")
    exec("def first(shared, item):\n    return shared\n", here.__dict__)
    monkeypatch.setitem(sys.modules, "here", here)
    with pytest.raises(InputError, match=f"^--address {executor.address}: the {name} workers .* install"):
        run_items(here.first, [1], shared=1, executor=executor)


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ,
    reason="Ray's client server stalls beside a second head node; run -n 0",
)
def test_a_ray_cluster_is_reached_through_its_client_server(ray_addresses: tuple[str, str]) -> None:
    pytest.importorskip("grpc", reason="Ray's client needs grpcio (extra `cluster`)")
    executor = Executor("ray", ray_addresses[1])
    assert run_items(refuse, range(3), shared=9, executor=executor) == [0, 1, 2]
    with pytest.raises(InputError, match=r"^item 3 is above 2$"):
        run_items(refuse, range(4), shared=2, executor=executor)


@pytest.mark.parametrize(
    ("name", "address", "says"),
    [
        ("slurm", None, "--executor: must be one of serial, threads.:N., processes.:N., ray, dask, found 's"),
        ("ray:2", None, "--executor: must be one of serial"),
        ("processes:0", None, "--executor processes:0: expected a number from 1 to 1024 after processes:"),
        ("processes:", None, "--executor processes:: expected a number"),
        ("processes", "tcp://host:1", "--address tcp://host:1: is for ray and dask, not for processes"),
        ("ray", None, "--executor ray: needs the cluster's --address, auto, host:6379 or ray://host:10001"),
        ("dask", None, "--executor dask: needs the cluster's --address, tcp://host:8786"),
        ("dask", "auto", "--address auto: expected tcp://host:8786"),
        ("ray", "head", "--address head: expected auto, host:6379"),
        ("ray", "host:99999", "--address host:99999: expected auto"),
    ],
)
def test_an_executor_that_cannot_be_is_refused(
    name: str, address: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RAY_ADDRESS", "DASK_SCHEDULER_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(InputError, match=f"^{says}"):
        Executor(name, address)


def test_addresses_come_from_the_clusters_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "host:1")
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://host:2")
    assert (Executor("ray").address, Executor("dask").address) == ("host:1", "tcp://host:2")
    assert Executor("ray", "host:3").address == "host:3"


@pytest.mark.parametrize("name", ["ray", "dask"])
def test_where_nobody_listens_is_said_at_once(name: str) -> None:
    pytest.importorskip({"dask": "distributed"}.get(name, name), reason=f"{name} is not installed")
    address = f"127.0.0.1:{free_port()}"
    start_s = time.monotonic()
    with pytest.raises(InputError, match=f"^--address {address}: nobody answers there"):
        run_items(refuse, [1], shared=1, executor=Executor(name, address))
    assert time.monotonic() - start_s < 25  # Dask's own patience is 30 s.


@pytest.mark.parametrize(("name", "module"), [("ray", "ray"), ("dask", "distributed")])
def test_a_missing_package_is_named(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        InputError, match=rf"^--executor {name}: {name} is not installed; pip install .*cluster"
    ):
        run_items(refuse, [1], shared=1, executor=Executor(name, "127.0.0.1:1"))


@pytest.mark.parametrize("name", ["processes", "ray", pytest.param("dask", marks=pytest.mark.slow)])
def test_workers_that_go_on_dying_end_in_one_error(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Last of all, as a cluster needs a while to get over it."""
    with pytest.raises(PlannerError, match=f"^--executor {name}: .* died"):
        run_items(die, range(3), shared=tmp_path, executor=the(name, request))
