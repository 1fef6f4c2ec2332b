"""Workers per load, for the plan's own controller: what windows of earlier traffic needed.

Of windows spread over the traffic each is simulated by itself: the least sizes that keep the SLO in it. A
rule gives a window's load (deployment.LoadRule) so many workers that COVERED of the windows with such a load
need no more, with the span of seconds that explains a pool's sizes best. The busiest windows are simulated
with more traffic too, so that a rule knows what lies above the highest load of the day. On a production day
prompts are five times as long in one hour as in another and bursts come and go; the mean rate says little of
what is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from sklearn.isotonic import IsotonicRegression

from planner.day.controllers.deployment import EngineProfile, LoadRule, peak_load
from planner.day.search.capacity import least_that_keep
from planner.domain import Slo
from planner.fleet import Fleet, Role
from planner.traffic.scaling import rescale
from planner.traffic.trace import Trace

Floats = npt.NDArray[np.float64]
MOST_WINDOWS = 72
LEAST_WINDOWS = 8
LEAST_REQUESTS = 200  # of a window: of fewer no percentile is known
SPANS_S = (15.0, 60.0, 600.0)
COVERED = 0.9
# The busiest windows are simulated with so many times their traffic. Without these a rule took one worker
# more for any load above the highest seen: 13 % above the optimum on a day of one prefill and one decode
# worker, 3 % with them (2026-11-24).
MORE_TRAFFIC = (1.4, 2.0)
MOST_BUSY_WINDOWS = 8
WINDOW_S = 600.0  # where the SLO names none


def load_rules(
    fleet: Fleet, trace: Trace, slo: Slo, engines: Sequence[EngineProfile], *, most: Sequence[int]
) -> tuple[LoadRule, ...]:
    """A rule for each pool; none where the traffic has too few windows to fit one."""
    window_s = slo.every_s or WINDOW_S
    parts = _windows(trace, window_s)
    if len(parts) < LEAST_WINDOWS:
        return ()
    parts += _busier(parts, engines[0], window_s)
    ones = [1] * len(fleet.pools)
    needed = np.array([least_that_keep(fleet, part, slo, ones, most) or tuple(most) for part in parts])
    rules = []
    for i, pool in enumerate(fleet.pools):
        found = []
        for span_s in SPANS_S:
            if span_s <= window_s:
                loads = np.array([_load(part, engines[i], pool.role, span_s, window_s) for part in parts])
                found.append(_fitted(loads, needed[:, i], span_s, window_s))
        rules.append(min(found, key=lambda each: each[0])[1])
    return tuple(rules)


def _windows(trace: Trace, window_s: float) -> list[Trace]:
    """Whole windows with enough requests, evenly spread, each from its own time zero."""
    starts_s = np.arange(trace.arrival_s[0], trace.arrival_s[-1] - window_s, window_s)
    edges = np.searchsorted(trace.arrival_s, [starts_s, starts_s + window_s]).T
    full = [k for k in range(len(starts_s)) if edges[k, 1] - edges[k, 0] >= LEAST_REQUESTS]
    chosen = sorted(
        {full[k] for k in np.linspace(0, len(full) - 1, MOST_WINDOWS).round().astype(int)} if full else ()
    )
    parts = []
    for k in chosen:
        part = trace.select(np.arange(*edges[k]))
        parts.append(replace(part, arrival_s=part.arrival_s - starts_s[k]))
    return parts


def _busier(parts: Sequence[Trace], engine: EngineProfile, window_s: float) -> list[Trace]:
    """The windows of the highest load with copies of their own requests laid over them."""
    by_load = sorted(parts, key=lambda part: -_load(part, engine, "mixed", window_s, window_s))
    return [
        rescale(part, times * len(part) / max(part.duration_s, 1.0), rng=np.random.default_rng(number))
        for number, part in enumerate(by_load[:MOST_BUSY_WINDOWS])
        for times in MORE_TRAFFIC
    ]


def _load(part: Trace, engine: EngineProfile, role: Role, span_s: float, window_s: float) -> float:
    """As a controller will see it: requests of a span times the work of their mean lengths."""
    of = np.floor_divide(part.arrival_s, span_s).astype(int)
    spans = round(window_s / span_s)
    count = np.bincount(of, minlength=spans)[:spans]
    tokens = [
        np.bincount(of, each, minlength=spans)[:spans] for each in (part.input_tokens, part.output_tokens)
    ]
    means = [each / np.maximum(count, 1) for each in tokens]
    work_s = np.array([engine.work_s(role, float(i), float(o)) for i, o in zip(*means, strict=True)])
    return peak_load(count * work_s / span_s)


def _fitted(
    loads: Floats, needed: npt.NDArray[np.int64], span_s: float, window_s: float
) -> tuple[float, LoadRule]:
    """The rule over these windows, and by how much its sizes miss theirs on average.

    n workers are left at the load from which on more than 1 - COVERED of the windows need more, by isotonic
    regression, or where the line below which COVERED of all windows lie asks for more, if that is earlier.
    """
    slope, offset = _line(loads, needed)
    ordered = np.sort(loads)
    edges: list[float] = []
    for n in range(1, int(needed.max()) + 1):
        share = IsotonicRegression(out_of_bounds="clip").fit(loads, needed > n).predict(ordered)
        first = int(np.searchsorted(share, 1 - COVERED, side="right"))
        edge = (n - offset) / slope if slope > 0 else float("inf")
        if first < len(ordered):
            edge = min(edge, float(ordered[max(first - 1, 0) : first + 1].mean()) if first else 0.0)
        if edge >= ordered[-1]:
            break
        edges.append(max([edge, 0.0, *edges]))
    rule = LoadRule(tuple(edges), float(ordered[-1]), span_s, window_s)
    given = np.array([rule.workers_for_load(load) for load in loads.tolist()])
    return float(np.abs(given - needed).mean()), rule


def _line(loads: Floats, needed: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Slope and offset of the quantile regression of Koenker and Bassett (Econometrica 1978), as a linear
    program. ceil(line) is enough from above needed - 1 on, which is what is fitted.
    """
    n = len(loads)
    weights = np.concatenate(([0.0, 0.0], np.full(n, COVERED), np.full(n, 1 - COVERED)))
    line = np.column_stack((loads, np.ones(n), np.eye(n), -np.eye(n)))
    bounds = [(0.0, None), (None, None), *[(0.0, None)] * (2 * n)]
    found = linprog(weights, A_eq=line, b_eq=needed - 1.0, bounds=bounds, method="highs")
    return float(found.x[0]), float(found.x[1]) + 1e-6
