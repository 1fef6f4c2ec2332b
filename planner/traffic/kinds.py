"""Whether the lengths of requests change during a trace, by the Kolmogorov-Smirnov distance of its quarters.

    D = max_x |F_1(x) - F_2(x)|        F_i(x)  share of the requests of part i that are no longer than x

With thousands of requests almost any D is significant, so its size must also reach OTHER_FRAC to count. The
largest D between quarters of a trace is 0.08 for Azure's hour of code and Mooncake's hour, 0.22 for
RAGPulse's fortnight, 0.30 for Azure's chat, 0.37 for a day of ServeGen and 0.44 for Mooncake's synthetic
trace.
"""

import itertools
import math

import numpy as np
import numpy.typing as npt

from planner.traffic.trace import Trace

Ints = npt.NDArray[np.int64]
OTHER_FRAC = 0.1  # From this D on, two parts count as different traffic.
BY_CHANCE = 0.01  # The significance level: how often parts of one distribution may count as different.
QUARTERS = 4  # A trace is cut into this many parts of equal time.
QUARTER_REQUESTS = 20_000  # At most this many requests of each part are compared, to save time.


def quarters_apart(trace: Trace) -> tuple[float, float]:
    """The largest D between two quarters, of prompt lengths and of output lengths.

    0 if no D is both large and significant.
    """
    since_s = trace.arrival_s - trace.arrival_s[0]
    duration_s = since_s[-1] or 1.0  # If all requests arrive at once, the duration is 0.
    # The minimum puts the last request into the last quarter.
    quarter = np.minimum(QUARTERS * since_s / duration_s, QUARTERS - 1).astype(int)

    def largest_distance(tokens: Ints) -> float:
        parts = [np.sort(_sample_evenly(tokens[quarter == k])) for k in range(QUARTERS)]
        parts = [part for part in parts if len(part)]  # A quarter may be empty.
        pairs = list(itertools.combinations(parts, 2))
        comparisons = 2 * len(pairs)  # Each pair is compared by prompts and by outputs.
        largest = 0.0
        for a, b in pairs:
            distance = distance_frac(a, b)
            if distance >= OTHER_FRAC and distance > by_chance_frac(a, b, comparisons):
                largest = max(largest, distance)
        return largest

    return largest_distance(trace.input_tokens), largest_distance(trace.output_tokens)


def distance_frac(a: Ints, b: Ints) -> float:
    """D of two sorted samples, as the module's docstring defines it."""
    values = np.concatenate((a, b))
    shares = [np.searchsorted(each, values, side="right") / len(each) for each in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def by_chance_frac(a: Ints, b: Ints, comparisons: int) -> float:
    """The D that some of `comparisons` between samples of one distribution exceed with the probability
    BY_CHANCE, by Bonferroni's inequality and the asymptotic formula for large samples.
    """
    return math.sqrt(-math.log(BY_CHANCE / comparisons / 2) / 2 * (len(a) + len(b)) / (len(a) * len(b)))


def _sample_evenly(tokens: Ints) -> Ints:
    """Every k-th length, with the least k for which at most QUARTER_REQUESTS remain."""
    k = max(math.ceil(len(tokens) / QUARTER_REQUESTS), 1)  # An empty quarter would give k = 0.
    return tokens[::k]
