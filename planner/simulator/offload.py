"""KV blocks in CPU memory, as vLLM 0.32 keeps them with its OffloadingConnector.

Stores. The full nodes of a prompt are offered to the memory with the step that computes them, those that
were found on the GPU with the first step of their request. What is not there yet is copied, and those used
longest ago leave for it; where they are too few that can leave, nothing of the offer is copied, and with the
next chunk it is all offered once more. A node leaves neither while it is loaded nor for a node of its own
offer. When a request has left its worker its nodes count as used, root last, after the stores of the step
that is formed next. Outputs are not copied, nor is the part of a prompt behind its last node.

Loads. Who is next to be admitted takes what is cached on the GPU, then what follows in CPU memory, always
whether or not it were computed sooner. Its blocks are taken, one load after the other crosses the worker's
link, and meanwhile it waits, without a seat. Blocks that other prompts need, of those under way, are left for
them. Whoever needs a node that is being loaded for somebody else is passed over. A load that has ended is
known to the scheduler a step later, or more with asynchronous scheduling, as KV from another worker is; then
its nodes are cached, and its request goes before all that wait. Of a prompt that is there whole the last
token is computed.

Left out: copies to the memory take no time (they follow each step at lower priority); the last 16 tokens of a
prompt that is on the GPU whole, which vLLM would load, are computed.

A shared store is one memory and one link of all workers, as with vLLM's MooncakeStoreConnector: what one has
stored the others load. A node is there when the step that computes it has ended, not sooner, or others would
load what is not computed yet. Nobody is passed over: who needs what is being loaded for somebody else loads
it too. Nothing leaves that any worker loads, until that worker forms its next step. The store outlives
workers. With asynchronous scheduling a worker looks into it when a step begins, not when it was formed: what
others have stored in the step between is found.

What is here is compiled only for fleets with such memory. Of worker w it is an entry of the caches as those
of "worker" W + w (of a shared store W); `refs` counts its loads, `is_cached` marks those of an offer.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.cache_layout import NODE_BLOCKS, NODE_TOKENS
from planner.simulator.caches import (
    add,
    cached_nodes,
    drop_entry,
    find,
    lose_prefix,
    node_at,
    rest_entry,
    unrest_entry,
)
from planner.simulator.layout import NONE, ONE, ZERO
from planner.simulator.numba_compile import kernel_jit, where_offloaded
from planner.simulator.offload_layout import ASIDE, LEFT, LOADING
from planner.simulator.queue_orders import leave
from planner.simulator.queues import append, pop, put


@kernel_jit
def _memory_of(state, w):
    """The "worker" whose entries are the memory of worker w."""
    return len(state.workers) + state.offload.kept[w].store


@where_offloaded(lambda state: False)
def may_be_passed(state):
    """Whether whoever comes may be admitted before those that wait."""
    return True


@where_offloaded(lambda state, w: False)
def is_loading_kv(state, w):
    """Whether somebody on worker w waits for a load: its steps come one by one."""
    return state.offload.kept[w].head[LOADING] != NONE


@where_offloaded(lambda state, w: ZERO)
def loading_count(state, w):
    """How many wait for a load on worker w."""
    count, r = ZERO, state.offload.kept[w].head[LOADING]
    while r != NONE:
        count += 1
        r = state.requests[r].next
    return count


@where_offloaded(lambda state, w, time_s: np.inf)
def next_load_s(state, w, time_s):
    """When the next load that worker w has not heard of has ended, `time_s` at the earliest; infinite where
    there is none.
    """
    offload, soonest = state.offload, np.inf
    r = offload.kept[w].head[LOADING]
    while r != NONE:
        if offload.loads[r].known_step == 0:
            soonest = min(soonest, max(offload.loads[r].end_s, time_s))
        r = state.requests[r].next
    return soonest


@where_offloaded(lambda state, w, time_s: None)
def hear_of_loads(state, w, time_s):
    """Worker w forms a step: it knows of the loads that it has seen to be ended as it began the last one."""
    offload, worker = state.offload, state.workers[w]
    r = offload.kept[w].head[LOADING]
    while r != NONE:
        load = offload.loads[r]
        if load.known_step == 0 and load.end_s <= time_s:
            load.known_step = worker.steps + state.types[worker.type].kv_delay_steps + 1
        if load.nodes > 0 and is_loaded(state, w, r):
            _pin(state, w, r, -ONE)
            load.nodes = 0
        r = state.requests[r].next


@kernel_jit
def is_loaded(state, w, r):
    """Whether worker w knows that it has all KV of request r, which waits for a load."""
    worker, load = state.workers[w], state.offload.loads[r]
    return load.known_step > 0 and (load.known_step <= worker.steps + 1 or worker.formed_s == np.inf)


@kernel_jit
def _pin(state, w, r, by):
    """So many loads more (fewer) need the nodes that are under way for request r."""
    caches, nodes = state.caches, state.offload.loads[r].nodes
    end = state.requests[r].computed_tokens // caches.numbers[NODE_TOKENS]
    for i in range(end - nodes, end):
        caches.entries[find(state, _memory_of(state, w), node_at(state, r, i))].refs += by


@where_offloaded(lambda state, w, r: ZERO)
def nodes_to_load(state, w, r):
    """How many nodes of request r follow in CPU memory on those that worker w has cached; NONE if one of them
    is being loaded, unless from a shared store.
    """
    if r == NONE:
        return ZERO
    caches = state.caches
    first = cached_nodes(state, w, r)
    most = min(caches.prompts[r].depth, state.requests[r].length_tokens // caches.numbers[NODE_TOKENS])
    if first < most:
        e = find(state, w, node_at(state, r, first))
        if e != NONE and caches.entries[e].is_cached:
            return ZERO  # all of the prompt is
    i, is_under_way = first, False
    while i < most:
        e = find(state, _memory_of(state, w), node_at(state, r, i))
        if e == NONE:
            break
        is_under_way |= caches.entries[e].refs > 0
        i += 1
    return NONE if is_under_way and not state.offload.kept[w].is_shared else i - first


@where_offloaded(lambda state, w, r: None)
def set_aside(state, w, r):
    """Request r, which is next, is passed over in this step."""
    leave(state, w, r)
    append(state.requests, state.offload.kept[w], ASIDE, r)


@where_offloaded(lambda state, w: None)
def put_aside_back(state, w):
    """Whoever was passed over waits where he was."""
    worker, kept = state.workers[w], state.offload.kept[w]
    while kept.head[ASIDE] != NONE:
        r = pop(state.requests, kept, ASIDE)
        worker.first_waiting = put(state.requests, worker.first_waiting, r, state.requests[r].key)


@kernel_jit
def begin_load(state, w, r, nodes, time_s):
    """The next `nodes` nodes of request r, which has left the queue, come from CPU memory: their tokens, of
    which the last of a prompt does not count.
    """
    caches, request = state.caches, state.requests[r]
    load, kept = state.offload.loads[r], state.offload.kept[w]
    hit = request.computed_tokens
    first = hit // caches.numbers[NODE_TOKENS]
    request.computed_tokens = hit + nodes * caches.numbers[NODE_TOKENS]
    load.nodes, load.known_step = nodes, 0
    seconds = nodes * caches.numbers[NODE_BLOCKS] * kept.block_s
    store = state.offload.kept[kept.store]
    load.begun_s = time_s
    load.end_s = max(time_s, store.free_s) + seconds
    store.free_s = load.end_s
    store.busy_s += seconds
    _pin(state, w, r, ONE)
    load.stored = first + nodes
    _see(load, first, load.stored)
    append(state.requests, kept, LOADING, r)
    tokens = min(request.computed_tokens, request.length_tokens - 1) - hit
    if load.loaded_tokens == NONE:
        load.loaded_tokens, load.waited_s = tokens, load.end_s - time_s
    return tokens


@where_offloaded(lambda state, r: None)
def note_no_load(state, r):
    """Request r is admitted, and nothing of it was in CPU memory alone."""
    load = state.offload.loads[r]
    load.loaded_tokens = max(load.loaded_tokens, ZERO)


@kernel_jit
def _see(load, first, end):
    load.first_seen = first if load.first_seen == NONE else min(load.first_seen, first)
    load.last_seen = max(load.last_seen, end)


@where_offloaded(lambda state, l: None)
def store_step(state, l):
    """The step of lane l is formed: its prompts' new nodes are stored, and those of who has left are used."""
    w = state.lanes[l].worker
    kept = state.offload.kept[w]
    if not kept.is_shared:
        _store_prompts(state, l)
    while kept.head[LEFT] != NONE:
        _use_last(state, w, pop(state.offload.loads, kept, LEFT))


