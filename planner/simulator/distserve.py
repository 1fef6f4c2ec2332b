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

from planner.simulator.agenda import PENDING, schedule
from planner.simulator.compiled import SOURCES, entry_jit, kernel_jit, small_jit
from planner.simulator.counting import count, count_run, in_window, is_broken, let_in, record_run
from planner.simulator.layout import (
    BACK,
    DECODE,
    DONE,
    FRONT,
    INBOUND,
    NONE,
    ONE,
    PREFILL,
    RANK,
    TTFT,
    ZERO,
    State,
)
from planner.simulator.pointers import pointer_to
from planner.simulator.queues import append, pop
from planner.simulator.routing import choose
from planner.simulator.slots import assign, blocks_of, finish, load, reject
from planner.simulator.step_times import step_seconds
from planner.simulator.transfer import transfer_end_s

PREFILLS, DECODES, RUNNING = np.int64(0), np.int64(1), np.int64(2)  # lists of a rank
ENTERED, RELEASED = range(2, 4)  # of `marks`, after those of the agenda: requests that came, that may come
MARKS = 4


@kernel_jit
def _queue(m, l, which, r, now):
    """Put request r at the end of a list of rank l, which is woken if it sleeps."""
    rank = m.ranks[l]
    m.requests[r].next = NONE
    if rank.head[which] == NONE:
        rank.head[which] = r
    else:
        m.requests[rank.tail[which]].next = r
    rank.tail[which] = r
    if which != RUNNING and m.place[l] == NONE:
        schedule(m, l, now)


@kernel_jit
def _begin(m, l, which):
    """Move the first request of a list of rank l into the batch that it forms."""
    rank = m.ranks[l]
    r = rank.head[which]
    rank.head[which] = m.requests[r].next
    rank.size += 1
    _queue(m, l, RUNNING, r, 0.0)


@kernel_jit
def _count_waiting(m, w, requests):
    """So many more wait at rank 0."""
    m.workers[w].waits += requests
    load(m, w, 0.0, 0.0, 0.0)


@small_jit
def _blocks(m, w, r):
    """KV blocks that request r takes on worker w."""
    request = m.requests[r]
    return blocks_of(request.input + (0 if m.workers[w].role == PREFILL else request.output))


@kernel_jit
def _form_prefills(m, l, now):
    """The prefill batch of rank l; none where memory holds not even the first prompt."""
    rank, w = m.ranks[l], m.lanes[l].worker
    worker = m.workers[w]
    kind = m.types[worker.type]
    is_first = l == worker.lane
    batch = m.requests[rank.head[PREFILLS]].order
    while rank.head[PREFILLS] != NONE:
        request = m.requests[rank.head[PREFILLS]]
        if is_first:
            blocks = _blocks(m, w, rank.head[PREFILLS])
            if worker.used + blocks > kind.blocks or (
                rank.size > 0 and (rank.tokens + request.input > kind.budget or rank.size == kind.seats)
            ):
                break
            worker.used += blocks
            worker.running += 1
            request.order = rank.formed
            request.scheduled_s = now
        elif request.order != batch:
            break
        rank.tokens += request.input
        _begin(m, l, PREFILLS)
    rank.formed += 1


@kernel_jit
def _form_decodes(m, l):
    """The decode batch of rank l: its context, with the new tokens."""
    rank, worker = m.ranks[l], m.workers[m.lanes[l].worker]
    kind = m.types[worker.type]
    context = ZERO
    while rank.head[DECODES] != NONE:
        request = m.requests[rank.head[DECODES]]
        tokens = request.input + request.generated
        if rank.size > 0 and (context + tokens > kind.decode_tokens or rank.size == kind.seats):
            break
        context += tokens
        _begin(m, l, DECODES)
    if l == worker.lane and worker.role == DECODE:
        _count_waiting(m, m.lanes[l].worker, -rank.size)
    return context


