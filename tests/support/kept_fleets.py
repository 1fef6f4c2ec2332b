"""Production at level 0 held against every fleet there is, in the same scenarios, on one random question."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from instances import fleets_of_level0, instance, is_within

from planner.search.level0.level0_search import search_level0
from planner.search.mixed.best_fleet import FleetSearch
from planner.search.oracle.fleet_counts import objective_of
from planner.search.oracle.scenarios import SEARCHED, Scenarios
from planner.search.problem.plan_problem import with_search_scenarios
from planner.search.production.cheaper_fleets import walk_cheaper_fleets
from planner.search.production.cheapest_kept import find_cheaper_kept, grow_until_kept

SCENARIOS = 12  # of which a fleet may miss one


@dataclass(frozen=True, slots=True)
class KeptReport:
    """What the search found and what is true, as prices; infinite where there is no fleet. `is_exact`: it was
    said that every fleet cheaper than `below` misses too many scenarios.
    """

    seed: int
    value: float
    below: float
    true_value: float
    is_exact: bool

    @property
    def is_wrong(self) -> bool:
        """Whether what was called exact is beaten."""
        return self.is_exact and self.true_value < self.below * (1 - 1e-9)

    @property
    def dearer_frac(self) -> float:
        """By how much what was found is above the cheapest fleet."""
        if math.isinf(self.true_value):
            return 0.0
        return max(self.value / self.true_value - 1, 0.0)


def check_kept(seed: int) -> KeptReport | None:
    """None where no fleet keeps the SLO even as written."""
    problem = instance(seed)
    problem = replace(
        problem,
        search_scenarios=Scenarios(
            problem.task, problem.trace, seed, SEARCHED, SCENARIOS, len(problem.trace)
        ),
    )
    brute = with_search_scenarios(problem).oracle
    fleets = sorted(
        (each for each in fleets_of_level0(problem) if is_within(problem, each)), key=objective_of
    )
    true_value = next((objective_of(each) for each in fleets if brute.holds(each)), math.inf)
    problem = replace(problem, oracle=replace(problem.oracle))
    level0 = search_level0(problem)
    if level0.search.best is None:
        return None
    paper = FleetSearch(level0.search.best, level0.search.value, level0, 0, is_every_mix_simulated=False)
    scenario_problem, best = grow_until_kept(with_search_scenarios(problem), paper.best)
    best = find_cheaper_kept(scenario_problem, paper, best, any_mix=False, refuted_value=paper.value)
    if best is None:
        return KeptReport(seed, math.inf, math.inf, true_value, is_exact=False)
    found, cheaper = walk_cheaper_fleets(scenario_problem, paper, best)
    value = objective_of(best if found is None else found)
    below = value * (1 - cheaper.less_frac)
    return KeptReport(seed, value, below, true_value, cheaper.is_exact)
