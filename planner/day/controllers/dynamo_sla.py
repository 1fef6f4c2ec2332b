"""Dynamo's SLA planner: sizes pools for the forecast load of the next interval, corrected by the TTFT and ITL
that were measured.

Sources in ai-dynamo/dynamo: components/planner/src/dynamo/planner/utils/planner_core.py at 0761925 (2025;
with correction factors), components/src/dynamo/planner/core/throughput_scaling.py at 0c9050c (2026; mixed
workers, no more correction), config/defaults.py at 1ca6015, tests/planner/test_replica_calculation.py at
002a7c3.

    prefill workers = ceil(requests x in / interval x min(1, p) / prompt tokens/s of a worker)
    decode workers  = ceil(requests x out / interval / tokens/s of a worker whose ITL is target / d)
    p = TTFT seen / TTFT of a prompt alone,  d = ITL seen / ITL at the concurrency seen

`in` and `out` are mean lengths, ITL is the mean gap between tokens. The forecast has the mean lengths of the
last interval, and its rate (constant) or a seasonal rate (the original has ARIMA, Kalman and Prophet). Dynamo
interpolates throughputs in profiling runs; here they follow from the plan's step times: a prompt alone, and
the largest batch that keeps the ITL. After an interval without a finished request sizes stay as they are, but
an empty pool gets a worker if requests wait for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.day.controllers.forecasting import RateForecast
from planner.day.controllers.knowledge import (
    DECODE,
    PREFILL,
    EngineProfile,
    Knowledge,
    is_before_traffic,
    least_whole,
    mean_lengths,
    mean_of,
)
from planner.day.controllers.settings import ControllerSettings, setting
from planner.domain import ROUNDING
from planner.simulator.elastic import MetricsReading
from planner.units import DAY_S


@dataclass(frozen=True, slots=True)
class DynamoSlaSettings(ControllerSettings):
    """How Dynamo's SLA planner predicts the next interval, and how often it decides."""

    predictor: str = setting("constant", "forecast of the next interval", choices=("constant", "seasonal"))
    corrected: bool = setting(True, "correction factors; later versions have none")
    season_s: float = setting(DAY_S, "period of the seasonal predictor", least=600.0)
    every_s: float = setting(180.0, "throughput_adjustment_interval", least=10.0, most=7200.0)
    lag_s: float = setting(15.0, "age of the metrics", most=600.0)


@dataclass(frozen=True, slots=True)
class ForecastLoad:
    """The expected load of the next interval; lengths are means."""

    rate_rps: float
    input_tokens: float
    output_tokens: float

    @property
    def context_tokens(self) -> float:
        """The mean context of a request over its output tokens."""
        return self.input_tokens + self.output_tokens / 2


def prefill_rps(load: ForecastLoad, tokens_per_s: float, correction: float = 1.0) -> float:
    """Requests/s of a worker that computes `tokens_per_s` prompt tokens/s.

    `correction` is p of the module's docstring. Below 1, prompts took less work than assumed, and the worker
    carries more. Above 1 it counts as 1, as in Dynamo.
    """
    return tokens_per_s / (load.input_tokens * min(1.0, correction))


def decode_rps(load: ForecastLoad, tokens_per_s: float) -> float:
    """Requests/s, each of one token at least, of a worker that generates `tokens_per_s` within the target."""
    return tokens_per_s / max(load.output_tokens, 1.0)


def count_replicas(rate_rps: float, worker_rps: float) -> int:
    """The workers that carry `rate_rps`, at least one (Dynamo's min_endpoint)."""
    return max(least_whole(rate_rps / worker_rps), 1)


def prefill_tokens_per_s(engine: EngineProfile, input_tokens: float) -> float:
    """Prompt tokens/s of one prompt after the other, as Dynamo's profiler measures them."""
    return input_tokens / engine.ttft_s(input_tokens)


def decode_tokens_per_s(engine: EngineProfile, context_tokens: float, itl_s: float) -> float:
    """Tokens/s of the largest batch that keeps the ITL, or of one request if no batch keeps it."""
    # A step takes `engine.decode_s` and this much more for each sequence.
    per_sequence_s = engine.itl_s(1, context_tokens) - engine.decode_s
    batch = _largest_batch(engine, context_tokens, itl_s, per_sequence_s)
    return batch / engine.itl_s(batch, context_tokens)


def _largest_batch(engine: EngineProfile, context_tokens: float, itl_s: float, per_sequence_s: float) -> int:
    """The largest batch whose step takes at most `itl_s`, from 1 to `most_sequences`. Each of its sequences
    adds `per_sequence_s` to the step.
    """
    most = engine.most_sequences(context_tokens)
    if per_sequence_s <= 0:  # The step time does not depend on the batch.
        return most
    # Rounding errors must not cost a whole sequence.
    return max(min(math.floor((itl_s - engine.decode_s) / per_sequence_s + ROUNDING), most), 1)


