"""A family of step times for few measurements, not from a paper: a roofline-shaped formula, times a smooth
correction where steps were measured.

The form, g(step) exp(r(step)), is `planner.models.correction.CorrectedFormula`. g is fitted to all steps; r
is the mean of a Gaussian process over the residuals log t - log g of measured times t. Its prior standard
deviation is AMPLITUDE_FRAC, and the error of a measured time is NOISE_FRAC. So the form follows measured
steps closely, goes from one to the next nearly linearly in N (the tokens of a step), and equals g far from
all of them. The covariance is fixed, not fitted: a profile with 13 sizes of prefills is too small to fit its
seven lengths (LENGTHS in correction.py) too. They are set for all tables of docs/models.md together.
"""

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from planner.errors import InputError
from planner.models.correction import (
    CorrectedFormula,
    in_context_steps,
    step_coordinates,
    step_covariance,
    uncorrected_s,
)
from planner.models.families.step_family import StepFamily
from planner.models.latency import Array
from planner.models.step_fit import equal_shares

AMPLITUDE_FRAC, NOISE_FRAC = 0.15, 0.02
# r rests on at most this many measured steps, because the simulator sums over them in every step.
MOST_ANCHORS = 200
# The measured steps are chosen from at most this many.
_MOST_CANDIDATES = 1000


class CorrectedSteps(StepFamily):
    """Learns the form above as `form_`.

    Repeats of a step count as their median, because an engine's hiccups only lengthen steps. r is fitted to
    the `most_anchors` most informative distinct steps (`informative_rows`), g to all. `noise_frac` is the
    error of a measured time. Mean contexts are rounded up to multiples of `context_step` tokens
    (`CorrectedFormula`). `beyond` is that of `StepFamily`.
    """

    form_: CorrectedFormula

    def __init__(
        self,
        *,
        most_anchors: int = MOST_ANCHORS,
        noise_frac: float = NOISE_FRAC,
        context_step: int = 1,
        beyond: str = "raise",
    ) -> None:
        self.most_anchors = most_anchors
        self.noise_frac = noise_frac
        self.context_step = context_step
        self.beyond = beyond

    def _fit(self, X: Array, y: Array) -> None:
        """Fit g to all distinct steps, then r to the most informative ones."""
        steps, step_of_row = np.unique(in_context_steps(X, self.context_step), axis=0, return_inverse=True)
        # The median time of each distinct step.
        by_step = np.argsort(step_of_row, kind="stable")
        repeats = np.split(y[by_step], np.cumsum(np.bincount(step_of_row))[:-1])
        t = np.array([np.median(times) for times in repeats])
        coefficients_s = _fitted_coefficients(steps, t)
        chosen = informative_rows(steps, min(self.most_anchors, len(steps)))
        z = step_coordinates(steps[chosen])
        residuals = np.log(t[chosen] / uncorrected_s(steps[chosen], coefficients_s))
        # In units of the prior variance: `step_covariance` of a step with itself is 1.
        noise = (self.noise_frac / AMPLITUDE_FRAC) ** 2 * np.eye(len(chosen))
        weights = np.linalg.solve(step_covariance(z, z) + noise, residuals)
        tokens, pairs, decodes, kv_tokens, prefills = map(tuple, steps[chosen].T.tolist())
        self.form_ = CorrectedFormula(
            formula_s=tuple(coefficients_s.tolist()),
            weights=tuple(weights.tolist()),
            tokens=tokens,
            pairs=pairs,
            decodes=decodes,
            kv_tokens=kv_tokens,
            prefills=prefills,
            context_step=self.context_step,
        )

    def _predict(self, X: Array) -> Array:
        return self.form_.step_s(X)


def informative_rows(X: Array, rows: int) -> npt.NDArray[np.int64]:
    """Indices of the `rows` steps whose measurement would tell most about all of X, without their times.

    The choice is greedy: each next step is the one whose measurement most lowers the variances of r, summed
    over the candidates (I-optimal for the covariance above). Candidates are all steps, or, of too many,
    max(`rows`, _MOST_CANDIDATES) steps at even distances in the order of N.
    benchmarks/latency_models.py picks with it which steps to measure.
    """
    if not 0 < rows <= len(X):
        raise InputError(f"{rows} informative steps requested, must be 1 to {len(X)}, those there are")
    if rows == len(X):
        return np.arange(len(X))
    candidates = np.arange(len(X))
    if len(X) > (most_candidates := max(rows, _MOST_CANDIDATES)):
        in_order = np.lexsort(X.T[::-1])
        candidates = in_order[np.linspace(0, len(X) - 1, most_candidates).astype(int)]
    z = step_coordinates(X[candidates])
    covariance = step_covariance(z, z)  # Given the measurements of the steps chosen so far.
    noise = (NOISE_FRAC / AMPLITUDE_FRAC) ** 2
    chosen: list[int] = []
    for _ in range(rows):
        gain = (covariance**2).sum(axis=0) / (np.diag(covariance) + noise)
        gain[chosen] = -1.0  # Gains are >= 0, so no step is chosen twice.
        best = int(np.argmax(gain))
        chosen.append(best)
        covariance -= np.outer(covariance[:, best], covariance[best]) / (covariance[best, best] + noise)
    return np.asarray(candidates[chosen])


def _fitted_coefficients(X: Array, t: Array) -> Array:
    """The coefficients s, s_p, c, a, b, d of g (planner/models/correction.py) by least squares of log t -
    log g, with less weight on outliers.
    """
    tokens, pairs, decodes, kv_tokens, prefills = X.T
    has_prefill = prefills > 0 if (prefills > 0).any() else np.full(len(X), True)
    # A low percentile (set by hand): in most steps floor and attention take time too, and then t / N is above
    # the slope.
    slope = np.percentile(t[has_prefill] / tokens[has_prefill], 15)
    # The search starts where N explains most of the time, and every other column at most a fiftieth of it.
    shares = [0.02 * t.max() / max(column.max(), 1.0) for column in (pairs, decodes, kv_tokens)]
    # s_p, what prefills add to the floor s, is usually far smaller than that.
    start = np.log([t.min(), 0.1 * t.min(), slope, *shares])
    weight = equal_shares(X)  # Prefill, decode and mixed steps count alike, however many were measured.
    weight = weight / weight.mean()

    def residuals(logs: Array) -> Array:
        return np.asarray(np.log(uncorrected_s(X, np.exp(logs)) / t) * weight)

    # How far the logarithm of each coefficient may end below and above its start: wide where a cost may be
    # absent, narrow where the start is known to a factor of e or e^2.
    below, above = np.array([2, 6, 2, 12, 12, 12]), np.array([1, 4, 2, 5, 5, 5])
    bounds = (start - below, start + above)
    # Relative errors beyond `f_scale`, 10 %, count as outliers.
    return np.asarray(np.exp(least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.1).x))
