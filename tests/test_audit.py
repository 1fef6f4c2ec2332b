"""`make audit` says what was audited: `.ci/audit` around a pip-audit that answers as told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).parents[1] / ".ci" / "audit"
SAFE = {"name": "a", "version": "1", "vulns": []}
VULNERABLE = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
SKIPPED = {"name": "c", "skip_reason": "not found on PyPI"}


@pytest.mark.parametrize(
    ("packages", "code", "says"),
    [
        ([SAFE, SAFE], 0, "2 of 2 packages audited, 0 with known vulnerabilities"),
        ([SAFE, VULNERABLE], 1, "b 2: CVE-1, mended in 3"),
        ([SAFE, SKIPPED], 1, "not audited: c: not found on PyPI"),
        ([SKIPPED, SKIPPED], 2, "nothing was audited: 0 of 2 packages: not found on PyPI"),
        ([], 2, "nothing was audited: 0 of 0 packages"),
        (None, 1, "nothing was audited: pip-audit ended with 0 and without a report"),
    ],
)
def test_an_audit_of_less_than_everything_fails(
    tmp_path: Path, packages: list[dict[str, Any]] | None, code: int, says: str
) -> None:
    """pip-audit itself ends with 0 where it skipped every package."""
    report = "" if packages is None else json.dumps({"dependencies": packages, "fixes": []})
    (tmp_path / "fake.py").write_text(f"print({report!r})")
    done = subprocess.run(
        [sys.executable, str(AUDIT), sys.executable, str(tmp_path / "fake.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done
    assert says in done.stdout + done.stderr
