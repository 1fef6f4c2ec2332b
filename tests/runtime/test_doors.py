"""Attacks on the router from both sides: clients without a key, and workers that lie, refuse or never end."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from runtime_fakes import (
    PATIENCE_S,
    Backend,
    a_body,
    a_server,
    engines,
    fleet_of,
    is_idle,
    post,
    routed,
    until,
)

from planner.fleet import Policies
from planner.runtime.exchange import Reply
from planner.runtime.launch import WORKER_HEADER
from planner.runtime.router import LiveRouter, RouterSettings
from planner.runtime.trust import LONGEST_REST_S, TRIAL_S, Trust
from planner.runtime.upstream import StreamCheck, WorkerError

TOKEN = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"
IN_TURNS = Policies(routing="round-robin")
KEY = {"Authorization": "Bearer a-key-that-nobody-guesses"}
WITH_KEY = RouterSettings(keys=("a-key-that-nobody-guesses",))


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """A megabyte of gzip that inflates to a gibibyte: 1,024 times the same packed mebibyte of zeros."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    packed = b"\x1f\x8b\x08" + bytes(7) + 2**10 * block + packer.flush() + bytes(8)
    assert len(zlib.decompressobj(31).decompress(packed, 2**24)) == 2**24 and 0.9e6 < len(packed) < 1.2e6
    return packed


@pytest.mark.parametrize(("headers", "status"), [({}, 401), (KEY, 413)])
def test_a_packed_gibibyte_is_not_inflated(bomb: bytes, headers: dict[str, str], status: int) -> None:
    """Eight at once inflate to 8 GiB, which takes 4 CPU s or more: without a key none of it is inflated, with
    one 32 MiB each, and /health answers meanwhile.
    """

    async def healthy(url: str, slowest_s: list[float]) -> None:
        async with aiohttp.ClientSession() as client:
            while True:
                began_s = time.process_time()
                async with client.get(f"{url}/health") as answer:
                    assert answer.status == 200
                slowest_s.append(time.process_time() - began_s)
                await asyncio.sleep(0.01)

    async def run() -> None:
        async with engines(["mixed"]) as backends, routed(backends, settings=WITH_KEY) as (router, url):
            slowest_s: list[float] = []
            asking = asyncio.ensure_future(healthy(url, slowest_s))
            began_s = time.process_time()
            answers = await asyncio.gather(
                *(post(url, bomb, **{"Content-Encoding": "gzip"}, **headers) for _ in range(8))
            )
            assert {answer[0] for answer in answers} == {status}
            assert time.process_time() - began_s < 1.5
            asking.cancel()
            assert slowest_s and max(slowest_s) < 0.5
            assert is_idle(router)

    asyncio.run(run())


def test_packed_bodies_are_read_and_broken_ones_are_refused() -> None:
    """gzip and zlib to the byte; cut short, continued, or of another packing: 400 or 415 in one line."""
    body = json.dumps(a_body()).encode()
    gzipped, deflated = (
        (packer := zlib.compressobj(wbits=window)).compress(body) + packer.flush() for window in (31, 15)
    )
    cases = [
        (gzipped, "gzip", 200),
        (deflated, "deflate", 200),
        (gzipped[:-4], "gzip", 400),
        (gzipped + b"more", "gzip", 400),
        (body, "gzip", 400),
        (gzipped, "br", 415),
        (gzipped, "gzip, gzip", 415),
    ]

    async def run() -> None:
        async with engines(["mixed"]) as backends, routed(backends) as (_, url):
            for data, packing, status in cases:
                answer = await post(url, data, **{"Content-Encoding": packing})
                assert answer[0] == status, (packing, answer)

    asyncio.run(run())


def test_a_length_beyond_the_limit_is_refused_before_a_byte_of_it_came() -> None:
    async def run() -> None:
        async with engines(["mixed"]) as backends, routed(backends) as (_, url):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {2**40}\r\n\r\n"
            writer.write(head.encode())
            assert b" 413 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
            writer.close()

    asyncio.run(run())


def test_numbers_beyond_measure_and_other_methods_are_refused_in_the_shape_of_an_answer() -> None:
    """Python reads an integer of 4,300 digits from JSON, and writes none of 4,301."""

    async def run() -> None:
        async with engines(["mixed"]) as backends, routed(backends) as (router, url):
            longest = json.dumps(a_body()).replace('"max_tokens": 5', f'"max_tokens": {"9" * 4300}')
            for body in (longest.encode(), a_body(outputs=10**9 + 1), a_body(outputs=True)):
                status, answer, _ = await post(url, body)
                assert (status, answer["error"]["code"]) == (400, 400)
                assert "max_tokens must be a whole number from 1" in answer["error"]["message"]
            async with aiohttp.ClientSession() as client, client.put(f"{url}/v1/completions") as refused:
                assert (refused.status, (await refused.json())["error"]["code"]) == (405, 405)
                assert refused.headers["Allow"] == "POST"
            assert is_idle(router) and router.outcomes == {"refused_400": 3, "refused_405": 1}

    asyncio.run(run())


