"""A histogram of gaps between tokens, for long simulations, which have billions of them.

There are 2^16 bins from each power of two seconds to the next, so that the exponent of a gap and the first 16
bits of its fraction are the number of its bin. The longest gap of each bin is kept, and a percentile is the
longest gap of its bin: a gap that occurred. Between SHORTEST_S and LONGEST_S it exceeds the exact percentile
by at most 0.0015 % (2^-16). Whether a limit holds does not depend on this histogram: the kernel counts the
gaps above a limit exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from planner.domain import nearest_rank
from planner.simulator.numba_compile import entry_jit

DROPPED_BITS = 52 - 16  # A double's fraction has 52 bits, of which the first 16 decide the bin.
SHORTEST_S, LONGEST_S = 2.0**-24, 2.0**24  # Shorter and longer gaps are in the first and the last bin.
# The leading bits of the two, as whole numbers.
LOWEST, HIGHEST = (int(np.float64(gap_s).view(np.int64)) >> DROPPED_BITS for gap_s in (SHORTEST_S, LONGEST_S))
BINS = HIGHEST - LOWEST + 2  # One bin below SHORTEST_S, and one from LONGEST_S on.


class GapCounts:
    """A histogram of the gaps that ended within [start_s, end_s], seconds of the simulation. A gap of a step
    counts once for every request that had it.
    """

    def __init__(self, start_s: float, end_s: float) -> None:
        self._window = np.array([start_s, end_s])
        self._counts = np.zeros(BINS, np.int64)
        self._longest_s = np.zeros(BINS)
        self._sum_s = np.zeros(1)

    def add(self, runs: npt.NDArray[np.void]) -> None:
        """Count the gaps of these runs of steps (R,), RUN of planner/simulator/layout.py. Step j of a run,
        from 0 on, takes first_s + growth_s * j, and gives a token to each of its `sequences` requests.
        """
        if len(runs):
            value = np.zeros(1)  # See `_count_gaps`.
            _count_gaps(
                runs, self._window, self._counts, self._longest_s, self._sum_s, value, value.view(np.int64)
            )

    @property
    def total(self) -> int:
        """How many gaps between tokens were counted."""
        return int(self._counts.sum())

    @property
    def mean_s(self) -> float:
        """The mean gap [s]; NaN without gaps."""
        return float(self._sum_s[0] / self.total) if self.total else float("nan")

    def percentile_s(self, percentile_frac: float) -> float:
        """Nearest-rank percentile [s], at most 0.0015 % above the exact one; NaN without gaps."""
        total = self.total
        if not total:
            return float("nan")
        rank = nearest_rank(percentile_frac, total)  # Ranks begin with 1.
        return float(self._longest_s[int(np.searchsorted(np.cumsum(self._counts), rank))])


@entry_jit
def _count_gaps(
    runs: Any, window: Any, counts: Any, longest_s: Any, sum_s: Any, value: Any, bits: Any
) -> None:
    """Count the gaps of these runs.

    `value` (1,) and `bits` (1,) are the same eight bytes, as a float and as an integer: compiled code has no
    other way to a float's bits.
    """
    added_s = 0.0
    for k in range(len(runs)):
        sequences, steps = runs[k].sequences, runs[k].steps
        if sequences <= 0:  # A run of prompts alone has no gaps.
            continue
        start_s, first_s, growth_s = runs[k].start_s, runs[k].first_s, runs[k].growth_s
        for j in range(steps):
            # Computed as the kernel does (planner/simulator/counting.py), to the last bit: a gap that ends at
            # an edge of the window must be within the window in both counts, or in neither.
            end_s = start_s + (first_s * (j + 1) + growth_s * ((j + 1) * j / 2.0))
            if end_s < window[0] or end_s > window[1]:
                continue
            gap_s = first_s + growth_s * j
            value[0] = gap_s
            bin_number = min(max((bits[0] >> DROPPED_BITS) - LOWEST + 1, 0), BINS - 1)
            counts[bin_number] += sequences
            longest_s[bin_number] = max(longest_s[bin_number], gap_s)
            added_s += gap_s * sequences
    sum_s[0] += added_s
