"""The largest share of scenarios that several LLMs keep together, if the limits do not allow the shares that
they require.

The fleets on paper fit together and keep some share. A bisection between that share and the largest required
one tries a share by serving the LLMs in turn: each takes a fleet of one worker type per pool from what is
left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from planner.documents.safety import safety_kept
from planner.domain import ROUNDING
from planner.errors import MostKept
from planner.search.mixed.best_fleet import find_fleet_quickly
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.work_clock import in_time
from planner.search.problem.options import OBJECTIVE_UNITS
from planner.search.problem.owned_first import objective_paid, owned_first
from planner.search.problem.plan_problem import Problem, with_scenarios
from planner.search.production.cheapest_kept import LEAST_SEARCH_REQUESTS, with_search_limit
from planner.search.several.joint_limits import problem_within, serve_in_turn
from planner.solvers.master import FleetLimits
from planner.units import in_unit


@dataclass(frozen=True, slots=True, eq=False)
class CommonShare:
    """Each LLM's problem in its scenarios, a fleet for each, and the share of scenarios that all keep.

    An LLM that requires a smaller share keeps only its own, and one without safety only the traffic as
    written. `kept_frac` would be 1 if every LLM kept what it requires, but it is only asked for where that is
    impossible. With `is_on_paper` the fleets are those on paper. The search may use all of the `limits`.
    """

    problems: Sequence[Problem]
    fleets: Sequence[Counts]
    kept_frac: float
    limits: FleetLimits
    is_on_paper: bool = False

    @property
    def value(self) -> float:
        """The objective of all fleets together, as it is paid."""
        return _value(self.problems, self.fleets)

    def most_kept(self, on_paper: Sequence[Counts]) -> MostKept | None:
        """The share and what it costs, beside the fleets `on_paper`; None if no better fleets were found."""
        if self.is_on_paper:
            return None
        return MostKept(
            asked_frac=max(map(_required_frac, self.problems)),
            kept_frac=self.kept_frac,
            value=self.value,
            on_paper=_value(self.problems, on_paper),
            unit=OBJECTIVE_UNITS[self.problems[0].task.objective],
        )

    def __str__(self) -> str:
        if self.is_on_paper:
            # No share is named: the answer on paper names its own, of other scenarios than the search's.
            return (
                "no fleets were found that keep more scenarios together than those on paper, which use "
                f"{self._used_text()}"
            )
        unit = OBJECTIVE_UNITS[self.problems[0].task.objective]
        return (
            f"the most that was found to be kept by all together is {100 * self.kept_frac:.0f} %, for "
            f"{in_unit(self.value, unit)}: with {self._used_text()}; none that use more were found to keep "
            "more"
        )

    def _used_text(self) -> str:
        """How much of each limit the fleets use, such as "28 of 32 GPUs (stock of h100-80g)"."""
        workers = [(option.type, count) for counts in self.fleets for option, count in counts]
        return ", ".join(
            f"{self.limits.used(limit, workers):g} of {amount:g} {limit.unit} ({limit.name})"
            for limit, amount in self.limits.rows()
        )

    @property
    def relaxation(self) -> str:
        """The `safety` that slo.yaml may ask for instead."""
        return safety_kept(self.kept_frac)


def find_common_share(
    problems: Sequence[Problem],
    on_paper: Sequence[Counts],
    limits: FleetLimits,
    out_of_time: Callable[[], bool],
) -> CommonShare:
    """The largest share found until the time is over. The fleets `on_paper` fit together.

    Raises StoppedError if the time is over before their share is known.
    """
    # A share is tried as a count of scenarios of the LLM that has most of them.
    scenario_count = max(len(problem.oracle.scenarios) for problem in problems)
    best = CommonShare(problems, on_paper, _kept_frac(problems, on_paper), limits, is_on_paper=True)
    kept_count = _floor(best.kept_frac * scenario_count)
    too_many = _floor(max(map(_required_frac, problems)) * scenario_count) + 1  # More than any LLM requires.
    while too_many - kept_count > 1 and not out_of_time():
        middle = (kept_count + too_many) // 2
        fleets = _find_fleets_for_share(problems, limits, middle / scenario_count, out_of_time)
        kept_frac = None if fleets is None else in_time(partial(_kept_frac, problems, fleets), None)
        if fleets is None or kept_frac is None:
            too_many = middle  # Nothing was found, or the time is over, which then ends the loop.
            continue
        # The fleets keep `middle` at least; a share that rounding made smaller must not undo this step.
        kept_count = max(middle, _floor(kept_frac * scenario_count))
        best = CommonShare(problems, fleets, kept_frac, limits)
    return best


def _value(problems: Sequence[Problem], fleets: Sequence[Counts]) -> float:
    """The objective of all fleets together, as it is paid."""
    return sum(objective_paid(problem, counts) for problem, counts in zip(problems, fleets, strict=True))


def _floor(count: float) -> int:
    """The whole part of a count; a value below a whole number by rounding errors only is that number."""
    return int(count + ROUNDING)


def _required_frac(problem: Problem) -> float:
    """The share of scenarios that the LLM's safety requires, 0 without safety."""
    return 0.0 if problem.task.safety is None else problem.task.safety.kept_in_frac


def _find_fleets_for_share(
    problems: Sequence[Problem], limits: FleetLimits, kept_frac: float, out_of_time: Callable[[], bool]
) -> list[Counts] | None:
    """Fleets that fit together and keep this share each, or the share that their LLM requires if that is
    smaller; None if no such fleets were found.
    """

    def serve(k: int, remaining: FleetLimits) -> Counts | None:
        if out_of_time():
            return None
        problem = problem_within(problems[k], remaining)
        scenarios = problem.oracle.scenarios
        may_miss = _floor((1 - min(kept_frac, _required_frac(problem))) * len(scenarios))
        # The bisection repeats this search, so each search gets the smallest budget of simulated requests.
        limited = with_search_limit(with_scenarios(problem, scenarios, may_miss), LEAST_SEARCH_REQUESTS)
        fleet = find_fleet_quickly(limited, start=[], is_mixed=False)
        # Exchanging rented workers for owned ones changes the limits left for the next LLM, but no latency.
        return None if fleet is None else owned_first(problem, fleet)

    return serve_in_turn(len(problems), limits, serve)


def _kept_frac(problems: Sequence[Problem], fleets: Sequence[Counts]) -> float:
    """The smallest kept share among the LLMs that keep less than they require; 1 if none keeps less."""
    kept_fracs = [1.0]
    for problem, counts in zip(problems, fleets, strict=True):
        if scenario_count := len(problem.oracle.scenarios):
            kept_frac = 1 - problem.oracle.missed_count(counts, scenario_count) / scenario_count
            if kept_frac < _required_frac(problem) - ROUNDING:
                kept_fracs.append(kept_frac)
    return min(kept_fracs)
