"""Brings a trace to another rate, or cuts a window out of it.

There are three ways to change the rate. All keep a request's input and output length together, and the order
of requests, except that a copy that is shifted in a circle begins in its middle:

    superpose   more users: copies of the trace, each shifted in a circle around the trace's duration by a
                random time of its own, the last copy thinned. Each copy keeps its bursts, but their sum is
                smoother, like that of independent users. The duration stays.
    compress    a faster or slower clock: arrival / factor. Bursts grow with the rate, the horizon shrinks.
    thin        fewer users: a random part of the requests. The duration stays.

The factor is the new rate / the old one. A rate is requests / duration everywhere (`Trace.rate_rps`).

If requests wait for others (planner/traffic/sessions.py), arrivals here are nominal, as if answers took no
time; in a simulation such requests arrive later. Sessions stay whole: thinning draws whole sessions, a faster
clock shortens the pauses too, and requests of a copy wait for requests of the same copy. But a session may
cross the edge of a window, or the seam of the circle (the end of the trace, where a shifted copy goes on at
its start): then its later requests arrive at their nominal times and wait for nothing. Copies are other
users: they share the blocks that several sessions share, and none of those that only one session has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from planner.errors import InputError, TraceError
from planner.traffic.described import Description, check_rate, draw_requests
from planner.traffic.sessions import begin_together, session_numbers
from planner.traffic.trace import (
    MAX_REQUESTS,
    FloatArray,
    IntArray,
    Trace,
    index_ranges,
    kept_with_trace,
    no_edges,
    sort_waits,
)
from planner.units import parse_quantity, show_digits

if TYPE_CHECKING:
    from planner.traffic.logs.log_reading import LogOptions

Scaling = Literal["superpose", "compress", "thin"]

# Bounds on the work and the memory of `find_busiest_window` and `_may_be_busiest`; none changes a result.
# `find_busiest_window` tests this many requests at a time, so that its arrays stay small.
BLOCK_REQUESTS = 1_000_000
# A window is cut into at most WINDOW_BINS bins and the trace into at most TRACE_BINS, to see where the
# busiest window may begin. More bins leave fewer requests to sort, and cost more memory.
WINDOW_BINS, TRACE_BINS = 4096, 1 << 18
MOST_BINS_OFF = 3  # A request may be counted this many bins beside its own; `_may_be_busiest` says why.
LEAST_BINS = 16  # With fewer bins per window hardly a request could be left out, so all are sorted.
SAME_FRAC = 1e-9  # A factor on a rate that differs from 1 by no more than this changes nothing.
LEAST_REQUESTS = 2  # A single request has no duration, and so no rate.


@dataclass(frozen=True, slots=True)
class RateRequest:
    """Which traffic to plan for: the rate (None: the trace's own), how it is reached, and the window of the
    trace.

    `window` is as `select_window` takes it. With `described` there is no trace: requests of that
    description are drawn. `log_options` say how a log is read, by the keys of slo.yaml.
    """

    rate_rps: float | None = None
    scale: Scaling = "superpose"
    window: str = "whole"
    described: Description | None = None
    log_options: LogOptions | None = None

    def apply_to(self, trace: Trace, *, seed: int) -> Trace:
        """The requests to plan for: `trace` at the rate, or the described ones; then those in the window.

        Random choices are drawn with `seed`. Raises InputError or TraceError as `rescale_trace` does.
        """
        if self.described is not None:
            rate_rps = self.described.mean_rps if self.rate_rps is None else self.rate_rps
            return select_window(draw_requests(self.described.at_rate(rate_rps), seed=seed), self.window)
        if self.rate_rps is None:
            return select_window(trace, self.window)
        rng = np.random.default_rng(seed)
        return busiest_at(trace, self.rate_rps, self.window, scale=self.scale, rng=rng)


def checked_scale(scale: str, where: str = "traffic: scale") -> Any:
    """The value, if it is one of the ways to rescale a trace; InputError otherwise."""
    if scale not in get_args(Scaling):
        raise InputError(f"{where}: expected superpose, compress or thin, found {scale!r}")
    return scale


def same_requests(trace: Trace, other: Trace) -> bool:
    """Whether two draws of traffic are the same requests at the same times."""
    return all(
        np.array_equal(getattr(trace, name), getattr(other, name))
        for name in ("arrival_s", "input_tokens", "output_tokens")
    )


def headroom_scale(trace: Trace) -> Scaling:
    """How a plan's headroom makes more traffic of its requests: more agents, else the same in less time."""
    return "superpose" if begin_together(trace) else "compress"


def with_times_the_traffic(trace: Trace, factor: float) -> Trace:
    """The same requests, arriving `factor` times as fast. If sessions begin together (sessions.py), there are
    `factor` times as many sessions instead; those of a smaller factor are among those of a larger one.
    """
    scale, rate_rps = headroom_scale(trace), trace.rate_rps * factor
    if scale == "superpose":
        rate_rps = max(rate_rps, LEAST_REQUESTS / trace.duration_s)
    # With one seed for all factors the sessions of a smaller factor are among those of a larger one;
    # "compress" draws nothing.
    return rescale_trace(trace, rate_rps, scale=scale, rng=np.random.default_rng(0))


def rescale_trace(
    trace: Trace, rate_rps: float, *, scale: Scaling = "superpose", rng: np.random.Generator
) -> Trace:
    """The trace at `rate_rps`, by one of the ways in the module's docstring; the trace itself if it has that
    rate already.

    Except with "compress" the duration stays: "superpose" does not shift its first copy, and thinning keeps
    the first and the last request. So the rate is met to within one request, or half a session, over the
    duration. "superpose" to a lower rate thins. Copies keep their tenants. Without sessions they also keep
    all prefix ids, since users share system prompts; this favours prefix caches. Raises InputError for a rate
    that `scale` cannot reach, and TraceError if all requests arrive at once.
    """
    return _rescaled(trace, rate_rps, scale, rng)


def busiest_at(
    trace: Trace, rate_rps: float, spec: str, *, scale: Scaling = "superpose", rng: np.random.Generator
) -> Trace:
    """The same as `select_window(rescale_trace(...), spec)`, but faster for the busiest window of superposed
    copies, because only requests that may be in that window are sorted.
    """
    window = _parse_window(spec)
    length_s = window.length_s if window is not None and window.is_busiest else np.inf
    # Requests that wait for others must be drawn with their sessions, so none of them can be left out.
    can_skip = scale == "superpose" and not trace.after.size and 0 < length_s <= trace.duration_s
    has_enough_bins = length_s * TRACE_BINS >= trace.duration_s * LEAST_BINS
    raises_rate = trace.rate_rps * (1 + SAME_FRAC) < rate_rps < np.inf  # A lower rate makes no copies.
    if not (can_skip and has_enough_bins and raises_rate):
        return select_window(rescale_trace(trace, rate_rps, scale=scale, rng=rng), spec)
    scaled = _rescaled(trace, rate_rps, scale, rng, length_s)
    requests = round(rate_rps * trace.duration_s)
    return _cut_window(scaled, spec, find_busiest_window(scaled, length_s), length_s, requests)


def _rescaled(
    trace: Trace, rate_rps: float, scale: Scaling, rng: np.random.Generator, busiest_s: float | None = None
) -> Trace:
    """The same as `rescale_trace`. But with `busiest_s` a superposed trace has only the requests that may be
    in its busiest window of that length [s].
    """
    checked_scale(scale, "scale")
    check_rate(rate_rps)
    if not trace.duration_s > 0:
        raise TraceError(
            f"{trace.name}: all requests arrive at once, so there is no rate to scale to {rate_rps:g} "
            "requests/s; use a longer trace"
        )
    factor = rate_rps / trace.rate_rps
    if abs(factor - 1) <= SAME_FRAC:
        return trace
    note = f"{scale}: {show_digits(trace.rate_rps, 4)} -> {show_digits(rate_rps, 4)} requests/s"
    if scale == "compress":
        return replace(
            trace,
            arrival_s=trace.arrival_s / factor,
            think_s=trace.think_s / factor,
            notes=(*trace.notes, f"{note}, clock times {factor:.4g}"),
        )
    # The number of requests at this rate. It may be infinite, and int() would refuse that without a message.
    rounded = np.round(float(rate_rps) * float(trace.duration_s))
    if not LEAST_REQUESTS <= rounded <= MAX_REQUESTS:
        raise InputError(
            f"rate: {rate_rps:g} requests/s over the {trace.duration_s:.4g} s of {trace.name} are "
            f"{rounded:.6g} requests, expected {LEAST_REQUESTS} to {MAX_REQUESTS}; ask for another rate or "
            "window"
        )
    requests = int(rounded)
    if scale == "superpose" and factor > 1:
        return _superpose(trace, requests, note, rng, busiest_s)
    if factor > 1:
        raise InputError(
            f"rate: thin cannot raise {show_digits(trace.rate_rps, 4)} to {rate_rps:g} requests/s; "
            "use superpose or compress"
        )
    if trace.after.size:
        index = _whole_sessions(trace, requests, rng, always=(0, len(trace) - 1))
    else:
        inner = 1 + rng.choice(len(trace) - 2, size=requests - 2, replace=False)
        index = np.sort(np.concatenate(([0], inner, [len(trace) - 1])))
    return replace(
        trace.select(index), notes=(*trace.notes, f"{note}, {len(index)} of {len(trace)} requests kept")
    )


def _whole_sessions(
    trace: Trace, requests: int, rng: np.random.Generator, *, always: tuple[int, ...] = ()
) -> IntArray:
    """(m,): the numbers of the requests of random whole sessions; m is near `requests`.

    The sessions of the requests numbered in `always` are among them.
    """
    session = session_numbers(trace)
    order = rng.permutation(session.max() + 1)
    forced_sessions = session[list(always)]
    order = np.concatenate((np.unique(forced_sessions), order[~np.isin(order, forced_sessions)]))
    # The requests in the first 0, 1, 2, ... sessions of this order: the number nearest to `requests` decides
    # how many sessions are kept.
    requests_in_first = np.concatenate(([0], np.cumsum(np.bincount(session)[order])))
    forced = len(np.unique(forced_sessions))
    session_count = forced + int(np.abs(requests_in_first[forced:] - requests).argmin())
    return np.flatnonzero(np.isin(session, order[:session_count]))


def _superpose(
    trace: Trace, requests: int, note: str, rng: np.random.Generator, busiest_s: float | None
) -> Trace:
    """Copies of the trace that have `requests` requests together. `note` says from which rate to which, and
    is continued in the notes of the result.

    With `busiest_s` [s] the result has only the requests that may be in the busiest window of that length.
    """
    whole, rest = divmod(requests, len(trace))  # `whole` copies of the trace, then one of `rest` requests.
    # Sessions that begin together are of agents: copies mean more agents at once, so none is shifted.
    is_of_agents = begin_together(trace)
    copies = [_Copy(None, None)]
    copy_count = whole + (1 if rest else 0)
    for number in range(1, copy_count):
        if number < whole:
            row = None
        elif trace.after.size:
            row = _whole_sessions(trace, rest, rng)
        else:
            row = np.sort(rng.choice(len(trace), size=rest, replace=False))
        shift_s = None if is_of_agents else float(rng.uniform(0.0, trace.duration_s))
        copies.append(_Copy(row, shift_s))
    if busiest_s is None:
        rows = [copy.rows(trace) for copy in copies]
        shifted = [copy.shifted(trace, row) for copy, row in zip(copies, rows, strict=True)]
        arrival_s, laps = zip(*shifted, strict=True)
        superposed = combine_parts(trace, rows, arrival_s, np.concatenate(laps))
        rest = len(superposed) - whole * len(trace)  # Whole sessions may have other numbers of requests.
    else:
        superposed = combine_parts(trace, *_may_be_busiest(trace, copies, busiest_s))
    note = f"{note}, {whole} whole copies and {rest} requests of one more"
    note += ", all at once" if is_of_agents else ", each shifted in a circle"
    if superposed.copies_share_prefixes:
        note += "; copies share their prefixes"
    return replace(superposed, notes=(*trace.notes, note))


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A copy of a trace: requests `chosen` (None: all), shifted by `shift_s` in a circle (None: not)."""

    chosen: IntArray | None
    shift_s: float | None

    def rows(self, trace: Trace) -> IntArray:
        """The numbers in the trace of the copy's requests."""
        return np.arange(len(trace)) if self.chosen is None else self.chosen

    def shifted(self, trace: Trace, rows: IntArray) -> tuple[FloatArray, FloatArray]:
        """The arrivals of `rows` after the shift, and 1.0 for each that passed the seam, else 0.0."""
        arrival_s = trace.arrival_s[rows]
        if self.shift_s is None:
            return arrival_s, np.zeros(len(rows))
        start_s = trace.arrival_s[0]
        shifted_s = arrival_s - start_s + self.shift_s
        laps = (shifted_s >= trace.duration_s).astype(float)
        shifted_s -= laps * trace.duration_s
        # Rounding must not move a request behind the last one of the trace.
        return np.minimum(start_s + shifted_s, trace.arrival_s[-1]), laps


def combine_parts(
    trace: Trace, rows: Sequence[IntArray], arrival_s: Sequence[FloatArray], laps: FloatArray | None = None
) -> Trace:
    """One trace from several parts of `trace`. Part k has its requests `rows[k]`, whole sessions, at the
    times `arrival_s[k]`; a request may be in several parts. The result is in order of arrival.

    Requests that wait for others do so within their part. Blocks that only one session has are distinct in
    each part. `laps` (all requests,) says how often each went around a circle; no request waits for one of
    another lap.
    """
    row, at_s = np.concatenate(rows), np.concatenate(arrival_s)
    order = np.argsort(at_s, kind="stable")
    merged_trace = replace(trace, after=no_edges()).select(row[order], arrival_s=at_s[order])
    if trace.after.size:
        return _with_waits(merged_trace, trace, rows, np.zeros(len(row)) if laps is None else laps, order)
    return replace(merged_trace, copies_share_prefixes=True) if trace.has_prefixes else merged_trace


def _with_waits(
    merged_trace: Trace, trace: Trace, rows: Sequence[IntArray], laps: FloatArray, order: IntArray
) -> Trace:
    """Give `merged_trace` the waits inside each part, except those across the seam of the circle, and give
    each part blocks of its own.

    `rows` are the requests of each part. The arrays (n,) are over the requests of all parts, one part after
    the other: `laps` says how often a request went around the circle, `order` sorts them into `merged_trace`.
    """
    position = np.argsort(order, kind="stable")  # The row of each request in `merged_trace`.
    edges, first = [], 0
    for row in rows:
        # For each request of the trace its index over all parts; -1 if it is not in this part.
        number = np.full(len(trace), -1)
        number[row] = np.arange(first, first + len(row))
        pairs = number[trace.after]
        pairs = pairs[(pairs >= 0).all(axis=1)]
        is_same_lap = laps[pairs[:, 0]] == laps[pairs[:, 1]]
        edges.append(position[pairs[is_same_lap]])
        first += len(row)
    after = np.concatenate(edges)
    merged_trace = replace(merged_trace, after=sort_waits(after))
    copy = np.repeat(np.arange(len(rows)), [len(row) for row in rows])[order]
    if trace.task.size:  # Each copy has tasks of its own.
        merged_trace = replace(merged_trace, task=merged_trace.task + copy * (int(trace.task.max()) + 1))
    if not trace.has_prefixes:
        return merged_trace
    return with_own_blocks(merged_trace, trace, np.concatenate(rows)[order], copy)


def with_own_blocks(merged_trace: Trace, trace: Trace, row: IntArray, copy: IntArray) -> Trace:
    """Give each block that only one session has a new id in each copy; blocks of several sessions keep
    theirs.

    Request i of `merged_trace` is request `row[i]` of `trace` in copy number `copy[i]`. Copy 0 keeps all its
    ids.
    """
    blocks = np.diff(merged_trace.prefix_offsets)
    is_of_one_session = _of_one_session(trace)[index_ranges(trace.prefix_offsets[row], blocks)]
    # In copy k the ids of such blocks are moved up by k times a number above all ids of the trace.
    above_all = int(trace.prefix_ids.max()) + 1
    moved_up = np.repeat(copy * above_all, blocks) * is_of_one_session
    return replace(merged_trace, prefix_ids=merged_trace.prefix_ids + moved_up)


@kept_with_trace  # All scenarios that are drawn from one trace need this array.
def _of_one_session(trace: Trace) -> npt.NDArray[np.bool_]:
    """(m,): for each use of a block, one prompt after the other, whether only one session uses the block."""
    ids, number = np.unique(trace.prefix_ids, return_inverse=True)
    session = np.repeat(session_numbers(trace), np.diff(trace.prefix_offsets))
    # Only one session uses a block if the lowest and the highest number of a session that uses it are equal.
    lowest, highest = np.full(len(ids), len(trace)), np.full(len(ids), -1)
    np.minimum.at(lowest, number, session)
    np.maximum.at(highest, number, session)
    is_of_one_session: npt.NDArray[np.bool_] = lowest == highest
    return is_of_one_session[number]


def _may_be_busiest(
    trace: Trace, copies: Sequence[_Copy], length_s: float
) -> tuple[list[IntArray], list[FloatArray]]:
    """The requests of these copies of a trace that may be in the busiest window of `length_s`, with their
    arrivals: `rows` and `arrival_s` of `combine_parts`.

    Tokens are counted in bins of time. A window that begins in a bin holds at most the tokens of all bins
    that it touches, and at least those of the bins inside it. So the busiest window can begin only in a bin
    whose upper bound is no less than the largest lower bound. A copy is counted as the trace moved by whole
    bins, which puts a request at most one bin before its own; two more bins on either side allow for rounded
    times (MOST_BINS_OFF).
    """
    window_bins = min(WINDOW_BINS, int(TRACE_BINS * length_s / trace.duration_s))
    bin_s, since_s = length_s / window_bins, trace.arrival_s - trace.arrival_s[0]
    trace_bins = int(trace.duration_s / bin_s) + 1  # The last bin may be longer than the trace.
    tokens = trace.input_tokens + trace.output_tokens
    # Bin b is bin_tokens[MOST_BINS_OFF + b].
    bin_tokens = np.zeros(2 * MOST_BINS_OFF + trace_bins + window_bins)
    for copy in copies:
        copy_since_s, copy_tokens = since_s, tokens
        if copy.chosen is not None:
            copy_since_s, copy_tokens = since_s[copy.chosen], tokens[copy.chosen]
        for part, shift_s in _split_at_seam(copy_since_s, copy.shift_s, trace.duration_s):
            shift_bins = MOST_BINS_OFF + math.floor(shift_s / bin_s)
            bins = (copy_since_s[part] / bin_s).astype(np.int64) + shift_bins
            if len(bins):
                bin_tokens[bins[0] : bins[-1] + 1] += np.bincount(bins - bins[0], copy_tokens[part])
    tokens_before = np.concatenate(([0], np.cumsum(bin_tokens)))
    first_bin = np.arange(trace_bins)  # The bin in which a window begins.
    at_most = tokens_before[first_bin + 2 * MOST_BINS_OFF + window_bins] - tokens_before[first_bin]
    at_least = tokens_before[first_bin + window_bins] - tokens_before[first_bin + 2 * MOST_BINS_OFF]
    may_begin = np.flatnonzero(at_most >= at_least.max())
    # Requests are kept if they lie in a window that begins in one of these bins, or MOST_BINS_OFF beside it.
    edges_s = _join_intervals(may_begin - MOST_BINS_OFF, may_begin + window_bins + MOST_BINS_OFF) * bin_s
    rows, arrival_s = [], []
    for copy in copies:
        copy_rows = copy.rows(trace)
        copy_since_s = since_s[copy_rows]
        for part, shift_s in _split_at_seam(copy_since_s, copy.shift_s, trace.duration_s):
            first, end = (part.start + np.searchsorted(copy_since_s[part], edges_s - shift_s)).T
            row = np.concatenate([copy_rows[i:j] for i, j in zip(first, end, strict=True)])
            rows.append(row)
            arrival_s.append(copy.shifted(trace, row)[0])
    return rows, arrival_s


def _split_at_seam(since_s: FloatArray, shift_s: float | None, period_s: float) -> list[tuple[slice, float]]:
    """Split requests that are shifted in a circle of `period_s` into those before its seam and those past it.

    `since_s` (n,) are their times before the shift, in order. Each part is a slice of the requests, with the
    seconds by which it moves.
    """
    if shift_s is None:
        return [(slice(0, len(since_s)), 0.0)]
    seam = int(np.searchsorted(since_s + shift_s, period_s))
    return [(slice(0, seam), shift_s), (slice(seam, len(since_s)), shift_s - period_s)]


def _join_intervals(begins: IntArray, ends: IntArray) -> IntArray:
    """The union of the intervals from `begins` to `ends`, both in rising order, as rows (begin, end)."""
    is_new = np.concatenate(([True], begins[1:] > ends[:-1]))
    last_before_new = np.flatnonzero(is_new)[1:] - 1
    return np.column_stack([begins[is_new], np.append(ends[last_before_new], ends[-1])])


def find_busiest_window(trace: Trace, length_s: float) -> int:
    """The number of the request at which the busiest window of `length_s` begins.

    It is the window with the most input and output tokens, the earliest of several.
    """
    arrival_s = trace.arrival_s
    tokens = np.zeros(len(trace) + 1, np.int64)  # Entry i: the tokens of the first i requests.
    np.add(trace.input_tokens, trace.output_tokens, out=tokens[1:])
    np.cumsum(tokens, out=tokens)
    most, first = -1, 0
    for block_start in range(0, len(trace), BLOCK_REQUESTS):
        starts_s = arrival_s[block_start : block_start + BLOCK_REQUESTS]
        ends = np.searchsorted(arrival_s, starts_s + length_s, side="left")
        window_tokens = tokens[ends] - tokens[block_start : block_start + len(starts_s)]
        fullest = int(np.argmax(window_tokens))
        if window_tokens[fullest] > most:
            most, first = int(window_tokens[fullest]), block_start + fullest
    return first


def select_window(trace: Trace, spec: str = "whole") -> Trace:
    """The part of a trace that `spec` names: "whole", "first 10 min" or "busiest 10 min".

    A window holds the arrivals in [start, start + length). The busiest is the earliest of those with the most
    input and output tokens; it starts with a request. Arrivals are counted from the window's start. A window
    longer than the trace is the whole trace. Raises InputError for another `spec`.
    """
    window = _parse_window(spec)
    if window is None:
        return trace
    if window.length_s > trace.duration_s:
        note = f"window: {spec.strip()} is the whole trace of {trace.duration_s:.4g} s"
        return replace(trace, notes=(*trace.notes, note))
    first = find_busiest_window(trace, window.length_s) if window.is_busiest else 0
    return _cut_window(trace, spec, first, window.length_s, len(trace))


def check_window(spec: str, where: str) -> None:
    """Raise InputError, which begins with `where`, unless `select_window` can read the text."""
    _parse_window(spec, where)


class _Window(NamedTuple):
    """A part of a trace: the busiest of this length, or the first."""

    is_busiest: bool
    length_s: float


def _parse_window(spec: str, where: str = "window") -> _Window | None:
    """The window that a text names; None for "whole". Raises InputError for anything else."""
    if spec.strip() == "whole":
        return None
    match = re.fullmatch(r"\s*(busiest|first)\s+(.+)", spec)
    if match is None:
        raise InputError(f"{where}: expected 'whole', 'first 10 min' or 'busiest 10 min', found {spec!r}")
    length_s = parse_quantity(match[2], "s", where=where)
    if length_s <= 0:
        raise InputError(f"{where}: expected a length > 0, found {match[2]!r}")
    return _Window(match[1] == "busiest", length_s)


def _cut_window(trace: Trace, spec: str, first: int, length_s: float, requests: int) -> Trace:
    """The requests that arrive within `length_s` from the arrival of request `first` on.

    `requests` is the number before the cut, for the note: `trace` may already lack requests outside the
    window.
    """
    arrival_s = trace.arrival_s
    start_s = float(arrival_s[first])
    end = int(np.searchsorted(arrival_s, start_s + length_s, side="left"))
    # A length below the clock's resolution still holds the request it starts with.
    window = trace.select(np.arange(first, max(end, first + 1)))
    measure = " by tokens" if spec.strip().startswith("busiest") else ""
    note = f"window: {spec.strip()}{measure}, from {start_s:.6g} s, {len(window)} of {requests} requests"
    waits = int((trace.after[:, 0] < end).sum() - (trace.after[:, 0] < first).sum())
    if cut := waits - len(window.after):  # Waits for requests before the window.
        note += f"; {cut} waits for what came before the window were cut"
    return replace(window, arrival_s=window.arrival_s - start_s, notes=(*trace.notes, note))
