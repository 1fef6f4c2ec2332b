"""Plans for requests that wait for others: their traffic, their bounds, and every fleet against the best."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from every_fleet import answer, cheapest, level_0_is_the_cheapest, no_bound_is_above_any_fleet
from instances import instance
from plans import CATALOG
from questions import question
from simulations import random_case

from planner.domain import Limit, Slo
from planner.errors import InputError, TraceError
from planner.fleet import Policies
from planner.papers.goodput import poisson_traffic
from planner.reports.fact_sentences import fact_sentences_of
from planner.reports.rows import cost_rows
from planner.search.evidence.certify import plan
from planner.search.mixed.bounds import lower_bound
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.traffic_request import requested_traffic
from planner.search.oracle.verdict_cache import VerdictCache
from planner.search.problem.bill import bill_fleet
from planner.search.problem.build_problem import build_problem
from planner.search.problem.plan_problem import Problem, with_policies
from planner.search.problem.prefix_hits import PrefixHits
from planner.simulator import simulate
from planner.simulator.layout import REJECTED
from planner.solvers.required_work import compute_slo_work, find_deadlines, find_due_requests
from planner.studies.what_if import Study, study_document
from planner.traffic.scaling import rescale_trace, select_window
from planner.traffic.sessions import session_numbers, with_nominal_arrivals
from planner.traffic.trace import Trace
from planner.traffic.workload import distinct_lengths

INSTANCES = int(os.environ.get("PLANNER_INSTANCES", "120")) // 2
IN_ONE = 20


def waiting(trace: Trace, after: Sequence[tuple[int, int]], think_s: Sequence[float]) -> Trace:
    """`after`: (request, parent)."""
    edges = np.array(sorted(set(after), key=lambda edge: (edge[1], edge[0])), np.int64).reshape(-1, 2)
    return replace(trace, after=edges, think_s=np.array(think_s, float))


def chats(starts_s: Sequence[float], turns: int, think_s: float, *, tokens: int = 10) -> Trace:
    """One chat from each start; turn k has (k + 1) * `tokens` in and `tokens` out. Every chat's blocks, of so
    many tokens too, are its own but for the first, which all share.
    """
    n = len(starts_s) * turns
    ids = [
        block
        for chat in range(len(starts_s))
        for turn in range(turns)
        for block in [0, *(100 * (chat + 1) + k for k in range(turn))]
    ]
    apart = Trace(
        "chats",
        arrival_s=np.zeros(n),
        input_tokens=np.tile(tokens * np.arange(1, turns + 1), len(starts_s)),
        output_tokens=np.full(n, tokens),
        prefix_offsets=np.concatenate(([0], np.cumsum(np.tile(np.arange(1, turns + 1), len(starts_s))))),
        prefix_ids=np.array(ids),
        prefix_block_tokens=tokens,
    )
    order = np.argsort(np.repeat(starts_s, turns), kind="stable")
    in_order = apart.select(order, arrival_s=np.repeat(starts_s, turns)[order])
    pauses = [think_s if i % turns else 0.0 for i in range(n)]
    return with_nominal_arrivals(waiting(in_order, [(i, i - 1) for i in range(n) if i % turns], pauses))


def session_instance(seed: int) -> Problem:
    """`instances.instance` with waits: 3 to 9 in ten requests wait for an earlier one, some for two."""
    problem, rng = instance(seed), np.random.default_rng([seed, 7])
    trace, share = problem.trace, rng.choice([0.3, 0.6, 0.9])
    edges: list[tuple[int, int]] = []
    for child in range(1, len(trace)):
        if rng.random() < share:
            edges.append((child, int(rng.integers(max(0, child - 8), child))))
            if rng.random() < 0.15:
                edges.append((child, int(rng.integers(child))))
    pauses = rng.exponential(rng.choice([0.05, 0.3, 2.0]), len(trace)) * (rng.random(len(trace)) < 0.7)
    trace = with_nominal_arrivals(waiting(trace, edges, pauses.tolist()))
    oracle = Oracle(problem.llm, trace, problem.slo, problem.task.network, Policies(), cache=VerdictCache())
    return replace(
        problem,
        trace=trace,
        lengths=distinct_lengths(trace),
        oracle=oracle,
        slo_work=compute_slo_work(problem.slo, trace),
    )


# ------------------------------------------------------------------------------------------ nominal arrivals


def test_nominal_arrivals_are_those_of_answers_that_take_no_time() -> None:
    """0 -> 1 (5 s later) -> 2 (1 s later, but not before 9 s); 3 waits for 1 and for nothing else, 2 s."""
    trace = Trace("t", np.array([1.0, 1.0, 9.0, 9.0]), np.arange(1, 5), np.ones(4, np.int64))
    found = with_nominal_arrivals(waiting(trace, [(1, 0), (2, 1), (3, 1)], [0, 5, 1, 2]))
    assert found.arrival_s.tolist() == [1, 6, 9, 9] and found.after.tolist() == [[1, 0], [2, 1], [3, 1]]
    late = with_nominal_arrivals(waiting(trace, [(1, 0), (2, 1), (3, 1)], [0, 50, 1, 0]))
    assert late.arrival_s.tolist() == [1, 51, 51, 52]  # in that order: 2 has become the last
    assert late.input_tokens.tolist() == [1, 2, 4, 3] and late.after.tolist() == [[1, 0], [2, 1], [3, 1]]


@pytest.mark.parametrize("seed", range(6))
def test_a_fleet_does_the_same_with_nominal_arrivals(seed: int) -> None:
    """Arrivals that stood for nothing are raised, and nothing that happens changes."""
    fleet, trace, limits, _ = random_case(seed, dyadic=True)
    rng = np.random.default_rng(seed)
    n = len(trace)
    edges = [(child, int(rng.integers(child))) for child in range(1, n) if rng.integers(2)]
    before = waiting(trace, edges, (1 + rng.integers(0, 2048, n) / 1024).tolist())
    after = with_nominal_arrivals(before)
    runs = [simulate(fleet, each, limits=limits) for each in (before, after)]
    ends = [np.sort(np.nan_to_num(run.arrival_s + run.e2e_s, nan=-1.0)).tolist() for run in runs]
    assert ends[0] == ends[1]
    assert (runs[1].arrival_s >= after.arrival_s).all()


# ------------------------------------------------------------------------------------------ another rate


def test_copies_are_other_users_with_whole_sessions() -> None:
    """Twice 40 chats of 4 turns, 10 s apart: the second 40 go around the circle, and wait for their own."""
    trace = chats(np.linspace(0, 369, 40).tolist(), 4, 10.0)
    found = rescale_trace(trace, 2 * trace.rate_rps, rng=np.random.default_rng(1))
    assert len(found) == 2 * len(trace) and found.rate_rps == pytest.approx(2 * trace.rate_rps, rel=0.02)
    child, parent = found.after.T
    assert (
        found.input_tokens[child] == found.input_tokens[parent] + 10
    ).all()  # the turn before, of one chat
    assert found.arrival_s[child] == pytest.approx(found.arrival_s[parent] + 10)
    cut = 2 * len(trace.after) - len(found.after)
    assert 0 < cut <= 3  # chats across the seam: at most 30 s of a chat lie there, of one chat in 9 s
    first_block = found.prefix_ids[found.prefix_offsets[:-1]]
    assert len(set(first_block.tolist())) == 1
    own = [
        found.prefix_ids[a + 1 : b]
        for a, b in zip(found.prefix_offsets, found.prefix_offsets[1:], strict=False)
    ]
    users: dict[int, list[int]] = {}
    for i, blocks in enumerate(own):
        for block in blocks.tolist():
            users.setdefault(block, []).append(i)
    assert len(users) == 2 * 40 * 3
    turns = [sorted(found.input_tokens[using].tolist()) for using in users.values()]
    assert all(len(set(each)) == len(each) for each in turns)  # no chat has a turn twice


def test_fewer_users_keep_whole_sessions() -> None:
    trace = chats(np.linspace(0, 369, 40).tolist(), 4, 10.0)
    for how in ("thin", "superpose"):
        found = rescale_trace(trace, trace.rate_rps / 2, scale=how, rng=np.random.default_rng(1))
        assert len(found) == 80 and len(found.after) == 60
        assert found.duration_s == trace.duration_s


def test_a_part_of_a_copy_is_of_whole_sessions() -> None:
    trace = chats(np.linspace(0, 369, 40).tolist(), 4, 10.0)
    found = rescale_trace(trace, 1.25 * trace.rate_rps, rng=np.random.default_rng(1))
    assert len(found) == 200
    assert 150 - 2 <= len(found.after) <= 150


def test_a_faster_clock_shortens_pauses_too() -> None:
    trace = chats([0.0, 100.0], 2, 10.0)
    found = rescale_trace(trace, 2 * trace.rate_rps, scale="compress", rng=np.random.default_rng(1))
    assert found.arrival_s.tolist() == [0, 5, 50, 55] and found.think_s.tolist() == [0, 5, 0, 5]


def test_who_waited_for_what_lies_before_a_window_waits_no_longer() -> None:
    """A chat of three turns at 0, 10 and 20 s. In the busiest 15 s lie the last two, which are longer."""
    found = select_window(chats([0.0], 3, 10.0), "busiest 15 s")
    assert found.after.tolist() == [[1, 0]] and found.arrival_s.tolist() == [0, 10]
    assert found.notes[-1].endswith("; 1 waits for what came before the window were cut")


def test_a_session_across_llms_is_refused() -> None:
    trace = replace(chats([0.0, 5.0], 2, 10.0), llm=np.array([0, 1, 0, 0]), llms=("a", "b"))
    with pytest.raises(
        TraceError, match=r"1 requests wait for requests to another LLM .* keep a session to one"
    ):
        trace.of_llm("a")


# ------------------------------------------------------------------------------------------ bounds


def test_the_sessions_that_a_percentile_lets_go_are_the_longest() -> None:
    """Chats of 1, 2, 3 and 4 turns from 100 s on, one request of the warm-up. E2E p80 of 10 measured ones
    lets go of 2: with them of the 4 + 3 turns of the longest chats, so 3 are held. A turn begins at the
    latest 30 s after the one before plus 7 s of thought.
    """
    turns = [(chat, turn) for chat in range(4) for turn in range(chat + 1)]
    n = 1 + len(turns)
    trace = Trace("t", np.array([0.0] + [100.0 + chat for chat, _ in turns]), np.full(n, 8), np.full(n, 2))
    after = [(i, i - 1) for i, (_, turn) in enumerate(turns, start=1) if turn]
    trace = with_nominal_arrivals(waiting(trace, after, [0.0] + [7.0 * (turn > 0) for _, turn in turns]))
    slo = Slo((Limit("e2e", 0.8, 30.0),))
    those = find_due_requests(find_deadlines(slo, trace), trace, whole=True)
    assert len(those.index) == 10 and those.most_late == 7 and those.least_in_time == 3
    assert those.latest_s.max() == 103 + 3 * 37
    found = compute_slo_work(slo, trace)
    assert found.whole_frac == 3 / 11 and found.whole_s == 103 + 3 * 37 + 30
    assert found.prefill_frac == 2 / 11 and found.prefill_s == 100 + 21 + 3 + 30  # of the 4 first turns


def test_who_waits_for_a_request_of_the_warm_up_is_held_to_nothing() -> None:
    """Whether that is late is not counted, so nobody knows when the next turn comes."""
    trace = chats([0.0, 50.0, 100.0], 2, 60.0)
    those = find_due_requests(find_deadlines(Slo((Limit("e2e", 0.5, 30.0),)), trace), trace, whole=True)
    assert trace.arrival_s[those.index].tolist() == [50, 100, 110, 160]


@pytest.mark.parametrize("first", range(0, INSTANCES, IN_ONE))
def test_level_0_is_the_cheapest_of_all_fleets(first: int) -> None:
    level_0_is_the_cheapest(session_instance(seed) for seed in range(first, first + IN_ONE))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, INSTANCES // 3, IN_ONE // 2))
def test_no_policy_makes_a_fleet_hold_that_costs_less_than_the_bounds(first: int) -> None:
    for seed in range(first, first + IN_ONE // 2):
        no_bound_is_above_any_fleet(session_instance(seed), f"instance {seed}")


@pytest.mark.parametrize("seed", range(6))
def test_no_fleet_with_caches_holds_that_costs_less_than_the_bound(seed: int) -> None:
    """Chats whose prompts hold the turns before, under three routings that look for them."""
    problem, rng = instance(seed), np.random.default_rng([seed, 9])
    turns = int(rng.integers(2, 5))
    tokens = min(worker.kv_tokens for worker in problem.types) // (2 * turns + 2) // 16 * 16
    starts_s = np.sort(rng.uniform(0, float(rng.uniform(0.5, 8)), int(rng.integers(6, 20)))).tolist()
    trace = chats(starts_s, turns, float(rng.choice([0.0, 0.05, 0.5])), tokens=min(tokens, 160))
    policies, hits = Policies(prefix_cache=True), PrefixHits.of(trace)
    problem = replace(
        problem,
        trace=trace,
        hits=hits,
        lengths=hits.lengths(),
        oracle=Oracle(problem.llm, trace, problem.slo, problem.task.network, policies, cache=VerdictCache()),
        slo_work=compute_slo_work(problem.slo, trace),
    )
    stated = lower_bound(problem)
    for routing in ("cache-aware", "e2", "prefix-affinity"):
        value = cheapest(with_policies(problem, replace(policies, routing=routing)))
        assert (math.inf if stated is None else stated) <= value * (1 + 1e-9)


def test_a_pool_of_prefill_is_not_judged_without_decode() -> None:
    """Instance 188: what misses TTFT where answers take no time keeps it beside decode, which has the next
    turns come later. Taking the first for a proof, the search would end with a fleet half as dear again.
    """
    problem = session_instance(188)
    best, value = answer(problem)
    assert best is not None and [option.role for option, _ in best] == ["prefill", "decode"]
    assert not problem.oracle.prefill_meets_ttft_alone(best[:1]) and problem.oracle.holds(best)
    assert cheapest(problem) == pytest.approx(value)


# ------------------------------------------------------------------------------------------ plans

CHATS = {"slo": {"ttft": {"p90": "1 s"}, "tbt": {"p99": "80 ms"}}, "fleet": {"gpus": ["h100-80g"]}}


def talk(seed: int = 0, *, starts: int = 60, tokens: int = 400) -> Trace:
    """Chats of 4 turns that begin within 5 minutes, with 30 s of thought."""
    start_s = np.sort(np.random.default_rng(seed).uniform(0, 300, starts)).tolist()
    return chats(start_s, 4, 30.0, tokens=tokens)


def test_a_plan_for_sessions_holds_where_it_is_simulated_and_says_what_that_means() -> None:
    """Three times the users; nobody arrives before the nominal arrival, and whoever waits comes later."""
    found = plan(question(**CHATS, traffic={"rate": 2.0}), talk(), CATALOG)
    run = found.simulation
    child, parent = found.trace.after.T
    ended_s = run.arrival_s + run.e2e_s
    assert found.verdict.holds and found.certificate.level0_exact
    assert run.arrival_s[child] == pytest.approx(
        np.maximum(found.trace.arrival_s[child], ended_s[parent] + found.trace.think_s[child])
    )
    assert 0 < found.certificate.bound <= found.certificate.value
    said = " ".join(fact_sentences_of(found.certificate.assumptions))
    assert "arrives when this fleet has answered that one" in said and "the whole sessions of these" in said


def test_a_million_tokens_cost_what_the_run_takes_until_they_are_out() -> None:
    """Eight chats of six turns, pauses of 5 s: nominally the last turn comes 25 s after the last chat begins,
    in the run later, by five answers. Price * hours / tokens * 1e6, in the plan and in what-if."""
    trace, task = chats([0.5 * k for k in range(8)], 6, 5.0, tokens=200), question(**CHATS)
    found, answer_to = plan(task, trace, CATALOG), Study(trace, CATALOG).answer(task)
    run = simulate(found.fleet, trace)
    assert trace.duration_s == pytest.approx(28.5) and run.end_s > 1.1 * trace.duration_s
    millions = float(trace.input_tokens.sum() + trace.output_tokens.sum()) / 1e6
    usd = bill_fleet(found.fleet).usd_per_h * run.end_s / 3600 / millions
    assert found.usd_per_million_tokens == pytest.approx(usd)
    assert study_document(answer_to)["usd_per_million_tokens"] == pytest.approx(usd)
    assert any("to the last token" in row[2] for row in cost_rows(found)[1])


def test_what_was_rejected_was_not_served() -> None:
    """Of eight chats of six turns the last turn of one is rejected: seven tasks, and its tokens do not count.
    They were counted as served, so that a task and a token cost less.
    """
    found = plan(question(**CHATS), chats([0.5 * k for k in range(8)], 6, 5.0, tokens=200), CATALOG)
    run, last = found.simulation, int(np.argmax(found.simulation.arrival_s))
    is_last = np.arange(len(run.status)) == last
    status = np.where(is_last, REJECTED, run.status)
    rejecting = replace(run, status=status, e2e_s=np.where(is_last, np.nan, run.e2e_s))
    all_tokens, rejected = run.input_tokens + run.output_tokens, run.output_tokens[last]
    again = replace(found, simulation=rejecting)
    before, after = found.agent_figures, again.agent_figures
    assert before is not None and after is not None
    assert after.usd_per_task == pytest.approx(before.usd_per_task * 8 / 7)
    tokens = all_tokens.sum()
    factor = tokens / (tokens - all_tokens[last])
    assert again.usd_per_million_tokens == pytest.approx(found.usd_per_million_tokens * factor)
    outputs = run.output_tokens.sum()
    factor = outputs / (outputs - rejected)
    assert again.usd_per_million_output_tokens == pytest.approx(found.usd_per_million_output_tokens * factor)


@pytest.mark.slow
def test_caches_pay_where_a_prompt_holds_the_turns_before() -> None:
    """Prompts of 4000 to 16,000 tokens, of which all but the last 4000 were there a turn before."""
    trace = talk(starts=150, tokens=4000)
    plain, cached = (
        plan(question(**CHATS, policies={"prefix_cache": has_cache}), trace, CATALOG, time_limit_s=600)
        for has_cache in (False, True)
    )
    assert cached.fleet.policies.prefix_cache
    assert cached.certificate.value < plain.certificate.value
    hits = cached.simulation.token_hit_frac
    # of 1 + 2 + 3 + 4 parts 0 + 1 + 2 + 3 at best, and what a preempted prompt finds of itself
    assert hits is not None and 0.3 < hits <= 0.7


def test_sessions_that_run_on_alone_are_told() -> None:
    """Ten chats that begin within a second and go on for a minute of answers: nothing like steady traffic."""
    trace = chats(np.linspace(0, 1, 10).tolist(), 8, 0.0, tokens=200)
    found = plan(question(**CHATS), trace, CATALOG)
    assert any(
        "the fleet is judged on a load that dies away" in warning
        for warning in fact_sentences_of(found.warnings)
    )


def test_sessions_are_not_drawn_request_by_request() -> None:
    with pytest.raises(InputError, match="cannot be drawn one by one; replay the trace's own arrivals"):
        poisson_traffic(chats([0.0, 5.0], 3, 10.0))


def test_sessions_that_all_begin_at_once_are_no_traffic() -> None:
    with pytest.raises(InputError, match="at one instant, if answers took no time; a plan needs"):
        build_problem(question(**CHATS), chats([0.0, 0.0], 3, 0.0), CATALOG)


# ------------------------------------------------------------------------------------------ most traffic


@pytest.mark.long
def test_the_most_traffic_is_carried_on_every_draw() -> None:
    """The fleet keeps the SLO on each draw at the rate found, which is no higher than that of one draw."""
    limits = {"objective": "throughput", "limits": {"gpus": 4}, "fleet": {"gpus": ["h100-80g"]}}
    trace = talk(starts=40)
    once = plan(question(**CHATS | limits), trace, CATALOG)
    task = question(**CHATS | limits, traffic={"draws": 3})
    found = plan(task, trace, CATALOG)
    assert once.throughput is not None and found.throughput is not None
    assert found.throughput.rate_rps <= once.throughput.rate_rps * 1.01
    at = replace(task, rate_rps=found.throughput.rate_rps)
    for seed in range(3):
        requests, _ = requested_traffic(trace, at, seed=seed)
        run = simulate(found.fleet, requests, limits=found.slo.limits)
        assert (run.violations <= np.ceil((1 - np.array([0.9, 0.99])) * run.counted)).all()
    assert len(np.unique(session_numbers(requests))) > 1
