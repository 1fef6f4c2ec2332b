"""Large questions are searched on a model: one request and one worker in so many
(search/production/scale_model.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from plans import CATALOG
from questions import question, traffic

from planner.documents.task import PlanQuestion
from planner.reports.answer_sentences import scenario_lines
from planner.search.evidence.certify import plan, search_llm
from planner.search.mixed.best_fleet import FleetSearch, best_of
from planner.search.oracle.fleet_counts import objective_of
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.plan_problem import Problem, with_search_scenarios
from planner.search.production.production_fleet import find_production_fleet
from planner.search.production.scale_model import build_scale_model, restore_full_size
from planner.search.production.scenario_test import is_test_passed
from planner.traffic.scaling import same_requests

LARGE = {
    "llm": "llama-3.1-8b",
    "safety": {"kept_in": 0.9},
    "slo": {"ttft": {"p90": "1 s"}},
    "fleet": {"gpus": ["h100-80g"], "max_num_batched_tokens": 2048},
    "traffic": {"rate": "300"},
}


def large(**changes: object) -> PlanQuestion:
    return question(**LARGE | changes)


@cache
def searched() -> tuple[Problem, FleetSearch]:
    return best_of(search_llm(SearchInputs(large(), traffic(), CATALOG)))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of questions that simulate in a moment."""
    for name, value in {
        "FULL_REQUESTS": 5_000,
        "LEAST_MODEL_REQUESTS": 1_000,
        "LEAST_MODEL_WORKERS": 3,
    }.items():
        monkeypatch.setattr(f"planner.search.production.scale_model.{name}", value)


def test_one_worker_in_so_many_is_simulated_on_one_request_in_so_many() -> None:
    problem, paper = searched()
    model = build_scale_model(problem, paper.best)
    many, ((option, count),) = model.oracle.downscale, paper.best
    assert many == min(len(problem.trace) // 1_000, count // 3) >= 2
    assert len(model.oracle.trace) == pytest.approx(len(problem.trace) / many, abs=1)
    as_many = replace(model.oracle, downscale=1)
    for workers in range(count // 2, 2 * count):
        assert model.oracle.holds(((option, workers),)) == as_many.holds(((option, workers // many),))
    lossy, as_many_left = replace(model.oracle, spare_workers=2), replace(as_many, spare_workers=0)
    assert lossy.holds(((option, count),)) == as_many_left.holds(((option, (count - 2) // many),))
    assert not model.oracle.holds(((option, many - 1),))  # fewer than one of them


def test_futures_of_a_model_are_those_of_the_question_with_fewer_users() -> None:
    problem, paper = searched()
    model = build_scale_model(problem, paper.best)
    whole, few = with_search_scenarios(problem), with_search_scenarios(model)
    assert [each.step_time_sigmas for each in few.oracle.scenarios] == [
        each.step_time_sigmas for each in whole.oracle.scenarios
    ]
    for mine, all_of_it in zip(few.oracle.scenarios[:3], whole.oracle.scenarios, strict=False):
        assert len(mine.trace) * few.oracle.downscale == pytest.approx(len(all_of_it.trace), rel=0.01)
    again = restore_full_size(problem, few)
    assert [each.number for each in again.oracle.scenarios] == [each.number for each in few.oracle.scenarios]
    assert same_requests(again.oracle.scenarios[0].trace, whole.oracle.scenarios[0].trace)
    assert restore_full_size(problem, whole) is whole


@pytest.mark.parametrize("traffic_line", [{"rate": "300", "scale": "compress"}, {}])
def test_other_ways_to_draw_futures_have_fewer_users_too(traffic_line: dict[str, object]) -> None:
    """A faster clock, and blocks of a trace at its own rate: the requests are drawn, then one in so many."""
    task = large(traffic=traffic_line)
    problem = replace(searched()[0], task=task)
    assert problem.search_scenarios is not None
    all_of_it = replace(problem.search_scenarios, task=task).draw_requests(1)
    few = replace(problem.search_scenarios.thinned(4), task=task).draw_requests(1)
    assert len(few) == pytest.approx(len(all_of_it) / 4, abs=1)
    assert set(few.arrival_s) <= set(all_of_it.arrival_s)


@pytest.mark.slow
def test_what_a_model_finds_is_tested_at_full_size() -> None:
    """About as cheap as without a model."""
    problem, paper = searched()
    found = find_production_fleet(problem, paper)
    assert found is not None and found.model is not None and found.model.oracle.downscale > 1
    assert problem.task.safety is not None and is_test_passed(found.kept_in, problem.task.safety)
    assert found.test.oracle.downscale == found.problem.oracle.downscale == 1
    assert found.problem.oracle.missed_count(found.best, 99) <= found.problem.oracle.may_miss + 1
    searched_whole = replace(problem, draws=(problem.trace,))  # of which there is no model
    assert build_scale_model(searched_whole, paper.best) is searched_whole
    alone = find_production_fleet(searched_whole, paper)
    assert alone is not None
    assert objective_of(found.best) <= 1.15 * objective_of(alone.best)


@pytest.mark.slow
def test_a_plan_says_that_a_model_was_searched() -> None:
    found = plan(large(), traffic(), CATALOG)
    drawn = found.certificate.scenarios_drawn
    assert drawn is not None and drawn.downscale > 1
    said = f"one request and one worker in {drawn.downscale} of each; the test has them all; "
    assert said in scenario_lines(found)[0]
    assert found.status == "certified"


def test_a_small_question_is_its_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, paper = searched()
    monkeypatch.setattr("planner.search.production.scale_model.FULL_REQUESTS", len(problem.trace))
    assert build_scale_model(problem, paper.best) is problem
