"""What any controller pays at least: the work that has to be done, at its cheapest, and what is always there.

Sets   i  request      v  stretch of the run, between edges e_v and e_(v+1); the last one is open
Data   pi_i, pi'_i  least USD that all work, that the prefill of request i costs in any pool (demand.prices);
                    0 for one that no worker can hold, which is turned away
       d_v    requests that arrive in v and may be late (allowed_above, of the share that must be prefilled)
       s      seconds after which a prefill must be done (Due.prefill_s)
       b      USD/h of the least workers of all pools
Vars   f_v    least that is paid in v

  prefilled_v   f_v >= sum of pi'_i over i of v with a_i + s <= e_(v+1), without the d_v dearest of all of v
  always_v      f_v >= b (e_(v+1) - e_v)                           (0 of the last, open one)
  from_v        sum of f_w over w >= v  >=  sum of pi_i over i that arrive at e_v or later

`bound` is the least sum of f, from the last v to the first: F_v = max(F_(v+1) + f_v, work from e_v on).

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
from planner.solvers.demand import prices
from planner.solvers.master import Option
from planner.solvers.required_work import due
from planner.traffic.trace import Trace, window_numbers
from planner.traffic.workload import Lengths, distinct_lengths

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


def least_paid(
    options: Sequence[Option],
    trace: Trace,
    slo: Slo,
    edges_s: Floats,
    *,
    always_usd_per_h: float = 0.0,
    is_cached: bool = False,
) -> LeastPaid:
    """The bound above for pools of these options, whose objectives are prices [USD/h].

    `edges_s` are those of the windows of the SLO, or of the whole measured window. With prefix caches
    (`is_cached`) prompts may cost no more than one token.
    """
    lengths, arrival_s, each = distinct_lengths(trace), trace.arrival_s, due(slo, trace)
    codes = (lengths.input_tokens.astype(np.int64) << 32) + lengths.output_tokens.astype(np.int64)
    at = np.searchsorted(codes, (trace.input_tokens << 32) + trace.output_tokens)
    whole_usd = _least_usd(options, lengths, whole=True, is_cached=is_cached)[at]
    prefill_usd = _least_usd(options, lengths, whole=False, is_cached=is_cached)[at]

    starts_s = np.concatenate(([0.0] if edges_s[0] > 0 else [], edges_s))
    floors = always_usd_per_h * np.diff(starts_s) / 3600
    lead, of_slo = len(starts_s) - len(edges_s), 0.0
    inside = np.flatnonzero((arrival_s >= edges_s[0]) & (arrival_s <= edges_s[-1]))
    of = window_numbers(arrival_s[inside], edges_s)
    for v in range(len(edges_s) - 1):
        own = inside[of == v]
        late = allowed_above(each.prefill_frac, len(own))
        of_slo += _without_dearest(prefill_usd[own], late)
        done = own[arrival_s[own] + each.prefill_s <= edges_s[v + 1]]
        floors[lead + v] = max(floors[lead + v], _without_dearest(prefill_usd[done], late))
    total = 0.0
    for v in reversed(range(len(floors))):
        from_here = whole_usd[np.searchsorted(arrival_s, starts_s[v]) :] if v else whole_usd
        total = max(total + float(floors[v]), float(from_here.sum()))
    of_slo = max(of_slo, float(floors.sum()))
    return LeastPaid(total * (1 - ROUNDING), of_slo * (1 - ROUNDING), starts_s, floors * (1 - ROUNDING))


def _least_usd(options: Sequence[Option], lengths: Lengths, *, whole: bool, is_cached: bool) -> Floats:
    """pi or pi' of each pair of lengths (U,)."""
    usd_s = prices(options, lengths, whole=whole)[0]
    is_held = np.isfinite(usd_s)
    if is_cached:
        usd_s = prices(options, replace(lengths, input_tokens=np.ones(len(is_held))), whole=whole)[0]
    return np.where(is_held, usd_s, 0.0) / 3600


def _without_dearest(usd: Floats, late: int) -> float:
    """The sum without so many of the dearest."""
    return float(np.sort(usd)[: max(len(usd) - late, 0)].sum())
