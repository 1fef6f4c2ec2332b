"""How a search ends when its time is over: the oracle raises StoppedError, and the function that began the
search catches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

USUAL_LIMIT_S = 600.0
"""The default time limit of a question on the wall clock. It is a safety net: usually WORK_S ends a
search.
"""
WORK_S = 120.0
"""The default time limit of a question on the search's clock (work_clock.py), on which all of its simulations
take place one after another.
"""

Result = TypeVar("Result")
Otherwise = TypeVar("Otherwise")


class StoppedError(Exception):
    """The time is over, so no further simulation may begin. The function that began the search catches it."""


def in_time(find: Callable[[], Result], otherwise: Otherwise) -> Result | Otherwise:
    """What `find` returns, or `otherwise` if the time ends first."""
    try:
        return find()
    except StoppedError:
        return otherwise
