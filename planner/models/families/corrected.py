"""Ours for few measurements: a roofline-shaped formula, times a smooth correction where steps were measured.

    t = g(step) * exp(r(z))                                                             [s]
    g = ((s + s_p [P > 0])^p + (c N)^p)^(1/p) + a A_p + b D + d K                       all >= 0
    z = log2 of: N in eights, decodes, mean context of a decode, prefills, mean pairs of a prefill's token;
        and whether the step has prefills, decodes

g is what physics says: a floor (weights are read, kernels start; prefills start others than decodes do), then
a slope, with a soft corner between: p = 3 with prefills, 2 without. r is the mean of a Gaussian process over
what g leaves (log t - log g), so it follows measured steps closely, goes from one to the next with N nearly
linearly, and far from all of them g stands alone. Its covariance is fixed, not fitted: 13 prefill sizes
do not carry seven more parameters.

    k(z, z') = 0.15^2 ( exp(-|z_0 - z_0'| / l_0) prod_i m(|z_i - z_i'| / l_i)  +  w exp(-|z_0 - z_0'| / 0.1) )
    m(x) = (1 + sqrt(3) x) exp(-sqrt(3) x),  measured times are within 2 %

The second term is what one N has for itself: GEMMs are cut into tiles, and 513 tokens may take 38 % longer
than 512. The numbers l, w, p were set once, for all tables of docs/models.md together.

Scaling a roofline and interpolating residuals follows no one paper; the other families here do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from planner.errors import InputError
from planner.models.families.common import StepFamily, prefill_tokens
from planner.models.latency import Array
from planner.models.step_fit import equal_shares

LENGTHS = np.array([8.0, 4.0, 8.0, 10.0, 10.0, 4.0, 4.0])  # l, in doublings; the last two in kinds of step
OWN_SHARE, OWN_LENGTH = 0.25, 0.1  # w, and how near another N must be to share it
AMPLITUDE_FRAC, NOISE_FRAC = 0.15, 0.02
PREFILL_CORNER, DECODE_CORNER = 3.0, 2.0  # p
MOST_ANCHORS = 200  # measured steps that r rests on
_MOST_CANDIDATES = 1000
_CHUNK = 20_000


class CorrectedSteps(StepFamily):
    """The form above. `formula_` (6,) holds s, s_p, c, a, b, d; `anchors_` (m, 7) and `weights_` (m,) make r.

    Repeats of a step count as their median, because an engine's hiccups are one-sided. Of more than
    `most_anchors` distinct steps the most informative are taken for r (`informative_rows`); g sees all.
    """

    def __init__(self, *, most_anchors: int = MOST_ANCHORS, beyond: str = "raise") -> None:
        self.most_anchors = most_anchors
        self.beyond = beyond

    def _fit(self, X: Array, y: Array) -> None:
        steps, which = np.unique(X, axis=0, return_inverse=True)
        order = np.argsort(which, kind="stable")
        t = np.array([np.median(part) for part in np.split(y[order], np.cumsum(np.bincount(which))[:-1])])
        self.formula_ = _fitted_formula(steps, t)
        chosen = informative_rows(steps, min(self.most_anchors, len(steps)))
        self.anchors_ = coordinates(steps[chosen])
        left = np.log(t[chosen] / formula_s(steps[chosen], self.formula_))
        noise = (NOISE_FRAC / AMPLITUDE_FRAC) ** 2 * np.eye(len(chosen))
        self.weights_ = np.linalg.solve(covariance(self.anchors_, self.anchors_) + noise, left)

    def _predict(self, X: Array) -> Array:
        chunks = np.split(X, range(_CHUNK, len(X), _CHUNK))
        r = [covariance(coordinates(chunk), self.anchors_) @ self.weights_ for chunk in chunks]
        return np.asarray(formula_s(X, self.formula_) * np.exp(np.concatenate(r)))


def formula_s(X: Array, formula: Array) -> Array:
    """g above, seconds."""
    tokens, pairs, decodes, kv_tokens, prefills = X.T
    floor, prefill_floor, slope, a, b, d = formula
    p = np.where(prefills > 0, PREFILL_CORNER, DECODE_CORNER)
    dense = ((floor + prefill_floor * (prefills > 0)) ** p + (slope * tokens) ** p) ** (1 / p)
    return np.asarray(dense + a * pairs + b * decodes + d * kv_tokens)


def coordinates(X: Array) -> Array:
    """z above, (n, 7)."""
    tokens, pairs, decodes, kv_tokens, prefills = X.T
    return np.column_stack([
        np.log2(np.ceil(tokens / 8) * 8),
        np.log2(1 + decodes),
        np.log2(1 + kv_tokens / np.maximum(decodes, 1)),
        np.log2(1 + prefills),
        np.log2(1 + pairs / np.maximum(prefill_tokens(X), 1)),
        prefills > 0,
        decodes > 0,
    ]).astype(float)  # fmt: skip


def covariance(z: Array, others: Array) -> Array:
    """k above between the rows of z and of others, over 0.15^2."""
    apart = np.abs(z[:, None, 0] - others[None, :, 0])
    exponent, product = apart / LENGTHS[0], np.ones(apart.shape)
    for i in range(1, len(LENGTHS)):
        x = np.sqrt(3) / LENGTHS[i] * np.abs(z[:, None, i] - others[None, :, i])
        product *= 1 + x
        exponent += x
    return np.asarray(product * np.exp(-exponent) + OWN_SHARE * np.exp(-apart / OWN_LENGTH))


def informative_rows(X: Array, rows: int) -> npt.NDArray[np.int64]:
    """Indices of the `rows` steps whose measurement would tell most about all of X; looks at no times.

    Greedy: each next step is the one whose measurement lowers the variances of r, summed over X, most
    (I-optimal for the covariance above). From more than a thousand steps a thousand evenly spaced ones in
    the order of N are candidates. Use it to pick what to measure out of what could be.
    """
    if not 0 < rows <= len(X):
        raise InputError(f"asked for {rows} informative steps, must be 1 to {len(X)}, those there are")
    if rows == len(X):
        return np.arange(len(X))
    candidates = np.arange(len(X))
    if len(X) > (most := max(rows, _MOST_CANDIDATES)):
        in_order = np.lexsort(X.T[::-1])
        candidates = in_order[np.linspace(0, len(X) - 1, most).astype(int)]
    z = coordinates(X[candidates])
    left = covariance(z, z)
    noise = (NOISE_FRAC / AMPLITUDE_FRAC) ** 2
    chosen: list[int] = []
    for _ in range(rows):
        gain = (left**2).sum(axis=0) / (np.diag(left) + noise)
        gain[chosen] = -1.0
        best = int(np.argmax(gain))
        chosen.append(best)
        left -= np.outer(left[:, best], left[best]) / (left[best, best] + noise)
    return np.asarray(candidates[chosen])


def _fitted_formula(X: Array, t: Array) -> Array:
    """Least squares of log t - log g over the logarithms of the coefficients, far outliers counting less."""
    tokens, pairs, decodes, kv_tokens, prefills = X.T
    telling = prefills > 0 if (prefills > 0).any() else np.full(len(X), True)
    slope = np.percentile(t[telling] / tokens[telling], 15)
    shares = [0.02 * t.max() / max(column.max(), 1.0) for column in (pairs, decodes, kv_tokens)]
    start = np.log([t.min(), 0.1 * t.min(), slope, *shares])
    weight = equal_shares(X)
    weight = weight / weight.mean()

    def residuals(logs: Array) -> Array:
        return np.asarray(np.log(formula_s(X, np.exp(logs)) / t) * weight)

    down, up = np.array([2, 6, 2, 12, 12, 12]), np.array([1, 4, 2, 5, 5, 5])
    bounds = (start - down, start + up)
    return np.asarray(np.exp(least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.1).x))
