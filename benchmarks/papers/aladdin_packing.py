"""Requests onto the fewest workers that keep every request's SLO: Aladdin's multi-dimensional bin packing.

Sets   i  worker      j  request: ongoing (it stays where it is) or new
Data   in_j, pred_j, out_j   tokens of the prompt, predicted output, output generated so far
       spent_j   seconds in decode so far;   left_j = pred_j - out_j   tokens still to come
       k1, c1    prefill of l prompt tokens takes k1 l + c1                       (the paper's eq. 2)
       k2, c2, c3  an iteration of b requests with l tokens of context: k2 l + c2 b + c3   (eq. 3)
       h, j0     KV bytes of a request with l tokens: h l + j0;   M  KV bytes of a worker   (eq. 1)
       T_pre, T_dec   limits on TTFT and on a request's mean time per token
       gamma     how much of the output counts as context;   theta   margin for wrong predictions
Vars   x_ij in {0, 1} request j is on worker i;   y_i in {0, 1} worker i is used

  min   sum_i y_i
  s.t.  a  served_j      sum_i x_ij = 1;  x_ij = 1 where j is ongoing on i
        b  decode_i      sum_j (in_j + gamma pred_j) x_ij <= theta (T_dec - c3 - c2 sum_j x_ij) / k2
        c  prefill_i     k1 sum_new in_j x_ij + c1 <= T_pre
        d  preempted_i   k1 sum_new in_j x_ij + c1 <= theta min_{j ongoing on i} (T_dec out_j - spent_j)
        e  kv_iq         sum_{left_j >= q} (h (in_j + out_j + q) + j0) x_ij <= M      for every iteration q
        f  used_ij       x_ij <= y_i

c and d bind only workers that get a new request. In e the sum grows from one iteration to the next until a
request ends, so only the iterations in which one ends are written down. `best_fit` is Algorithm 1,
`pack_requests` the exact model in CP-SAT, `rebalance_requests` Algorithm 2. After Nie, Fonseca, Liu 2024,
arXiv:2405.06856.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.errors import InfeasibleError, InputError
from planner.solvers.backend import cp_solver

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

WHOLE = 10**9  # A constraint's capacity in the integers of CP-SAT; demands are rounded down.
TOLERANCE = 1e-7  # A sum may exceed its capacity by this share of it.


@dataclass(frozen=True, slots=True)
class PackedWorker:
    """The data of one worker and its limits, in the order of the data above: k1, c1, k2, c2, c3, h, j0, M,
    T_pre, T_dec, gamma (`strictness`) and theta (`margin`). Times in seconds, KV in bytes.
    """

    prefill_s_per_token: float
    prefill_s: float
    context_s_per_token: float
    sequence_s: float
    iteration_s: float
    kv_bytes_per_token: float
    kv_bytes_per_request: float
    kv_bytes: float
    ttft_s: float
    tpot_s: float
    strictness: float = 0.5
    margin: float = 0.9

    def __post_init__(self) -> None:
        for name in ("prefill_s_per_token", "context_s_per_token", "kv_bytes_per_token", "kv_bytes"):
            if not getattr(self, name) > 0:
                raise InputError(f"packing: {name} is {getattr(self, name)}, must be > 0")
        if not 0 <= self.strictness <= 1 or not 0 < self.margin <= 1:
            raise InputError(
                f"packing: strictness is {self.strictness} and margin {self.margin}; both are shares of 1"
            )
        if not self.tpot_s > self.iteration_s + self.sequence_s:
            raise InputError(
                f"packing: a lone request's token takes {self.iteration_s + self.sequence_s:g} s, "
                f"more than the {self.tpot_s:g} s allowed"
            )


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `worker` is the worker on which an ongoing request decodes, None for a new request."""

    input_tokens: int
    predicted_tokens: int
    generated_tokens: int = 0
    decode_s: float = 0.0
    worker: int | None = None

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.predicted_tokens < 1:
            raise InputError(f"packing: {self} has no prompt or no output")
        if not 0 <= self.generated_tokens <= self.predicted_tokens:
            raise InputError(f"packing: {self} has outrun its prediction; predict its length again")

    @property
    def left_tokens(self) -> int:
        return self.predicted_tokens - self.generated_tokens

    def weighted_tokens(self, engine: PackedWorker) -> float:
        """Context that counts against the decode limit (b)."""
        return self.input_tokens + engine.strictness * self.predicted_tokens


@dataclass(frozen=True, slots=True)
class Packing:
    """The worker of every request; no packing uses fewer than `bound` workers."""

    worker_of: tuple[int, ...]
    bound: int

    @property
    def workers(self) -> int:
        return len(set(self.worker_of))

    @property
    def is_optimal(self) -> bool:
        return self.workers == self.bound


