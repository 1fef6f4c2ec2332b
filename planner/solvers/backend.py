"""Solves linear and integer programs, given as PuLP problems or as arrays, and checks the solver's claims.

The solver is HiGHS, or CBC (bundled with PuLP) if HiGHS is missing; tests check both against OR-tools (SCIP).
Only this module knows the peculiarities of solvers:
- After a time limit PuLP's `status` still says "Optimal"; only `sol_status` shows the stop.
- PuLP's HiGHS calls an unbounded problem infeasible, and a stopped simplex a solution.
- CBC reports no bound, and calls a problem infeasible if it was stopped before it had a point.
- The value of an integer variable may be 3.9999999.

A problem with too many rows to be written term by term, or one of many that are solved in turn, is given as a
`Program` of arrays, which only HiGHS solves. (SciPy's HiGHS would also solve it, but prints to stdout when it
is stopped.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import pulp

if TYPE_CHECKING:  # Solvers take long to import, so each is imported where it is needed.
    import highspy
    from ortools.sat.python import cp_model
    from scipy.sparse import csc_matrix

Engine = Literal["highs", "cbc", "ortools"]
Status = Literal["optimal", "feasible", "infeasible", "unbounded", "unknown"]

FEASIBILITY_TOLERANCE = 1e-6  # A row may be violated by this share of its largest term.
HIGHS_HAS_POINT = 2  # HiGHS's primal_solution_status if it has a point that keeps all rows.
NO_BOUND = 1e100  # HiGHS reports a bound beyond this if it has none.
NO_OPTIONS: Mapping[str, bool | int] = MappingProxyType({})
# Options for a program with tens of columns: these preparations would take longer than solving it.
SMALL_OPTIONS: Mapping[str, bool | int] = MappingProxyType(
    {"mip_detect_symmetry": False, "mip_allow_restart": False, "mip_heuristic_run_feasibility_jump": False}
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SolverOutcome:
    """The result of a run. If `status` is "optimal" or "feasible", the problem's variables have the solution.

    No solution has a better objective than `bound`, which is None if nothing is proven. If the solution is
    optimal, `bound` is its objective, except for the gap that was allowed. `iterations` are those of HiGHS's
    simplex, a count of its work that is equal on every machine; 0 for other solvers.
    """

    status: Status
    bound: float | None
    iterations: int = 0


def run_highs(
    problem: pulp.LpProblem,
    *,
    time_limit_s: float = 30.0,
    gap_frac: float = 0.0,
    engine: Engine = "highs",
    start: bool = False,
    is_small: bool = False,
    most_nodes: int | None = None,
) -> SolverOutcome:
    """Solve a problem in place, on one thread. The status "feasible" means that the solver was stopped when
    it had a point that keeps every constraint.

    With `start` HiGHS begins with the values that integer variables already have, and ends after `most_nodes`
    nodes of its search, which gives the same answer on every machine. `is_small` is for problems with tens of
    columns, which HiGHS solves in half the time without SMALL_OPTIONS' preparations.
    """
    if engine == "highs" and not pulp.HiGHS(msg=False).available():
        engine = "cbc"
    solvers: dict[Engine, Callable[[pulp.LpProblem, float, float], SolverOutcome]] = {
        "highs": partial(_solve_with_highs, options=SMALL_OPTIONS) if is_small else _solve_with_highs,
        "cbc": _solve_with_cbc,
        "ortools": _solve_with_ortools,
    }
    if start and engine == "highs":
        nodes = NO_OPTIONS if most_nodes is None else {"mip_max_nodes": most_nodes}
        solvers["highs"] = partial(_solve_with_highs, solver=_StartedHighs, options=nodes)
    try:
        outcome = solvers[engine](problem, time_limit_s, gap_frac)
    except ValueError as error:
        # On a few programs HiGHS fails inside, with "vector::reserve"; CBC solves them.
        if engine != "highs" or "vector" not in str(error):
            raise
        outcome = _solve_with_cbc(problem, time_limit_s, gap_frac)
    except IndexError:
        # HiGHS refuses a program with coefficients of 1e15 or more; PuLP then fails to read a solution.
        return SolverOutcome("unknown", None)
    if outcome.status == "feasible" and not _keeps_constraints(problem):
        return replace(outcome, status="unknown")
    if outcome.status == "optimal" and outcome.bound is None:
        return replace(outcome, bound=pulp.value(problem.objective))
    return outcome


CP_WORK_FRAC = 0.25
"""The share of a time limit that CP-SAT may use by its own count of work, whose seconds are about as long as
real ones on an idle machine. So the clock ends a run only on a machine that is four times as slow, and
results do not depend on the machine otherwise.
"""


def cp_solver(time_limit_s: float) -> cp_model.CpSolver:
    """CP-SAT on one thread. It does not catch Ctrl-C, which would then end only CP-SAT and not the plan."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.max_deterministic_time = CP_WORK_FRAC * time_limit_s
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False
    return solver


