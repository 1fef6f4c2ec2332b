"""`Trace`, the requests that the planner plans for: when each arrives, how many tokens it has, and which
prefixes it shares. Also the windows of a trace in which an SLO is judged.

trace_reading.py reads traces from files.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from planner.errors import TraceError
from planner.files.document_values import show_value

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_TOKENS = 100_000_000  # Most tokens of one request; a larger number means a broken column.
MAX_REQUESTS = 50_000_000  # Most requests of one trace: they must fit into memory.
# The time of a simulation grows with the ids of blocks. If the mean prompt has more than this many,
# prefixes.py and agents.py make blocks larger. A block is still less than a hundredth of the mean prompt.
MOST_MEAN_IDS = 256
MAX_IDS = 200_000_000  # Most KV blocks of all prompts of a trace: their ids take 1.6 GB.

WINDOW_REQUESTS = 100  # The fewest requests of a window of an SLO: with fewer, p99 allows none to be late.

MOST_NAMED_LLMS = 5  # A trace's note on its LLMs gives the shares of at most this many.

# The warm-up is one part in WARM_UP_PARTS of a trace, but no longer than MOST_WARM_UP_S.
WARM_UP_PARTS = 20
MOST_WARM_UP_S = 120.0


def no_ids() -> IntArray:
    """The integer column (0,) of a trace that has none."""
    return np.zeros(0, np.int64)


def no_edges() -> IntArray:
    """The rows `after` (0, 2) of a trace whose requests wait for none."""
    return np.zeros((0, 2), np.int64)


def sort_waits(after: IntArray) -> IntArray:
    """Rows (request, parent) in the order of `Trace.after`: by parent, then by request."""
    return after[np.lexsort((after[:, 0], after[:, 1]))]


def constant_array(value: float, n: int) -> npt.NDArray[Any]:
    """(n,): a read-only array of equal values that takes the memory of one."""
    return np.broadcast_to(np.array(value), n)


def chosen_of(column: npt.NDArray[Any], index: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """column[index], which is a `constant_array` if the column is one."""
    is_constant = column.strides == (0,) and len(column) > 0  # All entries share one place in memory.
    return np.broadcast_to(column[0], len(index)) if is_constant else column[index]


def _never_falls(values: npt.NDArray[Any]) -> bool:
    """Whether no value is smaller than the one before it."""
    return bool((values[1:] >= values[:-1]).all())


def index_ranges(first: IntArray, count: IntArray) -> IntArray:
    """The ranges [first, first + count) of all rows as one array: first = (5, 9), count = (3, 2) make
    (5, 6, 7, 9, 10).
    """
    starts = np.cumsum(count) - count  # Where each row begins in the result.
    numbers: IntArray = np.arange(count.sum()) + np.repeat(first - starts, count)
    return numbers


def join_arrays(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate `parts`, and empty that list so that their memory is freed."""
    joined_array = np.concatenate(parts)
    parts.clear()
    return joined_array


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Trace:
    """Requests in order of arrival; every array has one entry per request, shape (n,).

    `arrival_s` never falls and is >= 0. It starts at 0, except for a file with a column `arrival_s`, whose
    values are kept to the last bit. The prompt of request i begins with the blocks
    `prefix_ids[prefix_offsets[i]:prefix_offsets[i + 1]]` of `prefix_block_tokens` each; two requests share a
    prefix where their ids agree from the start. Without ids `prefix_ids` is empty, `prefix_block_tokens` 0.
    `image_tokens` are those of `input_tokens` that an encoder makes of images or sound; None if unknown.
    `adapter` indexes `adapters`, the LoRA adapters that the trace names, -1 for the LLM alone;
    requests of several adapters have no id in common.
    `tenant` indexes `tenants`, which is empty where the trace names none; `llm` and `llms` likewise.
    `task` is the number of each request's task; it is empty where each session is one task
    (planner/traffic/tasks.py).
    `after` (e, 2) holds rows (request, parent), by parent: a request arrives `think_s` (n,) after the last of
    its parents has finished, and not before its `arrival_s`, which is when it would arrive if answers took no
    time (planner/traffic/sessions.py). Parents stand before those who wait for them.
    `dropped` counts the rows left out, by reason; `notes` say what else was done to the trace, and `warnings`
    what a user must read before any answer. `coarse_s` is the step of a clock so coarse that many requests
    have one stamp, until `spread_stamps` spreads them; else 0.
    """

    name: str
    arrival_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    prefix_offsets: IntArray = field(default_factory=no_ids)
    prefix_ids: IntArray = field(default_factory=no_ids)
    prefix_block_tokens: int = 0
    tenant: IntArray = field(default_factory=no_ids)
    tenants: tuple[str, ...] = ()
    after: IntArray = field(default_factory=no_edges)
    think_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    task: IntArray = field(default_factory=no_ids)
    dropped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    coarse_s: float = 0.0
    llm: IntArray = field(default_factory=no_ids)
    llms: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    image_tokens: IntArray | None = None
    adapter: IntArray = field(default_factory=no_ids)
    adapters: tuple[str, ...] = ()
    copies_share_prefixes: bool = False  # Copies of a request (scaling.py) have the same prompt.
    drawn_from: object = None  # The described.Description of traffic that was drawn, not recorded.
    # What the clock of the file says where `arrival_s` is 0 [s], of dates since 1970; None: it has no clock.
    clock_zero_s: float | None = None

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        if not n:
            raise TraceError(f"{self.name}: no request is left; expected at least one")
        # Columns that are left out get their default, one value for all requests. Only object.__setattr__ can
        # set a field of a frozen dataclass.
        if not self.prefix_offsets.size:
            object.__setattr__(self, "prefix_offsets", constant_array(0, n + 1))
        if not self.tenant.size:
            object.__setattr__(self, "tenant", constant_array(0, n))
        if not self.llm.size:
            object.__setattr__(self, "llm", constant_array(0, n))
        if not self.adapter.size:
            object.__setattr__(self, "adapter", constant_array(-1, n))
        if not self.think_s.size:
            object.__setattr__(self, "think_s", constant_array(0.0, n))
        columns = (self.input_tokens, self.output_tokens, self.tenant, self.llm, self.adapter, self.think_s)
        if {len(column) for column in columns} != {n} or len(self.task) not in (0, n):
            raise TraceError(f"{self.name}: {n} arrivals, but other columns have another length")
        if not (self.arrival_s[0] >= 0 and _never_falls(self.arrival_s) and self.arrival_s[-1] < np.inf):
            raise TraceError(f"{self.name}: arrival_s must be finite, >= 0 and never fall; sort it by time")
        if self.input_tokens.min() < 1 or self.output_tokens.min() < 1:
            raise TraceError(f"{self.name}: a request needs at least one input and one output token")
        images = self.image_tokens
        if images is not None and (
            len(images) != n or images.min() < 0 or (images > self.input_tokens).any()
        ):
            raise TraceError(f"{self.name}: image_tokens must be >= 0 and part of input_tokens")
        offsets = self.prefix_offsets
        if (
            len(offsets) != n + 1
            or offsets[0]
            or offsets[-1] != len(self.prefix_ids)
            or (self.has_prefixes and not _never_falls(offsets))
        ):
            raise TraceError(
                f"{self.name}: prefix_offsets must rise from 0 to {len(self.prefix_ids)} in {n} steps"
            )
        if self.prefix_ids.size and self.prefix_block_tokens < 1:
            raise TraceError(f"{self.name}: prefix_block_tokens is {self.prefix_block_tokens}, must be > 0")
        request, parent = self.after.T
        if not ((0 <= parent) & (parent < request) & (request < n)).all() or (np.diff(parent) < 0).any():
            raise TraceError(f"{self.name}: after: parents must come before their children, rows by parent")
        if not ((self.think_s >= 0) & (self.think_s < np.inf)).all():
            raise TraceError(f"{self.name}: think_s must be finite and >= 0")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0])

    @property
    def rate_rps(self) -> float:
        """Requests / duration_s, as everywhere in the planner; NaN if all arrive at once, as a single request
        does.
        """
        return len(self) / self.duration_s if self.duration_s > 0 else np.nan

    @property
    def has_prefixes(self) -> bool:
        """Whether the trace has ids of prefix blocks."""
        return bool(self.prefix_ids.size)

    def select(self, index: npt.ArrayLike, *, arrival_s: FloatArray | None = None) -> Trace:
        """The requests at `index` (positions or a mask of n booleans), in that order, with their prefixes.

        They keep their arrivals, or get those of `arrival_s`, one for each chosen request. A request no
        longer waits for parents that are not chosen.
        """
        chosen = np.asarray(index)
        # A mask, and positions from the end (negative), become positions from 0.
        if chosen.dtype == bool or not chosen.size or chosen.min() < 0:
            chosen = np.arange(len(self))[chosen]
        after = no_edges()
        if self.after.size:
            new_position = np.full(len(self), -1)
            new_position[chosen] = np.arange(len(chosen))
            # A request that is chosen twice has two new positions, of which `new_position` has the last.
            if (new_position[chosen] != np.arange(len(chosen))).any():
                raise TraceError(f"{self.name}: who waits for whom is lost where a request is taken twice")
            after = new_position[self.after]
            after = after[(after >= 0).all(axis=1)]
        offsets, ids_at = no_ids(), no_ids()
        if self.has_prefixes:
            blocks = np.diff(self.prefix_offsets)[chosen]
            offsets = np.concatenate(([0], np.cumsum(blocks)))
            ids_at = index_ranges(self.prefix_offsets[chosen], blocks)
        return replace(
            self,
            arrival_s=self.arrival_s[chosen] if arrival_s is None else arrival_s,
            input_tokens=self.input_tokens[chosen],
            output_tokens=self.output_tokens[chosen],
            prefix_offsets=offsets,
            prefix_ids=self.prefix_ids[ids_at],
            tenant=chosen_of(self.tenant, chosen),
            llm=chosen_of(self.llm, chosen),
            adapter=chosen_of(self.adapter, chosen),
            image_tokens=None if self.image_tokens is None else self.image_tokens[chosen],
            after=sort_waits(after),
            think_s=chosen_of(self.think_s, chosen),
            task=self.task[chosen] if self.task.size else self.task,
        )

    def of_llm(self, name: str) -> Trace:
        """The requests to one of `llms`. Raises TraceError if waits join them with those to another LLM."""
        index = self.llms.index(name)
        llm_of_waiting, llm_of_parent = self.llm[self.after.T]
        crosses = llm_of_waiting != llm_of_parent
        if (across := crosses & ((llm_of_waiting == index) | (llm_of_parent == index))).any():
            raise TraceError(
                f"{self.name}: {across.sum()} requests wait for requests to another LLM (columns after and "
                f"model), {show_value(name)} among them; LLMs are planned each on its own traffic, so keep a "
                "session to one LLM, or take such waits out"
            )
        own_requests = self.select(self.llm == index)
        note = f"{len(own_requests)} of the {len(self)} requests of {self.name}: those to {show_value(name)}"
        # The note on several LLMs is not true of the selected requests.
        notes = (*(each for each in self.notes if each != several_llms(self.llm, self.llms)), note)
        return replace(own_requests, llm=no_ids(), llms=(), notes=notes)


