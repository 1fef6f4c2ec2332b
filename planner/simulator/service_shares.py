"""How much of its fair share of service each tenant gets in a simulation while it has work waiting.

"Service" is the weighted tokens that a tenant's requests are given:

Sets   u  tenant      r  request
Data   p_r, o_r   prompt tokens that are computed (not found cached), output tokens
       g, h       service of a prompt token, of an output token            (extend_weight, output_weight)
       w_u        weight of a tenant                                       (tenant_weights)
       a_r <= b_r <= c_r <= d_r   r arrives, is first scheduled, has its first token, ends

Service  W_u(t1, t2): g p_r evenly from b_r to c_r, h at c_r, h (o_r - 1) evenly from c_r to d_r
Waiting  u has work waiting from a_r to b_r of each r; B_u(t) = sum of g p_r + h o_r over a_r < t <= b_r
Fair     F_u(t1, t2) = w_u / sum_{v active} w_v  x  sum_v W_v(t1, t2),   active: in [a_r, d_r] at some time

  share_u(t1, t2) = W_u / min(F_u, W_u + B_u(t2))

A span of the measured time in which u has work waiting all along is cut into as many equal windows as can be
at least `window_s` long; a shorter span has none. The share of a tenant is the least share of its windows. A
tenant is owed no more than the work that it has, W_u + B_u: if its requests wait only for a step or two and
all get served, its share is 1 or more. With much work waiting it is owed its fair share F_u.

Service, weights and backlogged intervals are those of VTC (Sheng et al. 2024, arXiv:2401.00588, section 3 and
Theorem 4.4), whose figures take windows of a minute; only computed prompt tokens count, as in DLPM (Cao et
al. 2025, arXiv:2501.14312). VTC bounds by how many tokens a tenant may be behind; our share is relative.
Preempted requests and requests that wait to be handed over do not count as waiting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from planner.domain import ServiceGuarantee, Slo
from planner.simulator.layout import REJECTED
from planner.simulator.simulation import Floats, Simulation

Spans = npt.NDArray[np.float64]  # (S, 2): starts and ends [s] of disjoint spans of time, in order.
SHARE_TOLERANCE = 1e-9  # A share that misses a guarantee by no more than this fraction misses it by rounding.
PARTS_TOLERANCE = 1e-12  # Rounding may shorten a span by this fraction, which must not lose a window.


@dataclass(frozen=True, slots=True)
class TenantShare:
    """The least share of a tenant over its windows, and the start and end of the window that has it [s].

    `windows` is their number. Without windows `share_frac` is NaN and `window_s` is None.
    """

    tenant: str
    share_frac: float
    window_s: tuple[float, float] | None
    windows: int


@dataclass(frozen=True, slots=True)
class GuaranteeLine:
    """One guarantee and its result in the simulation: of the tenants that have it, the one with the least
    share, and the number of windows of all of them.
    """

    guarantee: ServiceGuarantee
    least: TenantShare
    windows: int

    @property
    def holds(self) -> bool:
        """Whether the least share is large enough. True also if no tenant waited for a whole window."""
        # `not <` in place of `>=`, so that the guarantee holds where the share is NaN.
        return not self.least.share_frac < self.guarantee.share_frac * (1 - SHARE_TOLERANCE)


def judge_guarantees(simulation: Simulation, slo: Slo) -> tuple[GuaranteeLine, ...]:
    """A line for each guarantee of the SLO that some tenant of the simulation has."""
    lines = []
    for guarantee in slo.guarantees:
        promised = [u for u, name in enumerate(simulation.tenants) if slo.guarantee_of(name) == guarantee]
        if promised:
            shares = tenant_shares(simulation, guarantee.window_s, promised)
            least = min(shares, key=lambda each: (math.isnan(each.share_frac), each.share_frac))  # NaN last.
            lines.append(GuaranteeLine(guarantee, least, sum(each.windows for each in shares)))
    return tuple(lines)


def tenant_shares(
    simulation: Simulation, window_s: float, tenants: Sequence[int] | None = None
) -> tuple[TenantShare, ...]:
    """The least share of each of these tenants (indices into `simulation.tenants`), by default of all.
    `window_s` is the least length of a window.
    """
    curves = [
        _ServiceCurve.of_requests(simulation, simulation.tenant == u) for u in range(len(simulation.tenants))
    ]
    together = _ServiceCurve.of_requests(simulation, np.ones_like(simulation.tenant, dtype=bool))
    weights, (start_s, end_s) = simulation.tenant_weights, simulation.window_s
    shares = []
    for u in range(len(simulation.tenants)) if tenants is None else tenants:
        own, windows = curves[u], 0
        least_share, least_window_s = math.nan, (0.0, 0.0)
        for edges_s in _windows_in_spans(own.waiting, (start_s, min(end_s, simulation.end_s)), window_s):
            served, of_all = np.diff(own.until(edges_s)), np.diff(together.until(edges_s))
            active = np.array([_meets_windows(each.present, edges_s) for each in curves])  # (U, windows)
            # The tenant's own weight counts, active or not.
            fair = weights[u] * of_all / np.maximum(weights @ active, weights[u])
            owed = np.minimum(fair, served + own.waiting_at(edges_s[1:]))
            # In a window in which the tenant is owed nothing it has no share.
            for i in np.flatnonzero(owed > 0):
                windows += 1
                share = float(served[i] / owed[i])
                if not share >= least_share:  # Also if the least share is NaN, as at first.
                    least_share, least_window_s = share, (float(edges_s[i]), float(edges_s[i + 1]))
        window = least_window_s if windows else None
        shares.append(TenantShare(simulation.tenants[u], least_share, window, windows))
    return tuple(shares)


class _Jumps(NamedTuple):
    """Times in order, and the sums (n + 1,) of the amounts that come at the first 0, 1, ... of them."""

    times_s: Floats
    sums: Floats

    @classmethod
    def of_amounts(cls, times_s: Floats, amounts: Floats) -> Self:
        """The jumps of these amounts (n,) at these times (n,)."""
        order = np.argsort(times_s, kind="stable")
        return cls(times_s[order], np.concatenate([[0.0], np.cumsum(amounts[order])]))


@dataclass(frozen=True, slots=True, eq=False)
class _ServiceCurve:
    """The service W of some requests over time, as the sum of a piecewise linear curve and of jumps.

    `waiting` are the spans in which some of them wait to be first scheduled, `present` those in which some of
    them have arrived and not ended. An amount is service: weighted tokens.
    """

    waiting: Spans
    present: Spans
    knots_s: Floats  # The corners of the linear curve.
    at_knots: Floats  # The values of the curve at its corners.
    jumps: _Jumps  # Service that is given at one moment.
    arrivals: _Jumps  # The service that requests need, when they arrive.
    begins: _Jumps  # The service that requests need, when they are first scheduled.

    @classmethod
    def of_requests(cls, simulation: Simulation, own: npt.NDArray[np.bool_]) -> _ServiceCurve:
        """The service of the requests that the mask `own` (n,) chooses, without rejected ones."""
        own = own & (simulation.status != REJECTED)
        of_prompt, of_output = simulation.token_weights
        arrival_s = simulation.arrival_s[own]

        def moment_s(since_arrival_s: Floats) -> Floats:
            """When something happened to each request, given in seconds after its arrival; infinite for what
            never did (NaN).
            """
            return np.nan_to_num(arrival_s + since_arrival_s[own], nan=np.inf)

        scheduled_s, first_s = moment_s(simulation.queue_s), moment_s(simulation.ttft_s)
        finish_s = moment_s(simulation.e2e_s)
        computed = simulation.input_tokens[own]
        if simulation.cached_tokens is not None:
            computed = computed - simulation.cached_tokens[own]
        prompt, output = of_prompt * computed, of_output * simulation.output_tokens[own].astype(float)
        starts_s = np.concatenate([scheduled_s, first_s])
        ends_s = np.concatenate([first_s, finish_s])
        amounts = np.concatenate([prompt, np.maximum(output - of_output, 0.0)])
        # Service that had not ended when the simulation did counts as not given: how much was is not known.
        is_known = np.isfinite(ends_s)
        starts_s, ends_s, amounts = starts_s[is_known], ends_s[is_known], amounts[is_known]
        # Service is a ramp from its start to its end or, if that takes no time, a jump.
        is_ramp = ends_s > starts_s
        knots_s, at_knots = _sum_ramps(starts_s[is_ramp], ends_s[is_ramp], amounts[is_ramp])
        begun_decode = np.isfinite(first_s)
        jumps = _Jumps.of_amounts(
            np.concatenate([ends_s[~is_ramp], first_s[begun_decode]]),
            np.concatenate([amounts[~is_ramp], np.full(int(begun_decode.sum()), of_output)]),
        )
        return cls(
            waiting=_union_of_spans(arrival_s, scheduled_s),
            present=_union_of_spans(arrival_s, finish_s),
            knots_s=knots_s,
            at_knots=at_knots,
            jumps=jumps,
            arrivals=_Jumps.of_amounts(arrival_s, prompt + output),
            begins=_Jumps.of_amounts(scheduled_s, prompt + output),
        )

    def until(self, times_s: Floats) -> Floats:
        """The service given from time zero until each of these times [s]."""
        ramps = np.interp(times_s, self.knots_s, self.at_knots) if len(self.knots_s) else 0.0
        return ramps + self.jumps.sums[np.searchsorted(self.jumps.times_s, times_s, "right")]

    def waiting_at(self, times_s: Floats) -> Floats:
        """The service that the requests need which wait just before each of these times [s]: B_u."""
        arrived = self.arrivals.sums[np.searchsorted(self.arrivals.times_s, times_s)]
        return np.asarray(arrived - self.begins.sums[np.searchsorted(self.begins.times_s, times_s)])


def _sum_ramps(starts_s: Floats, ends_s: Floats, amounts: Floats) -> tuple[Floats, Floats]:
    """The knots of the sum of ramps, and its values there. A ramp grows from 0 at its start to its amount at
    its end, and keeps that.
    """
    rates = amounts / (ends_s - starts_s)
    times_s = np.concatenate([starts_s, ends_s])
    order = np.argsort(times_s, kind="stable")
    times_s = times_s[order]
    rate = np.cumsum(np.concatenate([rates, -rates])[order])  # The slope of the sum after each knot.
    return times_s, np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(times_s))])[: len(times_s)]


def _union_of_spans(starts_s: Floats, ends_s: Floats) -> Spans:
    """The union of these spans of time as disjoint spans. Spans without length are left out."""
    is_span = ends_s > starts_s
    order = np.argsort(starts_s[is_span], kind="stable")
    starts_s, ends_s = starts_s[is_span][order], ends_s[is_span][order]
    if not len(starts_s):
        return np.zeros((0, 2))
    reached_s = np.maximum.accumulate(ends_s)  # The latest end of each span and all before it.
    # A disjoint span begins where a span starts after the end of all before it.
    is_first = np.concatenate([[True], starts_s[1:] > reached_s[:-1]])
    last = np.concatenate([np.flatnonzero(is_first)[1:] - 1, [len(starts_s) - 1]])
    return np.stack([starts_s[is_first], reached_s[last]], axis=1)


def _windows_in_spans(spans: Spans, within_s: tuple[float, float], window_s: float) -> list[Floats]:
    """The edges of the windows in each span, clipped to `within_s`: equal parts of at least `window_s`."""
    edges = []
    for start_s, end_s in np.clip(spans, *within_s).tolist():
        parts = math.floor((end_s - start_s) / window_s * (1 + PARTS_TOLERANCE))
        if parts:
            edges.append(np.linspace(start_s, end_s, parts + 1))
    return edges


def _meets_windows(spans: Spans, edges_s: Floats) -> npt.NDArray[np.bool_]:
    """For each window between two edges, whether some part of the spans is in it."""
    first = np.searchsorted(spans[:, 1], edges_s[:-1], "right")  # The first span that ends after the start.
    starts_s = np.append(spans[:, 0], np.inf)[first]  # inf: no span after the window's start.
    return np.asarray(starts_s < edges_s[1:])
