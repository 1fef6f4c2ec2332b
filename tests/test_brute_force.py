"""Level 0 and the lower bounds against every fleet there is, on random instances.

PLANNER_INSTANCES=600 takes more of them than `make test` does.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from instances import fleets_of_level0, instance, is_monotone, is_within

from planner.obliged import due
from planner.options import decode_options, judged, mixed_options, prefill_options, unreachable
from planner.searching import Problem, lower_bound, search_level0, with_policies
from planner.solvers import backend, master
from planner.solvers.demand import demand
from planner.solvers.level0 import Counts, objective
from planner.solvers.master import Limits, Option

INSTANCES = int(os.environ.get("PLANNER_INSTANCES", "120"))
IN_ONE = 20
POLICIES: tuple[dict[str, str], ...] = (
    {}, {"queue": "sjf"}, {"queue": "srpt"}, {"routing": "round-robin", "decode_routing": "random"},
    {"queue": "ljf", "routing": "power-of-two"},
)  # fmt: skip


def cheapest(problem: Problem) -> float:
    """The least price of a fleet of level 0 that holds: all of them are simulated, the cheapest first."""
    fleets = sorted((c for c in fleets_of_level0(problem) if is_within(problem, c)), key=objective)
    return next((objective(c) for c in fleets if problem.oracle.holds([c])[0]), math.inf)


def options(problem: Problem) -> list[Option]:
    return [
        *mixed_options(problem.types, "cost"), *prefill_options(problem.types, "cost"),
        *decode_options(problem.types, "cost"),
    ]  # fmt: skip


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
            assert is_within(problem, best) and problem.oracle.holds([best])[0]
            assert objective(best) == pytest.approx(value)
        if cheapest(problem) < value * (1 - 1e-9):
            surprises += 1
            assert not is_monotone(problem), f"problem {count}"
    assert surprises <= count // 5


@pytest.mark.parametrize("first", range(0, INSTANCES, IN_ONE))
def test_level_0_is_the_cheapest_of_all_fleets(first: int) -> None:
    level_0_is_the_cheapest(instance(seed) for seed in range(first, first + IN_ONE))


def no_bound_is_above_any_fleet(problem: Problem, where: str) -> None:
    """Whatever the policies; the demand of intervals by itself, too."""
    stated = lower_bound(problem)
    floors = unreachable(problem.slo, problem.types, judged(problem.slo, problem.trace))
    demanded = demand(
        options(problem), problem.trace, problem.lengths, [due(problem.slo, problem.trace)]
    ).least_objective
    for policies in POLICIES:
        asked = replace(problem.oracle.policies, **policies)  # type: ignore[arg-type]
        value = cheapest(with_policies(problem, asked))
        assert math.isinf(value) or not floors, f"{where}, {policies}"
        assert demanded <= value * (1 + 1e-9), f"{where}, {policies}"
        assert (math.inf if stated is None else stated) <= value * (1 + 1e-9), f"{where}, {policies}"


@pytest.mark.parametrize("first", range(0, INSTANCES // 6, IN_ONE))
def test_no_policy_makes_a_fleet_hold_that_costs_less_than_the_bounds(first: int) -> None:
    """The bound under five policies; without trust in gaps too, of the demand in intervals alone."""
    for seed in range(first, first + IN_ONE):
        no_bound_is_above_any_fleet(instance(seed), f"instance {seed}")


@pytest.mark.parametrize("seed", range(20))
def test_twice_the_prices_give_the_same_plan(seed: int) -> None:
    problem = instance(seed)
    dearer = tuple(
        replace(worker, gpu=replace(worker.gpu, price_usd_per_h=2 * worker.gpu.price_usd_per_h))
        for worker in problem.types
    )
    limit = problem.limits.cost_usd_per_h
    limits = replace(problem.limits, cost_usd_per_h=limit and 2 * limit)
    best, value = answer(problem)
    again, twice = answer(replace(problem, types=dearer, limits=limits))
    assert twice == pytest.approx(2 * value)
    assert [(o.name, n) for o, n in again or ()] == [(o.name, n) for o, n in best or ()]
    bounds = lower_bound(problem), lower_bound(replace(problem, types=dearer, limits=limits))
    assert (bounds[0] is None and bounds[1] is None) or bounds[1] == pytest.approx(2 * (bounds[0] or 0))


@pytest.mark.parametrize("seed", range(20))
def test_more_stock_never_costs_more(seed: int) -> None:
    problem = instance(seed)
    stock = {gpu: None if count is None else 2 * count for gpu, count in problem.limits.stock.items()}
    more = replace(problem, limits=Limits(stock, cost_usd_per_h=problem.limits.cost_usd_per_h))
    assert answer(more)[1] <= answer(problem)[1] * (1 + 1e-9)


@pytest.mark.parametrize("engine", ["cbc", "ortools"])
@pytest.mark.parametrize("seed", range(8))
def test_solvers_agree_on_the_bound(
    seed: int, engine: backend.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = instance(seed)
    expected = lower_bound(problem)
    monkeypatch.setattr(master, "run", partial(backend.run, engine=engine))
    assert lower_bound(problem) == (expected if expected is None else pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("time_limit_s", [1e-9, 1e-3])
def test_a_bound_without_time_is_lower_never_higher(
    seed: int, time_limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No error either, and "none is within the limits" only where that is so."""
    problem = instance(seed)
    expected = lower_bound(problem)

    def hurried(lp: object, **limits: float) -> backend.Outcome:
        return backend.run(lp, **(limits | {"time_limit_s": time_limit_s}))  # type: ignore[arg-type]

    monkeypatch.setattr(master, "run", hurried)
    found = lower_bound(problem)
    assert (found is None and expected is None) or (found or 0.0) <= (expected or math.inf) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_a_proposal_without_time_claims_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is None, "all fleets are excluded", only if that is known."""
    problem = instance(seed)
    choices = options(problem)
    rng = np.random.default_rng(seed)
    shares = rng.uniform(0.1, 0.5, len(choices)).tolist()
    cuts = [tuple(rng.integers(0, 3, len(choices)).tolist()) for _ in range(12)]

    def hurried(lp: object, **limits: float) -> backend.Outcome:
        return backend.run(lp, **(limits | {"time_limit_s": 1e-9}))  # type: ignore[arg-type]

    calm = master.promising(choices, shares, problem.limits, below=30.0, cuts=cuts)
    monkeypatch.setattr(master, "run", hurried)
    found = master.promising(choices, shares, problem.limits, below=30.0, cuts=cuts)
    assert calm is not None and found is not None
    counts, share = found
    assert share == 0.0 or (sum(counts) > 0 and share <= calm[1] * 1.02)


def test_a_search_without_time_does_not_claim_to_be_exhausted() -> None:
    problem = replace(instance(3), deadline=-math.inf)
    assert not search_level0(problem).search.is_exhausted
