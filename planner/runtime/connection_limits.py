"""Accepts clients: binds addresses before any engine starts, counts connections, and ends silent ones.

The HTTP server is aiohttp's, which has no limits on connections. Here are two: on all connections, below the
number of files that the process may open, and on those of one client. At the limit on all, the connection
that has waited for a request for longest is ended to make room, so that silent ones lock nobody out. A
connection that has sent no whole head of a request after `ConnectionLimits.idle_s` is ended.
"""

import asyncio
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http import HttpProcessingError

from planner.errors import InputError
from planner.runtime.addresses import is_loopback

FILES_KEPT = 256  # Files left for logs, listening sockets and health checks; set by hand.
FILES_EACH = 3  # Files per connection: its own, that to an engine, and an engine's connection kept open.
# The bounds on connections: a server with few files must not be shut, and unlimited files need a number too.
LEAST_CONNECTIONS, MOST_CONNECTIONS = 16, 10**6
BACKLOG = 1024  # Connections that may wait in the kernel before they are accepted.
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The most connections in all, and of one client's address.

    The second limit is not for this machine itself, as its connections may come from a proxy for many
    clients. A connection may be `idle_s` without a request.
    """

    connections: int = 10_000
    connections_per_client: int = 1_000
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("connections", "connections_per_client", "idle_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}: must be above 0, found {getattr(self, name)!r}")


class OpenConnections:
    """The connections of a server: how many there are and which may stay. `refused` counts those that were
    ended, by the limit that was reached: "all", "client" or "idle".
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.most = min(limits.connections, connections_for(_most_open_files()))  # The limit on all together.
        self.open = 0  # How many connections there are now; `clients` has how many of each client.
        self.refused: Counter[str] = Counter()
        self.clients: Counter[str] = Counter()
        # Since when each connection waits for a request, the longest wait first.
        self.waiting: dict[asyncio.BaseTransport, float] = {}

    def admit(self, transport: asyncio.BaseTransport, client: str) -> bool:
        """Count a new connection; where there are too many, end one that waits for a request.

        Returns whether the new connection may stay.
        """
        self.open += 1
        self.clients[client] += 1
        if not is_loopback(client) and self.clients[client] > self.limits.connections_per_client:
            self.refused["client"] += 1
            return False
        if self.open > self.most:
            self.refused["all"] += 1
            if not self.waiting:
                return False
            self._end_oldest()
        self.waiting[transport] = time.monotonic()
        return True

    def note_closed(self, transport: asyncio.BaseTransport, client: str) -> None:
        """Subtract a closed connection from the counts."""
        self.open -= 1
        self.clients[client] -= 1
        if not self.clients[client]:
            del self.clients[client]
        self.waiting.pop(transport, None)

    def _end_oldest(self) -> None:
        """End the connection that has waited for a request for longest."""
        oldest = next(iter(self.waiting))
        del self.waiting[oldest]
        assert isinstance(oldest, asyncio.Transport)
        oldest.abort()

    @web.middleware
    async def track_waiting(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count a connection as waiting, except from the end of a request's head to the end of its answer."""
        transport = request.transport
        if transport is not None:
            self.waiting.pop(transport, None)
        try:
            return await handler(request)
        finally:
            if transport is not None and not transport.is_closing():
                self.waiting[transport] = time.monotonic()

    async def end_idle(self) -> None:
        """End connections that have waited for too long, until this task is cancelled."""
        while True:
            # With eight checks per `idle_s` a connection lives at most an eighth longer than its limit.
            await asyncio.sleep(self.limits.idle_s / 8)
            latest_s = time.monotonic() - self.limits.idle_s
            while self.waiting and next(iter(self.waiting.values())) < latest_s:
                self.refused["idle"] += 1
                self._end_oldest()


class _Connection(asyncio.Protocol):
    """Passes all that happens on to aiohttp's protocol, if the connection is admitted."""

    def __init__(self, connections: OpenConnections, inner: asyncio.Protocol) -> None:
        self.connections, self.inner = connections, inner
        self.client, self.is_admitted = "", False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        self.transport, self.client = transport, str(peer[0]) if peer else ""
        self.is_admitted = self.connections.admit(transport, self.client)
        if self.is_admitted:
            self.inner.connection_made(transport)
        else:
            assert isinstance(transport, asyncio.Transport)
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.connections.note_closed(self.transport, self.client)
        if self.is_admitted:
            self.inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self.is_admitted:
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received() if self.is_admitted else None

    def pause_writing(self) -> None:
        if self.is_admitted:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        if self.is_admitted:
            self.inner.resume_writing()


class _Site(web.BaseSite):
    """aiohttp's server on sockets that are bound already."""

    def __init__(
        self, runner: web.AppRunner, sockets: Sequence[socket.socket], connections: OpenConnections | None
    ) -> None:
        super().__init__(runner, backlog=BACKLOG)
        self._sockets, self._connections = sockets, connections
        self._servers: list[asyncio.Server] = []

    @property
    def name(self) -> str:
        return url_of(self._sockets[0])

    async def start(self) -> None:
        await super().start()
        loop, handlers = asyncio.get_running_loop(), self._runner.server
        assert handlers is not None
        connections = self._connections
        factory = handlers if connections is None else lambda: _Connection(connections, handlers())
        for listener in self._sockets:
            self._servers.append(await loop.create_server(factory, sock=listener, backlog=self._backlog))

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        await super().stop()


def connections_for(files: float) -> int:
    """How many connections a process that may open this many files, perhaps infinitely many, can hold."""
    return int(min(max((files - FILES_KEPT) / FILES_EACH, LEAST_CONNECTIONS), MOST_CONNECTIONS))


def _most_open_files() -> float:
    """How many files this process may open, after raising that limit as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return float("inf")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return float("inf") if hard == resource.RLIM_INFINITY else hard
    except (OSError, ValueError):  # Some systems refuse even the hard limit that they name.
        return soft


def bind_sockets(host: str, port: int, *, has_keys: bool) -> list[socket.socket]:
    """Sockets on all addresses of `host`. Nobody can connect yet, but the port is taken.

    Raises InputError for an address beyond this machine without API keys, and for one that cannot be bound.
    """
    if not is_loopback(host) and not has_keys:
        raise InputError(f"--host {host}: reachable from outside, so API keys are needed; give --api-keys")
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"--host {host[:100]}: no such address ({why})") from None
    sockets: list[socket.socket] = []
    try:
        # A host may have an address twice.
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            listener = socket.socket(family, kind, protocol)
            sockets.append(listener)
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # IPv4 addresses of the host have sockets of their own.
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if not port and len(sockets) > 1:  # Any port will do, but all sockets must share it.
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            listener.bind(address)
    except OSError as error:
        for listener in sockets:
            listener.close()
        raise InputError(f"{host}:{port} cannot be listened on ({error.strerror or error})") from None
    return sockets


def url_of(bound: socket.socket) -> str:
    """The URL of a server that listens on this socket."""
    name, port = bound.getsockname()[:2]
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"


@asynccontextmanager
async def listening(
    app: web.Application,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    sockets: Sequence[socket.socket] = (),
    connections: OpenConnections | None = None,
) -> AsyncIterator[str]:
    """Serve `app` on `host` and `port`, or on `sockets` that were bound for it; yields its URL.

    Without `connections` their number is not limited. Compressed bodies reach the handler as they are:
    aiohttp would inflate all of them, read or not, before anybody looks at the key.
    """
    bound = list(sockets) or bind_sockets(host, port, has_keys=False)
    if connections is not None:
        app.middlewares.insert(0, connections.track_waiting)
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, logger=_quiet_logger(), auto_decompress=False
    )
    await runner.setup()
    sweeping = None if connections is None else asyncio.ensure_future(connections.end_idle())
    try:
        try:
            await _Site(runner, bound, connections).start()
        except OSError as error:
            why = error.strerror or error
            raise InputError(f"{url_of(bound[0])} cannot be listened on ({why})") from None
        yield url_of(bound[0])
    finally:
        if sweeping is not None:
            sweeping.cancel()
        await runner.cleanup()
        for listener in bound:
            listener.close()


def _quiet_logger() -> logging.Logger:
    """aiohttp's log without the text of malformed requests, in which a header's value may be an API key."""
    logger = logging.getLogger("fleetplan.http")
    if not logger.filters:
        logger.addFilter(_drop_headers)
    return logger


def _drop_headers(record: logging.LogRecord) -> bool:
    """A filter of logs: aiohttp's words on a malformed request give way to the kind of error."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.args = "a malformed request was refused: %s", (type(error).__name__,)
        record.exc_info = record.exc_text = None
    return True
