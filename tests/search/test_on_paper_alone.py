"""Where no fleet keeps enough scenarios, the cheapest on paper is written, and called what it is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from plans import CATALOG
from questions import question, traffic

from planner.api.planning import read_plan
from planner.api.results import PlanResult
from planner.documents.facts import IdleMisses, NoneTogether, TooFewKept
from planner.documents.several_llms_question import LlmQuestion, SeveralLlmsQuestion
from planner.reports import screen, shared_screen
from planner.reports.fact_sentences import fact_sentences_of
from planner.search.evidence.certify import plan
from planner.search.problem.build_problem import build_problem
from planner.search.problem.plan_problem import Conditions
from planner.search.production.idle_scenarios import find_idle_misses
from planner.search.several.several_llms import plan_together

SAFE = {"safety": {"kept_in": 0.9}}
SPARSE = traffic(requests=200, rate_rps=0.05)
FLEET = {"gpus": ["h100-80g"], "max_num_batched_tokens": 2048}


@pytest.mark.long
def test_a_stock_too_small_for_production_leaves_the_plan_on_paper(tmp_path: Path) -> None:
    """As many GPUs as the cheapest fleet on paper takes: it is planned, with what it is and is not."""
    paper = plan(question(fleet=FLEET), traffic(), CATALOG)
    stock = question(**SAFE, fleet=FLEET | {"gpus": {"h100-80g": paper.fleet.gpus}})
    found = plan(stock, traffic(), CATALOG)
    assert found.status == "not for production" and found.fleet == found.on_paper
    assert found.fleet.price_usd_per_h == paper.fleet.price_usd_per_h
    (why,) = [said for said in found.warnings if isinstance(said, TooFewKept)]
    assert why.most_kept.kept_frac < why.most_kept.asked_frac == 0.9
    on_paper, production = found.certificate.answers
    assert production.value is None and on_paper.kept_in is not None
    assert on_paper.kept_in.decision != "holds"
    assert screen.verdict_text(found).startswith("NOT for production, on paper alone: Buy")
    assert any(
        said.startswith("not for production: no fleet within") for said in fact_sentences_of(found.warnings)
    )
    PlanResult(found).save(tmp_path / "out")
    written = yaml.safe_load((tmp_path / "out" / "plan.yaml").read_text())
    assert written["status"] == "not for production"
    warnings = read_plan(tmp_path / "out", CATALOG).plan.warnings
    (read,) = [warning for warning in warnings if isinstance(warning, TooFewKept)]
    assert read.most_kept.kept_frac == pytest.approx(why.most_kept.kept_frac)


def test_what_idle_workers_miss_in_too_many_futures_is_said_before_the_search() -> None:
    """A prompt every 20 s. TTFT p90 of the fastest idle worker is 0.1 to 0.12 s on paper; where prefills
    take 1.3 times as long it is above 0.13 s, and so it is in more than the 3 of 32 that may be missed."""
    told: list[str] = []
    tight = question(**SAFE, fleet=FLEET, slo={"ttft": {"p90": "130 ms"}})
    found = plan(tight, SPARSE, CATALOG, conditions=Conditions(progress=told.append))
    assert "even an idle worker misses TTFT p90 <= 130 ms" in told[0] and told[0].endswith(
        "so the plan is only on paper"
    )
    (why,) = [said for said in found.warnings if isinstance(said, IdleMisses)]
    assert 3 < why.missed <= why.scenario_count == 32 and 0.13 < why.enough_s < 0.2
    assert found.status == "not for production" and found.verdict.holds
    assert not any(said.startswith("production") for said in told)


@pytest.mark.long
def test_several_llms_name_the_limit_that_idle_workers_miss_as_what_would_help() -> None:
    """They proposed more stock, which cures it as little as for one LLM."""
    tight = question(**SAFE, fleet=FLEET, slo={"ttft": {"p90": "130 ms"}})
    parts = tuple(LlmQuestion(name, tight, SPARSE) for name in ("chat", "code"))
    found = plan_together(SeveralLlmsQuestion(parts, (), ()), CATALOG)
    assert found.status == "not for production"
    warnings = [said for each in found.plans.values() for said in each.warnings]
    why = next(said for said in warnings if isinstance(said, NoneTogether))
    assert "chat, even with all of the fleet for itself: latency" in why.reason
    assert why.relaxation.startswith("ttft p90 >= 0.1") and "stock" not in why.relaxation
    production = shared_screen.answer_cards(found)[1]
    assert f"what would help: {why.relaxation}" in production.fleet


def test_a_limit_of_what_is_said_to_be_enough_is_in_reach() -> None:
    tight = question(**SAFE, fleet=FLEET, slo={"ttft": {"p90": "130 ms"}})
    why = find_idle_misses(build_problem(tight, SPARSE, CATALOG))
    assert why is not None
    for frac, is_reached in ((1.0 + 1e-6, True), (0.999, False)):
        limit_s = math.ceil(1e6 * why.enough_s * frac) / 1e6
        other = question(**SAFE, fleet=FLEET, slo={"ttft": {"p90": f"{limit_s:.6f} s"}})
        assert (find_idle_misses(build_problem(other, SPARSE, CATALOG)) is None) == is_reached
