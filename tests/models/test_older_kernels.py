"""What vLLM takes beyond the kernels of the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import fleet_of
from planner.models.engine import Engine
from planner.models.older_kernels import (
    captured_tokens,
    correct_for_version,
    least_large_step_s,
    longer_layer_s,
    sparse_launches_s,
    whole_sparse_token_s,
)

CATALOG = read_catalog()
LLAMA = CATALOG.llm("llama-3.1-70b")
MINIMAX = CATALOG.llm("MiniMaxAI/MiniMax-M2.5")


def vllm(version: str) -> Engine:
    return Engine("vllm", version, async_scheduling=True)


@pytest.mark.parametrize(
    ("version", "layer_us"),
    [
        ("0.11.1", 150),
        ("0.13.2", 150),
        ("0.14", 45),
        ("0.17.1", 45),
        ("0.18.0", 15),
        ("0.19.0", 0),
        ("0.33.0", 0),
    ],
)
def test_a_layer_of_block_fp8_experts_takes_longer_before_0_19(version: str, layer_us: float) -> None:
    assert longer_layer_s(MINIMAX, vllm(version)) == pytest.approx(1e-6 * layer_us)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-30B-A3B", "moonshotai/Kimi-K2.5"])
def test_dense_llms_and_other_formats_do_not(name: str) -> None:
    """A dense one in the same format, and mixtures in 16 and in 4 bits."""
    assert longer_layer_s(CATALOG.llm(name), vllm("0.11.1")) == 0


def test_other_engines_and_no_engine_do_not() -> None:
    assert longer_layer_s(MINIMAX, None) == 0
    assert longer_layer_s(MINIMAX, replace(vllm("0.5"), name="sglang")) == 0


def test_a_step_of_a_fleet_on_an_old_version_takes_longer_by_its_layers() -> None:
    """62 layers at 45 us are 2.79 ms, whatever the batch."""
    worker = {"gpu": "h200-141g", "tp": 4}
    old, new = (
        fleet_of(
            {"llm": MINIMAX.name, "workers": [worker], "engine": {"name": "vllm", "version": version}},
            Path("fleet.yaml"),
            CATALOG,
        )
        .pools[0]
        .type.latency
        for version in ("0.16.0", "0.24.0")
    )
    for tokens in (1, 64, 8192):
        assert old.step_s(tokens) - new.step_s(tokens) == pytest.approx(62 * 45e-6)
    assert "45 us longer per layer of experts, as on vLLM 0.16.0" in old.basis


@pytest.mark.parametrize(
    ("gpu", "version", "least_s"),
    [
        ("b200-180g", "0.10.2", 0.032),
        ("b200-180g", "0.15.1", 0.032),
        ("gb300-279g", "0.18.1", 0.116),
        ("b200-180g", "0.19.0", 0.0),
        ("h200-141g", "0.10.2", 0.0),
        ("h200-141g", "0.14.0", 0.048),
        ("h100-80g", "0.33.0", 0.048),
    ],
)
def test_launches_of_large_steps_take_time_on_blackwell_before_0_19_and_elsewhere_since_0_14(
    gpu: str, version: str, least_s: float
) -> None:
    """80 layers of Llama-3.1-70B in 16 bits at 0.4, 1.45 and 0.6 ms, whatever the number of GPUs."""
    assert least_large_step_s(LLAMA, CATALOG.gpu(gpu), vllm(version)) == pytest.approx(least_s)


@pytest.mark.parametrize(
    ("name", "layer_ms"),
    [
        ("nvidia/Llama-3.1-70B-Instruct-FP8", 0.65),
        ("moonshotai/Kimi-K2.5", 0.65),
        ("Qwen/Qwen3-30B-A3B", 0.9),
        ("deepseek-ai/DeepSeek-V3.1", 0.9),
    ],
)
def test_on_blackwell_before_0_16_other_formats_and_mixtures_launch_for_longer(
    name: str, layer_ms: float
) -> None:
    llm = CATALOG.llm(name)
    least_s = least_large_step_s(llm, CATALOG.gpu("b200-180g"), vllm("0.11.1"))
    assert least_s == pytest.approx(1e-3 * layer_ms * llm.layers)


@pytest.mark.parametrize(
    ("gpu", "version", "layer_ms"),
    [
        ("b200-180g", "0.18.1", 1.45),
        ("b200-180g", "0.18.2", 0.0),
        ("h200-141g", "0.13.0", 0.0),
        ("h200-141g", "0.15.1", 0.6),
        ("h200-141g", "0.18.1", 1.45),
        ("h200-141g", "0.18.2", 0.6),
    ],
)
def test_experts_in_block_fp8_lost_their_launches_earlier_and_have_them_on_hopper(
    gpu: str, version: str, layer_ms: float
) -> None:
    """62 layers of MiniMax-M2.5."""
    least_s = least_large_step_s(MINIMAX, CATALOG.gpu(gpu), vllm(version))
    assert least_s == pytest.approx(62e-3 * layer_ms)


def test_sparse_attention_of_large_steps_is_launched_outside_graphs_on_every_version() -> None:
    """78 layers of GLM-5 at 1.5 ms are 117 ms, on top of a step of 512 tokens."""
    llm, gpu = CATALOG.llm("zai-org/GLM-5-FP8"), CATALOG.gpu("h200-141g")
    kernels = CATALOG.step_latency(llm, gpu, 8)
    served = correct_for_version(kernels, llm, gpu, vllm("0.33.0"))
    assert sparse_launches_s(llm, gpu, vllm("0.33.0")) == pytest.approx(0.117)
    assert served.step_s(1024) == pytest.approx(kernels.step_s(512) + 0.117)
    assert served.step_s(8192) == pytest.approx(kernels.step_s(8192))
    assert served.step_s(512) == pytest.approx(kernels.step_s(512))
    assert sparse_launches_s(llm, gpu, None) == sparse_launches_s(MINIMAX, gpu, vllm("0.33.0")) == 0.0


@pytest.mark.parametrize(
    ("gpu", "version", "token_us"),
    [
        ("h200-141g", "0.16.0", 5.62),
        ("b200-180g", "0.16.0", 4.94),
        ("h200-141g", "0.23.0", 0.0),
        ("h200-141g", "0.33.0", 0.0),
    ],
)
def test_sparse_attention_of_prompts_did_not_end_early_before_0_23(
    gpu: str, version: str, token_us: float
) -> None:
    """On H200 the kernel computes 64 heads with 2048 tokens: 2 x 64 x (2 x 512 + 64) x 2048 = 0.2852 GFLOP a
    layer. 78 layers at 0.68 of 989.5 TFLOP/s take 33.06 us, of which 0.17 are 5.62 us. On B200 it computes
    128 heads at 0.68 of 2250 TFLOP/s: 4.94 us.
    """
    llm, row = CATALOG.llm("zai-org/GLM-5-FP8"), CATALOG.gpu(gpu)
    assert whole_sparse_token_s(llm, row, vllm(version)) == pytest.approx(1e-6 * token_us, rel=2e-3)
    assert whole_sparse_token_s(MINIMAX, row, vllm(version)) == whole_sparse_token_s(llm, row, None) == 0.0
    assert whole_sparse_token_s(replace(llm, kv_dtype_bytes=1.0), row, vllm(version)) == 0.0


def test_steps_of_prompts_are_longer_by_what_did_not_end_early() -> None:
    """5.62 us for each of the 8192 - 512 and of the 100,000 - 512 tokens beyond the largest graph; steps in
    graphs stay.
    """
    llm, gpu = CATALOG.llm("zai-org/GLM-5-FP8"), CATALOG.gpu("h200-141g")
    kernels = CATALOG.step_latency(llm, gpu, 8)
    served, tokens = correct_for_version(kernels, llm, gpu, vllm("0.22.0")), np.array([8192.0, 100_000.0])
    longer_s = served.step_s(tokens) - kernels.step_s(tokens)
    assert longer_s == pytest.approx(5.62e-6 * (tokens - 512), rel=2e-3)
    assert served.step_s(512) == pytest.approx(kernels.step_s(512))


@pytest.mark.parametrize(("gpu", "launches_s"), [("gb300-279g", 0.15555), ("b300-288g", 0.0915)])
def test_compressed_attention_is_launched_so_too_and_behind_a_grace_cpu_for_longer(
    gpu: str, launches_s: float
) -> None:
    """61 layers of DeepSeek-V4-Pro at 2.55 or 1.5 ms, beyond the 256 tokens that 128 seats capture."""
    llm, row = CATALOG.llm("deepseek-v4-pro"), CATALOG.gpu(gpu)
    kernels = CATALOG.step_latency(llm, row, 4)
    served = correct_for_version(kernels, llm, row, vllm("0.21.0"), captured_tokens(128))
    assert sparse_launches_s(llm, row, vllm("0.21.0")) == pytest.approx(launches_s)
    assert served.step_s(np.array([257.0, 512.0])) == pytest.approx(kernels.step_s(256) + launches_s)
    assert served.step_s(256) == pytest.approx(kernels.step_s(256))


@pytest.mark.parametrize(
    ("seats", "tokens_per_seq", "captured"), [(1024, 1, 512), (256, 1, 512), (128, 1, 256), (64, 2, 256)]
)
def test_graphs_reach_to_twice_the_seats_and_to_512_tokens(
    seats: int, tokens_per_seq: int, captured: int
) -> None:
    assert captured_tokens(seats, tokens_per_seq) == captured


def test_steps_of_mixtures_are_filled_up_to_the_size_of_a_graph() -> None:
    """3 tokens take what 4 do, 5 what 8 do, 9 what 16 do, 257 what 272 do."""
    gpu = CATALOG.gpu("h200-141g")
    kernels = CATALOG.step_latency(MINIMAX, gpu, 4)
    served = correct_for_version(kernels, MINIMAX, gpu, vllm("0.19.0"))
    steps = served.step_s(np.array([1.0, 2.0, 3.0, 5.0, 8.0, 9.0, 257.0, 512.0, 8192.0]))
    filled = kernels.step_s(np.array([1.0, 2.0, 4.0, 8.0, 8.0, 16.0, 272.0, 512.0, 8192.0]))
    assert steps == pytest.approx(filled)


def test_steps_of_other_llms_and_of_other_engines_are_not() -> None:
    gpu, tokens = CATALOG.gpu("h200-141g"), np.array([3.0, 5.0, 257.0])
    for llm, engine in ((LLAMA, vllm("0.19.0")), (MINIMAX, replace(vllm("0.5"), name="sglang"))):
        kernels = CATALOG.step_latency(llm, gpu, 4)
        assert correct_for_version(kernels, llm, gpu, engine).step_s(tokens) == pytest.approx(
            kernels.step_s(tokens)
        )


@pytest.mark.parametrize(
    ("name", "version", "longer_ms"),
    [("llama-4-scout", "0.11.1", 9.6), ("llama-4-scout", "0.14", 0.0), ("gemma-3-27b-it", "0.11.1", 0.0)],
)
def test_attention_in_chunks_was_launched_outside_graphs(name: str, version: str, longer_ms: float) -> None:
    """48 layers of Llama-4-Scout at 0.2 ms. Gemma's windows of 1024 tokens slide."""
    llm, gpu = CATALOG.llm(name), CATALOG.gpu("h100-80g")
    roofline = CATALOG.step_latency(llm, gpu, 4)
    served = correct_for_version(roofline, llm, gpu, vllm(version))
    assert served.step_s(512) == pytest.approx(roofline.step_s(512) + longer_ms / 1e3)