@kernel_jit
def _start(m, l, now):
    """Run the next batch of rank l, if there is one."""
    rank, worker = m.ranks[l], m.workers[m.lanes[l].worker]
    kind = m.types[worker.type]
    rank.size, rank.tokens, rank.start_s = 0, 0, now
    decodes, context, pairs, squares = ZERO, ZERO, 0.0, 0.0
    if rank.head[PREFILLS] != NONE:
        _form_prefills(m, l, now)
        r = rank.head[RUNNING]
        while r != NONE:
            n = m.requests[r].input
            pairs += 0.5 * n * (n + 1)
            squares += float(n) * n
            r = m.requests[r].next
    rank.is_prefill = rank.size > 0
    if rank.size == 0:
        if rank.head[DECODES] == NONE:
            schedule(m, l, np.inf)
            return
        context = _form_decodes(m, l)
        decodes = rank.size
    stage, extra, send, _, _ = step_seconds(
        m, kind, decodes, context, rank.tokens, pairs, squares, 0.0, rank.size - decodes
    )
    if l == worker.lane:
        stage += extra
    if l < worker.lane + kind.pp - 1:
        stage += send
    schedule(m, l, now + stage)


@kernel_jit
def _end(m, l, now):
    """The batch of rank l goes on to the next rank, or its tokens leave."""
    rank, w = m.ranks[l], m.lanes[l].worker
    worker = m.workers[w]
    kind = m.types[worker.type]
    decodes = rank.size * (1 - rank.is_prefill)
    stage_s = (now - rank.start_s) / kind.pp
    worker.busy_s += stage_s
    record_run(m, w, rank.start_s, stage_s, 0.0, ONE, ZERO, decodes, rank.tokens, worker.used)
    if l == worker.lane:
        worker.steps += 1
        worker.tokens += rank.tokens + decodes
        if rank.is_prefill and worker.role != DECODE:
            _count_waiting(m, w, -rank.size)
    which = PREFILLS if rank.is_prefill else DECODES
    is_last = l == worker.lane + kind.pp - 1
    since_s, sequences = np.nan, ZERO  # requests with one gap in common
    r = rank.head[RUNNING]
    rank.head[RUNNING] = NONE
    while r != NONE:
        request = m.requests[r]
        following = request.next
        if not is_last:
            _queue(m, l + 1, which, r, now)
        else:
            if rank.is_prefill:
                request.first_token_s = now
                request.transfer_s = now - rank.start_s
                load(m, w, -float(request.input), 0.0, 0.0)
                if in_window(m, request.arrival_s):
                    count(m, TTFT, now - request.arrival_s)
            else:
                if request.last_token_s != since_s:
                    _count_gap(m, w, since_s, now, sequences)
                    since_s, sequences = request.last_token_s, ZERO
                sequences += 1
                request.gap_max_s = max(request.gap_max_s, now - since_s)
            request.generated += 1
            request.last_token_s = now
            _go_on(m, w, r, now)
        r = following
    _count_gap(m, w, since_s, now, sequences)


@kernel_jit
def _count_gap(m, w, since_s, now, sequences):
    if sequences > 0:
        count_run(m, since_s, now - since_s, 0.0, ONE, sequences)
        record_run(m, w, since_s, now - since_s, 0.0, ONE, sequences, ZERO, NONE, ZERO)


@kernel_jit
def _go_on(m, w, r, now):
    """Request r has a token more: it is done, goes to a decode worker, or round again."""
    request, worker = m.requests[r], m.workers[w]
    if request.generated == request.output:
        worker.used -= _blocks(m, w, r)
        finish(m, w, r, now)
        _use_room(m, w, now)
    elif worker.role != PREFILL:
        if worker.role == DECODE:
            _count_waiting(m, w, ONE)
        _queue(m, worker.lane, DECODES, r, now)
    else:
        assign(m, w, r, -1.0)
        v = choose(m, BACK, r, now)
        if v == NONE:
            worker.used -= _blocks(m, w, r)
            worker.running -= 1
            reject(m, r)
            return
        request.decode_worker = v
        assign(m, v, r, 1.0)
        append(m, v, INBOUND, r)
        _use_room(m, v, now)


