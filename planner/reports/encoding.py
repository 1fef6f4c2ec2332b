"""What the charts have in common: their data, axes, legends, colours and dashes.

Altair is imported inside the functions: it takes most of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.reports.drawing import BLUE, GREEN, INK, ORANGE, PAPER, PURPLE, VERMILLION

Floats = npt.NDArray[np.float64]

LEGEND_WIDTH = 280


def table(**columns: Sequence[Any] | Floats) -> Any:
    rows = zip(*map(rounded, columns.values()), strict=True)
    return data([dict(zip(columns, row, strict=True)) for row in rows])


def labels(rows: Any, **place: Any) -> list[Any]:
    """Text at points x, y, over a rim of paper that keeps curves behind it apart."""
    import altair as alt

    text = alt.Chart(rows).encode(x="x:Q", y="y:Q", text="text:N")
    rim = text.mark_text(color=PAPER, stroke=PAPER, strokeWidth=4, strokeJoin="round", fontSize=11, **place)
    return [rim, text.mark_text(color=INK, fontSize=11, **place)]


def data(rows: list[dict[str, Any]]) -> Any:
    import altair as alt
    from altair.utils.schemapi import debug_mode

    values: Any = alt.Data
    with debug_mode(False):  # Checking every row against the schema takes longer than the chart.
        return values(values=rows)


def rounded(values: Sequence[Any] | Floats) -> list[Any]:
    return [float(f"{v:.6g}") if isinstance(v, int | float) else v for v in np.asarray(values).tolist()]


def rounded_all(*columns: Floats) -> list[list[Any]]:
    return [rounded(column) for column in columns]


def legend(names: Sequence[str], symbol: str = "stroke") -> Any:
    """A legend with as many columns as a chart on a phone has room for; none for a single name."""
    import altair as alt

    if len(names) < 2:
        return None
    columns = max(1, min(4, LEGEND_WIDTH // (28 + 6 * max(len(name) for name in names))))
    return alt.Legend(
        title=None,
        orient="top",
        columns=columns,
        symbolType=symbol,
        labelLimit=LEGEND_WIDTH,
        values=list(names),
    )


def colours(names: Sequence[str]) -> Any:
    import altair as alt

    every = [BLUE, VERMILLION, GREEN, PURPLE, INK, ORANGE]
    return alt.Scale(domain=list(names), range=[every[k % len(every)] for k in range(len(names))])


def dashes(names: Sequence[str]) -> Any:
    import altair as alt

    every = [[1, 0], [4, 2], [1, 2], [8, 3]]
    return alt.Scale(domain=list(names), range=[every[k % len(every)] for k in range(len(names))])


def distinguish_lines(field: str, names: Sequence[str]) -> dict[str, Any]:
    """Encodings of lines by the name in `field`: a colour and a dash for each, under one legend."""
    import altair as alt

    of = {"shorthand": f"{field}:N", "sort": list(names), "legend": legend(names)}
    return {
        "color": alt.Color(**of, scale=colours(names)),
        "strokeDash": alt.StrokeDash(**of, scale=dashes(names)),
    }


def time_axis(unit: str, ticks: int | None = None) -> Any:
    """Time along x, in a unit of `time_unit`, as plain numbers."""
    import altair as alt

    count = alt.Undefined if ticks is None else ticks
    axis = alt.Axis(title=f"time [{unit}]", format=",~f", tickCount=count)
    return alt.X("x:Q", axis=axis, scale=alt.Scale(nice=False))


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit that an axis of so many seconds is read in, and its seconds."""
    for unit, factor, most in (("s", 1.0, 300), ("min", 60.0, 4 * 3600), ("h", 3600.0, 72 * 3600)):
        if seconds <= most:
            return unit, factor
    return "days", 86400.0


def span(values_s: Floats, limits_s: Sequence[float]) -> tuple[float, float]:
    """The part of a logarithmic axis worth seeing: all values and limits, at most five decades."""
    ends = [*limits_s, *([float(values_s.min()), float(values_s.max())] if len(values_s) else [])]
    low, high = min(ends, default=0.1), max(ends, default=1.0)
    high *= 1.15
    return max(low / 1.15, high / 1e5), high


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, or powers of ten alone on a long axis."""
    decades = np.log10(high / low)
    steps: tuple[float, ...] = (1.0,) if decades > 3 else (1.0, 3.0) if decades > 1.8 else (1.0, 2.0, 5.0)
    if decades < 0.5:
        steps = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [float(f"{step * 10.0**power:.6g}") for power in powers for step in steps]
    return [tick for tick in ticks if low <= tick <= high]
