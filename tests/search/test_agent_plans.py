"""Plans for agents: limits on turns and tasks are kept, bounded and reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plans import CATALOG

import fleetplan
from planner.api.results import PlanResult
from planner.domain import Limit, Slo
from planner.errors import InfeasibleError
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.search.evidence import certify
from planner.search.mixed import agents_reach, infeasible, policy_search
from planner.search.oracle import work_clock
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.problem.idle_limits import requests_to_judge, unreachable_limits
from planner.search.problem.plan_problem import Problem
from planner.simulator.measured_values import measured_mask
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import Verdict, judge_slo
from planner.traffic.agents import Agents, Pause, SubAgents, draw_agents
from planner.traffic.lengths import Lognormal

AGENTS: dict[str, Any] = {
    "agents": {"count": 12, "turns": 4, "tool": "2 s", "idle": "5 s", "system": 1600, "most_tokens": 20000},
    "input": 800,
    "output": 150,
    "duration": "600 s",
}
QUESTION: dict[str, Any] = {
    "llm": "llama-3.1-70b",
    "traffic": AGENTS,
    "fleet": {"gpus": ["h100-80g"], "max_num_batched_tokens": 2048},
    "policies": {"prefix_cache": True, "routing": ["cache-aware"]},
    "safety": "none",
    "catalog": CATALOG,
}


@pytest.mark.long
def test_a_limit_on_tasks_is_judged_over_tasks() -> None:
    """The percentile is that of last end less first arrival of each task, recomputed from the requests."""
    found = fleetplan.plan({"task": {"p90": "60 s"}, "turn": {"p90": "30 s"}}, **QUESTION)
    assert isinstance(found, PlanResult)
    simulation, trace = found.plan.simulation, found.plan.trace
    inside, ends_s = measured_mask(simulation), simulation.arrival_s + simulation.e2e_s
    times_s = []
    for task in np.unique(trace.task).tolist():
        own = np.flatnonzero(trace.task == task)
        if inside[own[-1]]:
            times_s.append(float(ends_s[own].max() - simulation.arrival_s[own].min()))
    nearest = np.sort(times_s)[int(np.ceil(0.9 * len(times_s))) - 1]
    line = next(line for line in found.plan.verdict.lines if line.limit.metric == "task")
    assert line.value_s == pytest.approx(nearest) and line.holds
    assert found.to_dict()["simulation"]["task_s"]["p90"] == pytest.approx(nearest)


def test_a_task_that_no_idle_worker_ends_in_time_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered by a few simulations: no search is started. What is named to be enough is."""
    monkeypatch.setattr(infeasible, "search_level0", None)
    fleet = {"gpus": {"h100-80g": 4}, "max_num_batched_tokens": 2048}
    question = QUESTION | {"fleet": fleet, "traffic": AGENTS | {"duration": "200 s"}}
    with pytest.raises(InfeasibleError, match=r"latency: task p90 <= 1\.00 s is below") as caught:
        fleetplan.plan({"task": {"p90": "1 s"}}, **question)
    monkeypatch.undo()
    ((change,),) = caught.value.ways
    assert change.limit == "task p90" and 1.0 < change.enough < 60.0
    found = fleetplan.plan({"task": {"p90": f"{change.enough} s"}}, **question)
    assert isinstance(found, PlanResult) and found.plan.verdict.holds


