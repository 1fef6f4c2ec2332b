"""Cheaper fleets of the machines of the production fleet, whose workers have other roles.

Where pools have workers of several types, the search in scenarios ends with its effort, and may not come to
a fleet that differs from its result by a worker's role. Four L40S before two owned A100 that decode were
planned for 1.81 USD/h, where three do for 1.41 with one of the A100 as a mixed worker.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import get_args

from planner.fleet import Role
from planner.search.mixed.best_fleet import FleetSearch
from planner.search.mixed.mixed_fleets import best_settings
from planner.search.oracle.fleet_counts import Counts, can_serve, in_order, names_of, objective
from planner.search.problem.options import Hardware, hardware
from planner.search.problem.plan_problem import Problem
from planner.solvers.master import Option

# So many fleets are simulated at most.
MOST_OTHER_ROLES = 32
# With more workers, or more ways to give them roles, none is listed: one worker less saves little there.
MOST_WORKERS = 12
MOST_WAYS = 20_000
ROLES: tuple[Role, ...] = get_args(Role)


def fleets_of_other_roles(problem: Problem, paper: FleetSearch, best: Counts, below: float) -> list[Counts]:
    """Fleets whose objective is less than `below`, with at most as many workers of every GPU and degree as
    `best`, each in any role, with the settings of `best` or else those that level 0 found best for
    that role. Those with the fewest changed workers come first, and of these the dearest, which are
    likeliest to hold.
    """
    if sum(count for _, count in best) > MOST_WORKERS:
        return []
    options = {(option.role, hardware(option)): option for option in best_settings(problem, paper.level0, {})}
    options |= {(option.role, hardware(option)): option for option, _ in best}
    machines: Counter[Hardware] = Counter()
    for option, count in best:
        machines[hardware(option)] += count
    before = dict(best)

    def changed_count(counts: Counts) -> int:
        after = dict(counts)
        return sum(abs(after.get(option, 0) - before.get(option, 0)) for option in {*after, *before})

    fleets = [in_order(workers, paper.level0.options) for workers in _assignments(options, machines)]
    cheaper = [
        counts
        for counts in fleets
        if objective(counts) < below and can_serve(option for option, _ in counts) and problem.allows(counts)
    ]
    cheaper.sort(key=lambda counts: (changed_count(counts), -objective(counts), names_of(counts)))
    return cheaper[:MOST_OTHER_ROLES]


def _assignments(
    options: Mapping[tuple[Role, Hardware], Option], machines: Mapping[Hardware, int]
) -> Iterator[list[tuple[Option, int]]]:
    """Every way to give roles to at most so many workers of each GPU and degree."""

    def of_one(machine: Hardware, most: int) -> list[list[tuple[Option, int]]]:
        possible = [options[role, machine] for role in ROLES if (role, machine) in options]
        every_count = itertools.product(range(most + 1), repeat=len(possible))
        return [list(zip(possible, each, strict=True)) for each in every_count if sum(each) <= most]

    every = [of_one(machine, most) for machine, most in machines.items()]
    if math.prod(map(len, every)) > MOST_WAYS:
        return iter(())
    return (list(itertools.chain(*ways)) for ways in itertools.product(*every))
