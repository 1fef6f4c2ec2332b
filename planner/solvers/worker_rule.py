"""Aladdin's rule for the number of workers, N = ceil(k5 r + c5), and when to fit it anew.

The rule is fitted to pairs (arrival rate, workers that sufficed). The paper leaves out rates below some R, at
which too few requests arrive in a heartbeat of the controller to represent the traffic's lengths (eq. 7 of
arXiv:2405.06856); the pairs here come from simulations of enough requests. The paper asks for change-point
detection without saying which. `SeriesLevel` is Page's two-sided CUSUM (Biometrika 1954) in its self-starting
form (Hawkins, The Statistician 1987), which takes one heartbeat after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.domain import ROUNDING
from planner.errors import InputError

DRIFT_SIGMA = 0.5  # The CUSUM's allowance: half the shift that should be detected, in standard deviations.
THRESHOLD_SIGMA = 8.0  # With that allowance there is one false alarm in some ten thousand heartbeats.
LEAST_ABOVE = 1e-6  # The fitted line is at least this much above the counts minus one, so that they round up.


@dataclass(frozen=True, slots=True)
class WorkerRule:
    """N = ceil(slope r + offset); the offset may be < 0."""

    slope_workers_per_rps: float
    offset_workers: float

    def workers(self, rate_rps: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Workers at these rates, at least one."""
        line = self.slope_workers_per_rps * np.asarray(rate_rps, float) + self.offset_workers
        workers: npt.NDArray[np.int64] = np.maximum(np.ceil(line - ROUNDING), 1).astype(np.int64)
        return workers


def fit_worker_rule(rate_rps: npt.ArrayLike, workers: npt.ArrayLike) -> WorkerRule:
    """Fit the rule by least squares to the pairs with a rate above 0. Then the line is raised until the rule
    gives no fewer workers than any of these pairs.

    Counts were rounded up, so on average they are half a worker above the line. That half is subtracted
    first.
    """
    rate, count = np.asarray(rate_rps, float), np.asarray(workers, float)
    has_rate = rate > 0
    if rate.shape != count.shape or len(np.unique(rate[has_rate])) < 2:
        raise InputError(
            f"the worker rule needs pairs at two rates above 0, found {len(np.unique(rate[has_rate]))}"
        )
    slope, offset = np.polyfit(rate[has_rate], count[has_rate] - 0.5, 1)
    slope = max(float(slope), 0.0)
    # ceil(line) >= count if the line is above count - 1.
    offset = max(float(offset), float((count[has_rate] - 1 - slope * rate[has_rate]).max()) + LEAST_ABOVE)
    return WorkerRule(slope, offset)


class SeriesLevel:
    """The level of a series that is given value by value; `mean` is the mean of the `count` values so far.
    The first `learn` values only set the level; after them shifts of it are detected.
    """

    def __init__(
        self, learn: int, drift_sigma: float = DRIFT_SIGMA, threshold_sigma: float = THRESHOLD_SIGMA
    ) -> None:
        self.learn, self.drift_sigma, self.threshold_sigma = learn, drift_sigma, threshold_sigma
        self.count, self.mean, self._squares = 0, 0.0, 0.0
        # For a shift up (1) and down (-1): the CUSUM, and the number of the value at which it last left zero.
        self._sums = {1: 0.0, -1: 0.0}
        self._began = {1: learn, -1: learn}

    def add(self, value: float) -> int | None:
        """How many values ago the level shifted, if this value shows that it did. Otherwise None, and the
        value counts towards the level.
        """
        count = self.count
        if count >= self.learn:
            # Equal values have no spread. It is then taken to be a rounding error, so any other value is a
            # shift.
            spread = max(math.sqrt(self._squares / (count - 1)), ROUNDING * max(abs(self.mean), 1.0))
            # The last factor is for the error of the mean itself.
            z = (value - self.mean) / spread * math.sqrt(count / (count + 1))
            for side in self._sums:
                self._sums[side] = max(0.0, self._sums[side] + side * z - self.drift_sigma)
                if self._sums[side] == 0.0:
                    self._began[side] = count + 1
                elif self._sums[side] > self.threshold_sigma:
                    return count - self._began[side]
        step = value - self.mean
        self.count += 1
        self.mean += step / self.count
        self._squares += step * (value - self.mean)
        return None
