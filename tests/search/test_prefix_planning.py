"""Plans that count on prefix caches: what may be asked, bounds that hold with them, what they save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.generated_traffic import preble
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.slo import parse_slo
from planner.documents.task import PlanQuestion, parse_task
from planner.errors import InputError
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.memory import worker_memory
from planner.policies import PLANNED_QUEUES, PLANNED_ROUTINGS, PLANNED_WITH_CACHES, QUEUE, ROUTING
from planner.reports.fact_sentences import fact_sentences_of
from planner.reports.output import render
from planner.search.evidence.certify import plan
from planner.search.evidence.plan import Plan
from planner.search.mixed.router_fit import _slack, fit_router
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.prefixes.prefix_placing import pool_prefixes
from planner.search.problem.idle_limits import floor_s
from planner.search.problem.prefix_hits import PrefixHits
from planner.simulator import judge_slo, simulate
from planner.solvers.master import Option, least_seconds, least_token_seconds
from planner.traffic.described import draw_requests
from planner.traffic.scaling import rescale_trace
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

TRACES = Path(__file__).parents[2] / "examples" / "traces"
LLM = "meta-llama/Llama-3.1-8B"


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return read_catalog()


@pytest.fixture(scope="module")
def worker(catalog: Catalog) -> WorkerType:
    llm, gpu = catalog.llm(LLM), catalog.gpu("l40s-48g")
    return WorkerType(
        gpu, 1, catalog.step_latency(llm, gpu, 1), worker_memory(llm, gpu, 1).kv_tokens, 2048, 256
    )


@pytest.fixture(scope="module")
def sample() -> Trace:
    return read_trace(TRACES / "shared-prefixes-sample.jsonl")


def question(catalog: Catalog, **policies: object) -> PlanQuestion:
    document = {
        "safety": "none",
        "llm": LLM,
        "slo": {"ttft": {"p90": "500 ms"}, "tbt": {"p99": "60 ms"}},
        "traffic": {"rate": 30, "scale": "compress"},
        "fleet": {"gpus": ["l40s-48g"]},
        "policies": policies,
    }
    return parse_task(document, catalog)


def three_prompts() -> Trace:
    """Blocks of 100 tokens: 0-1, then 0-1-2, then 0-3 of which the last block is half full."""
    return Trace(
        name="three",
        arrival_s=np.array([0.0, 1.0, 2.0]),
        input_tokens=np.array([200, 300, 150]),
        output_tokens=np.array([5, 5, 5]),
        prefix_offsets=np.array([0, 2, 5, 7]),
        prefix_ids=np.array([0, 1, 0, 1, 2, 0, 3]),
        prefix_block_tokens=100,
    )


def test_policies_to_choose_from(catalog: Catalog) -> None:
    """Without caches first, so that of equal fleets the one that counts on no hit is taken."""
    task = question(catalog, prefix_cache=True, routing=["jsq", "e2"], queue=["fcfs", "sjf"])
    found = [(p.prefix_cache, p.routing, p.queue) for p in task.policy_choices()]
    assert found == [
        (False, "jsq", "fcfs"),
        (False, "jsq", "sjf"),
        (True, "jsq", "fcfs"),
        (True, "jsq", "sjf"),
        (True, "e2", "fcfs"),
        (True, "e2", "sjf"),
    ]
    assert question(catalog).policy_choices() == (Policies(),)
    only = question(catalog, prefix_cache=True, routing="e2").policy_choices()
    assert [(p.prefix_cache, p.routing) for p in only] == [(False, "jsq"), (True, "e2")]


def test_every_name_is_a_policy_of_the_simulator() -> None:
    looking = {name for name, row in ROUTING.items() if row.needs_caches}
    assert set(PLANNED_WITH_CACHES) <= looking
    assert set(PLANNED_ROUTINGS) <= set(ROUTING) - set(PLANNED_WITH_CACHES)
    assert set(PLANNED_QUEUES) <= set(QUEUE)


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({"routing": "e2"}, "e2 looks at prefix caches; add prefix_cache: true"),
        ({"prefix_cache": "yes"}, "expected true or false, found 'yes'"),
        ({"prefix_cache": True, "routing": "fastest"}, "policies: routing: expected one of jsq"),
        ({"prefix_cache": True, "routing": ["e2", "e2"]}, "found one twice"),
    ],
)
def test_what_cannot_be_asked(catalog: Catalog, policies: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        question(catalog, **policies)


def test_caches_need_block_ids(catalog: Catalog) -> None:
    with pytest.raises(InputError, match="has no block ids, which policies: prefix_cache needs"):
        plan(question(catalog, prefix_cache=True), read_trace(TRACES / "azure-code-sample.csv"), catalog)


def test_hits_by_hand() -> None:
    """In arrival order the second hits 200 tokens and the third 100; 200, 200 and 100 are in another prompt.

    A cache of one block has only block 0 left for the second (its last block went first) and for the third.
    """
    hits = PrefixHits.of(three_prompts())
    assert hits.cached_tokens().tolist() == [0, 200, 100]
    assert hits.shared_tokens.tolist() == [200, 200, 100]
    assert hits.cached_tokens(100).tolist() == [0, 100, 100]
    lengths = hits.lengths()
    assert lengths.input_tokens.tolist() == [150, 200, 300]
    assert np.asarray(lengths.cached_tokens).tolist() == [100, 0, 200]
    classes = hits.workload()
    assert sorted(classes.min_uncached_tokens.tolist()) == [50, 100, 200]


def test_a_cached_prompt_costs_what_is_left_of_it(worker: WorkerType) -> None:
    """Prefill of the whole less prefill of the part, but for the cost per prefill; memory is the rest's."""
    option = Option("prefill", worker, 1.0)
    whole, part = least_seconds(option, 1000, 1), least_seconds(option, 600, 1)
    assert least_seconds(option, 1000, 1, 600) == pytest.approx(whole - part + worker.latency.e_s)
    mixed = Option("mixed", worker, 1.0)
    assert least_token_seconds(mixed, 1000, 11, 1000) == pytest.approx(
        least_token_seconds(mixed, 1000, 11) * 5 / 1005
    )


