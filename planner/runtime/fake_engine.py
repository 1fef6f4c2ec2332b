"""An engine that computes nothing: it has vLLM's endpoints, and its steps wait as long as a fit predicts.

    python -m planner.runtime.fake_engine --port 8001 '{"latency": {...}, "max_num_seqs": 256, ...}'

It batches as vLLM v1 does: running requests first, then waiting prompts in chunks, in order of arrival or of
their `priority`, while there are seats and KV blocks. It never preempts, because a request reserves the
blocks of its prompt and its output. It writes the same step log as our vLLM workers
(`planner/runtime/step_log.py`). With a prefix cache, tokens of a prompt that are still cached take no time.
The router, the replay and the comparison are tested with this engine, and a plan is rehearsed with it, on a
machine without GPU or vLLM.

/metrics has vLLM's names, labels and buckets. Source: vllm, vllm/v1/metrics/loggers.py (0.32).
"""

import argparse
import asyncio
import json
import logging
import math
import os
import signal
import time
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from planner.domain import KV_BLOCK_TOKENS
from planner.models.latency import StepLatency
from planner.runtime.launch import IDENTITY, IDENTITY_HEADER, STEP_LOG, STEP_LOG_BYTES, end_with_parent
from planner.runtime.prompt_blocks import blocks_of, prompt_text
from planner.runtime.step_log import StepLog

CHAT_TOKENS = 7  # Tokens that the template of a chat adds to a prompt; about as many as real ones add.
DEFAULT_OUTPUT_TOKENS = 16  # The output length of a request that names none, as in vLLM.
TOKEN_IDS = 997  # The id of a token is its position in the request's context modulo this prime; any would do.
MODEL_NAME = "rehearsal"  # The name of the LLM that it claims to serve.
DONE = None  # Stands in a request's queue of tokens for the end of its answer.


@dataclass(eq=False, slots=True)
class _EngineRequest:
    """A request in the engine; times are those of the engine's clock [s]."""

    name: str
    prompt_tokens: int
    output_tokens: int
    is_transferred: bool  # The request's KV comes from a prefill worker, so one token is left to compute.
    block_names: list[int] = field(default_factory=list)  # Its prompt's blocks (prompt_blocks.py).
    priority: int = 0
    computed: int = 0  # Tokens of its prompt and its output whose KV is in the cache.
    generated: int = 0  # Tokens of its output so far.
    queued_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0  # When its first token came.
    last_s: float = 0.0  # When its latest token came.
    tokens: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)

    @property
    def blocks(self) -> int:
        """KV blocks that the request reserves: those of its prompt and its whole output."""
        return math.ceil((self.prompt_tokens + self.output_tokens) / KV_BLOCK_TOKENS)


