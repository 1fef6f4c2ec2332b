"""Aladdin's rule for the number of workers, with change points.

N = ceil(k5 r + c5) workers for r requests/s (eq. 7 of arXiv:2405.06856, section 5), fitted here on the plan's
capacity table, per pool. The paper reconfigures at heartbeats "using change point detection" and does not say
which detection. Here r is the mean arrival rate since the last change point (CUSUM,
planner/solvers/worker_rule.py). A shift of the requests' mean length multiplies k5 by new length / old
length. The paper ignores start-up times and the cost of switching, and so does the rule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.day.controllers.knowledge import Knowledge, is_before_traffic, mean_lengths
from planner.day.controllers.settings import ControllerSettings, setting
from planner.simulator.elastic import MetricsReading
from planner.solvers.worker_rule import DRIFT_SIGMA, THRESHOLD_SIGMA, SeriesLevel, WorkerRule, fit_worker_rule


@dataclass(frozen=True, slots=True)
class AladdinSettings(ControllerSettings):
    """How often Aladdin looks, and when its test says that the level of traffic has shifted."""

    every_s: float = setting(60.0, "heartbeat", least=1.0, most=3600.0)
    learn: int = setting(5, "heartbeats that make a level", least=2, most=1000)
    drift: float = setting(DRIFT_SIGMA, "of the CUSUM, in standard deviations", most=10.0)
    threshold: float = setting(THRESHOLD_SIGMA, "of the CUSUM, in standard deviations", least=0.1, most=100.0)
    lag_s: float = setting(15.0, "age of the metrics", most=600.0)


class Aladdin:
    """Sizes by the rule of worker_rule.py, fitted anew whenever the level of traffic has shifted."""

    def __init__(self, settings: AladdinSettings, knowledge: Knowledge) -> None:
        knowledge.require_facts("aladdin", "capacity")
        assert knowledge.capacity is not None
        self.settings, self.knowledge = settings, knowledge
        self.every_s, self.lag_s = settings.every_s, settings.lag_s
        table = knowledge.capacity
        self.rules = [fit_worker_rule(table.rates_rps, column) for column in table.sizes.T.tolist()]
        self.start([])

    def start(self, sizes: Sequence[int]) -> None:
        self.rate, self.length = self._new_level(), self._new_level()
        # Mean tokens of a request before the first change point; NaN until then.
        self.usual_tokens = math.nan
        self.sizes_at_start = list(sizes)

    def _new_level(self) -> SeriesLevel:
        """A level that has learned no value yet."""
        return SeriesLevel(self.settings.learn, self.settings.drift, self.settings.threshold)

    def _with_value(self, level: SeriesLevel, value: float) -> SeriesLevel:
        """The level with this value, or after a change point a new level that begins with it."""
        # `SeriesLevel.add` returns None unless the value shows a change point.
        if level.add(value) is None:
            return level
        new_level = self._new_level()
        new_level.add(value)
        return new_level

    def sizes(self, reading: MetricsReading) -> list[int]:
        if is_before_traffic(reading):
            return list(self.sizes_at_start)
        self.rate = self._with_value(self.rate, self.knowledge.rate_rps(reading))
        tokens = sum(mean_lengths(reading))
        if not math.isnan(tokens):
            before = self.length
            self.length = self._with_value(before, tokens)
            has_changed = self.length is not before
            if math.isnan(self.usual_tokens) and has_changed:
                self.usual_tokens = before.mean
        length_ratio = 1.0 if math.isnan(self.usual_tokens) else self.length.mean / self.usual_tokens
        return self.knowledge.bounded_sizes([self._workers(rule, length_ratio) for rule in self.rules])

    def _workers(self, rule: WorkerRule, length_ratio: float) -> int:
        """The rule's workers if requests are `length_ratio` times as long as those it was fitted on."""
        if self.rate.mean <= 0:
            return 0
        scaled = WorkerRule(rule.slope_workers_per_rps * length_ratio, rule.offset_workers)
        return int(scaled.workers([self.rate.mean])[0])
