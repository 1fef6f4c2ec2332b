"""Run a PuLP problem on HiGHS (CBC where HiGHS is missing) and say honestly what came back.

Habits of solvers that live here and nowhere else: after a time limit PuLP's `status` still says "Optimal"
(only `sol_status` tells), and integers come back as 3.9999999.
"""

from __future__ import annotations

import pulp

from planner.errors import PlannerError


def solve(problem: pulp.LpProblem, *, time_limit_s: float = 30.0, gap_frac: float = 0.0) -> bool | None:
    """Solve in place. True: optimal to `gap_frac`; False: stopped with a feasible point; None: infeasible."""
    solver = pulp.HiGHS(msg=False, timeLimit=time_limit_s, threads=1, gapRel=gap_frac)
    if not solver.available():
        solver = pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_s, threads=1, gapRel=gap_frac)
    problem.solve(solver)
    if problem.sol_status == pulp.LpSolutionOptimal:
        return True
    if problem.sol_status == pulp.LpSolutionIntegerFeasible:
        return False
    if problem.status in (pulp.LpStatusInfeasible, pulp.LpStatusUndefined):
        return None
    raise PlannerError(
        f"the solver gave no answer to {problem.name!r} in {time_limit_s:g} s "
        f"({pulp.LpStatus[problem.status]}); allow it more time"
    )


def whole(variable: pulp.LpVariable) -> int:
    """The value of an integer variable."""
    return round(variable.value() or 0.0)
