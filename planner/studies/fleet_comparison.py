"""Compares several fleets, or policies, on the same requests: as a table, charts of TTFT and TBT, and JSON.

Every variant is simulated to the end on the same requests, so all differences come from the variants. With an
SLO, each variant is also simulated in the same scenarios, with more traffic and with longer steps
(fleet_safety.py). The cost per million output tokens is the bill over the time that the traffic lasts, as in
a plan (`served_s`), divided by the output tokens of the finished requests. A fleet with a growing backlog is
still busy after that time, so its bill is counted to the last token. Without an SLO every bill is counted to
the last token, because only an SLO tells whether a backlog grows.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from planner.documents.fleet_file import fleet_document
from planner.documents.slo import slo_document
from planner.domain import Limit, Metric, Slo
from planner.errors import InputError
from planner.files.checked_files import csv_text
from planner.fleet import Fleet
from planner.parallel.executors import SERIAL, Executor, run_items
from planner.reports import charts, output
from planner.reports.curves import Curve, class_text, cumulative_curve, limits_by_chart
from planner.reports.drawing import CaptionedChart
from planner.reports.fact_sentences import backlog_text, more_text
from planner.reports.page import charts_html, page_html, table_html
from planner.reports.simulated_run import simulate_recorded
from planner.reports.words import describe_fleet, idle_gpus_text, spot_caveat
from planner.search.evidence.plan import served_s
from planner.search.oracle.scenarios import Scenarios
from planner.search.problem.bill import bill_fleet
from planner.slo_metrics import METRICS, metric_label, verdict_word
from planner.studies.fleet_safety import FleetSafety, measure_safety
from planner.traffic.trace import Trace
from planner.units import HOUR_S, show_digits, show_s, show_share

MOST_CURVES = 8  # A chart has at most this many curves, because more colours are hard to tell apart.
# The files of `plan compare -o DIR`.
NAMES = ("compare.html", "compare.csv", "compare.json")
CHARTED_METRICS: tuple[Metric, ...] = ("ttft", "tbt")  # The metrics of which a chart is drawn.
# The names of charts that an earlier run may have left in the folder; this run removes those that it does not
# write.
OUTDATED = tuple(f"charts/{metric}.png" for metric in CHARTED_METRICS)
PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Variant:
    """A fleet with its policies, under the name that it has in the table and in charts."""

    name: str
    fleet: Fleet


@dataclass(frozen=True, slots=True, eq=False)
class VariantRow:
    """A variant with the results of its simulations; `curves` are its distributions of TTFT and TBT, by the
    names of their charts (`limits_by_chart`).

    `billed_s` are the seconds for which the fleet is paid, `output_tokens` those of finished requests.
    """

    variant: Variant
    summary: output.Document
    curves: dict[str, Curve]
    billed_s: float
    output_tokens: int
    # How far the variant is from missing the SLO; None without an SLO, and where no scenario was simulated.
    safety: FleetSafety | None = None

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """The bill over `billed_s` per million output tokens; None if no request finished."""
        if not self.output_tokens:
            return None
        return self.cost_usd_per_h / HOUR_S * self.billed_s / self.output_tokens * 1e6

    @property
    def cost_usd_per_h(self) -> float:
        """The hourly bill, which counts whole nodes where GPUs are sold by the node."""
        return bill_fleet(self.variant.fleet).usd_per_h

    def cells(self) -> dict[str, Any]:
        """One line of compare.csv. A latency is None if no request has one, a verdict if there is no SLO."""
        fleet, summary = self.variant.fleet, self.summary
        slo_results, power = summary["slo"] or {}, summary["power"] or {}
        is_steady = slo_results.get("is_steady")
        return {
            "variant": self.variant.name,
            "llm": fleet.llm.name,
            "cost_usd_per_h": output.plain_value(self.cost_usd_per_h),
            "by_gpu_usd_per_h": output.plain_value(fleet.price_usd_per_h),
            "workers": fleet.workers,
            "gpus": fleet.gpus,
            "verdict": verdict_word(slo_results["holds"], slo_results["is_judged"]) if slo_results else None,
            "attainment_frac": slo_results.get("attainment_frac"),
            "steady": {True: "yes", False: "no", None: None}[is_steady],
            **self._safety_cells(),
            **{
                f"{metric}_{percentile}_s": (summary[f"{metric}_s"] or {}).get(percentile)
                for metric in METRICS
                for percentile in PERCENTILES
            },
            "usd_per_million_output_tokens": output.plain_value(self.usd_per_million_output_tokens),
            "provisioned_w": output.plain_value(fleet.power_w),
            "expected_w": power.get("expected_w"),
            "finished": summary["finished"],
            "rejected": summary["rejected"],
            "unfinished": summary["unfinished"],
            "preemptions": summary["preemptions"],
        }

    def _safety_cells(self) -> dict[str, Any]:
        """In how many scenarios the SLO is kept, the headroom, and the limits that are missed first."""
        safety = self.safety
        kept_in, measured = (None, None) if safety is None else (safety.kept_in, safety.measured_headroom)
        headroom = None if measured is None else measured.headroom
        missed_first: tuple[Limit, ...] = ()
        if measured is not None and headroom is not None:
            # The smaller headroom is used up first.
            breaks_by_traffic = headroom.traffic_frac <= headroom.steps_frac
            missed_first = measured.by_traffic if breaks_by_traffic else measured.by_steps
        return {
            "kept": None if kept_in is None else kept_in.kept,
            "scenario_count": None if kept_in is None else kept_in.scenario_count,
            "holds_to_traffic_frac": None if headroom is None else output.plain_value(headroom.traffic_frac),
            "holds_to_steps_frac": None if headroom is None else output.plain_value(headroom.steps_frac),
            "breaks_first": " or ".join(limit.name for limit in missed_first) or None,
        }


@dataclass(frozen=True, slots=True, eq=False)
class FleetComparison:
    """The rows of all variants on `requests`. `seed` drew the requests; routing policies draw with it too."""

    requests: Trace
    slo: Slo | None
    seed: int
    rows: tuple[VariantRow, ...]

    @property
    def notes(self) -> list[str]:
        """Remarks on the table: curves left out, lost requests, growing backlogs, spot and idle GPUs,
        different LLMs.
        """
        notes = []
        if len(self.rows) > MOST_CURVES:
            notes.append(
                f"the picture shows the first {MOST_CURVES} of {len(self.rows)} variants, the table all"
            )
        for row in self.rows:
            lost = {kind: row.summary[kind] for kind in ("rejected", "unfinished") if row.summary[kind]}
            if lost:
                counts = " and ".join(f"{count} {kind}" for kind, count in lost.items())
                notes.append(
                    f"{row.variant.name}: {counts} of {len(self.requests)} requests; they count as "
                    "infinitely late, so its curves may end below 100 %"
                )
            if (slo_results := row.summary["slo"]) and not slo_results["is_steady"]:
                text = backlog_text(slo_results["patient_frac"], slo_results["patience_s"])
                notes.append(f"{row.variant.name}: {text}")
            if spot := spot_caveat(row.variant.fleet):
                notes.append(f"{row.variant.name}: {spot}")
            if idle := idle_gpus_text(bill_fleet(row.variant.fleet), is_of_fleet_file=True):
                notes.append(f"{row.variant.name}: {idle}")
        if len({row.variant.fleet.llm.name for row in self.rows}) > 1:
            notes.append("the variants serve different LLMs: equal tokens are not equal work")
        return notes


def compare_fleets(
    variants: Sequence[Variant],
    requests: Trace,
    slo: Slo | None = None,
    *,
    seed: int = 0,
    executor: Executor | None = SERIAL,
    scenarios: Scenarios | None = None,
) -> FleetComparison:
    """Simulate every variant on `requests`, and in some of `scenarios` if these are given.

    `seed`, which drew the requests, is also the seed of routing policies that draw. Raises InputError if
    there is no variant, or if two have the same name. If `executor` is None, that of `working_on` runs the
    simulations (parallel/executors.py).
    """
    names = [variant.name for variant in variants]
    if not names:
        raise InputError("compare: expected at least one fleet")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"compare: two variants are named {twice[0]!r}; name a fleet with --fleet NAME=FILE")
    rows = run_items(_variant_row, variants, shared=(requests, slo, seed, scenarios), executor=executor)
    return FleetComparison(requests, slo, seed, tuple(rows))


def _variant_row(shared: tuple[Trace, Slo | None, int, Scenarios | None], variant: Variant) -> VariantRow:
    """Simulate one variant; `shared` has requests, SLO, seed and scenarios, as `run_items` passes them."""
    requests, slo, seed, scenarios = shared
    simulated = simulate_recorded(variant.fleet, requests, slo, seed=seed)
    limits = slo.limits if slo is not None else ()
    curves = {}
    for metric in CHARTED_METRICS:
        for name, charted in limits_by_chart(limits, metric).items():
            curves[name] = cumulative_curve(simulated.simulation, metric, charted)
    safety = None if slo is None else measure_safety(variant.fleet, requests, slo, scenarios)
    simulation, verdict = simulated.simulation, simulated.verdict
    is_steady = verdict is not None and verdict.is_steady
    # The docstring of this module says why the paid time depends on the backlog.
    if is_steady:
        billed_s = served_s(requests, simulation)
    else:
        billed_s = simulation.end_s - float(simulation.arrival_s[0])
    return VariantRow(variant, simulated.summary(), curves, billed_s, simulation.served_tokens[1], safety)


def render_comparison(comparison: FleetComparison) -> dict[str, str]:
    """The files that `plan compare -o DIR` writes: name -> content."""
    document = json.dumps(to_json(comparison), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # In the order of NAMES.
    contents = (_html(comparison), _csv(comparison), document)
    return dict(zip(NAMES, contents, strict=True))


def to_json(comparison: FleetComparison) -> output.Document:
    """What `plan compare --json` prints."""
    trace = comparison.requests
    return {
        "traffic": {
            "trace": trace.name,
            "requests": len(trace),
            "duration_s": output.plain_value(trace.duration_s),
            "rate_rps": output.plain_value(trace.rate_rps),
            "seed": comparison.seed,
            "notes": list(trace.notes),
        },
        "slo": slo_document(comparison.slo) if comparison.slo is not None else None,
        "notes": comparison.notes,
        "variants": [
            row.cells() | {"fleet": fleet_document(row.variant.fleet), "simulation": row.summary}
            for row in comparison.rows
        ],
    }


def comparison_lines(comparison: FleetComparison) -> list[tuple[str, list[str]]]:
    """The lines of the printed table: a label and one cell per variant. Lines without a value for any variant
    are left out.
    """
    variant_cells = [row.cells() for row in comparison.rows]
    is_by_node = any(cells["cost_usd_per_h"] != cells["by_gpu_usd_per_h"] for cells in variant_cells)

    def line(label: str, key: str, show: Callable[[Any], str]) -> tuple[str, list[str]]:
        return label, ["-" if cells[key] is None else show(cells[key]) for cells in variant_cells]

    def latency_text(cells: dict[str, Any], key: str) -> str:
        """The latency under `key` in words."""
        if cells[key] is not None:
            return show_s(cells[key])
        # Lost requests count as infinitely late, so with enough of them a percentile is never reached.
        return "never" if cells["rejected"] or cells["unfinished"] else "-"

    def latency_line(metric: Metric, percentile: str) -> tuple[str, list[str]]:
        label, key = f"{METRICS[metric].abbreviation} {percentile}", f"{metric}_{percentile}_s"
        return label, [latency_text(cells, key) for cells in variant_cells]

    table_lines = [
        ("fleet", [describe_fleet(row.variant.fleet) for row in comparison.rows]),
        line("LLM", "llm", str),
        line("USD/h", "cost_usd_per_h", "{:,.2f}".format),
        *([line("USD/h by the GPU", "by_gpu_usd_per_h", "{:,.2f}".format)] if is_by_node else []),
        line("GPUs", "gpus", str),
        line("SLO", "verdict", lambda word: word.upper() if word == "missed" else word),
        line("requests that keep all limits", "attainment_frac", show_share),
        line("backlog steady", "steady", str),
        ("kept in scenarios", [_kept_text(cells) for cells in variant_cells]),
        line("holds to more traffic", "holds_to_traffic_frac", more_text),
        line("holds to longer steps", "holds_to_steps_frac", more_text),
        line("missed first beyond", "breaks_first", _missed_labels),
        *(latency_line(metric, percentile) for metric in METRICS for percentile in PERCENTILES),
        line("USD per million output tokens", "usd_per_million_output_tokens", "{:,.3f}".format),
        line("expected power, kW", "expected_w", lambda watts: f"{watts / 1e3:,.2f}"),
        line("provisioned power, kW", "provisioned_w", lambda watts: f"{watts / 1e3:,.2f}"),
        line("requests finished", "finished", str),
        line("requests rejected", "rejected", str),
        line("requests unfinished", "unfinished", str),
        line("preemptions", "preemptions", str),
    ]
    return [(label, cells) for label, cells in table_lines if set(cells) != {"-"}]


def comparison_summary(comparison: FleetComparison) -> str:
    """Which variants keep the SLO, which do so in enough scenarios, and the cheapest of each kind."""
    rows = comparison.rows
    if comparison.slo is None:
        cheapest = min(rows, key=_by_price)
        return f"No SLO was given; {cheapest.variant.name} costs least, {_price_text(cheapest)}."
    holding = [row for row in rows if row.summary["slo"]["holds"]]
    if not holding:
        return f"None of {len(rows)} variants keeps the SLO."
    best = min(holding, key=_by_price)
    cheapest_text = f"the cheapest is {best.variant.name}, {_price_text(best)}."
    if not any(row.safety is not None and row.safety.kept_in is not None for row in rows):
        return f"{len(holding)} of {len(rows)} keep the SLO; {cheapest_text}"
    safe = [row for row in holding if row.safety is not None and row.safety.is_kept_in_enough]
    summary = f"{len(holding)} of {len(rows)} keep the SLO on this traffic; {cheapest_text}"
    if not safe:
        return f"{summary} None keeps it in enough scenarios."
    cheapest_safe = min(safe, key=_by_price)
    return (
        f"{summary} In enough scenarios: {len(safe)}, the cheapest is {cheapest_safe.variant.name}, "
        f"{_price_text(cheapest_safe)}."
    )


def _missed_labels(names: str) -> str:
    """Limits as the other lines of the table name them: "TTFT p90 or TBT p99"."""
    return " or ".join(map(metric_label, names.split(" or ")))


def _kept_text(cells: dict[str, Any]) -> str:
    """In how many scenarios a variant keeps the SLO, in words."""
    return "-" if cells["scenario_count"] is None else f"{cells['kept']} of {cells['scenario_count']}"


def _by_price(row: VariantRow) -> tuple[float, float]:
    """The sort key of a variant: its bill, then the price of its GPUs without idle ones of whole nodes."""
    return row.cost_usd_per_h, row.variant.fleet.price_usd_per_h


def _price_text(row: VariantRow) -> str:
    """The price of a variant, "12.34 USD/h"."""
    return f"{row.cost_usd_per_h:,.2f} USD/h"


def _html(comparison: FleetComparison) -> str:
    trace = comparison.requests
    rate = f", {show_digits(trace.rate_rps, 3)} requests/s" if trace.duration_s > 0 else ""
    traffic = f"{len(trace):,} requests of {trace.name} in {show_s(trace.duration_s)}{rate}"
    head = ("", *(row.variant.name for row in comparison.rows))
    table_rows = [(label, *cells) for label, cells in comparison_lines(comparison)]
    notes = "".join(f"<li>{escape(note)}.</li>" for note in (*comparison.notes, *trace.notes))
    body = "\n".join(
        [
            f"<header><p class=eyebrow>{len(comparison.rows)} variants on the same requests</p>",
            f"<h1>{escape(comparison_summary(comparison))}</h1><p class=lead>{escape(traffic)}.</p></header>",
            f"<section><h2>How late</h2>{charts_html(draw_latencies(comparison))}</section>",
            "<section><h2>Side by side</h2>",
            table_html(head, table_rows, caption="Variants", numeric=range(1, len(head))),
            f"<ul class=note>{notes}</ul></section>",
        ]
    )
    footer = (
        f"Written by fleetplan, seed {comparison.seed}. compare.csv holds the table in plain units, "
        "compare.json the fleets and their simulations too."
    )
    return page_html("Comparison of fleets", body, footer)


def draw_latencies(comparison: FleetComparison) -> list[CaptionedChart]:
    """Charts of the distributions of TTFT and TBT, of each class with a limit by itself. A metric without a
    value above 0, such as the TBT of answers of one token, has no chart.
    """
    limits = comparison.slo.limits if comparison.slo is not None else ()
    drawn = []
    for metric in CHARTED_METRICS:
        for name, charted in limits_by_chart(limits, metric).items():
            curves = {row.variant.name: row.curves[name] for row in comparison.rows[:MOST_CURVES]}
            if not any((curve.value_s > 0).any() for curve in curves.values()):
                continue
            caption = (
                f"Distribution of the {METRICS[metric].name}{class_text(charted)}: further left is sooner"
            )
            if charted:
                caption += "; a variant that passes above the circle keeps the limit"
            chart = charts.comparison_chart(curves, metric, charted)
            drawn.append(CaptionedChart(name, chart, f"{caption}."))
    return drawn


def _csv(comparison: FleetComparison) -> str:
    """The table compare.csv, a line per variant."""
    rows = [row.cells() for row in comparison.rows]
    return csv_text(rows[0], (row.values() for row in rows))
