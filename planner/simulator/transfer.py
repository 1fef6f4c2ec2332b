"""Hand-offs from prefill to decode workers: KV blocks cross the link once the decode worker has room.

vLLM's decode workers pull: a transfer begins with a step that has a seat, blocks and a token of its budget
left, or at once where the worker is idle. A request whose LoRA adapter has no slot in that step is passed
over. Other engines (TYPE.pulls_kv is 0) are sent KV as soon as they have the blocks.

Similar steps are simulated at once, as a run. When something comes to a worker, its run is cut after the step
in progress. `cause` is the lane or the link whose event brought what came, NONE for an arrival: of two events
at one moment the one of the lower index comes first. An asynchronous engine forms its next step while one
runs, so what comes meanwhile can only be in the step after the next. A seat is one of the max_num_seqs places
among the requests that a worker runs. Letters: w and v are workers, l a lane (a batch of a worker), r a
request.
"""

from __future__ import annotations

import numpy as np

from planner.policies import GREEDY, VLLM_V1
from planner.simulator.adapters import begin_step, has_slot, note_admitted, passes_over
from planner.simulator.counting import run_s, steps_reaching
from planner.simulator.event_heap import set_time
from planner.simulator.kv_blocks import (
    blocks_for_next_step,
    blocks_of,
    blocks_of_steps,
    blocks_to_begin,
    foreseen_blocks,
    request_blocks,
    seat_blocks,
    uncomputed_blocks,
)
from planner.simulator.layout import INBOUND, NEVER, NONE, ONE, PARTIAL, READY, RESTING, ZERO
from planner.simulator.numba_compile import kernel_jit, small_jit
from planner.simulator.polling import steps_until_poll
from planner.simulator.queues import insert_in_heap, remove_from_list, remove_root
from planner.simulator.ranks import event_lane, rank_count, runs_empty, shorten_ranks


@kernel_jit
def _steps_begun(state, l, time_s, cause):
    """Steps of the current run of lane l up to and including the one in progress at `time_s`.

    If a step ends at exactly `time_s`, the next one is in progress if the lane's event came before that of
    `cause`.
    """
    lane = state.lanes[l]
    if lane.run_steps <= 1:
        return lane.run_steps
    if l < cause:
        time_s = np.nextafter(time_s, np.inf)
    steps = steps_reaching(lane.run_start_s, lane.run_first_s, lane.run_growth_s, time_s)
    return min(steps, lane.run_steps)


@kernel_jit
def shorten_run(state, w, time_s, cause):
    """End the current run of worker w with the step in progress at `time_s` (see `_steps_begun`)."""
    l = event_lane(state, w)
    _end_after(state, l, _steps_begun(state, l, time_s, cause))


@kernel_jit
def _end_after_next(state, l, time_s):
    """End the run of lane l after the step that follows the one in progress, because an asynchronous engine
    has formed that step already. An engine that polls goes on until it looks for requests.
    """
    lane = state.lanes[l]
    if lane.run_steps > 1:
        steps = 1  # When the run begins, only its first step is formed.
        if time_s > lane.run_start_s:
            steps += steps_reaching(lane.run_start_s, lane.run_first_s, lane.run_growth_s, time_s)
        _end_after(state, l, steps_until_poll(state, lane.worker, steps))


@kernel_jit
def _end_after(state, l, steps):
    """End the run of lane l after this many steps, if it is longer."""
    lane = state.lanes[l]
    if steps < lane.run_steps:
        lane.run_steps = steps
        shorten_ranks(state, lane.worker, steps)
        set_time(state, l, lane.run_start_s + run_s(lane.run_first_s, lane.run_growth_s, steps))


@small_jit
def known_s(time_s, cause):
    """When an asynchronous engine knows of what came at `time_s`.

    It knows of an arrival at once, of all else only after a step that starts at that moment has been formed.
    """
    return time_s if cause == NONE else np.nextafter(time_s, np.inf)


@kernel_jit
def wake_worker(state, w, time_s, cause):
    """Let worker w, to which something came, start a step now if a lane is idle, else after the one in
    progress.
    """
    worker = state.workers[w]
    first, lanes = event_lane(state, w), state.types[worker.type].lanes
    for l in range(first, first + lanes):
        if state.lanes[l].run_steps == 0:
            set_time(state, l, time_s)
            return
    if state.types[worker.type].is_async and not runs_empty(state, w):
        _end_after_next(state, first, known_s(time_s, cause))
    elif lanes == 1:  # Lanes of a pipeline do not run several steps at once.
        shorten_run(state, w, time_s, cause)


