"""The router over HTTP, before engines that only keep time, and against abuse."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from runtime_fakes import MODEL, Body, a_body, a_server, engines, fleet_of, is_idle, post, routed, until

from planner.errors import InputError
from planner.fleet import Policies
from planner.runtime.addresses import is_loopback
from planner.runtime.connection_limits import listening
from planner.runtime.launch import WORKER_HEADER
from planner.runtime.router import REMOTE_DECODE, LiveRouter, RouterSettings


def streamed_ids(text: str) -> list[int]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


def test_answers_come_through_whole_and_as_they_are_generated() -> None:
    """The engine's ids are places in the context: a prompt of 20 is followed by 20, 21, ... Streamed or not,
    by both workers in turn; afterwards no load is left."""

    async def run() -> None:
        async with (
            engines(["mixed", "mixed"]) as backends,
            routed(backends, Policies(routing="round-robin")) as (router, url),
        ):
            answers = await asyncio.gather(*(post(url, a_body(stream=k % 2 == 0)) for k in range(6)))
            for k, (status, answer, _) in enumerate(answers):
                ids = streamed_ids(answer) if k % 2 == 0 else answer["choices"][0]["token_ids"]
                assert (status, ids) == (200, [20, 21, 22, 23, 24])
            assert {headers[WORKER_HEADER] for _, _, headers in answers} == {"mixed-0", "mixed-1"}
            assert is_idle(router) and router.outcomes["answered"] == 6

    asyncio.run(run())


def test_a_pair_prefills_here_and_decodes_there() -> None:
    """The prefill worker is asked for one token without streaming, the decode worker for all of them, with
    the parameters that the prefill worker answered; the client sees what one engine would have said."""
    seen: list[Body] = []

    async def run() -> None:
        async with engines(["prefill", "decode"]) as (prefill, decode):

            async def note(request: web.Request) -> web.Response:
                seen.append(json.loads(await request.read()))
                async with (
                    aiohttp.ClientSession() as client,
                    client.post(prefill.url + request.path, data=json.dumps(seen[-1])) as answer,
                ):
                    return web.json_response(await answer.json())

            async with a_server(note) as noted:
                async with routed([replace(prefill, url=noted.url), decode]) as (router, url):
                    asked = a_body(stream=True, min_tokens=5, stream_options={"include_usage": True})
                    status, answer, headers = await post(url, asked)
                    assert (status, streamed_ids(answer)) == (200, [20, 21, 22, 23, 24])
                    assert headers[WORKER_HEADER] == "prefill-0,decode-1"
                    assert is_idle(router)

    asyncio.run(run())
    assert len(seen) == 1 and "stream_options" not in seen[0]
    assert {key: seen[0][key] for key in ("max_tokens", "min_tokens", "stream")} == {
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
    }
    assert seen[0]["kv_transfer_params"] == REMOTE_DECODE


@pytest.mark.parametrize("how", ["refuses", "dies", "fails"])
def test_a_worker_that_fails_before_the_answer_began_costs_only_a_retry(how: str) -> None:
    """Nobody listens, the connection breaks, or the answer is 500: the other worker answers."""

    async def odd(request: web.Request) -> web.Response:
        await request.read()
        if how == "dies":
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=500)

    async def run() -> None:
        async with engines(["mixed"]) as backends, a_server(odd) as broken:
            if how == "refuses":
                broken.url = "http://127.0.0.1:9"
            both = [broken, *backends]
            async with routed(both, Policies(routing="round-robin")) as (router, url):
                for _ in range(4):
                    status, answer, headers = await post(url, a_body())
                    assert status == 200 and headers[WORKER_HEADER] == "mixed-0"
                    assert answer["choices"][0]["token_ids"] == [20, 21, 22, 23, 24]
                assert router.retries >= 2 and is_idle(router)

    asyncio.run(run())


def test_a_foreign_server_on_a_workers_port_answers_for_nobody() -> None:
    """It answers 200 with tokens, but not under the name that this start of the engine was given: the request
    goes to the engine that does; nothing of the foreign answer reaches the client."""

    async def foreign(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"choices": [{"index": 0, "text": "", "token_ids": [1, 1, 1, 1, 1]}]})

    async def run() -> None:
        async with engines(["mixed"]) as good, a_server(foreign) as other:
            backends = [replace(other, identity="the name given to our engine"), *good]
            async with routed(backends, Policies(routing="round-robin")) as (router, url):
                status, answer, headers = await post(url, a_body())
                assert (status, headers[WORKER_HEADER]) == (200, "mixed-0")
                assert answer["choices"][0]["token_ids"] == [20, 21, 22, 23, 24]
                assert (router.outcomes, router.retries) == ({"answered": 1}, 1)

    asyncio.run(run())


def test_a_stream_that_breaks_ends_with_an_error() -> None:
    """Two tokens, then the connection is gone: the client gets both and an error event."""
    has_both = asyncio.Event()

    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in (1, 2):
            await response.write(b'data: {"choices":[{"token_ids":[%d]}]}\n\n' % token)
        await has_both.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    async def run() -> None:
        async with a_server(breaks) as backend, routed([backend]) as (router, url):
            events = []
            async with (
                aiohttp.ClientSession() as client,
                client.post(f"{url}/v1/completions", json=a_body(stream=True)) as answer,
            ):
                assert answer.status == 200
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        events.append(json.loads(line[6:]))
                    if len(events) == 2:
                        has_both.set()
            assert [event.get("choices", [{}])[0].get("token_ids") for event in events] == [[1], [2], None]
            assert events[-1]["error"]["code"] == 502 and "odd" in events[-1]["error"]["message"]
            assert router.outcomes["broken"] == 1 and is_idle(router)

    asyncio.run(run())


def test_too_many_requests_are_told_when_to_come_back() -> None:
    """Two in flight at most: of ten at once two are answered, eight get 429 with Retry-After."""

    async def run() -> None:
        async with (
            engines(["mixed"]) as backends,
            routed(backends, settings=RouterSettings(max_in_flight=2)) as (router, url),
        ):
            answers = await asyncio.gather(*(post(url, a_body(outputs=15)) for _ in range(10)))
            assert sorted(status for status, _, _ in answers) == [200] * 2 + [429] * 8
            assert all("Retry-After" in headers for status, _, headers in answers if status == 429)
            assert router.outcomes["refused_429"] == 8 and is_idle(router)

    asyncio.run(run())


def test_without_a_worker_requests_wait_for_one_and_then_are_refused() -> None:
    """It comes back within the half second that a request waits, or it does not."""

    async def run() -> None:
        async with engines(["mixed"]) as backends, routed(backends) as (router, url):
            backends[0].is_up = False
            status, answer, headers = await post(url, a_body())
            assert status == 503 and "Retry-After" in headers and "error" in answer
            waiting = asyncio.ensure_future(post(url, a_body()))
            await until(lambda: router.in_flight == 1)
            await asyncio.sleep(0.1)
            backends[0].is_up = True
            assert (await waiting)[0] == 200 and is_idle(router)

    asyncio.run(run())


def test_a_client_that_leaves_frees_its_worker() -> None:
    """Ten requests of a second each, all dropped after 0.1 s: nothing is left, and the engine is idle."""

    async def run() -> None:
        async with engines(["mixed"]) as backends, routed(backends) as (router, url):
            timeout = aiohttp.ClientTimeout(total=0.1)
            async with aiohttp.ClientSession(timeout=timeout) as client:

                async def leave() -> None:
                    with pytest.raises((TimeoutError, aiohttp.ClientError)):
                        async with client.post(
                            f"{url}/v1/completions", json=a_body(outputs=500, stream=True)
                        ) as answer:
                            await answer.read()

                await asyncio.gather(*(leave() for _ in range(10)))
            await until(lambda: is_idle(router))
            async with aiohttp.ClientSession() as client, client.get(f"{backends[0].url}/metrics") as answer:
                assert 'kv_cache_usage_perc{engine="0",model_name="rehearsal"} 0.0' in await answer.text()
            assert (await post(url, a_body()))[0] == 200

    asyncio.run(run())


HOSTILE = [
    "../../etc/passwd",
    "a\x00b",
    "a\r\nX-Evil: 1",
    "'; DROP TABLE models; --",
    "$(reboot)",
    "`id`",
    "${HOME}",
    "{{7*7}}",
    "<script>alert(1)</script>",
    "%s%n",
    "\u202egpj",
    "😀" * 40,
    "a" * 5000,
    "",
    " ",
    "null",
    "\\x00",
    "-rf",
    "--api-key=x",
    "model\tname",
]
NONSENSE: list[Any] = [None, True, -1, 1.5, [], {}, [[1, 2]], [True], ["a", 1], {"a": 1}]


def hostile_bodies() -> list[Any]:
    """More than a hundred requests that must be refused."""
    bodies: list[Any] = [a_body() | {"model": name} for name in HOSTILE]
    bodies += [a_body() | {"model": value} for value in NONSENSE]
    bodies += [a_body() | {"prompt": value} for value in NONSENSE]
    bodies += [a_body() | {"prompt": ""}, {"model": MODEL}]
    lengths: list[Any] = [0, -1, 1.5, "5", True, [], {}, 10**12]
    bodies += [a_body() | {"max_tokens": value} for value in lengths]
    bodies += [a_body(tokens=16_001, outputs=1)]
    bodies += [a_body(kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.0.0.1"})]
    bodies += [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b"\x00" * 100,
        b"[" * 100_000,
        b'{"model": NaN',
        json.dumps(HOSTILE).encode(),
        b"x" * 1000,
    ]
    bodies += [json.dumps(a_body())[:cut].encode() for cut in range(5, 130, 3)]
    return bodies


def test_a_hundred_hostile_requests_are_refused_and_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Each ends in 400 or 404 with a JSON error that does not echo it; the next good request is answered."""
    bodies = hostile_bodies()
    assert len(bodies) > 100

    async def run() -> None:
        async with engines(["mixed"]) as backends, routed(backends) as (router, url):
            for body in bodies:
                status, answer, _ = await post(url, body)
                assert status in (400, 404), body
                assert len(json.dumps(answer)) < 300 and "passwd" not in json.dumps(answer)
            for path in ("/", "/v1", "/v1/completions/../../x", "/admin", "/%00", "/v1/completions%20"):
                async with aiohttp.ClientSession() as client, client.get(url + path) as answer:
                    assert answer.status in (404, 405)
            assert (await post(url, a_body()))[0] == 200
            assert is_idle(router)

    with caplog.at_level(logging.DEBUG, "fleetplan"):
        asyncio.run(run())
    assert "passwd" not in caplog.text


