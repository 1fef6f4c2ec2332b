"""Fits the rows of catalogs/spreads.yaml to published measurements of real engines.

    python benchmarks/spreads.py DIR [--every N] [--figures FILE]    (DIR as for benchmarks/reality.py)

Each run is simulated three times: with step times as predicted, with prefills longer by PROBE, and with
decodes longer by PROBE. This gives the response of each figure of the run to either: how much its logarithm
moves with that of the factor. The model of a measured figure is, in logarithms, the predicted figure plus the
factor on prefills and the factor on decodes, each times the figure's response to it.

The factor on decodes is fitted to times per token, that on prefills to TTFTs that are prefill for at least
half. The standard deviation of a factor is the one with the least interval score (Winkler's: the width, and
20 times the distance by which figures lie outside), so that a spread is no wider than the share inside
demands. A campaign (source, GPU, LLM) has the weight of the square root of its number of figures. The spread
is then widened by Student's factor for the number of campaigns, and further until no more than
MOST_LONGER_FRAC of the row's figures lie above its upper end.

The median of a factor is 1, except for prefills on data centres' Blackwell GPUs: elsewhere fitted medians did
not improve predictions of campaigns that were left out of the fit. SGLang has rows of its own, on Blackwell
and elsewhere; those of vLLM on Blackwell are fitted to vLLM alone, elsewhere to both. Rows for rooflines are
fitted to runs simulated without any fit. As they serve GPUs and LLMs that were never measured, their factor
on decodes is fitted to all of them together, and they are no narrower than the rows for kernels.

Prints the rows, then the share of figures inside the spread, fitted without the figure's own campaign, by
source, GPU and metric, beside the shares inside the shipped rows. Runs whose GPUs wait for their host or
whose engine is cold are left out, as they say nothing of step times. TTFTs of closed loops of equal lengths
(InferenceX's files) and of saturated runs are mostly waiting; they are not fitted to, but count in the
shares. `--figures` stores the simulated figures in a file, or reads them if it exists.
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

from benchmarks.reality import INSIDE, MEDIANS, NOT_STEPS, Document, Engines, Floats, Row, Run, found
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.spreads import SpreadRow
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet
from planner.models.latency import Kind
from planner.models.llm import WEIGHTS, Llm
from planner.models.spread import INTERVAL_SIGMAS, WITHIN_FRAC, Factor, StepTimeSpread

PROBE = Factor(1.0, 0.1)  # The spread whose upper end lengthens prefills or decodes.
PROBE_LOG = INTERVAL_SIGMAS * PROBE.log_sd  # Its upper end, in logarithms.
LEAST_DECODE, LEAST_PREFILL = 0.3, 0.5  # A figure that responds less to a factor says little about it.
# A row is fitted to campaigns like its own if there are so many, else to others too. With 3, Student's factor
# doubles a row: decodes of dense LLMs in fp8 would be x0.75 to 1.33, and no more of them inside.
LEAST_CAMPAIGNS = 4
WIDEST = 1.2  # Largest standard deviation of a factor's logarithm.
# So many of a row's figures may be longer than its upper end, because a plan for them would miss its SLO.
MOST_LONGER_FRAC = 0.07
# Formats of weights that share a row.
CLASSES = {
    "16 bit": ("bf16",),
    "fp8": ("fp8", "fp8-block", "mxfp8"),
    "4 bit": ("int4", "int4-g32", "int4-g32z", "mxfp4", "nvfp4"),
}
BLACKWELL = ("b200-180g", "b300-288g", "gb200-186g", "gb300-279g")
Campaign = tuple[str, str, str]  # Source, GPU, LLM.


@dataclass(frozen=True)
class Figure:
    """A figure of a run: the logarithm of measured over predicted, and its responses to longer prefills and
    to longer decodes.
    """

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
        """The group of runs to which the figure belongs."""
        return self.source, self.gpu, self.llm

    @property
    def is_sglang(self) -> bool:
        """Whether SGLang ran; all other figures are of vLLM."""
        return self.source == "sglang"

    @property
    def place(self) -> str:
        """The group of GPUs and LLMs whose prefills are predicted with similar errors."""
        return "Blackwell" if self.gpu in BLACKWELL else "mixtures" if self.is_mixture else "dense"

    @property
    def is_of_prefills(self) -> bool:
        """Whether the factor on prefills is fitted to it: an unsaturated TTFT that depends enough on it."""
        is_open = not self.is_saturated and self.source != "inferencex"
        return self.metric == "ttft" and is_open and self.of_prefills >= LEAST_PREFILL

    @property
    def is_of_decodes(self) -> bool:
        """Whether the factor on decodes is fitted to it: an unsaturated TPOT that depends enough on it."""
        return self.metric == "tpot" and not self.is_saturated and self.of_decodes >= LEAST_DECODE


@dataclass(frozen=True)
class Noting(Engines):
    """Engines that also note in `seen` which LLM each campaign served."""

    seen: dict[tuple[str, str], Llm] = field(default_factory=dict)

    def fleet(self, run: Run, engine: Document, **rest: Any) -> Fleet:
        fleet = super().fleet(run, engine, **rest)
        self.seen[run.source, run.campaign] = fleet.llm
        return fleet


def metric_of(row: Row) -> str | None:
    """The metric for which a row's figure counts, one figure per run and metric; None for other figures."""
    figure = row.quantity, row.statistic
    if row.run.source == "inferencex":
        return next((name for name, each in MEDIANS.items() if each == figure), None)
    if row.run.source == "inference-perf" and row.quantity == "itl":
        return None  # The time per token of the same run counts.
    return next((name for name, each in INSIDE.items() if figure in each), None)


