"""Schedule: workers per window, reserved, on demand and spot, for demand that changes over the day."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import streamlit as st

from planner.documents import planned_market
from planner.documents.markets import LEAST_RATE_RPS, MOST_INTERRUPTIONS_PER_H, parse_market
from planner.documents.task import PlanQuestion, parse_task
from planner.errors import InputError, PlannerError
from planner.files.checked_files import read_yaml, to_yaml
from planner.files.document_values import read_share
from planner.units import parse_quantity
from ui import draw, market, question
from ui.session import BrowserSession, follow_job, open_session
from ui.store import Document, read_as

PAGE = "schedule"
TABLE, TRACES, CSV = "the rows below", "traces", "a CSV file"


def page() -> None:
    """The page Schedule."""
    session = open_session()
    st.title("Schedule", anchor=False)
    st.write("Which workers to reserve, and which to start and stop over the day, at the lowest cost.")
    st.page_link("views/day.py", label="Day: the plan's fleet simulated over a day, under controllers")
    saved: Document = session.store.page_document(session.id, PAGE) or {}
    form = _market_inputs(_market_to_edit(session, saved))
    demand, window = _demand_inputs(session, form, saved)
    typed = demand.get("demand") if demand.get("is_typed") else None
    session.store.keep_page_document(session.id, PAGE, {"market": form, "demand": typed, "window": window})
    options = _search_inputs()
    _schedule_file_input(form)
    if st.button("Schedule", type="primary", key="schedule_start"):
        try:
            window_s = parse_quantity(window, "s", where="window")
            if window_s < 1:
                raise InputError(f"window: expected at least 1 s, found {window!r}")
            job = {"market": form, "window_s": window_s, **options, **demand}
            session.jobs.start(session.id, PAGE, "schedule", job)
            st.session_state.schedule_command = market.command(demand, window, options)
        except PlannerError as error:
            draw.draw_error(error)
    if (answer := follow_job(session, PAGE)) is not None:
        _draw_answer(session, answer)


def _market_to_edit(session: BrowserSession, saved: Document) -> Document:
    """The schedule.yaml that the inputs begin with: as the user left this page, else that of the chosen
    plans. Edits change the values of the inputs, and not this schedule.yaml.
    """
    plans = {plan.id: plan for plan in session.store.plans(session.id)}

    def take_plans() -> None:
        st.session_state.schedule_base = _market_of_plans(session, st.session_state.schedule_plans)

    if "schedule_base" not in st.session_state:
        shown = session.plan_shown()
        st.session_state.schedule_plans = [shown[0].id] if shown and not saved else []
        st.session_state.schedule_base = saved.get("market") or _market_of_plans(
            session, st.session_state.schedule_plans
        )
    if plans:
        st.multiselect(
            "Begin with the workers of plans",
            list(plans),
            key="schedule_plans",
            on_change=take_plans,
            format_func=lambda plan: f"{plans[plan].name} ({plans[plan].made} UTC)",
            help="A fleet of several pools counts as one kind of worker, with all its GPUs.",
        )
    base: Document = st.session_state.schedule_base
    if base == market.EXAMPLE_MARKET:
        st.caption("Made-up figures to start from; with a plan, begin with its workers.")
    return base


def _market_of_plans(session: BrowserSession, plan_ids: Sequence[str]) -> Document:
    """The schedule.yaml of some plans: their workers and rates, their stock and limits. Without a plan it is
    an example with made-up figures.
    """
    planned: list[tuple[Document, PlanQuestion]] = []
    for plan_id in plan_ids:
        saved = session.store.plan(plan_id)
        document = session.store.document(saved.result) if saved else None
        if saved is None or document is None:
            continue
        inputs = question.restore_form(saved.form, session.catalog)
        try:
            task = parse_task(question.document(inputs, session.catalog), session.catalog)
        except PlannerError as error:
            draw.draw_error(error)
            continue
        # As it was asked for, if it was; answers of earlier versions have the drawn rate alone.
        rate_rps = document.get("requested_rps") or document["rate_rps"]
        planned.append((document | {"rate_rps": rate_rps}, task))
    return planned_market.schedule_document(planned, session.catalog) if planned else market.EXAMPLE_MARKET


def _market_inputs(base: Document) -> Document:
    """Draw the inputs for every GPU and every kind of worker; returns the schedule.yaml that they make."""
    st.header("Prices and workers")
    # Streamlit keeps an input's value by the input's key, so with another base all inputs begin anew.
    key = hashlib.sha256(json.dumps(base).encode()).hexdigest()
    gpus = {name: _offer_inputs(name, row, key) for name, row in base["gpus"].items()}
    st.caption("Prices per GPU and hour; empty: not sold that way, or no limit to the stock.")
    capacity = [_worker_inputs(row, f"{k}_{key}") for k, row in enumerate(base["capacity"])]
    st.caption(
        "What one worker sustains within the SLO is here a plan's traffic over its workers (or over the "
        "equal parts of its pools). A part alone was not simulated and may sustain less, as bursts weigh "
        "more on few workers: measure it with plan goodput. A start takes 5 min where it is empty. More GPUs "
        "and workers: in the text below."
    )
    spot, power, cost = st.columns(3, vertical_alignment="bottom")
    limits = base.get("limits") or {}
    spot_percent = spot.number_input(
        "Of an LLM's rate at most on spot [%]",
        0.0,
        100.0,
        round(100 * read_share(base.get("spot", 0.0), "spot"), 12),
        step=5.0,
        format="%g",
        key=f"spot_{key}",
    )
    optional: dict[str, Any] = {"min_value": 0.001, "placeholder": "no limit", "format": "%g"}
    power_w = market.number(limits.get("power"), "w")
    most_kw = power.number_input(
        "Power at most [kW]", value=power_w / 1e3 if power_w else None, key=f"power_{key}", **optional
    )
    most_usd = cost.number_input(
        "Cost at most [USD/h]",
        value=market.number(limits.get("cost"), "usd_per_h"),
        key=f"cost_{key}",
        **optional,
    )
    form: Document = {"gpus": gpus, "capacity": capacity}
    if spot_percent:
        form["spot"] = round(spot_percent / 100, 12)  # Without the rounding error of the division.
    bounds = {"power": f"{most_kw:.12g} kW"} if most_kw else {}
    bounds |= {"cost": f"{most_usd:.12g} usd/h"} if most_usd else {}
    form |= {"limits": bounds} if bounds else {}
    return form | ({"slo": base["slo"]} if base.get("slo") else {})  # For the files; no input shows it.


def _offer_inputs(name: str, row: Document, key: str) -> Document:
    """The prices and the stock of a GPU in the format of schedule.yaml."""
    offer = dict(row)
    with st.container(border=True):
        st.markdown(f"**{draw.escape_markdown(name)}**")
        # Two more columns: interruptions and stock.
        fields = st.columns(len(market.PRICES) + 2, vertical_alignment="bottom")
        for field, (price, label) in zip(fields, market.PRICES.items(), strict=False):
            value = field.number_input(
                label,
                min_value=0.0,
                value=market.number(row.get(price), "usd_per_h"),
                format="%.2f",
                placeholder="not sold so",
                key=f"offer_{price}_{name}_{key}",
            )
            offer[price] = None if value is None else f"{value:.12g} usd/h"
        most_per_h, per_h = MOST_INTERRUPTIONS_PER_H, row.get("interruptions")
        offer["interruptions"] = fields[-2].number_input(
            market.INTERRUPTIONS,
            min_value=0.0,
            value=None
            if per_h is None
            else read_share(per_h, "interruptions", most=most_per_h, bare=most_per_h),
            placeholder="none",
            format="%g",
            key=f"offer_interruptions_{name}_{key}",
        )
        offer["stock"] = fields[-1].number_input(
            "Stock",
            min_value=0,
            value=row.get("stock"),
            step=1,
            placeholder="any number",
            key=f"offer_stock_{name}_{key}",
        )
    return {field: value for field, value in offer.items() if value is not None}


def _worker_inputs(row: Document, key: str) -> Document:
    """A kind of worker in the format of schedule.yaml."""
    with st.container(border=True):
        llm_field, worker_field = st.columns(2)
        worker: Document = {
            "llm": llm_field.text_input("LLM", row.get("llm", ""), key=f"worker_llm_{key}"),
            "worker": worker_field.text_input("Worker", row.get("worker", ""), key=f"worker_name_{key}"),
        }
        gpus_field, *fields = st.columns([2, *(1 for _ in market.QUANTITIES)], vertical_alignment="bottom")
        text = gpus_field.text_input(
            "GPUs of one worker",
            market.gpus_text(row),
            key=f"worker_on_{key}",
            help="As 4 × h100-80g, or 8 × h100-80g + 4 × a100-80g.",
        )
        worker |= market.parse_gpus(text)
        for field, (name, (label, unit, shown_unit)) in zip(fields, market.QUANTITIES.items(), strict=True):
            factor = 60 if name == "start" else 1  # Starts are shown in minutes.
            value = market.number(row.get(name), unit)
            value = field.number_input(
                label,
                min_value=0.0,
                value=None if value is None else value / factor,
                placeholder="as usual" if name == "start" else "none",
                format="%g",
                key=f"worker_{name}_{key}",
            )
            if value is not None:
                worker[name] = f"{value:.12g} {shown_unit}"
    return worker | ({"fleet": row["fleet"]} if "fleet" in row else {})


def _demand_inputs(session: BrowserSession, form: Document, saved: Document) -> tuple[Document, str]:
    """The part of a job that says what is demanded, and the length of a window."""
    st.header("Demand")
    source = st.radio("Demand from", (TABLE, TRACES, CSV), horizontal=True, key="schedule_source")
    window = st.text_input(
        "Length of a window", saved.get("window", "1 h"), key="schedule_window", help="As 1 h, or 10 min."
    )
    llms = market.llms(form["capacity"])
    if source == TRACES:
        trace_ids = session.store.traces(session.id)
        chosen = {
            llm: st.selectbox(
                f"Trace of {llm}",
                trace_ids,
                format_func=lambda trace: trace.partition("/")[2],
                key=f"schedule_trace_{llm}",
            )
            for llm in llms
        }
        return {
            "traces": {llm: str(session.store.trace_path(trace)) for llm, trace in chosen.items()}
        }, window
    if source == CSV:
        uploaded = st.file_uploader(
            "A row per window, a column of requests/s per LLM", "csv", key="schedule_csv"
        )
        text = uploaded.getvalue().decode(errors="replace") if uploaded else ""
        return {"demand": text, "demand_name": uploaded.name if uploaded else "demand.csv"}, window
    _demand_shape_inputs(form, llms)
    if "schedule_demand" not in st.session_state or st.session_state.schedule_demand[0] != llms:
        text = saved.get("demand") or ""
        if text.partition("\n")[0].split(",")[1:] != llms:  # The header has the window and the LLMs.
            text = market.demand_csv(market.example_demand(form))
        st.session_state.schedule_demand = (llms, text)
    text = st.session_state.schedule_demand[1]
    typed = st.text_area(
        "Requests/s in every window: a row each, a column per LLM",
        text,
        height=240,
        key=f"demand_{hashlib.sha256(text.encode()).hexdigest()}",
        help="Made up by the shape above, typed, or pasted from a spreadsheet saved as CSV.",
    )
    return {"demand": typed or "", "demand_name": "demand.csv", "is_typed": True}, window


def _demand_shape_inputs(form: Document, llms: Sequence[str]) -> None:
    """The inputs that shape a day or a week from a few figures instead of 168 rows."""
    with st.expander("A day or a week in a few figures"):
        span = st.segmented_control(
            "Hours of", ("a day", "a week"), default="a week", required=True, key="shape_span"
        )
        usual = market.usual_peaks(form)
        peaks = {
            llm: st.number_input(
                f"{llm}, busiest hours [requests/s]", LEAST_RATE_RPS, value=usual.get(llm, 1.0), format="%g"
            )
            for llm in llms
        }
        night, weekend = st.columns(2, vertical_alignment="bottom")
        night_frac = night.number_input("Nights [% of that]", 0.0, 100.0, 30.0, format="%g") / 100
        weekend_frac = weekend.number_input("Weekends [% of that]", 0.0, 100.0, 50.0, format="%g") / 100
        if st.button("Fill the rows", key="shape_fill"):
            days = market.WEEK_DAYS if span == "a week" else 1
            rows = market.shape_hours(peaks, days=days, night_frac=night_frac, weekend_frac=weekend_frac)
            st.session_state.schedule_demand = (llms, market.demand_csv(rows))
            st.rerun()


def _search_inputs() -> Document:
    """The inputs for the search: its gap, its time limit and the seed."""
    with st.expander("How long to search"):
        gap = st.number_input(
            "Stop this close to the least possible [%]", 0.0, 100.0, 0.5, format="%g", key="schedule_gap"
        )
        limit_s = st.number_input("Time limit [s]", 0.1, value=60.0, format="%g", key="schedule_limit")
        seed = st.number_input("Seed", 0, value=0, key="schedule_seed")
    return {"gap_frac": gap / 100, "time_limit_s": limit_s, "seed": seed}


def _schedule_file_input(form: Document) -> None:
    """Show the schedule.yaml of the inputs; what is typed there sets the inputs."""
    with st.expander("schedule.yaml: prices and workers as text"):
        text = to_yaml(form)
        key = hashlib.sha256(text.encode()).hexdigest()
        typed = st.text_area("schedule.yaml", text, height=300, key=f"yaml_{key}") or ""
        if st.button("Apply", key="apply_schedule"):
            try:
                document = read_as("schedule.yaml", typed.encode(), read_yaml)
                parse_market(document)
            except PlannerError as error:
                draw.draw_error(error)
            else:
                st.session_state.schedule_base = document
                st.rerun()


def _draw_answer(session: BrowserSession, answer: Document) -> None:
    """Draw the answer of a job "schedule" (ui/worker.py), with its files to download."""
    st.header("Answer")
    st.subheader(draw.escape_markdown(answer["answer"]))
    st.write(draw.escape_markdown(answer["proof"]))
    draw.draw_list(answer["compared_lines"])
    draw.draw_charts(answer["charts"])
    draw.draw_table(*answer["tables"]["gpus"])
    draw.draw_table(*answer["tables"]["workers"])
    st.caption(answer["firm"])
    if (job := session.jobs.find(session.id, PAGE)) is not None:
        draw.draw_downloads(session.store, job.key, session.store.files(job.key))
        if command := st.session_state.get("schedule_command"):
            draw.draw_command(command, "schedule.yaml and the demand")


page()
