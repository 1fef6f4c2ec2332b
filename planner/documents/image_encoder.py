"""The parameters of an LLM's encoder of images, out of the `vision_config` of its config.json.

They are those of its matrices, without norms and biases. An encoder of sound is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.documents.llm_attention import WORDING, first_count
from planner.errors import CatalogError
from planner.files.document_values import Section, check_rows, refused_value

# Encoders whose feed-forward blocks have three matrices.
_GATED_ENCODERS = ("gemma4_vision", "pixtral", "qwen2_5_vl")


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