@kernel_jit
def _use_room(m, w, now):
    """Worker w has room, or more to put there: pull KV, or prefill."""
    worker = m.workers[w]
    while worker.head[INBOUND] != NONE:
        r = worker.head[INBOUND]
        blocks = _blocks(m, w, r)
        if worker.used + blocks > m.types[worker.type].blocks:
            return
        pop(m, w, INBOUND)
        worker.used += blocks
        worker.running += 1
        end_s = transfer_end_s(m, r, blocks_of(m.requests[r].input), now)
        if end_s > now:
            schedule(m, len(m.ranks) + r, end_s)
        else:
            _arrived(m, r, now)
    if m.ranks[worker.lane].head[PREFILLS] != NONE and m.place[worker.lane] == NONE:
        schedule(m, worker.lane, now)


@kernel_jit
def _arrived(m, r, now):
    """The KV of r lies on its decode worker."""
    w, v = m.requests[r].prefill_worker, m.requests[r].decode_worker
    source = m.workers[w]
    source.used -= _blocks(m, w, r)
    source.running -= 1
    if m.ranks[source.lane].head[PREFILLS] != NONE and m.place[source.lane] == NONE:
        schedule(m, source.lane, now)
    _count_waiting(m, v, ONE)
    _queue(m, m.workers[v].lane, DECODES, r, now)


@kernel_jit
def _arrive(m, r, now):
    w = choose(m, FRONT, r, now)
    if w == NONE:
        reject(m, r)
        return
    m.requests[r].prefill_worker = w
    assign(m, w, r, 1.0)
    m.workers[w].waits += 1
    load(m, w, float(m.requests[r].input), 0.0, 0.0)
    _queue(m, m.workers[w].lane, PREFILLS, r, now)


def _entry(sources):
    @entry_jit
    def run(fields, closed_loop, stop_early):
        m = pointer_to(fields)
        n = len(m.requests) if sources > 0 else 0  # closed over: `sources` is part of the cache's key
        ranks, marks = len(m.ranks), m.marks
        while m.counters[DONE] < n:
            now = np.inf
            if marks[PENDING] > 0:
                now = m.time[m.heap[0]]
            r = marks[ENTERED]
            if r < marks[RELEASED] and m.requests[r].arrival_s <= now:
                now = m.requests[r].arrival_s
                marks[ENTERED] += 1
                _arrive(m, r, now)
            elif now == np.inf:
                return
            elif m.heap[0] < ranks:
                l = m.heap[0]
                if m.ranks[l].size > 0:
                    _end(m, l, now)
                _start(m, l, now)
            else:
                r = m.heap[0] - ranks
                schedule(m, m.heap[0], np.inf)
                _arrived(m, r, now)
            if closed_loop > 0:
                marks[RELEASED] = let_in(m, marks[RELEASED], closed_loop, now)
            if stop_early and is_broken(m):
                return

    return run


run = _entry(SOURCES)
run.__doc__ = (
    """Simulate until every request is done or, with `stop_early`, until a limit can no longer hold."""
)


def simulate(state: State, *, closed_loop: int, stop_early: bool) -> None:
    """Fill in `state`; `closed_loop` > 0 keeps that many requests in flight."""
    n, entities = len(state.requests), len(state.lanes) + len(state.requests)
    ranks = np.zeros(len(state.lanes), dtype=RANK)
    ranks["head"] = ranks["tail"] = NONE
    marks = np.zeros(MARKS, dtype=np.int64)
    marks[RELEASED] = min(closed_loop, n) if closed_loop else n
    parts = state._replace(
        ranks=ranks,
        time=np.zeros(entities),
        turn=np.zeros(entities, dtype=np.int64),
        place=np.full(entities, NONE),
        heap=np.zeros(entities, dtype=np.int64),
        marks=marks,
    )
    run(parts, closed_loop, stop_early)
    state.lanes["run_steps"] = ranks["size"] > 0
    state.time[: len(ranks)] = np.where(parts.place[: len(ranks)] == NONE, np.inf, parts.time[: len(ranks)])
