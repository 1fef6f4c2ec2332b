"""How few decode workers keep up behind instant prefill, against what large questions take for granted.

    python benchmarks/decode_pools.py --traces FILE [FILE ...] [--rates 300 2000] [--windows "busiest 2 min"]

For each decode option of eight GPU types, TP and PP, the least count that passes the backlog test
(`Oracle.decode_keeps_up_alone`), by bisection, as a multiple of `master.fewest_decode_workers`. A search of
more than `level0_search.SEATS_REQUESTS` requests simulates none below `level0_search.FEW_FRAC` times that
(pruning_rules.SEATS). Exits with 1 if one of those keeps up.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scale import question
from planner.api.inputs import requests_of
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.task import parse_task
from planner.search.level0 import level0_search
from planner.search.level0.one_pool import BoundedOption, least_that_holds
from planner.search.oracle.traffic_request import TrafficRequest
from planner.search.problem.build_problem import build_problem
from planner.search.problem.options import decode_options
from planner.search.problem.plan_problem import Problem
from planner.solvers.master import Option, fewest_decode_workers, full_workers
from planner.traffic.trace import Trace

LEAST, MOST = 4, 2_000  # Pools with fewer or more workers are left out; of few workers a share says little.


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, nargs="+", required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[300.0])
    parser.add_argument("--windows", nargs="+", default=["busiest 2 min"])
    parser.add_argument("--ttft", nargs="+", default=["2 s"])
    parser.add_argument("--llms", nargs="+", default=["llama-3.1-70b"])
    asked = parser.parse_args()
    catalog, is_right = read_catalog(None), True
    print("| LLM | trace | req/s | window | TTFT | pools | least share | median | largest |")
    print("|---|---|---|---|---|---|---|---|---|")
    for path in asked.traces:
        trace = requests_of(path, None, seed=0)
        for llm, rate, window, ttft in itertools.product(asked.llms, asked.rates, asked.windows, asked.ttft):
            slo = {"ttft": {"p99": ttft}, "tbt": {"p99": "100 ms"}}
            shares = shares_of(posed(question(llm, slo, rate, window, [1, 2]), trace, catalog))
            cells = [llm, path.stem, f"{rate:g}", window, ttft, str(len(shares))]
            cells += [f"{share:.2f}" for share in np.quantile(shares, [0, 0.5, 1])] if shares else []
            print(f"| {' | '.join(cells)} |", flush=True)
            is_right &= all(share >= level0_search.FEW_FRAC for share in shares)
    sys.exit(not is_right)


def posed(document: dict[str, Any], trace: Trace, catalog: Catalog) -> Problem:
    task = parse_task(document, catalog)
    return build_problem(task, trace, catalog, request=TrafficRequest.of(trace, task, seed=0))


def shares_of(problem: Problem) -> list[float]:
    """The least count that keeps up for each decode option, as a multiple of the assumed fewest."""
    found = []
    for option in decode_options(problem.types, problem.option_objective):
        busy = math.ceil(level0_search.workers_for_backlog_test(problem, option, full_workers))
        if LEAST <= busy <= MOST:
            fewest = level0_search.workers_for_backlog_test(problem, option, fewest_decode_workers)
            found.append(least_that_follows(problem, option, busy) / fewest)
    return found


def least_that_follows(problem: Problem, option: Option, busy: int) -> int:
    def follows(count: int) -> bool:
        return problem.oracle.decode_keeps_up_alone(((option, count),))

    least = least_that_holds(follows, 1, np.inf, BoundedOption(option, 1, np.inf, busy))
    assert least is not None
    return least


if __name__ == "__main__":
    main()
