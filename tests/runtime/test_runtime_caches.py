"""The router over HTTP before engines that keep prefixes: what it finds there, and for whom."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from runtime_fakes import MODEL, Backend, Body, a_body, a_server, engines, is_idle, post, routed, until

from planner.documents.warm_up import WarmPrompt
from planner.fleet import Policies
from planner.runtime import router as router_module
from planner.runtime.exchange import TENANT_HEADER
from planner.runtime.launch import WORKER_HEADER


async def workers_of(url: str, body: Body, times: int, **headers: str) -> list[str]:
    """Who answers the same request so many times, one after the other."""
    answers = [await post(url, body, **headers) for _ in range(times)]
    assert {status for status, _, _ in answers} == {200}
    return [headers[WORKER_HEADER] for _, _, headers in answers]


async def hits_of(routing: str) -> tuple[int, int]:
    """Tokens asked for and found cached: 60 prompts over 12 documents of 320 tokens, on four engines."""
    policies = Policies(routing=routing, prefix_cache=True)
    rng = np.random.default_rng(2)
    async with engines(["mixed"] * 4) as backends, routed(backends, policies) as (router, url):
        for document in rng.integers(12, size=60).tolist():
            prompt = [*range(1000 * document, 1000 * document + 320), *rng.integers(10**6, size=20).tolist()]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "stream": True}
            assert (await post(url, body))[0] == 200
        assert is_idle(router)
        return await counters(backends)


async def counters(backends: Sequence[Backend]) -> tuple[int, int]:
    """Tokens of prompts, and those of them that the engines found cached."""
    queried = hit = 0
    async with aiohttp.ClientSession() as client:
        for backend in backends:
            async with client.get(f"{backend.url}/metrics") as answer:
                text = await answer.text()
            queried += int(re.findall(r"prefix_cache_queries_total\S* (\d+)", text)[0])
            hit += int(re.findall(r"prefix_cache_hits_total\S* (\d+)", text)[0])
    return queried, hit


def test_e2_finds_on_the_engines_what_round_robin_misses() -> None:
    """60 prompts over 12 documents of 320 tokens: wherever e2 has seen a document, its 320 tokens are cached
    on the engine it chooses, so that only 12 times they are not (a prompt has 340). Round robin has to show
    every document to four engines."""
    queried, hit = asyncio.run(hits_of("e2"))
    assert (queried, hit) == (60 * 340, (60 - 12) * 320)
    queried, hit = asyncio.run(hits_of("round-robin"))
    assert queried == 60 * 340 and hit <= (60 - 35) * 320


def test_d2lpm_gives_a_tenant_as_much_of_every_worker() -> None:
    """30 times the same prompt of 33 tokens, 4 of output: the first on a worker costs 33 + 2 x 4, the others,
    of which 32 are cached, 9. With quanta of 50 no worker serves tenant a more than a quantum and a request
    beyond the other, where affinity leaves all to one. b's three requests are paid from b's own quanta."""

    async def run(routing: str) -> tuple[list[str], list[str], dict[str, float]]:
        policies = Policies(routing=routing, prefix_cache=True, worker_quantum_tokens=50)
        async with engines(["mixed"] * 2) as backends, routed(backends, policies) as (router, url):
            body = a_body(tokens=33, outputs=4, stream=True)
            a = await workers_of(url, body | {"user": "a"}, 30)
            b = await workers_of(url, body, 3, **{TENANT_HEADER: "b"})
            credit = {
                name: router.live.caches.worker_credit[u].sum() for name, u in router.live.tenants.items()
            }
            return a, b, credit

    a, b, credit = asyncio.run(run("d2lpm"))
    assert abs(a.count("mixed-0") - a.count("mixed-1")) * 9 <= 50 + 41
    assert len(set(b)) == 1 and credit["b"] == 2 * 50 - 3 * 9
    assert len(set(asyncio.run(run("prefix-affinity"))[0])) == 1


def test_engines_are_told_the_turn_of_whoever_asks() -> None:
    """Quanta of 40, prompts of 33 tokens, of which 32 are cached from the second on, 4 tokens of output at 2
    each: the first request of a, of turn 0, costs 33 + 8, so a's second is of turn 1, and finds 32 tokens; it
    costs 1 + 8. b's prompt is another one: of turn 1, which has begun, and nothing cached. A turn has 2^22
    places, the last of which is for who has nothing cached.
    """
    told: list[int] = []

    async def answered(request: web.Request) -> web.Response:
        told.append((await request.json())["priority"])
        return web.json_response({"choices": [{"text": ""}], "usage": {"completion_tokens": 4}})

    async def run() -> None:
        policies = Policies(queue="dlpm-turns", prefix_cache=True, quantum_tokens=40)
        async with a_server(answered) as backend, routed([backend], policies) as (_, url):
            for user, first in (("a", 3), ("a", 3), ("b", 900)):
                body = a_body(tokens=33, outputs=4, user=user) | {"prompt": list(range(first, first + 33))}
                assert (await post(url, body))[0] == 200

    asyncio.run(run())
    assert told == [2**22 - 1, 2 * 2**22 - 1 - 32, 2 * 2**22 - 1]


def test_workers_are_warmed_up_and_what_they_keep_draws_its_requests() -> None:
    """Document k of 320 tokens is kept by worker k % 3: engines hit 320 of each of 30 prompts' 340 tokens, on
    the worker that keeps it, from the first on. Computing the documents costs 6 x 320 tokens once."""
    documents = [tuple(range(1000 * k, 1000 * k + 320)) for k in range(6)]
    warm = [WarmPrompt(k % 3, document) for k, document in enumerate(documents)]

    async def run() -> tuple[list[str], tuple[int, int]]:
        policies, where = Policies(routing="pinned-prefix", prefix_cache=True), []
        async with (
            engines(["mixed"] * 3) as backends,
            routed(backends, policies, None, warm) as (router, url),
        ):
            await router.warm_up()
            assert None not in router.warmed_identities
            for k in range(30):
                prompt = [*documents[k % 6], *range(7000 + 20 * k, 7020 + 20 * k)]
                status, _, headers = await post(url, {"model": MODEL, "prompt": prompt, "max_tokens": 3})
                assert status == 200
                where.append(headers[WORKER_HEADER])
            return where, await counters(backends)

    where, (queried, hit) = asyncio.run(run())
    assert where == [f"mixed-{k % 3}" for k in range(30)]
    assert (queried, hit) == (30 * 340 + 6 * 320, 30 * 320)


def test_a_prompt_that_nobody_asks_for_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two documents on one worker one is asked for every 50 s, the other never: only that one is asked
    for by the router, 300 s after its last use, so twice in 750 s."""
    documents = [tuple(range(1000 * k, 1000 * k + 320)) for k in range(2)]
    warm = [WarmPrompt(0, document, 300.0) for document in documents]
    body = {"model": MODEL, "prompt": [*documents[0]], "max_tokens": 1}
    now_s = 0.0
    monkeypatch.setattr(router_module, "_now_s", lambda: now_s)
    monkeypatch.setattr(router_module, "WARM_UP_CHECK_S", 0.01)

    async def run() -> tuple[int, tuple[int, int]]:
        nonlocal now_s
        policies = Policies(routing="pinned-prefix", prefix_cache=True)
        async with engines(["mixed"]) as backends, routed(backends, policies, None, warm) as (router, url):
            await router.warm_up()
            for step in range(1, 16):
                assert (await post(url, body))[0] == 200
                now_s = 50.0 * step
                await until(lambda due=step // 6: router.keep_alives >= due)  # type: ignore[misc]
            await asyncio.sleep(0.1)  # In which ten checks would ask once too often.
            return router.keep_alives, await counters(backends)

    again, (queried, _) = asyncio.run(run())
    assert again == 2
    assert queried == (2 + 15 + again) * 320


def test_a_refused_prompt_counts_as_cached_nowhere() -> None:
    """An engine answers 400: its client sees that, and nobody takes the prompt for computed."""

    async def refuses(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"error": "too long for me"}, status=400)

    async def run() -> None:
        policies = Policies(routing="min-ttft", prefix_cache=True)
        async with a_server(refuses) as backend, routed([backend], policies) as (router, url):
            assert (await post(url, a_body(tokens=64)))[0] == 400
            assert is_idle(router) and not router.live.caches.holders.any()

    asyncio.run(run())


def test_tenants_are_text_of_some_length() -> None:
    """The field `user`, or what a gateway says in X-Tenant instead. Other types and a thousand letters are
    refused where the policy looks at tenants, and are the engine's business where it does not."""

    async def run() -> None:
        for routing, refused in (("tenant-round-robin", 400), ("jsq", 200)):
            policies = Policies(routing=routing, prefix_cache=True)
            async with engines(["mixed"]) as backends, routed(backends, policies) as (router, url):
                odd: list[Any] = [0, 7, [], ["a"], {"a": 1}, True, "x" * 1000]
                for user in odd:
                    assert (await post(url, a_body(user=user)))[0] == refused
                for user in ("", "a\x00b", "'; DROP TABLE tenants; --", "\u202egpj", "😀" * 256):
                    assert (await post(url, a_body(user=user)))[0] == 200
                assert (await post(url, a_body(user=7), **{TENANT_HEADER: "c"}))[0] == 200
                assert is_idle(router)
                if refused == 400:
                    assert set(router.live.tenants) >= {"c", "a\x00b"} and len(router.live.tenants) == 6

    asyncio.run(run())
