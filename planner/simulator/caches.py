"""Prefix caches as vLLM keeps them: which nodes a worker has, which requests use them, which are evicted
first.

A node (of the prefix tree, not a machine) stands for a few KV blocks of a prompt and all blocks before them
(cache_layout.py). An entry is a copy of a node on one worker. An entry whose copy was evicted (`is_cached` 0)
stays while e2's window counts requests by it (`window_uses`).

`used_blocks` of a worker counts the blocks of its running requests; a block that several use counts once.
Idle entries, which no running request uses, fill the rest of the KV cache and are evicted, the least recently
used first, as soon as running requests need the room. So code that looks for free blocks need not know of
caches. A request gives up its last block first and its root last. So the last use of a parent is never
earlier than that of its children, and what stays cached of a prompt is always its beginning.

A node is cached as soon as a step that computes it is formed, so requests admitted into the same step find
it. Two requests that compute the same node in one step both keep their copy; searches find the older one.

A request leaves blocks behind that belong to no node, above all those of its output. They are cached too, in
an entry whose node is -2 - r for request r (-1 is NONE). Only the request itself finds them again, after a
preemption; otherwise they take room until they are the least recently used. Decode workers have no nodes: no
block of a request there belongs to one.

Drafters that read the LLM's hidden states (`dropped_blocks` of the worker's type) need those of the last
tokens before what is computed: vLLM computes the last KV block that it finds once more, into another block.

Where layers have sliding-window attention (`taken_blocks_per_token` of the worker's type), a prefix is found
only up to a node whose attention window is still there. The blocks of a window go back to the pool when the
window has moved on, and are given out again in the order in which they came back.

The router knows by bits which workers have a node. Some routers count a prompt as cached when they send it to
a worker (`promise_prompt`), others when it is computed. They learn of an eviction NOTICE_S later; cache-aware
routing never does.

Routing e2, that of Preble, goes by the requests that were routed in the last WINDOW_S seconds: e2's window.

Letters: w is a worker, r a request, e an entry.
"""

from __future__ import annotations

import numpy as np

from planner.policies import CACHE_AWARE
from planner.simulator.cache_layout import (
    FIRST_IN_LATER_HALF,
    FIRST_NOTICE,
    FIRST_ROUTED,
    FREE,
    LAST_ROUTED,
    NODELESS,
    NOTICE_S,
    NOTICES,
    TREE_NODE_BLOCKS,
    TREE_NODE_TOKENS,
    WINDOW_S,
)
from planner.simulator.layout import ARRIVAL_POOL, BLOCK, DECODE, NONE, ONE, ROUTING, ZERO
from planner.simulator.numba_compile import kernel_jit, small_jit, where_has


@small_jit
def _first_slot(state, w, node):
    """The hash of (node, worker): where the search for it in the index begins.

    The two factors are odd constants that spread bits well: those of Fibonacci hashing and of xxHash64. The
    index has 2^k places, so `&` is a remainder; at least half are free, so every search ends.
    """
    mixed = np.uint64(node) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(w + 1) * np.uint64(0xC2B2AE3D27D4EB4F)
    return np.int64(mixed >> np.uint64(32)) & (len(state.caches.tree_node_index) - 1)


@kernel_jit
def find_entry(state, w, node):
    """The first entry of a node on worker w, cached or not; NONE if there is none."""
    index, entries = state.caches.tree_node_index, state.caches.entries
    slot = _first_slot(state, w, node)
    while index[slot] != 0:
        e = np.int64(index[slot]) - 1
        if entries[e].node == node and entries[e].worker == w:
            return e
        slot = (slot + 1) & (len(index) - 1)
    return NONE


@kernel_jit
def _take_free_entry(state, w, node, blocks):
    """Take an entry from the free list for a node of `blocks` blocks; returns it."""
    caches = state.caches
    e = caches.numbers[FREE]
    entry = caches.entries[e]
    # Free entries are linked by `newer`, as a distance: 0, as in a new array, is the entry after this one.
    caches.numbers[FREE] = e + 1 + entry.newer
    entry.node, entry.worker, entry.blocks, entry.twin = node, w, blocks, NONE
    entry.refs, entry.is_cached, entry.is_on_disk, entry.window_uses, entry.is_late = 0, 0, 0, 0, 0
    return e


