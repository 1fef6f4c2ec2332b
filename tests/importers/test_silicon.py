"""Sums of kernel times: what is taken from which table. The tables themselves need the extra 'silicon'."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import CATALOG

from planner.errors import InputError
from planner.importers.silicon import Kernels, is_whole, silicon_table
from planner.importers.silicon_config import (
    ConfigKernels,
    config_folder,
    count_blocks,
    count_experts_layers,
    count_sparse_layers,
    experts_format,
    has_same_weights,
)
from planner.importers.silicon_experts import expert_split, experts_ms, operation_ms
from planner.importers.silicon_fits import silicon_fits
from planner.importers.silicon_marlin import marlin_operation_ms
from planner.importers.silicon_mxfp8 import mxfp8_operation_ms
from planner.models.llm import FeedForward, GroupedAttention, LatentAttention, LayerGroup, Llm, StateAttention
from planner.models.step_tables import StepShape

HAS_TABLES = importlib.util.find_spec("aiconfigurator_core") is not None
needs_tables = pytest.mark.skipif(not HAS_TABLES, reason="needs the extra 'silicon'")
MIXTURE = Llm("paper", 1, 4, 2, 1, 2, ffn=256, vocab=10, context_tokens=64, experts=8, experts_per_token=2)


WINDOWS = tuple(
    LayerGroup(
        18,
        GroupedAttention(64, 8, 64, 64, window_tokens=window),
        FeedForward(2880, True, 128, 4, weights="mxfp4"),
    )
    for window in (128, None)
)
GPT_OSS = Llm(
    "openai/gpt-oss-120b",
    *(36, 2880, 64, 8, 64, 2880, 201088, 131072),
    dtype_bytes=4.25 / 8,
    experts=128,
    experts_per_token=4,
    weights="mxfp4",
    groups=WINDOWS,
)
LATENT = LatentAttention(128, 1536, 512, 128, 64, 128, weights="fp8-block")
SHARED = FeedForward(2048, True, 256, 8, 2048, weights="fp8-block", shared_weights="fp8-block")
DEEPSEEK = Llm(
    "deepseek-ai/DeepSeek-V3",
    *(61, 7168, 128, 1, 128, 2048, 129280, 131072),
    dtype_bytes=1.0,
    experts=256,
    experts_per_token=8,
    weights="fp8-block",
    groups=(LayerGroup(3, LATENT, FeedForward(18432, weights="fp8-block")), LayerGroup(58, LATENT, SHARED)),
)


def even_ms(tokens: int) -> float:
    """Reading 2 of 8 experts a token, 1 ms each, until all are taken; then 0.1 ms for every token more."""
    return min(2.0 * tokens, 8.0) + 0.1 * max(tokens - 4, 0)


def drawn_ms(tokens: int) -> float:
    return 1.5 * even_ms(tokens)


def test_few_tokens_read_the_experts_that_they_touch() -> None:
    """1 token touches 2 experts; 2 tokens 8 (1 - 0.75^2) = 3.5, where the table has 4."""
    assert experts_ms(2 / 8, even_ms, drawn_ms, 1) == pytest.approx(2.0)
    assert experts_ms(2 / 8, even_ms, drawn_ms, 2) == pytest.approx(3.5)


def test_many_tokens_read_all_experts_and_compute_on_them() -> None:
    """64 tokens touch all 8 but for 1e-7, and 60 more than the 4 that take them all are computed."""
    assert experts_ms(2 / 8, even_ms, drawn_ms, 64) == pytest.approx(8.0 + 6.0)


def test_prompts_prefer_some_experts() -> None:
    """More tokens than decodes of a step: the power law's 1.5 times."""
    assert experts_ms(2 / 8, even_ms, drawn_ms, 1024) == pytest.approx(drawn_ms(1024))


def test_uneven_choices_of_decodes_take_at_most_the_power_laws_time() -> None:
    """2 tokens touch 3.5 of 8 experts evenly, 3.5 ms; the power law says half of the table's 4."""

    def few_ms(tokens: int) -> float:
        return 0.5 * even_ms(tokens)

    assert experts_ms(2 / 8, even_ms, few_ms, 2, is_even=False) == pytest.approx(2.0)
    assert experts_ms(2 / 8, even_ms, drawn_ms, 2, is_even=False) == pytest.approx(3.5)
    assert experts_ms(2 / 8, even_ms, few_ms, 2) == pytest.approx(3.5)


