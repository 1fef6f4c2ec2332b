"""The inputs of a question, and slo.yaml as a text that follows them and leads them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pandas as pd
import streamlit as st

from planner.documents.safety import LEAST_KEPT_FRAC, MOST_GROWTH_FRAC, MOST_KEPT_FRAC
from planner.documents.slo import METRICS
from planner.documents.task import Objective
from planner.errors import PlannerError
from planner.fleet import MAX_PP
from planner.io.files import read_yaml, to_yaml
from planner.policies import PLANNED_QUEUES, QUEUE
from planner.traffic.formats import PUBLISHED
from planner.traffic.scaling import Scaling
from ui import draw, question
from ui.question import Asked
from ui.session import Session
from ui.store import read_as

MOST_UPLOAD_MB = 2048
OBJECTIVES = {
    "cost": "lowest cost",
    "power": "lowest power",
    "gpus": "fewest GPUs",
    "throughput": "most traffic within the limits",
}
SCALES = {
    "superpose": "more users (superpose)",
    "compress": "a faster clock (compress)",
    "thin": "fewer users (thin)",
}
SEED = "Draws what is random: shifted copies of a trace, spread stamps, samples of workers."
EMPTY: dict[str, Any] = {"min_value": 0.001, "value": None, "format": "%g"}
SHARE: dict[str, Any] = {"min_value": 0.0, "max_value": 100.0, "step": 1.0, "format": "%g"}


def remember(asked: Asked, place: str = "ask") -> None:
    """Give the inputs their values again, which Streamlit forgets when another page is opened."""
    for name, value in asked.items():
        if name not in ("gpus", "more") and f"{place}_{name}" not in st.session_state:
            st.session_state[f"{place}_{name}"] = value


def choose(session: Session, asked: Asked) -> tuple[Asked, Any]:
    """All inputs, one below the other: what they ask now, and where to say what is wrong with the trace."""
    found: Asked = {"more": asked["more"]}
    st.header("Traffic")
    upload_trace(session)
    found["trace"] = trace(session)
    below_trace = st.container()
    found["rate"] = rate()
    found |= part()
    st.header("LLM and GPUs")
    found["llm"] = llm(session)
    found["gpus"] = gpus(session, asked)
    st.header("Promise")
    found |= promise(session) | safety()
    with st.expander("Goal and limits"):
        found |= goal()
    with st.expander("Policies and safety"):
        found |= policies() | engines()
    also_asked(found["more"], lambda: _again(found | {"more": {}}))
    text(
        lambda: question.document(found, session.catalog),
        lambda typed: _again(question.of_document(typed, found, session.catalog)),
    )
    return found, below_trace


def upload_trace(session: Session, place: str = "ask") -> None:
    """A trace of one's own, which is then the chosen one."""
    uploaded = st.file_uploader(
        "Upload a trace (CSV or JSONL, plain or .gz)",
        key=f"{place}_upload",
        max_upload_size=MOST_UPLOAD_MB,
        help=f"{', '.join(PUBLISHED)} are known by their columns; so is a table of timestamp, input_tokens, "
        "output_tokens.",
    )
    if uploaded is not None and st.session_state.get(f"{place}_uploaded") != uploaded.file_id:
        st.session_state[f"{place}_uploaded"] = uploaded.file_id
        kept = session.store.add_trace(session.id, uploaded.name, uploaded.getvalue())
        st.session_state[f"{place}_trace"] = kept
        st.session_state[f"{place}_rate"] = None  # one's own traffic is planned for as it is, unless asked


def trace(session: Session, place: str = "ask") -> str:
    known = session.store.traces(session.id)
    if st.session_state[f"{place}_trace"] not in known:
        st.session_state[f"{place}_trace"] = known[0]
    chosen: str = st.selectbox(
        "Trace", known, key=f"{place}_trace", format_func=lambda reference: reference.partition("/")[2]
    )
    return chosen


def part(place: str = "ask") -> Asked:
    """How the trace is brought to the rate, and what of it counts."""
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


def rate(place: str = "ask") -> float | None:
    is_for_throughput = st.session_state.get(f"{place}_objective") == "throughput"
    found: float | None = st.number_input(
        "Rate [requests/s]; empty: as in the trace",
        step=1.0,
        key=f"{place}_rate",
        disabled=is_for_throughput,
        help="The trace is rescaled to this rate. Where the most traffic is looked for, it is the answer.",
        **EMPTY,
    )
    return found


def llm(session: Session, place: str = "ask") -> str:
    """A row of the catalog, or a Hugging Face config.json of one's own."""
    known = list(session.catalog.llms)
    if st.session_state[f"{place}_llm"] not in known:
        known.append(st.session_state[f"{place}_llm"])
    above = st.container()
    with st.popover("Another LLM"):
        uploaded = st.file_uploader("Its config.json, as on Hugging Face", "json", key=f"{place}_upload_llm")
        if uploaded is not None and st.session_state.get(f"{place}_uploaded_llm") != uploaded.file_id:
            st.session_state[f"{place}_uploaded_llm"] = uploaded.file_id
            path = str(session.store.add_file(uploaded.name, uploaded.getvalue()))
            known.append(path)
            st.session_state[f"{place}_llm"] = path
    chosen: str = above.selectbox("LLM", known, key=f"{place}_llm", format_func=question.llm_name)
    return chosen