@pytest.mark.parametrize(
    ("name", "gpu", "kv_bytes", "shorter_s"),
    [
        ("zai-org/GLM-5-FP8", "h200-141g", 2.0, 0.01092),
        ("zai-org/GLM-5-FP8", "h200-141g", 1.0, 0.00702),
        ("zai-org/GLM-5-FP8", "b200-180g", 2.0, 0.00858),
        ("MiniMaxAI/MiniMax-M2.5", "h200-141g", 2.0, 0.0),
    ],
)
def test_sparse_attention_takes_less_on_sglang(
    name: str, gpu: str, kv_bytes: float, shorter_s: float
) -> None:
    """78 layers of GLM-5 at 140, 90 and 110 us; MiniMax has no index."""
    llm, row = replace(CATALOG.llm(name), kv_dtype_bytes=kv_bytes), CATALOG.gpu(gpu)
    kernels = CATALOG.step_latency(CATALOG.llm(name), row, 8)
    sglang = replace(vllm("0.5.9"), name="sglang")
    tokens = np.array([1.0, 64.0, 4096.0])
    served = correct_for_version(kernels, llm, row, sglang)
    assert served.step_s(tokens) == pytest.approx(kernels.step_s(tokens) - shorter_s)
    assert "SGLang's kernels" in served.basis if shorter_s else served is kernels


