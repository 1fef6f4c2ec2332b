"""A description of a trace: what `described.draw` needs to draw requests like it.

The rate becomes a curve of at most INTERVALS intervals, lengths become histograms over their own quantiles,
input and output a table of how they go together. Fano factors are those of counts around that curve, and as
much of the variance of lengths is between clients as makes lengths of one window as alike as in the trace.
Sessions and shared prefixes are described by their means.
"""

from __future__ import annotations

import numpy as np

from planner.errors import InputError
from planner.traffic.described import CLIENT_RATE_S, CLIENT_RATE_VAR, Clients, Description, Prefixes, Sessions
from planner.traffic.lengths import LengthHistogram
from planner.traffic.sessions import session_numbers, waits_for_others
from planner.traffic.trace import IntArray, Trace

INTERVALS = 48  # Half an hour each over a day.
# Lengths that an interval may have: whole parts of an hour or a day.
INTERVALS_S = (60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0, 21600.0, 43200.0, 86400.0)
INTERVAL_REQUESTS = 50  # On average at least: the rate of fewer is off by more than 1 / sqrt(50) = 14 %.
# Windows over which counts are compared, from one step of an engine to the time that it takes to start a
# worker.
WINDOWS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 1200.0)
# Quantiles between which a histogram has its first bins, closer together at both ends.
FRACS = np.array((0, 0.01, 0.025, *np.arange(1, 20) / 20, 0.975, 0.99, 0.995, 0.999, 1))
BIN_FRAC = 5e-4  # A bin may be wrong by this share of all tokens of the trace.
MOST_BINS = 100  # A histogram has no more bins, however wrong they are.
PARTS = 8  # The joint table has as many rows for input lengths, and as many columns for output lengths.
PART_REQUESTS = 10  # A cell of the joint table has as many requests on average, or there are fewer cells.
LEAST_REQUESTS = 100  # Of fewer requests nothing can be said about bursts.
MOST_LENGTHS_FRAC = 0.9  # Else all requests of a client would be alike.
MOST_SKEW = 6.0  # With that exponent of Zipf's law the first of all clients has 98 % of the requests.
MOST_PREFIXES = 100_000  # A description names no more texts than this.


def described_of(trace: Trace) -> Description:
    """Raises InputError for a trace of fewer than LEAST_REQUESTS requests, or of one instant."""
    if len(trace) < LEAST_REQUESTS or not trace.duration_s > 0:
        raise InputError(
            f"{trace.name}: {len(trace)} requests in {trace.duration_s:g} s are too few to describe; "
            f"expected at least {LEAST_REQUESTS}, over time"
        )
    # Longer by a millionth, so that the last request lies inside after rounding to six digits.
    duration_s = float(f"{trace.duration_s * (1 + 1e-6):.6g}")
    curve_rps, every_s = _curve(trace, duration_s)
    session = session_numbers(trace) if trace.after.size else None
    starts = trace if session is None else trace.select(np.unique(session, return_index=True)[1])
    fano = _fano(starts, every_s, duration_s)
    prefixes = _shared_texts(trace) if trace.has_prefixes and session is None else None
    if session is None:
        turns, added = None, trace.input_tokens
    else:
        turns, added = _turns(trace, session)
    return Description(
        rate_rps=curve_rps,
        duration_s=duration_s,
        input=_histogram(added),
        output=_histogram(trace.output_tokens),
        every_s=every_s,
        joint_table=_table(added, trace.output_tokens),
        drift=(
            _drift(trace, added, every_s, curve_rps),
            _drift(trace, trace.output_tokens, every_s, curve_rps),
        ),
        gap_cv=1.0,  # Bursts are in the Fano factors; the gaps between them add none.
        fano=fano,
        clients=_clients(trace, added, every_s),
        sessions=turns,
        prefixes=prefixes,
        tenants=max(len(trace.tenants), 1),
        name=trace.name,
    )


def _curve(trace: Trace, duration_s: float) -> tuple[tuple[float, ...], float]:
    """Requests/s of each interval, and how long an interval is.

    The last interval may lie in the trace in part: its rate is that of the part. A trace of less than two
    intervals has one rate for all of it; the length of the interval then says nothing.
    """
    least_s = max(duration_s / INTERVALS, INTERVAL_REQUESTS / trace.rate_rps)
    every_s = next((each for each in INTERVALS_S if each >= least_s), duration_s)
    since_s = trace.arrival_s - trace.arrival_s[0]
    if every_s * 2 > duration_s:
        return (float(f"{len(trace) / duration_s:.6g}"),), 3600.0
    edges_s = np.append(np.arange(0.0, duration_s, every_s), duration_s)
    if edges_s[-1] - edges_s[-2] < every_s / 4:  # The last interval is too short for a rate.
        edges_s = np.delete(edges_s, -2)
    rates = np.histogram(since_s, edges_s)[0] / np.diff(edges_s)
    count = int(np.ceil(duration_s / every_s - 1e-9))
    rates = np.append(rates, rates[-1:].repeat(count - len(rates)))
    return tuple(float(f"{rate:.5g}") for rate in rates), every_s


