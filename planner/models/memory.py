"""KV tokens one worker can hold, counted as vLLM counts.

    KV tokens = (gpu_bytes * utilisation - weights - activations - reserve) / kv_bytes_per_token

with everything counted on one GPU of the worker, the one with the least room. Tensor parallelism splits
weights and KV heads; with more GPUs than KV heads the heads are copied, so a token costs each GPU one KV head
at least. Pipeline parallelism splits the layers, and the longest stage has ceil(layers / PP) of them; the
first stage also holds the embeddings and the few dense layers of a mixture, the last one the output head.
Each data-parallel rank has its own KV cache and its own copy of all weights except experts, which are dealt
out to the GPUs of all ranks, whole or in slices. If weights are quantised, embeddings and head keep 16 bits.

Activations: vLLM profiles one step of `max_num_batched_tokens` tokens, then samples `max_num_seqs` rows, and
keeps the larger peak free. The peak in the layers holds the residual stream and its norm (hidden each, whole
on every GPU) and the feed-forward block's gate, up and their product (split over TP). A mixture holds gate,
up and product once per expert that a token visits, and the output of each such expert (hidden, whole) before
the sum. With data-parallel ranks on one node every GPU gets the tokens of all ranks (vLLM's
allgather_reducescatter), and makes room for their experts' values as if all were its own; for ranks on
several nodes see planner/models/all2all.py. The peak in the sampler, on the last stage, holds the residual
stream and four numbers for each row and word of the vocabulary: the logit in 16 and in 32 bits, the
probability, and a random number.

Reserve: card memory that CUDA does not show, what vLLM calls non-torch memory (cuBLAS, and between GPUs NCCL
and the workspaces of all-reduces), the CUDA graphs that vLLM 0.21 and later keep free, and for attention with
an index a workspace that grows with `max_model_len`. The numbers come from the logs in
benchmarks/kv_capacity.yaml.

SGLang profiles no step. For activations and graphs it keeps free, in MiB on each GPU,

    512 + 1.5 max(token budget, 2048) + 2 G + 128 TP PP,  with ranks 3 G DP more (4.5 G DP if G > 300)

and at least 10 GiB on GPUs of more than 60 GiB; G is the largest batch of its graphs (server_args.py of
0.5.9, read on 2026-11-28; not compared with a log). Its weights and what CUDA takes are counted as vLLM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.domain import KV_BLOCK_TOKENS, Gpu
from planner.errors import InputError
from planner.models.all2all import activation_bytes, all2all_of
from planner.models.engine import DEPLOYED_VERSION, Engine, vllm_version_of
from planner.models.kv_layout import kv_layout
from planner.models.latency import Array
from planner.models.llm import CompressedAttention, FeedForward, LatentAttention, LayerGroup, Llm
from planner.models.parallelism import ACTIVATION_BYTES

# The catalog has the figures of nvidia-smi, which reports this much more memory than CUDA: 81559 MiB against
# 79.19 GiB on H100, 284208 MiB against 277.0 GiB on GB300. vLLM takes its share of CUDA's figure.
DRIVER_BYTES = 0.5 * 2**30
# Non-torch memory of one GPU. A GPU of a group has more: GROUP_BYTES or OTHER_GROUP_BYTES, by the group's
# link; over NVLink 5 these are buffers of NCCL and of FlashInfer's all-reduces. All are medians over the logs
# of benchmarks/kv_capacity.yaml of the memory that no other term explains.
NON_TORCH_BYTES = 0.4 * 2**30
# Releases before 0.10 had more non-torch memory: 1.8 GiB, and twice that in a group of GPUs.
FIRST_WITH_SMALL_NON_TORCH = (0, 10)
OLD_NON_TORCH_BYTES = 1.8 * 2**30
GROUP_BYTES = {"NVLink 5": 3.0 * 2**30}
OTHER_GROUP_BYTES = 0.5 * 2**30
# A mixture with at most this many dense layers has them first (DeepSeek-V3, Kimi-K2, GLM-5). One with more
# has them all over (Llama 4).
MOST_FIRST_DENSE = 3
# A worker that holds fewer KV tokens is too small for real prompts. Set by hand.
LEAST_KV_TOKENS = 4096
# Bytes of a layer's captured CUDA graphs, by what the layer is (`_graph_bytes`).
GRAPH_BYTES = {"dense": 15e6, "experts": 29e6, "latent": 46e6, "compressed": 72e6}
# From this release on the graphs are kept free before the cache is sized, and sampling does not sort.
FIRST_WITH_GRAPHS = (0, 21)
# Rows are (GPUs with less memory than this [MiB], the largest batch of SGLang's graphs with TP below 4, and
# with TP 4 and more).
SGLANG_GRAPHS = (
    (20 * 1024, (8, 8)),
    (35 * 1024, (24, 80)),
    (60 * 1024, (32, 160)),
    (160 * 1024, (256, 512)),
    (math.inf, (512, 512)),
)
# Bytes per row and word of the vocabulary in the sampler: the logit in 16 bits, and in 32 bits the logit, its
# probability and a random number.
SAMPLER_BYTES = 2.0 + 4.0 + 4.0 + 4.0
SORTING_SAMPLER_BYTES = 32.0  # Releases before FIRST_WITH_GRAPHS sort the logits and take this much.
# DeepSeek-V4's hyper-connections carry this many residual streams (`hc_mult`).
STREAMS = 4
# vLLM's index gathers keys of 132 bytes in a workspace of 40 times the longest request.
INDEX_WORKSPACE_BYTES = 40 * 132.0


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What decides the memory besides the worker type: vLLM's version, the longest request that it serves
    (None: the LLM's context), and the share of the GPU that it may use. With `engine` "sglang" that share is
    what SGLang chooses itself.
    """

    version: str = DEPLOYED_VERSION
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    engine: str = "vllm"

    @classmethod
    def of_engine(cls, engine: Engine | None) -> MemorySettings:
        """The memory settings of an engine's usual start. None is the deployed vLLM. SGLang has a formula of
        its own for what it keeps free; the rest is counted as on the deployed vLLM.
        """
        if engine is None:
            return cls()
        return cls(vllm_version_of(engine), engine="sglang" if engine.name == "sglang" else "vllm")

    @property
    def release(self) -> tuple[int, ...]:
        """Major and minor number of the version, to be compared with the constants above."""
        return tuple(int(part) for part in self.version.split(".")[:2])


