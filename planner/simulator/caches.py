"""Prefix caches: the nodes a worker keeps, who uses them, which of them go first.

`used_blocks` of a worker counts the blocks of its running requests, a node that several use once. What is
cached but in use by nobody fills the rest, and leaves from the least recently used on as soon as those grow
into it; so whoever asks for free blocks need not know of caches. A request lets go of its last node first and
of its root last: a parent is never older than its children, and what is cached of a prompt is always its
beginning.

The router knows the nodes of all workers as bits. Some routers take a prompt for cached where they send it
(`promise`), the others when it is computed. They hear of an eviction `NOTICE_S` later, cache-aware never.
"""

from __future__ import annotations

import numpy as np

from planner.policies import CACHE_AWARE
from planner.simulator.cache_layout import (
    FIRST_LATE,
    FIRST_NOTICE,
    FIRST_ROUTED,
    FREE,
    LAST_ROUTED,
    NODE_BLOCKS,
    NODE_TOKENS,
    NOTICE_S,
    NOTICES,
    WINDOW_S,
)
from planner.simulator.compiled import kernel_jit, small_jit, where_cached
from planner.simulator.layout import FRONT, NONE, ONE, ROUTING, ZERO


@small_jit
def _home(state, w, node):
    """Where entry (node, worker) would like to be in the index: two odd constants, the high bits."""
    mixed = np.uint64(node) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(w + 1) * np.uint64(0xC2B2AE3D27D4EB4F)
    return np.int64(mixed >> np.uint64(32)) & (len(state.caches.places) - 1)


@kernel_jit
def find(state, w, node):
    """The entry of a node on worker w, cached or not; NONE where there is none."""
    places, entries = state.caches.places, state.caches.entries
    place = _home(state, w, node)
    while places[place] != NONE:
        entry = entries[places[place]]
        if entry.node == node and entry.worker == w:
            return np.int64(places[place])
        place = (place + 1) & (len(places) - 1)
    return NONE


@kernel_jit
def add(state, w, node):
    """A new entry, neither cached nor shared yet; where none is free e2 forgets its oldest request."""
    caches = state.caches
    while caches.numbers[FREE] == NONE:
        forget_routed(state)
    e = caches.numbers[FREE]
    entry = caches.entries[e]
    caches.numbers[FREE] = entry.newer
    entry.node, entry.worker, entry.refs, entry.is_cached, entry.shares = node, w, 0, 0, 0
    place = _home(state, w, node)
    while caches.places[place] != NONE:
        place = (place + 1) & (len(caches.places) - 1)
    caches.places[place] = e
    return e


@kernel_jit
def _drop(state, e):
    """Take an entry out of the index: those behind it move up, so that no search ends too early."""
    places, entries = state.caches.places, state.caches.entries
    last = len(places) - 1
    hole = _home(state, entries[e].worker, entries[e].node)
    while places[hole] != e:
        hole = (hole + 1) & last
    place = hole
    while True:
        place = (place + 1) & last
        if places[place] == NONE:
            break
        home = _home(state, entries[places[place]].worker, entries[places[place]].node)
        if ((place - home) & last) >= ((place - hole) & last):
            places[hole] = places[place]
            hole = place
    places[hole] = NONE
    entries[e].newer = state.caches.numbers[FREE]
    state.caches.numbers[FREE] = e


@kernel_jit
def _rest(state, w, e):
    """Nobody uses entry e any more: the most recently used of its worker."""
    cache, entries = state.caches.workers[w], state.caches.entries
    entries[e].older, entries[e].newer = cache.newest, NONE
    if cache.newest == NONE:
        cache.oldest = e
    else:
        entries[cache.newest].newer = e
    cache.newest = e
    cache.idle_nodes += 1


@kernel_jit
def _unrest(state, w, e):
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
    cache.idle_nodes -= 1


@small_jit
def node_at(state, r, i):
    """The i-th node of request r."""
    return np.int64(state.caches.path[state.caches.prompts[r].start + i])


@small_jit
def cacheable(state, r):
    """Nodes of request r that a cache may spare it: all but its last token."""
    return min(
        state.caches.prompts[r].depth,
        (state.requests[r].length_tokens - 1) // state.caches.numbers[NODE_TOKENS],
    )


@kernel_jit
def cached_nodes(state, w, r, refs):
    """How many nodes of request r worker w has, in use by at least so many; they are the first ones."""
    caches = state.caches
    low, high = ZERO, cacheable(state, r)
    while low < high:
        middle = (low + high + 1) // 2
        e = find(state, w, node_at(state, r, middle - 1))
        if e != NONE and caches.entries[e].is_cached and caches.entries[e].refs >= refs:
            low = middle
        else:
            high = middle - 1
    return low


@where_cached(lambda state, w, r: ZERO)
def shared_blocks(state, w, r):
    """KV blocks that request r needs on worker w and that others hold already."""
    return cached_nodes(state, w, r, ONE) * state.caches.numbers[NODE_BLOCKS]


