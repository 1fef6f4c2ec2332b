"""Another amount of traffic from a trace, or a part of it.

Three ways to another rate. Each keeps the two lengths of a request together, and the requests of one copy in
their order of arrival (around the circle, where the copy is shifted):

    superpose   more users: copies of the trace, each turned by its own random shift around the trace's
                duration, the last one thinned. A copy keeps its bursts; their sum is smoother, as a sum of
                independent users is. The duration stays.
    compress    a faster or slower clock: arrival / factor. Bursts grow with the rate, the horizon shrinks.
    thin        fewer users: a random part of the requests. The duration stays.

A rate is requests / duration everywhere (`Trace.rate_rps`).

Where requests wait for others (planner/traffic/sessions.py) all of this goes by nominal arrivals, as if
answers took no time: what fleets see comes later. Sessions stay whole: whole ones are drawn, a faster clock
shortens the pauses too, and a copy has its own waits. Only where a session crosses an edge, of a window or of
the circle, its later part begins at its nominal time and waits no longer. Copies are other users: they share
the blocks that several sessions share, and none of those that only one session has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from planner.errors import InputError, TraceError
from planner.traffic.described import Description, draw_requests
from planner.traffic.sessions import session_numbers
from planner.traffic.trace import MAX_REQUESTS, FloatArray, IntArray, Trace, no_edges
from planner.units import quantity

if TYPE_CHECKING:
    from planner.traffic.logs.log_reading import LogOptions

Scaling = Literal["superpose", "compress", "thin"]

# `find_busiest_window` tests so many requests at a time, so that its arrays stay small.
BLOCK = 1_000_000
# A window is cut into at most WINDOW_BINS bins and the trace into at most TRACE_BINS, to see where the
# busiest window may begin. More bins leave fewer requests to sort, and cost more memory.
WINDOW_BINS, TRACE_BINS = 4096, 1 << 18
AROUND = 3  # Bins by which a request may lie beside its own: `_may_be_busiest` says why.
LEAST_BINS = 16  # In a window of fewer bins they leave nearly all requests: then all are sorted.
SAME_FRAC = 1e-9  # Factors this near to 1 change nothing.


@dataclass(frozen=True, slots=True)
class RateRequest:
    """Which traffic is meant: a trace at this rate (None: its own), and which part of it.

    With `described` there is no trace: every seed draws requests of that description. `reading` says how a
    log is read, where slo.yaml says it.
    """

    rate_rps: float | None = None
    how: Scaling = "superpose"
    part: str = "whole"
    described: Description | None = None
    reading: LogOptions | None = None

    def of(self, trace: Trace, *, seed: int) -> Trace:
        """The requests meant; the seed draws what `rescale` draws, or all of them."""
        if self.described is not None:
            rate_rps = self.described.mean_rps if self.rate_rps is None else self.rate_rps
            return select_window(draw_requests(self.described.at_rate(rate_rps), seed=seed), self.part)
        if self.rate_rps is None:
            return select_window(trace, self.part)
        return busiest_at(trace, self.rate_rps, self.part, how=self.how, rng=np.random.default_rng(seed))


def same_requests(trace: Trace, other: Trace) -> bool:
    """Whether two draws of traffic are the same requests at the same times."""
    return all(
        np.array_equal(getattr(trace, name), getattr(other, name))
        for name in ("arrival_s", "input_tokens", "output_tokens")
    )


def sped_up(trace: Trace, factor: float) -> Trace:
    """The same requests, arriving `factor` times as fast."""
    # A faster clock draws nothing; the generator is only asked for.
    return rescale(trace, trace.rate_rps * factor, how="compress", rng=np.random.default_rng(0))


def rescale(trace: Trace, rate_rps: float, *, how: Scaling = "superpose", rng: np.random.Generator) -> Trace:
    """The trace at `rate_rps`, by one of the ways above; itself where it has that rate already.

    The asked rate is met up to one request (or half a session) in the duration: "superpose" leaves its first
    copy unshifted, and thinning keeps the first and the last request. "superpose" below the trace's rate
    thins. Copies keep their tenants and, but for sessions, all prefix ids: users share system prompts, which
    favours prefix caches.
    """
    return _rescaled(trace, rate_rps, how, rng)


def busiest_at(
    trace: Trace, rate_rps: float, spec: str, *, how: Scaling = "superpose", rng: np.random.Generator
) -> Trace:
    """`select_window(rescale(...), spec)`, faster: only requests that may be in the busiest window are
    sorted.
    """
    match = _window_spec(spec)
    length_s = _length_s(match) if match is not None and match[1] == "busiest" else np.inf
    can_skip = how == "superpose" and not trace.after.size and 0 < length_s <= trace.duration_s
    has_enough_bins = length_s * TRACE_BINS >= trace.duration_s * LEAST_BINS
    raises_rate = trace.rate_rps * (1 + SAME_FRAC) < rate_rps < np.inf
    if not (can_skip and has_enough_bins and raises_rate):
        return select_window(rescale(trace, rate_rps, how=how, rng=rng), spec)
    scaled = _rescaled(trace, rate_rps, how, rng, length_s)
    return _part(
        scaled, spec, find_busiest_window(scaled, length_s), length_s, of=round(rate_rps * trace.duration_s)
    )


def _rescaled(
    trace: Trace, rate_rps: float, how: Scaling, rng: np.random.Generator, busiest_s: float | None = None
) -> Trace:
    """`rescale`; with `busiest_s`, copies hold only what may be in the busiest window of that length."""
    if how not in ("superpose", "compress", "thin"):
        raise InputError(f"scale: expected superpose, compress or thin, found {how!r}")
    if not 0 < rate_rps < np.inf:
        raise InputError(f"rate: expected a number of requests/s > 0, found {rate_rps}")
    if not trace.duration_s > 0:
        raise TraceError(
            f"{trace.name}: all requests arrive at once, so there is no rate to scale to {rate_rps:g} "
            "requests/s; use a longer trace"
        )
    factor = rate_rps / trace.rate_rps
    if abs(factor - 1) <= SAME_FRAC:
        return trace
    note = f"{how}: {trace.rate_rps:.4g} -> {rate_rps:.4g} requests/s"
    if how == "compress":
        return replace(
            trace,
            arrival_s=trace.arrival_s / factor,
            think_s=trace.think_s / factor,
            notes=(*trace.notes, f"{note}, clock times {factor:.4g}"),
        )
    requests = round(rate_rps * trace.duration_s)  # By `Trace.rate_rps`, requests / duration.
    if not 2 <= requests <= MAX_REQUESTS:
        raise InputError(
            f"rate: {rate_rps:g} requests/s over the {trace.duration_s:.4g} s of {trace.name} are {requests} "
            f"requests, expected 2 to {MAX_REQUESTS}; ask for another rate or window"
        )
    if how == "superpose" and factor > 1:
        return _superpose(trace, requests, note, rng, busiest_s)
    # Only "thin" is left.
    if factor > 1:
        raise InputError(
            f"rate: thin cannot raise {trace.rate_rps:.4g} to {rate_rps:g} requests/s; "
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
    """(m,): the requests of random whole sessions, of about `requests` requests together. The sessions of the
    requests `always` are among them.
    """
    session = session_numbers(trace)
    order = rng.permutation(session.max() + 1)
    forced_sessions = session[list(always)]
    order = np.concatenate((np.unique(forced_sessions), order[~np.isin(order, forced_sessions)]))
    # Requests in the first 0, 1, 2, ... sessions of this order; the nearest to `requests` is taken.
    reached = np.concatenate(([0], np.cumsum(np.bincount(session)[order])))
    forced = len(np.unique(forced_sessions))
    taken = forced + int(np.abs(reached[forced:] - requests).argmin())
    return np.flatnonzero(np.isin(session, order[:taken]))


def _superpose(
    trace: Trace, requests: int, how_note: str, rng: np.random.Generator, busiest_s: float | None
) -> Trace:
    whole, rest = divmod(requests, len(trace))  # The last copy has `rest` requests.
    copies = [_Copy(None, None)]  # The first copy is not shifted.
    for copy in range(1, whole + (rest > 0)):
        if copy < whole:
            row = None
        elif trace.after.size:
            row = _whole_sessions(trace, rest, rng)
        else:
            row = np.sort(rng.choice(len(trace), size=rest, replace=False))
        copies.append(_Copy(row, float(rng.uniform(0.0, trace.duration_s))))
    if busiest_s is None:
        rows = [copy.rows(trace) for copy in copies]
        turned = [copy.turned(trace, row) for copy, row in zip(copies, rows, strict=True)]
        arrival_s, laps = zip(*turned, strict=True)
        superposed = combine_parts(trace, rows, arrival_s, np.concatenate(laps))
        rest = len(superposed) - whole * len(trace)  # Whole sessions may miss the number by half a session.
    else:
        superposed = combine_parts(trace, *_may_be_busiest(trace, copies, busiest_s))
    note = f"{how_note}, {whole} whole copies and {rest} requests of one more, each shifted in a circle"
    if superposed.copies_share_prefixes:
        note += "; copies share their prefixes"
    return replace(superposed, notes=(*trace.notes, note))


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """The requests `some` of a trace (None: all), shifted around its duration by `shift_s` (None: not)."""

    some: IntArray | None
    shift_s: float | None

    def rows(self, trace: Trace) -> IntArray:
        return np.arange(len(trace)) if self.some is None else self.some

    def turned(self, trace: Trace, rows: IntArray) -> tuple[FloatArray, FloatArray]:
        """When the requests `rows` arrive, and 1.0 for those that the shift moved past the end, else 0.0."""
        arrival_s = trace.arrival_s[rows]
        if self.shift_s is None:
            return arrival_s, np.zeros(len(rows))
        start_s = trace.arrival_s[0]
        turned_s = arrival_s - start_s + self.shift_s
        laps = (turned_s >= trace.duration_s).astype(float)
        turned_s -= laps * trace.duration_s
        # Rounding must not leave the trace's span.
        return np.minimum(start_s + turned_s, trace.arrival_s[-1]), laps


def combine_parts(
    trace: Trace, rows: Sequence[IntArray], arrival_s: Sequence[FloatArray], laps: FloatArray | None = None
) -> Trace:
    """Parts of a trace at new arrivals, as one: `rows` of it each, whole sessions, perhaps several times.

    Where requests wait for others they still do within their part; blocks that only one session has are its
    own in each part. `laps` (all requests,) says how often each went around a circle, so that no request
    waits across its seam.
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
    """Give `merged_trace` the waits inside each copy, except across the seam of the circle, and give each
    copy blocks of its own.

    `rows` are the requests of each copy. `laps` says, copy by copy, which of them went around the circle;
    `order` sorts them into `merged_trace`.
    """
    place = np.argsort(order, kind="stable")
    edges, first = [], 0
    for row in rows:
        new_place = np.full(len(trace), -1)
        # -1 for requests that are not in this copy.
        new_place[row] = np.arange(first, first + len(row))
        between = new_place[trace.after]
        between = between[(between >= 0).all(axis=1)]
        edges.append(place[between[laps[between[:, 0]] == laps[between[:, 1]]]])
        first += len(row)
    after = np.concatenate(edges)
    merged_trace = replace(merged_trace, after=after[np.lexsort((after[:, 0], after[:, 1]))])
    copy = np.repeat(np.arange(len(rows)), [len(row) for row in rows])[order]
    if trace.task.size:  # Each copy has tasks of its own.
        merged_trace = replace(merged_trace, task=merged_trace.task + copy * (int(trace.task.max()) + 1))
    return with_own_blocks(merged_trace, trace, copy) if trace.has_prefixes else merged_trace


