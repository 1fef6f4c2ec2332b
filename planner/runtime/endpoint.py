"""An OpenAI-compatible endpoint that others run: its address, its key, and sending one request to it.

The key goes into the header of requests to the given address and nowhere else: redirects are not followed,
and the key is removed from every text of the server before it is shown.
"""

import base64
import io
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
from aiohttp.http import HttpProcessingError

from planner.errors import InputError, PlannerError
from planner.runtime.addresses import is_loopback, split_address
from planner.runtime.upstream import SPARE_TOKENS

# Limits on times, set by hand.
CONNECT_TIMEOUT_S = 10.0  # For the connection alone.
TIMEOUT_S = 600.0  # By default for a request, from its connection to its last token.
PROBE_TIMEOUT_S = 120.0  # For a probe: a deployment may have to start up first.
LIST_TIMEOUT_S = 30.0  # For the list of models, for which no LLM has to be loaded.
MOST_FAILED_FRAC = 0.1  # The default of --max-failed.
MOST_CHARACTERS_SHOWN = 200  # The most characters of a server's text that a message shows.
# A server that others run may send without end, so answers are read up to these sizes.
READ_BYTES = 64 * 1024  # The most bytes that are read of an answer that is no stream.
MODELS_BYTES = 4 * 2**20  # The most bytes that are read of the list of models.
LINE_BYTES = 2**20  # The longest line of a stream.
# The errors of a connection or an answer that cannot be read.
UNREADABLE = (aiohttp.ClientError, HttpProcessingError, OSError, ValueError, RecursionError)


