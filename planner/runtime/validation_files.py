"""Renders a validation (analysis.py) as files: report.html, validation.json, requests.csv as measured, and
the fleet and catalog with corrected step times. Altair is imported inside functions: it takes most of a
second.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from planner.calibrate.fitting import fit_yaml
from planner.documents.fleet_file import fleet_document
from planner.domain import Metric
from planner.files.checked_files import to_yaml
from planner.reports import charts
from planner.reports.curves import POINTS as CURVE_POINTS
from planner.reports.drawing import BLUE, GUIDE, VERMILLION, CaptionedChart
from planner.reports.encoding import Floats, data_of_rows, line_points
from planner.reports.output import requests_csv
from planner.reports.page import charts_html, figures_html, list_html, page_html, section_html, table_html
from planner.runtime.analysis import Validation
from planner.runtime.prediction_errors import ComparedRun, MeasuredComparison
from planner.runtime.step_fits import with_corrections
from planner.runtime.validation_document import (
    STATUSES,
    engine_rows,
    error_rows,
    pool_of_worker,
    validation_document,
    verdict_text,
)
from planner.slo_metrics import METRICS, verdict_word
from planner.units import show_error, show_s, show_share

POINTS = 1500  # A scatter chart has at most this many points, so that the page stays small.
# If the client sent a request later than this after its time, the page says that it did not keep up.
LATE_S = 0.05


def render_files(validation: Validation) -> dict[str, str]:
    """The files that `plan validate -o DIR` writes besides the journal and the logs: path -> content."""
    setup = validation.setup
    files = {
        "validation.json": json.dumps(validation_document(validation), indent=2, allow_nan=False) + "\n",
        "requests.csv": requests_csv(validation.comparison.measured.requests),
        "report.html": _page_html(validation),
    }
    has_corrections = bool(validation.corrections)
    fleets = {
        "corrected.yaml": with_corrections(setup.fleet, validation.corrections) if has_corrections else None,
        "as-run.yaml": validation.as_run,
    }
    for name, fleet in fleets.items():
        if fleet is not None:
            files[name] = to_yaml(fleet_document(fleet) | {"max_model_len": setup.max_model_len})
    for name, fit in validation.fits.items():
        files[f"catalog/latency/{name}"] = fit_yaml(fit, command="plan validate")
    return files


def _page_html(validation: Validation) -> str:
    fleet, values = validation.setup.fleet, validation_document(validation)
    lead = [verdict_text(validation), *values["notes"]]
    if values["client_late_s"] > LATE_S:
        late = show_s(values["client_late_s"])
        lead.append(f"Mind: the client was up to {late} late; it could not keep up.")
    planned_kv_tokens = {pool.name: pool.type.kv_tokens for pool in fleet.running_pools}
    body = [
        f"<header><p class=eyebrow>Validation · {escape(fleet.llm.name)}</p>",
        f"<h1>{_page_title(validation.comparison)}</h1>",
        *(f"<p class=lead>{escape(text)}</p>" for text in lead),
        "</header>",
        _headline_html(values),
        section_html(
            "Predicted and measured",
            _table_html(error_rows(validation), "Predicted and measured", range(1, 7)) + _errors_note(values),
        ),
        section_html("Distributions", charts_html(_distribution_charts(validation))),
        section_html("The SLO", _slo_html(validation)),
        section_html("Request by request", _requests_html(validation, values)),
        section_html("Step by step", _steps_html(validation)),
        *([section_html("The endpoint", _endpoint_html(validation, values))] if values["endpoint"] else []),
        section_html("Engines", _engines_html(values, planned_kv_tokens)),
    ]
    footer = (
        f"Measured on {values['machine'].get('device', 'a machine that was not noted')}; requests.csv holds "
        "every request as measured, validation.json everything on this page, corrected.yaml the fleet with "
        "corrected step times, catalog/ these step times for plan --catalog."
    )
    return page_html(f"Validation of {fleet.llm.name}", "\n".join(body), footer)


def _page_title(comparison: MeasuredComparison) -> str:
    """The page's heading: whether the prediction agrees with what was measured."""
    if not comparison.judged_rows:
        return "Nothing could be compared"
    return "The prediction agrees" if comparison.agrees else "The prediction is off"


def _table_html(lines: Sequence[Mapping[str, Any]], caption: str, numeric: Iterable[int] = ()) -> str:
    """A table with a column for each key of the lines; `numeric` are the numbers of columns aligned right."""
    if not lines:
        return "<p class=note>None.</p>"
    # A line may lack some keys, such as a correction.
    head = list(dict.fromkeys(key for line in lines for key in line))
    cells = [[str(line.get(key, "-")) for key in head] for line in lines]
    return table_html(head, cells, caption=caption, numeric=numeric)


