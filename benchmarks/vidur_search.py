"""Compares Vidur-Search with our search for the engine settings that serve most requests per dollar.

    python benchmarks/vidur_search.py TRACE [--reference DIR] [--llm meta-llama/Llama-3.1-70B] [--gpus 16]

With --reference (a folder with Vidur's step times and a case of its requests, Llama-2-7B on A100) it first
prints the capacities of two replicas by Vidur's rule on Vidur's own first 1000 requests. Vidur-Search finds
10.84 requests/s with vLLM's old scheduler and 11.5 with Sarathi-512, to within 2.5 %.

Then it searches, with the planner's fits, the lengths of TRACE and Poisson arrivals, every TP, PP, batching,
token budget and max_num_seqs on A100 and H100, by Vidur's rule and in steady state within TTFT P90 2 s and
TBT P99 200 ms. It prints the best of both, the frontiers, and the number of configurations that are
overloaded at their capacity by Vidur's rule: with 20,000 requests in place of 1000 the same rule refuses this
rate.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.vidur_tables import VidurTables
from planner.documents.catalog import read_catalog
from planner.domain import Limit, Slo
from planner.files.checked_files import open_input
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.papers.goodput import Steady, Traffic, find_goodput, poisson_traffic
from planner.papers.vidur_search import (
    EngineSettingChoices,
    SearchedConfiguration,
    configurations,
    pareto_configurations,
    search_configurations,
)
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace
from planner.units import show_s

CASE, CASE_RPS = "a7b_sarathi_2k.csv.gz", 3.0
TABLES = "tables_vidur_sampled_a100_llama-2-7b_tp1.npz"
KV_TOKENS = 118_784  # Of a replica, as Vidur counts them.
SLO = Slo((Limit("ttft", 0.9, 2.0), Limit("tbt", 0.99, 0.2)))
LONG = 20_000  # Requests after which a queue of an overloaded replica has grown.


@dataclass(frozen=True, slots=True)
class SchedulingDelay:
    """Vidur's rule: the P99 of the time until a request is first scheduled stays below 5 s over a fixed
    number of requests. A short run accepts overload, because a queue takes time to grow that long.
    """

    traffic: Traffic
    requests: int = 1000
    delay_s: float = 5.0
    percentile_frac: float = 0.99
    seed: int = 0

    def run(self, fleet: Fleet, rate_rps: float) -> Simulation:
        return simulate(fleet, self.traffic(rate_rps, self.requests, self.seed), record=True)

    def carries(self, fleet: Fleet, rate_rps: float) -> bool:
        simulation = simulate(fleet, self.traffic(rate_rps, self.requests, self.seed))
        all_served = bool((simulation.status == 0).all())
        return all_served and bool(np.quantile(simulation.queue_s, self.percentile_frac) <= self.delay_s)


def against_vidur(folder: Path) -> None:
    with open_input(folder / CASE) as stream:
        table = pd.read_csv(stream)
    arrival_s = table.arrived_at.to_numpy(float)
    prompts, answers = table.prefill_tokens.to_numpy(np.int64), table.decode_tokens.to_numpy(np.int64)

    def traffic(rate_rps: float, requests: int, seed: int) -> Trace:
        first = slice(requests)
        return Trace("vidur", arrival_s[first] * CASE_RPS / rate_rps, prompts[first], answers[first])

    tables = np.load(folder / TABLES)
    form = VidurTables(
        *(tables[f"{name}_ms"] / 1000 for name in ("linear", "prefill_attn", "decode_attn")), *tables["over"]
    )
    catalog = read_catalog()
    llm, gpu = catalog.llm("llama-2-7b"), catalog.gpu("a100-80g")
    rule = SchedulingDelay(traffic)
    longer = SchedulingDelay(poisson_traffic(Trace("vidur", arrival_s, prompts, answers)), requests=LONG)
    for batching, budget, theirs in (("vllm-v0", 4096, 10.84), ("sarathi", 512, 11.5)):
        latency = catalog.step_latency(llm, gpu, 1)
        type_ = WorkerType(gpu, 1, latency, KV_TOKENS, budget, 128, form=form)
        fleet = Fleet(
            llm, (Pool("replica", "mixed", type_, 2),), Policies(batching=batching, routing="round-robin")
        )
        rule.carries(fleet, 1.0)  # compile
        start = time.process_time()
        found = find_goodput(rule, fleet, guess_rps=8.0, tolerance_frac=0.025)
        cpu_s = time.process_time() - start
        sustained = find_goodput(longer, fleet, guess_rps=8.0)
        print(
            f"{batching}: {found.rate_rps:.2f} requests/s by Vidur's rule (Vidur: {theirs}), "
            f"{found.rates} runs, {cpu_s:.3f} CPU-s; over {LONG} requests {sustained.rate_rps:.2f}"
        )


def show(rows: Sequence[SearchedConfiguration]) -> None:
    for row in rows:
        ttft_s, tbt_s = row.values_s
        print(
            f"  {row.requests_per_usd:7.1f} requests/USD, {row.rate_rps:6.2f} requests/s, TTFT P90 "
            f"{show_s(ttft_s)}, TBT P99 {show_s(tbt_s)}: {row.name}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Vidur-Search and ours.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--llm", default="meta-llama/Llama-3.1-70B")
    parser.add_argument("--gpus", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.reference:
        against_vidur(arguments.reference)

    catalog = read_catalog()
    llm, lengths = catalog.llm(arguments.llm), read_trace(arguments.trace, seed=0)
    longest = int((lengths.input_tokens + lengths.output_tokens).max())
    fleets = configurations(
        llm,
        [catalog.gpu("a100-80g"), catalog.gpu("h100-80g")],
        catalog,
        EngineSettingChoices(budgets=(512, 2048), seats=(128, 256)),
        total_gpus=arguments.gpus,
        least_kv_tokens=longest,
    )
    traffic = poisson_traffic(lengths)
    steady = Steady(SLO, traffic, seeds=1)
    longer = SchedulingDelay(traffic, requests=LONG)
    found = []
    for label, rule in (("Vidur's rule", SchedulingDelay(traffic)), ("steady, within the SLO", steady)):
        start = time.process_time()
        rows = search_configurations(fleets, rule, lengths)
        print(f"{label}: {len(fleets)} configurations, {time.process_time() - start:.1f} CPU-s; best")
        show(rows[:3])
        for i, metric in enumerate(("TTFT P90", "TBT P99")):
            print(f"  frontier of requests per dollar and {metric}")
            show(pareto_configurations(rows, i))
        found.append(rows)
    overloaded = sum(not longer.carries(row.fleet, row.rate_rps) for row in found[0] if row.rate_rps)
    keeps = sum(row.values_s[0] <= 2.0 and row.values_s[1] <= 0.2 for row in found[0])
    print(
        f"Vidur's rule: at their capacity {overloaded} of {len(fleets)} configurations are overloaded, "
        f"{keeps} keep the SLO"
    )


if __name__ == "__main__":
    main()