@pytest.mark.long
def test_a_search_that_ends_without_a_fleet_names_limits_that_one_attains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work of a search was over before any fleet was found: what a large fleet attains is said, and a
    plan with the limits that are named is found.
    """
    slo = {"ttft": {"p90": "450 ms"}, "tpot": {"p90": "12 ms"}}
    with monkeypatch.context() as patch:
        patch.setattr(work_clock, "WORK_S", 0.05)
        with pytest.raises(InfeasibleError, match=r"or relax .*TPOT p90 to .* ms .*, with which") as failed:
            fleetplan.plan(slo, **(SMALL | STOCK))
    assert not failed.value.is_proved
    (changes,) = failed.value.ways
    enough = {change.limit.split()[0]: {"p90": f"{change.enough} s"} for change in changes}
    assert 12e-3 < next(change.enough for change in changes if change.limit == "tpot p90") < 20e-3
    relaxed = fleetplan.plan(slo | enough, **(SMALL | STOCK))
    assert isinstance(relaxed, PlanResult) and relaxed.plan.verdict.holds


@pytest.mark.parametrize("seed", range(6))
def test_the_floor_of_tasks_is_below_what_any_simulated_fleet_attains(seed: int) -> None:
    """Six random questions, each on two fleets, one of them idle; that one is near the floor."""
    rng = np.random.default_rng(seed)
    sub_agents = SubAgents(per_task=float(rng.uniform(0, 1)), at_once=2, turns=2.0)
    count, turns = int(rng.integers(2, 8)), float(rng.uniform(2, 6))
    agents = Agents(count, turns, tool=Pause(4.0, 1.0), idle=Pause(20.0), sub_agents=sub_agents)
    lengths = Lognormal(1500, 0.5), Lognormal(float(rng.integers(50, 300)), 0.5)
    trace = draw_agents(agents, lengths, 400.0, seed=seed, name="agents")
    slo = Slo(tuple(Limit(metric, 0.9, 1e-6) for metric in ("task", "task_served")))
    gpu, llm = CATALOG.gpu("h100-80g"), CATALOG.llm("llama-3.1-8b")
    worker = WorkerType(gpu, 1, CATALOG.step_latency(llm, gpu, 1), 400_000, 2048, 64).with_llm(llm)
    floors_s = {
        limit.metric: best_s
        for limit, best_s, _ in unreachable_limits(slo, [worker], requests_to_judge(slo, trace))
    }
    assert set(floors_s) == {"task", "task_served"}
    for count in (1, 16):
        fleet = Fleet(llm, (Pool("mixed", "mixed", worker, count),), Policies())
        verdict = judge_slo(simulate(fleet, trace, limits=slo.limits), slo)
        for line in verdict.lines:
            assert floors_s[line.limit.metric] <= line.value_s * (1 + 1e-9)
            assert count == 1 or line.value_s < 2.5 * floors_s[line.limit.metric]


SMALL: dict[str, Any] = {
    "llm": "llama-3.1-8b",
    "traffic": AGENTS | {"duration": "200 s"},
    "fleet": {"gpus": ["l40s-48g"], "max_num_batched_tokens": 2048},
    "safety": "none",
    "catalog": CATALOG,
}
# With GPUs without end, fleets of 256 workers are tried, whose caches take most of the time.
STOCK = {"fleet": {"gpus": {"l40s-48g": 32}, "max_num_batched_tokens": 2048}}


def test_engines_of_agents_cache_prefixes_unless_the_question_says_no() -> None:
    """The same plan as with caches named; with `prefix_cache: false` one without, which is no cheaper."""
    slo = {"turn": {"p90": "12 s"}}
    cached = fleetplan.plan(slo, **SMALL)
    named = fleetplan.plan(slo, **SMALL, policies={"prefix_cache": True, "routing": ["cache-aware"]})
    without = fleetplan.plan(slo, **SMALL, policies={"prefix_cache": False})
    assert (
        isinstance(cached, PlanResult) and isinstance(named, PlanResult) and isinstance(without, PlanResult)
    )
    assert cached.plan.fleet == named.plan.fleet and cached.plan.fleet.policies.prefix_cache
    assert cached.plan.simulation.token_hit_frac and not without.plan.fleet.policies.prefix_cache
    assert cached.plan.bill.usd_per_h <= without.plan.bill.usd_per_h


@pytest.mark.long
def test_a_search_on_paper_that_takes_its_share_goes_on_with_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = SMALL | STOCK | {"safety": {"kept_in": 0.8}}
    usual = fleetplan.plan({"turn": {"p90": "12 s"}}, **asked)
    monkeypatch.setattr(certify, "PAPER_TIME_FRAC", 0.0)
    late = fleetplan.plan({"turn": {"p90": "12 s"}}, **asked)
    assert isinstance(usual, PlanResult) and isinstance(late, PlanResult)
    assert late.plan.fleet == usual.plan.fleet and late.plan.certificate.value == usual.plan.certificate.value


@pytest.mark.long
def test_a_router_is_fitted_before_any_fleet_of_agents_is_known() -> None:
    """All prompts begin with 32,000 common tokens, about half of a prompt. A router that follows a match of
    30 % of a prompt, as it does by default, sends all requests to one worker: 16 workers of 8 GPUs miss the
    limit, and a plan has two.
    """
    agents = {"count": 60, "turns": 8, "tool": "2 s", "idle": "5 s", "system": 32000, "most_tokens": 100000}
    traffic = {"agents": agents, "input": 4000, "output": 300, "duration": "200 s"}
    result = fleetplan.plan({"ttft": {"p95": "4 s"}}, **(QUESTION | {"traffic": traffic}))
    assert isinstance(result, PlanResult) and result.plan.verdict.holds
    policies, (pool,) = result.plan.fleet.policies, result.plan.fleet.pools
    assert pool.count == 2 and policies.cache_threshold_frac > 0.5
    by_default = replace(
        result.plan.fleet,
        pools=(replace(pool, count=16),),
        policies=replace(policies, cache_threshold_frac=0.3, balance_requests=64),
    )
    limits = (Limit("ttft", 0.95, 4.0),)
    assert not judge_slo(simulate(by_default, result.plan.trace, limits=limits), Slo(limits)).holds


@pytest.mark.long
@pytest.mark.parametrize("gpus", [["h100-80g"], {"h100-80g": 8}])
def test_a_turn_that_no_number_of_workers_ends_in_time_is_answered_before_the_search(
    monkeypatch: pytest.MonkeyPatch, gpus: Any
) -> None:
    """A lower bound of 3.08 s allows 4 s, but a fleet with a worker for each agent needs more: no search is
    started. What is named to be enough is, and a tenth less is not.
    """
    monkeypatch.setattr(policy_search, "search_or_explain", None)
    fleet = {"gpus": gpus, "max_num_batched_tokens": 2048}
    question = QUESTION | {"fleet": fleet, "traffic": AGENTS | {"duration": "200 s"}}
    with pytest.raises(InfeasibleError, match=r"keeps turn p90 <= 4\.00 s: \d+ with up to two") as caught:
        fleetplan.plan({"turn": {"p90": "4 s"}}, **question)
    assert caught.value.kind == "latency" and not caught.value.is_proved
    ((change,),) = caught.value.ways
    assert change.limit == "turn p90" and 4.0 < change.enough < 8.0
    with pytest.raises(InfeasibleError):
        fleetplan.plan({"turn": {"p90": f"{0.9 * change.enough} s"}}, **question)
    monkeypatch.undo()
    result = fleetplan.plan({"turn": {"p90": f"{change.enough} s"}}, **question)
    assert isinstance(result, PlanResult) and result.plan.verdict.holds


@pytest.mark.long
def test_gaps_that_prompts_break_on_mixed_workers_are_kept_with_decode_workers() -> None:
    """A gap may take 12 ms at most. On mixed workers some token waits for a prompt, 94 ms and longer with up
    to two workers for each agent; decode workers compute no prompts.
    """
    question = QUESTION | {"traffic": AGENTS | {"duration": "200 s"}}
    result = fleetplan.plan({"ttft": {"p90": "300 ms"}, "tbt": {"p100": "12 ms"}}, **question)
    assert isinstance(result, PlanResult) and result.plan.verdict.holds
    assert {pool.role for pool in result.plan.fleet.pools} == {"prefill", "decode"}


def _judged_as(monkeypatch: pytest.MonkeyPatch, change: Callable[[Verdict], Verdict]) -> None:
    """Fleets with about a worker for each agent get another verdict."""

    simulate_and_judge = Oracle.simulate_and_judge

    def judged(oracle: Oracle, fleet: Fleet, *, record: bool) -> tuple[Simulation, Verdict]:
        simulation, verdict = simulate_and_judge(oracle, fleet, record=record)
        return simulation, change(verdict)

    def find(problem: Problem) -> tuple[Problem, Counts] | None:
        with monkeypatch.context() as patch:
            patch.setattr(Oracle, "simulate_and_judge", judged)
            return agents_reach.find_reachable_fleet(problem)

    monkeypatch.setattr(policy_search, "find_reachable_fleet", find)


def test_agents_of_whom_many_are_never_served_end_without_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A percentile that is never reached was rounded up, which ended in a traceback (OverflowError)."""

    def never(verdict: Verdict) -> Verdict:
        (line,) = verdict.lines
        return replace(verdict, lines=(replace(line, value_s=math.inf, kept_frac=0.25, holds=False),))

    _judged_as(monkeypatch, never)
    question = QUESTION | {"traffic": AGENTS | {"duration": "200 s"}}
    with pytest.raises(
        InfeasibleError, match=r"has 25 % within the limit on turn p90, the rest never"
    ) as caught:
        fleetplan.plan({"turn": {"p90": "4 s"}}, **question)
    assert caught.value.ways == () and "relax the SLO, or add" in str(caught.value)


