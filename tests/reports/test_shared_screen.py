"""The first screen of several LLMs: of all together, and a card for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import a_plan, a_robustness, a_simulation, a_trace, mixed

from planner.documents.facts import Answered, Finding, Headroom, KeptIn, NoneTogether, Outcome, UnderRouter
from planner.documents.robustness_facts import HeadroomFact, MoreTraffic
from planner.domain import POWER, Limit
from planner.errors import MostKept
from planner.reports import several_llms_report, shared_screen
from planner.reports.page import page_html
from planner.search.evidence.plan import Plan
from planner.search.several.shared_plan import AnswerTotal, LimitUse, SharedPlan

TTFT = Limit("ttft", 0.9, 2.0)
KEPT = KeptIn(27, 30, 0.85, 0.95, "holds")


def one(holds: tuple[HeadroomFact, ...], more: MoreTraffic | None) -> Plan:
    """Two workers of 4 H100, a node: 23.92 USD/h."""
    fleet, trace = mixed(), a_trace(200)
    plan = a_plan()
    plan = replace(plan, fleet=fleet, trace=trace, simulation=a_simulation(fleet, trace), placement=None)
    robustness = replace(a_robustness(), holds=holds, losses=(), prices=(), more_traffic=more)
    answers = (
        Answered("on-paper", (), 23.92, 23.92, KEPT, Headroom(0.0, 0.0)),
        Answered("production", (), 23.92, 23.92, KEPT, Headroom(holds[1].frac, holds[0].frac)),
    )
    return replace(plan, certificate=replace(plan.certificate, answers=answers, robustness=robustness))


CARRIED, TOO_MUCH = MoreTraffic(True, 28, 28), MoreTraffic(False, 12, 18)


def shared(more: tuple[MoreTraffic | None, MoreTraffic | None] = (CARRIED, TOO_MUCH)) -> SharedPlan:
    """ "chat" holds to 30 % more traffic and 10 % longer steps, "code" to 5 % and 20 %."""
    plans = {
        "chat": one((HeadroomFact("traffic", 0.3, (TTFT,)), HeadroomFact("steps", 0.1, (TTFT,))), more[0]),
        "code": one((HeadroomFact("traffic", 0.05, (TTFT,)), HeadroomFact("steps", 0.2, (TTFT,))), more[1]),
    }
    values = {name: plan.value for name, plan in plans.items()}
    return SharedPlan(
        plans=plans,
        paper=values,
        alone=values | {"chat": 0.5 * values["chat"]},
        answers=(
            AnswerTotal("on-paper", 40.0, 40.0),
            AnswerTotal("production", 47.84, 47.84),
            AnswerTotal("with-a-loss", None, None, ("code",)),
        ),
        objective="cost",
        unit="USD/h",
        level0=40.0,
        level0_bound=40.0,
        bound=30.0,
        is_exhausted=True,
        is_exact=True,
        limits=(),
        binding=(),
        in_production=(),
        assumptions=(),
        warnings=(),
        rounds=1,
        simulations=9,
        seed=0,
        placement=None,
    )


def test_the_verdict_says_what_to_buy_for_whom_and_how_far_each_holds() -> None:
    """Two nodes of 8 at 2.99 are 47.84 USD/h, 730 hours a month; the least that both hold."""
    assert shared_screen.verdict_text(shared()) == (
        "Buy 2 nodes of 8 × h100-80g for chat and code: 47.84 USD/h (34,923 USD per month). As written, each "
        "holds to +5.0 % traffic of this kind (compress) and +10 % step time; kept in: chat 27 of 30 "
        "scenarios, code 27 of 30 scenarios. Step times estimated, not measured here."
    )


def test_an_llm_that_was_not_tested_is_kept_in_no_scenarios() -> None:
    """It was "kept in: code 0 of 0 scenarios"."""
    both = shared()
    certificate = both.plans["code"].certificate
    answers = tuple(replace(each, kept_in=KeptIn(0, 0, 0.0, 1.0, "open")) for each in certificate.answers)
    untested = replace(both.plans["code"], certificate=replace(certificate, answers=answers))
    shown = replace(both, plans={**both.plans, "code": untested})
    assert "code not tested, as no time was left." in shared_screen.verdict_text(shown)
    assert "0 of 0" not in str(shared_screen.answer_cards(shown))


def test_how_to_plan_for_a_loss_is_said() -> None:
    """ "Costs the same" was said of other fleets than the plan's, and no way to get them."""
    both = shared()
    answers = (*both.answers[:2], AnswerTotal("with-a-loss", 47.84, 47.84))
    card = shared_screen.answer_cards(replace(both, answers=answers))[2]
    assert card.difference == "costs the same; spare: 1 worker in each entry of llms plans for it"


