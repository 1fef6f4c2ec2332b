"""Kernel times of LLMs whose layers differ, from AIConfigurator, which reads their config.json itself. It is
optional, so it is imported on use.

The time of "operations of tokens" depends on a step's tokens alone (matrices, norms, experts, all-reduces),
that of "operations of sequences" also on contexts (attention, states). The time of a step of N tokens is the
sum of

    operations of tokens, at N tokens, and the output head, at a row per prompt and per decode
    operations of sequences, for the prompts and for the decodes

with the corrections of `planner/importers/silicon.py` (fp8-block, few tokens, experts) and these:

  all-reduces     we count one after every attention and every feed-forward block, and one of the embeddings.
                  AIConfigurator counts twice as many for DeepSeek, and half as many for Gemma 4.
  dense layers    AIConfigurator takes the dense first layers of DeepSeek, Kimi, GLM-5 and MiniMax-M3 for
                  layers of experts, which are 1 to 4 % too long (`count_experts_layers`).
  full layers     AIConfigurator takes the first layers of MiniMax-M3, whose attention is full, for sparse
                  ones (`count_sparse_layers`).
  shared experts  run beside the routed ones in vLLM up to MOST_SHARED_STREAM_TOKENS tokens: only the
                  longer of the two times counts.
  modules         latent and sparse attention was measured together with its projections, as one module, for
                  prompts and for decodes apart. A step that has both reads the weights only once, so the time
                  of one short decode, which is mostly reading weights, is subtracted (`_weights_ms`).
  launches        latent attention of decodes was measured without CUDA graphs, except on B200: 80 to 120 us
                  for a sequence of one token whose parts take 40 to 50, and twice as long on GB200 and B300,
                  which are no slower than B200. The excess of one sequence over its parts counts as launches
                  if it is above LAUNCHED_FRAC of their sum, and is subtracted at every batch. For sparse
                  attention of prompts see `planner/importers/silicon_sparse.py`.
  formats         those of sparse attention come from the catalog's row, because AIConfigurator takes a
                  checkpoint of which only the norms are in 16 bits (GLM-5-FP8) for one in 16 bits.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.documents.llm_config import llm_from_config
from planner.domain import Gpu
from planner.errors import InputError
from planner.importers.silicon_experts import ExpertsTimes, dispatch_ms, expert_split, operation_ms
from planner.importers.silicon_sparse import SparsePrompts
from planner.models.llm import GroupedAttention, LatentAttention, Llm
from planner.models.parallelism import mixed_kv_s, tp_s
from planner.models.roofline import experts_layers
from planner.models.step_tables import StepShape

Floats = npt.NDArray[np.float64]
Operation = dict[str, Any]
# Kinds of operations in AIConfigurator; entries of MODULES are the beginnings of kinds.
OF_TOKENS = ("Gemm", "Elementwise", "Embedding", "Mhc")
REDUCES = ("CustomAllReduce", "MoeDispatch", "P2P")
MODULES = ("MlaModule", "Dsa", "Msa", "Dsv4")
SPARSE = ("DsaContext", "DsaGeneration")
# Kinds of modules of grouped attention with an index -> the kinds of the same attention without one.
FULL = {"MsaContext": "ContextAttention", "MsaGeneration": "GenerationAttention"}
# Kernels of plain attention in the order in which AIConfigurator looks them up for vLLM.
LANES = (
    *("vllm_flash_attn_fa3", "vllm_flash_attn_fa4", "fa3", "fla", "flashinfer"),
    *("triton", "trtllm_mha", "default"),
)
# Kinds of plain attention -> the kinds of modules in which latent attention was measured as a whole.
PLAIN = {"ContextAttention": "MlaModuleContext", "GenerationAttention": "MlaModuleGeneration"}
# Ends of the names of matrices that a measured attention module includes.
LATENT_PARTS = ("downscale_gemm", "q_b_proj_gemm", "kv_b_proj_gemm", "_proj_gemm")
MOST_SHARED_STREAM_TOKENS = 256  # vLLM's VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD.
LAUNCHED_FRAC = 0.5  # A smaller excess ("launches" above) counts as an error of measurement.
SAME_FRAC = 0.01  # Weights of the same formats differ in bytes by less than this.
# Formats of dense matrices that were measured without CUDA graphs -> the format whose times are used instead.
WITHOUT_GRAPHS = {"fp8_block": "fp8"}
# Formats of dense blocks -> AIConfigurator's names of them.
DENSE_FORMATS = {"bf16": "bfloat16", "fp8": "fp8", "fp8-block": "fp8_block", "nvfp4": "nvfp4"}
# 2, 3, 4, 6, 8, 12 ... tokens; an operation on one of these takes at least as long as on fewer tokens.
BOUNDING_TOKENS = tuple(sorted(n * 2**i for i in range(14) for n in (2, 3)))
INSTALL = "kernel times need AIConfigurator: pip install 'fleetplan[silicon]' (Linux x86-64)"
QUANTISER = "hf_quant_config.json"  # The file beside config.json with the formats of quantised weights.
# The errors that AIConfigurator raises where it has no measurement.
LACKING = (RuntimeError, ValueError, AssertionError, LookupError, TypeError, AttributeError)


def config_folder(llm: Llm) -> Path | None:
    """AIConfigurator's folder of copies of config.json; None if it has none of this LLM."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model_configs"
    return folder if _files_of(llm.name, folder) else None


