"""Step tables from AIConfigurator's kernel measurements ("silicon"), without a GPU of one's own.

NVIDIA measured the kernels of vLLM (GEMM, attention, experts, all-reduce) on the GPUs of SYSTEMS. A step of N
tokens is the sum of

    all operations but attention and the output head, at N tokens
    the output head, at a row per prompt and per decode
    attention of the prompts, and attention of the decodes

No scheduler, no sampling, no host, so h = 0 in what is fitted. Needs `pip install 'fleetplan[silicon]'`.

Where the tables cannot be meant as they stand:

  fp8-block       its dense GEMMs were measured without CUDA graphs: none takes less than its launch, 60 to
                  90 us on H100 and 180 on B200, where fp8 with a scale per tensor takes 10. From 2048 tokens
                  on, where launches do not count, both take the same (0.9 to 1.2). So the latter's are taken.
  few tokens      an operation on N tokens takes at most what it takes on more, because it can be padded;
                  single entries of the tables take twice that.
  experts         tables have draws of power laws, one draw a size, and one in which no two tokens share an
                  expert before all are taken. Measured engines (Mixtral, Qwen3, MiniMax) lie at what
                  independent even choices touch, E (1 - (1 - k/E)^N): read from the latter table. But
                  gpt-oss-120b lies at the power laws (`planner/importers/silicon_experts.py`).
  mixed steps     attention of prefills and of decodes was measured apart. Where the GPU's row says that one
                  launch serves both, the decodes take what `mixed_kv_s` says, if that is longer.
  unlike layers   LLMs with `groups` are summed in `planner/importers/silicon_config.py`, as AIConfigurator
                  itself reads their config.json.
  other nodes     on PCIe all-reduces depend on the server: those of ROW_REDUCES are the GPU's row's.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.domain import Gpu
from planner.errors import InputError
from planner.importers.silicon_config import (
    INSTALL,
    ConfigKernels,
    all_reduces,
    config_folder,
    experts_format,
    is_as_in,
)
from planner.importers.silicon_experts import Milliseconds, dispatch_ms, expert_split, operation_ms
from planner.importers.silicon_sparse import shares_index
from planner.models.llm import Llm
from planner.models.memory import kv_cache_tokens
from planner.models.parallelism import mixed_kv_s, tp_s
from planner.models.step_tables import COLUMNS, StepShape, StepTable

Floats = npt.NDArray[np.float64]
VERSION = "0.12.0"
SYSTEMS = {
    "a100-80g": "a100_sxm",
    "h100-80g": "h100_sxm",
    "h200-141g": "h200_sxm",
    "b200-180g": "b200_sxm",
    "b300-288g": "b300_sxm",
    "gb200-186g": "gb200",
    "gb300-279g": "gb300",
    "l40s-48g": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
# All-reduces after attention, and after the feed-forward block.
REDUCES = ("ar_1", "ar_2", "moe_pre_dispatch", "moe_post_dispatch")
ROW_REDUCES = ("rtx-pro-6000",)
WITHOUT_FP8 = ("a100-80g",)
# Their tables of FP8 with a scale per tensor are untuned: up to three times the times of 16 bits.
UNTUNED_FP8_EXPERTS = ("h100-80g", "h200-141g")
BYTES = {"bf16": 2, "fp8": 1, "fp8-block": 1}
GEMMS = {"bf16": "bfloat16", "fp8": "fp8", "fp8-block": "fp8"}
# FP8 with a scale per tensor was measured untuned and is left out.
EXPERTS = {"bf16": "bfloat16", "fp8-block": "fp8_block"}
MOST_STEP_TOKENS = 32768
# The times at these token counts bound those of fewer tokens.
TOKENS = tuple(sorted(n * 2**i for i in range(14) for n in (2, 3)))


def step_grid() -> Iterator[StepShape]:
    """The steps that are fitted: prefills, decodes, and both in one step as chunked prefill makes them."""
    lengths = [*(tokens for tokens in TOKENS if tokens >= 16), MOST_STEP_TOKENS]
    for prompts, new, cached in product((1, 2, 4, 8), lengths, (0, 512, 2048, 8192, 16384, 65536, 122880)):
        if prompts * new <= MOST_STEP_TOKENS:
            yield StepShape(prompts, new, cached, 0, 0)
    batches = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    contexts = [128, *(tokens for tokens in TOKENS if 256 <= tokens <= 8192), 16384, 32768, 65536, 131072]
    for decodes, context in product(batches, contexts):
        yield StepShape(0, 0, 0, decodes, context)
    chunks, cached_tokens = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), (0, 2048, 8192)
    for new, cached, decodes, context in product(
        chunks, cached_tokens, (4, 16, 64, 128, 256, 512), (256, 512, 1024, 2048, 4096, 16384)
    ):
        yield StepShape(1, new, cached, decodes, context)


def random_steps(rng: np.random.Generator, steps: int) -> Iterator[StepShape]:
    """Steps off the grid, a third of each kind, for a check that no fit has seen."""

    def between(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))

    for i in range(steps):
        cached = int(rng.integers(2)) * between(64, 16384)
        if i % 3 == 0:
            prompts = between(1, 8)
            yield StepShape(prompts, between(16, MOST_STEP_TOKENS // prompts), cached, 0, 0)
        elif i % 3 == 1:
            yield StepShape(0, 0, 0, between(1, 512), between(128, 32768))
        else:
            yield StepShape(1, between(32, 8192), cached, between(1, 256), between(128, 16384))


def silicon_table(
    llm: Llm,
    gpu: Gpu,
    tp: int,
    steps: Iterable[StepShape] | None = None,
    *,
    ep: bool | None = None,
    folder: Path | None = None,
    dp: int = 1,
) -> StepTable:
    """The kernel times of `steps` (default: the grid), of those that context and KV cache allow. `ep`: every
    GPU has whole experts (`is_whole` says what None means). `folder`: of config.json, where AIConfigurator
    lacks a copy of the LLM's. With `dp` ranks what is a rank's own: without experts (`joint_seconds`).
    """
    if why := why_not_covered(llm, gpu, folder):
        raise InputError(f"{llm.name} on {gpu.name}: {why}")
    kv_tokens = kv_cache_tokens(llm, gpu, tp, dp=dp)
    fitting = [
        step
        for step in (step_grid() if steps is None else steps)
        if step.kv_tokens <= kv_tokens and max(step.new + step.cached, step.context) <= llm.context_tokens
    ]
    if not fitting:
        raise InputError(f"{llm.name} on {gpu.name} tp{tp}: no step fits its {kv_tokens} KV tokens")
    kernels = _kernels(llm, gpu, tp, ep, folder, dp)
    rows = [_row(step, kernels.step_ms(step)) for step in fitting]
    system = SYSTEMS[gpu.name]
    experts = "whole experts per GPU; " if is_whole(llm, tp, ep) else ""
    about = {
        "llm": llm.name,
        "gpu": gpu.name,
        "tp": str(tp),
        "source": f"AIConfigurator {VERSION} kernel times, vLLM, {system}; {experts}no host overhead",
    }
    return StepTable(pd.DataFrame(rows, columns=list(COLUMNS)), about)


def joint_seconds(
    llm: Llm, gpu: Gpu, tp: int, tokens: Sequence[int], *, ep: bool, dp: int, folder: Path | None = None
) -> Floats:
    """What a step of `dp` ranks takes for experts and for the way to them and back, by the tokens of all."""
    kernels = _kernels(llm, gpu, tp, ep, folder, dp)
    return np.array([kernels.joint_ms(n) for n in tokens]) / 1e3


def is_whole(llm: Llm, tp: int, ep: bool | None = None) -> bool:
    """Whether the GPUs have whole experts. Unsaid: only where slices would cut through blocks of fp8, as
    engines of 2025 refuse to.
    """
    if llm.experts == 1 or tp == 1:
        return False
    return expert_split(llm.ffn, experts_format(llm), tp, whole=ep)["moe_ep_size"] > 1


@lru_cache(maxsize=4)
def _kernels(
    llm: Llm, gpu: Gpu, tp: int, ep: bool | None, folder: Path | None, dp: int = 1
) -> Kernels | ConfigKernels:
    if not _is_plain(llm):
        place = folder or config_folder(llm)
        if place is None:
            raise InputError(INSTALL)
        return ConfigKernels(
            llm,
            gpu,
            SYSTEMS[gpu.name],
            tp,
            place,
            whole_experts=ep,
            reduces_by_row=gpu.name in ROW_REDUCES,
            dp=dp,
        )
    return Kernels(llm, gpu, tp, ep=ep, dp=dp)


def _is_plain(llm: Llm) -> bool:
    """Layers alike, in a format whose kernels are found without the LLM's own config."""
    return not llm.groups and llm.gated_ffn and llm.weights in BYTES


