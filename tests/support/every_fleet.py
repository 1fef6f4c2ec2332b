"""Level 0 and the lower bounds held against every fleet there is."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from instances import fleets_of_level0, is_monotone, is_within

from planner.domain import Metric
from planner.search.level0.level0_search import search_level0
from planner.search.mixed.bounds import lower_bound
from planner.search.oracle.fleet_counts import Counts, objective_of
from planner.search.problem.idle_limits import requests_to_judge, unreachable_limits
from planner.search.problem.options import decode_options, mixed_options, prefill_options
from planner.search.problem.plan_problem import Problem, with_policies
from planner.solvers.demand import demand_bound
from planner.solvers.master import Option
from planner.solvers.required_work import find_deadlines

METRICS: tuple[Metric, ...] = ("ttft", "tbt", "tpot", "e2e")


POLICIES: tuple[dict[str, str], ...] = (
    {},
    {"queue": "sjf"},
    {"queue": "srpt"},
    {"routing": "round-robin", "decode_routing": "random"},
    {"queue": "ljf", "routing": "power-of-two"},
)


def cheapest(problem: Problem) -> float:
    """The least price of a fleet of level 0 that holds: all of them are simulated, the cheapest first."""
    fleets = sorted((c for c in fleets_of_level0(problem) if is_within(problem, c)), key=objective_of)
    return next((objective_of(c) for c in fleets if problem.oracle.holds(c)), math.inf)


def options(problem: Problem) -> list[Option]:
    return [
        *mixed_options(problem.types, "cost"),
        *prefill_options(problem.types, "cost"),
        *decode_options(problem.types, "cost"),
    ]


def answer(problem: Problem) -> tuple[Counts | None, float]:
    search = search_level0(problem).search
    assert search.is_exhausted
    return search.best, search.value


def level_0_is_the_cheapest(problems: Iterable[Problem]) -> None:
    """Every count vector simulated. Only where more workers hurt somewhere may there be a cheaper one."""
    surprises = count = 0
    for count, problem in enumerate(problems, start=1):
        best, value = answer(problem)
        if best is not None:
            assert is_within(problem, best) and problem.oracle.holds(best)
            assert objective_of(best) == pytest.approx(value)
        if cheapest(problem) < value * (1 - 1e-9):
            surprises += 1
            assert not is_monotone(problem), f"problem {count}"
    assert surprises <= count // 5


def no_bound_is_above_any_fleet(problem: Problem, where: str) -> None:
    """Whatever the policies; the demand of intervals by itself, too."""
    stated = lower_bound(problem)
    floors = unreachable_limits(problem.slo, problem.types, requests_to_judge(problem.slo, problem.trace))
    demanded = demand_bound(
        options(problem), problem.trace, problem.lengths, [find_deadlines(problem.slo, problem.trace)]
    )
    for policies in POLICIES:
        asked = replace(problem.oracle.policies, **policies)  # type: ignore[arg-type]
        value = cheapest(with_policies(problem, asked))
        assert math.isinf(value) or not floors, f"{where}, {policies}"
        assert demanded <= value * (1 + 1e-9), f"{where}, {policies}"
        assert (math.inf if stated is None else stated) <= value * (1 + 1e-9), f"{where}, {policies}"