def _headline_html(values: Mapping[str, Any]) -> str:
    """The large figures at the top of the page, from the values of validation.json."""
    lost = values["requests"] - sum(values[status] for status in STATUSES)
    statuses = (
        f"{values['finished']} finished, {values['rejected']} rejected, {values['failed']} failed, "
        f"{values['unsent']} unsent, {lost} lost"
    )
    attainment, attainment_note = None, "no SLO was given"
    if values["slo"]:
        attainment = values["attainment"]["measured"]
        attainment_note = (
            f"predicted {_share_text(values['attainment']['predicted'])}, by the client's clock "
            f"{_share_text(values['attainment']['client'])}"
        )
    clock = "client" if values["times"] == "client" else "engine"
    outside = _seconds_text(values["outside_engine_s"]["p50"])
    rows = [  # A name, a value, and what stands below it.
        ("Requests", str(values["requests"]), statuses),
        ("Attainment", _share_text(attainment), attainment_note),
        ("Times", clock, f"taken from the {values['times']}"),
        ("Outside the engine", outside, "median from the client's send to the engine's receipt"),
    ]
    hits = values["prefix_hits"]
    if hits["measured_frac"] is not None:
        rows.append(
            (
                "Prefix hits",
                _share_text(hits["measured_frac"]),
                f"predicted {_share_text(hits['predicted_frac'])}",
            )
        )
    return figures_html(rows)


def _share_text(frac: float | None) -> str:
    return "-" if frac is None else show_share(frac)


def _seconds_text(seconds: float | None) -> str:
    return show_s(math.nan if seconds is None else seconds)


def _errors_note(values: Mapping[str, Any]) -> str:
    """A note below the table of errors: which requests and which clock they are of."""
    return (
        f"<p class=note>{values['compared']} requests that arrived after the warm-up and finished on both "
        "sides. Error: predicted over measured, minus one. Without interruptions (engines on a CPU): on the "
        "engines' own clocks, which stand still while the machine works for others; each worker by itself. "
        "Sessions: from the first request's arrival to the last one's end, and (served) the part of that in "
        "which a request was with the engines; what router and client take between turns is measured only. "
        "Corrected fits follow this run's own steps: what is left is not step times.</p>"
    )


def all_figures(validation: Validation) -> list[CaptionedChart]:
    """All charts of the page, for pictures."""
    return [*_distribution_charts(validation), *_scatter_charts(validation), *_step_charts(validation)]


def _distribution_charts(validation: Validation) -> list[CaptionedChart]:
    """A chart per metric with the measured and the predicted distribution, if both have values."""
    comparison = validation.comparison
    sides = {"measured": comparison.measured, "predicted": comparison.predicted}
    captioned = []
    for metric in (key for key, row in METRICS.items() if not row.is_of_agents):
        curves = {name: _cumulative_curve(run, metric, comparison) for name, run in sides.items()}
        if all(len(curve[0]) for curve in curves.values()):
            name = METRICS[metric].name
            caption = f"Distribution of the {name}, as measured and as predicted."
            captioned.append(CaptionedChart(metric, _curves_chart(curves, name), caption))
    return captioned


def _cumulative_curve(
    run: ComparedRun, metric: Metric, comparison: MeasuredComparison
) -> tuple[Floats, Floats]:
    """The values of a run, rising [s], with the share up to each, thinned to CURVE_POINTS."""
    values, weights = run.values_s(metric, comparison.chosen)
    order = np.argsort(values)
    share = np.cumsum(np.ones(len(values)) if weights is None else weights[order])
    picked = np.unique(np.linspace(0, len(values) - 1, min(len(values), CURVE_POINTS)).astype(int))
    return values[order][picked], share[picked] / share[-1] if len(share) else share


def _curves_chart(curves: Mapping[str, tuple[Floats, Floats]], title: str) -> Any:
    """The cumulative distributions of several samples, by name: values [s] and shares at or below them."""
    import altair as alt

    names = list(curves)
    lines = []
    for name, (values, share) in curves.items():
        lines += line_points(np.maximum(values, 1e-6), share, what=name)  # The axis is logarithmic.
    colours = alt.Scale(domain=names, range=[VERMILLION, BLUE])
    dashes = alt.Scale(domain=names, range=[[1, 0], [4, 2]])
    legend = alt.Legend(title=None, orient="top", symbolType="stroke")
    return (
        alt.Chart(data_of_rows(lines))
        .mark_line(strokeWidth=1.8, interpolate="step-after")
        .encode(
            x=alt.X(
                "x:Q",
                scale=alt.Scale(type="log", nice=False),
                axis=alt.Axis(title=f"{title} [s]", format="~g"),
            ),
            y=alt.Y(
                "y:Q", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(title="share", format="%", tickCount=6)
            ),
            color=alt.Color("what:N", scale=colours, legend=legend),
            strokeDash=alt.StrokeDash("what:N", scale=dashes, legend=legend),
        )
        .properties(width=charts.WIDTH, height=charts.HEIGHT)
    )


