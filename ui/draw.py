"""Tables, charts and downloads, drawn alike on every page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from planner.reports.drawing import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PAPER, PURPLE, SOFT, VERMILLION
from ui.store import Document, Store, error_line, pack

FIGURE_PIXELS = 150
AXES_PIXELS = 60
_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")
# on a dark page, by what the planner draws for a light one; the report's own dark colours
DARK = {
    BLUE: "#56b4e9", VERMILLION: "#f0883e", GREEN: "#3fc79a", PURPLE: "#e08fd0",
    ORANGE: "#e6b84f", INK: "#e6eaf0", MUTED: "#98a4b3", SOFT: "#66727f", GRID: "#323b47",
    PAPER: "#0e1117",
}  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table of text as HTML, which reads well aloud and scrolls where it is too wide."""
    columns = [escaped(name) or " " for name in head]
    cells = [[escaped(str(cell)) for cell in row] for row in rows]
    st.table(pd.DataFrame(cells, columns=columns), hide_index=True)


def chart(picture: Mapping[str, Any]) -> None:
    """A chart of the planner that answers to the pointer, with its caption, also read aloud."""
    text = json.dumps(picture["spec"])
    if st.context.theme.type == "dark":
        for light, dark in DARK.items():
            text = text.replace(light, dark)
    spec = json.loads(text)
    spec["config"]["mark"] = {"tooltip": True}
    del spec["padding"]  # Streamlit has its own
    height = spec["height"] + AXES_PIXELS  # Streamlit counts the axes in
    st.vega_lite_chart(spec=spec, theme=None, width="stretch", height=height, alt=picture["caption"])
    st.caption(picture["caption"])


def pictures(found: Sequence[Mapping[str, Any]]) -> None:
    """Charts two by two; one below the other on a narrow screen."""
    for first in range(0, len(found), 2):
        for column, picture in zip(st.columns(2), found[first : first + 2], strict=False):
            with column:
                chart(picture)


def tenants(found: Iterable[Document]) -> None:
    """Who sends how much of a trace."""
    rows = [(row["tenant"], f"{row['requests']:,}", f"{100 * row['share of tokens']:.1f} %") for row in found]
    if rows:
        table(("tenant", "requests", "share of tokens"), rows)


def bullets(lines: Iterable[str]) -> None:
    st.markdown("\n".join(f"- {escaped(line)}" for line in lines))


def escaped(text: str) -> str:
    """Text as Markdown shows it unchanged."""
    return _PUNCTUATION.sub(r"\\\g<0>", text)


def error(found: Exception | str) -> None:
    """What the command says on its one line."""
    st.error(escaped(found if isinstance(found, str) else error_line(found)))


def plan(document: Document) -> None:
    """The answer in a sentence, and its figures."""
    st.subheader(escaped(document["answer"]))
    st.write(escaped(document["promise"]))
    for warning in document["warnings"]:
        st.warning(f"Mind: {escaped(warning)}.")
    figures(document["headline"])


def figures(cells: Iterable[tuple[str, str, str]]) -> None:
    """Name, value and note side by side, as many as fit."""
    with st.container(horizontal=True):
        for name, value, note in cells:
            with st.container(width=FIGURE_PIXELS):
                st.metric(name, value)
                st.caption(escaped(note))


def plan_tabs(document: Document, store: Store, key: str, command: str) -> None:
    """All that is known of a plan, by topic."""
    tables = document["tables"]
    names = ("Fleet", "Promise", "How it runs", "What binds", "Alternatives", "Proof", "Downloads")
    fleet, promise, runs, binds, others, proof, downloads = st.tabs(names)
    with fleet:
        table(*tables["fleet"])
        st.caption(escaped(document["workers_line"]))
        _power(document)
    with promise:
        table(*tables["slo"])
        st.caption(escaped(document["measured_line"]))
        table(*tables["percentiles"])
    with runs:
        pictures(document["charts"])
    with binds:
        bullets(document["certificate"]["binding"] or ["No single limit binds."])
        st.page_link("views/what_if.py", label="What relaxing each limit would save")
        if tables["neighbours"][1]:
            st.markdown("**One worker fewer**")
            table(*tables["neighbours"])
    with others:
        pictures(document["alternatives_charts"])
        table(*tables["alternatives"])
    with proof:
        bullets(document["proof"])
        st.markdown("**Assuming**")
        bullets(document["certificate"]["assumptions"])
        st.caption(escaped(f"Prices: {document['prices']}"))
    with downloads:
        plan_downloads(store, key, command)


def _power(document: Document) -> None:
    power = document["power"]
    if power is None:
        return
    st.write(
        f"Power: {power['provisioned_w'] / 1e3:,.1f} kW provisioned, "
        f"{power['expected_w'] / 1e3:,.1f} kW expected, of which "
        f"{power['expected_idle_w'] / 1e3:,.1f} kW at rest. GPUs only."
    )


def plan_downloads(store: Store, key: str, text: str) -> None:
    """The files of a plan, packed when asked for, and the command that makes them again."""
    script = f"{text}\n".encode()
    downloads(store, key, ("plan.yaml", "report.html", "slo.yaml", "certificate.json"))
    with st.container(horizontal=True):
        _download("plan.sh", lambda: script, key)
        _download("manifests.zip", lambda: pack(store.files(key, "manifests/")), key)
        _download("everything.zip", lambda: pack(store.files(key) | {"plan.sh": script}), key)
    command(text, "slo.yaml and the trace")


def command(text: str, beside: str) -> None:
    """What does the same on a command line, to be copied."""
    st.write(f"The same on a command line, beside {beside}:")
    st.code(text, language=None, wrap_lines=True)


def downloads(store: Store, key: str, names: Iterable[str]) -> None:
    """One button per file of a result."""
    with st.container(horizontal=True):
        for name in names:
            _download(name, partial(_file, store, key, name), key)


def _file(store: Store, key: str, name: str) -> bytes:
    return store.files(key, name)[name]


def _download(name: str, content: Callable[[], bytes], key: str) -> None:
    st.download_button(f"Download {name}", content, name, key=f"{name}_{key}", on_click="ignore")
