"""Corrections of step times from the kernel tables, which are profiles of vLLM 0.24 without CUDA graphs.

They are, each with a formula below: older kernels for experts, padding in CUDA graphs, launches outside of
graphs, launches of sparse attention, its older kernels, launches of attention in chunks, and SGLang's sparse
attention. A mixture is an LLM with routed experts.

Up to 0.18 a layer of experts in fp8 by blocks took longer, by the same time at every batch size and on H100,
H200 and B200 alike: launches and quantisation that later versions fuse. So the correction is seconds per
layer, not a factor.

    t = g + l layers          l by the version of the engine, layers those with routed experts

The difference of predictions and measured runs (docs/evidence/accuracy.md): 77 to 227 us a layer on 0.11 and
0.12 (Qwen3-235B-A22B-FP8 in five places, DeepSeek-V3.1 in one), 37 to 59 on 0.16 and 0.17, 13 to 23 on 0.18
(MiniMax-M2.5), and -19 to 10 on 0.19. Other formats of weights show no such difference.

vLLM captures CUDA graphs for steps of 1, 2, 4, 8, 16, 24 ... G tokens. G is 512, or twice the seats
(max_num_seqs) if less. Steps are padded to the next size; padding visits experts as tokens do. In mixtures

    t = f(next size)          in steps of up to G tokens

DeepSeek-V4-Pro on 4 GB300 took 14.7 ms with 3 and 4 sequences, 16.4 to 17.2 with 5 to 8, 21.1 and 21.2 with
10 and 16 (0.21; the server's log of Prathmesh234/mutliturn-inferenceX, windows without prompts). vLLM can
skip the padding, but does not by default (vllm #46428, June 2026). Other LLMs and data-parallel ranks are not
corrected.

Larger steps launch their kernels one by one. On Blackwell before 0.19 the launches took longer than the
kernels of short prompts:

    t >= k layers             in steps of more than G tokens, k by the version, all layers of the LLM

The values of k on Blackwell:

    0.16 to 0.18   1.45 ms   fits to single LLMs on 0.17 give 1.6 (MiniMax-M2.5) and 1.45 (Kimi-K2.5, nvfp4)
    before 0.16    0.65 ms   others: a fit to Llama-3.1-70B in fp8 on 0.10 gives 0.8 to 1.0, but with more
                             than 0.65 the inter-token latencies of ML.ENERGY on 0.11 would be too long
    before 0.16    0.4 ms    dense LLMs in 16 bits. With 8 seats, whose graphs end at 16 tokens, the slowest
                             hundredth of gaps takes 0.26 to 0.43 ms a layer on 0.11 (Llama-3.1-70B 0.26,
                             Qwen3-32B 0.40, gemma-3-27b 0.39, 8B LLMs 0.43)
    before 0.16    0.9 ms    mixtures in 8 and 16 bits: about the least that they take with 16 seats
                             (Qwen3-235B 0.86, Qwen3-30B-A3B 1.17, Qwen3-Coder 1.11, DeepSeek-V3.1 1.8)

With these values 92 to 98 % of TTFTs lie inside the spread, without the launches 43 to 82 %. On other GPUs:

    0.16 to 0.18   1.45 ms   LLMs with experts in fp8 by blocks; k as on Blackwell, not fitted here, but
                             MiniMax-M2.5 on 8 H200 takes 105 ms for 1024 tokens, its kernels 48
    from 0.14 on   0.6 ms    all others. Fitted to one measurement: steps of 513 to 2500 tokens of
                             Llama-3.1-8B on an H100 with 0.26 (benchmarks/gpu/h100) are
                             5.5 % short with it, 15.7 % without. It brings TTFT of gpt-oss-120b on H200 with
                             0.18, which was not fitted to, from 26 to 23 % short; it does not help on 0.11

Sparse latent attention (DeepSeek-V3.2, GLM-5) and compressed attention (DeepSeek-V4) are launched outside
graphs on every version and GPU:

    t >= f(G) + s layers      in steps of more than G tokens, layers those with an index or compressors

s is 1.5 ms: however short a prompt without graphs, AIConfigurator's tables have 1.4 to 2.1 ms on Hopper and
Blackwell. Behind a Grace CPU they have 1.7 times as much (GB200 against B200: medians of 3.2 and 1.9 ms,
least 2.0 and 1.1), so s is 2.55 ms there. Neither was fitted to runs. On 4 GB300 (0.21, G = 256) the TTFT of
DeepSeek-V4-Pro is some 205 ms longer for a prompt of 257 tokens than for prompts in graphs, and equally
longer for a prompt of 4000; 204 ms are predicted.

Sparse latent attention of prompts ends early in the tables: a token with fewer tokens before it than the
index may choose (2048) attends to the tokens before it alone. Before 0.23 the kernel got no lengths and
computed all 2048 (vllm #36616, merged in June 2026), so that every token takes the same. If tokens beyond the
graphs count as tokens of prompts

    t = f(N) + u (N - G)      u = 0.17 w, in steps of more than G tokens

w is the kernel's whole time per token and GPU, with as many heads as it computes at least, at 0.68 of the
peak FLOP rate. That is what the tables of DeepSeek-V3.2 and GLM-5 say: prompts of 1024, 2048 and 4096 tokens
attend to a quarter, half and three quarters of 2048, and differ by 0.42 us a token, layer and whole kernel on
H200 and 0.38 on B200. Tables have contexts of all lengths, so fits to them are a mean of both cases. A fit to
tables with the kernel whole is nearest to such a fit with u = 0.17 w (GLM-5 and DeepSeek-V3.2 on 8 H200) or
0.155 to 0.175 w (on 8 B200). No run was fitted to. KV in 8 bits has another kernel, which the tables have
whole.

Attention in chunks (Llama 4) had no CUDA graphs either (`AttentionCGSupport.NEVER` in vLLM's
chunked_local_attention.py), so before 0.14 every step launches its layers' attention:

    t = g + c layers          all layers of such an LLM

c is 0.2 ms: with 8 to 256 sequences Llama-4-Scout on 4 H100 takes 8.8 to 12.4 ms longer than its roofline on
0.11 (ML.ENERGY). On 8 H100, which c was not fitted to, it takes 8.4 to 10.5 ms longer; 9.6 are predicted.

SGLang decodes latent attention with an index (DeepSeek-V3.2, GLM-5) in other kernels, which are shorter by
about the same time at every batch size and number of heads:

    t = g - n layers          layers those with an index

AIConfigurator's tables have both engines (vLLM 0.24, SGLang 0.5.14; up to 128 sequences, contexts of 512 to
16384): the medians of n are 122 to 157 us on H100 and H200, 78 to 96 with KV in 8 bits, and 88 to 134 us on
B200, B300, GB200 and GB300. n was not fitted to any run.
"""

