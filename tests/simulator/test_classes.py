"""Lines of an SLO that are of a class of requests, and the queue `edf`, in the simulator and its verdicts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulations import make_latency, make_trace, mixed, random_case
from simulator_reference import Reference

from planner.domain import Limit, Selector, Slo, allowed_above
from planner.simulator.replay import RequestRecords, simulate, simulate_if_kept
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import judge_slo
from planner.traffic.trace import Trace

CHAT, BATCH = Selector("chat", tenants=("chat",)), Selector("batch", tenants=("batch",))
METRICS = ("ttft", "tbt", "tpot", "e2e")


def in_classes(trace: Trace, seed: int) -> Trace:
    tenant = np.random.default_rng([seed, 8]).integers(0, 3, len(trace))
    return replace(trace, tenant=tenant, tenants=("chat", "batch", "other"))


def values_of(slow: Reference, simulation: Simulation, limit: Limit) -> list[float]:
    """The measured values of a limit's class, from the plain simulator."""
    start_s, end_s = simulation.window_s
    own = [r for r in slow.requests if limit.selector is None or simulation.limited_requests(limit)[r.index]]
    if limit.metric == "tbt":
        return [gap_s for r in own for at_s, gap_s in r.gaps if start_s <= at_s <= end_s]
    inside = [r for r in own if start_s <= r.arrival_s <= end_s]
    if limit.metric == "tpot":
        inside = [r for r in inside if r.output > 1]
    values = [float(getattr(r, f"{limit.metric}_s")) for r in inside]
    return [np.inf if np.isnan(value) else value for value in values]


@pytest.mark.parametrize("seed", range(12))
def test_lines_of_classes_count_what_the_plain_simulator_gives_to_them(seed: int) -> None:
    """Each value of each class, gaps too; percentiles by sorting, and runs that may stop early agree."""
    fleet, trace, _, _ = random_case(seed, dyadic=seed % 2 == 0)
    trace, rng = in_classes(trace, seed), np.random.default_rng(seed)
    limits = tuple(
        Limit(metric, float(rng.uniform(0.5, 1)), 0.02 * 500 ** rng.uniform(), selector)
        for selector in (CHAT, None, BATCH)
        for metric in METRICS
    )
    slo = Slo(limits)
    simulation = simulate(fleet, trace, limits=limits, record=True)
    slow, verdict = Reference(fleet, trace).run(), judge_slo(simulation, slo)
    for k, limit in enumerate(limits):
        values = values_of(slow, simulation, limit)
        late = sum(value > limit.limit_s for value in values)
        assert (simulation.counted[k], simulation.violations[k]) == (len(values), late), limit.name
        assert verdict.lines[k].holds == (late <= allowed_above(limit.percentile_frac, len(values)))
        if values and np.isfinite(values).all():
            rank = len(values) - allowed_above(limit.percentile_frac, len(values))
            assert verdict.lines[k].value_s == pytest.approx(sorted(values)[max(rank, 1) - 1], rel=1e-9)
    kept = simulate_if_kept(fleet, trace, limits, RequestRecords(trace), patience_s=slo.patience_s(1e9))
    if kept is None:
        assert not verdict.holds
    else:
        assert judge_slo(kept, slo, with_percentiles=False).holds == verdict.holds


def test_requests_that_are_due_first_go_first() -> None:
    """A prompt of 512 tokens fills a step. While the first is computed a batch request comes and then a chat:
    first come, first served takes the batch request first, edf the chat, until the batch request is due.
    """
    fleet = mixed(make_latency(), budget=512, seats=8)
    trace = make_trace([0.0, 0.1, 0.2, 0.3], [512] * 4, [1] * 4)
    trace = replace(trace, tenant=np.array([1, 1, 0, 0]), tenants=("chat", "batch"))
    limits = (Limit("ttft", 0.9, 1.5, CHAT), Limit("e2e", 0.9, 100.0, BATCH))

    def order(queue: str, batch_s: float) -> list[int]:
        due = ((CHAT, 1.5), (BATCH, batch_s)) if queue == "edf" else ()
        policies = replace(fleet.policies, queue=queue, due=due)
        simulation = simulate(replace(fleet, policies=policies), trace, limits=limits)
        return [int(r) for r in np.argsort(simulation.ttft_s + simulation.arrival_s)]

    assert order("fcfs", 100.0) == [0, 1, 2, 3]
    assert order("edf", 100.0) == [0, 2, 3, 1]
    assert order("edf", 1.55) == [0, 1, 2, 3]


def test_a_class_that_waits_for_ever_fails_the_backlog_test() -> None:
    """Chat, four in five requests, is served at once; batch waits behind it to the end of a loaded trace.
    Over all requests more than half are in time, of the last batch requests none is.
    """
    fleet = mixed(make_latency(), budget=512, seats=8)
    arrival_s = np.arange(500) * 0.9
    trace = make_trace(arrival_s, [512] * 500, [1] * 500)
    trace = replace(trace, tenant=(np.arange(500) % 5 == 0).astype(np.int64), tenants=("chat", "batch"))
    slo = Slo((Limit("ttft", 0.9, 2.5, CHAT), Limit("e2e", 0.99, 3600.0, BATCH)))
    due = tuple((selector, slo.due_s(selector)) for selector in slo.selectors)
    policies = replace(fleet.policies, queue="edf", due=due)
    verdict = judge_slo(simulate(replace(fleet, policies=policies), trace, limits=slo.limits), slo)
    assert [line.holds for line in verdict.lines] == [True, True]
    assert not verdict.is_steady and not verdict.holds
    assert verdict.patience_s == 60.0
