"""The live router: an HTTP server with OpenAI's API that forwards requests to workers and retries failures.

A request goes to a mixed worker, or to a prefill worker and then to a decode worker with the KV transfer
parameters in the prefill worker's answer (vLLM's KV connectors). planner/runtime/live_routing.py chooses the
workers. If a worker fails before the first byte of its answer has gone to the client, the request is sent to
another worker. After the first byte nothing is generated again: the stream ends with an error event. Answers
are checked (planner/runtime/upstream.py): a stream that breaks off, an invalid event and an answer that is
too long are failures too. planner/runtime/trust.py decides which workers get no requests for a while, and
which request has killed too many workers to be tried again.
"""

import asyncio
import hashlib
import hmac
import io
import json
import logging
from bisect import insort
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import numpy.typing as npt
from aiohttp import web
from aiohttp.http import HttpProcessingError

from planner.documents.warm_up import WarmPrompt
from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.fleet import Fleet, Role
from planner.policies import QUEUE, ROUTING, VLLM, find_router_difference
from planner.runtime import router_metrics
from planner.runtime.connection_limits import ConnectionLimits, OpenConnections
from planner.runtime.exchange import (
    COMPLETIONS_PATH,
    PATHS,
    ClientGoneError,
    Reply,
    RoutedRequest,
    read_body,
    read_request,
    refusal_response,
)
from planner.runtime.launch import IDENTITY_HEADER
from planner.runtime.live_routing import LiveFleet
from planner.runtime.prompt_blocks import blocks_of
from planner.runtime.trust import STRIKES, Trust
from planner.runtime.upstream import (
    REFUSAL_BYTES,
    StreamCheck,
    WorkerDiedError,
    WorkerError,
    WorkerRefusedError,
    read_answer,
    read_limited,
)

LOG = logging.getLogger("fleetplan.router")
MAX_BODY_BYTES = 32 * 2**20  # A prompt of a million tokens fits, and so do several images.
ANSWER_BYTES = 256 * 2**20  # Enough for 131,072 tokens with 20 log-probabilities each.
# HTTP statuses by which a worker says that the request is wrong; any other status but 200 is its own fault.
REQUEST_FAULTS = (400, 413, 422)
# Time between two checks for workers that have come up: short against the minutes of a start.
WARM_UP_CHECK_S = 1.0
# A worker must answer a health check within this time before it gets a suspect (trust.py). A client waits
# meanwhile, so it is shorter than the checks of workers.py.
HEALTH_CHECK_S = 2.0
CONNECT_S = 5.0  # A worker that does not accept a connection within this time has failed.
KEEP_ALIVE_S = 60.0  # An idle connection to a worker is kept open for this time.
# From the last event of a stream to its end; waiting longer would cost more than a new connection.
STREAM_END_S = 1.0
WATCH_EVERY_S = 0.5  # Time between two checks of all attempts, whose limits are seconds to minutes.
# A request for which no worker is free tries again at each change, and after this time in any case.
CHOOSE_AGAIN_S = 0.05
# In a request to a prefill worker: compute the KV cache, and say in the answer where it can be fetched.
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Backend(Protocol):
    """A worker as the router sees it. `identity` names the engine's present start; answers contain it."""

    name: str
    url: str
    identity: str
    is_up: bool
    starts: int  # How often we have started its engine.
    gave_up: str  # Why the engine is not started again for a while; else empty.
    can_change_role: bool  # Whether `change_role` can restart the engine in another role.

    def change_role(self, role: Role) -> None: ...


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The router's limits. Their defaults end what hangs, and leave alone what is only slow."""

    max_in_flight: int = 20_000  # Further requests are refused.
    retries: int = 3  # After a failure up to this many other workers are tried.
    patience_s: float = 30.0  # A request waits at most this time for a worker to come up.
    max_body_bytes: int = MAX_BODY_BYTES
    longest_tokens: int = 131_072  # Prompt and output of the longest request that the engines take.
    keys: tuple[str, ...] = field(default=(), repr=False)  # API keys of clients; without any, none is needed.
    body_s: float = 60.0  # A body must arrive within this time.
    client_s: float = 60.0  # A client must read what is written to it within this time.
    silence_s: float = 300.0  # A stream is ended after this time without a byte.
    first_byte_s: float = 600.0  # A stream must begin within this time: a long queue, then a long prompt.
    whole_s: float = 3600.0  # An answer that is no stream must be complete within this time.
    answer_bytes: int = ANSWER_BYTES  # No answer may be larger.
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)  # Limits on connections.


