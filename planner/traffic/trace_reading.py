"""Reading a trace: a CSV or JSONL file, plain or packed (.gz), in any of formats.FORMATS, or a log.

A file's format is recognised by its content; only Parquet is recognised by the ending of the name. What is
changed on reading (failed requests left out, coarse clocks spread) is recorded in the trace's `dropped`,
`notes` and `warnings`. Other modules read logs (logs/log_reading.py) and files of agents' sessions
(agent_files.py); a folder may have a file per session.

Large files are parsed only once: their columns are cached in the user's cache folder
(planner/files/column_files.py). The name of a cached trace is a digest of the file's content, its name, and
the code that read it. Thus a changed file is parsed again, and so is every file after a change of this
package. Traces with prefixes or sessions are parsed every time: their files are mostly ids, which the cache
would only copy, and they may depend on further files beside them.
"""

import csv
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from planner.errors import TraceError
from planner.files import column_files, csv_lines
from planner.files.checked_files import MAX_DOCUMENT_BYTES, open_input, open_text
from planner.files.csv_lines import CommaSeparated, other_delimiter, with_commas
from planner.traffic import agent_files, csv_tables
from planner.traffic.formats import NESTED, accepted_columns, is_known_format
from planner.traffic.logs.gather import hash_names
from planner.traffic.logs.log_reading import ANY, LogOptions, LogSource, ReadTrace, read_logs
from planner.traffic.prefixes import with_larger_blocks
from planner.traffic.texts import json_object
from planner.traffic.trace import Trace, spread_stamps
from planner.traffic.trace_rows import TraceRows

_BLOCK_BYTES = 16 * 2**20  # Lines of a JSONL file are read and checked in blocks of this size.
# Lines are limited in length, unless a file begins like this: then each line may be a whole document.
LONG_LINES = (b'{"resourceSpans"', b"[", *agent_files.LONG_LINES)
SESSION_ENDINGS = (".json", ".jsonl")  # The endings of files of sessions in a folder, before a .gz.
LEAST_CACHED_BYTES = 32 * 2**20  # Smaller files are not cached: to parse them takes a second or two.
# Fields of Trace that are cached: as JSON, and as arrays.
_DESCRIPTION = "name tenants llms adapters notes warnings dropped coarse_s clock_zero_s".split()
_COLUMNS = "arrival_s input_tokens output_tokens tenant llm adapter image_tokens task".split()


class _ReadOptions(NamedTuple):
    """How to read a file with one of FORMATS: `zone` is that of dates which name none."""

    drop_invalid: bool
    zone: str | None


def read_trace(
    path: str | Path,
    *,
    seed: int | None = 0,
    drop_invalid: bool = False,
    log_options: LogOptions | None = None,
) -> Trace:
    """Read any of FORMATS, or a log. `seed` is for `spread_stamps` of coarse clocks; with None they stay
    coarse. `log_options` say how to read a log whose format or columns are ambiguous.

    Requests without input or output tokens are left out; a file with more than MOST_DROPPED_FRAC of them is
    refused, unless `drop_invalid`.

    Raises TraceError (or its parent InputError for unreadable text) naming file, line and column, and
    UnsureError with a guess if the columns of a log are ambiguous.
    """
    return read_files(
        [Path(path)], seed=seed, drop_invalid=drop_invalid, log_options=log_options or ANY
    ).trace


def read_files(
    paths: Sequence[Path], *, seed: int | None = 0, drop_invalid: bool = False, log_options: LogOptions = ANY
) -> ReadTrace:
    """Like `read_trace`; the result also has the format and the roles of columns. Several files are logs of
    one clock, or sessions of agents, each with a clock of its own.
    """
    files = [file for path in paths for file in _files_of(path)]
    with ExitStack() as stack:
        source = _open_source(files[0], stack)
        # With options for logs the user says that the file is a log.
        is_called_log = log_options.says_something
        kind = None if is_called_log else _agents_kind_of(source)
        folders = [path for path in paths if path not in files]
        is_log = False
        if kind is not None:
            lines = _agent_lines(kind, _one_at_a_time(source, files[1:]))
            result = ReadTrace(agent_files.read_agent_files(kind, _name_of(paths), lines), kind, None)
        elif folders:
            raise TraceError(
                f"{folders[0]}: is a directory, and {source.path.name} in it is no file of agents' sessions; "
                "give files"
            )
        elif len(files) == 1 and not is_called_log and _has_format(source):
            trace = _read_formatted(source, _ReadOptions(drop_invalid, log_options.zone))
            result = ReadTrace(trace, "trace", None)
        else:
            is_log = True
            sources = _one_at_a_time(source, files[1:])
            result = read_logs(files, sources, log_options, drop_invalid=drop_invalid)
    trace = with_larger_blocks(result.trace)
    if log_options.salt is not None and not is_log:  # `read_logs` has hashed the names in logs.
        trace = replace(trace, tenants=hash_names(trace.tenants, log_options.salt))
    return replace(result, trace=trace if seed is None else spread_stamps(trace, seed=seed))


