"""One address in front of all workers, with OpenAI's API: chooses, forwards, retries, refuses, counts.

A request goes to a mixed worker, or to a prefill worker and then, with the KV transfer parameters that this
one answers, to a decode worker (vLLM's KV connectors). Until the first byte of an answer is on its way to
the client, a worker that fails costs nothing but time: the request is sent to another one. After that the
stream ends with an error event, never in silence; nothing is generated twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import ipaddress
import json
import logging
import random
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import aiohttp
from aiohttp import web

from planner.domain import Policies
from planner.errors import InputError
from runtime.launch import IDENTITY_HEADER, WORKER_HEADER
from runtime.prefixes import CHARACTERS_PER_TOKEN, Blocks, blocks_of
from runtime.routing import POLICIES, PREFIX_POLICIES, Dice, Load, Prompt, fits, priority

LOG = logging.getLogger("fleetplan.router")
PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY_BYTES = 32 * 2**20
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
DEFAULT_OUTPUT_TOKENS = 16  # OpenAI's, where a request names none
TTFT_EDGES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REMOTE_DECODE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


class Backend(Protocol):
    """A worker as the router uses it: where it listens, by what its answers are known, what it has to do."""

    url: str
    identity: str
    load: Load


@dataclass(frozen=True, slots=True)
class Settings:
    """`max_in_flight` requests at most; `retries` other workers are tried; `patience_s` a request waits for
    some worker to come (back) up. `keys` are the API keys; none is needed on loopback. `longest_tokens` has
    the longest request that the engines take."""

    max_in_flight: int = 20_000
    retries: int = 3
    patience_s: float = 30.0
    max_body_bytes: int = MAX_BODY_BYTES
    longest_tokens: int = 131_072
    keys: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as far as routing needs it."""

    id: str
    path: str
    body: dict[str, Any] = field(repr=False)
    raw: bytes = field(repr=False)
    input_tokens: int
    output_tokens: int
    blocks: Blocks = field(default=(), repr=False)  # of the prompt, where the policy looks at prefixes

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class WorkerError(Exception):
    """A worker did not answer, or answered that it cannot."""


class ClientGoneError(Exception):
    """The client closed its connection."""


