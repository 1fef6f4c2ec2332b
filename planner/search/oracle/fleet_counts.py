"""A fleet as counts of options, and its value in the objective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from planner.domain import ROUNDING
from planner.fleet import Fleet, WorkerType
from planner.models.speculation import Speculation
from planner.solvers.master import FleetLimits, Floats, Option, largest_that_fits
from planner.solvers.whole_nodes import idle_usd_per_h

Counts = tuple[tuple[Option, int], ...]
"""A fleet: each option with its count of workers."""
Named = tuple[tuple[str, int], ...]
"""A fleet by the names of its options."""
Verdicts = Mapping[Named, bool]
"""Fleets that were simulated, and whether they keep the SLO."""


def names_of(counts: Counts) -> Named:
    """The fleet by the names of its options, which is a key without prices."""
    return tuple((option.name, count) for option, count in counts)


def counts_of(fleet: Fleet, options: Sequence[Option]) -> Counts | None:
    """A fleet as counts of these options; None if one of its pools is none of them."""
    return counts_named(
        [(f"{pool.role} {pool.type.name}", pool.count) for pool in fleet.running_pools], options
    )


def counts_named(names: Iterable[tuple[str, int]], options: Sequence[Option]) -> Counts | None:
    """The counts of a fleet that is given by option names; None if a name is not among `options`."""
    by_name, names = {option.name: option for option in options}, list(names)
    if any(name not in by_name for name, _ in names):
        return None
    return tuple((by_name[name], count) for name, count in names if count)


def in_order(counts: Iterable[tuple[Option, int]], options: Sequence[Option]) -> Counts:
    """The fleet with its pools in the order of `options`, so that one fleet has one name everywhere."""
    order = {option.name: place for place, option in enumerate(options)}
    return tuple(
        sorted(((o, n) for o, n in counts if n), key=lambda each: order.get(each[0].name, len(order)))
    )


def workers_of(counts: Iterable[tuple[Option, int]]) -> list[tuple[WorkerType, int]]:
    """The worker types of a fleet with their counts."""
    return [(option.type, count) for option, count in counts]


def is_within(limits: FleetLimits, counts: Iterable[tuple[Option, int]]) -> bool:
    """Whether a fleet exceeds none of the limits."""
    return limits.first_exceeded(workers_of(counts)) is None


# This share of the price of the GPUs in use is added where nodes are sold whole. It breaks ties: of two
# fleets on the same nodes the one that uses fewer GPUs is better.
FEWER_FRAC = 1e-6
SAME_PRICE = 1 + 2 * FEWER_FRAC  # Values that differ by a smaller factor are of fleets of equal price.


def as_many_at_this_price(counts: Counts) -> Counts:
    """The fleet with as many workers of each pool as its price pays, where nodes are sold whole."""
    below = objective(counts) * SAME_PRICE
    for k, (option, count) in enumerate(counts):
        most = max(largest_below(option, below, (*counts[:k], *counts[k + 1 :])), count)
        counts = (*counts[:k], (option, int(most)), *counts[k + 1 :])
    return counts


def by_gpu(counts: Iterable[tuple[Option, int]]) -> float:
    """The objective without idle GPUs of whole nodes."""
    return sum(option.objective * count for option, count in counts)


def objective(counts: Iterable[tuple[Option, int]]) -> float:
    """The value that a search minimises: a sum over workers, and where nodes are sold whole their idle GPUs.

    More workers never have a lower value.
    """
    total, whole = 0.0, []
    for option, count in counts:
        total += option.objective * count
        if option.node is not None and count:
            whole.append((option.node, option.type.gpus * count))
    return total * (1 + FEWER_FRAC) + idle_usd_per_h(whole) if whole else total


def objectives_of_pairs(p: Option, d: Option, n_p: Floats, n_d: Floats) -> Floats:
    """`objective` of pairs with these counts (n,), all above 0."""
    total = n_p * p.objective + n_d * d.objective
    if p.node is None and d.node is None:
        return total
    idle = idle_usd_per_h([(p.node, n_p * p.type.gpus), (d.node, n_d * d.type.gpus)])
    return total * (1 + FEWER_FRAC) + idle


def largest_below(option: Option, value: float, beside: Counts = ()) -> float:
    """Largest count of an option whose objective together with `beside` is strictly less than `value`.

    It is -1 where that of `beside` alone is not.
    """
    most = count_below(option.objective, value, by_gpu(beside))
    has_nodes = option.node is not None or any(other.node for other, _ in beside)
    if not math.isfinite(most) or most < 0 or not has_nodes:
        return most
    # Idle GPUs of whole nodes lower the count further.
    below = value * (1 - ROUNDING)
    if objective(beside) >= below:
        return -1
    return largest_that_fits(int(most), lambda n: objective((*beside, (option, n))) < below)


def count_below(each: float, value: float, fixed: float = 0.0) -> float:
    """Largest n with n * each + fixed strictly less than `value`; -1 if there is none."""
    if not math.isfinite(value):
        return math.inf
    if each == 0:
        return math.inf if fixed < value else -1
    return math.ceil((value * (1 - ROUNDING) - fixed) / each) - 1


def own_drafts(worker: WorkerType) -> Speculation | None:
    """The worker's speculative decoding if its drafter keeps KV of its own, else None."""
    speculation = worker.speculation
    return speculation if speculation is not None and speculation.drafter_key is not None else None


def may_hand_over(workers: Iterable[WorkerType]) -> bool:
    """Whether KV can move between all of these workers.

    The KV of a drafter's layers is handed over too, so all of them must draft alike.
    """
    return len({own_drafts(worker) for worker in workers}) <= 1
