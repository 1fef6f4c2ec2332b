"""Reads catalogs/spreads.yaml, how far step times of each kind were from measured runs; and `spread` of fits.

kernels, 16 bit:
  kind: kernels             # planner.models.latency.Kind
  weights: [bf16]           # weight formats of the LLMs; default: all
  experts: false            # LLMs with experts (true) or without; default: both
  gpus: [h100-80g]          # default: all
  engines: [sglang]         # default: all
  prefill: {median: 1.02, log_sd: 0.08}
  decode: {median: 1.00, log_sd: 0.05}
  source: ...

The first row that applies to a worker counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from planner.errors import InputError
from planner.files.document_values import Section, check_one_of, errors_as
from planner.models.latency import Kind, StepLatency
from planner.models.llm import WEIGHTS, Llm
from planner.models.spread import Factor, StepTimeSpread

ROW_KEYS = ("kind", "weights", "experts", "gpus", "engines", "prefill", "decode", "left_out")
FACTOR_KEYS = ("median", "log_sd")
SPREAD_KEYS = ("prefill", "decode", "source", "own")


@dataclass(frozen=True, slots=True)
class SpreadRow:
    """The spread of one kind of step times, for LLMs with these weights, with `experts` or without (None:
    both), on `gpus` (rows of gpus.yaml; empty: on all) and on `engines` (empty: on all).
    """

    kind: Kind
    weights: tuple[str, ...]
    experts: bool | None
    spread: StepTimeSpread
    gpus: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()

    def applies_to(self, latency: StepLatency, llm: Llm, gpu: str, engine: str) -> bool:
        """Whether these are step times of the row's kind, LLMs, engines and GPUs; `gpu` is a row's name."""
        return (
            self.kind == latency.kind
            and (not self.gpus or gpu in self.gpus)
            and (not self.engines or engine in self.engines)
            and llm.weights in self.weights
            and self.experts in (None, llm.experts > 1)
        )


def spread_of(
    latency: StepLatency, llm: Llm, gpu: str, rows: Iterable[SpreadRow], engine: str
) -> StepTimeSpread | None:
    """The spread of the fit, else of its calibration, else of the first row that applies, else None."""
    if latency.spread is not None:
        return latency.spread
    if latency.uncertainty_frac is not None:
        return StepTimeSpread.calibrated(latency.uncertainty_frac)
    return next((row.spread for row in rows if row.applies_to(latency, llm, gpu, engine)), None)


def parse_row(row: Section) -> SpreadRow:
    """Read a row of catalogs/spreads.yaml. Raises InputError."""
    weights = row.get("weights", list(WEIGHTS))
    if not isinstance(weights, list) or not weights:
        raise row.refused("weights", "expected a list of formats", weights)
    return SpreadRow(
        cast(Kind, row.one_of("kind", get_args(Kind))),
        tuple(check_one_of(each, WEIGHTS, row.path_of("weights")) for each in weights),
        row.flag("experts", None),
        StepTimeSpread(_parse_factor(row, "prefill"), _parse_factor(row, "decode"), row.plain_text("source")),
        _parse_names(row, "gpus", "GPUs"),
        _parse_names(row, "engines", "engines"),
    )


def at_medians(
    latency: StepLatency, llm: Llm, gpu: str, rows: Iterable[SpreadRow], engine: str
) -> StepLatency:
    """Step times multiplied by the median factors of their row, with the row's spread around these medians.
    Half of the measured runs are faster than such step times, and half are slower.

    Step times with a spread or a calibration of their own are not multiplied, because these were measured
    against the step times as they are.
    """
    spread = spread_of(latency, llm, gpu, rows, engine)
    with_spread = replace(latency, spread=spread)
    if spread is None or latency.spread is not None or latency.uncertainty_frac is not None:
        return with_spread
    prefill, decode = spread.prefill.median, spread.decode.median
    if prefill == decode == 1.0:
        return with_spread
    factors = [
        f"{name} x{factor:g}" for name, factor in (("prefills", prefill), ("decodes", decode)) if factor != 1
    ]
    spread_around_medians = replace(
        spread, prefill=replace(spread.prefill, median=1.0), decode=replace(spread.decode, median=1.0)
    )
    basis = f"{latency.basis}; {' and '.join(factors)}, the median of runs that others measured"
    return replace(latency.scale_steps(prefill, decode), spread=spread_around_medians, basis=basis)


def _parse_names(row: Section, key: str, what: str) -> tuple[str, ...]:
    """The names under `key` that the row is for; none if it is for all."""
    names = row.get(key, [])
    if not isinstance(names, list) or not all(isinstance(each, str) and each for each in names):
        raise row.refused(key, f"expected a list of {what}", names)
    return tuple(names)


def parse_spread(section: Section) -> StepTimeSpread:
    """The `spread` of one fit. Raises InputError."""
    return StepTimeSpread(
        _parse_factor(section, "prefill"),
        _parse_factor(section, "decode"),
        section.plain_text("source"),
        section.flag("own", False),
    )


def spread_document(spread: StepTimeSpread) -> dict[str, Any]:
    """What `parse_spread` reads as the same spread."""
    return {
        "prefill": {"median": spread.prefill.median, "log_sd": spread.prefill.log_sd},
        "decode": {"median": spread.decode.median, "log_sd": spread.decode.log_sd},
        "source": spread.source,
        **({"own": True} if spread.is_own else {}),
    }


def _parse_factor(section: Section, key: str) -> Factor:
    section.get_required(key)
    section_of_key = section.subsection(key, FACTOR_KEYS)
    with errors_as(InputError, section_of_key.where):
        return Factor(section_of_key.number("median"), section_of_key.number("log_sd"))
