"""The rows of catalogs/spreads.yaml, from runs of real engines that others published.

    python benchmarks/spreads.py DIR [--every N] [--figures FILE]    (DIR as for benchmarks/reality.py)

Every run is replayed with step times as predicted, with prefills and with decodes longer by PROBE, which says
by how much each figure of the run moves with either. A measured figure is then, in logs, the predicted one
plus the two factors times these responses. The factors of decodes are fitted to times per token, those of
prefills to the TTFTs of which prefills are at least half, both around the other. The standard deviation is
the one with the least interval score (Winkler's: the width, and 20 times what lies outside), so that a spread
is as narrow as the share inside allows; a campaign (source, GPU, LLM) counts as the root of its figures. It
is wider by Student's factor for as few campaigns as there are, and wider still where more than
MOST_LONGER_FRAC of the row's figures would be longer than its upper end. Medians are of prefills on data
centres' Blackwell alone: of all others they bring campaigns that were left out no nearer. Rooflines are
fitted to runs replayed without any fit. They serve GPUs and LLMs of which nothing is known, so their factor
of decodes is of all of them together, and they are no narrower than kernels.

Prints the rows, then which share of the figures lies inside, on campaigns left out, by source, GPU and
metric, beside the shares inside the shipped rows. Runs whose GPUs wait for their host say nothing of step
times; TTFTs of closed loops of equal lengths (InferenceX's files) and of saturated runs say who waits for
whom: these are not fitted to, and counted all the same. `--figures` keeps what was replayed, and reads it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.stats import t as student

from benchmarks.reality import INSIDE, MEDIANS, Document, Engines, Floats, Row, Run, found
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.spreads import SpreadRow
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet
from planner.models.latency import Kind
from planner.models.llm import WEIGHTS, Llm
from planner.models.spread import INTERVAL_SIGMAS, WITHIN_FRAC, Factor, StepTimeSpread

PROBE = Factor(1.0, 0.1)
PROBE_LOG = INTERVAL_SIGMAS * PROBE.log_sd
LEAST_DECODE, LEAST_PREFILL = 0.3, 0.5  # a figure that moves less with a factor says little of it
LEAST_CAMPAIGNS = 3
WIDEST = 1.2  # of a log standard deviation
MOST_LONGER_FRAC = 0.07  # of the figures of a row may be longer than its upper end: who plans with it is late
CLASSES = {"16 bit": ("bf16",), "fp8": ("fp8", "fp8-block"), "4 bit": ("int4", "int4-g32", "mxfp4", "nvfp4")}
BLACKWELL = ("b200-180g", "b300-288g", "gb200-186g", "gb300-279g")
Campaign = tuple[str, str, str]


@dataclass(frozen=True)
class Figure:
    """A figure of a run: log of measured over predicted, and by how much its log moves with each factor's."""

    source: str
    gpu: str
    llm: str
    metric: str
    kind: str
    weights: str
    is_mixture: bool
    is_saturated: bool
    log_ratio: float
    of_prefills: float
    of_decodes: float
    engine: str = ""

    @property
    def campaign(self) -> Campaign:
        return self.source, self.gpu, self.llm

    @property
    def place(self) -> str:
        """Where prefills err alike."""
        return "Blackwell" if self.gpu in BLACKWELL else "mixtures" if self.is_mixture else "dense"

    @property
    def is_of_prefills(self) -> bool:
        is_open = not self.is_saturated and self.source != "inferencex"
        return self.metric == "ttft" and is_open and self.of_prefills >= LEAST_PREFILL

    @property
    def is_of_decodes(self) -> bool:
        return self.metric == "tpot" and not self.is_saturated and self.of_decodes >= LEAST_DECODE


@dataclass(frozen=True)
class Noting(Engines):
    """Notes which LLM each campaign served."""

    seen: dict[tuple[str, str], Llm] = field(default_factory=dict)

    def fleet(self, run: Run, engine: Document, **rest: Any) -> Fleet:
        fleet = super().fleet(run, engine, **rest)
        self.seen[run.source, run.campaign] = fleet.llm
        return fleet


