"""Simulates a fleet on a trace.

The kernel's arrays are filled (initial_state.py), the kernel runs on them, and what became of every request
is read from them (read_results.py). `simulate` runs to the last token; the search calls `simulate_if_kept`,
which stops when an SLO is missed. In shapes of arrays n are the requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from planner.domain import Limit, allowed_above, selectors_of
from planner.errors import InputError
from planner.files.column_files import release_memory
from planner.fleet import Fleet
from planner.policies import (
    BATCHING,
    MIXED_POOL,
    OF_DISTSERVE,
    OF_SPLITWISE,
    POOLS,
    ROUTING,
    STEPWISE,
    counts_tenants,
)
from planner.simulator import distserve, kernel, layout, splitwise, streaming_requests
from planner.simulator.initial_state import (
    check_traffic,
    count_in_windows,
    engine_of,
    first_state,
    fresh_requests,
    make_fresh,
)
from planner.simulator.kernel_variants import for_kernel
from planner.simulator.layout import State
from planner.simulator.read_results import columns_of, read_simulation
from planner.simulator.simulation import Ints, Simulation
from planner.traffic.trace import Trace, last_tenth_s, measured_window

# Room for recorded runs of steps, set by hand: a trace that needs more is simulated twice.
RUNS_PER_REQUEST, LEAST_RUNS = 8, 1024
Result = TypeVar("Result")


def simulate(
    fleet: Fleet,
    trace: Trace,
    *,
    limits: Sequence[Limit] = (),
    stop_early: bool = False,
    record: bool = False,
    record_parts: bool = False,
    closed_loop: int = 0,
    every_s: float | None = None,
) -> Simulation:
    """Simulate `trace` on `fleet` to the last token.

    `limits` are counted while running; with `stop_early` the run ends once one of them cannot hold any more.
    `record` keeps every run of engine steps, for gap percentiles and load over time; of a long trace it keeps
    some of the runs and a histogram of all gaps. `record_parts` also keeps which prompts a step computes and
    which requests are preempted. `closed_loop` > 0 ignores the arrival times and keeps that many requests in
    flight. On long traces limits are also counted in windows of `every_s`; on other traces windows are judged
    from the records. Raises InputError for unknown policies, and for a trace that this fleet cannot serve.
    """
    check_traffic(fleet, trace)
    if trace.after.size and (closed_loop or engine_of(fleet) != STEPWISE):
        batchings = (repr(row.name) for row in BATCHING.values() if row.simulator != STEPWISE)
        raise InputError(
            f"{trace.name}: requests wait for others (column after), which goes neither with a closed loop "
            f"nor with batching {' or '.join(batchings)}; drop one of the two"
        )
    if is_long(fleet, trace, limits) and not closed_loop and not record_parts:
        return _simulate_streamed(fleet, trace, limits, every_s, record=record, stop_early=stop_early)[0]
    # In a closed loop arrival times mean nothing, so all requests are measured.
    window_s = (0.0, np.inf) if closed_loop else measured_window(trace)
    record = record or record_parts
    # If there is too little room, the kernel goes on counting runs without recording them. Then all is
    # simulated again, with as much room as this count says.
    runs = room_for_runs(trace) if record else 0
    parts = runs if record_parts else 0
    while True:
        requests = fresh_requests(trace)
        if closed_loop:
            requests["arrival_s"] = 0.0
        state = first_state(fleet, trace, requests, limits=limits, window_s=window_s, runs=runs, parts=parts)
        if closed_loop:
            state.counters[layout.RELEASED] = min(closed_loop, len(trace))
        _run(state, fleet, closed_loop, stop_early)
        needed_runs, needed_parts = (int(state.counters[k]) for k in (layout.RUNS, layout.PARTS))
        if not record or (needed_runs <= runs and needed_parts <= parts):
            return read_simulation(state, fleet, trace, tuple(limits))
        runs, parts = max(runs, needed_runs), max(parts, needed_parts)


def room_for_runs(trace: Trace) -> int:
    """For how many recorded runs of steps a first simulation has room; one that needs more is repeated."""
    return RUNS_PER_REQUEST * len(trace) + LEAST_RUNS


def is_long(fleet: Fleet, trace: Trace, limits: Sequence[Limit] = (), longer_than: int | None = None) -> bool:
    """Whether requests are streamed through the kernel's memory (streaming_requests.py): on traces with more
    than `longer_than` requests (default: LONG_REQUESTS), if no request depends on another's record or is of a
    class.
    """
    policies = fleet.policies
    return (
        not selectors_of(limits)
        and len(trace) > (streaming_requests.LONG_REQUESTS if longer_than is None else longer_than)
        and engine_of(fleet) == STEPWISE
        and not (trace.after.size or trace.has_prefixes or fleet.disturbances)
        and not (fleet.lora or policies.prefix_cache or policies.prediction_buckets or policies.due)
        and not counts_tenants(policies)
        and policies.prediction_accuracy_frac is None
        and sum(pool.count * pool.type.dp for pool in fleet.pools) <= streaming_requests.MOST_WORKERS
    )


def simulate_until(
    deadline: float,
    fleet: Fleet,
    trace: Trace,
    *,
    limits: Sequence[Limit] = (),
    stop_early: bool = False,
    record: bool = False,
    every_s: float | None = None,
) -> Simulation:
    """Like `simulate`, but where requests can be streamed it raises streaming_requests.OutOfTime soon after
    `deadline`, on time.monotonic's clock, and records a histogram of gaps as for long traces.
    """
    if is_long(fleet, trace, limits, streaming_requests.CHUNK_REQUESTS):
        return _simulate_streamed(
            fleet, trace, limits, every_s, record=record, stop_early=stop_early, deadline=deadline
        )[0]
    return simulate(fleet, trace, limits=limits, stop_early=stop_early, record=record)


def _simulate_streamed(
    fleet: Fleet,
    trace: Trace,
    limits: Sequence[Limit],
    every_s: float | None,
    *,
    record: bool = False,
    stop_early: bool = False,
    patience_s: float = np.inf,
    is_prefilled: bool = False,
    predicted_tokens: Ints | None = None,
    deadline: float = np.inf,
) -> tuple[Simulation, State]:
    """The simulation of a long trace, and the kernel's arrays at its end, without the requests.

    `predicted_tokens` (n,) are output lengths that schedulers predict, by default the true ones;
    `patience_s` and `is_prefilled` are as in `simulate_if_kept`.
    """
    runs_per_request = streaming_requests.RUNS_PER_REQUEST

    # StreamedRequests calls `lay_out` on records that are about to be needed, and `read` on those of requests
    # that are done.
    def lay_out(first: int, records: npt.NDArray[np.void]) -> None:
        make_fresh(records, trace, first)
        if predicted_tokens is not None:
            rows = slice(first, first + len(records))
            for name in ("predicted_tokens", "predicted_later_tokens"):
                records[name] = predicted_tokens[rows]
        # A column of a long trace may be mapped from a file: its pages are given back.
        for column in (trace.input_tokens, trace.output_tokens):
            release_memory(column)

    def read(records: npt.NDArray[np.void], rows: slice) -> dict[str, npt.NDArray[Any]]:
        return columns_of(records, trace.output_tokens[rows])

    while True:
        streamed = streaming_requests.StreamedRequests(
            trace.arrival_s, lay_out, read, streaming_requests.CHUNK_REQUESTS
        )
        runs = runs_per_request * streaming_requests.CHUNK_REQUESTS if record else 0
        window_s = measured_window(trace)
        state = first_state(fleet, trace, streamed.requests, limits=limits, window_s=window_s, runs=runs)
        if every_s is not None:
            state = count_in_windows(state, limits, trace, every_s)
        state = state._replace(disturbances=streamed.disturbances())
        _stop_at_backlog(state, trace, patience_s)
        state.counters[layout.PREFILLED] = is_prefilled
        try:
            streamed.run(
                state, lambda paused: kernel.simulate_events(for_kernel(paused), 0, stop_early), deadline
            )
        except streaming_requests.MoreRuns:
            runs_per_request *= 4  # There was too little room for runs: begin anew (the 4 is set by hand).
            continue
        _check_done(state)
        sampled_runs = np.concatenate([state.runs[:0], *streamed.sampled])
        state.counters[layout.RUNS] = len(sampled_runs)
        columns = streamed.columns(state)
        for column in (trace.arrival_s, trace.input_tokens, trace.output_tokens):
            release_memory(column)
        # The records were reused for many requests, so no result is read from them.
        state = state._replace(runs=sampled_runs, requests=streamed.requests[:0])
        simulation = read_simulation(state, fleet, trace, tuple(limits), columns)
        # The parts of the run whose steps were recorded, (first, last moment) each.
        sampled_s = np.array(streamed.sampled_s).reshape(-1, 2)
        return replace(simulation, gaps=streamed.gaps, sampled_s=sampled_s), state


class RequestRecords:
    """The kernel's records of a trace's requests, used by many simulations in turn, from any thread.

    A simulation that stops early has changed few records, and only those are written anew for the next
    simulation. If records are not `reused`, every simulation gets new ones.
    """

    def __init__(self, trace: Trace, predicted_tokens: Ints | None = None, *, reused: bool = True):
        """`predicted_tokens` (n,) are output lengths that schedulers predict, by default the true ones."""
        self._trace, self.predicted_tokens, self._reused = trace, predicted_tokens, reused
        # Arrays that no simulation uses now, each with how many of its first records were changed.
        self._spare: list[tuple[npt.NDArray[np.void], int]] = []
        self._lock, self._last = threading.Lock(), threading.local()
        # How many simulations there were, and how many requests arrived in them before they ended.
        self.runs = self.entered = 0

    def take(self) -> npt.NDArray[np.void]:
        """All records (n,), layout.REQUEST, as they are before the first event."""
        try:
            requests, touched = self._spare.pop()
        except IndexError:
            requests = np.empty(len(self._trace), dtype=layout.REQUEST)
            touched = len(requests)
        make_fresh(requests[:touched], self._trace)
        if self.predicted_tokens is not None:
            predicted_tokens = self.predicted_tokens[:touched]
            requests["predicted_tokens"][:touched] = predicted_tokens
            requests["predicted_later_tokens"][:touched] = predicted_tokens
        return requests

    def give_back(self, requests: npt.NDArray[np.void], touched: int) -> None:
        """Take back the records that `take` gave; of these only the first `touched` may have changed."""
        if self._reused:
            self._spare.append((requests, touched))
        self.count(touched)

    def count(self, entered: int) -> None:
        """Count one more simulation, in which `entered` requests arrived before it ended."""
        self._last.entered = entered
        with self._lock:
            self.runs, self.entered = self.runs + 1, self.entered + entered

    def latest_entered(self) -> int:
        """How many requests arrived in the latest simulation of this thread."""
        return int(self._last.entered)


def simulate_if_kept(
    fleet: Fleet,
    trace: Trace,
    limits: Sequence[Limit],
    requests: RequestRecords,
    every_s: float | None = None,
    *,
    patience_s: float = np.inf,
    is_prefilled: bool = False,
) -> Simulation | None:
    """The whole simulation, or None as soon as it shows that the SLO is missed: a limit is broken over the
    whole trace or, with `every_s`, in a window of that length, or too many of the last requests wait longer
    than `patience_s` (`Slo.patience_s`).

    A simulation that is returned may still miss a window or the backlog test: `slo_verdict.judge_slo`
    decides. A limit that is broken over the whole trace is broken in some window too, so it ends the run with
    `every_s` as well. `requests` are the records of `trace`, used for many fleets. If `is_prefilled`, every
    prompt arrives computed, on the first of the fleet's workers.
    """
    if is_long(fleet, trace, limits):
        predicted = requests.predicted_tokens
        simulation, state = _simulate_streamed(
            fleet,
            trace,
            limits,
            every_s,
            stop_early=True,
            patience_s=patience_s,
            is_prefilled=is_prefilled,
            predicted_tokens=predicted,
        )
        requests.count(int(state.counters[layout.ENTERED]))
        return simulation if _holds_over_the_whole(state, len(trace), limits) else None
    return read_if_kept(
        lambda state: read_simulation(state, fleet, trace, tuple(limits)),
        fleet,
        trace,
        limits,
        requests,
        every_s,
        patience_s=patience_s,
        is_prefilled=is_prefilled,
    )


def read_if_kept(
    read: Callable[[State], Result],
    fleet: Fleet,
    trace: Trace,
    limits: Sequence[Limit],
    requests: RequestRecords,
    every_s: float | None = None,
    *,
    patience_s: float = np.inf,
    is_prefilled: bool = False,
) -> Result | None:
    """What `read` makes of the kernel's arrays at the end of the simulation; None if the SLO is missed, as in
    `simulate_if_kept`, whose arguments it has. For traces that are not long (`is_long`). `read` must not keep
    the arrays: the next simulation uses them.
    """
    state = first_state(fleet, trace, requests.take(), limits=limits, window_s=measured_window(trace))
    if every_s is not None:
        state = count_in_windows(state, limits, trace, every_s)
    _stop_at_backlog(state, trace, patience_s)
    state.counters[layout.PREFILLED] = is_prefilled
    _run(state, fleet, 0, True)
    n = len(trace)
    result = read(state) if _holds_over_the_whole(state, n, limits) else None
    # If requests enter by arrival and no predictions were written, only those that have entered were changed.
    by_arrival = engine_of(fleet) == STEPWISE and not trace.after.size
    policies = fleet.policies
    has_no_predictions = policies.prediction_accuracy_frac is None and not policies.prediction_buckets
    touched = int(state.counters[layout.ENTERED]) if by_arrival and has_no_predictions else n
    requests.give_back(state.requests, touched)
    return result


def _holds_over_the_whole(state: State, n: int, limits: Sequence[Limit]) -> bool:
    """Whether all of n requests are done, and no limit is broken over the whole."""
    return state.counters[layout.DONE] == n and not any(
        counted["violations"] > allowed_above(limit.percentile_frac, int(counted["counted"]))
        for counted, limit in zip(state.limits, limits, strict=True)
    )


def _stop_at_backlog(state: State, trace: Trace, patience_s: float) -> None:
    """Have the kernel stop once the backlog test (`slo_verdict.judge_slo`) cannot be passed any more.

    The test is passed if at least half of the requests of the last tenth wait at most `patience_s`, for the
    first token and in every gap. Take the moment 2 `patience_s` after the last arrival. A request of more
    than one token that does not decode by then has waited longer than `patience_s`, either before its first
    token or after it.
    """
    if trace.after.size:  # The last arrival depends on the fleet, so the kernel cannot stop before the end.
        return
    first = int(np.searchsorted(trace.arrival_s, last_tenth_s(*state.window.tolist())))
    requests_with_gaps = int((trace.output_tokens[first:] > 1).sum())
    state.policy[layout.LAST_S] = trace.arrival_s[first]
    latest_s = float(trace.arrival_s[-1]) + 2 * patience_s
    state.policy[layout.LATEST_S] = latest_s * (1 + 1e-9)  # Rounding must not fail a fleet that just passes.
    # Half of the last tenth may fail (STEADY_FRAC); all other requests that have gaps must decode by then.
    state.counters[layout.IN_DOUBT] = requests_with_gaps - (len(trace) - first) // 2


def _run(state: State, fleet: Fleet, closed_loop: int, stop_early: bool) -> None:
    """Simulate `state`, in place, with the engine of the fleet. Raises LostRequests."""
    engine, policies = engine_of(fleet), fleet.policies
    if engine == OF_SPLITWISE:
        splitwise.simulate(
            state,
            counts_added=ROUTING[policies.routing].counts_added,
            moves_machines=POOLS[policies.pools].code == MIXED_POOL,
            closed_loop=closed_loop,
            stop_early=stop_early,
        )
    elif engine == OF_DISTSERVE:
        distserve.simulate(state, closed_loop=closed_loop, stop_early=stop_early)
    else:
        kernel.simulate_events(for_kernel(state), closed_loop, stop_early)
    _check_done(state)


class LostRequests(Exception):
    """Requests will never be done, though no worker has failed: a mistake of the simulator."""


def _check_done(state: State) -> None:
    """Raise LostRequests if no event is due and not all requests are done.

    Two cases are no mistake: if workers go down, requests may wait for ever; and a step beyond the tables of
    step times never ends, for which `read_simulation` raises InputError.
    """
    counters, n = state.counters, len(state.requests)
    # Something can still happen: an event, requests to come, a step under way, workers that return.
    if counters[layout.DONE] == n or counters[layout.PENDING] > 0:
        return
    if (counters[[layout.FREED, layout.READING]] != layout.NONE).any():
        return
    if counters[layout.ENTERED] < counters[layout.RELEASED] or (state.lanes["run_steps"] > 0).any():
        return
    if (state.disturbances["kind"] != layout.PAUSE).any():
        return
    raise LostRequests(
        f"{n - int(counters[layout.DONE])} of {n} requests are neither finished nor rejected, and no worker "
        "has anything to do. This is a mistake of the simulator, not of the fleet: please report it with the "
        "fleet and the trace"
    )
