"""benchmarks/generated_traffic.py against published marginals, counts by hand and prompts written out."""

from __future__ import annotations

import numpy as np
import pytest
from shares import some

from benchmarks.generated_traffic import TABLE, _Texts, judges, merged, preble, tree_of_thoughts
from planner.errors import InputError
from planner.traffic.prefixes import summarise_prefixes
from planner.traffic.trace import Trace


def parents(trace: Trace) -> list[list[int]]:
    """Those of every request."""
    found: list[list[int]] = [[] for _ in range(len(trace))]
    for request, parent in trace.after.tolist():
        found[request].append(parent)
    return found


def prompt(trace: Trace, request: int) -> list[int]:
    first, end = trace.prefix_offsets[request : request + 2]
    return list(trace.prefix_ids[first:end])


@pytest.mark.parametrize("workload", some(sorted(TABLE, key="loogle".__eq__), 4))
def test_five_workloads_have_the_published_means(workload: str) -> None:
    """Table 1. Prompts within 8 %; of Toolbench's 100 tools, some of them used much more, within 20 %. The
    standard deviations, of long tails, within 30 %.

    In Toolbench and programming a prompt that all share is a key portion too; the longer the trace, the more
    requests it has.
    """
    trace, shape = (
        preble(workload, 4000, 10.0, rng=np.random.default_rng(1), block_tokens=16),
        TABLE[workload],
    )
    summary = summarise_prefixes(trace)
    assert len(trace) == 4000
    rel = 0.2 if workload == "toolbench" else 0.08
    assert trace.input_tokens.mean() == pytest.approx(shape.prompt_tokens[0], rel=rel)
    assert trace.input_tokens.std() == pytest.approx(shape.prompt_tokens[1], rel=0.3)
    assert trace.output_tokens.mean() == pytest.approx(shape.output_tokens[0], rel=0.05)
    assert trace.output_tokens.std() == pytest.approx(shape.output_tokens[1], rel=0.15)
    assert summary.shared_frac.mean == pytest.approx(shape.shared_frac[0], abs=0.04)
    assert summary.key_frac.mean == pytest.approx(shape.key_frac[0], abs=0.1)
    if workload in ("embodied", "videoqa", "loogle"):
        assert summary.key_requests.mean == pytest.approx(shape.key_requests[0], rel=0.15)
    assert summary.infinite_hit_frac > summary.round_robin_hit_frac[4] + 0.01


@pytest.mark.parametrize("workload", list(TABLE))
@pytest.mark.parametrize("requests", [1, 2, 7])
def test_any_number_of_requests_is_made(workload: str, requests: int) -> None:
    assert len(preble(workload, requests, 1.0, rng=np.random.default_rng(0))) == requests


def test_steps_of_an_agent_extend_the_prompt_of_the_step_they_wait_for() -> None:
    """Each but the first of a run has one parent, whose whole blocks begin its own prompt."""
    trace = preble("embodied", 500, 2.0, rng=np.random.default_rng(3), block_tokens=16)
    above = parents(trace)
    runs = above.count([])
    assert len(trace.after) == 500 - runs
    assert 8 <= runs <= 13  # of 48 steps
    for request, waits_for in enumerate(above):
        for parent in waits_for:
            whole = int(trace.input_tokens[parent]) // 16
            assert prompt(trace, request)[:whole] == prompt(trace, parent)[:whole]
            assert trace.input_tokens[request] > trace.input_tokens[parent] + trace.output_tokens[parent]
            assert trace.arrival_s[request] >= trace.arrival_s[parent]


@pytest.mark.parametrize(("branches", "requests"), [(2, 30), (4, 340)])
def test_trees_of_thoughts_have_the_published_size(branches: int, requests: int) -> None:
    """2 + 4 + 8 + 16 and 4 + 16 + 64 + 256; all but the first level wait for one thought each."""
    trace = tree_of_thoughts(3, 1.0, branches=branches, rng=np.random.default_rng(0))
    assert len(trace) == 3 * requests
    assert sorted(map(len, parents(trace))) == [0] * 3 * branches + [1] * 3 * (requests - branches)


def test_siblings_have_one_prompt_and_children_append_the_thought() -> None:
    """Input of a thought: its parent's input and output."""
    trace = tree_of_thoughts(2, 1.0, branches=3, rng=np.random.default_rng(0))
    for request, waits_for in enumerate(parents(trace)):
        for parent in waits_for:
            assert trace.input_tokens[request] == trace.input_tokens[parent] + trace.output_tokens[parent]
    children = [r for r, waits_for in enumerate(parents(trace)) if waits_for == [0]]
    assert len(children) == 3
    assert len({tuple(prompt(trace, child)) for child in children}) == 1


