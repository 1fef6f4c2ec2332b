"""A fleet in the form that searches use, and its value in the objective, which a search minimises.

Here a fleet is counts of options. An option (solvers/master.py) is a worker type in a role, with what one
worker adds to the objective (`option.objective`), and the kind of node on which it runs if nodes are sold
whole (`option.node`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from planner.domain import ROUNDING
from planner.fleet import Fleet, WorkerType
from planner.models.speculation import Speculation
from planner.solvers.master import FleetLimits, Floats, Option, largest_that_fits
from planner.solvers.whole_nodes import idle_usd_per_h

Counts = tuple[tuple[Option, int], ...]
"""A fleet: each option with its count of workers."""
NamedCounts = tuple[tuple[str, int], ...]
"""A fleet by the names of its options: the same key whatever the prices are."""
Verdicts = Mapping[NamedCounts, bool]
"""Fleets that were simulated, and whether they keep the SLO."""


def names_of(counts: Counts) -> NamedCounts:
    """The fleet by the names of its options, as a key."""
    return tuple((option.name, count) for option, count in counts)


def counts_of(fleet: Fleet, options: Sequence[Option]) -> Counts | None:
    """A fleet as counts of these options; None if a pool with workers is of no such option."""
    # The names must be spelled as `Option.name` spells them.
    names = [(f"{pool.role} {pool.type.name}", pool.count) for pool in fleet.running_pools]
    return counts_named(names, options)


def counts_of_each(fleets: Iterable[Fleet], options: Sequence[Option]) -> list[Counts]:
    """The counts of those of these fleets that have such options alone (`counts_of`)."""
    return list(filter(None, (counts_of(fleet, options) for fleet in fleets)))


def counts_named(names: Iterable[tuple[str, int]], options: Sequence[Option]) -> Counts | None:
    """The counts of a fleet that is given by option names, without counts of 0. None if a name is not among
    `options`.
    """
    by_name, names = {option.name: option for option in options}, list(names)
    if any(name not in by_name for name, _ in names):
        return None
    return tuple((by_name[name], count) for name, count in names if count)


def in_order(counts: Iterable[tuple[Option, int]], options: Sequence[Option]) -> Counts:
    """The fleet with its pools in the order of `options`, and without counts of 0, so that equal fleets are
    equal keys. Options that are not among `options` come last.
    """
    position = {option.name: i for i, option in enumerate(options)}
    pools = [(option, count) for option, count in counts if count]
    return tuple(sorted(pools, key=lambda pool: position.get(pool[0].name, len(position))))


def workers_of(counts: Iterable[tuple[Option, int]]) -> list[tuple[WorkerType, int]]:
    """The fleet's worker types with their counts."""
    return [(option.type, count) for option, count in counts]


def is_within(limits: FleetLimits, counts: Iterable[tuple[Option, int]]) -> bool:
    """Whether a fleet is within all limits."""
    return limits.first_exceeded(workers_of(counts)) is None


# If nodes are sold whole, this share of the price of the GPUs in use is added to the objective. It breaks
# ties: of two fleets on the same nodes the one that uses fewer GPUs is better. The share is smaller than any
# difference of prices.
TIE_BREAK_FRAC = 1e-6
SAME_PRICE = 1 + 2 * TIE_BREAK_FRAC  # Fleets whose values differ by a smaller factor have equal prices.


def has_several_types(counts: Iterable[tuple[Option, int]]) -> bool:
    """Whether some role has pools of several worker types."""
    roles = [option.role for option, _ in counts]
    return len(set(roles)) < len(roles)


def add_workers(counts: Counts, more: int, pools: Sequence[int] | None = None) -> Counts:
    """The counts with `more` workers added to each of `pools` (their places in `counts`), by default to
    all.
    """
    return tuple(
        (option, count + (more if pools is None or k in pools else 0))
        for k, (option, count) in enumerate(counts)
    )


def as_many_at_this_price(counts: Counts) -> Counts:
    """The fleet with as many workers as its price pays for, where nodes are sold whole: GPUs that would idle
    are used by more workers of the first pool, then by more of the next.
    """
    below = objective_of(counts) * SAME_PRICE
    for k, (option, count) in enumerate(counts):
        most = max(largest_below(option, below, (*counts[:k], *counts[k + 1 :])), count)
        counts = (*counts[:k], (option, int(most)), *counts[k + 1 :])
    return counts


