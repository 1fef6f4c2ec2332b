"""Aladdin's linear forms (Nie et al. 2024, arXiv:2405.06856, section 3 and 4.1).

    kv     = h (l_in + l_out) + j                                 (eq. 1)  [tokens or bytes of one request]
    t_pre  = k1 sum l_in + c1                                     (eq. 2)  [s]
    t_dec  = (k2 l_ave + c2) b + c3 = k2 K + c2 D + c3, b > 1     (eq. 3)  [s]
    l_d   <= (T_dec - c3 - c2 b) / k2                             (eq. 4)  [context tokens of the batch]
    t_comp = k4 / N_g + c4                                        (eq. 5)  [s, on N_g GPUs]

All coefficients >= 0, as the paper demands of eq. 3 and 4.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from planner.errors import ExtrapolationError, InfeasibleError, InputError
from planner.models.families.step_family import TwoPhases, fit_nonnegative, ones_column, prefill_tokens
from planner.models.latency import Array


class AladdinSteps(TwoPhases):
    """Eq. 2 for prefills, eq. 3 for decodes [s]; `k1_s_, c1_s_` and `k2_s_, c2_s_, c3_s_` after `fit`.

    The paper has eq. 3 for batches above one and calls a batch of one nearly constant. Here a batch of one is
    fitted with the rest, because its context adds no more than eq. 3 says.
    """

    def __init__(self, *, beyond: str = "raise") -> None:
        self.beyond = beyond

    def most_context_tokens(self, batch: int, tbt_s: float) -> float:
        """Eq. 4: the context that `batch` decodes may hold together so that a step takes at most `tbt_s`."""
        check_is_fitted(self)
        left_s = tbt_s - self.c3_s_ - self.c2_s_ * batch
        if left_s < 0:
            raise InfeasibleError(
                f"a step of {batch} decodes takes {tbt_s - left_s:.4g} s without any context, must be "
                f"<= {tbt_s:g}; allow more time or a smaller batch",
                kind="latency",
                constraint="tbt",
                relaxation=f"tbt {tbt_s - left_s:.4g} s",
            )
        return float(np.inf) if self.k2_s_ == 0 else float(left_s / self.k2_s_)

    def _fit_prefill(self, X: Array, y: Array) -> None:
        self.c1_s_, self.k1_s_ = fit_nonnegative(np.column_stack([ones_column(X), prefill_tokens(X)]), y)

    def _fit_decode(self, X: Array, y: Array) -> None:
        self.c3_s_, self.c2_s_, self.k2_s_ = fit_nonnegative(
            np.column_stack([ones_column(X), X[:, 2], X[:, 3]]), y
        )

    def _predict_prefill(self, X: Array) -> Array:
        return np.asarray(self.c1_s_ + self.k1_s_ * prefill_tokens(X))

    def _predict_decode(self, X: Array) -> Array:
        return np.asarray(self.c3_s_ + self.c2_s_ * X[:, 2] + self.k2_s_ * X[:, 3])


class AladdinKv(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Eq. 1.   X (n, 2): input and output tokens of a request so far.   y (n,): its KV cache, in any unit."""

    def __init__(self, *, beyond: str = "raise") -> None:
        self.beyond = beyond

    def fit(self, X: Array, y: Array) -> Self:
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        self.j_, self.h_ = fit_nonnegative(np.column_stack([ones_column(X), X.sum(axis=1)]), y)
        self.tokens_max_ = X.sum(axis=1).max()
        return self

    def predict(self, X: Array) -> Array:
        check_is_fitted(self)
        tokens = validate_data(self, X, reset=False, dtype=np.float64).sum(axis=1)
        if self.beyond == "raise" and (tokens > self.tokens_max_).any():
            raise ExtrapolationError(
                f"KV cache of {tokens.max():g} tokens asked for, measured up to {self.tokens_max_:g}; "
                "measure further, or fit with beyond='extrapolate'"
            )
        return np.asarray(self.j_ + self.h_ * tokens)


class AladdinGpus(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Eq. 5.   X (n, 1): GPUs of a worker, N_g.   y (n,): compute time of one step [s]."""

    def __init__(self, *, beyond: str = "raise") -> None:
        self.beyond = beyond

    def fit(self, X: Array, y: Array) -> Self:
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        if not (X > 0).all():
            raise InputError(f"GPUs of a worker: {X.min():g}, must be > 0")
        self.c4_s_, self.k4_s_ = fit_nonnegative(np.column_stack([ones_column(X), 1 / X[:, 0]]), y)
        self.gpus_min_, self.gpus_max_ = X.min(), X.max()
        return self

    def predict(self, X: Array) -> Array:
        check_is_fitted(self)
        gpus = validate_data(self, X, reset=False, dtype=np.float64)[:, 0]
        outside = (gpus < self.gpus_min_) | (gpus > self.gpus_max_)
        if self.beyond == "raise" and outside.any():
            raise ExtrapolationError(
                f"asked for {gpus[outside][0]:g} GPUs per worker, measured {self.gpus_min_:g} to "
                f"{self.gpus_max_:g}; measure further, or fit with beyond='extrapolate'"
            )
        return np.asarray(self.c4_s_ + self.k4_s_ / gpus)
