"""What a command says on stderr while it works."""

import logging
import math
import re
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner import cli
from planner.cli import app
from planner.commands import command_output
from planner.commands.command_output import Progress
from planner.search.oracle import work_clock
from planner.search.oracle.deterministic_parallel import charge_effort
from planner.search.problem.stages import Stage


def test_a_long_stage_is_told_again_where_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A production search was silent for 165 s; nothing more is said once the work has ended."""
    monkeypatch.setattr(command_output, "SILENT_S", 0.1)
    told, until_s = "", time.monotonic() + 60
    with Progress() as progress:
        progress("first")
        progress("production")
        while told.count("still: production") < 2 and time.monotonic() < until_s:
            time.sleep(0.02)
            told += capsys.readouterr().err
        took_s = time.monotonic() - progress.start_s
    told += capsys.readouterr().err
    assert 2 <= told.count("still: production") <= took_s / 0.1 + 1 and "first" not in told
    time.sleep(0.15)
    assert capsys.readouterr().err == ""
    with Progress(quiet=True) as progress:
        progress("production")
        time.sleep(0.15)
    assert capsys.readouterr().err == ""


def test_a_long_stage_says_how_much_of_the_allowed_work_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a plan with agents on all GPUs nobody could see that its work, not its time, would soon be at the
    limit. A command without such a limit says nothing of it.
    """
    monkeypatch.setattr(command_output, "SILENT_S", 0.05)

    def told(limit_s: float) -> str:
        seen, until_s = "", time.monotonic() + 60
        with Progress(limit_s=limit_s) as progress, work_clock.time_limit(100.0):
            progress("production")
            charge_effort(round(25 / work_clock.EFFORT_S))
            while seen.count("still") < 2 and time.monotonic() < until_s:
                time.sleep(0.02)
                seen += capsys.readouterr().err
        return seen

    limited = told(100.0)
    assert "still: production; 25 % of the work that a plan may take is done\n" in limited
    assert (
        limited.count("25 %") == 1 and "still: production\n" in limited
    )  # Said again only when it has grown.
    assert "still: production\n" in told(math.inf)


def test_the_fleet_on_paper_is_told_as_an_estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is known long before the fleet for production, and stderr only gave its cost, without the fleet."""
    monkeypatch.setattr(command_output, "QUIET_S", -1.0)
    slo = tmp_path / "slo.yaml"
    slo.write_text(
        "llm: llama-3.1-8b\nslo: {ttft: {p90: 2 s}}\ntraffic: {rate: 2, input: 300, output: 30, "
        "duration: 1 min}\nfleet: {gpus: {l40s-48g: 4}}\n"
    )
    monkeypatch.setattr(sys, "argv", ["plan", "--slo", str(slo)])
    with pytest.raises(SystemExit):
        cli.main()
    assert re.search(
        r"estimate: on paper 1 worker of 1 × l40s-48g would do, 0\.86 USD/h; the fleet for production",
        capsys.readouterr().err,
    )


def test_a_compilation_is_said_once_and_warnings_of_its_cache_even_if_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A first plan stood still for 20 to 50 s at "fleets of one worker type"."""
    compiler = logging.getLogger("fleetplan.code_cache")
    for is_quiet in (False, True):
        with Progress(quiet=is_quiet):
            compiler.info("compiling")
            compiler.info("compiling")
            compiler.warning("cannot be kept")
        *notices, warning = capsys.readouterr().err.splitlines()
        assert warning == "cannot be kept"
        # Stamped as every stage: what reads stderr knows progress from an error by that.
        assert [re.sub(r"^\[ *\d+\.\d s\] ", "", line) for line in notices] == ["compiling"] * (not is_quiet)
        assert all(line.startswith("[") for line in notices)
    compiler.info("compiling")
    assert capsys.readouterr().err == ""


def test_time_left_counts_no_compilation_and_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "About 220 s left" was said of a plan that had compiled for 130 s and took 35 more; a stage that came
    four times said 34, 76, 101 and 153 s.
    """
    now_s = 0.0
    monkeypatch.setattr("planner.commands.command_output.time.monotonic", lambda: now_s)
    progress = Progress(quiet=True)
    test = Stage("production: on other scenarios", "test")
    for now_s, message in ((5.0, "level 0"), (135.0, "pairs")):  # noqa: B007
        progress(Stage("searching", message))
        if message == "level 0":
            progress.print_notice("compiling")
    now_s = 145.0
    told = progress._how_far(test, now_s)
    assert told == f"{100 * test.done_frac:.0f} %, about {15 * (1 / test.done_frac - 1):.0f} s left: "
    assert progress._how_far(test, 200.0) == f"{100 * test.done_frac:.0f} %: "


@pytest.mark.parametrize("command", ["day", "tiers"])
def test_what_takes_long_can_be_quiet(command: str) -> None:
    """They refused -q as wrong usage."""
    said = CliRunner().invoke(app, [command, "--slo", "nowhere.yaml", "-q"])
    assert "No such option" not in said.output
