"""Measures the cost of level 0 as traffic grows: CPU seconds, simulations, and the gap to the bound.

    python benchmarks/scale.py [--trace FILE] [--rates 5 20 100 ...] [--window "busiest 2 min"]
                               [--ttft p90] [--tbt "200 ms"] [--pp 1 2] [--beyond]

Llama-3.1-70B on 8 GPU types, TP of 1 to 8, pipelines of 1 and 2 stages and 5 token budgets; mixed, prefill
and decode workers in any number; a link so fast that it is no limit. All runs in one process, after a small
search that compiles. CPU seconds are those of all threads: `traffic` rescales the trace and cuts the window,
`bound` is the lower bound for any scheduling and all mixes of types, `level 0` the exact search. `--beyond`
also searches fleets of several types. FILE: AzureLLMInferenceTrace_conv.csv of AzurePublicDataset; default:
../shared/data/traces beside the clone.

    python benchmarks/scale.py --long 1e6 5e6 [--no-plan] [--folder DIR]

With --long, measures long traces: so many requests at 100 requests/s by day and night are drawn and written
to DIR, then read, read again, simulated on 14 H100 with an 8B LLM, and planned on paper, each in a process of
its own with an empty cache folder in DIR. Exits with 1 if the simulation takes more memory than MIB plus
MIB_PER_MILLION for each million requests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.task import parse_task
from planner.search.level0.level0_search import search_level0
from planner.search.mixed.best_fleet import find_best_fleet
from planner.search.mixed.bounds import lower_bound
from planner.search.oracle.traffic_request import TrafficRequest
from planner.search.problem.build_problem import build_problem
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

DEFAULT_TRACE = (
    Path(__file__).resolve().parents[2] / "shared" / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv"
)
GPUS = [
    "a100-80g",
    "h100-80g",
    "h100-pcie-80g",
    "h100-nvl-94g",
    "h200-141g",
    "b200-180g",
    "l40s-48g",
    "mi300x-192g",
]
Answer = TypeVar("Answer")
MIB, MIB_PER_MILLION = 600.0, 66.0  # Memory that the simulation of a long trace may take.
LONG_FLEET = "llm: llama-3.1-8b\nworkers:\n  - {role: mixed, gpu: h100-80g, tp: 1, count: 14}\n"
LONG_SLO = """llm: llama-3.1-8b
slo: {ttft: {p99: 1 s}, tbt: {p99: 60 ms}}
fleet: {gpus: [h100-80g]}
safety: none
"""
STAGES = {
    "read": "from planner.traffic.trace_reading import read_trace; read_trace('trace.csv')",
    "read again": "from planner.traffic.trace_reading import read_trace; read_trace('trace.csv')",
    "simulate": "simulate --fleet fleet.yaml --trace trace.csv --slo slo.yaml --json",
    "plan": "--slo slo.yaml --trace trace.csv --time-limit 3600 -o plan",
}


def timed(do: Callable[[], Answer]) -> tuple[Answer, float]:
    start_s = time.process_time()
    return do(), time.process_time() - start_s


def question(llm: str, slo: dict[str, Any], rate_rps: float, window: str, pp: list[int]) -> dict[str, Any]:
    """A question with the GPU types above and a link so fast that it is no limit."""
    return {
        "llm": llm,
        "slo": slo,
        "traffic": {"rate": rate_rps, "window": window},
        "fleet": {"gpus": GPUS, "pp": pp, "network": {"bandwidth": "100 TB/s"}},
    }


def run_case(trace: Trace, rate_rps: float, asked: argparse.Namespace, catalog: Catalog) -> dict[str, str]:
    """One search; the row of the table."""
    slo = {"ttft": {asked.ttft: "2 s"}, "tbt": {"p99": asked.tbt}}
    task = parse_task(question("llama-3.1-70b", slo, rate_rps, asked.window, asked.pp), catalog)
    traffic, traffic_s = timed(lambda: TrafficRequest.of(trace, task, seed=0))
    problem = build_problem(task, trace, catalog, request=traffic)
    bound, bound_s = timed(lambda: lower_bound(problem))
    if asked.beyond:
        found, search_s = timed(lambda: find_best_fleet(problem))
        level0, best, value = found.level0, found.best, found.value
    else:
        level0, search_s = timed(lambda: search_level0(problem))
        assert level0.search.best is not None
        best, value = level0.search.best, level0.search.value
    assert bound is not None
    return {
        "req/s": f"{rate_rps:g}",
        "requests": f"{len(problem.trace)}",
        "fleet": " + ".join(f"{count} {option.name}" for option, count in best),
        "USD/h": f"{value:.2f}",
        "exact": "yes" if level0.search.is_exhausted else "NO",
        "gap to bound": f"{100 * (1 - bound / value):.1f} %",
        "simulations": f"{problem.oracle.simulations}",
        "traffic CPU s": f"{traffic_s:.1f}",
        "bound CPU s": f"{bound_s:.1f}",
        ("search CPU s" if asked.beyond else "level 0 CPU s"): f"{search_s:.1f}",
    }


def draw_long(requests: int, path: Path) -> None:
    """100 requests/s on average, half as many more at noon, lognormal lengths."""
    rng, left, start_s = np.random.default_rng(0), requests, 0.0
    with path.open("w") as stream:
        stream.write("arrival_s,input_tokens,output_tokens\n")
        while left > 0:
            seconds = np.arange(start_s, start_s + 10_000)
            counts = rng.poisson(100 * (1 + 0.5 * np.sin(2 * np.pi * seconds / 86_400)))
            arrival_s = np.sort(np.repeat(seconds, counts) + rng.uniform(0, 1, counts.sum()))[:left]
            inputs = np.clip(rng.lognormal(6.3, 1.0, len(arrival_s)), 1, 7000).astype(int)
            outputs = np.clip(rng.lognormal(4.7, 0.8, len(arrival_s)), 1, 1500).astype(int)
            table = pd.DataFrame({"arrival_s": arrival_s.round(4), "in": inputs, "out": outputs})
            table.to_csv(stream, header=False, index=False)
            left, start_s = left - len(arrival_s), start_s + 10_000


def run_long(requests: int, folder: Path, stages: list[str]) -> bool:
    """Prints a row for each stage; returns whether the simulation stayed within its memory."""
    draw_long(requests, folder / "trace.csv")
    (folder / "fleet.yaml").write_text(LONG_FLEET)
    (folder / "slo.yaml").write_text(LONG_SLO)
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": root}
    keeps = True
    for stage in stages:
        how = (
            ["-c", STAGES[stage]] if stage.startswith("read") else ["-m", "fleetplan", *STAGES[stage].split()]
        )
        child = subprocess.Popen(
            [sys.executable, *how], cwd=folder, env=environment, stdout=subprocess.DEVNULL
        )
        _, code, used = os.wait4(child.pid, 0)
        peak_mib = used.ru_maxrss / 1024
        cells = f"{requests:,}", stage, f"{used.ru_utime + used.ru_stime:.1f}", f"{peak_mib:,.0f}", str(code)
        print("| " + " | ".join(cells) + " |", flush=True)
        if stage == "simulate":
            keeps = code in (0, 5) and peak_mib <= MIB + MIB_PER_MILLION * requests / 1e6
    return keeps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--rates", nargs="+", type=float, default=[5, 20, 100, 500, 1000, 5000])
    parser.add_argument("--window", default="busiest 2 min")
    parser.add_argument("--ttft", default="p90", metavar="PERCENTILE")
    parser.add_argument("--tbt", default="200 ms", metavar="LIMIT")
    parser.add_argument("--pp", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--beyond", action="store_true")
    parser.add_argument("--long", nargs="+", type=float, metavar="REQUESTS", help="long traces instead")
    parser.add_argument("--no-plan", action="store_true", help="with --long: read and simulate alone")
    parser.add_argument("--folder", type=Path, help="with --long: where to write (default: a temporary one)")
    asked = parser.parse_args()
    if asked.long:
        print("| requests | stage | CPU s | peak MiB | exit code |\n|---|---|---|---|---|")
        stages = [stage for stage in STAGES if stage != "plan" or not asked.no_plan]
        kept = []
        for requests in asked.long:
            with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
                kept.append(run_long(int(requests), Path(folder), stages))
        sys.exit(not all(kept))
    trace, catalog = read_trace(asked.trace), read_catalog()
    run_case(trace, 1.0, asked, catalog)
    for i, rate_rps in enumerate(asked.rates):
        row = run_case(trace, rate_rps, asked, catalog)
        if i == 0:
            print("| " + " | ".join(row) + " |")
            print("|" + "---|" * len(row))
        print("| " + " | ".join(row.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
