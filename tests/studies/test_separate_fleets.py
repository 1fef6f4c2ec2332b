"""What one fleet for all classes saves against separate fleets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from simulations import make_trace

import fleetplan
from planner.api import planning
from planner.api.results import PlanResult, SharedPlanResult
from planner.api.validating import traffic_beside_plan
from planner.documents import facts
from planner.documents.catalog import read_catalog
from planner.documents.task import parse_task
from planner.errors import InputError
from planner.reports.fact_sentences import fact_sentence
from planner.reports.screen import answer_cards, key_figures, why_nothing_cheaper
from planner.search.evidence.plan import Plan
from planner.search.oracle.traffic_request import TrafficRequest
from planner.studies import sharing
from planner.traffic.trace import Trace

CHAT = {"match": {"tenant": "chat"}, "ttft": {"p90": "500 ms"}, "tbt": {"p99": "200 ms"}}
CODE = {"match": {"tenant": "code"}, "deadline": "60 s"}


def chat_and_code(chat_rps: float, code_rps: float, *, span_s: float = 120.0) -> Trace:
    """Prompts of 1,000 tokens with answers of 200, and prompts of 2,000 with 30, at random times."""
    rng, arrivals, tenants = np.random.default_rng(3), [], []
    for tenant, rate_rps in enumerate((chat_rps, code_rps)):
        at_s = rng.uniform(0, span_s, round(rate_rps * span_s))
        arrivals.append(at_s)
        tenants.append(np.full(len(at_s), tenant))
    arrival_s, of_tenant = np.concatenate(arrivals), np.concatenate(tenants)
    order = np.argsort(arrival_s)
    arrival_s, of_tenant = arrival_s[order] - arrival_s.min(), of_tenant[order]
    trace = make_trace(arrival_s, np.where(of_tenant, 2000, 1000), np.where(of_tenant, 30, 200))
    return replace(trace, tenant=of_tenant, tenants=("chat", "code"))


def planned(trace: Trace, slo: dict[str, Any]) -> Plan:
    question = {"llm": "llama-3.1-8b", "slo": slo, "fleet": {"gpus": {"l40s-48g": 16}}, "safety": "none"}
    answer = fleetplan.plan(question, trace)
    assert isinstance(answer, PlanResult)
    return answer.plan


def test_what_sharing_saves_is_a_difference_of_plans() -> None:
    """Each class alone is planned by hand as well: the values are those that the report names."""
    trace = chat_and_code(2.0, 1.0)
    shared = planned(trace, {"classes": {"chat": CHAT, "code": CODE}})
    (fact,) = [each for each in shared.certificate.binding if isinstance(each, facts.SharingSaves)]
    alone = {
        name: planned(trace.select(np.flatnonzero(trace.tenant == k)), {"classes": {name: lines}}).value
        for k, (name, lines) in enumerate({"chat": CHAT, "code": CODE}.items())
    }
    assert {each.name: each.value for each in fact.alone} == pytest.approx(alone)
    assert fact.value == shared.value and fact.saves == pytest.approx(sum(alone.values()) - shared.value)
    assert fact_sentence(fact) in why_nothing_cheaper(shared)


def test_long_prompts_leave_room_for_the_short_ones_of_another_class() -> None:
    """Behind a prompt of 16,000 tokens (2 s) short ones miss 500 ms, unless each step computes both."""
    rng = np.random.default_rng(5)
    chats_s, longs_s = rng.uniform(0, 100, 400), rng.uniform(0, 100, 15)
    arrival_s, is_long = np.concatenate((chats_s, longs_s)), np.repeat((0, 1), (400, 15))
    order = np.argsort(arrival_s)
    arrival_s, is_long = arrival_s[order] - arrival_s.min(), is_long[order]
    trace = make_trace(arrival_s, np.where(is_long, 16_000, 500), np.where(is_long, 30, 60))
    trace = replace(trace, tenant=is_long, tenants=("chat", "long"))
    slo = {
        "classes": {
            "chat": {"match": {"tenant": "chat"}, "ttft": {"p90": "500 ms"}},
            "long": {"match": {"tenant": "long"}, "ttft": {"p90": "20 s"}},
        }
    }
    shared = planned(trace, slo)
    assert shared.fleet.gpus == 1 and shared.fleet.policies.long_prefill_token_threshold == 512
    (fact,) = [each for each in shared.certificate.binding if isinstance(each, facts.SharingSaves)]
    assert [each.value for each in fact.alone] == pytest.approx([shared.value, shared.value])
    gains = [each for each in shared.certificate.binding if isinstance(each, facts.PolicyGains)]
    assert [each.label for each in gains] == ["at most 512 tokens of a prompt per step"]


def test_one_class_is_not_compared_and_the_rest_is_planned_with_lines_of_all() -> None:
    trace = chat_and_code(2.0, 1.0)
    one = planned(trace.select(np.flatnonzero(trace.tenant == 0)), {"classes": {"chat": CHAT}})
    assert not any(isinstance(each, facts.SharingSaves | facts.NotShared) for each in one.certificate.binding)
    both = planned(trace, {"e2e": {"p99": "60 s"}, "classes": {"chat": CHAT}})
    (fact,) = [each for each in both.certificate.binding if isinstance(each, facts.SharingSaves)]
    assert [each.name for each in fact.alone] == ["other requests", "chat"]


def test_more_traffic_is_not_added_twice() -> None:
    """`robust: {traffic: 25 %}`: the plan's requests have it, and a class alone was planned for 25 % more."""
    trace = chat_and_code(2.0, 1.0)
    document = {
        "llm": "llama-3.1-8b",
        "slo": {"classes": {"chat": CHAT, "code": CODE}},
        "fleet": {"gpus": {"l40s-48g": 16}},
        "robust": {"traffic": "25 %"},
        "safety": "none",
    }
    task = parse_task(document, read_catalog())
    parts = list(sharing._class_questions(task, trace))
    assert [name for name, _, _ in parts] == ["chat", "code"]
    for _, asked, requests in parts:
        drawn = TrafficRequest.of(requests, asked, seed=0)
        assert drawn.requests.rate_rps == requests.rate_rps
        lowest = drawn.further[-1]
        assert lowest.rate_rps == pytest.approx(requests.rate_rps / 1.25, rel=0.02)


