"""Workers over windows against hand arithmetic, enumeration and the constraints recomputed."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from plans import CATALOG

from planner import cli
from planner.api import scheduling
from planner.documents.markets import demand_of, demand_of_table, parse_market, read_market
from planner.errors import InfeasibleError, InputError
from planner.reports.schedule_page import NAMES, ScheduleAnswer, render, schedule_figures
from planner.solvers.backend import minimise_program
from planner.solvers.reserved_schedule import (
    Demand,
    GpuOffer,
    LlmWorkerType,
    Market,
    Schedule,
    _windows_model,
    buy_gpus,
    cost_by_window,
    find_broken_constraint,
    reserved_levels,
    schedule,
    schedule_at_peak,
    schedule_by_rule,
)
from planner.solvers.schedule_pricing import Cover, SchedulePrices, _divisors, _round_cover
from planner.traffic.trace import Trace

HOUR_S = 3600.0
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "schedule.py"


def demand(*rates: list[float]) -> Demand:
    return Demand(tuple(f"llm{i}" for i in range(len(rates))), np.array(rates, float), HOUR_S)


def exactly(market: Market, asked: Demand) -> Schedule:
    found = schedule(market, asked, gap_frac=0.0)
    assert found.gap_frac < 2e-3  # prices to a tenth of a cent
    assert_keeps_constraints(market, asked, found)
    return found


def assert_keeps_constraints(market: Market, asked: Demand, found: Schedule) -> None:
    """served, firm, held, stock, power and the bill, window by window, from the counts alone."""
    offers = {offer.gpu: (g, offer) for g, offer in enumerate(market.offers)}
    windows = asked.rate_rps.shape[1]
    bill = 0.0
    for t in range(windows):
        firm_gpus, spot_gpus = np.zeros(len(offers)), np.zeros(len(offers))
        firm_rps, spot_rps = dict.fromkeys(asked.llms, 0.0), dict.fromkeys(asked.llms, 0.0)
        watts = 0.0
        for c, each in enumerate(market.worker_types):
            firm, spot = int(found.workers[c, t]), int(found.spot_workers[c, t])
            parts = [(*offers[gpu], gpus) for gpu, gpus in each.gpu_counts.items()]
            for g, _, gpus in parts:
                firm_gpus[g] += gpus * firm
                spot_gpus[g] += gpus * spot
            interruptions = sum(offer.interruptions_per_h for _, offer, _ in parts)
            away = interruptions * each.start_s / HOUR_S
            firm_rps[each.llm] += each.rate_rps * firm
            spot_rps[each.llm] += each.rate_rps * (1 - away) * spot
            watts += each.power_w * (firm + spot)
            dearest = sum(
                gpus * max(p for p in (o.on_demand_usd_per_h, o.reserved_usd_per_h, o.spot_usd_per_h) if p)
                for _, o, gpus in parts
            )
            start_usd = each.start_s / HOUR_S * dearest
            for now, before in ((firm, found.workers[c, t - 1]), (spot, found.spot_workers[c, t - 1])):
                bill += max(now - int(before), 0) * start_usd
            rent = sum(gpus * (offer.spot_usd_per_h or 0) for _, offer, gpus in parts)
            bill += spot * (rent + interruptions * start_usd)
        for m, llm in enumerate(asked.llms):
            assert firm_rps[llm] + spot_rps[llm] >= asked.rate_rps[m, t] * (1 - 1e-6)
            assert firm_rps[llm] >= (1 - market.most_spot_frac) * asked.rate_rps[m, t] * (1 - 1e-6)
        for g, offer in offers.values():
            rented = int(found.reserved_gpus[g] + found.on_demand_gpus[g, t])
            assert firm_gpus[g] <= rented
            assert offer.stock is None or rented + spot_gpus[g] <= offer.stock
            bill += (offer.reserved_usd_per_h or 0) * found.reserved_gpus[g]
            bill += (offer.on_demand_usd_per_h or 0) * found.on_demand_gpus[g, t]
        assert market.power_w is None or watts <= market.power_w + 1e-6
    assert found.cost_usd_per_h == pytest.approx(bill / windows)
    assert market.cost_usd_per_h is None or found.cost_usd_per_h <= market.cost_usd_per_h


def enumerated(market: Market, asked: Demand, most: int) -> float:
    """Cheapest over all firm and spot counts up to `most` in every window and all reserved GPUs."""
    windows = asked.rate_rps.shape[1]
    spot_most = [most if market.is_on_spot(c) else 0 for c in market.worker_types]
    choices = list(
        itertools.product(*(range(most + 1) for _ in market.worker_types), *(range(n + 1) for n in spot_most))
    )
    size = len(market.worker_types)
    fitting = []
    for t in range(windows):
        one = Demand(asked.llms, asked.rate_rps[:, [t]], HOUR_S)
        loose = replace(market, cost_usd_per_h=None)
        fitting.append([c for c in choices if _fits(loose, one, c[:size], c[size:])])
    best = np.inf
    for week in itertools.product(*fitting):
        counts = np.array(week, np.int64).T
        options = []
        for offer in market.offers:
            need = np.array([c.gpu_counts.get(offer.gpu, 0) for c in market.worker_types]) @ counts[:size]
            reserved = range(int(need.max()) + 1) if offer.reserved_usd_per_h is not None else range(1)
            options.append(
                min(
                    (offer.reserved_usd_per_h or 0) * r
                    + (offer.on_demand_usd_per_h or 0) * float(np.maximum(need - r, 0).mean())
                    for r in reserved
                    if offer.on_demand_usd_per_h is not None or r >= need.max()
                )
            )
        cost = sum(options)
        if cost >= best:
            continue
        for c, each in enumerate(market.worker_types):
            start = market.start_usd(each)
            for row in (counts[c], counts[size + c]):
                cost += start * float(np.maximum(row - np.roll(row, 1), 0).mean())
            cost += market.spot_worker_usd_per_h(each) * float(counts[size + c].mean())
        best = min(best, cost)
    return best


def _fits(market: Market, one: Demand, firm: tuple[int, ...], spot: tuple[int, ...]) -> bool:
    for m, llm in enumerate(one.llms):
        own = [i for i, c in enumerate(market.worker_types) if c.llm == llm]
        carried = sum(market.worker_types[i].rate_rps * firm[i] for i in own)
        extra = sum(
            market.worker_types[i].rate_rps * market.spot_share(market.worker_types[i]) * spot[i] for i in own
        )
        rate = one.rate_rps[m, 0]
        if carried < (1 - market.most_spot_frac) * rate - 1e-9 or carried + extra < rate - 1e-9:
            return False
    for offer in market.offers:
        used = sum(
            c.gpu_counts.get(offer.gpu, 0) * (firm[i] + spot[i]) for i, c in enumerate(market.worker_types)
        )
        if offer.stock is not None and used > offer.stock:
            return False
    watts = sum(c.power_w * (firm[i] + spot[i]) for i, c in enumerate(market.worker_types))
    return market.power_w is None or watts <= market.power_w


def random_case(rng: np.random.Generator) -> tuple[Market, Demand]:
    """One LLM on two GPUs, one on spot too, or two LLMs on one GPU: three windows with two kinds of workers,
    or two windows with three; at most three workers of a kind."""
    llms, columns = int(rng.integers(1, 3)), int(rng.integers(2, 4))
    has_spot = columns == 3 or llms == 1
    gpus = columns - has_spot - llms + 1
    offers = []
    for g in range(gpus):
        price = float(np.round(rng.uniform(1, 4), 2))
        offers.append(
            GpuOffer(
                f"g{g}",
                price,
                round(0.6 * price, 2) if rng.random() < 0.7 else None,
                round(0.4 * price, 2) if g == 0 and has_spot and llms == 1 else None,
                float(rng.uniform(0, 0.3)),
                int(rng.integers(3, 9)) if rng.random() < 0.3 else None,
            )
        )
    worker_types = [
        LlmWorkerType(
            f"llm{m}",
            f"t{g}",
            f"g{g}",
            int(rng.integers(1, 3)),
            float(rng.uniform(2, 4)),
            100.0,
            float(rng.choice([0, 600, 1800])),
        )
        for m, g in ([(0, g) for g in range(gpus)] if llms == 1 else [(0, 0), (1, gpus - 1)])
    ]
    market = Market(tuple(offers), tuple(worker_types), 0.4, 400.0 if rng.random() < 0.3 else None)
    windows = 5 - columns if columns == 3 else 3
    return market, Demand(tuple(f"llm{m}" for m in range(llms)), rng.uniform(0, 6, (llms, windows)), HOUR_S)


@pytest.mark.long
@pytest.mark.parametrize("block", range(6))
def test_schedule_is_as_cheap_as_enumeration(block: int) -> None:
    """8 cases per block, every count of every type in every window."""
    rng = np.random.default_rng(block)
    for _ in range(8):
        market, asked = random_case(rng)
        best = enumerated(market, asked, 3)
        if best == np.inf:
            with pytest.raises(InfeasibleError, match="does not fit"):
                schedule(market, asked)
            continue
        assert exactly(market, asked).cost_usd_per_h == pytest.approx(best, abs=0.01)


def test_the_base_is_reserved_and_the_peak_rented() -> None:
    """Loads 1, 1, 1, 3 at 1 request/s per GPU: reserved 0.6 > on demand 1 x 1/4, so one reserved, two rented
    for a quarter of the time: 0.6 + 2/4 = 1.1 USD/h. The peak all the time costs 1.8."""
    market = Market((GpuOffer("g", 1.0, 0.6),), (LlmWorkerType("llm0", "t", "g", 1, 1.0, start_s=0.0),))
    asked = demand([1, 1, 1, 3])
    found = exactly(market, asked)
    assert found.cost_usd_per_h == pytest.approx(1.1) and found.reserved_gpus.tolist() == [1]
    peak = schedule_at_peak(market, asked)
    assert peak is not None and peak.cost_usd_per_h == pytest.approx(1.8)


def test_a_dear_start_keeps_workers_through_a_dip() -> None:
    """Loads 2, 1, 2, 1 on demand at 1 USD/h: stopping for an hour saves 1, starting again costs 2."""
    market = Market((GpuOffer("g", 1.0),), (LlmWorkerType("llm0", "t", "g", 1, 1.0, start_s=2 * HOUR_S),))
    assert exactly(market, demand([2, 1, 2, 1])).workers.tolist() == [[2, 2, 2, 2]]
    cheap = replace(market, worker_types=(replace(market.worker_types[0], start_s=0.4 * HOUR_S),))
    assert exactly(cheap, demand([2, 1, 2, 1])).workers.tolist() == [[2, 1, 2, 1]]


def test_two_llms_take_turns_on_reserved_gpus() -> None:
    """One peaks by day, the other by night: the same two GPUs serve both, for 1.2 USD/h. Both peaks at once
    do not fit them, so there is no fleet for the peak."""
    each = [LlmWorkerType(f"llm{m}", "t", "g", 1, 1.0, start_s=0.0) for m in (0, 1)]
    market = Market((GpuOffer("g", 1.0, 0.6, stock=2),), tuple(each))
    asked = demand([2, 0], [0, 2])
    found = exactly(market, asked)
    assert schedule_at_peak(market, asked) is None
    assert found.reserved_gpus.tolist() == [2] and found.cost_usd_per_h == pytest.approx(1.2)


def test_spot_carries_no_more_than_its_share() -> None:
    """10 requests/s, at most 40 % on spot: six firm workers; a spot worker away for 6 of 60 minutes in the
    hour it is interrupted carries 0.9, so five of them for the other 4."""
    market = Market(
        (GpuOffer("g", 10.0, None, 1.0, 1.0),), (LlmWorkerType("llm0", "t", "g", 1, 1.0, start_s=360.0),), 0.4
    )
    found = exactly(market, demand([10, 10]))
    assert found.workers.tolist() == [[6, 6]] and found.spot_workers.tolist() == [[5, 5]]


def test_double_prices_keep_the_schedule_and_more_stock_never_costs_more() -> None:
    rng = np.random.default_rng(21)
    for _ in range(8):
        market, asked = random_case(rng)
        market = replace(
            market, offers=tuple(replace(offer, stock=8) for offer in market.offers), power_w=None
        )
        found = exactly(market, asked)
        doubled = tuple(
            replace(
                offer,
                on_demand_usd_per_h=2 * (offer.on_demand_usd_per_h or 0),
                reserved_usd_per_h=offer.reserved_usd_per_h and 2 * offer.reserved_usd_per_h,
                spot_usd_per_h=offer.spot_usd_per_h and 2 * offer.spot_usd_per_h,
            )
            for offer in market.offers
        )
        twice = exactly(replace(market, offers=doubled), asked)
        assert twice.cost_usd_per_h == pytest.approx(2 * found.cost_usd_per_h, abs=0.02)
        more = tuple(replace(offer, stock=12) for offer in market.offers)
        assert exactly(replace(market, offers=more), asked).cost_usd_per_h <= found.cost_usd_per_h + 0.01


@pytest.mark.parametrize("seed", range(3))
def test_a_day_beats_peak_and_rule_and_keeps_its_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hours = np.arange(24)
    rates = [20 + 15 * np.sin(2 * np.pi * (hours - 3 * m) / 24) + rng.normal(0, 1, 24) for m in (0, 1)]
    market = Market(
        (GpuOffer("g", 2.0, 1.2, 0.8, 0.05, 60),),
        tuple(LlmWorkerType(f"llm{m}", "t", "g", 2, 4.3 + m, 100.0, 300.0) for m in (0, 1)),
        0.2,
        3e3,
    )
    asked = demand(*(rate.tolist() for rate in rates))
    found = schedule(market, asked, gap_frac=0.01, time_limit_s=120)
    assert_keeps_constraints(market, asked, found)
    assert find_broken_constraint(market, asked, found) is None
    assert found.bound_usd_per_h <= found.cost_usd_per_h
    rule, peak = schedule_by_rule(market, asked), schedule_at_peak(market, asked)
    assert rule is not None and peak is not None and find_broken_constraint(market, asked, rule) is None
    assert_keeps_constraints(market, asked, rule)
    assert found.cost_usd_per_h < min(peak.cost_usd_per_h, rule.cost_usd_per_h)


def test_rounding_cuts_no_whole_workers_off() -> None:
    """Every (z1, z2, z3) up to what one kind alone needs that covers a demand keeps its rounded rows."""
    rng = np.random.default_rng(5)
    for _ in range(40):
        cover = Cover(np.arange(3), rng.uniform(0.5, 4, 3).round(2), rng.uniform(0.1, 9, 4).round(1))
        counts = np.array(list(itertools.product(range(19), repeat=3)))
        for divisor in _divisors(cover.rate_rps):
            rows, least = _round_cover(cover, divisor)
            for t, needed_rps in enumerate(cover.needed_rps):
                covering = counts[counts @ cover.rate_rps >= needed_rps * (1 - 1e-9)]
                assert (covering @ rows[t]).min() >= least[t] - 1e-9


def test_a_worker_of_two_kinds_of_gpu_takes_both_and_is_paid_for_both() -> None:
    """4 a at 1 USD/h and 2 b, reserved at 2: in hours of 10, 10, 20 requests/s one, one and two workers, so
    4, 4, 8 of a on demand, 16 / 3 USD/h, and 4 of b reserved, 8; a start in the third hour, 6 min of 8.
    """
    offers = (GpuOffer("a", 1.0), GpuOffer("b", None, 2.0, stock=4))
    pair = LlmWorkerType("llm0", "pair", "a", 4, 10.0, start_s=360.0, other_gpus=(("b", 2),))
    market, asked = Market(offers, (pair,)), demand([10.0, 10.0, 20.0])
    found = exactly(market, asked)
    assert found.workers.tolist() == [[1, 1, 2]]
    assert found.on_demand_gpus.tolist() == [[4, 4, 8], [0, 0, 0]] and found.reserved_gpus.tolist() == [0, 4]
    assert found.cost_usd_per_h == pytest.approx(16 / 3 + 8 + 0.1 * 8 / 3)
    with pytest.raises(InfeasibleError, match="2 more GPUs of b"):
        schedule(market, demand([30.0]))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
@pytest.mark.slow
def test_workers_of_two_kinds_of_gpu_are_the_cheapest_of_all_enumerated(seed: int) -> None:
    """One of both kinds, one of one kind alone; both on spot."""
    rng = np.random.default_rng(seed)
    prices = rng.uniform(1, 4, 3)
    offers = (
        GpuOffer("a", prices[0], 0.7 * prices[0], 0.4 * prices[0], 0.2),
        GpuOffer("b", prices[1], None, 0.5 * prices[1], 0.1, stock=5),
    )
    worker_types = (
        LlmWorkerType("llm0", "pair", "a", 2, rng.uniform(6, 9), other_gpus=(("b", 1),)),
        LlmWorkerType("llm0", "alone", "a", 4, rng.uniform(5, 9)),
    )
    market = Market(offers, worker_types, most_spot_frac=0.5)
    asked = demand(rng.uniform(2, 16, 2).tolist())
    assert exactly(market, asked).cost_usd_per_h == pytest.approx(enumerated(market, asked, 3), rel=2e-3)


def test_a_worker_of_several_kinds_of_gpu_is_read_and_half_a_one_refused(tmp_path: Path) -> None:
    def of(gpu: str) -> Market:
        file = tmp_path / "schedule.yaml"
        file.write_text(
            "gpus: {a: {on_demand: 1 usd/h}, b: {on_demand: 2 usd/h}}\n"
            f"capacity: [{{llm: x, worker: w, {gpu}, rate: 3 req/s}}]\n"
        )
        return read_market(file)

    assert of("gpu: {a: 4, b: 2}").worker_types[0].gpu_counts == {"a": 4, "b": 2}
    for gpu, said in (
        ("gpu: {a: 4, b: 2}, gpus: 4", "gpu says how many there are of each"),
        ("gpu: {a: 4, c: 2}", "'c' has no price under gpus"),
        ("gpu: {a: 0}", "a"),
        ("gpu: {}", "expected a GPU"),
    ):
        with pytest.raises(InputError, match=said):
            of(gpu)


@pytest.mark.parametrize("length", [1, 2])
def test_parts_at_any_prices_cost_no_more_than_the_whole(length: int) -> None:
    """A reserved GPU paid in any of the windows, a worker that is there worth up to a start."""
    rng = np.random.default_rng(length)
    compared = 0
    while compared < 12:
        market, asked = random_case(rng)
        best = enumerated(market, asked, 3) * asked.rate_rps.shape[1]
        if best == np.inf:
            continue
        model = _windows_model(market, asked)
        shares = rng.dirichlet(np.ones(model.windows), len(model.reserved_cost))
        there = rng.uniform(0, 1, (model.kinds, model.windows)) * model.start_cost[:, None]
        prices = SchedulePrices(shares * model.reserved_cost[:, None], there)
        cuts = [range(t, min(t + length, model.windows)) for t in range(0, model.windows, length)]
        assert sum(minimise_program(model.program(part, prices)).bound for part in cuts) <= best + 1e-6
        compared += 1


@pytest.mark.slow
def test_a_week_of_three_llms_is_within_half_a_percent_of_its_bound() -> None:
    """Two days of it: by windows and prices, as two days are too many for the whole model."""
    spec = importlib.util.spec_from_file_location("schedule_benchmark", BENCHMARK)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    market, week = benchmark.market(scale=2.0), benchmark.week(scale=2.0)
    asked = replace(week, rate_rps=week.rate_rps[:, :48])
    found = schedule(market, asked, gap_frac=0.005, time_limit_s=300)
    assert_keeps_constraints(market, asked, found)
    assert found.gap_frac <= 0.005
    assert found.cost_usd_per_h == schedule(market, asked, gap_frac=0.005, time_limit_s=300).cost_usd_per_h


def test_gpus_are_not_reserved_beside_spot_workers_that_need_them() -> None:
    """One firm and one spot worker in turn on a stock of one: reserved at half the price the GPU would idle
    while the spot worker needs it."""
    market = Market(
        (GpuOffer("g", 1.0, 0.5, 0.1, stock=1),), (LlmWorkerType("llm0", "t", "g", 1, 1.0, start_s=0.0),)
    )
    turns = np.array([[1, 0]]), np.array([[0, 1]])
    found = buy_gpus(market, demand([1, 1]), *turns)
    assert found.reserved_gpus.tolist() == [0] and found.on_demand_gpus.tolist() == [[1, 0]]
    assert buy_gpus(
        replace(market, offers=(GpuOffer("g", 1.0, 0.4, 0.1, stock=2),)), demand([1, 1]), *turns
    ).reserved_gpus.tolist() == [1]


def test_broken_names_what_is_not_kept() -> None:
    market = Market(
        (GpuOffer("g", 1.0, stock=3),), (LlmWorkerType("llm0", "t", "g", 1, 1.0, 100.0),), 0.0, 250.0
    )
    asked = demand([2, 2])
    good = exactly(market, asked)
    assert find_broken_constraint(market, demand([3, 3]), good) == "served llm0"
    assert (
        find_broken_constraint(market, asked, replace(good, on_demand_gpus=good.on_demand_gpus - 1))
        == "held g"
    )
    assert find_broken_constraint(replace(market, power_w=150.0), asked, good) == "power"
    assert find_broken_constraint(replace(market, cost_usd_per_h=1.0), asked, good) == "budget"
    assert (
        find_broken_constraint(replace(market, offers=(GpuOffer("g", 1.0, stock=1),)), asked, good)
        == "stock g"
    )


def test_the_limit_that_is_too_tight_is_named_with_what_would_do() -> None:
    """5 requests/s need 5 GPUs, 500 W and 5 USD/h."""
    market = Market((GpuOffer("g", 1.0, stock=3),), (LlmWorkerType("llm0", "t", "g", 1, 1.0, 100.0),))
    for tight, constraint, relaxation in (
        (market, "stock of g", "2 more GPUs of g"),
        (replace(market, offers=(GpuOffer("g", 1.0),), power_w=420.0), "power", "80 more W of power"),
        (replace(market, offers=(GpuOffer("g", 1.0),), cost_usd_per_h=4.0), "cost", "1 more USD/h of cost"),
    ):
        with pytest.raises(InfeasibleError) as error:
            schedule(tight, demand([1, 5]) if constraint != "cost" else demand([5, 5]))
        assert (error.value.constraint, error.value.relaxation) == (constraint, relaxation)
    with pytest.raises(InfeasibleError, match=r"no worker type serves llm1, .* serve llm0: call"):
        schedule(market, demand([1], [1]))


def test_the_least_budget_that_would_do_is_the_cheapest_schedule() -> None:
    """The first bound is above 7 USD/h already; what the error says would do is the cheapest all the same."""
    offers = (GpuOffer("a", 3.62, 3.01, stock=28), GpuOffer("b", None, 1.03, stock=22, most_reserved=22))
    worker_types = (
        LlmWorkerType("llm0", "ab", "b", 3, 1.29, start_s=300.0, other_gpus=(("a", 3),)),
        LlmWorkerType("llm1", "b4", "b", 4, 4.47, start_s=1200.0),
        LlmWorkerType("llm1", "a2", "a", 2, 4.22, start_s=60.0),
    )
    market = Market(offers, worker_types, most_spot_frac=0.06)
    asked = replace(demand([0, 1.44, 5.59, 0, 7.5], [3.49, 0.93, 0, 2.32, 1.38]), window_s=1800.0)
    cheapest = schedule(market, asked, gap_frac=1e-4)
    with pytest.raises(InfeasibleError) as error:
        schedule(replace(market, cost_usd_per_h=7.0), asked, gap_frac=1e-4)
    assert error.value.ways[0][0].enough == pytest.approx(cheapest.cost_usd_per_h, rel=1e-4)


def test_too_few_owned_gpus_that_nobody_rents_are_named() -> None:
    """5 requests/s need 5 GPUs; 3 are owned and none is for rent."""
    market = parse_market(
        {
            "gpus": {"g": {"owned": 3}},
            "capacity": [{"llm": "llm0", "worker": "t", "gpu": "g", "rate": "1 req/s"}],
        }
    )
    with pytest.raises(InfeasibleError) as error:
        schedule(market, demand([1, 5]))
    assert (error.value.constraint, error.value.relaxation) == ("stock of g", "2 more GPUs of g")


@pytest.mark.parametrize("rates", [[0, 5], [0, 0, 3], [0, 0]])
def test_an_llm_that_sleeps_in_some_hours_has_a_schedule(rates: list[float]) -> None:
    """Aladdin's rule is a line through two rates above 0; with fewer it is what the rate needs."""
    market = Market((GpuOffer("g", 1.0),), (LlmWorkerType("llm0", "t", "g", 1, 1.0, start_s=0.0),))
    rule = schedule_by_rule(market, demand(rates))
    assert rule is not None and rule.workers.tolist() == [rates]