def test_steps_beyond_the_captured_graphs_take_at_least_their_launches() -> None:
    """513 and 1024 tokens on 4 B200 take 116 ms on 0.17; 512 and 16384 tokens what they take on 0.24. The
    spread of prefills moves what launches add.
    """
    gpu = CATALOG.gpu("b200-180g")
    new = CATALOG.step_latency(LLAMA, gpu, 4)
    old = correct_for_version(new, LLAMA, gpu, vllm("0.17.0"))
    assert new.step_s(1024) < 0.116 < new.step_s(16384)
    assert old.step_s(np.array([513.0, 1024.0])) == pytest.approx(0.116)
    small_and_large = np.array([1.0, 512.0, 16384.0])
    assert old.step_s(small_and_large) == pytest.approx(new.step_s(small_and_large))
    assert "at least 116 ms in steps of more than 512 tokens, as on vLLM 0.17.0" in old.basis
    assert old.spread is not None
    upper = old.at_spread(1.645, 0.0)
    added_s = 0.116 - old.step_s(512)
    assert upper.step_s(1024) == pytest.approx(old.step_s(512) + old.spread.prefill.high * added_s, rel=1e-3)


def test_ranks_that_share_experts_keep_their_share_of_a_step() -> None:
    """Experts of all ranks take what they took, and a rank's own time the rest of 61 layers at 1.45 ms."""
    gpu, llm = CATALOG.gpu("b200-180g"), CATALOG.llm("deepseek-ai/DeepSeek-V3.1")
    new = CATALOG.step_latency(llm, gpu, 1, ep=True, dp=8)
    old = correct_for_version(new, llm, gpu, vllm("0.18.0"))
    tokens = np.array([513.0, 600.0, 1024.0])
    assert old.joint_experts_s(tokens) == pytest.approx(new.joint_experts_s(tokens))
    assert (old.step_s(tokens) >= 1.45e-3 * llm.layers - 1e-9).all()


def test_step_times_that_somebody_gave_stay_as_they_are() -> None:
    latency = replace(CATALOG.step_latency(MINIMAX, CATALOG.gpu("h200-141g"), 4), kind="steps")
    assert correct_for_version(latency, MINIMAX, CATALOG.gpu("h200-141g"), vllm("0.11.1")) is latency
