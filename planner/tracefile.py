"""Reading a trace: a CSV or JSONL file, plain or packed (.gz), in any of tracerows.FORMATS.

A file's format is told by its columns, never by its name. What a trace loses or gains on the way in (failed
requests left out, coarse clocks spread) stands in its `dropped` and `notes`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from planner.errors import TraceError
from planner.files import open_text
from planner.tracerows import Rows, accepted
from planner.traces import Trace, spread
from planner.tracetexts import json_object

_BLOCK_BYTES = 16 * 2**20


def read_trace(path: str | Path, *, seed: int | None = 0) -> Trace:
    """Read any of FORMATS. `seed` serves to `spread` coarse clocks alone; without one they stay coarse.

    Raises TraceError (or its parent InputError for what is no readable text) naming file, line and column.
    """
    path = Path(path)
    with open_text(path) as stream:
        first, at = _first_line(path, stream)
        if first[:1] == b"[":
            raise TraceError(f"{path}, line {at}: is one JSON list; expected JSONL, one object per line")
        trace = (_read_jsonl if first[:1] == b"{" else _read_csv)(path, stream, first, at)
    return trace if seed is None else spread(trace, seed=seed)


def _first_line(path: Path, stream: io.BufferedReader) -> tuple[bytes, int]:
    """The first line that is not blank, and its number from 1."""
    for number, line in enumerate(stream, start=1):
        if line.strip():
            return line.strip(), number
    raise TraceError(f"{path}: is empty; expected a trace with one of the headers {accepted()}")


def _read_csv(path: Path, stream: io.BufferedReader, header: bytes, at: int) -> Trace:
    try:
        names = next(csv.reader([header.decode()]))
    except csv.Error as error:
        raise TraceError(f"{path}, line {at}: is no CSV header ({error}); expected {accepted()}") from None
    # pandas gets our own names and one column more, where a field too many lands and is seen
    columns = [f"c{i}" for i in range(len(names) + 1)]
    rows = Rows(path, names, f"{path}, line {at}")
    needed = [columns[names.index(name)] for name in rows.needed]
    as_text = {columns[names.index(name)]: object for name in rows.needed if name not in rows.counts}
    line = at + 1
    while block := stream.readlines(_BLOCK_BYTES):
        text = io.BytesIO(b"".join([",".join(columns).encode(), b"\n", *block]))
        try:
            table = pd.read_csv(
                text,
                usecols=[*needed, columns[-1]],
                dtype=as_text,  # Python's float() keeps every digit of a time
                index_col=False,
                skip_blank_lines=False,
                keep_default_na=False,
                na_values=[""],
                low_memory=False,
            )
        except (ValueError, OverflowError) as error:  # ParserError is a ValueError
            reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. ")
            where = f"{path}, lines {line} to {line + len(block) - 1}"
            raise TraceError(f"{where}: is not a table of {len(names)} columns ({reason})") from None
        if (extra := np.flatnonzero(table[columns[-1]].notna())).size:
            raise TraceError(
                f"{path}, line {line + extra[0]}: has more than the {len(names)} fields of the header; "
                "write numbers without thousands separators"
            )
        numbers = np.arange(line, line + len(table))
        blank = np.logical_and.reduce([table[column].isna().to_numpy() for column in needed])
        for name in rows.lists:
            place = columns[names.index(name)]
            table[place] = pd.Series([_ids_of_text(text) for text in table[place]], dtype=object)
        rows.add(
            numbers, blank, {name: table[column] for name, column in zip(rows.needed, needed, strict=True)}
        )
        line += len(block)
    return rows.trace()


def _ids_of_text(text: object) -> list[int] | None:
    """'[3, 4]' and '3 4' are blocks 3 and 4; None where it is neither."""
    if not isinstance(text, str):
        return []
    inner = text.strip()
    if inner[:1] == "[" and inner[-1:] == "]":
        inner = inner[1:-1]
    try:
        return [int(word) for word in inner.replace(",", " ").split()]
    except ValueError:
        return None


def _read_jsonl(path: Path, stream: io.BufferedReader, first: bytes, at: int) -> Trace:
    json_object(path, at, first)
    rows = Rows(path, _names(first), f"{path}, line {at}")
    for block in _blocks(at, first, stream):
        columns: dict[str, list[Any]] = {name: [] for name in rows.needed}
        for number, line in block:
            request = json_object(path, number, line) if line.strip() else {}
            for name, column in columns.items():
                column.append(request.get(name))
        for name in rows.lists:
            columns[name] = [_ids_of_value(one) for one in columns[name]]
        rows.add(
            np.array([number for number, _ in block]),
            np.array([not line.strip() for _, line in block]),
            {name: pd.Series(column, dtype=object) for name, column in columns.items()},
        )
    return rows.trace()


def _blocks(at: int, first: bytes, rest: io.BufferedReader) -> Iterator[list[tuple[int, bytes]]]:
    """All lines with their numbers, some MiB at a time."""
    block, line = [first], at
    while block:
        yield list(enumerate(block, start=line))
        line += len(block)
        block = rest.readlines(_BLOCK_BYTES)


def _names(text: bytes) -> list[str]:
    """The keys of a JSON object; those of an object within it as "outer.inner", beside the outer one."""
    names = []
    for key, value in json.loads(text, object_pairs_hook=_Pairs):  # as pairs: a key given twice is seen
        names.append(key)
        if isinstance(value, _Pairs):
            names += [f"{key}.{inner}" for inner, _ in value]
    return names


class _Pairs(list[tuple[str, Any]]):
    """A JSON object, unlike a JSON list."""


def _ids_of_value(value: object) -> list[int] | None:
    """[3, 4] or {"a": [3], "b": [4]} are 3 and 4, nothing is none; None where it is something else."""
    if value is None:
        return []
    if isinstance(value, dict):
        parts = [_ids_of_value(part) for part in value.values()]
        return None if None in parts else [one for part in parts if part for one in part]
    return value if isinstance(value, list) and set(map(type, value)) <= {int} else None
