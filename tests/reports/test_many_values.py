"""Mean and percentiles of many values are those of sorting them, and nobody else's array changes."""

from __future__ import annotations

import numpy as np
import pytest

from planner.reports import curves
from planner.reports.curves import mean_and_percentiles
from planner.simulator.measured_values import values_where


@pytest.mark.parametrize("never", [0, 3, 400])
def test_many_values_have_the_same_percentiles(never: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(never)
    values_s = rng.exponential(1.0, 1000)
    values_s[rng.choice(1000, never, replace=False)] = np.nan
    before = values_s.copy()
    sorted_way = mean_and_percentiles(values_s[:])
    monkeypatch.setattr(curves, "MOST_SORTED", 10)
    assert mean_and_percentiles(values_s[:]) == pytest.approx(sorted_way, rel=1e-12)
    np.testing.assert_array_equal(values_s, before)


def test_values_that_never_came_true_have_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MOST_SORTED", 1)
    found = mean_and_percentiles(np.full(5, np.nan))
    assert np.isnan(found["mean"]) and found["p50"] == np.inf


@pytest.mark.parametrize("mask", [[0, 1, 1, 1, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
def test_what_is_chosen_side_by_side_is_no_copy(mask: list[int]) -> None:
    values, chosen_mask = np.arange(5.0), np.array(mask, dtype=bool)
    found = values_where(values, chosen_mask)
    np.testing.assert_array_equal(found, values[chosen_mask])
    is_side_by_side = "0" not in "".join(map(str, mask)).strip("0") and any(mask)
    assert np.shares_memory(found, values) == is_side_by_side
