"""The inputs of a question, one function for each part of slo.yaml, and slo.yaml as a text: it shows what the
inputs say, and what is typed there sets the inputs.

A page has its inputs under a `place`, the first part of their keys in Streamlit's session state: "ask" for
the page Plan. Each function draws its inputs and returns their values as part of a `Form` (question.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import streamlit as st

from planner.documents.safety import LEAST_KEPT_FRAC, MOST_GROWTH_FRAC, MOST_KEPT_FRAC
from planner.documents.task import Objective
from planner.errors import PlannerError
from planner.files.checked_files import read_yaml, to_yaml
from planner.fleet import Network
from planner.models.parallelism import MAX_PP
from planner.policies import PLANNED_QUEUES, QUEUE
from planner.slo_metrics import METRICS
from planner.traffic.formats import PUBLISHED
from planner.traffic.scaling import Scaling
from ui import draw, question, support_badge
from ui.question import Form
from ui.session import COUNTS, BrowserSession, gpu_key
from ui.store import SAMPLES, column_names, read_as

MOST_UPLOAD_MB = 2048  # Enough for a trace of ten million requests as CSV.
OBJECTIVES = {
    "cost": "lowest cost",
    "power": "lowest power",
    "gpus": "fewest GPUs",
    "throughput": "most traffic within the limits",
}
# The first values of described traffic: its rate, and mean lengths [tokens] unless a task has lengths.
DESCRIBED_RPS = 10.0
OWN_MEANS = {"input": 1500.0, "output": 300.0}
SCALES = {
    "superpose": "more users (superpose)",
    "compress": "a faster clock (compress)",
    "thin": "fewer users (thin)",
}
SEED_HELP = "Draws what is random: shifted copies of a trace, spread stamps, samples of workers."
# Arguments of st.number_input: EMPTY for an input that may stay empty, SHARE for a percentage. A limit or a
# rate of 0 makes no sense, so the least value is a small one.
LEAST_VALUE = 0.001
LEAST_RPS = 1e-9  # Streamlit empties an input whose value is below the least, and slo.yaml takes any rate.
EMPTY: dict[str, Any] = {"min_value": LEAST_VALUE, "value": None, "format": "%g"}
SHARE: dict[str, Any] = {"min_value": 0.0, "max_value": 100.0, "step": 1.0, "format": "%g"}
# Names of the inputs of described traffic, beside its rate.
DESCRIPTION = ("task", "input_mean", "input_p95", "output_mean", "output_p95", "burst_cv", "duration_min")
ROLES = {
    "arrival": "When a request arrives",
    "input": "Tokens of the prompt",
    "output": "Tokens of the answer",
    "end": "When it ends (in place of its arrival)",
    "duration": "How long it takes (with its end)",
    "tenant": "Who sends it",
    "status": "Whether it failed",
}
"""Roles of a log's columns, as slo.yaml calls them under traffic: map. Other roles are guessed, or written
in slo.yaml.
"""
GPU_COLUMNS: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("Stock", {"placeholder": "any number", "help": "Owned ones count too."}),
    "owned": ("Owned, paid already", {"placeholder": "none"}),
    "USD/h": ("On demand [USD/h]", {"placeholder": "not sold so"}),
    "reserved": ("Reserved [USD/h]", {"placeholder": "not sold so"}),
    "spot": ("Spot [USD/h]", {"placeholder": "not sold so"}),
    "interruptions/h": ("Interruptions of a spot worker [per h]", {"placeholder": "not known"}),
}
"""The columns of a GPU's row in a form: the label and further arguments of each input."""


