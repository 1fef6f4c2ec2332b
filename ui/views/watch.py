"""Watch: live metrics of the engines held against the plan, a look at a time."""

from __future__ import annotations

import time
from typing import Any

import streamlit as st

from planner.errors import InputError, PlannerError
from planner.studies.watch_words import WHAT
from ui import draw, question
from ui.jobs import Job
from ui.session import BrowserSession, follow_job, open_session
from ui.store import Document, SavedPlan

PAGE, RESULT = "watch", "watch result"
FILE, SERVER = "a file", "a Prometheus"
STATUS_BADGES = {
    "inside": ("Inside the plan", "green"),
    "drifted": ("Drifted; the plan still holds", "orange"),
    "outgrown": ("Outgrown", "red"),
    "missed": ("The SLO is missed", "red"),
}
PERHAPS_TOO_MUCH = "Perhaps more than the plan carries", "orange"


def page() -> None:
    """The page Watch."""
    session = open_session()
    st.title("Watch", anchor=False)
    st.write(
        "What the engines of a deployment say of their traffic and latencies, held against the plan: what "
        "drifted and since when, and how far the plan still holds."
    )
    if (shown := session.plan_shown()) is None:
        st.info("No plan to hold them against yet: plan first.")
        st.page_link("views/plan.py", label="Plan", query_params=dict(st.query_params))
        return
    saved, document = shown
    st.caption(draw.escape_markdown(f"Against: {document['answer']}"))
    form = _draw_inputs(session)
    if st.button("Look", type="primary", key="watch_start"):
        _start_job(session, saved, form)
    job = session.jobs.find(session.id, PAGE)
    if job is not None and job.state != "done":
        follow_job(session, PAGE)
    last = session.store.page_document(session.id, RESULT)
    answer = session.store.document(last["result"]) if last else None
    if last is not None and answer is not None:
        _draw_answer(answer, last)
    elif job is None:
        st.info("Not looked yet.")
    st.header("All the time")
    st.write(
        "This looks every five minutes and serves gauges for alerts; with -o it writes rules and a dashboard:"
    )
    command = (
        "plan watch out/ --prometheus http://prometheus:9090 --slo slo.yaml --export :9109 -o monitoring/"
    )
    st.code(command, language=None, wrap_lines=True)


def _draw_inputs(session: BrowserSession) -> Document:
    """The inputs for the source of the metrics and for the windows that count."""
    source = st.segmented_control(
        "Metrics from", (FILE, SERVER), default=FILE, required=True, key="watch_source"
    )
    places: list[str] = []
    if source == FILE:
        uploaded = st.file_uploader(
            "Answers of query_range (JSON), or what promtool dumped",
            accept_multiple_files=True,
            key="watch_files",
            help="Of vLLM's own metrics; several files add up.",
        )
        places = [str(session.store.add_file(file.name, file.getvalue())) for file in uploaded]
    else:
        address = st.text_input(
            "Address of a Prometheus", placeholder="http://prometheus:9090", key="watch_address"
        )
        places = [address.strip()] if address.strip() else []
    window, step, model = st.columns(3, vertical_alignment="bottom")
    form: Document = {
        "places": places,
        "window": window.text_input("How far back", "24 h", key="watch_window"),
        "step": step.text_input("Windows of", "1 min", key="watch_step"),
        "model": model.text_input("Label model_name, of several", key="watch_model", placeholder="any")
        or None,
        "match": "",
    }
    if source == SERVER:
        form["match"] = st.text_input(
            "Labels to ask for", key="watch_match", placeholder='namespace="prod"', help="As in PromQL."
        )
    form["replans"] = st.checkbox(
        "Say what planning again would change, where something drifted", key="watch_replan"
    )
    return form


def _start_job(session: BrowserSession, saved: SavedPlan, form: Document) -> None:
    """Start a job that holds the metrics against a saved plan; its result is kept for the session."""
    store, owner = session.store, session.id

    def keep(job: Job) -> None:
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())  # Whoever reads it may be in another zone.
        store.keep_page_document(owner, RESULT, {"result": job.key, "plan": saved.name, "at": at})

    try:
        if not form["places"]:
            raise InputError("metrics: none yet; upload a file, or give the address of a Prometheus")
        request: dict[str, Any] = form | {
            "plan": str(store.add_file("plan.zip", store.packed(saved.result))),
            "question": question.document(saved.form, session.catalog),
            "catalog": str(session.catalog_folder) if session.catalog_folder else None,
            "looked": time.time(),  # The time makes each look a new job.
        }
        session.jobs.start(owner, PAGE, "watch", request, keep)
    except PlannerError as error:
        session.jobs.forget(owner, PAGE)
        draw.draw_error(error)


def _draw_answer(answer: Document, last: Document) -> None:
    """Draw the last look: how the plan stands, and what drifted. `last` is what `_start_job` keeps of it."""
    # None: whether traffic exceeds what the plan carries is not known.
    is_unsure = answer["status"] != "missed" and answer.get("is_exceeded", False) is None
    name, colour = PERHAPS_TOO_MUCH if is_unsure else STATUS_BADGES[answer["status"]]
    st.header("Answer")
    st.badge(name, color=colour)  # type: ignore[arg-type]  # The colour is one of Streamlit's.
    st.subheader(draw.escape_markdown(answer["headline"][:1].upper() + answer["headline"][1:]))
    st.caption(draw.escape_markdown(f"Looked at {last['at']}, against {last['plan']}."))
    draw.draw_list(answer["sentences"])
    rows = [
        (
            _quantity_name(row["what"]),
            _figure_text(row["planned"]),
            _figure_text(row["now"]),
            draw.signed_percent(row["change_frac"]),
            ("more work" if row["is_harder"] else "less work") if row["is_drift"] else "no",
        )
        for row in answer["drift"]
    ]
    if rows:
        draw.draw_table(("quantity", "planned", "now", "change", "drifted"), rows)


def _quantity_name(what: str) -> str:
    """The name of a watched quantity, with its unit."""
    name, unit = WHAT[what]
    return f"{name} [{unit}]" if unit else name


def _figure_text(value: float | None) -> str:
    """A quantity in four digits; None: the metrics do not have it."""
    return "-" if value is None else f"{value:,.4g}"


page()
