"""Fleets of several types: what is proposed, and what the search beyond level 0 finds among all there are."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from random_questions import question

from planner.search.level0.filling import list_filled_fleets
from planner.search.level0.level0_search import search_level0
from planner.search.mixed import mixed_fleets
from planner.search.mixed.mixed_fleets import search_mixed_fleets
from planner.search.mixed.mixtures import CandidateFleets, improve_nearby
from planner.search.oracle.fleet_counts import Counts, in_order, names_of, objective_of
from planner.search.oracle.verdict_cache import VerdictCache
from planner.search.oracle.work_clock import now_s
from planner.search.problem.build_problem import build_problem
from planner.search.problem.options import decode_options, mixed_options, prefill_options
from planner.search.problem.plan_problem import Problem, with_policies
from planner.solvers.master import FleetLimits, Option

OPTIMA = {42: 9.54, 395: 10.10, 946: 6.53}  # USD/h by seed: all cheaper fleets fail (benchmarks/mixes.py)


def posed(seed: int) -> Problem:
    asked = question(seed)
    problem = build_problem(asked.task, asked.trace, asked.catalog)
    return with_policies(problem, asked.task.policy_choices()[0])


def problem_options(problem: Problem) -> list[Option]:
    makes = (mixed_options, prefill_options, decode_options)
    return [option for make in makes for option in make(problem.types, "cost")]


@pytest.mark.parametrize(("seed", "optimum"), OPTIMA.items())
def test_finds_the_cheapest_fleet_of_any_mix(seed: int, optimum: float) -> None:
    """It mixes TP degrees or roles; over 1000 fleets cost less than that of level 0."""
    problem = posed(seed)
    level0 = search_level0(problem)
    found = search_mixed_fleets(problem, level0)
    assert found.best is not None and level0.search.value > found.value
    assert found.value == pytest.approx(optimum, abs=0.005)
    assert replace(problem.oracle, cache=VerdictCache()).holds(found.best)


def test_proposals_of_the_master_are_work_and_end_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solving for 100 proposals took 14 s that no limit on work counted; several LLMs ask many times."""
    problem = posed(42)
    level0 = search_level0(problem)
    proposals: list[float] = []

    def propose(
        options: list[Option], *_: object, count_iterations: Callable[[int], None], **__: object
    ) -> Any:
        before_s = now_s()
        count_iterations(60_000)
        proposals.append(now_s() - before_s)
        return (1, *[0] * (len(options) - 1)), 1.0

    monkeypatch.setattr(mixed_fleets, "find_promising_fleet", propose)
    search_mixed_fleets(problem, level0, refines=False)
    assert proposals == pytest.approx([5.04, 5.04])  # 60,000 x 84 us


def test_filled_fleets_cost_less_and_take_no_further_worker_of_their_last_type() -> None:
    problem = posed(42)
    options = problem_options(problem)[:4]
    value = 6.5 * max(option.objective for option in options)
    vectors = list_filled_fleets(options, problem.limits, value, 3)
    assert len(vectors)
    assert len({tuple(vector) for vector in vectors.tolist()}) == len(vectors)
    for vector in vectors.tolist():
        counts = [(option, n) for option, n in zip(options, vector, strict=True) if n]
        assert 1 <= len(counts) <= 3
        assert objective_of(counts) < value
        assert problem.limits.first_exceeded([(option.type, n) for option, n in counts]) is None


def test_fleets_of_one_setting_are_those_without_two_options_of_one_kind() -> None:
    problem = posed(42)
    options = problem_options(problem)[:6]
    value = 3.5 * max(option.objective for option in options)
    kinds = [k % 3 for k in range(len(options))]

    def is_distinct(vector: tuple[int, ...]) -> bool:
        used = [kind for kind, n in zip(kinds, vector, strict=True) if n]
        return len(set(used)) == len(used)

    every = {tuple(vector) for vector in list_filled_fleets(options, problem.limits, value, 3).tolist()}
    distinct = {
        tuple(vector) for vector in list_filled_fleets(options, problem.limits, value, 3, kinds).tolist()
    }
    assert distinct == {vector for vector in every if is_distinct(vector)}
    assert 0 < len(distinct) < len(every)


def test_a_pair_carries_what_its_smaller_side_does() -> None:
    options = problem_options(posed(395))
    prefill, decode, mixed = (
        next(o for o in options if o.role == role) for role in ("prefill", "decode", "mixed")
    )
    counts = np.array([[2, 3, 0], [4, 1, 2], [0, 0, 8]], np.int32)
    fleets = CandidateFleets([prefill, decode, mixed], counts)
    assert fleets.estimate_shares(np.array([0.25, 0.5, 0.125])).tolist() == [0.5, 0.75, 1.0]


def test_a_fleet_exceeds_another_of_which_it_has_one_option_more() -> None:
    counts = np.array([[2, 3, 0], [4, 1, 2], [0, 0, 8], [2, 2, 0]], np.int32)
    fleets = CandidateFleets(problem_options(posed(395))[:3], counts)
    assert fleets.exceed(np.array([2, 3, 8], np.int32)).tolist() == [False, True, False, False]
    assert fleets.exceed(np.array([2, 2, 0], np.int32)).tolist() == [True, True, True, False]


def test_looks_around_the_best_fleet_where_more_workers_hurt() -> None:
    """A simulator to which four and two workers will do, but not three."""
    option = next(o for o in problem_options(posed(42)) if o.role == "mixed")

    class Odd:
        def __init__(self) -> None:
            self.verdicts: dict[tuple[tuple[str, int], ...], bool] = {}

        def holds(self, counts: Counts) -> bool:
            self.verdicts[names_of(counts)] = counts[0][1] in (2, 4)
            return counts[0][1] in (2, 4)

    best = improve_nearby(((option, 4),), FleetLimits({}), Odd(), lambda: True)  # type: ignore[arg-type]
    assert best == ((option, 2),)
    assert improve_nearby(((option, 4),), FleetLimits({}), Odd(), lambda: False) == ((option, 4),)  # type: ignore[arg-type]


def test_pools_have_one_order() -> None:
    first, second = problem_options(posed(42))[:2]
    assert in_order([(second, 1), (first, 2)], [first, second]) == ((first, 2), (second, 1))
    assert in_order([(second, 1), (first, 0)], [first]) == ((second, 1),)