def _files_of(path: Path) -> list[Path]:
    """The file itself, or those of a folder of agents' sessions, in the order of their names."""
    # Unlike Path.is_dir, isdir is silent about names that no file can have.
    if not os.path.isdir(path):  # noqa: PTH112
        return [path]
    files = [file for file in path.iterdir() if file.name.removesuffix(".gz").endswith(SESSION_ENDINGS)]
    if not files:
        raise TraceError(
            f"{path}: is a directory without a file in {' or '.join(SESSION_ENDINGS)}; expected a file, or a "
            "directory of agents' sessions"
        )
    return sorted(files)


def _name_of(paths: Sequence[Path]) -> str:
    """The name of a trace of these files or folders: the first one, and how many more there are."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return paths[0].name.removesuffix(".gz") + more


def _one_at_a_time(first: LogSource, others: Sequence[Path]) -> Iterator[LogSource]:
    """The first file, which is open, and the others. Each of these is closed before the next is opened, as a
    corpus may have more files than a process may open. A file that cannot be opened is refused before any is
    read.
    """
    for path in others:
        if not path.is_fifo():  # A pipe can be opened only once.
            with open_input(path):
                pass
    yield first
    for path in others:
        with ExitStack() as stack:
            yield _open_source(path, stack)


def _agent_lines(kind: str, sources: Iterator[LogSource]) -> Iterator[tuple[str, bytes]]:
    """All lines of files of agents' sessions with their places; the files must all be of this kind."""
    first = next(sources)
    for source in itertools.chain([first], sources):
        if source is not first and _agents_kind_of(source) != kind:
            raise TraceError(
                f"{source.path}: holds no sessions of agents as {first.path.name} does ({kind}); "
                "give files of one kind"
            )
        for number, line in source.lines():
            yield f"{source.path}, line {number}", line


def _agents_kind_of(source: LogSource) -> str | None:
    """The kind of a file of agents' sessions; None for another file.

    Readers of such files expect a conversation on one line. If the file is one object over several lines,
    `source` is changed: its first line becomes the whole object.
    """
    if source.first_line[:1] != b"{":
        return None
    begin = source.peek()
    is_over_lines = source.first_line == b"{" and (b'"requests"' in begin or b'"turns"' in begin)
    if not is_over_lines:
        return agent_files.kind_of(source.first_line, source.sample_lines())
    text = source.stream.read(MAX_DOCUMENT_BYTES)
    # JSON has line breaks only between tokens, so they can become spaces.
    joined = b"{" + text.replace(b"\r", b" ").replace(b"\n", b" ")
    kind = agent_files.kind_of(joined, [joined])
    if kind is None:  # The next reader gets the text that was read here.
        source.stream = io.BufferedReader(io.BytesIO(text))
    else:
        source.first_line, source.stream = joined, io.BufferedReader(io.BytesIO())
    return kind


def _open_source(path: Path, stack: ExitStack) -> LogSource:
    """Open a file for reading; a file of Parquet stays closed. `stack` closes the file."""
    if path.suffix in (".parquet", ".pq") and path.is_file():  # Read as a table later, not as lines.
        return LogSource(path)
    stream = stack.enter_context(open_text(path, long_lines=LONG_LINES))
    first, line_number = _first_line(path, stream)
    is_only_line = not stream.peek(1)
    # JSON may have CR between its tokens, so a CR is refused only in other text, or between two objects.
    if b"\r" in first and is_only_line and (first[:1] not in b"{[" or b"}\r{" in first):
        raise TraceError(f"{path}: its lines end with CR alone; write LF instead: tr '\\r' '\\n'")
    if delimiter := other_delimiter(first):
        first = with_commas(first, delimiter)
        stream = io.BufferedReader(CommaSeparated(stream, delimiter))
    return LogSource(path, stream, first, line_number)