def test_what_binds_on_paper_is_said_of_paper_alone() -> None:
    """ "No shared limit binds" stood below fleets that are on paper because of a shared stock."""
    both = replace(shared(), binding=(Finding("no-shared-limit"),), answers=())
    assert several_llms_report.binding_lines(both)[0].startswith("no shared limit binds")
    why = (NoneTogether("safety: kept_in: no fleets were found", "more of the limits"),)
    plans = {name: replace(plan, warnings=why) for name, plan in both.plans.items()}
    (line,) = several_llms_report.binding_lines(replace(both, plans=plans))
    assert line.startswith("on paper: no shared limit binds")


def test_the_fleets_kept_most_are_told_with_their_price_where_none_are_kept_in_enough() -> None:
    """Only "no fleet beside the others was found" stood in the answer, though fleets kept in 88 % were known;
    26 of 32 scenarios are 81 %."""
    both = shared()
    most = MostKept(asked_frac=0.9, kept_frac=26 / 32, value=25.5, on_paper=14.95, unit="USD/h")
    help_text = "stock of h100-80g from 4 to 6"
    why = (NoneTogether("safety: kept_in: no fleets were found", help_text, most),)
    plans = {name: replace(plan, warnings=why) for name, plan in both.plans.items()}
    answers = (both.answers[0], AnswerTotal("production", None, None, ("chat", "code")))
    card = shared_screen.answer_cards(replace(both, plans=plans, answers=answers))[1]
    assert card.fleet == (
        "no fleet of chat and code was found within the limits that is kept in 90 % of scenarios; the most "
        "found to be kept is 81.25 %, for 25.50 USD/h: safety: {kept_in: 0.81} may plan it; what would help: "
        "stock of h100-80g from 4 to 6"
    )


def test_what_would_help_is_told_where_no_fleets_are_kept_more_than_those_on_paper() -> None:
    """The answer ended with "no fleet was found within the limits"."""
    both = shared()
    why = (NoneTogether("safety: kept_in: no fleets were found", "stock of h100-80g from 4 to 6"),)
    plans = {name: replace(plan, warnings=why) for name, plan in both.plans.items()}
    answers = (both.answers[0], AnswerTotal("production", None, None, ("chat", "code")))
    card = shared_screen.answer_cards(replace(both, plans=plans, answers=answers))[1]
    assert card.fleet.endswith("within the limits; what would help: stock of h100-80g from 4 to 6")


def test_how_to_plan_for_one_target_is_said_once() -> None:
    """Both LLMs miss their SLO under a router: the headline repeated what to write for each."""
    both = shared()
    missed = UnderRouter(
        "lws", "vllm-router", ("random",), ("random",), (), None, Outcome(), None, passes=False
    )
    plans = {
        name: replace(plan, certificate=replace(plan.certificate, routers=(missed,)))
        for name, plan in both.plans.items()
    }
    text = shared_screen.verdict_text(replace(both, plans=plans))
    assert text.count("NOT kept on lws") == 2 and text.count("deploy: {target: NAME} beside llms") == 1
    assert "deploy:" not in shared_screen.verdict_text(both)


def test_what_breaks_first_is_of_the_llm_that_holds_least() -> None:
    first = shared_screen.key_figures(shared())[1]
    assert first.value == "of code: +5.0 % traffic"
    assert [(each.label, each.frac) for each in shared_screen.find_breaks(shared())] == [
        ("code, more traffic", 0.05),
        ("chat, longer steps", 0.1),
        ("code, longer steps", 0.2),
        ("chat, more traffic", 0.3),
    ]


