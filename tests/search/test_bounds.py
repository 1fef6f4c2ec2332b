"""Lower bounds and floors beside fleets that hold, and the time they may take."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from plans import CATALOG
from simulations import make_trace

from benchmarks.generated_traffic import lognormal, synthesise
from planner.documents.task import PlanQuestion, parse_task
from planner.domain import Limit, Slo
from planner.errors import BoundError
from planner.fleet import Fleet, Network, Policies, Pool, Role, WorkerType
from planner.models.engine import Engine
from planner.models.latency import StepLatency
from planner.models.memory import worker_memory
from planner.reports.fact_sentences import fact_sentences_of
from planner.search.evidence.certify import certify_plan, plan, search_llm
from planner.search.evidence.findings import few_keep_all_warnings, list_warnings
from planner.search.mixed.bounds import checked_bound, envelopes, lower_bound
from planner.search.mixed.policy_search import search_policies
from planner.search.problem.bill import bill_fleet
from planner.search.problem.build_problem import SearchInputs, build_problem
from planner.search.problem.idle_limits import requests_to_judge, unreachable_limits
from planner.search.problem.link import link_too_slow
from planner.search.problem.options import decode_options, mixed_options, prefill_options, split_of
from planner.simulator import judge_slo, simulate
from planner.simulator.slo_verdict import Verdict
from planner.solvers import demand as solvers_demand
from planner.solvers.demand import _best_start, demand_bound
from planner.solvers.master import Option, attention_s, least_seconds, recompute_break_even_tokens
from planner.solvers.required_work import find_deadlines
from planner.traffic.trace import Trace
from planner.traffic.workload import coarser_lengths, distinct_lengths
from planner.units import show_share

LLM = "meta-llama/Llama-3.1-70B"


def question(slo: dict[str, object], gpus: object, *, llm: str = LLM, **more: object) -> PlanQuestion:
    return parse_task({"safety": "none", "llm": llm, "slo": slo, "fleet": {"gpus": gpus}} | more, CATALOG)


def a_pool(name: str, role: Role, gpu: str, tp: int, *, llm: str = LLM, budget: int = 2048) -> Pool:
    card, served = CATALOG.gpu(gpu), CATALOG.llm(llm)
    kv_tokens = worker_memory(served, card, tp, max_num_batched_tokens=budget).kv_tokens
    return Pool(
        name, role, WorkerType(card, tp, CATALOG.step_latency(served, card, tp), kv_tokens, budget, 256), 1
    )


def verdict_of(fleet: Fleet, trace: Trace, slo: Slo) -> Verdict:
    return judge_slo(simulate(fleet, trace, limits=slo.limits, record=True), slo)


def long_answers() -> Trace:
    """480 requests in 480 s and 3,000 more between 290 and 340 s; 20 tokens in, 800 out."""
    rng = np.random.default_rng(1)
    arrival_s = np.sort(np.concatenate([np.arange(480.0), rng.uniform(290, 340, 3000)]))
    return Trace("burst", arrival_s, np.full(3480, 20), np.full(3480, 800))


def test_one_stall_in_a_request_of_800_gaps_breaks_no_percentile_of_gaps() -> None:
    """One decode worker drowns, the other is quick: both lines hold, few requests keep both. Where a request
    that keeps TTFT was taken to decode at the pace of TBT, the bound came out at 24.88."""
    trace = long_answers()
    task = question({"ttft": {"p90": "2 s"}, "tbt": {"p99": "75 ms"}}, ["a100-80g", "h100-80g"])
    fleet = Fleet(
        CATALOG.llm(LLM),
        (
            a_pool("pre", "prefill", "a100-80g", 2, budget=8192),
            a_pool("d0", "decode", "a100-80g", 4),
            a_pool("d1", "decode", "h100-80g", 2),
        ),
        Policies(decode_routing="power-of-two"),
    )
    verdict = verdict_of(fleet, trace, task.slo)
    assert verdict.holds and verdict.attainment_frac < 0.2
    bound = lower_bound(build_problem(task, trace, CATALOG))
    assert bound is not None and 0 < bound <= bill_fleet(fleet).usd_per_h
    assert fleet.price_usd_per_h == pytest.approx(17.32)

    (warning,) = fact_sentences_of(
        few_keep_all_warnings(task.slo, verdict, simulate(fleet, trace, limits=task.slo.limits, record=True))
    )
    assert warning.startswith(f"only {show_share(verdict.attainment_frac)} of the requests keep all limits")
    assert "exceed 75 ms (TBT p99) in their longest gap, the worst takes" in warning
    assert "TTFT" not in warning or "exceed 2.00 s (TTFT p90)" in warning
    assert not few_keep_all_warnings(task.slo, replace(verdict, attainment_frac=0.46), simulate(fleet, trace))


@pytest.mark.parametrize(("queue", "is_said"), [("fcfs", False), ("sjf", True)])
def test_a_queue_that_goes_by_priority_says_who_must_give_it(queue: str, is_said: bool) -> None:
    """Behind every router but our own, requests without a priority are served as they arrive."""
    trace = make_trace(np.arange(60.0), np.full(60, 90), np.full(60, 3))
    task = question({"ttft": {"p90": "2 s"}}, ["h100-80g"])
    pool = a_pool("mixed", "mixed", "h100-80g", 4)
    fleet = Fleet(CATALOG.llm(LLM), (pool,), Policies(queue=queue))
    simulation = simulate(fleet, trace, limits=task.slo.limits, record=True)
    said = fact_sentences_of(list_warnings(fleet, simulation, task.slo, verdict_of(fleet, trace, task.slo)))
    assert any("`priority` that each request brings with it" in each for each in said) == is_said


def test_prompts_of_the_warm_up_make_no_limit_out_of_reach() -> None:
    """A prompt of 60,000 tokens takes 3 s on an idle worker; 13 of them lie in the first 50 s of 1,000."""
    inputs = np.full(1000, 200)
    inputs[:50:4] = 60_000
    trace = Trace("warm-up", np.arange(1000.0), inputs, np.full(1000, 20))
    task = question({"ttft": {"p99": "1 s"}, "tbt": {"p99": "200 ms"}}, {"h100-80g": 64})
    found = plan(task, trace, CATALOG)
    assert found.verdict.holds and found.verdict.lines[0].value_s < 0.1
    later = replace(trace, input_tokens=np.roll(inputs, 500))
    types = build_problem(task, trace, CATALOG).types
    assert not unreachable_limits(task.slo, types, requests_to_judge(task.slo, trace))
    ((limit, floor_s, _),) = unreachable_limits(task.slo, types, requests_to_judge(task.slo, later))
    assert limit.metric == "ttft" and floor_s > 1.0


def test_a_cached_prompt_takes_the_front_end_its_time() -> None:
    """vLLM makes tokens of all 60,000 at 5 us each, 0.3 s, cached or not: agents with TTFT p90 200 ms
    had no answer in any time, as an idle worker was thought to take 30 ms.
    """
    trace = Trace("turns", np.arange(200.0), np.full(200, 60_000), np.full(200, 2))
    slo = Slo((Limit("ttft", 0.9, 0.2),))
    types = build_problem(question({"ttft": {"p90": "9 s"}}, ["h100-80g"]), trace, CATALOG).types
    engine = Engine("vllm", "0.33.0", async_scheduling=True, prompt_token_s=5e-6)
    judged_requests = requests_to_judge(slo, trace, np.full(200, 59_500))
    assert not unreachable_limits(slo, [replace(worker, engine=None) for worker in types], judged_requests)
    ((_, floor_s, _),) = unreachable_limits(
        slo, [replace(worker, engine=engine) for worker in types], judged_requests
    )
    assert 0.3 < floor_s < 0.4


@pytest.mark.parametrize(
    ("llm", "fleet"),
    [
        (LLM, {"gpus": ["h100-80g"], "max_num_seqs": [8, 256]}),
        ("deepseek-v3", {"gpus": ["h200-141g"], "dp": [16]}),
    ],
)
def test_an_envelope_is_as_good_as_every_option(llm: str, fleet: dict[str, object]) -> None:
    """Graphs of 8 seats end at 16 tokens, those of 256 at 512; and prefill workers of 16 ranks run another
    all-to-all than decode workers. With the step times of the first option alone the least work of a decode
    worker came out 1.1 to 2.2 times as long, and bounds with it.
    """
    task = parse_task(
        {"safety": "none", "llm": llm, "slo": {"ttft": {"p90": "9 s"}}, "fleet": fleet}, CATALOG
    )
    trace = make_trace(np.arange(50.0), [2000] * 50, [100] * 50)
    types = build_problem(task, trace, CATALOG).types
    for of_role in (mixed_options, prefill_options, decode_options):
        options = of_role(types, "cost")
        bests = envelopes(options)
        for option in options:
            least_s = min(
                float(least_seconds(best, 2000.0, 100.0))
                for best in bests
                if split_of(best.type) == split_of(option.type)
            )
            assert least_s <= float(least_seconds(option, 2000.0, 100.0)) * (1 + 1e-12)


def test_a_mix_of_pairs_and_mixed_workers_is_not_called_simulated_where_it_is_not() -> None:
    """A link too slow for all requests leaves pairs out, and llm-d takes one kind of workers: what was left
    of the mixes was simulated, and "every cheaper one" was said. Level 0 may still walk both kinds.
    """
    trace = make_trace(np.arange(0.0, 60.0, 0.1), [1500] * 600, [50] * 600)
    stock = {"h100-80g": 2, "l40s-48g": 2}
    fleet = {"gpus": stock, "sold_as": dict.fromkeys(stock, "gpu"), "max_num_batched_tokens": 2048}
    slow = {"network": {"bandwidth": "10 MB/s"}}
    found = []
    for more, deploy in (({}, None), (slow, None), ({}, {"target": "llm-d"})):
        document = {
            "safety": "none",
            "llm": "llama-3.1-8b",
            "slo": {"ttft": {"p90": "1 s"}},
            "fleet": fleet | more,
        }
        task = parse_task(document | ({"deploy": deploy} if deploy else {}), CATALOG)
        ((_, search),) = search_llm(SearchInputs(task, trace, CATALOG))
        level0 = search.level0
        assert level0.search.is_exact
        found.append((search.is_every_mix_simulated, len(level0.options), len(level0.with_role("decode"))))
    assert found == [(True, 24, 8), (False, 8, 0), (False, 8, 8)]


def test_gaps_are_out_of_reach_only_where_some_must_be_counted() -> None:
    """200 requests within a second: a fleet whose first tokens come after it has no gap that counts."""
    slo = Slo((Limit("ttft", 0.9, 2.0), Limit("tbt", 0.99, 1e-4)))
    task = question({"ttft": {"p90": "2 s"}, "tbt": {"p99": "1 ms"}}, ["h100-80g"])
    for seconds, some in ((1.0, False), (200.0, True)):
        trace = Trace("t", np.linspace(0, seconds, 200), np.full(200, 400), np.full(200, 50))
        types = build_problem(replace(task, slo=Slo((Limit("ttft", 0.9, 2.0),))), trace, CATALOG).types
        broken = unreachable_limits(slo, types, requests_to_judge(slo, trace))
        assert [limit.metric for limit, _, _ in broken] == (["tbt"] if some else [])


def test_the_bound_knows_fleets_that_turn_the_longest_request_away() -> None:
    """An L4 holds 29,152 tokens: alone it rejects the one request of 40,020 and keeps every line else, which
    is no kept SLO. The bound, which knows lines alone, stays below it; plans need two.
    """
    llm, n = "meta-llama/Llama-3.1-8B", 300
    inputs = np.full(n, 100)
    inputs[150] = 40_000
    trace = Trace("t", np.arange(0.0, 3.0 * n, 3.0), inputs, np.full(n, 20))
    task = question({"ttft": {"p90": "2 s"}, "tbt": {"p90": "500 ms"}}, ["l4-24g"], llm=llm)
    small = Fleet(CATALOG.llm(llm), (a_pool("mixed", "mixed", "l4-24g", 1, llm=llm, budget=512),))
    verdict = verdict_of(small, trace, task.slo)
    assert all(line.holds for line in verdict.lines)
    assert not verdict.holds and verdict.rejected == 1
    found = plan(task, trace, CATALOG)
    assert found.certificate.bound <= bill_fleet(small).usd_per_h * (1 + 1e-9) < found.certificate.value
    assert found.verdict.rejected == 0
    assert any(
        "KV cache of l4-24g tp1 is too small" in line
        for line in fact_sentences_of(found.certificate.assumptions)
    )


@pytest.mark.parametrize("lower", [None, 10.1])
def test_a_bound_above_a_fleet_that_holds_stops_the_certificate(lower: float | None) -> None:
    with pytest.raises(BoundError, match=r"the lower bound says that .* and a fleet of 10 keeps the SLO"):
        checked_bound(lower, 10.0)
    assert checked_bound(10.0 * (1 + 1e-7), 10.0) == 10.0 and checked_bound(9.0, 10.0) == 9.0


def test_no_interval_begins_after_its_end() -> None:
    """Ten at 0 s, one at 100 s; R = 2. In [0, 1]: 10 - 2. Beginning at 100 s it would have "0 + 2 x 99"."""
    arrival_s = np.array([0.0] * 10 + [100.0])
    assert _best_start(arrival_s, np.array([1.0] * 10 + [0.0]), 2.0, 1.0) == (0.0, 8.0)
    assert _best_start(arrival_s, np.zeros(11), 2.0, 0.0) is None


def test_a_burst_before_a_quiet_end_is_seen() -> None:
    """100 prompts at 50 s, 1 s of work each, due in 10 s: ten workers, whatever little comes later."""
    latency = StepLatency((1.0, 1000.0), (1e-3, 1.0), 0, 0, 0, 0, 0, basis="by hand")
    pool = a_pool("m", "mixed", "h100-80g", 4, budget=8192)
    option = Option("mixed", replace(pool.type, latency=latency, max_num_batched_tokens=1000), 1.0)
    arrival_s = np.concatenate([np.arange(50.0), np.full(100, 50.0), np.arange(51.0, 151.0, 10)])
    inputs = np.where(arrival_s == 50.0, 1000, 1)
    trace = Trace("t", arrival_s, inputs, np.ones(len(inputs), np.int64))
    slo = Slo((Limit("ttft", 1.0, 10.0),))
    found = demand_bound([option], trace, distinct_lengths(trace), [find_deadlines(slo, trace)])
    assert found == pytest.approx(10.0, rel=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_decoding_is_priced_at_what_recomputing_costs_where_that_is_less(seed: int) -> None:
    """Of every token the cheaper of the two, enumerated; with caches the prompt is not computed again."""
    rng = np.random.default_rng(seed)
    a, b, d, e = (
        float(rng.choice([0.0, 1.0])) * rng.uniform(*size)
        for size in ((0, 1e-7), (0, 1e-4), (0, 2e-6), (0, 1e-4))
    )
    latency = StepLatency((1.0, 2.0), (1e-3, 1e-3), a, b, d, e, 0.0, basis="drawn")
    token_s = float(rng.choice([0.0, 1e-6, 5e-5]))
    for n in (1, 5, 60, 900):
        for gaps in (1, 3, 40, 300):
            context = n + np.arange(1.0, gaps + 1)
            for is_cached in (False, True):
                again = context - n if is_cached else context
                pairs = again * (context - (again - 1) / 2)
                recomputed_s = token_s * (again - 1) + a * pairs + e
                least_s = np.minimum(b + d * context, recomputed_s).clip(0).sum()
                found = attention_s(
                    latency, token_s, np.array([1.0 * n]), np.array([1.0 * gaps]), is_cached=is_cached
                )
                assert found[0] <= least_s * (1 + 1e-9) + 1e-15
    if 0 < (context_tokens := recompute_break_even_tokens(latency, token_s)) < 1e6:
        c = math.floor(context_tokens) - 1.0
        if c >= 1:
            assert token_s * (c - 1) + a * c * (c + 1) / 2 + e <= b + d * c + 1e-12


def test_coarser_lengths_are_less_work_of_as_many_requests() -> None:
    rng = np.random.default_rng(0)
    trace = Trace("t", np.arange(60_000.0), rng.integers(1, 9000, 60_000), rng.integers(1, 900, 60_000))
    lengths = distinct_lengths(trace)
    coarse = coarser_lengths(lengths)
    assert len(coarse.requests) <= 20_000 < len(lengths.requests) and coarse.requests.sum() == 60_000
    for fine, rough in (
        (lengths.input_tokens, coarse.input_tokens),
        (lengths.output_tokens, coarse.output_tokens),
    ):
        total, less = fine @ lengths.requests, rough @ coarse.requests
        assert 0.9 * total < less <= total and rough.min() >= fine.min()


def test_a_bound_on_coarser_lengths_is_a_little_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one pair of lengths too many they are rounded down: not above the bound of all, nor far below."""
    trace, slo = some_traffic(), Slo((Limit("e2e", 0.9, 20.0),))
    kind = a_pool("w", "mixed", "h100-80g", 4).type
    option, lengths = Option("mixed", kind, 1.0), distinct_lengths(trace)
    exact = demand_bound([option], trace, lengths, [find_deadlines(slo, trace)])
    monkeypatch.setattr(solvers_demand, "MOST_PAIRS", len(lengths.requests) - 1)
    coarse = demand_bound([option], trace, lengths, [find_deadlines(slo, trace)])
    assert 0.8 * exact <= coarse <= exact * (1 + 1e-9) and exact > 0


