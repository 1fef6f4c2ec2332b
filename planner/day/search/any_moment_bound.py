"""Bounds from below the cost of a day for controllers that know all traffic and change sizes at any moment.

A need is (a, b, c, n): at some moment from a to b [s] more than n workers of pool c must be ready. A cut is a
set of needs of which at least one must be met. Cuts are found by simulation: with at most n workers from a
to b, for all needs of the cut, and the most workers of every pool at all other times, a window is missed. If
more workers, and less earlier work, never hurt (day_optimum.MORE), a controller that meets none of the needs
misses the window too. So each cut holds for every controller that keeps the SLO, at whatever moments it acts.
The master problem (solvers/any_moment.py) finds the least cost that meets all cuts; it is a bound whenever
the search stops.

Cuts come from three sources:

    grid       the cuts by which `day_optimum` found the cheapest sizes on its grid
    frontier   for each window and n: the shortest spans in which n workers are too few, and the shortest
               pairs of spans (one from the window's beginning, one to its end) in which they are too few
    master     the sizes in the master's solution are simulated; each missed window gives two cuts, reduced
               in two orders to the fewest and shortest spans with the most workers that still fail

The search ends after a counted amount of work (`MOST_WORK`), not of time, so that the bound is the same on
any machine.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.day.search.day_runs import RUN_IN_S, SLICE_WORK, DayRuns
from planner.search.oracle.work_clock import is_over, solver_limit_s
from planner.simulator.slo_verdict import missed_windows
from planner.solvers.any_moment import (
    LevelStretches,
    Need,
    Needs,
    cheapest_levels,
    priced_sizes_by_pool,
    shortest_needs,
)
from planner.solvers.pool_sizes import Cut

# The constants were set by hand, where no other reason is given. LAG_FRAC, STEP_FRAC and EXACT_FRAC are
# shares of the length of an SLO's window.
# Sizes matter for a window from this long before it begins. A longer time changed no bound by more than 0.1 %
# on the five days on which it was tried.
LAG_FRAC = 0.5
STEP_FRAC = 1 / 120  # The finest grid of the frontier; days with many windows and workers get a wider one.
EXACT_FRAC = 1 / 150  # Cuts from the master's solutions are shortened to this precision.
# The limit of work: requests simulated, plus SLICE_WORK per slice. This work takes at most 30 s on one core.
MOST_WORK = 50_000_000
MOST_SLICES_PER_WINDOW = 500  # Days of few windows get less work than MOST_WORK.
FRONTIER_SHARE = 0.5  # The frontier may take this share of the work.
SLICES_OF_FRONTIER = 3.5  # Slices per point of the frontier's grid, as counted on the same five days.
GAP_FRAC = 0.003  # The master is solved to this share of its optimum, because only its bound is used.
LONGEST_SOLVE_S = 30.0  # The longest time for one solution of the master.
LEAST_SOLVE_S = 1.0  # The master is solved once, even when no time is left, so that there is a bound.
# The search ends after MOST_IDLE_ROUNDS consecutive solutions of the master that raise the bound by less than
# LEAST_RISE_FRAC. On a production day seven more, which took 32 CPU s, did not raise it at all.
MOST_IDLE_ROUNDS, LEAST_RISE_FRAC = 2, 1e-4
SAME_FRAC = 1e-6  # Costs that differ by less than this share count as equal.
LEAST_POINTS = 4.0  # The fewest points of the frontier's grid in a window, however little work it may take.
ROUNDING_S = 1e-6  # Points of a grid that are nearer than this are one.
# The first try shortens a need by this many times EXACT_FRAC; each success doubles the step.
FIRST_STRIDE = 16


@dataclass(frozen=True, slots=True, eq=False)
class AnyMomentBound:
    """A lower bound: no controller that keeps every window costs less than `usd`, if more workers never hurt.

    `lives` has for each (pool, k) when the k-th worker is ready in the master's last solution.
    """

    usd: float
    lives: LevelStretches


class _Slices:
    """Simulates slices, parts of the day around one window, with limited workers, and counts the work."""

    def __init__(self, runs: DayRuns):
        self.runs, self.work = runs, 0.0
        self.usual_work = len(runs.trace) / max(runs.window_count, 1) * (1 + LAG_FRAC) + SLICE_WORK
        self.most_work = min(MOST_WORK, MOST_SLICES_PER_WINDOW * runs.window_count * self.usual_work)
        self.last_s = float(runs.terms.edges_s[-1])
        window_s = float(np.diff(runs.window_edges_s).max())
        self.lag_s, self.exact_s = LAG_FRAC * window_s, EXACT_FRAC * window_s
        # The sizes of each pool that differ in price, in order, its most at the end.
        self.sizes = priced_sizes_by_pool(runs.terms)

    @property
    def is_used_up(self) -> bool:
        """Whether the limit of work is reached."""
        return self.work >= self.most_work

    def span_s(self, window: int) -> tuple[float, float]:
        """The time from and to which [s] sizes matter for a window."""
        edges_s = self.runs.window_edges_s
        from_s = max(float(edges_s[window]) - self.lag_s, 0.0)
        return from_s, min(float(edges_s[window + 1]) + self.runs.reach_s, self.last_s)

    def misses(self, window: int, needs: Sequence[Need]) -> bool:
        """Whether a window is missed if no need is met, with the most workers at all other times."""
        runs, most = self.runs, self.runs.terms.most[0]
        first_s = min(float(runs.window_edges_s[window]), *(begin_s for begin_s, *_ in needs))
        start_s = max(first_s - RUN_IN_S, 0.0)
        moments = {max(each_s, start_s) for begin_s, end_s, *_ in needs for each_s in (begin_s, end_s)}
        times_s = np.array(sorted({start_s, *moments}))
        workers = np.tile(most, (len(times_s), 1))
        for begin_s, end_s, c, n in needs:
            inside = (times_s >= begin_s) & (times_s < end_s)
            workers[inside, c] = np.minimum(workers[inside, c], n)
        day_slice = runs.simulate_slice(window, times_s, workers)
        if day_slice is None:
            return False
        self.work += day_slice.requests + SLICE_WORK
        return bool(missed_windows(day_slice.run.simulation, runs.slo, day_slice.window_s))


def any_moment_bound(
    runs: DayRuns,
    cuts: Sequence[Cut] = (),
    *,
    most_usd: float = math.inf,
    deadline: float = math.inf,
    progress: Callable[[str], None] = lambda _: None,
) -> AnyMomentBound:
    """A lower bound on the cost [USD] of a controller that keeps every window, if more workers never hurt.

    `cuts` are of the grid of these runs. `most_usd` is the cost of a day that keeps every window. A bound
    above it shows that more workers do hurt, and then the bound without this assumption is returned. A search
    that ends at the `deadline` on its clock (work_clock.py) may return a lower bound.
    """
    # If some workers may start warm, which is faster, the bound lets all workers start warm.
    quickest = tuple(
        replace(pool, start_s=min(pool.start_s, each.warm_start_s) if each.warm else pool.start_s)
        for pool, each in zip(runs.terms.pools, runs.given_pools, strict=True)
    )
    terms = replace(runs.terms, pools=quickest)
    if any(each.warm for each in runs.given_pools):
        # Billing by units assumes that the worker that started last goes first; a warm start breaks it.
        terms = replace(terms, unit_s=0.0)
    slices, least_paid = _Slices(runs), runs.least_paid()
    edges_s = runs.terms.edges_s
    all_cuts: list[Needs] = [
        tuple((float(edges_s[t]), float(edges_s[t + 1]), c, n) for t, c, n in cut) for cut in cuts
    ]
    all_cuts = shortest_needs([*all_cuts, *_frontier(slices, deadline, progress)])
    bound_usd, lives = least_paid.usd, LevelStretches()
    earlier_usd, idle_rounds = 0.0, 0  # The bound of the solution before; consecutive idle solutions.
    while bound_usd < most_usd:
        limit_s = solver_limit_s(LONGEST_SOLVE_S, LEAST_SOLVE_S)
        solution = cheapest_levels(terms, all_cuts, least_paid, gap_frac=GAP_FRAC, time_limit_s=limit_s)
        has_risen = solution.bound_usd > earlier_usd * (1 + LEAST_RISE_FRAC)
        earlier_usd, idle_rounds = solution.bound_usd, 0 if has_risen else idle_rounds + 1
        bound_usd = max(bound_usd, solution.bound_usd)
        if solution.up is None:  # The master found a bound and no sizes in time.
            break
        lives, new_cuts = solution.up, list[Needs]()
        if slices.is_used_up or idle_rounds == MOST_IDLE_ROUNDS or is_over(deadline):
            break
        for window in range(runs.window_count):
            needs = _unmet(slices, window, lives)
            if needs and slices.misses(window, needs):
                for order in (False, True):
                    new_cuts += _shorten(slices, window, needs, is_reversed=order)
        progress(f"the optimum with changes at any moment: {bound_usd:.2f} USD or more")
        if not new_cuts:
            break
        all_cuts = shortest_needs([*all_cuts, *new_cuts])
    if terms.is_by_unit:
        # The program by whole units lacks the rows of the work, so the program by seconds may bound better.
        limit_s = solver_limit_s(LONGEST_SOLVE_S, LEAST_SOLVE_S)
        by_second = replace(terms, unit_s=0.0)
        solution = cheapest_levels(by_second, all_cuts, least_paid, gap_frac=GAP_FRAC, time_limit_s=limit_s)
        bound_usd = max(bound_usd, solution.bound_usd)
    is_possible = bound_usd <= most_usd * (1 + SAME_FRAC)
    return AnyMomentBound(bound_usd if is_possible else least_paid.usd, lives)


def _frontier(slices: _Slices, deadline: float, progress: Callable[[str], None]) -> list[Needs]:
    """The cuts of the frontier, on a grid so wide that the frontier's share of the work suffices."""
    runs = slices.runs
    too_few = _windows_with_too_few(slices, deadline)
    affordable_slices = FRONTIER_SHARE * slices.most_work / slices.usual_work
    points = affordable_slices / (SLICES_OF_FRONTIER * max(len(too_few), 1))
    cuts: list[Needs] = []
    for k, (window, c, n) in enumerate(too_few, 1):
        progress(
            "the least cost with changes at any moment: how long a window may have too few workers, "
            f"{k} of {len(too_few)}"
        )
        if slices.work > FRONTIER_SHARE * slices.most_work or is_over(deadline):
            break
        start_s, end_s = runs.window_edges_s[window], runs.window_edges_s[window + 1]
        step_s = float(end_s - start_s) / min(max(points, LEAST_POINTS), 1 / STEP_FRAC)
        cuts += _stretches(slices, window, c, n, step_s)
        cuts += _pairs_of_stretches(slices, window, c, n, step_s)
    return cuts