def find_broken_constraint(engine: PackedWorker, requests: Sequence[Request]) -> str | None:
    """The constraint (b, c, d or e) that these requests on one worker do not keep, None if they fit."""
    for name, demands, capacity in _constraints(engine, requests):
        used = [demand for demand in demands if demand]
        if used and sum(used) > capacity * (1 + TOLERANCE):
            return name
    return None


def _constraints(engine: PackedWorker, requests: Sequence[Request]) -> list[tuple[str, list[float], float]]:
    """Constraints b, c, d and e of one worker as (name, demand of each request, capacity). d is left out
    where none of the requests is ongoing.
    """
    # b with its term of c2 moved to the left: each sequence then takes so many tokens more.
    capacity_tokens = (engine.tpot_s - engine.iteration_s) / engine.context_s_per_token * engine.margin
    tokens_per_sequence = engine.sequence_s / engine.context_s_per_token * engine.margin
    decode = [request.weighted_tokens(engine) + tokens_per_sequence for request in requests]
    prefill = [
        engine.prefill_s_per_token * request.input_tokens if request.worker is None else 0.0
        for request in requests
    ]
    rows = [("b", decode, capacity_tokens), ("c", prefill, engine.ttft_s - engine.prefill_s)]
    saved_s = [
        engine.tpot_s * request.generated_tokens - request.decode_s
        for request in requests
        if request.worker is not None
    ]
    if saved_s:
        rows.append(("d", prefill, engine.margin * min(saved_s) - engine.prefill_s))
    for q in sorted({request.left_tokens for request in requests}):
        kv_bytes = [
            engine.kv_bytes_per_token * (request.input_tokens + request.generated_tokens + q)
            + engine.kv_bytes_per_request
            if request.left_tokens >= q
            else 0.0
            for request in requests
        ]
        rows.append(("e", kv_bytes, engine.kv_bytes))
    return rows


def best_fit(engine: PackedWorker, requests: Sequence[Request], *, workers: int = 0) -> Packing:
    """Algorithm 1: place every new request, in order, on the fullest worker that still keeps b to e, or on a
    new one.

    The fullest worker has the largest `capacity_norm`, the L2 norm of (sequences, weighted context). The
    first `workers` workers are open at the start, and those with ongoing requests.
    """
    placed = _ongoing_by_worker(engine, requests, workers)
    worker_of = [request.worker for request in requests]

    def capacity_norm(worker: int) -> float:
        context = sum(request.weighted_tokens(engine) for request in placed[worker])
        return math.hypot(len(placed[worker]), context)

    for j, request in enumerate(requests):
        if request.worker is not None:
            continue
        fullest_first = sorted(range(len(placed)), key=capacity_norm, reverse=True)
        fitting = (i for i in fullest_first if find_broken_constraint(engine, [*placed[i], request]) is None)
        worker = next(fitting, len(placed))
        if worker == len(placed):
            if (name := find_broken_constraint(engine, [request])) is not None:
                raise _does_not_fit(request, name)
            placed.append([])
        placed[worker].append(request)
        worker_of[j] = worker
    placed_on = tuple(worker for worker in worker_of if worker is not None)  # By now every request has one.
    return Packing(placed_on, bound=len({request.worker for request in requests} - {None}))


def pack_requests(
    engine: PackedWorker, requests: Sequence[Request], *, time_limit_s: float = 30.0
) -> Packing:
    """The model above, exact: the fewest workers, from `best_fit`'s answer down to the proven bound."""
    from ortools.sat.python import cp_model

    start = best_fit(engine, requests)
    if not requests:
        return start
    model = cp_model.CpModel()
    x = _variables(model, engine, requests, max(start.worker_of) + 1)
    y = [model.new_bool_var(f"y_{i}") for i in range(len(x))]
    for i, row in enumerate(x):
        for x_ij in row:
            model.add_implication(x_ij, y[i])  # f
    taken = {request.worker for request in requests}
    empty = [i for i in range(len(x)) if i not in taken]
    for earlier, later in itertools.pairwise(empty):  # Empty workers are alike, so they are opened in order.
        model.add_implication(y[later], y[earlier])
    for i, row in enumerate(x):
        for j, x_ij in enumerate(row):
            model.add_hint(x_ij, start.worker_of[j] == i)
    model.minimize(sum(y))
    solver, is_solved = _solve(model, time_limit_s)
    bound = max(start.bound, math.ceil(solver.best_objective_bound - 1e-6))
    if not is_solved:
        return Packing(start.worker_of, min(bound, start.workers))
    worker_of = [next(i for i, row in enumerate(x) if solver.value(row[j])) for j in range(len(requests))]
    return Packing(tuple(worker_of), bound)


@dataclass(frozen=True, slots=True)
class PredictionError:
    """The tokens and sequences that a worker has beyond the planned ones (negative: fewer), after a wrong
    prediction.

    A request that outran its prediction adds its newly predicted length and one sequence; one that ended
    early adds its real minus its predicted length and minus one sequence.
    """

    tokens: float = 0.0
    sequences: int = 0


