"""What CPU memory behind prefix caches adds to the kernel's state, and how a fleet and a trace make it.

A node that is kept there is an entry of the caches (cache_layout.py), of the "worker" after all workers:
worker w keeps its own as W + w, in a list of its own by last use. Of a store that all workers share the first
worker's record has the room and the link, and all keep theirs as W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.fleet import Fleet, WorkerType
from planner.simulator.layout import NONE, nothing
from planner.traffic.trace import IntArray, Trace

KEPT = np.dtype(  # of a worker
    [
        ("head", "i8", 3),  # lists of requests, see below
        ("tail", "i8", 3),
        ("nodes", "i8"),  # that its memory holds
        ("block_s", "f8"),  # in which a KV block comes back
        ("free_s", "f8"),  # when the last load ends
        ("busy_s", "f8"),  # of all loads
        ("store", "i8"),  # whose room and link it uses: its own, or the first worker's
        ("is_shared", "i8"),
    ]
)
# lists: who waits for a load, who waits for a load of somebody else, who has left since a step was formed
LOADING, ASIDE, LEFT = (np.int64(i) for i in range(3))
LOAD = np.dtype(  # of a request
    [
        ("next", "i8"),  # in the list LEFT
        ("nodes", "i8"),  # under way, the last ones of those it has
        ("begun_s", "f8"),
        ("end_s", "f8"),
        ("known_step", "i8"),  # first of its worker that may hold it; 0: the load has not ended
        ("stored", "i8"),  # nodes up to which it has offered its own
        ("first_seen", "i8"),  # of its nodes, those in the memory are used last when it has left; NONE: none
        ("last_seen", "i8"),
        ("loaded_tokens", "i8"),  # when it was first admitted, NONE before
        ("waited_s", "f8"),  # for that load
    ]
)


class Offload(NamedTuple):
    """W workers, n requests."""

    kept: npt.NDArray[np.void]  # (W,) KEPT
    loads: npt.NDArray[np.void]  # (n,) LOAD


NO_OFFLOAD = Offload(nothing(KEPT), nothing(LOAD))


def make_offload(fleet: Fleet, trace: Trace, kinds: IntArray, types: Sequence[WorkerType]) -> Offload | None:
    """None for a fleet without such memory, or where no worker's holds a node. `kinds` (W,) are the workers'
    types.
    """
    asked = fleet.policies.kv_offload
    if asked is None or not fleet.policies.prefix_cache:
        return None
    kept = np.zeros(len(kinds), KEPT)
    kept["head"] = kept["tail"] = NONE
    kept["nodes"] = np.array([asked.kv_tokens(fleet.llm, kind.tp) for kind in types])[kinds]
    kept["store"] = np.arange(len(kinds))
    if asked.is_shared:
        loading = next(pool.type for pool in fleet.running_pools if pool.role != "decode")
        kept["store"], kept["is_shared"], kept["nodes"] = 0, 1, 0
        kept["nodes"][0] = asked.kv_tokens(fleet.llm, loading.tp)
    kept["nodes"] //= trace.prefix_block_tokens
    if not kept["nodes"].any():
        return None
    kept["block_s"] = np.array([KV_BLOCK_TOKENS * asked.token_s(fleet.llm, kind.tp) for kind in types])[kinds]
    kept["free_s"] = -np.inf
    loads = np.zeros(len(trace), LOAD)
    loads["first_seen"] = loads["loaded_tokens"] = NONE
    return Offload(kept, loads)
