"""Runs the router for a long time with faults: killed and frozen engines, clients that are slow, silent or
leave.

    python benchmarks/soak.py [--requests 200000] [--engines 4] [--clients 64] [--every 5] [--routing jsq]

Engines are processes that answer at once, and are restarted as `plan serve` restarts its own. Every `--every`
seconds one is killed or frozen. The clients run in a process of their own and note how each request ended:

    whole      all requested tokens came, and the end of the stream
    broken     the stream ended with an error event, because its engine was gone
    refused    an HTTP status other than 200 came with a JSON error
    left       the client closed its connection on purpose
    lost       anything else: no answer, a stream that ends without an error, missing tokens

Exits with 1 if a request was lost, if the router counts one as in flight at the end, or if its memory at the
end is more than 10 % above that after a quarter of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
from aiohttp import web

from planner.documents.catalog import read_catalog
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.roofline import roofline
from planner.policies import ROUTING
from planner.runtime.connection_limits import ConnectionLimits, listening
from planner.runtime.launch import IDENTITY, IDENTITY_HEADER, end_with_parent
from planner.runtime.router import LiveRouter, RouterSettings
from planner.runtime.workers import (
    EngineCommand,
    LiveWorkers,
    Patience,
    WorkerPlace,
    place_workers,
    run_engines,
)

MODEL = "meta-llama/Llama-3.1-8B"
EVENT = b'data: {"choices":[{"index":0,"text":"","token_ids":[7]}]}\n\n'
DONE = b"data: [DONE]\n\n"
# How the engines are watched and restarted: faster than by default, so that faults can follow each other.
QUICK = Patience(
    health_every_s=0.5, health_timeout_s=2.0, health_failures=2, backoff_s=0.2, longest_backoff_s=1.0
)
ROUTED = RouterSettings(client_s=10.0, body_s=10.0, limits=ConnectionLimits(connections=2_000, idle_s=5.0))
# Kinds of requests: a stream, one answer as a whole, a stream that is read late, and one that the client
# leaves; and their shares.
STREAM, WHOLE, SLOW, LEAVES = "stream", "whole", "slow", "leaves"
SHARES = {STREAM: 0.6, WHOLE: 0.37, SLOW: 0.01, LEAVES: 0.02}
# Idle connections end well before the router ends them (`idle_s`): a client that sends on a connection that
# the router is just ending would lose its request.
CLIENT_IDLE_S = 1.0
SILENT = (
    50  # So many connections send no complete request; they are opened again when the router closes them.
)
CHECKS = 8  # The memory is noted so many times during a run.


@dataclass
class Ended:
    """How all requests ended, and the router's memory [MiB] in the course of the run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    memory_mib: list[float] = field(default_factory=list)
    kills: int = 0
    freezes: int = 0
    silent: int = 0
    in_flight: int = 0
    router: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0
    examples: list[str] = field(default_factory=list)  # Descriptions of lost requests.

    @property
    def growth_frac(self) -> float:
        """The growth of memory from a quarter of the run to its end."""
        return self.memory_mib[-1] / self.memory_mib[len(self.memory_mib) // 4] - 1


def serve_engine(port: int) -> None:
    """Runs an engine that answers at once, in this process."""
    end_with_parent()

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def complete(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        tokens = body["max_tokens"]
        if not body.get("stream"):
            return web.json_response({"choices": [], "usage": {"completion_tokens": tokens}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(tokens):
            await response.write(EVENT)
            await asyncio.sleep(0)
        await response.write(DONE)
        return response

    async def sign(_: web.Request, answer: web.StreamResponse) -> None:
        answer.headers[IDENTITY_HEADER] = os.environ[IDENTITY]

    app = web.Application()
    app.on_response_prepare.append(sign)
    app.add_routes([web.get("/health", health), web.post("/v1/completions", complete)])
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


def engine_command(_: WorkerPlace, port: int) -> EngineCommand:
    return EngineCommand([sys.executable, __file__, "--engine", str(port)], {})


def a_fleet(engines: int, routing: str) -> Fleet:
    catalog = read_catalog()
    llm, gpu = catalog.llm(MODEL), catalog.gpu("h100-80g")
    kind = WorkerType(gpu, 1, roofline(llm, gpu, 1), 64_000, 8192, 256)
    caches = ROUTING[routing].needs_caches
    return Fleet(llm, (Pool("w", "mixed", kind, engines),), Policies(routing=routing, prefix_cache=caches))


class Client:
    """The clients: `run` starts tasks that each send one request after the other, until all are sent."""

    def __init__(self, url: str, requests: int, seed: int) -> None:
        self.url, self.rng = url, random.Random(seed)
        self.numbers: Iterator[int] = iter(range(requests))
        self.outcomes: Counter[str] = Counter()
        self.examples: list[str] = []
        self.silent = 0

    async def run(self, clients: int, pipe: Connection) -> None:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=CLIENT_IDLE_S)
        ) as self.http:
            silent = [asyncio.ensure_future(self.say_nothing()) for _ in range(SILENT)]
            telling = asyncio.ensure_future(self.tell(pipe))
            await asyncio.gather(*(self.ask() for _ in range(clients)))
            for task in (*silent, telling):
                task.cancel()
        pipe.send((sum(self.outcomes.values()), self.outcomes, self.examples, self.silent))

    async def tell(self, pipe: Connection) -> None:
        """Send the number of ended requests five times a second."""
        while True:
            await asyncio.sleep(0.2)
            pipe.send((sum(self.outcomes.values()), None, None, None))

    async def say_nothing(self) -> None:
        """Open connections that send nothing, or half of a header, and wait until the router closes them."""
        port = int(self.url.rpartition(":")[2])
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                self.silent += 1
                writer.write(self.rng.choice((b"", b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")))
                await reader.read()
                writer.close()

    async def ask(self) -> None:
        for number in self.numbers:
            kind = self.rng.choices(list(SHARES), list(SHARES.values()))[0]
            try:
                outcome = await self.one(number, kind)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                outcome = f"lost: {kind}: {type(error).__name__}: {error}"
            if outcome.startswith("lost"):
                self.examples.append(outcome)
                outcome = "lost"
            self.outcomes[outcome] += 1
            if outcome.startswith("refused"):
                await asyncio.sleep(0.2)

    async def one(self, number: int, kind: str) -> str:
        """Send one request; returns how it ended."""
        tokens = self.rng.randrange(1, 12) if kind != SLOW else 3
        shared = self.rng.randrange(200)  # One of 200 beginnings, so that prompts share prefixes.
        prompt = [shared] * 64 + [self.rng.randrange(30_000) for _ in range(32)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": kind != WHOLE}
        data = json.dumps(body).encode()
        asked = self.http.post(
            f"{self.url}/v1/completions", data=data, headers={"X-Request-Id": f"r{number}"}
        )
        async with asked as answer:
            if answer.status != 200:
                await answer.json()
                return f"refused {answer.status}"
            if kind == WHOLE:
                found = (await answer.json())["usage"]["completion_tokens"]
                return "whole" if found == tokens else f"lost: {found} of {tokens} tokens"
            if kind == LEAVES:
                answer.close()
                return "left"
            if kind == SLOW:
                await asyncio.sleep(2.0)
            text = await answer.read()
            if text.endswith(DONE) and text.count(EVENT) == tokens:
                return "whole"
            return "broken" if b'"worker_failed"' in text[-200:] else f"lost: {text[-200:]!r}"


def serve_clients(url: str, requests: int, clients: int, seed: int, pipe: Connection) -> None:
    asyncio.run(Client(url, requests, seed).run(clients, pipe))


async def rage(group: LiveWorkers, every_s: float, seed: int, ended: Ended) -> None:
    """Kill or freeze a worker every `every_s` seconds, unless only one is up."""
    rng = random.Random(seed)
    while True:
        await asyncio.sleep(every_s)
        up = [worker for worker in group.workers if worker.is_up and worker.process is not None]
        if len(up) < 2:
            continue
        process = rng.choice(up).process
        assert process is not None
        is_kill = rng.random() < 0.5
        ended.kills, ended.freezes = ended.kills + is_kill, ended.freezes + (not is_kill)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL if is_kill else signal.SIGSTOP)


def memory_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def soak(requests: int, fleet: Fleet, clients: int, every_s: float, seed: int, folder: Path) -> Ended:
    """Send all requests through a router in this process; returns how they ended."""
    ended, began_s = Ended(), time.monotonic()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    async with run_engines(
        place_workers(fleet, folder, None, log_bytes=2**20), engine_command, QUICK
    ) as group:
        router = LiveRouter(group.workers, fleet, ROUTED)
        async with listening(router.app, connections=router.connections) as url:
            process = context.Process(
                target=serve_clients, args=(url, requests, clients, seed, theirs), daemon=True
            )
            process.start()
            theirs.close()  # Now the pipe ends if the clients' process dies.
            raging = asyncio.ensure_future(rage(group, every_s, seed, ended))
            loop, outcomes = asyncio.get_running_loop(), None
            try:
                while outcomes is None:
                    done, outcomes, examples, silent = await loop.run_in_executor(None, ours.recv)
                    if done >= requests * len(ended.memory_mib) / CHECKS:
                        ended.memory_mib.append(memory_mib())
            finally:
                raging.cancel()
                process.kill()
            for _ in range(100):  # Up to 10 s for the requests whose clients have left.
                if not router.in_flight:
                    break
                await asyncio.sleep(0.1)
    ended.outcomes, ended.examples, ended.silent = outcomes, examples, silent
    ended.in_flight, ended.router, ended.wall_s = (
        router.in_flight,
        router.outcomes,
        time.monotonic() - began_s,
    )
    ended.memory_mib.append(memory_mib())
    return ended


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two faults")
    parser.add_argument("--routing", default="jsq")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        serve_engine(options.engine)
        return
    fleet = a_fleet(options.engines, options.routing)
    logging.getLogger("fleetplan").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="fleetplan-soak-") as made:
        ended = asyncio.run(
            soak(options.requests, fleet, options.clients, options.every, options.seed, Path(made))
        )
        files = sum(path.stat().st_size for path in Path(made).rglob("*"))
    print(f"{sum(ended.outcomes.values())} requests in {ended.wall_s:.0f} s, {ended.kills} kills and")
    print(f"{ended.freezes} freezes of {options.engines} engines, {ended.silent} silent connections")
    print("clients:", json.dumps(dict(sorted(ended.outcomes.items()))))
    print("router: ", json.dumps(dict(sorted(ended.router.items()))), f"in flight {ended.in_flight}")
    print(
        "memory: ", ", ".join(f"{mib:.0f}" for mib in ended.memory_mib), f"MiB; logs {files / 2**20:.1f} MiB"
    )
    for example in ended.examples[:10]:
        print(example)
    if ended.outcomes["lost"] or ended.in_flight or ended.growth_frac > 0.1:
        sys.exit(1)


if __name__ == "__main__":
    main()
