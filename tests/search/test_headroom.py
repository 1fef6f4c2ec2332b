"""Headroom is how far a fleet holds without a gap, where a trace is short enough to look for gaps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planner.search.oracle.headroom import SHORT_TRACE_REQUESTS, most_that_holds


def at_shares_of(gaps: list[tuple[float, float]], requests: int) -> Any:
    """A fleet that misses the SLO at shares within these gaps."""

    def at_share(frac: float) -> tuple[Any, Any]:
        is_kept = not any(low <= frac <= high for low, high in gaps)
        oracle = SimpleNamespace(trace=range(requests), holds=lambda _: is_kept, failing_loss=lambda _: None)
        return oracle, ()

    return at_share


@pytest.mark.parametrize(("gaps", "most"), [([(0.362, 1.0)], 0.36), ([(0.15, 0.25), (0.362, 1.0)], 0.15)])
def test_a_gap_below_is_found_in_a_short_trace(gaps: list[tuple[float, float]], most: float) -> None:
    frac, missed = most_that_holds(at_shares_of(gaps, 40))
    assert most - 0.005 <= frac <= most + 0.005 and missed == ()


def test_a_gap_below_the_most_is_found_too() -> None:
    assert most_that_holds(at_shares_of([(0.4, 0.6)], 40))[0] == pytest.approx(0.4, abs=0.005)
    assert most_that_holds(at_shares_of([], 40)) == (1.0, ())


def test_a_long_trace_is_bisected_alone() -> None:
    gaps = [(0.15, 0.2), (0.362, 1.0)]
    assert most_that_holds(at_shares_of(gaps, SHORT_TRACE_REQUESTS + 1))[0] == pytest.approx(0.36, abs=0.005)
