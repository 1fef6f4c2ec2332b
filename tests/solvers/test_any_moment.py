"""The least that is paid where sizes change at any moment, by hand and against all sequences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from planner.solvers.any_moment import least_sizes_at_any_moment
from planner.solvers.paid_work import LeastPaid
from planner.solvers.pool_sizes import Cut, DayTerms, PoolTerms

EDGES_S = np.arange(0.0, 1001.0, 100.0)
POOL = PoolTerms(start_s=300.0, least=1, most=3, usd_per_h=3600.0)  # 1 USD per second


def work_of(in_stretch: Sequence[float], edges_s: Sequence[float]) -> LeastPaid:
    floors = np.array(in_stretch)
    later = np.cumsum(floors[::-1])[::-1]
    return LeastPaid(float(later[0]), 0.0, np.array(edges_s), floors, later)


NO_WORK = work_of([0.0], [0.0, 1000.0])


def bound_usd(day: DayTerms, cuts: Sequence[Cut], work: LeastPaid = NO_WORK) -> float:
    return least_sizes_at_any_moment(day, cuts, work, gap_frac=0.0, time_limit_s=10.0).bound_usd


@pytest.mark.parametrize(
    ("cuts", "seconds"),
    [
        ([], 1000),
        # 3 ready at a moment from 500 to 600 s: asked for by 300 s, and paid until 500 s at least.
        ([((5, 0, 2),)], 1000 + 2 * 200),
        ([((5, 0, 2), (7, 0, 1))], 1000 + 200),
        ([((5, 0, 2),), ((6, 0, 1),)], 1000 + 2 * 200 + 100),
        # Who is ready from 100 to 200 s was there from the beginning, as nobody starts so soon.
        ([((1, 0, 2),)], 1000 + 2 * 100),
        ([((5, 0, 0),)], 1000),
    ],
)
def test_workers_are_paid_from_a_start_up_before_they_are_ready(cuts: list[Cut], seconds: float) -> None:
    assert bound_usd(DayTerms(EDGES_S, (POOL,)), cuts) == pytest.approx(seconds, rel=1e-5)


def test_work_of_a_stretch_is_paid_beyond_what_cuts_ask_for() -> None:
    """400 s more are paid from 300 to 500 s. The first half has 900 s of work, the second 600 s."""
    work = work_of([900.0, 600.0], [0.0, 500.0, 1000.0])
    assert bound_usd(DayTerms(EDGES_S, (POOL,)), [((5, 0, 2),)], work) == pytest.approx(1500, rel=1e-5)
    work = work_of([600.0, 600.0], [0.0, 500.0, 1000.0])
    assert bound_usd(DayTerms(EDGES_S, (POOL,)), [((5, 0, 2),)], work) == pytest.approx(1500, rel=1e-5)
    assert bound_usd(DayTerms(EDGES_S, (POOL,)), [], work) == pytest.approx(1200, rel=1e-5)


def cost_by_hand(day: DayTerms, workers: Sequence[int]) -> float:
    """By whole seconds, one pool at 1 USD/s."""
    start_s, edges_s = day.pools[0].start_s, day.edges_s
    total = 0.0
    for second in range(int(edges_s[-1])):
        paid = [
            size
            for t, size in enumerate(workers)
            if edges_s[t + 1] - start_s <= second and second + 1 <= edges_s[t]
        ]
        total += max([day.pools[0].least, *paid])
    return total


@pytest.mark.parametrize("seed", range(12))
def test_no_sequence_that_keeps_the_cuts_costs_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    start_s = float(rng.integers(25, 70))
    day = DayTerms(np.arange(0.0, 121.0, 20.0), (PoolTerms(start_s, 1, 3, 3600.0),))
    cuts: list[Cut] = []
    for _ in range(4):
        steps = rng.choice(6, size=int(rng.integers(1, 4)), replace=False)
        cuts.append(tuple((int(t), 0, int(rng.integers(0, 3))) for t in steps))
    kept = [
        workers
        for workers in itertools.product((1, 2, 3), repeat=6)
        if all(any(workers[t] > n for t, _, n in cut) for cut in cuts)
    ]
    least = min(cost_by_hand(day, workers) for workers in kept)
    assert bound_usd(day, cuts, work_of([0.0], [0.0, 120.0])) == pytest.approx(least, rel=1e-5)
