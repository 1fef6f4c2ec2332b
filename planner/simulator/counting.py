"""Count tokens and the gaps between them against the limits of an SLO, without storing every gap.

Here a limit is a line of the SLO (LIMIT in layout.py): it holds while at most `allowed` values are above it.
A run is a series of steps with the same sequences: step j takes first_s + j growth_s, and gives each sequence
a gap of that length. So whole runs are counted at once.

Letters: k is a limit, v a window in which limits count by themselves, w a worker, l a lane (a batch of a
worker), r a request.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.layout import (
    BROKEN,
    DONE,
    E2E,
    GAP_DEPTH,
    IN_DOUBT,
    LAST_S,
    LATEST_S,
    NONE,
    ONE,
    PARTS,
    RELEASED,
    RUNS,
    TBT,
    TTFT,
    UNFINISHED,
    ZERO,
)
from planner.simulator.numba_compile import entry_jit, kernel_jit, small_jit, where_has, where_rare


@small_jit
def run_s(first_s, growth_s, steps):
    """Seconds of the first `steps` steps of a run."""
    return first_s * steps + growth_s * (steps * (steps - 1) / 2.0)


@kernel_jit
def steps_reaching(start_s, first_s, growth_s, time_s):
    """Smallest j >= 1 such that the j-th step of a run ends at `time_s` or later.

    The root of the quadratic equation for j may be rounded either way, so the search begins just below it.
    """
    span_s = time_s - start_s
    if span_s <= first_s:
        return 1
    if growth_s > 0.0:
        linear_s = first_s - 0.5 * growth_s  # The equation is growth_s j^2 / 2 + linear_s j = span_s.
        root = (-linear_s + np.sqrt(linear_s * linear_s + 2.0 * growth_s * span_s)) / growth_s
    else:
        root = span_s / first_s
    j = max(int(root) - 1, 1)
    while start_s + run_s(first_s, growth_s, j) < time_s:
        j += 1
    while j > 1 and start_s + run_s(first_s, growth_s, j - 1) >= time_s:
        j -= 1
    return j


@small_jit
def _first_above(first_s, growth_s, gap_s, least):
    """The first step of a run, from step `least` on, that is longer than `gap_s`; there must be one.

    The quotient may be rounded either way, so the search begins just below it.
    """
    step = least
    if growth_s > 0.0:
        step = max(int((gap_s - first_s) / growth_s) - 1, least)
    while first_s + growth_s * step <= gap_s:
        step += 1
    return step


@small_jit
def in_window(state, time_s):
    """Whether a time is in the measured window."""
    return state.window[0] <= time_s <= state.window[1]


@where_has("classes", lambda state, k, r: True)
def _limits_request(state, k, r):
    """Whether limit k counts request r: it is for all requests, or for its class."""
    of_class = state.limits[k].of_class
    return of_class == NONE or of_class == state.classes[r].of_class


@where_has("classes", lambda state, k, l, sequences: sequences)
def _limited_decodes(state, k, l, sequences):
    """The number of decodes that limit k counts, of the first `sequences` of lane l."""
    of_class = state.limits[k].of_class
    return sequences if of_class == NONE else _decodes_of_class(state, l, sequences, of_class)


@kernel_jit
def _decodes_of_class(state, l, sequences, of_class):
    """How many of the first `sequences` decodes of lane l are of a class."""
    decodes = 0
    for slot in range(sequences):
        decodes += state.classes[state.slots[l, slot].request].of_class == of_class
    return decodes


@kernel_jit
def count_value(state, metric, value_s, at_s, r):
    """Count a value of request r, which belongs to the time `at_s`, against the limits of its metric."""
    for k in range(len(state.limits)):
        if state.limits[k].metric == metric and _limits_request(state, k, r):
            is_above = int(value_s > state.limits[k].limit_s)
            state.limits[k].counted += 1
            state.limits[k].violations += is_above
            # If `count_overdue` has counted this request as overdue, it is a violation instead from now on.
            if at_s + state.limits[k].limit_s < state.limits[k].overdue_at_s:
                state.limits[k].overdue -= 1
            if state.in_windows.shape[1] > 0:
                count_within(state, k, window_at(state, at_s), 1, is_above)


@kernel_jit
def window_at(state, time_s):
    """Which of the windows a time inside the measured one lies in: [edge, next edge), the last one closed."""
    low, high = 0, state.in_windows.shape[1] - 1
    while low < high:
        middle = (low + high + 1) // 2
        if state.edges_s[middle] <= time_s:
            low = middle
        else:
            high = middle - 1
    return low


@kernel_jit
def count_within(state, k, v, counted, violations):
    """Add `counted` values of limit k, of which `violations` are above it, to its counts of window v.

    The SLO is broken once a window has more violations than the limit allows in it.
    """
    watched = state.in_windows[k, v]
    watched.counted += counted
    watched.violations += violations
    if watched.violations > watched.allowed:
        state.counters[BROKEN] = 1


@kernel_jit
def count_run(state, l, start_s, first_s, growth_s, steps, sequences):
    """Count a run's gaps, which the first `sequences` decodes of lane l have, against limits on tbt.

    Only the steps `begin` to `end` - 1 end in the measured window. Steps from `above` on are longer than the
    limit.
    """
    begin, end = 0, steps
    if start_s + first_s < state.window[0]:
        begin = steps_reaching(start_s, first_s, growth_s, state.window[0]) - 1
    if start_s + run_s(first_s, growth_s, steps) > state.window[1]:
        end = steps_reaching(start_s, first_s, growth_s, state.window[1])
        if start_s + run_s(first_s, growth_s, end) > state.window[1]:
            end -= 1
    if end <= begin:
        return
    for k in range(len(state.limits)):
        if state.limits[k].metric != TBT:
            continue
        counted = _limited_decodes(state, k, l, sequences)
        state.limits[k].counted += counted * (end - begin)
        limit_s = state.limits[k].limit_s
        above = end
        if first_s + growth_s * (end - 1) > limit_s:
            above = _first_above(first_s, growth_s, limit_s, begin)
            state.limits[k].violations += counted * (end - above)
        # The same for each window of the limits, if there are any. Steps `since` to `until` - 1 end in
        # window v.
        since = begin
        while state.in_windows.shape[1] > 0 and since < end:
            v, until = window_at(state, start_s + run_s(first_s, growth_s, since + 1)), end
            if v + 1 < state.in_windows.shape[1]:
                until = min(steps_reaching(start_s, first_s, growth_s, state.edges_s[v + 1]) - 1, end)
            until = max(until, since + 1)
            violations = counted * max(until - max(above, since), 0)
            count_within(state, k, v, counted * (until - since), violations)
            since = until


@kernel_jit
def is_broken(state):
    """Whether a limit can no longer hold."""
    if state.counters[BROKEN] > 0:
        return True
    for k in range(len(state.limits)):
        if state.limits[k].violations + state.limits[k].overdue > state.limits[k].allowed:
            return True
    return False


@kernel_jit
def count_overdue(state, time_s):
    """Count requests that have waited longer than a limit on ttft or e2e by `time_s` and are not done, so
    that a broken limit is known before they are done. Returns the time until which nothing changes here.

    Also notes when the backlog test cannot be passed any more. Only for traces without sessions, where
    requests are in order of arrival.
    """
    if time_s > state.policy[LATEST_S]:
        # The backlog test is made once: it fails if too many of the last requests do not decode yet.
        state.policy[LATEST_S] = np.inf
        state.counters[BROKEN] |= state.counters[IN_DOUBT] > 0
    requests, until_s = state.requests, state.policy[LATEST_S]
    for k in range(len(state.limits)):
        limit = state.limits[k]
        if limit.metric != TTFT and limit.metric != E2E:
            continue
        r, limit_s = limit.next_overdue, limit.limit_s
        while r < len(requests) and requests[r].arrival_s + limit_s < time_s:
            is_done = requests[r].status != UNFINISHED
            if limit.metric == TTFT and not np.isnan(requests[r].first_token_s):
                is_done = True
            if not is_done and in_window(state, requests[r].arrival_s) and _limits_request(state, k, r):
                limit.overdue += 1
            r += 1
        limit.next_overdue, limit.overdue_at_s = r, time_s
        if r < len(requests):
            until_s = min(until_s, requests[r].arrival_s + limit_s)
    return until_s


@kernel_jit
def release_next(state, closed_loop, time_s):
    """In a closed loop, let requests arrive now until `closed_loop` of them are under way. Called after every
    event.
    """
    if closed_loop > 0:
        released = state.counters[RELEASED]
        while released < len(state.requests) and released - state.counters[DONE] < closed_loop:
            state.requests[released].arrival_s = time_s
            released += 1
        state.counters[RELEASED] = released


@kernel_jit
def record_steps(state, l, first_s, growth_s, steps, sequences):
    """Record a run of steps of lane l, which are gaps between tokens for `sequences` requests.

    If there is no more room, RUNS still counts, so that the caller learns how much room is needed.
    """
    k = state.counters[RUNS]
    if k < len(state.runs):
        run, lane = state.runs[k], state.lanes[l]
        run.worker, run.start_s, run.first_s, run.growth_s = lane.worker, lane.run_start_s, first_s, growth_s
        run.steps, run.sequences, run.decodes = steps, sequences, lane.decodes * lane.is_decoding
        run.prefill_tokens, run.blocks = lane.prefill_tokens, state.workers[lane.worker].used_blocks
        run.of_class = 0  # A run of all requests; runs of a class have its number + 1.
    if len(state.parts) > 0:
        for i in range(state.lanes[l].prefills):
            chunk = state.chunks[l, i]
            computed_tokens = state.requests[chunk.request].computed_tokens
            record_part(state, chunk.request, chunk.tokens, computed_tokens - chunk.tokens)
    state.counters[RUNS] = k + 1


@where_rare(lambda state, r, tokens, cached_tokens: None)
def record_part(state, r, tokens, cached_tokens):
    """Record that the next recorded step computes `tokens` of request r; 0 tokens: that it is preempted."""
    k = state.counters[PARTS]
    if k < len(state.parts):
        part = state.parts[k]
        part.run, part.request = state.counters[RUNS], r
        part.tokens, part.cached_tokens = tokens, cached_tokens
    state.counters[PARTS] = k + 1


@kernel_jit
def record_gap(state, w, start_s, gap_s, sequences):
    """Record a gap of `sequences` requests that is not a step of an engine."""
    _record_gaps(state, w, NONE, start_s, gap_s, 0.0, ONE, sequences)


@where_has("classes", lambda state, l, start_s, first_s, growth_s, steps, sequences: None)
def record_classes(state, l, start_s, first_s, growth_s, steps, sequences):
    """Record the gaps of the first `sequences` decodes of lane l once more for each class with a limit on
    tbt.
    """
    for k in range(len(state.limits)):
        # `is_new`: a limit on tbt, and no earlier one is of the same class.
        of_class, is_new = state.limits[k].of_class, state.limits[k].metric == TBT
        for other in range(k):
            is_same = state.limits[other].metric == TBT and state.limits[other].of_class == of_class
            is_new = is_new and not is_same
        if is_new and of_class != NONE:
            decodes = _decodes_of_class(state, l, sequences, of_class)
            if decodes > 0:
                w = state.lanes[l].worker
                _record_gaps(state, w, of_class, start_s, first_s, growth_s, steps, decodes)


@kernel_jit
def _record_gaps(state, w, of_class, start_s, first_s, growth_s, steps, sequences):
    """Record gaps of a class, or of all requests (NONE), as a run that is not made of an engine's steps.

    Such a run has `prefill_tokens` NONE.
    """
    k = state.counters[RUNS]
    if k < len(state.runs):
        run = state.runs[k]
        run.worker, run.start_s, run.first_s, run.growth_s = w, start_s, first_s, growth_s
        run.steps, run.sequences, run.decodes, run.prefill_tokens, run.blocks = steps, sequences, 0, NONE, 0
        run.of_class = of_class + 1
    state.counters[RUNS] = k + 1


@where_has("classes", lambda state, w, r, start_s, gap_s, gaps: None)
def record_class_gaps(state, w, r, start_s, gap_s, gaps):
    """Record `gaps` gaps of request r once more, by class."""
    if len(state.runs) > 0 and state.classes[r].of_class != NONE:
        _record_gaps(state, w, state.classes[r].of_class, start_s, gap_s, 0.0, ONE, gaps)


@kernel_jit
def _count_zero_gaps(state, of_class, tokens, time_s):
    """Count `tokens` gaps of 0 s against the limits of a class, NONE for those of all requests."""
    if in_window(state, time_s):
        for k in range(len(state.limits)):
            if state.limits[k].metric == TBT and state.limits[k].of_class == of_class:
                state.limits[k].counted += tokens
                if state.in_windows.shape[1] > 0:
                    count_within(state, k, window_at(state, time_s), tokens, 0)


@where_has("classes", lambda state, w, r, tokens, time_s: None)
def count_zero_gaps_of_class(state, w, r, tokens, time_s):
    """Count `tokens` gaps of 0 s of request r against the limits of its class."""
    of_class = state.classes[r].of_class
    if of_class == NONE or tokens == 0:
        return
    _count_zero_gaps(state, of_class, tokens, time_s)
    record_class_gaps(state, w, r, time_s, 0.0, tokens)


@kernel_jit
def count_zero_gaps(state, w, tokens, time_s):
    """Count `tokens` gaps of 0 s against the limits of all requests.

    A gap is 0 s if a token came in the same step as the one before it, as accepted drafts do.
    """
    _count_zero_gaps(state, NONE, tokens, time_s)
    if len(state.runs) > 0:
        record_gap(state, w, time_s, 0.0, tokens)


@kernel_jit
def end_batch(state, l, seconds, steps):
    """Add the batch on lane l to its worker's totals, without the tokens of its decodes."""
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    worker.busy_s += seconds
    worker.steps += steps
    worker.dense_tokens += lane.prefill_tokens


