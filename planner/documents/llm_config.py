"""The shape of an LLM out of a Hugging Face config.json; a shape that no formula describes is refused.

llm = llm_from_config(Path("checkpoints/mine"))      # the folder, or the file in it

A key of a structure that is not modelled is refused, and so is an unknown key whose name sounds like
structure, so that no LLM is read as another. An encoder of images (`vision_config`) counts by the parameters
of its matrices, without norms and biases, and is taken to be served in 16 bits. An LLM with an encoder of
sound is refused.
"""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.documents.llm_attention import (
    WORDING,
    attention_of,
    first_count,
    hidden_size,
    layer_count,
    layer_kinds,
)
from planner.documents.llm_feed_forward import feed_forward_of
from planner.documents.llm_formats import QUANTISED, Formats, read_config, read_formats
from planner.documents.llm_row import summarise_groups
from planner.errors import CatalogError
from planner.files.document_values import Section, check_rows, errors_as, refused_value
from planner.models.llm import WEIGHT_BYTES, FeedForward, GroupedAttention, LayerGroup, Llm

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Types of LLMs with tied embeddings whose config.json leaves tie_word_embeddings out.
_TIED = (
    *("opt", "bloom", "gpt2", "gemma", "gemma2", "gemma3_text", "gemma4_text", "cohere", "cohere2"),
    "starcoder2",
)
# Keys that configs of a type may leave out, with the defaults of that type's class in transformers.
# Checkpoints of Gemma 3 name only the keys whose values differ from these.
_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    }
}
_DRAFT_LAYER_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # See `_draft_parameters`.
# Encoders whose feed-forward blocks have three matrices.
_GATED_ENCODERS = ("gemma4_vision", "pixtral", "qwen2_5_vl")


def llm_from_config(path: Path) -> Llm:
    """The shape in a Hugging Face config.json, or in the folder that holds one.

    The config says how weights are quantised; after ModelOpt hf_quant_config.json beside it does. If all
    layers are alike, the LLM has no `groups`. Raises CatalogError for a missing key, a key of a structure
    that is not modelled, and an unknown format of weights.
    """
    file = path / "config.json" if path.is_dir() else path
    with errors_as(CatalogError):
        return _parse_config(file, read_config(file))


def may_be_on_hub(name: str) -> bool:
    """Whether this could be the name of a repository of huggingface.co, ORGANISATION/NAME."""
    return _HUB_NAME.fullmatch(name) is not None


def fetch_config(name: str) -> Path | None:
    """config.json of a checkpoint on huggingface.co, in the cache of the package huggingface_hub. None if
    that package is not installed, there is no network, or no such checkpoint may be read.
    """
    if not may_be_on_hub(name):
        return None
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        return None
    try:
        file = Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError):  # The package's errors of networks, names and access are of these types.
        return None
    # `llm_from_config` finds this second file beside the first. Most checkpoints have none.
    with contextlib.suppress(OSError, ValueError):
        hf_hub_download(name, "hf_quant_config.json")
    return file


def _parse_config(file: Path, config: dict[str, Any]) -> Llm:
    """The LLM of a config.json. Raises CatalogError for a key that no formula describes."""
    where, language = str(file), _language_config(config)
    formats = read_formats(file, language)
    refuse_unmodelled(language, where)
    shape = Section.from_document(language, where, wording=WORDING)
    hidden = hidden_size(shape)
    groups = _group_layers(shape, formats)
    # A whole path: plans and manifests are read in other folders than this one.
    name = os.path.normpath((file.parent if file.name == "config.json" else file).absolute())
    fields: dict[str, Any] = {
        "name": name,
        "hidden": hidden,
        "vocab": first_count(shape, "vocab_size"),
        "context_tokens": first_count(
            shape, "max_position_embeddings", "seq_length", "n_positions", "max_seq_len", "model_max_length"
        ),
        "tied_embeddings": shape.flag("tie_word_embeddings", str(shape.get("model_type", "")) in _TIED),
        "kv_dtype_bytes": formats.kv_dtype_bytes,
        "encoder_parameters": encoder_parameters(config, where, hidden),
        "draft_parameters": _draft_parameters(shape, groups, hidden),
    }
    if layer_fields := _fields_if_uniform(groups, formats):
        return Llm(**fields, **layer_fields)
    return Llm(**fields, **summarise_groups(groups, hidden, where), head_weights=formats.head)


