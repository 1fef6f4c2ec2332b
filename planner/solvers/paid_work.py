"""A lower bound on what a day costs under any controller: work at the cheapest price, and the fewest workers.

Sets   i  request      v  stretch of the run, between edges e_v and e_(v+1)
Data   pi_i   least USD that all work of request i costs in any pool (demand.work_prices), pi'_i its prefill;
              both are 0 for a request that no worker can hold, which is turned away
       a_i    arrival of request i
       d_v    how many of the requests that arrive in v may be prefilled late (allowed_above)
       s      seconds after its arrival by which a prefill must be done (Deadlines.prefill_s)
       b      USD/h of all pools at their smallest allowed sizes,  b' of the cheapest worker that prefills
       g      start-up of the worker that prefills and starts quickest [s]
       o_v    seconds of v in which at least one worker that prefills must be paid (below)
Vars   f_v    least USD that is paid in v

  prefilled_v   f_v >= sum of pi'_i over the i of v with a_i + s <= e_(v+1), without the d_v dearest of these
  always_v      f_v >= b (e_(v+1) - e_v)
  someone_v     f_v >= b' o_v
  from_v        sum of f_w over w >= v  >=  sum of pi_i over the i that arrive at e_v or later

The bound is the least sum of f. It is computed from the last v to the first, where f_v now is the largest
right-hand side of prefilled_v, always_v and someone_v: F_v = max(F_(v+1) + f_v, right-hand side of from_v).
The bound is F of the first v.

Suppose that no worker that prefills is paid at a moment u. Then none is ready before u + g, and every request
that arrives from u to u + g - l is late for a limit of l seconds on TTFT or E2E. If these are more than may
be late in one window, a worker must be paid at u. o_v is the total time in v for which a worker must be paid
for this reason.

A worker does at most a second of work per second it is paid for, also while it starts, drains or changes its
role. So the bound holds for every controller and policy whose run keeps each limit on TTFT or E2E in each
window of the SLO (prefilled_v) and serves every request that a worker can hold to its end (from_v).
For runs that keep the SLO and need not serve every request `of_slo_usd` bounds the cost: the sum of f without
the rows from_v, or the sum of pi'_i over all measured requests but the d_v dearest of each window, whichever
is more. A bill by started hours or whole nodes is higher, so the bounds hold for it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.domain import ROUNDING, Slo, allowed_above
from planner.solvers.demand import work_prices
from planner.solvers.master import Option
from planner.solvers.required_work import find_deadlines
from planner.traffic.trace import Trace, window_numbers
from planner.traffic.workload import TraceLengths, distinct_lengths, pair_numbers
from planner.units import HOUR_S

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LeastPaid:
    """No run of the day that serves all requests costs less than `usd`, and no run that keeps the SLO less
    than `of_slo_usd`. `edges_s` (V + 1,) are the edges of the windows, with 0 before them where there is a
    warm-up. `in_stretch_usd` (V,) are the f_v of the stretches between these edges, and `from_stretch_usd`
    (V,) the F_v, the least that is paid from stretch v on.
    """

    usd: float
    of_slo_usd: float
    edges_s: Floats
    in_stretch_usd: Floats
    from_stretch_usd: Floats


@dataclass(frozen=True, slots=True)
class LeastWorkers:
    """The price b of all pools at their smallest allowed sizes, the price b' of the cheapest worker that
    prefills, and the shortest start-up g of any worker that prefills.
    """

    usd_per_h: float = 0.0
    prefill_usd_per_h: float = 0.0
    start_s: float = 0.0


def least_paid(
    options: Sequence[Option],
    trace: Trace,
    slo: Slo,
    edges_s: Floats,
    *,
    least_workers: LeastWorkers = LeastWorkers(),
    is_cached: bool = False,
) -> LeastPaid:
    """The bound above for pools of these options, whose objectives are prices [USD/h].

    `edges_s` are those of the windows of the SLO, or of the whole measured window. With prefix caches
    (`is_cached`) all but one token of any prompt may be cached, so each prompt is priced as one token.
    """
    lengths, arrival_s, deadlines = distinct_lengths(trace), trace.arrival_s, find_deadlines(slo, trace)
    lengths_of = pair_numbers(lengths, trace)  # (n,) each request's index into `lengths`.
    whole_usd = _least_usd(options, lengths, whole=True, is_cached=is_cached)[lengths_of]
    prefill_usd = _least_usd(options, lengths, whole=False, is_cached=is_cached)[lengths_of]

    # The warm-up, if there is one, is a stretch before those of the windows.
    stretch_edges_s = np.concatenate(([0.0] if edges_s[0] > 0 else [], edges_s))
    floors_usd = least_workers.usd_per_h * np.diff(stretch_edges_s) / HOUR_S
    warm_ups = len(stretch_edges_s) - len(edges_s)  # Stretches before the windows: 1 or 0.
    of_slo_usd = 0.0
    measured = np.flatnonzero((arrival_s >= edges_s[0]) & (arrival_s <= edges_s[-1]))
    window_of = window_numbers(arrival_s[measured], edges_s)
    for v in range(len(edges_s) - 1):
        in_window = measured[window_of == v]
        late = allowed_above(deadlines.prefill_frac, len(in_window))
        of_slo_usd += _without_dearest(prefill_usd[in_window], late)
        due = in_window[arrival_s[in_window] + deadlines.prefill_s <= edges_s[v + 1]]
        floors_usd[warm_ups + v] = max(floors_usd[warm_ups + v], _without_dearest(prefill_usd[due], late))
    occupied_s = _occupied_s(trace, slo, edges_s, least_workers.start_s)
    floors_usd[warm_ups:] = np.maximum(
        floors_usd[warm_ups:], least_workers.prefill_usd_per_h * occupied_s / HOUR_S
    )
    total_usd, from_usd = 0.0, np.zeros(len(floors_usd))
    for v in reversed(range(len(floors_usd))):
        # The first stretch has all requests: none arrives before it, but for rounding.
        work_usd = whole_usd[np.searchsorted(arrival_s, stretch_edges_s[v]) :] if v else whole_usd
        total_usd = max(total_usd + float(floors_usd[v]), float(work_usd.sum()))
        from_usd[v] = total_usd
    of_slo_usd = max(of_slo_usd, float(floors_usd.sum()))
    # Sums round, so each bound is lowered by as much as they may be off.
    lower = 1 - ROUNDING
    return LeastPaid(
        total_usd * lower, of_slo_usd * lower, stretch_edges_s, floors_usd * lower, from_usd * lower
    )


def _occupied_s(trace: Trace, slo: Slo, edges_s: Floats, start_s: float) -> Floats:
    """o_v (V,): the seconds of each window in which a worker that prefills must be paid. Each limit on TTFT
    or E2E proves some seconds, and the most that one limit proves is taken.
    """
    arrival_s, most_s = trace.arrival_s, np.zeros(len(edges_s) - 1)
    measured = np.flatnonzero((arrival_s >= edges_s[0]) & (arrival_s <= edges_s[-1]))
    times_s = arrival_s[measured]
    if len(times_s) < 2:  # There is no time between two arrivals.
        return most_s
    window_of = window_numbers(times_s, edges_s)
    ends = np.searchsorted(window_of, np.arange(len(most_s)), "right")
    requests = np.diff(ends, prepend=0)
    for limit in slo.limits:
        if limit.selector is not None:  # Too many late requests could be of other classes.
            continue
        # Limits on gaps between tokens do not count the wait for a worker.
        if not limit.metric_row.has_queue or start_s <= limit.limit_s:
            continue  # A worker that is started on arrival is in time.
        late = np.array([allowed_above(limit.percentile_frac, int(n)) for n in requests])
        must_pay = _too_many_late(times_s, window_of, ends, late, start_s, limit.limit_s)
        # The seconds before each arrival in which a worker must be paid, summed up from the first arrival on.
        # The differences of the sums at the edges are the seconds of each window.
        total_s = np.concatenate(([0.0], np.cumsum(np.where(must_pay, np.diff(times_s), 0.0))))
        most_s = np.maximum(most_s, np.diff(np.interp(edges_s, times_s, total_s)))
    return most_s


def _too_many_late(
    times_s: Floats, window_of: Ints, ends: Ints, late: Ints, start_s: float, limit_s: float
) -> npt.NDArray[np.bool_]:
    """(n - 1,): for each gap between two of the n arrivals `times_s`, whether more requests are late than may
    be if no worker is paid in the gap. `window_of` (n,) is the window of each arrival; window v ends before
    arrival `ends[v]` and lets `late[v]` requests be late.

    If no worker is paid at u in (a_i, a_(i+1)], requests `first` to `until` - 1 are late: those that arrive
    from a_(i+1) to before a_i + g - l (`start_s` less `limit_s`). They may be too many for the window of the
    first of them, or for that of the last. Windows between are not looked at: o_v may be shorter, still a
    bound.
    """
    starts = np.concatenate(([0], ends[:-1]))
    first = np.arange(1, len(times_s))
    until = np.searchsorted(times_s, times_s[:-1] + start_s - limit_s)
    first_window = window_of[first]
    too_many = np.minimum(until, ends[first_window]) - first > late[first_window]
    last_window = window_of[np.maximum(until - 1, 0)]  # `until` is 0 only if no request is late.
    too_many |= until - np.maximum(first, starts[last_window]) > late[last_window]
    return np.asarray(too_many)


def _least_usd(options: Sequence[Option], lengths: TraceLengths, *, whole: bool, is_cached: bool) -> Floats:
    """pi (`whole`) or pi' of each pair of prompt and output lengths (U,) [USD]."""
    # Seconds of work x USD/h. The second array of `work_prices`, the prefill's part, is not needed.
    usd_per_h_s, _ = work_prices(options, lengths, whole=whole)
    is_served = np.isfinite(usd_per_h_s)  # By the whole lengths: cached tokens take room in a KV cache too.
    if is_cached:
        one_token = replace(lengths, input_tokens=np.ones(len(is_served)))
        usd_per_h_s, _ = work_prices(options, one_token, whole=whole)
    return np.where(is_served, usd_per_h_s, 0.0) / HOUR_S


def _without_dearest(usd: Floats, late: int) -> float:
    """The sum of all these prices but the `late` highest."""
    return float(np.sort(usd)[: max(len(usd) - late, 0)].sum())
