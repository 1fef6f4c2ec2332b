"""The messages by which a plan reports its progress, and its stages, from which the time left is guessed."""

from typing import Self

STAGE_BEGINS = {
    "bound": 0.02,
    "level 0": 0.04,
    "pairs": 0.08,
    "walk": 0.13,
    "mixed fleets": 0.18,
    "production": 0.22,
    "test": 0.4,
    "neighbours": 0.8,
    "other GPUs": 0.82,
    "robustness": 0.84,
    "each GPU": 0.93,
    "report": 0.96,
}
"""The share of the plan's time that has passed when each stage begins, without that of compiling code:
medians of eight plans (two shared cores, 2026-11-28). Plans differ widely, so the time left is a guess.
"""


class Message(str):
    """A progress message, which is its own text: the `phase`, which says what is being done, and
    `best_so_far`, words such as "best so far 12.00 USD/h", or none.

    A page that shows the best fleet elsewhere takes the phase alone (`phase_of`).
    """

    __slots__ = ("best_so_far", "phase")
    phase: str
    best_so_far: str

    def __new__(cls, phase: str, best_so_far: str = "") -> Self:
        """The text is the phase, followed by the best so far if there is one."""
        message = super().__new__(cls, f"{phase}; {best_so_far}" if best_so_far else phase)
        message.phase, message.best_so_far = phase, best_so_far
        return message

    def with_prefix(self, prefix: str) -> Self:
        """The same message, with words before its text."""
        message = str.__new__(type(self), f"{prefix}{self}")
        message.phase, message.best_so_far = f"{prefix}{self.phase}", self.best_so_far
        return message


class Stage(Message):
    """A message at the begin of a stage. `done_frac` is the share of the plan's time that has passed then."""

    __slots__ = ("done_frac",)
    done_frac: float

    def __new__(cls, phase: str, name: str, best_so_far: str = "") -> Self:
        """`name` is that of the stage in STAGE_BEGINS."""
        stage = super().__new__(cls, phase, best_so_far)
        stage.done_frac = STAGE_BEGINS[name]
        return stage

    def with_prefix(self, prefix: str) -> Self:
        """The same stage, with words before its text."""
        stage = super().with_prefix(prefix)
        stage.done_frac = self.done_frac
        return stage


def phase_of(message: str) -> str:
    """What is being done, without the best fleet so far that a message may name."""
    return message.phase if isinstance(message, Message) else message


class Urgent(Message):
    """A message that is shown at once; others wait until the work has taken a while."""

    __slots__ = ()


LEAST_DONE_FRAC = 0.4  # Before the stage "test" the guess of the time left is too far off to be shown.


def left_s(worked_s: float, done_frac: float, limit_left_s: float) -> float | None:
    """About how long the plan will still take [s], at most until the time limit; None before LEAST_DONE_FRAC.

    `worked_s` have passed so far, `done_frac` is that of the stage, and the limit ends in `limit_left_s`.
    """
    return None if done_frac < LEAST_DONE_FRAC else min(worked_s * (1 / done_frac - 1), limit_left_s)
