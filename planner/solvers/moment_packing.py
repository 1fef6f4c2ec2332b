"""The best packings of the requests that workers hold at one moment: on the fewest workers, and most evenly.

Sets   i  worker      j  request      r  resource, such as KV blocks or seconds of a step
Data   u_ijr   what request j takes of resource r of worker i, as a share of all that the worker has
Vars   x_ij in {0, 1} request j is on worker i;   y_i in {0, 1} worker i is used;   z >= 0 the largest load

  fewest   min  sum_i y_i                            evenest   min  z
           s.t. sum_i x_ij = 1          (placed_j)             s.t. sum_i x_ij = 1         (placed_j)
                sum_j u_ijr x_ij <= y_i (holds_ir)                  sum_j u_ijr x_ij <= z  (load_ir)

This is the vector packing of Aladdin (arXiv:2405.06856) at one moment: u does not count how much a request
will still grow. Greedy packings come first (first fit and longest first, both from the largest request down).
If they are worse than the bound that follows from the sums of u, CP-SAT runs. It may stop before it proves
anything, so every answer comes with its bound.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from planner.solvers.backend import cp_solver

if TYPE_CHECKING:  # OR-tools, which takes 0.4 s to import, is imported where it is needed.
    from ortools.sat.python import cp_model

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CAPACITY_UNITS = 10**9  # The capacity of a worker in the integers of CP-SAT.
TOLERANCE = 1e-7  # A load may exceed the capacity by this share, because shares are rounded.
# Loads that differ by less than this share are equal: the sum of a thousand rounded shares is off by as much.
SAME_FRAC = 1e-6
# With more requests x workers than this CP-SAT does not run, and the greedy packing and its bound are
# returned.
MOST_VARIABLES = 30_000
LIMIT_S = 2.0  # The time limit of one run of CP-SAT, also in work (backend.CP_WORK_FRAC).


@dataclass(frozen=True, slots=True)
class BestPacking:
    """`fewest` workers hold the requests in the best packing found, None if none was found. No packing takes
    fewer than `fewest_bound`; if no packing exists, that is one more than there are workers. `least` is the
    largest load in the most even packing found, and in no packing is it below `least_bound`.
    """

    fewest: int | None
    fewest_bound: int
    least: float
    least_bound: float

    @property
    def is_fewest(self) -> bool:
        """Whether fewer workers are impossible."""
        return self.fewest == self.fewest_bound

    @property
    def is_least(self) -> bool:
        """Whether a lower largest load is impossible."""
        return self.least <= self.least_bound * (1 + SAME_FRAC)


def largest_load(u: Floats, worker_of: Ints) -> float:
    """The largest share in use of any resource of any worker; u (I, J, R), worker_of (J,)."""
    return float(_loads(u, worker_of).max(initial=0.0))


def pack_moment(u: Floats, worker_of: Ints, kind_of: Ints) -> BestPacking:
    """Solve both models above. Shapes: u (I, J, R), worker_of (J,), kind_of (I,). `worker_of` is the
    placement at this moment, from which the search starts; workers of the same kind are alike.
    """
    workers, requests = u.shape[:2]
    if not requests:
        return BestPacking(fewest=0, fewest_bound=0, least=0.0, least_bound=0.0)
    load_alone = u.max(axis=2)  # (I, J): the load of a worker that holds this request only.
    order = np.argsort(-load_alone.min(axis=0), kind="stable")  # The largest request comes first.
    is_small = workers * requests <= MOST_VARIABLES
    fewest, fewest_bound = _pack_on_fewest(u, order, worker_of, kind_of, is_small)
    least, least_bound = _pack_evenly(u, order, worker_of, kind_of, is_small)
    return BestPacking(fewest, fewest_bound, least, least_bound)


def _loads(u: Floats, worker_of: Ints) -> Floats:
    """The load of each resource of each worker, (I, R)."""
    loads = np.zeros((u.shape[0], u.shape[2]))
    for j, i in enumerate(worker_of):
        loads[i] += u[i, j]
    return loads


def _pack_on_fewest(
    u: Floats, order: Ints, worker_of: Ints, kind_of: Ints, is_small: bool
) -> tuple[int | None, int]:
    """`fewest` and `fewest_bound` of a BestPacking; CP-SAT runs only if the model `is_small`."""
    workers = u.shape[0]
    if u.max(axis=2).min(axis=0).max() > 1 + TOLERANCE:  # Some request fits no worker even alone.
        return None, workers + 1
    sums = u.min(axis=0).sum(axis=0)  # (R,) How many whole workers the requests fill at least, by resource.
    bound = min(max(1, math.ceil(float(sums.max()) - TOLERANCE)), workers + 1)
    packings = [_first_fit(u, order), worker_of if largest_load(u, worker_of) <= 1 + TOLERANCE else None]
    packing = min((found for found in packings if found is not None), key=_used_workers, default=None)
    if (packing is not None and _used_workers(packing) <= bound) or bound > workers or not is_small:
        return None if packing is None else _used_workers(packing), bound

    from ortools.sat.python import cp_model

    model, x = _packing_model(u, packing)
    y = [model.new_bool_var(f"y_{i}") for i in range(workers)]
    for i, r in np.ndindex(workers, u.shape[2]):
        # Shares are rounded down, so that the solver's bound is a lower bound. A request that is too large
        # for a worker counts as twice its capacity at most, so that sums fit into integers.
        units = np.floor(u[i, :, r] * CAPACITY_UNITS).astype(np.int64).clip(max=2 * CAPACITY_UNITS).tolist()
        load = cp_model.LinearExpr.weighted_sum(x[i], units)
        model.add(load <= CAPACITY_UNITS * y[i]).with_name(f"holds_{i}_{r}")
    # Workers that are alike are used in their order, so that the solver skips solutions that differ only
    # in their names.
    for i, following in itertools.pairwise(range(workers)):
        if kind_of[i] == kind_of[following]:
            model.add_implication(y[following], y[i])
    model.add(sum(y) >= bound)
    model.minimize(sum(y))
    solver = cp_solver(LIMIT_S)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None, workers + 1
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        packing = _assignment(solver, x)
    # The bound is a whole number, so it is rounded up, but not for a rounding error.
    bound = max(bound, math.ceil(solver.best_objective_bound - SAME_FRAC))
    return (None, bound) if packing is None else (_used_workers(packing), min(bound, _used_workers(packing)))


def _pack_evenly(
    u: Floats, order: Ints, worker_of: Ints, kind_of: Ints, is_small: bool
) -> tuple[float, float]:
    """`least` and `least_bound` of a BestPacking; CP-SAT runs only if the model `is_small`."""
    workers, requests = u.shape[:2]
    # The largest load is at least the mean load, and at least that of the largest request alone.
    bound = max(float(u.min(axis=0).sum(axis=0).max()) / workers, float(u.max(axis=2).min(axis=0).max()))
    packing = min(worker_of, _longest_first(u, order), key=lambda packing: largest_load(u, packing))
    least = largest_load(u, packing)
    if least <= bound * (1 + TOLERANCE) or not is_small:
        return least, bound

    from ortools.sat.python import cp_model

    model, x = _packing_model(u, packing)
    scale = CAPACITY_UNITS / least  # So the largest load of the known packing is CAPACITY_UNITS.
    # The slack of one unit per request keeps the known packing a solution despite rounding errors.
    z = model.new_int_var(math.floor(bound * scale), CAPACITY_UNITS + requests, "z")
    for i, r in np.ndindex(workers, u.shape[2]):
        units = np.floor(u[i, :, r] * scale).astype(np.int64).clip(max=2 * CAPACITY_UNITS).tolist()
        model.add(cp_model.LinearExpr.weighted_sum(x[i], units) <= z).with_name(f"load_{i}_{r}")
    # Workers that are alike are used in order: the first request on a kind goes to its first worker. So
    # request j is on one of the first j + 1 workers of its kind.
    for kind in np.unique(kind_of):
        alike = np.flatnonzero(kind_of == kind)
        for nth, i in enumerate(alike.tolist()):
            for j in range(min(nth, requests)):
                model.add(x[i][int(order[j])] == 0)
    model.minimize(z)
    solver = cp_solver(LIMIT_S)
    if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        packing = min(packing, _assignment(solver, x), key=lambda packing: largest_load(u, packing))
    least = largest_load(u, packing)
    return least, min(max(bound, solver.best_objective_bound / scale), least)


def _packing_model(u: Floats, hint: Ints | None) -> tuple[cp_model.CpModel, list[list[cp_model.IntVar]]]:
    """A model with the variables x_ij and the constraints placed_j; the packing `hint` (J,) is where the
    solver begins.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    x = [[model.new_bool_var(f"x_{i}_{j}") for j in range(u.shape[1])] for i in range(u.shape[0])]
    for j in range(u.shape[1]):
        model.add_exactly_one(row[j] for row in x)
    if hint is not None:
        for i, j in np.ndindex(u.shape[0], u.shape[1]):
            model.add_hint(x[i][j], bool(hint[j] == i))
    return model, x


