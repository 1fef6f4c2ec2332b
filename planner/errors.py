"""All errors that a user can cause, as a tree.

    PlannerError            bad input or a failed step: one line on stderr, exit code 1
      InputError            a file or a value that cannot be used
        TraceError          ... in a trace
        CatalogError        ... in a catalog
      ExtrapolationError    a fitted model was used outside the range it was fitted on
      OutOfTimeError        nothing was found within --time-limit: exit code 4
      InfeasibleError       no fleet keeps the SLO: exit code 3; none was found, without proof: exit code 4

A message says in one line what was asked, what was found and what to change. Any other error is our bug and
keeps its traceback; one of these, `BoundError`, is defined here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

# A limit may be too small by this share, because limits are tested with a larger slack (`domain.ROUNDING`).
ROUNDING_FRAC = 1e-10


class PlannerError(Exception):
    """Base of every error that a user can correct."""

    exit_code = 1

    @property
    def line(self) -> str:
        """The message in one line, even if it quotes a name of several lines."""
        return " ".join(str(self).split())

    def to_dict(self) -> dict[str, Any]:
        """The JSON that a command prints in place of its answer."""
        return {"status": "error", "message": self.line}


class InputError(PlannerError):
    """A file or a value that cannot be used."""


class TraceError(InputError):
    """A trace that cannot be read."""


class CatalogError(InputError):
    """A row that the catalog lacks, or one that is invalid."""


class ExtrapolationError(PlannerError):
    """A prediction outside the range for which its model was fitted."""


class OutOfTimeError(PlannerError):
    """Nothing was found within the time limit; there may be something."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class Change:
    """A limit that would have to change, from its present value to one that suffices (`enough`).

    `limit` is the name of a `domain.FleetLimit` or a `domain.Limit`; `unit` is GPUs, W, USD/h or s. For a
    limit of the SLO, `none_below` is the largest value at which no fleet was found (0 if none is known): the
    least value that suffices lies between it and `enough`.
    """

    limit: str
    present: float
    enough: float
    unit: str
    none_below: float = 0.0

    def __str__(self) -> str:
        if self.unit == "s":
            return f"{self.limit} >= {self.enough:.9g} s"
        unit = "" if self.unit == "GPUs" else f" {self.unit}"  # The name ends in "GPUs" or a GPU's name.
        return f"{self.limit} from {_plain(self.present)} to {_rounded_up(self.enough)}{unit}"


@dataclass(frozen=True, slots=True)
class MostKept:
    """The fleet that keeps the SLO in the largest share of scenarios (`kept_frac`) of all that were found
    within the limits. `value` is its objective and `on_paper` that of the cheapest fleet on paper, both in
    `unit`. The question requires the share `asked_frac`.
    """

    asked_frac: float
    kept_frac: float
    value: float
    on_paper: float
    unit: str


@dataclass(frozen=True, slots=True)
class LeastWorker:
    """The worker that takes least of a limit, and more than it allows: what is paid for it, such as "1 node
    of 8 × h100-80g", and how far the limit would have to rise for it alone.
    """

    paid: str
    change: Change

    def __str__(self) -> str:
        change, unit = self.change, f" {self.change.unit}"
        takes = "costs" if change.unit == "USD/h" else "takes"
        least = f"{change.enough:.2f}" if change.unit == "USD/h" else _rounded_up(change.enough)
        return (
            f"one worker {takes} {least}{unit} ({self.paid}), {change.limit} allows {_plain(change.present)}"
        )


class InfeasibleError(PlannerError):
    """No fleet keeps the SLO within the limits; or, unless `is_proved`, none was found and nothing proves it.

    `kind` is "latency" (no number of workers helps) or "capacity" (stock, power or budget is too small).
    `constraint` names the binding limit or limits. Each entry of `ways` helps if all its changes are made;
    `relaxation` is the same as text, or what may help if no figures are known. `most_kept` is given if a
    fleet keeps the SLO on paper but none keeps it in enough scenarios, `least_worker` if a limit has no room
    for any worker.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        kind: Literal["latency", "capacity"],
        constraint: str | Sequence[str],
        relaxation: str = "",
        ways: Sequence[Sequence[Change]] = (),
        is_proved: bool = True,
        most_kept: MostKept | None = None,
        least_worker: LeastWorker | None = None,
    ) -> None:
        super().__init__(message)
        self.most_kept = most_kept
        self.least_worker = least_worker
        self.kind: Literal["latency", "capacity"] = kind
        names = (constraint,) if isinstance(constraint, str) else constraint
        self.constraints = tuple(dict.fromkeys(names))
        self.ways = tuple(dict.fromkeys(tuple(way) for way in ways))
        self.relaxation = relaxation or ways_text(self.ways)
        self.is_proved = is_proved
        if not is_proved:
            self.exit_code = 4

    @property
    def constraint(self) -> str:
        """The binding limits in one line."""
        return ", ".join(self.constraints)

    def to_dict(self) -> dict[str, Any]:
        """The JSON that a command prints in place of a plan."""
        return {
            "status": "infeasible" if self.is_proved else "not found",
            "kind": self.kind,
            "constraint": self.constraint,
            "relaxation": self.relaxation,
            "message": str(self),
            "ways": [[asdict(change) for change in way] for way in self.ways],
            "most_kept": None if self.most_kept is None else asdict(self.most_kept),
        }

    def of_llm(self, llm: str) -> InfeasibleError:
        """The same error about one of several LLMs, which had all of the fleet for itself. More of a shared
        limit that is enough for it alone is no way to plan them all.
        """
        # A limit on latency, in seconds, is the LLM's own. All other limits are shared.
        is_shared = any(change.unit != "s" for way in self.ways for change in way)
        alone = f". That is enough for {llm} alone; the others take theirs beside it" if is_shared else ""
        return InfeasibleError(
            f"{llm}, even with all of the fleet for itself: {str(self).rstrip('.')}{alone}",
            kind=self.kind,
            constraint=self.constraints,
            relaxation=f"{self.relaxation}, for {llm} alone" if is_shared else self.relaxation,
            ways=() if is_shared else self.ways,
            is_proved=self.is_proved,
            most_kept=self.most_kept,
        )


def _plain(value: float) -> str:
    """The value with six digits, or as a whole number if that has more; no exponent as in 1e+06."""
    return f"{value:.0f}" if 999_999.5 <= value < math.inf else f"{value:g}"


def _rounded_up(value: float) -> str:
    """The value as `_plain` writes it, but rounded up, so that a limit of the written value suffices."""
    text = _plain(value)
    if float(text) >= value * (1 - ROUNDING_FRAC):
        return text
    # The place of the sixth digit, which is the last one written; numbers from 1e6 on are written to ones.
    last_place = 10.0 ** min(math.floor(math.log10(value)) - 5, 0)
    return _plain(float(text) + last_place)


def ways_text(ways: Iterable[Iterable[Change]]) -> str:
    """All ways in one line, each once: 'stock of h100-80g from 4 to 8, or power from 2000 to 5600 W'."""
    return ", or ".join(dict.fromkeys(" and ".join(map(str, way)) for way in ways))


class BoundError(AssertionError):
    """A lower bound lies above a fleet that holds, so the bound and all that follows from it are wrong.

    This is our bug, so it is no `PlannerError`: it keeps its traceback, and no certificate is written.
    """
