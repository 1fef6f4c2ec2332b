"""The engine of DistServe (Zhong et al. 2024, arXiv:2401.09670), as the simulator of its authors runs it.

Ranks. A worker is a ring of `pp` ranks, the stages of its pipeline. In this module a lane
(`planner/simulator/layout.py`) is one rank. A rank runs one batch at a time, and prefills that wait for it go
before decodes. Rank 0 forms batches of prefills, first come, first served, up to the token budget. A later
rank runs a batch of prefills as rank 0 formed it. But it batches decodes as they come: two batches of decodes
that wait for it at once become one. The tokens in the context of a batch of decodes, with the new ones, stay
within a limit (`decode_batch_tokens`). A request that is longer than a limit runs alone. A token is out when
the last rank has run its batch; its request then queues at rank 0 for the next token.

Memory. A prefill worker keeps a prompt's KV until the decode worker has fetched it, and the decode worker
fetches it once it has room for the whole request. Workers of both roles reserve the blocks of a request when
they take it. The authors' simulator counts no memory and moves KV in no time; here a cache and a link without
limits give the same.

Routing. The policy "least-waiting" is the authors': it counts the requests that wait at rank 0 for their
prefill or are prefilled by it, and the decodes that wait at rank 0. A worker whose decodes all run therefore
looks idle.

Names of arguments: w and v are workers, l is a rank, r a request, all by their numbers. `kind` is the record
of a worker's type. All functions change `state` in place.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.counting import (
    count_run,
    end_batch,
    first_token,
    is_broken,
    record_gap,
    record_steps,
    release_next,
)
from planner.simulator.event_heap import next_arrival, next_time_s, schedule_event
from planner.simulator.kv_blocks import blocks_of
from planner.simulator.layout import (
    ARRIVAL_POOL,
    DECODE,
    DONE,
    HAND_OFF_POOL,
    INBOUND,
    NEVER,
    NONE,
    ONE,
    PREFILL,
    RANK,
    ZERO,
    State,
)
from planner.simulator.numba_compile import entry_jit, kernel_jit, small_jit
from planner.simulator.pointers import pointer_to
from planner.simulator.queues import append_to_list, pop_first
from planner.simulator.request_ends import finish_request, reject_request
from planner.simulator.router_loads import add_load, assign_request
from planner.simulator.routing import choose_worker
from planner.simulator.slots import add_chunk, clear_chunks
from planner.simulator.step_times import step_seconds
from planner.simulator.transfer import transfer_end_s

# The lists of a rank (layout.RANK): prefills that wait, decodes that wait, and the requests of its batch.
PREFILLS, DECODES, RUNNING = np.int64(0), np.int64(1), np.int64(2)


@small_jit
def _wake_rank(state, l, time_s):
    """Let rank l begin its next batch now if it is idle, which it is without an event."""
    if state.heap_index[l] == NONE:
        schedule_event(state, l, time_s)


@kernel_jit
def _enqueue_request(state, l, list_number, r, time_s):
    """Put request r at the end of a list of rank l; if the rank is idle, it begins its next batch."""
    append_to_list(state.requests, state.ranks[l], list_number, r)
    _wake_rank(state, l, time_s)


@small_jit
def _move_to_batch(state, l, list_number):
    """Move the first request of a list of rank l into the batch that this rank forms."""
    rank = state.ranks[l]
    append_to_list(state.requests, rank, RUNNING, pop_first(state.requests, rank, list_number))


@kernel_jit
def _count_waiting(state, w, requests):
    """Add `requests`, which may be negative, to those that wait at rank 0 of worker w, for routing."""
    state.workers[w].waiting += requests
    add_load(state, w, 0.0, 0.0, 0.0)  # Adds nothing, but renews the router's score.


@small_jit
def _reserved_blocks(state, w, r):
    """KV blocks that request r reserves on worker w: for its prompt, and for its output unless w only
    prefills.
    """
    request = state.requests[r]
    output_tokens = ZERO if state.workers[w].role == PREFILL else request.output_tokens
    return blocks_of(request.input_tokens + output_tokens)


@kernel_jit
def _form_prefills(state, l, time_s):
    """Form the batch of prefills of rank l.

    The first rank takes prompts while the worker has free KV blocks for them, and reserves these blocks. It
    stops at the token budget or at max_num_seqs prompts, but takes at least one prompt if there are blocks
    for it. The batch stays empty if there are none. Later ranks repeat the first one's batch.
    """
    rank, lane = state.ranks[l], state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    is_first_rank = l == worker.first_lane
    batch = state.requests[rank.head[PREFILLS]].admission_number  # The number that rank 0 gave the batch.
    while rank.head[PREFILLS] != NONE:
        request = state.requests[rank.head[PREFILLS]]
        tokens = request.input_tokens
        if is_first_rank:
            blocks = _reserved_blocks(state, w, rank.head[PREFILLS])
            is_full = lane.prefill_tokens + tokens > kind.token_budget or lane.prefills == kind.seats
            if worker.used_blocks + blocks > kind.kv_blocks or (lane.prefills > 0 and is_full):
                break
            worker.used_blocks += blocks
            worker.running += 1
            request.admission_number = rank.formed
            request.scheduled_s = time_s
        elif request.admission_number != batch:
            break
        add_chunk(lane, ZERO, tokens)
        _move_to_batch(state, l, PREFILLS)
    rank.formed += 1


@kernel_jit
def _form_decodes(state, l):
    """Form the batch of decodes of rank l. Its context, `lane.kv_sum` tokens, includes the new tokens."""
    rank, lane = state.ranks[l], state.lanes[l]
    worker = state.workers[lane.worker]
    kind = state.types[worker.type]
    while rank.head[DECODES] != NONE:
        request = state.requests[rank.head[DECODES]]
        tokens = request.input_tokens + request.generated_tokens
        is_full = lane.kv_sum + tokens > kind.decode_batch_tokens or lane.decodes == kind.seats
        if lane.decodes > 0 and is_full:
            break
        lane.decodes += 1
        lane.kv_sum += tokens
        _move_to_batch(state, l, DECODES)
    if l == worker.first_lane and worker.role == DECODE:
        _count_waiting(state, lane.worker, -lane.decodes)


@kernel_jit
def _start_batch(state, l, time_s):
    """Form the next batch of rank l and schedule its end. Without requests the rank is idle: its event is
    taken off the heap (NEVER).
    """
    rank, lane = state.ranks[l], state.lanes[l]
    worker = state.workers[lane.worker]
    kind = state.types[worker.type]
    clear_chunks(lane)
    lane.decodes, lane.kv_sum, lane.is_decoding = 0, 0.0, 1
    lane.run_start_s, lane.run_steps = time_s, 0
    if rank.head[PREFILLS] != NONE:
        _form_prefills(state, l, time_s)
    if lane.prefills == 0:  # No prefill waits, or there are no KV blocks for the first one.
        if rank.head[DECODES] == NONE:
            schedule_event(state, l, NEVER)
            return
        _form_decodes(state, l)
    stage_s, extra_s, send_s, _, _ = step_seconds(state, kind, lane)
    if l == worker.first_lane:
        stage_s += extra_s
    if l < worker.first_lane + kind.pp - 1:  # Only the last rank sends nothing on.
        stage_s += send_s
    lane.run_steps = 1
    schedule_event(state, l, time_s + stage_s)


@kernel_jit
def _finish_batch(state, l, time_s):
    """End the batch of rank l. Its requests go on to the next rank; after the last rank each has a token
    more.
    """
    rank, lane = state.ranks[l], state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    # Each of the `pp` ranks counts its part of the worker's time.
    stage_s = (time_s - lane.run_start_s) / kind.pp
    record_steps(state, l, stage_s, 0.0, ONE, ZERO)
    if l == worker.first_lane:
        end_batch(state, l, stage_s, ONE)
        worker.dense_tokens += lane.decodes
        if lane.prefills > 0 and worker.role != DECODE:
            _count_waiting(state, w, -lane.prefills)
    else:
        worker.busy_s += stage_s
    # Requests whose last tokens came at one time, `since_s`, have the same gap: they are counted together.
    since_s, sequences = np.nan, ZERO
    is_last_rank = l == worker.first_lane + kind.pp - 1
    r = rank.head[RUNNING]
    rank.head[RUNNING] = NONE
    while r != NONE:
        request = state.requests[r]
        following = request.next
        if not is_last_rank:
            _enqueue_request(state, l + 1, PREFILLS if lane.prefills > 0 else DECODES, r, time_s)
        elif lane.prefills > 0:
            first_token(state, r, time_s)
            request.prefill_step_s = time_s - lane.run_start_s
            add_load(state, w, -float(request.input_tokens), 0.0, 0.0)
        else:
            if request.last_token_s != since_s:
                _count_gap(state, w, since_s, time_s, sequences)
                since_s, sequences = request.last_token_s, ZERO
            sequences += 1
            request.gap_max_s = max(request.gap_max_s, time_s - since_s)
            request.generated_tokens += 1
            request.last_token_s = time_s
        if is_last_rank:
            _place_next_token(state, w, r, time_s)
        r = following
    _count_gap(state, w, since_s, time_s, sequences)


@kernel_jit
def _count_gap(state, w, since_s, time_s, sequences):
    """Count and record the gap of `sequences` requests whose last tokens came at `since_s` and whose next
    ones come now; nothing with 0 sequences.
    """
    if sequences > 0:
        # Any lane will do, here the first: only limits of classes read it, which this engine does not have.
        count_run(state, ZERO, since_s, time_s - since_s, 0.0, ONE, sequences)
        record_gap(state, w, since_s, time_s - since_s, sequences)


@kernel_jit
def _place_next_token(state, w, r, time_s):
    """Say what becomes of request r, which has one token more on worker w: it is finished, handed off to a
    decode worker, or queued on w for its next token. It is rejected if no decode worker can hold it.
    """
    request, worker = state.requests[r], state.workers[w]
    if request.generated_tokens == request.output_tokens:
        worker.used_blocks -= _reserved_blocks(state, w, r)
        worker.running -= 1
        finish_request(state, w, r, time_s)
        _use_free_blocks(state, w, time_s)
    elif worker.role != PREFILL:
        if worker.role == DECODE:
            _count_waiting(state, w, ONE)
        _enqueue_request(state, worker.first_lane, DECODES, r, time_s)
    else:
        assign_request(state, w, r, -1.0)
        v = choose_worker(state, HAND_OFF_POOL, r, time_s)
        if v == NONE:
            worker.used_blocks -= _reserved_blocks(state, w, r)
            worker.running -= 1
            reject_request(state, r)
            _use_free_blocks(state, w, time_s)
            return
        request.decode_worker = v
        assign_request(state, v, r, 1.0)
        append_to_list(state.requests, state.workers[v], INBOUND, r)
        _use_free_blocks(state, v, time_s)


@kernel_jit
def _use_free_blocks(state, w, time_s):
    """Fetch the KV of requests that wait for worker w as long as it has room for them, and wake its first
    rank if prompts wait. Called when blocks of w become free, and when a request is handed off to it.
    """
    worker = state.workers[w]
    while worker.head[INBOUND] != NONE:
        r = worker.head[INBOUND]
        blocks = _reserved_blocks(state, w, r)
        if worker.used_blocks + blocks > state.types[worker.type].kv_blocks:
            return
        pop_first(state.requests, worker, INBOUND)
        worker.used_blocks += blocks
        worker.running += 1
        end_s = transfer_end_s(state, r, blocks_of(state.requests[r].input_tokens), time_s)
        if end_s > time_s:
            schedule_event(state, len(state.lanes) + r, end_s)
        else:
            _end_hand_off(state, r, time_s)
    if state.ranks[worker.first_lane].head[PREFILLS] != NONE:
        _wake_rank(state, worker.first_lane, time_s)


@kernel_jit
def _end_hand_off(state, r, time_s):
    """Queue request r, whose KV has arrived, on its decode worker v; its prefill worker w frees the
    blocks.
    """
    w, v = state.requests[r].prefill_worker, state.requests[r].decode_worker
    source = state.workers[w]
    source.used_blocks -= _reserved_blocks(state, w, r)
    source.running -= 1
    if state.ranks[source.first_lane].head[PREFILLS] != NONE:
        _wake_rank(state, source.first_lane, time_s)
    _count_waiting(state, v, ONE)
    _enqueue_request(state, state.workers[v].first_lane, DECODES, r, time_s)


@kernel_jit
def _route_arrival(state, r, time_s):
    """Send request r, which arrives now, to a worker for its prefill; reject it if no worker can hold it."""
    w = choose_worker(state, ARRIVAL_POOL, r, time_s)
    if w == NONE:
        reject_request(state, r)
        return
    state.requests[r].prefill_worker = w
    assign_request(state, w, r, 1.0)
    state.workers[w].waiting += 1
    add_load(state, w, float(state.requests[r].input_tokens), 0.0, 0.0)
    _enqueue_request(state, state.workers[w].first_lane, PREFILLS, r, time_s)


@entry_jit
def simulate_events(fields, closed_loop, stop_early):
    """Simulate until every request is done or, with `stop_early`, until a limit can no longer hold. `fields`
    is the State. Events 0 to `ranks` - 1 are those of the ranks: the end of a batch, or a waking. Event
    `ranks` + r is the end of the hand-off of request r.
    """
    state = pointer_to(fields)
    n = len(state.requests)
    ranks = len(state.lanes)
    while state.counters[DONE] < n:
        time_s, r = next_time_s(state), next_arrival(state)
        if r != NONE:
            time_s = state.requests[r].arrival_s
            _route_arrival(state, r, time_s)
        elif time_s == NEVER:
            return
        elif state.heap[0] < ranks:
            l = state.heap[0]
            if state.lanes[l].run_steps > 0:
                _finish_batch(state, l, time_s)
            _start_batch(state, l, time_s)
        else:
            r = state.heap[0] - ranks
            schedule_event(state, state.heap[0], NEVER)
            _end_hand_off(state, r, time_s)
        release_next(state, closed_loop, time_s)
        if stop_early and is_broken(state):
            return


def simulate(state: State, *, closed_loop: int, stop_early: bool) -> None:
    """Simulate a fleet of this engine, in place: `state` has the results afterwards.

    With `closed_loop` > 0 that many requests are in flight at any time, whatever their arrival times. With
    `stop_early` the simulation ends once a limit can no longer hold.
    """
    ranks = np.zeros(len(state.lanes), dtype=RANK)
    ranks["head"] = ranks["tail"] = NONE
    simulate_events(state._replace(ranks=ranks), closed_loop, stop_early)