def objective_by_gpu(counts: Iterable[tuple[Option, int]]) -> float:
    """The objective without the price of idle GPUs of whole nodes, and without the tie-break."""
    return sum(option.objective * count for option, count in counts)


def objective_of(counts: Iterable[tuple[Option, int]]) -> float:
    """The value of a fleet: the sum over its workers and, if nodes are sold whole, the price of idle GPUs and
    the tie-break (TIE_BREAK_FRAC). With more workers a fleet never has a lower value.
    """
    total, on_nodes = 0.0, []
    for option, count in counts:
        total += option.objective * count
        if option.node is not None and count:
            on_nodes.append((option.node, option.type.gpus, count))
    return float(total * (1 + TIE_BREAK_FRAC) + idle_usd_per_h(on_nodes)) if on_nodes else total


def objectives_of_pairs(p: Option, d: Option, n_p: Floats, n_d: Floats) -> Floats:
    """The objectives (n,) of n fleets, as `objective_of` computes them. Each fleet has `n_p` (n,) workers of
    the prefill option p and `n_d` (n,) of the decode option d; all counts are above 0.
    """
    total = n_p * p.objective + n_d * d.objective
    if p.node is None and d.node is None:
        return total
    idle = idle_usd_per_h([(p.node, p.type.gpus, n_p), (d.node, d.type.gpus, n_d)])
    return total * (1 + TIE_BREAK_FRAC) + idle


def options_of(counts: Counts) -> tuple[Option, ...]:
    """The options of a fleet's pools."""
    return tuple(option for option, _ in counts)


def largest_below(option: Option, value: float, others: Counts = ()) -> float:
    """The largest count of an option with which the objective of a fleet that also has the pools `others` is
    less than `value`; -1 if the objective of `others` alone is not less, infinite if every count will do.
    """
    most = count_below(option.objective, value, objective_by_gpu(others))
    has_nodes = option.node is not None or any(other.node for other, _ in others)
    if not math.isfinite(most) or most < 0 or not has_nodes:
        return most
    # `most` counts no idle GPUs of whole nodes; with their price fewer workers may fit below `value`.
    below = value * (1 - ROUNDING)
    if objective_of(others) >= below:
        return -1
    return largest_that_fits(int(most), lambda n: objective_of((*others, (option, n))) < below)


def count_below(worker_value: float, value: float, fixed: float = 0.0) -> float:
    """The largest n with n * worker_value + fixed below `value` by more than a rounding error; -1 if there is
    none, infinite if every n will do.
    """
    if not math.isfinite(value):
        return math.inf
    if worker_value == 0:
        return math.inf if fixed < value else -1
    return math.ceil((value * (1 - ROUNDING) - fixed) / worker_value) - 1


def drafter_with_cache(worker: WorkerType) -> Speculation | None:
    """The worker's speculative decoding if its drafter (the model that proposes tokens) has a KV cache beside
    that of the LLM, else None.
    """
    speculation = worker.speculation
    return speculation if speculation is not None and speculation.drafter_key is not None else None


def may_hand_over(workers: Iterable[WorkerType]) -> bool:
    """Whether these workers can hand KV blocks over to each other. The KV of a drafter's layers is handed
    over too, so all workers must have the same drafter, or all none.
    """
    return len({drafter_with_cache(worker) for worker in workers}) <= 1


def has_whole_pairs(options: Iterable[Option]) -> bool:
    """Whether there are options at all, and either both prefill and decode options or neither."""
    roles = {option.role for option in options}
    return bool(roles) and ("prefill" in roles) == ("decode" in roles)


def can_serve(options: Iterable[Option]) -> bool:
    """Whether these options can serve together: prefill pools only with decode pools, and workers that may
    hand requests over to each other (`may_hand_over`).
    """
    options = list(options)
    return has_whole_pairs(options) and may_hand_over(
        option.type for option in options if option.role != "mixed"
    )
