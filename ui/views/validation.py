"""The page Validation: how far a plan's prediction was from what engines measured that ran it.

Streamlit runs this file from top to bottom whenever an input changes.
"""

from __future__ import annotations

from typing import Any

import streamlit as st

from planner.errors import InputError, PlannerError
from planner.files.checked_files import read_json
from planner.reports import charts
from planner.reports.drawing import live_spec
from planner.units import show_error, show_s, show_share
from ui import draw
from ui.session import open_session
from ui.store import Document, read_as

# Keys that every validation.json has.
NEEDED = ("verdict", "errors", "requests", "finished", "attainment", "slo", "steps", "machine")


def page() -> None:
    """The page Validation, which shows an uploaded validation.json."""
    open_session()
    st.title("Validation", anchor=False)
    st.write("Run the plan on real engines with `plan validate out/ -o validated/`, then open what it wrote.")
    uploaded = st.file_uploader("validation.json", "json", key="validation")
    if uploaded is not None:
        try:
            st.session_state.validation_shown = _read_validation(uploaded.name, uploaded.getvalue())
        except PlannerError as error:
            st.session_state.pop("validation_shown", None)
            draw.draw_error(error)
    document = st.session_state.get("validation_shown")
    if document is None:
        st.info("Upload the validation.json of a run. Its report.html opens in any browser by itself.")
        return
    _draw_validation(document)
    st.page_link("views/watch.py", label="Watch: live metrics held against the plan, once it serves")


def _read_validation(name: str, content: bytes) -> Document:
    """The document of an uploaded file `name`. Raises InputError if it is no validation.json."""
    document = read_as(name, content, read_json)
    if missing := [key for key in NEEDED if key not in document]:
        raise InputError(f"{name}: has no {missing[0]!r}; expected the validation.json of `plan validate`")
    return document


def _draw_validation(document: Document) -> None:
    """Draw what a validation.json says: verdict, errors of the prediction, the SLO, steps of the engines."""
    st.header("Verdict")
    is_kept = document.get("slo_kept_by_client")
    if is_kept is None:  # Files of earlier versions judge only the times that the engines logged.
        is_kept = document.get("slo_kept")
    st.subheader(_headline(document.get("agrees"), is_kept))
    st.write(draw.escape_markdown(document["verdict"]))
    for note in document.get("notes", []):
        st.write(draw.escape_markdown(note))
    cells = [
        ("Requests", f"{document['requests']:,}", f"{document['finished']:,} finished"),
        (
            "Attainment",
            _percent_text(document["attainment"]["measured"]),
            f"predicted {_percent_text(document['attainment']['predicted'])}",
        ),
    ]
    draw.draw_figures(cells)
    device, timed_by = document["machine"].get("device", "?"), document.get("times", "?")
    st.caption(draw.escape_markdown(f"Measured on {device}, times of the {timed_by}."))
    st.header("Predicted and measured")
    rows = [
        (
            f"{row['metric']} {row['percentile']}",
            show_s(row["predicted_s"]),
            show_s(row["measured_s"]),
            show_error(row["error_frac"], row["tolerance_frac"]),
            _percent_text(row["tolerance_frac"]),
        )
        for row in document["errors"]
        if row["measured_s"] is not None and row["predicted_s"] is not None
    ]
    draw.draw_table(("latency", "predicted", "measured", "error", "allowed"), rows)
    st.caption(draw.LATENCIES)
    errors = {
        f"{row['metric']} {row['percentile']}": 100 * abs(row["error_frac"])
        for row in document["errors"]
        if row["error_frac"] is not None
    }
    if errors:
        bars = charts.bars_chart(
            [charts.Bar(name, value) for name, value in errors.items()], "error, either way [%]"
        )
        draw.draw_chart(
            {
                "spec": live_spec(bars),
                "caption": "Error of each percentile: predicted over measured, minus one.",
            }
        )
    if document["slo"]:
        st.header("The SLO")
        lines = [
            (
                row["limit"],
                show_s(row["limit_s"]),
                _percent_text(row["predicted_kept_frac"]),
                _percent_text(row["measured_kept_frac"]),
                draw.kept_word(
                    {"holds": row["measured_holds"], "is_judged": row.get("measured_judged", True)}
                ),
            )
            for row in document["slo"]
        ]
        draw.draw_table(
            ("metric", "limit", "predicted within limit", "measured within limit", "measured"), lines
        )
    if document["steps"]:
        st.header("Steps of the engines")
        steps = [
            (row["pool"], f"{row['steps']:,}", show_error(row["bias_frac"], None))
            for row in document["steps"]
        ]
        draw.draw_table(("pool", "steps", "predicted over measured seconds, minus one"), steps)


def _headline(agrees: bool | None, is_kept: bool | None) -> str:
    """A sentence on whether the SLO was kept and the prediction was near enough. None: it was not judged."""
    if is_kept is None:
        verdict = "No SLO was judged"
    else:
        verdict = "The SLO was " + ("kept" if is_kept else "MISSED")
    if agrees is None:
        return f"{verdict}."
    agreement = "as near the measurement as is wanted" if agrees else "further off than is allowed"
    return f"{verdict}; the prediction is {agreement}."


def _percent_text(frac: Any) -> str:
    """A share in percent; a dash for None."""
    return "-" if frac is None else show_share(frac)


page()
