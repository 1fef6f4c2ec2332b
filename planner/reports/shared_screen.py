"""The first screen of a plan for several LLMs: the texts of screen.py for all LLMs together, then a card for
each.
"""

import math
from html import escape

from planner.documents.facts import Headroom, NoneTogether
from planner.reports import charts, screen, screen_charts
from planner.reports.answer_sentences import kept_text
from planner.reports.drawing import CaptionedChart
from planner.reports.fact_sentences import SAME_FRAC
from planner.reports.page import chart_html
from planner.reports.screen import STATUS_WORDS, Breaks, Card, KeyFigure, growth_frac_of, more_traffic_name
from planner.reports.screen_page import cards_html, key_figures_html, verdict_heading
from planner.reports.words import describe_fleet, idle_gpus_text, list_text, usd_text
from planner.search.evidence.plan import Plan
from planner.search.several.shared_plan import AnswerTotal, SharedPlan
from planner.units import count_text, in_unit, show_w


def verdict_text(plan: SharedPlan) -> str:
    """What to buy for which LLMs, what it costs, how much more it holds to and how sure that is."""
    warnings = [screen.not_for_production(llm_plan) for llm_plan in plan.plans.values()]
    warning = next((text for text in warnings if text), "")  # One warning is enough for the whole fleet.
    sentences = [
        f"{warning}{screen.buy_text(plan.as_one_fleet, plan.bill, f' for {list_text(list(plan.plans))}')}."
    ]
    if missed := [name for name, llm_plan in plan.plans.items() if not llm_plan.verdict.holds]:
        sentences.append(f"In its simulation {list_text(missed)} does NOT keep its SLO.")
    # The remedy is the same for all LLMs, so it is given once, after their texts.
    targets = {name: screen.targets_text(llm_plan, remedy="") for name, llm_plan in plan.plans.items()}
    sentences += [_of_llm(name, text) for name, text in targets.items() if text]
    if any(screen.misses_targets(llm_plan) for llm_plan in plan.plans.values()):
        sentences.append("To plan for one target write deploy: {target: NAME} beside llms.")
    if (confidence := _confidence_text(plan)) is not None:
        sentences.append(confidence)
    return " ".join([*sentences, _basis_text(plan)])


def _of_llm(name: str, sentence: str) -> str:
    """The name of an LLM, then the sentence, which begins with a small letter unless its first word is all
    capitals ("NOT", "TTFT").
    """
    first_word = sentence.partition(" ")[0]
    return f"{name}: {sentence if first_word.isupper() else sentence[0].lower() + sentence[1:]}"


def _confidence_text(plan: SharedPlan) -> str | None:
    """How much more traffic and step time the fleet of every LLM stands, and in how many scenarios each LLM
    keeps its SLO; None if neither is known.
    """
    headrooms = [screen.headroom_of(llm_plan) for llm_plan in plan.plans.values()]
    clauses = []
    if known := [each for each in headrooms if each is not None]:
        smallest = Headroom(
            steps_frac=min(each.steps_frac for each in known),
            traffic_frac=min(each.traffic_frac for each in known),
        )
        headroom = screen.headroom_text(smallest, next(iter(plan.plans.values())))
        subject = "each holds" if len(known) == len(headrooms) else "those that are known hold"
        clauses.append(f"As written, {subject} to {headroom}")
    kept_texts = [
        f"{name} {kept_text(llm_plan.kept_in)}{screen.grown_text(llm_plan)}"
        for name, llm_plan in plan.plans.items()
        if llm_plan.kept_in is not None
    ]
    if kept_texts:
        clauses.append(f"{'kept' if clauses else 'Kept'} in: {', '.join(kept_texts)}")
    return f"{'; '.join(clauses)}." if clauses else None


