"""Reads the attention of each layer from a config.json of Hugging Face.

kinds = layer_kinds(shape, layers)                   # "full", "window", "linear", "state", None
attention_of(shape, layer, kinds[layer], formats)

Each family of LLMs has a key of its own for the kinds of its layers: `layer_types`, `hybrid_layer_pattern`,
`hybrid_override_pattern`, `full_attention_interval`, ... The shapes are those of the matrices that vLLM and
transformers make of the same keys. `planner/models/llm.py` explains the kinds of attention.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

from planner.documents.llm_formats import Formats
from planner.errors import CatalogError, InputError
from planner.files.document_values import LARGEST_COUNT, Section, Wording
from planner.models.llm import (
    Attention,
    CompressedAttention,
    GroupedAttention,
    LatentAttention,
    StateAttention,
)

MOST_LAYERS = 1000  # Each layer is read by itself, which takes time; the deepest LLMs have some 130.
# The words of errors about a wrong count.
COUNT = f"expected a whole number > 0 and at most {LARGEST_COUNT}"
WORDING = Wording(whole=COUNT, most=COUNT)
# Letter of `hybrid_override_pattern` -> the kinds of attention and of feed-forward block of that layer.
BLOCKS = {"M": ("state", None), "*": ("full", None), "E": (None, "experts"), "-": (None, "dense")}
_BLOCK_NAMES = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}
# Names in `layer_types`.
_LAYER_TYPES = {
    "full_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "linear_attention": "linear",
}
# Families in which every other layer has a window, beginning with the first, without a key for it.
_ALTERNATE = ("gemma2", "gpt_oss")
# Every fourth layer of Llama 4 has no rotary embedding, unless its config lists such layers.
_NOPE_INTERVAL = 4
_IN_32_BITS = ("float32", "float")
# What checkpoints call the attention of a layer.
_MODULE_PARENTS = ("self_attn", "attn", "attention", "linear_attn", "mixer")

Kind = str | None  # Kind of attention: "full", "window", "linear", "state"; None: the layer has none.


def first_count(shape: Section, *keys: str, default: int | None = None) -> int:
    """The number under the first of `keys` that is there, else `default`. Raises InputError without both."""
    for key in keys:
        if key in shape:
            return shape.whole_number(key)
    if default is None:
        raise InputError(
            f"{shape.path_of(keys[0])} is missing; expected {' or '.join(keys)} in a Hugging Face config.json"
        )
    return default


def hidden_size(shape: Section) -> int:
    """The width of the vectors between layers."""
    return first_count(shape, "hidden_size", "n_embed", "n_embd", "d_model")


def layer_count(shape: Section) -> int:
    """The number of layers, of at most MOST_LAYERS. Raises InputError if neither it nor a list is there."""
    if "num_hidden_layers" not in shape and isinstance(shape.get("layers_block_type"), list):
        return len(shape.get("layers_block_type"))
    layers = first_count(shape, "num_hidden_layers", "n_layer", "num_layers")
    if layers > MOST_LAYERS:
        raise shape.refused("num_hidden_layers", f"expected at most {MOST_LAYERS} layers", layers)
    return layers


def block_pattern(shape: Section, layers: int) -> str | None:
    """A letter of BLOCKS for each layer, where a layer is attention or feed-forward alone; else None."""
    if isinstance(names := shape.get("layers_block_type"), list):
        # Names are looked up in lists here and below, because an entry of the config may be unhashable.
        if unknown_names := [name for name in names if name not in list(_BLOCK_NAMES)]:
            raise shape.refused("layers_block_type", f"expected {', '.join(_BLOCK_NAMES)}", unknown_names[0])
        return "".join(
            _BLOCK_NAMES[name] for name in _check_one_per_layer(shape, "layers_block_type", names, layers)
        )
    if "hybrid_override_pattern" not in shape:
        return None
    pattern = shape.text("hybrid_override_pattern")
    if unknown_letters := sorted(set(pattern) - set(BLOCKS)):
        raise shape.refused(
            "hybrid_override_pattern", f"expected letters {' '.join(BLOCKS)}", unknown_letters[0]
        )
    return "".join(_check_one_per_layer(shape, "hybrid_override_pattern", list(pattern), layers))


def layer_kinds(shape: Section, layers: int) -> list[Kind]:
    """The kind of attention of each layer.

    If all layers have a window, all count as "full": the windows of such LLMs (Mistral-7B, Phi-3) are seldom
    shorter than the contexts that are served.
    """
    kinds = _kinds_by_family(shape, layers)
    return ["full"] * layers if set(kinds) == {"window"} else kinds


def _kinds_by_family(shape: Section, layers: int) -> list[Kind]:
    """The kind of each layer by the key that its family of LLMs has for it; "full" without such a key."""
    family = str(shape.get("model_type", ""))
    if pattern := block_pattern(shape, layers):
        return [BLOCKS[letter][0] for letter in pattern]
    if isinstance(types := shape.get("layer_types"), list):
        if unknown := [kind for kind in types if kind not in list(_LAYER_TYPES)]:
            raise CatalogError(
                f"{shape.path_of('layer_types')}: {unknown[0]!r} is not modelled; expected "
                f"{', '.join(_LAYER_TYPES)}"
            )
        return [_LAYER_TYPES[kind] for kind in _check_one_per_layer(shape, "layer_types", types, layers)]
    if isinstance(pattern := shape.get("hybrid_layer_pattern"), list):
        return [
            "window" if flag else "full"
            for flag in _check_one_per_layer(shape, "hybrid_layer_pattern", pattern, layers)
        ]
    if "linear_attn_config" in shape:
        return _kimi_layer_kinds(shape.subsection("linear_attn_config"), layers)
    if "full_attention_interval" in shape:
        every = shape.whole_number("full_attention_interval")
        return ["full" if (layer + 1) % every == 0 else "linear" for layer in range(layers)]
    # Only Llama 4 has both keys. Despite the name, 1 in `no_rope_layers` marks a layer with rotary
    # embeddings; it attends to a chunk.
    if "attention_chunk_size" in shape and "interleave_moe_layer_step" in shape:
        no_rope = shape.get("no_rope_layers") or [(layer + 1) % _NOPE_INTERVAL for layer in range(layers)]
        return [
            "window" if flag else "full"
            for flag in _check_one_per_layer(shape, "no_rope_layers", no_rope, layers)
        ]
    if "sliding_window" in shape and shape.flag("use_sliding_window", True):
        if "sliding_window_pattern" in shape or family in _ALTERNATE:
            every = shape.whole_number("sliding_window_pattern", 2)
            return ["window" if (layer + 1) % every else "full" for layer in range(layers)]
    return ["full"] * layers


def _kimi_layer_kinds(section: Section, layers: int) -> list[Kind]:
    """The kinds of Kimi's layers. Its config lists the layers of each kind, numbered from 1 on."""
    full, linear = section.get("full_attn_layers"), section.get("kda_layers")
    for key, listed in (("full_attn_layers", full), ("kda_layers", linear)):
        if not isinstance(listed, list):
            raise section.refused(key, "expected a list of layers", listed)
    if sorted([*full, *linear]) != list(range(1, layers + 1)):
        raise CatalogError(f"{section.where}: full_attn_layers and kda_layers must be all of 1 to {layers}")
    return ["full" if layer + 1 in full else "linear" for layer in range(layers)]