from dataclasses import replace

from planner.domain import Gpu
from planner.models.engine import BLACKWELL, Engine
from planner.models.latency import StepLatency
from planner.models.llm import LONG_WINDOW_TOKENS, CompressedAttention, GroupedAttention, LatentAttention, Llm
from planner.models.roofline import SPARSE_HEADS, SPARSE_HEADS_BLACKWELL, experts_layers, index_layers

BLOCK_FORMAT = "fp8-block"  # The format of fp8 by blocks in Llm.
# Rows are (first version without l, l of the versions before it) [s per layer], the oldest first. A version's
# l is in the first row that is later than it.
LAYER_S_BEFORE = (((0, 14), 150e-6), ((0, 18), 45e-6), ((0, 19), 15e-6))
# k on the GPUs of BLACKWELL, in such rows [s].
LAUNCHES_S_BEFORE = (((0, 16), 0.65e-3), ((0, 19), 1.45e-3))
# k before 0.16 for dense LLMs in 16 bits, and for mixtures whose experts have 8 or 16 bits.
PLAIN_LAUNCHES_S, MIXTURE_LAUNCHES_S = 0.4e-3, 0.9e-3
# LLMs with experts in fp8 by blocks have no such launches from this version on: a nightly after 0.18 (April
# 2026) has none for MiniMax-M2.5 in fp8 on B300, and all of them for the same LLM in nvfp4 on B200.
BLOCK_LAUNCHES_GONE = (0, 18, 2)
BLOCK_LAUNCHES_SEEN = (0, 16)  # On GPUs other than BLACKWELL they have such launches from this version on.
# On GPUs other than BLACKWELL every LLM has launches from this version on, with this k.
LAUNCHES_S_SINCE = ((0, 14), 0.6e-3)
SPARSE_LAUNCHES_S = 1.5e-3  # s above.
GRACE = ("gb200-186g", "gb300-279g")  # GPUs of gpus.yaml behind a Grace CPU.
GRACE_FACTOR = 1.7  # s is this many times as long behind a Grace CPU.
WHOLE_SPARSE_BEFORE = (0, 23)  # The first version whose sparse attention of prompts ends early.
# u / w above, and the share of the peak FLOP rate that the whole kernel reaches in AIConfigurator's tables.
EARLY_END_FRAC, SPARSE_FLOPS_FRAC = 0.17, 0.68
CHUNKS_LAYER_S_BEFORE = ((0, 14), 0.2e-3)  # The first version without c above, and c.
# n above: on GPUs of BLACKWELL, and on others with KV in 16 and in 8 bits.
SGLANG_INDEX_S = {"Blackwell": 110e-6, "16 bits": 140e-6, "8 bits": 90e-6}
MOST_CAPTURED_TOKENS = 512  # The largest graph.
GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, MOST_CAPTURED_TOKENS + 1, 16))  # In tokens.


