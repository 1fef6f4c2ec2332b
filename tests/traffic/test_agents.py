"""Agents drawn from a description: how many, how long, who waits for whom, what they share."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import yaml

from planner.errors import InputError
from planner.traffic.agents import Agents, Pause, SubAgents, draw_agents
from planner.traffic.described import Description, draw_requests
from planner.traffic.lengths import Fixed, Lognormal
from planner.traffic.sessions import session_numbers
from planner.traffic.tasks import tasks_of
from planner.traffic.trace import Trace

AGENTS = Agents(
    count=60,
    turns=6.0,
    tasks=3.0,
    tool=Pause(4.0, 1.0),
    idle=Pause(20.0),
    system_tokens=3200,
    repository_tokens=1600,
    repositories=5,
    skew=0.5,
    start=Fixed(2000),
    sub_agents=SubAgents(per_task=0.6, at_once=2, turns=2.0),
    most_tokens=60_000,
)
LENGTHS = Lognormal(1500, 0.5), Lognormal(300, 0.5)


def drawn(agents: Agents = AGENTS, duration_s: float = 2000.0, seed: int = 0) -> Trace:
    return draw_agents(agents, LENGTHS, duration_s, seed=seed, name="agents")


def test_every_agent_is_one_chain_of_waits() -> None:
    """So that never more of them are at work than there are."""
    trace = drawn()
    assert len(np.unique(session_numbers(trace))) == 60


def test_means_are_those_of_the_description() -> None:
    trace = drawn(replace(AGENTS, count=300, most_tokens=10**7))
    tasks = tasks_of(trace)
    assert tasks is not None
    assert len(trace) / len(tasks.last) == pytest.approx(AGENTS.task_requests(), rel=0.05)
    pauses_s = trace.think_s[tasks.tools_s > 0]
    assert pauses_s.mean() == pytest.approx(4.0, rel=0.05)
    assert trace.output_tokens.mean() == pytest.approx(300, rel=0.03)


def test_as_many_sub_agents_as_described_where_many_tasks_have_one_turn() -> None:
    """A task of one turn sends nobody out, and a turn drawn twice sent them out once: 0.7 of 4 in a task."""
    sub_agents = SubAgents(per_task=4.0, at_once=2, turns=2.0)
    agents = replace(AGENTS, count=300, turns=1.5, sub_agents=sub_agents, most_tokens=10**7)
    trace = drawn(agents)
    tasks = tasks_of(trace)
    assert tasks is not None
    assert len(trace) / len(tasks.last) == pytest.approx(1.5 + 8.0, rel=0.05)


def test_a_turn_waits_for_all_sub_agents() -> None:
    trace = drawn()
    parents = np.bincount(trace.after[:, 0])
    assert set(parents[parents > 1].tolist()) <= {2, 4, 6}  # Once, twice or three times `at_once`.
    child = int(np.flatnonzero(parents == 2)[0])
    waited = trace.after[trace.after[:, 0] == child, 1]
    tasks = tasks_of(trace)
    assert tasks is not None and len(set(tasks.number[[child, *waited]].tolist())) == 1


def test_prompts_begin_with_what_was_said_before() -> None:
    """A turn that waits for one other has all full blocks of that prompt, or begins with the shared ones."""
    trace = drawn(replace(AGENTS, sub_agents=None))
    shared = (AGENTS.system_tokens + AGENTS.repository_tokens) // trace.prefix_block_tokens
    prompts = np.split(trace.prefix_ids, trace.prefix_offsets[1:-1])
    system = AGENTS.system_tokens // trace.prefix_block_tokens
    assert len({tuple(prompt[:system]) for prompt in prompts}) == 1
    assert 1 < len({tuple(prompt[:shared]) for prompt in prompts}) <= 5
    same = 0
    for child, parent in trace.after.tolist():
        before, now = prompts[parent], prompts[child]
        is_same = len(now) >= len(before) and (now[: len(before)] == before).all()
        assert is_same or now[shared] != before[shared]
        same += is_same
    assert same > 0.8 * len(trace.after)


def test_a_session_goes_on_after_a_task_with_sub_agents() -> None:
    """The next task counted to the last sub-agent's session, and found none of its own context cached."""
    sub_agents = SubAgents(per_task=2.0)
    agents = Agents(count=4, turns=4.0, tasks=6.0, sub_agents=sub_agents, most_tokens=10**7)
    trace = drawn(agents)
    prompts = np.split(trace.prefix_ids, trace.prefix_offsets[1:-1])
    parents: dict[int, list[int]] = {}
    for child, parent in trace.after.tolist():
        parents.setdefault(child, []).append(parent)
    tasks = tasks_of(trace)
    assert tasks is not None
    after_tasks = [
        (child, waited[0])
        for child, waited in parents.items()
        if len(waited) == 1 and tasks.number[child] != tasks.number[waited[0]]
    ]
    goes_on = [
        len(prompts[child]) > len(prompts[parent])
        and (prompts[child][: len(prompts[parent])] == prompts[parent]).all()
        for child, parent in after_tasks
    ]
    assert np.mean(goes_on) == pytest.approx(1 - 1 / agents.tasks, abs=0.1)


def test_more_agents_are_the_same_and_others() -> None:
    few, many = drawn(replace(AGENTS, count=3)), drawn(replace(AGENTS, count=5))
    few_requests = {tuple(row) for row in np.stack([few.input_tokens, few.output_tokens], axis=1).tolist()}
    many_requests = {tuple(row) for row in np.stack([many.input_tokens, many.output_tokens], axis=1).tolist()}
    assert few_requests <= many_requests and len(many) > len(few)


def test_no_prompt_is_longer_than_the_context() -> None:
    trace = drawn(replace(AGENTS, most_tokens=8000))
    assert (trace.input_tokens + trace.output_tokens).max() <= 8000


def test_growth_is_of_the_number_of_agents() -> None:
    description = Description((1.0,), 1000.0, *LENGTHS, agents=AGENTS, growth=1.5)
    assert description.agent_count == 90
    assert len(np.unique(session_numbers(draw_requests(description, seed=1)))) == 90


def test_what_is_shared_must_have_room() -> None:
    """The error only said "or give system, repository", and slo.yaml names neither in its examples."""
    with pytest.raises(InputError, match="3200 \\+ 1600 tokens, and a context holds 4800") as caught:
        drawn(replace(AGENTS, most_tokens=4800))
    (written,) = re.findall(r"traffic: (\{agents: .*)$", str(caught.value))
    agents = yaml.safe_load(written)["agents"]
    assert agents["system"] + agents["repository"]["tokens"] < 4800
