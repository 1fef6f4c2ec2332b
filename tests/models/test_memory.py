"""KV tokens of a worker, by hand and against what vLLM logged."""

import dataclasses

import numpy as np
import pytest

from benchmarks.kv_capacity import BOUND_FRAC, LoggedCache, read_logs
from planner.documents.catalog import read_catalog
from planner.domain import Gpu
from planner.errors import CatalogError, InputError
from planner.models.llm import Llm
from planner.models.memory import (
    DRIVER_BYTES,
    FIRST_WITH_GRAPHS,
    GRAPH_BYTES,
    NON_TORCH_BYTES,
    OTHER_GROUP_BYTES,
    MemorySettings,
    active_weight_bytes,
    fits_memory,
    stage_layers,
    stage_memory,
    worker_memory,
)

GIB = 2**30
SMALL = Llm(
    "small", layers=2, hidden=64, heads=8, kv_heads=2, head_dim=8, ffn=128, vocab=1000, context_tokens=512
)
HALF = MemorySettings(gpu_memory_utilization=0.5)
LLAMA_70B = Llm("70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072)
LLAMA_8B = Llm("8B", 32, 4096, 32, 8, 128, 14336, 128256, 131072)
QWEN_32B = Llm("32B", 64, 5120, 64, 8, 128, 25600, 151936, 40960)


def card(memory_bytes: float) -> Gpu:
    return Gpu("card", memory_bytes, 2e12, 3e14, "NVLink", 3e11, 400, 8, 1.0, "card", "card")


def test_breakdown_by_hand() -> None:
    """Two GPUs. Weights: attention 64*8*(16+4) = 10240 and feed-forward 3*64*128 = 24576 in two layers,
    128000 embeddings: 197632 parameters of 2 bytes, halved. Activations of 100 tokens: 2*64 + 3*128/2 = 320
    wide, 2 bytes, 64,000; less than the sampler's, 64 wide and 10*1000 logits of 14. A token's KV: 2 * 2
    layers * 2 heads * 8 * 2 bytes = 128, halved."""
    m = worker_memory(SMALL, card(10 * GIB), 2, settings=HALF, max_num_batched_tokens=100, max_num_seqs=10)
    assert m.budget_bytes == 5 * GIB
    assert m.weight_bytes == 197632
    assert m.activation_bytes == 100 * 64 * 2 + 140_000
    reserve_bytes = 0.5 * DRIVER_BYTES + NON_TORCH_BYTES + OTHER_GROUP_BYTES + 2 * GRAPH_BYTES["dense"]
    assert m.reserve_bytes == reserve_bytes
    assert m.kv_bytes_per_token == 64
    assert m.kv_bytes == 5 * GIB - 197632 - 152_800 - reserve_bytes
    assert m.kv_tokens == m.kv_bytes // 64 // 16 * 16


def test_kv_heads_are_copied_once_tp_exceeds_them() -> None:
    """2 KV heads on 8 GPUs: each holds one, half a token's KV, as on 2 GPUs."""
    assert (
        worker_memory(SMALL, card(10 * GIB), 8).kv_bytes_per_token
        == worker_memory(SMALL, card(10 * GIB), 2).kv_bytes_per_token
    )
    assert worker_memory(SMALL, card(10 * GIB), 1).kv_bytes_per_token == 128


def test_weights_that_do_not_fit_leave_no_kv() -> None:
    """141 GB of weights on one GPU of 80 GiB."""
    assert worker_memory(LLAMA_70B, card(80 * GIB), 1).kv_bytes < 0
    assert worker_memory(LLAMA_70B, card(80 * GIB), 1).kv_tokens == 0
    assert not fits_memory(LLAMA_70B, card(80 * GIB), 1)
    assert fits_memory(LLAMA_70B, card(80 * GIB), 4)


def test_a_mixture_holds_all_experts_and_activates_some() -> None:
    """4 experts: weights of four feed-forward blocks; of the two a token visits one more gate, up and product
    (3 * 128) and two outputs of 64, where few rows are sampled."""
    mixture = dataclasses.replace(SMALL, experts=4, experts_per_token=2)
    dense, moe = (worker_memory(llm, card(10 * GIB), 1, max_num_seqs=8) for llm in (SMALL, mixture))
    assert moe.weight_bytes - dense.weight_bytes == 2 * 2 * 3 * 24576
    assert moe.activation_bytes - dense.activation_bytes == 8192 * (3 * 128 + 2 * 64) * 2


@pytest.mark.parametrize(
    "log", list(read_logs()), ids=lambda log: f"{log.llm.name}-{log.gpu.name}-{log.tokens}"
)
def test_kv_tokens_agree_with_what_vllm_logs(log: LoggedCache) -> None:
    """22 caches of vLLM 0.7 to 0.25 on 24 to 279 GB cards, dense, mixtures, latent and compressed attention:
    within 8 % (benchmarks/kv_capacity.yaml has the sources)."""
    assert log.predicted_tokens == pytest.approx(log.tokens, rel=BOUND_FRAC)


def test_graphs_are_kept_free_since_they_are_measured() -> None:
    """Releases before 0.21 captured graphs in what gpu_memory_utilization leaves; and they sorted logits."""
    before, since = (
        worker_memory(LLAMA_8B, card(80 * GIB), 1, settings=MemorySettings(version))
        for version in ("0.20.1", f"0.{FIRST_WITH_GRAPHS[1]}.0")
    )
    assert since.reserve_bytes - before.reserve_bytes == pytest.approx(32 * GRAPH_BYTES["dense"])
    assert before.activation_bytes > since.activation_bytes


def test_an_index_needs_a_workspace_of_the_longest_request() -> None:
    """40 keys of 132 bytes for each token of max_model_len: 5.3 GB at a million, a tenth at 100,000."""
    llm = read_catalog().llm("deepseek-ai/DeepSeek-V4-Pro")
    long, short = (
        worker_memory(llm, card(277 * GIB), 4, settings=MemorySettings(max_model_len=length)).reserve_bytes
        for length in (1_000_000, 100_000)
    )
    assert long - short == pytest.approx(900_000 * 40 * 132)


LLAMA_2_7B = Llm("7B", 32, 4096, 32, 32, 128, 11008, 32000, 4096)


@pytest.mark.parametrize(
    ("llm", "visible_gib", "tp", "weight_gib", "kv_gib"),
    [
        (LLAMA_8B, 79.22, 1, 14.96, 53.29),
        (LLAMA_8B, 79.22, 2, 7.48, 71.29 - 7.48 - 3.58 - 1.26),
        (LLAMA_2_7B, 79.19, 1, 12.55, 56.18),
    ],
    ids=["Llama-3-8B", "Llama-3-8B tp2", "Llama-2-7B"],
)
def test_the_breakdown_agrees_with_what_vllm_logs(
    llm: Llm, visible_gib: float, tp: int, weight_gib: float, kv_gib: float
) -> None:
    """On 80 GB cards at utilisation 0.9: Llama-3-8B from vllm-project/vllm#10511 (2024-12-13; weights 14.96,
    non-torch 1.79, activations 1.26, KV 53.29 of 71.29 GiB; on two GPUs non-torch 3.58), Llama-2-7B from
    kubernetes-sigs/gateway-api-inference-extension#550 (2025-03-21; 7191 blocks). Within 3 %."""
    found = worker_memory(llm, card(visible_gib * GIB + DRIVER_BYTES), tp, settings=MemorySettings("0.6.4"))
    assert found.weight_bytes / GIB == pytest.approx(weight_gib, abs=0.01)
    assert found.kv_bytes / GIB == pytest.approx(kv_gib, rel=0.03)


def test_blocks_are_as_large_as_vllms() -> None:
    """56.18 GiB of Llama-2-7B were 7191 blocks of 16 tokens (the log above)."""
    assert 56.18 * GIB // (16 * LLAMA_2_7B.kv_bytes_per_token) == pytest.approx(7191, abs=1)


def test_fp8_weights_halve_the_weights_alone() -> None:
    """vLLM keeps 16-bit keys and values: Qwen3-235B-FP8 on 4 H100 logs 8.11 GiB for 178,880 tokens
    (vllm-project/vllm#21348), 48.7 kB per token and GPU; 94 layers of 4 heads: 48.1."""
    qwen = Llm(
        "235B",
        94,
        4096,
        64,
        4,
        128,
        1536,
        151936,
        40960,
        dtype_bytes=1.0,
        experts=128,
        experts_per_token=8,
        kv_dtype_bytes=2.0,
    )
    assert qwen.parameters == pytest.approx(235e9, rel=0.001)
    per_token = worker_memory(qwen, card(79.65 * GIB), 4).kv_bytes_per_token
    assert per_token == 94 * 4 * 128 * 2 * 2 / 4
    assert per_token == pytest.approx(8.11 * GIB / 178_880, rel=0.02)
    head_bytes = 2 * 151936 * 4096 * 2
    assert worker_memory(qwen, card(79.65 * GIB), 4).weight_bytes == (qwen.layers_parameters + head_bytes) / 4


def test_quantised_weights_leave_embeddings_and_head_in_16_bits() -> None:
    """Llama-3.1-8B has 6.98e9 weights in its layers and 1.05e9 beside them: 9.08 GB in fp8, not 8.03."""
    fp8 = dataclasses.replace(LLAMA_8B, dtype_bytes=1.0)
    assert fp8.weight_bytes == pytest.approx(9.08e9, rel=0.001)
    assert worker_memory(fp8, card(24 * GIB), 1).weight_bytes == fp8.weight_bytes
    assert worker_memory(fp8, card(24 * GIB), 2).weight_bytes == fp8.weight_bytes / 2
    assert sum(stage.weight_bytes for stage in stage_memory(fp8, card(24 * GIB), 1, 2)) == fp8.weight_bytes
    assert active_weight_bytes(fp8) == fp8.weight_bytes - 2 * 128256 * 4096


def test_what_tp_copies_may_be_in_16_bits() -> None:
    """GLM-5-NVFP4: the matrices to latents and the index of 78 layers stay in 16 bits beside nvfp4. TP 8 has
    seven copies more of them, at 2 bytes a weight (at 0.5625, 2.5 GB of each GPU were missing).
    """
    llm, gpu = read_catalog().llm("nvidia/GLM-5-NVFP4"), read_catalog().gpu("b200-180g")
    whole = 78 * (6144 * (2048 + 512 + 64) + 32 * 128 * 2048 + 6144 * (128 + 32))
    one, eight = (worker_memory(llm, gpu, tp).weight_bytes for tp in (1, 8))
    assert 8 * eight - one == pytest.approx(7 * 2 * whole)


def test_a_thousand_rows_to_sample_take_gigabytes() -> None:
    """The same log: unless told otherwise vLLM samples 1024 rows on a card of 70 GiB or more, in 2025 with 32
    bytes for each of their 151936 logits, 18 more than today: 4.6 GiB. Of 71.7 GiB 8.11 were left for KV.
    Within 3 %."""
    qwen = Llm(
        "235B",
        94,
        4096,
        64,
        4,
        128,
        1536,
        151936,
        40960,
        dtype_bytes=1.0,
        experts=128,
        experts_per_token=8,
        kv_dtype_bytes=2.0,
    )
    found = worker_memory(qwen, card(79.65 * GIB), 4, max_num_seqs=1024, settings=MemorySettings("0.9.2"))
    assert found.kv_bytes / GIB == pytest.approx(8.11, rel=0.03)


def test_an_8_bit_kv_cache_holds_twice_the_tokens() -> None:
    narrow = dataclasses.replace(LLAMA_8B, kv_dtype_bytes=1.0)
    assert worker_memory(narrow, card(80 * GIB), 1).kv_tokens == pytest.approx(
        2 * worker_memory(LLAMA_8B, card(80 * GIB), 1).kv_tokens, abs=16
    )
    with pytest.raises(CatalogError, match="kv_dtype_bytes is 0, must be > 0"):
        dataclasses.replace(LLAMA_8B, kv_dtype_bytes=0)


def test_a_step_reads_the_experts_its_tokens_touch() -> None:
    """4 experts of 24576, 1 per token, attention 10240, in 2 layers, and a head of 64000: 1 token reads one
    expert, 2 tokens 4 * (1 - 0.75^2) = 1.75, many all 4; it computes with one, and the head counts apart."""
    mixture = dataclasses.replace(SMALL, experts=4, experts_per_token=1)
    read = active_weight_bytes(mixture, np.array([1.0, 2.0, 1e6]))
    assert read == pytest.approx([2 * (64000 + 2 * (10240 + e * 24576)) for e in (1, 1.75, 4)])
    assert active_weight_bytes(SMALL) == active_weight_bytes(SMALL, 1000.0) == 2 * (64000 + 2 * 34816)
    assert mixture.active_parameters == SMALL.active_parameters == 2 * 34816


def test_stages_split_layers_weights_and_kv() -> None:
    """Two stages of one layer each: the first has the embeddings, the last the head and the sampler, where
    1024 rows of 1000 words and 64 of each of 8192 tokens are more than the layers' 2*64 + 3*128 of each."""
    first, last = stage_memory(SMALL, card(10 * GIB), 1, 2, max_num_seqs=1024)
    assert first.weight_bytes == last.weight_bytes == 2 * (34816 + 64000)
    assert first.kv_bytes_per_token == last.kv_bytes_per_token == 64
    assert first.activation_bytes == 8192 * 512 * 2
    assert last.activation_bytes == 1024 * 1000 * 14 + 8192 * 64 * 2
    assert worker_memory(SMALL, card(10 * GIB), 1, 2, max_num_seqs=1024) == last
    assert stage_memory(SMALL, card(10 * GIB), 1, 1) == (worker_memory(SMALL, card(10 * GIB), 1),)


def test_dense_layers_of_a_mixture_are_in_its_first_stage() -> None:
    """DeepSeek-V3 in two stages of 31 and 30 layers: 28 and 30 of 58 layers have the 653.9 GB of experts. By
    equal shares the last stage had 30 / 61 of them, 2.1 GB too few on each of 8 GPUs.
    """
    llm = read_catalog().llm("deepseek-ai/DeepSeek-V3")
    experts_bytes = 58 * 256 * 3 * 7168 * 2048
    first, last = stage_memory(llm, card(141 * GIB), 8, 2)
    assert (30 / 58 - 30 / 61) * experts_bytes / 8 == pytest.approx(2.08e9, rel=0.01)
    copied_bytes = 2112 * 7168 * 7 / 8  # Of a layer: what is whole on every GPU.
    other_bytes = (llm.layers_bytes - experts_bytes) / 61
    vocabulary_bytes = 2 * 129280 * 7168
    for stage, layers, with_experts in ((first, 31, 28), (last, 30, 30)):
        experts = with_experts / 58 * experts_bytes
        split_bytes = layers * other_bytes + experts + vocabulary_bytes
        assert stage.weight_bytes == pytest.approx(split_bytes / 8 + layers * copied_bytes)


def test_sparse_attention_keeps_scales_beside_a_cache_in_8_bits() -> None:
    """656 bytes of a token in each of 61 layers for 576 on H200; not on B200, and not in 16 bits."""
    catalog = read_catalog()
    for name, gpu, more in (
        ("nvidia/DeepSeek-V3.2-NVFP4", "h200-141g", 61 * 80),
        ("nvidia/DeepSeek-V3.2-NVFP4", "b200-180g", 0),
        ("deepseek-ai/DeepSeek-V3.2", "h200-141g", 0),
        ("nvidia/DeepSeek-V3.1-NVFP4", "h200-141g", 0),
    ):
        llm = catalog.llm(name)
        found = worker_memory(llm, catalog.gpu(gpu), 8).kv_bytes_per_token
        assert found == pytest.approx(llm.kv_bytes_per_token + more)


def test_tied_embeddings_lie_on_both_ends_of_a_pipeline() -> None:
    tied = dataclasses.replace(SMALL, tied_embeddings=True)
    assert worker_memory(tied, card(10 * GIB), 1).weight_bytes == tied.weight_bytes
    assert sum(stage.weight_bytes for stage in stage_memory(tied, card(10 * GIB), 1, 2)) == SMALL.weight_bytes


def test_what_does_not_divide_goes_before_the_last_stage() -> None:
    five = dataclasses.replace(SMALL, layers=5)
    assert stage_layers(five, 2) == (3, 2)
    assert stage_layers(five, 3) == (2, 2, 1)
    assert stage_layers(dataclasses.replace(SMALL, layers=9), 4) == (2, 2, 3, 2)


@pytest.mark.parametrize("pp", [0, 3])
def test_pp_is_bounded_by_the_layers(pp: int) -> None:
    with pytest.raises(InputError, match=r"must be 1 to 2 \(layers\)"):
        worker_memory(SMALL, card(10 * GIB), 1, pp)


@pytest.mark.parametrize("tp", [0, 3])
def test_tp_must_divide_the_heads(tp: int) -> None:
    with pytest.raises(InputError, match="must divide its 8 heads"):
        worker_memory(SMALL, card(10 * GIB), tp)


def test_utilisation_is_a_share() -> None:
    with pytest.raises(InputError, match=r"must be in \(0, 1\]"):
        worker_memory(SMALL, card(10 * GIB), 1, settings=MemorySettings(gpu_memory_utilization=90))