def _language_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model: `text_config` for an LLM that also reads images, else all of it.
    Keys for quantisation and tied embeddings that `text_config` lacks are taken from the whole.
    """
    text_model = config.get("text_config")
    if not isinstance(text_model, dict) or "num_hidden_layers" in config:
        return config
    keys = (*QUANTISED, "torch_dtype", "dtype", "tie_word_embeddings")
    left_out = _LEFT_OUT.get(str(text_model.get("model_type", "")), {})
    return {key: config[key] for key in keys if key in config} | {**left_out, **text_model}


def _group_layers(shape: Section, formats: Formats) -> tuple[LayerGroup, ...]:
    """The layers, as groups of equal ones in the order of their first layer."""
    layers = layer_count(shape)
    counts: Counter[tuple[Any, Any]] = Counter()
    for layer, kind in enumerate(layer_kinds(shape, layers)):
        attention = attention_of(shape, layer, kind, formats)
        counts[attention, feed_forward_of(shape, layer, formats)] += 1
    return tuple(LayerGroup(count, attention, block) for (attention, block), count in counts.items())


def _fields_if_uniform(groups: tuple[LayerGroup, ...], formats: Formats) -> dict[str, Any] | None:
    """The fields of an LLM whose layers are all alike and need no `groups`; None for others."""
    attention, block = groups[0].attention, groups[0].feed_forward
    if len(groups) > 1 or not isinstance(attention, GroupedAttention) or block is None:
        return None
    weights = block.weights
    # Attention that `heads`, `kv_heads` and `head_dim` of Llm describe in full.
    plain = GroupedAttention(
        attention.heads, attention.kv_heads, attention.head_dim, attention.head_dim, weights=weights
    )
    is_plain_block = not (block.shared_width or block.inner)
    if attention != plain or not is_plain_block or formats.head != "bf16":
        return None
    return {
        "layers": groups[0].count,
        "gated_ffn": block.is_gated,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "ffn": block.width,
        "experts": block.experts,
        "experts_per_token": block.experts_per_token,
        "weights": weights,
        "dtype_bytes": WEIGHT_BYTES[weights],
    }


def _draft_parameters(shape: Section, groups: tuple[LayerGroup, ...], hidden: int) -> float:
    """Parameters of the layers that predict further tokens. Each such layer has the largest attention and the
    largest feed-forward block of the LLM, and a matrix that joins the embedding of a token with the LLM's
    output for the token before.
    """
    layers = next((shape.whole_number(key) for key in _DRAFT_LAYER_KEYS if shape.get(key)), 0)
    if not layers:
        return 0.0
    attention = max(group.attention.parameters(hidden) for group in groups if group.attention is not None)
    block = max((_all_parameters(group.feed_forward, hidden) for group in groups), default=0.0)
    joining = 2 * hidden * hidden  # A matrix whose two inputs are `hidden` wide each.
    return layers * (attention + block + joining)


def _all_parameters(block: FeedForward | None, hidden: int) -> float:
    """The parameters of a feed-forward block with all of its experts, also those that a token leaves out."""
    if block is None:
        return 0.0
    return block.experts * block.expert_parameters(hidden) + block.shared_parameters(hidden)


def encoder_parameters(config: Mapping[str, Any], where: str, text_hidden: int) -> float:
    """Parameters of encoder and projector to `text_hidden`, 0 without. Unknown keys: CatalogError."""
    if config.get("audio_config"):
        raise CatalogError(
            f"{where}: audio_config: its weights are not counted yet; describe the LLM in a llms.yaml of "
            "your own with encoder_parameters"
        )
    vision = config.get("vision_config")
    if not vision:
        return 0.0
    if not isinstance(vision, dict):
        raise refused_value(f"{where}: vision_config", "expected keys and values", vision)
    shape = Section.from_document(vision, f"{where}: vision_config", wording=WORDING)
    if not any(key in shape for key in ("depth", "vt_num_hidden_layers", "num_hidden_layers")):
        raise CatalogError(
            f"{shape.where}: expected depth or num_hidden_layers, hidden_size and intermediate_size; "
            "describe the LLM in a llms.yaml of your own with encoder_parameters"
        )
    hidden = first_count(shape, "vt_hidden_size", "hidden_size")
    width = first_count(shape, "qkv_hidden_size", default=hidden)
    ffn = first_count(shape, "vt_intermediate_size", "intermediate_size", default=4 * hidden)
    layers = first_count(shape, "vt_num_hidden_layers", "depth", "num_hidden_layers")
    is_gated = str(shape.get("model_type", "")) in _GATED_ENCODERS
    attention_parameters = 4 * hidden * width  # The matrices for queries, keys, values and outputs.
    ffn_parameters = (3 if is_gated else 2) * hidden * ffn
    block_parameters = layers * (attention_parameters + ffn_parameters)
    pixel_values = (  # The pixels of one patch in all colours.
        first_count(shape, "in_channels", "num_channels", default=3)
        * shape.whole_number("patch_size", 14) ** 2
    )
    frames = shape.whole_number(
        "temporal_patch_size", _compression_config(shape).whole_number("temporal_patch_size", 1)
    )
    patch_parameters = pixel_values * frames * hidden
    return float(
        block_parameters
        + patch_parameters
        + _positions_size(shape, hidden)
        + _projector_size(shape, hidden, text_hidden)
    )


def _positions_size(shape: Section, hidden: int) -> int:
    """How many parameters an image encoder's learned position embeddings have."""
    if "position_embedding_size" in shape:
        # One table for rows and one for columns.
        return 2 * shape.whole_number("position_embedding_size") * hidden
    if "init_pos_emb_height" in shape:
        return shape.whole_number("init_pos_emb_height") * shape.whole_number("init_pos_emb_width") * hidden
    return first_count(shape, "num_position_embeddings", default=0) * hidden


