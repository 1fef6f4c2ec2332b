"""Step times by a roofline-shaped formula g, times a smooth correction exp(r) near measured steps.

    t = g(step) * exp(r(z)) + h                    [s]; N, A_p, D, K, P: planner/models/latency.py
    g = ((s + s_p [P > 0])^p + (c N)^p)^(1/p) + a A_p + b D + d K                       all >= 0
    z = log2 of: N rounded up to eights, 1 + decodes, 1 + a decode's mean context, 1 + prefills, 1 + mean
        pairs of a prefill's token; then 1 if the step has prefills, and 1 if it has decodes
    r = sum over the measured steps i of  w_i k(z, z_i)

g follows physics: a floor (weights are read, kernels start; prefills start other kernels than decodes), then
a slope, with a soft corner between: p = 3 with prefills, 2 without. k is the covariance of a Gaussian
process. `planner.models.families.corrected` fits the numbers; h is host overhead that the measured times
lack.

    k(z, z') = exp(-|z_0 - z_0'| / l_0) prod_(i>0) m(|z_i - z_i'| / l_i)  +  0.25 exp(-|z_0 - z_0'| / 0.1)
    m(x) = (1 + sqrt(3) x) exp(-sqrt(3) x)

The second term of k is for effects of a single N: GEMMs are cut into tiles, so 513 tokens may take 38 %
longer than 512.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from planner.errors import InputError
from planner.models.foreign_forms import CORRECTED, Compiled, Floats
from planner.models.latency import DECODES, KV_TOKENS

# The lengths l of the covariance, one for each coordinate of z, set once for all tables of docs/models.md.
# Lengths of logarithms count doublings; the last two coordinates are 0 or 1.
LENGTHS = np.array([8.0, 4.0, 8.0, 10.0, 10.0, 4.0, 4.0])
# The second term of the covariance: its weight and its length, set with those above.
OWN_SHARE, OWN_LENGTH = 0.25, 0.1
PREFILL_CORNER, DECODE_CORNER = 3.0, 2.0  # The exponent p of the formula, with and without prefills.
# The simulator interpolates the mean context between this many knots per doubling, up to 2^21 tokens.
KNOTS_PER_DOUBLING, DOUBLINGS = 8, 21
# Differences of z are multiplied by these: 1 / l, and sqrt(3) / l for coordinates with the factor m.
_SCALES = np.array([1.0, *[np.sqrt(3.0)] * 6]) / LENGTHS
# Most steps that are predicted at once: a matrix of steps x measured steps must fit into memory.
_STEPS_AT_ONCE = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class CorrectedFormula:
    """The form above with numbers in it: `formula_s` are s, s_p, c, a, b, d.

    The other fields have one value for each measured step that r rests on: its weight w, and N, A_p, D, K, P.
    The mean context of decodes is rounded up to multiples of `context_step` tokens, as where KV is read in
    blocks.
    """

    formula_s: tuple[float, ...]
    weights: tuple[float, ...]
    tokens: tuple[float, ...]
    pairs: tuple[float, ...]
    decodes: tuple[float, ...]
    kv_tokens: tuple[float, ...]
    prefills: tuple[float, ...]
    h_s: float = 0.0
    context_step: float = 1.0

    def __post_init__(self) -> None:
        if len(self.formula_s) != 6 or min(*self.formula_s, self.h_s) < 0 or not self.formula_s[0] > 0:
            raise InputError("corrected: formula_s must be six numbers >= 0, the first > 0; h_s >= 0")
        columns = (self.tokens, self.pairs, self.decodes, self.kv_tokens, self.prefills)
        if not self.weights or any(len(column) != len(self.weights) for column in columns):
            raise InputError(
                "corrected: weights, tokens, pairs, decodes, kv_tokens, prefills must be equally long lists"
            )
        if min(map(min, columns)) < 0 or not min(self.tokens) > 0:
            raise InputError("corrected: a measured step has tokens > 0, and nothing below 0")
        if not self.context_step >= 1 or self.context_step % 1:
            raise InputError(f"corrected: context_step is {self.context_step:g}, must be a whole number >= 1")

    @property
    def measured_steps(self) -> Floats:
        """The measured steps that r rests on, (m, 5)."""
        return np.column_stack([self.tokens, self.pairs, self.decodes, self.kv_tokens, self.prefills])

    def shortest_s(self, most_tokens: int, most_decodes: int, most_kv_tokens: int) -> tuple[float, str]:
        """Seconds of the shortest measured step, and the field that decides it.

        Minus infinity if the weights are so large that some step overflows. Other forms of step times need
        the arguments; this one does not.
        """
        with np.errstate(over="ignore"):
            seconds = self.step_s(self.measured_steps)
        # The caller refuses a file with a step that is not longer than 0.
        return (float(seconds.min()) if np.isfinite(seconds).all() else -np.inf), "weights"

    def step_s(self, X: Floats) -> Floats:
        """Seconds of steps (n, 5), columns N, A_p, D, K, P."""
        X = in_context_steps(X, self.context_step)
        anchors, weights = step_coordinates(self.measured_steps), np.array(self.weights)
        chunks = np.split(X, range(_STEPS_AT_ONCE, len(X), _STEPS_AT_ONCE))
        r = np.concatenate([step_covariance(step_coordinates(chunk), anchors) @ weights for chunk in chunks])
        return np.asarray(uncorrected_s(X, np.array(self.formula_s)) * np.exp(r) + self.h_s)

    def with_power_cap(self, prefill: float, decode: float) -> CorrectedFormula:
        """The engine power-capped: c and a times `prefill`; s, s_p, b and d times `decode`; h and r stay."""
        factors = (decode, decode, prefill, prefill, decode, decode)
        return replace(
            self, formula_s=tuple(x * factor for x, factor in zip(self.formula_s, factors, strict=True))
        )

    def compile_for_kernel(self, most_tokens: int, most_decodes: int) -> Compiled:
        """The form as the kernel reads it.

        Steps of decodes alone become a table of exp(r) by decodes and mean context. For other steps the
        kernel sums over the measured steps, and factors that are the same for all steps of a kind are
        multiplied into the weights here.
        """
        anchors, weights = step_coordinates(self.measured_steps), np.array(self.weights)
        token_eights = 8.0 * np.arange(1, (most_tokens + 7) // 8 + 1)
        distance = np.abs(np.log2(token_eights)[:, None] - anchors[None, :, 0])
        # The second term of k by N in eights. A step of no tokens, row 0, has none.
        own_terms = np.concatenate([[0.0], OWN_SHARE * np.exp(-distance / OWN_LENGTH) @ weights])

        knots = 2.0 ** (np.arange(DOUBLINGS * KNOTS_PER_DOUBLING + 1) / KNOTS_PER_DOUBLING)  # Mean contexts.
        batch, zeros = np.arange(most_decodes + 1.0), np.zeros(most_decodes + 1)
        batch[0] = 1.0  # A step of 0 decodes does not occur; 1 avoids log2(0).
        # Coordinate 2 is the mean context; all others of a step of decodes follow from its batch.
        batch_z = step_coordinates(np.column_stack([batch, zeros, batch, zeros, zeros]))
        by_batch = _covariance_product(batch_z, anchors, (0, 1, 3, 4, 5, 6)) * weights
        context_z = np.column_stack([np.log2(knots)] * len(LENGTHS))
        by_context = _covariance_product(context_z, anchors, (2,))
        rows = np.ceil(batch / 8).astype(int)  # N in eights, of decodes alone.
        decode_factors = np.exp(by_batch @ by_context.T + own_terms[rows, None])

        # Prefills alone have no decodes and no context of decodes, so those factors of k are constant too.
        # Coordinates of two kinds of steps: prefills alone, prefills with decodes; the last two say so.
        kinds = np.array([[0.0] * 5 + [1, 0], [0.0] * 5 + [1, 1]])
        weights_prefills = weights * _covariance_product(kinds[:1], anchors, (1, 2, 5, 6))[0]
        weights_both = weights * _covariance_product(kinds[1:], anchors, (5, 6))[0]
        steps = np.column_stack([anchors[:, :5] * _SCALES[:5], weights_prefills, weights_both])
        return Compiled(
            code=CORRECTED,
            numbers=(*self.formula_s, *_SCALES[:5], self.h_s),
            tables=(own_terms, steps.ravel(), decode_factors.ravel(), knots),
            widths=(len(steps), len(knots), KNOTS_PER_DOUBLING, int(self.context_step)),
        )


def in_context_steps(X: Floats, context_step: float) -> Floats:
    """The steps with decodes' mean context rounded up to a multiple of `context_step` tokens."""
    if context_step == 1:
        return X
    rounded = X.copy()
    # The simulator's kernel rounds down too.
    context = np.floor(X[:, KV_TOKENS] / np.maximum(X[:, DECODES], 1))
    rounded[:, KV_TOKENS] = X[:, DECODES] * np.ceil(context / context_step) * context_step
    return rounded


