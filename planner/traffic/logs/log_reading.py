"""Reads logs into traces: finds the kind of a file and the role of each column.

gather.py then makes a trace of the rows. trace_reading.py calls this module for every file that has none of
the formats of traces (formats.FORMATS).
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from planner.errors import InputError, TraceError
from planner.files.document_values import show_value
from planner.files.jsontext import parse_json
from planner.traffic import csv_tables
from planner.traffic.logs import access, known, log_tables, otlp, vllm_log
from planner.traffic.logs.gather import Gatherer
from planner.traffic.logs.log_columns_map import Columns, guess_columns, unmapped_status, words_of
from planner.traffic.logs.span_waits import SERIAL, SpanTree
from planner.traffic.logs.times import zone_of
from planner.traffic.texts import json_object
from planner.traffic.trace import Trace

# The format of a log whose columns get their roles from a map: the user's (--map), or a guessed one.
COLUMN_MAP = "columns"
_PROGRAMS = tuple(program.format_name for program in known.TABLES)
NAMES = (COLUMN_MAP, "vllm", "otlp", *_PROGRAMS, "access-log")  # The values of --format.
# Formats whose files may be JSON; None: the user gave no format.
_MAY_BE_JSON = (None, COLUMN_MAP, "otlp", *_PROGRAMS)
# Columns that show that a table's rows sum up many requests each, as in providers' reports of usage.
_SUMS = {
    *("num_model_requests", "n_requests", "num_requests", "request_count", "requests", "api_requests"),
    *("total_requests", "successful_requests", "requests_count", "calls", "n_context_tokens_total"),
}
# Columns that are read from traces, but not from logs.
_TRACE_COLUMNS = {"hash_ids", "prefix_ids", "after", "think_s", "image_tokens"}
# Keys under which an object may hold the list of all rows, such as a page of an API.
_LISTS = ("data", "rows", "items", "results", "logs", "observations", "spans", "records")
_MOST_PAGE_KEYS = 6  # The most keys of such an object: the list, and a few such as total and next page.
_MOST_BYTES = 512 * 2**20  # The most bytes of a file that is one object, as it is read as a whole.


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How to read files, by the options of `plan trace` or the keys of slo.yaml.

    `columns` replaces a guess. `format` is one of NAMES. `zone` is the time zone of dates that name none.
    With `salt` the names of tenants are hashed.
    """

    columns: Columns | None = None
    format: str | None = None
    zone: str | None = None
    salt: bytes | None = None

    def __post_init__(self) -> None:
        if self.zone is not None:
            zone_of(self.zone, "timezone")
        if self.format is not None and self.format not in NAMES:
            raise InputError(f"format: expected one of {', '.join(NAMES)}, found {show_value(self.format)}")
        if self.columns is not None and self.format not in (None, COLUMN_MAP, "access-log"):
            raise InputError(f"format: {self.format} has columns of its own; drop the map, or the format")

    @property
    def says_something(self) -> bool:
        """Whether the user says that the file is a log, even if its columns are those of a trace."""
        return self.columns is not None or self.format is not None


ANY = LogOptions()  # No options: format and columns are found from the file.


@dataclass(slots=True)
class LogSource:
    """An open file: the first line that is not blank, with its number, and the `stream` of further lines.

    A file of Parquet, which is no text, has a path alone, and no stream.
    """

    path: Path
    stream: Any = None
    first_line: bytes = b""
    line_number: int = 1

    def peek(self) -> bytes:
        """The next bytes of the stream, about a MiB, which stay in the stream."""
        next_bytes: bytes = self.stream.peek(2**20)
        return next_bytes

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """All lines of the file with their numbers, the first included."""
        yield self.line_number, self.first_line
        yield from enumerate(self.stream, start=self.line_number + 1)

    def sample_lines(self) -> list[bytes]:
        """The first line and the whole lines after it that `peek` sees, at most SAMPLE_ROWS of them."""
        lines = self.peek().split(b"\n")
        if len(lines) > 1:  # The last line may be cut off.
            lines = lines[:-1]
        return [self.first_line, *lines[: log_tables.SAMPLE_ROWS]]


