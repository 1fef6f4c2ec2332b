"""The tokens of a run of decode steps: a lane, its worker and the counts of gaps once the run has ended.

A lane is a batch of an engine, and a run is a number of its decode steps that the simulator takes at once
(`planner/simulator/layout.py`). `kernel.py` and `splitwise.py` call `decoded` where a run ends or is cut.
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
def decoded(state, l, steps, time_s):
    """The decodes of lane l have made `steps` tokens each, the last ones at `time_s`."""
    lane = state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    first_s, growth_s = lane.run_first_s, lane.run_growth_s
    normal = lane.decodes - lane.late_decodes
    starts_at_token = lane.run_start_s == lane.last_token_s  # Otherwise the first gap is longer than a step.
    gap_s = time_s - lane.last_token_s
    if len(state.runs) > 0:
        step_s = first_s if kind.lanes == 1 else lane.stage_s
        # Of a pipeline every gap is recorded singly.
        sequences = normal if starts_at_token and kind.lanes == 1 else ZERO
        record_steps(state, l, step_s, growth_s, steps, sequences)
        if sequences == 0 and normal > 0:
            record_gap(state, w, lane.last_token_s, gap_s, normal)
            record_classes(state, l, lane.last_token_s, gap_s, 0.0, ONE, normal)
        if sequences > 0:
            record_classes(state, l, lane.run_start_s, step_s, growth_s, steps, sequences)
    if kind.lanes == 1 and kind.reserved_blocks == 0:
        worker.used_blocks += blocks_for(lane, steps)
        evict_idle(state, w, ZERO, time_s)
    charge_tokens(state, l, steps)
    recycle_windows(state, w, steps * lane.decodes)
    if kind.batching == LIGHTLLM:  # From 1 to `patience_steps`, then again from 1.
        worker.steps_since_prompts = (worker.steps_since_prompts + steps - 1) % kind.patience_steps + 1
    worker.dense_tokens += steps * lane.decodes * lane.width
    lane.decode_step += steps
    lane.kv_sum += float(steps) * lane.decodes
    for slot in range(normal, lane.decodes):
        r = state.slots[l, slot].request
        if np.isnan(state.requests[r].first_token_s):
            first_token(state, r, time_s)
            note_decoding(state, r)
        else:
            single_gap(state, w, r, time_s)
        state.slots[l, slot].settled_step = lane.decode_step
    if normal > 0:
        if starts_at_token:
            count_run(state, l, lane.run_start_s, first_s, growth_s, steps, normal)
            note_gap(state, l, first_s + growth_s * (steps - 1))
        else:
            count_run(state, l, lane.last_token_s, gap_s, 0.0, ONE, normal)
            note_gap(state, l, gap_s)
    lane.late_decodes = 0
    lane.last_token_s = time_s
    if lane.width > 1:
        accept_drafts(state, l, time_s)