def draw_question(session: BrowserSession, form: Form) -> tuple[Form, Any]:
    """Draw all inputs, one below the other. Returns their values, and the container below the trace, where
    its errors are shown.
    """
    chosen: Form = {"more": form["more"]}  # Requirements of slo.yaml that no input shows.
    st.header("Traffic")
    chosen |= traffic_inputs(session)
    below_trace = st.container()
    st.header("LLM")
    chosen["llm"] = llm_input(session)
    st.header("GPUs")
    chosen["gpus"] = gpu_inputs(session, form)
    st.header("SLO")
    chosen |= slo_inputs(session)
    st.header("Safety")
    chosen |= safety_inputs()
    with st.expander("Goal and limits"):
        chosen |= goal_inputs()
    with st.expander("Policies and losses"):
        chosen |= policy_inputs() | engine_inputs()
    list_other_requirements(chosen["more"], lambda: _redraw_with(chosen | {"more": {}}))
    slo_text_input(
        lambda: question.document(chosen, session.catalog),
        lambda typed: _redraw_with(question.form_of_document(typed, chosen, session.catalog)),
    )
    return chosen, below_trace


def traffic_inputs(session: BrowserSession, place: str = "ask") -> Form:
    """The inputs for the requests: a sample, an uploaded trace with the roles of its columns, or a
    description.
    """
    trace_ids = session.store.traces(session.id)

    def take_source() -> None:
        """If the chosen trace is not of the new source, choose the latest that is."""
        source = st.session_state[f"{place}_source"]
        if source == question.DESCRIBED:
            if st.session_state[f"{place}_rate"] is None:  # A description must have a rate.
                st.session_state[f"{place}_rate"] = DESCRIBED_RPS
            return
        fitting = _of_source(trace_ids, source)
        if fitting and st.session_state[f"{place}_trace"] not in fitting:
            st.session_state[f"{place}_trace"] = fitting[-1]
            st.session_state[f"{place}_map"] = {}

    source: str = st.segmented_control(  # type: ignore[assignment]  # one is required
        "Requests come from",
        question.SOURCES,
        key=f"{place}_source",
        format_func=str.capitalize,
        required=True,
        on_change=take_source,
        label_visibility="collapsed",
    )
    # The chosen source may hide inputs, among them that for the trace. Streamlit forgets the values of hidden
    # inputs, but not a value that was assigned in this run.
    st.session_state[f"{place}_trace"] = st.session_state[f"{place}_trace"]
    chosen: Form = {"source": source, "trace": st.session_state[f"{place}_trace"]}
    chosen["map"] = st.session_state[f"{place}_map"]
    hidden_values = {key: st.session_state[f"{place}_{key}"] for key in (*DESCRIPTION, "scale", "window")}
    if source == question.DESCRIBED:
        return (
            chosen
            | hidden_values
            | {"rate": rate_input(place, if_empty="")}
            | description_inputs(session, place)
        )
    if source == question.UPLOAD:
        upload_trace(session, place)
    fitting = _of_source(session.store.traces(session.id), source)
    if fitting:
        chosen["trace"] = trace_input(session, place, fitting)
        chosen["map"] = st.session_state[f"{place}_map"]
    else:
        st.caption("No file yet: drop one above. Until then the sample counts.")
    return chosen | hidden_values | {"rate": rate_input(place)} | part_inputs(place)


def _of_source(trace_ids: Sequence[str], source: str) -> list[str]:
    """The traces of one source: the samples if `source` is SAMPLE, otherwise the uploaded ones."""
    is_sample = source == question.SAMPLE
    return [trace_id for trace_id in trace_ids if trace_id.startswith(f"{SAMPLES}/") == is_sample]


