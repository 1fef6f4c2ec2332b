"""DistServe's instances (Zhong et al. 2024, arXiv:2401.09670): rings of ranks, as its simulator runs them.

A worker is a ring of `pp` ranks. Each runs one batch at a time: the prefills that wait for it before the
decodes. Rank 0 forms prefill batches, first come, first served, up to the token budget. A later rank takes
over a prefill batch as it was formed, but decodes as they come, so that micro-batches which meet in its queue
become one; their context, with the new tokens, keeps to a limit. A token leaves with the batch of the last
rank; then its request queues at rank 0 for the next. What is longer than a limit runs alone.

A prefill worker keeps a prompt's KV until the decode worker has pulled it, which it does once it has room for
all of the request; workers of both roles reserve that at once. That program counts no memory and moves KV in
no time: it is the case of an endless cache and link.

Routing "least-waiting" is that program's: by the requests that wait for or are in prefill at rank 0, and by
the decodes that wait at rank 0, so that an instance busy with all it has looks idle.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.counting import count_run, end_batch, first_token, is_over, record_gap, record_steps
from planner.simulator.event_heap import next_arrival, next_time_s, schedule
from planner.simulator.layout import BACK, DECODE, DONE, FRONT, INBOUND, NONE, ONE, PREFILL, RANK, ZERO, State
from planner.simulator.numba_compile import SOURCES, entry_jit, kernel_jit, small_jit
from planner.simulator.pointers import pointer_to
from planner.simulator.queues import append, pop
from planner.simulator.routing import choose
from planner.simulator.slots import add_chunk, assign, blocks_of, clear_chunks, finish, load, reject
from planner.simulator.step_times import step_seconds
from planner.simulator.transfer import transfer_end_s

PREFILLS, DECODES, RUNNING = np.int64(0), np.int64(1), np.int64(2)  # lists of a rank


@small_jit
def _wake(state, l, time_s):
    if state.heap_index[l] == NONE:
        schedule(state, l, time_s)


@kernel_jit
def _queue(state, l, which, r, time_s):
    """Request r is at the end of a list of rank l, which is woken if it sleeps."""
    append(state.requests, state.ranks[l], which, r)
    _wake(state, l, time_s)


@small_jit
def _begin(state, l, which):
    """Move the first request of a list of rank l into the batch that it forms."""
    rank = state.ranks[l]
    append(state.requests, rank, RUNNING, pop(state.requests, rank, which))


@kernel_jit
def _count_waiting(state, w, requests):
    """So many more wait at rank 0."""
    state.workers[w].waiting += requests
    load(state, w, 0.0, 0.0, 0.0)


@small_jit
def _blocks(state, w, r):
    """KV blocks that request r takes on worker w."""
    request = state.requests[r]
    return blocks_of(
        request.input_tokens + (0 if state.workers[w].role == PREFILL else request.output_tokens)
    )


@kernel_jit
def _form_prefills(state, l, time_s):
    """The prefill batch of rank l; none where memory holds not even the first prompt."""
    rank, lane = state.ranks[l], state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    is_first_rank = l == worker.first_lane
    batch = state.requests[rank.head[PREFILLS]].admission_number
    while rank.head[PREFILLS] != NONE:
        request = state.requests[rank.head[PREFILLS]]
        tokens = request.input_tokens
        if is_first_rank:
            blocks = _blocks(state, w, rank.head[PREFILLS])
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
        _begin(state, l, PREFILLS)
    rank.formed += 1


@kernel_jit
def _form_decodes(state, l):
    """The decode batch of rank l; its context counts the new tokens."""
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
        _begin(state, l, DECODES)
    if l == worker.first_lane and worker.role == DECODE:
        _count_waiting(state, lane.worker, -lane.decodes)


@kernel_jit
def _start(state, l, time_s):
    """Run the next batch of rank l, if there is one."""
    rank, lane = state.ranks[l], state.lanes[l]
    worker = state.workers[lane.worker]
    kind = state.types[worker.type]
    clear_chunks(lane)
    lane.decodes, lane.kv_sum, lane.is_decoding = 0, 0.0, 1
    lane.run_start_s, lane.run_steps = time_s, 0
    if rank.head[PREFILLS] != NONE:
        _form_prefills(state, l, time_s)
    if lane.prefills == 0:
        if rank.head[DECODES] == NONE:
            schedule(state, l, np.inf)
            return
        _form_decodes(state, l)
    stage_s, extra_s, send_s, _, _ = step_seconds(state, kind, lane)
    if l == worker.first_lane:
        stage_s += extra_s
    if l < worker.first_lane + kind.pp - 1:
        stage_s += send_s
    lane.run_steps = 1
    schedule(state, l, time_s + stage_s)


@kernel_jit
def _end(state, l, time_s):
    """The batch of rank l goes on to the next rank, or its tokens leave."""
    rank, lane = state.ranks[l], state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    stage_s = (time_s - lane.run_start_s) / kind.pp
    record_steps(state, l, stage_s, 0.0, ONE, ZERO)
    if l == worker.first_lane:
        end_batch(state, l, stage_s, ONE)
        worker.dense_tokens += lane.decodes
        if lane.prefills > 0 and worker.role != DECODE:
            _count_waiting(state, w, -lane.prefills)
    else:
        worker.busy_s += stage_s
    since_s, sequences = np.nan, ZERO  # requests with one gap in common
    r = rank.head[RUNNING]
    rank.head[RUNNING] = NONE
    while r != NONE:
        request = state.requests[r]
        following = request.next
        if l < worker.first_lane + kind.pp - 1:
            _queue(state, l + 1, PREFILLS if lane.prefills > 0 else DECODES, r, time_s)
        else:
            if lane.prefills > 0:
                first_token(state, r, time_s)
                request.prefill_step_s = time_s - lane.run_start_s
                load(state, w, -float(request.input_tokens), 0.0, 0.0)
            else:
                if request.last_token_s != since_s:
                    _count_gap(state, w, since_s, time_s, sequences)
                    since_s, sequences = request.last_token_s, ZERO
                sequences += 1
                request.gap_max_s = max(request.gap_max_s, time_s - since_s)
                request.generated_tokens += 1
                request.last_token_s = time_s
            _go_on(state, w, r, time_s)
        r = following
    _count_gap(state, w, since_s, time_s, sequences)


@kernel_jit
def _count_gap(state, w, since_s, time_s, sequences):
    if sequences > 0:
        count_run(state, ZERO, since_s, time_s - since_s, 0.0, ONE, sequences)
        record_gap(state, w, since_s, time_s - since_s, sequences)


@kernel_jit
def _go_on(state, w, r, time_s):
    """Request r has a token more: it is done, goes to a decode worker, or round again."""
    request, worker = state.requests[r], state.workers[w]
    if request.generated_tokens == request.output_tokens:
        worker.used_blocks -= _blocks(state, w, r)
        worker.running -= 1
        finish(state, w, r, time_s)
        _use_room(state, w, time_s)
    elif worker.role != PREFILL:
        if worker.role == DECODE:
            _count_waiting(state, w, ONE)
        _queue(state, worker.first_lane, DECODES, r, time_s)
    else:
        assign(state, w, r, -1.0)
        v = choose(state, BACK, r, time_s)
        if v == NONE:
            worker.used_blocks -= _blocks(state, w, r)
            worker.running -= 1
            reject(state, r)
            return
        request.decode_worker = v
        assign(state, v, r, 1.0)
        append(state.requests, state.workers[v], INBOUND, r)
        _use_room(state, v, time_s)


@kernel_jit
def _use_room(state, w, time_s):
    """Worker w has room, or more to put there: pull KV, or prefill."""
    worker = state.workers[w]
    while worker.head[INBOUND] != NONE:
        r = worker.head[INBOUND]
        blocks = _blocks(state, w, r)
        if worker.used_blocks + blocks > state.types[worker.type].kv_blocks:
            return
        pop(state.requests, worker, INBOUND)
        worker.used_blocks += blocks
        worker.running += 1
        end_s = transfer_end_s(state, r, blocks_of(state.requests[r].input_tokens), time_s)
        if end_s > time_s:
            schedule(state, len(state.lanes) + r, end_s)
        else:
            _arrived(state, r, time_s)
    if state.ranks[worker.first_lane].head[PREFILLS] != NONE:
        _wake(state, worker.first_lane, time_s)


@kernel_jit
def _arrived(state, r, time_s):
    """The KV of r lies on its decode worker."""
    w, v = state.requests[r].prefill_worker, state.requests[r].decode_worker
    source = state.workers[w]
    source.used_blocks -= _blocks(state, w, r)
    source.running -= 1
    if state.ranks[source.first_lane].head[PREFILLS] != NONE:
        _wake(state, source.first_lane, time_s)
    _count_waiting(state, v, ONE)
    _queue(state, state.workers[v].first_lane, DECODES, r, time_s)


@kernel_jit
def _arrive(state, r, time_s):
    w = choose(state, FRONT, r, time_s)
    if w == NONE:
        reject(state, r)
        return
    state.requests[r].prefill_worker = w
    assign(state, w, r, 1.0)
    state.workers[w].waiting += 1
    load(state, w, float(state.requests[r].input_tokens), 0.0, 0.0)
    _queue(state, state.workers[w].first_lane, PREFILLS, r, time_s)


def _entry(sources):
    @entry_jit
    def simulate_events(fields, closed_loop, stop_early):
        state = pointer_to(fields)
        n = len(state.requests) if sources > 0 else 0  # closed over: `sources` is part of the cache's key
        ranks = len(state.lanes)
        while state.counters[DONE] < n:
            time_s, r = next_time_s(state), next_arrival(state)
            if r != NONE:
                time_s = state.requests[r].arrival_s
                _arrive(state, r, time_s)
            elif time_s == np.inf:
                return
            elif state.heap[0] < ranks:
                l = state.heap[0]
                if state.lanes[l].run_steps > 0:
                    _end(state, l, time_s)
                _start(state, l, time_s)
            else:
                r = state.heap[0] - ranks
                schedule(state, state.heap[0], np.inf)
                _arrived(state, r, time_s)
            if is_over(state, closed_loop, stop_early, time_s):
                return

    return simulate_events


simulate_events = _entry(SOURCES)
simulate_events.__doc__ = (
    """Simulate until every request is done or, with `stop_early`, until a limit can no longer hold."""
)


def simulate(state: State, *, closed_loop: int, stop_early: bool) -> None:
    """Fill in `state`; `closed_loop` > 0 keeps that many requests in flight."""
    ranks = np.zeros(len(state.lanes), dtype=RANK)
    ranks["head"] = ranks["tail"] = NONE
    simulate_events(state._replace(ranks=ranks), closed_loop, stop_early)
