"""Gaps between tokens, counted by their length instead of kept: of long runs, which have billions of them.

A gap is counted in one of 2^16 bins for each power of two, told by the first bits of the number. The longest
gap of each bin is kept, so a percentile is a gap that was seen, and at most 2^-16 above the gap of its rank.
Whether a limit is kept does not depend on it: the kernel counts what is above a limit exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from planner.domain import nearest_rank
from planner.simulator.numba_compile import entry_jit

BITS = 52 - 16  # of a double's fraction that do not tell bins apart
LOWEST, HIGHEST = (int(np.float64(s).view(np.int64)) >> BITS for s in (2.0**-24, 2.0**24))
BINS = HIGHEST - LOWEST + 2  # shorter gaps, none included, are in the first one, longer ones in the last


class GapCounts:
    """The gaps that ended within [start_s, end_s], each counted for every request that saw it."""

    def __init__(self, start_s: float, end_s: float) -> None:
        self._window = np.array([start_s, end_s])
        self._counts = np.zeros(BINS, np.int64)
        self._longest_s = np.zeros(BINS)
        self._sum_s = np.zeros(1)

    def add(self, runs: npt.NDArray[np.void]) -> None:
        """Runs of layout.RUN."""
        if len(runs):
            bits = np.zeros(1)
            _count(runs, self._window, self._counts, self._longest_s, self._sum_s, bits, bits.view(np.int64))

    @property
    def total(self) -> int:
        return int(self._counts.sum())

    @property
    def mean_s(self) -> float:
        """NaN for none."""
        return float(self._sum_s[0] / self.total) if self.total else float("nan")

    def percentile_s(self, percentile_frac: float) -> float:
        """Nearest-rank percentile, as the module says; NaN for none."""
        total = self.total
        if not total:
            return float("nan")
        rank = nearest_rank(percentile_frac, total)
        return float(self._longest_s[int(np.searchsorted(np.cumsum(self._counts), rank))])


@entry_jit
def _count(runs: Any, window: Any, counts: Any, longest_s: Any, sum_s: Any, value: Any, bits: Any) -> None:
    """`value` (1,) and `bits` are the same eight bytes."""
    total = 0.0
    for k in range(len(runs)):
        sequences, steps = runs[k].sequences, runs[k].steps
        if sequences <= 0:
            continue
        start_s, first_s, growth_s = runs[k].start_s, runs[k].first_s, runs[k].growth_s
        for j in range(steps):
            # added up as in the kernel, to the last bit
            end_s = start_s + (first_s * (j + 1) + growth_s * ((j + 1) * j / 2.0))
            if end_s < window[0] or end_s > window[1]:
                continue
            gap_s = first_s + growth_s * j
            value[0] = gap_s
            at = min(max((bits[0] >> BITS) - LOWEST + 1, 0), BINS - 1)
            counts[at] += sequences
            longest_s[at] = max(longest_s[at], gap_s)
            total += gap_s * sequences
    sum_s[0] += total
