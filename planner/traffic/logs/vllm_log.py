"""Reads the log of `vllm serve --enable-log-requests`, which has the lengths of requests if its level is
DEBUG.

    INFO 11-21 23:47:40 [request_logger.py:65] Received request chatcmpl-1: params: SamplingParams(...)
    DEBUG ... Request chatcmpl-1 details: prompt: '...', prompt_token_ids: [3, 4], prompt_embeds shape: None.
    DEBUG ... Generated response chatcmpl-1 details: output_token_ids: [19761, 14369]

The last line is written only with `--enable-log-outputs`, and only for chats (vLLM 0.32,
entrypoints/serve/utils/request_logger.py). Up to vLLM 0.10 the first line held `prompt_token_ids` itself. If
answers are not logged, the length of an answer is known only for requests with ignore_eos, because then it is
their max_tokens. This module counts token ids, and keeps no text of prompts.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from planner.errors import TraceError
from planner.traffic.logs.log_columns_map import Columns

COLUMNS = Columns(
    arrival="time",
    input="prompt_tokens",
    output="output_tokens",
    adapter="lora",
    status="status",
    units={"arrival": "ns"},
)
# The log of a container has a date, the stream (stdout or stderr), and F or P for a full or a partial line,
# before the line itself. vLLM's own line may begin with the name of its process in parentheses.
_LINE = re.compile(
    rb"(?:(?P<stamp>\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d))\s+(?:std(?:out|err) [FP] )?)?"
    rb"(?:\([^)]{0,80}\) )?"
    rb"(?:INFO|DEBUG|WARNING|ERROR) (?P<date>\d\d-\d\d) (?P<time>\d\d:\d\d:\d\d)(?P<fraction>\.\d+)? "
    rb"(?:\[[^\]]{0,120}\]|\S{1,80}\]) (?P<message>.*)"
)
# A line of vLLM's log if it is written as JSON.
_JSON_LINE = re.compile(
    rb'\{.*"asctime": ?"(?P<stamp>\d{4}-\d\d-\d\d[ T][\d:.,]+)".*"message": ?"(?P<message>(?:[^"\\]|\\.)*)"'
)
_VLLM_LOGGER = b'"name": "vllm'  # JSON lines with this text are vLLM's, not another program's.
# How messages on a request begin, and the settings of a request in the first of them.
_RECEIVED = re.compile(rb"Received request (\S+?): ")
_DETAILS = re.compile(rb"Request (\S+) details: ")
_GENERATED = re.compile(rb"Generated response (\S+)(?: \((streaming delta|streaming complete)\))? details: ")
_ENDED = re.compile(rb"Request (\S+) (aborted|failed)\b")
_MAX_TOKENS = re.compile(rb"[(, ]max_tokens=(\d+)[,)]")
_ANSWER_COUNT = re.compile(rb"SamplingParams\(n=(\d{1,4}),")
_LORA = re.compile(rb"lora_request: LoRARequest\(lora_name='([^']{1,100})'")
# The text before the list of token ids of a prompt ("in") and of an answer ("out").
_IDS = {"in": b"prompt_token_ids: [", "out": b"output_token_ids: ["}
_PROMPT = b"prompt: "  # The text before the prompt itself, which is in quotes.
# vLLM writes no year. Every year counts as a leap year, so that February 29 has a place; `_YearlessDays`
# takes that day out again if the log has none.
_DAYS_BEFORE_MONTH = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)
_DAY_NS, _YEAR_DAYS = 86400 * 10**9, 366
_FEB_28 = 58  # The number of that day in its year, from 0.
_NEW_YEAR_NS = 978_307_200 * 10**9  # The start of 2001, from which dates without a year count.
# --max-log-len cuts prompts and lists of token ids at the same length. If this many prompts have as many
# characters as token ids, and all have the same number, the log was cut there.
_CUT_PROMPTS = 3


@dataclass(slots=True)
class _ParsedRequest:
    """A request, with the number and the time of the first line that names it.

    `max_tokens` is the sum over its answers. It is set only if the request has ignore_eos, because then the
    answers have exactly as many tokens.
    """

    line: int
    time_ns: int
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None
    lora: str | None = None
    status: str = "ok"


def is_log(lines: Iterable[bytes]) -> bool:
    """Whether some line of a sample is one of vLLM's own."""
    return any(_LINE.match(line) or (_VLLM_LOGGER in line and _JSON_LINE.match(line)) for line in lines)


