"""Seconds of one engine step.

A step runs prefill chunks i (n_i new tokens after c_i cached ones) and decodes j (context L_j, the new token
included). Five numbers describe it:

    N   = sum n_i + #decodes                 tokens through the dense layers
    A_p = sum n_i * (c_i + (n_i + 1) / 2)    query-key pairs of the prefills
    D   = #decodes,   K = sum L_j            sequences, and KV tokens the decodes read
    P   = #prefills

    t = f(N) + a A_p + b D + d K + e P + h       f piecewise linear, nondecreasing;  a, b, d, e, h >= 0
        + m K where P > 0                        m >= 0

m is what decodes take longer beside prefills: kernels that serve both in one launch (FlashAttention 2)
read the decodes' KV in the prefills' tiles, and no longer split it over the GPU. On an RTX PRO 6000 that
doubles d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from planner.errors import InputError
from planner.models.forms import FIVE, Compiled
from planner.models.spread import Spread

Array = npt.NDArray[np.float64]
Kind = Literal["kernels", "steps", "derived", "roofline", "given"]
"""What step times rest on: sums of measured kernels, measured steps (the host's time in them), those carried
over to another GPU by rooflines, the roofline alone, or what somebody wrote down without saying.
"""

ON_WALL = (
    "; by steps as long as they took on the wall"  # ends a basis that counts what others took of the cores
)


@dataclass(frozen=True, slots=True)
class StepLatency:
    """The formula above with numbers in it; what the simulator and the optimizer both predict with.

    `knots_tokens` and `f_s` are f's corners; beyond the last one f goes on with its last slope, below the
    first it is constant. `kind` says what the numbers rest on, `basis` the same in words, `mape_frac` is the
    held-out error of the fit, None where there is nothing to hold out. `max_context_tokens` is the longest
    context that was profiled, None for a formula from first principles. `uncertainty_frac` is the relative
    standard error a calibration left, None where there was none.
    """

    knots_tokens: tuple[float, ...]
    f_s: tuple[float, ...]
    a_s: float  # per query-key pair of a prefill
    b_s: float  # per decode sequence
    d_s: float  # per KV token read by decodes
    e_s: float  # per prefill
    h_s: float  # host overhead per step
    basis: str
    mape_frac: float | None = None
    max_context_tokens: float | None = None
    uncertainty_frac: float | None = None
    kind: Kind = "given"
    m_s: float = 0.0  # more per KV token read by decodes, in steps with prefills
    spread: Spread | None = None  # of other engines around these times; None: nobody knows

    def __post_init__(self) -> None:
        knots, f_s = np.array(self.knots_tokens), np.array(self.f_s)
        if len(knots) < 2 or len(knots) != len(f_s):
            raise InputError(f"step latency: {len(knots)} knots, {len(f_s)} values; need two or more of each")
        if not (np.diff(knots) > 0).all() or not (np.diff(f_s) >= 0).all() or not f_s[0] > 0:
            raise InputError("step latency: knots must increase, f must be > 0 and never fall")
        if knots[0] < 0:
            raise InputError(f"step latency: knots are tokens, must be >= 0, found {knots[0]:g}")
        if self.mape_frac is not None and not self.mape_frac >= 0:
            raise InputError(f"step latency: mape_frac is {self.mape_frac}, must be >= 0")
        if self.max_context_tokens is not None and not self.max_context_tokens > 0:
            raise InputError(f"step latency: max_context_tokens is {self.max_context_tokens}, must be > 0")
        if min(self.a_s, self.b_s, self.d_s, self.e_s, self.h_s, self.m_s) < 0:
            raise InputError("step latency: a, b, d, e, h and m must be >= 0")
        if self.uncertainty_frac is not None and not self.uncertainty_frac >= 0:
            raise InputError(f"step latency: uncertainty_frac is {self.uncertainty_frac}, must be >= 0")

    @property
    def is_measured(self) -> bool:
        """Whether steps or kernels were measured; else they are a guess."""
        return self.kind in ("kernels", "steps")

    @property
    def has_host(self) -> bool:
        """Whether the engine's host is in these seconds: steps were measured, and not kernels."""
        return self.h_s > 0 or self.kind in ("steps", "derived")

    def step_s(
        self,
        tokens: float | Array,
        pairs: float | Array = 0.0,
        decodes: float | Array = 0.0,
        kv_tokens: float | Array = 0.0,
        prefills: float | Array = 0.0,
    ) -> Array:
        """Seconds of a step with N, A_p, D, K and P as in the module's docstring; broadcasts."""
        knots, f_s = np.array(self.knots_tokens), np.array(self.f_s)
        slope = (f_s[-1] - f_s[-2]) / (knots[-1] - knots[-2])
        f = np.interp(tokens, knots, f_s) + slope * np.maximum(np.asarray(tokens) - knots[-1], 0.0)
        return np.asarray(
            f
            + self.a_s * np.asarray(pairs)
            + self.b_s * np.asarray(decodes)
            + (self.d_s + self.m_s * (np.asarray(prefills) > 0)) * np.asarray(kv_tokens)
            + self.e_s * np.asarray(prefills)
            + self.h_s
        )

    def compiled(self, most_tokens: int, most_decodes: int) -> Compiled:
        """For the simulator: f(N) + h for every N up to `most_tokens`."""
        table = self.step_s(np.arange(most_tokens + 1, dtype=float))
        return Compiled(FIVE, (self.a_s, self.b_s, self.d_s, self.e_s, self.m_s), (table,), (len(table),))

    def prefill_s(self, input_tokens: Array | Sequence[float] | float, budget_tokens: int) -> Array:
        """Seconds to prefill prompts alone on an idle engine, in chunks of `budget_tokens`."""
        n = np.asarray(input_tokens, dtype=float)
        whole = np.floor_divide(n, budget_tokens)
        rest = n - whole * budget_tokens
        chunks_s = whole * self.step_s(budget_tokens, prefills=1) + np.where(
            rest > 0, self.step_s(rest, prefills=1), 0.0
        )
        return np.asarray(chunks_s + self.a_s * n * (n + 1) / 2)

    def longer(self, share: float) -> StepLatency:
        """The same engine if every step took `share` longer, as it may by the fit's own error."""
        factor = 1 + share
        return replace(
            self,
            f_s=tuple(f * factor for f in self.f_s),
            a_s=self.a_s * factor,
            b_s=self.b_s * factor,
            d_s=self.d_s * factor,
            e_s=self.e_s * factor,
            h_s=self.h_s * factor,
            m_s=self.m_s * factor,
        )

    def within(self, z_prefill: float, z_decode: float) -> StepLatency:
        """The same engine where it lies so many standard deviations of its spread above the medians."""
        if self.spread is None:
            return self
        return self.scaled(self.spread.prefill.at(z_prefill), self.spread.decode.at(z_decode))

    def slowed(self, prefill: float, decode: float) -> StepLatency:
        """The same engine on a power-capped GPU (Splitwise section III-G)."""
        basis = f"{self.basis}; slowed x{prefill:g} prefill, x{decode:g} decode for the power cap"
        return replace(self.scaled(prefill, decode), basis=basis)

    def scaled(self, prefill: float, decode: float) -> StepLatency:
        """Work that grows with the tokens of a step is compute-bound and takes `prefill` times as long; the
        floor of a step and the KV reads are bandwidth-bound and take `decode` times as long.
        """
        floor = self.f_s[0] * decode
        return replace(
            self,
            f_s=tuple(floor + (f - self.f_s[0]) * prefill for f in self.f_s),
            a_s=self.a_s * prefill,
            b_s=self.b_s * decode,
            d_s=self.d_s * decode,
            e_s=self.e_s * prefill,
            m_s=self.m_s * decode,
        )
