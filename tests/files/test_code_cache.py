"""Machine code kept on disk: whatever befalls its files, the function runs."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import numba
import pytest
from numba.core.cpu import CPUContext

from planner.files import code_cache

SOURCE = """
from planner.files.code_cache import cached_jit

def scaled_by(factor):
    @cached_jit(version=str(factor), nogil=True)
    def scaled(x):
        return factor * x
    return scaled
"""


@pytest.fixture(autouse=True)
def of_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NUMBA_CACHE_DIR, and nothing said yet."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    code_cache._warn_once.cache_clear()


def module(folder: Path, source: str = SOURCE) -> Any:
    """A module of this source in a folder, as if imported in another run: not from its bytecode, which cannot
    tell two sources of one second and length apart."""
    folder.mkdir(exist_ok=True)
    path = folder / "sums.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("sums", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    exec(compile(source, path, "exec"), found.__dict__)
    return found


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("__pycache__/numba-*/*"))


def test_code_is_made_once_per_types_and_version(tmp_path: Path) -> None:
    assert module(tmp_path).scaled_by(3)(2) == 6
    again = module(tmp_path).scaled_by(3)
    assert again(2) == 6 and dict(again.stats.cache_hits) and not again.stats.cache_misses
    assert again(0.5) == 1.5 and again.stats.cache_misses
    assert module(tmp_path).scaled_by(4)(2) == 8


@pytest.mark.parametrize("content", [b"", b"x" * 100, None])
def test_a_damaged_file_is_made_anew(tmp_path: Path, content: bytes | None) -> None:
    """Emptied, overwritten, or with one byte in its middle changed."""
    assert module(tmp_path).scaled_by(3)(2) == 6
    (path,) = kept(tmp_path)
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(
        good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :] if content is None else content
    )
    function = module(tmp_path).scaled_by(3)
    assert function(2) == 6 and function.stats.cache_misses
    # The code compiled anew may differ in length: Numba numbers functions, in all tests of a process.
    again = module(tmp_path).scaled_by(3)
    assert again(2) == 6 and not again.stats.cache_misses


@pytest.fixture
def made_elsewhere(tmp_path: Path) -> Iterator[tuple[Path, bytes, Callable[[], None]]]:
    """A file that another process is making: its path, what it will hold, and what ends that process."""
    module(tmp_path).scaled_by(3)(2)
    (path,) = kept(tmp_path)
    content = path.read_bytes()
    path.unlink()
    other = path.with_suffix(code_cache.TURN).open("w")
    fcntl.flock(other, fcntl.LOCK_EX)
    yield path, content, other.close
    other.close()


def test_code_that_another_process_makes_is_waited_for(
    tmp_path: Path, made_elsewhere: tuple[Path, bytes, Callable[[], None]]
) -> None:
    path, content, end = made_elsewhere

    def written() -> None:
        path.write_bytes(content)
        end()

    function = module(tmp_path).scaled_by(3)
    Timer(0.2, written).start()
    assert function(2) == 6 and not function.stats.cache_misses
    assert kept(tmp_path) == [path]


def test_code_of_a_process_that_died_is_made(
    tmp_path: Path, made_elsewhere: tuple[Path, bytes, Callable[[], None]]
) -> None:
    path, _, end = made_elsewhere
    function = module(tmp_path).scaled_by(3)
    Timer(0.2, end).start()
    assert function(2) == 6 and function.stats.cache_misses
    assert kept(tmp_path) == [path]


def test_nobody_waits_without_end(
    tmp_path: Path, made_elsewhere: tuple[Path, bytes, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_cache, "PATIENCE_S", 0.2)
    function = module(tmp_path).scaled_by(3)
    assert function(2) == 6 and function.stats.cache_misses
    assert made_elsewhere[0].exists()


def test_where_nothing_can_be_written_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file" / "below"))
    function = module(tmp_path / "code").scaled_by(3)
    with caplog.at_level(logging.WARNING):
        assert function(2) == 6 and function(0.5) == 1.5
    (line,) = caplog.messages
    assert line.startswith("plan: compiled code cannot be kept in ") and "(Not a directory)" in line
    assert "NUMBA_CACHE_DIR" in line


def test_a_full_disk_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert module(tmp_path).scaled_by(3)(2) == 6
    assert kept(tmp_path) == []
    assert "No space left on device" in caplog.text


def test_a_folder_of_sources_that_is_read_only_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code goes where the user keeps such things."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert module(tmp_path / "code").scaled_by(3)(2) == 6
    assert len(list((tmp_path / "home" / "fleetplan").glob("numba-*/sums.scaled-*.code"))) == 1
    assert kept(tmp_path / "code") == []


def test_code_of_a_copy_of_the_tree_is_the_same(tmp_path: Path) -> None:
    assert module(tmp_path / "one").scaled_by(3)(2) == 6
    (path,) = kept(tmp_path / "one")
    other = tmp_path / "two" / path.relative_to(tmp_path / "one")
    other.parent.mkdir(parents=True)
    other.write_bytes(path.read_bytes())
    function = module(tmp_path / "two").scaled_by(3)
    assert function(2) == 6 and not function.stats.cache_misses


def test_what_another_source_left_is_deleted(tmp_path: Path) -> None:
    assert module(tmp_path).scaled_by(3)(2) == 6
    (before,) = kept(tmp_path)
    assert module(tmp_path, SOURCE.replace("factor * x", "factor + x")).scaled_by(3)(2) == 5
    (after,) = kept(tmp_path)
    assert after != before


def test_stored_code_without_a_runtime_is_loaded_without_declarations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that Numba declares takes an eighth of a CPU second; code that allocates nothing needs none."""
    source = SOURCE.replace("nogil=True", "nogil=True, _nrt=False")
    compiled = module(tmp_path, source).scaled_by(3)
    assert compiled(2) == 6
    monkeypatch.setattr(CPUContext, "refresh", lambda self: pytest.fail("declared"))
    assert module(tmp_path, source).scaled_by(3)(2) == 6
    with pytest.raises(pytest.fail.Exception, match="declared"):
        module(tmp_path / "with_runtime").scaled_by(3)(2)