@kernel_jit
def wake_for_kv(state, v, r, time_s, cause):
    """Let worker v learn of the KV of request r, which has arrived there.

    vLLM looks for KV when a step starts, and its scheduler learns of it with the tokens of that step. An idle
    worker looks all the time.
    """
    worker, request = state.workers[v], state.requests[r]
    delay, l = state.types[worker.type].kv_delay_steps, event_lane(state, v)
    lane = state.lanes[l]
    request.known_step = 0  # Known in any step.
    if delay == 0 or lane.run_steps == 0 or runs_empty(state, v):
        wake_worker(state, v, time_s, cause)
        return
    after_s = np.nextafter(time_s, np.inf)  # A step that starts at this very moment has looked already.
    steps = steps_reaching(lane.run_start_s, lane.run_first_s, lane.run_growth_s, after_s) + delay
    request.known_step = worker.steps + steps + 1
    _end_after(state, l, steps)


@small_jit
def _hand_off_blocks(state, w, r):
    """KV blocks that request r, once handed over to worker w, has there before its first step."""
    return request_blocks(state, w, state.requests[r].length_tokens) + seat_blocks(state, w, r)


@kernel_jit
def _has_room(state, w, r, steps, time_s):
    """Whether the decode worker w may reserve blocks for request r.

    Blocks that the next `steps` steps of its run take, that prompts computed in part still need, or that its
    batching policy keeps free do not count as free.
    """
    worker = state.workers[w]
    kind = state.types[worker.type]
    lane = state.lanes[worker.first_lane]
    if kind.is_async:
        return _has_room_async(state, w, r, steps)
    coming = blocks_of_steps(lane, steps) if kind.lanes == 1 and kind.reserved_blocks == 0 else 0
    if kind.batching == VLLM_V1:
        coming += uncomputed_blocks(state, worker.head[PARTIAL])
    elif kind.reserved_blocks == 0:
        # A block stays free for the next token of every running request (`batching.run_length`).
        coming += worker.running + kind.watermark_blocks
    coming += _hand_off_blocks(state, w, r)
    if worker.used_blocks + coming > kind.kv_blocks:
        return False
    return kind.admission == GREEDY or foreseen_blocks(state, w, r, time_s) <= kind.kv_blocks


@kernel_jit
def _has_room_async(state, w, r, steps):
    """`_has_room` on an asynchronous engine that has begun `steps` steps of its run.

    The engine has formed the step after these too. So blocks for all these steps are taken, by its requests
    and by earlier hand-offs that find a seat. Preempted requests, which wait, go first.
    """
    worker = state.workers[w]
    kind = state.types[worker.type]
    lane = state.lanes[worker.first_lane]
    if worker.first_waiting != NONE:
        return False
    blocks = worker.used_blocks + _hand_off_blocks(state, w, r)
    if lane.decodes > 0:
        blocks += blocks_of_steps(lane, steps + 1)
    if lane.width > 1:  # Drafted tokens that the next step checks.
        blocks += lane.decodes * blocks_of(lane.width)
    for i in range(lane.prefills):
        if state.chunks[worker.first_lane, i].is_last:
            blocks += _next_blocks(state, w, state.chunks[worker.first_lane, i].request)
    blocks += uncomputed_blocks(state, worker.head[PARTIAL])
    resting = worker.head[RESTING]
    while resting != NONE:
        blocks += _next_blocks(state, w, resting)
        resting = state.requests[resting].next
    ready, seats = worker.head[READY], kind.seats - worker.running
    while ready != NONE and seats > 0 and blocks <= kind.kv_blocks:
        blocks += blocks_to_begin(state, w, ready)
        ready, seats = state.requests[ready].next, seats - 1
    return blocks <= kind.kv_blocks


@small_jit
def _next_blocks(state, w, r):
    """KV blocks that request r takes on worker w with its next token, all others being cached."""
    request, worker = state.requests[r], state.workers[w]
    tokens = np.int64(request.length_tokens)
    lane, kind = state.lanes[worker.first_lane], state.types[worker.type]
    held = blocks_of(tokens) + request.drafted_blocks
    return max(blocks_for_next_step(kind, lane, request, tokens) - held, ZERO)


@small_jit
def is_full(state, w):
    """Whether the first hand-off to worker w waits for KV blocks even if only `used_blocks` are taken."""
    worker = state.workers[w]
    blocks = worker.used_blocks + worker.awaited_blocks
    return worker.head[INBOUND] != NONE and blocks > state.types[worker.type].kv_blocks


