"""A lower bound that sees bursts: what arrives in an interval must be done by its deadline.

Sets   i  measured request        j  option (worker type in a role)        v  interval (start_v, end_v]
Data   a_i     arrival; s_i, w_i  seconds after which its prefill, its whole work, must be done (Due)
       l_i     latest arrival: a_i, unless i waits for others (Held)
       c_j     objective of one worker
       pi_i    least objective x seconds that the whole work of i takes of any options;  pi'_i  its prefill
       p_iv    if a_i lies in v: pi_i if l_i + w_i <= end_v, else pi'_i if l_i + s_i <= end_v, else 0;
               with the share x of its tokens due by end_v, pi'_i + x^2 (pi_i - pi'_i): later ones cost more
       D       requests that the percentile lets go, with all of their sessions where requests wait
Vars   R >= 0  objective of the fleet;   0 <= d_i <= 1  i is given up

  min   R
  s.t.  demand_v    sum_i p_iv (1 - d_i) <= R (end_v - start_v)    for all v
        given_up    sum_i d_i <= D

A second of n_j workers costs c_j n_j, so no fleet of objective R does more work than that in an interval,
however it routes and orders; what is given up is the same in all intervals. There are as many rows as pairs
of arrivals: violated ones are found by passes over the arrivals (the largest sum of a run of terms) and added
until none is, so a bound that stops early is lower, never wrong. Requests of like price in the same rows
share one d: what remains of such a group is at least its sum less, for each given up, its dearest.

Prices. A step of N tokens of which D decode costs at least alpha + beta N for any line under f, and there are
at least D / max_num_seqs steps, and at least as many as the KV tokens they attend to / KV tokens of a worker.
So a request costs a worker of j at least its share of beta N + alpha steps under each such line: `lines`.
One line per option, the dearest for the whole trace, prices all requests; the cheapest option each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pulp

from planner.domain import WorkerType
from planner.obliged import Due, held
from planner.solvers.backend import run
from planner.solvers.master import Floats, Option, cheapest_token_s
from planner.traces import Trace
from planner.workload import Lengths

ROUNDS = 12
ENOUGH_FRAC = 0.002  # a row violated by less is not worth another round
SLACKS = (0.0, 0.5, 0.9, 1.0)  # quantiles of w_i that an interval may go on after a burst,
AFTER = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)  # and shares of the longest w_i after the last arrival
TOLERANCE = 1e-6  # to which the solver keeps rows
SLICES = 48  # of the requests by price, finer where the dearest are


def lines(worker: WorkerType, most_tokens: int) -> list[tuple[float, float]]:
    """(alpha, beta) with alpha + beta N <= f(N) + h for whole steps of up to `most_tokens`; alpha >= 0.

    The edges of f's lower hull, its floor, and the steepest line through the origin.
    """
    latency = worker.latency
    tokens = np.unique([1.0, *(t for t in latency.knots_tokens if 1 < t < most_tokens), most_tokens])
    corners: list[tuple[float, float]] = []
    for x, y in zip(tokens.tolist(), latency.step_s(tokens).tolist(), strict=True):
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-1], (x, y)):
            corners.pop()
        corners.append((x, y))
    found = [(0.0, cheapest_token_s(latency, most_tokens)), (corners[0][1], 0.0)]
    for one, other in itertools.pairwise(corners):
        beta = _slope(one, other)
        if (alpha := one[1] - beta * one[0]) > 0:
            found.append((alpha, beta))
    return found


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def least_work(option: Option, input_tokens: Floats, output_tokens: Floats) -> tuple[Floats, Floats]:
    """Least seconds of a worker for the prefill and for the decode of such requests, each (lines, U)."""
    worker, latency = option.type, option.type.latency
    n, gaps = input_tokens, output_tokens - 1
    read = gaps * n + gaps * (gaps + 1) / 2  # KV tokens that its decode steps attend to
    prefills, decodes = option.role != "decode", option.role != "prefill"
    rows: list[tuple[Floats, Floats]] = []
    for alpha, beta in lines(worker, worker.max_num_seqs if not prefills else worker.max_num_batched_tokens):
        prefill_s = beta * n + latency.a_s * n * (n + 1) / 2 + latency.e_s
        decode_s = gaps * (beta + latency.b_s) + latency.d_s * read
        rows.append((prefill_s, decode_s + alpha * gaps / worker.max_num_seqs))
        rows.append((prefill_s + alpha * n / worker.kv_tokens, decode_s + alpha * read / worker.kv_tokens))
    found = np.array(rows) / worker.pp
    return found[:, 0] * prefills, found[:, 1] * decodes


def prices(options: Sequence[Option], lengths: Lengths, *, whole: bool) -> tuple[Floats, Floats]:
    """pi and pi' of each pair of lengths (U,); of the prefill alone, both, if not `whole`."""
    n, output = lengths.input_tokens, lengths.output_tokens if whole else np.ones_like(lengths.output_tokens)
    cheapest = {
        role: (np.full(len(n), np.inf), np.full(len(n), np.inf)) for role in ("mixed", "prefill", "decode")
    }
    for option in options:
        prefill_s, decode_s = least_work(option, n, output)
        line = int(((prefill_s + decode_s) @ lengths.requests).argmax())
        all_work, prefill = cheapest[option.role]
        np.minimum(all_work, option.objective * (prefill_s + decode_s)[line], out=all_work)
        np.minimum(prefill, option.objective * prefill_s[line], out=prefill)
    apart = cheapest["prefill"][0] + (cheapest["decode"][0] if whole else 0.0)
    return np.minimum(cheapest["mixed"][0], apart), np.minimum(cheapest["mixed"][1], cheapest["prefill"][1])


