"""The shape of an LLM out of a Hugging Face config.json; a shape that no formula describes is refused.

llm = llm_from_config(Path("checkpoints/mine"))      # the folder, or the file in it

A key of a structure that is not modelled is refused, and so is an unknown key whose name sounds like
structure, so that no LLM is read as another (unmodelled_keys.py). An encoder of images (`vision_config`,
image_encoder.py) is taken to be served in 16 bits.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.documents.image_encoder import encoder_parameters
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
from planner.documents.unmodelled_keys import refuse_unmodelled
from planner.errors import CatalogError
from planner.files.document_values import Section, errors_as
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


def llm_from_config(path: Path) -> Llm:
    """The shape in a Hugging Face config.json, or in the folder that holds one.

    The config says how weights are quantised; after ModelOpt hf_quant_config.json beside it does. If all
    layers are alike, the LLM has no `groups`. Raises CatalogError for a missing key, a key of a structure
    that is not modelled, and an unknown format of weights.
    """
    file = path / "config.json" if path.is_dir() else path
    with errors_as(CatalogError):
        return _parse_config(file, read_config(file))


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
