"""The charts of traces, plans and comparisons, drawn by Altair; drawing.py has their theme.

Altair is imported inside the functions, because the import takes most of a second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.domain import Limit
from planner.fleet import Fleet
from planner.reports.curves import BINS, Curve, busy_share, load_edges_s
from planner.reports.drawing import BLUE, GRID, INK, MUTED, PAPER, SOFT, VERMILLION
from planner.reports.encoding import (
    Floats,
    chart_legend,
    colour_scale,
    data_of_columns,
    data_of_rows,
    distinguish_lines,
    line_points,
    log_axis_ends,
    log_ticks,
    text_layers,
    time_axis,
    time_unit,
)
from planner.simulator.simulation import Simulation
from planner.slo_metrics import METRICS
from planner.traffic.trace import Trace
from planner.units import percentile_name, show_percent, show_s

# Bins of a histogram over the logarithm of lengths. Up to a million tokens, each bin is at most 1.42 times as
# wide as the bin before.
LENGTH_BINS = 40
WIDTH, HEIGHT = 400, 210  # Pixels of a chart; two stand side by side in a report.
WIDE = 560  # Pixels of a chart that has names of fleets in it, and a row of the report for itself.
BAR_ROW_HEIGHT = 38  # Pixels of a bar with its name above.
SHARES = [0, 1.02]  # Ends of an axis of shares, a little above 1 so that the edge does not cut a line at 1.


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of `bars_chart`. With `at_least` the value is a lower bound."""

    label: str
    value: float
    is_plan: bool = False
    at_least: bool = False


def distribution_chart(curve: Curve, metric: str, limits: Sequence[Limit]) -> Any:
    """Share of requests (or gaps) at or below each time, with time on a logarithmic axis, and a line at each
    limit.
    """
    import altair as alt

    positive = curve.value_s > 0  # A logarithmic axis has no 0.
    value_s, share = curve.value_s[positive], curve.share[positive]
    low, high = log_axis_ends(value_s, [limit.limit_s for limit in limits])
    # Values below the axis, which may be cut at its lower end, are drawn at the end. The last step extends to
    # the upper end.
    if len(share):
        value_s, share = np.append(np.maximum(value_s, low), high), np.append(share, share[-1])
    x, y = _distribution_axes(metric, low, high)
    line = (
        alt.Chart(data_of_columns(x=value_s, y=share))
        .mark_line(color=BLUE, strokeWidth=2.2, interpolate="step-after")
        .encode(x=x, y=y)
    )
    return alt.layer(line, *_limit_layers(limits, low, high, VERMILLION)).properties(
        width=WIDTH, height=HEIGHT
    )


def comparison_chart(curves: Mapping[str, Curve], metric: str, limits: Sequence[Limit]) -> Any:
    """One distribution per name on shared axes, and the limits. Up to twelve names differ in colour or dash.
    A name without values has no line, but is in the legend.
    """
    import altair as alt

    all_s = np.concatenate([curve.value_s[curve.value_s > 0] for curve in curves.values()])
    low, high = log_axis_ends(all_s, [limit.limit_s for limit in limits])
    rows: list[dict[str, Any]] = []
    for name, curve in curves.items():
        positive = curve.value_s > 0
        if not positive.any():
            continue
        value_s = np.append(np.maximum(curve.value_s[positive], low), high)
        share = np.append(curve.share[positive], curve.share[positive][-1])
        rows += line_points(value_s, share, name=name)
    names = list(curves)
    x, y = _distribution_axes(metric, low, high)
    line = (
        alt.Chart(data_of_rows(rows))
        .mark_line(strokeWidth=1.8, interpolate="step-after")
        .encode(x=x, y=y, **distinguish_lines("name", names))
    )
    return alt.layer(line, *_limit_layers(limits, low, high, MUTED)).properties(width=WIDTH, height=HEIGHT)