@dataclass(slots=True)
class _KeptPrompt:
    """A prompt that a worker keeps in its cache: the number of its blocks, the name of the last one, and when
    it was last used. The name depends on all blocks before it (prompt_blocks.py).
    """

    warm_prompt: WarmPrompt
    blocks: int
    last_block: int
    used_s: float


class LiveRouter:
    """Forwards requests for the fleet's LLM to `backends`, which are the fleet's workers in its order.

    `app` is the aiohttp application. For `lengths` and `history` see `LiveFleet`. Raises InputError for
    policies that real engines cannot run.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        fleet: Fleet,
        settings: RouterSettings | None = None,
        *,
        lengths: tuple[float, float] | None = None,
        history: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        warm_up: Sequence[WarmPrompt] = (),
    ) -> None:
        if warm_up and not ROUTING[fleet.policies.routing].pins:
            raise InputError(
                f"--warm-up: routing {fleet.policies.routing!r} does not go by what is kept; leave it out"
            )
        self.fleet, self.settings = fleet, settings or RouterSettings()
        if find_router_difference(QUEUE[fleet.policies.queue], VLLM).is_lacking:
            queues = ", ".join(
                row.name for row in QUEUE.values() if not find_router_difference(row, VLLM).is_lacking
            )
            raise InputError(
                f"policies.queue is {fleet.policies.queue!r}, on real engines it must be one of {queues}"
            )
        self.live = LiveFleet(fleet, lengths=lengths, history=history)
        self.backends = list(backends)
        if self.live.changes_roles and not all(backend.can_change_role for backend in self.backends):
            raise InputError(
                f"policies.pools is {fleet.policies.pools!r}: engines that are started elsewhere keep their "
                "role; leave it out, or let `plan serve` start them"
            )
        self.warm_prompts = tuple(warm_up)
        # The identity (`Backend`) with which each worker was warmed up; None: never.
        self.warmed_identities: list[str | None] = [None] * len(self.backends)
        self.warm_up_lock = asyncio.Lock()
        self.kept_prompts: list[list[_KeptPrompt]] = [[] for _ in self.backends]
        self.keep_alives = 0  # How often a prompt was sent again so that its worker keeps it cached.
        # The identity with which each worker was last seen up.
        self.seen_identities: list[str | None] = [None] * len(self.backends)
        # By worker: the requests on it, each with the timeout that ends its block in `_on_worker`.
        self.attempts: list[dict[asyncio.Timeout, Reply]] = [{} for _ in self.backends]
        self.connections = OpenConnections(self.settings.limits)
        # The requests that a policy holds back, in order of arrival: (arrival time, seat in `live`).
        self.held_back: list[tuple[float, int]] = []
        # An event for each request in `held_back`, set when the request becomes the first.
        self.becomes_first: dict[tuple[float, int], asyncio.Event] = {}
        # Is set when a change may allow the first request in `held_back` to be sent.
        self.may_be_sent = asyncio.Event()
        # The requests that wait at the router for their worker, by seat: the worker, and whether it got them.
        self.held: dict[int, tuple[int, asyncio.Future[bool]]] = {}
        self.is_draining = False
        self.in_flight = 0
        self.outcomes: Counter[str] = Counter()  # Outcomes of requests, each counted once.
        self.retries = self.poison = 0  # `poison` counts requests refused because workers died of them.
        self.trust = Trust(len(self.backends))
        self.ttft_counts: Counter[float] = Counter()
        self.ttft_sum_s = 0.0
        self.digests = [hashlib.sha256(key.encode()).digest() for key in self.settings.keys]
        self.app = web.Application(client_max_size=self.settings.max_body_bytes, middlewares=[self._guard])
        self.app.add_routes([web.post(path, self._answer_request) for path in PATHS])
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
            ]
        )
        self.app.cleanup_ctx.append(self._hold_client_open)
        if self.warm_prompts:
            self.app.cleanup_ctx.append(self._keep_prompts_cached)

    async def _keep_prompts_cached(self, _: web.Application) -> AsyncIterator[None]:
        """While the router runs, warm up workers that have come up, and keep prompts in their caches."""
        # With four checks in the shortest `keep_alive_s` a prompt is at most a quarter of it late.
        keep_alives_s = [each.keep_alive_s for each in self.warm_prompts if each.keep_alive_s is not None]
        check_every_s = min([WARM_UP_CHECK_S, *(keep_alive_s / 4 for keep_alive_s in keep_alives_s)])

        async def work() -> None:
            while True:
                await self.warm_up()
                await asyncio.gather(*map(self._keep_alive, range(len(self.backends))))
                await asyncio.sleep(check_every_s)

        task = asyncio.ensure_future(work())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def warm_up(self) -> None:
        """Have each worker that is up compute its `warm_prompts`, once after each of its starts."""
        async with self.warm_up_lock:
            for w, backend in enumerate(self.backends):
                identity = backend.identity
                if not backend.is_up or self.warmed_identities[w] == identity:
                    continue
                warm_prompts = [each for each in self.warm_prompts if each.worker == w]
                # A list, not a generator, so that every prompt is computed, also after one has failed.
                if all([await self._compute_prompt(backend, each.prompt) for each in warm_prompts]):
                    # `live` forgets pins when it notes a restart, so it must know of this start first.
                    self._note_who_is_up(_now_s())
                    self.warmed_identities[w], self.kept_prompts[w] = identity, []
                    for each in warm_prompts:
                        # `blocks_of` takes token ids as a list, as they come in the JSON of requests.
                        prompt = list(each.prompt) if isinstance(each.prompt, tuple) else each.prompt
                        blocks = blocks_of(prompt)
                        self.live.pin_prompt(w, blocks)
                        if each.keep_alive_s is not None and blocks:
                            self.kept_prompts[w].append(_KeptPrompt(each, len(blocks), blocks[-1], _now_s()))

    async def _keep_alive(self, w: int) -> None:
        """Send a worker each of its kept prompts that no request has begun with for `keep_alive_s`."""
        backend = self.backends[w]
        for each in self.kept_prompts[w]:
            if not backend.is_up or self.warmed_identities[w] != backend.identity:
                return
            every_s, now_s = each.warm_prompt.keep_alive_s, _now_s()
            if every_s is not None and now_s - each.used_s >= every_s:
                each.used_s = now_s
                self.keep_alives += 1
                await self._compute_prompt(backend, each.warm_prompt.prompt)

    def _note_use(self, w: int, blocks: Sequence[int]) -> None:
        """Note that a prompt with these blocks goes to `w`, and so uses each kept prompt that begins it."""
        for each in self.kept_prompts[w]:
            if len(blocks) >= each.blocks and blocks[each.blocks - 1] == each.last_block:
                each.used_s = _now_s()

    async def _compute_prompt(self, worker: Backend, prompt: tuple[int, ...] | str) -> bool:
        """Have the worker compute the prompt, token ids or text; returns whether it did.

        A failure is logged, and `_keep_prompts_cached` tries again.
        """
        body = {"model": self.fleet.llm.name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        identity = worker.identity
        try:
            url = worker.url + COMPLETIONS_PATH
            async with self.client.post(url, json=body, allow_redirects=False) as answer:
                is_ours = answer.headers.get(IDENTITY_HEADER, "") == identity
                if answer.status == 200 and is_ours:
                    # An answer of one token is no longer than a refusal may be.
                    await read_limited(answer, worker.name, REFUSAL_BYTES)
                    return True
                why = f"HTTP {answer.status}" if is_ours else "another server is on its port"
        except (aiohttp.ClientError, HttpProcessingError, TimeoutError, WorkerError) as error:
            why = type(error).__name__
        LOG.warning("warm-up of %s: %s", worker.name, why)
        return False

    async def _hold_client_open(self, _: web.Application) -> AsyncIterator[None]:
        """While the router runs, keep `client` open, which sends to workers, and watch the attempts."""
        # `_watch` limits how long an answer takes, and `max_in_flight` the number of connections.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        async with aiohttp.ClientSession(
            timeout=timeout,
            connector=connector,
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,  # Workers are asked for unpacked answers; one that packs them fails.
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as self.client:
            watching = asyncio.ensure_future(self._watch())
            yield
            watching.cancel()

    async def _watch(self) -> None:
        """End attempts on workers that went down, answers that begin late or have stopped, and the
        connections of clients that do not read (the times are those of `exchange.Reply`). Everything is
        checked every WATCH_EVERY_S.
        """
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            now_s = _now_s()
            self._note_who_is_up(now_s)
            for attempts in self.attempts:
                for timeout, reply in attempts.items():
                    if reply.writes_since_s and now_s - reply.writes_since_s > self.settings.client_s:
                        reply.abort()
                    elif reply.heard_s and now_s - reply.heard_s > self.settings.silence_s:
                        reply.overdue = f"sent nothing for {self.settings.silence_s:g} s"
                        _end_block(timeout, now_s)
                    elif not reply.heard_s and now_s - reply.sent_s > reply.limit_s:
                        reply.overdue = f"has not begun to answer within {reply.limit_s:g} s"
                        _end_block(timeout, now_s)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Check the API key, then handle the request.

        Every refusal is answered as a JSON error, counted, and logged without the content of the request.
        """
        try:
            if self.digests and request.path != "/health" and not self._is_allowed(request):
                raise refusal_response(401, "the API key is missing or wrong")
            if self.is_draining and request.path in PATHS:
                raise refusal_response(503, "this server is about to stop", retry_after_s=5)
            answer: web.StreamResponse = await handler(request)
            return answer
        except web.HTTPException as refused:
            if refused.status == 413:
                refused = refusal_response(
                    413, f"the body is larger than {self.settings.max_body_bytes} bytes"
                )
            elif refused.content_type != "application/json":  # The refusal is aiohttp's own.
                allowed = refused.headers.get("Allow")
                refused = refusal_response(refused.status, refused.reason)
                if allowed:
                    refused.headers["Allow"] = allowed
            self.outcomes[f"refused_{refused.status}"] += 1
            LOG.warning("%s refused: %s", request.method, refused.status)
            raise refused from None

    def _is_allowed(self, request: web.Request) -> bool:
        """Whether the request has one of our API keys; the comparison takes as long for a wrong one."""
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode(errors="surrogateescape")).digest()
        return kind.lower() == "bearer" and any(
            hmac.compare_digest(digest, allowed) for allowed in self.digests
        )

    async def _answer_request(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion, and count its outcome."""
        if self.in_flight >= self.settings.max_in_flight:
            raise refusal_response(
                429, f"{self.in_flight} requests are in flight; try again later", retry_after_s=1
            )
        self.in_flight += 1
        outcome = "client_gone"
        try:
            raw = await self._body(request)
            routed_request = read_request(request, raw, self.fleet, self.live, self.settings.longest_tokens)
            reply = Reply(request, routed_request, _now_s())
            with suppress(ClientGoneError):
                outcome = await self._try_workers(reply)
            return reply.response or web.Response(status=499)  # The client is gone; nobody reads the status.
        except web.HTTPException:
            outcome = ""  # The guard counts the outcome.
            raise
        finally:
            self.in_flight -= 1
            if outcome:
                self.outcomes[outcome] += 1

    async def _body(self, request: web.Request) -> bytes:
        """The body of a request, which must arrive within `body_s`."""
        try:
            async with asyncio.timeout(self.settings.body_s):
                return await read_body(request, self.settings.max_body_bytes)
        except TimeoutError:
            raise refusal_response(408, f"the body did not come within {self.settings.body_s:g} s") from None

    async def _try_workers(self, reply: Reply) -> str:
        """Serve the request and return its outcome.

        If a worker fails before the answer has begun, another one is tried.
        """
        routed_request = reply.routed_request
        failed: set[int] = set()
        reply.seat = self.live.take_seat(
            routed_request.input_tokens,
            routed_request.output_tokens,
            reply.start_s,
            names=routed_request.blocks,
            tenant=routed_request.tenant,
        )
        status, tries = 502, 0  # `status` is the answer if all tries fail.
        try:
            while tries <= self.settings.retries:
                tries += 1
                try:
                    await self._serve(reply, failed)
                    return "broken" if reply.is_broken else "answered"
                except WorkerError as error:
                    LOG.warning("request %s: %s (try %d)", routed_request.id, error, tries)
                    if reply.response is not None:
                        await reply.end_with_error(str(error))
                        return "broken"
                    if reply.strikes >= STRIKES:
                        self.poison += 1
                        LOG.error("request %s killed %d workers: refused", routed_request.id, reply.strikes)
                        why = (
                            f"request {routed_request.id}: {reply.strikes} workers died of it; not "
                            "tried again"
                        )
                        raise refusal_response(422, why) from None
                    status = 502
                    if isinstance(error, WorkerRefusedError):
                        status = 429 if error.status == 429 else 502
                        backends = enumerate(self.backends)
                        if all(w in failed or not backend.is_up for w, backend in backends):
                            break  # Every worker that is up has refused the request.
                    self.retries += 1
        finally:
            self.live.release_seat(reply.seat)
        failed_names = ", ".join(sorted(self.backends[w].name for w in failed))
        why = f"request {routed_request.id}: {tries} tries failed on {failed_names}"
        raise refusal_response(status, why, retry_after_s=1 if status == 429 else None)

    async def _serve(self, reply: Reply, failed: set[int]) -> None:
        """One try: the whole request on a mixed worker, or its prefill and then its decode on two workers."""
        w = await self._choose_for_prompt(reply, failed)
        self._note_use(w, reply.routed_request.blocks)
        raw = self._body_with_priority(reply)
        limit_s = self.settings.first_byte_s if reply.routed_request.is_stream else self.settings.whole_s
        is_mixed = self.live.roles[w] == "mixed"
        async with self._on_worker(w, reply, failed, limit_s if is_mixed else self.settings.first_byte_s):
            if is_mixed:
                await self._forward(w, reply, raw)
                return
            parameters = await self._prefill(self.backends[w], reply)
        if parameters is None:
            return  # The worker refused the request, and the client has got the refusal.
        raw = json.dumps({**reply.routed_request.body, "kv_transfer_params": parameters}).encode()
        w = await self._choose(self.live.hand_off, reply, failed)
        async with self._on_worker(w, reply, failed, limit_s):
            await self._forward(w, reply, raw)

    async def _choose_for_prompt(self, reply: Reply, failed: set[int]) -> int:
        """The worker for the request's prompt, once the prompt may be sent there."""
        while True:
            async with self._first_held_back(reply):
                w = await self._choose(self.live.send_to_worker, reply, failed)
            self._send_held()
            if not self.live.is_held(reply.seat) or await self._is_sent(w, reply.seat):
                return w

    async def _is_sent(self, w: int, seat: int) -> bool:
        """Wait until it is the request's turn on worker `w`; False if the worker goes down before."""
        is_sent = False
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.held[seat] = w, turn
        try:
            is_sent = await turn
        finally:
            del self.held[seat]
            if not is_sent:  # Its client may be gone, too.
                self.live.note_left(seat, _now_s())
        return is_sent

    def _send_held(self) -> None:
        """Let the requests go that are sent to their workers now."""
        for seat in self.live.send_held():
            if seat in self.held:  # It does not wait if it is sent as soon as it has a worker.
                _set_result(self.held[seat][1], True)

    def _note_computed(self, seat: int, now_s: float) -> None:
        self.live.note_computed(seat, now_s)
        self._send_held()

    @asynccontextmanager
    async def _first_held_back(self, reply: Reply) -> AsyncIterator[None]:
        """Run the block when this request is first in `held_back`; at once if the policy holds none back."""
        if not self.live.holds_back:
            yield
            return
        place = (reply.start_s, reply.seat)
        insort(self.held_back, place)
        self.becomes_first[place] = becomes_first = asyncio.Event()
        try:
            # An earlier request that is retried may enter `held_back` before one that has become the first.
            while self.held_back[0] != place:
                becomes_first.clear()
                await becomes_first.wait()
            yield
        finally:
            self.held_back.remove(place)
            del self.becomes_first[place]
            if self.held_back:
                self.becomes_first[self.held_back[0]].set()

    async def _wait_for_change(self) -> None:
        """Wait until something may have made a worker free, CHOOSE_AGAIN_S at most."""
        self.may_be_sent.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.may_be_sent.wait(), CHOOSE_AGAIN_S)

    def _body_with_priority(self, reply: Reply) -> bytes:
        """The request's body, with a `priority` if the router orders its worker's queue."""
        number = self.live.queue_number(reply.seat)
        if number is None:
            return reply.routed_request.raw
        reply.routed_request.body["priority"] = number
        return json.dumps(reply.routed_request.body).encode()

    @asynccontextmanager
    async def _on_worker(self, w: int, reply: Reply, failed: set[int], limit_s: float) -> AsyncIterator[None]:
        """Note the request as one on worker `w` while the block runs.

        The block ends with a WorkerError if the worker goes down or has not begun to answer within `limit_s`;
        then `w` joins `failed`.
        """
        timeout, attempts = asyncio.timeout(None), self.attempts[w]  # `_watch` ends the block by `timeout`.
        reply.sent_s, reply.limit_s, reply.heard_s, reply.overdue = _now_s(), limit_s, 0.0, ""
        # If a worker dies, only a request that was alone on it is known to be the cause (trust.py).
        reply.is_shared = bool(attempts)
        if len(attempts) == 1:  # If there are more, each was marked when the second one came.
            next(iter(attempts.values())).is_shared = True
        try:
            try:
                async with timeout:
                    attempts[timeout] = reply
                    yield
            except TimeoutError:
                name = self.backends[w].name
                if reply.overdue:
                    raise WorkerError(f"{name} {reply.overdue}") from None
                raise WorkerDiedError(f"{name} no longer answers") from None
        except WorkerError as error:
            failed.add(w)
            if isinstance(error, WorkerDiedError):
                self.trust.note_death(w, reply)
            self._note_failure(w, error)
            raise
        finally:
            attempts.pop(timeout, None)
            self.trust.end_trial(w, reply)
            self.live.note_left(reply.seat, _now_s(), reply.tokens)
            self.may_be_sent.set()
            self._send_held()

    def _note_failure(self, w: int, error: WorkerError) -> None:
        """Count a failure of worker `w`; after several it is passed over for a while."""
        is_refusal = isinstance(error, WorkerRefusedError)
        rest_s = self.trust.note_failure(w, _now_s(), is_refusal=is_refusal)
        if rest_s:
            LOG.warning("worker %s: passed over for %g s: %s", self.backends[w].name, rest_s, error)

    async def _choose(
        self, choose: Callable[[int, float, Collection[int]], int | None], reply: Reply, failed: set[int]
    ) -> int:
        """The worker that the policy chooses among those that are up; waits up to `patience_s` for one.

        A worker that has failed this request before, or others lately, is chosen only if there is no other.
        """
        deadline_s = _now_s() + self.settings.patience_s
        silent: set[int] = set()  # Workers that did not answer the health check before a suspect.
        while True:
            now_s = _now_s()
            self._note_who_is_up(now_s)
            # A suspect goes neither where another suspect is on trial nor where a health check failed.
            barred = self.trust.with_suspects(now_s) | silent if reply.is_suspect else set[int]()
            w = self._pick(choose, reply.seat, failed, barred, now_s)
            self._restart_role_changed()
            if w is not None:
                if not reply.is_suspect or await self._passes_health_check(w, reply):
                    return w
                silent.add(w)
                continue
            # `patience_s` limits only the wait for a worker that is down. If a worker that is up will take
            # this request later, because it is busy or has another suspect on trial, the deadline moves on.
            if self.live.is_held_back(reply.seat) or barred - silent:
                deadline_s = now_s + self.settings.patience_s
            elif now_s > deadline_s:
                raise refusal_response(503, "no worker that could take the request is up", retry_after_s=5)
            silent.clear()
            await self._wait_for_change()

    def _pick(
        self,
        choose: Callable[[int, float, Collection[int]], int | None],
        seat: int,
        failed: set[int],
        barred: set[int],
        now_s: float,
    ) -> int | None:
        """The worker that the policy chooses, or None.

        The first attempt excludes the workers that failed this request, those that failed others lately, and
        those that are `barred`. If no worker is left, the second allows those that failed others, and the
        third those that failed this request too; no attempt allows `barred` workers.
        """
        resting = self.trust.resting(now_s)
        strictest = [failed.union(resting, barred)] if resting else []
        for excluded in (*strictest, failed | barred, barred):
            w = choose(seat, now_s, excluded)
            # If nothing was excluded, further attempts find no more. A request that is held back waits for a
            # worker that was not excluded, so it does not go to an excluded one.
            if w is not None or not excluded or self.live.is_held_back(seat, excluded):
                return w
        return None

    async def _passes_health_check(self, w: int, reply: Reply) -> bool:
        """Begin a suspect's trial on a worker (trust.py); returns whether the worker answers a health check.

        Without this check, the suspect would be blamed for the death of a worker that was dead before. If the
        worker does not answer, the trial ends here.
        """
        worker, is_alive = self.backends[w], False
        self.trust.begin_trial(w, reply, _now_s())
        timeout = aiohttp.ClientTimeout(total=HEALTH_CHECK_S)
        try:
            health_request = self.client.get(f"{worker.url}/health", timeout=timeout, allow_redirects=False)
            async with health_request as health_answer:
                is_alive = health_answer.headers.get(IDENTITY_HEADER, "") == worker.identity
        except (aiohttp.ClientError, HttpProcessingError, TimeoutError):
            pass
        finally:
            if not is_alive:
                self.trust.end_trial(w, reply)
                self.live.note_left(reply.seat, _now_s())
        return is_alive

    def _restart_role_changed(self) -> None:
        """Restart idle workers whose role the policy has changed, unless a change takes no restart
        (`flip_restart_s` is 0). No request goes to them until they are up again.
        """
        while self.live.role_changed:
            w = self.live.role_changed.pop()
            LOG.warning("worker %s: becomes a %s worker", self.backends[w].name, self.live.roles[w])
            if self.fleet.policies.flip_restart_s > 0:
                self.backends[w].change_role(self.live.roles[w])

    def _note_who_is_up(self, now_s: float) -> None:
        """Note which workers went down or came up. A worker with a new identity has done both."""
        identities = [backend.identity if backend.is_up else None for backend in self.backends]
        if identities == self.seen_identities:
            return
        for w, (before, after) in enumerate(zip(self.seen_identities, identities, strict=True)):
            if before == after:
                continue
            if before is not None:
                self.live.note_down(w, now_s)
                for timeout in self.attempts[w]:
                    _end_block(timeout, now_s)
                for worker, turn in self.held.values():
                    if worker == w:
                        _set_result(turn, False)
            if after is not None:
                self.live.note_up(w, now_s)
                self.trust.note_answer(w)
        self.seen_identities = identities

    async def _prefill(self, worker: Backend, reply: Reply) -> Any:
        """Have the prompt's KV computed and return the parameters by which the decode worker fetches it.

        Returns None if the worker refused the request; the refusal has gone to the client then.
        """
        routed_request = reply.routed_request
        body = {key: value for key, value in routed_request.body.items() if key != "stream_options"}
        body |= {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        # `stream_options` goes only with a stream, and these keys would contradict `max_tokens`.
        body |= {key: 1 for key in ("min_tokens", "max_completion_tokens") if key in body}
        async with self._post(worker, routed_request, json.dumps(body).encode()) as upstream:
            if upstream.status != 200:
                await reply.pass_on(upstream, worker.name, self.settings.answer_bytes)
                return None
            raw_answer = await read_limited(upstream, worker.name, self.settings.answer_bytes)
        document, _ = read_answer(raw_answer, worker.name, routed_request.most_tokens)
        if not document.get("kv_transfer_params"):
            raise WorkerError(f"{worker.name} has prefilled without a KV connector")
        reply.prefilled_by = worker.name
        self._note_computed(reply.seat, _now_s())
        return document["kv_transfer_params"]

    async def _forward(self, w: int, reply: Reply, raw: bytes) -> None:
        """Send the request to worker `w` and pass its answer on to the client as it comes."""
        name, seat, routed_request = self.backends[w].name, reply.seat, reply.routed_request
        most_bytes = self.settings.answer_bytes
        async with self._post(self.backends[w], routed_request, raw) as upstream:
            if "text/event-stream" not in upstream.headers.get("Content-Type", ""):
                await reply.pass_on(upstream, name, most_bytes)
                if reply.tokens:  # A refusal has no tokens.
                    self._note_computed(seat, _now_s())
                    self.trust.note_answer(w)
                return
            check = StreamCheck(
                name,
                most_bytes=most_bytes,
                most_tokens=routed_request.most_tokens,
                choices=routed_request.choices,
            )
            noted_tokens = 0  # Output tokens that `live` knows of; it is told once per KV block.
            async for lines in _read_lines(upstream, check, reply):
                now_s = reply.heard_s
                if reply.response is None:
                    if check.error_code >= 500:
                        raise WorkerError(f"{name} answered error {check.error_code} in its stream")
                    self._note_computed(seat, now_s)
                    self.trust.end_trial(w, reply)
                    self.may_be_sent.set()
                    await reply.begin(name)
                    self._note_ttft(now_s - reply.start_s)
                reply.tokens = check.tokens
                if reply.tokens >= noted_tokens + KV_BLOCK_TOKENS:
                    noted_tokens = reply.tokens
                    self.live.note_output(seat, noted_tokens, now_s)
                await reply.write(lines, now_s)
            if check.error_code:
                reply.is_broken = True
            else:
                self.trust.note_answer(w)
            await reply.finish()

    @asynccontextmanager
    async def _post(
        self, worker: Backend, routed_request: RoutedRequest, raw: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the request and yield the worker's answer, if its status is 200 or a fault of the request.

        Raises WorkerError for any other status, and if no answer comes.
        """
        headers = {"Content-Type": "application/json", "X-Request-Id": routed_request.id}
        try:
            body = io.BytesIO(raw)  # Large bodies are sent as a file, because aiohttp warns of large bytes.
            identity = worker.identity  # A restart during the request changes it.
            sending = self.client.post(
                worker.url + routed_request.path, data=body, headers=headers, allow_redirects=False
            )
            async with sending as upstream:
                is_ours = upstream.headers.get(IDENTITY_HEADER, "") == identity
                if not is_ours or upstream.status not in (200, *REQUEST_FAULTS):
                    upstream.close()  # The worker may never read the rest of the body.
                    if not is_ours:
                        raise WorkerError(f"{worker.name}: another server is on its port")
                    if 300 <= upstream.status < 500:  # A redirect, or a refusal such as 401 or 429.
                        message = f"{worker.name} refuses requests (HTTP {upstream.status})"
                        raise WorkerRefusedError(message, upstream.status)
                    raise WorkerError(f"{worker.name} answered {upstream.status}")
                yield upstream
        # No connection came about, so the request cannot have been the cause.
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise WorkerError(f"{worker.name}: {type(error).__name__}") from None
        # What came back is not valid HTTP.
        except (aiohttp.ClientResponseError, HttpProcessingError) as error:
            raise WorkerError(f"{worker.name}: {type(error).__name__}") from None
        # The connection broke while the worker had the request.
        except aiohttp.ClientError as error:
            raise WorkerDiedError(f"{worker.name}: {type(error).__name__}") from None

    def _note_ttft(self, ttft_s: float) -> None:
        """Count a TTFT in its bucket of the metrics' histogram, whose last edge is infinite."""
        self.ttft_counts[next(edge for edge in router_metrics.TTFT_EDGES_S if ttft_s <= edge)] += 1
        self.ttft_sum_s += ttft_s

    async def _health(self, _: web.Request) -> web.Response:
        """Status 200 while a mixed worker, or a prefill and a decode worker, is up; else 503."""
        workers = zip(self.backends, self.live.roles, strict=True)
        roles = {role for backend, role in workers if backend.is_up}
        is_up = "mixed" in roles or {"prefill", "decode"} <= roles
        status = "ok" if is_up else "no worker is up"
        if self.is_draining:
            status = "draining"
        counts = {
            "workers": len(self.backends),
            "up": sum(backend.is_up for backend in self.backends),
            "given_up": sum(bool(backend.gave_up) for backend in self.backends),
            "passed_over": len(self.trust.resting(_now_s())),
        }
        return web.json_response({"status": status} | counts, status=200 if status == "ok" else 503)

    async def _models(self, _: web.Request) -> web.Response:
        """OpenAI's list of models, which holds the fleet's LLM alone."""
        return web.json_response({"object": "list", "data": [{"id": self.fleet.llm.name, "object": "model"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text=router_metrics.metrics_text(self, _now_s()),
            headers={"Content-Type": "text/plain; version=0.0.4"},
        )


async def _read_lines(
    upstream: aiohttp.ClientResponse, check: StreamCheck, reply: Reply
) -> AsyncIterator[bytes]:
    """Yield the lines of a stream that `check` has passed. Raises WorkerError if the stream breaks off."""
    async for chunk in upstream.content.iter_any():
        reply.heard_s = _now_s()
        if lines := check.take(chunk):
            yield lines
        if check.has_done_line:
            if not upstream.content.at_eof():
                await _wait_for_end(upstream)
            break
    if rest := check.end():
        yield rest


async def _wait_for_end(upstream: aiohttp.ClientResponse) -> None:
    """Wait up to STREAM_END_S for the end of a stream whose last event has come.

    A connection whose stream has ended can be used again; if the end does not come, the connection is closed.
    """
    try:
        async with asyncio.timeout(STREAM_END_S):
            if not await upstream.content.readany():
                return
    except TimeoutError:
        pass
    upstream.close()


def _set_result(future: asyncio.Future[bool], result: bool) -> None:
    """Set the result of a future, unless it is done or was cancelled."""
    if not future.done():
        future.set_result(result)


def _end_block(timeout: asyncio.Timeout, now_s: float) -> None:
    """Make the block under this timeout end with TimeoutError, unless it is ending already."""
    if not timeout.expired():
        with suppress(RuntimeError):  # The block has not been entered, or has been left.
            timeout.reschedule(now_s)


def _now_s() -> float:
    """Seconds on the event loop's clock, which the timeouts use too."""
    return asyncio.get_running_loop().time()
