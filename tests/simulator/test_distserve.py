"""DistServe's rings of ranks, compiled: against the plain ones, by hand, and what must hold for any."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from reference_distserve import Coefficients, DistServe, Placement
from reference_distserve import Request as Plain
from shares import some

from benchmarks.peers import distserve as peer
from benchmarks.peers.compare import compare
from planner.domain import Gpu, Limit
from planner.errors import InputError
from planner.files.checked_files import read_json
from planner.fleet import Fleet, Network, Policies, Pool, Role, WorkerType
from planner.models.foreign_forms import DistServeSteps
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.simulator.recorded_gaps import gaps_s
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

GPU = Gpu("paper", 1e3, 100.0, 1000.0, "wire", 10.0, 1.0, 8, 1.0, "paper", "paper")
# 16 bytes of KV per token, 256 per block
LLM = Llm("paper", layers=4, hidden=4, heads=2, kv_heads=1, head_dim=1, ffn=8, vocab=10, context_tokens=64)
ENDLESS = 10**9
REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "distserve"
CASES = ("disagg_opt13b_tp2_tp1_r4", "disagg_opt66b_tp4_tp2pp2_r3", "vllm_opt13b_tp1_r1")
POLICIES = Policies(batching="distserve", routing="least-waiting", decode_routing="least-waiting")
FREE = Network(math.inf, transfer="serialised", is_shared=False)


def trace_of(rows: list[tuple[float, int, int]]) -> Trace:
    """Rows of DistServe's: the prefill's token is not among its output tokens."""
    arrival_s, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    return Trace("made", arrival_s.astype(float), inputs.astype(np.int64), outputs.astype(np.int64) + 1)


def fleet_of(
    placement: Placement, coefficients: Coefficients, *, kv_tokens: int = ENDLESS, network: Network = FREE
) -> Fleet:
    steps = DistServeSteps(
        coefficients.prefill,
        coefficients.decode_small,
        coefficients.decode_large,
        coefficients.threshold,
        coefficients.prefill_per_rank_ms,
        coefficients.overhead_ms,
        coefficients.overhead_ms_per_token,
    )

    def pool(role: Role, count: int, pp: int) -> Pool:
        unused = StepLatency((1.0, 2.0), (1.0, 1.0), 0.0, 0.0, 0.0, 0.0, 0.0, "not used")
        worker = WorkerType(GPU, 1, unused, kv_tokens, placement.prefill_max_tokens, 40, pp=pp, form=steps)
        return Pool(role, role, worker, count)

    role: Role = "prefill" if placement.decode_instances else "mixed"
    pools = [pool(role, placement.prefill_instances, placement.prefill_pp)]
    if placement.decode_instances:
        pools.append(pool("decode", placement.decode_instances, placement.decode_pp))
    policies = replace(POLICIES, decode_batch_tokens=placement.decode_max_tokens)
    return Fleet(LLM, tuple(pools), policies, network)


def random_case(seed: int, *, integers: bool) -> tuple[Placement, Coefficients, list[tuple[float, int, int]]]:
    """Small: so that batches fill, pipelines overlap and queues form. With `integers` events coincide."""
    rng = np.random.default_rng([seed, integers])

    def number(high: float) -> float:
        return float(rng.integers(0, int(high) + 1)) if integers else float(rng.uniform(0, high))

    pp = int(rng.choice([1, 1, 2, 3]))
    decode_instances = int(rng.choice([0, 1, 1, 2, 3]))
    placement = Placement(
        int(rng.integers(1, 4)),
        pp,
        decode_instances,
        int(rng.choice([1, 2, 4])),
        int(rng.integers(40, 120)),
        int(rng.integers(70, 300)),
    )
    scale = 1.0 if integers else 0.1
    coefficients = Coefficients(
        (number(8), scale * number(3), scale * scale * number(2)),
        number(3),
        (1 + number(6), scale * number(2), number(3)),
        (1 + number(9), scale * number(2), number(2)),
        int(rng.integers(2, 6)),
        number(3),
        scale * number(1),
    )
    n = int(rng.integers(1, 40))
    gaps = rng.exponential(rng.choice([1.0, 10.0, 60.0]), n)
    arrival_ms = np.cumsum(np.round(gaps) if integers else gaps)
    rows = zip(arrival_ms, rng.integers(1, 30, n), rng.integers(1, 12, n), strict=True)
    return placement, coefficients, [(float(t), int(i), int(o)) for t, i, o in rows]


def stamps(simulation: Simulation) -> npt.NDArray[np.float64]:
    """(3, n): when prefill began, when it ended, when the request was done."""
    arrival_s = simulation.arrival_s
    return np.stack([simulation.queue_s, simulation.ttft_s, simulation.e2e_s]) + arrival_s


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("seed", some(range(120), 40))
def test_the_kernel_equals_the_plain_ring(seed: int, integers: bool) -> None:
    """Every stamp of every request, to 1e-9 of a time unit, with ties and without."""
    placement, coefficients, rows = random_case(seed, integers=integers)
    plain = DistServe(placement, coefficients, [Plain(*row) for row in rows]).run().requests
    expected = [[r.prefill_start_ms, r.prefill_end_ms, r.finish_ms] for r in plain]
    simulation = simulate(fleet_of(placement, coefficients), trace_of(rows))
    assert stamps(simulation) == pytest.approx(np.array(expected).T, rel=1e-12, abs=1e-9)


def test_a_prefill_pipeline_overlaps_batches() -> None:
    """(4 / 2) + 1 * 2 = 4 a rank, 1 more on the first. A: 0-5, 5-9. B (arrives 1): 5-10, 10-14. C and D (6,
    7): one batch, 10-15, 15-19."""
    coefficients = Coefficients((4, 0, 0), 1, (1, 0, 0), (1, 0, 0), 95, 1, 0)
    rows = [(0.0, 1, 1), (1.0, 1, 1), (6.0, 1, 1), (7.0, 1, 1)]
    simulation = simulate(fleet_of(Placement(1, 2, 1, 1, 100, 100), coefficients), trace_of(rows))
    assert simulation.ttft_s + simulation.arrival_s == pytest.approx([9, 14, 19, 19])


def test_kv_is_pulled_once_there_is_room() -> None:
    """Prefill 1, decode 1 a step; 2 blocks of 256 bytes cross at 256 bytes/s: 2. A and B: 20 prompt and 12
    output tokens, so 2 blocks each, and no room for both. A is prefilled at 1, arrives at 3 and is done at
    14. Then B crosses, arrives at 16 and is done at 27: its longest gap is 17 - 1."""
    coefficients = Coefficients((1, 0, 0), 0, (1, 0, 0), (1, 0, 0), 95, 0, 0)
    network = Network(256.0, transfer="serialised")
    fleet = fleet_of(Placement(1, 1, 1, 1, 100, 100), coefficients, kv_tokens=64, network=network)
    fleet = replace(
        fleet,
        pools=(fleet.pools[0], replace(fleet.pools[1], type=replace(fleet.pools[1].type, kv_tokens=32))),
    )
    simulation = simulate(fleet, trace_of([(0, 20, 11), (0, 20, 11)]))
    assert simulation.e2e_s == pytest.approx([14, 27])
    assert simulation.tbt_max_s == pytest.approx([3, 16])


def test_a_prompt_waits_while_memory_is_full() -> None:
    """One block of KV on a shared instance: B (at 0) is prefilled when A's two decodes are done, at 3."""
    coefficients = Coefficients((1, 0, 0), 0, (1, 0, 0), (1, 0, 0), 95, 0, 0)
    fleet = fleet_of(Placement(1, 1, 0, 1, 100, 100), coefficients, kv_tokens=16)
    simulation = simulate(fleet, trace_of([(0, 8, 2), (0, 8, 2)]))
    assert simulation.ttft_s == pytest.approx([1, 4])


