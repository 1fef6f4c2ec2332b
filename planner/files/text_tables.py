"""Reads and checks text files, and CSV tables of numbers, that other programs wrote."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.errors import InputError
from planner.files.checked_files import open_input
from planner.files.csv_lines import refuse_long_fields, refuse_other_delimiter
from planner.files.document_values import show_value
from planner.units import LARGEST

MAX_BYTES = 512 * 2**20  # Benchmark results with every token of 100,000 requests are smaller.


def read_text(path: Path) -> str:
    """Read UTF-8 text; the byte order mark is left out."""
    with open_input(path) as stream:
        raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path}: is larger than {MAX_BYTES // 2**20} MiB; leave generated texts out of it")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text") from None
    if "\0" in text:
        raise InputError(f"{path}: holds a NUL byte, so it is binary; expected text")
    return text


def read_csv(path: Path, columns: Iterable[str] = ()) -> pd.DataFrame:
    """Read a CSV with a header that has all of `columns`."""
    table = parse_csv(read_text(path), path, columns)
    if table.empty:
        raise InputError(f"{path}: holds no rows")
    return table


def parse_csv(text: str, where: object, columns: Iterable[str] = ()) -> pd.DataFrame:
    """Parse a CSV that must have all `columns`; on each line the part from a # on is left out. Errors begin
    with `where`.
    """
    refuse_long_fields(text, where)
    try:
        table = pd.read_csv(io.StringIO(text), comment="#", low_memory=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, ValueError, OverflowError) as error:
        raise InputError(f"{where}: is not a CSV with a header ({str(error).strip()[:120]})") from None
    if not isinstance(table.index, pd.RangeIndex):  # Pandas takes surplus cells for row labels.
        raise InputError(f"{where}: is not a CSV with a header (rows have more cells than the header)")
    refuse_other_delimiter(list(table.columns), where)
    columns = list(columns)
    if missing := [column for column in columns if column not in table.columns]:
        needs = ", ".join(columns)
        raise InputError(f"{where}: lacks the column(s) {', '.join(missing)}; needs {needs}")
    return table


def read_text_rows(path: Path, columns: Iterable[str], expected: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Read the rows of a CSV with a header that has all of `columns`: for each the number of its last line,
    and its texts by column, empty where the row is too short. `expected` describes a valid file for errors.

    Unlike `read_csv`, this does not convert texts to numbers or skip comments.
    """
    reader = csv.DictReader(io.StringIO(read_text(path)), restval="")
    try:
        if missing := [column for column in columns if column not in (reader.fieldnames or ())]:
            raise InputError(f"{path}: no column {', '.join(missing)}; expected {expected}")
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        # If the header cannot be read, `line_num` is still 0.
        raise InputError(f"{path}, line {max(reader.line_num, 1)}: cannot be read ({error})") from None


def read_number_column(
    table: pd.DataFrame, name: str, where: object, *, least: float = 0.0
) -> npt.NDArray[np.float64]:
    """A column of numbers that must be at least `least` and below LARGEST. The InputError names the first row
    with another value; row 1 follows the header.
    """
    values = as_floats(table[name])
    bad = np.flatnonzero(~((values >= least) & (values < LARGEST)))
    if bad.size:
        # With dtype `object` the cell is shown as it was read, not as a type of NumPy.
        shown_value = show_value(table[name].astype(object).iloc[int(bad[0])])
        row = table.index[int(bad[0])] + 1
        bound = f"below {LARGEST:g}" if values[bad[0]] >= LARGEST else f">= {least:g}"
        raise InputError(f"{where}: row {row}: {name} is {shown_value}, must be a number {bound}")
    return np.asarray(values, dtype=float)


def as_floats(column: pd.Series[Any]) -> npt.NDArray[np.float64]:
    """The column as float64: NaN where a value is no number, infinity where it is too large."""
    try:
        numbers = pd.to_numeric(column, errors="coerce")
    except OverflowError:  # A whole number of hundreds of digits.
        numbers = pd.Series([_as_float(value) for value in column], dtype=np.float64)
    return np.asarray(numbers.to_numpy(dtype=np.float64, na_value=np.nan))


def _as_float(value: object) -> float:
    """The value as a float: NaN if it is no number, infinity if it is too large for one."""
    try:
        return float(pd.to_numeric(pd.Series([value], dtype=object), errors="coerce").iloc[0])
    except OverflowError:
        return float("inf")
