"""Shapes of LLMs out of config.json: the catalog's rows again, published counts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.documents.catalog import read_catalog
from planner.documents.llm_config import llm_from_config
from planner.errors import CatalogError
from planner.models.llm import Llm

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "head_dim": None,
}
CONFIGS = {
    "llama-3.1-70b": LLAMA,
    "mistral-7b": {
        "model_type": "mistral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "dtype": "bfloat16",
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-32b": {
        "model_type": "qwen3",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 25600,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "qwen-72b": {
        "model_type": "qwen",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "kv_channels": 128,
        "intermediate_size": 49152,
        "vocab_size": 152064,
        "seq_length": 32768,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "opt-13b": {
        "model_type": "opt",
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "ffn_dim": 20480,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    },
    "bloom": {
        "model_type": "bloom",
        "n_layer": 70,
        "n_embed": 14336,
        "num_attention_heads": 112,
        "vocab_size": 250880,
        "seq_length": 2048,
    },
}


def write_config(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_shape_of_the_catalog_row(tmp_path: Path, name: str) -> None:
    row, config = read_catalog().llm(name), llm_from_config(write_config(tmp_path, CONFIGS[name]))
    # BLOOM's file gives the length it was trained at; ALiBi goes on beyond, and so does its row
    own = {"name", "context_tokens"} if name == "bloom" else {"name"}
    same = {key: getattr(row, key) for key in Llm.__slots__ if key not in own}
    assert {key: getattr(config, key) for key in same} == same


def test_more_configs(tmp_path: Path) -> None:
    """GPT-NeoX-20B 20.6 B, Qwen3-30B-A3B 30.5 B parameters, fp8 weights, and a language half."""
    neox = {
        "model_type": "gpt_neox",
        "num_hidden_layers": 44,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "vocab_size": 50432,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    assert llm_from_config(write_config(tmp_path / "neox", neox)).parameters == pytest.approx(
        20.6e9, rel=0.02
    )
    moe = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }
    assert llm_from_config(write_config(tmp_path / "moe", moe)).parameters == pytest.approx(30.5e9, rel=0.02)
    fp8 = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
    assert llm_from_config(write_config(tmp_path / "fp8", fp8)).dtype_bytes == 1
    eyes = {"model_type": "llava", "text_config": LLAMA, "vision_config": {}}
    assert llm_from_config(write_config(tmp_path / "eyes", eyes)).layers == 80


@pytest.mark.parametrize(
    ("extra", "kv_bytes_per_token"),
    [
        ({}, 327_680),
        ({"quantization_config": {"quant_method": "fp8"}}, 327_680),
        ({"torch_dtype": "float8_e4m3fn"}, 327_680),
        ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}}, 163_840),
        ({"quantization_config": {"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}}, 163_840),
        ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": None}}, 327_680),
    ],
)
def test_fp8_weights_keep_a_16_bit_kv_cache_unless_the_config_says_so(
    tmp_path: Path, extra: dict[str, object], kv_bytes_per_token: int
) -> None:
    """Llama-3.1-70B: 2 * 80 layers * 8 heads * 128 = 163,840 numbers per token."""
    llm = llm_from_config(write_config(tmp_path, {**LLAMA, **extra}))
    assert llm.kv_bytes_per_token == kv_bytes_per_token


FP8_GROUP = {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
def test_fp8_weights_are_known_by_what_the_groups_say(tmp_path: Path, method: str) -> None:
    """As in the fp8 checkpoints of llm-compressor and ModelOpt. Llama-3.1-70B: 80 layers of 855.6e6 weights
    in a byte each, 2 x 128,256 x 8,192 in two: 72.7 GB."""
    quantised = {"quant_method": method, "config_groups": {"group_0": FP8_GROUP}, "ignore": ["lm_head"]}
    llm = llm_from_config(write_config(tmp_path, {**LLAMA, "quantization_config": quantised}))
    assert (llm.dtype_bytes, llm.kv_bytes_per_token) == (1.0, 327_680)
    assert llm.weight_bytes == pytest.approx(72.65e9, rel=0.001)


@pytest.mark.parametrize(
    ("quantised", "weights"),
    [
        (None, "bf16"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_algo": "FP8"}, "fp8"),
        ({"quant_algo": "fp8_pb_wo"}, "fp8-block"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": FP8_GROUP}}, "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}},
            },
            "fp8-block",
        ),
        *(
            ({"quant_method": "compressed-tensors", "config_groups": {"a": group}}, weights)
            for group, weights in (
                ({"weights": {"num_bits": 8, "type": "float", "group_size": 32}}, "mxfp8"),
                ({"weights": {"num_bits": 8, "type": "int"}}, "int8-g128"),
                ({"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8}}, "int8"),
            )
        ),
    ],
)
def test_how_weights_are_multiplied(tmp_path: Path, quantised: object, weights: str) -> None:
    assert (
        llm_from_config(write_config(tmp_path, {**LLAMA, "quantization_config": quantised})).weights
        == weights
    )


def write_modelopt(folder: Path, **quantization: object) -> None:
    document = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("quantization", "bytes_per"),
    [
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}, (1.0, 1.0)),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": None}, (1.0, 2.0)),
        ({"quant_algo": "fp8_pb_wo"}, (1.0, 2.0)),
        ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, (2.0, 1.0)),
    ],
)
def test_the_file_that_modelopt_leaves_beside_the_config_counts(
    tmp_path: Path, quantization: dict[str, object], bytes_per: tuple[float, float]
) -> None:
    """Such a folder was planned as one of 16 bits, on fits of 16 bits, whatever the file said."""
    config = write_config(tmp_path, LLAMA)
    write_modelopt(tmp_path, **quantization)
    for path in (tmp_path, config):
        llm = llm_from_config(path)
        assert (llm.dtype_bytes, llm.kv_dtype_bytes) == bytes_per
    catalog = read_catalog()
    silicon = catalog.step_latency(catalog.llm("llama-3.1-70b"), catalog.gpu("h100"), 4)
    assert catalog.step_latency(catalog.llm(str(tmp_path)), catalog.gpu("h100"), 4) != silicon


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo: 'W4A8_AWQ' is not modelled"),
        (
            {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
            "kv_cache_quant_algo: 'NVFP4' is not modelled",
        ),
        ({}, "quant_method: None is not modelled"),
    ],
)
def test_what_modelopt_says_and_we_do_not_model_is_refused(
    tmp_path: Path, quantization: dict[str, object], message: str
) -> None:
    write_config(tmp_path, LLAMA)
    write_modelopt(tmp_path, **quantization)
    with pytest.raises(CatalogError, match=f"hf_quant_config.json: .*{message}"):
        llm_from_config(tmp_path)


def test_a_third_declaration_that_disagrees_is_refused_too(tmp_path: Path) -> None:
    """Two keys of the config agree (fp8, KV in 16 bits); ModelOpt's file, the third, has KV in fp8."""
    fp8 = {"quant_method": "fp8"}
    write_config(tmp_path, {**LLAMA, "quantization_config": fp8, "compression_config": fp8})
    write_modelopt(tmp_path, quant_algo="FP8", kv_cache_quant_algo="FP8")
    with pytest.raises(CatalogError, match=r"hf_quant_config.json.* 1 and 1; remove what is out of date"):
        llm_from_config(tmp_path)


