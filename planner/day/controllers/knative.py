"""Knative's pod autoscaler (KPA) on concurrency.

Sources in knative/serving at 98e5ef9 (2026-08-21): pkg/autoscaler/scaling/autoscaler.go (stable and panic
windows, rates of change, delay of scaling down), pkg/reconciler/autoscaling/kpa/scaler.go (to zero),
defaults in pkg/autoscaler/config/config.go.

The concurrency of a pool is the number of requests at its workers, or waiting because the pool has no worker.
Every `every` (2 s) its mean over the stable window, and over the shorter panic window, is divided by the
target per worker. Panic begins when the panic window needs `panic_threshold` times the ready workers; then
the pool does not shrink until a whole stable window has needed less. A pool goes to zero when `grace` has
passed after a stable window without any request.
"""

import math
from collections import deque
from dataclasses import dataclass

from planner.day.controllers.knowledge import Knowledge, RecentMaximum, least_whole
from planner.day.controllers.scaler_metrics import METRICS
from planner.day.controllers.settings import ControllerSettings, setting
from planner.errors import InputError
from planner.simulator.elastic import MetricsReading


@dataclass(frozen=True, slots=True)
class KnativeSettings(ControllerSettings):
    """The keys of Knative's autoscaler, with its defaults: target, both windows, and rates of change."""

    target: float = setting(100.0, "concurrency of a worker (autoscaling.knative.dev/target)", least=0.01)
    utilization_frac: float = setting(0.7, "share of `target` that is aimed at", least=0.01, most=1.0)
    window_s: float = setting(60.0, "stable window", least=6.0, most=3600.0)
    panic_window_frac: float = setting(0.1, "panic window, of the stable one", least=0.01, most=1.0)
    panic_threshold_frac: float = setting(
        2.0, "panic where the panic window asks for this share of the ready workers", least=1.1, most=10.0
    )
    max_up_rate: float = setting(1000.0, "at most ready workers times this", least=1.01)
    max_down_rate: float = setting(2.0, "at least ready workers divided by this", least=1.01)
    down_delay_s: float = setting(0.0, "it shrinks to the largest size wanted within this time", most=3600.0)
    grace_s: float = setting(30.0, "longer idle before zero", most=3600.0)
    every_s: float = setting(2.0, "time between decisions", least=1.0, most=60.0)
    lag_s: float = setting(1.0, "age of the metrics", most=600.0)

    def check(self) -> None:
        """Raise InputError for settings that contradict each other."""
        if self.window_s * self.panic_window_frac < 1:
            raise InputError(
                f"panic_window: {self.panic_window_frac:.3g} of a window of {self.window_s:g} s is shorter "
                f"than 1 s; make either longer"
            )


class WindowMean:
    """The mean of the values of the last `window_s`."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.values: deque[tuple[float, float]] = deque()
        self.total = 0.0

    def add(self, time_s: float, value: float) -> float:
        """Add a value; returns the mean with it."""
        self.values.append((time_s, value))
        self.total += value
        while self.values[0][0] <= time_s - self.window_s:
            self.total -= self.values.popleft()[1]
        return self.total / len(self.values)


class Knative:
    """The autoscaler of one pool: `workers_for_means` is its rule, `decide` adds the means and scaling to
    zero. PerPool (table.py) sets `size` after each decision.
    """

    def __init__(self, settings: KnativeSettings, knowledge: Knowledge, pool: int) -> None:
        self.settings, self.knowledge, self.pool = settings, knowledge, pool
        self.limits = knowledge.pools[pool]
        self.start(0)

    def start(self, size: int) -> None:
        settings = self.settings
        self.size = size
        self.stable = WindowMean(settings.window_s)
        self.panic = WindowMean(settings.window_s * settings.panic_window_frac)
        # The time at which the panic window last needed `panic_threshold` times the ready workers; None
        # outside a panic. A new autoscaler of more than one worker begins in panic, so that it keeps them for
        # a stable window.
        self.panic_s: float | None = 0.0 if size > 1 else None
        self.panic_size = size if size > 1 else 0  # The largest size of this panic.
        self.recent_maximum = RecentMaximum(self.settings.down_delay_s)
        self.woken_s = 0.0  # When the pool last left zero.
        self.idle_s: float | None = None  # Since when there has been nothing to do.

    def decide(self, reading: MetricsReading) -> int:
        """The size that the pool should have, by the latest reading."""
        time_s = reading.time_s
        at_workers = METRICS["concurrency"].total(reading, self.pool)
        concurrency = at_workers + self.knowledge.limbo_of(reading, self.pool)
        stable, panic = self.stable.add(time_s, concurrency), self.panic.add(time_s, concurrency)
        workers = self.workers_for_means(time_s, int(reading.ready[self.pool]), stable, panic)
        return max(self._to_zero(time_s, workers), self.limits.least)

    def workers_for_means(self, time_s: float, ready: int, stable: float, panic: float) -> int:
        """The number of workers for the mean concurrencies `stable` and `panic` of the two windows."""
        settings, workers = self.settings, max(ready, 1)  # If none is ready, Knative counts one.
        target = settings.target * settings.utilization_frac
        most = math.ceil(settings.max_up_rate * workers)
        least = math.floor(workers / settings.max_down_rate)
        for_stable, for_panic = least_whole(stable / target), least_whole(panic / target)
        if for_panic / workers >= settings.panic_threshold_frac:
            self.panic_s = time_s
        elif self.panic_s is not None and time_s > self.panic_s + settings.window_s:
            self.panic_s, self.panic_size = None, 0
        size = min(max(for_stable, least), most)
        if self.panic_s is not None:
            self.panic_size = size = max(size, min(max(for_panic, least), most), self.panic_size)
        (size,) = self.recent_maximum.add(time_s, [size])
        return size

    def _to_zero(self, time_s: float, needed: int) -> int:
        """The size where the metrics ask for `needed` workers. If they ask for none, the pool keeps one
        worker until a stable window has passed since it woke, then its size for `grace` (kpa/scaler.go).
        """
        if needed:
            if not self.size:
                self.woken_s = time_s
            self.idle_s = None
            return needed
        if not self.size or self.limits.least:  # `decide` raises 0 to the least size.
            return 0
        if time_s - self.woken_s < self.settings.window_s:
            return 1
        self.idle_s = time_s if self.idle_s is None else self.idle_s
        return 0 if time_s - self.idle_s >= self.settings.grace_s else self.size