def why_not_covered(llm: Llm, gpu: Gpu, folder: Path | None = None) -> str:
    """Why there are no kernel times of this LLM on this GPU; empty if there may be."""
    if gpu.name not in SYSTEMS:
        return f"AIConfigurator lacks kernels of this GPU; use one of {', '.join(SYSTEMS)}"
    formats = {weights for _, weights, *_ in llm.parts()}
    if gpu.name in WITHOUT_FP8 and (eight := sorted(formats & {"fp8", "fp8-block", "nvfp4"})):
        return f"AIConfigurator lacks kernels of {eight[0]} weights on this GPU"
    if llm.kv_dtype_bytes not in (1, 2):
        return f"AIConfigurator lacks kernels of {llm.kv_dtype_bytes:g} bytes per KV value"
    if not llm.groups and not llm.gated_ffn:
        return "AIConfigurator's feed-forward blocks are all gated, those of this LLM are not"
    if not _is_plain(llm):
        if folder is None and find_spec("aiconfigurator_core") is not None:
            if (copies := config_folder(llm)) is None:
                return "AIConfigurator has no config.json of this LLM; give the folder of its own"
            if not is_as_in(llm, copies):
                return "AIConfigurator's config.json has other formats of weights; give the folder of its own"
        if shares_index(llm):
            return "AIConfigurator measured no attention of vLLM's without an index of its own"
        if gpu.name in UNTUNED_FP8_EXPERTS and experts_format(llm) == "fp8" and llm.is_mixture:
            return "AIConfigurator measured experts in fp8 untuned on this GPU"
        return ""
    if llm.dtype_bytes != BYTES[llm.weights]:
        return f"AIConfigurator lacks kernels of {llm.dtype_bytes:g} bytes per weight"
    if llm.experts > 1 and llm.weights not in EXPERTS:
        return f"AIConfigurator measured experts in {llm.weights} untuned"
    return ""


