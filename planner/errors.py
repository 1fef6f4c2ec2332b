"""What can go wrong for a user, as a tree.

    PlannerError            bad input or a failed step: one line on stderr, exit code 1
      InputError            a file or a value we cannot use
        TraceError          ... in a trace
        CatalogError        ... in a catalog
      ExtrapolationError    a fitted model was asked beyond what it was fitted on
      OutOfTimeError        nothing was found within --time-limit: exit code 4
      InfeasibleError       no fleet keeps the promise: exit code 3; none was found and nothing proves it: 4

A message says what was asked, what was found and what to change, in one line. Anything that is not a
`PlannerError` is our own mistake and keeps its traceback; `BoundError` is one of these with a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


class PlannerError(Exception):
    """Base of every error a user can mend."""

    exit_code = 1


class InputError(PlannerError):
    """A file or a value that cannot be used as it stands."""


class TraceError(InputError):
    """A trace that cannot be read."""


class CatalogError(InputError):
    """A catalog row that is missing or makes no sense."""


class ExtrapolationError(PlannerError):
    """A prediction was asked outside the profiled range."""


class OutOfTimeError(PlannerError):
    """Nothing was found within the time limit, and nothing says that there is nothing."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class Change:
    """A limit that would have to move: what there is, and what was found to be enough.

    `limit` is the name of a `domain.FleetLimit` or of a `domain.Limit`, `unit` GPUs, W, USD/h or s.
    """

    limit: str
    present: float
    enough: float
    unit: str

    def __str__(self) -> str:
        if self.unit == "s":
            return f"{self.limit} >= {self.enough:.9g} s"
        unit = "" if self.unit == "GPUs" else f" {self.unit}"  # a stock's name says what is counted
        return f"{self.limit} from {self.present:g} to {self.enough:g}{unit}"


@dataclass(frozen=True, slots=True)
class MostKept:
    """The largest share of futures in which a fleet within the limits was found to keep the SLO, what that
    fleet is worth, and what the cheapest on paper is, in `unit`; `asked_frac` was wanted.
    """

    asked_frac: float
    kept_frac: float
    value: float
    on_paper: float
    unit: str


class InfeasibleError(PlannerError):
    """No fleet meets the SLO within the limits; or, unless `is_proved`, none was found and nothing proves it.

    `kind` is "latency" (no number of workers cures it) or "capacity" (stock, power or budget runs out).
    `constraint` names what binds, one limit or several. Each of `ways` is enough, all of its changes made
    together; `relaxation` says the same in a line, or what may help where no figures are known. `most_kept`
    is said where a fleet holds on paper and none in enough futures.
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
    ) -> None:
        super().__init__(message)
        self.most_kept = most_kept
        self.kind: Literal["latency", "capacity"] = kind
        names = (constraint,) if isinstance(constraint, str) else constraint
        self.constraints = tuple(dict.fromkeys(names))
        self.ways = tuple(dict.fromkeys(tuple(way) for way in ways))
        self.relaxation = relaxation or ways_text(self.ways)  # the smallest changes that help, in a line
        self.is_proved = is_proved
        if not is_proved:
            self.exit_code = 4

    @property
    def constraint(self) -> str:
        """What binds, in a line."""
        return ", ".join(self.constraints)

    def of(self, who: str) -> InfeasibleError:
        """The same error, of one of several LLMs."""
        return InfeasibleError(
            f"{who}: {self}",
            kind=self.kind,
            constraint=self.constraints,
            relaxation=self.relaxation,
            ways=self.ways,
            is_proved=self.is_proved,
            most_kept=self.most_kept,
        )


def ways_text(ways: Iterable[Iterable[Change]]) -> str:
    """For instance 'stock of h100-80g from 4 to 8, or power from 2000 to 5600 W'."""
    return ", or ".join(dict.fromkeys(" and ".join(map(str, way)) for way in ways))


class BoundError(AssertionError):
    """A lower bound lies above a fleet that holds: the bound is wrong, and so is whatever rests on it.

    Our own mistake, so no `PlannerError`: no certificate is written, and the traceback stays.
    """
