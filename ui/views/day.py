"""Day: a day of traffic on pools that change, under controllers, beside the best that is possible."""

from __future__ import annotations

from typing import Any

import streamlit as st

from planner.documents.day import ALL_FLEETS, BILLED_S, PLAN_ALONE, USUAL_EVERY_S
from planner.documents.startup import StartupFacts, read_startup
from planner.documents.task import parse_task
from planner.errors import InputError, PlannerError
from planner.io.files import read_yaml
from planner.units import show_span
from ui import days, draw, inputs, question
from ui.jobs import Job, result_key
from ui.question import Asked
from ui.session import Session, follow, open_session, remember, restore, settle
from ui.store import Document, read_as

PAGE, RESULT, PLACE = "day", "day result", "day"
PLAN, INPUTS, FILE = "the plan", "the inputs of Plan", "a slo.yaml"
NAMES = ("day.html", "day.csv", "windows.csv", "events.csv", "day.json", "slo.yaml")
EMPTY: dict[str, Any] = {"min_value": 0.0, "value": None, "format": "%g"}


def page() -> None:
    session = open_session()
    asked = _asked(session)
    st.title("Day", anchor=False)
    st.write(
        "A day of traffic on pools that grow and shrink: what controllers cost, which windows of the SLO "
        "they miss, and the best that is possible."
    )
    left, right = st.columns([5, 7], gap="large")
    with left:
        wants_run = st.button("Run", type="primary", width="stretch", key="day_start")
        asked = _choose(session, asked)
    with right:
        st.header("Answer", anchor="answer")
        if wants_run:
            _start(session, asked)
        _answer(session, asked)
    settle(PLACE)


def _asked(session: Session) -> Asked:
    """The inputs as they stand: as left here, else those of the plan, or of the page Plan."""
    again = st.session_state.pop("day_restore", None)
    if again is not None or "day" not in st.session_state:
        kept = session.store.kept(session.id, PAGE)
        if again is None and kept is not None and (kept["source"] != PLAN or session.plan_shown()):
            again = days.of_section(None) | kept
        st.session_state.day = again or _begin(session, PLAN if session.plan_shown() else INPUTS)
        restore(st.session_state.day, PLACE)
    shown: Asked = st.session_state.day
    remember(shown, PLACE)
    return shown


def _begin(session: Session, source: str, own: Document | None = None, before: Asked | None = None) -> Asked:
    """The inputs that ask what a question asks; raises PlannerError for one that cannot be read."""
    found: Asked = {"source": source, "own": own, "stands": source == PLAN}
    if source == FILE:
        task = parse_task(own, session.catalog) if own is not None else None
        known = before or session.asked()
        found |= {key: known[key] for key in ("trace", "seed", "time_limit")}
        return found | {"rate": task.rate_rps if task else None} | days.of_section((own or {}).get("day"))
    asked = _inputs(session, source)
    found |= {key: asked[key] for key in ("trace", "rate", "seed", "time_limit")}
    return found | days.of_section(asked["more"].get("day"))


def _inputs(session: Session, source: str) -> Asked:
    """The inputs of the plan, or the current inputs of the page Plan."""
    shown = session.plan_shown() if source == PLAN else None
    return shown[0].asked if shown else session.asked()


def _choose(session: Session, asked: Asked) -> Asked:
    """All inputs, one below the other: what they ask now."""
    st.header("Question")
    sources = [*([PLAN] if session.plan_shown() else []), INPUTS, FILE]
    source = st.radio("Question from", sources, horizontal=True, key=f"{PLACE}_source")
    if source != asked["source"]:
        _again(_begin(session, source, before=asked))
    found = asked | {"source": source}
    if source == FILE:
        _upload(session, asked)
    if source == PLAN:
        found["stands"] = st.checkbox(
            "The plan's fleet stands all day",
            key=f"{PLACE}_stands",
            help="Else the cheapest fleet that keeps the SLO all day, planned on paper.",
        )
    above = st.container()
    with st.popover("Another trace"):  # It runs first, because an upload is then chosen.
        inputs.upload_trace(session, PLACE)
    with above:
        found["trace"] = inputs.trace(session, PLACE)
    found["rate"] = inputs.rate(PLACE)
    st.header("Who decides")
    found["controllers"] = st.multiselect(
        "Controllers",
        days.OFFERED,
        key=f"{PLACE}_controllers",
        help="Beside what stands all day and the optimum; their parameters are in the text below.",
    )
    with st.popover("What each is"):
        draw.table(("controller", "what it is"), days.WORDS)
    draw.bullets(
        f"{name}: {', '.join(question.leaves(own))}"
        for name, own in found["parameters"].items()
        if name in found["controllers"]
    )
    found |= _start_up(read_startup(session.catalog_folder), asked)
    with st.expander("Limits, training, time"):
        found |= _limits() | _search()
    inputs.text(lambda: _document(session, found), lambda typed: _again(_begin(session, FILE, typed, found)))
    if found != st.session_state.day:
        session.store.keep(session.id, PAGE, found)
        st.session_state.day = found
    return found


