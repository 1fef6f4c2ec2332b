"""Plans whose SLO holds in every window: against brute force, and what long plans without it say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plans import CATALOG
from questions import question, traffic
from simulations import one_bad_hour

from planner.domain import Limit, Slo
from planner.reports.fact_sentences import fact_sentence
from planner.reports.output import to_json
from planner.reports.rows import slo_rows
from planner.reports.words import slo_sentence
from planner.search.evidence.certify import plan
from planner.search.evidence.findings import (
    EvidenceClock,
    kept_hours,
    outcome_of,
    price_holding_hours,
    worst_hour,
)
from planner.search.evidence.plan import Plan
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.verdict_cache import is_looser
from planner.search.problem.bill import bill_fleet
from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import judge_slo
from planner.traffic.trace import Trace

SLO = {"ttft": {"p90": "1 s"}, "tbt": {"p99": "80 ms"}}


def with_a_rush() -> Trace:
    """Two minutes at 8 requests/s, of which a tenth comes four times as fast."""
    trace = traffic(requests=1000, rate_rps=8.0)
    gaps_s = np.diff(trace.arrival_s, prepend=0.0)
    gaps_s[500:650] /= 4
    return replace(trace, arrival_s=np.cumsum(gaps_s))


@cache
def planned(every: str | None) -> Plan:
    slo = SLO if every is None else SLO | {"every": every}
    fleet = {"gpus": ["h100-80g"], "max_num_batched_tokens": 2048, "sold_as": {"h100-80g": "gpu"}}
    return plan(question(slo=slo, fleet=fleet), with_a_rush(), CATALOG)


def test_a_plan_for_every_window_is_dearer_and_keeps_each() -> None:
    """Cut out by hand: the requests that arrive in each window of 10 s keep p90 of TTFT on the plan's fleet,
    and do not on the fleet that keeps the whole."""
    whole, every = planned(None), planned("10 s")
    assert whole.verdict.holds and every.verdict.holds
    assert every.value > whole.value
    worst_s = {}
    for name, found in (("whole", whole), ("every", every)):
        simulation = found.simulation
        start_s, end_s = simulation.window_s
        edges_s = start_s + 10 * np.arange(int((end_s - start_s) / 10 + 0.5) + 1)
        of = np.clip((simulation.arrival_s - start_s) // 10, -1, len(edges_s) - 2)
        big = [w for w in range(len(edges_s) - 1) if (of == w).sum() >= 100]
        worst_s[name] = max(
            np.sort(simulation.ttft_s[of == w])[int(np.ceil(0.9 * (of == w).sum())) - 1] for w in big
        )
    assert worst_s["every"] <= 1 < worst_s["whole"]


def test_every_cheaper_fleet_of_mixed_workers_misses_some_window() -> None:
    found = planned("10 s")
    assert found.certificate.level0_exact
    kinds = {pool.type for pool in found.fleet.running_pools if pool.role == "mixed"}
    for kind in kinds:
        fewer = replace(
            found.fleet,
            pools=(
                replace(
                    found.fleet.running_pools[0], type=kind, count=found.fleet.running_pools[0].count - 1
                ),
            ),
        )
        if fewer.workers:
            assert not judge_slo(
                simulate(fewer, found.trace, limits=found.slo.limits, record=True), found.slo
            ).holds


def test_the_worst_window_is_told() -> None:
    found = planned("10 s")
    assert "in every window of 10 s" in slo_sentence(found)
    rows = [row[0] for row in slo_rows(found)[1]]
    assert rows[1].startswith(f"in the worst of {found.verdict.windows} windows, from 0:")
    written = to_json(found)["simulation"]["slo"]
    worst = found.verdict.lines[0].worst
    assert worst is not None and written["windows"] == found.verdict.windows > 3
    assert written["lines"][0]["worst_window"]["simulated_s"] == pytest.approx(worst.value_s)
    assert to_json(found)["slo"]["every"] == "10 s"
    assert "windows" not in to_json(planned(None))["simulation"]["slo"]


def test_a_long_plan_says_its_worst_hour() -> None:
    """The bad hour of `one_bad_hour`: p80 of TTFT is 4 s there and 1 s over the whole."""
    fleet, trace = one_bad_hour()
    slo = Slo((Limit("ttft", 0.8, 1.5),))
    simulation = simulate(fleet, trace, limits=slo.limits, record=True)
    hour = worst_hour(simulation, slo)
    assert hour is not None and hour.missed == hour.hours
    assert hour.hours[0].value_s == 4.0 and hour.hours[0].window_s == (7320.0, 10920.0)
    assert "TTFT p80 is 4.00 s" in fact_sentence(hour)
    assert "from 2:02:00 to 3:02:00" in fact_sentence(hour) and "slo: {every: 1 h}" in fact_sentence(hour)
    assert kept_hours(simulation, slo) == ()
    assert worst_hour(simulation, replace(slo, every_s=600.0)) is None
    missed = outcome_of(judge_slo(simulation, replace(slo, every_s=3600.0)), slo).missed
    assert [(at.value_s, at.window_s) for at in missed] == [(4.0, (7320.0, 10920.0))]


def test_what_holding_every_hour_costs_is_what_holds_in_each() -> None:
    """Two seats serve five at once in 1, 1, 2, 2 and 3 s, one in up to 5; the bill is of as many."""
    fleet, trace = one_bad_hour()
    slo = Slo((Limit("ttft", 0.8, 2.5),))
    oracle = Oracle(fleet.llm, trace, slo, fleet.network, fleet.policies)
    hour = worst_hour(simulate(fleet, trace, limits=slo.limits, record=True), slo)
    assert hour is not None
    problem: Any = SimpleNamespace(oracle=oracle, slo=slo, allows=lambda counts: True)
    found = price_holding_hours(problem, oracle.counts(fleet), hour, EvidenceClock())
    (workers,) = found.holding
    assert workers.count > fleet.workers
    hourly = replace(oracle, slo=replace(slo, every_s=3600.0))
    ((option, _),) = oracle.counts(fleet)
    assert hourly.holds(((option, workers.count),))
    assert not hourly.holds(((option, workers.count - 1),))
    paid, planned = found.holding_usd_per_h, found.planned_usd_per_h
    assert paid == bill_fleet(oracle.fleet(((option, workers.count),))).usd_per_h
    assert planned is not None and f"for {paid - planned:,.2f} USD/h more" in fact_sentence(found)
    within: Any = SimpleNamespace(oracle=oracle, slo=slo, allows=lambda counts: False)
    assert price_holding_hours(within, oracle.counts(fleet), hour, EvidenceClock()).holding_usd_per_h is None


def test_a_long_plan_that_keeps_every_hour_says_so() -> None:
    fleet, trace = one_bad_hour()
    slo = Slo((Limit("ttft", 0.8, 4.5),))
    simulation = simulate(fleet, trace, limits=slo.limits, record=True)
    (hour,) = kept_hours(simulation, slo)
    assert fact_sentence(hour).startswith(
        "every hour of the trace keeps the SLO; the worst: TTFT p80 is 4.00 s"
    )


def test_a_short_plan_has_no_worst_hour() -> None:
    found = planned(None)
    assert worst_hour(found.simulation, found.slo) is None


def test_which_slo_follows_from_which() -> None:
    """Windows imply the whole, never the other way, and windows of another length nothing."""
    limits = (Limit("ttft", 0.9, 1.0),)
    whole, ten, hour = Slo(limits), Slo(limits, every_s=600.0), Slo(limits, every_s=3600.0)
    assert is_looser(whole, ten) and not is_looser(ten, whole)
    assert is_looser(ten, ten) and not is_looser(hour, ten) and not is_looser(ten, hour)
    assert is_looser(replace(ten, limits=(Limit("ttft", 0.9, 2.0),)), ten)
