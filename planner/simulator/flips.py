"""Workers that change their role between prefill and decode while requests run.

There are two policies:

Flip, after TetriInfer (Hu et al. 2024, arXiv:2401.11181). At each arrival and hand-off, a worker that has
been idle for `flip_after_s` takes the other role, if all workers of that role are busy and its own pool has
another worker. If a flip takes time, the worker is in no pool until it has restarted, and no other worker
flips meanwhile. It counts as idle from its restart on.

Re-purposing, after Splitwise (Patel et al. 2024, arXiv:2311.18677, section IV-A), but without the paper's
mixed pool, because our workers have one role at a time. The prefill pool is short of workers if each of them
has more than PROMPT_QUEUE_TOKENS of prompts to compute, the decode pool if none has room for the KV of
another request. (The paper then sends requests to machines of the other pool.) If a pool was short at every
arrival and hand-off for `repurpose_after_s`, while the other was not, it gets the worker of the other pool
with the fewest requests. That worker takes no more requests, and changes its role when it is idle. The next
worker may follow after `repurpose_after_s` again.

Requests that wait for a worker to come up (LIMBO) are routed again when a worker has a new role.

In ARRIVAL_POOL are prefill and mixed workers, in HAND_OFF_POOL decode workers.
"""

from __future__ import annotations

from planner.simulator.event_heap import set_time
from planner.simulator.layout import (
    ARRIVAL_POOL,
    BLOCK,
    DECODE,
    DRAINING,
    FLIP_S,
    HAND_OFF_POOL,
    IN_SERVICE,
    LIMBO,
    LIVE,
    LOST,
    MIXED,
    NEVER,
    NONE,
    PREFILL,
    REPURPOSE_S,
    RESTART_S,
    RESTARTING,
    SHORT_SINCE_S,
    SIZE,
)
from planner.simulator.numba_compile import kernel_jit, small_jit, where_rare
from planner.simulator.queues import meld_heaps
from planner.simulator.ranks import event_lane
from planner.simulator.router_loads import add_load
from planner.simulator.routing import set_pools
from planner.simulator.splitwise_pools import PROMPT_QUEUE_TOKENS


@where_rare(lambda state, pool, time_s: None)
def flip_if_due(state, pool, time_s):
    """Let a worker of the other pool join this one if the policy says so. At most one flips per call.

    Called at each arrival (ARRIVAL_POOL) and hand-off (HAND_OFF_POOL), also where workers keep their roles.
    """
    if state.policy[REPURPOSE_S] < NEVER:
        _repurpose_workers(state, time_s)
        return
    if state.policy[FLIP_S] == NEVER or (state.policy[RESTART_S] > 0.0 and _end_restarts(state, time_s)):
        return
    other = HAND_OFF_POOL if pool == ARRIVAL_POOL else ARRIVAL_POOL
    for w in range(len(state.workers)):
        worker = state.workers[w]
        is_in_other = worker.role != MIXED and (worker.role == DECODE) == (other == HAND_OFF_POOL)
        if (
            worker.status == IN_SERVICE
            and is_in_other
            and _is_idle(worker)
            and time_s - worker.idle_since_s >= state.policy[FLIP_S]
            and state.counters[SIZE + other] > 1
            and _is_busy(state, pool)
        ):
            _change_role(state, w, time_s)
            return


@small_jit
def _is_idle(worker):
    """Whether a worker has no requests and no KV blocks."""
    return worker.running == 0 and worker.assigned == 0.0 and worker.used_blocks == 0


@kernel_jit
def _change_role(state, w, time_s):
    """Give worker w the other role. If that takes time, it is up again only once it has restarted."""
    worker = state.workers[w]
    worker.role = PREFILL if worker.role == DECODE else DECODE
    if state.policy[RESTART_S] > 0.0:
        worker.status, worker.idle_since_s = RESTARTING, time_s + state.policy[RESTART_S]
        _plan_end_of_restart(state, event_lane(state, w))
    else:
        # A worker that changes its role once more at the same moment serves nobody who waits.
        if time_s > worker.idle_since_s:
            route_limbo_anew(state)
        worker.status, worker.idle_since_s = IN_SERVICE, time_s
    add_load(state, w, 0.0, 0.0, 0.0)  # Adds no load, but renews the router's score: it depends on the role.
    set_pools(state)


