"""The arrays in which the simulator keeps the CPU memory behind prefix caches, to which workers offload KV.
They are made from a fleet and a trace; offload.py changes them.

"Memory" is here the CPU memory of a worker, not its GPUs'. It holds nodes of the prefix tree
(cache_layout.py). A node in memory is an entry of the caches, as a node on a worker is. For this, each memory
has a worker number of its own: that of worker w, of W workers, has number W + w. If all workers share one
store, it has number W, and its size and link are in the record of worker 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.fleet import Fleet, WorkerType
from planner.simulator.layout import NONE, empty_field
from planner.traffic.trace import IntArray, Trace

MEMORY = np.dtype(  # The CPU memory of a worker.
    [
        ("head", "i8", 3),  # The first requests of the lists LOADING, ASIDE and LEFT ...
        ("tail", "i8", 3),  # ... and the last ones.
        ("nodes", "i8"),  # How many nodes fit into it, and into the disk behind it.
        ("block_s", "f8"),  # Seconds to load one KV block from it.
        ("free_s", "f8"),  # When the last load ends.
        ("busy_s", "f8"),  # Seconds of all loads together.
        ("store", "i8"),  # The worker whose record has the size and the link: itself, or 0 if they share one.
        ("is_shared", "i8"),  # Whether all workers share one store.
        # With a disk behind it, the nodes that were used last are in memory, all others on the disk.
        ("memory_tree_nodes", "i8"),  # How many nodes fit into memory alone.
        ("in_memory", "i8"),  # How many are in memory now.
        ("oldest_in_memory", "i8"),  # The entry of the node that goes to the disk next.
        ("disk_block_s", "f8"),  # Seconds in which one KV block comes from the disk.
        ("disk_free_s", "f8"),  # When the disk's last load ends.
    ]
)
# Indices of a memory's lists of requests.
(
    LOADING,  # Requests that wait for the load of their nodes.
    ASIDE,  # Requests passed over in this step: they need nodes that are being loaded for another request.
    LEFT,  # Requests that have left the worker, which has not formed a step since that knew of it.
) = (np.int64(i) for i in range(3))
LOAD = np.dtype(  # What a request loads from the memory of its worker, and stores in it.
    [
        ("next", "i8"),  # The next request in the list LEFT.
        ("left_step", "i8"),  # The step with whose end it left; NONE unless the engine is asynchronous.
        ("nodes", "i8"),  # How many nodes are being loaded: the last ones of the request's `computed_tokens`.
        ("begun_s", "f8"),  # When its load began ...
        ("end_s", "f8"),  # ... and when it ends.
        ("known_step", "i8"),  # The worker's first step that may include it, 0 until the load has ended.
        ("stored", "i8"),  # How many of its nodes, from the root on, it has offered to the memory.
        # When the request leaves, its nodes from `first_seen` to `last_seen` - 1 (places in its path) become
        # the most recently used of the memory. `first_seen` is NONE if there are none.
        ("first_seen", "i8"),
        ("last_seen", "i8"),
        ("loaded_tokens", "i8"),  # Tokens that were loaded when it was first admitted, NONE before.
        ("waited_s", "f8"),  # Seconds that it waited for the load of these tokens.
        ("disk_tokens", "i8"),  # How many of these tokens came from the disk.
    ]
)


class Offload(NamedTuple):
    """The CPU memory of W workers, and the loads of n requests."""

    memories: npt.NDArray[np.void]  # (W,) MEMORY
    loads: npt.NDArray[np.void]  # (n,) LOAD
    # Of a shared store, (nodes,): since when and until when each node was in it, and since when it is there
    # again; infinite if not so. Else empty.
    stored_s: npt.NDArray[np.float64]
    left_s: npt.NDArray[np.float64]
    returned_s: npt.NDArray[np.float64]


NO_OFFLOAD = Offload(empty_field(MEMORY), empty_field(LOAD), np.zeros(0), np.zeros(0), np.zeros(0))


def make_offload(
    fleet: Fleet, trace: Trace, type_indices: IntArray, types: Sequence[WorkerType]
) -> Offload | None:
    """The memories, all empty. None for a fleet without prefix caches or without offload, or if no memory has
    room for a node. `type_indices` (W,) are the places of the workers' types in `types`.
    """
    kv_offload, llm = fleet.policies.kv_offload, fleet.llm
    if kv_offload is None or not fleet.policies.prefix_cache:
        return None
    memories = np.zeros(len(type_indices), MEMORY)
    memories["head"] = memories["tail"] = NONE
    # Until it is divided by the tokens of a node below, this is a count of tokens.
    memories["nodes"] = np.array([kv_offload.kv_tokens(llm, worker.tp) for worker in types])[type_indices]
    memories["store"] = np.arange(len(type_indices))
    # The bytes of a token depend on the parallelism. A shared store has those of the first pool that
    # prefills.
    if kv_offload.is_shared:
        prefilling = next(pool.type for pool in fleet.running_pools if pool.role != "decode")
        memories["store"], memories["is_shared"], memories["nodes"] = 0, 1, 0
        memories["nodes"][0] = kv_offload.kv_tokens(llm, prefilling.tp)
    memories["nodes"] //= trace.prefix_block_tokens
    if not memories["nodes"].any():
        return None
    block_s = [KV_BLOCK_TOKENS * kv_offload.token_s(llm, worker.tp) for worker in types]
    memories["block_s"] = np.array(block_s)[type_indices]
    memories["free_s"] = memories["disk_free_s"] = -np.inf  # Free from the beginning.
    memory_tokens = np.array([kv_offload.memory_tokens(llm, worker.tp) for worker in types])
    memories["memory_tree_nodes"] = (memory_tokens // trace.prefix_block_tokens)[type_indices]
    memories["oldest_in_memory"] = NONE
    disk_block_s = [KV_BLOCK_TOKENS * kv_offload.disk_token_s(llm, worker.tp) for worker in types]
    memories["disk_block_s"] = np.array(disk_block_s)[type_indices]
    if not kv_offload.disk_bytes:  # Without a disk nothing may leave memory for it.
        memories["memory_tree_nodes"] = np.iinfo(np.int64).max
    loads = np.zeros(len(trace), LOAD)
    loads["first_seen"] = loads["loaded_tokens"] = NONE
    most_nodes = len(trace.prefix_ids) if kv_offload.is_shared else 0  # If no prompts share any.
    never = np.full((3, most_nodes), np.inf)
    return Offload(memories, loads, never[0].copy(), never[1].copy(), never[2].copy())
