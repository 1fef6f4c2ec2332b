"""Computes what one fleet saves against a fleet for each class of requests, on three mixes of public traces.

    python benchmarks/sharing.py [--only azure servegen mooncake] [--rate 1] [--paper] [--traces DIR]

azure     Azure's conversations (TTFT p90 500 ms, TBT p99 200 ms) and its code completions, each due within
          60 s, for an hour; Llama-3.1-8B on L40S
servegen  the same limits for ServeGen's requests of 4 h to 16 h, beside half as many prompts of Azure's code,
          evenly spread and due within an hour; on L40S
mooncake  Azure's conversations beside Mooncake's (TTFT p90 10 s), 20 minutes; on H100

GPUs are sold singly. `--rate` multiplies the rate of both classes. A plan is for production, with --paper for
what is written; it plans each class alone too. DIR holds AzureLLMInferenceTrace_{conv,code}.csv,
mooncake_conversation_trace.jsonl.gz and servegen/m-large-day9-1in20.csv.gz; default: ../shared/data/traces
beside the clone.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import fleetplan
from benchmarks.generated_traffic import merged
from benchmarks.held_out import CODE, CONV, DEFAULT_TRACES, MOONCAKE, SERVEGEN, between
from planner.api.results import PlanResult
from planner.documents.facts import NotShared, SharingSaves
from planner.reports.fact_sentences import fact_sentence
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

CHAT: dict[str, Any] = {"ttft": {"p90": "500 ms"}, "tbt": {"p99": "200 ms"}}
LONG = {"ttft": {"p90": "10 s"}, "tbt": {"p99": "200 ms"}}
H_S = 3600.0


def without_names(trace: Trace) -> Trace:
    """The trace without tenants and prefixes, so that it can be joined with others."""
    offsets, tenant = np.zeros(len(trace) + 1, np.int64), np.zeros(len(trace), np.int64)
    bare = replace(trace, prefix_offsets=offsets, prefix_ids=trace.prefix_ids[:0], prefix_block_tokens=16)
    return replace(bare, tenant=tenant, tenants=())


def azure(folder: Path) -> tuple[Trace, dict[str, Any], str, str | None]:
    traces = {"chat": read_trace(folder / CONV, seed=0), "code": read_trace(folder / CODE, seed=0)}
    return merged(traces), {"chat": CHAT, "code": {"deadline": "60 s"}}, "l40s-48g", None


def servegen(folder: Path) -> tuple[Trace, dict[str, Any], str, str | None]:
    chat = without_names(between(read_trace(folder / SERVEGEN, seed=0), 4 * H_S, 16 * H_S))
    code, rng = read_trace(folder / CODE, seed=0), np.random.default_rng(0)
    count = len(chat) // 2
    arrival_s = np.sort(rng.uniform(0, float(chat.arrival_s[-1]), count))
    batch = code.select(rng.choice(len(code), count), arrival_s=arrival_s)
    return (
        merged({"chat": chat, "batch": batch}),
        {"chat": CHAT, "batch": {"deadline": "1 h"}},
        "l40s-48g",
        None,
    )


def mooncake(folder: Path) -> tuple[Trace, dict[str, Any], str, str | None]:
    long = without_names(read_trace(folder / MOONCAKE, seed=0))
    trace = merged({"chat": without_names(read_trace(folder / CONV, seed=0)), "long": long})
    return trace, {"chat": CHAT, "long": LONG}, "h100-80g", "first 20 min"


MIXES = {each.__name__: each for each in (azure, servegen, mooncake)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(MIXES), default=list(MIXES), dest="mixes")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    arguments = parser.parse_args()
    for name in arguments.mixes:
        trace, lines, gpu, window = MIXES[name](arguments.traces)
        classes = {each: {"match": {"tenant": each}} | limits for each, limits in lines.items()}
        traffic = {} if window is None else {"window": window}
        if arguments.rate != 1:
            traffic |= {"rate": arguments.rate * trace.rate_rps}
        question = {
            "llm": "llama-3.1-8b",
            "slo": {"classes": classes},
            "fleet": {"gpus": [gpu], "sold_as": {gpu: "gpu"}},
            "traffic": traffic,
            **({"safety": "none"} if arguments.paper else {}),
        }
        began_s = time.process_time()
        answer = fleetplan.plan(question, trace, time_limit_s=3000)
        assert isinstance(answer, PlanResult)
        certificate = answer.plan.certificate
        for fact in certificate.binding:
            if isinstance(fact, SharingSaves | NotShared):
                print(f"{name}: {fact_sentence(fact)}")
        kept = [
            f"{row.name} {row.kept_in.kept} of {row.kept_in.scenario_count}"
            for row in certificate.answers
            if row.kept_in
        ]
        print(f"  {', '.join(kept) or 'on paper'}; {time.process_time() - began_s:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
