"""The time that tensor parallelism (TP) and pipeline parallelism (PP) add to a step.

TP: two all-reduces per layer, after attention and after the feed-forward block: N tokens x hidden in 16 bit.

    measured  latency +                   bytes / bandwidth    if the GPU's row has measurements with this TP
    ring      latency + 2 (TP - 1) / TP * bytes / link         otherwise; each GPU sends its share round twice

PP: the layers are split over PP stages. Each stage hands N x (hidden + residual) in 16 bit to the next
(`send_recv_s`). As in vLLM each GPU of a TP group sends 1 / TP of these bytes, and each GPU of the next group
gathers the rest over the group's own links. A micro-batch takes the sum of all stages and PP - 1 hand-overs.
The simulator has up to PP micro-batches in flight, so a pipeline with fewer is partly idle.

Ranks on several nodes: `planner/models/all2all.py`.
"""

from dataclasses import replace

import numpy as np

from planner.domain import Gpu
from planner.errors import InputError
from planner.models.latency import Array, StepLatency
from planner.models.llm import GroupedAttention, Llm

ACTIVATION_BYTES = 2.0  # Activations have 16 bits.
# Both come from the roofline's calibration (roofline_calibration.py).
LINK_FRAC = 0.64  # The share of a link's rate that is reached.
ALL_REDUCE_S = 8.1e-6  # The seconds of the smallest all-reduce.
# The most pipeline stages of a worker: the simulator's record of a worker has room for this many.
MAX_PP = 16
# Estimated: a hand-over between stages costs two launches and a wait on the host.
SEND_RECV_S = 20e-6


def all_reduce_s(
    payload_bytes: float | Array, tp: int, link_bytes_per_s: float, *, latency_s: float = ALL_REDUCE_S
) -> Array:
    """Seconds of a ring that adds up `payload_bytes` over `tp` GPUs; an array of bytes gives as many seconds.

    `link_bytes_per_s` is what one GPU sends in one direction, as in the catalog.
    """
    if tp == 1:  # One GPU has nothing to send.
        return np.zeros_like(np.asarray(payload_bytes, dtype=float))
    sent_share = 2 * (tp - 1) / tp
    return np.asarray(latency_s + sent_share * np.asarray(payload_bytes) / link_bytes_per_s)


def mixed_kv_s(llm: Llm, gpu: Gpu, tp: int) -> float:
    """Seconds per KV token that decodes read in steps with prefills (m of `latency.py`).

    In such steps one launch of the attention kernel serves prefills and decodes, and so reads keys and values
    once per query head. For GPUs whose row has no rate for this, the result is 0. Layers with a window read
    little and are left out.
    """
    if gpu.mixed_kv_bytes_per_s is None:
        return 0.0
    if llm.groups:
        numbers_per_token = sum(
            group.count * group.attention.heads * (group.attention.head_dim + group.attention.value_dim)
            for group in llm.groups
            if isinstance(group.attention, GroupedAttention) and not group.attention.window_tokens
        )
        read_bytes = llm.kv_dtype_bytes * numbers_per_token / tp
    else:  # All layers are alike: keys and values, for every query head.
        read_bytes = 2 * llm.kv_dtype_bytes * llm.layers * llm.heads / tp * llm.head_dim
    return read_bytes / gpu.mixed_kv_bytes_per_s


def tp_s(
    llm: Llm,
    gpu: Gpu,
    tp: int,
    tokens: float | Array,
    *,
    link_frac: float = LINK_FRAC,
    latency_s: float = ALL_REDUCE_S,
) -> Array:
    """Seconds of the all-reduces in a step of `tokens` tokens: two per layer.

    An all-reduce takes what was measured with this `tp`, if the GPU's row has such a measurement; otherwise
    what a ring takes at `link_frac` of the link's rate.
    """
    payload_bytes = np.asarray(tokens, dtype=float) * llm.hidden * ACTIVATION_BYTES
    if measured := next((each for each in gpu.all_reduce if each.gpus == tp), None):
        per_reduce_s = measured.latency_s + payload_bytes / measured.bytes_per_s
    else:
        per_reduce_s = all_reduce_s(payload_bytes, tp, gpu.link_bytes_per_s * link_frac, latency_s=latency_s)
    return np.asarray(2 * llm.layers * per_reduce_s)


def send_recv_s(
    llm: Llm, gpu: Gpu, tp: int, tokens: float | Array, *, link_bytes_per_s: float | None = None
) -> Array:
    """Seconds to hand the activations of `tokens` tokens from one pipeline stage to the next.

    `link_bytes_per_s` is one GPU's share of the link between the stages; without it the stages share a node.
    """
    between_bytes_per_s = gpu.link_bytes_per_s if link_bytes_per_s is None else link_bytes_per_s
    # 2: the hidden state and the residual stream.
    payload_bytes = np.asarray(tokens, dtype=float) * 2 * llm.hidden * ACTIVATION_BYTES
    sent_s = payload_bytes / tp / (between_bytes_per_s * LINK_FRAC)
    gathered_s = payload_bytes * (tp - 1) / tp / (gpu.link_bytes_per_s * LINK_FRAC)
    return np.asarray(SEND_RECV_S + sent_s + gathered_s)


def add_pipeline(
    latency: StepLatency, llm: Llm, gpu: Gpu, tp: int, pp: int, *, link_bytes_per_s: float | None = None
) -> StepLatency:
    """Step times of one micro-batch through all stages, from the fit of the same `tp` without a pipeline.

    A stage has as many GPUs as the whole worker without a pipeline, so the stages together take as long as
    its step, plus PP - 1 hand-overs. A hand-over is affine in N, so f stays piecewise linear. Up to PP steps
    overlap in the simulator.
    """
    if not 1 <= pp <= llm.layers:
        raise InputError(f"LLM {llm.name}: pipeline parallelism is {pp}, must be 1 to {llm.layers} (layers)")
    if pp == 1:
        return latency
    handed_s = (pp - 1) * send_recv_s(
        llm, gpu, tp, np.array(latency.knots_tokens), link_bytes_per_s=link_bytes_per_s
    )
    return replace(
        latency,
        f_s=tuple((np.array(latency.f_s) + handed_s).tolist()),
        basis=f"{latency.basis}; {pp - 1} hand-overs between {pp} stages added, not measured",
        mape_frac=None,  # The error of the fit is not that of its sum with hand-overs.
    )
