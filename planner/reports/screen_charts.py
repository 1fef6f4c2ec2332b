"""The charts of a plan's first screen (planner/reports/screen.py), drawn by Altair, each with its caption.

Altair is imported inside the functions, because the import takes most of a second.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.documents.robustness_facts import AtWorkers
from planner.domain import KV_BLOCK_TOKENS, Limit, Metric
from planner.reports import screen
from planner.reports.charts import HEIGHT, SHARES, WIDTH, distribution_chart
from planner.reports.curves import (
    class_text,
    cumulative_curve,
    kv_blocks_at,
    limits_by_chart,
    running_and_queued,
)
from planner.reports.drawing import BLUE, GUIDE, INK, MUTED, PURPLE, VERMILLION, CaptionedChart
from planner.reports.encoding import (
    data_of_columns,
    data_of_rows,
    distinguish_lines,
    line_points,
    text_layers,
    time_axis,
    time_unit,
)
from planner.search.evidence.plan import Plan
from planner.simulator.simulation import Simulation
from planner.slo_metrics import METRICS
from planner.units import show_digits, show_s

POINTS = 120  # Points along a time axis.
# The chart of demand has about REQUESTS_PER_BIN requests per interval, because the rate of fewer would be
# mostly chance. FEWEST_BINS and MOST_BINS bound the number of intervals. All three were chosen by hand.
REQUESTS_PER_BIN, FEWEST_BINS, MOST_BINS = 20, 6, POINTS // 2
# On the axis of shares, which end at 1: the top of the chart, and the height of the text above the curves.
TOP_OF_SHARES, TEXT_HEIGHT = 1.16, 1.09
# The names of the charts below, except those of `latency_figures`, which have the names of metrics.
NAMES = ("attainment", "demand", "kv", "waiting", "breaks")


def screen_figures(plan: Plan) -> list[CaptionedChart]:
    """The charts in the order of the page; a chart without data is left out."""
    charts = [attainment(plan), demand(plan), kv_use(plan), waiting(plan), breaks_figure(plan)]
    return [*(chart for chart in charts if chart is not None), *latency_figures(plan)]


def attainment(plan: Plan) -> CaptionedChart | None:
    """The share of values within each limit by the number of workers, with a band over the scenarios."""
    import altair as alt

    robustness = plan.certificate.robustness
    if robustness is None or len(robustness.at_workers) < 2:
        return None
    names = [screen.limit_label(share.limit) for share in robustness.at_workers[0].shares]
    # The band begins at the worst of the scenarios that must be kept (`needed_frac` of
    # robustness_facts.Share) and ends at the best of all.
    rows = [
        {
            "x": row.workers,
            "y": round(share.median_frac, 5),
            "low": round(share.needed_frac, 5),
            "high": round(share.most_frac, 5),
            "name": screen.limit_label(share.limit),
        }
        for row in robustness.at_workers
        for share in row.shares
    ]
    totals = [row.workers for row in robustness.at_workers]
    x = alt.X(
        "x:Q",
        axis=alt.Axis(title="workers", values=totals, format="d"),
        scale=alt.Scale(domain=[totals[0] - 0.4, totals[-1] + 0.4], nice=False),
    )
    y = alt.Y(
        "y:Q",
        axis=alt.Axis(title="share within the limit", format="%", values=[0, 0.25, 0.5, 0.75, 1]),
        scale=alt.Scale(domain=[0, TOP_OF_SHARES], nice=False),
    )
    line_style = distinguish_lines("name", names)
    line = alt.Chart(data_of_rows(rows)).mark_line(strokeWidth=2, point=True).encode(x=x, y=y, **line_style)
    band = (
        alt.Chart(data_of_rows(rows))
        .mark_area(opacity=0.18, style=GUIDE)
        .encode(x=alt.X("x:Q"), y=alt.Y("low:Q", title=""), y2=alt.Y2("high:Q"), color=line_style["color"])
    )
    required_shares = [
        alt.Chart(data_of_columns(y=[share.limit.percentile_frac]))
        .mark_rule(color=MUTED, strokeDash=[2, 3])
        .encode(y=alt.Y("y:Q"))
        for share in robustness.at_workers[0].shares
    ]
    # Without scenarios `kept` is 0 or 1, of one simulation, on the traffic as it is written.
    scenario_count = max(robustness.scenario_count, 1)
    kept_labels = text_layers(
        data_of_columns(
            x=totals,
            y=[TEXT_HEIGHT] * len(totals),
            text=[f"{row.kept} of {scenario_count}" for row in robustness.at_workers],
        ),
        align="center",
    )
    plan_at = alt.Chart(data_of_columns(x=[plan.fleet.workers])).mark_rule(
        color=VERMILLION, strokeDash=[5, 3]
    )
    drawn = alt.layer(line, band, *required_shares, plan_at.encode(x=alt.X("x:Q")), *kept_labels)
    return CaptionedChart(
        "attainment",
        drawn.properties(width=WIDTH, height=HEIGHT),
        _attainment_caption(robustness.at_workers, plan),
    )


def _attainment_caption(rows: Sequence[AtWorkers], plan: Plan) -> str:
    """The caption for fleets of growing numbers of workers; with several pools it lists their counts."""
    robustness = plan.certificate.robustness
    assert robustness is not None
    workers = ""
    if len(robustness.pools) > 1:
        counts = ", ".join(" + ".join(map(str, row.counts)) for row in rows)
        workers = f" ({' + '.join(robustness.pools)}: {counts})"
    text = f"SLO attainment by number of workers{workers}. "
    rules = "Dotted: the shares that must be within the limit; dashed: the plan."
    if not robustness.scenario_count:
        return f"{text}On the traffic as it is written. {rules}"
    required_scenarios = robustness.scenario_count - robustness.may_miss
    return text + (
        f"Above: in how many of the test's first {robustness.scenario_count} scenarios the SLO is kept. "
        f"Line: the middle scenario; the band holds the best {required_scenarios}. {rules}"
    )


def demand(plan: Plan) -> CaptionedChart:
    """The rate of arriving requests over time, below a line at the rate to which the plan holds."""
    import altair as alt

    trace = plan.trace
    duration_s = trace.duration_s or 1.0  # A trace of one request has no duration.
    bins = int(np.clip(len(trace) // REQUESTS_PER_BIN, FEWEST_BINS, MOST_BINS))
    counts, edges_s = np.histogram(trace.arrival_s - trace.arrival_s[0], bins, (0.0, duration_s))
    unit, factor = time_unit(duration_s)
    rate = counts / np.diff(edges_s)
    headroom = screen.headroom_of(plan)
    holds_rps = None if headroom is None else trace.rate_rps * (1 + headroom.traffic_frac)
    # The chart ends above the highest line, to leave room for the line's text.
    top = 1.2 * max(float(rate.max()), holds_rps or 0.0)
    line = (
        alt.Chart(data_of_columns(x=edges_s / factor, y=np.append(rate, rate[-1])))
        .mark_line(color=BLUE, strokeWidth=1.6, interpolate="step-after")
        .encode(
            x=time_axis(unit, 6),
            y=alt.Y(
                "y:Q",
                axis=alt.Axis(title="requests/s", tickCount=5, format=",~f"),
                scale=alt.Scale(domain=[0, top], nice=False),
            ),
        )
    )
    mean = (
        alt.Chart(data_of_columns(y=[trace.rate_rps]))
        .mark_rule(color=MUTED, strokeDash=[2, 3])
        .encode(y=alt.Y("y:Q"))
    )
    layers = [line, mean]
    title = "Demand" if holds_rps is None else "Demand under capacity"
    caption = (
        f"{title}: requests that arrive, {show_digits(trace.rate_rps, 3)} per second on average (dotted)"
    )
    if holds_rps is not None:
        layers += _level_line(holds_rps, f"holds to {show_digits(holds_rps, 3)} on average")
        caption += "; dashed: the average to which it may grow, the same requests in less time"
    caption += "."
    return CaptionedChart("demand", alt.layer(*layers).properties(width=WIDTH, height=HEIGHT), caption)


def _level_line(y: float, text: str) -> list[Any]:
    """The layers of a horizontal dashed line with a text above it."""
    import altair as alt

    rule = alt.Chart(data_of_columns(y=[y])).mark_rule(color=VERMILLION, strokeDash=[5, 3])
    rule = rule.encode(y=alt.Y("y:Q"))
    return [rule, *text_layers(data_of_columns(x=[0.0], y=[y], text=[text]), align="left", dx=4, dy=-7)]


def kv_use(plan: Plan) -> CaptionedChart | None:
    """How full the KV cache of each pool is over time; None unless the simulation recorded all its steps."""
    simulation = plan.simulation
    # With `gaps` only parts of a long simulation were recorded, so the curve would have holes.
    if not len(simulation.runs) or simulation.gaps is not None:
        return None
    at_s, unit, factor = _times_and_unit(plan)
    series = {}
    for pool, workers in plan.fleet.workers_by_pool:
        used_tokens = kv_blocks_at(simulation, workers, at_s, ranks=pool.type.dp) * KV_BLOCK_TOKENS
        series[pool.name] = used_tokens / (pool.count * pool.type.dp * pool.type.kv_tokens)
    drawn = _lines(
        {name: (at_s / factor, share) for name, share in series.items()}, unit, "KV cache in use", "%"
    )
    return CaptionedChart(
        "kv", drawn, "KV use: share of each pool's KV cache that holds tokens; at 100 % requests wait."
    )


def waiting(plan: Plan) -> CaptionedChart:
    """The number of requests in batches over time, and the number of those that wait for a place in one."""
    at_s, unit, factor = _times_and_unit(plan)
    running, queued = running_and_queued(plan.simulation, at_s)
    series = {"running": (at_s / factor, running), "waiting": (at_s / factor, queued)}
    drawn = _lines(series, unit, "requests", ",~f")
    return CaptionedChart("waiting", drawn, "Queue: requests in a batch, and requests that wait for one.")


def _times_and_unit(plan: Plan) -> tuple[Any, str, float]:
    """Evenly spaced times [s] of the simulation, the unit of a time axis, and the seconds in one unit."""
    start_s = float(plan.simulation.arrival_s[0])
    duration_s = max(plan.simulation.end_s - start_s, 1e-3)  # An axis needs some length.
    return start_s + np.linspace(0.0, duration_s, POINTS), *time_unit(duration_s)


def _lines(series: dict[str, tuple[Any, Any]], unit: str, title: str, number_format: str) -> Any:
    """A step line for each name, through its points (x, y). With the format "%" the y axis ends at 1."""
    import altair as alt

    names = list(series)
    rows: list[dict[str, Any]] = []
    for name, (x, y) in series.items():
        rows += line_points(x, y, what=name)
    scale = alt.Scale(domain=SHARES, nice=False) if number_format == "%" else alt.Undefined
    return (
        alt.Chart(data_of_rows(rows))
        .mark_line(strokeWidth=1.6, interpolate="step-after")
        .encode(
            x=time_axis(unit, 6),
            y=alt.Y("y:Q", axis=alt.Axis(title=title, format=number_format, tickCount=5), scale=scale),
            **distinguish_lines("what", names),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )


def breaks_figure(plan: Plan) -> CaptionedChart | None:
    """The chart of what breaks the plan first; None if nothing is known to break it."""
    breaks = screen.find_breaks(plan)
    caption = (
        "What breaks it, the nearest first: to how much more of each the plan holds, one at a time, on the "
        "traffic as it is written."
    )
    return CaptionedChart("breaks", breaks_chart(breaks), caption) if breaks else None


def breaks_chart(values: Sequence[screen.Breaks]) -> Any:
    """A bar for each row of `values`, as long as the increase that the plan stands, below its text."""
    import altair as alt

    rows = [
        {
            "label": each.label,
            "value": round(each.frac, 4),
            "kind": each.kind,
            "text": f"{each.label}: {_price_text(each)}{each.text}",
        }
        for each in values
    ]
    kinds = ["slo", "loss", "price"]  # In the order of the colours below.
    base = alt.Chart(data_of_rows(rows)).encode(
        y=alt.Y("label:N", sort=None, axis=None),
        x=alt.X(
            "value:Q",
            axis=alt.Axis(title="more than planned", format="%", tickCount=6),
            # No larger increase is simulated (HEADROOM_MOST_FRAC) or, of prices, searched for.
            scale=alt.Scale(domain=[0, 1.0], nice=False),
        ),
    )
    drawn = base.mark_bar(height=9, yOffset=9, strokeWidth=0.8).encode(
        color=alt.Color(
            "kind:N", legend=None, scale=alt.Scale(domain=kinds, range=[BLUE, VERMILLION, PURPLE])
        ),
        tooltip=[
            alt.Tooltip("label:N", title="title"),
            alt.Tooltip("value:Q", title="holds to", format="+.1%"),
        ],
    )
    text = base.mark_text(align="left", dy=-5, color=INK, fontSize=11).encode(
        x=alt.value(2), text=alt.Text("text:N")
    )
    return alt.layer(drawn, text).properties(width=WIDTH, height=34 * len(rows))


def _price_text(each: screen.Breaks) -> str:
    """How far a price may rise, "+12 %, "; empty for other kinds of rows, whose own text says how far."""
    return f"{100 * each.frac:+.0f} %, " if each.kind == "price" else ""


def latency_figures(plan: Plan) -> list[CaptionedChart]:
    """The distribution of each metric that the SLO limits, with the limits; a chart per class of requests."""
    charts = []
    for metric in dict.fromkeys(limit.metric for limit in plan.slo.limits):
        for name, limits in limits_by_chart(plan.slo.limits, metric).items():
            shown = " and ".join(f"{screen.limit_label(limit)} ≤ {show_s(limit.limit_s)}" for limit in limits)
            text = f"; if {shown} is kept, the curve passes above the circle"
            charts.append(latency_figure(plan.simulation, metric, limits, text, name))
    return [chart for chart in charts if chart is not None]


def latency_figure(
    simulation: Simulation, metric: Metric, limits: Sequence[Limit], text: str, name: str
) -> CaptionedChart | None:
    """The distribution of a latency over the class of its limits, or over all requests if they have none.
    `text` is a part of the caption. None for fewer than two different values.
    """
    curve = cumulative_curve(simulation, metric, limits)
    if len(curve.value_s) < 2:
        return None
    thinned = f" (one run of engine steps in {curve.every})" if curve.every > 1 else ""
    caption = f"Distribution of the {METRICS[metric].name}{class_text(limits)}{text}{thinned}."
    return CaptionedChart(name, distribution_chart(curve, metric, limits), caption)
