"""Compares predicted with measured tokens/s and TTFT of published multi-turn runs of DeepSeek-V4-Pro on
GB300.

    python benchmarks/agents_reality.py FOLDER     # with gb300_deepseek_v4.runs.json and .requests.jsonl.gz

The runs (Prathmesh234/mutliturn-inferenceX, 21cc5b9) keep a number of sessions in flight; every turn waits
for the one before. Their log has the tokens of each request but not its session, so sessions are
reconstructed from the run with the fewest clients: a turn belongs to the session in flight to whose prompt it
adds least. In every run the same sessions are given to the clients in order, each to the client that has made
the least output so far. They are simulated on one worker of vLLM 0.21 with the predicted KV cache; SGLang's
runs are simulated with vLLM too.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.api.questions import read_task
from planner.documents.catalog import read_catalog
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.search.problem.build_problem import build_problem
from planner.search.problem.plan_problem import Conditions
from planner.simulator.replay import simulate
from planner.traffic.trace import Trace

FEW = "dsv4_b1/c4"  # the run whose order of turns shows the sessions
VLLM_VERSION = "0.21.0"
SEATS = 128  # max_num_seqs in the log of vLLM's server, and in SGLang's command.
LEAST_SHARED_TOKENS = 16
# All sessions are taken to begin with a system prompt of about this length: the shortest prompt has 1,625
# tokens, and if sessions shared nothing, 4 clients would find 86 % of tokens cached, while the log has 88 %.
SYSTEM_TOKENS = 1_600
CATALOG = read_catalog(None)


def sessions_of(rows: Sequence[Mapping[str, Any]], clients: int) -> list[list[tuple[int, int]]]:
    """(input, output) tokens of the turns of each session, of rows in the order in which they ended."""
    done: list[list[tuple[int, int]]] = []
    in_flight: list[list[tuple[int, int]]] = []
    for row in rows:
        tokens = int(row["input_toks"]), max(int(row["output_toks"]), 1)
        # Sessions that this turn may continue: its prompt is longer than their last one, by no more than the
        # last answer and 4000 tokens (set by hand).
        possible = [
            session
            for session in in_flight
            if session[-1][0] < tokens[0] <= session[-1][0] + session[-1][1] + 4000
        ]
        if possible:
            best = max(possible, key=lambda session: session[-1][0])
            best.append(tokens)
            in_flight.remove(best)
            in_flight.append(best)
            continue
        if len(in_flight) == clients:
            done.append(in_flight.pop(0))
        in_flight.append([tokens])
    return done + in_flight


def dealt(sessions: Sequence[list[tuple[int, int]]], clients: int) -> Trace:
    """The trace of the sessions, one after the other for each client. A prompt shares all blocks of the turn
    before.
    """
    heap = [(0, client) for client in range(clients)]
    lanes: list[list[list[tuple[int, int]]]] = [[] for _ in range(clients)]
    for session in sessions:
        load, client = heapq.heappop(heap)
        lanes[client].append(session)
        heapq.heappush(heap, (load + sum(out for _, out in session), client))
    inputs: list[int] = []
    outputs: list[int] = []
    offsets, ids, edges = [0], [], []
    number = 0
    for lane in lanes:
        last = -1
        for session in lane:
            number += 1
            for turn in session:
                if last >= 0:
                    edges.append((len(inputs), last))
                last = len(inputs)
                inputs.append(turn[0])
                outputs.append(turn[1])
                blocks = turn[0] // LEAST_SHARED_TOKENS
                own = number * 100_000 + np.arange(blocks)
                own[: SYSTEM_TOKENS // LEAST_SHARED_TOKENS] %= 100_000
                ids.append(own)
                offsets.append(offsets[-1] + blocks)
    after = np.array(edges, np.int64).reshape(-1, 2)
    return Trace(
        name="sessions",
        arrival_s=np.zeros(len(inputs)),
        input_tokens=np.array(inputs),
        output_tokens=np.array(outputs),
        prefix_offsets=np.array(offsets),
        prefix_ids=np.concatenate(ids),
        prefix_block_tokens=LEAST_SHARED_TOKENS,
        after=after[np.lexsort((after[:, 0], after[:, 1]))],
    )


def worker() -> tuple[Any, WorkerType]:
    """TP 4 of GB300 for DeepSeek-V4-Pro, as it would be planned."""
    task = read_task(
        {
            "llm": "deepseek-v4-pro",
            "slo": {"ttft": {"p90": "60 s"}},
            "safety": "none",
            "fleet": {
                "gpus": ["gb300-279g"],
                "max_num_batched_tokens": [8192],
                "max_num_seqs": [SEATS],
                "unchecked": True,
            },
        },
        CATALOG,
    ).task()
    one = np.ones(20, np.int64)
    trace = Trace("probe", np.arange(20.0), 1000 * one, 100 * one)
    problem = build_problem(task, trace, CATALOG, seed=0, conditions=Conditions(np.inf))
    types = [each for each in problem.types if each.tp == 4 and each.dp == 1 and each.pp == 1]
    kind = types[0]
    assert kind.engine is not None
    return problem.oracle.llm, replace(kind, engine=replace(kind.engine, version=VLLM_VERSION))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    runs = json.loads((folder / "gb300_deepseek_v4.runs.json").read_text())
    with gzip.open(folder / "gb300_deepseek_v4.requests.jsonl.gz", "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["run"] == FEW]
    sessions = sessions_of(rows, 4)
    turns = np.mean([len(one) for one in sessions])
    print(f"{len(sessions)} sessions of {turns:.1f} turns, {len(rows)} turns")
    llm, kind = worker()
    caches = Policies(prefix_cache=True, routing="cache-aware")
    print(
        "| run | clients | hits measured | predicted | tokens/s measured | predicted | off | "
        "TTFT p50 measured | predicted | off | TPOT |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    off_rate, off_ttft, client_ms = [], [], dict[str, float]()
    for run in sorted(runs, key=lambda one: (one["engine"], one["concurrency"])):
        if run["disaggregated"] or run["run"].startswith("legacy"):
            continue
        trace, summary = dealt(sessions, run["concurrency"]), run["summary"]
        pool = Pool("mixed", "mixed", kind, 1)
        found = simulate(Fleet(llm, (pool,), caches), trace)
        rate = float(found.output_tokens.sum() / found.end_s)
        measured = float(summary["output_throughput_tok_per_s"])
        ttft_ms, measured_ms = 1000 * float(np.median(found.ttft_s)), float(summary["ttft_ms"]["p50"])
        # What the client adds is told by each engine's run with the fewest clients, which has no error then.
        is_first = run["engine"] not in client_ms
        client_ms.setdefault(run["engine"], measured_ms - ttft_ms)
        ttft_ms += client_ms[run["engine"]]
        if is_first:
            print(f"| {run['run']}: the client adds {client_ms[run['engine']]:.0f} ms | | | | | | | | | |")
            continue
        off_rate.append(rate / measured - 1)
        off_ttft.append(ttft_ms / measured_ms - 1)
        hits_found = f"{100 * (found.token_hit_frac or 0):.0f} %"
        hits = f"{100 * run['prefix_hit_frac']:.0f} %" if run["prefix_hit_frac"] else "-"
        tpot = f"{summary['tpot_ms']['p50']:.0f}, {1000 * float(np.nanmedian(found.tpot_s)):.0f} ms"
        print(
            f"| {run['run']} | {run['concurrency']} | {hits} | {hits_found} | {measured:.0f} | {rate:.0f} | "
            f"{100 * off_rate[-1]:+.0f} % | {measured_ms:.0f} ms | {ttft_ms:.0f} ms | "
            f"{100 * off_ttft[-1]:+.0f} % | {tpot} |",
            flush=True,
        )
    print(
        f"mean error: tokens/s {100 * np.mean(np.abs(off_rate)):.0f} %, TTFT p50 "
        f"{100 * np.mean(np.abs(off_ttft)):.0f} %"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
