"""fleetplan's own controller: it forecasts the load, and takes the workers that the plan found enough for it.

`by: load`, where the plan has load rules (knowledge.LoadRule): the workers of a pool grow with its load, the
95th percentile of the work that arrived in spans of some seconds, over the last window or a longer `memory`.
A long request counts more than a short one, and a burst more than the mean. With a long memory, many bursts
keep workers for a while, but a single burst does not. A rule is fitted on windows of earlier traffic whose
least sizes were simulated (planner/day/search/load_rules.py).

`by: rate`: the sizes of the capacity table for the present rate, which is the higher of the last reading's
rate and the mean over the last bucket.

Load or rate is multiplied by the growth that the forecast (planner/day/controllers/forecasting.py) sees up to
`start-up + every` from now, and by 1 + `headroom`. Then the load or rate that serves the waiting prompts
within `drain` is added. A size falls only if no decision within `hold` asked for more.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.day.controllers.forecasting import RateForecast
from planner.day.controllers.knowledge import (
    Knowledge,
    LoadRule,
    RecentMaximum,
    is_before_traffic,
    mean_lengths,
    peak_load,
)
from planner.day.controllers.settings import ControllerSettings, setting
from planner.domain import ROUNDING
from planner.simulator.elastic import MetricsReading
from planner.units import DAY_S


@dataclass(frozen=True, slots=True)
class FleetplanSettings(ControllerSettings):
    """The settings of `fleetplan`: its rules, what it adds to the forecast, and how slowly pools shrink."""

    headroom_frac: float = setting(0.1, "traffic that is added to the forecast", most=10.0)
    floor_frac: float = setting(
        0.0, "by load: never fewer workers than this share of earlier windows needed", most=1.0
    )
    hold_s: float = setting(300.0, "it shrinks to the largest size wanted within this time", most=DAY_S)
    drain_s: float = setting(60.0, "time in which waiting prompts are served; 0: not counted", most=3600.0)
    memory_s: float | None = setting(
        None, "the load is of the last so long; none: a window of the SLO", most=DAY_S
    )
    by: str = setting(
        "load", "what its rules are over; load only where the plan has them", choices=("load", "rate")
    )
    fill: bool = setting(True, "use the idle GPUs of nodes that are sold whole")
    ahead_s: float | None = setting(None, "how far ahead; none: start-up + every", most=DAY_S)
    season_s: float = setting(DAY_S, "period of the traffic", least=600.0)
    bucket_s: float = setting(300.0, "length of the means it learns", least=10.0, most=7200.0)
    every_s: float = setting(15.0, "time between decisions", least=1.0, most=3600.0)
    lag_s: float = setting(15.0, "age of the metrics", most=600.0)


MOST_GROWTH = 3.0  # Growth is capped at this factor: a forecast of more is more likely an error.


class Fleetplan:
    """Sizes by the plan's rules over load, or by its capacity table, for the load some minutes ahead."""

    def __init__(self, settings: FleetplanSettings, knowledge: Knowledge) -> None:
        self.is_by_load = settings.by == "load" and bool(knowledge.rules and knowledge.engines)
        if not self.is_by_load:
            knowledge.require_facts("fleetplan", "capacity")
        self.settings, self.knowledge = settings, knowledge
        self.rules = tuple(rule.with_floor(settings.floor_frac) for rule in knowledge.rules)
        self.every_s, self.lag_s = settings.every_s, settings.lag_s
        self.forecast = RateForecast(settings.bucket_s, settings.season_s, knowledge)
        self.start([])

    def start(self, sizes: Sequence[int]) -> None:
        self.forecast.start()
        self.recent_maximum = RecentMaximum(self.settings.hold_s)
        self.sizes_at_start = list(sizes)
        self.mean_tokens = (math.nan, math.nan)  # The last known mean lengths of prompts and of answers.
        pools = self.knowledge.pools
        rules = self.rules if self.is_by_load else (None,) * len(pools)
        self.recent_work = [RecentWork(rule, self.settings.memory_s) for rule in rules]

    def sizes(self, reading: MetricsReading) -> list[int]:
        settings, now_rps = self.settings, self.knowledge.rate_rps(reading)
        if is_before_traffic(reading):
            # Before the first request a season may predict a rate, but nothing predicts a load.
            if self.is_by_load or not self.forecast.has_season:
                return list(self.sizes_at_start)
            present_rps = self.forecast.rate_at(0.0)
        else:
            self.forecast.add(reading.time_s, reading.interval_s, now_rps)
            present_rps = max(now_rps, self.forecast.mean_rps(settings.bucket_s))
        mean_tokens = mean_lengths(reading)
        self.mean_tokens = mean_tokens if not math.isnan(sum(mean_tokens)) else self.mean_tokens
        backlog_rps = self._backlog_rps(reading)
        sizes = []
        for i, pool in enumerate(self.knowledge.pools):
            ahead_s = pool.start_s + settings.every_s if settings.ahead_s is None else settings.ahead_s
            factor = self._growth(reading.time_s, ahead_s) * (1 + settings.headroom_frac)
            if self.is_by_load:
                sizes.append(self._workers_for_load(reading, i, now_rps, factor, backlog_rps))
            else:
                assert self.knowledge.capacity is not None
                rate_rps = present_rps * factor + backlog_rps
                sizes.append(int(self.knowledge.capacity.sizes_for_rate(rate_rps)[i]))
        bounded_sizes = self.knowledge.bounded_sizes(self.recent_maximum.add(reading.time_s, sizes))
        return self.knowledge.fill_nodes(bounded_sizes) if settings.fill else bounded_sizes

    def _workers_for_load(
        self, reading: MetricsReading, pool: int, now_rps: float, factor: float, backlog_rps: float
    ) -> int:
        """The workers of a pool for its recent load, times `factor`, and the backlog."""
        knowledge = self.knowledge
        if math.isnan(sum(self.mean_tokens)):  # No request has finished yet.
            return int(self.sizes_at_start[pool])
        work_s = knowledge.engines[pool].work_s(knowledge.roles[pool], *self.mean_tokens)
        load = self.recent_work[pool].add(reading.time_s, reading.interval_s, now_rps * work_s)
        return self.rules[pool].workers_for_load(load * factor + backlog_rps * work_s)

    def _growth(self, time_s: float, ahead_s: float) -> float:
        """The highest forecast up to `ahead_s` from now, over the forecast for now; 1 to MOST_GROWTH."""
        # The forecast is constant within a bucket, so one time per bucket is enough.
        buckets = max(round(ahead_s / self.settings.bucket_s), 1)
        highest = max(self.forecast.rate_at(time_s + ahead_s * (k + 1) / buckets) for k in range(buckets))
        now = self.forecast.rate_at(time_s)
        return min(max(highest / now, 1.0), MOST_GROWTH) if now > 0 else 1.0

    def _backlog_rps(self, reading: MetricsReading) -> float:
        """Requests/s to add so that waiting prompts are served within `drain`.

        One waiting prompt per worker is normal and does not count. All requests in limbo count.
        """
        if not self.settings.drain_s:
            return 0.0
        front = self.knowledge.front
        waiting = sum(int(reading.waiting[i]) - int(reading.ready[i]) for i in front) + reading.limbo
        return max(waiting, 0) / self.settings.drain_s


