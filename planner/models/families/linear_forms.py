"""Published step times that are linear in their coefficients: Preble's, Aladdin's and DistServe's.

Preble (Srivatsa et al. 2024, arXiv:2407.00023, section 3.2 and Appendix B). Its E2 scheduler needs the
seconds that a request adds, not those of a batch. Here context tokens are summed over the batch. The main
error of these forms is that they leave out the number of sequences.

    t_prefill = alpha_p + beta_p * (tokens that match no cached prefix)        [s]
    t_decode  = alpha_d + beta_d * (context tokens)                            [s]

Aladdin (Nie et al. 2024, arXiv:2405.06856, section 3), all coefficients >= 0, as the paper demands of eq. 3:

    t_prefill = c1 + k1 sum l_in                                  (eq. 2)  [s]
    t_decode  = (k2 l_ave + c2) b + c3 = c3 + c2 D + k2 K, b > 1  (eq. 3)  [s]

where b = D is the number of decodes, l_ave their mean context, and K = l_ave b their context together.

DistServe (Zhong et al. 2024, arXiv:2401.09670, Appendix A, as its released simulator fits them):

    t_prefill = a + b sum l_i + c sum l_i^2                     GEMMs linear, attention quadratic    [s]
    t_decode  = a + b sum ctx_i + c batch                       a, b, c differ from `large_batch` on [s]

The paper multiplies its constants by counts of FLOPs or bytes (in its symbols 4 t h^2 + 2 t h m, 3 h t_2 /
block, ...). These are fixed for one LLM, so they are part of a, b, c here. With n_i new tokens of prompt i
and A_p = sum n_i (n_i + 1) / 2, the pairs of tokens that attend (`prefill_pairs` of a step table), sum l_i^2
is 2 A_p - sum n_i where nothing is cached. The released fit lets coefficients be negative (one is); here they
are >= 0. The time of a decode may jump at `large_batch`, as in the paper; `planner.models.family_choice`
reports such a jump.
"""

import numpy as np

from planner.models.families.step_family import TwoPhases, fit_nonnegative, prefill_tokens, squared_lengths
from planner.models.latency import DECODES, KV_TOKENS, Array

# The released simulator's threshold between small and large batches of decodes.
LARGE_BATCH = 95
_LEAST_STEPS = 3  # Three coefficients of `decode_` (a, b, c) need three distinct steps.


class LinearPhases(TwoPhases):
    """For each phase a form that is linear in the columns of X; `prefill_` and `decode_` hold the
    coefficients, >= 0, in the order of the columns. For `beyond` see `StepFamily` (step_family.py).
    """

    def __init__(self, *, beyond: str = "raise") -> None:
        self.beyond = beyond

    def _prefill_columns(self, X: Array) -> Array:
        """The columns (n, k) that the time of prefills is linear in: those of Preble and Aladdin."""
        return np.column_stack([np.ones(len(X)), prefill_tokens(X)])

    def _decode_columns(self, X: Array) -> Array:
        """The columns (n, k) that the time of decodes is linear in."""
        raise NotImplementedError

    def _fit_prefill(self, X: Array, y: Array) -> None:
        self.prefill_ = fit_nonnegative(self._prefill_columns(X), y)

    def _fit_decode(self, X: Array, y: Array) -> None:
        self.decode_ = fit_nonnegative(self._decode_columns(X), y)

    def _predict_prefill(self, X: Array) -> Array:
        return np.asarray(self._prefill_columns(X) @ self.prefill_)

    def _predict_decode(self, X: Array) -> Array:
        return np.asarray(self._decode_columns(X) @ self.decode_)


class PrebleSteps(LinearPhases):
    """Preble's forms; the coefficients of each phase are alpha and beta."""

    def _decode_columns(self, X: Array) -> Array:
        return np.column_stack([np.ones(len(X)), X[:, KV_TOKENS]])


class AladdinSteps(LinearPhases):
    """Aladdin's forms; `prefill_` is c1 and k1, `decode_` is c3, c2 and k2.

    The paper has eq. 3 for batches above one and calls a batch of one nearly constant. Here a batch of one is
    fitted with the rest, because its context adds no more than eq. 3 says.
    """

    def _decode_columns(self, X: Array) -> Array:
        return np.column_stack([np.ones(len(X)), X[:, DECODES], X[:, KV_TOKENS]])


class DistServeForm(LinearPhases):
    """DistServe's forms; `prefill_` (3,) and `decode_` (2, 3) hold a, b, c, the second row for large batches.

    If small or large batches have fewer than three distinct steps, they take the coefficients of the other
    set; if both have, one set is fitted to all steps.
    """

    def __init__(self, *, large_batch: int = LARGE_BATCH, beyond: str = "raise") -> None:
        super().__init__(beyond=beyond)
        self.large_batch = large_batch

    def _prefill_columns(self, X: Array) -> Array:
        return np.column_stack([super()._prefill_columns(X), squared_lengths(X)])

    def _decode_columns(self, X: Array) -> Array:
        return np.column_stack([np.ones(len(X)), X[:, KV_TOKENS], X[:, DECODES]])

    def _fit_decode(self, X: Array, y: Array) -> None:
        # The steps (n,) that each set of coefficients is fitted to: small batches, and large ones.
        fitted_to = [X[:, DECODES] < self.large_batch, X[:, DECODES] >= self.large_batch]
        has_enough = [len(np.unique(X[steps], axis=0)) >= _LEAST_STEPS for steps in fitted_to]
        if not all(has_enough):  # Both sets get the same numbers.
            steps = fitted_to[has_enough.index(True)] if any(has_enough) else np.full(len(X), True)
            fitted_to = [steps, steps]
        self.decode_ = np.array(
            [fit_nonnegative(self._decode_columns(X[steps]), y[steps]) for steps in fitted_to]
        )

    def _predict_decode(self, X: Array) -> Array:
        row = (X[:, DECODES] >= self.large_batch).astype(int)  # The row of `decode_` for each step.
        return np.asarray((self._decode_columns(X) * self.decode_[row]).sum(axis=1))
