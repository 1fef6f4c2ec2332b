"""Finds fleets that use owned GPUs: fleets of one owned GPU type, and fleets with workers added on idle owned
GPUs.

A pool of level 0 has one worker type, so it is either owned or rented. A fleet with owned and rented GPUs of
one type is made from the smallest fleet of that type: since all GPUs beyond the owned ones have one price, it
is also the cheapest. `planner/search/problem/owned_first.py` decides which of its workers are owned.
"""

import math
from dataclasses import replace

from planner.domain import OWNED, row_of
from planner.search.level0.level0_search import Level0, search_level0
from planner.search.oracle.fleet_counts import Counts, in_order
from planner.search.problem.owned_first import owned_first
from planner.search.problem.plan_problem import Problem
from planner.solvers.master import Option


def owned_candidates(problem: Problem, level0: Level0) -> list[Counts]:
    """Fleets that hold and use owned GPUs.

    For each owned GPU type there is the smallest fleet of only this type, with GPUs beyond the owned ones
    rented. The last fleet is level 0's best one together with workers on all owned GPUs, less the workers
    that it then does not need.
    """
    # Owned GPUs save money, but neither power nor GPUs.
    if problem.task.objective != "cost":
        return []
    fleets: list[Counts] = []
    on_owned: Counts = ()  # Workers on all owned GPUs of every type so far.
    for row, count in problem.task.owned.items():
        if problem.out_of_time() or (smallest := _smallest_fleet(problem, row)) is None:
            continue
        fleets.append(owned_first(problem, smallest))
        on_owned += _owned_part(smallest, count)
    owned_rows = {row_of(option.type.gpu.name) for option, _ in on_owned}
    best = level0.search.best or ()
    rented = [(option, count) for option, count in best if row_of(option.type.gpu.name) not in owned_rows]
    if rented and on_owned and not problem.out_of_time():
        fleets.append(with_fewest_workers(owned_first(problem, (*rented, *on_owned)), problem))
    return [counts for counts in fleets if problem.allows(counts) and problem.oracle.holds(counts)]


def owned_beside(problem: Problem, level0: Level0, counts: Counts) -> Counts:
    """The largest pools of idle owned GPUs that may be added to a fleet: one for each owned GPU type and each
    role that the fleet has.

    For each of these the option is taken that serves the whole traffic on the fewest GPUs.
    """
    if problem.task.objective != "cost":
        return ()
    idle_gpus = dict(problem.task.owned)
    for option, count in counts:
        if option.type.gpu.name.endswith(OWNED):
            idle_gpus[row_of(option.type.gpu.name)] -= count * option.type.gpus
    roles = {option.role for option, _ in counts}
    # By the GPU's row and the role: the fewest GPUs, and their option.
    fewest: dict[tuple[str, str], tuple[float, Option]] = {}
    for option in level0.options:
        row = row_of(option.type.gpu.name)
        is_idle = option.type.gpu.name.endswith(OWNED) and option.type.gpus <= idle_gpus.get(row, 0)
        if is_idle and option.role in roles and option.name in level0.bounded:
            workers = level0.search.least_holding.get(option.name, level0.bounded[option.name].likely)
            gpus = workers * option.type.gpus
            fewest_gpus, _ = fewest.get((row, option.role), (math.inf, option))
            if gpus < fewest_gpus:
                fewest[row, option.role] = gpus, option
    return tuple((option, idle_gpus[row] // option.type.gpus) for (row, _), (_, option) in fewest.items())


def with_idle(problem: Problem, level0: Level0, counts: Counts) -> Counts:
    """A fleet together with workers on the owned GPUs that it leaves idle, split evenly over its roles."""
    counts_with_idle, roles = dict(counts), len({option.role for option, _ in counts})
    for option, most in owned_beside(problem, level0, counts):
        counts_with_idle[option] = counts_with_idle.get(option, 0) + most // roles
    return in_order(counts_with_idle.items(), level0.options)


def _smallest_fleet(problem: Problem, row: str) -> Counts | None:
    """The smallest fleet of level 0 of only this GPU, with unlimited stock and budget; None if none holds."""
    types = [worker for worker in problem.types if row_of(worker.gpu.name) == row]
    names = {worker.gpu.name for worker in types}
    name = row if row in names else row + OWNED  # If the GPU cannot be rented, there are only owned ones.
    types = [worker for worker in types if worker.gpu.name == name]
    if not types:
        return None
    limits = replace(problem.limits, stock=dict.fromkeys(names), cost_usd_per_h=None)
    return search_level0(replace(problem, types=tuple(types), limits=limits), walks=False).search.best


def _owned_part(smallest: Counts, owned: int) -> Counts:
    """The smallest fleet scaled down to `owned` GPUs; empty if a pool would get no worker."""
    share = min(owned / sum(option.type.gpus * count for option, count in smallest), 1.0)
    counts = tuple((option, int(count * share)) for option, count in smallest)
    return counts if all(count for _, count in counts) else ()


def with_fewest_workers(counts: Counts, problem: Problem) -> Counts:
    """The fleet without needless workers: option by option, the most expensive first, bisection finds the
    fewest workers with which the fleet still holds.
    """
    fleet_counts = dict(counts)
    for option, holding in sorted(counts, key=lambda pool: -pool[0].objective):
        failed = -1  # The fleet may hold even without this option.
        while holding - failed > 1 and not problem.out_of_time():
            fleet_counts[option] = (failed + holding) // 2
            fleet = tuple((other, count) for other, count in fleet_counts.items() if count)
            if fleet and problem.oracle.holds(fleet):
                holding = fleet_counts[option]
            else:
                failed = fleet_counts[option]
        fleet_counts[option] = holding
    return tuple((option, count) for option, count in fleet_counts.items() if count)
