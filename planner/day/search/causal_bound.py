"""What a controller that cannot see ahead pays at least, where it may miss some windows.

Sets   v  window of the SLO, tau_v its length [s]     h  block of neighbouring windows
Data   n_vc   least workers of pool c with which window v need not be missed, with the most of all else
       p(x)   USD/h of x workers, by whole nodes where these are sold
       m      windows that may be missed, in the mean
Vars   w_hx   share of the windows of block h that have x workers

  min   sum_h sum_x w_hx p(x) sum_(v of h) tau_v
  s.t.  sum_h |h| sum_x w_hx share(v of h with n_vc > x_c for some c)  <=  m,     sum_x w_hx = 1

Sizes change at the edges of windows, as those of the optimum do, and who is ready in a window was ordered
before it began. Let the traffic of each window be drawn from those of its block: then nothing that was seen
before says which one comes, so x misses it with the share above, whatever rule chose x. Start-ups are paid
beyond this. So no such rule costs less in the mean over such days, if more workers and less work before never
hurt (day_optimum.MORE). A day that repeats an earlier one to the minute is not such a day; and who acts
within a window may save one whose burst comes more than a start-up after it began.
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
# Windows come in any order within so long; the page shows both.
BLOCKS_S = (3600.0, 7200.0)
MOST_SIZES = 4096  # It bounds the sizes that are compared in a block; of more the bound is not computed.


@dataclass(frozen=True, slots=True, eq=False)
class CausalBound:
    """n_vc `needs` (V, P), tau_v `lengths_s` (V,), the least sizes allowed, and prices of sizes [USD/h]."""

    needs: Ints
    lengths_s: Floats
    least: tuple[int, ...]
    price_usd_per_h: Callable[[Sequence[int]], float]

    def usd(self, missed_windows: float, block_s: float) -> float:
        """The least USD of a day in which so many windows are missed in the mean."""
        windows = max(round(block_s / float(self.lengths_s.max())), 1)
        lines = [
            self._lower_line(range(first, min(first + windows, len(self.needs))))
            for first in range(0, len(self.needs), windows)
        ]
        total_usd = sum(line[0][0] for line in lines)
        left = sum(line[0][1] for line in lines) - missed_windows
        segments = [segment for line in lines for segment in itertools.pairwise(line)]
        # The cheapest USD per window kept come first: lines are convex, so this is the optimum of the LP.
        for (usd, missed), (more_usd, fewer) in sorted(
            segments, key=lambda ends: (ends[1][0] - ends[0][0]) / (ends[0][1] - ends[1][1])
        ):
            if left <= 0:
                break
            share = min(left / (missed - fewer), 1.0)
            total_usd += share * (more_usd - usd)
            left -= share * (missed - fewer)
        return total_usd

    def _lower_line(self, block: range) -> list[tuple[float, float]]:
        """The convex lower line of (USD, windows missed) over all sizes of a block, the cheapest first."""
        own, lengths_s = self.needs[block.start : block.stop], self.lengths_s[block.start : block.stop]
        choices = [sorted({least, *own[:, c].tolist()}) for c, least in enumerate(self.least)]
        points = []
        for sizes in itertools.product(*choices):
            missed = float((own > np.array(sizes)).any(axis=1).sum())
            points.append((self.price_usd_per_h(sizes) * float(lengths_s.sum()) / 3600, missed))
        return _convex(points)


def _convex(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower left hull of points, from the cheapest to the one that misses least."""
    hull: list[tuple[float, float]] = []
    for usd, missed in sorted(points):
        if hull and missed >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (a_usd, a), (b_usd, b) = hull[-2:]
            if (a - b) * (usd - a_usd) > (a - missed) * (b_usd - a_usd):
                break
            hull.pop()
        if hull and usd <= hull[-1][0]:
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
    if np.prod([len(set(column.tolist())) + 1 for column in needs.T]) > MOST_SIZES:
        return None
    types = [pool.type for pool in runs.fleet.pools]
    return CausalBound(
        needs, np.diff(runs.windows_s), least, lambda sizes: paid_usd_per_h(zip(types, sizes, strict=True))
    )