@dataclass(slots=True)
class _Log:
    """A log whose kind is known: its format's `name`, its columns, and the blocks of its rows.

    `is_guess`: the columns were guessed. Errors number what `counted` says: a "line", "row" or "object".
    `notes` and `warnings` are for the trace; both are complete when all blocks were read.
    """

    name: str
    columns: Columns
    blocks: Iterator[log_tables.Block]
    counted: str = "line"
    is_guess: bool = False
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReadTrace:
    """A trace, its format, and the roles of its columns; None for a format with fixed columns."""

    trace: Trace
    format: str
    columns: Columns | None


def read_logs(
    files: Sequence[Path],
    sources: Iterable[LogSource],
    options: LogOptions = ANY,
    *,
    drop_invalid: bool = False,
) -> ReadTrace:
    """Read `files` of one clock that are no trace of `formats.FORMATS`, as one trace. `sources` opens them in
    turn.

    Raises UnsureError with the likeliest map if a column may have several roles, and TraceError with file,
    line and column if a value is wrong.
    """
    gatherer: Gatherer | None = None
    log: _Log | None = None  # After the loop the log of the last file; all files have the same columns.
    tree = SpanTree()  # The spans of all files.
    for source in sources:
        log = _parquet_log(source.path, options) if source.stream is None else _log_of(source, options, tree)
        if gatherer is None:
            gatherer = Gatherer(log.columns, options.zone, options.salt, drop_invalid)
        elif gatherer.columns != log.columns:
            raise TraceError(
                f"{source.path}: has other columns than {files[0].name} ({log.columns.map_text()}); "
                "give files of one kind"
            )
        for line_numbers, values_by_column in log.blocks:
            gatherer.add(line_numbers, values_by_column, f"{source.path}, {log.counted}")
        gatherer.notes += [note for note in log.notes if note not in gatherer.notes]
        gatherer.warnings += log.warnings
    assert gatherer is not None and log is not None
    if len(files) > 1 and gatherer.clock.since_zero:
        raise TraceError(f"{files[1]}: its clock counts from zero, so nobody knows how it lies to the others")
    if log.is_guess:
        gatherer.notes.insert(0, _guess_note(log.columns, gatherer))
    name = files[0].name + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    trace = gatherer.trace(name)
    if len(gatherer.serials):  # The rows are spans, which may wait for others.
        trace = tree.with_waits(trace, gatherer.serials)
    return ReadTrace(trace, log.name, log.columns if log.name in (COLUMN_MAP, "access-log") else None)


def _guess_note(columns: Columns, gatherer: Gatherer) -> str:
    """The note on a guessed map, with the --map that a user may correct."""
    when = columns.arrival or f"{columns.end} - {columns.duration}"
    others = ", ".join(
        f"{role} {name}"
        for role, name in columns.by_role().items()
        if role not in ("arrival", "end", "duration")
    )
    return (
        f"taken as arrival: {when} ({gatherer.clock.in_words()}); {others}. Otherwise: --map "
        f"{columns.map_text()}"
    )


def _log_of(source: LogSource, options: LogOptions, tree: SpanTree) -> _Log:
    """The log in an open text file; its format is the one in `options`, or found from the content.

    Spans are added to `tree`, which later finds the requests that wait for others.
    """
    first_line = source.first_line
    if options.format in _MAY_BE_JSON and first_line[:1] in (b"{", b"["):
        # A line of vLLM's log may begin like this too.
        if options.format is None and vllm_log.is_log([first_line]):
            return _vllm_log(source)
        return _json_log(source, options, tree)
    sample = source.sample_lines()
    if options.format == "vllm" or (
        options.format is None and options.columns is None and vllm_log.is_log(sample)
    ):
        return _vllm_log(source)
    kind = access.kind_of(sample)
    if options.format == "access-log" or (options.format is None and kind):
        return _access_log(source, options, kind)
    return _csv_log(source, options)


def _vllm_log(source: LogSource) -> _Log:
    """A log of vLLM. All lines are read before the first row is made, as several lines make one row."""
    log = vllm_log.VllmLog(source.path)

    def blocks() -> Iterator[log_tables.Block]:
        log.read(source.lines())
        yield from log_tables.object_blocks(log.rows(), set(vllm_log.COLUMNS.by_role().values()))

    return _Log("vllm", vllm_log.COLUMNS, blocks(), notes=log.notes)


