"""Another day of the same traffic: what a redraw keeps of a trace, and what it draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.generated_traffic import lognormal, synthesise
from planner.traffic.redraw import BLOCKS, block_s, redraw_trace
from planner.traffic.scaling import rescale_trace, with_times_the_traffic
from planner.traffic.sessions import begin_together, session_numbers
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

SAMPLES = Path(__file__).parents[2] / "examples" / "traces"


def a_trace(requests: int = 3000, rate_rps: float = 5.0) -> Trace:
    return synthesise(
        requests,
        rate_rps,
        input_tokens=lognormal(1200, 1.0),
        output_tokens=lognormal(120, 1.0),
        gap_cv=2.0,
        rng=np.random.default_rng(3),
    )


def draws(trace: Trace, count: int = 60) -> list[Trace]:
    return [redraw_trace(trace, np.random.default_rng(seed)) for seed in range(count)]


def test_redraws_have_the_trace_s_requests_on_average_and_vary() -> None:
    trace = a_trace()
    counts = np.array([len(draw) for draw in draws(trace)])
    assert counts.mean() == pytest.approx(len(trace), rel=0.02)
    assert 0 < counts.std() < 0.1 * len(trace)
    assert len({float(draw.arrival_s.sum()) for draw in draws(trace, 10)}) == 10


def test_lengths_stay_together_and_each_is_of_the_trace() -> None:
    trace = a_trace()
    known = set(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
    draw = draws(trace, 1)[0]
    assert set(zip(draw.input_tokens.tolist(), draw.output_tokens.tolist(), strict=True)) <= known


def test_the_course_of_the_rate_stays() -> None:
    """A trace whose second half has three times the requests of the first keeps that, and its bursts."""
    rng = np.random.default_rng(0)
    arrival_s = np.sort(np.concatenate([rng.uniform(0, 1800, 1000), rng.uniform(1800, 3600, 3000)]))
    trace = Trace("two.csv", arrival_s - arrival_s[0], np.full(4000, 10), np.full(4000, 5))
    for draw in draws(trace, 20):
        late = (draw.arrival_s > 1800 + 3600 / 8).sum() / (draw.arrival_s < 1800 - 3600 / 8).sum()
        assert late == pytest.approx(3.0, rel=0.15)


def test_bursts_shorter_than_a_block_stay_whole() -> None:
    """Ten requests at once every minute: no other gaps appear but at the seams of blocks."""
    arrival_s = np.repeat(np.arange(60) * 60.0, 10)
    trace = Trace("bursts.csv", arrival_s, np.full(600, 10), np.full(600, 5))
    for draw in draws(trace, 10):
        sizes = np.unique(draw.arrival_s, return_counts=True)[1]
        assert (sizes % 10 == 0).all()


def test_sessions_stay_whole() -> None:
    trace = read_trace(SAMPLES / "chat-sessions-sample.csv", seed=0)
    sizes = set(np.bincount(session_numbers(trace)).tolist())
    for draw in draws(trace, 5):
        assert set(np.bincount(session_numbers(draw)).tolist()) <= sizes


def test_sessions_that_a_recording_begins_with_are_as_many_in_redraws() -> None:
    """62 of the sample's 215 sessions begin in its first eighth: drawn from far, the rate fell by 13 %."""
    trace = read_trace(SAMPLES / "chat-sessions-sample.csv", seed=0)
    redraws = draws(trace, 60)
    assert np.mean([draw.rate_rps for draw in redraws]) == pytest.approx(trace.rate_rps, rel=0.04)
    assert np.mean([len(draw) for draw in redraws]) == pytest.approx(len(trace), rel=0.04)
    assert np.std([len(draw) for draw in redraws]) > 0.04 * len(trace)


def test_a_session_drawn_twice_is_two_users() -> None:
    """Blocks that only one session has are told apart in its copies; those that several have are not."""
    rows = 200
    after = np.array([[2 * i + 1, 2 * i] for i in range(rows)])
    offsets = 2 * np.arange(2 * rows + 1)
    own = np.repeat(np.arange(rows), 2) + 1
    ids = np.column_stack([np.zeros(2 * rows, int), own]).ravel()
    arrival_s = np.repeat(np.arange(rows) * 10.0, 2)
    trace = Trace(
        "sessions.jsonl",
        arrival_s,
        np.full(2 * rows, 32),
        np.full(2 * rows, 5),
        prefix_offsets=offsets,
        prefix_ids=ids,
        prefix_block_tokens=16,
        after=after,
    )
    draw = draws(trace, 1)[0]
    shared, private = draw.prefix_ids[::2], draw.prefix_ids[1::2]
    assert len(np.unique(shared)) == 1
    assert len(np.unique(private)) == len(np.unique(session_numbers(draw)))


