"""Finds the cheapest mix of workers that serves the traffic, if the rates that each type sustains are known.

A bucket is the requests of similar prompt and output lengths.

Sets   i  request bucket      j  worker type
Data   r_i   arrival rate of bucket i                                          [requests/s]
       k_ij  rate that one worker of j sustains on i within the SLO, 0 if none  [requests/s]
       c_j   price of one worker of j                                          [USD/h]
       s_j   how many workers of j there are (None: unlimited);   f  slices per bucket (None: any share)
Vars   x_ij in [0, 1] share of bucket i sent to j, a multiple of 1/f if f is given;   n_j integer >= 0

  min   sum_j c_j n_j
  s.t.  served_i     sum_j x_ij = 1
        capacity_j   sum_i (r_i / k_ij) x_ij <= n_j
        stock_j      n_j <= s_j

After Griggs et al. 2024 (Mélange, arXiv:2404.14527). There each bucket has f equal slices with a binary
variable each; here identical slices are merged into one integer. With f None any split is allowed, so the
answer is no dearer than with any f. A type is left out if another type with unlimited stock costs no more and
sustains no less. The loads of buckets on a worker add up linearly, and workers may be fully busy, so the k_ij
must already allow for queueing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pulp

from planner.domain import ROUNDING
from planner.errors import InfeasibleError, PlannerError
from planner.solvers.backend import SolverOutcome, run_highs, whole_value

Floats = npt.NDArray[np.float64]

SMALLEST_SHARE = 1e-9  # Smaller shares of a bucket are the solver's rounding errors.


@dataclass(frozen=True, slots=True)
class AllocationInstance:
    """The data of the model above. `rate_rps` (I,) is r, `sustained_rps` (I, J) is k, 0 where a type cannot
    serve a bucket, `price_usd_per_h` (J,) is c, `stock` (J,) is s and `slice_factor` is f.
    """

    buckets: tuple[str, ...]
    types: tuple[str, ...]
    rate_rps: Floats
    sustained_rps: Floats
    price_usd_per_h: Floats
    stock: tuple[int | None, ...]
    slice_factor: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer: `counts` is n, the workers of each type, and `share` (I, J) is x, the share of each bucket
    that each type serves. No mix is cheaper than `bound_usd_per_h`. The answer `is_optimal` if its cost is no
    higher than this bound.
    """

    counts: tuple[int, ...]
    share: Floats
    cost_usd_per_h: float
    bound_usd_per_h: float
    is_optimal: bool


def allocate(instance: AllocationInstance, *, time_limit_s: float = 60.0) -> Allocation:
    """Solve the model above. If the time limit ends the solver first, the answer serves the traffic, but
    `is_optimal` may be False.

    Raises InfeasibleError of kind "latency" for a bucket that no type serves, of kind "capacity" if the stock
    is too small; PlannerError if no answer was found in time.
    """
    r, k = instance.rate_rps, instance.sustained_rps
    unserved = np.flatnonzero((r > 0) & ~(k > 0).any(axis=1))
    if len(unserved):
        bucket = instance.buckets[unserved[0]]
        raise InfeasibleError(
            f"no worker type serves bucket {bucket!r}: all {len(instance.types)} have rate 0; relax its SLO, "
            "or add a type that holds it",
            kind="latency",
            constraint=f"bucket {bucket}",
            relaxation="an SLO or a type with which some worker serves it",
        )
    problem, n, x = _formulate(instance)
    outcome = run_highs(problem, time_limit_s=time_limit_s)
    if outcome.status == "infeasible":
        raise _stock_error(instance, time_limit_s)
    if outcome.status == "optimal":
        return _allocation(instance, n, x, outcome)
    # The time ended first. The relaxation (the model without whole numbers) gives a bound; if the solver
    # found no counts, those of the relaxation are rounded up below.
    relaxed, relaxed_n, relaxed_x = _formulate(instance, is_integer=False)
    relaxation = run_highs(relaxed)
    if relaxation.status == "infeasible":
        raise _stock_error(instance, time_limit_s)
    if outcome.bound is None or (relaxation.bound or 0.0) > outcome.bound:
        outcome = SolverOutcome(outcome.status, relaxation.bound)  # The higher bound of the two.
    if outcome.status == "feasible":
        return _allocation(instance, n, x, outcome)
    if relaxation.status != "optimal" or instance.slice_factor is not None:
        raise PlannerError(f"no allocation was found in {time_limit_s:g} s; allow more with --time-limit")
    # Rounded up, the counts of the relaxation still serve the traffic. They stay within the stock, which is a
    # whole number. Without slices (tested above) shares need not be whole.
    for variable in relaxed_n:
        variable.varValue = float(np.ceil(variable.value() - ROUNDING))
    return _allocation(instance, relaxed_n, relaxed_x, outcome)


Shares = dict[tuple[int, int], pulp.LpVariable]
"""The variables by (i, j): f x_ij, so that slices are whole numbers, or x_ij without f."""


