"""How many KV blocks a request, a running decode or a run of steps takes on a worker.

Beside the blocks of its tokens a request takes blocks with its seat, for recurrent states and attention
windows (`seat_blocks`). Rows of `state.workers` are ranks (ranks.py). Letters: w a worker or rank, l a lane,
r a request, c its tokens in the KV cache. `kind` is the worker's row of TYPE. Lanes, slots and runs are
explained in layout.py, where_rare in numba_compile.py.
"""

from __future__ import annotations

import numpy as np

from planner.policies import RESERVE_STATIC
from planner.simulator.counting import steps_reaching
from planner.simulator.layout import BLOCK, NONE, ONE, ZERO
from planner.simulator.numba_compile import kernel_jit, small_jit, where_rare


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
def cached_on_arrival(request):
    """How many tokens of a request that was handed over count as cached.

    All its tokens do, except the last token of its prompt while the request has generated no token: the
    decode worker computes this token again to make the first one.
    """
    return request.length_tokens - (request.generated_tokens == 0)


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
def steps_done(lane, time_s):
    """Steps of the current run of a lane that have ended before `time_s`, never the run's last one."""
    if lane.run_steps <= 1:
        return ZERO
    reached = steps_reaching(lane.run_start_s, lane.run_first_s, lane.run_growth_s, time_s)
    return min(reached, lane.run_steps) - 1  # The step that ends at or after `time_s` is not over.


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
                missing = state.slots[l, slot].finish_step - lane.decode_step - done
                generated = request.output_tokens - missing
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
