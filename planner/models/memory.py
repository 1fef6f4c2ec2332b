"""KV tokens one worker can hold.

    KV tokens = (gpu_bytes * utilisation - weights / TP - activations - reserve) / kv_bytes_per_token

with everything counted on one GPU of the worker. Tensor parallelism splits weights and KV heads; once it
exceeds the KV heads these are copied, so a token costs each GPU one KV head at least.

Activations: vLLM profiles one step of `max_num_batched_tokens` tokens. Alive at its peak are the residual
stream and its norm (hidden each, whole on every GPU), the feed-forward block's gate, up and their product
(split over TP, and in a mixture one set per expert a token visits), and the logits of `max_num_seqs` rows in
16 and 32 bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.domain import KV_BLOCK_TOKENS, Gpu, Llm
from planner.errors import InputError

# CUDA context, CUDA graphs, cuBLAS workspaces and fragmentation, per GPU; the NCCL buffers of a TP group.
# Both from AIConfigurator 0.12.0, systems/{a100,h100,h200}_sxm.yaml (other_mem, nccl_mem).
RUNTIME_BYTES = 3.5 * 2**30
NCCL_BYTES = {1: 0.0, 2: 342 * 2.0**20, 4: 392 * 2.0**20, 8: 392 * 2.0**20}


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the bytes of one GPU of a worker go. `kv_bytes` is negative if the rest does not fit."""

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
        """Of the worker (every GPU holds its heads of all of them), in whole blocks."""
        blocks = math.floor(self.kv_bytes / self.kv_bytes_per_token / KV_BLOCK_TOKENS)
        return max(blocks, 0) * KV_BLOCK_TOKENS


def memory(
    llm: Llm,
    gpu: Gpu,
    tp: int,
    *,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
) -> Memory:
    """The breakdown for one GPU of a TP group; the keywords are vLLM's settings of these names."""
    if tp < 1 or llm.heads % tp:
        raise InputError(f"LLM {llm.name}: tensor parallelism is {tp}, must divide its {llm.heads} heads")
    if not 0 < gpu_memory_utilization <= 1:
        raise InputError(f"gpu_memory_utilization is {gpu_memory_utilization}, must be in (0, 1]")
    ffn_width = (3 if llm.gated_ffn else 2) * llm.ffn * llm.experts_per_token / tp
    return Memory(
        budget_bytes=gpu.memory_bytes * gpu_memory_utilization,
        weight_bytes=llm.weight_bytes / tp,
        activation_bytes=max_num_batched_tokens * (2 * llm.hidden + ffn_width) * 2.0
        + max_num_seqs * llm.vocab * (2.0 + 4.0),
        reserve_bytes=RUNTIME_BYTES + NCCL_BYTES.get(tp, NCCL_BYTES[8]),
        kv_bytes_per_token=llm.kv_bytes_per_token * max(1 / tp, 1 / llm.kv_heads),
    )


def kv_cache_tokens(
    llm: Llm,
    gpu: Gpu,
    tp: int,
    *,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
) -> int:
    """Whole KV tokens of one worker, in blocks; 0 if its weights do not fit."""
    return memory(
        llm,
        gpu,
        tp,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    ).kv_tokens


def fits(llm: Llm, gpu: Gpu, tp: int, *, least_kv_tokens: int = KV_BLOCK_TOKENS) -> bool:
    """Whether a worker holds the weights and at least this many KV tokens, with vLLM's usual settings."""
    return kv_cache_tokens(llm, gpu, tp) >= least_kv_tokens
