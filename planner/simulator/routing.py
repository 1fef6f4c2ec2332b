"""Which worker: of the pool that takes arrivals, and of the one that takes hand-offs."""

from __future__ import annotations

import numpy as np

from planner.policies import (
    BEST_FIT,
    DEFERRED,
    HEAVY_LIGHT,
    LOWEST_BY_LOT,
    POWER_OF_TWO,
    REBALANCED,
    ROUND_ROBIN,
    SAME_PLACE,
    SCORE,
    TWO_BY_REQUESTS,
)
from planner.simulator.layout import (
    BACK,
    BLOCK,
    DECODE,
    FRONT,
    GAMMA,
    GROUP,
    HEARD_S,
    HEAVY_TOKENS,
    LIVE,
    LOAD_PERIOD_S,
    NONE,
    RANDOM_STATE,
    ROUTING,
    SIZE,
    TBT_S,
    THETA,
    TTFT_S,
    TURN,
)
from planner.simulator.numba_compile import kernel_jit, small_jit, where_rare
from planner.simulator.predictions import beat, forget_errors, outlive
from planner.simulator.ranks import leads, rank_for_new
from planner.simulator.slots import beside, blocks_of, blocks_of_run, steps_done


@kernel_jit
def set_pools(state):
    """List the workers that are up: those that take arrivals, those that take hand-offs. Of equal ones a
    router takes the first in the list.
    """
    for pool in (FRONT, BACK):
        size = 0
        for w in state.order:
            worker = state.workers[w]
            if not leads(state, w):
                continue
            if worker.is_up == 1 and (worker.role == DECODE) == (pool == BACK):
                state.pools[pool, size] = w
                worker.pool_index = size
                size += 1
        state.counters[SIZE + pool] = size
    state.lowest[:] = -np.inf


@kernel_jit
def _drawn(state, n):
    """A random integer below n: xorshift64*."""
    x = np.uint64(state.counters[RANDOM_STATE])
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state.counters[RANDOM_STATE] = np.int64(x)
    return np.int64((x * np.uint64(2685821657736338717) >> np.uint64(33)) % np.uint64(n))


@small_jit
def _two_drawn(state, count):
    """Two different random integers below count, the same twice where count is 1."""
    first = _drawn(state, count)
    second = first
    if count > 1:
        second = _drawn(state, count - 1)
        if second >= first:
            second += 1
    return first, second


@small_jit
def fits(state, w, need):
    """Whether worker w, when it has nothing else, takes a request of so many blocks to its end."""
    kind = state.types[state.workers[w].type]
    return need + beside(kind, need) <= kind.longest_blocks


@small_jit
def choose(state, pool, r, time_s):
    """The worker of `pool` for request r, and of its data-parallel ranks one; NONE if it fits on none."""
    return rank_for_new(state, _choose(state, pool, r, time_s))


@kernel_jit
def _choose(state, pool, r, time_s):
    request = state.requests[r]
    need = blocks_of(request.input_tokens + request.output_tokens)
    size, how = state.counters[SIZE + pool], state.counters[ROUTING + pool]
    if how == SCORE:
        return _smallest_score(state, pool, need)
    if how == ROUND_ROBIN:
        for _ in range(size):
            w = state.pools[pool, state.counters[TURN + pool] % size]
            state.counters[TURN + pool] += 1
            if fits(state, w, need):
                return w
        return NONE
    if how == TWO_BY_REQUESTS:
        return _lower_of_two(state, pool, need)
    if how == LOWEST_BY_LOT:
        return _lowest_by_lot(state, pool, need)
    return _choose_rarely(state, pool, r, need, time_s)


@where_rare(lambda state, pool, r, need, time_s: NONE)
def _choose_rarely(state, pool, r, need, time_s):
    how = state.counters[ROUTING + pool]
    if how == DEFERRED:  # hand-offs wait where their KV lies
        return _smallest_score(state, pool, need) if pool == BACK else _smallest_free_score(state, pool, need)
    if how == SAME_PLACE:
        near = _smallest_score_beside(state, pool, need, state.requests[r].prefill_worker)
        return _smallest_score(state, pool, need) if near == NONE else near
    if how == BEST_FIT:
        return _best_fit(state, pool, r, need, time_s)
    if how == HEAVY_LIGHT:
        return _heavy_light(state, pool, r, need, time_s)
    if how == REBALANCED:
        if state.policy[LIVE] == 0.0:
            _see_saved(state, pool, time_s)
        planned = _best_fit(state, pool, r, need, time_s)
        beat(state, time_s)  # what is longer than predicted was so before
        return _rebalanced(state, pool, r, need, planned)
    return _by_lot(state, pool, r, need, how, time_s)


