"""Tokens on their way to experts on other nodes, and back: DeepEP's kernels, which vLLM starts for ranks on
several nodes (`--all2all-backend`).

    deepep_low_latency       each token to each of its k experts; at most MOST_LOW_LATENCY_TOKENS of a rank in
                             a step, since every expert has room for as many of every rank; in CUDA graphs
    deepep_high_throughput   each token once to each node that has some of its experts; vLLM runs it without
                             CUDA graphs, for prefills

Seconds of one layer, there and back: n tokens of each GPU, M nodes, hidden width H, k experts per token, B
bytes/s of a GPU's own link to other nodes. A value takes v bytes on the way there (1 where experts are
multiplied in 8 bits, else 2) and 2 bytes on the way back:

    low latency       40 us + 5 us log2 M  + n (v + 2) H k (1 - 1/M)                  / (0.92 B)
    high throughput   85 us + 60 us log2 M + n (v + 2) H (M - 1) (1 - (1 - 1/M)^k)    / (0.64 B)

Their constants rest on tables of aiconfigurator-core 0.12.0: DeepEP on 16, 32 and 64 H100 with 50 GB/s each
(H 7168, k 8; 20 SMs). From these tables they are off by MAPE_FRAC (`python benchmarks/all2all.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from planner.domain import Gpu
from planner.errors import InputError
from planner.models.latency import Array
from planner.models.llm import Llm

All2All = Literal["", "deepep_low_latency", "deepep_high_throughput"]  # "" if all ranks are on one node.
LOW_LATENCY: All2All = "deepep_low_latency"
HIGH_THROUGHPUT: All2All = "deepep_high_throughput"
MOST_LOW_LATENCY_TOKENS = 256  # The most tokens of a rank in a step with low-latency kernels.
MOST_NODES = 8  # The formulas rest on measurements of up to this many nodes.
# Each GPU of the measurements has a 400 Gb/s adapter: bytes per second in one direction.
MEASURED_LINK_BYTES_PER_S = 50e9
FORMATS_IN_8_BITS = ("fp8", "fp8-block")  # Experts in these formats get their tokens in 8 bits.
# vLLM's VLLM_DEEPEP_BUFFER_SIZE_MB; between nodes a second buffer of the same size is needed.
BUFFER_BYTES = 2.0**30
# Mean error of the formulas on the measurements.
MAPE_FRAC: dict[All2All, float] = {LOW_LATENCY: 0.02, HIGH_THROUGHPUT: 0.14}
# One GPU makes room for this many times the rows of experts that it gets if all GPUs get equally many.
UNEVEN_ROWS_FACTOR = 2.0
# Launching a layer's experts without CUDA graphs takes this long on H100, by aiconfigurator's tables.
EXPERT_LAUNCHES_S = 390e-6


@dataclass(frozen=True, slots=True)
class Ranks:
    """How ranks on several nodes exchange tokens: vLLM's --all2all-backend, and each GPU's own link."""

    all2all: All2All = HIGH_THROUGHPUT
    link_bytes_per_s: float = MEASURED_LINK_BYTES_PER_S


DEFAULT_RANKS = Ranks()  # The link of the measurements.


def nodes_of_ranks(llm: Llm, gpu: Gpu, tp: int, dp: int) -> int:
    """The nodes that `dp` ranks of `tp` GPUs fill. Raises InputError where they cannot be dealt out."""
    gpus, per_node = tp * dp, int(gpu.gpus_per_node)
    if gpus <= per_node:
        return 1
    where = f"{dp} ranks of {tp} GPUs ({gpu.name})"
    if gpus > MOST_NODES * per_node:
        raise InputError(f"{where}: {gpus} GPUs, at most {MOST_NODES} nodes of {per_node} are modelled")
    if per_node % tp or gpus % per_node:
        raise InputError(f"{where}: {gpus} GPUs, must be whole nodes of {per_node}, each rank on one of them")
    if not gpu.link.lower().startswith("nvlink"):
        raise InputError(
            f"{where}: {gpus // per_node} nodes: ranks on several nodes are modelled with DeepEP alone, "
            f"which needs NVLink, and {gpu.name} has {gpu.link}; take at most {per_node // tp} ranks"
        )
    if llm.experts % gpus:
        raise InputError(
            f"{where}: {gpus} GPUs must divide the {llm.experts} experts of {llm.name} on several nodes"
        )
    return gpus // per_node


def all2all_of(gpus: int, gpus_per_node: int, budget_tokens: int) -> All2All:
    """The kernels that ranks on this many GPUs run, with steps of up to `budget_tokens` tokens each."""
    if gpus <= gpus_per_node:
        return ""
    return LOW_LATENCY if budget_tokens <= MOST_LOW_LATENCY_TOKENS else HIGH_THROUGHPUT


def all2all_s(
    llm: Llm, kind: All2All, nodes: int, tokens: float | Array, *, link_bytes_per_s: float
) -> Array:
    """Seconds of one layer for `tokens` tokens of every GPU, by the formulas above; broadcasts."""
    experts = llm.experts_per_token
    values_bytes = llm.hidden * ((1 if _in_8_bits(llm) else 2) + 2)
    if kind == LOW_LATENCY:
        fixed_s, reached_frac = 40e-6 + 5e-6 * np.log2(nodes), 0.92
        copies = experts * (1 - 1 / nodes)  # Of a token, to other nodes.
    else:
        fixed_s, reached_frac = 85e-6 + 60e-6 * np.log2(nodes), 0.64
        copies = (nodes - 1) * (1 - (1 - 1 / nodes) ** experts)
    sent_bytes = np.asarray(tokens, dtype=float) * values_bytes * copies
    return np.asarray(fixed_s + sent_bytes / (reached_frac * link_bytes_per_s))


def activation_bytes(llm: Llm, kind: All2All, budget_tokens: int, tp: int) -> float:
    """The memory of one GPU beside the residual stream: DeepEP's buffers, and the experts' rows.

    With low latency every expert has `budget_tokens` rows of every rank, sent and received, each twice
    (DeepEP's two buffers). The GPU's own experts also have their input, gate, up, product and output.
    """
    width = 3 * llm.ffn + llm.hidden  # Input, gate, up, product.
    if kind == LOW_LATENCY:
        rows = float(llm.experts * budget_tokens)
        # A value in 16 bits, and 16 bytes of scales a row.
        buffers_bytes = BUFFER_BYTES + 4 * rows * (2 * llm.hidden + 16)
        return buffers_bytes + rows * (width + llm.hidden) * 2.0
    rows = UNEVEN_ROWS_FACTOR * budget_tokens / tp * llm.experts_per_token
    return 2 * BUFFER_BYTES + rows * (width + llm.hidden) * 2.0


def _in_8_bits(llm: Llm) -> bool:
    """Whether tokens go to experts in 8 bits: by the experts' format, of an LLM without experts by its
    own.
    """
    weights = next((weights for part, weights, *_ in llm.parts() if part == "experts"), llm.weights)
    return weights in FORMATS_IN_8_BITS
