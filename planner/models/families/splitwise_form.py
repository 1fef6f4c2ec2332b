"""Splitwise's piecewise linear interpolation (Patel et al. 2024, arXiv:2311.18677, section V-B).

    t_prompt(n) = linear between the medians of measured prompt times over the prompt tokens n of a batch
    t_token(b)  = linear between the medians of measured token times over the sequences b of a batch    [s]

Below the first median and beyond the last one the nearest slope goes on.

The released simulator (splitwise-sim) reads its token table in another way: the table is built over the
PROMPT tokens of a batch (128 ... 32768) and looked up with the NUMBER OF SEQUENCES (1 ... 64), so a decode
costs the same whatever the batch (repository issue 2). Its results can only be replayed with that mistake, as
`SplitwiseSimLookup` does. There a step with both phases takes 1.1 t_prompt(prompt tokens + decodes).
"""

from __future__ import annotations

import numpy as np

from planner.errors import InputError
from planner.models.families.step_family import StepFamily, TwoPhases, prefill_tokens
from planner.models.latency import Array

# In splitwise-sim a batch with both phases takes this many times a prompt of as many tokens.
MIXED_FACTOR = 1.1
# Extrapolation may fall below zero, so step times are clipped to this.
_QUICKEST_STEP_S = 1e-6


class SplitwiseInterpolation(TwoPhases):
    """The paper's form; `prompt_` and `token_` are (knots, seconds)."""

    def __init__(self, *, beyond: str = "raise") -> None:
        self.beyond = beyond

    def _fit_prefill(self, X: Array, y: Array) -> None:
        self.prompt_ = medians_by_key(prefill_tokens(X), y)

    def _fit_decode(self, X: Array, y: Array) -> None:
        self.token_ = medians_by_key(X[:, 2], y)

    def _predict_prefill(self, X: Array) -> Array:
        return interpolate_times(prefill_tokens(X), *self.prompt_)

    def _predict_decode(self, X: Array) -> Array:
        return interpolate_times(X[:, 2], *self.token_)


class SplitwiseSimLookup(StepFamily):
    """splitwise-sim's `performance_model=db`, with its mistake. `prompt_` and `token_` are (knots, seconds).

    The token table is over prompt tokens, which X does not have for decodes: `fit` takes K, the tokens of
    context that decodes read, in their place. `from_knots` takes the released table (batch_tokens, seconds)
    as it is.
    """

    def __init__(self, *, beyond: str = "raise") -> None:
        self.beyond = beyond

    @classmethod
    def from_knots(cls, batch_tokens: Array, prompt_s: Array, token_s: Array) -> SplitwiseSimLookup:
        """The table as the simulator groups it: median seconds per batch_tokens, increasing."""
        if len(batch_tokens) < 2 or not (np.diff(batch_tokens) > 0).all():
            raise InputError("splitwise-sim knots: batch_tokens must be two or more, increasing")
        model = cls(beyond="extrapolate")
        model.prompt_ = (np.asarray(batch_tokens, float), np.asarray(prompt_s, float))
        model.token_ = (np.asarray(batch_tokens, float), np.asarray(token_s, float))
        model.x_max_, model.n_features_in_, model.latency_ = np.full(5, np.inf), 5, None
        return model

    def _fit(self, X: Array, y: Array) -> None:
        prefill, decode = X[:, 2] == 0, X[:, 4] == 0
        if not prefill.any() or not decode.any():
            raise InputError("splitwise-sim lookup: the table needs prefills and decodes, each alone")
        self.prompt_ = medians_by_key(prefill_tokens(X)[prefill], y[prefill])
        self.token_ = medians_by_key(X[decode, 3], y[decode])

    def _predict(self, X: Array) -> Array:
        tokens, decodes, prefills = X[:, 0], X[:, 2], X[:, 4]
        prompt_s, token_s = interpolate_times(tokens, *self.prompt_), interpolate_times(decodes, *self.token_)
        return np.where(prefills == 0, token_s, np.where(decodes == 0, prompt_s, MIXED_FACTOR * prompt_s))


def medians_by_key(keys: Array, y: Array) -> tuple[Array, Array]:
    """The distinct keys, and the median of y at each."""
    knots, knot_of = np.unique(keys, return_inverse=True)
    return knots, np.array([np.median(y[knot_of == k]) for k in range(len(knots))])


def interpolate_times(keys: Array, knots: Array, seconds: Array) -> Array:
    """Linear interpolation, with the outermost slopes beyond the knots, at least a microsecond."""
    if len(knots) == 1:
        return np.full(len(keys), seconds[0])
    k = np.clip(np.searchsorted(knots, keys) - 1, 0, len(knots) - 2)
    slope = (seconds[k + 1] - seconds[k]) / (knots[k + 1] - knots[k])
    return np.maximum(seconds[k] + slope * (keys - knots[k]), _QUICKEST_STEP_S)
