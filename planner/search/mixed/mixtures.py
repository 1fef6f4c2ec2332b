"""Fleets of a few worker types, the most promising first, by an estimate that learns from every simulation.

The share of the traffic that a fleet carries is estimated from shares s_j of one worker of each option:

    share = sum_mixed s_j n_j + min(sum_prefill s_j n_j, sum_decode s_j n_j)

Level 0 gives the first s_j. A fleet that fails though its share is above one lowers those of its options, one
that holds though it is below raises them. Looked at are fleets of up to four options, to which nothing can be
added within the limits and below the best: what fails with them fails with less.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from planner.fleet import Role
from planner.search.level0.filling import Vectors, filled
from planner.search.oracle.fleet_counts import (
    Counts,
    Named,
    in_order,
    is_within,
    may_hand_over,
    names_of,
    objective,
)
from planner.search.oracle.fleet_oracle import Oracle, without_spare_workers
from planner.search.problem.options import by_hardware, hardware
from planner.solvers.master import FleetLimits, Option

MOST_TYPES = 4  # of a fleet, after those of three

LEAST_SHARE = 0.5  # expected share of the traffic below which none is tried

LEARNING_RATE = 0.5  # how far one answer moves the shares of its fleet

ALIKE_FRAC = 0.5  # ... and those of its other settings, as a share of that

MARGIN_FRAC = 0.03  # how far beyond the traffic an answer says that the share lies

Shares = npt.NDArray[np.float64]


def improve_mixture(
    best: Counts,
    options: Sequence[Option],
    shares: Mapping[str, float],
    limits: FleetLimits,
    oracle: Oracle,
    may_go_on: Callable[[], bool],
) -> Counts:
    """The best of those fleets that were tried, `best` if none is better; tried as long as `may_go_on`.

    `options` are all there are, in the order of a fleet's pools; `shares` of the traffic are by option. Where
    there are too many fleets, the options that cost most for their share are left out.
    """
    pools, options = options, _promising_first(best, options, shares)
    learned = np.array([shares[option.name] for option in options])
    failed: list[Vectors] = []
    most_types = 3
    while may_go_on():
        candidates = filled(options, limits, objective(best), most_types)

        def holds(vector: Vectors) -> bool:
            return oracle.holds([in_order(_counts(vector, options), pools)])[0]

        best_fleet = _first_that_holds(options, candidates, learned, failed, holds, may_go_on)
        if best_fleet is None and most_types < MOST_TYPES:
            most_types += 1
            continue
        if best_fleet is None:
            return best
        best = without_spare_workers(in_order(_counts(best_fleet, options), pools), oracle)
    return best


def _promising_first(best: Counts, options: Sequence[Option], shares: Mapping[str, float]) -> list[Option]:
    """Those of the best fleet, then one setting of each role, GPU, TP and PP, then their second ones, ..."""

    def price(option: Option) -> float:
        return option.objective / shares[option.name]

    ranked = [
        (rank, price(option), option)
        for alike in by_hardware(options).values()
        for rank, option in enumerate(sorted(alike, key=price))
    ]
    ranked.sort(key=lambda each: each[:2])
    return list(dict.fromkeys([*(option for option, _ in best), *(option for *_, option in ranked)]))


def _counts(vector: Vectors, options: Sequence[Option]) -> list[tuple[Option, int]]:
    return [(option, int(n)) for option, n in zip(options, vector, strict=True) if n]


def _first_that_holds(
    options: Sequence[Option],
    candidates: Vectors,
    learned: Shares,
    failed: list[Vectors],
    holds: Callable[[Vectors], bool],
    may_go_on: Callable[[], bool],
) -> Vectors | None:
    """The first candidate that holds; updates `learned` and `failed`. None: time, or promise, is spent."""
    kinds = [(option.role, hardware(option)) for option in options]
    alike = np.array([[one == other for other in kinds] for one in kinds])
    used = np.flatnonzero(candidates.any(axis=0))
    narrow, among = candidates[:, used].astype(np.float64), [options[j] for j in used.tolist()]
    left = np.ones(len(candidates), bool)
    for cut in failed:
        left &= (narrow > cut[used]).any(axis=1)
    while len(candidates) and may_go_on():
        estimates = np.where(left, estimated(among, learned[used], narrow), 0.0)
        chosen = int(np.argmax(estimates))
        if estimates[chosen] < LEAST_SHARE:
            return None
        vector: Vectors = candidates[chosen]
        is_kept = holds(vector)
        _learn(learned, alike, vector, float(estimates[chosen]), holds=is_kept)
        if is_kept:
            return vector
        failed.append(vector)
        left &= (narrow > vector[used]).any(axis=1)
    return None


def estimated(options: Sequence[Option], learned: Shares, vectors: Shares) -> Shares:
    """Share of the traffic that each fleet is expected to carry, (C,) of `vectors` (C, J)."""
    of_role = np.array([[option.role == role for role in get_args(Role)] for option in options])
    mixed, prefill, decode = (vectors @ np.where(of_role, learned[:, None], 0.0)).T
    return np.asarray(mixed + np.minimum(prefill, decode))


def _learn(
    learned: Shares, alike: npt.NDArray[np.bool_], vector: Vectors, estimate: float, *, holds: bool
) -> None:
    """Other settings of the same role and hardware (J, J) learn with them, to a part."""
    target = 1 + MARGIN_FRAC if holds else 1 - MARGIN_FRAC
    if estimate < target if holds else estimate > target:
        rates = np.where(vector > 0, 1.0, ALIKE_FRAC * alike[vector > 0].any(axis=0))
        learned *= (target / estimate) ** (LEARNING_RATE * rates)


def _serve(options: Sequence[Option]) -> bool:
    """Whether these serve anything together, and none is there for nothing."""
    roles = {option.role for option in options}
    if not roles:
        return False
    handing = [option.type for option in options if option.role != "mixed"]
    return ("prefill" in roles) == ("decode" in roles) and may_hand_over(handing)


def near(best: Counts, limits: FleetLimits, oracle: Oracle, may_go_on: Callable[[], bool]) -> Counts:
    """The cheapest of the fleets around the best one: up to two workers of a pool fewer, or one more.

    Where more workers hurt, such a fleet may hold though one between the two fails. The nearest in price are
    tried first; begins anew around one that holds.
    """
    seen: set[Named] = set()
    while True:
        value = objective(best)
        around = [
            tuple((option, n + more) for (option, n), more in zip(best, each, strict=True) if n + more > 0)
            for each in itertools.product(range(-2, 2), repeat=len(best))
        ]
        around = [
            counts
            for counts in around
            if objective(counts) < value * (1 - 1e-9)
            and names_of(counts) not in seen
            and names_of(counts) not in oracle.verdicts
            and _serve([option for option, _ in counts])
            and is_within(limits, counts)
        ]
        for counts in sorted(around, key=lambda counts: -objective(counts)):
            if not may_go_on():
                return best
            seen.add(names_of(counts))
            if oracle.holds([counts])[0]:
                best = counts
                break
        else:
            return best