def _keeping_limits(verdict: Verdict) -> Verdict:
    return replace(verdict, lines=tuple(replace(line, holds=True) for line in verdict.lines))


def test_agents_who_miss_the_attainment_alone_are_answered_before_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No fleet of about a worker for each agent keeps it: a search of all others would end without one."""
    monkeypatch.setattr(policy_search, "search_or_explain", None)
    _judged_as(
        monkeypatch,
        lambda verdict: replace(_keeping_limits(verdict), attainment_frac=0.97, attainment_holds=False),
    )
    question = QUESTION | {"traffic": AGENTS | {"duration": "200 s"}}
    slo = {"turn": {"p90": "4 s"}, "attainment": 0.99}
    with pytest.raises(InfeasibleError, match=r"keeps attainment 99 %: .*has 97 % of requests") as caught:
        fleetplan.plan(slo, **question)
    assert caught.value.constraint == "attainment" and not caught.value.ways


def test_agents_whose_requests_are_too_long_for_near_fleets_are_searched_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were taken for a search whose time had ended: neither was told."""
    _judged_as(monkeypatch, lambda verdict: replace(_keeping_limits(verdict), rejected=3))
    monkeypatch.setattr(policy_search, "search_or_explain", None)
    steps: list[str] = []
    question = QUESTION | {"traffic": AGENTS | {"duration": "200 s"}}
    with pytest.raises(TypeError):  # The search begins.
        fleetplan.plan({"turn": {"p90": "4 s"}}, **question, progress=steps.append)
    assert any("keep the limits and miss the SLO all the same" in step for step in steps)


