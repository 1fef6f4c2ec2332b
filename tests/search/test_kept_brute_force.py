"""Production against every fleet of level 0 in the same scenarios, on random questions."""

import pytest
from kept_fleets import check_kept
from random_questions import question

from planner.documents.task import parse_task
from planner.search.evidence.certify import search_llm
from planner.search.level0.walk import every_mix
from planner.search.mixed.best_fleet import FleetSearch, best_of
from planner.search.oracle.fleet_counts import names_of, objective_of
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.plan_problem import Problem
from planner.search.production.production_fleet import find_production_fleet
from planner.search.production.scenario_test import FleetTrial, is_test_passed, untimed_test

REQUESTS = (20, 40)
QUESTIONS, IN_ONE = 60, 20


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, QUESTIONS, IN_ONE))
def test_what_is_called_exact_in_production_is_beaten_by_no_fleet(first: int) -> None:
    """All fleets of up to four workers a pool are simulated in 12 scenarios, of which one may be missed."""
    reports = [report for seed in range(first, first + IN_ONE) if (report := check_kept(seed)) is not None]
    assert [report for report in reports if report.is_wrong] == []
    found = [report for report in reports if report.value < float("inf")]
    assert sum(report.is_exact for report in found) >= 0.9 * len(found) >= 5


def production_of(seed: int, kind: str) -> tuple[Problem, FleetSearch, FleetTrial]:
    """A random question with one batch size, and the fleet for its production."""
    drawn = question(seed, kind, REQUESTS, engine="none")
    fleet = drawn.document["fleet"]
    last = {key: fleet[key][-1:] for key in ("max_num_batched_tokens", "max_num_seqs")}
    document = {key: value for key, value in drawn.document.items() if key != "limits"}
    document |= {"fleet": {**fleet, **last}, "safety": {"kept_in": 0.9}}
    task = parse_task(document, drawn.catalog)
    problem, paper = best_of(search_llm(SearchInputs(task, drawn.trace, drawn.catalog)))
    trial = find_production_fleet(problem, paper)
    assert trial is not None and trial.is_passed
    return problem, paper, trial


def test_a_fleet_grown_from_another_design_keeps_the_traffic_as_written() -> None:
    """Two workers of `gpu3` keep every scenario, cost less than on paper, and miss TBT as written."""
    problem, paper, trial = production_of(12, "hand-off")
    assert problem.oracle.as_written().holds(trial.best)
    assert objective_of(trial.best) >= paper.value


def test_no_mix_of_worker_types_is_cheaper_in_production() -> None:
    """Of few fleets every mix is simulated in scenarios, also where the fleet on paper is not one."""
    problem, paper, trial = production_of(39, "small")
    mixes = every_mix(paper.level0.options, problem.limits, 0.98 * objective_of(trial.best), most=500)
    oracle, test = trial.searched_problem.oracle, untimed_test(problem)
    assert mixes and test is not None
    assert not [
        names_of(counts)
        for counts in mixes
        if oracle.holds(counts) and is_test_passed(test.decide(counts), trial.test.safety)
    ]