class Router:
    """Forwards requests for `model` to `backends`; `app` is the aiohttp application that does."""

    def __init__(
        self,
        backends: Sequence[Backend],
        model: str,
        policies: Policies,
        settings: Settings | None = None,
        *,
        seed: int = 0,
    ) -> None:
        front = (*POLICIES, *PREFIX_POLICIES)
        for name, known in ((policies.routing, front), (policies.decode_routing, tuple(POLICIES))):
            if name not in known:
                raise InputError(f"routing is {name!r}, must be one of {', '.join(known)} on real engines")
        self.model, self.settings, self.policies = model, settings or Settings(), policies
        self.front = [backend for backend in backends if backend.load.role != "decode"]
        self.back = [backend for backend in backends if backend.load.role == "decode"]
        self.dice = Dice(rng=random.Random(seed)), Dice(rng=random.Random(seed + 1))
        self.in_flight = 0
        self.outcomes: Counter[str] = Counter()
        self.ttft_counts: Counter[float] = Counter()
        self.ttft_sum_s = 0.0
        self.digests = [hashlib.sha256(key.encode()).digest() for key in self.settings.keys]
        self.app = web.Application(client_max_size=self.settings.max_body_bytes, middlewares=[self._guard])
        self.app.add_routes([web.post(path, self._complete) for path in PATHS])
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
            ]
        )
        self.app.cleanup_ctx.append(self._session)

    async def _session(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self.client:
            yield

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Keys, and every refusal as a JSON error, counted and logged without what the request held."""
        try:
            if self.digests and request.path != "/health" and not self._is_allowed(request):
                raise _refusal(401, "the API key is missing or wrong")
            answer: web.StreamResponse = await handler(request)
            return answer
        except web.HTTPException as refused:
            if refused.status == 413:
                refused = _refusal(413, f"the body is larger than {self.settings.max_body_bytes} bytes")
            elif refused.content_type != "application/json":
                refused = _refusal(refused.status, refused.reason)
            self.outcomes[f"refused_{refused.status}"] += 1
            LOG.warning("%s refused: %s", request.method, refused.status)
            raise refused from None

    def _is_allowed(self, request: web.Request) -> bool:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode(errors="surrogateescape")).digest()
        return kind.lower() == "bearer" and any(hmac.compare_digest(given, own) for own in self.digests)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self.in_flight >= self.settings.max_in_flight:
            raise _refusal(429, f"{self.in_flight} requests are in flight; try again later", retry_after_s=1)
        self.in_flight += 1
        outcome = "client_gone"
        try:
            asked = self._parse(request, await request.read())
            answer = _Answer(request, asked, asyncio.get_running_loop().time())
            with suppress(ClientGoneError):
                outcome = await self._try_workers(answer)
            return answer.response or web.Response(status=499)
        except web.HTTPException:
            outcome = ""  # the guard counts it
            raise
        finally:
            self.in_flight -= 1
            if outcome:
                self.outcomes[outcome] += 1

    def _parse(self, request: web.Request, raw: bytes) -> Asked:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            raise _refusal(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise _refusal(400, "the body is not a JSON object")
        if body.get("model", self.model) != self.model:
            raise _refusal(404, "no such model here; GET /v1/models lists the one there is")
        if "kv_transfer_params" in body:
            raise _refusal(400, "kv_transfer_params are the router's to set: they name hosts to fetch from")
        inputs = _input_tokens(body.get("prompt") if request.path == PATHS[0] else body.get("messages"))
        outputs = body.get("max_completion_tokens", body.get("max_tokens", DEFAULT_OUTPUT_TOKENS))
        if outputs is None:
            outputs = DEFAULT_OUTPUT_TOKENS
        if isinstance(outputs, bool) or not isinstance(outputs, int) or outputs < 1:
            raise _refusal(400, "max_tokens must be a whole number of at least 1")
        given = request.headers.get("X-Request-Id", "")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        if self.policies.queue != "fcfs":
            body["priority"] = priority(
                self.policies, inputs, outputs, time.monotonic(), self.settings.longest_tokens
            )
            raw = json.dumps(body).encode()
        looks = self.policies.routing in PREFIX_POLICIES
        blocks = blocks_of(body.get("prompt")) if looks else ()
        asked = Asked(name, request.path, body, raw, inputs, outputs, blocks)
        if not self._is_servable(asked):
            raise _refusal(400, f"{asked.tokens} tokens of prompt and output fit into no worker's KV cache")
        return asked

    def _is_servable(self, asked: Asked) -> bool:
        """Whether a mixed worker, or one of each kind of a pair, could ever hold it."""
        workers = (*self.front, *self.back)
        roles = {worker.load.role for worker in workers if fits(worker.load, asked.tokens)}
        return "mixed" in roles or {"prefill", "decode"} <= roles

    async def _try_workers(self, answer: _Answer) -> str:
        """Serve the request, on another worker where one fails before the answer began; its outcome."""
        failed: set[str] = set()
        for attempt in range(self.settings.retries + 1):
            try:
                await self._serve(answer, failed)
                return "answered"
            except WorkerError as error:
                LOG.warning("request %s: %s (try %d)", answer.asked.id, error, attempt + 1)
                if answer.response is not None:
                    await answer.end_with_error(str(error))
                    return "broken"
                self.outcomes["retries"] += 1
        raise _refusal(502, f"{self.settings.retries + 1} tries failed on {', '.join(sorted(failed))}")

    async def _serve(self, answer: _Answer, failed: set[str]) -> None:
        asked, raw = answer.asked, answer.asked.raw
        worker = await self._choose(self.front, self._front, asked, failed)
        with _Held(worker.load, asked, failed, promises=self.policies.routing != "min-ttft") as held:
            if worker.load.role == "mixed":
                await self._forward(worker, answer, raw, held)
                return
            parameters = await self._prefill(worker, answer)
        if parameters is None:
            return
        raw = json.dumps({**asked.body, "kv_transfer_params": parameters}).encode()
        decoder = await self._choose(self.back, self._back, asked, failed)
        with _Held(decoder.load, asked, failed) as held:
            await self._forward(decoder, answer, raw, held)

    def _front(self, loads: Sequence[Load], asked: Asked) -> Load:
        if (route := POLICIES.get(self.policies.routing)) is not None:
            return route(loads, asked.tokens, self.dice[0])
        prompt = Prompt(asked.tokens, asked.input_tokens, asked.blocks)
        return PREFIX_POLICIES[self.policies.routing](loads, prompt, self.policies)

    def _back(self, loads: Sequence[Load], asked: Asked) -> Load:
        return POLICIES[self.policies.decode_routing](loads, asked.tokens, self.dice[1])

    async def _choose(
        self,
        pool: Sequence[Backend],
        policy: Callable[[Sequence[Load], Asked], Load],
        asked: Asked,
        failed: set[str],
    ) -> Backend:
        """The policy's worker among those that are up; one that has failed this request before only where
        there is no other. Waits for a worker to come up."""
        deadline_s = asyncio.get_running_loop().time() + self.settings.patience_s
        while True:
            up = [backend for backend in pool if backend.load.is_up and fits(backend.load, asked.tokens)]
            if up:
                fresh = [backend for backend in up if backend.load.name not in failed] or up
                chosen = policy([backend.load for backend in fresh], asked)
                return next(backend for backend in fresh if backend.load is chosen)
            if asyncio.get_running_loop().time() > deadline_s:
                raise _refusal(503, "no worker that could take the request is up", retry_after_s=5)
            await asyncio.sleep(0.05)

    async def _prefill(self, worker: Backend, answer: _Answer) -> Any:
        """Have the prompt's KV computed; what the decode worker needs to fetch it, None if the worker refused
        the request and the client knows."""
        asked = answer.asked
        body = {key: value for key, value in asked.body.items() if key != "stream_options"}
        body |= {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        body |= {key: 1 for key in ("min_tokens", "max_completion_tokens") if key in body}
        async with self._post(worker, asked, json.dumps(body).encode()) as upstream:
            if upstream.status != 200:
                await answer.pass_on(upstream, worker.load.name)
                return None
            found = json.loads(await upstream.read())
        if not isinstance(found, dict) or not found.get("kv_transfer_params"):
            raise WorkerError(f"{worker.load.name} has prefilled without a KV connector")
        answer.prefilled_by = worker.load.name
        return found["kv_transfer_params"]

    async def _forward(self, worker: Backend, answer: _Answer, raw: bytes, held: _Held) -> None:
        """Send the request and pass the answer on as it comes."""
        name = worker.load.name
        async with self._post(worker, answer.asked, raw) as upstream:
            if "text/event-stream" not in upstream.headers.get("Content-Type", ""):
                await answer.pass_on(upstream, name)
                return
            async for chunk in upstream.content.iter_any():
                if answer.response is None:
                    held.prefilled()
                    await answer.begin(name)
                    self._note_ttft(asyncio.get_running_loop().time() - answer.start_s)
                await answer.write(chunk)
            if answer.response is None:
                raise WorkerError(f"{name} answered nothing")
            await answer.finish()

    @asynccontextmanager
    async def _post(self, worker: Backend, asked: Asked, raw: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Content-Type": "application/json", "X-Request-Id": asked.id}
        try:
            # a file, because aiohttp warns of bytes that are large
            body, identity = io.BytesIO(raw), worker.identity  # a restart gives it another one
            async with self.client.post(worker.url + asked.path, data=body, headers=headers) as upstream:
                is_ours = upstream.headers.get(IDENTITY_HEADER, "") == identity
                if not is_ours or upstream.status >= 500:
                    upstream.close()  # it may never read the rest of the body
                    what = f" answered {upstream.status}" if is_ours else ": another server is on its port"
                    raise WorkerError(f"{worker.load.name}{what}")
                yield upstream
        except (aiohttp.ClientError, TimeoutError) as error:
            raise WorkerError(f"{worker.load.name}: {type(error).__name__}") from None

    def _note_ttft(self, ttft_s: float) -> None:
        edge = next((edge for edge in TTFT_EDGES_S if ttft_s <= edge), float("inf"))
        self.ttft_counts[edge] += 1
        self.ttft_sum_s += ttft_s

    async def _health(self, _: web.Request) -> web.Response:
        """200 while a request could be served: a mixed worker, or one of each kind of a pair, is up."""
        roles = {backend.load.role for backend in (*self.front, *self.back) if backend.load.is_up}
        is_up = "mixed" in roles or {"prefill", "decode"} <= roles
        return web.json_response(
            {"status": "ok" if is_up else "no worker is up"}, status=200 if is_up else 503
        )

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        loads = [backend.load for backend in (*self.front, *self.back)]
        lines = ["# TYPE fleetplan_requests_total counter"]
        lines += [
            f'fleetplan_requests_total{{outcome="{outcome}"}} {count}'
            for outcome, count in sorted(self.outcomes.items())
        ]
        lines += ["# TYPE fleetplan_in_flight gauge", f"fleetplan_in_flight {self.in_flight}"]
        for name, values in (
            ("up", [int(load.is_up) for load in loads]),
            ("requests", [load.requests for load in loads]),
            ("pending_prompt_tokens", [load.pending_tokens for load in loads]),
        ):
            lines.append(f"# TYPE fleetplan_worker_{name} gauge")
            lines += [
                f"fleetplan_worker_{name}{{worker={json.dumps(load.name)}}} {value}"
                for load, value in zip(loads, values, strict=True)
            ]
        lines.append("# TYPE fleetplan_first_byte_seconds histogram")
        below = 0
        for edge in (*TTFT_EDGES_S, float("inf")):
            below += self.ttft_counts[edge]
            le = "+Inf" if edge == float("inf") else f"{edge:g}"
            lines.append(f'fleetplan_first_byte_seconds_bucket{{le="{le}"}} {below}')
        lines += [
            f"fleetplan_first_byte_seconds_sum {self.ttft_sum_s:.6f}",
            f"fleetplan_first_byte_seconds_count {below}",
        ]
        return web.Response(
            text="\n".join(lines) + "\n", headers={"Content-Type": "text/plain; version=0.0.4"}
        )


class _Held:
    """A request on a worker: counted in its load from here to the end of the block, whatever happens.

    With `promises` its blocks count as cached from the start, else once they are computed.
    """

    def __init__(self, load: Load, asked: Asked, failed: set[str], *, promises: bool = False) -> None:
        self.load, self.tokens, self.failed = load, asked.input_tokens, failed
        self.blocks, self.promises = asked.blocks, promises
        self.cached_tokens = load.sent.tokens(asked.blocks)
        self.is_prefilled = False

    def __enter__(self) -> Self:
        self.load.takes(self.tokens, self.cached_tokens)
        if self.promises:
            self.load.sent.add(self.blocks)
        return self

    def prefilled(self) -> None:
        if not self.is_prefilled:
            self.load.has_prefilled(self.tokens, self.cached_tokens)
            if not self.promises and self.load.role != "decode":
                self.load.sent.add(self.blocks)
        self.is_prefilled = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.prefilled()
        self.load.is_rid_of(self.tokens)
        if kind is WorkerError:
            self.failed.add(self.load.name)


class _Answer:
    """What goes back to the client; `response` is None until it has begun."""

    def __init__(self, request: web.Request, asked: Asked, start_s: float) -> None:
        self.request, self.asked, self.start_s = request, asked, start_s
        self.response: web.StreamResponse | None = None
        self.prefilled_by = ""

    def _headers(self, worker: str) -> dict[str, str]:
        workers = f"{self.prefilled_by},{worker}" if self.prefilled_by else worker
        return {"X-Request-Id": self.asked.id, WORKER_HEADER: workers}

    async def begin(self, worker: str) -> None:
        headers = {"Content-Type": "text/event-stream", **self._headers(worker)}
        self.response = web.StreamResponse(headers=headers)
        with _client():
            await self.response.prepare(self.request)

    async def write(self, chunk: bytes) -> None:
        assert self.response is not None
        with _client():
            await self.response.write(chunk)

    async def finish(self) -> None:
        assert self.response is not None
        with _client():
            await self.response.write_eof()

    async def end_with_error(self, message: str) -> None:
        """The last event of a stream whose worker failed."""
        event = {"error": {"message": message, "type": "worker_failed", "code": 502}}
        await self.write(f"data: {json.dumps(event)}\n\n".encode())
        await self.finish()

    async def pass_on(self, upstream: aiohttp.ClientResponse, worker: str) -> None:
        """A whole answer that is no stream, with its status."""
        body = await upstream.read()
        self.response = web.Response(
            body=body, status=upstream.status, content_type=upstream.content_type,
            headers=self._headers(worker),
        )  # fmt: skip


@contextmanager
def _client() -> Iterator[None]:
    """Errors of the client's connection, which aiohttp names like those of a worker's."""
    try:
        yield
    except ConnectionError:
        raise ClientGoneError from None


@asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, *, has_keys: bool = False
) -> AsyncIterator[str]:
    """Serve `app`; yields its URL. Refuses an address beyond this machine without API keys."""
    if not is_loopback(host) and not has_keys:
        raise InputError(f"--host {host}: reachable from outside, so API keys are needed; give --api-keys")
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise InputError(f"{host}:{port} cannot be listened on ({error.strerror or error})") from None
        name, bound = runner.addresses[0][:2]
        yield f"http://{f'[{name}]' if ':' in name else name}:{bound}"
    finally:
        await runner.cleanup()


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _input_tokens(prompt: object) -> int:
    """Exact for token ids, a guess for words."""
    if isinstance(prompt, str) and prompt:
        return -(-len(prompt) // CHARACTERS_PER_TOKEN)
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int for token in prompt):
            return len(prompt)
        if all(isinstance(message, dict) for message in prompt):
            return sum(len(str(message.get("content", ""))) for message in prompt) // CHARACTERS_PER_TOKEN + 1
    raise _refusal(400, "expected one prompt, as text or as a list of token ids (or messages in a chat)")


def _refusal(status: int, message: str, *, retry_after_s: int | None = None) -> web.HTTPException:
    """An HTTP error in the shape OpenAI's clients know."""
    kinds: dict[int, type[web.HTTPException]] = {
        400: web.HTTPBadRequest, 401: web.HTTPUnauthorized, 404: web.HTTPNotFound,
        429: web.HTTPTooManyRequests, 502: web.HTTPBadGateway, 503: web.HTTPServiceUnavailable,
    }  # fmt: skip
    text = json.dumps({"error": {"message": message, "type": "refused", "code": status}})
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
    if status == 413:
        return web.HTTPRequestEntityTooLarge(
            max_size=0, actual_size=0, text=text, content_type="application/json"
        )
    kind = kinds.get(status, web.HTTPBadRequest)
    return kind(text=text, content_type="application/json", headers=headers)