def test_experts_take_no_less_time_for_more_tokens() -> None:
    ms = [experts_ms(2 / 8, even_ms, drawn_ms, n) for n in range(1, 600)]
    assert (np.diff(ms) >= 0).all()


def test_no_gpu_holds_a_part_of_a_block() -> None:
    """Experts 256 wide on 4 GPUs: slices of 64 would cut through blocks of 128."""
    blocked = dataclasses.replace(MIXTURE, dtype_bytes=1.0, weights="fp8-block")
    assert expert_split(256, "bf16", 4) == {"moe_tp_size": 4, "moe_ep_size": 1}
    assert expert_split(256, "fp8-block", 2) == {"moe_tp_size": 2, "moe_ep_size": 1}
    assert expert_split(256, "fp8-block", 4) == {"moe_tp_size": 1, "moe_ep_size": 4}
    assert not is_whole(MIXTURE, 4)
    assert is_whole(blocked, 4)
    assert not is_whole(blocked, 2)


def test_who_asks_for_whole_experts_gets_them_where_there_are_any() -> None:
    assert expert_split(256, "bf16", 4, whole=True) == {"moe_tp_size": 1, "moe_ep_size": 4}
    assert is_whole(MIXTURE, 4, True)
    assert not is_whole(MIXTURE, 1, True)
    assert not is_whole(CATALOG.llm("qwen3-8b"), 4, True)


