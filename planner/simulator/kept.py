"""Whether a fleet keeps an SLO on a trace, from what the kernel has counted.

The search asks this thousands of times, and asks nothing else of most simulations. The kernel has counted
every value of these limits by the end of a run, so the times of all requests need not be gathered and
compared again: `slo_verdict.judge` comes to the same answer.
"""

from __future__ import annotations

import numpy as np

from planner.domain import STEADY_FRAC, Slo
from planner.fleet import Fleet
from planner.policies import STEPWISE
from planner.simulator.layout import FINISHED, State
from planner.simulator.replay import (
    COUNTED_WHILE_RUNNING,
    RequestRecords,
    engine_of,
    is_long,
    read_if_kept,
    simulate_if_kept,
)
from planner.simulator.slo_verdict import judge
from planner.traffic.trace import Trace, judged_span_s, last_tenth_s


def keeps_slo(
    fleet: Fleet, trace: Trace, slo: Slo, requests: RequestRecords, *, is_prefilled: bool = False
) -> bool:
    """Whether the fleet keeps the SLO. `requests` are the records of `trace`. With `is_prefilled` every
    prompt arrives computed, on the first of the fleet's workers.
    """
    patience_s = slo.patience_s(judged_span_s(trace))
    if is_decided_by_counts(fleet, trace, slo):
        is_kept = read_if_kept(
            lambda state: _all_are_served(state) and _is_steady(state, trace, patience_s),
            fleet,
            trace,
            slo.limits,
            requests,
            patience_s=patience_s,
            is_prefilled=is_prefilled,
        )
        return bool(is_kept)
    simulation = simulate_if_kept(
        fleet, trace, slo.limits, requests, slo.every_s, patience_s=patience_s, is_prefilled=is_prefilled
    )
    return simulation is not None and judge(simulation, slo, values=False).holds


def is_decided_by_counts(fleet: Fleet, trace: Trace, slo: Slo) -> bool:
    """Whether the kernel counts all that the SLO goes by, but for rejected requests and the backlog test."""
    return (
        engine_of(fleet) == STEPWISE
        and not is_long(fleet, trace, slo.limits)
        and not trace.after.size
        and all(limit.metric in COUNTED_WHILE_RUNNING for limit in slo.limits)
        and not (slo.selectors or slo.guarantees)
        and slo.attainment_frac is None
        and slo.every_s is None
    )


def _all_are_served(state: State) -> bool:
    """Whether no request was rejected, after a run that all have left."""
    return bool((state.requests["status"] == FINISHED).all())


def _is_steady(state: State, trace: Trace, patience_s: float) -> bool:
    """The backlog test (`slo_verdict.Verdict`) of a run in which all requests were served. They are in order
    of arrival, and the window ends with the last arrival.
    """
    first = int(np.searchsorted(trace.arrival_s, last_tenth_s(*state.window.tolist())))
    last = state.requests[first:]
    waited_s = last["first_token_s"] - last["arrival_s"]
    has_gaps = trace.output_tokens[first:] > 1
    waited_s[has_gaps] = np.fmax(waited_s[has_gaps], last["gap_max_s"][has_gaps])
    return len(last) == 0 or bool((waited_s <= patience_s).mean() >= STEADY_FRAC)
