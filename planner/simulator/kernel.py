"""The discrete-event kernel: exact engine steps of a fleet over a trace, compiled, no object per request.

A worker runs vLLM v1's loop. Each step takes one token of every running decode, then fills the token budget
with prefill: first the partly prefilled request, then waiting ones in order of arrival, while a seat
(max_num_seqs) and KV blocks for the whole prompt are free. A decode that finds no block preempts the request
admitted last, which later recomputes prompt and generated tokens. The first token leaves with the last
prefill chunk.

Between arrivals, completions and prefills nothing but the context changes, so a decode-only batch is advanced
many steps at once: with D sequences the j-th step lasts  first + j d D  (d: seconds per KV token), a sum in
closed form. Cost grows with requests, not with tokens, and every gap between tokens is still counted exactly.

Disaggregated requests leave their prefill worker when the first token is out. The decode worker reserves
blocks, the KV blocks cross the shared link one transfer after the other, the prefill worker frees them, and
the request joins the next decode step; its first gap holds all of that.

Events are ordered by (time, kind): arrivals first, then workers by index, then the link.

Names: w worker, r request, s a worker's count of steps, c tokens of a request in the KV cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

# Nothing here allocates, so no array needs a reference counted: without `_nrt` three quarters of the time
# went into counters.
kernel_jit = njit(cache=True, nogil=True, _nrt=False)  # type: ignore[call-overload]

MIXED, PREFILL, DECODE = 0, 1, 2
TTFT, TBT, TPOT, E2E = 0, 1, 2, 3
FINISHED, REJECTED, UNFINISHED = 0, 1, 2
WAITING, INBOUND, READY = 0, 1, 2  # lists of a worker: for prefill, for blocks to receive KV, for a seat
BLOCK = 16
GAP_DEPTH = 64
NONE = -1

WORKER = np.dtype(
    [
        # what does not change
        ("role", "i8"),
        ("table", "i8"),  # row of State.f_s
        ("a_s", "f8"),
        ("b_s", "f8"),
        ("d_s", "f8"),
        ("e_s", "f8"),
        ("budget", "i8"),  # max_num_batched_tokens
        ("seats", "i8"),  # max_num_seqs
        ("blocks", "i8"),  # KV blocks
        ("weight", "f8", 3),  # routing score per pending prompt token, per request, per KV token
        # the decodes
        ("step", "i8"),  # decode steps done
        ("decodes", "i8"),  # running decodes: the first slots
        ("late", "i8"),  # how many of the last slots have a gap that began before the current step
        ("next_finish", "i8"),  # smallest `finish` of the slots
        ("kv_sum", "f8"),  # K of the next step
        ("residue", "i8", BLOCK),  # decodes by (c - s) mod 16: who needs a block next
        ("used", "i8"),  # KV blocks in use or reserved
        ("gaps", "i8"),  # depth of the stack of longest gaps
        # prefill and the lists
        ("partial", "i8"),  # request prefilled in part, or NONE
        ("members", "i8"),  # prefill chunks in the current step
        ("head", "i8", 3),
        ("tail", "i8", 3),
        # the current run of equal steps; no steps: idle
        ("run_start", "f8"),
        ("run_first", "f8"),
        ("run_growth", "f8"),
        ("run_steps", "i8"),
        # what the router sees
        ("pending_tokens", "f8"),  # prompt tokens assigned and not yet prefilled
        ("requests", "f8"),  # assigned and not yet gone
        ("kv_tokens", "f8"),  # prompt tokens of those
        # totals
        ("busy_s", "f8"),
        ("steps", "i8"),
        ("tokens", "f8"),  # through the dense layers
    ]
)
SLOT = np.dtype(
    [
        ("request", "i8"),
        ("finish", "i8"),  # value of `step` at which it is done
        ("context", "i8"),  # c - s, constant while it runs
        ("since", "i8"),  # gaps of steps after this one are not yet in the request's longest gap
        ("order", "i8"),  # of admission
    ]
)
GAP = np.dtype([("step", "i8"), ("gap_s", "f8")])  # longest gap up to this step and after the entry below
MEMBER = np.dtype([("request", "i8"), ("tokens", "i8")])
REQUEST = np.dtype(
    [
        ("arrival_s", "f8"),
        ("input", "i8"),
        ("output", "i8"),
        ("generated", "i8"),
        ("computed", "i8"),  # prompt tokens (recomputed ones included) in the KV cache
        ("length", "i8"),  # tokens to prefill
        ("order", "i8"),
        ("next", "i8"),  # in the list it waits in
        ("last_token_s", "f8"),
        ("scheduled_s", "f8"),
        ("first_token_s", "f8"),
        ("finish_s", "f8"),
        ("gap_max_s", "f8"),
        ("transfer_end_s", "f8"),
        ("prefill_worker", "i4"),
        ("decode_worker", "i4"),
        ("preemptions", "i4"),
        ("status", "i4"),
    ]
)
LIMIT = np.dtype(
    [
        ("metric", "i8"),
        ("limit_s", "f8"),
        ("allowed", "i8"),  # violations that still pass
        ("violations", "i8"),
        ("counted", "i8"),
    ]
)
RUN = np.dtype(
    [
        ("worker", "i8"),
        ("start_s", "f8"),
        ("first_s", "f8"),
        ("growth_s", "f8"),
        ("steps", "i8"),
        ("sequences", "i8"),  # that saw these steps as gaps
        ("prefill_tokens", "i8"),  # NONE: a gap that one request alone has seen, not a step
        ("blocks", "i8"),  # KV blocks in use
    ]
)


class State(NamedTuple):
    """Everything the kernel reads and writes."""

    workers: npt.NDArray[np.void]  # (W,) WORKER
    slots: npt.NDArray[np.void]  # (W, seats) SLOT, the running decodes
    gaps: npt.NDArray[np.void]  # (W, GAP_DEPTH) GAP, longest first
    members: npt.NDArray[np.void]  # (W, seats) MEMBER
    requests: npt.NDArray[np.void]  # (n,) REQUEST
    f_s: npt.NDArray[np.float64]  # (types, tokens + 1)  f(N) + h
    front: npt.NDArray[np.int64]  # workers that take arrivals
    back: npt.NDArray[np.int64]  # workers that take hand-offs
    score: npt.NDArray[np.float64]  # (W,) routing score of each worker
    round_robin: npt.NDArray[np.int64]  # (2,) front, back: 1 round robin, 0 smallest score
    link: npt.NDArray[np.float64]  # (5,) see the indices below
    limits: npt.NDArray[np.void]  # (L,) LIMIT
    window: npt.NDArray[np.float64]  # (2,) requests arriving, and gaps ending, in [start, end] count
    runs: npt.NDArray[np.void]  # (R,) RUN, empty if not recorded
    time: npt.NDArray[np.float64]  # (W + 1,) next event of each worker and of the link
    heap: npt.NDArray[np.int64]  # (W + 1,) indexed binary heap over `time`
    place: npt.NDArray[np.int64]  # (W + 1,) heap position of each entity
    counters: npt.NDArray[np.int64]  # (7,) see the indices below


LINK_BLOCK_S, LINK_LATENCY_S, LINK_OVERLAP, LINK_FREE_S, LINK_LAST_S = range(5)
ADMITTED, TURN_FRONT, TURN_BACK, LINK_HEAD, LINK_TAIL, DONE, RUNS = range(7)


@kernel_jit
def _before(state, i, j):
    a, b = state.heap[i], state.heap[j]
    if state.time[a] != state.time[b]:
        return state.time[a] < state.time[b]
    return a < b


@kernel_jit
def _swap(state, i, j):
    a, b = state.heap[i], state.heap[j]
    state.heap[i], state.heap[j] = b, a
    state.place[b], state.place[a] = i, j


@kernel_jit
def _set_time(state, entity, time_s):
    """Move an entity's next event."""
    state.time[entity] = time_s
    i = state.place[entity]
    while i > 0 and _before(state, i, (i - 1) // 2):
        _swap(state, i, (i - 1) // 2)
        i = (i - 1) // 2
    size = len(state.heap)
    while True:
        child = 2 * i + 1
        if child >= size:
            return
        if child + 1 < size and _before(state, child + 1, child):
            child += 1
        if not _before(state, child, i):
            return
        _swap(state, i, child)
        i = child


@kernel_jit
def _push(state, w, which, r):
    """Append request r to a list of worker w."""
    worker = state.workers[w]
    state.requests[r].next = NONE
    if worker.head[which] == NONE:
        worker.head[which] = r
    else:
        state.requests[worker.tail[which]].next = r
    worker.tail[which] = r


@kernel_jit
def _push_front(state, w, which, r):
    worker = state.workers[w]
    state.requests[r].next = worker.head[which]
    if worker.head[which] == NONE:
        worker.tail[which] = r
    worker.head[which] = r


@kernel_jit
def _pop(state, w, which):
    worker = state.workers[w]
    r = worker.head[which]
    worker.head[which] = state.requests[r].next
    return r


@kernel_jit
def _blocks_of(tokens):
    return (tokens + BLOCK - 1) // BLOCK


@kernel_jit
def _run_s(first, growth, steps):
    """Seconds of the first `steps` steps of a run."""
    return first * steps + growth * (steps * (steps - 1) / 2.0)


@kernel_jit
def _steps_reaching(start, first, growth, time_s):
    """Smallest j >= 1 such that the j-th step of a run ends at `time_s` or later."""
    span = time_s - start
    if span <= first:
        return 1
    if growth > 0.0:
        half = first - 0.5 * growth
        root = (-half + np.sqrt(half * half + 2.0 * growth * span)) / growth
    else:
        root = span / first
    j = max(int(root) - 1, 1)
    while start + _run_s(first, growth, j) < time_s:
        j += 1
    while j > 1 and start + _run_s(first, growth, j - 1) >= time_s:
        j -= 1
    return j


@kernel_jit
def _blocks_for(worker, steps):
    """KV blocks that the running decodes will ask for in their next `steps` steps."""
    total = (steps // BLOCK) * worker.decodes
    for i in range(steps % BLOCK):
        total += worker.residue[(-(worker.step + i)) % BLOCK]
    return total


@kernel_jit
def _in_window(state, time_s):
    return state.window[0] <= time_s <= state.window[1]


@kernel_jit
def _count(state, metric, value_s):
    """Hold one value against the limits of its metric."""
    for k in range(len(state.limits)):
        if state.limits[k].metric == metric:
            state.limits[k].counted += 1
            if value_s > state.limits[k].limit_s:
                state.limits[k].violations += 1


@kernel_jit
def _count_run(state, start, first, growth, steps, sequences):
    """Hold the gaps of a run, each met by `sequences` requests, against the limits on tbt."""
    begin, end = 0, steps
    if start + first < state.window[0]:
        begin = _steps_reaching(start, first, growth, state.window[0]) - 1
    if start + _run_s(first, growth, steps) > state.window[1]:
        end = _steps_reaching(start, first, growth, state.window[1])
        if start + _run_s(first, growth, end) > state.window[1]:
            end -= 1
    if end <= begin:
        return
    for k in range(len(state.limits)):
        if state.limits[k].metric != TBT:
            continue
        state.limits[k].counted += sequences * (end - begin)
        limit_s = state.limits[k].limit_s
        if first + growth * (end - 1) > limit_s:
            i = begin
            if growth > 0.0:
                i = max(int((limit_s - first) / growth) - 1, begin)
            while first + growth * i <= limit_s:
                i += 1
            state.limits[k].violations += sequences * (end - i)


@kernel_jit
def _record_run(state, w, start, first, growth, steps, sequences, prefill_tokens, blocks):
    k = state.counters[RUNS]
    if k < len(state.runs):
        run = state.runs[k]
        run.worker, run.start_s, run.first_s, run.growth_s = w, start, first, growth
        run.steps, run.sequences, run.prefill_tokens, run.blocks = steps, sequences, prefill_tokens, blocks
    state.counters[RUNS] = k + 1


@kernel_jit
def _single_gap(state, w, r, time_s):
    """A gap that one request alone has seen: it was handed over, or preempted, in between."""
    request = state.requests[r]
    gap_s = time_s - request.last_token_s
    request.gap_max_s = max(request.gap_max_s, gap_s)
    if _in_window(state, time_s):
        _count(state, TBT, gap_s)
    _record_run(state, w, request.last_token_s, gap_s, 0.0, 1, 1, NONE, 0)


@kernel_jit
def _note_gap(state, w, gap_s):
    """The steps up to now had a longest gap of `gap_s`: push it on the worker's stack.

    The stack holds, from the bottom, ever shorter gaps with the step up to which each is the longest, so that
    the longest gap since any step is found by bisection. When it is full, all goes to the requests.
    """
    worker, gaps = state.workers[w], state.gaps
    depth = worker.gaps
    while depth > 0 and gaps[w, depth - 1].gap_s <= gap_s:
        depth -= 1
    if depth == GAP_DEPTH:
        for slot in range(worker.decodes - worker.late):  # the late ones have not seen it
            _settle_gap(state, w, slot)
            request = state.requests[state.slots[w, slot].request]
            request.gap_max_s = max(request.gap_max_s, gap_s)
        worker.gaps = 0
        return
    gaps[w, depth].step = worker.step
    gaps[w, depth].gap_s = gap_s
    worker.gaps = depth + 1


@kernel_jit
def _settle_gap(state, w, slot):
    """Bring the longest gap of the request in a slot up to date."""
    since = state.slots[w, slot].since
    low, high = 0, state.workers[w].gaps
    while low < high:
        middle = (low + high) // 2
        if state.gaps[w, middle].step > since:
            high = middle
        else:
            low = middle + 1
    if low < state.workers[w].gaps:
        request = state.requests[state.slots[w, slot].request]
        request.gap_max_s = max(request.gap_max_s, state.gaps[w, low].gap_s)
    state.slots[w, slot].since = state.workers[w].step


@kernel_jit
def _finish(state, w, r, time_s):
    """Request r is complete on worker w."""
    request = state.requests[r]
    request.finish_s = time_s
    request.status = FINISHED
    request.generated = request.output
    _load(state, w, 0, -1, -request.input)
    state.counters[DONE] += 1
    if _in_window(state, request.arrival_s):
        _count(state, E2E, time_s - request.arrival_s)
        if request.output > 1:
            _count(state, TPOT, (time_s - request.first_token_s) / (request.output - 1))


@kernel_jit
def _reject(state, r):
    """No worker has room for request r, ever."""
    request = state.requests[r]
    request.status = REJECTED
    state.counters[DONE] += 1
    if _in_window(state, request.arrival_s):
        if np.isnan(request.first_token_s):
            _count(state, TTFT, np.inf)
        if request.output > 1:
            _count(state, TPOT, np.inf)
        _count(state, E2E, np.inf)


@kernel_jit
def _join(state, w, r):
    """Request r becomes a running decode of w; its KV cache holds `length` tokens."""
    worker, request = state.workers[w], state.requests[r]
    slot = state.slots[w, worker.decodes]
    s, c = worker.step, request.length
    slot.request = r
    slot.finish = s + request.output - request.generated
    slot.context = c - s
    slot.since = s
    slot.order = request.order
    worker.next_finish = slot.finish if worker.decodes == 0 else min(worker.next_finish, slot.finish)
    worker.residue[(c - s) % BLOCK] += 1
    worker.kv_sum += c + 1
    worker.decodes += 1


@kernel_jit
def _leave(state, w, slot):
    """Take a decode out of its slot and give back its blocks."""
    _settle_gap(state, w, slot)
    worker, slots = state.workers[w], state.slots
    c = slots[w, slot].context + worker.step
    worker.residue[slots[w, slot].context % BLOCK] -= 1
    worker.kv_sum -= c + 1
    worker.used -= _blocks_of(c)
    worker.decodes -= 1
    if slot != worker.decodes:
        slots[w, slot] = slots[w, worker.decodes]


@kernel_jit
def _refresh_next_finish(state, w):
    worker = state.workers[w]
    worker.next_finish = np.iinfo(np.int64).max
    for slot in range(worker.decodes):
        worker.next_finish = min(worker.next_finish, state.slots[w, slot].finish)


@kernel_jit
def _preempt(state, w, time_s):
    """Drop the request admitted last; it will recompute everything it had."""
    worker = state.workers[w]
    victim, order = NONE, NONE
    for slot in range(worker.decodes):
        if state.slots[w, slot].order > order:
            victim, order = slot, state.slots[w, slot].order
    r = worker.partial
    if r != NONE and state.requests[r].order > order:
        worker.used -= _blocks_of(state.requests[r].length)
        _load(state, w, state.requests[r].computed, 0, 0)
        worker.partial = NONE
    else:
        slot = state.slots[w, victim]
        r = slot.request
        request = state.requests[r]
        request.generated = request.output - (slot.finish - worker.step)
        if victim >= worker.decodes - worker.late:
            worker.late -= 1  # it has not decoded here: its last token is as old as it was
        else:
            request.last_token_s = time_s
        _leave(state, w, victim)
        _refresh_next_finish(state, w)
        request.length = request.input + request.generated
        _load(state, w, request.length, 0, 0)
    state.requests[r].computed = 0
    state.requests[r].preemptions += 1
    _push_front(state, w, WAITING, r)


@kernel_jit
def _cut(state, w, time_s, cause):
    """End the current run of w with the step in progress at `time_s`.

    Of a step that ends just then the next one is in progress if w's turn came before that of `cause`: a
    worker, the link, or NONE for an arrival that nothing caused.
    """
    worker = state.workers[w]
    if worker.run_steps > 1:
        if w < cause:
            time_s = np.nextafter(time_s, np.inf)
        j = _steps_reaching(worker.run_start, worker.run_first, worker.run_growth, time_s)
        if j < worker.run_steps:
            worker.run_steps = j
            _set_time(state, w, worker.run_start + _run_s(worker.run_first, worker.run_growth, j))


@kernel_jit
def _transfer(state, r, blocks, time_s):
    """Queue the KV blocks of r on the shared link; `last_token_s` is when its prefill ended."""
    request, link = state.requests[r], state.link
    seconds = blocks * link[LINK_BLOCK_S]
    overlap_s = 0.0
    if time_s == request.last_token_s:
        # layer by layer during the last prefill step, all but the last layer's share
        overlap_s = min(request.transfer_end_s, seconds * link[LINK_OVERLAP])
    start = max(time_s - overlap_s, link[LINK_FREE_S])
    end = max(start + seconds, time_s + seconds * (1.0 - link[LINK_OVERLAP])) + link[LINK_LATENCY_S]
    end = max(end, link[LINK_LAST_S])
    link[LINK_FREE_S], link[LINK_LAST_S] = start + seconds, end
    request.transfer_end_s = end
    request.next = NONE
    if state.counters[LINK_HEAD] == NONE:
        state.counters[LINK_HEAD] = r
        _set_time(state, len(state.heap) - 1, end)
    else:
        state.requests[state.counters[LINK_TAIL]].next = r
    state.counters[LINK_TAIL] = r


@kernel_jit
def _receive(state, w, time_s, cause):
    """Start the transfers for which the decode worker w has blocks, in order of hand-off.

    Blocks that the current run will still take are not free; a long run is cut short before giving up.
    """
    worker = state.workers[w]
    while worker.head[INBOUND] != NONE:
        r = worker.head[INBOUND]
        blocks = _blocks_of(state.requests[r].length)
        if worker.used + _blocks_for(worker, worker.run_steps) + blocks > worker.blocks:
            _cut(state, w, time_s, cause)
            if worker.used + _blocks_for(worker, worker.run_steps) + blocks > worker.blocks:
                return
        _pop(state, w, INBOUND)
        worker.used += blocks
        _transfer(state, r, blocks, time_s)


@kernel_jit
def _start_step(state, w, time_s):
    """Form the next step, or run of equal steps, of worker w."""
    worker = state.workers[w]

    worker.late = 0
    preempted = False
    while True:
        # sequences whose KV has arrived
        running = worker.decodes + (1 if worker.partial != NONE else 0)
        while worker.head[READY] != NONE and running < worker.seats:
            r = _pop(state, w, READY)
            state.counters[ADMITTED] += 1
            state.requests[r].order = state.counters[ADMITTED]
            _join(state, w, r)
            worker.late += 1
            running += 1
        # every running decode gets its block
        if worker.decodes == 0 or worker.used + _blocks_for(worker, 1) <= worker.blocks:
            break
        while worker.decodes > 0 and worker.used + _blocks_for(worker, 1) > worker.blocks:
            _preempt(state, w, time_s)
        preempted = True
        if worker.decodes > 0 or worker.partial != NONE:
            break  # else the only decode gave up its seat: whoever waits for it takes it
    decodes = worker.decodes
    step_blocks = _blocks_for(worker, 1)

    # the rest of the token budget prefills
    budget = worker.budget - decodes
    running, members, prefill_tokens, pairs = decodes, 0, 0, 0.0
    r = worker.partial
    is_open = False  # a prompt stays unfinished after this step
    if r != NONE:
        request = state.requests[r]
        running += 1
        n = min(request.length - request.computed, budget)
        is_open = request.computed + n < request.length
        if n > 0:
            state.members[w, members].request, state.members[w, members].tokens = r, n
            members += 1
            budget -= n
            prefill_tokens += n
            pairs += n * (request.computed + 0.5 * (n + 1))
    while not (preempted or is_open) and budget > 0 and running < worker.seats:
        r = worker.head[WAITING]
        if r == NONE:
            break
        request = state.requests[r]
        blocks = _blocks_of(request.length)
        if worker.used + step_blocks + blocks > worker.blocks:
            break
        _pop(state, w, WAITING)
        worker.used += blocks
        state.counters[ADMITTED] += 1
        request.order = state.counters[ADMITTED]
        if request.scheduled_s < 0.0:
            request.scheduled_s = time_s
        n = min(request.length, budget)
        state.members[w, members].request, state.members[w, members].tokens = r, n
        members += 1
        running += 1
        budget -= n
        prefill_tokens += n
        pairs += n * 0.5 * (n + 1)
        if n < request.length:
            worker.partial = r
            is_open = True
    worker.members = members

    tokens = decodes + prefill_tokens
    if tokens == 0:
        worker.run_steps = 0
        _set_time(state, w, np.inf)
        return
    worker.run_start = time_s
    worker.run_first = (
        state.f_s[worker.table, tokens] + worker.a_s * pairs + worker.b_s * decodes
        + worker.d_s * worker.kv_sum + worker.e_s * members
    )  # fmt: skip
    worker.run_growth = worker.d_s * decodes
    worker.run_steps = 1
    if members == 0 and worker.late == 0 and not preempted:  # a preemption freed seats and blocks
        worker.run_steps = min(worker.next_finish - worker.step, _steps_with_blocks(worker))
    _set_time(state, w, time_s + _run_s(worker.run_first, worker.run_growth, worker.run_steps))


@kernel_jit
def _steps_with_blocks(worker):
    """How many steps the running decodes can take before one of them finds no block; at least one."""
    free = worker.blocks - worker.used
    steps = (free // worker.decodes) * BLOCK
    rest = free % worker.decodes
    while True:
        rest -= worker.residue[(-(worker.step + steps)) % BLOCK]
        if rest < 0:
            return max(steps, 1)
        steps += 1


@kernel_jit
def _wake(state, w, time_s, cause):
    """Something arrived at worker w: start it if idle, else let it look when the current step ends."""
    if state.workers[w].run_steps == 0:
        _start_step(state, w, time_s)
    else:
        _cut(state, w, time_s, cause)


@kernel_jit
def _load(state, w, pending_tokens, requests, kv_tokens):
    """What the router sees of worker w changes by this much."""
    worker = state.workers[w]
    worker.pending_tokens += pending_tokens
    worker.requests += requests
    worker.kv_tokens += kv_tokens
    state.score[w] = (
        worker.weight[0] * worker.pending_tokens + worker.weight[1] * worker.requests
        + worker.weight[2] * worker.kv_tokens
    )  # fmt: skip


@kernel_jit
def _choose(state, pool, turn, r):
    """The worker of `pool` for request r: round robin, or the smallest score; NONE if it fits on none."""
    need = _blocks_of(state.requests[r].input + state.requests[r].output)
    if state.round_robin[turn - TURN_FRONT]:
        for _ in range(len(pool)):
            w = pool[state.counters[turn] % len(pool)]
            state.counters[turn] += 1
            if need <= state.workers[w].blocks:
                return w
        return NONE
    best, best_score = NONE, np.inf
    for i in range(len(pool)):
        w = pool[i]
        if state.score[w] < best_score and need <= state.workers[w].blocks:
            best, best_score = w, state.score[w]
    return best


@kernel_jit
def _arrive(state, r, cause):
    w = _choose(state, state.front, TURN_FRONT, r)
    if w == NONE:
        _reject(state, r)
        return
    worker, request = state.workers[w], state.requests[r]
    request.prefill_worker = w
    _load(state, w, request.input, 1, request.input)
    is_first = worker.head[WAITING] == NONE
    _push(state, w, WAITING, r)
    if is_first:  # else the one before it could not be admitted either
        _wake(state, w, request.arrival_s, cause)


@kernel_jit
def _hand_off(state, w, r, time_s):
    """The first token of r is out on prefill worker w: pick a decode worker and send the KV blocks."""
    worker, request = state.workers[w], state.requests[r]
    _load(state, w, 0, -1, -request.input)
    v = _choose(state, state.back, TURN_BACK, r)
    if v == NONE:
        worker.used -= _blocks_of(request.length)
        _reject(state, r)
        return
    request.decode_worker = v
    _load(state, v, 0, 1, request.input)
    request.last_token_s = time_s
    request.transfer_end_s = time_s - worker.run_start  # room to overlap with the last prefill step
    _push(state, v, INBOUND, r)
    _receive(state, v, time_s, w)


@kernel_jit
def _end_run(state, w, time_s):
    """The current run of worker w ends: tokens leave, requests finish, move on or join the decodes."""
    worker = state.workers[w]
    start, first, growth, steps = worker.run_start, worker.run_first, worker.run_growth, worker.run_steps
    decodes, late = worker.decodes, worker.late
    worker.busy_s += time_s - start
    worker.steps += steps
    worker.tokens += steps * decodes
    worker.run_steps = 0
    if len(state.runs) > 0:
        prefill_tokens = 0
        for i in range(worker.members):
            prefill_tokens += state.members[w, i].tokens
        _record_run(state, w, start, first, growth, steps, decodes - late, prefill_tokens, worker.used)

    if decodes > 0:
        worker.used += _blocks_for(worker, steps)
        worker.step += steps
        worker.kv_sum += float(steps) * decodes
        for slot in range(decodes - late, decodes):
            _single_gap(state, w, state.slots[w, slot].request, time_s)
            state.slots[w, slot].since = worker.step
        if decodes > late:
            _count_run(state, start, first, growth, steps, decodes - late)
            _note_gap(state, w, first + growth * (steps - 1))
        if worker.step == worker.next_finish:
            slot = 0
            while slot < worker.decodes:
                if state.slots[w, slot].finish == worker.step:
                    r = state.slots[w, slot].request
                    _leave(state, w, slot)
                    _finish(state, w, r, time_s)
                else:
                    slot += 1
            _refresh_next_finish(state, w)
    worker.late = 0

    for i in range(worker.members):
        r, n = state.members[w, i].request, state.members[w, i].tokens
        request = state.requests[r]
        request.computed += n
        _load(state, w, -n, 0, 0)
        worker.tokens += n
        if request.computed < request.length:
            continue
        if worker.partial == r:
            worker.partial = NONE
        if request.generated == 0:
            request.first_token_s = time_s
            if _in_window(state, request.arrival_s):
                _count(state, TTFT, time_s - request.arrival_s)
        else:
            _single_gap(state, w, r, time_s)
        request.generated += 1
        if request.generated == request.output:
            worker.used -= _blocks_of(request.length)
            _finish(state, w, r, time_s)
        elif worker.role == PREFILL:
            _hand_off(state, w, r, time_s)
        else:
            _join(state, w, r)
    worker.members = 0
    _receive(state, w, time_s, w)
    _start_step(state, w, time_s)


@kernel_jit
def _end_transfer(state, time_s):
    """The transfer at the head of the link is complete."""
    link = len(state.heap) - 1
    r = state.counters[LINK_HEAD]
    request = state.requests[r]
    state.counters[LINK_HEAD] = request.next
    if request.next == NONE:
        _set_time(state, link, np.inf)
    else:
        _set_time(state, link, state.requests[request.next].transfer_end_s)
    w, v = request.prefill_worker, request.decode_worker
    state.workers[w].used -= _blocks_of(request.length)
    _push(state, v, READY, r)
    _wake(state, v, time_s, link)
    if state.workers[w].head[WAITING] != NONE:
        _wake(state, w, time_s, link)


@kernel_jit
def run(state, closed_loop, stop_early):
    """Simulate until every request is done or, with `stop_early`, until a limit can no longer hold.

    `closed_loop` > 0 keeps that many requests in flight: the next one arrives when one completes.
    """
    n = len(state.requests)
    released = n if closed_loop == 0 else min(closed_loop, n)
    arrived = 0
    cause = NONE  # of arrivals
    link = len(state.heap) - 1
    while state.counters[DONE] < n:
        entity = state.heap[0]
        time_s = state.time[entity]
        is_arrival = arrived < released and state.requests[arrived].arrival_s <= time_s
        if is_arrival:
            time_s = state.requests[arrived].arrival_s
            _arrive(state, arrived, cause)
            arrived += 1
        elif entity == link:
            _end_transfer(state, time_s)
        else:
            _end_run(state, entity, time_s)
        if closed_loop > 0:
            if not is_arrival:
                cause = entity
            while released < n and released - state.counters[DONE] < closed_loop:
                state.requests[released].arrival_s = time_s
                released += 1
        if stop_early:
            for k in range(len(state.limits)):
                if state.limits[k].violations > state.limits[k].allowed:
                    return


@kernel_jit
def gaps_at_most(runs, gap_s):
    """How many gaps of these runs are <= gap_s, each counted for every sequence that saw it."""
    total = 0
    for k in range(len(runs)):
        first, growth, steps = runs[k].first_s, runs[k].growth_s, runs[k].steps
        if first > gap_s:
            continue
        if first + growth * (steps - 1) > gap_s:
            i = max(int((gap_s - first) / growth) - 1, 0)
            while first + growth * i <= gap_s:
                i += 1
            steps = i
        total += steps * runs[k].sequences
    return total


@kernel_jit
def next_gap_s(runs, gap_s):
    """The smallest gap of these runs that is > gap_s."""
    smallest = np.inf
    for k in range(len(runs)):
        first, growth, steps = runs[k].first_s, runs[k].growth_s, runs[k].steps
        if first + growth * (steps - 1) <= gap_s:
            continue
        i = 0
        if first <= gap_s:
            i = max(int((gap_s - first) / growth) - 1, 0)
            while first + growth * i <= gap_s:
                i += 1
        smallest = min(smallest, first + growth * i)
    return smallest