def description_inputs(session: BrowserSession, place: str = "ask") -> Form:
    """The inputs for described traffic: how long requests are, and how they arrive."""

    def take_task() -> None:
        """After a change of task: empty the inputs for lengths if the task brings its own lengths, otherwise
        fill in OWN_MEANS.
        """
        is_own = st.session_state[f"{place}_task"] == question.OWN_LENGTHS
        for key, mean_tokens in OWN_MEANS.items():
            st.session_state[f"{place}_{key}_mean"] = mean_tokens if is_own else None
            st.session_state[f"{place}_{key}_p95"] = None

    tasks = [question.OWN_LENGTHS, *session.catalog.tasks]
    chosen: Form = {
        "task": st.selectbox(
            "Requests are like",
            tasks,
            key=f"{place}_task",
            on_change=take_task,
            help="Rows of catalogs/tasks.yaml; the figures below take the place of the task's.",
        )
    }
    for key, name in (("input", "Prompt"), ("output", "Answer")):
        mean_column, p95_column = st.columns(2, vertical_alignment="bottom")
        is_own = chosen["task"] == question.OWN_LENGTHS
        chosen[f"{key}_mean"] = mean_column.number_input(
            f"{name}, mean [tokens]",
            key=f"{place}_{key}_mean",
            step=10.0,
            placeholder="not given" if is_own else "as the task",
            **EMPTY,
        )
        chosen[f"{key}_p95"] = p95_column.number_input(
            f"{name}, p95 [tokens]", key=f"{place}_{key}_p95", step=10.0, placeholder="not given", **EMPTY
        )
    burst_column, duration_column = st.columns(2, vertical_alignment="bottom")
    chosen["burst_cv"] = burst_column.number_input(
        "Burstiness (CV of gaps)",
        key=f"{place}_burst_cv",
        step=0.5,
        placeholder="as usual",
        help="1: at random (Poisson). Empty: of clients who send in bursts, as in production.",
        **EMPTY,
    )
    chosen["duration_min"] = duration_column.number_input(
        "Duration [min]", key=f"{place}_duration_min", step=5.0, placeholder="as usual", **EMPTY
    )
    return chosen


def upload_trace(session: BrowserSession, place: str = "ask") -> None:
    """The input for a trace of one's own. An uploaded trace is then the chosen one."""
    uploaded = st.file_uploader(
        "Upload a trace or a log (CSV, JSONL, Parquet; plain or .gz)",
        key=f"{place}_upload",
        max_upload_size=MOST_UPLOAD_MB,
        help=f"{', '.join(PUBLISHED)} are known by their columns; so is a table of timestamp, input_tokens, "
        "output_tokens. Of other columns the page asks what they are.",
    )
    if uploaded is not None and st.session_state.get(f"{place}_uploaded") != uploaded.file_id:
        st.session_state[f"{place}_uploaded"] = uploaded.file_id
        trace_id = session.store.add_trace(session.id, uploaded.name, uploaded.getvalue())
        st.session_state[f"{place}_trace"] = trace_id
        st.session_state[f"{place}_map"] = {}
        # An uploaded trace is planned for at its own rate, unless the user gives another.
        st.session_state[f"{place}_rate"] = None


def trace_input(session: BrowserSession, place: str = "ask", offered: Sequence[str] | None = None) -> str:
    """The input for the trace. Returns its reference in the store: one of `offered`, or of all traces of the
    session.
    """
    trace_ids = offered or session.store.traces(session.id)
    if st.session_state[f"{place}_trace"] not in trace_ids:
        st.session_state[f"{place}_trace"] = trace_ids[0]

    def forget_map() -> None:
        st.session_state[f"{place}_map"] = {}

    chosen: str = st.selectbox(
        "Trace",
        trace_ids,
        key=f"{place}_trace",
        format_func=lambda reference: reference.partition("/")[2],
        on_change=forget_map,
    )
    return chosen


def column_inputs(session: BrowserSession, reference: str, guess: str, place: str = "ask") -> None:
    """The inputs for the roles of a log's columns. They begin with `guess`, which the error that asked for
    them proposes, as `question.parse_map` reads it. Once the button is pressed, the log is read by them.
    """
    try:
        names = column_names(session.store.trace_path(reference))
    except PlannerError as error:
        draw.draw_error(error)
        return
    if not names:
        return
    column_of = question.parse_map(guess) | st.session_state[f"{place}_map"]
    chosen_columns: dict[str, str] = {}
    with st.container(border=True):
        st.markdown("**Which column is what?**")
        for role, words in ROLES.items():
            name, _, unit = column_of.get(role, "").partition(":")
            chosen = st.selectbox(
                words,
                names,
                names.index(name) if name in names else None,
                key=f"{place}_column_{role}_{reference}",
                placeholder="none",
            )
            if chosen is not None:
                # The unit is of the column that was guessed, so it does not go with another column.
                chosen_columns[role] = f"{chosen}:{unit}" if unit and chosen == name else chosen
        if st.button("Read it so", key=f"{place}_columns", type="primary"):
            st.session_state[f"{place}_map"] = chosen_columns
            st.rerun()


