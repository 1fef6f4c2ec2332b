"""planner/traffic/prefixes.py by hand, against a brute-force LRU cache and figures of public traces."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from planner.errors import InputError, TraceError
from planner.traffic.prefixes import (
    HitCurve,
    alike_tokens_frac,
    block_uses,
    hit_curve,
    prefix_tree,
    round_robin_curve,
    stack_distances,
    summarise_prefixes,
    with_larger_blocks,
    with_longer_prompts,
    working_set_tokens,
)
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace
from planner.traffic.workload import prefix_sharing

SHARED = Path(__file__).parents[3] / "shared" / "data" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the checkout")
BLOCK = 10


def trace_of(
    prompts: list[list[int]], arrival_s: list[float] | None = None, last_tokens: int = BLOCK
) -> Trace:
    """Prompts of blocks of BLOCK tokens, the last one filled with `last_tokens`."""
    counts = [len(prompt) for prompt in prompts]
    return Trace(
        name="t",
        arrival_s=np.arange(len(prompts), dtype=float) if arrival_s is None else np.array(arrival_s),
        input_tokens=np.array([max(BLOCK * (count - 1) + last_tokens, 1) for count in counts]),
        output_tokens=np.ones(len(prompts), np.int64),
        prefix_offsets=np.concatenate(([0], np.cumsum(counts))),
        prefix_ids=np.array([block for prompt in prompts for block in prompt], np.int64),
        prefix_block_tokens=BLOCK,
    )


def random_prompts(rng: np.random.Generator, requests: int) -> list[list[int]]:
    """Random walks down a tree in which an id says the whole path to it."""
    prompts = []
    for _ in range(requests):
        path, node = [], 0
        for _ in range(int(rng.integers(0, 7))):
            node = 3 * node + 1 + int(rng.integers(0, 2 if rng.uniform() < 0.7 else 3))
            path.append(node)
        prompts.append(path)
    prompts[0] = [1]
    return prompts


def lru_hits(prompts: list[list[int]], capacity: int) -> list[int]:
    """Blocks that hit, request by request, in a cache that holds so many and forgets the longest unused."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for prompt in prompts:
        found = 0
        while found < len(prompt) and prompt[found] in cache:
            found += 1
        hits.append(found)
        for block in reversed(prompt):
            cache[block] = None
            cache.move_to_end(block)
            while len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def curve_of(trace: Trace) -> HitCurve:
    blocks = block_uses(trace)
    return hit_curve(trace, blocks.tokens, stack_distances(blocks.offsets, blocks.node, len(blocks.parent)))


def test_tree_by_hand() -> None:
    """1-2-3, 1-2-4 and 1-2 make the nodes {1, 2}, {3}, {4}; 5 is a root of its own."""
    tree = prefix_tree(block_uses(trace_of([[1, 2, 3], [1, 2, 4], [1, 2], [5], []], last_tokens=4)))
    assert tree.parent.tolist() == [-1, 0, 0, -1]
    assert tree.requests.tolist() == [3, 1, 1, 1]
    assert tree.blocks.tolist() == [2, 1, 1, 1]
    assert tree.tokens.tolist() == [20, 4, 4, 4]  # the third prompt fills 4 of block 2, the first ones all 10
    assert tree.start_tokens.tolist() == [0, 20, 20, 0]
    assert tree.end.tolist() == [1, 2, 0, 3, -1]
    assert tree.first_request.tolist() == [0, 0, 1, 3]
    assert tree.depth.tolist() == [1, 2, 2, 1]


def test_prompts_that_part_after_the_same_blocks_split_a_node_where_one_of_them_ends() -> None:
    """1-2-3 twice and 1 once: {1} carries three requests, {2, 3} two."""
    tree = prefix_tree(block_uses(trace_of([[1, 2, 3], [1, 2, 3], [1]])))
    assert (tree.blocks.tolist(), tree.requests.tolist()) == ([1, 2], [3, 2])


