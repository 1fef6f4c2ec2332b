"""Draws tables, charts, figures and downloads for all pages, so that they look alike.

A `Document` is the plain values of a saved result (store.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import streamlit as st

from planner.reports import page
from planner.reports.drawing import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PAPER, PURPLE, SOFT, VERMILLION
from planner.reports.rows import SHOWN_AS_0_FRAC, signed_verdict
from planner.units import show_percent
from ui.store import Document, Store, error_line, zip_files

FIGURE_PIXELS = 150  # The width of each figure that `draw_figures` draws.
AXES_PIXELS = 60  # What the axes and their titles add to the height of a chart.
LATENCIES = (
    "TTFT: time to first token. TBT: gap between tokens. TPOT: mean gap of a request. E2E: end-to-end time. "
    "p90: nine of ten are no slower."
)
# A cell with a figure, for instance 1,024 or "+5.98 USD/h".
_FIGURE = re.compile(r"([≥<>]? ?[-+]?[\d.,]+( [^\s\d]+)?|-|)")
# All punctuation of ASCII, any of which Markdown may read as a sign.
_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")
_CODE = re.compile(r"(`[^`\n]+`)")
# On a dark page each colour of a chart is replaced by the one that the report uses on dark screens.
DARK = {
    BLUE: "#56b4e9",
    VERMILLION: "#f0883e",
    GREEN: "#3fc79a",
    PURPLE: "#e08fd0",
    ORANGE: "#e6b84f",
    INK: "#e6eaf0",
    MUTED: "#98a4b3",
    SOFT: "#66727f",
    GRID: "#323b47",
    PAPER: "#12161c",
}


def draw_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Draw a table of text as the report has it: figures to the right, and on a phone a card per row. The
    first column names the rows, and counts as text.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(*cells, strict=True))[1:]
    figures = [k for k, column in enumerate(columns, start=1) if all(map(_FIGURE.fullmatch, column))]
    caption = ", ".join(name for name in head if name)
    st.html(page.table_html(head, cells, caption=caption, numeric=figures))


def draw_chart(picture: Mapping[str, Any]) -> None:
    """Draw a chart: `picture` has a "spec" from `drawing.live_spec`, and a "caption", which screen readers
    say too.
    """
    text = json.dumps(picture["spec"])
    if st.context.theme.type == "dark":
        for light, dark in DARK.items():
            text = text.replace(light, dark)
    spec = json.loads(text)
    del spec["padding"], spec["width"]  # Streamlit sets its own and counts the axes in.
    # Streamlit would move data from the top into a chart that Vega has drawn empty; a layer keeps its own.
    if "data" in spec:
        spec["layer"] = [{"data": spec.pop("data"), "layer": spec["layer"]}]
    spec["autosize"] = {"type": "fit", "contains": "padding"}
    height = spec["height"] + AXES_PIXELS
    st.vega_lite_chart(spec=spec, theme=None, width="stretch", height=height, alt=picture["caption"])
    st.caption(escape_markdown(picture["caption"]))


def draw_charts(pictures: Sequence[Mapping[str, Any]]) -> None:
    """Draw charts in pairs side by side; on a narrow screen one below the other."""
    for first in range(0, len(pictures), 2):
        pair = pictures[first : first + 2]
        for column, picture in zip(st.columns(len(pair)), pair, strict=True):
            with column:
                draw_chart(picture)


def draw_tenants(tenant_rows: Iterable[Document]) -> None:
    """Draw the table of tenants: the traffic that each one sends."""
    rows = [
        (row["tenant"], f"{row['requests']:,}", show_percent(row["share of tokens"])) for row in tenant_rows
    ]
    if rows:
        draw_table(("tenant", "requests", "share of tokens"), rows)


def kept_word(slo: dict[str, Any]) -> str:
    """Whether an SLO is kept, as a word with a sign. An SLO counts as judged in files of earlier versions,
    which do not say so.
    """
    return signed_verdict(slo["holds"], slo.get("is_judged", True))


def fleet_text(document: Document) -> str:
    """The fleet of a plan in words. Plans that earlier versions saved have it only in their answer, which was
    "FLEET: COST".
    """
    return str(document.get("fleet_text") or document["answer"].rpartition(": ")[0])


def step_tokens_text(document: Document) -> str:
    """The tokens per step of each pool of a plan: "1,024, 2,048"."""
    return ", ".join(f"{worker['max_num_batched_tokens']:,}" for worker in document["workers"])


def draw_list(lines: Iterable[str]) -> None:
    """Draw the lines as a list."""
    st.markdown("\n".join(f"- {escape_markdown(line)}" for line in lines))


def escape_markdown(text: str) -> str:
    """The text, escaped so that Markdown shows it as it is, and commands between backticks as code. A figure
    and its % stay on one line.
    """
    parts = _CODE.split(text)  # Plain text and code in turn, plain text first.
    plain = [_PUNCTUATION.sub(r"\\\g<0>", part.replace(" %", "\u00a0%")) for part in parts[::2]]
    return "".join(each for pair in zip_longest(plain, parts[1::2], fillvalue="") for each in pair)


def signed_percent(frac: float | None) -> str:
    """A change as text: '+12.5 %'. A change that rounds to 0.0 has no sign, and None is '-'."""
    if frac is None:
        return "-"
    return show_percent(frac, "+.1f") if abs(frac) >= SHOWN_AS_0_FRAC else "0.0 %"


def relative_change(before: float, after: float) -> str:
    """A change as `signed_percent` shows it; of nothing, as the price of owned GPUs, there is no share."""
    if before == 0:
        return signed_percent(None if after else 0.0)
    return signed_percent(after / before - 1)


def draw_error(problem: Exception | str) -> None:
    """Draw an error in the words of the command."""
    st.error(escape_markdown(problem if isinstance(problem, str) else error_line(problem)))


def draw_first_screen(document: Document, key: str = "first_screen") -> None:
    """Draw the report's first screen: what to buy, what it costs, how sure that is; and the plan's warnings.
    `draw_screen_charts` draws its charts.
    """
    if "screen" not in document:
        st.info("Kept by an earlier version, which had no such page. Plan it again to see all of it.")
        return
    with st.container(key=key):
        st.html(document["screen"]["html"])
    for warning in document["warnings"]:
        st.warning(f"Mind: {escape_markdown(warning)}.")


def draw_screen_charts(document: Document) -> None:
    """Draw the charts of the report's first screen; none for a plan that an earlier version saved."""
    draw_charts(document.get("screen", {}).get("charts", ()))


