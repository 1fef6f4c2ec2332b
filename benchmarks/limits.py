"""Measures how far beyond `--time-limit` a plan goes, and in which stage.

    python benchmarks/limits.py [--requests 2000000] [--limits 5 20 60] [--trace FILE] [--slo FILE]
                                [--safety "{kept_in: 0.95}"] [--folder DIR]

Plans a long trace (drawn as in benchmarks/scale.py, or FILE) under each limit, in a process of its own, and
prints when it ended, its exit code, its last line, and when each stage began. Times count from the start of
the process, as they do for a user. Exits with 1 if a run is over the limit by more than 2 s plus 5 %, has an
exit code other than 0, 3 or 4, or ends without an answer and without a line that says why there is none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scale import LONG_SLO, draw_long

MOST_S, MOST_FRAC = 2.0, 0.05  # beyond the limit
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ended:
    """One run: its limit, its wall and CPU time, its exit code and its output."""

    limit_s: float
    took_s: float
    cpu_s: float
    code: int
    said: tuple[str, ...]
    files: int

    @property
    def over_s(self) -> float:
        return self.took_s - self.limit_s

    @property
    def is_right(self) -> bool:
        has_said = self.code == 0 or self.files or any("  plan: " in line for line in self.said[-1:])
        return (
            self.over_s <= max(MOST_S, MOST_FRAC * self.limit_s) and self.code in (0, 3, 4) and bool(has_said)
        )


def run(folder: Path, slo: Path, trace: Path, limit_s: float) -> Ended:
    """`plan` under this limit, in a folder that it makes."""
    out = folder / f"out-{limit_s:g}"
    shutil.rmtree(out, ignore_errors=True)
    line = ["-m", "fleetplan", "--slo", str(slo), "--trace", str(trace), "-o", str(out)]
    line += ["--time-limit", f"{limit_s:g}"]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    began_s = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, *line],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert child.stderr is not None
    said = tuple(f"{time.monotonic() - began_s:7.1f}  {line.rstrip()}" for line in child.stderr)
    _, status, used = os.wait4(child.pid, 0)
    took_s = time.monotonic() - began_s
    child.returncode = os.waitstatus_to_exitcode(status)
    files = sum(path.is_file() for path in out.rglob("*")) if out.is_dir() else 0
    return Ended(limit_s, took_s, used.ru_utime + used.ru_stime, child.returncode, said, files)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=float, default=2e6)
    parser.add_argument("--limits", nargs="+", type=float, default=[5, 20, 60])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--slo", type=Path)
    parser.add_argument("--safety", default="none")
    parser.add_argument("--folder", type=Path, help="keep the drawn trace and the compact columns here")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = told.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        trace, slo = told.trace, told.slo
        if trace is None:
            trace = folder / f"trace-{told.requests:g}.csv"
            if not trace.exists():
                draw_long(int(told.requests), trace)
        if slo is None:
            slo = folder / "slo.yaml"
            slo.write_text(LONG_SLO.replace("safety: none", f"safety: {told.safety}"))
        ended = []
        for limit_s in told.limits:
            end = run(folder, slo, trace, limit_s)
            ended.append(end)
            print(
                f"--time-limit {end.limit_s:g}: ended after {end.took_s:.1f} s ({end.over_s:+.1f} s), "
                f"{end.cpu_s:.1f} CPU s, exit code {end.code}, {end.files} files",
                flush=True,
            )
            print("\n".join(f"    {line}" for line in end.said), flush=True)
    sys.exit(not all(end.is_right for end in ended))


if __name__ == "__main__":
    main()
