"""Step times from the catalog's figures alone, for an LLM that nobody has profiled on a GPU at this TP.

The result is a StepLatency, whose formula and letters are in planner/models/latency.py. Per GPU of a TP
group, with p = efficiency.overlap, summed over the layers:

    f(N) = ( (weights read / bandwidth)^p + (GEMM FLOPs of N tokens / FLOP rate)^p )^(1/p)
           + activations of N tokens / bandwidth            norms, residual stream, gate and up
           + two all-reduces of N tokens per layer          planner/models/parallelism.py
           + attention of N tokens to their windows         layers with a window of less than 8192 tokens
           + a fixed time per layer                         kernels start one after another
    a    = 4 heads head_dim layers FLOPs per query-key pair / FLOP rate of attention; for sparse latent
           attention (DeepSeek-V3.2, GLM-5) the FLOPs of its index, which every GPU computes whole. There
           every token attends to as many tokens as the index may choose, with SPARSE_HEADS heads or more
    d    = KV bytes of a token / bandwidth
    m    = the additional time of a KV token in steps that also have prefills: planner/models/parallelism.py
    e    = the output projection of one row;  b  adds reading a sequence's windows and states to that

p = 1 adds the times of reading and computing, p = infinity takes the longer one; kernels lie between.

Routed experts add a second term like the first one of f. A layer has E experts, of which N tokens read
E (1 - (1 - k/E)^N), and each token computes in k of them. This term has its own shares of the peak rates,
time per layer and activations. With data-parallel ranks it counts the tokens of all ranks, on the GPUs of all
ranks. Then, in place of the second all-reduce, each GPU gathers the tokens of all ranks and gives its sums
back, which are as many bytes as one all-reduce over all GPUs. Between nodes, tokens are sent to experts as
`planner/models/all2all.py` says.

fp8 weights are multiplied at the GPU's fp8 rate and nvfp4 weights at its 4-bit rate; a GPU without that rate
multiplies them in 16 bits. int4 and mxfp4 weights are read as 4 bits and multiplied in 16 bits (vLLM's Marlin
and Triton kernels).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.domain import Gpu
from planner.errors import InputError
from planner.models import all2all
from planner.models.latency import Array, StepLatency
from planner.models.llm import (
    LONG_WINDOW_TOKENS,
    CompressedAttention,
    GroupedAttention,
    LatentAttention,
    Llm,
    StateAttention,
)
from planner.models.memory import touched_experts
from planner.models.parallelism import ACTIVATION_BYTES, mixed_kv_s, tp_s
from planner.models.roofline_calibration import Efficiency, calibration_of, flops_rate

# The least heads that vLLM's kernel of sparse latent attention computes, even if the GPU has fewer: those of
# FlashMLA on Hopper, and on Blackwell. So in AIConfigurator's tables the 8 heads of GLM-5 at TP 8 take as
# long as the 64 at TP 1.
SPARSE_HEADS, SPARSE_HEADS_BLACKWELL = 64, 128
# Seconds that the kernels of an index add to a layer, one after another. In AIConfigurator's tables the
# decode of one sequence is longer than this roofline without it by 0.10 to 0.13 ms a layer on Blackwell, and
# by 0.18 on H200.
INDEX_LAYER_S = 0.12e-3
KNOTS_TOKENS = tuple(float(2**i) for i in range(16))  # 1 ... 32768 tokens; f is linear between them.


def _mean_rate(parts: Sequence[tuple[str, float]], gpu: Gpu) -> float:
    """The mean FLOP/s of parts (format of weights, parameters): all parameters over their times."""
    rates = {flops_rate(weights, gpu) for weights, _ in parts}
    if len(rates) == 1:
        return rates.pop()
    return sum(parameters for _, parameters in parts) / sum(
        parameters / flops_rate(weights, gpu) for weights, parameters in parts
    )


def roofline(
    llm: Llm,
    gpu: Gpu,
    tp: int,
    *,
    efficiency: Efficiency | None = None,
    dp: int = 1,
    exchange: all2all.Exchange = all2all.DEFAULT_EXCHANGE,
) -> StepLatency:
    """The step times by the formula above, with `efficiency`, or with the calibrated one.

    A power cap of `gpu` is ignored here, and is applied to the result (`StepLatency.with_power_cap`). With
    `dp` data-parallel ranks on several nodes, `exchange` says how they exchange tokens. Raises InputError for
    a TP that does not fit into a node.
    """
    if not 1 <= tp <= gpu.gpus_per_node:
        raise InputError(f"GPU {gpu.name}: tensor parallelism is {tp}, must be 1 to {gpu.gpus_per_node}")
    nodes = all2all.nodes_of_ranks(llm, gpu, tp, dp) if dp > 1 else 1
    basis = "roofline (no measurement)"
    if efficiency is None:
        calibration = calibration_of(llm, gpu)
        efficiency = calibration.efficiency
        structure = "dense" if llm.experts == 1 else "mixture"
        # The calibration has no dense LLM in 4 bits with 16-bit arithmetic, so the mixtures' error stands in.
        if structure not in calibration.prefill_mape_frac:
            structure = "mixture"
        prefill, decode = calibration.prefill_mape_frac[structure], calibration.decode_mape_frac[structure]
        basis += (
            f"; where kernels were measured one is off by {100 * prefill:.0f} % in prefills and "
            f"{100 * decode:.0f} % in decodes"
        )
    flops_per_s = tp * gpu.dense_flops_per_s * efficiency.gemm_frac
    bytes_per_s = tp * gpu.bandwidth_bytes_per_s * efficiency.bandwidth_frac
    tokens = np.array(KNOTS_TOKENS)

    activations_s = _activation_bytes(llm, tp, tokens, efficiency) / bytes_per_s

    def all_reduces_s(gpus: int) -> Array:
        return tp_s(llm, gpu, gpus, tokens, link_frac=efficiency.link_frac, latency_s=efficiency.all_reduce_s)

    experts_s = _experts_s(llm, gpu, tp * dp, tokens, efficiency)
    joint_s = np.zeros(0)  # Without data-parallel ranks no part of a step is joint.
    communication_s = all_reduces_s(tp)
    if dp > 1:
        # A layer has two all-reduces, one after its feed-forward. The share that comes after experts:
        experts_reduces_frac = experts_layers(llm) / (2 * llm.layers)
        if nodes > 1:
            experts_s = _between_nodes_s(llm, tp * dp, nodes, tokens, experts_s, exchange)
            gb_per_s, error_frac = exchange.link_bytes_per_s / 1e9, all2all.MAPE_FRAC[exchange.all2all]
            basis += f"; {exchange.all2all} over {nodes} nodes by {gb_per_s:g} GB/s per GPU, "
            basis += f"as on H100 to {100 * error_frac:.0f} %"
        else:
            experts_s = experts_s + experts_reduces_frac * all_reduces_s(tp * dp)
        joint_s = np.maximum.accumulate(experts_s)  # More tokens never take less time.
        experts_s, communication_s = joint_s, (1 - experts_reduces_frac) * communication_s
    f_s = _dense_s(llm, gpu, tp, tokens, efficiency) + experts_s + activations_s + communication_s
    attention = _attention_times(llm, gpu, tp, efficiency)
    output_projection_s = 2 * llm.vocab * llm.hidden / flops_per_s
    return StepLatency(
        knots_tokens=KNOTS_TOKENS,
        f_s=tuple((f_s + attention.token_s * tokens).tolist()),
        a_s=attention.pair_s,
        b_s=output_projection_s + attention.sequence_s,
        d_s=attention.kv_token_s,
        e_s=output_projection_s,
        h_s=0.0,
        basis=basis,
        kind="roofline",
        m_s=max(mixed_kv_s(llm, gpu, tp) - attention.kv_token_s, 0.0),  # Never shorter beside prefills.
        joint_s=tuple(joint_s.tolist()),
    )


def _between_nodes_s(
    llm: Llm, gpus: int, nodes: int, tokens: Array, experts_s: Array, exchange: all2all.Exchange
) -> Array:
    """Seconds (per knot of `tokens`, which are those of all ranks) of routed experts on several nodes, with
    the time to send tokens to them and back. `experts_s` is the time of the experts alone.
    """
    layers = experts_layers(llm)
    # High-throughput kernels start one after another, so a layer's experts take that long at least.
    if exchange.all2all == all2all.HIGH_THROUGHPUT:
        experts_s = np.maximum(experts_s, layers * all2all.EXPERT_LAUNCHES_S)
    own_tokens = np.ceil(tokens / gpus)  # Ranks share the tokens evenly.
    there_and_back_s = all2all.all2all_s(
        llm, exchange.all2all, nodes, own_tokens, link_bytes_per_s=exchange.link_bytes_per_s
    )
    return np.asarray(experts_s + layers * there_and_back_s)


def experts_layers(llm: Llm) -> int:
    """How many layers have routed experts (two or more)."""
    return sum(
        group.count
        for group in llm.layer_groups
        if group.feed_forward is not None and group.feed_forward.experts > 1
    )


def index_layers(llm: Llm) -> int:
    """How many layers of latent attention have an index of their own."""
    return sum(
        group.count
        for group in llm.layer_groups
        if isinstance(group.attention, LatentAttention) and group.attention.index_heads > 0
    )


def _activation_bytes(llm: Llm, tp: int, tokens: Array, efficiency: Efficiency) -> Array:
    """Bytes of the activations of N tokens over all GPUs of a TP group.

    Two norms each read and write the stream and its residual (2 x 2 x 2 = 8 vectors of the hidden width),
    whole on every GPU. Gate, up and their product (3 vectors of the block's width) are split over the GPUs.
    """
    values_per_token = 0.0
    for group in llm.layer_groups:
        layer_values = 8.0 * llm.hidden * tp
        if (block := group.feed_forward) is not None:
            layer_values += 3 * (block.width * block.experts_per_token + block.shared_width)
            if block.experts > 1:
                layer_values += efficiency.expert_activations * llm.hidden * block.experts_per_token * tp
        values_per_token += group.count * layer_values
    return tokens * values_per_token * ACTIVATION_BYTES


@dataclass(frozen=True, slots=True)
class _Attention:
    """Seconds of attention over all layers: per query-key pair, per KV token of a decode, per sequence (its
    windows and states), and per token of a prefill (its windows).
    """

    pair_s: float
    kv_token_s: float
    sequence_s: float
    token_s: float


def _attention_times(llm: Llm, gpu: Gpu, tp: int, efficiency: Efficiency) -> _Attention:
    """The times of attention, as upper bounds.

    Each window counts as full; one of LONG_WINDOW_TOKENS or more, which few requests fill, counts as none.
    The index of sparse attention counts as choosing as many tokens as it may for prompts, and all tokens for
    decodes.
    """
    flops_per_s = tp * gpu.dense_flops_per_s * efficiency.attention_frac
    bytes_per_s = tp * gpu.bandwidth_bytes_per_s * efficiency.kv_bandwidth_frac
    pair_flops = kv_bytes = sequence_bytes = token_flops = 0.0
    for group in llm.layer_groups:
        match group.attention:
            case None:
                continue
            case StateAttention() as attention:
                sequence_bytes += 2 * group.count * attention.state_bytes  # Read, then written back.
            case CompressedAttention() as attention:
                kv_bytes += group.count * attention.token_bytes * tp
                pair_flops += group.count * attention.flops_per_pair
                window_bytes = attention.window_tokens * attention.vector_bytes
                sequence_bytes += group.count * window_bytes * tp
                token_flops += (
                    group.count * 4.0 * attention.heads * attention.head_dim * attention.window_tokens
                )
            case GroupedAttention() | LatentAttention() as attention:
                # GPUs beyond the KV cache's shares hold copies of it, and each reads its own.
                layers_bytes = (
                    group.count * llm.kv_layer_bytes(attention) * max(1.0, tp / attention.kv_shares)
                )
                layers_flops = group.count * attention.flops_per_pair
                if isinstance(attention, LatentAttention) and attention.index_tokens:
                    # Blackwell alone has a 4-bit rate.
                    least_heads = SPARSE_HEADS_BLACKWELL if gpu.fp4_flops_per_s else SPARSE_HEADS
                    heads = max(attention.heads / tp, least_heads)
                    token_flops += group.count * attention.chosen_flops(heads) * tp
                    layers_flops *= tp  # Every GPU has the whole index.
                window_tokens = attention.window_tokens or LONG_WINDOW_TOKENS
                if window_tokens >= LONG_WINDOW_TOKENS:
                    pair_flops += layers_flops
                    kv_bytes += layers_bytes
                else:
                    token_flops += layers_flops * window_tokens
                    sequence_bytes += layers_bytes * window_tokens
    return _Attention(
        pair_s=pair_flops / flops_per_s,
        kv_token_s=kv_bytes / bytes_per_s,
        sequence_s=sequence_bytes / bytes_per_s,
        token_s=token_flops / flops_per_s,
    )


def _read_and_multiply_s(
    gpu: Gpu,
    gpus: int,
    read_bytes: float | Array,
    multiplied: Sequence[tuple[str, float]],
    tokens: Array,
    fracs: tuple[float, float, float],
) -> Array:
    """Seconds, for each count of `tokens`, to read `read_bytes` of weights on this many GPUs and to multiply
    the tokens by them.

    Each token is multiplied by the weights of `multiplied`, pairs of (format, parameters in it). `fracs` are
    the reached shares of the peak bandwidth and of the peak FLOP rate, and the exponent p.
    """
    bandwidth_frac, gemm_frac, overlap = fracs
    read_s = read_bytes / (gpus * gpu.bandwidth_bytes_per_s * bandwidth_frac)
    all_parameters = sum(parameters for _, parameters in multiplied)
    multiplied_s = 2 * tokens * all_parameters / (gpus * _mean_rate(multiplied, gpu) * gemm_frac)
    return np.asarray((read_s**overlap + multiplied_s**overlap) ** (1 / overlap))


def _dense_s(llm: Llm, gpu: Gpu, tp: int, tokens: Array, efficiency: Efficiency) -> Array:
    """Seconds of the weights that every token visits, with the fixed times per layer, by `tokens`."""
    every_token = [(weights, active) for part, weights, _, active in llm.parts() if part != "experts"]
    dense_bytes = sum(parameters * llm.bytes_per_weight(weights) for weights, parameters in every_token)
    head_bytes = llm.vocab * llm.hidden * llm.head_dtype_bytes
    fracs = efficiency.bandwidth_frac, efficiency.gemm_frac, efficiency.overlap
    return (
        _read_and_multiply_s(gpu, tp, dense_bytes + head_bytes, every_token, tokens, fracs)
        + llm.layers * efficiency.layer_s
        + index_layers(llm) * INDEX_LAYER_S
    )


def _experts_s(llm: Llm, gpu: Gpu, gpus: int, tokens: Array, efficiency: Efficiency) -> Array:
    """Seconds of routed experts, with their fixed times per layer, by the count of `tokens`."""
    fracs = efficiency.expert_bandwidth_frac, efficiency.expert_gemm_frac, efficiency.overlap
    time_s = np.zeros_like(tokens)
    for group in llm.layer_groups:
        if (block := group.feed_forward) is None or block.experts == 1:
            continue
        parameters = group.count * block.expert_parameters(llm.hidden)
        time_s += _read_and_multiply_s(
            gpu,
            gpus,
            touched_experts(block, tokens) * parameters * llm.bytes_per_weight(block.weights),
            [(block.weights, block.experts_per_token * parameters)],
            tokens,
            fracs,
        )
        time_s += group.count * efficiency.expert_layer_s
    return time_s


def transfer_fit(
    latency: StepLatency, measured_latency: StepLatency, target: StepLatency, *, basis: str
) -> StepLatency:
    """The fit `latency` of one (GPU, TP), carried over to another by their two rooflines: `measured_latency`
    is the roofline of the (GPU, TP) whose steps were measured, `target` that of the other.

    The time of the smallest step moves by as many seconds as in the rooflines, because the part that a
    roofline does not explain (mostly the host) stays the same. What grows with the step is multiplied by the
    ratio of the rooflines.
    """
    knots = np.array(latency.knots_tokens)
    growth = np.diff(target.step_s(knots)) / np.diff(measured_latency.step_s(knots))
    floor_s = latency.f_s[0] + float(target.step_s(knots[0]) - measured_latency.step_s(knots[0]))
    rises_s = np.diff(latency.f_s) * growth
    return replace(
        latency,
        f_s=tuple((floor_s + np.concatenate(([0.0], np.cumsum(rises_s)))).tolist()),
        a_s=latency.a_s * target.a_s / measured_latency.a_s,
        b_s=latency.b_s * target.b_s / measured_latency.b_s,
        d_s=latency.d_s * target.d_s / measured_latency.d_s,
        e_s=latency.e_s * target.e_s / measured_latency.e_s,
        # The roofline's own m counts where the fit has a smaller one, or none.
        m_s=max(latency.m_s * target.d_s / measured_latency.d_s, target.m_s),
        basis=basis,
        mape_frac=None,
        kind="derived",
    )
