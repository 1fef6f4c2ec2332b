"""Forecasts the request rate y, h seconds after now (t).

    with a season:     y(t + h) = s(t + h) x (mean of y over the last buckets / mean of s over them)
    without a season:  y(t + h) = y(t) + h x (y(t) - y(t - b)) / b

Here s is the mean rate of earlier seasons (days or weeks) at the same time, and b the length of a bucket. In
Hyndman and Athanasopoulos, Forecasting: Principles and Practice, 5.2, the first formula is the seasonal naive
method (without the factor), and the second is the drift method. We do not use statsforecast 2.1.1: it brings
130 MB of wheels (`pip download statsforecast`, 2026-11-21) and needs pandas < 3, where 3.1 is installed.
"""

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from planner.day.controllers.knowledge import Knowledge

# Both constants were chosen by hand.
LAST_BUCKETS = 3  # Today's rates are compared with the season's over this number of full buckets.
# The season is scaled by at most this factor, and at least by its reciprocal: a few quiet or busy minutes are
# no reason to forecast a day that is quieter or busier still.
MOST_SEASON_RATIO = 3.0


class OpenBucket(NamedTuple):
    """The season's bucket that contains now: in the `seconds` measured so far `requests` arrived."""

    bucket: int
    seconds: float
    requests: float

    @property
    def rate_rps(self) -> float:
        return self.requests / self.seconds


class RateForecast:
    """Collects measured rates (`add`) and forecasts the rate at a time of the run (`rate_at`)."""

    def __init__(self, bucket_s: float, season_s: float, knowledge: Knowledge) -> None:
        self.bucket_s, self.season_s = bucket_s, season_s
        self.knowledge = knowledge
        self.buckets = max(round(season_s / bucket_s), 1)
        self.start()

    def start(self) -> None:
        """Forget all rates, and learn the season from the history."""
        # For each bucket of the season: the sum of the rates in the history, and how many rates were added.
        self._sums, self._counts = np.zeros(self.buckets), np.zeros(self.buckets)
        self._recent: deque[tuple[float, float, float]] = deque()  # Time, interval and rate.
        self._open: OpenBucket | None = None
        self._past: deque[tuple[int, float]] = deque(maxlen=LAST_BUCKETS)  # Buckets and their rates.
        history = self.knowledge.history
        if history is None:
            return
        # Times are those of the run, which begins at 0: earlier days have negative times.
        for k, rate in enumerate(history.rates_rps.tolist()):
            begin_s = history.end_s + (k - len(history.rates_rps)) * history.bucket_s
            steps = max(round(history.bucket_s / self.bucket_s), 1)  # The history may have longer buckets.
            for step in range(steps):
                bucket = self._bucket(begin_s + (step + 0.5) * history.bucket_s / steps)
                self._sums[bucket] += rate
                self._counts[bucket] += 1

    @property
    def has_season(self) -> bool:
        """Whether the history has any rates."""
        return bool(self._counts.any())

    def _bucket(self, time_s: float) -> int:
        """The bucket of the season that contains a time of the run."""
        return int((self.knowledge.clock_s + time_s) % self.season_s // self.bucket_s) % self.buckets

    def add(self, time_s: float, interval_s: float, rate_rps: float) -> None:
        """Add the rate of the `interval_s` before `time_s`."""
        self._recent.append((time_s, interval_s, rate_rps))
        # The drift needs the last two buckets, or two rates if intervals are longer than buckets.
        while self._recent[0][0] <= time_s - 2 * self.bucket_s and len(self._recent) > 2:
            self._recent.popleft()
        bucket = self._bucket(time_s - interval_s / 2)  # An interval counts to the bucket of its middle.
        if self._open is not None and self._open.bucket != bucket:
            self._past.append((self._open.bucket, self._open.rate_rps))
            self._open = None
        _, seconds, requests = self._open or (bucket, 0.0, 0.0)
        self._open = OpenBucket(bucket, seconds + interval_s, requests + rate_rps * interval_s)

    def mean_rps(self, over_s: float, ago_s: float = 0.0) -> float:
        """The mean rate over `over_s`, which end `ago_s` before the last reading; NaN without rates."""
        if not self._recent:
            return math.nan
        end_s = self._recent[-1][0] - ago_s
        spans = [(span, rate) for ended_s, span, rate in self._recent if end_s - over_s < ended_s <= end_s]
        total_s = sum(span for span, _ in spans)
        return sum(span * rate for span, rate in spans) / total_s if total_s else math.nan

    def rate_at(self, time_s: float) -> float:
        """The forecast for a time of the run [requests/s]; without any rate yet the season's rate, or 0."""
        season_then_rps = self._season_rps(self._bucket(time_s))
        if not self._recent:
            return 0.0 if math.isnan(season_then_rps) else season_then_rps
        # (season's rate, today's rate) of each of the last buckets, the open one included. A bucket without
        # history has a season's rate of NaN, and NaN > 0 is false.
        last_buckets = [*self._past, *([(self._open.bucket, self._open.rate_rps)] if self._open else [])]
        pairs = [
            (season_rps, today_rps)
            for bucket, today_rps in last_buckets
            if (season_rps := self._season_rps(bucket)) > 0
        ]
        if pairs and not math.isnan(season_then_rps):
            ratio = sum(today_rps for _, today_rps in pairs) / sum(season_rps for season_rps, _ in pairs)
            return season_then_rps * min(max(ratio, 1 / MOST_SEASON_RATIO), MOST_SEASON_RATIO)
        last = self.mean_rps(self.bucket_s)
        before = self.mean_rps(self.bucket_s, ago_s=self.bucket_s)  # NaN in the first bucket of a run.
        ahead_s = max(time_s - self._recent[-1][0], 0.0)
        drift = 0.0 if math.isnan(before) else (last - before) / self.bucket_s
        return max(last + drift * ahead_s, 0.0)

    def _season_rps(self, bucket: int) -> float:
        """The mean rate of earlier seasons in a bucket; NaN if there is none."""
        return float(self._sums[bucket] / self._counts[bucket]) if self._counts[bucket] else math.nan
