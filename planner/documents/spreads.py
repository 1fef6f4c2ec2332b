"""catalogs/spreads.yaml: how far step times of each kind were from measured runs; and the spread of one fit.

kernels, 16 bit:
  kind: kernels             # planner.models.latency.Kind
  weights: [bf16]           # of the LLMs it is of; default: all
  experts: false            # likewise
  prefill: {median: 1.02, log_sd: 0.08}
  decode: {median: 1.00, log_sd: 0.05}
  source: ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast, get_args

from planner.errors import InputError
from planner.io.values import Section, one_of, refused
from planner.models.latency import Kind, StepLatency
from planner.models.llm import WEIGHTS, Llm
from planner.models.spread import Factor, Spread

ROW_KEYS = ("kind", "weights", "experts", "prefill", "decode", "left_out")
FACTOR_KEYS = ("median", "log_sd")
SPREAD_KEYS = ("prefill", "decode", "source", "own")


@dataclass(frozen=True, slots=True)
class SpreadRow:
    """The spread of one kind of step times, of LLMs with these weights, with experts or without."""

    kind: Kind
    weights: tuple[str, ...]
    experts: bool | None
    spread: Spread

    def is_of(self, latency: StepLatency, llm: Llm) -> bool:
        return (
            self.kind == latency.kind
            and llm.weights in self.weights
            and self.experts in (None, llm.experts > 1)
        )


def spread_of(latency: StepLatency, llm: Llm, rows: Iterable[SpreadRow]) -> Spread | None:
    """The spread of the fit itself, else of its calibration, else of its kind; None if unknown."""
    if latency.spread is not None:
        return latency.spread
    if latency.uncertainty_frac is not None:
        return Spread.calibrated(latency.uncertainty_frac)
    return next((row.spread for row in rows if row.is_of(latency, llm)), None)


def parse_row(row: Section) -> SpreadRow:
    weights = row.get("weights", list(WEIGHTS))
    if not isinstance(weights, list) or not weights:
        raise refused(row.at("weights"), "expected a list of formats", weights)
    return SpreadRow(
        cast(Kind, row.one_of("kind", get_args(Kind))),
        tuple(one_of(each, WEIGHTS, row.at("weights")) for each in weights),
        row.flag("experts") if "experts" in row else None,
        Spread(_factor(row, "prefill"), _factor(row, "decode"), row.written("source")),
    )


def parse_spread(section: Section) -> Spread:
    return Spread(
        _factor(section, "prefill"),
        _factor(section, "decode"),
        section.written("source"),
        section.flag("own", False),
    )


def spread_document(spread: Spread) -> dict[str, Any]:
    """What `parse_spread` reads as the same spread."""
    return {
        **{
            key: {"median": factor.median, "log_sd": factor.log_sd}
            for key, factor in (("prefill", spread.prefill), ("decode", spread.decode))
        },
        "source": spread.source,
        **({"own": True} if spread.is_own else {}),
    }


def _factor(section: Section, key: str) -> Factor:
    section.required(key)
    part = section.part(key, FACTOR_KEYS)
    try:
        return Factor(part.number("median"), part.number("log_sd"))
    except InputError as error:
        raise InputError(f"{part.where}: {error}") from None
