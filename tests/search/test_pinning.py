"""Pinned replicas of prefixes as part of a fleet: placed for each fleet that is asked about, and worth it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fleetplan
from planner.api.results import PlanResult
from planner.documents.catalog import read_catalog
from planner.documents.facts import PinsPlaced
from planner.documents.slo import parse_slo
from planner.documents.task import parse_task
from planner.fleet import Fleet, Network, Policies, Pool, WorkerType
from planner.models.memory import worker_memory
from planner.reports.fact_sentences import fact_sentence
from planner.search.mixed.best_fleet import PolicySearch
from planner.search.mixed.bounds import lower_bound
from planner.search.mixed.polished_pins import find_lighter_fleet
from planner.search.oracle.fleet_counts import SAME_PRICE
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.prefixes.pinning import Pinning
from planner.search.problem.build_problem import build_problem
from planner.search.problem.options import mixed_options
from planner.search.problem.plan_problem import with_policies
from planner.search.production import kept_policies
from planner.simulator.replay import simulate
from planner.solvers.master import Option, busy_workers
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

CATALOG = read_catalog()
LLM, GPU = CATALOG.llm("llama-3.1-8b"), CATALOG.gpu("l40s-48g")
PREFIXES, BLOCKS, BLOCK = 40, 30, 512
TRACES = Path(__file__).parents[3] / "shared/data/traces"


@pytest.fixture(scope="module")
def worker() -> WorkerType:
    """Room for eleven of the prefixes, one of which the prompts under way need."""
    return WorkerType(GPU, 1, CATALOG.step_latency(LLM, GPU, 1), 174_080, 2048, 256).with_llm(LLM)


@pytest.fixture(scope="module")
def trace() -> Trace:
    """2400 prompts at 4 requests/s, each over one of forty prefixes of 15,360 tokens, and 512 of its own."""
    rng, requests = np.random.default_rng(0), 2400
    prefix = rng.integers(PREFIXES, size=requests)
    ids = BLOCKS * prefix[:, None] + np.arange(BLOCKS)
    ids = np.column_stack((ids, PREFIXES * BLOCKS + np.arange(requests)))
    return Trace(
        "forty",
        np.cumsum(rng.exponential(0.25, requests)),
        np.full(requests, (BLOCKS + 1) * BLOCK),
        rng.integers(16, 49, requests),
        prefix_offsets=(BLOCKS + 1) * np.arange(requests + 1),
        prefix_ids=ids.ravel(),
        prefix_block_tokens=BLOCK,
    )


def oracle(trace: Trace, routing: str) -> Oracle:
    slo = parse_slo({"ttft": {"p99": "400 ms"}}, where="slo")
    policies = Policies(routing=routing, prefix_cache=True, balance_requests=8)
    pinning = Pinning(trace) if routing == "pinned-prefix" else None
    return Oracle(LLM, trace, slo, Network(), policies, pinning=pinning)


def test_forty_large_prefixes_take_four_workers_pinned_and_five_with_lru(
    trace: Trace, worker: WorkerType
) -> None:
    """Four workers have room for ten prefixes each. LRU lets some of them go: more than 1 % of the prompts
    are then computed whole, which takes longer than 400 ms even on an idle worker."""
    option = Option("mixed", worker, 1.0)
    pinned = oracle(trace, "pinned-prefix")
    assert pinned.holds(((option, 4),)) and not pinned.holds(((option, 3),))
    for routing in ("prefix-affinity", "min-ttft", "cache-aware"):
        assert not oracle(trace, routing).holds(((option, 4),)) and oracle(trace, routing).holds(
            ((option, 5),)
        )


def test_pinned_prefixes_are_no_work_even_at_their_first_use() -> None:
    """220 prompts in four seconds, each over one of 22 prefixes of 14,336 tokens, which one H100 pins.
    Computed once each they keep 1.14 workers busy, so one worker was never simulated and two were "exactly
    the best".
    """
    requests, prefixes, blocks = 220, 22, 28
    ids = blocks * (np.arange(requests) % prefixes)[:, None] + np.arange(blocks)
    ids = np.column_stack((ids, prefixes * blocks + np.arange(requests)))
    trace = Trace(
        "pinned",
        np.linspace(0.0, 4.0, requests),
        np.full(requests, (blocks + 1) * BLOCK),
        np.full(requests, 2),
        prefix_offsets=(blocks + 1) * np.arange(requests + 1),
        prefix_ids=ids.ravel(),
        prefix_block_tokens=BLOCK,
    )
    document = {
        "llm": LLM.name,
        "slo": {"ttft": {"p99": "2 s"}},
        "fleet": {
            "gpus": ["h100-80g"],
            "sold_as": {"h100-80g": "gpu"},
            "max_num_batched_tokens": 8192,
            "host_overhead": "0 ms",
        },
        "policies": {"prefix_cache": True, "routing": ["pinned-prefix"]},
        "safety": "none",
    }
    task = parse_task(document, CATALOG)
    problem = build_problem(task, trace, CATALOG)
    policies = next(each for each in task.policy_choices() if each.routing == "pinned-prefix")
    pinned = with_policies(problem, policies)
    assert problem.hits is not None
    option = mixed_options(pinned.types, "cost")[0]
    assert pinned.oracle.holds(((option, 1),))
    busy = [
        busy_workers(option, lengths, pinned.slo_work) for lengths in (problem.hits.lengths(), pinned.lengths)
    ]
    assert busy[1] < 0.6 and busy[0] > 1.1
    bound = lower_bound(problem)
    assert bound is not None and bound <= option.objective
    # Without pins the first use of each prefix counts again.
    unpinned = with_policies(pinned, replace(policies, routing="prefix-affinity"))
    assert busy_workers(option, unpinned.lengths, pinned.slo_work) == busy[0]


def test_planned_hits_are_the_simulated_ones(trace: Trace, worker: WorkerType) -> None:
    """Every prefix is pinned somewhere: 30 of 31 blocks of every prompt, from the first one on."""
    asked = oracle(trace, "pinned-prefix")
    for count in (4, 6):
        fleet = asked.fleet(((Option("mixed", worker, 1.0), count),))
        assert asked.pinning is not None
        planned, found = asked.pinning.hit_frac(fleet), simulate(fleet, trace).token_hit_frac
        assert planned == pytest.approx(30 / 31) and found == pytest.approx(planned, abs=0.03)
        tokens = np.zeros(count)
        for prefix in fleet.pinned:
            tokens[list(prefix.workers)] += len(prefix.block_ids) * BLOCK
        assert tokens.max() <= worker.kv_tokens - (BLOCKS + 1) * BLOCK


def conversations(seed: int) -> Trace:
    """Four prompts of every tool, 900 in all: a prefix of 2,048 tokens that one of six tools pins, then what
    the conversation had before, and 512 tokens more."""
    rng = np.random.default_rng(seed)
    talks, turns = 225, 4
    starts = rng.uniform(0.0, 150.0, talks)
    rows = []
    for talk, start_s in enumerate(starts.tolist()):
        tool = int(rng.integers(6))
        for turn in range(turns):
            own = 1000 + 100 * talk + np.arange(2 * turn + 1)
            rows.append((start_s + turn * rng.uniform(5.0, 60.0), np.r_[4 * tool + np.arange(4), own]))
    rows.sort(key=lambda row: row[0])
    ids = [row[1] for row in rows]
    return Trace(
        "talks",
        np.array([row[0] for row in rows]),
        BLOCK * np.array([len(each) for each in ids]),
        rng.integers(16, 200, len(rows)),
        prefix_offsets=np.cumsum([0, *map(len, ids)]),
        prefix_ids=np.concatenate(ids),
        prefix_block_tokens=BLOCK,
    )


@pytest.mark.parametrize("kv_tokens", [30_000, 60_000, 120_000])
def test_what_sessions_hit_beside_the_pins_is_planned_too(worker: WorkerType, kv_tokens: int) -> None:
    """Half of the tokens are six tools', which are pinned; of the rest three sizes of caches keep some. What
    hits in all is planned to 3 points, and what hits in each of two pools to 6."""
    trace = conversations(0)
    pools = (
        Pool("a", "mixed", replace(worker, kv_tokens=kv_tokens), 2),
        Pool("b", "mixed", replace(worker, kv_tokens=kv_tokens), 1),
    )
    pinning = Pinning(trace)
    policies = Policies(routing="pinned-prefix", prefix_cache=True)
    found = simulate(Fleet(LLM, pools, policies, pinned=pinning.pinned_prefixes(pools)), trace)
    assert found.cached_tokens is not None
    expected = pinning.with_session_hits(pools)
    planned = [expected(pool).hit_frac for pool in pools]
    for hit_frac, workers in zip(planned, ((0, 1), (2,)), strict=True):
        own = np.isin(found.prefill_worker, workers)
        assert hit_frac == pytest.approx(
            found.cached_tokens[own].sum() / trace.input_tokens[own].sum(), abs=0.06
        )
    sent = [np.isin(found.prefill_worker, workers).sum() for workers in ((0, 1), (2,))]
    assert np.average(planned, weights=sent) == pytest.approx(found.token_hit_frac, abs=0.03)
    assert found.token_hit_frac is not None and found.token_hit_frac > 0.5


@pytest.mark.shared
@pytest.mark.skipif(not TRACES.is_dir(), reason="no shared data beside the checkout")
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_on_mooncakes_traces_hits_are_planned_within_three_points(name: str) -> None:
    """Llama-3.1-8B on 8 and 16 H100, where caches hold a small part of what comes again."""
    trace, gpu = read_trace(TRACES / f"mooncake_{name}_trace.jsonl.gz", seed=0), CATALOG.gpu("h100-80g")
    kv_tokens = worker_memory(LLM, gpu, 1).kv_tokens
    kind = WorkerType(gpu, 1, CATALOG.step_latency(LLM, gpu, 1), kv_tokens, 2048, 256).with_llm(LLM)
    pinning = Pinning(trace)
    for count in (8, 16):
        pools = (Pool("w", "mixed", kind, count),)
        policies = Policies(routing="pinned-prefix", prefix_cache=True)
        found = simulate(
            Fleet(LLM, pools, policies, pinned=pinning.pinned_prefixes(pools)), trace
        ).token_hit_frac
        assert pinning.with_session_hits(pools)(pools[0]).hit_frac == pytest.approx(found, abs=0.03)


def test_workers_of_pools_are_counted_through(trace: Trace, worker: WorkerType) -> None:
    """Two pools: the second one's workers come after the first one's, decode workers have nothing."""
    a, b = (Pool(name, "prefill", worker, 2) for name in "ab")
    pools = (a, Pool("d", "decode", worker, 3), b)
    pinned = Pinning(trace).pinned_prefixes(pools)
    assert {w for prefix in pinned for w in prefix.workers} == {0, 1, 5, 6}
    alone = Pinning(trace).pinned_prefixes((replace(pools[0], count=4),))
    assert {w for prefix in alone for w in prefix.workers} == {0, 1, 2, 3}


def test_a_placement_of_equal_workers_has_the_names_of_the_pool_that_asks(
    trace: Trace, worker: WorkerType
) -> None:
    """It had those of the fleet for which it was first made, "pre" in a plan of two kinds of prefill workers:
    the plan ended in a KeyError, or its warm-up.json named workers of another pool.
    """
    pinning, pool = Pinning(trace), Pool("pre", "prefill", worker, 2)
    pinning.placed(pool, 2)
    named = replace(pool, name="pre-1")
    assert pinning.with_session_hits([named])(named).pool == named


def test_a_plan_that_pins_says_what_longer_prompts_and_other_routers_do(trace: Trace, tmp_path: Path) -> None:
    """300 of these prompts on machines with one L40S. Prompts up to twice as long leave less room for pinned
    prefixes, which are placed anew for them; routers that cannot pin are simulated without."""
    known = replace(CATALOG, gpus={**CATALOG.gpus, GPU.name: replace(GPU, gpus_per_node=1)})
    question = {
        "llm": LLM.name,
        "slo": {"ttft": {"p90": "4 s"}},
        "fleet": {"gpus": [GPU.name], "max_num_batched_tokens": 2048, "max_num_seqs": 256},
        "policies": {"prefix_cache": True, "routing": ["pinned-prefix"]},
        "safety": "none",
    }
    answer = fleetplan.plan(question, trace.select(np.arange(300)), catalog=known)
    assert isinstance(answer, PlanResult)
    found = answer.plan
    assert found.fleet.policies.routing == "pinned-prefix" and found.fleet.pinned
    (pins,) = (fact for fact in found.certificate.binding if isinstance(fact, PinsPlaced))
    assert 0 < pins.bound <= pins.best_load <= pins.load <= pins.quick_load
    assert f"a gap of {100 * pins.gap_frac:.2f} %" in fact_sentence(pins)
    assert found.certificate.routers
    # Read back, its prefixes were placed anew, without what keeps them in the caches.
    answer.save(tmp_path)
    again = fleetplan.read_plan(tmp_path, known)
    assert again.to_dict()["prefixes"] == answer.to_dict()["prefixes"]
    assert again.files(pages=False)["warm-up.json"] == (tmp_path / "warm-up.json").read_text()


@pytest.mark.long
def test_a_polished_placement_is_another_answer(trace: Trace, worker: WorkerType) -> None:
    """The busiest of four workers has less to do where prefixes are placed by the program, and the oracle
    asks the simulator anew; taken back, the answers are as before."""
    asked = oracle(trace, "pinned-prefix")
    counts = ((Option("mixed", worker, 1.0), 4),)
    pools, pinning = asked.fleet(counts).pools, asked.pinning
    assert pinning is not None
    quick, known = asked.fleet(counts).pinned, asked.simulations
    assert asked.holds(counts)
    (placements,) = pinning.polish(pools).values()
    loads = [each.replication.largest_load for each in (placements.best, placements.quick)]
    assert placements.is_better and loads[0] < 0.99 * loads[1]
    assert placements.best.replication.gap_frac < 0.001
    assert asked.fleet(counts).pinned == quick
    pinning.use(pools)
    assert asked.fleet(counts).pinned != quick
    assert asked.holds(counts) and asked.simulations == known + 2
    slower = ((Option("mixed", replace(worker, latency=worker.latency.with_longer_steps(0.1)), 1.0), 4),)
    assert asked.fleet(slower).pinned == asked.fleet(counts).pinned
    pinning.use(pools, is_polished=False)
    assert asked.fleet(counts).pinned == quick
    assert asked.holds(counts) and asked.simulations == known + 2


def test_a_fleet_with_a_worker_fewer_holds_where_its_pins_are_placed_best(
    trace: Trace, worker: WorkerType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a fleet holds is made to depend on its placement alone: five workers polished are found below
    six, and their placement stays in use; where none holds, none does."""
    asked = oracle(trace, "pinned-prefix")
    pinning = asked.pinning
    assert pinning is not None
    problem: Any = SimpleNamespace(oracle=asked, allows=lambda counts: True, deadline=np.inf)
    six = ((Option("mixed", worker, 1.0), 6),)
    pools = asked.fleet(((six[0][0], 5),)).pools
    monkeypatch.setattr(Oracle, "holds", lambda self, counts: False)
    assert find_lighter_fleet(problem, six) is None and not pinning.uses_polished(pools)
    monkeypatch.setattr(Oracle, "holds", lambda self, counts: self.places_polished(counts))
    assert find_lighter_fleet(problem, six) == ((six[0][0], 5),) and pinning.uses_polished(pools)


