"""Reading a trace: which request arrived when, how long it was, what it shares with others.

A file's format is told by its columns, never by its name. FORMATS is the list of what we accept; each may
come as CSV or as JSONL, plain or packed (.gz). What a trace loses or gains on the way in (failed requests
left out, coarse clocks spread) stands in its `dropped` and `notes`.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.errors import TraceError
from planner.files import open_text

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_TOKENS = 100_000_000  # of one request; more is a broken column
MAX_SPAN_S = 100 * 365.25 * 86400.0
OUT_OF_ORDER_FRAC = 0.01  # fewer late rows than this are sorted, more are an error
_BLOCK_BYTES = 16 * 2**20

NO_OUTPUT = "no output tokens (failed request)"
NO_INPUT = "no input tokens"
BLANK = "no field (blank line)"


def _no_ids() -> IntArray:
    return np.zeros(0, np.int64)


def _no_edges() -> IntArray:
    return np.zeros((0, 2), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of arrival; every array has one entry per request, shape (n,).

    `arrival_s` never falls and is >= 0. It starts at 0 except where a file gives `arrival_s` itself, whose
    values are kept to the last bit. The prompt of request i begins with the blocks
    `prefix_ids[prefix_offsets[i]:prefix_offsets[i + 1]]` of `prefix_block_tokens` each; two requests share a
    prefix where their ids agree from the start. Without ids `prefix_ids` is empty, `prefix_block_tokens` 0.
    `tenant` indexes `tenants`, which is empty where the trace names none; `llm` and `llms` likewise.
    `after` (e, 2) holds rows (request, parent), by parent: a request arrives `think_s` (n,) after the last of
    its parents has finished, and not before its `arrival_s`. Parents stand before those who wait for them.
    `dropped` counts the rows left out, by reason; `notes` say what else was done to the trace. `coarse_s`
    is the step of a clock whose stamps are still to be `spread`, 0 where they need not.
    """

    name: str
    arrival_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    prefix_offsets: IntArray = field(default_factory=_no_ids)
    prefix_ids: IntArray = field(default_factory=_no_ids)
    prefix_block_tokens: int = 0
    tenant: IntArray = field(default_factory=_no_ids)
    tenants: tuple[str, ...] = ()
    after: IntArray = field(default_factory=_no_edges)
    think_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    dropped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    coarse_s: float = 0.0
    llm: IntArray = field(default_factory=_no_ids)
    llms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        if not n:
            raise TraceError(f"{self.name}: no request is left; expected at least one")
        if not self.prefix_offsets.size:
            object.__setattr__(self, "prefix_offsets", np.zeros(n + 1, np.int64))
        if not self.tenant.size:
            object.__setattr__(self, "tenant", np.zeros(n, np.int64))
        if not self.llm.size:
            object.__setattr__(self, "llm", np.zeros(n, np.int64))
        if not self.think_s.size:
            object.__setattr__(self, "think_s", np.zeros(n))
        columns = (self.input_tokens, self.output_tokens, self.tenant, self.llm, self.think_s)
        if {len(column) for column in columns} != {n}:
            raise TraceError(f"{self.name}: {n} arrivals, but other columns have another length")
        if not (
            self.arrival_s[0] >= 0 and (np.diff(self.arrival_s) >= 0).all() and self.arrival_s[-1] < np.inf
        ):
            raise TraceError(f"{self.name}: arrival_s must be finite, >= 0 and never fall; sort it by time")
        if self.input_tokens.min() < 1 or self.output_tokens.min() < 1:
            raise TraceError(f"{self.name}: a request needs at least one input and one output token")
        offsets = self.prefix_offsets
        if (
            len(offsets) != n + 1
            or offsets[0]
            or offsets[-1] != len(self.prefix_ids)
            or (np.diff(offsets) < 0).any()
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
        """From the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0])

    @property
    def rate_rps(self) -> float:
        """Requests / duration_s, everywhere in the planner; NaN where all arrive at once (one request)."""
        return len(self) / self.duration_s if self.duration_s > 0 else np.nan

    @property
    def has_prefixes(self) -> bool:
        return bool(self.prefix_ids.size)

    def select(self, index: npt.ArrayLike, *, arrival_s: FloatArray | None = None) -> Trace:
        """The requests at `index` (positions or a mask of n booleans), in that order, with their prefixes.

        They keep their arrivals, or take those of `arrival_s`, one for each request chosen; whoever waits for
        a request that is not chosen no longer does.
        """
        chosen = np.arange(len(self))[np.asarray(index)]
        place = np.full(len(self), -1)
        place[chosen] = np.arange(len(chosen))
        if self.after.size and (place[chosen] != np.arange(len(chosen))).any():
            raise TraceError(f"{self.name}: who waits for whom is lost where a request is taken twice")
        after = place[self.after]
        after = after[(after >= 0).all(axis=1)]
        blocks = np.diff(self.prefix_offsets)[chosen]
        offsets = np.concatenate(([0], np.cumsum(blocks)))
        # position of every kept id: its request's old start, plus how far it stands from its new start
        ids_at = np.repeat(self.prefix_offsets[chosen] - offsets[:-1], blocks) + np.arange(offsets[-1])
        return replace(
            self,
            arrival_s=self.arrival_s[chosen] if arrival_s is None else arrival_s,
            input_tokens=self.input_tokens[chosen],
            output_tokens=self.output_tokens[chosen],
            prefix_offsets=offsets,
            prefix_ids=self.prefix_ids[ids_at],
            tenant=self.tenant[chosen],
            llm=self.llm[chosen],
            after=after[np.lexsort((after[:, 0], after[:, 1]))],
            think_s=self.think_s[chosen],
        )

    def of_llm(self, name: str) -> Trace:
        """The requests to one of `llms`, at their own times."""
        index = self.llms.index(name)
        part = self.select(self.llm == index)
        note = f"{len(part)} of the {len(self)} requests of {self.name}: those to {_shown(name)}"
        notes = (*(each for each in self.notes if each != _several_llms(self.llm, self.llms)), note)
        return replace(part, llm=_no_ids(), llms=(), notes=notes)


@dataclass(frozen=True, slots=True)
class Format:
    """A public trace format: the columns that tell it, compared without regard to case.

    `clock` is the column of arrival times: dates, or numbers of which `ticks_per_s` make a second.
    `is_coarse` marks clocks that may tick in steps of many requests; only those are ever spread.
    `block_tokens` is 0 where ids stand for texts of any length, whose lengths are in files beside the trace.
    """

    name: str
    clock: str
    input: str
    output: str
    ticks_per_s: float = 1.0
    starts_at_zero: bool = True
    is_coarse: bool = False
    block_tokens: int = 512
    also: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.clock, self.input, self.output, *self.also)


FORMATS = (
    Format("requests", "arrival_s", "input_tokens", "output_tokens", starts_at_zero=False),
    Format("generic", "timestamp", "input_tokens", "output_tokens"),
    Format("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    Format("BurstGPT", "Timestamp", "Request tokens", "Response tokens", is_coarse=True),
    Format("Qwen-Bailian", "timestamp", "input_length", "output_length", block_tokens=16, also=("chat_id",)),
    Format(
        "RAGPulse",
        "timestamp",
        "input_length",
        "output_length",
        block_tokens=0,
        also=("hash_ids.user_input",),
    ),
    Format("Mooncake", "timestamp", "input_length", "output_length", ticks_per_s=1000.0, is_coarse=True),
    Format("Vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens"),
)
_TENANT = ("tenant", "client")
_PREFIX = ("hash_ids", "prefix_ids")
_BLOCK = ("prefix_block_tokens",)
_REQUEST_ID, _AFTER, _THINK = ("request_id",), ("after",), ("think_s",)  # who waits for whom, and how long
_TEXT_BLOCK_TOKENS = 16  # into which texts of any length are cut


def read_trace(path: str | Path, *, seed: int | None = 0) -> Trace:
    """Read any of FORMATS. `seed` serves to `spread` coarse clocks alone; without one they stay coarse.

    Raises TraceError (or its parent InputError for what is no readable text) naming file, line and column.
    """
    path = Path(path)
    with open_text(path) as stream:
        first, at = _first_line(path, stream)
        if first[:1] == b"[":
            raise TraceError(f"{path}, line {at}: is one JSON list; expected JSONL, one object per line")
        trace = (_read_jsonl if first[:1] == b"{" else _read_csv)(path, stream, first, at)
    return trace if seed is None else spread(trace, seed=seed)


def spread(trace: Trace, *, seed: int) -> Trace:
    """A trace of a coarse clock with its stamps spread over the clock's step; any other as it is."""
    quantum_s = trace.coarse_s
    if not quantum_s:
        return trace
    jitter_s = np.random.default_rng(seed).uniform(0.0, quantum_s, len(trace))
    arrival_s = np.sort(trace.arrival_s + jitter_s)
    note = (
        f"{quantum_s:g} s quantised stamps: uniform jitter of 0 to {quantum_s:g} s (seed {seed}), "
        "rows kept in their order"
    )
    return replace(trace, arrival_s=arrival_s - arrival_s[0], notes=(*trace.notes, note), coarse_s=0.0)


def _first_line(path: Path, stream: io.BufferedReader) -> tuple[bytes, int]:
    """The first line that is not blank, and its number from 1."""
    for number, line in enumerate(stream, start=1):
        if line.strip():
            return line.strip(), number
    raise TraceError(f"{path}: is empty; expected a trace with one of the headers {_accepted()}")


def _read_csv(path: Path, stream: io.BufferedReader, header: bytes, at: int) -> Trace:
    try:
        names = next(csv.reader([header.decode()]))
    except csv.Error as error:
        raise TraceError(f"{path}, line {at}: is no CSV header ({error}); expected {_accepted()}") from None
    # pandas gets our own names and one column more, where a field too many lands and is seen
    columns = [f"c{i}" for i in range(len(names) + 1)]
    rows = _Rows(path, names, f"{path}, line {at}")
    needed = [columns[names.index(name)] for name in rows.needed]
    as_text = {columns[names.index(name)]: object for name in rows.needed if name not in rows.counts}
    line = at + 1
    while block := stream.readlines(_BLOCK_BYTES):
        text = io.BytesIO(b"".join([",".join(columns).encode(), b"\n", *block]))
        try:
            table = pd.read_csv(
                text,
                usecols=[*needed, columns[-1]],
                dtype=as_text,  # Python's float() keeps every digit of a time
                index_col=False,
                skip_blank_lines=False,
                keep_default_na=False,
                na_values=[""],
                low_memory=False,
            )
        except (ValueError, OverflowError) as error:  # ParserError is a ValueError
            reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. ")
            where = f"{path}, lines {line} to {line + len(block) - 1}"
            raise TraceError(f"{where}: is not a table of {len(names)} columns ({reason})") from None
        if (extra := np.flatnonzero(table[columns[-1]].notna())).size:
            raise TraceError(
                f"{path}, line {line + extra[0]}: has more than the {len(names)} fields of the header; "
                "write numbers without thousands separators"
            )
        numbers = np.arange(line, line + len(table))
        blank = np.logical_and.reduce([table[column].isna().to_numpy() for column in needed])
        for name in rows.lists:
            place = columns[names.index(name)]
            table[place] = pd.Series([_ids_of_text(text) for text in table[place]], dtype=object)
        rows.add(
            numbers, blank, {name: table[column] for name, column in zip(rows.needed, needed, strict=True)}
        )
        line += len(block)
    return rows.trace()


def _ids_of_text(text: object) -> list[int] | None:
    """'[3, 4]' and '3 4' are blocks 3 and 4; None where it is neither."""
    if not isinstance(text, str):
        return []
    try:
        return [int(word) for word in text.strip(" []").replace(",", " ").split()]
    except ValueError:
        return None


def _read_jsonl(path: Path, stream: io.BufferedReader, first: bytes, at: int) -> Trace:
    _object(path, at, first)
    rows = _Rows(path, _names(first), f"{path}, line {at}")
    for block in _blocks(at, first, stream):
        columns: dict[str, list[Any]] = {name: [] for name in rows.needed}
        for number, line in block:
            request = _object(path, number, line) if line.strip() else {}
            for name, column in columns.items():
                column.append(request.get(name))
        for name in rows.lists:
            columns[name] = [_ids_of_value(one) for one in columns[name]]
        rows.add(
            np.array([number for number, _ in block]),
            np.array([not line.strip() for _, line in block]),
            {name: pd.Series(column, dtype=object) for name, column in columns.items()},
        )
    return rows.trace()


def _blocks(at: int, first: bytes, rest: io.BufferedReader) -> Iterator[list[tuple[int, bytes]]]:
    """All lines with their numbers, some MiB at a time."""
    block, line = [first], at
    while block:
        yield list(enumerate(block, start=line))
        line += len(block)
        block = rest.readlines(_BLOCK_BYTES)


def _object(path: Path, line: int, text: bytes) -> dict[str, Any]:
    try:
        request = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{path}, line {line}: is not JSON ({error}); expected one object per line"
        ) from None
    if not isinstance(request, dict):
        raise TraceError(f"{path}, line {line}: expected a JSON object, found {_shown(request)}")
    return request


