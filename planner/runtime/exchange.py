"""The router's side towards its clients: reads and checks their requests, and writes answers and refusals.

The router's side towards workers is planner/runtime/upstream.py.
"""

import asyncio
import json
import re
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from planner.fleet import Fleet
from planner.policies import QUEUE
from planner.runtime.launch import WORKER_HEADER
from planner.runtime.live_routing import LiveFleet, priority_number
from planner.runtime.prompt_blocks import CHARACTERS_PER_TOKEN, blocks_of, prompt_text
from planner.runtime.upstream import REFUSAL_BYTES, SPARE_TOKENS, read_answer, read_limited

COMPLETIONS_PATH = "/v1/completions"
PATHS = (COMPLETIONS_PATH, "/v1/chat/completions")
TENANT_HEADER = "X-Tenant"  # A gateway in front of the router may name the tenant.
TENANT_CHARACTERS = 256  # The limit of a tenant's name; the router keeps names in memory.
# A client's X-Request-Id is kept if it has this form; any other is replaced by an id of the router.
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
DEFAULT_OUTPUT_TOKENS = 16  # OpenAI's default for a request that names no limit.
# A larger limit is refused. Some bound is needed, because JSON has integers of any length.
MOST_OUTPUT_TOKENS = 10**9
# Bodies are unpacked in pieces of this size (about a millisecond), between which others are served.
UNPACK_BYTES = 2**20
# zlib's value for "recognise gzip or zlib by the first bytes". HTTP calls zlib's format "deflate".
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A client's request, with the values that routing needs.

    `body` is the client's JSON, and `raw` are the bytes that are sent to workers. `input_tokens` are
    estimated for a prompt of text. `output_tokens` is the client's limit, or else DEFAULT_OUTPUT_TOKENS.
    """

    id: str
    path: str
    body: dict[str, Any] = field(repr=False)
    raw: bytes = field(repr=False)
    input_tokens: int
    output_tokens: int
    most_tokens: int  # The most tokens of all choices together, with SPARE_TOKENS (upstream.py).
    choices: int = 1  # The number of answers that the client asked for: OpenAI's parameter `n`.
    # Blocks of the prompt, empty unless the fleet keeps prefixes.
    blocks: Sequence[int] = field(default=(), repr=False)
    tenant: str = field(default="", repr=False)

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for the answer as a stream."""
        return bool(self.body.get("stream"))


class ClientGoneError(Exception):
    """The client closed its connection before its answer was complete."""