def test_what_windows_cost_is_their_gpus_and_their_starts() -> None:
    """As in the command's test: 16 for 4 reserved GPUs; in the second hour 24 for 4 more, 2 for a start."""
    market = Market((GpuOffer("h100", 6.0, 4.0),), (LlmWorkerType("llm0", "t", "h100", 4, 5.0),))
    asked = demand([5, 10])
    found = exactly(market, asked)
    assert cost_by_window(market, asked, found).tolist() == pytest.approx([16.0, 42.0])


@pytest.mark.parametrize("seed", range(6))
def test_the_mean_of_the_windows_is_the_cost(seed: int) -> None:
    """Of any workers, on a market with all three ways to buy."""
    rng = np.random.default_rng(seed)
    market = Market(
        (GpuOffer("g", 3.0, 2.0, 1.0, 0.2), GpuOffer("h", None, 4.0), GpuOffer("i", 5.0)),
        tuple(LlmWorkerType("llm0", gpu, gpu, 2, 1.0, 0.0, 600.0) for gpu in "ghi"),
    )
    asked = demand(rng.uniform(1, 9, 12).tolist())
    spot = rng.integers(0, 4, (3, 12)) * np.array([[1], [0], [0]])
    found = buy_gpus(market, asked, rng.integers(0, 6, (3, 12)), spot)
    assert cost_by_window(market, asked, found).mean() == pytest.approx(found.cost_usd_per_h)


