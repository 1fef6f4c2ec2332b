"""Sessions of agents as traces: AgentX (Weka captures), agentic Mooncake and aiperf's conversations.

    weka        one JSON object for each conversation: `requests` of `t` [s], `in`, `out`, `hash_ids` in
                blocks of `block_size`, `api_time` [s], `think_time` [s]; entries of `type: subagent` have
                requests of their own (semianalysisai/cc-traces-weka-*, read by aiperf)
    mooncake    JSON lines by session: `session_id`, `input_length` of what a turn adds, `output_length`,
                `hash_ids` of what it adds in blocks of 512, `delay` [ms] before it (aiperf synthesize
                agentic-code)
    turns       one JSON object for each conversation (aiperf's multi_turn): `session_id`, `turns` of `text`
                or `texts`, `output_length`, and `timestamp` or `delay` [ms] after the answer before. A prompt
                is the turn of role system, which must be text, and all earlier turns with their answers

Which request waits for which is derived from the times, if the file does not say it. A request waits for its
predecessor: the last request of its own agent that had ended when it began. For each sub-agent that this
agent started, it also waits for the last ended request that began no earlier than the predecessor. The first
request of a sub-agent waits for the last ended request of the agent that started it. The pause of a request
is the time from the end of all requests that it waits for to its own beginning. Requests of an agent that
overlap do not wait for each other. Each conversation has a clock of its own, which begins at 0, so as many
agents are at work as there are conversations. A corpus may have a file for each conversation.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from planner.errors import TraceError
from planner.files.document_values import show_value
from planner.traffic.trace import Trace, sort_waits

WEKA, MOONCAKE, TURNS = "weka", "agentic-mooncake", "aiperf-multi-turn"
MOONCAKE_BLOCK = 512  # Tokens of a block of `hash_ids` in agentic Mooncake.
TURNS_BLOCK = 16  # Tokens of a block where we cut texts ourselves: as large as the KV blocks of engines.
WEKA_BLOCK = 64  # Tokens of a block in captures that do not say it.
# Tokens of texts are estimated from bytes of UTF-8. For English, tokenizers are within a quarter of this.
BYTES_PER_TOKEN = 4
# A file that begins like this has a conversation on each line, which may be long (trace_reading.py).
LONG_LINES = (b'{"id"', b'{"requests"', b'{"models"', b'{"session_id"', b'{"turns"')
_MOONCAKE_KEYS = {"session_id", "input_length", "output_length"}
_TEXTS, _MEDIA = ("text", "texts"), ("image", "images", "audio", "audios", "video", "videos")
_TURN_CONTENT = {*_TEXTS, *_MEDIA}
_REQUEST_KEYS = ("timestamp", "delay", "output_length", "extra")  # A turn with one of these is a request.
_MOST_NUMBER = 1e12  # A larger number in a file is refused.


@dataclass(slots=True)
class _Call:
    """A request of a conversation.

    `thread` names its agent: "" is the main one, "/a/b" the sub-agent b of a. `think_s` is the pause before
    the request, None if `_link` must compute it from the times. The request never starts before
    `not_before_s`. `begins_task`: a user sent it, not a tool. `_link` sets `parents`, the requests for which
    it waits, as indices into all calls of the file, and the number of its `task`.
    """

    thread: str
    start_s: float
    end_s: float
    input_tokens: int
    output_tokens: int
    ids: list[int]
    think_s: float | None = None
    not_before_s: float = 0.0
    begins_task: bool = False
    parents: list[int] = field(default_factory=list)
    task: int = 0


def kind_of(first: bytes, sample: Sequence[bytes]) -> str | None:
    """WEKA, TURNS or MOONCAKE; None for other files.

    `sample` are some lines, the first included: a file of MOONCAKE is recognised by a delay, which the first
    line may not have.
    """
    head = _object_of(first)
    turns = head.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], dict) and _TURN_CONTENT & set(turns[0]):
        return TURNS
    requests = head.get("requests")
    if isinstance(requests, list) and requests and isinstance(requests[0], dict):
        return WEKA if {"t", "in", "out"} <= set(requests[0]) or "requests" in requests[0] else None
    rows = [_object_of(line) for line in sample]
    has_keys = _MOONCAKE_KEYS <= set(head)
    return MOONCAKE if has_keys and any("delay" in row for row in rows) else None


def _object_of(line: bytes) -> Mapping[str, Any]:
    """The JSON object of a line; an empty one if the line is no JSON object or is nested too deep."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def read_agent_files(kind: str, name: str, lines: Iterable[tuple[str, bytes]]) -> Trace:
    """The trace, called `name`, of files of one kind (WEKA, MOONCAKE or TURNS). Each of the `lines` comes
    with its place, which is file and line number. Raises TraceError naming the place of what cannot be read.
    """
    read_conversations = {WEKA: _weka, MOONCAKE: _mooncake, TURNS: _turns}[kind]
    conversations = read_conversations((where, line) for where, line in lines if line.strip())
    calls: list[_Call] = []
    tasks = count = block_tokens = 0
    for conversation, tokens in conversations:
        block_tokens = tokens  # Blocks of all conversations have the same size.
        tasks = _link(conversation, first=len(calls), tasks=tasks)
        calls += conversation
        count += 1
    if not calls:
        raise TraceError(f"{name}: holds no request with tokens")
    return _to_trace(name, kind, calls, count, block_tokens)