def metric_of(row: Row) -> str | None:
    """The metric that a row's figure counts for; one per run and metric."""
    figure = row.quantity, row.statistic
    if row.run.source == "inferencex":
        return next((name for name, each in MEDIANS.items() if each == figure), None)
    if row.run.source == "inference-perf" and row.quantity == "itl":
        return None  # its time per token is there too
    return next((name for name, each in INSIDE.items() if figure in each), None)


def replay(folder: Path, engines: Noting) -> Iterator[Figure]:
    """The figures of all runs but those that wait for their host, or were replayed on imported profiles."""
    ends = ((0.0, 0.0), (INTERVAL_SIGMAS, 0.0), (0.0, INTERVAL_SIGMAS))
    nominal, prefill, decode = (list(found(folder, replace(engines, z=z))) for z in ends)
    for row, *others in zip(nominal, prefill, decode, strict=True):
        if not isinstance(row, Row) or row.run.regime == "host-bound" or row.basis == "import":
            continue
        if (metric := metric_of(row)) is None:
            continue
        llm = engines.seen[row.run.source, row.run.campaign]
        of_prefills, of_decodes = (
            max(math.log(each.predicted / row.predicted) / PROBE_LOG, 0.0) if isinstance(each, Row) else 0.0
            for each in others
        )
        yield Figure(
            *(row.run.source, row.run.gpu, row.run.llm, metric),
            "roofline" if row.basis == "roofline" else "kernels",
            next(name for name, formats in CLASSES.items() if llm.weights in formats),
            llm.experts > 1,
            row.run.regime == "saturated",
            math.log(row.measured / row.predicted),
            of_prefills,
            of_decodes,
            row.run.engine,
        )


# --- the fit


def ends(spread: StepTimeSpread, prefills: Floats, decodes: Floats) -> tuple[Floats, Floats]:
    """Between which logs of measured over predicted figures lie that respond so to prefills and decodes."""
    middle = prefills * math.log(spread.prefill.median) + decodes * math.log(spread.decode.median)
    half = INTERVAL_SIGMAS * np.hypot(prefills * spread.prefill.log_sd, decodes * spread.decode.log_sd)
    return middle - half, middle + half


def interval_score(values: Floats, low: Floats, high: Floats) -> Floats:
    """Winkler's score of an interval that is to hold WITHIN_FRAC: the less, the better."""
    outside = np.maximum(low - values, 0) + np.maximum(values - high, 0)
    scores: Floats = high - low + 2 / (1 - WITHIN_FRAC) * outside
    return scores


def arrays(figures: Sequence[Figure]) -> tuple[Floats, Floats, Floats, Floats]:
    """Log ratios, responses to prefills and to decodes, and weights."""
    counts: dict[Campaign, int] = defaultdict(int)
    for each in figures:
        counts[each.campaign] += 1
    rows = [
        (each.log_ratio, each.of_prefills, each.of_decodes, counts[each.campaign] ** -0.5) for each in figures
    ]
    ratios, prefills, decodes, weights = np.array(rows).T
    return ratios, prefills, decodes, weights


def fit_spread(
    figures: Sequence[Figure],
    of: Callable[[StepTimeSpread, Factor], StepTimeSpread],
    other: StepTimeSpread,
    median: float = 1.0,
) -> Factor:
    """The factor with this median that `of` puts into the spread, the other one being known."""
    ratios, prefills, decodes, weights = arrays(figures)

    def score(log_sd: float) -> float:
        low, high = ends(of(other, Factor(median, log_sd)), prefills, decodes)
        return float(weights @ interval_score(ratios, low, high) / weights.sum())

    steps = np.linspace(0.02, WIDEST, 119)
    near = float(steps[int(np.argmin([score(each) for each in steps]))])
    log_sd = float(minimize_scalar(score, bounds=(max(near - 0.02, 0.01), near + 0.02), method="bounded").x)
    campaigns = len({each.campaign for each in figures})
    few = float(student.ppf((1 + WITHIN_FRAC) / 2, max(campaigns - 1, 1))) / INTERVAL_SIGMAS
    log_sd *= few * math.sqrt(1 + 1 / campaigns)
    while log_sd < WIDEST:
        _, high = ends(of(other, Factor(median, log_sd)), prefills, decodes)
        if (ratios > high).mean() <= MOST_LONGER_FRAC:
            break
        log_sd += 0.005
    return Factor(median, min(log_sd, WIDEST))


