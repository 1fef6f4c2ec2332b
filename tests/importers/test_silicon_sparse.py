"""Sparse attention out of kernel tables: prompts without their launches. Rows are those of the wheel's
dsa_context_module_perf and dsa_generation_module_perf for vLLM 0.24 (H200, DeepSeek-V3.2, 16 heads,
fp8_block, KV in 16 bits).
"""

from __future__ import annotations

import importlib.util

import pytest
from plans import CATALOG

from planner.errors import InputError
from planner.importers.silicon import silicon_table
from planner.importers.silicon_config import ConfigKernels, as_measured, config_folder
from planner.importers.silicon_fits import silicon_fits
from planner.importers.silicon_sparse import SparsePrompts, is_sparse, shares_index
from planner.models.step_tables import StepShape

HAS_TABLES = importlib.util.find_spec("aiconfigurator_core") is not None
needs_tables = pytest.mark.skipif(not HAS_TABLES, reason="needs the extra 'silicon'")
DEEPSEEK, GLM = CATALOG.llm("deepseek-v3.2"), CATALOG.llm("glm-5-fp8")


def kernels_of(name: str, gpu: str, system: str) -> ConfigKernels:
    llm = CATALOG.llm(name)
    folder = config_folder(llm)
    assert folder is not None
    return ConfigKernels(llm, CATALOG.gpu(gpu), system, 8, folder, whole_experts=False)


def alone_ms(length: float) -> float:
    return 0.3e-3 * length + 1e-8 * length**2


def planted_ms(prompts: int, length: int) -> float:
    """2 ms of launches, or 0.1 ms and what B prompts take."""
    return max(2.0, 0.1 + prompts * alone_ms(length))


def test_prompts_shorter_than_their_launches_take_what_their_tokens_take() -> None:
    """2 prompts of 512: 0.1 + 2 (0.3e-3 512 + 1e-8 512^2) = 0.4124 ms, where 2 were measured."""
    sparse = SparsePrompts(planted_ms, 0.1)
    assert planted_ms(2, 512) == 2.0
    assert sparse.step_ms(2, 512, 0) == pytest.approx(0.4124, rel=1e-3)
    assert sparse.step_ms(16, 2048, 0) == pytest.approx(planted_ms(16, 2048))


def test_a_prompt_is_its_first_part_and_the_rest_after_it() -> None:
    """Each part reads the weights (0.1 ms) anew."""
    sparse = SparsePrompts(planted_ms, 0.1)
    parts = [sparse.step_ms(3, 1500, 0), sparse.step_ms(3, 700, 1500), sparse.step_ms(3, 5800, 2200)]
    assert sum(parts) == pytest.approx(sparse.step_ms(3, 8000, 0) + 2 * 0.1)


def test_past_what_was_measured_the_index_grows_on() -> None:
    """1024 tokens after 130048: 0.1 + 0.3e-3 1024 + 1e-8 (131072^2 - 130048^2) = 3.081 ms."""
    assert SparsePrompts(planted_ms, 0.1).step_ms(1, 1024, 130048) == pytest.approx(3.081, rel=1e-3)


def test_times_of_two_kernels_are_refused() -> None:
    """Every token of prompts of 4096 takes a quarter less than one of shorter prompts."""
    with pytest.raises(ValueError, match="a token of prompts of 4096 takes less"):
        SparsePrompts(lambda n, length: planted_ms(n, length) * (0.75 if length == 4096 else 1.0), 0.1)


def test_an_index_of_another_layer_is_told_apart() -> None:
    """GLM-5.2 shares one among four layers; DeepSeek-V3 has none; V4's is of compressed tokens."""
    names = ("deepseek-v3.2", "glm-5", "glm-5.2", "deepseek-v3", "deepseek-v4")
    assert [is_sparse(CATALOG.llm(name)) for name in names] == [True, True, True, False, False]
    assert [shares_index(CATALOG.llm(name)) for name in names] == [False, False, True, False, False]


