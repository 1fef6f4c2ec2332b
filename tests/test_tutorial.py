"""Tutorial, how-to and API page are run as they stand: what they show is what is printed."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.md"
HOW_TO = ROOT / "docs" / "how-to.md"
API = ROOT / "docs" / "reference.md"
PYTHON = ROOT / "docs" / "python.md"
COLOURING = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")  # CI asks for colours in a pipe


def sections(text: str) -> list[str]:
    return re.split(r"^## ", text, flags=re.MULTILINE)[1:]


def blocks(language: str, section: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)


def lines_of(shown: list[str]) -> list[str]:
    """Of blocks of commands, with the continued ones joined."""
    return "".join(shown).replace("\\\n", " ").splitlines()


def plain(text: str) -> str:
    """Without the lines of tables and with single spaces."""
    return " ".join(re.sub(r"[\u2500-\u257f]", " ", text).split())


def not_shown(section: str, printed: str) -> list[str]:
    """What a section shows or puts in bold figures, and its commands did not print.

    5.5 is not in 5.55, 5… is: digits that may change without changing what the page says.
    """
    shown = [line for block in blocks("text", section) for line in block.splitlines()]
    shown += re.findall(r"\*\*(\d[\d.,]*)\*\*", section)
    forms = [rf"(?<![\d.]){re.escape(plain(line))}(?!\.?\d)".replace("…", r"[\d.]*") for line in shown]
    return [line for line, form in zip(shown, forms, strict=True) if not re.search(form, plain(printed))]


def test_not_shown_finds_a_wrong_figure() -> None:
    section = "```text\ncost │ 23.92 │ *\n```\n**11.96** and **1.5**"
    assert not_shown(section, "│ cost  │ 23.92 │ * │ bound 11.96 1.55 11.5") == ["1.5"]
    assert not_shown(section, "cost 23.93 * 11.96 1.5") == ["cost │ 23.92 │ *"]
    assert not_shown("```text\n24… ms\n25… ms\n```", "24.18 ms") == ["25… ms"]


def run(line: str, folder: Path) -> str:
    """What the installed command prints; it must succeed, or say that the SLO is missed."""
    command = shlex.split(line)
    assert command[0] == "plan", "a command the test would have to install"
    environment = {name: value for name, value in os.environ.items() if name not in COLOURING}
    environment |= {"COLUMNS": "200", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == (5 if "SLO: MISSED" in done.stdout else 0), f"{line}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


@pytest.mark.slow
def test_every_step_prints_what_the_page_shows(scratch: Path) -> None:
    """In order, in one folder, as a step uses the files of earlier ones; every `out/...` named is there."""
    text = TUTORIAL.read_text()
    lines = 0
    for section in sections(text):
        commands = lines_of(blocks("sh", section))
        printed = "\n".join(run(line, scratch) for line in commands)
        assert not_shown(section, printed) == [], printed
        lines += len(commands)
    assert lines == 8
    named = set(re.findall(r"`((?:out|deploy)/[\w./]+)`", text))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (scratch / name).exists()] == []


def test_make_plan_installs_what_the_steps_need() -> None:
    """Whoever follows the page has run `make plan` and nothing else; validation needs the extra `runtime`."""
    commands = {words[1] for line in lines_of(blocks("sh", TUTORIAL.read_text())) if (words := line.split())}
    needed = {"runtime"} if commands & {"validate", "serve"} else set()
    makefile = (ROOT / "Makefile").read_text()
    (line,) = re.findall(r"^\$\(VENV\)/installed:.*\n\t(.*)$", makefile, flags=re.MULTILINE)
    assert needed and needed <= set(re.findall(r"\[(\w+)\]", line)), line


@pytest.mark.slow
def test_the_how_to_s_own_gpu_is_planned_with(scratch: Path) -> None:
    """The page's catalog and question, written to the files that their first lines name, with its command."""
    text = HOW_TO.read_text()
    for name, content in re.findall(r"```yaml\n# (\S+)\n(.*?)```", text, flags=re.DOTALL):
        (scratch / name).parent.mkdir(exist_ok=True)
        (scratch / name).write_text(content)
    section = next(section for section in sections(text) if blocks("sh", section))
    (command,) = lines_of(blocks("sh", section))
    assert not_shown(section, run(command, scratch)) == []


@pytest.mark.slow
def test_the_how_to_s_day_is_drawn_and_sized(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = next(section for section in sections(HOW_TO.read_text()) if section.startswith("Size a day"))
    monkeypatch.chdir(scratch)
    (drawing,) = blocks("python", section)
    exec(compile(drawing, "how-to.md", "exec"), {})
    (question,) = blocks("yaml", section)
    (scratch / "day.yaml").write_text(question)
    (command,) = lines_of(blocks("sh", section))
    assert not_shown(section, run(command, scratch)) == []
    named = set(re.findall(r"`(day/[\w./]+)`", section))
    assert len(named) == 3 and [name for name in sorted(named) if not (scratch / name).exists()] == []


@pytest.mark.slow
def test_the_api_page_s_example_prints_what_it_says(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = API.read_text()
    (code,) = blocks("python", text)
    monkeypatch.chdir(scratch)
    exec(compile(code, "reference.md", "exec"), {})
    (said,) = re.findall(r"It prints `(.*)`", text)
    assert capsys.readouterr().out == said + "\n"


@pytest.mark.slow
def test_the_python_page_prints_what_it_shows(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block by block, in one session, as a reader would type them."""
    monkeypatch.chdir(scratch)
    session: dict[str, object] = {}
    text = PYTHON.read_text()
    steps = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(steps) == len(blocks("python", text)) == 6
    for code, shown in steps:
        exec(compile(code, "python.md", "exec"), session)
        assert not_shown(f"```text\n{shown}```", capsys.readouterr().out) == []


@pytest.mark.slow
def test_the_sweep_draws_cost_against_the_slo(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A looser limit never costs more, and the curve has a step."""
    monkeypatch.chdir(scratch)
    runpy.run_path("examples/sweep.py")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    costs = [float(cost) for _, cost, _ in rows]
    assert costs == sorted(costs, reverse=True) and len(set(costs)) > 1
    assert "cheapest fleet" in (scratch / "sweep.html").read_text()
