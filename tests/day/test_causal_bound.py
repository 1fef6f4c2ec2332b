"""What a rule without a look ahead pays at least: by hand, and against all rules of a small game."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from small_days import random_day

from planner.day.search.causal_bound import CausalBound, causal_bound, reacting_bound
from planner.day.search.day_runs import DayRuns


def bound_of(needs: list[list[int]], least: tuple[int, ...] = (1,)) -> CausalBound:
    """Windows of 600 s; a worker costs 6 USD/h, which is 1 USD per window."""
    lengths_s = np.full(len(needs), 600.0)
    return CausalBound(np.array(needs), lengths_s, least, lambda sizes: 6.0 * sum(sizes))


def test_windows_that_are_alike_cost_what_they_need() -> None:
    """Six windows that need 2 workers each: 12 USD, and 6 USD where all may be missed."""
    bound = bound_of([[2]] * 6)
    assert bound.least_usd(0, 3600.0) == pytest.approx(12.0)
    assert bound.least_usd(6, 3600.0) == pytest.approx(6.0)


def test_one_window_in_six_that_needs_more_is_paid_in_all_six() -> None:
    """Needs 1 1 1 1 1 3 in any order: 18 USD keep all; half a window missed is half of the way up from 6."""
    bound = bound_of([[1], [1], [1], [1], [1], [3]])
    assert bound.least_usd(0, 3600.0) == pytest.approx(18.0)
    assert bound.least_usd(0.5, 3600.0) == pytest.approx(12.0)
    assert bound.least_usd(0, 600.0) == pytest.approx(8.0)  # who knows each window pays 5 x 1 + 3


def test_the_hour_whose_windows_are_cheapest_to_keep_is_kept_first() -> None:
    """Hour A: three of six need 2 (6 USD keep 3 windows); hour B: one of six needs 2 (6 USD keep one).

    Of 4 that would be missed one may be: A is bought, 12 + 6 USD.
    """
    bound = bound_of([[2], [1]] * 3 + [[1]] * 5 + [[2]])
    assert bound.least_usd(1, 3600.0) == pytest.approx(18.0)


def test_an_hour_that_is_not_known_costs_its_first_window() -> None:
    """An hour that needs 1 and one that needs 3. Who is told pays 6 + 18 USD. Who is not has 3 in the first
    window of both, and then knows: 2 USD more. Half a window missed saves these 2: 24 USD for both."""
    bound = bound_of([[1]] * 6 + [[3]] * 6)
    assert bound.least_usd(0, 3600.0) == pytest.approx(24.0)
    assert bound.least_usd_of_unknown_blocks(0, 3600.0) == pytest.approx(26.0)
    assert bound.least_usd_of_unknown_blocks(0.5, 3600.0) == pytest.approx(24.0)
    # Blocks that are drawn from themselves alone are known.
    assert bound.least_usd_of_unknown_blocks(0, 3600.0, 3600.0) == pytest.approx(24.0)


@pytest.mark.parametrize("seed", range(8))
def test_not_knowing_the_hour_never_costs_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bound = bound_of(rng.integers(1, 5, (int(rng.integers(7, 40)), 1)).tolist())
    for missed in (0.0, 0.4, 1.0, 3.0):
        unknown_usd = bound.least_usd_of_unknown_blocks(missed, 3600.0)
        assert unknown_usd is not None and unknown_usd >= bound.least_usd(missed, 3600.0) - 1e-9


def test_no_rule_that_learns_the_hour_costs_less() -> None:
    """Two hours of two windows, (1, 2) and (2, 3): all rules that see the need of the first window, over all
    days: each hour is either, each of its windows is either of that hour's."""
    bound = bound_of([[1], [2], [2], [3]])
    hours, sizes = ((1, 2), (2, 3)), (1, 2, 3)
    for first, *after in itertools.product(sizes, repeat=4):
        usd = missed = 0.0
        for hour in hours:
            for one, two in itertools.product(hour, repeat=2):
                second = after[one - 1]
                usd += (first + second) / 8
                missed += ((one > first) + (two > second)) / 8
        assert 2 * usd >= bound.least_usd_of_unknown_blocks(2 * missed, 1200.0) - 1e-9  # type: ignore[operator]


def test_too_many_kinds_of_windows_are_not_counted_out() -> None:
    """In an hour of 60 windows there are too many different things to have seen."""
    needs = [[1 + v % 5] for v in range(60)]
    bound = CausalBound(np.array(needs), np.full(60, 60.0), (1,), lambda sizes: 6.0 * sum(sizes))
    assert bound.least_usd_of_unknown_blocks(0, 3600.0) is None


