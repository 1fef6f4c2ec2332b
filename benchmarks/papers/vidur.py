"""Vidur's what-if figures (Agrawal et al. 2024, arXiv:2405.05465), by its workloads' marginals.

    python benchmarks/papers/vidur.py [figure6|table1]

table1: lengths as drawn from the catalog's tasks, beside the paper's.
figure6: QPS per dollar of the best deployment on 16 GPUs of each workload (Chat-1M, Arxiv-4K, BWB-4K) and
LLM, within TTFT P90 2 s and TBT P99 200 ms in steady state, Poisson arrivals, catalog prices; which one it is
(Figure 1a); and how many times more a workload costs on the best of another (Figure 1b, Llama-2-70B).
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from common import CATALOG

from planner.documents.described import parse_description
from planner.documents.reading import Section
from planner.domain import Limit, Slo
from planner.papers.goodput import Steady, goodput, poisson
from planner.papers.vidur import SearchedConfiguration, Space, configurations, most_rps
from planner.traffic.described import draw
from planner.traffic.trace import Trace

WORKLOADS = {"lmsys-chat-4k": "Chat-1M", "summarising-4k": "Arxiv-4K", "translating-4k": "BWB-4K"}
LLMS = ("llama-2-7b", "llama-2-70b", "qwen-72b")
SLO = Slo((Limit("ttft", 0.9, 2.0), Limit("tbt", 0.99, 0.2)))
SPACE = Space(batchings=("vllm-v0", "sarathi"), budgets=(512, 2048), seats=(64, 256), pipelines=(1, 2))
GPUS, MOST_TOKENS, ROUGH_FRAC = 16, 4096, 0.1


def lengths_of(task: str) -> Trace:
    """5,000 requests of a task, those of more than 4,096 tokens in all left out."""
    section = Section.of({"rate": 10, "duration": "500 s", "task": task, "clients": {"count": 1}}, task)
    description = parse_description(section, CATALOG.tasks)
    assert description is not None
    drawn = draw(description, seed=0)
    return drawn.select(np.flatnonzero(drawn.input_tokens + drawn.output_tokens <= MOST_TOKENS))


def table1() -> None:
    print("tokens of prompts and outputs: mean, median, P90 of the paper; of what is drawn")
    for task, name in WORKLOADS.items():
        drawn, row = lengths_of(task), CATALOG.tasks[task]
        for kind, values in (("input", drawn.input_tokens), ("output", drawn.output_tokens)):
            published = row.values[kind]
            told = [published[key] for key in ("mean", "p50", "p90")]
            ours = [values.mean(), *np.quantile(values, (0.5, 0.9))]
            print(f"{name:9} {kind:6} {told} {[round(float(value)) for value in ours]}")


def best_of(llm: str, lengths: Trace) -> list[SearchedConfiguration]:
    """The best deployment of each GPU, most requests per dollar first: roughly for all, then to 2 %."""
    rule = Steady(SLO, poisson(lengths), seeds=1)
    rows = []
    for gpu in ("a100-80g", "h100-80g"):
        fleets = configurations(
            CATALOG.llm(llm), [CATALOG.gpu(gpu)], CATALOG, SPACE, total_gpus=GPUS, least_kv_tokens=MOST_TOKENS
        )
        fleets = [fleet for fleet in fleets if fleet.pools[0].type.tp <= 4]
        rates = [
            goodput(rule, fleet, guess_rps=0.3 * most_rps(fleet, lengths), tolerance_frac=ROUGH_FRAC).rate_rps
            for fleet in fleets
        ]
        near = [fleet for fleet, rate in zip(fleets, rates, strict=True) if rate >= 0.85 * max(rates) > 0]
        rows += [SearchedConfiguration(f, goodput(rule, f, guess_rps=max(rates)).rate_rps, ()) for f in near]
    return sorted(rows, key=lambda row: -row.requests_per_usd)


def figure6() -> None:
    best: dict[tuple[str, str], SearchedConfiguration] = {}
    traces = {task: lengths_of(task) for task in WORKLOADS}
    print("QPS per USD/h, best deployment")
    for llm in LLMS:
        for task, name in WORKLOADS.items():
            rows = best_of(llm, traces[task])
            best[llm, task] = rows[0]
            other = next(
                (r for r in rows if r.fleet.pools[0].type.gpu != rows[0].fleet.pools[0].type.gpu), None
            )
            beside = "" if other is None else f"; {other.requests_per_usd / 3600:.3f} {other.name}"
            print(
                f"{llm:12} {name:9} {rows[0].requests_per_usd / 3600:.3f} {rows[0].name}{beside}", flush=True
            )
    print("Llama-2-70B: cost of a workload (row) on the best deployment of another (column), times")
    for task, name in WORKLOADS.items():
        rule, cells = Steady(SLO, poisson(traces[task]), seeds=1), []
        for other in WORKLOADS:
            fleet = best["llama-2-70b", other].fleet
            rate = goodput(rule, fleet, guess_rps=best["llama-2-70b", task].rate_rps).rate_rps
            own = best["llama-2-70b", task].requests_per_usd * fleet.price_usd_per_h / 3600
            cells.append(f"{own / rate:6.2f}" if rate else "   none")
        print(f"{name:9} {' '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Vidur's Figures 1 and 6.")
    parser.add_argument("what", nargs="?", choices=("figure6", "table1"), default="figure6")
    start = time.process_time()
    {"figure6": figure6, "table1": table1}[parser.parse_args().what]()
    print(f"{time.process_time() - start:.1f} CPU-s")


if __name__ == "__main__":
    main()
