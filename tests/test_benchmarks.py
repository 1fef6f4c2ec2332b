"""Every script of benchmarks/ can be imported and says what it takes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]


def test_most_files_of_benchmarks_are_scripts() -> None:
    assert len(SCRIPTS) > 40


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_says_what_it_takes(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, so that what all import is imported once."""
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