def _scatter_charts(validation: Validation) -> list[CaptionedChart]:
    """Charts of predicted against measured TTFT and E2E, a point for each request."""
    captioned = []
    metrics: tuple[Metric, ...] = ("ttft", "e2e")
    for metric in metrics:
        predicted, measured = validation.comparison.scatter(metric)
        if len(measured):
            name = METRICS[metric].name
            caption = f"The {name} of each request: on the line, prediction and measurement are equal."
            captioned.append(
                CaptionedChart(f"{metric}-by-request", _scatter_chart(measured, predicted, name), caption)
            )
    return captioned


def _requests_html(validation: Validation, values: Mapping[str, Any]) -> str:
    """The section on errors request by request, from the values of validation.json."""
    lines = [
        {
            "metric": metric,
            "median error": _share_text(errors["median_error_frac"]),
            "within 20 %": _share_text(errors["within_20_percent_frac"]),
        }
        for metric, errors in values["scatter"].items()
    ]
    errors_table = _table_html(lines, "Errors request by request", (1, 2))
    return f"{charts_html(_scatter_charts(validation))}<div class=below>{errors_table}</div>"


def _scatter_chart(measured: Floats, predicted: Floats, title: str) -> Any:
    """A logarithmic scatter chart of predicted over measured times, with the line on which they are equal."""
    import altair as alt

    picked = np.unique(np.linspace(0, len(measured) - 1, min(len(measured), POINTS)).astype(int))
    positive = (measured[picked] > 0) & (predicted[picked] > 0)
    x, y = measured[picked][positive], predicted[picked][positive]
    low, high = float(min(x.min(), y.min())) / 1.1, float(max(x.max(), y.max())) * 1.1
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    dots = (
        alt.Chart(data_of_rows(line_points(x, y)))
        .mark_circle(color=BLUE, size=14, opacity=0.5)
        .encode(
            x=alt.X("x:Q", scale=scale, axis=alt.Axis(title=f"{title}, measured [s]", format="~g")),
            y=alt.Y("y:Q", scale=scale, axis=alt.Axis(title="predicted [s]", format="~g")),
        )
    )
    diagonal = (
        alt.Chart(data_of_rows([{"x": low, "y": low}, {"x": high, "y": high}]))
        .mark_line(color=VERMILLION, strokeDash=[5, 3], style=GUIDE)
        .encode(x=alt.X("x:Q"), y=alt.Y("y:Q"))
    )
    return alt.layer(dots, diagonal).properties(width=charts.HEIGHT * 1.3, height=charts.HEIGHT * 1.3)


def _slo_html(validation: Validation) -> str:
    """The section on the SLO: each line as predicted and as measured."""
    comparison = validation.comparison
    if not comparison.measured_verdict.lines:
        return "<p class=note>No SLO was given.</p>"
    lines = [
        {
            "metric": predicted.limit.name,
            "limit": show_s(predicted.limit.limit_s),
            "predicted within": _share_text(predicted.kept_frac),
            "measured within": _share_text(measured.kept_frac),
            "measured": verdict_word(measured.holds, measured.judged).replace("missed", "MISSED"),
        }
        for predicted, measured in zip(
            comparison.predicted_verdict.lines, comparison.measured_verdict.lines, strict=True
        )
    ]
    return _table_html(lines, "Limits", (1, 2, 3))


