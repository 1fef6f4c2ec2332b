"""Large traces are read once: their columns are kept in the user's cache folder
(planner/files/column_files.py).

They are found again by the digest of the file's content, its name, and the code that read it, so a file that
was changed, or another version of this package, reads anew. Traces with prefixes or sessions are read every
time: their files are mostly ids, and what lies beside them may tell more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from planner.files import column_files, csv_lines
from planner.traffic.trace import Trace

KEPT_BYTES = 32 * 2**20  # a larger file takes seconds to read
_DESCRIPTION = ("name", "tenants", "llms", "adapters", "notes", "warnings", "dropped", "coarse_s")
_COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "tenant", "llm", "adapter", "image_tokens")


def read_once(path: Path, read: Callable[[], Trace], *, drop_invalid: bool) -> Trace:
    """What `read` makes of a file, as it was kept or as it is now; small files are always read."""
    try:
        if not path.is_file() or path.stat().st_size < KEPT_BYTES:
            return read()
        name = _name(path, drop_invalid)
    except OSError:
        return read()
    if (cached := _kept(name)) is not None:
        return cached
    trace = read()
    if trace.has_prefixes or trace.after.size or trace.drawn_from is not None:
        return trace
    given = {each: getattr(trace, each) for each in _COLUMNS}
    arrays = {each: array for each, array in given.items() if array is not None and array.strides != (0,)}
    column_files.keep_columns(name, arrays, {each: getattr(trace, each) for each in _DESCRIPTION})
    cached = _kept(name)
    return trace if cached is None else cached


def _name(path: Path, drop_invalid: bool) -> str:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(repr((path.name, drop_invalid, _reader())).encode())
    return digest.hexdigest()[:32]


@cache
def _reader() -> str:
    """A digest of the code that decides what a trace is read as."""
    files = (*sorted(Path(__file__).parent.glob("*.py")), Path(csv_lines.__file__))
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()


def _kept(name: str) -> Trace | None:
    cached = column_files.read_kept_columns(name)
    if cached is None:
        return None
    arrays, description = cached
    try:
        values = {
            key: tuple(description[key]) if isinstance(description[key], list) else description[key]
            for key in _DESCRIPTION
        }
        fields: dict[str, Any] = {**values, **arrays}
        return Trace(**fields)
    except (KeyError, TypeError, ValueError):
        return None
