"""Runs the router as a service: a limited log, and an orderly end when SIGTERM comes."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from socket import socket

from planner.runtime.connection_limits import listening
from planner.runtime.router import LiveRouter

# The router's own log has at most this many lines: enough to see a fault, too few to fill a disk in a day.
LINES_PER_S = 20
_POLL_S = 0.05  # How often a draining router looks whether requests are left: the end is noticed this late.


async def serve_until_drained(
    router: LiveRouter,
    sockets: Sequence[socket],
    workers_text: str,
    *,
    drain_s: float,
    say: Callable[[str], None],
) -> None:
    """Serve on `sockets` until SIGTERM comes and all requests in flight have ended, at most `drain_s` later.

    `say` tells the user what happens; `workers_text` stands for the workers in its first line. While the
    router drains, /health answers 503 and new requests are refused with Retry-After. A second SIGTERM ends
    the router at once.
    """
    stop_requested, loop = asyncio.Event(), asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def on_first_sigterm() -> None:
        stop_requested.set()
        loop.add_signal_handler(signal.SIGTERM, task.cancel)

    async with listening(router.app, sockets=sockets, connections=router.connections) as url:
        loop.add_signal_handler(signal.SIGTERM, on_first_sigterm)
        say(f"{router.fleet.llm.name} at {url}/v1 ({workers_text}); Ctrl-C ends it")
        await stop_requested.wait()
        router.is_draining = True
        say(f"SIGTERM: {router.in_flight} requests in flight have {drain_s:g} s to end")
        deadline_s = time.monotonic() + drain_s
        while router.in_flight and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        if router.in_flight:  # The end of the `async with` block closes their connections.
            say(f"{router.in_flight} requests are broken off")


def log_to_stderr() -> None:
    """Write warnings of router and workers to stderr with their times, at most LINES_PER_S lines a second."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(LineLimit(LINES_PER_S))
    logging.getLogger().addHandler(handler)


class LineLimit(logging.Filter):
    """Drops lines beyond `lines_per_s` in a second; the next line that passes says how many were dropped."""

    def __init__(self, lines_per_s: int) -> None:
        super().__init__()
        self.lines_per_s = lines_per_s
        self.second, self.lines = 0, 0  # The present second of the clock, and the lines that came in it.
        self.left_out = 0  # Lines dropped since the last one that passed.

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is logged. Appends to it how many lines were dropped before it."""
        if (second := int(record.created)) != self.second:
            self.second, self.lines = second, 0
        self.lines += 1
        if self.lines > self.lines_per_s:
            self.left_out += 1
            return False
        if self.left_out:
            record.msg, record.args = f"{record.getMessage()} ({self.left_out} lines left out before)", ()
            self.left_out = 0
        return True