USUAL_SETTINGS = MemorySettings()


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of one GPU of a worker by use. `kv_bytes` is negative if the other uses exceed the budget.

    `step_bytes` are the part of the KV cache that the tokens of a step take only until the step ends
    (`KvLayout.step_blocks_per_token`).
    """

    budget_bytes: float
    weight_bytes: float
    activation_bytes: float
    reserve_bytes: float
    kv_bytes_per_token: float
    step_bytes: float = 0.0

    @property
    def kv_bytes(self) -> float:
        """Bytes that are left for KV."""
        return self.budget_bytes - self.weight_bytes - self.activation_bytes - self.reserve_bytes

    @property
    def kv_tokens(self) -> int:
        """The KV tokens of the worker, or of each of its ranks, in whole blocks; 0 if the weights do not fit.

        The worker has no more tokens than this GPU, because each GPU has its own heads of all tokens.
        """
        lasting_bytes = self.kv_bytes - self.step_bytes
        blocks = math.floor(lasting_bytes / self.kv_bytes_per_token / KV_BLOCK_TOKENS)
        return max(blocks, 0) * KV_BLOCK_TOKENS


def worker_memory(
    llm: Llm,
    gpu: Gpu,
    tp: int,
    pp: int = 1,
    *,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    dp: int = 1,
    settings: MemorySettings = USUAL_SETTINGS,
) -> Memory:
    """The breakdown for the fullest GPU of a worker; the keywords are vLLM's settings of these names."""
    stages = stage_memory(
        llm,
        gpu,
        tp,
        pp,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        dp=dp,
        settings=settings,
    )
    # The stage with the fewest KV tokens, without `step_bytes`: they cost each stage equally many tokens.
    return min(stages, key=lambda stage: stage.kv_bytes / stage.kv_bytes_per_token)