@kernel_jit
def route_limbo_anew(state):
    """Let the kernel route the requests in limbo again, once the event of this moment is over."""
    state.counters[LOST] = meld_heaps(state.requests, state.counters[LOST], state.counters[LIMBO])
    state.counters[LIMBO] = NONE


@kernel_jit
def _plan_end_of_restart(state, l):
    """Give the lane of a worker that restarts an event at the end of the restart, when a request may wait for
    it. In a live router (LIVE) there are no events.
    """
    if state.policy[LIVE] == 0.0 and state.lanes[l].run_steps == 0:
        set_time(state, l, state.workers[state.lanes[l].worker].idle_since_s)


@where_rare(lambda state, l, time_s: None)
def end_restart(state, l, time_s):
    """Let the worker of lane l be up again if it has restarted by now, after an event of that lane."""
    if state.workers[state.lanes[l].worker].status == RESTARTING and _end_restarts(state, time_s):
        _plan_end_of_restart(state, l)


@kernel_jit
def _repurpose_workers(state, time_s):
    """Let a worker drain for a pool that has long been short of workers; one at a time. A worker that drains
    takes no more requests, and changes its role when it is idle.
    """
    for pool in (ARRIVAL_POOL, HAND_OFF_POOL):
        # While a worker drains or restarts, no other one begins to.
        if not (_end_drains(state, time_s) or _end_restarts(state, time_s)):
            _check_shortage(state, pool, time_s)


@kernel_jit
def _check_shortage(state, pool, time_s):
    """Note since when a pool is short of workers; after `repurpose_after_s` let one of the other pool
    drain.
    """
    other, since = HAND_OFF_POOL if pool == ARRIVAL_POOL else ARRIVAL_POOL, SHORT_SINCE_S + pool
    if not _is_short(state, pool) or _is_short(state, other):
        state.policy[since] = NEVER
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
    state.policy[since] = NEVER
    state.workers[least].status = DRAINING
    set_pools(state)
    _end_drains(state, time_s)  # The worker may be idle already.


@kernel_jit
def _end_drains(state, time_s):
    """Give draining workers that have become idle their other role. Returns whether one still drains."""
    for w in range(len(state.workers)):
        if state.workers[w].status == DRAINING:
            # For a worker that became idle at this very moment, events of the same moment may still come.
            if not _is_idle(state.workers[w]) or state.workers[w].idle_since_s >= time_s:
                return True
            _change_role(state, w, time_s)
    return False


@kernel_jit
def _is_short(state, pool):
    """Whether a pool is short of workers: none of them could begin another request soon."""
    for i in range(state.counters[SIZE + pool]):
        worker = state.workers[state.pools[pool, i]]
        kind = state.types[worker.type]
        if pool == ARRIVAL_POOL:
            if worker.pending_tokens <= PROMPT_QUEUE_TOKENS:
                return False
        elif worker.assigned < kind.seats and worker.future_tokens < kind.kv_blocks * float(BLOCK):
            return False
    return True


@kernel_jit
def _end_restarts(state, time_s):
    """Let workers that have restarted be up from now on. Returns whether one still restarts.

    In a live router (LIVE) a worker counts as restarting until it says itself that it is up.
    """
    for w in range(len(state.workers)):
        worker = state.workers[w]
        if worker.status == RESTARTING:
            if state.policy[LIVE] > 0.0 or time_s < worker.idle_since_s:
                return True
            worker.status = IN_SERVICE
            set_pools(state)
            route_limbo_anew(state)
    return False


@kernel_jit
def _is_busy(state, pool):
    """Whether every worker of a pool has a request."""
    for i in range(state.counters[SIZE + pool]):
        if state.workers[state.pools[pool, i]].assigned == 0.0:
            return False
    return True