@cache
def has_same_weights(llm: Llm, folder: Path) -> bool:
    """Whether the config.json in `folder` has weights of as many bytes as the LLM.

    Some of AIConfigurator's copies say NVFP4 where the published checkpoint keeps attention and states in 8
    or 16 bits.
    """
    with tempfile.TemporaryDirectory() as copy:
        for name, path in _files_of(llm.name, folder).items():
            shutil.copyfile(path, Path(copy, name))
        theirs = llm_from_config(Path(copy))
    ours_bytes = llm.weight_bytes - llm.encoder_bytes
    return abs(theirs.weight_bytes - theirs.encoder_bytes - ours_bytes) <= SAME_FRAC * ours_bytes


def _files_of(name: str, folder: Path) -> dict[str, Path]:
    """The paths of config.json and of a quantiser's file beside it, by name; empty without a config.json.

    `folder` is that of a checkpoint, the one with AIConfigurator's copies, or `benchmarks/configs`.
    """
    stem = name.replace("/", "--")
    names = (f"{stem}_config.json", f"{stem}.json", "config.json")
    config = next((folder / each for each in names if (folder / each).exists()), None)
    if config is None:
        return {}
    files = {"config.json": config}
    quantiser = folder / (QUANTISER if config.name == "config.json" else f"{stem}_{QUANTISER}")
    return files | ({QUANTISER: quantiser} if quantiser.exists() else {})