def stage_memory(
    llm: Llm,
    gpu: Gpu,
    tp: int,
    pp: int,
    *,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    dp: int = 1,
    settings: MemorySettings = USUAL_SETTINGS,
) -> tuple[Memory, ...]:
    """The breakdown for one GPU of each pipeline stage, first to last."""
    if tp < 1 or llm.heads % tp:
        raise InputError(f"LLM {llm.name}: tensor parallelism is {tp}, must divide its {llm.heads} heads")
    if not 1 <= pp <= llm.layers:
        raise InputError(f"LLM {llm.name}: pipeline parallelism is {pp}, must be 1 to {llm.layers} (layers)")
    is_sglang = settings.engine == "sglang"
    utilization = 1.0 if is_sglang else settings.gpu_memory_utilization
    if not 0 < utilization <= 1:
        raise InputError(f"gpu_memory_utilization is {utilization}, must be in (0, 1]")
    layout = kv_layout(llm, tp)
    kv_bytes_per_token = layout.block_bytes / KV_BLOCK_TOKENS + scales_bytes(llm, gpu)
    release = settings.release
    has_graphs = release >= FIRST_WITH_GRAPHS and not is_sglang
    if dp < 1 or (dp > 1 and not llm.is_mixture):
        raise InputError(
            f"LLM {llm.name}: data parallelism is {dp}, must be 1 without routed experts: its ranks would "
            "share nothing, take several workers"
        )
    reserve_bytes = _reserve_bytes(gpu, tp * dp, utilization, release)
    if is_sglang:
        layers_peak = sampler_peak = _sglang_free_bytes(gpu, tp, pp, dp, max_num_batched_tokens)
    else:
        layers_peak = _layers_peak_bytes(llm, gpu, tp, dp, max_num_batched_tokens)
        # Each sequence of a step has a row of logits, and at least one of the step's tokens.
        rows = min(max_num_seqs, max_num_batched_tokens)
        sampler_peak = max_num_batched_tokens * llm.hidden * ACTIVATION_BYTES
        # The release that keeps graphs free is also the first whose sampler does not sort.
        sampler_peak += rows * llm.vocab * (SAMPLER_BYTES if has_graphs else SORTING_SAMPLER_BYTES)
        reserve_bytes += _index_bytes(llm, settings.max_model_len or llm.context_tokens)
    graph_bytes = has_graphs * _graph_bytes(llm)
    step_bytes = max_num_batched_tokens * layout.step_blocks_per_token * layout.block_bytes
    stages = []
    for stage, layers in enumerate(stage_layers(llm, pp)):
        is_first, is_last = stage == 0, stage == pp - 1
        stages.append(
            Memory(
                budget_bytes=gpu.memory_bytes * utilization,
                weight_bytes=_stage_weight_bytes(llm, tp, dp, layers, is_first=is_first, is_last=is_last),
                activation_bytes=max(layers_peak, sampler_peak) if is_last else layers_peak,
                reserve_bytes=reserve_bytes + graph_bytes * layers / llm.layers,
                kv_bytes_per_token=kv_bytes_per_token * layers / llm.layers,
                step_bytes=step_bytes * layers / llm.layers,
            )
        )
    return tuple(stages)


def _stage_weight_bytes(llm: Llm, tp: int, dp: int, layers: int, *, is_first: bool, is_last: bool) -> float:
    """Bytes of the weights that a GPU of a pipeline stage of `layers` layers has."""
    experts_bytes = sum(
        parameters * llm.bytes_per_weight(weights)
        for part, weights, parameters, _ in llm.parts()
        if part == "experts"
    )
    # Tied embeddings are the output head's matrix: one stage holds it once.
    has_embeddings = is_first and not (is_last and llm.tied_embeddings)
    # Bytes of a weight of the output head and of one of the embeddings, where the stage has them.
    vocabulary_dtype_bytes = is_last * llm.head_dtype_bytes + has_embeddings * llm.embedding_dtype_bytes
    weight_bytes = layers / llm.layers * (llm.layers_bytes - experts_bytes)
    # Experts are shared by the ranks.
    weight_bytes += _experts_frac(llm, layers, is_first=is_first) * experts_bytes / dp
    weight_bytes += llm.vocab * llm.hidden * vocabulary_dtype_bytes
    # Dividing by TP splits all weights. Every GPU has a whole copy of some, so the rest of these is added.
    rest_of_whole_bytes = _whole_bytes(llm) * layers / llm.layers * (1 - 1 / tp)
    # The encoder is whole, on the first stage.
    return weight_bytes / tp + rest_of_whole_bytes + is_first * llm.encoder_bytes


