"""Level 0 and the lower bounds against every fleet there is, on random instances.

PLANNER_INSTANCES=600 takes more of them than `make test` does.
"""

import itertools
import math
import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from every_fleet import METRICS, answer, level_0_is_the_cheapest, no_bound_is_above_any_fleet, options
from instances import fleets_of_level0, instance, is_within
from shares import some

from planner.documents.facts import NoRoomForKv
from planner.domain import Limit, Slo
from planner.fleet import Policies
from planner.search.level0.level0_search import search_level0
from planner.search.mixed.bounds import lower_bound
from planner.search.oracle.fleet_counts import Counts, objective_of
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.verdict_cache import VerdictCache
from planner.search.problem.idle_limits import requests_to_judge, unreachable_limits
from planner.search.problem.link import link_too_slow
from planner.search.problem.options import OptionLeftOut, decode_options, mixed_options, prefill_options
from planner.search.problem.plan_problem import Problem, with_policies
from planner.solvers import backend, master
from planner.solvers.master import FleetLimits
from planner.solvers.required_work import compute_slo_work
from planner.traffic.workload import distinct_lengths

INSTANCES = int(os.environ.get("PLANNER_INSTANCES", "120"))
IN_ONE = 20


@pytest.mark.long
@pytest.mark.parametrize("first", some(range(0, INSTANCES, IN_ONE), 4))
def test_level_0_is_the_cheapest_of_all_fleets(first: int) -> None:
    level_0_is_the_cheapest(instance(seed) for seed in range(first, first + IN_ONE))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, INSTANCES // 6, IN_ONE))
def test_no_policy_makes_a_fleet_hold_that_costs_less_than_the_bounds(first: int) -> None:
    """The bound under five policies; without trust in gaps too, of the demand in intervals alone."""
    for seed in range(first, first + IN_ONE):
        no_bound_is_above_any_fleet(instance(seed), f"instance {seed}")


ALL_POLICIES: tuple[dict[str, object], ...] = (
    *(
        dict[str, object](routing=how, decode_routing=how, queue=queue)
        for how, queue in itertools.product(
            ("jsq", "least-outstanding", "round-robin", "random", "power-of-two", "best-fit", "token-jsq"),
            ("fcfs", "sjf", "ljf", "srpt"),
        )
    ),
    {"admission": "reserve-static"},
    {"admission": "reserve-dynamic"},
    {"queue": "sjf", "queue_window_s": 0.5},
    {"pools": "flip", "flip_after_s": 0.5},
)