@small_jit
def _free_entry(state, e):
    """Put entry e back onto the free list."""
    state.caches.entries[e].worker = NONE
    # After an entry for blocks of no node (below NONE), one more such entry may be made.
    state.caches.numbers[NODELESS] += state.caches.entries[e].node < NONE
    state.caches.entries[e].newer = state.caches.numbers[FREE] - e - 1
    state.caches.numbers[FREE] = e


@kernel_jit
def add_entry(state, w, node):
    """Make a new entry, neither cached nor used yet, and return it.

    If no entry is free, the oldest requests leave e2's window, which frees entries: without those of the
    window there are enough for all nodes that memory can hold (cache_layout.py). The first entry of a node on
    a worker goes into the index; further ones are linked behind it (`twin`).
    """
    caches = state.caches
    while caches.numbers[FREE] == NONE:
        forget_routed(state)
    copy = find_entry(state, w, node)
    e = _take_free_entry(state, w, node, caches.numbers[TREE_NODE_BLOCKS])
    if copy != NONE:
        while caches.entries[copy].twin != NONE:
            copy = np.int64(caches.entries[copy].twin)
        caches.entries[copy].twin = e
        return e
    slot = _first_slot(state, w, node)
    while caches.tree_node_index[slot] != 0:
        slot = (slot + 1) & (len(caches.tree_node_index) - 1)
    caches.tree_node_index[slot] = e + 1
    return e


@small_jit
def _slot_of(state, e):
    """Where entry e, the first of its node, is in the index."""
    index, entries = state.caches.tree_node_index, state.caches.entries
    slot = _first_slot(state, entries[e].worker, entries[e].node)
    while index[slot] != e + 1:
        slot = (slot + 1) & (len(index) - 1)
    return slot


@kernel_jit
def drop_entry(state, e):
    """Take an entry out of the index and free it.

    The index is a hash table with linear probing: entries behind the hole move up where their own search
    would otherwise end at it.
    """
    index, entries = state.caches.tree_node_index, state.caches.entries
    last = len(index) - 1
    hole = _slot_of(state, e)
    slot = hole
    while True:
        slot = (slot + 1) & last
        if index[slot] == 0:
            break
        moved = entries[index[slot] - 1]
        home = _first_slot(state, moved.worker, moved.node)
        if ((slot - home) & last) >= ((slot - hole) & last):
            index[hole] = index[slot]
            hole = slot
    index[hole] = 0
    _free_entry(state, e)


@kernel_jit
def list_idle(state, w, e):
    """Put entry e, which no running request uses any more, at the newest end of its worker's idle entries."""
    cache, entries = state.caches.workers[w], state.caches.entries
    entries[e].older, entries[e].newer = cache.newest, NONE
    if cache.newest == NONE:
        cache.oldest = e
    else:
        entries[cache.newest].newer = e
    cache.newest = e
    cache.idle_blocks += entries[e].blocks


@kernel_jit
def list_oldest(state, w, e):
    """Put entry e at the oldest end of its worker's idle entries."""
    cache, entries = state.caches.workers[w], state.caches.entries
    entries[e].older, entries[e].newer = NONE, cache.oldest
    if cache.oldest == NONE:
        cache.newest = e
    else:
        entries[cache.oldest].older = e
    cache.oldest = e
    cache.idle_blocks += entries[e].blocks


@kernel_jit
def unlist_idle(state, w, e):
    """Take entry e out of its worker's idle entries."""
    cache, entries = state.caches.workers[w], state.caches.entries
    older, newer = entries[e].older, entries[e].newer
    if older == NONE:
        cache.oldest = newer
    else:
        entries[older].newer = newer
    if newer == NONE:
        cache.newest = older
    else:
        entries[newer].older = older
    cache.idle_blocks -= entries[e].blocks


@small_jit
def tree_node_at(state, r, i):
    """The i-th node of request r."""
    return np.int64(state.caches.path[state.caches.prompts[r].start + i])


@small_jit
def cacheable_tree_nodes(state, r):
    """How many nodes of request r, from the first one on, it can at most take from a cache.

    They end before its last token, which is always computed.
    """
    return min(
        state.caches.prompts[r].depth,
        (state.requests[r].length_tokens - 1) // state.caches.numbers[TREE_NODE_TOKENS],
    )


@small_jit
def depth_on(state, w, r):
    """How many nodes of request r worker w may have."""
    return ZERO if state.workers[w].role == DECODE else np.int64(state.caches.prompts[r].depth)


