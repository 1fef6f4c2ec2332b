"""Vidur's Table 1, Figures 1, 5 and 6 (Agrawal et al. 2024, arXiv:2405.05465).

    python benchmarks/papers/vidur.py [table1 | figure1 | figure5 | figure6]

Chat-1M, Arxiv-4K and BWB-4K are tasks of the catalog, drawn from published marginals; requests of more than
4,096 tokens in all are left out, as the paper leaves them out. Table 1: mean, median and P90 of the paper
beside those of 5,000 requests drawn.

The figures search the configurations of its section 7.3: 16 A100 or H100, TP and PP of 1, 2 and 4, Sarathi
with 512 or 2,048 tokens, vLLM with 4,096, batches of 64 to 256; within TTFT P90 2 s and TBT P99
200 ms in steady state, one seed, Poisson arrivals. The catalog's step times and prices. Figure 1: the LLM
and the workload matter; the best of one may cost twice as much on another. Figure 6: larger LLMs, and
workloads with longer outputs, carry fewer requests per dollar; Qwen-72B (multi-head attention) about half of
Llama-2-70B. Figure 5: what is best in one latency may miss the other.
"""

from __future__ import annotations

import argparse
import time
from functools import cache

import numpy as np

from benchmarks.papers.common import CATALOG
from planner.documents.traffic_description import parse_description
from planner.domain import Limit, Slo
from planner.files.document_values import Section
from planner.fleet import Fleet
from planner.papers import vidur_search
from planner.papers.goodput import Steady, poisson_traffic
from planner.traffic.described import draw_requests
from planner.traffic.trace import Trace

LLMS = ("llama-2-7b", "llama-2-70b", "qwen-72b")
GPUS = [CATALOG.gpu(name) for name in ("a100-80g", "h100-80g")]
SLO = Slo((Limit("ttft", 0.9, 2.0), Limit("tbt", 0.99, 0.2)))
MOST_OF_BOUND = 1.2  # times the work's own bound: beyond it a rate is not tried
WORKLOADS = {"lmsys-chat-4k": "Chat-1M", "summarising-4k": "Arxiv-4K", "translating-4k": "BWB-4K"}
MOST_TOKENS = 4096


def lengths_of(task: str) -> Trace:
    """About 5,000 requests of a task that fit."""
    section = Section.from_document(
        {"rate": 10, "duration": "500 s", "task": task, "clients": {"count": 1}}, task
    )
    description = parse_description(section, CATALOG.tasks)
    assert description is not None
    drawn = draw_requests(description, seed=0)
    return drawn.select(np.flatnonzero(drawn.input_tokens + drawn.output_tokens <= MOST_TOKENS))


def table1() -> None:
    print("tokens of prompts and outputs: mean, median, P90 of the paper; of what is drawn")
    for task, name in WORKLOADS.items():
        drawn, row = lengths_of(task), CATALOG.tasks[task]
        for kind, values in (("input", drawn.input_tokens), ("output", drawn.output_tokens)):
            told = [row.values[kind][key] for key in ("mean", "p50", "p90")]
            ours = [values.mean(), *np.quantile(values, (0.5, 0.9))]
            print(f"{name:9} {kind:6} {told} {[round(float(value)) for value in ours]}")


def fleets_of(llm: str, lengths: Trace) -> list[Fleet]:
    """Every configuration of section 7.3 that holds the longest request; TP up to 4."""
    longest = int((lengths.input_tokens + lengths.output_tokens).max())
    found = []
    for batching, budgets in (("sarathi", (512, 2048)), ("vllm-v0", (4096,))):
        space = vidur_search.EngineSettingChoices((batching,), budgets, (64, 128, 256))
        found += vidur_search.configurations(
            CATALOG.llm(llm), GPUS, CATALOG, space, total_gpus=16, least_kv_tokens=longest
        )
    return [fleet for fleet in found if fleet.pools[0].type.tp <= 4]


