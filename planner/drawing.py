"""How a chart of Altair looks, and what becomes of it: Vega-Lite, SVG, PNG; without a browser.

Colours are Okabe and Ito's, which stay apart for colour-blind readers. Altair and vl-convert are imported
inside the functions: they take most of a second.
"""

from __future__ import annotations

from typing import Any

# As drawn for a light page, and the name of the CSS variable that takes its place in a report.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE = "#0072b2", "#d55e00", "#009e73", "#aa4499", "#e69f00"
INK, MUTED, SOFT, GRID = "#1c2430", "#5d6876", "#a3adb8", "#dfe3e8"
THEME = {
    BLUE: "--blue", VERMILLION: "--vermillion", GREEN: "--green", PURPLE: "--purple",
    INK: "--ink", MUTED: "--muted", SOFT: "--soft", GRID: "--grid",
}  # fmt: skip
FONT = "Helvetica, Arial, sans-serif"


def chart_spec(chart: Any) -> dict[str, Any]:
    """The chart as Vega-Lite with our fonts and colours, for whoever draws it."""
    axis = {
        "labelColor": MUTED, "titleColor": MUTED, "gridColor": GRID, "domainColor": GRID, "tickColor": GRID,
        "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "titlePadding": 8,
        "labelFont": FONT, "titleFont": FONT, "labelOverlap": True,
    }  # fmt: skip
    spec: dict[str, Any] = chart.to_dict()
    spec["config"] = {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "axis": axis,
        "legend": {"labelColor": INK, "labelFont": FONT, "labelFontSize": 11, "labelLimit": 200},
    }
    spec["padding"] = 4
    return spec


def chart_svg(chart: Any) -> str:
    """The chart as SVG for a report: its colours are CSS variables, so it follows light and dark pages.

    No chart clips its marks: the ids of clip paths are counted over the life of the process, so the bytes
    would differ from run to run.
    """
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(chart_spec(chart))
    for colour, variable in THEME.items():
        svg = svg.replace(f'"{colour}"', f'"var({variable},{colour})"')
    return svg


def chart_png(chart: Any, *, scale: float = 2.0) -> bytes:
    """The chart as an image on white, for a README."""
    import vl_convert

    spec = chart_spec(chart)
    spec["config"]["background"] = "#ffffff"
    spec["padding"] = 12
    png: bytes = vl_convert.vegalite_to_png(spec, scale=scale)
    return png