def _access_log(source: LogSource, options: LogOptions, kind: str) -> _Log:
    """The access log of a proxy; `kind` is the result of `access.kind_of` for it."""
    if not kind:
        raise TraceError(
            f"{source.path}, line {source.line_number}: is no access log; expected nginx' combined format or "
            "Envoy's default"
        )
    # The last line of the sample is left out: a file that is being written may end within a line.
    sample = list(enumerate(source.sample_lines()[:-1] or [source.first_line], start=source.line_number))
    rows = [row for _, row in access.access_rows(kind, sample, source.path)]
    columns = options.columns or access.columns_of(
        kind, log_tables.json_sample(rows), f"{source.path}, line {source.line_number}"
    )
    blocks = log_tables.object_blocks(
        access.access_rows(kind, source.lines(), source.path), set(columns.by_role().values())
    )
    return _Log("access-log", columns, blocks, is_guess=options.columns is None)


def _parquet_log(path: Path, options: LogOptions) -> _Log:
    """A log in Parquet: the table of a known program, or columns that are mapped or guessed."""
    file = log_tables.parquet_file(path)
    names = log_tables.parquet_names(file)
    # One block with all columns is the sample; all blocks are read below, with the needed columns only.
    sample_block = next(iter(log_tables.parquet_blocks(path, file, names)), None)
    if sample_block is None:
        raise TraceError(f"{path}: has no row; expected at least one request")
    where = f"{path}, row 1"
    table = _find_table(names, options)
    # Programs whose table needs `prepare` do not write Parquet, so this file comes from another program.
    table_columns = table.columns(names) if table is not None and table.prepare is None else None
    if table_columns is None:
        _refuse_format(options, where)
        _refuse_sums(names, where)
        table_columns = options.columns or guess_columns(
            pd.DataFrame(sample_block[1]).iloc[: log_tables.SAMPLE_ROWS], where
        )
    _check_columns(table_columns, names, where)
    blocks = log_tables.parquet_blocks(
        path, log_tables.parquet_file(path), set(table_columns.by_role().values())
    )
    is_guess = options.columns is None and table is None
    name = table.name if table else COLUMN_MAP
    notes = _ignored_notes(file.schema_arrow.names)  # `names` would lack columns with lists of ids.
    return _Log(name, table_columns, blocks, counted="row", is_guess=is_guess, notes=notes)


def _csv_log(source: LogSource, options: LogOptions) -> _Log:
    """A log in CSV: the table of a known program, or columns that are mapped or guessed."""
    names = log_tables.csv_names(source.path, source.first_line, source.line_number)
    warnings: list[str] = []
    table = _find_table(names, options)
    where = f"{source.path}, line {source.line_number}"
    if table is not None:
        columns = table.columns(names)
        assert columns is not None  # `_find_table` returns only tables with these columns.
        wanted = _columns_to_read(columns, table, names)
        lengths = [name for name in (columns.input, columns.output) if name in wanted]
        blocks = _csv_blocks(source, names, wanted, [columns.arrival], lengths, warnings)
        if table.prepare is not None:
            blocks = _prepare_blocks(blocks, columns, table)
        return _Log(table.name, columns, blocks, warnings=warnings)
    _refuse_format(options, where)
    _refuse_sums(names, where)
    # If the first line has only numbers, it is a row, and the file has no header.
    if options.columns is None and not pd.isna(pd.to_numeric(pd.Series(names), errors="coerce")).any():
        raise TraceError(f"{where}: holds figures, expected the names of columns; put a header before them")
    sample = log_tables.csv_sample(names, source.peek())
    columns = options.columns or guess_columns(sample, where)
    _check_columns(columns, names, where)
    if failed := unmapped_status(sample, columns) if options.columns else "":
        warnings.append(
            f"{source.path}: column {show_value(failed)} says that some requests failed; the map names no "
            f"status, so they are counted: add {failed} to it as status to leave them out"
        )
    column_of = columns.by_role()
    figures = [column_of[role] for role in ("arrival", "end", "input", "output") if role in column_of]
    lengths = [column_of[role] for role in ("input", "output") if role in column_of]
    blocks = _csv_blocks(source, names, set(column_of.values()), figures, lengths, warnings)
    notes = _ignored_notes(names)
    return _Log(COLUMN_MAP, columns, blocks, is_guess=options.columns is None, notes=notes, warnings=warnings)