@pytest.mark.parametrize(
    ("more", "value", "names"),
    [
        ((CARRIED, TOO_MUCH), "takes other fleets", "code"),
        ((CARRIED, None), "not simulated, as it takes long", "of code"),
        ((CARRIED, CARRIED), "no extra cost", ""),
        ((CARRIED, MoreTraffic(True)), "carried", ""),  # without scenarios nothing is said of the cost
    ],
)
def test_more_traffic_costs_nothing_only_where_every_fleet_carries_it(
    more: tuple[MoreTraffic | None, MoreTraffic | None], value: str, names: str
) -> None:
    found = shared_screen.key_figures(shared(more))[2]
    assert found.value == value and names in found.note


def test_what_was_not_simulated_of_one_is_not_said_of_all() -> None:
    plan = shared()
    bare = replace(plan.plans["chat"], certificate=replace(plan.plans["chat"].certificate, robustness=None))
    some = replace(plan, plans={**plan.plans, "chat": bare})
    assert shared_screen.key_figures(some)[2].value == "not simulated, as it takes long"
    assert [figure.name for figure in shared_screen.screen_figures(some)] == ["llms", "breaks"]


def test_cards_are_of_the_answers_and_of_the_llms() -> None:
    paper, made, lossy = shared_screen.answer_cards(shared())
    assert (paper.price, paper.difference) == ("40.00 USD/h", "7.84 USD/h less (-16 %)")
    assert (made.price, made.is_plan) == ("47.84 USD/h", True)
    assert (lossy.price, lossy.fleet) == (
        "none",
        "no fleet of code beside the others was found within the limits",
    )
    chat, code = shared_screen.llm_cards(shared())
    assert (chat.name, chat.difference.split()[0], code.difference) == (
        "chat",
        "alone",
        "the fleet it would have alone",
    )
    assert (
        "meta-llama/Llama-3.1-70B" in chat.fleet
        and code.holds == "as written, holds to +5.0 % traffic of this kind and +20 % step time"
    )


def test_a_bill_on_paper_above_the_plans_is_explained() -> None:
    """Whole nodes of the fleets whose GPUs in use cost least, 40, cost more than the plan's."""
    both = shared()
    answers = (AnswerTotal("on-paper", 40.0, 55.0), *both.answers[1:])
    card = shared_screen.answer_cards(replace(both, answers=answers))[0]
    assert card.difference.endswith("; the least for GPUs in use (40.00 USD/h), not for whole nodes")
    assert "GPUs in use" not in shared_screen.answer_cards(both)[0].difference


def test_names_of_llms_are_text_wherever_they_come_from() -> None:
    plan = shared()
    evil = replace(plan, plans={"<b>": plan.plans["chat"]}, alone={"<b>": 1.0}, paper={"<b>": 1.0})
    assert "<b>" not in page_html("", shared_screen.screen_parts_html(evil), "")
    assert shared_screen.first_screen_html(plan).count("<figure") == 2
    assert "class=verdict" in several_llms_report.render_report(plan)


def test_breaks_first_names_llms_of_which_nothing_was_simulated() -> None:
    """Where time ran out for one LLM, the other's headroom was shown as if it were all."""
    plan = shared()
    chat = plan.plans["chat"]
    unknown = replace(chat, certificate=replace(chat.certificate, answers=(), robustness=None))
    figure = next(
        each
        for each in shared_screen.key_figures(replace(plan, plans={**plan.plans, "chat": unknown}))
        if each.name == "Breaks first"
    )
    assert figure.value.startswith("of code")
    assert figure.note.endswith("; of chat not simulated")


def test_shared_limits_of_megawatts_are_written_out() -> None:
    """2,345,678.9 W read "2.34568e+06 W"."""
    plan = replace(shared(), limits=(LimitUse(POWER, amount=3e6, used=2345678.9),))
    assert several_llms_report.limit_rows(plan)[1] == [("power", "2,345,679 W", "3,000,000 W")]


def test_a_sentence_that_begins_in_capitals_keeps_them() -> None:
    """A plan for one target that misses its SLO there said "chat: nOT kept on lws"."""
    assert shared_screen._of_llm("chat", "NOT kept on lws.") == "chat: NOT kept on lws."
    assert shared_screen._of_llm("chat", "For lws.") == "chat: for lws."
