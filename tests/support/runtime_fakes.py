"""Small fleets and engines that only keep time, for the tests of planner/runtime."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from planner.documents.catalog import read_catalog
from planner.documents.warm_up import WarmPrompt
from planner.fleet import Fleet, Policies, Pool, Role, WorkerType
from planner.models.latency import StepLatency
from planner.runtime.connection_limits import listening
from planner.runtime.fake_engine import FakeEngine, Server
from planner.runtime.router import LiveRouter, RouterSettings
from planner.traffic.trace import Trace

CATALOG = read_catalog()
LLM = CATALOG.llm("meta-llama/Llama-3.1-8B")
MODEL = LLM.name
TURN_S = 0.2
PATIENCE_S = 60.0  # A busy machine is slow, not wrong.
# 2 ms a step, 10 us per token: quick, and far above a clock's noise
LATENCY = StepLatency((1.0, 512.0), (0.002, 0.007), 1e-9, 1e-5, 1e-9, 1e-5, 0.0, "by hand")


def worker_type(latency: StepLatency = LATENCY, kv_tokens: int = 16_000) -> WorkerType:
    return WorkerType(CATALOG.gpu("h100-80g"), 1, latency, kv_tokens, 512, 32)


def fleet_of(
    *pools: tuple[str, Role, int], policies: Policies | None = None, latency: StepLatency = LATENCY
) -> Fleet:
    """Pools of (name, role, count)."""
    kind = worker_type(latency)
    return Fleet(LLM, tuple(Pool(name, role, kind, n) for name, role, n in pools), policies or Policies())


def random_trace(requests: int, rate_rps: float, *, seed: int = 0, most: int = 200) -> Trace:
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / rate_rps, requests))
    return Trace(
        "random", arrival_s - arrival_s[0], rng.integers(4, most, requests), rng.integers(1, 20, requests)
    )


@dataclass
class Backend:
    """A worker as the router sees it, and what it is."""

    name: str
    role: Role
    kind: WorkerType
    url: str
    identity: str = ""
    is_up: bool = True
    starts: int = 1
    gave_up: str = ""
    can_change_role: bool = True
    turns: int = 0

    def change_role(self, role: Role) -> None:
        """As a real one: it is down, then up with another identity."""
        self.role, self.is_up, self.turns = role, False, self.turns + 1
        asyncio.get_running_loop().call_later(TURN_S, self._up)

    def _up(self) -> None:
        self.is_up, self.starts = True, self.starts + 1


@asynccontextmanager
async def engines(roles: Sequence[Role], latency: StepLatency = LATENCY) -> AsyncIterator[list[Backend]]:
    """One engine per role, in this process, all with prefix caches."""
    async with AsyncExitStack() as stack:
        found = []
        for number, role in enumerate(roles):
            engine = FakeEngine(
                latency,
                kv_tokens=16_000,
                max_num_seqs=32,
                max_num_batched_tokens=512,
                log=None,
                prefix_cache=True,
            )
            loop = asyncio.ensure_future(engine.run())
            stack.callback(loop.cancel)
            url = await stack.enter_async_context(listening(Server(engine).app, "127.0.0.1", 0))
            found.append(Backend(f"{role}-{number}", role, worker_type(latency), url))
        yield found


@asynccontextmanager
async def routed(
    backends: Sequence[Backend],
    policies: Policies | None = None,
    settings: RouterSettings | None = None,
    warm_up: Sequence[WarmPrompt] = (),
) -> AsyncIterator[tuple[LiveRouter, str]]:
    """A router before them, and its URL."""
    settings = replace(settings or RouterSettings(), patience_s=0.5)
    pools = tuple(Pool(backend.name, backend.role, backend.kind, 1) for backend in backends)
    router = LiveRouter(backends, Fleet(LLM, pools, policies or Policies()), settings, warm_up=warm_up)
    async with listening(router.app, "127.0.0.1", 0) as url:
        yield router, url


Body = dict[str, Any]


def a_body(tokens: int = 20, outputs: int = 5, **more: Any) -> Body:
    return {"model": MODEL, "prompt": list(range(3, 3 + tokens)), "max_tokens": outputs, **more}


async def post(url: str, body: Any, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
    data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/completions", data=data, headers=headers) as answer,
    ):
        text = await answer.text()
        is_json = answer.content_type == "application/json"
        return answer.status, json.loads(text) if is_json else text, answer.headers


@asynccontextmanager
async def a_server(handler: Callable[[web.Request], Any], name: str = "odd") -> AsyncIterator[Backend]:
    """An engine that answers as `handler` likes."""
    app = web.Application()
    app.add_routes([web.post("/v1/completions", handler)])
    async with listening(app, "127.0.0.1", 0) as url:
        yield Backend(name, "mixed", worker_type(), url)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so; raises TimeoutError where it takes a minute."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.005)


def is_idle(router: LiveRouter) -> bool:
    workers = router.live.workers
    held = (workers[name].any() for name in ("assigned", "pending_tokens", "assigned_tokens", "used_blocks"))
    return not router.in_flight and not any(held)
