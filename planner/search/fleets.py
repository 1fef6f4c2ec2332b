"""A fleet as counts of options, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from planner.fleet import Fleet
from planner.solvers.master import Option


def counts_of(fleet: Fleet, options: Sequence[Option]) -> Counts | None:
    """A fleet as counts of these options; None if one of its pools is none of them."""
    named = {option.name: option for option in options}
    names = [(f"{pool.role} {pool.type.name}", pool.count) for pool in fleet.pools if pool.count]
    if any(name not in named for name, _ in names):
        return None
    return tuple((named[name], count) for name, count in names)


Counts = tuple[tuple[Option, int], ...]
"""A fleet as options with their counts."""


def objective(counts: Iterable[tuple[Option, int]]) -> float:
    return sum(option.objective * count for option, count in counts)


def largest_below(option: Option, value: float, fixed: float = 0.0) -> float:
    """Largest count of an option whose objective plus `fixed` is strictly less than `value`."""
    return count_below(option.objective, value, fixed)


def count_below(each: float, value: float, fixed: float = 0.0) -> float:
    """Largest count of something whose total plus `fixed` is strictly less than `value`."""
    if not math.isfinite(value):
        return math.inf
    if each == 0:
        return math.inf if fixed < value else -1
    return math.ceil((value * (1 - 1e-9) - fixed) / each) - 1
