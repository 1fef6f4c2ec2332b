"""Runs our router in front of workers that others start and keep alive, such as a deployment's manifests.

The router asks each worker for its /health and sends requests to those that answer. If a worker restarts
between two health checks the router does not notice it, and believes that the worker still caches what it
cached before.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from planner.documents.warm_up import WarmPrompt
from planner.errors import InputError
from planner.fleet import Fleet, Role
from planner.runtime.addresses import split_address
from planner.runtime.router import LiveRouter, RouterSettings
from planner.runtime.service import serve_until_drained

LOG = logging.getLogger("fleetplan.workers")
# Every worker is asked this often, and each time may take this long to answer. It is down after three
# failures in a row, not after one slow answer of a busy engine.
HEALTH_EVERY_S, HEALTH_TIMEOUT_S, HEALTH_FAILURES = 2.0, 5.0, 3


@dataclass
class Remote:
    """A remote worker as a `router.Backend`.

    `identity` is empty, because the answers of such a worker do not name its process. `starts` and `gave_up`
    never change, because we do not start the worker.
    """

    name: str
    url: str
    identity: str = ""
    is_up: bool = False
    starts: int = 0
    gave_up: str = ""
    can_change_role = False  # Whoever starts a remote worker chose its role.

    def change_role(self, role: Role) -> None:
        raise NotImplementedError  # The router calls this only where `can_change_role` is true.

    async def watch(self, every_s: float) -> None:
        """Check /health every `every_s`, until cancelled.

        The worker is up after one answer, and down after HEALTH_FAILURES checks in a row without an answer.
        """
        failures = HEALTH_FAILURES  # A worker that was never asked is not up.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)) as client:
            while True:
                failures = 0 if await self._is_healthy(client) else failures + 1
                was_up, self.is_up = self.is_up, failures < HEALTH_FAILURES
                if self.is_up != was_up:
                    LOG.warning("worker %s: %s", self.name, "up" if self.is_up else "does not answer /health")
                await asyncio.sleep(every_s)

    async def _is_healthy(self, client: aiohttp.ClientSession) -> bool:
        try:
            async with client.get(f"{self.url}/health", allow_redirects=False) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False


def parse_workers(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parse each `POOL=URL,URL...` into the addresses of that pool, in their order."""
    addresses: dict[str, list[str]] = {}
    for text in texts:
        pool, equals, urls = text.rpartition("=")
        if not (pool and equals and urls):
            raise InputError(f"--workers: expected POOL=URL,URL..., found {text[:200]!r}")
        addresses.setdefault(pool, []).extend(url.strip().rstrip("/") for url in urls.split(","))
    return addresses


def make_remote_workers(fleet: Fleet, addresses: Mapping[str, Sequence[str]]) -> list[Remote]:
    """One worker per address, in the fleet's order.

    Raises InputError unless every worker of the plan has an address and no two have the same.
    """
    count_by_pool = {pool.name: pool.count for pool in fleet.running_pools}
    if unknown := set(addresses) - set(count_by_pool):
        raise InputError(
            f"--workers: no pool {min(unknown)[:80]!r} in the plan; it has {', '.join(count_by_pool)}"
        )
    for name, count in count_by_pool.items():
        if (given := len(addresses.get(name, ()))) != count:
            raise InputError(f"--workers: {name}: the plan has {count} workers, found {given} addresses")
    all_urls = [url for urls in addresses.values() for url in urls]
    for url in all_urls:
        parts = split_address(url)
        # The router adds the paths itself, and a name or password in the address would stand in logs.
        if parts is None or parts.path or parts.query or parts.fragment or parts.username is not None:
            raise InputError(
                f"--workers: expected an address such as http://10.0.0.1:8001, found {url[:200]!r}"
            )
        if all_urls.count(url) > 1:
            raise InputError(f"--workers: {url} is given twice")
    return [
        Remote(f"{name}-{number}", url)
        for name in count_by_pool
        for number, url in enumerate(addresses[name])
    ]


@asynccontextmanager
async def watch_health(workers: Sequence[Remote], every_s: float = HEALTH_EVERY_S) -> AsyncIterator[None]:
    """Ask for the health of all workers until the block ends."""
    tasks = [asyncio.ensure_future(worker.watch(every_s)) for worker in workers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(
    fleet: Fleet,
    addresses: Mapping[str, Sequence[str]],
    settings: RouterSettings,
    sockets: Sequence[socket.socket],
    *,
    drain_s: float,
    say: Callable[[str], None],
    warm_up: Sequence[WarmPrompt] = (),
) -> None:
    """Run our router in front of remote workers until it has drained, after at most `drain_s`, or is
    cancelled. `say` gets the line with the router's address.
    """
    workers = make_remote_workers(fleet, addresses)
    router = LiveRouter(workers, fleet, settings, warm_up=warm_up)
    async with watch_health(workers):
        await serve_until_drained(
            router, sockets, f"{len(workers)} workers elsewhere", drain_s=drain_s, say=say
        )
