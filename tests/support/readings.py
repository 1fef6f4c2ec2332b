"""Readings and knowledge made up for controllers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.day.controllers.knowledge import CapacityTable, EngineProfile, Knowledge
from planner.fleet import Role
from planner.simulator.elastic import ElasticPool, MetricsReading

# 20 ms and 0.1 ms per prompt token; a step of 10 ms, 0.1 ms per sequence and 0.1 us per token of context
ENGINE = EngineProfile(0.02, 1e-4, 0.01, 1e-4, 1e-7, seats=64, kv_tokens=100_000, context_tokens=4096)


def reading(time_s: float = 0.0, *, ready: Sequence[int] = (1,), **given: Any) -> MetricsReading:
    """A reading of `interval_s` (15 s); what is not given is zero, a mean of nothing is NaN."""
    pools = len(ready)

    def counts(name: str) -> Any:
        return np.array(given.pop(name, [0] * pools), dtype=np.int64)

    def means(name: str) -> Any:
        return np.array(given.pop(name, [math.nan] * pools), dtype=float)

    made = MetricsReading(
        time_s=time_s,
        interval_s=given.pop("interval_s", 15.0),
        limbo=given.pop("limbo", 0),
        ready=np.array(ready, dtype=np.int64),
        kv_frac=np.array(given.pop("kv_frac", [0.0] * pools), dtype=float),
        **{
            name: counts(name)
            for name in ("starting", "draining", "waiting", "running", "arrived", "finished")
        },
        **{name: means(name) for name in ("input_tokens", "output_tokens", "ttft_s", "tpot_s")},
    )
    assert not given, given
    return made


def knowledge(
    roles: Sequence[Role] = ("mixed",),
    *,
    least: int = 1,
    most: int = 1000,
    start_s: float = 120.0,
    **known: Any,
) -> Knowledge:
    """Pools alike."""
    pools = tuple(ElasticPool(start_s=start_s, least=least, most=most) for _ in roles)
    return Knowledge(pools, tuple(roles), **known)


def per_worker(rate_rps: float, *pools: float, rows: int = 20) -> CapacityTable:
    """A table by which each worker of a pool carries so many requests/s; steps of `rate_rps`."""
    rates = np.array([rate_rps * row for row in range(1, rows + 1)])
    sizes = np.ceil(rates[:, None] / np.array(pools) - 1e-9).astype(np.int64)
    return CapacityTable(rates, sizes, "by arithmetic")
