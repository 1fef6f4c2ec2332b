"""LoRA adapters in the kernel: which requests are admitted when slots are few, and what adapters add to a
step.

When a step has as many adapters as the worker has slots, vLLM's scheduler passes over requests with any other
adapter and looks at those behind them. Before the step, its adapters that are in no slot are loaded, each
into the slot used longest ago. An adapter that is not in the host's memory either comes from disk, and the
adapter used longest ago in that memory makes way for it. An adapter of the step itself never makes way. (vLLM
loads a step's adapters in the order of a Python set, so it may give them other slots.)

This module is compiled only for fleets with LoRA. For others each `where_has` function is compiled as the
lambda in its decorator. Adapters are numbered from 1 on; 0 is the LLM alone. The arrays that this module
changes are explained in `adapter_layout.AdapterState`. Letters: w is a worker, l a lane (a batch of a worker,
layout.py), r a request, a and b adapters.
"""

from __future__ import annotations

from planner.simulator.adapter_layout import IN_STEP, LOADING, STAMP, fill_slots
from planner.simulator.layout import NONE, ZERO
from planner.simulator.numba_compile import kernel_jit, where_has
from planner.simulator.queue_orders import leave_queue, next_waiting
from planner.simulator.queues import append_to_list, insert_in_heap, pop_first


@where_has("adapters", lambda state: False)
def passes_over(state):
    """Whether a request may be admitted before others that arrived earlier and wait for a slot."""
    return True


@kernel_jit
def _add_to_step(state, r):
    """Add the adapter of request r to those of the step that is being formed.

    A stamp is the number of a step: adapters with the current one are in it already.
    """
    adapters = state.adapters
    a = adapters.adapter_of[r]
    if a > 0 and adapters.stamps[a] != adapters.numbers[STAMP]:
        adapters.stamps[a] = adapters.numbers[STAMP]
        adapters.step[adapters.numbers[IN_STEP]] = a
        adapters.numbers[IN_STEP] += 1


@where_has("adapters", lambda state: None)
def begin_step(state):
    """Begin a new step, which has no adapters yet."""
    state.adapters.numbers[STAMP] += 1
    state.adapters.numbers[IN_STEP] = 0


@where_has("adapters", lambda state, l: None)
def note_running(state, l):
    """Begin a new step on lane l: its adapters so far are those of the requests that run there.

    Decodes that wait for a step of prompts (SGLang) count too, as they run together with these prompts
    afterwards.
    """
    _note_step(state, l, True)


@kernel_jit
def _note_step(state, l, with_decodes):
    """Begin a new step on lane l with the adapters of its prompts and, `with_decodes`, of its decodes."""
    lane = state.lanes[l]
    begin_step(state)
    if with_decodes:
        for slot in range(lane.decodes):
            _add_to_step(state, state.slots[l, slot].request)
    for i in range(lane.prefills):
        _add_to_step(state, state.chunks[l, i].request)


@where_has("adapters", lambda state, r: None)
def note_admitted(state, r):
    """Add the adapter of request r, which is admitted to the step that is being formed."""
    _add_to_step(state, r)


@where_has("adapters", lambda state, w, r: True)
def has_slot(state, w, r):
    """Whether the step being formed on worker w has a slot for the adapter of request r."""
    adapters = state.adapters
    a = adapters.adapter_of[r]
    slots = adapters.settings[state.workers[w].type].max_loras
    return a == 0 or adapters.numbers[IN_STEP] < slots or adapters.stamps[a] == adapters.numbers[STAMP]


@kernel_jit
def _may_any_follow(state, w):
    """Whether any request that waits on worker w needs no further slot."""
    adapters = state.adapters
    if adapters.waiting[w, 0] > 0:
        return True
    for i in range(adapters.numbers[IN_STEP]):
        if adapters.waiting[w, adapters.step[i]] > 0:
            return True
    return False


@where_has("adapters", lambda state, w: next_waiting(state, w))
def next_with_slot(state, w):
    """The request that worker w prefills next: the first one with a slot; NONE if no waiting request has one.

    Requests before it are set aside; `put_back` returns them to the queue.
    """
    while True:
        r = next_waiting(state, w)
        if r == NONE or has_slot(state, w, r):
            return r
        if not _may_any_follow(state, w):
            return NONE
        leave_queue(state, w, r)
        append_to_list(state.requests, state.adapters.aside[0], ZERO, r)


@where_has("adapters", lambda state, w: None)
def put_back(state, w):
    """Put requests that were set aside back into the queue, each where it was."""
    worker, aside = state.workers[w], state.adapters.aside[0]
    while aside.head[0] != NONE:
        r = pop_first(state.requests, aside, ZERO)
        worker.first_waiting = insert_in_heap(state.requests, worker.first_waiting, r, state.requests[r].key)


