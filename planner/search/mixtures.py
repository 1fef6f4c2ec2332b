"""Fleets of a few worker types, the most promising first, by an estimate that learns from every simulation.

The share of the traffic that a fleet carries is estimated from shares s_j of one worker of each option:

    share = sum_mixed s_j n_j + min(sum_prefill s_j n_j, sum_decode s_j n_j)

Level 0 gives the first s_j. A fleet that fails though its share is above one lowers those of its options, one
that holds though it is below raises them. Looked at are the fleets of two options, or three, to which nothing
can be added within the limits and below the best: what fails with them fails with less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from planner.search.fleets import Counts, count_below, may_hand_over, objective
from planner.search.oracle import Oracle, stripped
from planner.solvers.master import Limits, Option

MOST_CANDIDATES = 30_000  # fleets that are compared at once

LEAST_SHARE = 0.5  # expected share of the traffic below which none is tried

LEARNING_RATE = 0.5  # how far one answer moves the shares of its fleet

MARGIN_FRAC = 0.03  # how far beyond the traffic an answer says that the share lies

Shares = npt.NDArray[np.float64]
Vectors = npt.NDArray[np.int64]


def improved(
    best: Counts,
    options: Sequence[Option],
    shares: Mapping[str, float],
    limits: Limits,
    oracle: Oracle,
    may_go_on: Callable[[], bool],
) -> Counts:
    """The best of those fleets that were tried, `best` if none is better; tried as long as `may_go_on`.

    `options` are the most promising first: those at the end are left out where there are too many fleets.
    `shares` of the traffic are by option.
    """
    options = list(dict.fromkeys([*(option for option, _ in best), *options]))
    learned = np.array([shares[option.name] for option in options])
    failed: list[Vectors] = []
    while may_go_on():
        value = objective(best)
        candidates = filled(options, limits, value)
        if not len(candidates):
            return best
        found = _first_that_holds(options, candidates, learned, failed, oracle, may_go_on)
        if found is None:
            return best
        best = stripped(found, oracle)
    return best


def _first_that_holds(
    options: Sequence[Option],
    candidates: Vectors,
    learned: Shares,
    failed: list[Vectors],
    oracle: Oracle,
    may_go_on: Callable[[], bool],
) -> Counts | None:
    """The first candidate that holds; updates `learned` and `failed`. None: time, or promise, is spent."""
    left = np.ones(len(candidates), bool)
    for cut in failed:
        left &= (candidates > cut).any(axis=1)
    while may_go_on():
        estimates = np.where(left, estimated(options, learned, candidates), 0.0)
        chosen = int(np.argmax(estimates))
        if estimates[chosen] < LEAST_SHARE:
            return None
        vector = candidates[chosen]
        counts = tuple((o, int(n)) for o, n in zip(options, vector, strict=True) if n)
        holds = oracle.holds([counts])[0]
        _learn(learned, vector, float(estimates[chosen]), holds=holds)
        if holds:
            return counts
        failed.append(vector)
        left &= (candidates > vector).any(axis=1)
    return None


def estimated(options: Sequence[Option], learned: Shares, vectors: Vectors) -> Shares:
    """Share of the traffic that each fleet is expected to carry, (C,) of `vectors` (C, J)."""
    carried = {
        role: vectors @ np.where([option.role == role for option in options], learned, 0.0)
        for role in ("mixed", "prefill", "decode")
    }
    return np.asarray(carried["mixed"] + np.minimum(carried["prefill"], carried["decode"]))


def _learn(learned: Shares, vector: Vectors, estimate: float, *, holds: bool) -> None:
    target = 1 + MARGIN_FRAC if holds else 1 - MARGIN_FRAC
    if estimate < target if holds else estimate > target:
        learned[vector > 0] *= (target / estimate) ** LEARNING_RATE


def filled(options: Sequence[Option], limits: Limits, value: float) -> Vectors:
    """Fleets (C, J) of up to three of these options that cost less than `value` and to which none can be added.

    Of the first options alone where all have more than MOST_CANDIDATES.
    """
    found: list[Vectors] = []
    count = 0
    for many in range(1, len(options) + 1):
        last, before = options[many - 1], options[: many - 1]
        for size in (0, 1, 2):
            for others in itertools.combinations(range(len(before)), size):
                chosen = [*(before[j] for j in others), last]
                if not _serve(chosen):
                    continue
                numbers = list(_filled_by(chosen, limits, value))
                if numbers:
                    vectors = np.zeros((len(numbers), len(options)), np.int64)
                    vectors[:, [*others, many - 1]] = numbers
                    found.append(vectors)
                    count += len(numbers)
            if count > MOST_CANDIDATES:
                return np.concatenate(found)
    return np.concatenate(found) if found else np.zeros((0, len(options)), np.int64)


def _serve(options: Sequence[Option]) -> bool:
    """Whether these serve anything together, and none is there for nothing."""
    roles = {option.role for option in options}
    handing = [option.type for option in options if option.role != "mixed"]
    return ("prefill" in roles) == ("decode" in roles) and may_hand_over(handing)


def _filled_by(options: Sequence[Option], limits: Limits, value: float) -> Iterator[tuple[int, ...]]:
    """Counts, one at least of each of these options; of the last as many as there can be."""
    rows = [(amount * (1 + 1e-9), [limits.use(row, o.type) for o in options]) for row, amount in limits.rows()]

    def most(number: int, counts: Sequence[int]) -> int:
        spent = sum(option.objective * n for option, n in zip(options, counts, strict=False))
        largest = count_below(options[number].objective, value, spent)
        for amount, uses in rows:
            if uses[number] > 0:
                taken = sum(use * n for use, n in zip(uses, counts, strict=False))
                largest = min(largest, math.floor((amount - taken) / uses[number]))
        return -1 if math.isinf(largest) else int(largest)

    def grow(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        largest = most(len(counts), counts)
        if len(counts) == len(options) - 1:
            if largest >= 1:
                yield (*counts, largest)
            return
        for n in range(1, largest + 1):
            yield from grow((*counts, n))

    yield from grow(())