def test_damaged_or_contradicting_quantisation_files_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "fp8"}})
    write_modelopt(tmp_path, quant_algo="FP8", kv_cache_quant_algo="FP8")
    with pytest.raises(
        CatalogError, match=r"1 byte\(s\) per weight and 2 per key, .*hf_quant_config.json.* 1 and 1"
    ):
        llm_from_config(tmp_path)
    for content, message in (
        ("[]", "found a list"),
        ("{}", "found None"),
        ('{"quantization": "fp8"}', "'fp8'"),
    ):
        (tmp_path / "hf_quant_config.json").write_text(content)
        with pytest.raises(CatalogError, match=f"hf_quant_config.json.*{message}"):
            llm_from_config(tmp_path)
    (tmp_path / "hf_quant_config.json").unlink()
    write_config(tmp_path, LLAMA)
    (tmp_path / "quantize_config.json").write_text('{"bits": 4}')
    with pytest.raises(CatalogError, match=r"quantize_config.json: not read; expected quantization_config"):
        llm_from_config(tmp_path)


def test_what_stands_beside_the_language_half_counts_for_it(tmp_path: Path) -> None:
    """A vision model's fp8 is said of the whole."""
    eyes = {"model_type": "llava", "text_config": LLAMA, "quantization_config": {"quant_method": "fp8"}}
    assert llm_from_config(write_config(tmp_path, eyes)).dtype_bytes == 1


