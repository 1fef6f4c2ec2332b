"""What requests take on a worker: seats, KV blocks, and the slots of the decodes that run.

A seat is a place among the sequences that an engine runs at once (max_num_seqs). A lane is where a worker
forms batches, one of several with pipeline parallelism (layout.py). A slot is the record of one running
decode of a lane. All decodes of a lane advance by a step together, so a slot has the step of the lane at
which its request ends (`finish_step`), and its KV tokens are `context_offset` plus the lane's steps.

Rows of `state.workers` are ranks: a worker with data-parallel ranks has several, any other worker is its one
rank. Letters: w a worker or rank, l a lane, r a request, c its tokens in the KV cache, s the decode steps of
a lane. `kind` is the worker's row of TYPE. A run: equal steps of a lane that follow each other (layout.py).
Functions under @kernel_jit are compiled; where_has(field, f) and where_rare(f) put f in their place in the
compiled form for fleets that do not need them (numba_compile.py).
"""

from __future__ import annotations

import numpy as np

from planner.policies import EDF, FCFS, LJF, LOWEST_BY_LOT, RESERVE_STATIC, SJF, VLLM_V1
from planner.simulator.caches import release_prefix
from planner.simulator.counting import (
    count_value,
    in_window,
    note_decoding,
    record_part,
    settle_gap,
    steps_reaching,
)
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
    LEAVING,
    NONE,
    ONE,
    REFUSED,
    REJECTED,
    RESTING,
    ROUTING,
    TPOT,
    TTFT,
    UNFINISHED,
    ZERO,
)
from planner.simulator.numba_compile import kernel_jit, small_jit, where_has, where_rare
from planner.simulator.polling import has_step_in_flight
from planner.simulator.predictions import forget_errors, note_end
from planner.simulator.queue_orders import charge_output, count_waiting, line_up, sorts_by_key
from planner.simulator.queues import append_to_list, insert_in_heap, pop_first, remove_from_list

LATEST_STEP = np.int64(np.iinfo(np.int64).max)  # Above every step at which a decode ends.
# More tokens than any prompt has. Queues sort by (scheduling batch, tokens) in one number
# (`enqueue_request`): batch * LONGEST + tokens keeps all keys of a batch below those of the next.
LONGEST = 1e9


@small_jit
def blocks_of(tokens):
    """KV blocks that this many tokens fill, the last one in part."""
    return (tokens + BLOCK - 1) // BLOCK


@small_jit
def uncomputed_blocks(state, r):
    """KV blocks that prompts computed in part still need: request r and those after it in its list."""
    blocks = ZERO
    while r != NONE:
        request = state.requests[r]
        blocks += blocks_of(request.length_tokens) - blocks_of(request.computed_tokens)
        r = request.next
    return blocks


