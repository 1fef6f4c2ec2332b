"""Brings a lane, its worker and the counts of gaps up to date when a run of decode steps has ended.

A lane is a batch of an engine, and a run is a number of its decode steps that the simulator takes at once
(`planner/simulator/layout.py`). Gaps are counted to test limits, and recorded for reports (both in
counting.py). `kernel.py` and `splitwise.py` call `advance_decodes` when a run ends or is cut.

With speculative decoding a running decode gets in each step one token and those of its drafted tokens that
are accepted. How many are accepted is a random number that depends on the request and on how many tokens it
has, not on the worker or the time. So a request has the same steps on every fleet, and simulations can be
repeated.

Letters: l is a lane, w a worker, r a request.
"""

from __future__ import annotations

import numpy as np

from planner.policies import LIGHTLLM
from planner.simulator.caches import evict_idle, note_taken_blocks
from planner.simulator.counting import (
    count_run,
    count_zero_gaps,
    count_zero_gaps_of_class,
    first_token,
    note_decoding,
    note_gap,
    record_classes,
    record_gap,
    record_steps,
    run_s,
    single_gap,
)
from planner.simulator.kv_blocks import blocks_for_next_step, blocks_of_steps, steps_with_blocks
from planner.simulator.layout import BLOCK, DECODE, LARGEST, ONE, ZERO
from planner.simulator.numba_compile import kernel_jit, where_has, where_rare
from planner.simulator.queue_orders import charge_token, charge_tokens


@kernel_jit
def _random_unit(seed, r, tokens):
    """A random number in [0, 1) by seed, request and count of tokens (splitmix64, Steele et al. 2014)."""
    x = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(r)  # Any large odd factor would do.
    for i in range(2):  # Two rounds: the tokens come in with the second.
        x = x + np.uint64(0x9E3779B97F4A7C15) + (np.uint64(tokens) if i == 1 else np.uint64(0))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return np.float64(x >> np.uint64(11)) * 2.0**-53


@where_rare(lambda state, l, time_s: None)
def accept_drafts(state, l, time_s):
    """The decodes of lane l have got one token each: add the drafted tokens that are accepted.

    A decode that was handed over has no drafts in its first step, which vLLM fills up with blanks. A decode
    keeps the blocks of all tokens that the step checked. An asynchronous engine takes the blocks of the next
    step before it knows how many drafts were accepted, as if all of them were.
    """
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    kind = state.types[worker.type]
    drafts, zero_gaps = lane.width - 1, ZERO
    lane.coming_blocks = 0
    lane.next_finish_step = LARGEST
    for slot in range(lane.decodes):
        entry = state.slots[l, slot]
        r = entry.request
        tokens_left = entry.finish_step - lane.decode_step
        tokens_before = state.requests[r].output_tokens - tokens_left - 1  # Output tokens before this step.
        accepted = ZERO
        # A handed-over decode begins with one token, or with none if the prefill worker's is discarded.
        if worker.role != DECODE or tokens_before > 1 - kind.discards_token:
            draw = _random_unit(kind.draw_seed, r, tokens_before)
            # `kind.accepted` are the chances P_1, P_2, ...: one draw decides how many drafts are accepted.
            while accepted < min(drafts, tokens_left) and draw < kind.accepted[accepted]:
                accepted += 1
        if accepted > 0:
            lane.residue[entry.context_offset % BLOCK] -= 1
            entry.context_offset += accepted
            lane.residue[entry.context_offset % BLOCK] += 1
            entry.finish_step -= accepted
            lane.kv_sum += accepted
            zero_gaps += accepted
            count_zero_gaps_of_class(state, lane.worker, r, accepted, time_s)
            for _ in range(accepted):
                charge_token(state, lane.worker, r)
        lane.next_finish_step = min(lane.next_finish_step, entry.finish_step)
        entry.held_blocks = entry.next_blocks
        context_tokens = entry.context_offset + lane.decode_step
        # An asynchronous engine does not know yet of rejected drafts, and takes them for accepted.
        unknown = (drafts - accepted) * kind.is_async
        needed = blocks_for_next_step(kind, lane, state.requests[r], context_tokens + unknown)
        entry.next_blocks = max(needed, entry.held_blocks)
        lane.coming_blocks += entry.next_blocks - entry.held_blocks
    if zero_gaps > 0:
        count_zero_gaps(state, lane.worker, zero_gaps, time_s)


