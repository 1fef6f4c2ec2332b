"""Workers that go down, come up or become slow, and what becomes of their requests.

A worker that goes down loses its KV and its requests, which are put into the heap LOST; the kernel routes
them anew. A request whose KV is on a prefill worker that stays up only needs another decode worker. The
`epoch` of a worker rises when it goes down. A request notes the epoch; if the worker has another one later,
the request's KV there is lost.

Letters: w is a worker or a rank of one (ranks.py), v one that decodes, l a lane, r a request. The `cause` of
what happens is the entity whose event it is part of (kernel.py). A lambda in where_has or where_rare is
compiled in place of the function for fleets that do not need it (numba_compile.py).
"""

from __future__ import annotations

import numpy as np

from planner.policies import VLLM_V1
from planner.simulator.adapters import forget_adapters
from planner.simulator.caches import empty_cache, lose_prefix
from planner.simulator.counting import run_s, steps_reaching
from planner.simulator.decoding import advance_decodes
from planner.simulator.event_heap import set_time
from planner.simulator.flips import route_limbo_anew
from planner.simulator.held_prompts import pop_held
from planner.simulator.kv_blocks import request_blocks, seat_blocks
from planner.simulator.layout import (
    DOWN,
    DRAIN,
    DRAINING,
    GONE,
    IN_SERVICE,
    INBOUND,
    LEAVING,
    LINK_SLOW,
    LOST,
    NEVER,
    NEXT_DISTURBANCE,
    NONE,
    OUT_OF_SERVICE,
    PARTIAL,
    PAUSE,
    READY,
    RESTING,
    SLOW,
    UNKNOWN,
    UP,
    ZERO,
)
from planner.simulator.numba_compile import kernel_jit, small_jit, where_has, where_rare
from planner.simulator.offload import forget_memory, pop_loading, start_anew
from planner.simulator.queue_orders import leave_queue
from planner.simulator.queues import append_to_list, insert_in_heap, pop_first
from planner.simulator.ranks import rank_count
from planner.simulator.router_loads import assign_none, assign_request, report_token
from planner.simulator.routing import set_pools
from planner.simulator.slots import take_out
from planner.simulator.transfer import receive_handoffs, shorten_run, wake_worker


@kernel_jit
def apply_next_disturbance(state, time_s):
    """Apply the disturbance that is due, and schedule the one after it. True for a pause."""
    disturbance = state.disturbances[state.counters[NEXT_DISTURBANCE]]
    state.counters[NEXT_DISTURBANCE] += 1
    following = state.counters[NEXT_DISTURBANCE]
    outside = len(state.lanes) + 1  # The entity whose events are the disturbances (layout.State).
    next_s = state.disturbances[following].time_s if following < len(state.disturbances) else NEVER
    set_time(state, outside, next_s)
    if disturbance.kind == PAUSE:
        return True
    _apply_disturbance(state, disturbance, time_s, outside)
    return False


@where_rare(lambda state, disturbance, time_s, cause: None)
def _apply_disturbance(state, disturbance, time_s, cause):
    """Let a worker go down, drain, be removed or come up, or change the speed of a worker or of the link."""
    if disturbance.kind == LINK_SLOW:
        state.link[0].slow_factor = disturbance.factor
        return
    w = disturbance.worker
    end = w + rank_count(state, w)  # The worker's ranks are the rows from w to this one.
    status = state.workers[w].status
    if disturbance.kind == SLOW:
        for v in range(w, end):
            state.workers[v].slow_factor = disturbance.factor
        shorten_run(state, w, time_s, cause)
    elif disturbance.kind == DRAIN:
        if status == IN_SERVICE:
            for v in range(w, end):
                state.workers[v].status = DRAINING
            set_pools(state)
    elif disturbance.kind == GONE:
        _remove_drained(state, w, time_s)
    elif disturbance.kind == DOWN:
        if status != OUT_OF_SERVICE:
            _take_down(state, w, time_s)
    elif disturbance.kind == UP and status == OUT_OF_SERVICE:
        for v in range(w, end):
            state.workers[v].status = IN_SERVICE
            state.workers[v].idle_since_s = time_s
        set_pools(state)
        route_limbo_anew(state)


