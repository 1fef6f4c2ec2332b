"""A Hugging Face config.json, and one rank's share of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import InputError

# Widths of feed-forward blocks, which the ranks share; ffn_dim is that of OPT.
FFN_WIDTHS = ("intermediate_size", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size")


def read_config(path: Path) -> dict[str, Any]:
    """The content of a Hugging Face config.json, or of the one in a folder. Raises InputError for a file that
    cannot be read or is none.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise InputError(f"{file}: no such file; expected a Hugging Face config.json") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise InputError(f"{file}: is not JSON ({error}); expected a Hugging Face config.json") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise InputError(f"{file}: names no architectures; expected a Hugging Face config.json")
    return config


def shard_config(config: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """The share of one rank of `tp`: heads, KV heads, feed-forward width and vocabulary divided.

    A KV head is never split: where there are more ranks than KV heads, ranks hold copies. Raises InputError
    where the heads cannot be divided, or a size is missing.
    """
    if tp == 1:
        return dict(config)
    shard = json.loads(json.dumps(config))  # A deep copy.
    text = text_of(shard)
    heads = int(text.get("num_attention_heads", 0))
    kv_heads = int(text.get("num_key_value_heads") or heads)
    if not heads or tp < 1 or heads % tp or (kv_heads % tp and tp % kv_heads):
        raise InputError(f"tensor parallelism is {tp}, must divide the {heads} heads ({kv_heads} KV heads)")
    text["head_dim"] = int(text.get("head_dim") or read_size(text, "hidden_size") // heads)
    text["num_attention_heads"], text["num_key_value_heads"] = heads // tp, max(kv_heads // tp, 1)
    for key in FFN_WIDTHS:
        if text.get(key):
            text[key] = -(-read_size(text, key) // tp)
    text["vocab_size"] = -(-read_size(text, "vocab_size") // tp)
    return dict(shard)


def read_size(text: Mapping[str, Any], key: str) -> int:
    """The whole number under `key` of a decoder's part of a config.json. Raises InputError without one."""
    if not isinstance(size := text.get(key), int):
        raise InputError(f"config.json: {key} is {size!r}, must be a whole number; use another config.json")
    return size


def text_of(config: Mapping[str, Any]) -> Any:
    """The part of a config.json that describes the decoder: `text_config` in LLMs that also read images."""
    inner = config.get("text_config")
    return inner if "num_hidden_layers" not in config and isinstance(inner, dict) else config
