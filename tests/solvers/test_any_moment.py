"""The least that is paid where sizes change at any moment, by hand and against all sequences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from planner.solvers.any_moment import Needs, cheapest_levels, priced_sizes, prices_by_level, shortest_needs
from planner.solvers.paid_work import LeastPaid
from planner.solvers.pool_sizes import DayTerms, PoolTerms
from planner.solvers.whole_nodes import PricedNode

EDGES_S = np.array([0.0, 1000.0])
POOL = PoolTerms(start_s=300.0, least=1, most=3, usd_per_h=3600.0)  # 1 USD per second
DAY = DayTerms(EDGES_S, (POOL,))


def work_of(in_stretch: Sequence[float], edges_s: Sequence[float]) -> LeastPaid:
    floors = np.array(in_stretch)
    later = np.cumsum(floors[::-1])[::-1]
    return LeastPaid(float(later[0]), 0.0, np.array(edges_s), floors, later)


NO_WORK = work_of([0.0], [0.0, 1000.0])


def bound_usd(day: DayTerms, cuts: Sequence[Needs], work: LeastPaid = NO_WORK) -> float:
    return cheapest_levels(day, cuts, work, gap_frac=0.0, time_limit_s=120.0).bound_usd


@pytest.mark.parametrize(
    ("cuts", "seconds"),
    [
        ([], 1000),
        # A worker that is ready for a moment was paid for a start-up; a third one as well.
        ([((500, 600, 0, 1),)], 1000 + 300),
        ([((500, 600, 0, 1),), ((550, 700, 0, 2),)], 1000 + 2 * 300),
        # Both needs are met from 550 to 600 s; of these two, from 600 s on, when the first ends.
        ([((500, 600, 0, 1),), ((550, 700, 0, 1),)], 1000 + 300),
        ([((500, 600, 0, 1),), ((700, 800, 0, 1),)], 1000 + 300 + 100),
        # One of the two is enough, and the second is met by a worker that is there anyway.
        ([((500, 600, 0, 1), (700, 800, 0, 1)), ((750, 760, 0, 1),)], 1000 + 300),
        # A worker is better asked for twice than kept for more than a start-up.
        ([((400, 500, 0, 1),), ((900, 950, 0, 1),)], 1000 + 2 * 300),
        # Who is ready at 100 s was there from the beginning, as nobody starts so soon.
        ([((100, 200, 0, 1),)], 1000 + 100),
        ([((500, 600, 0, 0),)], 1000),
    ],
)
def test_levels_are_paid_from_a_start_up_before_they_are_needed(cuts: list[Needs], seconds: float) -> None:
    assert bound_usd(DAY, cuts) == pytest.approx(seconds, rel=1e-5)


def test_work_of_a_stretch_is_paid_beyond_what_cuts_ask_for() -> None:
    """A start-up of 300 s ends at 500 s or later. Counted from 190 to 600 s, as its points are as far apart,
    it pays 310 s of the 400 s more that the first half asks for, and all of 100 s in the second.
    """
    cuts: list[Needs] = [((500, 600, 0, 1),), ((490, 610, 0, 1), (500, 600, 0, 1))]
    work = work_of([900.0, 600.0], [0.0, 500.0, 1000.0])
    assert bound_usd(DAY, cuts, work) == pytest.approx(1000 + 300 + 90, rel=1e-5)
    assert bound_usd(DAY, [], work) == pytest.approx(1500, rel=1e-5)


@pytest.mark.parametrize(
    ("start_s", "needs", "units"),
    [
        (300.0, [(1000.0, 1100.0)], 1),
        # From 700 to 2000 s are three begun units of 600 s, and two lives are one unit each.
        (300.0, [(1000.0, 1000.0), (2000.0, 2000.0)], 2),
        # From 500 to 1300 s are two; by the second it was 800 s.
        (500.0, [(1000.0, 1000.0), (1300.0, 1300.0)], 2),
        (300.0, [(1000.0, 1000.0), (1250.0, 1250.0)], 1),
    ],
)
def test_begun_units_are_paid_whole(start_s: float, needs: list[tuple[float, float]], units: int) -> None:
    """By the second the second worker beside the least cost as little as a start-up."""
    pool = PoolTerms(start_s=start_s, least=1, most=2, usd_per_h=3600.0)
    day = DayTerms(np.array([0.0, 7100.0]), (pool,), unit_s=600.0)
    cuts = [((begin_s, end_s, 0, 1),) for begin_s, end_s in needs]
    assert bound_usd(day, cuts) == pytest.approx(600 * (12 + units), rel=1e-5)
    assert bound_usd(day, []) == pytest.approx(600 * 12, rel=1e-5)


def test_begun_units_of_a_node_are_paid_whole() -> None:
    """Nodes of 8 GPUs at 1 USD/h; of three workers of 4 the first and the third rent one."""
    node = PricedNode("h100", 8, 1.0, 0.0)
    pool = PoolTerms(300.0, 0, 3, 4.0, 4, "h100", node)
    for workers, usd in ((1, 8.0), (2, 8.0), (3, 16.0)):
        cuts = [((3000.0, 3000.0, 0, n),) for n in range(workers)]
        day = DayTerms(np.array([0.0, 7200.0]), (pool,), unit_s=3600.0)
        assert bound_usd(day, cuts) == pytest.approx(usd, rel=1e-5)


def test_the_first_worker_of_a_node_pays_for_the_node() -> None:
    """Nodes of 8 GPUs at 1 USD/h each, idle ones too; workers of 4."""
    node = PricedNode("h100", 8, 1.0, 0.0)
    day = DayTerms(EDGES_S, (PoolTerms(300.0, 1, 4, 4.0, 4, "h100", node),))
    assert prices_by_level(day, 0).tolist() == [0, 8, 8, 16, 16]
    assert priced_sizes(day, 0) == [2, 4]


def test_a_need_on_a_level_that_costs_nothing_is_paid_with_the_level_below() -> None:
    """Nodes of two workers at 3600 USD/h. The second worker stands beside the first, which is always there;
    the fourth cost nothing without the third.
    """
    node = PricedNode("h100", 8, 450.0, 0.0)
    day = DayTerms(EDGES_S, (PoolTerms(300.0, 1, 4, 1800.0, 4, "h100", node),))
    for n, seconds in ((1, 1000), (2, 1300), (3, 1300)):
        cuts: list[Needs] = [((500, 600, 0, n),)]
        assert bound_usd(day, cuts) == pytest.approx(seconds, rel=1e-5)


def test_needs_that_a_shorter_one_implies_are_left_out() -> None:
    cuts: list[Needs] = [((0, 100, 0, 1),), ((10, 90, 0, 1),), ((10, 95, 0, 2),), ((20, 99, 0, 1),)]
    assert sorted(shortest_needs([*cuts, cuts[0]])) == [cuts[1], cuts[2], cuts[3]]


def least_by_hand(cuts: Sequence[Needs], start_s: int, length_s: int) -> float:
    """Over all sets of whole seconds at which a second worker is ready, at 1 USD/s: paid from a start-up
    before, or from time zero; the first worker is always there.
    """
    best = float("inf")
    for up in itertools.product((False, True), repeat=length_s):
        moments = [t for t, is_up in enumerate(up) if is_up]
        if any(not any(a <= t < b for a, b, _, _ in cut for t in moments) for cut in cuts):
            continue
        paid = {u for t in moments for u in range(max(t - start_s, 0), t)}
        best = min(best, length_s + len(paid))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_no_sizes_that_meet_the_cuts_cost_less(seed: int) -> None:
    """A moment of a second stands for all of it, so times by hand are at most a second per life longer."""
    rng = np.random.default_rng(seed)
    length_s, start_s = 12, int(rng.integers(2, 5))
    day = DayTerms(np.array([0.0, length_s]), (PoolTerms(float(start_s), 1, 2, 3600.0),))
    cuts: list[Needs] = []
    for _ in range(4):
        begins = rng.choice(length_s - 3, size=int(rng.integers(1, 3)), replace=False).tolist()
        cuts.append(tuple((float(a), float(a + rng.integers(1, 4)), 0, 1) for a in begins))
    bound = bound_usd(day, cuts, work_of([0.0], [0.0, float(length_s)]))
    by_hand = least_by_hand(cuts, start_s, length_s)
    assert by_hand - 3 <= bound <= by_hand + 1e-3
