"""Runs one scaler per pool, as autoscalers of Kubernetes are deployed: each sees the metrics of its pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from planner.day.controllers.knowledge import Knowledge, is_before_traffic
from planner.simulator.elastic import MetricsReading


class Scaler(Protocol):
    """Decides the size of one pool.

    `size` is `spec.replicas` of the pool's Deployment: the scaler's last decision, as `PerPool` has limited
    it.
    """

    size: int

    def start(self, size: int) -> None: ...

    def decide(self, reading: MetricsReading) -> int: ...


class PerPool:
    """A controller made of a scaler per pool. `Knowledge.bounded_sizes` limits what the scalers decide."""

    def __init__(
        self, scalers: Sequence[Scaler], knowledge: Knowledge, *, every_s: float, lag_s: float
    ) -> None:
        self.scalers, self.knowledge = tuple(scalers), knowledge
        self.every_s, self.lag_s = every_s, lag_s

    def start(self, sizes: Sequence[int]) -> None:
        for scaler, size in zip(self.scalers, sizes, strict=True):
            scaler.start(int(size))

    def sizes(self, reading: MetricsReading) -> list[int]:
        if is_before_traffic(reading):  # Without metrics a scaler changes nothing.
            return self.knowledge.bounded_sizes([scaler.size for scaler in self.scalers])
        bounded_sizes = self.knowledge.bounded_sizes([scaler.decide(reading) for scaler in self.scalers])
        for scaler, size in zip(self.scalers, bounded_sizes, strict=True):
            scaler.size = size
        return bounded_sizes