def scales_bytes(llm: Llm, gpu: Gpu) -> float:
    """Bytes per token that KV in 8 bits takes besides its values, where latent attention chooses tokens.

    Before Blackwell there is a scale of 32 bits per 128 values, and the rotated values have 16 bits, so a
    token takes 656 bytes in place of 576 (FlashMLA's fp8_ds_mla,
    vllm/v1/attention/backends/mla/flashmla_sparse.py). On Blackwell FlashInfer needs neither.
    """
    if llm.kv_dtype_bytes != 1 or gpu.fp4_flops_per_s:
        return 0.0
    return sum(
        group.count * (4 * group.attention.kv_rank / 128 + group.attention.rope_dim)
        for group in llm.layer_groups
        if isinstance(group.attention, LatentAttention) and group.attention.index_tokens
    )


def _experts_frac(llm: Llm, layers: int, *, is_first: bool) -> float:
    """The share of all routed experts in a stage of `layers` layers.

    If a mixture has at most MOST_FIRST_DENSE dense layers, these are its first layers. In other LLMs experts
    are spread evenly.
    """
    dense = sum(
        group.count
        for group in llm.layer_groups
        if group.feed_forward is not None and group.feed_forward.experts == 1
    )
    dense = dense if llm.is_mixture and dense <= MOST_FIRST_DENSE else 0
    return max(layers - is_first * dense, 0) / (llm.layers - dense)


def _layers_peak_bytes(llm: Llm, gpu: Gpu, tp: int, dp: int, budget_tokens: int) -> float:
    """The peak [bytes] in the layers, in a step of `budget_tokens` tokens, as the module's docstring counts
    it.
    """
    has_streams = any(isinstance(group.attention, CompressedAttention) for group in llm.layer_groups)
    # Values of a token: `stream` in the residual stream or streams and the norm, `in_block` in the
    # feed-forward block.
    stream = 2 * llm.hidden * (STREAMS if has_streams else 1)
    all2all = all2all_of(tp * dp, gpu.gpus_per_node, budget_tokens) if dp > 1 else ""
    if all2all:  # Ranks on several nodes.
        return budget_tokens * stream * ACTIVATION_BYTES + activation_bytes(llm, all2all, budget_tokens, tp)
    # With data-parallel ranks experts are dealt out whole, so their values are not split over TP.
    # A gated block holds gate, up and their product, one without a gate one value fewer.
    in_block = (3 if llm.gated_ffn else 2) * llm.ffn * llm.experts_per_token / (tp if dp == 1 else 1)
    if llm.experts > 1:
        in_block += llm.experts_per_token * llm.hidden  # The output of each expert that the token visits.
    return budget_tokens * (stream + dp * in_block) * ACTIVATION_BYTES


def _whole_bytes(llm: Llm) -> float:
    """Bytes of the weights of all layers that tensor parallelism copies to every GPU. Where a layer has some
    weights in 16 bits, these are among them.
    """
    whole_bytes = 0.0
    for group in llm.layer_groups:
        if isinstance(attention := group.attention, LatentAttention | CompressedAttention):
            parameters = attention.whole_parameters(llm.hidden)
            in_16_bits = min(attention.bf16_parameters, parameters)
            others_bytes = (parameters - in_16_bits) * llm.bytes_per_weight(attention.weights)
            whole_bytes += group.count * (2.0 * in_16_bits + others_bytes)
    return whole_bytes


def _reserve_bytes(gpu: Gpu, gpus: int, utilization: float, release: tuple[int, ...]) -> float:
    """Memory that CUDA does not show, non-torch memory, and the buffers of a group of GPUs."""
    if release < FIRST_WITH_SMALL_NON_TORCH:
        return DRIVER_BYTES * utilization + OLD_NON_TORCH_BYTES * (2 if gpus > 1 else 1)
    group_bytes = GROUP_BYTES.get(gpu.link, OTHER_GROUP_BYTES) if gpus > 1 else 0.0
    return DRIVER_BYTES * utilization + NON_TORCH_BYTES + group_bytes