def replay(folder: Path, engines: Noting) -> Iterator[Figure]:
    """The figures of all runs except those whose GPUs wait for their host, and those simulated with step
    times of their own profiles.
    """
    ends = ((0.0, 0.0), (INTERVAL_SIGMAS, 0.0), (0.0, INTERVAL_SIGMAS))
    nominal, prefill, decode = (list(found(folder, replace(engines, z=z))) for z in ends)
    for row, *others in zip(nominal, prefill, decode, strict=True):
        if not isinstance(row, Row) or row.run.regime in NOT_STEPS or row.basis == "import":
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
    """Both ends of the spread of figures, as logarithms of measured over predicted, from the figures'
    responses to prefills and to decodes (n,).
    """
    middle = prefills * math.log(spread.prefill.median) + decodes * math.log(spread.decode.median)
    half = INTERVAL_SIGMAS * np.hypot(prefills * spread.prefill.log_sd, decodes * spread.decode.log_sd)
    return middle - half, middle + half


def interval_score(values: Floats, low: Floats, high: Floats) -> Floats:
    """Winkler's score of intervals that should hold the share WITHIN_FRAC of values; less is better."""
    outside = np.maximum(low - values, 0) + np.maximum(values - high, 0)
    scores: Floats = high - low + 2 / (1 - WITHIN_FRAC) * outside
    return scores


def arrays(figures: Sequence[Figure]) -> tuple[Floats, Floats, Floats, Floats]:
    """Log ratios, responses to prefills and to decodes, and weights, (n,) each. With weights of count^-1/2 a
    campaign weighs as the root of its count.
    """
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
    """The fitted factor, with this median. `of` puts it into the spread `other`, whose other factor is
    known.
    """
    ratios, prefills, decodes, weights = arrays(figures)

    def score(log_sd: float) -> float:
        low, high = ends(of(other, Factor(median, log_sd)), prefills, decodes)
        return float(weights @ interval_score(ratios, low, high) / weights.sum())

    # The best value of a coarse grid, then a search around it.
    steps = np.linspace(0.02, WIDEST, 119)
    near = float(steps[int(np.argmin([score(each) for each in steps]))])
    log_sd = float(minimize_scalar(score, bounds=(max(near - 0.02, 0.01), near + 0.02), method="bounded").x)
    campaigns = len({each.campaign for each in figures})
    # As wide as the prediction of one more campaign after so few (Student's distribution).
    widening = float(student.ppf((1 + WITHIN_FRAC) / 2, max(campaigns - 1, 1))) / INTERVAL_SIGMAS
    log_sd *= widening * math.sqrt(1 + 1 / campaigns)
    while log_sd < WIDEST:
        _, high = ends(of(other, Factor(median, log_sd)), prefills, decodes)
        if (ratios > high).mean() <= MOST_LONGER_FRAC:
            break
        log_sd += 0.005
    return Factor(median, min(log_sd, WIDEST))


