"""Requests that wait for others: turns of a session, steps of an agent.

Such a request arrives `think_s` after the last request that it waits for has finished, so its arrival depends
on the fleet. Its nominal arrival, as if every answer took no time, is the earliest possible one. Traces are
read with nominal arrivals: rates, windows and copies of a trace use them.

A session is a set of requests that are joined by waits; a request that neither waits nor is waited for is a
session by itself. SciPy is imported within functions: it takes a tenth of a second.

Recorded agents often have a clock each, so all of their sessions begin with the trace. Such a trace shows a
number of agents at work, and not how users come and go (`begin_together`).
"""

import numpy as np
import numpy.typing as npt

from planner.traffic.trace import FloatArray, IntArray, Trace, kept_with_trace

# Sessions begin together if at least TOGETHER_FRAC of them begin in the first BEGIN_FRAC of the trace, where
# only BEGIN_FRAC of them would begin if users came and went.
TOGETHER_FRAC, BEGIN_FRAC = 0.5, 0.125


def waits_for_others(trace: Trace) -> npt.NDArray[np.bool_]:
    """(n,): whether a request waits for others."""
    waits = np.zeros(len(trace), dtype=bool)
    waits[trace.after[:, 0]] = True
    return waits


def arrivals_s(trace: Trace, residence_s: FloatArray) -> FloatArray:
    """(n,): when requests arrive if each takes `residence_s` (n,) from its arrival to its end, which is
    infinite for a request that never ends.
    """
    arrival_s, stays_s, think_s = trace.arrival_s.tolist(), residence_s.tolist(), trace.think_s.tolist()
    # In this order a parent's arrival is final before it is used: parents come before children in the trace.
    children, parents = trace.after[np.argsort(trace.after[:, 0], kind="stable")].T.tolist()
    for child, parent in zip(children, parents, strict=True):
        arrival_s[child] = max(arrival_s[child], arrival_s[parent] + stays_s[parent] + think_s[child])
    return np.array(arrival_s)


def with_nominal_arrivals(trace: Trace) -> Trace:
    """The same requests with their nominal arrivals, sorted by them. Simulations of both traces are equal."""
    arrival_s = arrivals_s(trace, np.zeros(len(trace)))
    order = np.argsort(arrival_s, kind="stable")
    return trace.select(order, arrival_s=arrival_s[order])


@kept_with_trace  # Every scenario needs the sessions of the trace that it is drawn from.
def session_numbers(trace: Trace) -> IntArray:
    """(n,): the number of each request's session. Callers must not write into this array."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(trace)
    waits = coo_array((np.ones(len(trace.after)), tuple(trace.after.T)), shape=(n, n))
    return np.asarray(connected_components(waits, directed=False)[1], dtype=np.int64)


def first_rows(session: IntArray) -> IntArray:
    """(sessions,): the row of the first request of each session; `session` is from `session_numbers`."""
    rows = np.full(session.max() + 1, len(session))
    np.minimum.at(rows, session, np.arange(len(session)))
    return rows


def begin_together(trace: Trace) -> bool:
    """Whether the trace has several sessions and most begin at its start: agents at work at the same time.
    False if all requests arrive at one moment.
    """
    if not trace.after.size or not trace.duration_s > 0:
        return False
    begin_s = trace.arrival_s[first_rows(session_numbers(trace))] - trace.arrival_s[0]
    is_early = begin_s <= BEGIN_FRAC * trace.duration_s
    return len(begin_s) > 1 and bool(is_early.mean() >= TOGETHER_FRAC)
