"""Aladdin's rule for the number of workers, N = ceil(k5 r + c5) at the arrival rate r, and when to fit it
anew (arXiv:2405.06856).

The rule is fitted to pairs (arrival rate, workers that were enough). The paper leaves out rates below some R,
at which too few requests arrive in a heartbeat (a period of the controller) to represent the traffic's
lengths (its equation 7). Here no rate is left out, because the pairs come from simulations of enough
requests. To know when to fit anew, the paper asks for change-point detection, without saying which.
`SeriesLevel` is Page's two-sided CUSUM (Biometrika 1954) in its self-starting form (Hawkins, The Statistician
1987), which takes one value after the other.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.domain import ROUNDING
from planner.errors import InputError

DRIFT_SIGMA = 0.5  # The CUSUM's allowance: half the shift that should be detected, in standard deviations.
# A shift is detected when the CUSUM is above this. With the allowance DRIFT_SIGMA there is one false alarm in
# some ten thousand heartbeats.
THRESHOLD_SIGMA = 8.0
# The fitted line is at least this much above (count - 1) of each pair, and rounded up it is at least count.
LEAST_ABOVE = 1e-6
HALF_WORKER = 0.5  # Counts were rounded up, so on average they are this much above the line.


@dataclass(frozen=True, slots=True)
class WorkerRule:
    """N = ceil(slope r + offset); slope and offset are the paper's k5 and c5. The offset may be below 0."""

    slope_workers_per_rps: float
    offset_workers: float

    def workers(self, rate_rps: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The number of workers at each of these rates, at least one."""
        line = self.slope_workers_per_rps * np.asarray(rate_rps, float) + self.offset_workers
        workers: npt.NDArray[np.int64] = np.maximum(np.ceil(line - ROUNDING), 1).astype(np.int64)
        return workers


def fit_worker_rule(rate_rps: npt.ArrayLike, workers: npt.ArrayLike) -> WorkerRule:
    """Fit the rule by least squares to the pairs with a rate above 0. Then the line is raised until the rule
    gives no fewer workers than any of these pairs.

    HALF_WORKER is subtracted from the counts first. Raises InputError without two different rates above 0.
    """
    rate, count = np.asarray(rate_rps, float), np.asarray(workers, float)
    has_rate = rate > 0
    if rate.shape != count.shape or len(np.unique(rate[has_rate])) < 2:
        raise InputError(
            f"the worker rule needs pairs at two rates above 0, found {len(np.unique(rate[has_rate]))}"
        )
    slope, offset = np.polyfit(rate[has_rate], count[has_rate] - HALF_WORKER, 1).tolist()
    if slope < 0:  # The counts fall with the rate: the level line that fits best.
        slope, offset = 0.0, float(count[has_rate].mean()) - HALF_WORKER
    # The rule gives at least `count` where the line is above count - 1.
    offset = max(offset, float((count[has_rate] - 1 - slope * rate[has_rate]).max()) + LEAST_ABOVE)
    return WorkerRule(slope, offset)


class SeriesLevel:
    """The level of a series that is given value by value, and whether it shifts. `mean` is the level, the
    mean of the `count` values so far. The first `learn` values (at least 2) only set the level; with later
    ones shifts are detected. After a shift a new SeriesLevel is needed.
    """

    def __init__(
        self, learn: int, drift_sigma: float = DRIFT_SIGMA, threshold_sigma: float = THRESHOLD_SIGMA
    ) -> None:
        self.learn, self.drift_sigma, self.threshold_sigma = learn, drift_sigma, threshold_sigma
        self.count, self.mean, self._squares = 0, 0.0, 0.0
        # For a shift up (1) and down (-1): the CUSUM, and the number of the first value since it was zero.
        self._sums = {1: 0.0, -1: 0.0}
        self._began = {1: learn, -1: learn}

    def add(self, value: float) -> int | None:
        """How many values ago the level shifted, if this value shows that it did. Otherwise None, and the
        value counts towards the level.
        """
        count = self.count
        if count >= self.learn:
            # The standard deviation of the values. If they are equal it is taken to be a rounding error, so
            # that any other value shows a shift.
            spread = max(math.sqrt(self._squares / (count - 1)), ROUNDING * max(abs(self.mean), 1.0))
            # The last factor allows for the error of the mean itself.
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
