"""Several LLMs on one stock: the question on the left, who gets what on the right."""

from __future__ import annotations

from typing import Any

import streamlit as st

from planner.errors import PlannerError
from ui import draw, inputs, question, together
from ui.jobs import Job
from ui.question import Asked
from ui.session import Session, follow, open_session, remember, restore, settle
from ui.store import Document

PAGE, RESULT = "several", "several result"
MOST_LLMS = 12
OBJECTIVES = tuple(name for name in inputs.OBJECTIVES if name != "throughput")


def page() -> None:
    session = open_session()
    asked = _asked(session)
    st.title("Several LLMs", anchor=False)
    st.write(
        "The cheapest fleets for several LLMs that share GPUs, a budget or power: who gets what, who gives "
        "way, and what more of each would save."
    )
    left, right = st.columns([5, 7], gap="large")
    with left:
        wants_plan = st.button("Plan together", type="primary", width="stretch", key="several_start")
        st.write("Begins with an example of two.")
        asked = _choose(session, asked)
    with right:
        st.header("Answer", anchor="answer")
        if wants_plan:
            _start(session, asked)
        _answer(session)
    settle("shared", *(f"llm{k}" for k in range(len(asked["llms"]))))


def _asked(session: Session) -> Asked:
    """The inputs as they stand: as left here, else the example."""
    again = st.session_state.pop("several_restore", None)
    if again is not None or "several" not in st.session_state:
        found = again or session.store.kept(session.id, PAGE)
        traces = session.store.traces(session.id)
        asked = together.kept(found, session.catalog) if found else together.example(session.catalog, traces)
        restore(asked["shared"], "shared")
        for k, one in enumerate(asked["llms"]):
            restore(one, f"llm{k}")
        st.session_state.several = asked
    shown: Asked = st.session_state.several
    remember(shown["shared"], "shared")
    for k, one in enumerate(shown["llms"]):
        remember(one, f"llm{k}")
    return shown


def _choose(session: Session, asked: Asked) -> Asked:
    """All inputs, one below the other: what they ask now."""
    st.header("LLMs")
    llms = [_one(session, one, k, len(asked["llms"])) for k, one in enumerate(asked["llms"])]
    found: Asked = {"llms": llms, "shared": asked["shared"]}
    more, example = st.columns(2)
    if more.button("Add an LLM", key="several_add", disabled=len(llms) >= MOST_LLMS):
        _again(together.another(found))
    if example.button("Back to the example", key="several_example"):
        _again(together.example(session.catalog, session.store.traces(session.id)))
    st.header("What they share")
    shared = {"gpus": inputs.gpus(session, asked["shared"], "shared")}
    with st.expander("Goal and limits"):
        shared |= inputs.goal("shared", OBJECTIVES)
    with st.expander("Workers"):
        shared |= inputs.engines("shared")
    found["shared"] = asked["shared"] | shared
    _also_asked(found)
    inputs.text(
        lambda: together.document(found, session.catalog),
        lambda typed: _again(
            together.of_document(typed, found, session.catalog, session.store.traces(session.id))
        ),
    )
    if found != st.session_state.several:
        session.store.keep(session.id, PAGE, found)
        st.session_state.several = found
    return found


def _one(session: Session, asked: Asked, k: int, count: int) -> Asked:
    """The inputs of one LLM."""
    place = f"llm{k}"
    with st.container(border=True):
        name = st.text_input("Name", key=f"{place}_name", max_chars=100, help="Of its folder in the answer.")
        found = asked | {"name": name.strip(), "llm": inputs.llm(session, place)}
        above = st.container()
        with st.popover("Another trace"):  # It runs first, because an upload is then chosen.
            inputs.upload_trace(session, place)
        with above:
            found["trace"] = inputs.trace(session, place)
        found["rate"] = inputs.rate(place)
        with st.expander("More on the traffic"):
            found |= inputs.part(place)
            found["rows"] = st.text_input(
                "Its rows, where the trace has a column model",
                key=f"{place}_rows",
                placeholder="all rows",
                help="The value of that column; empty: every row is for this LLM.",
            )
        with st.expander("Promise"):
            found |= inputs.promise(session, place) | inputs.safety(place)
        with st.expander("Policies and safety"):
            found |= inputs.policies(place)
        st.caption(draw.escaped(question.promised(found)))
        if count > 1 and st.button("Remove", key=f"{place}_remove", help=f"Plan without {name}"):
            _again(together.without(st.session_state.several, k))
    return found


