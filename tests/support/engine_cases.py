"""Random fleets of engines, and which plain simulator says what they do.

A case has one of every choice: no engine, a synchronous or an asynchronous one; an order of prompts; routings
of arrivals and of hand-offs; mixed workers, prefill and decode workers or both; KV caches from 5 blocks on.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from async_reference import AsyncReference
from simulations import beside, compare, random_case
from simulator_reference import Reference

from planner.domain import Limit
from planner.fleet import Fleet, Pool
from planner.models.engine import Engine, HostTime
from planner.traffic.trace import Trace

QUEUES = ("fcfs", "sjf", "ljf", "srpt")  # those that look at prefix caches: prefix_reference.py
ROUTINGS = (
    *("jsq", "least-outstanding", "round-robin", "token-jsq", "power-of-two-requests", "pending-tokens"),
    *("random", "power-of-two", "deferred"),
)
AnyCase = tuple[Fleet, Trace, tuple[Limit, ...], int]


def with_engine(fleet: Fleet, engine: Engine) -> Fleet:
    return replace(
        fleet, pools=tuple(replace(pool, type=replace(pool.type, engine=engine)) for pool in fleet.pools)
    )


def random_engine(seed: int, *, async_scheduling: bool) -> Engine:
    rng = np.random.default_rng([seed, 77])
    host, rest = (HostTime(rng.uniform(0, 0.2), rng.uniform(0, 0.01), 0.1) for _ in range(2))
    front_end_s = float(rng.uniform(0.001, 0.3))
    ceiling = float(rng.choice([math.inf, 20.0]))
    return Engine("vllm", "0", async_scheduling, host, rest, front_end_s, tokens_per_s=ceiling)


def with_engines(fleet: Fleet, seed: int, *, async_scheduling: bool, front_end_s: float) -> Fleet:
    """Every pool has its own: steps of two pools never take the same time, so no two events coincide."""

    def change(pool: Pool, k: int) -> Pool:
        engine = random_engine(1000 * seed + k, async_scheduling=async_scheduling)
        ceiling = engine.tokens_per_s - k / math.pi
        engine = replace(engine, front_end_s=front_end_s, tokens_per_s=ceiling)
        if seed % 8 > 3:
            engine = replace(engine, first_token="decode")
        if seed % 16 > 11:
            engine = replace(engine, mixed_steps=False, latent_launch_s=0.1)
        return replace(pool, type=replace(pool.type, engine=engine, launched_layers=1))

    return replace(fleet, pools=tuple(change(pool, k) for k, pool in enumerate(fleet.pools)))


def random_policies(fleet: Fleet, rng: np.random.Generator) -> Fleet:
    """The same fleet with an order of prompts and with routings, of all that the plain simulators know."""
    queue = str(rng.choice(QUEUES))
    batch, window_s = 0, math.inf
    if queue != "fcfs":
        batch = int(rng.choice([0, 0, 2, 4]))
        # No multiple of steps of 1/20 s (20 tokens/s), else places in the queue are equal but for rounding.
        window_s = float(rng.choice([math.inf, 0.5003, 5.003])) if batch == 0 else math.inf
    policies = replace(
        fleet.policies,
        queue=queue,
        queue_batch=batch,
        queue_window_s=window_s,
        routing=str(rng.choice(ROUTINGS)),
        decode_routing=str(rng.choice(ROUTINGS)),
        long_prefill_token_threshold=int(rng.choice([0, 0, 0, 4, 16])),
        seed=int(rng.integers(9)),
    )
    return replace(fleet, policies=policies)


def random_engine_case(seed: int) -> tuple[AnyCase, type[Reference]]:
    """One in four without an engine, one in four synchronous, two asynchronous."""
    rng = np.random.default_rng([seed, 33])
    fleet, trace, limits, closed_loop = random_case(seed, dyadic=False)
    fleet = random_policies(fleet, rng)
    is_async = seed % 4 > 1
    if seed % 4 > 0:
        # where an answer is the cause of an arrival, a step may end just as that has crossed the front end
        front_end_s = 0.0 if closed_loop else float(rng.uniform(0.001, 0.3))
        fleet = with_engines(fleet, seed, async_scheduling=is_async, front_end_s=front_end_s)
    if is_async and seed % 3 == 0:
        poll_steps = (2, 3, 9)[seed // 3 % 3]
        fleet = fleet.with_engines(lambda engine: replace(engine, poll_steps=poll_steps))
    if rng.integers(3) == 0:
        fleet = beside(fleet, seed)
    return (fleet, trace, limits, closed_loop), AsyncReference if is_async else Reference


def compare_engine_case(seed: int) -> None:
    """Raise AssertionError where kernel and plain simulator differ in any number by more than 1e-9."""
    case, reference = random_engine_case(seed)
    compare(*case, reference)
