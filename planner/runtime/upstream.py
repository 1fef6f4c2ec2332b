"""What a worker answers against what was asked of it: whole, of the right shape, and not longer."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

# The longest line of a stream: one event with the log-probabilities of a long prompt.
LINE_BYTES = 16 * 2**20
REFUSAL_BYTES = 2**20  # The longest answer that says what is wrong with a request.
_READ_VALUE = json.JSONDecoder().raw_decode  # It takes half as long as json.loads for a short event.
SPARE_TOKENS = 64  # Tokens beyond the request's limit: engines may count a stop or a role as one.


class WorkerError(Exception):
    """A worker did not answer, or not what it was asked for."""


class WorkerDiedError(WorkerError):
    """The worker went down, or its connection broke, while it had the request."""


class WorkerRefusedError(WorkerError):
    """The worker refuses such requests whatever they contain: its status asks for another key, path or
    moment.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class StreamCheck:
    """The events of one stream. What `take` gives back is whole lines, each of them read.

    `tokens` counts events with an answer in them, or what the worker says it counted where that is more.
    `error_code` is that of an event that reports an error, 0 where none came.
    """

    def __init__(self, worker: str, *, most_bytes: int, most_tokens: int, choices: int = 1) -> None:
        self.worker, self.most_bytes = worker, most_bytes
        self.most_tokens, self.choices = most_tokens, choices
        self.tokens = self.bytes = self.finished = self.error_code = 0
        self.is_done = False
        self.rest = bytearray()

    @property
    def is_whole(self) -> bool:
        """Whether the worker said that this is the end, for every choice."""
        return self.is_done or self.finished >= self.choices or self.error_code > 0

    def take(self, chunk: bytes) -> bytes:
        """The lines that are whole now. Raises WorkerError for what is no event, and for too many."""
        self.bytes += len(chunk)
        if self.bytes > self.most_bytes:
            raise WorkerError(f"{self.worker}: the answer is larger than {self.most_bytes} bytes")
        end = chunk.rfind(b"\n") + 1
        if not end:
            self.rest += chunk
            if len(self.rest) > LINE_BYTES:
                raise WorkerError(f"{self.worker}: a line of the stream is larger than {LINE_BYTES} bytes")
            return b""
        lines = chunk
        if self.rest or end < len(chunk):
            lines = bytes(self.rest) + chunk[:end]
            self.rest = bytearray(chunk[end:])
        self._read(lines)
        return lines

    def end(self) -> bytes:
        """The bytes after the last newline. Raises WorkerError if the stream ended too early."""
        last, self.rest = bytes(self.rest), bytearray()
        self._read(last)
        if not self.is_whole:
            raise WorkerError(f"{self.worker}: the stream ended short, after {self.tokens} tokens")
        return last

    def _read(self, lines: bytes) -> None:
        for line in lines.split(b"\n"):
            if line.startswith(b"data:"):
                self._read_event(line[5:].strip())
            elif line and line.strip() and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise self._garbage()

    def _read_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            text = data.decode()
            event, end = _READ_VALUE(text)
        except (ValueError, RecursionError):
            raise self._garbage() from None
        if end < len(text) or not isinstance(event, dict):
            raise self._garbage()
        if error := event.get("error"):
            code = error.get("code") if isinstance(error, dict) else None
            self.error_code = code if isinstance(code, int) and 400 <= code < 600 else 500
            return
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise self._garbage()
        self.tokens += bool(choices)
        for choice in choices:
            if not isinstance(choice, dict):
                raise self._garbage()
            self.finished += bool(choice.get("finish_reason"))
        if event.get("usage"):
            self.tokens = max(self.tokens, _counted(event))
        if self.tokens > self.most_tokens:
            raise WorkerError(f"{self.worker}: more tokens came than the {self.most_tokens} asked for")

    def _garbage(self) -> WorkerError:
        return WorkerError(f"{self.worker}: the stream brought what is no event of an answer")


async def read_limited(answer: aiohttp.ClientResponse, worker: str, most_bytes: int) -> bytes:
    """A body that is no stream; raises WorkerError where it is too large."""
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > most_bytes:
            answer.close()
            raise WorkerError(f"{worker}: the answer is larger than {most_bytes} bytes")
    return bytes(body)


def read_answer(body: bytes, worker: str, most_tokens: int) -> tuple[dict[str, Any], int]:
    """A whole answer, and how many tokens the worker says it has, 0 where it does not."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("choices"), list):
        raise WorkerError(f"{worker}: what came is no answer")
    tokens = _counted(document)
    if tokens > most_tokens:
        raise WorkerError(f"{worker}: more tokens came than the {most_tokens} asked for")
    return document, tokens


def _counted(document: dict[str, Any]) -> int:
    """Tokens of output so far, where the worker counts them."""
    usage = document.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int and count > 0 else 0  # A bool is an int too.
