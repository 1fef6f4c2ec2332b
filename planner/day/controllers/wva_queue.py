"""The queue model with which llm-d's workload-variant-autoscaler began ("inferno"), and the sizes by it.

Source: llm-d/llm-d-workload-variant-autoscaler at 56a651b (2025-10-29): pkg/analyzer/queueanalyzer.go,
mm1modelstatedependent.go. Times of one worker, in ms, with n requests in a batch of at most N:

    prefill(n) = gamma + delta * in * n      decode(n) = alpha + beta * n
    mu(n)      = n / (prefill(n) + (out - 1) * decode(n)), mu(N) for N < n <= N + Q, and no more requests

Here in and out are the mean tokens of prompts and answers, and Q requests may wait.

With n requests a worker serves mu(n) requests per ms, and requests arrive at random: a Markov chain in n. Its
stationary distribution gives throughput X and the mean time in service S. The batch n* whose service takes S
gives TTFT = wait + prefill(n*) and the gap between tokens decode(n*). A worker carries the largest rate that
keeps the targets of both; replicas = ceil(rate / that rate).

`wva-queue` sizes every pool with the mean lengths of the last interval and the rate that arrives; a prefill
or decode pool has the target of its own phase only (the original has no such pools).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq

from planner.day.controllers.knowledge import (
    DECODE,
    PREFILL,
    EngineProfile,
    Knowledge,
    is_before_traffic,
    least_whole,
    mean_lengths,
)
from planner.day.controllers.settings import setting
from planner.day.controllers.wva import HpaFollowed, WvaRules
from planner.fleet import Role
from planner.simulator.elastic import Floats, MetricsReading

# EDGE_FRAC and QUEUE_PER_SEAT are constants of the original, which searches rates from EDGE_FRAC mu(1) to
# (1 - EDGE_FRAC) mu(N): at rate 0 the chain is empty.
EDGE_FRAC = 0.001
QUEUE_PER_SEAT = 10  # Q / N: this many requests may wait for each seat.
RATE_TOLERANCE = 1e-6  # The relative error of a root search, far below the difference that one worker makes.
CACHED_RATES = 4096  # Rates are cached for this many (pool, lengths), because each takes a root search.
LEAST_CARRIED_RPS = 1e-9  # A worker that carries nothing counts as carrying this, to divide by no 0.


@dataclass(frozen=True, slots=True)
class QueueTimes:
    """A worker as the queue model sees it, with the letters above; times in ms."""

    seats: int  # N
    queue: int  # Q
    alpha: float
    beta: float
    gamma: float
    delta: float
    input_tokens: float  # in; 0 for a decode worker, which computes no prompts.
    output_tokens: float  # out; 1 for a prefill worker.

    @property
    def decode_steps(self) -> float:
        """Decode steps of a request: one per output token except the first, which the prefill gives.

        On a decode worker the original counts one step for an answer of one token.
        """
        return 1.0 if not self.input_tokens and self.output_tokens == 1 else self.output_tokens - 1

    def prefill_ms(self, batch: float) -> float:
        """The time of a step that prefills, for a batch of this size; 0 on a decode worker."""
        return self.gamma + self.delta * self.input_tokens * batch if self.input_tokens else 0.0

    def decode_ms(self, batch: float) -> float:
        """The time of a decode step for a batch of this size."""
        return self.alpha + self.beta * batch


@dataclass(frozen=True, slots=True)
class QueueState:
    """Means of the chain at one arrival rate; times in ms."""

    throughput_rps: float
    wait_ms: float
    serve_ms: float
    in_service: float  # The mean number of requests in the batch.
    batch: float  # n* of the module's docstring.
    ttft_ms: float
    itl_ms: float


class QueueModel:
    """The chain of one worker. State n has the weight rate^n / (mu(1) ... mu(n)), computed in logarithms."""

    def __init__(self, times: QueueTimes) -> None:
        self.times = times
        n = np.arange(1, times.seats + 1, dtype=float)
        per_prompt = times.gamma + times.delta * times.input_tokens * n if times.input_tokens else 0.0
        rates = n / (per_prompt + times.decode_steps * (times.alpha + times.beta * n))
        self.least_rps = float(rates[0]) * EDGE_FRAC * 1000
        self.most_rps = float(rates[-1]) * (1 - EDGE_FRAC) * 1000
        # However many requests wait, a full batch is served at mu(N).
        served = np.concatenate([np.log(rates), np.full(times.queue, math.log(rates[-1]))])
        self._states: Floats = np.arange(len(served) + 1, dtype=float)
        self._log_served: Floats = np.concatenate([[0.0], np.cumsum(served)])

    def queue_state_at(self, rate_rps: float) -> QueueState:
        """The means of the stationary distribution at this arrival rate. Times follow by Little's law."""
        rate = rate_rps / 1000
        log_weight = self._states * math.log(rate) - self._log_served
        weight = np.exp(log_weight - log_weight.max())  # At most 1, so that nothing overflows.
        total, seats = float(weight.sum()), self.times.seats
        in_system = float(self._states @ weight) / total
        full_weight = float(weight[seats + 1 :].sum())  # All seats are taken, and some requests wait.
        # In state n the batch has n requests, but never more than there are seats.
        in_service = (float(self._states[: seats + 1] @ weight[: seats + 1]) + full_weight * seats) / total
        throughput = rate * (1 - float(weight[-1]) / total)
        serve_ms = in_service / throughput
        wait_ms = max(in_system / throughput - serve_ms, 0.0)
        batch = self._batch(serve_ms)
        return QueueState(
            throughput_rps=throughput * 1000,
            wait_ms=wait_ms,
            serve_ms=serve_ms,
            in_service=in_service,
            batch=batch,
            ttft_ms=wait_ms + self.times.prefill_ms(batch),
            itl_ms=self.times.decode_ms(batch),
        )

    def _batch(self, serve_ms: float) -> float:
        """n*, the batch whose service takes `serve_ms`, between 0 and N; N if all batches take as long."""
        times = self.times
        fixed_ms = times.alpha * times.decode_steps + (times.gamma if times.input_tokens else 0.0)
        slope_ms = times.beta * times.decode_steps + times.delta * times.input_tokens
        if not slope_ms:
            return float(times.seats)
        return min(max((serve_ms - fixed_ms) / slope_ms, 0.0), float(times.seats))

    def largest_rate_rps(self, latency_ms: Callable[[QueueState], float], target_ms: float) -> float:
        """The largest rate [requests/s] at which a latency is within its target; 0 if there is none.

        `latency_ms` reads the latency from a state. It must rise with the rate.
        """
        if latency_ms(self.queue_state_at(self.least_rps)) > target_ms:
            return 0.0
        if latency_ms(self.queue_state_at(self.most_rps)) <= target_ms:
            return self.most_rps
        return float(
            brentq(
                lambda rate: latency_ms(self.queue_state_at(rate)) - target_ms,
                self.least_rps,
                self.most_rps,
                rtol=RATE_TOLERANCE,
            )
        )


