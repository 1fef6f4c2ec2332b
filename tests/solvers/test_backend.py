"""What is claimed about a solver's run: optimum, bound, no solution, no optimum, or nothing."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pulp
import pytest
from scipy.sparse import csr_matrix

from planner.solvers import backend
from planner.solvers.backend import Engine, Program, minimise_program, run_highs, whole_value

ENGINES: tuple[Engine, ...] = ("highs", "cbc", "ortools")


def knapsack(rng: np.random.Generator, sense: int = pulp.LpMaximize) -> tuple[pulp.LpProblem, float]:
    """Five integers of 0 to 2 under two rows, and its optimum by enumeration."""
    value, weights = rng.integers(1, 20, 5), rng.integers(1, 9, (2, 5))
    room = weights.sum(axis=1)
    problem = pulp.LpProblem("knapsack", sense)
    x = [problem.add_variable(f"x_{i}", 0, 2, cat="Integer") for i in range(5)]
    problem += pulp.lpSum(int(v) * x_i for v, x_i in zip(value, x, strict=True)) + 3
    values = []
    for row, most in zip(weights, room, strict=True):
        load = pulp.lpSum(int(w) * x_i for w, x_i in zip(row, x, strict=True))
        problem += load <= int(most) if sense == pulp.LpMaximize else load >= int(most)
    for counts in itertools.product(range(3), repeat=5):
        loads = weights @ counts
        if (loads <= room).all() if sense == pulp.LpMaximize else (loads >= room).all():
            values.append(float(value @ counts) + 3)
    return problem, max(values) if sense == pulp.LpMaximize else min(values)


def hard_cover() -> pulp.LpProblem:
    """Sixty binaries under forty covering rows: no proof in a tenth of a second."""
    rng = random.Random(1)
    problem = pulp.LpProblem("cover")
    x = [problem.add_variable(f"x_{i}", 0, 1, cat="Integer") for i in range(60)]
    problem += pulp.lpSum((10 + rng.random()) * x_i for x_i in x)
    for _ in range(40):
        problem += pulp.lpSum(rng.randint(1, 99) * x_i for x_i in x) >= 1500
    return problem


def unbounded(category: str) -> pulp.LpProblem:
    problem = pulp.LpProblem("unbounded", pulp.LpMaximize)
    x, y = problem.add_variable("x", 0, cat=category), problem.add_variable("y", 0)
    problem += x + y
    problem += x - y <= 1
    return problem


def test_cp_sat_leaves_interrupts_to_python() -> None:
    """It stops at Ctrl-C as at its time limit, says nothing, and the command would go on."""
    assert not backend.cp_solver(1.0).parameters.catch_sigint_signal


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sense", [pulp.LpMaximize, pulp.LpMinimize])
def test_optimum_and_bound_are_those_of_enumeration(engine: Engine, sense: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        problem, best = knapsack(rng, sense)
        outcome = run_highs(problem, engine=engine)
        assert outcome.status == "optimal" and outcome.bound == pytest.approx(best)
        assert pulp.value(problem.objective) == pytest.approx(best)
        assert all(abs(whole_value(x) - x.value()) < 1e-6 for x in problem.variables())


def test_whole_beside_continuous_columns() -> None:
    """x + z >= 4.5 with a whole z: x costs 2 and z 3, so x alone costs 9. HiGHS 1.14 says 15, by z = 5."""
    problem = pulp.LpProblem("mixed")
    x, z = problem.add_variable("x", 0, 10), problem.add_variable("z", 0, 10, cat="Integer")
    problem += 2 * x + 3 * z
    problem += x + z >= 4.5
    outcome = run_highs(problem)
    assert outcome.status == "optimal" and outcome.bound == pytest.approx(9.0)
    assert pulp.value(problem.objective) == pytest.approx(9.0)


def test_a_program_that_highs_refuses_is_not_solved() -> None:
    """A price of 1e17 USD/h ended in PuLP's IndexError: HiGHS takes no coefficients of 1e15 or more."""
    problem = pulp.LpProblem("refused")
    x = problem.add_variable("x", 0)
    problem += x
    problem += 1e17 * x >= 1
    assert run_highs(problem).status == "unknown"


