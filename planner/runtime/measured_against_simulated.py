"""Compares a measured run with the simulation of the same requests on the same fleet.

The measurement is converted to the simulator's own form (`Simulation`), and prediction_errors.py compares the
two. Each part of an interrupted run is simulated by itself, from an idle fleet, as it was measured.

If engines have step logs, times are the engines' own: from the moment when a request reaches the engine to
the moment when its tokens are on the host. The simulation starts each request at the same moment, without the
engine's front end; the time outside the engine (client, router, HTTP) is reported separately. Without step
logs, times are the client's, and the simulation includes the front end.

A request that waits for others arrives in the simulation when the simulation has answered these, so that late
answers add up along a session as they do on the engines. Each side's latencies count from its own arrivals.

A pair of prefill and decode workers computes one token more than was requested, as vLLM's decode worker
computes the first token again. With some engines the client gets its first token from the decode worker. Then
neither side counts the prefill worker's token, which the client does not see. With the others both sides
count it, as the first one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.domain import Limit, Selector, Slo, selectors_of
from planner.errors import InputError
from planner.fleet import Fleet
from planner.runtime.engine_log import EngineLog, EngineRequest
from planner.runtime.live_replay import Journal, ReplayPart, RequestOutcome
from planner.runtime.prediction_errors import (
    STATUS_OF,
    ComparedRun,
    MeasuredComparison,
    Tolerances,
    compare_parts,
    per_request_columns,
)
from planner.simulator import Simulation, simulate
from planner.simulator.recorded_gaps import gaps_s
from planner.simulator.simulation import Floats, Ints
from planner.traffic.classes import class_numbers
from planner.traffic.sessions import session_numbers
from planner.traffic.trace import Trace, measured_window

# The numbers of the part and of the request in a name that `live_replay.request_name` made.
_REQUEST_NAME = re.compile(r"p(\d+)r(\d+)")


def compare_with_simulation(
    measurement: Measurement, fleet: Fleet, slo: Slo, tolerances: Tolerances
) -> MeasuredComparison:
    """Simulate the requests that were sent on `fleet`, and compare.

    `fleet` is the run's own, or one whose step times are corrected by the run (runtime/step_fits.py).
    """
    parts = [
        compare_part(measurement, part, fleet, slo)
        for part in measurement.journal.parts
        if outcomes_of_part(measurement, part)
    ]
    if not parts:
        raise InputError("no request has ended: nothing was measured")
    return compare_parts(parts, slo, tolerances)


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """A whole measured run: its parts, the client's view of each request, and the engines' logs.

    `trace` is what was to be sent; `logs` are keyed by worker, empty where engines keep none.
    """

    fleet: Fleet
    trace: Trace
    journal: Journal
    logs: Mapping[str, EngineLog]

    def logged_requests(self) -> dict[tuple[int, int], dict[str, EngineRequest]]:
        """The engines' logs of each request, by (part, request) and then by worker.

        Logs of an older run in the same folder are left out, as are requests of the warm-up, whose names are
        different.
        """
        starts = {part.part: part.start_s for part in self.journal.parts}
        by_request: dict[tuple[int, int], dict[str, EngineRequest]] = {}
        for worker, log in self.logs.items():
            for name, logged in log.requests.items():
                if not (match := _REQUEST_NAME.search(name)):
                    continue  # A request of the warm-up, or of another client.
                part, request = int(match[1]), int(match[2])
                if logged.queued_s >= starts.get(part, math.inf):
                    by_request.setdefault((part, request), {})[worker] = logged
        return by_request

    @property
    def decode_sends_first_token(self) -> bool:
        """Whether the client of a pair sees its first token only from the decode worker."""
        engines = [pool.type.engine for pool in self.fleet.pools if pool.role == "prefill"]
        return any(engine is not None and engine.first_token == "decode" for engine in engines)

    @property
    def is_timed_by_engines(self) -> bool:
        """Whether every finished request is in the logs of all workers that served it."""
        logs_by_request = self.logged_requests()
        finished = [outcome for outcome in self.journal.outcomes.values() if outcome.status == "finished"]
        return (
            bool(self.logs)
            and bool(finished)
            and all(
                set(outcome.workers) <= set(logs_by_request.get((outcome.part, outcome.request), ()))
                for outcome in finished
            )
        )


def compare_part(
    measurement: Measurement, part: ReplayPart, fleet: Fleet, slo: Slo
) -> tuple[ComparedRun, ComparedRun]:
    """The predicted and the measured run of one part, with the requests that have an outcome.

    Requests without an outcome were in flight when the part was interrupted. They are simulated too, as load,
    and arrive at their times in the trace.
    """
    logs_by_request = measurement.logged_requests() if measurement.is_timed_by_engines else {}
    sent_trace, order = _simulated_trace(measurement, part, logs_by_request)
    if logs_by_request:
        # Times by the engines' logs begin after the front end, so the simulation is without one.
        fleet = fleet.with_engines(lambda engine: replace(engine, front_end_s=0.0, prompt_token_s=0.0))
    simulation = simulate(fleet, sent_trace, limits=slo.limits, record=True)
    outcomes = {outcome.request: outcome for outcome in outcomes_of_part(measurement, part)}
    has_outcome = np.array([request in outcomes for request in order])
    ended = [outcomes[request] for request in order if request in outcomes]
    columns = {name: getattr(simulation, name)[has_outcome] for name in per_request_columns(simulation)}
    predicted = replace(simulation, **columns)
    measured, gaps = _measured_simulation(
        measurement, part, predicted, ended, logs_by_request, slo, measured_window(sent_trace)
    )
    session = _complete_sessions(measurement.trace, [outcome.request for outcome in ended])
    finished = STATUS_OF["finished"]
    counts = np.zeros(len(order), bool)  # Whether a request finished on both sides.
    counts[has_outcome] = (measured.status == finished) & (predicted.status == finished)
    if not counts.all():
        predicted = _with_gaps_of(counts, predicted, fleet, sent_trace)
    return (
        ComparedRun(predicted, *gaps_s(predicted), session),
        ComparedRun(measured, gaps, np.ones(len(gaps)), session),
    )


def outcomes_of_part(measurement: Measurement, part: ReplayPart) -> list[RequestOutcome]:
    """The outcomes of the requests that ended in this part.

    Requests of the part that did not end were sent again in a later part, and have their outcome there.
    """
    return [
        measurement.journal.outcomes[request]
        for request in part.requests
        if request in measurement.journal.outcomes and measurement.journal.outcomes[request].part == part.part
    ]


def _simulated_trace(
    measurement: Measurement,
    part: ReplayPart,
    logs_by_request: Mapping[tuple[int, int], Mapping[str, EngineRequest]],
) -> tuple[Trace, list[int]]:
    """The trace to simulate for a part, and the number of each of its requests in the run's trace.

    A request arrives when it was measured to arrive. One that waits for others of the part arrives when the
    simulation has answered these; its time in the trace is only a lower limit.
    """
    # A request's number is larger than those of its parents (the requests it waits for), which come first.
    trace, requests, all_sent = measurement.trace, sorted(part.requests), measurement.journal.outcomes
    parents_of: dict[int, list[int]] = {}
    in_part = set(requests)
    for child, parent in trace.after.tolist():
        if child in in_part:
            parents_of.setdefault(child, []).append(parent)
    start_s: dict[int, float] = {}
    for request in requests:
        due_s = float(trace.arrival_s[request]) - part.first_s  # In the trace the part begins at first_s.
        parents = [parent for parent in parents_of.get(request, ()) if parent in in_part]
        if parents:
            # A lower limit that sorts the request behind its parents; the simulation sets the time.
            start_s[request] = max(due_s, *(start_s[parent] for parent in parents))
        elif (sent := all_sent.get(request)) and sent.part == part.part:
            start_s[request] = _request_times_s(
                measurement, sent, logs_by_request.get((part.part, request), {}), part
            )[0]
        else:
            # The parents were answered in an earlier part: of the user's thinking at most think_s are left.
            think_s = float(trace.think_s[request]) if request in parents_of else 0.0
            start_s[request] = max(due_s, think_s)
    # By the engines' clock a request may start a moment before its part does.
    requests.sort(key=lambda request: max(start_s[request], 0.0))
    arrival_s = np.maximum([start_s[request] for request in requests], 0.0)
    sent_trace = trace.select(requests, arrival_s=arrival_s)
    if measurement.decode_sends_first_token:
        return sent_trace, requests
    # A pair of workers computes one token more (the module's docstring says why).
    is_pair = [r in all_sent and len(all_sent[r].workers) == 2 for r in requests]
    return replace(sent_trace, output_tokens=sent_trace.output_tokens + np.array(is_pair)), requests


def _request_times_s(
    measurement: Measurement, outcome: RequestOutcome, logged: Mapping[str, EngineRequest], part: ReplayPart
) -> tuple[float, float, Floats]:
    """The times at which a request started, was scheduled, and got its tokens, since its part began [s].

    `logged` has the request in the engines' logs, by worker. Without logs the times are the client's, and the
    client does not know when the request was scheduled (NaN).
    """
    engines = [logged[worker] for worker in outcome.workers if worker in logged]
    if not engines:
        return outcome.sent_s, math.nan, np.array(outcome.token_s)
    # The engines whose tokens reach the client.
    visible = engines[-1:] if measurement.decode_sends_first_token else engines
    token_s = np.concatenate([engine.token_s for engine in visible])
    return engines[0].queued_s - part.start_s, engines[0].scheduled_s - part.start_s, token_s - part.start_s


def _measured_simulation(
    measurement: Measurement,
    part: ReplayPart,
    predicted: Simulation,
    ended: Sequence[RequestOutcome],
    logs_by_request: Mapping[tuple[int, int], Mapping[str, EngineRequest]],
    slo: Slo,
    window_s: tuple[float, float],
) -> tuple[Simulation, Floats]:
    """The measured requests in the simulator's form, and the gaps between tokens that ended in the window.

    `ended` are the outcomes, in the order of the requests of `predicted`. Values that no measurement gives,
    such as classes, are those of `predicted`.
    """
    n = len(ended)
    values: dict[str, Any] = {
        name: np.full(n, np.nan) for name in ("queue_s", "ttft_s", "tpot_s", "tbt_max_s", "e2e_s")
    }
    reports_hits = predicted.cached_tokens is not None and bool(logs_by_request)
    number_of = {name: number for number, name in enumerate(predicted.worker_names)}
    workers = np.full((n, 2), -1)  # The numbers of the prefill and of the decode worker; -1: of none.
    preemptions, cached = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    status = np.array([STATUS_OF[outcome.status] for outcome in ended])
    arrival_s = predicted.arrival_s.copy()  # Requests without an answer are taken to arrive as predicted.
    all_gaps, gap_requests = list[Floats](), list[int]()  # The gaps of a request, and its index `k`.
    violations, counted = (np.zeros(len(slo.limits), dtype=np.int64) for _ in range(2))
    for k, outcome in enumerate(ended):
        if outcome.workers:
            workers[k] = number_of.get(outcome.workers[0], -1), number_of.get(outcome.workers[-1], -1)
        if outcome.status != "finished":
            continue
        logged = logs_by_request.get((part.part, outcome.request), {})
        start_s, scheduled_s, token_s = _request_times_s(measurement, outcome, logged, part)
        gaps = np.diff(token_s)
        arrival_s[k] = start_s
        values["queue_s"][k] = scheduled_s - start_s
        values["ttft_s"][k], values["e2e_s"][k] = token_s[0] - start_s, token_s[-1] - start_s
        if len(gaps):
            values["tpot_s"][k], values["tbt_max_s"][k] = gaps.mean(), gaps.max()
        preemptions[k] = sum(engine.preemptions for engine in logged.values())
        prefilled = logged.get(outcome.workers[0]) if outcome.workers else None
        cached[k] = 0 if prefilled is None else prefilled.cached_tokens
        if predicted.status[k] == STATUS_OF["finished"]:  # Gaps of requests that finished on both sides.
            gap_requests.append(k)
            all_gaps.append(gaps[(token_s[1:] >= window_s[0]) & (token_s[1:] <= window_s[1])])
    gap_s = np.concatenate(all_gaps) if all_gaps else np.zeros(0)
    end_s = max(outcome.end_s for outcome in ended)
    for j, limit in enumerate(slo.limits):
        if limit.metric_row.is_of_gaps:
            # A limit of a class applies to the gaps of the requests of this class.
            applies = np.repeat(predicted.limited_requests(limit)[gap_requests], list(map(len, all_gaps)))
            counted[j], violations[j] = int(applies.sum()), int((gap_s[applies] > limit.limit_s).sum())
    logs = [measurement.logs.get(name) for name in predicted.worker_names]
    # Steps before the start of this part are those of the warm-up, or of other parts.
    steps = [None if log is None else log.steps[log.steps.start_s >= part.start_s] for log in logs]
    return (
        replace(
            predicted,
            **values,
            arrival_s=arrival_s,
            prefill_worker=workers[:, 0],
            decode_worker=workers[:, 1],
            preemptions=preemptions,
            cached_tokens=cached if reports_hits else None,
            status=status,
            violations=violations,
            counted=counted,
            complete=True,
            runs=predicted.runs[:0],
            end_s=end_s,
            window_s=(window_s[0], min(window_s[1], end_s)),
            worker_busy_s=np.array([0.0 if s is None else s.t_s.sum() for s in steps]),
            worker_steps=np.array([0 if s is None else len(s) for s in steps]),
            worker_tokens=np.array(
                [0.0 if s is None else float((s.prefill_tokens + s.n_decode).sum()) for s in steps]
            ),
        ),
        gap_s,
    )


def _with_gaps_of(
    counts: npt.NDArray[np.bool_], predicted: Simulation, fleet: Fleet, trace: Trace
) -> Simulation:
    """The prediction with only the gaps between tokens of the requests for which `counts` is true.

    `counts` (n,) has a value for each request of the simulated `trace`.
    """
    # A simulation records gaps by class. The LLM that a request names changes no time, so one name stands
    # for each class of the SLO (from 0 on), one for requests of none, and one for those that do not count.
    selectors = selectors_of(predicted.limits)
    names = ("uncounted", "none", *map(str, range(len(selectors))))
    llm = np.where(counts, class_numbers(selectors, trace) + 2, 0)
    limits = [Limit("tbt", 0.5, math.inf, Selector(name, llms=(name,))) for name in names[1:]]
    runs = simulate(fleet, replace(trace, llm=llm, llms=names), limits=limits, record=True).runs
    # In `runs` 0 stands for all requests, 1 for those of no class, and the classes follow.
    of_all, of_classes = runs[runs["of_class"] > 0], runs[runs["of_class"] > 1]
    of_all["of_class"] = 0
    of_classes["of_class"] -= 1
    predicted = replace(
        predicted,
        runs=np.concatenate([of_all, of_classes]),
        counted=predicted.counted.copy(),
        violations=predicted.violations.copy(),
    )
    for j, limit in enumerate(predicted.limits):
        if limit.metric_row.is_of_gaps:
            gap_s, weight = gaps_s(predicted, predicted.class_number(limit))
            predicted.counted[j], predicted.violations[j] = weight.sum(), weight[gap_s > limit.limit_s].sum()
    return predicted


def _complete_sessions(trace: Trace, requests: Sequence[int]) -> Ints:
    """The session of each of these requests, as in `ComparedRun.session`: -1 if it is not complete."""
    all_sessions = session_numbers(trace)
    session = all_sessions[list(requests)]
    size = np.bincount(all_sessions, minlength=len(trace))
    present = np.bincount(session, minlength=len(trace))
    # A request that belongs to no session is in `session_numbers` a session of one.
    return np.where((size[session] > 1) & (size[session] == present[session]), session, -1)


def outside_s(measurement: Measurement) -> Floats:
    """The time that each finished request spent outside the engines before its first token [s].

    This is the time from the client to the engine, plus the time of the first token from the engine's host
    to the client. The array is empty if engines keep no logs.
    """
    if not measurement.is_timed_by_engines:
        return np.zeros(0)
    logs_by_request = measurement.logged_requests()
    times_outside_s = []
    for outcome in measurement.journal.outcomes.values():
        if outcome.status == "finished":
            first, last = (
                logs_by_request[outcome.part, outcome.request][name]
                for name in (outcome.workers[0], outcome.workers[-1])
            )
            client_s = outcome.token_s[0] - outcome.sent_s
            engines_s = last.token_s[0] - first.queued_s
            times_outside_s.append(client_s - engines_s)
    return np.array(times_outside_s)
