"""A cache of simulations, which searches share: for each fleet and traffic the SLOs that were simulated, and
whether each is kept. A fleet that keeps an SLO keeps every looser one; a fleet that misses it misses every
stricter one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from planner.documents.facts import Headroom
from planner.domain import Limit, Slo
from planner.search.oracle import deterministic_parallel
from planner.search.oracle.resuming import VerdictFile
from planner.traffic.trace import Trace


@dataclass(frozen=True, slots=True)
class MeasuredHeadroom:
    """A fleet's headroom (headroom.py), and the limits that it misses first with more traffic, and with
    longer steps.
    """

    headroom: Headroom
    by_traffic: tuple[Limit, ...]
    by_steps: tuple[Limit, ...]


class SimulationKey:
    """What a simulation depends on beside the SLO. A query takes its hash several times, so it is computed
    once.
    """

    __slots__ = ("_hash", "parts")

    def __init__(self, *parts: object) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulationKey) and self._hash == other._hash and self.parts == other.parts


@dataclass(slots=True)
class VerdictCache:
    """The verdicts of simulations. Keys have no prices, on which no simulation depends. They tell traces
    apart by identity, so an equal copy of a trace finds no cached answer.
    """

    # By fleet and traffic (`SimulationKey`): each SLO that was simulated, and whether it is kept.
    known: dict[Hashable, list[tuple[Slo, bool]]] = field(default_factory=dict)
    headrooms: dict[tuple[object, ...], MeasuredHeadroom] = field(default_factory=dict)
    # By trace and share: the trace with that share more traffic, and a cache for it (headroom.py).
    busier: dict[tuple[Trace, float], tuple[Trace, VerdictCache]] = field(default_factory=dict)
    file: VerdictFile | None = None  # A copy in a file, with which a killed run is resumed (resuming.py).
    # Queries that some thread is simulating; its event is set when the answer is cached.
    _in_progress: dict[tuple[object, Slo], threading.Event] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def fresh(self) -> VerdictCache:
        """An empty cache for other traffic, with the same file behind it."""
        return VerdictCache(file=self.file)

    def simulate_once(self, key: Hashable, slo: Slo, simulate_key: Callable[[], bool]) -> bool:
        """The cached answer, or else that of `simulate_key`. If several threads need the same answer at once,
        one of them calls `simulate_key` and the others wait for it.
        """
        key_and_slo = key, slo
        while True:
            with self._lock:
                remembered = self.look_up(key, slo)
                if remembered is not None:
                    # The answer was cached, which costs nothing. But if another task of this wave has
                    # computed it, this task is charged its cost too (deterministic_parallel.py).
                    deterministic_parallel.charge_query(key_and_slo, None)
                    return remembered
                if (other_ended := self._in_progress.get(key_and_slo)) is None:
                    self._in_progress[key_and_slo] = own_ended = threading.Event()
                    break
            other_ended.wait()
        try:
            holds = simulate_key()
            with self._lock:
                self.add(key, slo, holds=holds)
        finally:
            with self._lock:
                del self._in_progress[key_and_slo]
            own_ended.set()
        return holds

    def look_up(self, key: Hashable, slo: Slo) -> bool | None:
        """Whether the SLO is kept, if that follows from a simulation with this SLO or another; else None."""
        for other, holds in self.known.get(key, ()):
            follows = is_looser(slo, other) if holds else is_looser(other, slo)
            if follows:
                return holds
        return None

    def add(self, key: Hashable, slo: Slo, *, holds: bool) -> None:
        """Cache whether the SLO is kept."""
        self.known.setdefault(key, []).append((slo, holds))


def is_looser(slo: Slo, other: Slo) -> bool:
    """Whether every fleet that keeps `other` keeps `slo`.

    They do if `slo` has the same percentiles, each with the same or a larger limit, no higher attainment,
    no windows or the same ones, and no guarantees to tenants or the same ones.
    """
    if slo.every_s is not None and slo.every_s != other.every_s:
        return False
    if slo.guarantees and slo.guarantees != other.guarantees:
        return False
    # Two limits are the same if they differ only in their seconds: in metric, percentile and class they
    # agree.
    limits = {replace(limit, limit_s=0.0): limit.limit_s for limit in slo.limits}
    other_limits = {replace(limit, limit_s=0.0): limit.limit_s for limit in other.limits}
    if limits.keys() != other_limits.keys():
        return False
    if (slo.attainment_frac or 0.0) > (other.attainment_frac or 0.0):
        return False
    return all(limit_s >= other_limits[line] for line, limit_s in limits.items())
