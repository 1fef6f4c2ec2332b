"""How a fleet is bought: owned GPUs before rented ones, and what is paid for it.

An owned and a rented GPU of one catalog row are two worker types of one machine, so that every option has one
price. Which of a fleet's workers are owned changes its price and not its simulation: the cheapest way to buy
a fleet takes as many owned GPUs as there are. `planner/search/level0/owned_gpus.py` looks for fleets that fit
what is owned.
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
    """The same machines with as many owned GPUs as there are; the largest workers get owned GPUs first.

    Where rented workers fit on nodes that are paid anyway, and owned ones would draw electricity, those stay
    rented. Returns `counts` unchanged where the rest would need rented GPUs that are not offered.
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
        alike.setdefault(_machine(option), []).append((option, count))
    bought: dict[tuple[object, ...], list[tuple[Option, int]]] = {}
    for machine, pools in sorted(alike.items(), key=lambda item: -item[1][0][0].type.gpus):
        option, total = pools[0][0], sum(count for _, count in pools)
        row = row_of(option.type.gpu.name)
        if row not in left or machine[-1] or _rents_for_less(row, gpus):
            bought[machine] = pools
            continue
        owned = min(total, left[row] // option.type.gpus)
        left[row] -= owned * option.type.gpus
        if owned < total and row not in gpus:
            return counts
        each = ((row + OWNED, owned), (row, total - owned))
        bought[machine] = [(_of(gpus[name], option, problem), count) for name, count in each if count]
    counts_owned = tuple(pool for machine in alike for pool in bought[machine])
    return _on_idle_gpus(problem, counts_owned, gpus) if problem.priced == "cost" else counts_owned


def _on_idle_gpus(problem: Problem, counts: Counts, gpus: Mapping[str, Gpu]) -> Counts:
    """Owned workers are moved to idle rented GPUs as long as less is paid."""
    for option, count in counts:
        rented = gpus.get(row_of(option.type.gpu.name))
        if rented is None or not rented.is_sold_whole or not option.type.gpu.name.endswith(OWNED):
            continue
        other = _of(rented, option, problem)
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


def workers_by_machine(counts: Counts) -> dict[tuple[object, ...], int]:
    """How many workers there are of each machine, owned and rented ones together."""
    by_machine: dict[tuple[object, ...], int] = {}
    for option, count in counts:
        by_machine[_machine(option)] = by_machine.get(_machine(option), 0) + count
    return by_machine


def of_machines(counts: Counts) -> Counts:
    """One pool of each machine, of owned and rented workers together."""
    workers = workers_by_machine(counts)
    first = {_machine(option): option for option, _ in reversed(counts)}
    return tuple((first[machine], count) for machine, count in workers.items())


def one_more(problem: Problem, counts: Counts) -> Counts:
    """A worker more of each machine, owned and rented ones together: after any loss no fewer are left."""
    return owned_first(problem, tuple((option, count + 1) for option, count in of_machines(counts)))


def objective_paid(problem: Problem, counts: Counts) -> float:
    """The fleet's value in the objective's unit, without the tiny amounts that break ties between fleets of
    one price (`OWNED_USD_PER_H`).
    """
    if problem.priced == "cost":
        return paid_whole_usd_per_h(counts)
    return objective(counts) - _hair(problem, counts)


def paid_at_least(problem: Problem, bound: float) -> float:
    """A lower bound on `objective_paid` from one on the objective: every owned GPU may be in the fleet."""
    if not problem.task.owned or problem.task.objective != "cost":
        return bound
    hair_usd_per_h = {
        row_of(gpu.name): max(OWNED_USD_PER_H - gpu.usd_per_h, 0.0)
        for gpu in problem.gpus
        if gpu.name.endswith(OWNED)
    }
    owned = problem.task.owned
    return max(bound - sum(hair_usd_per_h.get(row, 0.0) * count for row, count in owned.items()), 0.0)


def _hair(problem: Problem, counts: Counts) -> float:
    if problem.task.objective != "cost":
        return 0.0
    return sum(
        (option.objective - option.type.price_usd_per_h) * count
        for option, count in counts
        if option.type.gpu.name.endswith(OWNED)
    )


def _machine(option: Option) -> tuple[object, ...]:
    """What owned and rented workers of one kind share: role, settings, GPU row, and whether it is spot."""
    worker, gpu = option.type, option.type.gpu.name
    plain = replace(worker, gpu=replace(worker.gpu, name=row_of(gpu), price_usd_per_h=0.0))
    return option.role, plain.name, market_of(gpu) not in ("", OWNED)


def _of(gpu: Gpu, option: Option, problem: Problem) -> Option:
    worker = replace(option.type, gpu=gpu)
    return option_of(option.role, worker, problem.priced)