@pytest.mark.long
def test_requests_of_agents_as_a_trace_get_the_router_of_described_agents() -> None:
    """Without caches they miss the SLO even on idle workers, so no such fleet is searched. The router's
    settings are fitted before the search, because with the default ones no fleet keeps it.
    """
    many = {**AGENTS, "duration": "150 s", "agents": {**AGENTS["agents"], "count": 80}}
    question = {**QUESTION, "llm": "llama-3.1-8b", "fleet": {"gpus": ["l40s"]}}
    slo = {"ttft": {"p90": "0.4 s"}}
    described = fleetplan.plan(slo, **{**question, "traffic": many})
    assert isinstance(described, PlanResult)
    del question["traffic"]
    traced = fleetplan.plan(slo, trace=described.plan.trace, **question)
    assert isinstance(traced, PlanResult)
    assert traced.cost_usd_per_h == described.cost_usd_per_h
    assert traced.fleet.policies == described.fleet.policies

    with pytest.raises(InfeasibleError, match=r"alike, so policies: \{prefix_cache: true\} may keep it"):
        fleetplan.plan(slo, trace=described.plan.trace, **{**question, "policies": {}})


@pytest.mark.long
def test_the_note_on_agents_names_no_rate_and_says_what_their_time_leaves_out() -> None:
    """Agents wait for answers, so how many requests/s they send depends on the fleet."""
    planned = fleetplan.plan({"ttft": {"p90": "1 s"}}, **QUESTION)
    assert isinstance(planned, PlanResult)
    note = planned.plan.traffic_note
    assert "of 12 agents, drawn by seed" in note and note.endswith(" (if answers took no time)")
    assert "requests/s" not in note