@kernel_jit
def first_token(state, r, time_s):
    """Note the first token of request r, whose prompt is computed, and count its TTFT."""
    request = state.requests[r]
    request.first_token_s = request.last_token_s = time_s
    request.generated_tokens = 1
    if in_window(state, request.arrival_s):
        count_value(state, TTFT, time_s - request.arrival_s, request.arrival_s, r)


@kernel_jit
def note_decoding(state, r):
    """Note that request r has its first token and decodes: the backlog test need not wait for it."""
    request = state.requests[r]
    if request.arrival_s >= state.policy[LAST_S] and request.output_tokens > 1:
        state.counters[IN_DOUBT] -= 1


@kernel_jit
def single_gap(state, w, r, time_s):
    """Count a gap that request r alone has: it was handed over, left out of a step or preempted."""
    request = state.requests[r]
    gap_s = time_s - request.last_token_s
    request.gap_max_s = max(request.gap_max_s, gap_s)
    if in_window(state, time_s):
        count_value(state, TBT, gap_s, time_s, r)
    record_gap(state, w, request.last_token_s, gap_s, ONE)
    record_class_gaps(state, w, r, request.last_token_s, gap_s, ONE)


@kernel_jit
def note_gap(state, l, gap_s):
    """Push `gap_s`, the longest gap of the latest steps of lane l, on the lane's stack.

    The stack holds, from the bottom up, ever shorter gaps, each with the step up to which it is the longest.
    So the longest gap since any step is found by bisection. When the stack is full, its gaps go to the
    requests.
    """
    lane, gaps = state.lanes[l], state.gaps
    depth = lane.gap_depth
    while depth > 0 and gaps[l, depth - 1].gap_s <= gap_s:
        depth -= 1
    if depth == GAP_DEPTH:
        for slot in range(lane.decodes - lane.out_of_step):  # The others joined after this gap.
            settle_gap(state, l, slot)
            request = state.requests[state.slots[l, slot].request]
            request.gap_max_s = max(request.gap_max_s, gap_s)
        lane.gap_depth = 0
        return
    gaps[l, depth].step = lane.decode_step
    gaps[l, depth].gap_s = gap_s
    lane.gap_depth = depth + 1