class ConfigKernels:
    """The kernels of one LLM on `tp` GPUs of a system, by the config.json in `folder`.

    `whole_experts` is `whole` of `expert_split`. With `reduces_by_row` the times of all-reduces come from the
    GPU's row of the catalog. `dp` data-parallel ranks share the experts, whose times are those of vLLM's
    default kernels or of `experts_of`. Raises InputError where AIConfigurator lacks kernels.
    """

    def __init__(
        self,
        llm: Llm,
        gpu: Gpu,
        system: str,
        tp: int,
        folder: Path,
        *,
        whole_experts: bool | None = None,
        reduces_by_row: bool = False,
        dp: int = 1,
        experts_of: ExpertsTimes | None = None,
    ) -> None:
        self._llm, self._gpu, self._tp, self._by_row, self._dp = llm, gpu, tp, reduces_by_row, dp
        self._mixed_kv_ms = 1e3 * mixed_kv_s(llm, gpu, tp)
        self._tokens_ms = cache(self._compute_tokens_ms)
        split = expert_split(llm.ffn, experts_format(llm), tp, whole=whole_experts)
        try:
            spec = _build_spec(llm, system, tp, split, folder)
            experts = self._sort_operations(spec)
            if dp > 1:
                split = expert_split(llm.ffn, experts_format(llm), tp * dp, whole=whole_experts)
                experts = [{"Moe": each["Moe"] | split} for each in experts]
            self._engine = _build_engine(spec)
            self._dispatch_ms = dispatch_ms(self._engine, llm, tp * dp) if dp > 1 else None
            experts_of = experts_of or partial(operation_ms, self._engine)
            self._experts_ms = [experts_of(each, system, llm) for each in experts]
            self._launches_ms = self._launch_excess_ms()
            self._weights_ms = self._modules_ms(1, 1)
            self._sparse = SparsePrompts(self._measured_ms, self._weights_ms) if self._is_sparse else None
            self._at_most_ms = least_of_more_tokens(self._operation_ms)
            # Raises now if any kind of kernel is lacking: a step of a prompt and a decode needs all of them.
            self.step_ms(StepShape(prompts=1, new=64, cached=0, decodes=1, context=64))
        except LACKING as error:
            why = str(error)
            # AIConfigurator's messages end in dictionaries, paths and lists, which do not help users.
            for end in ("{", " at /", ", which", " Supported architectures"):
                why = why.split(end)[0]
            why = why.strip().rstrip(".")
            raise InputError(f"{llm.name} on {system} tp{tp}: AIConfigurator lacks kernels: {why}") from None

    def step_ms(self, step: StepShape) -> float:
        """Time of a step [ms]. The step holds Python's ints: AIConfigurator refuses numpy's."""
        ms = self._tokens_ms(step.prompts * step.new + step.decodes)
        rows = step.prompts + step.decodes  # The output head computes one row per sequence.
        ms += _sum_ms(self._engine.evaluate_generation_ops([0], batch_size=rows, s=1))
        if step.prompts:
            ms += self._prompts_ms(step.prompts, step.new, step.cached)
        if step.decodes:
            modules_ms = self._modules_ms(step.decodes, step.context)
            read_ms = self._decodes_ms(self._unfused_operations, step.decodes, step.context)
            if step.prompts:
                modules_ms = max(modules_ms - self._weights_ms, 0.0)
                read_ms = max(read_ms, step.decodes * step.context * self._mixed_kv_ms)
            ms += modules_ms + read_ms
        return ms

    def _prompts_ms(self, prompts: int, new: int, cached: int) -> float:
        """Time of the attention of alike prompts with `new` tokens after `cached` ones [ms]."""
        if self._sparse is not None:
            return self._sparse.step_ms(prompts, new, cached)
        ms = self._measured_ms(prompts, new, cached)
        if cached and self._module_operations:  # Modules were not measured with few tokens after cached ones.
            ms = max(ms, self._measured_ms(prompts, new))
        return ms

    def _measured_ms(self, prompts: int, new: int, cached: int = 0) -> float:
        """Time of the attention of prompts [ms] as the tables have it."""
        return _sum_ms(
            self._engine.evaluate_context_ops(
                self._prompt_operations, batch_size=prompts, s=new, prefix=cached
            )
        )

    def _sort_operations(self, spec: Operation) -> list[Operation]:
        """Reorder the operations of `spec`, note the positions of each kind, and return those of experts.

        Operations of tokens come first among `context_ops`; the output head is the first of `generation_ops`.
        """
        context = count_experts_layers(count_sparse_layers(spec["context_ops"], self._llm), self._llm)
        decodes = count_sparse_layers(spec["generation_ops"], self._llm)
        # `as_measured` replaces plain attention by modules, which include these matrices.
        has_plain_latent = _is_latent(self._llm) and any(_kind_of(each) in PLAIN for each in decodes)
        if has_plain_latent:
            context = [each for each in context if not _name_of(each).endswith(LATENT_PARTS)]
        of_tokens = [
            _as_graphed(each) for each in context if _kind_of(each) in OF_TOKENS and not _is_head(each)
        ]
        of_prompts = [as_measured(each, self._llm) for each in context if _is_of_sequences(each)]
        of_decodes = [as_measured(each, self._llm) for each in decodes if _is_of_sequences(each)]
        heads = [each for each in (*decodes, *context) if _is_head(each)][:1]
        if not heads or not of_prompts or not of_decodes:
            raise ValueError("its operations are not those of a decoder")
        if self._tp > 1 and not self._by_row:
            count = self._count_reduces() + 1.0  # The embeddings have one more.
            of_tokens.append(all_reduces(self._llm, self._tp, count))
        self._is_shared = np.array([_is_shared(each) for each in of_tokens], dtype=bool)
        self._token_operations = list(range(len(of_tokens)))
        self._prompt_operations = list(range(len(of_tokens), len(of_tokens) + len(of_prompts)))
        self._is_sparse = all(_kind_of(each) in SPARSE for each in of_prompts)
        # Positions count from 1, behind the output head.
        is_module = [_kind_of(each).startswith(MODULES) for each in of_decodes]
        self._module_operations = [n for n, module in enumerate(is_module, start=1) if module]
        self._unfused_operations = [n for n, module in enumerate(is_module, start=1) if not module]
        parts = [_latent_parts(each, self._llm) for each in decodes]
        if has_plain_latent:
            parts.append([each for each in decodes if _name_of(each).endswith(LATENT_PARTS)])
        self._parts = [json.dumps(part) for part in parts if part]
        spec["context_ops"] = [_name_uniquely(n, each) for n, each in enumerate(of_tokens)] + of_prompts
        spec["generation_ops"] = heads + of_decodes
        return [each for each in context if _kind_of(each) == "Moe"]

    def _compute_tokens_ms(self, tokens: int) -> float:
        """Time of all that depends on the tokens of a step alone [ms]; `_tokens_ms` caches it."""
        at_most_ms = self._at_most_ms[np.searchsorted(BOUNDING_TOKENS, tokens)]
        each_ms = np.minimum(self._operation_ms(tokens), at_most_ms)
        shared_ms = float(each_ms[self._is_shared].sum())
        experts_ms = sum(of_layers(tokens) for of_layers in self._experts_ms)
        is_parallel = tokens <= MOST_SHARED_STREAM_TOKENS
        if self._dp > 1:
            # `joint_ms` has the time of the routed experts, for the tokens of all ranks. Added here is only
            # the excess of the shared experts over it.
            ms = max(shared_ms - experts_ms, 0.0) if is_parallel else shared_ms
        else:
            ms = max(shared_ms, experts_ms) if is_parallel else shared_ms + experts_ms
        if self._by_row:
            share = self._count_reduces() / (2 * self._llm.layers)  # `tp_s` is of two reduces per layer.
            ms += 1e3 * share * float(tp_s(self._llm, self._gpu, self._tp, tokens))
        return ms + float(each_ms[~self._is_shared].sum())

    def _count_reduces(self) -> int:
        """All-reduces of a step over the GPUs of TP; data-parallel ranks have none after experts."""
        return count_blocks(self._llm) - (experts_layers(self._llm) if self._dp > 1 else 0)

    def joint_ms(self, tokens: int) -> float:
        """Time of the experts that data-parallel ranks share [ms], for the tokens of all ranks."""
        assert self._dispatch_ms is not None
        ms = sum(of_layers(tokens) for of_layers in self._experts_ms)
        if self._by_row:  # Gathering and reducing move as many bytes as one all-reduce.
            share = experts_layers(self._llm) / (2 * self._llm.layers)
            return ms + 1e3 * share * float(tp_s(self._llm, self._gpu, self._tp * self._dp, tokens))
        return ms + self._dispatch_ms(tokens)

    def _operation_ms(self, tokens: int) -> Floats:
        """Times [ms] of the operations that depend on the tokens of a step alone, in order."""
        operations = self._engine.evaluate_context_ops(self._token_operations, batch_size=1, s=tokens)
        return np.array([ms for _, ms, *_ in operations])

    def _modules_ms(self, decodes: int, context: int) -> float:
        """Time of attention modules of decodes [ms], without launches."""
        return max(self._decodes_ms(self._module_operations, decodes, context) - self._launches_ms, 0.0)

    def _launch_excess_ms(self) -> float:
        """Time of launches in latent attention of decodes ("launches" above)."""
        if not self._parts:
            return 0.0
        # Some entries of the tables are too long, so the least of several batches counts.
        least_ms = min(self._parts_ms(decodes) for decodes in (1, 2, 4, 8))
        excess_ms = self._decodes_ms(self._module_operations, 1, 1) - least_ms
        return excess_ms if excess_ms > LAUNCHED_FRAC * least_ms else 0.0

    def _parts_ms(self, decodes: int) -> float:
        """Sum of the times of the parts of latent attention [ms], for `decodes` sequences of one token."""
        return sum(
            _sum_ms(self._engine.evaluate_ops_json(part, is_context=False, batch_size=decodes, s=1))
            for part in self._parts
        )

    def _decodes_ms(self, operations: list[int], decodes: int, context: int) -> float:
        """Time of these operations [ms] for `decodes` sequences that each attend to `context` + 1 tokens."""
        if not operations:
            return 0.0
        return _sum_ms(self._engine.evaluate_generation_ops(operations, batch_size=decodes, s=context))