class FakeEngine:
    """Runs steps in real time. If it wakes up too late after a step, the next step is shorter by as much, so
    that delays do not add up.

    With `prefix_cache` the blocks of prompts stay as long as they fit beside the blocks that requests
    reserve. A cached block that a request uses counts as cached and as reserved. Blocks are evicted least
    recently used first, each prompt from its end. With `by_priority` the prompt with the smallest `priority`
    is next, and of equal ones the first to arrive.
    """

    def __init__(
        self,
        latency: StepLatency,
        *,
        kv_tokens: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        log: StepLog | None,
        prefix_cache: bool = False,
        by_priority: bool = False,
    ) -> None:
        self.latency, self.log, self.prefix_cache = latency, log, prefix_cache
        self.by_priority = by_priority
        self.cached: OrderedDict[int, None] = OrderedDict()  # Names of blocks, the least recently used first.
        self.queried_tokens = self.hit_tokens = 0
        self.seats, self.budget = max_num_seqs, max_num_batched_tokens  # The budget is in tokens per step.
        self.free_blocks = kv_tokens // KV_BLOCK_TOKENS
        self.blocks = self.free_blocks
        self.waiting: deque[_EngineRequest] = deque()
        self.running: list[_EngineRequest] = []
        self.has_work = asyncio.Event()
        self.now_s = 0.0  # When the last step ended by the fit, on the clock of time.monotonic.
        self.prompt_tokens = self.output_tokens = 0
        # vLLM also counts the block that it keeps empty as a placeholder.
        self.metrics = EngineMetrics(MODEL_NAME, block_tokens=KV_BLOCK_TOKENS, blocks=self.blocks + 1)

    def add(self, request: _EngineRequest) -> None:
        """Queue a request; a step that starts from now on may take it."""
        if self.log:
            self.log.queued(request.name, request.prompt_tokens, time.monotonic())
        if self.by_priority:
            insort(self.waiting, request, key=lambda each: each.priority)
        else:
            self.waiting.append(request)
        self.has_work.set()

    def drop(self, request: _EngineRequest) -> None:
        """Remove a request whose client has closed the connection."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
            self.free_blocks += request.blocks
        if self.log:
            self.log.forget(request.name)

    async def run(self) -> None:
        """Run steps until this is cancelled."""
        while True:
            if not self.running and not self.waiting:
                self.has_work.clear()
                await self.has_work.wait()
                self.now_s = max(self.now_s, time.monotonic())
            chunks = self._schedule()
            start_s = self.now_s
            self.now_s += self._step_s(chunks)
            await asyncio.sleep(max(self.now_s - time.monotonic(), 0.0))
            self._finish(chunks, start_s)

    def _schedule(self) -> list[tuple[_EngineRequest, int]]:
        """The requests of the next step, each with how many tokens of it are computed."""
        budget = self.budget  # Tokens that this step may still compute.
        chunks = []
        # Running requests come first: each gets the next part of its prompt, or one token of output.
        for request in self.running:
            is_in_prompt = not request.generated
            new_tokens = min(request.prompt_tokens - request.computed, budget) if is_in_prompt else 1
            if new_tokens and budget:
                chunks.append((request, new_tokens))
                budget -= new_tokens
        while self.waiting and budget and len(self.running) < self.seats:
            request = self.waiting[0]
            if request.blocks > self.free_blocks:
                break
            self.waiting.popleft()
            self.free_blocks -= request.blocks
            self.running.append(request)
            self.metrics.observe("queue", max(self.now_s - request.queued_s, 0.0))
            cached_tokens = (
                self._take_cached_tokens(request) if self.prefix_cache and not request.is_transferred else 0
            )
            request.computed = request.prompt_tokens - 1 if request.is_transferred else cached_tokens
            if self.log:
                self.log.scheduled(request.name, self.now_s, cached_tokens)
            new_tokens = min(request.prompt_tokens - request.computed, budget)
            chunks.append((request, new_tokens))
            budget -= new_tokens
        return chunks

    def _take_cached_tokens(self, request: _EngineRequest) -> int:
        """The number of cached tokens of the prompt, without its last token, which is always computed.

        Blocks that no longer fit are evicted first.
        """
        while len(self.cached) > self.free_blocks:
            self.cached.popitem(last=False)
        # Blocks are found from the first on, up to the first that is missing.
        hits = next(
            (k for k, name in enumerate(request.block_names) if name not in self.cached),
            len(request.block_names),
        )
        hit_tokens = KV_BLOCK_TOKENS * min(hits, (request.prompt_tokens - 1) // KV_BLOCK_TOKENS)
        self.queried_tokens += request.prompt_tokens
        self.hit_tokens += hit_tokens
        return hit_tokens

    def _note_token_time(self, request: _EngineRequest) -> None:
        """Note the time of a token that the request has just received, for the engine's metrics."""
        if request.generated == 1:
            request.first_s = self.now_s
            self.metrics.observe("ttft", max(self.now_s - request.queued_s, 0.0))
        else:
            self.metrics.observe("tbt", self.now_s - request.last_s)
        request.last_s = self.now_s
        if request.generated < request.output_tokens:
            return
        self.metrics.count_finished()
        self.metrics.observe("e2e", max(self.now_s - request.queued_s, 0.0))
        self.metrics.observe("prompt", request.prompt_tokens)
        self.metrics.observe("output", request.output_tokens)
        gaps = request.output_tokens - 1
        self.metrics.observe("tpot", (self.now_s - request.first_s) / gaps if gaps else 0.0)

    def _cache_prompt(self, request: _EngineRequest) -> None:
        """Cache the blocks of a prompt; its first block becomes the most recently used."""
        for name in reversed(request.block_names):
            self.cached[name] = None
            self.cached.move_to_end(name)

    def _step_s(self, chunks: list[tuple[_EngineRequest, int]]) -> float:
        """The seconds of a step by the fit.

        A decode is a chunk of one token, the last of its prompt or a later one, but never the first of all:
        a prompt of a single token is a prefill.
        """
        decodes = [
            request
            for request, new_tokens in chunks
            if new_tokens == 1 and request.computed >= max(request.prompt_tokens - 1, 1)
        ]
        prefills = [(request, new_tokens) for request, new_tokens in chunks if request not in decodes]
        tokens = sum(new_tokens for _, new_tokens in chunks)
        # Each token of a chunk attends to all tokens before it and to itself.
        pairs = sum(
            new_tokens * (2 * request.computed + new_tokens + 1) / 2 for request, new_tokens in prefills
        )
        attended = sum(request.computed + 1 for request in decodes)
        cached = sum(request.computed for request, _ in prefills)
        return float(self.latency.step_s(tokens, pairs, len(decodes), attended, len(prefills), cached))

    def _finish(self, chunks: list[tuple[_EngineRequest, int]], start_s: float) -> None:
        """Give a token to each request whose prompt is now computed, and end those that have all tokens."""
        if self.log:
            self.log.step(start_s, self.now_s, [(r.name, new_tokens, r.computed) for r, new_tokens in chunks])
        for request, new_tokens in chunks:
            request.computed += new_tokens
            # A request whose client has gone during the step is not running any more.
            if request.computed < request.prompt_tokens or request not in self.running:
                continue
            if request.generated == 0:
                self._cache_prompt(request)
            request.generated += 1
            request.tokens.put_nowait(request.computed % TOKEN_IDS)
            self.output_tokens += 1
            self._note_token_time(request)
            if self.log:
                self.log.token(request.name, 1, self.now_s)
            if request.generated == request.output_tokens:
                self.running.remove(request)
                self.free_blocks += request.blocks
                self.prompt_tokens += request.prompt_tokens
                request.tokens.put_nowait(DONE)
                if self.log:
                    self.log.finished(request.name)


