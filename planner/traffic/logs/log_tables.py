"""Reads wanted columns of CSV, JSON and Parquet files, as blocks of rows. A JSON file has one object per
line, or one list of objects.

Other columns are never kept, so that prompts and answers, which a log may contain, do not stay in memory.
pyarrow is optional, so it is imported where a Parquet file is read.
"""

import codecs
import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from planner.errors import InputError, TraceError
from planner.files import jsontext
from planner.files.csv_lines import refuse_other_delimiter
from planner.files.document_values import errors_as, show_value
from planner.traffic.texts import json_object
from planner.traffic.trace import IntArray

Block = tuple[IntArray, dict[str, "pd.Series[Any]"]]  # The line or number of each row, and the columns.
Row = dict[str, Any]
# The rows of a CSV or Parquet block, about 10 MiB of columns; JSON has a quarter of them.
BLOCK_ROWS = 100_000
SAMPLE_ROWS = 1000  # Formats and columns are recognised by this many rows.
MOST_LEVELS = 4  # Nested objects are read to this depth.
LONGEST_TEXT = 200  # Characters. A longer text cannot be a time, a count or a name.
_MOST_OBJECT_CHARS = 64 * 2**20  # A longer object means a broken file.
_SPACE = re.compile(r"[ \t\r\n]*")  # The white space of JSON.


# ---------------------------------------------------------------- CSV


def csv_names(path: Path, header: bytes, at: int) -> list[str]:
    """The columns of a CSV by its first line `header`, which is line `at` of the file."""
    try:
        names = [name.strip() for name in next(csv.reader([header.decode()]))]
    except csv.Error as error:
        raise TraceError(f"{path}, line {at}: is no CSV header ({error})") from None
    with errors_as(TraceError):
        refuse_other_delimiter(names, f"{path}, line {at}")
    repeated = next((name for name in names if names.count(name) > 1 and name), None)
    if repeated is not None:
        raise TraceError(f"{path}, line {at}: column {show_value(repeated)} is given twice; keep one")
    return names


def csv_sample(names: list[str], text: bytes) -> pd.DataFrame:
    """The first complete rows of a CSV, from which the meaning of its columns is guessed. Columns without a
    name are left out: a spreadsheet may leave several at the end.

    A text that is not CSV gives columns without rows; the error with its line comes when the file is read.
    """
    lines = text.split(b"\n")[: SAMPLE_ROWS + 1]  # The last line may be cut.
    body = b"\n".join(lines[:-1] if len(lines) > 1 else lines)
    try:
        reader = csv.reader(io.StringIO(body.decode(errors="replace")))
        # Rows that are too short are filled up, and those that are too long are cut.
        rows = [
            (row + [""] * len(names))[: len(names)] for row in itertools.islice(reader, SAMPLE_ROWS) if row
        ]
    except csv.Error:
        rows = []
    short_rows = [[cell[:LONGEST_TEXT] for cell in row] for row in rows]
    sample = pd.DataFrame(short_rows, columns=names, dtype=object)
    return sample.loc[:, [bool(name) for name in names]]


# ---------------------------------------------------------------- JSON


