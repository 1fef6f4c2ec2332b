"""What CPU memory behind prefix caches adds to the kernel's state, made from a fleet and a trace.

CPU memory holds nodes of the prefix tree (cache_layout.py). A node in memory is an entry of the caches, as on
a worker; for this, each memory has a worker number of its own: that of worker w, of W workers, has number
W + w. A store that all workers share has number W, and its size and link are in the record of worker 0.
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
        ("head", "i8", 3),  # Lists of requests: LOADING, ASIDE and LEFT.
        ("tail", "i8", 3),
        ("nodes", "i8"),  # How many nodes fit into it.
        ("block_s", "f8"),  # Seconds to load one KV block.
        ("free_s", "f8"),  # When the last load ends.
        ("busy_s", "f8"),  # Seconds of all loads together.
        ("store", "i8"),  # The worker whose record has the size and the link: itself, or 0 if they share one.
        ("is_shared", "i8"),
        # With a disk behind it: the nodes used last, up to `memory_nodes`, are in memory, all others on the
        # disk. `oldest_in_memory` is the entry of the node that goes to the disk next.
        ("memory_nodes", "i8"),
        ("in_memory", "i8"),
        ("oldest_in_memory", "i8"),
        ("disk_block_s", "f8"),  # Seconds in which one KV block comes from the disk.
        ("disk_free_s", "f8"),  # When the disk's last load ends.
    ]
)
# Indices of a memory's lists of requests.
(
    LOADING,  # They wait for their load.
    ASIDE,  # They are passed over in this step, as they need nodes that are being loaded for another one.
    LEFT,  # They have left the worker, which has not formed a step since that knew of it.
) = (np.int64(i) for i in range(3))
LOAD = np.dtype(  # What a request has to do with the memory of its worker.
    [
        ("next", "i8"),  # The next request in the list LEFT.
        ("left_step", "i8"),  # The asynchronous step with whose end it left (NONE: of another engine).
        ("nodes", "i8"),  # How many nodes are being loaded: the last ones of its `computed_tokens`.
        ("begun_s", "f8"),
        ("end_s", "f8"),
        ("known_step", "i8"),  # The worker's first step that may include it, 0 until the load has ended.
        ("stored", "i8"),  # How many of its nodes, from the root on, it has offered to the memory.
        # When the request leaves, its nodes from `first_seen` to `last_seen` become the most recently used of
        # the memory. NONE: there are none.
        ("first_seen", "i8"),
        ("last_seen", "i8"),
        ("loaded_tokens", "i8"),  # Tokens loaded when it was first admitted, NONE before.
        ("waited_s", "f8"),  # Seconds that it waited for that load.
        ("disk_tokens", "i8"),  # Of those tokens, the ones that came from the disk.
    ]
)


class Offload(NamedTuple):
    """The CPU memory of W workers, and the loads of n requests."""

    memories: npt.NDArray[np.void]  # (W,) MEMORY
    loads: npt.NDArray[np.void]  # (n,) LOAD


NO_OFFLOAD = Offload(empty_field(MEMORY), empty_field(LOAD))


def make_offload(
    fleet: Fleet, trace: Trace, type_indices: IntArray, types: Sequence[WorkerType]
) -> Offload | None:
    """The memories, all empty. None for a fleet without them, or if none has room for a node.

    `type_indices` (W,) are the workers' indices into `types`.
    """
    kv_offload, llm = fleet.policies.kv_offload, fleet.llm
    if kv_offload is None or not fleet.policies.prefix_cache:
        return None
    memories = np.zeros(len(type_indices), MEMORY)
    memories["head"] = memories["tail"] = NONE
    # Tokens, until they are divided by those of a node.
    memories["nodes"] = np.array([kv_offload.kv_tokens(llm, worker.tp) for worker in types])[type_indices]
    memories["store"] = np.arange(len(type_indices))
    if kv_offload.is_shared:  # A token's bytes depend on the parallelism: that of the workers that prefill.
        prefilling = next(pool.type for pool in fleet.running_pools if pool.role != "decode")
        memories["store"], memories["is_shared"], memories["nodes"] = 0, 1, 0
        memories["nodes"][0] = kv_offload.kv_tokens(llm, prefilling.tp)
    memories["nodes"] //= trace.prefix_block_tokens
    if not memories["nodes"].any():
        return None
    block_s = [KV_BLOCK_TOKENS * kv_offload.token_s(llm, worker.tp) for worker in types]
    memories["block_s"] = np.array(block_s)[type_indices]
    memories["free_s"] = memories["disk_free_s"] = -np.inf  # Free from the beginning.
    memory_nodes = [kv_offload.memory_tokens(llm, worker.tp) // trace.prefix_block_tokens for worker in types]
    memories["memory_nodes"], memories["oldest_in_memory"] = np.array(memory_nodes)[type_indices], NONE
    disk_block_s = [KV_BLOCK_TOKENS * kv_offload.disk_token_s(llm, worker.tp) for worker in types]
    memories["disk_block_s"] = np.array(disk_block_s)[type_indices]
    if not kv_offload.disk_bytes:  # Nothing ever goes to a disk that is not there.
        memories["memory_nodes"] = np.iinfo(np.int64).max
    loads = np.zeros(len(trace), LOAD)
    loads["first_seen"] = loads["loaded_tokens"] = NONE
    return Offload(memories, loads)
