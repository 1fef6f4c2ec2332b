"""The page What if: one input of the plan is moved, and the new plan is shown beside the old one.

Below that: what changes if inputs are a little off (sensitivity), and the best fleet for each value of a
limit. Streamlit runs this file from top to bottom whenever an input changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st

from planner.domain import Limit, Selector
from planner.errors import PlannerError
from planner.reports import charts
from planner.reports.curves import Curve, class_text
from planner.reports.drawing import live_spec
from planner.slo_metrics import METRICS
from planner.studies import what_if
from ui import draw, question
from ui.jobs import result_key
from ui.question import Form
from ui.session import BrowserSession, follow_job, open_session
from ui.store import Document, SavedPlan

MOST_POINTS = 10  # The curve of a limit has at most this many points, because each one is planned anew.
FACTORS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)  # The slider multiplies by them.
# Keys of the form that may be moved, with their labels; limits of the SLO and inputs of a GPU join them.
SINGLE = {
    "rate": "rate [requests/s]",
    "power_kw": "power limit [kW]",
    "cost": "cost limit [USD/h]",
    "bandwidth": "network between workers [GB/s]",
}
# What the select box calls a price of a GPU, and the column of form["gpus"] that has it.
PRICED = {"price": "USD/h", "reserved price": "reserved", "spot price": "spot"}
OTHER = "other"  # The choice in the select box that shows a text field for any key of slo.yaml.


def page() -> None:
    """The page What if."""
    session = open_session()
    st.title("What if", anchor=False)
    shown = session.plan_shown()
    if shown is None:
        st.info("Make a plan first; then move one of its inputs here.")
        st.page_link("views/plan.py", label="Plan")
        return
    saved, document = shown
    _draw_one_move(session, saved, document)
    if saved.form["objective"] != "throughput":  # Sensitivity refuses this objective.
        _draw_sensitivity(session, saved)
        _draw_limit_curve(session, saved)


def _draw_one_move(session: BrowserSession, saved: SavedPlan, document: Document) -> None:
    """Draw the inputs for a move, and the plan after it beside the plan before."""
    st.header("One move")
    st.write(f"The plan: {draw.escape_markdown(document['answer'])}")
    try:
        changed, sentence = _draw_move_inputs(session, saved, document)
        if changed is None:
            st.info("Move the slider away from 1, or change the value.")
            return
        request = session.plan_request(changed)
        key = result_key("what_if", request)
    except PlannerError as error:
        draw.draw_error(error)
        return
    job = session.jobs.find(session.id, "what_if")
    if job is None or job.key != key:
        session.jobs.start(session.id, "what_if", "what_if", request)
    elif job.state in ("failed", "cancelled") and st.button("Try again"):
        session.jobs.start(session.id, "what_if", "what_if", request)
    answer = follow_job(session, "what_if")
    if answer is not None:
        _draw_comparison(document, answer, sentence)
        if st.button("Keep this plan", key="keep_what_if"):
            # The page Plan fills its inputs from `restore` when it is drawn next.
            st.session_state.restore = changed
            session.make_plan(changed, f"{answer['llm']}, {sentence}")
            st.switch_page("views/plan.py")


def _draw_move_inputs(
    session: BrowserSession, saved: SavedPlan, document: Document
) -> tuple[Form | None, str]:
    """Draw the inputs for a move. Returns the form with one input moved, or None if the input still has the
    plan's value; and a sentence on the move.
    """
    form = saved.form
    # Without a rate in the form the plan has the trace's own rate. It is written into the form, so that it
    # can be moved.
    if form["rate"] is None and form["objective"] != "throughput":
        form = form | {"rate": document["rate_rps"]}
    offered = {name: label for name, label in SINGLE.items() if form[name] is not None}
    if form["objective"] == "throughput":  # Then the rate is what the plan answers, not an input.
        offered.pop("rate", None)
    offered |= {
        f"{metric}_ms": f"{METRICS[metric].abbreviation} limit [ms]"
        for metric in question.INPUT_METRICS
        if form[f"{metric}_ms"] is not None
    }
    for row in form["gpus"]:
        if row["use"]:
            for kind, column in PRICED.items():
                if row[column] is not None:
                    offered[f"{kind} {row['GPU']}"] = f"{kind} of {row['GPU']} [USD/h]"
            if row["stock"]:
                offered[f"stock {row['GPU']}"] = f"stock of {row['GPU']}"
    offered |= {"spare": f"{form['spare_of']} that may fail", OTHER: "any other key of slo.yaml"}
    moved = st.selectbox("What moves", list(offered), format_func=offered.__getitem__, key="what_moves")
    if moved == OTHER:
        return _any_key_input(session, form)
    if moved == "spare":  # A number of workers or nodes that may be 0, which no factor would move.
        spare = st.number_input("How many may fail", 0, 100, form["spare"], key="what_spare")
        sentence = f"{spare} {form['spare_of']} may fail"
        return (form | {"spare": spare}, sentence) if spare != form["spare"] else (None, "")
    factor = st.select_slider(
        "Times what it is", FACTORS, 1.0, key="what_factor", format_func=lambda f: f"× {f:g}"
    )
    # The key of a GPU's input ends with the GPU, as in "spot price h100-80g". All other keys are one word.
    kind, _, gpu = moved.rpartition(" ") if " " in moved else (moved, "", "")
    before = _input_value(form, kind, gpu)
    after: Any = round(before * factor) if kind == "stock" else float(f"{before * factor:.4g}")
    sentence = f"{offered[moved]}: {after:g} instead of {before:g}"
    if after == before:
        return None, ""
    st.write(draw.escape_markdown(sentence))
    return _with_input(form, kind, gpu, after), sentence


def _any_key_input(session: BrowserSession, form: Form) -> tuple[Form | None, str]:
    """Draw a text field for a change of any key of slo.yaml, written as for `plan what-if --change`. Returns
    the changed form, None while the field is empty, and the text of the change.

    Raises PlannerError for a change that cannot be read.
    """
    text = st.text_input(
        "Key and value",
        key="what_key",
        placeholder="robust.step_times=2 %",
        help="A key of slo.yaml, its parts joined by dots, = and the value; nothing after = takes it out.",
    )
    if not text.strip():
        return None, ""
    changed = what_if.change_question(question.document(form, session.catalog), text, session.catalog)
    return question.form_of_document(changed, form, session.catalog), text.strip()


def _input_value(form: Form, kind: str, gpu: str) -> float:
    """The value of an input. Without a `gpu`, `kind` is a key of the form. With one, it is "stock" or one of
    PRICED, and the value is in the GPU's row of the form.
    """
    if not gpu:
        return float(form[kind])
    row = next(row for row in form["gpus"] if row["GPU"] == gpu)
    return float(row[PRICED.get(kind, kind)])


def _with_input(form: Form, kind: str, gpu: str, value: Any) -> Form:
    """The form with `value` in the place where `_input_value` reads it."""
    if not gpu:
        # If a limit of the SLO is moved, the limits are no longer those of the preset that the form names.
        is_limit = kind.endswith("_ms")
        return form | {kind: value} | ({"preset": question.OWN_LIMITS} if is_limit else {})
    rows = [row | {PRICED.get(kind, kind): value} if row["GPU"] == gpu else row for row in form["gpus"]]
    return form | {"gpus": rows}


def _draw_sensitivity(session: BrowserSession, saved: SavedPlan) -> None:
    """Draw a button that plans again with inputs that are a little off, and a table of what came out."""
    st.header("Is it robust, and what would relaxing a limit save?")
    st.write(
        "Step times, traffic and prices that are 10 % off; each limit a little tighter and looser; one more "
        "of every GPU."
    )
    if st.button("Ask", key="sensitivity_start"):
        try:
            request = session.plan_request(saved.form)
            session.jobs.start(session.id, "sensitivity", "sensitivity", request)
        except PlannerError as error:
            draw.draw_error(error)
    answer = follow_job(session, "sensitivity")
    if answer is not None:
        _draw_sensitivity_table(answer["changes"])


def _draw_sensitivity_table(changes: list[Document]) -> None:
    """Draw a row for each change with which the plan fails or is no longer the best; name all others in one
    line.
    """
    word_for_kept = {True: "✓ holds", False: "✗ fails", None: "not offered"}
    too_few = "✗ too few scenarios"  # As written it holds.
    different, same = [], []
    for row in changes:
        if row["kept"] and row["costs_the_same"]:
            same.append(row["change"])
        else:
            word = too_few if row["kept_as_written"] else word_for_kept[row["kept"]]
            if row.get("kept_in_search_only"):  # Answers of earlier versions lack it.
                word = "search's scenarios only"
            different.append((row["change"], word, row["more"], row["fleet"]))
    if different:
        draw.draw_table(("if", "the plan", "the best then costs", "which is"), different)
    if same:
        st.write(draw.escape_markdown(f"The plan holds and stays the best with: {'; '.join(same)}."))


def _draw_limit_curve(session: BrowserSession, saved: SavedPlan) -> None:
    """Draw a select box of limits, and charts and a table of the best fleets over the chosen one."""
    st.header("What each limit costs")
    offered: dict[str, str] = {
        metric: f"{METRICS[metric].abbreviation} limit"
        for metric in question.INPUT_METRICS
        if saved.form[f"{metric}_ms"] is not None
    }
    offered |= {"rate": "rate", "power": "power limit", "cost": "cost limit"}
    over = st.selectbox(
        "Draw the best fleet over", list(offered), format_func=offered.__getitem__, key="curve_over"
    )
    if st.button("Draw", key="curve_start"):
        try:
            request = session.plan_request(saved.form) | {"over": over, "points": MOST_POINTS}
            session.jobs.start(session.id, "pareto", "pareto", request)
        except PlannerError as error:
            draw.draw_error(error)
    frontier = follow_job(session, "pareto")
    if frontier is not None:
        draw.draw_charts(frontier["charts"])
        head = (f"{frontier['over']} [{frontier['unit']}], holds to", frontier["objective_unit"], "fleet")
        draw.draw_table(
            head,
            [
                (f"{step['holds_to']:.5g}", f"{step['value']:,.6g}", step["fleet"])
                for step in frontier["steps"]
            ],
        )


def _draw_comparison(old: Document, new: Document, sentence: str) -> None:
    """Draw the plan (`old`) and the plan after the move (`new`) side by side: a table of their figures, and a
    chart per metric with both distributions of latency. `sentence` names the move.
    """
    head, rows = ("figure", "the plan", "what if", "change"), []
    for name, figure, shown_as in (
        ("USD/h", "cost_usd_per_h", "{:,.2f}"),
        ("GPUs", "gpus", "{:,.0f}"),
        ("provisioned W", "power_w", "{:,.0f}"),
        ("requests/s", "rate_rps", "{:,.4g}"),
    ):
        before, after = old[figure], new[figure]
        change = draw.relative_change(before, after)
        rows.append((name, shown_as.format(before), shown_as.format(after), change))
    for name, text_of in (("fleet", draw.fleet_text), ("tokens per step", draw.step_tokens_text)):
        before, after = text_of(old), text_of(new)
        rows.append((name, before, after, "the same" if before == after else "another"))
    kept_before, kept_after = (draw.kept_word(plan["simulation"]["slo"]) for plan in (old, new))
    rows.append(("SLO", kept_before, kept_after, ""))
    st.subheader(draw.escape_markdown(f"With {sentence}: {new['cost_usd_per_h']:,.2f} USD/h"))
    draw.draw_table(head, rows)
    drawn_charts = []
    for metric_of_class, drawn in new["curves"].items():
        metric, limits = drawn["metric"], [_limit_of(limit) for limit in drawn["limits"]]
        # A plan whose SLO lacks the class has no such curve.
        both = {"the plan": old["curves"].get(metric_of_class), "what if": drawn}
        curves = {
            name: Curve(np.array(curve["value_s"]), np.array(curve["share"]))
            for name, curve in both.items()
            if curve is not None
        }
        chart = charts.comparison_chart(curves, metric, limits)
        caption = (
            f"Distribution of the {METRICS[metric].name}{class_text(limits)}, with the limits of the new "
            "question."
        )
        drawn_charts.append({"spec": live_spec(chart), "caption": caption})
    draw.draw_charts(drawn_charts)


def _limit_of(document: Document) -> Limit:
    """A limit of an answer's document."""
    of_class = document["selector"]
    return Limit(**{**document, "selector": None if of_class is None else Selector(**of_class)})


page()