def _names(text: bytes) -> list[str]:
    """The keys of a JSON object; those of an object within it as "outer.inner", beside the outer one."""
    names = []
    for key, value in json.loads(text, object_pairs_hook=_Pairs):  # as pairs: a key given twice is seen
        names.append(key)
        if isinstance(value, _Pairs):
            names += [f"{key}.{inner}" for inner, _ in value]
    return names


class _Pairs(list[tuple[str, Any]]):
    """A JSON object, unlike a JSON list."""


def _ids_of_value(value: object) -> list[int] | None:
    """[3, 4] or {"a": [3], "b": [4]} are 3 and 4, nothing is none; None where it is something else."""
    if value is None:
        return []
    if isinstance(value, dict):
        parts = [_ids_of_value(part) for part in value.values()]
        return None if None in parts else [one for part in parts if part for one in part]
    return value if isinstance(value, list) and set(map(type, value)) <= {int} else None


class _Rows:
    """Gathers the checked columns of one file block by block, then makes the trace of them."""

    def __init__(self, path: Path, names: list[str], where: str) -> None:
        self.path = path
        self.known = {name.strip().lower(): name for name in names}
        if len(self.known) < len(names):
            twice = [
                name for name, times in Counter(name.strip().lower() for name in names).items() if times > 1
            ]
            raise TraceError(f"{where}: column {_shown(twice[0])} is given twice; keep one")
        self.format = self._tell_format(where)
        self.clock, *self.counts = (self.known[name.lower()] for name in self.format.columns[:3])
        self.tenant = self._one_of(_TENANT)
        self.hash_ids = self._one_of(_PREFIX)
        self.llm = self._one_of(("model",))
        self.block = self._one_of(_BLOCK)
        self.after = self._one_of(_AFTER)
        self.request_id = self._one_of(_REQUEST_ID) if self.after else None
        self.think = self._one_of(_THINK) if self.after else None
        if self.after and not self.request_id:
            raise TraceError(
                f"{where}: column {self.after} names requests by their request_id, which is missing"
            )
        self.lists = [name for name in (self.hash_ids, self.after) if name is not None]
        texts = (self.tenant, self.llm, self.block, self.request_id, self.think, *self.lists)
        self.needed = [self.clock, *self.counts, *(name for name in texts if name is not None)]
        self.ticks: list[FloatArray] = []
        self.origin: pd.Timestamp | None = None  # the first date, where the clock gives dates
        self.tokens: tuple[list[IntArray], list[IntArray]] = ([], [])
        self.texts: dict[str, list[str]] = {
            name: [] for name in (self.tenant, self.llm, self.block, self.request_id) if name is not None
        }
        self.parents: list[list[int]] = []
        self.think_s: list[FloatArray] = []
        self.ids: list[npt.NDArray[Any]] = []  # flat, and how many of them each request has:
        self.blocks: list[IntArray] = []
        self.dropped: Counter[str] = Counter()

    def _tell_format(self, where: str) -> Format:
        missing = {f: [name for name in f.columns if name.lower() not in self.known] for f in FORMATS}
        closest = min(missing, key=lambda f: len(missing[f]))
        if lacks := missing[closest]:
            found = ", ".join(map(_shown, list(self.known.values())[:16])) or "no column"
            raise TraceError(
                f"{where}: closest to the {closest.name} format, but column {_shown(lacks[0])} is missing; "
                f"found {found}; expected one of the headers {_accepted()}"
            )
        return closest

    def _one_of(self, names: Iterable[str]) -> str | None:
        return next((self.known[name] for name in names if name in self.known), None)

    def add(self, line: IntArray, blank: npt.NDArray[np.bool_], columns: dict[str, pd.Series[Any]]) -> None:
        """Check a block of rows; `line` (rows,) is where each stands in the file."""
        self.dropped[BLANK] += int(blank.sum())
        if blank.any():
            line = line[~blank]
            columns = {name: column[~blank] for name, column in columns.items()}
        if not len(line):
            return
        inputs, outputs = (self._tokens(line, name, columns[name]) for name in self.counts)
        ticks = self._ticks(line, columns[self.clock])
        # a failure often lacks both lengths; it counts once
        self.dropped[NO_OUTPUT] += int((outputs == 0).sum())
        self.dropped[NO_INPUT] += int(((inputs == 0) & (outputs > 0)).sum())
        keep = (inputs > 0) & (outputs > 0)
        self.ticks.append(ticks[keep])
        self.tokens[0].append(inputs[keep])
        self.tokens[1].append(outputs[keep])
        for name, texts in self.texts.items():
            texts += columns[name][keep].fillna("").astype(str).tolist()
        if self.think is not None:
            think_s = _numbers(columns[self.think].where(columns[self.think].notna(), 0.0))
            if (at := np.flatnonzero(~((think_s >= 0) & (think_s < np.inf)))).size:
                found = _found(columns[self.think].iloc[at[0]])
                self._refuse(line[at[0]], self.think, "seconds >= 0", found)
            self.think_s.append(think_s[keep])
        if self.after is not None:
            self.parents += self._lists(line, self.after, columns[self.after], keep)
        if self.hash_ids is not None:
            ids = self._lists(line, self.hash_ids, columns[self.hash_ids], keep)
            flat = [block for one in ids for block in one]
            try:
                self.ids.append(np.array(flat, dtype=np.int64))
            except OverflowError:  # hashes of 64 bits and more
                self.ids.append(np.array(flat, dtype=object))
            self.blocks.append(np.fromiter(map(len, ids), np.int64, len(ids)))

    def _lists(
        self, line: IntArray, name: str, column: pd.Series[Any], keep: npt.NDArray[np.bool_]
    ) -> list[list[int]]:
        lists = column.tolist()
        if None in lists:
            self._refuse(line[lists.index(None)], name, "a list of whole numbers", "something else")
        return [one for one, kept in zip(lists, keep.tolist(), strict=True) if kept]

    def _tokens(self, line: IntArray, name: str, column: pd.Series[Any]) -> IntArray:
        counts = _numbers(column)
        bad = ~((counts >= 0) & (counts <= MAX_TOKENS) & (counts == np.floor(counts)))
        if (at := np.flatnonzero(bad)).size:
            expected = f"a whole number of tokens, 0 to {MAX_TOKENS}"
            self._refuse(line[at[0]], name, expected, _found(column.iloc[at[0]]))
        return counts.astype(np.int64)

    def _ticks(self, line: IntArray, column: pd.Series[Any]) -> FloatArray:
        """Times as they stand where they are numbers; where they are dates, seconds after the first."""
        first = column.iloc[0]
        is_date = isinstance(first, str) and bool(np.isnan(_number(first)))
        if self.ticks and is_date != (self.origin is not None):
            kinds = ("a number", "a date")
            expected = f"{kinds[not is_date]} as in the lines before"
            self._refuse(line[0], self.clock, expected, _found(first))
        if is_date:
            dates = pd.to_datetime(column.astype(str), format="ISO8601", utc=True, errors="coerce")
            bad = ~dates.dt.year.between(1900, 2100).to_numpy()  # within 64 bits of nanoseconds
            expected = "a date such as 2023-11-16 18:17:03.9799600"
        else:
            ticks = _numbers(column)
            bad = ~((ticks >= 0) & (ticks < np.inf))
            expected = "a number >= 0"
        if (at := np.flatnonzero(bad)).size:
            self._refuse(line[at[0]], self.clock, expected, _found(column.iloc[at[0]]))
        if is_date:
            self.origin = self.origin or dates.iloc[0]
            ticks = (dates.dt.as_unit("ns") - self.origin).to_numpy().astype(np.int64) / 1e9
        return ticks

    def _refuse(self, line: int, name: str, expected: str, found: str) -> None:
        raise TraceError(f"{self.path}, line {line}, column {name}: expected {expected}, found {found}")

    def trace(self) -> Trace:
        """What was gathered, in order of arrival."""
        dropped = {reason: rows for reason, rows in sorted(self.dropped.items()) if rows}
        if not sum(map(len, self.ticks)):
            left_out = ", ".join(f"{rows} rows with {reason}" for reason, rows in dropped.items())
            raise TraceError(
                f"{self.path}: no request is left; found {left_out or 'no row below the header'}"
            )
        ticks = np.concatenate(self.ticks)
        order, notes = self._order(ticks)
        if order is not None:
            ticks = ticks[order]
        if self.format.starts_at_zero or self.origin is not None:
            ticks = ticks - ticks[0]
        arrival_s = ticks if self.origin is not None else ticks / self.format.ticks_per_s
        if arrival_s[-1] > MAX_SPAN_S:
            raise TraceError(
                f"{self.path}, column {self.clock}: the last request arrives after {arrival_s[-1]:.3g} s, "
                "more than 100 years; give times in seconds"
            )
        quantum_s = (clock_quantum_s(arrival_s) if self.format.is_coarse else None) or 0.0
        tenant, tenants = self._named(self.tenant)
        llm, llms = self._named(self.llm)
        if len(llms) > 1:
            notes.append(_several_llms(llm, llms))
        inputs, outputs = (np.concatenate(parts) for parts in self.tokens)
        offsets, ids, block_tokens = self._prefixes(inputs, notes)
        in_file_order = Trace(
            name=self.path.name.removesuffix(".gz"),
            arrival_s=np.zeros(len(ticks)),
            input_tokens=inputs,
            output_tokens=outputs,
            prefix_offsets=offsets,
            prefix_ids=ids,
            prefix_block_tokens=block_tokens,
            tenant=tenant,
            tenants=tenants,
            llm=llm,
            llms=llms,
        )
        everything = np.arange(len(ticks)) if order is None else order
        in_order = in_file_order.select(everything, arrival_s=arrival_s)
        after = self._after(everything)
        if waits := len(np.unique(after[:, 0])):
            notes.append(f"{waits} requests wait for others: when they arrive depends on the fleet")
        return replace(
            in_order,
            after=after,
            think_s=np.concatenate(self.think_s)[everything] if self.think_s else np.zeros(0),
            dropped=dropped,
            notes=tuple(notes),
            coarse_s=quantum_s,
        )

    def _after(self, order: IntArray) -> IntArray:
        """Rows (request, parent), by parent, of the requests in this order."""
        if self.request_id is None:
            return _no_edges()
        names = self.texts[self.request_id]
        place = {names[row]: i for i, row in enumerate(order.tolist())}
        if len(place) < len(names):
            twice = Counter(names).most_common(1)[0][0]
            raise TraceError(f"{self.path}, column {self.request_id}: {_shown(twice)} is given twice")
        edges = []
        for i, row in enumerate(order.tolist()):
            for parent in map(str, self.parents[row]):
                if place.get(parent, i) >= i:
                    raise TraceError(
                        f"{self.path}, column {self.after}: request {names[row]} waits for {parent}, which "
                        "is no request with tokens that stands, and arrives, before it"
                    )
                edges.append((place[parent], i))
        by_parent = np.array(sorted(set(edges)), dtype=np.int64).reshape(-1, 2)
        return by_parent[:, ::-1]

    def _named(self, column: str | None) -> tuple[IntArray, tuple[str, ...]]:
        """A column of names as indices and the names; empty without such a column."""
        if column is None:
            return _no_ids(), ()
        codes, names = pd.factorize(np.array(self.texts[column], dtype=object))
        return codes.astype(np.int64), tuple(names.tolist())

    def _order(self, ticks: FloatArray) -> tuple[IntArray | None, list[str]]:
        """Positions in order of arrival, None where the file has that order, and a note on it."""
        late = ticks < np.maximum.accumulate(ticks)
        if not late.any():
            return None, []
        if (rows := int(late.sum())) >= OUT_OF_ORDER_FRAC * len(ticks):
            raise TraceError(
                f"{self.path}, column {self.clock}: {rows} of {len(ticks)} rows are out of order, at most "
                f"{OUT_OF_ORDER_FRAC:.0%} may be; sort the file by {self.clock}"
            )
        return np.argsort(ticks, kind="stable"), [
            f"{rows} of {len(ticks)} rows out of order: sorted by arrival"
        ]

    def _prefixes(self, inputs: IntArray, notes: list[str]) -> tuple[IntArray, IntArray, int]:
        """Offsets (n + 1,), ids (m,), tokens of a block. No request has more blocks than its input fills."""
        ids = np.concatenate(self.ids) if self.ids else _no_ids()
        block_tokens = self._block_tokens()
        if not ids.size:
            return _no_ids(), _no_ids(), 0
        blocks = np.concatenate(self.blocks)
        if not block_tokens:
            return self._cut_texts(inputs, ids, blocks, notes)
        if ids.dtype == object:  # only equality matters
            ids = pd.factorize(ids)[0].astype(np.int64)
        fit = -(-inputs // block_tokens)
        if over := int((blocks > fit).sum()):
            notes.append(
                f"{over} requests had more hash ids than blocks of {block_tokens} tokens: "
                "the ids beyond the input were left out"
            )
            within = np.arange(len(ids)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
            ids = ids[within < np.repeat(fit, blocks)]
            blocks = np.minimum(blocks, fit)
        return np.concatenate(([0], np.cumsum(blocks))), ids, block_tokens

    def _block_tokens(self) -> int:
        """As the file says in a column of its own, which must be the same in every row; else the format's."""
        if self.block is None:
            return self.format.block_tokens
        found = sorted(set(self.texts[self.block]))
        tokens = _number(found[0])
        if len(found) > 1 or not (1 <= tokens <= MAX_TOKENS and tokens == int(tokens)):
            raise TraceError(
                f"{self.path}, column {self.block}: expected one whole number of tokens >= 1 in all rows, "
                f"found {', '.join(map(_shown, found[:3]))}"
            )
        return int(tokens)

    def _cut_texts(
        self, inputs: IntArray, texts: npt.NDArray[Any], counts: IntArray, notes: list[str]
    ) -> tuple[IntArray, IntArray, int]:
        """Prompts made of texts of any length, as blocks: shared where all texts up to the block's end agree.

        What a prompt has beyond its texts counts to the last of them.
        """
        length = self._text_lengths(notes)
        if length is None:
            return _no_ids(), _no_ids(), 0
        chains: dict[tuple[int, int], int] = {}  # (chain before, text) -> chain
        ids, start = [], 0
        for number, (tokens, count) in enumerate(zip(inputs.tolist(), counts.tolist(), strict=True)):
            chain, ends, path = -1, [0], []
            for text in texts[start : start + count].tolist():
                if text not in length:
                    raise TraceError(
                        f"{self.path}, request {number + 1}, column {self.hash_ids}: expected texts whose "
                        f"tokens stand in a file beside it, found text {text}"
                    )
                chain = chains.setdefault((chain, text), len(chains))
                path.append(chain)
                ends.append(ends[-1] + length[text])
            start += count
            blocks = np.arange(-(-tokens // _TEXT_BLOCK_TOKENS) if path else 0)
            last_token = np.minimum((blocks + 1) * _TEXT_BLOCK_TOKENS, tokens) - 1
            holder = np.minimum(np.searchsorted(ends[1:], last_token, side="right"), len(path) - 1)
            ids.append(np.array(path, np.int64)[holder] * MAX_TOKENS + blocks)
        offsets = np.concatenate(([0], np.cumsum([len(one) for one in ids])))
        return offsets, np.concatenate(ids), _TEXT_BLOCK_TOKENS

    def _text_lengths(self, notes: list[str]) -> dict[int, int] | None:
        """Tokens of every text, from the other .jsonl files in the trace's folder: lines of two numbers."""
        length: dict[int, int] = {}
        for path in sorted({*self.path.parent.glob("*.jsonl"), *self.path.parent.glob("*.jsonl.gz")}):
            if path == self.path:
                continue
            with open_text(path) as stream:
                for number, line in enumerate(stream, start=1):
                    if not line.strip():
                        continue
                    values = list(_object(path, number, line).values())
                    if len(values) == 2 and set(map(type, values)) == {int}:
                        length[values[0]] = values[1]
                    elif number == 1:
                        break  # another kind of file
                    else:
                        raise TraceError(f"{path}, line {number}: expected a text's number and its tokens")
        if length:
            return length
        notes.append(
            f"{self.hash_ids} left out: its texts have any length, and no file beside the trace says which "
            "(RAGPulse's 1_sys_prompt.jsonl to 5_web_search.jsonl)"
        )
        return None


def _several_llms(llm: IntArray, llms: tuple[str, ...]) -> str:
    """The note on a trace of several LLMs, as long as it is not split."""
    counts = Counter(dict(zip(llms, np.bincount(llm, minlength=len(llms)).tolist(), strict=True)))
    shares = (f"{_shown(name)} {rows / len(llm):.1%}" for name, rows in counts.most_common(5))
    return f"requests to {len(llms)} LLMs taken as one: {', '.join(shares)}"


def clock_quantum_s(arrival_s: FloatArray) -> float | None:
    """The step of a clock that gives many requests one stamp, None where there is no such step.

    The step is the usual distance of two stamps. A clock counts as quantised when there are at most half as
    many stamps as requests and 99 % of the stamps are multiples of the step to within 1 % of it.
    """
    stamps_s = np.unique(arrival_s)
    if len(stamps_s) < 3 or 2 * len(stamps_s) > len(arrival_s):
        return None
    usual_s = float(np.median(np.diff(stamps_s)))
    steps = np.round((stamps_s - stamps_s[0]) / usual_s)
    # the median carries the clock's rounding (2.999 or 3 s): refine it over the whole trace
    quantum_s = float(f"{(stamps_s[-1] - stamps_s[0]) / steps[-1]:.6g}")
    off = np.abs((stamps_s - stamps_s[0]) / quantum_s - steps)
    return quantum_s if (off <= 0.01).mean() >= 0.99 else None


def _numbers(column: pd.Series[Any]) -> FloatArray:
    """As float64, NaN where it is not a number; text by Python's float(), which keeps every digit."""
    if column.dtype.kind in "iuf":
        return column.to_numpy(dtype=np.float64)
    try:
        if not any(isinstance(value, bool) for value in column):
            return column.to_numpy(dtype=object).astype(np.float64)
    except (ValueError, TypeError, OverflowError):
        pass
    return np.array([_number(value) for value in column], dtype=np.float64)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return np.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return np.nan


def _found(value: object) -> str:
    is_missing = value is None or (isinstance(value, float) and np.isnan(value))
    return "nothing or NaN" if is_missing else _shown(value)


def _shown(value: object) -> str:
    """A value for an error message: its text, cut short, on one line."""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _accepted() -> str:
    return "; ".join(f"{','.join(f.columns)} ({f.name})" for f in FORMATS)