def test_a_judge_names_dimensions_then_judges_them_then_sums_up() -> None:
    """16 dimensions: 1 + 16 + 1 requests; 16 wait for the first, the last for 16."""
    trace = judges(1, 1.0, dimensions=16, rng=np.random.default_rng(0))
    above = parents(trace)
    assert above == [[], *[[0]] * 16, list(range(1, 17))]
    assert trace.input_tokens[17] > trace.output_tokens[1:17].sum()


def test_merged_tenants_share_nothing_and_keep_their_edges() -> None:
    """Two tenants with the same traffic: every count doubles, and waits stay within a tenant."""
    one = tree_of_thoughts(4, 1.0, rng=np.random.default_rng(0))
    both = merged({"good": one, "bad": one})
    assert both.tenants == ("good", "bad")
    assert len(both.after) == 2 * len(one.after)
    assert (both.tenant[both.after[:, 0]] == both.tenant[both.after[:, 1]]).all()
    alone, together = summarise_prefixes(one), summarise_prefixes(both)
    assert (together.nodes, together.roots) == (2 * alone.nodes, 2 * alone.roots)
    assert together.infinite_hit_frac == pytest.approx(alone.infinite_hit_frac)


@pytest.mark.parametrize("seed", range(10))
def test_blocks_are_shared_exactly_where_the_text_is(seed: int) -> None:
    """Against prompts written out token by token, with texts shorter than a block and part-filled blocks."""
    rng = np.random.default_rng(seed)
    texts = _Texts()
    made: list[list[tuple[int, int]]] = []
    for number in range(12):
        above = int(rng.integers(-1, number))
        tokens = int(rng.integers(1, 12))
        texts.add(np.array([above]), np.array([tokens]))
        made.append((made[above] if above >= 0 else []) + [(number, k) for k in range(tokens)])
    end = rng.integers(0, 12, 20)
    trace = texts.trace("t", np.arange(20.0), end, np.ones(20, np.int64), 4, "")
    for i in range(20):
        for j in range(20):
            for k, (a, b) in enumerate(zip(prompt(trace, i), prompt(trace, j), strict=False)):
                ours, theirs = made[end[i]][: 4 * k + 4], made[end[j]][: 4 * k + 4]
                assert (a == b) == (ours == theirs)


def test_documents_may_be_as_popular_as_zipf_says() -> None:
    """1.1 over 100 tools: the first has 1 / sum k^-1.1 = 23 % of the requests, Gamma sizes far less."""
    trace = preble("toolbench", 3900, 10.0, rng=np.random.default_rng(0), zipf=1.1)
    system = 165 // 16 + 1  # blocks; what follows tells the tools apart
    tool = [prompt(trace, i)[system] for i in range(len(trace)) if trace.input_tokens[i] > 16 * (system + 2)]
    share = np.bincount(np.unique(tool, return_inverse=True)[1]).max() / len(tool)
    assert share == pytest.approx(1 / (np.arange(1.0, 101) ** -1.1).sum(), abs=0.05)
    with pytest.raises(InputError, match="has no documents"):
        preble("embodied", 10, 1.0, rng=np.random.default_rng(0), zipf=1.1)


def test_equal_seeds_give_equal_traffic() -> None:
    first, second = (preble("toolbench", 300, 5.0, rng=np.random.default_rng(7)) for _ in range(2))
    assert (first.prefix_ids == second.prefix_ids).all()
    assert (first.arrival_s == second.arrival_s).all()


def test_nonsense_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="expected one of toolbench, embodied"):
        preble("chat", 10, 1.0, rng=rng)
    with pytest.raises(InputError, match="expected requests, rate and block > 0, found 0"):
        preble("loogle", 0, 1.0, rng=rng)
    with pytest.raises(InputError, match="1 trees of 0 branches"):
        tree_of_thoughts(1, 1.0, branches=0, rng=rng)
    with pytest.raises(InputError, match="0 articles in 2 dimensions"):
        judges(0, 1.0, rng=rng)
    with pytest.raises(InputError, match="expected a number of requests/s > 0, found 0"):
        judges(1, 0.0, rng=rng)
    with pytest.raises(InputError, match="expected at least one"):
        merged({})