class RecentWork:
    """The work that arrived at a pool during the last window of a rule, or the last `memory_s`."""

    def __init__(self, rule: LoadRule | None, memory_s: float | None = None) -> None:
        self.rule = rule  # None if the controller goes by rate; then `add` is not called.
        span_s, window_s = (0.0, 0.0) if rule is None else (rule.span_s, rule.window_s)
        self.memory_s = max(window_s if memory_s is None else memory_s, span_s)
        # If one span fills the memory, its load is the mean of the last span, whenever that began. So every
        # interval counts at once. Otherwise spans follow each other, and an interval counts when its span is
        # over.
        self.is_one_span = self.memory_s <= span_s + ROUNDING
        self.counted_s = 0.0 if self.is_one_span else span_s
        self.spans: deque[tuple[float, float]] = deque()  # The end of each span, and its work per second.
        self.open_s, self.open_work = 0.0, 0.0  # Length and work of the span that is not over yet.

    def add(self, time_s: float, interval_s: float, work_per_s: float) -> float:
        """Add the work of the last interval; returns the load."""
        self.open_s += interval_s
        self.open_work += interval_s * work_per_s
        # With rounding errors, whole intervals may add up to slightly less than a span.
        if self.open_s >= self.counted_s - ROUNDING:
            self.spans.append((time_s, self.open_work / self.open_s))
            self.open_s = self.open_work = 0.0
        while self.spans and self.spans[0][0] <= time_s - self.memory_s:
            self.spans.popleft()
        # Before the first span is over, the last interval stands for it.
        recent_work = np.array([work for _, work in self.spans] or [work_per_s])
        return float(recent_work.mean()) if self.is_one_span else peak_load(recent_work)
