"""The slots of the decodes that run, and what leaves them: requests that end, rest or are preempted.

A seat is a place among the sequences that an engine runs at once (max_num_seqs). A lane is where a worker
forms batches, one of several with pipeline parallelism (layout.py). A slot is the record of one running
decode of a lane. All decodes of a lane advance by a step together, so a slot has the step of the lane at
which its request ends (`finish_step`), and its KV tokens are `context_offset` plus the lane's steps.

Rows of `state.workers` are ranks: a worker with data-parallel ranks has several, any other worker is its one
rank. Letters: w a worker or rank, l a lane, r a request, c its tokens in the KV cache, s the decode steps of
a lane. `kind` is the worker's row of TYPE.
"""

from __future__ import annotations

import numpy as np

from planner.policies import VLLM_V1
from planner.simulator.caches import release_prefix
from planner.simulator.counting import note_decoding, record_part, settle_gap
from planner.simulator.kv_blocks import blocks_for_next_step, blocks_of, request_blocks, seat_blocks
from planner.simulator.layout import BLOCK, LARGEST, LEAVING, NONE, RESTING, UNFINISHED, ZERO
from planner.simulator.numba_compile import kernel_jit, small_jit
from planner.simulator.polling import has_step_in_flight
from planner.simulator.queue_orders import enqueue_preempted
from planner.simulator.queues import append_to_list, pop_first, remove_from_list
from planner.simulator.router_loads import add_load, report_token


@kernel_jit
def join_lane(state, l, r):
    """Make request r a running decode of lane l, with `length_tokens` of it in the KV cache.

    The slots are in two groups: first those whose last token came at `lane.last_token_s`, so that their next
    gap is the same, then those out of step, which came from elsewhere and whose first gap differs.
    """
    lane, request = state.lanes[l], state.requests[r]
    if request.generated_tokens == 1:
        note_decoding(state, r)
    if lane.decodes == 0:
        lane.last_token_s, lane.out_of_step = request.last_token_s, 0
    index = lane.decodes
    if request.last_token_s != lane.last_token_s:
        lane.out_of_step += 1
    # The first slot of the second group moves to the end, and the new one takes its place.
    elif lane.out_of_step > 0:
        state.slots[l, index] = state.slots[l, index - lane.out_of_step]
        index -= lane.out_of_step
    slot = state.slots[l, index]
    s, c = lane.decode_step, request.length_tokens
    slot.request = r
    slot.finish_step = s + request.output_tokens - request.generated_tokens
    slot.context_offset = c - s
    slot.settled_step = s
    slot.admission_number = request.admission_number
    is_alone = lane.decodes == 0
    lane.next_finish_step = slot.finish_step if is_alone else min(lane.next_finish_step, slot.finish_step)
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
    first_out_of_step = lane.decodes - lane.out_of_step
    # Two moves keep the groups of `join_lane` together: the last slot of each fills the gap before it.
    if slot < first_out_of_step:
        request.last_token_s = lane.last_token_s
        slots[l, slot] = slots[l, first_out_of_step - 1]
        slots[l, first_out_of_step - 1] = slots[l, last]
    else:
        slots[l, slot] = slots[l, last]
        lane.out_of_step -= 1
    lane.decodes = last
    return r


@kernel_jit
def refresh_next_finish_step(state, l):
    """Find the step at which the lane's next decode ends, after its slots have changed."""
    lane, soonest = state.lanes[l], LARGEST
    for slot in range(lane.decodes):
        soonest = min(soonest, state.slots[l, slot].finish_step)
    lane.next_finish_step = soonest


@kernel_jit
def latest_slot(state, l):
    """The slot of the decode of lane l that was admitted last."""
    latest = 0
    for slot in range(1, state.lanes[l].decodes):
        if state.slots[l, slot].admission_number > state.slots[l, latest].admission_number:
            latest = slot
    return latest


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
    elif list_number == LEAVING:  # Its last token was made but not read, so the KV of this token is missing.
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
def _preempt_request(state, w, r, tokens, cached, recomputed):
    """Preempt request r, which is in no slot: free its seat and the blocks of `tokens` tokens.

    The first `cached` of these tokens stay in a prefix cache. The request waits to compute `recomputed`
    tokens again (`enqueue_preempted`).
    """
    worker, request = state.workers[w], state.requests[r]
    request.preemptions += 1
    report_token(state, r)  # The router sees all that was computed.
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
def latest_in(state, w, list_number):
    """The request admitted last of those in list `list_number` of worker w; NONE if it is empty."""
    latest, r = NONE, state.workers[w].head[list_number]
    while r != NONE:
        if latest == NONE or state.requests[r].admission_number > state.requests[latest].admission_number:
            latest = r
        r = state.requests[r].next
    return latest


@kernel_jit
def free_seat_and_blocks(state, w, r):
    """Free the seat and the blocks of request r, which is in no slot, on worker w."""
    length = state.requests[r].length_tokens
    release_blocks(state, w, r, length, length, False)
    state.workers[w].running -= 1


@kernel_jit
def free_leaving_requests(state, w):
    """Free seats and blocks of requests whose last token came with the step before.

    vLLM forms the next step before it sees that they have ended.
    """
    worker = state.workers[w]
    while worker.head[LEAVING] != NONE:
        free_seat_and_blocks(state, w, pop_first(state.requests, worker, LEAVING))


@kernel_jit
def release_blocks(state, w, r, tokens, cached_tokens, is_late):
    """Free the blocks of `tokens` tokens of request r, which is in no slot, on worker w.

    With a prefix cache the first `cached_tokens` of them stay there for other requests. `is_late`: the next
    step is formed already.
    """
    state.workers[w].used_blocks -= request_blocks(state, w, tokens) + seat_blocks(state, w, r)
    release_prefix(state, w, r, cached_tokens, is_late)


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
