"""Scheduling by priority, as in vLLM: which running requests are in the next step if KV blocks are short, and
in which order requests get KV from elsewhere.

Each request brings a number, its priority: the smallest goes first, and of equals the first to arrive.
TYPE.by_priority marks the workers that schedule so: those with vLLM v1 and a queue that is deployed by
priorities (`Queue.is_by_priority` in planner/policies.py).

The running requests take their tokens and blocks in order of admission, as in any order. A request that
finds too few blocks preempts the running request of largest priority, whether that one is in the step already
or not; its tokens of the step's budget go to the requests that follow. A request that preempts itself ends
the round, and all that follow are left out of the step. Preempted requests wait for their next admission by
their priority.

Requests whose KV comes from a prefill worker or from CPU memory are lined up by priority too, among
themselves: first for blocks, then, once the KV is there, for a seat.

A chunk of a prompt is in the prefix cache as soon as it is in the step; it stays there if its request is then
preempted, though nothing of it is ever computed.

Letters: l is a lane (a batch of a worker, layout.py), w a worker, r a request, n tokens that a request has in
the step. `rows` is how many prompts are computed in part: the first rows of `state.chunks[l]` note their n
until the step is formed.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.caches import evict_idle, keep_prefix, note_taken_blocks
from planner.simulator.kv_blocks import blocks_of
from planner.simulator.layout import BLOCK, LARGEST, LEAVING, NONE, ONE, PARTIAL, RESTING, ZERO
from planner.simulator.numba_compile import kernel_jit, small_jit
from planner.simulator.queue_orders import priority_of
from planner.simulator.queues import append_to_list, pop_first
from planner.simulator.router_loads import report_computed
from planner.simulator.slots import join_lane, latest_slot, preempt_decode, preempt_waiting, rest_decode


@kernel_jit
def schedule_by_priority(state, l, longest, time_s):
    """Decide what every running request of lane l does in the next step, on a worker that is short of blocks.

    Afterwards the decodes of the lane are those of the step, and `tokens` of the first rows of
    `state.chunks[l]` are those of the prompts in PARTIAL, in their order, 0 for a prompt that is left out.
    """
    lane = state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    # Decodes that were left out for want of token budget take part again: preemptions may give it back.
    while worker.head[RESTING] != NONE:
        join_lane(state, l, pop_first(state.requests, worker, RESTING))
    rows, r = ZERO, worker.head[PARTIAL]
    while r != NONE:
        state.chunks[l, rows].request, state.chunks[l, rows].tokens = r, 0
        rows += 1
        r = state.requests[r].next
    # `taken`: the blocks of those that are in the step so far; `served`: the admission number of the last.
    taken, served = ZERO, np.int64(NONE)
    while True:
        r = _next_in_need(state, l, rows, served)
        if r == NONE:
            break
        number = state.requests[r].admission_number
        budget = kind.token_budget - _tokens_before(state, l, rows, number)
        row, n = _row_of(state, l, rows, r), ZERO
        if budget < (lane.width if row == NONE else ONE):
            break
        if row == NONE:
            need = _decode_blocks(lane, state.slots[l, _slot_of_request(state, l, r)])
        else:
            c = state.requests[r].computed_tokens
            n = min(state.requests[r].length_tokens - c, longest, budget)
            need = blocks_of(c + n) - blocks_of(c)
        while taken + need > kind.kv_blocks - worker.used_blocks - worker.late_blocks:
            evict_idle(state, w, taken, time_s)
            victim = _least_urgent(state, l, rows)
            taken -= _preempt_least_urgent(state, l, rows, victim, served)
            rows = _drop_row(state, l, rows, victim)
            if victim == r:
                _rest_after(state, l, number)
                return
        row = _row_of(state, l, rows, r)
        if row != NONE:
            state.chunks[l, row].tokens = n
        taken += need
        served = number
    _rest_beyond_budget(state, l, rows)


@small_jit
def _decode_blocks(lane, slot):
    """KV blocks that a decode of the lane, in this slot, takes in the next step."""
    if lane.width > 1:
        return slot.next_blocks - slot.held_blocks
    return np.int64((slot.context_offset + lane.decode_step) % BLOCK == 0)


@kernel_jit
def _next_in_need(state, l, rows, served):
    """The running request admitted next after number `served` that is a prompt or a decode that takes blocks.

    NONE if there is none. Other decodes take tokens of the budget alone (`_tokens_before`).
    """
    lane, found, least = state.lanes[l], np.int64(NONE), LARGEST
    for slot in range(lane.decodes):
        entry = state.slots[l, slot]
        if served < entry.admission_number < least and _decode_blocks(lane, entry) > 0:
            found, least = np.int64(entry.request), np.int64(entry.admission_number)
    for i in range(rows):
        r = np.int64(state.chunks[l, i].request)
        if served < state.requests[r].admission_number < least:
            found, least = r, np.int64(state.requests[r].admission_number)
    return found


@kernel_jit
def _tokens_before(state, l, rows, number):
    """Tokens in the step of the running requests admitted before the one with this admission number."""
    lane, tokens = state.lanes[l], ZERO
    for slot in range(lane.decodes):
        tokens += lane.width * (state.slots[l, slot].admission_number < number)
    for i in range(rows):
        if state.requests[state.chunks[l, i].request].admission_number < number:
            tokens += state.chunks[l, i].tokens
    return tokens


@small_jit
def _row_of(state, l, rows, r):
    """The row of prompt r among those computed in part; NONE if r decodes or has ended."""
    for i in range(rows):
        if state.chunks[l, i].request == r:
            return i
    return np.int64(NONE)


@small_jit
def _slot_of_request(state, l, r):
    """The slot of lane l in which request r decodes; NONE if it does not."""
    for slot in range(state.lanes[l].decodes):
        if state.slots[l, slot].request == r:
            return slot
    return np.int64(NONE)


@kernel_jit
def _drop_row(state, l, rows, r):
    """Take the row of request r out, if it has one; returns how many are left."""
    row = _row_of(state, l, rows, r)
    if row == NONE:
        return rows
    for i in range(row, rows - 1):
        state.chunks[l, i] = state.chunks[l, i + 1]
    return rows - ONE


@kernel_jit
def line_up_for_kv(state, w, owner, list_number, r):
    """Put request r, whose KV comes to worker w, into list `list_number` of `owner`: at its end or, where the
    engine goes by priority, before all that are less urgent.
    """
    requests = state.requests
    if state.types[state.workers[w].type].by_priority == 0:
        append_to_list(requests, owner, list_number, r)
        return
    previous, following = NONE, owner.head[list_number]
    while following != NONE and not goes_after(state, w, following, r):
        previous, following = following, requests[following].next
    if following == NONE:
        append_to_list(requests, owner, list_number, r)
        return
    requests[r].next = following
    if previous == NONE:
        owner.head[list_number] = r
    else:
        requests[previous].next = r


@kernel_jit
def goes_after(state, w, r, other):
    """Whether request r is less urgent on worker w than `other`, or `other` is NONE."""
    if other == NONE:
        return True
    priority, other_priority = priority_of(state, w, r), priority_of(state, w, other)
    if priority != other_priority:
        return priority > other_priority
    arrival_s, other_arrival_s = state.requests[r].arrival_s, state.requests[other].arrival_s
    return arrival_s > other_arrival_s or (arrival_s == other_arrival_s and r > other)


@kernel_jit
def _least_urgent(state, l, rows):
    """The request of largest priority of all that run: decodes of lane l, prompts computed in part, and those
    whose last token the engine has not seen (LEAVING).
    """
    w, last = state.lanes[l].worker, np.int64(NONE)
    for slot in range(state.lanes[l].decodes):
        r = np.int64(state.slots[l, slot].request)
        if goes_after(state, w, r, last):
            last = r
    for i in range(rows):
        r = np.int64(state.chunks[l, i].request)
        if goes_after(state, w, r, last):
            last = r
    r = state.workers[w].head[LEAVING]
    while r != NONE:
        if goes_after(state, w, r, last):
            last = r
        r = state.requests[r].next
    return last


@kernel_jit
def _preempt_least_urgent(state, l, rows, r, served):
    """Preempt request r; returns how many blocks it had in the step.

    `served` is the admission number of the last request that is in the step already.
    """
    lane = state.lanes[l]
    w = lane.worker
    slot = _slot_of_request(state, l, r)
    if slot != NONE:
        is_served = state.slots[l, slot].admission_number <= served
        blocks = _decode_blocks(lane, state.slots[l, slot]) * is_served
        preempt_decode(state, l, slot, is_served)
        return blocks
    row = _row_of(state, l, rows, r)
    if row == NONE:
        preempt_waiting(state, w, LEAVING, r)
        return ZERO
    # A preempted prompt takes its chunk, which is lost with all that was computed.
    n, c = np.int64(state.chunks[l, row].tokens), np.int64(state.requests[r].computed_tokens)
    blocks = blocks_of(c + n) - blocks_of(c)
    if n > 0:
        state.requests[r].computed_tokens = c + n
        state.workers[w].used_blocks += blocks
        note_taken_blocks(state, w, n)
        keep_prefix(state, w, r)
        report_computed(state, w, r, n)
    preempt_waiting(state, w, PARTIAL, r)
    return blocks


@kernel_jit
def _rest_after(state, l, number):
    """Leave the decodes that were admitted after this admission number out of the step."""
    slot = ZERO
    while slot < state.lanes[l].decodes:
        if state.slots[l, slot].admission_number > number:
            rest_decode(state, l, slot)
            slot = ZERO  # Other decodes have moved into the slots from this one on, or before.
        else:
            slot += 1


@kernel_jit
def _rest_beyond_budget(state, l, rows):
    """Leave the decodes that were admitted last out of the step while its token budget is too small."""
    lane = state.lanes[l]
    kind = state.types[state.workers[lane.worker].type]
    spent = ZERO
    for i in range(rows):
        spent += state.chunks[l, i].tokens
    while lane.decodes > 0 and lane.decodes * lane.width + spent > kind.token_budget:
        rest_decode(state, l, latest_slot(state, l))
