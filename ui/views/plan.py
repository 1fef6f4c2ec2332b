"""Plan: the question on the left, the traffic and the answer on the right."""

from __future__ import annotations

from typing import Any, get_args

import pandas as pd
import streamlit as st

from planner.errors import PlannerError
from planner.slo import METRICS, Objective, Scale, parse_task
from ui import draw, question
from ui.jobs import Job
from ui.question import Asked
from ui.session import Session, follow, open_session, short_job

MOST_UPLOAD_MB = 2048
OBJECTIVES = {"cost": "lowest cost", "power": "lowest power", "gpus": "fewest GPUs"}
SCALES = {
    "superpose": "more users (superpose)",
    "compress": "a faster clock (compress)",
    "thin": "fewer users (thin)",
}


def page() -> None:
    session = open_session()
    asked = session.asked()
    for name, value in asked.items():  # a page's inputs are forgotten when another is opened
        if name != "gpus" and f"ask_{name}" not in st.session_state:
            st.session_state[f"ask_{name}"] = value
    st.title("Plan a fleet")
    st.write("The cheapest GPUs that keep a promise on your traffic, simulated and proved.")
    left, right = st.columns([5, 7], gap="large")
    with left:
        wants_plan = st.button("Plan", type="primary", width="stretch", key="make_plan")
        st.caption(
            "Change below what you like, then press Plan. On a phone, the [answer](#answer) follows it."
        )
        asked = _inputs(session, asked)
        session.keep(asked)
    with right:
        st.header("Answer", anchor="answer")
        if wants_plan:
            _start(session, asked)
        _answer(session)
        _traffic(session, asked)


def _inputs(session: Session, asked: Asked) -> Asked:
    found: Asked = {}
    st.header("Traffic")
    found["trace"] = _choose_trace(session)
    found["rate"] = st.number_input(
        "Rate [requests/s]; empty: as in the trace", min_value=0.001, value=None, step=1.0,
        format="%g", key="ask_rate", help="The trace is rescaled to this rate.",
    )  # fmt: skip
    found["scale"] = st.selectbox(
        "Rescale by", get_args(Scale), format_func=SCALES.__getitem__, key="ask_scale"
    )
    found["window"] = st.selectbox(
        "Part of the trace", question.WINDOWS, key="ask_window", accept_new_options=True,
        help="Or type another, such as: busiest 30 min",
    )  # fmt: skip
    st.header("LLM and GPUs")
    found["llm"] = st.selectbox("LLM", list(session.catalog.llms), key="ask_llm")
    found["gpus"] = _choose_gpus(session, asked)
    st.header("Promise")
    found |= _choose_promise(session)
    with st.expander("Goal and limits"):
        found |= _choose_goal()
    return found


def _choose_trace(session: Session) -> str:
    uploaded = st.file_uploader(
        "Upload a trace (CSV or JSONL, plain or .gz)", key="upload", max_upload_size=MOST_UPLOAD_MB,
        help="Azure, BurstGPT, Mooncake, Qwen-Bailian, RAGPulse and Vidur are known by their columns; so is "
        "a table of timestamp, input_tokens, output_tokens.",
    )  # fmt: skip
    if uploaded is not None and st.session_state.get("uploaded") != uploaded.file_id:
        st.session_state.uploaded = uploaded.file_id
        st.session_state.ask_trace = session.store.add_trace(session.id, uploaded.name, uploaded.getvalue())
    known = session.store.traces(session.id)
    if st.session_state.ask_trace not in known:
        st.session_state.ask_trace = known[0]
    chosen: str = st.selectbox(
        "Trace", known, key="ask_trace", format_func=lambda reference: reference.partition("/")[2]
    )
    return chosen


def _choose_gpus(session: Session, asked: Asked) -> list[dict[str, Any]]:
    """The table of GPUs; its base stays the same while the page is open, as its edits are kept apart."""
    if "gpus_base" not in st.session_state or "gpus_table" not in st.session_state:
        st.session_state.gpus_base = asked["gpus"]
    table = pd.DataFrame(st.session_state.gpus_base)
    table["stock"] = table["stock"].astype("Int64")
    table["memory"] = [session.catalog.gpus[name].memory_bytes / 1e9 for name in table["GPU"]]
    edited = st.data_editor(
        table, key="gpus_table", hide_index=True, disabled=["GPU", "memory"],
        column_order=["use", "GPU", "memory", "USD/h", "stock"],
        column_config={
            "use": st.column_config.CheckboxColumn("use", width="small"),
            "memory": st.column_config.NumberColumn("GB", format="%.0f", width="small"),
            "USD/h": st.column_config.NumberColumn("USD/h", min_value=0.0, format="%.2f", required=True),
            "stock": st.column_config.NumberColumn("stock", min_value=0, step=1, help="empty: any number"),
        },
        placeholder="any",
        alt="GPUs that may be used, with their prices and how many there are",
    )  # fmt: skip
    st.caption("Prices are per GPU and hour, on demand; empty stock: as many as it takes.")
    rows = edited[["use", "GPU", "USD/h", "stock"]].astype({"stock": object}).to_dict("records")
    return [{str(key): None if pd.isna(value) else value for key, value in row.items()} for row in rows]


