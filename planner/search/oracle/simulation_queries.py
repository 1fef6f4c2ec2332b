"""Simulates fleets for the search, in this process or in worker processes, here or on a cluster
(planner/parallel/executors.py). "Worker processes" are never the workers of a fleet here.

A query is data: a fleet, an SLO, and how the requests are simulated. Traffic is sent to the worker processes
once, not with each query; of a scenario only its number is sent, and its requests are drawn there. An answer
says whether the SLO is kept, and how many requests had to be simulated until that was clear.
"""

import itertools
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
from planner.simulator.counted_limits import COUNTED_WHILE_RUNNING
from planner.simulator.initial_state import engine_of
from planner.simulator.layout import REFUSED, State
from planner.simulator.replay import RequestRecords, is_long, read_if_kept, simulate, simulate_if_kept
from planner.simulator.slo_verdict import Verdict, judge_slo
from planner.traffic.trace import Trace, judged_span_s, last_tenth_s

# A question has dozens of scenarios. The simulator's arrays of those with more requests than this are not
# kept from query to query, because they would fill the memory.
MOST_REUSED_REQUESTS = 24_000
# A worker process keeps the `TraceSimulations` of at most this many traces and scenarios, the newest.
MOST_TRAFFICS = 16


@dataclass(frozen=True, slots=True)
class SimulationQuery:
    """Does this fleet keep this SLO? With `is_prompts`, every request ends with its first token; with
    `is_prefilled`, every prompt arrives with its KV computed.
    """

    fleet: Fleet
    slo: Slo
    is_prompts: bool = False
    is_prefilled: bool = False


class TraceSimulations:
    """Simulates one trace; may be used from several threads. With `reused`, and for traces of at most
    MOST_REUSED_REQUESTS, the simulations, one after the other, use the same arrays for the records of
    requests, instead of new ones.
    """

    def __init__(self, trace: Trace, *, reused: bool) -> None:
        self.trace, self._reused = trace, reused or len(trace) <= MOST_REUSED_REQUESTS
        self._requests = RequestRecords(trace, reused=self._reused)
        self._prompts: tuple[Trace, RequestRecords] | None = None

    def _prompts_alone(self) -> tuple[Trace, RequestRecords]:
        """The trace with one output token per request, and its records. Queues that sort requests by their
        lengths still know the whole lengths.
        """
        if self._prompts is None:
            prompts = replace(self.trace, output_tokens=np.ones_like(self.trace.output_tokens))
            self._prompts = prompts, RequestRecords(prompts, self.trace.output_tokens, reused=self._reused)
        return self._prompts

    def answer(self, query: SimulationQuery) -> tuple[bool, int]:
        """Whether the SLO is kept, and how many requests had arrived when the simulation could stop."""
        trace, requests = self._prompts_alone() if query.is_prompts else (self.trace, self._requests)
        holds = keeps_slo(query.fleet, trace, query.slo, requests, is_prefilled=query.is_prefilled)
        return holds, requests.latest_entered()


def judge_whole(trace: Trace, query: SimulationQuery) -> Verdict:
    """The verdict, without percentiles, on a simulation to the end of the trace. The `is_` fields of the
    query are not used.
    """
    slo = query.slo
    record = slo.every_s is not None  # Limits per window need every gap between tokens.
    simulation = simulate(query.fleet, trace, limits=slo.limits, record=record, every_s=slo.every_s)
    return judge_slo(simulation, slo, with_percentiles=False)


