"""`traffic: agents`: read, completed by a task, written, refused."""

from __future__ import annotations

from typing import Any

import pytest
from plans import CATALOG

from planner.documents.traffic_description import description_document, parse_description
from planner.errors import InputError
from planner.files.document_values import Section
from planner.traffic.agents import Agents, Pause
from planner.traffic.described import Description

OWN = {"input": 1500, "output": 300, "agents": {"count": 20, "turns": 4, "tool": "2 s"}}


def parsed(**traffic: Any) -> Description:
    description = parse_description(Section(traffic, "slo.yaml: traffic"), CATALOG.tasks)
    assert description is not None
    return description


def test_a_number_of_agents_takes_the_rest_from_the_task() -> None:
    agents = parsed(agents=500, task="coding-agent").agents
    assert agents is not None
    assert (agents.count, agents.turns, agents.system_tokens) == (500, 8.8, 32000)
    more = parsed(agents={"count": 5, "turns": 3}, task="coding-agent").agents
    assert more is not None and (more.turns, more.tasks) == (3.0, 9.2)


def test_agents_of_their_own() -> None:
    assert parsed(**OWN).agents == Agents(20, turns=4.0, tool=Pause(2.0))


def test_the_rate_is_that_of_agents_whose_tokens_take_20_ms() -> None:
    """4 turns of 300 tokens and 3 pauses of 2 s take 30 s: 20 agents have 80 requests in 30 s."""
    assert parsed(**OWN).mean_rps == pytest.approx(80 / 30)


@pytest.mark.parametrize("traffic", [OWN, {"agents": 7, "task": "coding-agent"}])
def test_what_is_written_reads_as_the_same(traffic: dict[str, Any]) -> None:
    description = parsed(**traffic)
    again = parsed(**description_document(description))
    assert again.agents == description.agents and again.duration_s == description.duration_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 3}, "rate: agents come when their last answer is there"),
        ({"sessions": {"turns": 2, "think_time": "1 s"}}, "drop sessions, or agents"),
        ({"agents": {"turns": 3}}, "expected how many work at once, such as agents: 500"),
        ({"agents": 0}, "agents: count: "),
        ({"agents": {"count": 5, "turns": 0.5}}, "agents: turns: "),
        ({"agents": {"count": 5, "tools": 1}}, "unknown key 'tools'"),
        ({"agents": {"count": 5, "sub_agents": {"at_once": 2}}}, "sub_agents: per_task is missing"),
        ({"agents": {"count": 5, "turns": 1, "sub_agents": {"per_task": 2}}}, "give turns above 1"),
        ({"agents": {"count": 5, "repository": {"tokens": 1.5}}}, "expected whole tokens"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parsed(**(OWN | change))