def _choose_promise(session: Session) -> Asked:
    presets = [question.OWN_LIMITS, *session.catalog.slos]

    def take_preset() -> None:
        preset = session.catalog.slos.get(st.session_state.ask_preset)
        for name, value in (question.of_preset(preset) or {} if preset else {}).items():
            st.session_state[f"ask_{name}"] = value

    def own_limits() -> None:
        st.session_state.ask_preset = question.OWN_LIMITS

    found: Asked = {
        "preset": st.selectbox("Preset of a paper", presets, key="ask_preset", on_change=take_preset)
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
            f"{question.WHAT[metric]} at most [ms]", min_value=0.001, value=None, step=10.0, format="%g",
            on_change=own_limits, key=f"ask_{metric}_ms", placeholder="not promised", disabled=is_relative,
        )  # fmt: skip
        found[f"{metric}_percentile"] = share.selectbox(
            f"{metric.upper()} percentile", question.PERCENTILES, key=f"ask_{metric}_percentile",
            on_change=own_limits, disabled=is_relative,
        )  # fmt: skip
    found["attainment"] = st.number_input(
        "Requests that keep all limits at once, at least [%]", min_value=0.1, max_value=100.0,
        value=None, step=1.0, format="%g", key="ask_attainment", placeholder="not promised",
        disabled=is_relative, on_change=own_limits,
    )  # fmt: skip
    return found


def _choose_goal() -> Asked:
    known = [objective for objective in get_args(Objective) if objective in OBJECTIVES]
    found: Asked = {
        "objective": st.selectbox("Look for", known, format_func=OBJECTIVES.__getitem__, key="ask_objective"),
    }
    empty: dict[str, Any] = {"min_value": 0.001, "value": None, "placeholder": "no limit", "format": "%g"}
    found["cost"] = st.number_input("Cost at most [USD/h]", key="ask_cost", step=10.0, **empty)
    found["power_kw"] = st.number_input("Power at most [kW]", key="ask_power_kw", step=1.0, **empty)
    found["gpu_limit"] = st.number_input(
        "GPUs at most", min_value=1, value=None, step=1, key="ask_gpu_limit", placeholder="no limit"
    )
    found["spare"] = st.number_input(
        "Workers that may fail", min_value=0, step=1, key="ask_spare",
        help="The promise holds after losing so many workers of any one pool.",
    )  # fmt: skip
    found["bandwidth"] = st.number_input(
        "Network between workers [GB/s]", min_value=0.001, format="%g", key="ask_bandwidth"
    )
    found["host_overhead"] = st.number_input(
        "Host overhead per engine step [ms]",
        min_value=0.0,
        step=0.5,
        format="%g",
        key="ask_host_overhead",
    )
    found["seed"] = st.number_input("Seed", min_value=0, step=1, key="ask_seed")
    found["time_limit"] = st.number_input("Time limit [s]", min_value=1, step=10, key="ask_time_limit")
    return found


def _start(session: Session, asked: Asked) -> None:
    try:
        request = session.plan_request(asked)
        parse_task(request["question"], session.catalog)  # a wrong input is told at once
    except PlannerError as error:
        session.jobs.forget(session.id, "plan")
        draw.error(error)
        return
    store, owner = session.store, session.id

    def keep(job: Job) -> None:
        document = store.document(job.key) or {}
        store.add_plan(owner, f"{asked['llm']}, {document['cost_usd_per_h']:.2f} USD/h", asked, job.key)

    session.jobs.start(owner, "plan", "plan", request, keep)


def _answer(session: Session) -> None:
    job = session.jobs.of(session.id, "plan")
    if job is not None and job.state != "done":
        follow(session, "plan")
    shown = session.plan_shown()
    if shown is None:
        if job is None:
            st.info(
                "None yet. The inputs are those of a sample: press Plan to see what an answer looks like."
            )
        return
    if job is not None and job.state != "done":
        st.caption("The last plan of this session:")
    saved, document = shown
    draw.plan(document)
    draw.plan_tabs(
        document, session.store, saved.result, question.command(saved.asked, session.catalog_folder)
    )


def _traffic(session: Session, asked: Asked) -> None:
    st.header("The traffic")
    request = session.request(asked)
    found = short_job(session, "trace", "trace", request, "Reading the trace")
    if found is None:
        return
    told = f"{found['requests']:,} requests in {found['duration_s']:,.0f} s"
    told += f", {found['rate_rps']:.3g} requests/s" if found["rate_rps"] else ""
    st.write(f"**{draw.escaped(found['name'])}**: {told}")
    draw.pictures(found["charts"])
    lengths = [
        (name, *(f"{found[key][column]:,.0f}" for column in ("mean", "p50", "p90", "p99", "max")))
        for name, key in (("prompt tokens", "input_tokens"), ("answer tokens", "output_tokens"))
    ]
    draw.table(("length", "mean", "p50", "p90", "p99", "longest"), lengths)
    if found["prefixes"]:
        spared = 100 * found["prefixes"]["token_hit_frac"]
        st.write(f"Prompts share prefixes: an endless cache would spare {spared:.1f} % of the prompt tokens.")
    if found["tenant_rows"]:
        rows = [(row["tenant"], f"{row['requests']:,}", f"{100 * row['share of tokens']:.1f} %")
                for row in found["tenant_rows"]]  # fmt: skip
        draw.table(("tenant", "requests", "share of tokens"), rows)
    dropped = [f"{count:,} rows left out: {reason}" for reason, count in found["dropped"].items() if count]
    draw.bullets([*(dropped or ["No row was left out"]), *found["notes"]])


page()
