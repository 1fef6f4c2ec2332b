"""Long traces pass through the kernel's memory: equal to the whole run, whatever the fleet does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from simulations import make_latency, make_trace, mixed, random_case

from planner.domain import Limit, Slo
from planner.errors import InputError
from planner.fleet import Fleet, Policies
from planner.models.engine import Engine, HostTime
from planner.policies import BATCHING, QUEUE, ROUTING, STEPWISE
from planner.simulator import streaming_requests
from planner.simulator.energy import expected_power
from planner.simulator.gap_counts import GapCounts
from planner.simulator.recorded_gaps import gap_percentile_s, gap_runs, gaps_s
from planner.simulator.replay import RequestRecords, is_long, simulate, simulate_if_kept
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import judge_slo
from planner.simulator.utilisation import pool_uses
from planner.traffic.trace import Trace

CHUNK = 7
OF_REQUESTS = (
    *("arrival_s", "queue_s", "ttft_s", "tpot_s", "tbt_max_s", "e2e_s"),
    *("prefill_worker", "decode_worker", "preemptions", "status"),
)
OF_THE_FLEET = ("worker_busy_s", "worker_steps", "worker_tokens", "violations", "counted")


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every trace counts as long, and what is given back is overwritten, so that nobody reads it later."""
    keep = streaming_requests.StreamedRequests._read_chunk

    def keep_and_spoil(self: streaming_requests.StreamedRequests, rows: slice) -> None:
        keep(self, rows)
        self.requests[rows].view(np.uint8)[:] = 0x7F

    monkeypatch.setattr(streaming_requests.StreamedRequests, "_read_chunk", keep_and_spoil)
    monkeypatch.setattr(streaming_requests, "CHUNK_REQUESTS", CHUNK)
    monkeypatch.setattr(streaming_requests, "LONG_REQUESTS", 0)
    yield


def whole(
    fleet: Fleet, trace: Trace, limits: tuple[Limit, ...], monkeypatch: pytest.MonkeyPatch
) -> Simulation:
    with monkeypatch.context() as patch:
        patch.setattr(streaming_requests, "LONG_REQUESTS", 10**9)
        return simulate(fleet, trace, limits=limits, record=True)


def assert_equal(ours: Simulation, theirs: Simulation) -> None:
    for name in (*OF_REQUESTS, *OF_THE_FLEET):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    assert (ours.end_s, ours.window_s, ours.complete) == (theirs.end_s, theirs.window_s, theirs.complete)


def variety(seed: int, dyadic: bool) -> tuple[Fleet, Trace, tuple[Limit, ...]]:
    """A random fleet under random policies, one in two on an engine that is synchronous or not."""
    fleet, trace, limits, _ = random_case(seed, dyadic=dyadic)
    rng = np.random.default_rng([seed, 23])
    routing, queue = (
        [row.name for row in rows.values() if STEPWISE in row.simulators and not row.reads_cache_state]
        for rows in (ROUTING, QUEUE)
    )
    batching = [name for name, row in BATCHING.items() if row.simulator == STEPWISE]
    policies = replace(
        fleet.policies,
        batching=str(rng.choice(batching)) if seed % 2 else fleet.policies.batching,
        queue=str(rng.choice(queue)),
        routing=str(rng.choice(routing)),
        decode_routing=str(rng.choice(routing)),
        ttft_s=0.5,
        tbt_s=0.1,
    )
    fleet = replace(fleet, policies=policies)
    if seed % 2 == 0:
        host = HostTime(*rng.uniform(0, 0.02, 2).tolist())
        front_end_s = float(rng.uniform(0.001, 0.3))
        engine = Engine("vllm", "0", bool(rng.integers(2)), host, host, front_end_s)
        pools = tuple(replace(pool, type=replace(pool.type, engine=engine)) for pool in fleet.pools)
        fleet = replace(fleet, pools=pools)
    return fleet, trace, limits