Value = TypeVar("Value")


def kept_with_trace(find: Callable[[Trace], Value]) -> Callable[[Trace], Value]:
    """A cache: a function that runs `find` once for each trace, and keeps the value as long as the trace is
    in memory. Threads that need the value at the same time may each run `find`. Callers must not change it.
    """
    values: WeakKeyDictionary[Trace, Value] = WeakKeyDictionary()
    lock = threading.Lock()

    @functools.wraps(find)
    def find_once(trace: Trace) -> Value:
        with lock:
            if trace in values:
                return values[trace]
        value = find(trace)
        with lock:
            values[trace] = value
        return value

    return find_once


def measured_window(trace: Trace) -> tuple[float, float]:
    """The window (start, end) [s] whose requests are judged: from the end of the warm-up to the last arrival.

    The warm-up is left out because the first requests come to an empty fleet and are too fast. If requests
    wait for others, the last arrival depends on the fleet, so the window has no end (infinity).
    """
    first, last = float(trace.arrival_s[0]), float(trace.arrival_s[-1])
    return first + warm_up_s(last - first), np.inf if trace.after.size else last


def warm_up_s(span_s: float) -> float:
    """The length of the warm-up of a run whose arrivals span this time [s]."""
    return min(span_s / WARM_UP_PARTS, MOST_WARM_UP_S)


