"""Preble's regression (Srivatsa et al. 2024, arXiv:2407.00023, section 3.2 and Appendix B).

    t_prefill = alpha_p + beta_p * (tokens that match no cached prefix)        [s]
    t_decode  = alpha_d + beta_d * (context tokens)                            [s]

Preble's E2 scheduler needs the seconds that a request adds, not those of a batch. Here context tokens are
summed over the batch. The form leaves out the number of sequences, which is its main error.
"""

from __future__ import annotations

import numpy as np

from planner.models.families.step_family import TwoPhases, fit_nonnegative, ones_column, prefill_tokens
from planner.models.latency import KV_TOKENS, Array


class PrebleSteps(TwoPhases):
    """The forms above; `prefill_s_` (2,) and `decode_s_` (2,) hold alpha and beta, >= 0."""

    def __init__(self, *, beyond: str = "raise") -> None:
        self.beyond = beyond

    def _fit_prefill(self, X: Array, y: Array) -> None:
        self.prefill_s_ = fit_nonnegative(np.column_stack([ones_column(X), prefill_tokens(X)]), y)

    def _fit_decode(self, X: Array, y: Array) -> None:
        self.decode_s_ = fit_nonnegative(np.column_stack([ones_column(X), X[:, KV_TOKENS]]), y)

    def _predict_prefill(self, X: Array) -> Array:
        return np.asarray(self.prefill_s_[0] + self.prefill_s_[1] * prefill_tokens(X))

    def _predict_decode(self, X: Array) -> Array:
        return np.asarray(self.decode_s_[0] + self.decode_s_[1] * X[:, KV_TOKENS])
