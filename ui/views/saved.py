"""Saved plans: open, rename, delete, and compare several side by side."""

from __future__ import annotations

import streamlit as st

from planner.errors import PlannerError
from ui import draw
from ui.session import BrowserSession, follow_job, open_session
from ui.store import Document, SavedPlan


def page() -> None:
    """The page Saved plans."""
    session = open_session()
    st.title("Saved plans", anchor=False)
    everyone = st.toggle(
        "Show the plans of every browser that used this folder",
        key="saved_all",
        help=f"The folder is {session.store.folder}",
    )
    plans = {plan.id: plan for plan in session.store.plans(None if everyone else session.id)}
    if not plans:
        st.info("No plan is saved yet. Every plan you make is kept here.")
        return

    def label(plan: str) -> str:
        return f"{plans[plan].name} ({plans[plan].made} UTC)"

    _draw_plan_editor(session, plans[st.selectbox("Plan", list(plans), format_func=label, key="saved_one")])
    st.header("Side by side")
    chosen = st.multiselect(
        "Plans to compare", list(plans), list(plans)[:2], format_func=label, key="saved_chosen"
    )
    if len(chosen) < 2:
        st.info("Choose two plans or more.")
        return
    _draw_figures(session, [plans[plan] for plan in chosen])
    _draw_comparison(session, [plans[plan] for plan in chosen])


def _draw_plan_editor(session: BrowserSession, plan: SavedPlan) -> None:
    """The inputs to rename, open or delete a plan."""
    name = st.text_input("Name", plan.name, max_chars=120, key=f"name_{plan.id}")
    if name.strip() and name != plan.name:
        session.store.rename_plan(plan.id, name.strip())
        st.rerun()
    with st.container(horizontal=True):
        if st.button("Open", key="saved_open"):
            session.store.look_at(session.id, plan.id)
            session.jobs.forget(session.id, "plan")
            st.session_state.restore = plan.form
            st.switch_page("views/plan.py")
        with st.popover("Delete"):
            if st.button("Delete this plan for good", key="saved_delete"):
                session.store.delete_plan(plan.id)
                st.rerun()


def _draw_figures(session: BrowserSession, plans: list[SavedPlan]) -> None:
    """Draw a table with a column per plan, except for plans whose result is not there any more."""
    answers = [(plan, session.store.document(plan.result)) for plan in plans]
    columns = [(plan.name, document) for plan, document in answers if document is not None]
    lines = {
        "fleet": [draw.fleet_text(document) for _, document in columns],
        "tokens per step": [draw.step_tokens_text(document) for _, document in columns],
        "USD/h": [f"{document['cost_usd_per_h']:,.2f}" for _, document in columns],
        "GPUs": [str(document["gpus"]) for _, document in columns],
        "provisioned kW": [f"{document['power_w'] / 1e3:,.1f}" for _, document in columns],
        "SLO": [draw.kept_word(document["simulation"]["slo"]) for _, document in columns],
        "limits": [_limits_text(document) for _, document in columns],
        "traffic": [document["traffic"] for _, document in columns],
    }
    names = [f"{k}. {name}" for k, (name, _) in enumerate(columns, start=1)]
    draw.draw_table(("figure", *names), [(name, *cells) for name, cells in lines.items()])


def _limits_text(document: Document) -> str:
    """The limits of the plan's SLO, from the first column of its table."""
    _head, rows = document["tables"]["slo"]
    return "; ".join(row[0] for row in rows)


def _draw_comparison(session: BrowserSession, plans: list[SavedPlan]) -> None:
    """Draw a button that starts `plan compare` of the plans on the traffic of the first, and its answer."""
    st.write(
        "Each plan was made for its own traffic. To compare them on equal terms, simulate all of them on the "
        "traffic of the first."
    )
    if st.button("Simulate on the traffic of the first", key="compare_start"):
        fleets = {
            f"{k}. {plan.name}": session.store.files(plan.result, "plan.yaml")["plan.yaml"].decode()
            for k, plan in enumerate(plans, start=1)
        }
        try:
            first = session.plan_request(plans[0].form)
            session.jobs.start(session.id, "compare", "compare", first | {"fleets": fleets})
        except PlannerError as error:
            draw.draw_error(error)
    comparison = follow_job(session, "compare")
    job = session.jobs.find(session.id, "compare")
    if comparison is None or job is None:
        return
    st.subheader(draw.escape_markdown(comparison["verdict"]))
    draw.draw_charts(comparison["charts"])
    draw.draw_table(*comparison["table"])
    if comparison["notes"]:
        draw.draw_list(comparison["notes"])
    draw.draw_downloads(session.store, job.key, ("compare.html", "compare.csv", "compare.json"))


page()
