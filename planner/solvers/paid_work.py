"""A lower bound on what a day costs under any controller: all work at the cheapest price, and the price of
the fewest workers that must be paid.

Sets   i  request      v  stretch of the run, between edges e_v and e_(v+1)
Data   pi_i   least USD that all work of request i costs in any pool (demand.work_prices), pi'_i its prefill;
              both are 0 for a request that no worker can hold, which is turned away
       a_i    arrival of request i
       d_v    how many of the requests that arrive in v may be prefilled late (required_work.LatePrefills)
       s      seconds after its arrival by which a prefill must be done (Deadlines.prefill_s)
       b      USD/h of all pools at their smallest allowed sizes,  b' of the cheapest worker that prefills
       g      start-up of the worker that prefills and starts quickest [s]
       o_v    seconds of v in which at least one worker that prefills must be paid (below)
Vars   f_v    least USD that is paid in v

  prefilled_v   f_v >= sum of pi'_i over the i of v with a_i + s <= e_(v+1), without the d_v dearest of these
  always_v      f_v >= b (e_(v+1) - e_v)
  someone_v     f_v >= b' o_v
  from_v        sum of f_w over w >= v  >=  sum of pi_i over the i that arrive at e_v or later

The bound is the least sum of f over all v. Let floor_v be the largest right-hand side of prefilled_v,
always_v and someone_v. From the last v to the first, F_v = max(F_(v+1) + floor_v, right-hand side of from_v);
the bound is F of the first v.

Suppose that no worker that prefills is paid at a moment u. Then none is ready before u + g, and every request
that arrives from u to u + g - l is late for a limit of l seconds on TTFT or E2E. If these are more than may
be late in one window, a worker must be paid at u. o_v is the total time in v for which a worker must be paid
for this reason.

A worker does at most a second of work per second it is paid for, also while it starts, drains or changes its
role. So the bound holds for every controller and policy whose run keeps each limit on TTFT or E2E in each
window of the SLO (prefilled_v) and serves every request that a worker can hold to its end (from_v).
For runs that keep the SLO and need not serve every request `of_slo_usd` bounds the cost: the sum of floor_v,
or the sum of pi'_i over all measured requests but the d_v dearest of each window, whichever is more. A bill
by started hours or whole nodes is higher, so the bounds hold for it too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.domain import ROUNDING, Slo, allowed_above
from planner.solvers.demand import work_prices
from planner.solvers.master import Option
from planner.solvers.required_work import LatePrefills, find_deadlines
from planner.traffic.trace import Trace, window_numbers
from planner.traffic.workload import TraceLengths, distinct_lengths, pair_numbers
from planner.units import HOUR_S

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LeastPaid:
    """No run of the day that serves all requests costs less than `usd`, and no run that keeps the SLO costs
    less than `of_slo_usd`. `edges_s` (V + 1,) are the edges of the windows, with 0 before them where there is
    a warm-up. `in_stretch_usd` (V,) are the floor_v of the stretches between these edges, `from_stretch_usd`
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
    """The bound of this module for pools of these options, whose objectives are prices [USD/h].

    `edges_s` are the edges of the SLO's windows, or of one window that is all measured time. With prefix
    caches (`is_cached`) all but one token of any prompt may be cached, so each prompt is priced as one token.
    """
    arrival_s = trace.arrival_s
    deadlines, late_prefills = find_deadlines(slo, trace), LatePrefills.of(slo, trace)
    lengths = distinct_lengths(trace)
    pair_of = pair_numbers(lengths, trace)  # (n,) Each request's index into `lengths`.
    # (n,) pi and pi' of each request.
    whole_usd = _least_usd(options, lengths, whole=True, is_cached=is_cached)[pair_of]
    prefill_usd = _least_usd(options, lengths, whole=False, is_cached=is_cached)[pair_of]

    # The warm-up, if there is one, is a stretch before those of the windows. `floors_usd` are the floor_v.
    stretch_edges_s = np.concatenate(([0.0] if edges_s[0] > 0 else [], edges_s))
    floors_usd = least_workers.usd_per_h * np.diff(stretch_edges_s) / HOUR_S
    warm_ups = len(stretch_edges_s) - len(edges_s)  # Stretches before the windows: 1 or 0.
    of_slo_usd = 0.0
    measured = np.flatnonzero((arrival_s >= edges_s[0]) & (arrival_s <= edges_s[-1]))
    window_of = window_numbers(arrival_s[measured], edges_s)
    for v in range(len(edges_s) - 1):
        in_window = measured[window_of == v]
        may_be_late = late_prefills.most_late(in_window)
        of_slo_usd += _without_dearest(prefill_usd[in_window], may_be_late)
        due = in_window[arrival_s[in_window] + deadlines.prefill_s <= edges_s[v + 1]]
        due_usd = _without_dearest(prefill_usd[due], may_be_late)
        floors_usd[warm_ups + v] = max(floors_usd[warm_ups + v], due_usd)
    occupied_s = _occupied_s(trace, slo, edges_s, least_workers.start_s)
    floors_usd[warm_ups:] = np.maximum(
        floors_usd[warm_ups:], least_workers.prefill_usd_per_h * occupied_s / HOUR_S
    )
    total_usd, from_usd = 0.0, np.zeros(len(floors_usd))
    for v in reversed(range(len(floors_usd))):
        # No request arrives before the first stretch, so it counts all requests, whatever rounding does to
        # its edge.
        work_usd = whole_usd[np.searchsorted(arrival_s, stretch_edges_s[v]) :] if v else whole_usd
        total_usd = max(total_usd + float(floors_usd[v]), float(work_usd.sum()))
        from_usd[v] = total_usd
    of_slo_usd = max(of_slo_usd, float(floors_usd.sum()))
    # The sums have rounding errors of up to the share ROUNDING, so each bound is lowered by it.
    lower = 1 - ROUNDING
    return LeastPaid(
        total_usd * lower, of_slo_usd * lower, stretch_edges_s, floors_usd * lower, from_usd * lower
    )