def test_what_is_longer_than_a_limit_runs_alone_and_what_fits_nowhere_is_rejected() -> None:
    """A prompt of 70 where batches hold 50, a context of 70 where they hold 60. 10,000 fit no cache."""
    coefficients = Coefficients((1, 0, 0), 0, (1, 0, 0), (1, 0, 0), 95, 0, 0)
    fleet = fleet_of(Placement(1, 1, 1, 1, 50, 60), coefficients, kv_tokens=160)
    simulation = simulate(fleet, trace_of([(0, 70, 2), (0, 10_000, 1), (0, 20, 1)]))
    assert simulation.status.tolist() == [0, 1, 0]
    assert simulation.ttft_s[[0, 2]] == pytest.approx([1, 2])


def test_a_prompt_that_is_rejected_makes_room_for_the_next() -> None:
    """Two ranks prefill. A fills their memory, and no decode worker has room for it; B waits until then."""
    coefficients = Coefficients((1, 0, 0), 0, (1, 0, 0), (1, 0, 0), 95, 0, 0)
    fleet = fleet_of(Placement(1, 2, 1, 1, 100, 100), coefficients, kv_tokens=32)
    decode = replace(fleet.pools[1], type=replace(fleet.pools[1].type, kv_tokens=16))
    fleet = replace(fleet, pools=(fleet.pools[0], decode))
    simulation = simulate(fleet, trace_of([(0, 20, 4), (0, 8, 2)]))
    assert simulation.status.tolist() == [1, 0]
    assert simulation.ttft_s[1] == pytest.approx(2)


