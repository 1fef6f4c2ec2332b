"""What a rule without a look ahead pays at least: by hand, and against all rules of a small game."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planner.day.search.causal_bound import CausalBound


def bound_of(needs: list[list[int]], least: tuple[int, ...] = (1,)) -> CausalBound:
    """Windows of 600 s; a worker costs 6 USD/h, which is 1 USD per window."""
    lengths_s = np.full(len(needs), 600.0)
    return CausalBound(np.array(needs), lengths_s, least, lambda sizes: 6.0 * sum(sizes))


def test_windows_that_are_alike_cost_what_they_need() -> None:
    """Six windows that need 2 workers each: 12 USD, and 6 USD where all may be missed."""
    bound = bound_of([[2]] * 6)
    assert bound.usd(0, 3600.0) == pytest.approx(12.0)
    assert bound.usd(6, 3600.0) == pytest.approx(6.0)


def test_one_window_in_six_that_needs_more_is_paid_in_all_six() -> None:
    """Needs 1 1 1 1 1 3 in any order: 18 USD keep all; half a window missed is half of the way up from 6."""
    bound = bound_of([[1], [1], [1], [1], [1], [3]])
    assert bound.usd(0, 3600.0) == pytest.approx(18.0)
    assert bound.usd(0.5, 3600.0) == pytest.approx(12.0)
    assert bound.usd(0, 600.0) == pytest.approx(8.0)  # who knows each window pays 5 x 1 + 3


def test_the_hour_whose_windows_are_cheapest_to_keep_is_kept_first() -> None:
    """Hour A: three of six need 2 (6 USD keep 3 windows); hour B: one of six needs 2 (6 USD keep one).

    Of 4 that would be missed one may be: A is bought, 12 + 6 USD.
    """
    bound = bound_of([[2], [1]] * 3 + [[1]] * 5 + [[2]])
    assert bound.usd(1, 3600.0) == pytest.approx(18.0)


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
        assert usd * 4 / 3 >= bound.usd(missed * 4 / 3, 3600.0) - 1e-9
