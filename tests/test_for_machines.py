"""What is written for programs: llms.txt and AGENTS.md name files and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from planner.cli import app

ROOT = Path(__file__).parents[1]


def test_llms_txt_has_a_title_a_summary_and_links_that_lead_somewhere() -> None:
    lines = (ROOT / "llms.txt").read_text().splitlines()
    assert lines[0] == "# fleetplan" and lines[2].startswith("> ")
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(lines))
    assert len(links) > 15 and [link for link in links if not (ROOT / link).is_file()] == []
    schemas = {str(path.relative_to(ROOT)) for path in (ROOT / "schemas").iterdir()}
    assert schemas <= set(links)


def test_the_commands_and_options_for_agents_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    group = get_command(app)
    commands = group.commands  # type: ignore[attr-defined]
    lines = [line.split("#")[0] for line in text.split("```bash\n")[1].split("```")[0].splitlines()]
    assert len(lines) == 6
    for line in lines:
        word = line.split()[1]
        named = group if word.startswith("--") else commands[word]
        known = {option for parameter in named.params for option in parameter.opts}
        assert set(re.findall(r"(?<=\s)--?[a-z][\w-]*", line)) <= known, line
    for path in re.findall(r"\b(?:docs|schemas|planner)/[\w./]+", text):
        assert (ROOT / path.rstrip(".")).exists(), path
