"""The discrete-event kernel: simulates every engine step of a fleet over a trace, in compiled code that has
no object per request. `simulate_events` is its loop.

Steps. A worker forms a step as its batching policy says (batching.py), and a fit gives its seconds
(step_times.py). The first token leaves with the last prefill chunk. While no request comes or ends, the steps
of a batch of decodes differ in their context alone. They are simulated at once, as a run: with D sequences
step j of a run, from 0 on, lasts  first + j d D  (d: seconds per KV token). The sum has a closed form, and
only the end of the run is an event. So the work grows with requests, not with tokens, and still every gap
between tokens is counted exactly (counting.py). With speculative decoding (planner.models.speculation)
decodes make different numbers of tokens in a step, so each step is an event (decoding.py).

Hand-offs. The decode worker reserves blocks when the first token is out, the KV blocks cross the link, the
prefill worker frees them, and the request joins the next decode step. The gap after its first token includes
all of that (transfer.py). Some engines do not send the token of the prefill worker to clients: the next
decode step computes the last token of the prompt again, and TTFT includes the hand-off. What happens to
requests whose worker goes down: outages.py.

Events are ordered by (time, kind): arrivals first, then lanes, in the order of their workers (State.order),
the link, the disturbances. An idle lane that gets work starts by an event of its own at the same moment,
after all arrivals of that moment, so its step has them. A request of a session arrives its think time after
the last request it waits for has finished. Without think time, steps that start at that moment come first: no
client is so quick that its next request is in them.

`cause` is the entity whose event brings something about, NONE for an arrival. From the cause follows what an
engine knew when it formed a step at that moment (transfer.py). Letters (layout.py): w is a worker, v one that
decodes, l a lane, where a worker forms its steps, and r a request; `kind` is the record of a worker's type
(layout.TYPE). A lambda in where_has or where_rare is compiled in place of the function for fleets that do not
need it (numba_compile.py).
"""

from __future__ import annotations

import numpy as np

from planner.policies import FCFS, VLLM_V1
from planner.simulator.adapters import passes_over
from planner.simulator.batching import start_step
from planner.simulator.caches import show_prefix
from planner.simulator.counting import (
    count_overdue,
    end_batch,
    first_token,
    is_broken,
    record_steps,
    release_next,
    run_s,
    single_gap,
)
from planner.simulator.decoding import advance_decodes
from planner.simulator.event_heap import is_alone, next_time_s, set_time
from planner.simulator.flips import end_restart, flip_if_due
from planner.simulator.held_prompts import hold_prompt, is_held_prompt_due, note_first_token, send_next_held
from planner.simulator.joint_steps import start_ranks
from planner.simulator.kv_blocks import blocks_of, request_blocks, seat_blocks
from planner.simulator.layout import (
    ARRIVAL_POOL,
    DECODE,
    DONE,
    DRAINING,
    ENTERED,
    FREED,
    FRONT_END_S,
    HAND_OFF_POOL,
    HELD,
    HELD_PROMPTS,
    IN_SERVICE,
    INBOUND,
    LARGEST,
    LEAVING,
    LIMBO,
    LOST,
    NEVER,
    NEXT_DISTURBANCE,
    NONE,
    ONE,
    PARTIAL,
    PREFILL,
    PREFILLED,
    READING,
    READY,
    RELEASED,
    REPURPOSE_S,
    UNKNOWN,
    ZERO,
)
from planner.simulator.numba_compile import entry_jit, kernel_jit, small_jit, where_has, where_rare
from planner.simulator.offload import is_loading_kv, leave_memory, may_be_passed, store_ended_step
from planner.simulator.outages import (
    apply_next_disturbance,
    drop_lost_transfer,
    lost_prefill_kv,
    mark_lost,
    note_idle,
    reset_progress,
)
from planner.simulator.pointers import pointer_to
from planner.simulator.polling import count_weights, has_step_in_flight
from planner.simulator.prefix_routing import evict_for_worker, expected_tokens, route_by_prefix
from planner.simulator.priorities import line_up_for_kv
from planner.simulator.queue_orders import (
    assign_turn,
    charge_running,
    charge_token,
    enqueue_request,
    sorts_by_key,
)
from planner.simulator.queues import append_to_list, insert_in_heap, remove_root
from planner.simulator.ranks import end_if_empty, runs_empty
from planner.simulator.request_ends import finish_request, reject_request
from planner.simulator.router_loads import add_load, assign_request, report_computed, report_token
from planner.simulator.routing import choose_worker, fits_worker, holds_back
from planner.simulator.slots import (
    free_seat_and_blocks,
    join_lane,
    refresh_next_finish_step,
    release_blocks,
    take_out,
)
from planner.simulator.transfer import (
    end_transfer,
    is_full,
    known_s,
    receive_between_steps,
    receive_handoffs,
    wake_for_kv,
    wake_worker,
)


