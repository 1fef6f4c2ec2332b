"""Makes a Trace of the columns of a trace file.

`TraceRows` recognises the format by the header, checks each column, and combines clock, lengths, names and
prefixes. trace_reading.py (files) and frames.py (tables in memory) give it the rows in blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import TraceError
from planner.files.document_values import show_value
from planner.traffic import time_warnings
from planner.traffic.formats import FORMATS, TraceFormat, accepted_columns
from planner.traffic.logs.log_columns_map import names_length
from planner.traffic.logs.times import (
    YEAR_2000_S,
    YEAR_2100_S,
    UnsureError,
    guess_pattern,
    is_local_date,
    is_month_first,
    shown_value,
    with_empty_texts,
    zone_of,
)
from planner.traffic.sessions import with_nominal_arrivals
from planner.traffic.texts import cut_texts, text_lengths
from planner.traffic.trace import (
    MAX_IDS,
    MAX_REQUESTS,
    MAX_TOKENS,
    FloatArray,
    IntArray,
    Trace,
    join_arrays,
    no_edges,
    no_ids,
    several_llms,
)
from planner.traffic.zones import LocalTimes, says_zone
from planner.units import DAY_S, count_text

MAX_SPAN_S = 100 * 365.25 * DAY_S  # A longer trace has times in another unit than seconds.
# A row is late if one before it has a later time. A smaller share of late rows is sorted, a larger one is an
# error.
OUT_OF_ORDER_FRAC = 0.01
RESTART_FRAC = 0.01  # A clock has restarted if it falls back to within this share of its span from its start.
# A numeric clock that begins at this or more (3 years) counts from a date, such as 1970, and never restarts.
DATE_S = 1e8
# A warning is given if more than the share REPORTED_DROPPED_FRAC of requests is left out. More than
# MOST_DROPPED_FRAC is an error, unless the user allows it (--drop-invalid).
REPORTED_DROPPED_FRAC, MOST_DROPPED_FRAC = 0.01, 0.2
# The reasons for which rows are left out, in the words of warnings and errors.
NO_OUTPUT = "no output tokens (failed request)"
NO_INPUT = "no input tokens"
BLANK = "no field (blank line)"
# Columns that any format may have, each under several names: the first name that a file has is taken.
_TENANT = ("tenant", "client")
_PREFIX = ("hash_ids", "prefix_ids")
_BLOCK = ("prefix_block_tokens",)
_IMAGES = ("image_tokens",)  # Tokens that an encoder adds to the prompt.
_TASK = ("agent_task",)  # An agent's task with this request; by default each session is a task.
_REQUEST_ID, _AFTER, _THINK = ("request_id",), ("after",), ("think_s",)  # Which request waits for which.


class TraceRows:
    """Gathers the checked columns of one file, a block of rows at a time, then makes the trace of them.

    The caller makes one, calls `add_rows` for each block, and `to_trace` at the end. All raise TraceError.
    """

    def __init__(
        self,
        path: Path,
        names: list[str],
        where: str,
        *,
        drop_invalid: bool = False,
        grows: bool = False,
        counted: str = "line",
        zone: str | None = None,
    ) -> None:
        """With `grows`, columns may begin in a later block of rows; the caller then calls `add_columns`.

        `where` is the header's place, for errors. Errors number lines of a file or rows of a table: `counted`
        is "line" or "row". `zone` is the time zone of dates that name none; by default they are UTC.
        """
        self.local = None if zone is None else LocalTimes(zone_of(zone))
        self.path, self.drop_invalid, self.grows, self.counted = path, drop_invalid, grows, counted
        # Lists hold one array for each block of rows.
        self.ticks: list[FloatArray] = []  # Arrivals in the clock's own unit, or in seconds for dates.
        self.origin: pd.Timestamp | None = None  # The first date, where the clock gives dates.
        self.has_zones: bool | None = None  # Whether dates say their zone; None before the first.
        self.warnings: list[str] = []  # Sentences on doubtful rows.
        self.tokens: tuple[list[IntArray], list[IntArray]] = ([], [])  # Lengths of inputs and of outputs.
        self.image_tokens: list[IntArray] = []
        self.texts: dict[str, list[str]] = {}
        self.parents: list[list[int]] = []
        self.think_s: list[FloatArray] = []
        self.ids: list[npt.NDArray[Any]] = []  # Ids of prefix blocks, request by request.
        self.blocks: list[IntArray] = []  # How many prefix blocks each request has.
        self.dropped: Counter[str] = Counter()
        self._requests = self._block_ids = 0
        self._seen: dict[str, str] = {}  # Equal names share one string in memory.
        self._index_columns(names, where)
        self.format = self._recognise_format(where)
        self.clock, *self.counts = (self.name_by_lower[name.lower()] for name in self.format.columns[:3])
        self._choose_columns(where)

    def add_columns(self, names: dict[str, int]) -> None:
        """Take all columns of the file again, after some began later (name -> first line). Requests read so
        far have no value in the new ones.
        """
        where = f"{self.path}, line {max(names.values())}"
        self._index_columns(list(names), where)
        self.format = self._recognise_format(where)
        first = [self.name_by_lower[name.lower()] for name in self.format.columns[:3]]
        if late := [name for name in first if name not in (self.clock, *self.counts)]:
            where = f"{self.path}, line {names[late[0]]}"
            raise TraceError(f"{where}: column {late[0]} begins here; expected it in every line, or in none")
        self._choose_columns(where)

    def _index_columns(self, names: list[str], where: str) -> None:
        """Set `name_by_lower`: a column's name in lower case -> as the file spells it. Raises TraceError for
        a name that is given twice.
        """
        self.name_by_lower = {name.strip().lower(): name for name in names}
        if len(self.name_by_lower) < len(names):
            twice = Counter(name.strip().lower() for name in names).most_common(1)[0][0]
            raise TraceError(f"{where}: column {show_value(twice)} is given twice; keep one")

    def _choose_columns(self, where: str) -> None:
        """Find the optional columns; rows that were read before such a column began get empty values."""
        self.tenant = self._find_column(_TENANT)
        self.hash_ids = self._find_column(_PREFIX)
        self.llm = self._find_column(("model",))
        self.block_size = self._find_column(_BLOCK)
        self.images = self._find_column(_IMAGES)
        self.adapter = self._find_column(("adapter",))
        self.task = self._find_column(_TASK)
        self.after = self._find_column(_AFTER)
        # In a file that grows, waits may begin later, so the columns that they need are kept from the start.
        has_waits = bool(self.after) or self.grows
        self.request_id = self._find_column(_REQUEST_ID) if has_waits else None
        self.think = self._find_column(_THINK) if has_waits else None
        if self.after and not self.request_id:
            raise TraceError(
                f"{where}: column {self.after} names requests by their request_id, which is missing"
            )
        self.lists = [name for name in (self.hash_ids, self.after) if name is not None]
        read_columns = {self.clock, *self.counts, self.images}
        self.rivals = {  # Columns of lengths that are not read: by name, the column that is read instead.
            name: read
            for name in self.name_by_lower.values()
            if name not in read_columns
            for role, read in zip(("input", "output"), self.counts, strict=True)
            if names_length(name, role)
        }
        optional = (
            *(self.tenant, self.llm, self.adapter, self.task, self.block_size, self.images),
            *(self.request_id, self.think),
            *self.lists,
            *self.rivals,
        )
        # The columns that readers pass to `add_rows`; all others are not read.
        self.needed = [self.clock, *self.counts, *(name for name in optional if name is not None)]
        rows = sum(map(len, self.ticks))  # Rows so far, which get empty values in a column that begins now.
        for name in (self.tenant, self.llm, self.adapter, self.task, self.block_size, self.request_id):
            if name is not None:
                self.texts.setdefault(name, [""] * rows)
        if self.images is not None and not self.image_tokens:
            self.image_tokens = [np.zeros(rows, np.int64)]
        if self.after is not None and not self.parents:
            self.parents = [[] for _ in range(rows)]
        if self.think is not None and not self.think_s:
            self.think_s = [np.zeros(rows)]
        if self.hash_ids is not None and not self.blocks:
            self.blocks = [np.zeros(rows, np.int64)]

    def _recognise_format(self, where: str) -> TraceFormat:
        """The first of FORMATS whose columns are all there; raises TraceError if there is none."""
        missing = {f: [name for name in f.columns if name.lower() not in self.name_by_lower] for f in FORMATS}
        closest = min(missing, key=lambda f: len(missing[f]))
        if lacks := missing[closest]:
            column_names = ", ".join(map(show_value, list(self.name_by_lower.values())[:16])) or "no column"
            raise TraceError(
                f"{where}: closest to the {closest.name} format, but column {show_value(lacks[0])} is "
                f"missing; found {column_names}; expected one of the headers {accepted_columns()}"
            )
        return closest

    def _find_column(self, names: Iterable[str]) -> str | None:
        """The file's column with the first of these names that it has; None if it has none of them."""
        return next((self.name_by_lower[name] for name in names if name in self.name_by_lower), None)

    def add_rows(
        self, line: IntArray, blank: npt.NDArray[np.bool_], columns: dict[str, pd.Series[Any]]
    ) -> None:
        """Check a block of rows and keep those of requests that can be served.

        `line` (rows,) is the line of each row in the file, and `blank` (rows,) says which rows have no field.
        `columns` are those that `needed` names.
        """
        self.dropped[BLANK] += int(blank.sum())
        if blank.any():
            line = line[~blank]
            columns = {name: column[~blank] for name, column in columns.items()}
        if not len(line):
            return
        inputs, outputs = (self._check_tokens(line, name, columns[name]) for name in self.counts)
        self._compare_rivals(dict(zip(self.counts, (inputs, outputs), strict=True)), columns)
        images = np.zeros(len(line), np.int64)
        if self.images is not None:
            image_column = columns[self.images]
            # A request without images may leave the field empty.
            images = self._check_tokens(line, self.images, image_column.where(image_column.notna(), 0))
            inputs = inputs + images
            expected = f"at most {MAX_TOKENS} tokens with those of the text"
            self._refuse_rows(inputs > MAX_TOKENS, line, self.images, expected, pd.Series(images))
        ticks = self._parse_clock(line, columns[self.clock])
        # A failed request often lacks both lengths. Such a row is counted once, as one without output.
        self.dropped[NO_OUTPUT] += int((outputs == 0).sum())
        self.dropped[NO_INPUT] += int(((inputs == 0) & (outputs > 0)).sum())
        keep = (inputs > 0) & (outputs > 0)
        self.ticks.append(ticks[keep])
        self.tokens[0].append(inputs[keep])
        self.tokens[1].append(outputs[keep])
        if self.images is not None:
            self.image_tokens.append(images[keep])
        for name, texts in self.texts.items():
            names = with_empty_texts(columns[name][keep]).astype(str).tolist()
            if name != self.request_id:  # All other names repeat, so equal ones are stored once.
                names = [self._seen.setdefault(each, each) for each in names]
            texts += names
        if self.think is not None:
            think_s = _to_floats(columns[self.think].where(columns[self.think].notna(), 0.0))
            is_bad = ~((think_s >= 0) & (think_s < np.inf))
            self._refuse_rows(is_bad, line, self.think, "seconds >= 0", columns[self.think])
            self.think_s.append(think_s[keep])
        if self.after is not None:
            self.parents += self._check_lists(line, self.after, columns[self.after], keep)
        if self.hash_ids is not None:
            ids = self._check_lists(line, self.hash_ids, columns[self.hash_ids], keep)
            flat = [block for blocks in ids for block in blocks]  # One list for all requests.
            try:
                self.ids.append(np.array(flat, dtype=np.int64))
            except OverflowError:  # Hashes may have 64 bits and more.
                self.ids.append(np.array(flat, dtype=object))
            self.blocks.append(np.fromiter(map(len, ids), np.int64, len(ids)))
            self._block_ids += len(flat)
        self._requests += int(keep.sum())
        if self._requests > MAX_REQUESTS or self._block_ids > MAX_IDS:
            raise TraceError(
                f"{self.path}, {self.counted} {line[-1]}: {self._requests} requests with {self._block_ids} "
                f"block ids so far; at most {MAX_REQUESTS} and {MAX_IDS} are read, which must lie in memory; "
                "take fewer days of it"
            )

    def _compare_rivals(self, counts: dict[str, IntArray], columns: dict[str, pd.Series[Any]]) -> None:
        """Warn of each other column from which a length could be read, if its values differ from
        the lengths that are read. Each column is doubted once.
        """
        for name, read in tuple(self.rivals.items()):
            lengths = _to_floats(columns[name])
            has_value = lengths >= 0
            if not has_value.any() or np.array_equal(lengths[has_value], counts[read][has_value]):
                continue
            del self.rivals[name]
            self.warnings.append(
                f"{self.path.name}: column {name} differs from {read}, which is read for its name; if "
                f"{name} is meant, say plan trace --map, or traffic: map in slo.yaml"
            )

    def _check_lists(
        self, line: IntArray, name: str, column: pd.Series[Any], keep: npt.NDArray[np.bool_]
    ) -> list[list[int]]:
        """The lists of the rows in `keep`. Raises TraceError for None, which stands for what was no list."""
        lists = column.tolist()
        if None in lists:
            self._raise_at(line[lists.index(None)], name, "a list of whole numbers", "something else")
        return [numbers for numbers, is_kept in zip(lists, keep.tolist(), strict=True) if is_kept]

    def _check_tokens(self, line: IntArray, name: str, column: pd.Series[Any]) -> IntArray:
        """The token counts of a column (rows,); raises TraceError for a value that is no token count."""
        counts = _to_floats(column)
        is_bad = ~((counts >= 0) & (counts <= MAX_TOKENS) & (counts == np.floor(counts)))
        self._refuse_rows(is_bad, line, name, f"a whole number of tokens, 0 to {MAX_TOKENS}", column)
        return counts.astype(np.int64)

    def _parse_clock(self, line: IntArray, column: pd.Series[Any]) -> FloatArray:
        """Arrivals (rows,): numbers as they stand; dates as seconds after the first date of the file."""
        first = column.iloc[0]
        is_date = isinstance(first, str) and bool(np.isnan(_to_float(first)))
        if self.ticks and is_date != (self.origin is not None):
            expected = f"{'a number' if is_date else 'a date'} as in the lines before"
            self._raise_at(line[0], self.clock, expected, shown_value(first))
        if is_date:
            dates = self._parse_dates(line, column.astype(str))
            is_bad = ~dates.dt.year.between(1900, 2100).to_numpy()  # Nanoseconds then fit into 64 bits.
            if is_bad.any():
                self._refuse_local_dates(line[0], column.astype(str).tolist())
            expected = "a date such as 2023-11-16 18:17:03.9799600"
        else:
            ticks = _to_floats(column)
            is_bad = ~((ticks >= 0) & (ticks < np.inf))
            expected = "a number >= 0"
        self._refuse_rows(is_bad, line, self.clock, expected, column)
        if is_date:
            self.origin = self.origin or dates.iloc[0]
            ticks = (dates.dt.as_unit("ns") - self.origin).to_numpy().astype(np.int64) / 1e9
        return ticks

    def _refuse_local_dates(self, line: int, texts: list[str]) -> None:
        """Raise UnsureError, with the map that reads them, for dates such as 10/15/2026 9:00:07 AM."""
        if not is_local_date(texts[0]):
            return
        month_first = is_month_first(texts)
        pattern = guess_pattern(texts[0], month_first=bool(month_first))
        guess = f"arrival={self.clock}:{pattern},input={self.counts[0]},output={self.counts[1]}"
        swap = "; swap %d and %m if the month comes first" if month_first is None else ""
        raise UnsureError(
            f"{self.path}, {self.counted} {line}: column {self.clock} holds dates such as "
            f"{show_value(texts[0])}{swap}. Say it: plan trace FILE -o trace.csv --map '{guess}', or "
            "traffic: map in slo.yaml",
            guess,
        )

    def _parse_dates(self, line: IntArray, text: pd.Series[Any]) -> pd.Series[Any]:
        """The times in UTC; NaT for a value that is no time.

        If no value names a zone, all are local times of the user's zone, or UTC. Raises TraceError if only
        some values name one.
        """
        options: dict[str, Any] = {"format": "ISO8601", "cache": False}
        try:
            dates = pd.to_datetime(text, **options)
            zoned = np.broadcast_to(dates.dt.tz is not None, len(text))
        except (ValueError, TypeError, OverflowError):
            # Zones differ, some are missing, or a value is no date.
            dates = pd.to_datetime(text, utc=True, errors="coerce", **options)
            zoned = np.array([says_zone(date) for date in text])
            # A value that is no date has no zone. It takes the first value's here, because the caller refuses
            # it with a better reason.
            zoned = zoned | dates.isna().to_numpy() & bool(zoned[0])
        is_zoned = bool(zoned[0]) if self.has_zones is None else self.has_zones
        self.has_zones = is_zoned
        kind = "with a zone, such as Z," if is_zoned else "without a zone"
        self._refuse_rows(zoned != is_zoned, line, self.clock, f"a date {kind} as before", text)
        dates = dates.dt.tz_convert("UTC") if dates.dt.tz is not None else dates.dt.tz_localize("UTC")
        return dates if is_zoned or self.local is None else self._local_to_utc(line, text, dates)

    def _local_to_utc(self, line: IntArray, text: pd.Series[Any], dates: pd.Series[Any]) -> pd.Series[Any]:
        """UTC for `dates`, which are local times of the user's zone that were parsed as if they were UTC. NaT
        stays.
        """
        assert self.local is not None  # The caller has checked that the user names a zone.
        is_date = dates.notna().to_numpy()
        local = dates[is_date]
        utc_ns, is_left_out = self.local.to_utc_ns(
            local.dt.tz_localize(None).dt.as_unit("ns").astype(np.int64).to_numpy()
        )
        expected = f"a time that there is in {self.local.zone.key}"
        self._refuse_rows(is_left_out, line[is_date], self.clock, expected, text[is_date])
        in_utc = pd.Series(pd.DatetimeIndex(utc_ns.view("M8[ns]"), tz="UTC"), index=local.index)
        return in_utc.reindex(dates.index)

    def _refuse_rows(
        self, is_bad: npt.NDArray[np.bool_], line: IntArray, name: str, expected: str, column: pd.Series[Any]
    ) -> None:
        """Raise TraceError with the first bad row of a column, if there is one."""
        if is_bad.any():
            row = int(np.argmax(is_bad))
            self._raise_at(line[row], name, expected, shown_value(column.iloc[row]))

    def _raise_at(self, line: int, name: str, expected: str, bad_value: str) -> None:
        """Raise TraceError with the place of a bad value."""
        where = f"{self.path}, {self.counted} {line}, column {name}"
        raise TraceError(f"{where}: expected {expected}, found {bad_value}")

    def _warn_of_dropped(self) -> tuple[str, ...]:
        """A warning if more than a few requests were left out; raises TraceError if too many were, or all.

        Blank lines do not count.
        """
        kept_requests = sum(map(len, self.ticks))
        left_out = {reason: rows for reason, rows in sorted(self.dropped.items()) if rows}
        reasons = ", ".join(f"{count_text(rows, 'row')} with {reason}" for reason, rows in left_out.items())
        if not kept_requests:
            raise TraceError(f"{self.path}: no request is left; found {reasons or 'no row below the header'}")
        dropped = sum(rows for reason, rows in left_out.items() if reason != BLANK)
        share = dropped / (kept_requests + dropped)
        message = (
            f"{dropped} of {kept_requests + dropped} requests ({100 * share:.1f} %) cannot be served as they "
            f"stand: {reasons}"
        )
        if share > MOST_DROPPED_FRAC and not self.drop_invalid:
            raise TraceError(
                f"{self.path}: {message}. Mend the file, or go on without them with --drop-invalid"
            )
        if share <= REPORTED_DROPPED_FRAC:
            return ()
        return (
            f"{self.path.name}: {message}; they are left out, what follows is of the other "
            f"{kept_requests} alone",
        )

    def to_trace(self) -> Trace:
        """The trace of all rows, in order of arrival, with notes and warnings; raises TraceError."""
        warnings = (*self._warn_of_dropped(), *self.warnings)
        dropped = {reason: rows for reason, rows in sorted(self.dropped.items()) if rows}
        ticks, restarted = self._join_restarted_clock(join_arrays(self.ticks))
        warnings += restarted
        order, notes, clock_warnings = self._arrival_order(ticks)
        warnings += clock_warnings
        if order is not None:
            ticks = ticks[order]
        per_s = self._ticks_per_s(float(ticks[0]), notes)
        arrival_s, clock_zero_s = self._to_seconds(ticks, per_s)
        if arrival_s[-1] > MAX_SPAN_S:
            raise TraceError(
                f"{self.path}, column {self.clock}: the last request arrives after {arrival_s[-1]:.3g} s, "
                "more than 100 years; give times in seconds"
            )
        warnings += self._clock_unit_warnings(arrival_s, per_s)
        # The step of a coarse clock, over which scaling.py may spread arrivals; 0 for a fine one.
        quantum_s = (clock_quantum_s(arrival_s) if self.format.is_coarse else None) or 0.0
        tenant, tenants = self._factorize_names(self.tenant)
        llm, llms = self._factorize_names(self.llm)
        if len(llms) > 1:
            notes.append(several_llms(llm, llms))
        inputs, outputs = (join_arrays(parts) for parts in self.tokens)
        offsets, ids, block_tokens = self._gather_prefixes(inputs, notes)
        adapter, adapters = self._index_adapters()
        if ids.size and adapters:
            ids = _split_by_adapter(ids, np.repeat(adapter, np.diff(offsets)))
        in_file_order = Trace(
            name=self.path.name.removesuffix(".gz"),
            arrival_s=np.zeros(len(ticks)),  # `arrival_s` is in order of arrival already; it is set below.
            input_tokens=inputs,
            output_tokens=outputs,
            prefix_offsets=offsets,
            prefix_ids=ids,
            prefix_block_tokens=block_tokens,
            tenant=tenant,
            tenants=tenants,
            llm=llm,
            llms=llms,
            adapter=adapter,
            adapters=adapters,
            image_tokens=np.concatenate(self.image_tokens) if self.image_tokens else None,
            task=self._factorize_names(self.task)[0],
        )
        positions = np.arange(len(ticks)) if order is None else order  # In the file, by arrival.
        in_order = (
            replace(in_file_order, arrival_s=arrival_s)
            if order is None
            else in_file_order.select(order, arrival_s=arrival_s)
        )
        after = self._waits_for_parents(positions)
        if waits := len(np.unique(after[:, 0])):
            notes.append(
                f"{count_text(waits, 'request')} {'waits' if waits == 1 else 'wait'} for others, so when "
                "they arrive depends on the fleet; rates and windows are of arrivals as if answers took no "
                "time"
            )
        gathered = replace(
            in_order,
            after=after,
            think_s=np.concatenate(self.think_s)[positions] if self.think_s else np.zeros(0),
            dropped=dropped,
            warnings=warnings,
            notes=tuple(notes),
            coarse_s=quantum_s,
            clock_zero_s=clock_zero_s,
        )
        if not waits:
            return gathered
        gathered = with_nominal_arrivals(gathered)
        if gathered.arrival_s[-1] > MAX_SPAN_S:
            raise TraceError(
                f"{self.path}, column {self.think}: with all pauses the last request arrives after "
                f"{gathered.arrival_s[-1]:.3g} s, more than 100 years; give seconds"
            )
        return gathered

    def _to_seconds(self, ticks: FloatArray, per_s: float) -> tuple[FloatArray, float]:
        """Arrivals [s], and what the clock says where they are 0 [s]."""
        # Only a trace in the format `requests` may begin later than 0, unless its clock counts from 1970.
        is_moved = self.format.starts_at_zero or self.origin is not None or per_s != self.format.ticks_per_s
        zero = float(ticks[0]) if is_moved else 0.0
        if self.origin is not None:  # Dates are in seconds already.
            return ticks - zero, self.origin.timestamp() + zero
        return (ticks - zero) / per_s, zero / per_s

    def _clock_unit_warnings(self, arrival_s: FloatArray, per_s: float) -> tuple[str, ...]:
        """Warnings about a long gap, else about the unit of the clock. Published formats define their unit,
        but files of another origin may have the plain column names of Mooncake.
        """
        messages = time_warnings.long_gap_warnings(self.path.name, arrival_s)
        is_plain_number = self.origin is None and per_s == self.format.ticks_per_s
        if not messages and is_plain_number and self.format.name in ("generic", "Mooncake"):
            lengths, name = (self.counts[0], self.counts[1]), self.path.name
            messages = time_warnings.clock_unit_warnings(name, self.clock, lengths, arrival_s, per_s)
        return messages

    def _ticks_per_s(self, first: float, notes: list[str]) -> float:
        """Ticks of the clock in a second; Unix times in ms, us or ns are recognised by their size."""
        if self.origin is not None or self.format.ticks_per_s != 1.0:
            return self.format.ticks_per_s
        # Each unit has a range of its own: times from 2000 to 2100 in ms, us and ns do not overlap.
        for unit, per_s in (("ms", 1e3), ("us", 1e6), ("ns", 1e9)):
            if YEAR_2000_S * per_s <= first < YEAR_2100_S * per_s:
                notes.append(f"{self.clock}: {unit} since 1970")
                return per_s
        return 1.0

    def _waits_for_parents(self, order: IntArray) -> IntArray:
        """Rows (request, parent) as positions in `order`, sorted by parent: each request waits for its
        parent.
        """
        if self.after is None or self.request_id is None:
            return no_edges()
        names = self.texts[self.request_id]
        named = Counter(name for name in names if name)  # Nothing waits for a request without a name.
        if (twice := named.most_common(1)) and twice[0][1] > 1:
            raise TraceError(
                f"{self.path}, column {self.request_id}: {show_value(twice[0][0])} is given twice"
            )
        position = {names[row]: i for i, row in enumerate(order.tolist()) if names[row]}
        edges = []
        for i, row in enumerate(order.tolist()):
            for parent in map(str, self.parents[row]):
                # An unknown parent is refused like one that arrives later.
                if position.get(parent, i) >= i:
                    raise TraceError(
                        f"{self.path}, column {self.after}: request {names[row]} waits for {parent}, which "
                        "is no request with tokens that stands, and arrives, before it"
                    )
                edges.append((position[parent], i))
        by_parent = np.array(sorted(set(edges)), dtype=np.int64).reshape(-1, 2)
        return by_parent[:, ::-1]

    def _factorize_names(self, column: str | None) -> tuple[IntArray, tuple[str, ...]]:
        """A column of names as an index per request, and the names in order of appearance; both empty without
        such a column.
        """
        if column is None:
            return no_ids(), ()
        codes, names = pd.factorize(np.array(self.texts[column], dtype=object))
        return codes.astype(np.int64), tuple(names.tolist())

    def _index_adapters(self) -> tuple[IntArray, tuple[str, ...]]:
        """The adapter of each request, -1 where it names none, and the names of all adapters."""
        codes, names = self._factorize_names(self.adapter)
        if "" not in names:
            return codes, names
        if len(names) == 1:
            raise TraceError(f"{self.path}, column {self.adapter}: names none; drop the column")
        without = names.index("")  # The code of "" becomes -1, and larger codes fall by one.
        numbers = np.array([-1 if i == without else i - (i > without) for i in range(len(names))])
        return numbers[codes], tuple(name for name in names if name)

    def _join_restarted_clock(self, ticks: FloatArray) -> tuple[FloatArray, tuple[str, ...]]:
        """The times, and warnings. If a numeric clock starts again once, the times from there on continue
        those before, and a warning says so.

        Such a file is two logs, one after the other (RAGPulse: two weeks, each from 0). The time between them
        is not known; the second is taken to begin where the first ends.
        """
        gaps = np.diff(ticks)
        steps_back = np.flatnonzero(gaps < 0)
        late_rows = int((ticks < np.maximum.accumulate(ticks)).sum())
        # A few late rows are rows out of order, which `_arrival_order` sorts.
        is_rare = late_rows < max(OUT_OF_ORDER_FRAC * len(ticks), 2)
        is_counter = self.origin is None and ticks[0] < DATE_S * self.format.ticks_per_s
        if len(steps_back) != 1 or is_rare or not is_counter:
            return ticks, ()
        first = int(steps_back[0]) + 1  # Where the second log begins.
        before, after = float(ticks[first - 1]), float(ticks[first])
        # A second log may begin a few gaps (three median ones) after the time at which the first began. If
        # the clock falls back less far, rows are out of order instead, which `_arrival_order` refuses.
        if after - ticks[0] > max(RESTART_FRAC * (before - ticks[0]), 3 * float(np.median(gaps))):
            return ticks, ()
        if first > 1 and after >= ticks[first - 2]:  # Only the row before the step back is out of order.
            raise TraceError(
                f"{self.path}, column {self.clock}: the time of request {first} of {len(ticks)} is "
                f"{before:.15g}, between {ticks[first - 2]:.15g} and {after:.15g}; mend it, or drop that row"
            )
        return np.concatenate([ticks[:first], ticks[first:] + (before - after)]), (
            f"{self.path.name}: the clock starts again once, from {before:.15g} to {after:.15g}: the {first} "
            f"requests before and the {len(ticks) - first} from there on are taken as two logs, the second "
            "from where the first ends",
        )

    def _arrival_order(self, ticks: FloatArray) -> tuple[IntArray | None, list[str], tuple[str, ...]]:
        """Positions in order of arrival, None if the file has that order; a note if not; and warnings."""
        clock_warnings: tuple[str, ...] = ()
        if self.origin is not None and not self.has_zones and self.local is None:
            at_s = ticks + self.origin.timestamp()
            clock_warnings = time_warnings.clock_change_warnings(self.path.name, self.clock, at_s)
        late = ticks < np.maximum.accumulate(ticks)
        if not late.any():
            return None, [], clock_warnings
        if (rows := int(late.sum())) >= OUT_OF_ORDER_FRAC * len(ticks):
            if clock_warnings:
                raise TraceError(clock_warnings[0])
            backward_steps = int((np.diff(ticks) < 0).sum())
            raise TraceError(
                f"{self.path}, column {self.clock}: {rows} of {len(ticks)} rows are out of order, at most "
                f"{100 * OUT_OF_ORDER_FRAC:.0f} % may be (the clock steps back {backward_steps} times); "
                f"sort the file by {self.clock}, or, where its clock starts again, give each part a file"
            )
        note = f"{rows} of {len(ticks)} rows out of order: sorted by arrival"
        far = time_warnings.step_back_warnings(self.path.name, self.clock, ticks)
        return np.argsort(ticks, kind="stable"), [note], (*clock_warnings, *far)

    def _gather_prefixes(self, inputs: IntArray, notes: list[str]) -> tuple[IntArray, IntArray, int]:
        """Offsets (n + 1,) of the requests' prefix blocks, ids (m,) of these blocks, and tokens of a block.

        Ids beyond a request's input are dropped. Without ids all are empty, and the block has 0 tokens.
        """
        ids = np.concatenate(self.ids) if self.ids else no_ids()
        block_tokens = self._block_tokens()
        if not ids.size:
            return no_ids(), no_ids(), 0
        blocks = np.concatenate(self.blocks)
        if not block_tokens:
            if not (length := text_lengths(self.path)):
                notes.append(
                    f"{self.hash_ids} left out: its texts have any length, and no file beside the trace says "
                    "which (RAGPulse's 1_sys_prompt.jsonl to 5_web_search.jsonl)"
                )
                return no_ids(), no_ids(), 0
            return *cut_texts(self.path, self.hash_ids or "", inputs, ids, blocks, length), KV_BLOCK_TOKENS
        if ids.dtype == object:  # Hashes wider than 64 bits are numbered: only their equality matters.
            ids = pd.factorize(ids)[0].astype(np.int64)
        most_blocks = -(-inputs // block_tokens)  # Rounded up: the last block may be filled in part.
        if over := int((blocks > most_blocks).sum()):
            notes.append(
                f"{count_text(over, 'request')} had more hash ids than blocks of {block_tokens} tokens: "
                "the ids beyond the input were left out"
            )
            index_in_prompt = np.arange(len(ids)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
            ids = ids[index_in_prompt < np.repeat(most_blocks, blocks)]
            blocks = np.minimum(blocks, most_blocks)
        return np.concatenate(([0], np.cumsum(blocks))), ids, block_tokens

    def _block_tokens(self) -> int:
        """Tokens of a prefix block: the file's own column, the same in every row, else the format's."""
        if self.block_size is None:
            return self.format.block_tokens
        blocks = np.concatenate(self.blocks) if self.blocks else np.zeros(0, np.int64)
        texts = self.texts[self.block_size]
        with_ids = [text for text, count in zip(texts, blocks.tolist(), strict=False) if count]
        block_sizes = sorted(set(with_ids or texts))  # A request without ids may leave its size empty.
        tokens = _to_float(block_sizes[0])
        if len(block_sizes) > 1 or not (1 <= tokens <= MAX_TOKENS and tokens == int(tokens)):
            raise TraceError(
                f"{self.path}, column {self.block_size}: expected one whole number of tokens >= 1 in all "
                f"rows with ids, found {', '.join(map(show_value, block_sizes[:3]))}"
            )
        return int(tokens)


def _split_by_adapter(ids: IntArray, adapter: IntArray) -> IntArray:
    """New ids (m,) of blocks, different for different adapters, because engines share no KV blocks between
    adapters. `adapter` (m,) is that of each block's request.
    """
    return np.unique(np.stack([ids, adapter]), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)


def clock_quantum_s(arrival_s: FloatArray) -> float | None:
    """The step of a clock that gives many requests one stamp, None where there is no such step.

    The step is the usual distance of two stamps. It counts if there are at most half as many stamps as
    requests, and if 99 % of the stamps are multiples of it, to within 1 % of a step.
    """
    stamps_s = np.unique(arrival_s)
    if len(stamps_s) < 3 or 2 * len(stamps_s) > len(arrival_s):
        return None
    # The median distance is as coarse as the clock (2.999 or 3 s), so it is refined over the whole span.
    usual_s = float(np.median(np.diff(stamps_s)))
    steps = np.round((stamps_s - stamps_s[0]) / usual_s)
    quantum_s = float(f"{(stamps_s[-1] - stamps_s[0]) / steps[-1]:.6g}")
    steps_off = np.abs((stamps_s - stamps_s[0]) / quantum_s - steps)
    return quantum_s if (steps_off <= 0.01).mean() >= 0.99 else None


def _to_floats(column: pd.Series[Any]) -> FloatArray:
    """(rows,): the values as float64, NaN where one is no number.

    Text is read as float() reads it, so that every digit counts.
    """
    if column.dtype.kind in "iuf":
        return column.to_numpy(dtype=np.float64)
    # All values are read at once if they may be: float() would take True for 1, and 1_000 for 1000, so
    # columns with such values are read one by one below.
    try:
        if not any(isinstance(value, bool) for value in column):
            floats = column.to_numpy(dtype=object).astype(np.float64)
            text = "".join([value for value in column if isinstance(value, str)])
            if "_" not in text and text.isascii():
                return floats
    except (ValueError, TypeError, OverflowError):
        pass
    return np.array([_to_float(value) for value in column], dtype=np.float64)


def _to_float(value: object) -> float:
    """Like float(), but NaN for booleans, digits of other scripts and underscores between digits."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return np.nan
    if isinstance(value, str) and ("_" in value or not value.isascii()):
        return np.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return np.nan
