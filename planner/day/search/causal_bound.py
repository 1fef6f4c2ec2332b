"""A lower bound on the cost of every controller that cannot see ahead, where some windows may be missed.

Sets   v  window of the SLO, tau_v its length [s]     h  block of neighbouring windows
Data   n_vc   least workers of pool c with which window v is kept if all other pools have their most
       p(x)   USD/h of x workers, by whole nodes where these are sold
       m      windows that may be missed, in the mean
Vars   w_hx   share of the windows of block h that have x workers

  min   sum_h sum_x w_hx p(x) sum_(v of h) tau_v
  s.t.  sum_h |h| sum_x w_hx share(v of h with n_vc > x_c for some c)  <=  m,     sum_x w_hx = 1

Sizes change at the edges of windows, as those of the optimum do, and a worker that is ready in a window was
ordered before the window began. Let the traffic of each window be drawn from the windows of its block. Then
nothing that was seen before tells which of them comes, so sizes x miss the window with the share above,
whatever rule chose them. Start-ups cost more on top. So no such rule costs less in the mean over such days,
if more workers and less work before never hurt (MORE in day/search/day_optimum.py). The bound
does not hold for a day that repeats an earlier one to the minute, nor for a controller that acts within a
window: where the burst of a window comes more than a start-up after its beginning, it may keep the window.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from planner.day.search.day_optimum import least_that_holds, misses_with_size
from planner.day.search.day_runs import DayRuns
from planner.solvers.master import paid_usd_per_h

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# Windows come in any order within blocks of this length; the page shows the bound for both lengths.
BLOCKS_S = (3600.0, 7200.0)
MOST_SIZES = 4096  # Where more sizes may have to be compared in a block, the bound is not computed.


@dataclass(frozen=True, slots=True, eq=False)
class CausalBound:
    """n_vc `needs` (V, P), tau_v `lengths_s` (V,), the least sizes allowed, and prices of sizes [USD/h]."""

    needs: Ints
    lengths_s: Floats
    least: tuple[int, ...]
    price_usd_per_h: Callable[[Sequence[int]], float]

    def usd(self, missed_windows: float, block_s: float) -> float:
        """The least USD of a day in which this many windows are missed in the mean; blocks last `block_s`."""
        block_windows = max(round(block_s / float(self.lengths_s.max())), 1)
        lines = [
            self._lower_line(range(first, min(first + block_windows, len(self.needs))))
            for first in range(0, len(self.needs), block_windows)
        ]
        total_usd = sum(line[0][0] for line in lines)
        left = sum(line[0][1] for line in lines) - missed_windows
        segments = [segment for line in lines for segment in itertools.pairwise(line)]

        def usd_per_window_kept(ends: tuple[tuple[float, float], tuple[float, float]]) -> float:
            (usd, missed), (more_usd, fewer) = ends
            return (more_usd - usd) / (missed - fewer)

        # As the lines are convex, taking the cheapest segments first is the optimum.
        for (usd, missed), (more_usd, fewer) in sorted(segments, key=usd_per_window_kept):
            if left <= 0:
                break
            share = min(left / (missed - fewer), 1.0)
            total_usd += share * (more_usd - usd)
            left -= share * (missed - fewer)
        return total_usd

    def _lower_line(self, block: range) -> list[tuple[float, float]]:
        """The convex lower line of (USD, windows missed) over all sizes of a block, the cheapest first."""
        needs, lengths_s = self.needs[block.start : block.stop], self.lengths_s[block.start : block.stop]
        choices = [sorted({least, *needs[:, c].tolist()}) for c, least in enumerate(self.least)]
        points = []
        for sizes in itertools.product(*choices):
            missed = float((needs > np.array(sizes)).any(axis=1).sum())
            points.append((self.price_usd_per_h(sizes) * float(lengths_s.sum()) / 3600, missed))
        return _lower_hull(points)


def _lower_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower left hull of points, from the cheapest to the one that misses least."""
    hull: list[tuple[float, float]] = []
    for usd, missed in sorted(points):
        if hull and missed >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (first_usd, first_missed), (last_usd, last_missed) = hull[-2:]
            is_below_line = (first_missed - last_missed) * (usd - first_usd) > (first_missed - missed) * (
                last_usd - first_usd
            )
            if is_below_line:  # The last point lies below the line from the first one to the new one.
                break
            hull.pop()
        if hull and usd <= hull[-1][0]:  # The new point misses fewer windows at the same cost.
            hull.pop()
        hull.append((usd, missed))
    return hull


def causal_bound(runs: DayRuns) -> CausalBound | None:
    """The bound for the pools and the traffic of these runs; None where there are too many sizes."""
    least = tuple(pool.least for pool in runs.terms.pools)
    needs = np.tile(np.array(least, np.int64), (runs.window_count, 1))
    for c, pool in enumerate(runs.terms.pools):
        size = pool.least
        for v in range(runs.window_count):
            fails = partial(misses_with_size, runs, v, runs.own_steps(v), c)
            size = least_that_holds(fails, pool.least, pool.most, size)
            needs[v, c] = size
    # Sizes are those of the needs, and the pool's least beside them.
    if np.prod([len(set(column.tolist())) + 1 for column in needs.T]) > MOST_SIZES:
        return None
    types = [pool.type for pool in runs.fleet.pools]
    return CausalBound(
        needs=needs,
        lengths_s=np.diff(runs.windows_s),
        least=least,
        price_usd_per_h=lambda sizes: paid_usd_per_h(zip(types, sizes, strict=True)),
    )
