"""Joins the lines of a CSV to rows. Quoted fields may run over several lines; stray quotes are refused.

At a stray quote that begins a field, a parser reads on to the next quote and silently swallows all rows
between. So a field over several lines counts as intended only if it ends with its closing quote, and if at
most one of its lines could be a row: one may look like a row by chance.
"""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.errors import InputError, TraceError
from planner.files.checked_files import MAX_LINE_BYTES
from planner.files.document_values import show_value

_CLOSING = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')  # The rest of a field, to the first quote not doubled.
_QUOTED = re.compile(rb'"[^"]*"')
_NUMBER_OR_DATE = re.compile(rb"\s*\"?(?:[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|\d{4}-\d\d-\d\d.*)\"?\s*")
_BLOCK_BYTES = 16 * 2**20  # Read at once: long traces are never in memory as a whole.
# The end of error messages.
_HOW_TO_END = 'take the quote out, or put the whole field in quotes and write a quote within it twice ("")'


@dataclass(frozen=True, slots=True)
class Block:
    """Some MiB of whole rows, and the line in the file at which each of them begins."""

    text: bytes
    starts: npt.NDArray[np.int64]


def read_blocks(
    path: Path, stream: io.BufferedReader, line: int, *, columns: Sequence[str], number_columns: Sequence[int]
) -> Iterator[Block]:
    """The rows below the header, from `line` on.

    `number_columns` are the indexes of columns that hold a number or a date in every row: a line with such
    values in all of them could be a row. Raises TraceError naming the line with a stray quote.
    """
    while lines := stream.readlines(_BLOCK_BYTES):
        text = b"".join(lines)
        starts = list(range(line, line + len(lines)))
        if b'"' in text:
            starts = []
            for start, row in _join_rows(path, stream, lines, line, columns):
                starts.append(start)
                if len(row) > 1:
                    _check_long_field(path, start, row, columns, number_columns)
            text = b"".join(lines)  # `_join_rows` has added lines if the last row was not complete.
        yield Block(text, np.array(starts))
        line += len(lines)


def _join_rows(
    path: Path, stream: io.BufferedReader, lines: list[bytes], line: int, columns: Sequence[str]
) -> Iterator[tuple[int, list[bytes]]]:
    """Yields each row: the number of its first line, and its lines. `lines`, which begin at `line`, get the
    further lines of the last row.
    """
    first, end, size_bytes, is_open = 0, 0, 0, False
    while end < len(lines):
        if is_open or b'"' in lines[end]:
            is_open, _ = _scan_line(lines[end], is_open)
        size_bytes += len(lines[end])
        end += 1
        if not is_open:
            yield line + first, lines[first:end]
            first, size_bytes = end, 0
        elif size_bytes > MAX_LINE_BYTES or (end == len(lines) and not _add_next_line(lines, stream)):
            is_long = size_bytes > MAX_LINE_BYTES
            until = f"within {MAX_LINE_BYTES // 2**20} MiB" if is_long else "before the end"
            place = _opening_place(path, line + first, lines[first], columns)
            raise TraceError(f"{place} is not closed {until}; {_HOW_TO_END}")


def _add_next_line(lines: list[bytes], stream: io.BufferedReader) -> bool:
    """Add the stream's next line to `lines`; False at its end."""
    if more := stream.readline():
        lines.append(more)
    return bool(more)


def _scan_line(line: bytes, is_open: bool) -> tuple[bool, int]:
    """Whether a quoted field continues after this line, and the index of the line's last field. With
    `is_open` the line begins within a quoted field.

    Parsers do the same: only a quote at the beginning of a field opens it, and text between the closing quote
    and the comma belongs to the field.
    """
    position, column = 0, 0
    while True:
        if is_open or line[position : position + 1] == b'"':
            closed = _CLOSING.match(line, position if is_open else position + 1)
            if closed is None:
                return True, column
            position, is_open = closed.end(), False
        comma = line.find(b",", position)
        if comma < 0:
            return False, column
        position, column = comma + 1, column + 1