def _distribution_axes(metric: str, low: float, high: float) -> tuple[Any, Any]:
    """The time axis from `low` to `high` seconds, and the axis of shares."""
    import altair as alt

    x = alt.X(
        "x:Q",
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
        axis=alt.Axis(title=f"{METRICS[metric].name} [s]", values=log_ticks(low, high), format="~g"),
    )
    y = alt.Y(
        "y:Q",
        scale=alt.Scale(domain=SHARES, nice=False),
        axis=alt.Axis(title=f"share of {METRICS[metric].counted}", format="%", tickCount=6),
    )
    return x, y


def _limit_layers(limits: Sequence[Limit], low: float, high: float, colour: str) -> list[Any]:
    """A line at each limit, with a circle at the share of values that must be left of it."""
    import altair as alt

    layers: list[Any] = []
    for k, limit in enumerate(limits):
        at_s, required_frac = limit.limit_s, limit.percentile_frac
        # In the last 40 % of the axis a text right of the line would run over the chart's edge.
        is_near_end = np.log(at_s / low) > 0.6 * np.log(high / low)
        text = f"{percentile_name(required_frac)} ≤ {show_s(at_s)}"
        # Texts are above each other, the first at the bottom. A row of text is 0.08 of the axis of shares
        # high.
        text_height = 0.06 + 0.08 * k
        layers += [
            alt.Chart(data_of_columns(x=[at_s]))
            .mark_rule(color=colour, strokeDash=[5, 3])
            .encode(x=alt.X("x:Q")),
            alt.Chart(data_of_columns(x=[low], y=[required_frac], x2=[at_s]))
            .mark_rule(color=colour, strokeDash=[1, 3])
            .encode(x=alt.X("x:Q"), y=alt.Y("y:Q"), x2=alt.X2("x2:Q")),
            alt.Chart(data_of_columns(x=[at_s], y=[required_frac]))
            .mark_point(color=colour, filled=False, size=45, strokeWidth=2, opacity=1)
            .encode(x=alt.X("x:Q"), y=alt.Y("y:Q")),
            *text_layers(
                data_of_columns(x=[at_s], y=[text_height], text=[text]),
                align="right" if is_near_end else "left",
                dx=-6 if is_near_end else 6,
            ),
        ]
    return layers


