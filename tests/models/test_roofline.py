"""The roofline by hand, and its shape."""

import dataclasses

import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.domain import Gpu
from planner.errors import InputError
from planner.models.llm import WEIGHT_BYTES, FeedForward, GroupedAttention, LatentAttention, LayerGroup, Llm
from planner.models.roofline import roofline, transfer_fit
from planner.models.roofline_calibration import Efficiency, calibration_of, flops_rate

# 100 bytes/s, 1000 FLOPs/s, 10 bytes/s between GPUs: small enough for a sheet of paper.
LLM = Llm("paper", layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, ffn=8, vocab=10, context_tokens=64)
GPU = Gpu("paper", 1e3, 100.0, 1000.0, "wire", 10.0, 1.0, 8, 1.0, "paper", "paper")
PEAK = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, overlap=1.0, layer_s=0.0, all_reduce_s=0.0)
LLAMA_70B = Llm("70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072)
H100 = Gpu("h100", 80 * 2.0**30, 3.35e12, 989e12, "NVLink 4", 450e9, 700, 8, 1.0, "h100", "h100")


def test_one_gpu_by_hand() -> None:
    """Parameters: attention 4*2*(4+2) = 48, feed-forward 3*4*8 = 96, head 40. A step of 1 token reads 184 * 2
    bytes in 3.68 s, computes 2*144 FLOPs in 0.288 s, moves (8*4 + 3*8) * 2 bytes of activations in 1.12 s."""
    latency = roofline(LLM, GPU, 1, efficiency=PEAK)
    assert latency.step_s(1) == pytest.approx(3.68 + 0.288 + 1.12)
    assert latency.step_s(16) == pytest.approx(3.68 + 16 * (0.288 + 1.12))
    assert latency.a_s == pytest.approx(4 * 2 * 2 / 1000)  # one pair: 4 FLOPs for each of 2 heads of 2
    assert latency.d_s == pytest.approx(2 * 2 * 2 / 100)  # one token: key and value, 1 head of 2, 2 bytes
    assert latency.b_s == latency.e_s == pytest.approx(2 * 40 / 1000)
    assert latency.basis == "roofline (no measurement)"
    assert latency.mape_frac is None


def test_two_gpus_halve_the_work_and_pay_the_ring() -> None:
    """Half of 3.968 s; activations (8*4 + 12) * 2 / 100; two all-reduces of 2*(1/2)*4*2 bytes at 10 bytes/s.
    One KV head cannot be split: reading it stays as slow as on one GPU."""
    latency = roofline(LLM, GPU, 2, efficiency=PEAK)
    assert latency.step_s(1) == pytest.approx(3.968 / 2 + 0.88 + 2 * 8 / 10)
    assert latency.d_s == roofline(LLM, GPU, 1, efficiency=PEAK).d_s
    late = roofline(LLM, GPU, 2, efficiency=dataclasses.replace(PEAK, all_reduce_s=3.0, layer_s=0.5))
    assert late.step_s(1) - latency.step_s(1) == pytest.approx(2 * 3.0 + 0.5)


def test_sparse_latent_attention_computes_64_heads_and_its_index_on_every_gpu() -> None:
    """GLM-5 on 8 Hopper GPUs: a token attends to 2048 latent vectors with 64 heads a GPU, though each has 8,
    2 (512 + 64 + 512) FLOPs a pair; 2 x 32 x 128 of the index for every pair. Both on every GPU.
    """
    llm = read_catalog().llm("zai-org/GLM-5-FP8")
    attention = llm.layer_groups[0].attention
    assert isinstance(attention, LatentAttention)
    dense = dataclasses.replace(attention, index_tokens=0)
    groups = tuple(dataclasses.replace(group, attention=dense) for group in llm.layer_groups)
    sparse, whole = (
        roofline(each, H100, 8, efficiency=PEAK) for each in (llm, dataclasses.replace(llm, groups=groups))
    )
    chosen_s = 78 * 64 * 2048 * 2 * (2 * 512 + 64) / 989e12
    assert sparse.step_s(4096) - whole.step_s(4096) == pytest.approx(4096 * chosen_s)
    assert sparse.a_s == pytest.approx(78 * 2 * 32 * 128 / 989e12)
    assert whole.a_s == pytest.approx(78 * 2 * 64 * (192 + 64 + 256) / 8 / 989e12)


def test_overlap_takes_the_longer_of_reading_and_computing() -> None:
    """With p = 20 a step of 1 token is bound by 3.68 s of reading, one of 1024 by 294.912 s of computing."""
    latency = roofline(LLM, GPU, 1, efficiency=dataclasses.replace(PEAK, overlap=20.0))
    assert latency.step_s(1) == pytest.approx(3.68 + 1.12)
    assert latency.step_s(1024) == pytest.approx(294.912 + 1024 * 1.12)


def test_a_mixture_reads_the_experts_its_tokens_touch() -> None:
    """4 experts, 1 per token: 1 token reads 1, 2 tokens 4*(1 - 0.75^2) = 1.75, many all 4."""
    mixture = dataclasses.replace(LLM, experts=4, experts_per_token=1)
    dense, moe = (roofline(llm, GPU, 1, efficiency=PEAK) for llm in (LLM, mixture))
    assert moe.step_s(1) == pytest.approx(dense.step_s(1))
    assert moe.step_s(2) - dense.step_s(2) == pytest.approx(0.75 * 96 * 2 / 100)
    assert moe.step_s(1024) - dense.step_s(1024) == pytest.approx(3 * 96 * 2 / 100)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_larger_step_is_never_faster(tp: int) -> None:
    f_s = roofline(LLAMA_70B, H100, tp).step_s(np.arange(1.0, 20000.0, 7.0))
    assert (np.diff(f_s) > 0).all()


def test_close_to_aiconfigurator_where_it_is_known() -> None:
    """Llama-3.1-70B on 4 H100, AIConfigurator 0.12: prefill of 1024 67.4 ms, 64 decodes at 2048 20.7 ms,
    these with a chunk of 512 46.5 ms. Within 20 %, the worst regime of the calibration (docs/models.md)."""
    latency = roofline(LLAMA_70B, H100, 4)
    assert latency.step_s(1024, 1024 * 1025 / 2, prefills=1) == pytest.approx(0.0674, rel=0.2)
    assert latency.step_s(64, 0, 64, 64 * 2048) == pytest.approx(0.0207, rel=0.2)
    assert latency.step_s(512 + 64, 512 * 513 / 2, 64, 64 * 2048, 1) == pytest.approx(0.0465, rel=0.2)


def test_tp_stays_inside_a_node() -> None:
    with pytest.raises(InputError, match="must be 1 to 8"):
        roofline(LLM, GPU, 16)


def test_a_fit_carried_over_to_its_own_gpu_stays_itself() -> None:
    ours = roofline(LLAMA_70B, H100, 8)
    fit = dataclasses.replace(ours, f_s=tuple(0.01 + 2 * f for f in ours.f_s), a_s=3.0, basis="measured")
    moved = transfer_fit(fit, ours, ours, basis="derived")
    assert moved.f_s == pytest.approx(fit.f_s)
    assert (moved.a_s, moved.basis, moved.mape_frac) == (3.0, "derived", None)


def test_a_faster_memory_shortens_the_floor_and_the_kv_reads_alone() -> None:
    """Twice the bandwidth: the host's 10 ms on top of a step stay, d halves, a stays."""
    faster = dataclasses.replace(H100, bandwidth_bytes_per_s=2 * 3.35e12)
    slow, fast = roofline(LLAMA_70B, H100, 8), roofline(LLAMA_70B, faster, 8)
    fit = dataclasses.replace(slow, f_s=tuple(0.010 + f for f in slow.f_s))
    moved = transfer_fit(fit, slow, fast, basis="derived")
    assert moved.f_s == pytest.approx([0.010 + f for f in fast.f_s])
    assert (moved.a_s, moved.d_s) == pytest.approx((fit.a_s, fit.d_s / 2))


def test_fp8_weights_are_read_by_the_byte_and_multiplied_at_the_fp8_rate() -> None:
    """Twice the FLOP rate: 144 bytes of a layer and 80 of the head in 2.24 s, 0.144 s of computing; on a GPU
    without fp8 units 0.288 s. Attention and the head stay in 16 bits."""
    fp8 = dataclasses.replace(LLM, dtype_bytes=1.0, weights="fp8")
    with_units = dataclasses.replace(GPU, fp8_flops_per_s=2000.0)
    latency = roofline(fp8, with_units, 1, efficiency=PEAK)
    assert latency.step_s(1) == pytest.approx(2.24 + 0.144 + 1.12)
    assert roofline(fp8, GPU, 1, efficiency=PEAK).step_s(1) == pytest.approx(2.24 + 0.288 + 1.12)
    assert latency.a_s == roofline(LLM, GPU, 1, efficiency=PEAK).a_s
    assert latency.b_s == roofline(LLM, GPU, 1, efficiency=PEAK).b_s


def test_weights_that_alone_have_8_bits_are_multiplied_in_16() -> None:
    """GPTQ in 8 bits, which was taken for twice as fast as 16 bits where a GPU has fp8 units."""
    with_units = dataclasses.replace(H100, fp8_flops_per_s=2000e12)
    alone = dataclasses.replace(LLAMA_70B, weights="int8-g128", dtype_bytes=WEIGHT_BYTES["int8-g128"])
    both = dataclasses.replace(LLAMA_70B, weights="int8", dtype_bytes=1.0)
    assert flops_rate("int8-g128", with_units) == H100.dense_flops_per_s < flops_rate("int8", with_units)
    assert calibration_of(alone, with_units) == calibration_of(LLAMA_70B, with_units)
    assert roofline(alone, with_units, 4).step_s(8192) > 1.2 * roofline(both, with_units, 4).step_s(8192)


@pytest.mark.parametrize(("window", "b_s", "d_s"), [(None, 0.0, 0.08), (8192, 0.0, 0.08), (128, 10.24, 0.0)])
def test_a_window_that_few_requests_fill_reads_all_tokens(window: int | None, b_s: float, d_s: float) -> None:
    """A token's key and value have 8 bytes of 100 a second, and 128 of them are 10.24 s for each sequence.
    Llama 4's chunks of 8192 tokens were taken for full, whatever a request has.
    """
    attention = GroupedAttention(LLM.heads, LLM.kv_heads, LLM.head_dim, LLM.head_dim, window)
    llm = dataclasses.replace(LLM, groups=(LayerGroup(1, attention, FeedForward(LLM.ffn)),))
    latency = roofline(llm, GPU, 1, efficiency=PEAK)
    assert latency.d_s == pytest.approx(d_s)
    assert latency.b_s - latency.e_s == pytest.approx(b_s)


def in_4_bits(weights: str) -> Llm:
    """The LLM of the head of this file with its feed-forward block in another format."""
    attention = GroupedAttention(LLM.heads, LLM.kv_heads, LLM.head_dim, LLM.head_dim)
    groups = (LayerGroup(1, attention, FeedForward(LLM.ffn, weights=weights)),)
    return dataclasses.replace(LLM, groups=groups, weights=weights)


def test_each_part_is_read_and_multiplied_in_its_own_format() -> None:
    """nvfp4: 48 and 40 parameters of 2 bytes and 96 of 4.5 bits are 230 bytes in 2.30 s; 48 are multiplied at
    1000 FLOP/s, 96 at 4000: 0.096 + 0.048 s. mxfp4: 96 of 4.25 bits are 51 bytes, and all are multiplied at
    1000 FLOP/s in 0.288 s; so is nvfp4 where there is no rate of 4 bits.
    """
    with_units = dataclasses.replace(GPU, fp4_flops_per_s=4000.0)
    four, micro = in_4_bits("nvfp4"), in_4_bits("mxfp4")
    assert roofline(four, with_units, 1, efficiency=PEAK).step_s(1) == pytest.approx(2.30 + 0.144 + 1.12)
    assert roofline(four, GPU, 1, efficiency=PEAK).step_s(1) == pytest.approx(2.30 + 0.288 + 1.12)
    assert roofline(micro, with_units, 1, efficiency=PEAK).step_s(1) == pytest.approx(2.27 + 0.288 + 1.12)


def test_4_bits_have_a_class_by_how_they_are_multiplied() -> None:
    with_units = dataclasses.replace(H100, fp4_flops_per_s=4000e12)
    four, micro = in_4_bits("nvfp4"), in_4_bits("mxfp4")
    assert calibration_of(four, H100) == calibration_of(micro, H100) == calibration_of(micro, with_units)
    assert calibration_of(four, with_units) != calibration_of(four, H100) != calibration_of(LLAMA_70B, H100)
    assert "where kernels were measured one is off by" in roofline(micro, H100, 1).basis


def test_a_gpu_as_fast_in_16_bits_as_in_8_multiplies_fp8_weights_in_8() -> None:
    """Gaudi 3: 1835 TFLOP/s of both. Its fp8 weights had the shares of the peak that 16 bits reach."""
    even = dataclasses.replace(H100, fp8_flops_per_s=H100.dense_flops_per_s)
    fp8 = dataclasses.replace(LLAMA_70B, weights="fp8")
    assert calibration_of(fp8, even) == calibration_of(fp8, dataclasses.replace(H100, fp8_flops_per_s=2e15))
    assert calibration_of(fp8, even) != calibration_of(LLAMA_70B, even)


def test_experts_have_efficiencies_of_their_own() -> None:
    """Half the bandwidth doubles the 96 * 2 bytes of the one expert that a token visits; a fixed 0.5 s; one
    vector of 4 numbers of 2 bytes at 100 bytes/s."""
    mixture = dataclasses.replace(LLM, experts=4, experts_per_token=1)
    plain = roofline(mixture, GPU, 1, efficiency=PEAK).step_s(1)
    half = dataclasses.replace(PEAK, expert_bandwidth_frac=0.5)
    assert roofline(mixture, GPU, 1, efficiency=half).step_s(1) - plain == pytest.approx(96 * 2 / 100)
    fixed = dataclasses.replace(PEAK, expert_layer_s=0.5, expert_activations=1.0)
    assert roofline(mixture, GPU, 1, efficiency=fixed).step_s(1) - plain == pytest.approx(0.5 + 0.08)
    assert roofline(LLM, GPU, 1, efficiency=fixed) == roofline(LLM, GPU, 1, efficiency=PEAK)


def test_a_roofline_states_the_error_of_its_class() -> None:
    """Of the format in which the GPU multiplies: A100 has no fp8 units."""
    fp8 = dataclasses.replace(LLAMA_70B, dtype_bytes=1.0, weights="fp8-block")
    with_units = dataclasses.replace(H100, fp8_flops_per_s=1979e12)
    assert calibration_of(fp8, H100) == calibration_of(LLAMA_70B, H100) != calibration_of(fp8, with_units)
    known = calibration_of(LLAMA_70B, H100)
    off = [100 * errors["dense"] for errors in (known.prefill_mape_frac, known.decode_mape_frac)]
    assert roofline(LLAMA_70B, H100, 4).basis == (
        "roofline (no measurement); where kernels were measured one is off by "
        f"{off[0]:.0f} % in prefills and {off[1]:.0f} % in decodes"
    )


@pytest.mark.parametrize("weights", ["bf16", "fp8", "fp8-block"])
@pytest.mark.parametrize("experts", [1, 64])
def test_more_tokens_never_take_less(weights: str, experts: int) -> None:
    llm = dataclasses.replace(LLAMA_70B, weights=weights, experts=experts, experts_per_token=min(experts, 4))
    gpu = dataclasses.replace(H100, fp8_flops_per_s=1979e12)
    f_s = roofline(llm, gpu, 4).step_s(np.arange(1.0, 40000.0, 13.0))
    assert (np.diff(f_s) > 0).all()
