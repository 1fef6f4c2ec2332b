"""Simulates long traces in little memory: a request has its record in memory only while it is under way.

A record (`layout.REQUEST`) takes four times the bytes of the results of a request. The records of all
requests are one array of reserved memory, of which the operating system hands out a page only when something
is written there. The kernel (`planner/simulator/kernel.py`) pauses every CHUNK_REQUESTS requests, which are a
chunk. At a pause the records of the next requests are written ("laid out"), the results of all finished
chunks are read, and the memory of these chunks is given back. The kernel still sees one array of all
requests, and a pause moves no event, so results are equal to the last bit.

Recorded runs of steps (`layout.RUN`) are read at each pause too. The gaps between their tokens are counted
(`GapCounts`). The runs themselves are kept only of SAMPLES parts of the simulation, evenly spread over it.
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

LONG_REQUESTS = 2_000_000  # Longer traces are streamed; the records of this many requests take 430 MB.
# Requests between two pauses. Their records take 28 MB, little beside the results of a long trace.
CHUNK_REQUESTS = 1 << 17
# Room for recorded runs of steps, per request of a chunk. Only what is used takes memory.
RUNS_PER_REQUEST = 64
# The number of parts of the simulation whose runs are kept, and the most runs that are kept of each part. Set
# by hand: means over these parts stand for the whole, and the runs take less memory than the results.
SAMPLES, SAMPLE_RUNS = 8, 100_000
MOST_WORKERS = 2**15 - 1  # The results have the number of a worker in two bytes.
# Columns of results whose numbers need fewer than eight bytes.
_SMALL_TYPES: dict[str, Any] = {
    "prefill_worker": np.int16,
    "decode_worker": np.int16,
    "preemptions": np.int32,
    "status": np.int8,
}


def reserve_array(n: int, dtype: np.dtype[np.void]) -> tuple[npt.NDArray[np.void], mmap.mmap]:
    """An array (n,) that takes no memory before it is written to, and the mapped memory under it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)  # Not on every system.
    memory = mmap.mmap(-1, max(n * dtype.itemsize, 1), flags=flags)
    return np.frombuffer(memory, dtype=dtype, count=n), memory


