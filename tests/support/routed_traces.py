"""Prompts over shared documents, and what happens in a simulation of them, for tests of routers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from planner.simulator import Simulation
from planner.traffic.trace import Trace

ARRIVES, FINISHES, IS_COMPUTED, IS_ADMITTED = range(4)


def prompts_trace(
    requests: int, rate_rps: float, *, seed: int = 0, documents: int = 12, least_blocks: int = 3
) -> Trace:
    """Prompts over shared documents of `least_blocks` to 8 blocks, with a question of 1 to 3 blocks of their
    own, by five tenants of whom one asks for half of all. No prompt is longer than a step."""
    rng = np.random.default_rng(seed)
    shared = [np.arange(100 * k, 100 * k + rng.integers(least_blocks, 9)) for k in range(documents)]
    own = itertools.count(10**6)
    ids = [
        np.concatenate([shared[k], [next(own) for _ in range(rng.integers(1, 4))]])
        for k in rng.integers(documents, size=requests)
    ]
    lengths = np.array([len(one) for one in ids])
    return Trace(
        "documents",
        np.cumsum(rng.exponential(1 / rate_rps, requests)),
        16 * lengths + rng.integers(0, 16, requests),
        rng.integers(1, 40, requests),
        prefix_offsets=np.cumsum([0, *lengths]),
        prefix_ids=np.concatenate(ids),
        prefix_block_tokens=16,
        tenant=rng.choice(5, requests, p=[0.5, 0.2, 0.1, 0.1, 0.1]),
        tenants=("a", "b", "c", "d", "e"),
    )


def events_of(s: Simulation, *, admissions: bool) -> Iterator[tuple[int, float, int]]:
    """What happens in a simulation, in its order: arrivals first, then ends of steps, then beginnings."""
    happens = []
    for i, arrival_s in enumerate(s.arrival_s.tolist()):
        happens.append((arrival_s, ARRIVES, i))
        happens.append((arrival_s + s.ttft_s[i], IS_COMPUTED, i))
        if s.output_tokens[i] > 1:
            happens.append((arrival_s + s.e2e_s[i], FINISHES, i))
        if admissions:
            happens.append((arrival_s + s.queue_s[i], IS_ADMITTED, i))
    for time_s, kind, i in sorted(happens):
        yield kind, time_s, i