def part_inputs(place: str = "ask") -> Form:
    """The inputs for how the trace is scaled to the rate, and which part of it is planned for."""
    return {
        "scale": st.selectbox(
            "Rescale by", get_args(Scaling), format_func=SCALES.__getitem__, key=f"{place}_scale"
        ),
        "window": st.selectbox(
            "Part of the trace",
            question.WINDOWS,
            key=f"{place}_window",
            accept_new_options=True,
            help="Or type another, such as: busiest 30 min",
        ),
    }


def rate_input(place: str = "ask", if_empty: str = "as in the trace") -> float | None:
    """The input for the rate; None if it is empty, which asks for the trace's own rate or the highest one.
    The label says what it means (`if_empty`); an input that may not be empty has none.
    """
    is_for_throughput = st.session_state.get(f"{place}_objective") == "throughput"
    rate_rps: float | None = st.number_input(
        f"Rate [requests/s]; empty: {if_empty}" if if_empty else "Rate [requests/s]",
        step=1.0,
        key=f"{place}_rate",
        disabled=is_for_throughput,
        help="The trace is rescaled to this rate. Where the most traffic is looked for, it is the answer.",
        **(EMPTY | {"min_value": LEAST_RPS}),
    )
    return rate_rps


def llm_input(session: BrowserSession, place: str = "ask") -> str:
    """The input for the LLM. Returns a name of the catalog, or the path of an uploaded config.json."""
    names = list(session.catalog.llms)
    if st.session_state[f"{place}_llm"] not in names:
        names.append(st.session_state[f"{place}_llm"])
    above = st.container()  # Filled last: the list must offer a file that is uploaded below.
    with st.popover("Another LLM"):
        uploaded = st.file_uploader("Its config.json, as on Hugging Face", "json", key=f"{place}_upload_llm")
        if uploaded is not None and st.session_state.get(f"{place}_uploaded_llm") != uploaded.file_id:
            st.session_state[f"{place}_uploaded_llm"] = uploaded.file_id
            path = str(session.store.add_file(uploaded.name, uploaded.getvalue()))
            names.append(path)
            st.session_state[f"{place}_llm"] = path
    with above:
        chosen: str = st.selectbox(
            "LLM, type to search", names, key=f"{place}_llm", format_func=question.llm_name
        )
        name, colour, why = support_badge.badge_of(session.catalog, chosen)
        st.badge(name, color=colour, help=why)
    return chosen


def gpu_inputs(session: BrowserSession, form: Form, place: str = "ask") -> list[dict[str, Any]]:
    """A chip for each GPU, and inputs for stock and prices of the chosen GPUs. Returns a row per GPU of the
    catalog, as `question.gpu_rows` makes them.
    """
    catalog_gpus = session.catalog.gpus
    row_of = {row["GPU"]: row for row in form["gpus"]}

    def chip(name: str) -> str:
        """A GPU's name, memory and price; without a price on demand the reserved one."""
        row = row_of[name]
        price = row["USD/h"] if row["USD/h"] is not None else row["reserved"]
        memory = f"{catalog_gpus[name].memory_bytes / 2**30:.0f} GiB"
        return f"{name} · {memory}" + (f" · {price:,.2f}" if price is not None else "")

    chosen = st.pills(
        "May be used: memory, USD/h of one GPU",
        list(catalog_gpus),
        selection_mode="multi",
        key=f"{place}_use",
        format_func=chip,
        help="Prices are per GPU and hour, on demand where nothing else is given.",
    )
    rows = []
    for name in catalog_gpus:
        row = row_of[name] | {"use": name in chosen}
        if row["use"]:
            row |= _gpu_terms_inputs(row, place)
        rows.append(row)
    st.caption(
        "Empty stock: as many as it takes. A plan runs around the clock, so the lower of on demand and "
        "reserved counts; spot workers may go at any time, and are planned with what goes."
    )
    return rows