def _sglang_free_bytes(gpu: Gpu, tp: int, pp: int, dp: int, budget_tokens: int) -> float:
    """Bytes of a GPU that SGLang keeps free for activations and CUDA graphs (the module's docstring)."""
    gpu_mib = gpu.memory_bytes / 2**20
    below_tp4, from_tp4 = next(sizes for most_mib, sizes in SGLANG_GRAPHS if gpu_mib < most_mib)
    graph_batch = from_tp4 if tp >= 4 else below_tp4  # G in the module's docstring.
    free_mib = 512 + 1.5 * max(budget_tokens, 2048) + 2 * graph_batch + 128 * tp * pp
    if dp > 1:
        free_mib += graph_batch * dp * (3 if graph_batch <= 300 else 4.5)
    return 2**20 * (max(free_mib, 10 * 1024) if gpu_mib > 60 * 1024 else free_mib)


def _graph_bytes(llm: Llm) -> float:
    """Bytes of the CUDA graphs of all layers, captured at vLLM's usual batch sizes."""

    def kind(group: LayerGroup) -> str:
        if isinstance(group.attention, CompressedAttention):
            return "compressed"
        if isinstance(group.attention, LatentAttention):
            return "latent"
        return "experts" if group.feed_forward is not None and group.feed_forward.experts > 1 else "dense"

    return sum(group.count * GRAPH_BYTES[kind(group)] for group in llm.layer_groups)


def _index_bytes(llm: Llm, max_model_len: int) -> float:
    """Bytes of the workspace in which attention with an index gathers its keys; 0 without an index."""
    has_index = any(
        isinstance(group.attention, LatentAttention | CompressedAttention) and group.attention.index_heads
        for group in llm.layer_groups
    )
    return has_index * INDEX_WORKSPACE_BYTES * max_model_len


def stage_layers(llm: Llm, pp: int) -> tuple[int, ...]:
    """The layers of each pipeline stage, as vLLM partitions them: evenly, and those that remain go to the
    stages just before the last one, which has the output head instead.
    """
    # The last `longer_stages` of the stages before the last one have a layer more.
    least, longer_stages = divmod(llm.layers, pp)
    return tuple(least + (pp - 1 - longer_stages <= stage < pp - 1) for stage in range(pp))


def fits_memory(llm: Llm, gpu: Gpu, tp: int, *, dp: int = 1) -> bool:
    """Whether a worker holds the weights and at least LEAST_KV_TOKENS, with vLLM's usual settings."""
    return worker_memory(llm, gpu, tp, dp=dp).kv_tokens >= LEAST_KV_TOKENS


def active_weight_bytes(llm: Llm, tokens: float | Array = 1.0) -> Array:
    """Bytes of weights that a step of N tokens reads, over all GPUs.

    All but the input embeddings are read, and of a mixture only the experts that some token visits.
    """
    read = np.zeros_like(np.asarray(tokens, dtype=float))
    for group in llm.layer_groups:
        attention, block = group.attention, group.feed_forward
        if attention is not None:
            in_16_bits = attention.bf16_parameters
            other_parameters = attention.parameters(llm.hidden) - in_16_bits
            read += group.count * (
                other_parameters * llm.bytes_per_weight(attention.weights) + 2.0 * in_16_bits
            )
        if block is not None:
            experts = touched_experts(block, tokens) * block.expert_parameters(llm.hidden)
            read += group.count * experts * llm.bytes_per_weight(block.weights)
            read += (
                group.count * block.shared_parameters(llm.hidden) * llm.bytes_per_weight(block.shared_weights)
            )
    return np.asarray(read + llm.vocab * llm.hidden * llm.head_dtype_bytes)


def touched_experts(block: Llm | FeedForward, tokens: float | Array) -> Array:
    """The mean number of a layer's experts that N tokens visit, if each visits k of E at random."""
    share = block.experts_per_token / block.experts
    return np.asarray(block.experts * (1 - (1 - share) ** np.asarray(tokens, dtype=float)))