@pytest.mark.parametrize(
    ("llm", "gpu", "why"),
    [
        ("llama-3.1-8b", "l4", "lacks kernels of this GPU; use one of a100-80g"),
        ("opt-66b", "h100", "gated"),
        ("llama-3.1-8b-fp8", "a100", "lacks kernels of fp8 weights"),
    ],
)
def test_what_the_tables_lack_is_one_line(llm: str, gpu: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        silicon_table(CATALOG.llm(llm), CATALOG.gpu(gpu), 1)


@needs_tables
@pytest.mark.parametrize(
    ("llm", "gpu", "tp"),
    [
        ("qwen3-14b", "h100", 1),
        ("qwen3-30b-a3b", "b200", 2),
        ("qwen3-32b-fp8", "b200", 2),
        ("mixtral-8x7b", "a100", 2),
        ("llama-3.1-8b-fp8", "rtx-pro-6000", 4),
    ],
)
def test_a_larger_step_takes_no_less_time_but_for_the_tables_noise(llm: str, gpu: str, tp: int) -> None:
    kernels = Kernels(CATALOG.llm(llm), CATALOG.gpu(gpu), tp)
    decodes = np.array(
        [kernels.step_ms(StepShape(0, 0, 0, n, 1024)) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    )
    prompts = np.array([kernels.step_ms(StepShape(1, n, 0, 0, 0)) for n in (64, 256, 1024, 4096, 16384)])
    assert (decodes[1:] > 0.9 * decodes[:-1]).all()
    assert (prompts[1:] > prompts[:-1]).all()


@needs_tables
def test_fp8_of_both_kinds_of_scales_is_quicker_than_16_bits() -> None:
    steps = StepShape(0, 0, 0, 8, 1024), StepShape(1, 4096, 0, 0, 0)
    names = "qwen3-32b", "qwen3-32b-fp8"
    whole, blocks = (Kernels(CATALOG.llm(name), CATALOG.gpu("h100"), 2) for name in names)
    for step in steps:
        assert 0.4 < blocks.step_ms(step) / whole.step_ms(step) < 0.95


@needs_tables
def test_a_mixed_step_is_its_dense_part_once_and_both_attentions() -> None:
    """Chunks of 512 beside 64 decodes: less than one step after the other, more than either."""
    kernels = Kernels(CATALOG.llm("llama-3.1-8b"), CATALOG.gpu("h100"), 1)
    prompt, decodes = StepShape(1, 512, 0, 0, 0), StepShape(0, 0, 0, 64, 1024)
    both = kernels.step_ms(StepShape(1, 512, 0, 64, 1024))
    apart = [kernels.step_ms(step) for step in (prompt, decodes)]
    assert max(apart) < both < sum(apart)


@needs_tables
def test_missing_kernels_are_one_line() -> None:
    """No experts of fp8-block on RTX PRO 6000, none for Qwen3-30B-A3B on 8 A100."""
    for llm, gpu, tp in (("minimax-m2.5", "rtx-pro-6000", 4), ("qwen3-30b-a3b", "a100", 8)):
        with pytest.raises(InputError, match="AIConfigurator lacks kernels"):
            silicon_table(CATALOG.llm(llm), CATALOG.gpu(gpu), tp)


def test_every_block_ends_in_an_all_reduce() -> None:
    """DeepSeek-V3: 61 layers of two blocks. A hybrid with 3 layers of states alone, 2 of attention and an FFN
    and 4 FFNs alone: 3 + 4 + 4.
    """
    state = StateAttention(8, 4, 4, 4, 16, 2)
    hybrid = dataclasses.replace(
        MIXTURE,
        layers=9,
        groups=(
            LayerGroup(3, state, None),
            LayerGroup(2, GroupedAttention(2, 1, 2, 2), FeedForward(256)),
            LayerGroup(4, None, FeedForward(256)),
        ),
    )
    assert count_blocks(DEEPSEEK) == 122
    assert count_blocks(MIXTURE) == 2
    assert count_blocks(hybrid) == 11


def test_first_layers_with_full_attention_have_no_index() -> None:
    """AIConfigurator counts all 60 layers of MiniMax-M3 as sparse; 3 are not. On 8 GPUs: 8 of 64 heads of 128
    and one KV head, so projections of 1280 and 1024.
    """
    fields = {
        "name": "attention",
        "scale_factor": 60.0,
        "num_heads": 8,
        "num_kv_heads": 1,
        "hidden_size": 6144,
    }
    fields |= {"head_dim": 128, "kv_cache_dtype": "bfloat16", "fmha_quant_mode": "bfloat16"}
    norm = {"Elementwise": {"name": "add_norm", "scale_factor": 60.0}}
    m3 = CATALOG.llm("minimax-m3")
    counted = count_sparse_layers([norm, {"MsaContext": fields}], m3)
    assert counted[0] == norm and [next(iter(each.values()))["scale_factor"] for each in counted[1:]] == [
        57,
        3,
        3,
        3,
    ]
    full, qkv, proj = (next(iter(each.values())) for each in counted[2:])
    assert "ContextAttention" in counted[2] and (full["n"], full["n_kv"], full["head_size"]) == (8, 1, 128)
    assert (qkv["n"], qkv["k"], proj["n"], proj["k"]) == (1280, 6144, 6144, 1024)
    assert count_sparse_layers(counted, m3) == counted
    (decodes, plain, *_) = count_sparse_layers([{"MsaGeneration": fields}], m3)
    assert "MsaGeneration" in decodes and "GenerationAttention" in plain


@pytest.mark.parametrize(
    ("experts", "weights", "slices"), [(256, "nvfp4", 4), (256, "fp8_block", 1), (384, "nvfp4", 1)]
)
def test_whole_experts_that_were_measured_all_on_one_gpu_take_what_slices_take(
    experts: int, weights: str, slices: int
) -> None:
    """DeepSeek-V3's in nvfp4; not in fp8-block, and not Kimi's 384."""
    read: list[int] = []

    class Engine:
        def evaluate_ops_json(self, written: str, **_: int) -> list[tuple[str, float]]:
            (operation,) = json.loads(written)
            read.append(operation["Moe"]["moe_tp_size"])
            return [("moe", 1.0)]

    fields: dict[str, Any] = {"hidden_size": 7168, "inter_size": 2048, "num_experts": experts, "topk": 8}
    fields |= {"quant_mode": weights, "moe_tp_size": 1, "moe_ep_size": 4, "workload_distribution": "drawn"}
    operation_ms(Engine(), {"Moe": fields}, "b200_sxm", DEEPSEEK)(16)
    assert set(read) == {slices}


def test_dense_first_layers_are_no_layers_of_experts() -> None:
    """AIConfigurator counts all 61 layers of DeepSeek-V3 as layers of experts; 3 are dense, 9 times as wide
    as the shared expert: 2 * 18432 / 8 GPUs = 4608.
    """
    of_experts = [
        {
            "Gemm": {
                "name": "shared_gate_up_gemm",
                "scale_factor": 61.0,
                "n": 512,
                "k": 7168,
                "quant_mode": "",
            }
        },
        {"Elementwise": {"name": "shared_act_gate", "scale_factor": 61.0, "bytes_per_token": 1536.0}},
        {"Gemm": {"name": "shared_ffn2_gemm", "scale_factor": 61.0, "n": 7168, "k": 256, "quant_mode": ""}},
        {"Gemm": {"name": "router_gemm", "scale_factor": 61.0, "n": 256, "k": 7168, "quant_mode": ""}},
        {"Moe": {"name": "moe", "scale_factor": 61.0}},
    ]
    norm = {"Elementwise": {"name": "add_norm_2", "scale_factor": 61.0}}
    counted = count_experts_layers([norm, *of_experts], DEEPSEEK)
    assert counted[0] == norm
    layers = [next(iter(each.values()))["scale_factor"] for each in counted[1:]]
    assert layers == pytest.approx([58.0] * 5 + [3.0] * 3)
    up, gate, down = (next(iter(each.values())) for each in counted[6:])
    assert (up["n"], gate["bytes_per_token"], down["k"]) == (4608, 9 * 1536.0, 2304)
    assert up["quant_mode"] == down["quant_mode"] == "fp8_block"
    assert not any("shared" in each["name"] for each in (up, gate, down))


def test_the_format_of_the_experts_counts_and_not_that_of_most() -> None:
    shared = dataclasses.replace(SHARED, weights="mxfp4", shared_weights="bf16")
    mixed = dataclasses.replace(DEEPSEEK, groups=(LayerGroup(61, LATENT, shared),))
    assert experts_format(mixed) == "mxfp4"
    assert experts_format(CATALOG.llm("qwen3-32b-fp8")) == "fp8-block"


def kernels_of(llm: Llm, gpu: str, system: str, tp: int, *, whole: bool | None = None) -> ConfigKernels:
    folder = config_folder(llm)
    assert folder is not None
    return ConfigKernels(llm, CATALOG.gpu(gpu), system, tp, folder, whole_experts=whole)


@needs_tables
@pytest.mark.parametrize("llm", [GPT_OSS, DEEPSEEK], ids=lambda llm: llm.name)
@pytest.mark.parametrize(("gpu", "system"), [("h200", "h200_sxm"), ("b200", "b200_sxm")])
def test_a_larger_step_of_unlike_layers_takes_no_less_time(llm: Llm, gpu: str, system: str) -> None:
    kernels = kernels_of(llm, gpu, system, 8)
    decodes = np.array(
        [kernels.step_ms(StepShape(0, 0, 0, n, 1024)) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    )
    prompts = np.array([kernels.step_ms(StepShape(1, n, 0, 0, 0)) for n in (64, 256, 1024, 4096, 16384)])
    assert (decodes[1:] > 0.9 * decodes[:-1]).all()
    assert (prompts[1:] > prompts[:-1]).all()


@needs_tables
@pytest.mark.parametrize("llm", [GPT_OSS, DEEPSEEK], ids=lambda llm: llm.name)
def test_a_mixed_step_of_unlike_layers_costs_less_than_two_steps(llm: Llm) -> None:
    kernels = kernels_of(llm, "h200", "h200_sxm", 8)
    both = kernels.step_ms(StepShape(1, 512, 0, 64, 1024))
    apart = [kernels.step_ms(step) for step in (StepShape(1, 512, 0, 0, 0), StepShape(0, 0, 0, 64, 1024))]
    assert max(apart) < both < sum(apart)


@needs_tables
def test_a_decode_takes_what_its_memory_traffic_takes_and_not_much_more() -> None:
    """gpt-oss-120b on one H200, 64 decodes of 1024 tokens: 1 - (1 - 4/128)^64 = 87 % of 36 x 128 experts of
    3 x 2880 x 2880 weights at 4.25 bits = 52.9 GB, heads and attention in 16 bits 1.7 GB, keys and values
    2 x 18 x 8 x 64 x 2 B of 1024 tokens and of 128 = 2.7 GB: 57 GB at 4.8 TB/s = 11.9 ms. The kernels reach
    about half of that.
    """
    ms = kernels_of(GPT_OSS, "h200", "h200_sxm", 1).step_ms(StepShape(0, 0, 0, 64, 1024))
    assert 11.9 < ms < 2.5 * 11.9


@needs_tables
def test_waits_for_launches_are_no_kernel_times() -> None:
    """Latent attention of decodes on B200 was measured in CUDA graphs, elsewhere not. The B300 and the GB200
    are no slower, and an H200, whose memory is 8 / 4.8 times as slow, is not more than that slower.
    """
    b200, h200 = (kernels_of(DEEPSEEK, gpu, f"{gpu}_sxm", 8) for gpu in ("b200", "h200"))
    b300, gb200 = (
        kernels_of(DEEPSEEK, gpu, system, 8) for gpu, system in (("b300", "b300_sxm"), ("gb200",) * 2)
    )
    for decodes in (1, 8, 64):
        step = StepShape(0, 0, 0, decodes, 1024)
        assert b300.step_ms(step) == pytest.approx(b200.step_ms(step), rel=0.15)
        assert gb200.step_ms(step) == pytest.approx(b200.step_ms(step), rel=0.15)
        assert h200.step_ms(step) < 8 / 4.8 * b200.step_ms(step)


@needs_tables
def test_windows_do_not_read_what_lies_before_them() -> None:
    """From 1024 to 8192 tokens 18 of 36 layers read more: 7168 x 64 x 2 x 8 x 64 x 2 B x 18 = 16.9 GB at
    4.8 TB/s are 3.5 ms; all 36 would be 7.
    """
    kernels = kernels_of(GPT_OSS, "h200", "h200_sxm", 1)
    short, long = (kernels.step_ms(StepShape(0, 0, 0, 64, n)) for n in (1024, 8192))
    assert 3.5 < long - short < 7.0


@needs_tables
def test_whole_experts_are_others_than_slices() -> None:
    slices, whole = (kernels_of(GPT_OSS, "h200", "h200_sxm", 8, whole=whole) for whole in (False, True))
    steps = [StepShape(0, 0, 0, n, 1024) for n in (4, 64)]
    assert all(slices.step_ms(step) != whole.step_ms(step) for step in steps)


@needs_tables
def test_a_mixture_has_a_fit_per_split_and_a_dense_llm_one() -> None:
    h100 = CATALOG.gpu("h100")
    mixture, dense = (
        silicon_fits(llm, h100, (2,), date="2026-11-21", command="test").document
        for llm in (GPT_OSS, CATALOG.llm("qwen3-8b"))
    )
    assert mixture is not None
    assert [(row.get("ep", False), row.get("dp", 1)) for row in mixture["fits"]] == [
        (False, 1),
        (True, 1),
        (True, 2),
        (True, 4),
    ]
    assert "whole experts" in mixture["fits"][1]["basis"]
    assert all(row["mape_frac"] < 0.05 for row in mixture["fits"])
    assert dense is not None
    assert [row.get("ep", False) for row in dense["fits"]] == [False]


@needs_tables
def test_what_the_tables_lack_of_unlike_layers_is_one_line() -> None:
    unknown = dataclasses.replace(GPT_OSS, name="nobody/gpt-oss-121b")
    four_bits = dataclasses.replace(DEEPSEEK, name="nvidia/Kimi-K2.5-NVFP4")
    with pytest.raises(InputError, match=r"no config\.json of this LLM"):
        silicon_table(unknown, CATALOG.gpu("h200"), 8)
    with pytest.raises(InputError, match="lacks kernels of fp8-block weights"):
        silicon_table(DEEPSEEK, CATALOG.gpu("a100"), 8)
    eight_bits = dataclasses.replace(
        GPT_OSS,
        name="nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8",
        groups=(LayerGroup(36, WINDOWS[1].attention, FeedForward(2880, True, 128, 4, weights="fp8")),),
    )
    with pytest.raises(InputError, match="measured experts in fp8 untuned on this GPU"):
        silicon_table(eight_bits, CATALOG.gpu("h200"), 8, folder=config_folder(eight_bits))
    with pytest.raises(InputError, match=r"AIConfigurator lacks kernels: .*nvfp4"):
        silicon_table(four_bits, CATALOG.gpu("h200"), 8, folder=config_folder(four_bits))
    with pytest.raises(InputError, match="has other formats of weights; give the folder of its own"):
        silicon_table(CATALOG.llm("nemotron-3-ultra-nvfp4"), CATALOG.gpu("b200"), 8)


def test_formats_of_a_copied_config_are_those_of_the_row(tmp_path: Path) -> None:
    """Llama-3.1-8B's shape in 16 bits, and the same in 8: half the bytes but for embeddings and head."""
    llm = CATALOG.llm("llama-3.1-8b")
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": llm.layers,
        "hidden_size": llm.hidden,
        "num_attention_heads": llm.heads,
        "num_key_value_heads": llm.kv_heads,
        "intermediate_size": llm.ffn,
        "vocab_size": llm.vocab,
        "max_position_embeddings": llm.context_tokens,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert has_same_weights(llm, tmp_path)
    assert not has_same_weights(CATALOG.llm("llama-3.1-8b-fp8"), tmp_path)


@needs_tables
def test_a_fit_far_from_its_kernels_is_left_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits of gpt-oss-120b on 2 H100 miss their kernels by less than 8 %, and by more than 0.1 %."""
    monkeypatch.setattr("planner.importers.silicon_fits.WORST_MAPE_FRAC", 0.001)
    fitted = silicon_fits(GPT_OSS, CATALOG.gpu("h100"), (2,), date="2026-11-21", command="test")
    assert fitted.document is None
    assert len(fitted.left_out) >= 2
    assert all("misses its kernel times by" in why for why in fitted.left_out)


@needs_tables
def test_marlins_experts_read_faster_and_multiply_more_slowly() -> None:
    """On one H200 a layer of gpt-oss-120b takes 0.52 ms for 64 tokens by the power law, 3.9 ms for 8192.

    In Marlin 64 tokens are 112 of Kimi-K3's, which take 4.1 ms there: 0.04 + 0.108 (4.1 - 0.06) = 0.48. 8192
    are 14336, some 69 ms: 7.4.
    """
    h200 = CATALOG.gpu("h200-141g")

    def layer_ms(step: StepShape) -> list[float]:
        rows = (
            silicon_table(GPT_OSS, h200, 1, [step], experts_of=each) for each in (None, marlin_operation_ms)
        )
        return [1e3 * table.y[0] / 36 for table in rows]

    default_ms, marlin_ms = layer_ms(StepShape(0, 0, 0, 64, 128))
    assert 0.0 < default_ms - marlin_ms < 0.1
    default_ms, marlin_ms = layer_ms(StepShape(1, 8192, 0, 0, 0))
    assert 3.0 < marlin_ms - default_ms < 4.5
    experts = {
        "Moe": dict.fromkeys(("topk", "num_experts", "hidden_size", "inter_size"), 1)
        | {"scale_factor": 1, "workload_distribution": "balanced"}
    }
    with pytest.raises(InputError, match="AIConfigurator lacks Marlin's experts in w4a16_mxfp4"):
        marlin_operation_ms(experts, "h200_sxm", GPT_OSS)


@needs_tables
def test_experts_that_multiply_in_mxfp8_take_less() -> None:
    """Of 512 tokens gpt-oss-120b's experts take 0.69 to 0.86 ms a layer by vLLM's default on B200 and 0.42 to
    0.51 in mxfp8; there are 36 layers.
    """
    b200, steps = CATALOG.gpu("b200-180g"), [StepShape(0, 0, 0, 512, 128)]
    default_s, mxfp8_s = (
        silicon_table(GPT_OSS, b200, 1, steps, experts_of=chosen).y[0]
        for chosen in (None, mxfp8_operation_ms)
    )
    assert 36 * 0.2e-3 < default_s - mxfp8_s < 36 * 0.45e-3
    experts = {"Moe": {"topk": 2, "num_experts": 8, "scale_factor": 1, "workload_distribution": "balanced"}}
    with pytest.raises(InputError, match="AIConfigurator lacks its experts in w4a8_mxfp4_mxfp8"):
        mxfp8_operation_ms(experts, "b200_sxm", MIXTURE)