class _YearlessDays:
    """Counts the days of a log from the year of its first line. Its dates have no year.

    If the date falls by more than half a year from one line to the next, a new year has begun. Several
    processes write one log, so a line of December 31 may still follow one of January 1: it is of the year
    before.
    """

    def __init__(self) -> None:
        # The day of the line before, counted from the first year's January 1 in years of _YEAR_DAYS.
        self._previous_day: int | None = None
        self._years_without_feb_29 = set[int]()

    def count(self, number_of_day: int) -> int:
        """The day's number in the log, from its number in a leap year, both from 0."""
        if self._previous_day is None:
            self._previous_day = number_of_day
        year, previous_number = divmod(self._previous_day, _YEAR_DAYS)
        if previous_number - number_of_day > _YEAR_DAYS // 2:
            year += 1
        elif number_of_day - previous_number == _YEAR_DAYS - 1:  # December 31 after January 1.
            year -= 1
        elif previous_number <= _FEB_28 and number_of_day > _FEB_28 + 1:
            self._years_without_feb_29.add(year)  # The log goes from February to March without the 29th.
        self._previous_day = year * _YEAR_DAYS + number_of_day
        missing_days = sum(
            each < year or (each == year and number_of_day > _FEB_28) for each in self._years_without_feb_29
        )
        return self._previous_day - missing_days