def _check_one_per_layer(shape: Section, key: str, per_layer: list[Any], layers: int) -> list[Any]:
    """`per_layer`, the value of `key`; raises CatalogError unless it has one entry per layer."""
    if len(per_layer) != layers:
        raise CatalogError(f"{shape.path_of(key)}: {len(per_layer)} entries for {layers} layers")
    return per_layer


def attention_of(shape: Section, layer: int, kind: Kind, formats: Formats) -> Attention | None:
    """The attention of one layer of this `kind` (`layer_kinds`); None if the layer has none."""
    hidden = hidden_size(shape)
    attention: Attention
    # Families with an attention of their own are recognised by their keys; the last case is for all others.
    match kind:
        case None:
            return None
        case "linear" if "linear_attn_config" in shape:
            attention, modules = _delta_attention(shape.subsection("linear_attn_config"), hidden)
        case "linear":
            attention, modules = _gated_delta_net(shape, hidden)
        case "state":
            attention, modules = _mamba_state(shape, hidden)
        case _ if "compress_ratios" in shape:
            attention, modules = _compressed_attention(shape, layer, hidden)
        case _ if "kv_lora_rank" in shape:
            attention, modules = _latent_attention(shape, layer, hidden)
        case _ if "block_configs" in shape:
            return _block_attention(shape, layer, hidden, formats)
        case _:
            attention, modules = _grouped_attention(shape, layer, kind == "window", hidden)
    return with_formats(attention, modules, layer, formats, shape)