def longer_chunks_s(llm: Llm, engine: Engine | None) -> float:
    """Seconds of launching the attention of an LLM with attention in chunks (c layers above)."""
    has_chunks = any(
        isinstance(group.attention, GroupedAttention)
        and (group.attention.window_tokens or 0) >= LONG_WINDOW_TOKENS
        for group in llm.layer_groups
    )
    version = _vllm_version(engine)
    end, layer_s = CHUNKS_LAYER_S_BEFORE
    return llm.layers * layer_s if has_chunks and version is not None and version < end else 0.0


def longer_layer_s(llm: Llm, engine: Engine | None) -> float:
    """Seconds that a layer of experts takes longer on this engine's version than in the kernel tables (l of
    the module's docstring).
    """
    if not _has_block_experts(llm) or (version := _vllm_version(engine)) is None:
        return 0.0
    return next((layer_s for end, layer_s in LAYER_S_BEFORE if version < end), 0.0)


def least_large_step_s(llm: Llm, gpu: Gpu, engine: Engine | None) -> float:
    """The least seconds of steps larger than the captured graphs, by their launches (k layers above).

    0 for versions and GPUs where no launches were measured.
    """
    if (version := _vllm_version(engine)) is None:
        return 0.0
    layer_s, has_blocks = 0.0, _has_block_experts(llm)
    if gpu.base not in BLACKWELL and version >= LAUNCHES_S_SINCE[0]:
        layer_s = LAUNCHES_S_SINCE[1]
    is_gone = has_blocks and version >= BLOCK_LAUNCHES_GONE
    is_seen = gpu.base in BLACKWELL or (has_blocks and version >= BLOCK_LAUNCHES_SEEN)
    if is_seen and not is_gone:
        older_s = next((least_s for end, least_s in LAUNCHES_S_BEFORE if version < end), 0.0)
        if version < LAUNCHES_S_BEFORE[0][0]:
            older_s = _oldest_launches_s(llm)
        layer_s = max(layer_s, older_s)
    return llm.layers * layer_s


def _oldest_launches_s(llm: Llm) -> float:
    """k on the GPUs of BLACKWELL before the first version of LAUNCHES_S_BEFORE."""
    if llm.is_mixture and _experts_formats(llm) <= {"bf16", "fp8", BLOCK_FORMAT}:
        return MIXTURE_LAUNCHES_S
    is_plain = not llm.is_mixture and llm.weights == "bf16"
    return PLAIN_LAUNCHES_S if is_plain else LAUNCHES_S_BEFORE[0][1]


def _has_block_experts(llm: Llm) -> bool:
    return BLOCK_FORMAT in _experts_formats(llm)


def _experts_formats(llm: Llm) -> set[str]:
    return {weights for part, weights, *_ in llm.parts() if part == "experts"}


def sparse_launches_s(llm: Llm, gpu: Gpu, engine: Engine | None) -> float:
    """Seconds that sparse and compressed attention add to a step without graphs (s layers above)."""
    if _vllm_version(engine) is None:
        return 0.0
    compressed = sum(
        group.count for group in llm.layer_groups if isinstance(group.attention, CompressedAttention)
    )
    layer_s = SPARSE_LAUNCHES_S * (GRACE_FACTOR if gpu.base in GRACE else 1.0)
    return (index_layers(llm) + compressed) * layer_s


