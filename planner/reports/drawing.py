"""Gives Altair charts our fonts and colours, and draws them as Vega-Lite, SVG or PNG without a browser.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart (orange is darker here, to
be visible on white). Altair and vl-convert are imported inside functions, because the import takes most of a
second.
"""

import base64
import gzip
import json
import textwrap
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import version
from typing import Any

from planner.files.checked_files import cached_text
from planner.files.scarce_resources import is_limited, survives_in_copy

# Colours on a light page; THEME has the CSS variables that replace them in a report.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE = "#0072b2", "#d55e00", "#009e73", "#aa4499", "#a87400"
INK, MUTED, SOFT, GRID, PAPER = "#1c2430", "#5d6876", "#a3adb8", "#dfe3e8", "#ffffff"
THEME = {
    BLUE: "--blue",
    VERMILLION: "--vermillion",
    GREEN: "--green",
    PURPLE: "--purple",
    ORANGE: "--orange",
    INK: "--ink",
    MUTED: "--muted",
    SOFT: "--soft",
    GRID: "--grid",
    PAPER: "--page",
}
FONT = "Helvetica, Arial, sans-serif"
GUIDE = "guide"  # Style of a line that is no data, such as a diagonal.
PNG_SCALE = 2.0  # An image has this many pixels per pixel of the chart.
PNG_COLUMNS = 76  # Width of a caption, in characters.


@dataclass(frozen=True, slots=True)
class CaptionedChart:
    """A chart of Altair with its caption; `name` is the name of its file, unique on a page."""

    name: str
    chart: Any
    caption: str


def chart_spec(chart: Any) -> dict[str, Any]:
    """The chart as a Vega-Lite specification with our fonts and colours."""
    axis = {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "gridColor": GRID,
        "domainColor": GRID,
        "tickColor": GRID,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "labelFont": FONT,
        "titleFont": FONT,
        "labelOverlap": True,
    }
    # Only tests validate the specification, because validation takes longer than drawing.
    spec: dict[str, Any] = chart.to_dict(validate=False)
    spec["config"] = {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "axis": axis,
        "legend": {"labelColor": INK, "labelFont": FONT, "labelFontSize": 11},
    }
    spec["padding"] = 4
    return spec


def with_theme_colours(text: str) -> str:
    """An SVG or a specification with CSS variables in place of our colours, for light and dark pages."""
    for colour, variable in THEME.items():
        text = text.replace(f'"{colour}"', f'"var({variable},{colour})"')
    return text


def svg_of(spec: dict[str, Any]) -> str:
    """The SVG of a chart, given as `chart_spec` returns it.

    The chart must not clip its marks: ids of clip paths count up over the life of the process, so the bytes
    would differ from run to run.
    """
    return _svg_of_text(json.dumps(spec))


# Charts are cached because the app draws a plan again at every visit of its page; 64 are for eight reports.
@lru_cache(maxsize=64)
def _svg_of_text(spec: str) -> str:
    """The SVG of a chart, given as Vega-Lite text, with the theme's CSS variables as colours."""
    import vl_convert

    _check_drawing()
    return with_theme_colours(vl_convert.vegalite_to_svg(spec))


@cache
def _check_drawing() -> None:
    """Raise MemoryError if drawing would end this process, as the drawing engine does when it lacks memory or
    open files. If these are limited, a copy of the process draws first, as a test.
    """
    import vl_convert

    if is_limited() and not survives_in_copy(lambda: vl_convert.vegalite_to_svg({"mark": "bar", "data": {}})):
        raise MemoryError


def chart_png(figure: CaptionedChart) -> bytes:
    """The chart as an image on white with its caption above it."""
    import vl_convert

    spec = chart_spec(figure.chart)
    spec["config"]["background"] = PAPER
    spec["padding"] = 12
    spec["title"] = {
        "text": textwrap.wrap(figure.caption, PNG_COLUMNS),
        "anchor": "start",
        "frame": "group",
        "color": INK,
        "font": FONT,
        "fontSize": 12,
        "fontWeight": "normal",
        "offset": 12,
    }
    png: bytes = vl_convert.vegalite_to_png(spec, scale=PNG_SCALE)
    return png


def live_spec(chart: Any) -> dict[str, Any]:
    """The chart as interactive Vega-Lite that fills the width of its container.

    Tooltips show the values of bars, dots, and the point of a line next to the pointer. A click on names in
    the legend shows only their lines. In a chart with lines the horizontal axis moves and zooms.
    """
    return add_interaction(chart_spec(chart))


def add_interaction(spec: dict[str, Any]) -> dict[str, Any]:
    """The same specification, changed in place: with tooltips, zoom and a legend that hides lines.

    A layer of a data line becomes a layer with two layers inside (`_live_layer`). So layers with the key
    "layer" are those of data lines.
    """
    layers = spec.pop("layer", None) or [{key: spec.pop(key) for key in ("mark", "encoding")}]
    has_lines = any(_is_data_line(layer) for layer in layers)
    axes = {channel: layers[0]["encoding"][channel].get("axis") or {} for channel in ("x", "y")}
    spec["layer"] = [_live_layer(layer, axes, k) for k, layer in enumerate(layers)]
    if has_lines:
        is_log = layers[0]["encoding"]["x"].get("scale", {}).get("type") == "log"
        if is_log and axes["x"].pop("values", None):  # Fixed ticks would be wrong once the reader zooms.
            axes["x"] |= {"tickCount": 6, "gridOpacity": _AT_1_2_5, "tickOpacity": _AT_1_2_5}
            axes["x"]["labelExpr"] = f"{_IS_1_2_5} ? datum.label : ''"
        for layer in spec["layer"]:
            for inner in layer.get("layer", [layer]):
                inner["mark"]["clip"] = True
        lines = next(layer for layer in spec["layer"] if "layer" in layer)
        lines["layer"][0].setdefault("params", []).append(_ZOOM)
    spec["width"] = "container"
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return spec


