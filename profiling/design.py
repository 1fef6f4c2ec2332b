"""Which step to measure next.

A start design fills the space of steps: the corners, so that nothing later is extrapolated, then a Sobol
sequence in the logarithms of lengths and batches, a third each of prefills, decodes and mixed steps. Then the
next step is the candidate where fits to resampled tables disagree most per second that measuring it takes:

    argmax over candidates s of   std_k(t_k(s)) / mean_k(t_k(s)) / cost(s),    k = 1 ... ENSEMBLE

with t_k our StepLatency fitted to the k-th bootstrap of the rows, cost the seconds of measuring s. Fits of
one form agree even where that form is wrong, so every EXPLORE-th step is the candidate farthest from all
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import qmc

from planner.errors import InputError
from planner.models.latency import Array, StepLatency
from planner.models.step_fit import PiecewiseLinearStepLatency
from planner.models.step_tables import StepShape

# Numbers without a reason beside them were chosen by hand.
ENSEMBLE = 12  # Fits to resampled tables; all are made anew for each choice of a step.
EXPLORE = 4  # Every so-many-th step is the one farthest from all rows.
CANDIDATES = 240  # Steps among which the next one is chosen.
ROOM_TOKENS = 32  # A decode grows while its steps are repeated.
LEAST_CONTEXT_TOKENS = 32  # The shortest context of a decode.
MOST_PROMPTS = 8  # Prompts of one step; with more the token budget leaves each of them few tokens.
ONE_PROMPT_FRAC, NO_CACHE_FRAC = 0.6, 0.4  # Shares of prefills with one prompt, and without a cached prefix.


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step of an engine may hold."""

    step_tokens: int  # The engine's max_num_batched_tokens.
    sequences: int  # The engine's max_num_seqs.
    context_tokens: int  # The engine's max_model_len.
    kv_tokens: int  # Room of the KV cache for requests, in blocks of `block_tokens`.
    block_tokens: int

    def __post_init__(self) -> None:
        least = 2 * (LEAST_CONTEXT_TOKENS + ROOM_TOKENS)
        if self.context_tokens < least or self.kv_tokens < least or self.step_tokens < 2:
            raise InputError(
                f"engine limits: {self.context_tokens} tokens of context, {self.kv_tokens} of KV cache and "
                f"{self.step_tokens} per step are too few to profile; needs {least}, {least} and 2"
            )
        if self.sequences < 2:
            raise InputError(f"engine limits: max_num_seqs is {self.sequences}, must be >= 2")

    def hold(self, step: StepShape) -> bool:
        """Whether the engine can run this step, and repeat it, as one."""
        prompt, context = step.new + step.cached, step.context + ROOM_TOKENS
        kv_tokens = step.prompts * self._whole_blocks(prompt + 1)
        kv_tokens += step.decodes * self._whole_blocks(context)
        return (
            step.prompts + step.decodes > 0
            and step.prompts * step.new + step.decodes <= self.step_tokens
            and step.prompts + step.decodes <= self.sequences
            and (not step.prompts or prompt < self.context_tokens)
            and (not step.decodes or context <= self.context_tokens)
            and kv_tokens <= self.kv_tokens
        )

    def _whole_blocks(self, tokens: int) -> int:
        """The tokens, rounded up to whole KV blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens


def range_corners(limits: StepLimits) -> list[StepShape]:
    """The ends of every range: tokens, cached prefix, batch and context, alone and together."""
    most_new = min(limits.step_tokens, limits.context_tokens - 1)
    context = limits.context_tokens - ROOM_TOKENS
    prompts = min(MOST_PROMPTS, limits.sequences)
    # A usual chunk beside decodes: a quarter of the token budget.
    chunk = min(max(16, limits.step_tokens // 4), limits.context_tokens // 2)
    # Prompts, new and cached tokens of each, decodes, context of each.
    steps = [
        StepShape(1, 1, 0, 0, 0),
        StepShape(1, most_new, 0, 0, 0),
        StepShape(1, min(16, most_new), limits.context_tokens - 1 - min(16, most_new), 0, 0),
        StepShape(1, chunk, limits.context_tokens - 1 - chunk, 0, 0),
        StepShape(prompts, limits.step_tokens // prompts, 0, 0, 0),
        StepShape(0, 0, 0, 1, LEAST_CONTEXT_TOKENS),
        StepShape(0, 0, 0, 1, context),
        StepShape(0, 0, 0, limits.sequences, LEAST_CONTEXT_TOKENS),
        StepShape(0, 0, 0, limits.sequences, context),
        StepShape(1, chunk, 0, 1, LEAST_CONTEXT_TOKENS),
        StepShape(1, chunk, 0, limits.sequences - 1, context),
    ]
    return _distinct(shrunk for step in steps if (shrunk := _shrunk(step, limits)) is not None)


def start_design(limits: StepLimits, steps: int, seed: int) -> list[StepShape]:
    """The corners, then a Sobol sequence, `steps` in all or a few more."""
    first = range_corners(limits)
    rest = candidates(limits, max(steps - len(first), 0), seed)
    return _distinct([*first, *rest])


def candidates(limits: StepLimits, steps: int, seed: int) -> list[StepShape]:
    """Steps that spread over all that `limits` hold, a third of each kind, by a scrambled Sobol sequence."""
    spread_steps: list[StepShape] = []
    if steps <= 0:
        return spread_steps
    # About four points for each step, as some cannot be made to fit; a Sobol sequence has a power of two.
    points_log2 = int(np.ceil(np.log2(4 * steps + 8)))
    points = qmc.Sobol(d=5, rng=np.random.default_rng(seed)).random_base2(points_log2)
    for i, (u_new, u_cached, u_decodes, u_prompts, u_context) in enumerate(points):
        # Above its share a uniform number in [0, 1) is stretched over [0, 1) again.
        u_more_prompts = (u_prompts - ONE_PROMPT_FRAC) / (1 - ONE_PROMPT_FRAC)
        u_prefix = (u_cached - NO_CACHE_FRAC) / (1 - NO_CACHE_FRAC)
        most_prompts = min(MOST_PROMPTS, limits.sequences)
        prompts = 1 if u_more_prompts < 0 else _between(2, most_prompts, u_more_prompts)
        new = _between(8, max(limits.step_tokens // prompts, 8), u_new)
        cached = 0 if u_prefix < 0 else _between(16, max(limits.context_tokens - 1 - new, 16), u_prefix)
        decodes = _between(1, limits.sequences, u_decodes)
        context = _between(LEAST_CONTEXT_TOKENS, limits.context_tokens - ROOM_TOKENS, u_context)
        step = (
            StepShape(prompts, new, cached, 0, 0),
            StepShape(0, 0, 0, decodes, context),
            StepShape(1, new, cached, decodes, context),
        )[i % 3]
        if (shrunk := _shrunk(step, limits)) is not None:
            spread_steps.append(shrunk)
        if len(spread_steps) == steps:
            break
    return spread_steps


def _between(low: int, high: int, u: float) -> int:
    """The number at share `u` in [0, 1) of the way from `low` to `high`, in logarithms: small numbers matter
    as much as large ones.
    """
    return round(float(np.exp(np.log(low) + u * (np.log(max(high, low)) - np.log(low)))))


def _shrunk(step: StepShape, limits: StepLimits) -> StepShape | None:
    """The step with its largest part made smaller again and again until `limits` hold it; None if they never
    do.
    """
    for _ in range(60):  # A round takes a quarter or half of one number; 60 suffice, or nothing does.
        if limits.hold(step):
            return step
        prompts, new, cached, decodes, context = step
        tokens_over = prompts * new + decodes > limits.step_tokens or prompts + decodes > limits.sequences
        if tokens_over and decodes >= prompts * new:
            decodes //= 2
        elif tokens_over and new > 1:
            new = max(min(new, limits.step_tokens - decodes) // 2, 1) if prompts == 1 else new // 2
        elif prompts and new + cached >= limits.context_tokens:
            cached, new = cached // 2, max(min(new, limits.context_tokens - 2), 1)
        elif decodes * context >= prompts * (new + cached) and context > LEAST_CONTEXT_TOKENS:
            context = max(context * 3 // 4, LEAST_CONTEXT_TOKENS)
        elif decodes > 1:
            decodes //= 2
        elif cached:
            cached //= 2
        elif prompts > 1:
            prompts //= 2
        else:
            return None
        step = StepShape(prompts, new, cached, decodes, context if decodes else 0)
        if not step.prompts and not step.decodes:
            return None
    return None


def _distinct(steps: Iterable[StepShape]) -> list[StepShape]:
    """The steps in their order, each once."""
    return list(dict.fromkeys(steps))


def step_columns(steps: Sequence[StepShape]) -> Array:
    """N, A_p, D, K, P of each step (n, 5), as `planner.models.latency` defines them."""
    sums = np.array([step.column_sums for step in steps], dtype=float).reshape(-1, 6)
    prompts, new, _, pairs, decodes, kv_tokens = sums.T
    return np.column_stack([new + decodes, pairs, decodes, kv_tokens, prompts])


def bootstrap_fits(
    X: Array, y: Array, rng: np.random.Generator, *, members: int = ENSEMBLE
) -> list[StepLatency]:
    """Fits to `members` bootstraps of the rows X (n, 5), y (n,). A bootstrap that cannot be fitted (all rows
    of one size) is drawn again. Raises InputError where fewer than two of four times as many can.
    """
    fits: list[StepLatency] = []
    for _ in range(4 * members):
        rows = rng.integers(len(y), size=len(y))
        try:
            fits.append(PiecewiseLinearStepLatency(beyond="extrapolate").fit(X[rows], y[rows]).latency_)
        except InputError:
            continue
        if len(fits) == members:
            break
    if len(fits) < 2:
        raise InputError(f"design: {len(y)} steps are too few to fit; measure the start design first")
    return fits


def disagreement(fits: Sequence[StepLatency], X: Array) -> tuple[Array, Array]:
    """(relative standard deviation of the fits' predictions, their mean [s]), each (n,)."""
    predicted = np.array([fit.steps_s(X) for fit in fits])
    mean_s = predicted.mean(axis=0)
    return predicted.std(axis=0) / mean_s, mean_s


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The step to measure next, how far the fits disagree on it, and on the worst candidate."""

    step: StepShape
    disagreement_frac: float
    worst_frac: float


def choose_step(
    X: Array,
    y: Array,
    unseen: Sequence[StepShape],
    rng: np.random.Generator,
    *,
    repeats: float,
    overhead_s: float,
) -> StepChoice:
    """The most informative of the steps `unseen`, given the rows (X, y) measured so far.

    Measuring a step costs `overhead_s` and `repeats` times what the fits predict for it.
    """
    unseen_X = step_columns(unseen)
    disagreement_frac, mean_s = disagreement(bootstrap_fits(X, y, rng), unseen_X)
    if len(y) % EXPLORE == 0:
        pick = int(_distance(unseen_X, X).argmax())
    else:
        pick = int((disagreement_frac / (overhead_s + repeats * mean_s)).argmax())
    return StepChoice(unseen[pick], float(disagreement_frac[pick]), float(disagreement_frac.max()))


def _distance(unseen: Array, X: Array) -> Array:
    """The distance (n,) of each unseen step (n, 5) to the nearest row of X (m, 5), in logarithms."""
    differences = np.log1p(unseen)[:, None] - np.log1p(X)[None]
    return np.asarray(np.linalg.norm(differences, axis=2).min(axis=1))
