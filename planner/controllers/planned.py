"""Ours: the plan's own capacity table at the rate forecast for when a worker would be ready.

For every pool the highest rate between now and `start-up + every` from now counts: that of the last look,
of the last bucket, and of the forecast (planner/controllers/forecasting.py), with `headroom` on top and what
is needed to serve waiting prompts within `drain`. The table says the least sizes that carry it within the
SLO. A size falls once nothing within `hold` asked for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.controllers.deployment import Deployment, is_blank
from planner.controllers.forecast import Held
from planner.controllers.forecasting import RateForecast
from planner.controllers.settings import SECONDS, SHARE, Settings, setting
from planner.simulator.elastic import Reading


@dataclass(frozen=True, slots=True)
class FleetplanSettings(Settings):
    headroom_frac: float = setting(0.1, SHARE, "traffic that is added to the forecast", most=10.0)
    hold_s: float = setting(600.0, SECONDS, "the most asked for during it counts", most=86400.0)
    drain_s: float = setting(
        60.0, SECONDS, "time in which waiting prompts are served; 0: not counted", most=3600.0
    )
    ahead_s: float | None = setting(None, SECONDS, "how far ahead; none: start-up + every", most=86400.0)
    season_s: float = setting(86400.0, SECONDS, "period of the traffic", least=600.0)
    bucket_s: float = setting(300.0, SECONDS, "length of the means it learns", least=10.0, most=7200.0)
    every_s: float = setting(60.0, SECONDS, "time between decisions", least=1.0, most=3600.0)
    lag_s: float = setting(15.0, SECONDS, "age of the metrics", most=600.0)


class Fleetplan:
    def __init__(self, settings: FleetplanSettings, deployment: Deployment) -> None:
        deployment.needs("fleetplan", "capacity")
        assert deployment.capacity is not None
        self.settings, self.deployment, self.table = settings, deployment, deployment.capacity
        self.every_s, self.lag_s = settings.every_s, settings.lag_s
        self.forecast = RateForecast(settings.bucket_s, settings.season_s, deployment)
        self.start([])

    def start(self, sizes: Sequence[int]) -> None:
        self.forecast.start()
        self.held = Held(self.settings.hold_s)
        self.first = list(sizes)

    def sizes(self, reading: Reading) -> list[int]:
        own, present_rps = self.settings, 0.0
        if not is_blank(reading):
            now_rps = self.deployment.rate_rps(reading)
            self.forecast.add(reading.time_s, reading.interval_s, now_rps)
            present_rps = max(now_rps, self.forecast.mean_rps(own.bucket_s))
        elif not self.forecast.has_season:
            return list(self.first)
        sizes = []
        for i, pool in enumerate(self.deployment.pools):
            ahead_s = pool.start_s + own.every_s if own.ahead_s is None else own.ahead_s
            rate_rps = max(present_rps, self._highest(reading.time_s, ahead_s))
            rate_rps = rate_rps * (1 + own.headroom_frac) + self._backlog_rps(reading)
            sizes.append(int(self.table.at(rate_rps)[i]))
        return self.deployment.held(self.held.add(reading.time_s, sizes))

    def _highest(self, time_s: float, ahead_s: float) -> float:
        """Of the forecasts up to `ahead_s` from now."""
        looks = max(round(ahead_s / self.settings.bucket_s), 1)
        return max(self.forecast.at(time_s + ahead_s * (k + 1) / looks) for k in range(looks))

    def _backlog_rps(self, reading: Reading) -> float:
        """Requests/s more that serve what waits at the front, but for one prompt per worker, in `drain`."""
        if not self.settings.drain_s:
            return 0.0
        front = self.deployment.front
        waiting = sum(int(reading.waiting[i]) - int(reading.ready[i]) for i in front) + reading.limbo
        return max(waiting, 0) / self.settings.drain_s


def build(settings: Sequence[FleetplanSettings], deployment: Deployment) -> Fleetplan:
    return Fleetplan(settings[0], deployment)
