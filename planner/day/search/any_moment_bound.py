"""What a day costs at least under a controller that changes sizes whenever it likes and knows all traffic.

The master (solvers/any_moment.py) finds the least that is paid if at least one need of every cut is met: at
some moment from a to b more than n workers of a pool are ready. A cut is found by simulation: with at most n
workers from a to b, for all of its needs, and the most of every pool at all other times, a window is missed.
If more workers, and less work before, never hurt (day_optimum.MORE), then a controller that meets none of the
needs misses that window too. So each cut holds for every controller that keeps the SLO, at whatever moments
it acts, and so does the bound, whenever the search is stopped.

    grid       the cuts by which `day_optimum` found the cheapest sizes on its grid
    frontier   for each window and n: all shortest stretches in which n workers are too few, and all pairs of
               a stretch from the window's beginning and one to its end that are together
    master     the sizes of the master's answer are simulated; a window that is missed gives two cuts, with
               stretches as short, as few and with as many workers as still fail, in two orders

The search ends after so much work (`MOST_WORK`), counted and not timed, so that it says the same on any
machine.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.day.search.day_runs import RUN_IN_S, DayRuns
from planner.simulator.slo_verdict import missed_windows
from planner.solvers.any_moment import LevelStretches, Need, Needs, least_lives, shortest_needs
from planner.solvers.pool_sizes import Cut

# Lengths as shares of a window of the SLO. A slice of the day begins so long before its window that sizes
# there still decide; on the days tried longer ones changed no bound by 0.1 %.
LAG_FRAC = 0.5
STEP_FRAC = (
    1 / 120
)  # Of the frontier, at the finest. Wider where a day has many windows that need many workers.
EXACT_FRAC = 1 / 150  # Cuts of the master's answers are as exact as this.
SLICE_WORK = 1000  # A slice takes about so long beside its requests as so many requests.
# Requests simulated, and SLICE_WORK a slice: 30 s or less on an idle core. Days of few windows get less.
MOST_WORK = 50_000_000
MOST_SLICES_PER_WINDOW = 500
FRONTIER_SHARE = 0.5  # The share of it that the frontier may take.
SLICES_OF_FRONTIER = 3.5  # Per point of its grid, as counted on the five days.
GAP_FRAC = 0.003  # The master is solved to this share of its optimum; its bound is what counts.
LONGEST_SOLVE_S = 30.0
SAME_FRAC = 1e-6  # Costs that differ by less than this share count as equal.


@dataclass(frozen=True, slots=True, eq=False)
class AnyMomentBound:
    """No controller that keeps every window costs less than `usd`, if more workers never hurt; `up` is when
    each (pool, k) is up in the master's last answer.
    """

    usd: float
    up: LevelStretches


class _Slices:
    """Simulates single windows with at most so many workers, and counts the work."""

    def __init__(self, runs: DayRuns, most_work: int):
        self.runs, self.work = runs, 0.0
        self.usual_work = len(runs.trace) / max(runs.window_count, 1) * (1 + LAG_FRAC) + SLICE_WORK
        self.most_work = min(most_work, MOST_SLICES_PER_WINDOW * runs.window_count * self.usual_work)
        self.last_s = float(runs.terms.edges_s[-1])
        window_s = float(np.diff(runs.windows_s).max())
        self.lag_s, self.exact_s = LAG_FRAC * window_s, EXACT_FRAC * window_s

    @property
    def is_used_up(self) -> bool:
        return self.work >= self.most_work

    def span_s(self, window: int) -> tuple[float, float]:
        """From when until when sizes decide a window."""
        windows_s = self.runs.windows_s
        from_s = max(float(windows_s[window]) - self.lag_s, 0.0)
        return from_s, min(float(windows_s[window + 1]) + self.runs.reach_s, self.last_s)

    def misses(self, window: int, needs: Sequence[Need]) -> bool:
        """Whether a window is missed if none of these needs is met and everything else is at its most."""
        runs, most = self.runs, self.runs.terms.most[0]
        first_s = min(float(runs.windows_s[window]), *(begin_s for begin_s, *_ in needs))
        start_s = max(first_s - RUN_IN_S, 0.0)
        moments = {max(each_s, start_s) for begin_s, end_s, *_ in needs for each_s in (begin_s, end_s)}
        times_s = np.array(sorted({start_s, *moments}))
        workers = np.tile(most, (len(times_s), 1))
        for begin_s, end_s, c, n in needs:
            inside = (times_s >= begin_s) & (times_s < end_s)
            workers[inside, c] = np.minimum(workers[inside, c], n)
        part = runs.simulate_slice(window, times_s, workers)
        if part is None:
            return False
        self.work += part.requests + SLICE_WORK
        return bool(missed_windows(part.run.simulation, runs.slo, part.bounds_s))


def any_moment_bound(
    runs: DayRuns,
    cuts: Sequence[Cut] = (),
    *,
    most_usd: float = math.inf,
    most_work: int = MOST_WORK,
    time_limit_s: float = math.inf,
    progress: Callable[[str], None] = lambda _: None,
) -> AnyMomentBound:
    """The least USD of a controller that keeps every window, if more workers never hurt.

    `cuts` are of the grid of these runs. Where it comes out above `most_usd`, the cost of a day that keeps
    every window, more workers do hurt, and only what is proved without them is returned. The time limit is
    for machines that are too slow for the work; a search that it ends may say less.
    """
    deadline = time.monotonic() + time_limit_s
    # Who starts warm is ready sooner, and any worker may be one of these.
    quickest = tuple(
        replace(pool, start_s=min(pool.start_s, each.warm_start_s) if each.warm else pool.start_s)
        for pool, each in zip(runs.terms.pools, runs.elastic_pools, strict=True)
    )
    terms = replace(runs.terms, pools=quickest)
    slices, work = _Slices(runs, most_work), runs.least_paid()
    edges_s = runs.terms.edges_s
    known: list[Needs] = [
        tuple((float(edges_s[t]), float(edges_s[t + 1]), c, n) for t, c, n in cut) for cut in cuts
    ]
    known = shortest_needs([*known, *_frontier(slices, deadline)])
    bound_usd, up = work.usd, LevelStretches()
    while bound_usd < most_usd:
        answer = least_lives(terms, known, work, gap_frac=GAP_FRAC, time_limit_s=LONGEST_SOLVE_S)
        bound_usd = max(bound_usd, answer.bound_usd)
        if answer.up is None:
            break
        up, new = answer.up, list[Needs]()
        if slices.is_used_up or time.monotonic() > deadline:
            break
        for window in range(runs.window_count):
            needs = _unmet(slices, window, up)
            if needs and slices.misses(window, needs):
                new += [_shorten(slices, window, needs, is_reversed=order) for order in (False, True)]
        progress(f"at any moment: bound {bound_usd:.2f} USD, {len(new)} cuts more")
        if not new:
            break
        known = shortest_needs([*known, *new])
    return AnyMomentBound(bound_usd if bound_usd <= most_usd * (1 + SAME_FRAC) else work.usd, up)


def _frontier(slices: _Slices, deadline: float) -> list[Needs]:
    """The frontier cuts, on a grid that its share of the work is enough for."""
    runs = slices.runs
    too_few = _windows_with_too_few(slices)
    slices_in_all = FRONTIER_SHARE * slices.most_work / slices.usual_work
    points = slices_in_all / (SLICES_OF_FRONTIER * max(len(too_few), 1))
    found: list[Needs] = []
    for window, c, n in too_few:
        if slices.work > FRONTIER_SHARE * slices.most_work or time.monotonic() > deadline:
            break
        start_s, end_s = runs.windows_s[window], runs.windows_s[window + 1]
        step_s = float(end_s - start_s) / min(max(points, 4.0), 1 / STEP_FRAC)
        found += _stretches(slices, window, c, n, step_s)
        found += _pairs_of_stretches(slices, window, c, n, step_s)
    return found


def _windows_with_too_few(slices: _Slices) -> list[tuple[int, int, int]]:
    """All (window, c, n) where n workers of pool c all the time are too few."""
    found: list[tuple[int, int, int]] = []
    for c, pool in enumerate(slices.runs.terms.pools):
        windows = list(range(slices.runs.window_count))
        for n in range(pool.least, pool.most):
            windows = [v for v in windows if slices.misses(v, [(*slices.span_s(v), c, n)])]
            found += [(v, c, n) for v in windows]
            if slices.is_used_up:
                return found
    return found


def _stretches(slices: _Slices, window: int, c: int, n: int, step_s: float) -> list[Needs]:
    """The shortest stretches in which n workers are too few for a window, between points of a grid."""
    from_s, to_s = slices.span_s(window)
    points = np.append(np.arange(from_s, to_s - 1e-6, step_s), to_s).tolist()

    def fails(first: int, last: int) -> bool:
        return first < last and slices.misses(window, [(points[first], points[last], c, n)])

    found: list[Needs] = []
    last = len(points) - 1  # The last point to which the stretch from `first` may go.
    for first in reversed(range(len(points) - 1)):
        longest = _last_that_holds(partial(fails, first), first, last)
        if longest < last:
            found.append(((points[first], points[longest + 1], c, n),))
            last = longest
    return found


def _pairs_of_stretches(slices: _Slices, window: int, c: int, n: int, step_s: float) -> list[Needs]:
    """The shortest pairs of a stretch from the window's beginning and one to its end in which n workers are
    too few.
    """
    start_s, end_s = (float(each) for each in slices.runs.windows_s[window : window + 2])
    points = np.append(np.arange(start_s, end_s - 1e-6, step_s), end_s).tolist()
    end = len(points) - 1

    def needs(until: int, since: int) -> Needs:
        first = (start_s, points[until], c, n)
        return (first, (points[since], end_s, c, n)) if since < end else (first,)

    def fails(until: int, back: int) -> bool:
        return slices.misses(window, needs(until, end - back))

    found: list[Needs] = []
    since = 1  # The first point from which n workers may be enough again.
    for until in range(1, end):
        since = max(since, until)
        longest = end - _last_that_holds(partial(fails, until), 0, end - since)
        if longest > since:
            found.append(needs(until, longest - 1))
            since = longest
    return found


def _last_that_holds(fails: Callable[[int], bool], low: int, high: int) -> int:
    """The largest of low ... high that does not fail, beginning at `high`; `low` is taken to hold."""
    if high <= low or not fails(high):
        return high
    bad, stride = high, 1
    while bad - stride > low and fails(bad - stride):
        bad, stride = bad - stride, 2 * stride
    good = max(bad - stride, low)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if fails(middle) else (middle, bad)
    return good


def _unmet(slices: _Slices, window: int, up: LevelStretches) -> list[Need]:
    """The needs that sizes of the master's answer do not meet near a window: stretches of equal sizes. Each
    level counts as up for a little longer than it is, so that a cut forbids more than this answer alone.
    """
    from_s, to_s = slices.span_s(window)
    unmet: list[Need] = []
    for c, pool in enumerate(slices.runs.terms.pools):
        ups = [
            (begin_s - slices.exact_s, end_s + slices.exact_s)
            for (each, _), stretches in up.items()
            if each == c
            for begin_s, end_s in stretches
        ]
        moments = sorted({from_s, to_s, *(t for stretch in ups for t in stretch if from_s < t < to_s)})
        own: list[Need] = []
        for begin_s, end_s in itertools.pairwise(moments):
            size = pool.least + sum(first <= begin_s and end_s <= last for first, last in ups)
            if own and own[-1][1] == begin_s and own[-1][3] == size:
                own[-1] = (own[-1][0], end_s, c, size)
            elif size < pool.most:
                own.append((begin_s, end_s, c, size))
        unmet += own
    return unmet


def _shorten(slices: _Slices, window: int, needs: Sequence[Need], *, is_reversed: bool) -> Needs:
    """Needs with which a window still fails: fewer, then shorter, then of more workers."""
    kept = dict(enumerate(needs))

    def fails(changed: dict[int, Need]) -> bool:
        return slices.misses(window, list(changed.values()))

    for i in sorted(kept, reverse=is_reversed):
        without = {j: need for j, need in kept.items() if j != i}
        if without and fails(without):
            kept = without
    for is_end in (True, False) if is_reversed else (False, True):
        for i in sorted(kept, reverse=is_reversed):
            begin_s, end_s, c, n = kept[i]

            def shorter(
                by_s: float, i: int = i, is_end: bool = is_end, kept: dict[int, Need] = kept
            ) -> dict[int, Need]:
                first_s, last_s, c, n = kept[i]
                return kept | {
                    i: (first_s, last_s - by_s, c, n) if is_end else (first_s + by_s, last_s, c, n)
                }

            least_s, most_s, stride_s = 0.0, end_s - begin_s, 16 * slices.exact_s
            while least_s + stride_s < most_s and fails(shorter(least_s + stride_s)):
                least_s, stride_s = least_s + stride_s, 2 * stride_s
            most_s = min(most_s, least_s + stride_s)
            while most_s - least_s > slices.exact_s:
                middle_s = (least_s + most_s) / 2
                least_s, most_s = (middle_s, most_s) if fails(shorter(middle_s)) else (least_s, middle_s)
            kept = shorter(least_s)
    for i, (begin_s, end_s, c, size) in kept.items():
        n = size
        while n + 1 < slices.runs.terms.pools[c].most and fails(kept | {i: (begin_s, end_s, c, n + 1)}):
            n += 1
        kept[i] = begin_s, end_s, c, n
    return tuple(kept.values())