@where_has("caches", lambda state, l, steps, taken_blocks, time_s: None)
def evict_for_run(state, l, steps, taken_blocks, time_s):
    """Evict idle entries for the `taken_blocks` that the first `steps` steps of the run of lane l take.

    Where routers hear of evictions later (NOTICE_S), each eviction counts from the beginning of the step that
    takes its block. `used_blocks` does not count the blocks of the run yet.
    """
    lane = state.lanes[l]
    w = lane.worker
    worker, cache = state.workers[w], state.caches.workers[w]
    # A rank that takes part in its worker's steps with an empty batch (ranks.py) takes no blocks.
    is_timed = len(state.caches.notices) > 0 and steps > 1 and lane.decodes > 0
    while is_timed and cache.idle_blocks > 0:
        idle_blocks = cache.idle_blocks
        free = state.types[worker.type].kv_blocks - worker.used_blocks - worker.late_blocks - idle_blocks
        done = steps_with_blocks(lane, max(free, ZERO))
        if done >= steps:
            break
        step_s = lane.run_start_s + run_s(lane.run_first_s, lane.run_growth_s, done)
        evict_idle(state, w, blocks_of_steps(lane, done + 1), step_s)
        is_timed = cache.idle_blocks < idle_blocks
    evict_idle(state, w, taken_blocks, time_s)


@kernel_jit
def advance_decodes(state, l, steps, time_s):
    """The decodes of lane l have made `steps` tokens each, the last ones at `time_s`.

    Decodes that are out of step (LANE.out_of_step) had their last token at other times than the lane, so
    their first gap is not a step. Such a run has one step only (`batching.run_length`), so they make one
    token here.
    """
    lane = state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    first_s, growth_s = lane.run_first_s, lane.run_growth_s
    in_step = lane.decodes - lane.out_of_step
    # A run that began later than the last token has one step, and the gap is longer than this step.
    gaps_are_steps = lane.run_start_s == lane.last_token_s
    gap_s = time_s - lane.last_token_s
    if len(state.runs) > 0:  # Runs are recorded.
        # In a pipeline the recorded step is that of one stage, and a gap is the time of all stages.
        if gaps_are_steps and kind.lanes == 1:
            record_steps(state, l, first_s, growth_s, steps, in_step)
            if in_step > 0:
                record_classes(state, l, lane.run_start_s, first_s, growth_s, steps, in_step)
        else:
            record_steps(state, l, first_s if kind.lanes == 1 else lane.stage_s, growth_s, steps, ZERO)
            if in_step > 0:
                record_gap(state, w, lane.last_token_s, gap_s, in_step)
                record_classes(state, l, lane.last_token_s, gap_s, 0.0, ONE, in_step)
    # Reserved blocks were counted at the admission, those of a pipeline when the step was started.
    if kind.lanes == 1 and kind.reserved_blocks == 0:
        taken_blocks = blocks_of_steps(lane, steps)
        evict_for_run(state, l, steps, taken_blocks, time_s)
        worker.used_blocks += taken_blocks
    charge_tokens(state, l, steps)
    note_taken_blocks(state, w, steps * lane.decodes)
    if kind.batching == LIGHTLLM:  # From 1 to `patience_steps`, then again from 1.
        worker.steps_since_prompts = (worker.steps_since_prompts + steps - 1) % kind.patience_steps + 1
    # All drafted tokens are computed. `accept_drafts` adds the KV of those that it accepts.
    worker.dense_tokens += steps * lane.decodes * lane.width
    lane.decode_step += steps
    lane.kv_sum += float(steps) * lane.decodes
    for slot in range(in_step, lane.decodes):
        r = state.slots[l, slot].request
        if np.isnan(state.requests[r].first_token_s):
            first_token(state, r, time_s)
            note_decoding(state, r)
        else:
            single_gap(state, w, r, time_s)
        state.slots[l, slot].settled_step = lane.decode_step  # Gaps of the lane are its own from here on.
    if in_step > 0:
        if gaps_are_steps:
            count_run(state, l, lane.run_start_s, first_s, growth_s, steps, in_step)
            note_gap(state, l, first_s + growth_s * (steps - 1))
        else:
            count_run(state, l, lane.last_token_s, gap_s, 0.0, ONE, in_step)
            note_gap(state, l, gap_s)
    lane.out_of_step = 0
    lane.last_token_s = time_s
    if lane.width > 1:
        accept_drafts(state, l, time_s)