def weighted_sum(terms: Iterable[tuple[pulp.LpVariable, float]]) -> pulp.LpAffineExpression:
    """The sum of c x over the terms (x, c), of which no two have the same variable. PuLP's products would
    make three objects for each term.
    """
    return pulp.LpAffineExpression((variable, factor) for variable, factor in terms if factor)


def whole_value(variable: pulp.LpVariable) -> int:
    """The value of an integer variable, rounded because it may be 3.9999999; 0 if it has none."""
    return round(variable.value() or 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """min cost x  with  matrix x >= least,  low <= x <= high,  and x integer where `is_integer`.

    `matrix` is sparse, (rows, columns). `low` and `high` are finite, so the program is never unbounded.
    """

    cost: Floats
    matrix: csc_matrix
    least: Floats
    low: Floats
    high: Floats
    is_integer: npt.NDArray[np.bool_]


class ProgramBuilder:
    """Builds a `Program` column by column and row by row. A variable is named by the index of its column;
    `cost` has the coefficients of the variables in the objective.
    """

    def __init__(self) -> None:
        self.cost: list[float] = []
        self._low: list[float] = []
        self._high: list[float] = []
        self._is_integer: list[bool] = []
        # The coefficients of the rows, as three lists of equal length; and the least value of each row.
        self._row: list[int] = []
        self._column: list[int] = []
        self._coefficient: list[float] = []
        self._least: list[float] = []

    def add_variable(
        self, high: float, *, low: float = 0.0, cost: float = 0.0, is_integer: bool = True
    ) -> int:
        """Add a variable from `low` to `high`; returns the number of its column."""
        self.cost.append(cost)
        self._low.append(low)
        self._high.append(high)
        self._is_integer.append(is_integer)
        return len(self.cost) - 1

    def add_row(self, coefficients: Mapping[int, float], least: float) -> None:
        """Add a row: the sum over columns of coefficient times variable is `least` or more."""
        self._row += [len(self._least)] * len(coefficients)
        self._column += list(coefficients)
        self._coefficient += list(coefficients.values())
        self._least.append(least)

    def add_any_of(self, columns: Iterable[int]) -> None:
        """Add a row: at least one of these variables, which are 0 or 1, is 1."""
        self.add_row(dict.fromkeys(columns, 1.0), 1.0)

    def to_program(self) -> Program:
        """The program with all columns and rows so far."""
        from scipy.sparse import csc_matrix

        shape = len(self._least), len(self.cost)
        entries = np.array(self._coefficient, float), (self._row, self._column)
        low, high = np.array(self._low, float), np.array(self._high, float)
        return Program(
            cost=np.array(self.cost, float),
            matrix=csc_matrix(entries, shape=shape),
            least=np.array(self._least, float),
            low=low,
            high=high,
            is_integer=np.array(self._is_integer, bool),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """The solution of a `Program`: `x` (columns,) if the status is "optimal" or "feasible", with integers
    rounded, and for a relaxation the `duals` (rows,).

    No x costs less than `bound`, which is minus infinity if nothing is proven, and infinity if no x keeps the
    rows.
    """

    status: Status
    bound: float
    x: Floats | None = None
    duals: Floats | None = None


def minimise_program(program: Program, *, time_limit_s: float = 30.0, gap_frac: float = 0.0) -> Point:
    """Solve a program on one thread, to within `gap_frac` of the optimum."""
    highs = _run_program(program, program.is_integer, time_limit_s, gap_frac)
    status, x = _status_of(highs), np.array(highs.getSolution().col_value)
    if status in ("infeasible", "unknown"):
        return Point(status, np.inf if status == "infeasible" else -np.inf)
    info = highs.getInfo()
    bound = info.mip_dual_bound if program.is_integer.any() else info.objective_function_value
    return Point(status, bound, np.where(program.is_integer, np.round(x), x))


def solve_relaxation(program: Program, *, time_limit_s: float = 30.0) -> Point:
    """Solve a program as if no variable were integer. Only an optimal result has `x` and `duals` (>= 0)."""
    highs = _run_program(program, np.zeros_like(program.is_integer), time_limit_s, 0.0)
    if (status := _status_of(highs)) != "optimal":
        return Point(status, np.inf) if status == "infeasible" else Point("unknown", -np.inf)
    solution = highs.getSolution()
    duals = np.maximum(solution.row_dual, 0.0)
    return Point("optimal", highs.getInfo().objective_function_value, np.array(solution.col_value), duals)


def _run_program(
    program: Program, is_integer: npt.NDArray[np.bool_], time_limit_s: float, gap_frac: float
) -> highspy.Highs:
    """HiGHS after its run on the program, in which the columns `is_integer` are integer."""
    import highspy
    from scipy.sparse import csc_matrix

    kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
    matrix, lp = csc_matrix(program.matrix), highspy.HighsLp()
    lp.num_row_, lp.num_col_ = matrix.shape
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = program.cost, program.low, program.high
    lp.row_lower_, lp.row_upper_ = program.least, np.full(len(program.least), highspy.kHighsInf)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
    lp.integrality_ = [kinds[k] for k in is_integer.astype(int)] if is_integer.any() else []
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("time_limit", max(time_limit_s, 0.0))
    highs.setOptionValue("mip_rel_gap", gap_frac)
    highs.passModel(lp)
    highs.run()
    return highs


def _status_of(highs: highspy.Highs) -> Status:
    """The status of a run of a `Program`, which is never unbounded. A stopped simplex has no solution, but a
    stopped search for integers may have one.
    """
    name, info = highs.getModelStatus().name, highs.getInfo()
    if name in ("kInfeasible", "kUnboundedOrInfeasible"):
        return "infeasible"
    if name == "kOptimal":
        return "optimal"
    # HiGHS counts no nodes (-1) for a program without integers.
    has_integers, has_point = info.mip_node_count >= 0, info.primal_solution_status == HIGHS_HAS_POINT
    return "feasible" if has_integers and has_point else "unknown"


class _StartedHighs(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS, which begins with the values that the integer variables already have."""

    def callSolver(self, lp: pulp.LpProblem) -> None:
        """Pass the values of the integer variables to HiGHS before it runs."""
        hinted = [variable for variable in lp.variables() if variable.cat == pulp.LpInteger]
        hinted = [variable for variable in hinted if variable.value() is not None]
        columns, values = [variable.index for variable in hinted], [variable.value() for variable in hinted]
        lp.solverModel.setSolution(len(hinted), np.array(columns, np.int32), np.array(values, float))
        super().callSolver(lp)

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:
        """PuLP's status of a solution, also for a search that ends by its number of nodes. PuLP has no status
        for that: it sets the values of the variables, and then raises KeyError.
        """
        if lp.solverModel.getModelStatus().name != "kSolutionLimit":
            return tuple(super().findSolutionValues(lp))
        with suppress(KeyError):
            super().findSolutionValues(lp)
        if lp.solverModel.getInfo().primal_solution_status == HIGHS_HAS_POINT:
            return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible
        return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound


def _solve_with_highs(
    problem: pulp.LpProblem,
    time_limit_s: float,
    gap_frac: float,
    solver: type[pulp.HiGHS] = pulp.HiGHS,
    options: Mapping[str, bool | int] = NO_OPTIONS,
) -> SolverOutcome:
    """Solve with HiGHS. Without integer variables HiGHS reports no bound, which only matters if it is
    stopped.
    """
    problem.solve(solver(msg=False, timeLimit=time_limit_s, threads=1, gapRel=gap_frac, **options))
    highs = problem.solverModel
    name = highs.getModelStatus().name
    if name == "kUnboundedOrInfeasible":
        return _unbounded_or_infeasible(problem, time_limit_s, "highs")
    bound = None
    if any(variable.cat == pulp.LpInteger for variable in problem.variables()):
        sign = -1 if problem.sense == pulp.LpMaximize else 1
        mip_bound = sign * highs.getInfo().mip_dual_bound + problem.objective.constant
        bound = mip_bound if abs(mip_bound) < NO_BOUND else None
    iterations = max(highs.getInfo().simplex_iteration_count, 0)  # -1 if presolve was enough.
    return SolverOutcome(_status(problem, is_unbounded=name == "kUnbounded"), bound, iterations)


def _solve_with_cbc(problem: pulp.LpProblem, time_limit_s: float, gap_frac: float) -> SolverOutcome:
    """Solve with CBC, which reports no bound."""
    path = pulp.PULP_CBC_CMD.pulp_cbc_path
    began_s = time.monotonic()
    problem.solve(pulp.COIN_CMD(path=path, msg=False, timeLimit=time_limit_s, threads=1, gapRel=gap_frac))
    status = _status(problem, is_unbounded=problem.status == pulp.LpStatusUnbounded)
    if status == "infeasible" and time.monotonic() - began_s >= time_limit_s:
        status = "unknown"  # CBC reports this too if it was stopped before it had a point.
    return SolverOutcome(status, None)


def _status(problem: pulp.LpProblem, *, is_unbounded: bool) -> Status:
    """The status of a PuLP problem after a run."""
    if is_unbounded:
        return "unbounded"
    if problem.sol_status == pulp.LpSolutionOptimal:
        return "optimal"
    if problem.sol_status == pulp.LpSolutionIntegerFeasible:
        return "feasible"
    return "infeasible" if problem.status == pulp.LpStatusInfeasible else "unknown"


def _solve_with_ortools(problem: pulp.LpProblem, time_limit_s: float, gap_frac: float) -> SolverOutcome:
    """Solve a PuLP problem with SCIP by OR-tools, for tests."""
    from ortools.linear_solver.python import model_builder

    model, infinity = model_builder.Model(), float("inf")
    variables = problem.variables()
    columns = {
        variable.name: model.new_var(
            -infinity if variable.lowBound is None else variable.lowBound,
            infinity if variable.upBound is None else variable.upBound,
            variable.cat == pulp.LpInteger,
            variable.name,
        )
        for variable in variables
    }

    def linear_expression(terms: pulp.LpAffineExpression) -> model_builder.LinearExpr:
        return model_builder.LinearExpr.weighted_sum(
            [columns[variable.name] for variable in terms], list(terms.values())
        )

    for row in problem.constraints():
        low, high = row.getLb(), row.getUb()
        model.add_linear_constraint(
            linear_expression(row), -infinity if low is None else low, infinity if high is None else high
        )
    objective = linear_expression(problem.objective) + problem.objective.constant
    if problem.sense == pulp.LpMaximize:
        model.maximize(objective)
    else:
        model.minimize(objective)
    solver = model_builder.Solver("scip")
    solver.set_time_limit_in_seconds(time_limit_s)
    solver.set_solver_specific_parameters(f"limits/gap = {gap_frac:g}")
    status = solver.solve(model)
    if status in (model_builder.SolveStatus.OPTIMAL, model_builder.SolveStatus.FEASIBLE):
        problem.assignVarsVals(
            {variable.name: solver.value(columns[variable.name]) for variable in variables}
        )
        is_optimal = status == model_builder.SolveStatus.OPTIMAL
        return SolverOutcome("optimal" if is_optimal else "feasible", solver.best_objective_bound)
    if status == model_builder.SolveStatus.INFEASIBLE:
        return SolverOutcome("infeasible", None)
    if status == model_builder.SolveStatus.UNBOUNDED:
        return _unbounded_or_infeasible(problem, time_limit_s, "ortools")
    return SolverOutcome("unknown", None)


def _unbounded_or_infeasible(problem: pulp.LpProblem, time_limit_s: float, engine: Engine) -> SolverOutcome:
    """Decide whether a problem is unbounded or infeasible, which a solver's presolve leaves open: without its
    objective, an unbounded problem has a solution.
    """
    objective, sense = problem.objective, problem.sense
    problem.setObjective(pulp.LpAffineExpression())
    status = run_highs(problem, time_limit_s=time_limit_s, engine=engine).status
    problem.setObjective(objective)
    problem.sense = sense
    with_objective: dict[Status, Status] = {
        "optimal": "unbounded",
        "feasible": "unbounded",
        "infeasible": "infeasible",
    }
    return SolverOutcome(with_objective.get(status, "unknown"), None)


def _keeps_constraints(problem: pulp.LpProblem) -> bool:
    """Whether the values of the variables keep all constraints, which those of a stopped solver may not."""
    for variable in problem.variables():
        value = variable.value()
        if value is None or not variable.valid(FEASIBILITY_TOLERANCE * max(1.0, abs(value))):
            return False
    for row in problem.constraints():
        largest = max([1.0, *(abs(factor * variable.value()) for variable, factor in row.items())])
        if not row.valid(FEASIBILITY_TOLERANCE * largest):
            return False
    return True
