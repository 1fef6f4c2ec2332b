"""Splitwise's pools of machines: which machine takes a request, and which changes its pool.

`planner/simulator/splitwise.py` says what the pools are for, and runs the machines. Choices here are those of
Splitwise's public simulator, ties included. A request needs a machine for its prompt (`source`) and one for
its tokens (`target`), which may be the same.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.layout import IN_SERVICE, NONE, OUT_OF_SERVICE, REPURPOSE_S, SIZE, ZERO
from planner.simulator.numba_compile import kernel_jit, small_jit
from planner.simulator.request_ends import reject_request
from planner.simulator.router_loads import add_load, assign_request

PROMPT_QUEUE_TOKENS = 8192.0  # A queue with more prompt tokens is long, as in Splitwise's program.
PROMPT_POOL, TOKEN_POOL, MIXED_POOL = np.int64(0), np.int64(1), np.int64(2)

# The indices of State.marks.
(
    RETRYING,  # Transfers that wait for room.
    NEEDS_LONGER_QUEUES,  # 1: a queue is about to overflow.
    ARRIVED,  # Tasks that have come to machines so far.
    COUNTS_ADDED,  # 1: the loads of new requests count.
    MOVES_MACHINES,  # 1: machines change pools.
) = range(5)
MARKS = 5


@small_jit
def capacity_tokens(state, w):
    """Tokens of KV that the memory of machine w holds."""
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
    pool, place = state.machines[w].pool, 0
    while state.pools[pool, place] != w:
        place += 1
    state.counters[SIZE + pool] -= 1
    for i in range(place, state.counters[SIZE + pool]):
        state.pools[pool, i] = state.pools[pool, i + 1]


@kernel_jit
def enter_pool(state, w, pool, time_s):
    """Put machine w at the end of a pool."""
    state.pools[pool, state.counters[SIZE + pool]] = w
    state.counters[SIZE + pool] += 1
    state.machines[w].pool = pool
    if pool == MIXED_POOL:
        state.machines[w].mixed_since_s = time_s


@kernel_jit
def move_machine(state, w, pool, time_s):
    """Move machine w to the end of another pool."""
    leave_pool(state, w)
    enter_pool(state, w, pool, time_s)


@kernel_jit
def _keeps_one(state, home):
    """Whether pool `home` keeps a machine that is up when one of its machines leaves it for good."""
    count = 0
    for w in range(len(state.workers)):
        count += state.workers[w].status == IN_SERVICE and state.machines[w].home == home
    return count > 1


@kernel_jit
def _repurpose_machines(state, time_s):
    """Let machines that have been mixed for long belong to the other pool from now on."""
    i = ZERO
    while i < state.counters[SIZE + MIXED_POOL]:
        w = state.pools[MIXED_POOL, i]
        machine = state.machines[w]
        is_long = time_s - machine.mixed_since_s >= state.policy[REPURPOSE_S]
        if is_long and machine.home != MIXED_POOL and _keeps_one(state, machine.home):
            machine.home = TOKEN_POOL if machine.home == PROMPT_POOL else PROMPT_POOL
            move_machine(state, w, machine.home, time_s)
        else:
            i += 1


@kernel_jit
def least_pending(state, pool, need, best):
    """The machine of `pool` with the smallest routing score, if lower than that of `best`; else `best`.

    Only machines whose whole memory holds `need` tokens count. The first of equals is taken.
    """
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        if (best == NONE or state.score[w] < state.score[best]) and need <= capacity_tokens(state, w):
            best = w
    return best


@kernel_jit
def least_promised(state, pool, need):
    """The machine of a pool with the fewest promised tokens, of those whose whole memory holds `need`; or
    NONE.
    """
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
    """The machine for a prompt, or NONE: one of the prompt pool or the mixed pool without a long queue, in
    this order; else one of the token pool, which the caller moves to the mixed pool.
    """
    prompt = prompt_tokens(state, r)
    for pool in (PROMPT_POOL, MIXED_POOL):
        w = least_pending(state, pool, prompt, NONE)
        if w == NONE:
            continue
        # Each assigned request adds a token, that of its decode. The prompt has one token less than `prompt`.
        worker = state.workers[w]
        queued_tokens = worker.pending_tokens + worker.assigned + prompt - 1
        if worker.waiting == 0 or queued_tokens <= PROMPT_QUEUE_TOKENS:
            return w
    return least_pending(state, TOKEN_POOL, prompt, NONE)


@kernel_jit
def open_for_tokens(state, r):
    """The machine of the token pool or the mixed pool that has room for request r; NONE if there is none."""
    whole = whole_tokens(state, r)
    for pool in (TOKEN_POOL, MIXED_POOL):
        w = least_promised(state, pool, whole)
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
    """The prompt machine and the token machine of r, where machines may join the mixed pool for it.

    If one of the two is missing, a single machine of any pool takes the whole request.
    """
    source, target = _open_for_prompt(state, r), open_for_tokens(state, r)
    if source != NONE and state.machines[source].pool == TOKEN_POOL:
        move_machine(state, source, MIXED_POOL, time_s)
    if target == NONE:
        target = least_promised(state, PROMPT_POOL, whole_tokens(state, r))
        if target != NONE:
            move_machine(state, target, MIXED_POOL, time_s)
    if source == NONE or target == NONE:
        source = target = least_pending_of_all(state, r)
    return source, target


@kernel_jit
def _may_return(state, r):
    """Whether a machine that is down could hold request r when it is up again."""
    for w in range(len(state.workers)):
        if state.workers[w].status == OUT_OF_SERVICE and whole_tokens(state, r) <= capacity_tokens(state, w):
            return True
    return False


@kernel_jit
def route_request(state, r, time_s):
    """Choose the machines of request r and count its load; False if no machine that is up can hold it.

    Such a request waits for a machine that is down, or is rejected where none of these could hold it either.
    """
    request = state.requests[r]
    prompt, whole = prompt_tokens(state, r), whole_tokens(state, r)
    if state.marks[MOVES_MACHINES]:
        _repurpose_machines(state, time_s)
        source, target = _route_moving(state, r, time_s)
    else:
        source = least_pending(state, PROMPT_POOL, prompt, NONE)
        # A machine of the mixed pool is taken if its score is lower.
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
    if state.marks[COUNTS_ADDED]:
        add_load(state, source, float(request.length_tokens), 0.0, 0.0)
        assign_request(state, target, r, 1.0)
    if source != target:
        state.machines[source].promised_tokens += prompt
    state.machines[target].promised_tokens += whole
    return True
