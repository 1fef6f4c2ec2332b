"""Agents at work at the same time, on recorded sessions."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import InputError
from planner.traffic.recorded_agents import agents_at_once
from planner.traffic.sessions import session_numbers, waits_for_others
from planner.traffic.trace import Trace

# Three sessions: two turns, 20 s apart; one turn; three turns with an hour between the last two. The first
# two begin with block 0, all else is their own.
CORPUS = Trace(
    "corpus",
    np.array([0.0, 0.0, 0.0, 20.0, 20.0, 3620.0]),
    np.array([32, 32, 48, 48, 64, 80]),
    np.full(6, 50),
    prefix_offsets=np.array([0, 2, 4, 7, 10, 14, 19]),
    prefix_ids=np.array([0, 1, 0, 2, 3, 4, 5, 0, 1, 6, 3, 4, 5, 7, 3, 4, 5, 7, 8]),
    prefix_block_tokens=16,
    after=np.array([[3, 0], [4, 2], [5, 4]]),
    think_s=np.array([0.0, 0.0, 0.0, 20.0, 20.0, 3600.0]),
)


def drawn(agents: int, *, duration_s: float = 1000.0, longest_pause_s: float = 60.0, seed: int = 0) -> Trace:
    return agents_at_once(CORPUS, agents, duration_s=duration_s, longest_pause_s=longest_pause_s, seed=seed)


def test_each_agent_has_one_request_at_a_time() -> None:
    """Their requests hang together: one chain for each agent, in which every request waits for the last."""
    trace = drawn(7)
    assert len(np.unique(session_numbers(trace))) == 7
    assert int((~waits_for_others(trace)).sum()) == 7
    assert np.bincount(trace.after[:, 0]).max() == 1 and np.bincount(trace.after[:, 1]).max() == 1
    assert trace.think_s.max() == 60.0


def test_an_agent_works_for_the_duration() -> None:
    """At 20 ms a token: 50 tokens take a second. One more request may begin before the end."""
    trace = drawn(5, duration_s=500.0)
    for agent in range(5):
        own = session_numbers(trace) == agent
        worked_s = trace.think_s[own].sum() + own.sum() * 1.0
        assert 500.0 - 60.0 <= worked_s <= 501.0


def test_more_agents_leave_the_first_as_they_are() -> None:
    few, many = drawn(3), drawn(4)
    assert len(many) > len(few)
    assert {*zip(few.input_tokens.tolist(), few.think_s.tolist(), strict=True)} <= {
        *zip(many.input_tokens.tolist(), many.think_s.tolist(), strict=True)
    }
    assert not np.array_equal(drawn(3, seed=1).input_tokens, few.input_tokens)


def test_a_session_that_is_taken_twice_shares_what_sessions_share_alone() -> None:
    """Block 0 is in two sessions of the corpus, so all have the same; others are shared within a session."""
    trace = drawn(40)
    prompts = [
        tuple(trace.prefix_ids[trace.prefix_offsets[i] : trace.prefix_offsets[i + 1]].tolist())
        for i in range(len(trace))
    ]
    two_blocks = [prompt for prompt in prompts if len(prompt) == 2]
    assert len({prompt[0] for prompt in two_blocks}) == 1
    assert len({prompt[1] for prompt in two_blocks}) == len(two_blocks)
    by_first: dict[int, set[tuple[int, ...]]] = {}
    for prompt in prompts:
        if len(prompt) >= 3 and prompt[0] != two_blocks[0][0]:
            by_first.setdefault(prompt[0], set()).add(prompt[:3])
    assert all(len(begins) == 1 for begins in by_first.values())


def test_a_trace_without_sessions_has_no_agents() -> None:
    alone = CORPUS.select(np.array([0, 1, 2]))
    with pytest.raises(InputError, match="--agents: corpus has no sessions"):
        agents_at_once(alone, 3, duration_s=10.0, longest_pause_s=1.0)