def _csv_blocks(
    source: LogSource,
    names: list[str],
    wanted: Collection[str],
    figures: Collection[str],
    lengths: Collection[str],
    warnings: list[str],
) -> Iterator[log_tables.Block]:
    """The `wanted` columns of a CSV, block by block. `names` are all its columns.

    `figures` are the columns that hold numbers or times, `lengths` those that hold token counts. Doubts about
    their values are added to `warnings` while blocks are read.
    """
    column_blocks = csv_tables.read_columns(
        source.path, source.stream, source.line_number, names, wanted, figures, warnings=warnings
    )
    checked_blocks = csv_tables.check_lengths(source.path, names, lengths, column_blocks, warnings)
    return ((block.starts, columns) for block, columns in checked_blocks)


def _columns_to_read(columns: Columns, table: known.ProgramTable, names: Collection[str]) -> set[str]:
    """The columns of the file to read: those with a role, and those that the program's `prepare` reads."""
    needed = {*columns.by_role().values(), *(table.read_columns if table.prepare else ())}
    return needed & set(names)


def _prepare_blocks(
    blocks: Iterator[log_tables.Block], columns: Columns, table: known.ProgramTable
) -> Iterator[log_tables.Block]:
    """The blocks of a CSV, with the columns that the program's `prepare` adds."""
    assert table.prepare is not None
    wanted = set(columns.by_role().values())
    for line, block in blocks:
        plain = {  # Missing values are None, as in JSON.
            name: column.astype(object).where(column.notna(), None).tolist() for name, column in block.items()
        }
        # `prepare` takes one row at a time, by column name.
        rows = [
            table.prepare(dict(zip(plain, values, strict=True)))
            for values in zip(*plain.values(), strict=True)
        ]
        yield line, {name: pd.Series([row.get(name) for row in rows], dtype=object) for name in wanted}


def _find_table(names: Collection[str], options: LogOptions) -> known.ProgramTable | None:
    """The known program whose tables have these columns; None if there is none, or if `options` says how to
    read the log.
    """
    if options.columns is not None or options.format == COLUMN_MAP:
        return None
    for program in known.TABLES:
        is_allowed = options.format in (None, program.format_name)
        if is_allowed and program.columns(names) is not None:
            return program
    return None


def read_frame(
    name: str, frame: pd.DataFrame, options: LogOptions = ANY, *, drop_invalid: bool = False
) -> Trace:
    """Read a table in memory whose columns are those of a log. Errors call it `name`, and count its rows from
    0. Raises what `read_logs` raises.
    """
    names = [str(column) for column in frame.columns]
    frame = frame.set_axis(names, axis=1).reset_index(drop=True)
    _refuse_sums(names, name)
    _refuse_format(options, name)
    columns = options.columns or guess_columns(frame.iloc[: log_tables.SAMPLE_ROWS], name)
    _check_columns(columns, names, name)
    gatherer = Gatherer(columns, options.zone, options.salt, drop_invalid)
    gatherer.add(
        np.arange(len(frame)), {each: frame[each] for each in columns.by_role().values()}, f"{name}, row"
    )
    gatherer.notes = [*([] if options.columns else [_guess_note(columns, gatherer)]), *_ignored_notes(names)]
    return gatherer.trace(name)


def _ignored_notes(names: Collection[str]) -> list[str]:
    """A list with a note, if the file has columns that are read only from traces; else an empty list."""
    ignored = [name for name in names if name.lower() in _TRACE_COLUMNS]
    if not ignored:
        return []
    return [f"not read from a log: {', '.join(ignored)}; name all columns as a trace has them"]


def _refuse_sums(names: Collection[str], where: str) -> None:
    """Raise TraceError for a table whose rows stand for many requests each."""
    if sums := [name for name in names if "_".join(words_of(name)) in _SUMS]:
        raise TraceError(
            f"{where}: rows are sums of many requests (column {show_value(sums[0])}), not requests; give a "
            "log with a row for each, or describe the traffic in slo.yaml (docs/file-formats.md)"
        )


def _refuse_format(options: LogOptions, where: str) -> None:
    """Raise TraceError if the user gave a format; called for files that do not have it."""
    if options.format not in (None, COLUMN_MAP):
        raise TraceError(
            f"{where}: is not in the format {options.format}; leave --format out, and the format is "
            "recognised, or give --map"
        )


def _check_columns(columns: Columns, names: Collection[str], where: str) -> None:
    """Raise TraceError for a map that names a column which the file lacks."""
    for role, name in columns.by_role().items():
        if name not in names:
            column_names = ", ".join(map(show_value, list(names)[:16])) or "no column"
            raise TraceError(
                f"{where}: has no column {show_value(name)}, which the map takes as {role}; found "
                f"{column_names}"
            )


