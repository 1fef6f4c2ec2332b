"""Recorded sessions of agents: AgentX (Weka) and agentic Mooncake, read as graphs of requests."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.errors import TraceError
from planner.traffic.logs.log_columns_map import parse_columns
from planner.traffic.logs.log_reading import LogOptions
from planner.traffic.scaling import same_requests
from planner.traffic.sessions import session_numbers
from planner.traffic.tasks import tasks_of
from planner.traffic.trace_reading import read_files, read_trace


def call(t: float, tokens: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 10, "hash_ids": ids, "api_time": 2.0, **more}


CONVERSATION: dict[str, Any] = {
    "id": "one",
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        call(0.0, 128, [1, 2]),
        {
            "type": "subagent",
            "t": 3.0,
            "agent_id": "a",
            "requests": [call(3.0, 64, [9]), call(6.0, 128, [9, 8])],
        },
        {"type": "subagent", "t": 3.0, "agent_id": "b", "requests": [call(3.5, 64, [7])]},
        call(10.0, 256, [1, 2, 3, 4], think_time=1.5),
        call(13.0, 300, [1, 2, 3, 4], input_types=["text"]),
    ],
}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_turn_waits_for_the_sub_agents_that_it_sent_out(tmp_path: Path) -> None:
    """Main at 0, a at 3 and 6, b at 3.5, main at 10 and 13; each takes 2 s. The last one begins a task."""
    trace = read_trace(written(tmp_path / "weka.jsonl", CONVERSATION))
    by_tokens = {int(tokens): i for i, tokens in enumerate(trace.input_tokens.tolist()) if tokens > 128}
    join, last = by_tokens[256], by_tokens[300]
    parents = trace.after[trace.after[:, 0] == join, 1]
    assert len(parents) == 3 and trace.think_s[join] == 1.5
    assert trace.think_s[last] == 1.0 and trace.after[trace.after[:, 0] == last, 1].tolist() == [join]
    assert len(np.unique(session_numbers(trace))) == 1
    tasks = tasks_of(trace)
    assert tasks is not None and len(tasks.last) == 2
    assert trace.prefix_block_tokens == 64 and len(trace.prefix_ids) == 14


def test_ids_of_two_conversations_are_their_own(tmp_path: Path) -> None:
    """Unless the file says that they are of one scope."""
    for scope, count in (("local", 14), ("global", 7)):
        one = CONVERSATION | {"hash_id_scope": scope}
        trace = read_trace(written(tmp_path / "weka.jsonl", one, one))
        assert len(np.unique(trace.prefix_ids)) == count
        assert len(np.unique(session_numbers(trace))) == 2


def test_agentic_mooncake_says_what_turns_add(tmp_path: Path) -> None:
    """1,536 tokens, then 320 + 768 more: the second prompt begins with the first and has 2,624."""
    rows = [
        {
            "session_id": "s",
            "input_length": 1536,
            "output_length": 320,
            "hash_ids": [0, 1, 2],
            "timestamp": 0.0,
        },
        {"session_id": "s", "input_length": 768, "output_length": 180, "hash_ids": [50, 51], "delay": 2450.0},
    ]
    trace = read_trace(written(tmp_path / "mooncake.jsonl", *rows))
    assert trace.input_tokens.tolist() == [1536, 2624] and trace.think_s.tolist() == [0.0, 2.45]
    first, second = np.split(trace.prefix_ids, trace.prefix_offsets[1:-1])
    assert (second[: len(first)] == first).all() and len(second) == 5
    assert trace.after.tolist() == [[1, 0]]


def turn(text: str, said: int = 32, **more: Any) -> dict[str, Any]:
    return {"text": text, "output_length": said, **more}


def test_conversations_of_aiperf(tmp_path: Path) -> None:
    """A system prompt of 64 tokens, questions of 16, answers of 32: a prompt holds all before it."""
    system, ask = {"role": "system", "text": "s" * 256}, "q" * 64
    rows: list[dict[str, Any]] = [
        {"session_id": "a", "turns": [system, turn(ask), turn(ask, delay=1500), turn(ask, 7, delay=0)]},
        {"session_id": "b", "turns": [system, {"texts": [ask[:31], ask[:32]], "output_length": 5}]},
        {"session_id": "b", "turns": [turn("z" * 61, timestamp=4000)]},
    ]
    trace = read_trace(written(tmp_path / "turns.jsonl", *rows))
    session = session_numbers(trace)
    assert trace.input_tokens[session == session[0]].tolist() == [80, 128, 176]
    assert trace.input_tokens[session != session[0]].tolist() == [80, 101]
    assert sorted(trace.output_tokens.tolist()) == [5, 7, 32, 32, 32]
    assert trace.arrival_s.tolist() == [0.0, 0.0, 1.5, 1.5, 4.0] and sorted(trace.think_s) == [
        0,
        0,
        0,
        0,
        1.5,
    ]
    prompts = np.split(trace.prefix_ids, trace.prefix_offsets[1:-1])
    first, second, third = (prompts[i] for i in np.flatnonzero(session == session[0]))
    assert len(third) == 11 and (third[:8] == second).all() and (second[:5] == first).all()
    other = prompts[int(np.flatnonzero(session != session[0])[0])]
    assert (other[:4] == first[:4]).all() and other[4] != first[
        4
    ]  # the system prompt is one, questions differ
    assert trace.prefix_block_tokens == 16 and "estimated" in trace.warnings[0]


def test_a_conversation_may_have_the_number_0(tmp_path: Path) -> None:
    """Its two lines were read as a conversation each: the second prompt was 16 tokens, not 16 + 32 + 16."""
    rows = [{"session_id": 0, "turns": [turn("q" * 64)]}, {"session_id": 0, "turns": [turn("q" * 64)]}]
    trace = read_trace(written(tmp_path / "turns.jsonl", *rows))
    assert sorted(trace.input_tokens.tolist()) == [16, 64]


def test_answers_of_two_conversations_are_not_shared(tmp_path: Path) -> None:
    """Both ask the same; what is answered lies between."""
    rows = [{"turns": [turn("q" * 64), turn("q" * 64)]}] * 2
    trace = read_trace(written(tmp_path / "turns.jsonl", *rows))
    prompts = np.split(trace.prefix_ids, trace.prefix_offsets[1:-1])
    assert [len(set(prompts[i]) & set(prompts[j])) for i, j in ((0, 1), (2, 3), (0, 2))] == [1, 1, 1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"text": "how?"}, r"line 1: turns\[1\]: no output_length"),
        ({"image": "a.png", "output_length": 3}, "image: how many tokens it has is unknown"),
        ({"text": 3, "output_length": 3}, "expected text"),
        (turn("how?", delay=-1), "delay: expected a number >= 0"),
    ],
)
def test_turns_that_cannot_be_read(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path / "turns.jsonl", {"turns": [turn("what?"), bad]}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (CONVERSATION | {"requests": [call(0.0, 64, [1]), 3]}, r"line 1: requests\[1\]: expected an object"),
        (CONVERSATION | {"requests": [call(-1.0, 64, [1])]}, "t: expected a number >= 0"),
        (CONVERSATION | {"requests": [call(0.0, 64, ["x"])]}, "hash_ids: expected a list of whole numbers"),  # type: ignore[list-item]
        (CONVERSATION | {"requests": [call(0.0, 0, [])]}, "holds no request with tokens"),
        (CONVERSATION | {"block_size": 0}, "block_size: expected a whole number >= 1"),
        (
            CONVERSATION | {"requests": [call(0.0, 64, [1]), {"t": 3.0, "requests": [{"t": "soon"}]}]},
            "t: expected a number >= 0, found 'soon'",
        ),
        (
            {"session_id": "a", "input_length": 9, "output_length": 9, "delay": 0, "hash_ids": [[1]]},
            "hash_ids: expected a list of whole numbers",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path / "weka.jsonl", row))


def test_a_corpus_is_a_folder_with_a_file_for_each_conversation(tmp_path: Path) -> None:
    """As one file of a line for each, also where a file is one object over many lines, and where the pause of
    a first request is null.
    """
    first = CONVERSATION["requests"][0] | {"think_time": None}
    one = CONVERSATION | {"requests": [first, *CONVERSATION["requests"][1:]]}
    in_one = read_trace(written(tmp_path / "weka.jsonl", one, one))
    folder = tmp_path / "corpus"
    folder.mkdir()
    written(folder / "a.json", one)
    (folder / "b.json").write_text(json.dumps(one, indent=2))
    (folder / "README.md").write_text("captured on a Friday")
    trace = read_trace(folder)
    assert trace.name == "corpus" and same_requests(trace, in_one)
    assert np.array_equal(trace.prefix_ids, in_one.prefix_ids)
    assert len(np.unique(session_numbers(trace))) == 2


def test_a_corpus_may_have_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """40 files and at most 16 open ones, for sessions and for a server's logs of one clock."""
    for number in range(40):
        written(tmp_path / f"{number}.json", CONVERSATION)
        (tmp_path / f"{number}.log").write_text(f"when,in,out\n{1_790_000_000 + number},100,10\n")
    columns = LogOptions(parse_columns("arrival=when,input=in,output=out"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The next 16 numbers that open files may get; between them there may be some in use.
    free = [os.dup(0) for _ in range(16)]
    for number in free:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1, limits[1]))
    try:
        sessions = read_trace(tmp_path)
        logs = read_files(sorted(tmp_path.glob("*.log")), log_options=columns).trace
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(np.unique(session_numbers(sessions))) == 40 and len(logs) == 40


def test_a_capture_that_calls_all_texts_has_a_task_for_each_session(tmp_path: Path) -> None:
    all_texts = [call(10.0 * i, 64 * (i + 1), [*range(i + 1)], input_types=["text"]) for i in range(4)]
    tasks = tasks_of(read_trace(written(tmp_path / "weka.json", CONVERSATION | {"requests": all_texts})))
    assert tasks is not None and len(tasks.last) == 1


def test_a_folder_holds_files_of_one_kind(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"is a directory without a file in \.json or \.jsonl"):
        read_trace(tmp_path)
    written(tmp_path / "a.json", CONVERSATION)
    (tmp_path / "b.json").write_text('{"requests": [\n')
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "certificate.json").write_text("{}")
    with pytest.raises(TraceError, match=r"plan: is a directory, and certificate\.json in it is no file of"):
        read_trace(tmp_path / "plan")
    with pytest.raises(TraceError, match=r"b\.json: holds no sessions of agents as a\.json does \(weka\)"):
        read_trace(tmp_path)
