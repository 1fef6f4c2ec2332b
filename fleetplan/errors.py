"""The errors that a caller can mend, each with one line that says what to change."""

from planner.errors import CatalogError as CatalogError
from planner.errors import ExtrapolationError as ExtrapolationError
from planner.errors import InfeasibleError as InfeasibleError
from planner.errors import InputError as InputError
from planner.errors import OutOfTimeError as OutOfTimeError
from planner.errors import PlannerError as PlannerError
from planner.errors import TraceError as TraceError

__all__ = [
    "CatalogError",
    "ExtrapolationError",
    "InfeasibleError",
    "InputError",
    "OutOfTimeError",
    "PlannerError",
    "TraceError",
]
