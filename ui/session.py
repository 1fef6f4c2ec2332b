"""What every page needs: the store, the jobs, the catalog, and whose browser this is.

A session is named by an id in the page's address. So a reload, or the same address on another day, finds the
question and the plan as they were. If a second tab opens the address of a session, or if a browser that was
here before opens the address without an id, a new session begins, with a copy of what the other session had.
"""

from __future__ import annotations

import gc
import os
import re
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit import runtime
from streamlit.runtime.scriptrunner import get_script_run_ctx

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.task import parse_task
from planner.errors import PlannerError
from ui import draw, question
from ui.jobs import Job, Jobs, result_key
from ui.store import Document, SavedPlan, Store

FOLDER_VARIABLE, CATALOG_VARIABLE = "FLEETPLAN_UI_FOLDER", "FLEETPLAN_UI_CATALOG"
DEFAULT_FOLDER = "plans"
POLL_S = 1.0  # While a job runs, its progress is drawn again after this time.
RELOAD_S = 2.0  # Streamlit may take this long to know that a tab was closed or reloaded.
COUNTS = ("stock", "owned")  # The inputs of a GPU that are counts; its others are prices.
COOKIE = "fleetplan_session"  # It holds the id of this browser's last session.
UNITS = {"cost": " USD/h", "power": " W", "gpus": " GPUs"}  # The unit of a fleet's value, by objective.
CANCELLED = "Cancelled. Nothing is running any more."
SHORT_S = 120.0  # A page waits this long for a short job, set by hand.


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """What the tab of one session works with; made anew for every run of a page. `catalog_folder` is None for
    the shipped catalog.
    """

    id: str
    store: Store
    jobs: Jobs
    catalog: Catalog
    catalog_folder: Path | None

    def current_form(self) -> question.Form:
        """The question as the inputs state it now; or a form that another page has put into `restore`, which
        then also sets the inputs.
        """
        restored = st.session_state.pop("restore", None)
        if restored is not None or "form" not in st.session_state:
            form = question.restore_form(restored or self.store.stored_form(self.id) or {}, self.catalog)
            set_widgets(form)
            st.session_state.form = form
        current: question.Form = st.session_state.form
        return current

    def keep(self, form: question.Form) -> None:
        """Remember the inputs of the page Plan for its next run, and in the store if they changed."""
        if form != st.session_state.get("kept_form"):
            self.store.keep_form(self.id, form)
            st.session_state.kept_form = dict(form)
        st.session_state.form = form

    def plan_request(self, form: question.Form) -> dict[str, Any]:
        """The request of a job "plan" (ui/worker.py); raises what `question.document` raises."""
        form = question.restore_form(form, self.catalog)
        return self.request(form) | {
            "question": question.document(form, self.catalog),
            "time_limit_s": float(form["time_limit"]),
        }

    def traffic_request(self, form: question.Form) -> dict[str, Any]:
        """The request of a job "trace", of the traffic; raises what `question.document` raises."""
        document = question.document(form, self.catalog)
        # Drawn requests must fit into the LLM's context; a trace is shown as it is, whatever the LLM.
        llm = {"llm": document["llm"]} if form["source"] == question.DESCRIBED else {}
        return self.request(form) | {"traffic": document["traffic"]} | llm

    def request(self, form: question.Form) -> dict[str, Any]:
        """What all requests have: the trace, None for described traffic, the seed and the catalog."""
        is_described = form.get("source") == question.DESCRIBED
        return {
            "trace": None if is_described else str(self.store.trace_path(form["trace"])),
            "seed": form["seed"],
            "catalog": str(self.catalog_folder) if self.catalog_folder else None,
        }

    def make_plan(self, form: question.Form, name: str = "") -> None:
        """Start the job of a plan, which is kept once it is made. Raises PlannerError for a question that
        cannot be read.
        """
        request = self.plan_request(form)
        parse_task(request["question"], self.catalog)
        store, owner = self.store, self.id

        def keep_plan(job: Job) -> None:
            answer = store.document(job.key) or {}
            default_name = f"{answer['llm']}, {answer['cost_usd_per_h']:.2f} USD/h"
            store.add_plan(owner, name or default_name, form, job.key)

        job = self.jobs.start(owner, "plan", "plan", request, keep_plan)
        job.limit_s = request["time_limit_s"]
        job.unit = UNITS.get(form["objective"], "")

    def plan_shown(self) -> tuple[SavedPlan, Document] | None:
        """The plan that this session looks at, and its result; None if there is no such plan."""
        saved = self.store.current_plan(self.id)
        shown = self.store.document(saved.result) if saved else None
        if saved is None or shown is None:
            return None
        return replace(saved, form=question.restore_form(saved.form, self.catalog)), shown