@pytest.mark.parametrize("routing", ["round-robin", "jsq", "cache-aware", "e2"])
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_does_with_less_work_than_the_bound_counts(
    catalog: Catalog, worker: WorkerType, routing: str, seed: int
) -> None:
    """Busy seconds of all workers against the least seconds of the parts that each of them served."""
    trace = preble("toolbench", 300, 20.0, rng=np.random.default_rng(seed), block_tokens=64)
    fleet = Fleet(
        catalog.llm(LLM), (Pool("w", "mixed", worker, 3),), Policies(prefix_cache=True, routing=routing)
    )
    found = simulate(fleet, trace)
    cached = PrefixHits.of(trace).cached_tokens()
    least_s = least_seconds(Option("mixed", worker, 1.0), trace.input_tokens, trace.output_tokens, cached)
    for w in range(3):
        assert least_s[found.prefill_worker == w].sum() <= found.worker_busy_s[w] * (1 + 1e-9)
    assert found.token_hit_frac is not None
    assert found.token_hit_frac <= cached.sum() / trace.input_tokens.sum() + 1e-9


def test_an_idle_worker_with_caches_is_no_slower_than_the_floor(catalog: Catalog, worker: WorkerType) -> None:
    """One request at a time, so far apart that nothing waits: TTFT is at least what `floor_s` says."""
    trace = preble("toolbench", 200, 1.0, rng=np.random.default_rng(0), block_tokens=64)
    trace = replace(trace, arrival_s=np.arange(0.0, 20.0 * len(trace), 20.0))
    slo = parse_slo({"ttft": {"p50": "1 s", "p90": "1 s"}}, where="slo")
    fleet = Fleet(
        catalog.llm(LLM), (Pool("w", "mixed", worker, 1),), Policies(prefix_cache=True, routing="e2")
    )
    ttft_s = simulate(fleet, trace).ttft_s
    lengths = PrefixHits.of(trace).lengths()
    for limit in slo.limits:
        assert floor_s(limit, worker, lengths) <= np.quantile(ttft_s, limit.percentile_frac, method="higher")


@pytest.fixture(scope="module")
def planned(catalog: Catalog, sample: Trace) -> Plan:
    return plan(question(catalog, prefix_cache=True, routing=["cache-aware", "e2"]), sample, catalog)


