"""Describes a trace: computes from it the `Description` from which requests like its own can be drawn.

The rate becomes a curve of at most INTERVALS intervals. Lengths become histograms, with edges at quantiles of
the lengths, and a joint table of input and output. Bursts become Fano factors, which measure how counts vary
around the curve. The mean lengths of clients differ; by how much is chosen so that the lengths of requests
close in time correlate as in the trace. Sessions and shared prefixes are described by their means. SciPy is
imported within functions: it takes a tenth of a second.
"""

import numpy as np

from planner.domain import ROUNDING
from planner.errors import InputError
from planner.traffic.described import CLIENT_RATE_S, CLIENT_RATE_VAR, Clients, Description, Prefixes, Sessions
from planner.traffic.lengths import LengthHistogram
from planner.traffic.sessions import first_rows, session_numbers, waits_for_others
from planner.traffic.trace import IntArray, Trace
from planner.units import HOUR_S

INTERVALS = 48  # Half an hour each over a day.
# An interval is one of these lengths [s], whole parts of an hour or a day.
INTERVALS_S = (60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0, 21600.0, 43200.0, 86400.0)
# An interval has at least this many requests on average, so that chance changes its rate by only
# 1 / sqrt(50) = 14 %.
INTERVAL_REQUESTS = 50
# Lengths of the windows of the Fano factors: from about a step of an engine to about the start of a worker.
WINDOWS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 1200.0)
# Quantiles of the lengths that are a histogram's first edges, closer together at both ends.
FRACS = np.array((0, 0.01, 0.025, *np.arange(1, 20) / 20, 0.975, 0.99, 0.995, 0.999, 1))
BIN_FRAC = 5e-4  # The expected sum of a bin's drawn lengths is off by at most this share of all tokens.
MOST_BINS = 100  # A histogram has at most this many bins, so that the document stays readable.
PARTS = 8  # The joint table has at most this many rows (input lengths) and columns (output lengths).
PART_REQUESTS = 10  # A cell of the table has at least this many requests on average.
LEAST_REQUESTS = 100  # Bursts of fewer requests cannot be told from chance.
# At most this share of the variance of lengths is between clients: with all of it, a client's requests would
# be equal.
MOST_LENGTHS_FRAC = 0.9
MOST_SKEW = 6.0  # With this exponent of Zipf's law the first client has 98 % of the requests.
MOST_PREFIXES = 100_000  # A description names no more texts than this.


def described_of(trace: Trace) -> Description:
    """Describe a trace; InputError for fewer than LEAST_REQUESTS requests, or if all arrive at once."""
    if len(trace) < LEAST_REQUESTS or not trace.duration_s > 0:
        raise InputError(
            f"{trace.name}: {len(trace)} requests in {trace.duration_s:g} s are too few to describe; "
            f"expected at least {LEAST_REQUESTS}, over time"
        )
    duration_s = _rounded(trace.duration_s, 6)
    if duration_s < trace.duration_s:  # The last request must lie within it, so the last digit is one more.
        duration_s = _rounded(trace.duration_s * (1 + 1e-5), 6)
    curve_rps, every_s = _rate_curve(trace, duration_s)
    session_of = session_numbers(trace) if trace.after.size else None  # (n,) by request.
    # The rate is one of session starts: later requests of a session follow from its first.
    starts = trace if session_of is None else trace.select(first_rows(session_of))
    fano = _fano_factors(starts, every_s, duration_s)
    # In sessions a prompt shares the conversation before it. Other shared texts are not described then.
    prefixes = _describe_prefixes(trace) if trace.has_prefixes and session_of is None else None
    if session_of is None:
        sessions, added_tokens = None, trace.input_tokens
    else:
        sessions, added_tokens = _describe_sessions(trace, session_of)
    return Description(
        rate_rps=curve_rps,
        duration_s=duration_s,
        input=_length_histogram(added_tokens),
        output=_length_histogram(trace.output_tokens),
        every_s=every_s,
        joint_table=_joint_table(added_tokens, trace.output_tokens),
        drift=(
            _length_drift(trace, added_tokens, every_s, curve_rps),
            _length_drift(trace, trace.output_tokens, every_s, curve_rps),
        ),
        gap_cv=1.0,  # Gaps are Poisson: the Fano factors alone describe bursts.
        fano=fano,
        clients=_describe_clients(trace, added_tokens, every_s),
        sessions=sessions,
        prefixes=prefixes,
        tenants=max(len(trace.tenants), 1),
        name=trace.name,
    )