def keeps_slo(
    fleet: Fleet, trace: Trace, slo: Slo, requests: RequestRecords, *, is_prefilled: bool = False
) -> bool:
    """Whether the fleet keeps the SLO. `requests` are the records of `trace`. With `is_prefilled` every
    prompt arrives with its KV computed, on the first of the fleet's workers.

    The search needs this answer thousands of times, and nothing else of most simulations. So where the
    kernel's own counts of values within each limit are enough (`is_decided_by_counts`), the answer is read
    from these. `judge_slo`, which gathers the times of all requests first, would come to the same answer, but
    slower.
    """
    patience_s = slo.patience_s(judged_span_s(trace))
    if is_decided_by_counts(fleet, trace, slo):
        is_kept = read_if_kept(
            lambda state: state.counters[REFUSED] == 0 and _is_steady(state, trace, patience_s),
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
    return simulation is not None and judge_slo(simulation, slo, with_percentiles=False).holds


def is_decided_by_counts(fleet: Fleet, trace: Trace, slo: Slo) -> bool:
    """Whether nothing but the kernel's counts, rejected requests and the backlog test decides if the SLO is
    kept. More is needed for other engines, long traces, sessions, metrics that the kernel does not count,
    classes, guarantees, an attainment, and windows.
    """
    return (
        engine_of(fleet) == STEPWISE
        and not is_long(fleet, trace, slo.limits)
        and not trace.after.size
        and all(limit.metric in COUNTED_WHILE_RUNNING for limit in slo.limits)
        and not (slo.selectors or slo.guarantees)
        and slo.attainment_frac is None
        and slo.every_s is None
    )


def _is_steady(state: State, trace: Trace, patience_s: float) -> bool:
    """Whether a run in which all requests were served passes the backlog test (`slo_verdict.Verdict`): enough
    of the last requests waited no longer than `patience_s` for a token. The requests must be in order of
    arrival, and the measured window must end with the last arrival.
    """
    first = int(np.searchsorted(trace.arrival_s, last_tenth_s(*state.window.tolist())))
    last = state.requests[first:]
    longest_wait_s = last["first_token_s"] - last["arrival_s"]
    has_gaps = trace.output_tokens[first:] > 1
    longest_wait_s[has_gaps] = np.fmax(longest_wait_s[has_gaps], last["gap_max_s"][has_gaps])
    return len(last) == 0 or bool((longest_wait_s <= patience_s).mean() >= STEADY_FRAC)


class QueryRunner:
    """Answers queries about one traffic: a trace, or a scenario, which is drawn when it is first needed.
    `reused` is as in `TraceSimulations`.
    """

    def __init__(self, traffic: Trace | Scenario, *, reused: bool) -> None:
        self._traffic, self._reused = traffic, reused
        self._lock = threading.Lock()
        self._simulations: TraceSimulations | None = None

    def answer(self, query: SimulationQuery) -> tuple[bool, int]:
        """Like `TraceSimulations.answer`, in this process or in a worker process."""
        if (crew := current_crew()) is None:
            with current_slot():
                return self._own_simulations().answer(query)
        reference, key = _send_trace(crew, self._traffic)
        holds, seen = crew.start_item(_answer_in_worker, reference, (key, query, self._reused))()
        return bool(holds), int(seen)

    def judge_whole(self, query: SimulationQuery) -> Verdict:
        """Like the function `judge_whole`, in this process or in a worker process."""
        if (crew := current_crew()) is None:
            with current_slot():
                return judge_whole(_trace_of(self._traffic), query)
        reference, _ = _send_trace(crew, self._traffic)
        verdict: Verdict = crew.start_item(_judge_in_worker, reference, query)()
        return verdict

    def _own_simulations(self) -> TraceSimulations:
        """The `TraceSimulations` of this process, made when it is first needed."""
        with self._lock:
            if self._simulations is None:
                self._simulations = TraceSimulations(_trace_of(self._traffic), reused=self._reused)
            return self._simulations


def _trace_of(traffic: Trace | Scenario) -> Trace:
    """The trace of this traffic. A scenario draws its trace at the first use."""
    return traffic.trace if isinstance(traffic, Scenario) else traffic


# Traffic that was sent to a crew (a group of worker processes): the traffic -> (the crew, the crew's
# reference to it, its name). The dictionaries are weak, so traffic that nobody uses any more is dropped.
_sent: weakref.WeakKeyDictionary[Any, tuple[Crew, Any, str]] = weakref.WeakKeyDictionary()
# One lock for each traffic, so that two threads do not send the same one.
_sending: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # Guards the dictionaries of this module.
_name_numbers = itertools.count(1)


def _send_trace(crew: Crew, traffic: Trace | Scenario) -> tuple[Any, str]:
    """The crew's reference to the trace, and a name for it; the trace is sent if the crew does not have it.
    A scenario is drawn in a worker process: only the source of all scenarios is sent, once.
    """
    if isinstance(traffic, Scenario):
        scenarios, number = traffic.source, traffic.number
        source = _send_once(crew, scenarios, lambda: crew.put_value(scenarios))[0]
        return _send_once(crew, traffic, lambda: crew.put_result(_draw_in_worker, source, number))
    return _send_once(crew, traffic, lambda: crew.put_value(traffic))


def _send_once(crew: Crew, traffic: Any, send: Callable[[], Any]) -> tuple[Any, str]:
    """What `send` returned for this traffic and this crew, and a name that no other traffic gets. `send` is
    called only if the crew does not have the traffic. The name has a number, because Python may give the id
    of a deleted object to a new one.
    """
    with _lock:
        lock = _sending.setdefault(traffic, threading.Lock())
    with lock:
        sent_to, reference, name = _sent.get(traffic, (None, None, ""))
        if sent_to is not crew:
            reference, name = send(), f"{id(crew)} {id(traffic)} {next(_name_numbers)}"
            _sent[traffic] = crew, reference, name
        return reference, name


def _draw_in_worker(scenarios: Scenarios, number: int) -> Trace:
    """The requests of a scenario, drawn in a worker process."""
    return scenarios.draw_requests(number)


def _judge_in_worker(trace: Trace, query: SimulationQuery) -> Verdict:
    """Like `judge_whole`, run in a worker process."""
    return judge_whole(make_writable(trace), query)


# The simulations of this worker process, by the name of their traffic.
_simulations: dict[str, TraceSimulations] = {}


def _answer_in_worker(trace: Trace, item: tuple[str, SimulationQuery, bool]) -> tuple[bool, int]:
    """Like `TraceSimulations.answer`, run in a worker process: `item` is the traffic's name, the query, and
    `reused`.
    """
    name, query, reused = item
    with _lock:
        simulations = _simulations.get(name)
        if simulations is None:
            while len(_simulations) >= MOST_TRAFFICS:
                del _simulations[next(iter(_simulations))]  # The oldest.
            simulations = _simulations[name] = TraceSimulations(make_writable(trace), reused=reused)
    return simulations.answer(query)


def make_writable(trace: Trace) -> Trace:
    """The trace with copies of its read-only arrays: the object store of a cluster returns such arrays. For
    Numba a read-only array has another type, for which it would compile all functions again.
    """
    columns = {column.name: getattr(trace, column.name) for column in fields(trace)}
    copies: dict[str, Any] = {
        name: column.copy()
        for name, column in columns.items()
        if isinstance(column, np.ndarray) and not column.flags.writeable
    }
    return replace(trace, **copies) if copies else trace
