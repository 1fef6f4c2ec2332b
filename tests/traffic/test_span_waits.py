"""Spans of agents: calls of a model wait for what their span tree and the clock say they waited for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from planner.traffic.sessions import arrivals_s, session_numbers
from planner.traffic.tasks import tasks_of
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

EPOCH_S = 1_795_304_860


def span(
    name: str, parent: str, start_s: float, end_s: float, tokens: int = 0, **more: Any
) -> dict[str, Any]:
    """A call of a model where it has tokens, else an agent or a tool."""
    given = {"gen_ai.operation.name": "chat" if tokens else "execute_tool", **more.pop("attributes", {})}
    if tokens:
        given |= {"gen_ai.usage.input_tokens": tokens, "gen_ai.usage.output_tokens": 10}
    attributes = [
        {"key": key, "value": {"intValue" if isinstance(value, int) else "stringValue": str(value)}}
        for key, value in given.items()
    ]
    times = {
        "startTimeUnixNano": str(int((EPOCH_S + start_s) * 1e9)),
        "endTimeUnixNano": str(int((EPOCH_S + end_s) * 1e9)),
    }
    return {"traceId": "t", "spanId": name, "parentSpanId": parent, "attributes": attributes, **times, **more}


def read(path: Path, *spans: dict[str, Any]) -> Trace:
    file = path / "spans.jsonl"
    document = {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}
    file.write_text(json.dumps(document) + "\n")
    return read_trace(file)


AGENT = [
    span("agent", "", 0, 20),
    span("c1", "agent", 0, 2, 100),
    span("t1", "agent", 2, 9),
    span("sub", "t1", 3, 9),
    span("a", "sub", 3.5, 5, 30),
    span("b", "sub", 6, 8.5, 40),
    span("t2", "agent", 2, 4),
    span("d", "t2", 2.5, 4, 50),
    span("c2", "agent", 10, 12, 200),
    span("c3", "agent", 12.5, 13, 300),
]


def parents_of(trace: Trace) -> dict[int, list[int]]:
    """By tokens of the prompt: of those waited for."""
    tokens = trace.input_tokens.tolist()
    found: dict[int, list[int]] = {each: [] for each in tokens}
    for child, parent in trace.after.tolist():
        found[tokens[child]].append(tokens[parent])
    return {each: sorted(parents) for each, parents in found.items()}


def test_calls_wait_for_their_agent_its_tools_and_sub_agents(tmp_path: Path) -> None:
    """c1, then two sub-agents at once, then c2 and c3; pauses are what tools took beyond the calls."""
    trace = read(tmp_path, *AGENT)
    assert parents_of(trace) == {100: [], 30: [100], 40: [30], 50: [100], 200: [40, 50], 300: [200]}
    pauses_s = dict(zip(trace.input_tokens.tolist(), trace.think_s.tolist(), strict=True))
    assert pauses_s == {100: 0.0, 30: 1.5, 40: 1.0, 50: 0.5, 200: 1.5, 300: 0.5}
    tasks = tasks_of(trace)
    assert tasks is not None and len(tasks.last) == 1


def test_on_a_fleet_a_call_comes_after_its_parent_and_the_tools(tmp_path: Path) -> None:
    """With the times that were recorded all arrive as recorded; where each takes 4 s more, all come later."""
    trace = read(tmp_path, *AGENT)
    took_s = {100: 2.0, 30: 1.5, 40: 2.5, 50: 1.5, 200: 2.0, 300: 0.5}
    recorded_s = {100: 0.0, 30: 3.5, 40: 6.0, 50: 2.5, 200: 10.0, 300: 12.5}
    tokens = trace.input_tokens.tolist()
    own_s = np.array([took_s[each] for each in tokens])
    at_s = arrivals_s(trace, own_s)
    assert dict(zip(tokens, np.round(at_s, 6).tolist(), strict=True)) == recorded_s
    at_s = arrivals_s(trace, own_s + 4.0)
    later_s = dict(zip(tokens, at_s, strict=True))
    assert later_s[200] == later_s[40] + took_s[40] + 4.0 + 1.5  # the tool's end, after the longer of both
    assert later_s[300] == later_s[200] + took_s[200] + 4.0 + 0.5


def test_calls_side_by_side_wait_for_none_of_each_other(tmp_path: Path) -> None:
    """Three at once after one, then one that waits for all three."""
    spans = [
        span("c1", "agent", 0, 1, 10),
        *(span(f"p{k}", "agent", 1.1, 2 + k, 20 + k) for k in range(3)),
        span("c2", "agent", 5, 6, 90),
    ]
    assert parents_of(read(tmp_path, *spans)) == {10: [], 20: [10], 21: [10], 22: [10], 90: [20, 21, 22]}


def test_a_failed_call_is_bridged(tmp_path: Path) -> None:
    spans = [
        span("c1", "agent", 0, 1, 10),
        span("c2", "agent", 2, 3, 20, status={"code": 2}),
        span("c3", "agent", 4, 5, 30),
        *(span(f"o{k}", "", 100 * k, 100 * k + 1, 40, traceId=f"o{k}") for k in range(1, 9)),
    ]
    trace = read(tmp_path, *spans)
    waits = trace.after.tolist()
    assert len(waits) == 1 and trace.think_s[waits[0][0]] == 3.0
    assert trace.dropped == {"failed requests": 1}


def test_traces_of_a_conversation_are_tasks_of_one_session(tmp_path: Path) -> None:
    """A person's pause of 30 s between two tasks; another conversation stands by itself."""
    mine = {"attributes": {"gen_ai.conversation.id": "mine"}}
    spans = [
        span("a1", "", 0, 1, 10, traceId="a", **mine),
        span("a2", "", 2, 3, 20, traceId="a"),
        span("b1", "", 33, 34, 30, traceId="b", **mine),
        span("x1", "", 5, 6, 40, traceId="x"),
    ]
    trace = read(tmp_path, *spans)
    assert parents_of(trace) == {10: [], 20: [10], 30: [20], 40: []}
    tasks = tasks_of(trace)
    assert tasks is not None and len(tasks.last) == 3 and len(np.unique(session_numbers(trace))) == 2
    assert 30.0 in trace.think_s.tolist()