def draw_figures(cells: Iterable[tuple[str, str, str]]) -> None:
    """Draw figures, each a name, a value and a note, side by side."""
    with st.container(horizontal=True):
        for name, value, note in cells:
            with st.container(width=FIGURE_PIXELS):
                st.metric(name, value)
                st.caption(escape_markdown(note))


def draw_plan_tabs(
    document: Document, store: Store, key: str, *, command_text: str = "", folder: str = "", of_text: str = ""
) -> None:
    """Draw all that is known of a plan, by topic. `key` names its result in the store. `folder` is set for
    the plan of one LLM of several, whose files are in that folder of the result. `of_text` is a sentence on
    the question that the downloads answer.
    """
    tables = document["tables"]
    names = ("Fleet", "SLO", "How it runs", "What binds", "Alternatives", "Proof", "Downloads")
    tabs_key = f"tab_{folder.strip('/')}" if folder else "tab"
    # The address of a page with one plan says which tab is open.
    fleet, slo, runs, binds, others, proof, files = st.tabs(
        names, key=tabs_key, on_change="rerun", bind=None if folder else "query-params"
    )
    with fleet:
        draw_table(*tables["fleet"])
        st.caption(escape_markdown(document["workers_line"]))
        _draw_power(document)
    with slo:
        draw_table(*tables["slo"])
        st.caption(escape_markdown(document["measured_line"]))
        draw_table(*tables["percentiles"])
        st.caption(LATENCIES)
    with runs:
        draw_charts(document["charts"])
    with binds:
        # A plan that an earlier version made has no such lines.
        binding = document.get("binding_lines", document["certificate"]["binding"])
        draw_list(binding or ["No single limit binds."])
        if not folder:
            st.page_link("views/what_if.py", label="What relaxing each limit would save")
        if tables["neighbours"][1]:
            st.markdown("**One worker fewer than the fleet on paper**")
            draw_table(*tables["neighbours"])
    with others:
        draw_charts(document["alternatives_charts"])
        draw_table(*tables["alternatives"])
    with proof:
        draw_list(document["proof"])
        st.markdown("**Assuming**")
        draw_list(document["certificate"]["assumptions"])
        st.caption(escape_markdown(f"Prices: {document['prices']}"))
    with files:
        if of_text:
            st.caption(escape_markdown(of_text))
        draw_plan_downloads(store, key, command_text, folder)


