"""The largest share of scenarios that several LLMs keep together, where the limits do not allow what they
require.

The fleets on paper fit together and keep some share. Between that share and the required one the largest is
found by bisection: at each share the LLMs in turn take fleets of one worker type per pool, from what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.search.best_fleet import search_again
from planner.search.fleets import Counts
from planner.search.joint_limits import in_turn, within
from planner.search.options import OBJECTIVE_UNITS
from planner.search.owned import owned_first, paid
from planner.search.problem import Problem
from planner.search.production import LEAST_SEARCH, in_most, limited
from planner.solvers.master import Limits


@dataclass(frozen=True, slots=True, eq=False)
class InCommon:
    """Each LLM's problem in its scenarios, a fleet for each, and the share of scenarios that all of them
    keep.

    An LLM that requires less keeps only its own share, and one without safety keeps the traffic as it is
    written.
    """

    asked: Sequence[Problem]
    fleets: Sequence[Counts]
    kept_frac: float

    def __str__(self) -> str:
        unit = OBJECTIVE_UNITS[self.asked[0].task.objective]
        value = sum(paid(problem, counts) for problem, counts in zip(self.asked, self.fleets, strict=True))
        return (
            f"the most that was found to be kept by all together is {100 * self.kept_frac:.0f} %, for "
            f"{value:.2f} {unit}"
        )

    @property
    def relaxation(self) -> str:
        return f"safety: {{kept_in: {int(100 * self.kept_frac + 1e-9) / 100:g}}}"


def most_in_common(
    asked: Sequence[Problem], on_paper: Sequence[Counts], limits: Limits, out_of_time: Callable[[], bool]
) -> InCommon:
    """The largest share found until the time is over. The fleets `on_paper` fit together."""
    steps = max(len(problem.oracle.futures) for problem in asked)
    best = InCommon(asked, on_paper, _kept_frac(asked, on_paper))
    low, high = int(best.kept_frac * steps + 1e-9), int(max(map(_asked_frac, asked)) * steps + 1e-9) + 1
    while high - low > 1 and not out_of_time():
        middle = (low + high) // 2
        fleets = _with_share(asked, limits, middle / steps, out_of_time)
        if fleets is None:
            high = middle
            continue
        kept_frac = _kept_frac(asked, fleets)
        low = max(middle, int(kept_frac * steps + 1e-9))
        best = InCommon(asked, fleets, kept_frac)
    return best


def _asked_frac(problem: Problem) -> float:
    """The share of scenarios that the LLM's safety requires, 0 without safety."""
    return 0.0 if problem.task.safety is None else problem.task.safety.kept_in_frac


def _with_share(
    asked: Sequence[Problem], limits: Limits, kept_frac: float, out_of_time: Callable[[], bool]
) -> list[Counts] | None:
    """Fleets that fit together and keep this share, or their LLM's own share where that is smaller; None
    where no such fleets were found.
    """

    def serve(k: int, left: Limits) -> Counts | None:
        if out_of_time():
            return None
        problem, futures = within(asked[k], left), asked[k].oracle.futures
        may_miss = int((1 - min(kept_frac, _asked_frac(problem))) * len(futures) + 1e-9)
        found = search_again(limited(in_most(problem, futures, may_miss), LEAST_SEARCH), [], is_mixed=False)
        return None if found is None else owned_first(problem, found)

    return in_turn(len(asked), limits, serve)


def _kept_frac(asked: Sequence[Problem], fleets: Sequence[Counts]) -> float:
    """The smallest kept share among the LLMs that keep less than they require; 1 where none does."""
    kept = [1.0]
    for problem, counts in zip(asked, fleets, strict=True):
        if count := len(problem.oracle.futures):
            kept_frac = 1 - problem.oracle.missed(counts, count) / count
            if kept_frac < _asked_frac(problem) - 1e-9:
                kept.append(kept_frac)
    return min(kept)