@kernel_jit
def _smallest_score(state, pool, need):
    best, best_score = NONE, np.inf
    size = state.counters[SIZE + pool]
    for first in range(0, size, GROUP):
        if state.lowest[pool, first // GROUP] >= best_score:
            continue
        lowest = np.inf
        for i in range(first, min(first + GROUP, size)):
            w = state.pools[pool, i]
            lowest = min(lowest, state.score[w])
            if state.score[w] < best_score and fits(state, w, need):
                best, best_score = w, state.score[w]
        state.lowest[pool, first // GROUP] = lowest
    return best


@kernel_jit
def _smallest_free_score(state, pool, need):
    """Of the workers that have fewer prompts to compute than two steps take, the one under way and the next;
    NONE if it fits on none of them.
    """
    best, best_score = NONE, np.inf
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        worker = state.workers[w]
        is_free = worker.pending_tokens < 2 * state.types[worker.type].token_budget
        if is_free and state.score[w] < best_score and fits(state, w, need):
            best, best_score = w, state.score[w]
    return best


@where_rare(lambda state, pool, r: False)
def holds_back(state, pool, r):
    """Whether request r, which got no worker, waits at the router: it fits on one that is up."""
    if state.counters[ROUTING + pool] != DEFERRED:
        return False
    request = state.requests[r]
    need = blocks_of(request.input_tokens + request.output_tokens)
    for i in range(state.counters[SIZE + pool]):
        if fits(state, state.pools[pool, i], need):
            return True
    return False


@kernel_jit
def _smallest_score_beside(state, pool, need, other):
    """Of the decode workers that lie where another one does; NONE if it fits on none of them."""
    best, best_score = NONE, np.inf
    if len(state.place) > 0 and pool == BACK:
        for i in range(state.counters[SIZE + pool]):
            w = state.pools[pool, i]
            if state.place[w] == state.place[other] and state.score[w] < best_score and fits(state, w, need):
                best, best_score = w, state.score[w]
    return best


@kernel_jit
def _by_lot(state, pool, r, need, how, time_s):
    """One worker at random, or the lower score of two, among those whose free blocks hold all of request r as
    predicted; if there are none, among all it fits on.
    """
    request = state.requests[r]
    blocks = blocks_of(request.input_tokens + max(request.predicted_tokens, 1))
    for is_strict in (True, False):
        count = 0
        for i in range(state.counters[SIZE + pool]):
            count += _is_candidate(state, state.pools[pool, i], need, blocks, is_strict, time_s)
        if count == 0:
            continue
        if how == POWER_OF_TWO:
            first, second = _two_drawn(state, count)
        else:
            first = second = _drawn(state, count)
        best = NONE
        for i in range(state.counters[SIZE + pool]):
            w = state.pools[pool, i]
            if _is_candidate(state, w, need, blocks, is_strict, time_s):
                if (first == 0 or second == 0) and (best == NONE or state.score[w] < state.score[best]):
                    best = w
                first -= 1
                second -= 1
        return best
    return NONE


@kernel_jit
def _lower_of_two(state, pool, need):
    """The lower score of two workers drawn at random, of equal ones the first drawn; routers that see no KV
    cache ask for no free blocks.
    """
    count = 0
    for i in range(state.counters[SIZE + pool]):
        count += fits(state, state.pools[pool, i], need)
    if count == 0:
        return NONE
    first, second = _two_drawn(state, count)
    one, other = NONE, NONE
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        if fits(state, w, need):
            if first == 0:
                one = w
            if second == 0:
                other = w
            first -= 1
            second -= 1
    return other if state.score[other] < state.score[one] else one


@kernel_jit
def _heavy_light(state, pool, r, need, time_s):
    """TetriInfer's dispatcher: of two workers drawn among those that had room for all of request r as it is
    predicted, when loads were last heard, the one with fewer decodes of its kind, heavy or light, so that the
    ratio of heavy to light is the same everywhere. If none had room, two of all it fits on.
    """
    request = state.requests[r]
    if time_s - state.policy[HEARD_S] >= state.policy[LOAD_PERIOD_S]:
        _hear_loads(state, time_s)
    blocks = blocks_of(request.input_tokens + max(request.predicted_tokens, 1))
    for is_strict in (True, False):
        count = 0
        for i in range(state.counters[SIZE + pool]):
            count += _had_room(state, state.pools[pool, i], need, blocks, is_strict)
        if count == 0:
            continue
        first, second = _two_drawn(state, count)
        one, other = NONE, NONE
        for i in range(state.counters[SIZE + pool]):
            w = state.pools[pool, i]
            if _had_room(state, w, need, blocks, is_strict):
                if first == 0:
                    one = w
                if second == 0:
                    other = w
                first -= 1
                second -= 1
        return other if _has_fewer_alike(state, other, one, r) else one
    return NONE


@kernel_jit
def _hear_loads(state, time_s):
    state.policy[HEARD_S] = time_s
    for w in range(len(state.workers)):
        worker = state.workers[w]
        worker.told_heavy = worker.heavy
        worker.told_light = np.int64(worker.assigned) - worker.heavy
        worker.told_blocks = worker.used_blocks
        for l in range(worker.first_lane, worker.first_lane + state.types[worker.type].lanes):
            worker.told_blocks += blocks_of_run(state.types[worker.type], state.lanes[l], time_s)


@small_jit
def _had_room(state, w, need, blocks, is_strict):
    if not fits(state, w, need) or not is_strict:
        return fits(state, w, need)
    worker = state.workers[w]
    kind = state.types[worker.type]
    asked = kind.reserved_blocks if kind.reserved_blocks > 0 else blocks
    return worker.told_blocks + asked + beside(kind, need) <= kind.kv_blocks


@small_jit
def _has_fewer_alike(state, w, other, r):
    """Whether worker w has fewer decodes of request r's kind than another, or as many and else fewer."""
    here, there = state.workers[w], state.workers[other]
    if state.requests[r].predicted_tokens > state.policy[HEAVY_TOKENS]:
        more, more_light = there.told_heavy - here.told_heavy, there.told_light - here.told_light
        return more > 0 or (more == 0 and more_light > 0)
    more, more_heavy = there.told_light - here.told_light, there.told_heavy - here.told_heavy
    return more > 0 or (more == 0 and more_heavy > 0)


@kernel_jit
def _lowest_by_lot(state, pool, need):
    """The lowest score, drawn among equals: the n-th of them takes the place of the one kept with 1 / n."""
    best, best_score, equals = NONE, np.inf, 0
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        if state.score[w] > best_score or not fits(state, w, need):
            continue
        equals = equals + 1 if state.score[w] == best_score else 1
        if equals == 1 or _drawn(state, equals) == 0:
            best = w
        best_score = state.score[w]
    return best


@kernel_jit
def _is_candidate(state, w, need, blocks, is_strict, time_s):
    if not fits(state, w, need) or not is_strict:
        return fits(state, w, need)
    worker = state.workers[w]
    kind, lane = state.types[worker.type], state.lanes[worker.first_lane]
    free = (
        kind.kv_blocks - worker.used_blocks - (kind.reserved_blocks if kind.reserved_blocks > 0 else blocks)
    ) - beside(kind, need)
    # What the run has taken since it began is looked up only where it matters.
    if free < 0 or free >= (lane.run_steps // BLOCK + 1) * lane.decodes:
        return free >= 0
    return free >= blocks_of_run(kind, lane, time_s)


@kernel_jit
def _best_fit(state, pool, r, need, time_s):
    """Aladdin's Algorithm 1: of the workers that keep every constraint with request r the fullest, else the
    emptiest. Fullness is capacity_norm, the length of (batch size, weighted context), each as a share of what
    the worker could hold.
    """
    best, best_norm = NONE, -1.0
    emptiest, least_norm = NONE, np.inf
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        if not fits(state, w, need):
            continue
        worker = state.workers[w]
        kind = state.types[worker.type]
        _predict_again(state, w, time_s)
        norm = (worker.assigned / kind.seats) ** 2 + (worker.future_tokens / (kind.kv_blocks * 16.0)) ** 2
        if norm < least_norm:
            emptiest, least_norm = w, norm
        if norm > best_norm and _keeps(state, w, r):
            best, best_norm = w, norm
    return emptiest if best == NONE else best


@kernel_jit
def _keeps(state, w, r):
    """Aladdin's constraints (b) to (e) with request r on worker w: the step of the batch, the prompts before
    the first token, what the running decodes can still afford to wait, KV now and as predicted.
    """
    worker, request = state.workers[w], state.requests[r]
    kind = state.types[worker.type]
    theta, tbt_s = state.policy[THETA], state.policy[TBT_S]
    batch = int(worker.assigned) + 1
    if batch > kind.seats:
        return False
    future = worker.future_tokens + request.input_tokens + state.policy[GAMMA] * request.predicted_tokens
    at, k, tables = kind.table_at[0], kind.numbers, state.tables
    if tables[at + min(batch, kind.table_width[0] - 1)] + k[1] * batch + k[2] * future / theta > tbt_s:  # (b)
        return False
    if future > theta * kind.kv_blocks * 16.0:  # (e), over the whole scenario
        return False
    if worker.role == DECODE:
        return True
    tokens = worker.pending_tokens + request.input_tokens
    whole = int(tokens) // kind.token_budget
    wait_s = whole * tables[at + kind.token_budget] + tables[at + int(tokens) - whole * kind.token_budget]
    # (c); and, of best-fit-rebalanced, (d): without it (d) is (b), as where decodes go on during prefill
    return wait_s <= state.policy[TTFT_S] and wait_s <= theta * worker.least_saved_s


@kernel_jit
def _predict_again(state, w, time_s):
    """Decodes that have outlived their prediction get a new one (Aladdin section 4.3)."""
    worker = state.workers[w]
    for l in range(worker.first_lane, worker.first_lane + state.types[worker.type].lanes):
        lane = state.lanes[l]
        done = steps_done(lane, time_s)
        for slot in range(lane.decodes):
            r = state.slots[l, slot].request
            request = state.requests[r]
            generated = request.output_tokens - (state.slots[l, slot].finish_step - lane.decode_step) + done
            if generated >= request.predicted_tokens:
                outlive(state, w, r, generated)


@kernel_jit
def _see_saved(state, pool, time_s):
    """By how much the decodes of each worker are ahead of the limit per token: the least of them."""
    for i in range(state.counters[SIZE + pool]):
        worker = state.workers[state.pools[pool, i]]
        worker.least_saved_s = np.inf
        for l in range(worker.first_lane, worker.first_lane + state.types[worker.type].lanes):
            lane = state.lanes[l]
            done = steps_done(lane, time_s)
            for slot in range(lane.decodes):
                request = state.requests[state.slots[l, slot].request]
                left = state.slots[l, slot].finish_step - lane.decode_step - done
                saved_s = state.policy[TBT_S] * (request.output_tokens - left)
                saved_s -= time_s - request.first_token_s
                worker.least_saved_s = min(worker.least_saved_s, saved_s)


@kernel_jit
def _rebalanced(state, pool, r, need, planned):
    """Aladdin's Algorithm 2, for request r alone: from the worker that best fit has `planned` to the one that
    keeps every constraint and brings the errors of both closest to none; it stays where that is no closer.

    How far a worker is from none is the distance of its line k2 l^e + c2 b^e = 0 from the origin.
    """
    if planned == NONE or not _keeps(state, planned, r):
        return planned
    predicted = float(state.requests[r].predicted_tokens)
    leaves = _distance(state, planned, -predicted, -1.0) - _distance(state, planned, 0.0, 0.0)
    best, change = planned, 0.0
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        if w == planned or not fits(state, w, need) or not _keeps(state, w, r):
            continue
        moved = leaves + _distance(state, w, predicted, 1.0) - _distance(state, w, 0.0, 0.0)
        if moved < change - 1e-9:
            best, change = w, moved
    if best != planned:
        state.workers[planned].error_tokens -= predicted
        state.workers[planned].error_sequences -= 1.0
        state.workers[best].error_tokens += predicted
        state.workers[best].error_sequences += 1.0
    return best


@kernel_jit
def _distance(state, w, tokens, sequences):
    """Of worker w, with an error of so many tokens and sequences more."""
    worker = state.workers[w]
    if worker.assigned == 0.0:
        forget_errors(worker)
    kind = state.types[worker.type]
    at, token_s = kind.table_at[0], kind.numbers[2]
    most = min(kind.seats, kind.table_width[0] - 1)
    sequence_s = (state.tables[at + most] - state.tables[at + 1]) / most + kind.numbers[1]
    error_s = token_s * (worker.error_tokens + tokens) + sequence_s * (worker.error_sequences + sequences)
    slope_s = np.sqrt(token_s**2 + sequence_s**2)
    return abs(error_s) / slope_s if slope_s > 0.0 else 0.0  # steps that no request makes longer