@kernel_jit
def take_prefix(state, w, r, coming, time_s):
    """Request r is admitted and `used_blocks` has grown by all of it: it uses what is cached. Tokens hit."""
    caches, worker = state.caches, state.workers[w]
    prompt = caches.prompts[r]
    nodes = cached_nodes(state, w, r, ZERO)
    for i in range(nodes):
        e = find(state, w, node_at(state, r, i))
        if caches.entries[e].refs == 0:
            _unrest(state, w, e)
        else:
            worker.used_blocks -= caches.numbers[NODE_BLOCKS]
        caches.entries[e].refs += 1
    prompt.shared_nodes = nodes
    hit = nodes * caches.numbers[NODE_TOKENS]
    state.requests[r].computed_tokens = hit
    if prompt.hit_tokens == NONE:
        prompt.hit_tokens = hit
        _note_wait(state, r, time_s)
    evict(state, w, coming, time_s)
    return hit


@where_cached(lambda state, w, r: None)
def keep_prefix(state, w, r):
    """Another chunk of request r is computed: its full blocks can be used by others. Where another has
    computed the same meanwhile, one copy is kept.
    """
    caches, worker = state.caches, state.workers[w]
    prompt = caches.prompts[r]
    full = min(prompt.depth, state.requests[r].computed_tokens // caches.numbers[NODE_TOKENS])
    for i in range(prompt.shared_nodes, full):
        node = node_at(state, r, i)
        e = find(state, w, node)
        if e == NONE:
            e = add(state, w, node)
        entry = caches.entries[e]
        if entry.is_cached == 0:
            entry.is_cached = 1
            _show(state, w, node)
        elif entry.refs == 0:
            _unrest(state, w, e)
        else:
            worker.used_blocks -= caches.numbers[NODE_BLOCKS]
        entry.refs += 1
    prompt.shared_nodes = max(prompt.shared_nodes, full)


@where_cached(lambda state, w, r: None)
def release_prefix(state, w, r):
    """Request r has left worker w and `used_blocks` has shrunk by all of it: what others use stays."""
    caches, worker = state.caches, state.workers[w]
    prompt = caches.prompts[r]
    for i in range(prompt.shared_nodes - 1, -1, -1):
        e = find(state, w, node_at(state, r, i))
        caches.entries[e].refs -= 1
        if caches.entries[e].refs == 0:
            _rest(state, w, e)
        else:
            worker.used_blocks += caches.numbers[NODE_BLOCKS]
    prompt.shared_nodes = 0
    prompt.expected_tokens = 0


@where_cached(lambda state, r: None)
def lose_prefix(state, r):
    """The worker of request r went down with its cache."""
    state.caches.prompts[r].shared_nodes = 0
    state.caches.prompts[r].expected_tokens = 0


@where_cached(lambda state, w, coming, time_s: None)
def evict(state, w, coming, time_s):
    """`used_blocks` has grown, and grows by `coming` in this step: nodes that nobody uses make room, the
    least recently used first.
    """
    worker, cache = state.workers[w], state.caches.workers[w]
    blocks, each = state.types[worker.type].kv_blocks, state.caches.numbers[NODE_BLOCKS]
    while cache.idle_nodes > 0 and worker.used_blocks + coming + cache.idle_nodes * each > blocks:
        e = cache.oldest
        _unrest(state, w, e)
        _uncache(state, w, e, time_s)


@kernel_jit
def _uncache(state, w, e, time_s):
    caches = state.caches
    entry = caches.entries[e]
    entry.is_cached, entry.refs = 0, 0
    node = np.int64(entry.node)
    if entry.shares == 0:
        _drop(state, e)
    if state.counters[ROUTING + FRONT] == CACHE_AWARE:
        return
    if len(caches.notices) == 0:
        _hide(state, w, node)
        return
    if caches.numbers[NOTICES] == len(caches.notices):
        hear(state, np.inf, caches.numbers[NOTICES] - 1)
    at = (caches.numbers[FIRST_NOTICE] + caches.numbers[NOTICES]) % len(caches.notices)
    notice = caches.notices[at]
    notice.time_s, notice.worker, notice.node = time_s + caches.settings[NOTICE_S], w, node
    caches.numbers[NOTICES] += 1


@kernel_jit
def _show(state, w, node):
    """The router believes worker w to have a node."""
    holders, bit = state.caches.holders[node], np.uint64(1) << np.uint64(w % 64)
    state.caches.workers[w].known_nodes += (holders[w // 64] & bit) == 0
    holders[w // 64] |= bit


@kernel_jit
def _hide(state, w, node):
    holders, bit = state.caches.holders[node], np.uint64(1) << np.uint64(w % 64)
    state.caches.workers[w].known_nodes -= (holders[w // 64] & bit) != 0
    holders[w // 64] &= ~bit


@kernel_jit
def promise(state, w, r):
    """Request r goes to worker w, which will have its prompt."""
    for i in range(state.caches.prompts[r].depth):
        _show(state, w, node_at(state, r, i))


@kernel_jit
def hear(state, time_s, most_left):
    """The router hears of evictions up to `time_s`, of all but `most_left`."""
    caches = state.caches
    while caches.numbers[NOTICES] > most_left:
        notice = caches.notices[caches.numbers[FIRST_NOTICE]]
        if notice.time_s > time_s:
            return
        e = find(state, notice.worker, notice.node)
        if e == NONE or caches.entries[e].is_cached == 0:  # else it came back
            _hide(state, notice.worker, notice.node)
        caches.numbers[FIRST_NOTICE] = (caches.numbers[FIRST_NOTICE] + 1) % len(caches.notices)
        caches.numbers[NOTICES] -= 1


@where_cached(lambda state, w, time_s: None)
def empty_cache(state, w, time_s):
    """Worker w goes down, and the router knows."""
    caches = state.caches
    for e in range(len(caches.entries)):
        entry = caches.entries[e]
        if entry.worker == w and entry.is_cached:
            _uncache(state, w, e, time_s)
    for node in range(len(caches.holders)):
        _hide(state, w, node)
    cache = caches.workers[w]
    cache.oldest, cache.newest, cache.idle_nodes = NONE, NONE, 0


@kernel_jit
def remember_routed(state, w, r, time_s, prefill_s, decode_s):
    """Request r, to be prefilled in `prefill_s`, goes to worker w: e2's window has it for a while."""
    caches = state.caches
    prompt, cache = caches.prompts[r], caches.workers[w]
    if prompt.worker != NONE:  # routed once more after its worker went down
        return
    prompt.worker, prompt.routed_s, prompt.next = w, time_s, NONE
    prompt.prefill_s, prompt.decode_s = prefill_s, decode_s
    if caches.numbers[FIRST_ROUTED] == NONE:
        caches.numbers[FIRST_ROUTED] = r
    else:
        caches.prompts[caches.numbers[LAST_ROUTED]].next = r
    caches.numbers[LAST_ROUTED] = r
    if caches.numbers[FIRST_LATE] == NONE:
        caches.numbers[FIRST_LATE] = r
    prompt.is_late, prompt.queue_s = 1, -1.0
    cache.routed += 1
    cache.prefill_s += prefill_s
    cache.decode_s += decode_s
    prompt.prefix, shares, length = NONE, ZERO, ZERO  # of the run of nodes that as many requests share
    for i in range(prompt.depth):
        node = node_at(state, r, i)
        e = find(state, w, node)
        if e == NONE:
            e = add(state, w, node)
        caches.entries[e].shares += 1
        if caches.entries[e].shares != shares:
            shares, length = np.int64(caches.entries[e].shares), ZERO
        length += 1
        if shares > 1 and length > i + 1 - length:
            prompt.prefix = node


@kernel_jit
def _note_wait(state, r, time_s):
    """Request r is admitted for the first time: how long it waited counts for the prefix it shares."""
    prompt = state.caches.prompts[r]
    if prompt.worker == NONE or prompt.prefix == NONE:
        return
    prompt.queue_s = time_s - state.requests[r].arrival_s
    _count_wait(state, r, prompt.is_late, ONE)


@kernel_jit
def _count_wait(state, r, half, sign):
    prompt = state.caches.prompts[r]
    if prompt.queue_s >= 0.0:
        prefix = state.caches.prefixes[prompt.prefix]
        prefix.wait_count[half] += sign
        prefix.wait_s[half] += sign * prompt.queue_s
        if prefix.wait_count[half] == 0:
            prefix.wait_s[half] = 0.0


@kernel_jit
def move_window(state, time_s):
    """e2's window ends now: requests leave it, and its later half."""
    caches, window_s = state.caches, state.caches.settings[WINDOW_S]
    first = caches.numbers[FIRST_ROUTED]
    while first != NONE and caches.prompts[first].routed_s < time_s - window_s:
        forget_routed(state)
        first = caches.numbers[FIRST_ROUTED]
    late = caches.numbers[FIRST_LATE]
    while late != NONE and caches.prompts[late].routed_s < time_s - window_s / 2:
        _count_wait(state, late, ONE, -ONE)
        caches.prompts[late].is_late = 0
        _count_wait(state, late, ZERO, ONE)
        late = caches.prompts[late].next
    caches.numbers[FIRST_LATE] = late


@kernel_jit
def forget_routed(state):
    """The oldest request leaves e2's window."""
    caches = state.caches
    r = caches.numbers[FIRST_ROUTED]
    prompt = caches.prompts[r]
    w = prompt.worker
    cache = caches.workers[w]
    caches.numbers[FIRST_ROUTED] = prompt.next
    if caches.numbers[FIRST_LATE] == r:
        caches.numbers[FIRST_LATE] = prompt.next
    _count_wait(state, r, prompt.is_late, -ONE)
    prompt.worker = NONE
    cache.routed -= 1
    cache.prefill_s -= prompt.prefill_s
    cache.decode_s -= prompt.decode_s
    if cache.routed == 0:
        cache.prefill_s, cache.decode_s = 0.0, 0.0
    for i in range(prompt.depth):
        e = find(state, w, node_at(state, r, i))
        caches.entries[e].shares -= 1
        if caches.entries[e].shares == 0 and caches.entries[e].is_cached == 0:
            _drop(state, e)