def busy_chart(fleet: Fleet, simulation: Simulation) -> Any | None:
    """Busy share of each pool over time; None if the simulation did not record all steps."""
    import altair as alt

    # A row of `runs` is several engine steps in succession. With `gaps` only parts of a long simulation were
    # recorded, which would leave holes in the curve.
    if not len(simulation.runs) or simulation.gaps is not None:
        return None
    edges_s = load_edges_s(simulation)
    middle_s = (edges_s[:-1] + edges_s[1:]) / 2
    unit, unit_s = time_unit(edges_s[-1] - edges_s[0])
    rows: list[dict[str, Any]] = []
    for pool, workers in fleet.workers_by_pool:
        share = busy_share(simulation, workers, edges_s, ranks=pool.type.dp)
        rows += line_points(middle_s / unit_s, share, pool=pool.name)
    names = [pool.name for pool in fleet.running_pools]
    return (
        alt.Chart(data_of_rows(rows))
        .mark_line(strokeWidth=1.6, interpolate="monotone")
        .encode(
            x=time_axis(unit),
            y=alt.Y(
                "y:Q",
                axis=alt.Axis(title="busy share of the pool", format="%", tickCount=6),
                scale=alt.Scale(domain=SHARES, nice=False),
            ),
            **distinguish_lines("pool", names),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )


def rate_chart(trace: Trace) -> Any:
    """Requests per second in BINS equal parts of a trace."""
    # If all requests arrive at once, the trace's duration is 0. A chart of 1 s then has all in its first
    # part.
    duration_s = trace.duration_s or 1.0
    counts, edges_s = np.histogram(trace.arrival_s - trace.arrival_s[0], BINS, (0.0, duration_s))
    return windows_chart({"requests/s": counts / np.diff(edges_s)}, duration_s / BINS, "requests/s")


def lengths_chart(trace: Trace) -> Any:
    """Histograms of prompts and answers over equal steps of the logarithm of their length."""
    import altair as alt

    lengths = {"prompt": trace.input_tokens, "answer": trace.output_tokens}
    longest = max(int(tokens.max()) for tokens in lengths.values())
    # Lengths are whole numbers, so the shortest bins round to equal edges, which become one.
    edges = np.unique(np.round(np.geomspace(1, longest + 1, LENGTH_BINS + 1)))
    middle = np.sqrt(edges[:-1] * edges[1:])  # The middle of a bin on the logarithmic axis.
    rows: list[dict[str, Any]] = []
    for name, tokens in lengths.items():
        rows += line_points(middle, np.histogram(tokens, edges)[0] / len(tokens), what=name)
    names = list(lengths)
    return (
        alt.Chart(data_of_rows(rows))
        .mark_line(strokeWidth=1.8, interpolate="step")
        .encode(
            x=alt.X(
                "x:Q",
                scale=alt.Scale(type="log", nice=False),
                axis=alt.Axis(title="length [tokens]", format="~s", values=log_ticks(1, longest + 1)),
            ),
            y=alt.Y("y:Q", axis=alt.Axis(title="share of requests", format="%", tickCount=5)),
            **distinguish_lines("what", names),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )


def hits_chart(hit_frac: Mapping[int, float], endless_frac: float) -> Any:
    """Share of the prompts' tokens that hit in a cache of each size [tokens], and in an endless cache."""
    import altair as alt

    sizes = sorted(hit_frac)
    line = (
        alt.Chart(data_of_columns(x=sizes, y=[hit_frac[size] for size in sizes]))
        .mark_line(color=BLUE, strokeWidth=2.2, point=True)
        .encode(
            x=alt.X(
                "x:Q",
                scale=alt.Scale(type="log", nice=False),
                axis=alt.Axis(title="cache [tokens]", format="~s", values=sizes),
            ),
            y=alt.Y(
                "y:Q",
                scale=alt.Scale(domain=[0, 1]),
                axis=alt.Axis(title="share of prompt tokens spared", format="%", tickCount=6),
            ),
        )
    )
    endless = alt.Chart(data_of_columns(y=[endless_frac])).mark_rule(color=VERMILLION, strokeDash=[5, 3])
    text = f"endless cache: {show_percent(endless_frac)}"
    named = text_layers(data_of_columns(x=sizes[:1], y=[endless_frac], text=[text]), align="left", dy=-8)
    return alt.layer(line, endless.encode(y=alt.Y("y:Q")), *named).properties(width=WIDTH, height=HEIGHT)


def windows_chart(
    series: Mapping[str, Sequence[float] | Floats], window_s: float, title: str, *, are_counts: bool = False
) -> Any:
    """A step line per name, with a value per window, from time 0. `are_counts`: values are whole numbers."""
    import altair as alt

    names = list(series)
    rows, unit = _step_line_points(series, window_s)
    return (
        alt.Chart(data_of_rows(rows))
        .mark_line(strokeWidth=1.6, interpolate="step-after")
        .encode(
            x=time_axis(unit),
            y=alt.Y(
                "y:Q", axis=alt.Axis(title=title, tickCount=6, tickMinStep=1 if are_counts else alt.Undefined)
            ),
            **distinguish_lines("what", names),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )


def stacked_chart(
    series: Mapping[str, Sequence[float] | Floats], window_s: float, title: str, among: Sequence[str] = ()
) -> Any:
    """An area per name, stacked in the order of names, with a whole number for every window from time 0.

    To give a name the same colour in several charts, `among` has the names of all these charts.
    """
    import altair as alt

    names = list(series)
    rows, unit = _step_line_points(series, window_s)
    return (
        alt.Chart(data_of_rows([row | {"rank": names.index(row["what"])} for row in rows]))
        .mark_area(interpolate="step-after", stroke=PAPER, strokeWidth=0.6)
        .encode(
            x=time_axis(unit),
            y=alt.Y("y:Q", axis=alt.Axis(title=title, tickCount=6, tickMinStep=1), stack="zero"),
            order=alt.Order("rank:O"),
            color=alt.Color(
                "what:N", sort=names, legend=chart_legend(names, "square"), scale=colour_scale(among or names)
            ),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )


def _step_line_points(
    series: Mapping[str, Sequence[float] | Floats], window_s: float
) -> tuple[list[dict[str, Any]], str]:
    """The points of a step line per name (at the start of each window, and at the end of the last), and their
    unit of time.
    """
    windows = len(next(iter(series.values())))  # All series have the same length; `line_points` checks it.
    unit, unit_s = time_unit(windows * window_s)
    edges = np.linspace(0.0, windows * window_s / unit_s, windows + 1)
    rows: list[dict[str, Any]] = []
    for name, values in series.items():
        rows += line_points(edges, np.append(values, values[-1]), what=name)
    return rows, unit


def bars_chart(bars: Sequence[Bar], unit: str) -> Any:
    """A bar per name, with the name above it. A lower bound has a pale bar with a dashed edge."""
    import altair as alt

    def kind_of(bar: Bar) -> str:
        if bar.is_plan:
            return "the plan"
        return "at least" if bar.at_least else "alternative"

    rows = [
        {
            "label": bar.label,
            "value": round(bar.value, 4),
            "kind": kind_of(bar),
            "text": f"{bar.label}: {'≥ ' if bar.at_least else ''}{bar.value:,.2f}".removesuffix(".00"),
        }
        for bar in bars
    ]
    kinds, shades = ["the plan", "alternative", "at least"], [BLUE, SOFT, GRID]
    base = alt.Chart(data_of_rows(rows)).encode(
        y=alt.Y("label:N", sort=None, axis=None),
        x=alt.X("value:Q", axis=alt.Axis(title=unit, tickCount=6), scale=alt.Scale(zero=True)),
    )
    bar_marks = base.mark_bar(height=12, yOffset=8, stroke=MUTED, strokeWidth=0.8).encode(
        tooltip=[
            alt.Tooltip("label:N", title="title"),
            alt.Tooltip("value:Q", title=unit, format=",.2f"),
            alt.Tooltip("kind:N", title="is"),
        ],
        color=alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=shades), legend=None),
        strokeDash=alt.StrokeDash(
            "kind:N", legend=None, scale=alt.Scale(domain=kinds, range=[[1, 0], [1, 0], [3, 2]])
        ),
    )
    labels = base.mark_text(align="left", dy=-7, color=INK, fontSize=11).encode(
        x=alt.value(2), text=alt.Text("text:N")
    )
    height = BAR_ROW_HEIGHT * max(len(rows), 1)
    return alt.layer(bar_marks, labels).properties(width=WIDE, height=height)


def trade_chart(dots: Mapping[str, tuple[float, float]], chosen: str) -> Any:
    """A dot per fleet at its (USD/h, kW), a square for the chosen fleet. A fleet beats another if neither
    cost nor power is higher, and one is lower. Only the chosen fleet and those that no other beats have their
    name beside the dot.
    """
    import altair as alt

    def is_beaten(name: str) -> bool:
        """Whether another fleet beats this one."""
        cost, power_kw = dots[name]
        return any(
            other_cost <= cost and other_kw <= power_kw and (other_cost, other_kw) != (cost, power_kw)
            for other_cost, other_kw in dots.values()
        )

    def kind_of(name: str) -> str:
        if name == chosen:
            return "the plan"
        return "another" if is_beaten(name) else "not beaten"

    rows = [
        {"x": cost, "y": power_kw, "name": name, "kind": kind_of(name)}
        for name, (cost, power_kw) in dots.items()
    ]
    kinds = ["the plan", "not beaten", "another"]
    # If all GPUs are owned, the highest cost may be 0, but an axis needs a length.
    most_usd_per_h = max(cost for cost, _ in dots.values()) or 1.0
    base = alt.Chart(data_of_rows(rows)).encode(
        x=alt.X(
            "x:Q",
            axis=alt.Axis(title="cost [USD/h]", tickCount=6),
            # The last fifth of the axis is for names.
            scale=alt.Scale(domain=[0, 1.25 * most_usd_per_h], nice=False),
        ),
        y=alt.Y(
            "y:Q", axis=alt.Axis(title="provisioned power [kW]", tickCount=6), scale=alt.Scale(zero=True)
        ),
    )
    dot_marks = base.mark_point(filled=True, size=75, opacity=1).encode(
        color=alt.Color("kind:N", legend=None, scale=alt.Scale(domain=kinds, range=[BLUE, VERMILLION, SOFT])),
        shape=alt.Shape(
            "kind:N", legend=None, scale=alt.Scale(domain=kinds, range=["square", "circle", "circle"])
        ),
        tooltip=[
            alt.Tooltip("name:N", title="title"),
            alt.Tooltip("x:Q", title="cost [USD/h]", format=",.2f"),
            alt.Tooltip("y:Q", title="provisioned power [kW]", format=",.1f"),
        ],
    )
    named = [row for row in rows if row["kind"] != "another"]
    labels = []
    # Labels are right of dots with less than half of the highest cost, and left of the others.
    for align, dx in (("left", 8), ("right", -8)):
        is_left = align == "left"
        side = [row for row in named if (dots[str(row["name"])][0] < 0.5 * most_usd_per_h) == is_left]
        if side:
            columns = {"x": [row["x"] for row in side], "y": [row["y"] for row in side]}
            names = [row["name"] for row in side]
            labels += text_layers(data_of_columns(**columns, text=names), align=align, dx=dx, limit=230)
    return alt.layer(dot_marks, *labels).properties(width=WIDE, height=260)


def staircase_chart(
    corners: Sequence[float],
    values: Sequence[float],
    names: Sequence[str],
    titles: tuple[str, str],
    *,
    starts: Sequence[float],
    requested: tuple[float, float] | None = None,
) -> Any:
    """A frontier: the value as a level line from each start to its corner, with a dot at every corner.

    The x axis has limits, the y axis the value of a plan that keeps them: one plan for all limits between a
    start and its corner. Corners go from the loosest limit to the tightest. `titles` name the axes. A circle
    marks `requested`, the limit and value of the question.
    """
    import altair as alt

    # Rounded as `data_of_columns` rounds the dots, so that levels end at the dots' centres.
    levels = data_of_rows(
        [
            {"x": float(f"{corner:.6g}"), "x2": float(f"{start:.6g}"), "y": float(f"{value:.6g}")}
            for corner, start, value in zip(corners, starts, values, strict=True)
        ]
    )
    shown_limits = [*corners, starts[0], *([requested[0]] if requested else [])]
    # A margin beside the outermost dots; for a single limit, a share of the limit itself.
    low, high = min(shown_limits), max(shown_limits)
    margin = 0.04 * (high - low) or 0.1 * high
    x = alt.X(
        "x:Q",
        axis=alt.Axis(title=titles[0], tickCount=8),
        scale=alt.Scale(domain=[low - margin, high + margin], nice=False),
    )
    y = alt.Y("y:Q", axis=alt.Axis(title=titles[1], tickCount=6), scale=alt.Scale(zero=True))
    layers: list[Any] = [
        alt.Chart(levels).mark_rule(color=BLUE, strokeWidth=2.2).encode(x=x, x2=alt.X2("x2:Q"), y=y),
        alt.Chart(data_of_columns(x=list(corners), y=list(values), text=list(names)))
        .mark_point(color=BLUE, filled=True, size=55, opacity=1)
        .encode(
            x=alt.X("x:Q"),
            y=alt.Y("y:Q"),
            tooltip=[
                alt.Tooltip("text:N", title="title"),
                alt.Tooltip("x:Q", title=titles[0]),
                alt.Tooltip("y:Q", title=titles[1]),
            ],
        ),
        *text_layers(
            data_of_columns(x=list(corners), y=list(values), text=list(names)), align="left", dx=5, dy=-8
        ),
    ]
    if requested is not None:
        layers.append(
            alt.Chart(data_of_columns(x=[requested[0]], y=[requested[1]]))
            .mark_point(color=VERMILLION, filled=False, size=110, strokeWidth=2.2, opacity=1)
            .encode(x=alt.X("x:Q"), y=alt.Y("y:Q"))
        )
    return alt.layer(*layers).properties(width=620, height=300)
