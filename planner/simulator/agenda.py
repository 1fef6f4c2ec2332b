"""Who acts next, where things due at one moment happen in the order in which they were caused.

`time`, `turn` and `place` are by entity (a machine, a rank, a transfer), `heap` lists those that are due,
`marks` counts them.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.compiled import kernel_jit, small_jit
from planner.simulator.layout import NONE

PENDING, TURNS = 0, 1  # of `marks`: entities due, turns given


@small_jit
def _is_before(state, a, b):
    return state.time[a] < state.time[b] or (state.time[a] == state.time[b] and state.turn[a] < state.turn[b])


@kernel_jit
def schedule(state, entity, time_s):
    """The entity acts at `time_s`, after all that is due by then already; np.inf: it has nothing to do."""
    heap, place, marks = state.heap, state.place, state.marks
    i = place[entity]
    if time_s < np.inf:
        if i == NONE:
            i = marks[PENDING]
            marks[PENDING] += 1
        state.time[entity] = time_s
        state.turn[entity] = marks[TURNS]
        marks[TURNS] += 1
    else:
        if i == NONE:
            return
        place[entity] = NONE
        marks[PENDING] -= 1
        if i == marks[PENDING]:
            return
        entity = heap[marks[PENDING]]  # the last one fills the gap
    while i > 0 and _is_before(state, entity, heap[(i - 1) // 2]):
        heap[i] = heap[(i - 1) // 2]
        place[heap[i]] = i
        i = (i - 1) // 2
    while True:
        child = 2 * i + 1
        if child >= marks[PENDING]:
            break
        if child + 1 < marks[PENDING] and _is_before(state, heap[child + 1], heap[child]):
            child += 1
        if not _is_before(state, heap[child], entity):
            break
        heap[i] = heap[child]
        place[heap[i]] = i
        i = child
    heap[i] = entity
    place[entity] = i
