"""What sequences take of the KV cache beside their tokens: windows and states."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulations import LLM, beside, compare, make_latency, make_trace, mixed, prefix_trace, random_case

from planner.domain import Limit, Slo
from planner.errors import InputError
from planner.fleet import Fleet, Policies
from planner.models.engine import Engine
from planner.models.kv_layout import ExtraKv, kv_layout
from planner.models.llm import FeedForward, GroupedAttention, LayerGroup, StateAttention
from planner.models.speculation import Speculation
from planner.reports.fact_sentences import fact_sentences_of
from planner.search.evidence.findings import list_warnings
from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import judge_slo


@pytest.mark.long
@pytest.mark.parametrize("dyadic", [False, True])
def test_kernel_equals_the_plain_simulator(dyadic: bool) -> None:
    for seed in range(60):
        fleet, trace, limits, closed_loop = random_case(seed, dyadic=dyadic)
        compare(beside(fleet, seed), trace, limits, closed_loop)


def test_a_state_takes_the_room_of_a_sequence() -> None:
    """Ten blocks, sequences of 16 + 16 tokens: two blocks each, five of them at once; with three blocks of
    state two at once, so that of four the second pair waits for the first. Steps take 1 s.
    """
    trace = make_trace([0, 0, 0, 0], [16] * 4, [17] * 4)
    fleet = mixed(make_latency(), kv_tokens=160)
    assert simulate(fleet, trace).e2e_s.tolist() == [17.0] * 4
    kind = replace(fleet.pools[0].type, extra_kv=ExtraKv(3))
    fleet = replace(fleet, pools=(replace(fleet.pools[0], type=kind),))
    assert simulate(fleet, trace).e2e_s.tolist() == [17.0, 17.0, 34.0, 34.0]
    assert kind.has_room_for(112) and not kind.has_room_for(113)


def test_windows_grow_with_their_sequences() -> None:
    """56 blocks, sequences of 16 tokens that write 112 more, and three windows for a block of all tokens.
    At its end a sequence takes 4 x 8 blocks, while it writes 8 + 3 x 4.5 on average, so two run at once.
    """
    own = ExtraKv(window_ratio=3.0, window_blocks=100)
    assert own.growing_blocks(16, 128) == 14 and own.sequence_blocks(128) == 24
    pool = mixed(make_latency(), kv_tokens=56 * 16).pools[0]
    fleet = Fleet(LLM, (replace(pool, type=replace(pool.type, extra_kv=own)),), Policies())
    assert simulate(fleet, make_trace([0, 0], [16] * 2, [112] * 2)).e2e_s.tolist() == [112.0] * 2


def test_the_mean_of_a_window_that_fills_up() -> None:
    """Of 1, 2, 3, ... 6 blocks a window of three holds 1, 2, 3, 3, 3 and 3."""
    assert ExtraKv(1, 2.0, 3).growing_blocks(16, 96) == 1 + 5
    assert ExtraKv(1, 2.0, 3).growing_blocks(48, 96) == 1 + 6


def test_a_request_that_never_fits_is_turned_away() -> None:
    trace = make_trace([0, 0], [16, 64], [1, 1])
    fleet = mixed(make_latency(), kv_tokens=160)
    kind = replace(fleet.pools[0].type, extra_kv=ExtraKv(1, 2.0, 4))
    fleet = replace(fleet, pools=(replace(fleet.pools[0], type=kind),))
    assert simulate(fleet, trace).status.tolist() == [0, 1]  # 1 + 1 + 2 x 1 and 1 + 5 + 2 x 4 of 10 blocks


def test_each_drafted_token_takes_a_state_more() -> None:
    """Three layers with a state of 1000 x 2 + 3 x 8 x 2 = 2048 bytes, as 16 tokens of the fourth layer have:
    three blocks of 16. With two drafts the convolutions keep 32 bytes more, so a block has 32 tokens;
    three states in each of three layers take 9 of them, and half of a block may be empty: 18 + 1.
    """
    state = StateAttention(
        4, 4, conv_width=8, conv_tokens=4, state_values=1000, heads=2, state_value_bytes=2.0
    )
    groups = (
        LayerGroup(3, state, FeedForward(8)),
        LayerGroup(1, GroupedAttention(2, 1, 32, 32), FeedForward(8)),
    )
    llm = replace(LLM, groups=groups)
    assert [kv_layout(llm, 1, drafts=drafts).extra.constant_blocks for drafts in (0, 2)] == [3, 19]
    assert kv_layout(llm, 1).block_bytes == kv_layout(llm, 1, drafts=2).block_bytes == 2048
    kind = replace(mixed(make_latency()).pools[0].type, speculation=Speculation("ngram", (0.5, 0.5)))
    assert kind.with_llm(llm).extra_kv.constant_blocks == 19


def test_batching_that_counts_tokens_alone_refuses() -> None:
    fleet = beside(mixed(make_latency()), 1)
    fleet = replace(fleet, policies=Policies(batching="distserve"))
    with pytest.raises(InputError, match="windows or states; choose vllm-v1"):
        simulate(fleet, make_trace([0], [4], [1]))


def test_windows_of_others_send_a_prefix_out_of_the_cache() -> None:
    """Prompts of 48 tokens in a cache of 64 blocks, which has room for all three. A token that is computed
    takes a block, its window's 15/16 with its own 1/16: after B alone 48 of 64 were taken since A was there,
    after B and C 96.
    """
    pool = mixed(make_latency(), kv_tokens=1024).pools[0]
    windows = ExtraKv(passing_blocks=2.0, findable_blocks=15 / 16)
    a, b, c = [1, 2, 3], [4, 5, 6], [7, 8, 9]
    hits = []
    for own, version in ((windows, "0.33.0"), (windows, "0.22.1"), (ExtraKv(), "0.33.0")):
        engine = Engine("vllm", version, async_scheduling=False)
        kind = replace(pool.type, extra_kv=own, engine=engine)
        fleet = Fleet(LLM, (replace(pool, type=kind),), Policies(prefix_cache=True, routing="round-robin"))
        for prompts in ([a, b, a], [a, b, c, a]):
            found = simulate(fleet, prefix_trace([10.0 * i for i in range(len(prompts))], prompts))
            assert found.cached_tokens is not None
            hits.append(int(found.cached_tokens[-1]))
    assert hits == [32, 0, 0, 0, 32, 32]


def test_windows_are_kept_at_each_block_until_0_26() -> None:
    """Gemma-like windows, 2 blocks for one of all tokens: a token takes 3/16 of a block, and none is lost to
    them where only the ends of prompts keep theirs.
    """
    pool = mixed(make_latency(), kv_tokens=1024).pools[0]
    taken = []
    for version in ("0.26.1", "0.27.0"):
        engine = Engine("vllm", version, async_scheduling=False)
        kind = replace(pool.type, extra_kv=ExtraKv(window_ratio=2.0, window_blocks=2), engine=engine)
        taken.append((kind.taken_blocks_per_token, kind.keeps_ends_alone))
    assert taken == [(3 / 16, False), (0.0, True)]
    assert not replace(pool.type, engine=engine).keeps_ends_alone


@pytest.mark.parametrize(
    ("own", "caution"),
    [
        (ExtraKv(window_ratio=2.0, window_blocks=2), "from its third request on"),
        (ExtraKv(constant_blocks=1, passing_blocks=2.0, findable_blocks=0.5), "each page of 256 tokens"),
        (ExtraKv(), ""),
    ],
)
def test_what_the_plan_counts_otherwise_than_the_engine_is_a_warning(own: ExtraKv, caution: str) -> None:
    pool = mixed(make_latency(), kv_tokens=1024).pools[0]
    policies = Policies(prefix_cache=True, routing="round-robin")
    fleet = Fleet(LLM, (replace(pool, type=replace(pool.type, extra_kv=own)),), policies)
    slo = Slo((Limit("ttft", 0.9, 5.0),))
    trace = prefix_trace([0.0, 10.0, 20.0], [[1], [1], [2]])
    simulation = simulate(fleet, trace, limits=slo.limits, record=True)
    said = fact_sentences_of(list_warnings(fleet, simulation, slo, judge_slo(simulation, slo)))
    assert [caution in each for each in said if "prefix cache" in each] == ([True] if caution else [])