def median_of(figures: Sequence[Figure]) -> float:
    """The factor on prefills with the least sum of absolute errors."""
    ratios, prefills, _, weights = arrays([each for each in figures if each.of_prefills > 0.05])
    order = np.argsort(ratios / prefills)
    summed = np.cumsum((weights * prefills)[order])
    return math.exp(float((ratios / prefills)[order][np.searchsorted(summed, summed[-1] / 2)]))


def nearest(
    figures: Iterable[Figure], keys: Sequence[Callable[[Figure], object]], like: Figure
) -> list[Figure]:
    """Those that are alike by the first key by which enough campaigns are; else all."""
    every = list(figures)
    for key in keys:
        mine = [each for each in every if key(each) == key(like)]
        if len({each.campaign for each in mine}) >= LEAST_CAMPAIGNS:
            return mine
    return every


def spread_for(like: Figure, figures: Sequence[Figure]) -> StepTimeSpread:
    """The spread of step times of this kind, place and weights."""
    usual = StepTimeSpread(Factor(1.0, 0.2), Factor(1.0, 0.1), "")
    decodes = nearest(
        (each for each in figures if each.is_of_decodes and each.kind == like.kind),
        (
            lambda each: each.kind if each.kind == "roofline" else (each.place, each.weights),
            lambda each: each.kind if each.kind == "roofline" else (each.place, each.kind),
            lambda each: each.kind,
        ),
        like,
    )
    decode = fit_spread(decodes, lambda spread, factor: replace(spread, decode=factor), usual)
    prefills = nearest(
        (each for each in figures if each.is_of_prefills),
        (lambda each: (each.kind, each.place), lambda each: each.place),
        like,
    )
    median = 1.0
    if like.place == "Blackwell":  # of the same step times: a roofline and sums of kernels err apart
        alike = {(each.campaign, each.kind) for each in prefills}
        median = median_of(
            [
                each
                for each in figures
                if (each.campaign, each.kind) in alike and (each.is_of_prefills or each.is_of_decodes)
            ]
        )
    known = replace(usual, decode=decode)
    prefill = fit_spread(prefills, lambda spread, factor: replace(spread, prefill=factor), known, median)
    return StepTimeSpread(prefill, decode, "")


# --- rows, and how they fare


def no_narrower(factor: Factor, than: Factor) -> Factor:
    """The factor around its own median, at least as wide as another."""
    return Factor(factor.median, max(factor.log_sd, than.log_sd))


def rows_of(figures: Sequence[Figure]) -> dict[str, dict[str, object]]:
    """The rows of catalogs/spreads.yaml: of each kind and format, Blackwell's, of mixtures, then of all."""
    rows: dict[str, dict[str, object]] = {}
    places: tuple[tuple[str, dict[str, object]], ...] = (
        ("Blackwell", {"gpus": list(BLACKWELL)}),
        ("mixtures", {"experts": True}),
        ("dense", {"experts": False}),
    )
    for kind in ("kernels", "roofline"):
        for weights, formats in CLASSES.items():
            for place, keys in places:
                gpu = BLACKWELL[0] if place == "Blackwell" else "h100-80g"
                like = Figure("", gpu, "", "", kind, weights, place == "mixtures", False, 0.0, 0.0, 0.0)
                spread = spread_for(like, figures)
                if kind == "roofline":  # no narrower than kernels, which know more of the GPU
                    measured = spread_for(replace(like, kind="kernels"), figures)
                    spread = StepTimeSpread(
                        no_narrower(spread.prefill, measured.prefill),
                        no_narrower(spread.decode, measured.decode),
                        "",
                    )
                own = [each for each in figures if (each.kind, each.weights) == (kind, weights)]
                campaigns = sorted({each.campaign for each in own if each.place == place})
                rows[f"{kind}, {weights}, {place}"] = {
                    "kind": kind,
                    "weights": list(formats),
                    **keys,
                    **{
                        name: {"median": round(factor.median, 3), "log_sd": round(factor.log_sd, 3)}
                        for name, factor in (("prefill", spread.prefill), ("decode", spread.decode))
                    },
                    "source": f"{len(campaigns)} campaigns of its own"
                    + (": " if campaigns else "; fitted to those of like step times")
                    + ", ".join(sorted({source for source, _, _ in campaigns})),
                }
    return rows


