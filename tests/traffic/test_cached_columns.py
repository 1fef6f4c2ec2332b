"""Large traces are read once and kept as columns; whatever goes wrong with that, the trace is the same."""

from __future__ import annotations

import gzip
import os
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from planner.files import column_files
from planner.traffic import trace_reading
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

TEXT = "arrival_s,input_tokens,output_tokens,tenant\n" + "".join(
    f"{i / 7},{1 + i % 900},{1 + i % 90},{'ab'[i % 2]}\n" for i in range(500)
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every file counts as large; the folder in which columns are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trace_reading, "LEAST_CACHED_BYTES", 0)
    return tmp_path / "cache" / "fleetplan" / "columns"


def file_of(folder: Path, text: str = TEXT) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def assert_same(ours: Trace, theirs: Trace) -> None:
    for each in fields(Trace):
        a, b = getattr(ours, each.name), getattr(theirs, each.name)
        assert np.array_equal(a, b) if isinstance(b, np.ndarray) else a == b, each.name


def unread(*_: object, **__: object) -> Trace:
    raise AssertionError("the file is read again")


def test_a_second_reading_maps_what_the_first_has_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(trace_reading, "LEAST_CACHED_BYTES", 10**9)
        plain = read_trace(path)
    assert_same(read_trace(path), plain)
    (folder,) = cache.iterdir()
    assert sorted(each.name for each in folder.iterdir()) == [
        *("about.json", "arrival_s.npy", "input_tokens.npy", "output_tokens.npy", "tenant.npy")
    ]
    monkeypatch.setattr(trace_reading, "_read_csv", unread)
    again = read_trace(path)
    assert_same(again, plain)
    with pytest.raises(ValueError, match="read-only"):
        again.arrival_s[0] = 1.0


def test_a_changed_file_is_read_anew(tmp_path: Path, cache: Path) -> None:
    assert len(read_trace(file_of(tmp_path))) == 500
    assert len(read_trace(file_of(tmp_path, TEXT + "99.5,3,4,c\n"))) == 501
    assert len(list(cache.iterdir())) == 2


def test_packed_files_are_kept_too(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(TEXT.encode()))
    assert_same(read_trace(path), read_trace(path))
    assert len(list(cache.iterdir())) == 1


def test_notes_and_what_was_dropped_come_back(tmp_path: Path, cache: Path) -> None:
    """Two rows of a failed request, one blank; BurstGPT's coarse clock is still spread by the seed."""
    path = file_of(tmp_path, TEXT.replace("\n0.14", "\n\n0.14", 1) + "100,5,0,a\n101,5,0,b\n")
    first, second = read_trace(path), read_trace(path)
    assert_same(first, second)
    assert first.dropped == {"no field (blank line)": 1, "no output tokens (failed request)": 2}
    rows = "".join(f"{i // 10},{5 + i % 7},{3 + i % 5}\n" for i in range(400))
    burst = file_of(tmp_path, f"Timestamp,Request tokens,Response tokens\n{rows}")
    read_trace(burst, seed=1)
    assert not np.array_equal(read_trace(burst, seed=1).arrival_s, read_trace(burst, seed=2).arrival_s)


@pytest.mark.parametrize("name", ["about.json", "arrival_s.npy"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"{}"])
def test_damaged_columns_are_made_anew(tmp_path: Path, cache: Path, name: str, content: bytes) -> None:
    path = file_of(tmp_path)
    plain = read_trace(path)
    (folder,) = cache.iterdir()
    (folder / name).unlink()  # and not written over: `plain` is mapped to it
    (folder / name).write_bytes(content)
    assert_same(read_trace(path), plain)
    assert (folder / name).read_bytes() != content


def test_without_a_place_to_keep_them_every_run_reads(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No home, or a file where the folder should be."""
    path = file_of(tmp_path)
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    assert len(read_trace(path)) == 500
    monkeypatch.setattr(column_files, "columns_folder", lambda: None)
    assert len(read_trace(path)) == 500


def test_traces_with_prefixes_are_read_every_time(tmp_path: Path, cache: Path) -> None:
    path = file_of(tmp_path, "timestamp,input_length,output_length,hash_ids\n0,600,5,[1]\n1000,600,5,[1]\n")
    assert read_trace(path).has_prefixes
    assert not cache.exists()


def test_old_columns_and_what_killed_runs_left_are_removed(tmp_path: Path, cache: Path) -> None:
    read_trace(file_of(tmp_path))
    (left,) = cache.iterdir()
    for i in range(column_files.MOST_CACHED + 2):
        (cache / f"old{i}").mkdir()
        os.utime(cache / f"old{i}", (i, i))
    (cache / ".killed").mkdir()
    os.utime(cache / ".killed", (0, 0))
    read_trace(file_of(tmp_path, TEXT + "99.5,3,4,c\n"))
    names = {each.name for each in cache.iterdir()}
    assert len(names) == column_files.MOST_CACHED and left.name in names
    assert not names & {".killed", "old0", "old1"}