# Expressions of Vega for ticks of a logarithmic axis: the first digit of a tick's value (1e-6 hides the
# rounding error of the logarithm); whether that digit is 1, 2 or 5; opacity 1 if so, otherwise 0.
_DIGIT = "round(datum.value / pow(10, floor(log(datum.value) / LN10 + 1e-6)))"
_IS_1_2_5 = f"indexof([1, 2, 5], {_DIGIT}) >= 0"
_AT_1_2_5 = {"condition": {"test": _IS_1_2_5, "value": 1}, "value": 0}
# Only a mouse drags, and only a pinch or Ctrl with the wheel zooms: fingers and the wheel scroll the page.
_ZOOM = {
    "name": "zoom",
    "select": {
        "type": "interval",
        "encodings": ["x"],
        "zoom": "wheel![event.ctrlKey || event.metaKey]",
        "translate": "[pointerdown[event.pointerType === 'mouse'], window:pointerup] > window:pointermove!",
    },
    "bind": "scales",
}


def _is_data_line(layer: dict[str, Any]) -> bool:
    """Whether a layer of a chart is a line or an area of data."""
    mark = layer["mark"]
    return bool(mark["type"] in ("line", "area") and mark.get("style") != GUIDE)


def _live_layer(layer: dict[str, Any], axes: dict[str, Any], k: int) -> dict[str, Any]:
    """Layer `k` of a chart with tooltips. A line becomes two layers: itself, and a point near the pointer."""
    mark, encoding = layer["mark"], layer["encoding"]
    if mark["type"] in ("bar", "point", "circle"):
        return layer | {"encoding": {"tooltip": {"value": _tooltip(encoding, axes)}} | encoding}
    if not _is_data_line(layer):
        return layer
    # Points have no dashes, so dashes move from the encoding of both layers to the line's own.
    dash = {"strokeDash": encoding.pop("strokeDash")} if "strokeDash" in encoding else {}
    line: dict[str, Any] = {"mark": mark, "encoding": dash}
    if encoding.get("color", {}).get("legend"):
        names = {"type": "point", "fields": [encoding["color"]["field"]], "toggle": "true"}
        line["params"] = [{"name": f"shown{k}", "select": names, "bind": "legend"}]
        line["encoding"] = dash | {"opacity": {"condition": {"param": f"shown{k}", "value": 1}, "value": 0.1}}
    colour = {"color": mark["color"]} if "color" in mark else {}
    pointer: dict[str, Any] = {"type": "point", "on": "pointermove", "nearest": True, "clear": "pointerout"}
    # A single line shows its value at the pointer's x, however far above or below it the pointer is.
    if "params" not in line:
        pointer["encodings"] = ["x"]
    points = {
        "mark": {"type": "point", "filled": True, "size": 55} | colour,
        "encoding": {
            "opacity": {"condition": {"param": f"near{k}", "empty": False, "value": 1}, "value": 0},
            "tooltip": {"value": _tooltip(encoding, axes)},
        },
        "params": [{"name": f"near{k}", "select": pointer}],
    }
    data = {"data": layer["data"]} if "data" in layer else {}
    return data | {"encoding": encoding, "layer": [line, points]}


def _tooltip(encoding: dict[str, Any], axes: dict[str, Any]) -> dict[str, str]:
    """A tooltip with the values and titles of both axes; its heading is the name of the line."""
    # With `nearest`, Vega's datum is the region around the point, and the row of data is `datum.datum`.
    text, datum = [], "(datum.datum || datum)"
    if "field" in encoding.get("color", {}):
        text.append(f'"title": {datum}[{json.dumps(encoding["color"]["field"])}]')
    for channel in ("x", "y"):
        title = axes[channel].get("title")
        if title and "field" in encoding.get(channel, {}):
            # Formats of d3: four digits, without zeros at the end; as a percentage, or with commas.
            number = ".4~p" if axes[channel].get("format") == "%" else ",.4~r"
            value = f"{datum}[{json.dumps(encoding[channel]['field'])}]"
            text.append(f"{json.dumps(title)}: format({value}, '{number}')")
    return {"expr": f"{{{', '.join(text)}}}"}


def pack_text(text: str) -> str:
    """The text gzipped and in base64, as page.js unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def packed_vega() -> str:
    """Vega, Vega-Lite and vega-embed, packed by `pack_text`: one script that begins with their licences and
    sets window.vegaEmbed. It is made once per version and cached on disk.
    """
    import vl_convert

    versions = (
        version("vl-convert-python"),
        vl_convert.get_vega_version(),
        vl_convert.get_vega_embed_version(),
    )

    def make() -> str:
        code = (
            f"/* Vega {versions[1]} and Vega-Lite (BSD-3-Clause, University of Washington Interactive Data "
            "Lab) with d3 (ISC, Mike Bostock): https://vega.github.io */\n"
            + vl_convert.javascript_bundle("window.vegaEmbed=vegaEmbed;")
        )
        return pack_text(code)

    return cached_text(f"vega-{'-'.join(versions)}.js.gz.txt", make)
