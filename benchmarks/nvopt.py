"""Asks `plan` the question of NVIDIA's study of DeepSeek-V3 on H200 over one day: the fewest GPUs, a lower
bound, and how the study's winners fare in our simulator.

    python benchmarks/nvopt.py [--data FOLDER] [--copies 661] [--only static cache autoscaled candidates]
                               [--paper-only] [--time-limit S]

The question is that of ai-dynamo/aisimulate, examples/sweeper/nvopt-ragpulse (contract 278be99, results
d45d107): TTFT <= 1 s and a mean time per output token <= 50 ms; here at least 99 % of requests must keep
both. FOLDER holds RAGPulse's 0_trace.jsonl.gz with its text lengths; default ../shared/data/traces/ragpulse
beside the clone. The day is all rows of the file with a time stamp from 345,600 s to before 432,000 s, in as
many copies as there are users: each copy has prefixes of its own, and all its requests are shifted by the
same time of up to 30 s.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.api.inputs import read_trace
from planner.api.planning import plan
from planner.api.results import PlanResult
from planner.api.simulating import simulate
from planner.day.day_api import DayResult, day
from planner.errors import PlannerError
from planner.reports.words import describe_fleet
from planner.traffic.trace import IntArray, Trace

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces" / "ragpulse"
DAY_S = (345_600.0, 432_000.0)
# With the 813 rows of our file this gives 537,393 requests, as many as the study's 512 copies of 1,050 rows.
COPIES = 661
SHIFT_S = 30.0  # A copy is shifted by up to so much, earlier or later.
BLOCK_TOKENS = 64  # Tokens of the study's KV blocks; those of the file have 16.
TTFT, TPOT, SHARE = "1 s", "50 ms", 0.99
SLO: dict[str, Any] = {"ttft": {"p99": TTFT}, "tpot": {"p99": TPOT}, "attainment": SHARE}
# The fewest GPUs of the study with which at least 99 % of requests keep both limits.
THEIRS_GPUS = {"static": 96.0, "cache": 80.0, "autoscaled": 151.5}
MENU = (4096, 8192, 16384)  # Token budgets per step; the study tries 1,024 to 32,768.
EVERY = "10 min"  # An autoscaled day must keep the limits in every window of this length.
CONTROLLERS = ("cron", "dynamo", "dynamo-sla", "hpa", "fleetplan")
PARTS = ("static", "cache", "autoscaled", "candidates")
HEAD = ["", "GPUs", "kept", "bound", "theirs", "CPU s", "fleet"]
CANDIDATE_HEAD = ["their winner", "GPUs", "kept, our step times", "kept, theirs", "points", "CPU s"]
Row = list[str]
CANDIDATES: dict[str, tuple[tuple[dict[str, Any], ...], dict[str, Any], float]] = {
    "static, round robin": (
        (
            *({"role": "prefill", "gpu": "h200-141g", "tp": 8, "count": 3, "max_num_batched_tokens": 32768},),
            {"role": "decode", "gpu": "h200-141g", "tp": 1, "dp": 8, "count": 2, "max_num_seqs": 512},
        ),
        {"routing": "round-robin"},
        78.5,
    ),
    "cache-aware": (
        (
            *({"role": "prefill", "gpu": "h200-141g", "tp": 8, "count": 4, "max_num_batched_tokens": 32768},),
            {"role": "decode", "gpu": "h200-141g", "tp": 1, "dp": 8, "count": 5, "max_num_seqs": 1024},
        ),
        {"routing": "min-ttft", "prefix_cache": True},  # The nearest to Dynamo's router.
        89.4,
    ),
}


def raw_day(file: Path) -> Trace:
    """The rows of both weeks stamped within the day, each at its time of that day, in order."""
    trace = read_trace(file)
    with gzip.open(file, "rt") as lines:
        stamp_s = np.array([float(json.loads(line)["timestamp"]) for line in lines if line.strip()])
    if len(stamp_s) != len(trace):
        raise PlannerError(f"{file}: {len(stamp_s)} rows, of which {len(trace)} were read")
    inside = np.flatnonzero((stamp_s >= DAY_S[0]) & (stamp_s < DAY_S[1]))
    inside = inside[np.argsort(stamp_s[inside], kind="stable")]
    return trace.select(inside, arrival_s=stamp_s[inside] - DAY_S[0])


def coarse_blocks(trace: Trace) -> tuple[IntArray, IntArray]:
    """Offsets and ids of blocks of BLOCK_TOKENS; blocks of two prompts have the same id if the prompts agree
    up to the blocks' end.
    """
    ratio = BLOCK_TOKENS // trace.prefix_block_tokens
    # A block's key is the id of the block before it and its own fine blocks, so equal keys mean equal
    # prefixes.
    chains: dict[tuple[int, ...], int] = {}
    ids: list[int] = []
    offsets = [0]
    for row in range(len(trace)):
        fine = trace.prefix_ids[trace.prefix_offsets[row] : trace.prefix_offsets[row + 1]].tolist()
        whole = len(fine) // ratio
        chain = -1
        for block in range(whole):
            chain = chains.setdefault((chain, *fine[block * ratio : (block + 1) * ratio]), len(chains))
            ids.append(chain)
        offsets.append(len(ids))
    return np.array(offsets, np.int64), np.array(ids, np.int64)


def copied(chosen: Trace, copies: int, seed: int = 0) -> Trace:
    """The trace of so many copies of the day, each with prefixes and a shift of its own."""
    rows = len(chosen)
    shift_s = np.random.default_rng(seed).uniform(-SHIFT_S, SHIFT_S, copies)
    arrival_s = np.clip(chosen.arrival_s + shift_s[:, None], 0.0, DAY_S[1] - DAY_S[0]).ravel()
    order = np.argsort(arrival_s, kind="stable")
    copy, row = np.divmod(order, rows)
    offsets, ids = coarse_blocks(chosen)
    blocks = np.diff(offsets)[row]
    start = np.concatenate(([0], np.cumsum(blocks)))
    places = np.repeat(offsets[row] - start[:-1], blocks) + np.arange(start[-1])
    return Trace(
        f"{copies} x RAGPulse's day",
        arrival_s[order],
        chosen.input_tokens[row],
        chosen.output_tokens[row],
        prefix_offsets=start,
        prefix_ids=ids[places] + np.repeat(copy, blocks) * (int(ids.max()) + 1),
        prefix_block_tokens=BLOCK_TOKENS,
    )


def question(has_caches: bool, slo: dict[str, Any] = SLO) -> dict[str, Any]:
    """The question, with prefix caches or without. With caches decode workers alone have data-parallel ranks,
    as the routing by caches does not look into ranks.
    """
    menu = {"gpus": {"h200-141g": 256}, "max_num_batched_tokens": list(MENU), "dp": [1, 8]}
    return {
        "llm": "deepseek-ai/DeepSeek-V3",
        "slo": slo,
        "fleet": menu,
        "objective": "gpus",
        "policies": {"prefix_cache": True, "routing": ["cache-aware"]} if has_caches else {},
    }


def planned(
    trace: Trace, document: dict[str, Any], safety: str | None, limit_s: float
) -> tuple[PlanResult | str, float]:
    """The plan, or the reason why there is none, and its CPU seconds."""
    began = time.process_time()
    keys = document | ({} if safety is None else {"safety": safety})
    try:
        answer = plan(keys, trace, time_limit_s=limit_s)
    except PlannerError as error:
        return str(error).splitlines()[0], time.process_time() - began
    assert isinstance(answer, PlanResult)
    return answer, time.process_time() - began


def kept_share(fleet: Any, trace: Trace) -> float:
    """Share of requests that keep both limits at once in one simulation."""
    verdict = simulate(fleet, trace, SLO).to_dict()
    return float(verdict["slo"]["attainment_frac"])


def gpus_of_bound(answer: PlanResult) -> str:
    bound = answer.to_dict()["certificate"]["bound"]
    return "-" if bound is None else f"{bound:.0f}"


def static_row(trace: Trace, name: str, safety: str | None, limit_s: float) -> Row:
    """A plan's row: GPUs, share of requests, bound, CPU seconds, fleet."""
    answer, cpu_s = planned(trace, question(name == "cache"), safety, limit_s)
    where = "on paper" if safety == "none" else "production"
    theirs = f"{THEIRS_GPUS[name]:g}"
    if isinstance(answer, str):
        return [f"{name}, {where}", "none", "-", "-", theirs, f"{cpu_s:.0f}", answer]
    share = f"{100 * kept_share(answer.fleet, trace):.2f} %"
    fleet = f"{describe_fleet(answer.fleet)} ({answer.status})"
    return [
        *(f"{name}, {where}", str(answer.gpus), share, gpus_of_bound(answer), theirs, f"{cpu_s:.0f}", fleet)
    ]


