"""What may come instead of what is written: other requests of the same kind, more of them, other step times.

A scenario is drawn as a whole: the traffic by a seed, the growth that was asked for, and how far the step
times of the next cluster are from the predicted ones (planner/models/spread.py), prefills and decodes apart.
With `prefix_drift` other prefixes are popular (prefix_drift.py).
In one scenario that is one draw of each for all workers.

Described traffic is drawn anew from its description. A trace is drawn anew by what `traffic: rate` draws
where that lays two or more copies of it over each other, or keeps a part of it; else from blocks of the trace
itself (planner/traffic/redraw.py).

Scenarios that a search sees have step times spread evenly over their distribution (Latin hypercube), so that
few scenarios stand for all; those that test its answer are independent, and of other seeds.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from planner.documents.facts import DrawnBy
from planner.documents.task import PlanQuestion
from planner.domain import Slo
from planner.search.oracle.prefix_drift import drift_popularity
from planner.search.oracle.traffic_request import requested_traffic
from planner.traffic.redraw import redraw_trace
from planner.traffic.scaling import SAME_FRAC, rescale
from planner.traffic.trace import Trace, spread_stamps

SEARCHED, TESTED = 1, 2  # which futures: those a search sees, those that test its answer
SEARCH_REQUESTS = 1_000_000  # of all scenarios that a search sees,
SEARCH_LEAST, SEARCH_MOST = 20, 32  # within these
KEPT_REQUESTS = 7_000_000  # of all scenarios of one kind: those of one test, and more


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Scenario:
    """One of `futures`: its requests, which are drawn when they are first looked at, and how many standard
    deviations of their spread step times of (prefill, decode) are above the medians. `known`: what
    simulations said of fleets in it (`oracle.Answers`), gone when it is.
    """

    futures: Scenarios
    number: int
    z: tuple[float, float]
    known: dict[tuple[object, ...], list[tuple[Slo, bool]]] = field(default_factory=dict)
    _drawn: list[Trace] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def trace(self) -> Trace:
        with self._lock:
            if not self._drawn:
                self._drawn.append(self.futures.drawn(self.number))
            return self._drawn[0]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Scenarios:
    """Futures of one kind by number. Those that a search sees are kept, and KEPT_REQUESTS of the others, so
    that what was simulated in them is known; what is beyond is drawn whenever it is asked for.

    `trace` is the whole one, as it was read; a scenario has about `requests`. The first `count` have step
    times that are evenly spread. Drawn is one request in `one_in`, as users there were so much fewer.
    """

    task: PlanQuestion
    trace: Trace
    seed: int
    kind: int
    count: int = 0
    requests: int = 0
    one_in: int = 1
    _kept: dict[int, Scenario] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __getitem__(self, number: int) -> Scenario:
        with self._lock:
            if number in self._kept:
                return self._kept[number]
            future = Scenario(self, number, self._z(number))
            if number < self.count or (len(self._kept) + 1) * self.requests <= KEPT_REQUESTS:
                self._kept[number] = future
            return future

    def __getstate__(self) -> tuple[object, ...]:
        """What they are drawn from."""
        return self.task, self.trace, self.seed, self.kind, self.count, self.requests, self.one_in

    def __setstate__(self, state: tuple[PlanQuestion, Trace, int, int, int, int, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def one_of(self, many: int) -> Scenarios:
        """The same scenarios with one request in so many."""
        requests = self.requests // many
        return Scenarios(self.task, self.trace, self.seed, self.kind, self.count, requests, many)

    def with_more(self, more_frac: float) -> Scenarios:
        """The same scenarios with so much more traffic: those of a plan that asks for that growth."""
        safety = self.task.safety
        assert safety is not None
        growth_frac = (1 + safety.growth_frac) * (1 + more_frac) - 1
        return replace(self, task=replace(self.task, safety=replace(safety, growth_frac=growth_frac)))

    def words(self) -> str:
        """All that says which they are, beside the trace."""
        return repr((self.task, self.seed, self.kind, self.count, self.one_in))

    def _z(self, number: int) -> tuple[float, float]:
        normal = NormalDist().inv_cdf
        if number >= self.count:
            rng = np.random.default_rng([self.seed, self.kind, number, 1])
            prefill, decode = rng.standard_normal(2)
            return float(prefill), float(decode)
        rng = np.random.default_rng([self.seed, self.kind])
        even = (rng.permuted(np.tile(np.arange(self.count), (2, 1)), axis=1) + 0.5) / self.count
        return normal(even[0, number]), normal(even[1, number])

    def drawn(self, number: int) -> Trace:
        """The requests of that scenario."""
        assert self.task.safety is not None
        trace, drift_frac = self._drawn(number), self.task.safety.prefix_drift_frac
        if not drift_frac:
            return trace
        return drift_popularity(trace, drift_frac, np.random.default_rng([self.seed, self.kind, number, 2]))

    def _drawn(self, number: int) -> Trace:
        """The same requests before prefixes are popular otherwise."""
        assert self.task.safety is not None
        rng = np.random.default_rng([self.seed, self.kind, number])
        seed, growth = int(rng.integers(2**31)), 1.0 + self.task.safety.growth_frac
        if (described := self.task.described) is not None:
            rate_rps = (self.task.rate_rps or described.mean_rps) * growth / self.one_in
            return requested_traffic(self.trace, replace(self.task, rate_rps=rate_rps), seed=seed)[0]
        trace, how = spread_stamps(self.trace, seed=seed), drawn_by(self.task, self.trace)
        if how == "copies":
            assert self.task.rate_rps is not None
            rate_rps = self.task.rate_rps * growth / self.one_in
            return requested_traffic(trace, replace(self.task, rate_rps=rate_rps), seed=seed)[0]
        task = replace(
            self.task, rate_rps=None if self.task.rate_rps is None else self.task.rate_rps * growth
        )
        if how == "blocks":
            trace = redraw_trace(trace, rng)
            if self.task.rate_rps is None and growth > 1:
                task = replace(task, rate_rps=trace.rate_rps * growth)
        return one_of(requested_traffic(trace, task, seed=seed)[0], self.one_in, rng)


def one_of(trace: Trace, many: int, rng: np.random.Generator) -> Trace:
    """One request in so many, sessions whole."""
    return trace if many == 1 else rescale(trace, trace.rate_rps / many, how="thin", rng=rng)


def drawn_by(task: PlanQuestion, trace: Trace) -> DrawnBy:
    """How traffic is drawn anew."""
    if task.described is not None:
        return "description"
    if task.rate_rps is None or task.scale == "compress":
        return "blocks"
    factor = task.rate_rps / trace.rate_rps
    if factor < 1 - SAME_FRAC:
        return "part"
    return "copies" if task.scale == "superpose" and factor >= 2 else "blocks"


def scenarios_of(task: PlanQuestion, trace: Trace, seed: int, requests: int) -> tuple[Scenarios, Scenarios]:
    """The scenarios that a search sees, and those that test its answer. `requests` is how many requests the
    traffic as it is written has.
    """
    count = int(np.clip(SEARCH_REQUESTS // requests, SEARCH_LEAST, SEARCH_MOST))
    return (
        Scenarios(task, trace, seed, SEARCHED, count, requests),
        Scenarios(task, trace, seed, TESTED, requests=requests),
    )
