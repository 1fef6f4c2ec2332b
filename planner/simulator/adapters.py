"""LoRA adapters in the kernel: who is admitted where slots are few, and what a step with adapters takes.

vLLM's scheduler admits no request whose adapter is not in the step where that has as many adapters as there
are slots; it is passed over, and those behind it are looked at. A worker loads the adapters of a step that
are in none of its slots before the step, each into the slot used longest ago by an earlier step; those that
it does not keep in the host's memory come from disk, and the one used longest ago there makes way. Adapters
of the step itself make way for nobody: vLLM's order among these is that of a Python set.

What is here is compiled only for fleets with LoRA. An adapter's number is its place among all, from 1 on; 0
is the LLM alone.
"""

from __future__ import annotations

from planner.simulator.adapter_layout import IN_STEP, LOADING, STAMP, start_with
from planner.simulator.layout import NONE, READY, ZERO
from planner.simulator.numba_compile import kernel_jit, where_lora
from planner.simulator.queue_orders import leave, next_waiting
from planner.simulator.queues import append, pop, put


@where_lora(lambda state: False)
def passes_over(state):
    """Whether whoever comes may be admitted before those that wait."""
    return True


@where_lora(lambda state, w, r, by: None)
def count_waiting(state, w, r, by):
    """So many more (fewer) wait on worker w for the adapter of request r."""
    state.adapters.waiting[w, state.adapters.of[r]] += by


@kernel_jit
def _note(state, r):
    adapters = state.adapters
    a = adapters.of[r]
    if a > 0 and adapters.stamps[a] != adapters.numbers[STAMP]:
        adapters.stamps[a] = adapters.numbers[STAMP]
        adapters.step[adapters.numbers[IN_STEP]] = a
        adapters.numbers[IN_STEP] += 1


@where_lora(lambda state, l: None)
def note_running(state, l):
    """The adapters of the step that is being formed on lane l: so far those of who runs."""
    lane = state.lanes[l]
    state.adapters.numbers[STAMP] += 1
    state.adapters.numbers[IN_STEP] = 0
    for slot in range(lane.decodes):
        _note(state, state.slots[l, slot].request)
    for i in range(lane.prefills):
        _note(state, state.chunks[l, i].request)


@where_lora(lambda state, r: None)
def note_admitted(state, r):
    """Request r is in the step that is being formed."""
    _note(state, r)


@kernel_jit
def _has_slot(state, w, r):
    adapters = state.adapters
    a = adapters.of[r]
    most = adapters.settings[state.workers[w].type].max_loras
    return a == 0 or adapters.numbers[IN_STEP] < most or adapters.stamps[a] == adapters.numbers[STAMP]


@kernel_jit
def _may_follow(state, w):
    """Whether anybody who waits on worker w needs no further slot."""
    adapters = state.adapters
    if adapters.waiting[w, 0] > 0:
        return True
    for i in range(adapters.numbers[IN_STEP]):
        if adapters.waiting[w, adapters.step[i]] > 0:
            return True
    return False


@where_lora(lambda state, w: next_waiting(state, w))
def next_with_slot(state, w):
    """The request of which worker w computes the prompt next, of those that find a slot; who finds none is
    set aside.
    """
    while True:
        r = next_waiting(state, w)
        if r == NONE or _has_slot(state, w, r):
            return r
        if not _may_follow(state, w):
            return NONE
        leave(state, w, r)
        append(state.requests, state.adapters.aside[0], ZERO, r)


@where_lora(lambda state, w: None)
def put_back(state, w):
    """Whoever was set aside waits where he was."""
    worker, aside = state.workers[w], state.adapters.aside[0]
    while aside.head[0] != NONE:
        r = pop(state.requests, aside, ZERO)
        worker.first_waiting = put(state.requests, worker.first_waiting, r, state.requests[r].key)


@where_lora(lambda state, w: state.workers[w].head[READY])
def next_ready(state, w):
    """The first of those whose KV worker w has who finds a slot; those before it are set aside."""
    worker = state.workers[w]
    while worker.head[READY] != NONE and not _has_slot(state, w, worker.head[READY]):
        r = pop(state.requests, worker, READY)
        append(state.requests, state.adapters.aside[0], ZERO, r)
    return worker.head[READY]


