"""Rules of workers per load, on planted needs and on a small fleet."""

from __future__ import annotations

import numpy as np
import pytest

from planner.day.controllers.knowledge import EngineProfile
from planner.day.search.capacity import engine_profile
from planner.day.search.load_rules import _busiest_with_more_traffic, _fit_rule, _window_load
from planner.documents.catalog import read_catalog
from planner.fleet import WorkerType
from planner.traffic.trace import Trace


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_rule_is_covered(seed: int) -> None:
    """ceil(3 load) workers, one more in every twentieth window: nine in ten windows get what they need, and
    none over two more than the line."""
    rng = np.random.default_rng(seed)
    loads = rng.uniform(0.1, 4.0, 72)
    needed = np.ceil(3 * loads).astype(np.int64) + (rng.random(72) < 0.05)
    _, rule = _fit_rule(loads, needed, 15.0, 600.0)
    given = np.array([rule.workers_for_load(load) for load in loads.tolist()])
    assert (given >= needed).mean() >= 0.85
    assert (given <= np.ceil(3 * loads) + 2).all()


def test_few_windows_that_need_two_are_seen() -> None:
    """One worker but above a load of 1.6, one window in nine: the rule has its edge there, not beyond all."""
    loads = np.linspace(0.1, 1.8, 72)
    _, rule = _fit_rule(loads, np.where(loads > 1.6, 2, 1), 15.0, 600.0)
    assert rule.workers_for_load(1.75) == 2 and rule.workers_for_load(1.0) == 1
    assert list(rule.edges) == sorted(rule.edges)


def test_windows_that_all_need_the_same() -> None:
    loads = np.linspace(0.1, 1.0, 20)
    _, rule = _fit_rule(loads, np.full(20, 3), 15.0, 600.0)
    assert [rule.workers_for_load(load) for load in (0.1, 0.5, 1.0, 2.0)] == [3, 3, 3, 6]


def test_the_busiest_windows_come_with_more_traffic_too() -> None:
    """Ten windows of 60 to 600 requests/min: the eight busiest, each with 1.4 and 2 times its requests."""
    engine = EngineProfile(0.0, 1e-4, 0.0, 0.0, 0.0, 64, 1e5, 1e4)
    parts = []
    for rate in range(1, 11):
        arrival_s = np.arange(0.0, 600.0, 1 / rate)
        tokens = np.full(len(arrival_s), 100)
        parts.append(Trace("even", arrival_s, tokens, tokens))
    busier = _busiest_with_more_traffic(parts, engine, 600.0)
    assert len(busier) == 16
    highest = max(_window_load(part, engine, "prefill", 15.0, 600.0) for part in parts)
    assert max(_window_load(part, engine, "prefill", 15.0, 600.0) for part in busier) == pytest.approx(
        2 * highest, rel=0.05
    )


def test_the_ranks_of_a_worker_are_one_engine() -> None:
    """The profile was that of one rank: controllers took a worker of four for a quarter of what it is."""
    catalog = read_catalog()
    gpu = catalog.gpu("h100-80g")
    latency = catalog.step_latency(catalog.llm("Qwen/Qwen3-30B-A3B"), gpu, 1, ep=True, dp=4)
    profile = engine_profile(WorkerType(gpu, 1, latency, 100_000, 2048, 256, ep=True, dp=4), 4096)
    assert (profile.seats, profile.kv_tokens) == (1024, 400_000)
    # 64 decodes on each rank, whose experts compute those of all.
    step_s = float(latency.of_rank.step_s(64, decodes=64, kv_tokens=64_000)) + float(
        latency.joint_experts_s(256)
    )
    assert profile.itl_s(256, 1000) == pytest.approx(step_s, rel=0.1)
