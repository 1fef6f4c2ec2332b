"""One address in front of all workers, with OpenAI's API: chooses, forwards, retries, refuses, counts.

A request goes to a mixed worker, or to a prefill worker and then, with the KV transfer parameters that this
one answers, to a decode worker (vLLM's KV connectors); runtime/routing.py decides which. Until the first byte
of an answer is on its way to the client, a worker that fails costs nothing but time: the request is sent to
another one. After that the stream ends with an error event, never in silence; nothing is generated twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import ipaddress
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from planner.domain import KV_BLOCK_TOKENS, Fleet
from planner.errors import InputError
from runtime.launch import IDENTITY_HEADER, WORKER_HEADER
from runtime.prefixes import CHARACTERS_PER_TOKEN, blocks_of, words_of
from runtime.routing import LiveFleet, priority

LOG = logging.getLogger("fleetplan.router")
PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY_BYTES = 32 * 2**20
TENANT_HEADER = "X-Tenant"
TENANT_CHARACTERS = 256
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
QUEUES = ("fcfs", "sjf", "ljf", "srpt")  # that vLLM can be told
EVENT = b"data: {"  # of a stream, with a token
OUTPUT_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})')
DEFAULT_OUTPUT_TOKENS = 16  # OpenAI's, where a request names none
TTFT_EDGES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REMOTE_DECODE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


class Backend(Protocol):
    """A worker as the router uses it: where it listens, and by what the answers of this start are known."""

    name: str
    url: str
    identity: str
    is_up: bool


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
    blocks: Sequence[int] = field(default=(), repr=False)  # of the prompt, where the fleet keeps prefixes
    tenant: str = field(default="", repr=False)


class WorkerError(Exception):
    """A worker did not answer, or answered that it cannot."""


class ClientGoneError(Exception):
    """The client closed its connection."""


class Router:
    """Forwards requests for the fleet's LLM to `backends`, the fleet's workers in its order; `app` is the
    aiohttp application that does."""

    def __init__(self, backends: Sequence[Backend], fleet: Fleet, settings: Settings | None = None) -> None:
        self.model, self.policies, self.settings = fleet.llm.name, fleet.policies, settings or Settings()
        if self.policies.queue not in QUEUES:
            raise InputError(
                f"policies.queue is {self.policies.queue!r}, on real engines it must be one of "
                f"{', '.join(QUEUES)}"
            )
        self.live = LiveFleet(fleet)
        self.backends = list(backends)
        self.up: list[str | None] = [None] * len(self.backends)  # identities of those that were last seen up
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
            answer = _Answer(request, asked, _now_s())
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
        if not self.live.fits(inputs + outputs):
            raise _refusal(
                400, f"{inputs + outputs} tokens of prompt and output fit into no worker's KV cache"
            )
        given = request.headers.get("X-Request-Id", "")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        if self.policies.queue != "fcfs":
            body["priority"] = priority(
                self.policies, inputs, outputs, time.monotonic(), self.settings.longest_tokens
            )
            raw = json.dumps(body).encode()
        blocks = blocks_of(body.get("prompt", body.get("messages"))) if self.live.keeps_prefixes else ()
        tenant = _tenant(request, body) if self.live.is_by_tenant else ""
        return Asked(name, request.path, body, raw, inputs, outputs, blocks, tenant)

    async def _try_workers(self, answer: _Answer) -> str:
        """Serve the request, on another worker where one fails before the answer began; its outcome."""
        asked, failed = answer.asked, set[int]()
        answer.seat = self.live.ask(
            asked.input_tokens, asked.output_tokens, answer.start_s, names=asked.blocks, tenant=asked.tenant
        )
        try:
            for attempt in range(self.settings.retries + 1):
                try:
                    await self._serve(answer, failed)
                    return "answered"
                except WorkerError as error:
                    LOG.warning("request %s: %s (try %d)", asked.id, error, attempt + 1)
                    if answer.response is not None:
                        await answer.end_with_error(str(error))
                        return "broken"
                    self.outcomes["retries"] += 1
        finally:
            self.live.gone(answer.seat)
        names = ", ".join(sorted(self.backends[w].name for w in failed))
        raise _refusal(502, f"{self.settings.retries + 1} tries failed on {names}")

    async def _serve(self, answer: _Answer, failed: set[int]) -> None:
        raw = answer.asked.raw
        w = await self._choose(self.live.send, answer, failed)
        with self._at(w, answer, failed):
            if self.live.roles[w] == "mixed":
                await self._forward(self.backends[w], answer, raw)
                return
            parameters = await self._prefill(self.backends[w], answer)
        if parameters is None:
            return
        raw = json.dumps({**answer.asked.body, "kv_transfer_params": parameters}).encode()
        w = await self._choose(self.live.hand_off, answer, failed)
        with self._at(w, answer, failed):
            await self._forward(self.backends[w], answer, raw)

    @contextmanager
    def _at(self, w: int, answer: _Answer, failed: set[int]) -> Iterator[None]:
        """The request is on worker `w` to the end of the block, whatever happens."""
        try:
            yield
        except WorkerError:
            failed.add(w)
            raise
        finally:
            self.live.left(answer.seat, _now_s(), answer.tokens)

    async def _choose(
        self, choose: Callable[[int, float, Collection[int]], int | None], answer: _Answer, failed: set[int]
    ) -> int:
        """The policy's worker among those that are up; one that has failed this request before only where
        there is no other. Waits for a worker to come up."""
        deadline_s = _now_s() + self.settings.patience_s
        while True:
            now_s = _now_s()
            self._see_who_is_up(now_s)
            w = choose(answer.seat, now_s, failed)
            if w is None and failed:
                w = choose(answer.seat, now_s, ())
            if w is not None:
                return w
            if now_s > deadline_s:
                raise _refusal(503, "no worker that could take the request is up", retry_after_s=5)
            await asyncio.sleep(0.05)

    def _see_who_is_up(self, now_s: float) -> None:
        """A worker that has another identity than before was down in between."""
        up = [backend.identity if backend.is_up else None for backend in self.backends]
        if up == self.up:
            return
        for w, (before, now) in enumerate(zip(self.up, up, strict=True)):
            if before != now and before is not None:
                self.live.down(w, now_s)
            if now is not None:
                self.live.up(w)
        self.up = up

    async def _prefill(self, worker: Backend, answer: _Answer) -> Any:
        """Have the prompt's KV computed; what the decode worker needs to fetch it, None if the worker refused
        the request and the client knows."""
        asked = answer.asked
        body = {key: value for key, value in asked.body.items() if key != "stream_options"}
        body |= {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        body |= {key: 1 for key in ("min_tokens", "max_completion_tokens") if key in body}
        async with self._post(worker, asked, json.dumps(body).encode()) as upstream:
            if upstream.status != 200:
                await answer.pass_on(upstream, worker.name)
                return None
            found = json.loads(await upstream.read())
        if not isinstance(found, dict) or not found.get("kv_transfer_params"):
            raise WorkerError(f"{worker.name} has prefilled without a KV connector")
        answer.prefilled_by = worker.name
        self.live.computed(answer.seat, _now_s())
        return found["kv_transfer_params"]

    async def _forward(self, worker: Backend, answer: _Answer, raw: bytes) -> None:
        """Send the request and pass the answer on as it comes."""
        name, seat = worker.name, answer.seat
        async with self._post(worker, answer.asked, raw) as upstream:
            if "text/event-stream" not in upstream.headers.get("Content-Type", ""):
                await answer.pass_on(upstream, name)
                self.live.computed(seat, _now_s())
                return
            told = 0  # tokens that the fleet knows of
            async for chunk in upstream.content.iter_any():
                if answer.response is None:
                    now_s = _now_s()
                    self.live.computed(seat, now_s)
                    await answer.begin(name)
                    self._note_ttft(now_s - answer.start_s)
                answer.tokens += chunk.count(EVENT)
                if answer.tokens >= told + KV_BLOCK_TOKENS:
                    told = answer.tokens
                    self.live.grew(seat, told, _now_s())
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
                    raise WorkerError(f"{worker.name}{what}")
                yield upstream
        except (aiohttp.ClientError, TimeoutError) as error:
            raise WorkerError(f"{worker.name}: {type(error).__name__}") from None

    def _note_ttft(self, ttft_s: float) -> None:
        edge = next((edge for edge in TTFT_EDGES_S if ttft_s <= edge), float("inf"))
        self.ttft_counts[edge] += 1
        self.ttft_sum_s += ttft_s

    async def _health(self, _: web.Request) -> web.Response:
        """200 while a request could be served: a mixed worker, or one of each kind of a pair, is up."""
        workers = zip(self.backends, self.live.roles, strict=True)
        roles = {role for backend, role in workers if backend.is_up}
        is_up = "mixed" in roles or {"prefill", "decode"} <= roles
        return web.json_response(
            {"status": "ok" if is_up else "no worker is up"}, status=200 if is_up else 503
        )

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        workers = self.live.workers
        lines = ["# TYPE fleetplan_requests_total counter"]
        lines += [
            f'fleetplan_requests_total{{outcome="{outcome}"}} {count}'
            for outcome, count in sorted(self.outcomes.items())
        ]
        lines += ["# TYPE fleetplan_in_flight gauge", f"fleetplan_in_flight {self.in_flight}"]
        for name, values in (
            ("up", [backend.is_up for backend in self.backends]),
            ("requests", workers["requests"]),
            ("pending_prompt_tokens", workers["pending_tokens"]),
        ):
            lines.append(f"# TYPE fleetplan_worker_{name} gauge")
            lines += [
                f"fleetplan_worker_{name}{{worker={json.dumps(backend.name)}}} {value:.0f}"
                for backend, value in zip(self.backends, values, strict=True)
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


class _Answer:
    """What goes back to the client; `response` is None until it has begun. `tokens` have come so far, by the
    events of the stream or the count in a whole answer."""

    def __init__(self, request: web.Request, asked: Asked, start_s: float) -> None:
        self.request, self.asked, self.start_s = request, asked, start_s
        self.response: web.StreamResponse | None = None
        self.prefilled_by = ""
        self.seat = -1
        self.tokens = 0

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
        if upstream.status == 200:
            told = OUTPUT_TOKENS.search(body)
            self.tokens = int(told[1]) if told else self.asked.output_tokens
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
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return len(prompt)
    if words := words_of(prompt):
        return -(-len(words) // CHARACTERS_PER_TOKEN)
    raise _refusal(400, "expected one prompt, as text or as a list of token ids (or messages in a chat)")


def _tenant(request: web.Request, body: dict[str, Any]) -> str:
    """Who asks: what a gateway says in a header, else OpenAI's field `user`; '' where nobody says."""
    tenant = request.headers.get(TENANT_HEADER) or body.get("user") or ""
    if not isinstance(tenant, str) or len(tenant) > TENANT_CHARACTERS:
        raise _refusal(400, f"user must be text of at most {TENANT_CHARACTERS} characters")
    return tenant


def _now_s() -> float:
    return asyncio.get_running_loop().time()


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
