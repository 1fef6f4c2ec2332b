"""Which worker takes a request: the pool ARRIVAL_POOL is for arrivals, the pool HAND_OFF_POOL for hand-offs.

Policies by score choose the worker with the smallest `state.score`, which router_loads.py keeps up to date.
To find that worker quickly, workers are in groups of GROUP, and `state.lowest` has for each group a lower
bound of its scores. Letters: w is a worker, r the request that is routed, l a lane (a batch of a worker,
layout.py); `need` is how many KV blocks the request has at its end.
"""

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
from planner.simulator.caches import late_entry_blocks
from planner.simulator.kv_blocks import blocks_of, blocks_of_run, extra_blocks, steps_done
from planner.simulator.layout import (
    ARRIVAL_POOL,
    BLOCK,
    DECODE,
    GAMMA,
    GROUP,
    HAND_OFF_POOL,
    HEARD_S,
    HEAVY_TOKENS,
    IN_SERVICE,
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
from planner.simulator.predictions import begin_heartbeat, forget_errors, renew_prediction
from planner.simulator.ranks import is_first_rank, rank_for_new


@kernel_jit
def set_pools(state):
    """List the workers of both pools that are in service, in the order in which a router prefers equal
    ones.

    The first rank of a worker stands for all its ranks. The bounds of the groups' scores are reset, because
    the groups have other workers now.
    """
    for pool in (ARRIVAL_POOL, HAND_OFF_POOL):
        size = 0
        for w in state.order:
            worker = state.workers[w]
            if not is_first_rank(state, w):
                continue
            if worker.status == IN_SERVICE and (worker.role == DECODE) == (pool == HAND_OFF_POOL):
                state.pools[pool, size] = w
                worker.pool_index = size
                size += 1
        state.counters[SIZE + pool] = size
    state.lowest[:] = -np.inf


@kernel_jit
def _draw_below(state, n):
    """A random integer below n, by the generator xorshift64* (Vigna 2016), whose state is a counter."""
    x = np.uint64(state.counters[RANDOM_STATE])
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state.counters[RANDOM_STATE] = np.int64(x)
    # The multiplier is part of the generator. The 31 highest bits of the product are the most random ones.
    return np.int64((x * np.uint64(2685821657736338717) >> np.uint64(33)) % np.uint64(n))


@small_jit
def _draw_two_below(state, count):
    """Two different random integers below `count`; 0 twice if `count` is 1."""
    first = _draw_below(state, count)
    second = first
    if count > 1:
        # Numbers from `first` on move up by one, so each number but `first` is as likely.
        second = _draw_below(state, count - 1)
        second += second >= first
    return first, second


@small_jit
def fits_worker(state, w, need):
    """Whether worker w alone can hold a request that has `need` KV blocks at its end."""
    kind = state.types[state.workers[w].type]
    return need + extra_blocks(kind, need, need) <= kind.longest_blocks


@small_jit
def choose_worker(state, pool, r, time_s):
    """The worker of `pool` for request r, or the rank of it; NONE if the request fits on none."""
    return rank_for_new(state, _choose_by_policy(state, pool, r, time_s))


@kernel_jit
def _choose_by_policy(state, pool, r, time_s):
    """The worker of `pool` for request r; NONE if the request fits on none.

    Policies that few fleets use are in a function of their own, which ordinary fleets do not compile.
    """
    request = state.requests[r]
    need = blocks_of(request.input_tokens + request.output_tokens)
    size, policy = state.counters[SIZE + pool], state.counters[ROUTING + pool]
    if policy == SCORE:
        return _smallest_score(state, pool, need)
    if policy == ROUND_ROBIN:
        for _ in range(size):
            w = state.pools[pool, state.counters[TURN + pool] % size]
            state.counters[TURN + pool] += 1
            if fits_worker(state, w, need):
                return w
        return NONE
    if policy == TWO_BY_REQUESTS:
        return _lower_of_two_random(state, pool, need)
    if policy == LOWEST_BY_LOT:
        return _lowest_score_by_lot(state, pool, need)
    return _choose_by_rare_policy(state, pool, r, need, time_s)


@where_rare(lambda state, pool, r, need, time_s: NONE)
def _choose_by_rare_policy(state, pool, r, need, time_s):
    """The worker by a policy that few fleets use, for request r, which has `need` KV blocks at its end."""
    policy = state.counters[ROUTING + pool]
    if policy == DEFERRED:
        if pool == HAND_OFF_POOL:  # A hand-off has its KV on a worker, so it is not held back.
            return _smallest_score(state, pool, need)
        return _smallest_free_score(state, pool, need)
    if policy == SAME_PLACE:
        near = _smallest_score_at_place(state, pool, need, state.requests[r].prefill_worker)
        return _smallest_score(state, pool, need) if near == NONE else near
    if policy == BEST_FIT:
        return _best_fit(state, pool, r, need, time_s)
    if policy == HEAVY_LIGHT:
        return _heavy_light(state, pool, r, need, time_s)
    if policy == REBALANCED:
        if state.policy[LIVE] == 0.0:  # A live router measures how far decodes are ahead.
            _update_saved_s(state, pool, time_s)
        planned = _best_fit(state, pool, r, need, time_s)
        # `_best_fit` has renewed predictions; their errors belong to the heartbeat before this request.
        begin_heartbeat(state, time_s)
        return _rebalance_request(state, pool, r, need, planned)
    return _random_with_room(state, pool, r, need, policy, time_s)


@kernel_jit
def _smallest_score(state, pool, need):
    """The worker with the smallest score that can hold `need` blocks; NONE if no worker can.

    Groups whose bound is no better than the best worker so far are passed over; the bounds of others are
    renewed.
    """
    best, best_score = NONE, np.inf
    size = state.counters[SIZE + pool]
    for first in range(0, size, GROUP):
        if state.lowest[pool, first // GROUP] >= best_score:
            continue
        lowest = np.inf
        for i in range(first, min(first + GROUP, size)):
            w = state.pools[pool, i]
            lowest = min(lowest, state.score[w])
            if state.score[w] < best_score and fits_worker(state, w, need):
                best, best_score = w, state.score[w]
        state.lowest[pool, first // GROUP] = lowest
    return best


@kernel_jit
def _smallest_free_score(state, pool, need):
    """The worker with the smallest score that can hold `need` blocks and is free; NONE if there is none.

    A worker is free while it has fewer prompt tokens to compute than two steps hold: the one under way and
    the next.
    """
    best, best_score = NONE, np.inf
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        worker = state.workers[w]
        is_free = worker.pending_tokens < 2 * state.types[worker.type].token_budget
        if is_free and state.score[w] < best_score and fits_worker(state, w, need):
            best, best_score = w, state.score[w]
    return best


@where_rare(lambda state, pool, r: False)
def holds_back(state, pool, r):
    """Whether request r, which got no worker, waits at the router, since a worker that is up can hold it."""
    if state.counters[ROUTING + pool] != DEFERRED:
        return False
    request = state.requests[r]
    need = blocks_of(request.input_tokens + request.output_tokens)
    for i in range(state.counters[SIZE + pool]):
        if fits_worker(state, state.pools[pool, i], need):
            return True
    return False


@kernel_jit
def _smallest_score_at_place(state, pool, need, other):
    """The decode worker with the smallest score that can hold `need` blocks, among those at the same place
    (worker_places.py) as worker `other`; NONE if there is none, or if `pool` is that of arrivals.
    """
    best, best_score = NONE, np.inf
    if len(state.place) > 0 and pool == HAND_OFF_POOL:
        for i in range(state.counters[SIZE + pool]):
            w = state.pools[pool, i]
            if (
                state.place[w] == state.place[other]
                and state.score[w] < best_score
                and fits_worker(state, w, need)
            ):
                best, best_score = w, state.score[w]
    return best


@kernel_jit
def _random_with_room(state, pool, r, need, policy, time_s):
    """One worker at random or, if the policy is POWER_OF_TWO, the one with the lower score of two at random.

    Workers are drawn among those whose free blocks hold all of request r, as predicted; if there are none,
    among all that can hold `need` blocks, which the request has at its end.
    """
    request = state.requests[r]
    blocks = blocks_of(request.input_tokens + max(request.predicted_tokens, 1))
    for is_strict in (True, False):
        # Candidates are counted, and one or two numbers below the count are drawn. The second loop counts
        # down to the candidates with these numbers.
        count = 0
        for i in range(state.counters[SIZE + pool]):
            count += _has_room_now(state, state.pools[pool, i], need, blocks, is_strict, time_s)
        if count == 0:
            continue
        if policy == POWER_OF_TWO:
            first, second = _draw_two_below(state, count)
        else:
            first = second = _draw_below(state, count)
        best = NONE
        for i in range(state.counters[SIZE + pool]):
            w = state.pools[pool, i]
            if _has_room_now(state, w, need, blocks, is_strict, time_s):
                if (first == 0 or second == 0) and (best == NONE or state.score[w] < state.score[best]):
                    best = w
                first -= 1
                second -= 1
        return best
    return NONE


@kernel_jit
def _two_at_random(state, pool, need, blocks, is_strict):
    """Two workers drawn at random among those that `_had_room` names; one twice if it is alone, NONE twice
    if there is none.
    """
    count = 0
    for i in range(state.counters[SIZE + pool]):
        count += _had_room(state, state.pools[pool, i], need, blocks, is_strict)
    one, other = NONE, NONE
    if count == 0:
        return one, other
    first, second = _draw_two_below(state, count)
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        if _had_room(state, w, need, blocks, is_strict):
            if first == 0:
                one = w
            if second == 0:
                other = w
            first -= 1
            second -= 1
    return one, other


@kernel_jit
def _lower_of_two_random(state, pool, need):
    """The worker with the lower score of two drawn at random; the first drawn if scores are equal.

    Free blocks do not count, as routers with this policy do not see KV caches.
    """
    one, other = _two_at_random(state, pool, need, need, False)
    return other if one != NONE and state.score[other] < state.score[one] else one


@kernel_jit
def _heavy_light(state, pool, r, need, time_s):
    """TetriInfer's dispatcher (Hu et al. 2024, arXiv:2401.11181): of two workers drawn at random, the one
    with fewer decodes of the request's kind, heavy or light, so that their ratio becomes the same on all
    workers.

    The two are drawn among workers that had room for all of request r, as predicted, when they last reported
    their loads; if none had, among all that can hold `need` blocks.
    """
    request = state.requests[r]
    if time_s - state.policy[HEARD_S] >= state.policy[LOAD_PERIOD_S]:
        _report_loads(state, time_s)
    blocks = blocks_of(request.input_tokens + max(request.predicted_tokens, 1))
    for is_strict in (True, False):
        one, other = _two_at_random(state, pool, need, blocks, is_strict)
        if one != NONE:
            return other if _has_fewer_alike(state, other, one, r) else one
    return NONE


@kernel_jit
def _report_loads(state, time_s):
    """Let all workers report their loads to the router: heavy and light requests, and KV blocks in use."""
    state.policy[HEARD_S] = time_s
    for w in range(len(state.workers)):
        worker = state.workers[w]
        worker.reported_heavy = worker.heavy
        worker.reported_light = np.int64(worker.assigned) - worker.heavy
        worker.reported_blocks = worker.used_blocks
        for l in range(worker.first_lane, worker.first_lane + state.types[worker.type].lanes):
            worker.reported_blocks += blocks_of_run(state.types[worker.type], state.lanes[l], time_s)


@small_jit
def _had_room(state, w, need, blocks, is_strict):
    """Whether worker w can hold `need` blocks and, if `is_strict`, last reported `blocks` free ones."""
    if not fits_worker(state, w, need):
        return False
    if not is_strict:
        return True
    worker = state.workers[w]
    kind = state.types[worker.type]
    new_blocks = kind.reserved_blocks if kind.reserved_blocks > 0 else blocks
    return worker.reported_blocks + new_blocks + extra_blocks(kind, need, need) <= kind.kv_blocks


@small_jit
def _has_fewer_alike(state, w, other, r):
    """Whether worker w reported fewer decodes of request r's kind, heavy or light, than worker `other`, or as
    many and fewer of the other kind.
    """
    one, two = state.workers[w], state.workers[other]
    more_heavy, more_light = two.reported_heavy - one.reported_heavy, two.reported_light - one.reported_light
    if state.requests[r].predicted_tokens > state.policy[HEAVY_TOKENS]:
        return more_heavy > 0 or (more_heavy == 0 and more_light > 0)
    return more_light > 0 or (more_light == 0 and more_heavy > 0)


@kernel_jit
def _lowest_score_by_lot(state, pool, need):
    """The worker with the lowest score, drawn among equals.

    The n-th of the equals replaces the one chosen so far with probability 1 / n, so all are as likely.
    """
    best, best_score, equals = NONE, np.inf, 0
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        if state.score[w] > best_score or not fits_worker(state, w, need):
            continue
        equals = equals + 1 if state.score[w] == best_score else 1
        if equals == 1 or _draw_below(state, equals) == 0:
            best = w
        best_score = state.score[w]
    return best


@kernel_jit
def _has_room_now(state, w, need, blocks, is_strict, time_s):
    """Whether worker w can hold `need` blocks and, if `is_strict`, has `blocks` free ones now."""
    if not fits_worker(state, w, need):
        return False
    if not is_strict:
        return True
    worker = state.workers[w]
    kind, lane = state.types[worker.type], state.lanes[worker.first_lane]
    new_blocks = kind.reserved_blocks if kind.reserved_blocks > 0 else blocks
    free = kind.kv_blocks - worker.used_blocks - new_blocks - extra_blocks(kind, need, need)
    free += late_entry_blocks(state, w)
    # Blocks of the run under way are not yet in `used_blocks`. A decode takes at most one in every BLOCK
    # steps, and one more. Only if that many blocks could matter they are counted, which takes longer.
    if free < 0 or free >= (lane.run_steps // BLOCK + 1) * lane.decodes:
        return free >= 0
    return free >= blocks_of_run(kind, lane, time_s)


@kernel_jit
def _best_fit(state, pool, r, need, time_s):
    """Aladdin's Algorithm 1 (Nie et al. 2024): the fullest of the workers that keep every constraint with
    request r, or the emptiest of all if none does.

    Fullness is the paper's capacity_norm: the length of the vector (batch size, weighted context), each as a
    share of what the worker could hold. Its square is compared here.
    """
    best, best_norm = NONE, -1.0
    emptiest, least_norm = NONE, np.inf
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        if not fits_worker(state, w, need):
            continue
        worker = state.workers[w]
        kind = state.types[worker.type]
        _renew_predictions(state, w, time_s)
        context_frac = worker.future_tokens / (kind.kv_blocks * float(BLOCK))
        norm = (worker.assigned / kind.seats) ** 2 + context_frac**2
        if norm < least_norm:
            emptiest, least_norm = w, norm
        if norm > best_norm and _keeps_constraints(state, w, r):
            best, best_norm = w, norm
    return emptiest if best == NONE else best


@kernel_jit
def _keeps_constraints(state, w, r):
    """Aladdin's constraints (b) to (e) with request r on worker w: (b) on the step time of the batch, (c) on
    the prompts computed before the first token, (d) on how long the running decodes can still wait, (e) on KV
    as predicted. `theta` leaves room for wrong predictions.
    """
    worker, request = state.workers[w], state.requests[r]
    kind = state.types[worker.type]
    theta, tbt_s = state.policy[THETA], state.policy[TBT_S]
    batch = int(worker.assigned) + 1
    if batch > kind.seats:
        return False
    predicted = state.policy[GAMMA] * request.predicted_tokens
    future_tokens = worker.future_tokens + request.input_tokens + predicted
    # The worker's table of step times by tokens begins at `table`. A step takes tables[table + tokens] + k[1]
    # decodes + k[2] KV tokens (FIVE_NUMBERS in step_times.py).
    table, k, tables = kind.table_at[0], kind.numbers, state.tables
    step_s = tables[table + min(batch, kind.table_width[0] - 1)] + k[1] * batch + k[2] * future_tokens / theta
    if step_s > tbt_s:  # (b)
        return False
    if future_tokens > theta * kind.kv_blocks * float(BLOCK):  # (e)
        return False
    if worker.role == DECODE:
        return True
    tokens = worker.pending_tokens + request.input_tokens
    # The prompts are computed in whole steps of the token budget, and one more step for the other tokens.
    whole = int(tokens) // kind.token_budget
    rest = int(tokens) - whole * kind.token_budget
    wait_s = whole * tables[table + kind.token_budget] + tables[table + rest]
    # The first condition is (c), the second is (d). With best-fit (d) always holds, as `least_saved_s` stays
    # infinite: decodes go on during a prefill, so (b) is all that they need.
    return wait_s <= state.policy[TTFT_S] and wait_s <= theta * worker.least_saved_s


@kernel_jit
def _renew_predictions(state, w, time_s):
    """Give decodes of worker w that are longer than predicted a new prediction (Aladdin, section 4.3)."""
    worker = state.workers[w]
    for l in range(worker.first_lane, worker.first_lane + state.types[worker.type].lanes):
        lane = state.lanes[l]
        done = steps_done(lane, time_s)
        for slot in range(lane.decodes):
            r = state.slots[l, slot].request
            request = state.requests[r]
            generated = request.output_tokens - (state.slots[l, slot].finish_step - lane.decode_step) + done
            if generated >= request.predicted_tokens:
                renew_prediction(state, w, r, generated)


@kernel_jit
def _update_saved_s(state, pool, time_s):
    """Set `least_saved_s` of each worker [s]: by how much its most urgent decode is ahead at `time_s`.

    A decode is ahead by the policy's TBT times its output tokens so far, less the time since its first token.
    Without decodes `least_saved_s` is infinite.
    """
    for i in range(state.counters[SIZE + pool]):
        worker = state.workers[state.pools[pool, i]]
        worker.least_saved_s = np.inf
        for l in range(worker.first_lane, worker.first_lane + state.types[worker.type].lanes):
            lane = state.lanes[l]
            done = steps_done(lane, time_s)
            for slot in range(lane.decodes):
                request = state.requests[state.slots[l, slot].request]
                to_come = state.slots[l, slot].finish_step - lane.decode_step - done
                saved_s = state.policy[TBT_S] * (request.output_tokens - to_come)
                if not np.isnan(request.first_token_s):
                    saved_s -= time_s - request.first_token_s
                worker.least_saved_s = min(worker.least_saved_s, saved_s)


@kernel_jit
def _rebalance_request(state, pool, r, need, planned):
    """Aladdin's Algorithm 2, for request r alone: the worker to which it moves from the `planned` one.

    Among the workers that keep every constraint, the request goes to the one with which its prediction error
    and the planned worker's together come closest to zero. The request stays if no move brings them closer,
    or if the planned worker breaks a constraint itself.

    The error of a worker (tokens l^e, sequences b^e) is its distance from the line k2 l^e + c2 b^e = 0.
    """
    if planned == NONE or not _keeps_constraints(state, planned, r):
        return planned
    predicted = float(state.requests[r].predicted_tokens)
    by_leaving = _error_distance(state, planned, -predicted, -1.0) - _error_distance(state, planned, 0.0, 0.0)
    best, best_change = planned, 0.0
    for i in range(state.counters[SIZE + pool]):
        w = state.pools[pool, i]
        if w == planned or not fits_worker(state, w, need) or not _keeps_constraints(state, w, r):
            continue
        change = by_leaving + _error_distance(state, w, predicted, 1.0) - _error_distance(state, w, 0.0, 0.0)
        if change < best_change - 1e-9:  # A smaller difference is rounding.
            best, best_change = w, change
    if best != planned:
        state.workers[planned].error_tokens -= predicted
        state.workers[planned].error_sequences -= 1.0
        state.workers[best].error_tokens += predicted
        state.workers[best].error_sequences += 1.0
    return best


@kernel_jit
def _error_distance(state, w, tokens, sequences):
    """The error of worker w with `tokens` and `sequences` more than predicted.

    The error is the distance from the line in `_rebalance_request`, whose slopes are the seconds that a token
    (k2) and a sequence (c2) add to a step.
    """
    worker = state.workers[w]
    if worker.assigned == 0.0:  # The worker has no request whose prediction could be wrong.
        forget_errors(worker)
    kind = state.types[worker.type]
    table, token_s = kind.table_at[0], kind.numbers[2]  # As in `_keeps_constraints`.
    seats = min(kind.seats, kind.table_width[0] - 1)  # The table has no entry for more tokens.
    sequence_s = (state.tables[table + seats] - state.tables[table + 1]) / seats + kind.numbers[1]
    error_s = token_s * (worker.error_tokens + tokens) + sequence_s * (worker.error_sequences + sequences)
    slope_s = np.sqrt(token_s**2 + sequence_s**2)
    # With a slope of 0 no request makes steps longer.
    return abs(error_s) / slope_s if slope_s > 0.0 else 0.0
