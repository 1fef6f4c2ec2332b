"""Reads text files, and CSV tables of numbers, that other programs wrote, and checks them."""

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

MAX_BYTES = 512 * 2**20  # Results of a benchmark that kept every token of 100,000 requests are smaller.


def read_text(path: Path) -> str:
    """UTF-8 text without its byte order mark."""
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
    """A CSV with a header that has all of `columns`."""
    table = parse_csv(read_text(path), path, columns)
    if table.empty:
        raise InputError(f"{path}: holds no rows")
    return table


def parse_csv(text: str, where: object, columns: Iterable[str] = ()) -> pd.DataFrame:
    """A CSV table from its text; a # and what follows it on its line are left out.

    It must have all `columns`. Errors begin with `where`.
    """
    refuse_long_fields(text, where)
    try:
        table = pd.read_csv(io.StringIO(text), comment="#", low_memory=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, ValueError, OverflowError) as error:
        raise InputError(f"{where}: is not a CSV with a header ({str(error).strip()[:120]})") from None
    if not isinstance(table.index, pd.RangeIndex):  # From surplus cells pandas makes row labels.
        raise InputError(f"{where}: is not a CSV with a header (rows have more cells than the header)")
    refuse_other_delimiter(list(table.columns), where)
    columns = list(columns)
    if missing := [column for column in columns if column not in table.columns]:
        needs = ", ".join(columns)
        raise InputError(f"{where}: lacks the column(s) {', '.join(missing)}; needs {needs}")
    return table


def read_text_rows(path: Path, columns: Iterable[str], expected: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV with a header that has all of `columns`: the number of the line with which each ends,
    and its texts by column, empty where the row is too short. `expected` says in an error what the file
    should have been.

    This is for texts, and for messages that name a line. `read_csv` reads numbers, and skips comments.
    """
    reader = csv.DictReader(io.StringIO(read_text(path)), restval="")
    try:
        if missing := [column for column in columns if column not in (reader.fieldnames or ())]:
            raise InputError(f"{path}: no column {', '.join(missing)}; expected {expected}")
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        # The number of lines is still 0 where the header cannot be read.
        raise InputError(f"{path}, line {max(reader.line_num, 1)}: cannot be read ({error})") from None


def read_number_column(
    table: pd.DataFrame, name: str, where: object, *, least: float = 0.0
) -> npt.NDArray[np.float64]:
    """A column of numbers that are at least `least` and below LARGEST.

    Raises InputError that names the first row where one is not; row 1 follows the header.
    """
    values = as_floats(table[name])
    bad = np.flatnonzero(~((values >= least) & (values < LARGEST)))
    if bad.size:
        # Without `object` the cell would be shown as a type of NumPy, not as it was read.
        shown_value = show_value(table[name].astype(object).iloc[int(bad[0])])
        row = table.index[int(bad[0])] + 1
        bound = f"below {LARGEST:g}" if values[bad[0]] >= LARGEST else f">= {least:g}"
        raise InputError(f"{where}: row {row}: {name} is {shown_value}, must be a number {bound}")
    return np.asarray(values, dtype=float)


def as_floats(column: pd.Series[Any]) -> npt.NDArray[np.float64]:
    """NaN where a value is no number, infinity where it is too large for float64."""
    try:
        numbers = pd.to_numeric(column, errors="coerce")
    except OverflowError:  # A whole number may have 500 digits in Python.
        numbers = pd.Series([_as_float(value) for value in column], dtype=np.float64)
    return np.asarray(numbers.to_numpy(dtype=np.float64, na_value=np.nan))


def _as_float(value: object) -> float:
    """The value as a float: NaN if it is no number, infinity if it is too large for one."""
    try:
        return float(pd.to_numeric(pd.Series([value], dtype=object), errors="coerce").iloc[0])
    except OverflowError:
        return float("inf")
