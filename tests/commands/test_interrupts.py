"""Ctrl-C or SIGTERM at any moment of `plan`: one line, exit code 130 or 143; nothing, the best fleet so far,
or the plan."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRACE = "timestamp,input_tokens,output_tokens\n" + "".join(
    f"{i / 20},{200 + 10 * (i % 70)},{20 + i % 50}\n" for i in range(4000)
)
SLO = """llm: llama-3.1-8b
slo: {ttft: {p90: 2 s}, tbt: {p99: 200 ms}}
fleet: {gpus: {h100-80g: 20, a100-80g: 20, l40s-48g: 20}}
"""
SEARCH_ON = """
import os, time
from fleetplan.__main__ import main
from planner.commands import plan_command
from planner.commands.plan_command import BestSoFar

class Waits(BestSoFar):
    def note_progress(self, latest):
        super().note_progress(latest)
        if self.latest is not None:
            os.write(1, b".")
            time.sleep(60)

plan_command.BestSoFar = Waits
main()
"""
PATIENCE_S = 600.0  # A busy machine is slow, not wrong.
MOMENTS_S = (0.05, 0.12, 0.25, 0.4, 0.6, 0.8, 1.1, 1.5, 2.2, 3.0, 4.5)


def interrupted(
    folder: Path, after_s: float, line: list[str], by: signal.Signals = signal.SIGINT
) -> tuple[int, str, float]:
    """Exit code, stderr, and how long it took from Ctrl-C on, or from another signal."""
    run = subprocess.Popen(
        [sys.executable, "-m", "fleetplan", *line],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    time.sleep(after_s)
    run.send_signal(by)
    sent_s = time.monotonic()
    _, said = run.communicate(timeout=PATIENCE_S)
    return run.returncode, said.decode(), time.monotonic() - sent_s


@pytest.mark.long
@pytest.mark.parametrize("is_in_background", [False, True])
def test_what_ends_a_service_leaves_the_best_fleet_as_ctrl_c_does(
    tmp_path: Path, *, is_in_background: bool
) -> None:
    """SIGTERM, which docker stop, systemd and batch queues send: 128 + 15 = 143. It comes when a fleet that
    holds is known, as the search says. A script's shell starts what stands before & with Ctrl-C ignored;
    then SIGTERM left nothing, without a word.
    """
    (tmp_path / "slo.yaml").write_text(SLO)
    (tmp_path / "trace.csv").write_text(TRACE)
    plan = [sys.executable, "-c", SEARCH_ON, "--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out"]
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *plan] if is_in_background else plan
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None and run.stdout.read(1) == "."
        run.send_signal(signal.SIGTERM)
        _, said = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 143, said
    assert said.splitlines()[-1].startswith("plan: interrupted; the best fleet so far is ")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["best-so-far.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize("after_s", MOMENTS_S)
def test_an_interrupt_at_any_moment_is_one_line(tmp_path: Path, after_s: float) -> None:
    (tmp_path / "slo.yaml").write_text(SLO)
    (tmp_path / "trace.csv").write_text(TRACE)
    line = ["--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out"]
    code, said, took_s = interrupted(tmp_path, after_s, line)
    assert "Traceback" not in said, said
    if code == 0:  # it was done before
        return
    assert code == 130, said
    *_, last = said.splitlines()
    assert last.startswith("plan: interrupted") and said.count("interrupted") == 1
    assert took_s < 6
    left = {path.name for path in tmp_path.iterdir()} - {"slo.yaml", "trace.csv"}
    assert left <= {"out"} and not any(path.name.startswith(".fleetplan-") for path in tmp_path.rglob("*"))
    written = {path.name for path in (tmp_path / "out").iterdir()} if left else set()
    if "the best fleet so far is" in last:
        assert written == {"best-so-far.yaml"}
    elif "the plan is in out" in last:
        assert {"plan.yaml", "certificate.json", "requests.csv", "manifests"} <= written
        assert ("report.html" in written) == ("without its report" not in last)
    else:  # or it came when all was written and nothing said yet
        assert not left or {"plan.yaml", "certificate.json", "report.html", "manifests"} <= written


WAITING_DAY = """
import os, time
from fleetplan.__main__ import main
from planner.day import day_study

def wait(*_, **__):
    os.write(1, b".")
    time.sleep(60)

day_study.best_sizes = wait
main()
"""


@pytest.mark.long
def test_an_interrupted_day_leaves_the_fleet_of_its_best_day_so_far(tmp_path: Path) -> None:
    """The controllers are done, the optimum is not. `plan day` left nothing, without a word."""
    (tmp_path / "slo.yaml").write_text(SLO + "day: {controllers: [hpa], start: 30 s}\n")
    (tmp_path / "trace.csv").write_text(TRACE)
    line = ["day", "--slo", "slo.yaml", "--trace", "trace.csv"]
    for out in (["-o", "out"], []):
        with subprocess.Popen(
            [sys.executable, "-c", WAITING_DAY, *line, *out],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as run:
            assert run.stdout is not None and run.stdout.read(1) == "."
            run.send_signal(signal.SIGTERM)
            _, said = run.communicate(timeout=PATIENCE_S)
        last = said.splitlines()[-1]
        assert run.returncode == 143 and last.startswith("plan: interrupted; the best day so far is of "), (
            said
        )
        assert last.endswith(": out/best-so-far.yaml, which --fleet takes" if out else "without -o")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["best-so-far.yaml"]
    again = [sys.executable, "-m", "fleetplan", *line, "--fleet", "out/best-so-far.yaml", "-q"]
    assert subprocess.run(again, cwd=tmp_path, check=False, capture_output=True).returncode == 0