def test_the_report_draws_every_gpu_as_it_is_bought_and_names_the_others() -> None:
    """h is bought in no window, so it has no chart; spot of g is stacked on what is reserved and rented."""
    market = Market(
        (GpuOffer("g", 6.0, 4.0, 1.0), GpuOffer("h", 99.0)),
        (LlmWorkerType("llm0", "t", "g", 1, 1.0), LlmWorkerType("llm0", "u", "h", 1, 1.0)),
        most_spot_frac=0.5,
    )
    asked = demand([2, 4, 4, 8])
    found = exactly(market, asked)
    answer = ScheduleAnswer(
        market, asked, found, {"peak": schedule_at_peak(market, asked), "linear rule": None}, 0.01
    )
    drawn = {figure.name: figure.chart.to_dict() for figure in schedule_figures(answer)}
    assert list(drawn) == ["demand", "gpus-0", "workers-0", "cost", "costs"]
    ways = drawn["gpus-0"]["data"]["values"]
    at_end = {row["what"]: row["y"] for row in ways if row["x"] == 180.0}  # min
    assert sum(at_end.values()) == 8 and at_end["spot"] == 4
    page = render(answer)["schedule.html"]
    assert "a linear rule per window (Aladdin), exceeds a limit" in page and page.count("<figure") == len(
        drawn
    )