class Kernels:
    """The kernels of one LLM on `tp` GPUs of a system. Beyond its tables AIConfigurator extrapolates in
    silence.
    """

    def __init__(self, llm: Llm, gpu: Gpu, tp: int, *, ep: bool | None = None, dp: int = 1) -> None:
        self._llm, self._gpu, self._tp, system = llm, gpu, tp, SYSTEMS[gpu.name]
        self._dp = dp
        self._mixed_kv_ms = 1e3 * mixed_kv_s(llm, gpu, tp)
        self._engine, self._experts_ms = _compiled(llm, system, tp, ep, dp)
        self._dispatch_ms = dispatch_ms(self._engine, llm, tp * dp) if dp > 1 else None
        try:
            prompts, decodes = self._engine.run_static_per_op(batch_size=1, isl=64, osl=2)
            self._experts_ms(1)
        except (RuntimeError, ValueError) as error:
            why = str(error).split("{")[0].removesuffix("for ContextKey ").strip()
            raise InputError(f"{llm.name} on {system} tp{tp}: AIConfigurator lacks kernels: {why}") from None
        names = [name.removeprefix("context_") for name, *_ in prompts]
        self._prompts = [names.index("attention")]
        self._all_reduce = next(n for n, name in enumerate(names) if name in REDUCES)
        apart = {"attention", "logits_gemm", "moe"}
        if gpu.name in ROW_REDUCES or dp > 1:
            apart |= set(REDUCES)
        self._alike = [n for n, name in enumerate(names) if name not in apart]
        names = [name.removeprefix("generation_") for name, *_ in decodes]
        self._decodes, self._head = [names.index("attention")], [names.index("logits_gemm")]
        self._tokens_ms = cache(self._tokens_ms_anew)
        self._at_most = np.full((len(TOKENS) + 1, len(self._alike)), np.inf)
        for i in reversed(range(len(TOKENS))):
            self._at_most[i] = np.minimum(self._each_ms(TOKENS[i]), self._at_most[i + 1])

    def step_ms(self, step: StepShape) -> float:
        """Plain ints only: AIConfigurator refuses numpy's."""
        ms = self._tokens_ms(step.prompts * step.new + step.decodes)
        heads = self._engine.evaluate_generation_ops(self._head, batch_size=step.prompts + step.decodes, s=1)
        ms += float(heads[0][1])
        if step.prompts:
            ms += sum(
                ms
                for _, ms, *_ in self._engine.evaluate_context_ops(
                    self._prompts, batch_size=step.prompts, s=step.new, prefix=step.cached
                )
            )
        if step.decodes:  # A decode attends to one token more than its cached length.
            read_ms = sum(
                ms
                for _, ms, *_ in self._engine.evaluate_generation_ops(
                    self._decodes, batch_size=step.decodes, s=step.context
                )
            )
            ms += max(read_ms, step.decodes * step.context * self._mixed_kv_ms if step.prompts else 0.0)
        return ms

    def all_reduce_s(self, tokens: int) -> float:
        """One all-reduce of the activations of N tokens."""
        operations = self._engine.evaluate_context_ops([self._all_reduce], batch_size=1, s=tokens)
        return float(operations[0][1]) / self._llm.layers / 1e3

    def _tokens_ms_anew(self, tokens: int) -> float:
        at_most = self._at_most[np.searchsorted(TOKENS, tokens)]
        ms = float(np.minimum(self._each_ms(tokens), at_most).sum())
        if self._dp > 1:
            return ms + self._attention_reduces_ms(tokens)
        ms += self._experts_ms(tokens)
        if self._gpu.name in ROW_REDUCES:
            ms += 1e3 * float(tp_s(self._llm, self._gpu, self._tp, tokens))
        return ms

    def _attention_reduces_ms(self, tokens: int) -> float:
        """One all-reduce a layer, over the GPUs of a rank: after experts there is none."""
        if self._tp == 1:
            return 0.0
        if self._gpu.name in ROW_REDUCES:
            return 500 * float(tp_s(self._llm, self._gpu, self._tp, tokens))
        operation = json.dumps([all_reduces(self._llm, self._tp, self._llm.layers)])
        return float(self._engine.evaluate_ops_json(operation, is_context=True, batch_size=1, s=tokens)[0][1])

    def joint_ms(self, tokens: int) -> float:
        """Time of the experts that data-parallel ranks share [ms], for the tokens of all ranks."""
        assert self._dispatch_ms is not None
        if self._gpu.name in ROW_REDUCES:  # Gathered and reduced: as many bytes as in one all-reduce.
            return self._experts_ms(tokens) + 500 * float(
                tp_s(self._llm, self._gpu, self._tp * self._dp, tokens)
            )
        return self._experts_ms(tokens) + self._dispatch_ms(tokens)

    def _each_ms(self, tokens: int) -> Floats:
        operations = self._engine.evaluate_context_ops(self._alike, batch_size=1, s=tokens)
        return np.array([ms for _, ms, *_ in operations])