def rule_of(lengths: Trace, slo: Slo = SLO) -> Steady:
    """Runs of 1,000 requests, longer until they hold five mean residences."""
    return Steady(slo, poisson_traffic(lengths), 1, 1000, 5.0)


@cache
def best(llm: str, task: str) -> vidur_search.SearchedConfiguration:
    """The most requests per dollar: only what carries more than the best so far is measured."""
    lengths = lengths_of(task)
    rule = rule_of(lengths)
    found: vidur_search.SearchedConfiguration | None = None
    promised = sorted(
        fleets_of(llm, lengths),
        key=lambda fleet: -vidur_search.most_rps(fleet, lengths) / fleet.price_usd_per_h,
    )
    for fleet in promised:
        to_beat_rps = found.requests_per_usd * fleet.price_usd_per_h / 3600 if found else 0.0
        if to_beat_rps > MOST_OF_BOUND * vidur_search.most_rps(fleet, lengths):
            continue
        if to_beat_rps and not rule.carries(fleet, to_beat_rps):
            continue
        (row,) = vidur_search.search_configurations([fleet], rule, lengths, (), tolerance_frac=0.05)
        if found is None or row.requests_per_usd > found.requests_per_usd:
            found = row
    assert found is not None
    return found


def figure1() -> None:
    """The best configuration by LLM and workload, and what that of one costs another (70B)."""
    for llm in LLMS:
        for task, name in WORKLOADS.items():
            row = best(llm, task)
            print(f"{llm:12} {name:9} {row.requests_per_usd:7.0f} requests/USD {row.name}", flush=True)
    llm = LLMS[1]
    for of, name in WORKLOADS.items():
        shares = []
        for served in WORKLOADS:
            lengths = lengths_of(served)
            fleet = best(llm, of).fleet
            (row,) = vidur_search.search_configurations([fleet], rule_of(lengths), lengths, ())
            gain = best(llm, served).requests_per_usd / row.requests_per_usd if row.rate_rps else np.inf
            shares.append(f"{gain:.2f}")
        print(
            f"{llm}, best for {name}: {', '.join(shares)} times the cost of {', '.join(WORKLOADS.values())}"
        )


def figure6() -> None:
    """Requests per dollar of the best configurations."""
    for llm in LLMS:
        rows = [f"{name} {best(llm, task).requests_per_usd:7.0f}" for task, name in WORKLOADS.items()]
        print(f"{llm:12} requests/USD: {', '.join(rows)}", flush=True)


def figure5() -> None:
    """Capacity per dollar and latency, Llama-2-70B on Chat-1M: both frontiers."""
    task = "lmsys-chat-4k"
    lengths = lengths_of(task)
    rule = rule_of(lengths, Slo((Limit("ttft", 0.9, 20.0), Limit("tbt", 0.99, 2.0))))
    fleets = [fleet for fleet in fleets_of(LLMS[1], lengths) if fleet.pools[0].type.max_num_seqs == 256]
    rows = vidur_search.search_configurations(fleets, rule, lengths, tolerance_frac=0.05)
    for latency, name in ((0, "TTFT P90"), (1, "TBT P99")):
        for row in vidur_search.pareto_configurations(rows, latency):
            print(
                f"{name} {row.values_s[latency]:6.3f} s  {row.requests_per_usd:7.0f} requests/USD {row.name}"
            )
    kept = [row for row in rows if row.values_s[0] <= 2 and row.values_s[1] <= 0.2]
    print(f"{len(rows)} configurations, {len(kept)} within both limits of section 7.3 at their capacity")


def main() -> None:
    start = time.process_time()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    figures = {each.__name__: each for each in (table1, figure1, figure5, figure6)}
    parser.add_argument("figure", nargs="?", choices=list(figures), default="table1")
    figures[parser.parse_args().figure]()
    print(f"{time.process_time() - start:.1f} CPU-s")


if __name__ == "__main__":
    main()