def median_of(figures: Sequence[Figure]) -> float:
    """The factor on prefills with the least sum of absolute errors: a weighted median of ratio over
    response.
    """
    ratios, prefills, _, weights = arrays([each for each in figures if each.of_prefills > 0.05])
    order = np.argsort(ratios / prefills)
    summed = np.cumsum((weights * prefills)[order])
    return math.exp(float((ratios / prefills)[order][np.searchsorted(summed, summed[-1] / 2)]))


def nearest(
    figures: Iterable[Figure], keys: Sequence[Callable[[Figure], object]], like: Figure
) -> list[Figure]:
    """The figures that agree with `like` by the first of the keys for which there are LEAST_CAMPAIGNS; all
    figures if there is no such key.
    """
    all_figures = list(figures)
    for key in keys:
        alike = [each for each in all_figures if key(each) == key(like)]
        if len({each.campaign for each in alike}) >= LEAST_CAMPAIGNS:
            return alike
    return all_figures


def of_sglang(like: Figure, figures: Iterable[Figure]) -> list[Figure]:
    """SGLang's figures of the kind and GPU generation of `like`."""
    is_new = like.gpu in BLACKWELL
    return [
        each
        for each in figures
        if each.is_sglang and each.kind == like.kind and (each.gpu in BLACKWELL) == is_new
    ]


def sglang_spread(like: Figure, figures: Sequence[Figure]) -> StepTimeSpread:
    """The spread of SGLang's step times, fitted to its runs of the kind and GPU generation of `like`."""
    is_new, alike = like.gpu in BLACKWELL, of_sglang(like, figures)
    spread = StepTimeSpread(Factor(1.0, 0.2), Factor(1.0, 0.1), "")
    decodes = [each for each in alike if each.is_of_decodes]
    decode = fit_spread(decodes, lambda spread, factor: replace(spread, decode=factor), spread)
    prefills = [each for each in alike if each.is_of_prefills]
    median = median_of([*prefills, *decodes]) if is_new else 1.0
    spread = replace(spread, decode=decode)
    prefill = fit_spread(prefills, lambda spread, factor: replace(spread, prefill=factor), spread, median)
    return StepTimeSpread(prefill, decode, "")


def spread_for(like: Figure, figures: Sequence[Figure]) -> StepTimeSpread:
    """The spread of step times for the engine, kind, place and weights of `like`."""
    if like.is_sglang:
        return sglang_spread(like, figures)
    if like.gpu in BLACKWELL:
        figures = [each for each in figures if not each.is_sglang]
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
    if like.place == "Blackwell":  # By kind: rooflines and sums of kernels have different errors.
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


# --- rows, and the shares of figures inside them


def no_narrower(factor: Factor, than: Factor) -> Factor:
    """The factor around its own median, at least as wide as another."""
    return Factor(factor.median, max(factor.log_sd, than.log_sd))


def rows_of(figures: Sequence[Figure]) -> dict[str, dict[str, object]]:
    """The rows of catalogs/spreads.yaml: for each kind those of SGLang on Blackwell and elsewhere, then for
    each format those of Blackwell, of mixtures, of the rest.
    """
    rows: dict[str, dict[str, object]] = {}
    blackwell: dict[str, object] = {"gpus": list(BLACKWELL)}
    sglang_rows: tuple[tuple[str, str, dict[str, object]], ...] = (
        ("SGLang, Blackwell", BLACKWELL[0], blackwell),
        ("SGLang", "h100-80g", {}),
    )
    places: tuple[tuple[str, dict[str, object]], ...] = (
        ("Blackwell", blackwell),
        ("mixtures", {"experts": True}),
        ("dense", {"experts": False}),
    )
    for kind in ("kernels", "roofline"):
        if any(each.is_sglang for each in figures):
            for name, gpu, keys in sglang_rows:
                like = Figure("sglang", gpu, "", "", kind, "fp8", True, False, 0.0, 0.0, 0.0)
                of_engine = {**keys, "engines": ["sglang"]}
                rows[f"{kind}, {name}"] = row_of(like, of_engine, of_sglang(like, figures), figures)
        for weights, formats in CLASSES.items():
            for place, keys in places:
                gpu = BLACKWELL[0] if place == "Blackwell" else "h100-80g"
                like = Figure("", gpu, "", "", kind, weights, place == "mixtures", False, 0.0, 0.0, 0.0)
                own = [
                    each
                    for each in figures
                    if (each.kind, each.weights, each.place) == (kind, weights, place)
                    and not (each.is_sglang and place == "Blackwell")
                ]
                of_place = {"weights": list(formats), **keys}
                rows[f"{kind}, {weights}, {place}"] = row_of(like, of_place, own, figures)
    return rows