class _AnswerFormat:
    """Writes an answer in OpenAI's format, with the parts that the request wants.

    The answer's text has a word per token: the token's id.
    """

    def __init__(self, body: Mapping[str, Any], is_chat: bool) -> None:
        options = body.get("stream_options") or {}
        self.has_usage = bool(options.get("include_usage"))
        self.counts_each = self.has_usage and bool(options.get("continuous_usage_stats"))
        self.is_chat, self.model = is_chat, body.get("model", MODEL_NAME)
        self.has_text = is_chat or not body.get("return_token_ids")
        self.written = 0  # Events so far, each of one token.

    def _head(self, kind: str) -> dict[str, Any]:
        """The fields of every answer; `kind` is ".chunk" for an event of a stream, else empty."""
        name = f"chat.completion{kind}" if self.is_chat else "text_completion"
        return {"id": "cmpl-0", "object": name, "created": int(time.time()), "model": self.model}

    def _usage(self, request: _EngineRequest, tokens: int) -> dict[str, int]:
        """OpenAI's counts of prompt and answer tokens."""
        prompt = request.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def whole(self, request: _EngineRequest, ids: list[int]) -> dict[str, Any]:
        """An answer that is no stream, with all token ids."""
        text = " ".join(map(str, ids))
        content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        choice = {"index": 0, "finish_reason": "length", "logprobs": None, "token_ids": ids, **content}
        return {**self._head(""), "choices": [choice], "usage": self._usage(request, len(ids))}

    def event(self, request: _EngineRequest, token: int) -> bytes:
        """The next event of the stream, with one token, in the dialect that the request came in."""
        self.written += 1
        # Our own replay wants neither text nor usage, and this way is quicker.
        if not self.has_text and not self.has_usage:
            return b'data: {"choices":[{"index":0,"text":"","token_ids":[%d]}]}\n\n' % token
        content = {"delta": {"content": f"{token} "}} if self.is_chat else {"text": f"{token} "}
        # As in vLLM, the reason to finish comes with the last token.
        finish = "length" if self.written == request.output_tokens else None
        choice = {"index": 0, "finish_reason": finish, "token_ids": [token], **content}
        event = {**self._head(".chunk"), "choices": [choice]}
        if self.counts_each:
            event["usage"] = self._usage(request, self.written)
        return _event_bytes(event)

    def last(self, request: _EngineRequest) -> bytes:
        """The end of the stream, after an event with the usage if the request asked for it."""
        done = b"data: [DONE]\n\n"
        if not self.has_usage:
            return done
        usage = self._usage(request, self.written)
        return _event_bytes({**self._head(".chunk"), "choices": [], "usage": usage}) + done


