"""DistServe's ring of ranks in the kernel: against the plain one, by hand, and what must hold for any."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from reference_distserve import Coefficients, DistServe, Placement
from reference_distserve import Request as Plain

from planner.domain import Fleet, Gpu, Limit, Llm, Network, Policies, Pool, Role, WorkerType
from planner.errors import InputError
from planner.models.forms import DistServeSteps
from planner.models.latency import StepLatency
from planner.simulator.metrics import gaps_s
from planner.simulator.replay import Simulation, simulate
from planner.traces import Trace

GPU = Gpu("paper", 1e3, 100.0, 1000.0, "wire", 10.0, 1.0, 8, 1.0, "paper", "paper")
# 16 bytes of KV per token, 256 per block
LLM = Llm("paper", layers=4, hidden=4, heads=2, kv_heads=1, head_dim=1, ffn=8, vocab=10, context_tokens=64)
ENDLESS = 10**9
POLICIES = Policies(batching="distserve", routing="least-waiting", decode_routing="least-waiting")
FREE = Network(math.inf, transfer="serialised", is_shared=False)


def trace_of(rows: list[tuple[float, int, int]]) -> Trace:
    """Rows of DistServe's: the prefill's token is not among its output tokens."""
    arrival_s, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    return Trace("made", arrival_s.astype(float), inputs.astype(np.int64), outputs.astype(np.int64) + 1)


def fleet_of(
    placement: Placement,
    coefficients: Coefficients,
    *,
    kv_tokens: int = ENDLESS,
    network: Network = FREE,
) -> Fleet:
    steps = DistServeSteps(
        coefficients.prefill, coefficients.decode_small, coefficients.decode_large, coefficients.threshold,
        coefficients.prefill_per_rank_ms, coefficients.overhead_ms, coefficients.overhead_ms_per_token,
    )  # fmt: skip

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
        int(rng.integers(1, 4)), pp, decode_instances, int(rng.choice([1, 2, 4])),
        int(rng.integers(40, 120)), int(rng.integers(70, 300)),
    )  # fmt: skip
    scale = 1.0 if integers else 0.1
    coefficients = Coefficients(
        (number(8), scale * number(3), scale * scale * number(2)), number(3),
        (1 + number(6), scale * number(2), number(3)), (1 + number(9), scale * number(2), number(2)),
        int(rng.integers(2, 6)), number(3), scale * number(1),
    )  # fmt: skip
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
@pytest.mark.parametrize("seed", range(120))
def test_the_kernel_equals_the_plain_ring(seed: int, integers: bool) -> None:
    """Every stamp of every request, to 1e-9 of a time unit, with ties and without."""
    placement, coefficients, rows = random_case(seed, integers=integers)
    plain = DistServe(placement, coefficients, [Plain(*row) for row in rows]).run().requests
    expected = [[r.prefill_start_ms, r.prefill_end_ms, r.finish_ms] for r in plain]
    simulation = simulate(fleet_of(placement, coefficients), trace_of(rows))
    assert stamps(simulation) == pytest.approx(np.array(expected).T, rel=1e-12, abs=1e-9)
