"""Compares DistServe's search with ours, on DistServe's step times.

    python benchmarks/distserve_search.py TRACE [--llm facebook/opt-13b] [--nodes 1] [--gpus 4] [--rate 40]

TRACE holds the lengths (Azure's conversations for the figures in docs/evidence/papers-search.md):
requests with at least 4 tokens each way and fewer than 2048 together, as DistServe filters them.
Prints, with CPU seconds:

1. DistServe's search of pairs (its Algorithm 2) with its own rule: the first 300 requests that its program
   draws with seed 0, at rates in steps of 0.156 requests/s and GPU.
2. The same pairs, compared by the rate that they carry in steady state, and its Algorithm 1.
3. For `--rate`: the rate that each winner, replicated as its algorithm says, carries in steady state, and the
   fewest GPUs with any counts of prefill and decode instances. KV moves at 25 GB/s between nodes.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from planner.documents.catalog import read_catalog
from planner.domain import Gpu, Limit, Slo
from planner.errors import InputError
from planner.files.checked_files import read_yaml
from planner.fleet import Fleet, Network, Policies, WorkerType
from planner.models.foreign_forms import DistServeSteps
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.models.memory import worker_memory
from planner.papers import distserve_search
from planner.papers.goodput import Goodput, Traffic, find_goodput, poisson_traffic
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

FITS = Path(__file__).with_name("distserve_fits.yaml")
# Limits on TTFT and on TPOT [s], both p90.
LIMITS_S = {"facebook/opt-13b": (0.2, 0.1), "facebook/opt-66b": (0.4, 0.1)}
DECODE_TOKENS = 50_000  # Tokens of context that a batch of decodes holds in DistServe's program.
POLICIES = Policies(
    batching="distserve",
    routing="least-waiting",
    decode_routing="least-waiting",
    decode_batch_tokens=DECODE_TOKENS,
)
FREE = Network(math.inf, transfer="serialised", is_shared=False)  # Transfers take no time.
ENDLESS_TOKENS = 10**9  # A KV cache that never fills, as DistServe's program counts no memory.
BETWEEN_NODES = Network(25e9, transfer="serialised", is_shared=False)
# A worker type needs a fit, but its form (DistServeSteps) gives the step times.
NO_FIT = StepLatency((1.0, 2.0), (1.0, 1.0), 0.0, 0.0, 0.0, 0.0, 0.0, basis="not used")


@dataclass(frozen=True, slots=True)
class FirstRequests:
    """DistServe's rule (arXiv:2401.09670, its simulator) on whether a fleet carries a rate: the first
    requests of one seed, sent to an empty fleet, keep each limit. With 300 requests it overstates rates up to
    nine times. Percentiles between two requests are interpolated, values must be below the limit, and no
    request may be rejected.
    """

    slo: Slo
    traffic: Traffic
    requests: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            any(limit.metric_row.is_of_gaps for limit in self.slo.limits)
            or self.slo.attainment_frac is not None
        ):
            raise InputError(
                "the rule of the first requests judges no gaps (tbt) and no attainment; use the steady one"
            )

    def run(self, fleet: Fleet, rate_rps: float) -> Simulation:
        return simulate(fleet, self.traffic(rate_rps, self.requests, self.seed), record=True)

    def carries(self, fleet: Fleet, rate_rps: float) -> bool:
        simulation = simulate(fleet, self.traffic(rate_rps, self.requests, self.seed))
        return bool((simulation.status == 0).all()) and all(
            np.nanquantile(limit.metric_row.values_s(simulation), limit.percentile_frac) < limit.limit_s
            for limit in self.slo.limits
        )


def highest_on_grid(carries: Callable[[float], bool], most_rps: float, until_rps: float) -> Goodput:
    """The highest rate that is carried, by bisection of [0, `most_rps`] until the ends are no more than
    `until_rps` apart, as in DistServe's search. `most_rps` itself is taken to fail.
    """
    low, high, rates = 0.0, most_rps, 0
    while high - low > until_rps:
        rates += 1
        rate = (low + high) / 2
        if carries(rate):
            low = rate
        else:
            high = rate
    return Goodput(low, high, rates)


def instances(document: Mapping[str, Any], llm: Llm, gpu: Gpu, *, memory: bool) -> list[WorkerType]:
    """The worker types for which DistServe's program has step times and batch limits; with `memory` their KV
    cache is what fits the GPUs.
    """
    types = []
    for tp, by_pp in document["batch_tokens"].items():
        rows = document["steps"][tp]
        prefill, small, large = (tuple(ms / 1000 for ms in rows[k]) for k in ("prefill", "small", "large"))
        form = DistServeSteps(prefill, small, large, 95, 1e-3, 2e-3, 1e-7)
        for pp, tokens in by_pp.items():
            kv_tokens = worker_memory(llm, gpu, tp, pp).kv_tokens if memory else ENDLESS_TOKENS
            if kv_tokens:
                types.append(WorkerType(gpu, tp, NO_FIT, kv_tokens, tokens, 10_000, pp, form))
    return types


def as_drawn_by_distserve(lengths: Trace) -> Traffic:
    """Requests as DistServe's program draws them: lengths by Python's generator without replacement, gaps by
    NumPy's old generator.
    """
    pairs = list(zip(lengths.input_tokens.tolist(), lengths.output_tokens.tolist(), strict=True))

    def traffic(rate_rps: float, requests: int, seed: int) -> Trace:
        drawn = np.array(random.Random(seed).sample(pairs, requests))
        gaps_ms = np.random.RandomState(seed).gamma(1.0, 1 / rate_rps, requests - 1) * 1000
        arrival_s = np.concatenate(([0.0], np.cumsum(gaps_ms))) / 1000
        return Trace("distserve", arrival_s, drawn[:, 0], drawn[:, 1])

    return traffic


def lengths_of(path: Path) -> Trace:
    """The lengths of a trace, filtered as above. DistServe's program makes a decode step for every output
    token; our simulator makes the first token in prefill, so outputs get one token more.
    """
    trace = read_trace(path, seed=0)
    n, m = trace.input_tokens, trace.output_tokens
    kept = trace.select((n >= 4) & (m >= 4) & (n + m < 2048))
    return Trace(trace.name, kept.arrival_s, kept.input_tokens, kept.output_tokens + 1)


def shape(fleet: Fleet) -> str:
    return " + ".join(f"{pool.count} x {pool.name} tp{pool.type.tp} pp{pool.type.pp}" for pool in fleet.pools)


def with_memory(fleet: Fleet, types: list[WorkerType], network: Network) -> Fleet:
    """The same fleet with those of these types that have its parallelism."""
    real = {(type_.tp, type_.pp): type_ for type_ in types}
    pools = tuple(replace(pool, type=real[pool.type.tp, pool.type.pp]) for pool in fleet.pools)
    return replace(fleet, pools=pools, network=network)


def main() -> None:
    parser = argparse.ArgumentParser(description="DistServe's search and ours, on its own step times.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--llm", choices=tuple(LIMITS_S), default="facebook/opt-13b")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=4, help="per node")
    parser.add_argument("--rate", type=float, default=40.0)
    arguments = parser.parse_args()

    catalog = read_catalog()
    llm, gpu = catalog.llm(arguments.llm), replace(catalog.gpu("a100-80g"), gpus_per_node=arguments.gpus)
    document = read_yaml(FITS)[arguments.llm]
    ttft_s, tpot_s = LIMITS_S[arguments.llm]
    slo = Slo((Limit("ttft", 0.9, ttft_s), Limit("tpot", 0.9, tpot_s)))
    lengths = lengths_of(arguments.trace)
    node = Network(gpu.link_bytes_per_s, transfer="serialised", is_shared=False)

    def search(
        setting: distserve_search.ServingSetting, types: list[WorkerType], measure: distserve_search.Measure
    ) -> Any:
        small = [type_ for type_ in types if type_.gpus < arguments.nodes * arguments.gpus]
        start = time.process_time()
        found = distserve_search.low_affinity(
            setting, small, small, arguments.rate, measure, nodes=arguments.nodes
        )
        cpu_s = time.process_time() - start
        best = found.measured[0][0]
        print(f"  {len(found.measured[0])} pairs, {cpu_s:.2f} CPU-s")
        for row in [row for row in found.measured[0][:5] if row.rate_rps]:
            print(f"  {row.gpu_rate_rps:.4f} requests/s and GPU: {shape(row.fleet)}")
        return found, best

    free = distserve_search.ServingSetting(llm, POLICIES, FREE, FREE)
    endless = instances(document, llm, gpu, memory=False)
    first = FirstRequests(slo, as_drawn_by_distserve(lengths))
    first.carries(distserve_search.pair_fleet(free, endless[0], endless[0]), 1.0)  # compile

    def by_their_rule(fleet: Fleet, to_beat_rps: float) -> float:
        return (
            fleet.gpus
            * highest_on_grid(
                lambda rate_rps: first.carries(fleet, rate_rps * fleet.gpus), 5.0, 0.25
            ).rate_rps
        )

    print(f"DistServe's search by its own rule: {llm.name}, {arguments.nodes} x {arguments.gpus} GPUs")
    theirs, _ = search(free, endless, by_their_rule)

    balanced = replace(POLICIES, routing="least-outstanding", decode_routing="least-outstanding")
    real = distserve_search.ServingSetting(llm, balanced, BETWEEN_NODES, node)
    types = instances(document, llm, gpu, memory=True)
    traffic = poisson_traffic(lengths)
    rules = distserve_search.steady_rules(slo, traffic)
    print("the same pairs in steady state, memory and NVLink counted")
    ours, _ = search(real, types, distserve_search.measured_by(rules.whole))

    print("Algorithm 1 in steady state")
    start = time.process_time()
    alone = distserve_search.high_affinity(
        real,
        types,
        types,
        arguments.rate,
        distserve_search.measured_by(rules.prefill),
        distserve_search.measured_by(rules.decode),
    )
    print(f"  {len(types)} types, {time.process_time() - start:.2f} CPU-s")
    for role, rows in zip(("prefill", "decode"), alone.measured, strict=True):
        best = rows[0]
        print(f"  {role} {best.gpu_rate_rps:.4f} requests/s and GPU: tp{best.type.tp} pp{best.type.pp}")

    print(f"{arguments.rate:g} requests/s in steady state, the KV moved")
    for label, placement in (
        ("their pairs, their rule", theirs),
        ("Algorithm 2", ours),
        ("Algorithm 1", alone),
    ):
        fleet = with_memory(placement.fleet, types, BETWEEN_NODES)
        by_router = [
            find_goodput(rules.whole, replace(fleet, policies=policies), guess_rps=arguments.rate).rate_rps
            for policies in (balanced, POLICIES)
        ]
        print(
            f"  {label}: {fleet.gpus} GPUs, {shape(fleet)}; carries {by_router[0]:.1f}, "
            f"{by_router[1]:.1f} with their router"
        )
    start = time.process_time()
    fewest = distserve_search.free_counts(real, types, types, arguments.rate, rules, alone.fleet)
    cpu_s = time.process_time() - start
    kept = find_goodput(rules.whole, fewest, guess_rps=arguments.rate).rate_rps
    print(f"  free counts: {fewest.gpus} GPUs, {shape(fewest)}; carries {kept:.1f}; {cpu_s:.2f} CPU-s")


if __name__ == "__main__":
    main()
