"""Who is next: events in order of time, prompts that wait in order of their key, lists as they came."""

from __future__ import annotations

from planner.simulator.compiled import kernel_jit, small_jit
from planner.simulator.layout import NONE


@small_jit
def _before(state, i, j):
    a, b = state.heap[i], state.heap[j]
    if state.time[a] != state.time[b]:
        return state.time[a] < state.time[b]
    return a < b


@small_jit
def _swap(state, i, j):
    a, b = state.heap[i], state.heap[j]
    state.heap[i], state.heap[j] = b, a
    state.place[b], state.place[a] = i, j


@kernel_jit
def set_time(state, entity, time_s):
    """Move the next event of a lane, the link or the outside world."""
    state.time[entity] = time_s
    i = state.place[entity]
    while i > 0 and _before(state, i, (i - 1) // 2):
        _swap(state, i, (i - 1) // 2)
        i = (i - 1) // 2
    size = len(state.heap)
    while True:
        child = 2 * i + 1
        if child >= size:
            return
        if child + 1 < size and _before(state, child + 1, child):
            child += 1
        if not _before(state, child, i):
            return
        _swap(state, i, child)
        i = child


@kernel_jit
def meld(requests, a, b):
    """The root of two skew heaps made one: smallest key first, among equals the smallest index."""
    if a == NONE:
        return b
    if b == NONE:
        return a
    if requests[b].key < requests[a].key or (requests[b].key == requests[a].key and b < a):
        a, b = b, a
    root = a
    while True:
        right = requests[a].right
        requests[a].right = requests[a].left
        if right == NONE:
            requests[a].left = b
            return root
        if requests[b].key < requests[right].key or (requests[b].key == requests[right].key and b < right):
            right, b = b, right
        requests[a].left = right
        a = right


@kernel_jit
def put(requests, root, r, key):
    """The root of a heap with request r in it."""
    requests[r].key = key
    requests[r].left = NONE
    requests[r].right = NONE
    return meld(requests, root, r)


@small_jit
def without_root(requests, root):
    return meld(requests, requests[root].left, requests[root].right)


@kernel_jit
def append(state, w, which, r):
    """Put request r at the end of a list of worker w."""
    worker = state.workers[w]
    state.requests[r].next = NONE
    if worker.head[which] == NONE:
        worker.head[which] = r
    else:
        state.requests[worker.tail[which]].next = r
    worker.tail[which] = r


@small_jit
def pop(state, w, which):
    worker = state.workers[w]
    r = worker.head[which]
    worker.head[which] = state.requests[r].next
    return r
