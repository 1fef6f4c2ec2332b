"""Seconds of one engine step.

A step runs prefill chunks i (n_i new tokens after c_i cached ones) and decodes j (context L_j, the new token
included). Five numbers describe it:

    N   = sum n_i + #decodes                 tokens through the dense layers
    A_p = sum n_i * (c_i + (n_i + 1) / 2)    query-key pairs of the prefills
    D   = #decodes,   K = sum L_j            sequences, and KV tokens the decodes read
    P   = #prefills

    t = f(N) + a A_p + b D + d K + e P + h       f piecewise linear, nondecreasing;  a, b, d, e, h >= 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.errors import InputError
from planner.models.forms import FIVE, Compiled

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepLatency:
    """The formula above with numbers in it; what the simulator and the optimizer both predict with.

    `knots_tokens` and `f_s` are f's corners; beyond the last one f goes on with its last slope, below the
    first it is constant. `basis` says where the numbers come from ("silicon ...", "measured ...",
    "roofline"), `mape_frac` the held-out error of the fit, None where there is nothing to hold out.
    `max_context_tokens` is the longest context that was profiled, None for a formula from first principles.
    `uncertainty_frac` is the relative standard error a calibration left, None where there was none.
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
        if min(self.a_s, self.b_s, self.d_s, self.e_s, self.h_s) < 0:
            raise InputError("step latency: a, b, d, e and h must be >= 0")
        if self.uncertainty_frac is not None and not self.uncertainty_frac >= 0:
            raise InputError(f"step latency: uncertainty_frac is {self.uncertainty_frac}, must be >= 0")

    @property
    def is_measured(self) -> bool:
        """Whether steps or kernels were measured, by the first word of `basis`; else they are a guess."""
        return self.basis.startswith(("silicon", "measured"))

    @property
    def has_host(self) -> bool:
        """Whether the engine's host is in these seconds: steps were measured, and not kernels."""
        return self.h_s > 0 or self.basis.startswith(("measured", "fitted", "derived"))

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
            + self.d_s * np.asarray(kv_tokens)
            + self.e_s * np.asarray(prefills)
            + self.h_s
        )

    def compiled(self, most_tokens: int, most_decodes: int) -> Compiled:
        """For the simulator: f(N) + h for every N up to `most_tokens`."""
        table = self.step_s(np.arange(most_tokens + 1, dtype=float))
        return Compiled(FIVE, (self.a_s, self.b_s, self.d_s, self.e_s), (table,), (len(table),))

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
        )

    def slowed(self, prefill: float, decode: float) -> StepLatency:
        """The same engine on a power-capped GPU (Splitwise section III-G).

        Work that grows with the tokens of a step is compute-bound and slows by `prefill`; the floor of a
        step and the KV reads are bandwidth-bound and slow by `decode`.
        """
        floor = self.f_s[0] * decode
        return StepLatency(
            self.knots_tokens,
            tuple(floor + (f - self.f_s[0]) * prefill for f in self.f_s),
            self.a_s * prefill,
            self.b_s * decode,
            self.d_s * decode,
            self.e_s * prefill,
            self.h_s,
            basis=f"{self.basis}; slowed x{prefill:g} prefill, x{decode:g} decode for the power cap",
            mape_frac=self.mape_frac,
            max_context_tokens=self.max_context_tokens,
            uncertainty_frac=self.uncertainty_frac,
        )