# --- what must hold for any


@pytest.mark.parametrize("seed", some(range(40), 14))
def test_requests_and_tokens_in_are_requests_and_tokens_out(seed: int) -> None:
    """Under short memory and a slow link, by several routings: all finish; every gap is counted once, by the
    record and by the limit; and they sum to the time from first to last token. In a closed loop no more than
    two are in flight."""
    placement, coefficients, rows = random_case(seed, integers=False)
    network = Network(400.0, is_shared=bool(seed % 2))
    fleet = fleet_of(placement, coefficients, kv_tokens=160, network=network)
    routing = ("least-waiting", "jsq", "least-outstanding", "round-robin", "power-of-two")[seed % 5]
    fleet = replace(fleet, policies=replace(fleet.policies, routing=routing, decode_routing=routing))
    trace, limits = (
        trace_of(rows),
        (Limit("ttft", 0.9, 30.0), Limit("tbt", 0.9, 20.0), Limit("e2e", 0.9, 90.0)),
    )
    simulation = simulate(fleet, trace, limits=limits, record=True)
    assert (simulation.status == 0).all()
    assert simulate(fleet, trace, limits=limits).violations.tolist() == simulation.violations.tolist()
    inside, times = gaps_s(simulation)
    assert simulation.violations[1] == times[inside > 20.0].sum() and simulation.counted[1] == times.sum()
    gaps, times = gaps_s(replace(simulation, window_s=(-1.0, math.inf)))
    assert times.sum() == (trace.output_tokens - 1).sum()
    assert gaps @ times == pytest.approx((simulation.e2e_s - simulation.ttft_s).sum())
    assert simulation.worker_tokens.sum() == trace.input_tokens.sum() + (trace.output_tokens - 1).sum()
    closed = simulate(fleet, trace, closed_loop=2)
    start, end = closed.arrival_s, closed.arrival_s + closed.e2e_s
    assert all(((start <= t) & (end > t + 1e-9)).sum() <= 2 for t in start)


def test_a_run_that_must_fail_stops_early() -> None:
    """No request may take longer than 1; the first that does ends the run."""
    placement, coefficients, rows = random_case(3, integers=False)
    limits = (Limit("e2e", 1.0, 0.1),)
    fleet = fleet_of(placement, coefficients)
    assert not simulate(fleet, trace_of(rows), limits=limits, stop_early=True).complete


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"routing": "best-fit"},
            "policies.routing is 'best-fit', which needs step times of the planner's own",
        ),
        ({"pools": "flip"}, "policies.pools is 'flip', must be one of static with batching 'distserve'"),
        ({"admission": "reserve-static"}, "policies.admission is 'reserve-static', must be one of greedy"),
        ({"batching": "vllm-v1"}, "policies.routing is 'least-waiting', which needs batching 'distserve'"),
    ],
)
def test_what_the_ring_does_not_know_is_refused(changes: dict[str, Any], message: str) -> None:
    coefficients = Coefficients((1, 0, 0), 0, (1, 0, 0), (1, 0, 0), 95, 0, 0)
    fleet = fleet_of(Placement(1, 1, 1, 1, 100, 100), coefficients)
    with pytest.raises(InputError, match=message):
        simulate(replace(fleet, policies=replace(fleet.policies, **changes)), trace_of([(0, 1, 1)]))


@pytest.mark.shared
@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no shared data beside the checkout")
@pytest.mark.parametrize("name", CASES)
def test_every_request_ends_when_distserve_says(name: str) -> None:
    """All results of all requests, to 1e-9 s."""
    path = REFERENCE / f"{name}.json"
    case = peer.read_case(path, read_json(path))
    comparison = compare(peer.simulate_case(case), case.peer, peer.METRICS)
    assert max(comparison.largest.values()) < 1e-9