def test_a_text_or_an_image_is_refused_by_the_engine_alone() -> None:
    """12,000 tokens in 96,000 characters fit, where 4 characters per token would be 24,000 in a KV cache of
    16,000; so does an image, whose 120,000 characters are no text. 17,000 tokens do not, says the engine."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 120_000}}
    chat = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]

    async def run() -> None:
        async with engines(["mixed"]) as backends, routed(backends) as (router, url):
            for words, expected in ((12_000, 200), (17_000, 400)):
                status, answer, _ = await post(url, a_body() | {"prompt": "abcdefg " * words})
                assert status == expected, answer
            body = {"model": MODEL, "messages": chat, "max_tokens": 5}
            async with (
                aiohttp.ClientSession() as client,
                client.post(f"{url}/v1/chat/completions", json=body) as chat_answer,
            ):
                assert chat_answer.status == 200
            assert is_idle(router)

    asyncio.run(run())


def test_wrong_keys_and_large_bodies_are_refused_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    """No key, wrong ones, a key as another scheme: 401. A megabyte too much: 413. No log holds a key."""
    settings = RouterSettings(keys=("right-key", "second"), max_body_bytes=100_000)
    wrong = [
        "",
        "Bearer",
        "Bearer wrong-key",
        "Basic right-key",
        "Bearer right-ke",
        "Bearer right-keyy",
        "right-key",
        "Bearer " + "k" * 5000,
        "Bearer ключ",
    ]

    async def run() -> None:
        async with engines(["mixed"]) as backends, routed(backends, settings=settings) as (router, url):
            for key in wrong:
                header = {"Authorization": key.encode().decode("latin-1")} if key else {}
                assert (await post(url, a_body(), **header))[0] == 401
            for key in ("right-key", "second"):
                assert (await post(url, a_body(), Authorization=f"Bearer {key}"))[0] == 200
            large = b'{"prompt": "' + b"x" * 1_100_000
            assert (await post(url, large, Authorization="Bearer second"))[0] == 413
            async with aiohttp.ClientSession() as client:
                async with client.get(f"{url}/metrics") as answer:
                    assert answer.status == 401
                async with client.get(f"{url}/health") as answer:
                    assert answer.status == 200
            assert is_idle(router)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(run())
    assert not any(secret in caplog.text for secret in ("right-ke", "second", "wrong-key", "kkkk"))
    assert "right-key" not in repr(settings)


def test_request_ids_are_passed_on_only_where_they_are_harmless() -> None:
    """An id of letters and digits comes back; one with blanks or of a thousand letters is replaced."""

    async def run() -> None:
        async with engines(["mixed"]) as backends, routed(backends) as (_, url):
            for given, is_kept in (("p0r7", True), ("a b", False), ("x" * 1000, False)):
                _, _, headers = await post(url, a_body(), **{"X-Request-Id": given})
                assert (headers["X-Request-Id"] == given) == is_kept

    asyncio.run(run())


def test_metrics_count_what_happened() -> None:
    async def run() -> None:
        async with engines(["mixed"]) as backends, routed(backends) as (_, url):
            await asyncio.gather(*(post(url, a_body(stream=True)) for _ in range(3)))
            await post(url, b"{")
            async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as answer:
                text = await answer.text()
        assert 'fleetplan_requests_total{outcome="answered"} 3' in text
        assert 'fleetplan_requests_total{outcome="refused_400"} 1' in text
        assert 'fleetplan_worker_up{worker="mixed-0"} 1' in text
        assert 'fleetplan_first_byte_seconds_bucket{le="+Inf"} 3' in text

    asyncio.run(run())


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_only_loopback_needs_no_key(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    if not expected:

        async def open_to_all() -> None:
            async with listening(web.Application(), host, 0):
                pass

        with pytest.raises(InputError, match="API keys"):
            asyncio.run(open_to_all())


def test_a_port_in_use_and_an_unknown_policy_are_one_line() -> None:
    async def run() -> None:
        async with listening(web.Application(), "127.0.0.1", 0) as url:
            with pytest.raises(InputError, match="cannot be listened on"):
                async with listening(web.Application(), "127.0.0.1", int(url.rpartition(":")[2])):
                    pass

    asyncio.run(run())
    for policies, said in (
        (Policies(routing="astrology"), "one of jsq"),
        (Policies(queue="lpm"), "real engines"),
    ):
        with pytest.raises(InputError, match=said):
            LiveRouter([], fleet_of(("w", "mixed", 1), policies=policies))