def _formulate(
    instance: AllocationInstance, *, is_integer: bool = True, may_exceed_stock: bool = False
) -> tuple[pulp.LpProblem, list[pulp.LpVariable], Shares]:
    """The model, its variables n_j, and its Shares. Without `is_integer` counts and slices need not be whole.
    With `may_exceed_stock` it minimises the workers beyond the stock (variables e_j) in place of the cost.
    """
    r, k, c, f = instance.rate_rps, instance.sustained_rps, instance.price_usd_per_h, instance.slice_factor
    buckets, types = np.flatnonzero(r > 0).tolist(), range(len(c))
    category = "Integer" if is_integer else "Continuous"
    if may_exceed_stock:
        is_used = np.ones(len(c), bool)
        most: list[int | None] = [None] * len(c)
    else:
        is_used = _undominated(instance)
        most = [instance.stock[j] if is_used[j] else 0 for j in types]

    problem = pulp.LpProblem("allocation", pulp.LpMinimize)
    n = [problem.add_variable(f"n_{j}", 0, most[j], cat=category) for j in types]
    x = {
        (i, j): problem.add_variable(f"x_{i}_{j}", 0, f or 1, cat=category if f else "Continuous")
        for i in buckets
        for j in types
        if k[i, j] > 0 and is_used[j]
    }
    if may_exceed_stock:
        e = {
            j: problem.add_variable(f"e_{j}", 0, cat=category) for j in types if instance.stock[j] is not None
        }
        problem += pulp.lpSum(e.values()), "beyond_stock"
        for j, e_j in e.items():
            problem += n[j] - e_j <= instance.stock[j], f"stock_{j}"
    else:
        problem += pulp.lpSum(c[j] * n[j] for j in types), "cost"
    for i in buckets:
        problem += pulp.lpSum(x[i, j] for j in types if (i, j) in x) == (f or 1), f"served_{i}"
    for j in types:
        load = pulp.lpSum(r[i] / k[i, j] / (f or 1) * x[i, j] for i in buckets if (i, j) in x)
        problem += load - n[j] <= 0, f"capacity_{j}"
    return problem, n, x


def _undominated(instance: AllocationInstance) -> npt.NDArray[np.bool_]:
    """Whether each type (J,) is worth using: no other type with unlimited stock serves as much at the same
    price or less. The first of equal types is worth using.
    """
    k, c = instance.sustained_rps, instance.price_usd_per_h
    is_used = np.ones(len(c), bool)
    for j in range(len(c)):
        for other in range(len(c)):
            if other == j or not is_used[other] or instance.stock[other] is not None:
                continue
            if c[other] <= c[j] and (k[:, other] >= k[:, j]).all():
                is_used[j] = False
                break
    return is_used


def _allocation(
    instance: AllocationInstance, n: list[pulp.LpVariable], x: Shares, outcome: SolverOutcome
) -> Allocation:
    """The solution in the variables, without the solver's rounding."""
    counts = tuple(whole_value(n_j) for n_j in n)
    share = np.zeros(instance.sustained_rps.shape)
    for (i, j), x_ij in x.items():
        value = x_ij.value() or 0.0
        share[i, j] = round(value) / instance.slice_factor if instance.slice_factor else max(value, 0.0)
    share[share < SMALLEST_SHARE] = 0.0
    total = share.sum(axis=1, keepdims=True)
    share = np.divide(share, total, out=share, where=total > 0)
    cost = float(np.dot(counts, instance.price_usd_per_h))
    is_optimal = outcome.status == "optimal"
    bound = cost if is_optimal else min(cost, max(outcome.bound or 0.0, 0.0))
    return Allocation(counts, share, cost, bound, is_optimal or bound >= cost * (1 - ROUNDING))


def _stock_error(instance: AllocationInstance, time_limit_s: float) -> PlannerError:
    """The error that the stock is too small, with the fewest workers of each type that are missing."""
    problem, _, _ = _formulate(instance, may_exceed_stock=True)
    outcome = run_highs(problem, time_limit_s=time_limit_s)
    if outcome.status not in ("optimal", "feasible"):
        return PlannerError(
            f"the stock is too small, and {time_limit_s:g} s did not suffice to say by how much"
        )
    values = problem.variablesDict()
    missing = {j: whole_value(values[f"e_{j}"]) for j in range(len(instance.types)) if f"e_{j}" in values}
    short = [j for j, count in missing.items() if count]
    names = ", ".join(f"{instance.types[j]} ({instance.stock[j]})" for j in short)
    more = " and ".join(f"{missing[j]} more of {instance.types[j]}" for j in short)
    fewest = "the fewest" if outcome.status == "optimal" else "enough"
    return InfeasibleError(
        f"the stock of {names} does not carry the traffic; {more} would ({fewest} workers that do)",
        kind="capacity",
        constraint="stock of " + ", ".join(instance.types[j] for j in short),
        relaxation=more,
    )
