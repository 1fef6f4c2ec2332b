"""Vidur-Search: rule, frontier and search on engines made up for it, and against what Vidur found."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plans import mixed
from shares import some

from benchmarks import vidur_search as benchmark
from benchmarks.vidur_search import SchedulingDelay
from planner.documents.catalog import read_catalog
from planner.domain import Gpu, Limit, Slo
from planner.errors import InputError
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.papers.goodput import Steady, find_goodput, poisson_traffic
from planner.papers.vidur_search import (
    EngineSettingChoices,
    OfflineConfiguration,
    SearchedConfiguration,
    configurations,
    most_rps,
    pareto_configurations,
    pareto_makespans,
    search_configurations,
    search_makespans,
)
from planner.search.problem.bill import bill_fleet
from planner.traffic.trace import Trace

SHARED = Path(__file__).parents[3] / "shared" / "reference" / "vidur"
LLM = Llm("paper", layers=4, hidden=4, heads=2, kv_heads=1, head_dim=1, ffn=8, vocab=10, context_tokens=64)
PROMPTS = Trace("prompts", np.arange(10.0), np.full(10, 16), np.ones(10, np.int64))


def server(step_s: float, usd_per_h: float = 1.0, replicas: int = 1) -> Fleet:
    """Engines that serve one request at a time, in so many seconds."""
    gpu = Gpu("paper", 1e3, 100.0, 1000.0, "wire", 10.0, 1.0, 8, usd_per_h, "paper", "paper")
    latency = StepLatency((1.0, 2.0), (step_s, step_s), 0.0, 0.0, 0.0, 0.0, 0.0, "made up")
    type_ = WorkerType(gpu, 1, latency, 1600, 64, 1)
    return Fleet(LLM, (Pool("mixed", "mixed", type_, replicas),), Policies(batching="vllm-v0"))


def test_vidurs_rule_accepts_overload_on_a_short_run() -> None:
    """A request a second, 1.04 of them arriving: the P99 of 100 waits is some 4 s, that of 2000 some 80 s."""

    def clock(rate_rps: float, requests: int, seed: int) -> Trace:
        arrival_s = np.arange(requests) / rate_rps
        return Trace("clock", arrival_s, np.full(requests, 16), np.ones(requests, np.int64))

    assert SchedulingDelay(clock, requests=100).carries(server(1.0), 1.04)
    assert not SchedulingDelay(clock, requests=2000).carries(server(1.0), 1.04)
    found = find_goodput(SchedulingDelay(clock, requests=100), server(1.0), tolerance_frac=0.001)
    assert found.rate_rps == pytest.approx(
        1 / (1 - 5 / 98), rel=0.005
    )  # request 98 waits 98 (1 - 1 / r) = 5 s


def test_requests_per_dollar_decide() -> None:
    """Half the speed at a third of the price wins; two replicas carry twice as much for twice as much."""
    fleets = [server(1.0, 3.0), server(2.0, 1.0), server(1.0, 3.0, replicas=2)]
    rule = Steady(Slo((Limit("ttft", 0.9, 30.0),)), poisson_traffic(PROMPTS), seeds=1)
    rows = search_configurations(fleets, rule, PROMPTS, (("ttft", 0.9),))
    assert rows[0].fleet is fleets[1]
    assert rows[0].requests_per_usd == pytest.approx(3600 * rows[0].rate_rps / 1.0)
    assert rows[0].rate_rps == pytest.approx(0.5, rel=0.1)
    assert {row.fleet.workers: row.rate_rps for row in rows[1:]}[2] > 1.9
    assert all(0 < row.values_s[0] <= 30.0 for row in rows)


def test_a_configuration_that_carries_nothing_has_no_latency() -> None:
    rule = Steady(Slo((Limit("ttft", 0.9, 0.5),)), poisson_traffic(PROMPTS), seeds=1)
    (row,) = search_configurations([server(1.0)], rule, PROMPTS)
    assert row.rate_rps == 0 and all(map(math.isnan, row.values_s))
    assert pareto_configurations([row], 0) == ()


def test_makespans_by_hand() -> None:
    """Ten requests of a step each: 10 s at 1 s a step and 3 USD/h, 20 s at 2 s and 1 USD/h, 5 s on two of the
    first. The bills are 30, 20 and 30 USD over 3600; of the equal ones the shorter is on the frontier.
    """
    fleets = [server(1.0, 3.0), server(2.0, 1.0), server(1.0, 3.0, replicas=2)]
    rows = search_makespans(fleets, PROMPTS)
    assert [row.makespan_s for row in rows] == pytest.approx([5, 10, 20])
    assert [3600 * row.usd for row in rows] == pytest.approx([30, 30, 20])
    assert [row.fleet for row in pareto_makespans(rows)] == [fleets[2], fleets[1]]


def test_a_fleet_that_rejects_requests_has_no_makespan() -> None:
    too_long = replace(PROMPTS, input_tokens=np.full(10, 5000))
    (row,) = search_makespans([server(1.0)], too_long)
    assert math.isinf(row.makespan_s) and pareto_makespans([row]) == ()


@pytest.mark.parametrize("seed", some(range(50), 15))
def test_the_frontier_holds_what_no_other_beats(seed: int) -> None:
    """Small whole numbers, so that many tie; of equal rows one stays."""
    rng = np.random.default_rng(seed)
    rows = [
        SearchedConfiguration(server(1.0), float(rate), (float(value),))
        for rate, value in rng.integers(1, 8, (20, 2))
    ]
    points = {(row.rate_rps, row.values_s[0]) for row in rows}
    best = {
        (rate, value)
        for rate, value in points
        if not any(r >= rate and v <= value and (r, v) != (rate, value) for r, v in points)
    }
    kept = pareto_configurations(rows, 0)
    assert {(row.rate_rps, row.values_s[0]) for row in kept} == best and len(kept) == len(best)


def test_configurations_hold_the_weights_and_the_longest_request() -> None:
    """Llama-3.1-70B (141 GB) on 80 GB GPUs: 1 never, 2 barely, 4 and more; 16 GPUs hold 16 / (TP PP)."""
    catalog = read_catalog()
    fleets = configurations(
        catalog.llm("llama-3.1-70b"),
        [catalog.gpu("h100-80g")],
        catalog,
        EngineSettingChoices(budgets=(512,), seats=(128,)),
        total_gpus=16,
        least_kv_tokens=8192,
    )
    pools = [fleet.pools[0] for fleet in fleets]
    assert min(pool.type.gpus for pool in pools) >= 2
    assert all(pool.count == 16 // pool.type.gpus and pool.type.kv_tokens >= 8192 for pool in pools)
    assert len({(pool.type.tp, pool.type.pp) for pool in pools}) * 3 == len(fleets)  # three batchings
    with pytest.raises(InputError, match="no configuration holds it on 1 GPUs"):
        configurations(catalog.llm("llama-3.1-70b"), [catalog.gpu("h100-80g")], catalog, total_gpus=1)


def test_the_work_bound_is_near_what_a_server_can_do() -> None:
    """Prompts alone: a step each, 2 s."""
    assert most_rps(server(2.0, replicas=3), PROMPTS) == pytest.approx(3 / 2)


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the checkout")
def test_capacities_are_those_of_vidur_search(capsys: pytest.CaptureFixture[str]) -> None:
    """10.84 and 11.5 requests/s, to its own granularity of 2.5 %; over 20,000 requests neither holds."""
    benchmark.against_vidur(SHARED)
    lines = capsys.readouterr().out.splitlines()
    for line, theirs in zip(lines, (10.84, 11.5), strict=True):
        words = line.split()
        assert float(words[1]) == pytest.approx(theirs, rel=0.025)
        assert float(words[-1]) < 0.95 * theirs


def test_a_dollar_pays_for_the_idle_gpus_of_a_node_too() -> None:
    """One H100 of a node of eight: 23.92 USD/h, not 2.99."""
    fleet = mixed(tp=1, count=1)
    paid_usd_per_h = bill_fleet(fleet).usd_per_h
    assert paid_usd_per_h == pytest.approx(8 * fleet.price_usd_per_h)
    assert SearchedConfiguration(fleet, 2.0, ()).requests_per_usd == pytest.approx(7200 / paid_usd_per_h)
    assert OfflineConfiguration(fleet, 1800.0).usd == pytest.approx(paid_usd_per_h / 2)