def _basis_text(plan: SharedPlan) -> str:
    """Whether step times were measured: one text if it is the same for all LLMs, else a text for each."""
    texts_by_llm = {
        name: " ".join(filter(None, (screen.basis_text(llm_plan.fleet), screen.won_text(llm_plan))))
        for name, llm_plan in plan.plans.items()
    }
    if len(set(texts_by_llm.values())) == 1:
        return next(iter(texts_by_llm.values()))
    return " ".join(_of_llm(name, text) for name, text in texts_by_llm.items())


def key_figures(plan: SharedPlan) -> list[KeyFigure]:
    """The figures that a buyer asks for first, over all LLMs."""
    bill_usd_per_h = plan.bill.usd_per_h
    gpus = f"{count_text(plan.as_one_fleet.gpus, 'GPU')}, {show_w(plan.as_one_fleet.power_w)} provisioned"
    if idle := idle_gpus_text(plan.bill):
        gpus += f"; {idle}"
    return [
        KeyFigure("Cost per month", screen.month_text(bill_usd_per_h), gpus),
        _breaks_first(plan),
        _more_traffic(plan),
        screen.measured_inputs_figure([screen.input_bases(each) for each in plan.plans.values()]),
        KeyFigure("Status", plan.status, STATUS_WORDS[plan.status]),
    ]


def _breaks_first(plan: SharedPlan) -> KeyFigure:
    """What breaks first, of the LLM whose fleet stands the smallest increase."""
    name, llm_plan = min(plan.plans.items(), key=lambda item: _smallest_breaking_share(item[1]))
    first = screen.breaks_first(llm_plan)
    unknown = [llm for llm, each in plan.plans.items() if llm != name and not screen.holds_of(each)]
    others = f"; of {list_text(unknown)} not simulated" if unknown else ""
    return KeyFigure(first.name, f"of {name}: {first.value}", f"{first.note}{others}")


def _smallest_breaking_share(plan: Plan) -> float:
    """The smallest increase of traffic, step times or prompts with which the plan misses its SLO: 0 if a
    loss alone is enough for that, infinite if no increase is known to be enough.
    """
    shares = [each.frac for each in screen.find_breaks(plan) if each.kind == "slo" or each.frac == 0]
    return min(shares, default=math.inf)


def _more_traffic(plan: SharedPlan) -> KeyFigure:
    """Whether every LLM's fleet carries MORE_FRAC (planner/documents/robustness_facts.py) more of its
    traffic, according to the simulations of its own plan.
    """
    more_traffic_by_llm = {
        llm: None if llm_plan.certificate.robustness is None else llm_plan.certificate.robustness.more_traffic
        for llm, llm_plan in plan.plans.items()
    }
    growths = {growth_frac_of(llm_plan) for llm_plan in plan.plans.values()}
    # The row is named by the increase over the traffic as written, which depends on `safety: growth`. If that
    # is not the same for all LLMs, it is named by the increase without growth, MORE_FRAC.
    row = more_traffic_name(growths.pop() if len(growths) == 1 else 0.0)
    whose = "each" if len(more_traffic_by_llm) > 1 else "it"
    by_plan = f"a plan with that much `safety: growth` for {whose} says what it costs"
    if unknown := [llm for llm, each in more_traffic_by_llm.items() if each is None]:
        return KeyFigure(row, "not simulated, as it takes long", f"of {list_text(unknown)}; {by_plan}")
    if too_small := [
        llm for llm, each in more_traffic_by_llm.items() if each is not None and not each.is_carried
    ]:
        return KeyFigure(
            row, "takes other fleets", f"those of {list_text(too_small)} are too small; {by_plan}"
        )
    objective = next(iter(plan.plans.values())).certificate.objective  # All LLMs have the same.
    are_tested = all(each is not None and each.scenario_count for each in more_traffic_by_llm.values())
    # Without scenarios the cost is not mentioned, as on the screen of one LLM.
    return KeyFigure(
        row, screen.NOTHING_EXTRA[objective] if are_tested else "carried", "these fleets carry it"
    )


