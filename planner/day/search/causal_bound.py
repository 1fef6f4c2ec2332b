"""A lower bound on what any controller without foresight pays, if it may miss some windows of the SLO.

Such a controller sees the traffic up to now and nothing of what comes. It chooses sizes: the number of
workers of each pool, for each window. The bound comes from a game against it. The day is cut into blocks,
such as hours, and the traffic of each window is drawn at random from the windows of its block. So no
controller knows which window comes next. It can only choose how often to have which sizes, and a size is too
small for a share of the block's windows. The cheapest choice solves this program:

Sets   h  block of |h| neighbouring windows     v  window of the SLO, tau_v its length [h]     c  pool
Data   n_vc   need: the fewest workers of pool c with which window v is kept if other pools have their most
       p(x)   USD/h of sizes x, by whole nodes where these are sold
       m      windows that may be missed, on average
Vars   w_hx   share of the windows of block h that have sizes x

  min   sum_h sum_x w_hx p(x) sum_(v of h) tau_v
  s.t.  sum_h |h| sum_x w_hx share(v of h with n_vc > x_c for some c)  <=  m
        sum_x w_hx = 1   for all h

Each block has a trade-off between USD and missed windows, which is a convex curve. `_least_total_usd` takes
the best point of each curve.

The bound is on the mean cost of such random days, not on one day that repeats an earlier one. Sizes change at
the edges of windows, and a worker that is ready in a window was ordered before it began. A controller that
acts within a window may cost less if the window's burst comes more than a start-up after its beginning. Two
assumptions: more workers never hurt, and less earlier work never hurts (MORE in day/search/day_optimum.py).

Second bound, `reacting_bound`: the controller sees the whole window when it begins. Workers that it orders
then are ready a start-up later, so only in the first share f of the window (`fixed_frac`) are sizes chosen
blindly. n_vc is then the need of this first part and m_vc the need of the rest. Where x is below m_v, the
workers up to m_v are paid from the window's beginning. With g = min(f, 1 - f), the share before the window's
end in which workers of the next window start, an hour of a window that is kept costs

  f p(max(x, m_v)) + (1 - f - g) p(m_v) + g p(x of the next window)

and one that is missed has the least sizes in place of m_v.

Third bound, `least_usd_of_unknown_blocks`: so far a controller knows, as a block begins, which windows the
block has. Here it must learn this. Each block is drawn from a group of blocks, such as a half day: block j
with probability p_j, its share of the group's windows. Windows with equal needs are of one kind e, and q_je
is the share of kind e in block j. After k windows of a block the controller knows its history s: s_e of them
were of kind e. The program then has w_sx, the probability that sizes are x after s, in place of w_hx:

  P(j, s) = p_j k! prod_e q_je^s_e / s_e!
  cost      sum_s sum_x w_sx sum_j P(j, s) p(x) tau
  missed    sum_s sum_x w_sx sum_j P(j, s) sum_(e with n_ec > x_c for some c) q_je
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from planner.day.search.day_optimum import least_that_holds, misses_with_size
from planner.day.search.day_runs import RUN_IN_S, DayRuns
from planner.simulator.elastic import Floats, Ints
from planner.simulator.slo_verdict import missed_windows
from planner.solvers.master import paid_usd_per_h
from planner.units import HOUR_S

# The bound is shown for blocks of these lengths, within which windows come in any order.
BLOCKS_S = (HOUR_S, 2 * HOUR_S)
HALF_DAY_S = 12 * HOUR_S
# Limits on work: where a block may have more combinations of sizes, or more histories s, there is no bound.
MOST_SIZES, MOST_HISTORIES = 4096, 20_000


def causal_bound(runs: DayRuns) -> CausalBound | None:
    """The bound for the pools and the traffic of these runs; None where there are too many sizes."""

    def misses(v: int, c: int, size: int) -> bool:
        return misses_with_size(runs, v, runs.own_steps(v), c, size)

    return _measure_needs(runs, misses)


def reacting_bound(runs: DayRuns) -> CausalBound | None:
    """The bound for controllers that see the whole window when it begins; None for too many sizes."""
    # The shortest start-up of all pools, as a share of the longest window (below), gives the lowest bound, so
    # it holds for every pool. If some workers may start warm, which is faster, the bound lets all start warm.
    starts_s = [pool.start_s for pool in runs.terms.pools]
    start_s = min(starts_s + [pool.warm_start_s for pool in runs.given_pools if pool.warm])
    bound = _measure_needs(runs, partial(_misses_in_part, runs, 0.0, start_s))
    later = _measure_needs(runs, partial(_misses_in_part, runs, start_s, math.inf))
    if bound is None or later is None:
        return None
    fixed_frac = min(start_s / float(np.max(bound.lengths_s)), 1.0)
    return replace(bound, later_needs=later.needs, fixed_frac=fixed_frac)


def _measure_needs(runs: DayRuns, misses: Callable[[int, int, int], bool]) -> CausalBound | None:
    """The bound with the needs that simulations show: `misses(v, c, size)` says whether window v is missed
    with `size` workers of pool c. None where blocks would have too many combinations of sizes.
    """
    least_sizes = tuple(pool.least for pool in runs.terms.pools)
    needs = np.tile(np.array(least_sizes, np.int64), (runs.window_count, 1))
    for c, pool in enumerate(runs.terms.pools):
        size = pool.least  # The search for a window's need begins at the need of the window before.
        for v in range(runs.window_count):
            size = least_that_holds(partial(misses, v, c), pool.least, pool.most, size)
            needs[v, c] = size
    # A pool's sizes that may be the cheapest are its least size and its needs (`CausalBound._window_prices`).
    if np.prod([len(set(column.tolist())) + 1 for column in needs.T]) > MOST_SIZES:
        return None
    types = [pool.type for pool in runs.fleet.pools]
    return CausalBound(
        needs=needs,
        lengths_s=np.diff(runs.window_edges_s),
        least_sizes=least_sizes,
        usd_per_h_of=lambda sizes: paid_usd_per_h(zip(types, sizes, strict=True)),
    )


def _misses_in_part(runs: DayRuns, from_s: float, to_s: float, v: int, c: int, size: int) -> bool:
    """Whether window v is missed with `size` workers of pool c from `from_s` to `to_s` after its beginning,
    and with the most workers at all other times and in all other pools.
    """
    window_s, end_s = (float(each) for each in runs.window_edges_s[v : v + 2])
    begin_s, end_s = window_s + from_s, min(window_s + to_s, end_s)
    if end_s <= begin_s:
        return False
    most = runs.terms.most[0]  # Each pool's most workers, which are the same all day.
    few = np.where(np.arange(len(most)) == c, size, most)
    times_s, workers = [begin_s, end_s], [few, most]
    # The slice begins earlier, as in day/search/day_runs.py, so that the window's queue is filled.
    slice_s = max(window_s - RUN_IN_S, 0.0)
    if begin_s > slice_s:
        times_s, workers = [slice_s, *times_s], [most, *workers]
    day_slice = runs.simulate_slice(v, np.array(times_s), np.array(workers))
    if day_slice is None:  # No request arrives.
        return False
    return bool(missed_windows(day_slice.run.simulation, runs.slo, day_slice.window_s))


class _Point(NamedTuple):
    """What some sizes cost in the windows of a block or after a history, and how many of these they miss."""

    usd: float
    missed: float


@dataclass(frozen=True, slots=True, eq=False)
class CausalBound:
    """The data of the programs above, from which the least cost for a number of missed windows follows.

    `needs` (V, C) are n_vc, `lengths_s` (V,) the windows' lengths in seconds, `least_sizes` (C,) the fewest
    workers that pools may have, and `usd_per_h_of` is p(x). `reacting_bound` alone has other `later_needs`
    (V, C), m_vc, than the least sizes, and another `fixed_frac`, f, than the whole window.
    """

    needs: Ints
    lengths_s: Floats
    least_sizes: tuple[int, ...]
    usd_per_h_of: Callable[[Sequence[int]], float]
    later_needs: Ints | None = None
    fixed_frac: float = 1.0

    def least_usd(self, most_missed: float, block_s: float) -> float:
        """The least cost [USD] if `most_missed` windows are missed on average; blocks last `block_s`."""
        return _least_total_usd([self._curve_of_block(block) for block in self._blocks(block_s)], most_missed)

    def least_usd_of_unknown_blocks(
        self, most_missed: float, block_s: float, group_s: float = HALF_DAY_S
    ) -> float | None:
        """The least cost [USD] for a controller that does not know which block it is in; None for too many
        histories. Each block is drawn from the `group_s` of the day in which it lies.
        """
        blocks = self._blocks(block_s)
        group_blocks = max(round(group_s / block_s), 1)
        curves: list[list[_Point]] = []
        for first in range(0, len(blocks), group_blocks):
            group = blocks[first : first + group_blocks]
            kinds = len(np.unique(self.needs[group[0].start : group[-1].stop], axis=0))
            # The histories of a block: multisets of kinds, of fewer windows than the block has.
            if math.comb(kinds + len(group[0]) - 1, kinds) > MOST_HISTORIES:
                return None
            curves += self._curves_of_histories(group)
        return _least_total_usd(curves, most_missed)

    def _blocks(self, block_s: float) -> list[range]:
        """The windows of each block; the last one may have fewer."""
        block_windows = max(round(block_s / float(self.lengths_s.max())), 1)
        count = len(self.needs)
        return [range(v, min(v + block_windows, count)) for v in range(0, max(count, 1), block_windows)]

    def _curve_of_block(self, block: range) -> list[_Point]:
        """The cheapest points of a known block."""
        prices = self._window_prices(block)
        return _cheapest_points(
            *prices, self.lengths_s[block.start : block.stop] / HOUR_S, np.ones(len(block))
        )

    def _curves_of_histories(self, group: Sequence[range]) -> list[list[_Point]]:
        """The cheapest points after each history s of a block that is drawn from `group`."""
        first, end = group[0].start, group[-1].stop
        both_needs = np.concatenate((self.needs, self._later_needs), axis=1)
        kinds, examples, kind_of_window = np.unique(
            both_needs[first:end], axis=0, return_index=True, return_inverse=True
        )
        kind_of_window = kind_of_window.reshape(-1)  # NumPy 2.0.0 gives it two axes.
        counts = [
            np.bincount(kind_of_window[np.array(block) - first], minlength=len(kinds)) for block in group
        ]
        # (blocks, kinds): q_je of the docstring.
        q = np.array([count / len(block) for count, block in zip(counts, group, strict=True)])
        prices = self._window_prices((first + examples).tolist())
        curves = []
        # P(j, s) of all blocks j, by history s.
        histories = {(0,) * len(kinds): np.array([len(block) for block in group]) / (end - first)}
        for k in range(max(map(len, group))):
            # Every block of the group with a k-th window is one draw from the group.
            kth_windows = [block.start + k for block in group if len(block) > k]
            hours = float(self.lengths_s[kth_windows].sum()) / HOUR_S
            following: dict[tuple[int, ...], Floats] = {}
            for history, probability in histories.items():
                of_kind = probability @ q  # The probability of history s and then of each kind e.
                curves.append(_cheapest_points(*prices, of_kind * hours, of_kind * len(kth_windows)))
                for e in np.flatnonzero(of_kind).tolist():
                    after = (*history[:e], history[e] + 1, *history[e + 1 :])
                    following[after] = following.get(after, 0.0) + probability * q[:, e]
            histories = following
        return curves

    @property
    def _later_needs(self) -> Ints:
        """m_vc (V, C)."""
        return (
            np.tile(self.least_sizes, (len(self.needs), 1)) if self.later_needs is None else self.later_needs
        )

    def _window_prices(self, windows: Sequence[int]) -> tuple[Floats, Floats]:
        """What windows cost [USD/h] with each of the sizes x that may be the cheapest: where they are missed
        (sizes,), and where they are kept (sizes, windows); infinite where x is too small.
        """
        needs, later_needs = self.needs[list(windows)], self._later_needs[list(windows)]
        choices = [sorted({least, *needs[:, c].tolist()}) for c, least in enumerate(self.least_sizes)]
        f = self.fixed_frac
        g = min(f, 1 - f)
        price = cache(self.usd_per_h_of)
        missed, kept = [], []
        for x in itertools.product(*choices):
            missed.append(g * price(x) + f * price(x) + (1 - f - g) * price(self.least_sizes))
            kept.append(
                [
                    g * price(x) + f * price(tuple(map(max, x, m))) + (1 - f - g) * price(m)
                    if all(n <= size for n, size in zip(need, x, strict=True))
                    else math.inf
                    for need, m in zip(needs.tolist(), map(tuple, later_needs.tolist()), strict=True)
                ]
            )
        return np.array(missed), np.array(kept)


def _cheapest_points(
    missed_usd_per_h: Floats, kept_usd_per_h: Floats, hours: Floats, counts: Floats
) -> list[_Point]:
    """The convex curve of the cheapest points, over all sizes of `_window_prices` and all choices of which
    windows are kept with them.

    Each window given stands for `counts` (windows,) windows, which last `hours` (windows,) in all.
    """
    occurs = counts > 0
    more_usd = (kept_usd_per_h[:, occurs] - missed_usd_per_h[:, None]) * hours[occurs]
    # Windows that cost least to keep are kept first.
    order = np.argsort(more_usd / counts[occurs], axis=1, kind="stable")
    more_usd = np.take_along_axis(more_usd, order, axis=1)
    none = np.zeros((len(missed_usd_per_h), 1))
    usd = missed_usd_per_h[:, None] * hours.sum() + np.cumsum(np.append(none, more_usd, axis=1), axis=1)
    missed = counts.sum() - np.cumsum(np.append(none, counts[occurs][order], axis=1), axis=1)
    # Windows that cost nothing more are kept.
    is_point = np.isfinite(usd) & (np.append(more_usd, none + math.inf, axis=1) > 0)
    return _lower_hull(list(map(_Point, usd[is_point].tolist(), missed[is_point].tolist())))


def _lower_hull(points: Sequence[_Point]) -> list[_Point]:
    """The lower left hull of these points, from the cheapest to the one that misses least."""
    hull: list[_Point] = []
    for point in sorted(points):
        if hull and point.missed >= hull[-1].missed:
            continue
        while len(hull) > 1:
            before, last = hull[-2:]
            # The last point stays if it lies below the line from the point before it to the new point.
            saved_by_last, saved_by_new = before.missed - last.missed, before.missed - point.missed
            if saved_by_last * (point.usd - before.usd) > saved_by_new * (last.usd - before.usd):
                break
            hull.pop()
        hull.append(point)
    return hull


def _least_total_usd(curves: Sequence[Sequence[_Point]], most_missed: float) -> float:
    """The least sum of costs if a point is chosen on each convex curve, and all together may miss
    `most_missed` windows.
    """
    total_usd = sum(curve[0].usd for curve in curves)
    # The missed windows beyond `most_missed` at the cheapest points; dearer points must avoid them.
    excess = sum(curve[0].missed for curve in curves) - most_missed
    segments = [segment for curve in curves for segment in itertools.pairwise(curve)]

    def usd_per_window_kept(segment: tuple[_Point, _Point]) -> float:
        cheap, dear = segment
        return (dear.usd - cheap.usd) / (cheap.missed - dear.missed)

    # The curves are convex, so taking the cheapest segments first is optimal.
    for cheap, dear in sorted(segments, key=usd_per_window_kept):
        if excess <= 0:
            break
        share = min(excess / (cheap.missed - dear.missed), 1.0)
        total_usd += share * (dear.usd - cheap.usd)
        excess -= share * (cheap.missed - dear.missed)
    return total_usd
