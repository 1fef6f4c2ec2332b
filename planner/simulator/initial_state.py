"""Fills the kernel's arrays (layout.py) for a fleet and a trace, as they are before the first event.

Letters of array shapes: n requests, W the kernel's workers (each data-parallel rank is one), P running pools,
L limits, V windows. layout.py says what lanes, slots, runs of steps and their parts are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner.domain import Limit, selectors_of
from planner.errors import InputError
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.llm import Llm
from planner.models.output_length import bucket_range, output_table, synthetic_buckets
from planner.policies import BATCHING, FLIP, POOLS, QUEUE, ROUTING, STEPWISE, counts_tenants
from planner.simulator import cache_layout, layout, worker_places
from planner.simulator.adapter_layout import check_adapters, make_adapters
from planner.simulator.counted_limits import judged_windows_s, limits_in_windows, limits_over_whole
from planner.simulator.layout import State
from planner.simulator.offload_layout import Offload, make_offload
from planner.simulator.pins import pin_prefixes
from planner.simulator.policy_checks import check_policies
from planner.simulator.simulation import Floats, Ints
from planner.simulator.worker_rows import rank_rows, routing_order, type_rows, worker_and_lane_rows
from planner.traffic.classes import class_numbers
from planner.traffic.trace import Trace, measured_window
from planner.units import count_text

WRITTEN_AT_ONCE = 2048  # Records are written in blocks of this many, which fit into a processor's cache.
DISTURBANCE_KINDS = {"down": layout.DOWN, "up": layout.UP, "slow": layout.SLOW, "link": layout.LINK_SLOW}


def engine_of(fleet: Fleet) -> str:
    """The engine of the simulator that runs this fleet: STEPWISE, OF_SPLITWISE or OF_DISTSERVE."""
    return BATCHING[fleet.policies.batching].simulator


def fresh_state(fleet: Fleet, trace: Trace) -> State:
    """The kernel's arrays before anything has happened. Raises InputError for unknown policies."""
    check_policies(fleet)
    return first_state(fleet, trace, fresh_requests(trace), window_s=measured_window(trace))


def elastic_state(
    fleet: Fleet,
    trace: Trace,
    sizes: Sequence[int],
    *,
    limits: Sequence[Limit] = (),
    every_s: float | None = None,
    runs: int = 0,
) -> State:
    """The kernel's arrays at time zero for pools that change: `sizes` (P,) workers of each pool are up, the
    others off. There is room to record `runs` runs of steps. With `every_s` the limits are also counted in
    windows of that length. Raises InputError for what cannot be simulated.
    """
    check_traffic(fleet, trace)
    requests, window_s = fresh_requests(trace), measured_window(trace)
    state = first_state(fleet, trace, requests, limits=limits, window_s=window_s, runs=runs, sizes=sizes)
    return state if every_s is None else count_in_windows(state, limits, trace, every_s)


def check_traffic(fleet: Fleet, trace: Trace) -> None:
    """Raise InputError for unknown policies, and for a trace that these workers cannot serve."""
    check_policies(fleet)
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
        f"{trace.name}: image_tokens: {count_text(count, 'request')} with tokens of images, and {llm.name} "
        "has no encoder that makes them; choose an LLM with one, or add these tokens to input_tokens and "
        "drop the column"
    )