def gpu_key(place: str, column: str, gpu: str) -> str:
    """The widget key of the input for a figure of a GPU."""
    return f"{place}_gpu_{column}_{gpu}"


def widget_values(form: question.Form, place: str) -> dict[str, Any]:
    """The values of the inputs of a place, a part of the app with inputs of its own, by their widget keys."""
    values = {f"{place}_{name}": value for name, value in form.items() if name not in ("gpus", "more")}
    if "gpus" in form:
        values[f"{place}_use"] = [row["GPU"] for row in form["gpus"] if row["use"]]
        for row in form["gpus"]:
            for column in (*COUNTS, *question.PRICES):
                value = row[column]
                is_whole = column in COUNTS and value is not None
                values[gpu_key(place, column, row["GPU"])] = int(value) if is_whole else value
    return values


def set_widgets(form: question.Form, place: str = "ask") -> None:
    """Give the inputs of a place other values, before they are drawn."""
    values = widget_values(form, place)
    st.session_state.update(values)
    _unsettled(place).update(values)


def keep_widgets(form: question.Form, place: str = "ask") -> None:
    """Give the inputs of a place their values again, because Streamlit forgets them when another page is
    opened. A run of the page that was cut off may have set values that the browser never got
    (`mark_settled`): these are set again.
    """
    unsettled, values = _unsettled(place), widget_values(form, place)
    unsettled.update(key for key in values if key not in st.session_state)
    for key in values.keys() & unsettled:
        # To set a value that is there already makes Streamlit send it to the browser again.
        st.session_state[key] = st.session_state.get(key, values[key])


def mark_settled(*places: str) -> None:
    """Note that the page was drawn completely, so the browser has the values of these places' inputs."""
    for place in places:
        _unsettled(place).clear()


def _unsettled(place: str) -> set[str]:
    """The keys of inputs whose values the browser may not have yet."""
    keys: set[str] = st.session_state.setdefault(f"{place}_unsettled", set())
    return keys


def open_session() -> BrowserSession:
    """The session of this tab; starts what all sessions share on the first call."""
    folder, catalog_folder = os.environ.get(FOLDER_VARIABLE, DEFAULT_FOLDER), os.environ.get(CATALOG_VARIABLE)
    store, jobs, catalog = _shared(folder, catalog_folder)
    if "session" not in st.session_state:
        st.session_state.session = _session_of_tab(store)
    if st.query_params.get("session") != st.session_state.session:
        st.query_params["session"] = st.session_state.session
    own_catalog = Path(catalog_folder) if catalog_folder else None
    return BrowserSession(st.session_state.session, store, jobs, catalog, own_catalog)


def _session_of_tab(store: Store) -> str:
    """The session of this tab: that of its address, unless another tab has that open. Otherwise a new session
    that begins with the plan of a shared link, or as a copy of this browser's last session.
    """
    session_id = _valid_id(st.query_params.get("session"))
    if session_id and _claim(session_id):
        return session_id
    new = uuid.uuid4().hex
    _claim(new)
    linked = _valid_id(st.query_params.pop("plan", ""))
    if linked and (plan := store.plan(linked)) is not None:
        store.keep_form(new, plan.form)
        store.look_at(new, plan.id)
        store.share_traces(plan.session, new)
        return new
    if linked:
        st.session_state.is_link_dead = True
    elif last := session_id or _valid_id(st.context.cookies.get(COOKIE)):
        store.copy_session(last, new)
    return new


def _valid_id(text: object) -> str:
    """The text if it is the id of a session or a plan, else ""."""
    return str(text) if re.fullmatch(r"[0-9a-f]{32}", str(text or "")) else ""


def _claim(session: str) -> bool:
    """Claim this session for this tab, unless another open tab has it; returns whether it was claimed. A tab
    that was reloaded counts as open for a moment longer, so this waits for up to RELOAD_S.
    """
    context = get_script_run_ctx()
    if context is None or not runtime.exists():
        return True
    this_tab, tabs = context.session_id, _tab_by_session()
    tab, until_s = tabs.get(session, this_tab), time.monotonic() + RELOAD_S
    while tab != this_tab and runtime.get_instance().is_active_session(tab):
        if time.monotonic() >= until_s:
            return False
        time.sleep(0.1)
    tabs[session] = this_tab
    return True


