"""Splitwise's piecewise linear interpolation (Patel et al. 2024, arXiv:2311.18677, section V-B).

    t_prompt(n) = linear between the medians of measured prompt times over the prompt tokens n of a batch
    t_token(b)  = linear between the medians of measured token times over the sequences b of a batch    [s]

Below the first median and beyond the last one the nearest slope goes on.
"""

import numpy as np

from planner.models.families.step_family import TwoPhases, prefill_tokens
from planner.models.latency import DECODES, Array

# Extrapolation may fall below zero, so step times are clipped to this.
_QUICKEST_STEP_S = 1e-6


class SplitwiseInterpolation(TwoPhases):
    """The paper's form; `prompt_` and `token_` are (knots, seconds)."""

    def __init__(self, *, beyond: str = "raise") -> None:
        self.beyond = beyond

    def _fit_prefill(self, X: Array, y: Array) -> None:
        self.prompt_ = medians_by_key(prefill_tokens(X), y)

    def _fit_decode(self, X: Array, y: Array) -> None:
        self.token_ = medians_by_key(X[:, DECODES], y)

    def _predict_prefill(self, X: Array) -> Array:
        return interpolate_times(prefill_tokens(X), *self.prompt_)

    def _predict_decode(self, X: Array) -> Array:
        return interpolate_times(X[:, DECODES], *self.token_)


def medians_by_key(keys: Array, y: Array) -> tuple[Array, Array]:
    """The distinct keys in order, and the median of the y that have each of them."""
    knots, knot_of = np.unique(keys, return_inverse=True)
    return knots, np.array([np.median(y[knot_of == k]) for k in range(len(knots))])


def interpolate_times(keys: Array, knots: Array, seconds: Array) -> Array:
    """Linear interpolation, with the outermost slopes beyond the knots, at least a microsecond."""
    if len(knots) == 1:
        return np.full(len(keys), seconds[0])
    k = np.clip(np.searchsorted(knots, keys) - 1, 0, len(knots) - 2)
    slope = (seconds[k + 1] - seconds[k]) / (knots[k + 1] - knots[k])
    return np.maximum(seconds[k] + slope * (keys - knots[k]), _QUICKEST_STEP_S)