def mixed_rps(engine: EngineProfile, load: ForecastLoad, itl_s: float) -> float:
    """Requests/s of a mixed worker with the largest batch n whose steps keep the ITL.

    A request takes a step for each output token, so a step computes n / (output tokens) prompts on average.
    """
    steps_of_request = max(load.output_tokens, 1.0)
    # The seconds that prompts add to a step, per sequence of the batch.
    prompts_s = engine.ttft_s(load.input_tokens) / steps_of_request
    per_sequence_s = engine.itl_s(1, load.context_tokens) - engine.decode_s + prompts_s
    batch = _largest_batch(engine, load.context_tokens, itl_s, per_sequence_s)
    step_s = engine.decode_s + per_sequence_s * batch
    return batch / (steps_of_request * step_s)


class DynamoSla:
    """The controller `dynamo-sla`; for its methods see `Controller` in simulator/elastic.py."""

    def __init__(self, settings: DynamoSlaSettings, knowledge: Knowledge) -> None:
        knowledge.require_facts("dynamo-sla", "engines", "tpot_s")
        self.settings, self.knowledge = settings, knowledge
        self.every_s, self.lag_s = settings.every_s, settings.lag_s
        self.forecast = RateForecast(settings.every_s, settings.season_s, knowledge)
        self.decoding_pools = [i for i, role in enumerate(knowledge.roles) if role != PREFILL]
        self.start([0] * len(knowledge.pools))

    def start(self, sizes: Sequence[int]) -> None:
        self.current = [int(size) for size in sizes]
        self.forecast.start()

    def sizes(self, reading: MetricsReading) -> list[int]:
        if is_before_traffic(reading):
            return list(self.current)
        rate_rps = self.knowledge.rate_rps(reading)
        self.forecast.add(reading.time_s, reading.interval_s, rate_rps)
        seen = ForecastLoad(rate_rps, *mean_lengths(reading))
        ttft_s = mean_of(reading.ttft_s, range(len(self.current)))
        itl_s = mean_of(reading.tpot_s, self.decoding_pools)
        # A mean is NaN if no request finished in the interval.
        if any(map(math.isnan, (seen.input_tokens, seen.output_tokens, ttft_s, itl_s))):
            if reading.limbo:  # Requests wait because a pool is empty; then every empty pool gets a worker.
                self.current = self.knowledge.bounded_sizes([max(size, 1) for size in self.current])
            return list(self.current)
        load = seen
        if self.settings.predictor == "seasonal":
            load = replace(seen, rate_rps=self.forecast.rate_at(reading.time_s + self.every_s))
        self.current = self.knowledge.bounded_sizes(self._wanted_sizes(reading, load, ttft_s, itl_s))
        return list(self.current)

    def _wanted_sizes(
        self, reading: MetricsReading, load: ForecastLoad, ttft_s: float, itl_s: float
    ) -> list[int]:
        """Sizes (P,) of all pools, for the expected load and the TTFT and ITL seen. Dynamo has one pool per
        role. If there are several, the first is sized for the rate that the others, at their present sizes,
        do not carry.
        """
        knowledge = self.knowledge
        assert knowledge.tpot_s is not None  # `__init__` requires it.
        sizes = list(self.current)
        for role in dict.fromkeys(knowledge.roles):
            pools = knowledge.pools_of_role(role)
            worker_rps = []
            for i in pools:
                engine = knowledge.engines[i]
                if role == PREFILL:
                    correction = self._prefill_correction(engine, load, ttft_s)
                    tokens_per_s = prefill_tokens_per_s(engine, load.input_tokens)
                    worker_rps.append(prefill_rps(load, tokens_per_s, correction))
                elif role == DECODE:
                    target_s = knowledge.tpot_s / self._decode_correction(reading, i, load, ttft_s, itl_s)
                    tokens_per_s = decode_tokens_per_s(engine, load.context_tokens, target_s)
                    worker_rps.append(decode_rps(load, tokens_per_s))
                else:
                    worker_rps.append(mixed_rps(engine, load, knowledge.tpot_s))
            other_pools = zip(worker_rps[1:], pools[1:], strict=True)
            others_rps = sum(each_rps * sizes[i] for each_rps, i in other_pools)
            sizes[pools[0]] = count_replicas(max(load.rate_rps - others_rps, 0.0), worker_rps[0])
        return sizes

    def _prefill_correction(self, engine: EngineProfile, load: ForecastLoad, ttft_s: float) -> float:
        """The factor p of the module's docstring; 1 if corrections are switched off."""
        return ttft_s / engine.ttft_s(load.input_tokens) if self.settings.corrected else 1.0

    def _decode_correction(
        self, reading: MetricsReading, pool: int, load: ForecastLoad, ttft_s: float, itl_s: float
    ) -> float:
        """The factor d of the module's docstring; 1 if corrections are switched off."""
        if not self.settings.corrected:
            return 1.0
        workers = max(int(reading.ready[pool]), 1)
        duration_s = ttft_s + itl_s * max(load.output_tokens - 1, 0.0)
        # Little's law: rate x duration requests are in flight, shared by all workers of the pool.
        batch = float(reading.arrived[pool]) / reading.interval_s * duration_s / workers
        factor = itl_s / self.knowledge.engines[pool].itl_s(batch, load.context_tokens)
        return factor if factor > 0 else 1.0  # An ITL of 0 (answers of one token) says nothing.
