"""What the first screen says beside the figures of a plan."""

from __future__ import annotations

import numpy as np

from planner.commands.first_screen import has_busy_hours
from planner.traffic.trace import Trace


def hours(*requests: int) -> Trace:
    """A trace with so many requests in each hour, the last of which ends it."""
    arrival_s = np.concatenate([3600.0 * h + np.linspace(0, 3599, n) for h, n in enumerate(requests)])
    ones = np.ones(len(arrival_s), np.int64)
    return Trace(
        "hours", np.append(arrival_s, 3600.0 * len(requests)), np.append(ones, 1), np.append(ones, 1)
    )


def test_a_day_is_proposed_where_some_hours_are_busier() -> None:
    assert has_busy_hours(hours(10, 30, 20, 10))
    assert not has_busy_hours(hours(10, 12, 11, 10))
    assert not has_busy_hours(hours(10, 30))  # Two hours say little of a day.
