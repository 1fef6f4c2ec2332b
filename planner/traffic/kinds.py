"""Whether parts of a trace are alike, by the Kolmogorov-Smirnov distance D of their lengths.

    D = max_x |F_1(x) - F_2(x)|        F_i  share of the requests of a part that are no longer than x

D is the largest share of requests by which two distributions differ. With thousands of requests any D is
significant, so its size decides (OTHER_FRAC). The largest D between quarters of a trace is 0.08 for Azure's
hour of code and Mooncake's hour, 0.22 for RAGPulse's fortnight, 0.30 for Azure's chat, 0.37 for a day of
ServeGen and 0.44 for Mooncake's synthetic trace.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt

from planner.traffic.trace import Trace

Ints = npt.NDArray[np.int64]
OTHER_FRAC = 0.1  # From this D on, two parts count as different traffic.
BY_CHANCE = 0.01  # The significance level: a D that two alike samples exceed more rarely counts.
# How many parts of equal time, and the most requests that are sampled of each.
QUARTERS, QUARTER_REQUESTS = 4, 20_000


def quarters_apart(trace: Trace) -> tuple[float, float]:
    """The largest D between two quarters of a trace's time, of prompts and of outputs; 0 if alike."""
    since_s = trace.arrival_s - trace.arrival_s[0]
    # `or 1.0`: all requests may arrive at once; the last one belongs to the last quarter.
    quarter = np.minimum(QUARTERS * since_s / (since_s[-1] or 1.0), QUARTERS - 1).astype(int)

    def largest_distance(tokens: Ints) -> float:
        parts = [np.sort(_sample_evenly(tokens[quarter == k])) for k in range(QUARTERS)]
        # A quarter may be empty.
        pairs = [pair for pair in itertools.combinations(parts, 2) if all(map(len, pair))]
        # Two comparisons a pair: prompts and outputs.
        apart = [d for a, b in pairs if (d := distance_frac(a, b)) > by_chance_frac(a, b, 2 * len(pairs))]
        return max((d for d in apart if d >= OTHER_FRAC), default=0.0)

    return largest_distance(trace.input_tokens), largest_distance(trace.output_tokens)


def distance_frac(a: Ints, b: Ints) -> float:
    """D of two sorted samples, as the module's docstring defines it."""
    values = np.concatenate((a, b))
    shares = [np.searchsorted(each, values, side="right") / len(each) for each in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def by_chance_frac(a: Ints, b: Ints, comparisons: int) -> float:
    """The D that samples of one distribution exceed with probability BY_CHANCE in any of `comparisons`. This
    is the asymptotic formula, for large samples.
    """
    return math.sqrt(-math.log(BY_CHANCE / comparisons / 2) / 2 * (len(a) + len(b)) / (len(a) * len(b)))


def _sample_evenly(tokens: Ints) -> Ints:
    """Every k-th length, so that at most QUARTER_REQUESTS are left; `or 1` is for an empty quarter."""
    return tokens[:: -(-len(tokens) // QUARTER_REQUESTS) or 1]
