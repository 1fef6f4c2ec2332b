"""Prefix caches, the queues and routers that look at them, and fairness between tenants, in the kernel."""

from __future__ import annotations

import numpy as np
import pytest
from prefix_reference import PrefixReference
from test_simulator import LLM, make_latency, make_pool

from planner.domain import Fleet, Policies
from planner.simulator import simulate
from planner.simulator.replay import NEEDS_CACHE
from planner.traces import Trace

TOKEN_S = 1 / 1024  # a step takes as many as it has tokens
PER_TOKEN = make_latency((TOKEN_S, 1.0))


def prefix_trace(
    arrival_s: list[float],
    blocks: list[list[int]],
    *,
    tokens: list[int] | None = None,
    outputs: list[int] | None = None,
    tenant: list[int] | None = None,
    block: int = 16,
) -> Trace:
    """Prompts of these blocks; `tokens` where they do not fill them."""
    n = len(arrival_s)
    counts = [len(ids) for ids in blocks]
    return Trace(
        name="made",
        arrival_s=np.array(arrival_s, float),
        input_tokens=np.array(tokens or [count * block for count in counts]),
        output_tokens=np.array(outputs or [1] * n),
        prefix_offsets=np.concatenate(([0], np.cumsum(counts))),
        prefix_ids=np.array([one for ids in blocks for one in ids], np.int64),
        prefix_block_tokens=block,
        tenant=np.array(tenant or [0] * n),
        tenants=tuple(f"t{u}" for u in range(max(tenant or [0]) + 1)),
    )


def cached_fleet(count: int = 1, *, kv_tokens: int = 16 * 1000, seats: int = 8, **policies: object) -> Fleet:
    pool = make_pool(PER_TOKEN, count=count, kv_tokens=kv_tokens, seats=seats, budget=64)
    return Fleet(LLM, (pool,), Policies(**{"prefix_cache": True, **policies}))  # type: ignore[arg-type]


def random_case(seed: int, *, is_short: bool) -> tuple[Fleet, Trace]:
    """Trees of blocks, little memory, three tenants; with `is_short` one token of output. Times and seconds
    are multiples of 2^-10, so sums are exact and events coincide.
    """
    rng = np.random.default_rng(seed)
    n, block = 60, int(rng.choice([16, 32]))
    paths: list[list[int]] = [[]]
    for _ in range(40):
        above = paths[rng.integers(len(paths))]
        paths.append([*above, int(rng.integers(3))])
    blocks = [paths[rng.integers(1, len(paths))] + [100 + int(rng.integers(9))] for _ in range(n)]
    tokens = [len(ids) * block - int(rng.integers(block)) * int(rng.integers(2)) for ids in blocks]
    trace = prefix_trace(
        np.sort(rng.integers(0, int(rng.choice([256, 4096])), n) / 1024).tolist(),
        blocks,
        tokens=tokens,
        outputs=[1] * n if is_short else rng.integers(1, 40, n).tolist(),
        tenant=rng.integers(0, 3, n).tolist(),
        block=block,
    )
    routing = NEEDS_CACHE["routing"] if is_short else ("round-robin", "least-outstanding")
    queue = ("fcfs", *NEEDS_CACHE["queue"])
    return cached_fleet(
        int(rng.integers(1, 5)),
        kv_tokens=16 * int(rng.integers(20, 60)),
        seats=int(rng.choice([2, 8, 32])),
        routing=str(rng.choice(routing)),
        queue=str(rng.choice(queue)),
        tenant_weights=(("t1", 2.0),),
        quantum_tokens=int(rng.choice([16, 256])),
        worker_quantum_tokens=int(rng.choice([16, 256])),
        priority_groups=int(rng.choice([2, 10])),
        share_window_s=float(rng.choice([0.25, 180.0])),
        balance_requests=int(rng.choice([1, 4])),
    ), trace


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_kernel_and_plain_simulator_agree(part: int, is_short: bool) -> None:
    """Hits, times, workers, preemptions of 100 random cases each; the plain one also checks after every step
    that each KV block is counted once and that no child outlives its parent in a cache.
    """
    for seed in range(100 * part, 100 * (part + 1)):
        fleet, trace = random_case(seed, is_short=is_short)
        plain, found = PrefixReference(fleet, trace).run(), simulate(fleet, trace)
        said = f"seed {seed}, {fleet.policies.routing}, {fleet.policies.queue}"
        assert found.cached_tokens is not None
        status = [found.status[i] == 0 for i in range(len(trace))]
        assert status == [request.status == "finished" for request in plain.requests], said
        workers = [request.prefill_worker for request in plain.requests]
        assert found.prefill_worker.tolist() == workers, said
        assert found.cached_tokens.tolist() == [max(hit, 0) for hit in plain.hit], said
        np.testing.assert_allclose(found.ttft_s, [request.ttft_s for request in plain.requests], err_msg=said)
        np.testing.assert_allclose(found.e2e_s, [request.e2e_s for request in plain.requests], err_msg=said)
        assert found.preemptions.tolist() == [request.preemptions for request in plain.requests], said


def test_random_cases_hit_evict_and_preempt() -> None:
    """Else the test above would show little."""
    found = [simulate(*random_case(seed, is_short=False)) for seed in range(100)]
    assert sum(one.preemptions.sum() for one in found) > 100
    hits = [one.token_hit_frac for one in found]
    assert 0.1 < float(np.mean(np.array(hits, float))) < 0.9
