"""What all families of step times do alike: check X and y, remember the profiled range, and refuse to predict
beyond it. The columns of X are N, A_p, D, K, P of planner/models/latency.py.

A family predicts seconds. `latency_` is a StepLatency, the form of planner/models/latency.py, where the
family has that form exactly, else None: then `planner.models.family_choice` refits it to the family's
predictions and states the error of the refit.
"""

from typing import Self

import numpy as np
from scipy.optimize import nnls
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import validate_data

from planner.errors import ExtrapolationError, InputError
from planner.models.latency import DECODES, PAIRS, PREFILLS, TOKENS, Array, StepLatency
from planner.models.step_fit import check_profiled


class StepFamily(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Step time t(N, A_p, D, K, P) [s]; a subclass defines it in `_fit` and `_predict`.

    X (n, 5), y (n,): step time [s], > 0. `beyond` is "raise" or "extrapolate", for steps outside the profiled
    range.
    """

    beyond: str
    latency_: StepLatency | None

    def fit(self, X: Array, y: Array) -> Self:
        """Fit to steps X (n, 5) and their seconds y (n,); `_fit` is the family's own part."""
        X, y = self._checked(X, y)
        self.latency_ = None
        self._fit(X, y)
        return self

    def predict(self, X: Array) -> Array:
        """Seconds (n,) of steps X (n, 5); raises ExtrapolationError beyond what was profiled."""
        return self._predict(check_profiled(self, X))

    def _checked(self, X: Array, y: Array) -> tuple[Array, Array]:
        """X and y as arrays, once their shapes and ranges are checked."""
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        if X.shape[1] != 5:
            raise InputError(f"step table: X has {X.shape[1]} columns, must be the 5 of N, A_p, D, K, P")
        if not (y > 0).all():
            raise InputError(f"step table: t_s is {y.min():g}, must be > 0")
        self.x_max_ = X.max(axis=0)
        return X, y

    def _fit(self, X: Array, y: Array) -> None:
        """Learn the family's numbers from checked X and y."""
        raise NotImplementedError

    def _predict(self, X: Array) -> Array:
        """Seconds (n,) of checked steps X."""
        raise NotImplementedError


class TwoPhases(StepFamily):
    """A family whose paper runs prefills and decodes apart: one form for steps of prefills, one for steps of
    decodes.

    A step with both is predicted as one after the other, t = t_prefill + t_decode: the papers do not say how
    the two overlap, and the sum is on the safe side. Steps with both are not fitted. A phase that the table
    lacks cannot be predicted.
    """

    def _fit(self, X: Array, y: Array) -> None:
        """Fit prefills and decodes apart, each to the steps that have nothing else."""
        prefill, decode = X[:, DECODES] == 0, X[:, PREFILLS] == 0
        self.phases_ = frozenset(
            name for name, rows in (("prefill", prefill), ("decode", decode)) if rows.any()
        )
        if not self.phases_:
            raise InputError(
                f"{type(self).__name__}: the table has mixed steps only; needs prefills or decodes"
            )
        if prefill.any():
            self._fit_prefill(X[prefill], y[prefill])
        if decode.any():
            self._fit_decode(X[decode], y[decode])

    def _predict(self, X: Array) -> Array:
        """Seconds (n,) of steps X (n, 5): the time of the prefills plus that of the decodes."""
        t = np.zeros(len(X))
        for name, rows, phase in (
            ("prefill", X[:, PREFILLS] > 0, self._predict_prefill),
            ("decode", X[:, DECODES] > 0, self._predict_decode),
        ):
            if rows.any():
                if name not in self.phases_:
                    raise ExtrapolationError(
                        f"{type(self).__name__}: a prediction for a {name} step, fitted on none"
                    )
                t[rows] += phase(X[rows])
        return t

    def _fit_prefill(self, X: Array, y: Array) -> None:
        """Fit the time of prefills to steps without decodes."""
        raise NotImplementedError

    def _fit_decode(self, X: Array, y: Array) -> None:
        """Fit the time of decodes to steps without prefills."""
        raise NotImplementedError

    def _predict_prefill(self, X: Array) -> Array:
        """Seconds (n,) of the prefills in steps X (n, 5)."""
        raise NotImplementedError

    def _predict_decode(self, X: Array) -> Array:
        """Seconds (n,) of the decodes in steps X (n, 5)."""
        raise NotImplementedError


def prefill_tokens(X: Array) -> Array:
    """New tokens of a step's prefills, N - D."""
    return X[:, TOKENS] - X[:, DECODES]


def squared_lengths(X: Array) -> Array:
    """sum n_i (n_i + 2 c_i) = 2 A_p - sum n_i: the sum of squared prompt lengths where nothing is cached."""
    return np.maximum(2 * X[:, PAIRS] - prefill_tokens(X), 0.0)


def fit_nonnegative(columns: Array, y: Array) -> Array:
    """Coefficients >= 0 of the columns (n, k), by least squares on the relative error."""
    scale = np.maximum(columns.max(axis=0), 1e-30)  # A column of zeros must not be divided by 0.
    solution, _ = nnls(columns / scale / y[:, None], np.ones(len(y)), maxiter=100 * columns.shape[1])
    return np.asarray(solution / scale)
