"""A lower bound on the cost of a fleet that counts bursts: requests that arrive in an interval have deadlines
soon after it, so their work must be done in little time.

Sets   i  measured request        j  option (worker type in a role)        v  interval (start_v, end_v]
Data   a_i     arrival of i;  s_i, w_i  seconds after a_i by which i's prefill and i's whole work must be done
               (required_work.Deadlines)
       l_i     latest arrival: a_i, unless i waits for others (DueRequests)
       c_j     objective of one worker of j
       pi_i    least objective x seconds that the whole work of i takes of any options;  pi'_i  that of its
               prefill alone
       p_iv    if a_i lies in v: pi_i if l_i + w_i <= end_v, else pi'_i if l_i + s_i <= end_v, else 0;
               where every token has a deadline and the share x of them is due by end_v, it is
               pi'_i + x^2 (pi_i - pi'_i): later tokens cost more, as they attend to more
       D       how many requests may miss their deadlines (DueRequests.most_late)
Vars   R >= 0  objective of the fleet;   0 <= d_i <= 1  i is given up: it may miss its deadline

  min   R
  s.t.  demand_v    sum_i p_iv (1 - d_i) <= R (end_v - start_v)    for all v
        given_up    sum_i d_i <= D

Work is priced: a second of a worker of j is worth c_j. So a fleet of objective R does work worth at most R
per second, however it routes and orders requests. A request that is given up is given up in all intervals.

There are as many rows as pairs of arrivals. So the program begins without rows, and the most violated row is
added until no row is violated; one pass over the arrivals finds it (the largest sum of a series of terms). If
this ends early, the bound is lower, never wrong. Requests of similar price that are in the same rows are a
group and share one variable d. If a request of the group is given up, the group's sum falls by the work of
its dearest request, which is at least the true work.

Prices. A step of N tokens takes at least alpha + beta N seconds, for any line (alpha, beta) below the step
times. A step decodes at most max_num_seqs tokens, and the tokens that it decodes attend to at most as many KV
tokens as the worker's KV cache holds. So decoding D tokens takes at least D / max_num_seqs steps, and at
least (the KV tokens that all D attend to) / (the KV cache) steps. With k drafted tokens both numbers are
divided by 1 + k. So under each line a request costs a worker at least beta times its tokens and alpha times
its share of the steps (`least_work`). For each option one line prices all requests: the one that makes the
whole trace dearest. Each request then has the price of its cheapest option, of those whose KV cache holds it.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pulp

from planner.models.speculation import least_token_times
from planner.solvers.backend import run_highs, weighted_sum
from planner.solvers.master import (
    Floats,
    Option,
    attention_s,
    fits_kv_cache,
    most_step_tokens,
    step_time_lines,
)
from planner.solvers.required_work import Deadlines, DueRequests, find_due_requests
from planner.traffic.trace import Trace
from planner.traffic.workload import TraceLengths, coarsen_pairs, pair_numbers

# These numbers decide how high the bound is and how long it takes; any numbers give a valid bound. All were
# set by hand.
ROUNDS = 12  # Violated rows are added this often at most.
ENOUGH_FRAC = 0.002  # If no row is violated by more than this share of R, the rounds end.
# An interval ends after the last arrival of a burst, by one of these quantiles of l_i - a_i + w_i.
SLACK_QUANTILES = (0.0, 0.5, 0.9, 1.0)
# Or an interval ends after the last arrival of the trace, by s plus these shares of the way from s to the
# largest l_i - a_i + w_i.
AFTER_LAST_FRACS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
TOLERANCE = 1e-6  # The solver keeps rows to within this share.
SAMPLE_PAIRS = 5_000  # The line of an option is chosen by a sample of this many pairs of lengths.
# A pair is the input and output tokens of a request. If there are more than MOST_PAIRS different pairs,
# lengths are rounded down to powers of ROUND_DOWN_TO.
MOST_PAIRS = 200_000
ROUND_DOWN_TO = 1.001
SLICES = 48  # Requests are grouped by price into this many slices, which are finer for the dearest requests.
MOST_SOLVE_S = 30.0  # One linear program may take this long.


class StepLine(NamedTuple):
    """A line alpha + beta N below the step times [s], and whether the least number of steps follows from the
    KV tokens of a worker (`by_kv`) or from its most sequences.
    """

    alpha: float
    beta: float
    by_kv: bool


def step_lines(option: Option) -> list[StepLine]:
    """Every line, with both ways to count steps: each gives a lower bound of the work of this option.

    Here and below all data-parallel ranks of a worker count as one engine (`WorkerType.as_one`).
    """
    time_lines = step_time_lines(option.type.as_one, most_step_tokens(option))
    return [StepLine(alpha, beta, by_kv) for alpha, beta in time_lines for by_kv in (False, True)]


def least_work(
    option: Option, line: StepLine, input_tokens: Floats, output_tokens: Floats
) -> tuple[Floats, Floats]:
    """The least seconds of a worker for the prefill (U,) and for the decode (U,) of requests with these U
    pairs of lengths, by one line. planner/models/latency.py defines a_s (attention) and e_s (per prefill).
    """
    worker, (alpha, beta, by_kv) = option.type.as_one, line
    latency = least_token_times(worker.latency, worker.speculation)
    n, gaps = input_tokens, output_tokens - 1
    prefill_s, decode_s = np.zeros(len(n)), np.zeros(len(n))
    if option.role != "decode":
        prefill_s = (beta * n + latency.a_s * n * (n + 1) / 2 + latency.e_s) / worker.pp
        if by_kv:  # The n tokens of the prompt are in the KV cache for at least one step.
            prefill_s += alpha / worker.kv_tokens / worker.pp * n
    if option.role != "prefill":
        decode_s = (gaps * beta + attention_s(latency, beta, n, gaps)) / worker.pp
        step_s = alpha / worker.pp / worker.step_tokens  # With drafts a step may give several tokens.
        if by_kv:  # In the step of its j-th gap a request holds n + j KV tokens: n + 1, ..., n + gaps.
            decode_s += step_s / worker.kv_tokens * (gaps * n + gaps * (gaps + 1) / 2)
        else:
            decode_s += step_s / worker.max_num_seqs * gaps
    return prefill_s, decode_s


def work_prices(
    options: Sequence[Option], lengths: TraceLengths, *, whole: bool, until_s: float = math.inf
) -> tuple[Floats, Floats]:
    """pi and pi' of each pair of lengths (U,). If not `whole`, only prefills are priced and both are pi'.

    Raises UnpricedError if the time is over at `until_s`: prices give a bound only if all options have one.
    """
    n = lengths.input_tokens
    # A request with one output token has no decode: its prefill makes the token.
    output = lengths.output_tokens if whole else np.ones_like(lengths.output_tokens)
    cheapest = {
        role: (np.full(len(n), np.inf), np.full(len(n), np.inf)) for role in ("mixed", "prefill", "decode")
    }
    # Any line gives a bound, so it does no harm to choose the dearest line by a sample of the pairs.
    sample = slice(None, None, math.ceil(len(n) / SAMPLE_PAIRS))
    for option in options:
        if time.monotonic() > until_s:
            raise UnpricedError
        fits = fits_kv_cache(option, n, lengths.output_tokens)
        requests = (lengths.requests * fits)[sample]
        lines = step_lines(option)
        totals_s = [
            float(sum(least_work(option, line, n[sample], output[sample])) @ requests) for line in lines
        ]
        prefill_s, decode_s = least_work(option, lines[int(np.argmax(totals_s))], n, output)
        all_work, prefill = cheapest[option.role]
        for least, seconds in ((all_work, prefill_s + decode_s), (prefill, prefill_s)):
            np.minimum(least, np.where(fits, option.objective * seconds, np.inf), out=least)
    handed_off = cheapest["prefill"][0] + (cheapest["decode"][0] if whole else 0.0)
    return (
        np.minimum(cheapest["mixed"][0], handed_off),
        np.minimum(cheapest["mixed"][1], cheapest["prefill"][1]),
    )


class UnpricedError(Exception):
    """The time ended before all options had a price."""


def demand_bound(
    options: Sequence[Option],
    trace: Trace,
    lengths: TraceLengths,
    obligations: Sequence[Deadlines],
    until_s: float = math.inf,
) -> float:
    """Least objective of any fleet of these options on the trace, under any policy: the highest bound that
    one of `obligations` proves.

    It ends at `until_s`, on time.monotonic's clock, with the highest bound so far.
    """
    highest = 0.0
    pair: npt.NDArray[np.int64] | None = None  # (n,) each request's index into the pairs of lengths.
    for due in obligations:
        for whole in (True, False):
            share = due.whole_frac if whole else due.prefill_frac
            # Prefills alone can prove more than whole requests only if more of them are due, or with
            # sessions, where the requests with a deadline for prefill are not those with one for the whole.
            proves_more = whole or share > due.whole_frac or bool(trace.after.size)
            if share <= 0 or not proves_more:
                continue
            if time.monotonic() > until_s:
                return highest
            requests = find_due_requests(due, trace, whole=whole)
            if requests.least_in_time <= 0:
                continue
            if pair is None:
                pair = pair_numbers(lengths, trace)
                lengths, coarse_of_pair = coarsen_pairs(lengths, MOST_PAIRS, ROUND_DOWN_TO)
                pair = coarse_of_pair[pair]
            try:
                all_work, prefill = work_prices(options, lengths, whole=whole, until_s=until_s)
            except UnpricedError:
                return highest
            pi, pi_prefill = all_work[pair[requests.index]], prefill[pair[requests.index]]
            if np.isfinite(pi).all():  # A request that no option can hold has no price, so no bound follows.
                bound = _bound_by_rows(trace, due, requests, pi, pi_prefill, whole, until_s)
                highest = max(highest, bound)
    return highest


def _bound_by_rows(
    trace: Trace,
    due: Deadlines,
    requests: DueRequests,
    pi: Floats,
    pi_prefill: Floats,
    whole: bool,
    until_s: float,
) -> float:
    """The bound that the rows of one kind of deadline prove: the most violated row is added and the program
    solved, up to ROUNDS times. `pi` and `pi_prefill` (m,) are the prices of `requests`.
    """
    arrival_s, latest_s = trace.arrival_s[requests.index], requests.latest_s
    output, most_late = trace.output_tokens[requests.index], requests.most_late
    whole_s = due.due_s(output) if whole else np.full(len(pi), due.prefill_s)
    slacks_s = np.unique(np.quantile(latest_s - arrival_s + whole_s, SLACK_QUANTILES))
    after_last_s = [
        float(arrival_s[-1] + due.prefill_s + frac * (slacks_s[-1] - due.prefill_s))
        for frac in AFTER_LAST_FRACS
    ]

    def work_by(end_s: float) -> Floats:
        """p_iv of an interval with this end, for all requests that arrive early enough to be due by it."""
        n = int(np.searchsorted(arrival_s, end_s - due.prefill_s, side="right"))
        passed_s = end_s - latest_s[:n]
        if not whole:
            return np.where(passed_s >= due.prefill_s, pi[:n], 0.0)
        tokens_frac = due.tokens_frac(output[:n], passed_s)
        decoded = pi_prefill[:n] + tokens_frac * tokens_frac * (pi[:n] - pi_prefill[:n])
        return np.where(passed_s >= due.prefill_s, decoded, 0.0)

    rows = DemandRows()
    group = _price_slices(pi, most_late)
    intervals_s: set[tuple[float, float]] = set()
    kept_frac, least = np.ones(len(pi)), 0.0  # 1 - d_i (m,) and R in the last solution.
    for _ in range(ROUNDS):
        busiest_s = _busiest_end_s(arrival_s, pi * kept_frac, least)
        violated = []
        for end_s in sorted({*(busiest_s + float(slack_s) for slack_s in slacks_s), *after_last_s}):
            if time.monotonic() > until_s:
                break
            work = work_by(end_s)
            best = _best_start(arrival_s[: len(work)], work * kept_frac[: len(work)], least, end_s)
            if best is not None and (best[0], end_s) not in intervals_s:
                start_s, excess = best
                too_low = excess / (end_s - start_s)  # By how much R is too low for this interval.
                violated.append((too_low, start_s, end_s))
        if not violated or max(violated)[0] <= ENOUGH_FRAC * least or time.monotonic() > until_s:
            break
        _, start_s, end_s = max(violated)
        intervals_s.add((start_s, end_s))
        group = rows.add((start_s, end_s), arrival_s, work_by(end_s), group)
        solution = _solve_rows(rows, np.bincount(group), most_late, until_s)
        if solution is None:
            break
        least, kept_frac = solution[0], solution[1][group]
    return least


@dataclass(slots=True)
class DemandRows:
    """The V rows so far. For each interval: the work of all requests in it, and the work (G,) of the dearest
    request of each group in it. Requests of one group are in one slice of prices and in the same rows, so
    they share one variable.
    """

    intervals_s: list[tuple[float, float]] = field(default_factory=list)
    total_work: list[float] = field(default_factory=list)
    dearest: list[Floats] = field(default_factory=list)

    def add(
        self, interval_s: tuple[float, float], arrival_s: Floats, work: Floats, group: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Add the row of an interval. `work` is that of the requests from the first on that are due by its
        end. Each group is split into requests inside and outside the interval; returns the new groups (m,).
        """
        first = int(np.searchsorted(arrival_s, interval_s[0]))
        work_inside = np.zeros(len(group))
        work_inside[first : len(work)] = work[first:]
        # Group g becomes 2 g outside and 2 g + 1 inside; then the groups that are not empty are numbered.
        finer = 2 * group + (work_inside > 0)
        is_used = np.bincount(finer) > 0
        finer = (np.cumsum(is_used) - 1)[finer]
        former_group = np.flatnonzero(is_used) // 2
        for v, dearest in enumerate(self.dearest):
            self.dearest[v] = dearest[former_group]
        dearest = np.zeros(len(former_group))
        np.maximum.at(dearest, finer, work_inside)
        self.intervals_s.append(interval_s)
        self.total_work.append(float(work_inside.sum()))
        self.dearest.append(dearest)
        return finer


