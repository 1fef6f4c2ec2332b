"""Which entity acts next: a binary heap of entities, ordered by (due_s, sequence).

An entity is what an event belongs to: a lane (the batch of an engine, `planner/simulator/layout.py`), the
link that KV crosses or, in some engines, one transfer, or the outside world, which disturbs the fleet. An
entity has at most one coming event, at `state.due_s[entity]`, infinite for none. The first
`state.counters[PENDING]` places of `state.heap` list the entities that have a coming event, and
`state.heap_index[entity]` is an entity's place there, NONE if it has no event.

Of several events at the same time the one with the smallest `state.sequence[entity]` comes first. In
kernel.py entities have a fixed order: their numbers never change, and the engine calls `set_time`. In
splitwise.py and distserve.py the event that was scheduled first comes first: the engine calls
`schedule_event`, which gives the entity the next number.
"""

from __future__ import annotations

from planner.simulator.layout import ENTERED, NEVER, NONE, PENDING, RELEASED, SCHEDULED
from planner.simulator.numba_compile import kernel_jit, small_jit


@small_jit
def _is_before(state, a, b):
    """Whether the next event of entity a comes before that of b."""
    return state.due_s[a] < state.due_s[b] or (
        state.due_s[a] == state.due_s[b] and state.sequence[a] < state.sequence[b]
    )


@kernel_jit
def set_time(state, entity, time_s):
    """Set the time of the entity's next event; NEVER for none. Its sequence stays."""
    heap, heap_index = state.heap, state.heap_index
    state.due_s[entity] = time_s
    place, pending = heap_index[entity], state.counters[PENDING]
    moving = entity  # The entity whose place in the heap is looked for.
    if time_s == NEVER:
        if place == NONE:
            return
        pending -= 1
        state.counters[PENDING] = pending
        heap_index[entity] = NONE
        moving = heap[pending]  # The last of the heap fills the place that became free.
        if place == pending:
            return
    elif place == NONE:
        place = pending
        pending += 1
        state.counters[PENDING] = pending
    while place > 0 and _is_before(state, moving, heap[(place - 1) // 2]):  # Up, while the parent is later.
        heap[place] = heap[(place - 1) // 2]
        heap_index[heap[place]] = place
        place = (place - 1) // 2
    while True:  # Down, while the earlier child is before it.
        child = 2 * place + 1
        if child >= pending:
            break
        if child + 1 < pending and _is_before(state, heap[child + 1], heap[child]):
            child += 1
        if not _is_before(state, heap[child], moving):
            break
        heap[place] = heap[child]
        heap_index[heap[place]] = place
        place = child
    heap[place] = moving
    heap_index[moving] = place


@kernel_jit
def schedule_event(state, entity, time_s):
    """Schedule the entity's next event at `time_s`; NEVER for none.

    It comes after all events of that time that were scheduled before it.
    """
    state.sequence[entity] = state.counters[SCHEDULED]
    state.counters[SCHEDULED] += 1
    set_time(state, entity, time_s)


@small_jit
def next_time_s(state):
    """The time of the first event in the heap; NEVER where there is none."""
    return state.due_s[state.heap[0]] if state.counters[PENDING] > 0 else NEVER


@small_jit
def is_alone(state, time_s):
    """Whether the first event, which is at `time_s`, is the only one at that time.

    The second event of the heap is in place 1 or 2.
    """
    pending = state.counters[PENDING]
    return (pending < 2 or state.due_s[state.heap[1]] > time_s) and (
        pending < 3 or state.due_s[state.heap[2]] > time_s
    )


@kernel_jit
def next_arrival(state):
    """The request whose arrival comes next, before all events of the heap or at the time of the first.

    It counts as entered from now on. NONE where an event comes before the next arrival.
    """
    r = state.counters[ENTERED]
    if r < state.counters[RELEASED] and state.requests[r].arrival_s <= next_time_s(state):
        state.counters[ENTERED] += 1
        return r
    return NONE