# The matrices of an attention: the names that checkpoints have for each, and the number of its parameters.
Modules = list[tuple[tuple[str, ...], float]]


def with_formats(
    attention: Attention, modules: Modules, layer: int, formats: Formats, shape: Section
) -> Attention:
    """The attention with the format of its weights.

    Matrices that stay in 16 bits beside quantised ones are counted in `bf16_parameters`. Raises CatalogError
    for any other mixture of formats.
    """
    parameters_by_format: Counter[str] = Counter()
    for names, parameters in modules:
        aliases = [f"layers.{layer}.{parent}.{name}" for parent in _MODULE_PARENTS for name in names]
        parameters_by_format[formats.format_of(aliases)] += parameters  # type: ignore[assignment]
    bf16_parameters = float(parameters_by_format.pop("bf16", 0.0))
    if len(parameters_by_format) > 1:
        raise CatalogError(
            f"{shape.where}: attention of layer {layer} in {' and '.join(sorted(parameters_by_format))}; not "
            "modelled: expected one format beside 16 bits"
        )
    if not parameters_by_format:
        return replace(attention, weights="bf16")
    return replace(attention, weights=next(iter(parameters_by_format)), bf16_parameters=bf16_parameters)


def _grouped_attention(
    shape: Section, layer: int, has_window: bool, hidden: int
) -> tuple[GroupedAttention, Modules]:
    """Attention whose query heads share KV heads, perhaps with a window or an index."""
    family = str(shape.get("model_type", ""))
    heads, kv_heads, head_dim, value_dim = _head_shape(shape, has_window, hidden)
    window_tokens = None
    if has_window:
        is_llama4 = "interleave_moe_layer_step" in shape
        window_tokens = first_count(shape, "attention_chunk_size" if is_llama4 else "sliding_window")
    # An index chooses the tokens that attention looks at; an empty section stands for a layer without one.
    index = Section.from_document(None, shape.where)
    if "sparse_attention_config" in shape:
        sparse = replace(shape.subsection("sparse_attention_config"), wording=WORDING)
        is_sparse_by_layer = sparse.get("sparse_attention_freq", [1] * (layer + 1))
        if sparse.flag("use_sparse_attention", True) and is_sparse_by_layer[layer]:
            index = sparse
    attention = GroupedAttention(
        heads,
        kv_heads,
        head_dim,
        value_dim,
        window_tokens,
        gates_output=shape.flag("attn_output_gate", family == "qwen3_next")
        or shape.flag("attention_output_gate", False),
        values_are_keys=not has_window and shape.flag("attention_k_eq_v", False),
        index_heads=index.whole_number("sparse_num_index_heads", 0),
        index_dim=index.whole_number("sparse_index_dim", 0),
        index_tokens=index.whole_number("sparse_topk_blocks", 0) * index.whole_number("sparse_block_size", 1),
    )
    gate = 2 if attention.gates_output else 1
    values = 0 if attention.values_are_keys else kv_heads * value_dim
    return attention, [
        (("q_proj", "qkv_proj"), hidden * heads * head_dim * gate),
        (("k_proj", "qkv_proj"), hidden * kv_heads * head_dim),
        (("v_proj", "qkv_proj"), hidden * values),
        (("o_proj",), hidden * heads * value_dim),
        (("index_q_proj", "indexer.q_proj"), hidden * attention.index_heads * attention.index_dim),
        (("index_k_proj", "indexer.k_proj"), hidden * attention.index_dim),
    ]


