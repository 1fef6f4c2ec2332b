"""Step tables from AIConfigurator's kernel measurements ("silicon"), without a GPU of one's own.

NVIDIA measured the kernels of vLLM (GEMM, attention, all-reduce) on A100, H100 and H200; AIConfigurator adds
them up to a step. It counts kernels alone: no scheduler, no sampling, no host, so h = 0 in what is fitted.
Needs `pip install 'fleetplan[silicon]'`.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from planner.domain import Gpu, Llm
from planner.errors import InputError
from planner.models.memory import kv_cache_tokens
from planner.models.tables import COLUMNS, StepTable

VERSION = "0.12.0"
SYSTEMS = {"a100-80g": "a100_sxm", "h100-80g": "h100_sxm", "h200-141g": "h200_sxm"}
# Names under which AIConfigurator ships a config; any other dense LLM is described by its shape.
MODELS = {
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
}

PROMPTS = (1, 2, 4, 8)
PROMPT_TOKENS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
                 8192, 12288, 16384, 24576, 32768)  # fmt: skip
CACHED_TOKENS = (0, 512, 2048, 8192, 16384)
DECODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CONTEXT_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
MIXED_CHUNK_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
MIXED_CACHED_TOKENS = (0, 2048, 8192)
MIXED_DECODES = (1, 4, 16, 64, 128, 256)
MIXED_CONTEXT_TOKENS = (256, 1024, 4096, 16384)
MOST_STEP_TOKENS = 32768


def silicon_table(llm: Llm, gpu: Gpu, tp: int) -> StepTable:
    """Every step of the grid above that fits the KV cache of one worker, and its kernel time."""
    if gpu.name not in SYSTEMS:
        raise InputError(f"GPU {gpu.name}: AIConfigurator lacks its kernels; use one of {', '.join(SYSTEMS)}")
    kv_tokens = kv_cache_tokens(llm, gpu, tp)
    with _model(llm) as model:
        engine, mixed = _engines(model, SYSTEMS[gpu.name], tp)
        rows = [
            *_prefill_rows(engine, kv_tokens),
            *_decode_rows(engine, kv_tokens),
            *_mixed_rows(mixed, kv_tokens),
        ]
    if not rows:
        raise InputError(f"{llm.name} on {gpu.name} tp{tp}: no step fits its {kv_tokens} KV tokens")
    about = {
        "llm": llm.name,
        "gpu": gpu.name,
        "tp": str(tp),
        "source": f"AIConfigurator {VERSION} kernel times, vLLM, {SYSTEMS[gpu.name]}; no host overhead",
    }
    return StepTable(pd.DataFrame(rows, columns=list(COLUMNS)), about)


def _prefill_rows(engine: Any, kv_tokens: int) -> Iterator[tuple[float, ...]]:
    for prompts, new, cached in product(PROMPTS, PROMPT_TOKENS, CACHED_TOKENS):
        if prompts * new <= MOST_STEP_TOKENS and prompts * (new + cached) <= kv_tokens:
            t_ms = engine.predict_prefill_latency(prompts, new + cached, cached)  # isl: cached part included
            yield _row(prompts, new, cached, 0, 0, t_ms)


def _decode_rows(engine: Any, kv_tokens: int) -> Iterator[tuple[float, ...]]:
    for decodes, context in product(DECODES, CONTEXT_TOKENS):
        if decodes * context <= kv_tokens:
            t_ms = engine.predict_decode_latency(decodes, context - 1, 2)  # attends to isl + 1 tokens
            yield _row(0, 0, 0, decodes, context, t_ms)


def _mixed_rows(mixed: Any, kv_tokens: int) -> Iterator[tuple[float, ...]]:
    for chunk, cached, decodes, context in product(
        MIXED_CHUNK_TOKENS, MIXED_CACHED_TOKENS, MIXED_DECODES, MIXED_CONTEXT_TOKENS
    ):
        if chunk + cached + decodes * context <= kv_tokens:
            t_ms = mixed.estimate_forward_pass_time_ms({
                "version": 1,
                "scheduled_requests": {
                    "num_prefill_requests": 1,
                    "sum_prefill_tokens": chunk,
                    "sum_prefill_kv_tokens": cached,
                    "num_decode_requests": decodes,
                    "sum_decode_kv_tokens": decodes * context,
                },
            })  # fmt: skip
            yield _row(1, chunk, cached, decodes, context, t_ms)


def _row(prompts: int, new: int, cached: int, decodes: int, context: int, t_ms: float) -> tuple[float, ...]:
    """COLUMNS of a step of equal prompts and equal decodes."""
    pairs = prompts * new * (cached + (new + 1) / 2)
    return prompts, prompts * new, prompts * cached, pairs, decodes, decodes * context, t_ms / 1e3


def _engines(model: str, system: str, tp: int) -> tuple[Any, Any]:
    """AIConfigurator's two doors: steps of one kind, and mixed steps."""
    try:
        from aiconfigurator_core.sdk import EngineHandle, RustForwardPassPerfModel
    except ImportError:
        raise InputError(
            "kernel times need AIConfigurator: pip install 'fleetplan[silicon]' (Linux x86-64, Python <= 3.13)"
        ) from None
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    engine = EngineHandle.compile(model, system, "vllm", tp_size=tp)
    mixed = RustForwardPassPerfModel.from_native({
        "schema_version": 1, "model_name": model, "system_name": system, "backend": "vllm",
        "backend_version": None, "tp_size": tp, "pp_size": 1, "weight_dtype": None, "moe_dtype": None,
        "activation_dtype": None, "kv_cache_dtype": None, "kv_block_size": None, "extra": {},
    })  # fmt: skip
    return engine, mixed


@contextmanager
def _model(llm: Llm) -> Iterator[str]:
    """What AIConfigurator calls this LLM: a name it ships, or a folder with a config.json of its shape."""
    if llm.name in MODELS:
        yield MODELS[llm.name]
        return
    if llm.experts > 1 or not llm.gated_ffn:
        raise InputError(f"LLM {llm.name}: is not dense and gated; add its name to MODELS")
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": llm.hidden, "intermediate_size": llm.ffn, "num_attention_heads": llm.heads,
            "num_hidden_layers": llm.layers, "num_key_value_heads": llm.kv_heads, "head_dim": llm.head_dim,
            "vocab_size": llm.vocab, "max_position_embeddings": llm.context_tokens, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": llm.tied_embeddings, "torch_dtype": "bfloat16",
        }  # fmt: skip
        Path(folder, "config.json").write_text(json.dumps(config))
        yield folder
