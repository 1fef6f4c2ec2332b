"""Day: a day of traffic on pools that change, under controllers, beside the best that is possible."""

from __future__ import annotations

from typing import Any

import streamlit as st

from planner.day.day_settings import ALL_FLEETS, BILLED_S, PLAN_ALONE, USUAL_EVERY_S
from planner.documents.startup_times import StartupFacts, read_startup
from planner.documents.task import parse_task
from planner.errors import InputError, PlannerError
from planner.files.checked_files import read_yaml
from planner.units import show_span
from ui import days, draw, inputs, question
from ui.jobs import Job, result_key
from ui.question import Form
from ui.session import BrowserSession, follow_job, keep_widgets, mark_settled, open_session, set_widgets
from ui.store import Document, read_as

PAGE, RESULT = "day", "day result"  # Where the store keeps the page's inputs, and its latest answer.
PLACE = "day"  # The place of its inputs (ui/inputs.py).
PLAN, INPUTS, FILE = "the plan", "the inputs of Plan", "a slo.yaml"  # Sources of the question.
DOWNLOADS = ("day.html", "day.csv", "windows.csv", "events.csv", "day.json", "slo.yaml")
# The tables of an answer after that of controllers, where they have rows, and their titles.
TABLES = {
    "fleets": "Fleets that could stand",
    "causes": "USD above the optimum by cause, and missed windows by cause",
}
# Arguments of a number input that may stay empty, or be 0.
EMPTY: dict[str, Any] = inputs.EMPTY | {"min_value": 0.0}


def page() -> None:
    """The page Day."""
    session = open_session()
    form = _current_form(session)
    st.title("Day", anchor=False)
    st.write(
        "A day of traffic on pools that grow and shrink: what controllers cost, which windows of the SLO "
        "they miss, and the best that is possible."
    )
    left, right = st.columns([5, 7], gap="large")
    with left:
        wants_run = st.button("Run", type="primary", width="stretch", key="day_start")
        form = _draw_inputs(session, form)
    with right:
        st.header("Answer", anchor="answer")
        if wants_run:
            _start_job(session, form)
        _draw_answer(session, form)
    mark_settled(PLACE)


def _current_form(session: BrowserSession) -> Form:
    """The inputs as they were left on this page, else those of the plan, else those of the page Plan."""
    restored = st.session_state.pop("day_restore", None)
    if restored is not None or "day" not in st.session_state:
        saved = session.store.page_document(session.id, PAGE)
        if restored is None and saved is not None and (saved["source"] != PLAN or session.plan_shown()):
            restored = days.restore_form(saved)
        st.session_state.day = restored or _form_of_source(session, PLAN if session.plan_shown() else INPUTS)
        set_widgets(st.session_state.day, PLACE)
    shown: Form = st.session_state.day
    keep_widgets(shown, PLACE)
    return shown


def _form_of_source(
    session: BrowserSession, source: str, own: Document | None = None, before: Form | None = None
) -> Form:
    """The form for a question: of the plan, of the page Plan, or `own`, a slo.yaml, whose trace, seed and
    time limit stay those of the form `before`. Raises PlannerError for a slo.yaml that cannot be read.
    """
    form: Form = {"source": source, "own": own, "stands": source == PLAN}
    if source == FILE:
        task = parse_task(own, session.catalog) if own is not None else None
        form_before = before or session.current_form()
        form |= {key: form_before[key] for key in ("trace", "seed", "time_limit")}
        return form | {"rate": task.rate_rps if task else None} | days.form_of_section((own or {}).get("day"))
    plan_inputs = _plan_form(session, source)
    form |= {key: plan_inputs[key] for key in ("trace", "rate", "seed", "time_limit")}
    return form | days.form_of_section(plan_inputs["more"].get("day"))


def _plan_form(session: BrowserSession, source: str) -> Form:
    """The inputs of the plan, or the current inputs of the page Plan."""
    shown = session.plan_shown() if source == PLAN else None
    return shown[0].form if shown else session.current_form()


