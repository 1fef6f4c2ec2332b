"""Chooses the family of step times that predicts a table best, judged on steps that were not fitted.

    choose_step_family(table) -> FamilyChoice    the family, its error by regime, where its predictions fall
                                                 as work grows, and a StepLatency

Distinct steps are dealt into folds (repeats of a step stay together, as in scikit-learn's GroupKFold); every
family predicts each fold from the others. A family's score is the mean of its errors over the regimes that
the table has (prefill, decode of small and of large batches, mixed), all with equal weight. The simplest
family (the first in the given order) whose score is within `TIE_FRAC` of the best one is chosen.

The search needs a StepLatency, the form with five numbers of planner/models/latency.py. Some families have
this form. For the others it is refitted to their predictions, with a held-out error of its own. The simulator
can also use the form of the family "corrected" as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.base import clone

from planner.errors import InputError, PlannerError
from planner.models.correction import CorrectedFormula
from planner.models.families.corrected import CorrectedSteps
from planner.models.families.linear_forms import AladdinSteps, DistServeForm, PrebleSteps
from planner.models.families.rooflines import RooflineSteps
from planner.models.families.splitwise_form import SplitwiseInterpolation
from planner.models.families.vidur_forest import VidurForest
from planner.models.latency import Array, StepLatency
from planner.models.step_fit import Errors, PiecewiseLinearStepLatency, errors_by_regime, folds_of_steps
from planner.models.step_tables import StepTable

SCORED_REGIMES = ("prefill", "decode_small", "decode_large", "mixed")
# Set by hand, like the three numbers below: scores that differ by at most 0.05 percentage points are equal.
TIE_FRAC = 0.0005
FALL_FRAC = 0.001  # If the prediction falls by less as work grows, it is a rounding error.
GROWTH_FACTORS = (1.05, 1.25, 2.0)  # Predictions are compared with those for this many times the work.
_MOST_STEPS_CHECKED = 200  # The most steps of a table that are checked for falling predictions.


@dataclass(frozen=True, slots=True)
class Fall:
    """How often a prediction falls as work of one kind grows, over the pairs of steps that `find_falls`
    compares.
    """

    growing: str  # The kind of work: "prompt", "prefix", "sequences" or "context".
    checked: int  # Pairs of a step and the same with more work.
    falling: int  # The pairs in which the prediction falls.
    worst_frac: float  # The deepest fall, as a share of the prediction.


@dataclass(frozen=True)
class FamilyChoice:
    """The family chosen for a table. `model` is fitted to the whole table and refuses to predict beyond it.

    `errors_by_family[family][regime]` are errors on steps held out of the fit. `latency` is the family's own
    form if that has five numbers, else a refit; `converted` are the errors of the refit by regime, None
    without one. `form` is that of the family "corrected" if there is a refit and it predicts better
    (`is_better`), otherwise None.
    """

    family: str
    model: Any
    latency: StepLatency
    form: CorrectedFormula | None
    errors_by_family: Mapping[str, Mapping[str, Errors]]
    converted: Mapping[str, Errors] | None
    falls: tuple[Fall, ...]
    skipped: Mapping[str, str]  # The reason for each family that cannot be fitted to this table.

    def __str__(self) -> str:
        error = self.errors_by_family[self.family]["all"]
        lines = [f"{self.family}: {error.mape_frac:.1%} off on held-out steps (p90 {error.p90_frac:.1%})"]
        if self.converted is not None:
            lines.append(f"as five numbers {self.converted['all'].mape_frac:.1%}")
        if self.form is not None:
            lines.append(
                "plan takes the five numbers; a fleet that names this fit is simulated with corrected"
            )
        lines += [
            f"falls in {fall.falling} of {fall.checked} comparisons as {fall.growing} grows, by up to "
            f"{fall.worst_frac:.1%}"
            for fall in self.falls
            if fall.falling
        ]
        lines += [f"{name} was not tried: {why}" for name, why in self.skipped.items()]
        return "; ".join(lines)


def default_families(shape: StepLatency | None = None) -> dict[str, Any]:
    """Every family with its usual settings, simplest first. The roofline scales the terms of
    `shape` (rooflines.py), and is left out without it.
    """
    rooflines = {} if shape is None else {"roofline": RooflineSteps(shape)}
    return rooflines | {
        "preble": PrebleSteps(),
        "aladdin": AladdinSteps(),
        "distserve": DistServeForm(),
        "splitwise": SplitwiseInterpolation(),
        "five numbers": PiecewiseLinearStepLatency(),
        "corrected": CorrectedSteps(),
        "vidur": VidurForest(),
    }


def choose_step_family(
    table: StepTable, *, candidates: Mapping[str, Any] | None = None, folds: int = 5, seed: int = 0
) -> FamilyChoice:
    """Choose the family of a table as the module's docstring says; `candidates` defaults to
    `default_families()`.

    Raises InputError if no family can be fitted.
    """
    # X (n, 5) has the columns of planner/models/latency.py, y (n,) seconds.
    X, y, operators = table.X, table.y, table.operators
    fold = folds_of_steps(X, folds, seed)
    candidates = default_families() if candidates is None else candidates
    errors_by_family: dict[str, Mapping[str, Errors]] = {}
    skipped: dict[str, str] = {}
    for name, candidate in candidates.items():
        try:
            predicted = cross_validated_s(candidate, X, y, fold, operators)
        except PlannerError as error:
            skipped[name] = str(error)
        else:
            errors_by_family[name] = errors_by_regime(X, y, predicted)
    if not errors_by_family:
        raise InputError(f"step table: no family can be fitted: {'; '.join(skipped.values())}")
    scores = {name: score_errors(errors) for name, errors in errors_by_family.items()}
    # Candidates are in order, the simplest first.
    best = next(name for name, score in scores.items() if score <= min(scores.values()) + TIE_FRAC)

    model = fit_candidate(candidates[best], X, y, operators)
    latency, is_exact = to_step_latency(model, X)
    errors, converted, form = errors_by_family[best], None, None
    if not is_exact:
        # The refit that predicts a fold must not have seen the fold either.
        refits = np.empty_like(y)
        for k in range(folds):
            is_fitted = fold != k
            fold_model = fit_candidate(
                candidates[best], X[is_fitted], y[is_fitted], _select_rows(operators, is_fitted)
            )
            refits[~is_fitted] = to_step_latency(fold_model, X[is_fitted])[0].steps_s(X[~is_fitted])
        errors = converted = errors_by_regime(X, y, refits)
        # The form of "corrected", if it predicts better than the refit.
        for name, candidate in candidates.items():
            if isinstance(candidate, CorrectedSteps) and is_better(errors_by_family.get(name, {}), converted):
                form = fit_candidate(candidate, X, y).form_
    basis = f"{best}, fitted" if is_exact else f"{best}, refitted as five numbers"
    return FamilyChoice(
        family=best,
        model=model,
        form=form,
        latency=replace(latency, basis=basis, mape_frac=errors["all"].mape_frac),
        errors_by_family=errors_by_family,
        converted=converted,
        falls=find_falls(model, X),
        skipped=skipped,
    )


def score_errors(errors: Mapping[str, Errors]) -> float:
    """The mean of the errors over the regimes that the table has."""
    return float(np.mean([errors[regime].mape_frac for regime in SCORED_REGIMES if regime in errors]))


def is_better(errors: Mapping[str, Errors], others: Mapping[str, Errors]) -> bool:
    """Whether errors have a lower score than others, and are no larger for decodes of large batches, which
    are most of an engine's steps.
    """
    if not errors or score_errors(errors) >= score_errors(others):
        return False
    large = "decode_large"
    return large not in others or errors[large].mape_frac <= others[large].mape_frac


def cross_validated_s(
    candidate: Any, X: Array, y: Array, fold: npt.NDArray[np.int64], operators: pd.DataFrame | None = None
) -> Array:
    """Seconds of every row, each predicted by a fit to the other folds."""
    predicted = np.empty_like(y)
    for k in np.unique(fold):
        is_fitted = fold != k
        model = fit_candidate(candidate, X[is_fitted], y[is_fitted], _select_rows(operators, is_fitted))
        # The fold may have the largest steps, which are beyond those of the others.
        predicted[~is_fitted] = model.set_params(beyond="extrapolate").predict(X[~is_fitted])
    return predicted


def fit_candidate(candidate: Any, X: Array, y: Array, operators: pd.DataFrame | None = None) -> Any:
    """A fitted copy of the candidate; Vidur's forest takes the times of operators if the table has them."""
    model = clone(candidate)
    if isinstance(model, VidurForest):
        return model.fit(X, y, operators)
    return model.fit(X, y)