@kernel_jit
def _shorten_for_hand_off(state, w, r, time_s, cause):
    """Cut the run of worker w short for request r, which is to be handed over to it.

    The run of an asynchronous engine is cut only if that makes room, as the engine looks for room at the
    beginning of every run.
    """
    if state.types[state.workers[w].type].is_async:
        if not _has_room_async(state, w, r, _steps_begun(state, event_lane(state, w), time_s, cause)):
            return
    shorten_run(state, w, time_s, cause)


@kernel_jit
def receive_between_steps(state, w, time_s):
    """Receive hand-offs on worker w when its asynchronous engine begins a step or finds none to begin.

    Only then have requests that ended in the step before given their blocks back.
    """
    kind = state.types[state.workers[w].type]
    if kind.is_async:
        for v in range(w, w + rank_count(state, w)):
            if kind.pulls_kv:
                begin_pulls(state, v, time_s)
            else:
                receive_handoffs(state, v, time_s, event_lane(state, w))


@kernel_jit
def receive_handoffs(state, w, time_s, cause):
    """Start the transfers for which the decode worker w has blocks, in order of hand-off.

    If blocks are missing, its run is cut short first: the blocks of its later steps are free then. On a
    worker that pulls, transfers begin with its next step (`begin_pulls`).
    """
    worker = state.workers[w]
    if state.types[worker.type].pulls_kv:
        _wake_to_pull(state, w, time_s, cause)
        return
    lane = state.lanes[worker.first_lane]
    while worker.head[INBOUND] != NONE:
        r = worker.head[INBOUND]
        if not _has_room(state, w, r, lane.run_steps, time_s):
            _shorten_for_hand_off(state, w, r, time_s, cause)
            if not _has_room(state, w, r, lane.run_steps, time_s):
                worker.awaited_blocks = _hand_off_blocks(state, w, r)
                return
        _begin_transfer(state, w, r, time_s)


@kernel_jit
def _begin_transfer(state, w, r, time_s):
    """Begin the transfer of request r, which waits for its KV, to worker w, which has room for it."""
    worker = state.workers[w]
    remove_from_list(state.requests, worker, INBOUND, r)
    blocks = _hand_off_blocks(state, w, r)
    worker.used_blocks += blocks
    worker.late_blocks = max(worker.late_blocks - blocks, ZERO)
    state.requests[r].decode_epoch = worker.epoch
    _start_transfer(state, r, blocks_of(state.requests[r].length_tokens), time_s)


@small_jit
def _knows_of_kv(worker, request):
    """Whether an asynchronous engine knows, in the step that it forms now, that the request's KV has come.

    The step under way has the number steps + 1, the step that is formed the one after it.
    """
    return request.known_step <= worker.steps + 2


@kernel_jit
def _may_pull(state, w, r, steps, time_s):
    """Whether request r may be pulled to worker w with the next step that its engine forms. `steps` steps of
    its run have begun by then; where the engine is not asynchronous, this next one is among them.

    The request needs a free seat, though it takes none until its KV is there.
    """
    worker = state.workers[w]
    kind = state.types[worker.type]
    taken = worker.running
    ready = worker.head[READY]
    while kind.is_async > 0 and ready != NONE:  # Ready requests that get a seat in this step.
        taken += _knows_of_kv(worker, state.requests[ready]) and has_slot(state, w, ready)
        ready = state.requests[ready].next
    return taken < kind.seats and _has_room(state, w, r, steps, time_s)


@kernel_jit
def _leaves_tokens(state, w):
    """Whether the step that the asynchronous engine of worker w forms now leaves some of its token budget.

    The step has the requests of the step under way, except decodes that end with it, and requests that were
    handed over before. The adapters of them all are noted, for `has_slot`.
    """
    worker = state.workers[w]
    l, kind = worker.first_lane, state.types[worker.type]
    lane = state.lanes[l]
    partial = worker.head[PARTIAL]
    # Decodes alone, even in every seat, do not fill this budget, and there are no adapters to note.
    if partial == NONE and kind.seats * lane.width < kind.token_budget and not passes_over(state):
        return True
    begin_step(state)
    tokens, longest = ZERO, np.int64(kind.token_budget)
    if kind.long_prefill_tokens > 0 and worker.running + worker.late_seats > 1:
        longest = np.int64(kind.long_prefill_tokens)
    for slot in range(lane.decodes):
        if lane.run_steps == 0 or state.slots[l, slot].finish_step > lane.decode_step + 1:
            tokens += lane.width
            note_admitted(state, state.slots[l, slot].request)
    for i in range(lane.prefills):
        chunk = state.chunks[l, i]
        request = state.requests[chunk.request]
        if chunk.is_last and request.generated_tokens + 1 < request.output_tokens:
            tokens += lane.width
            note_admitted(state, chunk.request)
    while partial != NONE:
        prompt = state.requests[partial]
        tokens += min(prompt.length_tokens - prompt.computed_tokens, longest)
        note_admitted(state, partial)
        partial = prompt.next
    for list_number in (RESTING, READY):
        r = worker.head[list_number]
        while r != NONE:
            if list_number == RESTING or (_knows_of_kv(worker, state.requests[r]) and has_slot(state, w, r)):
                tokens += lane.width
                note_admitted(state, r)
            r = state.requests[r].next
    return tokens < kind.token_budget