def first_state(
    fleet: Fleet,
    trace: Trace,
    requests: npt.NDArray[np.void],
    *,
    window_s: tuple[float, float],
    limits: Sequence[Limit] = (),
    runs: int = 0,
    parts: int = 0,
    sizes: Sequence[int] | None = None,
) -> State:
    """The engines' arrays at time zero, with `requests` (n,) as the records of the trace and room to record
    this many runs of steps and parts of steps. `sizes` (P,) workers of each running pool are up; None: all.
    """
    pools = fleet.running_pools
    policies, n = fleet.policies, len(requests)
    if policies.prediction_accuracy_frac is not None:
        _predict_outputs(requests, policies.prediction_accuracy_frac, policies.seed)
    outputs = None
    if policies.prediction_buckets:
        outputs = output_table(trace.input_tokens, trace.output_tokens, policies.prediction_buckets)
        expected_tokens = outputs.expected_tokens(requests["input_tokens"], generated_tokens=np.zeros(n))
        requests["predicted_tokens"] = requests["predicted_later_tokens"] = expected_tokens.astype(np.int64)

    types, tables, tie_keys = type_rows(pools, fleet, trace)  # The keys decide between equal workers.
    # (W,) For each worker the index of its pool, which is that of its type too: `types` has a row per pool.
    type_indices = np.repeat(np.arange(len(pools)), [pool.count * pool.type.dp for pool in pools])
    dp_ranks = rank_rows(pools)
    workers, lanes = worker_and_lane_rows(pools, types, type_indices)
    if sizes is not None:
        is_in_service = _index_in_pool(pools) < np.asarray(sizes)[type_indices]
        workers["status"] = np.where(is_in_service, layout.IN_SERVICE, layout.OUT_OF_SERVICE)
    count, order = len(workers), routing_order(pools, tie_keys, type_indices)
    groups = -(-count // layout.GROUP)  # Rounded up: the last group may be smaller.
    # Each entity has at most one event to come (layout.State): each lane; then the link in a stepwise engine,
    # or each request in the others; last the outside world, which causes the disturbances.
    entities = len(lanes) + (2 if engine_of(fleet) == STEPWISE else n + 1)
    worker_types = [pool.type for pool in pools]
    offload = make_offload(fleet, trace, type_indices, worker_types) if trace.has_prefixes else None
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
        lowest=np.full((2, groups), -np.inf),
        link=worker_places.make_links(fleet),
        disturbances=_disturbance_rows(fleet, np.arange(count) if dp_ranks is None else dp_ranks["first"]),
        limits=limits_over_whole(limits, trace, window_s),
        policy=_policy_numbers(fleet),
        window=np.array(window_s),
        runs=np.zeros(runs, dtype=layout.RUN),
        parts=np.zeros(parts, dtype=layout.PART),
        due_s=np.full(entities, layout.NEVER),
        sequence=_event_order(workers, lanes, order, entities),
        heap=np.zeros(entities, dtype=np.int64),
        heap_index=np.full(entities, layout.NONE),
        counters=_first_counters(policies, n),
        paused=np.array([layout.NONE, -np.inf]),  # There was no event yet.
        after=_session_rows(trace),
        children=np.ascontiguousarray(trace.after[:, 0]),
        caches=_make_caches(fleet, trace, type_indices, worker_types, offload),
        dp_ranks=dp_ranks,
        adapters=make_adapters(fleet, trace, type_indices, worker_types),
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


def count_in_windows(state: State, limits: Sequence[Limit], trace: Trace, every_s: float) -> State:
    """The state, with the limits also counted in each window of `every_s` seconds."""
    edges_s = judged_windows_s(trace, every_s)
    return state._replace(edges_s=edges_s, in_windows=limits_in_windows(limits, trace, state, edges_s))


def fresh_requests(trace: Trace) -> npt.NDArray[np.void]:
    """The kernel's requests (n,) before anything has happened to them."""
    requests = np.empty(len(trace), dtype=layout.REQUEST)
    make_fresh(requests, trace)
    return requests


def make_fresh(requests: npt.NDArray[np.void], trace: Trace, first: int = 0) -> None:
    """Fill `requests` (m,) with the records of m requests of the trace, from its `first` on, as they are
    before they arrive.
    """
    fresh = _FRESH.view(np.int64)
    for offset in range(0, len(requests), WRITTEN_AT_ONCE):
        block = requests[offset : offset + WRITTEN_AT_ONCE]
        rows = slice(first + offset, first + offset + len(block))
        # All fields at once, as words of 8 bytes: quicker than field by field.
        block.view(np.int64).reshape(len(block), len(fresh))[:] = fresh
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


def _predict_outputs(requests: npt.NDArray[np.void], accuracy_frac: float, seed: int) -> None:
    """Fill in the output lengths [tokens] that schedulers predict.

    The first prediction is the lower end of a bucket of lengths, the right bucket for the share
    `accuracy_frac` of requests (TetriInfer). The later prediction, for a request that has become longer than
    the first, is the mean of all outputs longer than the first (Aladdin).
    """
    outputs = requests["output_tokens"]
    buckets = synthetic_buckets(outputs, accuracy_frac, np.random.default_rng(seed))
    requests["predicted_tokens"] = bucket_range(buckets)[0]
    ordered = np.sort(outputs)
    # For each request: where in `ordered` the outputs begin that are longer than predicted, and their number.
    above = np.searchsorted(ordered, requests["predicted_tokens"], side="right")
    longer = len(ordered) - above
    sums = np.concatenate((np.cumsum(ordered[::-1])[::-1], [0]))  # sums[i] is the sum of ordered[i:].
    requests["predicted_later_tokens"] = np.where(longer > 0, sums[above] // np.maximum(longer, 1), outputs)


def _request_classes(
    limits: Sequence[Limit], policies: Policies, trace: Trace, engine: str
) -> npt.NDArray[np.void] | None:
    """The classes of the requests (n,), layout.REQUEST_CLASS; None if no limit is for a class and the queue
    has no deadlines. Raises InputError for classes in an engine that is not stepwise.
    """
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


def _session_rows(trace: Trace) -> npt.NDArray[np.void]:
    """For each request (n + 1,), layout.AFTER: how many requests it waits for, how long it pauses after them,
    and where the requests that wait for it begin in `State.children`. Empty without sessions.
    """
    if not trace.after.size:
        return np.zeros(0, dtype=layout.AFTER)
    n = len(trace)
    after = np.zeros(n + 1, dtype=layout.AFTER)  # One row more: each row's children end where the next begin.
    after["parents"][:n] = np.bincount(trace.after[:, 0], minlength=n)
    after["think_s"][:n] = trace.think_s
    after["child"] = np.searchsorted(trace.after[:, 1], np.arange(n + 1))
    return after


def _index_in_pool(pools: Sequence[Pool]) -> npt.NDArray[np.int64]:
    """For each of the kernel's workers (W,), a data-parallel rank, the index of its worker in the pool."""
    return np.concatenate([np.arange(pool.count * pool.type.dp) // pool.type.dp for pool in pools])


def _event_order(
    workers: npt.NDArray[np.void], lanes: npt.NDArray[np.void], order: npt.NDArray[np.int64], entities: int
) -> npt.NDArray[np.int64]:
    """For each entity its rank (entities,) among events of the same moment: lanes in the `order` (W,) of
    their workers, then the other entities.
    """
    sequence = np.arange(entities)
    position = np.empty(len(workers), np.int64)
    position[order] = np.arange(len(workers))
    sequence[np.argsort(position[lanes["worker"]], kind="stable")] = np.arange(len(lanes))
    return sequence


def _list_pools(state: State) -> None:
    """Fill `state.pools` with the workers that are in service, as `routing.set_pools` does during the run. A
    worker with data-parallel ranks is listed by its first rank.
    """
    workers, dp_ranks = state.workers, state.dp_ranks
    for pool, is_decode in ((layout.ARRIVAL_POOL, False), (layout.HAND_OFF_POOL, True)):
        is_member = (workers["role"] == layout.DECODE) == is_decode
        if dp_ranks is not None:
            is_member &= dp_ranks["first"] == np.arange(len(workers))
        members = state.order[(is_member & (workers["status"] == layout.IN_SERVICE))[state.order]]
        state.pools[pool, : len(members)] = members
        workers["pool_index"][members] = np.arange(len(members))
        state.counters[layout.SIZE + pool] = len(members)


def _with_first_hand_offs(state: State) -> State:
    """The state, with `met_s` (W, W) if the first hand-off between two workers takes extra time: since when
    two workers are connected, which none are yet.
    """
    if not (state.types["first_hand_off_s"] > 0).any() or not (state.workers["role"] == layout.DECODE).any():
        return state
    return state._replace(met_s=np.full((len(state.workers), len(state.workers)), layout.NEVER))


def _make_caches(
    fleet: Fleet, trace: Trace, type_indices: Ints, worker_types: list[WorkerType], offload: Offload | None
) -> cache_layout.Caches | None:
    """The state of prefix caches and tenants; None if no policy needs it."""
    is_cached = fleet.policies.prefix_cache
    if (is_cached and not trace.has_prefixes) or not (is_cached or counts_tenants(fleet.policies)):
        return None
    memory_tree_nodes = 0 if offload is None else int(offload.memories["nodes"].sum())
    row = ROUTING[fleet.policies.routing]
    return cache_layout.make_caches(
        fleet,
        trace,
        type_indices,
        worker_types,
        has_window=row.has_window,
        is_pinned=row.pins,
        memory_tree_nodes=memory_tree_nodes,
    )


def _disturbance_rows(fleet: Fleet, first_ranks: Ints) -> npt.NDArray[np.void]:
    """The disturbances in order of time; a disturbance of a worker names the worker's first rank.

    `first_ranks` (W,) has for each of the kernel's workers, a rank, the first rank of the same worker.
    """
    if not fleet.disturbances:
        return np.zeros(0, dtype=layout.DISTURBANCE)
    firsts = np.unique(first_ranks)  # One for each worker of the fleet, in order.
    workers = len(firsts)
    rows = np.zeros(len(fleet.disturbances), dtype=layout.DISTURBANCE)
    for k, event in enumerate(sorted(fleet.disturbances, key=lambda event: event.time_s)):
        if not 0 <= event.worker < workers:
            raise InputError(f"disturbance: there is no worker {event.worker}, the fleet has {workers}")
        rows[k] = (event.time_s, DISTURBANCE_KINDS[event.kind], firsts[event.worker], event.factor)
    return rows


def _await_disturbance(state: State, *, outside: int) -> None:
    """Put the entity `outside`, which causes disturbances, into the heap of events, due at the first one."""
    state.sequence[outside] = np.iinfo(np.int64).max  # Disturbances come after all other events of a moment.
    state.due_s[outside] = state.disturbances[0]["time_s"]
    state.heap[0], state.heap_index[outside], state.counters[layout.PENDING] = outside, 0, 1


def _first_counters(policies: Policies, n: int) -> Ints:
    """The kernel's counters at time zero, those of layout.py. All `n` requests are released: they may arrive.
    replay.py changes that for a closed loop.
    """
    counters = np.zeros(layout.COUNTERS, dtype=np.int64)
    counters[layout.RELEASED] = n
    counters[[layout.LIMBO, layout.LOST, layout.FREED, layout.HELD, layout.READING]] = layout.NONE
    # Twice the seed plus an odd constant (digits of the golden ratio) is never 0, a state that the kernel's
    # generator (routing.py) would not leave.
    counters[layout.RANDOM_STATE] = 2 * policies.seed + 0x9E3779B97F4A7C1
    counters[layout.ROUTING + layout.ARRIVAL_POOL] = ROUTING[policies.routing].code
    counters[layout.ROUTING + layout.HAND_OFF_POOL] = ROUTING[policies.decode_routing].code
    return counters


def _policy_numbers(fleet: Fleet) -> Floats:
    """The parameters of policies that the kernel reads, and the times that it notes in the same array."""
    numbers, policies = np.zeros(layout.POLICY), fleet.policies  # Indices and their meaning: layout.py.
    numbers[layout.GAMMA], numbers[layout.THETA] = policies.context_weight, policies.headroom_frac
    numbers[layout.TTFT_S], numbers[layout.TBT_S] = policies.ttft_s, policies.tbt_s
    numbers[layout.FLIP_S] = policies.flip_after_s if POOLS[policies.pools].code == FLIP else layout.NEVER
    numbers[layout.RESTART_S] = policies.flip_restart_s
    numbers[layout.REPURPOSE_S] = policies.repurpose_after_s
    # The last indices are times, up to LATEST_S: infinite until the kernel or the caller sets them.
    numbers[layout.SHORT_SINCE_S :] = layout.NEVER
    numbers[layout.FRONT_END_S] = fleet.front_end_s
    numbers[layout.HEAVY_TOKENS] = policies.heavy_tokens
    numbers[layout.LOAD_PERIOD_S] = policies.load_period_s
    numbers[layout.HEARD_S] = -np.inf
    numbers[layout.PREDICTOR] = 1.0 + policies.predictor_slowdown_frac
    numbers[layout.HEARTBEAT_S] = policies.heartbeat_s
    return numbers