def _projector_size(shape: Section, hidden: int, text_hidden: int) -> int:
    """Parameters of the projector, which merges patches and brings them to the LLM's `text_hidden`."""
    family = str(shape.get("model_type", ""))
    if family.startswith("gemma"):
        return hidden * text_hidden
    if family.startswith("llama4"):  # The defaults are those of transformers.
        # This many patches become one token.
        merged_patches = round(1 / shape.number("pixel_shuffle_ratio", 0.5, above=0)) ** 2
        inner = shape.whole_number("projector_input_dim", 4096)
        out = shape.whole_number("projector_output_dim", 4096)
        return hidden * merged_patches * inner + inner * out + out * text_hidden
    if "projection_dim" in shape:  # MiniMax-M3 first projects to the LLM's width and merges patches there.
        width = shape.whole_number("projection_dim")
        projection = hidden * width + width * width
        return projection + _patches_per_token(shape) * width * width + width * width
    merged = _patches_per_token(shape) * hidden
    indices = check_rows(shape.get("deepstack_visual_indexes", []), shape.path_of("deepstack_visual_indexes"))
    # Each deepstack index has a merger of its own.
    merger = merged * merged + merged * first_count(shape, "out_hidden_size", default=text_hidden)
    return merger * (1 + len(indices))


def _patches_per_token(shape: Section) -> int:
    """How many patches become one token."""
    if isinstance(kernel := shape.get("merge_kernel_size"), list) and len(kernel) == 2:
        return int(kernel[0] * kernel[1])
    side = _compression_config(shape).whole_number("spatial_merge_size", 1)
    return int(shape.whole_number("spatial_merge_size", side) ** 2)


def _compression_config(shape: Section) -> Section:
    """The section that says how patches are merged into tokens; empty where the config has none."""
    return shape.subsection("img_token_compression_config")