@kernel_jit
def blocks_of_steps(lane, steps):
    """KV blocks that the running decodes will take in their next `steps` steps.

    A decode takes a block in a step if its tokens before the step, `context_offset` + step, fill whole
    blocks. `residue[k]` counts the decodes whose `context_offset` is k modulo BLOCK. With speculative
    decoding (`width` above 1) steps are simulated one by one, so `steps` is 0 or 1.
    """
    if lane.width > 1:
        return lane.coming_blocks if steps > 0 else ZERO
    total = (steps // BLOCK) * lane.decodes  # In BLOCK steps each decode takes one.
    for i in range(steps % BLOCK):
        total += lane.residue[(-(lane.decode_step + i)) % BLOCK]
    return total


@kernel_jit
def steps_with_blocks(lane, free):
    """How many steps the running decodes can take with `free` blocks before one of them finds none.

    In BLOCK steps each takes one block, so whole rounds of BLOCK steps are counted first.
    """
    steps = (free // lane.decodes) * BLOCK
    free_in_round = free % lane.decodes
    while True:
        free_in_round -= lane.residue[(-(lane.decode_step + steps)) % BLOCK]
        if free_in_round < 0:
            return steps
        steps += 1


# `weight` is a row of TYPE.routing_weight (layout.py).
@small_jit
def _routing_score(weight, worker):
    return (
        weight[0] * worker.pending_tokens
        + weight[1] * worker.assigned
        + weight[2] * worker.assigned_tokens
        + weight[3] * worker.waiting
    )


@kernel_jit
def _add_load_alone(state, w, pending_tokens, requests, prompt_tokens):
    """`add_load` for a worker with one rank.

    Routers look for the lowest score among groups of GROUP workers: `lowest` bounds the scores of a group
    from below, and the router renews it when a score has risen.
    """
    worker = state.workers[w]
    worker.pending_tokens += pending_tokens
    worker.assigned += requests
    worker.assigned_tokens += prompt_tokens
    pool, group = BACK if worker.role == DECODE else FRONT, worker.pool_index // GROUP
    state.score[w] = _routing_score(state.types[worker.type].routing_weight[pool], worker)
    state.lowest[pool, group] = min(state.lowest[pool, group], state.score[w])


@where_has("dp_ranks", _add_load_alone)
def add_load(state, w, pending_tokens, requests, prompt_tokens):
    """Add to the load of rank w that the router sees: pending prompt tokens, requests, their prompt tokens.

    The router scores a worker with several ranks by the sum of their loads; that sum stands in the `score` of
    its first rank.
    """
    ranks = state.dp_ranks[w]
    if ranks.count == 1:
        _add_load_alone(state, w, pending_tokens, requests, prompt_tokens)
        return
    worker = state.workers[w]
    worker.pending_tokens += pending_tokens
    worker.assigned += requests
    worker.assigned_tokens += prompt_tokens
    first = ranks.first
    pool, group = BACK if worker.role == DECODE else FRONT, state.workers[first].pool_index // GROUP
    weight, score = state.types[worker.type].routing_weight[pool], 0.0
    for v in range(first, first + ranks.count):
        score += _routing_score(weight, state.workers[v])
    state.score[first] = score
    state.lowest[pool, group] = min(state.lowest[pool, group], score)


@kernel_jit
def see_computed(state, w, r, tokens):
    """Let the router know that rank w has computed `tokens` tokens of the prompt of request r.

    A router that goes by pending tokens (LOWEST_BY_LOT, planner/policies.py) learns of them only with the
    first token (`see_token`).
    """
    # `counters[ROUTING + FRONT]` holds the routing policy of prefills.
    if state.counters[ROUTING + FRONT] == LOWEST_BY_LOT and state.requests[r].prefill_worker == w:
        state.requests[r].unseen_tokens += tokens
    else:
        add_load(state, w, -float(tokens), 0.0, 0.0)


@kernel_jit
def see_token(state, r):
    """Let the router see a token of request r: the tokens of its prompt are not pending any more."""
    request = state.requests[r]
    if request.unseen_tokens > 0:
        add_load(state, request.prefill_worker, -float(request.unseen_tokens), 0.0, 0.0)
        request.unseen_tokens = 0


@kernel_jit
def assign_request(state, w, r, sign):
    """Assign request r to worker w (sign 1.0), or take the assignment back (-1.0)."""
    request = state.requests[r]
    add_load(state, w, 0.0, sign, sign * request.input_tokens)
    # Routing heavy-light counts requests with long outputs; best-fit weighs predicted outputs by gamma.
    state.workers[w].heavy += np.int64(sign) * (request.predicted_tokens > state.policy[HEAVY_TOKENS])
    state.workers[w].future_tokens += sign * (
        request.input_tokens + state.policy[GAMMA] * request.predicted_tokens
    )


@kernel_jit
def assign_none(state, w):
    """Take back all assignments to worker w; its load and prediction errors are reset to 0."""
    worker = state.workers[w]
    worker.pending_tokens, worker.assigned, worker.assigned_tokens, worker.future_tokens = 0.0, 0.0, 0.0, 0.0
    worker.heavy = 0
    forget_errors(worker)
    add_load(state, w, 0.0, 0.0, 0.0)  # Adds nothing, but renews the router's score.


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


@small_jit
def cached_on_arrival(request):
    """How many tokens of a request that was handed over count as cached.

    All its tokens do, except the last token of its prompt while the request has generated no token: the
    decode worker computes this token again to make the first one.
    """
    return request.length_tokens - (request.generated_tokens == 0)


@small_jit
def request_blocks(state, w, tokens):
    """KV blocks that a request with `tokens` in the cache takes on worker w: the blocks of its tokens, or all
    that it reserved, on engines that reserve blocks.
    """
    reserved = state.types[state.workers[w].type].reserved_blocks
    return reserved if reserved > 0 else blocks_of(tokens)


@small_jit
def extra_blocks(kind, first, last):
    """KV blocks of recurrent states and attention windows: their mean while the tokens of a sequence grow
    from `first` to `last` blocks. A request takes the mean, so that the sum over many is right
    (kv_layout.py).
    """
    if kind.window_ratio == 0.0:
        return kind.constant_blocks
    # The mean of min(k, window_blocks) over k from `first` to `last`.
    mean_blocks = float(kind.window_blocks)
    if first < kind.window_blocks:
        full = min(last, kind.window_blocks)
        grown_blocks = (first + full) * (full - first + 1) / 2.0
        mean_blocks = (grown_blocks + (last - full) * kind.window_blocks) / (last - first + 1)
    return kind.constant_blocks + np.int64(np.ceil(kind.window_ratio * mean_blocks))


@small_jit
def growing_blocks(kind, request):
    """The `extra_blocks` of a request, which grows from its prompt to its last token."""
    return extra_blocks(
        kind, blocks_of(request.input_tokens), blocks_of(request.input_tokens + request.output_tokens)
    )


@small_jit
def seat_blocks(state, w, r):
    """The KV blocks that request r takes on worker w with its seat, besides those of its tokens."""
    return growing_blocks(state.types[state.workers[w].type], state.requests[r])


@small_jit
def blocks_for_next_step(kind, lane, request, c):
    """KV blocks that a decode with c tokens in the cache needs for its next step.

    It needs blocks for its tokens, for the drafted tokens that the step checks (`width`), and for tokens
    reserved ahead; but no more than the worker has, since otherwise a sequence that just fits could never
    run.
    """
    available = kind.kv_blocks - growing_blocks(kind, request)
    return max(min(blocks_of(c + lane.width + kind.lookahead_tokens), available), blocks_of(c))


@small_jit
def blocks_to_begin(state, w, r):
    """KV blocks that request r, whose KV is on worker w, takes with its first step there."""
    request, worker = state.requests[r], state.workers[w]
    lane, kind = state.lanes[worker.first_lane], state.types[worker.type]
    own_blocks = blocks_of(np.int64(request.length_tokens))
    needed = blocks_for_next_step(kind, lane, request, np.int64(cached_on_arrival(request)))
    return max(needed - own_blocks, ZERO)


@kernel_jit
def release_blocks(state, w, r, tokens, cached_tokens, is_late):
    """Free the blocks of `tokens` tokens of request r, which is in no slot, on worker w.

    With a prefix cache the first `cached_tokens` of them stay there for other requests. `is_late`: the next
    step is formed already.
    """
    state.workers[w].used_blocks -= request_blocks(state, w, tokens) + seat_blocks(state, w, r)
    release_prefix(state, w, r, cached_tokens, is_late)


@kernel_jit
def depart_now(state, w, r):
    """Free the seat and the blocks of request r, which is in no slot, on worker w."""
    length = state.requests[r].length_tokens
    release_blocks(state, w, r, length, length, False)
    state.workers[w].running -= 1


@kernel_jit
def depart_late(state, w):
    """Free seats and blocks of requests whose last token came with the step before.

    vLLM forms the next step before it sees that they have ended.
    """
    worker = state.workers[w]
    while worker.head[LEAVING] != NONE:
        depart_now(state, w, pop_first(state.requests, worker, LEAVING))


@where_has("classes", lambda state, r: 0.0)
def _due_s(state, r):
    """Seconds after its arrival at which request r is due, for the queue edf."""
    return state.classes[r].due_s


@where_has("caches", lambda state, r: 0.0)
def _place_in_turns(state, r):
    """The number that the router gave request r, for the queue dlpm-turns."""
    return state.caches.prompts[r].place


@small_jit
def _ranked_tokens(kind, request):
    """The tokens by which the orders sjf, ljf and srpt sort, smallest first."""
    tokens = float(request.input_tokens)
    if kind.queue_order == LJF:
        return LONGEST - tokens
    # SRPT goes by the prompt and the predicted answer.
    return tokens if kind.queue_order == SJF else tokens + request.predicted_tokens


@kernel_jit
def priority_of(state, w, r):
    """The number by which worker w sorts request r in its queue, smallest first; with TYPE.by_priority it is
    vLLM's priority. Scheduling batches, and orders that look at caches, have no such number.
    """
    request, kind = state.requests[r], state.types[state.workers[w].type]
    if kind.queue_order == FCFS:
        return request.arrival_s
    if kind.queue_order == EDF:
        return request.arrival_s + _due_s(state, r)
    if not sorts_by_key(kind.queue_order):  # The exception is dlpm-turns, which looks at caches too.
        return _place_in_turns(state, r)
    tokens = _ranked_tokens(kind, request)
    # A prompt may be overtaken only by those that arrive within its window (TYPE.queue_window_s).
    if kind.queue_window_s < np.inf:
        return request.arrival_s + kind.queue_window_s * tokens / kind.queue_longest_tokens
    return tokens


@kernel_jit
def enqueue_request(state, w, r):
    """Let request r wait for its prefill on worker w, in the order of the queue policy."""
    worker, request = state.workers[w], state.requests[r]
    kind = state.types[worker.type]
    worker.waiting += 1
    count_waiting(state, w, r, 1)  # Counts requests by adapter.
    if not sorts_by_key(kind.queue_order):
        line_up(state, w, r, False)  # False: at the end of its queue.
        return
    # The orders sjf, ljf and srpt (codes between FCFS and EDF) may sort inside scheduling batches, which are
    # served in turn.
    if kind.queue_batch > 0 and FCFS < kind.queue_order < EDF:
        # Batches fill in order of arrival: a new one begins when the last is being served, or is full.
        if worker.filled_batch <= worker.served_batch:
            worker.filled_batch, worker.filled = worker.served_batch + 1, 0
        elif worker.filled == kind.queue_batch:
            worker.filled_batch, worker.filled = worker.filled_batch + 1, 0
        worker.filled += 1
        key = worker.filled_batch * LONGEST + _ranked_tokens(kind, request)
    else:
        key = priority_of(state, w, r)
    worker.first_waiting = insert_in_heap(state.requests, worker.first_waiting, r, key)


@kernel_jit
def enqueue_preempted(state, w, r):
    """Let request r, which was preempted, wait before all others, also those preempted earlier. Where engines
    go by priority, it waits in the order of priorities instead.
    """
    worker = state.workers[w]
    worker.preemptions += 1
    if state.types[worker.type].by_priority > 0:
        enqueue_request(state, w, r)
        return
    worker.waiting += 1
    count_waiting(state, w, r, 1)
    if not sorts_by_key(state.types[worker.type].queue_order):
        line_up(state, w, r, True)  # True: at the front.
        return
    # The key is below all keys of requests that were not preempted, and below those of earlier preemptions.
    worker.first_waiting = insert_in_heap(
        state.requests, worker.first_waiting, r, -LONGEST * LONGEST * worker.preemptions
    )


@small_jit
def clear_chunks(lane):
    """Reset the chunks of prompts of the step that is about to be formed."""
    lane.prefills, lane.prefill_tokens, lane.pairs, lane.squares = 0, 0, 0.0, 0.0
    lane.cached, lane.cached_64 = 0.0, 0.0


@small_jit
def add_chunk(lane, cached, tokens):
    """Add a chunk of `tokens` tokens, which come after `cached` ones of their prompt, to the step being
    formed.

    Step times need sums over the chunks: pairs of tokens that attend, squares of lengths, cached tokens, and
    cached tokens in units of 64.
    """
    lane.prefills += 1
    lane.prefill_tokens += tokens
    lane.pairs += tokens * (cached + 0.5 * (tokens + 1))
    lane.squares += float(tokens) * tokens
    lane.cached += cached
    lane.cached_64 += (cached + 63) // 64  # Vidur's tables count cached tokens in tiles of 64.


@kernel_jit
def join_lane(state, l, r):
    """Make request r a running decode of lane l, with `length_tokens` of it in the KV cache.

    The slots are in two groups: first those whose last token came at `lane.last_token_s`, so that their next
    gap is the same, then the late ones, which came from elsewhere and whose first gap differs.
    """
    lane, request = state.lanes[l], state.requests[r]
    if request.generated_tokens == 1:
        note_decoding(state, r)
    if lane.decodes == 0:
        lane.last_token_s, lane.late_decodes = request.last_token_s, 0
    index = lane.decodes
    if request.last_token_s != lane.last_token_s:
        lane.late_decodes += 1
    # The first late slot moves to the end, and the new one takes its place.
    elif lane.late_decodes > 0:
        state.slots[l, index] = state.slots[l, index - lane.late_decodes]
        index -= lane.late_decodes
    slot = state.slots[l, index]
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
    lane.kv_sum += c + 1  # The next step reads the new token too.
    lane.decodes += 1
    if lane.width > 1:
        kind = state.types[state.workers[lane.worker].type]
        slot.held_blocks = blocks_of(c) + request.drafted_blocks
        slot.next_blocks = max(blocks_for_next_step(kind, lane, request, c), slot.held_blocks)
        request.drafted_blocks = 0
        lane.coming_blocks += slot.next_blocks - slot.held_blocks


@kernel_jit
def take_out(state, l, slot):
    """Empty a slot and return its request, whose record gets the slot's values. The request keeps the blocks
    of its tokens.
    """
    settle_gap(state, l, slot)
    lane, slots = state.lanes[l], state.slots
    r = slots[l, slot].request
    request = state.requests[r]
    c = slots[l, slot].context_offset + lane.decode_step
    if lane.width > 1:
        # Blocks of drafted tokens that were not accepted go back.
        held_blocks = slots[l, slot].held_blocks
        lane.coming_blocks -= slots[l, slot].next_blocks - held_blocks
        state.workers[lane.worker].used_blocks -= held_blocks - blocks_of(c)
    request.length_tokens = c
    request.generated_tokens = request.output_tokens - (slots[l, slot].finish_step - lane.decode_step)
    lane.residue[slots[l, slot].context_offset % BLOCK] -= 1
    lane.kv_sum -= c + 1
    last = lane.decodes - 1
    first_late = lane.decodes - lane.late_decodes
    # Two moves keep the groups of `join_lane` together: the last slot of each fills the gap before it.
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
    """Find the step at which the lane's next decode ends, after its slots have changed."""
    lane, soonest = state.lanes[l], LATEST_STEP
    for slot in range(lane.decodes):
        soonest = min(soonest, state.slots[l, slot].finish_step)
    lane.next_finish_step = soonest


@kernel_jit
def _preempt_request(state, w, r, tokens, cached, recomputed):
    """Preempt request r, which is in no slot: free its seat and the blocks of `tokens` tokens.

    The first `cached` of these tokens stay in a prefix cache. The request waits to compute `recomputed`
    tokens again (`enqueue_preempted`).
    """
    worker, request = state.workers[w], state.requests[r]
    request.preemptions += 1
    see_token(state, r)  # The router sees all that was computed.
    release_blocks(state, w, r, tokens, cached, False)
    worker.running -= 1
    request.computed_tokens = 0
    if len(state.parts) > 0:
        record_part(state, r, ZERO, ZERO)  # Marks the preemption (PART in layout.py).
    # A finished request may be preempted too: its engine has not seen its last token yet (LEAVING).
    if request.status == UNFINISHED:
        add_load(state, w, float(recomputed), 0.0, 0.0)
        enqueue_preempted(state, w, r)


@kernel_jit
def cached_tokens(state, l, slot):
    """Tokens of a running decode whose full blocks are in the prefix cache.

    An asynchronous engine has not cached the token of the step under way, unless the request's prompt ended
    in that step or no step was under way.
    """
    c = state.slots[l, slot].context_offset + state.lanes[l].decode_step
    worker = state.workers[state.lanes[l].worker]
    # `length_tokens` is the length when the request joined the lane. If it is unchanged, the prompt ended in
    # this step.
    is_fresh = state.requests[state.slots[l, slot].request].length_tokens == c
    is_behind = state.types[worker.type].is_async > 0 and has_step_in_flight(worker) and not is_fresh
    return c - is_behind


@kernel_jit
def preempt_decode(state, l, slot, is_in_step):
    """Drop a running decode: it waits to recompute everything it had (`enqueue_preempted`).

    If the decode `is_in_step` (of the step being formed), vLLM counts its newest token as cached too, whose
    KV that step was to compute. An asynchronous engine does not know this token while the step that makes it
    is under way.
    """
    cached = cached_tokens(state, l, slot)
    if is_in_step:
        worker = state.workers[state.lanes[l].worker]
        has_step = state.types[worker.type].is_async > 0 and has_step_in_flight(worker)
        cached = state.slots[l, slot].context_offset + state.lanes[l].decode_step + (not has_step)
    r = take_out(state, l, slot)
    refresh_next_finish_step(state, l)
    request = state.requests[r]
    tokens = np.int64(request.length_tokens)
    request.length_tokens = tokens + 1  # Its latest token has no KV yet, and is now part of the prompt.
    _preempt_request(state, state.lanes[l].worker, r, tokens, cached, tokens + 1)


@kernel_jit
def latest_slot(state, l):
    """The slot of the decode of lane l that was admitted last."""
    latest = 0
    for slot in range(1, state.lanes[l].decodes):
        if state.slots[l, slot].admission_number > state.slots[l, latest].admission_number:
            latest = slot
    return latest


@kernel_jit
def rest_decode(state, l, slot):
    """Leave a decode out of the next step, as no token budget is left. It keeps its seat and all its
    blocks, those for drafts too.
    """
    worker = state.workers[state.lanes[l].worker]
    cached, used_blocks = cached_tokens(state, l, slot), worker.used_blocks
    r = take_out(state, l, slot)
    refresh_next_finish_step(state, l)
    # `take_out` gave back the blocks for drafts; the request keeps them.
    state.requests[r].drafted_blocks = used_blocks - worker.used_blocks
    worker.used_blocks = used_blocks
    state.requests[r].computed_tokens = cached  # `preempt_waiting` reads it there.
    append_to_list(state.requests, worker, RESTING, r)


@kernel_jit
def preempt_waiting(state, w, list_number, r):
    """Preempt request r, which is in list `list_number` of worker w.

    It is a prompt computed in part (PARTIAL), a decode that was left out of the step (RESTING), or a request
    whose last token the engine has not seen yet (LEAVING). A decode has to compute all its tokens again, the
    newest too; a prompt those that were computed.
    """
    worker = state.workers[w]
    remove_from_list(state.requests, worker, list_number, r)
    request, kind = state.requests[r], state.types[worker.type]
    tokens, cached = np.int64(request.length_tokens), np.int64(request.computed_tokens)
    recomputed = tokens + 1
    if list_number == RESTING:
        worker.used_blocks -= request.drafted_blocks
        request.length_tokens, request.drafted_blocks = recomputed, 0
    elif list_number == LEAVING:
        # The last token's KV may not be in the cache.
        cached = max(cached, tokens - 1)
    else:
        recomputed = cached
        # vLLM v1 takes blocks chunk by chunk, other engines those of a whole prompt.
        if kind.batching == VLLM_V1:
            tokens = cached
        if kind.vidur_restarts > 0:  # Vidur's simulator then decodes the missing part of the prompt.
            missing = request.length_tokens - cached
            request.length_tokens = cached
            request.output_tokens += missing
            recomputed -= missing
    _preempt_request(state, w, r, tokens, cached, recomputed)


@kernel_jit
def latest_in(state, w, list_number):
    """The request admitted last of those in list `list_number` of worker w; NONE if it is empty."""
    latest, r = NONE, state.workers[w].head[list_number]
    while r != NONE:
        if latest == NONE or state.requests[r].admission_number > state.requests[latest].admission_number:
            latest = r
        r = state.requests[r].next
    return latest


@kernel_jit
def steps_done(lane, time_s):
    """Steps of the current run of a lane that have ended before `time_s`, never the run's last one."""
    if lane.run_steps <= 1:
        return ZERO
    # Strictly before `time_s`: the step that reaches it is not over.
    return (
        min(steps_reaching(lane.run_start_s, lane.run_first_s, lane.run_growth_s, time_s), lane.run_steps) - 1
    )


@kernel_jit
def blocks_of_run(kind, lane, time_s):
    """KV blocks that the decodes of a lane have taken in its current run, the step under way included.

    These blocks are added to the worker's used_blocks when the run ends. 0 if blocks are reserved for whole
    requests or lanes share a worker, since `used_blocks` is then always up to date.
    """
    if (
        kind.lanes > 1
        or kind.reserved_blocks > 0
        or lane.run_steps == 0
        or lane.decodes * lane.is_decoding == 0
    ):
        return ZERO
    return blocks_of_steps(lane, steps_done(lane, time_s) + 1)


@where_rare(lambda state, w, r, time_s: ZERO)
def foreseen_blocks(state, w, r, time_s):
    """KV blocks in use if request r is admitted, as TetriInfer's admission of decodes foresees them (section
    3.4 of Hu et al. 2024, arXiv:2401.11181); 0 if no request runs, since r must be admitted then.

    Policy reserve-static: the blocks in use now and all that r is predicted to need. Policy reserve-dynamic:
    the blocks in use at the first predicted end of a running decode or of r.
    """
    worker, new_request = state.workers[w], state.requests[r]
    kind = state.types[worker.type]
    is_dynamic = kind.admission != RESERVE_STATIC  # The other admission by predictions.
    if worker.running == 0:
        return ZERO
    # Steps until r is predicted to end; for reserve-dynamic until the first of r and the running decodes.
    steps_ahead = max(new_request.predicted_tokens - new_request.generated_tokens, ONE)
    for l in range(worker.first_lane, worker.first_lane + kind.lanes):
        lane = state.lanes[l]
        if is_dynamic:
            done = steps_done(lane, time_s)
            for slot in range(lane.decodes):
                request = state.requests[state.slots[l, slot].request]
                generated = (
                    request.output_tokens - (state.slots[l, slot].finish_step - lane.decode_step) + done
                )
                steps_ahead = min(steps_ahead, max(request.predicted_tokens - generated, ONE))
    total = worker.used_blocks + blocks_of(new_request.length_tokens + steps_ahead) + seat_blocks(state, w, r)
    for l in range(worker.first_lane, worker.first_lane + kind.lanes):
        lane = state.lanes[l]
        steps = steps_done(lane, time_s)
        if is_dynamic:
            steps += steps_ahead
        if lane.decodes > 0 and kind.reserved_blocks == 0:
            total += blocks_of_steps(lane, steps)
    return total