class StreamedRequests:
    """The requests of a long trace on their way through the kernel.

    `lay_out(first, records)` writes the records of the requests from index `first` on, as they are before
    their arrival. `read(records, rows)` returns the columns of results of the requests `rows` (as
    `read_results.columns_of`). `arrival_s` (n,) never falls, and `chunk` is the number of requests between
    two pauses.
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
        self.requests, self._memory = reserve_array(self._n, layout.REQUEST)
        self._laid_out = 0  # How many requests have a record.
        # Each chunk whose results were not read yet, as the index of its first request.
        self._unread = list(range(0, self._n, chunk))
        self._columns: Columns = {"arrival_s": arrival_s}
        self._last_finish_s = np.nan
        # A pause is just after the first arrival of a chunk. At the arrival itself other events may be due.
        self.pauses_s = np.nextafter(np.unique(arrival_s[chunk::chunk]), np.inf)
        self.sampled: list[npt.NDArray[np.void]] = []
        self.sampled_s: list[tuple[float, float]] = []
        self.gaps: GapCounts | None = None

    def disturbances(self) -> npt.NDArray[np.void]:
        """The pauses, as records of the kernel's list of disturbances, which has them beside failures."""
        rows = np.zeros(len(self.pauses_s), layout.DISTURBANCE)
        rows["time_s"], rows["kind"] = self.pauses_s, layout.PAUSE
        return rows

    def run(self, state: State, advance: Callable[[State], None], deadline: float = math.inf) -> None:
        """Let `advance` run the kernel from pause to pause until the simulation ends.

        Raises OutOfTime at the first pause after `deadline` (seconds on the clock of time.monotonic), and
        MoreRuns if more runs were recorded than `state.runs` has room for.
        """
        if len(state.runs):
            self.gaps = GapCounts(float(state.window[0]), float(state.window[1]))
        while True:
            pause = int(state.counters[layout.NEXT_DISTURBANCE])
            self._lay_out_until(self.pauses_s[pause] if pause < len(self.pauses_s) else np.inf)
            advance(state)
            self._read_runs(state, pause)
            if state.counters[layout.NEXT_DISTURBANCE] == pause:  # The kernel came to no further pause.
                return
            if time.monotonic() > deadline:
                raise OutOfTime
            self._read_done(state)

    def columns(self, state: State) -> Columns:
        """The results of all requests, (n,) each by name, once the simulation has ended."""
        self._read_done(state, at_the_end=True)
        return self._columns | {"last_finish_s": np.array([self._last_finish_s])}

    def _lay_out_until(self, until_s: float) -> None:
        """Write the records of all requests that arrive until `until_s`, and of the one after them, because
        the kernel compares its arrival with other events.
        """
        end = min(int(np.searchsorted(self.arrival_s, until_s, "right")) + 1, self._n)
        if end > self._laid_out:
            self._lay_out(self._laid_out, self.requests[self._laid_out : end])
            self._laid_out = end

    def _read_done(self, state: State, *, at_the_end: bool = False) -> None:
        """Read the results of every chunk whose requests are all done, or of all chunks `at_the_end`, and
        give their memory back.
        """
        leaving = {r // self._chunk for r in _leaving_requests(state)}
        unread = []
        for first in self._unread:
            end = min(first + self._chunk, self._n)
            rows = slice(first, end)
            # The kernel may still read the last chunk that is laid out, because it may compare the arrival of
            # its last request with other events.
            is_done = at_the_end or (
                end < self._laid_out
                and (self.requests["status"][rows] != layout.UNFINISHED).all()
                and first // self._chunk not in leaving
            )
            if is_done:
                self._read_chunk(rows)
            else:
                unread.append(first)
        self._unread = unread

    def _read_chunk(self, rows: slice) -> None:
        """Copy the results of these requests, and give back the memory pages that no other request is on."""
        columns = self._read(self.requests[rows], rows)
        columns.pop("arrival_s")
        self._last_finish_s = np.fmax(self._last_finish_s, columns.pop("last_finish_s")[0])
        for name, column in columns.items():
            if name not in self._columns:
                self._columns[name] = np.empty(self._n, _SMALL_TYPES.get(name, column.dtype))
            self._columns[name][rows] = column
        size = layout.REQUEST.itemsize
        # Only whole pages can be given back: from the first page that begins in these rows on.
        first_page, end_page = -(-rows.start * size // mmap.PAGESIZE), rows.stop * size // mmap.PAGESIZE
        if end_page > first_page:
            start, length = first_page * mmap.PAGESIZE, (end_page - first_page) * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_DONTNEED, start, length)
        release_memory(self.arrival_s)  # Mapped from a file, pages are read again when needed.

    def _read_runs(self, state: State, pause: int) -> None:
        """Count the gaps of the runs that were recorded since the last pause. Keep the runs themselves if the
        stretch since that pause is one of the SAMPLES parts.
        """
        if self.gaps is None:
            return
        recorded = int(state.counters[layout.RUNS])
        if recorded > len(state.runs):
            raise MoreRuns
        runs = state.runs[:recorded]
        self.gaps.add(runs)
        # A stretch is what lies between two pauses. The middle one of this many stretches is a sample.
        stretches_per_sample = max(-(-(len(self.pauses_s) + 1) // SAMPLES), 1)
        if pause % stretches_per_sample == stretches_per_sample // 2 and recorded:
            part = runs[:SAMPLE_RUNS].copy()
            end_s = part[-1]["start_s"] + layout.run_seconds(part[-1])
            start_s = self.pauses_s[pause - 1] if pause else float(self.arrival_s[0])
            if end_s > start_s:
                self.sampled.append(part)
                self.sampled_s.append((float(start_s), float(end_s)))
        state.counters[layout.RUNS] = 0


class OutOfTime(Exception):
    """The deadline passed before a streamed simulation had ended."""


class MoreRuns(Exception):
    """Between two pauses more runs of steps came than there was room for; replay.py starts again with
    more.
    """


def _leaving_requests(state: State) -> list[int]:
    """The indices of requests that are done, but whose engine has not seen their last token yet and so still
    reads their records.
    """
    leaving = []
    for r in state.workers["head"][:, layout.LEAVING].tolist():
        while r != layout.NONE:
            leaving.append(r)
            r = int(state.requests["next"][r])
    return leaving
