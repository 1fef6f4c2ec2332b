"""Fleets that use owned GPUs before they rent.

An owned and a rented GPU of one catalog row are two worker types of one machine, so that every option has one
price. Which of a fleet's workers are owned changes its price and not its simulation: the cheapest way to buy
a fleet takes as many owned GPUs as there are.

A pool of level 0 has one worker type, so it is either owned or rented. Pools that are both are made from the
smallest fleet of one GPU type, whatever it costs: beyond the owned GPUs all have one price.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from planner.domain import OWNED, Gpu, market_of, row_of
from planner.search.level0.level0_search import Level0, search_level0
from planner.search.oracle.fleet_counts import Counts, in_order, objective
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


def owned_candidates(problem: Problem, level0: Level0) -> list[Counts]:
    """Fleets that hold and use what is owned.

    For each owned GPU type: the smallest fleet of it alone, the rest rented. Then all that is owned beside
    level 0's best fleet, of which the dearest workers are taken away as long as the fleet holds.
    """
    if problem.task.objective != "cost":
        return []
    fleets: list[Counts] = []
    filled: Counts = ()  # workers on all owned GPUs of every type so far
    for row, count in problem.task.owned.items():
        if problem.out_of_time() or (smallest := _smallest(problem, row)) is None:
            continue
        fleets.append(owned_first(problem, smallest))
        filled += _filled(smallest, count)
    rows = {row_of(option.type.gpu.name) for option, _ in filled}
    rented = [(o, n) for o, n in level0.search.best or () if row_of(o.type.gpu.name) not in rows]
    if rented and filled and not problem.out_of_time():
        fleets.append(without_needless_workers(owned_first(problem, (*rented, *filled)), problem))
    return [counts for counts in fleets if problem.allows(counts) and problem.oracle.holds([counts])[0]]


def owned_beside(problem: Problem, level0: Level0, counts: Counts) -> Counts:
    """The largest pools of idle owned GPUs that may be added to a fleet.

    For each row, and each role that the fleet has, they are of the option of which the fewest GPUs are
    expected to carry the whole traffic.
    """
    if problem.task.objective != "cost":
        return ()
    left = dict(problem.task.owned)
    for option, count in counts:
        if option.type.gpu.name.endswith(OWNED):
            left[row_of(option.type.gpu.name)] -= count * option.type.gpus
    roles, best = {option.role for option, _ in counts}, dict[tuple[str, str], tuple[float, Option]]()
    for option in level0.options:
        row = row_of(option.type.gpu.name)
        is_idle = option.type.gpu.name.endswith(OWNED) and option.type.gpus <= left.get(row, 0)
        if is_idle and option.role in roles and option.name in level0.bounded:
            workers = level0.search.smallest.get(option.name, level0.bounded[option.name].likely)
            gpus = workers * option.type.gpus
            if gpus < best.get((row, option.role), (math.inf, option))[0]:
                best[row, option.role] = gpus, option
    return tuple((option, left[row] // option.type.gpus) for (row, _), (_, option) in best.items())


def with_idle(problem: Problem, level0: Level0, counts: Counts) -> Counts:
    """A fleet with the owned GPUs that it leaves idle, split evenly over its roles."""
    counts_with_idle, roles = dict(counts), len({option.role for option, _ in counts})
    for option, most in owned_beside(problem, level0, counts):
        counts_with_idle[option] = counts_with_idle.get(option, 0) + most // roles
    return in_order(counts_with_idle.items(), level0.options)


def _smallest(problem: Problem, row: str) -> Counts | None:
    """The smallest fleet of level 0 of this GPU alone, with unlimited stock and budget.

    It is the cheapest one once the owned GPUs are taken off, as all others have one price.
    """
    types = [worker for worker in problem.types if row_of(worker.gpu.name) == row]
    names = {worker.gpu.name for worker in types}
    name = row if row in names else row + OWNED
    types = [worker for worker in types if worker.gpu.name == name]
    if not types:
        return None
    limits = replace(problem.limits, stock={gpu: None for gpu in names}, cost_usd_per_h=None)
    return search_level0(replace(problem, types=tuple(types), limits=limits), walks=False).search.best


def _filled(smallest: Counts, owned: int) -> Counts:
    """The part of the smallest fleet that the owned GPUs make up; empty if a pool would get no worker."""
    share = owned / sum(option.type.gpus * count for option, count in smallest)
    counts = tuple((option, int(count * min(share, 1.0))) for option, count in smallest)
    return counts if all(count for _, count in counts) else ()


def without_needless_workers(counts: Counts, problem: Problem) -> Counts:
    """The least workers of each option that hold beside the others, reduced from the dearest option on."""
    fleet_counts = dict(counts)
    for option, most in sorted(counts, key=lambda pool: -pool[0].objective):
        failed = -1
        while most - failed > 1 and not problem.out_of_time():
            fleet_counts[option] = (failed + most) // 2
            fleet = tuple((other, count) for other, count in fleet_counts.items() if count)
            if fleet and problem.oracle.holds([fleet])[0]:
                most = fleet_counts[option]
            else:
                failed = fleet_counts[option]
        fleet_counts[option] = most
    return tuple((option, count) for option, count in fleet_counts.items() if count)
