"""Chooses one fleet for each of several LLMs within limits that they share: the multiple-choice knapsack
problem.

Sets   i  group (an LLM)      f  choice of a group (a fleet of that LLM)       y  limit
Data   w_f   weight           a_yf  how much f uses of limit y                 A_y  amount of limit y
       S      stock of GPUs, from which nodes of kinds k are taken whole, with g_k GPUs each
       b_rf   what f takes of nodes in row r of k; B_r what one node has (solvers/whole_nodes.py)
       c_k    weight of a node
Vars   x_f in {0, 1}  whether f is chosen;   m_k integer >= 0  nodes

  min   sum_f w_f x_f + sum_k c_k m_k
  s.t.  one_i     sum_{f of i} x_f = 1          for all i
        limit_y   sum_f a_yf x_f <= A_y         for all y
        packed_r  sum_f b_rf x_f <= B_r m_k     for all rows r of k
        stock_S   sum_k g_k m_k + GPUs that the chosen f take singly <= S
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from planner.errors import PlannerError
from planner.solvers.backend import run_highs, weighted_sum

SOLVER_S = 20.0  # The solver's time limit; instances of a few LLMs take well under a second.


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """One choice f of a group: its weight w_f, and in `uses` its a_yf and b_rf. The caller numbers limits y
    and rows r together; these numbers are the indices into `uses`.
    """

    weight: float
    uses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NodesOfKind:
    """Nodes of `gpus` GPUs and a weight c_k. `rows` are pairs: the index of b_rf in `GroupChoice.uses`, and
    B_r. The first row counts GPUs.
    """

    gpus: int
    rows: tuple[tuple[int, int], ...]
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeStock:
    """A stock of `amount` GPUs, which may be infinite. `singly_index` is where `GroupChoice.uses` counts the
    GPUs that are taken singly.
    """

    amount: float
    singly_index: int
    kinds: tuple[NodesOfKind, ...]


def choose_within_limits(
    groups: Sequence[Sequence[GroupChoice]], amounts: Sequence[float], stocks: Sequence[NodeStock] = ()
) -> tuple[list[int] | None, float]:
    """The index of the chosen fleet in each group, None if no combination is within the limits; and a lower
    bound on the total weight of every combination within them. Raises PlannerError if the solver finds
    nothing within SOLVER_S.
    """
    problem = pulp.LpProblem("multiple_choice", pulp.LpMinimize)
    variables = [
        [problem.add_variable(f"x_{i}_{f}", 0, 1, cat="Integer") for f in range(len(group))]
        for i, group in enumerate(groups)
    ]
    choices = [
        (choice, x_f)
        for group, x_i in zip(groups, variables, strict=True)
        for choice, x_f in zip(group, x_i, strict=True)
    ]
    weight = weighted_sum((x_f, choice.weight) for choice, x_f in choices)
    for i, x_i in enumerate(variables):
        problem += pulp.lpSum(x_i) == 1, f"one_{i}"

    def used(index: int) -> pulp.LpAffineExpression:
        return weighted_sum((x_f, choice.uses[index]) for choice, x_f in choices)

    for y, amount in enumerate(amounts):
        if amount < math.inf:
            problem += used(y) <= amount, f"limit_{y}"
    for s, stock in enumerate(stocks):
        taken = used(stock.singly_index)
        for k, kind in enumerate(stock.kinds):
            nodes = problem.add_variable(f"m_{s}_{k}", 0, cat="Integer")
            taken, weight = taken + kind.gpus * nodes, weight + kind.weight * nodes
            for r, per_node in kind.rows:
                problem += used(r) <= per_node * nodes, f"packed_{r}"
        if stock.amount < math.inf:
            problem += taken <= stock.amount, f"stock_{s}"
    problem += weight, "weight"
    outcome = run_highs(problem, time_limit_s=SOLVER_S)
    if outcome.status == "infeasible":
        return None, math.inf
    if outcome.status not in ("optimal", "feasible"):
        raise PlannerError(f"the solver chose no fleets for several LLMs in {SOLVER_S:g} s")
    # The solver's x_f are 0 or 1 only up to rounding, so the choice of a group is its largest x_f.
    chosen = []
    for x_i in variables:
        values = [x_f.value() or 0.0 for x_f in x_i]
        chosen.append(values.index(max(values)))
    return chosen, -math.inf if outcome.bound is None else outcome.bound