def answer_cards(plan: SharedPlan) -> list[Card]:
    """A card per answer, summed over all LLMs. If an LLM has no `safety`, there are no answers
    (`SharedPlan.answers`), and the only card is of the plan.
    """
    paid = plan.bill
    if plan.answers:
        return [_card(plan, total, paid.usd_per_h) for total in plan.answers]
    return [
        Card(
            name="All LLMs",
            price=f"{usd_text(paid.usd_per_h)}/h",
            fleet=screen.bought_text(plan.as_one_fleet, paid),
            is_plan=True,
            difference="the plan",
            month=f"{screen.month_text(paid.usd_per_h)} per month",
            has_plans_fleet=True,
        )
    ]


def _help_text(plan: SharedPlan) -> str:
    """What would help if no fleets for production fit together; it follows the sentence that says so."""
    warnings = [each for llm_plan in plan.plans.values() for each in llm_plan.warnings]
    helps = (each.relaxation for each in warnings if isinstance(each, NoneTogether) and each.relaxation)
    relaxation = next(helps, "")  # All LLMs have the same warning.
    return f"; what would help: {relaxation}" if relaxation else ""


def no_fleet_text(plan: SharedPlan, total: AnswerTotal) -> str:
    """Which LLMs have no fleet in an answer: "no fleet of code beside the others"."""
    beside = " beside the others" if len(total.lacks) < len(plan.plans) else ""
    return f"no fleet of {list_text(total.lacks)}{beside}"


def _card(plan: SharedPlan, total: AnswerTotal, planned_usd_per_h: float) -> Card:
    """The card of one of the three answers, with the bill over all LLMs."""
    name, is_plan = screen.NAMES[total.name], total.name == "production"
    if total.value is None or total.paid_usd_per_h is None:
        why = f"{no_fleet_text(plan, total)} was found within the limits"
        if is_plan:
            most = screen.most_kept_of(plan.plans.values())
            why += screen.most_kept_text(most) if most else ""
            why += _help_text(plan)
        return Card(name, "none", why, is_plan)
    answers = {llm: llm_plan.certificate.find_answer(total.name) for llm, llm_plan in plan.plans.items()}
    kept_texts = [
        f"{llm} {kept_text(each.kept_in)}{screen.grown_text(plan.plans[llm])}"
        for llm, each in answers.items()
        if each and each.kept_in is not None
    ]
    # For production the price is the plan's bill, so that it is the one in the verdict.
    answer_usd_per_h = planned_usd_per_h if is_plan else total.paid_usd_per_h
    difference = "the plan" if is_plan else screen.against_text(answer_usd_per_h, planned_usd_per_h)
    is_dearer = total.paid_usd_per_h > planned_usd_per_h * (1 + SAME_FRAC)
    if total.name == "on-paper" and is_dearer and plan.objective == "cost":
        # The plan holds as written too: fleets on paper are compared by the price of the GPUs in use.
        difference += f"; the least for GPUs in use ({usd_text(total.value)}/h), not for whole nodes"
    if total.name == "with-a-loss":
        difference += "; spare: 1 worker in each entry of llms plans for it"
    return Card(
        name=name,
        price=f"{usd_text(answer_usd_per_h)}/h",
        fleet="",
        is_plan=is_plan,
        difference=difference,
        month=f"{screen.month_text(answer_usd_per_h)} per month",
        kept=f"kept in: {', '.join(kept_texts)}" if kept_texts else "",
    )


def llm_cards(plan: SharedPlan) -> list[Card]:
    """A card per LLM: its fleet, and what its fleet would cost if the limits were for this LLM alone."""
    cards = []
    by_gpu = " by the GPU" if plan.unit == "USD/h" else ""  # The LLMs may share nodes that are paid whole.
    for name, llm_plan in plan.plans.items():
        value, alone = llm_plan.value, plan.alone[name]
        difference = (
            "the fleet it would have alone"
            if value <= alone * (1 + SAME_FRAC)  # A smaller difference is rounding.
            else f"alone {in_unit(alone, plan.unit)}{by_gpu}"
        )
        kept_in, headroom = llm_plan.kept_in, screen.headroom_of(llm_plan)
        kept = "" if kept_in is None else f"{kept_text(kept_in)}{screen.grown_text(llm_plan)}"
        kept = f"kept in {kept}" if kept_in is not None and kept_in.scenario_count else kept
        if not llm_plan.verdict.holds:
            kept = "its SLO is missed in the simulation"
        holds = "" if headroom is None else screen.holds_text(headroom)
        price = in_unit(value, plan.unit)
        fleet = f"{describe_fleet(llm_plan.fleet)}, of {llm_plan.fleet.llm.name}"
        cards.append(Card(name, price, fleet, is_plan=False, difference=difference, kept=kept, holds=holds))
    return cards