@entry_jit
def simulate_events(fields, closed_loop, stop_early):
    """Simulate until every request is done; with `stop_early` until a limit is broken.

    `fields` is a layout.State, which is changed in place. `closed_loop` > 0 keeps that many requests in
    flight: the next one arrives when one completes. At a PAUSE it returns early. Called again it goes on as
    if it had not paused, with the disturbances it finds then.
    """
    state = pointer_to(fields)
    link, outside = len(state.lanes), len(state.lanes) + 1  # Entities that are no lanes (layout.State).
    cause, cause_s = np.int64(state.paused[0]), state.paused[1]  # The last event that was no arrival.
    following = state.counters[NEXT_DISTURBANCE]
    if following < len(state.disturbances):
        set_time(state, outside, state.disturbances[following].time_s)
    # Until this moment `count_overdue` would count nothing new. Requests of sessions are not in order of
    # arrival, so it does not look at them.
    counted_until_s = -np.inf if stop_early and closed_loop == 0 and len(state.after) == 0 else np.inf
    while state.counters[DONE] < len(state.requests):
        entity, time_s = state.heap[0], next_time_s(state)
        starts_step = entity < link and state.lanes[entity].run_steps == 0
        r, arrival_s, is_caused = _next_arrival(state, closed_loop, cause_s)
        goes_first = not (starts_step and is_caused)  # The arrival, if both are at one moment.
        is_arrival = arrival_s < time_s or (arrival_s == time_s < NEVER and goes_first)
        if is_arrival:
            time_s = arrival_s
            _take_arrival(state, r, time_s, cause if is_caused else NONE)
        elif time_s == NEVER:
            return  # Nothing will ever happen again: every worker is down.
        elif starts_step:
            start_steps(state, entity, time_s)
            end_restart(state, entity, time_s)
        elif entity == link:
            end_hand_off(state, end_transfer(state, time_s), time_s)
        elif entity == outside:
            if apply_next_disturbance(state, time_s):
                state.paused[0], state.paused[1] = cause, cause_s
                return
        else:
            _end_run_and_go_on(state, entity, closed_loop, time_s)
        if state.counters[LOST] != NONE:
            route_lost(state, time_s, entity)
        if state.counters[HELD] != NONE and not _starts_next(state, time_s):
            send_held(state, time_s, entity)
        send_held_prompts(state, time_s, NONE if is_arrival else entity)
        if not is_arrival:
            cause, cause_s = entity, time_s
        if time_s > counted_until_s:
            counted_until_s = count_overdue(state, time_s)
        release_next(state, closed_loop, time_s)
        if stop_early and is_broken(state):
            return


@small_jit
def _next_arrival(state, closed_loop, cause_s):
    """The request that arrives next, its time (NEVER: none is known), and whether it `is_caused`.

    The soonest of three arrives: a request by its own time, one that waited for another to finish (FREED),
    and a prompt that an API server has tokenized (READING). An arrival is caused if the last event, of
    `cause_s`, brought it about: then steps that start at the same moment come first.
    """
    r, front_end_s, is_caused = state.counters[ENTERED], state.policy[FRONT_END_S], closed_loop > 0
    arrival_s = NEVER
    if r < state.counters[RELEASED]:
        arrival_s = state.requests[r].arrival_s + front_end_s
    freed, reading = state.counters[FREED], state.counters[READING]
    if freed != NONE and state.requests[freed].key + front_end_s < arrival_s:
        r, arrival_s = freed, state.requests[freed].key + front_end_s
        is_caused = arrival_s == cause_s
    if reading != NONE and state.requests[reading].key <= arrival_s:
        r, arrival_s, is_caused = reading, state.requests[reading].key, False
    return r, arrival_s, is_caused