@kernel_jit
def _take_rank_down(state, w, time_s):
    """Let worker w, or one rank of a worker, die: its steps are lost, and its requests are routed anew."""
    worker = state.workers[w]
    worker.status, worker.epoch = OUT_OF_SERVICE, worker.epoch + 1
    set_pools(state)
    for l in range(worker.first_lane, worker.first_lane + state.types[worker.type].lanes):
        _stop_lane(state, l, time_s)
    worker.formed_s = NEVER
    _lose_requests(state, w)
    _empty_worker(state, w, time_s)
    for v in range(len(state.workers)):
        _reroute_without_kv(state, v, time_s)
    route_limbo_anew(state)


@kernel_jit
def _stop_lane(state, l, time_s):
    """Break off the run of lane l. Its prompts join the list PARTIAL; its decodes are lost."""
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    if lane.run_steps > 0 and lane.is_decoding and lane.decodes > 0:
        # Steps that end at this very moment count as ended.
        after_s = np.nextafter(time_s, np.inf)
        done = steps_reaching(lane.run_start_s, lane.run_first_s, lane.run_growth_s, after_s) - 1
        if done > 0:
            done_s = run_s(lane.run_first_s, lane.run_growth_s, done)
            advance_decodes(state, l, done, lane.run_start_s + done_s)
            worker.busy_s += done_s
            worker.steps += done
    for i in range(lane.prefills):
        chunk = state.chunks[l, i]
        # A prompt that vLLM v1 computes in part stays in the list PARTIAL during the step.
        if chunk.is_last or state.types[worker.type].batching != VLLM_V1:
            append_to_list(state.requests, worker, PARTIAL, chunk.request)
    lane.run_steps, lane.prefills = 0, 0
    set_time(state, l, NEVER)
    while lane.decodes > 0:
        _lose_computed(state, take_out(state, l, lane.decodes - 1))


@kernel_jit
def _lose_requests(state, w):
    """Mark all requests of worker w as lost that are in its lists, in its queue or being loaded."""
    worker = state.workers[w]
    while worker.head[LEAVING] != NONE:  # These have finished: nothing is routed anew.
        lose_prefix(state, pop_first(state.requests, worker, LEAVING))
    while worker.head[RESTING] != NONE:
        _lose_computed(state, pop_first(state.requests, worker, RESTING))
    while worker.head[UNKNOWN] != NONE:
        mark_lost(state, pop_first(state.requests, worker, UNKNOWN))
    while worker.head[PARTIAL] != NONE:
        r = pop_first(state.requests, worker, PARTIAL)
        state.requests[r].preemptions += 1
        state.requests[r].computed_tokens = 0
        mark_lost(state, r)
    r = pop_held(state, w)
    while r != NONE:
        mark_lost(state, r)
        r = pop_held(state, w)
    while worker.first_waiting != NONE:
        r = worker.first_waiting
        leave_queue(state, w, r)
        mark_lost(state, r)
    while worker.head[READY] != NONE:
        _lose_computed(state, pop_first(state.requests, worker, READY))
    while worker.head[INBOUND] != NONE:
        mark_lost(state, pop_first(state.requests, worker, INBOUND))
    forget_memory(state, w)
    r = pop_loading(state, w)
    while r != NONE:
        mark_lost(state, r)
        r = pop_loading(state, w)


@kernel_jit
def _lose_computed(state, r):
    """Mark request r as lost, whose prompt was computed, and whose KV is gone."""
    reset_progress(state, r)
    mark_lost(state, r)


@where_has("dp_ranks", _take_rank_down)
def _take_down(state, w, time_s):
    """Let worker w die with all of its ranks."""
    for v in range(w, w + state.dp_ranks[w].count):
        state.workers[v].status = OUT_OF_SERVICE
    for v in range(w, w + state.dp_ranks[w].count):
        _take_rank_down(state, v, time_s)


