"""Interrupts, two runs into one folder, killed runs, want of memory: what is left is whole and said."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.api.planning import plan
from planner.api.results import PlanResult
from planner.cli import app
from planner.errors import InputError, PlannerError
from planner.files import interrupts
from planner.files.checked_files import _lock_folder, reserve_folder, write_files
from planner.reports import output

TRACE = "timestamp,input_tokens,output_tokens\n" + "".join(
    f"{i / 2},{200 + 10 * (i % 7)},{20 + i % 5}\n" for i in range(60)
)
SLO = "llm: llama-3.1-8b\nslo: {ttft: {p90: 2 s}}\nfleet: {gpus: {h100-80g: 2}}\nsafety: none\n"
INTERRUPTED = """
import os, signal, sys, time
import fleetplan.__main__ as start
from planner.search.evidence import certify

def interrupted(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

certify.certify_plan = interrupted
sys.argv = ["plan", "--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out"]
start.main()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "slo.yaml").write_text(SLO)
    (tmp_path / "trace.csv").write_text(TRACE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
def test_an_interrupt_leaves_the_best_fleet_so_far(here: Path) -> None:
    """Once the search has found one, Ctrl-C writes it, says so in the one line, and exits with 130; the fleet
    can be simulated, and the next plan removes it."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    *_, last = done.stderr.splitlines()
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert last.startswith("plan: interrupted; the best fleet so far is 1 worker of 1")
    assert last.endswith("USD/h: out/best-so-far.yaml") and done.stderr.count("interrupted") == 1
    assert [path.name for path in (here / "out").iterdir()] == ["best-so-far.yaml"]
    simulate = ["simulate", "--fleet", "out/best-so-far.yaml", "--trace", "trace.csv"]
    assert CliRunner().invoke(app, simulate).exit_code == 0
    write_files(here / "out", {"plan.yaml": ""}, outdated=output.OUTDATED)
    assert [path.name for path in (here / "out").iterdir()] == ["plan.yaml"]


def test_last_words_are_said_after_an_interrupt_alone() -> None:
    for error in (None, ValueError, KeyboardInterrupt):
        try:
            with interrupts.saving_on_interrupt(lambda: "saved"):
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        assert interrupts.save_and_tidy() == ("saved" if error is KeyboardInterrupt else "")
    assert interrupts.save_and_tidy() == ""


def test_two_runs_into_one_folder_are_refused(here: Path) -> None:
    """The second one in one line, whatever it would do there; the folder is removed where nothing came."""
    with reserve_folder(here / "a" / "out"):
        line = ["--slo", "slo.yaml", "--trace", "trace.csv", "-o", str(here / "a" / "out")]
        refused = CliRunner().invoke(app, line)
        assert isinstance(refused.exception, InputError)
        assert "another run is writing into it" in str(refused.exception)
        (here / "a" / "out" / "x").touch()
    assert (here / "a" / "out" / "x").exists()
    with pytest.raises(ValueError, match="late"), reserve_folder(here / "b" / "out"):
        raise ValueError("late")
    assert not (here / "b").exists()


def test_what_killed_runs_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """Folders aside that nobody has locked and that are older than a minute; not those in use."""
    old, used, new = (tmp_path / f".fleetplan-{name}" for name in ("old", "used", "new"))
    for folder in (old, used, new):
        (folder / "new").mkdir(parents=True)
        if folder is not new:
            os.utime(folder, (time.time() - 120,) * 2)
    with _lock_folder(used) as is_ours:
        assert is_ours
        write_files(tmp_path, {"a.txt": "a"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, used.name, "a.txt"]


@pytest.mark.parametrize("has_links", [True, False])
def test_what_is_replaced_is_there_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_links: bool
) -> None:
    """Killed between any two renames, a run leaves the old file or the new one, where file systems let a file
    have two names; and a failure puts the old ones back, with what they left out."""
    seen, rename, link = [], Path.replace, os.link

    def replace(self: Path, target: Path) -> Path:
        if Path(self).name == "fails":
            raise OSError(5, "no more")
        to = rename(self, target)
        seen.append({path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()})
        return to

    def linked(path: Path, other: Path, *, follow_symlinks: bool) -> None:
        if not has_links:
            raise OSError(1, "no links")
        link(path, other, follow_symlinks=follow_symlinks)

    write_files(tmp_path, {"a": "old", "b": "old", "gone": "old"})
    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(os, "link", linked)
    with pytest.raises(InputError, match="no more"):
        write_files(tmp_path, {"a": "new", "fails": "new"}, outdated=("gone",))
    assert seen[-1] == {"a": "old", "b": "old", "gone": "old"}
    seen.clear()
    write_files(tmp_path, {"a": "new", "b": "new"}, outdated=("gone",))
    assert seen[-1] == {"a": "new", "b": "new"}
    assert not has_links or all(each.keys() >= {"a", "b"} for each in seen)


def test_a_plan_is_written_where_its_charts_find_no_memory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan("slo.yaml", "trace.csv")
    assert isinstance(found, PlanResult)

    def draws(*_: object, **__: object) -> str:
        raise MemoryError

    monkeypatch.setattr(output, "render_report", draws)
    with pytest.raises(PlannerError, match=r"the plan is written, its report is not.*`plan report out`"):
        found.save("out")
    written = {path.name for path in Path("out").iterdir()}
    assert {"plan.yaml", "certificate.json", "requests.csv", "manifests"} <= written
    assert "report.html" not in written


@pytest.mark.slow
def test_without_a_home_or_a_place_to_keep_anything_a_plan_is_made(here: Path) -> None:
    """No HOME, and a cache folder that cannot be made: what would be kept there is made anew."""
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment |= {"XDG_CACHE_HOME": "/dev/null/nowhere"}
    line = ["--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out"]
    done = subprocess.run(
        [sys.executable, "-m", "fleetplan", *line],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert (here / "out" / "report.html").exists()


def test_what_takes_too_long_to_read_ends_in_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit counts from the start of the command; nothing is left where it ends before a plan."""
    from planner.api import inputs

    def reads_long(*_: object, **__: object) -> None:
        time.sleep(10)

    monkeypatch.setattr(inputs, "requests_of", reads_long)
    line = ["--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out", "--time-limit", "0.2"]
    refused = CliRunner().invoke(app, line)
    assert isinstance(refused.exception, PlannerError) and refused.exception.exit_code == 4
    assert str(refused.exception) == (
        "no answer within 0.2 s: the traffic is not read yet; raise --time-limit"
    )
    assert not (here / "out").exists()