def test_prices_without_time_are_none_and_the_bound_nothing() -> None:
    """With millions of lengths the prices alone took minutes: they end with the deadline."""
    trace = some_traffic()
    options = [Option("mixed", a_pool("w", "mixed", "h100-80g", 4).type, 1.0)]
    with pytest.raises(solvers_demand.UnpricedError):
        solvers_demand.work_prices(options, distinct_lengths(trace), whole=True, until_s=time.monotonic())


def test_a_slow_link_is_refuted_by_what_must_cross_it_alone() -> None:
    """1,000 prompts of 1,600 tokens in 1,000 s. TTFT and TBT oblige nobody to decode but half of the last
    tenth: 48 of 95 s and twice 2 s of waiting; TTFT and TPOT all but 11 %."""
    trace = Trace("t", np.arange(1001.0), np.full(1001, 1600), np.full(1001, 20))
    gaps: dict[str, object] = {"ttft": {"p90": "2 s"}, "tbt": {"p99": "200 ms"}}
    means: dict[str, object] = {"ttft": {"p90": "2 s"}, "tpot": {"p99": "200 ms"}}
    prompt_bytes = 1600 * CATALOG.llm(LLM).kv_bytes_per_token
    for slo, share in ((gaps, 48 / 99), (means, 0.89 * 0.95)):
        for factor, is_slow in ((0.95, True), (1.05, False)):
            problem = build_problem(question(slo, ["h100-80g"]), trace, CATALOG)
            network = Network(bandwidth_bytes_per_s=factor * share * prompt_bytes)
            problem = replace(problem, task=replace(problem.task, network=network))
            assert (link_too_slow(problem) is not None) == is_slow, (slo, factor)


