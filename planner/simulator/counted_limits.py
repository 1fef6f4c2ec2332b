"""The limits of an SLO as the kernel counts them while a simulation runs, over the whole trace and in
windows.

A violation is a value above its limit: a TTFT, a gap between tokens. A percentile allows a number of them.
Once there are more, the simulation may stop, because the limit cannot hold any more. So a limit may here be
allowed too many violations, but never too few. The records are LIMIT of layout.py.

Letters of array shapes: n requests, L limits, V windows.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from planner.domain import Limit, allowed_above, selectors_of
from planner.simulator import layout
from planner.simulator.layout import State
from planner.simulator.simulation import Floats
from planner.traffic.classes import select_requests
from planner.traffic.tasks import tasks_of
from planner.traffic.trace import Trace, measured_window, slo_windows_s, window_numbers

# The kernel counts the violations of these metrics while it runs; those of others are judged afterwards.
COUNTED_WHILE_RUNNING = {"ttft": layout.TTFT, "tbt": layout.TBT, "tpot": layout.TPOT, "e2e": layout.E2E}


def allowed_violations(limit: Limit, trace: Trace, window_s: tuple[float, float]) -> int:
    """How many violations `limit` allows in the measured window of this trace, from `window_s[0]` to
    `window_s[1]`. For gaps between tokens it is an upper bound: all gaps of the trace are counted, since
    which of them end in the window depends on the fleet.
    """
    inside = (trace.arrival_s >= window_s[0]) & (trace.arrival_s <= window_s[1])
    # Requests of `after` wait for others, so they may arrive in the window whatever their `arrival_s` says.
    inside[trace.after[:, 0]] = True
    if limit.metric_row.is_of_gaps:
        gaps = trace.output_tokens - 1
        if limit.selector is not None:
            gaps = gaps[select_requests(limit.selector, trace)]
        value_count = int(gaps.sum())
    else:
        value_count = int((inside & _has_value(limit, trace)).sum())
    return allowed_above(limit.percentile_frac, value_count)


def _has_value(limit: Limit, trace: Trace) -> npt.NDArray[np.bool_]:
    """Which requests (n,) are of the limit's class and have a value of its metric. A metric of tasks has one
    at the last request of a task, and one of decodes has none for a request with a single output token.
    """
    if limit.selector is not None:
        has_value = _has_value(replace(limit, selector=None), trace)
        return np.asarray(has_value & select_requests(limit.selector, trace))
    if limit.metric_row.is_of_tasks:
        tasks = tasks_of(trace)
        return np.zeros(len(trace), dtype=bool) if tasks is None else tasks.is_last
    return trace.output_tokens > 1 if limit.metric_row.is_of_decodes else np.ones(len(trace), dtype=bool)


def judged_windows_s(trace: Trace, every_s: float) -> Floats:
    """Edges (V + 1,) of the windows of `every_s` seconds in which an SLO is judged (`slo_windows_s`)."""
    return slo_windows_s(trace.arrival_s, (measured_window(trace)[0], float(trace.arrival_s[-1])), every_s)


def limits_in_windows(
    limits: Sequence[Limit], trace: Trace, state: State, edges_s: Floats
) -> npt.NDArray[np.void]:
    """The limits (L, V) as the kernel counts them in each window, before the first event. `edges_s` (V + 1,)
    are the edges of the windows.

    For gaps the allowed violations are an upper bound: all gaps of the requests that arrive before the end of
    a window are taken to be in it. Requests of sessions may arrive in any window, so with sessions each
    window is allowed as many violations as the whole trace.
    """
    rows = np.zeros((len(limits), len(edges_s) - 1), dtype=layout.LIMIT)
    if not limits:
        return rows
    rows[:] = state.limits[:, None]
    if trace.after.size:  # The trace has sessions.
        return rows
    inside = trace.arrival_s >= edges_s[0]
    window_of = window_numbers(trace.arrival_s, edges_s)
    for row, limit in zip(rows, limits, strict=True):
        if limit.metric_row.is_of_gaps:
            gaps = trace.output_tokens - 1
            if limit.selector is not None:
                gaps = gaps * select_requests(limit.selector, trace)
            value_counts = np.cumsum(np.bincount(window_of, weights=gaps, minlength=len(row)))
        else:
            is_counted = inside & _has_value(limit, trace)
            value_counts = np.bincount(window_of[is_counted], minlength=len(row))
        allowed = [allowed_above(limit.percentile_frac, int(count)) for count in value_counts]
        row["allowed"] = np.minimum(row["allowed"], allowed)
    return rows


def limits_over_whole(
    limits: Sequence[Limit], trace: Trace, window_s: tuple[float, float]
) -> npt.NDArray[np.void]:
    """The limits (L,) as the kernel counts them over the whole measured window, before the first event."""
    limits_of_trace = _limits_of_traces.setdefault(trace, {})
    key = tuple(limits), window_s
    if key not in limits_of_trace:
        limits_of_trace[key] = _limits_as_counted(limits, trace, window_s)
    return limits_of_trace[key].copy()  # The kernel changes the array that it is given.


# Most traces are simulated on many fleets, so these limits are kept as long as the trace is in memory.
_limits_of_traces: weakref.WeakKeyDictionary[Trace, dict[Hashable, npt.NDArray[np.void]]] = (
    weakref.WeakKeyDictionary()
)


def _limits_as_counted(
    limits: Sequence[Limit], trace: Trace, window_s: tuple[float, float]
) -> npt.NDArray[np.void]:
    """The limits of `limits_over_whole`, computed anew."""
    rows, selectors = np.zeros(len(limits), dtype=layout.LIMIT), selectors_of(limits)
    for k, limit in enumerate(limits):
        row = rows[k : k + 1]
        row["of_class"] = layout.NONE if limit.selector is None else selectors.index(limit.selector)
        row["metric"] = COUNTED_WHILE_RUNNING.get(limit.metric, layout.NONE)
        row["limit_s"], row["overdue_at_s"] = limit.limit_s, -np.inf
        row["allowed"] = allowed_violations(limit, trace, window_s)
        # The kernel looks for overdue requests from this one on. At percentile 0 no request has to keep the
        # limit, so it looks at none.
        row["next_overdue"] = len(trace) if limit.percentile_frac == 0 else 0
    return rows
