"""A lower bound on the cost of every controller that cannot see ahead and may miss some windows. A rule is
here the way in which such a controller decides.

Sets   v  window of the SLO, tau_v its length [s]     h  block of |h| neighbouring windows
Data   n_vc   least workers of pool c with which window v is kept if all other pools have their most
       p(x)   USD/h of x workers, by whole nodes where these are sold
       m      windows that may be missed, on average
Vars   w_hx   share of the windows of block h that have x workers

  min   sum_h sum_x w_hx p(x) sum_(v of h) tau_v
  s.t.  sum_h |h| sum_x w_hx share(v of h with n_vc > x_c for some c)  <=  m,     sum_x w_hx = 1

Sizes change at the edges of windows, as in the optimum, and a worker that is ready in a window was ordered
before the window began. Let the traffic of each window be drawn at random from the windows of its block. Then
no rule can know which window comes next. Whatever rule chose sizes x, they miss the window with the
probability share(...). Start-ups cost more on top. So no rule costs less on average over such days, if more
workers never hurt and less earlier work never hurts (MORE in day/search/day_optimum.py). The bound does not
hold for a day that repeats an earlier one to the minute, nor for a controller that acts within a window: if
the burst of a window comes more than a start-up after the window's beginning, such a controller may still
keep the window.

`reacting_bound` holds for rules that see the whole window when it begins. The workers that they order then
are ready start_s later, so sizes also change start_s after each edge. For this bound n_vc is the size that
the window needs in its first start_s, and m_vc the size that it needs afterwards. Where x is below m_v, a
rule that keeps the window pays m_v from its beginning. Its cost in a window that begins at 0 is

  p(max(x, m_v)) from 0 to start_s,     p(m_v) until start_s before the end,     p(x of the next window) then

and a window that is missed has the least sizes in place of m_v.

Both bounds hold even for rules that know, as a block begins, which windows it has. A rule that must learn
this pays more (`usd_of_unknown_blocks`). Let each block be drawn from the blocks of its half day, block j
with probability p_j, its share of the half day's windows. Windows with equal needs are of one kind e, and a
rule cannot tell them apart; q_je is the share of kind e in block j. After k windows of a block a rule knows
its history s: s_e of them were of kind e. The program above then has w_sx in place of w_hx, the probability
that sizes are x after s:

  P(j, s) = p_j k! prod_e q_je^s_e / s_e!
  cost      sum_s sum_x w_sx sum_j P(j, s) p(x) tau
  missed    sum_s sum_x w_sx sum_j P(j, s) sum_(e with n_ec > x_c for some c) q_je
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

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


@dataclass(frozen=True, slots=True, eq=False)
class CausalBound:
    """The data of the module's docstring, from which `usd` computes the bound for a number of missed windows.

    `needs` (V, C) are n_vc, `lengths_s` (V,) are tau_v, `least` the least sizes of pools, and
    `price_usd_per_h` is p(x). `later_needs` (V, C) are m_vc, and `first_frac` is the share of a window in
    which sizes cannot change.
    """

    needs: Ints
    lengths_s: Floats
    least: tuple[int, ...]
    price_usd_per_h: Callable[[Sequence[int]], float]
    later_needs: Ints | None = None  # None: the least sizes.
    first_frac: float = 1.0

    def usd(self, most_missed: float, block_s: float) -> float:
        """The least cost [USD] if `most_missed` windows are missed on average; blocks last `block_s`."""
        lines = [self._cheapest_line(block) for block in self._blocks(block_s)]
        return _cheapest_usd(lines, most_missed)

    def usd_of_unknown_blocks(
        self, most_missed: float, block_s: float, group_s: float = HALF_DAY_S
    ) -> float | None:
        """The least cost [USD] if a rule does not know which block it is in; None for too many histories.

        The day is cut into groups of blocks that last `group_s`; each block is drawn from its group.
        """
        blocks = self._blocks(block_s)
        group_blocks = max(round(group_s / block_s), 1)
        lines: list[list[tuple[float, float]]] = []
        for first in range(0, len(blocks), group_blocks):
            group = blocks[first : first + group_blocks]
            kinds = len(np.unique(self.needs[group[0].start : group[-1].stop], axis=0))
            # The histories of a block: multisets of kinds, of fewer windows than the block has.
            if math.comb(kinds + len(group[0]) - 1, kinds) > MOST_HISTORIES:
                return None
            lines += self._lines_of_histories(group)
        return _cheapest_usd(lines, most_missed)

    def _blocks(self, block_s: float) -> list[range]:
        """The windows of each block; the last one may have fewer."""
        block_windows = max(round(block_s / float(self.lengths_s.max())), 1)
        count = len(self.needs)
        return [range(v, min(v + block_windows, count)) for v in range(0, max(count, 1), block_windows)]

    def _lines_of_histories(self, group: Sequence[range]) -> list[list[tuple[float, float]]]:
        """The line of each history s: the lower hull of (USD, windows missed) over all sizes.

        Blocks are drawn from `group`.
        """
        first, end = group[0].start, group[-1].stop
        kinds, kind_of_window = np.unique(self._both_needs[first:end], axis=0, return_inverse=True)
        kind_of_window = kind_of_window.reshape(-1)  # NumPy 2.0.0 gives it two axes.
        # (blocks, kinds): q_je of the docstring.
        counts = [
            np.bincount(kind_of_window[np.array(block) - first], minlength=len(kinds)) for block in group
        ]
        q = np.array([count / len(block) for count, block in zip(counts, group, strict=True)])
        prices = self._prices(kinds)
        lines = []
        # P(j, s) of all blocks j, by history s.
        histories = {(0,) * len(kinds): np.array([len(block) for block in group]) / (end - first)}
        for k in range(max(map(len, group))):
            # Every block of the group with a k-th window is one draw from the group.
            kth_windows = [block.start + k for block in group if len(block) > k]
            hours = float(self.lengths_s[kth_windows].sum()) / HOUR_S
            following: dict[tuple[int, ...], Floats] = {}
            for history, probability in histories.items():
                of_kind = probability @ q  # The probability of history s and then of each kind e.
                lines.append(_line(*prices, of_kind * hours, of_kind * len(kth_windows)))
                for e in np.flatnonzero(of_kind).tolist():
                    after = (*history[:e], history[e] + 1, *history[e + 1 :])
                    following[after] = following.get(after, 0.0) + probability * q[:, e]
            histories = following
        return lines

    def _cheapest_line(self, block: range) -> list[tuple[float, float]]:
        """The line of a block: the lower hull of (USD, windows missed) over all sizes."""
        prices = self._prices(self._both_needs[block.start : block.stop])
        return _line(*prices, self.lengths_s[block.start : block.stop] / HOUR_S, np.ones(len(block)))

    @property
    def _both_needs(self) -> Ints:
        """n_vc and m_vc in one row for each window (V, 2 C)."""
        later = np.tile(self.least, (len(self.needs), 1)) if self.later_needs is None else self.later_needs
        return np.concatenate((self.needs, later), axis=1)

    def _prices(self, both_needs: Ints) -> tuple[Floats, Floats]:
        """What windows with these rows of `_both_needs` cost [USD/h] with each of the sizes x that may be the
        cheapest: where they are missed (sizes,), and where they are kept (sizes, rows); infinite where x is
        too small.
        """
        needs, later_needs = np.split(both_needs, 2, axis=1)
        choices = [sorted({least, *needs[:, c].tolist()}) for c, least in enumerate(self.least)]
        next_frac = min(self.first_frac, 1 - self.first_frac)  # Workers of the next window start.
        between_frac = 1 - self.first_frac - next_frac
        price = cache(self.price_usd_per_h)
        missed, kept = [], []
        for x in itertools.product(*choices):
            begun_usd_per_h = next_frac * price(x)
            missed.append(begun_usd_per_h + self.first_frac * price(x) + between_frac * price(self.least))
            kept.append(
                [
                    begun_usd_per_h + self.first_frac * price(tuple(map(max, x, m))) + between_frac * price(m)
                    if all(n <= size for n, size in zip(need, x, strict=True))
                    else math.inf
                    for need, m in zip(needs.tolist(), map(tuple, later_needs.tolist()), strict=True)
                ]
            )
        return np.array(missed), np.array(kept)


def _line(missed: Floats, kept: Floats, hours: Floats, counts: Floats) -> list[tuple[float, float]]:
    """The lower hull of (USD, windows missed) over all sizes of `_prices`.

    Each row stands for `counts` (rows,) windows, which last `hours` (rows,) in all.
    """
    is_seen = counts > 0
    more_usd = (kept[:, is_seen] - missed[:, None]) * hours[is_seen]
    # Windows that cost least to keep are kept first.
    order = np.argsort(more_usd / counts[is_seen], axis=1, kind="stable")
    more_usd = np.take_along_axis(more_usd, order, axis=1)
    none = np.zeros((len(missed), 1))
    usd = missed[:, None] * hours.sum() + np.cumsum(np.append(none, more_usd, axis=1), axis=1)
    windows_missed = counts.sum() - np.cumsum(np.append(none, counts[is_seen][order], axis=1), axis=1)
    # Windows that cost nothing more are kept.
    is_point = np.isfinite(usd) & (np.append(more_usd, none + math.inf, axis=1) > 0)
    points = list(zip(usd[is_point].tolist(), windows_missed[is_point].tolist(), strict=True))
    return _lower_hull(points)


def _cheapest_usd(lines: Sequence[Sequence[tuple[float, float]]], most_missed: float) -> float:
    """The least sum of costs if a point is chosen on each convex line of (USD, windows missed).

    All points together may miss `most_missed` windows.
    """
    total_usd = sum(line[0][0] for line in lines)
    # The missed windows beyond `most_missed` at the cheapest points; dearer points must avoid them.
    excess = sum(line[0][1] for line in lines) - most_missed
    segments = [segment for line in lines for segment in itertools.pairwise(line)]

    def usd_per_window_kept(ends: tuple[tuple[float, float], tuple[float, float]]) -> float:
        (usd, missed), (more_usd, fewer) = ends
        return (more_usd - usd) / (missed - fewer)

    # The lines are convex, so taking the cheapest segments first is optimal.
    for (usd, missed), (more_usd, fewer) in sorted(segments, key=usd_per_window_kept):
        if excess <= 0:
            break
        share = min(excess / (missed - fewer), 1.0)
        total_usd += share * (more_usd - usd)
        excess -= share * (missed - fewer)
    return total_usd


def _lower_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower left hull of points (USD, windows missed), from the cheapest to the one that misses least."""
    hull: list[tuple[float, float]] = []
    for usd, missed in sorted(points):
        if hull and missed >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (first_usd, first_missed), (last_usd, last_missed) = hull[-2:]
            # The last point stays if it lies below the line from the point before it to the new point.
            saved_by_last, saved_by_new = first_missed - last_missed, first_missed - missed
            if saved_by_last * (usd - first_usd) > saved_by_new * (last_usd - first_usd):
                break
            hull.pop()
        hull.append((usd, missed))
    return hull