def read_request(
    request: web.Request, raw: bytes, fleet: Fleet, live: LiveFleet, longest_tokens: int
) -> RoutedRequest:
    """Read and check `raw`, the unpacked body of `request`. Raises an HTTP error (`refusal_response`) for a
    body that is not understood, and for a request that no worker can serve.

    `longest_tokens` is the length of the longest request, prompt and output, that the engines take.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise refusal_response(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise refusal_response(400, "the body is not a JSON object")
    if body.get("model", fleet.llm.name) != fleet.llm.name:
        raise refusal_response(404, "no such model here; GET /v1/models lists the one there is")
    if "kv_transfer_params" in body:
        raise refusal_response(
            400, "kv_transfer_params are the router's to set: they name hosts to fetch from"
        )
    prompt = body.get("prompt" if request.path == COMPLETIONS_PATH else "messages")
    input_tokens = _input_tokens(prompt)
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    most_output_tokens = DEFAULT_OUTPUT_TOKENS if limit is None else limit
    if type(most_output_tokens) is not int or not 1 <= most_output_tokens <= MOST_OUTPUT_TOKENS:
        raise refusal_response(400, f"max_tokens must be a whole number from 1 to {MOST_OUTPUT_TOKENS}")
    # `live.longest_tokens` is what fits into a worker's KV cache, which may be less than an engine's context.
    room_tokens = live.longest_tokens - most_output_tokens
    if input_tokens > room_tokens:
        # The tokens of text are a guess. A text that seems too long is routed as the longest that fits, and
        # the engine may refuse it. `prompt_text` is empty for token ids, which are counted.
        if room_tokens < 1 or not prompt_text(prompt):
            raise refusal_response(
                400,
                f"{input_tokens + most_output_tokens} tokens of prompt and output fit into no worker's KV "
                "cache",
            )
        input_tokens = room_tokens
    client_id = request.headers.get("X-Request-Id", "")
    request_id = client_id if REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex
    tenant = _tenant_of(request, body) if live.reads_tenants else ""
    if QUEUE[fleet.policies.queue].has_rank:
        # vLLM orders its queue by `priority`. A request that names another LLM was refused above.
        now_s, llm = time.monotonic(), fleet.llm.name
        body["priority"] = priority_number(
            fleet.policies, input_tokens, most_output_tokens, now_s, longest_tokens, tenant=tenant, llm=llm
        )
        raw = json.dumps(body).encode()
    blocks = blocks_of(prompt) if live.keeps_prefixes else ()
    # Anything but a whole number above 1 counts as 1 here; the engine gets `n` as it came.
    choices = body.get("n")
    choices = choices if isinstance(choices, int) and choices > 1 else 1
    # A chat without a limit may get an answer that fills the engine's context.
    most_tokens = choices * (longest_tokens if limit is None else most_output_tokens) + SPARE_TOKENS
    return RoutedRequest(
        request_id,
        request.path,
        body,
        raw,
        input_tokens=input_tokens,
        output_tokens=most_output_tokens,
        most_tokens=most_tokens,
        choices=choices,
        blocks=blocks,
        tenant=tenant,
    )


async def read_body(request: web.Request, most_bytes: int) -> bytes:
    """Read the body and unpack it, if it is packed with gzip or deflate.

    A body of more than `most_bytes`, packed or unpacked, is refused as soon as this many have come. The web
    server is set not to unpack bodies itself, because it would do so before the API key is checked.
    """
    if (request.content_length or 0) > most_bytes:
        raise refusal_response(413, "")  # `LiveRouter._guard` (router.py) writes the message.
    packing = request.headers.get("Content-Encoding", "identity").strip().lower()
    if packing == "identity":
        return await request.read()
    if packing not in ("gzip", "deflate"):
        raise refusal_response(415, "Content-Encoding must be gzip, deflate or identity")
    inflater, body, packed_bytes = zlib.decompressobj(GZIP_OR_ZLIB), bytearray(), 0
    try:
        async for chunk in request.content.iter_any():
            packed_bytes += len(chunk)
            while chunk:
                body += inflater.decompress(chunk, UNPACK_BYTES)
                if max(len(body), packed_bytes) > most_bytes:
                    raise refusal_response(413, "")
                if inflater.unused_data:
                    raise refusal_response(400, f"the body goes on after its {packing} has ended")
                if chunk := inflater.unconsumed_tail:
                    await asyncio.sleep(0)  # Other requests are served between two pieces.
    except zlib.error:
        raise refusal_response(400, f"the body is not {packing}") from None
    if not inflater.eof:
        raise refusal_response(400, f"the body ends before its {packing} does")
    return bytes(body)


def _input_tokens(prompt: object) -> int:
    """The tokens of a prompt: counted ids, or a guess by its characters. Raises a refusal for others."""
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return len(prompt)
    if text := prompt_text(prompt):
        return -(-len(text) // CHARACTERS_PER_TOKEN)
    raise refusal_response(
        400, "expected one prompt, as text or as a list of token ids (or messages in a chat)"
    )


def _tenant_of(request: web.Request, body: dict[str, Any]) -> str:
    """The tenant: TENANT_HEADER, else OpenAI's field `user`, else none. Refuses what is no short text."""
    tenant = request.headers.get(TENANT_HEADER) or body.get("user")
    if tenant is None:
        return ""
    if not isinstance(tenant, str) or len(tenant) > TENANT_CHARACTERS:
        raise refusal_response(400, f"user must be text of at most {TENANT_CHARACTERS} characters")
    return tenant