def uncorrected_s(X: Floats, coefficients_s: Floats) -> Floats:
    """Seconds of the steps (n, 5) by g alone, with these s, s_p, c, a, b, d."""
    tokens, pairs, decodes, kv_tokens, prefills = X.T
    floor, prefill_floor, slope, a, b, d = coefficients_s
    p = np.where(prefills > 0, PREFILL_CORNER, DECODE_CORNER)
    dense = ((floor + prefill_floor * (prefills > 0)) ** p + (slope * tokens) ** p) ** (1 / p)
    return np.asarray(dense + a * pairs + b * decodes + d * kv_tokens)


def step_coordinates(X: Floats) -> Floats:
    """The coordinates z of the steps, (n, 7)."""
    tokens, pairs, decodes, kv_tokens, prefills = X.T
    return np.column_stack(
        [
            np.log2(np.ceil(tokens / 8) * 8),
            np.log2(1 + decodes),
            np.log2(1 + kv_tokens / np.maximum(decodes, 1)),
            np.log2(1 + prefills),
            np.log2(1 + pairs / np.maximum(tokens - decodes, 1)),
            prefills > 0,
            decodes > 0,
        ]
    ).astype(float)


def step_covariance(z: Floats, others: Floats) -> Floats:
    """The covariance k between the rows of z and of others, (n, m)."""
    distance = np.abs(z[:, None, 0] - others[None, :, 0])
    return np.asarray(
        _covariance_product(z, others, range(len(LENGTHS))) + OWN_SHARE * np.exp(-distance / OWN_LENGTH)
    )


def _covariance_product(z: Floats, others: Floats, coordinates: Iterable[int]) -> Floats:
    """The factors of k's first term that belong to these coordinates, multiplied: (n, m)."""
    exponent, product = 0.0, 1.0
    for i in coordinates:
        x = _SCALES[i] * np.abs(z[:, None, i] - others[None, :, i])
        exponent = exponent + x
        if i > 0:
            product = product * (1 + x)
    return np.asarray(product * np.exp(-exponent))
