"""Step times in the exact forms of other programs, with which the simulator reproduces their results.

The simulator's kernel reads each form as numbers and tables, which `compile_for_kernel` makes and
planner/simulator/step_times.py reads; `StepLatency` and `correction.CorrectedFormula` have that method too.
Forms that are read from a file also compute their shortest step (`shortest_s`). Unless that is above 0, the
file is refused, because simulated time would stand still or run backwards and never end.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from planner.errors import InputError

Floats = npt.NDArray[np.float64]

# The `code` of each form. FIVE_NUMBERS is that of `latency.StepLatency`. VIDUR_TABLES is made in
# benchmarks/vidur_tables.py.
FIVE_NUMBERS, SPLITWISE_LOOKUP, VIDUR_TABLES, DISTSERVE_FIT, CORRECTED, SPECULATIVE = range(6)


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """The numbers and tables of a form as the kernel reads them.

    `code` names the form. The form says what `numbers` mean, and which sizes of its tables `widths` has.
    """

    code: int
    numbers: tuple[float, ...]
    tables: tuple[Floats, ...] = ()
    widths: tuple[int, ...] = ()


class StepForm(Protocol):
    """Any form of step times that the kernel can read."""

    def compile_for_kernel(self, most_tokens: int, most_decodes: int) -> Compiled:
        """The numbers and tables of the form, for steps of up to this many tokens and decodes."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SplitwiseLookup:
    """The form of Splitwise's simulator: times at knots, interpolated between and extrapolated beyond them.

    A step of prompts takes `prompt_s` at its tokens, a step of decodes `token_s` at the number of decodes. A
    step with both takes `mixed_factor` times as long as a prompt with all its tokens, one of them per decode;
    1.1 is the factor of that program. Splitwise's profile gives `token_s` by *tokens*, but its program looks
    it up by *sequences*, so 64 decodes cost what one does; we keep that mistake, to reproduce its results.

    With a single value in `token_s` the form is a fit without the mistake: a decode adds `b_s`, a KV token
    `d_s`, and prompts are looked up by their own tokens.
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
        """Seconds of the shortest step of up to this many tokens and decodes, and the name of the list of
        times that gives it: "prompt_s" or "token_s". KV tokens make no step shorter.
        """
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
        """The numbers of SPLITWISE_LOOKUP, and two tables: `prompt_s` by tokens and `token_s` by decodes."""
        is_fit = len(self.token_s) == 1  # Splitwise's own lookup has a time per knot.
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


@dataclass(frozen=True, slots=True)
class DistServeSteps:
    """DistServe's fits: prompts of n_1, n_2 ... tokens take a + b sum n_i + c sum n_i^2 in one step, D
    decodes with K tokens of context a + b K + c D.

    From `threshold` decodes on the numbers are `decode_large_s`. All times are divided by pp. In a step with
    prefills each pipeline rank adds `per_rank_s` times pp. The first rank adds the engine's overhead.
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

        A least-squares fit may have negative coefficients and positive times. But the simulator relies on
        decodes that do not get shorter with context, so a negative b is returned as if it were a step's time.
        """
        a, b, c = self.prefill_s
        n = np.arange(1.0, most_tokens + 1)
        # The sum of squares is between n and n times twice the longest context. The shorter time is at one of
        # these ends: which, depends on the sign of c.
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
        """The numbers of DISTSERVE_FIT; the width of its table is `threshold`."""
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
    """The values at `x`: linear between knots, and beyond them along the line of the two outermost."""
    knots_x, y = np.array(knots), np.array(values)
    i = np.clip(np.searchsorted(knots_x, x) - 1, 0, len(knots_x) - 2)
    return np.asarray(y[i] + (x - knots_x[i]) * (y[i + 1] - y[i]) / (knots_x[i + 1] - knots_x[i]))
