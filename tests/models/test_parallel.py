"""Tensor and pipeline parallelism on a sheet of paper."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from planner.domain import AllReduce, Gpu
from planner.errors import CatalogError, InputError
from planner.models.latency import StepLatency
from planner.models.llm import FeedForward, GroupedAttention, LayerGroup, Llm
from planner.models.parallelism import (
    LINK_FRAC,
    SEND_RECV_S,
    add_pipeline,
    all_reduce_s,
    mixed_kv_s,
    send_recv_s,
    tp_s,
)
from planner.models.roofline import roofline
from planner.models.roofline_calibration import calibration_of

LLM = Llm("paper", layers=4, hidden=4, heads=4, kv_heads=2, head_dim=1, ffn=8, vocab=10, context_tokens=64)
GPU = Gpu("paper", 1e3, 100.0, 1000.0, "wire", 10.0, 1.0, 8, 1.0, "paper", "paper")
STEP = StepLatency((1.0, 8.0, 64.0), (1.0, 2.0, 9.0), 0.1, 0.2, 0.3, 0.4, 0.5, "by hand", 0.01)
LLAMA_70B = Llm("70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072)
H100 = Gpu("h100", 80 * 2.0**30, 3.35e12, 989e12, "NVLink 4", 450e9, 700, 8, 1.0, "h100", "h100")


@pytest.mark.parametrize(("tp", "seconds"), [(1, 0.0), (2, 11.0), (4, 16.0)])
def test_all_reduce_by_hand(tp: int, seconds: float) -> None:
    """100 bytes at 10 bytes/s and 1 s per call, 2 * (tp-1)/tp of the bytes."""
    assert all_reduce_s(100.0, tp, 10.0, latency_s=1.0) == pytest.approx(seconds)


def test_a_step_has_two_all_reduces_per_layer() -> None:
    """4 layers, 3 tokens of 4 numbers of 2 bytes over 2 GPUs: 8 * (1 s + 24 bytes / 10 bytes/s)."""
    assert tp_s(LLM, GPU, 2, 3, link_frac=1.0, latency_s=1.0) == pytest.approx(8 * (1 + 2.4))
    assert tp_s(LLM, GPU, 1, 3) == 0.0


def test_what_was_measured_comes_before_the_link() -> None:
    """2 GPUs: 8 * (0.5 s + 24 bytes / 5 bytes/s), whatever the link; 4 GPUs were not measured."""
    measured = dataclasses.replace(GPU, all_reduce=(AllReduce(2, 0.5, 5.0),))
    assert tp_s(LLM, measured, 2, 3, link_frac=1.0, latency_s=9.0) == pytest.approx(8 * (0.5 + 4.8))
    assert tp_s(LLM, measured, 4, 3) == tp_s(LLM, GPU, 4, 3)
    with pytest.raises(CatalogError, match="expected two or more"):
        AllReduce(1, 0.5, 5.0)


def test_beside_prefills_kv_is_read_once_per_query_head() -> None:
    """4 layers, key and value of 1 number of 2 bytes for each of 4 heads, split over 2 GPUs: 32 bytes at 10
    bytes/s. Alone decodes read it once per KV head, 16 bytes.
    """
    assert mixed_kv_s(LLM, GPU, 2) == 0.0
    fused = dataclasses.replace(GPU, mixed_kv_bytes_per_s=10.0)
    assert mixed_kv_s(LLM, fused, 2) == pytest.approx(3.2)
    latency = roofline(LLM, fused, 2)
    assert latency.d_s + latency.m_s == pytest.approx(3.2)
    assert roofline(LLM, dataclasses.replace(GPU, mixed_kv_bytes_per_s=1e6), 2).m_s == 0.0
    assert roofline(LLM, GPU, 2).m_s == 0.0


def test_layers_with_a_window_read_little_of_it() -> None:
    """Of 4 layers 3 have a window and one has not: a quarter of the 32 bytes at 10 bytes/s."""
    fused = dataclasses.replace(GPU, mixed_kv_bytes_per_s=10.0)
    full = GroupedAttention(LLM.heads, LLM.kv_heads, LLM.head_dim, LLM.head_dim)
    windowed = dataclasses.replace(full, window_tokens=16)
    block = FeedForward(LLM.ffn, LLM.gated_ffn)
    groups = LayerGroup(1, full, block), LayerGroup(3, windowed, block)
    assert mixed_kv_s(dataclasses.replace(LLM, groups=groups), fused, 2) == pytest.approx(0.8)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_roofline_holds_this_term(tp: int) -> None:
    """A link without end and calls without latency take it, and nothing else, from the roofline."""
    free = dataclasses.replace(H100, link_bytes_per_s=1e300)
    alone = roofline(
        LLAMA_70B,
        free,
        tp,
        efficiency=dataclasses.replace(calibration_of(LLAMA_70B, H100).efficiency, all_reduce_s=0.0),
    )
    tokens = np.array([1.0, 512.0, 8192.0])
    apart_s = roofline(LLAMA_70B, H100, tp).step_s(tokens) - alone.step_s(tokens)
    assert apart_s == pytest.approx(tp_s(LLAMA_70B, H100, tp, tokens))


def test_send_recv_by_hand() -> None:
    """3 tokens, hidden and residual of 4 numbers, 2 bytes: 48. Two GPUs send 24 each over 5 bytes/s, and the
    next two gather the other 24 over their own 10; of either speed LINK_FRAC is reached."""
    assert send_recv_s(LLM, GPU, 1, 3) == pytest.approx(SEND_RECV_S + 4.8 / LINK_FRAC)
    assert send_recv_s(LLM, GPU, 2, 3, link_bytes_per_s=5.0) == pytest.approx(
        SEND_RECV_S + (4.8 + 2.4) / LINK_FRAC
    )


def test_a_micro_batch_takes_its_step_and_the_hand_overs() -> None:
    """3 hand-overs between 4 stages, at the knots, between and beyond them; the other terms stay."""
    latency = add_pipeline(STEP, LLM, GPU, 2, 4)
    tokens = np.array([1.0, 5.0, 8.0, 64.0, 200.0])
    assert latency.step_s(tokens, 7.0, 2.0, 9.0, 1.0) == pytest.approx(
        STEP.step_s(tokens, 7.0, 2.0, 9.0, 1.0) + 3 * send_recv_s(LLM, GPU, 2, tokens)
    )
    assert latency.mape_frac is None and "3 hand-overs between 4 stages" in latency.basis
    assert add_pipeline(STEP, LLM, GPU, 2, 1) is STEP


def test_a_pipeline_of_two_does_not_halve_the_step() -> None:
    """Llama-3.1-70B, 2048 tokens, TP 4: a hand-over is 67 MB, well below a hundredth of the step."""
    alone, piped = (
        roofline(LLAMA_70B, H100, 4),
        add_pipeline(roofline(LLAMA_70B, H100, 4), LLAMA_70B, H100, 4, 2),
    )
    assert 1.0 < piped.step_s(2048) / alone.step_s(2048) < 1.01


@pytest.mark.parametrize("pp", [0, 5])
def test_more_stages_than_layers_are_refused(pp: int) -> None:
    with pytest.raises(InputError, match=r"must be 1 to 4 \(layers\)"):
        add_pipeline(STEP, LLM, GPU, 1, pp)


def test_a_hand_over_costs_its_latency_however_small() -> None:
    assert send_recv_s(LLAMA_70B, H100, 1, 0) == SEND_RECV_S
