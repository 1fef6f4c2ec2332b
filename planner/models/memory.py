"""KV tokens one worker can hold, counted as vLLM counts.

    KV tokens = (gpu_bytes * utilisation - weights - activations - reserve) / kv_bytes_per_token

with everything counted on one GPU of the worker, the one with the least room. Tensor parallelism splits
weights and KV heads; once it exceeds the KV heads these are copied, so a token costs each GPU one KV head at
least. Pipeline parallelism splits the layers; the first stage also holds the embeddings, the last one the
output head, and the longest stage ceil(layers / PP) layers. Data-parallel ranks have keys, values and all
other weights of their own; experts are dealt out to the GPUs of all ranks, whole or in slices. Where weights
are quantised, embeddings and head keep 16 bits.

Activations: vLLM profiles one step of `max_num_batched_tokens` tokens, then samples `max_num_seqs` rows, and
keeps the larger peak free. In the layers these are alive: the residual stream and its norm (hidden each,
whole on every GPU), the feed-forward block's gate, up and their product (split over TP). A mixture holds
gate, up and product once per expert a token visits, and each such expert's output (hidden, whole) before the
sum. Of data-parallel ranks on one node every GPU gets the tokens of all (vLLM's allgather_reducescatter), and
makes room for their experts' values as if all were its own; of ranks on several nodes what
`planner/models/all2all.py` says. In the sampler, on the last stage: the residual stream, and
for each row and word of the vocabulary its logit in 16 and in 32 bit, its probability and a random number.

Reserve: what vLLM calls non-torch memory (CUDA context, NCCL), the CUDA graphs, and fragmentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.domain import KV_BLOCK_TOKENS, Gpu
from planner.errors import InputError
from planner.models.all2all import activation_bytes, all2all_of
from planner.models.kv_layout import kv_layout
from planner.models.latency import Array
from planner.models.llm import FeedForward, Llm

# RUNTIME_BYTES covers the CUDA context, CUDA graphs, cuBLAS workspaces and fragmentation of one GPU, and
# NCCL_BYTES the NCCL buffers by the size of a TP group. Both are AIConfigurator 0.12.0's, in
# systems/{a100,h100,h200}_sxm.yaml (other_mem, nccl_mem).
RUNTIME_BYTES = 3.5 * 2**30
# Bytes per row and word in vLLM 0.32's sampler; releases of 2025 sorted the logits and took 32.
SAMPLER_BYTES = 2.0 + 4.0 + 4.0 + 4.0
NCCL_BYTES = {1: 0.0, 2: 342 * 2.0**20, 4: 392 * 2.0**20, 8: 392 * 2.0**20}


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of one GPU of a worker by use. `kv_bytes` is negative if the other uses exceed the budget."""

    budget_bytes: float
    weight_bytes: float
    activation_bytes: float
    reserve_bytes: float
    kv_bytes_per_token: float

    @property
    def kv_bytes(self) -> float:
        return self.budget_bytes - self.weight_bytes - self.activation_bytes - self.reserve_bytes

    @property
    def kv_tokens(self) -> int:
        """The KV tokens of the worker in whole blocks; every GPU holds its heads of all of them."""
        blocks = math.floor(self.kv_bytes / self.kv_bytes_per_token / KV_BLOCK_TOKENS)
        return max(blocks, 0) * KV_BLOCK_TOKENS


def worker_memory(
    llm: Llm,
    gpu: Gpu,
    tp: int,
    pp: int = 1,
    *,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    dp: int = 1,
) -> Memory:
    """The breakdown for the fullest GPU of a worker; the keywords are vLLM's settings of these names."""
    stages = stage_memory(
        llm,
        gpu,
        tp,
        pp,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        dp=dp,
    )
    return min(stages, key=lambda stage: stage.kv_bytes / stage.kv_bytes_per_token)


