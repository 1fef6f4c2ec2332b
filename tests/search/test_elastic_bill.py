"""What a run costs, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hand_made import GPU, LATENCY
from simulations import LLM, make_latency, make_trace, mixed

from planner.errors import InputError
from planner.fleet import Fleet, Pool, WorkerType
from planner.search.elastic_bill import BY_HOUR, Billing, elastic_bill, rentals_s
from planner.simulator.elastic import ElasticPool, ElasticRun, Span, simulate_elastic


def run_of(*spans: tuple[float, float], end_s: float) -> ElasticRun:
    """Workers asked for and gone at these times."""
    fleet, trace = mixed(make_latency()), make_trace([0.0], [1], [1])
    nothing = simulate_elastic(fleet, trace, [ElasticPool(0.0)], _Never())
    lives = tuple(Span(i, 0, asked, asked, gone, gone) for i, (asked, gone) in enumerate(spans))
    return replace(nothing, spans=lives, end_s=end_s)


class _Never:
    every_s, lag_s = math.inf, 0.0

    def start(self, sizes: object) -> None: ...

    def sizes(self, reading: object) -> tuple[int]:
        return (1,)

    def next_s(self, time_s: float) -> float:
        return math.inf


def fleet_of(price_usd_per_h: float, *, tp: int = 2, whole: bool = False) -> Fleet:
    gpu = replace(GPU, price_usd_per_h=price_usd_per_h, is_sold_whole=whole)
    return Fleet(LLM, (Pool("w", "mixed", WorkerType(gpu, tp, LATENCY, 16000, 512, 8).serving(LLM), 1),))


def test_by_the_second_and_by_the_hour() -> None:
    """2 GPUs at 3 USD/h: 1 h and 90 s. By the second 6 + 0.15 USD; by the hour 2 h and 1 h. Over 2 hours."""
    run = run_of((0.0, 3600.0), (1000.0, 1090.0), end_s=7200.0)
    fleet = fleet_of(3.0)
    second = elastic_bill(fleet, run)
    assert second.usd == pytest.approx(6.15)
    assert second.usd_per_h == pytest.approx(3.075)
    assert second.gpu_h == second.used_gpu_h == pytest.approx(2.05)
    hour = elastic_bill(fleet, run, BY_HOUR)
    assert [hour.usd, hour.gpu_h] == pytest.approx([12.0, 4.0])
    assert hour.used_gpu_h == pytest.approx(2.05)
    late = run_of((0.0, 3600.5), end_s=7200.0)
    assert elastic_bill(fleet, late, BY_HOUR).gpu_h == pytest.approx(4.0)


def test_a_least_time() -> None:
    """Given up after 10 s, a minute is paid; after 61.5 s, 62 s are."""
    billing = Billing(1.0, 60.0)
    assert [billing.billed_s(s) for s in (0.0, 10.0, 60.0, 61.5)] == [0.0, 60.0, 60.0, 62.0]
    with pytest.raises(InputError, match="must be > 0"):
        Billing(0.0)


def test_whole_nodes() -> None:
    """Nodes of 8 GPUs, workers of 4. A [0, 10], B [0, 6], C [4, 8]: 8, 12, 8, 4 GPUs in [0, 4], [4, 6],
    [6, 8], [8, 10] hours: one node for 10 h and one for 2 h, 96 GPU hours at 2 USD."""
    h = 3600.0
    used = [(0.0, 10 * h, 4), (0.0, 6 * h, 4), (4 * h, 8 * h, 4)]
    assert sorted(rentals_s(used, 8)) == [(0.0, 10 * h), (4 * h, 6 * h)]
    run = run_of(*((start_s, end_s) for start_s, end_s, _ in used), end_s=10 * h)
    paid = elastic_bill(fleet_of(2.0, tp=4, whole=True), run)
    assert paid.usd == pytest.approx(192.0)
    assert paid.gpu_h == pytest.approx(96.0)
    assert paid.used_gpu_h == pytest.approx(4 * (10 + 6 + 4))


def test_electricity_is_paid_beside() -> None:
    """400 W at 0.5 USD/kWh: 0.2 USD per GPU hour in use, for the time it is used and not that billed."""
    fleet = fleet_of(1.0)
    gpu = replace(fleet.pools[0].type.gpu, energy_usd_per_kwh=0.5)
    fleet = fleet.with_types(lambda worker: replace(worker, gpu=gpu))
    paid = elastic_bill(fleet, run_of((0.0, 1800.0), end_s=3600.0), BY_HOUR)
    assert paid.electricity_usd == pytest.approx(2 * 0.5 * 0.2)
    assert paid.usd == pytest.approx(2.0 + 0.2)


@pytest.mark.parametrize("seed", range(20))
def test_rentals_cover_what_is_used(seed: int) -> None:
    """At every moment as few nodes as have so many GPUs."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 50, 12)
    used = [
        (float(s), float(s + d), int(g))
        for s, d, g in zip(start, rng.integers(1, 20, 12), rng.integers(1, 9, 12), strict=True)
    ]
    rentals = rentals_s(used, 8)
    for time_s in np.arange(0.5, 80):
        gpus = sum(g for s, e, g in used if s <= time_s < e)
        assert sum(s <= time_s < e for s, e in rentals) == -(-gpus // 8)
