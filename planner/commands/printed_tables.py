"""Tables and JSON of commands on stdout."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.domain import Slo
from planner.slo_metrics import metric_label, verdict_word
from planner.units import count_text, show_beside, show_clock, show_percent, show_s, show_share

PIPE_COLUMNS = 500  # So wide that no name is folded: grep does not find folded names.


def stdout_console(*, soft_wrap: bool = False) -> Console:
    """A console as wide as the terminal, or as COLUMNS says; PIPE_COLUMNS wide in a file or a pipe."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ  # Rich reads COLUMNS.
    return Console(highlight=False, soft_wrap=soft_wrap, width=None if has_width else PIPE_COLUMNS)


def print_lines(*lines: str, style: str = "") -> None:
    """Print texts, a line each, which a narrow terminal wraps. Brackets are printed as they are."""
    for line in lines:
        stdout_console(soft_wrap=True).print(line, style=style or None, markup=False)


def print_json(document: Any, warnings: Iterable[str] = ()) -> None:
    """Print a document. `warnings`, if any, are put before the document's own, each once."""
    if warning_list := list(warnings):
        all_warnings = list(dict.fromkeys((*warning_list, *document.get("warnings", ()))))
        document = {"warnings": all_warnings, **{k: v for k, v in document.items() if k != "warnings"}}
    print(json.dumps(document, indent=2, allow_nan=False))  # noqa: T201


def print_rows(rows: list[dict[str, Any]], title: str) -> None:
    """Print a table of rows with the same keys. Names in the first column are folded only if they are longer
    than half a line.
    """
    table, console = Table(), stdout_console()
    for k, column in enumerate(rows[0] if rows else ()):
        longest = max(len(short_text(row[column])) for row in rows)
        is_whole = k == 0 and longest <= console.width // 2
        table.add_column(Text(str(column)), overflow="fold", no_wrap=is_whole)
    for row in rows:
        # A `Text` has no markup: a bucket may be named "chat [eu]".
        table.add_row(*(Text(short_text(value)) for value in row.values()))
    print_lines(title, style="italic")  # The title of a rich.Table breaks where the table ends.
    console.print(table)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str) -> None:
    """Like `print_rows`, for a table given as its heading and its rows."""
    print_rows([dict(zip(head, row, strict=True)) for row in rows], title)


def print_markdown(rows: list[dict[str, Any]], title: str) -> None:
    """Print rows with the same keys as a table of Markdown below its title, the first column in bold."""
    console = stdout_console(soft_wrap=True)
    names = list(rows[0]) if rows else []

    def markdown_row(cells: Iterable[Any]) -> str:
        texts = [" ".join(short_text(cell).split()).replace("|", r"\|") for cell in cells]
        return f"| {' | '.join(texts)} |"

    lines = [f"{title}:", "", markdown_row(names), "|---" * len(names) + "|"]
    lines += [markdown_row([f"**{label}**", *cells]) for label, *cells in (row.values() for row in rows)]
    console.print("\n".join(lines), end="\n\n", markup=False)


def print_mapping(document: dict[str, Any], title: str) -> None:
    """Print a table with a row for each key; the values of a mapping or list are joined in one cell."""
    if title:
        print_lines(title, style="italic")
    table = Table(show_header=False)
    for key, value in document.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k}: {short_text(v)}" for k, v in value.items()) or "-"
        elif isinstance(value, list | tuple):
            value = "\n".join(short_text(item) for item in value) or "-"
        table.add_row(Text(str(key)), Text(short_text(value)))
    stdout_console().print(table)


def short_text(value: Any) -> str:
    """A value in a cell: "-" for None, a float with six digits."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def slo_rows(verdict: dict[str, Any], slo: Slo | None) -> list[dict[str, Any]]:
    """The table of an SLO, from a document of `verdict_document`: a row for each limit, for `attainment` and
    for each guarantee to tenants. If windows are judged, a row below each of them shows the worst window.
    "within" is the share of requests that keep the limit; for a guarantee, the tenant that is served worst.
    """
    rows: list[dict[str, Any]] = []

    def add_row(*cells: str) -> None:
        rows.append(dict(zip(("metric", "limit", "simulated", "within", "verdict"), cells, strict=True)))

    window_count = verdict.get("windows", 0)
    for line in verdict["lines"]:
        value, limit = show_beside(line["simulated_s"], line["limit_s"])
        add_row(
            metric_label(line["limit"]),
            limit,
            value,
            show_share(line["kept_frac"]) if line["judged"] else "-",
            loud_verdict(verdict_word(line["holds"], line["judged"])),
        )
        if worst := line.get("worst_window"):
            value, _ = show_beside(worst.get("simulated_s"), line["limit_s"])
            add_row(window_text(worst, window_count), "", value, show_share(worst["kept_frac"]), "")
    if slo is not None and slo.attainment_frac is not None:
        add_row(
            "attainment",
            show_percent(slo.attainment_frac, "g"),
            show_share(verdict["attainment_frac"]),
            "all limits at once",
            loud_verdict(verdict_word(verdict["attainment_holds"], verdict["is_judged"])),
        )
        if worst := verdict.get("attainment_worst_window"):
            add_row(window_text(worst, window_count), "", show_share(worst["kept_frac"]), "", "")
    for guarantee in verdict.get("tenants", ()):
        share_text, worst_text = "-", "no work waited for a whole window"
        if (share := guarantee["share_frac"]) is not None:
            windows = count_text(guarantee["windows"], "window")
            share_text, worst_text = show_share(share), f"{guarantee['tenant']}, of {windows}"
        add_row(
            guarantee["guarantee"],
            show_percent(guarantee["needed_frac"], "g"),
            share_text,
            worst_text,
            loud_verdict(verdict_word(guarantee["holds"], guarantee["windows"])),
        )
    return rows


def simulated_text(line: dict[str, Any]) -> str:
    """The simulated value of a line of an SLO; "never" if too many requests are lost for its percentile."""
    if not line["judged"]:
        return "not judged"
    return "never" if line["simulated_s"] is None else show_beside(line["simulated_s"], line["limit_s"]).value


def loud_verdict(verdict: str) -> str:
    """The verdict in a terminal, with a miss in capitals."""
    return "MISSED" if verdict == "missed" else verdict


def window_text(worst: dict[str, Any], window_count: int) -> str:
    """The label of the worst window of an SLO."""
    times = f"{show_clock(worst['start_s'])} to {show_clock(worst['end_s'])}"
    return f"  worst of {count_text(window_count, 'window')}: {times}"


def seconds_cell(seconds: float | None) -> str:
    """A time in a cell; "-" for None: it never came."""
    return "-" if seconds is None else show_s(seconds)
