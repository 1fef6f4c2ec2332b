"""Runs simulations in this process, or in worker processes here or on a cluster
(planner/parallel/executors.py).

A query is data: a fleet, an SLO, and whether its requests are prompts alone. Its traffic is sent to the
worker processes once; a scenario is drawn there. The answer comes back with the number of requests that the
simulation took to see it. In this module a worker is such a process, not an engine.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from planner.domain import STEADY_FRAC, Slo
from planner.fleet import Fleet
from planner.parallel.executors import Crew, current_crew, current_slot
from planner.policies import STEPWISE
from planner.search.oracle.scenarios import Scenario, Scenarios
from planner.simulator.layout import FINISHED, State
from planner.simulator.replay import (
    COUNTED_WHILE_RUNNING,
    RequestRecords,
    engine_of,
    is_long,
    read_if_kept,
    simulate,
    simulate_if_kept,
)
from planner.simulator.slo_verdict import Verdict, judge
from planner.traffic.trace import Trace, judged_span_s, last_tenth_s

# Of a longer scenario the simulator's arrays are not kept beside the trace: there are dozens of scenarios.
KEPT_REQUESTS = 20_000
KEPT_REPLAYS = 16  # The traffics whose `Replay` a worker process keeps; the oldest goes first.


@dataclass(frozen=True, slots=True)
class SimulationQuery:
    """Does this fleet keep this SLO? With `is_prompts`, every request ends with its first token; with
    `is_prefilled`, every prompt arrives with its KV computed.
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
        """The trace with one output token per request; queues are still ordered by the whole lengths."""
        if self._prompts is None:
            prompts = replace(self.trace, output_tokens=np.ones_like(self.trace.output_tokens))
            self._prompts = prompts, RequestRecords(prompts, self.trace.output_tokens, reused=self._kept)
        return self._prompts

    def answer(self, query: SimulationQuery) -> tuple[bool, int]:
        """Whether the SLO is kept, and how many requests had entered when the simulation could stop."""
        trace, requests = self._of_prompts() if query.is_prompts else (self.trace, self._requests)
        holds = keeps_slo(query.fleet, trace, query.slo, requests, is_prefilled=query.is_prefilled)
        return holds, requests.latest_entered()


def judge_whole(trace: Trace, query: SimulationQuery) -> Verdict:
    """Judge a simulation to the end of the trace, without percentiles."""
    slo = query.slo
    record = slo.every_s is not None  # Limits per window need every gap between tokens.
    simulation = simulate(query.fleet, trace, limits=slo.limits, record=record, every_s=slo.every_s)
    return judge(simulation, slo, values=False)


def keeps_slo(
    fleet: Fleet, trace: Trace, slo: Slo, requests: RequestRecords, *, is_prefilled: bool = False
) -> bool:
    """Whether the fleet keeps the SLO. `requests` are the records of `trace`. With `is_prefilled` every
    prompt arrives computed, on the first of the fleet's workers.

    The search asks this thousands of times, and asks nothing else of most simulations. Where the kernel has
    counted every value of the limits by the end of a run, the times of all requests are not gathered and
    compared again: `judge` comes to the same answer.
    """
    patience_s = slo.patience_s(judged_span_s(trace))
    if is_decided_by_counts(fleet, trace, slo):
        is_kept = read_if_kept(
            lambda state: _all_are_served(state) and _is_steady(state, trace, patience_s),
            fleet,
            trace,
            slo.limits,
            requests,
            patience_s=patience_s,
            is_prefilled=is_prefilled,
        )
        return bool(is_kept)
    simulation = simulate_if_kept(
        fleet, trace, slo.limits, requests, slo.every_s, patience_s=patience_s, is_prefilled=is_prefilled
    )
    return simulation is not None and judge(simulation, slo, values=False).holds


def is_decided_by_counts(fleet: Fleet, trace: Trace, slo: Slo) -> bool:
    """Whether the kernel counts all that the SLO goes by, but for rejected requests and the backlog test."""
    return (
        engine_of(fleet) == STEPWISE
        and not is_long(fleet, trace, slo.limits)
        and not trace.after.size
        and all(limit.metric in COUNTED_WHILE_RUNNING for limit in slo.limits)
        and not (slo.selectors or slo.guarantees)
        and slo.attainment_frac is None
        and slo.every_s is None
    )


def _all_are_served(state: State) -> bool:
    """Whether no request was rejected, after a run that all have left."""
    return bool((state.requests["status"] == FINISHED).all())


