"""What level 0 costs as the traffic grows: CPU seconds, simulations, and how far the bound is.

    python benchmarks/scale.py [--trace FILE] [--rates 5 20 100 ...] [--window "busiest 2 min"]
                               [--ttft p90] [--tbt "200 ms"] [--pp 1 2] [--beyond]

Llama-3.1-70B on 8 GPU types x TP 1 ... 8 x pipelines of 1 and 2 x 5 token budgets, mixed, prefill and decode
workers, any number of each; a link that is no limit. One process, after one small search that compiles.
CPU seconds are those of all threads: `traffic` scales the trace and cuts the window, `bound` is the
policy-free bound over all mixes, `level 0` the exact search. `--beyond` goes on to fleets of several types.
FILE: AzureLLMInferenceTrace_conv.csv of AzurePublicDataset; default: ../shared/data/traces beside the clone.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.task import parse_task
from planner.search.asked import Asked
from planner.search.best_fleet import search
from planner.search.bounds import lower_bound
from planner.search.level0 import search_level0
from planner.search.pose import pose
from planner.traffic.reading import read_trace
from planner.traffic.trace import Trace

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


def timed(do: Callable[[], Answer]) -> tuple[Answer, float]:
    start_s = time.process_time()
    return do(), time.process_time() - start_s


def run_case(trace: Trace, rate_rps: float, asked: argparse.Namespace, catalog: Catalog) -> dict[str, str]:
    """One search; the row of the table."""
    question: dict[str, Any] = {
        "llm": "llama-3.1-70b",
        "slo": {"ttft": {asked.ttft: "2 s"}, "tbt": {"p99": asked.tbt}},
        "traffic": {"rate": rate_rps, "window": asked.window},
        "fleet": {"gpus": GPUS, "pp": asked.pp, "network": {"bandwidth": "100 TB/s"}},
    }
    task = parse_task(question, catalog)
    traffic, traffic_s = timed(lambda: Asked.of(trace, task, seed=0))
    problem = pose(task, trace, catalog, asked=traffic)
    bound, bound_s = timed(lambda: lower_bound(problem))
    if asked.beyond:
        found, search_s = timed(lambda: search(problem))
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
    asked = parser.parse_args()
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
