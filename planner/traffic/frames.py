"""Reads a trace from a pandas table (`fleetplan.plan(frame)`), with the same columns, checks and messages as
from a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from planner.errors import TraceError
from planner.traffic.formats import is_known_format
from planner.traffic.logs.log_reading import ANY, LogOptions, read_frame
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import ids_of
from planner.traffic.trace_rows import TraceRows

NAME = "DataFrame"  # The name of a table without one, in errors.


def trace_of(
    frame: pd.DataFrame, *, drop_invalid: bool = False, log_options: LogOptions | None = None
) -> Trace:
    """The requests of a table with the columns of any of `formats.FORMATS`, or of a log, read as
    `log_options` say.

    Coarse stamps are not spread yet (`trace.spread_stamps`). `frame.attrs["name"]` names the table in answers
    and errors; errors count its rows from 0.
    """
    path = Path(str(frame.attrs.get("name", NAME)))
    if not len(frame):
        raise TraceError(f"{path}: has no row; expected at least one request")
    log_options = log_options or ANY
    if log_options.says_something or not is_known_format(map(str, frame.columns)):
        return read_frame(str(path), frame, log_options, drop_invalid=drop_invalid)
    names = list(map(str, frame.columns))
    rows = TraceRows(path, names, f"{path}", drop_invalid=drop_invalid, counted="row", zone=log_options.zone)
    # Names of columns need not be text: they may be numbers.
    by_name = dict(zip(map(str, frame.columns), frame.columns, strict=True))
    columns = {name: _as_read_from_file(frame[by_name[name]]) for name in rows.needed}
    blank = np.logical_and.reduce([column.isna().to_numpy() for column in columns.values()])
    for name in rows.lists:
        columns[name] = pd.Series([ids_of(value) for value in columns[name]], dtype=object)
    rows.add_rows(np.arange(len(frame)), blank, columns)
    return rows.to_trace()


def _as_read_from_file(column: pd.Series[Any]) -> pd.Series[Any]:
    """A column as readers of files return it: numbers, or objects with dates as text, None if missing."""
    column = column.reset_index(drop=True)
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        texts = [None if pd.isna(date) else date.isoformat(sep=" ") for date in column]
        return pd.Series(texts, dtype=object)
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iuf":
        return column
    # A list is a value: it is never missing.
    values = [None if np.ndim(value) == 0 and pd.isna(value) else value for value in column]
    return pd.Series(values, dtype=object)