@dataclass(frozen=True, slots=True)
class Demand:
    """A bound on the objective, and the intervals [s] whose demand makes it."""

    least_objective: float
    intervals_s: tuple[tuple[float, float], ...]


def demand(options: Sequence[Option], trace: Trace, lengths: Lengths, due: Due) -> Demand:
    """Least objective of any fleet of these options on the trace, under any policy."""
    bounds = [Demand(0.0, ())]
    if due.whole_frac > 0:
        bounds.append(_demand(options, trace, lengths, due, whole=True))
    if due.prefill_frac > due.whole_frac or trace.after.size:
        bounds.append(_demand(options, trace, lengths, due, whole=False))
    return max(bounds, key=lambda bound: bound.least_objective)


def _demand(options: Sequence[Option], trace: Trace, lengths: Lengths, due: Due, *, whole: bool) -> Demand:
    those = held(due, trace, whole=whole)
    if those.kept <= 0:
        return Demand(0.0, ())
    arrival_s, latest_s = trace.arrival_s[those.index], those.latest_s
    output, spared = trace.output_tokens[those.index], those.spared
    codes = (lengths.input_tokens.astype(np.int64) << 32) + lengths.output_tokens.astype(np.int64)
    at = np.searchsorted(codes, (trace.input_tokens[those.index] << 32) + output)
    all_work, prefill = prices(options, lengths, whole=whole)
    pi, pi_prefill = all_work[at], prefill[at]
    if not np.isfinite(pi).all():
        return Demand(0.0, ())
    whole_s = due.whole_s(output) if whole else np.full(len(at), due.prefill_s)
    slacks_s = np.unique(np.quantile(latest_s - arrival_s + whole_s, SLACKS))

    def work_by(end_s: float) -> Floats:
        """p_iv but for the start of v."""
        left_s = end_s - latest_s
        if not whole:
            return np.where(left_s >= due.prefill_s, pi, 0.0)
        decoded = pi_prefill + due.tokens_frac(output, left_s) ** 2 * (pi - pi_prefill)
        return np.where(left_s >= due.prefill_s, decoded, 0.0)

    slice_of = _slices(pi, spared)
    rows: dict[tuple[float, float], Floats] = {}
    kept, least = np.ones(len(at)), 0.0
    for _ in range(ROUNDS):
        ends_s = {_busiest_end_s(arrival_s, pi * kept, least) + float(slack_s) for slack_s in slacks_s}
        ends_s |= {
            float(arrival_s[-1] + due.prefill_s + part * (slacks_s[-1] - due.prefill_s)) for part in AFTER
        }
        found = []
        for end_s in sorted(ends_s):
            start_s, excess = _best_start(arrival_s, work_by(end_s) * kept, least, end_s)
            if (start_s, end_s) not in rows:
                found.append((excess / (end_s - start_s), start_s, end_s))
        if not found or max(found)[0] <= ENOUGH_FRAC * least:
            break
        _, start_s, end_s = max(found)
        rows[start_s, end_s] = np.where(arrival_s >= start_s, work_by(end_s), 0.0)
        least, kept = _solve(rows, slice_of, spared)
    return Demand(least, tuple(rows))


def _slices(pi: Floats, spared: int) -> npt.NDArray[np.int64]:
    """Requests by price: half of the slices for twice as many of the dearest as may be given up."""
    dearest = 1 - min(2 * spared / len(pi), 0.5)
    parts = np.concatenate((np.linspace(0, dearest, SLICES // 2), np.linspace(dearest, 1, SLICES // 2)[1:-1]))
    return np.searchsorted(np.unique(np.quantile(pi, parts[1:])), pi, side="right").astype(np.int64)


def _busiest_end_s(arrival_s: Floats, work: Floats, objective: float) -> float:
    """The last arrival of the interval with most work beyond objective x its length."""
    done = np.cumsum(work) - objective * arrival_s
    return float(arrival_s[(done - np.minimum.accumulate(done - work)).argmax()])


def _best_start(arrival_s: Floats, work: Floats, objective: float, end_s: float) -> tuple[float, float]:
    """Where an interval with this end has most work beyond objective x its length, and how much."""
    excess = np.cumsum(work[::-1])[::-1] - objective * (end_s - arrival_s)
    first = int(excess.argmax())
    return float(arrival_s[first]), float(excess[first])


def _solve(
    rows: Mapping[tuple[float, float], Floats], slice_of: npt.NDArray[np.int64], spared: int
) -> tuple[float, Floats]:
    """R for these rows (each the p_iv of all i), and the share of each request that is kept.

    Requests of one slice in the same rows share one variable.
    """
    group = slice_of
    for work in rows.values():
        group = np.unique(2 * group + (work > 0), return_inverse=True)[1]
    sizes = np.bincount(group)
    problem = pulp.LpProblem("demand", pulp.LpMinimize)
    objective = problem.add_variable("R", 0)
    given_up = [problem.add_variable(f"d_{g}", 0, int(size)) for g, size in enumerate(sizes)]
    problem += objective, "objective"
    problem += pulp.lpSum(given_up) <= spared, "given_up"
    for v, ((start_s, end_s), work) in enumerate(rows.items()):
        dearest = np.zeros(len(sizes))
        np.maximum.at(dearest, group, work)
        total = float(work.sum())  # divides the row, so that its coefficients are shares
        spent = pulp.lpSum(float(dearest[g]) / total * given_up[g] for g in np.flatnonzero(dearest))
        problem += (end_s - start_s) / total * objective + spent >= 1, f"demand_{v}"
    if run(problem).status != "optimal":
        return 0.0, np.ones(len(group))
    kept = 1 - np.array([d.value() or 0.0 for d in given_up]) / sizes
    return float(objective.value()) * (1 - TOLERANCE), kept[group]