def test_a_multi_query_config_has_one_kv_head(tmp_path: Path) -> None:
    """StarCoder: 40 layers, 48 heads of 128 that share one; 15.5e9 parameters; a token: 2 x 40 x 128 x 2."""
    starcoder = {
        "model_type": "gpt_bigcode",
        "n_layer": 40,
        "n_embd": 6144,
        "n_head": 48,
        "n_inner": 24576,
        "multi_query": True,
        "vocab_size": 49152,
        "n_positions": 8192,
        "tie_word_embeddings": True,
    }
    llm = llm_from_config(write_config(tmp_path, starcoder))
    assert llm.kv_bytes_per_token == 20_480
    assert llm.parameters == pytest.approx(15.5e9, rel=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, r"num_hidden_layers is missing; expected num_hidden_layers or n_layer"),
        ({"num_hidden_layers": 32_000}, r"num_hidden_layers: expected at most 1000 layers, found 32000"),
        ({"num_hidden_layers": "80"}, r"num_hidden_layers: expected a whole number > 0 .*found '80'"),
        ({"vocab_size": 0}, r"vocab_size: expected a whole number > 0 .*found 0"),
        ({"kv_lora_rank": 512}, r"qk_nope_head_dim is missing"),
        ({"n_shared_experts": 1}, r"n_shared_experts: of an LLM with experts, and this has none"),
        ({"interleave_moe_layer_step": 2}, r"interleave_moe_layer_step: of an LLM with experts"),
        ({"n_routed_experts": 64}, r"num_experts_per_tok is missing"),
        ({"first_k_dense_replace": 3}, r"first_k_dense_replace: of an LLM with experts"),
        ({"mlp_only_layers": [0, 5]}, r"mlp_only_layers: of an LLM with experts"),
        ({"decoder_sparse_step": 2}, r"decoder_sparse_step: of an LLM with experts"),
        ({"attn_layer_period": 8}, r"attn_layer_period: layers without attention"),
        (
            {"layer_types": ["full_attention", "conv"]},
            r"layer_types: 'conv' is not modelled; expected full_attention",
        ),
        ({"layer_types": [["conv"]]}, r"layer_types: \['conv'\] is not modelled; expected full_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, r"layer_types: 2 entries for 80 layers"),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 40},
            r"sliding_window is missing; expected sliding_window",
        ),
        ({"layer_types": ["full_attention", "linear_attention"] * 40}, r"linear_num_key_heads is missing"),
        ({"hidden_size_per_layer_input": 256}, r"hidden_size_per_layer_input: embeddings of each layer"),
        ({"hyper_expert_groups": 4}, r"hyper_expert_groups: not known \(llama\), and it may change"),
        ({"attn_type_list": [1, 0]}, r"attn_type_list: expected 1 for all layers, found \[0, 1\]"),
        (
            {"hybrid_override_pattern": "M*X"},
            r"hybrid_override_pattern: expected letters M \* E -, found 'X'",
        ),
        ({"vision_config": {"layers": 3}}, r"vision_config: expected depth or num_hidden_layers"),
        ({"audio_config": {"layers": 3}}, r"audio_config: its weights are not counted"),
        ({"num_kv_shared_layers": 10}, r"num_kv_shared_layers: layers that share keys and values"),
        ({"num_local_experts": 8}, r"num_experts_per_tok is missing"),
        ({"model_type": "lama"}, r"model_type: 'lama' is not one we know \(nearest: llama"),
        (
            {"torch_dtype": "int3"},
            r"torch_dtype: expected bfloat16, float16, float32 or float8, found 'int3'",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, r"config: bits: None is not modelled"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, r"config: bits: 3 is not modelled"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}},
            r"config: dynamic: bits that differ by module are not modelled",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 16}},
            r"group_size: expected 32 or more, found 16",
        ),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"'bitsandbytes' is not modelled"),
        (
            {"quantization_config": {"quant_method": "fp8", "ignore": ["re:(*"]}},
            r"ignore: 're:\(\*' is no regular expression",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {
                        "a": {"targets": ["re:(*"], "weights": {"num_bits": 8, "type": "float"}}
                    },
                }
            },
            r"config_groups: a: targets: 're:\(\*' is no regular expression",
        ),
        (
            {"vision_config": {"depth": 1, "hidden_size": 8, "deepstack_visual_indexes": 3}},
            r"deepstack_visual_indexes: expected a list, found 3",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "ignore": "lm_head"}},
            r"ignore: expected a list of names, found 'lm_head'",
        ),
        ({"quantization_config": "fp8"}, r"quantization_config: expected keys and values .* found 'fp8'"),
        ({"quantization_config": ["fp8"]}, r"quantization_config: expected keys and values"),
        ({"quantization_config": {}}, r"quantization_config: quant_method: None is not modelled"),
        ({"quantization_config": {"quant_method": "not_fp8_at_all"}}, r"'not_fp8_at_all' is not modelled"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4"}},
            r"quantization_config: quant_algo: 'W4A8_MXFP4' is not modelled",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 4}}},
            r"kv_cache_scheme: expected num_bits: 8",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "fp8",
                    "config_groups": {"0": {"weights": {"num_bits": 4, "type": "float"}}},
                }
            },
            r"config_groups: 0: weights: 'float' of 4 bits in groups of None are not modelled",
        ),
        ({"vocab_size": 2**70}, r"vocab_size: expected a whole number > 0 and at most"),
        ({"quantization": {"group_size": 64, "bits": 4}}, r"quantization: bits: 4 is not modelled"),
        (
            {
                "quantization_config": {
                    "quant_method": "modelopt",
                    "config_groups": {"0": FP8_GROUP, "1": {"weights": {"num_bits": 4, "type": "float"}}},
                }
            },
            r"config_groups: 1: weights: 'float' of 4 bits in groups of None are not modelled",
        ),
        ({"tie_word_embeddings": 1}, r"tie_word_embeddings: expected true or false, found 1"),
        ({"num_key_value_heads": 7}, r"64 heads do not share 7 KV heads"),
    ],
)
def test_a_config_we_cannot_use_says_why(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        llm_from_config(write_config(tmp_path, {**LLAMA, **change}))


def test_a_file_that_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"config.json: no such file"):
        llm_from_config(tmp_path)
    with pytest.raises(CatalogError, match=r"found a list"):
        llm_from_config(write_config(tmp_path, []))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(CatalogError, match=r"is not JSON"):
        llm_from_config(tmp_path)


def test_a_relative_path_names_the_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`llm: ./config.json` was named ".": manifests served that, and no other folder could read plan.yaml."""
    write_config(tmp_path, LLAMA)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for path in (Path(), Path("config.json"), Path("out/../config.json")):
        assert llm_from_config(path).name == str(tmp_path)
