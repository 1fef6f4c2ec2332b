"""Reads columns of a CSV, some MiB at a time, and raises an error if a line is not a row of the table.

pandas by itself would skip or misread such lines. planner/files/csv_lines.py cuts the file into blocks.
"""

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


def read_columns(
    path: Path,
    stream: io.BufferedReader,
    header_line: int,
    names: Sequence[str],
    wanted: Collection[str],
    figures: Collection[str],
    *,
    as_text: Collection[str] = (),
    warnings: list[str] | None = None,
) -> Iterator[tuple[csv_lines.Block, dict[str, pd.Series[Any]]]]:
    """Yield the rows below the header, which is line `header_line` of the file: blocks of lines, each with
    its columns `wanted` by name. `names` are all columns of the header.

    `figures` are the columns of `wanted` with numbers or dates, by which csv_lines.py recognises a line that
    is only a part of a row. Columns in `as_text` are read as text. A list `warnings` gets at most one, on
    the first figure with an exponent (1e3) in a column where at most half of the figures of a block have
    one. Raises TraceError with the numbers of lines that are not rows of such a table.
    """
    # These headings replace those of the file, which may repeat. The last one catches fields beyond the
    # header.
    headings = [f"c{i}" for i in range(len(names) + 1)]
    heading_of = {name: headings[names.index(name)] for name in wanted}
    figure_places = [names.index(name) for name in figures]
    header = ",".join(headings).encode() + b"\n"
    for block in csv_lines.read_blocks(
        path, stream, header_line + 1, columns=names, number_columns=figure_places
    ):
        lines = block.starts
        try:
            table = pd.read_csv(
                io.BytesIO(header + block.text),
                usecols=[*heading_of.values(), headings[-1]],
                dtype={heading_of[name]: object for name in as_text},
                index_col=False,
                skip_blank_lines=False,
                keep_default_na=False,
                na_values=[""],
                low_memory=False,
            )
        except (ValueError, OverflowError) as error:  # ParserError is a ValueError
            reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. ")
            where = f"{path}, lines {lines[0]} to {lines[-1]}"
            raise TraceError(f"{where}: is not a table of {len(names)} columns ({reason})") from None
        if len(table) != len(lines):
            raise TraceError(
                f"{path}, lines {lines[0]} to {lines[-1]}: hold {len(lines)} rows, but {len(table)} are "
                "read; a line holds a carriage return (\\r) of its own: take it out"
            )
        if (extra := np.flatnonzero(table[headings[-1]].notna())).size:
            raise TraceError(
                f"{path}, line {lines[extra[0]]}: has more than the {len(names)} fields of the header; "
                "write numbers without thousands separators"
            )
        if warnings is not None and not warnings:
            figure_columns = [(name, table[heading_of[name]], names.index(name)) for name in figures]
            warnings += _exponent_warnings(path, block, figure_columns)
        yield block, {name: table[heading] for name, heading in heading_of.items()}


# In a block of lines: whether it may have a figure with an exponent at all.
_SOME_EXPONENT = re.compile(rb"[eE]\+?\d")
# A whole cell with an exponent. A negative one raises no doubt: programs write small numbers as 1e-05.
_EXPONENT = re.compile(r"\s*\"?\d+(?:\.\d*)?[eE]\+?\d+\"?\s*")


def _exponent_warnings(
    path: Path, block: csv_lines.Block, figures: Sequence[tuple[str, pd.Series[Any], int]]
) -> list[str]:
    """A list with a sentence on the first figure with an exponent, in a column where at most half of the
    figures of this block have one; else empty. Spreadsheets write long numbers with exponents, and lose
    digits. `figures` has (name, column, index of the column).
    """
    if not _SOME_EXPONENT.search(block.text):  # Most blocks end here, quickly.
        return []
    likely = [(name, column_index) for name, column, column_index in figures if _may_have_exponents(column)]
    if not likely:
        return []
    rows = block.text.decode(errors="replace").splitlines()
    for name, column_index in likely:
        # Commas or line ends within quotes may shift columns and lines here. Then a doubt may be wrong or
        # missing, but no value.
        fields = [row.split(",") for row in rows]
        cells = [each[column_index] if len(each) > column_index else "" for each in fields]
        with_exponent = [k for k, cell in enumerate(cells) if _EXPONENT.fullmatch(cell)]
        if 0 < len(with_exponent) <= len(cells) / 2:
            first = with_exponent[0]
            figure = cells[first].strip()
            line = block.starts[0] + first
            return [
                f"{path.name}, line {line}, column {name}: {show_value(figure)} is read as "
                f"{float(figure.strip(chr(34))):.15g}; most of the column is written without an exponent"
            ]
    return []


