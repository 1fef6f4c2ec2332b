"""Fleets to which no worker can be added, against every count one by one."""

import itertools
from dataclasses import replace

import pytest
from random_questions import question

from planner.search.level0 import filling
from planner.search.level0.filling import list_filled_fleets
from planner.search.oracle.fleet_counts import objective_of
from planner.search.problem.build_problem import build_problem
from planner.search.problem.options import decode_options, mixed_options, prefill_options
from planner.solvers.master import FleetLimits, Option


def of(counts: tuple[int, ...], options: list[Option]) -> list[tuple[Option, int]]:
    return [(option, n) for option, n in zip(options, counts, strict=True) if n]


def serves(counts: tuple[int, ...], options: list[Option]) -> bool:
    roles = {option.role for option, _ in of(counts, options)}
    return bool(roles) and ("prefill" in roles) == ("decode" in roles)


@pytest.mark.long
@pytest.mark.parametrize("seed", (3, 42))
@pytest.mark.parametrize("budget_usd_per_h", (None, 30.0))
def test_they_are_those_that_no_worker_of_their_last_type_fits_into(
    seed: int, budget_usd_per_h: float | None
) -> None:
    """By counting: fleets of up to three of six options, where no count is above twelve."""
    asked = question(seed)
    problem = build_problem(asked.task, asked.trace, asked.catalog)
    makes = (mixed_options, prefill_options, decode_options)
    options = [option for make in makes for option in make(problem.types, "cost")[:2]]
    limits = replace(problem.limits, cost_usd_per_h=budget_usd_per_h)
    value = 5.5 * max(objective_of([(option, 1)]) for option in options) / 2

    def fits(counts: tuple[int, ...], limits: FleetLimits = limits) -> bool:
        fleet = of(counts, options)
        within = limits.first_exceeded([(option.type, n) for option, n in fleet]) is None
        return within and objective_of(fleet) < value * (1 - 1e-9)

    found = {tuple(vector) for vector in list_filled_fleets(options, limits, value, 3).tolist()}
    assert len(found) < 4_000 and max(map(max, found)) <= 12
    expected = set()
    of_size = (itertools.combinations(range(len(options)), size) for size in (1, 2, 3))
    for used in itertools.chain(*of_size):
        for numbers in itertools.product(range(1, 13), repeat=len(used)):
            counts = tuple(dict(zip(used, numbers, strict=True)).get(k, 0) for k in range(len(options)))
            more = tuple(n + (k == used[-1]) for k, n in enumerate(counts))
            if serves(counts, options) and fits(counts) and not fits(more):
                expected.add(counts)
    assert found == expected


@pytest.mark.parametrize("at_once", [1, 7, 20_000])
def test_sets_of_options_are_made_in_order_however_many_at_once(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(filling, "MOST_SUBSETS", at_once)
    for n, size in itertools.product(range(7), range(4)):
        rows = [row for array in filling._subsets(n, size) for row in map(tuple, array.tolist())]
        assert rows == [*itertools.combinations(range(n), size)]
