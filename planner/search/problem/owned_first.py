"""How a fleet is bought: owned GPUs before rented ones, and what is paid for it.

An owned and a rented GPU of one catalog row make two worker types of one kind, so that every option has one
price. Which of a fleet's workers are owned changes its price but not its simulation. The cheapest way to buy
a fleet mostly takes as many owned GPUs as there are. `planner/search/level0/owned_gpus.py` looks for fleets
that fit what is owned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.domain import OWNED, Gpu, market_of, row_of
from planner.search.oracle.fleet_counts import Counts, objective
from planner.search.problem.bill import paid_whole_usd_per_h
from planner.search.problem.options import OWNED_USD_PER_H, option_of
from planner.search.problem.plan_problem import Problem
from planner.solvers.master import Option

MANY = 2**31  # GPUs of a row whose stock is not limited.


def owned_first(problem: Problem, counts: Counts) -> Counts:
    """The same workers on as many owned GPUs as there are; the largest workers get owned GPUs first.

    Workers stay rented where they fit on nodes that are paid anyway while owned GPUs would draw electricity.
    Returns `counts` unchanged where the rest would need rented GPUs that are not offered.
    """
    if not problem.task.owned:
        return counts
    gpus = {gpu.name: gpu for gpu in problem.gpus}
    left = {
        row_of(gpu): MANY if count is None else count
        for gpu, count in problem.limits.stock.items()
        if gpu.endswith(OWNED)
    }
    alike: dict[tuple[object, ...], list[tuple[Option, int]]] = {}
    for option, count in counts:
        alike.setdefault(_worker_kind(option), []).append((option, count))
    bought: dict[tuple[object, ...], list[tuple[Option, int]]] = {}
    for kind, pools in sorted(alike.items(), key=lambda item: -item[1][0][0].type.gpus):
        option, total = pools[0][0], sum(count for _, count in pools)
        row, is_spot = row_of(option.type.gpu.name), kind[-1]
        if row not in left or is_spot or _rents_for_less(row, gpus):
            bought[kind] = pools
            continue
        owned = min(total, left[row] // option.type.gpus)
        left[row] -= owned * option.type.gpus
        if owned < total and row not in gpus:
            return counts
        each = ((row + OWNED, owned), (row, total - owned))
        bought[kind] = [(_option_on(gpus[name], option, problem), count) for name, count in each if count]
    counts_owned = tuple(pool for kind in alike for pool in bought[kind])
    return _on_idle_gpus(problem, counts_owned, gpus) if problem.priced == "cost" else counts_owned


def _on_idle_gpus(problem: Problem, counts: Counts, gpus: Mapping[str, Gpu]) -> Counts:
    """Move owned workers to GPUs of rented nodes that would idle, as long as less is paid."""
    for option, count in counts:
        rented = gpus.get(row_of(option.type.gpu.name))
        if rented is None or not rented.is_sold_whole or not option.type.gpu.name.endswith(OWNED):
            continue
        other = _option_on(rented, option, problem)
        for moved in range(1, count + 1):
            on_idle = dict(counts) | {option: count - moved}
            on_idle[other] = on_idle.get(other, 0) + moved
            fleet = tuple((each, n) for each, n in on_idle.items() if n)
            if objective_paid(problem, fleet) < objective_paid(problem, counts) * (
                1 - 1e-9
            ) and problem.allows(fleet):
                counts = fleet
    return counts


def _rents_for_less(row: str, gpus: Mapping[str, Gpu]) -> bool:
    """Whether a rented GPU costs less than the electricity of an owned one."""
    return row in gpus and gpus[row].usd_per_h < gpus[row + OWNED].usd_per_h


def workers_by_kind(counts: Counts) -> dict[tuple[object, ...], int]:
    """How many workers there are of each kind, owned and rented ones together."""
    by_kind: dict[tuple[object, ...], int] = {}
    for option, count in counts:
        by_kind[_worker_kind(option)] = by_kind.get(_worker_kind(option), 0) + count
    return by_kind


def merge_owned_and_rented(counts: Counts) -> Counts:
    """One pool per kind of worker, which stands for owned and rented ones with the first of their options."""
    workers = workers_by_kind(counts)
    first = {_worker_kind(option): option for option, _ in reversed(counts)}
    return tuple((first[kind], count) for kind, count in workers.items())


def one_more(problem: Problem, counts: Counts) -> Counts:
    """One more worker of each kind, owned and rented ones together, so that the loss of any worker leaves
    no fewer of its kind than `counts` has.
    """
    return owned_first(
        problem, tuple((option, count + 1) for option, count in merge_owned_and_rented(counts))
    )


def objective_paid(problem: Problem, counts: Counts) -> float:
    """The fleet's value in the objective's unit, without the tiny amounts that break ties between fleets of
    one price (`OWNED_USD_PER_H`).
    """
    if problem.priced == "cost":
        return paid_whole_usd_per_h(counts)
    return objective(counts) - _tie_break(problem, counts)


def paid_at_least(problem: Problem, bound: float) -> float:
    """A lower bound on `objective_paid` from one on the objective: less the tie-breaking amounts of all owned
    GPUs, each of which may be in the fleet.
    """
    if not problem.task.owned or problem.task.objective != "cost":
        return bound
    tie_break_usd_per_h = {
        row_of(gpu.name): max(OWNED_USD_PER_H - gpu.usd_per_h, 0.0)
        for gpu in problem.gpus
        if gpu.name.endswith(OWNED)
    }
    owned = problem.task.owned
    return max(bound - sum(tie_break_usd_per_h.get(row, 0.0) * count for row, count in owned.items()), 0.0)


def _tie_break(problem: Problem, counts: Counts) -> float:
    """The part of the objective that only breaks ties: what owned GPUs count above their price."""
    if problem.task.objective != "cost":
        return 0.0
    return sum(
        (option.objective - option.type.price_usd_per_h) * count
        for option, count in counts
        if option.type.gpu.name.endswith(OWNED)
    )


def _worker_kind(option: Option) -> tuple[object, ...]:
    """What owned and rented workers of one kind share: role, settings and GPU row, and whether it is spot."""
    worker, gpu = option.type, option.type.gpu.name
    plain = replace(worker, gpu=replace(worker.gpu, name=row_of(gpu), price_usd_per_h=0.0))
    return option.role, plain.name, market_of(gpu) not in ("", OWNED)


def _option_on(gpu: Gpu, option: Option, problem: Problem) -> Option:
    """The option with another GPU, and that GPU's price."""
    worker = replace(option.type, gpu=gpu)
    return option_of(option.role, worker, problem.priced)
