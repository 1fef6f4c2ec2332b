"""Finds the largest share of scenarios in which all of several LLMs can keep their SLOs at once, where the
limits do not allow the shares that they require (`safety: kept_in`).

The fleets on paper fit the limits together, and each keeps its SLO in some share of its scenarios. The search
bisects between the share that all of them keep and the largest that an LLM requires. To try a share it gives
the LLMs fleets one after another: each gets a fleet of one worker type per pool from what those before it
leave of the limits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from planner.documents.safety import strictest_safety
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
from planner.units import in_unit, show_amount


@dataclass(frozen=True, slots=True, eq=False)
class CommonShare:
    """A share of scenarios, `kept_frac`, and `fleets` that keep it: one for each LLM's problem.

    An LLM that requires a smaller share only has to keep that share, and an LLM without safety only its SLO
    in the traffic as written. `is_on_paper`: the fleets are those on paper, because no better ones were
    found. All fleets together must fit the `limits`.
    """

    problems: Sequence[Problem]
    fleets: Sequence[Counts]
    kept_frac: float
    limits: FleetLimits
    is_on_paper: bool = False

    @property
    def value(self) -> float:
        """The sum of the fleets' objectives, in the unit of the objective."""
        return _value(self.problems, self.fleets)

    def most_kept(self, on_paper: Sequence[Counts]) -> MostKept | None:
        """The facts for the error that the LLMs do not fit: the share, what it costs, and what the fleets
        `on_paper` cost. None if no better fleets than `on_paper` were found.
        """
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
            # The text leaves their share out: the answer on paper states one, counted on other scenarios.
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
            f"{show_amount(self.limits.used(limit, workers), limit.unit)} of "
            f"{in_unit(amount, limit.unit)} ({limit.name})"
            for limit, amount in self.limits.rows()
        )

    @property
    def relaxation(self) -> str:
        """The line `safety: ...` of slo.yaml with which these fleets would be enough."""
        return strictest_safety(self.kept_frac)


def find_common_share(
    problems: Sequence[Problem],
    on_paper: Sequence[Counts],
    limits: FleetLimits,
    out_of_time: Callable[[], bool],
) -> CommonShare:
    """The largest share found before `out_of_time`, with fleets that keep it.

    `on_paper` are the fleets on paper, which fit the `limits` together. Raises StoppedError if the time is
    over before their share is known.
    """
    # The bisection is over numbers of kept scenarios, for the LLM that has most scenarios.
    scenario_count = max(len(problem.oracle.scenarios) for problem in problems)
    best = CommonShare(problems, on_paper, _kept_frac(problems, on_paper), limits, is_on_paper=True)
    kept_count = _floor(best.kept_frac * scenario_count)
    too_many = _floor(max(map(_required_frac, problems)) * scenario_count) + 1  # More than any LLM requires.
    while too_many - kept_count > 1 and not out_of_time():
        middle = (kept_count + too_many) // 2
        fleets = _find_fleets_for_share(problems, limits, middle / scenario_count, out_of_time)
        kept_frac = None if fleets is None else in_time(partial(_kept_frac, problems, fleets), None)
        if fleets is None or kept_frac is None:
            too_many = middle  # No fleets were found; or the time is over, and the loop ends anyway.
            continue
        # The fleets keep at least `middle` scenarios, so a smaller count comes from rounding.
        kept_count = max(middle, _floor(kept_frac * scenario_count))
        best = CommonShare(problems, fleets, kept_frac, limits)
    return best


def _value(problems: Sequence[Problem], fleets: Sequence[Counts]) -> float:
    """The sum of the fleets' objectives, without the amounts that only break ties (`objective_paid`)."""
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

    def find_fleet(k: int, remaining: FleetLimits) -> Counts | None:
        """A fleet of the k-th LLM within what the others leave; None if none was found."""
        if out_of_time():
            return None
        problem = problem_within(problems[k], remaining)
        scenarios = problem.oracle.scenarios
        most_missed = _floor((1 - min(kept_frac, _required_frac(problem))) * len(scenarios))
        # The bisection repeats this search, so each gets the smallest limit on simulated requests.
        limited = with_search_limit(with_scenarios(problem, scenarios, most_missed), LEAST_SEARCH_REQUESTS)
        fleet = find_fleet_quickly(limited, start=[], is_mixed=False)
        # Owned workers take the place of rented ones of the same type. This changes no latency, but it does
        # change what is left of the limits for the next LLM.
        return None if fleet is None else owned_first(problem, fleet)

    return serve_in_turn(len(problems), limits, find_fleet)


def _kept_frac(problems: Sequence[Problem], fleets: Sequence[Counts]) -> float:
    """The smallest kept share among the LLMs that keep less than they require; 1 if none keeps less.

    Raises StoppedError if the time is over before all scenarios are simulated.
    """
    kept_fracs = [1.0]
    for problem, counts in zip(problems, fleets, strict=True):
        if scenario_count := len(problem.oracle.scenarios):  # An LLM without safety has no scenarios.
            missed = problem.oracle.missed_count(counts, scenario_count)  # All are simulated and counted.
            kept_frac = 1 - missed / scenario_count
            if kept_frac < _required_frac(problem) - ROUNDING:
                kept_fracs.append(kept_frac)
    return min(kept_fracs)