def with_own_blocks(merged_trace: Trace, trace: Trace, copy: IntArray) -> Trace:
    """Give blocks that only one session has a new id in each copy; blocks of several sessions keep theirs.

    Request i of `merged_trace` belongs to copy number `copy[i]`. Copy 0 keeps all its ids.
    """
    ids, which = np.unique(trace.prefix_ids, return_inverse=True)
    session = np.repeat(session_numbers(trace), np.diff(trace.prefix_offsets))  # Of each block.
    # The lowest and the highest session that use each id.
    low, high = np.full(len(ids), len(trace)), np.full(len(ids), -1)
    np.minimum.at(low, which, session)
    np.maximum.at(high, which, session)
    used = np.searchsorted(ids, merged_trace.prefix_ids)
    # A block that one session alone uses gets an id of its own in each copy, above all ids of the trace.
    own = np.repeat(copy, np.diff(merged_trace.prefix_offsets)) * (low == high)[used]
    beyond = int(ids[-1]) + 1
    return replace(merged_trace, prefix_ids=merged_trace.prefix_ids + own * beyond)


def _may_be_busiest(
    trace: Trace, copies: Sequence[_Copy], length_s: float
) -> tuple[list[IntArray], list[FloatArray]]:
    """Of these copies of a trace, the requests that may be in the busiest window of `length_s`.

    Tokens are counted in bins of time. A window that begins in a bin holds at most the tokens of all bins
    that it touches, and at least those of the bins inside it. A copy moves the trace by whole bins, which
    puts a request at most one bin before its own; two more on either side allow for rounded times.
    """
    whole = min(WINDOW_BINS, int(TRACE_BINS * length_s / trace.duration_s))
    bin_s, since_s = length_s / whole, trace.arrival_s - trace.arrival_s[0]
    count = int(trace.duration_s / bin_s) + 1  # The trace's duration in bins, begun ones included.
    tokens = trace.input_tokens + trace.output_tokens
    bin_tokens = np.zeros(2 * AROUND + count + whole)  # Bin b is bin_tokens[AROUND + b].
    for copy in copies:
        of_copy, some = since_s, tokens
        if copy.some is not None:
            of_copy, some = since_s[copy.some], tokens[copy.some]
        for part, shift_s in _either_side(of_copy, copy.shift_s, trace.duration_s):
            bins = (of_copy[part] / bin_s).astype(np.int64) + (AROUND + math.floor(shift_s / bin_s))
            if len(bins):
                bin_tokens[bins[0] : bins[-1] + 1] += np.bincount(bins - bins[0], some[part])
    before = np.concatenate(([0], np.cumsum(bin_tokens)))
    b = np.arange(count)
    at_most = before[b + 2 * AROUND + whole] - before[b]
    at_least = before[b + whole] - before[b + 2 * AROUND]
    may_begin = np.flatnonzero(at_most >= at_least.max())
    # A request is kept if it lies in a window that begins in one of these bins, rounding allowed for.
    edges_s = _spans(may_begin - AROUND, may_begin + whole + AROUND) * bin_s
    rows, arrival_s = [], []
    for copy in copies:
        own = copy.rows(trace)
        of_copy = since_s[own]
        for part, shift_s in _either_side(of_copy, copy.shift_s, trace.duration_s):
            first, end = (part.start + np.searchsorted(of_copy[part], edges_s - shift_s)).T
            row = np.concatenate([own[i:j] for i, j in zip(first, end, strict=True)])
            rows.append(row)
            arrival_s.append(copy.turned(trace, row)[0])
    return rows, arrival_s


