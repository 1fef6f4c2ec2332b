"""Columns on disk: arrays in files of their own, memory-mapped, so that they take memory only while read.

Columns are kept in the user's cache folder under a name that tells all they depend on, the newest MOST_KEPT
of them. They are written aside and renamed, so nobody sees a part; whatever cannot be read back is taken for
missing, and what cannot be written is done without.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.files.checked_files import user_cache

Columns = Mapping[str, npt.NDArray[Any]]

MOST_KEPT = 8  # The columns of a trace of 50 million requests take about one GB.
LEFT_S = 3600.0  # What was written aside longer ago was left by a run that was killed.
ABOUT = "about.json"


def columns_folder() -> Path | None:
    """Where columns are kept; None where there is no home."""
    cache = user_cache()
    return None if cache is None else cache / "columns"


def read_kept_columns(name: str) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]] | None:
    """The columns of this name, mapped and not to be written to, and what was said about them; None where
    there are none, or they are damaged."""
    if (place := columns_folder()) is None:
        return None
    try:
        about = json.loads((place / name / ABOUT).read_text(encoding="utf-8"))
        columns = {}
        for column, (dtype, shape) in about["columns"].items():
            mapped = np.load(place / name / f"{column}.npy", mmap_mode="r", allow_pickle=False)
            if str(mapped.dtype) != dtype or list(mapped.shape) != shape:
                return None
            columns[column] = np.asarray(mapped)
        os.utime(place / name)  # The date of last use, by which the oldest are removed.
        return columns, about["about"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_columns(name: str, columns: Columns, about: Mapping[str, Any]) -> bool:
    """Write columns and what is to be said about them (JSON); False where that cannot be done."""
    if (place := columns_folder()) is None:
        return False
    aside = None
    try:
        place.mkdir(parents=True, exist_ok=True)
        _remove_old_columns(place)
        aside = Path(tempfile.mkdtemp(prefix=".", dir=place))
        for column, values in columns.items():
            np.save(aside / f"{column}.npy", values, allow_pickle=False)
        shapes = {column: (str(values.dtype), list(values.shape)) for column, values in columns.items()}
        text = json.dumps({"columns": shapes, "about": about})
        (aside / ABOUT).write_text(text, encoding="utf-8")
        if (place / name).exists():  # It could not be read, or nobody would write it again.
            shutil.rmtree(place / name, ignore_errors=True)
        aside.rename(place / name)
        return True
    except OSError:
        return False
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)


def _remove_old_columns(place: Path) -> None:
    """Remove all but the newest, and what killed runs have left."""
    dated: list[tuple[float, Path]] = []
    for each in place.iterdir():
        with contextlib.suppress(OSError):
            changed_s = each.stat().st_mtime
            if not each.name.startswith("."):
                dated.append((changed_s, each))
            elif changed_s < time.time() - LEFT_S:
                shutil.rmtree(each, ignore_errors=True)
    for _, old in sorted(dated, reverse=True)[MOST_KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


def release_memory(column: npt.NDArray[Any]) -> None:
    """Give back the memory that a mapped column has taken; nothing happens to others. Its values stay."""
    base: Any = column
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if base is not None:
        base.madvise(mmap.MADV_DONTNEED)
