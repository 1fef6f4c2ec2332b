"""Work, not the clock, ends a search: the same bytes on a machine that is slow and on any number of cores."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from plans import CATALOG
from questions import DOCUMENT, traffic
from shares import some

import fleetplan
from planner.parallel.executors import Executor, working_on
from planner.search.oracle import simulation_queries, work_clock
from planner.search.oracle.deterministic_parallel import charge_effort, run_wave
from planner.search.oracle.work_clock import is_over, is_time_limit_reached, now_s, time_limit, work_limit_s

QUESTION = DOCUMENT | {"fleet": {"gpus": ["h100-80g", "a100-80g"]}, "safety": {"kept_in": 0.9}}


def planned(folder: Path, executor: str) -> dict[str, bytes]:
    with working_on(Executor(executor)):
        fleetplan.plan(QUESTION, traffic(requests=150), catalog=CATALOG).save(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("work_s", some([0.15, 0.5], 1))
def test_a_search_that_work_ends_is_the_same_though_simulations_take_any_time(
    work_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every simulation is held up by up to 4 ms, as beside other work, so threads pass each other."""
    monkeypatch.setattr(work_clock, "WORK_S", work_s)
    expected = planned(tmp_path / "idle", "serial")
    answer, rng = simulation_queries.TraceSimulations.answer, random.Random(0)

    def held_up(self: Any, query: Any) -> Any:
        time.sleep(rng.uniform(0, 0.004))
        return answer(self, query)

    monkeypatch.setattr(simulation_queries.TraceSimulations, "answer", held_up)
    assert planned(tmp_path / "busy", "threads:4") == expected
    assert b"best found" in expected["plan.yaml"]


def test_the_clock_goes_by_work_alone() -> None:
    """A million requests at EFFORT_S each; beyond the deadline the search is over, the net is not reached."""
    with time_limit(600.0) as deadline:
        began = now_s()
        time.sleep(0.01)
        assert now_s() == began and not is_over(deadline)
        charge_effort(1_000_000)
        assert now_s() - began == pytest.approx(1e6 * work_clock.EFFORT_S)
        assert is_over(began + 0.5e6 * work_clock.EFFORT_S) and not is_time_limit_reached()


def test_the_net_ends_all_deadlines_and_says_so() -> None:
    with time_limit(600.0) as outer:
        with time_limit(0.0):
            assert is_over(float("inf")) and is_time_limit_reached()
            with time_limit(60.0, grace=True) as deadline:
                assert not is_over(deadline)
        assert is_time_limit_reached()
        assert is_over(outer)


@pytest.mark.parametrize(
    ("limit_s", "work_s"), [(20.0, 20.0), (120.0, 120.0), (600.0, 120.0), (3600.0, 720.0)]
)
def test_work_grows_with_a_long_time_limit(limit_s: float, work_s: float) -> None:
    """A fifth of the limit, so that a machine five times as slow comes to the same end; at most the limit."""
    assert work_limit_s(limit_s) == work_s


@pytest.mark.parametrize("executor", ["threads:1", "threads:2"])
def test_the_first_error_in_order_is_raised_and_all_tasks_run(executor: str) -> None:
    """Of three tasks two fail; on two threads the second one fails before the first."""
    second_failed, ended = threading.Event(), []

    def first() -> None:
        if executor == "threads:2":
            assert second_failed.wait(60)
        raise ValueError("first")

    def second() -> None:
        second_failed.set()
        raise ValueError("second")

    with working_on(Executor(executor)), pytest.raises(ValueError, match="first"):
        run_wave([first, second, lambda: ended.append("third")])
    assert ended == ["third"]