@kernel_jit
def settle_gap(state, l, slot):
    """Bring the longest gap of the request in a slot up to date, from the lane's stack (`note_gap`)."""
    since = state.slots[l, slot].settled_step
    low, high = 0, state.lanes[l].gap_depth
    while low < high:
        middle = (low + high) // 2
        if state.gaps[l, middle].step > since:
            high = middle
        else:
            low = middle + 1
    if low < state.lanes[l].gap_depth:
        request = state.requests[state.slots[l, slot].request]
        request.gap_max_s = max(request.gap_max_s, state.gaps[l, low].gap_s)
    state.slots[l, slot].settled_step = state.lanes[l].decode_step


@entry_jit
def gaps_at_most(runs, gap_s):
    """How many gaps of these recorded runs are at most `gap_s`, each counted for every sequence."""
    total = 0
    for k in range(len(runs)):
        first, growth, steps = runs[k].first_s, runs[k].growth_s, runs[k].steps
        if first > gap_s:
            continue
        if first + growth * (steps - 1) > gap_s:
            steps = _first_above(first, growth, gap_s, ZERO)
        total += steps * runs[k].sequences
    return total


@entry_jit
def next_gap_s(runs, gap_s):
    """The smallest gap of these recorded runs above `gap_s`; infinite if there is none."""
    smallest = np.inf
    for k in range(len(runs)):
        first, growth, steps = runs[k].first_s, runs[k].growth_s, runs[k].steps
        if first + growth * (steps - 1) <= gap_s:
            continue
        smallest = min(smallest, first + growth * _first_above(first, growth, gap_s, ZERO))
    return smallest
