"""One of each group, within limits that all groups share: the multiple-choice knapsack problem.

Sets   i  group (an LLM)      f  what it may take (counts of its workers)      y  limit
Data   w_f   weight           a_yf  what f takes of limit y                    A_y  what there is
Vars   x_f in {0, 1}  f is taken

  min   sum_f w_f x_f
  s.t.  one_i     sum_{f of i} x_f = 1          for all i
        limit_y   sum_f a_yf x_f <= A_y         for all y
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from planner.errors import PlannerError
from planner.solvers.backend import run_highs


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """One thing that a group may take: w_f, and a_yf of each limit."""

    weight: float
    uses: tuple[float, ...]


SOLVER_S = 20.0  # The time limit of the solver.


def choose(
    groups: Sequence[Sequence[GroupChoice]], amounts: Sequence[float]
) -> tuple[list[int] | None, float]:
    """The taken index of each group, None if no choice is within the limits; and a lower bound on the weight
    of every choice. Raises PlannerError where the solver finds nothing within SOLVER_S.
    """
    problem = pulp.LpProblem("multiple_choice", pulp.LpMinimize)
    x = [
        [problem.add_variable(f"x_{i}_{f}", 0, 1, cat="Integer") for f in range(len(group))]
        for i, group in enumerate(groups)
    ]
    flat = [
        (choice, x_f)
        for group, x_i in zip(groups, x, strict=True)
        for choice, x_f in zip(group, x_i, strict=True)
    ]
    problem += pulp.lpSum(choice.weight * x_f for choice, x_f in flat), "weight"
    for i, x_i in enumerate(x):
        problem += pulp.lpSum(x_i) == 1, f"one_{i}"
    for y, amount in enumerate(amounts):
        used = pulp.lpSum(choice.uses[y] * x_f for choice, x_f in flat if choice.uses[y])
        problem += used <= amount, f"limit_{y}"
    outcome = run_highs(problem, time_limit_s=SOLVER_S)
    if outcome.status == "infeasible":
        return None, math.inf
    if outcome.status not in ("optimal", "feasible"):
        raise PlannerError(
            f"the solver gave no answer to the master problem of several LLMs in {SOLVER_S:g} s"
        )
    taken = [max(range(len(x_i)), key=lambda f, x_i=x_i: x_i[f].value() or 0.0) for x_i in x]  # type: ignore[misc]
    return taken, -math.inf if outcome.bound is None else outcome.bound
