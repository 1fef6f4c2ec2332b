"""Simulates all fleets of level 0 that are cheaper than the fleet of production, in its scenarios.

    min  cost(n)                                          over fleets n with one worker type per pool
    s.t. n keeps the SLO on the trace as written          (as on paper)
         n keeps it in at least S - m of S scenarios      (kept_in)

The S scenarios are drawn once, for all fleets. A fleet is refuted by the trace as written, or by m + 1
scenarios that it misses. The hardest scenarios are simulated first, and a simulation ends once more requests
are late than a percentile allows. So refuting a cheaper fleet usually takes one or m + 1 short simulations.
If the total is small, all cheaper fleets are simulated one by one, as on paper (level0/walk.py).
"""

from __future__ import annotations

from dataclasses import replace

from planner.documents.facts import CheaperMiss
from planner.search.level0.level0_search import walk_below
from planner.search.mixed.best_fleet import FleetSearch
from planner.search.oracle.fleet_counts import Counts, objective
from planner.search.problem.owned_first import objective_paid
from planner.search.problem.plan_problem import Problem
from planner.search.production.cheapest_kept import refuted_below

# All cheaper fleets are simulated if that takes at most so many requests: 7 CPU seconds, in which the plan
# `code own` of benchmarks/plans.py simulates 1,748 fleets.
MOST_EFFORT = 6_000_000
# Fleets whose prices differ by at most this share count as equally expensive.
LIKE_PRICE_FRAC = 0.01


def below_like_price(problem: Problem, best: Counts) -> float:
    """The value below which a fleet is cheaper than `best` by more than LIKE_PRICE_FRAC. If the objective is
    GPUs, a fleet below it has fewer GPUs, or equally many whose price is lower by that share.
    """
    value, in_unit = objective(best), objective_paid(problem, best)
    if problem.task.objective == "gpus":
        return in_unit + (value - in_unit) * (1 - LIKE_PRICE_FRAC)
    return value * (1 - LIKE_PRICE_FRAC)


def walk_cheaper_fleets(
    scenario_problem: Problem, paper: FleetSearch, best: Counts
) -> tuple[Counts | None, CheaperMiss]:
    """The cheapest fleet that keeps the SLO in enough scenarios and costs less than `best` by more than
    LIKE_PRICE_FRAC, None if there is none; and how many cheaper fleets there are and were simulated.
    """
    level0, value = paper.level0, below_like_price(scenario_problem, best)
    problem = scenario_problem
    if level0.search.is_exact:
        problem = refuted_below(problem, level0.search.value)
    # Fleets cheaper than the one on paper usually fail on the trace as written, so that is simulated first.
    problem = replace(problem, oracle=replace(problem.oracle, doubted_below=level0.search.value))
    problem.oracle.verdicts.update(scenario_problem.oracle.verdicts)
    search = walk_below(problem, level0, value, most_effort=MOST_EFFORT)
    oracle = problem.oracle
    return search.best, CheaperMiss(
        LIKE_PRICE_FRAC if search.best is None else 0.0,
        len(oracle.scenarios),
        oracle.may_miss,
        search.cheaper,
        search.cheaper_simulated,
        search.is_exact,
    )