class VllmLog:
    """Reads the lines of a log (`read`); then `rows` gives the requests, and adds notes for the user to
    `notes`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: dict[bytes, _ParsedRequest] = {}  # By vLLM's request id.
        self.notes: list[str] = []
        # Whether lines begin with a whole date, year included; None before the first line.
        self.has_stamps: bool | None = None
        self._days = _YearlessDays()
        # For each number n: how many prompts have n characters and n token ids.
        self._cut: Counter[int] = Counter()

    def read(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Take the lines of a log, with their numbers."""
        for number, raw in lines:
            # Most lines have neither "Request", "request" nor "Generated"; this test is faster than patterns.
            if b"equest" not in raw and b"Generated" not in raw:
                continue
            match = _LINE.match(raw) or _JSON_LINE.match(raw)
            if match is None:
                continue
            message = match["message"]
            if received := _RECEIVED.match(message):
                self._take_received(number, self._time_ns(number, match), received[1], message)
            elif details := _DETAILS.match(message):
                # The lines of a request may come in any order.
                request = self.requests.setdefault(
                    details[1], _ParsedRequest(number, self._time_ns(number, match))
                )
                request.prompt_tokens = self._count_ids("in", message)
            elif generated := _GENERATED.match(message):
                self._take_generated(generated, message)
            elif (ended := _ENDED.match(message)) and ended[1] in self.requests:
                self.requests[ended[1]].status = "aborted" if ended[2] == b"aborted" else "failed"

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The rows, one for each request: the number of its line, and its values by column (COLUMNS). Raises
        TraceError if the log has no requests, or does not tell their lengths.
        """
        requests = list(self.requests.values())
        if not requests:
            raise TraceError(
                f"{self.path}: is a log of vLLM without requests; start it with --enable-log-requests and "
                "VLLM_LOGGING_LEVEL=DEBUG, or export its spans (--otlp-traces-endpoint)"
            )
        length, prompts = max(self._cut.items(), key=lambda pair: pair[1], default=(0, 0))
        if prompts >= _CUT_PROMPTS:
            raise TraceError(
                f"{self.path}: {prompts} prompts are cut at {length} characters and token ids "
                "(--max-log-len), so lengths are lost; leave that option out, or export spans "
                "(--otlp-traces-endpoint)"
            )
        if all(request.prompt_tokens is None for request in requests):
            raise TraceError(
                f"{self.path}: tells when {len(requests)} requests came, but not how long they are; start "
                "vLLM with VLLM_LOGGING_LEVEL=DEBUG and --enable-log-outputs, or export its spans "
                "(--otlp-traces-endpoint)"
            )
        assumed = [r for r in requests if r.output_tokens is None and r.max_tokens and r.status == "ok"]
        for request in assumed:
            request.output_tokens = request.max_tokens
        if assumed:
            self.notes.append(
                f"{len(assumed)} answers are not in the log; they have ignore_eos and are taken as long as "
                "asked"
            )
        for request in requests:
            yield (
                request.line,
                {
                    "time": request.time_ns,
                    "prompt_tokens": request.prompt_tokens,
                    "output_tokens": request.output_tokens,
                    "lora": request.lora,
                    "status": request.status,
                },
            )

    def _take_received(self, number: int, time_ns: int, name: bytes, message: bytes) -> None:
        """Take the message on a request that arrived: its settings, and before these perhaps its prompt."""
        request = self.requests.setdefault(name, _ParsedRequest(number, time_ns))
        if (tokens := self._count_ids("in", message)) is not None:  # vLLM up to 0.10 writes the ids here.
            request.prompt_tokens = tokens
        # The prompt may have any text, so the settings are looked for only after it.
        tail = message[message.rfind(b"SamplingParams(") :]
        if b"ignore_eos=True" in tail and (match := _MAX_TOKENS.search(tail)):
            answers = _ANSWER_COUNT.search(tail)
            request.max_tokens = int(match[1]) * (int(answers[1]) if answers else 1)
        if lora := _LORA.search(tail):
            request.lora = lora[1].decode(errors="replace")

    def _take_generated(self, match: re.Match[bytes], message: bytes) -> None:
        """Add the tokens of an answer, or of one piece of a streamed answer, to its request. The message at
        the end of a stream repeats the tokens of all pieces, so it does not count.
        """
        request, tokens = self.requests.get(match[1]), self._count_ids("out", message)
        if request is not None and tokens is not None and match[2] != b"streaming complete":
            request.output_tokens = (request.output_tokens or 0) + tokens

    def _count_ids(self, side: str, message: bytes) -> int | None:
        """How many token ids of a prompt ("in") or an answer ("out") a message lists; None if it has no list.
        The prompt itself may contain the words that come before a list, so their last place counts.

        A prompt with as many characters as token ids is counted in `_cut`, from which `rows` concludes that
        the log was cut.
        """
        mark = _IDS[side]
        if (mark_at := message.rfind(mark)) < 0:
            return None
        end = message.find(b"]", mark_at)
        listed = message[mark_at + len(mark) : end if end >= 0 else len(message)]
        tokens = listed.count(b",") + 1 if listed.strip() else 0
        prompt_at = message.find(_PROMPT)
        if side == "in" and tokens and 0 <= prompt_at < mark_at:
            quoted = message[prompt_at + len(_PROMPT) : mark_at].rstrip(b", ").decode(errors="replace")
            if len(quoted) - 2 == tokens:  # Less the two quotes around the prompt.
                self._cut[tokens] += 1
        return tokens

    def _time_ns(self, number: int, match: re.Match[bytes]) -> int:
        """The time of a line [ns]: since 1970 if lines begin with a whole date (kubectl logs --timestamps).
        Otherwise the year, which vLLM does not write, is taken to be 2001.
        """
        stamp = match["stamp"]
        if self.has_stamps is None:
            self.has_stamps = stamp is not None
        if self.has_stamps != (stamp is not None):
            raise TraceError(
                f"{self.path}, line {number}: some lines begin with a date and a year, others do not; keep "
                "those of one container"
            )
        if stamp is not None:
            return _stamp_ns(stamp, f"{self.path}, line {number}")
        month, day = (int(part) for part in match["date"].split(b"-"))
        hours, minutes, seconds = (int(part) for part in match["time"].split(b":"))
        if not (1 <= month <= 12 and 1 <= day <= 31 and hours < 24 and minutes < 60 and seconds < 61):
            raise TraceError(f"{self.path}, line {number}: {match['date'].decode()} is no month and day")
        number_of_day = _DAYS_BEFORE_MONTH[month - 1] + day - 1
        fraction_ns = int(float(match["fraction"] or b"0") * 1e9)
        since_midnight_ns = ((hours * 60 + minutes) * 60 + seconds) * 10**9 + fraction_ns
        return _NEW_YEAR_NS + self._days.count(number_of_day) * _DAY_NS + since_midnight_ns


def _stamp_ns(stamp: bytes, where: str) -> int:
    """A date and time as ns since 1970; without a zone it is taken as UTC. Raises TraceError, which names
    `where`, for a text that is no date.
    """
    try:
        time = pd.Timestamp(stamp.decode().replace(",", "."))
        return int((time.tz_convert(None) if time.tzinfo else time).as_unit("ns").value)
    except (ValueError, OverflowError):
        raise TraceError(f"{where}: {stamp.decode()[:40]!r} is no date") from None