def gpus(session: Session, asked: Asked, place: str = "ask") -> list[dict[str, Any]]:
    """The table of GPUs; its base stays the same while the page is open, as its edits are kept apart."""
    if f"{place}_gpus_base" not in st.session_state or f"{place}_gpus_table" not in st.session_state:
        st.session_state[f"{place}_gpus_base"] = asked["gpus"]
    columns = ["use", "GPU", "USD/h", "stock", "reserved", "spot", "interruptions/h"]
    table = pd.DataFrame(st.session_state[f"{place}_gpus_base"], columns=columns)
    table = table.astype({"stock": "Int64"} | dict.fromkeys(question.PRICES, float))
    table["memory"] = [session.catalog.gpus[name].memory_bytes / 1e9 for name in table["GPU"]]
    money: dict[str, Any] = {"min_value": 0.0, "format": "%.2f"}
    edited = st.data_editor(
        table,
        key=f"{place}_gpus_table",
        hide_index=True,
        disabled=["GPU", "memory"],
        column_config={
            "use": st.column_config.CheckboxColumn("use", width="small"),
            "USD/h": st.column_config.NumberColumn("USD/h", help="on demand", width="small", **money),
            "stock": st.column_config.NumberColumn(
                "stock", min_value=0, step=1, help="empty: any number", width="small"
            ),
            "reserved": st.column_config.NumberColumn("reserved USD/h", **money),
            "spot": st.column_config.NumberColumn("spot USD/h", **money),
            "interruptions/h": st.column_config.NumberColumn(
                "interruptions/h", min_value=0.0, help="of one spot worker"
            ),
            "memory": st.column_config.NumberColumn("GB", format="%.0f", width="small"),
        },
        placeholder="-",
        alt="GPUs that may be used, with their prices and how many there are",
    )
    st.caption(
        "Prices are per GPU and hour. Empty stock: as many as it takes. A plan runs around the clock, so the "
        "lower of USD/h and reserved counts; spot workers may go at any time, and are planned with what goes."
    )
    rows = edited[columns].astype(object).to_dict("records")
    return [{str(key): None if pd.isna(value) else value for key, value in row.items()} for row in rows]


def promise(session: Session, place: str = "ask") -> Asked:
    presets = [question.OWN_LIMITS, *session.catalog.slos]

    def take_preset() -> None:
        preset = session.catalog.slos.get(st.session_state[f"{place}_preset"])
        for name, value in (question.of_preset(preset) or {} if preset else {}).items():
            st.session_state[f"{place}_{name}"] = value

    def own_limits() -> None:
        st.session_state[f"{place}_preset"] = question.OWN_LIMITS

    found: Asked = {
        "preset": st.selectbox("Preset of a paper", presets, key=f"{place}_preset", on_change=take_preset)
    }
    preset = session.catalog.slos.get(found["preset"])
    is_relative = preset is not None and question.of_preset(preset) is None
    if preset is not None:
        st.caption(draw.escaped(f"{preset.source}. For {preset.served}."))
    if is_relative:
        st.info("This preset states slowdowns, not seconds; they are worked out for the LLM when planning.")
    for metric in METRICS:
        name, share = st.columns([3, 2], vertical_alignment="bottom")
        found[f"{metric}_ms"] = name.number_input(
            f"{question.WHAT[metric]} at most [ms]",
            step=10.0,
            on_change=own_limits,
            key=f"{place}_{metric}_ms",
            placeholder="not promised",
            disabled=is_relative,
            **EMPTY,
        )
        found[f"{metric}_percentile"] = share.selectbox(
            f"{metric.upper()} percentile",
            question.PERCENTILES,
            key=f"{place}_{metric}_percentile",
            on_change=own_limits,
            disabled=is_relative,
            accept_new_options=True,
        )
    found["attainment"] = st.number_input(
        "Requests that keep all limits at once, at least [%]",
        max_value=100.0,
        step=1.0,
        key=f"{place}_attainment",
        placeholder="not promised",
        disabled=is_relative,
        on_change=own_limits,
        **EMPTY,
    )
    return found


def safety(place: str = "ask") -> Asked:
    """In what share of futures the promise must be kept."""
    share, growth = st.columns(2, vertical_alignment="bottom")
    return {
        "kept_in": share.number_input(
            "Kept in [% of futures]",
            min_value=100 * LEAST_KEPT_FRAC,
            max_value=100 * MOST_KEPT_FRAC,
            value=None,
            step=1.0,
            format="%g",
            key=f"{place}_kept_in",
            placeholder="on paper alone",
            help="Futures: traffic drawn anew, step times by their spread. Empty: what is written, alone.",
        ),
        "growth": growth.number_input(
            "Traffic grows by [%]", key=f"{place}_growth", **(SHARE | {"max_value": 100 * MOST_GROWTH_FRAC})
        ),
    }


