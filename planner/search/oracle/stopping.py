"""How a search ends when its time is over: the oracle raises, whoever began the search catches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

USUAL_LIMIT_S = 600.0
"""The time limit of a question on the wall clock, unless another is given: a safety net."""
WORK_S = 120.0
"""How long all of a question's simulations may take one after the other on the search's clock
(work_clock.py).
"""

Result = TypeVar("Result")
Otherwise = TypeVar("Otherwise")


class StoppedError(Exception):
    """The time is over: no further simulation begins. Whoever started the search catches it."""


def in_time(find: Callable[[], Result], otherwise: Otherwise) -> Result | Otherwise:
    """What `find` returns, or `otherwise` if the time ends first."""
    try:
        return find()
    except StoppedError:
        return otherwise