def autoscaled_rows(trace: Trace, limit_s: float) -> list[Row]:
    """Rows of the optimal sizes of pools over the day, and of the sizes that controllers choose, in mean
    GPUs. New workers start at once.

    First a fleet is planned that keeps the limits in every window without changing; the optimum uses its
    pools and at most its workers.
    """
    began = time.process_time()
    asked = question(has_caches=False, slo=SLO | {"every": EVERY})
    standing, _ = planned(trace, asked, "none", limit_s)
    theirs = f"{THEIRS_GPUS['autoscaled']:g}"
    if isinstance(standing, str):
        cpu_s = time.process_time() - began
        return [["autoscaled", "none", "-", "-", theirs, f"{cpu_s:.0f}", standing]]
    answer = day(
        asked,
        trace,
        standing=standing.fleet,
        terms={"start": "0 s", "controllers": list(CONTROLLERS), "fleets": "plan"},
        time_limit_s=limit_s,
    )
    assert isinstance(answer, DayResult)
    cpu_s = time.process_time() - began
    document = answer.to_dict()
    price = next(row["usd"] / row["gpu_hours"] for row in document["controllers"])
    rows = [*([document["optimum"]] if document["optimum"] else []), *document["controllers"]]
    bound = (document["optimum"] or {}).get("proved_usd")
    out = []
    for row in rows:
        is_best = row is document["optimum"]
        out.append(
            [
                f"autoscaled, {row['name']}",
                f"{row['gpu_hours'] / document['hours']:.1f}",
                f"{row['windows'] - row['missed']} of {row['windows']} windows",
                f"{bound / price / document['hours']:.1f}" if is_best and bound is not None else "-",
                theirs,
                f"{cpu_s:.0f} together",
                f"pools of {describe_fleet(standing.fleet)}",
            ]
        )
    return out


