"""The next step of the data-parallel ranks of one worker. Each rank forms its own batch, and all steps take
the same time t, because the ranks exchange tokens for the experts:

    t = g(N) + max over ranks of the seconds of the rank's own batch

N are the tokens of all ranks, and g(N) is the time of the experts, which compute the tokens of all ranks
together. Then each rank's host time is added to t, and all ranks wait for the one with the longest sum. An
empty batch counts as one token: a rank without work takes part in the exchange with a dummy. While all
batches are of decodes alone, steps that grow evenly are simulated as one run; it ends when another rank
becomes the slowest.

A run is (first_s, growth_s, steps): its step j, from 0 on, takes first_s + growth_s * j.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.batching import run_length, start_step, step_time_factor
from planner.simulator.counting import run_s
from planner.simulator.event_heap import set_time
from planner.simulator.layout import ZERO
from planner.simulator.numba_compile import kernel_jit
from planner.simulator.step_times import UNBOUNDED, step_seconds, with_host


@kernel_jit
def _slower_run(first_s, growth_s, steps, other_first_s, other_growth_s):
    """The slower of two runs that begin together and have `steps` steps each, cut to the steps in which it is
    the slower one.
    """
    if other_first_s > first_s or (other_first_s == first_s and other_growth_s > growth_s):
        first_s, growth_s, other_first_s, other_growth_s = other_first_s, other_growth_s, first_s, growth_s
    # The first run is the slower one now. If the other grows faster, it catches up. (-inf: no other run yet.)
    if other_growth_s > growth_s and other_first_s > -np.inf:
        # The quotient is bounded by 1e15 steps, more than any run has, so that int() cannot overflow.
        steps = min(steps, int(min((first_s - other_first_s) / (other_growth_s - growth_s), 1e15)) + 1)
    return first_s, growth_s, steps


@kernel_jit
def start_ranks(state, w, time_s):
    """Form and start the next step of all ranks of the worker whose first rank is w, if any has work. Of a
    rank `start_step` only forms the step; the step is launched here, with those of the other ranks.
    """
    end = w + state.dp_ranks[w].count
    kind, tables = state.types[state.workers[w].type], state.tables
    tokens, active = ZERO, ZERO
    # The slowest batch of a rank: seconds of its first step, and how much longer each next one is.
    batch_s, batch_growth_s, steps = -np.inf, 0.0, UNBOUNDED
    for v in range(w, end):
        l = state.workers[v].first_lane
        start_step(state, l, time_s)
        lane = state.lanes[l]
        if lane.run_steps == 0:
            tokens += 1  # The dummy token of an empty batch.
            continue
        active += 1
        tokens += lane.prefill_tokens + lane.decodes * lane.is_decoding
        stage_s, _, _, growth_s, _ = step_seconds(state, kind, lane)
        batch_s, batch_growth_s, steps = _slower_run(batch_s, batch_growth_s, steps, stage_s, growth_s)
    if active == 0:
        return
    gpus_s = batch_s + tables[kind.table_at[1] + tokens]  # t: the second table is the time of the experts.
    rank_s, rank_growth_s = -np.inf, 0.0  # The run of the slowest rank, with its host time.
    for v in range(w, end):
        l = state.workers[v].first_lane
        lane = state.lanes[l]
        if lane.run_steps == 0:
            continue
        stage_s, extra_s, _, growth_s, most_steps = with_host(
            kind, lane, gpus_s, 0.0, 0.0, batch_growth_s, UNBOUNDED
        )
        rank_s, rank_growth_s, steps = _slower_run(rank_s, rank_growth_s, steps, stage_s + extra_s, growth_s)
        steps = min(steps, most_steps, run_length(state, l, time_s, state.dp_ranks[v].goes_on == 1))
    _run_together(state, w, max(steps, 1), rank_s, rank_growth_s, time_s)


@kernel_jit
def _run_together(state, w, steps, first_s, growth_s, time_s):
    """Start the same run on all ranks of the worker whose first rank is w. The first rank's event ends it."""
    slow = step_time_factor(state, w)
    if slow != 1.0:
        first_s, growth_s = first_s * slow, growth_s * slow
    for v in range(w, w + state.dp_ranks[w].count):
        lane = state.lanes[state.workers[v].first_lane]
        lane.run_start_s, lane.run_steps = time_s, steps
        lane.run_first_s, lane.run_growth_s, lane.stage_s = first_s, growth_s, first_s
    set_time(state, state.workers[w].first_lane, time_s + run_s(first_s, growth_s, steps))