@pytest.mark.parametrize("dyadic", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_results_equal_those_of_the_whole_run(
    part: int, dyadic: bool, in_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of seven requests, to the last bit, for all that nobody refuses to simulate."""
    compared = 0
    for seed in range(40 * part, 40 * (part + 1)):
        fleet, trace, limits = variety(seed, dyadic)
        try:
            expected = whole(fleet, trace, limits, monkeypatch)
        except InputError:
            continue
        assert is_long(fleet, trace)
        assert_equal(simulate(fleet, trace, limits=limits, record=True), expected)
        compared += 1
    assert compared >= 15


def busy_trace(n: int) -> Trace:
    rng = np.random.default_rng(5)
    return make_trace(np.cumsum(rng.exponential(0.02, n)), rng.integers(1, 60, n), rng.integers(1, 40, n))


FLEET = mixed(make_latency((0.01, 0.02), b=1e-4, d=1e-5), kv_tokens=16 * 200, seats=16, budget=64)


def test_a_simulation_that_may_end_early_says_the_same(
    in_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`keeps` refutes what it refutes of the whole, and else gives the same simulation."""
    trace, verdicts = busy_trace(300), []
    for limit_s in (0.02, 0.05, 0.2, 2.0):
        limits = (Limit("ttft", 0.9, limit_s), Limit("tbt", 0.9, limit_s))
        found = simulate_if_kept(FLEET, trace, limits, RequestRecords(trace), 1.0)
        with monkeypatch.context() as patch:
            patch.setattr(streaming_requests, "LONG_REQUESTS", 10**9)
            expected = simulate_if_kept(FLEET, trace, limits, RequestRecords(trace), 1.0)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert_equal(found, expected)
            np.testing.assert_array_equal(found.counted_in, expected.counted_in)
            np.testing.assert_array_equal(found.violations_in, expected.violations_in)
        verdicts.append(found is not None)
    assert verdicts[0] is False and verdicts[-1] is True


def test_percentiles_of_counted_gaps_are_gaps_of_that_rank(
    in_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 2^-16 above the exact one, and the mean is that of all gaps."""
    trace = busy_trace(300)
    found, expected = (simulate(FLEET, trace, record=True), whole(FLEET, trace, (), monkeypatch))
    assert found.gaps is not None
    runs, (values_s, seen) = gap_runs(expected), gaps_s(expected)
    assert found.gaps.total == seen.sum() > 3000
    assert found.gaps.mean_s == pytest.approx(float(values_s @ seen / seen.sum()), rel=1e-12)
    for percentile_frac in (0.01, 0.5, 0.9, 0.99, 0.999, 1.0):
        exact_s, counted_s = gap_percentile_s(runs, percentile_frac), found.gaps.percentile_s(percentile_frac)
        assert exact_s <= counted_s <= exact_s * (1 + 2**-16)
        assert np.isclose(values_s, counted_s, rtol=1e-14).any()


def test_the_verdict_is_that_of_the_whole_run(in_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = busy_trace(300)
    slo = Slo((Limit("ttft", 0.9, 0.2), Limit("tbt", 0.9, 0.05), Limit("e2e", 0.5, 1.0)))
    ours = judge_slo(simulate(FLEET, trace, limits=slo.limits, record=True), slo)
    theirs = judge_slo(whole(FLEET, trace, slo.limits, monkeypatch), slo)
    assert ours.lines[1].value_s == pytest.approx(theirs.lines[1].value_s, rel=2**-16)
    assert [line.kept_frac for line in ours.lines] == [line.kept_frac for line in theirs.lines]
    assert (ours.holds, ours.attainment_frac, ours.patient_frac) == (
        theirs.holds,
        theirs.attainment_frac,
        theirs.patient_frac,
    )
    assert (ours.lines[0], ours.lines[2]) == (theirs.lines[0], theirs.lines[2])


def test_windows_are_judged_without_recorded_gaps(in_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = busy_trace(600)
    slo = Slo((Limit("tbt", 0.9, 0.05), Limit("ttft", 0.9, 0.3)), every_s=2.0)
    ours = judge_slo(simulate(FLEET, trace, limits=slo.limits, record=True, every_s=2.0), slo)
    theirs = judge_slo(whole(FLEET, trace, slo.limits, monkeypatch), slo)
    assert (ours.windows, ours.holds) == (theirs.windows, theirs.holds)
    assert ours.windows > 1
    assert [line.holds for line in ours.lines] == [line.holds for line in theirs.lines]


def test_parts_that_were_recorded_stand_for_the_whole(
    in_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steady traffic: power and use of a pool from eight parts of the run are near those of all of it."""
    monkeypatch.setattr(streaming_requests, "CHUNK_REQUESTS", 100)
    trace = busy_trace(4000)
    ours, theirs = simulate(FLEET, trace, record=True), whole(FLEET, trace, (), monkeypatch)
    assert 0 < len(ours.runs) < len(theirs.runs) / 4
    parts, all_of_it = expected_power(FLEET, ours), expected_power(FLEET, theirs)
    assert parts is not None and all_of_it is not None
    assert parts.mean_w == pytest.approx(all_of_it.mean_w, rel=0.1)
    (use,), (whole_use,) = pool_uses(FLEET, ours), pool_uses(FLEET, theirs)
    assert use.busy_frac == pytest.approx(whole_use.busy_frac, rel=0.1)
    assert use.decodes_mean == pytest.approx(whole_use.decodes_mean, rel=0.1)


def test_more_steps_than_there_is_room_for_are_simulated_again(
    in_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming_requests, "RUNS_PER_REQUEST", 1)
    trace = busy_trace(100)
    found = simulate(FLEET, trace, record=True)
    assert found.gaps is not None
    assert found.gaps.total == gaps_s(whole(FLEET, trace, (), monkeypatch))[1].sum()


def test_requests_that_arrive_at_one_moment_are_laid_out_together(
    in_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty at 0 s, fifty at 1 s: chunks of seven end within a moment."""
    trace = make_trace(np.repeat([0.0, 1.0], 50), np.full(100, 20), np.full(100, 5))
    assert_equal(simulate(FLEET, trace), whole(FLEET, trace, (), monkeypatch))


def test_routing_by_errors_of_predictions_where_no_request_makes_a_step_longer() -> None:
    """Steps of 1 s whatever is in them: nothing to divide an error by."""
    policies = Policies(routing="best-fit-rebalanced", ttft_s=5.0, tbt_s=2.0)
    fleet = replace(mixed(make_latency((1.0, 1.0))), policies=policies)
    assert simulate(fleet, make_trace([0.0, 0.5], [4, 4], [3, 3])).status.tolist() == [0, 0]


def test_no_gaps_have_no_percentile() -> None:
    assert np.isnan(GapCounts(0.0, 1.0).percentile_s(0.9)) and np.isnan(GapCounts(0.0, 1.0).mean_s)


def test_what_depends_on_other_requests_is_kept_whole() -> None:
    trace = replace(busy_trace(10), after=np.array([[1, 0]]))
    assert not is_long(FLEET, trace)
    assert not is_long(replace(FLEET, policies=Policies(prediction_accuracy_frac=0.9)), busy_trace(10))
