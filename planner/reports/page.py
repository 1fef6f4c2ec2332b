"""Parts of a self-contained HTML page: light and dark, fit to print, readable on a phone.

The page has every chart twice: as an SVG, which needs no script and is printed, and as a Vega-Lite
specification, which page.js draws in place of the SVG so that the chart is interactive.
"""

import json
import re
from collections.abc import Iterable, Sequence
from html import escape

from planner.files.checked_files import package_text
from planner.reports.drawing import (
    CaptionedChart,
    add_interaction,
    chart_spec,
    pack_text,
    packed_vega,
    svg_of,
    with_theme_colours,
)

# A space between a number and its unit, or around a multiplication sign.
_UNBROKEN_SPACE = re.compile(r"(?<=\d) (?=%|USD\b|kW\b|×)|(?<=×) (?=\S)")
_CODE = re.compile(r"`([^`]+)`")  # Text between backticks.

MANY_COLUMNS = 7  # In a table with more columns numbers may break over lines (class `many` of the style).


def page_html(title: str, body: str, footer: str) -> str:
    """A self-contained HTML page in the report's style; `body` is HTML, `title` and `footer` are text."""
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


def section_html(title: str, body: str) -> str:
    """A section with a heading; `title` is text, `body` is HTML."""
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>"


def folded_section(title: str, body: str) -> str:
    """A section that the reader may fold; on a phone page.js folds it at first."""
    heading = f"<summary><h2>{escape(title)}</h2></summary>"
    return f"<section><details class=later open>{heading}\n{body}</details></section>"


def figures_html(cells: Sequence[tuple[str, str, str]]) -> str:
    """The most important figures, in large letters; each cell is (name, value, note)."""
    figures = "".join(
        f"<div><dt>{unbroken_html(name)}</dt><dd>{unbroken_html(value)}</dd>"
        f"<dd class=note>{unbroken_html(note)}</dd></div>"
        for name, value, note in cells
    )
    return f"<dl class=figures>{figures}</dl>"


def unbroken_html(text: str) -> str:
    """A sentence as HTML, with no line break between a number and its unit."""
    return inline_html(_UNBROKEN_SPACE.sub("\u00a0", text))


def inline_html(text: str) -> str:
    """A sentence as HTML: text between backticks, such as a command, is code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))


def charts_html(figures: Iterable[CaptionedChart]) -> str:
    """Charts in two columns, or in one on a narrow page."""
    drawn = "".join(chart_html(figure) for figure in figures)
    return f"<div class=charts>{drawn}</div>" if drawn else ""


def chart_html(figure: CaptionedChart, *, wide: bool = False) -> str:
    """A chart with its caption, which screen readers use as its name."""
    # The specification is made once for both forms, because making it takes as long as drawing.
    spec = chart_spec(figure.chart)
    still = svg_of(spec)
    live = pack_text(with_theme_colours(json.dumps(add_interaction(spec), separators=(",", ":"))))
    name = escape(f"chart-{figure.name}")
    return (
        f'<figure{" class=wide" if wide else ""}><div class=still role=img aria-labelledby="{name}">'
        f"{still}</div>"
        f'<div class=live role=img aria-labelledby="{name}"></div>'
        f'<script type="text/plain">{live}</script>'
        f'<figcaption id="{name}">{escape(figure.caption)}</figcaption></figure>'
    )


def table_html(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, numeric: Iterable[int] = ()
) -> str:
    """An HTML table of text. The columns with the numbers `numeric` are aligned right.

    The first column names the rows. `caption` is only for screen readers, because the page has a heading.
    """
    aligned_right = set(numeric)

    def cell(column: int, tag: str, text: str, attributes: str = "") -> str:
        return f"<{tag}{attributes}{' class=n' if column in aligned_right else ''}>{escape(text)}</{tag}>"

    top = "".join(
        cell(column, "th", name, " scope=col") if name else "<td></td>" for column, name in enumerate(head)
    )
    body = ""
    for row in rows:
        cells = [cell(0, "th", row[0], " scope=row")]
        # On a phone each cell is shown with the name of its column, from data-of (page.css).
        for column, (name, text) in enumerate(zip(head[1:], row[1:], strict=True), 1):
            cells.append(cell(column, "td", text, f' data-of="{escape(name)}"'))
        body += f"<tr>{''.join(cells)}</tr>"
    return (
        f'<div class=scroll tabindex=0 role=group aria-label="{escape(caption)}">'
        f"<table{' class=many' if len(head) > MANY_COLUMNS else ''}>"
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def list_html(lines: Iterable[str], otherwise: str = "") -> str:
    """A list of the lines; without lines the text `otherwise`."""
    items = "".join(f"<li>{inline_html(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else f"<p>{escape(otherwise)}</p>"