def _draw_inputs(session: BrowserSession, form: Form) -> Form:
    """Draw all inputs, one below the other; returns their values."""
    st.header("Question")
    sources = [*([PLAN] if session.plan_shown() else []), INPUTS, FILE]
    source = st.radio("Question from", sources, horizontal=True, key=f"{PLACE}_source")
    if source != form["source"]:
        _redraw_with(_form_of_source(session, source, before=form))
    chosen = form | {"source": source}
    if source == FILE:
        _slo_file_input(session, form)
    if source == PLAN:
        chosen["stands"] = st.checkbox(
            "The plan's fleet stands all day",
            key=f"{PLACE}_stands",
            help="Else the cheapest fleet that keeps the SLO all day, planned on paper.",
        )
    is_described = _is_described(session, form)
    if is_described:
        st.caption("The question describes the traffic, so there is no trace to choose.")
    else:
        above = st.container()
        with st.popover("Another trace"):  # Run before `trace_input`, which chooses a new upload.
            inputs.upload_trace(session, PLACE)
        with above:
            chosen["trace"] = inputs.trace_input(session, PLACE)
    chosen["rate"] = inputs.rate_input(PLACE, "as described" if is_described else "as in the trace")
    st.header("Who decides")
    chosen["controllers"] = st.multiselect(
        "Controllers",
        days.OFFERED,
        key=f"{PLACE}_controllers",
        help="Beside what stands all day and the optimum; their parameters are in the text below.",
    )
    with st.popover("What each is"):
        draw.draw_table(("controller", "what it is"), days.WORDS)
    draw.draw_list(
        f"{name}: {', '.join(question.leaf_texts(parameters))}"
        for name, parameters in chosen["parameters"].items()
        if name in chosen["controllers"]
    )
    chosen |= _start_up_inputs(read_startup(session.catalog_folder), form)
    with st.expander("Limits, training, time"):
        chosen |= _pool_size_inputs() | _search_inputs()
    inputs.slo_text_input(
        lambda: _document(session, chosen),
        lambda typed: _redraw_with(_form_of_source(session, FILE, typed, chosen)),
    )
    if chosen != st.session_state.day:
        session.store.keep_page_document(session.id, PAGE, chosen)
        st.session_state.day = chosen
    return chosen


def _is_described(session: BrowserSession, form: Form) -> bool:
    """Whether the question describes its traffic, and has no trace."""
    if form["source"] != FILE:
        return bool(_plan_form(session, form["source"])["source"] == question.DESCRIBED)
    return form["own"] is not None and parse_task(form["own"], session.catalog).described is not None


def _slo_file_input(session: BrowserSession, form: Form) -> None:
    """Upload a slo.yaml, which then replaces the inputs."""
    uploaded = st.file_uploader("Upload a slo.yaml", ["yaml", "yml"], key=f"{PLACE}_upload_slo")
    if uploaded is not None and st.session_state.get(f"{PLACE}_uploaded_slo") != uploaded.file_id:
        st.session_state[f"{PLACE}_uploaded_slo"] = uploaded.file_id
        try:
            own = read_as(uploaded.name, uploaded.getvalue(), read_yaml)
            uploaded_form = _form_of_source(session, FILE, own, form)
        except PlannerError as error:
            draw.draw_error(error)
        else:
            _redraw_with(uploaded_form)
    if form["own"] is None:
        st.caption("None yet: upload one, or paste it below as text and apply.")
    else:
        st.caption(draw.escape_markdown(f"LLM: {form['own'].get('llm')}"))


