"""Measures the latency that the router adds, with 24 engines that answer at once and 500 requests/s.

    python benchmarks/router.py [--rps 500] [--engines 24] [--seconds 20] [--routing jsq]

Client, router and engines are three processes. The router's share is the difference between requests through
the router and requests straight to an engine. Seconds of both alternate, so that other processes on the
machine disturb them alike. Percentiles are printed over all seconds, and over the quarter of seconds in which
requests without the router were quickest, so that other processes disturbed least. The router's CPU seconds
per request depend least on other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import aiohttp
import numpy as np
from aiohttp import web

from planner.documents.catalog import read_catalog
from planner.fleet import Fleet, Policies, Pool, Role, WorkerType
from planner.models.roofline import roofline
from planner.policies import ROUTING
from planner.runtime.connection_limits import listening
from planner.runtime.router import LiveRouter, RouterSettings

MODEL = "meta-llama/Llama-3.1-8B"
INPUT_TOKENS = 512
ANSWER = b'data: {"choices":[{"index":0,"text":"","token_ids":[7]}]}\n\ndata: [DONE]\n\n'


@dataclass
class Backend:
    name: str
    url: str
    identity: str = ""
    is_up: bool = True
    starts: int = 1
    gave_up: str = ""
    can_change_role: bool = False

    def change_role(self, role: Role) -> None:
        raise NotImplementedError


async def complete(request: web.Request) -> web.StreamResponse:
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(ANSWER)
    return response


def serve_engines(count: int, pipe: Connection) -> None:
    """Runs all engines, each with a port of its own, in this process."""

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", complete)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        for _ in range(count):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send([f"http://127.0.0.1:{address[1]}" for address in runner.addresses])
        await asyncio.Event().wait()

    asyncio.run(run())


def a_fleet(engines: int, routing: str) -> Fleet:
    """Mixed workers of one H100 each, by the catalog's figures."""
    catalog = read_catalog()
    llm, gpu = catalog.llm("meta-llama/Llama-3.1-8B"), catalog.gpu("h100-80g")
    kind = WorkerType(gpu, 1, roofline(llm, gpu, 1), 400_000, 8192, 256)
    policies = Policies(routing=routing, prefix_cache=ROUTING[routing].needs_caches)
    return Fleet(llm, (Pool("w", "mixed", kind, engines),), policies)


def serve_router(urls: list[str], routing: str, pipe: Connection) -> None:
    async def run() -> None:
        backends = [Backend(f"w-{k}", url) for k, url in enumerate(urls)]
        router = LiveRouter(backends, a_fleet(len(urls), routing), RouterSettings(max_in_flight=10**6))
        async with listening(router.app, "127.0.0.1", 0) as url:
            pipe.send(url)
            loop = asyncio.get_running_loop()
            while True:  # a question is answered with the CPU seconds so far
                await loop.run_in_executor(None, pipe.recv)
                pipe.send(time.process_time())

    asyncio.run(run())


async def load(
    client: aiohttp.ClientSession, urls: list[str], rps: float, rng: np.random.Generator
) -> list[float]:
    """One second of Poisson arrivals; latencies from the moment each request was due."""
    body = json.dumps(
        {"model": MODEL, "prompt": list(range(INPUT_TOKENS)), "max_tokens": 1, "stream": True}
    ).encode()
    headers = {"Content-Type": "application/json"}
    latencies: list[float] = []

    async def one(url: str, due_s: float) -> None:
        async with client.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
            text = await answer.read()
            assert answer.status == 200 and text == ANSWER, (answer.status, text[:200])
        latencies.append(time.monotonic() - due_s)

    due = np.cumsum(rng.exponential(1 / rps, rng.poisson(rps)))
    start_s, tasks = time.monotonic(), []
    for k, after_s in enumerate(due.tolist()):
        await asyncio.sleep(max(start_s + after_s - time.monotonic(), 0))
        tasks.append(asyncio.ensure_future(one(urls[k % len(urls)], start_s + after_s)))
    await asyncio.gather(*tasks)
    return latencies


async def measure(engines: list[str], router: str, pipe: Connection, rps: float, seconds: int) -> None:
    rng = np.random.default_rng(0)
    turns: list[tuple[list[float], list[float]]] = []
    cpu_s = 0.0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for turn in range(seconds + 2):
            direct = await load(client, engines, rps, rng)
            pipe.send(None)
            before_s = pipe.recv()
            routed = await load(client, [router], rps, rng)
            pipe.send(None)
            if turn > 1:  # the first two open the connections
                cpu_s += pipe.recv() - before_s
                turns.append((direct, routed))
            else:
                pipe.recv()
    requests = sum(len(routed) for _, routed in turns)
    quiet = sorted(turns, key=lambda turn: np.quantile(turn[0], 0.99))[: max(seconds // 4, 1)]
    print(f"{rps:g} requests/s, {len(engines)} engines, {requests} prompts of {INPUT_TOKENS} token ids")
    print(f"router's CPU per request {1e3 * cpu_s / requests:.2f} ms; load average {os.getloadavg()[0]:.1f}")
    for name, chosen in (
        (f"all {len(turns)} s", turns),
        (f"the {len(quiet)} s in which direct was quickest", quiet),
    ):
        print(name)
        ways = [np.quantile(np.concatenate([turn[way] for turn in chosen]), [0.5, 0.99]) for way in (0, 1)]
        for label, (p50_s, p99_s) in (("direct", ways[0]), ("router", ways[1]), ("added", ways[1] - ways[0])):
            print(f"  {label:7s} P50 {1e3 * p50_s:8.2f} ms   P99 {1e3 * p99_s:8.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rps", type=float, default=500.0)
    parser.add_argument("--engines", type=int, default=24)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--routing", default="jsq")
    told = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    (ours, theirs), (our_router, their_router) = context.Pipe(), context.Pipe()
    engines = context.Process(target=serve_engines, args=(told.engines, theirs), daemon=True)
    engines.start()
    urls = ours.recv()
    router = context.Process(target=serve_router, args=(urls, told.routing, their_router), daemon=True)
    router.start()
    try:
        asyncio.run(measure(urls, our_router.recv(), our_router, told.rps, told.seconds))
    finally:
        router.kill()
        engines.kill()


if __name__ == "__main__":
    main()