def rebalance_requests(
    engine: PackedWorker,
    requests: Sequence[Request],
    worker_of: Sequence[int],
    corrections: Sequence[PredictionError],
    *,
    time_limit_s: float = 10.0,
) -> tuple[int, ...]:
    """Algorithm 2: move new requests among the workers so that wrong predictions weigh least.

    By eq. 3 an error of (tokens, sequences) lengthens an iteration by k2 tokens + c2 sequences. As workers
    are alike, the paper's distance of a worker's error line from the origin is that time over a constant. The
    sum of the absolute values of these times is minimised; of equal answers the one with the fewest moves is
    taken. Where the ongoing requests alone break a constraint, nothing moves.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    x = _variables(model, engine, requests, len(corrections))
    error_s = [
        engine.context_s_per_token * each.tokens + engine.sequence_s * each.sequences for each in corrections
    ]
    weight_s = [
        engine.context_s_per_token * request.predicted_tokens + engine.sequence_s
        if request.worker is None
        else 0.0
        for request in requests
    ]
    scale = WHOLE / max(sum(weight_s) + sum(map(abs, error_s)), 1e-12)
    distances = []
    for i, row in enumerate(x):
        planned_s = sum(seconds for seconds, worker in zip(weight_s, worker_of, strict=True) if worker == i)
        total = sum(round(scale * seconds) * x_ij for seconds, x_ij in zip(weight_s, row, strict=True))
        distance = model.new_int_var(0, 3 * WHOLE, f"distance_{i}")
        model.add_abs_equality(distance, total + round(scale * (error_s[i] - planned_s)))
        distances.append(distance)
    stays = [x[worker][j] for j, worker in enumerate(worker_of)]
    for i, row in enumerate(x):
        for j, x_ij in enumerate(row):
            model.add_hint(x_ij, worker_of[j] == i)
    moves = len(stays) - sum(stays)
    model.minimize((len(stays) + 1) * sum(distances) + moves)
    solver, is_solved = _solve(model, time_limit_s)
    if not is_solved:
        return tuple(worker_of)
    return tuple(next(i for i, row in enumerate(x) if solver.value(row[j])) for j in range(len(requests)))


def _ongoing_by_worker(
    engine: PackedWorker, requests: Sequence[Request], workers: int
) -> list[list[Request]]:
    """The requests that each worker already has. Raises InfeasibleError if they are too many for it."""
    taken = [request.worker for request in requests if request.worker is not None]
    placed: list[list[Request]] = [[] for _ in range(max([workers, *(worker + 1 for worker in taken)]))]
    for request in requests:
        if request.worker is not None:
            placed[request.worker].append(request)
    for i, group in enumerate(placed):
        if (name := find_broken_constraint(engine, group)) is not None:
            raise InfeasibleError(
                f"the ongoing requests of worker {i} break constraint {name} already; move some away",
                kind="capacity",
                constraint=f"{name} of worker {i}",
                relaxation="fewer ongoing requests there",
            )
    return placed


def _variables(
    model: cp_model.CpModel, engine: PackedWorker, requests: Sequence[Request], workers: int
) -> list[list[cp_model.IntVar]]:
    """The variables x, (workers, requests), with constraints a to e."""
    x = [[model.new_bool_var(f"x_{i}_{j}") for j in range(len(requests))] for i in range(workers)]
    for j, request in enumerate(requests):
        model.add_exactly_one(row[j] for row in x)
        if request.worker is not None:
            model.add(x[request.worker][j] == 1)
    for i, row in enumerate(x):
        may_be_here = [j for j, request in enumerate(requests) if request.worker in (None, i)]
        for name, demands, capacity in _constraints(engine, [requests[j] for j in may_be_here]):
            units = [
                min(math.floor(demand / capacity * WHOLE), WHOLE + 1) if capacity > 0 else WHOLE + 1
                for demand in demands
                if demand
            ]
            users = [row[j] for j, demand in zip(may_be_here, demands, strict=True) if demand]
            model.add(sum(u * x_ij for u, x_ij in zip(units, users, strict=True)) <= WHOLE).with_name(
                f"{name}_{i}"
            )
    return x


def _solve(model: cp_model.CpModel, time_limit_s: float) -> tuple[cp_model.CpSolver, bool]:
    from ortools.sat.python import cp_model

    solver = cp_solver(time_limit_s)
    return solver, solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def _does_not_fit(request: Request, name: str) -> InfeasibleError:
    limits = {"b": "the limit per token", "c": "the limit on TTFT", "e": "the KV memory of a worker"}
    return InfeasibleError(
        f"a request of {request.input_tokens} tokens and {request.predicted_tokens} to come breaks "
        f"{limits[name]} on an empty worker; relax it or take larger workers",
        kind="latency" if name != "e" else "capacity",
        constraint=name,
        relaxation=f"{limits[name]}, or larger workers",
    )