def _rounded(value: float, digits: int) -> float:
    """The value with this many significant digits, as it is written."""
    return float(f"{value:.{digits}g}")


def _interval_of(trace: Trace, length_s: float) -> IntArray:
    """The interval (n,) of this length in which each request arrives; 0 begins with the first arrival."""
    interval: IntArray = ((trace.arrival_s - trace.arrival_s[0]) / length_s).astype(np.int64)
    return interval


def _rate_curve(trace: Trace, duration_s: float) -> tuple[tuple[float, ...], float]:
    """The rate of each interval [requests/s], and the length of an interval [s].

    The rate of the last interval is taken over the time until the trace ends. A trace shorter than two
    intervals has one rate; the length of an interval (an hour) then has no effect.
    """
    least_s = max(duration_s / INTERVALS, INTERVAL_REQUESTS / trace.rate_rps)
    every_s = next((length_s for length_s in INTERVALS_S if length_s >= least_s), duration_s)
    since_s = trace.arrival_s - trace.arrival_s[0]
    if every_s * 2 > duration_s:
        return (_rounded(len(trace) / duration_s, 6),), HOUR_S
    edges_s = np.append(np.arange(0.0, duration_s, every_s), duration_s)
    # A last interval that is too short for a rate is joined to the one before.
    if edges_s[-1] - edges_s[-2] < every_s / 4:
        edges_s = np.delete(edges_s, -2)
    rates_rps = np.histogram(since_s, edges_s)[0] / np.diff(edges_s)
    count = int(np.ceil(duration_s / every_s - ROUNDING))  # A rounding error must not add an interval.
    # An interval that was joined gets the rate of both.
    rates_rps = np.append(rates_rps, rates_rps[-1:].repeat(count - len(rates_rps)))
    return tuple(_rounded(rate, 5) for rate in rates_rps), every_s


def _fano_factors(trace: Trace, every_s: float, duration_s: float) -> tuple[tuple[float, float], ...]:
    """Rows (window length [s], Fano factor): variance / mean of the counts of windows, at least 1.

    The variance is around the rate of each window's interval. A Poisson process has 1.
    """
    rate_rps = len(trace) / duration_s
    longest_s = min(every_s, duration_s) / 3  # A variance needs at least three windows in an interval.
    fano_factors = []
    for window_s in WINDOWS_S:
        # With less than half a request per window on average, hardly any window has two: no sign of bursts.
        if window_s * rate_rps < 0.5 or window_s > longest_s:
            continue
        # Only whole windows and whole intervals are used. A rounding error must not take a window away.
        windows_per_interval = int(min(every_s, duration_s) / window_s + ROUNDING)
        intervals = int(duration_s / window_s + ROUNDING) // windows_per_interval
        windows = intervals * windows_per_interval
        counts = np.bincount(_interval_of(trace, window_s), minlength=windows)[:windows]
        by_interval = counts.reshape(-1, windows_per_interval)
        variance = by_interval.var(axis=1).mean()
        fano_factors.append((window_s, max(_rounded(variance / counts.mean(), 4), 1.0)))
    return tuple(fano_factors)


