"""The shape of an LLM out of a Hugging Face config.json, refused where our formulas do not describe it.

llm = llm_from_config(Path("checkpoints/mine"))      # the folder, or the file in it
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import CatalogError, InputError
from planner.io.files import open_input
from planner.io.values import MOST, Section, Wording, errors_as, nearest
from planner.models.llm import Llm

Config = Mapping[str, Any]
MAX_CONFIG_BYTES = 4 * 2**20
_COUNT = f"expected a whole number > 0 and at most {MOST}"
WORDING = Wording(whole=_COUNT, most=_COUNT)


def llm_from_config(path: Path) -> Llm:
    """The shape in a Hugging Face config.json, or in the folder that holds one.

    Raises CatalogError for a key that is missing and for what our formulas do not describe: `_UNMODELLED`,
    layers that are not alike, weights of other than 16 bits or fp8. How weights are quantised stands in the
    config or, as ModelOpt leaves it, in hf_quant_config.json beside it. With fp8 weights the KV cache stays
    16 bits wide, as vLLM keeps it with --kv-cache-dtype auto, unless the checkpoint says otherwise. A window
    of attention is not used: keys and values are counted as if every layer looked at all tokens.
    """
    file = path / "config.json" if path.is_dir() else path
    with errors_as(CatalogError):
        return _llm(file, _read_config(file))


def _llm(file: Path, config: dict[str, Any]) -> Llm:
    where = str(file)
    if "num_hidden_layers" not in config and isinstance(config.get("text_config"), dict):
        # an LLM with eyes: its language half, quantised as the whole where it does not say
        whole = {key: config[key] for key in (*_QUANTISED, "torch_dtype", "dtype") if key in config}
        config = whole | config["text_config"]
    weights, kv_dtype_bytes = _formats(file, config)
    kind = str(config.get("model_type", ""))
    if found := _unmodelled(config):
        key, what = found
        raise CatalogError(
            f"{where}: {key}: {what} ({kind}): not modelled; nearest: a row of an LLM like it in a llms.yaml"
        )
    shape = Section.of(config, where, wording=WORDING)
    hidden = _count(shape, "hidden_size", "n_embed", "n_embd", "d_model")
    heads = _count(shape, "num_attention_heads", "n_head", "num_heads")
    experts = _count(
        shape, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", default=1
    )
    ffn_keys: tuple[str, ...] = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    if experts > 1 and config.get("moe_intermediate_size"):
        ffn_keys = ("moe_intermediate_size",)
    ffn = _count(shape, *ffn_keys, default=4 * hidden if kind in _FFN_4X else None)
    head_dim = _count(shape, "head_dim", "kv_channels", default=hidden // heads)
    return Llm(
        name=str(file.parent if file.name == "config.json" else file),
        layers=_count(shape, "num_hidden_layers", "n_layer", "num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(
            shape, "num_key_value_heads", default=1 if config.get("multi_query") is True else heads
        ),
        head_dim=head_dim,
        ffn=ffn // 2 if kind == "qwen" else ffn,  # the first Qwen stores gate and up as one width
        vocab=_count(shape, "vocab_size"),
        context_tokens=_count(shape, "max_position_embeddings", "seq_length", "n_positions", "max_seq_len"),
        dtype_bytes=_BYTES[weights],
        gated_ffn=_config_is_gated(config, kind, where),
        tied_embeddings=shape.flag("tie_word_embeddings", kind in _TIED),
        experts=experts,
        experts_per_token=_count(
            shape, "num_experts_per_tok", "num_experts_per_token", default=None if experts > 1 else 1
        ),
        kv_dtype_bytes=kv_dtype_bytes,
        weights=weights,
    )


_UNMODELLED = {
    "latent attention": ("kv_lora_rank",),
    "shared experts": (
        "shared_expert_intermediate_size",
        "n_shared_experts",
        "num_shared_experts",
        "num_shared_expert",
        "moe_num_shared_experts",
        "shared_intermediate_size",
        "interleave_moe_layer_step",
    ),
    "some layers without experts": ("first_k_dense_replace", "mlp_only_layers", "expert_layer_period"),
    "layers without attention": (
        "attn_layer_period",
        "full_attention_interval",
        "hybrid_override_pattern",
        "linear_num_key_heads",
        "mamba_d_state",
        "ssm_cfg",
        "ssm_state_size",
    ),
    "layers that share keys and values": ("num_kv_shared_layers", "cla_share_factor"),
}
_QUANTISED = ("quantization_config", "compression_config", "quantization")
MODELOPT_FILE = "hf_quant_config.json"
_OTHER_FILES = ("quantize_config.json", "quant_config.json")  # of GPTQ and AWQ
_GROUPED_METHODS = ("compressed-tensors", "modelopt", "none")  # the groups say what weights are
_FP8_METHODS = ("fp8", "fbgemm_fp8", "ptpc_fp8")
_FP8_ALGORITHMS = {  # of ModelOpt
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8-block",
    "FP8_PB": "fp8-block",
}
_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8-block": 1.0}  # of a weight
_EVERY_LAYER = ("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval")  # 1: each has experts
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_FFN_4X = ("bloom", "gpt2")  # leave the width out: it is four times hidden
_UNGATED = ("opt", "bloom", "gpt2", "gpt_neox", "gptj", "gpt_neo", "phi", "gpt_bigcode", "starcoder2")
_GATED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "phi3",
    "olmo",
    "olmo2",
    "granite",
    "internlm2",
    "stablelm",
    "cohere",
)
_TIED = ("opt", "bloom", "gpt2", "gemma", "gemma2", "cohere", "starcoder2")  # where config.json leaves it out


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with open_input(path) as stream:
            raw = stream.read(MAX_CONFIG_BYTES + 1)
        config = json.loads(raw[:MAX_CONFIG_BYTES].decode("utf-8-sig"))
    except InputError as error:
        raise CatalogError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{path}: is not JSON ({error}); expected a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise CatalogError(f"{path}: expected a Hugging Face config.json, found a {type(config).__name__}")
    return config


def _count(shape: Section, *keys: str, default: int | None = None) -> int:
    """Of the first of these names that the config has."""
    for key in keys:
        if key in shape:
            return shape.whole(key)
    if default is None:
        raise InputError(
            f"{shape.at(keys[0])} is missing; expected {' or '.join(keys)} in a Hugging Face config.json"
        )
    return default


def _config_is_gated(config: Config, kind: str, where: str) -> bool:
    if kind in _GATED or kind in _UNGATED:
        return kind in _GATED
    if "silu" in str(config.get("hidden_act", "")):
        return True  # SwiGLU in every LLM we know of
    raise CatalogError(
        f"{where}: model_type: {kind!r} is not one we know (nearest: "
        f"{', '.join(nearest(kind, (*_GATED, *_UNGATED))) or 'none'}); describe it in a llms.yaml of your own"
    )


def _unmodelled(config: Config) -> tuple[str, str] | None:
    """The first key that speaks of something our formulas do not describe, and what that is."""
    for what, keys in _UNMODELLED.items():
        for key in keys:
            if config.get(key):
                return key, what
    for key in _EVERY_LAYER:
        if config.get(key, 1) not in (None, 1):
            return key, "some layers without experts"
    kinds = config.get("layer_types")
    strange = [kind for kind in kinds if kind not in _ATTENTION] if isinstance(kinds, list) else []
    return ("layer_types", f"layers without attention, {strange[0]!r} among them") if strange else None


def _formats(file: Path, config: Config) -> tuple[str, float]:
    """`Llm.weights`, and bytes of a key. As vLLM serves them: float32 checkpoints run in 16 bits."""
    said = [
        (f"{file}: {key}", _quantised(config[key], f"{file}: {key}"))
        for key in _QUANTISED
        if config.get(key) is not None
    ]
    if file.name == "config.json":
        if (modelopt := file.with_name(MODELOPT_FILE)).exists():
            section = _read_config(modelopt).get("quantization")
            where = f"{modelopt}: quantization"
            said.append((where, _quantised(section, where)))
        for name in _OTHER_FILES:
            if not said and file.with_name(name).exists():
                raise CatalogError(f"{file.with_name(name)}: such weights are not modelled; {_INSTEAD}")
    if len({(_BYTES[weights or "bf16"], kv) for _, (weights, kv) in said}) > 1:
        (one, (a, kv_a)), (other, (b, kv_b)) = said[:2]
        raise CatalogError(
            f"{one} counts {_BYTES[a or 'bf16']:g} byte(s) per weight and {kv_a:g} per key, "
            f"{other} {_BYTES[b or 'bf16']:g} and {kv_b:g}; remove what is out of date"
        )
    weights, kv_dtype_bytes = said[0][1] if said else (None, 2.0)
    if weights is not None:
        return weights, kv_dtype_bytes
    dtype = _config_dtype(config)
    if dtype in ("float16", "bfloat16", "half", "float32", "float"):
        return "bf16", kv_dtype_bytes
    if dtype.startswith("float8"):
        return "fp8", kv_dtype_bytes
    raise CatalogError(f"{file}: torch_dtype: expected bfloat16, float16, float32 or float8, found {dtype!r}")


_INSTEAD = (
    "expected fp8 or 16 bits: name such a checkpoint, or describe this one in a llms.yaml of your own with "
    "its dtype_bytes"
)


def _quantised(section: object, where: str) -> tuple[str | None, float]:
    """`Llm.weights` (None: not quantised) and bytes of a key, as Hugging Face or ModelOpt write it down."""
    if isinstance(section, dict) and isinstance(section.get("quantization"), dict):
        where, section = f"{where}: quantization", section["quantization"]
    if not isinstance(section, dict):
        raise CatalogError(
            f"{where}: expected keys and values such as quant_method: fp8, found {section!r:.80}"
        )
    kv_dtype_bytes = _kv_bytes(section, where)
    method, algorithm = section.get("quant_method"), section.get("quant_algo")
    if algorithm is not None:
        if str(algorithm).upper() not in _FP8_ALGORITHMS:
            raise CatalogError(f"{where}: quant_algo: {algorithm!r} is not modelled; {_INSTEAD}")
        return _FP8_ALGORITHMS[str(algorithm).upper()], kv_dtype_bytes
    if section.get("config_groups"):
        if _has_fp8_groups(section) and str(method).lower() in (*_FP8_METHODS, *_GROUPED_METHODS):
            return "fp8-block" if _has_blocks(section) else "fp8", kv_dtype_bytes
    elif str(method).lower() in _FP8_METHODS:
        return "fp8-block" if section.get("weight_block_size") else "fp8", kv_dtype_bytes
    if method is None and "quant_algo" in section and not section.get("config_groups"):
        return None, kv_dtype_bytes  # ModelOpt, of keys and values alone
    name = "bits" if method is None and "bits" in section else "quant_method"
    raise CatalogError(f"{where}: {name}: {section.get(name)!r} is not modelled; {_INSTEAD}")


def _kv_bytes(section: Config, where: str) -> float:
    """Of a key: as compressed-tensors write it (`kv_cache_scheme: {num_bits: 8, ...}`) or as ModelOpt does
    (`kv_cache_quant_algo: FP8`, or the scheme); vLLM follows both, and keeps 16 bits without either.
    """
    scheme, algorithm = section.get("kv_cache_scheme"), section.get("kv_cache_quant_algo")
    if algorithm is not None and str(algorithm).upper() != "FP8":
        raise CatalogError(
            f"{where}: kv_cache_quant_algo: {algorithm!r} is not modelled; expected FP8, or none for 16 bits"
        )
    if scheme is None:
        return 2.0 if algorithm is None else 1.0
    bits = scheme.get("num_bits") if isinstance(scheme, dict) else None
    if bits != 8 or isinstance(bits, bool) or (isinstance(scheme, dict) and scheme.get("type") == "int"):
        raise CatalogError(
            f"{where}: kv_cache_scheme: expected num_bits: 8 of floats, or none for 16 bits, found "
            f"{scheme!r:.80}"
        )
    return 1.0


def _has_fp8_groups(quantised: Config) -> bool:
    """Whether all weights are of 8 bits and floats, as compressed-tensors and ModelOpt say it."""
    weights = _groups(quantised)
    return bool(weights) and all(
        each.get("num_bits") == 8 and each.get("type") == "float" for each in weights
    )


def _has_blocks(quantised: Config) -> bool:
    return any(each.get("strategy") == "block" for each in _groups(quantised))


def _groups(quantised: Config) -> list[Config]:
    """What the groups say of their weights; of a group that says nothing, nothing."""
    groups = quantised.get("config_groups")
    said = [
        group.get("weights") if isinstance(group, dict) else None
        for group in (groups.values() if isinstance(groups, dict) else ())
    ]
    return [each if isinstance(each, dict) else {} for each in said]


def _config_dtype(config: Config) -> str:
    return str(config.get("torch_dtype", config.get("dtype")) or "bfloat16").removeprefix("torch.")
