"""Dynamo's planner by load: adds or takes away a worker by queued prompt tokens and KV cache in use.

Read in ai-dynamo/dynamo: components/src/dynamo/planner/core/load_scaling.py at 0c6da1e (2026; the modes
`optimization_target: throughput` and `latency`), config/defaults.py at 1ca6015, and the tests of those modes.

It decides every `every` (5 s), and only while no worker starts. A prefill pool gains a worker if queued
prompt tokens per worker reach `prefill_up` times the longest context, and loses one below `prefill_down`. A
decode pool gains a worker if the KV cache in use, with what queues for it, is above `kv_up`, and loses one
below `kv_down`. Mixed pools go by the KV cache, with queued prompts counted as KV. The original looks at the
fullest worker to add one, and at all workers to take one away; here the mean of a reading stands for both.
Queued tokens are the number of waiting prompts times the mean length of the prompts that finished last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.day.controllers.knowledge import MIXED, PREFILL, Knowledge, is_before_traffic, mean_of
from planner.day.controllers.settings import NAME, SECONDS, SHARE, ControllerSettings, settings_field
from planner.errors import InputError
from planner.simulator.elastic import MetricsReading

# Queued prompt tokens as shares of the longest context, up and down; then KV in use, up and down.
THRESHOLDS = {"throughput": (1.0, 0.1, 1.0, 0.6), "latency": (0.1, 0.0, 0.4, 0.1)}


@dataclass(frozen=True, slots=True)
class DynamoSettings(ControllerSettings):
    """The settings of the controller `dynamo`."""

    optimize: str = settings_field(
        "throughput", NAME, "what the thresholds are for", choices=tuple(THRESHOLDS)
    )
    prefill_up_frac: float | None = settings_field(
        None, SHARE, "queued prompt tokens of the longest context", most=100.0
    )
    prefill_down_frac: float | None = settings_field(None, SHARE, "the same, for one fewer", most=100.0)
    kv_up_frac: float | None = settings_field(None, SHARE, "KV in use and queued for", most=10.0)
    kv_down_frac: float | None = settings_field(None, SHARE, "the same, for one fewer", most=10.0)
    grace_s: float = settings_field(0.0, SECONDS, "no decision so long after a change", most=3600.0)
    every_s: float = settings_field(5.0, SECONDS, "load_adjustment_interval", least=1.0, most=600.0)
    lag_s: float = settings_field(1.0, SECONDS, "age of the metrics", most=600.0)

    def check(self) -> None:
        prefill_up, prefill_down, kv_up, kv_down = self.scaling_thresholds
        if prefill_up <= prefill_down or kv_up <= kv_down:
            raise InputError(
                f"up thresholds must be above down thresholds: prefill {prefill_up:g} and {prefill_down:g}, "
                f"kv {kv_up:g} and {kv_down:g}"
            )

    @property
    def scaling_thresholds(self) -> tuple[float, float, float, float]:
        """Prefill up and down, KV up and down."""
        given = (self.prefill_up_frac, self.prefill_down_frac, self.kv_up_frac, self.kv_down_frac)
        prefill_up, prefill_down, kv_up, kv_down = (
            default if value is None else value
            for value, default in zip(given, THRESHOLDS[self.optimize], strict=True)
        )
        return prefill_up, prefill_down, kv_up, kv_down


def prefill_workers(settings: DynamoSettings, queued_share: float, workers: int) -> int:
    """The next size of a prefill pool of `workers`, each of which has queued prompt tokens of `queued_share`
    times the longest context.
    """
    up, down, _, _ = settings.scaling_thresholds
    if queued_share >= up:
        return workers + 1
    is_idle = queued_share < down or queued_share == down == 0  # At a threshold of 0 an empty queue is idle.
    return workers - 1 if workers > 1 and is_idle else workers


def decode_workers(settings: DynamoSettings, kv_share: float, workers: int) -> int:
    """The next size of a pool of `workers`, with `kv_share` of their KV cache in use or queued for."""
    _, _, up, down = settings.scaling_thresholds
    if kv_share > up:
        return workers + 1
    return workers - 1 if workers > 1 and kv_share < down else workers


class Dynamo:
    """The controller; `sizes` decides for all pools after an interval."""

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
        tokens = mean_of(reading.input_tokens, range(len(self.current)))
        self.input_tokens = self.input_tokens if math.isnan(tokens) else tokens
        if is_before_traffic(reading):
            return list(self.current)
        is_settled = all(int(reading.ready[i]) == size for i, size in enumerate(self.current))
        if is_settled and reading.time_s - self.changed_s >= self.settings.grace_s:
            sizes = self.knowledge.bounded_sizes(
                [self._pool_size(reading, i) for i in range(len(self.current))]
            )
            self.changed_s = reading.time_s if sizes != self.current else self.changed_s
            self.current = sizes
        return list(self.current)

    def _pool_size(self, reading: MetricsReading, pool: int) -> int:
        """The next size of a pool, at most one worker from the present one."""
        workers, engine = self.current[pool], self.knowledge.engines[pool]
        if not workers:  # A pool without workers gains one if requests found no worker.
            return 1 if self.knowledge.limbo_of(reading, pool) else 0
        waiting, kv_share = float(reading.waiting[pool]), float(reading.kv_frac[pool])
        if waiting and math.isnan(self.input_tokens):
            return workers  # Before a request has finished, its prompt's length is unknown.
        queued_tokens = waiting * self.input_tokens / workers if waiting else 0.0
        if self.knowledge.roles[pool] == PREFILL:
            return prefill_workers(self.settings, queued_tokens / engine.context_tokens, workers)
        return decode_workers(self.settings, kv_share + queued_tokens / engine.kv_tokens, workers)