def _json_log(source: LogSource, options: LogOptions, tree: SpanTree) -> _Log:
    """A log of JSON objects: one on each line, in a list, or within one document."""
    rows, sample, counted = _json_objects(source)
    if any(otlp.MARK in row for row in sample[:1]) or options.format == "otlp":
        if not any(otlp.MARK in row for row in sample):
            raise TraceError(f"{source.path}: holds no {otlp.MARK}; expected spans in OTLP's JSON")
        spans = otlp.span_rows(rows, source.path, tree)
        wanted = {*otlp.COLUMNS.by_role().values(), SERIAL}
        return _Log("otlp", otlp.COLUMNS, log_tables.object_blocks(spans, wanted))
    names = list(dict.fromkeys(name for row in sample for name in (*row, *log_tables.flatten_row(row))))
    table = _find_table(names, options)
    where = f"{source.path}, {counted} {source.line_number if counted == 'line' else 1}"
    if table is not None:
        columns = table.columns(names)
        assert columns is not None
        blocks = log_tables.object_blocks(rows, set(columns.by_role().values()), table.prepare)
        return _Log(table.name, columns, blocks, counted)
    _refuse_format(options, where)
    _refuse_sums(names, where)
    columns = options.columns or guess_columns(log_tables.json_sample(sample), where)
    if options.columns is not None:  # A guess names only columns that the sample has, so it needs no check.
        _check_columns(columns, names, where)
    blocks = log_tables.object_blocks(rows, set(columns.by_role().values()))
    is_guess = options.columns is None
    return _Log(COLUMN_MAP, columns, blocks, counted, is_guess=is_guess, notes=_ignored_notes(names))


def _json_objects(
    source: LogSource,
) -> tuple[Iterator[tuple[int, log_tables.Row]], list[log_tables.Row], str]:
    """All objects with their numbers; a sample, which is the first SAMPLE_ROWS of them without empty ones;
    and what the numbers count: "line" or "object".
    """
    rows: Iterator[tuple[int, log_tables.Row]]
    if source.first_line[:1] == b"[":
        rows, counted = log_tables.json_list(source.path, source.first_line, source.stream), "object"
    elif (document := _document(source)) is not None:
        rows, counted = iter(enumerate(document, start=1)), "object"
    else:
        rows, counted = (
            log_tables.json_lines(source.path, source.first_line, source.line_number, source.stream),
            "line",
        )
    head = list(itertools.islice(rows, log_tables.SAMPLE_ROWS))
    return itertools.chain(head, rows), [row for _, row in head if row], counted


def _document(source: LogSource) -> Iterator[log_tables.Row] | None:
    """The rows of a file that is one object over several lines, or whose lines are pages (`_rows_of_page`).
    None if each line is a row.
    """
    try:
        first = parse_json(source.first_line, has_nan=True, counts_digits=False)
    except ValueError:
        # The first line is not JSON by itself. If it ends in "}", the file has an object on each line, and
        # the reader of lines refuses this one with its number. Otherwise the object continues on further
        # lines.
        if source.first_line.rstrip().endswith(b"}"):
            return None
        other_lines = source.stream.read(_MOST_BYTES)
        try:
            first = parse_json(source.first_line + b"\n" + other_lines, has_nan=True, counts_digits=False)
        except ValueError as error:
            raise TraceError(
                f"{source.path}, line {source.line_number}: is not JSON ({str(error)[:100]})"
            ) from None
        return iter(_rows_of_page(first) or [first])
    if not isinstance(first, dict) or _rows_of_page(first) is None:
        return None
    pages = (json_object(source.path, number, line) for number, line in source.lines() if line.strip())
    return (row for page in pages for row in _rows_of_page(page) or [])


def _rows_of_page(document: dict[str, Any]) -> list[log_tables.Row] | None:
    """The rows of a page, an object that is hardly more than a list of objects; None for another object."""
    lists = (document[name] for name in _LISTS if isinstance(document.get(name), list))
    rows: list[log_tables.Row] | None = next(lists, None)
    if rows is None or len(document) > _MOST_PAGE_KEYS or not all(isinstance(row, dict) for row in rows):
        return None
    return rows