def _length_histogram(tokens: IntArray) -> LengthHistogram:
    """A histogram of lengths, with edges at quantiles.

    Lengths are drawn evenly within a bin, so the drawn requests of a bin do not add up to its tokens. The bin
    with the largest error is cut at its mean length, until no error is above BIN_FRAC of all tokens.
    """
    ordered = np.sort(tokens)
    tokens_before = np.concatenate(([0], np.cumsum(ordered)))
    edges = np.unique(np.quantile(tokens, FRACS, method="higher"))
    edges = np.concatenate(([edges[0] - 1], edges))  # A bin is (edge, next edge].
    while True:
        ends = np.searchsorted(ordered, edges, side="right")
        counts, sums = np.diff(ends), np.diff(tokens_before[ends])
        mean_drawn = (edges[1:] + edges[:-1] + 1) / 2
        has_several_lengths = np.diff(edges) > 1  # A bin of one length has no error.
        error_tokens = np.abs(sums - counts * mean_drawn) * has_several_lengths
        worst = int(np.argmax(error_tokens))
        if error_tokens[worst] < BIN_FRAC * tokens_before[-1] or len(counts) >= MOST_BINS:
            return LengthHistogram(tuple(map(float, edges)), tuple(map(float, counts)))
        cut = int(np.clip(sums[worst] // counts[worst], edges[worst] + 1, edges[worst + 1] - 1))
        edges = np.insert(edges, worst + 1, cut)


def _joint_table(inputs: IntArray, outputs: IntArray) -> tuple[tuple[float, ...], ...]:
    """Requests by quantiles of input length (rows) and output length (columns); () for few requests."""
    size = min(PARTS, int(np.sqrt(len(inputs) / PART_REQUESTS)))
    if size < 2:
        return ()
    rng = np.random.default_rng(0)
    row, column = (_random_ranks(tokens, rng) * size // len(tokens) for tokens in (inputs, outputs))
    table = np.bincount(row * size + column, minlength=size**2).reshape(size, size)
    return tuple(tuple(map(float, counts)) for counts in table.tolist())


def _random_ranks(tokens: IntArray, rng: np.random.Generator) -> IntArray:
    """The rank (n,) of each request by length, from 0; equal lengths in random order."""
    return np.argsort(np.lexsort((rng.uniform(size=len(tokens)), tokens)))


def _length_drift(
    trace: Trace, tokens: IntArray, every_s: float, curve_rps: tuple[float, ...]
) -> tuple[float, ...]:
    """How lengths change over time: the mean normal score of the ranks by length, per interval of the rate
    curve.

    0 stands for an interval whose requests are as long as those of the whole trace. Empty if the curve has
    one interval.
    """
    from scipy.special import ndtri

    if len(curve_rps) < 2:
        return ()
    scores = ndtri((_random_ranks(tokens, np.random.default_rng(0)) + 0.5) / len(tokens))
    interval = _interval_of(trace, every_s)
    # Arrivals after the last interval, by rounding, are cut off.
    counts = np.bincount(interval, minlength=len(curve_rps))[: len(curve_rps)]
    sums = np.bincount(interval, weights=scores, minlength=len(curve_rps))[: len(curve_rps)]
    return tuple(_rounded(score, 3) for score in sums / np.maximum(counts, 1))


def _describe_clients(trace: Trace, added_tokens: IntArray, every_s: float) -> Clients:
    """The number of clients, the skew of their rates, and the share of the variance of lengths between them.

    If all clients sent evenly, two requests in a window would be of one client with probability
    `same_client`. In described.py a client's rate is a product of independent factors with mean 1, one for
    each time scale of CLIENT_RATE_S, whose mean square is 1 + CLIENT_RATE_VAR. These factors add
    `same_client * rate_excess` to the probability. The lengths of two requests of one client correlate by the
    share of the variance that is sought. So that share is the correlation in a window of the trace, divided
    by `same_client * rate_excess`.
    """
    usual = Clients()  # A trace that names no tenants has this number of clients, and this skew.
    count, skew = usual.count, usual.skew
    if len(trace.tenants) > 1:
        requests = np.sort(np.bincount(trace.tenant, minlength=len(trace.tenants)))[::-1]
        count = len(requests)
        skew = _find_skew(float(((requests / requests.sum()) ** 2).sum()), count)
    same_client = np.square(Clients(count, skew).rate_shares()).sum()
    rate_excess = (1 + CLIENT_RATE_VAR) ** len(CLIENT_RATE_S) - 1
    lengths = added_tokens, trace.output_tokens
    # Within the shortest time scale of the rates of clients, requests meet about the same rates.
    correlation = np.mean([_rank_correlation(trace, each, CLIENT_RATE_S[0], every_s) for each in lengths])
    frac = float(np.clip(correlation / (same_client * rate_excess), 0.0, MOST_LENGTHS_FRAC))
    return Clients(count, skew, usual.gap_cv, _rounded(frac, 3))


def _find_skew(square_sum: float, count: int) -> float:
    """The Zipf exponent with which the squared shares of `count` clients add up to `square_sum`."""
    too_even, too_skewed = 0.0, MOST_SKEW
    for _ in range(40):  # The interval becomes 6 / 2^40, far below the three digits that are written.
        middle = (too_even + too_skewed) / 2
        if np.square(Clients(count, middle).rate_shares()).sum() < square_sum:
            too_even = middle
        else:
            too_skewed = middle
    return _rounded((too_even + too_skewed) / 2, 3)


def _rank_correlation(trace: Trace, tokens: IntArray, window_s: float, every_s: float) -> float:
    """The correlation of the length ranks of two requests in one window of `window_s`; at least 0.

    The mean rank of each interval of `every_s` is subtracted first, as the drift describes it.
    """
    rank = np.argsort(np.argsort(tokens, kind="stable"), kind="stable") / len(tokens) - 0.5
    interval = _interval_of(trace, every_s)
    rank -= (np.bincount(interval, weights=rank) / np.maximum(np.bincount(interval), 1))[interval]
    window = _interval_of(trace, window_s)
    counts = np.bincount(window)
    sums = np.bincount(window, weights=rank)
    pairs = float((counts * (counts - 1.0)).sum())  # Ordered pairs of requests in one window.
    if not pairs:
        return 0.0
    products = float((sums**2).sum() - (rank**2).sum())  # The sum of the product of ranks over these pairs.
    return max(products / pairs / float((rank**2).mean()), 0.0)  # A negative correlation is taken for chance.


def _describe_sessions(trace: Trace, session_of: IntArray) -> tuple[Sessions, IntArray]:
    """The means of the trace's sessions, and the tokens that each request adds to its conversation."""
    waits = waits_for_others(trace)
    conversation_tokens = trace.input_tokens + trace.output_tokens
    # The tokens (n,) of the longest conversation that a request waits for.
    before_tokens = np.zeros(len(trace), np.int64)
    children, parents = trace.after.T
    np.maximum.at(before_tokens, children, conversation_tokens[parents])
    # A prompt that is not longer than the conversation before it was cut; it counts as adding one token.
    added_tokens = np.maximum(trace.input_tokens - before_tokens, 1)
    turns = len(trace) / (int(session_of.max()) + 1)
    think_s = float(trace.think_s[waits].mean())
    longest_tokens = int(conversation_tokens.max())
    return Sessions(_rounded(turns, 4), _rounded(think_s, 4), longest_tokens), added_tokens


def _describe_prefixes(trace: Trace) -> Prefixes | None:
    """The shared texts with which prompts begin: their number, mean length, and the skew of their use.

    Prompts with the same first block begin with the same text. The length is the mean number of tokens that a
    prompt repeats from earlier ones, over the prompts that share their first block and repeat any. None if no
    two prompts share their first block.
    """
    offsets, ids = trace.prefix_offsets, trace.prefix_ids
    has_blocks = np.diff(offsets) > 0
    # The text of each request that has blocks, and the number of requests of each text.
    first_ids = ids[offsets[:-1][has_blocks]]
    _, text_of, requests_by_text = np.unique(first_ids, return_inverse=True, return_counts=True)
    if requests_by_text.max(initial=0) < 2:
        return None
    # For each use of a block: its request, and the request that used the block first.
    request_of = np.repeat(np.arange(len(trace)), np.diff(offsets))
    _, first_use, block_of = np.unique(ids, return_index=True, return_inverse=True)
    is_repeated = request_of[first_use][block_of] != request_of
    repeated = np.bincount(request_of, weights=is_repeated, minlength=len(trace))[has_blocks]
    repeated = repeated[(requests_by_text[text_of] > 1) & (repeated > 0)]
    if not repeated.size:
        return None
    count = len(requests_by_text)  # A prompt that shares no block has a text of its own.
    shares = requests_by_text / requests_by_text.sum()
    skew = _find_skew(float((shares**2).sum()), count)
    tokens = int(repeated.mean() * trace.prefix_block_tokens)
    return Prefixes(max(tokens, 1), min(count, MOST_PREFIXES), skew)
