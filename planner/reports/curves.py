"""Distributions of what was simulated, and the load of a fleet over time, thinned to what a chart can show.

Every curve has at most POINTS points, so a chart weighs the same for a thousand requests as for a million.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.domain import Metric, allowed_above, nearest_rank
from planner.simulator.gap_counts import GapCounts
from planner.simulator.layout import run_seconds
from planner.simulator.replay import Simulation
from planner.simulator.slo_verdict import gaps_s, request_values_s
from planner.slo_metrics import METRICS
from planner.units import percentile_name

Floats = npt.NDArray[np.float64]

POINTS = 240
BINS = 120
MAX_GAPS = 2_000_000  # With more gaps the curve is made of every k-th run of engine steps.
PERCENTILES = (0.5, 0.9, 0.99)
MANY = 1_000_000  # With more values the mean is summed in another order, without sorting.


@dataclass(frozen=True, slots=True)
class Curve:
    """A distribution: `share` of the values lie at or below `value_s`. `every` run of steps was taken."""

    value_s: Floats
    share: Floats
    every: int = 1


def distribution(simulation: Simulation, metric: Metric, at_s: Sequence[float] = ()) -> Curve:
    """The cumulative distribution of a metric, exact at `at_s`; what never came true keeps it below 1."""
    if METRICS[metric].is_of_gaps:
        return _thinned(*sampled_gaps_s(simulation), at_s)
    return _thinned(request_values_s(simulation, metric), None, 1, at_s)


def sampled_gaps_s(simulation: Simulation) -> tuple[Floats, Floats, int]:
    """Gaps between tokens, how many requests saw each, and k where only every k-th run of steps was taken."""
    if not len(simulation.runs):
        return np.zeros(0), np.zeros(0), 1
    every = max(1, -(-int(simulation.runs["steps"].sum()) // MAX_GAPS))
    return *gaps_s(replace(simulation, runs=simulation.runs[::every])), every


def _thinned(values: Floats, weights: Floats | None, every: int, at_s: Sequence[float]) -> Curve:
    order = np.argsort(values)
    values = values[order]
    count: Floats = np.cumsum(np.ones(len(values)) if weights is None else weights[order])
    share = count / count[-1] if len(count) else count
    # The last of equal values has their cumulative share.
    last = np.flatnonzero(np.append(values[1:] > values[:-1], True))
    last = last[np.isfinite(values[last])] if len(values) else last[:0]
    values, share = values[last], share[last]
    tail = 1 - np.logspace(0, -4, POINTS // 2 - 8)  # Evenly spaced in the logarithm of the share above.
    wanted = np.unique(np.concatenate((np.linspace(0, 1, POINTS // 2 - 1), tail)))
    at = np.append(
        np.minimum(np.searchsorted(share, wanted), len(share) - 1),
        np.searchsorted(values, at_s, side="right") - 1,
    )
    keep = np.unique(at[at >= 0])
    return Curve(values[keep], share[keep], every)


def spread(values_s: Floats, weights: Floats | None = None) -> dict[str, float]:
    """Mean and nearest-rank percentiles of values, each seen `weights` times.

    NaN (it never happened) and infinity count as longer than anything, and are left out of the mean.
    """
    if weights is None and len(values_s) > MANY:
        return _spread_of_many(values_s)
    values_s = np.nan_to_num(values_s, nan=np.inf)
    order = np.argsort(values_s)
    values_s = values_s[order]
    seen = np.ones(len(values_s)) if weights is None else weights[order]
    total = np.cumsum(seen)
    happened = int(np.searchsorted(values_s, np.inf))
    mean = float(values_s[:happened] @ seen[:happened] / total[happened - 1]) if happened else float("nan")
    values = {"mean": mean}
    for percentile_frac in PERCENTILES:
        name = percentile_name(percentile_frac)
        if not len(total):
            values[name] = float("nan")
            continue
        rank = total[-1] - allowed_above(percentile_frac, int(total[-1]))
        values[name] = float(values_s[int(np.searchsorted(total, max(rank, 1)))])
    return values


def _spread_of_many(values_s: Floats) -> dict[str, float]:
    """The same without sorting them, nor more than one copy."""
    if values_s.base is not None:  # A view is copied, because its array belongs to others.
        values_s = values_s.copy()
    values_s = np.nan_to_num(values_s, copy=False, nan=np.inf)
    happened = np.isfinite(values_s)
    count, total = int(happened.sum()), len(values_s)
    values = {"mean": float(values_s.sum(where=happened) / count) if count else float("nan")}
    del happened
    at = {frac: nearest_rank(frac, total) - 1 for frac in PERCENTILES}
    values_s.partition(sorted(set(at.values())))
    return values | {percentile_name(frac): float(values_s[place]) for frac, place in at.items()}


def counted_spread(gaps: GapCounts) -> dict[str, float]:
    """The same of gaps that were counted."""
    return {"mean": gaps.mean_s} | {percentile_name(frac): gaps.percentile_s(frac) for frac in PERCENTILES}


def busy_share(simulation: Simulation, workers: Sequence[int], edges_s: Floats) -> Floats:
    """Share of the time between edges that these workers were in a step, (bins,)."""
    runs = simulation.runs
    # Other rows are gaps of single requests, which take no engine time.
    is_step = runs["prefill_tokens"] >= 0
    runs = runs[is_step & np.isin(runs["worker"], workers)]
    start_s = runs["start_s"]
    end_s = start_s + run_seconds(runs)
    until = _elapsed(start_s, edges_s) - _elapsed(end_s, edges_s)
    return np.clip(np.diff(until) / (np.diff(edges_s) * max(len(workers), 1)), 0.0, 1.0)


def _elapsed(since_s: Floats, at_s: Floats) -> Floats:
    """sum over i of max(at - since_i, 0), for every `at`."""
    ordered = np.sort(since_s)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    count = np.searchsorted(ordered, at_s)
    return np.asarray(count * at_s - sums[count])


def in_system(simulation: Simulation, at_s: Floats) -> tuple[Floats, Floats]:
    """(running, queued) requests at these times."""
    arrival_s = np.sort(simulation.arrival_s)
    scheduled_s = np.sort(np.nan_to_num(simulation.arrival_s + simulation.queue_s, nan=np.inf))
    finish_s = np.sort(np.nan_to_num(simulation.arrival_s + simulation.e2e_s, nan=np.inf))
    rejected_s = np.sort(simulation.arrival_s[simulation.status == 1])
    arrived, scheduled, finished, rejected = (
        np.searchsorted(times_s, at_s, side="right").astype(float)
        for times_s in (arrival_s, scheduled_s, finish_s, rejected_s)
    )
    return scheduled - finished, arrived - rejected - scheduled


def kv_blocks_at(simulation: Simulation, workers: Sequence[int], at_s: Floats) -> Floats:
    """KV blocks in use on these workers at these times, of the step that is under way, (times,)."""
    runs = simulation.runs
    rows = np.flatnonzero(runs["prefill_tokens"] >= 0)  # Other rows are gaps of single requests.
    rows = rows[np.lexsort((runs["start_s"][rows], runs["worker"][rows]))]
    start_s, of, total = runs["start_s"][rows], runs["worker"][rows], np.zeros(len(at_s))
    for worker in workers:
        first, end = np.searchsorted(of, [worker, worker + 1])
        last = first + np.searchsorted(start_s[first:end], at_s, side="right") - 1
        begun = np.flatnonzero(last >= first)
        step = runs[rows[last[begun]]]
        end_s = step["start_s"] + run_seconds(step)
        total[begun] += np.where(at_s[begun] <= end_s, step["blocks"], 0)
    return total


def load_edges_s(simulation: Simulation) -> Floats:
    start_s = float(simulation.arrival_s[0])
    end_s = max(simulation.end_s, start_s + 1e-3)
    return np.linspace(start_s, end_s, BINS + 1)
