"""What the scripts of this folder share: workers of the catalog, made-up traffic, a search by halves."""

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
    """With the catalog's step times and the memory model's KV cache."""
    shape, card = CATALOG.llm(llm), CATALOG.gpu(gpu)
    kv_tokens = worker_memory(shape, card, tp).kv_tokens
    return WorkerType(card, tp, CATALOG.step_latency(shape, card, tp), kv_tokens, budget, seats).with_llm(
        shape
    )


def poisson(rate_rps: float, input_tokens: Ints, output_tokens: Ints, seed: int = 0) -> Trace:
    gaps_s = np.random.default_rng(seed).exponential(1 / rate_rps, len(input_tokens))
    return Trace("made", np.cumsum(gaps_s), input_tokens, output_tokens)


def log_normal(rng: np.random.Generator, n: int, median: float, sigma: float, most: int) -> Ints:
    return np.clip(np.ceil(rng.lognormal(np.log(median), sigma, n)), 1, most).astype(np.int64)


def most(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The largest value that holds, to 1 %, where what is below one that holds does, too; 0 if none does."""
    if not holds(low):
        return 0.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def in_seconds(trace: Trace, rate_rps: float) -> Trace:
    """The same requests at another rate: a faster or slower clock."""
    return replace(trace, arrival_s=trace.arrival_s * trace.rate_rps / rate_rps)