def _start_up_inputs(facts: StartupFacts, form: Form) -> Form:
    """The inputs for the start-up time of a worker, from order to first request, and for its billing."""
    start, billing = st.columns(2, vertical_alignment="bottom")
    chosen: Form = {
        "start_s": start.number_input(
            "Ready after [s]",
            key=f"{PLACE}_start_s",
            help="From the moment a worker is asked for; it is paid from then on. Empty: by what follows.",
            **(EMPTY | {"placeholder": "catalog"}),
        ),
        "billing": billing.selectbox(
            "Billed by the",
            list(BILLED_S),
            key=f"{PLACE}_billing",
            help="By the hour, every hour begun is paid.",
        ),
    }
    is_given = chosen["start_s"] is not None
    storage, image = st.columns(2, vertical_alignment="bottom")
    chosen["storage"] = storage.selectbox(
        "Weights from",
        dict.fromkeys([*facts.storages, form["storage"]]),
        key=f"{PLACE}_storage",
        disabled=is_given,
        help="Rows of catalogs/startup.yaml.",
    )
    chosen["image"] = image.selectbox(
        "Image from",
        dict.fromkeys([*facts.images, days.NO_IMAGE, form["image"]]),
        key=f"{PLACE}_image",
        disabled=is_given,
        help="none: the nodes have it.",
    )
    warm, warm_start = st.columns(2, vertical_alignment="bottom")
    chosen["warm"] = warm.number_input(
        "Warm places of a pool",
        min_value=0,
        step=1,
        key=f"{PLACE}_warm",
        help="So many workers at a time start on nodes that have run the same LLM.",
    )
    chosen["warm_start_s"] = warm_start.number_input(
        "Ready at a warm place after [s]", key=f"{PLACE}_warm_start_s", **(EMPTY | {"placeholder": "catalog"})
    )
    return chosen


def _pool_size_inputs() -> Form:
    """The inputs for the sizes of a pool and for the time that a stopping worker may take."""
    least, most = st.columns(2, vertical_alignment="bottom")
    return {
        "least": least.number_input(
            "Workers of a pool at least",
            min_value=0,
            value=None,
            step=1,
            key=f"{PLACE}_least",
            placeholder="as usual",
            help="Empty: 1, and in the optimum none of rented pools beside owned ones.",
        ),
        "most": most.number_input(
            "at most",
            min_value=1,
            value=None,
            step=1,
            key=f"{PLACE}_most",
            placeholder="as usual",
            help="Empty: twice what stands all day.",
        ),
        "drain_s": st.number_input(
            "Stopped at the latest after [s]",
            min_value=inputs.LEAST_VALUE,
            value=None,
            format="%g",
            key=f"{PLACE}_drain_s",
            placeholder="no limit",
            help="A worker that is given up ends what it runs, but for no longer than this.",
        ),
    }


def _search_inputs() -> Form:
    """The inputs for how the best is chosen, the training part, the optimum, the seed and the time limit."""
    return {
        "missed_usd": st.number_input(
            "A missed window counts [USD]",
            key=f"{PLACE}_missed_usd",
            help="Where the best is chosen. Empty: as much as one costs with what stands all day.",
            **(EMPTY | {"placeholder": "as usual"}),
        ),
        "missed_percent": st.number_input(
            "Or windows that may be missed [%]",
            max_value=100.0,
            key=f"{PLACE}_missed_percent",
            help="The best is then the cheapest that misses no more; leave what one counts empty.",
            **(EMPTY | {"placeholder": "none"}),
        ),
        "train_percent": st.number_input(
            "Train on the first [%] of the traffic",
            min_value=5.0,
            max_value=95.0,
            value=None,
            format="%g",
            key=f"{PLACE}_train_percent",
            placeholder="no training",
            help="Parameters are chosen there; the rest of the traffic judges.",
        ),
        "optimum": st.checkbox("Look for the optimum", key=f"{PLACE}_optimum"),
        "fleets": st.radio(
            "Fleets",
            (ALL_FLEETS, PLAN_ALONE),
            horizontal=True,
            key=f"{PLACE}_fleets",
            help="Where none is given: all that are worth standing, or the cheapest one alone.",
        ),
        "every_s": st.number_input(
            "The optimum changes sizes every [s]",
            min_value=inputs.LEAST_VALUE,
            value=None,
            format="%g",
            key=f"{PLACE}_every_s",
            placeholder="as the SLO's windows",
            help=f"The SLO's windows are of {show_span(USUAL_EVERY_S)} where slo.yaml has no every.",
        ),
        "seed": st.number_input("Seed", min_value=0, step=1, key=f"{PLACE}_seed", help=inputs.SEED_HELP),
        "time_limit": st.number_input(
            "Time limit [s]", min_value=1, step=10, key=f"{PLACE}_time_limit", help="Of all together."
        ),
    }