def _either_side(since_s: FloatArray, shift_s: float | None, period_s: float) -> list[tuple[slice, float]]:
    """Requests in order of time on a circle of `period_s`: those that stay before its seam and those that
    pass it, with how many seconds each part moves.
    """
    if shift_s is None:
        return [(slice(0, len(since_s)), 0.0)]
    seam = int(np.searchsorted(since_s + shift_s, period_s))
    return [(slice(0, seam), shift_s), (slice(seam, len(since_s)), shift_s - period_s)]


def _spans(begins: IntArray, ends: IntArray) -> IntArray:
    """(first, end) rows: the union of the intervals from `begins` to `ends`, both in rising order."""
    is_new = np.concatenate(([True], begins[1:] > ends[:-1]))
    return np.column_stack([begins[is_new], ends[np.concatenate((np.flatnonzero(is_new)[1:] - 1, [-1]))]])


def find_busiest_window(trace: Trace, length_s: float) -> int:
    """The request at which the earliest of the windows with the most input and output tokens begins."""
    arrival_s = trace.arrival_s
    tokens = np.zeros(len(trace) + 1, np.int64)
    np.add(trace.input_tokens, trace.output_tokens, out=tokens[1:])
    np.cumsum(tokens, out=tokens)
    most, first = -1, 0
    for block in range(0, len(trace), BLOCK):
        starts_s = arrival_s[block : block + BLOCK]
        ends = np.searchsorted(arrival_s, starts_s + length_s, side="left")
        window_tokens = tokens[ends] - tokens[block : block + len(starts_s)]
        fullest = int(np.argmax(window_tokens))
        if window_tokens[fullest] > most:
            most, first = int(window_tokens[fullest]), block + fullest
    return first