def _event_bytes(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


class Server:
    """Serves OpenAI's API, /health and the metrics that planner/runtime/ reads.

    Each word of a text prompt counts as a token, and the template of a chat adds CHAT_TOKENS.
    """

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.identity = os.environ.get(IDENTITY, "")
        # Room for a prompt of some million tokens; aiohttp's default of 1 MiB would refuse long contexts.
        self.app = web.Application(client_max_size=64 * 2**20)
        self.app.on_response_prepare.append(self._sign)
        self.app.add_routes(
            [
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._complete),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
            ]
        )

    async def _sign(self, _: web.Request, answer: web.StreamResponse) -> None:
        """Add the identity of this start to the answer."""
        answer.headers[IDENTITY_HEADER] = self.identity

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        body = json.loads(await http.read())
        transfer = body.get("kv_transfer_params") or {}
        name = f"cmpl-{http.headers.get('X-Request-Id', 'x')}-0"
        is_transferred = bool(transfer.get("do_remote_prefill"))
        is_chat = http.path.endswith("/chat/completions")
        prompt = body["messages"] if is_chat else body["prompt"]
        words = prompt if isinstance(prompt, list) and not is_chat else prompt_text(prompt).split()
        output_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_OUTPUT_TOKENS
        prompt_tokens = len(words) + (CHAT_TOKENS if is_chat else 0)
        request = _EngineRequest(name, prompt_tokens, output_tokens, is_transferred)
        request.priority = int(body.get("priority", 0))
        if self.engine.prefix_cache:
            request.block_names = blocks_of(prompt)
        if request.blocks > self.engine.blocks:
            return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)
        self.engine.add(request)
        try:
            if body.get("stream"):
                return await self._stream(http, request, _AnswerFormat(body, is_chat))
            ids = []
            while (token := await request.tokens.get()) is not DONE:
                ids.append(token)
        except BaseException:  # A client that leaves cancels this task, which is no Exception.
            self.engine.drop(request)
            raise
        answer = _AnswerFormat(body, is_chat).whole(request, ids)
        if transfer.get("do_remote_decode"):
            answer["kv_transfer_params"] = {"do_remote_prefill": True, "do_remote_decode": False}
        return web.json_response(answer)

    async def _stream(
        self, http: web.Request, request: _EngineRequest, answer_format: _AnswerFormat
    ) -> web.StreamResponse:
        """Send each token of an answer as an event as soon as it is there."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        while (token := await request.tokens.get()) is not DONE:
            await response.write(answer_format.event(request, token))
        await response.write(answer_format.last(request))
        return response

    async def _models(self, _: web.Request) -> web.Response:
        """The list of models, as vLLM returns it."""
        return web.json_response({"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]})

    async def _health(self, _: web.Request) -> web.Response:
        """An empty answer, which says that the engine is up."""
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        """The metrics of the engine, as vLLM writes them for Prometheus."""
        engine = self.engine
        text = engine.metrics.text(
            levels={
                "num_requests_running": len(engine.running),
                "num_requests_waiting": len(engine.waiting),
                "kv_cache_usage_perc": 1 - engine.free_blocks / engine.blocks,
            },
            totals={
                "prompt_tokens": engine.prompt_tokens,
                "generation_tokens": engine.output_tokens,
                "prefix_cache_queries": engine.queried_tokens,
                "prefix_cache_hits": engine.hit_tokens,
            },
        )
        return web.Response(text=text)


async def serve(settings: dict[str, Any], port: int) -> None:
    """Serve an engine with these settings on a port, until a signal ends it."""
    fit: Any = {key: tuple(v) if isinstance(v, list) else v for key, v in settings["latency"].items()}
    latency = StepLatency(**fit)
    path = os.environ.get(STEP_LOG)
    engine = FakeEngine(
        latency,
        kv_tokens=settings["kv_tokens"],
        max_num_seqs=settings["max_num_seqs"],
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        log=StepLog(Path(path), int(os.environ.get(STEP_LOG_BYTES, "0"))) if path else None,
        prefix_cache=settings["prefix_cache"],
        by_priority=settings.get("by_priority", False),
    )
    # `handler_cancellation` ends `Server._complete` when its client leaves, so that the request is dropped.
    runner = web.AppRunner(Server(engine).app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    steps = asyncio.ensure_future(engine.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, steps.cancel)
    with suppress(asyncio.CancelledError):
        await steps


# Edges of the buckets of vLLM's histograms [s]: time to first token, gaps between tokens, whole requests.
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_GAPS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    80.0,
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
# 1, 2, 5, 10, ... 500,000 tokens. In vLLM the edges end at max_model_len; buckets above that stay empty here.
_LENGTHS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_LABELS = ("engine", "model_name")
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "ttft": ("time_to_first_token_seconds", _TTFT_S),
    "tbt": ("inter_token_latency_seconds", _GAPS_S),
    "tpot": ("request_time_per_output_token_seconds", _GAPS_S),
    "e2e": ("e2e_request_latency_seconds", _REQUEST_S),
    "queue": ("request_queue_time_seconds", _REQUEST_S),
    "prompt": ("request_prompt_tokens", _LENGTHS),
    "output": ("request_generation_tokens", _LENGTHS),
}
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")


class EngineMetrics:
    """Histograms, counters and gauges of one engine; `model` is the label model_name."""

    def __init__(self, model: str, *, block_tokens: int, blocks: int) -> None:
        self._registry = CollectorRegistry()
        labels = {"engine": "0", "model_name": model}
        self._histograms = {
            key: Histogram(f"vllm:{name}", name, _LABELS, registry=self._registry, buckets=edges).labels(
                **labels
            )
            for key, (name, edges) in _HISTOGRAMS.items()
        }
        self._gauges = {
            name: Gauge(f"vllm:{name}", name, _LABELS, registry=self._registry).labels(**labels)
            for name in _GAUGES
        }
        self._counters = {
            name: Counter(f"vllm:{name}", name, _LABELS, registry=self._registry).labels(**labels)
            for name in _COUNTERS
        }
        self._exported_totals = dict.fromkeys(_COUNTERS, 0.0)
        success = Counter(
            "vllm:request_success", "finished", (*_LABELS, "finished_reason"), registry=self._registry
        )
        # A fake engine always writes as many tokens as `max_tokens` allows.
        self._success = success.labels(**labels, finished_reason="length")
        info = Gauge(
            "vllm:cache_config_info", "info", ("block_size", "num_gpu_blocks"), registry=self._registry
        )
        info.labels(block_size=str(block_tokens), num_gpu_blocks=str(blocks)).set(1)

    def observe(self, key: str, value: float) -> None:
        """A value for the histogram `key`: ttft, tbt, tpot, e2e, queue [s]; prompt, output [tokens]."""
        self._histograms[key].observe(value)

    def count_finished(self) -> None:
        self._success.inc()

    def text(self, *, levels: Mapping[str, float], totals: Mapping[str, int]) -> str:
        """Prometheus' text format; `levels` are gauges' values, `totals` the counters' since the start."""
        for name, level in levels.items():
            self._gauges[name].set(level)
        for name, total in totals.items():
            self._counters[name].inc(total - self._exported_totals[name])
            self._exported_totals[name] = total
        return generate_latest(self._registry).decode()


if __name__ == "__main__":
    end_with_parent()
    logging.disable(logging.CRITICAL)
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("settings", type=json.loads)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.settings, arguments.port))
