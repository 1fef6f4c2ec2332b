"""A fleet as counts of options, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from planner.fleet import Fleet, WorkerType
from planner.models.speculation import Speculation
from planner.solvers.master import FleetLimits, Floats, Option, largest_that_fits
from planner.solvers.whole_nodes import idle_usd_per_h

Counts = tuple[tuple[Option, int], ...]
"""A fleet as options with their counts."""
Named = tuple[tuple[str, int], ...]
"""The same by the options' names."""
Verdicts = Mapping[Named, bool]
"""What was said of fleets: whether they hold."""


def names_of(counts: Counts) -> Named:
    return tuple((option.name, count) for option, count in counts)


def counts_of(fleet: Fleet, options: Sequence[Option]) -> Counts | None:
    """A fleet as counts of these options; None if one of its pools is none of them."""
    return counts_named(
        [(f"{pool.role} {pool.type.name}", pool.count) for pool in fleet.running_pools], options
    )


def counts_named(names: Iterable[tuple[str, int]], options: Sequence[Option]) -> Counts | None:
    """The pools of so many workers of the options of these names; None if one is none of `options`."""
    by_name, names = {option.name: option for option in options}, list(names)
    if any(name not in by_name for name, _ in names):
        return None
    return tuple((by_name[name], count) for name, count in names if count)


def in_order(counts: Iterable[tuple[Option, int]], options: Sequence[Option]) -> Counts:
    """With its pools in the order of `options`, others last: one name for one fleet, whoever proposes it."""
    order = {option.name: at for at, option in enumerate(options)}
    return tuple(
        sorted(((o, n) for o, n in counts if n), key=lambda each: order.get(each[0].name, len(order)))
    )


def workers_of(counts: Iterable[tuple[Option, int]]) -> list[tuple[WorkerType, int]]:
    return [(option.type, count) for option, count in counts]


def is_within(limits: FleetLimits, counts: Iterable[tuple[Option, int]]) -> bool:
    return limits.first_exceeded(workers_of(counts)) is None


FEWER_FRAC = 1e-6  # of the cost by the GPU: of fleets on the same nodes the one with fewer GPUs is better


def by_gpu(counts: Iterable[tuple[Option, int]]) -> float:
    """The objective of GPUs in use alone."""
    return sum(option.objective * count for option, count in counts)


def objective(counts: Iterable[tuple[Option, int]]) -> float:
    """What a search makes least: what is paid, whole nodes where these are sold, and a hair of what GPUs in
    use cost. More workers never have less. Without whole nodes, and for other objectives, a plain sum.
    """
    total, whole = 0.0, []
    for option, count in counts:
        total += option.objective * count
        if option.node is not None and count:
            whole.append((option.node, option.type.gpus * count))
    return total * (1 + FEWER_FRAC) + idle_usd_per_h(whole) if whole else total


def objectives_of_pairs(p: Option, d: Option, n_p: Floats, n_d: Floats) -> Floats:
    """The same of pairs with these counts, all above 0."""
    total = n_p * p.objective + n_d * d.objective
    if p.node is None and d.node is None:
        return total
    idle = idle_usd_per_h([(p.node, n_p * p.type.gpus), (d.node, n_d * d.type.gpus)])
    return total * (1 + FEWER_FRAC) + idle


def largest_below(option: Option, value: float, beside: Counts = ()) -> float:
    """Largest count of an option that together with these has an objective strictly less than `value`; -1
    where these alone have not.
    """
    most = count_below(option.objective, value, by_gpu(beside))
    if not math.isfinite(most) or most < 0 or (option.node is None and not any(o.node for o, _ in beside)):
        return most
    below = value * (1 - 1e-9)
    if objective(beside) >= below:
        return -1
    return largest_that_fits(int(most), lambda n: objective((*beside, (option, n))) < below)


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
    return speculation if speculation is not None and speculation.drafter_key is not None else None


def may_hand_over(workers: Iterable[WorkerType]) -> bool:
    """Whether KV can move between all of these: a drafter's layers are among those that are handed over, so
    they must draft alike.
    """
    return len({own_drafts(worker) for worker in workers}) <= 1
