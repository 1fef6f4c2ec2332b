"""Traces too long to be searched whole: planned by their busiest part, simulated on all of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from plans import CATALOG
from questions import question, traffic

from planner.documents.facts import OverTheWhole
from planner.documents.task import PlanQuestion
from planner.domain import Limit, Selector, Slo
from planner.reports.fact_sentences import fact_sentence
from planner.search.evidence import certify, long_traces
from planner.search.evidence.long_traces import is_too_long, plan_by_parts, searched_requests
from planner.search.evidence.plan import Plan
from planner.search.problem.plan_problem import report_nothing
from planner.simulator import streaming_requests
from planner.simulator.replay import simulate, simulate_until
from planner.simulator.slo_verdict import judge_slo
from planner.traffic.scaling import find_busiest_window, select_window
from planner.traffic.trace import Trace

BUSY = 400
TASK = question(fleet={"gpus": ["h100-80g"]})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_traces, "LONG_REQUESTS", 1000)
    monkeypatch.setattr(long_traces, "PART_REQUESTS", 150)
    monkeypatch.setattr(streaming_requests, "LONG_REQUESTS", 1000)
    monkeypatch.setattr(streaming_requests, "CHUNK_REQUESTS", 200)


def long_trace() -> Trace:
    """Calm, then a tenth of the requests six times as fast, then calm."""
    calm, crowd = traffic(1, requests=3600, rate_rps=6.0), traffic(2, requests=BUSY, rate_rps=36.0)
    half = calm.arrival_s[1800]
    later = calm.arrival_s >= half
    parts = (calm.select(~later), crowd, calm.select(later))
    starts_s = (0.0, half, crowd.arrival_s[-1])
    return Trace(
        "long.csv",
        np.concatenate([part.arrival_s + at for part, at in zip(parts, starts_s, strict=True)]),
        np.concatenate([part.input_tokens for part in parts]),
        np.concatenate([part.output_tokens for part in parts]),
    )


def planned(part: Trace, seconds: float) -> Plan:
    return certify.plan(TASK, part, CATALOG, time_limit_s=seconds)


def told(plan: Plan) -> OverTheWhole:
    (found,) = (
        each for each in (*plan.certificate.binding, *plan.warnings) if isinstance(each, OverTheWhole)
    )
    return found


def by_parts(trace: Trace, how: object = planned, *, seconds: float = 300.0) -> Plan:
    return plan_by_parts(TASK, trace, how, seconds=seconds, progress=report_nothing)  # type: ignore[arg-type]


def test_the_busiest_part_is_planned_and_all_of_it_simulated() -> None:
    trace = long_trace()
    found = by_parts(trace)
    said = told(found)
    length_s = trace.duration_s * 150 / len(trace)
    part = select_window(trace, f"busiest {length_s} s")
    assert found.fleet == certify.plan(TASK, part, CATALOG).fleet
    assert said.part_from_s == trace.arrival_s[find_busiest_window(trace, length_s)]
    assert (said.requests, said.part_requests, said.attempts) == (len(trace), len(part), 1)
    whole = judge_slo(simulate(found.fleet, trace, limits=found.slo.limits), found.slo)
    assert whole.holds and said.outcome is not None and said.outcome.holds
    assert "the busiest part" in found.traffic_note and "simulated too and kept" in found.traffic_note
    assert "simulated on all of them the plan keeps the SLO" in fact_sentence(said)


def test_a_smaller_fleet_that_keeps_the_percentiles_of_the_whole_is_named() -> None:
    """A tenth of the requests may be late, and a tenth is busy: fewer workers do, and one less does not."""
    trace = long_trace()
    found = by_parts(trace)
    said = told(found)
    (pool,), (smaller,) = found.fleet.pools, said.smaller
    assert smaller.count < pool.count and said.smaller_usd_per_h is not None
    assert "if only percentiles over the whole trace are limited" in fact_sentence(said)

    def holds(count: int) -> bool:
        fleet = replace(found.fleet, pools=(replace(pool, count=count),))
        return judge_slo(simulate(fleet, trace, limits=found.slo.limits), found.slo).holds

    assert holds(smaller.count) and not (smaller.count > 1 and holds(smaller.count - 1))


def test_where_the_plan_misses_on_the_whole_the_worst_part_is_planned() -> None:
    """The first answer has one worker, which the crowd overwhelms."""
    trace, asked = long_trace(), []

    def first_too_small(part: Trace, seconds: float) -> Plan:
        asked.append(part)
        found = planned(part, seconds)
        pool = found.fleet.pools[0]
        one = replace(found.fleet, pools=(replace(pool, count=1),))
        return replace(found, fleet=one) if len(asked) == 1 else found

    found = by_parts(trace, first_too_small)
    assert told(found).attempts == len(asked) == 2
    assert judge_slo(simulate(found.fleet, trace, limits=found.slo.limits), found.slo).holds


def test_the_worst_part_is_that_in_which_classes_miss_their_own_limits() -> None:
    """Batches come in the first part and take 10 s, which their limit allows; chats come in the second."""
    of_class = {name: Selector(name, tenants=(name,)) for name in ("chat", "batch")}
    slo = Slo((Limit("ttft", 0.9, 0.5, of_class["chat"]), Limit("ttft", 0.9, 60.0, of_class["batch"])))
    trace = replace(traffic(requests=40), tenant=np.repeat([1, 0], [30, 10]), tenants=("chat", "batch"))
    found = simulate(planned(traffic(), 60.0).fleet, trace, limits=slo.limits)
    found = replace(found, ttft_s=np.repeat([10.0, 1.0], [30, 10]))
    length_s = float(trace.arrival_s[30] - trace.arrival_s[0])
    assert long_traces._worst_part_start_s(found, slo, length_s) == trace.arrival_s[30]


def test_what_misses_every_time_is_not_certified() -> None:
    def too_small(part: Trace, seconds: float) -> Plan:
        found = planned(part, seconds)
        return replace(found, fleet=replace(found.fleet, pools=(replace(found.fleet.pools[0], count=1),)))

    found = by_parts(long_trace(), too_small)
    assert found.status == "best found"
    assert told(found) in found.warnings and "misses the SLO" in fact_sentence(told(found))


def test_without_time_for_the_whole_the_answer_says_so() -> None:
    found = by_parts(long_trace(), lambda part, seconds: planned(part, 60.0), seconds=0.0)
    assert found.status == "best found" and told(found).outcome is None
    assert "no time to simulate all of them" in fact_sentence(told(found))


def test_a_simulation_beyond_its_deadline_ends() -> None:
    trace = long_trace()
    fleet = planned(traffic(), 60.0).fleet
    with pytest.raises(streaming_requests.OutOfTime):
        simulate_until(-math.inf, fleet, trace)


@pytest.mark.parametrize(
    ("changes", "is_long"),
    [
        ({}, True),
        ({"traffic": {"rate": 9}}, False),
        ({"traffic": {"window": "busiest 5 min"}}, False),
        ({"traffic": {"window": "whole"}}, True),
    ],
)
def test_what_is_planned_by_parts(changes: dict[str, object], is_long: bool) -> None:
    task: PlanQuestion = question(**changes)
    assert is_too_long(task, long_trace()) is is_long
    assert not is_too_long(task, traffic())


def test_a_trace_is_too_long_by_the_time_limit_as_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """600,000 requests take 1.2 s at 2 us each, 24 s twenty times; 20 s are worth a part of 250,000, but
    none has more than 200,000. Two seconds are worth 25,000."""
    monkeypatch.setattr(long_traces, "LONG_REQUESTS", 2_000_000)
    monkeypatch.setattr(long_traces, "PART_REQUESTS", 200_000)
    column = np.ones(600_000, np.int64)
    trace = Trace("flat", np.arange(600_000.0), column, column)
    task: PlanQuestion = question()
    assert [is_too_long(task, trace, seconds) for seconds in (math.inf, 25, 23, 2)] == [False] * 2 + [
        True
    ] * 2
    parts = [searched_requests(task, trace, seconds) for seconds in (25, 23, 2, 0.1)]
    assert parts == [600_000, 200_000, 25_000, long_traces.LEAST_REQUESTS]
    assert not is_too_long(task, trace.select(np.arange(30_000)), 0.1)  # no part would be much shorter


def test_production_in_dozens_of_futures_is_by_parts_from_fewer_requests_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A million requests in 20 scenarios are 20 million for each fleet; two million on paper are two."""
    monkeypatch.setattr(long_traces, "LONG_REQUESTS", 2_000_000)
    column = np.ones(1_000_000, np.int64)
    trace = Trace("flat", np.arange(1_000_000.0), column, column)
    assert not is_too_long(question(), trace)
    assert is_too_long(question(safety={"kept_in": 0.9}), trace)
    assert not is_too_long(question(safety={"kept_in": 0.9}), trace.select(np.arange(500_000)))


def test_a_short_trace_can_be_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than two chunks of requests, and no long trace: it is simulated as such, or until the deadline."""
    monkeypatch.setattr(streaming_requests, "LONG_REQUESTS", 10**6)
    trace, fleet = long_trace(), planned(traffic(), 60.0).fleet
    with pytest.raises(streaming_requests.OutOfTime):
        simulate_until(-math.inf, fleet, trace)
    through, whole = simulate_until(math.inf, fleet, trace), simulate(fleet, trace)
    assert np.array_equal(through.ttft_s, whole.ttft_s, equal_nan=True)


def test_the_busiest_request_is_found_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.traffic import scaling

    trace = long_trace()
    expected = find_busiest_window(trace, 10.0)
    monkeypatch.setattr(scaling, "BLOCK_REQUESTS", 77)
    assert find_busiest_window(trace, 10.0) == expected
