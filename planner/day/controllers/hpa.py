"""Kubernetes' HorizontalPodAutoscaler, autoscaling/v2.

Sources in kubernetes/kubernetes, pkg/controller/podautoscaler: replica_calculator.go at 00067268 and since
v1.33 (metrics of pods and external ones, tolerance, rounding up, pods that are not ready or send no metrics),
horizontal.go of v1.27 to v1.33 (stabilisation and rates of change under `behavior`), and their tests at
003e8629.

    usage    = mean metric of the pods that send it / target
    desired  = ceil(usage x number of those pods), no change where 1 - tolerance <= usage <= 1 + tolerance
    missing  pods without metrics (they are starting) count as at the target if usage < 1, as idle if
             usage > 1; if usage with them is on the other side of 1, nothing changes
    then     `desired` is limited by the stabilisation windows (a pool grows to the smallest size desired in
             the last `up_window`, and shrinks to the largest desired in the last `down_window`), then by the
             rates of change, then by the least and the most workers of the pool

An HPA of `minReplicas: 0` needs an alpha feature and a metric that no pod sends, so this one keeps at least
one worker. A pool that begins empty stays empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Self

from planner.day.controllers.knowledge import Knowledge, least_whole
from planner.day.controllers.scaler_metrics import METRICS, read_metric
from planner.day.controllers.settings import ControllerSettings, setting
from planner.files.document_values import check_number, read_share, refused_value
from planner.simulator.elastic import ElasticPool, MetricsReading


def read_target(value: object, where: str) -> float:
    """A number above 0, or a share such as "70 %"."""
    if isinstance(value, str) and value.strip().endswith("%"):
        value = read_share(value, where)
    return check_number(value, where, above=0.0)


@dataclass(frozen=True, slots=True)
class ScalingRules(ControllerSettings):
    """`behavior` of an HPA, with autoscaling/v2's defaults; how often it decides; how old its metrics are."""

    tolerance_frac: float = setting(0.1, "no change while usage is this near the target", most=1.0)
    up_window_s: float = setting(0.0, "it grows to the smallest size wanted within this time", most=3600.0)
    up_pods: int = setting(4, "most pods that are added per period; 0: no such limit")
    up_percent: float = setting(100.0, "most percent that are added per period; 0: no such limit")
    up_period_s: float = setting(15.0, "period of up_pods and up_percent", least=1.0, most=1800.0)
    down_window_s: float = setting(
        300.0, "it shrinks to the largest size wanted within this time", most=3600.0
    )
    down_pods: int = setting(0, "most pods that are taken away per period; 0: no such limit")
    down_percent: float = setting(100.0, "most percent that are taken away per period; 0: no such limit")
    down_period_s: float = setting(15.0, "period of down_pods and down_percent", least=1.0, most=1800.0)
    every_s: float = setting(15.0, "time between decisions", least=1.0, most=3600.0)
    lag_s: float = setting(15.0, "age of the metrics: scraping and the adapter", most=600.0)


@dataclass(frozen=True, slots=True)
class HpaSettings(ScalingRules):
    """The settings of an HPA: the metric that it follows, the metric's target, and its ScalingRules."""

    metric: str = setting("queue", "what it follows", choices=tuple(METRICS), parse=read_metric)
    target: float | None = setting(
        None, "target of the metric per worker; none: its usual one", least=1e-3, parse=read_target
    )

    def check(self) -> None:
        check_target(self.metric, self.target)

    @property
    def per_worker(self) -> float:
        """The target of the metric per worker: the given one, or the metric's usual one."""
        return METRICS[self.metric].target if self.target is None else self.target


def check_target(metric: str, target: float | None) -> None:
    """Raise InputError for a target above 1 of a metric that is a share."""
    if target is not None and METRICS[metric].is_share and target > 1:
        raise refused_value("target", f"{metric} is a share: expected at most 1 or 100 %", target)


def is_within(usage: float, tolerance_frac: float) -> bool:
    """Whether a usage is too near the target for a change.

    The comparison is that of Kubernetes since 1.33. `abs(usage - 1) <= tolerance` would find 1.1 outside of
    10 %, because 1.1 - 1 is above 0.1 in floating point.
    """
    return 1 - tolerance_frac <= usage <= 1 + tolerance_frac


def pods_replicas(
    values_of_ready: Sequence[float], missing: int, current: int, target: float, tolerance_frac: float = 0.1
) -> int:
    """The desired replicas of a metric that pods send (type Pods), where the pool has `current` replicas.

    `values_of_ready` are the values of the ready pods, and `missing` the number of pods that send no value
    yet. Without ready pods nothing is measured, and the size stays.
    """
    ready, total = len(values_of_ready), sum(values_of_ready)
    if not ready:
        return current
    usage = total / (ready * target)
    if not missing:
        return current if is_within(usage, tolerance_frac) else least_whole(usage * ready)
    pods = ready + missing
    # Missing pods count as at the target or as idle, whichever changes the size less.
    usage_of_all = (total + (missing * target if usage <= 1 else 0.0)) / (pods * target)
    if is_within(usage_of_all, tolerance_frac) or (usage_of_all - 1) * (usage - 1) < 0:
        return current
    replicas = least_whole(usage_of_all * pods)
    # `pods` may differ from `current`, so high usage could ask for fewer replicas: then nothing changes.
    is_other_direction = (replicas - current) * (usage_of_all - 1) < 0
    return current if is_other_direction else replicas


def external_replicas(total: float, current: int, target: float, tolerance_frac: float = 0.1) -> int:
    """The desired replicas by a metric of the whole pool (`total`), with a `target` per replica (type
    External, AverageValue). An empty pool has no usage per replica, so no tolerance applies.
    """
    if current and is_within(total / (target * current), tolerance_frac):
        return current
    return least_whole(total / target)