def test_a_trace_is_counted_in_windows() -> None:
    """Arrivals at 0, 1, 2 and 5 s in windows of 2 s: 2, 1, and 1 in the second of the third that is there."""
    assert windows_of([0.0, 1.0, 2.0, 5.0], 2.0) == ([1.0, 0.5, 1.0], True)


@pytest.mark.parametrize(
    ("arrivals", "rates", "is_noted"),
    [
        ([*range(3600), *np.linspace(3600, 7199.9, 7200)], [1.0, 2.0], False),
        (range(601), [1.0], True),
        (range(5400), [1.0, 1.0], True),
        (range(3700), [1.0], True),
    ],
)
def test_a_part_of_a_window_counts_at_its_own_rate_or_is_said_to_be_left_out(
    arrivals: Sequence[float], rates: list[float], *, is_noted: bool
) -> None:
    """A log of two hours whose last request is at 1:59:59.9 was one hour, and ten minutes at 1 request/s an
    hour of a sixth of it.
    """
    found, noted = windows_of(arrivals, 3600.0)
    assert found == pytest.approx(rates, rel=2e-3) and noted is is_noted


def windows_of(arrivals: Sequence[float], window_s: float) -> tuple[list[float], bool]:
    ones = np.ones(len(arrivals), np.int64)
    found = demand_of({"llm": Trace("t", np.array(arrivals, float), ones, ones)}, window_s=window_s)
    return found.rate_rps[0].tolist(), bool(found.note)


