"""Step tables from AIConfigurator's kernel measurements ("silicon"), without a GPU of one's own.

NVIDIA measured the kernels of vLLM (GEMM, attention, all-reduce) on A100, H100 and H200; AIConfigurator adds
them up to a step. It counts kernels alone: no scheduler, no sampling, no host, so h = 0 in what is fitted.
Needs `pip install 'fleetplan[silicon]'`.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from planner.domain import Gpu, Llm
from planner.errors import InputError
from planner.models.memory import kv_cache_tokens
from planner.models.tables import COLUMNS, Step, StepTable

VERSION = "0.12.0"
SYSTEMS = {"a100-80g": "a100_sxm", "h100-80g": "h100_sxm", "h200-141g": "h200_sxm"}
# Names under which AIConfigurator ships a config; any other dense LLM is described by its shape.
MODELS = {
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
}
MOST_STEP_TOKENS = 32768


def grid() -> Iterator[Step]:
    """The steps that are fitted: prefills, decodes, and both in one step as chunked prefill makes them."""
    lengths = (
        16,
        24,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
        3072,
        4096,
        6144,
        8192,
        12288,
        16384,
        24576,
        32768,
    )
    for prompts, new, cached in product((1, 2, 4, 8), lengths, (0, 512, 2048, 8192, 16384, 65536, 122880)):
        if prompts * new <= MOST_STEP_TOKENS:
            yield Step(prompts, new, cached, 0, 0)
    batches = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    for decodes, context in product(batches, [2**i for i in range(7, 18)]):
        yield Step(0, 0, 0, decodes, context)
    chunks, cached_tokens = (64, 128, 256, 512, 1024, 2048, 4096, 8192), (0, 2048, 8192)
    for new, cached, decodes, context in product(
        chunks, cached_tokens, (1, 4, 16, 64, 128, 256), (256, 1024, 4096, 16384)
    ):
        yield Step(1, new, cached, decodes, context)


def random_steps(rng: np.random.Generator, steps: int) -> Iterator[Step]:
    """Steps off the grid, a third of each kind, for a check that no fit has seen."""

    def between(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))

    for i in range(steps):
        cached = int(rng.integers(2)) * between(64, 16384)
        if i % 3 == 0:
            prompts = between(1, 8)
            yield Step(prompts, between(16, MOST_STEP_TOKENS // prompts), cached, 0, 0)
        elif i % 3 == 1:
            yield Step(0, 0, 0, between(1, 512), between(128, 32768))
        else:
            yield Step(1, between(32, 8192), cached, between(1, 256), between(128, 16384))


def silicon_table(
    llm: Llm, gpu: Gpu, tp: int, steps: Iterable[Step] | None = None, *, fp8_weights: bool = False
) -> StepTable:
    """The kernel times of `steps` (default: the grid), of those that fit one worker's KV cache.

    With `fp8_weights` the GEMMs are those of fp8; mixed steps are then left out, because AIConfigurator's two
    doors disagree about them (by 10 to 20 %).
    """
    if gpu.name not in SYSTEMS:
        raise InputError(f"GPU {gpu.name}: AIConfigurator lacks its kernels; use one of {', '.join(SYSTEMS)}")
    kv_tokens = kv_cache_tokens(llm, gpu, tp)
    fitting = [step for step in (grid() if steps is None else steps) if step.kv_tokens <= kv_tokens]
    if fp8_weights:
        fitting = [step for step in fitting if not (step.prompts and step.decodes)]
    if not fitting:
        raise InputError(f"{llm.name} on {gpu.name} tp{tp}: no step fits its {kv_tokens} KV tokens")
    with _model(llm) as model:
        engine, mixed = _engines(model, SYSTEMS[gpu.name], tp, fp8_weights=fp8_weights)
        rows = [_row(step, _step_ms(engine, mixed, step)) for step in fitting]
    about = {
        "llm": llm.name,
        "gpu": gpu.name,
        "tp": str(tp),
        "source": f"AIConfigurator {VERSION} kernel times, vLLM, {SYSTEMS[gpu.name]}; no host overhead",
    }
    return StepTable(pd.DataFrame(rows, columns=list(COLUMNS)), about)


def _step_ms(engine: Any, mixed: Any, step: Step) -> float:
    """Plain ints only: AIConfigurator refuses numpy's. Beyond its own tables it extrapolates in silence."""
    if not step.decodes:  # its input length includes the cached part
        return float(engine.predict_prefill_latency(step.prompts, step.new + step.cached, step.cached))
    if not step.prompts:  # it attends to one token more than the input length
        return float(engine.predict_decode_latency(step.decodes, step.context - 1, 2))
    requests = {
        "num_prefill_requests": step.prompts,
        "sum_prefill_tokens": step.prompts * step.new,
        "sum_prefill_kv_tokens": step.prompts * step.cached,
        "num_decode_requests": step.decodes,
        "sum_decode_kv_tokens": step.decodes * step.context,
    }
    return float(mixed.estimate_forward_pass_time_ms({"version": 1, "scheduled_requests": requests}))


def _row(step: Step, t_ms: float) -> tuple[float, ...]:
    """In the order of COLUMNS."""
    prompts, new, cached, decodes, context = step
    pairs = prompts * new * (cached + (new + 1) / 2)
    return prompts, prompts * new, prompts * cached, pairs, decodes, decodes * context, t_ms / 1e3


def _engines(model: str, system: str, tp: int, *, fp8_weights: bool) -> tuple[Any, Any]:
    """AIConfigurator's two doors: steps of one kind, and mixed steps."""
    try:
        from aiconfigurator_core.sdk import EngineHandle, RustForwardPassPerfModel
    except ImportError:
        raise InputError(
            "kernel times need AIConfigurator: pip install 'fleetplan[silicon]' (Linux x86-64)"
        ) from None
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    gemm = {"gemm_quant_mode": "fp8"} if fp8_weights else {}
    engine = EngineHandle.compile(model, system, "vllm", tp_size=tp, **gemm)
    mixed = RustForwardPassPerfModel.from_native(
        {
            "schema_version": 1,
            "model_name": model,
            "system_name": system,
            "backend": "vllm",
            "backend_version": None,
            "tp_size": tp,
            "pp_size": 1,
            "weight_dtype": None,
            "moe_dtype": None,
            "activation_dtype": None,
            "kv_cache_dtype": None,
            "kv_block_size": None,
            "extra": {},
        }
    )
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
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": llm.hidden,
            "intermediate_size": llm.ffn,
            "num_attention_heads": llm.heads,
            "num_hidden_layers": llm.layers,
            "num_key_value_heads": llm.kv_heads,
            "head_dim": llm.head_dim,
            "vocab_size": llm.vocab,
            "max_position_embeddings": llm.context_tokens,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": llm.tied_embeddings,
            "torch_dtype": "bfloat16",
        }
        Path(folder, "config.json").write_text(json.dumps(config))
        yield folder
