"""Reads the feed-forward block of each layer from a config.json: one dense block, or several experts, a few
of which serve each token. `shape` is the part of config.json that describes the text model.
"""

import math

from planner.documents.llm_attention import (
    BLOCKS,
    block_config,
    block_pattern,
    first_count,
    hidden_size,
    layer_count,
)
from planner.documents.llm_formats import Formats
from planner.errors import CatalogError
from planner.files.document_values import Section, nearest_names
from planner.models.llm import FeedForward

# The keys that a config.json may have for the width of a block, the number of experts, ...; the first key
# that is there counts.
_WIDTH_KEYS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_top_k",
)
_INTERVAL_KEYS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "moe_layer_freq")
_EXPERT_KEYS = (  # An LLM without experts must not have these.
    "n_shared_experts",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
    "moe_intermediate_size",
    *_INTERVAL_KEYS,
    "first_k_dense_replace",
    "mlp_only_layers",
)
# The next three list values of `model_type`. LLMs of _FOUR_TIMES_HIDDEN leave the width of their blocks out
# of config.json; it is four times the hidden size.
_FOUR_TIMES_HIDDEN = ("bloom", "gpt2")
# Blocks of LLMs of _UNGATED have two matrices, those of _GATED three (`is_gated`).
_UNGATED = (
    *("opt", "bloom", "gpt2", "gpt_neox", "gptj", "gpt_neo", "phi", "gpt_bigcode", "starcoder2"),
    "nemotron",
)
_GATED = (
    *("llama", "mistral", "mixtral", "qwen", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma"),
    *("gemma2", "gemma3_text", "gemma4_text", "phi3", "olmo", "olmo2", "granite", "internlm2"),
    *("stablelm", "cohere", "cohere2", "gpt_oss", "deepseek_ref", "step3p7", "step3p5"),
)
_GATED_ACTIVATIONS = ("silu", "swiglu", "situ")  # Every LLM in our tests with one of these has gates.
# Checkpoints name the block's matrices "layers.3.PARENT.gate_proj".
_PARENTS = ("mlp", "block_sparse_moe", "ffn", "feed_forward", "mixer", "moe")
_NEMOTRON_MULTIPLE = 256  # Llama-Nemotron's widths are rounded up to a multiple of this.


def expert_count(shape: Section) -> int:
    """Routed experts of a layer; 1 for an LLM without, which must have no key that only experts need."""
    experts = first_count(shape, *_COUNT_KEYS, default=1)
    if "enable_moe_block" in shape and not shape.flag("enable_moe_block"):
        experts = 1
    if experts == 1:
        for key in _EXPERT_KEYS:
            # An interval of 1 is the default, which LLMs without experts write too.
            if shape.get(key) and (key not in _INTERVAL_KEYS or shape.get(key) != 1):
                raise CatalogError(
                    f"{shape.path_of(key)}: of an LLM with experts, and this has none; expected one of "
                    f"{', '.join(_COUNT_KEYS)} beside it"
                )
    return experts


def is_gated(shape: Section) -> bool:
    """Whether a block has a gate, so three matrices, not two. Raises CatalogError if nothing tells."""
    family = str(shape.get("model_type", ""))
    if family == "nemotron_h":
        return False
    if family in _GATED or family in _UNGATED:
        return family in _GATED
    if any(activation in str(shape.get("hidden_act", "")) for activation in _GATED_ACTIVATIONS):
        return True
    raise CatalogError(
        f"{shape.path_of('model_type')}: {family!r} is not one we know (nearest: "
        f"{', '.join(nearest_names(family, (*_GATED, *_UNGATED))) or 'none'}); describe it in a "
        "llms.yaml of your own"
    )


def feed_forward_of(shape: Section, layer: int, formats: Formats) -> FeedForward | None:
    """The feed-forward block of a layer; None for a layer without one. Raises CatalogError for a block that
    is not modelled. `formats` are the number formats of the LLM's weights.
    """
    family = str(shape.get("model_type", ""))
    hidden = hidden_size(shape)
    if "block_configs" in shape:
        return _nemotron_block(shape, layer, hidden, formats)
    has_experts = expert_count(shape) > 1
    if pattern := block_pattern(shape, layer_count(shape)):
        block = BLOCKS[pattern[layer]][1]
        if block is None:
            return None
        has_experts = block == "experts"
    elif has_experts:
        has_experts = _has_experts(shape, layer)
    if has_experts:
        return _parse_experts(shape, layer, formats)
    # In an LLM with experts _WIDTH_KEYS may have the width of an expert, and these two that of a dense block.
    dense_keys = ("intermediate_size_mlp", "dense_intermediate_size") if expert_count(shape) > 1 else ()
    default = 4 * hidden if family in _FOUR_TIMES_HIDDEN else None
    width = first_count(shape, *dense_keys, *_WIDTH_KEYS, default=default)
    if family == "qwen":
        width //= 2  # The first Qwen stores gate and up as one width.
    return FeedForward(width, is_gated(shape), weights=_dense_format(shape, layer, formats))


def _nemotron_block(shape: Section, layer: int, hidden: int, formats: Formats) -> FeedForward | None:
    """The feed-forward block of a layer of Llama-Nemotron. The layer states the width, or a factor
    `ffn_mult`: then the width is 2/3 × ffn_mult × hidden, rounded up to a multiple of _NEMOTRON_MULTIPLE.
    """
    block = block_config(shape, layer, "ffn")
    for key in ("replace_with_linear", "sparsify", "moe"):
        if block.get(key):
            raise block.refused(key, "is not modelled; expected none", block.get(key))
    if block.flag("no_op", False):
        return None
    if "ffn_mult" in block:
        unrounded = int(2 * block.number("ffn_mult", above=0) * hidden / 3)
        width = math.ceil(unrounded / _NEMOTRON_MULTIPLE) * _NEMOTRON_MULTIPLE
    else:
        width = first_count(block, "intermediate_size")
    return FeedForward(width, is_gated(shape), weights=_dense_format(shape, layer, formats))


def _has_experts(shape: Section, layer: int) -> bool:
    """Whether this layer of an LLM with experts has experts. A list with an entry per layer decides alone;
    without one, any of several keys may make the layer dense. Raises CatalogError for unknown values.
    """
    layers = layer_count(shape)
    for key in ("mlp_layer_types", "moe_layer_freq"):
        listed = shape.get(key)
        if not isinstance(listed, list):
            continue
        if len(listed) != layers:
            raise CatalogError(f"{shape.path_of(key)}: {len(listed)} entries for {layers} layers")
        if listed[layer] not in ("dense", "sparse", 0, 1):
            raise shape.refused(key, "expected dense and sparse, or 0 and 1", listed[layer])
        return listed[layer] in ("sparse", 1)
    if layer < shape.whole_number("first_k_dense_replace", 0, least=0):
        return False
    dense_layers = shape.get("mlp_only_layers", [])
    if not isinstance(dense_layers, list):
        raise shape.refused("mlp_only_layers", "expected a list of layers", dense_layers)
    if layer in dense_layers:
        return False
    if "moe_layers_enum" in shape:  # Step's LLMs list the layers with experts as text: "3,4,5".
        return str(layer) in shape.text("moe_layers_enum").replace(" ", "").split(",")
    if isinstance(listed := shape.get("moe_layers"), list):
        return layer in listed
    # moe_layer_freq counts layers from 0, the other intervals from 1.
    if layer % shape.whole_number("moe_layer_freq", 1):
        return False
    other_intervals = (key for key in _INTERVAL_KEYS if key != "moe_layer_freq")
    return all((layer + 1) % shape.whole_number(key, 1) == 0 for key in other_intervals)


def _parse_experts(shape: Section, layer: int, formats: Formats) -> FeedForward:
    """The block of a layer with experts: the routed ones, and those that all tokens share."""
    shared_width = _shared_width(shape)
    latent_size = first_count(shape, "moe_latent_size", "routed_expert_hidden_size", default=0)
    return FeedForward(
        width=first_count(shape, "moe_intermediate_size", *_WIDTH_KEYS),
        is_gated=is_gated(shape),
        experts=expert_count(shape),
        experts_per_token=first_count(shape, *_PER_TOKEN_KEYS),
        shared_width=shared_width,
        inner=latent_size or None,
        weights=_experts_format(shape, layer, formats),
        shared_weights=_shared_format(shape, layer, formats) if shared_width or latent_size else "bf16",
    )


def _shared_width(shape: Section) -> int:
    """The width of all shared experts together; 0 without any."""
    family = str(shape.get("model_type", ""))
    # In Gemma 4 and Llama 4 one dense block stands beside the experts; it counts as a shared expert.
    if family.startswith(("gemma4", "llama4")):
        return first_count(shape, *_WIDTH_KEYS)
    if shape.get("shared_expert_intermediate_size"):
        return shape.whole_number("shared_expert_intermediate_size")
    count = shape.whole_number(
        "n_shared_experts", shape.whole_number("num_shared_experts", 0, least=0), least=0
    )
    if shape.get("shared_intermediate_size"):
        return max(count, 1) * shape.whole_number("shared_intermediate_size")
    if not count:
        return shape.whole_number("share_expert_dim", 0, least=0)
    width = first_count(
        shape, "moe_shared_expert_intermediate_size", "share_expert_dim", "moe_intermediate_size"
    )
    return count * width


def _dense_format(shape: Section, layer: int, formats: Formats, prefixes: tuple[str, ...] = ("",)) -> str:
    """The one format of a dense block's matrices, whose names may have `prefixes`; else CatalogError."""
    blocks = [f"layers.{layer}.{parent}.{prefix}" for parent in _PARENTS for prefix in prefixes]
    # The names that checkpoints give to each of the three matrices; gate and up may be stored as one.
    matrices = (("gate_proj", "gate_up_proj", "up_proj"), ("up_proj", "gate_up_proj"), ("down_proj",))
    formats_of_matrices = {
        formats.format_of([block + name for block in blocks for name in names]) for names in matrices
    }
    return _only_format(formats_of_matrices, f"{shape.where}: the block of layer {layer}")


def _only_format(formats_of_matrices: set[str], where: str) -> str:
    """The one format of a block's matrices. Raises CatalogError for several."""
    if len(formats_of_matrices) > 1:
        raise CatalogError(
            f"{where} in {' and '.join(sorted(formats_of_matrices))}; not modelled: expected one format"
        )
    return formats_of_matrices.pop()


def _shared_format(shape: Section, layer: int, formats: Formats) -> str:
    """The format of the experts that all tokens share; those of Gemma 4 are named like a dense block."""
    if str(shape.get("model_type", "")).startswith("gemma4"):
        return _dense_format(shape, layer, formats)
    return _dense_format(shape, layer, formats, ("shared_experts.", "shared_expert."))


def _experts_format(shape: Section, layer: int, formats: Formats) -> str:
    """The format of a layer's routed experts. Raises CatalogError if their matrices differ."""
    parents = tuple(f"{parent}.experts" for parent in _PARENTS)
    if str(shape.get("model_type", "")).startswith("gemma4"):
        parents = ("experts",)  # The experts stand beside the layer's `mlp`, not in it.
    blocks = [f"layers.{layer}.{parent}.0." for parent in parents]  # All experts have the first one's format.
    # The names that checkpoints give to each of the three matrices.
    matrices = (("gate_proj", "w1", "up_proj"), ("up_proj", "w3"), ("down_proj", "w2"))
    formats_of_matrices = {
        formats.format_of([block + name for block in blocks for name in names], is_expert=True)
        for names in matrices
    }
    return _only_format(formats_of_matrices, f"{shape.where}: the experts of layer {layer}")