def largest_rate_rps(times: QueueTimes, ttft_ms: float | None, itl_ms: float | None) -> float:
    """The largest rate that a worker carries within both targets; 0 where one request alone misses them."""
    model = QueueModel(times)
    rates = [model.most_rps]
    if ttft_ms is not None:
        rates.append(model.largest_rate_rps(lambda state: state.ttft_ms, ttft_ms))
    if itl_ms is not None:
        rates.append(model.largest_rate_rps(lambda state: state.itl_ms, itl_ms))
    return min(rates)


def times_of(engine: EngineProfile, role: Role, input_tokens: float, output_tokens: float) -> QueueTimes:
    """The queue model's times of a worker whose requests have these mean lengths."""
    # On average a request is in the middle of its answer.
    context = input_tokens + output_tokens / 2
    return QueueTimes(
        seats=engine.most_sequences(context),
        queue=QUEUE_PER_SEAT * engine.most_sequences(context),
        alpha=1000 * engine.decode_s,
        beta=1000 * (engine.decode_s_per_sequence + engine.decode_s_per_token * context),
        gamma=1000 * engine.prefill_s,
        delta=1000 * engine.prefill_s_per_token,
        input_tokens=0.0 if role == DECODE else input_tokens,
        output_tokens=1.0 if role == PREFILL else output_tokens,
    )