@pytest.mark.parametrize("seed", range(6))
def test_a_rule_that_sees_a_window_whole_needs_less(seed: int) -> None:
    """If a start-up lasts a window, what it sees comes too late: the same needs, and nothing needed later. If
    it lasts no time, everything is needed later."""
    day = random_day(seed, disaggregated=seed % 3 == 2, windows=3, most=3)

    def bounds(start_s: float) -> list[CausalBound]:
        pools = [replace(pool, start_s=start_s, warm=0, least=1) for pool in day.pools]
        runs = DayRuns(day.fleet, day.trace, day.slo, pools)
        both = [causal_bound(runs), reacting_bound(runs)]
        return [bound for bound in both if bound is not None]

    plain, same = bounds(float(np.diff(day.edges_s).max()))
    assert same.later_needs is not None and np.array_equal(plain.needs, same.needs)
    assert (same.later_needs == 1).all()
    assert same.least_usd(0.0, 3600.0) == pytest.approx(plain.least_usd(0.0, 3600.0))
    plain, known = bounds(0.0)
    assert known.later_needs is not None and np.array_equal(plain.needs, known.later_needs)
    assert (known.needs == 1).all()
    assert known.least_usd(0.0, 3600.0) == pytest.approx(plain.least_usd(0.0, 1.0))  # Every window is known.
    plain, less = bounds(float(plain.lengths_s.max()) / 4)
    assert less.later_needs is not None and (less.later_needs <= plain.needs).all()
    assert (less.needs <= plain.needs).all() and less.least_usd(0.0, 3600.0) <= plain.least_usd(
        0.0, 3600.0
    ) + 1e-9


def test_what_a_window_needs_after_a_start_up_is_paid_where_the_window_is_kept() -> None:
    """A start-up lasts a quarter of a window. Needs at first 2 1, later 1 3: 2 workers are paid for half of
    both windows, and in the second 3 for three quarters: 1.5 + 2.75 USD. One of two missed saves 1.25."""
    bound = replace(bound_of([[2], [1]]), later_needs=np.array([[1], [3]]), fixed_frac=0.25)
    assert bound.least_usd(0, 3600.0) == pytest.approx(4.25)
    assert bound.least_usd(1, 3600.0) == pytest.approx(3.0)
    assert bound.least_usd(2, 3600.0) == pytest.approx(2.0)


@pytest.mark.parametrize("first_frac", [0.25, 0.5, 0.65, 1.0])
def test_no_rule_that_changes_sizes_a_start_up_later_costs_less(first_frac: float) -> None:
    """All such rules on days of windows of three kinds, each a third of the windows. A worker is paid from a
    start-up before it is ready."""
    needs, later = np.array([[1], [2], [1]]), np.array([[1], [2], [3]])
    bound = replace(bound_of(needs.tolist()), later_needs=later, fixed_frac=first_frac)
    steps = 20
    first = round(first_frac * steps)
    for x, *ys in itertools.product((1, 2, 3), repeat=4):
        usd = missed = 0.0
        for kind in range(3):
            ready = np.array([x] * first + [ys[kind]] * (steps - first) + [x] * first)
            paid = [ready[k : k + first + 1].max() for k in range(steps)]
            usd += sum(paid) / steps
            missed += needs[kind, 0] > x or (first < steps and later[kind, 0] > ys[kind])
        if first < steps or (later <= x).all():
            assert usd >= bound.least_usd(missed, 3600.0) - 1e-9
            assert usd >= bound.least_usd_of_unknown_blocks(missed, 3600.0) - 1e-9  # type: ignore[operator]


def test_a_rule_may_start_workers_warm() -> None:
    """The bound took cold starts for every worker, and a rule with one warm node could cost less."""
    day = random_day(0, disaggregated=False, windows=3, most=3)

    def bound(start_s: float, warm: int = 0, warm_start_s: float = 0.0) -> CausalBound:
        pools = [
            replace(pool, least=1, start_s=start_s, warm=warm, warm_start_s=warm_start_s)
            for pool in day.pools
        ]
        found = reacting_bound(DayRuns(day.fleet, day.trace, day.slo, pools))
        assert found is not None
        return found

    window_s = float(day.slo.every_s or 0.0)
    warm = bound(window_s, warm=1, warm_start_s=window_s / 8)
    assert (warm.needs == bound(window_s / 8).needs).all()
    assert warm.least_usd(0.0, 3600.0) < bound(window_s).least_usd(0.0, 3600.0)


def test_no_rule_on_days_of_two_kinds_of_windows_costs_less() -> None:
    """All rules that look at the window before, over all 4^3 days of 3 windows out of 4, with two pools."""
    needs = np.array([[1, 1], [2, 1], [1, 2], [1, 1]])
    bound = bound_of(needs.tolist(), (1, 1))
    sizes = [(1, 1), (2, 1), (1, 2), (2, 2)]
    days = list(itertools.product(range(4), repeat=3))
    for rule in itertools.product(sizes, repeat=3):  # after nothing, a window of need (1, 1), any other
        usd = missed = 0.0
        for day in days:
            for before, window in zip((None, *day), day, strict=False):
                own = rule[0 if before is None else 1 if needs[before].sum() == 2 else 2]
                usd += sum(own) / len(days)
                missed += bool((needs[window] > own).any()) / len(days)
        assert usd * 4 / 3 >= bound.least_usd(missed * 4 / 3, 3600.0) - 1e-9
