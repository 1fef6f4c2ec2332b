"""KV blocks in CPU memory, as vLLM 0.32 keeps them with its OffloadingConnector.

A node is one of the prefix tree: a few KV blocks of a prompt and all blocks before them (cache_layout.py).

Stores. The full nodes of a prompt are offered to the memory with the step that computes them; nodes that were
cached on the GPU are offered with the first step of their request. Nodes of the offer that are not in the
memory are copied, and those used longest ago leave for them. If too few can leave, nothing of the offer is
copied, and all of it is offered again with the next chunk. A node never leaves while it is being loaded, nor
to make room for another node of the same offer. When a request has left its worker, its nodes count as used,
the root as the very last, after the stores of the step that is formed next. Outputs are not copied, nor is
the part of a prompt behind its last full node.

Loads. The next request to be admitted takes what is cached on the GPU, then what follows in CPU memory, even
if computing it were quicker. It takes its blocks and waits without a seat (max_num_seqs), while one load
after the other crosses the worker's link. A load does not begin while prompts under way need the blocks that
it would take. A request that needs a node that is being loaded for another one is passed over. The scheduler
knows of the end of a load one step later, or more with asynchronous scheduling, as it does of KV from another
worker. Then the nodes are cached, and the request is admitted before all that wait. If a whole prompt is
cached, its last token is computed.

Left out: copies to the memory take no time (they follow each step at lower priority); the last 16 tokens of a
prompt that is on the GPU as a whole, which vLLM would load, are computed.

A disk behind the memory of a worker has the nodes that the memory has no room for: those used longest ago. A
node that is used again is in memory again. What is loaded from the disk crosses its link and, at the same
time, the GPU's; the later end counts. Copies to the disk take no time.

A shared store is one memory and one link of all workers, as with vLLM's MooncakeStoreConnector: workers load
what any of them has stored. A node is in the store once the step that computes it has ended, since others
could not load it sooner. A request that needs nodes that are being loaded for another one loads them too. A
node does not leave while a worker loads it, until that worker forms its next step. The store outlives
workers. With asynchronous scheduling a worker looks into the store when it forms a step, some time before the
step begins. It does not find nodes that others store in that time. A node that it found, and that leaves the
store in that time, comes back as the one used longest ago, in place of others, because the worker keeps it.
In Mooncake it would not leave, since who looks has a lease (ExistKey of its master). That shows where a store
of a few nodes lets go of one in the very step before its load: others find a node too many or too few then.

Workers that decode alone have no such memory: a prompt that was preempted there is computed, as their caches
keep no nodes.

This module is compiled only for fleets with such memory. For others each `where_has` function is compiled as
the lambda in its decorator. The memory of worker w, of W workers, is the entries of the caches under worker
number W + w (a shared store's are under W). There `refs` counts the loads of a node, and `is_cached` marks
the nodes of an offer; on a worker they say that requests use a node, and that it is cached. The fields of
`memories` and `loads` are explained in offload_layout.py. Letters: w is a worker, l one of its lanes (a
batch, layout.py), r a request, e an entry, i a node of a prompt, from the root on. The fields of entries have
32 bits; casts to int64 keep the variables that hold numbers of entries at one type.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.cache_layout import TREE_NODE_BLOCKS, TREE_NODE_TOKENS
from planner.simulator.caches import (
    add_entry,
    cached_tree_nodes,
    depth_on,
    drop_entry,
    find_entry,
    list_idle,
    list_oldest,
    lose_prefix,
    tree_node_at,
    unlist_idle,
)
from planner.simulator.layout import DECODE, NEVER, NONE, ONE, ZERO
from planner.simulator.numba_compile import kernel_jit, small_jit, where_has
from planner.simulator.offload_layout import ASIDE, LEFT, LOADING
from planner.simulator.polling import has_step_in_flight
from planner.simulator.queue_orders import leave_queue
from planner.simulator.queues import append_to_list, insert_in_heap, pop_first


@kernel_jit
def _memory_number(state, w):
    """The worker number under which the caches have the entries of worker w's memory."""
    return len(state.workers) + state.offload.memories[w].store


