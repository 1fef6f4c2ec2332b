"""Asks simulations, here or wherever the workers are (planner/parallel/executors.py).

A question is data: a fleet, an SLO, and whether its requests are prompts alone. The traffic that it is asked
of is laid where the workers are once, a scenario is drawn there. What comes back is the answer, and how many
requests it took to see, so whoever asks need not know who simulated.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from planner.domain import Slo
from planner.fleet import Fleet
from planner.parallel.executors import Crew, current_crew, current_slot
from planner.search.oracle.scenarios import Scenario, Scenarios
from planner.simulator.replay import RequestRecords, simulate, simulate_if_kept
from planner.simulator.slo_verdict import Verdict, judge
from planner.traffic.trace import Trace, judged_span_s

KEPT_REQUESTS = 20_000  # of a scenario: of more, of which there are dozens, nothing is kept beside the trace
KEPT_REPLAYS = 16  # that a worker has laid out at a time


@dataclass(frozen=True, slots=True)
class SimulationQuery:
    """Does this fleet keep this SLO? `is_prompts`: if every request leaves with its first token;
    `is_prefilled`: if every prompt arrives computed.
    """

    fleet: Fleet
    slo: Slo
    is_prompts: bool = False
    is_prefilled: bool = False


class Replay:
    """Simulations of one trace that share its records, from any thread."""

    def __init__(self, trace: Trace, *, kept: bool = True) -> None:
        self.trace, self._kept = trace, kept
        self._requests = RequestRecords(trace, reused=kept)
        self._prompts: tuple[Trace, RequestRecords] | None = None

    def _of_prompts(self) -> tuple[Trace, RequestRecords]:
        """Queues are ordered as if they stayed."""
        if self._prompts is None:
            prompts = replace(self.trace, output_tokens=np.ones_like(self.trace.output_tokens))
            self._prompts = prompts, RequestRecords(prompts, self.trace.output_tokens, reused=self._kept)
        return self._prompts

    def answer(self, query: SimulationQuery) -> tuple[bool, int]:
        """Whether the SLO is kept, and how many requests it took to see."""
        trace, requests = self._of_prompts() if query.is_prompts else (self.trace, self._requests)
        slo = query.slo
        simulation = simulate_if_kept(
            query.fleet,
            trace,
            slo.limits,
            requests,
            slo.every_s,
            patience_s=slo.patience_s(judged_span_s(trace)),
            is_prefilled=query.is_prefilled,
        )
        holds = simulation is not None and judge(simulation, slo, values=False).holds
        return holds, requests.latest_entered()


def judge_whole(trace: Trace, query: SimulationQuery) -> Verdict:
    """What the whole simulation says, without percentiles."""
    slo = query.slo
    record = slo.every_s is not None
    simulation = simulate(query.fleet, trace, limits=slo.limits, record=record, every_s=slo.every_s)
    return judge(simulation, slo, values=False)


class Asker:
    """Asks of one traffic: of a trace, or of a scenario, which is drawn when it is first looked at."""

    def __init__(self, traffic: Trace | Scenario, *, kept: bool) -> None:
        self._traffic, self._kept = traffic, kept
        self._lock = threading.Lock()
        self._replay: Replay | None = None

    def answer(self, query: SimulationQuery) -> tuple[bool, int]:
        """As Replay.answer; wherever the workers are."""
        if (workers := current_crew()) is None:
            with current_slot():
                return self._here().answer(query)
        trace_at_workers, key = _trace_at_workers(workers, self._traffic)
        holds, seen = workers.start_item(_answer, trace_at_workers, (key, query, self._kept))()
        return bool(holds), int(seen)

    def judge_whole(self, query: SimulationQuery) -> Verdict:
        """As the function of that name; wherever the workers are."""
        if (workers := current_crew()) is None:
            with current_slot():
                return judge_whole(_trace(self._traffic), query)
        trace_at_workers, _ = _trace_at_workers(workers, self._traffic)
        verdict: Verdict = workers.start_item(_judged, trace_at_workers, query)()
        return verdict

    def _here(self) -> Replay:
        with self._lock:
            if self._replay is None:
                trace = _trace(self._traffic)
                self._replay = Replay(trace, kept=self._kept or len(trace) <= KEPT_REQUESTS)
            return self._replay


def _trace(traffic: Trace | Scenario) -> Trace:
    return traffic.trace if isinstance(traffic, Scenario) else traffic


# -- where the workers are

_laid: weakref.WeakKeyDictionary[Any, tuple[Crew, Any, str]] = weakref.WeakKeyDictionary()
_laying: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _trace_at_workers(workers: Crew, traffic: Trace | Scenario) -> tuple[Any, str]:
    """A trace as the workers hold it, and a name for it."""
    if isinstance(traffic, Scenario):
        futures, number = traffic.futures, traffic.number
        of_all = _once(workers, futures, lambda: workers.put_value(futures))[0]
        return _once(workers, traffic, lambda: workers.put_result(_draw, of_all, number))
    return _once(workers, traffic, lambda: workers.put_value(traffic))


def _once(workers: Crew, of: Any, lay: Callable[[], Any]) -> tuple[Any, str]:
    with _lock:
        lock = _laying.setdefault(of, threading.Lock())
    with lock:
        known = _laid.get(of)
        if known is None or known[0] is not workers:
            known = _laid[of] = workers, lay(), f"{id(workers)} {id(of)} {_number()}"
        return known[1:]


_laid_so_far = 0


def _number() -> int:
    global _laid_so_far
    with _lock:
        _laid_so_far += 1
        return _laid_so_far


def _draw(futures: Scenarios, number: int) -> Trace:
    return futures.drawn(number)


def _judged(trace: Trace, query: SimulationQuery) -> Verdict:
    return judge_whole(writable(trace), query)


_replays: dict[str, Replay] = {}


def _answer(trace: Trace, item: tuple[str, SimulationQuery, bool]) -> tuple[bool, int]:
    key, query, kept = item
    with _lock:
        replay = _replays.get(key)
        if replay is None:
            while len(_replays) >= KEPT_REPLAYS:
                del _replays[next(iter(_replays))]
            own = writable(trace)
            replay = _replays[key] = Replay(own, kept=kept or len(own) <= KEPT_REQUESTS)
    return replay.answer(query)


def writable(trace: Trace) -> Trace:
    """The same requests in arrays of one's own where an object store lends them: to a compiled function a
    read-only array is of another type.
    """
    columns = {each.name: getattr(trace, each.name) for each in fields(trace)}
    lent: dict[str, Any] = {
        name: column.copy()
        for name, column in columns.items()
        if isinstance(column, np.ndarray) and not column.flags.writeable
    }
    return replace(trace, **lent) if lent else trace
