"""Routings that draw, plainly: the random numbers of the kernel's own generator, drawn in its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from planner.policies import LOWEST_BY_LOT, POWER_OF_TWO, RANDOM, ROUTING, TWO_BY_REQUESTS

AnyWorker = TypeVar("AnyWorker")
DRAWN = {RANDOM, POWER_OF_TWO, TWO_BY_REQUESTS, LOWEST_BY_LOT}  # codes of the routings below
MASK = 2**64 - 1


def draws(routing: str) -> bool:
    return ROUTING[routing].code in DRAWN


class Draws:
    """xorshift64* from the seed of a fleet's policies: arrivals and hand-offs draw from one sequence."""

    def __init__(self, seed: int) -> None:
        self.state = (2 * seed + 0x9E3779B97F4A7C1) & MASK

    def below(self, n: int) -> int:
        self.state ^= self.state >> 12
        self.state ^= (self.state << 25) & MASK
        self.state ^= self.state >> 27
        return ((self.state * 2685821657736338717 & MASK) >> 33) % n

    def choose(
        self,
        routing: str,
        workers: Sequence[AnyWorker],
        score: Callable[[AnyWorker], float],
        has_room: Callable[[AnyWorker], bool] = lambda worker: True,
    ) -> AnyWorker | None:
        """One of the workers that a request fits on, in the order of the fleet. `random` and `power-of-two`
        draw among those that have room for all of it now, if there are any.
        """
        if not workers:
            return None
        code = ROUTING[routing].code
        if code in (RANDOM, POWER_OF_TWO):
            workers = [worker for worker in workers if has_room(worker)] or workers
        count = len(workers)
        if code == RANDOM:
            return workers[self.below(count)]
        if code == LOWEST_BY_LOT:  # the n-th of equals takes the place of the one before with 1 / n
            lowest, equals = workers[0], 1
            for worker in workers[1:]:
                if score(worker) < score(lowest):
                    lowest, equals = worker, 1
                elif score(worker) == score(lowest):
                    equals += 1
                    lowest = worker if self.below(equals) == 0 else lowest
            return lowest
        first = second = self.below(count)
        if count > 1:
            second = self.below(count - 1)
            second += second >= first
        if code == POWER_OF_TWO:  # of equals the one listed first, else the one drawn first
            first, second = min(first, second), max(first, second)
        return workers[second] if score(workers[second]) < score(workers[first]) else workers[first]
