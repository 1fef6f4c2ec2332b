"""Aladdin's linear step times (Nie et al. 2024, arXiv:2405.06856, section 3).

    t_pre  = k1 sum l_in + c1                                     (eq. 2)  [s]
    t_dec  = (k2 l_ave + c2) b + c3 = k2 K + c2 D + c3, b > 1     (eq. 3)  [s]

All coefficients >= 0, as the paper demands of eq. 3.
"""

from __future__ import annotations

import numpy as np

from planner.models.families.step_family import TwoPhases, fit_nonnegative, ones_column, prefill_tokens
from planner.models.latency import DECODES, KV_TOKENS, Array


class AladdinSteps(TwoPhases):
    """Eq. 2 for prefills, eq. 3 for decodes [s]; `k1_s_, c1_s_` and `k2_s_, c2_s_, c3_s_` after `fit`.

    The paper has eq. 3 for batches above one and calls a batch of one nearly constant. Here a batch of one is
    fitted with the rest, because its context adds no more than eq. 3 says.
    """

    def __init__(self, *, beyond: str = "raise") -> None:
        self.beyond = beyond

    def _fit_prefill(self, X: Array, y: Array) -> None:
        self.c1_s_, self.k1_s_ = fit_nonnegative(np.column_stack([ones_column(X), prefill_tokens(X)]), y)

    def _fit_decode(self, X: Array, y: Array) -> None:
        self.c3_s_, self.c2_s_, self.k2_s_ = fit_nonnegative(
            np.column_stack([ones_column(X), X[:, DECODES], X[:, KV_TOKENS]]), y
        )

    def _predict_prefill(self, X: Array) -> Array:
        return np.asarray(self.c1_s_ + self.k1_s_ * prefill_tokens(X))

    def _predict_decode(self, X: Array) -> Array:
        return np.asarray(self.c3_s_ + self.c2_s_ * X[:, DECODES] + self.k2_s_ * X[:, KV_TOKENS])
