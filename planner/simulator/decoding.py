"""Brings a lane, its worker and the counts of gaps up to date when a run of decode steps has ended.

A lane is a batch of an engine, and a run is a number of its decode steps that the simulator takes at once
(`planner/simulator/layout.py`). Gaps are counted to test limits, and recorded for reports (both in
counting.py). `kernel.py` and `splitwise.py` call `advance_decodes` when a run ends or is cut.
"""

from __future__ import annotations

import numpy as np

from planner.policies import LIGHTLLM
from planner.simulator.caches import evict_idle, recycle_windows
from planner.simulator.counting import (
    count_run,
    first_token,
    note_decoding,
    note_gap,
    record_classes,
    record_gap,
    record_steps,
    single_gap,
)
from planner.simulator.drafts import accept_drafts
from planner.simulator.layout import ONE, ZERO
from planner.simulator.numba_compile import kernel_jit
from planner.simulator.queue_orders import charge_tokens
from planner.simulator.slots import blocks_for


@kernel_jit
def advance_decodes(state, l, steps, time_s):
    """The decodes of lane l have made `steps` tokens each, the last ones at `time_s`.

    Late decodes (`LANE.late_decodes`) had their last token at other times than the lane, so their first gap
    is not a step. Such a run has one step only (`batching.run_length`), so they make one token here.
    """
    lane = state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    first_s, growth_s = lane.run_first_s, lane.run_growth_s
    punctual = lane.decodes - lane.late_decodes
    gaps_are_steps = lane.run_start_s == lane.last_token_s  # Otherwise the one gap is longer than the step.
    gap_s = time_s - lane.last_token_s
    if len(state.runs) > 0:  # Runs are recorded.
        # In a pipeline the recorded step is that of one stage, and a gap is the time of all stages.
        if gaps_are_steps and kind.lanes == 1:
            record_steps(state, l, first_s, growth_s, steps, punctual)
            if punctual > 0:
                record_classes(state, l, lane.run_start_s, first_s, growth_s, steps, punctual)
        else:
            record_steps(state, l, first_s if kind.lanes == 1 else lane.stage_s, growth_s, steps, ZERO)
            if punctual > 0:
                record_gap(state, w, lane.last_token_s, gap_s, punctual)
                record_classes(state, l, lane.last_token_s, gap_s, 0.0, ONE, punctual)
    # Reserved blocks were counted at the admission, those of a pipeline when the step was started.
    if kind.lanes == 1 and kind.reserved_blocks == 0:
        worker.used_blocks += blocks_for(lane, steps)
        evict_idle(state, w, ZERO, time_s)
    charge_tokens(state, l, steps)
    recycle_windows(state, w, steps * lane.decodes)
    if kind.batching == LIGHTLLM:  # From 1 to `patience_steps`, then again from 1.
        worker.steps_since_prompts = (worker.steps_since_prompts + steps - 1) % kind.patience_steps + 1
    # All drafted tokens are computed. `accept_drafts` adds the KV of those that it accepts.
    worker.dense_tokens += steps * lane.decodes * lane.width
    lane.decode_step += steps
    lane.kv_sum += float(steps) * lane.decodes
    for slot in range(punctual, lane.decodes):
        r = state.slots[l, slot].request
        if np.isnan(state.requests[r].first_token_s):
            first_token(state, r, time_s)
            note_decoding(state, r)
        else:
            single_gap(state, w, r, time_s)
        state.slots[l, slot].settled_step = lane.decode_step  # Gaps of the lane are its own from here on.
    if punctual > 0:
        if gaps_are_steps:
            count_run(state, l, lane.run_start_s, first_s, growth_s, steps, punctual)
            note_gap(state, l, first_s + growth_s * (steps - 1))
        else:
            count_run(state, l, lane.last_token_s, gap_s, 0.0, ONE, punctual)
            note_gap(state, l, gap_s)
    lane.late_decodes = 0
    lane.last_token_s = time_s
    if lane.width > 1:
        accept_drafts(state, l, time_s)
