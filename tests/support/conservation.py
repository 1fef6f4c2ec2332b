"""What holds at the end of every simulation, whatever the fleet, read from the kernel's own arrays."""

from __future__ import annotations

import math

import numpy as np

from planner.fleet import Fleet
from planner.policies import STEPWISE
from planner.simulator import layout
from planner.simulator.initial_state import engine_of
from planner.simulator.layout import State

LISTS = {
    "INBOUND": layout.INBOUND,
    "READY": layout.READY,
    "PARTIAL": layout.PARTIAL,
    "UNKNOWN": layout.UNKNOWN,
    "RESTING": layout.RESTING,
}


def check_conservation(state: State, fleet: Fleet, n: int) -> None:
    """Every one of n requests has ended, and nothing is left of it: lanes, lists, queues and links are empty,
    routers see no load, and KV blocks are back but for those of requests whose last token the engine, which
    has no step to form any more, has not seen.
    """
    if state.counters[layout.DONE] < n or engine_of(fleet) != STEPWISE:
        return  # it was stopped before the end
    workers, lanes = state.workers, state.lanes
    assert (state.requests["status"] != layout.UNFINISHED).all()
    assert not lanes["decodes"].any() and not lanes["prefills"].any()
    assert (lanes["residue"] == 0).all()
    for name, which in LISTS.items():
        assert (workers["head"][:, which] == layout.NONE).all(), name
    assert (workers["first_waiting"] == layout.NONE).all() and not workers["waiting"].any()
    assert (state.link["root"] == layout.NONE).all()
    for counter in (layout.LIMBO, layout.LOST, layout.FREED, layout.HELD):
        assert state.counters[counter] == layout.NONE
    for load in ("pending_tokens", "assigned", "assigned_tokens", "heavy"):
        assert not workers[load].any(), load
    if len(state.requests) < n:
        return  # of a long trace, whose records were read and given back (passing.py)
    for w, worker in enumerate(workers):
        leaving = leaving_on(state, w)
        assert worker["running"] == len(leaving)
        assert worker["status"] or not worker["late_blocks"] + worker["late_seats"]
        if state.caches is None and worker["status"]:
            kind = state.types[worker["type"]]
            assert worker["used_blocks"] == sum(blocks_on(state, kind, r) for r in leaving)
    if state.caches is not None and (workers["head"][:, layout.LEAVING] == layout.NONE).all():
        check_cache_conservation(state)


def check_cache_conservation(state: State) -> None:
    """Where no request is left, blocks are used by pinned nodes alone, and by what was given back too late
    for a step that was formed already; no load is under way, and no tenant waits.
    """
    caches = state.caches
    assert caches is not None
    assert not caches.tenants["waiting"].any()
    entries = caches.entries
    in_use = entries[(entries["refs"] > 0) & (entries["worker"] != layout.NONE)]
    is_pinned = np.zeros(len(in_use), bool)
    if caches.pinned.size:
        words = caches.pinned[in_use["node"], in_use["worker"] // 64]
        is_pinned = (words >> (in_use["worker"] % 64).astype(np.uint64)) & np.uint64(1) > 0
    assert (in_use["refs"] == in_use["is_late"] + is_pinned).all()
    for w, worker in enumerate(state.workers):
        assert worker["used_blocks"] == in_use["blocks"][in_use["worker"] == w].sum()
    assert (in_use["worker"] < len(state.workers)).all()


def leaving_on(state: State, w: int) -> list[int]:
    """Requests that are done, of which the engine of worker w has not seen the last token."""
    requests, r = [], int(state.workers["head"][w, layout.LEAVING])
    while r != layout.NONE:
        requests.append(r)
        r = int(state.requests["next"][r])
    return requests


def blocks_on(state: State, kind: np.void, r: int) -> int:
    """KV blocks of request r on a worker of this type, those beside its tokens included."""
    request = state.requests[r]
    tokens, total = int(request["length_tokens"]), int(request["input_tokens"] + request["output_tokens"])
    blocks, most = -(-tokens // 16), -(-total // 16)
    of_windows = math.ceil(float(kind["window_ratio"]) * min(most, int(kind["window_blocks"])))
    return int(kind["reserved_blocks"] or blocks) + int(kind["constant_blocks"]) + of_windows