def check_lengths(
    path: Path,
    names: Sequence[str],
    lengths: Collection[str],
    rows: Iterator[tuple[csv_lines.Block, dict[str, pd.Series[Any]]]],
    warnings: list[str],
) -> Iterator[tuple[csv_lines.Block, dict[str, pd.Series[Any]]]]:
    """Yield `rows`, and check the columns `lengths`, which should hold whole numbers.

    1,096 becomes 1096 if the column leaves no doubt that its commas separate thousands
    (`without_thousands`). At most one sentence is added to `warnings`: on the first such number; or on the
    first number like 5.000 in a column that leaves a doubt, as it may mean five or five thousand. Raises
    TraceError if, in one block of such a column, a number like 5.000 stands beside one without a point.
    """
    has_warned = False
    for block, table in rows:
        for name, column_index in [(name, names.index(name)) for name in lengths if name in table]:
            # Most columns hold plain whole numbers, and need no more than this quick test.
            if table[name].dtype.kind in "iub" or not _SOME_THOUSANDS.search(block.text):
                continue
            records = csv.reader(block.text.decode(errors="replace").splitlines())
            cells = [row[column_index].strip() if len(row) > column_index else "" for row in records]
            # A quoted field may contain line ends; then there are more cells than rows.
            if (plain := without_thousands(cells)) is None or len(plain) != len(table[name]):
                sentence = _thousands_warning(path, block, name, cells)
            else:
                table[name] = pd.Series([text or np.nan for text in plain], dtype=object)
                first = next(k for k, cell in enumerate(cells) if _GROUPED.fullmatch(cell))
                sentence = (
                    f"{path.name}, line {block.starts[first]}, column {name}: is read as {plain[first]}, "
                    "with a separator of thousands"
                )
            if sentence and not has_warned:
                warnings.append(sentence)
                has_warned = True
        yield block, table


# In a block of lines: whether it may have a number with a separator of thousands at all.
_SOME_THOUSANDS = re.compile(rb"\d(?:[.,' ]|\xc2\xa0|\xe2\x80\xaf)\d{3}(?!\d)")
# A whole cell like 5.000, which is ambiguous. A number with other decimals is not whole, and is refused where
# it is parsed.
_THOUSANDS = re.compile(r"[1-9]\d{0,2}\.000")
# In a file whose columns are separated by ";", csv_lines.py has made decimal commas points. The last two are
# the spaces that do not break a line.
_SEPARATORS = ".,' \u00a0\u202f"
# A whole cell with separators of thousands.
_GROUPED = re.compile(rf"[1-9]\d{{0,2}}(?:[{_SEPARATORS}]\d{{3}})+")


def without_thousands(cells: Sequence[str]) -> list[str] | None:
    """A column of whole numbers without its separators of thousands; None if it has none, or if they may be
    something else.

    A sign is a separator if every number above 999 has it, no number has another sign, and some number is
    not like 2.000, which could be the whole number two.
    """
    grouped = [cell for cell in cells if _GROUPED.fullmatch(cell)]
    signs = {sign for cell in grouped for sign in cell if not sign.isdecimal()}
    others = [cell for cell in cells if cell and not _GROUPED.fullmatch(cell)]
    if len(signs) != 1 or any(not cell.isdecimal() or len(cell) > 3 for cell in others):
        return None
    if not others and all(_THOUSANDS.fullmatch(cell) for cell in grouped):
        return None
    (sign,) = signs
    return [cell.replace(sign, "") for cell in cells]


def _thousands_warning(path: Path, block: csv_lines.Block, name: str, cells: Sequence[str]) -> str:
    """A sentence on the first of the `cells` like 5.000; "" if there is none. Raises TraceError if another
    cell is a whole number without a point.
    """
    first = next((k for k, cell in enumerate(cells) if _THOUSANDS.fullmatch(cell)), None)
    if first is None:
        return ""
    # A quoted field may contain line ends, so the block may have more lines than rows.
    line, number = block.starts[min(first, len(block.starts) - 1)], cells[first]
    place = f"line {line}, column {name}: {show_value(number)}"
    if without_point := next((cell for cell in cells if cell.isdecimal()), ""):
        raise TraceError(
            f"{path}, {place} stands beside {show_value(without_point)}: is the point a thousands "
            f"separator? Write {number.replace('.', '')}, or {number.partition('.')[0]}"
        )
    return (
        f"{path.name}, {place} is read as {float(number):.15g}, with a decimal point; if it separates "
        f"thousands write {number.replace('.', '')}"
    )


def _may_have_exponents(column: pd.Series[Any]) -> bool:
    """Whether the column may have a figure with an exponent. A column that pandas reads as whole numbers has
    none, since an exponent makes it a column of floats.
    """
    if column.dtype.kind == "f":
        return True
    text = "" if column.dtype.kind in "iub" else "".join([each for each in column if isinstance(each, str)])
    return "e" in text or "E" in text