def test_sentences_say_more_or_less() -> None:
    alone = (facts.ClassAlone("chat", 1.72), facts.ClassAlone("code", 0.86))
    saves = facts.SharingSaves(1.72, 0.86, alone, "USD/h")
    assert fact_sentence(saves) == (
        "one fleet for all classes saves 0.86 USD/h (33 %): 1.72 instead of 2.58 (chat 1.72, code 0.86)"
    )
    assert "costs the same" in fact_sentence(replace(saves, value=2.58, saves=0.0))
    assert "less than one fleet" in fact_sentence(replace(saves, value=3.44, saves=-0.86))
    assert "no fleet for chat alone" in fact_sentence(facts.NotShared("chat", ""))


def test_one_class_is_asked_first_come_first_served() -> None:
    """Where all are due equally soon after they arrive, edf takes them as they come."""
    slo = {"classes": {"chat": CHAT, "code": CODE}}
    question = {"llm": "llama-3.1-8b", "slo": slo}
    usual = parse_task(question, read_catalog()).policies.without_classes()
    assert usual.queues == ("fcfs",) and not any(each.axis == "queue" for each in usual.raced_changes)
    named = parse_task(question | {"policies": {"queue": ["sjf", "edf"]}}, read_catalog())
    assert named.policies.without_classes().queues == ("sjf", "fcfs")


def test_traffic_planned_by_its_busiest_part_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "is_too_long", lambda *_: True)
    plan = planned(chat_and_code(2.0, 1.0), {"classes": {"chat": CHAT, "code": CODE}})
    (fact,) = [each for each in plan.certificate.binding if isinstance(each, facts.NotShared)]
    assert fact_sentence(fact) in why_nothing_cheaper(
        plan
    ) and "planned by its busiest part are not planned" in fact_sentence(fact)


def test_classes_of_several_llms_are_not_compared() -> None:
    trace = chat_and_code(2.0, 1.0, span_s=60.0)
    llm = "llama-3.1-8b"
    llms = {
        "a": {"llm": llm, "slo": {"classes": {"chat": CHAT, "code": CODE}}},
        "b": {"llm": llm, "slo": {"e2e": {"p99": "60 s"}}},
    }
    question = {"llms": llms, "fleet": {"gpus": {"l40s-48g": 16}}, "safety": "none"}
    shared = fleetplan.plan(question, {name: trace for name in llms})
    assert isinstance(shared, SharedPlanResult)
    found = [
        [each for each in plan.certificate.binding if isinstance(each, facts.NotShared)]
        for plan in shared.shared.plans.values()
    ]
    assert [len(each) for each in found] == [1, 0] and "one LLM among several" in fact_sentence(found[0][0])


