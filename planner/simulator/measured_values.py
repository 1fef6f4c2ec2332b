"""The values of a metric in a simulation, of the requests or gaps that are measured, and their percentiles.

planner/slo_metrics.py says what each metric is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.domain import Limit, Metric, nearest_rank
from planner.files.column_files import release_memory
from planner.simulator.recorded_gaps import gap_percentile_s, gap_runs
from planner.simulator.simulation import Floats, Simulation
from planner.slo_metrics import METRICS


def percentile_s(values_s: Floats, percentile_frac: float, weights: Floats | None = None) -> float:
    """Smallest value such that at least this share of all lies at or below it; NaN for no values.

    With `weights` (n,), whole numbers, a value counts as often as its weight says.
    """
    if weights is None:
        return _percentile_in_place_s(np.array(values_s), percentile_frac)  # np.array makes a copy.
    if len(values_s) == 0:
        return float("nan")
    order = np.argsort(values_s, kind="stable")
    cumulated = np.cumsum(weights[order])
    rank = nearest_rank(percentile_frac, int(cumulated[-1]))
    return float(values_s[order[int(np.searchsorted(cumulated, rank))]])


def _percentile_in_place_s(values_s: Floats, percentile_frac: float) -> float:
    """Like `percentile_s` without weights; reorders `values_s`."""
    if len(values_s) == 0:
        return float("nan")
    index = nearest_rank(percentile_frac, len(values_s)) - 1
    values_s.partition(index)
    return float(values_s[index])


def metric_percentile_s(
    simulation: Simulation, metric: Metric, percentile_frac: float, limit: Limit | None = None
) -> float:
    """A percentile of a metric over the measured requests, or over the gaps between tokens; NaN if there are
    no values, or if gaps were not recorded.

    With `limit` only requests of its class, or their gaps, count.
    """
    if METRICS[metric].is_of_gaps:
        if simulation.gaps is not None:
            # Gaps are counted in place of recorded runs only in long traces without classes (replay.py).
            return simulation.gaps.percentile_s(percentile_frac)
        if len(simulation.runs) == 0:
            return float("nan")
        return gap_percentile_s(gap_runs(simulation, simulation.class_number(limit)), percentile_frac)
    return _percentile_in_place_s(request_values_s(simulation, metric, limit), percentile_frac)


def request_values_s(simulation: Simulation, metric: Metric, limit: Limit | None = None) -> Floats:
    """The measured requests' values of a metric, for tbt their longest gaps; infinite where a request never
    got that far. With `limit` only requests of its class count.
    """
    values_s = METRICS[metric].values_s(simulation)
    mask = _measured_with_value(simulation, metric, limit)
    chosen_s = values_where(values_s, mask)
    # A view is copied, because its array belongs to the simulation.
    return np.nan_to_num(chosen_s, copy=chosen_s.base is not None, nan=np.inf)


def arrivals_with_value_s(simulation: Simulation, metric: Metric, limit: Limit) -> Floats:
    """The arrival times of the requests whose values `request_values_s` gives."""
    return simulation.arrival_s[_measured_with_value(simulation, metric, limit)]


def _measured_with_value(
    simulation: Simulation, metric: Metric, limit: Limit | None = None
) -> npt.NDArray[np.bool_]:
    """(n,): the measured requests that have a value of the metric, with `limit` those of its class."""
    mask = measured_mask(simulation)
    if limit is not None and limit.selector is not None:
        mask &= simulation.limited_requests(limit)
    if (with_value := METRICS[metric].has_value(simulation)) is not None:
        mask &= with_value
        release_memory(simulation.output_tokens)  # As in `measured_mask`; metrics without a gap read it.
    return mask


def measured_mask(simulation: Simulation) -> npt.NDArray[np.bool_]:
    """Which requests (n,) count: those that arrived inside the measured window."""
    start_s, end_s = simulation.window_s
    inside = np.asarray((simulation.arrival_s >= start_s) & (simulation.arrival_s <= end_s))
    release_memory(simulation.arrival_s)  # Pages of a mapped file are given back; the array stays readable.
    return inside


def values_where(values: Floats, mask: npt.NDArray[np.bool_]) -> Floats:
    """The values where the mask is True; a view, not a copy, if these are contiguous."""
    first = int(mask.argmax())
    end = len(mask) - int(mask[::-1].argmax())
    # If none is True, `first` to `end` is everything, and `values[mask]` is empty, as it should be.
    return values[first:end] if mask[first:end].all() else values[mask]
