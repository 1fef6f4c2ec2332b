"""Step times in the forms of other programs, exactly: what the simulator replays their results with.

A form knows how to write itself down for the kernel (`planner.simulator.seconds`); `StepLatency` and
`planner.models.correction.CorrectedFormula` do too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FIVE, SPLITWISE_LOOKUP, VIDUR_TABLES, DISTSERVE_FIT, CORRECTED = range(5)


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """Numbers and tables of a form as the kernel reads them; `code` says how."""

    code: int
    numbers: tuple[float, ...]
    tables: tuple[Floats, ...] = ()
    widths: tuple[int, ...] = ()


class StepForm(Protocol):
    """Seconds of a step, for steps of up to so many tokens and decodes."""

    def compiled(self, most_tokens: int, most_decodes: int) -> Compiled: ...


@dataclass(frozen=True, slots=True, eq=False)
class SplitwiseLookup:
    """Splitwise's simulator: prompts by their tokens, decodes by their number, each interpolated between the
    knots and extrapolated beyond.

    A step with both takes `mixed_factor` times a prompt of all its tokens, a decode being one. Its
    `token_s` is by *tokens* in the profile and looked up by *sequences*: so it is in the program, and 64
    decodes cost what one does. With `b_s` and `d_s`, per decode and per KV token, and one value in `token_s`
    it is an honest fit instead; then prompts are looked up by their own tokens.
    """

    knots_tokens: tuple[float, ...]
    prompt_s: tuple[float, ...]
    token_s: tuple[float, ...]
    mixed_factor: float = 1.1
    b_s: float = 0.0
    d_s: float = 0.0

    def compiled(self, most_tokens: int, most_decodes: int) -> Compiled:
        is_fit = len(self.token_s) == 1
        tokens = np.arange(most_tokens + 1, dtype=float)
        prompt = interpolated(tokens, self.knots_tokens, self.prompt_s)
        token = (
            np.full(len(tokens), self.token_s[0])
            if is_fit
            else interpolated(tokens, self.knots_tokens, self.token_s)
        )
        return Compiled(
            SPLITWISE_LOOKUP, (self.mixed_factor, self.b_s, self.d_s, float(not is_fit)), (prompt, token)
        )


@dataclass(frozen=True, slots=True, eq=False)
class VidurTables:
    """Vidur's predictor, tabulated: `linear_s` (N / 8,) by tokens in eights, `prefill_s` by cached tokens in
    sixty-fours and by the root of the summed squares of the chunks, `decode_s` by decodes and by their mean
    context in sixty-fours. Attention takes `prefill_over_frac` and `decode_over_frac` more where there are
    several. Sending to the next pipeline stage takes `send_s`, and `send_s_per_token`. The simulator refuses
    a step beyond the tables.
    """

    linear_s: Floats
    prefill_s: Floats  # (C, edge)
    decode_s: Floats  # (D, context)
    prefill_over_frac: float = 0.0
    decode_over_frac: float = 0.0
    send_s_per_token: float = 0.0
    send_s: float = 0.0

    def compiled(self, most_tokens: int, most_decodes: int) -> Compiled:
        return Compiled(
            VIDUR_TABLES,
            (self.prefill_over_frac, self.decode_over_frac, self.send_s_per_token, self.send_s),
            (self.linear_s, self.prefill_s.ravel(), self.decode_s.ravel()),
            (len(self.linear_s), *self.prefill_s.shape, self.decode_s.shape[1], len(self.decode_s)),
        )


@dataclass(frozen=True, slots=True)
class DistServeSteps:
    """DistServe's fits: prefill a + b sum n + c sum n^2, decodes a + b K + c D below and from `threshold` on,
    all over pp; `per_rank_s` times pp beside prefills, and on the first rank the engine's overhead.
    """

    prefill_s: tuple[float, float, float]
    decode_small_s: tuple[float, float, float]
    decode_large_s: tuple[float, float, float]
    threshold: int
    per_rank_s: float
    overhead_s: float
    overhead_s_per_token: float

    def compiled(self, most_tokens: int, most_decodes: int) -> Compiled:
        numbers = (
            *self.prefill_s, *self.decode_small_s, *self.decode_large_s, self.per_rank_s, self.overhead_s,
            self.overhead_s_per_token,
        )  # fmt: skip
        return Compiled(DISTSERVE_FIT, numbers, (np.zeros(1),), (self.threshold,))


def interpolated(x: Floats, knots: tuple[float, ...], values: tuple[float, ...]) -> Floats:
    """Linear between the knots and on from the outermost two."""
    at, y = np.array(knots), np.array(values)
    i = np.clip(np.searchsorted(at, x) - 1, 0, len(at) - 2)
    return np.asarray(y[i] + (x - at[i]) * (y[i + 1] - y[i]) / (at[i + 1] - at[i]))
