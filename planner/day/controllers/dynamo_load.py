"""Dynamo's planner by load: adds or takes away a worker by queued prompt tokens and KV cache in use.

Sources in ai-dynamo/dynamo: components/src/dynamo/planner/core/load_scaling.py at 0c6da1e and in 1.6.1 (2026;
 the modes `optimization_target: throughput` and `latency`), config/defaults.py at 1ca6015, and the
tests of those modes.

The planner decides every `every` (5 s), and only while no worker starts. A prefill pool gains a worker if
queued prompt tokens per worker reach `prefill_up` times the longest context, and loses one below
`prefill_down`. A decode or mixed pool gains a worker if the share of the KV cache in use, with queued prompts
counted as used, is above `kv_up`, and loses one below `kv_down`. No pool loses a worker if the load of the
remaining workers would reach the up threshold. The original looks at the fullest worker to add one, and at
all workers to remove one; here both look at the pool's mean, because a reading (MetricsReading) has no
numbers of single workers. Queued tokens are the number of waiting prompts times the mean length of the
prompts that finished last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.day.controllers.knowledge import MIXED, PREFILL, Knowledge, is_before_traffic, mean_of
from planner.day.controllers.settings import ControllerSettings, setting
from planner.errors import InputError
from planner.simulator.elastic import MetricsReading


class ScalingThresholds(NamedTuple):
    """Loads per worker at which a pool gains one (`up`; `kv_up` only above it), and below which it loses one.

    `prefill_..._frac` are of queued prompt tokens, as a share of the longest context, `kv_..._frac` of the
    KV cache in use or queued for. `DynamoSettings` has fields of the same names.
    """

    prefill_up_frac: float
    prefill_down_frac: float
    kv_up_frac: float
    kv_down_frac: float


THRESHOLDS = {  # Dynamo's own, by `optimization_target`.
    "throughput": ScalingThresholds(1.0, 0.1, 1.0, 0.6),
    "latency": ScalingThresholds(0.1, 0.0, 0.4, 0.1),
}


@dataclass(frozen=True, slots=True)
class DynamoSettings(ControllerSettings):
    """The settings of Dynamo's load planner. A threshold of None is Dynamo's own (THRESHOLDS)."""

    optimize: str = setting("throughput", "what the thresholds are for", choices=tuple(THRESHOLDS))
    prefill_up_frac: float | None = setting(None, "queued prompt tokens of the longest context", most=100.0)
    prefill_down_frac: float | None = setting(None, "the same, for one fewer", most=100.0)
    kv_up_frac: float | None = setting(None, "KV in use and queued for", most=10.0)
    kv_down_frac: float | None = setting(None, "the same, for one fewer", most=10.0)
    grace_s: float = setting(0.0, "no decision so long after a change", most=3600.0)
    every_s: float = setting(5.0, "load_adjustment_interval", least=1.0, most=600.0)
    lag_s: float = setting(1.0, "age of the metrics", most=600.0)

    def check(self) -> None:
        loads = self.thresholds
        if loads.prefill_up_frac <= loads.prefill_down_frac or loads.kv_up_frac <= loads.kv_down_frac:
            raise InputError(
                f"up thresholds must be above down thresholds: prefill {loads.prefill_up_frac:g} and "
                f"{loads.prefill_down_frac:g}, kv {loads.kv_up_frac:g} and {loads.kv_down_frac:g}"
            )

    @property
    def thresholds(self) -> ScalingThresholds:
        """The thresholds, with Dynamo's own where a setting is None."""
        stated = {name: getattr(self, name) for name in ScalingThresholds._fields}
        return THRESHOLDS[self.optimize]._replace(
            **{name: value for name, value in stated.items() if value is not None}
        )


def prefill_workers(settings: DynamoSettings, queued_share: float, workers: int) -> int:
    """The next size of a prefill pool of `workers`.

    Queued prompt tokens per worker are `queued_share` times the longest context.
    """
    up_frac, down_frac = settings.thresholds.prefill_up_frac, settings.thresholds.prefill_down_frac
    if queued_share >= up_frac:
        return workers + 1
    # Nothing is below a threshold of 0, so with this threshold an empty queue counts as below.
    is_idle = queued_share < down_frac or queued_share == down_frac == 0
    return workers - 1 if is_idle and _can_lose_one(queued_share, workers, up_frac) else workers


def decode_workers(settings: DynamoSettings, kv_share: float, workers: int) -> int:
    """The next size of a pool of `workers`, with `kv_share` of their KV cache in use or queued for."""
    up_frac, down_frac = settings.thresholds.kv_up_frac, settings.thresholds.kv_down_frac
    if kv_share > up_frac:
        return workers + 1
    return workers - 1 if kv_share < down_frac and _can_lose_one(kv_share, workers, up_frac) else workers


def _can_lose_one(share: float, workers: int, up_frac: float) -> bool:
    """Whether the load `share` of each of several workers stays below `up_frac` on one worker fewer."""
    return workers > 1 and share * workers / (workers - 1) < up_frac


class Dynamo:
    """The controller. After each interval `sizes` decides for all pools: at most one worker more or fewer.

    `current` are the sizes decided last, and `changed_s` the time at which they changed. `input_tokens` is
    the mean prompt length of the requests that finished last.
    """

    def __init__(self, settings: DynamoSettings, knowledge: Knowledge) -> None:
        knowledge.require_facts("dynamo", "engines")
        if knowledge.roles.count(MIXED) not in (0, len(knowledge.roles)):
            raise InputError(
                "controller 'dynamo': the fleet has mixed workers beside prefill or decode workers"
            )
        self.settings, self.knowledge = settings, knowledge
        self.every_s, self.lag_s = settings.every_s, settings.lag_s
        self.start([0] * len(knowledge.pools))

    def start(self, sizes: Sequence[int]) -> None:
        self.current = [int(size) for size in sizes]
        self.changed_s = -math.inf
        self.input_tokens = math.nan

    def sizes(self, reading: MetricsReading) -> list[int]:
        latest_tokens = mean_of(reading.input_tokens, range(len(self.current)))
        if not math.isnan(latest_tokens):  # NaN: no request has finished in this interval.
            self.input_tokens = latest_tokens
        if is_before_traffic(reading):
            return list(self.current)
        is_settled = all(int(reading.ready[i]) == size for i, size in enumerate(self.current))
        if is_settled and reading.time_s - self.changed_s >= self.settings.grace_s:
            sizes = self.knowledge.bounded_sizes(
                [self._pool_size(reading, i) for i in range(len(self.current))]
            )
            if sizes != self.current:
                self.changed_s = reading.time_s
            self.current = sizes
        return list(self.current)

    def _pool_size(self, reading: MetricsReading, pool: int) -> int:
        """The next size of a pool, at most one worker from the present one."""
        workers, engine = self.current[pool], self.knowledge.engines[pool]
        if not workers:  # An empty pool gets a worker when requests wait for one (`Knowledge.limbo_of`).
            return 1 if self.knowledge.limbo_of(reading, pool) else 0
        waiting, kv_share = float(reading.waiting[pool]), float(reading.kv_frac[pool])
        if waiting and math.isnan(self.input_tokens):
            return workers  # Prompt lengths are unknown until a first request has finished.
        queued_tokens = waiting * self.input_tokens / workers if waiting else 0.0
        if self.knowledge.roles[pool] == PREFILL:
            return prefill_workers(self.settings, queued_tokens / engine.context_tokens, workers)
        return decode_workers(self.settings, kv_share + queued_tokens / engine.kv_tokens, workers)
