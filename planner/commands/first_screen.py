"""The first screen of an answer in a terminal: what the report begins with, in 80 columns."""

from __future__ import annotations

import shlex
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from planner.commands.common import stdout_console

if TYPE_CHECKING:
    from rich.console import Console

    from planner.search.plan import Plan

LABEL, LINE = 20, 80  # columns of a label, and of a line where nobody says how many there are
MOST_COLUMNS = 110


def print_first_screen(plan: Plan) -> None:
    """Verdict, the answers, what a buyer asks, why nothing is cheaper, warnings."""
    from planner.reports import screen, words
    from planner.reports.facts import sentences

    console = stdout_console(soft_wrap=True)
    columns = min(console.width, MOST_COLUMNS) if sys.stdout.isatty() else LINE
    _say(console, screen.verdict(plan), columns, style="bold")
    console.print()
    for card in screen.cards(plan):
        style = "bold green" if card.is_plan else ""
        parts = [card.price, card.difference, card.kept, card.holds]
        said = "; ".join(part for part in parts if part) if card.price != "none" else card.fleet
        _row(console, card.name, said, columns, style=style)
    console.print()
    _row(console, "Promise", words.promise(plan), columns)
    for each in screen.glance(plan):
        _row(console, each.name, f"{each.value}: {each.note}", columns)
    if reasons := screen.why(plan):
        _row(console, "Why not cheaper", f"{'; '.join(reasons)}", columns)
    for said in sentences(plan.warnings):
        _row(console, "Warning", said, columns, style="yellow")


def print_next(out: Path | None, *, verbose: bool) -> None:
    """What to do with the answer."""
    console = stdout_console(soft_wrap=True)
    if out is None:
        said = "add -o DIR to write the plan, its report and manifests"
    else:
        page, plan = (shlex.quote(str(out / name)) for name in ("report.html", "plan.yaml"))
        said = f"open {page}; plan validate {plan}"
    _row(console, "Next", said + ("" if verbose else "; --verbose prints all tables"), LINE)


def _say(console: Console, said: str, columns: int, *, style: str = "") -> None:
    for line in textwrap.wrap(said, columns, break_long_words=False, break_on_hyphens=False):
        console.print(Text(line, style=style))


def _row(console: Console, label: str, said: str, columns: int, *, style: str = "") -> None:
    lines = textwrap.wrap(said, columns - LABEL, break_long_words=False, break_on_hyphens=False)
    for k, line in enumerate(lines):
        console.print(Text(f"{label if k == 0 else '':{LABEL}}{line}", style=style))