def _head_shape(shape: Section, has_window: bool, hidden: int) -> tuple[int, int, int, int]:
    """Query heads, KV heads, widths of a key and of a value. Layers with windows may have other numbers."""
    family = str(shape.get("model_type", ""))
    heads = first_count(shape, "num_attention_heads", "n_head", "num_heads")
    default_kv_heads = 1 if shape.get("multi_query") is True else heads
    kv_heads = first_count(shape, "num_key_value_heads", "num_attention_groups", default=default_kv_heads)
    head_dim = first_count(shape, "head_dim", "attention_head_dim", "kv_channels", default=hidden // heads)
    value_dim = first_count(shape, "v_head_dim", default=head_dim)
    if has_window and "hybrid_layer_pattern" in shape:
        heads = first_count(shape, "swa_num_attention_heads", default=heads)
        kv_heads = first_count(shape, "swa_num_key_value_heads", default=kv_heads)
        head_dim = first_count(shape, "swa_head_dim", default=head_dim)
        value_dim = first_count(shape, "swa_v_head_dim", default=head_dim)
    elif has_window and "attention_other_setting" in shape:
        other = replace(shape.subsection("attention_other_setting"), wording=WORDING)
        heads = first_count(other, "num_attention_heads")
        kv_heads = first_count(other, "num_attention_groups", "num_key_value_heads")
        head_dim = value_dim = first_count(other, "head_dim", default=head_dim)
    elif not has_window and family.startswith("gemma4"):
        head_dim = value_dim = first_count(shape, "global_head_dim", default=head_dim)
        if shape.flag("attention_k_eq_v", False):
            kv_heads = first_count(shape, "num_global_key_value_heads", default=kv_heads)
    return heads, kv_heads, head_dim, value_dim


def _block_attention(shape: Section, layer: int, hidden: int, formats: Formats) -> Attention | None:
    """The attention of a layer of Llama-Nemotron: layers differ in their KV heads, or have no attention."""
    block = block_config(shape, layer, "attention")
    for key in ("window_length", "replace_with_linear", "sparsify", "num_sink_tokens", "unshifted_sink"):
        if block.get(key):
            raise block.refused(key, "is not modelled; expected none", block.get(key))
    if block.flag("no_op", False):
        return None
    heads = first_count(shape, "num_attention_heads")
    head_dim = first_count(shape, "head_dim", default=hidden // heads)
    if "n_heads_in_group" in block:
        kv_heads = heads // block.whole_number("n_heads_in_group")
    else:
        kv_heads = first_count(block, "num_key_value_heads")
    attention = GroupedAttention(heads, kv_heads, head_dim, head_dim)
    return with_formats(
        attention,
        [
            (("q_proj", "qkv_proj"), hidden * heads * head_dim),
            (("k_proj", "qkv_proj"), hidden * kv_heads * head_dim),
            (("v_proj", "qkv_proj"), hidden * kv_heads * head_dim),
            (("o_proj",), hidden * heads * head_dim),
        ],
        layer,
        formats,
        shape,
    )


def block_config(shape: Section, layer: int, part: str) -> Section:
    """The section `part`, "attention" or "ffn", of one layer in Llama-Nemotron's `block_configs`."""
    blocks = shape.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layer_count(shape):
        raise shape.refused("block_configs", f"expected a list of {layer_count(shape)} layers", blocks)
    return Section.from_document(
        blocks[layer], f"{shape.path_of('block_configs')}: {layer}", wording=WORDING
    ).subsection(part)


def _latent_attention(shape: Section, layer: int, hidden: int) -> tuple[LatentAttention, Modules]:
    """DeepSeek's attention to a latent vector per token, perhaps with an index."""
    has_index, shares_index = _index_of_layer(shape, layer)
    attention = LatentAttention(
        heads=first_count(shape, "num_attention_heads"),
        q_rank=first_count(shape, "q_lora_rank", default=0),
        kv_rank=shape.whole_number("kv_lora_rank"),
        nope_dim=shape.whole_number("qk_nope_head_dim"),
        rope_dim=shape.whole_number("qk_rope_head_dim"),
        value_dim=shape.whole_number("v_head_dim"),
        index_heads=shape.whole_number("index_n_heads") if has_index else 0,
        index_dim=shape.whole_number("index_head_dim") if has_index else 0,
        index_tokens=shape.whole_number("index_topk") if has_index or shares_index else 0,
        gates_output=shape.flag("mla_use_output_gate", False),
    )
    width = attention.heads * (attention.nope_dim + attention.rope_dim)
    q_rank, value_width = attention.q_rank, attention.heads * attention.value_dim
    queries: Modules = [(("q_proj",), hidden * width)]
    if q_rank:
        queries = [(("q_a_proj",), hidden * q_rank), (("q_b_proj",), q_rank * width)]
    return attention, [
        *queries,
        (("kv_a_proj_with_mqa",), hidden * attention.kv_values),
        (("kv_b_proj",), attention.kv_rank * attention.heads * (attention.nope_dim + attention.value_dim)),
        (("o_proj",), hidden * value_width),
        (("g_proj",), hidden * value_width if attention.gates_output else 0),
        (("indexer.wq_b",), attention.index_heads * attention.index_dim * (q_rank or hidden)),
        (("indexer.wk",), hidden * attention.index_dim),
        (("indexer.weights_proj",), hidden * attention.index_heads),
    ]


def _index_of_layer(shape: Section, layer: int) -> tuple[bool, bool]:
    """Whether this layer has an index of its own, and whether it uses an earlier layer's choice."""
    if "index_topk" not in shape:
        return False, False
    types = shape.get("indexer_types")
    if isinstance(types, list):
        index_type = _check_one_per_layer(shape, "indexer_types", types, layer_count(shape))[layer]
        if index_type not in ("full", "shared"):
            raise shape.refused("indexer_types", "expected full or shared", index_type)
        return index_type == "full", index_type == "shared"
    if "index_topk_pattern" in shape:
        letters = _check_one_per_layer(
            shape, "index_topk_pattern", list(shape.text("index_topk_pattern")), layer_count(shape)
        )
        shares_index = letters[layer] == "S"
        return not shares_index, shares_index
    every = shape.whole_number("index_topk_freq", 1)
    offset = shape.whole_number("index_skip_topk_offset", 2, least=0)
    has_own = max(layer - offset + 1, 0) % every == 0  # Layers before the offset all have their own.
    return has_own, not has_own


def _compressed_attention(shape: Section, layer: int, hidden: int) -> tuple[CompressedAttention, Modules]:
    """DeepSeek-V4's attention to vectors that each stand for `ratio` tokens, beside a window.

    `compress_ratios` may have an entry more than there are layers, for the one of speculative decoding.
    """
    ratios = shape.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < layer_count(shape):
        raise shape.refused("compress_ratios", f"expected a list of {layer_count(shape)} or more", ratios)
    ratio = ratios[layer]
    if ratio not in (0, 4, 128):
        raise shape.refused("compress_ratios", "expected 0, 4 and 128", ratio)
    has_index = ratio == 4  # With 128 tokens to a vector there are so few that all are read.
    attention = CompressedAttention(
        heads=first_count(shape, "num_attention_heads"),
        head_dim=shape.whole_number("head_dim"),
        rope_dim=shape.whole_number("qk_rope_head_dim"),
        q_rank=shape.whole_number("q_lora_rank"),
        output_rank=shape.whole_number("o_lora_rank"),
        output_groups=shape.whole_number("o_groups"),
        ratio=ratio,
        window_tokens=shape.whole_number("sliding_window"),
        index_heads=shape.whole_number("index_n_heads") if has_index else 0,
        index_dim=shape.whole_number("index_head_dim") if has_index else 0,
        index_tokens=shape.whole_number("index_topk") if has_index else 0,
    )
    return attention, [(("wkv", "kv_proj"), attention.parameters(hidden))]


def _gated_delta_net(shape: Section, hidden: int) -> tuple[StateAttention, Modules]:
    """The linear attention of Qwen3-Next and Qwen3.5.

    Queries and keys have one width, values and their gate another, and each head has two numbers besides.
    """
    key_width = shape.whole_number("linear_num_key_heads") * shape.whole_number("linear_key_head_dim")
    heads = shape.whole_number("linear_num_value_heads")
    value_width = heads * shape.whole_number("linear_value_head_dim")
    attention = StateAttention(
        projected=2 * key_width + 2 * value_width + 2 * heads,
        output=value_width,
        conv_width=2 * key_width + value_width,
        conv_tokens=shape.whole_number("linear_conv_kernel_dim"),
        state_values=value_width * shape.whole_number("linear_key_head_dim"),
        heads=shape.whole_number("linear_num_key_heads"),
        state_value_bytes=_state_bytes(shape, "mamba_ssm_dtype", default="bfloat16"),
    )
    return attention, [
        (("in_proj_qkv", "in_proj_qkvz"), hidden * attention.conv_width),
        (("in_proj_z", "in_proj_qkvz"), hidden * value_width),
        (("in_proj_a", "in_proj_b", "in_proj_ba"), hidden * 2 * heads),
        (("out_proj",), hidden * value_width),
    ]


def _delta_attention(section: Section, hidden: int) -> tuple[StateAttention, Modules]:
    """Kimi's linear attention.

    Queries, keys, values and a gate have one width; the decay is made of head_dim numbers and one per head.
    """
    section = replace(section, wording=WORDING)
    heads, head_dim = section.whole_number("num_heads"), section.whole_number("head_dim")
    width = heads * head_dim
    gate = width if section.flag("use_full_rank_gate", False) else head_dim
    attention = StateAttention(
        projected=3 * width + gate + head_dim + heads,
        output=width,
        conv_width=3 * width,
        conv_tokens=section.whole_number("short_conv_kernel_size"),
        state_values=width * head_dim,
        heads=heads,
    )
    return attention, [
        (("q_proj", "k_proj", "v_proj"), hidden * 3 * width),
        (("g_proj", "g_a_proj"), hidden * gate),
        (("f_a_proj", "b_proj"), hidden * (head_dim + heads)),
        (("o_proj",), hidden * width),
    ]


def _mamba_state(shape: Section, hidden: int) -> tuple[StateAttention, Modules]:
    """The state of Mamba 2, as Nemotron-H has it."""
    heads = shape.whole_number("mamba_num_heads")
    state_size = first_count(shape, "ssm_state_size", "mamba_d_state")
    width = heads * shape.whole_number("mamba_head_dim")
    # All heads of a group share the two vectors that write to and read from the state (B and C).
    group_width = 2 * first_count(shape, "n_groups", "mamba_n_groups") * state_size
    attention = StateAttention(
        projected=2 * width + group_width + heads,
        output=width,
        conv_width=width + group_width,
        conv_tokens=first_count(shape, "conv_kernel", "mamba_d_conv"),
        state_values=width * state_size,
        heads=heads,
        state_value_bytes=_state_bytes(shape, "mamba_ssm_cache_dtype", default="float32"),
    )
    return attention, [(("in_proj",), hidden * attention.projected), (("out_proj",), hidden * width)]


def _state_bytes(shape: Section, key: str, *, default: str) -> float:
    """Bytes of one value of the state, as vLLM reads the config (`--mamba-ssm-cache-dtype auto`)."""
    dtype = shape.one_of(key, (*_IN_32_BITS, "bfloat16", "float16"), default)
    return 4.0 if dtype in _IN_32_BITS else 2.0
