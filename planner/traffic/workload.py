"""Describes a trace in numbers: a summary, classes of requests by length, and counts of pairs of lengths. The
classes are not those of an SLO.

`plan trace` shows the summary. The master problem (solvers/master.py) plans for the classes, and lower bounds
sum over the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from planner.errors import TraceError
from planner.traffic.sessions import session_numbers, waits_for_others
from planner.traffic.trace import FloatArray, IntArray, Trace

PEAK_WINDOWS_S = (1, 10, 60, 600)  # The summary has the highest rate over windows of these lengths.
DISPERSION_WINDOWS_S = (1, 10, 60)  # The summary has the variance of counts in windows of these lengths.
INPUT_PARTS, OUTPUT_PARTS = 12, 6  # Classes of requests, by prompt length and by output length.
PROMPT_PARTS = 3  # With caches, classes by uncached length are cut into this many by prompt length.


@dataclass(frozen=True, slots=True)
class Distribution:
    """How lengths [tokens], counts or times [s] are distributed; percentiles are interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def from_values(cls, values: IntArray | FloatArray) -> Distribution:
        """Mean, percentiles and largest of these values."""
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(float(values.mean()), p50, p90, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """How much of the prompts need not be computed with an ideal cache, of infinite size and filled as
    requests arrive.

    A block is a hit where it and all blocks before it in its prompt were in earlier requests.

    `block_hit_frac`    hits / all blocks (Mooncake's cache hit ratio).
    `token_hit_frac`    tokens of the hits / all input tokens.
    `request_hit_frac`  mean over requests of tokens of the hits / its input tokens.
    `shared_token_frac` tokens of blocks that another request has too, before or after / all input tokens
                        (Preble).
    """

    block_tokens: int
    blocks: int
    distinct_blocks: int
    block_hit_frac: float
    token_hit_frac: float
    request_hit_frac: float
    shared_token_frac: float


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """The sessions of a trace in which requests wait for others; requests joined by waits are one session.

    `waiting` is how many requests wait, `think_s` the pause of each after the request that it waits for.
    `sessions` counts the sessions of more than one request, and `turns` are the requests of each of these.
    """

    sessions: int
    waiting: int
    turns: Distribution
    think_s: Distribution


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A trace in numbers. A number that needs more requests or a longer trace is None.

    `rate_rps` is requests / duration. `peak_rps` maps a window length [s] to the most requests in any window
    of that length, per second. `gap_cv` is the coefficient of variation of the gaps between arrivals, 1 for a
    Poisson process; `dispersion` maps a window length [s] to the variance / mean of the counts in adjacent
    whole windows, also 1 for a Poisson process and more for bursts. If requests wait for others, all of these
    are of nominal arrivals, as if answers took no time.
    """

    name: str
    requests: int
    duration_s: float
    rate_rps: float | None
    peak_rps: Mapping[int, float | None]
    gap_cv: float | None
    dispersion: Mapping[int, float | None]
    input_tokens: Distribution
    output_tokens: Distribution
    tenants: int
    prefixes: PrefixSharing | None
    sessions: SessionSummary | None
    dropped: Mapping[str, int]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; window lengths become keys such as "10 s"."""
        plain = asdict(self)
        for name in ("peak_rps", "dispersion"):
            plain[name] = {f"{window_s} s": value for window_s, value in plain[name].items()}
        return plain | {"notes": list(self.notes)}


def summarise_trace(trace: Trace) -> TraceSummary:
    """Summarise a trace of any length, one request included."""
    gaps_s = np.diff(trace.arrival_s)
    is_spread = trace.duration_s > 0
    return TraceSummary(
        name=trace.name,
        requests=len(trace),
        duration_s=trace.duration_s,
        rate_rps=trace.rate_rps if is_spread else None,
        peak_rps={window_s: peak_rps(trace.arrival_s, window_s) for window_s in PEAK_WINDOWS_S},
        gap_cv=float(gaps_s.std() / gaps_s.mean()) if is_spread else None,
        dispersion={every_s: count_dispersion(trace.arrival_s, every_s) for every_s in DISPERSION_WINDOWS_S},
        input_tokens=Distribution.from_values(trace.input_tokens),
        output_tokens=Distribution.from_values(trace.output_tokens),
        tenants=len(trace.tenants),
        prefixes=prefix_sharing(trace) if trace.has_prefixes else None,
        sessions=session_summary(trace) if trace.after.size else None,
        dropped=dict(trace.dropped),
        notes=trace.notes,
    )


def peak_rps(arrival_s: FloatArray, window_s: float) -> float | None:
    """The most arrivals in any [t, t + window_s), per second; None if the trace is shorter."""
    if arrival_s[-1] - arrival_s[0] < window_s:
        return None
    ends = np.searchsorted(arrival_s, arrival_s + window_s, side="left")
    return float((ends - np.arange(len(arrival_s))).max() / window_s)


def count_dispersion(arrival_s: FloatArray, window_s: float) -> float | None:
    """Variance / mean of the counts of arrivals in adjacent whole windows from the first arrival on. None if
    the trace has fewer than two windows.
    """
    windows = math.floor((arrival_s[-1] - arrival_s[0]) / window_s)
    if windows < 2:
        return None
    window_of = np.floor((arrival_s - arrival_s[0]) / window_s)
    # Empty windows add nothing to the sums; leaving them out saves the memory of a long quiet trace.
    counts = np.unique(window_of[window_of < windows], return_counts=True)[1]
    mean = counts.sum() / windows
    return float(((counts**2).sum() / windows - mean**2) / mean)


def session_summary(trace: Trace) -> SessionSummary:
    """The summary of a trace in which some request waits for another."""
    waits, turns = waits_for_others(trace), np.bincount(session_numbers(trace))
    turns = turns[turns > 1]
    think_s = Distribution.from_values(trace.think_s[waits])
    return SessionSummary(len(turns), int(waits.sum()), Distribution.from_values(turns), think_s)


def prefix_sharing(trace: Trace) -> PrefixSharing:
    """How much of the prompts an ideal cache would save, by blocks, tokens and requests. The trace must have
    prefixes.
    """
    offsets, ids, block = trace.prefix_offsets, trace.prefix_ids, trace.prefix_block_tokens
    blocks = np.diff(offsets)
    owner = np.repeat(np.arange(len(trace)), blocks)  # The request of every id.
    _, first_at, distinct = np.unique(ids, return_index=True, return_inverse=True)
    first_owner = owner[first_at][distinct]  # For every id the first request that has it.

    # The hits of a prompt end at its first block that no earlier request had. `misses` has all such blocks,
    # and a further one at the end, so that every prompt has a next miss.
    misses = np.append(np.flatnonzero(first_owner == owner), len(ids))
    hit_blocks = np.minimum(misses[np.searchsorted(misses, offsets[:-1])], offsets[1:]) - offsets[:-1]
    hit_tokens = np.minimum(hit_blocks * block, trace.input_tokens)

    # A block is shared if its first or its last owner is another request.
    last_at = len(ids) - 1 - np.unique(ids[::-1], return_index=True)[1]
    is_shared = (first_owner != owner) | (owner[last_at][distinct] != owner)
    index_in_prompt = np.arange(len(ids)) - offsets[:-1][owner]
    # A prompt may end within its last block.
    tokens = np.clip(trace.input_tokens[owner] - index_in_prompt * block, 0, block)
    all_tokens = trace.input_tokens.sum()
    return PrefixSharing(
        block_tokens=block,
        blocks=len(ids),
        distinct_blocks=len(first_at),
        block_hit_frac=float(hit_blocks.sum() / len(ids)),
        token_hit_frac=float(hit_tokens.sum() / all_tokens),
        request_hit_frac=float((hit_tokens / trace.input_tokens).mean()),
        shared_token_frac=float(tokens[is_shared].sum() / all_tokens),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A trace as K classes of requests of similar lengths. Arrays (K,) are sorted by input, then output
    length.

    The least input and the least output of a class may be those of different requests. No request of the
    class is less work than one of (min_input_tokens, min_output_tokens), which lower bounds count instead.
    With prefix caches at least `min_uncached_tokens` of a prompt must be computed, and at least
    `min_own_tokens` are in no other prompt; without caches both are the whole prompt.
    """

    requests: IntArray
    min_input_tokens: IntArray
    min_output_tokens: IntArray
    min_uncached_tokens: IntArray
    min_own_tokens: IntArray

    def __len__(self) -> int:
        return len(self.requests)


def to_classes(
    trace: Trace, *, cached_tokens: IntArray | None = None, shared_tokens: IntArray | None = None
) -> Workload:
    """Cut the trace into INPUT_PARTS by quantiles of input length, each into OUTPUT_PARTS by output length.

    Every request is in one class and no class is empty; equal lengths stay together, so there may be fewer
    classes than parts. `cached_tokens` (n,) of each prompt may hit in a cache, and `shared_tokens` (n,) may
    lie in memory once for several prompts. With caches the first cut is by uncached length, the second by
    prompt length into PROMPT_PARTS, the third by output length into half of OUTPUT_PARTS.
    """
    if not trace.duration_s > 0:
        raise TraceError(
            f"{trace.name}: all requests arrive at once, so a class has no rate; use a longer trace"
        )
    uncached = trace.input_tokens if cached_tokens is None else trace.input_tokens - cached_tokens
    own_tokens = trace.input_tokens if shared_tokens is None else trace.input_tokens - shared_tokens
    # `code` numbers the class of each request. Each further cut multiplies it by the number of parts, and
    # adds the number of the part.
    code = _quantile_bucket(uncached, INPUT_PARTS)
    further_cuts = [(trace.output_tokens, OUTPUT_PARTS)]
    if cached_tokens is not None:
        further_cuts = [(trace.input_tokens, PROMPT_PARTS), (trace.output_tokens, -(-OUTPUT_PARTS // 2))]
    for lengths, parts in further_cuts:
        code *= parts
        for bucket in np.unique(code):
            rows = np.flatnonzero(code == bucket)
            code[rows] += _quantile_bucket(lengths[rows], parts)
    class_of = np.unique(code, return_inverse=True)[1].astype(np.int64)  # Codes have gaps, classes have none.

    order = np.argsort(class_of, kind="stable")
    requests = np.bincount(class_of)
    starts = np.cumsum(requests) - requests
    input_tokens, output_tokens = trace.input_tokens[order], trace.output_tokens[order]
    return Workload(
        requests=requests,
        min_input_tokens=np.minimum.reduceat(input_tokens, starts),
        min_output_tokens=np.minimum.reduceat(output_tokens, starts),
        min_uncached_tokens=np.minimum.reduceat(uncached[order], starts),
        min_own_tokens=np.minimum.reduceat(own_tokens[order], starts),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TraceLengths:
    """The U distinct pairs of lengths in a trace, (U,), and how many requests have each.

    Traces repeat lengths, above all scaled traces, so sums over pairs are much cheaper than over requests.
    With prefix caches (`is_cached`, search/problem/prefix_hits.py) `cached_tokens` of a prompt hit the cache,
    and `shared_tokens` are in other prompts too.
    """

    input_tokens: FloatArray
    output_tokens: FloatArray
    requests: IntArray
    cached_tokens: FloatArray | float = 0.0
    shared_tokens: FloatArray | float = 0.0
    is_cached: bool = False


def distinct_lengths(trace: Trace) -> TraceLengths:
    """Count the requests of every pair (input, output)."""
    pairs, requests = np.unique(_pair_codes(trace.input_tokens, trace.output_tokens), return_counts=True)
    inputs, outputs = (pairs >> 32).astype(float), (pairs & (2**32 - 1)).astype(float)
    return TraceLengths(inputs, outputs, requests.astype(np.int64))


def pair_numbers(lengths: TraceLengths, trace: Trace) -> IntArray:
    """(n,): the number, among the pairs of `distinct_lengths(trace)`, of the pair of each request."""
    codes = _pair_codes(lengths.input_tokens.astype(np.int64), lengths.output_tokens.astype(np.int64))
    return np.searchsorted(codes, _pair_codes(trace.input_tokens, trace.output_tokens))


def _pair_codes(input_tokens: IntArray, output_tokens: IntArray) -> IntArray:
    """Each pair as one number of 64 bits, the input in the upper 32. MAX_TOKENS is below 2^32."""
    return (input_tokens << 32) + output_tokens


MOST_PAIRS = 20_000  # Lower bounds sum over at most this many pairs of prompt and output length.
LEAST_RATIO = 1.02  # Lengths are rounded to powers of this or, if many pairs remain, of a larger ratio.


@lru_cache(maxsize=16)  # A search needs the same pairs for every worker type.
def coarser_lengths(lengths: TraceLengths) -> TraceLengths:
    """The same requests as at most MOST_PAIRS pairs of lengths, rounded to powers of LEAST_RATIO or more.

    Prompts and outputs are rounded down, cached and shared tokens up, so that a pair is no more work than the
    requests it stands for and lower bounds stay valid.
    """
    return coarsen_pairs(lengths, MOST_PAIRS, LEAST_RATIO)[0]


def coarsen_pairs(lengths: TraceLengths, most: int, ratio: float) -> tuple[TraceLengths, IntArray]:
    """The same requests as at most `most` pairs, rounded as in `coarser_lengths` to powers of `ratio`, and
    then of larger ratios while more than `most` pairs remain. Also returns the index (U,) of each pair's
    coarse pair.
    """
    coarse_of = np.arange(len(lengths.requests))
    while len(lengths.requests) > most:
        inputs = _on_grid(lengths.input_tokens, ratio, np.floor)
        columns = [inputs, _on_grid(lengths.output_tokens, ratio, np.floor)]
        if lengths.is_cached:
            # A scalar is the value of all pairs; adding zeros makes an array of it.
            columns += [
                np.minimum(_on_grid(np.zeros(len(inputs)) + tokens, ratio, np.ceil), inputs)
                for tokens in (lengths.cached_tokens, lengths.shared_tokens)
            ]
        group = np.zeros(len(inputs), np.int64)
        for column in columns:
            # The group by the columns so far and the value in this column are packed into one number.
            group = np.unique((group << 32) + column.astype(np.int64), return_inverse=True)[1]
        requests = np.bincount(group, weights=lengths.requests).astype(np.int64)
        first = np.zeros(len(requests), np.int64)
        first[group] = np.arange(len(group))  # Any member represents its group: all are equal when rounded.
        cached, shared = (each[first] for each in columns[2:]) if lengths.is_cached else (0.0, 0.0)
        lengths = TraceLengths(
            columns[0][first], columns[1][first], requests, cached, shared, is_cached=lengths.is_cached
        )
        # Steps of twice the size leave at most about half of the pairs.
        coarse_of, ratio = group[coarse_of], 1 + 2 * (ratio - 1)
    return lengths, coarse_of


def _on_grid(tokens: FloatArray, ratio: float, rounding: np.ufunc) -> FloatArray:
    """Tokens rounded to powers of `ratio`, by np.floor or np.ceil. Small counts, near which these powers are
    less than 1 token apart, are unchanged.
    """
    # This slack keeps an exact power of the ratio where it is, in spite of the logarithm's rounding error.
    slack = 1e-9 if rounding is np.floor else -1e-9
    power = rounding(np.log(np.maximum(tokens, 1)) / np.log(ratio) + slack)
    on_grid = rounding(ratio**power)
    return np.where(tokens * (ratio - 1) < 1, tokens, on_grid)


def _quantile_bucket(tokens: IntArray, buckets: int) -> IntArray:
    """The bucket of each length, 0 to buckets - 1: bucket b ends below the (b + 1) / buckets quantile."""
    cuts = np.quantile(tokens, np.arange(1, buckets) / buckets, method="higher")
    return np.searchsorted(cuts, tokens, side="right").astype(np.int64)
