"""Plan: the question on the left, the answer on the right with what if beside it, the traffic below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import streamlit as st

from planner.errors import PlannerError
from planner.units import count_text, show_percent, show_s
from ui import draw, inputs, live, question
from ui.jobs import Job, result_key
from ui.question import Form
from ui.session import BrowserSession, follow_job, keep_widgets, mark_settled, open_session, short_job
from ui.store import SAMPLES, Document, SavedPlan

MOST_CHANGES = 4  # At most this many changed inputs are listed, and further ones counted; chosen by hand.
SAME_RATE_FRAC = 0.01  # A planned rate that differs by less from the trace's own is not mentioned.
NEXT = {
    "what_if": ("What if", "another rate, price, limit or stock, planned anew"),
    "day": ("Day", "the plan's fleet under a day of traffic and controllers"),
    "schedule": ("Schedule", "what of it to reserve, and what to start and stop"),
    "prefixes": ("Prefixes and tenants", "which worker should keep what"),
    "several": ("Several LLMs", "this stock shared with other LLMs"),
    "validation": ("Validation", "real engines beside the prediction"),
    "watch": ("Watch", "live metrics of a deployment held against the plan"),
}


def page() -> None:
    """The page Plan, with its inputs at the left and the answer at the right."""
    session = open_session()
    form = session.current_form()
    keep_widgets(form)
    st.title("Plan a fleet", anchor=False)
    if st.session_state.pop("is_link_dead", False):
        st.error("The plan of this link is not here any more; it was deleted, or made elsewhere.")
    left, right = st.columns([4, 8], gap="large")
    with left, st.container(key="question"):
        with st.container(key="plan_bar"):
            wants_plan = st.button("Plan", type="primary", width="stretch", key="make_plan")
            state = st.empty()
        form, below_trace = inputs.draw_question(session, form)
        session.keep(form)
    with right:
        if wants_plan:
            _start_job(session, form)
        shown = session.plan_shown()
        changes = _changes_since_answer(session, form, shown)
        state.caption(_state_text(session, shown, changes))
        _draw_answer(session, shown, changes)
        _read_and_draw_traffic(session, form, below_trace)
    mark_settled("ask")


def _start_job(session: BrowserSession, form: Form) -> None:
    """Start the job "plan" of the inputs, or keep the reason why these are refused."""
    st.session_state.planned_here = True
    try:
        session.make_plan(form)
    except PlannerError as error:
        session.jobs.forget(session.id, "plan")
        st.session_state.planned_here = False
        st.session_state.refused = str(error)
    else:
        st.session_state.pop("refused", None)


def _changes_since_answer(
    session: BrowserSession, form: Form, shown_plan: tuple[SavedPlan, Document] | None
) -> list[str]:
    """How the inputs differ from the question of the answer on the screen, a text for each difference."""
    if shown_plan is None:
        return []
    try:
        now, then = session.plan_request(form), session.plan_request(shown_plan[0].form)
    except PlannerError as error:
        return [f"the inputs make no question: {error}"]
    changes = question.list_changes(then["question"], now["question"])
    changes += ["another trace"] if then["trace"] != now["trace"] else []
    changes += ["another seed"] if then["seed"] != now["seed"] else []
    return changes


def _state_text(
    session: BrowserSession, shown_plan: tuple[SavedPlan, Document] | None, changes: list[str]
) -> str:
    """The line under the button Plan: whether the answer on the screen belongs to the inputs beside it."""
    job = session.jobs.find(session.id, "plan")
    if job is not None and job.state == "running":
        return "Planning."
    if shown_plan is None:
        return "Nothing planned yet. The inputs begin with a sample: change what you like."
    return "**Inputs changed**: press Plan for their answer." if changes else "The answer is of these inputs."


def _draw_answer(
    session: BrowserSession, shown_plan: tuple[SavedPlan, Document] | None, changes: list[str]
) -> None:
    """Draw the newest answer: that on paper of a running plan, else the last plan of the session."""
    st.header("Answer", anchor="answer")
    job = session.jobs.find(session.id, "plan")
    if refused := st.session_state.get("refused"):
        draw.draw_error(refused)
    if job is not None and job.state != "done":
        follow_job(session, "plan")
        if job.state != "running" and st.session_state.get("planned_here"):
            live.focus_heading("answer", job.key)
    if job is not None and job.state == "running" and job.first is not None:
        _draw_paper_answer(job, job.first)
        return
    if shown_plan is None:
        if job is None:
            st.info(
                "None yet: press Plan. It finds the cheapest GPUs that serve this traffic within your "
                "limits: within seconds on paper, then for production."
            )
        return
    saved, document = shown_plan
    is_stale = bool(changes) or (job is not None and job.state != "done")
    if changes:
        _draw_changes(saved, changes)
    elif is_stale:
        st.caption("The last plan of this session:")
    with st.container(key="answer_stale" if is_stale else "answer_now"):
        if st.session_state.get("planned_here") and job is not None and job.state == "done":
            live.focus_heading("answer", job.key)
        draw.draw_first_screen(document)
        _draw_share_link(saved)
        _draw_sliders(session, saved, document)
        draw.draw_screen_charts(document)
        draw.draw_plan_tabs(
            document,
            session.store,
            saved.result,
            command_text=question.command(saved.form, session.catalog_folder),
            of_text=_question_text(saved, document, is_stale=is_stale),
        )
        st.subheader("Next, with this plan")
        with st.container(horizontal=True):
            for name, (label, why) in NEXT.items():
                st.page_link(f"views/{name}.py", label=f"{label}: {why}", query_params=dict(st.query_params))


def _draw_paper_answer(job: Job, answer: Document) -> None:
    """Draw the answer on paper, which is shown while scenarios for production are simulated."""
    with st.container(key="answer_first"):
        st.info(
            "On paper, for now: what the traffic as it is written needs. What production needs is being "
            "tried in scenarios; it takes this answer's place, with its charts and its files."
        )
        st.html(answer["html"])
        for name in ("fleet", "slo"):
            draw.draw_table(*answer["tables"][name])
    if st.session_state.get("planned_here"):
        live.focus_heading("answer", f"first {job.key}")


def _draw_changes(saved: SavedPlan, changes: list[str]) -> None:
    """Show the changed inputs, and a button that restores those of the answer."""
    listed = changes[:MOST_CHANGES]
    if len(changes) > MOST_CHANGES:
        listed.append(f"{len(changes) - MOST_CHANGES} more")
    st.warning(
        f"Of earlier inputs. Changed since: {draw.escape_markdown('; '.join(listed))}. Press Plan for an "
        "answer."
    )
    if st.button("Back to the inputs of this answer", key="inputs_back"):
        st.session_state.restore = saved.form
        st.rerun()


def _question_text(saved: SavedPlan, document: Document, *, is_stale: bool) -> str:
    """A sentence that names the question of the downloads."""
    source = "described traffic" if saved.form["source"] == question.DESCRIBED else saved.form["trace"]
    summary = f"{document['llm']}, {document['rate_rps']:,.4g} requests/s of {source.rpartition('/')[2]}. "
    summary += question.slo_summary(saved.form)
    return f"{'Not of the inputs as they stand, but of' if is_stale else 'Of'} {summary}"


def _draw_share_link(saved: SavedPlan) -> None:
    """Draw an address at which any browser that reaches this app shows this question and its answer."""
    parts = urlsplit(str(st.context.url or "http://127.0.0.1:8501"))
    with st.popover("Share"):
        st.write("Whoever can open this app finds question and answer here, as a copy of their own:")
        st.code(urlunsplit((parts.scheme, parts.netloc, "/", f"plan={saved.id}", "")), language=None)


def _draw_sliders(session: BrowserSession, saved: SavedPlan, document: Document) -> None:
    """Draw sliders over simulations around the plan. They are simulated after the plan is made."""
    st.subheader("What if, at once", anchor="live")
    if document["limits"] and (request := _sliders_request(session, saved, document)):
        job = session.jobs.find(session.id, "sliders")
        if job is None or job.key != result_key("sliders", request):
            job = session.jobs.start(session.id, "sliders", "sliders", request)
        if job.state == "running":
            _draw_waiting(session, job)
        elif job.state == "done" and (answer := session.store.document(job.key)):
            live.sliders(answer, job.key)
            st.caption(
                "The plan's fleet and larger ones, simulated once at each setting: on paper, without other "
                "draws, losses or a margin for step times. More traffic is the same requests by a faster "
                "clock." + ("" if answer["is_whole"] else " Some settings were not reached in time.")
            )
        elif job.error:
            st.caption(draw.escape_markdown(f"No sliders: {job.error}"))
        return
    st.caption("No sliders: they need limits in seconds.")


def _sliders_request(session: BrowserSession, saved: SavedPlan, document: Document) -> dict[str, Any] | None:
    """The request of the job "sliders"; None where the plan's files, trace or catalog rows are gone."""
    fleet = session.store.files(saved.result, "plan.yaml").get("plan.yaml")
    if fleet is None:
        return None
    try:
        request = session.plan_request(saved.form)
    except PlannerError:
        return None
    return request | {"fleet": fleet.decode(), "rate_rps": document["rate_rps"]}


