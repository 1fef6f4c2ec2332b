"""Distributions of the lengths of requests: by a mean, by percentiles, or by a histogram.

Each class has three members. `mean_tokens` is the mean length. `of_scores` returns the lengths at standard
normal scores: at a score of 0 the median, at 1.645 the 95th percentile. Thus correlated lengths, such as
those of a prompt and its answer, are drawn from correlated scores. `scaled` returns the distribution with
lengths multiplied by a factor. SciPy is imported within functions: it takes a tenth of a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from planner.errors import InputError
from planner.traffic.trace import MAX_TOKENS, FloatArray, IntArray

# Means are sums over these standard normal scores, weighted by the density. Scores beyond 6 have a
# probability of 2e-9 and are left out.
_SCORES = np.linspace(-6.0, 6.0, 4001)
_WEIGHTS = np.exp(-(_SCORES**2) / 2)
_WEIGHTS /= _WEIGHTS.sum()
# The steepest slope of a tail, in units of the logarithm of tokens per standard deviation. Set by hand: a
# length one standard deviation beyond the last percentile is then 55 times as long.
STEEPEST = 4.0
# To reach a given mean, lengths between two percentiles are bent: the position of a length between them, a
# share in [0, 1], is raised to a power. Powers up to MOST_BEND make lengths shorter, those down to its
# inverse longer. Set by hand: beyond it all lengths between two percentiles are almost one of them.
MOST_BEND = 60.0


def _tokens(lengths: FloatArray) -> IntArray:
    """Lengths rounded to whole tokens, from one to MAX_TOKENS, the most of a request in a trace."""
    # np.clip takes several times as long on the few lengths of a task.
    tokens: IntArray = np.minimum(np.maximum(np.rint(lengths), 1), MAX_TOKENS).astype(np.int64)
    return tokens


def _mean_over_scores(tokens: FloatArray) -> float:
    """The mean of a distribution whose lengths at _SCORES are `tokens`."""
    return float(tokens @ _WEIGHTS)


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same length for every request."""

    tokens: int

    @property
    def mean_tokens(self) -> float:
        return float(self.tokens)

    def of_scores(self, scores: FloatArray) -> IntArray:
        """The lengths (n,) whose percentiles are those of these standard normal scores (n,)."""
        return np.full(len(scores), self.tokens, np.int64)

    def scaled(self, factor: float) -> Fixed:
        """The same distribution with all lengths times `factor`."""
        return Fixed(max(round(self.tokens * factor), 1))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal distribution, by its mean [tokens] and its coefficient of variation."""

    mean_tokens: float
    cv: float

    def of_scores(self, scores: FloatArray) -> IntArray:
        """The lengths (n,) whose percentiles are those of these standard normal scores (n,)."""
        log_variance = math.log1p(self.cv**2)
        return _tokens(
            np.exp(math.log(self.mean_tokens) - log_variance / 2 + math.sqrt(log_variance) * scores)
        )

    def scaled(self, factor: float) -> Lognormal:
        """The same distribution with all lengths times `factor`."""
        return replace(self, mean_tokens=self.mean_tokens * factor)


@dataclass(frozen=True, slots=True)
class LengthHistogram:
    """`counts[i]` requests are longer than `edges_tokens[i]` and at most `edges_tokens[i + 1]`, evenly."""

    edges_tokens: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def mean_tokens(self) -> float:
        edges, counts = np.array(self.edges_tokens), np.array(self.counts)
        # Lengths are rounded up, so the mean of a bin is half a token above its middle.
        return float((edges[1:] + edges[:-1] + 1) @ counts / (2 * counts.sum()))

    def of_scores(self, scores: FloatArray) -> IntArray:
        """The lengths (n,) whose percentiles are those of these standard normal scores (n,)."""
        from scipy.special import ndtr

        below = np.concatenate(([0.0], np.cumsum(self.counts)))
        lengths = np.interp(ndtr(scores), below / below[-1], self.edges_tokens)
        return _tokens(np.ceil(lengths))

    def scaled(self, factor: float) -> LengthHistogram:
        """The same distribution with all lengths times `factor`."""
        return replace(self, edges_tokens=tuple(edge * factor for edge in self.edges_tokens))


@dataclass(frozen=True, slots=True)
class Percentiles:
    """`tokens[i]` is the `fracs[i]` quantile; between two the logarithm of the length is linear in the score.

    Below the first percentile the slope of the first two goes on. Above the last percentile the slope of the
    last two goes on, or, if a mean is given, the slope is the one with which lengths have this mean. If no
    slope gives the mean, lengths between percentiles are bent (MOST_BEND). No request is longer than
    `most_tokens`. A mean or `most_tokens` of 0 is not given.
    """

    fracs: tuple[float, ...]
    tokens: tuple[float, ...]
    given_mean_tokens: float = 0.0
    most_tokens: float = 0.0

    @property
    def mean_tokens(self) -> float:
        return _mean_over_scores(_curve(self)(_SCORES))

    def check(self) -> None:
        """Raise InputError for a mean that no lengths with these percentiles have. No curve is fitted."""
        normal = NormalDist().inv_cdf  # Every command checks catalogs, and scipy loads slowly.
        scores, logs = np.array([normal(frac) for frac in self.fracs]), np.log(self.tokens)
        if len(scores) == 1:  # One percentile and a mean make a lognormal.
            _sigma(float(scores[0]), float(logs[0]), self.given_mean_tokens)
        elif self.given_mean_tokens:
            _check_mean(self, _mean_of(self, scores, logs))

    def of_scores(self, scores: FloatArray) -> IntArray:
        """The lengths (n,) whose percentiles are those of these standard normal scores (n,)."""
        return _tokens(_curve(self)(scores))

    def scaled(self, factor: float) -> Percentiles:
        """The same distribution with all lengths times `factor`."""
        return Percentiles(
            self.fracs,
            tuple(tokens * factor for tokens in self.tokens),
            self.given_mean_tokens * factor,
            self.most_tokens * factor,
        )


Lengths = Fixed | Lognormal | LengthHistogram | Percentiles


@lru_cache(maxsize=64)
def _curve(percentiles: Percentiles) -> Callable[[FloatArray], FloatArray]:
    """The function from scores to tokens. Raises InputError for a mean that these percentiles exclude."""
    from scipy.special import ndtri

    scores, logs = ndtri(np.array(percentiles.fracs)), np.log(percentiles.tokens)
    mean = percentiles.given_mean_tokens
    if len(scores) == 1:
        sigma = _sigma(float(scores[0]), float(logs[0]), mean)
        return _curve_through(scores, logs, sigma, sigma, 1.0, percentiles.most_tokens)
    slopes = np.diff(logs) / np.diff(scores)
    mean_of = _mean_of(percentiles, scores, logs)
    tail_slope, bend = float(slopes[-1]), 1.0
    # The slope of the tail gives most means. Smaller means have a flat tail and lengths bent to be shorter;
    # larger ones have the steepest tail and lengths bent to be longer.
    if mean:
        _check_mean(percentiles, mean_of)
        if mean < mean_of(0.0, 1.0):
            tail_slope, bend = 0.0, _solve_rising(lambda bend: -mean_of(0.0, bend), -mean, 1.0, MOST_BEND)
        elif mean <= mean_of(STEEPEST, 1.0):
            tail_slope = _solve_rising(lambda slope: mean_of(slope, 1.0), mean, 0.0, STEEPEST)
        else:
            tail_slope = STEEPEST
            bend = 1 / _solve_rising(lambda inverse: mean_of(STEEPEST, 1 / inverse), mean, 1.0, MOST_BEND)
    return _curve_through(scores, logs, float(slopes[0]), tail_slope, bend, percentiles.most_tokens)


def _mean_of(
    percentiles: Percentiles, scores: FloatArray, logs: FloatArray
) -> Callable[[float, float], float]:
    """The function from a slope above the last percentile, and a bend, to the mean [tokens]."""
    first_slope = float((logs[1] - logs[0]) / (scores[1] - scores[0]))

    def mean_of(tail_slope: float, bend: float) -> float:
        return _mean_over_scores(
            _curve_through(scores, logs, first_slope, tail_slope, bend, percentiles.most_tokens)(_SCORES)
        )

    return mean_of


def _check_mean(percentiles: Percentiles, mean_of: Callable[[float, float], float]) -> None:
    """Raise InputError for a mean that no slope and bend give."""
    least, most = mean_of(0.0, MOST_BEND), mean_of(STEEPEST, 1 / MOST_BEND)
    if not least <= percentiles.given_mean_tokens <= most:
        raise InputError(
            f"mean: {percentiles.given_mean_tokens:g} tokens cannot be with these percentiles"
            f"{' and this max' if percentiles.most_tokens else ''}, which allow {math.ceil(least)} to "
            f"{most:.0f}"
        )


def _curve_through(
    scores: FloatArray,
    logs: FloatArray,
    first_slope: float,
    last_slope: float,
    bend: float,
    most_tokens: float,
) -> Callable[[FloatArray], FloatArray]:
    """Tokens by score: through the percentiles at `scores`, whose logarithms of tokens are `logs`, bent
    between them. `first_slope` and `last_slope` are the slopes below the first and above the last percentile.
    """

    most_log = math.log(most_tokens or MAX_TOKENS)

    # Without np.clip, as in `_tokens`.
    def tokens(at_scores: FloatArray) -> FloatArray:
        if len(scores) == 1 and first_slope == last_slope and bend == 1.0:  # A lognormal has one slope.
            log_tokens = logs[0] + first_slope * (at_scores - scores[0])
            return np.asarray(np.exp(np.minimum(np.maximum(log_tokens, 0.0), most_log)))
        log_tokens = logs[0]
        if len(scores) > 1:
            segment = np.searchsorted(scores, at_scores, side="right") - 1
            segment = np.minimum(np.maximum(segment, 0), len(scores) - 2)
            segment_frac = (at_scores - scores[segment]) / (scores[segment + 1] - scores[segment])
            segment_frac = np.minimum(np.maximum(segment_frac, 0.0), 1.0)
            log_tokens = logs[segment] + (logs[segment + 1] - logs[segment]) * segment_frac**bend
        # The first slope is bent like the lengths beside it.
        log_tokens = (
            log_tokens
            + first_slope * bend * np.minimum(at_scores - scores[0], 0.0)
            + last_slope * np.maximum(at_scores - scores[-1], 0)
        )
        # From one token to the most.
        return np.asarray(np.exp(np.minimum(np.maximum(log_tokens, 0.0), most_log)))

    return tokens


def _sigma(score: float, log: float, mean: float) -> float:
    """The sigma of the lognormal with this mean and one percentile q, by its score: the smaller root of
    ln mean - ln q = sigma^2 / 2 - score * sigma that is a possible slope.
    """
    radicand = score**2 + 2 * (math.log(mean) - log)
    roots = [score - math.sqrt(radicand), score + math.sqrt(radicand)] if radicand >= 0 else []
    if not (possible := [root for root in roots if 0 <= root <= STEEPEST]):
        least = math.exp(log - max(score, 0.0) ** 2 / 2)
        most = math.exp(log + STEEPEST**2 / 2 - score * STEEPEST)
        raise InputError(
            f"mean: {mean:g} tokens cannot be with this percentile alone, which allows "
            f"{math.ceil(round(least, 3))} to {max(most, math.exp(log)):.0f}; give more percentiles"
        )
    return min(possible)


def _solve_rising(value: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """The point between `low` and `high` at which the rising function `value` is `wanted`, by bisection."""
    for _ in range(50):  # The interval is then below the precision of a float.
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < wanted else (low, middle)
    return (low + high) / 2
