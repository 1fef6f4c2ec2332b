"""Data-parallel ranks: their step times, what bounds make of them, and the memory of each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shares import some

from planner.documents.catalog import read_catalog
from planner.errors import InputError
from planner.models.latency import StepLatency
from planner.models.memory import worker_memory
from planner.models.roofline import roofline

CATALOG = read_catalog()
MIXTURE, GPU = CATALOG.llm("qwen3-30b-a3b"), CATALOG.gpu("h100-80g")


def drawn(rng: np.random.Generator) -> StepLatency:
    """Ups and downs in the slopes of both parts: neither is convex."""
    knots = np.unique(rng.integers(1, 5000, 8)).astype(float)
    own, joint = (
        rng.uniform(0.001, 0.1) + np.concatenate(([0.0], np.cumsum(rng.exponential(0.01, len(knots) - 1))))
        for _ in range(2)
    )
    a, b, d, e, h, m = rng.uniform(0, 1e-3, 6) * rng.integers(0, 2, 6)
    return StepLatency(
        tuple(knots.tolist()),
        tuple((own + joint).tolist()),
        *(a, b, d, e, h, "drawn"),
        m_s=m,
        joint_s=tuple(joint.tolist()),
    )


@pytest.mark.parametrize("seed", some(range(40), 14))
def test_no_step_of_all_ranks_is_shorter_than_a_bound_takes_it_for(seed: int) -> None:
    """Random batches, some of them empty; the step as the kernel has it, by its formula."""
    rng = np.random.default_rng(seed)
    latency, dp = drawn(rng), int(rng.integers(2, 6))
    taken_for = latency.bound_over_ranks(dp)
    for _ in range(50):
        n = rng.integers(0, rng.choice([3, 50, 4000]), dp).astype(float) * (rng.uniform(size=dp) < 0.8)
        if not n.any():
            continue
        busy = n > 0
        pairs, decodes, kv_tokens, prefills = (rng.uniform(0, 100, dp) * busy for _ in range(4))
        own_s = latency.of_rank.step_s(n, pairs, decodes, kv_tokens, prefills)[busy]
        step_s = own_s.max() + latency.joint_experts_s(n.sum() + (~busy).sum())
        bound_s = taken_for.step_s(n.sum(), pairs.sum(), decodes.sum(), kv_tokens.sum(), prefills.sum())
        assert bound_s <= step_s * (1 + 1e-9)


def test_even_ranks_take_what_a_bound_takes_them_for() -> None:
    """f - g = 1 + N / 8, g = N / 4 seconds: two ranks of 4 tokens take 1.5 + 2."""
    latency = StepLatency(
        (1.0, 9.0), (1.375, 4.375), 0.0, 0.5, 0.0, 0.0, 0.0, "by hand", joint_s=(0.25, 2.25)
    )
    assert float(latency.bound_over_ranks(2).step_s(8.0)) == pytest.approx(3.5)
    assert float(latency.bound_over_ranks(2).step_s(8.0, decodes=8.0)) == pytest.approx(3.5 + 4 * 0.5)


def test_factors_move_both_parts() -> None:
    latency = drawn(np.random.default_rng(1))
    twice = latency.with_longer_steps(1.0)
    assert twice.joint_experts_s(77.0) == pytest.approx(2 * latency.joint_experts_s(77.0))
    slower = latency.scale_times(3.0, 2.0)
    joint_s = np.array(latency.joint_s)
    expected = 2 * joint_s[0] + 3 * (joint_s - joint_s[0])
    assert np.array(slower.joint_s) == pytest.approx(expected)


def test_what_the_digits_of_a_file_lose_does_not_grow_with_a_factor() -> None:
    """f - g falls by 1e-9 s of 1e-3, as rounded numbers do. Compute three times as long, the floor at a
    third: it would fall by 3e-9 of a third of that, and no scenario of a plan could be drawn.
    """
    f_s, joint_s = (0.002, 0.0022), (0.001, 0.001200001)
    latency = StepLatency((1.0, 9.0), f_s, 0.0, 0.0, 0.0, 0.0, 0.0, "by hand", joint_s=joint_s)
    slower = latency.scale_times(3.0, 1 / 3)
    assert slower.of_rank.f_s == pytest.approx((0.001 / 3, 0.001 / 3))
    assert slower.joint_s == pytest.approx((0.001 / 3, 0.001 / 3 + 3 * 0.000200001))


@pytest.mark.parametrize("dp", [2, 4])
def test_ranks_share_the_experts_weights_and_nothing_else(dp: int) -> None:
    """Of Qwen3-30B-A3B 128 experts of 3 x 2048 x 768 in 48 layers, 16 bits: 57.98 GB of its weights."""
    experts_bytes = 48 * 128 * 3 * 2048 * 768 * 2
    alone, each = worker_memory(MIXTURE, GPU, 1), worker_memory(MIXTURE, GPU, 1, dp=dp)
    assert alone.weight_bytes - each.weight_bytes == pytest.approx(experts_bytes * (1 - 1 / dp))
    assert each.kv_bytes_per_token == alone.kv_bytes_per_token == 2 * 48 * 4 * 128 * 2
    split = worker_memory(MIXTURE, GPU, 2, dp=dp)
    dense_bytes = MIXTURE.weight_bytes - experts_bytes
    assert split.weight_bytes == pytest.approx(dense_bytes / 2 + experts_bytes / (2 * dp))


def test_latent_keys_and_values_are_copied_by_tp_and_not_by_ranks() -> None:
    """DeepSeek-V3 on eight H200: a token costs a GPU as much whatever its TP, so eight ranks hold nearly as
    much each as all eight GPUs of TP 8 together: 7.7 times with DeepSeek-V4-Flash (vLLM issue 51454).
    """
    llm, gpu = CATALOG.llm("deepseek-v3"), CATALOG.gpu("b300-288g")
    tp, dp = worker_memory(llm, gpu, 8), worker_memory(llm, gpu, 1, dp=8, max_num_batched_tokens=2048)
    assert tp.kv_bytes_per_token == dp.kv_bytes_per_token == 61 * 576 * 2
    assert 6 < 8 * dp.kv_tokens / tp.kv_tokens < 8


def test_dense_llms_have_no_ranks() -> None:
    with pytest.raises(InputError, match="must be 1 without routed experts"):
        worker_memory(CATALOG.llm("llama-3.1-8b"), GPU, 1, dp=2)


def test_a_roofline_of_ranks_is_that_of_one_where_they_are_one() -> None:
    """And of two the experts' part takes half as long where weights are read, and their way to the GPUs."""
    one, two = roofline(MIXTURE, GPU, 1), roofline(MIXTURE, GPU, 1, dp=2)
    assert not one.joint_s
    assert float(two.of_rank.step_s(64)) < float(one.step_s(64))
    assert 0.4 < float(two.joint_experts_s(64) / (one.step_s(64) - two.of_rank.step_s(64))) < 1.0
    with pytest.raises(InputError, match="tensor parallelism is 16, must be 1 to 8"):
        roofline(MIXTURE, GPU, 16)


@pytest.mark.parametrize("gpu", ["h100-80g", "h200-141g", "b200-180g", "rtx-pro-6000"])
def test_shipped_fits_of_ranks_are_near_those_of_as_many_gpus(gpu: str) -> None:
    """A step of 64 decodes in all: two ranks of one GPU against TP 2 with whole experts, within a third: the
    same experts, twice the attention per GPU, another way to deal tokens out.
    """
    tp = CATALOG.step_latency(MIXTURE, CATALOG.gpu(gpu), 2, ep=True)
    dp = CATALOG.step_latency(MIXTURE, CATALOG.gpu(gpu), 1, dp=2)
    both_s = float(dp.of_rank.step_s(32, 0, 32, 32 * 1000) + dp.joint_experts_s(64))
    assert 0.67 < both_s / float(tp.step_s(64, 0, 64, 64 * 1000)) < 1.5


def test_a_latency_without_a_joint_part_is_all_a_ranks_own() -> None:
    latency = replace(drawn(np.random.default_rng(2)), joint_s=())
    assert latency.of_rank is latency
    assert float(latency.joint_experts_s(100.0)) == 0.0
