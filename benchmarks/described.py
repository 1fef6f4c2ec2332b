"""Compares fleets sized on a description of a trace with fleets sized on the trace itself.

    python benchmarks/described.py TRACES [--draws 5] [--only NAME] [--out FILE.json]

For each trace (Azure conversation and code, Mooncake conversation and synthetic, two parts of a ServeGen day;
TRACES is the folder that holds them) the least number of workers that keep the SLO is found by simulation: on
the trace; on draws of the description that `described_of` fits to it, written to YAML and read back; on draws
of its mean rate and lengths alone, with clients as they are by default; and on Poisson arrivals with the
trace's pairs of lengths in random order at its mean rate. All workers are of one type, so that a fleet is a
number.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.api.simulating import simulate
from planner.documents.catalog import read_catalog
from planner.documents.traffic_description import description_document, parse_description
from planner.files.checked_files import to_yaml, yaml_value
from planner.files.document_values import Section
from planner.traffic.described import Clients, draw_requests
from planner.traffic.described_of import described_of
from planner.traffic.scaling import select_window
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

CATALOG = read_catalog()
LLM = "meta-llama/Llama-3.1-70B"
SLO = {"ttft": {"p90": "2 s"}, "tbt": {"p99": "200 ms"}}
LONG = {"ttft": {"p90": "20 s"}, "tbt": {"p99": "400 ms"}}  # For prompts of 12,000 tokens on average.


@dataclass(frozen=True, slots=True)
class Case:
    """A trace, the part of it that is taken, GPUs of a worker (a100-80g), and what is promised."""

    name: str
    file: str
    part: str
    tp: int
    slo: dict[str, dict[str, str]]


CASES = (
    Case("Azure 2023 conversation", "AzureLLMInferenceTrace_conv.csv", "whole", 2, SLO),
    Case("Azure 2023 code", "AzureLLMInferenceTrace_code.csv", "whole", 2, SLO),
    Case("Mooncake conversation", "mooncake_conversation_trace.jsonl.gz", "whole", 4, LONG),
    Case("Mooncake synthetic", "mooncake_synthetic_trace.jsonl.gz", "whole", 4, LONG),
    Case("ServeGen m-large, busiest 2 h", "servegen/m-large-day9-1in20.csv.gz", "busiest 2 h", 2, SLO),
    Case("ServeGen m-large, first 2 h", "servegen/m-large-day9-1in20.csv.gz", "first 2 h", 2, SLO),
)


def poisson(trace: Trace, seed: int) -> Trace:
    """Poisson arrivals at the mean rate; pairs of lengths in random order."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(trace))
    at_s = np.sort(rng.uniform(0.0, trace.duration_s, len(trace)))
    return Trace(
        name=f"{trace.name}, Poisson",
        arrival_s=at_s,
        input_tokens=trace.input_tokens[order],
        output_tokens=trace.output_tokens[order],
    )


def least_workers(trace: Trace, case: Case) -> int:
    """The least number of workers that keeps the SLO, by bisection: more are taken to keep it too."""

    def keeps(count: int) -> bool:
        workers = [{"gpu": "a100-80g", "tp": case.tp, "count": count, "max_num_batched_tokens": 2048}]
        found = simulate({"llm": LLM, "workers": workers}, trace, case.slo, catalog=CATALOG)
        return bool(found.holds)

    low, high = 0, 4
    while not keeps(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high


def measured(case: Case, folder: Path, draws: int) -> dict[str, Any]:
    trace = select_window(read_trace(folder / case.file), case.part)
    text = to_yaml({"traffic": description_document(described_of(trace))})
    description = parse_description(Section.from_document(yaml_value(text)["traffic"], "traffic"), {})
    assert description is not None
    usual = replace(
        description,
        rate_rps=(len(trace) / trace.duration_s,),
        gap_cv=None,
        fano=(),
        drift=((), ()),
        clients=Clients(),
    )
    return {
        "name": case.name,
        "requests": len(trace),
        "trace": least_workers(trace, case),
        "described": [least_workers(draw_requests(description, seed=seed), case) for seed in range(draws)],
        "usual": [least_workers(draw_requests(usual, seed=seed), case) for seed in range(draws)],
        "poisson": [least_workers(poisson(trace, seed), case) for seed in range(draws)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    print("| trace | requests | trace itself | described | rate and lengths alone | Poisson |")
    for case in CASES:
        if given.only.lower() in case.name.lower():
            rows.append(one := measured(case, given.traces, given.draws))
            cells = [
                f"{', '.join(map(str, sorted(one[name])))} ({np.mean(one[name]) / one['trace'] - 1:+.0%})"
                for name in ("described", "usual", "poisson")
            ]
            print(
                f"| {one['name']} | {one['requests']:,} | {one['trace']} | {' | '.join(cells)} |", flush=True
            )
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