def test_owned_gpus_are_free_as_far_as_they_go() -> None:
    """Windows of 1 and 4 GPUs, of which 2 are owned: 0 and 2 are rented at 3 USD/h, 3 USD/h on average."""
    market = parse_market(
        {
            "gpus": {"g": {"on_demand": "3 usd/h", "owned": 2}},
            "capacity": [{"llm": "llm0", "worker": "t", "gpu": "g", "rate": "1 req/s", "start": "0 s"}],
        }
    )
    found = exactly(market, demand([1, 4]))
    assert (found.cost_usd_per_h, found.bound_usd_per_h) == (3.0, 3.0)
    assert found.reserved_gpus.tolist() == [2] or found.on_demand_gpus.tolist() == [[0, 2]]


MARKET = """
gpus:
  h100: {on_demand: 6 usd/h, reserved: 4 usd/h, stock: 64}
capacity:
  - {llm: chat, worker: h100 tp4, gpu: h100, gpus: 4, rate: 5 req/s, power: 2800 W, start: 5 min}
limits: {power: 80 kW}
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["plan", "schedule", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_command_writes_schedule_and_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """5 requests/s and 10 in turn: one worker reserved, a second every other hour."""
    market, rates, out = tmp_path / "schedule.yaml", tmp_path / "demand.csv", tmp_path / "out.csv"
    market.write_text(MARKET)
    rates.write_text("window,chat\nmon 0h,5\nmon 1h,10\n")
    assert run(monkeypatch, market, "--demand", rates, "-o", out, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == "optimal" and answer["reserved_gpus"] == {"h100": 4}
    assert answer["workers"][0]["firm"] == [1, 2] and answer["compared"]["peak"] == 32.0
    assert answer["cost_usd_per_h"] == pytest.approx(16 + 12 + 1)  # a start: 5 min x 4 x 6 USD/h, every 2 h
    assert out.read_text() == "window,llm,worker,firm,spot\n0,chat,h100 tp4,1,0\n1,chat,h100 tp4,2,0\n"
    assert run(monkeypatch, market, "--demand", rates, "-o", tmp_path / "out") == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(NAMES)
    assert (tmp_path / "out" / "schedule.csv").read_text() == out.read_text()
    assert json.loads((tmp_path / "out" / "schedule.json").read_text()) == answer
    assert "32.00 USD/h; the schedule saves 9.4 %" in capsys.readouterr().out


def test_command_takes_a_trace_per_llm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    market, trace = tmp_path / "schedule.yaml", tmp_path / "chat.csv"
    market.write_text(MARKET)
    trace.write_text(
        "timestamp,input_tokens,output_tokens\n" + "".join(f"{t / 4},10,10\n" for t in range(401))
    )
    assert run(monkeypatch, market, "--trace", f"chat={trace}", "--window", "50 s", "--json") == 0
    assert json.loads(capsys.readouterr().out)["workers"][0]["firm"] == [1, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("reserved", "reservd"), "gpus: h100: unknown key 'reservd'"),
        (("on_demand: 6 usd/h, reserved: 4 usd/h", "spot: 1 usd/h"), "needs a price on_demand or reserved"),
        (("gpu: h100,", "gpu: h200,"), "'h200' has no price"),
        (("rate: 5 req/s", "rate: 0"), "capacity[0]: rate: expected at least 1e-06"),
        (("gpus: 4", "gpus: 0.5"), "gpus: expected a whole number"),
        (("stock: 64", "stock: many"), "stock: expected a whole number"),
        (("capacity:", "capacities:"), "unknown key 'capacities'"),
        (("power: 80 kW", "cost: -1"), "limits: cost: expected at least 0, found -1"),
        (("power: 80 kW", "power: 80"), "limits: power: 80 has no unit; write 80 W or 80 kW"),
        (("power: 80 kW", "watts: 3"), "limits: unknown key 'watts'"),
    ],
)
def test_bad_field_is_named_with_its_file(change: tuple[str, str], says: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.yaml"
    path.write_text(MARKET.replace(*change))
    with pytest.raises(InputError) as error:
        read_market(path)
    assert str(error.value).startswith(f"{path}: ") and says in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "the demand is missing"),
        (("--trace", "chat.csv"), "expected LLM=FILE, found 'chat.csv'"),
        (("--demand", "nothing.csv"), "nothing.csv: no such file"),
    ],
)
def test_command_says_what_is_missing(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    market = tmp_path / "schedule.yaml"
    market.write_text(MARKET)
    assert run(monkeypatch, market, *arguments) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_fleet_is_no_schedule_and_says_what_is(tmp_path: Path, *, is_folder: bool) -> None:
    """One line, in place of "unknown key 'status'"."""
    (tmp_path / "plan.yaml").write_text("status: certified\nllm: x\nworkers: [{gpu: h100-80g, count: 2}]\n")
    with pytest.raises(InputError, match=r"plan\.yaml: is a fleet, .* or a schedule\.yaml"):
        read_market(tmp_path if is_folder else tmp_path / "plan.yaml")


def test_a_short_name_of_an_llm_is_the_one_that_workers_serve() -> None:
    """`plan schedule out/` of a plan for llama-3.1-70b refused a demand that called it so."""
    sold, asked = (
        SimpleNamespace(worker_types=[SimpleNamespace(llm="meta-llama/Llama-3.1-70B")]),
        SimpleNamespace,
    )
    known = CATALOG
    names = scheduling._served_names(cast(Any, sold), cast(Any, asked(llms=("llama-3.1-70b",))), known)
    assert names == {"llama-3.1-70b": "meta-llama/Llama-3.1-70B"}
    other = scheduling._served_names(cast(Any, sold), cast(Any, asked(llms=("llama-3.1-8b",))), known)
    assert other == {"llama-3.1-8b": "llama-3.1-8b"}


def test_of_one_llm_the_demand_may_have_any_name_of_its_own() -> None:
    """`plan schedule out/ --trace chat=chat.csv` of a plan for one LLM was refused for the name "chat"; of a
    schedule.yaml for "chat", a demand for "code" still is."""
    sold = SimpleNamespace(worker_types=[SimpleNamespace(llm="meta-llama/Llama-3.1-70B")])
    asked = SimpleNamespace(llms=("chat",))
    names = scheduling._served_names(cast(Any, sold), cast(Any, asked), CATALOG)
    assert names == {"chat": "meta-llama/Llama-3.1-70B"}
    of_chat = SimpleNamespace(worker_types=[SimpleNamespace(llm="chat")])
    names = scheduling._served_names(cast(Any, of_chat), cast(Any, SimpleNamespace(llms=("code",))), CATALOG)
    assert names == {"code": "code"}


def test_workers_whose_gpus_are_reserved_are_not_started_anew() -> None:
    """Two GPUs are reserved at 0.60 USD/h for the 12 busy hours and paid in the other 12 too. A worker that
    stops meanwhile saves nothing, and its start cost 0.6 of a percent more than a fleet that stays.
    """
    gpus = {"l40s-48g": {"reserved": "0.6 usd/h", "stock": 8}}
    row = {"llm": "llm0", "worker": "w", "gpu": "l40s-48g", "gpus": 1, "rate": "2 req/s", "start": "5 min"}
    market = parse_market({"gpus": gpus, "capacity": [row]})
    assert schedule(market, demand([1.0] * 12 + [7.0] * 12), gap_frac=0.05).cost_usd_per_h == 4 * 0.6


def test_a_column_of_hours_is_no_llm() -> None:
    """It ended in "no worker type serves hour, which the demand names"."""
    table = pd.DataFrame({"Hour": [0, 1], "llm0": [1.0, 2.0]})
    assert demand_of_table(table, Path("demand.csv"), window_s=HOUR_S).llms == ("llm0",)


def test_reservations_fill_what_a_stock_leaves_beside_spot() -> None:
    """Ten in stock, four on spot: six may be reserved. Only 0 and 4 were priced."""
    offer, gpus = GpuOffer("g", 1.0, 0.5, stock=10), np.array([4, 8, 8, 8])

    def bill_usd_per_h(reserved: int) -> float:
        return 0.5 * reserved + float(np.maximum(gpus - reserved, 0).mean())

    assert min(reserved_levels(offer, gpus, 4), key=bill_usd_per_h) == 6 == min(range(7), key=bill_usd_per_h)
