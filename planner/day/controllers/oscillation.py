"""A controller that asks for workers and gives them up before they were of any use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.simulator.elastic import Floats, Ints


@dataclass(frozen=True, slots=True)
class Oscillation:
    """Of one pool: how often it grew and shrank again within a start-up time, when first, and how many
    workers were given up so."""

    pool: int
    times: int
    first_s: float
    workers: int


def find_oscillations(
    decision_s: Floats, decided_sizes: Ints, start_s: Sequence[float]
) -> tuple[Oscillation, ...]:
    """Per pool that did it; `decided_sizes` (D, P) at `decision_s` (D,), `start_s` (P,) until a worker is
    ready.

    Growth counts as taken back where the pool is smaller than it had grown to before a worker asked for then
    could be ready; each taking back counts once.
    """
    per_pool = []
    for pool, within_s in enumerate(start_s):
        changes = np.flatnonzero(np.diff(decided_sizes[:, pool])) + 1
        grown: list[tuple[float, int]] = []  # when, by how many; those still starting
        times, first_s, workers = 0, float("nan"), 0
        for k in changes.tolist():
            now_s, change = float(decision_s[k]), int(decided_sizes[k, pool] - decided_sizes[k - 1, pool])
            grown = [each for each in grown if now_s - each[0] < within_s]
            if change > 0:
                grown.append((now_s, change))
                continue
            if grown:
                times += 1
                first_s = now_s if times == 1 else first_s
            left = -change
            while grown and left:  # the youngest first
                at_s, by = grown.pop()
                taken = min(by, left)
                workers, left = workers + taken, left - taken
                if by > taken:
                    grown.append((at_s, by - taken))
        if times:
            per_pool.append(Oscillation(pool, times, first_s, workers))
    return tuple(per_pool)
