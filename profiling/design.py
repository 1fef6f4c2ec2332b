"""Chooses which steps of an engine to measure for a profile.

First comes a start design, which covers all possible steps. It has the corners, so that nothing later is
extrapolated, and then a Sobol sequence in the logarithms of lengths and batches, a third each of prefills,
decodes and mixed steps. After that, each next step is the candidate on which fits to resampled tables
disagree most, per second that it takes to measure it:

    argmax over candidates s of   std_k(t_k(s)) / mean_k(t_k(s)) / cost(s),    k = 1 ... ENSEMBLE

where t_k is a StepLatency fitted to the k-th bootstrap of the measured rows, and cost(s) the seconds of
measuring s. All fits have one form, so they may agree where that form is wrong. Therefore every EXPLORE-th
step is the candidate farthest from all rows.
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
ENSEMBLE = 12  # So many fits to resampled tables are made for each choice of a step.
EXPLORE = 4  # If the number of rows is a multiple of this, the step farthest from all rows is chosen.
CANDIDATES = 240  # Steps among which the next one is chosen.
ROOM_TOKENS = 32  # Room that a decode's context needs, because it grows while the step is repeated.
LEAST_CONTEXT_TOKENS = 32  # The shortest context of a decode.
MOST_PROMPTS = 8  # Prompts of one step; with more the token budget leaves each of them few tokens.
ONE_PROMPT_FRAC, NO_CACHE_FRAC = 0.6, 0.4  # Shares of prefills with one prompt, and without a cached prefix.
_SHORT_TOKENS = 16  # A short prompt and chunk among the corners; the least cached prefix that is drawn.
_LEAST_NEW_TOKENS = 8  # The least new tokens of a prompt that are drawn.
# A round takes a quarter or half off one number of a step, so after 60 nothing more would help.
_MOST_SHRINKING_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step of an engine may hold."""

    step_tokens: int  # The engine's max_num_batched_tokens.
    sequences: int  # The engine's max_num_seqs.
    context_tokens: int  # The engine's max_model_len.
    kv_tokens: int  # Tokens that the KV cache has room for, in blocks of `block_tokens`.
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
        """Whether the engine can run this as a single step, and repeat it (see ROOM_TOKENS)."""
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
    """Steps with the least and the most that `limits` hold: of new tokens, cached prefix, batch and context,
    one by one and together. A step that does not fit is shrunk until it does.
    """
    most_new = min(limits.step_tokens, limits.context_tokens - 1)
    context = limits.context_tokens - ROOM_TOKENS
    prompts = min(MOST_PROMPTS, limits.sequences)
    # A usual chunk beside decodes: a quarter of the token budget.
    chunk = min(max(_SHORT_TOKENS, limits.step_tokens // 4), limits.context_tokens // 2)
    short_new = min(_SHORT_TOKENS, most_new)
    # A StepShape is: prompts, new tokens of each, cached tokens of each, decodes, context of each decode.
    steps = [
        StepShape(1, 1, 0, 0, 0),
        StepShape(1, most_new, 0, 0, 0),
        StepShape(1, short_new, limits.context_tokens - 1 - short_new, 0, 0),
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
    """The corners, then `candidates`: at most `steps` in all, unless the corners are more."""
    corners = range_corners(limits)
    return _distinct([*corners, *candidates(limits, max(steps - len(corners), 0), seed)])


def candidates(limits: StepLimits, steps: int, seed: int) -> list[StepShape]:
    """At most `steps` steps that spread over all that `limits` hold, by a scrambled Sobol sequence: in turn a
    prefill, a decode and a mixed step.
    """
    spread_steps: list[StepShape] = []
    if steps <= 0:
        return spread_steps
    # About four points for each step, as some cannot be made to fit. The number of points is a power of two,
    # for which Sobol sequences are made.
    points_log2 = int(np.ceil(np.log2(4 * steps + 8)))
    points = qmc.Sobol(d=5, rng=np.random.default_rng(seed)).random_base2(points_log2)
    for i, (u_new, u_cached, u_decodes, u_prompts, u_context) in enumerate(points):
        # A number below the share stands for one prompt, or for no cached prefix, and becomes negative here.
        # One above it is stretched over [0, 1) again, and says how many prompts, or how long a prefix.
        u_more_prompts = (u_prompts - ONE_PROMPT_FRAC) / (1 - ONE_PROMPT_FRAC)
        u_prefix = (u_cached - NO_CACHE_FRAC) / (1 - NO_CACHE_FRAC)
        most_prompts = min(MOST_PROMPTS, limits.sequences)
        prompts = 1 if u_more_prompts < 0 else _between(2, most_prompts, u_more_prompts)
        most_new = max(limits.step_tokens // prompts, _LEAST_NEW_TOKENS)
        new = _between(_LEAST_NEW_TOKENS, most_new, u_new)
        most_cached = max(limits.context_tokens - 1 - new, _SHORT_TOKENS)
        cached = 0 if u_prefix < 0 else _between(_SHORT_TOKENS, most_cached, u_prefix)
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
    """The whole number at share `u` in [0, 1) of the way from `low` to `high`, or `low` if `high` is smaller.
    The way is measured in logarithms, because small numbers matter as much as large ones.
    """
    return round(float(np.exp(np.log(low) + u * (np.log(max(high, low)) - np.log(low)))))


def _shrunk(step: StepShape, limits: StepLimits) -> StepShape | None:
    """The step, its parts made smaller, mostly the largest, until `limits` hold it; None if they never do."""
    for _ in range(_MOST_SHRINKING_ROUNDS):
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
    """The features N, A_p, D, K, P of each step (n, 5), which `planner.models.latency` defines."""
    sums = np.array([step.column_sums for step in steps], dtype=float).reshape(-1, 6)
    prompts, new, _, pairs, decodes, kv_tokens = sums.T
    return np.column_stack([new + decodes, pairs, decodes, kv_tokens, prompts])


def bootstrap_fits(
    X: Array, y: Array, rng: np.random.Generator, *, members: int = ENSEMBLE
) -> list[StepLatency]:
    """Fits to `members` bootstraps of the measured rows: features X (n, 5) and step times y (n,) [s].

    A bootstrap that cannot be fitted, such as one whose rows are all of one size, is replaced by another; in
    all at most four times `members` are drawn. Raises InputError if fewer than two of them can be fitted.
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
    """For the steps with features X (n, 5): the standard deviation (n,) of the fits' predictions as a share
    of their mean, and the mean (n,) [s].
    """
    predicted = np.array([fit.steps_s(X) for fit in fits])
    mean_s = predicted.mean(axis=0)
    return predicted.std(axis=0) / mean_s, mean_s


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The step to measure next; how far the fits disagree on it, and on the candidate on which they disagree
    most, as standard deviations relative to the mean.
    """

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
    """The step of `unseen` to measure next, as the module says, given the rows (X, y) measured so far.

    To measure a step takes `overhead_s`, and `repeats` times the seconds that the fits predict for it.
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
