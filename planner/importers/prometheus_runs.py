"""A range of a deployment's metrics as measured runs: an hour at a time, the loads as different as they were.

Counts are of all engines together and a run is one engine's, so what they served is divided evenly. Lengths
are drawn from the histograms, in proportion to their buckets and evenly within one, and stretched to the mean
that the sums say; prompt and output of a request are drawn apart.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.importers import foreign_fields
from planner.importers.benchmark_runs import MeasuredRun, MeasuredRuns, with_stated_load
from planner.importers.foreign_fields import StatedSetup
from planner.importers.prometheus_range import Floats, SampledHistogram, Series
from planner.importers.vllm_metrics import Live, live_traffic

RUN_S = 3600.0
MOST_RUNS = 6
MOST_REQUESTS = 2000  # Most requests of a run. The load is its rate, so more of them say little.
FEWEST_REQUESTS = 50
_WINDOW_S = 60.0
_TIMED = re.compile(r"[A-Za-z_:][\w:]*(?:\{.*\})?\s+\S+\s+(\d+(?:\.\d*)?)")
_LAST_S = 1e11  # A greater time is in milliseconds.


def runs_of_range(
    series: tuple[Series, ...], paths: list[Path], stated: StatedSetup, catalog: Catalog
) -> MeasuredRuns:
    """Up to MOST_RUNS hours of a range, from the quietest to the busiest.

    Raises InputError where no hour has FEWEST_REQUESTS per engine.
    """
    names = " and ".join(path.name for path in paths)
    seen = live_traffic(series, every_s=_WINDOW_S)
    width = min(int(RUN_S / _WINDOW_S), seen.windows)
    rng = np.random.default_rng(0)
    measured_runs = [
        run
        for first in range(0, seen.windows - width + 1, width)
        if (run := _run(seen, slice(first, first + width), names, rng)) is not None
    ]
    if not measured_runs:
        raise InputError(
            f"{names}: no hour has {FEWEST_REQUESTS} requests per engine with their lengths and latencies"
        )
    measured_runs.sort(key=lambda run: run.rate_rps or 0.0)
    chosen = sorted({round(k) for k in np.linspace(0, len(measured_runs) - 1, MOST_RUNS)})
    llm, gpu, tp = foreign_fields.read_setup(stated, catalog, names, llm=seen.model)
    return MeasuredRuns(
        llm,
        gpu,
        tp,
        f"Prometheus, {names}, {seen.instances} engine(s)",
        tuple(with_stated_load(measured_runs[k], stated) for k in chosen),
    )


def _run(seen: Live, part: slice, names: str, rng: np.random.Generator) -> MeasuredRun | None:
    known = np.isfinite(seen.finished[part]) & np.isfinite(seen.input_tokens[part])
    requests = float(seen.finished[part][known].sum()) / seen.instances
    latency = {}
    for metric, histogram in seen.latency.items():
        sums, counts = histogram.sums[part], histogram.total[part]
        both = np.isfinite(sums) & np.isfinite(counts)
        if counts[both].sum() > 0 and sums[both].sum() > 0:
            latency[metric] = {"mean": float(sums[both].sum() / counts[both].sum())}
    if requests < FEWEST_REQUESTS or not latency or not {"prompt", "output"} <= set(seen.lengths):
        return None
    many = min(int(requests), MOST_REQUESTS)
    lengths = [_lengths(seen.lengths[what], part, many, rng) for what in ("prompt", "output")]
    hits = float(np.nansum(seen.hit_tokens[part]))
    notes = [f"{hits:.3g} prompt tokens came from the prefix cache, which is not simulated"] if hits else []
    if preempted := float(np.nansum(seen.preempted[part])):
        notes.append(f"{preempted:g} preemption(s): the KV cache was full at times")
    return MeasuredRun(
        f"{names}, from {seen.edges_s[part.start]:.0f} s",
        many,
        lengths[0],
        lengths[1],
        latency,
        rate_rps=requests / (float(known.sum()) * _WINDOW_S),
        notes=tuple(notes),
    )


def _lengths(
    histogram: SampledHistogram, part: slice, many: int, rng: np.random.Generator
) -> tuple[float, ...]:
    """Draw `many` lengths from a histogram's counts in `part`, in random order."""
    counts = np.nan_to_num(histogram.counts[part]).sum(axis=0)
    both = np.isfinite(histogram.sums[part]) & np.isfinite(histogram.total[part])
    mean = float(histogram.sums[part][both].sum() / max(histogram.total[part][both].sum(), 1.0))
    length_quantiles = bucket_quantiles(histogram.edges, counts, (np.arange(many) + 0.5) / many)
    for _ in range(3):  # Lengths below 1 are raised to 1, which raises the mean; scaling again corrects that.
        length_quantiles = np.maximum(length_quantiles * mean / length_quantiles.mean(), 1.0)
    return tuple(rng.permutation(np.rint(length_quantiles)).tolist())


def bucket_quantiles(edges: Floats, counts: Floats, at_frac: Floats) -> Floats:
    """The values at these shares of all, taking values as evenly spread within each bucket. Values beyond the
    last finite edge count as that edge.
    """
    low = np.append(0.0, edges[:-1])
    high = np.where(np.isinf(edges), low, edges)
    upto = np.cumsum(counts) / counts.sum()
    bucket = np.minimum(np.searchsorted(upto, at_frac), len(edges) - 1)
    before = np.append(0.0, upto[:-1])[bucket]
    inside = (at_frac - before) / np.maximum(upto[bucket] - before, 1e-12)
    return np.asarray(low[bucket] + inside * (high[bucket] - low[bucket]))


def is_range(text: str) -> bool:
    """Whether a text is a range of samples with their times, and no scrape of /metrics.

    A scrape has no times, or, federated, in milliseconds.
    """
    start = text.lstrip()
    if start.startswith(("{", "[")):
        return True
    first = next((line for line in start.split("\n") if line.strip() and not line.startswith("#")), "")
    match = _TIMED.fullmatch(first.strip())
    return match is not None and float(match[1]) < _LAST_S
