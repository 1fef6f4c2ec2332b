"""Run a fleet on a trace: fleet and trace in, arrays per request out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS, Fleet, Limit, Llm, Network, Pool, WorkerType
from planner.errors import InputError
from planner.simulator import kernel
from planner.simulator.kernel import State
from planner.traces import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ROLES = {"mixed": kernel.MIXED, "prefill": kernel.PREFILL, "decode": kernel.DECODE}
METRICS = {"ttft": kernel.TTFT, "tbt": kernel.TBT, "tpot": kernel.TPOT, "e2e": kernel.E2E}
STATUS = ("finished", "rejected", "unfinished")
BATCHING = ("vllm-v1",)
ROUTING = ("jsq", "least-outstanding", "round-robin")


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """What happened to every request, (n,) in the trace's order; NaN where it never happened.

    `window_s` is the part of the run that counts (warm-up cut); `violations` and `counted` belong to the
    watched `limits`. `complete` is False when the run stopped because a limit could no longer hold.
    """

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    queue_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    tbt_max_s: Floats
    e2e_s: Floats
    prefill_worker: Ints
    decode_worker: Ints
    preemptions: Ints
    status: Ints  # index into STATUS
    worker_names: tuple[str, ...]
    worker_busy_s: Floats  # (W,)
    worker_steps: Ints  # (W,)
    worker_tokens: Floats  # (W,) tokens through the dense layers
    window_s: tuple[float, float]
    end_s: float
    limits: tuple[Limit, ...]
    violations: Ints  # (L,)
    counted: Ints  # (L,)
    complete: bool
    runs: npt.NDArray[np.void]  # (R,) kernel.RUN, empty if not recorded


def measured_window(trace: Trace) -> tuple[float, float]:
    """Seconds of a trace that count: from the end of the warm-up to the last arrival.

    The warm-up is a twentieth of the trace, at most two minutes: an empty fleet flatters the first requests.
    """
    first, last = float(trace.arrival_s[0]), float(trace.arrival_s[-1])
    return first + min((last - first) / 20, 120.0), last


def allowed_violations(limit: Limit, trace: Trace, window_s: tuple[float, float]) -> int:
    """How many violations of `limit` still pass, or an upper bound of that for gaps between tokens."""
    inside = (trace.arrival_s >= window_s[0]) & (trace.arrival_s <= window_s[1])
    if limit.metric == "tbt":
        values = int((trace.output_tokens - 1).sum())
    elif limit.metric == "tpot":
        values = int((inside & (trace.output_tokens > 1)).sum())
    else:
        values = int(inside.sum())
    return spared(limit.percentile_frac, values)


def spared(percentile_frac: float, values: int) -> int:
    """How many of `values` may lie above their percentile (nearest rank)."""
    return values - int(np.ceil(percentile_frac * values - 1e-9))


def simulate(
    fleet: Fleet,
    trace: Trace,
    *,
    limits: Sequence[Limit] = (),
    stop_early: bool = False,
    record: bool = False,
    closed_loop: int = 0,
) -> Simulation:
    """Simulate `trace` on `fleet` to the last token.

    `limits` are counted while running; with `stop_early` the run ends once one of them cannot hold any more.
    `record` keeps every run of engine steps (for gap percentiles and load over time). `closed_loop` > 0
    ignores the arrival times and keeps that many requests in flight. Raises InputError for policies it does
    not know.
    """
    _check_policies(fleet)
    n = len(trace.arrival_s)
    window_s = (0.0, np.inf) if closed_loop else measured_window(trace)
    runs = 8 * n + 1024 if record else 0
    while True:
        state = _state(fleet, trace, tuple(limits), window_s, runs, closed_loop > 0)
        kernel.run(state, closed_loop, stop_early)
        if not record or state.counters[kernel.RUNS] <= runs:
            return _results(state, fleet, tuple(limits))
        runs = int(state.counters[kernel.RUNS])


def keeps(
    fleet: Fleet, trace: Trace, limits: Sequence[Limit], fresh: npt.NDArray[np.void]
) -> Simulation | None:
    """Simulate only as far as it takes to see a limit broken: None if one is, else the whole simulation.

    `fresh` is `fresh_requests(trace)`, made once for many fleets.
    """
    state = _state(fleet, trace, tuple(limits), measured_window(trace), 0, False, fresh)
    kernel.run(state, 0, True)
    watched = state.limits
    for k, limit in enumerate(limits):
        if watched[k]["violations"] > spared(limit.percentile_frac, int(watched[k]["counted"])):
            return None
    return (
        _results(state, fleet, tuple(limits)) if state.counters[kernel.DONE] == len(state.requests) else None
    )


def fresh_requests(trace: Trace) -> npt.NDArray[np.void]:
    """The kernel's requests (n,) before anything has happened to them."""
    requests = np.zeros(len(trace.arrival_s), dtype=kernel.REQUEST)
    requests["arrival_s"] = trace.arrival_s
    requests["input"] = requests["length"] = trace.input_tokens
    requests["output"] = trace.output_tokens
    requests["scheduled_s"] = -1.0
    requests["first_token_s"] = requests["finish_s"] = np.nan
    requests["prefill_worker"] = requests["decode_worker"] = requests["next"] = kernel.NONE
    requests["status"] = kernel.UNFINISHED
    return requests