@where_lora(lambda state, w: None)
def put_back_ready(state, w):
    """Whoever was set aside stands before the others once more."""
    worker, aside = state.workers[w], state.adapters.aside[0]
    if aside.head[0] == NONE:
        return
    state.requests[aside.tail[0]].next = worker.head[READY]
    if worker.head[READY] == NONE:
        worker.tail[READY] = aside.tail[0]
    worker.head[READY] = aside.head[0]
    aside.head[0] = NONE


@kernel_jit
def _place_for(adapters, places, at, uses, own, a):
    """Put adapter a in the first `own` places, where it is not: instead of the one used longest ago, of those
    that are not in this step; of such as were used together the one with the lowest number. Returns that, 0
    for none.
    """
    oldest = NONE
    for i in range(own):
        b = places[i]
        if b > 0 and adapters.stamps[b] == adapters.numbers[STAMP]:
            continue
        if oldest == NONE or uses[i] < uses[oldest] or (uses[i] == uses[oldest] and b < places[oldest]):
            oldest = i
    b = places[oldest]
    if b > 0:
        at[b] = NONE
    places[oldest], at[a] = a, oldest
    return b


@kernel_jit
def _bring(state, w, a, kind):
    """Seconds until adapter a, which the step of worker w needs, is in a slot."""
    adapters, seconds = state.adapters, 0.0
    stamp = adapters.numbers[STAMP]
    slots, slot_at = adapters.slots[w], adapters.slot_at[w]
    if adapters.kept.shape[1] > 0:
        kept_at, kept_uses = adapters.kept_at[w], adapters.kept_uses[w]
        if kept_at[a] == NONE:
            seconds += kind.disk_s
            b = _place_for(adapters, adapters.kept[w], kept_at, kept_uses, kind.max_cpu_loras, a)
            if b > 0 and slot_at[b] != NONE:  # who is forgotten leaves its slot too
                slots[slot_at[b]], adapters.slot_uses[w, slot_at[b]], slot_at[b] = 0, 0, NONE
        kept_uses[kept_at[a]] = stamp
    if slot_at[a] == NONE:
        seconds += kind.load_s
        _place_for(adapters, slots, slot_at, adapters.slot_uses[w], kind.max_loras, a)
        adapters.loads[w] += 1
        adapters.numbers[LOADING] += 1
    adapters.slot_uses[w, slot_at[a]] = stamp
    return seconds


@where_lora(lambda state, l: 0.0)
def adapters_s(state, l):
    """Seconds that adapters add to the step that was formed on lane l, loads included."""
    note_running(state, l)
    adapters, lane = state.adapters, state.lanes[l]
    adapters.numbers[LOADING] = 0
    active = adapters.numbers[IN_STEP]
    if active == 0:
        return 0.0
    w = lane.worker
    kind = adapters.settings[state.workers[w].type]
    tokens, seconds = 0.0, 0.0
    for slot in range(lane.decodes):
        if adapters.of[state.slots[l, slot].request] > 0:
            tokens += lane.width
    for i in range(lane.prefills):
        if adapters.of[state.chunks[l, i].request] > 0:
            tokens += state.chunks[l, i].tokens
    for i in range(active):
        seconds += _bring(state, w, adapters.step[i], kind)
    seconds += kind.kernels_s + active * kind.read_s + tokens * kind.token_s
    return seconds + min(tokens * kind.visited_frac, float(active)) * kind.experts_s


@where_lora(lambda state: False)
def is_loading(state):
    """Whether the step that was formed last begins with a load: those that follow it do not."""
    return state.adapters.numbers[LOADING] > 0


_start_with = kernel_jit(start_with)


@where_lora(lambda state, w: None)
def forget_adapters(state, w):
    """Worker w is down: nobody waits there, and it comes back as it started."""
    adapters = state.adapters
    kind = adapters.settings[state.workers[w].type]
    adapters.waiting[w, :] = 0
    _start_with(adapters.slots[w], adapters.slot_at[w], adapters.slot_uses[w], kind.max_loras)
    if adapters.kept.shape[1] > 0:
        _start_with(adapters.kept[w], adapters.kept_at[w], adapters.kept_uses[w], kind.max_cpu_loras)
