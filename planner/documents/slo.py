"""Limits of an SLO, in seconds or relative to an idle worker, from slo.yaml or a catalog."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.domain import Limit, Metric, Slo
from planner.errors import InputError
from planner.files.document_values import (
    Section,
    check_mapping,
    is_number,
    read_positive,
    refuse_unknown,
    refused_value,
)
from planner.slo_metrics import METRICS
from planner.units import percentile_name, shortest_digits

_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One line of a relative SLO: at this percentile, at most `factor` times the same request alone."""

    metric: Metric
    percentile_frac: float
    factor: float


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """An SLO relative to a request alone on one worker of `gpu` x `tp` (Splitwise Table VI)."""

    limits: tuple[Slowdown, ...]
    gpu: str
    tp: int


@dataclass(frozen=True, slots=True)
class SloPreset:
    """One row of catalogs/slos.yaml: limits in seconds, or relative ones, never both."""

    name: str
    slo: Slo  # Without limits if the preset is relative.
    slowdowns: Slowdowns | None
    served: str  # What the paper served; it is not enforced.
    source: str
    date: str


def parse_slo(document: Any, *, where: str) -> Slo:
    """The `slo:` mapping: {ttft: {p90: 2 s}} or {ttft_p90: 2 s}, attainment, and every."""
    lines = check_mapping(document, where)
    attainment = lines.get("attainment")
    if attainment is not None and not (is_number(attainment) and 0 < attainment <= 1):
        raise refused_value(f"{where}: attainment", "expected a share in (0, 1] such as 0.9", attainment)
    limits = tuple(
        Limit(metric, percentile_frac, read_positive(value, "s", f"{where}: {metric} {name}"))
        for metric, percentile_frac, name, value in _percentile_lines(
            lines, where, also=("attainment", "every")
        )
    )
    every = lines.get("every")
    return Slo(
        limits,
        None if attainment is None else float(attainment),
        None if every is None else read_positive(every, "s", f"{where}: every"),
    )


def slo_document(slo: Slo) -> dict[str, Any]:
    """The SLO as slo.yaml writes it."""
    document: dict[str, Any] = {}
    for limit in slo.limits:
        lines = document.setdefault(limit.metric, {})
        lines[percentile_name(limit.percentile_frac)] = f"{shortest_digits(limit.limit_s)} s"
    if slo.attainment_frac is not None:
        document["attainment"] = slo.attainment_frac
    if slo.every_s is not None:
        document["every"] = f"{shortest_digits(slo.every_s)} s"
    return document


def parse_slowdowns(document: Any, reference: Any, *, where: str) -> Slowdowns:
    """The `slowdown:` mapping of a preset ({ttft: {p50: 2}}) and its `reference: {gpu: ..., tp: ...}`."""
    place = f"{where}: reference"
    on = Section.from_document(check_mapping(reference, place), place, ("gpu", "tp"))
    if not isinstance(on.get("gpu"), str):
        raise refused_value(on.path_of("gpu"), "expected the name of a GPU", on.get("gpu"))
    limits = []
    for metric, percentile_frac, name, value in _percentile_lines(check_mapping(document, where), where):
        if not is_number(value) or not 1 <= value < float("inf"):
            raise refused_value(f"{where}: {metric} {name}", "expected a factor of at least 1", value)
        limits.append(Slowdown(metric, percentile_frac, float(value)))
    return Slowdowns(tuple(limits), on.get("gpu"), on.whole_number("tp"))


def _percentile_lines(
    lines: Mapping[str, Any], where: str, *, also: tuple[str, ...] = ()
) -> list[tuple[Metric, float, str, Any]]:
    """(metric, percentile, as written, value) of every line, in the order given."""
    lines_by_percentile: dict[tuple[Metric, float], tuple[Metric, float, str, Any]] = {}
    for key, value in lines.items():
        if key in also:
            continue
        metric, percentile = _split_key(str(key))
        if metric not in METRICS:
            refuse_unknown({key: value}, (*METRICS, *also), where)
        if not percentile and (not isinstance(value, Mapping) or not value):
            raise refused_value(f"{where}: {key}", "expected percentiles such as {p90: 2 s}", value)
        for written, limit in {percentile: value}.items() if percentile else value.items():
            frac = _percentile_frac(written, f"{where}: {metric}")
            if (metric, frac) in lines_by_percentile:
                raise InputError(f"{where}: {metric} {written} is given twice; keep one")
            lines_by_percentile[metric, frac] = (metric, frac, str(written), limit)
    if not lines_by_percentile:
        raise InputError(f"{where}: no limit found, expected at least one such as ttft: {{p90: 2 s}}")
    return list(lines_by_percentile.values())


def _split_key(key: str) -> tuple[str, str]:
    """("ttft", "p90") of ttft_p90, and no percentile for a metric alone."""
    metric, _, percentile = key.rpartition("_")
    return (key, "") if key in METRICS or metric not in METRICS else (metric, percentile)


def _percentile_frac(written: object, where: str) -> float:
    if str(written).lower() in ("mean", "avg", "average"):
        raise InputError(
            f"{where}: {written!r} is refused: a mean hides the slow requests that an SLO is about; "
            "state a percentile, such as p50 or p90"
        )
    match = _PERCENTILE.fullmatch(str(written))
    if match is not None and 0 < float(match[1]) < 1:
        meant = f"p{100 * float(match[1]):.10g}"
        raise InputError(
            f"{where}: {str(written)!r} is kept where {float(match[1]):g} % of the requests keep it; write "
            f"{meant} for {100 * float(match[1]):.10g} %"
        )
    if match is None or not 0 < float(match[1]) <= 100:
        raise refused_value(where, "expected a percentile from p50 to p100 such as p90", str(written))
    if float(match[1]) < 50:
        raise InputError(
            f"{where}: {str(written)!r} lets {100 - float(match[1]):g} % of the requests be late; expected "
            f"p50 or more, such as {'p90' if match[1][0] == '9' else 'p50'}"
        )
    return float(f"{float(match[1]) / 100:.12g}")