@where_has("offload", lambda state: False)
def may_be_passed(state):
    """Whether a request may be admitted before others that arrived earlier: while these wait for a load."""
    return True


@where_has("offload", lambda state, w: False)
def is_loading_kv(state, w):
    """Whether a request on worker w waits for a load. The worker's steps are then simulated one by one."""
    return state.offload.memories[w].head[LOADING] != NONE


@where_has("offload", lambda state, w: ZERO)
def loading_count(state, w):
    """How many requests wait for a load on worker w."""
    count, r = ZERO, state.offload.memories[w].head[LOADING]
    while r != NONE:
        count += 1
        r = state.requests[r].next
    return count


@where_has("offload", lambda state, w, time_s: np.inf)
def next_load_s(state, w, time_s):
    """The end of the first load of which worker w does not know yet, but at least `time_s`; infinity without
    such a load.
    """
    offload, soonest = state.offload, np.inf
    r = offload.memories[w].head[LOADING]
    while r != NONE:
        if offload.loads[r].known_step == 0:  # 0: the worker does not know of it.
            soonest = min(soonest, max(offload.loads[r].end_s, time_s))
        r = state.requests[r].next
    return soonest


@where_has("offload", lambda state, w, time_s: None)
def note_ended_loads(state, w, time_s):
    """Let worker w, which forms a step, learn of loads that ended by `time_s`.

    The requests of these loads run from step `known_step` on. Nodes of loads that the worker knows to have
    ended may be evicted again. Most steps of a run are simulated without being formed; if one of them was the
    first to know that a request had left, the request's nodes are made the most recently used here.
    """
    offload, worker = state.offload, state.workers[w]
    memory = offload.memories[w]
    while memory.head[LEFT] != NONE and 0 <= offload.loads[memory.head[LEFT]].left_step < worker.steps - 1:
        _use_most_recently(state, w, pop_first(offload.loads, memory, LEFT))
    r = memory.head[LOADING]
    while r != NONE:
        load = offload.loads[r]
        if load.known_step == 0 and load.end_s <= time_s:
            # The step that is being formed has the number steps + 1. With asynchronous scheduling the worker
            # learns of the load `kv_delay_steps` steps later.
            load.known_step = worker.steps + state.types[worker.type].kv_delay_steps + 1
        if load.nodes > 0 and is_loaded(state, w, r):
            _count_loads(state, w, r, -ONE)
            load.nodes = 0
        r = state.requests[r].next


@kernel_jit
def is_loaded(state, w, r):
    """Whether worker w knows that it has all KV of request r, which waits for a load. An engine without a
    step in flight knows of every load that has ended, and still does in its next steps (`nodes` is 0).
    """
    # The step that is being formed has the number steps + 1.
    worker, load = state.workers[w], state.offload.loads[r]
    knows_now = load.known_step <= worker.steps + 1 or not has_step_in_flight(worker)
    return load.known_step > 0 and (knows_now or load.nodes == 0)


@kernel_jit
def _count_loads(state, w, r, sign):
    """Add `sign`, 1 or -1, to the loads (`refs`) of each node that is being loaded for request r."""
    caches, nodes = state.caches, state.offload.loads[r].nodes
    end = state.requests[r].computed_tokens // caches.numbers[TREE_NODE_TOKENS]
    for i in range(end - nodes, end):
        caches.entries[find_entry(state, _memory_number(state, w), tree_node_at(state, r, i))].refs += sign


@kernel_jit
def _is_found(state, w, node):
    """Whether worker w finds a node in its memory for the step that is being formed.

    An asynchronous engine looks when the step before begins (`formed_s`; NEVER without a step in flight).
    That matters for a shared store alone, because no other worker fills a memory that is not shared.
    """
    worker, offload = state.workers[w], state.offload
    formed_s = worker.formed_s
    looks_now = offload.memories[w].is_shared == 0 or state.types[worker.type].is_async == 0
    if looks_now or formed_s == NEVER:
        return find_entry(state, _memory_number(state, w), node) != NONE
    # Whether the node was there at `formed_s`: stored and not left yet, or returned.
    return offload.stored_s[node] <= formed_s < offload.left_s[node] or offload.returned_s[node] <= formed_s