def least_of_more_tokens(operation_ms: Callable[[int], Floats]) -> Floats:
    """Bounds (B + 1, O) on the times [ms] of O operations, for the B BOUNDING_TOKENS.

    Row i has the least time on the i-th of these tokens or more; the last row is infinite and bounds nothing.
    `operation_ms` gives the times (O,) on N tokens.
    """
    at_tokens_ms = np.array([operation_ms(tokens) for tokens in BOUNDING_TOKENS])
    bounded_ms = np.vstack([at_tokens_ms, np.full((1, at_tokens_ms.shape[1]), np.inf)])
    return np.asarray(np.minimum.accumulate(bounded_ms[::-1])[::-1])


def _sum_ms(operations: Iterable[tuple[Any, ...]]) -> float:
    """The sum of the second entries [ms] of these operations."""
    return float(sum(ms for _, ms, *_ in operations))


def experts_format(llm: Llm) -> str:
    """The weight format of the routed experts; without experts that of the LLM."""
    return next((weights for part, weights, *_ in llm.parts() if part == "experts"), llm.weights)


def count_blocks(llm: Llm) -> int:
    """The number of attention and feed-forward blocks, each of which ends in an all-reduce."""
    return sum(
        group.count * ((group.attention is not None) + (group.feed_forward is not None))
        for group in llm.layer_groups
    )


