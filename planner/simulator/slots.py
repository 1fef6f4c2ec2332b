"""Requests and the room they take: seats, KV blocks, and the slots of the decodes that run."""

from __future__ import annotations

import numpy as np

from planner.policies import FCFS, LJF, RESERVE_STATIC, SJF, SRPT, VLLM_V1
from planner.simulator.adapters import count_waiting
from planner.simulator.caches import release_prefix
from planner.simulator.counting import count, in_window, record_part, settle_gap, steps_reaching
from planner.simulator.layout import (
    BACK,
    BLOCK,
    DECODE,
    DONE,
    E2E,
    FINISHED,
    FREED,
    FRONT,
    GAMMA,
    GROUP,
    HEAVY_TOKENS,
    IN_DOUBT,
    LAST_S,
    LEAVING,
    NONE,
    ONE,
    REJECTED,
    RESTING,
    TPOT,
    TTFT,
    UNFINISHED,
    ZERO,
)
from planner.simulator.numba_compile import kernel_jit, small_jit, where_ranked, where_rare
from planner.simulator.offload import leave_memory
from planner.simulator.predictions import forget_errors, note_end
from planner.simulator.queue_orders import line_up, settle
from planner.simulator.queues import append, drop, pop, put

LONGEST = 1e9  # tokens: more than any prompt has


@small_jit
def blocks_of(tokens):
    return (tokens + BLOCK - 1) // BLOCK