@kernel_jit
def cached_tree_nodes(state, w, r):
    """How many nodes of request r, from the first one on, worker w has cached and can use.

    No node is cached without those before it, so bisection finds the number.
    """
    caches = state.caches
    low, high = ZERO, min(depth_on(state, w, r), cacheable_tree_nodes(state, r))
    while low < high:
        middle = (low + high + 1) // 2
        e = find_entry(state, w, tree_node_at(state, r, middle - 1))
        if e != NONE and caches.entries[e].is_cached:
            low = middle
        else:
            high = middle - 1
    while low > 0 and not _has_attention_window(state, w, r, low - 1):
        low -= 1
    return low


@small_jit
def _has_attention_window(state, w, r, i):
    """Whether the attention window at the end of the i-th node of request r, which is cached, is still there.

    Freed blocks are given out in the order in which they came back. So the window is there if the blocks
    `taken` since its last use are at most as many as are free now.
    """
    worker, cache = state.workers[w], state.caches.workers[w]
    kind = state.types[worker.type]
    if kind.taken_blocks_per_token == 0.0:
        return True
    e = find_entry(state, w, tree_node_at(state, r, i))
    taken = cache.taken_blocks - state.caches.entries[e].window_at
    return taken <= kind.kv_blocks - worker.used_blocks


@where_has("caches", lambda state, w, tokens: None)
def note_taken_blocks(state, w, tokens):
    """Count the blocks that `tokens` new tokens and their windows take: those given back longest ago."""
    kind = state.types[state.workers[w].type]
    state.caches.workers[w].taken_blocks += tokens * kind.taken_blocks_per_token


@small_jit
def _note_attention_window(state, w, node):
    """Note that the attention window at the end of a node on worker w is used now."""
    caches = state.caches
    caches.entries[find_entry(state, w, node)].window_at = np.float32(caches.workers[w].taken_blocks)


@kernel_jit
def _last_whole_node(state, w, r, nodes):
    """The entry of the node after the first `nodes` of request r if its prompt ends with this node, which is
    cached and has several KV blocks; else NONE.

    The prompt's last token must be computed, so this node cannot be used as a whole, but all its KV blocks
    except the last can.
    """
    caches = state.caches
    tokens = caches.numbers[TREE_NODE_TOKENS]
    is_whole = (nodes + 1) * tokens == state.requests[r].length_tokens and nodes < caches.prompts[r].depth
    if caches.numbers[TREE_NODE_BLOCKS] == 1 or nodes < cacheable_tree_nodes(state, r) or not is_whole:
        return NONE
    e = find_entry(state, w, tree_node_at(state, r, nodes))
    return e if e != NONE and caches.entries[e].is_cached else NONE