def _windows_with_too_few(slices: _Slices, deadline: float) -> list[tuple[int, int, int]]:
    """All (window, c, n) for which n workers of pool c are too few, even if ready all the time."""
    too_few: list[tuple[int, int, int]] = []
    for c in range(len(slices.runs.terms.pools)):
        # A window that n workers keep is not tried with more workers.
        windows = list(range(slices.runs.window_count))
        for n in slices.sizes[c][:-1]:
            windows = [v for v in windows if slices.misses(v, [(*slices.span_s(v), c, n)])]
            too_few += [(v, c, n) for v in windows]
            if slices.is_used_up or is_over(deadline):
                return too_few
    return too_few


def _stretches(slices: _Slices, window: int, c: int, n: int, step_s: float) -> list[Needs]:
    """The shortest stretches in which n workers are too few for a window, between points of a grid."""
    from_s, to_s = slices.span_s(window)
    points = np.append(np.arange(from_s, to_s - ROUNDING_S, step_s), to_s).tolist()

    def fails(first: int, last: int) -> bool:
        return first < last and slices.misses(window, [(points[first], points[last], c, n)])

    cuts: list[Needs] = []
    # A stretch from `first` that goes beyond `last` contains a stretch that fails already.
    last = len(points) - 1
    for first in reversed(range(len(points) - 1)):
        last_kept = _last_that_holds(partial(fails, first), first, last)
        if last_kept < last:
            cuts.append(((points[first], points[last_kept + 1], c, n),))
            last = last_kept
    return cuts


