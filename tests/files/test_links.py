"""Output folders that are links, or became links while a command ran: nothing is written through them."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import InputError
from planner.files.checked_files import check_output_directory, write_file, write_files


def swapped(out: Path, elsewhere: Path) -> None:
    """`out` is replaced by a link to another folder."""
    out.rename(out.with_name("moved"))
    elsewhere.mkdir()
    out.symlink_to(elsewhere)


def test_a_folder_that_became_a_link_is_not_written_through(tmp_path: Path) -> None:
    """It was a folder when the command began; at its end it leads elsewhere, where nothing appears."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    write_files(out, {"plan.yaml": "old"})
    check_output_directory(out)
    swapped(out, elsewhere)
    with pytest.raises(InputError, match=r"out: is a link to .*elsewhere"):
        write_files(out, {"plan.yaml": "new"}, outdated=("*",))
    with pytest.raises(InputError, match=r"out: is a link to"):
        write_file(out / "best-so-far.yaml", "new")
    assert not list(elsewhere.iterdir())


def test_a_folder_inside_that_became_a_link_is_not_written_through(tmp_path: Path) -> None:
    """Neither written nor tidied: what an earlier run left there is somebody else's now."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    write_files(out, {"manifests/README.md": "old", "manifests/old.yaml": "old"})
    swapped(out / "manifests", elsewhere)
    (elsewhere / "old.yaml").write_text("theirs")
    with pytest.raises(InputError, match=r"manifests: is a link to .*elsewhere"):
        write_files(out, {"manifests/README.md": "new"})
    write_files(out, {"plan.yaml": "new"}, outdated=("manifests/*",))
    assert [path.name for path in elsewhere.iterdir()] == ["old.yaml"]


def test_a_file_below_a_folder_that_is_a_link_may_be_named(tmp_path: Path) -> None:
    """A user may keep files behind a link of his own: one file there was named, and is written."""
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    write_file(tmp_path / "link" / "fleet.yaml", "a: 1")
    assert (tmp_path / "here" / "fleet.yaml").read_text() == "a: 1"
