"""The controller KEDA: a ScaledObject with Prometheus and cron triggers, which scale through an HPA.

Sources in kedacore/keda at 8b4f083 (2026-08-20): pkg/scaling/executor/scale_scaledobjects.go (to and from
zero), pkg/scalers/prometheus_scaler.go (activation threshold), pkg/scalers/cron_scaler.go, defaults in
apis/keda/v1alpha1/withtriggers_types.go.

The metric of the whole pool is an external metric of an HPA (hpa.py) with a target per worker (`threshold`);
the HPA reads it at every sync. A cron trigger is also a metric: its number of workers, with target 1. The HPA
follows the trigger that wants most workers. KEDA itself runs every `poll` and decides only about zero: an
empty pool gets one worker when a trigger is active (the metric above `activation`, or within a cron window),
and a pool goes to zero when no trigger has been active for `cooldown`.
"""

import math
from dataclasses import dataclass, replace

from planner.day.controllers.hpa import Behaviour, ScalingRules, check_target, external_replicas, read_target
from planner.day.controllers.knowledge import Knowledge
from planner.day.controllers.scaler_metrics import METRICS, read_metric
from planner.day.controllers.settings import setting
from planner.day.controllers.windows import Window, check_windows, read_windows, workers_at
from planner.simulator.elastic import MetricsReading


@dataclass(frozen=True, slots=True)
class KedaSettings(ScalingRules):
    """The triggers of a ScaledObject (a query and windows), and when a pool goes to zero and wakes."""

    metric: str = setting("queue", "what the query adds up", choices=tuple(METRICS), parse=read_metric)
    threshold: float | None = setting(
        None, "target of the metric per worker; none: its usual one", least=1e-3, parse=read_target
    )
    activation: float = setting(0.0, "an empty pool wakes above this metric")
    poll_s: float = setting(30.0, "pollingInterval: time between KEDA's looks", least=1.0)
    cooldown_s: float = setting(300.0, "cooldownPeriod: idle so long before zero")
    cron: tuple[Window, ...] = setting((), "windows with workers", parse=read_windows)

    def check(self) -> None:
        check_target(self.metric, self.threshold)

    @property
    def per_worker(self) -> float:
        """The target of the metric per worker: the given one, or the metric's usual one."""
        return METRICS[self.metric].target if self.threshold is None else self.threshold


class Keda:
    """The ScaledObject of one pool and its HPA."""

    def __init__(self, settings: KedaSettings, knowledge: Knowledge, pool: int) -> None:
        self.settings, self.knowledge, self.pool = settings, knowledge, pool
        check_windows(settings.cron, knowledge)
        self.limits = knowledge.pools[pool]
        # The HPA's minReplicas is at least 1; only KEDA itself goes to zero.
        self.hpa_limits = replace(self.limits, least=max(self.limits.least, 1))
        self.metric = METRICS[settings.metric]
        self.behaviour = Behaviour.from_rules(settings)
        self.start(0)

    def start(self, size: int) -> None:
        self.size = size
        self.behaviour.start(size)
        self.polled_s = -math.inf
        self.active_s = 0.0 if size else -math.inf  # When a trigger was last active.

    def decide(self, reading: MetricsReading) -> int:
        """The size that the pool should have. Requests in limbo (the pool is empty) count in its metric."""
        total = self.metric.total(reading, self.pool) + self.knowledge.limbo_of(reading, self.pool)
        cron_workers = workers_at(self.settings.cron, self.knowledge, reading.time_s)[self.pool]
        if reading.time_s - self.polled_s >= self.settings.poll_s:
            self.polled_s, before = reading.time_s, self.size
            self._wake_or_empty(reading.time_s, total > self.settings.activation or cron_workers > 0)
            if self.size != before:  # KEDA has woken or emptied the pool; the HPA decides at its next sync.
                return self.size
        if not self.size:
            return 0
        replica_counts = [
            external_replicas(total, self.size, self.settings.per_worker, self.settings.tolerance_frac)
        ]
        if self.settings.cron:
            replica_counts.append(
                external_replicas(cron_workers, self.size, 1.0, self.settings.tolerance_frac)
            )
        return self.behaviour.decide(reading.time_s, self.size, max(replica_counts), self.hpa_limits)

    def _wake_or_empty(self, time_s: float, is_active: bool) -> None:
        """KEDA's own decision: wake an empty pool, or empty a pool that was inactive for `cooldown_s`."""
        if is_active:
            self.active_s = time_s
            self.size = self.size or max(self.limits.least, 1)
        elif self.size and not self.limits.least and time_s - self.active_s > self.settings.cooldown_s:
            self.size = 0
