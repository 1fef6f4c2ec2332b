"""The clock of a search goes by work: by what its simulations cost on a machine of reference.

So one question comes to one answer, byte for byte, on an idle and on a busy machine and on any number of
cores. All deadlines of a search are times of this clock. Behind it stands a safety net, the time limit on the
wall's clock: once that is reached every deadline has passed, and the answer says so.

What solvers do between simulations is not counted: each has a limit of its own on the wall's clock, which is
long for what it is asked.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from planner.search.oracle import deterministic_parallel
from planner.search.oracle.deterministic_parallel import Meter
from planner.search.oracle.stopping import USUAL_LIMIT_S, WORK_S

EFFORT_S = 1.2e-6
"""Seconds per simulated request of an ordinary fleet: 1.0 to 1.3 us over the plans of benchmarks/plans.py."""


@dataclass(slots=True)
class SafetyNet:
    """When the wall's clock ends a question, and whether it did."""

    ends_s: float = math.inf
    is_reached: bool = field(default=False)

    def holds(self) -> bool:
        """Whether the time limit is reached."""
        self.is_reached = self.is_reached or time.monotonic() > self.ends_s
        return self.is_reached


_net: ContextVar[SafetyNet | None] = ContextVar("net", default=None)
_lock = threading.Lock()


def now_s() -> float:
    """The time of the search's clock: what was simulated so far takes so many seconds."""
    return EFFORT_S * deterministic_parallel.effort_spent()


def is_over(deadline: float) -> bool:
    """Whether a deadline on the search's clock has passed, or the time limit is reached."""
    net = _net.get()
    return (net is not None and net.holds()) or now_s() >= deadline


def is_cut() -> bool:
    """Whether the time limit on the wall's clock has ended what was asked here."""
    net = _net.get()
    return net is not None and net.is_reached


def what_ended() -> str:
    """What came first of the two, where a search had to end."""
    return "the time limit" if is_cut() else "the most work that a plan may take"


def work_limit_s(time_limit_s: float) -> float:
    """How far the search's clock may go for a question with this time limit on the wall's clock."""
    return min(time_limit_s, max(WORK_S, time_limit_s * WORK_S / USUAL_LIMIT_S))


def wall_deadline_s(deadline: float, share: float = 1.0) -> float:
    """When a solver must end, on time.monotonic's clock: after this share of what is left of the time limit;
    at once where the deadline on the search's clock has passed.
    """
    net, now = _net.get(), time.monotonic()
    if now_s() >= deadline:
        return now
    if net is None:
        return math.inf
    return now + share * max(net.ends_s - now, 0.0)


@contextmanager
def time_limit(time_limit_s: float, *, grace: bool = False) -> Iterator[float]:
    """Limit what is asked within on the wall's clock, by no more than an outer limit does; with `grace` by no
    less than `time_limit_s`. Yields the deadline on the search's clock, which one question has for itself.
    """
    outer, ends_s = _net.get(), time.monotonic() + time_limit_s
    if outer is not None:
        ends_s = max(ends_s, outer.ends_s) if grace else min(ends_s, outer.ends_s)
    own = SafetyNet(ends_s)
    net_token = _net.set(own)
    meter_token = None if deterministic_parallel.has_meter() else deterministic_parallel.use_meter(Meter())
    try:
        yield now_s() + work_limit_s(time_limit_s)
    finally:
        if outer is not None:
            outer.is_reached = outer.is_reached or own.is_reached
        if meter_token is not None:
            meter_token.var.reset(meter_token)
        _net.reset(net_token)