@st.cache_resource(show_spinner=False)
def _tab_by_session() -> dict[str, str]:
    """For each of our sessions the tab that has it open, by the id of Streamlit's own session."""
    return {}


@st.cache_resource(show_spinner=False)
def _shared(folder: str, catalog: str | None) -> tuple[Store, Jobs, Catalog]:
    """What all sessions of this app share; made on the first call."""
    store, catalog_rows = Store(Path(folder)), read_catalog(Path(catalog) if catalog else None)
    gc.freeze()  # Streamlit collects garbage after every run of a page; what is loaded for good is left out.
    return store, Jobs(store), catalog_rows


def short_job(
    session: BrowserSession, place: str, kind: str, request: dict[str, Any], spinner_text: str
) -> Document | None:
    """Start a job that takes seconds, unless it was started before, and wait for it (SHORT_S at most) with a
    text on the screen. Returns its result. If there is none, draws the reason and returns None.
    """
    job = session.jobs.find(session.id, place)
    try:
        if job is None or job.key != result_key(kind, request) or job.state == "cancelled":
            job = session.jobs.start(session.id, place, kind, request)
    except PlannerError as error:
        draw.draw_error(error)
        return None
    with st.spinner(spinner_text):
        until_s = time.monotonic() + SHORT_S
        while not job.over.wait(0.1) and time.monotonic() < until_s:
            pass
    return result_of(session, job)


def follow_job(session: BrowserSession, place: str) -> Document | None:
    """The result of the job of this place. Until there is one, its progress with a button to cancel it, or
    its error, is drawn, and None returned.
    """
    job = session.jobs.find(session.id, place)
    if job is None:
        return None
    if job.state == "running":
        _progress(session, place)
        return None
    return result_of(session, job)


def result_of(session: BrowserSession, job: Job) -> Document | None:
    """The result of a job; without one the reason is drawn, and None returned."""
    if job.state == "failed":
        if job.is_our_bug:
            st.error("This is a mistake of the planner, not yours. What it says of it:")
            st.code(job.error, language=None)
        else:
            draw.draw_error(job.error)
    elif job.state == "cancelled":
        st.info(CANCELLED)
    elif job.state == "running":
        st.warning(f"Still {job.phase} after {job.elapsed_s:.0f} s. Reload to look again.")
    return session.store.document(job.key) if job.state == "done" else None


@st.fragment(run_every=POLL_S)
def _progress(session: BrowserSession, place: str) -> None:
    """Draw a running job every POLL_S, and the whole page once the job has a first answer (that on paper) or
    is over.
    """
    job = session.jobs.find(session.id, place)
    if job is None or job.state != "running":
        st.rerun()
    if job.first is not None and st.session_state.get("first_seen") != job.key:
        st.session_state.first_seen = job.key
        st.rerun()
    box = st.empty()
    with box.container(border=True):
        st.markdown(f"**Working**, {_elapsed_text(job)}: {draw.escape_markdown(job.phase)}")
        if job.limit_s:
            progress_text = _search_text(job) if job.kind == "plan" else None
            st.progress(min(job.elapsed_s / job.limit_s, 1.0), text=progress_text)
        is_cancelled = st.button("Cancel", key=f"cancel_{place}")
    if is_cancelled:
        session.jobs.cancel(session.id, place)
        box.info(CANCELLED)  # The rest of the page follows at the next refresh.


def _elapsed_text(job: Job) -> str:
    """How long a job has run, and if it has a limit, how long it may still run."""
    if not job.limit_s:
        return f"{job.elapsed_s:.0f} s"
    left_s = max(job.limit_s - job.elapsed_s, 0.0)
    return f"{job.elapsed_s:.0f} s, at most {left_s:.0f} s left"


def _search_text(job: Job) -> str:
    """The value of the best fleet so far, the bound and the number of simulations.

    Only the number is shown once the answer on paper is on the screen, and for the objective throughput,
    where the phase names the rate.
    """
    if job.search_progress is None:
        return "no fleet was simulated yet"
    if job.first is not None or not job.unit:
        return f"{job.search_progress['simulations']:,} simulations"
    best, bound, unit = job.search_progress["best"], job.search_progress["bound"], job.unit
    progress_text = "no fleet found yet" if best is None else f"best fleet on paper so far {best:,.2f}{unit}"
    if bound is not None:
        progress_text += f", none below {bound:,.2f}{unit}"
    return f"{progress_text}; {job.search_progress['simulations']:,} simulations"