def judged_span_s(trace: Trace) -> float:
    """The length [s] of the measured window, up to the last arrival; if requests wait for others, up to the
    last nominal arrival (sessions.py).
    """
    return float(trace.arrival_s[-1]) - measured_window(trace)[0]


def last_tenth_s(start_s: float, end_s: float) -> float:
    """When the last tenth of a window begins; the backlog test judges by the requests in it."""
    return end_s - (end_s - start_s) / 10


def slo_windows_s(arrival_s: FloatArray, window_s: tuple[float, float], every_s: float) -> FloatArray:
    """Edges (W + 1,) of the windows in which `slo: {every: 10 min}` is judged.

    The windows, each `every_s` long, begin at the start of the measured window `window_s`. A remainder at the
    end is a window of its own if it is at least half as long as the others, else part of the window before.
    Windows of fewer than WINDOW_REQUESTS arrivals are joined to the next, at the end to the one before.
    `arrival_s` (n,) are nominal if requests wait for others, so that the edges do not depend on the fleet.
    """
    start_s, end_s = window_s
    # Adding 0.5 rounds the count, so that a remainder of half a window counts as one.
    last_window = max(int((end_s - start_s) / every_s + 0.5), 1) - 1
    judged_s = arrival_s[(arrival_s >= start_s) & (arrival_s <= end_s)]
    window_of = np.minimum(np.floor((judged_s - start_s) / every_s), last_window)
    edges_s, requests = [start_s], 0
    for window, arrivals in zip(*np.unique(window_of, return_counts=True), strict=True):
        requests += int(arrivals)
        if requests >= WINDOW_REQUESTS:
            edges_s.append(start_s + every_s * (window + 1))
            requests = 0
    # The last edge (unless it is the start) is replaced by the end of the trace, so that windows at the end
    # with too few requests are part of the window before.
    return np.array([*(edges_s[:-1] or edges_s), end_s])