def _upload(session: Session, asked: Asked) -> None:
    """Upload a slo.yaml, which then replaces the inputs."""
    uploaded = st.file_uploader("Upload a slo.yaml", ["yaml", "yml"], key=f"{PLACE}_upload_slo")
    if uploaded is not None and st.session_state.get(f"{PLACE}_uploaded_slo") != uploaded.file_id:
        st.session_state[f"{PLACE}_uploaded_slo"] = uploaded.file_id
        try:
            own = read_as(uploaded.name, uploaded.getvalue(), read_yaml)
            begun = _begin(session, FILE, own, asked)
        except PlannerError as error:
            draw.error(error)
        else:
            _again(begun)
    if asked["own"] is None:
        st.caption("None yet.")
    else:
        st.caption(draw.escaped(f"LLM: {asked['own'].get('llm')}"))


def _start_up(known: StartupFacts, asked: Asked) -> Asked:
    """The inputs for the start-up time of a worker, from order to first request, and for its billing."""
    start, billing = st.columns(2, vertical_alignment="bottom")
    found: Asked = {
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
    is_given = found["start_s"] is not None
    storage, image = st.columns(2, vertical_alignment="bottom")
    found["storage"] = storage.selectbox(
        "Weights from",
        dict.fromkeys([*known.storages, asked["storage"]]),
        key=f"{PLACE}_storage",
        disabled=is_given,
        help="Rows of catalogs/startup.yaml.",
    )
    found["image"] = image.selectbox(
        "Image from",
        dict.fromkeys([*known.images, days.NO_IMAGE, asked["image"]]),
        key=f"{PLACE}_image",
        disabled=is_given,
        help="none: the nodes have it.",
    )
    warm, warm_start = st.columns(2, vertical_alignment="bottom")
    found["warm"] = warm.number_input(
        "Warm places of a pool",
        min_value=0,
        step=1,
        key=f"{PLACE}_warm",
        help="So many workers at a time start on nodes that have run the same LLM.",
    )
    found["warm_start_s"] = warm_start.number_input(
        "There ready after [s]", key=f"{PLACE}_warm_start_s", **(EMPTY | {"placeholder": "catalog"})
    )
    return found


def _limits() -> Asked:
    """The inputs for the sizes of a pool and for the time that a stopping worker may take."""
    least, most = st.columns(2, vertical_alignment="bottom")
    return {
        "least": least.number_input("Workers of a pool at least", 0, step=1, key=f"{PLACE}_least"),
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
            min_value=0.001,
            value=None,
            format="%g",
            key=f"{PLACE}_drain_s",
            placeholder="no limit",
            help="A worker that is given up ends what it runs, but for no longer than this.",
        ),
    }


