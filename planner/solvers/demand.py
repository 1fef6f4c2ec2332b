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
at least D / max_num_seqs steps, and at least as many as the KV tokens they attend to / KV tokens of a worker;
a (1 + k)-th of that where k tokens are drafted.
So a request costs a worker of j at least its share of beta N + alpha steps under each such line: `lines`.
One line per option, about the dearest for the whole trace, prices all requests; the cheapest option each of
them. An option whose KV cache is too small for a request has no price for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pulp

from planner.models.speculation import least_token_times
from planner.solvers.backend import run_highs
from planner.solvers.master import (
    Floats,
    Option,
    attention_s,
    fits_kv_cache,
    most_step_tokens,
    step_time_lines,
)
from planner.solvers.required_work import BoundRequests, Due, find_bound_requests
from planner.traffic.trace import Trace
from planner.traffic.workload import TraceLengths, coarsen_pairs

ROUNDS = 12
ENOUGH_FRAC = 0.002  # a row violated by less is not worth another round
SLACKS = (0.0, 0.5, 0.9, 1.0)  # quantiles of w_i that an interval may go on after a burst,
AFTER = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)  # and shares of the longest w_i after the last arrival
TOLERANCE = 1e-6  # to which the solver keeps rows
SAMPLE = 5_000  # pairs of lengths by which the line of an option is chosen
MOST_PAIRS = 200_000  # of lengths that are priced; of more, lengths are rounded down to powers of FINE
FINE = 1.001
SLICES = 48  # of the requests by price, finer where the dearest are


Bound = tuple[float, float, bool]
"""A line (alpha, beta), and whether KV tokens or else sequences say how many steps there are."""


def bounds_of(option: Option) -> list[Bound]:
    """Every way to bound the work of a worker of this option from below."""
    time_lines = step_time_lines(option.type.as_one, most_step_tokens(option))
    return [(alpha, beta, by_kv) for alpha, beta in time_lines for by_kv in (False, True)]


def least_work(
    option: Option, bound: Bound, input_tokens: Floats, output_tokens: Floats
) -> tuple[Floats, Floats]:
    """Least seconds of a worker for the prefill and for the decode of such requests, (U,), by one bound."""
    worker, (alpha, beta, by_kv) = option.type.as_one, bound
    latency = least_token_times(worker.latency, worker.speculation)
    n, gaps = input_tokens, output_tokens - 1
    prefill_s, decode_s = np.zeros(len(n)), np.zeros(len(n))
    if option.role != "decode":
        prefill_s = (beta * n + latency.a_s * n * (n + 1) / 2 + latency.e_s) / worker.pp
        if by_kv:
            prefill_s += alpha / worker.kv_tokens / worker.pp * n
    if option.role != "prefill":
        decode_s = (gaps * beta + attention_s(latency, beta, n, gaps)) / worker.pp
        step_s = alpha / worker.pp / worker.step_tokens  # of a token: so many may share a step
        if by_kv:  # KV tokens that the requests hold when they have their tokens
            decode_s += step_s / worker.kv_tokens * (gaps * n + gaps * (gaps + 1) / 2)
        else:
            decode_s += step_s / worker.max_num_seqs * gaps
    return prefill_s, decode_s