def whole_sparse_token_s(llm: Llm, gpu: Gpu, engine: Engine | None) -> float:
    """Seconds that a token of a prompt takes longer where sparse attention does not end early (u above)."""
    version = _vllm_version(engine)
    if version is None or version >= WHOLE_SPARSE_BEFORE or llm.kv_dtype_bytes < 2.0:
        return 0.0
    heads = SPARSE_HEADS_BLACKWELL if gpu.base in BLACKWELL else SPARSE_HEADS
    whole_flops = sum(
        group.count * group.attention.chosen_flops(heads)
        for group in llm.layer_groups
        if isinstance(group.attention, LatentAttention) and group.attention.index_tokens
    )
    return EARLY_END_FRAC * whole_flops / (SPARSE_FLOPS_FRAC * gpu.dense_flops_per_s)


def shorter_index_s(llm: Llm, gpu: Gpu, engine: Engine | None) -> float:
    """Seconds by which SGLang's layers with an index are shorter than the kernel tables (n layers above)."""
    if engine is None or engine.name != "sglang":
        return 0.0
    kv = "8 bits" if llm.kv_dtype_bytes == 1.0 else "16 bits"
    return index_layers(llm) * SGLANG_INDEX_S["Blackwell" if gpu.base in BLACKWELL else kv]


def captured_tokens(max_num_seqs: int, tokens_per_seq: int = 1) -> int:
    """Tokens of the largest CUDA graph (G above) of an engine with this many seats, each of which checks
    `tokens_per_seq` tokens in a step.
    """
    return min(2 * max_num_seqs * tokens_per_seq, MOST_CAPTURED_TOKENS)


def correct_for_version(
    latency: StepLatency, llm: Llm, gpu: Gpu, engine: Engine | None, captured: int = MOST_CAPTURED_TOKENS
) -> StepLatency:
    """Step times corrected for the version of this engine, whose largest CUDA graph has `captured` tokens.

    Only step times of kernels or of a roofline are corrected: other kinds are measured steps.
    """
    if engine is None or latency.kind not in ("kernels", "roofline"):
        return latency
    if llm.is_mixture and _vllm_version(engine) is not None and not latency.joint_s:
        latency = latency.padded_to([size for size in GRAPH_SIZES if size <= captured])
    if layer_s := longer_layer_s(llm, engine):
        why = f"{1e6 * layer_s:.0f} us longer per layer of experts, as on vLLM {engine.version}"
        latency = _with_added_s(latency, layer_s * experts_layers(llm), why)
    if chunks_s := longer_chunks_s(llm, engine):
        why = f"{1e3 * chunks_s:.0f} ms of launching attention in chunks"
        latency = _with_added_s(latency, chunks_s, why)
    if latency.kind == "kernels" and (shorter_s := shorter_index_s(llm, gpu, engine)):
        why = f"{1e3 * shorter_s:.1f} ms shorter by SGLang's kernels of sparse attention"
        latency = _with_added_s(latency, -shorter_s, why)
    if latency.kind == "kernels" and (token_s := whole_sparse_token_s(llm, gpu, engine)):
        basis = (
            f"{latency.basis}; {1e6 * token_s:.1f} us longer per token of a prompt, whose sparse attention "
            f"does not end early on vLLM {engine.version}"
        )
        latency = replace(latency.with_longer_tokens(token_s, beyond_tokens=float(captured)), basis=basis)
    least_s = least_large_step_s(llm, gpu, engine)
    if launches_s := sparse_launches_s(llm, gpu, engine):
        # The second value is f(G) + s layers of the module's docstring; h, which every step adds, is taken
        # off `step_s`.
        least_s = max(least_s, float(latency.step_s(captured)) - latency.h_s + launches_s)
    if least_s:
        basis = (
            f"{latency.basis}; at least {1e3 * least_s:.0f} ms in steps of more than "
            f"{captured} tokens, as on vLLM {engine.version}"
        )
        latency = replace(latency.with_least(least_s, beyond_tokens=float(captured)), basis=basis)
    return latency


def _with_added_s(latency: StepLatency, added_s: float, why: str) -> StepLatency:
    """The step times with this many seconds more in every step; `why` is added to their basis."""
    f_s = tuple(seconds + added_s for seconds in latency.f_s)
    return replace(latency, f_s=f_s, basis=f"{latency.basis}; {why}")


def _vllm_version(engine: Engine | None) -> tuple[int, ...] | None:
    """The version of vLLM as numbers; None for other engines, whose kernels nobody has compared."""
    if engine is None or engine.name != "vllm":
        return None
    return tuple(int(part) for part in engine.version.split("."))
