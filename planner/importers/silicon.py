"""Step tables from AIConfigurator's kernel measurements ("silicon"), without a GPU.

NVIDIA measured the kernels of vLLM (GEMM, attention, experts, all-reduce) on the GPUs of SYSTEMS. The time of
a step of N tokens is the sum of

    all operations but attention and the output head, at N tokens
    the output head, for one token of each prompt and of each decode
    attention of the prompts, and attention of the decodes

Scheduler, sampling and host take no time here, so a fit has host overhead h = 0. Needs
`pip install 'fleetplan[silicon]'`, which is imported on use.

The tables are corrected where engines behave otherwise:

  fp8-block      its dense GEMMs were measured without CUDA graphs: none takes less than its launch, 60 to 90
                 us on H100 and 180 on B200, where fp8 with a scale per tensor takes 10. From 2048 tokens on,
                 where launches hardly count, the two formats differ by 20 % at most. So the times of fp8
                 with a scale per tensor are used for both.
  few tokens     some times in the tables are twice what they should be. An operation on N tokens can be
                 padded to more tokens, so its time is bounded by the times for these.
  experts        AIConfigurator has two kinds of table. One draws the experts of a token from a power law; in
                 the other no two tokens share an expert before all experts are in use. Measured engines
                 (Mixtral, Qwen3, MiniMax) use as many experts as independent even choices do,
                 E (1 - (1 - k/E)^N), so the second table is read at this number of experts; gpt-oss-120b
                 fits the power law (importers/silicon_experts.py).
  mixed steps    attention of prefills and of decodes was measured apart. If the GPU's row of the catalog says
                 that one launch serves both, decodes take at least `mixed_kv_s`.
  unlike layers  LLMs with several groups of layers (`Llm.groups`) are summed in importers/silicon_config.py,
                 as AIConfigurator itself reads their config.json.
  other nodes    on PCIe, the times of all-reduces depend on the server: for the GPUs of ROW_REDUCES they come
                 from the catalog.
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
from planner.importers import silicon_config
from planner.importers.silicon_config import BOUNDING_TOKENS
from planner.importers.silicon_experts import (
    ExpertsTimes,
    MsByTokens,
    dispatch_ms,
    expert_split,
    operation_ms,
)
from planner.importers.silicon_sparse import shares_index
from planner.models.llm import Llm
from planner.models.memory import worker_memory
from planner.models.parallelism import mixed_kv_s, tp_s
from planner.models.step_tables import COLUMNS, StepShape, StepTable

Floats = npt.NDArray[np.float64]
VERSION = "0.12.0"
# AIConfigurator's name of each GPU's system.
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
# AIConfigurator's names of all-reduces: after attention, after the feed-forward block, around experts.
REDUCES = ("ar_1", "ar_2", "moe_pre_dispatch", "moe_post_dispatch")
# GPUs on PCIe, for which the all-reduces of the catalog's row are taken ("other nodes" above).
ROW_REDUCES = ("rtx-pro-6000",)
WITHOUT_FP8 = ("a100-80g",)  # These GPUs have no FP8 kernels.
# Experts in FP8 with a scale per tensor were measured untuned here: up to three times the times of 16 bits.
UNTUNED_FP8_EXPERTS = ("h100-80g", "h200-141g")
# By the format of weights: bytes per weight, AIConfigurator's name of the format for matrices, and its name
# for experts. EXPERTS lacks FP8 with a scale per tensor, in which experts were measured untuned.
BYTES = {"bf16": 2, "fp8": 1, "fp8-block": 1}
GEMMS = {"bf16": "bfloat16", "fp8": "fp8", "fp8-block": "fp8"}
EXPERTS = {"bf16": "bfloat16", "fp8-block": "fp8_block"}
MOST_STEP_TOKENS = 32768  # Most prompt tokens in a step of the grid.
# `tp_s` gives the seconds of two all-reduces per layer; multiplied by HALF_MS, the milliseconds of one.
HALF_MS = 500.0


def step_grid() -> Iterator[StepShape]:
    """The steps that are fitted: prefills, decodes, and a chunk of a prompt beside decodes.

    The numbers, set by hand, are powers of two and some between them, up to what engines serve.
    """
    lengths = [*(tokens for tokens in BOUNDING_TOKENS if tokens >= 16), MOST_STEP_TOKENS]
    for prompts, new, cached in product((1, 2, 4, 8), lengths, (0, 512, 2048, 8192, 16384, 65536, 122880)):
        if prompts * new <= MOST_STEP_TOKENS:
            yield StepShape(prompts, new, cached, 0, 0)
    batches = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    contexts = [
        128,
        *(tokens for tokens in BOUNDING_TOKENS if 256 <= tokens <= 8192),
        16384,
        32768,
        65536,
        131072,
    ]
    for decodes, context in product(batches, contexts):
        yield StepShape(0, 0, 0, decodes, context)
    chunks, cached_tokens = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), (0, 2048, 8192)
    for new, cached, decodes, context in product(
        chunks, cached_tokens, (4, 16, 64, 128, 256, 512), (256, 512, 1024, 2048, 4096, 16384)
    ):
        yield StepShape(1, new, cached, decodes, context)


def random_steps(rng: np.random.Generator, steps: int) -> Iterator[StepShape]:
    """Steps off the grid, to check a fit on steps that it has not seen: prefills, decodes and mixed steps.

    Their sizes are drawn log-uniformly within the grid's range, or a narrower one for mixed steps.
    """

    def draw_log_uniform(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))

    for i in range(steps):
        cached = int(rng.integers(2)) * draw_log_uniform(64, 16384)
        if i % 3 == 0:
            prompts = draw_log_uniform(1, 8)
            yield StepShape(prompts, draw_log_uniform(16, MOST_STEP_TOKENS // prompts), cached, 0, 0)
        elif i % 3 == 1:
            yield StepShape(0, 0, 0, draw_log_uniform(1, 512), draw_log_uniform(128, 32768))
        else:
            yield StepShape(
                1, draw_log_uniform(32, 8192), cached, draw_log_uniform(1, 256), draw_log_uniform(128, 16384)
            )


def silicon_table(
    llm: Llm,
    gpu: Gpu,
    tp: int,
    steps: Iterable[StepShape] | None = None,
    *,
    ep: bool | None = None,
    folder: Path | None = None,
    dp: int = 1,
    experts_of: ExpertsTimes | None = None,
) -> StepTable:
    """The kernel times of all `steps` (default: the grid) that fit into context and KV cache.

    `ep`: every GPU has whole experts (`is_whole` explains None). `folder` has the config.json if
    AIConfigurator has no copy of it. With several ranks (`dp`) the experts, which they share, are left out:
    `joint_seconds` has their time. `experts_of` is as in ConfigKernels. Raises InputError if AIConfigurator
    lacks kernels.
    """
    if why := why_not_covered(llm, gpu, folder):
        raise InputError(f"{llm.name} on {gpu.name}: {why}")
    kv_tokens = worker_memory(llm, gpu, tp, dp=dp).kv_tokens
    fitting = [
        step
        for step in (step_grid() if steps is None else steps)
        if step.kv_tokens <= kv_tokens and max(step.new + step.cached, step.context) <= llm.context_tokens
    ]
    if not fitting:
        raise InputError(f"{llm.name} on {gpu.name} tp{tp}: no step fits its {kv_tokens} KV tokens")
    kernels = _find_kernels(llm, gpu, tp, ep, folder, dp, experts_of)
    rows = [_table_row(step, kernels.step_ms(step)) for step in fitting]
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
    llm: Llm, gpu: Gpu, tp: int, tokens: Sequence[int], *, dp: int, folder: Path | None = None
) -> Floats:
    """Seconds of a step of `dp` ranks, whose GPUs have whole experts, for the experts and for sending tokens
    to them and back: one value for each of `tokens`, the tokens of all ranks together.
    """
    kernels = _find_kernels(llm, gpu, tp, True, folder, dp)
    return np.array([kernels.joint_ms(n) for n in tokens]) / 1e3


def is_whole(llm: Llm, tp: int, ep: bool | None = None) -> bool:
    """Whether each GPU has some whole experts instead of a slice of every expert: as `ep` says.

    With `ep` None GPUs have slices, unless these would cut through blocks of fp8, which engines of 2025
    refuse.
    """
    if llm.experts == 1 or tp == 1:
        return False
    return expert_split(llm.ffn, silicon_config.experts_format(llm), tp, whole=ep)["moe_ep_size"] > 1


@lru_cache(maxsize=4)
def _find_kernels(
    llm: Llm,
    gpu: Gpu,
    tp: int,
    ep: bool | None,
    folder: Path | None,
    dp: int = 1,
    experts_of: ExpertsTimes | None = None,
) -> Kernels | silicon_config.ConfigKernels:
    """The kernels of an LLM. The latest are cached, as a table and its check need the same kernels."""
    if not _is_plain(llm):
        place = folder or silicon_config.config_folder(llm)
        if place is None:
            raise InputError(silicon_config.INSTALL)
        return silicon_config.ConfigKernels(
            llm,
            gpu,
            SYSTEMS[gpu.name],
            tp,
            place,
            whole_experts=ep,
            reduces_by_row=gpu.name in ROW_REDUCES,
            dp=dp,
            experts_of=experts_of,
        )
    return Kernels(llm, gpu, tp, ep=ep, dp=dp)


def _is_plain(llm: Llm) -> bool:
    """Whether all layers are alike, in a format whose kernels need no config.json of the LLM."""
    return not llm.groups and llm.gated_ffn and llm.weights in BYTES


def why_not_covered(llm: Llm, gpu: Gpu, folder: Path | None = None) -> str:
    """Why there are no kernel times of this LLM on this GPU; empty if there may be."""
    if gpu.name not in SYSTEMS:
        return f"AIConfigurator lacks kernels of this GPU; use one of {', '.join(SYSTEMS)}"
    formats = {weights for _, weights, *_ in llm.parts()}
    if gpu.name in WITHOUT_FP8 and (lacking := sorted(formats & {"fp8", "fp8-block", "nvfp4"})):
        return f"AIConfigurator lacks kernels of {lacking[0]} weights on this GPU"
    if llm.kv_dtype_bytes not in (1, 2):
        return f"AIConfigurator lacks kernels of {llm.kv_dtype_bytes:g} bytes per KV value"
    if not llm.groups and not llm.gated_ffn:
        return "AIConfigurator's feed-forward blocks are all gated, those of this LLM are not"
    if not _is_plain(llm):
        if folder is None and find_spec("aiconfigurator_core") is not None:
            if (copies := silicon_config.config_folder(llm)) is None:
                return "AIConfigurator has no config.json of this LLM; give the folder of its own"
            if not silicon_config.has_same_weights(llm, copies):
                return "AIConfigurator's config.json has other formats of weights; give the folder of its own"
        if shares_index(llm):
            return "AIConfigurator measured no attention of vLLM's without an index of its own"
        if gpu.name in UNTUNED_FP8_EXPERTS and silicon_config.experts_format(llm) == "fp8" and llm.is_mixture:
            return "AIConfigurator measured experts in fp8 untuned on this GPU"
        return ""
    if llm.dtype_bytes != BYTES[llm.weights]:
        return f"AIConfigurator lacks kernels of {llm.dtype_bytes:g} bytes per weight"
    if llm.experts > 1 and llm.weights not in EXPERTS:
        return f"AIConfigurator measured experts in {llm.weights} untuned"
    return ""


class Kernels:
    """The kernels of one LLM, whose layers are alike, on `tp` GPUs of a system.

    AIConfigurator extrapolates beyond its tables without saying so. Raises InputError if it lacks kernels.
    """

    def __init__(self, llm: Llm, gpu: Gpu, tp: int, *, ep: bool | None = None, dp: int = 1) -> None:
        self._llm, self._gpu, self._tp, system = llm, gpu, tp, SYSTEMS[gpu.name]
        self._dp = dp
        self._mixed_kv_ms = 1e3 * mixed_kv_s(llm, gpu, tp)
        self._engine, self._experts_ms = _compile_engine(llm, system, tp, ep, dp)
        self._dispatch_ms = dispatch_ms(self._engine, llm, tp * dp) if dp > 1 else None
        try:
            # Any lengths will do: only names and order of the operations are used. Lacking kernels raise.
            prompts, decodes = self._engine.run_static_per_op(batch_size=1, isl=64, osl=2)
            self._experts_ms(1)  # Raises now if the experts' kernels are lacking.
        except (RuntimeError, ValueError) as error:
            # AIConfigurator's message begins with the kernel that it lacks; a dictionary follows.
            why = str(error).split("{")[0].removesuffix("for ContextKey ").strip()
            raise InputError(f"{llm.name} on {system} tp{tp}: AIConfigurator lacks kernels: {why}") from None
        names = [name.removeprefix("context_") for name, *_ in prompts]
        self._prompts = [names.index("attention")]
        self._all_reduce = next(n for n, name in enumerate(names) if name in REDUCES)
        computed_apart = {"attention", "logits_gemm", "moe"}
        if gpu.name in ROW_REDUCES or dp > 1:
            computed_apart |= set(REDUCES)
        self._token_operations = [n for n, name in enumerate(names) if name not in computed_apart]
        decode_names = [name.removeprefix("generation_") for name, *_ in decodes]
        self._decodes, self._head = [decode_names.index("attention")], [decode_names.index("logits_gemm")]
        self._tokens_ms = cache(self._compute_tokens_ms)
        self._at_most_ms = silicon_config.least_of_more_tokens(self._operation_ms)

    def step_ms(self, step: StepShape) -> float:
        """Time of a step [ms]. The step holds Python's ints: AIConfigurator refuses numpy's."""
        ms = self._tokens_ms(step.prompts * step.new + step.decodes)
        heads = self._engine.evaluate_generation_ops(self._head, batch_size=step.prompts + step.decodes, s=1)
        ms += float(heads[0][1])
        if step.prompts:
            prompts = self._engine.evaluate_context_ops(
                self._prompts, batch_size=step.prompts, s=step.new, prefix=step.cached
            )
            ms += sum(attention_ms for _, attention_ms, *_ in prompts)
        if step.decodes:  # A decode attends to one token more than its cached length.
            decodes = self._engine.evaluate_generation_ops(
                self._decodes, batch_size=step.decodes, s=step.context
            )
            read_ms = sum(attention_ms for _, attention_ms, *_ in decodes)
            # "mixed steps" of the module's docstring.
            least_ms = step.decodes * step.context * self._mixed_kv_ms if step.prompts else 0.0
            ms += max(read_ms, least_ms)
        return ms

    def all_reduce_s(self, tokens: int) -> float:
        """Seconds of one all-reduce of the activations of this many tokens."""
        operations = self._engine.evaluate_context_ops([self._all_reduce], batch_size=1, s=tokens)
        return float(operations[0][1]) / self._llm.layers / 1e3

    def _compute_tokens_ms(self, tokens: int) -> float:
        """Time of all that depends on the tokens of a step alone [ms]; `_tokens_ms` caches it."""
        at_most_ms = self._at_most_ms[np.searchsorted(BOUNDING_TOKENS, tokens)]
        ms = float(np.minimum(self._operation_ms(tokens), at_most_ms).sum())
        if self._dp > 1:
            return ms + self._attention_reduces_ms(tokens)
        ms += self._experts_ms(tokens)
        if self._gpu.name in ROW_REDUCES:
            ms += 1e3 * float(tp_s(self._llm, self._gpu, self._tp, tokens))
        return ms

    def _attention_reduces_ms(self, tokens: int) -> float:
        """Time of the all-reduces after attention [ms], over the GPUs of a rank. Experts have none."""
        if self._tp == 1:
            return 0.0
        if self._gpu.name in ROW_REDUCES:
            return HALF_MS * float(tp_s(self._llm, self._gpu, self._tp, tokens))
        operation = json.dumps([silicon_config.all_reduces(self._llm, self._tp, self._llm.layers)])
        return float(self._engine.evaluate_ops_json(operation, is_context=True, batch_size=1, s=tokens)[0][1])

    def joint_ms(self, tokens: int) -> float:
        """Time of the experts that data-parallel ranks share [ms], for the tokens of all ranks."""
        assert self._dispatch_ms is not None
        if self._gpu.name in ROW_REDUCES:  # Gathering and reducing move as many bytes as one all-reduce.
            all_reduces_s = float(tp_s(self._llm, self._gpu, self._tp * self._dp, tokens))
            return self._experts_ms(tokens) + HALF_MS * all_reduces_s
        return self._experts_ms(tokens) + self._dispatch_ms(tokens)

    def _operation_ms(self, tokens: int) -> Floats:
        """Times [ms] of the operations that depend on the tokens of a step alone, in order."""
        operations = self._engine.evaluate_context_ops(self._token_operations, batch_size=1, s=tokens)
        return np.array([ms for _, ms, *_ in operations])


def _table_row(step: StepShape, t_ms: float) -> tuple[float, ...]:
    """The row of a step-time table for this step, in the order of COLUMNS."""
    prompts, new, cached, decodes, context = step
    pairs = prompts * new * (cached + (new + 1) / 2)  # Pairs of a new token and one that it attends to.
    return prompts, prompts * new, prompts * cached, pairs, decodes, decodes * context, t_ms / 1e3


def _compile_engine(llm: Llm, system: str, tp: int, ep: bool | None, dp: int) -> tuple[Any, MsByTokens]:
    """AIConfigurator's engine, and milliseconds that all layers' experts take for N tokens."""
    try:
        from aiconfigurator_core.sdk import EngineHandle
    except ImportError:
        raise InputError(silicon_config.INSTALL) from None
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    split = expert_split(llm.ffn, llm.weights, tp, whole=ep)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_config_json(llm)))
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


def _config_json(llm: Llm) -> dict[str, Any]:
    """A Hugging Face config.json with the LLM's shape, from which AIConfigurator compiles its engine."""
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