def work_prices(
    options: Sequence[Option], lengths: TraceLengths, *, whole: bool, deadline: float = math.inf
) -> tuple[Floats, Floats]:
    """pi and pi' of each pair of lengths (U,); of the prefill alone, both, if not `whole`.

    Raises DeadlineError where `deadline` comes first: without all options no price is a bound.
    """
    n, output = lengths.input_tokens, lengths.output_tokens if whole else np.ones_like(lengths.output_tokens)
    cheapest = {
        role: (np.full(len(n), np.inf), np.full(len(n), np.inf)) for role in ("mixed", "prefill", "decode")
    }
    some = slice(None, None, -(-len(n) // SAMPLE))  # to choose by: each bound holds
    for option in options:
        if time.monotonic() > deadline:
            raise DeadlineError
        is_decodable = fits_kv_cache(option, n, lengths.output_tokens)
        bounds = bounds_of(option)
        totals_s = [
            float(
                sum(least_work(option, bound, n[some], output[some]))
                @ (lengths.requests * is_decodable)[some]
            )
            for bound in bounds
        ]
        prefill_s, decode_s = least_work(option, bounds[int(np.argmax(totals_s))], n, output)
        all_work, prefill = cheapest[option.role]
        for least, seconds in ((all_work, prefill_s + decode_s), (prefill, prefill_s)):
            np.minimum(least, np.where(is_decodable, option.objective * seconds, np.inf), out=least)
    apart = cheapest["prefill"][0] + (cheapest["decode"][0] if whole else 0.0)
    return np.minimum(cheapest["mixed"][0], apart), np.minimum(cheapest["mixed"][1], cheapest["prefill"][1])


class DeadlineError(Exception):
    """The deadline came before all options had a price."""


@dataclass(frozen=True, slots=True)
class BurstBound:
    """A bound on the objective, and the intervals [s] whose demand makes it."""

    least_objective: float
    intervals_s: tuple[tuple[float, float], ...]


def demand_bound(
    options: Sequence[Option],
    trace: Trace,
    lengths: TraceLengths,
    dues: Sequence[Due],
    deadline: float = math.inf,
) -> BurstBound:
    """Least objective of any fleet of these options on the trace, under any policy: the best over `dues`.

    It ends by `deadline`, on time.monotonic's clock, with what it has by then.
    """
    bounds = [BurstBound(0.0, ())]
    at: npt.NDArray[np.int64] | None = None
    for due in dues:
        for whole in (True, False):
            share = due.whole_frac if whole else due.prefill_frac
            if share <= 0 or not (whole or share > due.whole_frac or trace.after.size):
                continue
            if time.monotonic() > deadline:
                break
            those = find_bound_requests(due, trace, whole=whole)
            if those.kept <= 0:
                continue
            if at is None:
                codes = (lengths.input_tokens.astype(np.int64) << 32) + lengths.output_tokens.astype(np.int64)
                at = np.searchsorted(codes, (trace.input_tokens << 32) + trace.output_tokens)
                lengths, became = coarsen_pairs(lengths, MOST_PAIRS, FINE)
                at = became[at]
            try:
                all_work, prefill = work_prices(options, lengths, whole=whole, deadline=deadline)
            except DeadlineError:
                break
            here = at[those.index]
            if np.isfinite(all_work[here]).all():
                bounds.append(_demand(trace, due, those, all_work[here], prefill[here], whole, deadline))
    return max(bounds, key=lambda bound: bound.least_objective)


def _demand(
    trace: Trace, due: Due, those: BoundRequests, pi: Floats, pi_prefill: Floats, whole: bool, deadline: float
) -> BurstBound:
    arrival_s, latest_s = trace.arrival_s[those.index], those.latest_s
    output, spared = trace.output_tokens[those.index], those.spared
    whole_s = due.whole_s(output) if whole else np.full(len(pi), due.prefill_s)
    slacks_s = np.unique(np.quantile(latest_s - arrival_s + whole_s, SLACKS))

    def work_by(end_s: float) -> Floats:
        """p_iv but for the start of v, of the first requests: those that arrive early enough."""
        n = int(np.searchsorted(arrival_s, end_s - due.prefill_s, side="right"))
        left_s = end_s - latest_s[:n]
        if not whole:
            return np.where(left_s >= due.prefill_s, pi[:n], 0.0)
        tokens_frac = due.tokens_frac(output[:n], left_s)
        decoded = pi_prefill[:n] + tokens_frac * tokens_frac * (pi[:n] - pi_prefill[:n])
        return np.where(left_s >= due.prefill_s, decoded, 0.0)

    group, rows = _slices(pi, spared), DemandRows([], [], [])
    seen: set[tuple[float, float]] = set()
    kept, least = np.ones(len(pi)), 0.0
    for _ in range(ROUNDS):
        ends_s = {_busiest_end_s(arrival_s, pi * kept, least) + float(slack_s) for slack_s in slacks_s}
        ends_s |= {
            float(arrival_s[-1] + due.prefill_s + part * (slacks_s[-1] - due.prefill_s)) for part in AFTER
        }
        group_rows = []
        for end_s in sorted(ends_s):
            if time.monotonic() > deadline:
                break
            work = work_by(end_s)
            best = _best_start(arrival_s[: len(work)], work * kept[: len(work)], least, end_s)
            if best is not None and (best[0], end_s) not in seen:
                start_s, excess = best
                group_rows.append((excess / (end_s - start_s), start_s, end_s))
        if not group_rows or max(group_rows)[0] <= ENOUGH_FRAC * least or time.monotonic() > deadline:
            break
        _, start_s, end_s = max(group_rows)
        seen.add((start_s, end_s))
        group = rows.add((start_s, end_s), arrival_s, work_by(end_s), group)
        solved = _solve(rows, np.bincount(group), spared, deadline)
        if solved is None:
            break
        least, kept = solved[0], solved[1][group]
    return BurstBound(least, tuple(rows.intervals_s))


@dataclass(frozen=True, slots=True)
class DemandRows:
    """The rows so far: their intervals, the work in each, and each group's dearest request in it.

    A group is of one slice of prices and in the same rows, so it shares one variable.
    """

    intervals_s: list[tuple[float, float]]
    work: list[float]
    dearest: list[Floats]

    def add(
        self, interval_s: tuple[float, float], arrival_s: Floats, work: Floats, group: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """One row more, of the first requests' `work` by its end; the groups it leaves, (m,)."""
        first = int(np.searchsorted(arrival_s, interval_s[0]))
        inside = np.zeros(len(group))
        inside[first : len(work)] = work[first:]
        finer = 2 * group + (inside > 0)
        is_there = np.bincount(finer) > 0
        finer = (np.cumsum(is_there) - 1)[finer]
        of = np.flatnonzero(is_there) // 2  # the group that each one was part of
        for v, dearest in enumerate(self.dearest):
            self.dearest[v] = dearest[of]
        dearest = np.zeros(len(of))
        np.maximum.at(dearest, finer, inside)
        self.intervals_s.append(interval_s)
        self.work.append(float(inside.sum()))
        self.dearest.append(dearest)
        return finer


def _slices(pi: Floats, spared: int) -> npt.NDArray[np.int64]:
    """Requests by price: half of the slices for twice as many of the dearest as may be given up."""
    dearest = 1 - min(2 * spared / len(pi), 0.5)
    parts = np.concatenate((np.linspace(0, dearest, SLICES // 2), np.linspace(dearest, 1, SLICES // 2)[1:-1]))
    slices = np.searchsorted(np.unique(np.quantile(pi, parts[1:])), pi, side="right")
    return np.unique(slices, return_inverse=True)[1].astype(np.int64)


def _busiest_end_s(arrival_s: Floats, work: Floats, objective: float) -> float:
    """The last arrival of the interval with most work beyond objective x its length."""
    done = np.cumsum(work) - objective * arrival_s
    return float(arrival_s[(done - np.minimum.accumulate(done - work)).argmax()])


def _best_start(
    arrival_s: Floats, work: Floats, objective: float, end_s: float
) -> tuple[float, float] | None:
    """Where an interval with this end has most work beyond objective x its length, and how much.

    It begins at an arrival before its end; None if there is none. (After the end it would be of negative
    length, and the more so the better it would look.)
    """
    before = int(np.searchsorted(arrival_s, end_s))
    if not before:
        return None
    excess = np.cumsum(work[::-1])[::-1][:before] - objective * (end_s - arrival_s[:before])
    first = int(excess.argmax())
    return float(arrival_s[first]), float(excess[first])


def _solve(
    rows: DemandRows, sizes: npt.NDArray[np.int64], spared: int, deadline: float
) -> tuple[float, Floats] | None:
    """R for these rows, and the share of each group that is kept; None if there was no time."""
    problem = pulp.LpProblem("demand", pulp.LpMinimize)
    objective = problem.add_variable("R", 0)
    given_up = [problem.add_variable(f"d_{g}", 0, int(size)) for g, size in enumerate(sizes)]
    problem += objective, "objective"
    problem += pulp.lpSum(given_up) <= spared, "given_up"
    for v, (interval_s, total, dearest) in enumerate(
        zip(rows.intervals_s, rows.work, rows.dearest, strict=True)
    ):  # divided by the work in the row, so that its coefficients are shares
        spent = pulp.lpSum(float(dearest[g]) / total * given_up[g] for g in np.flatnonzero(dearest))
        problem += (interval_s[1] - interval_s[0]) / total * objective + spent >= 1, f"demand_{v}"
    if run_highs(problem, time_limit_s=min(max(deadline - time.monotonic(), 0.0), 30.0)).status != "optimal":
        return None
    kept = 1 - np.array([d.value() or 0.0 for d in given_up]) / sizes
    return float(objective.value()) * (1 - TOLERANCE), kept
