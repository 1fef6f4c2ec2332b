"""How often pinned prefixes must be asked for where engines know no pins: counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plans import CATALOG

from planner.documents.facts import Cautioned, Warned
from planner.fleet import Fleet, PinnedPrefix, Policies, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.search.evidence.findings import keep_alive_warnings
from planner.search.prefixes.keep_alive import find_keep_alive, turnover_s_of
from planner.search.prefixes.prefix_placing import KeepAlive, Leaf
from planner.simulator.replay import simulate
from planner.traffic.trace import Trace

BLOCK = 160


def test_the_shortest_time_in_which_so_many_tokens_come() -> None:
    """100 tokens at 0, 4, 5, 9 s: 150 within 1 s, 300 within 5; 500 never. One request alone may do."""
    arrival_s, tokens = np.array([0.0, 4.0, 5.0, 9.0]), np.full(4, 100)
    assert turnover_s_of(arrival_s, tokens, 150) == 1.0
    assert turnover_s_of(arrival_s, tokens, 300) == 5.0
    assert turnover_s_of(arrival_s, tokens, 500) == math.inf
    assert turnover_s_of(arrival_s, tokens, 90) == 0.0


def warned_of(found: KeepAlive) -> tuple[Warned, ...]:
    prefixes: Any = [SimpleNamespace(keep_alive=None), SimpleNamespace(keep_alive=found)]
    return keep_alive_warnings(prefixes)


def test_prefixes_are_asked_for_between_their_uses() -> None:
    """A request every 10 s over prefix A, 160 tokens, with 64 of its own and 16 of output, for 100 s; B, as
    long, is used at 0 s alone. 320 tokens come within four requests, 30 s, so a prefix is asked for 15 s
    after its last use: A never, B six times."""
    count = 11
    ids = np.column_stack((np.where(np.arange(count) == 0, 7, 3), 100 + np.arange(count)))
    trace = Trace(
        "two prefixes",
        np.linspace(0.0, 100.0, count),
        np.full(count, BLOCK + 64),
        np.full(count, 16),
        prefix_offsets=2 * np.arange(count + 1),
        prefix_ids=ids.ravel(),
        prefix_block_tokens=BLOCK,
    )
    latency = StepLatency((1.0, 512.0), (0.01, 0.01), 0.0, 0.0, 0.0, 0.0, 0.0, "any")
    pool = Pool("mixed", "mixed", WorkerType(CATALOG.gpu("l40s-48g"), 1, latency, 4096, 512, 4), 1)
    policies = Policies(routing="pinned-prefix", prefix_cache=True)
    pinned = tuple(PinnedPrefix((block,), BLOCK, (0,)) for block in (3, 7))
    simulation = simulate(Fleet(CATALOG.llm("llama-3.1-8b"), (pool,), policies, pinned=pinned), trace)
    leaves = [[Leaf(BLOCK, 1, (3,)), Leaf(BLOCK, 0, (7,))]]
    found = find_keep_alive(trace, simulation, pool, 0, [320.0], leaves)
    assert found.every_s == pytest.approx((15.0,))
    assert found.per_h == pytest.approx(6 * 36)
    assert found.busy_frac == pytest.approx(0.01 * found.per_h / 3600)
    assert warned_of(found) == ()
    assert warned_of(replace(found, busy_frac=0.12)) == (Cautioned("keep-alives-uncounted"),)
    assert find_keep_alive(trace, simulation, pool, 0, [1e6], leaves).every_s == (None,)
    assert find_keep_alive(trace, simulation, pool, 0, [320.0], [[]]).per_h == 0
