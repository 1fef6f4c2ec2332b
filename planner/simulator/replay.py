"""Simulates a fleet on a trace.

The kernel's arrays (layout.py) are filled, the kernel runs on them, and what became of every request is read
from them. `simulate` runs to the last token; the search calls `simulate_if_kept`, which stops when an SLO is
missed.

Letters of array shapes: n requests, W the kernel's workers (each data-parallel rank is one), P running pools,
L limits, V windows.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS, Limit, allowed_above, selectors_of
from planner.errors import InputError
from planner.files.column_files import release_memory
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.llm import Llm
from planner.models.output_length import bucket_range, output_table, synthetic_buckets
from planner.policies import (
    ADMISSION,
    BATCHING,
    FASTER_TRANSFORMER,
    FLIP,
    MIXED_POOL,
    OF_DISTSERVE,
    OF_SPLITWISE,
    POOLS,
    QUEUE,
    ROUTING,
    STEPWISE,
    TIES_BY,
)
from planner.simulator import (
    cache_layout,
    distserve,
    kernel,
    layout,
    splitwise,
    streaming_requests,
    worker_places,
)
from planner.simulator.adapter_layout import check_adapters, make_adapters
from planner.simulator.kernel_variants import for_kernel
from planner.simulator.layout import State
from planner.simulator.offload_layout import Offload, make_offload
from planner.simulator.pins import pin_prefixes
from planner.simulator.policy_checks import check
from planner.simulator.simulation import Floats, Ints, Simulation
from planner.traffic.classes import class_numbers, select_requests
from planner.traffic.tasks import tasks_of
from planner.traffic.trace import Trace, last_tenth_s, measured_window, slo_windows_s, window_numbers
from planner.units import counted

ROLES = {"mixed": layout.MIXED, "prefill": layout.PREFILL, "decode": layout.DECODE}
# The kernel counts the values of these metrics as they come, so that a run may stop early.
COUNTED_WHILE_RUNNING = {"ttft": layout.TTFT, "tbt": layout.TBT, "tpot": layout.TPOT, "e2e": layout.E2E}
# Steps until a worker knows of KV that has arrived, by whether its engine schedules asynchronously: such an
# engine sends a step to the workers when the step before begins, so it learns of KV later.
KV_DELAY_STEPS = {False: 1, True: 3}
RUNS_PER_REQUEST, LEAST_RUNS = 8, 1024  # Room for recorded runs of steps, which suffices for most traces.
REMEMBERED_TOKENS = 20_000  # Tables of step times up to so many tokens are remembered between simulations.
REMEMBERED_TYPES = 1024  # Tables of so many worker types are remembered.
FRESH_REQUESTS = 2048  # Records are written in blocks of so many, which fit into a processor's cache.
EVENTS = {"down": layout.DOWN, "up": layout.UP, "slow": layout.SLOW, "link": layout.LINK_SLOW}

Result = TypeVar("Result")

# Of workers with equal scores a router takes the one whose type has the smallest of these keys (`_tie_key`).
TieKey = tuple[tuple[tuple[float, ...], ...], tuple[int, int], bytes, tuple[float, ...]]


def allowed_violations(limit: Limit, trace: Trace, window_s: tuple[float, float]) -> int:
    """How many violations `limit` allows on this trace; for gaps between tokens an upper bound of that, since
    the fleet decides which gaps end in the window.
    """
    inside = (trace.arrival_s >= window_s[0]) & (trace.arrival_s <= window_s[1])
    inside[trace.after[:, 0]] = True  # Requests that wait for others may arrive in the window, so all count.
    if limit.metric_row.is_of_gaps:
        gaps = trace.output_tokens - 1
        if limit.selector is not None:
            gaps = gaps[select_requests(limit.selector, trace)]
        values = int(gaps.sum())
    else:
        values = int((inside & _has_value(limit, trace)).sum())
    return allowed_above(limit.percentile_frac, values)


def _has_value(limit: Limit, trace: Trace) -> npt.NDArray[np.bool_]:
    """(n,): which requests are of the limit's class and have a value of its metric."""
    if limit.selector is not None:
        has_value = _has_value(replace(limit, selector=None), trace)
        return np.asarray(has_value & select_requests(limit.selector, trace))
    if limit.metric_row.is_of_tasks:
        tasks = tasks_of(trace)
        return np.zeros(len(trace), dtype=bool) if tasks is None else tasks.is_last
    return trace.output_tokens > 1 if limit.metric_row.is_of_decodes else np.ones(len(trace), dtype=bool)


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
        others = (repr(row.name) for row in BATCHING.values() if row.engine != STEPWISE)
        raise InputError(
            f"{trace.name}: requests wait for others (column after), which goes neither with a closed loop "
            f"nor with batching {' or '.join(others)}; drop one of the two"
        )
    if is_long(fleet, trace, limits) and not closed_loop and not record_parts:
        return _simulate_streamed(fleet, trace, limits, every_s, record=record, stop_early=stop_early)[0]
    # In a closed loop arrival times mean nothing, so all requests are measured.
    window_s = (0.0, np.inf) if closed_loop else measured_window(trace)
    record = record or record_parts
    # If there is too little room, the kernel counts on, and the run is repeated with as much as it needs.
    runs = room_for_runs(trace) if record else 0
    parts = runs if record_parts else 0
    while True:
        state = _state(
            fleet,
            trace,
            _fresh_requests(trace),
            limits=limits,
            window_s=window_s,
            runs=runs,
            parts=parts,
            closed_loop=closed_loop,
        )
        _run(state, fleet, closed_loop, stop_early)
        needed, needed_parts = (int(state.counters[which]) for which in (layout.RUNS, layout.PARTS))
        if not record or (needed <= runs and needed_parts <= parts):
            return results(state, fleet, trace, tuple(limits))
        runs, parts = max(runs, needed), max(parts, needed_parts)


def room_for_runs(trace: Trace) -> int:
    """How many recorded runs of steps there is room for at first."""
    return RUNS_PER_REQUEST * len(trace) + LEAST_RUNS


