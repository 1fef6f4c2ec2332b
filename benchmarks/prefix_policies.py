"""Simulates the effect of routing on prefix caches.

    python benchmarks/prefix_policies.py routing [FOLDER]   Mooncake's traces on 8 workers, every routing
    python benchmarks/prefix_policies.py speed [FOLDER]     requests per CPU second, by number of workers

FOLDER has Mooncake's traces (FAST'25); default: ../shared/data/traces. Only prefill is simulated, with 1/7000
s per token (conversation) or 1/8000 s (synthetic), and with caches of 3 million tokens.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.documents.catalog import read_catalog
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.policies import ROUTING
from planner.simulator import simulate
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
TOKEN_S = {"conversation": 1 / 7000, "synthetic": 1 / 8000}
CACHE_TOKENS = 3_000_000
# The routings that look at caches.
LOOKING = tuple(name for name, row in ROUTING.items() if row.needs_caches)


def prompts_only(folder: Path, name: str) -> Trace:
    trace = read_trace(folder / f"mooncake_{name}_trace.jsonl.gz")
    return replace(trace, output_tokens=np.ones(len(trace), np.int64))


def prefill_fleet(workers: int, token_s: float, routing: str) -> Fleet:
    """Engines that compute one token after the other, in steps of 2048."""
    catalog = read_catalog()
    latency = StepLatency((1.0, 1e6), (token_s, token_s * 1e6), 0.0, 0.0, 0.0, 0.0, 0.0, "one speed")
    kind = WorkerType(catalog.gpu("h100-80g"), 1, latency, CACHE_TOKENS // 512 * 512, 2048, 1024)
    pool = Pool("w", "mixed", kind, workers)
    llm = catalog.llm("meta-llama/Llama-3.1-70B")
    return Fleet(llm, (pool,), Policies(prefix_cache=True, routing=routing))


def routing(folder: Path) -> None:
    for name, token_s in TOKEN_S.items():
        trace = prompts_only(folder, name)
        for policy in ("round-robin", "least-outstanding", "jsq", *LOOKING):
            found = simulate(prefill_fleet(8, token_s, policy), trace)
            assert found.cached_tokens is not None
            missed = trace.input_tokens - found.cached_tokens
            work = np.bincount(found.prefill_worker, weights=missed, minlength=8)
            print(
                f"{name:12} {policy:17} hit {found.token_hit_frac:.3f}  ttft mean {found.ttft_s.mean():8.2f} "
                f"p99 {np.quantile(found.ttft_s, 0.99):8.1f} s  busiest / mean {work.max() / work.mean():.2f}"
            )


def speed(folder: Path) -> None:
    """The same trace goes to more and more workers."""
    trace = prompts_only(folder, "conversation")
    policies = ("round-robin", *LOOKING)
    for policy in policies:
        simulate(prefill_fleet(2, 1 / 7000, policy), trace.select(np.arange(10)))
    for workers in (8, 16, 32, 64, 128, 256):
        rates = []
        for policy in policies:
            fleet = prefill_fleet(workers, 1 / 7000, policy)
            rates.append(len(trace) / min(_cpu_s(fleet, trace) for _ in range(5)))
        row = "  ".join(f"{policy} {rate:9,.0f}" for policy, rate in zip(policies, rates, strict=True))
        print(f"{workers:4} workers, requests per CPU s: {row}", flush=True)


def _cpu_s(fleet: Fleet, trace: Trace) -> float:
    start = time.process_time()
    simulate(fleet, trace)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("routing", "speed"))
    parser.add_argument("folder", type=Path, nargs="?", default=TRACES)
    asked = parser.parse_args()
    (routing if asked.part == "routing" else speed)(asked.folder)


if __name__ == "__main__":
    main()
