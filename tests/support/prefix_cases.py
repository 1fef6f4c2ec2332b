"""Random fleets with prefix caches, and which plain simulator says what they do.

A case has one of every choice: no engine, a synchronous or an asynchronous one; an order of prompts; routings
of arrivals and of hand-offs; mixed workers, or prefill and decode workers and perhaps a mixed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from async_prefix_reference import AsyncPrefixReference
from engine_cases import QUEUES, ROUTINGS, with_engines
from prefix_reference import PrefixReference
from ranks_reference import AsyncPrefixRanks, PrefixRanks, ranked
from simulations import LLM, beside, make_latency, make_pool, prefix_trace, random_prompts

from planner.fleet import Fleet, Network, Policies, Pool, WorkerType
from planner.policies import QUEUE, ROUTING, Policy
from planner.simulator import Simulation, simulate
from planner.traffic.trace import Trace

NAMES = ("prefill_worker", "decode_worker", "preemptions")
BY_COUNT = ("round-robin", "jsq", "least-outstanding")
SECONDS = ("arrival_s", "ttft_s", "tbt_max_s", "e2e_s")


def looking(rows: Mapping[str, Policy]) -> tuple[str, ...]:
    """Those that look at caches or tenants, in an engine's queue or in routing; a queue that the router holds
    has a plain simulator of its own (held_reference.py).
    """
    return tuple(name for name, row in rows.items() if row.reads_cache_state and name != "dlpm-held")


def random_prefix_trace(rng: np.random.Generator) -> Trace:
    """Trees of blocks, three tenants; in one trace of two, one request of three waits for another."""
    n, block = 50, int(rng.choice([16, 16, 32]))
    blocks, tokens = random_prompts(rng, n, block)
    trace = prefix_trace(
        np.sort(rng.uniform(0, float(rng.choice([1.0, 8.0])), n)).tolist(),
        blocks,
        tokens=tokens,
        outputs=rng.integers(1, int(rng.choice([3, 40])), n).tolist(),
        tenant=rng.integers(0, 3, n).tolist(),
        block=block,
    )
    if rng.integers(2):
        children = 1 + np.flatnonzero(rng.integers(3, size=n - 1) == 0)
        edges = np.array([(child, int(rng.integers(child))) for child in children.tolist()])
        think_s = rng.uniform(0, 0.1, n) * rng.integers(2, size=n)
        trace = replace(trace, after=edges[np.argsort(edges[:, 1], kind="stable")], think_s=think_s)
    return trace


def random_pools(rng: np.random.Generator, longest_blocks: int) -> tuple[Pool, ...]:
    """Mixed workers in one fleet of four, else prefill and decode workers and perhaps a mixed one, each of
    its own kind. Most caches hold one to three requests.
    """
    roles: list[Literal["mixed", "prefill", "decode"]] = ["prefill", "decode"]
    roles += [roles[k] for k in rng.integers(0, 2, rng.integers(0, 4)).tolist()]
    roles += ["mixed"] * int(rng.integers(6) == 0)
    if rng.integers(4) == 0:
        roles = ["mixed"] * int(rng.integers(1, 5))
    pools = []
    for k, role in enumerate(roles):
        latency = make_latency(
            (float(rng.uniform(0.001, 0.01)), float(rng.uniform(0.2, 1))),
            b=float(rng.uniform(0, 0.001)),
            h=float(rng.uniform(0, 0.001)),
            d=1e-9,  # No two steps are equally long, else hand-offs end with a step but for rounding.
        )
        blocks = longest_blocks + int(rng.choice([0, 1, 3, 8, 20, 1000]))
        seats, budget = int(rng.choice([1, 2, 8, 32])), int(rng.choice([32, 64, 256]))
        pools.append(
            make_pool(latency, role=role, kv_tokens=16 * blocks, seats=seats, budget=budget, name=f"w{k}")
        )
    return tuple(pools)


def with_vllm(fleet: Fleet, version: str) -> Fleet:
    """The same fleet with this version of vLLM, where its workers have engines."""

    def change(kind: WorkerType) -> WorkerType:
        return kind if kind.engine is None else replace(kind, engine=replace(kind.engine, version=version))

    return replace(fleet, pools=tuple(replace(pool, type=change(pool.type)) for pool in fleet.pools))


def random_parameters(rng: np.random.Generator) -> dict[str, Any]:
    """Parameters of the queues and routings that look at caches, each small or large."""
    return {
        "tenant_weights": (("t1", 2.0),),
        "quantum_tokens": int(rng.choice([16, 256])),
        "worker_quantum_tokens": int(rng.choice([16, 256])),
        "priority_groups": int(rng.choice([2, 10])),
        "share_window_s": float(rng.choice([0.25, 2.0, 180.0])),
        "balance_requests": int(rng.choice([1, 4])),
        "balance_ratio": float(rng.choice([1.5, np.inf])),
        "replicate_ratio": float(rng.choice([0.5, 2.0, np.inf])),
        "explore_decode_frac": float(rng.choice([0.5, 1.0])),
        "decode_batch": int(rng.choice([0, 1])),
    }


def random_prefix_case(seed: int) -> tuple[Fleet, Trace, type[PrefixReference]]:
    """A fleet, a trace, and the plain simulator of its engines."""
    rng = np.random.default_rng([seed, 44])
    trace = random_prefix_trace(rng)
    longest_blocks = int(-(-(trace.input_tokens + trace.output_tokens).max() // 16))
    queue = str(rng.choice(looking(QUEUE) if rng.integers(2) else QUEUES))
    policies = Policies(
        prefix_cache=True,
        routing=str(rng.choice(looking(ROUTING) if rng.integers(2) else ROUTINGS)),
        decode_routing=str(rng.choice(ROUTINGS)),
        queue=queue,
        long_prefill_token_threshold=int(rng.choice([0, 0, 0, 16])),
        **random_parameters(rng),
        seed=int(rng.integers(9)),
        eviction_notice_s=float(rng.choice([0.0, 0.0, 0.02, 1.0])),
    )
    network = Network(
        2.0 ** float(rng.uniform(8, 18)),
        float(rng.uniform(0, 0.1)),
        "serialised" if rng.integers(2) else "layerwise",
    )
    fleet = Fleet(LLM, random_pools(rng, longest_blocks), policies, network)
    is_async = seed % 4 > 1
    if seed % 4 > 0:
        fleet = with_engines(
            fleet, seed, async_scheduling=is_async, front_end_s=float(rng.uniform(0.001, 0.1))
        )
    if rng.integers(4) == 0:
        fleet = with_vllm(beside(fleet, seed), "0.32.0")  # Older ones cache the blocks of windows too.
    return fleet, trace, AsyncPrefixReference if is_async else PrefixReference


def random_ranked_prefix_case(seed: int) -> tuple[Fleet, Trace, type[PrefixReference]]:
    """The same fleets, their decode workers of two or three data-parallel ranks each, and in one case of two
    all workers. Routings do not look into workers with ranks, so those are by count or in turn.
    """
    fleet, trace, reference = random_prefix_case(seed)
    rng = np.random.default_rng([seed, 91])
    has_decode_pools = any(pool.role == "decode" for pool in fleet.pools)
    only_decode = has_decode_pools and rng.integers(2) == 0
    with_ranks = ranked(fleet, seed, dyadic=False, least=2)
    pools = tuple(
        plain if only_decode and plain.role != "decode" else pool
        for plain, pool in zip(fleet.pools, with_ranks.pools, strict=True)
    )
    routing = fleet.policies.routing if only_decode else str(rng.choice(BY_COUNT))
    policies = replace(fleet.policies, routing=routing, decode_routing=str(rng.choice(BY_COUNT)))
    is_async = issubclass(reference, AsyncPrefixReference)
    return (
        replace(fleet, pools=pools, policies=policies),
        trace,
        AsyncPrefixRanks if is_async else PrefixRanks,
    )


def random_case_without_caches(seed: int) -> tuple[Fleet, Trace, type[PrefixReference]]:
    """The same fleets and prompts without caches and without block ids, with a queue that counts tenants in
    three cases of four, and with a routing that does in one of about ten.
    """
    fleet, trace, reference = random_prefix_case(seed)
    rng = np.random.default_rng([seed, 45])
    counting = [name for name in looking(QUEUE) if QUEUE[name].counts_tenants]
    policies = replace(
        fleet.policies,
        prefix_cache=False,
        queue=str(rng.choice(counting if rng.integers(4) else QUEUES)),
        routing=str(rng.choice([*ROUTINGS, "tenant-round-robin"])),
    )
    return replace(fleet, policies=policies), without_block_ids(trace), reference


def without_block_ids(trace: Trace) -> Trace:
    nothing = np.zeros(len(trace) + 1, np.int64)
    return replace(trace, prefix_offsets=nothing, prefix_ids=nothing[:0], prefix_block_tokens=0)


def compare_prefix_case(seed: int, *, has_caches: bool = True) -> None:
    """Raise AssertionError where kernel and plain simulator differ, in a number by more than 1e-9."""
    fleet, trace, reference = random_prefix_case(seed) if has_caches else random_case_without_caches(seed)
    compare_prefix_fleet(fleet, trace, reference, f"seed {seed}")


def compare_prefix_fleet(
    fleet: Fleet, trace: Trace, reference: type[PrefixReference], case: str
) -> tuple[PrefixReference, Simulation]:
    """Both simulations, whose numbers are the same but for 1e-9. They are not compared where a transfer ends
    with a step: steps that wait for the API server are equally long, so that t + T + 3 x and t + 3 x + T may
    be such ends, and rounding decides which comes first. Nor are they where a shared store lets go of what a
    load that has not begun needs (`OffloadReference.store`).
    """
    plain, found = reference(fleet, trace).run(), simulate(fleet, trace)
    if plain.is_not_compared:
        return plain, found
    said = f"{case}, {fleet.policies.queue}, {fleet.policies.routing}, {fleet.policies.decode_routing}"
    assert (found.cached_tokens is not None) == fleet.policies.prefix_cache
    status = [request.status for request in plain.requests]
    assert [("finished", "rejected")[s] for s in found.status] == status, said
    for name in NAMES:
        theirs = [getattr(request, name) for request in plain.requests]
        np.testing.assert_array_equal(getattr(found, name), theirs, err_msg=f"{name} of {said}")
    hits = [max(hit, 0) for hit in plain.first_hit]
    cached_tokens = np.zeros(len(trace)) if found.cached_tokens is None else found.cached_tokens
    np.testing.assert_array_equal(cached_tokens, hits, err_msg=f"hits of {said}")
    for name in SECONDS:
        theirs = [getattr(request, name) for request in plain.requests]
        np.testing.assert_allclose(
            getattr(found, name), theirs, rtol=1e-9, atol=1e-9, err_msg=f"{name} of {said}"
        )
    np.testing.assert_array_equal(found.worker_steps, [worker.steps for worker in plain.workers], said)
    np.testing.assert_array_equal(found.worker_tokens, [worker.tokens for worker in plain.workers], said)
    return plain, found