def _build_spec(llm: Llm, system: str, tp: int, split: Mapping[str, Any], folder: Path) -> Operation:
    """AIConfigurator's operations of prompts (`context_ops`) and of decodes (`generation_ops`)."""
    try:
        from aiconfigurator_core.sdk import engine, perf_database
        from aiconfigurator_core.sdk.config_builders import build_model_config
        from aiconfigurator_core.sdk.models import get_model
    except ImportError:
        raise InputError(INSTALL) from None
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as copy:
        for name, path in _files_of(llm.name, folder).items():
            shutil.copyfile(path, Path(copy, name))
        config = build_model_config(
            tp_size=tp,
            pp_size=1,
            attention_dp_size=1,
            **split,
            kvcache_quant_mode="fp8" if llm.kv_dtype_bytes == 1 else "bfloat16",
            fmha_quant_mode="bfloat16",
        )
        model = get_model(copy, config, "vllm")
        version = perf_database.resolve_query_version(system, "vllm", "current")
        written = engine.build_engine_spec_json(
            model,
            model_path=copy,
            system=system,
            backend="vllm",
            backend_version=version,
            kv_block_size=None,
            systems_path=None,
            nextn=0,
            database=perf_database.get_database(system, "vllm", version),
        )
    spec: Operation = json.loads(written)
    return spec


def _build_engine(spec: Operation) -> Any:
    """The engine of aiconfigurator with the operations of `spec`, which gives the time of each."""
    import aiconfigurator_core
    from aiconfigurator_core.sdk import EngineHandle

    return EngineHandle(bytes(aiconfigurator_core.engine_spec_bincode_from_json(json.dumps(spec))))


def _kind_of(operation: Operation) -> str:
    """The kind of an operation: the only key of its mapping."""
    return next(iter(operation))


def _name_of(operation: Operation) -> str:
    """The name that aiconfigurator gives to an operation."""
    return str(operation[_kind_of(operation)]["name"])


def _is_head(operation: Operation) -> bool:
    """Whether the operation is the LLM's output projection."""
    return _name_of(operation).endswith("logits_gemm")


def _is_shared(operation: Operation) -> bool:
    """Whether an operation is part of a shared expert, which every token visits.

    Gemma's `shared_mlp` is not: it is a dense block before the experts.
    """
    return "shared_" in _name_of(operation) and "shared_mlp" not in _name_of(operation)


