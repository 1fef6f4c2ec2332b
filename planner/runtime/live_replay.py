"""Sends a trace's requests to the router at the times of the trace, however slow the answers are (open loop).

A request may wait for earlier ones (the trace's column `after`: the turns of a session). It is sent `think_s`
after the last of the earlier ones was answered, but not before its time in the trace. If one of the earlier
ones does not finish, the waiting request is never sent, and its line in the journal says so.

Prompts are token ids, so no tokenizer is needed. If the plan has prefix caches, equal prefix blocks of the
trace become equal token ids; else each prompt is unique, so that no cache helps. Engines are told to make
every answer exactly as long as in the trace (ignore_eos).

The outcome of each request is a line of a journal, so that an interrupted run can be continued with the
requests that have no outcome. The time between two interruptions is a part of the run. If a request waits for
one of an earlier part, the earlier one counts as answered at the start of the new part.
"""

import asyncio
import heapq
import io
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp
import numpy as np
from aiohttp.http import HttpProcessingError

from planner.errors import InputError
from planner.runtime.launch import WORKER_HEADER
from planner.traffic.trace import Trace

Status = Literal["finished", "rejected", "failed", "unsent"]
# Prompts consist of token ids 3 to 999: every vocabulary has them, and 0 to 2 often mean something else.
FIRST_TOKEN_ID, TOKEN_IDS = 3, 997
LEAD_S = 1.0  # The time from the start of a replay to its first request, in which the first prompt is made.
TIMEOUT_S = 600.0  # A request without a complete answer after this time has failed.
PROGRESS_EVERY_S = 10.0  # A replay reports its progress this often.
READ_BUFFER_BYTES = 2**22  # Lines of a stream are long: its first event names every token of the prompt.
JOURNAL_FORMAT = 2  # The version of the journal; `JournalFile.read` refuses a journal of another version.
_MESSAGE_CHARACTERS = 200  # Error texts of a server or a library are cut to this length.
_DATA = b"data: "  # The beginning of a line of a stream that has an event.
_REMEMBERED_BLOCKS = 100_000  # `_block_tokens` keeps this many blocks in memory.


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The outcome of one request as the client saw it; times are seconds since its part of the run began.

    It was due at `due_s` and sent at `sent_s`; its answer ended or failed at `end_s`. `token_s` are the times
    when its output tokens arrived, `reason` says why it did not finish, and `workers` are the workers that
    served it (prefill, decode). A request is "unsent" if one that it waits for did not finish; all its times
    are then the time at which this became known. `input_tokens` is the server's count of the prompt's tokens,
    or 0 if the server did not say it.
    """

    request: int
    part: int
    due_s: float
    sent_s: float
    end_s: float
    status: Status
    reason: str
    workers: tuple[str, ...]
    token_s: tuple[float, ...]
    input_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplayPart:
    """One uninterrupted part of a run, with the `requests` in the order of their being sent or given up.

    The part started at `start_s` of CLOCK_MONOTONIC, which stands for `first_s` on the trace's clock.
    """

    part: int
    start_s: float
    requests: tuple[int, ...]
    first_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Journal:
    """The parts of a run so far, and its outcomes by the request's number in the trace."""

    parts: tuple[ReplayPart, ...]
    outcomes: dict[int, RequestOutcome]

    def missing(self, trace: Trace) -> list[int]:
        """Requests of the trace without an outcome."""
        return [i for i in range(len(trace)) if i not in self.outcomes]


