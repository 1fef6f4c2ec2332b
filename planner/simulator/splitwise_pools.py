"""Splitwise's pools of machines: which machine takes a request, and which changes its pool. splitwise.py runs
them as Splitwise's own simulator does.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.layout import NONE, REPURPOSE_S, SIZE, ZERO
from planner.simulator.numba_compile import kernel_jit, small_jit
from planner.simulator.slots import add_load, assign_request, reject_request

PROMPT_QUEUE_TOKENS = 8192.0  # A machine with more prompt tokens than these has a long queue.
PROMPT_POOL, TOKEN_POOL, MIXED_POOL = np.int64(0), np.int64(1), np.int64(2)

# Indices into State.marks: transfers that wait for room, whether a queue is about to overflow, tasks that
# have come so far, whether the loads of new requests count, whether machines change pools.
RETRYING, IS_FULL, CAME, ADDS, MOVES = range(5)
MARKS = 5


@small_jit
def capacity_tokens(state, w):
    """KV that machine w has."""
    return state.types[state.workers[w].type].kv_capacity_tokens


@small_jit
def prompt_tokens(state, r):
    """Tokens of KV of the prompt of r, and of the token that it makes."""
    return state.requests[r].length_tokens + 1


@small_jit
def whole_tokens(state, r):
    """Tokens of KV of request r at its end."""
    return state.requests[r].input_tokens + state.requests[r].output_tokens


@kernel_jit
def leave_pool(state, w):
    """Take machine w out of its pool; the others keep their order."""
    old, place = state.machines[w].pool, 0
    while state.pools[old, place] != w:
        place += 1
    state.counters[SIZE + old] -= 1
    for i in range(place, state.counters[SIZE + old]):
        state.pools[old, i] = state.pools[old, i + 1]


@kernel_jit
def enter_pool(state, w, pool, time_s):
    """Machine w becomes the last of a pool."""
    state.pools[pool, state.counters[SIZE + pool]] = w
    state.counters[SIZE + pool] += 1
    state.machines[w].pool = pool
    if pool == MIXED_POOL:
        state.machines[w].mixed_since_s = time_s


@kernel_jit
def move(state, w, pool, time_s):
    """Machine w changes to another pool."""
    leave_pool(state, w)
    enter_pool(state, w, pool, time_s)


@kernel_jit
def _keeps_one(state, home):
    """Whether a pool that one machine leaves for good has another one that is up."""
    count = 0
    for w in range(len(state.workers)):
        count += state.workers[w].is_up == 1 and state.machines[w].home == home
    return count > 1


@kernel_jit
def _repurpose(state, time_s):
    """Machines that have been mixed for long belong to the other pool from now on."""
    i = ZERO
    while i < state.counters[SIZE + MIXED_POOL]:
        w = state.pools[MIXED_POOL, i]
        machine = state.machines[w]
        is_long = time_s - machine.mixed_since_s >= state.policy[REPURPOSE_S]
        if is_long and machine.home != MIXED_POOL and _keeps_one(state, machine.home):
            machine.home = TOKEN_POOL if machine.home == PROMPT_POOL else PROMPT_POOL
            move(state, w, machine.home, time_s)
        else:
            i += 1


@kernel_jit
def least_pending(state, pool, need, best):
    """The machine of `pool` with the smallest score, if that is below the one of machine `best`."""
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        if (best == NONE or state.score[w] < state.score[best]) and need <= capacity_tokens(state, w):
            best = w
    return best


@kernel_jit
def least_reserved(state, pool, need):
    """The machine of a pool with the fewest promised tokens that holds `need` at all; NONE without any."""
    best = NONE
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        if (best == NONE or state.machines[w].promised_tokens < state.machines[best].promised_tokens) and (
            need <= capacity_tokens(state, w)
        ):
            best = w
    return best


@kernel_jit
def _open_for_prompt(state, r):
    """The machine for a prompt, in Splitwise's order: one of the prompt pool or the mixed pool without a long
    queue, else one of the token pool, which changes its pool then; NONE if that has none.
    """
    prompt = prompt_tokens(state, r)
    for pool in (PROMPT_POOL, MIXED_POOL):
        w = least_pending(state, pool, prompt, NONE)
        worker = state.workers[max(w, ZERO)]  # Any machine, if w is NONE.
        if w != NONE and (
            worker.waiting == 0 or worker.pending_tokens + worker.assigned + prompt - 1 <= PROMPT_QUEUE_TOKENS
        ):
            return w
    return least_pending(state, TOKEN_POOL, prompt, NONE)


@kernel_jit
def open_for_tokens(state, r):
    """The machine of the token pool or the mixed pool that has room for request r; NONE if there is none."""
    whole = whole_tokens(state, r)
    for pool in (TOKEN_POOL, MIXED_POOL):
        w = least_reserved(state, pool, whole)
        if w != NONE and state.machines[w].promised_tokens + whole <= capacity_tokens(state, w):
            return w
    return NONE


@kernel_jit
def least_pending_of_all(state, r):
    """The machine of any pool with the least work that holds request r at all; NONE if there is none."""
    best = NONE
    for pool in (PROMPT_POOL, MIXED_POOL, TOKEN_POOL):
        best = least_pending(state, pool, whole_tokens(state, r), best)
    return best


@kernel_jit
def _route_moving(state, r, time_s):
    """Splitwise's mixed pool: machines for a prompt and its tokens; they may change pools for it."""
    source, target = _open_for_prompt(state, r), open_for_tokens(state, r)
    if source != NONE and state.machines[source].pool == TOKEN_POOL:
        move(state, source, MIXED_POOL, time_s)
    if target == NONE:
        target = least_reserved(state, PROMPT_POOL, whole_tokens(state, r))
        if target != NONE:
            move(state, target, MIXED_POOL, time_s)
    if source == NONE or target == NONE:
        source = target = least_pending_of_all(state, r)
    return source, target


@kernel_jit
def _may_return(state, r):
    """Whether a machine that is down could hold request r."""
    for w in range(len(state.workers)):
        if state.workers[w].is_up == 0 and whole_tokens(state, r) <= capacity_tokens(state, w):
            return True
    return False


@kernel_jit
def route(state, r, time_s):
    """Choose the machines of request r, and count its load; False if no machine can hold it now."""
    request = state.requests[r]
    prompt, whole = prompt_tokens(state, r), whole_tokens(state, r)
    if state.marks[MOVES]:
        _repurpose(state, time_s)
        source, target = _route_moving(state, r, time_s)
    else:
        source = least_pending(state, PROMPT_POOL, prompt, NONE)
        # The mixed pool's machine, if it has less to do.
        source = target = least_pending(state, MIXED_POOL, whole, source)
        if source != NONE and state.machines[source].pool == PROMPT_POOL:
            target = least_pending(state, TOKEN_POOL, whole, NONE)
    if source == NONE or target == NONE:
        if not _may_return(state, r):
            reject_request(state, r)
        return False
    if request.output_tokens - request.generated_tokens == 1:  # No token is left for a decode machine.
        target = source
    request.prefill_worker, request.decode_worker = source, target
    if state.marks[ADDS]:
        add_load(state, source, float(request.length_tokens), 0.0, 0.0)
        assign_request(state, target, r, 1.0)
    if source != target:
        state.machines[source].promised_tokens += prompt
    state.machines[target].promised_tokens += whole
    return True