def _draw_power(document: Document) -> None:
    """Draw a sentence on the plan's power, unless its simulation recorded no steps."""
    power = document["power"]
    if power is None:
        return
    st.write(
        f"Power: {power['provisioned_w'] / 1e3:,.1f} kW provisioned, {power['expected_w'] / 1e3:,.1f} kW "
        f"expected, of which {power['expected_idle_w'] / 1e3:,.1f} kW at rest. GPUs only."
    )


def draw_plan_downloads(store: Store, key: str, command_text: str, folder: str = "") -> None:
    """Draw buttons for the files of a plan, which are packed only when asked for; and the command that makes
    them again. In a `folder` there is no command, and no button for everything.
    """
    names = ("plan.yaml", "report.html", "certificate.json", "requests.csv")
    draw_downloads(store, key, [f"{folder}{name}" for name in (*names, *([] if folder else ["slo.yaml"]))])
    with st.container(horizontal=True):
        manifests = f"{folder}manifests"
        _draw_download(f"{manifests}.zip", lambda: zip_files(store.files(key, f"{manifests}/")), key)
        if not folder:
            _draw_everything(store, key, command_text)
    if not folder:
        draw_command(command_text, "slo.yaml and the trace")


def draw_shared_downloads(store: Store, key: str, command_text: str) -> None:
    """Draw buttons for the files of a plan for several LLMs, without those of each LLM, and the command."""
    draw_downloads(store, key, ("plan.yaml", "report.html", "certificate.json", "slo.yaml"))
    with st.container(horizontal=True):
        _draw_everything(store, key, command_text)
    draw_command(command_text, "slo.yaml and the traces")


def draw_day_downloads(store: Store, key: str, names: Iterable[str], command_text: str) -> None:
    """Draw buttons for the files of a day and for the manifests of the recommended controller, and the
    command that makes them again.
    """
    draw_downloads(store, key, names)
    with st.container(horizontal=True):
        _draw_download("manifests.zip", lambda: zip_files(store.files(key, "manifests/")), key)
        _draw_everything(store, key, command_text)
    fleet_text = ", the trace and plan.yaml" if "--fleet" in command_text else " and the trace"
    draw_command(command_text, f"slo.yaml{fleet_text}")


def _draw_everything(store: Store, key: str, command_text: str) -> None:
    """Draw buttons for the command line as a script, and for all files with that script."""
    script = f"{command_text}\n".encode()
    _draw_download("plan.sh", lambda: script, key)
    _draw_download("everything.zip", lambda: zip_files(store.files(key) | {"plan.sh": script}), key)


def draw_command(command_text: str, files_text: str) -> None:
    """Draw a command line that does the same as the page; `files_text` names the files that it needs."""
    st.write(f"The same on a command line, beside {files_text}:")
    st.code(command_text, language=None, wrap_lines=True)


def draw_downloads(store: Store, key: str, names: Iterable[str]) -> None:
    """Draw a button for each of these files of a result."""
    with st.container(horizontal=True):
        for name in names:
            _draw_download(name, partial(_file, store, key, name), key)


def _file(store: Store, key: str, name: str) -> bytes:
    """The content of one file of a saved result."""
    return store.files(key, name)[name]


def _draw_download(name: str, content: Callable[[], bytes], key: str) -> None:
    """Draw a button that downloads a file. Its label names the folder too, for users who hear the page."""
    file_name = name.replace("/", "-")
    st.download_button(f"Download {name}", content, file_name, key=f"{name}_{key}", on_click="ignore")