@kernel_jit
def _take_arrival(state, r, time_s, cause):
    """Let request r arrive, which `_next_arrival` has chosen."""
    if r == state.counters[READING]:
        _end_reading(state, time_s)
        return
    if r == state.counters[FREED]:
        state.counters[FREED] = remove_root(state.requests, r)
    else:  # Find who arrives next at its own time: requests that wait for others do not.
        entered = r + 1
        while entered < len(state.requests) and len(state.after) > 0 and state.after[entered].parents != 0:
            entered += 1
        state.counters[ENTERED] = entered
    route_arrival(state, r, time_s, cause)


@kernel_jit
def _end_run_and_go_on(state, l, closed_loop, time_s):
    """End the run of lane l. Its next step starts at once, unless other events of this moment come first."""
    end_run(state, l, time_s)
    entered = state.counters[ENTERED]
    # In a closed loop a request arrives because another one completed, so after the steps that start now.
    is_released = closed_loop == 0 and entered < state.counters[RELEASED]
    arrives_now = is_released and state.requests[entered].arrival_s + state.policy[FRONT_END_S] <= time_s
    if not arrives_now and is_alone(state, time_s):
        start_steps(state, l, time_s)
        end_restart(state, l, time_s)
    else:
        set_time(state, l, time_s)


@small_jit
def _starts_next(state, time_s):
    """Whether the next event is a step that starts at `time_s`; it precedes requests that are held back."""
    entity = state.heap[0]
    is_next = next_time_s(state) == time_s and entity < len(state.lanes)
    return is_next and state.lanes[entity].run_steps == 0


@kernel_jit
def _start_lanes(state, l, time_s):
    """Start the next steps on all idle lanes of the worker of lane l."""
    worker = state.workers[state.lanes[l].worker]
    first, end = worker.first_lane, worker.first_lane + state.types[worker.type].lanes
    for other in range(first, end):
        if state.lanes[other].run_steps == 0:
            start_step(state, other, time_s)
    receive_between_steps(state, state.lanes[l].worker, time_s)


@where_has("dp_ranks", _start_lanes)
def start_steps(state, l, time_s):
    """Start the next steps of the worker of lane l: on all of its idle lanes, or on all of its ranks."""
    w = state.lanes[l].worker
    if state.dp_ranks[w].count == 1:
        _start_lanes(state, l, time_s)
    else:
        start_ranks(state, w, time_s)
        receive_between_steps(state, w, time_s)


@kernel_jit
def route_arrival(state, r, time_s, cause):
    """Route request r, which has nothing computed, to a worker that takes arrivals."""
    if state.counters[PREFILLED] > 0:
        _arrive_prefilled(state, r, time_s)
        return
    flip_if_due(state, ARRIVAL_POOL, time_s)
    w, request = NONE, state.requests[r]
    if state.counters[HELD] == NONE:
        w = route_by_prefix(state, r, time_s)
    if w == NONE and holds_back(state, ARRIVAL_POOL, r):
        state.counters[HELD] = insert_in_heap(state.requests, state.counters[HELD], r, request.arrival_s)
    else:
        _send_or_park(state, r, w, time_s, cause)


@kernel_jit
def _send_or_park(state, r, w, time_s, cause):
    """Send request r to worker w. With NONE it waits in limbo, or is rejected if no worker may return that
    could hold it.
    """
    if w != NONE:
        _send_to_worker(state, r, w, time_s, cause)
    elif _may_return(state, ARRIVAL_POOL, r):
        state.counters[LIMBO] = insert_in_heap(
            state.requests, state.counters[LIMBO], r, state.requests[r].arrival_s
        )
    else:
        reject_request(state, r)


