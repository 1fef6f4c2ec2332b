"""Puts pinned prefixes (planner/search/prefixes/pinning.py) into workers' caches before the first request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.fleet import Fleet
from planner.simulator.caches import pin_tree_node
from planner.simulator.layout import DECODE, State
from planner.simulator.numba_compile import entry_jit
from planner.simulator.pointers import pointer_to
from planner.traffic.prefixes import block_uses
from planner.traffic.trace import Trace


def pin_prefixes(state: State, fleet: Fleet, trace: Trace) -> None:
    """Put the fleet's pinned prefixes into fresh caches.

    Only those blocks of a prefix are put there with which some prompt of the trace begins: no others can hit.

    Raises InputError for workers that do not exist or keep no prefixes, and where the longest request has no
    room beside the pinned prefixes.
    """
    if not fleet.pinned or state.caches is None:
        return
    for prefix in fleet.pinned:
        if prefix.block_tokens != trace.prefix_block_tokens:
            raise InputError(
                f"pinned: blocks of {prefix.block_tokens} tokens, those of {trace.name} have "
                f"{trace.prefix_block_tokens}; place the prefixes of this trace"
            )
        if wrong := [w for w in prefix.workers if not 0 <= w < len(state.workers)]:
            raise InputError(f"pinned: worker {wrong[0]}, the fleet has 0 to {len(state.workers) - 1}")
        if wrong := [w for w in prefix.workers if state.workers["role"][w] == DECODE]:
            raise InputError(f"pinned: worker {wrong[0]} decodes, and decode workers keep no prefixes")
    for nodes, prefix in zip(pinned_nodes(fleet, trace), fleet.pinned, strict=True):
        for w in prefix.workers:
            pin_nodes(state, w, nodes)
    longest = -(-int((trace.input_tokens + trace.output_tokens).max()) // KV_BLOCK_TOKENS)  # KV blocks.
    workers = state.workers
    blocks = state.types["kv_blocks"][workers["type"]]
    too_full = np.flatnonzero((workers["used_blocks"] > 0) & (workers["used_blocks"] + longest > blocks))
    if len(too_full):
        w = int(too_full[0])
        tokens, pinned = KV_BLOCK_TOKENS * int(blocks[w]), KV_BLOCK_TOKENS * int(workers["used_blocks"][w])
        raise InputError(
            f"pinned: worker {w} holds {tokens} tokens, and the longest request's "
            f"{KV_BLOCK_TOKENS * longest} have no room beside {pinned} that are pinned; pin fewer"
        )


def pinned_nodes(fleet: Fleet, trace: Trace) -> list[npt.NDArray[np.int32]]:
    """The nodes of each pinned prefix in the trace's tree, up to the first block that no prompt has there.

    A node stands for a block together with all blocks before it. `block_uses` has the `node` of every block
    of every prompt, and the `parent` of every node.
    """
    uses = block_uses(trace)
    ids = np.zeros(len(uses.parent), trace.prefix_ids.dtype)
    ids[uses.node] = trace.prefix_ids
    # Nodes sorted by (parent, block id), so that a child is found by two searches.
    order = np.lexsort((ids, uses.parent))
    parents, ordered = uses.parent[order], ids[order]
    nodes_of_prefixes = []
    for prefix in fleet.pinned:
        node, nodes = -1, []  # -1: the root's parent.
        for block in prefix.block_ids:
            first, last = np.searchsorted(parents, node, "left"), np.searchsorted(parents, node, "right")
            place = first + np.searchsorted(ordered[first:last], block)
            if place == last or ordered[place] != block:
                break
            node = int(order[place])
            nodes.append(node)
        nodes_of_prefixes.append(np.array(nodes, np.int32))
    return nodes_of_prefixes


@entry_jit
def pin_nodes(fields, w, nodes):
    """Let worker w hold these nodes, a path from the root, from now on."""
    state = pointer_to(fields)
    for node in nodes:
        pin_tree_node(state, w, np.int64(node))