def test_caches_save_gpus_at_the_same_slo(catalog: Catalog, sample: Trace, planned: Plan) -> None:
    """Both fleets simulated again, each with its own policies: kept, and not kept with one worker fewer."""
    trace = rescale_trace(sample, 30, scale="compress", rng=np.random.default_rng(0))
    plain = next(a for a in planned.alternatives if a.label == "no prefix caches, routing jsq")
    assert plain.fleet is not None
    assert planned.status == "on paper" and planned.fleet.policies.prefix_cache
    assert planned.fleet.gpus < plain.fleet.gpus
    for fleet in (planned.fleet, plain.fleet):
        assert judge_slo(simulate(fleet, trace, limits=planned.slo.limits, record=True), planned.slo).holds
    saved = f"{planned.fleet.gpus} GPUs instead of {plain.fleet.gpus}"
    assert any(saved in sentence for sentence in fact_sentences_of(planned.certificate.binding))


def test_plan_names_prefixes_hits_and_warm_up(planned: Plan, sample: Trace) -> None:
    (found,) = planned.prefixes
    assert found.plan.pool == planned.fleet.pools[0]
    assert 0 < found.simulated_hit_frac <= found.possible_hit_frac + 1e-9
    assert found.plan.hit_frac == pytest.approx(found.simulated_hit_frac, abs=0.1)
    assert len(found.simulated_load) == found.plan.pool.count
    files = render(planned)
    assert "simulated_hit_frac" in files["plan.yaml"] and "warm-up.json" in files
    for prompt in found.warm_up:
        first = sample.prefix_offsets[prompt.request]
        ids = sample.prefix_ids[first : first + len(prompt.block_ids)]
        assert ids.tolist() == list(prompt.block_ids)


def test_a_decode_pool_has_no_prefixes_to_place(catalog: Catalog, worker: WorkerType, sample: Trace) -> None:
    """No request is sent there to prefill, and an empty part of a trace is refused."""
    pools = (Pool("pre", "prefill", worker, 2), Pool("dec", "decode", worker, 2))
    fleet = Fleet(catalog.llm(LLM), pools, Policies(prefix_cache=True))
    trace = sample.select(np.arange(400))
    simulation = simulate(fleet, trace, record=True)
    placed = pool_prefixes(fleet, simulation, trace, time_limit_s=60.0, rng=np.random.default_rng(0))
    assert [each.plan.pool.name for each in placed] == ["pre"]


def test_fitted_settings_leave_no_less_room(catalog: Catalog, worker: WorkerType, sample: Trace) -> None:
    trace = rescale_trace(sample, 60, scale="compress", rng=np.random.default_rng(0))
    llm, counts = catalog.llm(LLM), ((Option("mixed", worker, 1.0), 4),)
    slo = parse_slo({"ttft": {"p90": "500 ms"}}, where="slo")
    for routing in ("cache-aware", "e2", "min-ttft"):
        default = Policies(prefix_cache=True, routing=routing)
        oracle = Oracle(llm, trace, slo, Fleet(llm, (Pool("w", "mixed", worker, 1),)).network, default)
        best = fit_router(oracle, counts)
        assert _slack(oracle, best, counts) >= _slack(oracle, default, counts)
        assert (
            replace(
                best, balance_ratio=1.5, balance_requests=64, cache_threshold_frac=0.3, share_window_s=180.0
            )
            == default
        )


@pytest.mark.long
def test_the_router_is_fitted_anew_to_cheaper_fleets(catalog: Catalog) -> None:
    """With the settings of the first known fleet these agents needed a fourth prefill worker."""
    agents = {
        "count": 25,
        "system": 8000,
        "repository": {"tokens": 4000, "count": 20, "skew": 0.6},
        "most_tokens": 65536,
        "idle": {"mean": "120 s", "cv": 1.7},
    }
    document = {
        "llm": "qwen3-14b",
        "slo": {"ttft": {"p90": "15 s"}, "task": {"p90": "15 min"}},
        "safety": "none",
        "fleet": {"gpus": ["l40s-48g"], "max_num_batched_tokens": [8192], "sold_as": {"l40s-48g": "gpu"}},
        "policies": {"prefix_cache": True, "routing": ["cache-aware"]},
        "traffic": {"agents": agents, "task": "coding-agent", "duration": "15 min"},
    }
    task = parse_task(document, catalog)
    assert task.described is not None
    planned = plan(task, draw_requests(task.described, seed=0), catalog)
    assert planned.certificate.value == pytest.approx(7 * 0.86)
    replayed = simulate(planned.fleet, planned.trace, limits=planned.slo.limits)
    assert judge_slo(replayed, planned.slo, with_percentiles=False).holds
