"""Vidur's random forests over triaged operators (Agrawal et al. 2024, arXiv:2405.05465, section 4.3 and 4.4).

    t = token-level(N) + communication(N) + prefill attention(p, cached) + decode attention(D, K)       [s]

    token-level         GEMMs, norms and activations are an operator each, whose time depends only on the
                        tokens of the step, rounded up to eights; that of the LM head only on the sequences
    communication       all-reduce of N tokens, an operator as well
    prefill attention   a batch of prefills p_i counts as ONE prefill of length p = sqrt(sum p_i^2)
    decode attention    the KV tokens read, and how many sequences share them

With c_i tokens cached before n_i new ones, p = sqrt(sum n_i (n_i + 2 c_i)) = sqrt(2 A_p - sum n_i): the
prompt that makes as many query-key pairs from an empty cache. A forest averages times it has seen, so beyond
the profile it stays at the last value, whatever `beyond` (step_family.py) says. It is not monotone.
"""

from typing import Self

import numpy as np
import pandas as pd
from sklearn.ensemble import RandomForestRegressor

from planner.errors import InputError
from planner.models.families.step_family import StepFamily, prefill_tokens, squared_lengths
from planner.models.latency import DECODES, KV_TOKENS, PREFILLS, TOKENS, Array
from planner.models.step_tables import ATTN_DECODE, ATTN_PREFILL, HEAD

# Vidur rounds the tokens of a step up to multiples of this.
TOKEN_TILE = 8
TOTAL = "total"  # Stands for the whole step where the times of operators are not known.
# Operators of an engine: one attention kernel for all sequences, and the time outside all operators.
ATTN, REST = "attn", "rest"


def equivalent_prefill_tokens(X: Array) -> Array:
    """Length of the one prefill that stands for all those of a step: p of the module's docstring."""
    return np.asarray(np.sqrt(squared_lengths(X)))


class VidurForest(StepFamily):
    """The form of the module's docstring. `fit(X, y, operators)`, with a column of seconds per operator
    (`StepTable.operators`), fits one forest for each and ignores y. Without `operators` one forest learns the
    whole step from all features.

    Times are predicted on a logarithmic scale, because an SLO is missed by a ratio. Vidur searches 27
    settings of the forest over 10 folds (half a CPU hour for one LLM); here `trees` is set by hand, and all
    else is scikit-learn's default.
    """

    def __init__(self, *, trees: int = 60, seed: int = 0, beyond: str = "raise") -> None:
        self.trees = trees
        self.seed = seed
        self.beyond = beyond

    def fit(self, X: Array, y: Array, operators: pd.DataFrame | None = None) -> Self:
        """Fit a forest for each operator, or one for the whole step, to X (n, 5) and seconds y (n,)."""
        # An engine has an operator for each kind of attention, or one for both (ATTN).
        missing = set() if operators is None else {ATTN_PREFILL, ATTN_DECODE} - set(operators)
        if operators is not None and missing and ATTN not in operators:
            raise InputError(f"Vidur's operators: lacks {', '.join(sorted(missing))}; needs both attentions")
        X, y = self._checked(X, y)
        self.latency_ = None  # A forest has no form of planner/models/latency.py (step_family.py).
        parts = {TOTAL: y}
        if operators is not None:
            parts = {str(name): seconds.to_numpy(float) for name, seconds in operators.items()}
        self.forests_ = {}
        for name, seconds in parts.items():
            rows = seconds > 0  # The steps that ran the operator.
            if rows.any():
                forest = RandomForestRegressor(self.trees, random_state=self.seed)
                self.forests_[name] = forest.fit(operator_features(name, X[rows]), np.log(seconds[rows]))
        return self

    def _predict(self, X: Array) -> Array:
        """Seconds (n,) of steps X (n, 5): the sum over the operators that each step runs."""
        t = np.zeros(len(X))
        for name, forest in self.forests_.items():
            rows = _runs_operator(name, X)
            if rows.any():
                t[rows] += np.exp(forest.predict(operator_features(name, X[rows])))
        return t


def operator_features(name: str, X: Array) -> Array:
    """The features that the operator's time depends on, after Vidur's triage; all features for the total."""
    tokens = np.ceil(X[:, [TOKENS]] / TOKEN_TILE) * TOKEN_TILE
    equivalent_tokens, new_tokens = equivalent_prefill_tokens(X)[:, None], prefill_tokens(X)[:, None]
    decodes, kv_tokens, prefills = X[:, [DECODES]], X[:, [KV_TOKENS]], X[:, [PREFILLS]]
    if name == ATTN_PREFILL:
        return np.hstack([equivalent_tokens, new_tokens])
    if name == ATTN_DECODE:
        return np.hstack([decodes, kv_tokens])
    if name == HEAD:  # The sequences of the step.
        return decodes + prefills
    if name in (TOTAL, ATTN, REST):
        return np.hstack([tokens, equivalent_tokens, decodes, kv_tokens, prefills])
    return tokens


def _runs_operator(name: str, X: Array) -> Array:
    """Marks (n,) the steps that run the operator at all."""
    if name == ATTN_PREFILL:
        return np.asarray(X[:, PREFILLS] > 0)
    if name == ATTN_DECODE:
        return np.asarray(X[:, DECODES] > 0)
    return np.full(len(X), True)