class EndpointError(PlannerError):
    """The endpoint cannot be measured, or cannot be measured any longer."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint to measure, and the limits on what may be sent.

    `url` ends before /completions. `usd_per_million` are the prices of a million prompt and output tokens;
    `max_usd` and `max_requests` limit all that is sent, probes and warm-up included. `prometheus` are
    engines' /metrics or Prometheus servers. `timeout_s` is for one request, from its connection to its last
    token. The run ends if more than `max_failed_frac` of the last RECENT requests failed
    (remote_validation.py).
    """

    url: str
    key: str = field(default="", repr=False)
    key_name: str = ""  # The environment variable that held the key.
    model: str | None = None
    max_usd: float | None = None
    usd_per_million: tuple[float, float] | None = None
    max_requests: int | None = None
    prometheus: tuple[str, ...] = ()
    timeout_s: float = TIMEOUT_S
    max_failed_frac: float = MOST_FAILED_FRAC

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url, "--url"))
        for url in self.prometheus:
            checked_url(url, "--prometheus")
        if not all(" " < letter <= "~" for letter in self.key):
            raise InputError(f"--api-key-env: ${self.key_name} holds spaces or other letters than ASCII's")
        if self.max_usd is not None and self.usd_per_million is None:
            raise InputError(
                "--max-usd: what tokens cost is not known; give --usd-per-million INPUT,OUTPUT "
                "(the price of a million prompt tokens, and of a million output tokens)"
            )
        for option, value, least in (
            ("--max-usd", self.max_usd, 0.0),
            ("--max-requests", self.max_requests, 1),
            *(("--usd-per-million", usd, 0.0) for usd in self.usd_per_million or ()),
            ("--timeout", self.timeout_s, 0.1),
        ):
            if value is not None and not least <= value < math.inf:
                raise InputError(f"{option}: must be at least {least:g}, found {value!r}")
        if not 0 <= self.max_failed_frac <= 1:
            raise InputError(f"--max-failed: must be from 0 to 1, found {self.max_failed_frac!r}")

    @property
    def host(self) -> str:
        """Host and port of the endpoint's address."""
        return urlsplit(self.url).netloc

    @property
    def sends_key_openly(self) -> bool:
        """Whether the key goes over a network without encryption."""
        parts = urlsplit(self.url)
        return bool(self.key) and parts.scheme == "http" and not is_loopback(parts.hostname or "")

    def clean(self, text: str) -> str:
        """A server's text on one line, cut short, without the key in any of its encodings."""
        key = self.key
        if key:
            coded = base64.b64encode(key.encode()).decode()
            forms = (key, quote(key), quote(key, safe=""), json.dumps(key)[1:-1], coded.rstrip("="))
            for form in sorted(set(forms), key=len, reverse=True):
                text = text.replace(form, "[key]")
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MOST_CHARACTERS_SHOWN]

    def client(self) -> aiohttp.ClientSession:
        """A session whose requests have the key in their headers, and each end within `timeout_s`."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # Identity: a server that compresses its answer may hold tokens back until a block is full.
        return open_session(self.timeout_s, headers | {"Accept-Encoding": "identity"})


def open_session(timeout_s: float, headers: dict[str, str] | None = None) -> aiohttp.ClientSession:
    """A session of requests that each end within `timeout_s`; cookies are not kept."""
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(
        timeout=timeout,
        connector=aiohttp.TCPConnector(limit=0),  # Any number of connections: no request may wait for one.
        headers=headers,
        read_bufsize=LINE_BYTES // 2,  # aiohttp takes lines of up to twice this size.
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def checked_url(url: str, option: str) -> str:
    """The URL without a slash at the end.

    The URL of --url also loses the path of an operation, and gets /v1 if it has no path.
    """
    parts = split_address(url)
    if parts is None or not url.isprintable() or " " in url:
        raise InputError(f"{option}: expected an address such as https://host/v1, found {_shown_url(url)}")
    if parts.username is not None or parts.password is not None:
        raise InputError(f"{option}: a name or password in an address ends up in logs; use --api-key-env")
    if parts.query or parts.fragment:
        raise InputError(f"{option}: expected an address without ? and #, found {_shown_url(url)}")
    url = url.rstrip("/")
    for end in ("/chat/completions", "/completions", "/models") if option == "--url" else ():
        url = url.removesuffix(end)
    return f"{url}/v1" if option == "--url" and not urlsplit(url).path else url


def _shown_url(url: str) -> str:
    """A refused address for an error message, without what may be a password."""
    return repr(url.rpartition("@")[2].partition("?")[0][:MOST_CHARACTERS_SHOWN])


@dataclass(slots=True)
class EndpointAnswer:
    """The answer to one request.

    `code` is the HTTP status, 0 if none came. `trouble` says what failed, and is empty if all went well.
    `token_s` are the arrivals of tokens on the clock of `post_request`. `input_tokens` and `output_tokens`
    are the server's own counts, 0 if it sends none. `is_exact` is False if the server counted another number
    of tokens than its chunks showed; then the arrivals are spread evenly over the counted tokens.
    """

    code: int = 0
    trouble: str = ""
    token_s: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    is_exact: bool = False
    model: str = ""  # The server's name for it.
    retry_after: str = ""  # The header of this name, in which a server says when to come again.

    @property
    def is_good(self) -> bool:
        """Whether the answer came whole and without an error."""
        return not self.trouble


def redirect_message(endpoint: Endpoint, answer: aiohttp.ClientResponse) -> str:
    """The message for an answer that redirects, which is an error here."""
    where = endpoint.clean(answer.headers.get("Location", "nowhere"))
    return (
        f"HTTP {answer.status}: {endpoint.host} redirects to {where}; redirects are not followed, "
        "as the key would go with them: give the address that answers itself"
    )


async def read_text(answer: aiohttp.ClientResponse, most_bytes: int = READ_BYTES) -> str:
    """The beginning of an answer that is no stream."""
    beginning = bytearray()
    async for chunk in answer.content.iter_any():
        beginning += chunk
        if len(beginning) >= most_bytes:
            break
    return bytes(beginning[:most_bytes]).decode(errors="replace")


async def post_request(
    client: aiohttp.ClientSession,
    endpoint: Endpoint,
    path: str,
    body: bytes,
    most_tokens: int,
    *,
    now_s: Callable[[], float] = time.monotonic,
    name: str = "probe",
    timeout_s: float | None = None,
) -> EndpointAnswer:
    """POST `body`, which requests a stream, and read the stream to its end.

    An answer of more than `most_tokens` and SPARE_TOKENS has failed. Failures are in the result's `trouble`,
    not exceptions. `name` is the X-Request-Id, and `now_s` the clock of arrivals.
    """
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    result, timeout_s = EndpointAnswer(), timeout_s or endpoint.timeout_s
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    post = client.post(
        f"{endpoint.url}{path}",
        data=io.BytesIO(body),  # Given as a file, because aiohttp warns of large bytes.
        headers=headers,
        allow_redirects=False,
        timeout=timeout,
    )
    try:
        async with post as answer:
            result.code = answer.status
            result.retry_after = endpoint.clean(answer.headers.get("Retry-After", ""))
            if 300 <= answer.status < 400:
                result.trouble = redirect_message(endpoint, answer)
            elif answer.status != 200:
                result.trouble = (
                    f"HTTP {answer.status}: {endpoint.clean(error_message(await read_text(answer)))}"
                )
            elif "text/event-stream" not in (media_type := answer.headers.get("Content-Type", "none")):
                await read_text(answer)
                result.trouble = f"no stream came, but {endpoint.clean(media_type)}"
            else:
                await _Stream(result, endpoint, now_s, most_tokens).read(answer.content)
    except TimeoutError:
        result.trouble = f"no end within {timeout_s:g} s"
        if not result.code:
            result.trouble = (
                f"no answer within {timeout_s:g} s, or no connection within {CONNECT_TIMEOUT_S:g} s"
            )
    except UNREADABLE as error:
        result.trouble = connection_error_text(endpoint, error)
    return result


def connection_error_text(endpoint: Endpoint, error: BaseException) -> str:
    """The error in words, without the endpoint's key."""
    return endpoint.clean(f"{type(error).__name__}: {error}")