def _gpu_terms_inputs(row: Mapping[str, Any], place: str) -> Form:
    """The inputs for stock and prices of a GPU, behind a button that shows the stock."""
    name, terms = row["GPU"], dict[str, Any]()
    stock, owned = row["stock"], row["owned"]
    stock_text = "any number" if stock is None else f"{stock:,.0f} in stock"
    stock_text += f", {owned:,.0f} owned" if owned else ""
    with st.popover(f"{name}: {stock_text}", width="stretch"):
        for column, (label, arguments) in GPU_COLUMNS.items():
            is_count = column in COUNTS
            terms[column] = st.number_input(
                label,
                min_value=0 if is_count else 0.0,
                value=None,
                step=1 if is_count else 0.1,
                format="%d" if is_count else "%.2f",
                key=gpu_key(place, column, name),
                **arguments,
            )
    return terms


def slo_inputs(session: BrowserSession, place: str = "ask") -> Form:
    """The inputs for the limits. A preset fills them; a change of one makes them the user's own limits."""
    presets = [question.OWN_LIMITS, *session.catalog.slos]

    def take_preset() -> None:
        preset = session.catalog.slos.get(st.session_state[f"{place}_preset"])
        if preset and (limits := question.form_of_preset(preset)):  # Without limits in seconds: nothing.
            st.session_state.update({f"{place}_{name}": value for name, value in limits.items()})

    def take_own_limits() -> None:
        st.session_state[f"{place}_preset"] = question.OWN_LIMITS

    chosen: Form = {
        "preset": st.selectbox("Preset of a paper", presets, key=f"{place}_preset", on_change=take_preset)
    }
    preset = session.catalog.slos.get(chosen["preset"])
    is_relative = preset is not None and question.form_of_preset(preset) is None
    if preset is not None:
        st.caption(draw.escape_markdown(f"{preset.source}. For {preset.served}."))
    if is_relative:
        st.info("This preset states slowdowns, not seconds; they are worked out for the LLM when planning.")
    unit = st.segmented_control("Limits in", ("ms", "s"), key=f"{place}_unit", default="ms", required=True)
    for metric in question.INPUT_METRICS:
        limit_column, percentile_column = st.columns([3, 2], vertical_alignment="bottom")
        with limit_column:
            chosen[f"{metric}_ms"] = _limit_input(
                metric, unit, place, take_own_limits, is_relative=is_relative
            )
        chosen[f"{metric}_percentile"] = percentile_column.selectbox(
            f"{METRICS[metric].abbreviation} percentile",
            question.PERCENTILES,
            key=f"{place}_{metric}_percentile",
            on_change=take_own_limits,
            disabled=is_relative,
            accept_new_options=True,
        )
    chosen["attainment"] = st.number_input(
        "Requests that keep all limits at once, at least [%]",
        max_value=100.0,
        step=1.0,
        key=f"{place}_attainment",
        placeholder="no limit",
        disabled=is_relative,
        on_change=take_own_limits,
        **EMPTY,
    )
    return chosen