def _weka(lines: Iterable[tuple[str, bytes]]) -> Iterator[tuple[list[_Call], int]]:
    """The calls of each conversation, and the tokens of a block, from Weka captures."""
    # The same hash id means the same block only within a line, unless its scope is global. `id_of` numbers
    # the pairs (scope, id) for the trace.
    id_of: dict[tuple[object, int], int] = {}
    sizes = set()
    for where, line in lines:
        row = _object_of(line)
        if not isinstance(row.get("requests"), list):
            raise TraceError(f"{where}: expected an object with a list of requests, found {show_value(row)}")
        size = _read_number(row, "block_size", where, default=WEKA_BLOCK)
        if size < 1 or size % 1:
            raise TraceError(f"{where}: block_size: expected a whole number >= 1, found {show_value(size)}")
        sizes.add(size)
        if len(sizes) > 1:
            raise TraceError(
                f"{where}: block_size differs from conversation to conversation: {sorted(sizes)}"
            )
        scope = "all" if row.get("hash_id_scope") == "global" else where
        calls = list(_weka_calls(row["requests"], "", 0.0, where))
        main_calls = [call for call in calls if not call.thread]
        # If all requests look like a user's, the file does not tell results of tools from texts of users.
        if all(call.begins_task for call in main_calls):
            for call in main_calls:
                call.begins_task = False
        for call in calls:
            call.ids = [id_of.setdefault((scope, hash_id), len(id_of)) for hash_id in call.ids]
        if calls:
            yield calls, int(size)


def _weka_calls(requests: list[Any], thread: str, since_s: float, where: str) -> Iterator[_Call]:
    """The calls of the agent `thread` and of its sub-agents. Times in `requests` count from `since_s`, on
    the conversation's clock. Raises TraceError, which begins with `where`.
    """
    for i, row in enumerate(requests):
        entry = f"{where}: requests[{i}]"
        if not isinstance(row, dict):
            raise TraceError(f"{entry}: expected an object, found {show_value(row)}")
        start_s = _read_number(row, "t", entry, default=0.0)
        if isinstance(row.get("requests"), list):
            sub_requests = row["requests"]
            times_s = [
                _read_number(request, "t", entry, default=0.0)
                for request in sub_requests
                if isinstance(request, dict)
            ]
            # Raw captures count the times of a sub-agent from its own entry on, other files from the start of
            # the conversation. Only in raw captures may a time be smaller than that of the entry.
            is_relative = bool(times_s) and min(times_s) < start_s
            name = f"{thread}/{row.get('agent_id', i)}"
            yield from _weka_calls(sub_requests, name, start_s if is_relative else 0.0, entry)
            continue
        input_tokens, output_tokens = (int(_read_number(row, key, entry)) for key in ("in", "out"))
        if input_tokens < 1 or output_tokens < 1:
            continue  # Requests that failed have no tokens.
        start_s += since_s
        ids = _read_ids(row, entry)
        kinds = row.get("input_types")
        yield _Call(
            thread=thread,
            start_s=start_s,
            end_s=start_s + _read_number(row, "api_time", entry, default=0.0),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            ids=ids,
            think_s=None if row.get("think_time") is None else _read_number(row, "think_time", entry),
            begins_task=not thread and isinstance(kinds, list) and "tool_result" not in kinds,
        )


