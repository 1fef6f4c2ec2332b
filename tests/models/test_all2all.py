"""Exchange on several nodes: the way to their experts, their memory, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.errors import InputError
from planner.models.all2all import (
    HIGH_THROUGHPUT,
    LOW_LATENCY,
    Exchange,
    all2all_of,
    all2all_s,
    nodes_of_ranks,
)
from planner.models.memory import worker_memory
from planner.models.roofline import roofline

CATALOG = read_catalog()
DEEPSEEK, H100 = CATALOG.llm("deepseek-v3"), CATALOG.gpu("h100-80g")
# microseconds there and back on 2, 4 and 8 nodes of H100: DeepEP's tables in aiconfigurator-core 0.12.0
MEASURED_LOW_US = {
    8: (59.83, 73.77, 78.03),
    64: (160.24, 234.60, 254.33),
    128: (288.27, 406.24, 471.50),
    256: (520.50, 764.67, 880.66),
}
MEASURED_HIGH_US = {
    64: (209.63, 324.47, 531.10),
    256: (373.00, 621.63, 1431.93),
    1024: (962.46, 1612.63, 5126.93),
    8192: (5719.63, 10658.86, 37667.00),
}


@pytest.mark.parametrize(
    ("kind", "measured_us", "mean_frac", "worst_frac"),
    [(LOW_LATENCY, MEASURED_LOW_US, 0.06, 0.16), (HIGH_THROUGHPUT, MEASURED_HIGH_US, 0.30, 0.55)],
)
def test_the_way_there_and_back_is_near_what_was_measured(
    kind: str, measured_us: dict[int, tuple[float, ...]], mean_frac: float, worst_frac: float
) -> None:
    assert kind in (LOW_LATENCY, HIGH_THROUGHPUT)
    of = LOW_LATENCY if kind == LOW_LATENCY else HIGH_THROUGHPUT
    errors = [
        abs(1e6 * float(all2all_s(DEEPSEEK, of, nodes, tokens, link_bytes_per_s=50e9)) / us - 1)
        for tokens, row in measured_us.items()
        for nodes, us in zip((2, 4, 8), row, strict=True)
    ]
    assert np.mean(errors) < mean_frac and max(errors) < worst_frac


def test_the_way_by_hand() -> None:
    """64 tokens of 7168 values in 1 + 2 bytes: 1,376,256 bytes. Low latency, 2 nodes: half of 8 copies leave
    the node, 5,505,024 bytes at 0.92 x 50 GB/s are 119.67 us; 40 + 5 more. High throughput: 1 - 1/256 of a
    copy at 0.64 x 50 GB/s, 42.84 us, and 85 + 60.
    """
    low, high = (
        1e6 * float(all2all_s(DEEPSEEK, kind, 2, 64, link_bytes_per_s=50e9))
        for kind in (LOW_LATENCY, HIGH_THROUGHPUT)
    )
    assert low == pytest.approx(45 + 119.6744, abs=1e-3)
    assert high == pytest.approx(145 + 42.8400, abs=1e-3)
    half = float(all2all_s(DEEPSEEK, LOW_LATENCY, 2, 64, link_bytes_per_s=25e9))
    assert 1e6 * half == pytest.approx(45 + 2 * 119.6744, abs=1e-3)


def test_weights_of_a_rank_by_hand() -> None:
    """Of DeepSeek-V3's 671.03 billion weights 653.75 are routed experts (58 layers x 256 x 3 x 7168 x 2048),
    in 8 bits with a scale per block; 16 ranks hold 16 of the 256 each, 32 hold 8.
    """
    experts = 58 * 256 * 3 * 7168 * 2048
    one, sixteen, thirty_two = (
        worker_memory(DEEPSEEK, H100, 1, dp=dp, max_num_batched_tokens=256).weight_bytes for dp in (1, 16, 32)
    )
    experts_bytes = experts * DEEPSEEK.bytes_per_weight("fp8-block")
    assert one - sixteen == pytest.approx(experts_bytes * 15 / 16)
    assert sixteen - thirty_two == pytest.approx(experts_bytes / 32)


def test_room_for_low_latency_by_hand() -> None:
    """256 tokens of each rank for each of 256 experts: 65,536 rows. Sent and received twice, 14,352 bytes
    each: 3.76 GB; input, gate, up, product and output of the GPU's experts, 20,480 values: 2.68 GB; DeepEP's
    1 GiB; and 256 tokens of the residual stream and its norm.
    """
    use = worker_memory(DEEPSEEK, H100, 1, dp=16, max_num_batched_tokens=256)
    by_hand = 65536 * 4 * 14352 + 65536 * 20480 * 2 + 2**30 + 256 * 2 * 7168 * 2
    assert use.activation_bytes == pytest.approx(by_hand)


def test_more_nodes_leave_more_room_and_take_longer_to_cross() -> None:
    kv_tokens = [
        worker_memory(DEEPSEEK, H100, 1, dp=dp, max_num_batched_tokens=256).kv_tokens for dp in (16, 32, 64)
    ]
    assert kv_tokens[0] > 0 and kv_tokens == sorted(kv_tokens)
    way_s = [
        float(all2all_s(DEEPSEEK, LOW_LATENCY, nodes, 100, link_bytes_per_s=50e9)) for nodes in (2, 4, 8)
    ]
    assert way_s == sorted(way_s)


def test_a_slower_link_between_nodes_makes_steps_longer_and_no_fit_is_taken() -> None:
    measured = CATALOG.step_latency(DEEPSEEK, H100, 1, dp=16, exchange=Exchange(LOW_LATENCY))
    assert measured.kind == "kernels"
    slow = CATALOG.step_latency(DEEPSEEK, H100, 1, dp=16, exchange=Exchange(LOW_LATENCY, 12.5e9))
    fast = roofline(DEEPSEEK, H100, 1, dp=16, exchange=Exchange(LOW_LATENCY))
    assert slow.kind == "roofline" and "12.5 GB/s" in slow.basis
    assert float(slow.joint_experts_s(1024)) > 1.5 * float(fast.joint_experts_s(1024))
    assert float(fast.joint_experts_s(1024)) == pytest.approx(float(measured.joint_experts_s(1024)), rel=0.35)


@pytest.mark.parametrize(
    ("gpu", "tp", "dp", "words"),
    [
        ("l40s-48g", 1, 16, "needs NVLink, and l40s-48g has PCIe"),
        ("mi300x-192g", 1, 16, "needs NVLink"),
        ("h100-80g", 1, 12, "12 GPUs, must be whole nodes of 8"),
        ("h100-80g", 3, 8, "24 GPUs, must be whole nodes of 8, each rank on one of them"),
        ("h100-80g", 8, 16, "128 GPUs, at most 8 nodes of 8 are modelled"),
        ("h100-80g", 1, 24, "24 GPUs must divide the 256 experts"),
    ],
)
def test_what_cannot_be_dealt_out_to_nodes_is_one_line(gpu: str, tp: int, dp: int, words: str) -> None:
    with pytest.raises(InputError, match=words) as refusal:
        nodes_of_ranks(DEEPSEEK, CATALOG.gpu(gpu), tp, dp)
    assert "\n" not in str(refusal.value)


def test_one_node_has_no_way_between_nodes() -> None:
    assert nodes_of_ranks(DEEPSEEK, CATALOG.gpu("l40s-48g"), 1, 8) == 1
    assert all2all_of(8, 8, 2048) == ""
    assert [all2all_of(16, 8, n) for n in (256, 257)] == [LOW_LATENCY, HIGH_THROUGHPUT]


def test_experts_in_16_bits_send_one_byte_more_each_way() -> None:
    mixture = CATALOG.llm("qwen3-30b-a3b")
    eight = replace(mixture, dtype_bytes=1.0, weights="fp8-block")
    sent = [
        float(all2all_s(llm, LOW_LATENCY, 2, 1000, link_bytes_per_s=50e9)) - 45e-6 for llm in (mixture, eight)
    ]
    assert sent[0] / sent[1] == pytest.approx(4 / 3)