def test_projections_have_the_formats_of_the_row() -> None:
    """GLM-5-FP8 leaves the norms of its attention in 16 bits, and AIConfigurator all of it. Where NVFP4
    leaves some projections out there is no one format to say.
    """
    read = dict.fromkeys(("q", "kv", "o", "indexer"), "bfloat16")
    operation = {"DsaContext": {"gemm_quant_mode": "bfloat16", "attn_projection_quant_modes": read}}
    fields = as_measured(operation, GLM)["DsaContext"]
    assert fields["gemm_quant_mode"] == "fp8_block"
    assert set(fields["attn_projection_quant_modes"].values()) == {"fp8_block"}
    for name in ("glm-5", "nvidia/DeepSeek-V3.2-NVFP4"):
        assert as_measured(operation, CATALOG.llm(name)) == operation


@needs_tables
def test_decodes_at_a_point_of_the_table() -> None:
    """4 decodes of 1024 tokens take 0.2071 ms a layer, 64 take 0.2164 and of 4096 tokens 0.2643: 61 layers
    are 12.63, 13.20 and 16.12 ms. The rest of a step does not know the contexts.
    """
    kernels = kernels_of("deepseek-v3.2", "h200", "h200_sxm")
    few, many, long = (
        kernels.step_ms(StepShape(0, 0, 0, *each)) for each in ((4, 1024), (64, 1024), (64, 4096))
    )
    assert long - many == pytest.approx(16.12 - 13.20, abs=0.02)
    assert 12.63 < few < 2 * 12.63
    assert 13.20 < many


@needs_tables
def test_prompts_at_points_of_the_table() -> None:
    """16 prompts of 2048 and 32 of 1024, 32768 tokens both: 18.6096 and 15.0460 ms a layer, times 61. The
    rest is alike but for 16 rows of the head. 4 of 8192 take 25.983 and one of 32768 35.356.
    """
    kernels = kernels_of("deepseek-v3.2", "h200", "h200_sxm")
    t = {n: kernels.step_ms(StepShape(n, 32768 // n, 0, 0, 0)) for n in (32, 16, 4, 1)}
    assert t[16] - t[32] == pytest.approx(61 * (18.6096 - 15.0460), rel=0.01)
    assert t[4] - t[16] == pytest.approx(61 * (25.983 - 18.6096), rel=0.01)
    assert t[1] - t[4] == pytest.approx(61 * (35.356 - 25.983), rel=0.01)


@needs_tables
@pytest.mark.parametrize("tokens", [64, 256, 512])
def test_short_prompts_take_what_as_many_decodes_take(tokens: int) -> None:
    """Kernels do the same for N tokens of a short prompt as for N sequences of half as many tokens; prompts
    were measured launch by launch, decodes in CUDA graphs. 64 tokens: 1.60 ms a layer and 0.187.
    """
    kernels = kernels_of("deepseek-v3.2", "h200", "h200_sxm")
    prompt = kernels.step_ms(StepShape(1, tokens, 0, 0, 0))
    assert prompt == pytest.approx(kernels.step_ms(StepShape(0, 0, 0, tokens, tokens // 2)), rel=0.1)


@needs_tables
@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5-fp8"])
def test_a_fit_follows_sparse_attention_and_says_what_is_carried_on(name: str) -> None:
    document = silicon_fits(CATALOG.llm(name), CATALOG.gpu("gb200"), (8,), date="d", command="test").document
    assert document is not None
    assert all(row["mape_frac"] < 0.08 for row in document["fits"])
    assert all("prompts past 32768 tokens carried on" in row["basis"] for row in document["fits"])


@needs_tables
def test_what_the_tables_of_sparse_attention_lack_is_one_line() -> None:
    with pytest.raises(InputError, match="no attention of vLLM's without an index of its own"):
        silicon_table(CATALOG.llm("glm-5.2-fp8"), CATALOG.gpu("b200"), 8)
    with pytest.raises(InputError, match="takes less than one of shorter ones: two kernels"):
        silicon_table(CATALOG.llm("nvidia/DeepSeek-V3.2-NVFP4"), CATALOG.gpu("gb200"), 4)
    with pytest.raises(InputError, match="AIConfigurator lacks kernels"):
        silicon_table(CATALOG.llm("nvidia/DeepSeek-V3.2-NVFP4"), CATALOG.gpu("rtx-pro-6000"), 8)