def test_a_plan_of_classes_is_written_with_their_tenants(tmp_path: Path) -> None:
    """So it is read again with its figures, and validated on requests of its classes. On traffic without them
    no class is called kept: one line refuses.
    """
    slo = {"classes": {"chat": CHAT, "code": CODE}}
    question = {"llm": "llama-3.1-8b", "slo": slo, "fleet": {"gpus": {"l40s-48g": 16}}, "safety": "none"}
    made = fleetplan.plan(question, chat_and_code(2.0, 1.0))
    made.save(tmp_path)
    again = fleetplan.read_plan(tmp_path)
    assert isinstance(made, PlanResult) and again.plan.trace.tenants == ("chat", "code")
    assert [line.kept_frac for line in again.plan.verdict.lines] == [
        line.kept_frac for line in made.plan.verdict.lines
    ]
    assert again.plan.fleet.policies == made.plan.fleet.policies
    assert traffic_beside_plan(tmp_path / "plan.yaml").name == "traffic.jsonl"
    without = tmp_path / "without_tenants.csv"
    pd.read_csv(tmp_path / "requests.csv").drop(columns="tenant").to_csv(without, index=False)
    refused = "chat: matches none of the 360 requests .*names no tenant"
    with pytest.raises(InputError, match=refused):
        fleetplan.simulate(tmp_path, without, slo)
    with pytest.raises(InputError, match=refused):
        fleetplan.validate(tmp_path, tmp_path / "out", without, engine="rehearsal")


def test_money_is_said_to_the_cent() -> None:
    alone = (facts.ClassAlone("chat", 4.3), facts.ClassAlone("batch", 2.58))
    text = fact_sentence(facts.SharingSaves(6.88, 0.0, alone, "USD/h"))
    assert text.startswith("separate fleets for 2 classes: 6.88 USD/h (chat 4.30, batch 2.58); one fleet ")


def test_separate_fleets_that_cost_less_stand_on_the_first_screen() -> None:
    """One fleet at 3.44, of two classes 1.72 and 0.86: 0.86 USD/h less; the same cost is no figure."""
    plan = planned(chat_and_code(2.0, 1.0), {"classes": {"chat": CHAT, "code": CODE}})
    alone = (facts.ClassAlone("chat", 1.72), facts.ClassAlone("code", 0.86))
    for saves, figures in (
        (-0.86, [("2.58 USD/h", "chat 1.72, code 0.86; 0.86 USD/h less than one fleet for all")]),
        (0.0, []),
    ):
        binding = (facts.SharingSaves(3.44, saves, alone, "USD/h"),)
        shown = key_figures(replace(plan, certificate=replace(plan.certificate, binding=binding)))
        assert [(each.value, each.note) for each in shown if each.name == "Separate fleets"] == figures


@pytest.mark.long
def test_a_budget_too_small_for_production_is_answered_by_one_that_is_enough() -> None:
    """On paper 0.86 USD/h: a budget of that has no fleet for production, and the one that is named has."""
    trace = chat_and_code(2.0, 1.0)
    tight = CHAT | {"ttft": {"p90": "290 ms"}, "tbt": {"p99": "110 ms"}}
    question = {
        "llm": "llama-3.1-8b",
        "slo": {"classes": {"chat": tight, "code": CODE}},
        "fleet": {"gpus": {"l40s-48g": 16}},
    }

    def plan_with(**keys: Any) -> Plan:
        answer = fleetplan.plan(question | keys, trace)
        assert isinstance(answer, PlanResult)
        return answer.plan

    paper_usd_per_h = plan_with(safety="none").value
    plan = plan_with(limits={"cost": f"{paper_usd_per_h} usd/h"})
    assert plan.status == "not for production"
    (why,) = [each for each in plan.warnings if isinstance(each, facts.TooFewKept)]
    (change,) = why.enough
    assert change.limit == "cost" and change.present == pytest.approx(paper_usd_per_h)
    assert f"to {change.enough:g} USD/h" in fact_sentence(why)
    assert f"to {change.enough:g} USD/h is enough" in answer_cards(plan)[1].fleet
    raised = plan_with(limits={"cost": f"{change.enough} usd/h"})
    assert raised.status == "certified" and raised.value <= change.enough + 1e-9
    (separate,) = [each for each in plan.certificate.binding if isinstance(each, facts.SeparateKept)]
    (figure,) = [each for each in key_figures(plan) if each.name == "Separate fleets"]
    assert figure.value == f"{sum(each.value for each in separate.alone):.2f} USD/h"
    assert not any("separate fleets" in text for text in why_nothing_cheaper(plan))
