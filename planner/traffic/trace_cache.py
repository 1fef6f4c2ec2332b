"""Parses large trace files only once: their columns are kept in the user's cache folder
(planner/files/column_files.py).

The name of a kept trace is a digest of the file's content, its name, and the code that read it. Thus a
changed file is parsed again, and so is every file after a change of this package. Traces with prefixes or
sessions are parsed every time: their files are mostly ids, which the cache would only copy, and they may
depend on further files beside them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from planner.files import column_files, csv_lines
from planner.traffic.trace import Trace

LEAST_KEPT_BYTES = 32 * 2**20  # Smaller files are not kept: to parse them takes a second or two.
# Fields of Trace that are kept: as JSON, and as arrays.
_DESCRIPTION = ("name", "tenants", "llms", "adapters", "notes", "warnings", "dropped", "coarse_s")
_COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "tenant", "llm", "adapter", "image_tokens", "task")


def read_once(path: Path, read: Callable[[], Trace], *, drop_invalid: bool) -> Trace:
    """The kept trace of a file, or the one that `read` makes of it, which is kept if the file is large."""
    try:
        if not path.is_file() or path.stat().st_size < LEAST_KEPT_BYTES:
            return read()
        name = _cache_name(path, drop_invalid)
    except OSError:  # The reader has a message of its own for such a file.
        return read()
    if (cached := _kept_trace(name)) is not None:
        return cached
    trace = read()
    if trace.has_prefixes or trace.after.size or trace.drawn_from is not None:
        return trace
    columns = {key: getattr(trace, key) for key in _COLUMNS}
    # A column with a stride of 0 is one value for all requests, which a trace has by default.
    arrays = {key: array for key, array in columns.items() if array is not None and array.strides != (0,)}
    column_files.keep_columns(name, arrays, {key: getattr(trace, key) for key in _DESCRIPTION})
    cached = _kept_trace(name)  # Its columns are mapped from the file instead of held in memory.
    return trace if cached is None else cached


def _cache_name(path: Path, drop_invalid: bool) -> str:
    """The name of a file's kept columns; the same file read with other options has another name."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(repr((path.name, drop_invalid, _reader_digest())).encode())
    return digest.hexdigest()[:32]


@cache
def _reader_digest() -> str:
    """A digest of the code on which the result of reading a file depends."""
    files = (*sorted(Path(__file__).parent.glob("*.py")), Path(csv_lines.__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _kept_trace(name: str) -> Trace | None:
    """The trace that is kept under this name; None if none is, or if it cannot be used."""
    cached = column_files.read_kept_columns(name)
    if cached is None:
        return None
    arrays, description = cached
    try:
        values = {
            # JSON has lists for tuples.
            key: tuple(description[key]) if isinstance(description[key], list) else description[key]
            for key in _DESCRIPTION
        }
        fields: dict[str, Any] = {**values, **arrays}
        return Trace(**fields)
    except (KeyError, TypeError, ValueError):  # Damaged, or of another version.
        return None