def to_step_latency(model: Any, X: Array) -> tuple[StepLatency, bool]:
    """The model as five numbers, and whether they are the model itself; else they are fitted to its
    predictions for X.
    """
    if model.latency_ is not None:
        return model.latency_, True
    steps = np.unique(X, axis=0)
    refit = PiecewiseLinearStepLatency().fit(steps, model.predict(steps))
    latency: StepLatency = refit.latency_
    return latency, False


def find_falls(model: Any, X: Array) -> tuple[Fall, ...]:
    """How often predictions fall although work grows, for each kind of work.

    At most _MOST_STEPS_CHECKED evenly spaced steps of the table are compared with what `grow_work` makes of
    them, once for each of GROWTH_FACTORS.
    """
    steps = np.unique(X, axis=0)
    steps = steps[np.linspace(0, len(steps) - 1, min(len(steps), _MOST_STEPS_CHECKED)).astype(int)]
    falls_by_kind = []
    for growing in ("prompt", "prefix", "sequences", "context"):
        less = np.vstack([steps] * len(GROWTH_FACTORS))
        more = np.vstack([grow_work(steps, growing, growth) for growth in GROWTH_FACTORS])
        # Steps beyond the fit's range, and steps without this work, are left out.
        inside = (more <= model.x_max_).all(axis=1) & (more != less).any(axis=1)
        if inside.any():
            change = model.predict(more[inside]) / model.predict(less[inside]) - 1
            fallen = change < -FALL_FRAC
            falls_by_kind.append(
                Fall(
                    growing=growing,
                    checked=int(inside.sum()),
                    falling=int(fallen.sum()),
                    worst_frac=float(-change.min()) if fallen.any() else 0.0,
                )
            )
    return tuple(falls_by_kind)