def _pairs_of_stretches(slices: _Slices, window: int, c: int, n: int, step_s: float) -> list[Needs]:
    """The shortest pairs of stretches in which, together, n workers are too few for a window.

    The first stretch of a pair begins with the window, the second one ends with it.
    """
    start_s, end_s = (float(each) for each in slices.runs.window_edges_s[window : window + 2])
    points = np.append(np.arange(start_s, end_s - ROUNDING_S, step_s), end_s).tolist()
    end = len(points) - 1

    def needs(until: int, since: int) -> Needs:
        first = (start_s, points[until], c, n)
        return (first, (points[since], end_s, c, n)) if since < end else (first,)

    def fails(until: int, back: int) -> bool:
        """Whether the window is missed if the second stretch begins `back` points before the end."""
        return slices.misses(window, needs(until, end - back))

    cuts: list[Needs] = []
    since = 1  # The first point from which n workers may be enough again.
    for until in range(1, end):
        since = max(since, until)
        first_kept = end - _last_that_holds(partial(fails, until), 0, end - since)
        if first_kept > since:
            cuts.append(needs(until, first_kept - 1))
            since = first_kept
    return cuts


def _last_that_holds(fails: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low` to `high` that does not fail; `low` is assumed not to fail.

    The search goes from `high` downwards with growing strides, because the number is often near `high`.
    """
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


def _unmet(slices: _Slices, window: int, lives: LevelStretches) -> list[Need]:
    """The needs that the master's solution does not meet near a window: one for each span of equal sizes.

    Each worker counts as ready for `exact_s` longer at both ends, so that a cut rules out more.
    """
    from_s, to_s = slices.span_s(window)
    unmet: list[Need] = []
    for c, sizes in enumerate(slices.sizes):
        ready = {
            size: [
                (begin_s - slices.exact_s, end_s + slices.exact_s)
                for begin_s, end_s in lives.get((c, size + 1), [])
            ]
            for size in sizes[:-1]
        }
        ends_s = (t for stretches in ready.values() for stretch in stretches for t in stretch)
        moments = sorted({from_s, to_s, *(t for t in ends_s if from_s < t < to_s)})
        own: list[Need] = []
        for begin_s, end_s in itertools.pairwise(moments):
            # All levels below must be up, or a cut with this size may be one that the solution keeps.
            n = next(
                (
                    size
                    for size, stretches in ready.items()
                    if not any(first <= begin_s and end_s <= last for first, last in stretches)
                ),
                sizes[-1],
            )
            if own and own[-1][1] == begin_s and own[-1][3] == n:
                own[-1] = (own[-1][0], end_s, c, n)
            elif n < sizes[-1]:
                own.append((begin_s, end_s, c, n))
        unmet += own
    return unmet


def _shorten(slices: _Slices, window: int, needs: Sequence[Need], *, is_reversed: bool) -> list[Needs]:
    """Reduce needs while the window is still missed: to fewer needs, then to shorter needs, then to needs
    with more workers. Each step makes the cut stronger.

    Returns the cuts before and after the last step. The solution from which the needs are does not meet the
    first, but may meet the second with a level above one that is not up. `is_reversed` takes the needs, and
    their two ends, in reverse order.
    """
    shortened = dict(enumerate(needs))

    def fails(changed: dict[int, Need]) -> bool:
        return slices.misses(window, list(changed.values()))

    for i in sorted(shortened, reverse=is_reversed):
        without = {j: need for j, need in shortened.items() if j != i}
        if without and fails(without):
            shortened = without
    for is_end in (True, False) if is_reversed else (False, True):
        for i in sorted(shortened, reverse=is_reversed):
            begin_s, end_s, c, n = shortened[i]

            def shorter(
                by_s: float, i: int = i, is_end: bool = is_end, shortened: dict[int, Need] = shortened
            ) -> dict[int, Need]:
                first_s, last_s, c, n = shortened[i]
                return shortened | {
                    i: (first_s, last_s - by_s, c, n) if is_end else (first_s + by_s, last_s, c, n)
                }

            least_s, most_s, stride_s = 0.0, end_s - begin_s, FIRST_STRIDE * slices.exact_s
            while least_s + stride_s < most_s and fails(shorter(least_s + stride_s)):
                least_s, stride_s = least_s + stride_s, 2 * stride_s
            most_s = min(most_s, least_s + stride_s)
            while most_s - least_s > slices.exact_s:
                middle_s = (least_s + most_s) / 2
                least_s, most_s = (middle_s, most_s) if fails(shorter(middle_s)) else (least_s, middle_s)
            shortened = shorter(least_s)
    lowest = tuple(shortened.values())
    for i, (begin_s, end_s, c, size) in shortened.items():
        for n in (n for n in slices.sizes[c][:-1] if n > size):
            if not fails(shortened | {i: (begin_s, end_s, c, n)}):
                break
            shortened[i] = begin_s, end_s, c, n
    return [lowest, tuple(shortened.values())]