def _search() -> Asked:
    """The inputs for the training part, the grid of the optimum and its time limit."""
    return {
        "missed_usd": st.number_input(
            "A missed window counts [USD]",
            key=f"{PLACE}_missed_usd",
            help="Where the best is chosen. Empty: as much as one costs with what stands all day.",
            **(EMPTY | {"placeholder": "as usual"}),
        ),
        "train": st.number_input(
            "Train on the first [%] of the traffic",
            min_value=5.0,
            max_value=95.0,
            value=None,
            format="%g",
            key=f"{PLACE}_train",
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
            min_value=0.001,
            value=None,
            format="%g",
            key=f"{PLACE}_every_s",
            placeholder="as the SLO's windows",
            help=f"The SLO's windows are of {show_span(USUAL_EVERY_S)} where slo.yaml has no every.",
        ),
        "seed": st.number_input("Seed", min_value=0, step=1, key=f"{PLACE}_seed", help=inputs.SEED),
        "time_limit": st.number_input(
            "Time limit [s]", min_value=1, step=10, key=f"{PLACE}_time_limit", help="Of all together."
        ),
    }


def _document(session: Session, asked: Asked) -> Document:
    """slo.yaml as the inputs ask it."""
    if asked["source"] != FILE:
        told = _inputs(session, asked["source"]) | {"rate": asked["rate"]}
        return days.document(question.document(told, session.catalog), asked)
    if asked["own"] is None:
        raise InputError("slo.yaml: none yet; upload one, or paste it as text and apply")
    return days.document(asked["own"], asked)


def _again(asked: Asked) -> None:
    st.session_state.day_restore = asked
    st.rerun()


def _request(session: Session, asked: Asked) -> dict[str, Any]:
    """The job that the inputs ask for; raises what is wrong with them."""
    asked_for = _document(session, asked)
    parse_task(asked_for, session.catalog)
    shown = session.plan_shown() if _stands(asked) else None
    fleet = session.store.files(shown[0].result, "plan.yaml")["plan.yaml"].decode() if shown else ""
    return session.request(asked) | {
        "question": asked_for,
        "fleet": fleet,
        "time_limit_s": float(asked["time_limit"]),
    }


def _stands(asked: Asked) -> bool:
    return asked["source"] == PLAN and bool(asked["stands"])


def _start(session: Session, asked: Asked) -> None:
    store, owner = session.store, session.id

    def keep(job: Job) -> None:
        store.keep(owner, RESULT, {"result": job.key, "command": text})

    try:
        request = _request(session, asked)
        is_described = parse_task(request["question"], session.catalog).described is not None
        text = days.command(asked, session.catalog_folder, stands=_stands(asked), is_described=is_described)
        session.jobs.start(owner, PAGE, "day", request, keep)
    except PlannerError as error:
        session.jobs.forget(owner, PAGE)
        draw.error(error)


def _answer(session: Session, asked: Asked) -> None:
    job = session.jobs.of(session.id, PAGE)
    kept = session.store.kept(session.id, RESULT)
    found = session.store.document(kept["result"]) if kept else None
    if job is None and found is None:
        st.info("None yet: press Run.")
        return
    with st.container(key="answered_day"):
        if job is not None and job.state != "done":
            follow(session, PAGE)
        if kept is not None and found is not None:
            _last(session, asked, kept, found)


def _last(session: Session, asked: Asked, kept: Document, found: Document) -> None:
    """Show the latest answer and the question that it belongs to."""
    job = session.jobs.of(session.id, PAGE)
    if job is not None and job.state != "done":
        st.caption("The last answer of this session:")
    elif not _is_of(session, asked, kept["result"]):
        st.warning("This answer is of other inputs than those that stand now; press Run for theirs.")
    _result(found)
    st.header("Downloads")
    draw.day_downloads(session.store, kept["result"], NAMES, kept["command"])


def _is_of(session: Session, asked: Asked, key: str) -> bool:
    """Whether a result answers the current inputs."""
    try:
        return result_key("day", _request(session, asked)) == key
    except PlannerError:
        return False


def _result(found: Document) -> None:
    st.subheader(draw.escaped(found["answer"]))
    for line in found["proof"]:
        st.write(draw.escaped(line))
    for warning in found["warnings"]:
        st.warning(f"Mind: {draw.escaped(warning)}.")
    draw.table(*found["tables"]["controllers"])
    draw.pictures(found["charts"])
    st.markdown(f"**Windows that {draw.escaped(found['winner'])} misses**")
    draw.bullets(found["missed_lines"] or ["None."])
    with st.expander("Settings, and what this rests on"):
        draw.bullets(found["settings_lines"])
        draw.bullets(found["basis_lines"])


page()
