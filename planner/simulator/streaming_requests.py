"""Long traces: the kernel's record of a request exists while the request does, not for the whole run.

A record has 27 fields, as many as a request needs on its way through a fleet, and what is left of it in the
end is a quarter of that. So the records of a long trace are memory that is reserved and not yet used; the
kernel pauses every CHUNK requests, those that come next are laid out, and of a chunk that is done the results
are read and its memory is given back. The kernel itself knows nothing of this: it sees one array of all
requests, as always, and a pause changes nothing, so results are equal to the last bit.

What is recorded of the steps (layout.RUN) is read at each pause too. Gaps between tokens are counted
(`GapCounts`); of the rest SAMPLES parts of the run are kept, evenly spread over it.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.files.column_files import release_memory
from planner.simulator import layout
from planner.simulator.gap_counts import GapCounts
from planner.simulator.layout import State

Floats = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[Any]]

LONG_REQUESTS = 2_000_000  # traces with more pass through; the records of these are 430 MB
CHUNK_REQUESTS = 1 << 17
RUNS_PER_REQUEST = 64  # room to record; only what is used takes memory
SAMPLES, SAMPLE_RUNS = 8, 100_000
MOST_WORKERS = 2**15 - 1
_SMALL: dict[str, Any] = {"front": np.int16, "back": np.int16, "preemptions": np.int32, "status": np.int8}
"""Columns of numbers below eight bytes."""


def reserved(n: int, dtype: np.dtype[np.void]) -> tuple[npt.NDArray[np.void], mmap.mmap]:
    """An array (n,) that takes no memory before it is written to, and what it lies in."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    held = mmap.mmap(-1, max(n * dtype.itemsize, 1), flags=flags)
    return np.frombuffer(held, dtype=dtype, count=n), held


class Passing:
    """The requests of a trace on their way through the kernel.

    `lay_out(first, records)` makes the records of the requests from `first` on fresh, `read` (`replay`'s
    columns_of) says what became of some.
    """

    def __init__(
        self,
        arrival_s: Floats,
        lay_out: Callable[[int, npt.NDArray[np.void]], None],
        read: Callable[[npt.NDArray[np.void], slice], Columns],
        chunk: int = CHUNK_REQUESTS,
    ) -> None:
        self.arrival_s, self._lay_out, self._read, self._chunk = arrival_s, lay_out, read, chunk
        self._n = len(arrival_s)
        self.requests, self._held = reserved(self._n, layout.REQUEST)
        self._filled = 0
        self._open = list(range(0, self._n, chunk))  # chunks not read yet, by their first request
        self._columns: Columns = {"arrival_s": arrival_s}
        self._last_finish_s = np.nan
        # right after a chunk has begun, so that nothing else happens at that moment
        self.pauses_s = np.nextafter(np.unique(arrival_s[chunk::chunk]), np.inf)
        self.sampled: list[npt.NDArray[np.void]] = []
        self.sampled_s: list[tuple[float, float]] = []
        self.gaps: GapCounts | None = None

    def disturbances(self) -> npt.NDArray[np.void]:
        """The pauses, as the kernel takes them."""
        rows = np.zeros(len(self.pauses_s), layout.DISTURBANCE)
        rows["time_s"], rows["kind"] = self.pauses_s, layout.PAUSE
        return rows

    def run(self, state: State, advance: Callable[[State], None], deadline: float = math.inf) -> None:
        """Let the kernel run, from pause to pause, until it ends; raises OutOfTime at the first pause after
        `deadline`, on time.monotonic's clock.
        """
        if len(state.runs):
            self.gaps = GapCounts(float(state.window[0]), float(state.window[1]))
        while True:
            pause = int(state.counters[layout.NEXT_DISTURBANCE])
            self._fill(self.pauses_s[pause] if pause < len(self.pauses_s) else np.inf)
            advance(state)
            self._take_runs(state, pause)
            if state.counters[layout.NEXT_DISTURBANCE] == pause:
                return
            if time.monotonic() > deadline:
                raise OutOfTime
            self._empty(state)

    def columns(self, state: State) -> Columns:
        """What became of all requests, (n,) each."""
        self._empty(state, to_the_end=True)
        return self._columns | {"last_finish_s": np.array([self._last_finish_s])}

    def _fill(self, until_s: float) -> None:
        """Lay out who arrives until then, and the one after."""
        end = min(int(np.searchsorted(self.arrival_s, until_s, "right")) + 1, self._n)
        if end > self._filled:
            self._lay_out(self._filled, self.requests[self._filled : end])
            self._filled = end

    def _empty(self, state: State, *, to_the_end: bool = False) -> None:
        """Read the chunks that are done, and give their memory back."""
        leaving = {r // self._chunk for r in _leaving(state)}
        left = []
        for first in self._open:
            end = min(first + self._chunk, self._n)
            rows = slice(first, end)
            if not to_the_end:
                if end >= self._filled:
                    left.append(first)
                    continue
                is_done = (self.requests["status"][rows] != layout.UNFINISHED).all()
                if not is_done or first // self._chunk in leaving:
                    left.append(first)
                    continue
            self._keep(rows)
        self._open = left

    def _keep(self, rows: slice) -> None:
        told = self._read(self.requests[rows], rows)
        told.pop("arrival_s")
        self._last_finish_s = np.fmax(self._last_finish_s, told.pop("last_finish_s")[0])
        for name, column in told.items():
            if name not in self._columns:
                self._columns[name] = np.empty(self._n, _SMALL.get(name, column.dtype))
            self._columns[name][rows] = column
        size = layout.REQUEST.itemsize
        first, end = -(-rows.start * size // mmap.PAGESIZE), rows.stop * size // mmap.PAGESIZE
        if end > first:
            self._held.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)
        release_memory(self.arrival_s)

    def _take_runs(self, state: State, pause: int) -> None:
        """Count the gaps of the steps that were recorded since the last pause, and keep some of them."""
        if self.gaps is None:
            return
        recorded = int(state.counters[layout.RUNS])
        if recorded > len(state.runs):
            raise MoreRuns
        runs = state.runs[:recorded]
        self.gaps.add(runs)
        every = max(-(-(len(self.pauses_s) + 1) // SAMPLES), 1)
        if pause % every == every // 2 and recorded:
            part = runs[:SAMPLE_RUNS].copy()
            end_s = part[-1]["start_s"] + layout.run_seconds(part[-1])
            start_s = self.pauses_s[pause - 1] if pause else float(self.arrival_s[0])
            if end_s > start_s:
                self.sampled.append(part)
                self.sampled_s.append((float(start_s), float(end_s)))
        state.counters[layout.RUNS] = 0


class OutOfTime(Exception):
    """A long simulation was not done in time."""


class MoreRuns(Exception):
    """More steps between two pauses than there was room to record."""


def _leaving(state: State) -> list[int]:
    """Who has the last token, which the engine has not seen yet: it is done, and its record is not."""
    found = []
    for r in state.workers["head"][:, layout.LEAVING].tolist():
        while r != layout.NONE:
            found.append(r)
            r = int(state.requests["next"][r])
    return found