def _assignment(solver: cp_model.CpSolver, x: list[list[cp_model.IntVar]]) -> Ints:
    """The worker (J,) of each request in the solver's solution."""
    values = np.array([[solver.value(x_ij) for x_ij in row] for row in x])
    return np.asarray(values.argmax(axis=0), np.int64)


def _used_workers(worker_of: Ints) -> int:
    """How many workers hold a request, where `worker_of` (J,) has the worker of each request."""
    return len(np.unique(worker_of))


def _first_fit(u: Floats, order: Ints) -> Ints | None:
    """Each request, the largest first, goes to the first worker with enough free capacity; None if a request
    finds no such worker.
    """
    loads, worker_of = np.zeros((u.shape[0], u.shape[2])), np.zeros(u.shape[1], np.int64)
    for j in order:
        fits = np.flatnonzero((loads + u[:, j] <= 1 + TOLERANCE).all(axis=1))
        if not len(fits):
            return None
        worker_of[j] = fits[0]
        loads[fits[0]] += u[fits[0], j]
    return worker_of


def _longest_first(u: Floats, order: Ints) -> Ints:
    """Each request, the largest first, goes to the worker whose load stays lowest."""
    loads, worker_of = np.zeros((u.shape[0], u.shape[2])), np.zeros(u.shape[1], np.int64)
    for j in order:
        worker_of[j] = (loads + u[:, j]).max(axis=1).argmin()
        loads[worker_of[j]] += u[worker_of[j], j]
    return worker_of
