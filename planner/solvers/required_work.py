"""How much work an SLO obliges a fleet to do, and by when. Every lower bound rests on it.

A percentile lets some requests be late, and their work may be done after the trace ends. The warm-up is not
measured. Of m measured requests,

    a limit on TTFT at percentile p   obliges the prefill of p m requests by the last arrival + limit
    a limit on E2E at percentile p    obliges all work of p m requests by the last arrival + limit
    TTFT at p and TPOT at q           oblige all work of (p + q - 1) m requests, by the last arrival + the
                                      limit on TTFT + the longest output at the limit on TPOT
    any other metric                  obliges nothing, as far as we can prove
    an attainment a                   obliges, of a m requests, the work that the lines above name; TTFT
                                      and TBT then oblige as TTFT and TPOT do, because attainment judges
                                      each request by its longest gap

Without an attainment a limit on TBT obliges nothing, not even beside a limit on TTFT. Its percentile is over
all gaps that end in the window: a hand-off that takes a minute is one gap among hundreds, and a gap that ends
after the window does not count. So a request may keep its TTFT and decode after the window. Gaps oblige only
through the backlog test (`find_backlog_deadlines`): of the requests that arrive in the last tenth of the
window, at least half must get each token, the first and the later ones, within the loosest limit on TTFT.

`guess_slo_work` takes for granted that a request that keeps TTFT decodes at the pace of the limit on TBT.
Searches begin with this guess. No bound and no refutation may rest on it.

In a session (planner/traffic/sessions.py) a request arrives after the answer it waits for, so one late answer
may delay all later requests of its session. So where a percentile lets a request be late, nothing is required
of its whole session. In all other sessions a request arrives at the latest when each earlier request of its
session took all the time that the SLO allows.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.domain import STEADY_FRAC, Limit, Slo, allowed_above
from planner.slo_metrics import Work
from planner.traffic.classes import select_requests
from planner.traffic.sessions import arrivals_s, session_numbers, waits_for_others
from planner.traffic.trace import Trace, last_tenth_s, measured_window


@dataclass(frozen=True, slots=True)
class SloWork:
    """At least `prefill_frac` of all requests must be prefilled within `prefill_s` seconds from the first
    arrival, and the whole work of `whole_frac` of them must be done within `whole_s`.
    """

    prefill_frac: float
    prefill_s: float
    whole_frac: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The deadlines of the requests that arrive in `window_s` (from, to). The prefill of a request is due
    `prefill_s` after its arrival, the whole request `due_s()` after its arrival.

    `gap_s` is the time for each token and `e2e_s` that for the whole request, both 0 without such a limit.
    `prefill_frac` and `whole_frac` are the shares of these requests that must be done in time. With
    `is_paced` each token has a deadline, `gap_s` after the token before it; otherwise only the last token has
    one.
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

    def due_s(self, output_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds (n,) after its arrival by which a request with this many output tokens must be done: the
        looser of its limits, since a lower bound may require too little, and never too much.
        """
        return np.asarray(np.maximum(self.prefill_s + self.gap_s * output_tokens, self.e2e_s))

    def tokens_frac(
        self, output_tokens: npt.NDArray[np.int64], passed_s: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """The least share (n,) of a request's tokens that is due `passed_s` (n,) after its arrival."""
        frac = np.zeros(len(passed_s))
        if self.is_paced:
            # One gap is subtracted, because a token is due only at the end of its gap.
            decoding_s = passed_s - self.prefill_s - self.gap_s
            frac = np.clip(decoding_s / (self.gap_s * output_tokens), 0.0, 1.0)
        return np.asarray(np.where(passed_s >= self.due_s(output_tokens), 1.0, frac))


@dataclass(frozen=True, slots=True, eq=False)
class DueRequests:
    """The requests of a trace that have a deadline, by their numbers `index` (m,).

    `latest_s` (m,) are their latest arrivals if every request that they wait for is in time. At most
    `most_late` of them may miss their deadline, so at least `least_in_time` are done in time. Without
    sessions `least_in_time` is the required share of them, which need not be a whole number.
    """

    index: npt.NDArray[np.int64]
    latest_s: npt.NDArray[np.float64]
    most_late: int
    least_in_time: float


def find_due_requests(deadlines: Deadlines, trace: Trace, *, whole: bool) -> DueRequests:
    """The requests that have a deadline: for their whole work, or for their prefill alone (not `whole`)."""
    is_measured = deadlines.arrives(trace)
    share = deadlines.whole_frac if whole else deadlines.prefill_frac
    if not trace.after.size:
        index = np.flatnonzero(is_measured)
        return DueRequests(
            index, trace.arrival_s[index], allowed_above(share, len(index)), share * len(index)
        )
    # With sessions the simulation decides which requests that wait for others are measured. The most requests
    # may be late if all of these are measured.
    waits = waits_for_others(trace)
    late = allowed_above(share, int((is_measured | waits).sum()))
    if not whole:  # A request that waits for others arrives at a time not known here, so it has no deadline.
        index = np.flatnonzero(is_measured & ~waits)
        return DueRequests(index, trace.arrival_s[index], min(late, len(index)), max(len(index) - late, 0))
    # Requests of the warm-up have no deadline, so the requests that wait for them may arrive at any time.
    latest_s = arrivals_s(trace, np.where(is_measured, deadlines.due_s(trace.output_tokens), np.inf))
    index = np.flatnonzero(is_measured & (latest_s < np.inf))
    # Each late request may delay its whole session. At worst the late requests are in the largest sessions.
    sizes = np.sort(np.bincount(session_numbers(trace)[index])) if index.size else np.zeros(0, np.int64)
    most_late = int(sizes[::-1][:late].sum())
    return DueRequests(index, latest_s[index], most_late, len(index) - most_late)


def find_deadlines(slo: Slo, trace: Trace) -> Deadlines:
    """The deadlines that the SLO sets each request, without those of `find_backlog_deadlines`."""
    return _compute_deadlines(slo, trace, guess_pace=False)


def _compute_deadlines(slo: Slo, trace: Trace, *, guess_pace: bool) -> Deadlines:
    """The table of this module's docstring. With `guess_pace` a limit on gaps counts too, for
    `guess_slo_work`.

    The limits of a class require the work of some number of its requests. The sum of these numbers is
    required of all requests, by the loosest deadline of any class. It is left open which requests these are,
    so the result gives lower bounds.
    """
    of_all = tuple(limit for limit in slo.limits if limit.selector is None)
    deadlines = _deadlines_of(replace(slo, limits=of_all), trace, guess_pace=guess_pace)
    if not slo.selectors:
        return deadlines
    is_measured = deadlines.arrives(trace)
    all_deadlines, measured = [deadlines], max(int(is_measured.sum()), 1)
    prefilled_requests = whole_requests = 0
    for selector in slo.selectors:
        class_limits = tuple(limit for limit in slo.limits if limit.selector == selector)
        # An attainment is of all requests together, so the limits of a class have none.
        of_class = _deadlines_of(Slo(class_limits), trace, guess_pace=guess_pace)
        requests = int((is_measured & select_requests(selector, trace)).sum())
        prefilled_requests += requests - allowed_above(of_class.prefill_frac, requests)
        whole_requests += requests - allowed_above(of_class.whole_frac, requests)
        all_deadlines.append(of_class)
    # With sessions a late request delays its whole session, which may have requests of any class.
    if trace.after.size:
        prefilled_requests = whole_requests = 0
    return Deadlines(
        window_s=deadlines.window_s,
        prefill_frac=max(deadlines.prefill_frac, prefilled_requests / measured),
        prefill_s=max(deadline.prefill_s for deadline in all_deadlines),
        whole_frac=max(deadlines.whole_frac, whole_requests / measured),
        gap_s=max(deadline.gap_s for deadline in all_deadlines),
        e2e_s=max(deadline.e2e_s for deadline in all_deadlines),
        is_paced=False,  # Classes differ in their pace, so only the last token has a deadline.
    )


@dataclass(frozen=True, slots=True, eq=False)
class LatePrefills:
    """How many requests may be prefilled late in one window of the SLO. `of_all_frac` is the share of all
    requests that must be in time. `of_classes` has for each class the mask (n,) of its requests and the share
    of them that must be in time.
    """

    of_all_frac: float
    of_classes: tuple[tuple[npt.NDArray[np.bool_], float], ...]

    @classmethod
    def of(cls, slo: Slo, trace: Trace) -> "LatePrefills":
        """What the SLO allows on this trace, which has no sessions."""

        def prefill_frac(limits: Iterable[Limit], attainment_frac: float | None = None) -> float:
            return _deadlines_of(Slo(tuple(limits), attainment_frac), trace, guess_pace=False).prefill_frac

        of_all = [limit for limit in slo.limits if limit.selector is None]
        return cls(
            prefill_frac(of_all, slo.attainment_frac),
            tuple(
                (
                    select_requests(selector, trace),
                    prefill_frac(limit for limit in slo.limits if limit.selector == selector),
                )
                for selector in slo.selectors
            ),
        )

    def most_late(self, requests: npt.NDArray[np.int64]) -> int:
        """How many of these requests, by their numbers, may be late."""

        def least_in_time(count: int, share: float) -> int:
            return count - allowed_above(share, count)

        in_classes = sum(least_in_time(int(mask[requests].sum()), share) for mask, share in self.of_classes)
        return len(requests) - max(least_in_time(len(requests), self.of_all_frac), in_classes)


def _deadlines_of(slo: Slo, trace: Trace, *, guess_pace: bool) -> Deadlines:
    """The deadlines that these limits, whatever their class, set for all requests of the trace.
    planner/slo_metrics.py says which kind of `Work` each metric requires: TTFT "prefill", TPOT "mean pace",
    TBT "every gap", E2E "all".
    """

    def share(work: Work) -> float:
        """The largest percentile of the limits that require this kind of work, 0 if there are none."""
        return max(
            (limit.percentile_frac for limit in slo.limits if limit.metric_row.obliges == work), default=0.0
        )

    def loosest_s(*works: Work) -> float:
        """The loosest limit that requires one of these kinds of work, 0 if there is none."""
        return max((limit.limit_s for limit in slo.limits if limit.metric_row.obliges in works), default=0.0)

    works: tuple[Work, ...] = ("prefill", "mean pace", "every gap", "all")
    has_prefill, has_mean_pace, has_gaps, has_all = (share(work) > 0 for work in works)
    attainment_frac = slo.attainment_frac or 0.0
    prefill_frac = max(share("prefill"), share("all"), attainment_frac if has_prefill or has_all else 0.0)
    whole_frac = share("all")
    if has_prefill and has_mean_pace:
        whole_frac = max(whole_frac, share("prefill") + share("mean pace") - 1)
    if has_prefill and has_gaps and guess_pace:
        whole_frac = max(whole_frac, share("prefill"))
    if has_all or (has_prefill and (has_mean_pace or has_gaps)):
        whole_frac = max(whole_frac, attainment_frac)
    return Deadlines(
        window_s=measured_window(trace),
        prefill_frac=prefill_frac,
        prefill_s=loosest_s("prefill", "all"),
        whole_frac=max(whole_frac, 0.0),
        gap_s=loosest_s("mean pace", "every gap"),
        e2e_s=loosest_s("all"),
        # Without an attainment or the guess TBT obliges nothing: `whole_frac` is 0, and the pace is not used.
        is_paced=has_gaps and not has_mean_pace and not has_all,
    )


def find_backlog_deadlines(slo: Slo, trace: Trace) -> Deadlines | None:
    """The deadlines that the backlog test sets (`Slo.patience_s`). None for a trace with sessions, since
    there the fleet decides which requests arrive in the last part of the window.
    """
    if trace.after.size:
        return None
    start_s, end_s = measured_window(trace)
    patience_s = slo.patience_s(end_s - start_s)
    return Deadlines(
        window_s=(last_tenth_s(start_s, end_s), end_s),
        prefill_frac=STEADY_FRAC,
        prefill_s=patience_s,
        whole_frac=STEADY_FRAC,
        gap_s=patience_s,
        e2e_s=0.0,
        is_paced=True,
    )


def compute_slo_work(slo: Slo, trace: Trace) -> SloWork:
    """The work that the SLO obliges every fleet to do on this trace, without that of the backlog test."""
    return _sum_work(_compute_deadlines(slo, trace, guess_pace=False), slo, trace)


def guess_slo_work(slo: Slo, trace: Trace) -> SloWork:
    """A guess at the work that the SLO requires: requests that keep TTFT keep the pace of TBT too."""
    return _sum_work(_compute_deadlines(slo, trace, guess_pace=True), slo, trace)


def _sum_work(deadlines: Deadlines, slo: Slo, trace: Trace) -> SloWork:
    """The deadlines of single requests, summed up: shares of the trace that must be done by the last one."""
    prefill, whole = (find_due_requests(deadlines, trace, whole=whole) for whole in (False, True))
    # `deadlines.prefill_s` may be a limit on E2E, which already covers the decoding.
    ttft_s = max(
        (limit.limit_s for limit in slo.limits if limit.metric_row.obliges == "prefill"), default=0.0
    )
    # With classes `deadlines.prefill_s` is the loosest of any class, and the bound must allow that one.
    if slo.selectors:
        ttft_s = max(ttft_s, deadlines.prefill_s)
    decoding_s = deadlines.gap_s * float(trace.output_tokens.max())

    def span_s(due_requests: DueRequests) -> float:
        return float(due_requests.latest_s.max(initial=trace.arrival_s[-1]) - trace.arrival_s[0])

    return SloWork(
        prefill_frac=prefill.least_in_time / len(trace),
        prefill_s=span_s(prefill) + deadlines.prefill_s,
        whole_frac=whole.least_in_time / len(trace),
        whole_s=span_s(whole) + max(ttft_s + decoding_s, deadlines.e2e_s),
    )
