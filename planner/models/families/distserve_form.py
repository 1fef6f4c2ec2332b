"""DistServe's forms (Zhong et al. 2024, arXiv:2401.09670, Appendix A, as its released simulator fits them).

    t_prefill = a + b sum l_i + c sum l_i^2                     GEMMs linear, attention quadratic    [s]
    t_decode  = a + b sum ctx_i + c batch                       one set of a, b, c below `large_batch`,
                                                                another from there on                [s]

The paper's constants have a FLOP or byte count in front (4 t h^2 + 2 t h m, 3 h t_2 / block, ...), which are
fixed for one LLM and fall into a, b, c. With n_i new tokens of prompt i and A_p = sum n_i (n_i + 1) / 2, the
pairs of tokens that attend (`prefill_pairs` of a step table), sum l_i^2 is 2 A_p - sum n_i where nothing is
cached. The released fit lets coefficients be negative (one is); here they are >= 0. The time of a decode may
jump at `large_batch`, as in the paper; `planner.models.family_choice` reports such a jump.
"""

from __future__ import annotations

import numpy as np

from planner.models.families.step_family import (
    TwoPhases,
    fit_nonnegative,
    ones_column,
    prefill_tokens,
    squared_lengths,
)
from planner.models.latency import DECODES, KV_TOKENS, Array

# The released simulator's threshold between small and large batches of decodes.
LARGE_BATCH = 95
# Three coefficients need at least this many distinct steps.
_LEAST_ROWS = 3


class DistServeForm(TwoPhases):
    """The forms above; `prefill_` (3,) and `decode_` (2, 3) hold a, b, c, the second row for large batches.

    If small or large batches have fewer than three distinct steps, they take the coefficients of the other
    set; if both have, one set is fitted to all steps.
    """

    def __init__(self, *, large_batch: int = LARGE_BATCH, beyond: str = "raise") -> None:
        self.large_batch = large_batch
        self.beyond = beyond

    def _fit_prefill(self, X: Array, y: Array) -> None:
        self.prefill_ = fit_nonnegative(_prefill_columns(X), y)

    def _fit_decode(self, X: Array, y: Array) -> None:
        sides = [X[:, DECODES] < self.large_batch, X[:, DECODES] >= self.large_batch]
        enough = [len(np.unique(X[side], axis=0)) >= _LEAST_ROWS for side in sides]
        if not all(enough):  # One set for both: of the side that has enough, or else of all steps.
            side = sides[enough.index(True)] if any(enough) else np.full(len(X), True)
            sides = [side, side]
        self.decode_ = np.array([fit_nonnegative(_decode_columns(X[side]), y[side]) for side in sides])

    def _predict_prefill(self, X: Array) -> Array:
        return np.asarray(_prefill_columns(X) @ self.prefill_)

    def _predict_decode(self, X: Array) -> Array:
        side = (X[:, DECODES] >= self.large_batch).astype(int)
        return np.asarray((_decode_columns(X) * self.decode_[side]).sum(axis=1))


def _prefill_columns(X: Array) -> Array:
    return np.column_stack([ones_column(X), prefill_tokens(X), squared_lengths(X)])


def _decode_columns(X: Array) -> Array:
    return np.column_stack([ones_column(X), X[:, KV_TOKENS], X[:, DECODES]])