def shares(
    figures: Sequence[Figure], spread: Callable[[Figure], StepTimeSpread | None]
) -> dict[str, tuple[float, ...]]:
    """By source, GPU and metric: figures, the share inside and the share longer, mean width and score."""
    of: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for each in figures:
        if (known := spread(each)) is not None:
            low, high = ends(known, np.array([each.of_prefills]), np.array([each.of_decodes]))
            for place in (f"{each.source} | {each.gpu}", "all | "):
                name = f"{each.kind} | {place} | {each.metric}"
                of[name].append((each.log_ratio, float(low[0]), float(high[0])))
    answers: dict[str, tuple[float, ...]] = {}
    for name, found_here in of.items():
        ratio, low, high = np.array(found_here).T
        answers[name] = (
            float(len(ratio)),
            float(((low <= ratio) & (ratio <= high)).mean()),
            float((ratio > high).mean()),
            math.exp(float((high - low).mean())),
            float(interval_score(ratio, low, high).mean()),
        )
    return answers


def left_out_spreads(figures: Sequence[Figure]) -> Callable[[Figure], StepTimeSpread]:
    """The spread of each figure as the campaigns of all others say it."""
    known: dict[tuple[object, ...], StepTimeSpread] = {}

    def spread(like: Figure) -> StepTimeSpread:
        key = like.campaign, like.kind, like.weights, like.place
        if key not in known:
            known[key] = spread_for(like, [each for each in figures if each.campaign != like.campaign])
        return known[key]

    return spread


def shipped_spreads(catalog: Catalog) -> Callable[[Figure], StepTimeSpread | None]:
    def spread(like: Figure) -> StepTimeSpread | None:
        for row in catalog.spreads.values():
            if (
                row.kind == like.kind
                and CLASSES[like.weights][0] in row.weights
                and row.experts in (None, like.is_mixture)
                and (not row.gpus or like.gpu in row.gpus)
            ):
                return row.spread
        return None

    return spread


def print_shares(figures: Sequence[Figure], catalog: Catalog) -> None:
    shipped = shares(figures, shipped_spreads(catalog))
    ours = shares(figures, left_out_spreads(figures))
    print(
        "\n| step times | truth | GPU | metric | figures | shipped: inside, longer, width, score | left out |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in sorted(ours):
        cells = (
            f"{100 * each[1]:.0f} %, {100 * each[2]:.0f} %, x{each[3]:.2f}, {each[4]:.2f}" if each else "-"
            for each in (shipped.get(name), ours[name])
        )
        print(f"| {name} | {ours[name][0]:.0f} | {' | '.join(cells)} |")


def probing(catalog: Catalog) -> Catalog:
    """The catalog where every spread is PROBE."""
    spread = StepTimeSpread(PROBE, PROBE, "probe")
    kinds: tuple[Kind, ...] = ("kernels", "roofline")
    return replace(catalog, spreads={kind: SpreadRow(kind, WEIGHTS, None, spread) for kind in kinds})


def main() -> int:
    parser = argparse.ArgumentParser(description="Rows of catalogs/spreads.yaml.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="of silicon-sample every N-th point"
    )
    parser.add_argument(
        "--figures", type=Path, metavar="FILE", help="figures that were replayed before, or will be"
    )
    args = parser.parse_args()
    catalog = read_catalog()
    if args.figures is not None and args.figures.exists():
        figures = [Figure(**each) for each in json.loads(args.figures.read_text())]
    else:
        known = probing(catalog)
        bare = replace(known, fit_files=(), _fit_paths={}, _fits={})
        figures = [
            figure
            for kind, each in (("kernels", known), ("roofline", bare))
            for figure in replay(args.folder, Noting(each, every=args.every))
            if figure.kind == kind
        ]
        if args.figures is not None:
            args.figures.write_text(json.dumps([asdict(each) for each in figures]))
    sys.stdout.write(to_yaml(rows_of(figures)))
    print_shares(figures, catalog)
    return 0


if __name__ == "__main__":
    sys.exit(main())
