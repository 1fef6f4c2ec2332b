"""Compares gaps between tokens of vLLM v0, whose decodes wait for whole prompts, and of Sarathi's chunks.

    python benchmarks/papers/sarathi.py [TRACE]

Llama-3.1-70B on one worker of 4 A100; the Azure conversation trace (our sample, unless another is given) at
three rates. Agrawal et al. 2024 (arXiv:2403.02310): vLLM's decodes stall for seconds; chunks make the P99 of
the gaps several times lower, smaller ones more so, at some cost in TTFT.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.papers.common import CATALOG, in_seconds, worker
from planner.fleet import Fleet, Policies, Pool
from planner.simulator.measured_values import metric_percentile_s
from planner.simulator.replay import simulate
from planner.traffic.trace_reading import read_trace

LLM = "meta-llama/Llama-3.1-70B"
SAMPLE = Path(__file__).parents[2] / "examples" / "traces" / "azure-conversation-sample.csv"
RATES_RPS = (1.0, 2.0, 3.0)
ENGINES = (("vllm-v0", 8192), ("sarathi", 2048), ("sarathi", 512))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="?", default=SAMPLE)
    trace = read_trace(parser.parse_args().trace)
    print("rate  engine             TTFT p50, p99 [s]   TBT p50, p99, max [ms]   E2E p50 [s]")
    for rate_rps in RATES_RPS:
        for batching, budget in ENGINES:
            pool = Pool("a100", "mixed", worker(LLM, "a100-80g", 4, budget=budget), 1)
            fleet = Fleet(CATALOG.llm(LLM), (pool,), Policies(batching=batching))
            result = simulate(fleet, in_seconds(trace, rate_rps), record=True)
            ttft = [metric_percentile_s(result, "ttft", p) for p in (0.5, 0.99)]
            tbt = [1e3 * metric_percentile_s(result, "tbt", p) for p in (0.5, 0.99, 1.0)]
            print(
                f"{rate_rps:4.1f}  {batching:8} {budget:5}   {ttft[0]:9.2f} {ttft[1]:8.2f}   "
                f"{tbt[0]:9.0f} {tbt[1]:6.0f} {tbt[2]:7.0f}   {metric_percentile_s(result, 'e2e', 0.5):9.1f}"
            )


if __name__ == "__main__":
    main()
