"""Predictors of output lengths fitted to a trace, and how often they are right on later requests.

This module is apart from `output_length.py` because scikit-learn takes most of a second to import.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.utils.validation import check_is_fitted, validate_data
from threadpoolctl import threadpool_limits

from planner.errors import ExtrapolationError, InputError
from planner.models.output_length import BUCKET_TOKENS, Floats, Ints, bucket_of, length_features, output_table
from planner.traffic.trace import Trace

# Predictors are fitted to this share of the requests, and judged on the later ones. Set by hand.
FITTED_FRAC = 0.7


class ConditionalMean(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Expected output  E[ output | input, output > generated ]  [tokens], as in Aladdin (output_length.py).

    X (n, 2): input tokens, output tokens generated so far (0 before the first).   y (n,): output tokens at
    the end.

    The prediction is the mean over the fitted requests whose input is in the same range and whose output has
    more tokens than are generated; the `input_buckets` ranges of inputs hold equally many requests. A fitted
    request counts at every generated length below its own output, so `fit` does not read the second column.
    Single predictions may be far off, but their mean is right.
    """

    def __init__(self, *, input_buckets: int = 8, beyond: str = "raise") -> None:
        self.input_buckets = input_buckets
        # For requests that have generated as many tokens as the longest fitted output, or more: "raise", or
        # "extrapolate" to one more token.
        self.beyond = beyond

    def fit(self, X: Floats, y: Floats) -> Self:
        """Fit to rows X (n, 2) of prompt and generated tokens, and output tokens y (n,)."""
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        if X.shape[1] != 2:
            raise InputError(
                f"output length: X has {X.shape[1]} columns, expected input and generated tokens"
            )
        self.table_ = output_table(X[:, 0], y, self.input_buckets)
        self.longest_ = float(y.max())
        return self

    def predict(self, X: Floats) -> Floats:
        """The expected output (n,) [tokens] of rows X (n, 2); for errors see `beyond`."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        generated = X[:, 1]
        if self.beyond == "raise" and (generated >= self.longest_).any():
            raise ExtrapolationError(
                f"output length: predicted beyond {generated.max():g} tokens, the longest output fitted has "
                f"{self.longest_:g}; fit on longer ones, or with beyond='extrapolate'"
            )
        return self.table_.expected_tokens(X[:, 0], generated)


class BucketClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """TetriInfer's classifier of output lengths (output_length.py), which reads features of a trace and not
    the prompt's words.

    X (n, 5): `planner.models.output_length.length_features`.   y (n,): buckets of output length.
    Gradient-boosted trees; a request beyond the fitted range counts as the nearest within.
    """

    def __init__(self, *, iterations: int = 60, random_state: int = 0) -> None:
        self.iterations = iterations
        self.random_state = random_state

    def fit(self, X: Floats, y: Ints) -> Self:
        """Fit to features X (n, 5) and buckets y (n,)."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        self.classes_, counts = np.unique(y, return_counts=True)
        self.majority_ = self.classes_[np.argmax(counts)]
        self.trees_ = None
        if len(self.classes_) > 1:
            trees = HistGradientBoostingClassifier(
                # Small steps and large leaves, set by hand: a trace has few requests for five features.
                max_iter=self.iterations,
                learning_rate=0.05,
                max_leaf_nodes=15,
                min_samples_leaf=40,
                early_stopping=False,
                random_state=self.random_state,
            )
            # One thread: on a busy machine threads that wait for each other take 30 times as long.
            with threadpool_limits(1):
                self.trees_ = trees.fit(X, y)
        return self

    def predict(self, X: Floats) -> Ints:
        """The bucket (n,) of each row's output; the commonest one if no tree was grown."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        if self.trees_ is None:
            return np.full(len(X), self.majority_)
        with threadpool_limits(1):
            return np.asarray(self.trees_.predict(X))


@dataclass(frozen=True, slots=True)
class LengthAccuracy:
    """Shares of later requests whose bucket of output length was predicted right."""

    accuracy_frac: float  # By the model.
    majority_frac: float  # By always naming the commonest bucket of the earlier requests.
    within_one_frac: float  # By the model, where the next bucket counts as right too.
    fitted: int  # The number of earlier requests.
    later: int  # The number of later requests.


def later_accuracy(
    trace: Trace,
    model: BucketClassifier | None = None,
    *,
    bucket_tokens: int = BUCKET_TOKENS,
    fitted_frac: float = FITTED_FRAC,
) -> LengthAccuracy:
    """The accuracy of a fit to the first `fitted_frac` of a trace's requests, on the later ones. Raises
    InputError for a trace of too few requests.
    """
    split = _fitted_requests(trace, fitted_frac)
    X, y = length_features(trace), bucket_of(trace.output_tokens, bucket_tokens)
    fitted = clone(BucketClassifier() if model is None else model).fit(X[:split], y[:split])
    predicted, truth = fitted.predict(X[split:]), y[split:]
    return LengthAccuracy(
        accuracy_frac=float((predicted == truth).mean()),
        majority_frac=float((fitted.majority_ == truth).mean()),
        within_one_frac=float((np.abs(predicted - truth) <= 1).mean()),
        fitted=split,
        later=len(truth),
    )


@dataclass(frozen=True, slots=True)
class MeanAccuracy:
    """Errors of a later request's output, predicted as a mean of earlier outputs [tokens]: the mean absolute
    error, and the bias (predicted less true). Fields `plain_` are for the mean over all earlier requests, the
    other two for the mean over prompts of similar length.
    """

    error_tokens: float
    bias_tokens: float
    plain_error_tokens: float
    plain_bias_tokens: float


def later_mean_error(trace: Trace, *, input_buckets: int) -> MeanAccuracy:
    """The errors on later requests of means over the first FITTED_FRAC, in `input_buckets` prompt ranges.
    Raises InputError for a trace of too few requests.
    """
    split = _fitted_requests(trace, FITTED_FRAC)
    X = np.column_stack([trace.input_tokens, np.zeros(len(trace))]).astype(float)
    y = trace.output_tokens.astype(float)
    model = ConditionalMean(input_buckets=input_buckets, beyond="extrapolate").fit(X[:split], y[:split])
    errors, plain_errors = model.predict(X[split:]) - y[split:], y[:split].mean() - y[split:]
    return MeanAccuracy(
        error_tokens=float(np.abs(errors).mean()),
        bias_tokens=float(errors.mean()),
        plain_error_tokens=float(np.abs(plain_errors).mean()),
        plain_bias_tokens=float(plain_errors.mean()),
    )


def _fitted_requests(trace: Trace, fitted_frac: float) -> int:
    """The number of requests, the first ones, to which predictors are fitted."""
    fitted = round(fitted_frac * len(trace))
    if not 0 < fitted < len(trace):
        raise InputError(f"{trace.name}: {len(trace)} requests are too few to hold some out")
    return fitted