def candidate_rows(trace: Trace) -> list[Row]:
    """Rows of the study's winners of fixed size, simulated with our step times: the share of requests that
    keep both limits.
    """
    rows = []
    for name, (workers, policies, theirs) in CANDIDATES.items():
        began = time.process_time()
        fleet = {"llm": "deepseek-ai/DeepSeek-V3", "workers": list(workers), "policies": policies}
        share = kept_share(fleet, trace)
        gpus = sum(int(each["count"]) * int(each["tp"]) * int(each.get("dp", 1)) for each in workers)
        rows.append(
            [
                *(name, str(gpus), f"{100 * share:.2f} %", f"{theirs:.1f} %"),
                *(f"{100 * share - theirs:+.1f}", f"{time.process_time() - began:.0f}"),
            ]
        )
    return rows


def table(head: Row, rows: list[Row]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--copies", type=int, default=COPIES)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--paper-only", action="store_true", help="no production")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds of each plan")
    arguments = parser.parse_args()
    began = time.monotonic()
    trace = copied(raw_day(arguments.data / "0_trace.jsonl.gz"), arguments.copies)
    tokens = int(trace.input_tokens.sum()), int(trace.output_tokens.sum())
    print(f"{len(trace):,} requests, {tokens[0]:,} prompt tokens, {tokens[1]:,} output tokens", flush=True)
    bare = replace(
        trace, prefix_offsets=np.zeros(0, np.int64), prefix_ids=np.zeros(0, np.int64), prefix_block_tokens=0
    )
    rows = []
    for name in ("static", "cache"):
        for safety in ("none", None)[: 1 if arguments.paper_only else 2]:
            if name in arguments.only:
                its_trace = trace if name == "cache" else bare
                rows.append(static_row(its_trace, name, safety, arguments.time_limit))
                print(" | ".join(rows[-1]), flush=True)
    if "autoscaled" in arguments.only:
        rows += autoscaled_rows(bare, arguments.time_limit)
    if rows:
        print(table(HEAD, rows), flush=True)
    if "candidates" in arguments.only:
        print(table(CANDIDATE_HEAD, candidate_rows(trace)), flush=True)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{time.monotonic() - began:.0f} s of wall, {time.process_time():.0f} CPU s, {peak_gib:.1f} GiB")


if __name__ == "__main__":
    main()