@where_rare(lambda state, pool, r: False)
def _may_return(state, pool, r):
    """Whether a worker that is not up now could hold request r once it is up. Only workers whose role is of
    this pool count, and none that drains to change its role.
    """
    request = state.requests[r]
    need = blocks_of(request.input_tokens + request.output_tokens)
    for w in range(len(state.workers)):
        worker = state.workers[w]
        changes_role = worker.status == DRAINING and state.policy[REPURPOSE_S] < NEVER
        is_of_pool = (worker.role == DECODE) == (pool == HAND_OFF_POOL)
        if worker.status != IN_SERVICE and not changes_role and is_of_pool and fits_worker(state, w, need):
            return True
    return False


@kernel_jit
def _send_to_worker(state, r, w, time_s, cause):
    """Send request r to worker w, which computes its prompt, unless the queue lets it wait at the router."""
    request = state.requests[r]
    request.prefill_worker, request.decode_worker = w, NONE  # A decode worker of an earlier try is forgotten.
    assign_request(state, w, r, 1.0)
    add_load(state, w, float(request.length_tokens - expected_tokens(state, r)), 0.0, 0.0)
    assign_turn(state, w, r)
    if not hold_prompt(state, w, r):
        _send_prompt(state, r, w, time_s, cause)


@kernel_jit
def _send_prompt(state, r, w, time_s, cause):
    """Send the prompt of request r to worker w, to which r is assigned. If the API server of w needs time to
    tokenize the text, the request enters the engine after that time.
    """
    request, worker = state.requests[r], state.workers[w]
    prompt_token_s = state.types[worker.type].prompt_token_s
    if prompt_token_s > 0.0:
        worker.read_s = max(worker.read_s, time_s) + prompt_token_s * request.input_tokens
        request.epoch = worker.epoch
        state.counters[READING] = insert_in_heap(state.requests, state.counters[READING], r, worker.read_s)
    else:
        _enter_engine(state, r, w, time_s, cause)


@kernel_jit
def _enter_engine(state, r, w, time_s, cause):
    """Put request r, whose prompt is tokenized, into the queue of worker w's engine, and wake the engine."""
    request, worker = state.requests[r], state.workers[w]
    is_first = worker.first_waiting == NONE
    charge_running(state, w, time_s)  # Tenants' service up to now decides where r stands in the queue.
    kind = state.types[worker.type]
    if kind.is_async:
        request.known_s = known_s(time_s, cause)
        append_to_list(state.requests, worker, UNKNOWN, r)
    else:
        enqueue_request(state, w, r)
    # A request behind one that could not be admitted is not admitted either. So the worker is woken only for
    # a request that is first, or may overtake. In a heap, a request that overtakes all others is now
    # `first_waiting`. On an asynchronous engine r is not in the queue yet, so in every order but FCFS it may
    # overtake.
    overtakes = kind.queue_order != FCFS if kind.is_async else not sorts_by_key(kind.queue_order)
    overtakes = overtakes or passes_over(state) or may_be_passed(state)
    if is_first or worker.first_waiting == r or overtakes:
        wake_worker(state, w, time_s, cause)


@kernel_jit
def _end_reading(state, time_s):
    """Take the next request whose prompt an API server has tokenized. On a prefill or mixed worker it enters
    the engine; on a decode worker it asks for its KV. If a worker went down meanwhile, it is lost.
    """
    r = state.counters[READING]
    state.counters[READING] = remove_root(state.requests, r)
    request = state.requests[r]
    v = request.decode_worker  # NONE: it is the prefill worker's server that has read the prompt.
    if v != NONE and state.workers[v].epoch != request.decode_epoch:
        mark_lost(state, r)
    elif state.workers[request.prefill_worker].epoch != request.epoch:
        if v != NONE:
            assign_request(state, v, r, -1.0)
            note_idle(state, v, time_s)
        mark_lost(state, r)
    elif v != NONE:
        _request_kv(state, r, time_s, NONE)
    else:
        _enter_engine(state, r, request.prefill_worker, time_s, NONE)


