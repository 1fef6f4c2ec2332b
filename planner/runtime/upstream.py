"""Checks the answers of workers before the router passes them on: they must be complete, of the form of the
OpenAI API, and no longer than the request allows.
"""

import json
from typing import Any

import aiohttp

# Limits set by hand.
LINE_BYTES = 16 * 2**20  # The longest line: an event with the log-probabilities of a long prompt fits.
REFUSAL_BYTES = 2**20  # The longest answer that says what is wrong with a request.
# Tokens that may come beyond the request's limit. Engines may count a stop token, or send an event with the
# role alone. That is a few per choice, far fewer than this number.
SPARE_TOKENS = 64
_READ_VALUE = json.JSONDecoder().raw_decode  # Twice as fast as json.loads on a short event.
_DATA_FIELD = b"data:"
# The other fields of server-sent events, and comments, which begin with a colon.
_OTHER_FIELDS = (b":", b"event:", b"id:", b"retry:")


class WorkerError(Exception):
    """A worker did not answer, or its answer is not valid."""


class WorkerDiedError(WorkerError):
    """The worker went down, or its connection broke, while it had the request."""


class WorkerRefusedError(WorkerError):
    """The worker refuses all requests, by `status`: a wrong key or path, or it accepts none now."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class StreamCheck:
    """Checks one stream of server-sent events. `take` and `end` give back the lines that passed.

    `tokens` is the number of events with output so far, or the worker's own count if that is larger.
    `finished_choices` is how many of the request's `choices` have ended, and `has_done_line` whether the
    line "[DONE]" came. `error_code` is the HTTP status in an event that reports an error, or 0.
    """

    def __init__(self, worker: str, *, most_bytes: int, most_tokens: int, choices: int = 1) -> None:
        self.worker, self.most_bytes = worker, most_bytes
        self.most_tokens, self.choices = most_tokens, choices
        self.tokens = self.bytes = 0
        self.finished_choices = self.error_code = 0
        self.has_done_line = False
        self.unfinished_line = bytearray()  # The beginning of a line whose end has not come yet.

    @property
    def is_complete(self) -> bool:
        """Whether the answer has ended: the stream, each of its choices, or all of it by an error."""
        return self.has_done_line or self.finished_choices >= self.choices or self.error_code > 0

    def take(self, chunk: bytes) -> bytes:
        """The lines that `chunk` completes.

        Raises WorkerError for a line that is no line of server-sent events, for an event that is not one of
        an answer, and if the answer is too long.
        """
        self.bytes += len(chunk)
        if self.bytes > self.most_bytes:
            raise WorkerError(f"{self.worker}: the answer is larger than {self.most_bytes} bytes")
        end = chunk.rfind(b"\n") + 1
        if not end:
            self.unfinished_line += chunk
            if len(self.unfinished_line) > LINE_BYTES:
                raise WorkerError(f"{self.worker}: a line of the stream is larger than {LINE_BYTES} bytes")
            return b""
        lines = chunk  # A chunk of whole lines is passed on without a copy.
        if self.unfinished_line or end < len(chunk):
            lines = bytes(self.unfinished_line) + chunk[:end]
            self.unfinished_line = bytearray(chunk[end:])
        self._read(lines)
        return lines

    def end(self) -> bytes:
        """The bytes after the last newline. Raises WorkerError if the stream ended too early."""
        last, self.unfinished_line = bytes(self.unfinished_line), bytearray()
        self._read(last)
        if not self.is_complete:
            raise WorkerError(f"{self.worker}: the stream ended short, after {self.tokens} tokens")
        return last

    def _read(self, lines: bytes) -> None:
        """Check each line: data must be an event of an answer, and other lines are passed on unread. Raises
        WorkerError for a line that begins with no field of server-sent events.
        """
        for line in lines.split(b"\n"):
            if line.startswith(_DATA_FIELD):
                self._read_event(line[len(_DATA_FIELD) :].strip())
            elif line and line.strip() and not line.startswith(_OTHER_FIELDS):
                raise self._invalid_event()

    def _read_event(self, data: bytes) -> None:
        """Count an event's tokens; note the stream's end or error. Raises WorkerError for no completion."""
        if data == b"[DONE]":
            self.has_done_line = True
            return
        try:
            text = data.decode()
            event, end = _READ_VALUE(text)
        except (ValueError, RecursionError):
            raise self._invalid_event() from None
        if end < len(text) or not isinstance(event, dict):
            raise self._invalid_event()
        if error := event.get("error"):
            code = error.get("code") if isinstance(error, dict) else None
            # An error without an HTTP status counts as a fault of the worker.
            self.error_code = code if isinstance(code, int) and 400 <= code < 600 else 500
            return
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise self._invalid_event()
        self.tokens += bool(choices)  # A last event with the usage alone has no choices.
        for choice in choices:
            if not isinstance(choice, dict):
                raise self._invalid_event()
            self.finished_choices += bool(choice.get("finish_reason"))
        if event.get("usage"):
            self.tokens = max(self.tokens, _usage_tokens(event))
        if self.tokens > self.most_tokens:
            raise WorkerError(f"{self.worker}: more tokens came than the {self.most_tokens} requested")

    def _invalid_event(self) -> WorkerError:
        """The error for a line or an event that does not belong to the stream of an answer."""
        return WorkerError(f"{self.worker}: the stream brought what is no event of an answer")


async def read_limited(answer: aiohttp.ClientResponse, worker: str, most_bytes: int) -> bytes:
    """Read the body of an answer that is no stream. Raises WorkerError if it is larger than `most_bytes`."""
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > most_bytes:
            answer.close()
            raise WorkerError(f"{worker}: the answer is larger than {most_bytes} bytes")
    return bytes(body)


def read_answer(body: bytes, worker: str, most_tokens: int) -> tuple[dict[str, Any], int]:
    """Parse an answer that came as one document, and return it with the number of its output tokens: 0 if
    the worker does not count them. Raises WorkerError for any other document.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("choices"), list):
        raise WorkerError(f"{worker}: what came is no answer")
    tokens = _usage_tokens(document)
    if tokens > most_tokens:
        raise WorkerError(f"{worker}: more tokens came than the {most_tokens} requested")
    return document, tokens


def _usage_tokens(document: dict[str, Any]) -> int:
    """The number of output tokens that the worker reports; 0 if it reports none."""
    usage = document.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int and count > 0 else 0  # isinstance would take a bool for an int.
