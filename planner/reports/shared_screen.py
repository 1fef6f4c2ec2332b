"""The first screen of a plan for several LLMs: what one LLM's says (screen.py), of all of them together, then
a card for each.
"""

from __future__ import annotations

import math
from html import escape

from planner.documents.facts import Headroom
from planner.reports import charts, screen, screen_charts
from planner.reports.answer_sentences import kept_text
from planner.reports.drawing import Figure
from planner.reports.page import chart
from planner.reports.screen import MORE_TRAFFIC, STATUS_WORDS, Breaks, Card, Glance
from planner.reports.screen_page import cards as cards_html
from planner.reports.screen_page import glance as glance_html
from planner.reports.screen_page import strip
from planner.reports.words import amount, counted, describe, listed, usd
from planner.search.evidence.plan import Plan
from planner.search.several.several_llms import AnswerTotal, SharedPlan


def verdict(plan: SharedPlan) -> str:
    """What to buy for whom, what it costs, how far it holds and how sure that is."""
    doubt = next(filter(None, map(screen.not_for_production, plan.plans.values())), "")
    text = [f"{doubt}{screen.buy_text(plan.workers, plan.bill, f' for {listed(list(plan.plans))}')}."]
    if missed := [name for name, one in plan.plans.items() if not one.verdict.holds]:
        text.append(f"In its simulation {listed(missed)} does NOT keep its SLO.")
    remedy = "deploy: {target: NAME} beside llms plans for one"
    targets = {name: screen.targets_text(one, remedy) for name, one in plan.plans.items()}
    text += [f"{name}: {text[0].lower()}{text[1:]}" for name, text in targets.items() if text]
    if (sure := _how_sure(plan)) is not None:
        text.append(sure)
    return " ".join([*text, _basis_text(plan)])


def _how_sure(plan: SharedPlan) -> str | None:
    """To what every LLM holds, and in how many of its scenarios each is kept."""
    rooms = [screen.headroom_of(one) for one in plan.plans.values()]
    parts = []
    if known := [room for room in rooms if room is not None]:
        traffic, steps = (
            min(getattr(room, name) for room in known) for name in ("traffic_frac", "steps_frac")
        )
        room = screen.room_text(Headroom(steps, traffic))
        whose = "each holds" if len(known) == len(rooms) else "those that are known hold"
        parts.append(f"As written, {whose} to {room}")
    kept = []
    for name, one in plan.plans.items():
        answer = screen.planned_answer(one)
        if answer is not None and answer.kept_in is not None:
            kept.append(f"{name} {kept_text(answer.kept_in)}")
    if kept:
        parts.append(f"{'kept' if parts else 'Kept'} in: {', '.join(kept)}")
    return f"{'; '.join(parts)}." if parts else None


def _basis_text(plan: SharedPlan) -> str:
    text = {name: screen.basis_text(one.fleet) for name, one in plan.plans.items()}
    if len(set(text.values())) == 1:
        return next(iter(text.values()))
    return " ".join(f"{name}: {text[0].lower()}{text[1:]}" for name, text in text.items())


def glance(plan: SharedPlan) -> list[Glance]:
    """What one asks first, of all LLMs."""
    paid = plan.bill.usd_per_h
    gpus = f"{counted(plan.workers.gpus, 'GPU')}, {plan.workers.power_w / 1e3:,.1f} kW provisioned"
    return [
        Glance("Cost per month", screen.month_text(paid), gpus),
        _breaks_first(plan),
        _more_traffic(plan),
        _measured(plan),
        Glance("Status", plan.status, STATUS_WORDS[plan.status]),
    ]


def _breaks_first(plan: SharedPlan) -> Glance:
    """Of the LLM that holds least."""
    name, one = min(plan.plans.items(), key=lambda each: _least(each[1]))
    first = screen.breaks_first(one)
    return Glance(first.name, first.value, f"of {name}: {first.note}")


def _least(plan: Plan) -> float:
    values = [each.frac for each in screen.breaks(plan) if each.kind == "slo" or not each.frac]
    return min(values, default=math.inf)


def _more_traffic(plan: SharedPlan) -> Glance:
    """Whether the fleet of every LLM carries it, each as a plan for it would ask."""
    at = {
        llm: None if one.certificate.around is None else one.certificate.around.more_traffic
        for llm, one in plan.plans.items()
    }
    by_plan = (
        f"a plan with so much more safety: growth of {'each' if len(at) > 1 else 'it'} says what it costs"
    )
    if unknown := [llm for llm, each in at.items() if each is None]:
        return Glance(MORE_TRAFFIC, "not simulated", f"of {listed(unknown)}; {by_plan}")
    if small := [llm for llm, each in at.items() if each is not None and not each.is_carried]:
        return Glance(
            MORE_TRAFFIC, "takes other fleets", f"those of {listed(small)} are too small; {by_plan}"
        )
    return Glance(MORE_TRAFFIC, "no extra cost", "these fleets carry it")


def _measured(plan: SharedPlan) -> Glance:
    kinds = {
        (name, figure): kind for name, one in plan.plans.items() for figure, kind in screen.basis(one).items()
    }
    measured = sum(kind == "measured" for kind in kinds.values())
    estimated = dict.fromkeys(figure for (_, figure), kind in kinds.items() if kind == "estimated")
    note = f"estimated: {', '.join(estimated)}" if estimated else ""
    return Glance("Measured", f"{measured} of {len(kinds)} inputs", note)


