"""Schedule: workers per window, reserved, on demand and spot, for demand that changes over the day."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from planner.errors import PlannerError
from planner.units import quantity
from ui import draw
from ui.session import Session, follow, open_session
from ui.store import Document

ONE_TRACE, TABLE, CSV = "a trace", "the table below", "a CSV file"
HOURS = 24
TROUGH = 0.3  # of the peak, in the table one starts from


def page() -> None:
    session = open_session()
    st.title("Schedule")
    st.write("Which workers to reserve, and which to start and stop over the day, at the lowest cost.")
    shown = session.plan_shown()
    start = _of_plan(session, shown[1]) if shown else None
    if start is None:
        st.caption("Made-up figures to start from; with a plan of mixed workers this table starts from it.")
        start = {"llm": "llama-3.1-70b", "worker": "h100-80g tp4", "gpu": "h100-80g", "gpus": 4, "rate": 10.0,
                 "power": 2800.0, "price": 2.99}  # fmt: skip
    else:
        st.caption(
            f"Starts from the plan: its traffic over its workers is {start['rate']:g} requests/s each."
        )
    market = _market(start)
    request = _demand(session, start)
    if st.button("Schedule", type="primary", key="schedule_start"):
        try:
            window_s = quantity(st.session_state.schedule_window, "s", where="window")
            job = {
                "market": market,
                "window_s": window_s,
                "llm": start["llm"],
                "time_limit_s": 60.0,
                **request,
            }
            session.jobs.start(session.id, "schedule", "schedule", job)
        except PlannerError as error:
            draw.error(error)
    found = follow(session, "schedule")
    if found is not None:
        _result(session, found)


def _of_plan(session: Session, document: Document) -> dict[str, Any] | None:
    """A worker of the plan and what it carries; None unless the plan has one pool, of mixed workers."""
    pools = document["workers"]
    if len(pools) != 1:
        return None
    (pool,) = pools
    gpu, gpus = session.catalog.gpu(pool["gpu"]), pool["tp"] * pool.get("pp", 1)
    return {
        "llm": document["llm"], "worker": f"{gpu.name} tp{pool['tp']}", "gpu": gpu.name, "gpus": gpus,
        "rate": float(f"{document['rate_rps'] / pool['count']:.4g}"), "power": gpus * gpu.power_w,
        "price": document["cost_usd_per_h"] / document["gpus"],
    }  # fmt: skip


def _market(start: dict[str, Any]) -> dict[str, Any]:
    """schedule.yaml from two tables."""
    st.header("Prices and workers")
    money: dict[str, Any] = {"min_value": 0.0, "format": "%.2f"}
    prices = st.data_editor(
        pd.DataFrame([{"GPU": start["gpu"], "on demand": start["price"], "reserved": None, "spot": None,
                       "interruptions/h": 0.0, "stock": None}]).astype(
            {"reserved": float, "spot": float, "stock": "Int64"}),
        num_rows="dynamic", hide_index=True, key=f"prices_{start['gpu']}_{start['price']}",
        column_config={
            "on demand": st.column_config.NumberColumn("on demand [USD/h]", **money),
            "reserved": st.column_config.NumberColumn("reserved [USD/h]", **money),
            "spot": st.column_config.NumberColumn("spot [USD/h]", **money),
        },
        placeholder="-", alt="Prices of a GPU per hour; empty: not sold that way",
    )  # fmt: skip
    st.caption("Prices per GPU and hour; empty: not sold that way, or no limit to the stock.")
    workers = st.data_editor(
        pd.DataFrame([{key: start[key] for key in ("llm", "worker", "gpu", "gpus", "rate", "power")}]),
        num_rows="dynamic", hide_index=True, key=f"workers_{start['worker']}_{start['rate']}",
        column_config={
            "rate": st.column_config.NumberColumn("rate [requests/s]", min_value=0.0),
            "power": st.column_config.NumberColumn("power [W]", min_value=0.0),
        },
        alt="Worker types: their LLM, their GPUs and the rate that one sustains within the promise",
    )  # fmt: skip
    spot = st.number_input(
        "Most of the rate that spot may carry [%]", 0.0, 100.0, 0.0, step=5.0, key="schedule_spot"
    )
    gpus = {str(row["GPU"]): _offer(row) for row in _rows(prices) if "GPU" in row}
    capacity = [
        row | {"rate": f"{row.get('rate', 0):g} req/s", "power": f"{row.get('power', 0):g} W"}
        for row in _rows(workers)
    ]
    return {"gpus": gpus, "capacity": capacity} | ({"spot": spot / 100} if spot else {})


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The lines of an edited table without their empty cells."""
    rows = table.astype(object).to_dict("records")
    return [{str(key): value for key, value in row.items() if not pd.isna(value)} for row in rows]


