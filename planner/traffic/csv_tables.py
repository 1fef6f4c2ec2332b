"""The rows of a CSV by columns, some MiB at a time, every line accounted for."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from planner.errors import TraceError
from planner.files import csv_lines
from planner.files.document_values import show_value


def columns(
    path: Path,
    stream: io.BufferedReader,
    at: int,
    names: Sequence[str],
    wanted: Collection[str],
    figures: Collection[str],
    *,
    as_text: Collection[str] = (),
    doubts: list[str] | None = None,
) -> Iterator[tuple[csv_lines.Block, dict[str, pd.Series[Any]]]]:
    """The columns `wanted` of the rows below the header `names` in line `at`, each block with its lines.

    `figures` are columns of numbers or dates, which tell a row from a part of one; those `as_text` are not
    made numbers. `doubts` takes a sentence on the first figure with an exponent (1e3) in a column whose other
    figures have none. Raises TraceError naming the lines that are no rows of such a table.
    """
    own = [f"c{i}" for i in range(len(names) + 1)]  # and one more, where a field too many is seen
    places = {name: own[names.index(name)] for name in wanted}
    numbers = [names.index(name) for name in figures]
    header = ",".join(own).encode() + b"\n"
    for block in csv_lines.read_blocks(path, stream, at + 1, columns=names, figures=numbers):
        here = block.starts
        try:
            table = pd.read_csv(
                io.BytesIO(header + block.text),
                usecols=[*places.values(), own[-1]],
                dtype={places[name]: object for name in as_text},
                index_col=False,
                skip_blank_lines=False,
                keep_default_na=False,
                na_values=[""],
                low_memory=False,
            )
        except (ValueError, OverflowError) as error:  # ParserError is a ValueError
            reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. ")
            where = f"{path}, lines {here[0]} to {here[-1]}"
            raise TraceError(f"{where}: is not a table of {len(names)} columns ({reason})") from None
        if len(table) != len(here):
            raise TraceError(
                f"{path}, lines {here[0]} to {here[-1]}: hold {len(here)} rows, but {len(table)} are read; "
                "a line holds a carriage return (\\r) of its own: take it out"
            )
        if (extra := np.flatnonzero(table[own[-1]].notna())).size:
            raise TraceError(
                f"{path}, line {here[extra[0]]}: has more than the {len(names)} fields of the header; "
                "write numbers without thousands separators"
            )
        if doubts is not None and not doubts:
            in_place = [(name, table[places[name]], names.index(name)) for name in figures]
            doubts += _exponents(path, block, in_place)
        yield block, {name: table[place] for name, place in places.items()}


_SOME_EXPONENT = re.compile(rb"[eE]\+?\d")
# but not 1e-05, as programs write small numbers
_EXPONENT = re.compile(r"\s*\"?\d+(?:\.\d*)?[eE]\+?\d+\"?\s*")


def _exponents(
    path: Path, block: csv_lines.Block, figures: Sequence[tuple[str, pd.Series[Any], int]]
) -> list[str]:
    """The first figure with an exponent where the rest of its column, in this block, has none."""
    if not _SOME_EXPONENT.search(block.text):
        return []
    likely = [(name, at) for name, column, at in figures if _may_have_exponents(column)]
    if not likely:
        return []
    rows = block.text.decode(errors="replace").splitlines()
    for name, at in likely:
        cells = [cells[at] if len(cells := row.split(",")) > at else "" for row in rows]
        with_one = [k for k, cell in enumerate(cells) if _EXPONENT.fullmatch(cell)]
        if 0 < len(with_one) <= len(cells) / 2:
            first = with_one[0]
            written = cells[first].strip()
            line = block.starts[0] + first
            return [
                f"{path.name}, line {line}, column {name}: {show_value(written)} is read as "
                f"{float(written.strip(chr(34))):.15g}; most of the column is written without an exponent"
            ]
    return []


def check_lengths(
    path: Path,
    names: Sequence[str],
    lengths: Collection[str],
    rows: Iterator[tuple[csv_lines.Block, dict[str, pd.Series[Any]]]],
    doubts: list[str],
) -> Iterator[tuple[csv_lines.Block, dict[str, pd.Series[Any]]]]:
    """The same rows. `lengths` are columns of whole numbers, in which 5.000 may be five or five thousand: the
    first goes to `doubts`. Raises TraceError where it stands beside a number without a point.
    """
    has_told = False
    for block, table in rows:
        in_place = [(name, table[name], names.index(name)) for name in lengths if name in table]
        if not has_told and (told := _thousands(path, block, in_place)):
            doubts += told
            has_told = True
        yield block, table


_SOME_THOUSANDS = re.compile(rb"\d\.\d{3}(?!\d)")
_THOUSANDS = re.compile(r"\s*\"?[1-9]\d{0,2}\.000\"?\s*")


def _thousands(
    path: Path, block: csv_lines.Block, lengths: Sequence[tuple[str, pd.Series[Any], int]]
) -> list[str]:
    """The first number of a column of whole numbers that may have a point between its thousands."""
    likely = [(name, at) for name, column, at in lengths if column.dtype.kind not in "iub"]
    if not likely or not _SOME_THOUSANDS.search(block.text):
        return []
    rows = list(csv.reader(block.text.decode(errors="replace").splitlines()))
    for name, at in likely:
        cells = [cells[at].strip() if len(cells) > at else "" for cells in rows]
        with_point = [k for k, cell in enumerate(cells) if _THOUSANDS.fullmatch(cell)]
        if not with_point:
            continue
        first = with_point[0]
        line, written = block.starts[min(first, len(block.starts) - 1)], cells[first]
        place = f"line {line}, column {name}: {show_value(written)}"
        whole = [cell for cell in cells if cell.isdecimal()]
        if whole:
            raise TraceError(
                f"{path}, {place} stands beside {show_value(whole[0])}: is the point a thousands separator? "
                f"Write {written.replace('.', '')}, or {written.partition('.')[0]}"
            )
        return [
            f"{path.name}, {place} is read as {float(written):.15g}, with a decimal point; if it separates "
            f"thousands write {written.replace('.', '')}"
        ]
    return []


def _may_have_exponents(column: pd.Series[Any]) -> bool:
    """Cheaply: pandas makes whole numbers of a column without any."""
    if column.dtype.kind == "f":
        return True
    text = "" if column.dtype.kind in "iub" else "".join([each for each in column if isinstance(each, str)])
    return "e" in text or "E" in text
