"""Texts on a plan's three answers (on paper, production, with a loss) and on their scenarios."""

from collections.abc import Sequence

from planner.documents import facts
from planner.reports.fact_sentences import SAME_FRAC, more_text, relative_cost_text
from planner.reports.words import Rows, list_text, pool_text
from planner.search.evidence.plan import Plan
from planner.units import show_amount, show_s, show_share

LABELS = {"on-paper": "on paper", "production": "production", "with-a-loss": "with a loss"}
# How the traffic of scenarios is drawn, by `ScenariosDrawn.traffic`. `_scenario_sentence` writes the text for
# "blocks", which has a figure.
_TRAFFIC = {
    "copies": "copies of the trace laid over each other by other shifts",
    "part": "another part of the trace's requests",
    "sessions": "as many sessions drawn from the trace's, some of them more than once",
    "description": "other draws of what is described",
}


def answer_rows(plan: Plan, *, is_by_node: bool | None = None, is_by_gpu: bool = False) -> Rows:
    """A row per answer: its fleet, its cost, in how many scenarios it is kept, and its headroom.

    With `is_by_node` the table has the price of whole nodes and that of the GPUs in use; by default only if
    they differ. `is_by_gpu`: the answers' values are prices of the GPUs in use, because several LLMs share
    the nodes.
    """
    paper = plan.certificate.find_answer("on-paper")
    unit = plan.certificate.unit
    if is_by_node is None:
        is_by_node = pays_idle_gpus(plan)
    # Values may be prices of the GPUs in use even without the argument: then the value of an answer with two
    # prices equals that price.
    is_by_gpu |= unit == "USD/h" and any(
        _has_two_prices(answer) and answer.value == answer.usd_per_h for answer in plan.certificate.answers
    )
    rows: list[tuple[str, ...]] = []
    for answer in plan.certificate.answers:
        value_texts = ["-" if answer.value is None else show_amount(answer.value, unit)]
        if is_by_node:
            value_texts.append(_other_price_text(answer, unit, is_by_gpu=is_by_gpu))
        rows.append(
            (
                LABELS[answer.name],
                workers_text(answer.workers) or "none within the limits",
                *value_texts,
                _against_paper_text(answer, paper),
                "" if answer.kept_in is None else kept_text(answer.kept_in),
                "" if answer.headroom is None else headroom_cell(answer.headroom),
                first_missed(answer),
            )
        )
    # The first price column has the answers' values, the second the other price (`_other_price_text`).
    if not is_by_node:
        price_columns: tuple[str, ...] = (unit,)
    elif unit != "USD/h":
        price_columns = (unit, "USD/h paid")
    elif is_by_gpu:
        price_columns = ("USD/h by the GPU", "USD/h paid")
    else:
        price_columns = ("USD/h paid", "USD/h by the GPU")
    return (
        "Answer",
        "Fleet",
        *price_columns,
        "Against paper",
        "Kept in",
        "As written, holds to",
        "Missed beyond",
    ), rows


def _against_paper_text(answer: facts.Answered, paper: facts.Answered | None) -> str:
    """How much more an answer costs than the fleet on paper; empty for that fleet, and without a cost."""
    if answer is paper or answer.value is None or paper is None or paper.value is None:
        return ""
    return relative_cost_text(answer.value, paper.value)


def pays_idle_gpus(plan: Plan) -> bool:
    """Whether an answer of the plan pays for GPUs that idle in whole nodes."""
    return any(_has_two_prices(answer) for answer in plan.certificate.answers)


def _has_two_prices(answer: facts.Answered) -> bool:
    """Whether the answer's price for whole nodes differs from its price for the GPUs in use."""
    paid, by_gpu = answer.paid_usd_per_h, answer.usd_per_h
    return paid is not None and by_gpu is not None and abs(paid - by_gpu) > SAME_FRAC * paid


def _other_price_text(answer: facts.Answered, unit: str, *, is_by_gpu: bool) -> str:
    """The price in the second price column: of the GPUs in use if values are paid prices, otherwise of whole
    nodes.
    """
    usd_per_h = answer.usd_per_h if unit == "USD/h" and not is_by_gpu else answer.paid_usd_per_h
    return "-" if usd_per_h is None else show_amount(usd_per_h, "USD/h")


def workers_text(workers: Sequence[facts.Workers]) -> str:
    """The workers of an answer, in the words of `words.describe_fleet`."""
    return list_text(
        [pool_text(group.role, group.count, group.gpus // group.count, group.gpu) for group in workers]
    )


def kept_text(kept_in: facts.KeptIn) -> str:
    """For instance "47 of 49 scenarios, after a loss"."""
    if not kept_in.scenario_count:
        return "not tested, as no time was left"
    after = ", after a loss" if kept_in.after_loss else ""
    return f"{kept_in.kept} of {kept_in.scenario_count} scenarios{after}"


def headroom_cell(headroom: facts.Headroom) -> str:
    """For instance '+12 % traffic, +9 % step time'."""
    return f"{more_text(headroom.traffic_frac)} traffic, {more_text(headroom.steps_frac)} step time"


def first_missed(answer: facts.Answered) -> str:
    """The limits that are missed first with more traffic, and those with longer steps if they differ."""
    limits_by_strain = {"traffic": answer.breaks_by_traffic, "steps": answer.breaks_by_steps}
    names = {
        strain: list_text([limit.label for limit in limits]) for strain, limits in limits_by_strain.items()
    }
    if names["traffic"] == names["steps"]:
        return names["traffic"]
    return "; ".join(f"{name} ({strain})" for strain, name in names.items() if name)


def scenario_lines(plan: Plan) -> list[str]:
    """How scenarios are drawn, and what the test says with 95 % confidence; empty without safety."""
    drawn = plan.certificate.scenarios_drawn
    if drawn is None:
        return []
    lines = [_scenario_sentence(drawn)]
    if plan.kept_in is not None:
        lines.append(_decision_sentence(plan.kept_in))
    return lines


def _scenario_sentence(drawn: facts.ScenariosDrawn) -> str:
    """How a scenario of this plan is drawn, and how many the search saw."""
    traffic = (
        _TRAFFIC.get(drawn.traffic) or f"blocks of {show_s(drawn.block_s)} of the trace, each from nearby"
    )
    growth = f", {show_share(drawn.growth_frac)} more of it" if drawn.growth_frac else ""
    drift_frac = drawn.prefix_drift_frac
    drift = f", {show_share(drift_frac)} of the popularity of prefixes moved to others" if drift_frac else ""
    steps = (
        "step times of prefills and of decodes by the spread that was measured"
        if drawn.have_spread
        else "step times as predicted, as no spread of them is known"
    )
    sample = (
        f", one request and one worker in {drawn.downscale} of each; the test has them all"
        if drawn.downscale > 1
        else ""
    )
    return (
        f"A scenario is traffic drawn anew ({traffic}){growth}{drift}, and {steps}. "
        f"The search saw {drawn.searched}{sample}; tests draw others until they decide."
    )


def _decision_sentence(kept_in: facts.KeptIn) -> str:
    """The test's result on the share of all scenarios, by its decision (`facts.KeptIn`)."""
    least, most = show_share(kept_in.least_frac), show_share(kept_in.most_frac)
    text = f"{kept_in.kept} of {kept_in.scenario_count}"
    if kept_in.decision == "holds":
        return f"{text}: with 95 % confidence the SLO is kept in more than {least} of all scenarios."
    if kept_in.decision == "fails":
        return f"{text}: with 95 % confidence the SLO is kept in less than {most} of all scenarios."
    return f"{text} does not decide between {least} and {most} of all scenarios."