def test_an_id_under_another_parent_is_another_block() -> None:
    """2 after 1 and 2 after 3 are different texts, though the file gives them one id."""
    blocks = block_uses(trace_of([[1, 2], [3, 2], [1, 2]]))
    assert blocks.node.tolist() == [0, 1, 2, 3, 0, 1]
    assert blocks.parent.tolist() == [-1, 0, -1, 2]


def test_numbers_hold_when_the_hash_table_grows() -> None:
    """200,000 distinct blocks in prompts of 10, then the first 1,000 prompts again."""
    prompts = np.arange(200_000).reshape(-1, 10)
    again = np.concatenate((prompts, prompts[:1000]))
    blocks = block_uses(trace_of(again.tolist()))
    assert (blocks.node == again.ravel()).all()
    assert (blocks.parent.reshape(-1, 10)[:, 0] == -1).all()
    assert (blocks.parent.reshape(-1, 10)[:, 1:] == prompts[:, :-1]).all()


@pytest.mark.parametrize("seed", range(12))
def test_one_pass_gives_what_lru_caches_of_every_size_give(seed: int) -> None:
    """Stack distances against a simulated cache of 1, 2, ... blocks; the last block is part filled."""
    prompts = random_prompts(np.random.default_rng(seed), 60)
    trace = trace_of(prompts, last_tokens=7)
    curve = curve_of(trace)
    for capacity in range(1, 40):
        hits = lru_hits(prompts, capacity)
        tokens = sum(min(BLOCK * n, int(trace.input_tokens[i])) for i, n in enumerate(hits))
        assert curve.at(capacity * BLOCK) * trace.input_tokens.sum() == pytest.approx(tokens)
    assert curve.at(0) == 0
    assert curve.at(39.9 * BLOCK) == curve.at(39 * BLOCK)  # whole blocks
    assert curve.infinite_frac == curve.at(10**9)


@pytest.mark.parametrize("seed", range(4))
def test_round_robin_is_that_many_caches_of_their_own(seed: int) -> None:
    prompts = random_prompts(np.random.default_rng(seed), 50)
    curve = round_robin_curve(trace_of(prompts), 3)
    for capacity in (2, 5, 100):
        hits = sum(sum(lru_hits(prompts[r::3], capacity)) for r in range(3))
        assert curve.at(capacity * BLOCK) * curve.input_tokens == pytest.approx(hits * BLOCK)


@pytest.mark.parametrize("seed", range(6))
def test_both_ways_to_sharing_agree(seed: int) -> None:
    """Here by tree and stack, in workload.py by ids alone, where ids tell their path."""
    trace = trace_of(random_prompts(np.random.default_rng(seed), 80), last_tokens=3)
    ours, theirs = summarise_prefixes(trace).sharing, prefix_sharing(trace)
    assert ours.distinct_blocks == theirs.distinct_blocks
    for name in ("block_hit_frac", "token_hit_frac", "request_hit_frac", "shared_token_frac"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name)), name


def test_key_portion_is_the_deepest_node_larger_than_all_before_it() -> None:
    """Nodes of 10, 30, 20 and 10 tokens on one path: 30 > 10, 20 < 40. A root is its own key portion."""
    system, tool, question = [1], [2, 3, 4], [5, 6]
    tree = prefix_tree(block_uses(trace_of([system, system + tool, system + tool + question, [9]])))
    assert tree.tokens.tolist() == [10, 30, 20, 10]
    assert tree.key_nodes().tolist() == [0, 1, 1, 3]


def test_preble_columns_by_hand() -> None:
    """Prompts 1-2-3 and 1-2-4 share 20 of 30 tokens each and have {1, 2} as key portion; 5 shares nothing.

    Shared: (2/3 + 2/3 + 0) / 3. Key portion: (2/3 + 2/3 + 1) / 3. One shared key portion, of two requests.
    """
    summary = summarise_prefixes(trace_of([[1, 2, 3], [1, 2, 4], [5]]))
    assert summary.shared_frac.mean == pytest.approx(4 / 9)
    assert summary.key_frac.mean == pytest.approx(7 / 9)
    assert (summary.key_requests.mean, summary.key_requests.sd) == (2, 0)


