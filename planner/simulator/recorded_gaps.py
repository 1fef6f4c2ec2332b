"""The gaps between tokens of a simulation whose runs of steps were recorded (`record=True`).

A step of an engine gives a token to each of its sequences, and a gap is the time between two tokens of one
request. A run (`layout.RUN`) is a series of steps with the same sequences, of which step j takes `first_s` +
j `growth_s`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from planner.domain import nearest_rank
from planner.simulator import counting
from planner.simulator.layout import NONE, run_seconds
from planner.simulator.simulation import Floats, Simulation

BISECTED_FRAC = 1e-9  # `gap_percentile_s` bisects down to an interval of this share of its upper end.


def gaps_s(simulation: Simulation, class_number: int = int(NONE)) -> tuple[Floats, Floats]:
    """Every gap between tokens that ended inside the window, and how many requests saw it; with
    `class_number` those of that class.

    Needs a simulation with `record=True`; percentiles are quicker with `gap_percentile_s`.
    """
    runs = gap_runs(simulation, class_number)
    steps = runs["steps"]
    run = np.repeat(np.arange(len(runs)), steps)
    j = np.arange(len(run)) - np.repeat(np.cumsum(steps) - steps, steps)  # The step within its run.
    return runs["first_s"][run] + runs["growth_s"][run] * j, runs["sequences"][run].astype(float)


def gap_percentile_s(runs: npt.NDArray[np.void], percentile_frac: float) -> float:
    """Nearest-rank percentile over every gap of `gap_runs`, without writing the gaps out; NaN for none."""
    total = int((runs["steps"] * runs["sequences"]).sum())
    if not total:
        return float("nan")
    rank = nearest_rank(percentile_frac, total)
    if counting.gaps_at_most(runs, 0.0) >= rank:  # Tokens of one step have gaps of nothing between them.
        return 0.0
    low, high = 0.0, float((runs["first_s"] + runs["growth_s"] * (runs["steps"] - 1)).max())
    # Bisection comes near the gap, and then the few gaps between `low` and `high` are tried one by one.
    while high - low > BISECTED_FRAC * high:
        middle = (low + high) / 2
        if counting.gaps_at_most(runs, middle) >= rank:
            high = middle
        else:
            low = middle
    gap_s = float(counting.next_gap_s(runs, low))
    while counting.gaps_at_most(runs, gap_s) < rank:
        gap_s = float(counting.next_gap_s(runs, gap_s))
    return gap_s


def gap_runs(simulation: Simulation, class_number: int = int(NONE)) -> npt.NDArray[np.void]:
    """The recorded runs that gave tokens, cut to the steps that ended inside the measured window.

    With `class_number`, only runs that gave tokens to that class. The simulation needs `record=True`.
    """
    runs, first_end_s, last_end_s = _with_gaps(simulation, class_number)
    start_s, end_s = simulation.window_s
    # Runs that end before the window or begin after it are neither inside nor crossing.
    inside = (first_end_s >= start_s) & (last_end_s <= end_s)
    crossing = ~inside & (last_end_s >= start_s) & (first_end_s <= end_s)
    return np.concatenate([runs[inside], _runs_in_window(runs[crossing], start_s, end_s)])


def gap_runs_in(simulation: Simulation, edges_s: Floats, class_number: int) -> list[npt.NDArray[np.void]]:
    """`gap_runs` of each window between these edges, in one pass over the runs."""
    bounds = _bounds_s(simulation, edges_s)
    runs, first_end_s, last_end_s = _with_gaps(simulation, class_number)
    starts_s, ends_s = np.array(bounds).T
    # The windows that a run meets go from `first_window` to `last_window`. Both may lie outside of all
    # windows, so they are clamped before they are used as indices.
    first_window = np.searchsorted(ends_s, first_end_s)
    last_window = np.searchsorted(starts_s, last_end_s, "right") - 1
    # Inside one window: the run's first step ends after the window's start, and its last before its end.
    is_inside = first_window == last_window
    is_inside &= first_end_s >= starts_s[np.minimum(first_window, len(bounds) - 1)]
    is_inside &= last_end_s <= ends_s[np.maximum(last_window, 0)]
    # Runs inside one window are sorted by it and sliced; the few that cross an edge are cut.
    order = np.flatnonzero(is_inside)[np.argsort(first_window[is_inside], kind="stable")]
    slice_starts = np.searchsorted(first_window[order], np.arange(len(bounds) + 1))
    crossing = np.flatnonzero(~is_inside & (first_window <= last_window))
    runs_by_window = []
    for v, window_s in enumerate(bounds):
        inside = runs[order[slice_starts[v] : slice_starts[v + 1]]]
        crossing_here = crossing[(first_window[crossing] <= v) & (v <= last_window[crossing])]
        runs_by_window.append(np.concatenate([inside, _runs_in_window(runs[crossing_here], *window_s)]))
    return runs_by_window


def _with_gaps(simulation: Simulation, class_number: int) -> tuple[npt.NDArray[np.void], Floats, Floats]:
    """The recorded runs that gave tokens to a class, and when their first and their last step ended."""
    runs = simulation.runs[(simulation.runs["sequences"] > 0) & (simulation.runs["steps"] > 0)]
    runs = runs[runs["of_class"] == class_number + 1]  # Runs of all requests have 0 (NONE + 1).
    # The sum is that of the kernel to the last bit, so that the last token does not fall out of the window.
    last_end_s = runs["start_s"] + run_seconds(runs)
    return runs, runs["start_s"] + runs["first_s"], last_end_s


def _runs_in_window(runs: npt.NDArray[np.void], start_s: float, end_s: float) -> npt.NDArray[np.void]:
    """Runs across an edge of the window, without the steps that end outside."""
    edge_runs = runs.copy()
    for run in edge_runs:
        j = np.arange(run["steps"])  # Steps 0 to j take (j + 1) first_s + growth_s (1 + 2 + ... + j).
        ends_s = run["start_s"] + (run["first_s"] * (j + 1) + run["growth_s"] * (j * (j + 1) / 2))
        steps_inside = np.flatnonzero((ends_s >= start_s) & (ends_s <= end_s))
        run["steps"] = len(steps_inside)
        # Without its first steps the run begins later, and its first step has grown.
        if len(steps_inside) and steps_inside[0]:
            run["start_s"] = ends_s[steps_inside[0] - 1]
            run["first_s"] += run["growth_s"] * steps_inside[0]
    return edge_runs[edge_runs["steps"] > 0]


def _bounds_s(simulation: Simulation, edges_s: Floats) -> list[tuple[float, float]]:
    """First and last moment [s] of each window: a window ends just before the next one begins, and the last
    one at the end of the measured window.
    """
    ends_s = [*(math.nextafter(edge_s, -math.inf) for edge_s in edges_s[1:-1]), simulation.window_s[1]]
    return list(zip(edges_s[:-1].tolist(), ends_s, strict=True))