def _offer(row: dict[str, Any]) -> dict[str, Any]:
    offer: dict[str, Any] = {
        name.replace(" ", "_"): f"{row[name]:g} usd/h"
        for name in ("on demand", "reserved", "spot")
        if name in row
    }
    if row.get("interruptions/h"):
        offer["interruptions"] = row["interruptions/h"]
    return offer | ({"stock": int(row["stock"])} if "stock" in row else {})


def _demand(session: Session, start: dict[str, Any]) -> dict[str, Any]:
    """The part of a job that says what is demanded."""
    st.header("Demand")
    source = st.radio("Demand from", (TABLE, ONE_TRACE, CSV), horizontal=True, key="schedule_source")
    st.text_input("Length of a window", "1 h", key="schedule_window", help="For instance 1 h or 10 min.")
    if source == ONE_TRACE:
        chosen = st.selectbox(
            "Trace",
            session.store.traces(session.id),
            format_func=lambda t: t.partition("/")[2],
            key="schedule_trace",
        )
        return {"trace": str(session.store.trace_path(chosen))}
    if source == CSV:
        uploaded = st.file_uploader(
            "A row per window, a column of requests/s per LLM", "csv", key="schedule_csv"
        )
        text = uploaded.getvalue().decode(errors="replace") if uploaded else ""
        return {"demand": text, "demand_name": uploaded.name if uploaded else "demand.csv"}
    peak = start["rate"] * 4
    rates = [round(peak * (TROUGH if hour < 8 else 1.0 if hour < 18 else 0.6), 2) for hour in range(HOURS)]
    table = st.data_editor(
        pd.DataFrame({"window": range(HOURS), start["llm"]: rates}), num_rows="dynamic", hide_index=True,
        height=240, key=f"demand_{start['llm']}_{peak}",
        alt="Requests per second in every window, a column per LLM",
    )  # fmt: skip
    st.caption("Made up: type your own requests/s per window.")
    return {"demand": table.dropna().to_csv(index=False), "demand_name": "the table"}


def _result(session: Session, found: Document) -> None:
    st.subheader(f"{found['cost_usd_per_h']:,.2f} USD per hour on average")
    gap = f"within {100 * found['gap_frac']:.2f} % of the least possible"
    st.write(f"{'Proved' if found['status'] == 'optimal' else 'Not finished in time'}: {gap}.")
    saved = []
    for name, cost in found["compared"].items():
        what = {"peak": "a fleet for the peak, all the time", "linear rule": "a linear rule per window"}[name]
        if cost is None:
            saved.append(f"{what} exceeds a limit")
        else:
            less = 100 * (1 - found["cost_usd_per_h"] / cost)
            saved.append(f"{what} costs {cost:,.2f} USD/h; the schedule saves {less:.1f} %")
    draw.bullets(saved)
    draw.pictures(found["charts"])
    rows = [
        (gpu, str(count), str(max(found["on_demand_gpus"][gpu])))
        for gpu, count in found["reserved_gpus"].items()
    ]
    draw.table(("GPU", "reserved", "on demand, at most"), rows)
    if (job := session.jobs.of(session.id, "schedule")) is not None:
        draw.downloads(session.store, job.key, ("schedule.csv", "schedule.yaml"))


page()