@kernel_jit
def _note_stored(state, w, node, time_s):
    """Note that a node is in the memory of worker w from now on, if that is a shared store."""
    offload = state.offload
    if offload.memories[w].is_shared:
        if offload.stored_s[node] == NEVER:
            offload.stored_s[node] = time_s
        else:
            offload.returned_s[node] = time_s


@kernel_jit
def _note_gone(state, w, node, time_s):
    """Note that a node is in the memory of worker w no more, if that is a shared store."""
    offload = state.offload
    if offload.memories[w].is_shared:
        if offload.returned_s[node] < NEVER:
            offload.stored_s[node], offload.returned_s[node] = offload.returned_s[node], NEVER
        offload.left_s[node] = time_s


@where_has("offload", lambda state, w, r: ZERO)
def nodes_to_load(state, w, r):
    """How many nodes of request r are in CPU memory, after those that worker w has cached on the GPU.

    NONE if one of them is being loaded for another request and the store is not shared: request r must wait.
    """
    if r == NONE:
        return ZERO
    caches = state.caches
    first = cached_tree_nodes(state, w, r)
    end = min(depth_on(state, w, r), state.requests[r].length_tokens // caches.numbers[TREE_NODE_TOKENS])
    if first < end:
        e = find_entry(state, w, tree_node_at(state, r, first))
        if e != NONE and caches.entries[e].is_cached:
            # The whole prompt is on the GPU: `cached_tree_nodes` leaves the last node out, to compute its
            # last token.
            return ZERO
    i, is_under_way = first, False
    while i < end and _is_found(state, w, tree_node_at(state, r, i)):
        e = find_entry(state, _memory_number(state, w), tree_node_at(state, r, i))
        is_under_way |= e != NONE and caches.entries[e].refs > 0
        i += 1
    return NONE if is_under_way and not state.offload.memories[w].is_shared else i - first


@where_has("offload", lambda state, w, r: None)
def pass_over(state, w, r):
    """Set request r, which is next, aside for the step that is being formed."""
    leave_queue(state, w, r)
    append_to_list(state.requests, state.offload.memories[w], ASIDE, r)


@where_has("offload", lambda state, w: None)
def put_aside_back(state, w):
    """Put the requests that were passed over back into the queue, each where it was."""
    worker, memory = state.workers[w], state.offload.memories[w]
    while memory.head[ASIDE] != NONE:
        r = pop_first(state.requests, memory, ASIDE)
        worker.first_waiting = insert_in_heap(state.requests, worker.first_waiting, r, state.requests[r].key)


@kernel_jit
def hold_tree_nodes(state, w, r, nodes, time_s):
    """Put nodes back into the shared store: of the next `nodes` nodes of request r, those that have left
    since its worker found them. False, with some nodes still missing, if too few others can leave for them.
    """
    caches, number = state.caches, _memory_number(state, w)
    if state.offload.memories[w].is_shared == 0:
        return True
    first, has_all = cached_tree_nodes(state, w, r), True
    _mark_offer(state, w, r, first, first + nodes, 1)
    for i in range(first, first + nodes):
        node = tree_node_at(state, r, i)
        if find_entry(state, number, node) == NONE:
            if not _make_room(state, w, ONE, time_s):
                has_all = False
                break
            e = add_entry(state, number, node)
            list_oldest(state, number, e)
            caches.entries[e].is_cached = 1
            state.offload.left_s[node] = NEVER  # The node counts as never gone.
    _mark_offer(state, w, r, first, first + nodes, 0)
    return has_all


@kernel_jit
def _mark_offer(state, w, r, first, end, mark):
    """Mark those of the nodes `first` to `end` - 1 of request r that are in memory, so that none of them
    leaves to make room for the others; or, with `mark` 0, take the marks away.
    """
    for i in range(first, end):
        e = find_entry(state, _memory_number(state, w), tree_node_at(state, r, i))
        if e != NONE:
            state.caches.entries[e].is_cached = mark


@kernel_jit
def begin_load(state, w, r, nodes, time_s):
    """Load the next `nodes` nodes of request r, which has left the queue, from CPU memory. The caller puts r
    into LOADING.

    Returns the tokens of these nodes, without the last one of a prompt, which is computed. Loads follow each
    other on the link of the memory; those from the disk also on the link of the disk, at the same time.
    """
    caches, request = state.caches, state.requests[r]
    load, memory = state.offload.loads[r], state.offload.memories[w]
    cached_tokens = request.computed_tokens
    first = cached_tokens // caches.numbers[TREE_NODE_TOKENS]
    request.computed_tokens = cached_tokens + nodes * caches.numbers[TREE_NODE_TOKENS]
    load.nodes, load.known_step = nodes, 0
    # The time of a block depends on the worker's parallelism. The link is the store's: that of `memory`
    # itself unless workers share a store.
    load_s = nodes * caches.numbers[TREE_NODE_BLOCKS] * memory.block_s
    store = state.offload.memories[memory.store]
    load.begun_s = time_s
    store.free_s = max(time_s, store.free_s) + load_s
    load.end_s = store.free_s
    store.busy_s += load_s
    on_disk = _nodes_on_disk(state, w, r, first, nodes)
    if on_disk > 0:
        disk_s = on_disk * caches.numbers[TREE_NODE_BLOCKS] * memory.disk_block_s
        memory.disk_free_s = max(time_s, memory.disk_free_s) + disk_s
        load.end_s = max(load.end_s, memory.disk_free_s)
    _count_loads(state, w, r, ONE)
    load.stored = first + nodes  # What comes from the memory is not offered to it.
    _note_used_tree_nodes(load, first, load.stored)
    tokens = min(request.computed_tokens, request.length_tokens - 1) - cached_tokens
    if load.loaded_tokens == NONE:  # Only the first admission counts.
        load.loaded_tokens, load.waited_s = tokens, load.end_s - time_s
        load.disk_tokens = min(on_disk * caches.numbers[TREE_NODE_TOKENS], tokens)
    return tokens


@kernel_jit
def _nodes_on_disk(state, w, r, first, nodes):
    """How many of the `nodes` nodes of request r from the `first` on are on the disk of worker w."""
    count = ZERO
    for i in range(first, first + nodes):
        e = find_entry(state, _memory_number(state, w), tree_node_at(state, r, i))
        count += state.caches.entries[e].is_on_disk
    return count


@kernel_jit
def _list_in_memory(state, w, e):
    """Make entry e the most recently used one of worker w's memory. If the memory is full, its oldest entry
    goes to the disk.
    """
    memory, entries = state.offload.memories[w], state.caches.entries
    list_idle(state, _memory_number(state, w), e)
    entries[e].is_on_disk = 0
    memory.in_memory += 1
    if memory.oldest_in_memory == NONE:
        memory.oldest_in_memory = e
    if memory.in_memory > memory.memory_tree_nodes:
        oldest = memory.oldest_in_memory
        entries[oldest].is_on_disk = 1
        memory.oldest_in_memory = np.int64(entries[oldest].newer)
        memory.in_memory -= 1


@kernel_jit
def _unlist_in_memory(state, w, e):
    """Take entry e out of worker w's memory, or off its disk."""
    memory, entries = state.offload.memories[w], state.caches.entries
    if entries[e].is_on_disk == 0:
        memory.in_memory -= 1
        if memory.oldest_in_memory == e:
            memory.oldest_in_memory = np.int64(entries[e].newer)
    unlist_idle(state, _memory_number(state, w), e)


@where_has("offload", lambda state, r: None)
def note_no_load(state, r):
    """Note that nothing is loaded for request r, which is admitted: its `loaded_tokens` become 0.

    A request that was admitted before, and then preempted, keeps the number of its first admission.
    """
    load = state.offload.loads[r]
    load.loaded_tokens = max(load.loaded_tokens, ZERO)


@kernel_jit
def _note_used_tree_nodes(load, first, end):
    """Let nodes `first` to `end` - 1 of a request count as used when it leaves (`last_seen` is the end)."""
    load.first_seen = first if load.first_seen == NONE else min(load.first_seen, first)
    load.last_seen = max(load.last_seen, end)


@where_has("offload", lambda state, l, time_s: None)
def store_step(state, l, time_s):
    """Store the new nodes of prompts in the step that is formed on lane l. Then the nodes of requests that
    left count as used.
    """
    w = state.lanes[l].worker
    memory = state.offload.memories[w]
    if memory.is_shared:
        _release_known_loads(state, w)
    else:
        _store_prompts(state, l, time_s)
    while memory.head[LEFT] != NONE and _has_seen_leave(state, w, memory.head[LEFT]):
        _use_most_recently(state, w, pop_first(state.offload.loads, memory, LEFT))


@kernel_jit
def _release_known_loads(state, w):
    """Let the nodes of ended loads leave the shared store, if worker w is asynchronous.

    The step that is being formed here has the number steps + 1, and begins now. An asynchronous worker forms
    the step after it, number steps + 2, at once. Loads that it then knows to have ended keep their nodes no
    longer.
    """
    worker = state.workers[w]
    r = state.offload.memories[w].head[LOADING]
    while r != NONE and state.types[worker.type].is_async > 0:
        load = state.offload.loads[r]
        if load.nodes > 0 and 0 < load.known_step <= worker.steps + 2:
            _count_loads(state, w, r, -ONE)
            load.nodes = 0
        r = state.requests[r].next


@small_jit
def _has_seen_leave(state, w, r):
    """Whether worker w knows, in the step that is being formed, that request r has left it. An engine without
    a step in flight knows of all that have left.

    With a shared store the answer matters to other workers at once. An asynchronous worker forms the step
    after this one now, and then knows of all that have left.
    """
    worker = state.workers[w]
    if state.offload.memories[w].is_shared:
        return True
    return state.offload.loads[r].left_step < worker.steps or not has_step_in_flight(worker)


@where_has("offload", lambda state, l, time_s: None)
def store_ended_step(state, l, time_s):
    """Store the new nodes of prompts in the step of lane l that has ended, if the store is shared."""
    if state.offload.memories[state.lanes[l].worker].is_shared:
        _store_prompts(state, l, time_s)


@kernel_jit
def _store_prompts(state, l, time_s):
    """Offer the new nodes of all prompts in the step of lane l."""
    lane = state.lanes[l]
    for i in range(lane.prefills):
        _store_prompt(state, lane.worker, state.chunks[l, i].request, time_s)


@kernel_jit
def _store_prompt(state, w, r, time_s):
    """Offer the nodes of request r that are computed and were not offered yet; all are copied, or none."""
    caches, load = state.caches, state.offload.loads[r]
    memory = _memory_number(state, w)
    first = load.stored
    # The first node that is not computed in full; what is behind the last full node of a prompt is no node.
    end = min(depth_on(state, w, r), state.requests[r].computed_tokens // caches.numbers[TREE_NODE_TOKENS])
    if end <= first:
        return
    _note_used_tree_nodes(load, first, end)
    missing = ZERO
    for i in range(first, end):
        missing += find_entry(state, memory, tree_node_at(state, r, i)) == NONE
    _mark_offer(state, w, r, first, end, 1)
    if _make_room(state, w, missing, time_s):
        for i in range(first, end):
            if find_entry(state, memory, tree_node_at(state, r, i)) == NONE:
                _list_in_memory(state, w, add_entry(state, memory, tree_node_at(state, r, i)))
                _note_stored(state, w, tree_node_at(state, r, i), time_s)
        load.stored = end
    _mark_offer(state, w, r, first, end, 0)


@small_jit
def _can_leave(entry):
    """Whether a node may leave the memory: it is not being loaded, and the offer at hand does not have it."""
    return entry.refs == 0 and entry.is_cached == 0


@kernel_jit
def _make_room(state, w, missing, time_s):
    """Make room for `missing` nodes in the CPU memory of worker w, and return whether there is room. If too
    few nodes can leave, none does.
    """
    caches, number = state.caches, _memory_number(state, w)
    cache = caches.workers[number]
    most_nodes = state.offload.memories[state.offload.memories[w].store].nodes
    # All entries of a memory are idle, since no request runs on it.
    nodes_in_memory = cache.idle_blocks // caches.numbers[TREE_NODE_BLOCKS]
    excess = missing + nodes_in_memory - most_nodes
    if excess <= 0:
        return True
    e, leaving = np.int64(cache.oldest), ZERO
    while e != NONE and leaving < excess:
        leaving += _can_leave(caches.entries[e])
        e = np.int64(caches.entries[e].newer)
    if leaving < excess:
        return False
    e = np.int64(cache.oldest)
    while excess > 0:
        newer = np.int64(caches.entries[e].newer)
        if _can_leave(caches.entries[e]):
            _note_gone(state, w, np.int64(caches.entries[e].node), time_s)
            _unlist_in_memory(state, w, e)
            drop_entry(state, e)
            excess -= 1
        e = newer
    return True


@kernel_jit
def _use_most_recently(state, w, r):
    """Make the nodes of request r that are in CPU memory the most recently used, its root the very last."""
    load, number = state.offload.loads[r], _memory_number(state, w)
    for i in range(load.last_seen - 1, max(load.first_seen, ZERO) - 1, -1):
        e = find_entry(state, number, tree_node_at(state, r, i))
        if e != NONE:
            _unlist_in_memory(state, w, e)
            _list_in_memory(state, w, e)


@where_has("offload", lambda state, w, r: None)
def leave_memory(state, w, r):
    """Let nodes of request r, which leaves worker w as a step ends, count as used after the stores of the
    step that is formed next. An asynchronous engine has formed the step after this one already.
    """
    worker = state.workers[w]
    if worker.role != DECODE:
        is_async = state.types[worker.type].is_async
        state.offload.loads[r].left_step = worker.steps if is_async else np.int64(NONE)
        append_to_list(state.offload.loads, state.offload.memories[w], LEFT, r)


@where_has("offload", lambda state, r: None)
def start_anew(state, r):
    """Forget what request r, which has lost its worker, had stored or loaded there."""
    load = state.offload.loads[r]
    load.nodes, load.stored, load.first_seen, load.last_seen = ZERO, ZERO, NONE, ZERO


@where_has("offload", lambda state, w: None)
def forget_memory(state, w):
    """Empty the CPU memory of worker w, which goes down. Requests that wait for a load lose what was computed
    or found for them.

    A shared store keeps its nodes: only the loads of this worker end.
    """
    memory, caches, number = state.offload.memories[w], state.caches, _memory_number(state, w)
    if not memory.is_shared:
        for e in range(len(caches.entries)):
            if caches.entries[e].worker == number:
                drop_entry(state, e)
        cache = caches.workers[number]
        cache.oldest, cache.newest, cache.idle_blocks = NONE, NONE, 0
        memory.free_s, memory.disk_free_s = -np.inf, -np.inf
        memory.in_memory, memory.oldest_in_memory = ZERO, NONE
    memory.head[LEFT] = NONE
    r = memory.head[LOADING]
    while r != NONE:
        # Without a shared store the entries that count the loads are gone.
        if memory.is_shared and state.offload.loads[r].nodes > 0:
            _count_loads(state, w, r, -ONE)
            state.offload.loads[r].nodes = 0
        state.requests[r].computed_tokens = 0
        lose_prefix(state, r)
        r = state.requests[r].next


@where_has("offload", lambda state, w: NONE)
def pop_loading(state, w):
    """Take one of the requests that wait for a load on worker w out of its list; NONE if it is empty."""
    memory = state.offload.memories[w]
    if memory.head[LOADING] == NONE:
        return NONE
    return pop_first(state.requests, memory, LOADING)
