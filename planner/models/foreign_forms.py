"""Step times in the exact forms of other programs, with which the simulator reproduces their results.

A form turns itself into numbers and tables for the kernel (`compile_for_kernel`, read by
planner/simulator/step_times.py); `StepLatency` and `correction.CorrectedFormula` do so too. Forms that are
read from a file also compute their shortest step (`shortest_s`), so that a file with negative step times is
refused: simulated time would run backwards and never end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from planner.errors import InputError

Floats = npt.NDArray[np.float64]

# The `code` of each form: FIVE is `latency.StepLatency`, with its five numbers.
FIVE, SPLITWISE_LOOKUP, VIDUR_TABLES, DISTSERVE_FIT, CORRECTED, SPECULATIVE = range(6)


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """The numbers and tables of a form as the kernel reads them. `code` names the form; what the numbers and
    `widths` (sizes of the tables) mean depends on it.
    """

    code: int
    numbers: tuple[float, ...]
    tables: tuple[Floats, ...] = ()
    widths: tuple[int, ...] = ()


class StepForm(Protocol):
    """Any form of step times that the kernel can read."""

    def compile_for_kernel(self, most_tokens: int, most_decodes: int) -> Compiled: ...


@dataclass(frozen=True, slots=True, eq=False)
class SplitwiseLookup:
    """The form of Splitwise's simulator: `prompt_s` by tokens for prompts, `token_s` by their number for
    decodes, each interpolated between the knots and extrapolated beyond.

    A step with both phases takes `mixed_factor` times as long as a prompt with all its tokens, one of them
    per decode. Splitwise's program looks `token_s`, which its profile gives by *tokens*, up by number of
    *sequences*, so 64 decodes cost what one does; that mistake is kept. With one value in `token_s`, and
    `b_s` per decode and `d_s` per KV token, the form is a fit without it; then prompts are looked up by their
    own tokens.
    """

    knots_tokens: tuple[float, ...]
    prompt_s: tuple[float, ...]
    token_s: tuple[float, ...]
    mixed_factor: float = 1.1
    b_s: float = 0.0
    d_s: float = 0.0

    def __post_init__(self) -> None:
        knots = np.array(self.knots_tokens)
        if len(knots) < 2 or not (np.diff(knots) > 0).all() or knots[0] < 0:
            raise InputError(
                f"knots_tokens: must be two or more numbers >= 0 that rise, found {list(self.knots_tokens)}"
            )
        if len(self.prompt_s) != len(knots):
            raise InputError(
                f"prompt_s: must have a time for each of the {len(knots)} knots_tokens, found "
                f"{len(self.prompt_s)}"
            )
        if len(self.token_s) not in (1, len(knots)):
            raise InputError(
                f"token_s: must have one time, or one for each of the {len(knots)} knots_tokens, found "
                f"{len(self.token_s)}"
            )
        if not 0 < self.mixed_factor < np.inf:
            raise InputError(f"mixed_factor: must be > 0, found {self.mixed_factor:g}")
        for name, seconds in (("b_s", self.b_s), ("d_s", self.d_s)):
            if not 0 <= seconds < np.inf:
                raise InputError(f"{name}: must be >= 0, found {seconds:g}")

    def shortest_s(self, most_tokens: int, most_decodes: int, most_kv_tokens: int) -> tuple[float, str]:
        """Seconds of the shortest step of up to this many tokens and decodes, and the list that gives it."""
        shortest = []
        for name, times_s, most in (
            ("prompt_s", self.prompt_s, most_tokens),
            ("token_s", self.token_s, most_decodes),
        ):
            if len(times_s) == 1:
                shortest.append((times_s[0], name))
                continue
            # A piecewise linear time is shortest at a knot or at an end of the range.
            corners = np.unique(np.clip([1, most, *self.knots_tokens], 1, most)).astype(float)
            shortest.append((float(interpolate_linearly(corners, self.knots_tokens, times_s).min()), name))
        return min(shortest)

    def compile_for_kernel(self, most_tokens: int, most_decodes: int) -> Compiled:
        is_fit = len(self.token_s) == 1  # Not Splitwise's own lookup, which has a time per knot.
        tokens = np.arange(most_tokens + 1, dtype=float)
        prompt = interpolate_linearly(tokens, self.knots_tokens, self.prompt_s)
        token = (
            np.full(len(tokens), self.token_s[0])
            if is_fit
            else interpolate_linearly(tokens, self.knots_tokens, self.token_s)
        )
        return Compiled(
            SPLITWISE_LOOKUP, (self.mixed_factor, self.b_s, self.d_s, float(not is_fit)), (prompt, token)
        )


@dataclass(frozen=True, slots=True, eq=False)
class VidurTables:
    """Vidur's predictor as tables.

    `linear_s` (N / 8,) is indexed by tokens / 8. `prefill_s` (C, edge) is indexed by cached tokens / 64, and
    by the root of the summed squares of the chunks. `decode_s` (D, context) is indexed by decodes, and by
    their mean context / 64.

    Attention takes longer by `prefill_over_frac` or `decode_over_frac` where a step has several prefills or
    decodes. Sending to the next pipeline stage takes `send_s`, and `send_s_per_token`. The simulator refuses
    a step beyond the tables.
    """

    linear_s: Floats
    prefill_s: Floats
    decode_s: Floats
    prefill_over_frac: float = 0.0
    decode_over_frac: float = 0.0
    send_s_per_token: float = 0.0
    send_s: float = 0.0

    def compile_for_kernel(self, most_tokens: int, most_decodes: int) -> Compiled:
        return Compiled(
            VIDUR_TABLES,
            (self.prefill_over_frac, self.decode_over_frac, self.send_s_per_token, self.send_s),
            (self.linear_s, self.prefill_s.ravel(), self.decode_s.ravel()),
            (len(self.linear_s), *self.prefill_s.shape, self.decode_s.shape[1], len(self.decode_s)),
        )


@dataclass(frozen=True, slots=True)
class DistServeSteps:
    """DistServe's fits: prefills take a + b sum n + c sum n^2, decodes a + b K + c D, with other numbers from
    `threshold` decodes on; all are divided by pp. The first pipeline rank adds the engine's overhead, and a
    step with prefills `per_rank_s` times pp.
    """

    prefill_s: tuple[float, float, float]
    decode_small_s: tuple[float, float, float]
    decode_large_s: tuple[float, float, float]
    threshold: int
    per_rank_s: float
    overhead_s: float
    overhead_s_per_token: float

    def __post_init__(self) -> None:
        for name in ("prefill_s", "decode_small_s", "decode_large_s"):
            numbers = getattr(self, name)
            if len(numbers) != 3 or not np.isfinite(numbers).all():
                raise InputError(f"{name}: must be three finite numbers a, b, c, found {list(numbers)}")
        if self.threshold < 0 or self.threshold % 1:
            raise InputError(f"threshold: must be a whole number of decodes >= 0, found {self.threshold:g}")
        for name in ("per_rank_s", "overhead_s", "overhead_s_per_token"):
            if not 0 <= getattr(self, name) < np.inf:
                raise InputError(f"{name}: must be >= 0, found {getattr(self, name):g}")

    def shortest_s(self, most_tokens: int, most_decodes: int, most_kv_tokens: int) -> tuple[float, str]:
        """Seconds of the shortest step of up to this many tokens, decodes and tokens of context, and the list
        that gives it.

        Coefficients of a least-squares fit may be negative while its times are not. But the simulator relies
        on decodes that do not get shorter with context, so a negative b is returned as if it were a step.
        """
        a, b, c = self.prefill_s
        n = np.arange(1.0, most_tokens + 1)
        # The sum of squares is between n and n times twice the longest context. c may be < 0, so the end that
        # gives the shorter time counts.
        prefill = a + b * n + np.minimum(c * n, c * n * 2 * max(most_kv_tokens, most_tokens))
        shortest = [(float(prefill.min()), "prefill_s")]
        small = (1, min(self.threshold - 1, most_decodes))
        large = (max(self.threshold, 1), most_decodes)
        for name, (least, most) in (("decode_small_s", small), ("decode_large_s", large)):
            a, b, c = getattr(self, name)
            if least <= most:
                shortest.append(
                    (min(a + b * k + c * d for d in (least, most) for k in (d, most_kv_tokens)), name)
                )
                if b < 0:
                    shortest.append((b, name))
        return min(shortest)

    def compile_for_kernel(self, most_tokens: int, most_decodes: int) -> Compiled:
        numbers = (
            *self.prefill_s,
            *self.decode_small_s,
            *self.decode_large_s,
            self.per_rank_s,
            self.overhead_s,
            self.overhead_s_per_token,
        )
        return Compiled(DISTSERVE_FIT, numbers, (np.zeros(1),), (self.threshold,))


def interpolate_linearly(x: Floats, knots: tuple[float, ...], values: tuple[float, ...]) -> Floats:
    """Linear interpolation between the knots, and along the outermost two beyond them."""
    knots_x, y = np.array(knots), np.array(values)
    i = np.clip(np.searchsorted(knots_x, x) - 1, 0, len(knots_x) - 2)
    return np.asarray(y[i] + (x - knots_x[i]) * (y[i + 1] - y[i]) / (knots_x[i + 1] - knots_x[i]))
