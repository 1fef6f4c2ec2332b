"""What the windows of past traffic needed: a table of capacity that has seen their bursts.

Of each window of the SLO the least size of every pool is found by simulation, beside the most of the others.
Bursts make windows of equal rate need different sizes, so the table takes a decision: so many workers are
enough up to the rate at which the windows seen are told apart best, where one that is missed counts
MISSED_TO_SPARED times one that gets a worker more than it needs. Rates are those of requests of mean length:
a window of longer ones has more of them, by the work that either add to a worker's steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner.controllers.deployment import CapacityTable, EngineProfile
from planner.fleet import Fleet
from planner.search.day_runs import DayRuns
from planner.traffic.trace import window_numbers

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MISSED_TO_SPARED = 9.0
LEAST_WINDOWS = 12  # fewer tell nothing of bursts


def least_sizes(runs: DayRuns) -> Ints:
    """(V, P): of each window and pool the least size with which it holds, the others at their most."""
    found = np.zeros((runs.windows, len(runs.pools)), np.int64)
    for p, pool in enumerate(runs.pools):
        guess = pool.least
        for v in range(runs.windows):
            own, workers = runs.own_steps(v), runs.terms.most
            low, high = pool.least - 1, pool.most
            while high - low > 1:
                at = guess if low < guess < high else (low + high) // 2
                workers[own.start : own.stop, p] = at
                low, high = (at, high) if runs.misses(workers, v, own.start) else (low, at)
                guess = at + 1 if low == at else at - 1
            found[v, p] = guess = high
    return found


def table_of_windows(
    runs: DayRuns, fleet: Fleet, engines: Sequence[EngineProfile], needs: Ints
) -> CapacityTable:
    """The table from what windows needed, `needs` (V, P)."""
    trace, edges_s = runs.trace, runs.windows_s
    inside = (trace.arrival_s >= edges_s[0]) & (trace.arrival_s <= edges_s[-1])
    of = window_numbers(trace.arrival_s[inside], edges_s)
    counts = np.bincount(of, minlength=runs.windows)
    input_tokens, output_tokens = (
        np.bincount(of, tokens[inside], runs.windows) / np.maximum(counts, 1)
        for tokens in (trace.input_tokens, trace.output_tokens)
    )
    usual = float(trace.input_tokens.mean()), float(trace.output_tokens.mean())
    rates = counts / np.diff(edges_s)
    limits: list[dict[float, int]] = []
    for p, (pool, engine) in enumerate(zip(fleet.pools, engines, strict=True)):
        usual_s = engine.work_s(pool.role, *usual)
        work_s = [engine.work_s(pool.role, *each) for each in zip(input_tokens, output_tokens, strict=True)]
        load_rps = rates * np.array(work_s) / usual_s if usual_s > 0 else rates
        limits.append(_limits(load_rps, needs[:, p]))
    ladder = np.array(sorted({rate for each in limits for rate in each}))
    sizes = np.array([[_size(each, rate) for each in limits] for rate in ladder])
    made = f"what {runs.windows} windows of {trace.name} needed; windows of one rate differ by their bursts"
    return CapacityTable(ladder, sizes, made, *usual)


def _limits(load_rps: Floats, need: Ints) -> dict[float, int]:
    """Up to which load a size is enough: load -> size, both rising."""
    order = np.argsort(load_rps, kind="stable")
    load, needed = load_rps[order], need[order]
    found: dict[float, int] = {}
    last_rps = 0.0
    for size in range(max(int(needed.min()), 1), int(needed.max())):
        missed = np.concatenate(([0.0], np.cumsum(needed > size)))  # where the first k get this size
        spared = np.concatenate((np.cumsum((needed <= size)[::-1])[::-1], [0.0]))
        k = int(np.argmin(MISSED_TO_SPARED * missed + spared))
        if k and load[k - 1] > last_rps:
            last_rps = float(load[k - 1])
            found[last_rps] = size
    top_rps = float(load[-1])
    if not found or top_rps > last_rps:
        found[max(top_rps, 1e-9)] = max(int(needed.max()), 1)
    return found


def _size(limits: dict[float, int], rate_rps: float) -> int:
    """For a rate; beyond the last one its size."""
    return next((size for limit, size in limits.items() if rate_rps <= limit), max(limits.values()))
