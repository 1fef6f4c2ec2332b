"""A plan on paper names how much stock a fleet for production takes."""

from __future__ import annotations

from typing import Any

from questions import traffic

import fleetplan
from planner.api.results import PlanResult
from planner.documents.facts import TooFewKept
from planner.reports.screen import answer_cards

QUESTION: dict[str, Any] = {
    "llm": "llama-3.1-8b",
    "slo": {"ttft": {"p90": "400 ms"}, "tbt": {"p99": "100 ms"}},
    "fleet": {"sold_as": {"l40s-48g": "gpu"}, "max_num_batched_tokens": 2048},
}


def plan_with(gpus: int | None, safety: object = None) -> PlanResult:
    fleet = QUESTION["fleet"] | {"gpus": {"l40s-48g": gpus} if gpus else ["l40s-48g"]}
    keys = {} if safety is None else {"safety": safety}
    answer = fleetplan.plan(QUESTION | keys | {"fleet": fleet}, traffic(requests=300, rate_rps=16.0))
    assert isinstance(answer, PlanResult)
    return answer


def test_a_stock_too_small_for_production_is_answered_by_one_that_is_enough() -> None:
    """It only said that no fleet within the limits was found."""
    on_paper = plan_with(None, "none").plan
    gpus = on_paper.fleet.gpus
    plan = plan_with(gpus).plan
    assert plan.status == "not for production"
    (why,) = [each for each in plan.warnings if isinstance(each, TooFewKept)]
    (change,) = why.enough
    assert (change.limit, change.present) == ("stock of l40s-48g", gpus) and change.enough > gpus
    assert f"stock of l40s-48g from {gpus} to {change.enough:g} is enough" in answer_cards(plan)[1].fleet
    raised = plan_with(int(change.enough)).plan
    assert raised.status in ("certified", "not certified") and raised.fleet.gpus <= change.enough