@kernel_jit
def _arrive_prefilled(state, r, time_s):
    """Let request r arrive with its first token, and with its KV on the first worker (PREFILLED)."""
    worker, request = state.workers[0], state.requests[r]
    request.prefill_worker, request.decode_worker, request.epoch = ZERO, NONE, worker.epoch
    request.computed_tokens = request.length_tokens
    first_token(state, r, time_s)
    if request.output_tokens == 1:
        assign_request(state, ZERO, r, 1.0)
        finish_request(state, ZERO, r, time_s)
        return
    worker.used_blocks += request_blocks(state, ZERO, request.length_tokens) + seat_blocks(state, ZERO, r)
    hand_off(state, r, time_s, worker.first_lane)


@where_rare(lambda state, time_s, cause: None)
def send_held(state, time_s, cause):
    """Send the requests that the router holds back, in order, until there is no worker for the next one.

    If the only workers that could hold a request went down, the request does not keep the others waiting.
    """
    while state.counters[HELD] != NONE:
        r = state.counters[HELD]
        w = route_by_prefix(state, r, time_s)
        if w == NONE and holds_back(state, ARRIVAL_POOL, r):
            return
        state.counters[HELD] = remove_root(state.requests, r)
        _send_or_park(state, r, w, time_s, cause)


@where_has("caches", lambda state, time_s, cause: None)
def send_held_prompts(state, time_s, cause):
    """Send the prompts that the queue dlpm-held lets go now. A step that starts at this moment comes first,
    as before the requests of `send_held`.
    """
    if state.counters[HELD_PROMPTS] == 0 or _starts_next(state, time_s):
        return
    for w in range(len(state.workers)):
        if is_held_prompt_due(state, w):
            evict_for_worker(state, w, time_s)
        r = send_next_held(state, w)
        while r != NONE:
            _send_prompt(state, r, w, time_s, cause)
            r = send_next_held(state, w)


@where_rare(lambda state, time_s, cause: None)
def route_lost(state, time_s, cause):
    """Route requests that lost their worker: to a decode worker if their KV is still on a prefill worker."""
    while state.counters[LOST] != NONE:
        r = state.counters[LOST]
        state.counters[LOST] = remove_root(state.requests, r)
        request = state.requests[r]
        if request.computed_tokens > 0 and not lost_prefill_kv(state, r):
            hand_off(state, r, time_s, cause)
        else:
            if request.computed_tokens > 0:
                reset_progress(state, r)
            route_arrival(state, r, time_s, cause)


@kernel_jit
def hand_off(state, r, time_s, cause):
    """Choose a decode worker for request r, whose KV is on its prefill worker.

    The decode worker fetches the KV once the router has sent it the request, and its API server has tokenized
    the prompt.
    """
    request = state.requests[r]
    flip_if_due(state, HAND_OFF_POOL, time_s)
    v = choose_worker(state, HAND_OFF_POOL, r, time_s)
    if v == NONE:
        if _may_return(state, HAND_OFF_POOL, r):  # Its KV stays on the prefill worker.
            state.counters[LIMBO] = insert_in_heap(
                state.requests, state.counters[LIMBO], r, request.arrival_s
            )
            return
        _release_kv(state, request.prefill_worker, r)
        reject_request(state, r)
        return
    request.decode_worker = v
    assign_request(state, v, r, 1.0)
    worker, kind = state.workers[v], state.types[state.workers[v].type]
    # With PREFILLED (see `_request_kv`) the decode pool is tested alone, without the time of a hand-off.
    if state.counters[PREFILLED] == 0 and kind.hand_off_s > 0.0:
        request.decode_epoch = worker.epoch
        sent_s = time_s + kind.hand_off_s
        worker.read_s = max(worker.read_s, sent_s) + kind.prompt_token_s * request.input_tokens
        request_kv_s = max(worker.read_s, _kv_readable_s(state, request.prefill_worker, v, worker.read_s))
        state.counters[READING] = insert_in_heap(state.requests, state.counters[READING], r, request_kv_s)
    else:
        _request_kv(state, r, time_s, cause)