def count_experts_layers(operations: list[Operation], llm: Llm) -> list[Operation]:
    """The operations, with experts in the layers that have them ("dense layers" above).

    A dense block computes the operations of the shared expert, wider and in its own format.
    """
    counted = sum(each["Moe"]["scale_factor"] for each in operations if "Moe" in each)
    if counted == experts_layers(llm):
        return operations
    share = experts_layers(llm) / counted
    blocks = [(group.count, group.feed_forward) for group in llm.layer_groups if group.feed_forward]
    shared = [each for each in operations if _is_shared(each)]
    if not shared:
        raise ValueError("nothing tells the operations of its dense layers")
    shared_width = max(block.shared_width for _, block in blocks)
    return [_in_layers(each, share) if _is_of_experts(each) else each for each in operations] + [
        _as_dense(each, count, block.width / shared_width, block.weights)
        for count, block in blocks
        if block.experts == 1
        for each in shared
    ]


def count_sparse_layers(operations: list[Operation], llm: Llm) -> list[Operation]:
    """The operations, with an index in the layers that have one, and plain attention and its projections in
    the others ("full layers" above).
    """
    grouped = [
        (group.count, group.attention)
        for group in llm.layer_groups
        if isinstance(group.attention, GroupedAttention)
    ]
    sparse_layers = sum(count for count, attention in grouped if attention.index_heads)
    counted: list[Operation] = []
    for each in operations:
        kind = _kind_of(each)
        if kind not in FULL or each[kind]["scale_factor"] == sparse_layers:
            counted.append(each)
            continue
        counted.append({kind: each[kind] | {"scale_factor": float(sparse_layers)}})
        for count, attention in grouped:
            if not attention.index_heads:
                counted += _full_attention(kind, each[kind], count, DENSE_FORMATS[attention.weights])
    return counted


def _full_attention(kind: str, fields: Operation, layers: int, weights: str) -> list[Operation]:
    """Plain attention of `layers` layers with the heads of a module with an index, and its projections."""
    name, heads, kv_heads = fields["name"], fields["num_heads"], fields["num_kv_heads"]
    attention = {
        "name": f"{name}_full",
        "scale_factor": float(layers),
        "n": heads,
        "n_kv": kv_heads,
        "head_size": fields["head_dim"],
        "window_size": 0,
        "kv_cache_dtype": fields["kv_cache_dtype"],
        "lane_order": list(LANES),
    }
    if kind == "MsaContext":
        attention |= {"fmha_quant_mode": fields["fmha_quant_mode"], "use_qk_norm": True, "cp_size": 1}
    queries, hidden = heads * fields["head_dim"], fields["hidden_size"]
    shapes = {"qkv": (queries + 2 * kv_heads * fields["head_dim"], hidden), "proj": (hidden, queries)}
    return [
        {FULL[kind]: attention},
        *(
            {
                "Gemm": {
                    "name": f"{name}_full_{part}_gemm",
                    "scale_factor": float(layers),
                    "n": n,
                    "k": k,
                    "quant_mode": weights,
                    "scale_num_tokens": 1,
                    "low_precision_input": False,
                    "seq_split": 1,
                    "below_grid_sol": False,
                }
            }
            for part, (n, k) in shapes.items()
        ),
    ]


def _is_of_experts(operation: Operation) -> bool:
    """Whether only layers with experts have the operation."""
    return "Moe" in operation or _is_shared(operation) or _name_of(operation).endswith("router_gemm")


def _in_layers(operation: Operation, share: float) -> Operation:
    kind = _kind_of(operation)
    return {kind: operation[kind] | {"scale_factor": operation[kind]["scale_factor"] * share}}


def _as_dense(operation: Operation, layers: int, times: float, weights: str) -> Operation:
    """An operation of a shared expert as that of `layers` dense blocks `times` as wide."""
    kind, name = _kind_of(operation), _name_of(operation).replace("shared", "dense")
    fields = operation[kind] | {"name": name, "scale_factor": float(layers)}
    if kind != "Gemm":
        return {kind: fields | {"bytes_per_token": fields["bytes_per_token"] * times}}
    width = "n" if name.endswith("gate_up_gemm") else "k"
    return {kind: fields | {width: round(fields[width] * times), "quant_mode": DENSE_FORMATS[weights]}}