def select_window(trace: Trace, spec: str = "whole") -> Trace:
    """The part of a trace that `spec` names: "whole", "first 10 min" or "busiest 10 min".

    A window holds the arrivals in [start, start + length). The busiest is the earliest of those with the most
    input and output tokens; it starts with a request. Arrivals are counted from the window's start. A window
    longer than the trace is the whole trace.
    """
    match = _window_spec(spec)
    if match is None:
        return trace
    length_s = _length_s(match)
    if length_s > trace.duration_s:
        note = f"window: {spec.strip()} is the whole trace of {trace.duration_s:.4g} s"
        return replace(trace, notes=(*trace.notes, note))
    first = find_busiest_window(trace, length_s) if match[1] == "busiest" else 0
    return _part(trace, spec, first, length_s, of=len(trace))


def _window_spec(spec: str) -> re.Match[str] | None:
    """Which window and its length; None for the whole."""
    if spec.strip() == "whole":
        return None
    match = re.fullmatch(r"\s*(busiest|first)\s+(.+)", spec)
    if match is None:
        raise InputError(f"window: expected 'whole', 'first 10 min' or 'busiest 10 min', found {spec!r}")
    return match


def _length_s(match: re.Match[str]) -> float:
    length_s = quantity(match[2], "s", where="window")
    if length_s <= 0:
        raise InputError(f"window: expected a length > 0, found {match[2]!r}")
    return length_s


def _part(trace: Trace, spec: str, first: int, length_s: float, *, of: int) -> Trace:
    """What arrives within `length_s` from request `first` on. Its note counts the requests as of `of`."""
    arrival_s = trace.arrival_s
    start_s = float(arrival_s[first])
    end = int(np.searchsorted(arrival_s, start_s + length_s, side="left"))
    # A length below the clock's resolution still holds the request it starts with.
    part = trace.select(np.arange(first, max(end, first + 1)))
    measure = " by tokens" if spec.strip().startswith("busiest") else ""
    note = f"window: {spec.strip()}{measure}, from {start_s:.6g} s, {len(part)} of {of} requests"
    # Waits of the part's requests in the whole trace, less those that are left in it.
    if cut := int((trace.after[:, 0] < end).sum() - (trace.after[:, 0] < first).sum()) - len(part.after):
        note += f"; {cut} waits for what came before the window were cut"
    return replace(part, arrival_s=part.arrival_s - start_s, notes=(*trace.notes, note))