def grow_work(X: Array, growing: str, growth: float) -> Array:
    """The steps with `growth` times as much of one kind of work; steps without any stay as they are.

    Columns are those of `planner.models.latency`. Prompts and sequences become whole numbers; prefixes grow
    until prompts have `growth` times the pairs of a new and an earlier token.
    """
    tokens, pairs, decodes, kv_tokens, prefills = X.T
    prefill_tokens, chunks = tokens - decodes, np.maximum(prefills, 1.0)
    if growing == "prefix":
        pairs = pairs * growth
    elif growing == "context":
        kv_tokens = kv_tokens * growth
    elif growing == "sequences":
        more_decodes = np.ceil(decodes * growth)
        kv_tokens = kv_tokens * more_decodes / np.maximum(decodes, 1.0)
        tokens, decodes = prefill_tokens + more_decodes, more_decodes
    elif growing == "prompt":
        # A chunk of n new tokens after c cached ones has n (c + (n + 1) / 2) pairs. Solved for c:
        mean_chunk = prefill_tokens / chunks
        cached = np.where(
            prefill_tokens > 0, pairs / np.maximum(prefill_tokens, 1.0) - (mean_chunk + 1) / 2, 0.0
        )
        more_tokens = np.ceil(prefill_tokens * growth)
        pairs = more_tokens * (cached + (more_tokens / chunks + 1) / 2)
        tokens = more_tokens + decodes
    return np.column_stack([tokens, pairs, decodes, kv_tokens, prefills])


def _select_rows(operators: pd.DataFrame | None, rows: Array) -> pd.DataFrame | None:
    """The rows of operators' times, where the table has them."""
    return None if operators is None else operators[rows]