def _price_slices(pi: Floats, most_late: int) -> npt.NDArray[np.int64]:
    """The slice (m,) of each request by its price. The dearest requests are given up, so half of the slices
    are for the dearest 2 x `most_late`.
    """
    finer_from = 1 - min(2 * most_late / len(pi), 0.5)  # The quantile from which on slices are finer.
    quantiles = np.concatenate(
        (np.linspace(0, finer_from, SLICES // 2), np.linspace(finer_from, 1, SLICES // 2)[1:-1])
    )
    slices = np.searchsorted(np.unique(np.quantile(pi, quantiles[1:])), pi, side="right")
    return np.unique(slices, return_inverse=True)[1].astype(np.int64)


def _busiest_end_s(arrival_s: Floats, work: Floats, objective: float) -> float:
    """The last arrival of the interval whose work exceeds objective x its length by most."""
    # The excess from the beginning to after each arrival.
    excess_after = np.cumsum(work) - objective * arrival_s
    lowest_before = np.minimum.accumulate(excess_after - work)
    return float(arrival_s[(excess_after - lowest_before).argmax()])


def _best_start(
    arrival_s: Floats, work: Floats, objective: float, end_s: float
) -> tuple[float, float] | None:
    """The start of the interval with this end whose work exceeds objective x its length by most, and that
    excess. Only arrivals before the end may be starts; None if there is none.
    """
    before = int(np.searchsorted(arrival_s, end_s))
    if not before:
        return None
    excess = np.cumsum(work[::-1])[::-1][:before] - objective * (end_s - arrival_s[:before])
    first = int(excess.argmax())
    return float(arrival_s[first]), float(excess[first])


def _solve_rows(
    rows: DemandRows, sizes: npt.NDArray[np.int64], most_late: int, until_s: float
) -> tuple[float, Floats] | None:
    """R for these rows, and the share (G,) of each group that is not given up; None if the time ended.
    `sizes` (G,) are the requests of each group.
    """
    problem = pulp.LpProblem("demand", pulp.LpMinimize)
    objective = problem.add_variable("R", 0)
    given_up = [problem.add_variable(f"d_{g}", 0, int(size)) for g, size in enumerate(sizes)]
    problem += objective, "objective"
    problem += pulp.lpSum(given_up) <= most_late, "given_up"
    # A row is divided by its work, so that its coefficients are shares, which the solver handles best.
    for v, (interval_s, total, dearest) in enumerate(
        zip(rows.intervals_s, rows.total_work, rows.dearest, strict=True)
    ):
        spared_work = weighted_sum((given_up[g], float(dearest[g]) / total) for g in np.flatnonzero(dearest))
        problem += (interval_s[1] - interval_s[0]) / total * objective + spared_work >= 1, f"demand_{v}"
    time_limit_s = min(max(until_s - time.monotonic(), 0.0), MOST_SOLVE_S)
    if run_highs(problem, time_limit_s=time_limit_s).status != "optimal":
        return None
    kept_frac = 1 - np.array([d.value() or 0.0 for d in given_up]) / sizes
    return float(objective.value()) * (1 - TOLERANCE), kept_frac
