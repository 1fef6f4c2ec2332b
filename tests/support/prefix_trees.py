"""The worked example of a prefix tree."""

from __future__ import annotations

import numpy as np

from planner.solvers.prefix_demand import PrefixDemand

TOKEN_S = 1e-4


def tree(parent: list[int], tokens: list[int], rate_rps: list[float], rest_s: float) -> PrefixDemand:
    """TOKEN_S for every token, and `rest_s` for what no cache spares."""
    prefill_s = TOKEN_S * np.array(tokens, float)
    work_s = prefill_s.copy()
    for v, above in enumerate(parent):
        work_s[v] += work_s[above] if above >= 0 else 0.0
    return PrefixDemand(
        np.array(parent), np.array(tokens), prefill_s, np.array(rate_rps, float), work_s + rest_s
    )


def tools() -> PrefixDemand:
    """sys -> A, B, C; A -> A1, A2. 0.1 ms per token; a suffix of 200 tokens and 20 ms of decode: 40 ms."""
    return tree([-1, 0, 0, 0, 1, 1], [500, 2000, 1500, 3000, 1200, 800], [0, 4, 6, 2, 30, 3], 0.04)
