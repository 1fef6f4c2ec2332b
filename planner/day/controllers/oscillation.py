"""Finds where a controller starts workers and gives them up before they are ready."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.simulator.elastic import Floats, Ints


@dataclass(frozen=True, slots=True)
class Oscillation:
    """How often a pool grew and shrank again within a start-up time, when it did so first, and how many
    workers were given up before they were ready.
    """

    pool: int
    times: int
    first_s: float
    workers: int


def find_oscillations(
    decision_s: Floats, decided_sizes: Ints, start_s: Sequence[float]
) -> tuple[Oscillation, ...]:
    """The pools that oscillate: each decision that shrinks a pool while workers still start counts once.

    `decided_sizes` (D, P) were decided at `decision_s` (D,); `start_s` (P,) are the start-up times.
    """
    per_pool = []
    for pool, pool_start_s in enumerate(start_s):
        changes = np.flatnonzero(np.diff(decided_sizes[:, pool])) + 1
        grown: list[tuple[float, int]] = []  # (time of a growth, how many of its workers are left)
        times, first_s, given_up = 0, float("nan"), 0
        for k in changes.tolist():
            now_s, change = float(decision_s[k]), int(decided_sizes[k, pool] - decided_sizes[k - 1, pool])
            grown = [(at_s, starting) for at_s, starting in grown if now_s - at_s < pool_start_s]
            if change > 0:
                grown.append((now_s, change))
                continue
            if grown:
                times += 1
                first_s = now_s if times == 1 else first_s
            to_remove = -change
            while grown and to_remove:  # The workers that started last are given up first.
                at_s, starting = grown.pop()
                removed = min(starting, to_remove)
                given_up, to_remove = given_up + removed, to_remove - removed
                if starting > removed:
                    grown.append((at_s, starting - removed))
        if times:
            per_pool.append(Oscillation(pool, times, first_s, given_up))
    return tuple(per_pool)
