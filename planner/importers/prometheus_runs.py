"""Measured runs from hours of a deployment's metrics, from the quietest to the busiest. A range shorter than
an hour is one run.

Metrics count all engines together and a run is of one engine, so requests are divided by the number of
engines in that hour. Metrics do not list requests, so the lengths of a run's requests are drawn from the
histograms: in proportion to the buckets' counts and evenly within a bucket, then scaled to the mean that the
sums give. Prompts and outputs are drawn independently.
"""

import re
from pathlib import Path

import numpy as np

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.importers import foreign_fields
from planner.importers.benchmark_runs import MeasuredRun, MeasuredRuns, with_stated_load
from planner.importers.foreign_fields import StatedSetup
from planner.importers.prometheus_range import Floats, PrometheusSeries, SampledHistogram
from planner.importers.vllm_metrics import OUTPUT, PROMPT, LiveTraffic, live_traffic, prefill_series

RUN_S = 3600.0  # Within an hour the load hardly changes.
MOST_RUNS = 6  # Enough to span quiet and busy hours; each is simulated many times when fits are corrected.
MOST_REQUESTS = 2000  # The most requests of a run; more at the same rate would tell little.
FEWEST_REQUESTS = 50  # With fewer the means of an hour are chance.
_WINDOW_S = 60.0  # Counters are read in windows of this length.
# A line of the text format with a time stamp at its end.
_TIMED = re.compile(r"[A-Za-z_:][\w:]*(?:\{.*\})?\s+\S+\s+(\d+(?:\.\d*)?)")
_LEAST_MS = 1e11  # A time stamp from here on is in milliseconds: in seconds it would be after the year 5000.


def runs_of_range(
    series: tuple[PrometheusSeries, ...], paths: list[Path], stated: StatedSetup, catalog: Catalog
) -> MeasuredRuns:
    """Up to MOST_RUNS hours of a range, from the quietest to the busiest.

    Raises InputError where no hour has FEWEST_REQUESTS per engine.
    """
    names = " and ".join(path.name for path in paths)
    live = live_traffic(series, every_s=_WINDOW_S)
    llm_series = [row for row in series if row.label("model_name") == live.model]
    if prefill_series(llm_series, live.edges_s):  # Some engines only prefill.
        raise InputError(
            f"{names}: is of prefill and decode workers, and a run is of engines that do both; query mixed "
            "workers"
        )
    run_windows = min(int(RUN_S / _WINDOW_S), live.windows)
    rng = np.random.default_rng(0)  # The same metrics give the same runs.
    measured_runs = []
    for first in range(0, live.windows - run_windows + 1, run_windows):
        run = _run_of_hour(live, slice(first, first + run_windows), names, rng)
        if run is not None:
            measured_runs.append(run)
    if not measured_runs:
        raise InputError(
            f"{names}: no hour has {FEWEST_REQUESTS} requests per engine with their lengths and latencies"
            f"{_lacking_text(live)}"
        )
    measured_runs.sort(key=lambda run: run.rate_rps or 0.0)
    # The chosen hours are evenly spaced by rank of load, from the quietest to the busiest.
    chosen = sorted({round(k) for k in np.linspace(0, len(measured_runs) - 1, MOST_RUNS)})
    llm, gpu, tp = foreign_fields.read_setup(stated, catalog, names, llm=live.model)
    return MeasuredRuns(
        llm,
        gpu,
        tp,
        f"Prometheus, {names}, {live.instances} engine(s)",
        tuple(with_stated_load(measured_runs[k], stated) for k in chosen),  # Options may state the load.
    )


def _lacking_text(live: LiveTraffic) -> str:
    """Which of the metrics that a run needs the range lacks; empty if it has them all."""
    metrics = {"prompt": PROMPT, "output": OUTPUT}
    lacking = [f"{metrics[side]}_bucket" for side in metrics if side not in live.lengths]
    has_sums = any(_known_totals(each, slice(None))[0] > 0 for each in live.latency.values())
    if not has_sums:
        lacking.append("_sum and _count of latencies, such as vllm:time_to_first_token_seconds")
    return f"; it lacks {' and '.join(lacking)}" if lacking else ""


