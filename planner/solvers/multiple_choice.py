"""Chooses one fleet for each of several LLMs within limits that they share: the multiple-choice knapsack
problem.

Sets   i  group (an LLM)      f  choice of a group (a fleet of that LLM)       y  limit
Data   w_f   weight           a_yf  how much f uses of limit y                 A_y  amount of limit y
Vars   x_f in {0, 1}  whether f is chosen

  min   sum_f w_f x_f
  s.t.  one_i     sum_{f of i} x_f = 1          for all i
        limit_y   sum_f a_yf x_f <= A_y         for all y
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from planner.errors import PlannerError
from planner.solvers.backend import run_highs

SOLVER_S = 20.0  # The solver's time limit; instances of a few LLMs take well under a second.


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """One choice f of a group: its weight w_f, and its `uses` a_yf of each limit y."""

    weight: float
    uses: tuple[float, ...]


def choose_within_limits(
    groups: Sequence[Sequence[GroupChoice]], amounts: Sequence[float]
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
    problem += pulp.lpSum(choice.weight * x_f for choice, x_f in choices), "weight"
    for i, x_i in enumerate(variables):
        problem += pulp.lpSum(x_i) == 1, f"one_{i}"
    for y, amount in enumerate(amounts):
        used = pulp.lpSum(choice.uses[y] * x_f for choice, x_f in choices if choice.uses[y])
        problem += used <= amount, f"limit_{y}"
    outcome = run_highs(problem, time_limit_s=SOLVER_S)
    if outcome.status == "infeasible":
        return None, math.inf
    if outcome.status not in ("optimal", "feasible"):
        raise PlannerError(f"the solver chose no fleets for several LLMs in {SOLVER_S:g} s")
    # The solver's x_f are 0 and 1 up to rounding: the largest of a group is the chosen one.
    chosen = []
    for x_i in variables:
        values = [x_f.value() or 0.0 for x_f in x_i]
        chosen.append(values.index(max(values)))
    return chosen, -math.inf if outcome.bound is None else outcome.bound
