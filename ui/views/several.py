"""Several LLMs on one stock: the question on the left, who gets what on the right."""

from __future__ import annotations

from typing import Any

import streamlit as st

from planner.errors import PlannerError
from ui import draw, inputs, question, together
from ui.jobs import Job
from ui.question import Form
from ui.session import BrowserSession, follow_job, keep_widgets, mark_settled, open_session, set_widgets
from ui.store import Document

PAGE, RESULT = "several", "several result"  # Where the store keeps the page's inputs, and its latest answer.
MOST_LLMS = 12  # More would make the page too long; slo.yaml as a file may have any number.
# The objective throughput raises the rate of one LLM alone, so a question of several cannot have it.
OBJECTIVES = tuple(name for name in inputs.OBJECTIVES if name != "throughput")


def page() -> None:
    """The page Several LLMs."""
    session = open_session()
    form = _current_form(session)
    st.title("Several LLMs", anchor=False)
    st.write(
        "The cheapest fleets for several LLMs that share GPUs, a budget or power: who gets what, who gives "
        "way, and what more of each would save."
    )
    left, right = st.columns([5, 7], gap="large")
    with left:
        wants_plan = st.button("Plan together", type="primary", width="stretch", key="several_start")
        st.write("The page begins with an example of two LLMs.")
        form = _draw_inputs(session, form)
    with right:
        st.header("Answer", anchor="answer")
        if wants_plan:
            _start_job(session, form)
        _draw_answer(session)
    # The browser now has the values of all inputs (session.set_widgets).
    mark_settled("shared", *(f"llm{k}" for k in range(len(form["llms"]))))


def _current_form(session: BrowserSession) -> Form:
    """The inputs as they were left on this page, else those of the example.

    The widgets get their values once; at later runs they have what was typed (see `keep_widgets`).
    """
    restored = st.session_state.pop("several_restore", None)  # Set by `_redraw_with`.
    if restored is not None or "several" not in st.session_state:
        stored = restored or session.store.page_document(session.id, PAGE)
        traces = session.store.traces(session.id)
        form = (
            together.restore_form(stored, session.catalog)
            if stored
            else together.example_form(session.catalog, traces)
        )
        set_widgets(form["shared"], "shared")
        for k, llm_form in enumerate(form["llms"]):
            set_widgets(llm_form, f"llm{k}")
        st.session_state.several = form
    shown: Form = st.session_state.several
    keep_widgets(shown["shared"], "shared")
    for k, llm_form in enumerate(shown["llms"]):
        keep_widgets(llm_form, f"llm{k}")
    return shown


def _draw_inputs(session: BrowserSession, form: Form) -> Form:
    """Draw all inputs, one below the other; returns their values."""
    st.header("LLMs")
    count = len(form["llms"])
    drawn = [_llm_inputs(session, llm_form, k, count) for k, llm_form in enumerate(form["llms"])]
    llms = [llm_form for llm_form, _ in drawn]
    add_column, example_column = st.columns(2)
    wants_another = add_column.button("Add an LLM", key="several_add", disabled=count >= MOST_LLMS)
    wants_example = example_column.button("Back to the example", key="several_example")
    st.header("What they share")
    shared = {"gpus": inputs.gpu_inputs(session, form["shared"], "shared")}
    with st.expander("Goal and limits"):
        shared |= inputs.goal_inputs("shared", OBJECTIVES)
    with st.expander("Workers"):
        shared |= inputs.engine_inputs("shared")
    chosen: Form = {"llms": llms, "shared": form["shared"] | shared}
    # The buttons act only now, with all inputs read, so that nothing that was just typed is lost.
    if wants_another:
        _redraw_with(together.add_llm(chosen))
    if wants_example:
        _redraw_with(together.example_form(session.catalog, session.store.traces(session.id)))
    for k, (_, wants_removal) in enumerate(drawn):
        if wants_removal:
            _redraw_with(together.remove_llm(chosen, k))
    _list_other_requirements(chosen)
    inputs.slo_text_input(
        lambda: together.document(chosen, session.catalog),
        lambda typed: _redraw_with(
            together.form_of_document(typed, chosen, session.catalog, session.store.traces(session.id))
        ),
    )
    if chosen != st.session_state.several:
        session.store.keep_page_document(session.id, PAGE, chosen)
        st.session_state.several = chosen
    return chosen


def _llm_inputs(session: BrowserSession, form: Form, k: int, count: int) -> tuple[Form, bool]:
    """The inputs of the k-th of `count` LLMs, and whether it is to be removed."""
    place = f"llm{k}"
    with st.container(border=True):
        name_help = "Its folder in the answer has this name."
        name = st.text_input("Name", key=f"{place}_name", max_chars=100, help=name_help)
        chosen = form | {"name": name.strip(), "llm": inputs.llm_input(session, place)}
        chosen |= _traffic_inputs(session, form, place)
        with st.expander("SLO"):
            chosen |= inputs.slo_inputs(session, place) | inputs.safety_inputs(place)
        with st.expander("Policies and losses"):
            chosen |= inputs.policy_inputs(place)
        st.caption(draw.escape_markdown(question.slo_summary(chosen)))
        wants_removal = count > 1 and st.button("Remove", key=f"{place}_remove", help=f"Plan without {name}")
    return chosen, wants_removal