@pytest.mark.parametrize("seed", range(60))
def test_programs_of_both_kinds_of_columns_cost_what_scip_says(seed: int) -> None:
    """Small random programs, as PuLP problems and as arrays; SCIP solves them too."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(1, 8), rng.integers(2, 12)
    matrix = np.where(rng.random((rows, columns)) < 0.5, rng.uniform(-3, 5, (rows, columns)).round(1), 0.0)
    cost, least = rng.uniform(0, 5, columns).round(2), rng.uniform(-5, 10, rows).round(1)
    high, is_integer = rng.integers(1, 20, columns).astype(float), rng.random(columns) < 0.6

    def solved_by(engine: Engine) -> tuple[str, float | None]:
        problem = pulp.LpProblem("both")
        x = [
            problem.add_variable(f"x_{j}", 0, high[j], cat="Integer" if is_integer[j] else "Continuous")
            for j in range(columns)
        ]
        problem += pulp.lpSum(cost[j] * x[j] for j in range(columns))
        for i in range(rows):
            problem += pulp.lpSum(matrix[i, j] * x[j] for j in range(columns)) >= least[i]
        outcome = run_highs(problem, engine=engine)
        return outcome.status, pulp.value(problem.objective) if outcome.status == "optimal" else None

    status, value = solved_by("ortools")
    point = minimise_program(Program(cost, csr_matrix(matrix), least, np.zeros(columns), high, is_integer))
    assert solved_by("highs") == (status, None if value is None else pytest.approx(value, abs=1e-5))
    assert point.status == status
    assert value is None or point.bound == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_integer_between_is_infeasible(engine: Engine) -> None:
    """2 x = 1."""
    problem = pulp.LpProblem("odd")
    x = problem.add_variable("x", 0, 1, cat="Integer")
    problem += x
    problem += 2 * x == 1
    assert run_highs(problem, engine=engine).status == "infeasible"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("category", ["Integer", "Continuous"])
def test_a_missing_limit_is_not_called_infeasible(engine: Engine, category: str) -> None:
    assert run_highs(unbounded(category), engine=engine).status == "unbounded"


@pytest.mark.parametrize("engine", ENGINES)
def test_infeasible_and_without_a_limit_is_infeasible(engine: Engine) -> None:
    problem = pulp.LpProblem("neither")
    x, y = problem.add_variable("x", 0, 1), problem.add_variable("y")
    problem += y
    problem += x >= 2
    assert run_highs(problem, engine=engine).status == "infeasible"
    assert problem.sense == pulp.LpMinimize and "y" in str(problem.objective)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stopped_run_keeps_its_constraints_and_its_bound_below(engine: Engine) -> None:
    problem = hard_cover()
    outcome = run_highs(problem, time_limit_s=0.1, engine=engine)
    assert outcome.status in ("feasible", "unknown")
    if outcome.status == "feasible":
        assert all(row.valid(1e-6) for row in problem.constraints())
        assert outcome.bound is None or outcome.bound <= pulp.value(problem.objective)


def test_what_a_stopped_solver_left_behind_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that says "stopped with a solution" but leaves half an integer, or a broken row, has none."""
    problem, _ = knapsack(np.random.default_rng(0))
    left_behind = {
        "half": ([0.5, 0, 0, 0, 0], "unknown"),
        "broken": ([2.0] * 5, "unknown"),
        "whole": ([0.0] * 5, "feasible"),
    }
    for values, status in left_behind.values():

        def stopped(
            given: pulp.LpProblem, time_limit_s: float, gap_frac: float, left: list[float] = values
        ) -> backend.SolverOutcome:
            for variable, value in zip(given.variables(), left, strict=True):
                variable.varValue = value
            return backend.SolverOutcome("feasible", 100.0)

        monkeypatch.setattr(backend, "_solve_with_highs", stopped)
        assert run_highs(problem) == backend.SolverOutcome(status, 100.0)  # type: ignore[arg-type]


def test_cbc_stands_in_where_highs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.HiGHS, "available", lambda _: False)
    problem, best = knapsack(np.random.default_rng(4))
    assert run_highs(problem).status == "optimal"
    assert pulp.value(problem.objective) == pytest.approx(best)
