"""Shows the stage that a long question has reached: one line in a notebook, nothing in a program."""

import importlib
import sys
import time
from typing import Any, TypeAlias

from planner.search.problem.plan_problem import Progress, report_nothing

MaybeProgress: TypeAlias = "Progress | None"
"""The function that is called with each stage; None for the default of `shown_progress`."""


def shown_progress(progress: MaybeProgress) -> Progress:
    """The function to call with each stage: `progress`, by default a line below a notebook's cell, elsewhere
    nothing.
    """
    if progress is not None:
        return progress
    shell = _notebook_shell()
    return report_nothing if shell is None else NotebookLine()


class NotebookLine:
    """One line below a notebook's cell, with the stage and the seconds since the question began."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.line: Any = None

    def __call__(self, words: str) -> None:
        shown: Any = importlib.import_module("IPython.display")  # Untyped, and installed in notebooks only.
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
