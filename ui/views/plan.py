"""Plan: the question on the left, the traffic and the answer on the right."""

from __future__ import annotations

from typing import Any

import streamlit as st

from planner.errors import PlannerError
from planner.units import show_s
from ui import draw, inputs, question
from ui.question import Asked
from ui.session import Session, follow, open_session, short_job
from ui.store import Document


def page() -> None:
    session = open_session()
    asked = session.asked()
    inputs.remember(asked)
    st.title("Plan a fleet")
    st.write("The cheapest GPUs that keep a promise on your traffic, by simulation.")
    left, right = st.columns([5, 7], gap="large")
    with left:
        wants_plan = st.button("Plan", type="primary", width="stretch", key="make_plan")
        st.write("Change below what you like, then press Plan. On a phone, the [answer](#answer) follows it.")
        asked, below_trace = inputs.choose(session, asked)
        session.keep(asked)
    with right:
        st.header("Answer", anchor="answer")
        if wants_plan:
            try:
                session.make_plan(asked)
            except PlannerError as error:
                session.jobs.forget(session.id, "plan")
                draw.error(error)
        _answer(session)
        _traffic(session, asked, below_trace)


def _answer(session: Session) -> None:
    job = session.jobs.of(session.id, "plan")
    if job is not None and job.state != "done":
        follow(session, "plan")
    shown = session.plan_shown()
    if shown is None:
        if job is None:
            st.info(
                "None yet: press Plan. The inputs are those of a sample, as far as you did not change them."
            )
        return
    if job is not None and job.state != "done":
        st.caption("The last plan of this session:")
    saved, document = shown
    draw.plan(document)
    command = question.command(saved.asked, session.catalog_folder)
    draw.plan_tabs(document, session.store, saved.result, command_text=command)


def _traffic(session: Session, asked: Asked, below_trace: Any) -> None:
    """What is known of the trace, or below its name why it cannot be read."""
    with below_trace:
        found = short_job(session, "trace", "trace", session.request(asked), "Reading the trace")
    if found is None:
        return
    st.header("The traffic")
    told = f"{found['requests']:,} requests in {found['duration_s']:,.0f} s"
    told += f", {found['rate_rps']:.3g} requests/s" if found["rate_rps"] else ""
    st.write(f"**{draw.escaped(found['name'])}**: {told}")
    draw.pictures(found["charts"])
    lengths = [
        (name, *(f"{found[key][column]:,.0f}" for column in ("mean", "p50", "p90", "p99", "max")))
        for name, key in (("prompt tokens", "input_tokens"), ("answer tokens", "output_tokens"))
    ]
    draw.table(("length", "mean", "p50", "p90", "p99", "longest"), lengths)
    if found["sessions"]:
        st.write(_sessions(found["sessions"]))
    if found["prefixes"]:
        spared = 100 * found["prefixes"]["token_hit_frac"]
        st.write(f"Prompts share prefixes: an endless cache would spare {spared:.1f} % of the prompt tokens.")
    draw.tenants(found["tenant_rows"])
    dropped = [f"{count:,} rows left out: {reason}" for reason, count in found["dropped"].items() if count]
    draw.bullets([*(dropped or ["No row was left out"]), *found["notes"]])


def _sessions(found: Document) -> str:
    """Of a trace whose requests wait for others."""
    turns, think_s = found["turns"], found["think_s"]
    return (
        f"{found['sessions']:,} sessions of {turns['mean']:.1f} requests on average, {turns['max']:,.0f} at "
        f"most: {found['waiting']:,} requests arrive only after an earlier one is answered, "
        f"{show_s(think_s['p50'])} later (p50; p90: {show_s(think_s['p90'])}). Rates are drawn as if answers "
        "took no time."
    )


page()
