"""What every page needs: the store, the jobs, the catalog, and whose browser this is.

A session is an id in the page's address, so that a reload, or the same address on another day, finds the
question and the plan as they were, and two browsers have two.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import streamlit as st

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.task import parse_task
from planner.errors import PlannerError
from ui import draw, question
from ui.jobs import Job, Jobs, result_key
from ui.store import Document, SavedPlan, Store

FOLDER_VARIABLE, CATALOG_VARIABLE = "FLEETPLAN_UI_FOLDER", "FLEETPLAN_UI_CATALOG"
DEFAULT_FOLDER = "plans"
POLL_S = 0.4
SHORT_S = 120.0  # a page waits this long for a short job


@dataclass(frozen=True, slots=True)
class Session:
    """One browser's view of the app; made anew for every run of a page."""

    id: str
    store: Store
    jobs: Jobs
    catalog: Catalog
    catalog_folder: Path | None

    def asked(self) -> question.Asked:
        """The inputs as they stand."""
        restored = st.session_state.pop("restore", None)
        if restored is not None or "asked" not in st.session_state:
            asked = question.kept(restored or self.store.asked(self.id) or {}, self.catalog)
            restore(asked)
            st.session_state.asked = asked
        found: question.Asked = st.session_state.asked
        return found

    def keep(self, asked: question.Asked) -> None:
        if asked != st.session_state.get("asked_kept"):
            self.store.keep_asked(self.id, asked)
            st.session_state.asked_kept = dict(asked)
        st.session_state.asked = asked

    def plan_request(self, asked: question.Asked) -> dict[str, Any]:
        """A plan's job; see worker."""
        asked = question.kept(asked, self.catalog)
        return self.request(asked) | {
            "question": question.document(asked, self.catalog),
            "time_limit_s": float(asked["time_limit"]),
        }

    def request(self, asked: question.Asked) -> dict[str, Any]:
        """The part of a job that says on which trace, by which seed and catalog."""
        return {
            "trace": str(self.store.trace_path(asked["trace"])),
            "seed": asked["seed"],
            "catalog": str(self.catalog_folder) if self.catalog_folder else None,
        }

    def make_plan(self, asked: question.Asked, name: str = "") -> None:
        """Start the job of a plan, which is kept when it is there; raises what is wrong with the question."""
        request = self.plan_request(asked)
        parse_task(request["question"], self.catalog)
        store, owner = self.store, self.id

        def keep(job: Job) -> None:
            found = store.document(job.key) or {}
            store.add_plan(
                owner, name or f"{found['llm']}, {found['cost_usd_per_h']:.2f} USD/h", asked, job.key
            )

        self.jobs.start(owner, "plan", "plan", request, keep)

    def plan_shown(self) -> tuple[SavedPlan, Document] | None:
        """The plan this session looks at, and its result."""
        saved = self.store.current(self.id)
        shown = self.store.document(saved.result) if saved else None
        if saved is None or shown is None:
            return None
        return replace(saved, asked=question.kept(saved.asked, self.catalog)), shown


def restore(asked: question.Asked, place: str = "ask") -> None:
    """Give the inputs of a place other values, before they are drawn."""
    for name, value in asked.items():
        st.session_state[f"{place}_{name}"] = value
    st.session_state.pop(f"{place}_gpus_table", None)


def open_session() -> Session:
    """The session of this browser; starts what all sessions share on the first call."""
    folder = os.environ.get(FOLDER_VARIABLE, DEFAULT_FOLDER)
    store, jobs, catalog = _shared(folder, own := os.environ.get(CATALOG_VARIABLE))
    if "session" not in st.session_state:
        asked = str(st.query_params.get("session", ""))
        st.session_state.session = asked if re.fullmatch(r"[0-9a-f]{32}", asked) else uuid.uuid4().hex
    if st.query_params.get("session") != st.session_state.session:
        st.query_params["session"] = st.session_state.session
    return Session(st.session_state.session, store, jobs, catalog, Path(own) if own else None)


@st.cache_resource(show_spinner=False)
def _shared(folder: str, catalog: str | None) -> tuple[Store, Jobs, Catalog]:
    store = Store(Path(folder))
    return store, Jobs(store), read_catalog(Path(catalog) if catalog else None)


def short_job(
    session: Session, place: str, kind: str, request: dict[str, Any], saying: str
) -> Document | None:
    """Wait for a job that takes seconds; its result, or its error in place and None."""
    job = session.jobs.of(session.id, place)
    try:
        if job is None or job.key != result_key(kind, request) or job.state == "cancelled":
            job = session.jobs.start(session.id, place, kind, request)
    except PlannerError as error:
        draw.error(error)
        return None
    with st.spinner(saying):
        until = time.monotonic() + SHORT_S
        while not job.over.wait(0.1) and time.monotonic() < until:
            pass
    return result_of(session, job)


def follow(session: Session, place: str) -> Document | None:
    """Draw a job of this place: its progress with a cancel button, its error, or return its result."""
    job = session.jobs.of(session.id, place)
    if job is None:
        return None
    if job.state == "running":
        _progress(session, place)
        return None
    return result_of(session, job)


def result_of(session: Session, job: Job) -> Document | None:
    """The result of a job that is over; else says why there is none."""
    if job.state == "failed":
        if job.is_our_bug:
            st.error("This is a mistake of the planner, not yours. What it says of it:")
            st.code(job.error, language=None)
        else:
            draw.error(job.error)
    elif job.state == "cancelled":
        st.info("Cancelled. Nothing is running any more.")
    elif job.state == "running":
        st.warning(f"Still {job.phase} after {job.elapsed_s:.0f} s. Reload to look again.")
    return session.store.document(job.key) if job.state == "done" else None


@st.fragment(run_every=POLL_S)
def _progress(session: Session, place: str) -> None:
    job = session.jobs.of(session.id, place)
    if job is None or job.state != "running":
        st.rerun()
    with st.container(border=True):
        st.markdown(f"**Working**, {job.elapsed_s:.0f} s: {job.phase}")
        if job.kind == "plan":
            st.progress(_closeness(job), text=_standing(job))
        if st.button("Cancel", key=f"cancel_{place}"):
            session.jobs.cancel(session.id, place)
            st.rerun()


def _closeness(job: Job) -> float:
    """How near bound and best fleet are: 1 where they meet."""
    standing = job.standing or {}
    best, bound = standing.get("best"), standing.get("bound")
    return min(max(bound / best, 0.0), 1.0) if best and bound else 0.0


def _standing(job: Job) -> str:
    if job.standing is None:
        return "no fleet was simulated yet"
    best, bound = job.standing["best"], job.standing["bound"]
    return (
        f"best fleet so far {_number(best)}, no fleet below {_number(bound)}, "
        f"{job.standing['simulations']} simulations"
    )


def _number(value: float | None) -> str:
    return "not known yet" if value is None else f"{value:,.6g}"
