"""Lists cheaper fleets on the GPUs of the production fleet, whose workers have other roles.

If pools have workers of several types, the search in scenarios often uses up its effort before it simulates a
fleet that differs from its result only by a worker's role. For example, one plan had four prefill workers on
L40S and two decode workers on owned A100, for 1.81 USD/h. If one of the A100 is a mixed worker, three L40S
are enough, for 1.41 USD/h.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import get_args

from planner.fleet import Role
from planner.search.mixed.best_fleet import FleetSearch
from planner.search.mixed.mixed_fleets import best_settings
from planner.search.oracle.fleet_counts import Counts, can_serve, in_order, names_of, objective_of, options_of
from planner.search.problem.options import Hardware, hardware_of
from planner.search.problem.plan_problem import Problem
from planner.solvers.master import Option

MOST_OTHER_ROLES = 32  # At most this many fleets are listed.
# If there are more workers, or more assignments of roles to them, no fleet is listed, because one worker less
# saves little of a large fleet's cost.
MOST_WORKERS = 12
MOST_ASSIGNMENTS = 20_000
ROLES: tuple[Role, ...] = get_args(Role)


def fleets_of_other_roles(
    problem: Problem, paper: FleetSearch, best: Counts, below_value: float
) -> list[Counts]:
    """Fleets whose objective is less than `below_value`, with at most as many workers on every hardware (GPU
    type and parallelism) as `best`, each worker in any role. `best` is the production fleet, `paper` the
    search for the fleet on paper.

    Engine settings are those of `best`; for a role in which `best` has no such worker, those that level 0
    found best. Fleets with the fewest changed workers come first, and of these the most expensive ones, which
    are likeliest to hold.
    """
    if sum(count for _, count in best) > MOST_WORKERS:
        return []
    level0_best = best_settings(problem, paper.level0, beyond_stock={})
    options = {(option.role, hardware_of(option)): option for option in level0_best}
    options |= {(option.role, hardware_of(option)): option for option, _ in best}
    workers_on: Counter[Hardware] = Counter()
    for option, count in best:
        workers_on[hardware_of(option)] += count
    before = dict(best)

    def changed_count(counts: Counts) -> int:
        """By how many workers the options' counts differ from `best`. A worker in another role counts twice:
        it is missing from one option and added to another.
        """
        after = dict(counts)
        return sum(abs(after.get(option, 0) - before.get(option, 0)) for option in {*after, *before})

    fleets = [in_order(counts, paper.level0.options) for counts in _assignments(options, workers_on)]
    cheaper = [
        counts
        for counts in fleets
        if objective_of(counts) < below_value and can_serve(options_of(counts)) and problem.allows(counts)
    ]
    cheaper.sort(key=lambda counts: (changed_count(counts), -objective_of(counts), names_of(counts)))
    return cheaper[:MOST_OTHER_ROLES]


def _assignments(
    options: Mapping[tuple[Role, Hardware], Option], workers_on: Mapping[Hardware, int]
) -> Iterator[list[tuple[Option, int]]]:
    """Every assignment of roles to at most `workers_on[h]` workers of each hardware h, as options with their
    counts (which may be 0); none if there are more than MOST_ASSIGNMENTS.
    """

    def assignments_on(hardware: Hardware, most: int) -> list[list[tuple[Option, int]]]:
        """All assignments of roles to at most `most` workers of this hardware."""
        possible = [options[role, hardware] for role in ROLES if (role, hardware) in options]
        vectors = itertools.product(range(most + 1), repeat=len(possible))  # One count for each option.
        return [list(zip(possible, vector, strict=True)) for vector in vectors if sum(vector) <= most]

    by_hardware = [assignments_on(hardware, most) for hardware, most in workers_on.items()]
    if math.prod(map(len, by_hardware)) > MOST_ASSIGNMENTS:
        return iter(())
    return (list(itertools.chain(*chosen)) for chosen in itertools.product(*by_hardware))