def _row(step: StepShape, t_ms: float) -> tuple[float, ...]:
    """The row of a step-time table for this step, in the order of COLUMNS."""
    prompts, new, cached, decodes, context = step
    pairs = prompts * new * (cached + (new + 1) / 2)
    return prompts, prompts * new, prompts * cached, pairs, decodes, decodes * context, t_ms / 1e3


def _compiled(llm: Llm, system: str, tp: int, ep: bool | None, dp: int) -> tuple[Any, Milliseconds]:
    """AIConfigurator's engine, and milliseconds that all layers' experts take for N tokens."""
    try:
        from aiconfigurator_core.sdk import EngineHandle
    except ImportError:
        raise InputError(INSTALL) from None
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    split = expert_split(llm.ffn, llm.weights, tp, whole=ep)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_config(llm)))
        engine = EngineHandle.compile(
            folder,
            system,
            "vllm",
            tp_size=tp,
            **split,
            gemm_quant_mode=GEMMS[llm.weights],
            moe_quant_mode=EXPERTS.get(llm.weights),
            kvcache_quant_mode="fp8" if llm.kv_dtype_bytes == 1 else "bfloat16",
            fmha_quant_mode="bfloat16",
        )
    if llm.experts == 1:
        return engine, lambda tokens: 0.0
    shared_by = expert_split(llm.ffn, llm.weights, tp * dp, whole=ep)
    return engine, operation_ms(engine, _experts_operation(llm, shared_by), system, llm)


def _experts_operation(llm: Llm, split: Mapping[str, int]) -> dict[str, Any]:
    """AIConfigurator's description of the experts of all layers."""
    return {
        "Moe": {
            "name": "moe",
            "scale_factor": float(llm.layers),
            "hidden_size": llm.hidden,
            "inter_size": llm.ffn,
            "topk": llm.experts_per_token,
            "num_experts": llm.experts,
            **split,
            "attention_dp_size": 1,
            "quant_mode": EXPERTS[llm.weights],
            "workload_distribution": "power_law_1.01",
            "is_gated": True,
            "moe_backend": None,
            "enable_eplb": False,
            "is_context": True,
        }
    }


def _config(llm: Llm) -> dict[str, Any]:
    """A Hugging Face config.json of this shape."""
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
    if llm.experts == 1:
        return config
    return config | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": llm.ffn,
        "num_experts": llm.experts,
        "num_experts_per_tok": llm.experts_per_token,
    }