def _is_steady(state: State, trace: Trace, patience_s: float) -> bool:
    """The backlog test (`slo_verdict.Verdict`) of a run in which all requests were served. They are in order
    of arrival, and the window ends with the last arrival.
    """
    first = int(np.searchsorted(trace.arrival_s, last_tenth_s(*state.window.tolist())))
    last = state.requests[first:]
    waited_s = last["first_token_s"] - last["arrival_s"]
    has_gaps = trace.output_tokens[first:] > 1
    waited_s[has_gaps] = np.fmax(waited_s[has_gaps], last["gap_max_s"][has_gaps])
    return len(last) == 0 or bool((waited_s <= patience_s).mean() >= STEADY_FRAC)


class Asker:
    """Simulates one traffic: a trace, or a scenario, which is drawn when it is first needed."""

    def __init__(self, traffic: Trace | Scenario, *, kept: bool) -> None:
        self._traffic, self._kept = traffic, kept
        self._lock = threading.Lock()
        self._replay: Replay | None = None

    def answer(self, query: SimulationQuery) -> tuple[bool, int]:
        """As Replay.answer, in this process or in a worker process."""
        if (workers := current_crew()) is None:
            with current_slot():
                return self._here().answer(query)
        trace_at_workers, key = _trace_at_workers(workers, self._traffic)
        holds, seen = workers.start_item(_answer_at_worker, trace_at_workers, (key, query, self._kept))()
        return bool(holds), int(seen)

    def judge_whole(self, query: SimulationQuery) -> Verdict:
        """As the function of that name, in this process or in a worker process."""
        if (workers := current_crew()) is None:
            with current_slot():
                return judge_whole(_trace(self._traffic), query)
        trace_at_workers, _ = _trace_at_workers(workers, self._traffic)
        verdict: Verdict = workers.start_item(_judge_at_worker, trace_at_workers, query)()
        return verdict

    def _here(self) -> Replay:
        """The `Replay` of this process, made when it is first needed."""
        with self._lock:
            if self._replay is None:
                trace = _trace(self._traffic)
                self._replay = Replay(trace, kept=self._kept or len(trace) <= KEPT_REQUESTS)
            return self._replay


def _trace(traffic: Trace | Scenario) -> Trace:
    return traffic.trace if isinstance(traffic, Scenario) else traffic


# Traffic that lies at the workers: traffic -> (whose workers, reference to it there, its name there). The
# dictionaries are weak: traffic that nobody uses any more leaves them.
_placed: weakref.WeakKeyDictionary[Any, tuple[Crew, Any, str]] = weakref.WeakKeyDictionary()
_placing: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()  # While it is sent.
_lock = threading.Lock()  # Of all variables of this module.


def _trace_at_workers(workers: Crew, traffic: Trace | Scenario) -> tuple[Any, str]:
    """A reference to the trace at the workers, and a name for it. Of a scenario, what all scenarios are drawn
    from is sent once, and each trace is drawn there.
    """
    if isinstance(traffic, Scenario):
        scenarios, number = traffic.source, traffic.number
        source = _place_once(workers, scenarios, lambda: workers.put_value(scenarios))[0]
        return _place_once(workers, traffic, lambda: workers.put_result(_draw_at_worker, source, number))
    return _place_once(workers, traffic, lambda: workers.put_value(traffic))


def _place_once(workers: Crew, traffic: Any, place: Callable[[], Any]) -> tuple[Any, str]:
    """What `place` returned for this traffic and these workers, and a name that no other traffic gets, as
    Python reuses ids.
    """
    with _lock:
        lock = _placing.setdefault(traffic, threading.Lock())
    with lock:
        known_workers, placed, name = _placed.get(traffic, (None, None, ""))
        if known_workers is not workers:
            name = f"{id(workers)} {id(traffic)} {_next_number()}"
            _placed[traffic] = workers, placed, name = workers, place(), name
        return placed, name


_placed_so_far = 0


def _next_number() -> int:
    global _placed_so_far
    with _lock:
        _placed_so_far += 1
        return _placed_so_far


def _draw_at_worker(scenarios: Scenarios, number: int) -> Trace:
    return scenarios.drawn(number)


def _judge_at_worker(trace: Trace, query: SimulationQuery) -> Verdict:
    return judge_whole(writable(trace), query)


_replays: dict[str, Replay] = {}  # In a worker process, by the name of the traffic.


def _answer_at_worker(trace: Trace, item: tuple[str, SimulationQuery, bool]) -> tuple[bool, int]:
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
    """The trace with copies of its read-only arrays, which an object store of a cluster hands out: Numba
    treats a read-only array as another type and would compile its functions again.
    """
    columns = {each.name: getattr(trace, each.name) for each in fields(trace)}
    lent: dict[str, Any] = {
        name: column.copy()
        for name, column in columns.items()
        if isinstance(column, np.ndarray) and not column.flags.writeable
    }
    return replace(trace, **lent) if lent else trace
