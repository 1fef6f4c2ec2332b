"""Speculative decoding: what a step yields and takes, by hand, and what was published."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulations import LLM

from planner.documents.catalog import read_catalog
from planner.errors import InputError
from planner.models.latency import StepLatency
from planner.models.llm import WEIGHT_BYTES, FeedForward, GroupedAttention, LayerGroup, Llm, StateAttention
from planner.models.memory import Memory, active_weight_bytes
from planner.models.speculation import (
    MOST_DRAFTS,
    Drafter,
    Speculation,
    SpeculativeSteps,
    conditional_acceptance,
    drafter_of,
    least_token_times,
)

STEP = StepLatency((0.0, 100.0), (1.0, 101.0), 0.001, 0.25, 0.01, 0.5, 0.0, "by hand")  # f(N) = 1 + N


def test_a_step_yields_its_own_token_and_those_accepted_in_a_row() -> None:
    """Leviathan, Kalman, Matias 2023, equation 1: (1 - a^(k + 1)) / (1 - a) where all are alike."""
    for a, k in ((0.8, 5), (0.5, 1), (0.0, 3)):
        assert Speculation("ngram", (a,) * k).mean_tokens == pytest.approx((1 - a ** (k + 1)) / (1 - a))
    mixed = Speculation("ngram", (0.5, 0.4, 0.25))
    assert mixed.accepted_fracs == pytest.approx((0.5, 0.2, 0.05)) and mixed.mean_tokens == pytest.approx(
        1.75
    )


def test_a_step_checks_all_drafts_and_makes_the_next_ones() -> None:
    """Two decodes at contexts 10 and 20 (K = 32 with the tokens to come), one prompt of 8, k = 3, q = 0.1.

    verify  N = 8 + 2 x 4 = 16: 17;  pairs 36 + 3 x 32 + 2 x 3 x 4 / 2 = 144: 0.144;  b: 0.25 x 8 = 2;
            KV 32 + 6 = 38: 0.38;  e: 0.5;  together 20.024
    draft   first 17 + 0.036 + 0.25 x 2 + 0.38 + 0.5 = 18.416; two more of 3 rows: 4 + 0.75 + 0.38 = 5.13 each
            0.1 x (18.416 + 10.26) = 2.8676, and 3 x 0.5 s
    """
    steps = SpeculativeSteps(STEP, Speculation("eagle", (0.5,) * 3, 0.1, 0.5))
    assert steps.step_s(8, 36.0, 2, 32, 1) == pytest.approx(20.024 + 2.8676 + 1.5)


def test_drafts_that_are_looked_up_cost_the_wider_step_alone() -> None:
    """One decode at context 9, k = 1: f(2) = 3, pairs 10 + 1, two rows, KV 11."""
    steps = SpeculativeSteps(STEP, Speculation("ngram", (0.5,)))
    assert steps.step_s(0, 0.0, 1, 10, 0) == pytest.approx(3 + 0.011 + 0.5 + 0.11)


def test_the_host_in_measured_steps_counts_once() -> None:
    host = replace(STEP, h_s=2.0)
    speculation = Speculation("eagle", (0.5, 0.5), 0.3)
    alone, beside = (SpeculativeSteps(each, speculation).step_s(0, 0.0, 4, 80, 0) for each in (STEP, host))
    assert beside - alone == pytest.approx(2.0)


def test_decodes_beside_prompts_read_their_kv_longer_here_too() -> None:
    slow = replace(STEP, m_s=0.02)
    speculation = Speculation("ngram", (0.5,))
    for prefills, more in ((0, 0.0), (1, 0.02 * 11)):
        plain, longer = (
            SpeculativeSteps(each, speculation).step_s(0, 0.0, 1, 10, prefills) for each in (STEP, slow)
        )
        assert longer - plain == pytest.approx(more)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_no_token_is_cheaper_than_the_bounding_step_times_say(k: int) -> None:
    """Any step of decodes that accepts all, over the tokens it yields."""
    speculation = Speculation("ngram", (1.0,) * k)
    steps, least = SpeculativeSteps(STEP, speculation), least_token_times(STEP, speculation)
    for decodes in (1, 3, 20):
        for context in (1, 50, 4000):
            step_s = steps.step_s(0, 0.0, decodes, decodes * (context + 1), 0)
            yielded = decodes * (1 + k)
            contexts = sum(context + 1 + i for i in range(1 + k))
            floor_s = least.step_s(yielded, 0.0, yielded, decodes * contexts, 0)
            assert step_s >= floor_s * (1 - 1e-12)
    assert least_token_times(STEP, None) is STEP


def test_probabilities_from_published_lengths_give_them_back() -> None:
    """DeepSeek V4 Pro by InferenceX: a draft more was found to shorten the length, P never rises."""
    lengths = [1.79, 2.27, 2.49, 2.54, 2.55, 2.55, 2.54, 2.58]
    assert conditional_acceptance(lengths, 1) == pytest.approx((0.79,))
    assert conditional_acceptance(lengths, 3) == pytest.approx((0.79, 0.48 / 0.79, 0.22 / 0.48))
    for k, length in enumerate(lengths, 1):
        speculation = Speculation("mtp", conditional_acceptance(lengths, k))
        assert speculation.mean_tokens == pytest.approx(length)
        assert (np.diff(speculation.accepted_fracs) <= 1e-12).all()
    # 0.01, 0, -0.01 and 0.04 are taken together: 0.01 each
    assert Speculation("mtp", conditional_acceptance(lengths, 8)).accepted_fracs[4:] == pytest.approx(
        [0.01] * 4
    )


def test_lengths_that_fall_at_the_end_are_kept_too() -> None:
    """Gains 0.8, 0.6, -0.2: none is negative, and the whole is scaled from 1.4 to 1.2."""
    accepted = Speculation("mtp", conditional_acceptance([1.8, 2.4, 2.2], 3)).accepted_fracs
    assert accepted == pytest.approx((0.8 * 1.2 / 1.4, 0.6 * 1.2 / 1.4, 0.0))


def test_more_drafts_than_were_measured_are_refused() -> None:
    with pytest.raises(InputError, match="up to 2 draft tokens, found 3"):
        conditional_acceptance([1.5, 1.8], 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("medusa", (0.5,)), "method: must be one of mtp, eagle"),
        (("ngram", ()), f"tokens: 1 to {MOST_DRAFTS}"),
        (("ngram", (0.5,) * (MOST_DRAFTS + 1)), f"tokens: 1 to {MOST_DRAFTS}"),
        (("ngram", (0.5, 1.1)), r"acceptance: must be numbers from 0 to 1, found \[0.5, 1.1\]"),
        (("ngram", (0.5,), -0.1), "draft: a pass takes -0.1 of a step"),
        (("ngram", (float("nan"),)), "acceptance"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Speculation(*arguments)  # type: ignore[arg-type]


def test_a_drafter_is_a_layer_and_the_output_head() -> None:
    """LLM: hidden 4, vocab 10, four layers of (2 x 4 + 2 x 2 + 2 x 4) = 40 wide attention and 3 x 4 x 8.

    Attention: 4 x (2 + 1 + 1 + 2) = 24 parameters, feed-forward 96: 120 per layer, 240 bytes; the head 80.
    """
    found = drafter_of("eagle3", LLM)
    assert LLM.layers_bytes == 4 * 240
    assert (found.weight_bytes, found.kv_bytes_per_token) == (240.0, LLM.kv_bytes_per_token / 4)
    assert found.draft_frac == pytest.approx((240 + 80) / (4 * 240 + 80))


def test_layers_of_the_checkpoint_draft_where_there_are_some() -> None:
    with pytest.raises(InputError, match="paper has no layers for method mtp"):
        drafter_of("mtp", LLM)
    found = drafter_of("mtp", replace(LLM, draft_parameters=150.0))
    assert found.weight_bytes == 300.0 and found.draft_frac == pytest.approx((300 + 80) / (960 + 80))


def test_a_drafter_keeps_as_much_as_a_layer_that_keeps_any() -> None:
    """One of four layers has keys and values, 2 x 2 bytes; a fourth of that was counted."""
    state = StateAttention(4, 4, conv_width=8, conv_tokens=4, state_values=8, heads=2)
    attention, block = GroupedAttention(2, 1, 1, 1), FeedForward(8)
    llm = replace(LLM, groups=(LayerGroup(3, state, block), LayerGroup(1, attention, block)))
    assert llm.kv_bytes_per_token == drafter_of("eagle3", llm).kv_bytes_per_token == 4.0


def test_layers_that_draft_keep_16_bits_where_others_were_quantised_to_4() -> None:
    """150 weights take 300 bytes as in 16 bits; those of LLMs that are published in 8 bits take 150."""
    for weights, taken_bytes in (("nvfp4", 300.0), ("int4", 300.0), ("fp8-block", 150.0)):
        llm = replace(LLM, weights=weights, dtype_bytes=WEIGHT_BYTES[weights], draft_parameters=150.0)
        assert drafter_of("mtp", llm).weight_bytes == taken_bytes
    v4 = read_catalog().llm("nvidia/DeepSeek-V4-Pro-NVFP4")
    assert drafter_of("mtp", v4).weight_bytes == v4.draft_parameters


def test_a_small_llm_drafts_by_the_weights_that_are_read() -> None:
    small = Llm("small", 1, 4, 2, 1, 1, ffn=8, vocab=10, context_tokens=64)
    found = drafter_of("draft_model", LLM, small)
    assert found.weight_bytes == small.weight_bytes
    assert found.draft_frac == pytest.approx(float(active_weight_bytes(small) / active_weight_bytes(LLM)))
    with pytest.raises(InputError, match="needs model"):
        drafter_of("draft_model", LLM)


def test_a_drafter_takes_room_from_the_kv_cache() -> None:
    """1000 bytes of KV at 10 per token; less 200 / 2 of weights, at 10 + 4, as both GPUs have the one KV
    head: 64 tokens.
    """
    use = Memory(2000.0, 500.0, 300.0, 200.0, 10.0)
    assert use.kv_tokens == 96
    found = Drafter(200.0, 4.0, 0.1).add_to_memory(use, LLM, tp=2)
    assert (found.kv_bytes, found.kv_bytes_per_token) == (900.0, 14.0)
    assert found.kv_tokens == 64
    assert Drafter().add_to_memory(use, LLM, tp=2) is use