def goal(place: str = "ask", objectives: Sequence[str] = get_args(Objective)) -> Asked:
    found: Asked = {
        "objective": st.selectbox(
            "Look for", objectives, format_func=OBJECTIVES.__getitem__, key=f"{place}_objective"
        )
    }
    for name, label in (("cost", "Cost at most [USD/h]"), ("power_kw", "Power at most [kW]")):
        found[name] = st.number_input(
            label, key=f"{place}_{name}", step=10.0, placeholder="no limit", **EMPTY
        )
    found["gpu_limit"] = st.number_input(
        "GPUs at most", min_value=1, value=None, step=1, key=f"{place}_gpu_limit", placeholder="no limit"
    )
    found["seed"] = st.number_input("Seed", min_value=0, step=1, key=f"{place}_seed", help=SEED)
    found["time_limit"] = st.number_input("Time limit [s]", min_value=1, step=10, key=f"{place}_time_limit")
    return found


def policies(place: str = "ask") -> Asked:
    """How requests wait, and what must be survived."""
    found: Asked = {
        "queues": st.multiselect(
            "Order of the waiting prompts: any of",
            PLANNED_QUEUES,
            format_func=lambda name: f"{QUEUE[name].words} ({name})",
            key=f"{place}_queues",
            help="The plan takes the one that needs least; of equal ones the first.",
        )
    }
    found["longest_wait"] = st.number_input(
        "Nobody is overtaken for longer than [s]",
        step=10.0,
        key=f"{place}_longest_wait",
        placeholder="no limit",
        disabled=not any(QUEUE[name].overtakes for name in found["queues"]),
        **EMPTY,
    )
    count, of = st.columns(2, vertical_alignment="bottom")
    found["spare"] = count.number_input(
        "Losses to survive",
        min_value=0,
        step=1,
        key=f"{place}_spare",
        help="The promise holds after losing so many workers of any one pool, or nodes with all on them.",
    )
    found["spare_of"] = of.selectbox("Losses of", (question.WORKERS, question.NODES), key=f"{place}_spare_of")
    found["robust_steps"] = st.number_input(
        "Hold if steps take longer by [%]",
        key=f"{place}_robust_steps",
        help="The fits' own error stands in every plan.",
        **SHARE,
    )
    found["robust_traffic"] = st.number_input(
        "Hold if there is more traffic by [%]", key=f"{place}_robust_traffic", **SHARE
    )
    return found


def engines(place: str = "ask") -> Asked:
    """What holds for every worker."""
    found: Asked = {
        "stages": st.multiselect(
            "Pipeline stages a worker may have",
            range(1, MAX_PP + 1),
            key=f"{place}_stages",
            help="More than one lets a worker span more GPUs than tensor parallelism does.",
        )
    }
    found["bandwidth"] = st.number_input(
        "Network between workers [GB/s]",
        min_value=0.001,
        format="%g",
        key=f"{place}_bandwidth",
        help="Over it, prefill workers hand the KV cache of a prompt to decode workers.",
    )
    found["host_overhead"] = st.number_input(
        "Host overhead per engine step [ms]",
        min_value=0.0,
        step=0.5,
        format="%g",
        key=f"{place}_host_overhead",
        help="The engine's own time, which kernel times leave out.",
    )
    return found


def also_asked(more: Asked, forget: Callable[[], None], place: str = "ask") -> None:
    """What slo.yaml asks and no input shows."""
    if more:
        st.markdown("**Also asked**, in slo.yaml alone:")
        draw.bullets(question.leaves(more))
        if st.button("Ask none of these", key=f"{place}_forget_more"):
            forget()


def text(document: Callable[[], Asked], apply: Callable[[Asked], None]) -> None:
    """slo.yaml as the inputs ask it; what is typed there leads the inputs, and what has none is kept."""
    with st.expander("slo.yaml: the question as text"):
        st.caption(
            "The inputs above as a file for the command line. Edit it, or paste yours, and apply: the inputs "
            "follow, and what none of them shows is asked too. docs/file-formats.md has all keys."
        )
        try:
            written = to_yaml(document())
        except PlannerError as error:
            draw.error(error)
            return
        key = hashlib.sha256(written.encode()).hexdigest()  # other inputs, another text to begin from
        typed = st.text_area("slo.yaml", written, height=400, key=f"yaml_{key}") or ""
        if st.button("Apply", key="apply_yaml"):
            try:
                apply(read_as("slo.yaml", typed.encode(), read_yaml))
            except PlannerError as error:
                draw.error(error)


def _again(asked: Asked) -> None:
    st.session_state.restore = asked
    st.rerun()
