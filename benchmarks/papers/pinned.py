"""Compares pinned prefixes with LRU caches, for forty large prefixes and for Mooncake's conversations.

    python benchmarks/papers/pinned.py [MOONCAKE_CONVERSATION_TRACE]
    python benchmarks/papers/pinned.py plan | certified | keep-alives
    python benchmarks/papers/pinned.py mooncake MOONCAKE_CONVERSATION_TRACE
    python benchmarks/papers/pinned.py hits MOONCAKE_TRACE
    python benchmarks/papers/pinned.py bounds MOONCAKE_TRACE

The forty prefixes have 15,360 tokens and the popularity of Zipf's law with exponent 0.4; 256 to 768 tokens of
the request's own follow. 4 requests/s go to Llama-3.1-8B on L40S. Prints the fewest workers with TTFT p99 <=
400 ms for each routing. With a trace, Llama-3.1-70B has 8 workers of 8 H100. Hits are shares of input tokens;
planned hits are computed without a simulation.

plan         asks the planner for the cheapest fleet on paper of machines with one L40S each: with the
routings
             for LRU caches alone, and with pinned prefixes as one more choice
certified    the same for production, kept in nine of ten scenarios
mooncake     plans for Mooncake's conversations with pinned prefixes as a choice
hits         compares planned with simulated hits of fleets of several sizes
bounds       compares placements with a lower bound: of the forty prefixes, and of the trace's first 20
minutes keep-alives  simulates the plan on engines without pins, with the requests that keep the prefixes in
their
             caches; each of these computes 16 tokens
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import fleetplan
from benchmarks.papers.common import CATALOG, worker
from planner.api.results import PlanResult, SharedPlanResult
from planner.documents.facts import CachesSave, Finding, PinnedReplicas, PinsPlaced
from planner.domain import KV_BLOCK_TOKENS
from planner.fleet import Fleet, Policies, Pool
from planner.reports.fact_sentences import fact_sentence
from planner.reports.prefix_values import keep_alive_text
from planner.search.prefixes.keep_alive import times_of_use_s
from planner.search.prefixes.pinning import Pinning
from planner.search.prefixes.prefix_placing import Leaf, leaves_of
from planner.simulator.measured_values import metric_percentile_s
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

PREFIXES, PREFIX_BLOCKS, BLOCK_TOKENS = 40, 30, 512
LRU = ("prefix-affinity", "min-ttft", "cache-aware", "e2")
PINNED = "pinned-prefix"
TTFT_S, MOST = 0.4, 12
FIRST_S = 1200.0  # The part of the trace for `bounds`.
# LLM, GPUs per worker, and numbers of workers for `hits` and `bounds`.
SIZES = (("llama-3.1-70b", 8, (4, 8, 12)), ("llama-3.1-70b", 4, (8, 16)), ("llama-3.1-8b", 1, (8, 16)))


def forty(requests: int = 2000, rate_rps: float = 4.0, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    hot = 1 / np.arange(1, PREFIXES + 1) ** 0.4
    which = rng.choice(PREFIXES, requests, p=hot / hot.sum())
    own_tokens = rng.integers(256, 769, requests)
    own_blocks = -(-own_tokens // BLOCK_TOKENS)
    ends = PREFIXES * PREFIX_BLOCKS + np.cumsum(own_blocks)
    ids = [
        np.concatenate((np.arange(PREFIX_BLOCKS) + PREFIX_BLOCKS * k, np.arange(end - count, end)))
        for k, end, count in zip(which.tolist(), ends.tolist(), own_blocks.tolist(), strict=True)
    ]
    return Trace(
        "forty prefixes",
        np.cumsum(rng.exponential(1 / rate_rps, requests)),
        PREFIX_BLOCKS * BLOCK_TOKENS + own_tokens,
        rng.integers(16, 49, requests),
        prefix_offsets=np.cumsum([0, *map(len, ids)]),
        prefix_ids=np.concatenate(ids),
        prefix_block_tokens=BLOCK_TOKENS,
    )


def run(llm: str, pool: Pool, trace: Trace, routing: str, pinning: Pinning) -> Simulation:
    policies = Policies(routing=routing, prefix_cache=True, balance_requests=8)
    pinned = pinning.pinned_prefixes((pool,)) if routing == PINNED else ()
    return simulate(Fleet(CATALOG.llm(llm), (pool,), policies, pinned=pinned), trace)


def show(name: str, result: Simulation, planned: str = "") -> None:
    print(
        f"  {name:16} TTFT p99 {metric_percentile_s(result, 'ttft', 0.99):7.2f} s, "
        f"{100 * (result.token_hit_frac or 0):.1f} % hit{planned}"
    )


def fewest() -> None:
    llm, trace = "llama-3.1-8b", forty()
    kind, pinning = worker(llm, "l40s-48g", 1, budget=2048), Pinning(trace)
    print(f"forty prefixes: fewest L40S with TTFT p99 <= {TTFT_S:g} s, and with one fewer")
    for routing in (*LRU, PINNED):
        for count in range(2, MOST + 1):
            pool = Pool("mixed", "mixed", kind, count)
            result = run(llm, pool, trace, routing, pinning)
            if metric_percentile_s(result, "ttft", 0.99) <= TTFT_S or count == MOST:
                plan = pinning.with_session_hits((pool,))(pool)
                planned = f", {100 * plan.hit_frac:.1f} % planned" if routing == PINNED else ""
                show(f"{routing} {count}", result, planned)
                break
            before = result
        show("  one fewer", before)


def conversations(path: Path) -> None:
    llm, trace = "llama-3.1-70b", read_trace(path, seed=0)
    pool, pinning = Pool("mixed", "mixed", worker(llm, "h100-80g", 8, budget=2048), 8), Pinning(trace)
    plan = pinning.with_session_hits((pool,))(pool)
    print(
        f"{path.name}: 8 workers; pinned prefixes hold {100 * plan.stable_hit_frac:.1f} % of the input tokens"
    )
    for routing in (*LRU, PINNED):
        planned = f", {100 * plan.hit_frac:.1f} % planned" if routing == PINNED else ""
        show(routing, run(llm, pool, trace, routing, pinning), planned)


def hits(path: Path) -> None:
    trace = read_trace(path, seed=0)
    pinning = Pinning(trace)
    print(f"{path.name}: hits with pins, of the input tokens, planned and simulated, by workers")
    for llm, tp, counts in SIZES:
        for count in counts:
            pool = Pool("mixed", "mixed", worker(llm, "h100-80g", tp, budget=2048), count)
            plan = pinning.with_session_hits((pool,))(pool)
            found = run(llm, pool, trace, PINNED, pinning).token_hit_frac or 0.0
            print(
                f"  {llm}, {count:2} of {tp} H100: {100 * plan.hit_frac:.1f} %, {100 * found:.1f} % "
                f"({100 * (plan.hit_frac - found):+.1f}), {100 * plan.stable_hit_frac:.1f} % are pinned",
                flush=True,
            )


def bounds(path: Path) -> None:
    trace = read_trace(path, seed=0)
    first = trace.select(np.flatnonzero(trace.arrival_s < trace.arrival_s[0] + FIRST_S))
    print("largest load, s of work per second: placed quickly, polished, bound and gap")
    cases = [
        *((forty(), "llama-3.1-8b", "l40s-48g", 1, count) for count in (3, 4, 5, 6)),
        *((first, llm, "h100-80g", tp, count) for llm, tp, counts in SIZES for count in counts),
    ]
    for trace, llm, gpu, tp, count in cases:
        pool = Pool("mixed", "mixed", worker(llm, gpu, tp, budget=2048), count)
        (found,) = Pinning(trace).polish((pool,)).values()
        quick, best = found.quick.replication, found.best.replication
        print(
            f"  {trace.name}, {llm}, {count:2} of {tp} {gpu}: {quick.largest_load:.5f} "
            f"{best.largest_load:.5f} {best.bound:.5f} {100 * best.gap_frac:.3f} %",
            flush=True,
        )


def planned(safety: str | dict[str, Any] = "none") -> None:
    for routings in (LRU, (*LRU, PINNED)):
        tell(routings, ask(routings, safety))


def ask(routings: Sequence[str], safety: str | dict[str, Any]) -> PlanResult | SharedPlanResult:
    alone = replace(CATALOG.gpu("l40s-48g"), gpus_per_node=1)
    known = replace(CATALOG, gpus={**CATALOG.gpus, alone.name: alone})
    question = {
        "llm": "llama-3.1-8b",
        "slo": {"ttft": {"p99": f"{TTFT_S:g} s"}},
        "fleet": {"gpus": ["l40s-48g"]},
        "policies": {"prefix_cache": True, "routing": list(routings)},
        "safety": safety,
    }
    return fleetplan.plan(question, forty(), catalog=known)


def keep_alives() -> None:
    trace = forty()
    result = ask([PINNED], "none")
    assert isinstance(result, PlanResult)
    plan = result.plan
    (pool,) = plan.prefixes
    assert pool.keep_alive is not None
    extra: list[tuple[float, Leaf]] = []
    for w, leaves in enumerate(leaves_of(trace, pool.plan)):
        own = np.flatnonzero(plan.simulation.prefill_worker == w)
        every_s = pool.keep_alive.every_s[w] or np.inf
        for leaf, used_s in zip(leaves, times_of_use_s(trace, own, leaves), strict=True):
            for begin_s, end_s in itertools.pairwise([trace.arrival_s[0], *used_s, trace.arrival_s[-1]]):
                extra += [(float(at_s), leaf) for at_s in np.arange(begin_s + every_s, end_s, every_s)]
    n, first_id = len(trace), int(trace.prefix_ids.max()) + 1
    ids = np.split(trace.prefix_ids, trace.prefix_offsets[1:-1])
    ids += [np.array([*leaf.block_ids, first_id + k]) for k, (_, leaf) in enumerate(extra)]
    arrival_s = np.concatenate((trace.arrival_s, [at_s for at_s, _ in extra]))
    inputs = np.concatenate((trace.input_tokens, [leaf.tokens + KV_BLOCK_TOKENS for _, leaf in extra]))
    outputs = np.concatenate((trace.output_tokens, np.ones(len(extra), np.int64)))
    order = np.argsort(arrival_s, kind="stable")
    kept = Trace(
        "with keep-alives",
        arrival_s[order],
        inputs[order],
        outputs[order],
        prefix_offsets=np.cumsum([0, *(len(ids[i]) for i in order)]),
        prefix_ids=np.concatenate([ids[i] for i in order]),
        prefix_block_tokens=BLOCK_TOKENS,
    )
    found = simulate(plan.fleet, kept)
    print(f"{plan.fleet.workers} workers, {keep_alive_text(pool.keep_alive)}")
    for name, run_, ttft_s in (
        ("without", plan.simulation, plan.simulation.ttft_s),
        ("with", found, found.ttft_s[order < n]),
    ):
        busy = float((run_.worker_busy_s / run_.end_s).mean())
        print(f"  {name}: TTFT p99 {1e3 * np.percentile(ttft_s, 99):.1f} ms, busy {100 * busy:.1f} %")


def tell(routings: Sequence[str], result: PlanResult | SharedPlanResult) -> None:
    assert isinstance(result, PlanResult)  # of one LLM
    found = result.plan
    print(
        f"{', '.join(routings)}: {found.fleet.workers} workers, {found.fleet.price_usd_per_h:.2f} USD/h, "
        f"routing {found.fleet.policies.routing}, {found.status}, lower bound {found.certificate.bound}"
    )
    for fact in found.certificate.binding:
        if isinstance(fact, PinnedReplicas | PinsPlaced | CachesSave | Finding):
            print(f"  {fact_sentence(fact)}")
    for answer in found.certificate.answers:
        print(f"  {answer}", flush=True)


def mooncake(path: Path) -> None:
    question = {
        "llm": "llama-3.1-70b",
        "slo": {"ttft": {"p90": "3 s"}},
        "fleet": {"gpus": ["h100-80g"]},
        "policies": {"prefix_cache": True, "routing": [*LRU, PINNED]},
        "safety": "none",
    }
    trace = read_trace(path, seed=0)
    tell((*LRU, PINNED), fleetplan.plan(question, trace))


def main() -> None:
    start = time.process_time()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="")
    parser.add_argument("files", nargs="*")
    asked = parser.parse_args()
    what, files = asked.what, asked.files
    if what == "plan":
        planned()
    elif what == "certified":
        planned({"kept_in": 0.9})
    elif what == "keep-alives":
        keep_alives()
    elif what == "hits":
        hits(Path(files[0]))
    elif what == "bounds":
        bounds(Path(files[0]))
    elif what == "mooncake":
        mooncake(Path(files[0]))
    else:
        fewest()
        if what:
            conversations(Path(what))
    print(f"{time.process_time() - start:.1f} CPU-s")


if __name__ == "__main__":
    main()