@dataclass(frozen=True, slots=True)
class WvaQueueSettings(WvaRules):
    """The settings of the controller `wva-queue`: those of `WvaRules` and a margin."""

    margin: float = setting(1.0, "times the rate that arrives", least=0.1, most=10.0)


class WvaQueue(HpaFollowed):
    """The controller. `HpaFollowed` (wva.py) calls `optimal_sizes` at its interval; HPAs follow the sizes."""

    def __init__(self, settings: WvaQueueSettings, knowledge: Knowledge) -> None:
        knowledge.require_facts("wva-queue", "engines", "ttft_s", "tpot_s")
        self.settings = settings
        self._carried_rps_of = lru_cache(maxsize=CACHED_RATES)(self._carried_rps)
        super().__init__(settings, knowledge)

    def start(self, sizes: Sequence[int]) -> None:
        super().start(sizes)
        self.arrived, self.counted_s = 0.0, 0.0  # Requests since the last decision, and in which time.
        # Mean tokens of prompts and answers; NaN until a request has ended.
        self.lengths = (math.nan, math.nan)

    def sizes(self, reading: MetricsReading) -> list[int]:
        if is_before_traffic(reading):
            return list(self.current)
        self.arrived += self.knowledge.rate_rps(reading) * reading.interval_s
        self.counted_s += reading.interval_s
        lengths = mean_lengths(reading)
        self.lengths = lengths if not math.isnan(sum(lengths)) else self.lengths
        return super().sizes(reading)

    def optimal_sizes(self, reading: MetricsReading) -> list[int]:
        """The sizes for the mean rate since the last call."""
        rate_rps = self.arrived / self.counted_s * self.settings.margin
        self.arrived = self.counted_s = 0.0
        new_sizes = list(self.current)
        if math.isnan(sum(self.lengths)):
            return new_sizes
        prompt, answer = (max(round(each), 1) for each in self.lengths)
        for role in dict.fromkeys(self.knowledge.roles):
            pools = self.knowledge.pools_of_role(role)
            worker_rps = {i: self._carried_rps_of(i, prompt, answer) for i in pools}
            # Like WVA, change only one pool: the one that carries a request at the lowest price.
            best = min(
                pools, key=lambda i: self.knowledge.price_of(i) / max(worker_rps[i], LEAST_CARRIED_RPS)
            )
            others_rps = sum(self.current[i] * worker_rps[i] for i in pools if i != best)
            if worker_rps[best]:
                new_sizes[best] = least_whole(max(rate_rps - others_rps, 0.0) / worker_rps[best])
            else:  # No number of workers keeps the targets, so the size stays.
                new_sizes[best] = max(self.current[best], 1)
        return new_sizes

    def _carried_rps(self, pool: int, input_tokens: int, output_tokens: int) -> float:
        """Requests/s that a worker of the pool carries within the targets of its role."""
        knowledge = self.knowledge
        assert knowledge.ttft_s is not None and knowledge.tpot_s is not None
        role = knowledge.roles[pool]
        return largest_rate_rps(
            times_of(knowledge.engines[pool], role, input_tokens, output_tokens),
            None if role == DECODE else 1000 * knowledge.ttft_s,
            None if role == PREFILL else 1000 * knowledge.tpot_s,
        )
