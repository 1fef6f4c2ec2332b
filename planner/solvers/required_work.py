"""How much of the work an SLO obliges a fleet to do, and by when: what every lower bound rests on.

A percentile lets some requests be late, so late that their work falls after the trace. Of n requests, m are
measured (the warm-up is not), and

    a limit on TTFT at percentile p   obliges the prefill of p m requests by the last arrival + limit
    a limit on E2E at percentile p    obliges all work of p m requests by the last arrival + limit
    TTFT at p and TPOT at q           oblige all work of (p + q - 1) m requests, by the last arrival + the
                                      limit on TTFT + the longest output at the limit on TPOT
    any other metric                  obliges nothing that we know of
    an attainment a                   obliges a m requests to all of that; with limits on TTFT and TBT too,
                                      since then a request's longest gap counts

A limit on TBT at a percentile obliges nothing, not even beside one on TTFT. It is about all gaps together
that end in the window: of 800 tokens one hand-off that takes a minute is one gap, and a gap that ends after
the window is none. So a request may keep TTFT and decode when nobody counts any more. What gaps oblige
follows from the backlog test alone (`steady_work`): at least half of the requests of the last tenth of the
window wait no longer than the loosest limit on TTFT, for their first token and for every other one.

`usual_work` takes for granted that whoever keeps TTFT decodes at the pace of the limit on TBT. That is a
guess, to begin a search with; no bound and no refutation may rest on it.

Where requests wait for others (planner/traffic/sessions.py), who is late has whoever waits for it come as
late as it likes. So with each of the requests that a percentile lets be late, all of its session is let go. A
request of the others arrives no later than if all before it had taken all the time that the SLO leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.domain import STEADY_FRAC, Slo, allowed_above
from planner.slo_metrics import Work
from planner.traffic.sessions import arrivals_s, session_numbers, waits_for_others
from planner.traffic.trace import Trace, measured_window


@dataclass(frozen=True, slots=True)
class Obliged:
    """Shares of all requests whose prefill (whose whole work) must be done in that many seconds."""

    prefill_frac: float
    prefill_s: float
    whole_frac: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class Due:
    """By when each measured request must be done: its prefill `prefill_s` after its arrival, all of it later.

    `prefill_frac` and `whole_frac` are the shares of the measured requests, those that arrive in `window_s`,
    that the SLO holds to that. Where `is_paced`, each of its tokens is due `gap_s` after the one before.
    """

    window_s: tuple[float, float]
    prefill_frac: float
    prefill_s: float
    whole_frac: float
    gap_s: float
    e2e_s: float
    is_paced: bool

    def arrives(self, trace: Trace) -> npt.NDArray[np.bool_]:
        """Which requests (n,) of the trace arrive in the window."""
        start_s, end_s = self.window_s
        return np.asarray((trace.arrival_s >= start_s) & (trace.arrival_s <= end_s))

    def whole_s(self, output_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds from its arrival in which a request of such an output must be done."""
        return np.asarray(np.maximum(self.prefill_s + self.gap_s * output_tokens, self.e2e_s))

    def tokens_frac(
        self, output_tokens: npt.NDArray[np.int64], left_s: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """At least this share of its tokens is due `left_s` after a request's arrival; all once it is due."""
        frac = np.zeros(len(left_s))
        if self.is_paced:
            frac = np.clip((left_s - self.prefill_s - self.gap_s) / (self.gap_s * output_tokens), 0.0, 1.0)
        return np.asarray(np.where(left_s >= self.whole_s(output_tokens), 1.0, frac))


@dataclass(frozen=True, slots=True, eq=False)
class BoundRequests:
    """The requests (m,) of a trace that the SLO holds to a deadline if nobody is late whom they wait for.

    `latest_s` is when each then arrives at the latest; `spared` of them at most need not be done in time, so
    `kept` at least are.
    """

    index: npt.NDArray[np.int64]
    latest_s: npt.NDArray[np.float64]
    spared: int
    kept: float


def find_bound_requests(each: Due, trace: Trace, *, whole: bool) -> BoundRequests:
    """Requests that the SLO binds to finish in time, in whole or with their prefill alone."""
    is_measured = each.arrives(trace)
    share = each.whole_frac if whole else each.prefill_frac
    if not trace.after.size:
        index = np.flatnonzero(is_measured)
        return BoundRequests(
            index, trace.arrival_s[index], allowed_above(share, len(index)), share * len(index)
        )
    waits = waits_for_others(trace)
    late = allowed_above(share, int((is_measured | waits).sum()))
    if not whole:
        index = np.flatnonzero(is_measured & ~waits)
        return BoundRequests(index, trace.arrival_s[index], min(late, len(index)), max(len(index) - late, 0))
    # nothing is known of what waits for a request of the warm-up
    latest_s = arrivals_s(trace, np.where(is_measured, each.whole_s(trace.output_tokens), np.inf))
    index = np.flatnonzero(is_measured & (latest_s < np.inf))
    sizes = np.sort(np.bincount(session_numbers(trace)[index])) if index.size else np.zeros(0, np.int64)
    let_go = int(sizes[len(sizes) - min(late, len(sizes)) :].sum())
    return BoundRequests(index, latest_s[index], let_go, len(index) - let_go)


def find_deadlines(slo: Slo, trace: Trace) -> Due:
    """The same as `slo_work`, request by request."""
    return _compute_deadlines(slo, trace, guess_pace=False)


def _compute_deadlines(slo: Slo, trace: Trace, *, guess_pace: bool) -> Due:
    def share(work: Work) -> float:
        return max((limit.percentile_frac for limit in slo.limits if limit.row.obliges == work), default=0.0)

    def late_s(*works: Work) -> float:
        return max((limit.limit_s for limit in slo.limits if limit.row.obliges in works), default=0.0)

    works: tuple[Work, ...] = ("prefill", "mean pace", "every gap", "all")
    has_prefill, has_mean_pace, has_gaps, has_all = (share(work) > 0 for work in works)
    all_at_once = slo.attainment_frac or 0.0
    prefill = max(share("prefill"), share("all"), all_at_once if has_prefill or has_all else 0.0)
    whole = share("all")
    if has_prefill and has_mean_pace:
        whole = max(whole, share("prefill") + share("mean pace") - 1)
    if has_prefill and has_gaps and guess_pace:
        whole = max(whole, share("prefill"))
    if has_all or (has_prefill and (has_mean_pace or has_gaps)):
        whole = max(whole, all_at_once)
    return Due(
        window_s=measured_window(trace),
        prefill_frac=prefill,
        prefill_s=late_s("prefill", "all"),
        whole_frac=max(whole, 0.0),
        gap_s=late_s("mean pace", "every gap"),
        e2e_s=late_s("all"),
        is_paced=has_gaps and not has_mean_pace and not has_all,
    )


def steady_work(slo: Slo, trace: Trace) -> Due | None:
    """What the backlog test obliges (`Slo.patience_s`); None where requests wait for others.

    There who arrives in the last tenth depends on the fleet.
    """
    if trace.after.size:
        return None
    start_s, end_s = measured_window(trace)
    return Due(
        window_s=(end_s - (end_s - start_s) / 10, end_s),
        prefill_frac=STEADY_FRAC,
        prefill_s=slo.patience_s,
        whole_frac=STEADY_FRAC,
        gap_s=slo.patience_s,
        e2e_s=0.0,
        is_paced=True,
    )


def slo_work(slo: Slo, trace: Trace) -> Obliged:
    """What the SLO obliges every fleet to on this trace, as above, but for the backlog test."""
    return _in_all(_compute_deadlines(slo, trace, guess_pace=False), slo, trace)


def usual_work(slo: Slo, trace: Trace) -> Obliged:
    """A guess at what a fleet does that keeps the SLO: whoever keeps TTFT keeps the pace of TBT too."""
    return _in_all(_compute_deadlines(slo, trace, guess_pace=True), slo, trace)


def _in_all(each: Due, slo: Slo, trace: Trace) -> Obliged:
    prefill, whole = (find_bound_requests(each, trace, whole=whole) for whole in (False, True))
    ttft_s = max((limit.limit_s for limit in slo.limits if limit.row.obliges == "prefill"), default=0.0)
    decoding_s = each.gap_s * float(trace.output_tokens.max())

    def span_s(those: BoundRequests) -> float:
        return float(those.latest_s.max(initial=trace.arrival_s[-1]) - trace.arrival_s[0])

    return Obliged(
        prefill_frac=prefill.kept / len(trace),
        prefill_s=span_s(prefill) + each.prefill_s,
        whole_frac=whole.kept / len(trace),
        whole_s=span_s(whole) + max(ttft_s + decoding_s, each.e2e_s),
    )
