"""Simulates all fleets of level 0 that are cheaper than the fleet of production, in its scenarios.

    min  cost(n)                                          over fleets n with one worker type per pool
    s.t. n keeps the SLO on the trace as written          (as on paper)
         n keeps it in at least S - m of S scenarios      (kept_in; m is what a fleet may miss)

The S scenarios are drawn once, for all fleets. A fleet is refuted by the trace as written, or by m + 1
scenarios that it misses. The hardest scenarios are simulated first, and a simulation ends once more requests
are late than a percentile allows. So refuting a cheaper fleet usually takes one or m + 1 short simulations.
If all these simulations take little effort, all cheaper fleets are simulated, as on paper (level0/walk.py).
"""

from dataclasses import replace

from planner.documents.facts import CheaperMiss
from planner.search.level0.level0_search import walk_below
from planner.search.mixed.best_fleet import FleetSearch
from planner.search.oracle.fleet_counts import Counts
from planner.search.problem.plan_problem import Problem, refuted_below
from planner.search.production.like_price import LIKE_PRICE_FRAC, below_like_price

# All cheaper fleets are simulated if that takes at most this many simulated requests, about 7 CPU seconds.
# The plan of Azure's code trace at its own rate (benchmarks/plans.py) simulates 1,748 fleets with less.
MOST_EFFORT = 6_000_000


def walk_cheaper_fleets(
    scenario_problem: Problem, paper: FleetSearch, best: Counts
) -> tuple[Counts | None, CheaperMiss]:
    """The cheapest fleet that keeps the SLO in enough scenarios and costs less than `best` by more than
    LIKE_PRICE_FRAC, None if there is none; and how many cheaper fleets there are and were simulated.
    """
    level0, problem = paper.level0, scenario_problem
    # An exact search on paper proved that all fleets below its answer's price fail, so they fail here too and
    # need no simulation.
    if level0.search.is_exact:
        problem = refuted_below(problem, level0.search.value)
    # After a search that is not exact, some of these fleets were not simulated. Most of them fail on the
    # trace as written, so the oracle simulates the trace before the scenarios.
    oracle = replace(problem.oracle, trace_first_below=level0.search.value)
    # The copied oracle begins without verdicts. It gets those of the search in the same scenarios.
    oracle.verdicts.update(scenario_problem.oracle.verdicts)
    below = below_like_price(scenario_problem, best)
    search = walk_below(replace(problem, oracle=oracle), level0, below, most_effort=MOST_EFFORT)
    # If a fleet was found, it becomes that of production. The counts are then of all cheaper fleets, however
    # little they save.
    return search.best, CheaperMiss(
        less_frac=LIKE_PRICE_FRAC if search.best is None else 0.0,
        scenarios=len(oracle.scenarios),
        may_miss=oracle.may_miss,
        cheaper=search.cheaper,
        simulated=search.cheaper_simulated,
        is_exact=search.is_exact,
    )