def _check_policies(fleet: Fleet) -> None:
    policies = fleet.policies
    for name, known, asked in (
        ("batching", BATCHING, policies.batching),
        ("routing", ROUTING, policies.routing),
        ("decode_routing", ROUTING, policies.decode_routing),
    ):
        if asked not in known:
            raise InputError(f"policies.{name} is {asked!r}, must be one of {', '.join(known)}")


def _state(
    fleet: Fleet,
    trace: Trace,
    limits: tuple[Limit, ...],
    window_s: tuple[float, float],
    runs: int,
    is_closed_loop: bool,
    fresh: npt.NDArray[np.void] | None = None,
) -> State:
    """The kernel's arrays at time zero; `fresh` is `fresh_requests(trace)` where it is at hand."""
    pools = [pool for pool in fleet.pools if pool.count]
    workers = np.concatenate([np.repeat(_worker(pool, t, fleet), pool.count) for t, pool in enumerate(pools)])
    seats = max(pool.type.max_num_seqs for pool in pools)
    longest = max(pool.type.max_num_batched_tokens for pool in pools)
    count = len(workers)

    requests = fresh_requests(trace) if fresh is None else fresh.copy()
    if is_closed_loop:
        requests["arrival_s"] = 0.0

    watched = np.zeros(len(limits), dtype=kernel.LIMIT)
    for k, limit in enumerate(limits):
        watched[k] = (METRICS[limit.metric], limit.limit_s, allowed_violations(limit, trace, window_s), 0, 0)

    counters = np.zeros(7, dtype=np.int64)
    counters[[kernel.LINK_HEAD, kernel.LINK_TAIL]] = kernel.NONE
    return State(
        workers=workers,
        slots=np.zeros((count, seats), dtype=kernel.SLOT),
        gaps=np.zeros((count, kernel.GAP_DEPTH), dtype=kernel.GAP),
        members=np.zeros((count, seats), dtype=kernel.MEMBER),
        requests=requests,
        f_s=np.array([pool.type.latency.step_s(np.arange(longest + 1, dtype=float)) for pool in pools]),
        front=np.flatnonzero(workers["role"] != kernel.DECODE),
        back=np.flatnonzero(workers["role"] == kernel.DECODE),
        score=np.zeros(count),
        round_robin=np.array(
            [
                int(fleet.policies.routing == "round-robin"),
                int(fleet.policies.decode_routing == "round-robin"),
            ]
        ),
        link=_link(fleet.llm, fleet.network),
        limits=watched,
        window=np.array(window_s),
        runs=np.zeros(runs, dtype=kernel.RUN),
        time=np.full(count + 1, np.inf),
        heap=np.arange(count + 1),
        place=np.arange(count + 1),
        counters=counters,
    )