@kernel_jit
def _hit_blocks(state, w, r, nodes):
    """KV blocks from the first on that request r finds on worker w, which has the first `nodes` of its nodes.

    With drafters that read the LLM's hidden states vLLM drops the last one found (`dropped_blocks`), so that
    it is computed again.
    """
    caches, length = state.caches, state.requests[r].length_tokens
    blocks = nodes * caches.numbers[TREE_NODE_BLOCKS]
    if _last_whole_node(state, w, r, nodes) != NONE:
        blocks += caches.numbers[TREE_NODE_BLOCKS] - 1
    elif nodes == depth_on(state, w, r) and _finds_left_blocks(state, w, r):
        blocks += min(np.int64(caches.entries[caches.prompts[r].left].blocks), (length - 1) // BLOCK - blocks)
    return max(blocks - state.types[state.workers[w].type].dropped_blocks, ZERO)


@kernel_jit
def _part_used(state, w, r, nodes, whole):
    """The entry of the node after the first `whole` of request r, if that node is cached; else NONE."""
    if whole < nodes:
        return find_entry(state, w, tree_node_at(state, r, whole))
    return _last_whole_node(state, w, r, nodes)


@where_has("caches", lambda state, w, r: ZERO)
def shared_blocks(state, w, r):
    """KV blocks that request r needs on worker w and that running requests use already."""
    caches = state.caches
    nodes, blocks, node_blocks = cached_tree_nodes(state, w, r), ZERO, caches.numbers[TREE_NODE_BLOCKS]
    hit = _hit_blocks(state, w, r, nodes)
    whole = min(hit // node_blocks, nodes)
    for i in range(whole):
        if caches.entries[find_entry(state, w, tree_node_at(state, r, i))].refs > 0:
            blocks += node_blocks
    e = _part_used(state, w, r, nodes, whole)
    if e != NONE and caches.entries[e].refs > 0:
        blocks += hit - whole * node_blocks
    return blocks


@kernel_jit
def _use_entry(state, w, r, i, e):
    """Let request r use entry e (`refs`) for its i-th node. KV blocks that nobody used count as used now."""
    caches = state.caches
    if caches.entries[e].refs == 0:
        unlist_idle(state, w, e)
        state.workers[w].used_blocks += caches.entries[e].blocks
    caches.entries[e].refs += 1
    caches.used[caches.prompts[r].start + i] = e
    caches.prompts[r].used_tree_nodes = i + 1


@kernel_jit
def take_prefix(state, w, r, time_s):
    """Let request r, which is admitted, use the cached beginning of its prompt; returns its tokens.

    `used_blocks` counts the blocks of these tokens from now on.
    """
    caches = state.caches
    prompt, request = caches.prompts[r], state.requests[r]
    node_blocks, nodes = caches.numbers[TREE_NODE_BLOCKS], cached_tree_nodes(state, w, r)
    blocks = _hit_blocks(state, w, r, nodes)
    whole = min(blocks // node_blocks, nodes)
    for i in range(whole):
        _use_entry(state, w, r, i, find_entry(state, w, tree_node_at(state, r, i)))
    if whole > 0:
        _note_attention_window(state, w, tree_node_at(state, r, whole - 1))
    part_entry, part_blocks = _part_used(state, w, r, nodes, whole), blocks - whole * node_blocks
    if part_entry != NONE and part_blocks > 0:
        # The node's other blocks are computed once more: into blocks of the request's own (`own_blocks`) if
        # others use the cached ones, else into the cached ones, which the caller counts among the request's
        # new blocks.
        recomputed_blocks = node_blocks - part_blocks
        prompt.own_blocks = recomputed_blocks * (caches.entries[part_entry].refs > 0)
        _use_entry(state, w, r, whole, part_entry)
        state.workers[w].used_blocks -= recomputed_blocks - prompt.own_blocks
    elif whole == depth_on(state, w, r) and _finds_left_blocks(state, w, r):
        _reuse_left_blocks(state, w, r, part_blocks)
    hit = blocks * BLOCK
    request.computed_tokens = hit
    if prompt.hit_tokens == NONE:
        prompt.hit_tokens = hit
        _note_wait(state, r, time_s)
    return hit


@small_jit
def _has_left_blocks(state, w, r):
    """Whether worker w still has blocks that request r left behind besides nodes."""
    e = state.caches.prompts[r].left
    return e != NONE and state.caches.entries[e].worker == w


@small_jit
def _finds_left_blocks(state, w, r):
    """Whether request r comes back after a preemption to worker w, which has what it left behind."""
    return state.requests[r].preemptions > 0 and _has_left_blocks(state, w, r)


@kernel_jit
def _free_left_blocks(state, w, r):
    """Free the blocks that request r left behind on worker w besides nodes."""
    prompt = state.caches.prompts[r]
    unlist_idle(state, w, prompt.left)
    _free_entry(state, prompt.left)
    prompt.left = NONE


@kernel_jit
def _reuse_left_blocks(state, w, r, blocks):
    """Let request r, back after a preemption, use `blocks` of the blocks that it left behind; the others are
    free from now on.
    """
    _free_left_blocks(state, w, r)
    state.workers[w].used_blocks += blocks


@where_has("caches", lambda state, w, r: None)
def keep_prefix(state, w, r):
    """Cache the nodes of request r that the step being formed fills: others can use them from now on."""
    caches = state.caches
    prompt = caches.prompts[r]
    full = min(depth_on(state, w, r), state.requests[r].computed_tokens // caches.numbers[TREE_NODE_TOKENS])
    for i in range(prompt.used_tree_nodes, full):
        node = tree_node_at(state, r, i)
        e = find_entry(state, w, node)
        # An entry that only e2's window counts gets the copy. A copy that is cached is of a request that
        # computes the same prompt now: both requests keep theirs, each in an entry of its own.
        if e == NONE or caches.entries[e].is_cached:
            e = add_entry(state, w, node)
        entry = caches.entries[e]
        entry.is_cached, entry.refs = 1, 1
        _note_attention_window(state, w, node)
        caches.used[prompt.start + i] = e
        prompt.used_tree_nodes = i + 1


@where_has("caches", lambda state, w, r: None)
def show_prefix(state, w, r):
    """Let the router learn of the full nodes of request r, of which another chunk is computed."""
    prompt = state.caches.prompts[r]
    for i in range(prompt.shown_tree_nodes, prompt.used_tree_nodes):
        _show_node(state, w, tree_node_at(state, r, i))
    prompt.shown_tree_nodes = prompt.used_tree_nodes


@kernel_jit
def _release_entry(state, w, e, is_late):
    """Release entry e of worker w, which a request uses no more: the entry is idle if no other request uses
    it.

    If the entry is released too late for the next step (`is_late`), which is formed already, it stays used
    until the step after that is formed. Until then it is in the list of late entries, which counts as a user
    (`refs`) and may be the last one. The caller has taken the entry's blocks off `used_blocks`.
    """
    cache, entry = state.caches.workers[w], state.caches.entries[e]
    if is_late:
        if entry.is_late:
            _unlist_late(state, w, e)
        entry.refs += 1 - entry.is_late
        entry.is_late, entry.older, entry.newer = 1, cache.last_late, NONE
        if cache.last_late == NONE:
            cache.first_late = e
        else:
            state.caches.entries[cache.last_late].newer = e
        cache.last_late = e
    if entry.refs == 0:
        list_idle(state, w, e)
    else:
        state.workers[w].used_blocks += entry.blocks


@kernel_jit
def _unlist_late(state, w, e):
    """Take entry e out of its worker's list of late entries (`_release_entry`)."""
    cache, entries = state.caches.workers[w], state.caches.entries
    older, newer = entries[e].older, entries[e].newer
    if older == NONE:
        cache.first_late = newer
    else:
        entries[older].newer = newer
    if newer == NONE:
        cache.last_late = older
    else:
        entries[newer].older = older


@where_has("caches", lambda state, w: ZERO)
def late_entry_blocks(state, w):
    """KV blocks that count as used on worker w only because its engine has formed the next step already."""
    entries, blocks = state.caches.entries, ZERO
    e = np.int64(state.caches.workers[w].first_late)
    while e != NONE:
        if entries[e].refs == 1:  # No request uses it besides.
            blocks += entries[e].blocks
        e = np.int64(entries[e].newer)
    return blocks


@where_has("caches", lambda state, w: None)
def release_late(state, w):
    """Release the entries of worker w that were released too late for the step that it has formed now."""
    cache, entries = state.caches.workers[w], state.caches.entries
    e = np.int64(cache.first_late)
    cache.first_late, cache.last_late = NONE, NONE
    while e != NONE:
        following = np.int64(entries[e].newer)
        entries[e].is_late = 0
        entries[e].refs -= 1
        state.workers[w].used_blocks -= entries[e].blocks
        _release_entry(state, w, e, False)
        e = following


@where_has("caches", lambda state, w, r, cached_tokens, is_late: None)
def release_prefix(state, w, r, cached_tokens, is_late):
    """Turn what request r, which has left worker w, has there into idle entries.

    The caller has taken all its blocks off `used_blocks`; nodes that others use are counted again here, and
    all that is released too late for the next step (`is_late`). Blocks that belong to no node, up to its
    first `cached_tokens`, become one entry.
    """
    caches, worker = state.caches, state.workers[w]
    prompt, node_blocks = caches.prompts[r], caches.numbers[TREE_NODE_BLOCKS]
    blocks = cached_tokens // BLOCK - prompt.used_tree_nodes * node_blocks + prompt.own_blocks
    if _has_left_blocks(state, w, r):  # The request did not reuse them: nodes before them were lost.
        _free_left_blocks(state, w, r)
    prompt.left = NONE  # What it left on another worker stays there until it is the least recently used.
    # Without a free entry for them, the blocks are free at once.
    if blocks > 0 and caches.numbers[NODELESS] > 0 and caches.numbers[FREE] != NONE:
        caches.numbers[NODELESS] -= 1
        e = _take_free_entry(state, w, -2 - r, blocks)
        prompt.left = e
        _release_entry(state, w, e, is_late)
    worker.used_blocks -= prompt.own_blocks  # A copy of its own is a block more than its tokens fill.
    for i in range(prompt.used_tree_nodes - 1, -1, -1):
        e = np.int64(caches.used[prompt.start + i])
        caches.entries[e].refs -= 1
        _release_entry(state, w, e, is_late)
    prompt.used_tree_nodes, prompt.shown_tree_nodes, prompt.own_blocks, prompt.expected_tokens = 0, 0, 0, 0


@where_has("caches", lambda state, w, node: None)
def pin_tree_node(state, w, node):
    """Let worker w have a node and never evict it, as if it were always in use. The router knows."""
    caches = state.caches
    e = find_entry(state, w, node)
    if e == NONE:
        e = add_entry(state, w, node)
        caches.entries[e].is_cached, caches.entries[e].refs = 1, 1
        state.workers[w].used_blocks += caches.numbers[TREE_NODE_BLOCKS]
    elif caches.entries[e].refs == 0:
        unlist_idle(state, w, e)
        caches.entries[e].refs = 1
        state.workers[w].used_blocks += caches.entries[e].blocks
    _show_node(state, w, node)
    caches.pinned[node, w // 64] |= worker_bit(w)


@where_has("caches", lambda state, r: None)
def lose_prefix(state, r):
    """Forget what request r used of the cache of its worker, which went down."""
    prompt = state.caches.prompts[r]
    prompt.used_tree_nodes, prompt.shown_tree_nodes, prompt.own_blocks, prompt.expected_tokens = 0, 0, 0, 0


@where_has("caches", lambda state, w, coming, time_s: None)
def evict_idle(state, w, coming, time_s):
    """Evict idle entries of worker w, the least recently used first, until the KV cache holds all blocks.

    `used_blocks` has grown, and grows by `coming` blocks more in this step. `late_blocks` were given back too
    late for this step (layout.py).
    """
    worker, cache = state.workers[w], state.caches.workers[w]
    most_idle_blocks = state.types[worker.type].kv_blocks - worker.used_blocks - worker.late_blocks - coming
    while cache.idle_blocks > 0 and cache.idle_blocks > most_idle_blocks:
        e = cache.oldest
        entry = state.caches.entries[e]
        # Blocks of no node can go one by one, a node only as a whole.
        if entry.node < NONE and entry.blocks > cache.idle_blocks - most_idle_blocks:
            entry.blocks -= cache.idle_blocks - most_idle_blocks
            cache.idle_blocks = max(most_idle_blocks, ZERO)
            return
        unlist_idle(state, w, e)
        _evict_entry(state, w, e, time_s)


@kernel_jit
def _evict_entry(state, w, e, time_s):
    """Evict entry e from worker w: the router learns of it at once, by a notice, or never (CACHE_AWARE)."""
    caches = state.caches
    entry = caches.entries[e]
    if entry.node < NONE:
        owner = caches.prompts[-2 - np.int64(entry.node)]
        if owner.left == e:
            owner.left = NONE
        _free_entry(state, e)
        return
    if len(caches.notices) > 0:  # Of notices that came before, the node counts as there.
        read_notices(state, time_s, ZERO)
    entry.is_cached, entry.refs, entry.is_late = 0, 0, 0
    node = np.int64(entry.node)
    if _free_if_copied(state, w, e):
        return
    if entry.window_uses == 0:
        drop_entry(state, e)
    if state.counters[ROUTING + ARRIVAL_POOL] == CACHE_AWARE:
        return
    if len(caches.notices) == 0:
        _hide_node(state, w, node)
        return
    if caches.numbers[NOTICES] == len(caches.notices):
        # The ring is full: the first notice arrives early.
        read_notices(state, np.inf, caches.numbers[NOTICES] - 1)
    _add_notice(state, w, node, time_s + caches.settings[NOTICE_S])


@kernel_jit
def _add_notice(state, w, node, time_s):
    """Tell the router at `time_s` that worker w has evicted a node: put a notice among those under way.

    Notices are in order of time. Most are added in that order, but those of evictions in a run of decode
    steps come later.
    """
    caches = state.caches
    notices, size = caches.notices, len(caches.notices)
    place = caches.numbers[FIRST_NOTICE] + caches.numbers[NOTICES]
    caches.numbers[NOTICES] += 1
    while place > caches.numbers[FIRST_NOTICE] and notices[(place - 1) % size].time_s > time_s:
        notices[place % size] = notices[(place - 1) % size]
        place -= 1
    notice = notices[place % size]
    notice.time_s, notice.worker, notice.node = time_s, w, node


@kernel_jit
def _free_if_copied(state, w, e):
    """Free entry e if its node has another entry on worker w, which takes its place; True if it has."""
    caches = state.caches
    entry = caches.entries[e]
    copy = find_entry(state, w, entry.node)
    if copy == e:
        if entry.twin == NONE:
            return False
        caches.tree_node_index[_slot_of(state, e)] = entry.twin + 1
        caches.entries[entry.twin].window_uses = entry.window_uses
    else:
        while caches.entries[copy].twin != e:
            copy = np.int64(caches.entries[copy].twin)
        caches.entries[copy].twin = entry.twin
    _free_entry(state, e)
    return True


@small_jit
def worker_bit(w):
    """The bit of worker w in its word (number w // 64) of a set of workers."""
    return np.uint64(1) << np.uint64(w % 64)


@kernel_jit
def _show_node(state, w, node):
    """From now on the router believes that worker w has this node."""
    holders, bit = state.caches.holders[node], worker_bit(w)
    state.caches.workers[w].known_tree_nodes += (holders[w // 64] & bit) == 0
    holders[w // 64] |= bit


@kernel_jit
def _hide_node(state, w, node):
    """From now on the router believes that worker w does not have this node."""
    holders, bit = state.caches.holders[node], worker_bit(w)
    state.caches.workers[w].known_tree_nodes -= (holders[w // 64] & bit) != 0
    holders[w // 64] &= ~bit


@kernel_jit
def promise_prompt(state, w, r):
    """Request r goes to worker w; from now on the router believes that w has the whole prompt."""
    for i in range(state.caches.prompts[r].depth):
        _show_node(state, w, tree_node_at(state, r, i))


@kernel_jit
def read_notices(state, time_s, notices_to_leave):
    """The router reads notices of evictions up to `time_s`, oldest first, until `notices_to_leave` remain."""
    caches = state.caches
    while caches.numbers[NOTICES] > notices_to_leave:
        notice = caches.notices[caches.numbers[FIRST_NOTICE]]
        if notice.time_s > time_s:
            return
        e = find_entry(state, notice.worker, notice.node)
        if e == NONE or caches.entries[e].is_cached == 0:  # The node may have been cached again meanwhile.
            _hide_node(state, notice.worker, notice.node)
        caches.numbers[FIRST_NOTICE] = (caches.numbers[FIRST_NOTICE] + 1) % len(caches.notices)
        caches.numbers[NOTICES] -= 1


@where_has("caches", lambda state, time_s: None)
def read_due_notices(state, time_s):
    """The router reads the notices that have come by `time_s`, before one of their nodes comes or goes."""
    read_notices(state, time_s, ZERO)


@where_has("caches", lambda state, w, time_s: None)
def empty_cache(state, w, time_s):
    """Empty the cache of worker w, which goes down. The router knows at once."""
    caches = state.caches
    for e in range(len(caches.entries)):
        entry = caches.entries[e]
        if entry.worker == w and (entry.is_cached or entry.node < NONE):
            _evict_entry(state, w, e, time_s)
    for node in range(len(caches.holders)):
        _hide_node(state, w, node)
    for node in range(len(caches.pinned)):
        caches.pinned[node, w // 64] &= ~worker_bit(w)
    cache = caches.workers[w]
    cache.oldest, cache.newest, cache.idle_blocks = NONE, NONE, 0
    cache.first_late, cache.last_late = NONE, NONE
    cache.sent_prompts, cache.sent_tokens = 0, 0


@kernel_jit
def remember_routed(state, w, r, time_s, prefill_s):
    """Request r, whose prefill takes `prefill_s`, goes to worker w: add it to e2's window."""
    caches = state.caches
    prompt, cache = caches.prompts[r], caches.workers[w]
    if prompt.worker != NONE:  # In the window already: r is routed again because its worker went down.
        return
    prompt.worker, prompt.routed_s, prompt.next = w, time_s, NONE
    prompt.prefill_s, prompt.output_tokens = prefill_s, NONE
    if caches.numbers[FIRST_ROUTED] == NONE:
        caches.numbers[FIRST_ROUTED] = r
    else:
        caches.prompts[caches.numbers[LAST_ROUTED]].next = r
    caches.numbers[LAST_ROUTED] = r
    if caches.numbers[FIRST_IN_LATER_HALF] == NONE:
        caches.numbers[FIRST_IN_LATER_HALF] = r
    prompt.is_in_later_half, prompt.queue_s = 1, -1.0
    cache.routed += 1
    cache.prefill_s += prefill_s
    # Nodes in a row with equal `window_uses` form a stretch, of `length` nodes so far; i + 1 - length nodes
    # come before it. Preble's key portion of a prompt ends with the last node that other requests share
    # (`uses` above 1) and at which the stretch is longer than what comes before.
    prompt.prefix, uses, length = NONE, ZERO, ZERO
    for i in range(prompt.depth):
        node = tree_node_at(state, r, i)
        e = find_entry(state, w, node)
        if e == NONE:
            e = add_entry(state, w, node)
        caches.entries[e].window_uses += 1
        if caches.entries[e].window_uses != uses:
            uses, length = np.int64(caches.entries[e].window_uses), ZERO
        length += 1
        if uses > 1 and length > i + 1 - length:
            prompt.prefix = node


@kernel_jit
def note_output(state, r):
    """Count the output of request r, which has finished, in the mean of e2's window, if r is in it."""
    prompt = state.caches.prompts[r]
    if prompt.worker == NONE or prompt.output_tokens != NONE:
        return
    prompt.output_tokens = state.requests[r].output_tokens
    state.caches.workers[prompt.worker].finished += 1
    state.caches.workers[prompt.worker].output_tokens += prompt.output_tokens


@kernel_jit
def _note_wait(state, r, time_s):
    """Add the wait of request r, admitted for the first time, to those of the prefix that it shares."""
    prompt = state.caches.prompts[r]
    if prompt.worker == NONE or prompt.prefix == NONE:
        return
    prompt.queue_s = time_s - state.requests[r].arrival_s
    _count_wait(state, r, prompt.is_in_later_half, ONE)


@kernel_jit
def _count_wait(state, r, half, sign):
    """Add (sign 1) or take off (-1) request r's wait in a half of the window (0: the first, 1: the later)."""
    prompt = state.caches.prompts[r]
    if prompt.queue_s >= 0.0:  # It has been admitted; -1 before.
        prefix = state.caches.prefixes[prompt.prefix]
        prefix.wait_count[half] += sign
        prefix.wait_s[half] += sign * prompt.queue_s
        if prefix.wait_count[half] == 0:  # Without waits the sum is 0; rounding may have left a rest.
            prefix.wait_s[half] = 0.0


@kernel_jit
def move_e2_window(state, time_s):
    """Let e2's window end at `time_s`: requests leave it, or go from its later to its first half."""
    caches, window_s = state.caches, state.caches.settings[WINDOW_S]
    first = caches.numbers[FIRST_ROUTED]
    while first != NONE and caches.prompts[first].routed_s < time_s - window_s:
        forget_routed(state)
        first = caches.numbers[FIRST_ROUTED]
    r = caches.numbers[FIRST_IN_LATER_HALF]
    while r != NONE and caches.prompts[r].routed_s < time_s - window_s / 2:
        _count_wait(state, r, ONE, -ONE)
        caches.prompts[r].is_in_later_half = 0
        _count_wait(state, r, ZERO, ONE)
        r = caches.prompts[r].next
    caches.numbers[FIRST_IN_LATER_HALF] = r


@kernel_jit
def forget_routed(state):
    """Take the oldest request out of e2's window, with its share in entries and sums."""
    caches = state.caches
    r = caches.numbers[FIRST_ROUTED]
    prompt = caches.prompts[r]
    w = prompt.worker
    cache = caches.workers[w]
    caches.numbers[FIRST_ROUTED] = prompt.next
    if caches.numbers[FIRST_IN_LATER_HALF] == r:
        caches.numbers[FIRST_IN_LATER_HALF] = prompt.next
    _count_wait(state, r, prompt.is_in_later_half, -ONE)
    prompt.worker = NONE
    cache.routed -= 1
    cache.prefill_s -= prompt.prefill_s
    if cache.routed == 0:  # Without prefills the sum is 0; rounding may have left a rest.
        cache.prefill_s = 0.0
    if prompt.output_tokens != NONE:
        cache.finished -= 1
        cache.output_tokens -= prompt.output_tokens
    for i in range(prompt.depth):
        e = find_entry(state, w, tree_node_at(state, r, i))
        caches.entries[e].window_uses -= 1
        if caches.entries[e].window_uses == 0 and caches.entries[e].is_cached == 0:
            drop_entry(state, e)