# Structures that no formula of planner/models describes -> the keys of config.json that turn them on.
UNMODELLED = {
    "some layers without experts": ("expert_layer_period", "moe_layer_start_index"),
    "layers without attention": ("attn_layer_period", "ssm_cfg", "conv_L_cache"),
    "layers that share keys and values": ("num_kv_shared_layers", "cla_share_factor"),
    "embeddings of each layer": ("hidden_size_per_layer_input",),
}
# An unknown key with one of these words in its name may change the structure of the LLM.
_STRUCTURE_WORDS = re.compile(
    r"layer|expert|moe|head|kv|attn|attention|mamba|ssm|conv|lora|rank|dim|size|intermediate|width|shared|window"
    r"|interval|period|pattern|freq|block|mlp|ffn|index|latent|compress|ratio|group|ngram|altup|laurel|loop|depth"
    r"|stride|chunk|per_tok"
)
# Keys that this module and its helpers read.
_READ = """
    attention_chunk_size attention_head_dim attention_k_eq_v attention_other_setting
    attention_output_gate attn_output_gate block_configs compress_ratios conv_kernel decoder_sparse_step
    dense_intermediate_size enable_moe_block experts_per_token ffn_dim ffn_hidden_size
    first_k_dense_replace full_attention_interval global_head_dim head_dim hidden_size
    hybrid_layer_pattern hybrid_override_pattern index_head_dim index_n_heads index_skip_topk_offset
    index_topk index_topk_freq index_topk_pattern indexer_types interleave_moe_layer_step
    intermediate_size intermediate_size_mlp kv_channels kv_lora_rank layer_types layers_block_type
    linear_attn_config linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
    linear_num_value_heads linear_value_head_dim mamba_d_conv mamba_d_state mamba_head_dim
    mamba_n_groups mamba_num_heads mamba_ssm_cache_dtype mamba_ssm_dtype mla_use_output_gate
    mlp_layer_types mlp_only_layers moe_intermediate_size moe_latent_size moe_layer_freq
    moe_layer_interval moe_layers moe_layers_enum moe_num_experts moe_shared_expert_intermediate_size
    moe_top_k multi_query n_embd n_embed n_group n_groups n_head n_inner n_layer n_routed_experts
    n_shared_experts no_rope_layers num_attention_groups num_attention_heads num_experts
    num_experts_per_tok num_experts_per_token num_global_key_value_heads num_heads num_hidden_layers
    num_key_value_heads num_layers num_local_experts num_nextn_predict_layers num_shared_experts
    o_groups o_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim routed_expert_hidden_size
    share_expert_dim shared_expert_intermediate_size shared_intermediate_size sliding_window
    sliding_window_pattern sparse_attention_config ssm_state_size swa_head_dim swa_num_attention_heads
    swa_num_key_value_heads swa_v_head_dim top_k_experts use_sliding_window v_head_dim vocab_size
""".split()
# Keys with a structure word in their name that do not change the structure.
_HARMLESS = """
    add_cross_attention attention_layers attention_types apply_residual_connection_post_layernorm
    attention_multiplier attention_softmax_in_fp32 attention_value_scale attn_res_block_size attn_scale
    attn_temperature_tuning chunk_size chunk_size_feed_forward clip_qkv compress_rope_theta
    do_layer_norm_before ep_size expand hc_mult head_init_scale index_block_size index_local_blocks
    index_share_for_mtp_iteration index_topk_blocks indexer_rope_interleave initializer_range
    layer_norm_elementwise_affine layerdrop max_window_layers model_max_length moe_capacity_factor
    moe_renormalize moe_router_activation_func moe_router_scaling_factor moe_router_load_balancing_type
    moe_shared_expert_overlap mscale_all_dim n_positions no_rope_layer_interval num_beam_groups
    num_expert_group num_hash_layers partial_rotary_factor qk_head_dim qk_layernorm
    query_pre_attn_scalar reorder_and_upcast_attn rescale_prenorm_residual rotary_dim
    routed_scaling_factor scale_attention_softmax_in_fp32 scale_attn_by_inverse_layer_idx
    scale_attn_weights sliding_window_size swa_rope_theta time_step_rank token_type_vocab_size
    topk_group type_vocab_size use_bidirectional_attention use_grouped_topk use_mamba_kernels
    vocab_size_per_layer_input window_size word_embed_proj_dim _attn_implementation
    _attn_implementation_autoset
""".split()
# Keys of training, of precision, or of layers for speculative decoding.
_HARMLESS_PATTERN = re.compile(
    r"^mtp_|^num_mtp|^_|^output_|^use_.*(bias|norm)$|dropout|_pdrop|bias$|_norm|norm_|_eps|_act$|_dtype$|softcap"
    r"|aux_loss|_loss_|jitter|token_i|rope|no_repeat_ngram|pruned|cross_attention_hidden|ring_|quant"
)
_KNOWN = frozenset((*_READ, *_HARMLESS))


def refuse_unmodelled(config: Mapping[str, Any], where: str) -> None:
    """Raise CatalogError for the first key that is, or may be, of a structure that no formula describes."""
    family = config.get("model_type", "")
    for what, keys in UNMODELLED.items():
        for key in keys:
            if config.get(key):
                raise CatalogError(
                    f"{where}: {key}: {what} ({family}): not modelled; nearest: a row of an LLM like it in a "
                    "llms.yaml"
                )
    types = config.get("attn_type_list")  # A key of MiniMax: 1 is softmax attention, 0 linear attention.
    if types and set(types) != {1}:
        raise CatalogError(f"{where}: attn_type_list: expected 1 for all layers, found {sorted(set(types))}")
    for key, value in config.items():
        if key == "attn_type_list" or key in _KNOWN or not value or not _STRUCTURE_WORDS.search(key):
            continue
        if not _HARMLESS_PATTERN.search(key):
            raise CatalogError(
                f"{where}: {key}: not known ({family}), and it may change the structure of the LLM; expected "
                "a config without it, or describe the LLM in a llms.yaml of your own"
            )
