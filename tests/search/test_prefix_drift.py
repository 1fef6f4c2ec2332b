"""Scenarios in which other prefixes are popular: what moves, and what stays as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plans import CATALOG

import fleetplan
from planner.errors import InputError
from planner.search.prefixes.prefix_drift import begun_prefixes, drift_popularity
from planner.traffic.trace import Trace

BLOCK, OWN = 16, 1000


def tools(requests: int = 4000, *, wait: bool = False) -> Trace:
    """A system prompt of one block, then one of four tools' prompts of two, for 60, 20, 15 and 5 % of the
    requests, and a block of a request's own. Where they `wait`, each odd request follows the one before."""
    rng = np.random.default_rng(1)
    tool = rng.choice(4, requests, p=[0.6, 0.2, 0.15, 0.05])
    if wait:
        tool[1::2] = tool[::2]
    ids = np.column_stack((np.zeros_like(tool), 10 + 2 * tool, 11 + 2 * tool, OWN + np.arange(requests)))
    return Trace(
        "tools",
        np.linspace(0.0, 100.0, requests),
        np.full(requests, 4 * BLOCK),
        1 + tool,  # so that an answer says whose it is
        after=np.arange(requests).reshape(-1, 2)[:, ::-1] if wait else np.empty((0, 2), np.int64),
        prefix_offsets=4 * np.arange(requests + 1),
        prefix_ids=ids.ravel(),
        prefix_block_tokens=BLOCK,
    )


def shares(trace: Trace) -> np.ndarray:
    tool = (trace.prefix_ids[trace.prefix_offsets[:-1] + 1] - 10) // 2
    assert (trace.output_tokens == 1 + tool).all()
    return np.bincount(tool, minlength=4) / len(trace)


@pytest.mark.parametrize("wait", [False, True])
def test_so_much_of_the_popularity_goes_to_other_prefixes(wait: bool) -> None:
    """30 % of each tool's requests become another one's, all the same other one's: shares are .7 p + .3 p of
    a permutation. Arrivals stay, every request keeps a block of its own, and prefixes keep their ids."""
    trace = tools(wait=wait)
    drifted = drift_popularity(trace, 0.3, np.random.default_rng(5))
    before, after = shares(trace), shares(drifted)
    came = (after - 0.7 * before) / 0.3
    assert sorted(came) == pytest.approx(sorted(before), abs=0.06)
    assert np.abs(came - before).max() > 0.05
    assert drifted.arrival_s == pytest.approx(trace.arrival_s, abs=0.03)
    assert len(np.unique(drifted.prefix_ids[3::4])) == len(trace)
    assert set(drifted.prefix_ids.tolist()) >= {0, *range(10, 18)}
    assert len(drifted.after) == len(trace.after)


def test_nothing_moves_where_nothing_can() -> None:
    """No share, no time, or one prefix alone; the same draw is the same traffic."""
    trace = tools(400)
    assert drift_popularity(trace, 0.0, np.random.default_rng(0)) is trace
    one = replace(trace, prefix_ids=np.where(trace.prefix_ids < OWN, 0, trace.prefix_ids))
    assert drift_popularity(one, 0.3, np.random.default_rng(0)) is one
    assert len(np.unique(begun_prefixes(trace))) == 4
    first, again = (drift_popularity(trace, 0.3, np.random.default_rng(2)) for _ in range(2))
    assert (first.prefix_ids == again.prefix_ids).all()


@pytest.mark.parametrize(
    ("policies", "trace", "found"),
    [
        ({}, tools(400), "nothing depends on it without policies"),
        ({"prefix_cache": True}, tools(400).select(np.arange(3)), "fewer than two prefixes"),
    ],
)
def test_drift_without_prefixes_is_one_line(policies: dict[str, bool], trace: Trace, found: str) -> None:
    question = {
        "llm": "llama-3.1-8b",
        "slo": {"ttft": {"p90": "1 s"}},
        "fleet": {"gpus": ["l40s-48g"]},
        "policies": policies,
        "safety": {"prefix_drift": "30 %"},
    }
    with pytest.raises(InputError, match=f"safety: prefix_drift: .*{found}"):
        fleetplan.plan(question, trace, catalog=CATALOG)
