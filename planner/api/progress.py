"""What a long question says while it is worked on: nothing in a program, one line in a notebook."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any, TypeAlias

from planner.search.problem.plan_problem import Progress, report_nothing

MaybeProgress: TypeAlias = "Progress | None"
"""Who hears of each stage; None: a notebook shows it, a program does not."""


def or_silent(progress: MaybeProgress) -> Progress:
    """The progress to use in place of None."""
    if progress is not None:
        return progress
    shell = _notebook_shell()
    return report_nothing if shell is None else NotebookLine()


class NotebookLine:
    """One line below the cell, which says the stage and the seconds since the question began."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.line: Any = None

    def __call__(self, words: str) -> None:
        shown: Any = importlib.import_module("IPython.display")  # untyped, and only in a notebook
        text = shown.Pretty(f"{time.monotonic() - self.began_s:.0f} s: {words}")
        if self.line is None:
            self.line = shown.display(text, display_id=True)
        else:
            self.line.update(text)


def _notebook_shell() -> object | None:
    """The shell of a notebook's kernel, None in a terminal or a program."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell if hasattr(shell, "kernel") else None
