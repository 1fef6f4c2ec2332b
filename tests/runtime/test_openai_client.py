"""Our router as OpenAI's own Python client sees it, with engines that keep time behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from aiohttp import web
from runtime_fakes import LATENCY, MODEL, a_server, engines, fleet_of, is_idle, random_trace, routed, until

from planner.domain import Slo
from planner.models.latency import StepLatency
from planner.runtime.analysis import ValidationSetup, analyse_run
from planner.runtime.endpoint import Endpoint
from planner.runtime.live_replay import JournalFile
from planner.runtime.prediction_errors import CPU_TOLERANCES
from planner.runtime.remote_validation import measure_endpoint
from planner.runtime.router import LiveRouter, RouterSettings
from planner.runtime.validation_document import validation_document

KEY = "a-key-of-ours"
PROMPT = [5, 6, 7, 8]
Ask = Callable[[openai.AsyncOpenAI, LiveRouter], Awaitable[None]]


@asynccontextmanager
async def a_client(latency: StepLatency = LATENCY) -> AsyncIterator[tuple[openai.AsyncOpenAI, LiveRouter]]:
    async with (
        engines(["mixed", "mixed"], latency) as workers,
        routed(workers, settings=RouterSettings(keys=(KEY,))) as (router, url),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=30) as client,
    ):
        yield client, router


def asked(ask: Ask, latency: StepLatency = LATENCY) -> None:
    async def run() -> None:
        async with a_client(latency) as (client, router):
            await ask(client, router)

    asyncio.run(run())


def test_models_and_whole_answers_with_usage() -> None:
    """Four ids are four tokens; of a chat, a word is a token, `user:` one more, and its template seven."""

    async def ask(client: openai.AsyncOpenAI, router: LiveRouter) -> None:
        assert [model.id async for model in client.models.list()] == [MODEL]
        done = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6)
        assert done.usage is not None
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (4, 6)
        assert done.choices[0].finish_reason == "length" and len(done.choices[0].text.split()) == 6
        chat = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "one two three"}], max_completion_tokens=3
        )
        assert chat.usage is not None and chat.usage.prompt_tokens == 3 + 1 + 7
        assert len((chat.choices[0].message.content or "").split()) == 3
        assert router.outcomes["answered"] == 2 and is_idle(router)

    asked(ask)


def test_streams_come_token_by_token_with_usage_at_the_end() -> None:
    async def ask(client: openai.AsyncOpenAI, _: LiveRouter) -> None:
        words, usage = [], None
        async for chunk in await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=5, stream=True, stream_options={"include_usage": True}
        ):
            words += [choice.text for choice in chunk.choices if choice.text]
            usage = chunk.usage or usage
        assert len(words) == 5 and usage is not None and usage.completion_tokens == 5
        words = []
        async for part in await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=4, stream=True
        ):
            words += [choice.delta.content for choice in part.choices if choice.delta.content]
        assert len(words) == 4

    asked(ask)


def test_refusals_are_the_clients_own_errors() -> None:
    """With the router's message in them."""

    async def ask(client: openai.AsyncOpenAI, router: LiveRouter) -> None:
        with pytest.raises(openai.NotFoundError, match="no such model here"):
            await client.completions.create(model="another", prompt=PROMPT)
        with pytest.raises(openai.BadRequestError, match="max_tokens must be a whole number"):
            await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0)
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            await client.with_options(api_key="wrong").completions.create(model=MODEL, prompt=PROMPT)
        router.settings = replace(router.settings, max_in_flight=0)
        with pytest.raises(openai.RateLimitError, match="try again later") as limited:
            await client.completions.create(model=MODEL, prompt=PROMPT)
        assert limited.value.response.headers["Retry-After"] == "1"

    asked(ask)


def test_a_worker_that_dies_in_the_middle_is_an_error_of_the_stream() -> None:
    async def dying(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"index":0,"text":"a "}]}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    async def run() -> None:
        async with (
            a_server(dying) as worker,
            routed([worker]) as (_, url),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            stream = await client.completions.create(model=MODEL, prompt=PROMPT, stream=True)
            with pytest.raises(openai.APIError, match="odd"):
                async for _chunk in stream:
                    pass

    asyncio.run(run())


def test_a_client_that_leaves_frees_its_worker() -> None:
    """After two of ten thousand tokens."""

    async def ask(client: openai.AsyncOpenAI, router: LiveRouter) -> None:
        stream = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=10_000, stream=True)
        async for _ in stream:
            if not is_idle(router):
                break
        await stream.close()
        await until(lambda: is_idle(router))

    asked(ask)


def test_our_own_router_is_an_endpoint_to_measure(tmp_path: Path) -> None:
    """Fifty requests through it: nothing lost, lengths as the traffic has them, counted by our engines."""
    trace = random_trace(50, 100.0)
    fleet = fleet_of(("a", "mixed", 2))

    async def run() -> ValidationSetup:
        async with engines(["mixed", "mixed"]) as workers, routed(workers) as (router, url):
            endpoint = Endpoint(url, max_requests=100)
            setup = ValidationSetup(fleet, trace, Slo(()), 512, engine="endpoint", endpoint=endpoint)
            journal = JournalFile(tmp_path / "journal.jsonl", setup.identity())
            await measure_endpoint(setup, journal, list(range(50)), lambda _: None)
            assert is_idle(router) and router.outcomes["answered"] == 50 + 1 + 9
            return setup

    told = validation_document(analyse_run(asyncio.run(run()), tmp_path, CPU_TOLERANCES))
    assert told["finished"] == told["requests"] == 50 and told["endpoint"]["requests_before"] == 10
    assert told["endpoint"]["prompts"] == "token ids" and told["endpoint"]["fixes_length"]
    assert told["endpoint"]["lengths"]["output_tokens"] == int(trace.output_tokens.sum())
    assert told["endpoint"]["lengths"]["prompt_error_frac"] == {"median": 0.0, "largest": 0.0}
