"""Decides which workers of a fleet are owned and which are rented, and what is paid for the fleet.

A catalog row such as "h100-80g" makes up to three GPUs: "h100-80g", "h100-80g@owned" and "h100-80g@spot"
(planner/domain.py). An owned worker and a rented one of the same row and settings are two worker types, since
they have two prices, and one *kind*, since they do the same work. Which workers of a kind are owned changes a
fleet's price and not its simulation. `planner/search/level0/owned_gpus.py` searches fleets that use the owned
GPUs well.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from planner.domain import OWNED, ROUNDING, SPOT, Gpu, row_of
from planner.fleet import Role
from planner.search.oracle.fleet_counts import Counts, objective_of
from planner.search.problem.bill import paid_whole_usd_per_h
from planner.search.problem.options import PRICE_TIES, free_usd_per_h, objective_of_worker, option_of
from planner.search.problem.plan_problem import Problem
from planner.solvers.master import Option

UNLIMITED_GPUS = 2**31  # Stands for an unlimited stock of owned GPUs: no fleet has as many.


class WorkerKind(NamedTuple):
    """What owned and rented workers that do the same work share."""

    role: Role
    worker: str  # The worker type's name, with the GPU's row, which names no market.
    is_spot: bool


def owned_first(problem: Problem, counts: Counts) -> Counts:
    """The fleet with the same number of workers of each kind, as many of them as possible on owned GPUs.
    Kinds of the largest workers get owned GPUs first.

    If owned GPUs cost electricity, a worker stays on a rented node that is paid in any case. Returns `counts`
    unchanged if the remaining workers would need rented GPUs that are not offered, or nodes beyond the stock.
    """
    if not problem.task.owned:
        return counts
    gpus = {gpu.name: gpu for gpu in problem.gpus}
    unused_owned = {
        row_of(gpu): UNLIMITED_GPUS if count is None else count
        for gpu, count in problem.limits.stock.items()
        if gpu.endswith(OWNED)
    }
    pools_by_kind: dict[WorkerKind, list[tuple[Option, int]]] = {}
    for option, count in counts:
        pools_by_kind.setdefault(_kind_of(option), []).append((option, count))
    # All workers of a kind have equally many GPUs.
    gpus_of_worker = {kind: pools[0][0].type.gpus for kind, pools in pools_by_kind.items()}
    new_pools: dict[WorkerKind, list[tuple[Option, int]]] = {}
    for kind in sorted(pools_by_kind, key=lambda kind: -gpus_of_worker[kind]):
        pools = pools_by_kind[kind]
        option, total = pools[0][0], sum(count for _, count in pools)
        row = row_of(option.type.gpu.name)
        # Spot workers, and workers whose renting costs less than owning, stay as the search chose them.
        if row not in unused_owned or kind.is_spot or _rents_for_less(row, gpus):
            new_pools[kind] = pools
            continue
        owned = min(total, unused_owned[row] // option.type.gpus)
        unused_owned[row] -= owned * option.type.gpus
        if owned < total and row not in gpus:  # The owned GPUs are too few, and none can be rented.
            return counts
        count_by_gpu = ((row + OWNED, owned), (row, total - owned))
        new_pools[kind] = [
            (_on_gpu(option, gpus[name], problem), count) for name, count in count_by_gpu if count
        ]
    counts_owned = tuple(pool for kind in pools_by_kind for pool in new_pools[kind])
    if problem.allows(counts) and not problem.allows(counts_owned):
        return counts
    # Only "cost" counts what idle GPUs of rented nodes cost, so that a worker may be cheaper on them.
    return _on_idle_gpus(problem, counts_owned, gpus) if problem.option_objective == "cost" else counts_owned


def _on_idle_gpus(problem: Problem, counts: Counts, gpus: Mapping[str, Gpu]) -> Counts:
    """The fleet with workers moved from owned to idle rented GPUs, as many as make it cheapest. Options are
    moved one after another, each in the cheapest fleet so far.
    """
    for option, count in counts:
        rented = gpus.get(row_of(option.type.gpu.name))
        if rented is None or not rented.is_sold_whole or not option.type.gpu.name.endswith(OWNED):
            continue
        on_rented, before = _on_gpu(option, rented, problem), dict(counts)
        for moved in range(1, count + 1):
            after = before | {option: count - moved, on_rented: before.get(on_rented, 0) + moved}
            moved_counts = tuple((other, n) for other, n in after.items() if n)
            paid_so_far = objective_paid(problem, counts)
            is_cheaper = objective_paid(problem, moved_counts) < paid_so_far * (1 - ROUNDING)
            if is_cheaper and problem.allows(moved_counts):
                counts = moved_counts
    return counts


def _rents_for_less(row: str, gpus: Mapping[str, Gpu]) -> bool:
    """Whether a rented GPU costs less than the electricity of an owned one."""
    return row in gpus and gpus[row].usd_per_h < gpus[row + OWNED].usd_per_h


def workers_by_kind(counts: Counts) -> dict[WorkerKind, int]:
    """How many workers there are of each kind, owned and rented ones together."""
    by_kind: dict[WorkerKind, int] = {}
    for option, count in counts:
        by_kind[_kind_of(option)] = by_kind.get(_kind_of(option), 0) + count
    return by_kind


def merge_kinds(counts: Counts) -> Counts:
    """One pool per kind: all its workers get the option that comes first in `counts`."""
    option_by_kind: dict[WorkerKind, Option] = {}
    for option, _ in counts:
        option_by_kind.setdefault(_kind_of(option), option)
    return tuple((option_by_kind[kind], count) for kind, count in workers_by_kind(counts).items())


def one_more(problem: Problem, counts: Counts) -> Counts:
    """The fleet with one worker more of each kind. After the loss of any one of its workers it has at least
    as many of each kind as `counts`.
    """
    return owned_first(problem, tuple((option, count + 1) for option, count in merge_kinds(counts)))


def objective_paid(problem: Problem, counts: Counts) -> float:
    """The fleet's value in the objective's unit, without the tiny amounts that break ties between fleets of
    one price (`FREE_USD_PER_H`) or of equally many GPUs or Watts (`Problem.with_tie_break`).
    """
    if (objective := problem.task.objective) in PRICE_TIES:
        return float(sum(objective_of_worker(option.type, objective) * count for option, count in counts))
    if problem.option_objective == "cost":
        return paid_whole_usd_per_h(counts)
    # The cost without idle GPUs ("cost-by-gpu"), which counts free GPUs above their price (FREE_USD_PER_H).
    free_usd = (free_usd_per_h(option.type.gpu) * option.type.gpus * count for option, count in counts)
    return objective_of(counts) - sum(free_usd)


def paid_at_least(problem: Problem, bound: float) -> float:
    """A lower bound on `objective_paid`, given a lower `bound` on the objective. The objective counts free
    GPUs above their price; this surplus is subtracted for all of them, since any may be in the fleet.
    """
    if problem.task.objective != "cost":
        return bound
    for gpu in problem.gpus:
        if not (more_usd_per_h := free_usd_per_h(gpu)):
            continue
        if (count := problem.limits.stock.get(gpu.name)) is None:
            return 0.0  # A fleet of these GPUs alone may cost nothing.
        bound -= more_usd_per_h * count
    return max(bound, 0.0)


def _kind_of(option: Option) -> WorkerKind:
    """The kind of an option's workers, which is the same on owned and on rented GPUs."""
    worker, gpu = option.type, option.type.gpu
    on_row = replace(worker, gpu=replace(gpu, name=row_of(gpu.name)))
    return WorkerKind(option.role, on_row.name, gpu.name.endswith(SPOT))


def _on_gpu(option: Option, gpu: Gpu, problem: Problem) -> Option:
    """The option with another GPU of its row: owned in place of rented, or the reverse."""
    on_gpu = option_of(option.role, replace(option.type, gpu=gpu), problem.option_objective)
    return problem.with_tie_break(on_gpu)
