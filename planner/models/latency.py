"""Seconds of one engine step.

A step runs prefill chunks i (n_i new tokens after c_i cached ones) and decodes j (context L_j, the new token
included). N, A_p, D, K and P describe it, so t is called the five-number form. C follows from them where the
prompts of a step are alike (`cached_tokens`).

    N   = sum n_i + #decodes                 tokens through the dense layers
    A_p = sum n_i * (c_i + (n_i + 1) / 2)    query-key pairs of the prefills
    D   = #decodes,   K = sum L_j            sequences, and KV tokens the decodes read
    P   = #prefills,  C = sum c_i            prompts, and KV tokens the prefills read

    t = f(N) + a A_p + b D + d (K + C) + e P + h     f piecewise linear, nondecreasing;  a, b, d, e, h >= 0
        + m K where P > 0                            m >= 0

A prefill reads the KV of its cached tokens once, however few new ones it has: 12 tokens after 16,000 take as
long as a decode with this context, and the term a A_p alone would give a fifth of this time. On an H100, for
prompts with 8,000 cached tokens and more, the formula is 11 % below the measured steps, and 19 % without the
term d C (docs/evidence/validation.md).

m is the additional time of decodes beside prefills. A kernel that serves both in one launch (FlashAttention
2) reads the decodes' KV in the tiles of prefills, and so does not split this work over the whole GPU. On an
RTX PRO 6000 this doubles d.

Data-parallel ranks of one worker step together (vLLM's --data-parallel-size), and experts see the tokens of
all ranks. With g the experts' part of f, and ranks i:

    t = g(sum N_i) + max_i ( f(N_i) - g(N_i) + a A_i + b D_i + d (K_i + C_i) + e P_i (+ m K_i) ) + h
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from planner.errors import InputError
from planner.models.foreign_forms import FIVE_NUMBERS, Compiled
from planner.models.spread import StepTimeSpread

Array = npt.NDArray[np.float64]
TOKENS, PAIRS, DECODES, KV_TOKENS, PREFILLS = range(5)  # The columns N, A_p, D, K, P of steps X (n, 5).
Kind = Literal["kernels", "steps", "derived", "roofline", "given"]
"""The origin of step times. kernels: sums of measured kernels. steps: measured steps, which include the
host's time. derived: either of these, converted to another GPU by rooflines. roofline: no measurement. given:
no origin.
"""

# Steps of decodes (`at_spread`) have at most about this many tokens: one per sequence, or a few with drafts.
DECODE_STEP_TOKENS = 512.0

# The end of `basis` for step times by the wall clock, which include waits for cores that others used.
ON_WALL = "; by steps as long as they took on the wall"


@dataclass(frozen=True, slots=True)
class StepLatency:
    """The formula above with its numbers, by which simulator and optimizer predict.

    `knots_tokens` and `f_s` are f's corners; beyond the last one f goes on with its last slope, below the
    first it is constant. `joint_s` is g at the same corners, empty without data-parallel ranks.
    `kind` says what the numbers rest on, and `basis` says the same in words. `mape_frac` is the held-out
    error of the fit, None where nothing can be held out. `max_context_tokens` is the longest profiled
    context, None for a formula from first principles. `uncertainty_frac` is the relative standard error of a
    calibration, None without one.
    """

    knots_tokens: tuple[float, ...]
    f_s: tuple[float, ...]
    a_s: float  # Seconds per query-key pair of a prefill.
    b_s: float  # Seconds per decode sequence.
    d_s: float  # Seconds per KV token read by decodes.
    e_s: float  # Seconds per prefill.
    h_s: float  # Seconds of the host per step.
    basis: str
    mape_frac: float | None = None
    max_context_tokens: float | None = None
    uncertainty_frac: float | None = None
    kind: Kind = "given"
    m_s: float = 0.0  # Additional seconds per KV token read by decodes in steps with prefills.
    spread: StepTimeSpread | None = None  # How far measured steps were from these; None: unknown.
    joint_s: tuple[float, ...] = ()

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
        if self.joint_s:
            self._check_joint()

    def __hash__(self) -> int:
        """A hash of only a few numbers, because hashing all of them takes far longer."""
        return hash((self.f_s[0], self.f_s[-1], self.a_s, self.d_s, self.kind))

    def _check_joint(self) -> None:
        """Raise InputError unless experts' and a rank's own seconds are positive and never fall."""
        if len(self.joint_s) != len(self.knots_tokens):
            raise InputError(
                f"step latency: {len(self.joint_s)} values of joint_s, must be one per knot "
                f"({len(self.knots_tokens)})"
            )
        joint_s = np.array(self.joint_s)
        own_s = np.array(self.f_s) - joint_s
        slack_s = 1e-6 * np.array(self.f_s[1:])  # Files round to fewer digits, so small falls are allowed.
        if not joint_s[0] >= 0 or (np.diff(joint_s) < -slack_s).any():
            raise InputError("step latency: joint_s must be >= 0 and never fall")
        if not own_s[0] > 0 or (np.diff(own_s) < -slack_s).any():
            raise InputError("step latency: f_s less joint_s must be > 0 and never fall")

    @property
    def is_measured(self) -> bool:
        """Whether steps or kernels were measured; otherwise the times are an estimate."""
        return self.kind in ("kernels", "steps")

    @property
    def has_host(self) -> bool:
        """Whether these seconds include the engine's host time; those of measured kernels do not."""
        return self.h_s > 0 or self.kind in ("steps", "derived")

    def step_s(
        self,
        tokens: float | Array,
        pairs: float | Array = 0.0,
        decodes: float | Array = 0.0,
        kv_tokens: float | Array = 0.0,
        prefills: float | Array = 0.0,
        cached: float | Array = 0.0,
    ) -> Array:
        """Seconds of a step with N, A_p, D, K, P and C as in the module's docstring; broadcasts."""
        return np.asarray(
            _interpolate_knots(np.asarray(tokens), self.knots_tokens, self.f_s)
            + self.a_s * np.asarray(pairs)
            + self.b_s * np.asarray(decodes)
            + (self.d_s + self.m_s * (np.asarray(prefills) > 0)) * np.asarray(kv_tokens)
            + self.d_s * np.asarray(cached)
            + self.e_s * np.asarray(prefills)
            + self.h_s
        )

    def steps_s(self, X: Array) -> Array:
        """Seconds (n,) of steps X with N, A_p, D, K, P (n, 5), if the prompts of a step are alike."""
        tokens, pairs, decodes, kv_tokens, prefills = X.T
        return self.step_s(tokens, pairs, decodes, kv_tokens, prefills, cached_tokens(X))

    def compile_for_kernel(self, most_tokens: int, most_decodes: int) -> Compiled:
        """The form as the kernel reads it: f(N) + h for every N up to `most_tokens`, and the other numbers.
        Only other forms of step times (foreign_forms.py) need `most_decodes`.
        """
        table = self.step_s(np.arange(most_tokens + 1, dtype=float))
        return Compiled(
            FIVE_NUMBERS, (self.a_s, self.b_s, self.d_s, self.e_s, self.m_s), (table,), (len(table),)
        )

    @property
    def of_rank(self) -> StepLatency:
        """The step times of one rank, without the time of experts."""
        if not self.joint_s:
            return self
        # Rounding in a file may let the difference fall slightly, and f must not.
        f_s = np.maximum.accumulate(np.array(self.f_s) - np.array(self.joint_s))
        return replace(self, f_s=tuple(f_s.tolist()), joint_s=())

    def joint_experts_s(self, tokens: float | Array) -> Array:
        """Seconds of experts for this many tokens of all ranks."""
        if not self.joint_s:
            return np.zeros_like(np.asarray(tokens, dtype=float))
        return _interpolate_knots(np.asarray(tokens, dtype=float), self.knots_tokens, self.joint_s)

    def bound_over_ranks(self, dp: int) -> StepLatency:
        """A lower bound on the steps of `dp` ranks, as a function of their summed tokens, pairs, decodes and
        prefills.

        The slowest rank takes at least the mean time of the ranks. If a rank's time is convex in its tokens,
        this mean is at least the time at the mean number of tokens. So the bound is the lower convex hull of
        a rank's own time, at 1 / dp of the summed tokens.
        """
        own = self.of_rank
        x, y = [own.knots_tokens[0]], [own.f_s[0]]  # Corners of the hull: tokens and seconds.
        for tokens, seconds in zip(own.knots_tokens[1:], own.f_s[1:], strict=True):
            # A corner on or above the line from the corner before it to the new point is not of the hull.
            while len(x) > 1 and (y[-1] - y[-2]) * (tokens - x[-1]) >= (seconds - y[-1]) * (x[-1] - x[-2]):
                x.pop()
                y.pop()
            x.append(tokens)
            y.append(seconds)
        knots = sorted({*self.knots_tokens, *(dp * tokens for tokens in x)})
        f_s = _interpolate_knots(np.array(knots) / dp, tuple(x), tuple(y)) + self.joint_experts_s(
            np.array(knots)
        )
        return replace(
            self,
            knots_tokens=tuple(knots),
            f_s=tuple(f_s.tolist()),
            joint_s=(),
            a_s=self.a_s / dp,
            b_s=self.b_s / dp,
            d_s=self.d_s / dp,
            e_s=self.e_s / dp,
            m_s=0.0,  # A lower bound: perhaps no rank with decodes has prefills.
        )

    def prefill_s(self, input_tokens: Array | Sequence[float] | float, budget_tokens: int) -> Array:
        """Seconds to prefill prompts alone on an idle engine, in chunks of `budget_tokens`."""
        n = np.asarray(input_tokens, dtype=float)
        whole = np.floor_divide(n, budget_tokens)
        last_tokens = n - whole * budget_tokens
        chunks_s = whole * self.step_s(budget_tokens, prefills=1) + np.where(
            last_tokens > 0, self.step_s(last_tokens, prefills=1), 0.0
        )
        # C of all chunks: each chunk reads the tokens of the chunks before it.
        read = budget_tokens * whole * (whole - 1) / 2 + np.where(last_tokens > 0, n - last_tokens, 0.0)
        pairs = n * (n + 1) / 2  # A_p of the whole prompt.
        return np.asarray(chunks_s + self.a_s * pairs + self.d_s * read)

    def with_longer_steps(self, longer_frac: float) -> StepLatency:
        """The same engine with every step longer by this share."""
        factor = 1 + longer_frac
        return replace(
            self,
            f_s=tuple(f * factor for f in self.f_s),
            a_s=self.a_s * factor,
            b_s=self.b_s * factor,
            d_s=self.d_s * factor,
            e_s=self.e_s * factor,
            h_s=self.h_s * factor,
            m_s=self.m_s * factor,
            joint_s=tuple(joint * factor for joint in self.joint_s),
        )

    def at_spread(self, prefill_sigmas: float, decode_sigmas: float) -> StepLatency:
        """The same engine this many standard deviations of its spread above the medians.

        Steps of up to DECODE_STEP_TOKENS are taken for steps of decodes, so their f(N), the reading of
        weights, changes by the factor of decodes. What further tokens add changes by the factor of prefills.
        """
        if self.spread is None:
            return self
        return self.scale_steps(
            self.spread.prefill.at_sigmas(prefill_sigmas), self.spread.decode.at_sigmas(decode_sigmas)
        )

    def scale_steps(self, prefill: float, decode: float) -> StepLatency:
        """The same engine, decodes `decode` times as long, and what prefills add `prefill` times as long:
        `scale_times` with f(DECODE_STEP_TOKENS) as the floor.
        """
        if prefill == decode == 1.0:
            return self
        return self._with_knot(DECODE_STEP_TOKENS).scale_times(
            prefill, decode, up_to_tokens=DECODE_STEP_TOKENS
        )

    def _with_knot(self, tokens: float) -> StepLatency:
        """The same times with a knot at `tokens`. From the last knot on, one more keeps the last slope."""
        # Below the first knot f is constant, so no knot is needed there.
        if tokens in self.knots_tokens[:-1] or tokens <= self.knots_tokens[0]:
            return self
        beyond = (2 * tokens,) if tokens >= self.knots_tokens[-1] else ()
        knots = tuple(sorted({*self.knots_tokens, tokens, *beyond}))
        knot_tokens = np.array(knots)
        seconds = _interpolate_knots(knot_tokens, self.knots_tokens, self.f_s)
        joint = self.joint_experts_s(knot_tokens) if self.joint_s else np.array([])
        return replace(self, knots_tokens=knots, f_s=tuple(seconds.tolist()), joint_s=tuple(joint.tolist()))

    def with_least(self, least_s: float, *, beyond_tokens: float) -> StepLatency:
        """The same engine with f(N) at least `least_s` if N > `beyond_tokens`; older_kernels.py says why."""
        step = self._with_knot(beyond_tokens)._with_knot(beyond_tokens + 1)
        knots, joint_s = np.array(step.knots_tokens), step.joint_experts_s(np.array(step.knots_tokens))
        own_s = np.array(step.f_s) - joint_s
        # Only the part of f that is not joint is raised, by as much as f lacks of `least_s`.
        own_s = np.where(knots > beyond_tokens, np.maximum(own_s, least_s - joint_s), own_s)
        f_s = np.maximum.accumulate(own_s) + joint_s
        return replace(step, f_s=tuple(f_s.tolist()))

    def with_longer_tokens(self, token_s: float, *, beyond_tokens: float) -> StepLatency:
        """The same engine if a step takes `token_s` longer for each token beyond `beyond_tokens`."""
        step = self._with_knot(beyond_tokens)
        # Beyond the last knot f goes on with its last slope; a later knot gets the longer tokens into it.
        step = step._with_knot(2 * max(step.knots_tokens[-1], beyond_tokens))
        longer_s = token_s * np.maximum(np.array(step.knots_tokens) - beyond_tokens, 0.0)
        return replace(step, f_s=tuple((np.array(step.f_s) + longer_s).tolist()))

    def padded_to(self, sizes: Sequence[int]) -> StepLatency:
        """The same engine if CUDA graphs pad steps to the next of `sizes`, which rise; larger steps stay."""
        # f jumps from each size to the token after it. Beyond its last knot f goes on with the slope between
        # the last two knots. The knot at twice the largest size keeps the last jump out of this slope.
        jumps = {float(size) for size in sizes} | {float(size + 1) for size in sizes}
        beyond = {knot for knot in self.knots_tokens if knot > sizes[-1]}
        knots = np.array(sorted(jumps | beyond | {2.0 * sizes[-1]}))
        padded_tokens = np.array([*sizes, np.inf])[np.searchsorted(sizes, knots)]
        padded_tokens = np.where(np.isinf(padded_tokens), knots, padded_tokens)
        f_s = _interpolate_knots(padded_tokens, self.knots_tokens, self.f_s)
        joint_s = self.joint_experts_s(padded_tokens) if self.joint_s else np.array([])
        return replace(
            self, knots_tokens=tuple(knots.tolist()), f_s=tuple(f_s.tolist()), joint_s=tuple(joint_s.tolist())
        )

    def with_power_cap(self, prefill: float, decode: float) -> StepLatency:
        """The same engine on a power-capped GPU (Splitwise section III-G)."""
        basis = f"{self.basis}; slowed x{prefill:g} prefill, x{decode:g} decode for the power cap"
        return replace(self.scale_times(prefill, decode), basis=basis)

    def scale_times(self, prefill: float, decode: float, *, up_to_tokens: float = 0.0) -> StepLatency:
        """The same engine with compute and memory slowed by different factors.

        New tokens and prefills (f above its floor, a, e) are compute-bound and take `prefill` times as long.
        The floor, decodes (b) and reads of KV (d, m) are bandwidth-bound and take `decode` times as long. The
        host's h stays. The floor is f at the last knot up to `up_to_tokens`, or at the first knot.
        """
        floor_knot = max(sum(knot <= up_to_tokens for knot in self.knots_tokens) - 1, 0)

        def scaled(values_s: tuple[float, ...]) -> tuple[float, ...]:
            """The floor, at `floor_knot`, times `decode`, and what lies above it times `prefill`."""
            if not values_s:
                return ()
            floor_s = values_s[floor_knot]
            return tuple(
                min(value, floor_s) * decode + max(value - floor_s, 0.0) * prefill for value in values_s
            )

        f_s, joint_s = scaled(self.f_s), scaled(self.joint_s)
        # Rounding in a file may let either part fall slightly, and the factors would enlarge these falls.
        if joint_s:
            rising_joint_s = np.maximum.accumulate(joint_s)
            f_s = tuple((np.array(scaled(self.of_rank.f_s)) + rising_joint_s).tolist())
            joint_s = tuple(rising_joint_s.tolist())
        return replace(
            self,
            f_s=f_s,
            joint_s=joint_s,
            a_s=self.a_s * prefill,
            b_s=self.b_s * decode,
            d_s=self.d_s * decode,
            e_s=self.e_s * prefill,
            m_s=self.m_s * decode,
        )