@pytest.mark.parametrize(("lru", "pins", "taken"), [(6, 4, "pins"), (4, 4, "lru"), (None, 4, "pins")])
def test_production_has_pins_where_they_cost_less(
    lru: int | None, pins: int, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both cost 4 on paper. In production what costs less is taken, LRU caches where pins tie; pins too where
    nothing passes its test without them."""
    values = {"lru": lru, "pins": pins}

    def searched(name: str) -> PolicySearch:
        task = SimpleNamespace(policies=SimpleNamespace(raced_changes=()))
        pinning = None if name == "lru" else Pinning
        oracle = SimpleNamespace(pinning=pinning, policies=Policies())
        problem: Any = SimpleNamespace(
            name=name, task=task, oracle=oracle, progress=lambda _: None, same_value_factor=SAME_PRICE
        )
        result: Any = SimpleNamespace(value=4.0)
        return PolicySearch(problem, result)

    def tested(each: Any, *, below_value: float | None = None) -> Any:
        problem, paper = each
        if (value := values[problem.name]) is None:
            return None
        return SimpleNamespace(problem=problem, paper=paper, trial=value, value=value)

    monkeypatch.setattr(kept_policies, "_plan_and_test", tested)
    monkeypatch.setattr(kept_policies, "with_answers", lambda problem, own, trial: trial)
    left, production = kept_policies.production_of_policies([searched("lru"), searched("pins")])
    found: Any = production
    assert left[0][0].name == taken and len(left) == 2  # type: ignore[attr-defined]
    assert found == values[taken]