@asynccontextmanager
async def beside_a_good_one(
    handler: Callable[[web.Request], Any],
    policies: Policies | None = None,
    settings: RouterSettings | None = None,
) -> AsyncIterator[tuple[LiveRouter, str]]:
    """A router before a worker, "odd", that answers as `handler` does, and one that answers well."""
    async with engines(["mixed"]) as good, a_server(handler) as odd:
        async with routed([odd, *good], policies, settings) as found:
            yield found


@pytest.mark.parametrize("status", [401, 404, 429, 307])
def test_a_worker_that_refuses_fast_draws_next_to_nothing(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 60 requests by four clients under jsq it gets those that came before its second refusal, and one
    more a second later; the other one answers every request. Log, /health and /metrics say so.
    """
    seen = 0

    async def refuses(request: web.Request) -> web.Response:
        nonlocal seen
        seen += 1
        await request.read()
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    async def run() -> None:
        async with beside_a_good_one(refuses) as (router, url):

            async def client() -> None:
                for _ in range(15):
                    answer = await post(url, a_body(outputs=2))
                    assert (answer[0], answer[2][WORKER_HEADER]) == (200, "mixed-0")

            await asyncio.gather(*(client() for _ in range(4)))
            assert router.outcomes == {"answered": 60} and is_idle(router)
            assert 2 <= seen == router.retries <= 12
            async with aiohttp.ClientSession() as http:
                async with http.get(f"{url}/health") as answer:
                    health = await answer.json()
                async with http.get(f"{url}/metrics") as answer:
                    metrics = await answer.text()
            assert health["status"] == "ok"
            assert f'fleetplan_worker_refusals_total{{worker="odd"}} {seen}\n' in metrics
            assert f'fleetplan_worker_passed_over{{worker="odd"}} {health["passed_over"]}\n' in metrics

    with caplog.at_level(logging.WARNING, "fleetplan"):
        asyncio.run(run())
    assert f"worker odd: passed over for 1 s: odd refuses requests (HTTP {status})" in caplog.text


def test_a_worker_is_passed_over_for_longer_each_time_until_it_answers() -> None:
    """Two failures: 1 s; each one after that twice as long, a minute at most; those that come while it rests
    count once. An answer ends that, and it takes two again.
    """
    trust = Trust(2)
    assert trust.note_failure(0, 0.0, is_refusal=True) == 0.0 and not trust.resting(0.0)
    rests, now_s = [], 0.0
    for _ in range(8):
        rests.append(trust.note_failure(0, now_s, is_refusal=True))
        assert trust.note_failure(0, now_s, is_refusal=False) == 0.0 and set(trust.resting(now_s)) == {0}
        now_s += rests[-1]
    assert rests == [1, 2, 4, 8, 16, 32, LONGEST_REST_S, LONGEST_REST_S] and not trust.resting(now_s)
    trust.note_failure(0, now_s, is_refusal=True)
    trust.note_answer(0)
    assert not trust.resting(now_s) and trust.note_failure(0, now_s, is_refusal=True) == 0.0
    assert (trust.failed[0], trust.refused[0], trust.failed[1]) == (19, 11, 0)


def test_where_all_workers_refuse_each_is_asked_once_and_the_client_is_told() -> None:
    """429 of two workers: two tries, and 429 with Retry-After. 404: 502, since the client asked rightly."""
    seen = 0

    async def run(status: int, told: int) -> None:
        nonlocal seen
        seen = 0

        async def refuses(request: web.Request) -> web.Response:
            nonlocal seen
            seen += 1
            await request.read()
            return web.Response(status=status)

        async with a_server(refuses, "a") as a, a_server(refuses, "b") as b, routed([a, b]) as (router, url):
            answer = await post(url, a_body())
            assert (answer[0], seen) == (told, 2) and ("Retry-After" in answer[2]) == (told == 429)
            assert router.outcomes == {f"refused_{told}": 1} and is_idle(router)

    asyncio.run(run(429, 429))
    asyncio.run(run(404, 502))


def test_a_redirect_of_a_worker_is_not_followed() -> None:
    """307 to a server that would answer: that one hears nothing, the good worker answers."""
    heard: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        heard.append(await request.text())
        return web.json_response({"choices": [{"index": 0, "text": "stolen"}]})

    async def run() -> None:
        async with a_server(elsewhere) as other:

            async def redirects(request: web.Request) -> web.Response:
                await request.read()
                return web.Response(status=307, headers={"Location": other.url + request.path})

            async with beside_a_good_one(redirects, IN_TURNS) as (router, url):
                for _ in range(3):
                    answer = await post(url, a_body())
                    assert (answer[0], answer[2][WORKER_HEADER]) == (200, "mixed-0")
                assert router.trust.refused[0] >= 1

    asyncio.run(run())
    assert heard == []


Parts = Sequence[bytes]


def says(parts: Parts, kind: str = "text/event-stream") -> Callable[[web.Request], Any]:
    """A worker whose answers are these writes."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.01)
        return response

    return handler


SHORT: dict[str, Parts] = {
    "no end": [TOKEN, TOKEN],
    "garbage after a token": [TOKEN, b"<html>502</html>\n", DONE],
    "no JSON after a token": [TOKEN, b"data: {\n\n", DONE],
    "half an event": [TOKEN, b'data: {"choices":[{"ind'],
    "an error of the engine": [TOKEN, b'data: {"error":{"message":"x","code":500}}\n\n', DONE],
    "too many tokens": [TOKEN, TOKEN * 80, DONE],
    "one of two choices ends": [TOKEN, LAST],
}


@pytest.mark.parametrize("how", SHORT)
def test_a_stream_without_its_end_is_broken_and_says_so(how: str) -> None:
    """Tokens have gone out, so nothing can be done again: the client sees an error event, the metric counts
    `broken`.
    """

    async def run() -> None:
        async with a_server(says(SHORT[how])) as odd, routed([odd]) as (router, url):
            choices = 2 if "choices" in how else 1
            status, text, _ = await post(url, a_body(stream=True, n=choices))
            assert (status, router.outcomes) == (200, {"broken": 1}) and is_idle(router)
            assert text.startswith(TOKEN.decode()) and '"error"' in text and "html" not in text
            assert text.count("data: {") <= 4 and router.trust.failed[0] == ("engine" not in how)

    asyncio.run(run())


FROM_THE_START: dict[str, tuple[Parts, str]] = {
    "nothing": ([], "text/event-stream"),
    "garbage": ([b"\x00\xff" * 100 + b"\n"], "text/event-stream"),
    "a page": ([b"<html>"], "text/html"),
    "no answer": ([b'{"detail": "hello"}'], "application/json"),
    "an error of the engine": (
        [b'data: {"error":{"message":"x","code":500}}\n\n', DONE],
        "text/event-stream",
    ),
    "too many tokens": ([b'{"choices":[],"usage":{"completion_tokens":500}}'], "application/json"),
    "too many bytes": ([b" " * 30_000] * 4, "application/json"),
}


@pytest.mark.parametrize("how", FROM_THE_START)
def test_what_is_no_answer_from_the_start_is_asked_for_elsewhere(how: str) -> None:
    """Nothing has gone out: the other worker answers, and the client sees nothing of the first."""
    parts, kind = FROM_THE_START[how]

    async def run() -> None:
        settings = RouterSettings(answer_bytes=100_000)
        async with beside_a_good_one(says(parts, kind), IN_TURNS, settings) as (router, url):
            for _ in range(2):
                status, _, headers = await post(url, a_body(stream="event" in kind))
                assert (status, headers[WORKER_HEADER]) == (200, "mixed-0")
            assert router.outcomes == {"answered": 2} and router.retries >= 1 and is_idle(router)

    asyncio.run(run())


@pytest.mark.parametrize(
    "parts", [[TOKEN, DONE], [LAST], [TOKEN, LAST.strip()], [TOKEN[:20], TOKEN[20:] + DONE]]
)
def test_a_stream_with_its_end_is_answered_to_the_byte(parts: Parts) -> None:
    """[DONE], or a finish_reason, however the bytes are cut."""

    async def run() -> None:
        async with a_server(says(parts)) as odd, routed([odd]) as (router, url):
            _, text, _ = await post(url, a_body(stream=True))
            assert text == b"".join(parts).decode() and router.outcomes == {"answered": 1}

    asyncio.run(run())


@pytest.mark.parametrize("count", [True, -5, 2.0, "3", None])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_count_of_tokens_that_is_none_is_not_believed(count: Any, is_stream: bool) -> None:
    """`true` is an int in Python: the count was handed to compiled code as it came, which refused it, and the
    request held its worker for good.
    """
    answer = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
    whole = json.dumps(answer | {"usage": {"completion_tokens": count}}).encode()
    handler = says([b"data: " + whole + b"\n\n", DONE]) if is_stream else says([whole], "application/json")

    async def run() -> None:
        async with a_server(handler) as odd, routed([odd]) as (router, url):
            assert (await post(url, a_body(stream=is_stream)))[0] == 200
            assert router.outcomes == {"answered": 1} and is_idle(router)

    asyncio.run(run())


def test_a_stream_of_many_bytes_is_ended() -> None:
    """4 events of 30,000 bytes where 100,000 are allowed: three come through, then an error."""
    large = b'data: {"choices":[{"index":0,"text":"%s"}]}\n\n' % (b"x" * 30_000)

    async def run() -> None:
        settings = RouterSettings(answer_bytes=100_000)
        async with a_server(says([large] * 9)) as odd, routed([odd], settings=settings) as (router, url):
            _, text, _ = await post(url, a_body(stream=True))
            assert text.count("choices") == 3 and "larger than 100000 bytes" in text
            assert router.outcomes == {"broken": 1} and is_idle(router)

    asyncio.run(run())


def test_a_line_that_never_ends_costs_no_more_than_its_bytes() -> None:
    """16,384 pieces of 1 KiB are kept once and not copied with each: refused at 16 MiB."""
    check = StreamCheck("w", most_bytes=2**40, most_tokens=10)
    began_s = time.process_time()
    with pytest.raises(WorkerError, match="a line of the stream is larger"):
        for _ in range(20_000):
            check.take(b"x" * 1024)
    assert time.process_time() - began_s < 1.0


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_worker_that_does_not_begin_is_given_up_for_another(is_stream: bool) -> None:
    """It takes the request and is healthy, but says nothing: after 0.2 s the other one answers."""

    async def sleeps(request: web.Request) -> web.StreamResponse:
        await request.read()
        await asyncio.sleep(60)
        return web.Response()

    async def run() -> None:
        settings = RouterSettings(first_byte_s=0.2 if is_stream else 60.0, whole_s=60.0 if is_stream else 0.2)
        async with beside_a_good_one(sleeps, IN_TURNS, settings) as (router, url):
            for _ in range(2):
                answer = await asyncio.wait_for(post(url, a_body(stream=is_stream)), PATIENCE_S)
                assert (answer[0], answer[2][WORKER_HEADER]) == (200, "mixed-0")
            assert router.outcomes == {"answered": 2} and router.retries >= 1 and is_idle(router)
            assert not router.poison

    asyncio.run(run())


class Fragile:
    """A worker that a request of 7 tokens kills, with all that it has; it is up again at once. It begins with
    a request when `may_begin` ends.
    """

    def __init__(self, good: Backend, may_begin: Callable[[], Awaitable[None]]) -> None:
        self.good, self.may_begin = good, may_begin
        self.here, self.deaths = set[asyncio.Transport](), 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        self.here.add(transport)
        body = await request.json()
        await self.may_begin()
        if len(body["prompt"]) == 7:
            self.deaths += 1
            for each in self.here:
                each.abort()
            self.here.clear()
        async with (
            aiohttp.ClientSession() as client,
            client.post(self.good.url + request.path, json=body) as answer,
        ):
            whole = await answer.json()
        self.here.discard(transport)
        return web.json_response(whole)


@pytest.mark.parametrize("policies", [Policies(), IN_TURNS])
def test_innocents_beside_a_poison_request_are_answered(policies: Policies) -> None:
    """24 requests on three workers, one of which kills: that one is refused after three deaths at most (one
    in company, two on trial), the other 23 are answered.
    """

    async def run() -> None:
        async with AsyncExitStack() as stack:
            (good,) = await stack.enter_async_context(engines(["mixed"]))
            tokens = [20] * 11 + [7] + [20] * 12
            arrivals, all_here = itertools.count(1), asyncio.Event()

            async def all_came() -> None:
                if next(arrivals) == len(tokens):
                    all_here.set()
                await asyncio.wait_for(all_here.wait(), PATIENCE_S)

            fragile = [Fragile(good, all_came) for _ in range(3)]
            servers = [
                await stack.enter_async_context(a_server(each.answer, name))
                for each, name in zip(fragile, "abc", strict=True)
            ]
            router, url = await stack.enter_async_context(routed(servers, policies))
            answers = await asyncio.gather(*(post(url, a_body(tokens=n)) for n in tokens))
            statuses = [status for status, _, _ in answers]
            assert statuses == [422 if n == 7 else 200 for n in tokens]
            assert 2 <= sum(each.deaths for each in fragile) <= 3 and is_idle(router)
            assert router.outcomes == {"answered": 23, "refused_422": 1} and router.poison == 1

    asyncio.run(run())


def test_a_request_whose_workers_are_killed_from_outside_is_answered() -> None:
    """Two workers one after the other go down under it, neither of its doing: it shared the first, the second
    was the one strike that alone refuses nobody. The third answers.
    """

    async def run() -> None:
        async with AsyncExitStack() as stack:
            (good,) = await stack.enter_async_context(engines(["mixed"]))
            came: list[str] = []
            frees = asyncio.Event()

            def is_left(attempts: Mapping[asyncio.Timeout, Reply]) -> bool:
                return not attempts

            def slow(name: str) -> Callable[[web.Request], Any]:
                async def handler(request: web.Request) -> web.Response:
                    await request.read()
                    came.append(name)
                    await frees.wait()
                    return web.json_response({"choices": [{"index": 0, "text": ""}]})

                return handler

            pair = [await stack.enter_async_context(a_server(slow(name), name)) for name in "ab"]
            router, url = await stack.enter_async_context(routed([*pair, good], IN_TURNS))
            good.is_up = False
            asked = [asyncio.ensure_future(post(url, a_body())) for _ in range(4)]
            await until(lambda: len(came) == 4)
            good.is_up = True
            for k, down in enumerate(pair):
                assert router.attempts[k]
                down.is_up = False
                await until(partial(is_left, router.attempts[k]))
            answers = await asyncio.wait_for(asyncio.gather(*asked), PATIENCE_S)
            assert [status for status, _, _ in answers] == [200] * 4
            assert not router.poison and router.outcomes == {"answered": 4} and is_idle(router)
            frees.set()

    asyncio.run(run())


class Case:
    """A request as `Trust` sees it."""

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared, self.is_suspect, self.strikes = is_shared, False, 0


def test_strikes_are_for_those_alone_or_on_trial() -> None:
    """In company: a suspect without a strike. Alone, or on trial: one. A trial holds a worker for TRIAL_S."""
    trust = Trust(2)
    shared, alone = Case(is_shared=True), Case(is_shared=False)
    for each in (shared, alone):
        trust.note_death(0, each)
    assert (shared.is_suspect, shared.strikes, alone.strikes) == (True, 0, 1)
    trust.begin_trial(1, shared, 10.0)
    assert trust.with_suspects(10.0) == {1} and not trust.with_suspects(10.0 + TRIAL_S)
    trust.note_death(1, shared)
    trust.end_trial(1, alone)
    assert shared.strikes == 1 and trust.with_suspects(10.0) == {1}
    trust.end_trial(1, shared)
    assert not trust.with_suspects(10.0)


def test_requests_are_counted_once_however_often_they_are_tried() -> None:
    """Five requests, the first worker fails each it gets: the counter's outcomes add up to five, and the
    tries beyond have a counter of their own.
    """

    async def fails(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=500)

    async def run() -> None:
        async with beside_a_good_one(fails, IN_TURNS) as (router, url):
            for _ in range(5):
                assert (await post(url, a_body()))[0] == 200
            async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            counts: Counter[str] = Counter()
            for line in lines:
                name, _, value = line.rpartition(" ")
                counts[name.partition("{")[0]] += int(float(value)) if not line.startswith("#") else 0
            assert counts["fleetplan_requests_total"] == 5
            assert counts["fleetplan_retries_total"] == router.retries >= 1

    asyncio.run(run())


def test_a_worker_that_starts_again_ends_no_others_rest() -> None:
    """Both rest after failures, and worker 1 comes up with a new identity: only its own record is cleared."""
    backends: list[Any] = [
        SimpleNamespace(name=f"mixed-{w}", identity=f"first {w}", is_up=True, can_change_role=False)
        for w in range(2)
    ]
    router = LiveRouter(backends, fleet_of(("mixed", "mixed", 2)))
    router._note_who_is_up(0.0)
    for w in range(2):
        while not router.trust.records[w].rests_until_s:
            router.trust.note_failure(w, 1.0, is_refusal=False)
    backends[1].identity = "second 1"
    router._note_who_is_up(1.0)
    assert router.trust.records[0].rests_until_s > 1.0
    assert router.trust.records[1].rests_until_s == 0.0