@kernel_jit
def _remove_drained(state, w, time_s):
    """Remove worker w, which has drained, with all of its ranks; routers do not see it any more."""
    for v in range(w, w + rank_count(state, w)):
        state.workers[v].status, state.workers[v].epoch = OUT_OF_SERVICE, state.workers[v].epoch + 1
        state.workers[v].formed_s = NEVER
        forget_memory(state, v)
        _empty_worker(state, v, time_s)


@kernel_jit
def _empty_worker(state, w, time_s):
    """Reset worker w to the state after a start: no requests, no blocks, an empty cache."""
    worker = state.workers[w]
    empty_cache(state, w, time_s)
    forget_adapters(state, w)
    worker.waiting, worker.used_blocks, worker.running, worker.read_s = 0, 0, 0, 0.0
    worker.late_blocks, worker.late_seats = ZERO, ZERO
    worker.stage_free_s[:] = 0.0
    assign_none(state, w)


@kernel_jit
def _reroute_without_kv(state, v, time_s):
    """Route anew those requests of worker v whose KV was to come from a worker that went down."""
    r = state.workers[v].head[INBOUND]
    state.workers[v].head[INBOUND] = NONE
    while r != NONE:
        following = state.requests[r].next
        if lost_prefill_kv(state, r):
            assign_request(state, v, r, -1.0)
            note_idle(state, v, time_s)
            mark_lost(state, r)
        else:
            append_to_list(state.requests, state.workers[v], INBOUND, r)
        r = following
    outside = len(state.lanes) + 1  # The entity whose events are the disturbances (layout.State).
    receive_handoffs(state, v, time_s, outside)


@where_rare(lambda state, r, time_s: False)
def drop_lost_transfer(state, r, time_s):
    """Route request r anew if one of its two workers went down while its KV crossed the link.

    A decode worker that stayed up gives back what it reserved for r. False, and nothing happens, if both
    workers stayed up.
    """
    request = state.requests[r]
    link = len(state.lanes)
    v = request.decode_worker
    stayed_up = state.workers[v].epoch == request.decode_epoch
    if stayed_up and not lost_prefill_kv(state, r):
        return False
    if stayed_up:
        blocks = request_blocks(state, v, request.length_tokens) + seat_blocks(state, v, r)
        state.workers[v].used_blocks -= blocks
        assign_request(state, v, r, -1.0)
        note_idle(state, v, time_s)
        receive_handoffs(state, v, time_s, link)
        if state.workers[v].first_waiting != NONE:
            wake_worker(state, v, time_s, link)
    mark_lost(state, r)
    return True


@kernel_jit
def mark_lost(state, r):
    """Put request r, which has lost its worker, among those to route anew (LOST).

    A prompt that was computed only in part starts over.
    """
    request = state.requests[r]
    if lost_prefill_kv(state, r):
        request.unseen_tokens = 0  # The load of a worker that goes down is forgotten as a whole.
    report_token(state, r)
    if request.computed_tokens < request.length_tokens:
        request.preemptions += request.computed_tokens > 0
        request.computed_tokens = 0
        lose_prefix(state, r)
    start_anew(state, r)
    state.counters[LOST] = insert_in_heap(state.requests, state.counters[LOST], r, request.arrival_s)


@kernel_jit
def reset_progress(state, r):
    """Let request r, which lost its KV after its prompt was computed, compute all its tokens again."""
    request = state.requests[r]
    # One token more than had KV must be computed: the newest output token, or, before the first output token,
    # the last token of the prompt if `batching.seat_request` has taken it off `length_tokens`.
    request.length_tokens += request.generated_tokens > 0 or request.length_tokens < request.input_tokens
    request.computed_tokens, request.drafted_blocks = 0, 0
    lose_prefix(state, r)
    request.preemptions += 1


@small_jit
def lost_prefill_kv(state, r):
    """Whether the prefill worker of r went down while its KV lay there."""
    request = state.requests[r]
    return state.workers[request.prefill_worker].epoch != request.epoch


@small_jit
def note_idle(state, w, time_s):
    """Note that a request has left worker w between its steps: if w drains, it may have been the last one."""
    if state.workers[w].status == DRAINING:
        state.workers[w].idle_since_s = time_s
