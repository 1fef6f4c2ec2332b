"""Tokens counted: gaps between them, and limits held against them, without writing every gap down."""

from __future__ import annotations

import numpy as np

from planner.simulator.compiled import entry_jit, kernel_jit, small_jit
from planner.simulator.layout import DONE, GAP_DEPTH, NONE, ONE, RUNS, TBT, ZERO


@small_jit
def run_s(first, growth, steps):
    """Seconds of the first `steps` steps of a run."""
    return first * steps + growth * (steps * (steps - 1) / 2.0)


@kernel_jit
def steps_reaching(start, first, growth, time_s):
    """Smallest j >= 1 such that the j-th step of a run ends at `time_s` or later."""
    span = time_s - start
    if span <= first:
        return 1
    if growth > 0.0:
        half = first - 0.5 * growth
        root = (-half + np.sqrt(half * half + 2.0 * growth * span)) / growth
    else:
        root = span / first
    j = max(int(root) - 1, 1)
    while start + run_s(first, growth, j) < time_s:
        j += 1
    while j > 1 and start + run_s(first, growth, j - 1) >= time_s:
        j -= 1
    return j


@small_jit
def in_window(state, time_s):
    return state.window[0] <= time_s <= state.window[1]


@kernel_jit
def count(state, metric, value_s):
    """Hold one value against the limits of its metric."""
    for k in range(len(state.limits)):
        if state.limits[k].metric == metric:
            state.limits[k].counted += 1
            if value_s > state.limits[k].limit_s:
                state.limits[k].violations += 1


@kernel_jit
def count_run(state, start, first, growth, steps, sequences):
    """Hold the gaps of a run, each met by `sequences` requests, against the limits on tbt."""
    begin, end = 0, steps
    if start + first < state.window[0]:
        begin = steps_reaching(start, first, growth, state.window[0]) - 1
    if start + run_s(first, growth, steps) > state.window[1]:
        end = steps_reaching(start, first, growth, state.window[1])
        if start + run_s(first, growth, end) > state.window[1]:
            end -= 1
    if end <= begin:
        return
    for k in range(len(state.limits)):
        if state.limits[k].metric != TBT:
            continue
        state.limits[k].counted += sequences * (end - begin)
        limit_s = state.limits[k].limit_s
        if first + growth * (end - 1) > limit_s:
            i = begin
            if growth > 0.0:
                i = max(int((limit_s - first) / growth) - 1, begin)
            while first + growth * i <= limit_s:
                i += 1
            state.limits[k].violations += sequences * (end - i)


@kernel_jit
def is_broken(state):
    """Whether a limit can no longer hold."""
    for k in range(len(state.limits)):
        if state.limits[k].violations > state.limits[k].allowed:
            return True
    return False


@kernel_jit
def let_in(state, released, closed_loop, time_s):
    """A closed loop lets the next requests arrive in place of those that are done: how many have so far."""
    while released < len(state.requests) and released - state.counters[DONE] < closed_loop:
        state.requests[released].arrival_s = time_s
        released += 1
    return released


@kernel_jit
def record_run(state, w, start, first, growth, steps, sequences, decodes, prefill_tokens, blocks):
    k = state.counters[RUNS]
    if k < len(state.runs):
        run = state.runs[k]
        run.worker, run.start_s, run.first_s, run.growth_s, run.steps = w, start, first, growth, steps
        run.sequences, run.decodes, run.prefill_tokens, run.blocks = (
            sequences,
            decodes,
            prefill_tokens,
            blocks,
        )
    state.counters[RUNS] = k + 1


@kernel_jit
def single_gap(state, w, r, time_s):
    """A gap that one request alone has seen: it was handed over, held up or preempted in between."""
    request = state.requests[r]
    gap_s = time_s - request.last_token_s
    request.gap_max_s = max(request.gap_max_s, gap_s)
    if in_window(state, time_s):
        count(state, TBT, gap_s)
    record_run(state, w, request.last_token_s, gap_s, 0.0, ONE, ONE, ZERO, NONE, ZERO)


@kernel_jit
def note_gap(state, l, gap_s):
    """The steps up to now had a longest gap of `gap_s`: push it on the lane's stack.

    The stack holds, from the bottom, ever shorter gaps with the step up to which each is the longest, so that
    the longest gap since any step is found by bisection. When it is full, all goes to the requests.
    """
    lane, gaps = state.lanes[l], state.gaps
    depth = lane.gaps
    while depth > 0 and gaps[l, depth - 1].gap_s <= gap_s:
        depth -= 1
    if depth == GAP_DEPTH:
        for slot in range(lane.decodes - lane.late):  # the late ones have not seen it
            settle_gap(state, l, slot)
            request = state.requests[state.slots[l, slot].request]
            request.gap_max_s = max(request.gap_max_s, gap_s)
        lane.gaps = 0
        return
    gaps[l, depth].step = lane.step
    gaps[l, depth].gap_s = gap_s
    lane.gaps = depth + 1


@kernel_jit
def settle_gap(state, l, slot):
    """Bring the longest gap of the request in a slot up to date."""
    since = state.slots[l, slot].since
    low, high = 0, state.lanes[l].gaps
    while low < high:
        middle = (low + high) // 2
        if state.gaps[l, middle].step > since:
            high = middle
        else:
            low = middle + 1
    if low < state.lanes[l].gaps:
        request = state.requests[state.slots[l, slot].request]
        request.gap_max_s = max(request.gap_max_s, state.gaps[l, low].gap_s)
    state.slots[l, slot].since = state.lanes[l].step


@entry_jit
def gaps_at_most(runs, gap_s):
    """How many gaps of these runs are <= gap_s, each counted for every sequence that saw it."""
    total = 0
    for k in range(len(runs)):
        first, growth, steps = runs[k].first_s, runs[k].growth_s, runs[k].steps
        if first > gap_s:
            continue
        if first + growth * (steps - 1) > gap_s:
            i = max(int((gap_s - first) / growth) - 1, 0)
            while first + growth * i <= gap_s:
                i += 1
            steps = i
        total += steps * runs[k].sequences
    return total


@entry_jit
def next_gap_s(runs, gap_s):
    """The smallest gap of these runs that is > gap_s."""
    smallest = np.inf
    for k in range(len(runs)):
        first, growth, steps = runs[k].first_s, runs[k].growth_s, runs[k].steps
        if first + growth * (steps - 1) <= gap_s:
            continue
        i = 0
        if first <= gap_s:
            i = max(int((gap_s - first) / growth) - 1, 0)
            while first + growth * i <= gap_s:
                i += 1
        smallest = min(smallest, first + growth * i)
    return smallest