def _mooncake(lines: Iterable[tuple[str, bytes]]) -> Iterator[tuple[list[_Call], int]]:
    """The calls of each session, and the tokens of a block, from agentic Mooncake.

    A line has what its turn adds; the prompt holds all turns before it and their answers too. There are no
    ids for blocks of answers, so they get ids here.
    """
    sessions: dict[str, list[_Call]] = {}
    id_of: dict[object, int] = {}
    for where, line in lines:
        row = _object_of(line)
        if not set(row) >= _MOONCAKE_KEYS:
            raise TraceError(
                f"{where}: expected {', '.join(sorted(_MOONCAKE_KEYS))}, found {show_value(row)}"
            )
        calls = sessions.setdefault(str(row["session_id"]), [])
        added_tokens, output_tokens = (
            int(_read_number(row, key, where)) for key in ("input_length", "output_length")
        )
        if added_tokens < 1 or output_tokens < 1:  # Requests that failed have no tokens.
            continue
        previous = calls[-1] if calls else None
        tokens_before = previous.input_tokens + previous.output_tokens if previous else 0
        tokens = added_tokens + tokens_before
        ids = list(previous.ids) if previous else []
        # The blocks of the last answer get ids by their session (`id(calls)`) and their place in the prompt.
        if previous:
            blocks_before = tokens_before // MOONCAKE_BLOCK
            ids += [id_of.setdefault((id(calls), k), len(id_of)) for k in range(len(ids), blocks_before)]
        ids += [id_of.setdefault(hash_id, len(id_of)) for hash_id in _read_ids(row, where)]
        delay_s = _read_number(row, "delay", where, default=0.0) / 1000
        # The file does not say how long answers took. So a request counts as ending when it starts, and a
        # turn starts a delay after the one before.
        start_s = (
            previous.end_s + delay_s
            if previous
            else _read_number(row, "timestamp", where, default=0.0) / 1000
        )
        ids = ids[: -(-tokens // MOONCAKE_BLOCK)]  # The file may list more ids than its prompt has blocks.
        think_s = delay_s if previous else None
        calls.append(_Call("", start_s, start_s, tokens, output_tokens, ids, think_s))
    for calls in sessions.values():
        if calls:
            yield calls, MOONCAKE_BLOCK


def _turns(lines: Iterable[tuple[str, bytes]]) -> Iterator[tuple[list[_Call], int]]:
    """The calls of each session, and the tokens of a block, from aiperf's conversations.

    Several lines may belong to one session. Two prompts share a block if all text up to its end is the same.
    """
    sessions: dict[object, list[_Call]] = {}
    id_of: dict[tuple[object, bytes], int] = {}
    texts: dict[object, bytes] = {}  # All text of each session so far, answers included.
    for where, line in lines:
        row = _object_of(line)
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns:
            raise TraceError(f"{where}: expected an object with a list of turns, found {show_value(row)}")
        session = row.get("session_id")
        if session is None or session == "":  # Without a name each line is a session.
            session = ("line", where)
        if isinstance(session, list | dict):
            raise TraceError(f"{where}: session_id: expected a text, found {show_value(session)}")
        calls = sessions.setdefault(session, [])
        for i, turn in enumerate(turns):
            entry = f"{where}: turns[{i}]"
            text = _turn_text(turn, entry)
            is_system = turn.get("role") == "system" and not any(turn.get(key) for key in _REQUEST_KEYS)
            # A system turn is no request, but the text with which the prompts of the session begin. If it is
            # the only turn, it is a request like any other.
            if is_system and session not in texts and (len(turns) > 1 or calls):
                texts[session] = text
                continue
            if turn.get("output_length") is None:
                raise TraceError(
                    f"{entry}: no output_length, so nobody knows how long the answer is; write it in each "
                    "turn"
                )
            # Engines give at least one token.
            output_tokens = max(int(_read_number(turn, "output_length", entry)), 1)
            texts[session] = texts.get(session, b"") + text
            calls.append(_turn_call(turn, entry, calls, texts[session], output_tokens, id_of))
            # The file has no answers. A hash of session and turn, repeated to the answer's length, stands for
            # each, so that no two answers share blocks.
            stand_in = blake2b(f"{session} {len(calls)}".encode(), digest_size=2 * BYTES_PER_TOKEN).digest()
            texts[session] += (stand_in * output_tokens)[: output_tokens * BYTES_PER_TOKEN]
    for calls in sessions.values():
        if calls:
            yield calls, TURNS_BLOCK


def _turn_call(
    turn: Mapping[str, Any],
    where: str,
    before: Sequence[_Call],
    prompt: bytes,
    output_tokens: int,
    id_of: dict[tuple[object, bytes], int],
) -> _Call:
    """The request of a turn; `prompt` is the text of its whole prompt, `before` are earlier calls of its
    session. The prompt begins with the blocks of the last one. `id_of` gets the ids of new blocks.
    """
    block_bytes = TURNS_BLOCK * BYTES_PER_TOKEN
    ids = list(before[-1].ids) if before else []
    # Only whole blocks have ids. The id of a block stands for that of the block before it and its own bytes.
    for start in range(len(ids) * block_bytes, len(prompt) - block_bytes + 1, block_bytes):
        key = (ids[-1] if ids else None, prompt[start : start + block_bytes])
        ids.append(id_of.setdefault(key, len(id_of)))
    stamp_s = _read_number(turn, "timestamp", where, default=0.0) / 1000
    delay_s = _read_number(turn, "delay", where, default=0.0) / 1000
    # The delay of a first turn counts from 0, since there is no answer before it.
    start_s = max(stamp_s, before[-1].end_s + delay_s) if before else max(stamp_s, delay_s)
    tokens = max(-(-len(prompt) // BYTES_PER_TOKEN), 1)
    think_s = delay_s if before else None
    # The file does not say how long answers took, so the request counts as ending when it starts.
    return _Call("", start_s, start_s, tokens, output_tokens, ids, think_s, not_before_s=stamp_s)


def _turn_text(turn: object, where: str) -> bytes:
    """All text of a turn. Raises TraceError for images or sound, whose tokens the file does not say."""
    if not isinstance(turn, dict):
        raise TraceError(f"{where}: expected an object, found {show_value(turn)}")
    if media := [key for key in _MEDIA if turn.get(key)]:
        raise TraceError(f"{where}: {media[0]}: how many tokens it has is unknown; give a trace with lengths")
    texts = turn.get("texts") or [turn.get("text")]
    contents: list[object] = []
    # A text is a string, or an object whose `contents` are a string or a list of strings.
    for text in texts if isinstance(texts, list) else [texts]:
        content = text.get("contents") if isinstance(text, dict) else [text]
        contents += content if isinstance(content, list) else [content]
    if not all(isinstance(each, str) for each in contents):
        raise TraceError(f"{where}: expected text, found {show_value(turn)}")
    return "\n".join(map(str, contents)).encode()


def _read_number(row: Mapping[str, Any], key: str, where: str, *, default: float | None = None) -> float:
    """The number >= 0 at a key. A missing key or null gives the `default`, and is refused without one."""
    value = row.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST_NUMBER:
        raise TraceError(f"{where}: {key}: expected a number >= 0, found {show_value(value)}")
    return float(value)


def _read_ids(row: Mapping[str, Any], where: str) -> list[int]:
    """The whole numbers at `hash_ids`; none where the key is missing or null."""
    ids = row.get("hash_ids") or []
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise TraceError(f"{where}: hash_ids: expected a list of whole numbers, found {show_value(ids)}")
    return ids


def _link(calls: list[_Call], *, first: int, tasks: int) -> int:
    """Sort the calls of a conversation by their start, and set for each which calls it waits for (indices
    into all calls of the file), its pause, and the number of its task. `first` is the index of the
    conversation's first call, `tasks` the number of its first task. Returns the number after its last task.
    """
    calls.sort(key=lambda call: call.start_s)
    has_main_call = False
    for i, call in enumerate(calls):
        ended = [k for k in range(i) if calls[k].end_s <= call.start_s]
        parents = [k for k in ended if calls[k].thread == call.thread][-1:]  # The last one, if there is any.
        if parents:
            # The last ended call of each sub-agent since then (later entries replace earlier ones).
            since_s = calls[parents[0]].start_s
            last_by_sub_agent = {
                calls[k].thread: k
                for k in ended
                if _starter_of(calls[k].thread) == call.thread and calls[k].start_s >= since_s
            }
            parents += last_by_sub_agent.values()
        elif call.thread:  # This is the first request of a sub-agent.
            parents = [k for k in ended if calls[k].thread == _starter_of(call.thread)][-1:]
        if call.think_s is None:
            ends_s = max((calls[k].end_s for k in parents), default=call.start_s)
            call.think_s = max(call.start_s - ends_s, 0.0)
        call.parents = [first + k for k in parents]
        if call.begins_task and has_main_call:
            tasks += 1
        has_main_call = has_main_call or not call.thread
        call.task = tasks
    return tasks + 1


def _starter_of(thread: str) -> str | None:
    """The thread of the agent that started this sub-agent; None for the main agent."""
    return thread.rpartition("/")[0] if thread else None


def _to_trace(name: str, kind: str, calls: list[_Call], conversations: int, block_tokens: int) -> Trace:
    """The calls as a trace, with arrivals as if answers took no time. In `calls` parents stand before the
    requests that wait for them.
    """
    arrivals_s: list[float] = []
    for call in calls:
        parents_s = max((arrivals_s[k] for k in call.parents), default=0.0)
        ready_s = parents_s + (call.think_s or 0.0) if call.parents else call.start_s
        arrivals_s.append(max(ready_s, call.not_before_s))
    arrival_s = np.array(arrivals_s)
    order = np.lexsort((np.arange(len(calls)), arrival_s))
    row_of = np.empty(len(calls), np.int64)  # The row of each call in the trace.
    row_of[order] = np.arange(len(calls))
    edges = np.array(
        [(row_of[i], row_of[k]) for i, call in enumerate(calls) for k in call.parents], np.int64
    ).reshape(-1, 2)
    # A file may list more ids than its prompt has blocks.
    prompts = [calls[i].ids[: -(-calls[i].input_tokens // block_tokens)] for i in order.tolist()]  # By row.
    offsets = np.concatenate(([0], np.cumsum([len(ids) for ids in prompts])))
    return Trace(
        name=name,
        arrival_s=arrival_s[order] - arrival_s[order[0]],
        input_tokens=np.array([calls[i].input_tokens for i in order.tolist()]),
        output_tokens=np.array([calls[i].output_tokens for i in order.tolist()]),
        prefix_offsets=offsets,
        prefix_ids=np.array([block_id for ids in prompts for block_id in ids], np.int64),
        prefix_block_tokens=block_tokens if offsets[-1] else 0,
        after=sort_waits(edges),
        # A request that waits for no other has no pause.
        think_s=np.array([(call.think_s or 0.0) if call.parents else 0.0 for call in calls])[order],
        task=np.array([call.task for call in calls])[order],
        notes=(
            f"{conversations} sessions of agents ({kind}), {len(calls)} requests; waits derived from "
            + ("who had ended" if kind == WEKA else "their order"),
        ),
        warnings=(
            f"{name}: prompts are texts, whose tokens are estimated, one for {BYTES_PER_TOKEN} bytes; "
            "answers are as long as output_length, the most that they may be",
        )
        if kind == TURNS
        else (),
    )