@kernel_jit
def _kv_readable_s(state, w, v, time_s):
    """When decode worker v knows how to read the KV of prefill worker w.

    Its first message to w, sent now if there was none, takes `first_hand_off_s`, but only in the warm-up:
    workers whose first hand-off in the trace is later have had others before the trace began.
    """
    if len(state.met_s) == 0:  # First hand-offs take no longer than others.
        return -np.inf
    if state.met_s[w, v] == NEVER:
        is_warm_up = time_s < state.window[0]
        first_s = state.types[state.workers[v].type].first_hand_off_s
        state.met_s[w, v] = time_s + first_s if is_warm_up else time_s
    return state.met_s[w, v]


@kernel_jit
def _request_kv(state, r, time_s, cause):
    """Let the decode worker of request r ask for its KV, behind the requests that wait for blocks there."""
    v = state.requests[r].decode_worker
    # In the test of decode pools alone (`Oracle.decode_keeps_up_alone`) runs of full workers are not cut,
    # which saves most events: their steps end at the same times, but for the last bit.
    waits_for_end_of_run = state.counters[PREFILLED] > 0 and is_full(state, v)
    line_up_for_kv(state, v, state.workers[v], INBOUND, r)
    if not waits_for_end_of_run:
        receive_handoffs(state, v, time_s, cause)


@kernel_jit
def end_hand_off(state, r, time_s):
    """Hand request r, whose KV has crossed the link, to its decode worker; the prefill worker forgets it."""
    request = state.requests[r]
    link = len(state.lanes)
    w, v = request.prefill_worker, request.decode_worker
    if drop_lost_transfer(state, r, time_s):
        return
    _release_kv(state, w, r)
    note_idle(state, w, time_s)
    line_up_for_kv(state, v, state.workers[v], READY, r)
    wake_for_kv(state, v, r, time_s, link)
    if state.workers[w].first_waiting != NONE or is_loading_kv(state, w):
        wake_worker(state, w, time_s, link)  # Requests that wait, or have been loaded, may find room now.


@kernel_jit
def _release_kv(state, w, r):
    """Give back the blocks of the KV of r on its prefill worker w.

    They may come too late for a step that an asynchronous engine has formed already (`late_blocks`).
    """
    worker = state.workers[w]
    is_formed = state.lanes[worker.first_lane].run_steps > 0 and not runs_empty(state, w)
    is_formed = is_formed or has_step_in_flight(worker)
    is_late = state.types[worker.type].is_async > 0 and is_formed
    used_blocks, tokens = worker.used_blocks, state.requests[r].length_tokens
    release_blocks(state, w, r, tokens, tokens, is_late)
    if is_late:
        worker.late_blocks += max(used_blocks - worker.used_blocks, ZERO)


@kernel_jit
def _end_lane(state, l, time_s):
    """End the current run of lane l: tokens leave; requests finish, are handed off or join the decodes."""
    lane = state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    steps = lane.run_steps
    count_weights(state, l)
    if kind.kv_delay_steps > 0:  # The next step is formed when the last one of the run begins.
        worker.formed_s = lane.run_start_s + run_s(lane.run_first_s, lane.run_growth_s, steps - 1)
    # In a pipeline a worker is busy with several batches at once, so each counts with the time of a stage.
    busy_s = time_s - lane.run_start_s if kind.lanes == 1 else lane.stage_s
    end_batch(state, l, busy_s, steps)
    lane.run_steps = 0
    store_ended_step(state, l, time_s)

    if lane.decodes > 0 and lane.is_decoding:
        advance_decodes(state, l, steps, time_s)
        if lane.decode_step == lane.next_finish_step:
            end_finished_decodes(state, l, time_s)
    elif len(state.runs) > 0:  # `advance_decodes` records all other steps.
        step_s = lane.run_first_s if kind.lanes == 1 else lane.stage_s
        record_steps(state, l, step_s, 0.0, ONE, ZERO)
    for i in range(lane.prefills):
        _end_chunk(state, l, state.chunks[l, i], time_s)
    lane.prefills = 0
    # Asynchronous engines receive in `receive_between_steps`, those that pull when they form their next step.
    if not kind.is_async and not kind.pulls_kv:
        receive_handoffs(state, w, time_s, l)


