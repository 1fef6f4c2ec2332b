"""Random fleets with CPU memory and disks behind their KV caches, against the plain simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from offload_reference import AsyncOffloadReference, OffloadReference
from simulations import LLM, make_latency, make_pool, prefix_trace, random_prompts

from planner.fleet import Fleet, Policies
from planner.models.engine import Engine, HostTime
from planner.models.kv_offload import KvOffload
from planner.simulator import Simulation, simulate
from planner.slo_metrics import METRICS
from planner.traffic.trace import Trace

TOKEN_S = 1 / 1024  # a step takes as many as it has tokens
KV_BYTES = 16.0  # of a token
PER_TOKEN = make_latency((TOKEN_S, 1.0))


def memory_of(tokens: float, token_s: float = TOKEN_S / 8, *, is_shared: bool = False) -> KvOffload:
    return KvOffload(tokens * KV_BYTES, KV_BYTES / token_s if token_s else np.inf, is_shared)


def fleet_with(
    offload: KvOffload | None,
    count: int = 1,
    *,
    kv_tokens: int = 96,
    seats: int = 8,
    budget: int = 64,
    engine: Engine | None = None,
    **policies: object,
) -> Fleet:
    pool = make_pool(PER_TOKEN, count=count, kv_tokens=kv_tokens, seats=seats, budget=budget)
    pool = replace(pool, type=replace(pool.type, engine=engine))
    return Fleet(
        LLM,
        (pool,),
        Policies(**{"prefix_cache": True, "routing": "round-robin", "kv_offload": offload, **policies}),  # type: ignore[arg-type]
    )


def random_case(seed: int, *, engine: Engine | None, is_shared: bool = False) -> tuple[Fleet, Trace]:
    """Trees of blocks, little memory on the GPU, more or less of the CPU's; one request in three waits for
    another. Nothing is a multiple of anything, so that events do not coincide.
    """
    rng = np.random.default_rng([seed, 5])
    n, block = 60, int(rng.choice([16, 32]))
    blocks, tokens = random_prompts(rng, n, block)
    trace = prefix_trace(
        np.sort(rng.uniform(0, float(rng.choice([0.3, 4.0])), n)).tolist(),
        blocks,
        tokens=tokens,
        outputs=rng.integers(1, 40, n).tolist(),
        block=block,
    )
    if rng.integers(2):
        children = 1 + np.flatnonzero(rng.integers(3, size=n - 1) == 0)
        edges = np.array([(child, int(rng.integers(child))) for child in children.tolist()])
        think_s = rng.uniform(0, 0.06, n)
        trace = replace(trace, after=edges[np.argsort(edges[:, 1], kind="stable")], think_s=think_s)
    size = float(rng.choice([40, 100, 300, 1000, 30_000])) * (1 + rng.uniform())
    return fleet_with(
        memory_of(size, float(rng.choice([1e-6, 1e-4, 1e-3])) * (1 + rng.uniform()), is_shared=is_shared),
        int(rng.integers(1, 4)) + is_shared,
        kv_tokens=16 * int(rng.integers(20, 60)),
        seats=int(rng.choice([2, 8, 32])),
        budget=int(rng.choice([32, 64, 256])),
        routing=str(rng.choice(["round-robin", "least-outstanding"])),
        long_prefill_token_threshold=int(rng.choice([0, 0, 24])),
        engine=engine,
    ), trace


ENGINES = {
    "none": None,
    "sync": Engine("vllm", "0.11.1", async_scheduling=False, host=HostTime(0.0013)),
    "async": Engine("vllm", "0.15.1", async_scheduling=True, host=HostTime(0.0013)),
}


def check_same(found: Simulation, plain: OffloadReference, said: str) -> None:
    """Hits on the GPU and in CPU memory, waits for it, all times, preemptions."""
    assert found.cached_tokens is not None and found.reloaded_tokens is not None
    assert (found.status == 0).all() and all(each.status == "finished" for each in plain.requests)
    assert found.cached_tokens.tolist() == plain.first_hit, said
    assert found.reloaded_tokens.tolist() == plain.loaded_tokens, said
    np.testing.assert_allclose(found.reload_s, plain.waited_s, rtol=1e-9, atol=1e-12, err_msg=said)
    for name in ("ttft_s", "e2e_s", "arrival_s"):
        values = [getattr(request, name) for request in plain.requests]
        np.testing.assert_allclose(getattr(found, name), values, rtol=1e-9, err_msg=said)
    assert found.preemptions.tolist() == [request.preemptions for request in plain.requests], said


def with_disk(fleet: Fleet, seed: int) -> Fleet:
    """Half of the memory, or none of it, and a disk behind it that is slower or quicker than the link."""
    rng = np.random.default_rng([seed, 6])
    offload = fleet.policies.kv_offload
    assert offload is not None
    in_memory = float(rng.choice([0.0, 0.1, 0.5])) * offload.size_bytes
    disk = replace(
        offload,
        size_bytes=in_memory,
        disk_bytes=offload.size_bytes * float(rng.uniform(0.5, 2.0)),
        disk_bandwidth_bytes_per_s=offload.bandwidth_bytes_per_s * float(rng.choice([0.03, 0.3, 3.1])),
    )
    return replace(fleet, policies=replace(fleet.policies, kv_offload=disk))


def reference_of(fleet: Fleet, trace: Trace, engine: str) -> OffloadReference:
    """The plain simulator for this engine."""
    return (AsyncOffloadReference if engine == "async" else OffloadReference)(fleet, trace)


@dataclass(frozen=True, slots=True)
class TierComparison:
    """The largest differences of a case from the plain simulator's answers, and what share of the prompts'
    tokens each tier had. `points` are those of GPU, memory and disk.
    """

    points: tuple[float, float, float]
    hit_frac: tuple[float, float, float]
    tasks: int
    percentile_frac: float


def compare_tiers(seed: int) -> TierComparison | None:
    """One random case, by its seed with a memory, a disk or a store and one of the engines; None where the
    asynchronous engine preempts, whose blocks the plain simulator does not follow that far.
    """
    engine, kind = list(ENGINES)[seed % 3], seed // 3 % 3
    fleet, trace = random_case(seed, engine=ENGINES[engine], is_shared=kind == 2)
    fleet = with_disk(fleet, seed) if kind == 1 else fleet
    found = simulate(fleet, trace)
    if engine == "async" and found.preemptions.any():
        return None
    plain = reference_of(fleet, trace, engine).run()
    assert found.cached_tokens is not None
    nothing = np.zeros(len(trace))  # Without room for a node there is no memory.
    loaded = nothing if found.reloaded_tokens is None else found.reloaded_tokens
    disk = nothing if found.disk_tokens is None else found.disk_tokens
    total = int(trace.input_tokens.sum())
    ours = np.array([found.cached_tokens.sum(), (loaded - disk).sum(), disk.sum()]) / total
    memory = sum(plain.loaded_tokens) - sum(plain.disk_tokens)
    theirs = np.array([sum(plain.first_hit), memory, sum(plain.disk_tokens)]) / total
    begin_s, end_s = (
        np.array([getattr(request, name) for request in plain.requests]) for name in ("arrival_s", "ttft_s")
    )
    e2e_s = np.array([request.e2e_s for request in plain.requests])
    pairs = [(found.ttft_s, end_s)]
    tasks = 0
    if found.tasks is not None:
        total_s, served_s = plain_task_times(trace, begin_s, e2e_s)
        tasks = len(total_s)
        for name, values_s in (("task", total_s), ("task_served", served_s)):
            of_kernel = METRICS[name].values_s(found)
            pairs.append((of_kernel[~np.isnan(of_kernel)], values_s))
    worst = 0.0
    for of_kernel, of_plain in pairs:
        for percent in (50, 90, 99):
            want = float(np.percentile(of_plain, percent))
            worst = max(worst, abs(float(np.percentile(of_kernel, percent)) / want - 1))
    a, b, c = (100 * np.abs(ours - theirs)).tolist()
    d, e, f = ours.tolist()
    return TierComparison((a, b, c), (d, e, f), tasks, worst)


def plain_task_times(
    trace: Trace, arrival_s: npt.NDArray[np.float64], e2e_s: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Seconds of each task (requests that wait for one another), tools included, and along its longest path
    without them; requests stand behind what they wait for.
    """
    parents: dict[int, list[int]] = {i: [] for i in range(len(trace))}
    name = list(range(len(trace)))
    for child, parent in trace.after.tolist():
        parents[child].append(parent)
    for child, own in parents.items():
        together = {name[child], *(name[parent] for parent in own)}
        name = [min(together) if each in together else each for each in name]
    path_s: list[float] = []
    for i in range(len(trace)):
        path_s.append(float(e2e_s[i]) + max((path_s[parent] for parent in parents[i]), default=0.0))
    total_s, served_s = [], []
    for each in sorted(set(name)):
        own = [i for i in range(len(trace)) if name[i] == each]
        total_s.append(max(arrival_s[i] + e2e_s[i] for i in own) - min(arrival_s[i] for i in own))
        served_s.append(max(path_s[i] for i in own))
    return np.array(total_s), np.array(served_s)