def _fano(trace: Trace, every_s: float, duration_s: float) -> tuple[tuple[float, float], ...]:
    """Fano factor of each window length: the variance of counts around the rate of their interval, over their
    mean.

    It is at least 1, which is that of a Poisson process.
    """
    since_s = trace.arrival_s - trace.arrival_s[0]
    rate_rps = len(trace) / duration_s
    longest_s = min(every_s, duration_s) / 3
    fano_factors = []
    for window_s in WINDOWS_S:
        # Windows of less than half a request hardly ever have two; of fewer than three there is no variance.
        if window_s * rate_rps < 0.5 or window_s > longest_s:
            continue
        within = max(round(min(every_s, duration_s) / window_s), 1)  # windows of an interval
        windows = int(duration_s / window_s) // within * within
        counts = np.bincount((since_s / window_s).astype(np.int64), minlength=windows)[:windows]
        by_interval = counts.reshape(-1, within)
        variance = (by_interval.var(axis=1)).mean()
        fano_factors.append((window_s, max(float(f"{variance / counts.mean():.4g}"), 1.0)))
    return tuple(fano_factors)


def _histogram(tokens: IntArray) -> LengthHistogram:
    """A histogram with edges at quantiles.

    Lengths are drawn evenly within a bin, so the bin with the worst total of tokens is cut at its mean length
    until no bin is wrong by more than BIN_FRAC of all tokens.
    """
    ordered = np.sort(tokens)
    before = np.concatenate(([0], np.cumsum(ordered)))
    edges = np.unique(np.quantile(tokens, FRACS, method="higher"))
    edges = np.concatenate(([edges[0] - 1], edges))
    while True:
        at = np.searchsorted(ordered, edges, side="right")
        counts, sums = np.diff(at), np.diff(before[at])
        wrong = np.abs(sums - counts * (edges[1:] + edges[:-1] + 1) / 2) * (np.diff(edges) > 1)
        worst = int(np.argmax(wrong))
        if wrong[worst] < BIN_FRAC * before[-1] or len(counts) >= MOST_BINS:
            return LengthHistogram(tuple(map(float, edges)), tuple(map(float, counts)))
        cut = int(np.clip(sums[worst] // counts[worst], edges[worst] + 1, edges[worst + 1] - 1))
        edges = np.insert(edges, worst + 1, cut)


def _table(inputs: IntArray, outputs: IntArray) -> tuple[tuple[float, ...], ...]:
    """Requests by parts of equal size of input lengths (rows) and output lengths; empty where there are too
    few.
    """
    parts = min(PARTS, int(np.sqrt(len(inputs) / PART_REQUESTS)))
    if parts < 2:
        return ()
    rng = np.random.default_rng(0)  # The seed orders equal lengths.
    part = [
        np.argsort(np.lexsort((rng.uniform(size=len(each)), each))) * parts // len(each)
        for each in (inputs, outputs)
    ]
    table = np.bincount(part[0] * parts + part[1], minlength=parts**2).reshape(parts, parts)
    return tuple(tuple(map(float, row)) for row in table.tolist())


def _drift(trace: Trace, tokens: IntArray, every_s: float, curve_rps: tuple[float, ...]) -> tuple[float, ...]:
    """How long the requests of each interval are: the mean of the normal scores of their lengths' ranks.

    It is empty where the traffic has one rate for all of it.
    """
    from scipy.special import ndtri

    if len(curve_rps) < 2:
        return ()
    rng = np.random.default_rng(0)
    rank = np.argsort(np.lexsort((rng.uniform(size=len(tokens)), tokens)))
    scores = ndtri((rank + 0.5) / len(tokens))
    interval = ((trace.arrival_s - trace.arrival_s[0]) / every_s).astype(np.int64)
    counts = np.bincount(interval, minlength=len(curve_rps))[: len(curve_rps)]
    sums = np.bincount(interval, weights=scores, minlength=len(curve_rps))[: len(curve_rps)]
    return tuple(float(f"{each:.3g}") for each in sums / np.maximum(counts, 1))


def _clients(trace: Trace, added: IntArray, every_s: float) -> Clients:
    """How many clients there are, how unequal, and how much of the variance of lengths is between them.

    Two requests of one window are of the same client with a probability of `together` where all clients send
    evenly, and `moves` times that excess where their rates vary as `described.draw` lets them. The share of
    the variance is what makes the drawn correlation of lengths in a window that of the trace, `alike`.
    """
    usual = Clients()
    count, skew = usual.count, usual.skew
    if len(trace.tenants) > 1:
        requests = np.sort(np.bincount(trace.tenant, minlength=len(trace.tenants)))[::-1]
        count = len(requests)
        skew = _skew(float(((requests / requests.sum()) ** 2).sum()), count)
    together = np.square(Clients(count, skew).rate_shares()).sum()
    moves = (1 + CLIENT_RATE_VAR) ** len(CLIENT_RATE_S) - 1
    alike = np.mean(
        [_rank_correlation(trace, each, CLIENT_RATE_S[0], every_s) for each in (added, trace.output_tokens)]
    )
    frac = float(np.clip(alike / (together * moves), 0.0, MOST_LENGTHS_FRAC))
    return Clients(count, skew, usual.gap_cv, float(f"{frac:.3g}"))


def _skew(together: float, count: int) -> float:
    """The exponent at which the shares of so many clients have squares of this sum, by bisection."""
    low, high = 0.0, MOST_SKEW
    for _ in range(40):  # Until the interval is 6 / 2^40, far below the three digits that are written.
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if np.square(Clients(count, middle).rate_shares()).sum() < together
            else (low, middle)
        )
    return float(f"{(low + high) / 2:.3g}")


def _rank_correlation(trace: Trace, tokens: IntArray, window_s: float, every_s: float) -> float:
    """Correlation of the ranks of the lengths of two requests in one window, around the mean of their
    interval.
    """
    rank = np.argsort(np.argsort(tokens, kind="stable"), kind="stable") / len(tokens) - 0.5
    interval = ((trace.arrival_s - trace.arrival_s[0]) / every_s).astype(np.int64)
    rank -= (np.bincount(interval, weights=rank) / np.maximum(np.bincount(interval), 1))[interval]
    window = ((trace.arrival_s - trace.arrival_s[0]) / window_s).astype(np.int64)
    counts = np.bincount(window)
    sums = np.bincount(window, weights=rank)
    pairs = float((counts * (counts - 1.0)).sum())
    if not pairs:
        return 0.0
    products = float((sums**2).sum() - (rank**2).sum())
    return max(products / pairs / float((rank**2).mean()), 0.0)


def _turns(trace: Trace, session: IntArray) -> tuple[Sessions, IntArray]:
    """The means of the trace's sessions, and the tokens that each request adds to its conversation."""
    waits = waits_for_others(trace)
    conversation_tokens = trace.input_tokens + trace.output_tokens
    before = np.zeros(len(trace), np.int64)
    np.maximum.at(before, trace.after[:, 0], conversation_tokens[trace.after[:, 1]])
    added = np.maximum(np.where(before < trace.input_tokens, trace.input_tokens - before, 1), 1)
    turns = len(trace) / (int(session.max()) + 1)
    think_s = float(trace.think_s[waits].mean())
    most = int(conversation_tokens.max())
    return Sessions(float(f"{turns:.4g}"), float(f"{think_s:.4g}"), most), added


def _shared_texts(trace: Trace) -> Prefixes | None:
    """Prefixes of a trace with block ids: as many texts as there are first blocks, and how skewed their use
    is.

    Their length is that of the blocks that a prompt has from earlier prompts, on average over prompts that
    share their first block and have any. None where no first block comes twice.
    """
    offsets, ids = trace.prefix_offsets, trace.prefix_ids
    has_blocks = np.diff(offsets) > 0
    first = ids[offsets[:-1][has_blocks]]
    _, which, requests = np.unique(first, return_inverse=True, return_counts=True)
    shared = requests[requests > 1]
    if not shared.size:
        return None
    owner = np.repeat(np.arange(len(trace)), np.diff(offsets))
    _, first_at, of = np.unique(ids, return_index=True, return_inverse=True)
    is_old = owner[first_at][of] != owner  # Another prompt had the block first.
    old = np.bincount(owner, weights=is_old, minlength=len(trace))[has_blocks]
    again = old[(requests[which] > 1) & (old > 0)]
    if not again.size:
        return None
    count = len(requests)  # A prompt that shares nothing has its own text.
    shares = requests / requests.sum()
    skew = _skew(float((shares**2).sum()), count)
    tokens = int(again.mean() * trace.prefix_block_tokens)
    return Prefixes(max(tokens, 1), min(count, MOST_PREFIXES), skew)
