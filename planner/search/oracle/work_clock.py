"""The clock of a search: the seconds that its simulations so far would take on a reference machine.

All deadlines of a search are times on this clock and not on the wall clock. Therefore a question has one
answer, byte for byte, on an idle or a busy machine with any number of cores. The time limit on the wall clock
is a safety net: once it is reached, every deadline has passed, and the answer says so. Past a deadline the
oracle raises StoppedError, and the function that began the search catches it.

Of the solvers between simulations the clock counts the one that proposes mixed fleets (mixed_fleets.py). All
have a limit on the wall clock, far longer than they usually need.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from planner.search.oracle import deterministic_parallel

USUAL_LIMIT_S = 600.0
"""The default time limit of a question on the wall clock. It is a safety net: usually WORK_S ends a
search.
"""
WORK_S = 120.0
"""The default time limit of a question on the search's clock, which counts all of its simulations one after
another.
"""
EFFORT_S = 1.2e-6
"""Seconds per simulated request of an ordinary fleet on the reference machine: between the 1.0 and 1.3 us
that were measured over the plans of benchmarks/plans.py.
"""


Result = TypeVar("Result")
Otherwise = TypeVar("Otherwise")


class StoppedError(Exception):
    """The time is over, so no further simulation may begin."""


def in_time(find: Callable[[], Result], otherwise: Otherwise) -> Result | Otherwise:
    """The result of `find`, or `otherwise` if a StoppedError ends it."""
    try:
        return find()
    except StoppedError:
        return otherwise


@dataclass(slots=True)
class SafetyNet:
    """The time limit of a question: `ends_s` on the wall clock (`time.monotonic`), and whether the question
    has reached it.
    """

    ends_s: float = math.inf
    is_reached: bool = False

    def check(self) -> bool:
        """Whether the time limit is reached now; it then stays reached."""
        self.is_reached = self.is_reached or time.monotonic() > self.ends_s
        return self.is_reached


_net: ContextVar[SafetyNet | None] = ContextVar("net", default=None)


def now_s() -> float:
    """The time of the search's clock [s]: 0 when the question began."""
    return EFFORT_S * deterministic_parallel.effort_spent()


def is_over(deadline: float) -> bool:
    """Whether a deadline [s] on the search's clock has passed, or the wall clock's time limit is reached."""
    net = _net.get()
    return (net is not None and net.check()) or now_s() >= deadline


def is_time_limit_reached() -> bool:
    """Whether the time limit on the wall clock has ended the current question."""
    net = _net.get()
    return net is not None and net.is_reached


def ended_by() -> str:
    """Which limit ended a search, in words: the time limit, or the work limit."""
    return "the time limit" if is_time_limit_reached() else "the most work that a plan may take"


def work_limit_s(time_limit_s: float) -> float:
    """How many seconds of the search's clock a question may take, for this time limit on the wall clock.

    A limit up to USUAL_LIMIT_S allows WORK_S, and a longer one more in proportion. No limit allows more than
    its own seconds, which the reference machine would need for that work.
    """
    return min(time_limit_s, max(WORK_S, time_limit_s * WORK_S / USUAL_LIMIT_S))


def wall_deadline_s(deadline: float, share: float = 1.0) -> float:
    """When a solver must end, on `time.monotonic`: after `share` of the time that remains to the time limit,
    or at once if the deadline on the search's clock has passed.
    """
    net, now = _net.get(), time.monotonic()
    if now_s() >= deadline:
        return now
    if net is None:
        return math.inf
    return now + share * max(net.ends_s - now, 0.0)


def solver_limit_s(most_s: float, least_s: float) -> float:
    """How long a solver may take [s]: until the time limit, but `most_s` at most and `least_s` at least."""
    return max(min(wall_deadline_s(math.inf) - time.monotonic(), most_s), least_s)


@contextmanager
def time_limit(time_limit_s: float, *, grace: bool = False) -> Iterator[float]:
    """Limit the wall-clock time of the `with` block, and yield its deadline on the search's clock.

    If limits are nested, the earliest ends the block; only with `grace` the block may go beyond the outer
    limit. The outermost block counts its simulations on a meter of its own (deterministic_parallel.py), so
    that questions that run at the same time do not count each other's work.
    """
    outer, ends_s = _net.get(), time.monotonic() + time_limit_s
    if outer is not None:
        ends_s = max(ends_s, outer.ends_s) if grace else min(ends_s, outer.ends_s)
    inner = SafetyNet(ends_s)
    token = _net.set(inner)
    try:
        with deterministic_parallel.own_meter():
            yield now_s() + work_limit_s(time_limit_s)
    finally:
        if outer is not None:
            outer.is_reached = outer.is_reached or inner.is_reached
        _net.reset(token)
