"""One scaler per pool, as autoscalers of Kubernetes are deployed: each sees its own pool's metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from planner.day.controllers.deployment import Deployment, is_blank
from planner.simulator.elastic import MetricsReading


class Scaler(Protocol):
    """Decides for one pool. `size` is what its Deployment has in `spec.replicas`: it decided it, or another
    did."""

    size: int

    def start(self, size: int) -> None: ...

    def decide(self, reading: MetricsReading) -> int: ...


class PerPool:
    """A scaler for each pool; their sizes are held within least and most, prefill and decode together."""

    def __init__(
        self, scalers: Sequence[Scaler], deployment: Deployment, *, every_s: float, lag_s: float
    ) -> None:
        self.scalers, self.deployment = tuple(scalers), deployment
        self.every_s, self.lag_s = every_s, lag_s

    def start(self, sizes: Sequence[int]) -> None:
        for scaler, size in zip(self.scalers, sizes, strict=True):
            scaler.start(int(size))

    def sizes(self, reading: MetricsReading) -> list[int]:
        if is_blank(reading):
            return self.deployment.bounded_sizes([scaler.size for scaler in self.scalers])
        bounded_sizes = self.deployment.bounded_sizes([scaler.decide(reading) for scaler in self.scalers])
        for scaler, size in zip(self.scalers, bounded_sizes, strict=True):
            scaler.size = size
        return bounded_sizes
