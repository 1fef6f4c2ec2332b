"""Several fleets, or policies, on the same requests: one table and one picture.

Every variant is simulated to the end on one list of requests, so all differences come from the variants.
With an SLO, each is also simulated in the same scenarios, with more traffic and with longer steps
(fleet_standing.py). The dollars per million output tokens are the fleet's price for the whole run, from the
first arrival to the last token, over the output tokens of the finished requests.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from planner.documents.fleet_file import fleet_document
from planner.documents.slo import slo_document
from planner.domain import Limit, Metric, Slo
from planner.errors import InputError
from planner.fleet import Fleet
from planner.parallel.executors import SERIAL, Executor, run_items
from planner.reports import charts, output
from planner.reports.curves import Curve, cumulative_curve
from planner.reports.drawing import Figure
from planner.reports.fact_sentences import queue_text
from planner.reports.page import charts as drawn
from planner.reports.page import page, table
from planner.reports.screen import more_text
from planner.reports.simulated_run import outcome
from planner.reports.words import describe
from planner.search.oracle.scenarios import Scenarios
from planner.search.problem.bill import bill_fleet
from planner.slo_metrics import METRICS
from planner.studies.fleet_standing import FleetStanding, measure_standing
from planner.traffic.trace import Trace
from planner.units import show_s

DRAWN = 8  # The colours of one picture are distinct for at most eight curves.
NAMES = ("compare.html", "compare.csv", "compare.json")
PICTURED: tuple[Metric, ...] = ("ttft", "tbt")
OUTDATED = tuple(f"charts/{metric}.png" for metric in PICTURED)
PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Variant:
    """A fleet with its policies, under the name it has in table and picture."""

    name: str
    fleet: Fleet


@dataclass(frozen=True, slots=True, eq=False)
class VariantRow:
    """A variant and what became of it; `curves` are its distributions of ttft and tbt."""

    variant: Variant
    summary: output.Document
    curves: dict[Metric, Curve]
    standing: FleetStanding | None = None  # It is None without an SLO, and where no scenario was simulated.

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """The price of all hours until the last answer per million tokens; None where no request finished."""
        per_s = self.summary["output_tokens_per_s"]
        return self.cost_usd_per_h / 3600 / per_s * 1e6 if per_s else None

    @property
    def cost_usd_per_h(self) -> float:
        """The hourly bill, which counts whole nodes where GPUs are sold by the node."""
        return bill_fleet(self.variant.fleet).usd_per_h

    def cells(self) -> dict[str, Any]:
        """One line of compare.csv. A value is None where it never occurred or the SLO has no such limit."""
        fleet, summary = self.variant.fleet, self.summary
        slo, power = summary["slo"] or {}, summary["power"] or {}
        return {
            "variant": self.variant.name,
            "llm": fleet.llm.name,
            "cost_usd_per_h": _rounded(self.cost_usd_per_h),
            "by_gpu_usd_per_h": _rounded(fleet.price_usd_per_h),
            "workers": fleet.workers,
            "gpus": fleet.gpus,
            "verdict": {True: "kept", False: "missed", None: None}[slo.get("holds")],
            "attainment_frac": slo.get("attainment_frac"),
            "steady": {True: "yes", False: "no", None: None}[slo.get("is_steady")],
            **self._standing_cells(),
            **{
                f"{metric}_{name}_s": (summary[f"{metric}_s"] or {}).get(name)
                for metric in METRICS
                for name in PERCENTILES
            },
            "usd_per_million_output_tokens": _rounded(self.usd_per_million_output_tokens),
            "provisioned_w": _rounded(fleet.power_w),
            "expected_w": power.get("expected_w"),
            "finished": summary["finished"],
            "rejected": summary["rejected"],
            "unfinished": summary["unfinished"],
            "preemptions": summary["preemptions"],
        }

    def _standing_cells(self) -> dict[str, Any]:
        """The number of scenarios that keep the SLO, the headroom, and the limits that are missed first."""
        stands = self.standing
        kept_in, ends = (None, None) if stands is None else (stands.kept_in, stands.ends)
        room = None if ends is None else ends.headroom
        first: tuple[Limit, ...] = ()
        if ends is not None and room is not None:
            first = ends.by_traffic if room.traffic_frac <= room.steps_frac else ends.by_steps
        return {
            "kept": None if kept_in is None else kept_in.kept,
            "futures": None if kept_in is None else kept_in.futures,
            "holds_to_traffic_frac": None if room is None else _rounded(room.traffic_frac),
            "holds_to_steps_frac": None if room is None else _rounded(room.steps_frac),
            "breaks_first": " or ".join(limit.name for limit in first) or None,
        }


@dataclass(frozen=True, slots=True, eq=False)
class FleetComparison:
    requests: Trace
    slo: Slo | None
    seed: int
    rows: tuple[VariantRow, ...]

    @property
    def notes(self) -> list[str]:
        """The warnings that stand beside the figures, such as rejected requests and a growing queue."""
        notes = []
        if len(self.rows) > DRAWN:
            notes.append(f"the picture shows the first {DRAWN} of {len(self.rows)} variants, the table all")
        for row in self.rows:
            lost = {kind: row.summary[kind] for kind in ("rejected", "unfinished") if row.summary[kind]}
            if lost:
                counts = " and ".join(f"{count} {kind}" for kind, count in lost.items())
                notes.append(
                    f"{row.variant.name}: {counts} of {len(self.requests)} requests; they count as "
                    "infinitely late, so its curves may end below 100 %"
                )
            if row.summary["slo"] and not row.summary["slo"]["is_steady"]:
                slo = row.summary["slo"]
                notes.append(f"{row.variant.name}: {queue_text(slo['patient_frac'], slo['patience_s'])}")
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
    """Simulate every variant on `requests`; `seed`, by which they were drawn, is the policies' too. With
    `scenarios` each is simulated in some of these, too.

    Raises InputError for none, or for two of one name.
    """
    names = [variant.name for variant in variants]
    if not names:
        raise InputError("compare: expected at least one fleet")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"compare: two variants are named {twice[0]!r}; name a fleet with --fleet NAME=FILE")
    rows = run_items(_row, variants, shared=(requests, slo, seed, scenarios), executor=executor)
    return FleetComparison(requests, slo, seed, tuple(rows))


def _row(shared: tuple[Trace, Slo | None, int, Scenarios | None], variant: Variant) -> VariantRow:
    requests, slo, seed, scenarios = shared
    simulated = outcome(variant.fleet, requests, slo, seed=seed)
    limits = slo.limits if slo is not None else ()
    curves = {
        metric: cumulative_curve(
            simulated.simulation, metric, [limit.limit_s for limit in limits if limit.metric == metric]
        )
        for metric in PICTURED
    }
    stands = None if slo is None else measure_standing(variant.fleet, requests, slo, scenarios)
    return VariantRow(variant, simulated.summary(), curves, stands)


def render_comparison(comparison: FleetComparison) -> dict[str, str]:
    """Everything `plan compare -o DIR` writes: path relative to DIR -> content."""
    document = json.dumps(to_json(comparison), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return dict(zip(NAMES, (_html(comparison), _csv(comparison), document), strict=True))


def to_json(comparison: FleetComparison) -> output.Document:
    """What `plan compare --json` prints."""
    trace = comparison.requests
    return {
        "traffic": {
            "trace": trace.name,
            "requests": len(trace),
            "duration_s": _rounded(trace.duration_s),
            "rate_rps": _rounded(trace.rate_rps),
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
    """The rows of the printed table: a label and one cell per variant. Rows without a value are left out."""
    every = [row.cells() for row in comparison.rows]
    is_by_node = any(cells["cost_usd_per_h"] != cells["by_gpu_usd_per_h"] for cells in every)

    def line(label: str, key: str, show: Callable[[Any], str]) -> tuple[str, list[str]]:
        return label, ["-" if cells[key] is None else show(cells[key]) for cells in every]

    def latency(metric: Metric, name: str) -> tuple[str, list[str]]:
        values_s = [cells[f"{metric}_{name}_s"] for cells in every]
        lost = ["never" if cells["rejected"] or cells["unfinished"] else "-" for cells in every]
        shown = [
            other if value is None else show_s(value) for value, other in zip(values_s, lost, strict=True)
        ]
        return f"{METRICS[metric].abbreviation} {name}", shown

    table_lines = [
        ("fleet", [describe(row.variant.fleet) for row in comparison.rows]),
        line("LLM", "llm", str),
        line("USD/h", "cost_usd_per_h", "{:,.2f}".format),
        *([line("USD/h by the GPU", "by_gpu_usd_per_h", "{:,.2f}".format)] if is_by_node else []),
        line("GPUs", "gpus", str),
        line("SLO", "verdict", {"kept": "kept", "missed": "MISSED"}.__getitem__),
        line("requests that keep all limits", "attainment_frac", _percent),
        line("backlog steady", "steady", str),
        ("kept in scenarios", [_kept_text(cells) for cells in every]),
        line("holds to more traffic", "holds_to_traffic_frac", more_text),
        line("holds to longer steps", "holds_to_steps_frac", more_text),
        line("missed first beyond", "breaks_first", str),
        *(latency(metric, name) for metric in METRICS for name in PERCENTILES),
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
    """The comparison in a sentence."""
    rows = comparison.rows
    if comparison.slo is None:
        cheapest = min(rows, key=_by_price)
        return f"No SLO was given; {cheapest.variant.name} costs least, {_price(cheapest)}."
    kept = [row for row in rows if row.summary["slo"]["holds"]]
    if not kept:
        return f"None of {len(rows)} variants keeps the SLO."
    best = min(kept, key=_by_price)
    least = f"the cheapest is {best.variant.name}, {_price(best)}."
    if not any(row.standing is not None and row.standing.kept_in is not None for row in rows):
        return f"{len(kept)} of {len(rows)} keep the SLO; {least}"
    sure = [row for row in kept if row.standing is not None and row.standing.is_kept_in_enough]
    summary = f"{len(kept)} of {len(rows)} keep the SLO on this traffic; {least}"
    if not sure:
        return f"{summary} None keeps it in enough scenarios."
    surest = min(sure, key=_by_price)
    return (
        f"{summary} In enough scenarios: {len(sure)}, the cheapest is {surest.variant.name}, "
        f"{_price(surest)}."
    )


def _kept_text(cells: dict[str, Any]) -> str:
    return "-" if cells["futures"] is None else f"{cells['kept']} of {cells['futures']}"


def _by_price(row: VariantRow) -> tuple[float, float]:
    """The sort key of a variant: its bill, then the price of the GPUs that are in use."""
    return row.cost_usd_per_h, row.variant.fleet.price_usd_per_h


def _percent(share: float) -> str:
    """The share in per cent, rounded down, so that 100.00 % means every request."""
    return f"{math.floor(1e4 * share) / 100:.2f} %"


def _price(row: VariantRow) -> str:
    return f"{row.cost_usd_per_h:,.2f} USD/h"


def _html(comparison: FleetComparison) -> str:
    trace = comparison.requests
    rate = f", {trace.rate_rps:.3g} requests/s" if trace.duration_s > 0 else ""
    traffic = f"{len(trace):,} requests of {trace.name} in {show_s(trace.duration_s)}{rate}"
    head = ("", *(row.variant.name for row in comparison.rows))
    table_rows = [(label, *cells) for label, cells in comparison_lines(comparison)]
    notes = "".join(f"<li>{escape(note)}.</li>" for note in (*comparison.notes, *trace.notes))
    body = "\n".join(
        [
            f"<header><p class=eyebrow>{len(comparison.rows)} variants on the same requests</p>",
            f"<h1>{escape(comparison_summary(comparison))}</h1><p class=lead>{escape(traffic)}.</p></header>",
            f"<section><h2>How late</h2>{drawn(draw_latencies(comparison))}</section>",
            "<section><h2>Side by side</h2>",
            table(head, table_rows, caption="Variants", numeric=range(1, len(head))),
            f"<ul class=note>{notes}</ul></section>",
        ]
    )
    footer = (
        f"Written by fleetplan, seed {comparison.seed}. compare.csv holds the table in plain units, "
        "compare.json the fleets and their simulations too."
    )
    return page("Comparison of fleets", body, footer)


def draw_latencies(comparison: FleetComparison) -> list[Figure]:
    """Distributions of TTFT and TBT; none where no request got that far."""
    limits = comparison.slo.limits if comparison.slo is not None else ()
    pictures = []
    for metric in PICTURED:
        curves = {row.variant.name: row.curves[metric] for row in comparison.rows[:DRAWN]}
        if not any((curve.value_s > 0).any() for curve in curves.values()):
            continue
        watched = [limit for limit in limits if limit.metric == metric]
        caption = f"Distribution of the {METRICS[metric].name}: further left is sooner"
        if watched:
            caption += "; a variant that passes above the circle keeps the limit"
        pictures.append(Figure(metric, charts.comparison_chart(curves, metric, watched), f"{caption}."))
    return pictures


def _csv(comparison: FleetComparison) -> str:
    rows = [row.cells() for row in comparison.rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _rounded(value: float | None) -> float | None:
    """To ten digits, as all our files; None for what is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.10g}")
