"""Percentiles against brute force, and the judge on fleets that are fine, saturated, or too small."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from simulations import make_latency, make_trace, mixed, random_case
from simulator_reference import Reference

from planner.domain import Limit, Metric, Slo, allowed_above
from planner.fleet import Fleet
from planner.simulator.measured_values import (
    measured_mask,
    metric_percentile_s,
    percentile_s,
    request_values_s,
)
from planner.simulator.recorded_gaps import gaps_s
from planner.simulator.replay import RequestRecords, simulate, simulate_if_kept
from planner.simulator.slo_verdict import judge_slo
from planner.traffic.trace import Trace, measured_window

PERCENTILES = (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)


def brute_force(values: list[float], percentile_frac: float) -> float:
    """Nearest rank: the ceil(p n)-th smallest, in exact arithmetic."""
    rank = math.ceil(Fraction(str(percentile_frac)) * len(values))
    return sorted(values)[rank - 1]


@pytest.mark.parametrize("percentile_frac", PERCENTILES)
def test_percentile_is_the_nearest_rank(percentile_frac: float) -> None:
    """All sizes up to 60 and some where p n is whole; with ties; and the same values given once with a
    weight."""
    rng = np.random.default_rng(3)
    for n in (*range(1, 60), 100, 200, 1000):
        values = rng.integers(0, 20, n).astype(float)
        expected = brute_force(values.tolist(), percentile_frac)
        assert percentile_s(values, percentile_frac) == expected
        weights = rng.integers(1, 5, n).astype(float)
        expected = brute_force(np.repeat(values, weights.astype(int)).tolist(), percentile_frac)
        assert percentile_s(values, percentile_frac, weights) == expected


def test_percentile_of_nothing_is_nan() -> None:
    assert math.isnan(percentile_s(np.zeros(0), 0.9))


@pytest.mark.parametrize("percentile_frac", PERCENTILES)
def test_a_limit_holds_just_when_the_percentile_keeps_it(percentile_frac: float) -> None:
    """Counting violations against `allowed_above` and comparing the percentile with it are the same."""
    rng = np.random.default_rng(4)
    for n in (1, 2, 9, 10, 11, 100, 999, 1000):
        values = rng.uniform(0, 1, n)
        for limit_s in (0.0, 0.5, 0.9, *values[:5]):
            by_count = int((values > limit_s).sum()) <= allowed_above(percentile_frac, n)
            assert by_count == (percentile_s(values, percentile_frac) <= limit_s)


@pytest.mark.parametrize("seed", range(30))
def test_percentiles_of_a_run_equal_those_of_the_plain_simulator(seed: int) -> None:
    fleet, trace, limits, closed_loop = random_case(seed, dyadic=False)
    fast = simulate(fleet, trace, limits=limits, record=True, closed_loop=closed_loop)
    slow = Reference(fleet, trace, closed_loop=closed_loop).run()
    verdict = judge_slo(fast, Slo(limits))
    for line in verdict.lines:
        values = slow.values(line.limit.metric)
        if values:
            expected = percentile_s(np.array(values), line.limit.percentile_frac)
            assert line.value_s == pytest.approx(expected, rel=1e-9)
        assert line.holds == slow.keeps(line.limit)
    assert judge_slo(fast, Slo(limits), with_percentiles=False).holds == verdict.holds


@pytest.mark.long
@pytest.mark.parametrize("closed_loop", [0, 4])
def test_stopping_early_never_changes_the_verdict(closed_loop: int) -> None:
    """Random cases with one to four limits; the verdicts go both ways, and some runs do stop early."""
    verdicts, stopped = [], 0
    for seed in range(300):
        fleet, trace, limits, _ = random_case(seed, dyadic=False)
        rng = np.random.default_rng(seed)
        limits = limits[: int(rng.integers(1, 5))]
        factor = float(rng.choice([1, 10, 100]))
        slo = Slo(
            tuple(Limit(limit.metric, limit.percentile_frac, limit.limit_s * factor) for limit in limits),
            attainment_frac=float(rng.choice([0.5, 0.9])),
        )
        whole, early = (
            simulate(fleet, trace, limits=slo.limits, stop_early=stop, closed_loop=closed_loop)
            for stop in (False, True)
        )
        assert judge_slo(early, slo).holds == judge_slo(whole, slo).holds
        verdicts.append(judge_slo(whole, slo).holds)
        stopped += not early.complete
    assert 30 < sum(verdicts) < 270
    assert stopped > 30


def saturated() -> tuple[Fleet, Trace]:
    """1 request/s served (one seat, 1 s, one token out), 1.25 requests/s arriving: the wait grows by 1 s in 5
    s."""
    trace = make_trace(np.arange(1000) * 0.8, np.ones(1000, int), np.ones(1000, int))
    return mixed(make_latency(), seats=1), trace


@pytest.mark.parametrize("metric", ["ttft", "e2e"])
def test_who_has_waited_beyond_a_limit_counts_while_waiting(metric: Metric) -> None:
    """Requests 50 to 999 arrive after the warm-up of 40 s, and 475 of them may be late. The 476th is 525,
    which arrives at 420 s and is late after 422 s; what comes next is the arrival of 528 at 422.4 s. Its
    first token would come at 526 s.
    """
    fleet, trace = saturated()
    requests = RequestRecords(trace)
    assert simulate_if_kept(fleet, trace, (Limit(metric, 0.5, 2.0),), requests) is None
    assert requests.entered == 529


def test_a_growing_queue_fails_the_backlog_test_whatever_the_percentiles() -> None:
    """Request i ends at i + 1 and waits 0.2 i: 200 s for the last. At p50 a limit of 150 s holds (0.2 * 525 +
    1 s), and the last tenth waits 180 s and more. A limit of 250 s is longer than any wait: no backlog by
    that measure."""
    fleet, trace = saturated()
    slo = Slo((Limit("ttft", 0.5, 150.0),))
    verdict = judge_slo(simulate(fleet, trace, limits=slo.limits), slo)
    assert verdict.lines[0].value_s == pytest.approx(106, abs=0.5)
    assert verdict.lines[0].holds
    assert not verdict.is_steady
    assert not verdict.holds
    patient = Slo((Limit("ttft", 0.5, 250.0),))
    held = judge_slo(simulate(fleet, trace, limits=patient.limits), patient)
    assert held.holds
    assert (verdict.patience_s, held.patience_s) == (150.0, 250.0)
    assert verdict.patient_frac == 0.0 and held.patient_frac == 1.0


def test_without_a_ttft_limit_the_backlog_test_waits_a_minute() -> None:
    fleet, trace = saturated()
    slo = Slo((Limit("e2e", 0.1, 60.0),))
    verdict = judge_slo(simulate(fleet, trace, limits=slo.limits), slo)
    assert verdict.lines[0].holds
    assert not verdict.is_steady


def test_the_window_leaves_out_the_warm_up() -> None:
    """A twentieth of the trace, at most two minutes. It ends with the last arrival."""
    assert measured_window(make_trace([10.0, 110.0], [1, 1], [1, 1])) == (15.0, 110.0)
    assert measured_window(make_trace([10.0, 10010.0], [1, 1], [1, 1])) == (130.0, 10010.0)


def test_attainment_counts_requests_that_keep_every_limit() -> None:
    """1 s steps. 21 requests 10 s apart, the first (at 0) before the window (from 10 s on). The 20 others
    take 1 s for the first token and have as many tokens as seconds: 5, but every fourth 9, more than 6 s."""
    outputs = np.where(np.arange(21) % 4 == 0, 9, 5)
    trace = make_trace(np.arange(21) * 10.0, np.ones(21, int), outputs)
    slo = Slo((Limit("ttft", 0.9, 1.5), Limit("e2e", 0.5, 6.0)), attainment_frac=0.75)
    verdict = judge_slo(simulate(mixed(make_latency()), trace, limits=slo.limits, record=True), slo)
    assert verdict.attainment_frac == 15 / 20
    assert verdict.holds
    assert [line.kept_frac for line in verdict.lines] == [1.0, 0.75]
    stricter = Slo(slo.limits, attainment_frac=0.76)
    refused = judge_slo(simulate(mixed(make_latency()), trace, limits=slo.limits), stricter)
    assert all(line.holds for line in refused.lines)
    assert not refused.attainment_holds
    assert not refused.holds


def test_rejected_requests_break_every_limit_but_those_on_gaps_and_the_slo() -> None:
    """2 KV blocks: every tenth prompt (of 40 tokens) fits nowhere. It counts as infinite:
    20 of 201 are 10 %, so p89 still holds and p91 does not, nor an attainment of 0.91. A fleet that rejects
    keeps no SLO, whatever its percentiles.
    """
    prompts = np.where(np.arange(201) % 10 == 5, 40, 8)
    trace = make_trace(np.arange(201) * 10.0, prompts, np.full(201, 2))
    fleet = mixed(make_latency(), kv_tokens=32)
    metrics: tuple[Metric, ...] = ("ttft", "tpot", "e2e")
    for percentile_frac, holds in ((0.89, True), (0.91, False)):
        slo = Slo(tuple(Limit(metric, percentile_frac, 3.0) for metric in metrics))
        verdict = judge_slo(simulate(fleet, trace, limits=slo.limits), slo)
        assert [line.holds for line in verdict.lines] == [holds] * 3
        assert verdict.rejected == 20 and not verdict.holds
    slo = Slo((Limit("tbt", 0.99, 3.0),), attainment_frac=0.91)
    verdict = judge_slo(simulate(fleet, trace, limits=slo.limits), slo)
    assert verdict.lines[0].holds and not verdict.holds
    assert not verdict.attainment_holds


def test_rejected_requests_after_the_last_finished_one_count() -> None:
    """Only the first of 100 requests fits. The window ends with the last arrival, not with the last token."""
    prompts = np.where(np.arange(100) == 0, 8, 40)
    trace = make_trace(np.arange(100) * 1.0, prompts, np.full(100, 2))
    slo = Slo((Limit("ttft", 0.5, 3.0),), attainment_frac=0.5)
    result = simulate(mixed(make_latency(), kv_tokens=32), trace, limits=slo.limits)
    assert measured_mask(result).sum() == 95
    verdict = judge_slo(result, slo)
    assert verdict.rejected == 99
    assert verdict.attainment_frac == 0.0
    assert not verdict.lines[0].holds
    assert not verdict.is_steady


def test_the_judge_wants_the_limits_that_were_watched() -> None:
    fleet, trace = saturated()
    with pytest.raises(ValueError, match="same SLO"):
        judge_slo(simulate(fleet, trace), Slo((Limit("ttft", 0.5, 1.0),)))


def test_gap_percentiles_need_a_recorded_run() -> None:
    """Output 5 in 1 s steps: all gaps are 1 s. Not recorded: NaN, and the verdict all the same."""
    trace, slo = (
        make_trace(np.arange(50) * 10.0, np.ones(50, int), np.full(50, 5)),
        Slo((Limit("tbt", 0.99, 1.5),)),
    )
    recorded, plain = (
        simulate(mixed(make_latency()), trace, limits=slo.limits, record=record) for record in (True, False)
    )
    assert metric_percentile_s(recorded, "tbt", 0.99) == 1.0
    assert gaps_s(recorded)[1].sum() == recorded.counted[0]
    assert math.isnan(judge_slo(plain, slo).lines[0].value_s)
    assert judge_slo(plain, slo).holds
    assert judge_slo(recorded, slo).holds
    assert (request_values_s(recorded, "tbt") == 1.0).all()


def test_stopping_at_the_backlog_test_never_changes_the_verdict() -> None:
    """Random fleets, engines and policies, with a patience about as long as their waits: what `keeps` stops
    fails the backlog test in the whole run, and most of what fails it is stopped."""
    failed, stopped = 0, 0
    for seed in range(400):
        fleet, trace, _, _ = random_case(seed, dyadic=False)
        whole = simulate(fleet, trace)
        patience_s = float(np.random.default_rng(seed).choice([0.01, 0.1, 0.5])) * (
            float(trace.arrival_s[-1]) + 0.1
        )
        found = simulate_if_kept(fleet, trace, (), RequestRecords(trace), patience_s=patience_s)
        limits = (Limit("ttft", 0.0, patience_s),)
        is_steady = judge_slo(simulate(fleet, trace, limits=limits), Slo(limits)).is_steady
        assert not is_steady or (found is not None and found.e2e_s.tobytes() == whole.e2e_s.tobytes())
        failed, stopped = failed + (not is_steady), stopped + (found is None)
    assert failed > 40 and 10 < stopped <= failed, (failed, stopped)