@st.fragment(run_every=0.5)
def _draw_waiting(session: BrowserSession, job: Job) -> None:
    """Draw how long the sliders' simulations have run; when they have ended the whole page is drawn again."""
    if job.state != "running":
        st.rerun()
    st.caption(f"Simulating around the plan, {job.elapsed_s:.0f} s")


def _read_and_draw_traffic(session: BrowserSession, form: Form, below_trace: Any) -> None:
    """Draw the traffic. If it cannot be read, draw the error below the trace's name, and of a log the inputs
    for the roles of its columns.
    """
    with below_trace:
        try:
            request = session.traffic_request(form)
        except PlannerError as error:
            draw.draw_error(error)
            return
        summary = short_job(session, "trace", "trace", request, "Reading the traffic")
        job = session.jobs.find(session.id, "trace")
        is_log = form["source"] == question.UPLOAD and not form["trace"].startswith(f"{SAMPLES}/")
        if is_log and (form["map"] or (job is not None and "--map" in job.error)):
            inputs.column_inputs(session, form["trace"], job.guess if job is not None else "")
    if summary is not None:
        _draw_traffic(summary)


def _draw_traffic(summary: Document) -> None:
    """Draw the answer of a job "trace": rates and lengths, what prompts share, dropped rows."""
    st.header("The traffic")
    message = f"{count_text(summary['requests'], 'request')} in {summary['duration_s']:,.0f} s"
    message += f", {summary['rate_rps']:.3g} requests/s" if summary["rate_rps"] else ""
    planned = summary.get("planned_rps")
    if planned and summary["rate_rps"] and abs(planned / summary["rate_rps"] - 1) > SAME_RATE_FRAC:
        message += f"; planned for {planned:.3g} requests/s"
    st.write(f"**{draw.escape_markdown(summary['name'])}**: {message}")
    draw.draw_charts(summary["charts"])
    lengths = [
        (name, *(f"{summary[key][column]:,.0f}" for column in ("mean", "p50", "p90", "p99", "max")))
        for name, key in (("prompt tokens", "input_tokens"), ("answer tokens", "output_tokens"))
    ]
    draw.draw_table(("length", "mean", "p50", "p90", "p99", "longest"), lengths)
    if summary["sessions"]:
        st.write(_sessions_text(summary["sessions"]))
    if summary["prefixes"]:
        spared = show_percent(summary["prefixes"]["token_hit_frac"])
        st.write(f"Prompts share prefixes: an endless cache would save {spared} of the prompt tokens.")
    draw.draw_tenants(summary["tenant_rows"])
    dropped = [
        f"{count_text(count, 'row')} left out: {reason}"
        for reason, count in summary["dropped"].items()
        if count
    ]
    draw.draw_list([*(dropped or ["No row was left out"]), *summary["notes"]])


def _sessions_text(summary: Mapping[str, Any]) -> str:
    """A sentence on the sessions of a trace whose requests wait for others."""
    turns, think_s = summary["turns"], summary["think_s"]
    return (
        f"{summary['sessions']:,} sessions of {turns['mean']:.1f} requests on average, {turns['max']:,.0f} "
        f"at most: {summary['waiting']:,} requests arrive only after an earlier one is answered, "
        f"{show_s(think_s['p50'])} later (p50; p90: {show_s(think_s['p90'])}). Rates are drawn as if answers "
        "took no time."
    )


page()