def find_breaks(plan: SharedPlan) -> list[Breaks]:
    """What breaks any LLM's plan, sorted by the increase that it takes; without prices, because each of those
    is compared for a single LLM.
    """
    breaks = [
        Breaks(f"{name}, {each.label}", each.frac, each.text, each.kind)
        for name, llm_plan in plan.plans.items()
        for each in screen.find_breaks(llm_plan)
        if each.kind != "price"
    ]
    return sorted(breaks, key=lambda each: each.frac)


def screen_figures(plan: SharedPlan) -> list[CaptionedChart]:
    """The charts: what each LLM's fleet costs, and what breaks each plan."""
    return [figure for figure in (_fleets_figure(plan), _breaks_figure(plan)) if figure is not None]


def _fleets_figure(plan: SharedPlan) -> CaptionedChart:
    """Bars: the value of each LLM's fleet, on paper too, and the value if the limits were for it alone."""
    bars = []
    for name, llm_plan in plan.plans.items():
        bars.append(charts.Bar(name, llm_plan.value, is_plan=True))
        if plan.in_production:
            bars.append(charts.Bar(f"{name}, on paper", plan.paper[name]))
        bars.append(charts.Bar(f"{name}, with all of the fleet for itself", plan.alone[name]))
    caption = f"{plan.unit} of each LLM, and what it would take with all of the fleet for itself."
    return CaptionedChart("llms", charts.bars_chart(bars, plan.unit), caption)


def _breaks_figure(plan: SharedPlan) -> CaptionedChart | None:
    """The chart of what breaks a shared plan; None if nothing is known to break it."""
    breaks = find_breaks(plan)
    caption = (
        "What breaks it, the nearest first: to how much more of each every LLM holds, one at a time, on the "
        "traffic as it is written."
    )
    return CaptionedChart("breaks", screen_charts.breaks_chart(breaks), caption) if breaks else None


def screen_parts_html(plan: SharedPlan, tag: str = "h1") -> str:
    """The verdict, the key figures and the cards as HTML."""
    parts = [
        verdict_heading(verdict_text(plan), tag),
        key_figures_html(key_figures(plan)),
        cards_html(answer_cards(plan)),
        cards_html(llm_cards(plan)),
    ]
    return "\n".join(parts)


def first_screen_html(plan: SharedPlan) -> str:
    """The whole first screen as HTML, for the report."""
    drawn = "".join(chart_html(figure) for figure in screen_figures(plan))
    return f"{screen_parts_html(plan)}<div class=charts>{drawn}</div>{_left_out(plan)}"


def _left_out(plan: SharedPlan) -> str:
    """A note per reason for which simulations of robustness were left out, with the LLMs that lack them."""
    robustness_of = {name: each.certificate.robustness for name, each in plan.plans.items()}
    notes = []
    for is_out_of_time, why in (
        (True, "for want of time; raise --time-limit"),
        (False, "as it takes too many requests; a part of the traffic (traffic: window) leaves room"),
    ):
        names = [
            name
            for name, each in robustness_of.items()
            if each is not None and each.left_out and each.is_out_of_time == is_out_of_time
        ]
        if names:
            notes.append(
                f"<p class=note>{escape(f'Not all was simulated around {list_text(names)}, {why}.')}</p>"
            )
    return "".join(notes)
