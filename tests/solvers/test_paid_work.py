"""What any controller pays at least, by hand; against runs in tests/day/test_day.py."""

from __future__ import annotations

import numpy as np
import pytest
from simulations import make_latency, make_pool, make_trace

from planner.domain import Limit, Selector, Slo
from planner.fleet import Role
from planner.solvers.master import Option
from planner.solvers.paid_work import LeastWorkers, least_paid
from planner.traffic.trace import Trace

EDGES_S = np.array([0.0, 100.0, 200.0])


def option(role: Role = "mixed", *, kv_tokens: int = 16_000, usd_per_h: float = 3600.0) -> Option:
    """1 ms a token, in steps of any length; a USD per second."""
    latency = make_latency((0.001, 1.024))
    return Option(role, make_pool(latency, role=role, kv_tokens=kv_tokens, budget=1024).type, usd_per_h)


def steady(*, many: int = 200, outputs: int = 1) -> Trace:
    """A request of 100 tokens each second."""
    return make_trace(np.arange(many) * 200.0 / many, np.full(many, 100), np.full(many, outputs))


def test_all_work_is_paid_where_all_are_served() -> None:
    """200 prompts of 0.1 s, and 10 more tokens of 1 ms each: 20 + 2 USD."""
    slo = Slo((Limit("ttft", 0.5, 1.0),), every_s=100.0)
    assert least_paid([option()], steady(), slo, EDGES_S).usd == pytest.approx(20.0)
    assert least_paid([option()], steady(outputs=11), slo, EDGES_S).usd == pytest.approx(22.0)


def test_the_slo_alone_obliges_its_percentile() -> None:
    """Half of the prompts of each window, the cheaper ones: 100 of 0.1 s."""
    slo = Slo((Limit("ttft", 0.5, 1.0),), every_s=100.0)
    found = least_paid([option()], steady(outputs=11), slo, EDGES_S)
    assert found.of_slo_usd == pytest.approx(10.0)
    assert (found.in_stretch_usd <= 5.0 + 1e-9).all()


def test_each_window_has_the_late_requests_of_its_own_classes() -> None:
    """All prompts of 100 tokens, all in the first window, are in time, and half of those of 101, all in the
    second. The share of both together, three quarters, was held against each window: 7.575 USD in the second.
    """
    short, long = Selector("short", most_tokens=100), Selector("long", least_tokens=101)
    slo = Slo((Limit("ttft", 1.0, 1.0, short), Limit("ttft", 0.5, 1.0, long)), every_s=100.0)
    trace = make_trace(np.arange(200.0), np.repeat([100, 101], 100), np.ones(200, int))
    found = least_paid([option()], trace, slo, EDGES_S)
    assert found.in_stretch_usd == pytest.approx([10.0, 5.05])
    assert found.of_slo_usd == pytest.approx(15.05)


def test_what_is_due_later_is_not_of_a_window() -> None:
    """Of 100 prompts of a window all are obliged; those of its last second, one, may be done after it."""
    slo = Slo((Limit("ttft", 1.0, 1.0),), every_s=100.0)
    found = least_paid([option()], steady(), slo, EDGES_S)
    assert found.in_stretch_usd == pytest.approx([10.0, 10.0])
    slo = Slo((Limit("ttft", 1.0, 1.5),), every_s=100.0)
    assert least_paid([option()], steady(), slo, EDGES_S).in_stretch_usd == pytest.approx([9.9, 9.9])


def test_pairs_and_the_cheapest_pool() -> None:
    slo = Slo((Limit("ttft", 0.5, 1.0),), every_s=100.0)
    pair = [option("prefill"), option("decode", usd_per_h=1800.0)]
    assert least_paid(pair, steady(outputs=11), slo, EDGES_S).usd == pytest.approx(21.0)
    both = [*pair, option(usd_per_h=360.0)]
    assert least_paid(both, steady(outputs=11), slo, EDGES_S).usd == pytest.approx(2.2)


def test_whom_no_worker_can_hold_costs_nothing() -> None:
    slo = Slo((Limit("ttft", 0.5, 1.0),), every_s=100.0)
    assert least_paid([option(kv_tokens=96)], steady(), slo, EDGES_S).usd == 0.0


def test_with_prefix_caches_prompts_may_cost_a_token() -> None:
    slo = Slo((Limit("ttft", 0.5, 1.0),), every_s=100.0)
    assert least_paid([option()], steady(), slo, EDGES_S, is_cached=True).usd == pytest.approx(0.2)


def test_the_least_workers_are_always_paid() -> None:
    """1 USD/s through 200 s: more than the work. 0.15 USD/s: 30 USD, of which work of 0.1 s each is part."""
    slo = Slo((Limit("ttft", 0.5, 1.0),), every_s=100.0)
    for usd_per_s in (1.0, 0.15):
        found = least_paid(
            [option()], steady(), slo, EDGES_S, least_workers=LeastWorkers(usd_per_h=3600 * usd_per_s)
        )
        assert found.usd == pytest.approx(200.0 * usd_per_s)


def test_nobody_can_be_away_where_a_start_makes_too_many_late() -> None:
    """A start takes 61 s, of which a request waits 1: who is away at u lets 60 of 100 be late, and 50 may be.
    Then somebody is paid from the first arrival on until, of both windows, too few are left."""
    slo = Slo((Limit("ttft", 0.5, 1.0),), every_s=100.0)
    always = LeastWorkers(prefill_usd_per_h=3600.0, start_s=61.0)
    found = least_paid([option()], steady(), slo, EDGES_S, least_workers=always)
    # nobody may be away before 49 or from 91 - 9 on ... by counting, second by second
    arrival_s, proved_s = np.arange(200.0), np.zeros(2)
    for i in range(199):  # away at a moment after arrival i: all from i + 1 to before i + 60 are late
        late = np.arange(i + 1, min(i + 60, 200))
        if max((late < 100).sum(), (late >= 100).sum()) > 50:
            proved_s[int(arrival_s[i] >= 100)] += 1
    assert found.in_stretch_usd == pytest.approx(np.maximum(proved_s, [5.0, 5.0]))
    assert found.usd >= proved_s.sum() - 1e-6
    quick = least_paid(
        [option()], steady(), slo, EDGES_S, least_workers=LeastWorkers(prefill_usd_per_h=3600.0, start_s=50.0)
    )
    assert quick.usd == pytest.approx(20.0)  # 49 late: allowed
