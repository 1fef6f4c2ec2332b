"""The KV layout of LLMs of unlike layers against vLLM's own grouping of layers and size of blocks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.documents.catalog import read_catalog
from planner.models.kv_layout import kv_layout
from planner.models.llm import GroupedAttention, LatentAttention, Llm, StateAttention
from profiling.vllm_install import is_installed

if not is_installed():
    pytest.skip("vLLM is not installed (make test-vllm)", allow_module_level=True)

SCRIPT = Path(__file__).parents[1] / "support" / "vllm_kv_groups.py"
NAMES = (
    "gpt-oss-20b",
    "gpt-oss-120b",
    "gemma-4-26b-a4b",
    "gemma-4-31b",
    "mimo-v2-flash",
    "step-3.7-flash",
    "qwen3.5-27b",
    "qwen3.5-35b-a3b",
    "qwen3.5",
    "nemotron-3-nano",
    "nemotron-3-super",
    "deepseek-v3",
    "kimi-k3",
)
TPS = (1, 2, 4)
LENGTHS = (1, 16, 100, 1_000, 5_000, 100_000)


def case(llm: Llm, tp: int) -> dict[str, Any]:
    """Its layers on one GPU of a TP group. A block is as long as vLLM makes it for a state to fit into a
    page: a multiple of 16 tokens, of 128 beside latent attention (its platforms/interface.py)."""
    kinds = [(group.count, group.attention) for group in llm.layer_groups if group.attention]
    token_bytes, state_bytes = 0.0, 0.0
    for _, kind in kinds:
        if isinstance(kind, StateAttention):
            state_bytes = max(state_bytes, kind.state_bytes / tp)
        else:
            token_bytes = max(token_bytes, llm.kv_layer_bytes(kind) / min(kind.kv_shares, tp))
    multiple = 128 if any(isinstance(kind, LatentAttention) for _, kind in kinds) else 16
    block_tokens = 16 if not state_bytes else multiple * math.ceil(state_bytes / (multiple * token_bytes))
    layers: list[dict[str, Any]] = []
    window = 0
    for number, kind in kinds:
        match kind:
            case StateAttention():
                page_bytes = int(block_tokens * token_bytes)
                layer = {"kind": "state", "bytes": int(kind.state_bytes / tp), "page_bytes": page_bytes}
            case LatentAttention():
                layer = {"kind": "latent", "kv_heads": 1, "head_dim": kind.kv_values}
            case GroupedAttention():
                window = max(window, kind.window_tokens or 0)
                layer = {
                    "kind": "window" if kind.window_tokens else "full",
                    "window": kind.window_tokens,
                    "kv_heads": max(1, kind.kv_heads // tp),
                    "head_dim": kind.head_dim,
                    "value_dim": kind.value_dim,
                }
        layers += [layer] * number
    return {"block_tokens": block_tokens, "layers": layers, "window": window}


def blocks(group: dict[str, Any], window: int, tokens: int) -> int:
    """Of a sequence in a group of vLLM's: all, those that touch the last window, or one."""
    if group["kind"] == "state":
        return 1
    own: int = math.ceil(tokens / group["tokens"])
    return min(own, math.ceil((window - 1) / group["tokens"]) + 1) if group["kind"] == "window" else own


def test_a_sequence_takes_what_vllm_gives_it() -> None:
    """Never less, and at most what rounding to whole blocks of all full layers adds."""
    catalog = read_catalog()
    asked = [(catalog.llm(name), tp) for name in NAMES for tp in TPS]
    cases = [case(llm, tp) for llm, tp in asked]
    done = subprocess.run(
        [sys.executable, SCRIPT], input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    for (llm, tp), asked_case, answer in zip(asked, cases, answers, strict=True):
        ours = kv_layout(llm, tp)
        full = sum(group["kind"] in ("full", "latent") for group in answer["groups"])
        for tokens in LENGTHS:
            theirs = answer["block_bytes"] * sum(
                blocks(group, asked_case["window"], tokens) for group in answer["groups"]
            )
            mine = ours.block_bytes * (math.ceil(tokens / 16) + ours.extra.sequence_blocks(tokens))
            assert mine >= 0.999 * theirs, (llm.name, tp, tokens)
            assert mine <= 1.001 * theirs + (full + 1) * answer["block_bytes"], (llm.name, tp, tokens)