def _occupied_s(trace: Trace, slo: Slo, edges_s: Floats, start_s: float) -> Floats:
    """o_v (V,): the seconds of each window in which a worker that prefills must be paid: the most that follow
    from one limit on TTFT or E2E.
    """
    arrival_s, most_s = trace.arrival_s, np.zeros(len(edges_s) - 1)
    measured = np.flatnonzero((arrival_s >= edges_s[0]) & (arrival_s <= edges_s[-1]))
    times_s = arrival_s[measured]
    if len(times_s) < 2:  # There is no gap between arrivals in which a worker may have to be paid.
        return most_s
    window_of = window_numbers(times_s, edges_s)
    ends = np.searchsorted(window_of, np.arange(len(most_s)), "right")  # (V,) As in `_too_many_late`.
    requests = np.diff(ends, prepend=0)  # (V,) How many arrive in each window.
    for limit in slo.limits:
        if limit.selector is not None:  # The late requests could be of classes that this limit is not for.
            continue
        # Limits on gaps between tokens do not count the wait for a worker.
        if not limit.metric_row.has_queue or start_s <= limit.limit_s:
            continue  # A worker that is started when a request arrives is still in time for it.
        may_be_late = np.array([allowed_above(limit.percentile_frac, int(n)) for n in requests])
        must_pay = _too_many_late(times_s, window_of, ends, may_be_late, start_s, limit.limit_s)
        # At each arrival: the seconds since the first arrival in which a worker must be paid.
        paid_gaps_s = np.where(must_pay, np.diff(times_s), 0.0)
        total_s = np.concatenate(([0.0], np.cumsum(paid_gaps_s)))
        # The differences between these totals at the edges are the seconds of each window.
        most_s = np.maximum(most_s, np.diff(np.interp(edges_s, times_s, total_s)))
    return most_s


def _too_many_late(
    times_s: Floats, window_of: Ints, ends: Ints, may_be_late: Ints, start_s: float, limit_s: float
) -> npt.NDArray[np.bool_]:
    """For each of the n - 1 gaps between the n arrivals `times_s`: whether too many requests would be late if
    no worker were paid in the gap. `window_of` (n,) is the window of each arrival. `ends[v]` is the number of
    the first arrival after window v, in which `may_be_late[v]` requests may be late.

    If no worker is paid at u in (a_i, a_(i+1)], requests `first` to `until` - 1 are late: those that arrive
    from a_(i+1) to before a_i + g - l (`start_s` less `limit_s`). They may be too many for the window of the
    first of them, or for that of the last. Windows between these two are left out, which can only make o_v
    shorter and the bound lower.
    """
    starts = np.concatenate(([0], ends[:-1]))
    first = np.arange(1, len(times_s))
    until = np.searchsorted(times_s, times_s[:-1] + start_s - limit_s)
    first_window = window_of[first]
    late_in_first = np.minimum(until, ends[first_window]) - first
    last_window = window_of[np.maximum(until - 1, 0)]  # `until` is 0 only if no request is late.
    late_in_last = until - np.maximum(first, starts[last_window])
    too_many = (late_in_first > may_be_late[first_window]) | (late_in_last > may_be_late[last_window])
    return np.asarray(too_many)


def _least_usd(options: Sequence[Option], lengths: TraceLengths, *, whole: bool, is_cached: bool) -> Floats:
    """pi (`whole`) or pi' of each pair of prompt and output lengths (U,) [USD]."""
    # Seconds of work x USD/h. The second array of `work_prices`, the prefill's part, is not needed.
    usd_per_h_s, _ = work_prices(options, lengths, whole=whole)
    # Whether a worker can hold the request is judged by its whole lengths, because cached tokens are stored
    # in the KV cache too.
    is_served = np.isfinite(usd_per_h_s)
    if is_cached:
        one_token = replace(lengths, input_tokens=np.ones(len(is_served)))
        usd_per_h_s, _ = work_prices(options, one_token, whole=whole)
    return np.where(is_served, usd_per_h_s, 0.0) / HOUR_S


def _without_dearest(usd: Floats, left_out: int) -> float:
    """The sum of all these prices but the `left_out` highest."""
    return float(np.sort(usd)[: max(len(usd) - left_out, 0)].sum())