def error_message(text: str) -> str:
    """The message in a body of OpenAI's shape, else the body."""
    try:
        document = json.loads(text)
        error = document.get("error", document.get("message", document.get("detail", text)))
        error = error.get("message", error) if isinstance(error, dict) else error
        return error if isinstance(error, str) else json.dumps(error)
    except (ValueError, AttributeError, RecursionError):
        return text


class _Stream:
    """Reads the server-sent events of completions or chat completions into an `EndpointAnswer`."""

    def __init__(
        self, result: EndpointAnswer, endpoint: Endpoint, now_s: Callable[[], float], most_tokens: int
    ) -> None:
        self.result, self.endpoint, self.now_s, self.most_tokens = result, endpoint, now_s, most_tokens
        self.chunks: list[tuple[float, int]] = []  # The arrival of each chunk, and its number of tokens.
        self.tokens = 0
        self.counts_each = False  # Whether the server says with each chunk how many tokens there are so far.
        self.has_ended = False

    async def read(self, content: aiohttp.StreamReader) -> None:
        """Read a stream to its end, and note when each chunk of tokens came."""
        async for line in content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.has_ended = True
                break
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError("an event of the stream is no JSON object")
            if event.get("error"):
                self.result.trouble = (
                    f"error in the stream: {self.endpoint.clean(error_message(json.dumps(event)))}"
                )
                return
            self._take(event)
            if self.tokens > self.most_tokens + SPARE_TOKENS:
                self.result.trouble = f"more tokens came than the {self.most_tokens} requested"
                break
        self._finish()

    def _take(self, event: dict[str, Any]) -> None:
        """Count the tokens of one event, by the server's own count, or as one for each choice with text."""
        choices = [choice for choice in event.get("choices") or () if isinstance(choice, dict)]
        usage = event.get("usage")
        counted = 0
        if isinstance(usage, dict):
            self.result.input_tokens = _token_count(usage.get("prompt_tokens")) or self.result.input_tokens
            counted = _token_count(usage.get("completion_tokens"))
            self.result.output_tokens = counted or self.result.output_tokens
        if isinstance(event.get("model"), str):
            self.result.model = event["model"]
        self.has_ended |= any(choice.get("finish_reason") for choice in choices)
        if not choices:
            return
        if not self.chunks:
            self.counts_each = counted > 0
        if self.counts_each:
            new_tokens = max(counted - self.tokens, 0)
        else:
            new_tokens = sum(_has_text(choice) for choice in choices)
        if new_tokens:
            self.chunks.append((self.now_s(), new_tokens))
            self.tokens += new_tokens

    def _finish(self) -> None:
        """Note whether the stream is whole, and when each of its tokens came."""
        result, counted_tokens = self.result, self.result.output_tokens
        if not result.trouble and not self.has_ended:
            result.trouble = f"the stream broke off after {self.tokens} tokens"
        if not result.trouble and not self.chunks:
            result.trouble = "no token came"
        times_s = [at_s for at_s, tokens in self.chunks for _ in range(tokens)]
        result.is_exact = self.counts_each or counted_tokens in (0, len(times_s))
        if times_s and not result.is_exact and counted_tokens <= self.most_tokens + SPARE_TOKENS:
            # The server counted other tokens than came: they are spread evenly over the arrivals.
            last = len(times_s) - 1
            times_s = [times_s[k * last // max(counted_tokens - 1, 1)] for k in range(counted_tokens)]
        result.token_s = tuple(times_s)


def _token_count(value: object) -> int:
    """A count that a server sent; 0 for a value that is no count, or larger than any answer can be."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9 else 0


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice in a chunk has a piece of the answer: text, reasoning or a call of a tool."""
    delta = choice.get("delta")
    parts = delta if isinstance(delta, dict) else choice
    names = ("content", "text", "reasoning_content", "reasoning", "tool_calls", "refusal")
    return any(parts.get(name) for name in names)
