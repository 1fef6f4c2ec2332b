"""Functions that the scripts of this folder share: workers of the catalog, drawn traffic, a bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from planner.documents.catalog import read_catalog
from planner.fleet import WorkerType
from planner.models.memory import worker_memory
from planner.traffic.trace import Trace

CATALOG = read_catalog()
Ints = npt.NDArray[np.int64]


def worker(llm: str, gpu: str, tp: int, *, budget: int, seats: int = 256) -> WorkerType:
    """A worker type with the catalog's step times and the memory model's KV cache; `budget` are the tokens
    and `seats` the sequences of a step at most.
    """
    shape, card = CATALOG.llm(llm), CATALOG.gpu(gpu)
    kv_tokens = worker_memory(shape, card, tp).kv_tokens
    return WorkerType(card, tp, CATALOG.step_latency(shape, card, tp), kv_tokens, budget, seats).with_llm(
        shape
    )


def poisson(rate_rps: float, input_tokens: Ints, output_tokens: Ints, seed: int = 0) -> Trace:
    """Requests of these lengths with Poisson arrivals."""
    gaps_s = np.random.default_rng(seed).exponential(1 / rate_rps, len(input_tokens))
    return Trace("made", np.cumsum(gaps_s), input_tokens, output_tokens)


def log_normal(rng: np.random.Generator, n: int, median: float, sigma: float, most: int) -> Ints:
    """(n,) lognormal lengths, rounded up and cut to 1 .. `most`; `sigma` is the logarithm's deviation."""
    return np.clip(np.ceil(rng.lognormal(np.log(median), sigma, n)), 1, most).astype(np.int64)


def most(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The largest value from `low` to `high` that holds, to 1 %, by bisection; 0 if `low` does not hold.
    Every value below one that holds is taken to hold.
    """
    if not holds(low):
        return 0.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def in_seconds(trace: Trace, rate_rps: float) -> Trace:
    """The same requests at another rate, by stretching the times of arrival."""
    return replace(trace, arrival_s=trace.arrival_s * trace.rate_rps / rate_rps)