def _has_format(source: LogSource) -> bool:
    """Whether the columns are those of a format. In JSONL each line of a sample may add columns."""
    if source.stream is None or source.first_line[:1] == b"[":
        return False
    if source.first_line[:1] != b"{":
        try:
            return is_known_format(next(csv.reader([source.first_line.decode()])))
        except csv.Error:
            return False
    names: dict[str, None] = {}
    for line in source.sample_lines():
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            continue
        # An object in the column NESTED counts as columns of its own.
        if isinstance(row, dict):
            parts = row.get(NESTED)
            names |= dict.fromkeys(row)
            names |= dict.fromkeys(f"{NESTED}.{part}" for part in parts) if isinstance(parts, dict) else {}
    return is_known_format(names)


def _first_line(path: Path, stream: io.BufferedReader) -> tuple[bytes, int]:
    """The first line that is not blank, and its number from 1."""
    for number, line in enumerate(stream, start=1):
        if line.strip():
            return line.strip(), number
    raise TraceError(f"{path}: is empty; expected a trace with one of the headers {accepted_columns()}")


def _read_formatted(source: LogSource, options: _ReadOptions) -> Trace:
    """The trace in a file with one of FORMATS."""
    read = _read_jsonl if source.first_line[:1] == b"{" else _read_csv
    return read_once(source.path, lambda: read(source, options), options)


def _read_csv(source: LogSource, options: _ReadOptions) -> Trace:
    """The trace in a file of CSV, of which the header was read already."""
    path, header_line = source.path, source.line_number
    where = f"{path}, line {header_line}"
    try:
        names = next(csv.reader([source.first_line.decode()]))
    except csv.Error as error:
        raise TraceError(f"{where}: is no CSV header ({error}); expected {accepted_columns()}") from None
    rows = TraceRows(path, names, where, drop_invalid=options.drop_invalid, zone=options.zone)
    lengths = rows.counts  # The columns of input and output tokens.
    figures = (rows.clock, *lengths)
    # Times are read as text, because pandas would lose digits of them and float() does not.
    as_text = [name for name in rows.needed if name not in rows.counts]
    blocks = csv_tables.read_columns(
        path, source.stream, header_line, names, rows.needed, figures, as_text=as_text, warnings=rows.warnings
    )
    for block, table in csv_tables.check_lengths(path, names, lengths, blocks, rows.warnings):
        line_numbers = block.starts
        blank = np.logical_and.reduce([column.isna().to_numpy() for column in table.values()])
        # A row that is empty in our columns but has text in others is not blank; `add_rows` refuses it.
        if blank.any():
            lines = block.text.split(b"\n")
            texts = (lines[number - line_numbers[0]] for number in line_numbers[blank])
            blank[blank] = [not text.strip(b', \t\r"') for text in texts]
        for name in rows.lists:
            table[name] = pd.Series([_ids_of_text(text) for text in table[name]], dtype=object)
        rows.add_rows(line_numbers, blank, table)
    return rows.to_trace()


def ids_of(value: object) -> list[int] | None:
    """The block ids in a value, a list or the text of one; None for any other value."""
    return _ids_of_text(value) if isinstance(value, str) else _ids_of_value(value)


def _ids_of_text(text: object) -> list[int] | None:
    """The block ids in a text: [3, 4] of '[3, 4]' or '3 4', none of a missing value; None for other texts."""
    if not isinstance(text, str):
        return []
    inner = text.strip()
    if inner[:1] == "[" and inner[-1:] == "]":
        inner = inner[1:-1]
    try:
        return [int(word) for word in inner.replace(",", " ").split()]
    except ValueError:
        return None


