"""Makes a trace of the rows of a log, which log_reading.py reads in blocks.

Rows that are not requests to plan for are left out and counted.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.errors import TraceError
from planner.files.document_values import show_value
from planner.traffic import time_warnings, trace_rows
from planner.traffic.logs.log_columns_map import Columns, has_failed, no_text_reason, span_unit
from planner.traffic.logs.span_waits import SERIAL
from planner.traffic.logs.times import (
    LogClock,
    UnsureError,
    as_numbers,
    is_missing,
    shown_value,
    spans_ns,
    with_empty_texts,
)
from planner.traffic.trace import MAX_REQUESTS, MAX_TOKENS, IntArray, Trace, join_arrays, no_ids, several_llms

FAILED = "failed requests"
FROM_CACHE = "answers from the gateway's cache"
HALVES = "further rows of a request that is counted (halves of a stream, retries)"
BLANK = "blank lines"
NO_TIME = "no time"
_HASH_DIGITS = 16  # Hex digits of a tenant's hash: 64 bits, so no two tenants become one.
# A column of tenants with one of these words in its name holds keys of an API, which must not be shown.
_SECRET_WORDS = ("api_key", "apikey", "authorization", "token", "key")


@dataclass(slots=True)
class Gatherer:
    """Collects blocks of rows, of one file or several, with `add`, and makes one trace of them with `trace`.

    With a `salt` tenants are hashed. If blocks have a column SERIAL (span_waits.py), `trace` puts its values,
    one per request of the trace, into `serials`.
    """

    columns: Columns
    zone: str | None = None
    salt: bytes | None = None
    drop_invalid: bool = False
    dropped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    clock: LogClock = field(init=False)
    serials: IntArray = field(default_factory=no_ids)
    # The requests so far, block by block: arrivals, input and output tokens.
    _at_ns: list[IntArray] = field(default_factory=list)
    _requests: int = 0
    _tokens: tuple[list[IntArray], list[IntArray]] = field(default_factory=lambda: ([], []))
    # By role (tenant, model, adapter): the index of each request's name, and the names with their indices.
    _codes: dict[str, list[npt.NDArray[np.int32]]] = field(default_factory=dict)
    _names: dict[str, dict[str, int]] = field(default_factory=dict)
    # Hashes of the request ids of rows with tokens, of failed rows, and of other rows without tokens; and how
    # many rows had no id.
    _ids: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _ids_failed: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _ids_without_tokens: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _without_id: int = 0
    _serials: list[IntArray] = field(default_factory=list)

    def __post_init__(self) -> None:
        role = "arrival" if self.columns.arrival else "end"
        self.clock = LogClock(getattr(self.columns, role), self.columns.units.get(role, ""), self.zone, role)
        for name in ("tenant", "model", "adapter"):
            if getattr(self.columns, name):
                self._codes[name], self._names[name] = [], {}

    def add(self, line: IntArray, table: dict[str, pd.Series[Any]], where: str) -> None:
        """Add rows, which are at `line` (n,) of their file. Error messages begin with `where`, such as
        "log.csv, line", and the number.
        """
        column_names = self.columns.by_role()
        # A row with a time is not blank, so the other columns are checked only if some row has no time.
        timeless = blank = is_missing(table[self.clock.name])
        if timeless.any():
            blank = np.logical_and.reduce([is_missing(table[name]) for name in set(column_names.values())])
        keep = ~blank
        self.dropped[BLANK] += int(blank.sum())
        # A row that several reasons would leave out is counted under the first one.
        for mask, reason in self._without_load(table, line, where):
            left_out = mask & keep
            self.dropped[reason] += int(left_out.sum())
            if reason == FAILED and self.columns.request_id:
                self._ids_failed.append(self._hashes(table[self.columns.request_id][left_out]))
            keep &= ~mask
        self.dropped[NO_TIME] += int((keep & timeless).sum())
        keep &= ~timeless
        inputs, outputs = (self._token_counts(line, table, role, keep, where) for role in ("input", "output"))
        self.dropped[trace_rows.NO_OUTPUT] += int((keep & (outputs == 0)).sum())
        self.dropped[trace_rows.NO_INPUT] += int((keep & (inputs == 0) & (outputs > 0)).sum())
        served = (inputs > 0) & (outputs > 0)
        if self.columns.request_id:
            for ids, rows in ((self._ids, keep & served), (self._ids_without_tokens, keep & ~served)):
                ids.append(self._hashes(table[self.columns.request_id][rows]))
        keep &= served
        if not keep.any():
            return
        kept_rows = {name: table[name][keep] for name in set(column_names.values())}
        at_ns = self._arrivals(line[keep], kept_rows, where)
        self._at_ns.append(at_ns)
        self._requests += len(at_ns)
        if self._requests > MAX_REQUESTS:
            raise TraceError(
                f"{where} {line[-1]}: at most {MAX_REQUESTS} requests are read, which must lie in memory; "
                "take fewer days of it"
            )
        self._tokens[0].append(inputs[keep])
        self._tokens[1].append(outputs[keep])
        if SERIAL in table:
            self._serials.append(table[SERIAL][keep].to_numpy(dtype=np.int64))
        for role in self._codes:
            self._add_names(role, table[column_names[role]][keep])

    def _without_load(
        self, table: dict[str, pd.Series[Any]], line: IntArray, where: str
    ) -> list[tuple[npt.NDArray[np.bool_], str]]:
        """Masks (n,) of rows that put no load on engines, with reasons: no text, from a cache, or failed."""
        masks = []
        if self.columns.kind:
            codes, values = pd.factorize(with_empty_texts(table[self.columns.kind]))
            reasons = np.array([no_text_reason(value) for value in values], dtype=object)[codes]
            masks = [(reasons == reason, str(reason)) for reason in sorted(set(reasons.tolist()) - {""})]
        if self.columns.cache_hit:
            # Gateways mark a hit by one of these values.
            hit = table[self.columns.cache_hit].astype(str).str.strip().str.lower().isin(["true", "1", "hit"])
            masks.append((hit.to_numpy(dtype=bool), FROM_CACHE))
        if self.columns.status:
            failed, unknown = has_failed(table[self.columns.status])
            if unknown:
                column = table[self.columns.status].astype(str)
                first = int(np.flatnonzero((column == unknown[0]).to_numpy(dtype=bool))[0])
                raise TraceError(
                    f"{where} {line[first]}, column {self.columns.status}: {show_value(unknown[0])} says "
                    "neither that a request succeeded nor that it failed; expected a status of HTTP, success "
                    "or failure; or leave it out: --map without status"
                )
            masks.append((failed, FAILED))
        return masks

    def _token_counts(
        self,
        line: IntArray,
        table: dict[str, pd.Series[Any]],
        role: str,
        keep: npt.NDArray[np.bool_],
        where: str,
    ) -> IntArray:
        """The tokens (n,) in the column of a role; 0 for rows without a value, and for rows not in `keep`.
        Raises TraceError if a kept row has a value that is no count of tokens.
        """
        name = getattr(self.columns, role)
        counts = as_numbers(table[name])
        has_no_number = np.isnan(counts)
        if has_no_number.any():
            counts = np.where(has_no_number & is_missing(table[name]), 0.0, counts)
        bad = keep & ~((counts >= 0) & (counts <= MAX_TOKENS) & (counts == np.floor(counts)))
        if (bad_rows := np.flatnonzero(bad)).size:
            raise TraceError(
                f"{where} {line[bad_rows[0]]}, column {name}: expected a whole number of tokens, 0 to "
                f"{MAX_TOKENS}, found {shown_value(table[name].iloc[bad_rows[0]])}"
            )
        return np.where(keep, counts, 0.0).astype(np.int64)

    def _arrivals(self, line: IntArray, table: dict[str, pd.Series[Any]], where: str) -> IntArray:
        """The arrivals (n,) in ns: the ends less the durations, where the log has only ends."""
        at_ns = self.clock.times_ns(line, table[self.clock.name], where)
        if self.columns.arrival:
            return at_ns
        name = self.columns.duration
        unit = self.columns.units.get("duration") or span_unit(name, table)
        # A duration may carry its unit (350ms); a plain number needs one.
        if not unit and not np.isnan(as_numbers(table[name])).all():
            raise UnsureError(
                f"{where} {line[0]}: column {name} has no unit; say which with --map duration={name}:ms or "
                f"{name}:s"
            )
        return at_ns - spans_ns(line, table[name], unit, where, name)

    def _add_names(self, role: str, column: pd.Series[Any]) -> None:
        """Add the names of a column as indices into `_names`; a missing name is "". A whole float, such as
        7.0, gets the name 7, as pandas reads whole numbers in a column with gaps as floats.
        """
        codes, values = pd.factorize(column.astype(object).where(~is_missing(column), ""))
        index_of_name = self._names[role]
        texts = [
            f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)
            for value in values
        ]
        indices = [index_of_name.setdefault(text, len(index_of_name)) for text in texts]
        # Without rows the array needs one entry, because numpy looks nothing up in an empty array.
        index_of_code = np.array(indices or [0], dtype=np.int32)
        self._codes[role].append(index_of_code[codes])

    def _hashes(self, column: pd.Series[Any]) -> npt.NDArray[np.uint64]:
        """Hashes of request ids, 64 bits each. A row without an id gets a number that no other row has."""
        missing = is_missing(column)
        hashed = pd.util.hash_array(column.astype(str).to_numpy(dtype=object), categorize=False)
        if missing.any():
            # These numbers are small, and hashes of texts hardly ever are, so the two do not collide.
            first = self._without_id
            self._without_id += len(missing)
            hashed[missing] = np.arange(first, self._without_id, dtype=np.uint64)[missing]
        return hashed

    def trace(self, name: str) -> Trace:
        """The trace of all rows that were added, in order of arrival. The rows are freed on the way."""
        self._find_halves()
        if not self._requests:
            left_out = _rows_text(dict(sorted(self.dropped.items())))
            raise TraceError(f"{name}: no request is left; found {left_out or 'no row'}")
        at_ns = join_arrays(self._at_ns)
        inputs, outputs = (join_arrays(parts) for parts in self._tokens)
        codes = {role: np.concatenate(parts) for role, parts in self._codes.items()}
        order = np.argsort(at_ns, kind="stable")
        if self.clock.has_offsets is False and self.zone is None:
            self.warnings += time_warnings.clock_change_warnings(name, self.clock.name, at_ns / 1e9)
        if self._ids:
            order = self._first_rows(order)
        warnings = (*self._warnings(name, len(order)), *self.warnings)
        if self._serials:
            self.serials = join_arrays(self._serials)[order]
        at_ns = at_ns[order]
        arrival_s = (at_ns - at_ns[0]) / 1e9
        if arrival_s[-1] > trace_rows.MAX_SPAN_S:
            raise TraceError(f"{name}, column {self.clock.name}: lasts more than 100 years; say its unit")
        # The clock's step, over which trace.spread_stamps later spreads equal time stamps.
        coarse_s = _tick_s(at_ns) or trace_rows.clock_quantum_s(arrival_s) or 0.0
        warnings += time_warnings.long_gap_warnings(name, arrival_s)
        clock_zero_s = float(at_ns[0]) / 1e9
        del at_ns  # Long traces: free 8 bytes a request.
        names = {role: self._indices_and_names(role, codes[role][order]) for role in codes}
        tenant, tenants = names.get("tenant", (no_ids(), ()))
        llm, llms = names.get("model", (no_ids(), ()))
        if len(llms) > 1:
            self.notes.append(several_llms(llm, llms))
        adapter, adapters = _adapters(*names.get("adapter", (no_ids(), ())))
        return Trace(
            name=name.removesuffix(".gz"),
            arrival_s=arrival_s,
            input_tokens=inputs[order],
            output_tokens=outputs[order],
            tenant=tenant,
            tenants=self._hash_tenants(tenants),
            llm=llm,
            llms=llms,
            adapter=adapter,
            adapters=adapters,
            dropped={reason: rows for reason, rows in sorted(self.dropped.items()) if rows},
            notes=tuple(self.notes),
            warnings=warnings,
            coarse_s=coarse_s,
            clock_zero_s=clock_zero_s,
        )

    def _find_halves(self) -> None:
        """Count rows that failed or have no tokens as HALVES, not as failures, if another row of their
        request counts already: a row with tokens, else one failure.
        """
        if not self.columns.request_id:
            return
        counted = np.unique(np.concatenate([*self._ids, np.zeros(0, np.uint64)]))
        for parts, reasons in (
            (self._ids_failed, (FAILED,)),
            (self._ids_without_tokens, (trace_rows.NO_OUTPUT, trace_rows.NO_INPUT)),
        ):
            ids = np.concatenate([*parts, np.zeros(0, np.uint64)])
            parts.clear()
            new_ids = np.setdiff1d(ids, counted)  # Without repetitions.
            counted = np.union1d(counted, new_ids)
            halves = len(ids) - len(new_ids)
            self.dropped[HALVES] += halves
            # `add` has counted these halves under one of the reasons, where they are subtracted.
            for reason in reasons:
                moved = min(halves, self.dropped[reason])
                self.dropped[reason] -= moved
                halves -= moved

    def _first_rows(self, order: IntArray) -> IntArray:
        """`order` with only the first row of each request; further rows are counted as HALVES."""
        ids = np.concatenate(self._ids)
        self._ids.clear()
        _, first = np.unique(ids[order], return_index=True)
        if len(first) < len(order):
            self.dropped[HALVES] += len(order) - len(first)
            return order[np.sort(first)]
        return order

    def _warnings(self, name: str, request_count: int) -> tuple[str, ...]:
        """A warning about the share of failed requests; `request_count` is the number of all other requests.
        Raises TraceError if the share is too large.
        """
        failed = {
            reason: self.dropped[reason]
            for reason in (FAILED, NO_TIME, trace_rows.NO_INPUT, trace_rows.NO_OUTPUT)
        }
        failed_count = sum(failed.values())
        share = failed_count / (request_count + failed_count)
        failed_reasons = _rows_text(failed)
        failed_text = f"{failed_count} of {request_count + failed_count} requests ({100 * share:.1f} %)"
        if share > trace_rows.MOST_DROPPED_FRAC and not self.drop_invalid:
            raise TraceError(
                f"{name}: {failed_text} cannot be served as they stand: {failed_reasons}. Mend the file, or "
                "go on without them with --drop-invalid"
            )
        if share <= trace_rows.REPORTED_DROPPED_FRAC:
            return ()
        return (
            f"{name}: {failed_text} are left out, what follows is of the other {request_count} alone: "
            f"{failed_reasons}",
        )

    def _indices_and_names(self, role: str, codes: npt.NDArray[np.int32]) -> tuple[IntArray, tuple[str, ...]]:
        """The index (n,) of each row's name, and the names that occur; both empty where no row has one."""
        names = list(self._names[role])
        used, indices = np.unique(codes, return_inverse=True)
        if [names[k] for k in used.tolist()] == [""]:
            return no_ids(), ()
        return indices.reshape(-1).astype(np.int64), tuple(names[k] for k in used.tolist())

    def _hash_tenants(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The names of tenants, hashed with the salt. Without a salt only keys of an API are hashed."""
        salt = self.salt
        if salt is None:
            column_name = self.columns.tenant.lower()
            if not any(word in column_name for word in _SECRET_WORDS):
                return names
            salt = b""
        return hash_names(names, salt)


def hash_names(names: Iterable[str], salt: bytes) -> tuple[str, ...]:
    """The names, each replaced by its HMAC-SHA256 with the salt; an empty name stays empty."""
    return tuple(
        name and hmac.new(salt, name.encode(), hashlib.sha256).hexdigest()[:_HASH_DIGITS] for name in names
    )


def _rows_text(rows_of_reason: Mapping[str, int]) -> str:
    """For instance "3 failed requests, 1 blank lines", without reasons that left out no row."""
    return ", ".join(f"{rows} {reason}" for reason, rows in rows_of_reason.items() if rows)


def _tick_s(at_ns: IntArray) -> float:
    """The step [s] of a clock of whole seconds or minutes, if some requests have equal stamps; else 0."""
    if len(at_ns) < time_warnings.FEWEST_JUDGED or not (np.diff(at_ns) == 0).any():
        return 0.0
    for tick_s in (60, 1):
        if not (at_ns % (tick_s * 10**9)).any():
            return float(tick_s)
    return 0.0


def _adapters(codes: IntArray, names: tuple[str, ...]) -> tuple[IntArray, tuple[str, ...]]:
    """The adapter (n,) of each row, -1 for the LLM alone, and the names; both empty without any adapter."""
    adapter_names = tuple(name for name in names if name)
    if not adapter_names:
        return no_ids(), ()
    index_of = {name: k for k, name in enumerate(adapter_names)}
    return np.array([index_of.get(name, -1) for name in names], dtype=np.int64)[codes], adapter_names
