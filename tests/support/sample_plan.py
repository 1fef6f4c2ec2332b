"""The plan of the shipped sample, made once a run by the installed command, whoever asks for it first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

if sys.platform != "win32":
    import fcntl

EXAMPLES = Path(__file__).parents[2] / "examples"
SLO, TRACE = EXAMPLES / "slo.yaml", EXAMPLES / "traces" / "azure-conversation-sample.csv"
COLOURING = ("COLUMNS", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")  # CI asks for colours in a pipe


def sample_plan(factory: pytest.TempPathFactory) -> Path:
    """A folder with `out`, the plan, and what the command wrote to stdout and stderr beside it.

    The workers of pytest-xdist share it: the first one that takes the lock plans, the others wait.
    """
    own = factory.getbasetemp()
    # A worker's temporary folder lies in that of the run, which no other run has.
    run = own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own
    folder = run / "sample-plan"
    with (run / "sample-plan.lock").open("w") as lock:
        _wait_for(lock)
        if not (folder / "code").exists():
            folder.mkdir(exist_ok=True)
            command = [str(Path(sys.executable).with_name("plan")), "--slo", SLO, "--trace", TRACE]
            command += ["-o", folder / "plan" / "out"]
            (folder / "plan").mkdir(exist_ok=True)
            environment = {name: value for name, value in os.environ.items() if name not in COLOURING}
            done = subprocess.run(
                list(map(str, command)),
                capture_output=True,
                text=True,
                check=False,
                timeout=600,  # a busy machine is slow, not wrong
                env=environment | {"PYTHONHASHSEED": "1"},
            )
            (folder / "stdout").write_text(done.stdout)
            (folder / "stderr").write_text(done.stderr)
            (folder / "code").write_text(str(done.returncode))
    return folder


def _wait_for(lock: IO[str]) -> None:
    if sys.platform != "win32":
        fcntl.flock(lock, fcntl.LOCK_EX)