def _document(session: BrowserSession, form: Form) -> Document:
    """The slo.yaml of the inputs. Raises InputError without a slo.yaml where it should be uploaded."""
    is_described = _is_described(session, form)
    if form["source"] != FILE:
        asked = question.document(_plan_form(session, form["source"]), session.catalog)
        return days.document(asked, form, is_described=is_described)
    if form["own"] is None:
        raise InputError("slo.yaml: none yet; upload one, or paste it as text and apply")
    return days.document(form["own"], form, is_described=is_described)


def _redraw_with(form: Form) -> None:
    """Draw the page anew with these inputs."""
    st.session_state.day_restore = form
    st.rerun()


def _request(session: BrowserSession, form: Form) -> dict[str, Any]:
    """The request of a job "day" for these inputs; raises PlannerError for wrong ones."""
    question_document = _document(session, form)
    parse_task(question_document, session.catalog)
    shown = session.plan_shown() if _plan_stands(form) else None
    fleet = session.store.files(shown[0].result, "plan.yaml")["plan.yaml"].decode() if shown else ""
    return session.request(form) | {
        "question": question_document,
        "fleet": fleet,
        "time_limit_s": float(form["time_limit"]),
    }


def _plan_stands(form: Form) -> bool:
    """Whether the plan's fleet stands all day."""
    return form["source"] == PLAN and bool(form["stands"])


def _start_job(session: BrowserSession, form: Form) -> None:
    """Start the simulation of a day; its result is kept with the command that repeats it."""
    store, owner = session.store, session.id

    def keep(job: Job) -> None:  # Called when the job has ended, so `command` is set.
        store.keep_page_document(owner, RESULT, {"result": job.key, "command": command})

    try:
        request = _request(session, form)
        is_described = parse_task(request["question"], session.catalog).described is not None
        command = days.command(
            form, session.catalog_folder, stands=_plan_stands(form), is_described=is_described
        )
        session.jobs.start(owner, PAGE, "day", request, keep)
    except PlannerError as error:
        session.jobs.forget(owner, PAGE)
        draw.draw_error(error)


def _draw_answer(session: BrowserSession, form: Form) -> None:
    """Draw the answer of the job, or how far it is."""
    job = session.jobs.find(session.id, PAGE)
    saved = session.store.page_document(session.id, RESULT)
    answer = session.store.document(saved["result"]) if saved else None
    if job is None and answer is None:
        st.info("None yet: press Run.")
        return
    with st.container(key="answered_day"):
        if job is not None and job.state != "done":
            follow_job(session, PAGE)
        if saved is not None and answer is not None:
            _draw_last_answer(session, form, saved, answer)


def _draw_last_answer(session: BrowserSession, form: Form, saved: Document, answer: Document) -> None:
    """Show the latest answer and the question that it belongs to."""
    job = session.jobs.find(session.id, PAGE)
    if job is not None and job.state != "done":
        st.caption("The last answer of this session:")
    elif not _answers_inputs(session, form, saved["result"]):
        st.warning("This answer is of other inputs than those that stand now; press Run for theirs.")
    _draw_result(answer)
    st.header("Downloads")
    draw.draw_day_downloads(session.store, saved["result"], DOWNLOADS, saved["command"])


def _answers_inputs(session: BrowserSession, form: Form, key: str) -> bool:
    """Whether a result answers the current inputs."""
    try:
        return result_key("day", _request(session, form)) == key
    except PlannerError:
        return False


def _draw_result(answer: Document) -> None:
    """Draw the answer with its proof, the table of controllers, the charts, and what it rests on."""
    st.subheader(draw.escape_markdown(answer["answer"]))
    for line in answer["proof"]:
        st.write(draw.escape_markdown(line))
    for warning in answer["warnings"]:
        st.warning(f"Mind: {draw.escape_markdown(warning)}.")
    draw.draw_table(*answer["tables"]["controllers"])
    for name, title in TABLES.items():
        head, rows = answer["tables"].get(name, ((), ()))
        if rows:
            st.markdown(f"**{title}**")
            draw.draw_table(head, rows)
    draw.draw_charts(answer["charts"])
    st.markdown(f"**Windows that {draw.escape_markdown(answer['winner'])} misses**")
    draw.draw_list(answer["missed_lines"] or ["None."])
    with st.expander("Settings, and what this rests on"):
        draw.draw_list(answer["settings_lines"])
        draw.draw_list(answer["basis_lines"])


page()