@kernel_jit
def _end_chunk(state, l, chunk, time_s):
    """End a chunk of a prompt, which lane l has computed; after the last one a token is out."""
    w, r = state.lanes[l].worker, chunk.request
    worker = state.workers[w]
    report_computed(state, w, r, chunk.tokens)
    show_prefix(state, w, r)
    if chunk.is_last:
        _end_prompt(state, l, r, time_s)
    elif state.types[worker.type].batching != VLLM_V1:  # vLLM v1 put it back when the step was formed.
        append_to_list(state.requests, worker, PARTIAL, r)


@kernel_jit
def _end_prompt(state, l, r, time_s):
    """Give request r, whose prompt is computed, a token; it ends, is handed off or joins the decodes."""
    lane, request = state.lanes[l], state.requests[r]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    # With TYPE.discards_token clients do not see the first token if a prefill worker makes it; the decode
    # worker then computes the prompt's last token again.
    is_seen = worker.role != PREFILL or kind.discards_token == 0 or request.generated_tokens > 0
    if not is_seen:
        request.last_token_s = time_s
    elif request.generated_tokens == 0:
        first_token(state, r, time_s)
    else:  # The request was preempted: this is not its first token.
        single_gap(state, w, r, time_s)
        request.generated_tokens += 1
        request.last_token_s = time_s
    report_token(state, r)
    note_first_token(state, w, r)
    if is_seen:
        charge_token(state, w, r)
    if request.generated_tokens == request.output_tokens:
        _end_request(state, w, r, time_s)
    elif worker.role == PREFILL:
        assign_request(state, w, r, -1.0)
        leave_memory(state, w, r)
        worker.running -= 1
        worker.late_seats += kind.is_async  # The next step is formed already, without this seat.
        request.prefill_step_s = time_s - lane.run_start_s  # The transfer may overlap with this step.
        request.epoch = worker.epoch
        hand_off(state, r, time_s, l)
    else:
        join_lane(state, l, r)


@where_has("dp_ranks", _end_lane)
def end_run(state, l, time_s):
    """End the current run of lane l, and those of the worker's other ranks."""
    first = state.lanes[l].worker
    for w in range(first, first + state.dp_ranks[first].count):
        # Ranks have one lane each; a worker of one rank may have several, of which l has ended.
        own_lane = state.workers[w].first_lane if w > first else l
        if not end_if_empty(state, w, time_s):
            _end_lane(state, own_lane, time_s)


def _end_finished_unordered(state, l, time_s):
    """End the decodes of lane l that have their last token, and find when the next of its decodes ends.

    One pass does both, because the last slot moves into the emptied one, which the pass reads next.
    """
    lane, slot, soonest = state.lanes[l], ZERO, LARGEST
    decode_step = lane.decode_step  # In a variable, since LLVM would read the field for every slot.
    while slot < lane.decodes:
        finish_step = state.slots[l, slot].finish_step
        if finish_step == decode_step:
            _end_request(state, lane.worker, take_out(state, l, slot), time_s)
        else:
            soonest = min(soonest, finish_step)
            slot += 1
    lane.next_finish_step = soonest


@where_has("caches", _end_finished_unordered)
def end_finished_decodes(state, l, time_s):
    """End the decodes of lane l that have their last token, in order of admission.

    With prefix caches the order matters: prefixes leave the cache in the order in which requests release
    them.
    """
    lane = state.lanes[l]
    while True:
        first = lane.decodes  # No slot has this number: none found yet.
        for slot in range(lane.decodes):
            if state.slots[l, slot].finish_step == lane.decode_step and (
                first == lane.decodes
                or state.slots[l, slot].admission_number < state.slots[l, first].admission_number
            ):
                first = slot
        if first == lane.decodes:
            break
        _end_request(state, lane.worker, take_out(state, l, first), time_s)
    refresh_next_finish_step(state, l)


@kernel_jit
def _end_request(state, w, r, time_s):
    """Finish request r, which has its last token. Its seat (max_num_seqs) and its blocks are free now, or,
    on an asynchronous engine, once the engine has formed its next step.
    """
    worker = state.workers[w]
    leave_memory(state, w, r)
    if state.types[worker.type].is_async:
        append_to_list(state.requests, worker, LEAVING, r)
    else:
        free_seat_and_blocks(state, w, r)
    finish_request(state, w, r, time_s)