def hard_instance(seed: int) -> Problem:
    """`instance` where a percentile lets go what is dear: bursts, few long outputs or prompts, also of the
    warm-up or too long for some workers, a slow link; any percentiles, on any lines.
    """
    rng, problem = np.random.default_rng([seed, 3]), instance(seed)
    trace = problem.trace
    n, most = len(trace), max(worker.kv_tokens for worker in problem.types) // 2
    arrival_s = trace.arrival_s * float(rng.choice([1.0, 0.4, 0.15]))
    inputs, outputs = trace.input_tokens.copy(), trace.output_tokens.copy()
    if rng.random() < 0.5:  # a burst, somewhere
        some = rng.random(n) < rng.uniform(0.2, 0.7)
        at_s = rng.uniform(arrival_s[0], arrival_s[-1])
        arrival_s[some] = at_s + 0.05 * (arrival_s[some] - at_s)
        arrival_s.sort()
    early = (arrival_s - arrival_s[0]) < (arrival_s[-1] - arrival_s[0]) / 20
    for tokens in (inputs, outputs):
        chosen = early if rng.random() < 0.3 else rng.random(n) < rng.choice([0.02, 0.1, 0.3])
        tokens[chosen] = rng.integers(most // 2, most) if rng.random() < 0.6 else tokens[chosen]
    if rng.random() < 0.3:
        outputs[rng.random(n) < 0.5] = 1
    trace = replace(trace, arrival_s=arrival_s, input_tokens=inputs, output_tokens=outputs)
    shares = rng.choice([0.1, 0.5, 0.75, 0.9, 0.99, 1.0], 4).tolist()
    limits_s = np.exp(rng.uniform((-4, -5, -5, -2), (1, 0, -1, 3))).tolist()
    all_four = [Limit(*line) for line in zip(METRICS, shares, limits_s, strict=True)]
    limits = tuple(
        limit for limit, p in zip(all_four, (0.6, 0.35, 0.35, 0.35), strict=True) if rng.random() < p
    )
    slo = Slo(
        limits or (Limit("tbt", 0.9, 0.1),),
        attainment_frac=float(rng.choice([0.5, 0.9, 1.0])) if rng.random() < 0.3 else None,
    )
    network = replace(
        problem.task.network,
        bandwidth_bytes_per_s=float(10 ** rng.uniform(6.5, 10)),
        transfer="layerwise" if rng.random() < 0.5 else "serialised",
    )
    longest = int((inputs + outputs).max())
    held = tuple(worker for worker in problem.types if worker.kv_tokens >= longest + 16)
    small = tuple(worker for worker in problem.types if worker not in held)
    return replace(
        problem,
        slo=slo,
        trace=trace,
        lengths=distinct_lengths(trace),
        types=held,
        left_out=(OptionLeftOut("small", NoRoomForKv(), small),),
        slo_work=compute_slo_work(slo, trace),
        task=replace(problem.task, network=network),
        oracle=Oracle(problem.llm, trace, slo, network, Policies(), cache=VerdictCache()),
    )


def fleets_of_many(problem: Problem, rng: np.random.Generator, how_many: int) -> list[Counts]:
    """Random fleets of several types in every role, at least half of them with a pair."""
    types = (*problem.types, *problem.left_out[0].workers)
    roles = (mixed_options(types, "cost"), prefill_options(types, "cost"), decode_options(types, "cost"))
    found: list[Counts] = []
    while len(found) < how_many:
        mixed, prefill, decode = (
            [(option, int(rng.integers(1, 4))) for option in options if rng.random() < 0.5]
            for options in roles
        )
        pair = [*prefill, *decode] if prefill and decode else []
        if pair and rng.random() < 0.7:
            mixed = [*(mixed if rng.random() < 0.3 else ()), *pair]
        if mixed:
            found.append(tuple(mixed))
    return found


def no_cheaper_fleet_holds(seed: int) -> bool:
    """Of all of level 0 and random others, under random policies; whether there were any."""
    problem, rng = hard_instance(seed), np.random.default_rng([seed, 4])
    every = replace(problem, types=(*problem.types, *problem.left_out[0].workers))
    stated = lower_bound(problem)
    bound = math.inf if stated is None else stated * (1 - 1e-6)
    fleets = [*fleets_of_level0(every), *fleets_of_many(problem, rng, 60)]
    fleets = [counts for counts in fleets if is_within(problem, counts)]
    cheaper = [counts for counts in fleets if objective_of(counts) < bound]
    floors = problem.types and unreachable_limits(
        problem.slo, problem.types, requests_to_judge(problem.slo, problem.trace)
    )
    small = {worker.name for worker in problem.left_out[0].workers}
    hopeless = [counts for counts in fleets if floors and not small & {o.type.name for o, _ in counts}]
    slow = link_too_slow(problem)
    apart = [counts for counts in fleets if slow and all(option.role != "mixed" for option, _ in counts)]
    for policies in rng.choice(np.array(ALL_POLICIES, object), 4, replace=False):
        asked = replace(problem.oracle.policies, **policies)
        oracle = with_policies(problem, asked).oracle
        for what, those in (("bound", cheaper), ("floor", hopeless), ("link", apart)):
            for counts in those:
                assert not oracle.holds(counts), f"{what}, instance {seed}, {policies}, {counts}"
    return bool(cheaper)


@pytest.mark.long
@pytest.mark.parametrize("first", some(range(0, INSTANCES // 2, IN_ONE), 1))
def test_no_fleet_of_any_kind_holds_that_costs_less_than_the_bound(first: int) -> None:
    """Nor one that idle workers are too slow for, nor pairs that the link is too slow for."""
    tested = [no_cheaper_fleet_holds(seed) for seed in range(first, first + IN_ONE)]
    assert sum(tested) >= IN_ONE // 10


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_more_stock_never_costs_more(seed: int) -> None:
    problem = instance(seed)
    stock = {gpu: None if count is None else 2 * count for gpu, count in problem.limits.stock.items()}
    more = replace(problem, limits=FleetLimits(stock, cost_usd_per_h=problem.limits.cost_usd_per_h))
    assert answer(more)[1] <= answer(problem)[1] * (1 + 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["cbc", "ortools"])
@pytest.mark.parametrize("seed", range(8))
def test_solvers_agree_on_the_bound(
    seed: int, engine: backend.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = instance(seed)
    expected = lower_bound(problem)
    monkeypatch.setattr(master, "run_highs", partial(backend.run_highs, engine=engine))
    assert lower_bound(problem) == (expected if expected is None else pytest.approx(expected, rel=1e-6))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("time_limit_s", [1e-9, 1e-3])
def test_a_bound_without_time_is_lower_never_higher(
    seed: int, time_limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No error either, and "none is within the limits" only where that is so."""
    problem = instance(seed)
    expected = lower_bound(problem)

    def hurried(lp: object, **limits: float) -> backend.SolverOutcome:
        return backend.run_highs(lp, **(limits | {"time_limit_s": time_limit_s}))  # type: ignore[arg-type]

    monkeypatch.setattr(master, "run_highs", hurried)
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

    def hurried(lp: object, **limits: float) -> backend.SolverOutcome:
        return backend.run_highs(lp, **(limits | {"time_limit_s": 1e-9}))  # type: ignore[arg-type]

    calm = master.find_promising_fleet(choices, shares, problem.limits, below_value=30.0, cuts=cuts)
    monkeypatch.setattr(master, "run_highs", hurried)
    found = master.find_promising_fleet(choices, shares, problem.limits, below_value=30.0, cuts=cuts)
    assert calm is not None and found is not None
    counts, share = found
    assert share == 0.0 or (sum(counts) > 0 and share <= calm[1] * 1.02)


def test_a_search_without_time_does_not_claim_to_be_exhausted() -> None:
    problem = replace(instance(3), deadline=-math.inf)
    assert not search_level0(problem).search.is_exhausted