def window_numbers(times_s: FloatArray, edges_s: FloatArray) -> npt.NDArray[np.int64]:
    """The window in which each time lies, [edge, next edge); times after the last edge are in the last."""
    return np.clip(np.searchsorted(edges_s, times_s, "right") - 1, 0, len(edges_s) - 2)


def spread_stamps(trace: Trace, *, seed: int) -> Trace:
    """The trace with the stamps of a coarse clock spread uniformly over the clock's step, and the first
    arrival where it was; any other trace unchanged.
    """
    coarse_s = trace.coarse_s
    if not coarse_s:
        return trace
    jitter_s = np.random.default_rng(seed).uniform(0.0, coarse_s, len(trace))
    # Jitter is less than the clock's step, so sorting changes the order of equal stamps alone.
    arrival_s = np.sort(trace.arrival_s + jitter_s)
    note = (
        f"{coarse_s:g} s quantised stamps: uniform jitter of 0 to {coarse_s:g} s (seed {seed}), "
        "rows kept in their order"
    )
    arrival_s -= arrival_s[0] - trace.arrival_s[0]
    return replace(trace, arrival_s=arrival_s, notes=(*trace.notes, note), coarse_s=0.0)


def several_llms(llm: IntArray, llms: tuple[str, ...]) -> str:
    """The note on a trace of several LLMs, with the shares of the largest; `of_llm` removes it."""
    requests_of_llm = np.bincount(llm, minlength=len(llms)).tolist()
    largest = Counter(dict(zip(llms, requests_of_llm, strict=True))).most_common(MOST_NAMED_LLMS)
    shares = (f"{show_value(name)} {100 * requests / len(llm):.1f} %" for name, requests in largest)
    return f"requests to {len(llms)} LLMs taken as one: {', '.join(shares)}"
