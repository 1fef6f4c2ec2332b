"""Measured runs from a range of a deployment's metrics: an hour each, of loads as different as possible.

Metrics count all engines together and a run is of one engine, so that counts are divided evenly. Lengths are
drawn from the histograms, in proportion to their buckets and evenly within one, and scaled to the mean by the
sums; prompt and output of a request are drawn independently.
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
from planner.importers.vllm_metrics import LiveTraffic, live_traffic

RUN_S = 3600.0
MOST_RUNS = 6
MOST_REQUESTS = 2000  # The most requests of a run; more at the same rate would tell little.
FEWEST_REQUESTS = 50
_WINDOW_S = 60.0  # Counters are read in windows of this length.
# A line of the text format with a time stamp at its end.
_TIMED = re.compile(r"[A-Za-z_:][\w:]*(?:\{.*\})?\s+\S+\s+(\d+(?:\.\d*)?)")
_LAST_S = 1e11  # A larger time stamp is in milliseconds.


def runs_of_range(
    series: tuple[Series, ...], paths: list[Path], stated: StatedSetup, catalog: Catalog
) -> MeasuredRuns:
    """Up to MOST_RUNS hours of a range, from the quietest to the busiest.

    Raises InputError where no hour has FEWEST_REQUESTS per engine.
    """
    names = " and ".join(path.name for path in paths)
    live = live_traffic(series, every_s=_WINDOW_S)
    width = min(int(RUN_S / _WINDOW_S), live.windows)
    rng = np.random.default_rng(0)
    measured_runs = [
        run
        for first in range(0, live.windows - width + 1, width)
        if (run := _run_of_hour(live, slice(first, first + width), names, rng)) is not None
    ]
    if not measured_runs:
        raise InputError(
            f"{names}: no hour has {FEWEST_REQUESTS} requests per engine with their lengths and latencies"
        )
    measured_runs.sort(key=lambda run: run.rate_rps or 0.0)
    # Evenly spaced from the quietest hour to the busiest.
    chosen = sorted({round(k) for k in np.linspace(0, len(measured_runs) - 1, MOST_RUNS)})
    llm, gpu, tp = foreign_fields.read_setup(stated, catalog, names, llm=live.model)
    return MeasuredRuns(
        llm,
        gpu,
        tp,
        f"Prometheus, {names}, {live.instances} engine(s)",
        tuple(with_stated_load(measured_runs[k], stated) for k in chosen),
    )


def _run_of_hour(live: LiveTraffic, part: slice, names: str, rng: np.random.Generator) -> MeasuredRun | None:
    """The run of the windows `part`; None with too few requests, or without their lengths or latencies."""
    has_counts = np.isfinite(live.finished[part]) & np.isfinite(live.input_tokens[part])
    requests = float(live.finished[part][has_counts].sum()) / live.instances
    latency = {}
    for metric, histogram in live.latency.items():
        sums, counts = histogram.sums[part], histogram.total[part]
        both = np.isfinite(sums) & np.isfinite(counts)
        if counts[both].sum() > 0 and sums[both].sum() > 0:
            latency[metric] = {"mean": float(sums[both].sum() / counts[both].sum())}
    if requests < FEWEST_REQUESTS or not latency or not {"prompt", "output"} <= set(live.lengths):
        return None
    count = min(int(requests), MOST_REQUESTS)
    lengths = [_draw_lengths(live.lengths[what], part, count, rng) for what in ("prompt", "output")]
    hits = float(np.nansum(live.hit_tokens[part]))
    notes = [f"{hits:.3g} prompt tokens came from the prefix cache, which is not simulated"] if hits else []
    if preempted := float(np.nansum(live.preempted[part])):
        notes.append(f"{preempted:g} preemption(s): the KV cache was full at times")
    return MeasuredRun(
        f"{names}, from {live.edges_s[part.start]:.0f} s",
        count,
        lengths[0],
        lengths[1],
        latency,
        rate_rps=requests / (float(has_counts.sum()) * _WINDOW_S),
        notes=tuple(notes),
    )


def _draw_lengths(
    histogram: SampledHistogram, part: slice, count: int, rng: np.random.Generator
) -> tuple[float, ...]:
    """Draw `count` lengths from a histogram's counts in `part`, in random order."""
    counts = np.nan_to_num(histogram.counts[part]).sum(axis=0)
    both = np.isfinite(histogram.sums[part]) & np.isfinite(histogram.total[part])
    mean = float(histogram.sums[part][both].sum() / max(histogram.total[part][both].sum(), 1.0))
    length_quantiles = bucket_quantiles(histogram.edges, counts, (np.arange(count) + 0.5) / count)
    for _ in range(3):  # Lengths below 1 are raised to 1, which raises the mean; scaling again corrects that.
        length_quantiles = np.maximum(length_quantiles * mean / length_quantiles.mean(), 1.0)
    return tuple(rng.permutation(np.rint(length_quantiles)).tolist())


def bucket_quantiles(edges: Floats, counts: Floats, at_frac: Floats) -> Floats:
    """Quantiles at `at_frac` of a histogram whose values are spread evenly within each bucket; values beyond
    the last finite edge count as that edge.
    """
    low = np.append(0.0, edges[:-1])
    high = np.where(np.isinf(edges), low, edges)
    upto = np.cumsum(counts) / counts.sum()
    bucket = np.minimum(np.searchsorted(upto, at_frac), len(edges) - 1)
    before = np.append(0.0, upto[:-1])[bucket]
    inside = (at_frac - before) / np.maximum(upto[bucket] - before, 1e-12)  # An empty bucket divides by no 0.
    return np.asarray(low[bucket] + inside * (high[bucket] - low[bucket]))


def is_range(text: str) -> bool:
    """Whether a text is a range of samples with their times in seconds, and not one scrape of /metrics.

    A scrape has no times, or if federated times in milliseconds.
    """
    start = text.lstrip()
    if start.startswith(("{", "[")):
        return True
    first = next((line for line in start.split("\n") if line.strip() and not line.startswith("#")), "")
    match = _TIMED.fullmatch(first.strip())
    return match is not None and float(match[1]) < _LAST_S
