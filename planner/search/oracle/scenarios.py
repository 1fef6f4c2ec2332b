"""Draws scenarios: variants of a question with other requests of the same kind, more traffic, and other step
times.

Each scenario has its own requests, drawn with a seed, `growth_frac` more traffic, and two errors of the
predicted step times, of prefills and of decodes, which all workers share (planner/models/spread.py). With
`prefix_drift` other prefixes are popular (prefix_drift.py).

`drawn_by` says what a scenario's requests are drawn from. Described traffic is drawn from its description. If
`traffic: rate` superposes two or more copies of a trace, or keeps a part of it, a scenario is another draw of
the copies or of the part. All other traces are redrawn from blocks of themselves, or from their sessions
where these begin together (planner/traffic/redraw.py).

Step times are spread evenly over their distribution (Latin hypercube, McKay et al. 1979): over all
scenarios that a search sees, and over every TEST_BLOCK of those that test its answer, which are drawn with
other seeds. Thus few scenarios represent all, because step times matter most for whether a fleet keeps the
SLO. Over ten seeds, the number of scenarios in which a fleet keeps the SLO had a standard deviation of 1.4 to
3.1 for 32 independent scenarios, and of 0.8 to 1.7 for 32 evenly spread ones (Llama-3.1-70B with Azure code
at 20 requests/s, gpt-oss-20b with summaries). So a test that treats evenly spread scenarios as independent
errs less often than it says (Owen 1997 bounds the variance).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from planner.documents.facts import DrawnBy
from planner.documents.task import PlanQuestion
from planner.domain import Slo
from planner.errors import InputError
from planner.search.oracle.more_workers import KeptFleets
from planner.search.oracle.traffic_request import requested_traffic
from planner.search.prefixes.prefix_drift import drift_popularity
from planner.traffic.redraw import MOST_DRAWS, redraw_trace
from planner.traffic.scaling import SAME_FRAC, rescale_trace
from planner.traffic.sessions import begin_together
from planner.traffic.trace import Trace, spread_stamps

# Kinds of scenarios: those that a search sees, and those that test its answer. Their seeds contain the kind.
SEARCHED = 1
TESTED = 2
# The scenarios that a search sees have about SEARCH_REQUESTS requests together, but their number is within
# the bounds below. With 20 scenarios, a fleet that must be kept in 95 % may miss one.
SEARCH_REQUESTS = 1_000_000
SEARCH_LEAST = 20
SEARCH_MOST = 32
# The scenarios of a test come in blocks of this many. Step times are spread evenly over a block.
TEST_BLOCK = 32
# Scenarios of one kind stay in memory up to this many requests together: all that a test draws, unless a
# single one is so long that the least number of them has more.
KEPT_REQUESTS = 7_000_000
# These numbers end the seeds of draws beside a scenario's requests, so that each draws numbers of its own.
STEP_TIME_STREAM = 1
DRIFT_STREAM = 2
LEAST_COPIES = 2  # Draws of fewer superposed copies are too much like the trace itself.


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Scenario:
    """One of the scenarios of `source`. Its requests are drawn at the first access of `trace`.

    `step_time_sigmas` has the errors of the (prefill, decode) step times, in standard deviations above the
    median. `known` caches the simulations of fleets in this scenario (`VerdictCache.known`), and
    `kept_fleets` those that keep the SLO; both leave the memory together with the scenario.
    """

    source: Scenarios
    number: int
    step_time_sigmas: tuple[float, float]
    known: dict[Hashable, list[tuple[Slo, bool]]] = field(default_factory=dict)
    kept_fleets: KeptFleets = field(default_factory=KeptFleets)
    _drawn: list[Trace] = field(default_factory=list, init=False)  # Empty, or the trace alone.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def trace(self) -> Trace:
        """The scenario's requests, drawn at the first access."""
        with self._lock:
            if not self._drawn:
                self._drawn.append(self.source.draw_requests(self.number))
            return self._drawn[0]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Scenarios:
    """Scenarios of one kind, by number.

    `trace` is the whole trace, as it was read; a scenario has about `requests` requests. Step times are
    spread evenly over the first `count` scenarios, and over each TEST_BLOCK after them. Only 1 / `downscale`
    of the requests are drawn, as if there were fewer users by that factor (production/scale_model.py).

    The first `count` scenarios stay in memory, and further ones up to KEPT_REQUESTS; all others are drawn
    again at each access.
    """

    task: PlanQuestion
    trace: Trace
    seed: int
    kind: int
    count: int = 0  # 0 for TESTED: these scenarios come in blocks alone.
    requests: int = 0
    downscale: int = 1
    _kept: dict[int, Scenario] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __getitem__(self, number: int) -> Scenario:
        with self._lock:
            if number in self._kept:
                return self._kept[number]
            scenario = Scenario(self, number, self._step_time_sigmas(number))
            if number < self.count or (len(self._kept) + 1) * self.requests <= KEPT_REQUESTS:
                self._kept[number] = scenario
            return scenario

    def __getstate__(self) -> tuple[object, ...]:
        """What scenarios are drawn from. The drawn ones are left out: they would be large to send to another
        process.
        """
        return self.task, self.trace, self.seed, self.kind, self.count, self.requests, self.downscale

    def __setstate__(self, state: tuple[PlanQuestion, Trace, int, int, int, int, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def thinned(self, downscale: int) -> Scenarios:
        """The same scenarios, with 1 / `downscale` of their requests."""
        return replace(self, requests=self.requests // downscale, downscale=downscale)

    def with_more(self, more_frac: float) -> Scenarios:
        """The same scenarios with `more_frac` more traffic, on top of the growth in the task's `safety`."""
        safety = self.task.safety
        assert safety is not None
        # (1 + growth) (1 + more) - 1 is 0.19999999999999996 for 0 and 0.2, whose requests would not be
        # those of a plan with growth 0.2.
        growth_frac = safety.growth_frac + more_frac + safety.growth_frac * more_frac
        return replace(self, task=replace(self.task, safety=replace(safety, growth_frac=growth_frac)))

    def text_for_digest(self) -> str:
        """Everything that the scenarios are drawn from, beside the trace."""
        return repr((self.task, self.seed, self.kind, self.count, self.downscale))

    def _step_time_sigmas(self, number: int) -> tuple[float, float]:
        """The step-time errors (prefill, decode) of a scenario, in standard deviations."""
        is_searched = number < self.count
        if is_searched:
            seeds, size, place = [self.seed, self.kind], self.count, number
        else:
            block, place = divmod(number - self.count, TEST_BLOCK)
            seeds, size = [self.seed, self.kind, block, STEP_TIME_STREAM], TEST_BLOCK
        rng = np.random.default_rng(seeds)
        # One of `size` equal parts of the distribution for each scenario, in a random order for each phase.
        parts = rng.permuted(np.tile(np.arange(size), (2, 1)), axis=1)
        # A search sees the middle of a part. A test draws from the whole part, so that it is a fair sample.
        within_part = 0.5 if is_searched else rng.random((2, size))
        prefill_quantile, decode_quantile = ((parts + within_part) / size)[:, place].tolist()
        sigmas_at = NormalDist().inv_cdf
        return sigmas_at(prefill_quantile), sigmas_at(decode_quantile)

    def draw_requests(self, number: int) -> Trace:
        """The traffic of a scenario, with the popularity of prefixes moved if `safety` says so."""
        assert self.task.safety is not None
        trace, drift_frac = self._draw_without_drift(number), self.task.safety.prefix_drift_frac
        if not drift_frac:
            return trace
        rng = np.random.default_rng([self.seed, self.kind, number, DRIFT_STREAM])
        return drift_popularity(trace, drift_frac, rng)

    def _draw_without_drift(self, number: int) -> Trace:
        """Draw the requests of a scenario, with prefixes as popular as in the trace.

        A draw may have no traffic over time: with few bursts in the trace all of its requests may come at one
        moment, or the question's rate or window may leave too few. It is then drawn again, MOST_DRAWS times
        at most.
        """
        rng = np.random.default_rng([self.seed, self.kind, number])
        for _ in range(MOST_DRAWS - 1):
            with contextlib.suppress(InputError):
                return self._draw_once(rng)
        return self._draw_once(rng)

    def _draw_once(self, rng: np.random.Generator) -> Trace:
        """One draw; raises InputError where no traffic over time is left of it."""
        assert self.task.safety is not None
        seed, growth_factor = int(rng.integers(2**31)), 1.0 + self.task.safety.growth_frac
        if (described := self.task.described) is not None:
            rate_rps = (self.task.rate_rps or described.mean_rps) * growth_factor / self.downscale
            return requested_traffic(self.trace, replace(self.task, rate_rps=rate_rps), seed=seed).requests
        trace, basis = spread_stamps(self.trace, seed=seed), drawn_by(self.task, self.trace)
        if basis == "copies":
            assert self.task.rate_rps is not None
            # Superposing fewer copies draws fewer requests, so nothing is left to thin out afterwards.
            rate_rps = self.task.rate_rps * growth_factor / self.downscale
            return requested_traffic(trace, replace(self.task, rate_rps=rate_rps), seed=seed).requests
        if basis in ("blocks", "sessions"):
            trace = redraw_trace(trace, rng)
        grown_rps = None  # The trace's own rate.
        if self.task.rate_rps is not None:
            grown_rps = self.task.rate_rps * growth_factor
        elif growth_factor > 1:
            grown_rps = trace.rate_rps * growth_factor
        requests, _ = requested_traffic(trace, replace(self.task, rate_rps=grown_rps), seed=seed)
        return thin_trace(requests, self.downscale, rng)


def next_block(number: int) -> int:
    """The number of the first scenario of a block that is at least `number`.

    A test may end within a block. The step times of the block's other scenarios then make up for those that
    were drawn, so they are no fair sample, and the next test begins with a new block.
    """
    return -(-number // TEST_BLOCK) * TEST_BLOCK


def thin_trace(trace: Trace, downscale: int, rng: np.random.Generator) -> Trace:
    """One request in `downscale`, drawn at random; sessions stay whole."""
    if downscale == 1:
        return trace
    return rescale_trace(trace, trace.rate_rps / downscale, scale="thin", rng=rng)


def drawn_by(task: PlanQuestion, trace: Trace) -> DrawnBy:
    """What a scenario's requests are drawn from: a "description", superposed "copies" of the trace, a "part"
    of it, "blocks" of it, or its "sessions" where they begin together. Blocks are drawn where rescaling to
    the rate draws nothing at random, or so little that scenarios would be alike.
    """
    if task.described is not None:
        return "description"
    factor = 1.0 if task.rate_rps is None else task.rate_rps / trace.rate_rps
    if factor < 1 - SAME_FRAC and task.scale != "compress":
        return "part"
    if begin_together(trace):
        return "sessions"
    return "copies" if task.scale == "superpose" and factor >= LEAST_COPIES else "blocks"


def scenarios_of(task: PlanQuestion, trace: Trace, seed: int, requests: int) -> tuple[Scenarios, Scenarios]:
    """The scenarios that a search sees, and those that test its answer. `requests` is the number of requests
    of the traffic as written, so about that of a scenario.
    """
    count = int(np.clip(SEARCH_REQUESTS // requests, SEARCH_LEAST, SEARCH_MOST))
    return (
        Scenarios(task, trace, seed, SEARCHED, count, requests),
        Scenarios(task, trace, seed, TESTED, requests=requests),
    )