def _limit_input(
    metric: str, unit: str, place: str, after_change: Callable[[], None], *, is_relative: bool
) -> float | None:
    """The input for a limit, shown in `unit` (ms or s). Its value is kept and returned in ms. With
    `is_relative` the preset has no limit in seconds, and the input is disabled.
    """
    key = f"{place}_{metric}_ms"
    ms_per_unit = 1.0 if unit == "ms" else 1e3

    def take_value() -> None:
        value = st.session_state[f"{place}_{metric}_{unit}"]
        st.session_state[key] = question.converted(value, ms_per_unit)
        after_change()

    kept_ms = st.session_state[key]
    if unit != "ms":
        st.session_state[f"{place}_{metric}_{unit}"] = question.converted(kept_ms, 1 / ms_per_unit)
        st.session_state[key] = kept_ms  # Streamlit forgets the value of an input that is not drawn.
    limit: float | None = st.number_input(
        f"{METRICS[metric].name.capitalize()} ({METRICS[metric].abbreviation}) at most [{unit}]",
        step=10.0 / ms_per_unit,
        on_change=take_value,
        key=f"{place}_{metric}_{unit}",
        placeholder="no limit",
        disabled=is_relative,
        **(EMPTY | {"min_value": LEAST_VALUE / ms_per_unit}),
    )
    return limit if unit == "ms" else kept_ms


def safety_inputs(place: str = "ask") -> Form:
    """The inputs for the share of scenarios that must keep the SLO, by a profile or by its figures."""

    def take_profile() -> None:
        for name, value in question.PROFILES.get(st.session_state[f"{place}_profile"], {}).items():
            st.session_state[f"{place}_{name}"] = value
        st.session_state[f"{place}_growth"] = 0.0

    chosen = {key: st.session_state[f"{place}_{key}"] for key in ("kept_in", "growth", "spare", "spare_of")}
    st.session_state[f"{place}_profile"] = question.safety_profile(chosen)
    st.segmented_control(
        "Safety profile",
        (*question.PROFILES, question.OWN_PROFILE),
        key=f"{place}_profile",
        required=True,
        on_change=take_profile,
        help="on paper: the traffic and the step times as written. production: 90 % of scenarios. high "
        "availability: the same after losing any one node.",
    )
    share_column, growth_column = st.columns(2, vertical_alignment="bottom")
    return {
        "kept_in": share_column.number_input(
            "Kept in [% of scenarios]",
            min_value=100 * LEAST_KEPT_FRAC,
            max_value=100 * MOST_KEPT_FRAC,
            value=None,
            step=1.0,
            format="%g",
            key=f"{place}_kept_in",
            placeholder="on paper alone",
            help="Scenarios: traffic drawn anew, step times by their spread. Empty: what is written, alone.",
        ),
        "growth": growth_column.number_input(
            "Traffic grows by [%]", key=f"{place}_growth", **(SHARE | {"max_value": 100 * MOST_GROWTH_FRAC})
        ),
    }


def goal_inputs(place: str = "ask", objectives: Sequence[str] = get_args(Objective)) -> Form:
    """The inputs for the objective, the limits on the whole fleet, the seed and the time limit."""
    chosen: Form = {
        "objective": st.selectbox(
            "Look for", objectives, format_func=OBJECTIVES.__getitem__, key=f"{place}_objective"
        )
    }
    for name, label in (("cost", "Cost at most [USD/h]"), ("power_kw", "Power at most [kW]")):
        chosen[name] = st.number_input(
            label, key=f"{place}_{name}", step=10.0, placeholder="no limit", **EMPTY
        )
    chosen["gpu_limit"] = st.number_input(
        "GPUs at most", min_value=1, value=None, step=1, key=f"{place}_gpu_limit", placeholder="no limit"
    )
    chosen["seed"] = st.number_input("Seed", min_value=0, step=1, key=f"{place}_seed", help=SEED_HELP)
    chosen["time_limit"] = st.number_input("Time limit [s]", min_value=1, step=10, key=f"{place}_time_limit")
    return chosen