def _also_asked(found: Asked) -> None:
    """List the requirements of slo.yaml, of each LLM and of all, that no input shows."""
    more = {one["name"]: one["more"] for one in found["llms"] if one["more"]} | found["shared"]["more"]

    def forget() -> None:
        bare = [one | {"more": {}} for one in found["llms"]]
        _again({"llms": bare, "shared": found["shared"] | {"more": {}}})

    inputs.also_asked(more, forget, "several")


def _again(asked: Asked) -> None:
    st.session_state.several_restore = asked
    st.rerun()


def _start(session: Session, asked: Asked) -> None:
    store, owner = session.store, session.id

    def keep(job: Job) -> None:
        store.keep(owner, RESULT, {"asked": asked, "result": job.key})

    try:
        request: dict[str, Any] = session.request(asked["llms"][0] | {"seed": asked["shared"]["seed"]})
        request |= {
            "question": together.document(asked, session.catalog),
            "traces": {one["name"]: str(store.trace_path(one["trace"])) for one in asked["llms"]},
            "time_limit_s": float(asked["shared"]["time_limit"]),
        }
        session.jobs.start(owner, PAGE, "together", request, keep).limit_s = request["time_limit_s"]
    except PlannerError as error:
        session.jobs.forget(owner, PAGE)
        draw.error(error)


def _answer(session: Session) -> None:
    job = session.jobs.of(session.id, PAGE)
    kept = session.store.kept(session.id, RESULT)
    found = session.store.document(kept["result"]) if kept else None
    if job is None and found is None:
        st.info("None yet: press Plan together.")
        return
    with st.container(key="answered_several"):
        if job is not None and job.state != "done":
            follow(session, PAGE)
            if found is not None:
                st.caption("The last answer of this session:")
        if kept is not None and found is not None:
            _last(session, kept, found)


def _last(session: Session, kept: Document, found: Document) -> None:
    """The answer that is there: of all LLMs, then of each."""
    _whole(found)
    with st.expander("What was found, and what bounds it"):
        draw.bullets(found["proof"])
        st.markdown("**Assuming**")
        draw.bullets(found["assumptions"])
    st.header("Downloads")
    draw.shared_downloads(
        session.store, kept["result"], together.command(kept["asked"], session.catalog_folder)
    )
    st.header("One by one")
    name = st.segmented_control(
        "LLM", list(found["plans"]), default=next(iter(found["plans"])), key="several_shown"
    )
    if name is not None:
        plan: Document = found["plans"][name]
        draw.first_screen(plan, f"first_screen_{name}")
        draw.screen_charts(plan)
        draw.plan_tabs(plan, session.store, kept["result"], folder=f"{name}/")


def _whole(found: Document) -> None:
    """Draw all fleets, the LLMs that give way, and the savings from a larger limit."""
    draw.first_screen(found)
    draw.screen_charts(found)
    draw.table(*found["tables"]["fleets"])
    if found["in_production"]:
        st.markdown("**On paper, in production, with a loss**")
        draw.table(*found["tables"]["answers"])
        draw.bullets(found["in_production"])
    st.markdown("**Who gives way, and what more would save**")
    draw.bullets(found["binding_lines"] if "binding_lines" in found else found["binding"])
    draw.table(*found["tables"]["limits"])
    if found["tables"]["nodes"][1]:
        with st.expander("Nodes"):
            draw.table(*found["tables"]["nodes"])


page()