def cards(plan: SharedPlan) -> list[Card]:
    """The answers of all LLMs together; the plan alone where not every LLM asks for safety."""
    paid = plan.bill
    if plan.answers:
        return [_card(plan, total, paid.usd_per_h) for total in plan.answers]
    bought = screen.bought_text(plan.workers, paid)
    price, month = f"{usd(paid.usd_per_h)}/h", f"{screen.month_text(paid.usd_per_h)} per month"
    return [Card("All LLMs", price, "the plan", month, bought, "", "", "", is_plan=True)]


def _card(plan: SharedPlan, total: AnswerTotal, planned_usd_per_h: float) -> Card:
    name, is_plan = screen.NAMES[total.name], total.name == "production"
    if total.value is None or total.paid_usd_per_h is None:
        why = f"no fleet of {listed(total.lacks)} within the limits was found"
        return Card(name, "none", "", "", why, "", "", "", is_plan=is_plan)
    answers = {llm: one.certificate.find_answer(total.name) for llm, one in plan.plans.items()}
    kept = [
        f"{llm} {kept_text(each.kept_in)}"
        for llm, each in answers.items()
        if each and each.kept_in is not None
    ]
    paid = planned_usd_per_h if is_plan else total.paid_usd_per_h
    return Card(
        name,
        f"{usd(paid)}/h",
        "the plan" if is_plan else screen.against_text(paid, planned_usd_per_h),
        f"{screen.month_text(paid)} per month",
        "",
        f"kept in: {', '.join(kept)}" if kept else "",
        "",
        "",
        is_plan=is_plan,
    )


def llm_cards(plan: SharedPlan) -> list[Card]:
    """Who gets what, and what it would take with all of the fleet for itself."""
    values = []
    for name, one in plan.plans.items():
        value, alone = one.value, plan.alone[name]
        gives = "as alone" if value <= alone * (1 + 1e-9) else f"alone {amount(alone, plan.unit)} {plan.unit}"
        answer, room = screen.planned_answer(one), screen.headroom_of(one)
        kept = "" if answer is None or answer.kept_in is None else f"kept in {kept_text(answer.kept_in)}"
        if not one.verdict.holds:
            kept = "its SLO is missed in the simulation"
        holds = "" if room is None else screen.holds_text(room)
        price = f"{amount(value, plan.unit)} {plan.unit}"
        fleet = f"{describe(one.fleet)}, of {one.fleet.llm.name}"
        values.append(Card(name, price, gives, "", fleet, kept, holds, "", is_plan=False, is_of_llm=True))
    return values


def breaks(plan: SharedPlan) -> list[Breaks]:
    """What breaks any of them, the nearest first; no prices, which are of one fleet alone."""
    values = [
        Breaks(f"{name}, {each.label}", each.frac, each.said, each.kind)
        for name, one in plan.plans.items()
        for each in screen.breaks(one)
        if each.kind != "price"
    ]
    return sorted(values, key=lambda each: each.frac)


def figures(plan: SharedPlan) -> list[Figure]:
    """What each takes, and what breaks which."""
    return [each for each in (comparison(plan), _breaks_figure(plan)) if each is not None]


def comparison(plan: SharedPlan) -> Figure:
    """What each LLM takes, beside what it would take with all of the fleet for itself."""
    bars = []
    for name, one in plan.plans.items():
        bars.append(charts.Bar(name, one.value, is_plan=True))
        if plan.in_production:
            bars.append(charts.Bar(f"{name}, on paper", plan.paper[name]))
        bars.append(charts.Bar(f"{name}, with all of the fleet for itself", plan.alone[name]))
    caption = f"{plan.unit} of each LLM, and what it would take with all of the fleet for itself."
    return Figure("llms", charts.bars_chart(bars, plan.unit), caption)


def _breaks_figure(plan: SharedPlan) -> Figure | None:
    values = breaks(plan)
    caption = (
        "What breaks it, the nearest first: to how much more of each every LLM holds, one at a time, on the "
        "traffic as it is written."
    )
    return Figure("breaks", screen_charts.breaks_chart(values), caption) if values else None


def texts(plan: SharedPlan, tag: str = "h1") -> str:
    """Verdict, figures at a glance and cards as HTML."""
    parts = [strip(verdict(plan), tag), glance_html(glance(plan)), cards_html(cards(plan))]
    return "\n".join([*parts, cards_html(llm_cards(plan))])


def fragment(plan: SharedPlan) -> str:
    """All of the first screen for the report."""
    drawn = "".join(chart(figure) for figure in figures(plan))
    return f"{texts(plan)}<div class=charts>{drawn}</div>{_left_out(plan)}"


def _left_out(plan: SharedPlan) -> str:
    missing = [
        name
        for name, one in plan.plans.items()
        if one.certificate.around is not None and one.certificate.around.left_out
    ]
    text = f"Not all was simulated around {listed(missing)}, for want of time; raise --time-limit."
    return f"<p class=note>{escape(text)}</p>" if missing else ""