class Reply:
    """The answer to one client, as far as it has been sent.

    `response` is None until the answer has begun. `tokens` is the number of output tokens so far: counted in
    the events of a stream, or read from the usage in an answer that is no stream.
    """

    def __init__(self, request: web.Request, routed_request: RoutedRequest, start_s: float) -> None:
        self.request, self.routed_request, self.start_s = request, routed_request, start_s
        self.response: web.StreamResponse | None = None
        self.prefilled_by = ""  # The prefill worker; empty before the hand-off and for a mixed worker.
        self.seat = -1  # The request's row in the state of `live_routing.LiveFleet`; -1 if it has none.
        self.tokens = 0
        self.is_broken = False  # The worker reported an error in the stream.
        # Whether other requests are on its worker, and whether it may have killed a worker (trust.py).
        self.is_shared = self.is_suspect = False
        self.strikes = 0  # The number of workers that died while they served the request (trust.py).
        self.sent_s = 0.0  # The time at which the request was sent to its present worker.
        self.limit_s = 0.0  # The worker must begin to answer within this many seconds of `sent_s`.
        self.heard_s = 0.0  # The time of the worker's last part of the stream; 0 before the first.
        self.overdue = ""  # The limit of time that the worker exceeded, for the message.
        self.writes_since_s = 0.0  # The time since which a write to the client has waited; 0 if none waits.

    def _headers(self, worker: str) -> dict[str, str]:
        """Headers of the reply: the id of the request, and the workers that served it."""
        workers = f"{self.prefilled_by},{worker}" if self.prefilled_by else worker
        return {"X-Request-Id": self.routed_request.id, WORKER_HEADER: workers}

    async def begin(self, worker: str) -> None:
        """Send the head of a stream, which names the worker."""
        headers = {"Content-Type": "text/event-stream", **self._headers(worker)}
        self.response = web.StreamResponse(headers=headers)
        with _noticing_client_loss():
            await self.response.prepare(self.request)

    async def write(self, chunk: bytes, now_s: float) -> None:
        """Send a part of the stream, at `now_s` of time.monotonic(). Waits while the client does not read."""
        assert self.response is not None
        self.writes_since_s = now_s
        with _noticing_client_loss():
            await self.response.write(chunk)
        self.writes_since_s = 0.0

    def abort(self) -> None:
        """End the connection of a client that does not read."""
        if self.request.transport is not None:
            self.request.transport.abort()

    async def finish(self) -> None:
        """End the answer that was begun."""
        assert self.response is not None
        with _noticing_client_loss():
            await self.response.write_eof()

    async def end_with_error(self, message: str) -> None:
        """End a stream whose worker failed, with an error event."""
        event = {"error": {"message": message, "type": "worker_failed", "code": 502}}
        await self.write(f"data: {json.dumps(event)}\n\n".encode(), time.monotonic())
        await self.finish()

    async def pass_on(self, upstream: aiohttp.ClientResponse, worker: str, most_bytes: int) -> None:
        """Set `response` to a worker's answer that is no stream, or to an error that the request caused. The
        router's handler returns it.

        An answer is read up to `most_bytes`, an error up to REFUSAL_BYTES.
        """
        is_answer = upstream.status == 200
        body = await read_limited(upstream, worker, most_bytes if is_answer else REFUSAL_BYTES)
        if is_answer:
            _, tokens = read_answer(body, worker, self.routed_request.most_tokens)
            # If the worker reports no count, the answer is taken to be as long as the request allows.
            self.tokens = tokens or self.routed_request.output_tokens
        self.response = web.Response(
            body=body,
            status=upstream.status,
            content_type=upstream.content_type,
            headers=self._headers(worker),
        )


@contextmanager
def _noticing_client_loss() -> Iterator[None]:
    """Raise ClientGoneError for a ConnectionError in the block, which must only write to the client.

    Elsewhere a ConnectionError could also be the loss of a worker, for which aiohttp raises the same error.
    """
    try:
        yield
    except ConnectionError:
        raise ClientGoneError from None


def refusal_response(status: int, message: str, *, retry_after_s: int | None = None) -> web.HTTPException:
    """An HTTP error to raise, with a body in the form of OpenAI's API."""
    kinds: dict[int, type[web.HTTPException]] = {
        400: web.HTTPBadRequest,
        401: web.HTTPUnauthorized,
        404: web.HTTPNotFound,
        408: web.HTTPRequestTimeout,
        415: web.HTTPUnsupportedMediaType,
        422: web.HTTPUnprocessableEntity,
        429: web.HTTPTooManyRequests,
        502: web.HTTPBadGateway,
        503: web.HTTPServiceUnavailable,
    }
    text = json.dumps({"error": {"message": message, "type": "refused", "code": status}})
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
    # The classes of aiohttp for 405 and 413 require further arguments, which the response does not show.
    if status == 405:
        return web.HTTPMethodNotAllowed("", (), text=text, content_type="application/json")
    if status == 413:
        return web.HTTPRequestEntityTooLarge(
            max_size=0, actual_size=0, text=text, content_type="application/json"
        )
    kind = kinds.get(status, web.HTTPBadRequest)  # Any other status, which only aiohttp raises, becomes 400.
    return kind(text=text, content_type="application/json", headers=headers)
