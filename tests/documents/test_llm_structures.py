"""LLMs of unlike layers: published counts and bytes, KV bytes by hand, formats by names of modules, rows."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.documents.catalog import read_catalog
from planner.documents.llm_config import llm_from_config
from planner.documents.llm_row import llm_row
from planner.errors import CatalogError
from planner.models.llm import (
    CompressedAttention,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    Llm,
    StateAttention,
)

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}
INDEX = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
}
QWEN35: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "hidden_act": "silu",
        "head_dim": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "spatial_merge_size": 2,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [],
    },
}
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 30,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "enable_moe_block": True,
    "moe_intermediate_size": 704,
    "num_experts": 128,
    "top_k_experts": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 262144,
    "max_position_embeddings": 262144,
}
# As google/gemma-3-27b-it is published: vocabulary, context and the pattern of its windows are left out.
GEMMA_3: dict[str, Any] = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
MIMO: dict[str, Any] = {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_layer_freq": [0] + [1] * 47,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1] + [0, 1, 1, 1, 1, 1] * 7 + [0],
    "hidden_act": "silu",
    "vocab_size": 152576,
    "max_position_embeddings": 262144,
}
DEEPSEEK_V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "expert_dtype": "fp4",
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_topk": 512,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    "hidden_act": "silu",
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def read(folder: Path, config: dict[str, Any], **change: object) -> Llm:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    return replace(llm_from_config(folder), name="it")


def kinds(llm: Llm) -> list[tuple[int, str, int]]:
    """Layers, kind of attention, experts."""
    return [
        (
            group.count,
            type(group.attention).__name__ if group.attention else "",
            group.feed_forward.experts if group.feed_forward else 0,
        )
        for group in llm.groups
    ]


@pytest.mark.parametrize(
    ("name", "active_billions"),
    [
        ("deepseek-v3", 37),
        ("deepseek-v4-flash", 13),
        ("deepseek-v4-pro", 49),
        ("kimi-k2", 32),
        ("kimi-k3", 104.2),
        ("glm-5", 40),
        ("gpt-oss-20b", 3.6),
        ("gpt-oss-120b", 5.1),
        ("llama-4-scout", 17),
        ("llama-4-maverick", 17),
        ("qwen3-coder", 35),
        ("qwen3.5", 17),
        ("qwen3.5-35b-a3b", 3),
        ("minimax-m2.7", 10),
        ("minimax-m3", 23),
        ("mimo-v2-flash", 15),
        ("step-3.7-flash", 11),
        ("nemotron-3-nano", 3.2),
        ("nemotron-3-super", 12),
        ("nemotron-3-ultra", 55),
        ("gemma-4-26b-a4b", 3.8),
    ],
)
def test_active_parameters_are_those_of_the_model_cards(name: str, active_billions: float) -> None:
    """Some count embeddings and the output head, others one or none: the figure lies between, within 5 %."""
    llm = read_catalog().llm(name)
    least, most = llm.active_parameters, llm.active_parameters + llm.embedding_parameters
    assert 0.95 * least <= active_billions * 1e9 <= 1.05 * most


INDEX_JSON = "metadata.total_size of model.safetensors.index.json, quoted in public repositories, 2026-11-21"
TREES = "an inventory of Hugging Face's file trees in GiB, August 2026, in a public repository"
QUOTED = "the size that public repositories and forums quote for it, 2026"
RECIPES = "github.com/vllm-project/recipes, pull request 678, 2026-07-24"
TWO_TABLES = 2 * 2 * 129280 * 7168  # DeepSeek-V3's drafter has embeddings and head of its own, in 16 bits
CHECKPOINTS: dict[
    str, tuple[float, float, str]
] = {  # bytes; of these, of layers for drafting; where it says so
    "llama-2-70b": (137_953_316_864, 0, INDEX_JSON),
    "llama-3.1-8b": (16_060_522_496, 0, INDEX_JSON),
    "llama-3.1-70b": (141_107_412_992, 0, INDEX_JSON),
    "mistral-7b": (14_483_464_192, 0, INDEX_JSON),
    "mixtral-8x7b": (93_405_585_408, 0, INDEX_JSON),
    "mixtral-8x22b": (281_241_268_224, 0, INDEX_JSON),
    "qwen-72b": (144_575_840_256, 0, INDEX_JSON),
    "qwen2.5-7b": (15_231_233_024, 0, INDEX_JSON),
    "qwen2.5-32b": (65_527_752_704, 0, INDEX_JSON),
    "qwen2.5-72b": (145_412_407_296, 0, INDEX_JSON),
    "qwen3-8b": (16_381_470_720, 0, INDEX_JSON),
    "qwen3-14b": (29_536_614_400, 0, INDEX_JSON),
    "qwen3-32b": (65_524_246_528, 0, INDEX_JSON),
    "qwen3-30b-a3b": (61_064_245_248, 0, INDEX_JSON),
    "qwen3-235b-a22b": (470_187_269_120, 0, INDEX_JSON),
    "gemma-3-27b": (54_864_813_280, 0, INDEX_JSON),
    "phi-4": (29_319_014_400, 0, INDEX_JSON),
    "deepseek-v3": (688_586_727_753, 11.61e9 + TWO_TABLES, INDEX_JSON),
    "deepseek-r1": (688_586_727_753, 11.61e9 + TWO_TABLES, INDEX_JSON),
    "gpt-oss-20b": (13_761_264_768, 0, INDEX_JSON),
    "gpt-oss-120b": (65_248_815_744, 0, INDEX_JSON),
    "nemotron-3-nano": (58.84 * 2**30, 0, TREES),
    "nemotron-3-nano-nvfp4": (18.03 * 2**30, 0, TREES),
    "nemotron-3.5-lightning-nvfp4": (20.10 * 2**30, 2 * 1.35e9, TREES),
    "nemotron-3-super": (230.27 * 2**30, 2 * 3.01e9, TREES),
    "nemotron-3-super-fp8": (119.56 * 2**30, 2 * 3.01e9, TREES),
    "nemotron-3-ultra": (1044 * 2**30, 2 * 11.49e9, TREES),
    "nemotron-3-ultra-nvfp4": (328.18 * 2**30, 2 * 11.49e9, TREES),
    "qwen3.5-27b": (51.77 * 2**30, 2 * 0.44e9, TREES),
    "qwen3.5-35b-a3b": (66.99 * 2**30, 2 * 0.85e9, TREES),
    "qwen3.5-122b-a10b": (233.01 * 2**30, 2 * 2.53e9, TREES),
    "qwen3.5-122b-a10b-nvfp4": (77.79 * 2**30, 2 * 2.53e9, TREES),
    "qwen3.5": (751.41 * 2**30, 2 * 6.61e9, TREES),
    "qwen3.5-397b-a17b-nvfp4": (233.99 * 2**30, 2 * 6.61e9, TREES),
    "qwen3.6-27b-nvfp4": (20.43 * 2**30, 2 * 0.44e9, TREES),
    "deepseek-v4-flash": (148.67 * 2**30, 0.54 * 6.63e9, TREES),
    "deepseek-v4-flash-nvfp4": (156.75 * 2**30, 0.54 * 6.63e9, TREES),
    "deepseek-v4-pro": (805.35 * 2**30, 0.54 * 25.9e9, TREES),
    "deepseek-v4-pro-nvfp4": (850.42 * 2**30, 0.54 * 25.9e9, TREES),
    "glm-5.2": (1403 * 2**30, 2 * 9.95e9, TREES),
    "glm-5.2-fp8": (703.77 * 2**30, 9.95e9, TREES),
    "glm-5.2-nvfp4": (432.95 * 2**30, 2 * 9.95e9, TREES),
    "kimi-k2.5": (554.33 * 2**30, 0, TREES),
    "kimi-k2.6-nvfp4": (554.34 * 2**30, 0, TREES),
    "kimi-k3": (1454 * 2**30, 0, TREES),
    # 642 "GB" are fewer bytes than the checkpoint has parameters of 8 bits: they are binary
    "deepseek-v3.2": (
        642 * 2**30,
        11.62e9 + TWO_TABLES,
        "hf.co/eousphoros/DeepSeek-V3.2-NVFP4: original size",
    ),
    "glm-5-fp8": (756e9, 9.95e9, QUOTED),
    "kimi-k2": (1.03e12, 0, QUOTED),
    "kimi-k2.5-nvfp4": (591e9, 0, "forums.developer.nvidia.com/t/359810"),
    "minimax-m2.5": (230e9, 0, QUOTED),
    "minimax-m2.7": (230.2e9, 0, "hf.co/saricles/MiniMax-M2.7-NVFP4-GB10: official FP8 release"),
    "minimax-m3": (854e9, 0, "hf.co/Mapika/MiniMax-M3-NVFP4: BF16, 2026-06-12"),
    "minimax-m3-nvfp4": (250.1e9, 0, RECIPES),
    "gemma-4-26b-a4b-nvfp4": (17.5 * 2**30, 0, QUOTED),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_are_the_published_bytes(name: str) -> None:
    checkpoint_bytes, draft_bytes, source = CHECKPOINTS[name]
    ours_bytes = read_catalog().llm(name).weight_bytes + draft_bytes
    assert ours_bytes == pytest.approx(checkpoint_bytes, rel=0.02), source


def test_latent_attention_keeps_one_vector_per_token(tmp_path: Path) -> None:
    """61 layers x (512 + 64) x 2 bytes = 70,272; an index adds 61 x (128 + 4)."""
    llm = read(tmp_path, DEEPSEEK)
    assert kinds(llm) == [(3, "LatentAttention", 1), (58, "LatentAttention", 256)]
    assert llm.kv_bytes_per_token == 70_272
    # a layer: 7168 x 1536 + 1536 x 128 x 192 + 7168 x 576 + 512 x 128 x 256 + 128 x 128 x 7168 = 187,105,280
    assert llm.groups[0].attention == LatentAttention(128, 1536, 512, 128, 64, 128)
    assert llm.groups[0].attention.parameters(7168) == 187_105_280
    # the third further layer: attention, 257 experts of 3 x 7168 x 2048, and 2 x 7168 x 7168
    assert llm.draft_parameters == 187_105_280 + 257 * 44_040_192 + 102_760_448
    assert read(tmp_path, {**DEEPSEEK, **INDEX}).kv_bytes_per_token == 70_272 + 61 * 132


def test_layers_that_share_an_index_keep_no_keys_for_it(tmp_path: Path) -> None:
    """GLM-5.2: every fourth from the third on has its own. Of 61: 0, 1, 2, 6, 10, ..., 58."""
    types = ["full" if layer < 3 or (layer - 2) % 4 == 0 else "shared" for layer in range(61)]
    own = types.count("full")
    assert own == 3 + 14
    listed = read(tmp_path, {**DEEPSEEK, **INDEX}, indexer_types=types)
    assert listed.kv_bytes_per_token == 70_272 + own * 132
    by_rule = read(tmp_path, {**DEEPSEEK, **INDEX}, index_topk_freq=4, index_skip_topk_offset=3)
    assert by_rule == listed


def test_layers_with_a_window_and_experts_in_4_bits(tmp_path: Path) -> None:
    """gpt-oss-120b: 36 layers x 2 x 8 heads x 64 x 2 bytes = 73,728. Experts: 36 x 128 x 3 x 2880 x 2880
    weights of 4.25 bits, all else in 16."""
    llm = read(tmp_path, GPT_OSS)
    assert kinds(llm) == [(18, "GroupedAttention", 128), (18, "GroupedAttention", 128)]
    assert [group.attention.window_tokens for group in llm.groups] == [128, None]  # type: ignore[union-attr]
    assert llm.kv_bytes_per_token == 73_728
    experts = 36 * 128 * 3 * 2880 * 2880
    attention = 36 * 2880 * 64 * (64 + 8 + 8 + 64)
    assert llm.layers_bytes == pytest.approx(experts * 4.25 / 8 + attention * 2)
    assert (llm.weights, llm.groups[0].attention.weights) == ("mxfp4", "bf16")  # type: ignore[union-attr]


def test_linear_attention_keeps_a_state_per_sequence(tmp_path: Path) -> None:
    """Qwen3.5-35B-A3B: 10 of 40 layers keep 2 x 2 heads x 256 x 2 bytes = 2,048. The others: 32 x 128 x 128
    numbers in 32 bits, and 3 tokens of (2 x 2048 + 4096) channels in 16: 2,097,152 + 49,152 bytes.

    A gate doubles the queries: 2048 x (2 x 16 x 256 + 2 x 512 + 4096).
    """
    llm = read(tmp_path, QWEN35)
    assert kinds(llm) == [(30, "StateAttention", 256), (10, "GroupedAttention", 256)]
    assert llm.kv_bytes_per_token == 20_480
    assert llm.state_bytes == 30 * (2_097_152 + 49_152)
    full = llm.groups[1].attention
    assert isinstance(full, GroupedAttention)
    assert full.parameters(2048) == 2048 * (8192 + 1024 + 4096)
    # 27 layers of 4 x 1152^2 + 2 x 1152 x 4304, patches, positions, and the merger's two matrices
    encoder = 27 * (4 * 1152**2 + 2 * 1152 * 4304) + 3 * 256 * 2 * 1152 + 2304 * 1152 + 4608 * (4608 + 2048)
    assert llm.encoder_parameters == encoder
    # who divides 16 heads must divide the 16 key heads of linear attention too
    assert [tp for tp in range(1, 17) if llm.splits_over(tp)] == [1, 2, 4, 8, 16]


def test_layers_of_attention_or_of_experts_alone(tmp_path: Path) -> None:
    """Nemotron-3-Nano: 6 layers keep 2 x 2 heads x 128 x 2 bytes = 1,024; 23 carry 64 x 64 x 128 numbers in
    32 bits and 3 tokens of (4096 + 2 x 8 x 128) channels in 16."""
    llm = read(tmp_path, NEMOTRON)
    assert kinds(llm) == [(23, "StateAttention", 0), (23, "", 128), (6, "GroupedAttention", 0)]
    assert llm.kv_bytes_per_token == 6 * 1_024
    assert llm.state_bytes == 23 * (2_097_152 + 36_864)
    assert llm.groups[1].feed_forward == FeedForward(1856, False, 128, 6, 3712)
    state = llm.groups[0].attention
    assert isinstance(state, StateAttention) and state.projected == 2 * 4096 + 2 * 8 * 128 + 64
    listed = {"M": "mamba", "E": "moe", "*": "attention"}
    names = [listed[letter] for letter in NEMOTRON["hybrid_override_pattern"]]
    without = {key: value for key, value in NEMOTRON.items() if key != "hybrid_override_pattern"}
    assert read(tmp_path, without, layers_block_type=names, num_hidden_layers=None) == llm


def test_global_layers_of_other_widths(tmp_path: Path) -> None:
    """Gemma 4: 25 layers of 2 x 8 x 256 values, 5 of 2 x 2 x 512, values made as keys; 2 bytes each."""
    llm = read(tmp_path, GEMMA)
    local, all_tokens = (group.attention for group in llm.groups)
    assert llm.kv_bytes_per_token == 25 * 8_192 + 5 * 4_096
    assert isinstance(all_tokens, GroupedAttention) and isinstance(local, GroupedAttention)
    assert all_tokens.parameters(2816) == 2816 * 512 * (16 + 2 + 16)
    assert local.parameters(2816) == 2816 * 256 * (16 + 8 + 8 + 16)
    assert (local.window_tokens, all_tokens.window_tokens, llm.tied_embeddings) == (1024, None, True)


def test_what_a_published_config_of_gemma_3_leaves_out_is_filled_in(tmp_path: Path) -> None:
    """The row of the catalog: "vocab_size is missing" refused the file that Google publishes."""
    llm, row = read(tmp_path, GEMMA_3), read_catalog().llm("gemma-3-27b")
    assert llm.groups == row.groups and (llm.vocab, llm.hidden) == (row.vocab, row.hidden)
    assert llm.context_tokens == row.context_tokens and llm.tied_embeddings and row.tied_embeddings
    assert llm.kv_bytes_per_token == 62 * 2 * 16 * 128 * 2
    # The row counts the encoder's biases and norms too.
    assert llm.encoder_parameters == pytest.approx(row.encoder_parameters, rel=0.01)


def test_windows_with_heads_of_their_own(tmp_path: Path) -> None:
    """MiMo-V2-Flash: 39 layers keep 8 x (192 + 128) values, 9 keep 4 x 320; 2 bytes each."""
    llm = read(tmp_path, MIMO)
    assert sorted(kinds(llm)) == [
        (1, "GroupedAttention", 1),
        (8, "GroupedAttention", 256),
        (39, "GroupedAttention", 256),
    ]
    assert llm.kv_bytes_per_token == 39 * 5_120 + 9 * 2_560


def test_compressed_attention(tmp_path: Path) -> None:
    """DeepSeek-V4-Flash: a vector takes 448 + 2 x 64 + 8 bytes = 584. 21 layers keep one and a key of 132 per
    4 tokens, 20 one per 128, two the window alone."""
    llm = read(tmp_path, DEEPSEEK_V4)
    assert kinds(llm) == [(count, "CompressedAttention", 256) for count in (2, 21, 20)]
    assert llm.kv_bytes_per_token == 21 * (584 + 132) / 4 + 20 * 584 / 128
    assert (llm.weights, llm.groups[0].attention.weights) == ("mxfp4", "fp8-block")  # type: ignore[union-attr]
    window = llm.groups[0].attention
    assert isinstance(window, CompressedAttention)
    # 4096 x 1024 + 1024 x 64 x 512 + 4096 x 512 + 1024 x 64 x 512 + 8 x 1024 x 4096
    assert window.parameters(4096) == 4_194_304 + 33_554_432 + 2_097_152 + 33_554_432 + 33_554_432
    assert (window.window_tokens, window.vector_bytes) == (128, 584)
    in_fp8 = read(tmp_path, DEEPSEEK_V4, expert_dtype="fp8")
    assert in_fp8.weights == "fp8-block"


def test_chunks_and_experts_in_every_other_layer(tmp_path: Path) -> None:
    """Llama 4: three of four layers look at 8,192 tokens; with a step of 2 every other has one wide block."""
    llama4 = {
        "model_type": "llama4_text",
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 128,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8192,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "vocab_size": 202048,
        "max_position_embeddings": 1048576,
    }
    llm = read(tmp_path, llama4)
    shapes = set()
    for group in llm.groups:
        assert isinstance(group.attention, GroupedAttention) and group.feed_forward
        window, block = group.attention.window_tokens, group.feed_forward
        shapes.add((group.count, window, block.width, block.shared_width))
    assert shapes == {(24, 8192, 16384, 0), (12, 8192, 8192, 8192), (12, None, 8192, 8192)}
    assert llm.active_parameters == 48 * 5120 * 128 * 96 + 24 * 3 * 5120 * (16384 + 16384)


def test_layers_without_attention_and_of_other_widths(tmp_path: Path) -> None:
    """Llama-Nemotron: ffn_mult 5.25 of 8192 is 2/3 x 5.25 x 8192 = 28,672; 1.3125 makes 7,168."""
    block = {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": 5.25, "no_op": False}}
    narrow = {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 1.3125}}
    config = {
        "model_type": "nemotron-nas",
        "num_hidden_layers": 3,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "block_configs": [block, narrow, block],
        "hidden_act": "silu",
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
    llm = read(tmp_path, config)
    assert kinds(llm) == [(2, "GroupedAttention", 1), (1, "", 1)]
    assert [group.feed_forward.width for group in llm.groups] == [28_672, 7_168]  # type: ignore[union-attr]
    assert llm.kv_bytes_per_token == 2 * 2 * 8 * 128 * 2
    config["block_configs"] = [{**block, "attention": {"replace_with_linear": True}}, narrow, block]
    with pytest.raises(
        CatalogError, match=r"block_configs: 0: attention: replace_with_linear: is not modelled"
    ):
        read(tmp_path, config)


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
EXPERTS = 58 * 256 * 3 * 7168 * 2048


@pytest.mark.parametrize(
    ("quantised", "formats"),
    [  # of attention, of the experts, of the shared expert, of the first dense block
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8-block",) * 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, ("int4",) * 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, ("int4-g32z",) * 4),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, ("int4-g32z",) * 4),
        ({"quant_method": "gptq", "bits": 8}, ("int8-g128",) * 4),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, ("mxfp8",) * 4),
        (NVFP4, ("nvfp4",) * 4),
        (NVFP4 | {"ignore": ["model.layers.*.self_attn*", "lm_head"]}, ("bf16", "nvfp4", "nvfp4", "nvfp4")),
        (NVFP4 | {"ignore": ["model.layers.*.experts.*.*_proj"]}, ("nvfp4", "bf16", "nvfp4", "nvfp4")),
        (
            NVFP4 | {"ignore": [f"model.layers.{layer}.mlp.shared_experts*" for layer in range(61)]},
            ("nvfp4", "nvfp4", "bf16", "nvfp4"),
        ),
        (
            NVFP4 | {"exclude_modules": ["model.layers.0*", "model.layers.1.*", "model.layers.2.*"]},
            ("nvfp4", "nvfp4", "nvfp4", "bf16"),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "type": "int", "group_size": 32},
                    }
                },
                "ignore": [
                    "re:.*self_attn.*",
                    "re:.*shared_experts.*",
                    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                ],
            },
            ("bf16", "int4-g32", "bf16", "bf16"),
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    f"model.layers.{layer}.mlp.experts.{expert}.{name}": {"quant_algo": "W4A16_NVFP4"}
                    for layer in range(3, 61)
                    for expert in (0, 255)
                    for name in ("gate_proj", "up_proj", "down_proj")
                }
                | {f"model.layers.{layer}.self_attn": {"quant_algo": "FP8"} for layer in range(61)},
            },
            ("fp8", "nvfp4", "bf16", "bf16"),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "attention": {
                        "targets": ["re:.*self_attn.*"],
                        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                    },
                    "experts": {
                        "targets": ["re:.*mlp\\.experts\\..*"],
                        "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                    },
                },
            },
            ("fp8", "nvfp4", "bf16", "bf16"),
        ),
        (  # What is ignored by its name stays in 16 bits within a wider target, as in vLLM.
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "blocks": {
                        "targets": ["re:.*mlp.*"],
                        "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                    }
                },
                "ignore": [
                    f"model.layers.{layer}.mlp.{name}"
                    for layer in range(3)
                    for name in ("gate_proj", "up_proj", "down_proj")
                ],
            },
            ("bf16", "nvfp4", "nvfp4", "bf16"),
        ),
    ],
)
def test_formats_go_by_the_names_of_modules(
    tmp_path: Path, quantised: dict[str, Any], formats: tuple[str, ...]
) -> None:
    llm = read(tmp_path, DEEPSEEK, quantization_config=quantised)
    dense, sparse = llm.groups[0], llm.groups[-1]
    assert dense.feed_forward and sparse.feed_forward and sparse.attention
    found = (
        sparse.attention.weights,
        sparse.feed_forward.weights,
        sparse.feed_forward.shared_weights,
        dense.feed_forward.weights,
    )
    assert found == formats


def test_matrices_left_in_16_bits_beside_others_are_counted_apart(tmp_path: Path) -> None:
    """DeepSeek-V3.1-NVFP4: of attention the output's 128 x 128 x 7168 = 117,440,512 weights are in 4.5 bits,
    the other 69,664,768 in 16."""
    ignored = [
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(61)
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    ]
    llm = read(tmp_path, DEEPSEEK, quantization_config=NVFP4 | {"ignore": ignored})
    attention = llm.groups[0].attention
    assert isinstance(attention, LatentAttention)
    assert (attention.weights, attention.bf16_parameters) == ("nvfp4", 187_105_280 - 117_440_512)
    by_part = [(weights, parameters) for part, weights, parameters, _ in llm.parts() if part == "attention"]
    assert by_part[:2] == [("nvfp4", 3 * 117_440_512), ("bf16", 3 * 69_664_768)]


def test_experts_of_several_formats_are_refused(tmp_path: Path) -> None:
    layers = {
        "model.layers.3.mlp.experts.0.gate_proj": {"quant_algo": "NVFP4"},
        "model.layers.3.mlp.experts.1.gate_proj": {"quant_algo": "FP8"},
    }
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    with pytest.raises(CatalogError, match=r"experts.1.gate_proj: FP8, other experts of this layer nvfp4"):
        read(tmp_path, DEEPSEEK, quantization_config=mixed)
    layers.popitem()
    with pytest.raises(CatalogError, match=r"the experts of layer 3 in bf16 and nvfp4; not modelled"):
        read(tmp_path, DEEPSEEK, quantization_config=mixed)


def test_a_quantised_output_head_is_counted_so(tmp_path: Path) -> None:
    """gpt-oss's head of 201,088 x 2,880 weights: 4.5 bits instead of 16."""
    named = {"quant_algo": "MIXED_PRECISION", "quant_method": "modelopt"}
    layers = {"lm_head": {"quant_algo": "NVFP4"}}
    plain = {**GPT_OSS, "quantization_config": None}
    llm, wide = (
        read(tmp_path, plain, quantization_config={**named, "quantized_layers": layers}),
        read(tmp_path, plain),
    )
    assert llm.head_weights == "nvfp4"
    assert wide.weight_bytes - llm.weight_bytes == 201_088 * 2_880 * (2 - 4.5 / 8)


