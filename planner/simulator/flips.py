"""Workers that change between the pools of prefill and decode workers, while requests run.

TetriInfer's instance flip (Hu et al. 2024, arXiv:2401.11181): idle workers join the pool that has work.
A worker that has had nothing to do for so long takes the other role where all workers of that one are busy
and its own keeps another worker. It is looked for as a request arrives, or is handed over. Where a flip takes
time the worker is in no pool until then, and no other one flips; it counts as idle from its restart on.

Splitwise's re-purposing (Patel et al. 2024, arXiv:2311.18677, section IV-A) for engines that have one role at
a time, so that there is no mixed pool: a pool is short of workers where its paper has requests go to machines
of the other one, as all of its own have more than PROMPT_QUEUE_TOKENS of prompts to compute, or no room for
the KV of another request. One that has been short at every arrival and hand-off for `repurpose_after_s`,
while the other was not, gets the worker of that with the fewest requests: it takes no more, and changes its
role as it is idle. The next one follows after as long again.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.layout import (
    BACK,
    BLOCK,
    DECODE,
    DRAINING,
    FLIP_S,
    FRONT,
    LIVE,
    MIXED,
    NONE,
    PREFILL,
    REPURPOSE_S,
    RESTART_S,
    SHORT_SINCE_S,
    SIZE,
    TURNING,
)
from planner.simulator.numba_compile import kernel_jit, small_jit, where_rare
from planner.simulator.routing import set_pools
from planner.simulator.slots import load

PROMPT_QUEUE_TOKENS = 8192.0  # Splitwise's own


@where_rare(lambda state, pool, time_s: None)
def flip(state, pool, time_s):
    """Let a worker join this pool, if one may; nothing for fleets that do not flip."""
    if state.policy[REPURPOSE_S] < np.inf:
        _repurpose(state, time_s)
        return
    if state.policy[FLIP_S] == np.inf or (state.policy[RESTART_S] > 0.0 and _one_turns(state, time_s)):
        return
    for w in range(len(state.workers)):
        worker = state.workers[w]
        other = BACK if pool == FRONT else FRONT
        if (
            worker.is_up == 1
            and worker.role != MIXED
            and (worker.role == DECODE) == (pool == FRONT)
            and _is_idle(worker)
            and time_s - worker.idle_since_s >= state.policy[FLIP_S]
            and state.counters[SIZE + other] > 1
            and _is_busy(state, pool)
        ):
            _turn(state, w, time_s)
            return


@small_jit
def _is_idle(worker):
    return worker.running == 0 and worker.assigned == 0.0 and worker.used_blocks == 0


@kernel_jit
def _turn(state, w, time_s):
    """Worker w has the other role from now on, or once it has restarted."""
    worker = state.workers[w]
    worker.role = PREFILL if worker.role == DECODE else DECODE
    worker.is_up, worker.idle_since_s = 1, time_s
    if state.policy[RESTART_S] > 0.0:
        worker.is_up, worker.idle_since_s = TURNING, time_s + state.policy[RESTART_S]
    load(state, w, 0.0, 0.0, 0.0)
    set_pools(state)


@kernel_jit
def _repurpose(state, time_s):
    """Let a worker drain for the pool that has long been short; one at a time."""
    for pool in (FRONT, BACK):
        if not (_one_drains(state, time_s) or _one_turns(state, time_s)):
            _look(state, pool, time_s)


@kernel_jit
def _look(state, pool, time_s):
    """See whether a pool is short, and since when."""
    other, since = BACK if pool == FRONT else FRONT, SHORT_SINCE_S + pool
    if not _is_short(state, pool) or _is_short(state, other):
        state.policy[since] = np.inf
        return
    state.policy[since] = min(state.policy[since], time_s)
    if time_s - state.policy[since] < state.policy[REPURPOSE_S] or state.counters[SIZE + other] < 2:
        return
    least = NONE
    for i in range(state.counters[SIZE + other]):
        w = state.pools[other, i]
        if state.workers[w].role != MIXED and (
            least == NONE or state.workers[w].assigned < state.workers[least].assigned
        ):
            least = w
    if least == NONE:
        return
    state.policy[since] = np.inf
    state.workers[least].is_up = DRAINING
    set_pools(state)
    _one_drains(state, time_s)


@kernel_jit
def _one_drains(state, time_s):
    """Whether a worker still drains; one that is idle gets its other role."""
    for w in range(len(state.workers)):
        if state.workers[w].is_up == DRAINING:
            # what leaves it at this very moment is still there
            if not _is_idle(state.workers[w]) or state.workers[w].idle_since_s >= time_s:
                return True
            _turn(state, w, time_s)
    return False


@kernel_jit
def _is_short(state, pool):
    """Whether no worker of a pool would have another request soon."""
    for i in range(state.counters[SIZE + pool]):
        worker = state.workers[state.pools[pool, i]]
        kind = state.types[worker.type]
        if pool == FRONT:
            if worker.pending_tokens <= PROMPT_QUEUE_TOKENS:
                return False
        elif worker.assigned < kind.seats and worker.future_tokens < kind.kv_blocks * float(BLOCK):
            return False
    return True


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