def _check_long_field(
    path: Path, start: int, row: list[bytes], columns: Sequence[str], number_columns: Sequence[int]
) -> None:
    """Raise TraceError for a field over several lines that has text after its closing quote, or could be
    several rows. `row` has the lines of one row, which begins at line `start` of the file.
    """
    place = _opening_place(path, start, row[0], columns)
    for number, line in enumerate(row[1:], start=start + 1):  # Each line begins within a quoted field.
        closed = _CLOSING.match(line)
        if closed is not None and line[closed.end() : closed.end() + 1] not in (b"", b",", b"\r", b"\n"):
            raise TraceError(f"{place} is closed in line {number}, where its field goes on; {_HOW_TO_END}")
    _, column = _scan_line(row[0], False)
    rows = sum(_is_row(line, column, len(columns), number_columns) for line in row)
    if rows > 1:
        raise TraceError(
            f"{place} is closed in line {start + len(row) - 1}, and {rows} of these lines read as rows of "
            f"their own; {_HOW_TO_END}"
        )


def _is_row(line: bytes, column: int, width: int, number_columns: Sequence[int]) -> bool:
    """Whether a line, read without regard to quotes, has a number or date in all `number_columns`.

    All fields beyond `width` are taken for commas in the text of the field of index `column`.
    """
    fields = line.rstrip(b"\r\n").split(b",")
    extra = len(fields) - width
    indexes = [index + (extra if index > column else 0) for index in number_columns if index != column]
    return extra >= 0 and all(_NUMBER_OR_DATE.fullmatch(fields[index]) for index in indexes)


def _opening_place(path: Path, number: int, line: bytes, columns: Sequence[str]) -> str:
    """The beginning of an error: file, line and column of the quote that this line leaves open."""
    _, column = _scan_line(line, False)
    name = show_value(columns[column]) if column < len(columns) else str(column + 1)
    return f"{path}, line {number}: the quote that opens in column {name}"


def other_delimiter(header: bytes) -> bytes:
    """The character that separates the names of a header without commas: semicolon, tab or bar; empty if
    there is none, or the line is JSON. Characters within quotes separate nothing.
    """
    if header[:1] in (b"{", b"["):
        return b""
    bare = _QUOTED.sub(b"name", header)
    if b"," in bare or b'"' in bare:
        return b""
    return next((sign for sign in (b";", b"\t", b"|") if sign in bare.strip(sign)), b"")


def with_commas(text: bytes, delimiter: bytes) -> bytes:
    """Rows with another `delimiter` as a CSV with commas; their commas are decimal commas, made points."""
    return text.translate(bytes.maketrans(b"," + delimiter, b".,"))


class CommaSeparated(io.RawIOBase):
    """A stream of rows with another `delimiter`, read as `with_commas` writes them."""

    def __init__(self, stream: io.BufferedReader, delimiter: bytes) -> None:
        self._stream, self._delimiter = stream, delimiter

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        text = with_commas(self._stream.read(len(buffer)), self._delimiter)
        buffer[: len(text)] = text
        return len(text)


def refuse_other_delimiter(names: Sequence[object], where: object) -> None:
    """Raise InputError for a header of one name that holds semicolons, tabs or bars: a wrong delimiter."""
    name = str(names[0]) if len(names) == 1 else ""
    for sign, sign_name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if sign in name.strip(sign):
            raise InputError(
                f"{where}: columns are separated by {sign_name} ({show_value(name)}), expected commas, and a "
                "point in numbers; save it as CSV with commas"
            )


def refuse_long_fields(text: str, where: object) -> None:
    """Raise InputError for a quoted field that its line does not close: tables of numbers have none."""
    for number, line in enumerate(text.split("\n"), start=1):
        if '"' in line and not line.startswith("#"):  # Catalog tables have comments.
            is_open, column = _scan_line(line.encode(), False)
            if is_open:
                raise InputError(
                    f"{where}, line {number}: the quote that opens in column {column + 1} is not closed in "
                    f"its line; {_HOW_TO_END}"
                )
