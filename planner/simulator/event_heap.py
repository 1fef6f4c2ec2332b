"""Who acts next: one heap of entities (a lane, a transfer, the outside world) by (due_s, sequence).

`due_s`, `sequence` and `heap_index` of the state are by entity; `heap` lists those that are due, and the
counter PENDING says how many. Where an engine orders what is due at one moment by who it is, the sequence is
the entity's index and stays (`set_time`); where by what was caused first it is a running number (`schedule`).
"""

from __future__ import annotations

import numpy as np

from planner.simulator.layout import ENTERED, NONE, PENDING, RELEASED, SCHEDULED
from planner.simulator.numba_compile import kernel_jit, small_jit


@small_jit
def _is_before(state, a, b):
    return state.due_s[a] < state.due_s[b] or (
        state.due_s[a] == state.due_s[b] and state.sequence[a] < state.sequence[b]
    )


@kernel_jit
def set_time(state, entity, time_s):
    """The entity acts at `time_s`, in its sequence; np.inf: it has nothing to do."""
    heap, heap_index = state.heap, state.heap_index
    state.due_s[entity] = time_s
    i, pending = heap_index[entity], state.counters[PENDING]
    if time_s == np.inf:
        if i == NONE:
            return
        pending -= 1
        state.counters[PENDING] = pending
        heap_index[entity] = NONE
        entity = heap[pending]  # fills the gap
        if i == pending:
            return
    elif i == NONE:
        i = pending
        pending += 1
        state.counters[PENDING] = pending
    while i > 0 and _is_before(state, entity, heap[(i - 1) // 2]):
        heap[i] = heap[(i - 1) // 2]
        heap_index[heap[i]] = i
        i = (i - 1) // 2
    while True:
        child = 2 * i + 1
        if child >= pending:
            break
        if child + 1 < pending and _is_before(state, heap[child + 1], heap[child]):
            child += 1
        if not _is_before(state, heap[child], entity):
            break
        heap[i] = heap[child]
        heap_index[heap[i]] = i
        i = child
    heap[i] = entity
    heap_index[entity] = i


@kernel_jit
def schedule(state, entity, time_s):
    """The entity acts at `time_s`, after all that is due by then already; np.inf: it has nothing to do."""
    state.sequence[entity] = state.counters[SCHEDULED]
    state.counters[SCHEDULED] += 1
    set_time(state, entity, time_s)


@small_jit
def next_time_s(state):
    """When the first entity in the heap is due; infinite where none is."""
    return state.due_s[state.heap[0]] if state.counters[PENDING] > 0 else np.inf


@small_jit
def is_alone(state, time_s):
    """Whether at `time_s`, when the first entity is due, no other one is."""
    pending = state.counters[PENDING]
    return (pending < 2 or state.due_s[state.heap[1]] > time_s) and (
        pending < 3 or state.due_s[state.heap[2]] > time_s
    )


@kernel_jit
def next_arrival(state):
    """The request that arrives next if it is the next to happen, at the latest with others; else NONE."""
    r = state.counters[ENTERED]
    if r < state.counters[RELEASED] and state.requests[r].arrival_s <= next_time_s(state):
        state.counters[ENTERED] += 1
        return r
    return NONE