def _run_of_hour(
    live: LiveTraffic, windows: slice, names: str, rng: np.random.Generator
) -> MeasuredRun | None:
    """The run of these windows; None with too few requests, or without their lengths or latencies."""
    # A count is NaN in a window without samples.
    has_counts = np.isfinite(live.finished[windows]) & np.isfinite(live.input_tokens[windows])
    engines = float(live.engines[windows][has_counts].mean()) if has_counts.any() else 0.0
    if not engines:
        return None
    requests = float(live.finished[windows][has_counts].sum()) / engines
    latency_s = {}
    for metric, histogram in live.latency.items():
        sum_s, observations = _known_totals(histogram, windows)
        if observations > 0 and sum_s > 0:
            latency_s[metric] = {"mean": sum_s / observations}
    has_lengths = all(
        side in live.lengths and np.nansum(live.lengths[side].counts[windows]) > 0
        for side in ("prompt", "output")
    )
    if requests < FEWEST_REQUESTS or not latency_s or not has_lengths:
        return None
    run_requests = min(int(requests), MOST_REQUESTS)
    prompts, outputs = (
        _draw_lengths(live.lengths[side], windows, run_requests, rng) for side in ("prompt", "output")
    )
    hits = float(np.nansum(live.hit_tokens[windows]))
    notes = (
        [f"{hits:.3g} prompt tokens of all engines came from the prefix cache, which is not simulated"]
        if hits
        else []
    )
    if preempted := float(np.nansum(live.preempted[windows])):
        notes.append(f"{preempted:g} preemption(s) on all engines: the KV cache was full at times")
    return MeasuredRun(
        name=f"{names}, from {live.edges_s[windows.start]:.0f} s",
        requests=run_requests,
        input_tokens=prompts,
        output_tokens=outputs,
        latency_s=latency_s,
        rate_rps=requests / (float(has_counts.sum()) * _WINDOW_S),
        notes=tuple(notes),
    )


def _known_totals(histogram: SampledHistogram, windows: slice) -> tuple[float, float]:
    """The sum of observations and their number, over the windows in which both are known."""
    sums, counts = histogram.sums[windows], histogram.total[windows]
    is_known = np.isfinite(sums) & np.isfinite(counts)
    return float(sums[is_known].sum()), float(counts[is_known].sum())


def _draw_lengths(
    histogram: SampledHistogram, windows: slice, requests: int, rng: np.random.Generator
) -> tuple[float, ...]:
    """Lengths [tokens] of this many requests, by a histogram's counts in these windows, in random order."""
    counts = np.nan_to_num(histogram.counts[windows]).sum(axis=0)
    sum_tokens, observations = _known_totals(histogram, windows)
    lengths = bucket_quantiles(histogram.edges, counts, (np.arange(requests) + 0.5) / requests)
    # Without sums the mean is that of values spread evenly within buckets.
    mean = sum_tokens / observations if sum_tokens > 0 else max(float(lengths.mean()), 1.0)
    # Lengths below 1 are raised to 1, which raises the mean; three rounds of scaling correct that.
    for _ in range(3):
        lengths = np.maximum(lengths * mean / lengths.mean(), 1.0)
    return tuple(rng.permutation(np.rint(lengths)).tolist())


def bucket_quantiles(edges: Floats, counts: Floats, at_frac: Floats) -> Floats:
    """Quantiles at `at_frac` (n,) of a histogram with `counts` (B,) in buckets with upper `edges` (B,), whose
    values are spread evenly within each bucket. Values beyond the last finite edge count as that edge.
    """
    low = np.append(0.0, edges[:-1])
    high = np.where(np.isinf(edges), low, edges)
    upto_frac = np.cumsum(counts) / counts.sum()
    bucket = np.minimum(np.searchsorted(upto_frac, at_frac), len(edges) - 1)
    before_frac = np.append(0.0, upto_frac[:-1])[bucket]
    # How far into its bucket a quantile lies, 0 to 1; the maximum keeps empty buckets from dividing by 0.
    inside_frac = (at_frac - before_frac) / np.maximum(upto_frac[bucket] - before_frac, 1e-12)
    return np.asarray(low[bucket] + inside_frac * (high[bucket] - low[bucket]))


def is_range(text: str) -> bool:
    """Whether a text is a range of samples with their times in seconds, and not one scrape of /metrics.

    A scrape of an engine has no times, and a scrape of Prometheus' /federate has them in milliseconds. JSON
    is an answer of Prometheus' HTTP API, and counts as a range.
    """
    start = text.lstrip()
    if start.startswith(("{", "[")):
        return True
    first = next((line for line in start.split("\n") if line.strip() and not line.startswith("#")), "")
    match = _TIMED.fullmatch(first.strip())
    return match is not None and float(match[1]) < _LEAST_MS