@dataclass(frozen=True, slots=True)
class StepsOfRanks:
    """Step times of `dp` data-parallel ranks as the kernel reads them: of one rank, then of experts."""

    latency: StepLatency
    dp: int

    def compile_for_kernel(self, most_tokens: int, most_decodes: int) -> Compiled:
        """The form of one rank, with a further table: seconds of experts by the tokens of all ranks."""
        of_rank = self.latency.of_rank.compile_for_kernel(most_tokens, most_decodes)
        joint_s = self.latency.joint_experts_s(np.arange(self.dp * most_tokens + 1, dtype=float))
        tables = (*of_rank.tables, joint_s)
        return replace(of_rank, tables=tables, widths=tuple(len(table) for table in tables))


def cached_tokens(X: Array) -> Array:
    """C (n,) of steps with N, A_p, D, K, P (n, 5), of which each has prompts that are alike: P prompts of n
    new tokens in all, after c cached ones each, have A_p = n (c + (n / P + 1) / 2) pairs, and C = P c.
    """
    tokens, pairs, decodes, _, prefills = X.T
    new_tokens = tokens - decodes
    cached = prefills * pairs / np.maximum(new_tokens, 1.0) - (new_tokens + prefills) / 2
    return np.asarray(np.where(prefills > 0, np.maximum(cached, 0.0), 0.0))


def _interpolate_knots(tokens: Array, knots_tokens: tuple[float, ...], values_s: tuple[float, ...]) -> Array:
    """Piecewise linear interpolation, with the last slope beyond the last knot, constant below the first."""
    knots, values = np.array(knots_tokens), np.array(values_s)
    slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
    return np.asarray(np.interp(tokens, knots, values) + slope * np.maximum(tokens - knots[-1], 0.0))