def some_traffic() -> Trace:
    return synthesise(
        300,
        12.0,
        input_tokens=lognormal(1200, 1.0),
        output_tokens=lognormal(120, 1.0),
        gap_cv=1.5,
        rng=np.random.default_rng(0),
    )


def test_a_bound_without_time_is_nothing_and_takes_none() -> None:
    task = question({"ttft": {"p90": "1 s"}, "tbt": {"p99": "80 ms"}}, ["a100-80g", "h100-80g"])
    problem = build_problem(task, some_traffic(), CATALOG)
    began_s = time.process_time()
    assert lower_bound(replace(problem, deadline=-math.inf)) == 0.0
    assert time.process_time() - began_s < 1.0
    assert (lower_bound(problem) or 0.0) > 0.0


def test_what_there_is_no_time_to_simulate_is_not_claimed() -> None:
    task = question({"ttft": {"p90": "1 s"}, "tbt": {"p99": "80 ms"}}, ["a100-80g", "h100-80g"])
    trace = some_traffic()
    problem = build_problem(task, trace, CATALOG)
    searched = search_policies(replace(problem, bound=lower_bound(problem)))
    inputs = SearchInputs(task, trace, CATALOG)
    calm = certify_plan(searched, inputs)
    hurried = certify_plan(searched, inputs, deadline=-math.inf)
    assert calm.certificate.neighbours and not hurried.certificate.neighbours
    assert calm.verdict == hurried.verdict and calm.certificate.bound == hurried.certificate.bound
    assert not any("used up" in line for line in fact_sentences_of(calm.warnings))
    (said,) = [
        line for line in fact_sentences_of(hurried.warnings) if line.startswith("not simulated, as the work")
    ]
    assert "fleets with one worker fewer" in said and "other draws of this traffic" in said
    assert not any("nothing is drawn here" in line for line in fact_sentences_of(hurried.certificate.binding))
