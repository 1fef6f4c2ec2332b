"""A cache of columns on disk: arrays in files of their own, memory-mapped, so that they take memory only
while they are read.

Each set of columns has a folder in the user's cache, named after all that the columns depend on; only the
MOST_CACHED folders used last remain. A folder is written under another name and renamed, so no reader sees a
part of it. Damaged columns count as missing, and columns that cannot be written are not cached.
"""

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

MOST_CACHED = 8  # The columns of a trace of 50 million requests take about one GB.
ABANDONED_S = 3600.0  # Folders not renamed within this time were left by killed runs.
ABOUT = "about.json"  # A file in each folder: dtype and shape of its columns, and the caller's `about`.


def columns_folder() -> Path | None:
    """The folder of all cached columns; None if the user has no home folder."""
    cache = user_cache()
    return None if cache is None else cache / "columns"


def read_cached_columns(name: str) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]] | None:
    """The cached columns of this name, memory-mapped and read-only, and the `about` that `cache_columns`
    wrote with them. None if they are missing or damaged.
    """
    if (root := columns_folder()) is None:
        return None
    folder = root / name
    try:
        document = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        columns = {}
        for column, (dtype, shape) in document["columns"].items():
            mapped = np.load(folder / f"{column}.npy", mmap_mode="r", allow_pickle=False)
            if str(mapped.dtype) != dtype or list(mapped.shape) != shape:
                return None
            columns[column] = np.asarray(mapped)
        os.utime(folder)  # The time of the last use, by which old folders are removed.
        return columns, document["about"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None


def cache_columns(name: str, columns: Columns, about: Mapping[str, Any]) -> bool:
    """Cache columns under a name, with `about`: JSON values that `read_cached_columns` returns. False if they
    cannot be written.
    """
    if (root := columns_folder()) is None:
        return False
    unfinished = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_old_columns(root)
        unfinished = Path(tempfile.mkdtemp(prefix=".", dir=root))
        for column, values in columns.items():
            np.save(unfinished / f"{column}.npy", values, allow_pickle=False)
        shapes = {column: (str(values.dtype), list(values.shape)) for column, values in columns.items()}
        text = json.dumps({"columns": shapes, "about": about})
        (unfinished / ABOUT).write_text(text, encoding="utf-8")
        if (root / name).exists():  # The caller could not read these columns, so they are damaged.
            shutil.rmtree(root / name, ignore_errors=True)
        unfinished.rename(root / name)
        return True
    except OSError:
        return False
    finally:
        if unfinished is not None:  # Renamed by now, unless something failed.
            shutil.rmtree(unfinished, ignore_errors=True)


def _remove_old_columns(root: Path) -> None:
    """Remove folders that killed runs left, and those used longest ago, until there is room for one more
    among MOST_CACHED.
    """
    dated: list[tuple[float, Path]] = []
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            used_s = folder.stat().st_mtime
            if not folder.name.startswith("."):
                dated.append((used_s, folder))
            elif used_s < time.time() - ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)
    for _, old in sorted(dated, reverse=True)[MOST_CACHED - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


def release_memory(column: npt.NDArray[Any]) -> None:
    """Free the memory of a mapped column: its values are read from disk again when they are used. Nothing
    happens to other arrays.
    """
    # The `base` of a view is another array; that of the last is the mapping of the file.
    base: Any = column
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if base is not None:
        base.madvise(mmap.MADV_DONTNEED)