@kernel_jit
def blocks_for(lane, steps):
    """KV blocks that the running decodes will ask for in their next `steps` steps, of which those that draft
    have one.
    """
    if lane.width > 1:
        return lane.coming_blocks if steps > 0 else ZERO
    total = (steps // BLOCK) * lane.decodes
    for i in range(steps % BLOCK):
        total += lane.residue[(-(lane.decode_step + i)) % BLOCK]
    return total


@kernel_jit
def steps_with_blocks(lane, free):
    """How many steps the running decodes can take before one of them finds no block of `free`."""
    steps = (free // lane.decodes) * BLOCK
    rest = free % lane.decodes
    while True:
        rest -= lane.residue[(-(lane.decode_step + steps)) % BLOCK]
        if rest < 0:
            return steps
        steps += 1


@kernel_jit
def _load_alone(state, w, pending_tokens, requests, kv_tokens):
    worker = state.workers[w]
    worker.pending_tokens += pending_tokens
    worker.assigned += requests
    worker.assigned_tokens += kv_tokens
    pool, group = BACK if worker.role == DECODE else FRONT, worker.pool_index // GROUP
    weight = state.types[worker.type].routing_weight[pool]
    state.score[w] = (
        weight[0] * worker.pending_tokens
        + weight[1] * worker.assigned
        + weight[2] * worker.assigned_tokens
        + weight[3] * worker.waiting
    )
    state.lowest[pool, group] = min(state.lowest[pool, group], state.score[w])


@where_ranked(_load_alone)
def load(state, w, pending_tokens, requests, kv_tokens):
    """What the router sees of worker w changes by this much: of ranks the sum of all."""
    ranks = state.dp_ranks[w]
    if ranks.count == 1:
        _load_alone(state, w, pending_tokens, requests, kv_tokens)
        return
    worker = state.workers[w]
    worker.pending_tokens += pending_tokens
    worker.assigned += requests
    worker.assigned_tokens += kv_tokens
    first = ranks.first
    pool, group = BACK if worker.role == DECODE else FRONT, state.workers[first].pool_index // GROUP
    weight, score = state.types[worker.type].routing_weight[pool], 0.0
    for v in range(first, first + ranks.count):
        rank = state.workers[v]
        score += (
            weight[0] * rank.pending_tokens
            + weight[1] * rank.assigned
            + weight[2] * rank.assigned_tokens
            + weight[3] * rank.waiting
        )
    state.score[first] = score
    state.lowest[pool, group] = min(state.lowest[pool, group], score)


@kernel_jit
def assign(state, w, r, sign):
    """Request r is worker w's from now on (sign 1.0), or no longer (-1.0)."""
    request = state.requests[r]
    load(state, w, 0.0, sign, sign * request.input_tokens)
    state.workers[w].heavy += np.int64(sign) * (request.predicted_tokens > state.policy[HEAVY_TOKENS])
    state.workers[w].future_tokens += sign * (
        request.input_tokens + state.policy[GAMMA] * request.predicted_tokens
    )


@kernel_jit
def assign_none(state, w):
    """Nothing is worker w's any more: what a router sees of it, and believes, begins anew."""
    worker = state.workers[w]
    worker.pending_tokens, worker.assigned, worker.assigned_tokens, worker.future_tokens = 0.0, 0.0, 0.0, 0.0
    worker.heavy = 0
    forget_errors(worker)
    load(state, w, 0.0, 0.0, 0.0)


@kernel_jit
def finish(state, w, r, time_s):
    """Request r is complete on worker w; its seat and blocks are given back by whoever calls."""
    request = state.requests[r]
    request.finish_s = time_s
    request.status = FINISHED
    request.generated_tokens = request.output_tokens
    assign(state, w, r, -1.0)
    note_end(state, w, r, request.output_tokens)
    settle(state, r)
    state.counters[DONE] += 1
    if len(state.after) > 0:
        _free_children(state, r, time_s)
    if in_window(state, request.arrival_s):
        count(state, E2E, time_s - request.arrival_s, request.arrival_s)
        if request.output_tokens > 1:
            tpot_s = (time_s - request.first_token_s) / (request.output_tokens - 1)
            count(state, TPOT, tpot_s, request.arrival_s)


@kernel_jit
def _free_children(state, r, time_s):
    """Request r has finished: who waited for it alone will arrive."""
    for i in range(state.after[r].child, state.after[r + 1].child):
        child = state.children[i]
        wait, request = state.after[child], state.requests[child]
        wait.parents -= 1
        if wait.parents == 0:
            wait.parents = NONE
            request.arrival_s = max(request.arrival_s, time_s + wait.think_s)
            state.counters[FREED] = put(state.requests, state.counters[FREED], child, request.arrival_s)


@kernel_jit
def reject(state, r):
    """No worker has room for request r, ever: nor will there be anything of what waits for it."""
    last = r
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
    request = state.requests[r]
    request.status = REJECTED
    state.counters[DONE] += 1
    if in_window(state, request.arrival_s):
        if np.isnan(request.first_token_s):
            count(state, TTFT, np.inf, request.arrival_s)
        if request.output_tokens > 1:
            count(state, TPOT, np.inf, request.arrival_s)
        count(state, E2E, np.inf, request.arrival_s)


@small_jit
def request_blocks(state, w, tokens):
    """KV blocks that a request with `tokens` in the cache takes on worker w."""
    reserved = state.types[state.workers[w].type].reserved_blocks
    return reserved if reserved > 0 else blocks_of(tokens)


@small_jit
def beside(kind, blocks):
    """KV blocks that a sequence takes, from its first token on, beside those of its tokens, which are
    `blocks` in the end: its states, and its windows (planner/models/kv_layout.py).
    """
    if kind.window_ratio == 0.0:
        return kind.constant_blocks
    return kind.constant_blocks + np.int64(np.ceil(kind.window_ratio * min(blocks, kind.window_blocks)))


@small_jit
def seat_blocks(state, w, r):
    """... request r on worker w."""
    request = state.requests[r]
    return beside(state.types[state.workers[w].type], blocks_of(request.input_tokens + request.output_tokens))


@small_jit
def blocks_checked(kind, lane, request, c):
    """KV blocks that a decode with c tokens in the cache has in its next step: of the tokens that are checked
    there, and of those that are looked ahead for. Nobody gets more than there are, less what a sequence takes
    beside its tokens.
    """
    most = kind.kv_blocks - beside(kind, blocks_of(request.input_tokens + request.output_tokens))
    return max(min(blocks_of(c + lane.width + kind.lookahead_tokens), most), blocks_of(c))


@kernel_jit
def release(state, w, r, tokens, cached_tokens):
    """Request r, which is in no slot, gives its blocks on worker w back, those of so many tokens; the first
    `cached_tokens` of them stay where there is a cache.
    """
    state.workers[w].used_blocks -= request_blocks(state, w, tokens) + seat_blocks(state, w, r)
    release_prefix(state, w, r, cached_tokens)


@kernel_jit
def depart(state, w, r):
    """Request r, which is in no slot, gives its seat and its blocks on worker w back."""
    length = state.requests[r].length_tokens
    release(state, w, r, length, length)
    leave_memory(state, w, r)
    state.workers[w].running -= 1


@kernel_jit
def depart_late(state, w):
    """Who had his last token in the step before gives seat and blocks back, now that the next is formed."""
    worker = state.workers[w]
    while worker.head[LEAVING] != NONE:
        depart(state, w, pop(state.requests, worker, LEAVING))


@kernel_jit
def enqueue(state, w, r):
    """Request r waits for its prompt to be computed on worker w, in the order of its policy."""
    worker, request = state.workers[w], state.requests[r]
    kind = state.types[worker.type]
    worker.waiting += 1
    count_waiting(state, w, r, 1)
    if kind.queue_order > SRPT:
        line_up(state, w, r, False)
        return
    tokens = float(request.length_tokens)
    if kind.queue_order == FCFS:
        key = request.arrival_s
    else:
        if kind.queue_order == LJF:
            tokens = LONGEST - tokens
        elif kind.queue_order != SJF:
            tokens += request.predicted_tokens - request.generated_tokens
        if kind.queue_batch > 0:  # sorted inside scheduling batches, which are served one after the other
            if worker.filled_batch <= worker.served_batch:
                worker.filled_batch, worker.filled = worker.served_batch + 1, 0
            elif worker.filled == kind.queue_batch:
                worker.filled_batch, worker.filled = worker.filled_batch + 1, 0
            worker.filled += 1
            key = worker.filled_batch * LONGEST + tokens
        elif kind.queue_window_s < np.inf:
            key = request.arrival_s + kind.queue_window_s * tokens / kind.queue_longest_tokens
        else:
            key = tokens
    worker.first_waiting = put(state.requests, worker.first_waiting, r, key)


@kernel_jit
def enqueue_first(state, w, r):
    """Request r was preempted: it goes before all others, the latest first."""
    worker = state.workers[w]
    worker.preemptions += 1
    worker.waiting += 1
    count_waiting(state, w, r, 1)
    if state.types[worker.type].queue_order > SRPT:
        line_up(state, w, r, True)
        return
    worker.first_waiting = put(
        state.requests, worker.first_waiting, r, -LONGEST * LONGEST * worker.preemptions
    )


@small_jit
def clear_chunks(lane):
    """The next step of a lane has no prompts yet."""
    lane.prefills, lane.prefill_tokens, lane.pairs, lane.squares, lane.cached_64 = 0, 0, 0.0, 0.0, 0.0


@small_jit
def add_chunk(lane, cached, tokens):
    """The next step of a lane computes so many tokens of a prompt, after those that are cached."""
    lane.prefills += 1
    lane.prefill_tokens += tokens
    lane.pairs += tokens * (cached + 0.5 * (tokens + 1))
    lane.squares += float(tokens) * tokens
    lane.cached_64 += (cached + 63) // 64


@kernel_jit
def join(state, l, r):
    """Request r becomes a running decode of lane l; its KV cache holds `length` tokens.

    The slots are in two groups: those whose last token left at lane.last_token_s, then the late ones.
    """
    lane, request = state.lanes[l], state.requests[r]
    if request.arrival_s >= state.policy[LAST_S] and request.generated_tokens == 1:
        state.counters[IN_DOUBT] -= 1
    if lane.decodes == 0:
        lane.last_token_s, lane.late_decodes = request.last_token_s, 0
    at = lane.decodes
    if request.last_token_s != lane.last_token_s:
        lane.late_decodes += 1
    elif lane.late_decodes > 0:
        state.slots[l, at] = state.slots[l, at - lane.late_decodes]
        at -= lane.late_decodes
    slot = state.slots[l, at]
    s, c = lane.decode_step, request.length_tokens
    slot.request = r
    slot.finish_step = s + request.output_tokens - request.generated_tokens
    slot.context_offset = c - s
    slot.settled_step = s
    slot.admission_number = request.admission_number
    lane.next_finish_step = (
        slot.finish_step if lane.decodes == 0 else min(lane.next_finish_step, slot.finish_step)
    )
    lane.residue[(c - s) % BLOCK] += 1
    lane.kv_sum += c + 1
    lane.decodes += 1
    if lane.width > 1:
        slot.held_blocks = blocks_of(c)
        slot.next_blocks = blocks_checked(state.types[state.workers[lane.worker].type], lane, request, c)
        lane.coming_blocks += slot.next_blocks - slot.held_blocks


@kernel_jit
def take_out(state, l, slot):
    """Empty a slot; its request knows again how far it is. The blocks of its tokens stay taken."""
    settle_gap(state, l, slot)
    lane, slots = state.lanes[l], state.slots
    r = slots[l, slot].request
    request = state.requests[r]
    c = slots[l, slot].context_offset + lane.decode_step
    if lane.width > 1:
        held = slots[l, slot].held_blocks
        lane.coming_blocks -= slots[l, slot].next_blocks - held
        state.workers[lane.worker].used_blocks -= held - blocks_of(c)
    request.length_tokens = c
    request.generated_tokens = request.output_tokens - (slots[l, slot].finish_step - lane.decode_step)
    lane.residue[slots[l, slot].context_offset % BLOCK] -= 1
    lane.kv_sum -= c + 1
    last = lane.decodes - 1
    first_late = lane.decodes - lane.late_decodes
    if slot < first_late:
        request.last_token_s = lane.last_token_s
        slots[l, slot] = slots[l, first_late - 1]
        slots[l, first_late - 1] = slots[l, last]
    else:
        slots[l, slot] = slots[l, last]
        lane.late_decodes -= 1
    lane.decodes = last
    return r


@kernel_jit
def refresh_next_finish_step(state, l):
    lane = state.lanes[l]
    lane.next_finish_step = np.iinfo(np.int64).max
    for slot in range(lane.decodes):
        lane.next_finish_step = min(lane.next_finish_step, state.slots[l, slot].finish_step)


@kernel_jit
def _send_back(state, w, r, tokens, cached, recomputed):
    """Request r, which is in no slot any more, loses its seat, its blocks, those of so many tokens, and what
    was computed; it waits, before all others, for `recomputed` tokens to be computed once more.
    """
    worker, request = state.workers[w], state.requests[r]
    request.preemptions += 1
    release(state, w, r, tokens, cached)
    worker.running -= 1
    request.computed_tokens = 0
    if len(state.parts) > 0:
        record_part(state, r, ZERO, ZERO)
    if request.status == UNFINISHED:
        load(state, w, float(recomputed), 0.0, 0.0)
        enqueue_first(state, w, r)
    else:
        leave_memory(state, w, r)


@kernel_jit
def cached_tokens(state, l, slot):
    """Tokens of a running decode whose full blocks are cached: of an asynchronous engine not that of the step
    under way, unless a prompt ended in it.
    """
    c = state.slots[l, slot].context_offset + state.lanes[l].decode_step
    is_fresh = state.requests[state.slots[l, slot].request].length_tokens == c
    kind = state.types[state.workers[state.lanes[l].worker].type]
    return c - 1 if kind.is_async and not is_fresh else c


@kernel_jit
def preempt_decode(state, l, slot):
    """Drop a running decode: it waits, before all others, to recompute everything it had."""
    cached = cached_tokens(state, l, slot)
    r = take_out(state, l, slot)
    refresh_next_finish_step(state, l)
    request = state.requests[r]
    tokens = np.int64(request.length_tokens)
    request.length_tokens = tokens + 1  # the token that was not yet in the cache
    _send_back(state, state.lanes[l].worker, r, tokens, cached, tokens + 1)


@kernel_jit
def rest(state, l, slot):
    """The token budget leaves a decode out of the next step: it is in no slot, and keeps seat and blocks."""
    worker = state.workers[state.lanes[l].worker]
    cached = cached_tokens(state, l, slot)
    r = take_out(state, l, slot)
    refresh_next_finish_step(state, l)
    state.requests[r].computed_tokens = cached
    append(state.requests, worker, RESTING, r)


@kernel_jit
def preempt_waiting(state, w, which, r):
    """Drop request r, which is in a list of worker w: a prompt in part, a decode that rests, or one that has
    its last token, which the engine has not seen yet.
    """
    worker = state.workers[w]
    drop(state.requests, worker, which, r)
    request, kind = state.requests[r], state.types[worker.type]
    tokens, cached = np.int64(request.length_tokens), np.int64(request.computed_tokens)
    recomputed = tokens + 1
    if which == RESTING:
        request.length_tokens = recomputed
    elif which == LEAVING:
        cached = max(cached, tokens - 1)
    else:
        recomputed = cached
        if kind.batching == VLLM_V1:  # others had taken the blocks of all of it
            tokens = cached
        if kind.vidur_restarts > 0:  # what is missing is then decoded, token by token
            missing = request.length_tokens - cached
            request.length_tokens = cached
            request.output_tokens += missing
            recomputed -= missing
    _send_back(state, w, r, tokens, cached, recomputed)


@kernel_jit
def latest_in(state, w, which):
    """Of those in a list of worker w the one admitted last, or NONE."""
    latest, r = NONE, state.workers[w].head[which]
    while r != NONE:
        if latest == NONE or state.requests[r].admission_number > state.requests[latest].admission_number:
            latest = r
        r = state.requests[r].next
    return latest


@kernel_jit
def steps_done(lane, time_s):
    """Steps of the current run of a lane that have ended before `time_s`."""
    if lane.run_steps <= 1:
        return ZERO
    return (
        min(steps_reaching(lane.run_start_s, lane.run_first_s, lane.run_growth_s, time_s), lane.run_steps) - 1
    )


@kernel_jit
def blocks_of_run(kind, lane, time_s):
    """KV blocks that the decodes of a lane have taken since its run began, those of the step under way too.

    The worker's used_blocks get them when the run ends, unless blocks are set aside or lanes share a worker.
    """
    if (
        kind.lanes > 1
        or kind.reserved_blocks > 0
        or lane.run_steps == 0
        or lane.decodes * lane.is_decoding == 0
    ):
        return ZERO
    return blocks_for(lane, steps_done(lane, time_s) + 1)


@where_rare(lambda state, w, r, time_s: ZERO)
def foreseen_blocks(state, w, r, time_s):
    """KV blocks in use with request r, as TetriInfer's admission of decodes foresees them (its section 3.4).

    reserve-static: now, with all that r is predicted to need. reserve-dynamic: when the running decode
    predicted to end first does so. None where nothing runs; what is set aside for a request does not grow.
    """
    worker, new = state.workers[w], state.requests[r]
    kind = state.types[worker.type]
    if worker.running == 0:
        return ZERO
    left = max(new.predicted_tokens - new.generated_tokens, ONE)
    for l in range(worker.first_lane, worker.first_lane + kind.lanes):
        lane = state.lanes[l]
        if kind.admission != RESERVE_STATIC:
            done = steps_done(lane, time_s)
            for slot in range(lane.decodes):
                request = state.requests[state.slots[l, slot].request]
                generated = (
                    request.output_tokens - (state.slots[l, slot].finish_step - lane.decode_step) + done
                )
                left = min(left, max(request.predicted_tokens - generated, ONE))
    total = worker.used_blocks + blocks_of(new.length_tokens + left) + seat_blocks(state, w, r)
    for l in range(worker.first_lane, worker.first_lane + kind.lanes):
        lane = state.lanes[l]
        steps = steps_done(lane, time_s)
        if kind.admission != RESERVE_STATIC:
            steps += left
        if lane.decodes > 0 and kind.reserved_blocks == 0:
            total += blocks_for(lane, steps)
    return total