def _steps_html(validation: Validation) -> str:
    """The section on step times: predicted and measured seconds of each pool's steps."""
    if not validation.steps:
        return "<p class=note>The engines kept no step log.</p>"
    corrections = {correction.pool: correction for correction in validation.corrections}
    lines = []
    for steps in validation.steps:
        line = {
            "pool": steps.pool,
            "steps": f"{len(steps.table.y):,}",
            "seconds predicted": show_error(steps.bias_frac, None),
        }
        line |= {
            f"mean error, {kind}": _share_text(steps.errors.get(kind))
            for kind in ("prefill", "decode", "mixed")
        }
        if correction := corrections.get(steps.pool):
            fit = correction.calibrated
            before_frac, after_frac = correction.held_out_before_frac, correction.held_out_after_frac
            line |= {
                "correction": f"compute x{fit.compute:.3g}, bandwidth x{fit.bandwidth:.3g}, "
                f"host {1e3 * fit.host_s:+.3g} ms",
                "held out": f"{_share_text(before_frac)} to {_share_text(after_frac)}",
            }
        lines.append(line)
    note = (
        "<p class=note>Corrections follow the medians of steps that are alike. Held out: mean error on such "
        "medians of the second half of the run, with the fit as it was and with one corrected by the first "
        "half.</p>"
    )
    errors = _table_html(lines, "Errors step by step")
    return f"{charts_html(_step_charts(validation))}<div class=below>{errors}</div>{note}"


def _step_charts(validation: Validation) -> list[CaptionedChart]:
    """A chart for each pool of predicted against measured step times."""
    return [
        CaptionedChart(
            f"steps-{k}",
            _scatter_chart(steps.table.y, steps.predicted_s, f"step of {steps.pool}"),
            f"Each engine step of {steps.pool}: on the line, prediction and measurement are equal.",
        )
        for k, steps in enumerate(validation.steps)
    ]


def _endpoint_html(validation: Validation, values: Mapping[str, Any]) -> str:
    """The section on an endpoint that others run: what was sent, and what its engines report."""
    lines = [
        {"what": name.replace("_", " "), "value": "-" if value is None else str(value)}
        for name, value in values["endpoint"].items()
        if not isinstance(value, dict)
    ]

    engine_lines = [
        {
            "metric": row["metric"],
            "mean, engines": _seconds_text(row["engine_mean_s"]),
            "predicted": _seconds_text(row["predicted_mean_s"]),
            "client": _seconds_text(row["client_mean_s"]),
            "p90 of the engines at most": _seconds_text(row.get("engine_p90_at_most_s")),
        }
        for row in engine_rows(validation)
    ]
    note = "<p class=note>No metrics of the engines were requested (--prometheus).</p>"
    if (times := validation.engine_times) is not None:
        note = (
            f"<p class=note>The engines counted {times.requests:,} requests, whoever sent them, "
            f"and {times.preemptions:,} preemptions.</p>"
        )
    engine_table = _table_html(engine_lines, "By the engines' own clock", range(1, 5)) if engine_lines else ""
    return f"{_table_html(lines, 'How it was asked')}<div class=below>{engine_table}{note}</div>"


def _engines_html(values: Mapping[str, Any], planned_kv_tokens: Mapping[str, int]) -> str:
    """The engines of each part of the run. `planned_kv_tokens` are those of a worker by the plan, by pool."""
    lines, events = [], []
    for part in values["parts"]:
        for engine in part["engines"]:
            planned = planned_kv_tokens[pool_of_worker(engine["worker"])]
            lines.append({"part": str(part["part"]), **_engine_line(engine, planned)})
        events += [f"part {part['part']}, {at_s:.1f} s: {name} {what}" for at_s, name, what in part["events"]]
    reasons = [f"{count} x {reason}" for reason, count in values["reasons"].items()]
    loads = [load for part in values["parts"] for load in part["load_average"]]
    stolen = ", ".join(f"{100 * frac:.0f} % of {name}'s" for name, frac in values["stolen_frac"].items())
    note = "<p class=note>"
    note += f"Load average of the machine: {min(loads):.1f} to {max(loads):.1f}." if loads else "Not noted."
    note += f" Others ran in {escape(stolen)} steps.</p>" if stolen else "</p>"
    html = _table_html(lines, "Engines", range(2, 10)) + note
    for title, items in (("Events", events), ("Requests that did not finish", reasons)):
        if items:
            html += f"<h3>{title}</h3>{list_html(items)}"
    return html


def _engine_line(engine: Mapping[str, Any], planned_kv_tokens: int) -> dict[str, str]:
    """The cells of one engine: what it counted, beside the KV tokens that the plan gives it."""
    names = {
        "worker": "worker",
        "kv_tokens": "KV tokens",
        "prompt_tokens": "prompt tokens",
        "generation_tokens": "output tokens",
        "transferred_tokens": "KV tokens received",
        "prefix_cache_hits": "prefix tokens found",
        "num_preemptions": "preemptions",
    }
    values = {text: engine.get(key, "-") for key, text in names.items()}
    line = {text: value if isinstance(value, str) else f"{value:,.0f}" for text, value in values.items()}
    return line | {"KV tokens planned": f"{planned_kv_tokens:,}"}
