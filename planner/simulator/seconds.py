"""Seconds of a step, in each form of step times the simulator knows.

FIVE              t = f(N) + a A_p + b D + d K + e P, with h in f    (planner.models.latency)
SPLITWISE_LOOKUP  prompts p(tokens); decodes q(D) + b D + d K; both m p(tokens) + b D + d K
VIDUR_TABLES      u(ceil(N / 8)) + v(C, sqrt(sum n^2)) (1 + o [P > 1])
                  + w(D, ceil(K / D / 64)) (1 + o' [D > 1])
DISTSERVE_FIT     a + b sum n + c sum n^2, or a' + b' K + c' D; the first stage o + o' context tokens more

C = sum over the chunks of ceil(cached / 64). A step beyond the tables never ends. What p counts besides the prompts' tokens is a setting of the
form. Tables are made by `planner.models.forms`.
"""

from __future__ import annotations

import numpy as np

from planner.models.forms import DISTSERVE_FIT, FIVE, SPLITWISE_LOOKUP
from planner.simulator.compiled import hot_jit

UNBOUNDED = np.int64(2**62)


@hot_jit
def step_seconds(state, kind, decodes, kv_tokens, prefill, pairs, squares, cached_64, chunks):
    """(stage, extra, send, growth, steps) of one step of a worker of type `kind`.

    Each of the pp stages takes `stage` seconds, the first `extra` more, and all but the last `send` more.
    A step of decodes alone may be followed by the same ones: by `steps` steps in all, each `growth` longer.
    """
    k, at, width, tables = kind.k, kind.at, kind.width, state.tables
    if kind.form == FIVE:
        t = (
            tables[at[0] + decodes + prefill] + k[0] * pairs + k[1] * decodes + k[2] * kv_tokens
            + k[3] * chunks
        )  # fmt: skip
        return t / kind.pp, 0.0, 0.0, k[2] * decodes, UNBOUNDED
    if kind.form == SPLITWISE_LOOKUP:
        beside = k[1] * decodes + k[2] * kv_tokens
        if prefill == 0:
            return (tables[at[1] + decodes] + beside) / kind.pp, 0.0, 0.0, k[2] * decodes, UNBOUNDED
        t = tables[at[0] + prefill + (decodes if k[3] > 0.0 else 0)]
        if decodes > 0:
            t *= k[0]
        return (t + beside) / kind.pp, 0.0, 0.0, 0.0, UNBOUNDED
    if kind.form == DISTSERVE_FIT:
        extra = k[10] + k[11] * (prefill + kv_tokens - decodes)
        if prefill > 0:
            t = k[0] + k[1] * prefill + k[2] * squares
            return t / kind.pp + k[9] * kind.pp, extra, 0.0, 0.0, UNBOUNDED
        i = 3 if decodes < width[0] else 6
        t = k[i] + k[i + 1] * kv_tokens + k[i + 2] * decodes
        return t / kind.pp, extra, 0.0, k[i + 1] * decodes / kind.pp + k[11] * decodes, UNBOUNDED
    steps = UNBOUNDED
    eights = (prefill + decodes + 7) // 8
    if eights >= width[0]:
        return np.inf, 0.0, 0.0, 0.0, steps
    t = tables[at[0] + eights]
    if chunks > 0:
        edge = int(np.rint(np.sqrt(squares)))
        if cached_64 >= width[1] or edge >= width[2]:
            return np.inf, 0.0, 0.0, 0.0, steps
        t += tables[at[1] + int(cached_64) * width[2] + edge] * (1.0 + (k[0] if chunks > 1 else 0.0))
    if decodes > 0:
        context = int(kv_tokens) // decodes
        column = (context + 63) // 64
        if column >= width[3] or decodes >= width[4]:
            return np.inf, 0.0, 0.0, 0.0, steps
        t += tables[at[2] + decodes * width[3] + column] * (1.0 + (k[1] if decodes > 1 else 0.0))
        steps = column * 64 - context + 1
    return t / kind.pp, 0.0, k[2] * (prefill + decodes) + k[3], 0.0, steps
