"""Sums of kernel times: what is taken from which table. The tables themselves need the extra 'silicon'."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest
from plans import CATALOG

from planner.errors import InputError
from planner.imports.silicon import Kernels, _expert_split, _experts_ms, silicon_table
from planner.models.llm import Llm
from planner.models.tables import Step

HAS_TABLES = importlib.util.find_spec("aiconfigurator_core") is not None
needs_tables = pytest.mark.skipif(not HAS_TABLES, reason="needs the extra 'silicon'")
MIXTURE = Llm("paper", 1, 4, 2, 1, 2, ffn=256, vocab=10, context_tokens=64, experts=8, experts_per_token=2)


def even_ms(tokens: int) -> float:
    """Reading 2 of 8 experts a token, 1 ms each, until all are taken; then 0.1 ms for every token more."""
    return min(2.0 * tokens, 8.0) + 0.1 * max(tokens - 4, 0)


def drawn_ms(tokens: int) -> float:
    return 1.5 * even_ms(tokens)


def test_few_tokens_read_the_experts_that_they_touch() -> None:
    """1 token touches 2 experts; 2 tokens 8 (1 - 0.75^2) = 3.5, where the table has 4."""
    assert _experts_ms(MIXTURE, even_ms, drawn_ms, 1) == pytest.approx(2.0)
    assert _experts_ms(MIXTURE, even_ms, drawn_ms, 2) == pytest.approx(3.5)


def test_many_tokens_read_all_experts_and_compute_on_them() -> None:
    """64 tokens touch all 8 but for 1e-7, and 60 more than the 4 that take them all are computed."""
    assert _experts_ms(MIXTURE, even_ms, drawn_ms, 64) == pytest.approx(8.0 + 6.0)


def test_prompts_prefer_some_experts() -> None:
    """More tokens than decodes of a step: the power law's 1.5 times."""
    assert _experts_ms(MIXTURE, even_ms, drawn_ms, 1024) == pytest.approx(drawn_ms(1024))


def test_experts_take_no_less_time_for_more_tokens() -> None:
    ms = [_experts_ms(MIXTURE, even_ms, drawn_ms, n) for n in range(1, 600)]
    assert (np.diff(ms) >= 0).all()


def test_no_gpu_holds_a_part_of_a_block() -> None:
    """Experts 256 wide on 4 GPUs: slices of 64 would cut through blocks of 128."""
    blocks = dataclasses.replace(MIXTURE, dtype_bytes=1.0, weights="fp8-block")
    assert _expert_split(MIXTURE, 4) == {"moe_tp_size": 4, "moe_ep_size": 1}
    assert _expert_split(blocks, 2) == {"moe_tp_size": 2, "moe_ep_size": 1}
    assert _expert_split(blocks, 4) == {"moe_tp_size": 1, "moe_ep_size": 4}


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
    decodes = np.array([kernels.step_ms(Step(0, 0, 0, n, 1024)) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)])
    prompts = np.array([kernels.step_ms(Step(1, n, 0, 0, 0)) for n in (64, 256, 1024, 4096, 16384)])
    assert (decodes[1:] > 0.9 * decodes[:-1]).all()
    assert (prompts[1:] > prompts[:-1]).all()


@needs_tables
def test_fp8_of_both_kinds_of_scales_is_quicker_than_16_bits() -> None:
    steps = Step(0, 0, 0, 8, 1024), Step(1, 4096, 0, 0, 0)
    names = "qwen3-32b", "qwen3-32b-fp8"
    whole, blocks = (Kernels(CATALOG.llm(name), CATALOG.gpu("h100"), 2) for name in names)
    for step in steps:
        assert 0.4 < blocks.step_ms(step) / whole.step_ms(step) < 0.95


@needs_tables
def test_a_mixed_step_is_its_dense_part_once_and_both_attentions() -> None:
    """Chunks of 512 beside 64 decodes: less than one step after the other, more than either."""
    kernels = Kernels(CATALOG.llm("llama-3.1-8b"), CATALOG.gpu("h100"), 1)
    prompt, decodes = Step(1, 512, 0, 0, 0), Step(0, 0, 0, 64, 1024)
    both = kernels.step_ms(Step(1, 512, 0, 64, 1024))
    apart = [kernels.step_ms(step) for step in (prompt, decodes)]
    assert max(apart) < both < sum(apart)


@needs_tables
def test_missing_kernels_are_one_line() -> None:
    """No experts of fp8-block on RTX PRO 6000, none for Qwen3-30B-A3B on 8 A100."""
    for llm, gpu, tp in (("minimax-m2.5", "rtx-pro-6000", 4), ("qwen3-30b-a3b", "a100", 8)):
        with pytest.raises(InputError, match="AIConfigurator lacks kernels"):
            silicon_table(CATALOG.llm(llm), CATALOG.gpu(gpu), tp)
