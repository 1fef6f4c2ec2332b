"""Predictive scaling, as clouds sell it: pools are sized for the rate that is forecast for a later time.

planner/day/controllers/forecasting.py makes the forecast, which is divided by a worker's rate. This rate is a
setting, or the highest rate of the plan's capacity table divided by the pool's workers at that rate. As under
an HPA, a size falls once no decision of the last `hold_s` needs more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.day.controllers.forecasting import RateForecast
from planner.day.controllers.knowledge import Knowledge, RecentMaximum, is_before_traffic, least_whole
from planner.day.controllers.settings import ControllerSettings, setting
from planner.simulator.elastic import MetricsReading
from planner.units import DAY_S


@dataclass(frozen=True, slots=True)
class ForecastSettings(ControllerSettings):
    """How far ahead the controller looks, how it learns the season, and how slowly it shrinks."""

    per_worker_rps: float | None = setting(
        None, "requests/s that a worker carries; none: by the plan", least=1e-3
    )
    ahead_s: float = setting(300.0, "how far ahead it looks", most=DAY_S)
    hold_s: float = setting(300.0, "it shrinks to the largest size wanted within this time", most=DAY_S)
    season_s: float = setting(DAY_S, "period of the traffic", least=600.0)
    bucket_s: float = setting(300.0, "length of the means it learns", least=10.0, most=7200.0)
    every_s: float = setting(60.0, "time between decisions", least=1.0, most=3600.0)
    lag_s: float = setting(15.0, "age of the metrics", most=600.0)


class Forecast:
    """The controller `forecast`; for its methods see `Controller` in simulator/elastic.py."""

    def __init__(self, settings: ForecastSettings, knowledge: Knowledge) -> None:
        self.settings, self.knowledge = settings, knowledge
        self.every_s, self.lag_s = settings.every_s, settings.lag_s
        if settings.per_worker_rps is None:
            knowledge.require_facts("forecast", "capacity")
        self.forecast = RateForecast(settings.bucket_s, settings.season_s, knowledge)
        self.start([])  # Sets the attributes; the simulator calls it again with its sizes.

    def start(self, sizes: Sequence[int]) -> None:
        self.forecast.start()
        self.recent_maximum = RecentMaximum(self.settings.hold_s)
        self.sizes_at_start = list(sizes)

    def sizes(self, reading: MetricsReading) -> list[int]:
        if is_before_traffic(reading):
            return list(self.sizes_at_start)
        rate_rps = self.knowledge.rate_rps(reading)
        self.forecast.add(reading.time_s, reading.interval_s, rate_rps)
        ahead_rps = self.forecast.rate_at(reading.time_s + self.settings.ahead_s)
        sizes = [least_whole(ahead_rps * workers_per_rps) for workers_per_rps in self._workers_per_rps()]
        return self.knowledge.bounded_sizes(self.recent_maximum.add(reading.time_s, sizes))

    def _workers_per_rps(self) -> list[float]:
        """The workers of each pool (P,) per request/s; `per_worker_rps` holds for every pool."""
        if self.settings.per_worker_rps is not None:
            return [1 / self.settings.per_worker_rps] * len(self.knowledge.pools)
        table = self.knowledge.capacity
        assert table is not None
        return [float(size / table.rates_rps[-1]) for size in table.sizes[-1]]