def _worker(pool: Pool, table: int, fleet: Fleet) -> npt.NDArray[np.void]:
    """One idle worker of a pool, shape (1,)."""
    worker = np.zeros(1, dtype=kernel.WORKER)
    latency = pool.type.latency
    is_decode = pool.role == "decode"
    routing = fleet.policies.decode_routing if is_decode else fleet.policies.routing
    for name, value in (
        ("role", ROLES[pool.role]), ("table", table), ("a_s", latency.a_s), ("b_s", latency.b_s),
        ("d_s", latency.d_s), ("e_s", latency.e_s), ("budget", pool.type.max_num_batched_tokens),
        ("seats", pool.type.max_num_seqs), ("blocks", pool.type.kv_tokens // KV_BLOCK_TOKENS),
        ("weight", _weights(pool.type, routing, decode=is_decode)), ("partial", kernel.NONE),
        ("head", kernel.NONE), ("tail", kernel.NONE),
    ):  # fmt: skip
        worker[name] = value
    return worker


def _link(llm: Llm, network: Network) -> Floats:
    if not network.bandwidth_bytes_per_s > 0:
        raise InputError(f"network.bandwidth is {network.bandwidth_bytes_per_s}, must be > 0")
    block_s = KV_BLOCK_TOKENS * llm.kv_bytes_per_token / network.bandwidth_bytes_per_s
    overlapped = 1.0 - 1.0 / llm.layers if network.transfer == "layerwise" else 0.0
    return np.array([block_s, network.latency_s, overlapped, -np.inf, -np.inf])


def _weights(worker_type: WorkerType, routing: str, *, decode: bool) -> tuple[float, float, float]:
    """Score of a worker per pending prompt token, per request it has, per KV token of those requests.

    jsq (join the shortest queue): by the seconds that stand in the way of one more request. For a worker that
    prefills these are the prompt tokens still to prefill, at its speed, and one token for each request it has
    (Splitwise section IV-A counts tokens; the speed makes workers of different GPUs comparable). For a decode
    worker it is the length of its step: sequences and KV tokens at their cost.
    """
    latency, budget = worker_type.latency, worker_type.max_num_batched_tokens
    if routing == "least-outstanding":
        return 0.0, 1.0, 0.0
    token_s = float(latency.step_s(budget, pairs=budget * (budget + 1) / 2)) / budget
    if not decode:
        return token_s, token_s, 0.0
    seats = worker_type.max_num_seqs
    sequence_s = float(latency.step_s(seats) - latency.step_s(1)) / seats + latency.b_s
    return 0.0, sequence_s + 1e-12, latency.d_s


def _results(state: State, fleet: Fleet, limits: tuple[Limit, ...]) -> Simulation:
    requests, workers = state.requests, state.workers
    arrival_s, output = requests["arrival_s"], requests["output"]
    finished = requests["status"] == kernel.FINISHED
    with_gaps = finished & (output > 1)
    decoding_s = requests["finish_s"] - requests["first_token_s"]
    end_s = float(np.nanmax(requests["finish_s"])) if finished.any() else float(arrival_s[-1])
    return Simulation(
        arrival_s=arrival_s,
        input_tokens=requests["input"],
        output_tokens=output,
        queue_s=np.where(requests["scheduled_s"] >= 0, requests["scheduled_s"] - arrival_s, np.nan),
        ttft_s=requests["first_token_s"] - arrival_s,
        tpot_s=np.where(with_gaps, decoding_s / np.maximum(output - 1, 1), np.nan),
        tbt_max_s=np.where(with_gaps, requests["gap_max_s"], np.nan),
        e2e_s=requests["finish_s"] - arrival_s,
        prefill_worker=requests["prefill_worker"],
        decode_worker=np.where(
            requests["decode_worker"] >= 0, requests["decode_worker"], requests["prefill_worker"]
        ),
        preemptions=requests["preemptions"],
        status=requests["status"],
        worker_names=tuple(f"{pool.name}-{i}" for pool in fleet.pools for i in range(pool.count)),
        worker_busy_s=workers["busy_s"],
        worker_steps=workers["steps"],
        worker_tokens=workers["tokens"],
        window_s=(float(state.window[0]), end_s if np.isinf(state.window[1]) else float(state.window[1])),
        end_s=end_s,
        limits=limits,
        violations=state.limits["violations"],
        counted=state.limits["counted"],
        complete=bool(state.counters[kernel.DONE] == len(requests)),
        runs=state.runs[: state.counters[kernel.RUNS]],
    )