class JournalFile:
    """The file journal.jsonl, in which a replay notes everything as it happens.

    Its first line identifies the run. The others say when a part started, which request was sent, what its
    outcome was, and what a part found at its end (a record).
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        """`run` identifies the run: a journal that begins with another one is refused when it is read."""
        self.path, self.run = path, {"journal": JOURNAL_FORMAT} | run

    def read(self) -> Journal:
        """Read the parts and outcomes. Raises InputError if the file belongs to another run."""
        starts: dict[int, tuple[float, float]] = {}
        sends: dict[int, list[int]] = {}
        outcomes: dict[int, RequestOutcome] = {}
        for row in self._rows():
            if "start_s" in row:
                starts[row["part"]], sends[row["part"]] = (row["start_s"], row["first_s"]), []
            elif "sends" in row:
                sends[row["part"]].append(row["sends"])
            elif "request" in row:
                row["workers"], row["token_s"] = tuple(row["workers"]), tuple(row["token_s"])
                outcomes[row["request"]] = RequestOutcome(**row)
                if row["status"] == "unsent":  # The request was given up, so no line says that it was sent.
                    sends[row["part"]].append(row["request"])
        parts = (
            ReplayPart(part, start_s, tuple(sends[part]), first_s)
            for part, (start_s, first_s) in starts.items()
        )
        return Journal(tuple(parts), outcomes)

    def rows(self, key: str) -> list[dict[str, Any]]:
        """The lines that have this key, in order."""
        return [row for row in self._rows() if key in row]

    def records(self) -> list[dict[str, Any]]:
        """The records that each part wrote at its end: events, engines, load of the machine."""
        return [row["record"] for row in self.rows("record")]

    def write(self, row: dict[str, Any]) -> None:
        """Add a row to the journal; the first row begins the file with the identity of the run."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"run": self.run}))
        with self.path.open("a") as stream:  # Begin a new line, because the last one may have been cut off.
            stream.write("\n" + json.dumps(row, separators=(",", ":")))

    def _rows(self) -> list[dict[str, Any]]:
        """All rows of JSON but the first, which must name this run; else InputError is raised."""
        if not self.path.exists():
            return []
        lines, rows = self.path.read_text(errors="replace").splitlines(), []
        for number, line in enumerate(lines, start=1):
            row: object = None
            with suppress(ValueError):  # A line may have been cut off when the run was interrupted.
                row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
            elif number == 1:
                raise InputError(
                    f"{self.path}: line 1 is {line[:40]!r}, expected the JSON that names the run; remove "
                    "the line if another wrote it there, or name another folder with -o"
                )
        if not rows or rows[0] != {"run": self.run}:
            raise InputError(
                f"{self.path}: belongs to another run (other plan, trace or options); name another folder "
                "with -o, or remove this one"
            )
        return rows[1:]


@dataclass(frozen=True, slots=True)
class Sending:
    """The settings with which one part of a run is sent.

    `part` is its number and `key` the API key. Prompts are made by `trace_prompt` with `shares_prefixes`,
    else by `unique_prompt`, in both cases with `seed`. `timeout_s` is the time limit of a request.
    """

    part: int = 0
    key: str | None = None
    seed: int = 0
    shares_prefixes: bool = False
    timeout_s: float = TIMEOUT_S


DEFAULT_SENDING = Sending()


class Sender(Protocol):
    """Sends single requests and reads their answers, for `send_at_times`."""

    def body(self, request: int) -> bytes:
        """The body to post for this request of the trace."""

    async def send(
        self, request: int, part: int, start_s: float, due_s: float, body: bytes
    ) -> RequestOutcome:
        """Send the request and read its answer to the end. A failure is returned as an outcome, not raised.

        `start_s` is the start of the part on CLOCK_MONOTONIC; `due_s`, when the request was due, counts from
        there.
        """

    def may_send(self, request: int) -> bool:
        """Whether to send this request, just before its time. Once the answer is False, no more are sent."""

    def note_end(self, outcome: RequestOutcome) -> None:
        """Take note of an outcome; an exception ends the replay."""


@dataclass(frozen=True, slots=True)
class _RouterSender:
    """The Sender for fleetplan's own router: prompts are token ids, answers have the trace's length."""

    trace: Trace
    client: aiohttp.ClientSession
    url: str
    model: str
    sending: Sending

    def body(self, request: int) -> bytes:
        """The HTTP body of request number `request` of the trace."""
        return request_body(self.trace, request, self.model, self.sending.seed, self.sending.shares_prefixes)

    async def send(
        self, request: int, part: int, start_s: float, due_s: float, body: bytes
    ) -> RequestOutcome:
        """Send a request to the router and wait for its last token."""
        expected = int(self.trace.output_tokens[request])
        return await send_to_router(self.client, self.url, body, request, part, start_s, due_s, expected)

    def may_send(self, request: int) -> bool:
        """Always true: the router has no budget of requests."""
        return True

    def note_end(self, outcome: RequestOutcome) -> None:
        """Do nothing: the journal has all that is needed of a request that ended."""