def _read_jsonl(source: LogSource, options: _ReadOptions) -> Trace:
    """Read JSON Lines; a column may begin in any line, as some keys are in some requests only."""
    path, rows = source.path, None
    names: dict[str, int] = {}  # The first line of each column.
    for block in _read_blocks(source):
        requests = [json_object(path, number, line) if line.strip() else {} for number, line in block]
        names_before = len(names)
        for (number, _), request in zip(block, requests, strict=True):
            parts = request.get(NESTED)
            nested = [f"{NESTED}.{part}" for part in parts] if isinstance(parts, dict) else []
            for name in (*request, *nested):
                names.setdefault(name, number)
        if rows is None:
            where = f"{path}, line {source.line_number}"
            rows = TraceRows(
                path, list(names), where, drop_invalid=options.drop_invalid, grows=True, zone=options.zone
            )
        elif len(names) > names_before:
            rows.add_columns(names)
        columns: dict[str, list[Any]] = {
            name: [request.get(name) for request in requests] for name in rows.needed
        }
        for name in rows.lists:
            columns[name] = [_ids_of_value(value) for value in columns[name]]
        rows.add_rows(
            np.array([number for number, _ in block]),
            np.array([not line.strip() for _, line in block]),
            {name: pd.Series(column, dtype=object) for name, column in columns.items()},
        )
    assert rows is not None  # There is a first line.
    return rows.to_trace()


def _read_blocks(source: LogSource) -> Iterator[list[tuple[int, bytes]]]:
    """All lines with their numbers, about _BLOCK_BYTES at a time."""
    block, number = [source.first_line, *source.stream.readlines(_BLOCK_BYTES)], source.line_number
    while block:
        yield list(enumerate(block, start=number))
        number += len(block)
        block = source.stream.readlines(_BLOCK_BYTES)


def _ids_of_value(value: object) -> list[int] | None:
    """The block ids in a value of JSON: those of a list, or of the lists in an object, of which RAGPulse
    has one for each part of a prompt; none in null. None for any other value.
    """
    if value is None:
        return []
    if isinstance(value, dict):
        parts = [_ids_of_value(part) for part in value.values()]
        return None if None in parts else [block for part in parts if part for block in part]
    # bool is no id, though it is an int.
    return value if isinstance(value, list) and set(map(type, value)) <= {int} else None


def read_once(path: Path, read: Callable[[], Trace], options: _ReadOptions) -> Trace:
    """The cached trace of a file, or the one that `read` makes of it; that of a large file is then cached."""
    try:
        if not path.is_file() or path.stat().st_size < LEAST_CACHED_BYTES:
            return read()
        name = _cache_name(path, options)
    except OSError:  # The reader has a message of its own for such a file.
        return read()
    if (cached := _cached_trace(name)) is not None:
        return cached
    trace = read()
    if trace.has_prefixes or trace.after.size or trace.drawn_from is not None:
        return trace
    columns = {key: getattr(trace, key) for key in _COLUMNS}
    # A column with a stride of 0 is one value for all requests, which a trace has by default.
    arrays = {key: array for key, array in columns.items() if array is not None and array.strides != (0,)}
    column_files.cache_columns(name, arrays, {key: getattr(trace, key) for key in _DESCRIPTION})
    # The same trace, with columns that are mapped from the cache's file instead of held in memory.
    cached = _cached_trace(name)
    return trace if cached is None else cached


def _cache_name(path: Path, options: _ReadOptions) -> str:
    """The name of a file's cached columns; the same file read with other options has another name."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(repr((path.name, *options, _reader_digest())).encode())
    return digest.hexdigest()[:32]


@cache
def _reader_digest() -> str:
    """A digest of the code on which the result of reading a file depends."""
    files = (*sorted(Path(__file__).parent.glob("*.py")), Path(csv_lines.__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _cached_trace(name: str) -> Trace | None:
    """The trace that is cached under this name; None if there is none, or it cannot be used."""
    cached = column_files.read_cached_columns(name)
    if cached is None:
        return None
    arrays, description = cached
    try:
        values = {
            # JSON has lists for tuples.
            key: tuple(description[key]) if isinstance(description[key], list) else description[key]
            for key in _DESCRIPTION
        }
        fields: dict[str, Any] = {**values, **arrays}
        return Trace(**fields)
    except (KeyError, TypeError, ValueError):  # Damaged, or of another version.
        return None
