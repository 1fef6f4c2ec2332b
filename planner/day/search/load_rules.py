"""Fits rules from load to workers on windows of earlier traffic, for the plan's own controller.

Windows are taken evenly from the traffic. Simulations find the fewest workers that keep the SLO in each. A
rule (`LoadRule` of planner/day/controllers/knowledge.py) maps the load of a window to a number of workers
that suffices in 90 % (COVERED) of the windows with this load. The load is a percentile over the spans of a
window (`peak_load`); each rule has the span length of SPANS_S that predicts the pool's workers best. The mean
rate of a window predicts little: on a production day prompts are five times as long in one hour as in
another, and bursts come and go. The busiest windows are also simulated with more traffic, so that a rule
covers loads above the day's highest.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from sklearn.isotonic import IsotonicRegression

from planner.day.controllers.knowledge import EngineProfile, LoadRule, peak_load
from planner.day.search.capacity import least_that_keep
from planner.domain import Slo
from planner.fleet import Fleet, Role
from planner.traffic.scaling import rescale_trace
from planner.traffic.trace import Trace

Floats = npt.NDArray[np.float64]
# The next three are set by hand.
MOST_WINDOWS = 72  # Each takes several simulations, so more windows would take too long.
LEAST_WINDOWS = 8  # No rule is fitted through fewer points.
LEAST_REQUESTS = 200  # A percentile of fewer requests is mostly chance.
SPANS_S = (15.0, 60.0, 600.0)  # From a short burst to a whole window.
COVERED = 0.9  # The share of windows for which a rule has enough workers.
# The busiest windows are simulated with these multiples of their traffic. Without them a rule took one worker
# more for any load above the highest seen. On a day of one prefill and one decode worker that cost 13 % more
# than the optimum, and 3 % with them (2026-11-24).
MORE_TRAFFIC = (1.4, 2.0)
MOST_BUSY_WINDOWS = 8  # How many windows count as the busiest; set by hand.
WINDOW_S = 600.0  # The length of windows where the SLO names none (`every`).
_ABOVE_POINTS = 1e-6  # A line through points is raised by this many workers, to lie above the points.


def fit_load_rules(
    fleet: Fleet, trace: Trace, slo: Slo, engines: Sequence[EngineProfile], *, most: Sequence[int]
) -> tuple[LoadRule, ...]:
    """A rule for each of the P pools; () where the traffic has too few windows to fit rules.

    Each pool has at least one worker, and at most as many as `most` (P,) says. `engines` (P,) give the work
    of a request in each pool.
    """
    window_s = slo.every_s or WINDOW_S
    windows = _spread_windows(trace, window_s)
    if len(windows) < LEAST_WINDOWS:
        return ()
    unchanged = len(windows)  # Windows from here on have more traffic than the trace.
    # The busiest windows are those of the highest load on the first pool's engine.
    windows += _busiest_with_more_traffic(windows, engines[0], window_s)
    least = [1] * len(fleet.pools)
    # Shape (windows, P). A window in which not even `most` workers keep the SLO counts as needing `most`.
    needed = np.array([least_that_keep(fleet, each, slo, least, most) or tuple(most) for each in windows])
    rules = []
    for i, pool in enumerate(fleet.pools):
        fits = []
        for span_s in SPANS_S:
            if span_s <= window_s:
                loads = np.array(
                    [_window_load(each, engines[i], pool.role, span_s, window_s) for each in windows]
                )
                fits.append(_fit_rule(loads, needed[:, i], span_s, window_s))
        _, rule = min(fits, key=lambda fit: fit[0])  # By the mean error.
        rules.append(replace(rule, needs=tuple(sorted(needed[:unchanged, i].tolist()))))
    return tuple(rules)


def _spread_windows(trace: Trace, window_s: float) -> list[Trace]:
    """At most MOST_WINDOWS whole windows with enough requests, evenly spread over the trace.

    The arrival times of each window count from its start.
    """
    starts_s = np.arange(trace.arrival_s[0], trace.arrival_s[-1] - window_s, window_s)
    edges = np.searchsorted(trace.arrival_s, [starts_s, starts_s + window_s]).T
    full = [k for k in range(len(starts_s)) if edges[k, 1] - edges[k, 0] >= LEAST_REQUESTS]
    if not full:
        return []
    places = np.linspace(0, len(full) - 1, MOST_WINDOWS).round().astype(int)
    chosen = sorted({full[place] for place in places})  # With fewer windows than MOST_WINDOWS places repeat.
    windows = []
    for k in chosen:
        window = trace.select(np.arange(*edges[k]))
        windows.append(replace(window, arrival_s=window.arrival_s - starts_s[k]))
    return windows


def _busiest_with_more_traffic(
    windows: Sequence[Trace], engine: EngineProfile, window_s: float
) -> list[Trace]:
    """The windows of the highest load, each with MORE_TRAFFIC times its own requests.

    For this ranking a window is one span, and its load is the work of a mixed worker that has `engine`.
    """
    by_load = sorted(windows, key=lambda each: -_window_load(each, engine, "mixed", window_s, window_s))
    busier = []
    for number, window in enumerate(by_load[:MOST_BUSY_WINDOWS]):
        for factor in MORE_TRAFFIC:
            rate_rps = factor * len(window) / max(window.duration_s, 1.0)
            busier.append(rescale_trace(window, rate_rps, rng=np.random.default_rng(number)))
    return busier


def _window_load(window: Trace, engine: EngineProfile, role: Role, span_s: float, window_s: float) -> float:
    """The load of a window (`knowledge.LoadRule`), from the rate and the mean lengths of each span.

    A controller sees only rates and mean lengths, no single requests, so the load is computed from these.
    """
    span_of_request = np.floor_divide(window.arrival_s, span_s).astype(int)
    # If whole spans do not fill the window, its end may be cut off with its requests.
    spans = round(window_s / span_s)
    count = np.bincount(span_of_request, minlength=spans)[:spans]
    mean_input, mean_output = (
        np.bincount(span_of_request, tokens, minlength=spans)[:spans] / np.maximum(count, 1)
        for tokens in (window.input_tokens, window.output_tokens)
    )
    work_s = np.array(
        [
            engine.work_s(role, float(input_tokens), float(output_tokens))
            for input_tokens, output_tokens in zip(mean_input, mean_output, strict=True)
        ]
    )
    return peak_load(count * work_s / span_s)


def _fit_rule(
    loads: Floats, needed_workers: npt.NDArray[np.int64], span_s: float, window_s: float
) -> tuple[float, LoadRule]:
    """Fit a rule to the `loads` (W,) of windows and the workers `needed_workers` (W,) in them.

    Returns the rule's mean error in workers, and the rule. Its n-th edge is the load above which n workers
    are too few: the smaller of (a) the least load at which, by isotonic regression, more than 1 - COVERED of
    the windows need more than n workers, and (b) the load at which `_covering_line` reaches n.
    """
    slope, offset = _covering_line(loads, needed_workers)
    ordered = np.sort(loads)
    edges: list[float] = []
    for n in range(1, int(needed_workers.max()) + 1):
        needs_more_frac = (
            IsotonicRegression(out_of_bounds="clip").fit(loads, needed_workers > n).predict(ordered)
        )
        first = int(np.searchsorted(needs_more_frac, 1 - COVERED, side="right"))
        edge = (n - offset) / slope if slope > 0 else float("inf")
        if first == 0:  # More than n workers are needed at every load.
            edge = min(edge, 0.0)
        elif first < len(ordered):
            edge = min(edge, float(ordered[first - 1 : first + 1].mean()))
        if edge >= ordered[-1]:
            break  # Above the highest load a rule has no edges: workers grow in proportion.
        edges.append(max([edge, 0.0, *edges]))  # Edges must not fall.
    rule = LoadRule(tuple(edges), float(ordered[-1]), span_s, window_s)
    predicted = np.array([rule.workers_for_load(load) for load in loads.tolist()])
    return float(np.abs(predicted - needed_workers).mean()), rule


def _covering_line(loads: Floats, needed_workers: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Slope and offset of the line below which a share of COVERED of the points (load, needed - 1) lies.

    A rule takes the line rounded up, which suffices where the line is above needed - 1. This is the quantile
    regression of Koenker and Bassett (Econometrica 1978), as a linear program.
    """
    n = len(loads)
    # Variables: the slope (>= 0), the offset, and how far each point lies above and below the line (>= 0).
    weights = np.concatenate(([0.0, 0.0], np.full(n, COVERED), np.full(n, 1 - COVERED)))
    line = np.column_stack((loads, np.ones(n), np.eye(n), -np.eye(n)))
    bounds = [(0.0, None), (None, None), *[(0.0, None)] * (2 * n)]
    solution = linprog(weights, A_eq=line, b_eq=needed_workers - 1.0, bounds=bounds, method="highs")
    slope, offset = float(solution.x[0]), float(solution.x[1])
    # The optimal line passes through points, where rounding up would give one worker too few.
    return slope, offset + _ABOVE_POINTS
