"""What a pool uses of its GPUs: by hand, and against what the kernel and the power model count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.fleet import Fleet, Network, Policies, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.simulator import simulate
from planner.simulator.utilisation import pool_uses
from planner.traffic.trace import Trace

CATALOG = read_catalog()
LLM, GPU = CATALOG.llm("meta-llama/Llama-3.1-8B"), CATALOG.gpu("h100-80g")
STEADY = StepLatency((1.0, 4096.0), (0.01, 0.01), 0, 0, 0, 0, 0, "10 ms whatever is in a step")
KIND = WorkerType(GPU, 1, STEADY, 1600, 2048, 64)


def at_once(inputs: list[int], outputs: list[int]) -> Trace:
    return Trace("at once", np.zeros(len(inputs)), np.array(inputs), np.array(outputs))


def test_use_by_hand() -> None:
    """Two prompts of 100 in one step, 3 and 11 tokens out of it: 10 more steps, two of them with both, of
    110 ms in all. 200 + 2 x 2 + 8 tokens went through; both hold 7 blocks of 100, and one an eighth nothing
    of it: 14 while both run. A step has (2 x 2 + 8) / 11 decodes."""
    (use,) = pool_uses(
        Fleet(LLM, (Pool("m", "mixed", KIND, 1),)),
        simulate(Fleet(LLM, (Pool("m", "mixed", KIND, 1),)), at_once([100, 100], [3, 11]), record=True),
    )
    assert use.busy_frac == pytest.approx(1)
    flops = 2 * LLM.active_parameters * (200 + 2 * 2 + 8)
    assert use.mfu_frac == pytest.approx(flops / 0.11 / GPU.dense_flops_per_s)
    assert use.kv_most_frac == pytest.approx(0.14)
    assert use.decodes_mean == pytest.approx(12 / 11) and use.decodes_p99 == use.decodes_most == 2
    assert use.tokens_mean == pytest.approx(212 / 11)
    weights_frac = 11 * LLM.weight_bytes / 0.11 / GPU.bandwidth_bytes_per_s  # the embedding is not read whole
    assert 0.9 * weights_frac < use.bandwidth_frac < weights_frac


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_flops_are_those_of_all_tokens(tp: int, pp: int, dp: int) -> None:
    """Whatever the parallelism: 2 per parameter and token that the kernel counts, of all GPUs' peak."""
    latency = replace(STEADY, joint_s=(0.0, 0.0)) if dp > 1 else STEADY
    kind = replace(KIND, latency=latency, tp=tp, pp=pp, dp=dp, kv_tokens=16_000)
    rng = np.random.default_rng(1)
    fleet = Fleet(LLM, (Pool("m", "mixed", kind, 2),))
    trace = at_once(rng.integers(10, 400, 60).tolist(), rng.integers(1, 80, 60).tolist())
    simulation = simulate(fleet, trace, record=True)
    (use,) = pool_uses(fleet, simulation)
    flops = 2 * LLM.active_parameters * simulation.worker_tokens.sum()
    peak = GPU.dense_flops_per_s * 2 * kind.gpus * simulation.end_s
    assert use.mfu_frac == pytest.approx(flops / peak)
    assert 0 < use.busy_frac <= 1 + 1e-9


def test_pools_are_told_apart() -> None:
    """Decode workers have no prompts, prefill workers no decodes; nothing without a record of steps."""
    kind = replace(KIND, kv_tokens=16_000)
    pools = (Pool("p", "prefill", kind, 1), Pool("d", "decode", kind, 2))
    fleet = Fleet(LLM, pools, Policies(), Network(1e12))
    trace = at_once([300] * 20, [30] * 20)
    prefill, decode = pool_uses(fleet, simulate(fleet, trace, record=True))
    assert (prefill.pool, prefill.decodes_most, prefill.workers) == ("p", 0, 1)
    assert prefill.tokens_mean > 300 and decode.tokens_mean == pytest.approx(decode.decodes_mean)
    assert pool_uses(fleet, simulate(fleet, trace)) == ()