def causal_bound(runs: DayRuns) -> CausalBound | None:
    """The bound for the pools and the traffic of these runs; None where there are too many sizes."""
    # `own_steps(v)` are the intervals of the timetable in window v.
    return _bound_of(runs, lambda v, c, size: misses_with_size(runs, v, runs.own_steps(v), c, size))


def reacting_bound(runs: DayRuns) -> CausalBound | None:
    """The bound for rules that see the whole window when it begins; None where there are too many sizes."""
    # The shortest start-up of all pools, as a share of the longest window (below), gives the lowest bound, so
    # it holds for every pool. If some workers may start warm, which is faster, the bound lets all start warm.
    starts_s = [pool.start_s for pool in runs.terms.pools]
    start_s = min(starts_s + [pool.warm_start_s for pool in runs.given_pools if pool.warm])
    bound = _bound_of(runs, partial(_misses_in_part, runs, 0.0, start_s))
    later = _bound_of(runs, partial(_misses_in_part, runs, start_s, math.inf))
    if bound is None or later is None:
        return None
    first_frac = min(start_s / float(np.max(bound.lengths_s)), 1.0)
    return replace(bound, later_needs=later.needs, first_frac=first_frac)


def _misses_in_part(runs: DayRuns, from_s: float, to_s: float, window: int, c: int, size: int) -> bool:
    """Whether a window is missed with `size` workers of pool `c` between these times after its beginning, and
    otherwise the most of every pool.
    """
    begin_s, end_s = (float(each) for each in runs.window_edges_s[window : window + 2])
    begin_s, end_s = begin_s + from_s, min(begin_s + to_s, end_s)
    if end_s <= begin_s:
        return False
    most = runs.terms.most[0]  # Each pool's most workers, which are the same all day.
    few = np.where(np.arange(len(most)) == c, size, most)
    times_s, workers = [begin_s, end_s], [few, most]
    # The slice begins earlier, as in day/search/day_runs.py, so that the window's queue is filled.
    first_s = max(float(runs.window_edges_s[window]) - RUN_IN_S, 0.0)
    if begin_s > first_s:
        times_s, workers = [first_s, *times_s], [most, *workers]
    day_slice = runs.simulate_slice(window, np.array(times_s), np.array(workers))
    if day_slice is None:  # No request arrives.
        return False
    return bool(missed_windows(day_slice.run.simulation, runs.slo, day_slice.window_s))


def _bound_of(runs: DayRuns, misses: Callable[[int, int, int], bool]) -> CausalBound | None:
    """The bound in which window v needs the least size of pool c with which `misses(v, c, size)` is false;
    None where blocks would have too many combinations of sizes.
    """
    least = tuple(pool.least for pool in runs.terms.pools)
    needs = np.tile(np.array(least, np.int64), (runs.window_count, 1))
    for c, pool in enumerate(runs.terms.pools):
        size = pool.least  # The search for a window's size begins at the size of the window before.
        for v in range(runs.window_count):
            size = least_that_holds(partial(misses, v, c), pool.least, pool.most, size)
            needs[v, c] = size
    # A pool's sizes x are its needs and its least (`CausalBound`).
    if np.prod([len(set(column.tolist())) + 1 for column in needs.T]) > MOST_SIZES:
        return None
    types = [pool.type for pool in runs.fleet.pools]
    return CausalBound(
        needs=needs,
        lengths_s=np.diff(runs.window_edges_s),
        least=least,
        price_usd_per_h=lambda sizes: paid_usd_per_h(zip(types, sizes, strict=True)),
    )
