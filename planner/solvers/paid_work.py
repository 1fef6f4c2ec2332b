"""What any controller pays at least: the work that has to be done, at its cheapest, and what is always there.

Sets   i  request      v  stretch of the run, between edges e_v and e_(v+1); the last one is open
Data   pi_i, pi'_i  least USD that all work, that the prefill of request i costs in any pool (demand.prices);
                    0 for one that no worker can hold, which is turned away
       d_v    requests that arrive in v and may be late (allowed_above, of the share that must be prefilled)
       s      seconds after which a prefill must be done (Due.prefill_s)
       b      USD/h of the least workers of all pools,  b' of the cheapest worker that prefills
       g      seconds in which the quickest worker that prefills starts
       o_v    seconds of v in which nobody can be away (below)
Vars   f_v    least that is paid in v

  prefilled_v   f_v >= sum of pi'_i over i of v with a_i + s <= e_(v+1), without the d_v dearest of all of v
  always_v      f_v >= b (e_(v+1) - e_v)                           (0 of the last, open one)
  someone_v     f_v >= b' o_v
  from_v        sum of f_w over w >= v  >=  sum of pi_i over i that arrive at e_v or later

`bound` is the least sum of f, from the last v to the first: F_v = max(F_(v+1) + f_v, work from e_v on).

Where nobody who prefills is paid at a moment u, nobody is ready before u + g, and who arrives from u to
u + g - s is late. If those are more than may be late, of one window, somebody is paid at u: o_v is how long
that is so.

A worker does at most a second of work per second it is paid for, whenever it starts, drains or moves, so all
this holds for every controller, policy and moment, with two things of a run: each limit on TTFT or E2E is
kept in each window of the SLO (prefilled_v), and every request that a worker can hold is served to its end
(from_v). `of_slo_usd` is without the latter, the sum of prefilled_v and always_v. What is billed in started
hours or whole nodes is more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.domain import Slo, allowed_above
from planner.solvers.demand import work_prices
from planner.solvers.master import Option
from planner.solvers.required_work import find_deadlines
from planner.traffic.trace import Trace, window_numbers
from planner.traffic.workload import TraceLengths, distinct_lengths

Floats = npt.NDArray[np.float64]

ROUNDING = 1e-9  # of sums


@dataclass(frozen=True, slots=True, eq=False)
class LeastPaid:
    """No run of the day costs less than `usd`, nor less in the stretch v than `in_stretch_usd[v]`, between
    `edges_s`; without that all requests are served, not less than `of_slo_usd`.
    """

    usd: float
    of_slo_usd: float
    edges_s: Floats
    in_stretch_usd: Floats


@dataclass(frozen=True, slots=True)
class Always:
    """b of the least workers, b' of one that prefills, and g, in which it starts."""

    usd_per_h: float = 0.0
    one_usd_per_h: float = 0.0
    start_s: float = 0.0


def least_paid(
    options: Sequence[Option],
    trace: Trace,
    slo: Slo,
    edges_s: Floats,
    *,
    always: Always = Always(),
    is_cached: bool = False,
) -> LeastPaid:
    """The bound above for pools of these options, whose objectives are prices [USD/h].

    `edges_s` are those of the windows of the SLO, or of the whole measured window. With prefix caches
    (`is_cached`) prompts may cost no more than one token.
    """
    lengths, arrival_s, each = distinct_lengths(trace), trace.arrival_s, find_deadlines(slo, trace)
    codes = (lengths.input_tokens.astype(np.int64) << 32) + lengths.output_tokens.astype(np.int64)
    at = np.searchsorted(codes, (trace.input_tokens << 32) + trace.output_tokens)
    whole_usd = _least_usd(options, lengths, whole=True, is_cached=is_cached)[at]
    prefill_usd = _least_usd(options, lengths, whole=False, is_cached=is_cached)[at]

    starts_s = np.concatenate(([0.0] if edges_s[0] > 0 else [], edges_s))
    floors = always.usd_per_h * np.diff(starts_s) / 3600
    lead, of_slo = len(starts_s) - len(edges_s), 0.0
    inside = np.flatnonzero((arrival_s >= edges_s[0]) & (arrival_s <= edges_s[-1]))
    of = window_numbers(arrival_s[inside], edges_s)
    for v in range(len(edges_s) - 1):
        own = inside[of == v]
        late = allowed_above(each.prefill_frac, len(own))
        of_slo += _without_dearest(prefill_usd[own], late)
        done = own[arrival_s[own] + each.prefill_s <= edges_s[v + 1]]
        floors[lead + v] = max(floors[lead + v], _without_dearest(prefill_usd[done], late))
    alone_s = _never_alone_s(trace, slo, edges_s, always.start_s)
    floors[lead:] = np.maximum(floors[lead:], always.one_usd_per_h * alone_s / 3600)
    total = 0.0
    for v in reversed(range(len(floors))):
        from_here = whole_usd[np.searchsorted(arrival_s, starts_s[v]) :] if v else whole_usd
        total = max(total + float(floors[v]), float(from_here.sum()))
    of_slo = max(of_slo, float(floors.sum()))
    return LeastPaid(total * (1 - ROUNDING), of_slo * (1 - ROUNDING), starts_s, floors * (1 - ROUNDING))


def _never_alone_s(trace: Trace, slo: Slo, edges_s: Floats, start_s: float) -> Floats:
    """o_v (V,), for the limit that says most."""
    arrival_s, best_s = trace.arrival_s, np.zeros(len(edges_s) - 1)
    inside = np.flatnonzero((arrival_s >= edges_s[0]) & (arrival_s <= edges_s[-1]))
    times_s = arrival_s[inside]
    if len(times_s) < 2:
        return best_s
    of = window_numbers(times_s, edges_s)
    ends = np.searchsorted(of, np.arange(len(best_s)), "right")
    many = np.diff(ends, prepend=0)
    for limit in slo.limits:
        if not limit.row.has_queue or start_s <= limit.limit_s:
            continue
        late = np.array([allowed_above(limit.percentile_frac, int(n)) for n in many])
        # nobody at u in (a_i, a_(i+1)]: from a_(i+1) on all before a_i + g - s are late
        first = np.arange(1, len(times_s))
        until = np.searchsorted(times_s, times_s[:-1] + start_s - limit.limit_s)
        own = of[first]
        here = np.minimum(until, ends[own]) - first > late[own]
        last = of[np.maximum(until - 1, 0)]
        there = until - np.maximum(first, ends[last] - many[last]) > late[last]
        occupied_s = np.where(here | there, np.diff(times_s), 0.0)
        by_then_s = np.concatenate(([0.0], np.cumsum(occupied_s)))
        best_s = np.maximum(best_s, np.diff(np.interp(edges_s, times_s, by_then_s)))
    return best_s


def _least_usd(options: Sequence[Option], lengths: TraceLengths, *, whole: bool, is_cached: bool) -> Floats:
    """pi or pi' of each pair of lengths (U,)."""
    usd_s = work_prices(options, lengths, whole=whole)[0]
    is_served = np.isfinite(usd_s)
    if is_cached:
        usd_s = work_prices(options, replace(lengths, input_tokens=np.ones(len(is_served))), whole=whole)[0]
    return np.where(is_served, usd_s, 0.0) / 3600


def _without_dearest(usd: Floats, late: int) -> float:
    """The sum without so many of the dearest."""
    return float(np.sort(usd)[: max(len(usd) - late, 0)].sum())
