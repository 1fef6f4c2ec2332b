"""A fleet as counts of options, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from planner.fleet import Fleet, WorkerType
from planner.models.speculation import Speculation
from planner.solvers.master import Limits, Option

Counts = tuple[tuple[Option, int], ...]
"""A fleet as options with their counts."""
Named = tuple[tuple[str, int], ...]
"""The same by the options' names."""
Told = Mapping[Named, bool]
"""What was said of fleets: whether they hold."""


def named(counts: Counts) -> Named:
    return tuple((option.name, count) for option, count in counts)


def counts_of(fleet: Fleet, options: Sequence[Option]) -> Counts | None:
    """A fleet as counts of these options; None if one of its pools is none of them."""
    return counts_named([(f"{pool.role} {pool.type.name}", pool.count) for pool in fleet.running], options)


def counts_named(names: Iterable[tuple[str, int]], options: Sequence[Option]) -> Counts | None:
    """The pools of so many workers of the options of these names; None if one is none of `options`."""
    by_name, names = {option.name: option for option in options}, list(names)
    if any(name not in by_name for name, _ in names):
        return None
    return tuple((by_name[name], count) for name, count in names if count)


def in_order(counts: Iterable[tuple[Option, int]], options: Sequence[Option]) -> Counts:
    """With its pools in the order of `options`, others last: a router takes the first of two workers that are
    alike to it, so the order of pools can decide whether a fleet holds.
    """
    order = {option.name: at for at, option in enumerate(options)}
    return tuple(
        sorted(((o, n) for o, n in counts if n), key=lambda each: order.get(each[0].name, len(order)))
    )


def is_within(limits: Limits, counts: Counts) -> bool:
    return limits.broken([(option.type, count) for option, count in counts]) is None


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


def own_drafts(worker: WorkerType) -> Speculation | None:
    """Drafts of a drafter that keeps KV of its own."""
    speculation = worker.speculation
    return speculation if speculation is not None and speculation.drafter is not None else None


def may_hand_over(workers: Iterable[WorkerType]) -> bool:
    """Whether KV can move between all of these: a drafter's layers are among those that are handed over, so
    they must draft alike.
    """
    return len({own_drafts(worker) for worker in workers}) <= 1
