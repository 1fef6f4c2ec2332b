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


class InfeasibleError(PlannerError):
    """No fleet meets the SLO within the limits; or, unless `is_proved`, none was found and nothing proves it.

    `kind` is "latency" (no number of workers cures it) or "capacity" (stock, power or budget runs out);
    `constraint` names what binds and `relaxation` the smallest change that helps.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, kind: str, constraint: str, relaxation: str, is_proved: bool = True
    ) -> None:
        super().__init__(message)
        self.kind, self.constraint, self.relaxation = kind, constraint, relaxation
        self.is_proved = is_proved
        if not is_proved:
            self.exit_code = 4


class BoundError(AssertionError):
    """A lower bound lies above a fleet that holds: the bound is wrong, and so is whatever rests on it.

    Our own mistake, so no `PlannerError`: no certificate is written, and the traceback stays.
    """
