"""The most traffic that is kept in enough scenarios, held against every fleet of level 0."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from plans import CATALOG
from questions import question, traffic

from planner.documents.certificate import Throughput
from planner.errors import InfeasibleError
from planner.reports.words import throughput_line
from planner.search.evidence.certify import plan
from planner.search.evidence.plan import Plan
from planner.search.level0.level0_search import search_level0
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.plan_problem import Conditions, Problem, with_search_scenarios
from planner.search.production import most_traffic
from planner.search.production.most_traffic import (
    KEPT_STEP_FRAC,
    RateClimb,
    at_rate,
    find_most_kept_traffic,
    find_most_traffic,
    lower_until_passed,
    restrict_to_workers,
)
from planner.search.production.scenario_test import ScenarioTest, is_test_passed, untimed_test
from planner.solvers.master import Option

MOST = 4
TASK = question(
    objective="throughput",
    limits={"gpus": MOST},
    fleet={"gpus": ["h100-80g"], "max_num_batched_tokens": [512, 2048]},
    safety={"kept_in": 0.9},
)
TRACE = traffic(requests=300, rate_rps=4.0)
INPUTS = SearchInputs(TASK, TRACE, CATALOG)


@cache
def planned() -> Plan:
    return plan(TASK, TRACE, CATALOG, time_limit_s=1000.0)


def fleets_that_hold(rate_rps: float) -> int:
    """How many fleets of level 0 with as many GPUs keep the SLO in enough scenarios that a search sees."""
    problem = with_search_scenarios(at_rate(INPUTS, rate_rps).problem())
    fleets = [((Option("mixed", worker, 1.0), MOST // worker.gpus),) for worker in problem.types]
    held = sum(problem.oracle.holds(fleet) for fleet in fleets)
    for prefill, decode in itertools.product(problem.types, repeat=2):
        for n in range(1, MOST):
            if (m := (MOST - n * prefill.gpus) // decode.gpus) >= 1:
                pair = ((Option("prefill", prefill, 1.0), n), (Option("decode", decode, 1.0), m))
                held += problem.oracle.holds(pair)
    return held


def test_at_the_refuted_rate_no_fleet_keeps_enough_futures() -> None:
    on_paper, best = find_most_traffic(INPUTS)
    kept = find_most_kept_traffic(INPUTS, on_paper, best)
    assert kept is not None and on_paper.refuted_rps is not None
    found = kept[0]
    assert found.refuted_rps is not None
    assert found.rate_rps < found.refuted_rps <= found.rate_rps * (1 + KEPT_STEP_FRAC) * 1.001
    assert found.refuted_rps < on_paper.rate_rps
    assert fleets_that_hold(found.refuted_rps) == 0 < fleets_that_hold(found.rate_rps)


def test_a_pool_of_every_type_is_filled_whatever_the_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a long trace its work ends after a few types: 16 workers of TP 1 carried 20.33 requests/s, where 8
    of TP 2 on the same GPUs carry 25. Here it finds nothing at all.
    """
    on_paper = find_most_traffic(INPUTS)
    nothing = SimpleNamespace(search=SimpleNamespace(best=None), options=())
    monkeypatch.setattr(most_traffic, "search_level0", lambda *_, **__: nothing)
    monkeypatch.setattr(most_traffic, "find_fleet_quickly", lambda *_, **__: None)
    kept = find_most_kept_traffic(INPUTS, *on_paper)
    assert kept is not None and kept[0].refuted_rps is not None
    problem = with_search_scenarios(at_rate(INPUTS, kept[0].refuted_rps).problem())
    for worker in problem.types:
        assert not problem.oracle.holds(((Option("mixed", worker, 1.0), MOST // worker.gpus),))


def test_a_rate_that_was_found_is_in_the_answer_wherever_the_time_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock stands still until five rates were asked about, and then the time is over."""
    now_s, told = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def hear(said: str) -> None:
        told.append(said)
        if len(told) > 5:
            now_s[0] = 1e4

    found = plan(TASK, TRACE, CATALOG, time_limit_s=1000.0, conditions=Conditions(progress=hear))
    assert found.throughput is not None and found.throughput.refuted_rps is None
    tried = [f"most traffic: trying {found.throughput.rate_rps:g} requests/s, " in said for said in told]
    assert any(tried)
    # What is found is the rate; costs are told of only beside it.
    after = [said for said in told if "USD/h" in said]
    assert all(said.startswith(f"{found.throughput.rate_rps:g} requests/s found; ") for said in after)
    assert found.verdict.holds and found.fleet.gpus <= MOST
    assert found.status in ("best found", "not for production")


def test_workers_are_taken_as_far_as_they_go_before_all_others_are_asked() -> None:
    """Workers of one kind carry 10 requests/s, of another 25: both are asked about where they end, and all
    once beyond each."""
    ends_rps, asked = {"slow": 10.0, "fast": 25.0}, list[str]()

    def carries(rate_rps: float, workers_of: Any) -> Any:
        asked.append("all" if workers_of is None else workers_of)
        among = ends_rps if workers_of is None else [workers_of]
        return next((name for name in among if rate_rps <= ends_rps[name]), None)

    climb: Any = RateClimb(carries, 0.01, 0.1)
    climb.climb_from(3.0)
    assert climb.fleet == "fast" and 24.7 < climb.holds_rps <= 25.0 < climb.failed_rps < 25.3
    assert asked.count("all") <= 4 and asked.count("slow") <= 12


def test_a_rate_falls_until_its_fleet_passes_the_test() -> None:
    """From twice the rate that a search finds; the last test is in scenarios that no failed one has seen."""
    kept = find_most_kept_traffic(INPUTS, *find_most_traffic(INPUTS))
    assert kept is not None
    rates, fleet = kept
    too_high = Throughput(2 * rates.rate_rps, None)
    tested = lower_until_passed(INPUTS, too_high, fleet)
    assert tested.rates.refuted_rps is not None and tested.first > 0
    assert 0.5 * rates.rate_rps < tested.rates.rate_rps < tested.rates.refuted_rps <= too_high.rate_rps
    test = untimed_test(tested.problem)
    assert test is not None
    kept_in = replace(test, first=tested.first).decide(test.oracle.counts(fleet))
    assert is_test_passed(kept_in, test.safety)


def test_a_rate_that_fell_too_far_rises_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet carries 7.3 requests/s, and the scenarios that it misses at 10 are kept from 6.5 down, so the
    rate falls by 3 % until 6.332. Between that and 10 lie 7.957, which fails, and 7.098, the fourth test."""
    tested_rps: list[float] = []

    def judge(test: Any, counts: Any) -> Any:
        rate_rps = test.scenarios
        tested_rps.append(rate_rps)
        missed = [SimpleNamespace(number=n) for n in range(0 if rate_rps <= 7.3 else 20)]
        return test._kept_in(40 - len(missed), 40), missed, []

    problem: Any = INPUTS.problem()

    def problem_at(_: Any, rate_rps: float, fleet: Any) -> Any:
        return replace(problem, test_scenarios=rate_rps)

    def missed_numbers(problem: Any, counts: Any, numbers: Any) -> Any:
        return [] if problem.test_scenarios <= 6.5 else numbers

    monkeypatch.setattr(most_traffic, "_problem_of_fleet", problem_at)
    monkeypatch.setattr(most_traffic, "_missed_numbers", missed_numbers)
    monkeypatch.setattr(ScenarioTest, "decide_and_split", judge)
    fleet = problem.oracle.fleet(((problem.options()[0], 1),))
    tested = lower_until_passed(INPUTS, Throughput(10.0, 10.2), fleet)
    assert tested_rps == [10.0, 6.332, 7.957, 7.098]
    assert (tested.rates.rate_rps, tested.rates.refuted_rps) == (7.098, 7.957)


def test_a_full_pool_carries_its_most_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 0 of the known worker types was searched at each rate, up to the limit on its work. Now only all
    types are, where the largest pools fail."""
    searched_types: list[int] = []

    def search(problem: Problem, *args: Any, **options: Any) -> Any:
        searched_types.append(len(problem.types))
        return search_level0(problem, *args, **options)

    monkeypatch.setattr(most_traffic, "search_level0", search)
    kept = find_most_kept_traffic(INPUTS, *find_most_traffic(INPUTS))
    assert kept is not None and [pool.role for pool in kept[1].pools] == ["mixed"]
    assert set(searched_types) == {len(INPUTS.problem().types)}


@pytest.mark.parametrize("seats", [64, [64, 256]])
def test_searches_of_some_worker_types_have_no_option_that_the_whole_search_lacks(seats: Any) -> None:
    """Of the types that differ in budget or seats alone, one may decode. A search of the types of one fleet
    took another: the fleet for production that it found could not be tested, and was lost."""
    fleet = {"gpus": ["h100-80g"], "max_num_batched_tokens": [512, 2048, 8192], "max_num_seqs": seats}
    problem = SearchInputs(question(fleet=fleet), TRACE, CATALOG).problem()
    whole = {option.name for option in problem.options()}
    for worker in problem.types:
        restricted = restrict_to_workers(problem, problem.oracle.fleet(((Option("mixed", worker, 1.0), 1),)))
        assert worker in restricted.types
        assert {option.name for option in restricted.options()} <= whole
        assert len(restricted.types) < len(problem.types)


@pytest.mark.long
def test_its_fleet_passes_its_test_at_that_rate_and_stays_within_the_limits() -> None:
    found = planned()
    made = found.certificate.find_answer("production")
    assert found.throughput is not None and made is not None and made.kept_in is not None
    assert found.status == "certified" and made.kept_in.kept_frac >= 0.9
    assert found.fleet.gpus <= MOST
    assert found.trace.rate_rps == pytest.approx(found.throughput.rate_rps, rel=0.01)
    said = throughput_line(found.throughput)
    assert "enough scenarios" in said and f"On paper: {found.throughput.on_paper_rps:g}" in said


def test_a_promise_that_nothing_keeps_is_infeasible_at_any_rate() -> None:
    """On the smallest GPUs a prompt of thousands of tokens takes longer than the limit."""
    task = question(
        objective="throughput",
        limits={"gpus": 1},
        llm="llama-3.1-8b",
        slo={"ttft": {"p99": "60 ms"}},
        fleet={"gpus": ["a100-80g"], "max_num_batched_tokens": 2048},
        safety={"kept_in": 0.9},
    )
    with pytest.raises(InfeasibleError):
        plan(task, TRACE, CATALOG, time_limit_s=1000.0)


@pytest.mark.long
def test_where_level_0_has_no_fleet_at_any_rate_others_are_looked_for() -> None:
    """Two nodes of one kind take more than 3 kW, so only a node of each kind stands the loss of a node."""
    task = question(
        objective="throughput",
        spare="1 node",
        slo={"ttft": {"p90": "4 s"}, "tpot": {"p90": "60 ms"}},
        limits={"power": "3 kW"},
        fleet={"gpus": ["h100-80g", "a100-80g"], "max_num_batched_tokens": 2048},
        safety={"kept_in": 0.6},
    )
    found = plan(task, traffic(requests=60, rate_rps=0.5), CATALOG)
    assert found.throughput is not None and found.throughput.rate_rps > 0.2
    assert {pool.type.gpu.name for pool in found.fleet.running_pools} == {"h100-80g", "a100-80g"}
    assert found.certificate.level0 == float("inf")
    power_w = [each.fleet.power_w for each in found.alternatives if each.fleet is not None]
    assert max([*power_w, found.fleet.power_w]) <= 3000


@pytest.mark.parametrize(
    ("gpu", "rate_rps", "cost", "safety", "least_rps"),
    [("l40s-48g", 32.0, "4 usd/h", "none", 34.0), ("a100-80g", 16.0, "5 usd/h", {"kept_in": 0.9}, 20.5)],
)
def test_what_one_worker_type_leaves_of_the_limits_is_filled_with_another(
    gpu: str, rate_rps: float, cost: str, safety: Any, least_rps: float
) -> None:
    """The limit pays for one H100, and another GPU beside it. One H100 alone carries 30.9 and 19.6
    requests/s, and no more was found.
    """
    task = question(
        objective="throughput",
        llm="llama-3.1-8b",
        slo={"ttft": {"p90": "2 s"}, "tpot": {"p90": "60 ms"}},
        limits={"cost": cost},
        fleet={
            "gpus": ["h100-80g", gpu],
            "max_num_batched_tokens": 2048,
            "sold_as": {"h100-80g": "gpu", gpu: "gpu"},
        },
        deploy={"target": "llm-d"},
        safety=safety,
    )
    found = plan(task, traffic(seed=8113, requests=200, rate_rps=rate_rps), CATALOG, time_limit_s=1000.0)
    assert found.throughput is not None and found.throughput.rate_rps > least_rps
    gpus = {pool.type.gpu.name: pool.count for pool in found.fleet.running_pools}
    assert gpus == {"h100-80g": 1, gpu: 1}


def test_no_rate_is_tried_at_which_too_few_requests_are_left() -> None:
    """The worker types of a candidate were tried at rates at which a trace has ten requests."""
    tried_rps: list[float] = []

    def never(rate_rps: float, workers_of: Any) -> Any:
        tried_rps.append(rate_rps)

    climb: Any = RateClimb(never, 0.02, least_rps=1.0)
    climb.climb_from(8.0, candidate="slow")
    assert climb.fleet is None and min(tried_rps) == 1.0


def test_the_lowest_rate_is_tried_too() -> None:
    """It is 1, and halves of 3 are 1.5 and 0.75: a fleet for 1.2 was not found, and the answer infeasible."""

    def carries(rate_rps: float, workers_of: Any) -> Any:
        return "small" if rate_rps <= 1.2 else None

    for candidate in (None, "small"):
        climb: Any = RateClimb(carries, 0.01, least_rps=1.0)
        climb.climb_from(3.0, candidate=candidate)
        assert climb.fleet == "small" and 1.18 < climb.holds_rps <= 1.2


@pytest.mark.long
def test_what_no_scenarios_keep_is_not_called_infeasible() -> None:
    """A median TTFT that idle workers just keep, until steps are longer: the search in scenarios proves
    nothing. Of a limit that no rate keeps on paper every fleet was simulated.
    """
    for limit, safety, is_proved in (("40 ms", {"kept_in": 0.95}, False), ("30 ms", "none", True)):
        task = question(
            objective="throughput",
            limits={"gpus": 1},
            llm="llama-3.1-8b",
            slo={"ttft": {"p50": limit}},
            fleet={"gpus": ["h100-80g"], "max_num_batched_tokens": 2048},
            safety=safety,
        )
        with pytest.raises(InfeasibleError, match="even at") as caught:
            plan(task, TRACE, CATALOG, time_limit_s=1000.0)
        assert caught.value.is_proved == is_proved