@kernel_jit
def begin_pulls(state, w, time_s):
    """Begin the transfers of hand-offs that worker w may pull with the step that its engine forms now.

    An asynchronous engine forms this step when the step before begins. `state` describes that earlier step,
    perhaps as a run of several. On such an engine preempted requests, which wait, go first.
    """
    worker = state.workers[w]
    lane, kind = state.lanes[worker.first_lane], state.types[worker.type]
    r, steps = worker.head[INBOUND], ONE
    if r == NONE:
        return
    if kind.is_async > 0:
        if worker.first_waiting != NONE or not _leaves_tokens(state, w):
            return
        steps = min(lane.run_steps, ONE)  # The step under way, if there is one.
    is_pulling = False
    while r != NONE:
        following = state.requests[r].next
        if has_slot(state, w, r):
            if not _may_pull(state, w, r, steps, time_s):
                break
            _begin_transfer(state, w, r, time_s)
            is_pulling = True
        r = following
    if is_pulling and worker.used_blocks + blocks_of_steps(lane, lane.run_steps) > kind.kv_blocks:
        _end_after(state, event_lane(state, w), ONE)


@kernel_jit
def _wake_to_pull(state, w, time_s, cause):
    """Let worker w look for hand-offs that it may pull: now if it is idle, else with its next step."""
    l, worker = event_lane(state, w), state.workers[w]
    kind, r = state.types[worker.type], worker.head[INBOUND]
    if r == NONE:
        return
    if state.lanes[l].run_steps == 0:
        set_time(state, l, time_s)
        return
    steps = _steps_begun(state, l, time_s, cause)
    # Admission by predictions may find free blocks at any step; with other policies a run only takes blocks.
    # Which hand-off has a slot for its adapter is known when the step is formed.
    may_pull = kind.admission != GREEDY or passes_over(state)
    if may_pull or (worker.first_waiting == NONE and _may_pull(state, w, r, steps + 1, time_s)):
        _end_after(state, l, steps)


@kernel_jit
def transfer_end_s(state, r, blocks, time_s):
    """When the KV blocks of r, sent now, have crossed the link; its prefill ended at `last_token_s`.

    A shared link carries one transfer after the other; on another link transfers do not slow each other down.
    If KV is sent layer by layer, all but the last layer's share may cross during the last prefill step. With
    a topology the link is that between the two workers.
    """
    request, link = state.requests[r], state.link[0]
    slow_factor = link.slow_factor  # Disturbances slow down all links.
    if len(state.place) > 0:
        from_place, to_place = state.place[request.prefill_worker], state.place[request.decode_worker]
        link = state.link[state.link_between[from_place, to_place]]
    seconds = blocks * link.block_s * slow_factor
    overlap_s, rest_s = 0.0, seconds
    # Only long prompts are sent layer by layer.
    if request.length_tokens >= link.overlap_tokens:
        rest_s = seconds * (1.0 - link.overlap_frac)
        if time_s == request.last_token_s:  # The transfer starts as the prefill ends.
            overlap_s = min(request.prefill_step_s, seconds * link.overlap_frac)
    start_s = time_s - overlap_s
    if link.is_shared:
        start_s = max(start_s, link.free_s)
    end_s = max(start_s + seconds, time_s + rest_s) + link.latency_s
    if link.is_shared:
        end_s = max(end_s, link.last_s)
        link.free_s, link.last_s = start_s + seconds, end_s
    return end_s


@kernel_jit
def _start_transfer(state, r, blocks, time_s):
    """Put request r, of which this many KV blocks are sent now, among the transfers under way."""
    link = state.link[0]
    link.root = insert_in_heap(state.requests, link.root, r, transfer_end_s(state, r, blocks, time_s))
    set_time(state, len(state.lanes), state.requests[link.root].key)


@kernel_jit
def end_transfer(state, time_s):
    """Take the transfer that ends first, and is complete, off the link; returns its request."""
    link = state.link[0]
    r = link.root
    link.root = remove_root(state.requests, r)
    set_time(state, len(state.lanes), NEVER if link.root == NONE else state.requests[link.root].key)
    return r
