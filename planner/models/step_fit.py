"""Fits a StepLatency to a table of step times, and says how far off the fit is on steps held out of it.

This module is apart from `latency.py` because scikit-learn takes most of a second to import.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog, nnls
from scipy.sparse import csr_array, eye_array, hstack, vstack
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.utils.validation import check_is_fitted, validate_data

from planner.errors import ExtrapolationError, InputError
from planner.models.latency import DECODES, PREFILLS, TOKENS, Array, StepLatency, cached_tokens

# The corners of f, as tokens of a step.
KNOTS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# The regimes by which `errors_by_regime` sorts steps, set by hand.
SMALL_BATCH = 8  # Decodes of at most this many sequences count as a small batch.
LONG_CONTEXT_TOKENS = 8192  # Steps with a longer mean context count as "long_context".
LEAST_MIXED_FRAC = 0.3  # A fitted m below this share of d counts as 0. Set by hand.
_QUICKEST_STEP_S = 1e-6  # The floor of a fit is at least this, because step times must be positive.


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors over some steps: their mean, and the 90th percentile."""

    mape_frac: float
    p90_frac: float
    steps: int


class PiecewiseLinearStepLatency(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Fits step times  t = f(N) + a A_p + b D + d (K + C) + e P (+ m K where P > 0) + host_s.

    X (n, 5): N, A_p, D, K, P as `planner.models.latency` defines them, C from them (`cached_tokens`). y (n,):
    step time [s], > 0. f is an intercept plus ramps clip(N - k_i, 0, k_i+1 - k_i) with slopes >= 0: it never
    falls, but may be steep first and flat later, as GEMMs in tiles are. The fit is by non-negative least
    squares of relative errors, so all numbers are >= 0. An m below `LEAST_MIXED_FRAC` of d is set to 0, as it
    only makes up for misfits of other terms.
    """

    def __init__(
        self,
        *,
        knots_tokens: tuple[float, ...] = KNOTS_TOKENS,
        host_s: float = 0.0,
        basis: str = "fitted",
        beyond: str = "raise",
        reads_cached: bool = True,
    ) -> None:
        # If False, y is without the time in which prefills read cached tokens, and neither fit nor prediction
        # has d C.
        self.reads_cached = reads_cached
        self.knots_tokens = knots_tokens  # Corners of f; corners without data between them are dropped.
        self.host_s = host_s  # The part of y that is the engine's own overhead, measured apart.
        self.basis = basis
        self.beyond = beyond  # Outside the profiled range a prediction may "raise" or "extrapolate".

    def fit(self, X: Array, y: Array) -> Self:
        """Fit the form of the class to steps X (n, 5) and their seconds y (n,)."""
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        if X.shape[1] != 5:
            raise InputError(f"step table: X has {X.shape[1]} columns, must be the 5 of N, A_p, D, K, P")
        if not (y > self.host_s).all():
            raise InputError(f"step table: t_s is {y.min():g}, must be > {self.host_s:g} (the host's share)")
        knots = _knots_with_data(self.knots_tokens, X[:, TOKENS])
        cached = cached_tokens(X) if self.reads_cached else np.zeros(len(X))
        columns, weight = _design_columns(X, cached, knots), equal_shares(X) / y
        solution = _solve_nonnegative(columns, y - self.host_s, weight)
        *_, d, _, m = solution  # The solution has floor, slopes, a, b, d, e, m.
        if m < LEAST_MIXED_FRAC * d:
            solution = np.append(_solve_nonnegative(columns[:, :-1], y - self.host_s, weight), 0.0)

        floor, slopes, (a, b, d, e, m) = solution[0], solution[1 : len(knots)], solution[len(knots) :]
        floor = max(floor, _QUICKEST_STEP_S)
        self.latency_ = StepLatency(
            knots_tokens=tuple(knots.tolist()),
            f_s=tuple((floor + np.concatenate(([0.0], np.cumsum(slopes * np.diff(knots))))).tolist()),
            a_s=float(a),
            b_s=float(b),
            d_s=float(d),
            e_s=float(e),
            h_s=self.host_s,
            basis=self.basis,
            max_context_tokens=float(_context_tokens(X).max()),
            m_s=float(m),
        )
        self.x_max_ = X.max(axis=0)
        return self

    def predict(self, X: Array) -> Array:
        """Seconds (n,) of steps X (n, 5)."""
        X = check_profiled(self, X)
        return self.latency_.steps_s(X) if self.reads_cached else self.latency_.step_s(*X.T)


def check_profiled(model: Any, X: Array) -> Array:
    """Check that `model` is fitted and return the steps to predict.

    Raises ExtrapolationError for steps beyond those of the fit (`x_max_`), unless `beyond` is "extrapolate".
    """
    check_is_fitted(model)
    X = validate_data(model, X, reset=False, dtype=np.float64)
    if model.beyond == "raise" and (X > model.x_max_).any():
        row = X[(X > model.x_max_).any(axis=1)][0]
        raise ExtrapolationError(
            f"step latency: a prediction for N, A_p, D, K, P = {row.tolist()}, profiled up to "
            f"{model.x_max_.tolist()}; profile further, or fit with beyond='extrapolate'"
        )
    return X


def cross_validated_errors(
    model: PiecewiseLinearStepLatency, X: Array, y: Array, *, folds: int = 5, seed: int = 0
) -> dict[str, Errors]:
    """Errors by regime on steps held out of the fit: all repeats of a step fall into the same fold."""
    fold = folds_of_steps(X, folds, seed)
    predicted = np.empty_like(y)
    for k in range(folds):
        fitted = clone(model).set_params(beyond="extrapolate").fit(X[fold != k], y[fold != k])
        predicted[fold == k] = fitted.predict(X[fold == k])
    return errors_by_regime(X, y, predicted)


def folds_of_steps(X: Array, folds: int, seed: int) -> npt.NDArray[np.int64]:
    """The fold of every row. Cells, each a distinct step with all its repeats, are dealt out at random."""
    _, cell = np.unique(X, axis=0, return_inverse=True)
    cells = int(cell.max()) + 1
    if cells < 2 * folds:
        raise InputError(f"step table: {cells} distinct steps are too few to hold out one in {folds}")
    return np.asarray(np.random.default_rng(seed).permutation(cells)[cell] % folds)


def errors_by_regime(X: Array, y: Array, predicted: Array) -> dict[str, Errors]:
    """Relative errors of all steps and per regime; "long_context" overlaps with the others."""
    error = np.abs(predicted - y) / y
    decodes, prefills = X[:, DECODES], X[:, PREFILLS]
    regimes = {
        "all": np.ones(len(y), dtype=bool),
        "prefill": decodes == 0,
        "decode_small": (prefills == 0) & (decodes <= SMALL_BATCH),
        "decode_large": (prefills == 0) & (decodes > SMALL_BATCH),
        "mixed": (prefills > 0) & (decodes > 0),
        "long_context": _context_tokens(X) > LONG_CONTEXT_TOKENS,
    }
    return {
        name: Errors(float(error[rows].mean()), float(np.quantile(error[rows], 0.9)), int(rows.sum()))
        for name, rows in regimes.items()
        if rows.any()
    }


def equal_shares(X: Array) -> Array:
    """Factors (n,) of residuals with which prefill, decode and mixed steps count alike in least squares: a
    grid of measurements has few decode steps, while an engine's steps are mostly decode steps.
    """
    # 0 decode, 1 prefill, 2 mixed.
    kind = np.where(X[:, PREFILLS] == 0, 0, np.where(X[:, DECODES] == 0, 1, 2))
    rows = np.bincount(kind, minlength=3)
    return np.asarray(1 / np.sqrt(rows[kind]))


def _design_columns(X: Array, cached: Array, knots: Array) -> Array:
    """The columns of the coefficients, in this order: the intercept, f's slopes, a, b, d, e and m."""
    ramps = np.clip(X[:, :1] - knots[:-1], 0.0, np.diff(knots))
    _, pairs, decodes, kv_tokens, prefills = X.T
    own = np.column_stack([pairs, decodes, kv_tokens + cached, prefills, kv_tokens * (prefills > 0)])
    return np.hstack([np.ones((len(X), 1)), ramps, own])


def _solve_nonnegative(columns: Array, seconds: Array, weight: Array) -> Array:
    """The coefficients >= 0 of the columns that fit `seconds` best in weighted least squares."""
    # Pairs reach 1e9 and prompts 8, so columns are scaled first; the least scale is for columns of zeros.
    scale = np.maximum(columns.max(axis=0), 1e-30)
    most_iterations = 100 * columns.shape[1]  # The default of 3 per column is too few.
    solution, _ = nnls(columns / scale * weight[:, None], seconds * weight, maxiter=most_iterations)
    return np.asarray(solution / scale)


def _knots_with_data(knots_tokens: tuple[float, ...], tokens: Array) -> Array:
    """The knots inside the range of the data, and the ends of this range.

    A knot without data between it and the one before is left out. So are knots near the upper end, because
    the slope of f beyond the data would rest on two rows there.
    """
    low, high = float(tokens.min()), float(tokens.max())
    if low == high:
        raise InputError(f"step table: every step has {low:g} tokens; at least two sizes are needed")
    knots_used = [low]
    # Above high / 1.5 too few rows would lie beyond a knot.
    for knot in sorted({float(k) for k in knots_tokens if low < k <= high / 1.5} | {high}):
        if ((tokens > knots_used[-1]) & (tokens <= knot)).any():
            knots_used.append(knot)
    return np.array(knots_used)


def _context_tokens(X: Array) -> Array:
    """A step's mean decode context, or its mean prompt with the cached part, whichever is longer.

    n new tokens after c cached ones make n c + n (n + 1) / 2 pairs, so c + n = pairs / n + (n - 1) / 2.
    """
    tokens, pairs, decodes, kv_tokens, prefills = X.T
    new_tokens = np.maximum(tokens - decodes, 1.0)
    chunk = new_tokens / np.maximum(prefills, 1.0)
    prompt = np.where(prefills > 0, pairs / new_tokens + (chunk - 1.0) / 2, 0.0)
    return np.asarray(np.maximum(kv_tokens / np.maximum(decodes, 1.0), prompt))


def least_absolute(
    X: Array,
    y: Array,
    *,
    scale: Array | None = None,
    bounds: Sequence[tuple[float, float | None]] | None = None,
) -> Array:
    """Coefficients, >= 0 or within `bounds`, with the least sum of |X c - y| / scale (by default y).

    The problem is a linear program with one unknown per row for its error. planner/calibrate/engine_fit.py
    uses it.
    """
    n, k = X.shape
    divisor = y if scale is None else scale
    A, b = csr_array(X / divisor[:, None]), y / divisor  # Errors are relative.
    errors = eye_array(n)
    solution = linprog(
        np.concatenate([np.zeros(k), np.ones(n)]),
        # error >= X c - y and error >= y - X c.
        A_ub=vstack([hstack([A, -errors]), hstack([-A, -errors])]),
        b_ub=np.concatenate([b, -b]),
        bounds=[*(bounds or [(0.0, None)] * k), *[(0.0, None)] * n],
    )
    if not solution.success:
        raise InputError(f"the constants cannot be fitted ({solution.message})")
    return np.asarray(solution.x[:k])
