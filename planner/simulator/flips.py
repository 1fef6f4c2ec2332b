"""TetriInfer's instance flip (Hu et al. 2024, arXiv:2401.11181): idle workers join the pool that has work.

A worker that has had nothing to do for so long takes the other role where all workers of that one are busy
and its own keeps another worker. It is looked for as a request arrives, or is handed over. Where a flip takes
time the worker is in no pool until then, and no other one flips; it counts as idle from its restart on.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.compiled import kernel_jit
from planner.simulator.layout import (
    BACK,
    DECODE,
    FLIP_S,
    FRONT,
    LIVE,
    MIXED,
    PREFILL,
    RESTART_S,
    SIZE,
    TURNING,
)
from planner.simulator.routing import set_pools
from planner.simulator.slots import load


@kernel_jit
def flip(state, pool, time_s):
    """Let a worker join this pool, if one may; nothing for fleets that do not flip."""
    if state.policy[FLIP_S] == np.inf or (state.policy[RESTART_S] > 0.0 and _one_turns(state, time_s)):
        return
    for w in range(len(state.workers)):
        worker = state.workers[w]
        other = BACK if pool == FRONT else FRONT
        if (
            worker.is_up == 1
            and worker.role != MIXED
            and (worker.role == DECODE) == (pool == FRONT)
            and worker.running == 0
            and worker.assigned == 0.0
            and worker.used_blocks == 0
            and time_s - worker.idle_since_s >= state.policy[FLIP_S]
            and state.counters[SIZE + other] > 1
            and _is_busy(state, pool)
        ):
            worker.role = PREFILL if pool == FRONT else DECODE
            if state.policy[RESTART_S] > 0.0:
                worker.is_up, worker.idle_since_s = TURNING, time_s + state.policy[RESTART_S]
            load(state, w, 0.0, 0.0, 0.0)
            set_pools(state)
            return


@kernel_jit
def _one_turns(state, time_s):
    """Whether a worker still restarts; one that is done is up. A router is told so."""
    for w in range(len(state.workers)):
        worker = state.workers[w]
        if worker.is_up == TURNING:
            if state.policy[LIVE] > 0.0 or time_s < worker.idle_since_s:
                return True
            worker.is_up = 1
            set_pools(state)
    return False


@kernel_jit
def _is_busy(state, pool):
    for i in range(state.counters[SIZE + pool]):
        if state.workers[state.pools[pool, i]].assigned == 0.0:
            return False
    return True