def flatten_row(row: Mapping[str, Any], prefix: str = "", levels: int = MOST_LEVELS) -> Row:
    """The values of a row, nested ones under names such as `usage.prompt_tokens`; no lists or long texts."""
    flat_row: Row = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            if levels:  # Deeper objects are left out.
                flat_row |= flatten_row(value, f"{name}.", levels - 1)
        elif not isinstance(value, list) and not (isinstance(value, str) and len(value) > LONGEST_TEXT):
            flat_row[name] = value
    return flat_row


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, None without one. The column a.b is row["a.b"], or the key b of the object a."""
    if name in row:
        return row[name]
    head, dot, rest = name.partition(".")
    while dot:
        inner = row.get(head)
        if isinstance(inner, dict):
            return value_at(inner, rest)
        # A key itself may have a dot: a.b.c is b.c in a, or c in a.b.
        next_key, dot, rest = rest.partition(".")
        head = f"{head}.{next_key}"
    return None


def json_lines(path: Path, first: bytes, at: int, stream: io.BufferedReader) -> Iterator[tuple[int, Row]]:
    """The number of each line, from `at` on, and its object; blank lines are empty objects."""
    for number, line in enumerate(itertools.chain([first], stream), start=at):
        yield number, json_object(path, number, line) if line.strip() else {}


def json_list(path: Path, first: bytes, stream: io.BufferedReader) -> Iterator[tuple[int, Row]]:
    """The objects of one JSON list, numbered from 1. A list of any length takes the memory of one object."""
    decoder, utf8 = jsontext.json_decoder(), codecs.getincrementaldecoder("utf-8")(errors="replace")
    text, number = utf8.decode(first + b"\n"), 0
    position = text.index("[") + 1

    def read_more() -> bool:
        """Drop the text before `position`, read a chunk. False at the end, or if an object is too long."""
        nonlocal text, position
        chunk = stream.read(2**18)
        text, position = text[position:] + utf8.decode(chunk), 0
        return bool(chunk) and len(text) < _MOST_OBJECT_CHARS

    while True:
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
        if position == len(text) and read_more():
            continue
        # Every object but the first follows a comma.
        if number and text[position : position + 1] == ",":
            comma, position = position, _SPACE.match(text, position + 1).end()  # type: ignore[union-attr]
            # The next object is not in the text yet. Read more of the file and parse the comma again.
            if position == len(text):
                position = comma
                if read_more():
                    continue
        if text[position : position + 1] == "]":
            rest = text[position + 1 :] + utf8.decode(stream.read(2**16))
            if rest.strip():
                raise TraceError(
                    f"{path}: after the JSON list comes {show_value(rest.strip()[:40])}; take it out"
                )
            return
        try:
            value, end = decoder.raw_decode(text, position)
            if end == len(text) and not isinstance(value, dict):
                # A number that is cut at the end of the chunk looks like a shorter number.
                raise ValueError("may go on")
        except (ValueError, RecursionError) as error:
            if read_more():
                continue
            raise TraceError(f"{path}, object {number + 1}: is not JSON ({str(error)[:80]})") from None
        number, position = number + 1, end
        if not isinstance(value, dict):
            raise TraceError(f"{path}, object {number}: expected a JSON object, found {show_value(value)}")
        yield number, value


def json_sample(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A table of some objects. The values of nested objects have columns of their own."""
    return pd.DataFrame([flatten_row(row) for row in rows], dtype=object)


def object_blocks(
    rows: Iterable[tuple[int, Row]], wanted: Collection[str], prepare: Callable[[Row], Row] | None = None
) -> Iterator[Block]:
    """The wanted columns of objects, in blocks; `prepare` may add columns to a row first."""
    remaining = iter(rows)
    # Blocks are smaller than those of a CSV, because objects take more memory than columns.
    while block := list(itertools.islice(remaining, BLOCK_ROWS // 4)):
        prepared = [prepare(row) if prepare else row for _, row in block]
        columns = {name: [_without_objects(value_at(row, name)) for row in prepared] for name in wanted}
        line = np.array([number for number, _ in block], dtype=np.int64)
        yield line, {name: pd.Series(column, dtype=object) for name, column in columns.items()}


def _without_objects(value: Any) -> Any:
    """The value; an object or a list as text, so that columns have plain values."""
    return json.dumps(value)[:LONGEST_TEXT] if isinstance(value, dict | list) else value


# ---------------------------------------------------------------- Parquet


def parquet_file(path: Path) -> Any:
    """The opened file. Raises InputError if pyarrow is not installed, or the file is not Parquet."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError(
            f"{path}: Parquet is read with pyarrow, which is not installed; pip install 'fleetplan[parquet]'"
        ) from None
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: is no Parquet file that can be read ({str(error)[:120]})") from None


def parquet_blocks(path: Path, file: Any, wanted: Collection[str] | None) -> Iterator[Block]:
    """Blocks of rows numbered from 1, with the wanted columns; with all columns if `wanted` is None."""
    import pyarrow as pa

    first_row = 1
    try:
        for batch in file.iter_batches(
            batch_size=BLOCK_ROWS, columns=None if wanted is None else list(wanted)
        ):
            # Metadata of pandas in the file may be damaged, so they are ignored. Whole numbers of a column
            # with gaps must stay whole: as floats, 7 would be the name "7.0", and different long ids would be
            # equal.
            table = batch.to_pandas(ignore_metadata=True, integer_object_nulls=True)
            end_row = first_row + len(table)
            yield np.arange(first_row, end_row), {str(name): table[name] for name in table.columns}
            first_row = end_row
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: is no Parquet file that can be read ({str(error)[:120]})") from None


def parquet_names(file: Any) -> list[str]:
    """The columns with one value per row; columns of lists and objects are left out."""
    schema = file.schema_arrow
    plain_names = [name for name in schema.names if schema.field(name).type.num_fields == 0]
    # A name that two columns have does not identify either.
    return [name for name in plain_names if schema.names.count(name) == 1]
