"""A self-contained HTML page: light and dark, fit to print, readable on a phone.

Every chart is there twice: as an SVG, which needs no script and is what is printed, and as a Vega-Lite
specification, which page.js draws in the SVG's place so that it answers to the pointer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape

from planner.files.checked_files import package_text
from planner.reports.drawing import Figure, chart_spec, enlivened, packed, packed_vega, svg_of, themed

_FIGURE = re.compile(r"(?<=\d) (?=%|USD\b|kW\b|×)|(?<=×) (?=\S)")


def page(title: str, body: str, footer: str) -> str:
    """A self-contained HTML page in the report's style; `body` is HTML, the others are text."""
    has_charts = "<figure" in body
    library = f'<script type="text/plain" id=vega>{packed_vega()}</script>\n' if has_charts else ""
    script = f"<script>{package_text('reports/page.js')}</script>\n" if has_charts else ""
    style = package_text("reports/page.css") + package_text("reports/parts.css")
    return (
        f'<!doctype html>\n<html lang=en>\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n<footer>{escape(footer)}</footer>\n</main>\n{library}{script}</body>\n</html>\n"
    )


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>"


def later_section(title: str, body: str) -> str:
    """A section that a reader may fold, and that is folded at first on a phone."""
    heading = f"<summary><h2>{escape(title)}</h2></summary>"
    return f"<section><details class=later open>{heading}\n{body}</details></section>"


def headline(cells: Sequence[tuple[str, str, str]]) -> str:
    """The figures one asks for first: name, value, note."""
    return (
        "<dl class=figures>"
        + "".join(
            f"<div><dt>{unbroken(name)}</dt><dd>{unbroken(value)}</dd>"
            f"<dd class=note>{unbroken(note)}</dd></div>"
            for name, value, note in cells
        )
        + "</dl>"
    )


def unbroken(text: str) -> str:
    """Text as HTML, in which a figure stays in one line with what it counts."""
    return escape(_FIGURE.sub("\u00a0", text))


def charts(figures: Iterable[Figure]) -> str:
    """Charts two by two; one below the other where the page is narrow."""
    drawn = "".join(chart(figure) for figure in figures)
    return f"<div class=charts>{drawn}</div>" if drawn else ""


def chart(figure: Figure, *, wide: bool = False) -> str:
    """A chart with its caption, which is also its name for those who do not see it."""
    spec = chart_spec(figure.chart)  # Made once: Altair takes as long for it as the drawing does.
    still = svg_of(spec)
    live = packed(themed(json.dumps(enlivened(spec), separators=(",", ":"))))
    name = escape(f"chart-{figure.name}")
    return (
        f'<figure{" class=wide" if wide else ""}><div class=still role=img aria-labelledby="{name}">'
        f"{still}</div>"
        f'<div class=live role=img aria-labelledby="{name}"></div>'
        f'<script type="text/plain">{live}</script>'
        f'<figcaption id="{name}">{escape(figure.caption)}</figcaption></figure>'
    )


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, numeric: Iterable[int] = ()
) -> str:
    """An HTML table of text; the columns `numeric` are set to the right.

    Its first column names the rows. `caption` is read aloud, not seen: a heading says as much.
    """
    right = set(numeric)

    def cell(k: int, tag: str, text: str, more: str = "") -> str:
        return f"<{tag}{more}{' class=n' if k in right else ''}>{escape(text)}</{tag}>"

    top = "".join(cell(k, "th", name, " scope=col") if name else "<td></td>" for k, name in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(
            cell(k, "td", text, f' data-of="{escape(name)}"') if k else cell(k, "th", text, " scope=row")
            for k, (name, text) in enumerate(zip(head, row, strict=True))
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class=scroll tabindex=0 role=group aria-label="{escape(caption)}">'
        f"<table{' class=many' if len(head) > 7 else ''}>"
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def bullets(lines: Iterable[str], otherwise: str = "") -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else f"<p>{escape(otherwise)}</p>"
