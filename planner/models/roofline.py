"""Step times from catalog figures alone, for an (LLM, GPU, TP) nobody has profiled.

Per GPU of a TP group, with p = efficiency.overlap, summed over the layers:

    f(N) = ( (weights read / bandwidth)^p + (GEMM FLOPs of N tokens / FLOP rate)^p )^(1/p)
           + activations of N tokens / bandwidth            norms, residual stream, gate and up
           + two all-reduces of N tokens per layer          ring: 2 (TP - 1) / TP of the bytes over the link
           + a fixed time per layer                         kernels start one after another
    a    = 4 heads head_dim layers FLOPs per query-key pair / FLOP rate of attention
    d    = KV bytes of a token / bandwidth
    b, e = the output projection of one row

p = 1 adds reading and computing, p = infinity takes the longer one; kernels lie between. In a mixture of
experts N tokens read E (1 - (1 - k/E)^N) of a layer's E experts, and compute in k of them each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.domain import Gpu, Llm
from planner.errors import InputError
from planner.models.latency import StepLatency
from planner.models.memory import active_parameters, active_weight_bytes
from planner.models.parallel import ACTIVATION_BYTES, ALL_REDUCE_S, LINK_FRAC, tp_s

KNOTS_TOKENS = tuple(float(2**i) for i in range(16))  # 1 ... 32768


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the catalog's peak that kernels reach; one set for every GPU and LLM.

    Calibrated on the steps behind catalogs/latency (see docs/models.md for the error that remains).
    """

    gemm_frac: float = 0.80
    attention_frac: float = 0.61
    bandwidth_frac: float = 0.81
    kv_bandwidth_frac: float = 0.84
    link_frac: float = LINK_FRAC
    overlap: float = 1.6
    layer_s: float = 38e-6
    all_reduce_s: float = ALL_REDUCE_S


CALIBRATED = Efficiency()


def roofline(llm: Llm, gpu: Gpu, tp: int, *, efficiency: Efficiency = CALIBRATED) -> StepLatency:
    """The formula above. `gpu` counts as uncapped; a power cap is `StepLatency.slowed` on top."""
    if not 1 <= tp <= gpu.gpus_per_node:
        raise InputError(f"GPU {gpu.name}: tensor parallelism is {tp}, must be 1 to {gpu.gpus_per_node}")
    flops_per_s = tp * gpu.dense_flops_per_s * efficiency.gemm_frac
    bytes_per_s = tp * gpu.bandwidth_bytes_per_s * efficiency.bandwidth_frac
    tokens = np.array(KNOTS_TOKENS)

    weights_s = active_weight_bytes(llm, tokens) / bytes_per_s
    flops_s = 2 * tokens * active_parameters(llm) / flops_per_s
    dense_s = (weights_s**efficiency.overlap + flops_s**efficiency.overlap) ** (1 / efficiency.overlap)

    # Two norms read and write the stream and its residual, whole on every GPU; gate, up, product are split.
    width = 8 * llm.hidden * tp + 3 * llm.ffn * llm.experts_per_token
    activations_s = llm.layers * tokens * width * ACTIVATION_BYTES / bytes_per_s

    communication_s = tp_s(
        llm, gpu, tp, tokens, link_frac=efficiency.link_frac, latency_s=efficiency.all_reduce_s
    )

    f_s = dense_s + activations_s + communication_s + llm.layers * efficiency.layer_s
    attention_flops_per_s = tp * gpu.dense_flops_per_s * efficiency.attention_frac
    kv_bytes = llm.kv_bytes_per_token * max(1.0, tp / llm.kv_heads)
    row_s = 2 * llm.vocab * llm.hidden / flops_per_s
    return StepLatency(
        knots_tokens=KNOTS_TOKENS,
        f_s=tuple(f_s.tolist()),
        a_s=4 * llm.heads * llm.head_dim * llm.layers / attention_flops_per_s,
        b_s=row_s,
        d_s=kv_bytes / (tp * gpu.bandwidth_bytes_per_s * efficiency.kv_bandwidth_frac),
        e_s=row_s,
        h_s=0.0,
        basis="roofline (no measurement)",
    )


def transferred(
    latency: StepLatency, measured: StepLatency, asked: StepLatency, *, basis: str
) -> StepLatency:
    """A fit of one (GPU, TP) carried over to another by their rooflines, `measured` and `asked`.

    The floor of a step moves by as many seconds as the roofline's, because what the roofline does not explain
    (the host, mostly) stays; what grows with the step grows by the ratio of the rooflines.
    """
    knots = np.array(latency.knots_tokens)
    growth = np.diff(asked.step_s(knots)) / np.diff(measured.step_s(knots))
    floor_s = latency.f_s[0] + float(asked.step_s(knots[0]) - measured.step_s(knots[0]))
    rises_s = np.diff(latency.f_s) * growth
    return replace(
        latency,
        f_s=tuple((floor_s + np.concatenate(([0.0], np.cumsum(rises_s)))).tolist()),
        a_s=latency.a_s * asked.a_s / measured.a_s,
        b_s=latency.b_s * asked.b_s / measured.b_s,
        d_s=latency.d_s * asked.d_s / measured.d_s,
        e_s=latency.e_s * asked.e_s / measured.e_s,
        basis=basis,
        mape_frac=None,
    )
