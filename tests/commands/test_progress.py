"""What a command says on stderr while it works."""

import logging
import re
import time

import pytest

from planner.commands import command_output
from planner.commands.command_output import Progress
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
