"""Requests that wait for others: turns of a session, steps of an agent.

Such a request arrives `think_s` after the last of those it waits for has finished, so its arrival depends on
the fleet. Its nominal arrival, as if every answer took no time, does not, and no fleet sees it earlier.
Traces are read with nominal arrivals: rates, windows and copies of a trace use them.

A session is a set of requests that are joined by waits; a request that neither waits nor is waited for is
one. SciPy is imported within functions: it takes a tenth of a second.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.traffic.trace import FloatArray, IntArray, Trace


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


def session_numbers(trace: Trace) -> IntArray:
    """(n,): the number of each request's session."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(trace)
    waits = coo_array((np.ones(len(trace.after)), tuple(trace.after.T)), shape=(n, n))
    return np.asarray(connected_components(waits, directed=False)[1], dtype=np.int64)
