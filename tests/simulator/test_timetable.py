"""Sizes known beforehand: what is asked for when, by hand and against the definition."""

from __future__ import annotations

import numpy as np
import pytest
from elastic_runs import simulate_elastic
from simulations import LLM, make_latency, make_pool, make_trace

from planner.errors import InputError
from planner.fleet import Fleet
from planner.simulator.elastic import ElasticPool
from planner.simulator.timetable import Timetable


def test_workers_are_ready_in_time() -> None:
    """A start takes 10 s. 2 from 30 on: asked for at 20. 4 from 100 on: at 90. 1 from 200 and 3 from 205 on
    are a valley of 5 s, which is not worth a start: one is given up at 200."""
    fleet = Fleet(LLM, (make_pool(make_latency()),))
    trace = make_trace(np.arange(0, 300, 5.0), np.ones(60), np.ones(60))
    table = Timetable([30, 100, 200, 205], [[2], [4], [1], [3]], [10.0])
    run = simulate_elastic(fleet, trace, [ElasticPool(10.0, most=4, first=0)], table)
    ready = [(s.requested_s, s.ready_s) for s in run.spans]
    assert ready == [(20.0, 30.0), (20.0, 30.0), (90.0, 100.0), (90.0, 100.0)]
    assert sorted(s.given_up_s for s in run.spans)[0] == 200.0
    assert run.requested_s.tolist() == [0.0, 20.0, 30.0, 90.0, 100.0, 190.0, 195.0, 200.0, 205.0]
    assert run.requested_sizes[:, 0].tolist() == [0, 2, 2, 4, 4, 4, 4, 3, 3]


def test_what_is_due_early_comes_late() -> None:
    """3 workers from 5 on, and a start takes 20 s: asked for at 0, ready at 20."""
    fleet = Fleet(LLM, (make_pool(make_latency()),))
    table = Timetable([5.0], [[3]], [20.0])
    run = simulate_elastic(fleet, make_trace([0.0, 30.0], [1, 1], [1, 1]), [ElasticPool(20.0, most=3)], table)
    assert [(s.requested_s, s.ready_s) for s in run.spans] == [(0.0, 0.0), (0.0, 20.0), (0.0, 20.0)]


@pytest.mark.parametrize("seed", range(20))
def test_asks_for_the_most_of_the_time_of_a_start(seed: int) -> None:
    """Against the definition, at random moments; and between two of its times it asks for the same."""
    rng = np.random.default_rng(seed)
    times_s = np.cumsum(rng.uniform(0.5, 10, 8))
    sizes = rng.integers(0, 5, (8, 2)).tolist()
    start_s = rng.uniform(0, 15, 2).tolist()
    table = Timetable(times_s.tolist(), sizes, start_s)
    table.start([2, 3])

    def target(v: float) -> list[int]:
        return [2, 3] if v < times_s[0] else sizes[int(np.searchsorted(times_s, v, side="right")) - 1]

    for u in rng.uniform(0, 80, 60).tolist():
        asked = [
            max(target(v)[p] for v in [u, u + start, *(t for t in times_s if u < t <= u + start)])
            for p, start in enumerate(start_s)
        ]
        assert table.sizes_at(u) == tuple(asked)
        before = max((t for t in [0.0, *table._changes_s] if t <= u), default=0.0)
        assert table.sizes_at(before) == tuple(asked)
        assert table.next_s(u) > u


def test_bad_timetables_are_refused() -> None:
    with pytest.raises(InputError, match="2 times and 1 sizes"):
        Timetable([1.0, 2.0], [[1]], [0.0])
    with pytest.raises(InputError, match="must be >= 0 and rise"):
        Timetable([2.0, 2.0], [[1], [2]], [0.0])
    with pytest.raises(InputError, match="of 2 pools"):
        Timetable([1.0], [[1]], [0.0, 0.0])
