"""A plan is the same to the byte wherever it is simulated, and however often workers die."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plans import CATALOG, LLM, a_pool
from questions import DOCUMENT, traffic

import fleetplan
from benchmarks import executors as benchmark
from planner.domain import Limit, Slo
from planner.fleet import Network, Policies
from planner.parallel import executors
from planner.parallel.executors import Executor, working_on
from planner.search.oracle import deterministic_parallel
from planner.search.oracle.deterministic_parallel import (
    charge_query,
    effort_spent,
    remember_verdict,
    run_wave,
)
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.verdict_cache import is_looser
from planner.search.oracle.work_clock import time_limit
from planner.solvers.master import Option

QUESTION = DOCUMENT | {"fleet": {"gpus": ["h100-80g"]}, "safety": {"kept_in": 0.9}}


def planned(folder: Path) -> dict[str, bytes]:
    """The files of a plan for production."""
    fleetplan.plan(QUESTION, traffic(requests=100), catalog=CATALOG).save(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    with working_on(Executor("serial")):
        return planned(tmp_path_factory.mktemp("serial"))


@pytest.mark.long
def test_threads_and_processes_give_the_same_files_though_one_is_killed(
    expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process is killed as the 40th question is asked; every question of a trace is asked there."""
    with working_on(Executor("threads:2")):
        assert planned(tmp_path / "threads") == expected
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(executors, "MEMORY_FOLDER", memory)  # Tests beside this one use the usual folder.
    asked: list[object] = []
    start = executors._ProcessCrew.start_item

    def counted(self: Any, *what: Any) -> Any:
        asked.append(what)
        if len(asked) == 40:
            os.kill(next(iter(self._pool._processes)), signal.SIGKILL)
        return start(self, *what)

    monkeypatch.setattr(executors._ProcessCrew, "start_item", counted)
    with working_on(Executor("processes:2")):
        assert planned(tmp_path / "processes") == expected
    assert len(asked) > 60
    assert not list(memory.iterdir())


@pytest.fixture
def dask() -> Iterator[Executor]:
    pytest.importorskip("distributed", reason="dask is not installed (extra `cluster`)")
    with benchmark.dask() as (_, name, _, address):
        yield Executor(name, address)


@pytest.fixture
def ray() -> Iterator[Executor]:
    pytest.importorskip("ray", reason="ray is not installed (extra `cluster`)")
    with benchmark.ray() as (_, name, _, address):
        yield Executor(name, address)


@pytest.mark.parametrize("name", [pytest.param("dask", marks=pytest.mark.slow), "ray"])
def test_clusters_give_the_same_files(
    name: str, request: pytest.FixtureRequest, expected: dict[str, bytes], tmp_path: Path
) -> None:
    executor: Executor = request.getfixturevalue(name)
    with working_on(executor):
        assert planned(tmp_path) == expected


def test_what_was_told_stands_in_the_order_of_the_tasks() -> None:
    """Though the first is the last to be done; what was told before stays in its place."""
    told: dict[str, bool] = {"old": True}
    done = [threading.Event() for _ in range(3)]

    def look(k: int) -> None:
        if k < 2:
            done[k + 1].wait(10)
        remember_verdict(told, "old", verdict=False)
        remember_verdict(told, f"new {k}", verdict=k == 1)
        done[k].set()

    with working_on(Executor("threads:3")):
        run_wave([lambda k=k: look(k) for k in range(3)])  # type: ignore[misc]
    assert list(told.items()) == [("old", False), ("new 0", False), ("new 1", True), ("new 2", False)]


@pytest.mark.parametrize("name", ["serial", "threads:4"])
def test_a_task_reckons_with_its_own_effort_alone(name: str) -> None:
    """100 were spent before. Each of four tasks asks its own question for 10 and a common one for 5, which
    one of them pays: 100 + 2 x (10 + 5), whoever is first. Five questions were paid for in the end."""
    seen = dict[int, int]()

    def look(k: int) -> None:
        for question, cost in ((k, 10), ("common", 5)):
            is_new = question not in (own := deterministic_parallel.current_task()).wave.cost  # type: ignore[union-attr]
            charge_query(question, cost if is_new else None)
            assert own is not None
        seen[k] = effort_spent()

    with working_on(Executor(name)), time_limit(600.0):
        charge_query("before", 100)
        run_wave([lambda k=k: look(k) for k in range(4)])  # type: ignore[misc]
        spent = effort_spent()
    assert seen == dict.fromkeys(range(4), 130)
    assert spent == 100 + 4 * 10 + 5


def test_decode_pools_alone_go_by_the_largest_of_several_ttft_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """p99 2 s and p50 1 s allow a longer wait than p99 1 s and p50 1 s, so a failure under the second
    is none under the first. As one line per metric and percentile both were twice 1 s.
    """
    judged: list[Slo] = []

    def answer(_: Oracle, own: object, fleet: object, slo: Slo, **query: bool) -> bool:
        judged.append(slo)
        return True

    monkeypatch.setattr(Oracle, "_simulate_once", answer)
    worker = a_pool("dec", "decode", "h100-80g", 2, 1).type
    for largest_s in (2.0, 1.0):
        slo = Slo((Limit("ttft", 0.99, largest_s), Limit("ttft", 0.5, 1.0)))
        oracle = Oracle(LLM, traffic(requests=5), slo, Network(), Policies())
        oracle.decode_keeps_up_alone(((Option("decode", worker, 1.0), 1),))
    loose, strict = judged
    assert is_looser(loose, strict) and not is_looser(strict, loose)
