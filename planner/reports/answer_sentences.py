"""The three answers in words: on paper, in production, with a loss."""

from __future__ import annotations

from collections.abc import Sequence

from planner.documents.facts import (
    HEADROOM_MOST_FRAC,
    HEADROOM_STEP_FRAC,
    Answered,
    Headroom,
    KeptIn,
    ScenariosDrawn,
    Workers,
)
from planner.reports.fact_sentences import costs_more, percent
from planner.reports.words import Rows, amount, listed, pool_text
from planner.search.evidence.plan import Plan
from planner.units import show_s

LABELS = {"on-paper": "on paper", "production": "production", "with-a-loss": "with a loss"}
_TRAFFIC = {
    "copies": "copies of the trace laid over each other by other shifts",
    "part": "another part of the trace's requests",
    "description": "other draws of what is described",
}


def answer_rows(plan: Plan, *, is_by_node: bool | None = None, is_by_gpu: bool = False) -> Rows:
    """A line per answer: what it is, what it costs, in how many scenarios it is kept, how far it holds.

    `is_by_node`: with what is paid for whole nodes beside the price by the GPU, by default where they differ.
    `is_by_gpu`: one of several LLMs, whose values count GPUs in use, as they share nodes.
    """
    paper = plan.certificate.find_answer("on-paper")
    unit = plan.certificate.unit
    if is_by_node is None:
        is_by_node = pays_idle_gpus(plan)
    is_by_gpu |= unit == "USD/h" and any(
        _is_paid_otherwise(each) and each.value == each.usd_per_h for each in plan.certificate.answers
    )
    rows: list[tuple[str, ...]] = [
        (
            LABELS[each.name],
            workers_text(each.workers) or "none within the limits",
            "-" if each.value is None else amount(each.value, unit),
            *([_beside_text(each, unit, is_by_gpu=is_by_gpu)] if is_by_node else []),
            ""
            if each.value is None or paper is None or paper.value is None or each is paper
            else costs_more(each.value, paper.value),
            "" if each.kept_in is None else kept_text(each.kept_in),
            "" if each.headroom is None else room_text(each.headroom),
            first_missed(each),
        )
        for each in plan.certificate.answers
    ]
    both = ("USD/h paid", "USD/h by the GPU") if unit == "USD/h" else (unit, "USD/h paid")
    both = ("USD/h by the GPU", "USD/h paid") if is_by_gpu and unit == "USD/h" else both
    money = both if is_by_node else (unit,)
    return (
        "Answer",
        "Fleet",
        *money,
        "Against paper",
        "Kept in",
        "As written, holds to",
        "What breaks first",
    ), rows


def pays_idle_gpus(plan: Plan) -> bool:
    """Whether one of its answers pays whole nodes, with GPUs that idle."""
    return any(_is_paid_otherwise(each) for each in plan.certificate.answers)


def _is_paid_otherwise(answer: Answered) -> bool:
    """Whether whole nodes are paid, with GPUs that idle."""
    paid, by_gpu = answer.paid_usd_per_h, answer.usd_per_h
    return paid is not None and by_gpu is not None and abs(paid - by_gpu) > 1e-9 * paid


def _beside_text(answer: Answered, unit: str, *, is_by_gpu: bool) -> str:
    """What the GPUs in use cost, where what is paid is said already."""
    usd_per_h = answer.usd_per_h if unit == "USD/h" and not is_by_gpu else answer.paid_usd_per_h
    return "-" if usd_per_h is None else amount(usd_per_h, "USD/h")


def workers_text(workers: Sequence[Workers]) -> str:
    """As words.describe says a fleet."""
    return listed([pool_text(each.role, each.count, each.gpus // each.count, each.gpu) for each in workers])


def kept_text(kept_in: KeptIn) -> str:
    after = ", after a loss" if kept_in.after_loss else ""
    return f"{kept_in.kept} of {kept_in.futures} scenarios{after}"


def room_text(headroom: Headroom) -> str:
    """For instance '+12 % traffic, +9 % step time'."""
    return f"{_more(headroom.traffic_frac)} traffic, {_more(headroom.steps_frac)} step time"


def _more(frac: float) -> str:
    if frac >= HEADROOM_MOST_FRAC:
        return f"+{100 * HEADROOM_MOST_FRAC:.0f} % or more"
    return f"+{100 * frac:.1f} %" if frac else f"less than +{100 * HEADROOM_STEP_FRAC:g} %"


def first_missed(answer: Answered) -> str:
    by = {"traffic": answer.breaks_by_traffic, "steps": answer.breaks_by_steps}
    names = {what: listed([limit.name for limit in limits]) for what, limits in by.items()}
    if names["traffic"] == names["steps"]:
        return names["traffic"]
    return "; ".join(f"{name} ({what})" for what, name in names.items() if name)


def futures_lines(plan: Plan) -> list[str]:
    """What kind of scenarios, and what the test says."""
    drawn = plan.certificate.futures
    if drawn is None:
        return []
    lines = [_kind(drawn)]
    made = plan.certificate.find_answer("production")
    if made is not None and made.kept_in is not None:
        lines.append(_decided(made.kept_in))
    return lines


def _kind(drawn: ScenariosDrawn) -> str:
    traffic = (
        _TRAFFIC.get(drawn.traffic) or f"blocks of {show_s(drawn.block_s)} of the trace, each from nearby"
    )
    growth = f", {percent(drawn.growth_frac)} more of it" if drawn.growth_frac else ""
    steps = (
        "step times of prefills and of decodes by the spread that was measured"
        if drawn.have_spread
        else "step times as predicted, as no spread of them is known"
    )
    k = drawn.one_in
    model = f", one request and one worker in {k} of each; the test has them all" if k > 1 else ""
    return (
        f"A scenario is traffic drawn anew ({traffic}){growth}, and {steps}. "
        f"The search saw {drawn.searched}{model}."
    )


def _decided(kept_in: KeptIn) -> str:
    least, most = percent(kept_in.least_frac), percent(kept_in.most_frac)
    text = f"{kept_in.kept} of {kept_in.futures}"
    if kept_in.decision == "holds":
        return f"{text}: with 95 % confidence the SLO is kept in more than {least} of all scenarios."
    if kept_in.decision == "fails":
        return f"{text}: with 95 % confidence the SLO is kept in less than {most} of all scenarios."
    return f"{text} does not decide between {least} and {most} of all scenarios."
