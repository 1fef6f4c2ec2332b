"""A controller for pool sizes that are known beforehand: times, and the workers that must be ready then."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from planner.errors import InputError
from planner.simulator.elastic import MetricsReading


class Timetable:
    """From `times_s[i]` on, `sizes[i]` (P,) workers of P pools are ready; before the first time, those of
    `start`.

    With target(v) the sizes of the timetable, the controller wants at time u

        max of target(v) over u <= v <= u + start_s      (of each pool by itself)

    workers, so that each is started a start-up time `start_s` before it must be ready, and given up as soon
    as it is not needed. A worker that is not needed for a time shorter than `start_s` is kept, because its
    successor would have to start before this worker is given up. Workers that must be ready earlier than
    `start_s` start at time zero, and are late.
    """

    # Fields of a `TimedController` (elastic.py):
    every_s = math.inf  # Decisions are at the times that `next_s` names.
    lag_s = 0.0  # Only the time of a reading matters.

    def __init__(
        self, times_s: Sequence[float], sizes: Sequence[Sequence[int]], start_s: Sequence[float]
    ) -> None:
        """`times_s` (T,) in rising order, `sizes` (T, P) and the start-up times `start_s` (P,) of the pools.

        Raises InputError for times below 0 or that do not rise, and for other lengths.
        """
        if not len(times_s) or len(times_s) != len(sizes):
            raise InputError(
                f"timetable: {len(times_s)} times and {len(sizes)} sizes, must be as many of both"
            )
        if any(not b > a for a, b in pairwise(times_s)) or not times_s[0] >= 0:
            raise InputError("timetable: times must be >= 0 and rise")
        if any(len(row) != len(start_s) for row in sizes):
            raise InputError(f"timetable: every row of sizes must be of {len(start_s)} pools, as start_s is")
        self.times_s = [float(time_s) for time_s in times_s]
        self.targets = [tuple(int(size) for size in row) for row in sizes]
        self.start_s = [float(lead_s) for lead_s in start_s]
        # Sizes may change when a worker must be ready, or a start-up before.
        change_times_s = {time_s - lead_s for time_s in self.times_s for lead_s in (0.0, *self.start_s)}
        self._changes_s = sorted(time_s for time_s in change_times_s if time_s > 0)
        self._at_first: tuple[int, ...] = ()

    def start(self, sizes: Sequence[int]) -> None:
        """Begin a run with these sizes."""
        self._at_first = tuple(sizes)

    def next_s(self, time_s: float) -> float:
        """The next time at which the sizes may change; infinite after the last."""
        i = bisect_right(self._changes_s, time_s)
        return self._changes_s[i] if i < len(self._changes_s) else math.inf

    def sizes(self, reading: MetricsReading) -> Sequence[int]:
        """The sizes of the pools that the timetable has for the time of this reading."""
        return self.sizes_at(reading.time_s)

    def sizes_at(self, time_s: float) -> tuple[int, ...]:
        """The sizes (P,) that the controller wants at a time.

        The window is longer by 1e-12 of its end, so that rounding does not delay a worker that is needed
        exactly one start-up later.
        """
        targets = (self._at_first, *self.targets)  # targets[i]: the sizes once i of `times_s` have passed.
        wanted = []
        for p, lead_s in enumerate(self.start_s):
            now = bisect_right(self.times_s, time_s)
            last = bisect_right(self.times_s, (time_s + lead_s) * (1 + 1e-12))
            wanted.append(max(target[p] for target in targets[now : max(last, now) + 1]))
        return tuple(wanted)