def stage_memory(
    llm: Llm,
    gpu: Gpu,
    tp: int,
    pp: int,
    *,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    dp: int = 1,
) -> tuple[Memory, ...]:
    """The breakdown for one GPU of each pipeline stage, first to last."""
    if tp < 1 or llm.heads % tp:
        raise InputError(f"LLM {llm.name}: tensor parallelism is {tp}, must divide its {llm.heads} heads")
    if not 1 <= pp <= llm.layers:
        raise InputError(f"LLM {llm.name}: pipeline parallelism is {pp}, must be 1 to {llm.layers} (layers)")
    if not 0 < gpu_memory_utilization <= 1:
        raise InputError(f"gpu_memory_utilization is {gpu_memory_utilization}, must be in (0, 1]")
    head = llm.vocab * llm.hidden
    block_bytes = kv_layout(llm, tp).block_bytes
    if dp < 1 or (dp > 1 and not llm.is_mixture):
        raise InputError(
            f"LLM {llm.name}: data parallelism is {dp}, must be 1 without routed experts: its ranks would "
            "share nothing, take several workers"
        )
    width = (3 if llm.gated_ffn else 2) * llm.ffn * llm.experts_per_token / (tp if dp == 1 else 1)
    if llm.experts > 1:
        width += llm.experts_per_token * llm.hidden
    layers_peak = max_num_batched_tokens * (2 * llm.hidden + dp * width) * 2.0
    if dp > 1 and (kind := all2all_of(tp * dp, int(gpu.gpus_per_node), max_num_batched_tokens)):
        layers_peak = max_num_batched_tokens * 2 * llm.hidden * 2.0
        layers_peak += activation_bytes(llm, kind, max_num_batched_tokens, tp)
    experts_bytes = sum(
        n * llm.bytes_per_weight(weights) for part, weights, n, _ in llm.parts() if part == "experts"
    )
    rank_bytes = llm.layers_bytes - experts_bytes * (1 - 1 / dp)
    rows = min(max_num_seqs, max_num_batched_tokens)
    sampler_peak = max_num_batched_tokens * llm.hidden * 2.0 + rows * llm.vocab * SAMPLER_BYTES
    stages = []
    for stage, layers in enumerate(stage_layers(llm, pp)):
        is_first, is_last = stage == 0, stage == pp - 1
        has_embeddings = is_first and not (is_last and llm.tied_embeddings)
        copies_bytes = is_last * llm.head_dtype_bytes + has_embeddings * llm.embedding_dtype_bytes
        weight_bytes = layers / llm.layers * rank_bytes + head * copies_bytes
        stages.append(
            Memory(
                budget_bytes=gpu.memory_bytes * gpu_memory_utilization,
                weight_bytes=weight_bytes / tp + is_first * llm.encoder_bytes,
                activation_bytes=max(layers_peak, sampler_peak) if is_last else layers_peak,
                reserve_bytes=RUNTIME_BYTES + NCCL_BYTES.get(tp * dp, NCCL_BYTES[8]),
                kv_bytes_per_token=block_bytes * layers / llm.layers / KV_BLOCK_TOKENS,
            )
        )
    return tuple(stages)


def stage_layers(llm: Llm, pp: int) -> tuple[int, ...]:
    """The layers of each pipeline stage, as vLLM partitions them: evenly, with the rest dealt to the stages
    before the last one, which has the output head.
    """
    least, rest = divmod(llm.layers, pp)
    return tuple(least + (pp - 1 - rest <= stage < pp - 1) for stage in range(pp))


def kv_cache_tokens(
    llm: Llm,
    gpu: Gpu,
    tp: int,
    pp: int = 1,
    *,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    dp: int = 1,
) -> int:
    """The KV tokens of one worker, or of each of its ranks, in whole blocks; 0 if its weights do not fit."""
    return worker_memory(
        llm,
        gpu,
        tp,
        pp,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        dp=dp,
    ).kv_tokens


def fits_memory(llm: Llm, gpu: Gpu, tp: int, *, least_kv_tokens: int = KV_BLOCK_TOKENS, dp: int = 1) -> bool:
    """Whether a worker holds the weights and at least this many KV tokens, with vLLM's usual settings."""
    return kv_cache_tokens(llm, gpu, tp, dp=dp) >= least_kv_tokens


def active_weight_bytes(llm: Llm, tokens: float | Array = 1.0) -> Array:
    """Bytes of weights that a step of N tokens reads, over all GPUs. A dense LLM reads all but the input
    embeddings, a mixture of experts those experts that some token visits.
    """
    read = np.zeros_like(np.asarray(tokens, dtype=float))
    for group in llm.layer_groups:
        attention, block = group.attention, group.feed_forward
        if attention is not None:
            wide = attention.bf16_parameters
            rest = attention.parameters(llm.hidden) - wide
            read += group.count * (rest * llm.bytes_per_weight(attention.weights) + 2.0 * wide)
        if block is not None:
            experts = touched_experts(block, tokens) * block.expert_parameters(llm.hidden)
            read += group.count * experts * llm.bytes_per_weight(block.weights)
            read += (
                group.count * block.shared_parameters(llm.hidden) * llm.bytes_per_weight(block.shared_weights)
            )
    return np.asarray(read + llm.vocab * llm.hidden * llm.head_dtype_bytes)


def touched_experts(block: Llm | FeedForward, tokens: float | Array) -> Array:
    """The mean number of a layer's experts that N tokens visit, each k of E evenly."""
    share = block.experts_per_token / block.experts
    return np.asarray(block.experts * (1 - (1 - share) ** np.asarray(tokens, dtype=float)))
