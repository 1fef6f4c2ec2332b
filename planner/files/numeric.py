"""Columns of tables as float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd


def as_floats(column: pd.Series[Any]) -> npt.NDArray[np.float64]:
    """NaN where a value is no number, infinity where it is one of more digits than float64 can tell."""
    try:
        numbers = pd.to_numeric(column, errors="coerce")
    except OverflowError:  # A whole number may have 500 digits in Python.
        numbers = pd.Series([_as_float(value) for value in column], dtype=np.float64)
    return np.asarray(numbers.to_numpy(dtype=np.float64, na_value=np.nan))


def _as_float(value: object) -> float:
    try:
        return float(pd.to_numeric(pd.Series([value], dtype=object), errors="coerce").iloc[0])
    except OverflowError:
        return float("inf")
