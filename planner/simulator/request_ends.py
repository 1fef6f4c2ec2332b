"""The end of a request: it finishes or is rejected, is counted, and lets requests arrive that waited for it.

Letters: w is a worker, r a request. E2E, TPOT and TTFT are metrics of the SLO.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.counting import count_value, in_window
from planner.simulator.layout import (
    DONE,
    E2E,
    FINISHED,
    FREED,
    NONE,
    REFUSED,
    REJECTED,
    TPOT,
    TTFT,
    UNFINISHED,
)
from planner.simulator.numba_compile import kernel_jit
from planner.simulator.predictions import note_end
from planner.simulator.queue_orders import charge_output
from planner.simulator.queues import insert_in_heap
from planner.simulator.router_loads import assign_request


@kernel_jit
def finish_request(state, w, r, time_s):
    """Finish request r on worker w, and count its E2E and TPOT. The caller frees its seat and blocks."""
    request = state.requests[r]
    request.finish_s = time_s
    request.status = FINISHED
    request.generated_tokens = request.output_tokens
    assign_request(state, w, r, -1.0)
    note_end(state, w, r, request.output_tokens)
    charge_output(state, r)
    state.counters[DONE] += 1
    if len(state.after) > 0:
        _free_children(state, r, time_s)
    if in_window(state, request.arrival_s):
        count_value(state, E2E, time_s - request.arrival_s, request.arrival_s, r)
        if request.output_tokens > 1:
            tpot_s = (time_s - request.first_token_s) / (request.output_tokens - 1)
            count_value(state, TPOT, tpot_s, request.arrival_s, r)


@kernel_jit
def _free_children(state, r, time_s):
    """Let requests arrive that waited for request r, which has finished, and for no other one.

    They get their arrival time and join the heap of such arrivals, whose root is `counters[FREED]`. The
    children of r are a slice of `state.children`.
    """
    for i in range(state.after[r].child, state.after[r + 1].child):
        child = state.children[i]
        wait, request = state.after[child], state.requests[child]
        wait.parents -= 1
        if wait.parents == 0:
            wait.parents = NONE  # The request has an arrival time now (AFTER in layout.py).
            request.arrival_s = max(request.arrival_s, time_s + wait.think_s)
            state.counters[FREED] = insert_in_heap(
                state.requests, state.counters[FREED], child, request.arrival_s
            )


@kernel_jit
def reject_request(state, r):
    """Reject request r, which no worker can ever hold, and all requests that wait for it, directly or not."""
    last = r  # Rejected requests are linked by `next`; those that wait for them are appended.
    state.requests[r].next = NONE
    while r != NONE:
        _reject_one(state, r)
        if len(state.after) > 0:
            for i in range(state.after[r].child, state.after[r + 1].child):
                child = state.children[i]
                if state.requests[child].status == UNFINISHED:
                    state.requests[child].status = REJECTED
                    state.after[child].parents = NONE
                    state.requests[child].next = NONE
                    state.requests[last].next = child
                    last = child
        r = state.requests[r].next


@kernel_jit
def _reject_one(state, r):
    """Reject request r alone: it is done, and violates every limit that counts it."""
    request = state.requests[r]
    request.status = REJECTED
    state.counters[DONE] += 1
    state.counters[REFUSED] += 1
    if in_window(state, request.arrival_s):
        if np.isnan(request.first_token_s):
            count_value(state, TTFT, np.inf, request.arrival_s, r)
        if request.output_tokens > 1:
            count_value(state, TPOT, np.inf, request.arrival_s, r)
        count_value(state, E2E, np.inf, request.arrival_s, r)