@where_offloaded(lambda state, l: None)
def store_ended_step(state, l):
    """The step of lane l has ended: its prompts' new nodes are in a shared store."""
    if state.offload.kept[state.lanes[l].worker].is_shared:
        _store_prompts(state, l)


@kernel_jit
def _store_prompts(state, l):
    lane = state.lanes[l]
    for i in range(lane.prefills):
        _store(state, lane.worker, state.chunks[l, i].request)


@kernel_jit
def _store(state, w, r):
    caches, load = state.caches, state.offload.loads[r]
    memory = _memory_of(state, w)
    first = load.stored
    full = min(caches.prompts[r].depth, state.requests[r].computed_tokens // caches.numbers[NODE_TOKENS])
    if full <= first:
        return
    _see(load, first, full)
    missing = ZERO
    for i in range(first, full):
        e = find(state, memory, node_at(state, r, i))
        if e == NONE:
            missing += 1
        else:
            caches.entries[e].is_cached = 1
    if _make_room(state, w, missing):
        for i in range(first, full):
            if find(state, memory, node_at(state, r, i)) == NONE:
                rest_entry(state, memory, add(state, memory, node_at(state, r, i)))
        load.stored = full
    for i in range(first, full):
        e = find(state, memory, node_at(state, r, i))
        if e != NONE:
            caches.entries[e].is_cached = 0


@kernel_jit
def _make_room(state, w, missing):
    """Room for so many nodes more in CPU memory of worker w; False, and nothing leaves, if there is none."""
    caches, memory = state.caches, _memory_of(state, w)
    cache = caches.workers[memory]
    room = state.offload.kept[state.offload.kept[w].store].nodes
    excess = missing + cache.idle_blocks // caches.numbers[NODE_BLOCKS] - room
    if excess <= 0:
        return True
    e, able = np.int64(cache.oldest), ZERO
    while e != NONE and able < excess:
        able += caches.entries[e].refs == 0 and caches.entries[e].is_cached == 0
        e = np.int64(caches.entries[e].newer)
    if able < excess:
        return False
    e = np.int64(cache.oldest)
    while excess > 0:
        newer = np.int64(caches.entries[e].newer)
        if caches.entries[e].refs == 0 and caches.entries[e].is_cached == 0:
            unrest_entry(state, memory, e)
            drop_entry(state, e)
            excess -= 1
        e = newer
    return True


@kernel_jit
def _use_last(state, w, r):
    """The nodes of request r that it has seen in CPU memory are the last ones used, its root very last."""
    load, memory = state.offload.loads[r], _memory_of(state, w)
    for i in range(load.last_seen - 1, max(load.first_seen, ZERO) - 1, -1):
        e = find(state, memory, node_at(state, r, i))
        if e != NONE:
            unrest_entry(state, memory, e)
            rest_entry(state, memory, e)


@where_offloaded(lambda state, w, r: None)
def leave_memory(state, w, r):
    """Request r has left worker w, which hears of it after the next step is formed."""
    append(state.offload.loads, state.offload.kept[w], LEFT, r)


@where_offloaded(lambda state, r: None)
def start_anew(state, r):
    """Request r has lost its worker, with all that it has seen in CPU memory there."""
    load = state.offload.loads[r]
    load.nodes, load.stored, load.first_seen, load.last_seen = ZERO, ZERO, NONE, ZERO


@where_offloaded(lambda state, w: None)
def forget_memory(state, w):
    """Worker w goes down, and its own CPU memory with it: who waits for a load has nothing computed."""
    kept, caches, memory = state.offload.kept[w], state.caches, _memory_of(state, w)
    if not kept.is_shared:
        for e in range(len(caches.entries)):
            if caches.entries[e].worker == memory:
                drop_entry(state, e)
        cache = caches.workers[memory]
        cache.oldest, cache.newest, cache.idle_blocks = NONE, NONE, 0
        kept.free_s = -np.inf
    kept.head[LEFT] = NONE
    r = kept.head[LOADING]
    while r != NONE:
        if kept.is_shared and state.offload.loads[r].nodes > 0:
            _pin(state, w, r, -ONE)
            state.offload.loads[r].nodes = 0
        state.requests[r].computed_tokens = 0
        lose_prefix(state, r)
        r = state.requests[r].next


@where_offloaded(lambda state, w: NONE)
def pop_loading(state, w):
    """One that waits for a load on worker w, and no longer does; NONE where nobody is left."""
    kept = state.offload.kept[w]
    return NONE if kept.head[LOADING] == NONE else pop(state.requests, kept, LOADING)