def test_reuse_gaps_count_from_the_last_use() -> None:
    """Block 1 at 0, 4 and 5 s: gaps 4 and 1 s, median 2.5."""
    summary = summarise_prefixes(trace_of([[1], [1], [1]], arrival_s=[0, 4, 5]))
    assert summary.reuse_gap_s[50] == pytest.approx(2.5)


def test_working_set_counts_a_block_once_in_every_window() -> None:
    """Windows of 10 s: {1, 2}, nothing, {1, 3}; the part window at the end is left out."""
    trace = trace_of([[1, 2], [1], [1, 3], [1], [7]], arrival_s=[0, 5, 20, 29, 31])
    blocks = block_uses(trace)
    used = stack_distances(blocks.offsets, blocks.node, len(blocks.parent))
    assert working_set_tokens(trace, blocks, used, 10.0).tolist() == [20, 0, 20]
    with pytest.raises(InputError, match="window: expected more than 0 s"):
        working_set_tokens(trace, blocks, used, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_concave_curve_lies_on_or_above_the_hit_curve(seed: int) -> None:
    """It starts at (0, 0), ends with all hits, and its slopes fall."""
    curve = curve_of(trace_of(random_prompts(np.random.default_rng(seed), 80)))
    size, hits = curve.concave()
    grid = np.arange(len(curve.hit_tokens)) * BLOCK
    assert (np.interp(grid, size, hits) >= curve.hit_tokens - 1e-9).all()
    assert (size[0], hits[0], hits[-1]) == (0, 0, curve.hit_tokens[-1])
    assert (np.diff(np.diff(hits) / np.diff(size)) < 1e-12).all()


def test_one_request_and_no_reuse_have_a_summary() -> None:
    summary = summarise_prefixes(trace_of([[1, 2]]))
    assert (summary.infinite_hit_frac, summary.reuse_gap_s, summary.key_requests.mean) == (0, {}, None)
    assert summary.round_robin_hit_frac == {4: 0.0, 8: 0.0, 16: 0.0}


def test_a_trace_without_ids_is_refused() -> None:
    trace = Trace("plain", np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
    with pytest.raises(TraceError, match="plain: has no block ids; needs a column hash_ids"):
        summarise_prefixes(trace)
    with pytest.raises(InputError, match="replicas: expected at least 1, found 0"):
        round_robin_curve(trace_of([[1]]), 0)


@pytest.mark.shared
@needs_shared
@pytest.mark.parametrize(
    ("name", "nodes", "curve", "robin"),
    [
        (
            "conversation",
            (15787, 1, 7373, 24, 3970),
            (0.054, 0.139, 0.291, 0.366, 0.374),
            (0.196, 0.139, 0.101),
        ),
        ("synthetic", (4177, 2211, 13, 3, 591), (0.145, 0.315, 0.577, 0.651, 0.651), (0.372, 0.231, 0.138)),
    ],
)
def test_mooncake_figures(
    name: str, nodes: tuple[int, ...], curve: tuple[float, ...], robin: tuple[float, ...]
) -> None:
    """Against another program's counts: nodes, roots, children, depth, shared nodes; LRU of 1, 3, 10, 30 M
    tokens and endless; round robin over 4, 8, 16 endless caches."""
    summary = summarise_prefixes(read_trace(SHARED / f"mooncake_{name}_trace.jsonl.gz"))
    assert nodes == (
        summary.nodes,
        summary.roots,
        summary.largest_branching,
        summary.largest_depth,
        summary.shared_nodes,
    )
    sizes = [summary.hit_frac[tokens] for tokens in (10**6, 3 * 10**6, 10**7, 3 * 10**7)]
    assert [*sizes, summary.infinite_hit_frac] == pytest.approx(curve, abs=6e-4)
    assert list(summary.round_robin_hit_frac.values()) == pytest.approx(robin, abs=6e-4)


@pytest.mark.parametrize("seed", range(20))
def test_nodes_are_those_of_a_dictionary_of_beginnings(seed: int) -> None:
    """Random prompts of few ids, so that they part and meet everywhere: a node is a beginning of a prompt."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 3, int(rng.integers(1, 9))).tolist() for _ in range(40)]
    numbers: dict[tuple[int, ...], int] = {}
    expected = [
        numbers.setdefault(tuple(prompt[: k + 1]), len(numbers))
        for prompt in prompts
        for k in range(len(prompt))
    ]
    trace = trace_of(prompts)
    assert block_uses(trace).node.tolist() == expected
    assert block_uses(trace).node.tolist() == expected  # Kept from the first time.


def test_longer_prompts_by_hand() -> None:
    """Half longer: of two blocks the first is repeated, which makes three; three whole blocks and a part of
    5 tokens, 35 in all, become 53 tokens in six blocks, the last of 3.
    """
    longer = with_longer_prompts(trace_of([[7, 8], [7, 8, 9, 4]], last_tokens=5), 0.5)
    assert longer.input_tokens.tolist() == [23, 53]
    assert np.diff(longer.prefix_offsets).tolist() == [3, 6]
    first, second = np.split(longer.prefix_ids, longer.prefix_offsets[1:2])
    assert len(set(second.tolist())) == 6
    assert first.tolist() == second[:3].tolist()  # 7, 7 again, 8.


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("more_frac", [0.0, 0.12, 0.7, 1.0])
def test_longer_prompts_share_as_much(seed: int, more_frac: float) -> None:
    """Each prompt's blocks grow by the share, but for part of a block; so do those that two prompts share."""
    prompts = random_prompts(np.random.default_rng(seed), 40)
    trace = trace_of([[block for block in prompt for _ in range(8)] for prompt in prompts])
    longer = with_longer_prompts(trace, more_frac)
    assert alike_tokens_frac(longer) == pytest.approx(alike_tokens_frac(trace), abs=0.02)
    if more_frac in (0.0, 1.0):  # Between, a block more or less is left where a prompt ends.
        tree, longer_tree = prefix_tree(block_uses(trace)), prefix_tree(block_uses(longer))
        assert longer_tree.parent.tolist() == tree.parent.tolist()
        assert longer_tree.blocks.tolist() == (tree.blocks * (1 + more_frac)).astype(int).tolist()
        assert longer_tree.requests.tolist() == tree.requests.tolist()


def test_many_blocks_are_joined_where_the_prompts_agree_from_the_start() -> None:
    """Of a mean of 700 blocks four make one. The second prompt leaves the first after block 401; the third
    has the first's blocks behind another one, which makes them others.
    """
    first = list(range(1_001))
    prompts = [first, [*first[:402], *range(5_000, 5_598)], [9_999, *first[1:99]]]
    trace = trace_of(prompts)
    joined = with_larger_blocks(trace)
    assert joined.prefix_block_tokens == 4 * BLOCK
    counts = np.diff(joined.prefix_offsets).tolist()
    assert counts == [250, 250, 24]  # What is over has no id.
    of_request = np.split(joined.prefix_ids, joined.prefix_offsets[1:-1])
    agree = of_request[0] == of_request[1]
    assert agree[:100].all() and not agree[100:].any()
    assert not np.isin(of_request[2], of_request[0]).any()
    assert "4" in joined.notes[-1] and "700 blocks" in joined.notes[-1]
    few = trace_of([first[:256], first[:256]])
    assert with_larger_blocks(few) is few


def test_joined_blocks_of_a_file_hit_but_for_the_rest_of_each_prompt(tmp_path: Path) -> None:
    """40 turns each add 25 blocks of 512 tokens, 512.5 blocks in the mean: a turn finds all blocks of
    the turn before, but for up to three at their end.
    """
    counts = [25 * turn for turn in range(1, 41)]
    rows = [
        {"timestamp": 1000 * k, "input_length": 512 * n, "output_length": 1, "hash_ids": list(range(n))}
        for k, n in enumerate(counts)
    ]
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(path)
    assert trace.prefix_block_tokens == 4 * 512 and len(trace.prefix_ids) == sum(n // 4 for n in counts)
    hits = sum(n // 4 for n in counts[:-1]) * 4 / sum(counts)
    assert alike_tokens_frac(trace) == pytest.approx(hits, rel=1e-12)
    assert hits == pytest.approx(sum(counts[:-1]) / sum(counts), abs=0.004)
