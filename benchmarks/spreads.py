"""The rows of catalogs/spreads.yaml, from runs of real engines that others published.

    python benchmarks/spreads.py DIR           (the runs that benchmarks/reality.py reads)

Every run is replayed with step times as predicted, with prefills and with decodes longer by PROBE, which
says by how much a figure of the run moves with either. So each measured figure names the factor that explains
it: on prefills if it is a TTFT, on decodes if it is a time per token. A spread is the lognormal with the 5 %
and 95 % quantiles of these factors, a campaign (source, GPU, LLM) counting as the root of its figures.
`left_out`: which share of the figures of a source and GPU lies inside the spread of all others. Runs whose
GPUs wait for their host say nothing of step times.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reality import INSIDE, Document, Engines, Floats, Row, Run, replayed
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.spreads import SpreadRow
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet
from planner.models.latency import Kind
from planner.models.llm import WEIGHTS, Llm
from planner.models.spread import INTERVAL_SIGMAS, WITHIN_FRAC, Factor, StepTimeSpread

PROBE = Factor(1.0, 0.1)
LEAST_RESPONSE = 0.3  # a figure that moves less with the step times says nothing of them
OF = {"prefill": INSIDE["ttft"], "decode": INSIDE["tpot"]}
CLASSES: dict[str, tuple[dict[str, object], Callable[[Llm], bool]]] = {
    "16 bit": ({"weights": ["bf16"]}, lambda llm: llm.weights == "bf16"),
    "fp8": ({"weights": ["fp8", "fp8-block"]}, lambda llm: llm.weights in ("fp8", "fp8-block")),
    "4 bit": (
        {"weights": ["int4", "int4-g32", "mxfp4", "nvfp4"]},
        lambda llm: llm.weights in ("int4", "int4-g32", "mxfp4", "nvfp4"),
    ),
}


@dataclass(frozen=True)
class Told:
    """The factor that a figure of a run names."""

    campaign: tuple[str, str, str]
    log_factor: float


@dataclass(frozen=True)
class Noting(Engines):
    """Notes which LLM each campaign served."""

    seen: dict[tuple[str, str], Llm] = field(default_factory=dict)

    def fleet(self, run: Run, engine: Document, **rest: Any) -> Fleet:
        fleet = super().fleet(run, engine, **rest)
        self.seen[run.source, run.campaign] = fleet.llm
        return fleet


def told(rows: Sequence[Row], counted: set[tuple[str, str]]) -> list[Told]:
    """By the rows that respond to step times."""
    found = []
    for row in rows:
        if (row.quantity, row.statistic) not in counted or row.bounds is None or row.run.regime:
            continue
        response = math.log(row.bounds[1] / row.bounds[0]) / (2 * INTERVAL_SIGMAS * PROBE.log_sd)
        if response >= LEAST_RESPONSE:
            campaign = row.run.source, row.run.gpu, row.run.llm
            found.append(Told(campaign, math.log(row.measured / row.predicted) / response))
    return found


def spread_of(factors: Sequence[Told]) -> Factor:
    """The lognormal of the quantiles, as the module's docstring says."""
    campaigns: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for each in factors:
        campaigns[each.campaign].append(each.log_factor)
    values = np.concatenate([np.array(each) for each in campaigns.values()])
    weights = np.concatenate([np.full(len(each), len(each) ** -0.5) for each in campaigns.values()])
    low, high = (_quantile(values, weights, q) for q in ((1 - WITHIN_FRAC) / 2, (1 + WITHIN_FRAC) / 2))
    return Factor(math.exp((low + high) / 2), (high - low) / 2 / INTERVAL_SIGMAS)


def _quantile(values: Floats, weights: Floats, q: float) -> float:
    order = np.argsort(values)
    shares = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return float(np.interp(q, shares, values[order]))


def left_out(factors: Sequence[Told]) -> float | None:
    """The share inside the spread of the other sources and GPUs."""
    places = sorted({each.campaign[:2] for each in factors})
    if len(places) < 2:
        return None
    inside = 0
    for place in places:
        factor = spread_of([each for each in factors if each.campaign[:2] != place])
        mine = [each.log_factor for each in factors if each.campaign[:2] == place]
        inside += sum(math.log(factor.low) <= value <= math.log(factor.high) for value in mine)
    return inside / len(factors)


def row_of(kind: str, keys: dict[str, object], rows: Sequence[Row]) -> dict[str, object] | None:
    factors = {quantity: told(rows, counted) for quantity, counted in OF.items()}
    if not all(factors.values()):
        return None
    spreads = {quantity: spread_of(each) for quantity, each in factors.items()}
    campaigns = {each.campaign for part in factors.values() for each in part}
    sources = sorted({source for source, _, _ in campaigns})
    shares = {quantity: left_out(each) for quantity, each in factors.items()}
    told_of = [f"{key} {100 * share:.0f} % inside" for key, share in shares.items() if share is not None]
    runs = len({row.run for row in rows})
    return {
        "kind": kind,
        **keys,
        **{
            quantity: {"median": round(factor.median, 3), "log_sd": round(factor.log_sd, 3)}
            for quantity, factor in spreads.items()
        },
        "left_out": ", ".join(told_of) or "one place alone",
        "source": f"{runs} runs in {len(campaigns)} campaigns: {', '.join(sources)}",
    }


def probing(catalog: Catalog) -> Catalog:
    """The catalog where every spread is PROBE."""
    spread = StepTimeSpread(PROBE, PROBE, "probe")
    kinds: tuple[Kind, ...] = ("kernels", "roofline")
    return replace(catalog, spreads={kind: SpreadRow(kind, WEIGHTS, None, spread) for kind in kinds})


def main() -> int:
    parser = argparse.ArgumentParser(description="Rows of catalogs/spreads.yaml.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    args = parser.parse_args()
    catalog = probing(read_catalog())
    document: dict[str, object] = {}
    for kind, known in (
        ("kernels", catalog),
        ("roofline", replace(catalog, fit_files=(), _headers={}, _fits={})),
    ):
        engines = Noting(known)
        rows, _ = replayed(args.folder, engines)
        rows = [row for row in rows if (row.basis == "roofline") == (kind == "roofline")]
        for title, (keys, is_of) in CLASSES.items():
            mine = [row for row in rows if is_of(engines.seen[row.run.source, row.run.campaign])]
            if found := row_of(kind, keys, mine):
                document[f"{kind}, {title}"] = found
    sys.stdout.write(to_yaml(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