@kernel_jit
def _replace_oldest(adapters, slots, slot_at, uses, count, a):
    """Put adapter a, which has no slot yet, in place of the adapter used longest ago that is not in this
    step.

    Only the first `count` slots are used. Among equals the adapter with the lowest number makes way. Returns
    the adapter that made way, 0 if the slot was empty. `slot_at` has the slot of each adapter, `uses` the
    step in which each slot was used.
    """
    oldest = NONE
    for i in range(count):
        b = slots[i]
        if b > 0 and adapters.stamps[b] == adapters.numbers[STAMP]:
            continue
        if oldest == NONE or uses[i] < uses[oldest] or (uses[i] == uses[oldest] and b < slots[oldest]):
            oldest = i
    leaving = slots[oldest]
    if leaving > 0:
        slot_at[leaving] = NONE
    slots[oldest], slot_at[a] = a, oldest
    return leaving


@kernel_jit
def _bring_to_slot(state, w, a, setting):
    """Bring adapter a, which worker w's next step needs, into a slot; returns the seconds of its loads."""
    adapters, seconds = state.adapters, 0.0
    stamp = adapters.numbers[STAMP]
    slots, slot_at = adapters.slots[w], adapters.slot_at[w]
    if adapters.cpu_slots.shape[1] > 0:
        cpu_slot_at, cpu_slot_uses = adapters.cpu_slot_at[w], adapters.cpu_slot_uses[w]
        if cpu_slot_at[a] == NONE:
            seconds += setting.disk_s
            leaving = _replace_oldest(
                adapters, adapters.cpu_slots[w], cpu_slot_at, cpu_slot_uses, setting.max_cpu_loras, a
            )
            # vLLM drops an adapter from the GPU with its copy in memory.
            if leaving > 0 and slot_at[leaving] != NONE:
                gpu_slot = slot_at[leaving]
                slots[gpu_slot], adapters.slot_uses[w, gpu_slot], slot_at[leaving] = 0, 0, NONE
        cpu_slot_uses[cpu_slot_at[a]] = stamp
    if slot_at[a] == NONE:
        seconds += setting.load_s
        _replace_oldest(adapters, slots, slot_at, adapters.slot_uses[w], setting.max_loras, a)
        adapters.loads[w] += 1
        adapters.numbers[LOADING] += 1
    adapters.slot_uses[w, slot_at[a]] = stamp
    return seconds


@where_has("adapters", lambda state, l: 0.0)
def adapters_s(state, l):
    """Seconds that adapters add to the step that was formed on lane l, loads included (`models.lora`)."""
    adapters, lane = state.adapters, state.lanes[l]
    _note_step(state, l, lane.is_decoding == 1)
    adapters.numbers[LOADING] = 0
    active = adapters.numbers[IN_STEP]
    if active == 0:
        return 0.0
    w = lane.worker
    setting = adapters.settings[state.workers[w].type]
    tokens, seconds = 0.0, 0.0
    for slot in range(lane.decodes * lane.is_decoding):
        if adapters.adapter_of[state.slots[l, slot].request] > 0:
            tokens += lane.width
    for i in range(lane.prefills):
        if adapters.adapter_of[state.chunks[l, i].request] > 0:
            tokens += state.chunks[l, i].tokens
    for i in range(active):
        seconds += _bring_to_slot(state, w, adapters.step[i], setting)
    seconds += setting.kernels_s + active * setting.read_s + tokens * setting.token_s
    # Each token reads the experts' matrices that it visits, until those of all adapters of the step are read.
    return seconds + min(tokens * setting.visited_frac, float(active)) * setting.experts_s


@where_has("adapters", lambda state: False)
def is_loading(state):
    """Whether the step formed last begins with a load, so that equal steps after it are shorter."""
    return state.adapters.numbers[LOADING] > 0


_fill_slots = kernel_jit(fill_slots)


@where_has("adapters", lambda state, w: None)
def forget_adapters(state, w):
    """Forget the adapters of worker w, which is down: it comes back with the adapters of a start."""
    adapters = state.adapters
    setting = adapters.settings[state.workers[w].type]
    adapters.waiting[w, :] = 0
    _fill_slots(adapters.slots[w], adapters.slot_at[w], adapters.slot_uses[w], setting.max_loras)
    if adapters.cpu_slots.shape[1] > 0:
        cpu_slot_at, cpu_slot_uses = adapters.cpu_slot_at[w], adapters.cpu_slot_uses[w]
        _fill_slots(adapters.cpu_slots[w], cpu_slot_at, cpu_slot_uses, setting.max_cpu_loras)
