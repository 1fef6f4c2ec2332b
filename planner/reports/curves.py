"""Computes the curves of charts from a simulation: distributions of times, and the load of a fleet over time.

Every curve has about POINTS points, so that a chart is no larger for a million requests than for a thousand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.domain import Limit, Metric, allowed_above, nearest_rank, selectors_of
from planner.simulator.gap_counts import GapCounts
from planner.simulator.layout import NONE, REJECTED, run_seconds
from planner.simulator.measured_values import request_values_s, values_where
from planner.simulator.recorded_gaps import gaps_s
from planner.simulator.simulation import Floats, Simulation
from planner.slo_metrics import METRICS, SloMetric
from planner.units import percentile_name

Mask = npt.NDArray[np.bool_]

POINTS = 240  # Points of a distribution: a chart is some hundred pixels wide, so more would not be seen.
BINS = 120  # Intervals of a chart of load over time.
LEAST_SPAN_S = 1e-3  # The least time that a chart of load shows, so that its intervals have a length.
TAIL_DECADES = 4  # Half of the points are in the tail, down to the largest value in 10,000.
MAX_GAPS = 2_000_000  # With more gaps the curve is made of every k-th run of engine steps.
PERCENTILES = (0.5, 0.9, 0.99)
MOST_SORTED = 1_000_000  # More values are not sorted; their mean may differ in the last digits.


@dataclass(frozen=True, slots=True)
class Curve:
    """A distribution: `share` of the values are at or below `value_s`, both (n,). For gaps only every
    `every`-th run of equal engine steps was read (`sampled_gaps_s`).
    """

    value_s: Floats
    share: Floats
    every: int = 1


def limits_by_chart(limits: Sequence[Limit], metric: Metric) -> dict[str, list[Limit]]:
    """The limits on a metric, by the name of the chart that shows them; without limits one chart.

    Each class of requests has its own chart, named by the class's number, because its limits do not apply to
    other requests.
    """
    by_chart, classes = dict[str, list[Limit]](), selectors_of(limits)
    for limit in limits:
        if limit.metric == metric:
            of_class = "" if limit.selector is None else f"-class-{classes.index(limit.selector) + 1}"
            by_chart.setdefault(f"{metric}{of_class}", []).append(limit)
    return by_chart or {metric: []}


def class_text(limits: Sequence[Limit]) -> str:
    """ " of chat" for limits on the class chat; empty for limits on all requests."""
    return f" of {limits[0].selector.name}" if limits and limits[0].selector is not None else ""


def cumulative_curve(simulation: Simulation, metric: Metric, limits: Sequence[Limit] = ()) -> Curve:
    """The cumulative distribution of a metric over the requests to which `limits` apply (one class, or all),
    exact at the limits. It ends below 1 if some requests have no value: they count as infinitely late.
    """
    at_s, of_limit = [limit.limit_s for limit in limits], limits[0] if limits else None
    if METRICS[metric].is_of_gaps:
        return _thinned_curve(*sampled_gaps_s(simulation, simulation.class_number(of_limit)), at_s)
    return _thinned_curve(request_values_s(simulation, metric, of_limit), None, 1, at_s)


def sampled_gaps_s(simulation: Simulation, class_number: int = int(NONE)) -> tuple[Floats, Floats, int]:
    """The gaps between tokens, how many requests had each gap, and k: in long simulations only every k-th run
    of equal engine steps is read, for at most about MAX_GAPS gaps. `class_number` selects a class.
    """
    if not len(simulation.runs):
        return np.zeros(0), np.zeros(0), 1
    every = max(1, -(-int(simulation.runs["steps"].sum()) // MAX_GAPS))
    return *gaps_s(replace(simulation, runs=simulation.runs[::every]), class_number), every


def _thinned_curve(values: Floats, weights: Floats | None, every: int, at_s: Sequence[float]) -> Curve:
    """The cumulative distribution at about POINTS points.

    Half of the points have evenly spaced shares. The others are in the tail: the logarithm of the share above
    them is evenly spaced. For each of `at_s` the last value at or below it is also a point.
    """
    order = np.argsort(values)
    values = values[order]
    count: Floats = np.cumsum(np.ones(len(values)) if weights is None else weights[order])
    share = count / count[-1] if len(count) else count
    # Equal values are one point, with the cumulative share of the last of them.
    is_last_of_equal = np.append(values[1:] > values[:-1], True)[: len(values)]
    is_point = is_last_of_equal & np.isfinite(values)
    values, share = values[is_point], share[is_point]
    # These are 9 points fewer than POINTS, to leave some for `at_s`, the few limits of a chart.
    evenly = np.linspace(0, 1, POINTS // 2 - 1)
    tail = 1 - np.logspace(0, -TAIL_DECADES, POINTS // 2 - 8)
    wanted_shares = np.unique(np.concatenate((evenly, tail)))
    points = np.append(
        np.minimum(np.searchsorted(share, wanted_shares), len(share) - 1),
        np.searchsorted(values, at_s, side="right") - 1,
    )
    points = np.unique(points[points >= 0])
    return Curve(values[points], share[points], every)


def mean_and_percentiles(values_s: Floats, weights: Floats | None = None) -> dict[str, float]:
    """Mean and nearest-rank percentiles of values, each counted `weights` times.

    NaN (it never happened) and infinity count as longer than any other value in percentiles, and are left out
    of the mean.
    """
    if weights is None and len(values_s) > MOST_SORTED:
        return _unsorted_mean_and_percentiles(values_s)
    values_s = np.nan_to_num(values_s, nan=np.inf)
    order = np.argsort(values_s)
    values_s = values_s[order]
    counts = np.ones(len(values_s)) if weights is None else weights[order]
    total = np.cumsum(counts)
    finite = int(np.searchsorted(values_s, np.inf))
    mean = float(values_s[:finite] @ counts[:finite] / total[finite - 1]) if finite else float("nan")
    values = {"mean": mean}
    for percentile_frac in PERCENTILES:
        name = percentile_name(percentile_frac)
        if not len(total):
            values[name] = float("nan")
            continue
        # `allowed_above`: how many values may be above the percentile.
        rank = total[-1] - allowed_above(percentile_frac, int(total[-1]))
        values[name] = float(values_s[int(np.searchsorted(total, max(rank, 1)))])
    return values


def _unsorted_mean_and_percentiles(values_s: Floats) -> dict[str, float]:
    """Like `mean_and_percentiles` without weights, but without a sort, and with at most one copy of the
    values.

    An array that owns its memory is changed in place, so the caller must not use it again.
    """
    if values_s.base is not None:  # A view shares its memory with an array in use.
        values_s = values_s.copy()
    values_s = np.nan_to_num(values_s, copy=False, nan=np.inf)
    is_finite = np.isfinite(values_s)
    count, total = int(is_finite.sum()), len(values_s)
    values = {"mean": float(values_s.sum(where=is_finite) / count) if count else float("nan")}
    del is_finite  # The partition below needs this memory.
    rank_by_percentile = {
        percentile_frac: nearest_rank(percentile_frac, total) - 1 for percentile_frac in PERCENTILES
    }
    values_s.partition(sorted(set(rank_by_percentile.values())))
    return values | {
        percentile_name(percentile_frac): float(values_s[rank])
        for percentile_frac, rank in rank_by_percentile.items()
    }


def statistics_of(row: SloMetric, simulation: Simulation, inside: Mask) -> dict[str, float] | None:
    """Mean and percentiles of a metric, over the requests `inside` the measured window that have a value;
    None if the simulation does not show the metric (`SloMetric.is_shown`).
    """
    if not row.is_shown(simulation):
        return None
    with_value = row.has_value(simulation)
    selected = inside if with_value is None else inside & with_value
    return mean_and_percentiles(values_where(row.values_s(simulation), selected))


def counted_mean_and_percentiles(gaps: GapCounts) -> dict[str, float]:
    """Like `mean_and_percentiles`, for gaps that were counted in bins."""
    return {"mean": gaps.mean_s} | {percentile_name(frac): gaps.percentile_s(frac) for frac in PERCENTILES}


def busy_share(simulation: Simulation, workers: Sequence[int], edges_s: Floats, *, ranks: int = 1) -> Floats:
    """The share (bins,) of each interval between `edges_s` in which these workers were in a step, on average.
    A worker has `ranks` data-parallel ranks.
    """
    runs = simulation.runs
    # Rows with negative `prefill_tokens` are gaps of single requests, which take no engine time.
    is_step = runs["prefill_tokens"] >= 0
    runs = runs[is_step & np.isin(runs["worker"], workers)]
    runs = runs[np.lexsort((runs["start_s"], runs["worker"]))]
    busy_until_s = np.zeros(len(edges_s))
    for of_worker in np.split(runs, np.flatnonzero(np.diff(runs["worker"])) + 1):
        start_s, end_s = of_worker["start_s"], of_worker["start_s"] + run_seconds(of_worker)
        if ranks > 1:  # Runs of ranks overlap. Each counts only from the end of all earlier runs.
            end_s = np.maximum.accumulate(end_s)
            start_s = np.maximum(start_s, np.append(-np.inf, end_s)[:-1])
        # Up to a time t, a run has taken max(t - start, 0) - max(t - end, 0).
        busy_until_s += _elapsed_sum_s(start_s, edges_s) - _elapsed_sum_s(end_s, edges_s)
    # The clip removes rounding errors.
    return np.clip(np.diff(busy_until_s) / (np.diff(edges_s) * max(len(workers), 1)), 0.0, 1.0)


def _elapsed_sum_s(since_s: Floats, at_s: Floats) -> Floats:
    """For each time of `at_s`, the sum over i of max(at - since_i, 0) [s]."""
    ordered = np.sort(since_s)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    count = np.searchsorted(ordered, at_s)
    return np.asarray(count * at_s - sums[count])


def running_and_queued(simulation: Simulation, at_s: Floats) -> tuple[Floats, Floats]:
    """How many requests run and how many wait at each of these times."""
    arrival_s = np.sort(simulation.arrival_s)
    scheduled_s = np.sort(np.nan_to_num(simulation.arrival_s + simulation.queue_s, nan=np.inf))
    finish_s = np.sort(np.nan_to_num(simulation.arrival_s + simulation.e2e_s, nan=np.inf))
    rejected_s = np.sort(simulation.arrival_s[simulation.status == REJECTED])
    arrived, scheduled, finished, rejected = (
        np.searchsorted(times_s, at_s, side="right").astype(float)
        for times_s in (arrival_s, scheduled_s, finish_s, rejected_s)
    )
    return scheduled - finished, arrived - rejected - scheduled


def kv_blocks_at(simulation: Simulation, workers: Sequence[int], at_s: Floats, *, ranks: int = 1) -> Floats:
    """KV blocks (times,) of the steps that run at these times on these workers, with all data-parallel
    `ranks` of a worker. A worker between steps counts as empty.
    """
    runs = simulation.runs
    # Rows with negative `prefill_tokens` are gaps of single requests, not steps.
    rows = np.flatnonzero(runs["prefill_tokens"] >= 0)
    rows = rows[np.lexsort((runs["start_s"][rows], runs["worker"][rows]))]
    start_s, worker_of_row, total = runs["start_s"][rows], runs["worker"][rows], np.zeros(len(at_s))
    if ranks > 1:  # Runs of ranks overlap: add blocks at every start, subtract them at every end.
        chosen = runs[rows[np.isin(worker_of_row, workers)]]
        for sign, times_s in ((1, chosen["start_s"]), (-1, chosen["start_s"] + run_seconds(chosen))):
            order = np.argsort(times_s)
            blocks = np.append(0, np.cumsum(chosen["blocks"][order]))
            total += sign * blocks[np.searchsorted(times_s[order], at_s, side="right")]
        return total
    for worker in workers:
        first, end = np.searchsorted(worker_of_row, [worker, worker + 1])
        last = first + np.searchsorted(start_s[first:end], at_s, side="right") - 1
        has_begun = np.flatnonzero(last >= first)
        step = runs[rows[last[has_begun]]]
        end_s = step["start_s"] + run_seconds(step)
        total[has_begun] += np.where(at_s[has_begun] <= end_s, step["blocks"], 0)
    return total


def load_edges_s(simulation: Simulation) -> Floats:
    """The edges of BINS equal intervals from the first arrival to the end; together at least LEAST_SPAN_S."""
    start_s = float(simulation.arrival_s[0])
    end_s = max(simulation.end_s, start_s + LEAST_SPAN_S)
    return np.linspace(start_s, end_s, BINS + 1)