def policy_inputs(place: str = "ask") -> Form:
    """The inputs for queueing and for the losses that the fleet must survive."""
    chosen: Form = {
        "queues": st.multiselect(
            "Order of the waiting prompts: any of",
            PLANNED_QUEUES,
            format_func=lambda name: f"{QUEUE[name].words} ({name})",
            key=f"{place}_queues",
            help="The plan takes the one that needs least; of equal ones the first.",
        )
    }
    chosen["longest_wait"] = st.number_input(
        "Nobody is overtaken for longer than [s]",
        step=10.0,
        key=f"{place}_longest_wait",
        placeholder="no limit",
        disabled=not any(QUEUE[name].has_longest_wait for name in chosen["queues"]),
        **EMPTY,
    )
    count_column, kind_column = st.columns(2, vertical_alignment="bottom")
    chosen["spare"] = count_column.number_input(
        "Losses to survive",
        min_value=0,
        step=1,
        key=f"{place}_spare",
        help="The SLO holds after losing this many workers of any one pool, or nodes with all on them.",
    )
    chosen["spare_of"] = kind_column.selectbox(
        "Losses of", (question.WORKERS, question.NODES), key=f"{place}_spare_of"
    )
    chosen["robust_steps"] = st.number_input(
        "Hold if steps take longer by [%]",
        key=f"{place}_robust_steps",
        help="The fits' own error stands in every plan.",
        **SHARE,
    )
    chosen["robust_traffic"] = st.number_input(
        "Hold if there is more traffic by [%]", key=f"{place}_robust_traffic", **SHARE
    )
    return chosen


def engine_inputs(place: str = "ask") -> Form:
    """The inputs for the engine settings that all workers share."""
    chosen: Form = {
        "stages": st.multiselect(
            "Pipeline stages a worker may have",
            range(1, MAX_PP + 1),
            key=f"{place}_stages",
            help="More than one lets a worker span more GPUs than tensor parallelism does.",
        )
    }
    chosen["bandwidth"] = st.number_input(
        "Network between workers [GB/s]",
        min_value=LEAST_VALUE,
        value=None,
        placeholder=f"{Network().bandwidth_bytes_per_s / 1e9:g}, not stated",
        format="%g",
        key=f"{place}_bandwidth",
        help="Over it, prefill workers hand the KV cache of a prompt to decode workers.",
    )
    chosen["host_overhead"] = st.number_input(
        "Host overhead per engine step [ms]",
        min_value=0.0,
        step=0.5,
        format="%g",
        key=f"{place}_host_overhead",
        help="The engine's own time, which kernel times leave out.",
    )
    return chosen


def list_other_requirements(more: Form, forget: Callable[[], None], place: str = "ask") -> None:
    """List the requirements `more` of slo.yaml, which no input shows. A button calls `forget`."""
    if more:
        st.markdown("**Also required**, in slo.yaml alone:")
        draw.draw_list(question.leaf_texts(more))
        if st.button("Require none of these", key=f"{place}_forget_more"):
            forget()


def slo_text_input(document: Callable[[], Form], apply: Callable[[Form], None]) -> None:
    """The slo.yaml of the inputs, which `document` makes, as text. `apply` gets what is typed there, and
    sets the inputs to it; keys without an input stay in the question.
    """
    with st.expander("slo.yaml: the question as text"):
        st.caption(
            "The inputs above as a file for the command line. Edit it, or paste yours, and apply: the inputs "
            "follow, and what none of them shows stays in the question. docs/tables/keys.md has all keys."
        )
        try:
            written = to_yaml(document())
        except PlannerError as error:
            draw.draw_error(error)
            return
        # With a key of its own per text, the area shows the new text after a change of the inputs.
        key = hashlib.sha256(written.encode()).hexdigest()
        typed = st.text_area("slo.yaml", written, height=400, key=f"yaml_{key}") or ""
        if st.button("Apply", key="apply_yaml"):
            try:
                apply(read_as("slo.yaml", typed.encode(), read_yaml))
            except PlannerError as error:
                draw.draw_error(error)


def _redraw_with(form: Form) -> None:
    """Draw the page Plan anew with these inputs."""
    st.session_state.restore = form
    st.rerun()