def is_long(fleet: Fleet, trace: Trace, limits: Sequence[Limit] = (), least: int | None = None) -> bool:
    """Whether requests are streamed through the kernel's memory (streaming_requests.py): on traces with more
    than `least` requests (default: LONG_REQUESTS), if no request depends on another's record or is of a
    class.
    """
    policies = fleet.policies
    return (
        not selectors_of(limits)
        and len(trace) > (streaming_requests.LONG_REQUESTS if least is None else least)
        and engine_of(fleet) == STEPWISE
        and not (trace.after.size or trace.has_prefixes or fleet.disturbances)
        and not (fleet.lora or policies.prefix_cache or policies.prediction_buckets or policies.due)
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
    """As `simulate`, but where requests can be streamed it raises streaming_requests.OutOfTime soon after
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
    per_request = streaming_requests.RUNS_PER_REQUEST

    def lay_out(first: int, records: npt.NDArray[np.void]) -> None:
        _make_fresh(records, trace, first)
        if predicted_tokens is not None:
            rows = slice(first, first + len(records))
            for name in ("predicted_tokens", "predicted_later_tokens"):
                records[name] = predicted_tokens[rows]
        for column in (trace.input_tokens, trace.output_tokens):
            release_memory(column)

    def read(records: npt.NDArray[np.void], rows: slice) -> dict[str, npt.NDArray[Any]]:
        return columns_of(records, trace.output_tokens[rows])

    while True:
        streamed = streaming_requests.StreamedRequests(
            trace.arrival_s, lay_out, read, streaming_requests.CHUNK_REQUESTS
        )
        runs = per_request * streaming_requests.CHUNK_REQUESTS if record else 0
        window_s = measured_window(trace)
        state = _state(fleet, trace, streamed.requests, limits=limits, window_s=window_s, runs=runs)
        if every_s is not None:
            state = _count_in_windows(state, limits, trace, every_s)
        state = state._replace(disturbances=streamed.disturbances())
        _stop_at_backlog(state, trace, patience_s)
        state.counters[layout.PREFILLED] = is_prefilled
        try:
            streamed.run(
                state, lambda paused: kernel.simulate_events(for_kernel(paused), 0, stop_early), deadline
            )
        except streaming_requests.MoreRuns:
            per_request *= 4  # There was too little room for recorded runs, so the simulation begins anew.
            continue
        _check_done(state)
        sampled_runs = np.concatenate([state.runs[:0], *streamed.sampled])
        state.counters[layout.RUNS] = len(sampled_runs)
        columns = streamed.columns(state)
        for column in (trace.arrival_s, trace.input_tokens, trace.output_tokens):
            release_memory(column)
        state = state._replace(runs=sampled_runs, requests=streamed.requests[:0])
        simulation = results(state, fleet, trace, tuple(limits), columns)
        # The parts of the run whose steps were recorded, (first, last moment) each.
        sampled_s = np.array(streamed.sampled_s).reshape(-1, 2)
        return replace(simulation, gaps=streamed.gaps, sampled_s=sampled_s), state


def elastic_state(
    fleet: Fleet,
    trace: Trace,
    sizes: Sequence[int],
    *,
    limits: Sequence[Limit] = (),
    every_s: float | None = None,
    runs: int = 0,
) -> State:
    """The kernel's arrays at time zero, if `sizes` (P,) workers of each pool are up and the others off, with
    room to record `runs` runs of steps. With `every_s` limits are counted in windows of that length too.
    Raises InputError for what cannot be simulated.
    """
    check_traffic(fleet, trace)
    requests, window_s = _fresh_requests(trace), measured_window(trace)
    state = _state(fleet, trace, requests, limits=limits, window_s=window_s, runs=runs, sizes=sizes)
    return state if every_s is None else _count_in_windows(state, limits, trace, every_s)


def check_traffic(fleet: Fleet, trace: Trace) -> None:
    """Raise InputError for unknown policies, and for a trace that these workers cannot serve."""
    check(fleet)
    check_images(fleet.llm, trace)
    check_adapters(fleet.lora, trace, prefix_cache=fleet.policies.prefix_cache)
    if fleet.policies.prefix_cache and not trace.has_prefixes:
        raise InputError(
            f"{trace.name} has no block ids, which policies.prefix_cache needs; drop it, or give a trace "
            "with prefixes"
        )


def check_images(llm: Llm, trace: Trace) -> None:
    """Raise InputError for tokens of images if the LLM has no encoder that makes them."""
    if trace.image_tokens is None or llm.encoder_parameters or not trace.image_tokens.any():
        return
    count = int((trace.image_tokens > 0).sum())
    raise InputError(
        f"{trace.name}: image_tokens: {counted(count, 'request')} with tokens of images, and {llm.name} has "
        "no encoder that makes them; choose an LLM with one, or add these tokens to input_tokens and drop "
        "the column"
    )


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
        _make_fresh(requests[:touched], self._trace)
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

    A simulation that is returned may still miss a window or the backlog test: `slo_verdict.judge` decides. A
    limit that is broken over the whole trace is broken in some window too, so it ends the run with `every_s`
    as well. `requests` are the records of `trace`, used for many fleets. If `is_prefilled`, every prompt
    arrives computed, on the first of the fleet's workers.
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
        lambda state: results(state, fleet, trace, tuple(limits)),
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
    """What `read` makes of the kernel's arrays after the run of `simulate_if_kept`, or None as there; for a
    trace that is not long (`is_long`). `read` must not keep the arrays: the next simulation uses them.
    """
    state = _state(fleet, trace, requests.take(), limits=limits, window_s=measured_window(trace))
    if every_s is not None:
        state = _count_in_windows(state, limits, trace, every_s)
    _stop_at_backlog(state, trace, patience_s)
    state.counters[layout.PREFILLED] = is_prefilled
    _run(state, fleet, 0, True)
    n = len(trace)
    result = read(state) if _holds_over_the_whole(state, n, limits) else None
    # If requests enter by arrival and no predictions were written, only those that have entered were changed.
    by_arrival = engine_of(fleet) == STEPWISE and not trace.after.size
    has_no_predictions = (
        fleet.policies.prediction_accuracy_frac is None and not fleet.policies.prediction_buckets
    )
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
    """Have the kernel stop once the backlog test (`slo_verdict.judge`) cannot be passed any more.

    It is passed if at least half of the requests of the last tenth wait at most `patience_s`, for the first
    token and in every gap. A request of more than one token that does not decode two patiences after the last
    arrival has waited longer than one of them, before its first token or after it.
    """
    if trace.after.size:  # The last arrival depends on the fleet, so the kernel cannot stop before the end.
        return
    first = int(np.searchsorted(trace.arrival_s, last_tenth_s(*state.window.tolist())))
    requests_with_gaps = int((trace.output_tokens[first:] > 1).sum())
    state.policy[layout.LAST_S] = trace.arrival_s[first]
    latest_s = float(trace.arrival_s[-1]) + 2 * patience_s
    state.policy[layout.LATEST_S] = latest_s * (1 + 1e-9)  # Rounding must not fail a fleet that just passes.
    # Half of the last tenth may fail (STEADY_FRAC), so all but so many of those with gaps must decode by
    # then.
    state.counters[layout.IN_DOUBT] = requests_with_gaps - (len(trace) - first) // 2


def engine_of(fleet: Fleet) -> str:
    """The engine of the simulator that runs this fleet: STEPWISE, OF_SPLITWISE or OF_DISTSERVE."""
    return BATCHING[fleet.policies.batching].engine


def _run(state: State, fleet: Fleet, closed_loop: int, stop_early: bool) -> None:
    """Run the fleet's engine to its end."""
    engine, policies = engine_of(fleet), fleet.policies
    if engine == OF_SPLITWISE:
        splitwise.simulate(
            state,
            adds=ROUTING[policies.routing].counts_added,
            moves=POOLS[policies.pools].code == MIXED_POOL,
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

    Two cases are no mistake: if workers go down, requests may wait for ever; and a step whose time is NaN
    never ends, for which `results` raises InputError.
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


def _fresh_requests(trace: Trace) -> npt.NDArray[np.void]:
    """The kernel's requests (n,) before anything has happened to them."""
    requests = np.empty(len(trace), dtype=layout.REQUEST)
    _make_fresh(requests, trace)
    return requests


def _make_fresh(requests: npt.NDArray[np.void], trace: Trace, first: int = 0) -> None:
    """Write `requests` (m,) as records of the trace's requests from `first` on before they arrive."""
    fresh = _FRESH.view(np.int64)
    for offset in range(0, len(requests), FRESH_REQUESTS):
        block = requests[offset : offset + FRESH_REQUESTS]
        rows = slice(first + offset, first + offset + len(block))
        block.view(np.int64).reshape(len(block), len(fresh))[:] = fresh  # Quicker than field by field.
        block["arrival_s"] = trace.arrival_s[rows]
        block["input_tokens"] = block["length_tokens"] = trace.input_tokens[rows]
        output_tokens = trace.output_tokens[rows]
        for name in ("output_tokens", "predicted_tokens", "predicted_later_tokens"):
            block[name] = output_tokens


def _common_fields() -> npt.NDArray[np.void]:
    """A record (1,), layout.REQUEST, with fields that are the same for all requests before they arrive."""
    fresh = np.zeros(1, dtype=layout.REQUEST)
    fresh["scheduled_s"] = -1.0
    fresh["first_token_s"] = fresh["finish_s"] = np.nan
    fresh["prefill_worker"] = fresh["decode_worker"] = fresh["next"] = layout.NONE
    fresh["status"] = layout.UNFINISHED
    return fresh


_FRESH = _common_fields()


def fresh_state(fleet: Fleet, trace: Trace) -> State:
    """The kernel's arrays before anything has happened. Raises InputError for unknown policies."""
    check(fleet)
    return _state(fleet, trace, _fresh_requests(trace), window_s=measured_window(trace))


def _state(
    fleet: Fleet,
    trace: Trace,
    requests: npt.NDArray[np.void],
    *,
    window_s: tuple[float, float],
    limits: Sequence[Limit] = (),
    runs: int = 0,
    parts: int = 0,
    closed_loop: int = 0,
    sizes: Sequence[int] | None = None,
) -> State:
    """The engines' arrays at time zero, with `requests` (n,) as the records of the trace and room to record
    so many runs of steps and parts of steps. `sizes` (P,) workers of each running pool are up; None: all.
    """
    pools = fleet.running_pools
    policies, n = fleet.policies, len(requests)
    if closed_loop:
        requests["arrival_s"] = 0.0
    if policies.prediction_accuracy_frac is not None:
        _predict(requests, policies.prediction_accuracy_frac, policies.seed)
    outputs = None
    if policies.prediction_buckets:
        outputs = output_table(trace.input_tokens, trace.output_tokens, policies.prediction_buckets)
        expected = outputs.expected_tokens(requests["input_tokens"], np.zeros(n)).astype(np.int64)
        requests["predicted_tokens"] = requests["predicted_later_tokens"] = expected

    types, tables, tie_keys = _types(pools, fleet, trace)
    kinds = np.repeat(np.arange(len(pools)), [pool.count * pool.type.dp for pool in pools])
    dp_ranks = _dp_ranks(pools)
    workers, lanes = _workers(pools, types, kinds)
    if sizes is not None:
        workers["is_up"] = _index_in_pool(pools) < np.asarray(sizes)[kinds]
    count, order = len(workers), _routing_order(pools, tie_keys, kinds)
    # Entities have events: first each lane, then what the simulator's engine has of its own (one entity in a
    # stepwise engine, else one for each request), last the disturbances of the outside world.
    entities = len(lanes) + (2 if engine_of(fleet) == STEPWISE else n + 1)
    worker_types = [pool.type for pool in pools]
    offload = make_offload(fleet, trace, kinds, worker_types) if trace.has_prefixes else None
    state = State(
        types=types,
        tables=tables,
        workers=workers,
        lanes=lanes,
        slots=np.zeros((len(lanes), types["seats"].max()), dtype=layout.SLOT),
        gaps=np.zeros((len(lanes), layout.GAP_DEPTH), dtype=layout.GAP),
        chunks=np.zeros((len(lanes), types["seats"].max()), dtype=layout.CHUNK),
        requests=requests,
        pools=np.zeros((2, count), dtype=np.int64),
        order=order,
        score=np.zeros(count),
        lowest=np.full((2, -(-count // layout.GROUP)), -np.inf),
        link=worker_places.make_links(fleet),
        disturbances=_disturbances(fleet, np.arange(count) if dp_ranks is None else dp_ranks["first"]),
        limits=_counted_limits(limits, trace, window_s),
        policy=_policy_numbers(fleet),
        window=np.array(window_s),
        runs=np.zeros(runs, dtype=layout.RUN),
        parts=np.zeros(parts, dtype=layout.PART),
        due_s=np.full(entities, np.inf),
        sequence=_sequence(workers, lanes, order, entities),
        heap=np.zeros(entities, dtype=np.int64),
        heap_index=np.full(entities, layout.NONE),
        counters=_counters(policies, min(closed_loop, n) if closed_loop else n),
        paused=np.array([layout.NONE, -np.inf]),
        after=_after(trace),
        children=np.ascontiguousarray(trace.after[:, 0]),
        caches=_caches(fleet, trace, kinds, worker_types, offload),
        dp_ranks=dp_ranks,
        adapters=make_adapters(fleet, trace, kinds, worker_types),
        outputs=outputs,
        offload=offload,
        classes=_request_classes(limits, policies, trace, engine_of(fleet)),
    )
    state = _with_first_hand_offs(worker_places.with_link_numbers(state, fleet))
    _list_pools(state)
    pin_prefixes(state, fleet, trace)
    if len(state.disturbances):
        _await_disturbance(state, outside=entities - 1)
    return state


def _index_in_pool(pools: Sequence[Pool]) -> npt.NDArray[np.int64]:
    """For each of the kernel's workers (W,), a data-parallel rank, the index of its worker in the pool."""
    return np.concatenate([np.arange(pool.count * pool.type.dp) // pool.type.dp for pool in pools])


def _with_first_hand_offs(state: State) -> State:
    """The state with `met_s` (W, W), the time at which two workers are connected, where the first hand-off
    between two workers takes extra time. Infinite means not yet.
    """
    if not (state.types["first_hand_off_s"] > 0).any() or not (state.workers["role"] == layout.DECODE).any():
        return state
    return state._replace(met_s=np.full((len(state.workers), len(state.workers)), np.inf))


def _request_classes(
    limits: Sequence[Limit], policies: Policies, trace: Trace, engine: str
) -> npt.NDArray[np.void] | None:
    """The classes of the requests (n,), layout.REQUEST_CLASS; None if no limit and no queue has any."""
    selectors, by_deadline = selectors_of(limits), QUEUE[policies.queue].by_deadline
    if not selectors and not by_deadline:
        return None
    if engine != STEPWISE:
        raise InputError(
            f"slo: classes: are not simulated with batching {policies.batching!r}; take vllm-v1, or "
            "drop classes"
        )
    rows = np.zeros(len(trace), dtype=layout.REQUEST_CLASS)
    rows["of_class"] = class_numbers(selectors, trace)
    if by_deadline and policies.due:
        due_s = np.array([due_s for _, due_s in policies.due])
        of_due = class_numbers([selector for selector, _ in policies.due], trace)
        # Requests of no class are due last.
        rows["due_s"] = np.where(of_due >= 0, due_s[of_due], due_s.max())
    return rows


def _await_disturbance(state: State, *, outside: int) -> None:
    """Put the entity `outside`, which causes disturbances, into the heap of events, due at the first one."""
    state.sequence[outside] = np.iinfo(np.int64).max  # It comes after all other events of its moment.
    state.due_s[outside] = state.disturbances[0]["time_s"]
    state.heap[0], state.heap_index[outside], state.counters[layout.PENDING] = outside, 0, 1


def _routing_order(pools: Sequence[Pool], tie_keys: Sequence[TieKey], kinds: Ints) -> npt.NDArray[np.int64]:
    """The kernel's workers (W,), of pools `kinds` (W,), in the order in which routers take those of equal
    score: by the `tie_keys` (P,) of their types. Only workers of one type keep their order in the fleet, so
    neither names nor the order of pools matter.
    """
    decodes = [pool.role == "decode" for pool in pools]
    # Of the two times in a key, the one of the pool's own phase counts.
    keys = [(is_back, key[0][is_back], *key[1:]) for is_back, key in zip(decodes, tie_keys, strict=True)]
    position = np.empty(len(pools), np.int64)
    position[sorted(range(len(pools)), key=keys.__getitem__)] = np.arange(len(pools))
    return np.argsort(position[kinds], kind="stable")


def _tie_key(worker_type: WorkerType, row: npt.NDArray[np.void], tables: Sequence[Floats]) -> TieKey:
    """The key by which types of equal score are sorted: first by the seconds that a request adds in routing
    jsq, as a prefill and as a decode worker; then by KV blocks and seats, the most first; then by all other
    numbers of the type, so that no two types are equal.
    """
    added_s = tuple(TIES_BY.weights(worker_type, decodes) for decodes in (False, True))
    room = -int(row["kv_blocks"][0]), -int(row["seats"][0])
    return added_s, room, row.tobytes(), tuple(float(table.sum()) for table in tables)


def _sequence(
    workers: npt.NDArray[np.void], lanes: npt.NDArray[np.void], order: npt.NDArray[np.int64], entities: int
) -> npt.NDArray[np.int64]:
    """The order (entities,) of events of one moment: lanes in the `order` (W,) of their workers, then the
    other entities.
    """
    sequence = np.arange(entities)
    position = np.empty(len(workers), np.int64)
    position[order] = np.arange(len(workers))
    sequence[np.argsort(position[lanes["worker"]], kind="stable")] = np.arange(len(lanes))
    return sequence


def _list_pools(state: State) -> None:
    """List the workers that are up: those that take arrivals (FRONT) and those that take hand-offs (BACK). Of
    a worker with data-parallel ranks only the first is listed. `routing.set_pools` does the same in the run.
    """
    workers, dp_ranks = state.workers, state.dp_ranks
    for pool, is_decode in ((layout.FRONT, False), (layout.BACK, True)):
        is_member = (workers["role"] == layout.DECODE) == is_decode
        if dp_ranks is not None:
            is_member &= dp_ranks["first"] == np.arange(len(workers))
        members = state.order[(is_member & (workers["is_up"] == 1))[state.order]]
        state.pools[pool, : len(members)] = members
        workers["pool_index"][members] = np.arange(len(members))
        state.counters[layout.SIZE + pool] = len(members)


def _types(
    pools: Sequence[Pool], fleet: Fleet, trace: Trace
) -> tuple[npt.NDArray[np.void], Floats, list[TieKey]]:
    """A layout.TYPE for each pool, all tables of step times as one array, and each type's `TieKey`."""
    types = np.empty(len(pools), dtype=layout.TYPE)
    tables: list[Floats] = []
    tie_keys: list[TieKey] = []
    policies, longest_tokens, offset = fleet.policies, int(trace.input_tokens.max()), 0
    for i, pool in enumerate(pools):
        worker_type = pool.type
        most_tokens = _most_tokens(worker_type, policies.batching, trace)
        # A step may hold a whole prompt budget and a token of each decode.
        most_tokens += worker_type.max_num_seqs * worker_type.step_tokens
        is_small = most_tokens <= REMEMBERED_TOKENS and isinstance(worker_type.form, Hashable)
        make = _remembered_type if is_small else _type
        types[i : i + 1], type_tables, tie_key = make(
            worker_type, policies, fleet.llm.name, longest_tokens, most_tokens
        )
        for j, table in enumerate(type_tables):
            types[i]["table_at"][j] = offset
            offset += len(table)
            tables.append(table)
        tie_keys.append(tie_key)
    return types, np.concatenate(tables), tie_keys


def _type(
    worker_type: WorkerType, policies: Policies, llm: str, longest_tokens: int, most_tokens: int
) -> tuple[npt.NDArray[np.void], tuple[Floats, ...], TieKey]:
    """A layout.TYPE (1,) without the offsets of its tables, the tables of its step times, and its key."""
    row = np.zeros(1, dtype=layout.TYPE)
    _fill_type(row, worker_type, policies, llm, longest_tokens)
    form = worker_type.step_times.compile_for_kernel(most_tokens, worker_type.max_num_seqs)
    row["form"] = form.code
    row["numbers"][0, : len(form.numbers)] = form.numbers
    row["table_width"][0, : len(form.widths)] = form.widths
    return row, form.tables, _tie_key(worker_type, row, form.tables)


_remembered_type = lru_cache(maxsize=REMEMBERED_TYPES)(_type)


def _caches(
    fleet: Fleet, trace: Trace, kinds: Ints, worker_types: list[WorkerType], offload: Offload | None
) -> cache_layout.Caches | None:
    """The state of prefix caches; None without them."""
    if not fleet.policies.prefix_cache or not trace.has_prefixes:
        return None
    memory_nodes = 0 if offload is None else int(offload.memories["nodes"].sum())
    row = ROUTING[fleet.policies.routing]
    return cache_layout.make_caches(
        fleet,
        trace,
        kinds,
        worker_types,
        has_window=row.has_window,
        is_pinned=row.pins,
        memory_nodes=memory_nodes,
    )


def _workers(
    pools: Sequence[Pool], types: npt.NDArray[np.void], kinds: Ints
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """The workers, `kinds` (W,) of `types`, and their lanes."""
    lane_count = types["lanes"][kinds]
    workers = np.zeros(len(kinds), dtype=layout.WORKER)
    workers["type"] = kinds
    workers["role"] = [ROLES[pools[kind].role] for kind in kinds]
    workers["is_up"], workers["slow_factor"], workers["formed_s"] = 1, 1.0, np.inf
    workers["least_saved_s"] = np.inf
    workers["first_lane"] = np.cumsum(lane_count) - lane_count
    workers["head"] = workers["tail"] = workers["first_waiting"] = layout.NONE
    lanes = np.zeros(int(lane_count.sum()), dtype=layout.LANE)
    lanes["worker"] = np.repeat(np.arange(len(kinds)), lane_count)
    lanes["width"] = np.repeat([pools[kind].type.step_tokens for kind in kinds], lane_count)
    return workers, lanes


def _dp_ranks(pools: Sequence[Pool]) -> npt.NDArray[np.void] | None:
    """For each of the kernel's workers (W,), which are data-parallel ranks, the first rank of its worker and
    how many there are; None if all workers have one rank.
    """
    if all(pool.type.dp == 1 for pool in pools):
        return None
    counts = np.repeat([pool.type.dp for pool in pools], [pool.count for pool in pools])
    ranks = np.zeros(int(counts.sum()), dtype=layout.DP_RANK)
    ranks["first"] = np.repeat(np.cumsum(counts) - counts, counts)
    ranks["count"] = np.repeat(counts, counts)
    return ranks


def _disturbances(fleet: Fleet, first_ranks: Ints) -> npt.NDArray[np.void]:
    """The disturbances in order of time; one of a worker names its first rank.

    `first_ranks` (W,) has the first rank of each of the kernel's workers.
    """
    firsts = np.unique(first_ranks) if fleet.disturbances else first_ranks
    workers = len(firsts)
    rows = np.zeros(len(fleet.disturbances), dtype=layout.DISTURBANCE)
    for k, event in enumerate(sorted(fleet.disturbances, key=lambda event: event.time_s)):
        if not 0 <= event.worker < workers:
            raise InputError(f"disturbance: there is no worker {event.worker}, the fleet has {workers}")
        rows[k] = (event.time_s, EVENTS[event.kind], firsts[event.worker], event.factor)
    return rows


def judged_windows_s(trace: Trace, every_s: float) -> Floats:
    """Edges (V + 1,) of the windows of this length in which an SLO is judged (`slo_windows_s`)."""
    return slo_windows_s(trace.arrival_s, (measured_window(trace)[0], float(trace.arrival_s[-1])), every_s)


def _count_in_windows(state: State, limits: Sequence[Limit], trace: Trace, every_s: float) -> State:
    """The same arrays, with the limits counted in each window of that length too."""
    edges_s = judged_windows_s(trace, every_s)
    return state._replace(edges_s=edges_s, in_windows=_limits_in_windows(limits, trace, state, edges_s))


def _limits_in_windows(
    limits: Sequence[Limit], trace: Trace, state: State, edges_s: Floats
) -> npt.NDArray[np.void]:
    """The limits (L, V) as counted in each window, with an upper bound of the violations that are allowed
    there.

    A window has at most the gaps of the requests that arrive before its end. Requests of sessions may arrive
    in any window, so each window is allowed as many as the whole.
    """
    rows = np.zeros((len(limits), len(edges_s) - 1), dtype=layout.LIMIT)
    if not limits:
        return rows
    rows[:] = state.limits[:, None]
    if trace.after.size:
        return rows
    inside = trace.arrival_s >= edges_s[0]
    window_of = window_numbers(trace.arrival_s, edges_s)
    for row, limit in zip(rows, limits, strict=True):
        if limit.metric_row.is_of_gaps:
            gaps = trace.output_tokens - 1
            if limit.selector is not None:
                gaps = gaps * select_requests(limit.selector, trace)
            values = np.cumsum(np.bincount(window_of, gaps, len(row)))
        else:
            is_counted = inside & _has_value(limit, trace)
            values = np.bincount(window_of[is_counted], minlength=len(row))
        allowed = [allowed_above(limit.percentile_frac, int(count)) for count in values]
        row["allowed"] = np.minimum(row["allowed"], allowed)
    return rows


def _counted_limits(
    limits: Sequence[Limit], trace: Trace, window_s: tuple[float, float]
) -> npt.NDArray[np.void]:
    """The limits (L,) as the kernel counts them over the whole, before the first event."""
    limits_of_trace = _limits_of_traces.setdefault(trace, {})
    key = tuple(limits), window_s
    if key not in limits_of_trace:
        limits_of_trace[key] = _limits_as_counted(limits, trace, window_s)
    return limits_of_trace[key].copy()  # The kernel counts in it.


# The counted limits by trace, as long as the trace is in memory: most traces are simulated on many fleets.
_limits_of_traces: weakref.WeakKeyDictionary[Trace, dict[Hashable, npt.NDArray[np.void]]] = (
    weakref.WeakKeyDictionary()
)


def _limits_as_counted(
    limits: Sequence[Limit], trace: Trace, window_s: tuple[float, float]
) -> npt.NDArray[np.void]:
    """The limits of `_counted_limits`, computed anew."""
    rows, selectors = np.zeros(len(limits), dtype=layout.LIMIT), selectors_of(limits)
    for k, limit in enumerate(limits):
        row = rows[k : k + 1]
        row["of_class"] = layout.NONE if limit.selector is None else selectors.index(limit.selector)
        row["metric"] = COUNTED_WHILE_RUNNING.get(limit.metric, layout.NONE)
        row["limit_s"], row["seen_s"] = limit.limit_s, -np.inf
        row["allowed"] = allowed_violations(limit, trace, window_s)
        # At percentile 0 no request has to keep the limit, so the first that may be late is past the last.
        row["seen"] = len(trace) if limit.percentile_frac == 0 else 0
    return rows


def _counters(policies: Policies, released: int) -> Ints:
    """The kernel's counters at time zero; `released` requests may arrive before others are done."""
    counters = np.zeros(layout.COUNTERS, dtype=np.int64)
    counters[layout.RELEASED] = released
    counters[[layout.LIMBO, layout.LOST, layout.FREED, layout.HELD, layout.READING]] = layout.NONE
    # Twice the seed plus an odd constant (digits of the golden ratio) is never 0, a state that the kernel's
    # generator (routing.py) would not leave.
    counters[layout.RANDOM_STATE] = 2 * policies.seed + 0x9E3779B97F4A7C1
    counters[layout.ROUTING + layout.FRONT] = ROUTING[policies.routing].code
    counters[layout.ROUTING + layout.BACK] = ROUTING[policies.decode_routing].code
    return counters


def _policy_numbers(fleet: Fleet) -> Floats:
    """The parameters of policies that the kernel reads, and the times that it notes in the same array."""
    numbers, policies = np.zeros(layout.POLICY), fleet.policies
    numbers[layout.GAMMA], numbers[layout.THETA] = policies.context_weight, policies.headroom_frac
    numbers[layout.TTFT_S], numbers[layout.TBT_S] = policies.ttft_s, policies.tbt_s
    numbers[layout.FLIP_S] = policies.flip_after_s if POOLS[policies.pools].code == FLIP else np.inf
    numbers[layout.RESTART_S] = policies.flip_restart_s
    numbers[layout.REPURPOSE_S] = policies.repurpose_after_s
    # From SHORT_SINCE_S on the array has times, infinite until the kernel sets them; parameters among them
    # follow here.
    numbers[layout.SHORT_SINCE_S :] = np.inf
    numbers[layout.FRONT_END_S] = fleet.front_end_s
    numbers[layout.HEAVY_TOKENS] = policies.heavy_tokens
    numbers[layout.LOAD_PERIOD_S] = policies.load_period_s
    numbers[layout.HEARD_S] = -np.inf
    numbers[layout.PREDICTOR] = 1.0 + policies.predictor_slowdown_frac
    numbers[layout.HEARTBEAT_S] = policies.heartbeat_s
    numbers[[layout.LAST_S, layout.LATEST_S]] = np.inf
    return numbers


def _after(trace: Trace) -> npt.NDArray[np.void]:
    """How many requests each one waits for, how long it thinks, and where its children begin in
    `State.children`; empty without sessions.
    """
    if not trace.after.size:
        return np.zeros(0, dtype=layout.AFTER)
    n = len(trace)
    after = np.zeros(n + 1, dtype=layout.AFTER)
    after["parents"][:n] = np.bincount(trace.after[:, 0], minlength=n)
    after["think_s"][:n] = trace.think_s
    after["child"] = np.searchsorted(trace.after[:, 1], np.arange(n + 1))
    return after


def _most_tokens(worker_type: WorkerType, batching: str, trace: Trace) -> int:
    """Prefill tokens of the largest step, for the length of step-time tables.

    Without chunks a prompt is computed as a whole, and after a preemption with its output so far;
    FasterTransformer computes a whole group of prompts in one step. The result is at least the token budget,
    because best-fit routing looks up the step time of a full budget.
    """
    if BATCHING[batching].is_chunked:
        return worker_type.max_num_batched_tokens
    largest = int((trace.input_tokens + trace.output_tokens).max())
    if BATCHING[batching].code == FASTER_TRANSFORMER:
        total = int((trace.input_tokens + trace.output_tokens).sum())
        largest = min(largest * worker_type.max_num_seqs, total)
    return max(worker_type.max_num_batched_tokens, largest)


def _fill_type(
    row: npt.NDArray[np.void], worker_type: WorkerType, policies: Policies, llm: str, longest_tokens: int
) -> None:
    """Fill a layout.TYPE (1,), without the step times."""
    batching = BATCHING[policies.batching]
    blocks = worker_type.kv_tokens // KV_BLOCK_TOKENS
    reserves = batching.is_reserving and policies.reserve_tokens > 0
    reserved = -(-policies.reserve_tokens // KV_BLOCK_TOKENS) if reserves else 0
    if batching.engine == OF_SPLITWISE:
        reserved = 1  # Only a mark that KV is reserved: this engine counts how much itself.
    watermark = int(policies.watermark_frac * blocks) if batching.is_watermarked else 0
    if batching.engine != STEPWISE and worker_type.kv_beside.is_any:
        raise InputError(
            f"batching {policies.batching}: counts KV by tokens alone, and {llm} has layers with "
            "windows or states; choose vllm-v1"
        )
    # A request may have so many blocks; if all requests reserve more than there are, none fits.
    longest_blocks = blocks - watermark
    if reserves:
        longest_blocks = reserved if reserved <= blocks else 0
    for name, value in (
        ("batching", batching.code),
        ("queue_order", QUEUE[policies.queue].code),
        ("queue_window_s", policies.queue_window_s),
        ("queue_longest_tokens", float(longest_tokens)),
        ("queue_batch", policies.queue_batch),
        ("admission", ADMISSION[policies.admission].code),
        ("token_budget", worker_type.max_num_batched_tokens),
        ("long_prefill_tokens", policies.long_prefill_token_threshold),
        ("seats", worker_type.max_num_seqs),
        ("kv_blocks", blocks),
        ("kv_capacity_tokens", worker_type.kv_tokens),
        ("longest_blocks", longest_blocks),
        ("constant_blocks", worker_type.kv_beside.constant_blocks),
        ("window_ratio", worker_type.kv_beside.window_ratio),
        ("window_blocks", worker_type.kv_beside.window_blocks),
        ("recycled_blocks", worker_type.recycled_blocks_per_token),
        ("watermark_blocks", watermark),
        ("decode_batch_tokens", policies.decode_batch_tokens or worker_type.kv_tokens),
        ("reserved_blocks", reserved),
        ("patience_steps", policies.patience_steps),
        ("vidur_restarts", int(policies.vidur_restarts)),
        ("pp", worker_type.pp),
        ("lanes", worker_type.pp),
    ):
        row[name] = value
    if (engine := worker_type.engine) is not None:
        row["overlaps"], row["token_s"] = engine.async_scheduling, 1 / engine.tokens_per_s
        row["prompt_token_s"], row["hand_off_s"] = engine.prompt_token_s, engine.hand_off_s
        row["first_hand_off_s"] = engine.first_hand_off_s
        row["discards_token"] = engine.first_token == "decode"
        if worker_type.pp == 1:  # A pipeline always has several steps in flight, so neither applies to it.
            row["is_async"] = engine.async_scheduling
            row["kv_delay_steps"] = KV_DELAY_STEPS[engine.async_scheduling]
        row["host_s"][0], row["rest_s"][0] = (part.per_step_s(worker_type.tp) for part in worker_type.host)
    if (speculation := worker_type.speculation) is not None:
        row["accepted"][0, : speculation.tokens] = speculation.accepted_fracs
        row["lookahead_tokens"] = speculation.lookahead_tokens
        row["draw_seed"] = policies.seed
    row["routing_weight"][0, layout.FRONT] = ROUTING[policies.routing].weights(worker_type, False)
    row["routing_weight"][0, layout.BACK] = ROUTING[policies.decode_routing].weights(worker_type, True)


def _predict(requests: npt.NDArray[np.void], accuracy_frac: float, seed: int) -> None:
    """Fill in the output lengths that schedulers predict.

    The first prediction is the lower end of a bucket of lengths, the right bucket for the share
    `accuracy_frac` of requests (TetriInfer). The later prediction, for a request that has become longer than
    the first, is the mean of all outputs longer than the first (Aladdin).
    """
    outputs = requests["output_tokens"]
    buckets = synthetic_buckets(outputs, accuracy_frac, np.random.default_rng(seed))
    requests["predicted_tokens"] = bucket_range(buckets)[0]
    ordered = np.sort(outputs)
    above = np.searchsorted(ordered, requests["predicted_tokens"], side="right")
    longer = len(ordered) - above
    sums = np.concatenate((np.cumsum(ordered[::-1])[::-1], [0]))  # sums[i] is the sum of ordered[i:].
    requests["predicted_later_tokens"] = np.where(longer > 0, sums[above] // np.maximum(longer, 1), outputs)


def columns_of(requests: npt.NDArray[np.void], output_tokens: Ints) -> dict[str, npt.NDArray[Any]]:
    """The results in the records of these requests, columns (n,) by name; `last_finish_s` (1,) is the end of
    the last request, NaN if none finished.
    """
    arrival_s, scheduled_s, first_token_s, finish_s, gap_max_s = (
        requests[name].copy()  # Each column is read once, as the records are far apart in memory.
        for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s", "gap_max_s")
    )
    status = requests["status"].copy()
    finished = status == layout.FINISHED
    with_gaps = finished & (output_tokens > 1)
    return {
        "arrival_s": arrival_s,
        "queue_s": np.where(scheduled_s >= 0, scheduled_s - arrival_s, np.nan),
        "ttft_s": first_token_s - arrival_s,
        "tpot_s": np.where(with_gaps, (finish_s - first_token_s) / np.maximum(output_tokens - 1, 1), np.nan),
        "tbt_max_s": np.where(with_gaps, gap_max_s, np.nan),
        "e2e_s": finish_s - arrival_s,
        "front": requests["prefill_worker"].copy(),
        "back": requests["decode_worker"].copy(),
        "preemptions": requests["preemptions"].copy(),
        "status": status,
        "last_finish_s": np.array([np.nanmax(finish_s) if finished.any() else np.nan]),
    }


def results(
    state: State,
    fleet: Fleet,
    trace: Trace,
    limits: tuple[Limit, ...],
    columns: dict[str, npt.NDArray[Any]] | None = None,
) -> Simulation:
    """The results of a run in the kernel's arrays.

    `columns` are those of the requests (`columns_of`), if they were read already. Raises InputError where a
    step was larger than the tables of step times.
    """
    # The time of such a step is NaN, so its lane runs and is never due.
    is_due = state.due_s[: len(state.lanes)] < np.inf
    if state.dp_ranks is not None:  # Only the first rank of a worker has events.
        is_due |= state.dp_ranks["first"][state.lanes["worker"]] != state.lanes["worker"]
    if ((state.lanes["run_steps"] > 0) & ~is_due).any():
        raise InputError("a step is larger than the tables of its step times; give larger tables")
    workers, runs, output = state.workers, state.runs[: state.counters[layout.RUNS]], trace.output_tokens
    if columns is None:
        columns = columns_of(state.requests, output)
    arrival_s, status, front, back = (columns[name] for name in ("arrival_s", "status", "front", "back"))
    if state.dp_ranks is not None:
        workers, worker_of = _merge_ranks(state)
        front, back, runs = worker_of[front], worker_of[back], runs.copy()
        runs["worker"] = worker_of[runs["worker"]]
    finish_s = float(columns["last_finish_s"][0])
    end_s = float(arrival_s[-1] if np.isnan(finish_s) else finish_s)
    selectors = selectors_of(limits)
    return Simulation(
        arrival_s=arrival_s,
        input_tokens=trace.input_tokens,
        output_tokens=output,
        queue_s=columns["queue_s"],
        ttft_s=columns["ttft_s"],
        tpot_s=columns["tpot_s"],
        tbt_max_s=columns["tbt_max_s"],
        e2e_s=columns["e2e_s"],
        prefill_worker=front,
        decode_worker=np.where(back >= 0, back, front),
        preemptions=columns["preemptions"],
        status=status,
        worker_names=fleet.worker_names,
        worker_busy_s=workers["busy_s"],
        worker_steps=workers["steps"],
        worker_tokens=workers["dense_tokens"],
        window_s=(float(state.window[0]), end_s if np.isinf(state.window[1]) else float(state.window[1])),
        end_s=end_s,
        limits=limits,
        violations=state.limits["violations"],
        counted=state.limits["counted"],
        complete=bool(state.counters[layout.DONE] == len(status)),
        runs=runs,
        parts=state.parts[: state.counters[layout.PARTS]],
        cached_tokens=None if state.caches is None else np.maximum(state.caches.prompts["hit_tokens"], 0),
        reloaded_tokens=None
        if state.offload is None
        else np.maximum(state.offload.loads["loaded_tokens"], 0),
        disk_tokens=None if state.offload is None else state.offload.loads["disk_tokens"],
        reload_s=np.zeros(0) if state.offload is None else state.offload.loads["waited_s"],
        tenant=trace.tenant,
        tenants=trace.tenants,
        tenant_weights=cache_layout.tenant_weights(fleet.policies, trace),
        nominal_end_s=float(trace.arrival_s[-1]) if trace.after.size else np.inf,
        token_weights=(fleet.policies.extend_weight, fleet.policies.output_weight),
        image_tokens=trace.image_tokens,
        nominal_s=trace.arrival_s if trace.after.size else arrival_s,
        edges_s=state.edges_s,
        counted_in=state.in_windows["counted"],
        violations_in=state.in_windows["violations"],
        tasks=tasks_of(trace),
        of_class=class_numbers(selectors, trace) if selectors else layout.nothing("i8"),
    )


def _merge_ranks(state: State) -> tuple[npt.NDArray[np.void], Ints]:
    """The records of the fleet's workers, and for each of the kernel's workers (a rank) its worker.

    All ranks of a worker are busy in the same steps, so a worker has the record of its first rank, with the
    tokens of all ranks. The second array has one entry more, NONE at its end: the index NONE (-1) of a
    request without a worker then gives NONE.
    """
    assert state.dp_ranks is not None
    firsts, worker_of = np.unique(state.dp_ranks["first"], return_inverse=True)
    workers = state.workers[firsts]
    workers["dense_tokens"] = np.add.reduceat(state.workers["dense_tokens"], firsts)
    return workers, np.append(worker_of, layout.NONE)