async def replay_trace(
    trace: Trace,
    requests: Sequence[int],
    url: str,
    model: str,
    journal: JournalFile,
    sending: Sending = DEFAULT_SENDING,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> list[RequestOutcome]:
    """Send these `requests` of the trace to our router, the first one LEAD_S from now.

    Returns the outcomes, in the order in which requests ended, when all have ended.
    """
    headers = {"Authorization": f"Bearer {sending.key}"} if sending.key else {}
    timeout = aiohttp.ClientTimeout(total=sending.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)  # 0: any number of connections, as no request may wait for one.
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, headers=headers, read_bufsize=READ_BUFFER_BYTES
    ) as client:
        sender = _RouterSender(trace, client, url, model, sending)
        return await send_at_times(trace, requests, sender, journal, part=sending.part, progress=progress)


async def send_at_times(
    trace: Trace,
    requests: Sequence[int],
    sender: Sender,
    journal: JournalFile,
    *,
    part: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[RequestOutcome]:
    """Send these requests at their times through `sender`, the first one LEAD_S from now.

    Once `may_send` has refused a request, no more are sent. Returns the outcomes, in the order in which
    requests ended, when all that were sent have ended. An exception of `sender` cancels what is running, and
    is raised.
    """
    start_s = time.monotonic() + LEAD_S
    first_s = float(trace.arrival_s[list(requests)].min()) if requests else 0.0
    agenda = _Agenda(trace, requests, journal.read().outcomes, first_s)
    journal.write({"part": part, "start_s": start_s, "first_s": first_s})
    done: list[RequestOutcome] = []
    running: set[asyncio.Task[None]] = set()
    failures: list[BaseException] = []
    has_news = asyncio.Event()

    def note_outcome(outcome: RequestOutcome) -> None:
        journal.write(asdict(outcome))
        done.append(outcome)

    def give_up(lost: Iterable[tuple[int, str]]) -> None:
        now_s = round(time.monotonic() - start_s, 6)
        for request, reason in lost:
            note_outcome(RequestOutcome(request, part, now_s, now_s, now_s, "unsent", reason, (), ()))

    async def send_one(request: int, due_s: float, body: bytes) -> None:
        outcome = await sender.send(request, part, start_s, due_s, body)
        note_outcome(outcome)
        give_up(agenda.note_end(outcome))
        sender.note_end(outcome)

    def forget_task(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            failures.append(error)
        has_news.set()

    # `prepared` is the request that is due next, with its body; the number -1 stands for no request.
    # `is_open` is False once `may_send` has refused a request. `progress_s` is when `progress` was last
    # called.
    progress_s, prepared, is_open = start_s, (-1, b""), True
    give_up(agenda.unsendable)
    try:
        while ((agenda.due and is_open) or running) and not failures:
            has_news.clear()
            # With the number -1 nothing is due before the next outcome, so this loop waits for that alone.
            due_s, request = agenda.due[0] if agenda.due and is_open else (np.inf, -1)
            # The body is made while there is time before the request is due, not when it must be sent.
            if request not in (-1, prepared[0]):
                prepared = request, sender.body(request)
            wait_s = start_s + due_s - time.monotonic()
            if wait_s > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(has_news.wait(), wait_s if request != -1 else None)
                continue
            if not (is_open := sender.may_send(request)):
                continue
            heapq.heappop(agenda.due)
            journal.write({"part": part, "sends": request})
            task = asyncio.ensure_future(send_one(request, due_s, prepared[1]))
            running.add(task)
            task.add_done_callback(forget_task)
            await asyncio.sleep(0)  # Let the request go out before the next prompt is made.
            if time.monotonic() > progress_s + PROGRESS_EVERY_S:
                progress_s = time.monotonic()
                progress(f"{len(done)} of {len(requests)} requests have ended, {len(running)} in flight")
    finally:
        for task in running:
            task.cancel()
    if failures:
        raise failures[0]
    return done


class _Agenda:
    """When each request is due: at its own time, or `think_s` after the last answer that it waits for.

    `due` is a heap of (time since the start of the part [s], request). It has the requests that can be sent
    at their time, because all requests that they wait for are answered.
    """

    def __init__(
        self,
        trace: Trace,
        requests: Sequence[int],
        earlier_outcomes: Mapping[int, RequestOutcome],
        first_s: float,
    ) -> None:
        """Find the times of `requests`, which are all that this part sends.

        `earlier_outcomes` are those of earlier parts by request, and `first_s` is the arrival in the trace
        with which this part starts. The attribute `unsendable` becomes the list of the requests, each with
        the reason, that wait directly or through others for one that did not finish in an earlier part.
        """
        own_requests = set(requests)
        self.arrival_s = {request: float(trace.arrival_s[request]) - first_s for request in requests}
        self.think_s = trace.think_s
        self.unanswered_parents: dict[int, int] = {}  # How many unanswered requests each one waits for.
        self.children: dict[int, list[int]] = {}
        self.last_answer_s: dict[int, float] = {}  # The latest answer so far to a request that it waits for.
        self.unsendable: list[tuple[int, str]] = []
        self.given_up: set[int] = set()
        waits = [(child, parent) for child, parent in trace.after.tolist() if child in own_requests]
        for child, parent in waits:
            if parent in own_requests:
                self.unanswered_parents[child] = self.unanswered_parents.get(child, 0) + 1
                self.children.setdefault(parent, []).append(child)
            else:
                # A request of an earlier part counts as answered at the start of this one.
                self.last_answer_s[child] = 0.0
        # `_give_up` follows `children`, so all of them must be known before.
        for child, parent in waits:
            if parent not in own_requests and earlier_outcomes[parent].status != "finished":
                self.unsendable += self._give_up([child], earlier_outcomes[parent].status)
        self.due: list[tuple[float, int]] = []
        for request in requests:
            if request not in self.unanswered_parents and request not in self.given_up:
                self._schedule(request)

    def note_end(self, outcome: RequestOutcome) -> list[tuple[int, str]]:
        """Note the outcome of a request.

        If the request finished, those that waited for nothing else any more become due. Otherwise all that
        wait for it, directly or through others, are given up and returned, each with the reason.
        """
        waiting = [child for child in self.children.get(outcome.request, ()) if child not in self.given_up]
        if outcome.status != "finished":
            return self._give_up(waiting, outcome.status)
        for child in waiting:
            self.last_answer_s[child] = max(self.last_answer_s.get(child, 0.0), outcome.end_s)
            self.unanswered_parents[child] -= 1
            if not self.unanswered_parents[child]:
                self._schedule(child)
        return []

    def _schedule(self, request: int) -> None:
        """Add a request to `due`. All requests that it waits for must have been answered."""
        due_s = self.arrival_s[request]
        if request in self.last_answer_s:
            due_s = max(due_s, self.last_answer_s[request] + float(self.think_s[request]))
        heapq.heappush(self.due, (due_s, request))

    def _give_up(self, requests: Iterable[int], status: Status) -> list[tuple[int, str]]:
        """Give up these requests, and all that wait for them: they wait for one that ended with `status`.

        Returns the requests that had not been given up before, each with the reason.
        """
        reasons = {"rejected": "was rejected", "failed": "failed", "unsent": "was not sent"}
        given_up = []
        to_give_up = deque((request, reasons[status]) for request in requests)
        while to_give_up:
            request, reason = to_give_up.popleft()
            if request in self.given_up:
                continue
            self.given_up.add(request)
            given_up.append((request, f"not sent: a request it waits for {reason}"))
            to_give_up.extend((child, reasons["unsent"]) for child in self.children.get(request, ()))
        return given_up


def request_body(trace: Trace, request: int, model: str, seed: int, shares_prefixes: bool) -> bytes:
    """The JSON body of a streaming request to /v1/completions, answered with exactly the trace's length.

    `return_token_ids` lets the client count the tokens of each event.
    """
    inputs, outputs = int(trace.input_tokens[request]), int(trace.output_tokens[request])
    ids = trace_prompt(trace, request, seed) if shares_prefixes else unique_prompt(inputs, request, seed)
    tenant = {"user": trace.tenants[trace.tenant[request]]} if trace.tenants else {}
    return json.dumps(
        {
            "model": model,
            "prompt": ids,
            "max_tokens": outputs,
            "min_tokens": outputs,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            **tenant,
        }
    ).encode()


def unique_prompt(tokens: int, request: int, seed: int) -> list[int]:
    """A prompt of random token ids.

    Its first two ids are the request's number in base TOKEN_IDS, so that up to TOKEN_IDS * TOKEN_IDS requests
    (994,009) differ at the start, and no cache finds a common block.
    """
    ids = np.random.default_rng((seed, request)).integers(TOKEN_IDS, size=tokens) + FIRST_TOKEN_ID
    request_ids = np.array([request // TOKEN_IDS % TOKEN_IDS, request % TOKEN_IDS]) + FIRST_TOKEN_ID
    ids[:2] = request_ids[-min(tokens, 2) :]  # A prompt of one token has room for the last digit only.
    return ids.tolist()  # type: ignore[no-any-return]


def trace_prompt(trace: Trace, request: int, seed: int) -> list[int]:
    """The prompt of a request: the token ids of its prefix blocks, then `unique_prompt` up to its length.

    Equal blocks of the trace become equal ids, so that prefix caches find them.
    """
    first, end = trace.prefix_offsets[request : request + 2]
    shared_blocks = [
        _block_tokens(block, trace.prefix_block_tokens, seed)
        for block in trace.prefix_ids[first:end].tolist()
    ]
    inputs = int(trace.input_tokens[request])
    ids = [token for block in shared_blocks for token in block][:inputs]
    return ids + (unique_prompt(inputs - len(ids), request, seed) if len(ids) < inputs else [])


def block_prompt(block_ids: Sequence[int], block_tokens: int, seed: int) -> list[int]:
    """The token ids of these whole blocks of a trace, the same as `trace_prompt` makes for them."""
    return [token for block in block_ids for token in _block_tokens(block, block_tokens, seed)]


@lru_cache(maxsize=_REMEMBERED_BLOCKS)
def _block_tokens(block: int, tokens: int, seed: int) -> tuple[int, ...]:
    """Random token ids for the block of this id, `tokens` of them; the same for equal id, length and seed."""
    # This seed has three numbers and that of `unique_prompt` two, so no unique prompt begins like a block. An
    # id may be negative, which a seed of numpy must not be: hence the remainder of 2**64.
    rng = np.random.default_rng((seed, block % 2**64, tokens))
    return tuple((rng.integers(TOKEN_IDS, size=tokens) + FIRST_TOKEN_ID).tolist())


async def send_to_router(
    client: aiohttp.ClientSession,
    url: str,
    body: bytes,
    request: int,
    part: int,
    start_s: float,
    due_s: float,
    expected_tokens: int,
) -> RequestOutcome:
    """Send a request to our router, read the stream to its end, and return the outcome.

    `start_s` is the start of the part on CLOCK_MONOTONIC; all times in the outcome count from there. A
    request whose answer has not exactly `expected_tokens` has failed.
    """

    def now_s() -> float:
        return round(time.monotonic() - start_s, 6)

    sent_s, reason = now_s(), ""
    token_s: list[float] = []
    workers: tuple[str, ...] = ()
    status: Status = "failed"
    headers = {"Content-Type": "application/json", "X-Request-Id": request_name(part, request)}
    try:
        async with client.post(f"{url}/v1/completions", data=io.BytesIO(body), headers=headers) as answer:
            workers = tuple(name for name in answer.headers.get(WORKER_HEADER, "").split(",") if name)
            if answer.status != 200:
                # Our router refuses requests with these statuses; others mean that a worker failed.
                status = "rejected" if answer.status in (400, 429, 503) else "failed"
                reason = f"HTTP {answer.status}: {(await answer.text())[:_MESSAGE_CHARACTERS]}"
            else:
                async for line in answer.content:
                    tokens, error = _count_tokens(line)
                    token_s += [now_s()] * tokens
                    reason = error or reason
                if not reason and len(token_s) != expected_tokens:
                    reason = f"{len(token_s)} of {expected_tokens} tokens came"
                status = "failed" if reason else "finished"
    except (aiohttp.ClientError, HttpProcessingError, TimeoutError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"[:_MESSAGE_CHARACTERS]
    return RequestOutcome(
        request, part, round(due_s, 6), sent_s, now_s(), status, reason, workers, tuple(token_s)
    )


def _count_tokens(line: bytes) -> tuple[int, str]:
    """The number of tokens in a line of a stream, and the error that it reports, if any."""
    if not line.startswith(_DATA) or line.startswith(b"data: [DONE]"):
        return 0, ""
    event = json.loads(line[len(_DATA) :])
    if "error" in event:
        return 0, str(event["error"])[:_MESSAGE_CHARACTERS]
    return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ())), ""


def request_name(part: int, request: int) -> str:
    """The X-Request-Id under which engines log a request."""
    return f"p{part}r{request}"


def lateness_s(outcomes: Iterable[RequestOutcome]) -> float:
    """How late a request was sent at most [s]: more than some ms show a slow client, not a slow fleet."""
    return max((outcome.sent_s - outcome.due_s for outcome in outcomes), default=0.0)
