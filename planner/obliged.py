"""How much of the work an SLO obliges a fleet to do, and by when: what every lower bound rests on.

A percentile lets some requests be late, so late that their work falls after the trace. Of n requests, m are
measured (the warm-up is not), and

    a limit on TTFT at percentile p   obliges the prefill of p m requests by the last arrival + limit
    a limit on E2E at percentile p    obliges all work of p m requests by the last arrival + limit
    TTFT at p and TPOT at q           oblige all work of (p + q - 1) m requests, by the last arrival + the
                                      limit on TTFT + the longest output at the limit on TPOT
    an attainment a                   obliges a m requests to all of that; with limits on TTFT and TBT too,
                                      since then a request's longest gap counts

A limit on TBT alone obliges nothing: it is about all gaps together, and a few of them may be endless.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.domain import Metric, Slo
from planner.simulator.replay import measured_window
from planner.traces import Trace


@dataclass(frozen=True, slots=True)
class Obliged:
    """Shares of all requests whose prefill (whose whole work) must be done in that many seconds."""

    prefill_frac: float
    prefill_s: float
    whole_frac: float
    whole_s: float


def obliged(slo: Slo, trace: Trace, *, trust_gaps: bool = False) -> Obliged:
    """What the SLO obliges on this trace, as above.

    With `trust_gaps` a request that keeps TTFT is also taken to decode at the pace of the limit on TBT. That
    holds wherever gaps beyond the limit are short; it is an assumption.
    """
    start_s, end_s = measured_window(trace)
    inside = (trace.arrival_s >= start_s) & (trace.arrival_s <= end_s)
    measured_frac = float(inside.mean())

    def share(metric: Metric) -> float:
        return max((limit.percentile_frac for limit in slo.limits if limit.metric == metric), default=0.0)

    def late_s(*metrics: Metric) -> float:
        return max((limit.limit_s for limit in slo.limits if limit.metric in metrics), default=0.0)

    has_ttft, has_tpot, has_tbt, has_e2e = (share(metric) > 0 for metric in ("ttft", "tpot", "tbt", "e2e"))
    all_at_once = slo.attainment_frac or 0.0
    prefill = max(share("ttft"), share("e2e"), all_at_once if has_ttft or has_e2e else 0.0)
    whole = share("e2e")
    if has_ttft and has_tpot:
        whole = max(whole, share("ttft") + share("tpot") - 1)
    if has_ttft and has_tbt and trust_gaps:
        whole = max(whole, share("ttft"))
    if has_e2e or (has_ttft and (has_tpot or has_tbt)):
        whole = max(whole, all_at_once)
    decoding_s = late_s("tpot", "tbt") * float(trace.output_tokens.max())
    return Obliged(
        prefill_frac=measured_frac * prefill,
        prefill_s=trace.duration_s + late_s("ttft", "e2e"),
        whole_frac=measured_frac * max(whole, 0.0),
        whole_s=trace.duration_s + max(late_s("ttft") + decoding_s, late_s("e2e")),
    )