class ScalingPolicy(NamedTuple):
    """The most by which a pool may change in `period_s`: a number of pods, or percent of them."""

    kind: Literal["pods", "percent"]
    value: float
    period_s: float


@dataclass(frozen=True, slots=True)
class Direction:
    """`scaleUp` or `scaleDown`: the stabilisation window, and policies.

    The policy that allows the largest change counts (`selectPolicy: Max`).
    """

    window_s: float
    policies: tuple[ScalingPolicy, ...]

    @classmethod
    def from_rules(cls, window_s: float, pods: float, percent: float, period_s: float) -> Self:
        """The direction with these policies; 0 is no limit."""
        both = (ScalingPolicy("pods", pods, period_s), ScalingPolicy("percent", percent, period_s))
        return cls(window_s, tuple(policy for policy in both if policy.value))


@dataclass(slots=True)
class Behaviour:
    """What an HPA remembers of its own recommendations and changes."""

    up: Direction
    down: Direction
    # Pairs of a time [s] and a number: sizes before stabilisation, pods added, pods removed.
    recommended: list[tuple[float, int]] = field(default_factory=list)
    added: list[tuple[float, int]] = field(default_factory=list)
    removed: list[tuple[float, int]] = field(default_factory=list)

    @classmethod
    def from_rules(cls, rules: ScalingRules) -> Behaviour:
        """The behaviour by these settings, before any decision."""
        return cls(
            Direction.from_rules(rules.up_window_s, rules.up_pods, rules.up_percent, rules.up_period_s),
            Direction.from_rules(
                rules.down_window_s, rules.down_pods, rules.down_percent, rules.down_period_s
            ),
        )

    def start(self, size: int) -> None:
        """Begin at time zero, with the present size as the first recommendation."""
        self.recommended, self.added, self.removed = [(0.0, size)], [], []

    def decide(self, time_s: float, current: int, desired: int, pool: ElasticPool) -> int:
        """The size that follows from `desired` now. `desired` is kept for later stabilisation windows."""
        size = self.limit_change(time_s, current, self.stabilise(time_s, current, desired), pool)
        if size > current:
            self.added.append((time_s, size - current))
        elif size < current:
            self.removed.append((time_s, current - size))
        return size

    def stabilise(self, time_s: float, current: int, desired: int) -> int:
        """The size nearest to `current` that the recommendations of the stabilisation windows allow."""
        longest_s = max(self.up.window_s, self.down.window_s)
        self.recommended = [(at_s, size) for at_s, size in self.recommended if at_s > time_s - longest_s]
        least = most = desired
        for at_s, recommended in self.recommended:
            if at_s > time_s - self.up.window_s:
                least = min(least, recommended)
            if at_s > time_s - self.down.window_s:
                most = max(most, recommended)
        self.recommended.append((time_s, desired))
        return min(max(current, least), most)

    def limit_change(self, time_s: float, current: int, desired: int, pool: ElasticPool) -> int:
        """`desired`, limited by the rates of change, then by the least and the most workers of the pool."""
        if desired > current and self.up.policies:
            limits = []
            for kind, value, period_s in self.up.policies:
                size_before = current - self._changed(time_s, period_s)
                limits.append(
                    size_before + value if kind == "pods" else math.ceil(size_before * (1 + value / 100))
                )
            # Earlier changes may already exceed all limits: then the size stays.
            desired = min(desired, max(int(max(limits)), current))
        elif desired < current and self.down.policies:
            limits = []
            for kind, value, period_s in self.down.policies:
                size_before = current - self._changed(time_s, period_s)
                limits.append(size_before - value if kind == "pods" else int(size_before * (1 - value / 100)))
            desired = max(desired, min(int(min(limits)), current))
        return min(max(desired, pool.least), pool.most)

    def _changed(self, time_s: float, period_s: float) -> int:
        """Pods added less pods removed during the last `period_s`. Called only where a policy exists."""
        # Drop changes that are older than the longest period of any policy.
        longest_s = max(policy.period_s for policy in (*self.up.policies, *self.down.policies))
        for changes in (self.added, self.removed):
            while changes and changes[0][0] <= time_s - longest_s:
                changes.pop(0)
        since_s = time_s - period_s
        added = sum(pods for at_s, pods in self.added if at_s > since_s)
        removed = sum(pods for at_s, pods in self.removed if at_s > since_s)
        return added - removed


class Hpa:
    """One pool's HPA: it sizes the pool by a metric per worker, and keeps at least one worker."""

    def __init__(self, settings: HpaSettings, knowledge: Knowledge, pool: int) -> None:
        self.settings, self.pool = settings, pool
        self.limits = replace(knowledge.pools[pool], least=max(knowledge.pools[pool].least, 1))
        self.metric = METRICS[settings.metric]
        self.behaviour = Behaviour.from_rules(settings)
        self.size = 0

    def start(self, size: int) -> None:
        """Begin at time zero with this size."""
        self.size = size
        self.behaviour.start(size)

    def decide(self, reading: MetricsReading) -> int:
        """The size that the pool should have, by the latest reading. An empty pool stays empty."""
        if not self.size:
            return 0
        ready = int(reading.ready[self.pool])
        # `max`: without ready pods the mean is not used.
        mean_value = self.metric.total(reading, self.pool) / max(ready, 1)
        desired = pods_replicas(
            [mean_value] * ready,  # The rule uses only their number and their sum.
            missing=int(reading.starting[self.pool]),
            current=self.size,
            target=self.settings.per_worker,
            tolerance_frac=self.settings.tolerance_frac,
        )
        return self.behaviour.decide(reading.time_s, self.size, desired, self.limits)
