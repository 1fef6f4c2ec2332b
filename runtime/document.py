"""A validation as one document of plain values: what validation.json holds and --json prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.units import percentile_name, show_s
from runtime.compare import Comparison, outside_s
from runtime.own_clock import stolen_frac
from runtime.replay import lateness_s
from runtime.validate import Validation

Floats = npt.NDArray[np.float64]
STOLEN_FRAC = 0.03  # of an engine's time: beyond it the verdict says that the machine was busy
STATUSES = ("finished", "rejected", "failed")


def document(found: Validation) -> dict[str, Any]:
    """Everything a program may want to know; what never happened is null."""
    run, comparison = found.measurement, found.comparison
    sent = list(run.journal.sent.values())
    outside = outside_s(run)
    answer = {
        "verdict": verdict(found),
        "agrees": comparison.agrees,
        "slo_kept": found.slo_holds if found.wanted.slo.limits else None,
        "requests": len(run.trace),
        **{status: sum(one.status == status for one in sent) for status in STATUSES},
        "compared": int(comparison.chosen.sum()),
        "reasons": _reasons(found),
        "times": "engines' step logs" if run.is_timed_by_engines else "client",
        "outside_engine_s": {"p50": _quantile(outside, 0.5), "p99": _quantile(outside, 0.99)},
        "client_late_s": lateness_s(sent),
        "stolen_frac": stolen(found),
        "prefix_hits": {
            "predicted_frac": comparison.predicted.requests.token_hit_frac,
            "measured_frac": comparison.measured.requests.token_hit_frac,
        },
        "tolerances": {
            "p50_frac": comparison.tolerances.p50_frac,
            "p90_frac": comparison.tolerances.p90_frac,
            "attainment_frac": comparison.tolerances.attainment_frac,
        },
        **{
            name: [row.as_dict() for row in side.rows] if side else None
            for name, side in (
                ("errors", comparison),
                ("errors_undisturbed", found.undisturbed),
                ("errors_corrected", found.after),
            )
        },
        "attainment": {
            "predicted": comparison.predicted_verdict.attainment_frac,
            "measured": comparison.measured_verdict.attainment_frac,
        },
        "slo": _slo_lines(comparison),
        "scatter": {metric: _scatter(*comparison.scatter(metric)) for metric in ("ttft", "tpot", "e2e")},
        "steps": [
            {"pool": one.pool, "steps": len(one.table.y), "bias_frac": one.bias_frac,
             "mean_error_frac": dict(one.errors)}
            for one in found.steps
        ],
        "corrections": [
            {"pool": one.pool, "held_out_before_frac": one.held_out_before_frac,
             "held_out_after_frac": one.held_out_after_frac, **one.calibrated.as_dict()}
            for one in found.corrections
        ],
        "parts": [dict(record) for record in found.records],
        "machine": dict(found.machine),
        "notes": list(found.wanted.notes),
        "run": found.wanted.identity(),
    }  # fmt: skip
    plain: dict[str, Any] = _plain(answer)
    return plain


def verdict(found: Validation) -> str:
    """The result in a sentence or two."""
    comparison, limits = found.comparison, found.wanted.slo.limits
    judged = [row for row in comparison.rows if row.tolerance_frac is not None and row.measured_s > 0]
    worst = max(judged, key=lambda row: abs(row.error_frac), default=None)
    if worst is None:
        return "Nothing was measured that could be compared."
    agreed = "The prediction agrees" if comparison.agrees else "The prediction does NOT agree"
    text = (
        f"{agreed} with the measurement: the largest error is {signed(worst.error_frac)} ({worst.metric} "
        f"{percentile_name(worst.percentile_frac)}; allowed {100 * (worst.tolerance_frac or 0):g} %)."
    )
    if lost := sum(one.status != "finished" for one in found.measurement.journal.sent.values()):
        text += f" {lost} of {len(found.measurement.trace)} requests did not finish."
    if limits:
        text += f" The SLO was {'kept' if found.slo_holds else 'MISSED'} on the engines"
        predicted = comparison.predicted_verdict.holds
        text += f", and {'kept' if predicted else 'missed'} in the simulation."
    most = max(stolen(found).values(), default=0.0)
    if (
        found.undisturbed is not None
        and most > STOLEN_FRAC
        and _worst(found.undisturbed) < abs(worst.error_frac)
    ):
        text += (
            f" The machine was not idle: others ran in {100 * most:.0f} % of the time of an engine's steps, "
            "which queues multiply. Without interruptions the largest error is "
            f"{100 * _worst(found.undisturbed):.1f} %."
        )
    return text


def _worst(comparison: Comparison) -> float:
    """The largest relative error of a percentile that is judged."""
    errors = [abs(row.error_frac) for row in comparison.rows if row.tolerance_frac is not None]
    return max((error for error in errors if math.isfinite(error)), default=math.inf)


def stolen(found: Validation) -> dict[str, float]:
    """Of each engine that notes CPU seconds: the share of its steps' time that the machine gave to others."""
    run = found.measurement
    return {
        name: stolen_frac(log, run.journal.parts[0].start_s) for name, log in run.logs.items() if log.has_cpu
    }


def _reasons(found: Validation) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in found.measurement.journal.sent.values():
        if one.reason:
            counts[one.reason] = counts.get(one.reason, 0) + 1
    return counts


def _slo_lines(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {
            "limit": p.limit.name, "limit_s": p.limit.limit_s, "predicted_kept_frac": p.kept_frac,
            "measured_kept_frac": m.kept_frac, "predicted_holds": p.holds, "measured_holds": m.holds,
        }
        for p, m in zip(comparison.predicted_verdict.lines, comparison.measured_verdict.lines, strict=True)
    ]  # fmt: skip


def _scatter(predicted: Floats, measured: Floats) -> dict[str, float | None]:
    """Request by request: median of the absolute relative errors, and the share within 20 %."""
    if not len(measured):
        return {"median_error_frac": None, "within_20_percent_frac": None}
    errors = np.abs(predicted / measured - 1)
    return {
        "median_error_frac": float(np.median(errors)),
        "within_20_percent_frac": float((errors <= 0.2).mean()),
    }


def _quantile(values: Floats, frac: float) -> float | None:
    return float(np.quantile(values, frac)) if len(values) else None


def _plain(value: Any) -> Any:
    """JSON's own types; NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def signed(frac: float) -> str:
    return "-" if not math.isfinite(frac) else f"{100 * frac:+.1f} %"


def rows(found: Validation) -> list[dict[str, str]]:
    """The errors, for a table: here and on the command line."""
    fixed = "and corrected fits" if found.undisturbed else "with corrected fits"
    sides = {"without interruptions": found.undisturbed, fixed: found.after}
    others = {name: side.rows for name, side in sides.items() if side is not None}
    return [
        {
            "metric": f"{row.metric} {percentile_name(row.percentile_frac)}",
            "predicted": show_s(row.predicted_s), "measured": show_s(row.measured_s),
            "error": signed(row.error_frac),
            "allowed": "-" if row.tolerance_frac is None else f"{100 * row.tolerance_frac:g} %",
            **{name: signed(side[k].error_frac) for name, side in others.items()},
        }
        for k, row in enumerate(found.comparison.rows)
    ]  # fmt: skip