@pytest.mark.parametrize(
    "config", [DEEPSEEK, {**DEEPSEEK, **INDEX}, GPT_OSS, QWEN35, NEMOTRON, GEMMA, MIMO, DEEPSEEK_V4, GEMMA_3]
)
def test_a_row_out_of_a_config_is_the_same_llm(tmp_path: Path, config: dict[str, Any]) -> None:
    llm = read(tmp_path / "it", config)
    document = {"it": {**llm_row(llm), "source": "a test", "date": "2026-11-21"}}
    (tmp_path / "llms.yaml").write_text(json.dumps(document))
    assert read_catalog(tmp_path).llm("it") == llm


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 8}, r"it: heads: only for a row without groups"),
        ({"groups": []}, r"groups: expected a list of groups of layers, found \[\]"),
        ({"groups": [{"layer": 3}]}, r"groups: 1: unknown key 'layer'; did you mean 'layers'"),
        ({"groups": [{"layers": 0}]}, r"groups: 1: layers: expected a whole number > 0, found 0"),
        (
            {"groups": [{"layers": 1, "attention": {"kind": "multi"}}]},
            r"attention: kind: expected one of grouped, latent, compressed, state, found 'multi'",
        ),
        (
            {"groups": [{"layers": 1, "attention": {"kind": "grouped", "heads": 3}}]},
            r"attention: kv_heads is missing",
        ),
        (
            {"groups": [{"layers": 1, "feed_forward": {"width": 8, "weights": "fp5"}}]},
            r"feed_forward: weights: expected one of bf16, .* found 'fp5'",
        ),
        ({"groups": [{"layers": 1, "feed_forward": {"width": 8}}]}, r"no layer keeps keys and values"),
    ],
)
def test_a_row_of_groups_that_is_wrong_says_where(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    row = llm_row(read(tmp_path / "it", GPT_OSS)) | {"source": "a test", "date": "2026-11-21"} | change
    (tmp_path / "llms.yaml").write_text(json.dumps({"it": row}))
    with pytest.raises(CatalogError, match=message):
        read_catalog(tmp_path)


REFUSED = ("nvidia--Qwen3.6-35B-A3B-NVFP4",)  # its two files disagree on the KV cache
UNLIKE = (
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4",
)  # says NVFP4 for all; NVIDIA's blog has the parts


def wheel_configs() -> list[Path]:
    """The configs of the optional aiconfigurator-core, or of a folder named in AICONFIGURATOR_CONFIGS."""
    if folder := os.environ.get("AICONFIGURATOR_CONFIGS"):
        return sorted(Path(folder).glob("*_config.json"))
    core = pytest.importorskip("aiconfigurator_core")
    return sorted((Path(core.__file__).parent / "model_configs").glob("*_config.json"))


def test_the_configs_of_aiconfigurator_are_read(tmp_path: Path) -> None:
    """All but those of REFUSED, and as the rows of the same name have them."""
    catalog, found = read_catalog(), {}
    for path in wheel_configs():
        if path.name.endswith("_hf_quant_config.json"):
            continue
        name = path.name.removesuffix("_config.json")
        (tmp_path / name).mkdir()
        shutil.copy(path, tmp_path / name / "config.json")
        beside = path.with_name(f"{name}_hf_quant_config.json")
        if beside.exists():
            shutil.copy(beside, tmp_path / name / "hf_quant_config.json")
        if name in REFUSED:
            with pytest.raises(CatalogError, match=r"remove what is out of date"):
                llm_from_config(tmp_path / name)
            continue
        found[name.replace("--", "/", 1)] = llm_from_config(tmp_path / name)
    assert len(found) >= 85
    for name, llm in found.items():
        if (row := catalog.llms.get(name)) and name not in UNLIKE:
            same = replace(llm, encoder_parameters=row.encoder_parameters)  # some configs leave theirs out
            assert same.weight_bytes == pytest.approx(row.weight_bytes, rel=0.01), name
            assert same.kv_bytes_per_token == row.kv_bytes_per_token, name
