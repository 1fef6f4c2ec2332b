"""Fleets that use what is owned: of an owned GPU type alone, or with workers on owned GPUs that are idle.

A pool of level 0 has one worker type, so it is either owned or rented. Pools that are both are made from the
smallest fleet of one GPU type, whatever it costs: beyond the owned GPUs all have one price.
`planner/search/problem/owned_first.py` says which workers of a fleet are owned.
"""

from __future__ import annotations

import math
from dataclasses import replace

from planner.domain import OWNED, row_of
from planner.search.level0.level0_search import Level0, search_level0
from planner.search.oracle.fleet_counts import Counts, in_order
from planner.search.problem.owned_first import owned_first
from planner.search.problem.plan_problem import Problem
from planner.solvers.master import Option


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
            workers = level0.search.least_holding.get(option.name, level0.bounded[option.name].likely)
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
