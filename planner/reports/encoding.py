"""Data, axes, legends, colours and dashes for all charts.

Altair is imported inside the functions, because the import takes most of a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from planner.reports.drawing import BLUE, GREEN, INK, ORANGE, PAPER, PURPLE, VERMILLION
from planner.units import DAY_S, HOUR_S

Floats = npt.NDArray[np.float64]

AXIS_MARGIN = 1.15  # A logarithmic axis extends by this factor beyond its outermost values; chosen by hand.
MOST_DECADES = 5  # Decades of a logarithmic axis: on a longer axis the values that matter are too close.
LEGEND_WIDTH_PX = 280  # A chart on a phone is about as wide.
SYMBOL_PX, CHARACTER_PX = 28, 6  # Widths in a legend: a symbol with its margin, and a letter.
MOST_LEGEND_COLUMNS = 4  # Chosen by hand.
TEXT_PX, RIM_PX = 11, 4  # The size of texts in a chart, and the width of the rim around them; chosen by hand.


def data_of_columns(**columns: Sequence[Any] | Floats) -> Any:
    """Data for a chart, from columns of equal length."""
    rows = zip(*map(round_values, columns.values()), strict=True)
    return data_of_rows([dict(zip(columns, row, strict=True)) for row in rows])


def text_layers(rows: Any, **mark_options: Any) -> list[Any]:
    """Two layers for the texts of `rows` at their points x, y: a rim in the colour of paper, which separates
    the text from curves behind it, and the text itself. `mark_options` are those of Altair's `mark_text`.
    """
    import altair as alt

    text = alt.Chart(rows).encode(x=alt.X("x:Q"), y=alt.Y("y:Q"), text=alt.Text("text:N"))
    rim = text.mark_text(
        color=PAPER, stroke=PAPER, strokeWidth=RIM_PX, strokeJoin="round", fontSize=TEXT_PX, **mark_options
    )
    return [rim, text.mark_text(color=INK, fontSize=TEXT_PX, **mark_options)]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of data that Altair does not copy; it copies a plain list, row by row, in every step of making a
    chart. Altair requires `_schema` and `to_dict` of an object of an unknown class.
    """

    rows: list[dict[str, Any]]
    _schema: ClassVar = {"type": "array"}

    def to_dict(self) -> list[dict[str, Any]]:
        return self.rows


def data_of_rows(rows: list[dict[str, Any]]) -> Any:
    """The rows as data of a chart, without Altair's check of each row against its schema."""
    import altair as alt
    from altair.utils.schemapi import debug_mode

    make_data: Any = alt.Data  # Any, as Altair does not type its arguments.
    with debug_mode(False):  # Checking every row against the schema takes longer than the chart.
        return make_data(values=_Rows(rows))


def round_values(values: Sequence[Any] | Floats) -> list[Any]:
    """Numbers with six significant digits, more than a chart can show; texts as they are."""
    return [float(f"{v:.6g}") if isinstance(v, int | float) else v for v in np.asarray(values).tolist()]


def line_points(x: Floats, y: Floats, **labels: str) -> list[dict[str, Any]]:
    """The rows of data for the points of one line, each with the line's labels, such as `name="TTFT"`."""
    return [{"x": x_k, "y": y_k, **labels} for x_k, y_k in zip(round_values(x), round_values(y), strict=True)]


def chart_legend(names: Sequence[str], symbol: str = "stroke") -> Any:
    """A legend with as many columns as fit into a chart on a phone; None for a single name."""
    import altair as alt

    if len(names) < 2:
        return None
    widest_entry_px = SYMBOL_PX + CHARACTER_PX * max(map(len, names))
    columns = max(1, min(MOST_LEGEND_COLUMNS, LEGEND_WIDTH_PX // widest_entry_px))
    return alt.Legend(
        title=None,
        orient="top",
        columns=columns,
        symbolType=symbol,
        labelLimit=LEGEND_WIDTH_PX,
        values=list(names),
    )


def colour_scale(names: Sequence[str]) -> Any:
    """A scale that gives each name a colour; after six names the colours repeat."""
    return _cycle_marks([BLUE, VERMILLION, GREEN, PURPLE, INK, ORANGE], names)


def dash_scale(names: Sequence[str]) -> Any:
    """A scale with a dash for each name: the pixels that are drawn, and those left out."""
    return _cycle_marks([[1, 0], [4, 2], [1, 2], [8, 3]], names)


def _cycle_marks(marks: Sequence[Any], names: Sequence[str]) -> Any:
    """A scale that gives the marks to the names in turn, and repeats them if there are more names."""
    import altair as alt

    return alt.Scale(domain=list(names), range=[marks[k % len(marks)] for k in range(len(names))])


def distinguish_lines(field: str, names: Sequence[str]) -> dict[str, Any]:
    """Encodings of lines by the name in `field`: a colour and a dash for each, under one legend.

    Six colours and four dashes repeat independently, so twelve names differ.
    """
    import altair as alt

    shared = {"shorthand": f"{field}:N", "sort": list(names), "legend": chart_legend(names)}
    return {
        "color": alt.Color(**shared, scale=colour_scale(names)),
        "strokeDash": alt.StrokeDash(**shared, scale=dash_scale(names)),
    }


def time_axis(unit: str, ticks: int | None = None) -> Any:
    """The axis x as a time in the unit that `time_unit` chose."""
    import altair as alt

    count = alt.Undefined if ticks is None else ticks
    axis = alt.Axis(title=f"time [{unit}]", format=",~f", tickCount=count)
    return alt.X("x:Q", axis=axis, scale=alt.Scale(nice=False))


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for an axis that is `seconds` long, and the length of the unit [s]."""
    # An axis has at most 300 of its unit (72 h before days), so that the numbers at its ticks are short.
    for unit, factor, most_s in (("s", 1.0, 300.0), ("min", 60.0, 4 * HOUR_S), ("h", HOUR_S, 72 * HOUR_S)):
        if seconds <= most_s:
            return unit, factor
    return "days", DAY_S


def log_axis_ends(values_s: Floats, limits_s: Sequence[float]) -> tuple[float, float]:
    """Both ends of a logarithmic axis for all values and limits, but at most MOST_DECADES long."""
    shown_s = list(limits_s)
    if len(values_s):
        shown_s += [float(values_s.min()), float(values_s.max())]
    # Without values and limits any decade will do.
    low, high = min(shown_s, default=0.1), max(shown_s, default=1.0)
    high *= AXIS_MARGIN
    # A longer axis is cut at its lower end.
    return max(low / AXIS_MARGIN, high / 10**MOST_DECADES), high


# Pairs: the most decades of a logarithmic axis, and the round values that such an axis shows in each decade.
# Longer axes show powers of ten. Chosen by hand.
_ROUND_VALUES = (
    (0.5, (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)),
    (1.8, (1.0, 2.0, 5.0)),
    (3.0, (1.0, 3.0)),
)


def log_ticks(low: float, high: float) -> list[float]:
    """Round values from `low` to `high` for a logarithmic axis: the shorter the axis, the denser."""
    decades = np.log10(high / low)
    in_decade = next((values for most_decades, values in _ROUND_VALUES if decades <= most_decades), (1.0,))
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    # 3 * 10 ** -1 is 0.30000000000000004; with six digits it is 0.3.
    ticks = [float(f"{value * 10.0**power:.6g}") for power in powers for value in in_decade]
    return [tick for tick in ticks if low <= tick <= high]
