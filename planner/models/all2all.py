"""The time in which tokens go to experts on other nodes and back, and the memory that this takes.

If ranks are on several nodes, vLLM moves tokens with the kernels of DeepEP (`--all2all-backend`):

    deepep_low_latency       sends each token to each of its k experts, in CUDA graphs. A step has at most
                             MOST_LOW_LATENCY_TOKENS of a rank, as every expert has a buffer of that many rows
                             for every GPU
    deepep_high_throughput   sends each token once to each node that has some of its experts, for prefills;
                             vLLM runs it without CUDA graphs

Seconds of one layer, there and back: n tokens of each GPU, M nodes, hidden width H, k experts per token, B
bytes/s of a GPU's own link to other nodes. A value takes v bytes on the way there (1 where experts are
multiplied in 8 bits, else 2) and 2 bytes on the way back:

    low latency       40 us + 5 us log2 M  + n (v + 2) H k (1 - 1/M)                  / (0.92 B)
    high throughput   85 us + 60 us log2 M + n (v + 2) H (M - 1) (1 - (1 - 1/M)^k)    / (0.64 B)

The constants of the formulas rest on tables of aiconfigurator-core 0.12.0: DeepEP on 16, 32 and 64 H100 with
50 GB/s each (H 7168, k 8; 20 SMs of each GPU for the exchange). The formulas differ from these tables by
MAPE_FRAC on average (`python benchmarks/all2all.py`).
"""

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
# In one direction: each GPU of the measurements has an adapter of 400 Gb/s.
MEASURED_LINK_BYTES_PER_S = 50e9
FORMATS_IN_8_BITS = ("fp8", "fp8-block", "mxfp8")  # Experts in these formats get their tokens in 8 bits.
# vLLM's VLLM_DEEPEP_BUFFER_SIZE_MB: the size of DeepEP's NVLink buffer, and with high throughput also of its
# buffer between nodes.
BUFFER_BYTES = 2.0**30
# Mean error of the formulas on the measurements.
MAPE_FRAC: dict[All2All, float] = {LOW_LATENCY: 0.02, HIGH_THROUGHPUT: 0.14}
# Tokens choose experts unevenly, so each GPU has room for this many times its fair share of rows: our
# assumption, not a measurement.
UNEVEN_ROWS_FACTOR = 2.0
# Launching a layer's experts without CUDA graphs takes this long on H100, by aiconfigurator's tables
# (models/roofline.py takes no shorter time).
EXPERT_LAUNCHES_S = 390e-6


@dataclass(frozen=True, slots=True)
class Exchange:
    """How ranks on several nodes exchange tokens: vLLM's --all2all-backend, and each GPU's own link."""

    all2all: All2All = HIGH_THROUGHPUT  # The default takes steps of any size.
    link_bytes_per_s: float = MEASURED_LINK_BYTES_PER_S


DEFAULT_EXCHANGE = Exchange()  # The link of the measurements.


def nodes_of_ranks(llm: Llm, gpu: Gpu, tp: int, dp: int) -> int:
    """The nodes that `dp` ranks of `tp` GPUs fill. Raises InputError for ranks that vLLM cannot place."""
    gpus, per_node = tp * dp, gpu.gpus_per_node
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
    assert kind, "ranks on one node send nothing to others"
    k = llm.experts_per_token
    values_bytes = llm.hidden * ((1 if _in_8_bits(llm) else 2) + 2)
    if kind == LOW_LATENCY:
        fixed_s, reached_frac = 40e-6 + 5e-6 * np.log2(nodes), 0.92
        copies = k * (1 - 1 / nodes)  # The copies of a token that go to other nodes.
    else:
        fixed_s, reached_frac = 85e-6 + 60e-6 * np.log2(nodes), 0.64
        copies = (nodes - 1) * (1 - (1 - 1 / nodes) ** k)
    sent_bytes = np.asarray(tokens, dtype=float) * values_bytes * copies
    return np.asarray(fixed_s + sent_bytes / (reached_frac * link_bytes_per_s))


def activation_bytes(llm: Llm, kind: All2All, budget_tokens: int, tp: int) -> float:
    """The memory of one GPU beside the residual stream: DeepEP's buffers, and the experts' rows.

    With low latency each expert has `budget_tokens` rows for each of g GPUs, and each GPU has 1/g of the
    experts, so neither g nor tp matters. DeepEP has four buffers: to send and to receive, for even and for
    odd steps (its config.hpp). With high throughput the GPUs of a rank share its tokens.
    """
    row_bytes = (2 * llm.hidden + 3 * llm.ffn) * 2.0  # Input and output; gate, up and product.
    if kind == LOW_LATENCY:
        rows = float(llm.experts * budget_tokens)
        # A message has a head of 16 bytes, and room for values in 16 bits even if they are sent in 8.
        return BUFFER_BYTES + 4 * rows * (2 * llm.hidden + 16) + rows * row_bytes
    rows = UNEVEN_ROWS_FACTOR * budget_tokens / tp * llm.experts_per_token
    return 2 * BUFFER_BYTES + rows * row_bytes


def _in_8_bits(llm: Llm) -> bool:
    """Whether tokens go to experts in 8 bits: by the experts' format, or the LLM's if it has no experts."""
    formats = [weights for part, weights, *_ in llm.parts() if part == "experts"]
    return (formats or [llm.weights])[0] in FORMATS_IN_8_BITS