def row_of(
    like: Figure, keys: dict[str, object], own: Sequence[Figure], figures: Sequence[Figure]
) -> dict[str, object]:
    """The row for figures as `like`, which applies where `keys` say; `own` are the figures of its own."""
    spread = spread_for(like, figures)
    if like.kind == "roofline":  # No narrower than kernels, for which GPUs were measured.
        measured = spread_for(replace(like, kind="kernels"), figures)
        spread = StepTimeSpread(
            no_narrower(spread.prefill, measured.prefill), no_narrower(spread.decode, measured.decode), ""
        )
    campaigns = sorted({each.campaign for each in own})
    return {
        "kind": like.kind,
        **keys,
        **{
            name: {"median": round(factor.median, 3), "log_sd": round(factor.log_sd, 3)}
            for name, factor in (("prefill", spread.prefill), ("decode", spread.decode))
        },
        "source": f"{len(campaigns)} campaigns of its own"
        + (": " if campaigns else "; fitted to those of like step times")
        + ", ".join(sorted({source for source, _, _ in campaigns})),
    }


def shares(
    figures: Sequence[Figure], spread: Callable[[Figure], StepTimeSpread | None]
) -> dict[str, tuple[float, ...]]:
    """By kind, source, GPU and metric: the number of figures, the share inside and the share above, the mean
    width as a factor and the mean score.
    """
    ends_by_name: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for each in figures:
        if (known := spread(each)) is not None:
            low, high = ends(known, np.array([each.of_prefills]), np.array([each.of_decodes]))
            for place in (f"{each.source} | {each.gpu}", "all | "):
                name = f"{each.kind} | {place} | {each.metric}"
                ends_by_name[name].append((each.log_ratio, float(low[0]), float(high[0])))
    answers: dict[str, tuple[float, ...]] = {}
    for name, ratios_and_ends in ends_by_name.items():
        ratio, low, high = np.array(ratios_and_ends).T
        answers[name] = (
            float(len(ratio)),
            float(((low <= ratio) & (ratio <= high)).mean()),
            float((ratio > high).mean()),
            math.exp(float((high - low).mean())),
            float(interval_score(ratio, low, high).mean()),
        )
    return answers


def left_out_spreads(figures: Sequence[Figure]) -> Callable[[Figure], StepTimeSpread]:
    """The spread of a figure, fitted without the figure's own campaign."""
    known: dict[tuple[object, ...], StepTimeSpread] = {}

    def spread(like: Figure) -> StepTimeSpread:
        key = like.campaign, like.kind, like.weights, like.place
        if key not in known:
            known[key] = spread_for(like, [each for each in figures if each.campaign != like.campaign])
        return known[key]

    return spread


def shipped_spreads(catalog: Catalog) -> Callable[[Figure], StepTimeSpread | None]:
    """The spread of a figure by the rows of the catalog; None where no row is for it."""

    def spread(like: Figure) -> StepTimeSpread | None:
        for row in catalog.spreads.values():
            if (
                row.kind == like.kind
                and (not row.engines or ("sglang" in row.engines) == like.is_sglang)
                and CLASSES[like.weights][0] in row.weights
                and row.experts in (None, like.is_mixture)
                and (not row.gpus or like.gpu in row.gpus)
            ):
                return row.spread
        return None

    return spread


def print_shares(figures: Sequence[Figure], catalog: Catalog) -> None:
    """Print the shares inside the shipped rows, and inside rows fitted without the figure's campaign."""
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
    """The catalog with PROBE in place of every spread."""
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
