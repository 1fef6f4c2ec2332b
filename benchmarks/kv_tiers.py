"""Checks the choice of KV tiers, memory and disk to which evicted KV blocks go.

python benchmarks/kv_tiers.py --brute 20         # small cases, each compared with all sizes of both tiers
python benchmarks/kv_tiers.py --questions        # questions of agents and tenants, with and without tiers
python benchmarks/kv_tiers.py --rule             # CPU memory of the size of the working set, as
                                                 # inference-sim's rule has it, 8.5 times as much
                                                 # (its issue 1726), and the plan's size
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from planner.documents.catalog import read_catalog
from planner.documents.kv_tiers import KvTier, read_kv_tiers
from planner.documents.task import PlanQuestion, parse_task
from planner.errors import InfeasibleError
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.kv_offload import KvOffload
from planner.simulator.replay import simulate
from planner.studies import tier_study
from planner.studies.tier_study import TierSizes, choose_tiers, show_sizes, tier_grid
from planner.studies.what_if import Study
from planner.traffic.described import draw_requests
from planner.traffic.trace import Trace

CATALOG = read_catalog(None)
SMALL_TIERS = {
    tier.name: tier
    for tier in (
        KvTier("cpu", "memory", 25e9, 8e9, 64e9, 30.0, "made up"),
        KvTier("nvme", "disk", 3e9, 50e9, 50e9, 1.0, "made up"),
    )
}
BLOCK = 16  # Tokens of a KV block.
RULE_FACTOR = 8.5  # The factor by which the rule is too small, by inference-sim's issue 1726.


def tenants(count: int, rate_rps: float, requests: int, seed: int = 0) -> Trace:
    """The traffic of inference-sim's issue 1699: prompts of 1,280 tokens, of which the first 1,024 are those
    of one of `count` tenants, and answers of 16.
    """
    rng = np.random.default_rng(seed)
    tenant = rng.integers(count, size=requests)
    blocks, shared = 1280 // BLOCK, 1024 // BLOCK
    own = count * blocks + np.arange(requests)[:, None] * blocks + np.arange(blocks)
    common = tenant[:, None] * blocks + np.arange(blocks)
    ids = np.where(np.arange(blocks) < shared, common, own)
    return Trace(
        name=f"{count} tenants",
        arrival_s=np.cumsum(rng.exponential(1 / rate_rps, requests)),
        input_tokens=np.full(requests, 1280),
        output_tokens=np.full(requests, 16),
        prefix_offsets=blocks * np.arange(requests + 1),
        prefix_ids=ids.ravel(),
        prefix_block_tokens=BLOCK,
    )


def question(slo: dict[str, Any], llm: str, gpu: str, **more: Any) -> PlanQuestion:
    document = {
        "llm": llm,
        "slo": slo,
        "safety": "none",
        "fleet": {"gpus": [gpu], "max_num_batched_tokens": [8192], "sold_as": {gpu: "gpu"}},
        "policies": {"prefix_cache": True, "routing": ["cache-aware"]},
    }
    return parse_task(document | more, CATALOG)


def small_case(seed: int) -> tuple[Trace, PlanQuestion]:
    rng = np.random.default_rng([seed, 40])
    requests, blocks = 150, int(rng.choice([4, 8, 16]))
    about = rng.integers(int(rng.choice([30, 60, 120, 240])), size=requests)
    trace = Trace(
        name=f"case {seed}",
        arrival_s=np.cumsum(rng.exponential(1 / float(rng.choice([6.0, 12.0, 24.0])), requests)),
        input_tokens=np.full(requests, 256 * blocks + 60),
        output_tokens=rng.integers(5, 60, requests),
        prefix_offsets=blocks * np.arange(requests + 1),
        prefix_ids=(1000 * about[:, None] + np.arange(blocks)).ravel(),
        prefix_block_tokens=256,
    )
    limit = f"{float(rng.choice([0.4, 1.0, 3.0]))} s"
    return trace, question({"ttft": {"p90": limit}}, "meta-llama/Llama-3.1-8B", "l40s-48g")


def brute(cases: int) -> int:
    """Prints for each case the chosen price and the best of all sizes; returns how many choices are
    dearer.
    """
    grid, dearer, worst = tier_grid(SMALL_TIERS, may_share=False), 0, 0.0
    for seed in range(cases):
        trace, task = small_case(seed)
        study = Study(trace, CATALOG, time_limit_s=600)
        try:
            found = choose_tiers(study, task, SMALL_TIERS).best.usd_per_h
        except Exception as error:
            print(f"case {seed}: {error}")
            continue
        every = [
            tier_study._choose_with_tiers(study, task, TierSizes(memory, disk), SMALL_TIERS, 60.0).usd_per_h
            for memory, disk in itertools.product(grid.memory_bytes, grid.disk_bytes)
        ]
        gap = found / min(every) - 1
        dearer, worst = dearer + (gap > 1e-9), max(worst, gap)
        print(
            f"case {seed}: chosen {found:.3f}, best of {len(every)} sizes {min(every):.3f} USD/h", flush=True
        )
    print(f"{dearer} of {cases} choices are dearer than the best size, {100 * worst:.1f} % at most")
    return dearer


def agents(count: int, llm: str, gpu: str, task: str, **own: Any) -> tuple[Trace, PlanQuestion]:
    """Coding agents whose tasks must end within the time `task` (p90); `own` are further keys of `agents`."""
    traffic = {"agents": {"count": count, **own}, "task": "coding-agent", "duration": "15 min"}
    slo = {"ttft": {"p90": "15 s"}, "task": {"p90": task}}
    asked = question(slo, llm, gpu, traffic=traffic)
    assert asked.described is not None
    return draw_requests(asked.described, seed=0), asked


def tier_questions() -> list[tuple[str, Trace, PlanQuestion]]:
    small = {"system": 8000, "repository": {"tokens": 4000, "count": 20, "skew": 0.6}, "most_tokens": 65536}
    long_idle = {"idle": {"mean": "120 s", "cv": 1.7}, **small}
    rows = [
        ("coding agents, 70B", *agents(24, "llama-3.1-70b", "h100-80g", "15 min")),
        ("coding agents, 70B FP8", *agents(24, "llama-3.1-70b-fp8", "h100-80g", "15 min")),
        ("coding agents, 8B", *agents(40, "llama-3.1-8b", "h100-80g", "8 min")),
        ("40 coding agents, 70B", *agents(40, "llama-3.1-70b", "h100-80g", "15 min")),
        ("60 coding agents, 8B", *agents(60, "llama-3.1-8b", "h100-80g", "8 min")),
        ("coding agents, 8B on L40S", *agents(16, "llama-3.1-8b", "l40s-48g", "15 min")),
        ("24 coding agents, 8B on L40S", *agents(24, "llama-3.1-8b", "l40s-48g", "15 min")),
        ("agents of 64k, 8B", *agents(100, "llama-3.1-8b", "h100-80g", "6 min", **small)),
        (
            "agents of 64k that wait for people, 70B",
            *agents(60, "llama-3.1-70b", "h100-80g", "15 min", **long_idle),
        ),
        (
            "agents of 64k that wait for people, 8B",
            *agents(150, "llama-3.1-8b", "h100-80g", "6 min", **long_idle),
        ),
    ]
    for count, rate_rps, limit in ((2000, 100.0, "300 ms"), (8000, 100.0, "300 ms"), (500, 200.0, "300 ms")):
        asked = question({"ttft": {"p90": limit}}, "qwen3-14b", "h100-80g")
        rows.append((f"{count} tenants at {rate_rps:g}/s", tenants(count, rate_rps, 8000), asked))
    return rows


def compare_questions(seconds: float, first: int, last: int) -> int:
    """Prints the costs with and without tiers of the questions `first` to `last`, counted from 1; returns how
    many fleets with tiers are dearer.
    """
    dearer, tiers = 0, read_kv_tiers()
    print("| question | without USD/h | with | tiers | saves | hits GPU, memory, disk | CPU s |")
    print("|---|---:|---:|---|---:|---|---:|")
    for name, trace, task in tier_questions()[first - 1 : last]:
        began_s = time.process_time()
        try:
            found = choose_tiers(Study(trace, CATALOG, time_limit_s=seconds), task, tiers)
        except InfeasibleError as error:
            print(f"| {name} | infeasible: {error} | | | | | |", flush=True)
            continue
        best, none = found.best, found.without
        dearer += best.usd_per_h > none.usd_per_h
        saves = "" if math.isinf(none.usd_per_h) else f"{100 * (1 - best.usd_per_h / none.usd_per_h):.0f} %"
        hits = ", ".join(
            f"{100 * x:.0f}" for x in (best.gpu_hit_frac, best.memory_hit_frac, best.disk_hit_frac)
        )
        print(
            f"| {name} | {none.usd_per_h:.2f} | {best.usd_per_h:.2f} | {show_sizes(best.sizes)} | {saves} | "
            f"{hits} % | {time.process_time() - began_s:.0f} |",
            flush=True,
        )
    return dearer


def rule() -> None:
    """Prints the hits of one worker with several sizes of memory, as in issue 1699, then what sizes of memory
    cost where they decide on the number of GPUs.
    """
    llm, gpu = CATALOG.llm("qwen3-14b"), CATALOG.gpu("h100-80g")
    trace = tenants(100, 4.0, 600)
    asked = question({"ttft": {"p90": "1 s"}}, "qwen3-14b", "h100-80g")
    print("| CPU blocks | GB | hits in CPU memory | TTFT p50 |\n|---:|---:|---:|---:|")
    block_bytes = BLOCK / KvOffload(1e12, 1.0).kv_tokens(llm, 1) * 1e12
    worker = worker_of(asked)
    for blocks in (0, 3200, 6400, 12_800, 25_600, 54_400):
        offload = KvOffload(blocks * block_bytes, 50e9) if blocks else None
        policies = Policies(prefix_cache=True, routing="cache-aware", kv_offload=offload)
        fleet = Fleet(llm, (Pool("mixed", "mixed", replace(worker, kv_tokens=3000 * BLOCK), 1),), policies)
        found = simulate(fleet, trace)
        print(
            f"| {blocks:,} | {blocks * block_bytes / 1e9:.1f} | {100 * (found.token_reload_frac or 0):.1f} % "
            f"| {1000 * float(np.median(found.ttft_s)):.0f} ms |"
        )
    count, rate_rps = 4000, 150.0
    trace, tiers = tenants(count, rate_rps, 12_000), read_kv_tiers()
    task = question({"ttft": {"p90": "300 ms"}}, "qwen3-14b", "h100-80g")
    study = Study(trace, CATALOG, time_limit_s=300)
    found_study = choose_tiers(study, task, tiers)
    gpus = found_study.best.fleet.gpus if found_study.best.fleet else 1
    working_set = count * 1024 // BLOCK * block_bytes
    print(f"\nworking set {working_set / 1e9:.0f} GB, {gpu.name}, {count} tenants at {rate_rps:g}/s")
    print("| CPU memory per GPU | USD/h | of it memory | hits GPU, CPU | GPUs |\n|---|---:|---:|---|---:|")
    for name, size in (
        ("none", 0.0),
        ("rule: the working set over the GPUs", working_set / gpus),
        (f"{RULE_FACTOR} times the rule", RULE_FACTOR * working_set / gpus),
        ("plan", found_study.best.sizes.memory_bytes),
    ):
        row = tier_study._choose_with_tiers(study, task, TierSizes(size), tiers, 60.0)
        used = row.fleet.gpus if row.fleet else 0
        print(
            f"| {name}, {size / 1e9:.0f} GB | {row.usd_per_h:.2f} | {row.tiers_usd_per_h:.2f} | "
            f"{100 * row.gpu_hit_frac:.1f} %, {100 * row.memory_hit_frac:.1f} % | {used} |",
            flush=True,
        )
    print(f"plan's choice: {show_sizes(found_study.best.sizes)}, {found_study.best.usd_per_h:.2f} USD/h")


def worker_of(task: PlanQuestion) -> WorkerType:
    """The first worker type of one GPU that the question may use."""
    from planner.search.problem.build_problem import build_problem
    from planner.search.problem.plan_problem import Conditions

    problem = build_problem(
        task, tenants(10, 4.0, 40), CATALOG, seed=0, conditions=Conditions(time.monotonic() + 60)
    )
    return next(worker for worker in problem.types if worker.tp == 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--brute", type=int, default=0, help="small cases against all sizes")
    parser.add_argument(
        "--questions", action="store_true", help="questions of agents and tenants, with and without tiers"
    )
    parser.add_argument(
        "--rule", action="store_true", help="the rule of inference-sim #1726 against the plan"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="for each question (120)")
    parser.add_argument("--first", type=int, default=1, help="the first of the questions (1)")
    parser.add_argument("--last", type=int, default=13, help="the last of the questions (13)")
    asked = parser.parse_args()
    failed = brute(asked.brute) if asked.brute else 0
    if asked.rule:
        rule()
    if asked.questions:
        failed += compare_questions(asked.seconds, asked.first, asked.last)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