def _is_of_sequences(operation: Operation) -> bool:
    """Whether the operation's time depends on sequences and their contexts, and not on tokens alone."""
    return _kind_of(operation) not in (*OF_TOKENS, *REDUCES, "Moe", "Overlap") and not _is_head(operation)


def _as_graphed(operation: Operation) -> Operation:
    """A matrix in the format that was measured inside CUDA graphs (WITHOUT_GRAPHS); any other operation
    unchanged.
    """
    kind = _kind_of(operation)
    fields = operation[kind]
    if kind != "Gemm":
        return operation
    return {kind: fields | {"quant_mode": WITHOUT_GRAPHS.get(fields["quant_mode"], fields["quant_mode"])}}


def _name_uniquely(n: int, operation: Operation) -> Operation:
    """The operation with a name of its own: AIConfigurator adds up the times of operations of one name."""
    kind = _kind_of(operation)
    return {kind: operation[kind] | {"name": f"{n} {_name_of(operation)}"}}


def _is_latent(llm: Llm) -> bool:
    return any(isinstance(group.attention, LatentAttention) for group in llm.layer_groups)


def as_measured(operation: Operation, llm: Llm) -> Operation:
    """The measured operation that fits how vLLM runs this one.

    Latent attention is replaced by a whole module in 16 bits, because AIConfigurator's plain attention has
    keys and values for each head, which vLLM does not cache. DeepSeek-V4's attention gets a cache in 8 bits,
    which vLLM always uses.
    """
    kind = _kind_of(operation)
    fields = operation[kind]
    if kind == "Fallback":
        primary: Operation = fields["primary"]
        return primary
    if kind.startswith("Dsv4"):
        return {kind: fields | {"kv_cache_dtype": "fp8"}}
    if kind in SPARSE:
        return {kind: fields | _row_formats(llm, fields)}
    if kind not in PLAIN or not _is_latent(llm):
        return operation
    return {
        PLAIN[kind]: {
            "name": fields["name"],
            "scale_factor": fields["scale_factor"],
            "num_heads": fields["n"],
            "kv_cache_dtype": fields["kv_cache_dtype"],
            "fmha_quant_mode": "bfloat16",
            "gemm_quant_mode": "bfloat16",
            "native_num_heads": llm.heads,
        }
    }


def _row_formats(llm: Llm, fields: Operation) -> Operation:
    """Fields for projections in fp8-block if all latent attention of the LLM has them, otherwise none."""
    formats = {
        (group.attention.weights, group.attention.bf16_parameters)
        for group in llm.layer_groups
        if isinstance(group.attention, LatentAttention)
    }
    if formats != {("fp8-block", 0.0)}:
        return {}
    projections = dict.fromkeys(fields["attn_projection_quant_modes"], "fp8_block")
    return {"gemm_quant_mode": "fp8_block", "attn_projection_quant_modes": projections}


def _latent_parts(operation: Operation, llm: Llm) -> list[Operation]:
    """The separately measured parts of a decode's latent attention; empty for other operations.

    They are projections, products with both halves of the expansion, and attention to one token.
    """
    kind = _kind_of(operation)
    fields = operation[kind]
    if kind == "Fallback":
        parts = [_as_graphed(each) for each in fields["fallback"]]
        module = next(iter(fields["primary"].values()))
        layers, heads = module["scale_factor"], module["num_heads"]
    elif kind == "GenerationAttention" and _is_latent(llm):
        parts, layers, heads = [operation], fields["scale_factor"], fields["n"]
    else:
        return []
    product = {"name": "expansion", "scale_factor": layers, "num_heads": heads, "quant_mode": "bfloat16"}
    return [*parts, *({"MlaBmm": product | {"is_pre": is_pre}} for is_pre in (True, False))]


def all_reduces(llm: Llm, tp: int, count: float) -> Operation:
    """The operation that stands for `count` all-reduces of a step."""
    return {
        "CustomAllReduce": {
            "name": "all_reduce",
            "scale_factor": float(count),
            "hidden_size": llm.hidden,
            "tp_size": tp,
            "quant": "half",
            "seq_split": 1,
        }
    }