def agents_with_own_clocks(agents: int = 40, turns: int = 30) -> Trace:
    """Recorded agents: each begins at 0, and its turns come 60 s after one another; agent k has k more."""
    counts = turns + np.arange(agents)
    turn = np.concatenate([np.arange(count) for count in counts])
    agent = np.repeat(np.arange(agents), counts)
    order = np.argsort(turn, kind="stable")
    row_of = np.argsort(order)  # Where each turn is in the trace.
    waits = np.flatnonzero(turn > 0)
    after = np.column_stack([row_of[waits], row_of[waits - 1]])
    return Trace(
        "agents.jsonl",
        60.0 * turn[order],
        100 + agent[order],
        np.full(len(turn), 5),
        after=after[np.argsort(after[:, 1], kind="stable")],
        think_s=np.where(turn[order] > 0, 60.0, 0.0),
    )


def test_agents_that_begin_together_are_drawn_by_the_session() -> None:
    """Blocks near their places had 4 % of such requests: nobody begins after the trace's first moment."""
    trace = agents_with_own_clocks()
    counts = [len(draw) for draw in draws(trace, 40)]
    assert np.mean(counts) == pytest.approx(len(trace), rel=0.02) and np.std(counts) > 0
    for draw in draws(trace, 5):
        session = session_numbers(draw)
        assert session.max() + 1 == 40 and (draw.arrival_s == 0).sum() == 40
        sizes = np.bincount(session)
        assert set(sizes.tolist()) <= set(range(30, 70))
        # All turns of an agent have one length; an agent that is drawn twice is two sessions.
        assert all(len(set(draw.input_tokens[session == k].tolist())) == 1 for k in range(40))


def test_more_traffic_of_agents_is_more_agents_at_once() -> None:
    trace = agents_with_own_clocks()
    more = rescale_trace(trace, 1.5 * trace.rate_rps, rng=np.random.default_rng(0))
    assert len(more) == pytest.approx(1.5 * len(trace), rel=0.03)
    assert (more.arrival_s == 0).sum() == pytest.approx(60, abs=3)
    # So is the traffic of a fleet's headroom, in which a larger share has the agents of a smaller one.
    half, twice = (with_times_the_traffic(trace, factor) for factor in (0.5, 2.0))
    assert (half.arrival_s == 0).sum() == pytest.approx(20, abs=2) and len(twice) == 2 * len(trace)
    agents = [
        np.unique(with_times_the_traffic(trace, factor).input_tokens, return_counts=True)
        for factor in (1.1, 1.5)
    ]
    assert (agents[0][1] <= agents[1][1]).all() and agents[0][1].sum() < agents[1][1].sum()
    users = a_trace(50)
    assert with_times_the_traffic(users, 2.0).duration_s == pytest.approx(users.duration_s / 2)


def test_users_who_come_and_go_do_not_begin_together() -> None:
    trace = read_trace(SAMPLES / "chat-sessions-sample.csv", seed=0)
    assert not begin_together(trace) and not begin_together(a_trace(50))
    assert begin_together(agents_with_own_clocks())


def test_blocks_are_a_share_of_the_trace_within_bounds() -> None:
    assert block_s(a_trace(3000, 3000 / 3600)) == pytest.approx(3600 / BLOCKS, rel=0.05)
    assert block_s(a_trace(300, 5.0)) == pytest.approx(15.0, rel=0.3)


def test_a_redraw_of_a_few_bursts_has_requests() -> None:
    """Five requests at 0, 100 and 200 s: blocks of 20 s, each from within 25 s, may miss all three bursts."""
    arrival_s = np.concatenate([np.linspace(start_s, start_s + 0.5, 5) for start_s in (0.0, 100.0, 200.0)])
    trace = Trace("bursts.csv", arrival_s, np.full(15, 10), np.full(15, 5))
    assert all(draw.duration_s > 0 for draw in draws(trace, 200))
