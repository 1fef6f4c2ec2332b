"""Computes how often a router must request pinned prefixes so that an engine that cannot pin keeps them in
its cache, and what that costs.

vLLM cannot pin blocks: the blocks used longest ago leave its cache first. A prefix stays if it is used again
before new tokens have filled the memory that its worker has beside the pinned prefixes. The shortest time in
which new tokens fill this memory, the turnover, follows from the plan's simulation. If no user has requested
a prefix for half of the turnover, the router requests it, with one output token. Then only the prefix's last
block is computed.

A leaf is a pinned prefix that is not the beginning of another one (prefix_placing.py). A request for a leaf
uses all of its beginnings too.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.domain import KV_BLOCK_TOKENS
from planner.fleet import Fleet, Pool
from planner.search.prefixes.prefix_placing import KeepAlive, Leaf, PoolPrefixes, leaves_of
from planner.simulator.simulation import Simulation
from planner.traffic.trace import FloatArray, IntArray, Trace
from planner.units import HOUR_S

TURNOVER_FRAC = 0.5  # The router requests a prefix so early because traffic may be denser than the trace.
# The router checks for unused prefixes once per second, so it requests none more often.
LEAST_EVERY_S = 1.0


def with_keep_alive(
    prefixes: Sequence[PoolPrefixes], fleet: Fleet, simulation: Simulation, trace: Trace
) -> tuple[PoolPrefixes, ...]:
    """The pools' pinned prefixes, each with the time without use after which the router requests it."""
    # The simulation numbers the workers of all pools one after the other.
    next_worker, first_worker = 0, {}
    for pool in fleet.pools:
        first_worker[pool.name] = next_worker
        next_worker += pool.count
    answers = []
    for pool_prefixes in prefixes:
        plan = pool_prefixes.plan
        keep = find_keep_alive(
            trace,
            simulation,
            plan.pool,
            first_worker[plan.pool.name],
            plan.replication.session_tokens.tolist(),
            leaves_of(trace, plan),
        )
        every_s = {f"{plan.pool.name}-{r}": seconds for r, seconds in enumerate(keep.every_s)}
        warm_up = tuple(
            replace(prompt, keep_alive_s=every_s[prompt.worker]) for prompt in pool_prefixes.warm_up
        )
        answers.append(replace(pool_prefixes, warm_up=warm_up, keep_alive=keep))
    return tuple(answers)


def find_keep_alive(
    trace: Trace,
    simulation: Simulation,
    pool: Pool,
    first_worker: int,
    free_tokens: Sequence[float],
    leaves: Sequence[Sequence[Leaf]],
) -> KeepAlive:
    """How often the router requests each worker's prefixes, and how much of the busiest engine's time that
    takes.

    The engines of `simulation` have prefix caches, and the pool's workers have the numbers from
    `first_worker` on. The pool's r-th worker can cache `free_tokens[r]` tokens beside its pinned prefixes,
    which are `leaves[r]` and their beginnings.
    """
    assert simulation.cached_tokens is not None
    # A prefill worker makes one token of the output, a mixed worker all of them.
    outputs = trace.output_tokens if pool.role == "mixed" else np.ones(len(trace), np.int64)
    new_tokens = trace.input_tokens - simulation.cached_tokens + outputs
    new_tokens = -(-new_tokens // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS  # In whole blocks, rounded up.
    span_s = (float(trace.arrival_s[0]), float(trace.arrival_s[-1]))
    every_s_by_worker: list[float | None] = []
    request_count, busiest_s = 0, 0.0
    for r, worker_leaves in enumerate(leaves):
        requests = np.flatnonzero(simulation.prefill_worker == first_worker + r)
        turnover_s = turnover_s_of(trace.arrival_s[requests], new_tokens[requests], free_tokens[r])
        if not worker_leaves or math.isinf(turnover_s):
            every_s_by_worker.append(None)  # Nothing is pinned here, or nothing ever leaves this cache.
            continue
        every_s, busy_s = max(TURNOVER_FRAC * turnover_s, LEAST_EVERY_S), 0.0
        every_s_by_worker.append(every_s)
        for leaf, used_s in zip(worker_leaves, times_of_use_s(trace, requests, worker_leaves), strict=True):
            # The router requests the leaf in the gaps between its uses by users: once per `every_s`.
            gaps_s = np.diff([span_s[0], *used_s, span_s[1]])
            router_requests = int(np.floor(gaps_s / every_s).sum())
            tokens = min(KV_BLOCK_TOKENS, leaf.tokens)  # Engines always compute the last block of a prompt.
            attention_pairs, cached = float(tokens * leaf.tokens), float(leaf.tokens - tokens)
            step_s = pool.type.latency.step_s(float(tokens), attention_pairs, cached=cached)
            request_count += router_requests
            busy_s += router_requests * float(step_s)
        busiest_s = max(busiest_s, busy_s)
    return KeepAlive(
        every_s=tuple(every_s_by_worker),
        per_h=HOUR_S * request_count / trace.duration_s,
        busy_frac=busiest_s / trace.duration_s,
    )


def turnover_s_of(arrival_s: FloatArray, tokens: IntArray, free_tokens: float) -> float:
    """The turnover [s]: the shortest time between two arrivals such that both requests and those between them
    have `free_tokens` or more together; infinite if all requests together have fewer. `tokens` (n,) are the
    new tokens of each request, `arrival_s` (n,) its arrival.
    """
    total_tokens = np.cumsum(tokens)
    # For each request, as the last of a row of requests, the latest first one with which the row has
    # `free_tokens`; -1 if none.
    begin = np.searchsorted(total_tokens - tokens, total_tokens - free_tokens, side="right") - 1
    ends = np.flatnonzero(begin >= 0)
    return float((arrival_s[ends] - arrival_s[begin[ends]]).min()) if len(ends) else math.inf


def times_of_use_s(trace: Trace, requests: IntArray, leaves: Sequence[Leaf]) -> list[list[float]]:
    """For each leaf the arrivals [s] of those of `requests` (their numbers in the trace) that begin with
    it.
    """
    numbers = {leaf.block_ids: k for k, leaf in enumerate(leaves)}
    lengths = sorted({len(ids) for ids in numbers})
    used_s: list[list[float]] = [[] for _ in leaves]
    for i in requests.tolist():
        begin, end = trace.prefix_offsets[i : i + 2].tolist()
        for length in lengths:
            if begin + length > end:
                break
            k = numbers.get(tuple(trace.prefix_ids[begin : begin + length].tolist()))
            if k is not None:
                used_s[k].append(float(trace.arrival_s[i]))
    return used_s
