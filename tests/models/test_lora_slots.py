"""Slots of adapters: their bytes by hand, what a step takes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import CATALOG

from planner.errors import InputError
from planner.models.lora import KERNEL_S, Lora, lora_slots
from planner.models.memory import worker_memory

LLM = CATALOG.llm("meta-llama/Llama-3.1-8B")
GPU = CATALOG.gpu("h100-80g")
PLAIN = Lora(4, 16, 10, 10)


def test_a_slot_has_what_vllms_layers_have() -> None:
    """Llama-3.1-8B, rank 16, 16 bits, per layer and rank: qkv_proj 3 x 4096 + 4096 + 2 x 1024, o_proj
    4096 + 4096, gate_up_proj 2 x 4096 + 2 x 14336, down_proj 14336 + 4096; once, embeddings and head
    128256 + 4096 each.
    """
    layer = (3 * 4096 + 4096 + 2048) + 8192 + (8192 + 28672) + (14336 + 4096)
    both = 2 * (128256 + 4096)
    assert lora_slots(PLAIN, LLM, GPU, 1).cost.slot_bytes == 2 * 16 * (32 * layer + both)
    # on each of two GPUs: what multiplies the whole hidden vector, or makes it, is whole
    split = (3 * 4096 + 2048 + 1024) + (2048 + 4096) + (8192 + 14336) + (7168 + 4096)
    assert lora_slots(PLAIN, LLM, GPU, 2).cost.slot_bytes == 2 * 16 * (32 * split + both)
    queries = replace(PLAIN, targets=("o_proj",))
    assert lora_slots(queries, LLM, GPU, 1).cost.slot_bytes == 2 * 16 * 32 * 8192


def test_experts_have_slots_of_their_own() -> None:
    """Qwen3-30B-A3B: 128 experts of width 768 over 2048 in 48 layers, of which a token visits 8; whole ones
    under expert parallelism.
    """
    llm = CATALOG.llm("Qwen/Qwen3-30B-A3B")
    experts = replace(PLAIN, targets=("experts",))
    one = 2 * 2048 + 768 + 2 * 768 + 2048
    found = lora_slots(experts, llm, GPU, 1).cost
    assert found.slot_bytes == 2 * 16 * 48 * 128 * one
    assert found.visited_frac == 8 / 128 and found.read_s == 0.0
    split = 2 * 2048 + 384 + 2 * 384 + 2048
    assert lora_slots(experts, llm, GPU, 2).cost.slot_bytes == 2 * 16 * 48 * 128 * split
    assert lora_slots(experts, llm, GPU, 2, ep=True).cost.slot_bytes == 2 * 16 * 48 * 64 * one


def test_slots_are_taken_from_the_kv_cache() -> None:
    slots = lora_slots(PLAIN, LLM, GPU, 1)
    use = worker_memory(LLM, GPU, 1)
    missing = use.kv_tokens - slots.add_to_memory(use).kv_tokens
    assert missing == pytest.approx(4 * slots.cost.slot_bytes / LLM.kv_bytes_per_token, abs=16)


def test_a_step_pays_for_kernels_adapters_and_tokens() -> None:
    """Two kernels for each of four modules in 32 layers and of the two embeddings; all matrices but the
    embeddings' are read once at the GPU's bandwidth or slower, and multiplied.
    """
    cost = lora_slots(PLAIN, LLM, GPU, 1).cost
    assert cost.kernels_s == pytest.approx(2 * KERNEL_S * (4 * 32 + 2))
    layers = 2 * 16 * 32 * 81920
    least_s = layers / GPU.bandwidth_bytes_per_s
    assert least_s < cost.read_s < 2 * least_s
    assert 2 * layers / 2 / GPU.dense_flops_per_s < cost.token_s < 1e-5
    assert cost.load_s == layers / PLAIN.link_bytes_per_s and cost.disk_s == layers / PLAIN.disk_bytes_per_s
    longer = cost.with_longer_times(0.5)
    assert (longer.read_s, longer.slot_bytes) == (1.5 * cost.read_s, cost.slot_bytes)
    assert lora_slots(replace(PLAIN, longer_frac=0.5), LLM, GPU, 1).cost == longer


def test_what_nobody_counts_is_refused() -> None:
    with pytest.raises(InputError, match=r"DeepSeek-V3 has attention of another kind"):
        lora_slots(PLAIN, CATALOG.llm("deepseek-ai/DeepSeek-V3"), GPU, 8)
    wide = replace(LLM, vocab=262_144)
    with pytest.raises(InputError, match=r"262144 words.* targets without lm_head"):
        lora_slots(PLAIN, wide, GPU, 1)
    assert lora_slots(replace(PLAIN, targets=("qkv_proj",)), wide, GPU, 1).cost.slot_bytes > 0
