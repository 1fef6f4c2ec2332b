"""KV blocks in CPU memory behind prefix caches, in the kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from offload_reference import AsyncOffloadReference, OffloadReference
from simulations import LLM, make_latency, make_pool, prefix_trace

from planner.errors import InputError
from planner.fleet import Disturbance, Fleet, Policies
from planner.models.engine import Engine, HostTime
from planner.models.kv_offload import KvOffload
from planner.simulator import Simulation, simulate
from planner.traffic.trace import Trace

TOKEN_S = 1 / 1024  # a step takes as many as it has tokens
KV_BYTES = 16.0  # of a token
PER_TOKEN = make_latency((TOKEN_S, 1.0))


def memory_of(tokens: float, token_s: float = TOKEN_S / 8) -> KvOffload:
    return KvOffload(tokens * KV_BYTES, KV_BYTES / token_s if token_s else np.inf)


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


def random_case(seed: int, *, engine: Engine | None) -> tuple[Fleet, Trace]:
    """Trees of blocks, little memory on the GPU, more or less of it beside the CPU; one request in three waits
    for another. Nothing is a multiple of anything, so that events do not coincide.
    """
    rng = np.random.default_rng([seed, 5])
    n, block = 60, int(rng.choice([16, 32]))
    paths: list[list[int]] = [[]]
    for _ in range(40):
        above = paths[rng.integers(len(paths))]
        paths.append([*above, int(rng.integers(3))])
    blocks = [paths[rng.integers(1, len(paths))] + [100 + int(rng.integers(9))] for _ in range(n)]
    tokens = [len(ids) * block - int(rng.integers(block)) * int(rng.integers(2)) for ids in blocks]
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
        memory_of(size, float(rng.choice([1e-6, 1e-4, 1e-3])) * (1 + rng.uniform())),
        int(rng.integers(1, 4)),
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


def same(found: Simulation, plain: OffloadReference, said: str) -> None:
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


@pytest.mark.parametrize("engine", ENGINES)
def test_kernel_and_plain_simulator_agree(engine: str) -> None:
    """80 random cases per engine: memory that never fills, that forgets, and that has no room for a prompt."""
    totals = np.zeros(6, int)
    for seed in range(80):
        fleet, trace = random_case(seed, engine=ENGINES[engine])
        kind = AsyncOffloadReference if engine == "async" else OffloadReference
        plain = kind(fleet, trace).run()
        assert isinstance(plain, OffloadReference)
        found = simulate(fleet, trace)
        same(found, plain, f"seed {seed}")
        hits = sum(plain.first_hit)
        counted = (plain.loads, plain.passed_over, plain.refused, plain.left_memory, hits)
        totals += (*counted, found.preemptions.sum())
    assert totals.min() > 50, totals