def _traffic_inputs(session: BrowserSession, form: Form, place: str) -> Form:
    """The inputs for the traffic of an LLM: its trace, or the described traffic that slo.yaml has instead."""
    if form["source"] == question.DESCRIBED:
        st.caption("Described traffic, as in slo.yaml below.")
        rate_rps = inputs.rate_input(place, if_empty="")
        with st.expander("More on the traffic"):
            return inputs.description_inputs(session, place) | {"rate": rate_rps}
    above = st.container()
    with st.popover("Another trace"):  # Run before `trace_input`, which chooses a new upload.
        inputs.upload_trace(session, place)
    with above:
        chosen: Form = {"trace": inputs.trace_input(session, place)}
    chosen["rate"] = inputs.rate_input(place)
    with st.expander("More on the traffic"):
        chosen |= inputs.part_inputs(place)
        chosen["rows"] = st.text_input(
            "Its rows, where the trace has a column model",
            key=f"{place}_rows",
            placeholder="all rows",
            help="The value of that column; empty: every row is for this LLM.",
        )
    return chosen


def _list_other_requirements(form: Form) -> None:
    """List the requirements of slo.yaml that no input shows (the keys "more" of the form and of its LLMs)."""
    of_llms = {llm_form["name"]: llm_form["more"] for llm_form in form["llms"] if llm_form["more"]}
    without_input = of_llms | form["shared"]["more"]

    def forget() -> None:
        llms = [llm_form | {"more": {}} for llm_form in form["llms"]]
        _redraw_with({"llms": llms, "shared": form["shared"] | {"more": {}}})

    inputs.list_other_requirements(without_input, forget, "several")


def _redraw_with(form: Form) -> None:
    """Draw the page anew with these inputs."""
    st.session_state.several_restore = form
    st.rerun()


def _start_job(session: BrowserSession, form: Form) -> None:
    """Start the plan for several LLMs; its result is kept with the inputs."""
    store, owner = session.store, session.id

    def keep(job: Job) -> None:
        store.keep_page_document(owner, RESULT, {"asked": form, "result": job.key})

    try:
        # `session.request` makes a request of one LLM. The job reads `traces` instead of its `trace`.
        request: dict[str, Any] = session.request(form["llms"][0] | {"seed": form["shared"]["seed"]})
        request |= {
            "question": together.document(form, session.catalog),
            "traces": {
                each["name"]: str(store.trace_path(each["trace"]))
                for each in form["llms"]
                if each["source"] != question.DESCRIBED
            },
            "time_limit_s": float(form["shared"]["time_limit"]),
        }
        job = session.jobs.start(owner, PAGE, "together", request, keep)
        # The progress bar reads it; the search keeps to the limit in its request.
        job.limit_s = request["time_limit_s"]
    except PlannerError as error:
        session.jobs.forget(owner, PAGE)
        draw.draw_error(error)


def _draw_answer(session: BrowserSession) -> None:
    """Draw how far the job is, and the last answer of the session."""
    job = session.jobs.find(session.id, PAGE)
    saved = session.store.page_document(session.id, RESULT)
    answer = session.store.document(saved["result"]) if saved else None
    if job is None and answer is None:
        st.info("None yet: press Plan together.")
        return
    with st.container(key="answered_several"):
        if job is not None and job.state != "done":
            follow_job(session, PAGE)
            if answer is not None:
                st.caption("The last answer of this session:")
        if saved is not None and answer is not None:
            _draw_last_answer(session, saved, answer)


def _draw_last_answer(session: BrowserSession, saved: Document, answer: Document) -> None:
    """Draw the latest answer: of all LLMs together, then of each."""
    _draw_all_llms(answer)
    with st.expander("What was found, and what bounds it"):
        draw.draw_list(answer["proof"])
        st.markdown("**Assuming**")
        draw.draw_list(answer["assumptions"])
    st.header("Downloads")
    draw.draw_shared_downloads(
        session.store, saved["result"], together.plan_command(saved["asked"], session.catalog_folder)
    )
    st.header("One by one")
    name = st.segmented_control(
        "LLM", list(answer["plans"]), default=next(iter(answer["plans"])), key="several_shown"
    )
    if name is not None:
        plan: Document = answer["plans"][name]
        draw.draw_first_screen(plan, f"first_screen_{name}")
        draw.draw_screen_charts(plan)
        draw.draw_plan_tabs(plan, session.store, saved["result"], folder=f"{name}/")


def _draw_all_llms(answer: Document) -> None:
    """Draw all fleets, the LLMs that give way, and the savings from a larger limit."""
    draw.draw_first_screen(answer)
    draw.draw_screen_charts(answer)
    draw.draw_table(*answer["tables"]["fleets"])
    if answer["in_production"]:
        st.markdown("**On paper, in production, with a loss**")
        draw.draw_table(*answer["tables"]["answers"])
        draw.draw_list(answer["in_production"])
    st.markdown("**Who gives way, and what more would save**")
    # An answer that an earlier version made has no such lines.
    draw.draw_list(answer["binding_lines" if "binding_lines" in answer else "binding"])
    draw.draw_table(*answer["tables"]["limits"])
    node_columns, node_rows = answer["tables"]["nodes"]
    if node_rows:
        with st.expander("Nodes"):
            draw.draw_table(node_columns, node_rows)


page()
