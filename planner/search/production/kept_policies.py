"""Chooses the policies of the production fleet if policies are raced (`policies: any`).

The policies that are cheapest on paper may be dearer in production, and policies that save nothing on paper
may save there. So production is planned with the best policies on paper and with those that were searched
first. Then all are raced again: fleets that are near the best one and cost less are simulated with each
policy, in the search's scenarios. A fleet counts as cheaper once it has passed its test. Without a race
production is planned with the best policies on paper, and with pinned prefixes where they are a choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.documents import facts
from planner.domain import ROUNDING
from planner.errors import InfeasibleError
from planner.fleet import Fleet, Policies
from planner.search.mixed.best_fleet import FleetSearch, PolicySearch, best_of, find_best_fleet
from planner.search.mixed.policy_race import (
    RacedPolicy,
    cheapest_first,
    gains_of,
    label_of,
    race_near_best,
    race_on_fleets,
    with_usual_queue,
)
from planner.search.oracle.fleet_counts import Counts, as_many_at_this_price, counts_of, objective_of
from planner.search.oracle.work_clock import StoppedError
from planner.search.problem.plan_problem import Problem, with_policies, with_search_scenarios
from planner.search.production.cheapest_kept import LEAST_SEARCH_REQUESTS, fill_limits
from planner.search.production.production_fleet import find_production_fleet
from planner.search.production.scale_model import FULL_REQUESTS
from planner.search.production.scenario_test import FleetTrial
from planner.search.production.three_answers import Production, production_or_paper, with_answers

# After the race production is searched with at most this many policies, the most promising first. Each such
# search takes about as long as the first one. Both numbers are set by hand.
MOST_SEARCHED = 2
RACE_EFFORTS = 2  # The race may simulate this many times the requests of the search on paper.


@dataclass(frozen=True, slots=True, eq=False)
class _PassedFleet:
    """A fleet that passed its test, and the search on paper whose policies it has."""

    problem: Problem
    paper: FleetSearch
    trial: FleetTrial

    @property
    def value(self) -> float:
        return objective_of(self.trial.best)


def production_of_policies(searched: Sequence[PolicySearch]) -> tuple[list[PolicySearch], Production | None]:
    """The searches on paper, and the three answers with the policies of `choose_policies`."""
    searched, trial = choose_policies(searched)
    problem, paper = best_of(searched)
    if trial is None:
        return searched, production_or_paper(problem, paper)
    return searched, with_answers(problem, paper, trial)


def choose_policies(searched: Sequence[PolicySearch]) -> tuple[list[PolicySearch], FleetTrial | None]:
    """The searches on paper, with the policies for which production costs least as the best of them, and the
    trial of that production; the searches as they are and no trial where there is no choice, or no fleet
    that passes its test.

    The search with these policies comes first. The certificate lists the other searches as alternatives.
    Searches that found a cheaper fleet on paper are left out: a reader would take them for better plans.
    """
    searched = list(searched)
    chosen, paper = best_of(searched)
    if not chosen.task.policies.raced_changes:
        return _choose_pins(searched)
    best = _plan_and_test(PolicySearch(chosen, paper)) or _plan_with_others(searched)
    if best is None:
        return searched, None
    best = _cheaper_with_first_policies(searched, best)
    gain_facts: list[facts.PolicyGains | facts.PoliciesRaced] = []
    problem = best.problem
    raced, left_out = _race_in_scenarios(best, RACE_EFFORTS * problem.oracle.effort())
    # A policy gains if it found a cheaper fleet in the race; otherwise it has no `best`.
    gains = cheapest_first(raced)
    for gain in gains[:MOST_SEARCHED]:
        other = _search_with_gain(best.problem, best.paper, gain)
        tested = None if other is None else _plan_and_test(other, below_value=best.value)
        if tested is not None and tested.value < best.value * (1 - ROUNDING):
            with_gain = replace(gain, best=tested.trial.best)
            gain_facts += gains_of(problem, best.trial.best, [with_gain], "production")
            best = tested
            break
    best = _with_usual_queue(best, searched)
    adopted = best.problem.oracle.policies
    saves_nothing = tuple(
        label_of(problem, raced_policy.policies)
        for raced_policy in raced
        if raced_policy.best is None and raced_policy.is_simulated and raced_policy.policies != adopted
    )
    rivals = tuple(label_of(problem, gain.policies) for gain in gains if gain.policies != adopted)
    refused = (label_of(problem, policy.policies) for policy in raced if not policy.is_simulated)
    not_raced = (*refused, *left_out)
    gain_facts.append(facts.PoliciesRaced(saves_nothing, rivals, not_raced, "production"))
    best_search = replace(best.paper, race_facts=(*paper.race_facts, *gain_facts))
    return _put_first(PolicySearch(best.problem, best_search), searched), best.trial


def put_policies_of_fleet_first(searched: Sequence[PolicySearch], fleet: Fleet) -> list[PolicySearch]:
    """The searches, the one with the policies of `fleet` first. If a race chose these policies, they have no
    search yet, so it is made here. Searches that found a cheaper fleet on paper, or one that would be
    preferred at the same price, are left out.
    """
    chosen, paper = best_of(searched)
    own = _search_with(fleet.policies, searched)
    if own is None and chosen.task.policies.raced_changes:
        other = with_policies(chosen, fleet.policies)
        own = _search_from(paper, other, counts_of(fleet, paper.level0.options))
    return list(searched) if own is None else _put_first(own, searched)


def _search_with(policies: Policies, searched: Sequence[PolicySearch]) -> PolicySearch | None:
    """The search with these policies, if there is one."""
    return next((search for search in searched if search.problem.oracle.policies == policies), None)


def _put_first(first: PolicySearch, searched: Sequence[PolicySearch]) -> list[PolicySearch]:
    """The search `first`, then those with other policies that found no cheaper fleet on paper."""
    others = [
        other for other in searched if other.problem is not first.problem and best_of([first, other]) is first
    ]
    return [first, *others]


def _choose_pins(searched: list[PolicySearch]) -> tuple[list[PolicySearch], FleetTrial | None]:
    """Like `choose_policies`, of the best policies on paper, others that cost as little on paper, and pinned
    prefixes.

    Pinned prefixes are never evicted, so they are worth most in bursts, which empty other caches. Scenarios
    have more bursts than the traffic as written. So pinning may pay in production although it does not on
    paper.
    """
    chosen, paper = best_of(searched)
    pinned = [search for search in searched if search.problem.oracle.pinning is not None]
    others = [
        search
        for search in searched
        if search.problem is not chosen
        and search.problem.oracle.pinning is None
        and search.result.value <= paper.value * search.problem.same_value_factor
    ][:MOST_SEARCHED]
    if pinned and chosen.oracle.pinning is None:
        others.append(best_of(pinned))
    if not others:
        return searched, None
    best = _plan_and_test(PolicySearch(chosen, paper))
    for candidate in others:
        chosen.progress(f"production with {label_of(chosen, candidate.problem.oracle.policies)}")
        other = _plan_and_test(candidate, below_value=None if best is None else best.value)
        if other is not None and (best is None or other.value < best.value * (1 - ROUNDING)):
            best = other
    if best is None:
        return searched, None
    return _put_first(PolicySearch(best.problem, best.paper), searched), best.trial


def _plan_and_test(searched: PolicySearch, *, below_value: float | None = None) -> _PassedFleet | None:
    """Production with these policies; None if there is none below `below_value`, or if it fails its test."""
    problem, paper = searched
    if below_value is not None and paper.value >= below_value * (1 - ROUNDING):
        return None  # Production never costs less than the fleet on paper.
    try:
        trial = find_production_fleet(problem, paper)
    except InfeasibleError:
        return None
    if trial is None or not trial.is_passed:
        return None
    return _PassedFleet(problem, paper, trial)


def _plan_with_others(searched: Sequence[PolicySearch]) -> _PassedFleet | None:
    """Production with other policies, if the best policies on paper have none within the limits: with other
    policies that were searched, or else with the winners of a race in the search's scenarios. The race
    simulates fleets that fill the limits.
    """
    chosen, paper = best_of(searched)
    tested = [_plan_and_test(other) for other in searched if other.problem is not chosen]
    if passed := [fleet for fleet in tested if fleet is not None]:
        return min(passed, key=lambda fleet: fleet.value)
    if len(chosen.trace) > FULL_REQUESTS:  # Scenarios of this many requests take too long.
        return None
    effort = max(RACE_EFFORTS * chosen.oracle.effort(), LEAST_SEARCH_REQUESTS)
    near = list(dict.fromkeys(fill_limits(chosen, paper.best, k) for k in range(len(paper.best))))
    try:
        scenario_problem = with_search_scenarios(chosen)
        race = race_on_fleets(scenario_problem, near, chosen.task.policies.raced_changes, effort)
    except StoppedError:  # The time was over.
        return None
    gains = cheapest_first(race.raced)
    for gain in gains[:MOST_SEARCHED]:
        other = _search_with_gain(chosen, paper, gain)
        if other is not None and (best := _plan_and_test(other)) is not None:
            return best
    return None


def _cheaper_with_first_policies(searched: Sequence[PolicySearch], best: _PassedFleet) -> _PassedFleet:
    """Production with the policies that were searched first on paper, if that is cheaper; otherwise `best`,
    which has the best policies on paper.
    """
    first = searched[0]
    if first.problem is best.problem:
        return best
    other = _plan_and_test(first, below_value=best.value)
    return best if other is None or other.value >= best.value * (1 - ROUNDING) else other


def _with_usual_queue(production: _PassedFleet, searched: Sequence[PolicySearch]) -> _PassedFleet:
    """Production with the queue that engines have by default, if it costs no more; otherwise `production`."""
    usual = with_usual_queue(production.problem)
    if usual is None:
        return production
    best, oracle = production.trial.best, with_search_scenarios(usual).oracle
    try:
        fleets = [fleet for fleet in (best, as_many_at_this_price(best)) if usual.allows(fleet)]
        counts = next((fleet for fleet in fleets if oracle.holds(fleet)), None)
    except StoppedError:
        return production
    if counts is None:
        return production
    known = _search_with(usual.oracle.policies, searched)
    usual_searched = known or _search_from(production.paper, usual, counts)
    tested = None if usual_searched is None else _plan_and_test(usual_searched)
    if tested is None or tested.value > production.value * usual.same_value_factor:
        return production
    return tested


def _race_in_scenarios(best: _PassedFleet, effort: float) -> tuple[list[RacedPolicy], tuple[str, ...]]:
    """The result of the race with every change of policies near the production fleet, and the policies that
    were not raced, in words.
    """
    problem = best.problem
    if best.trial.searched_problem.oracle.downscale > 1:
        return [], ("the others, as the question is large",)
    scenario_problem = with_search_scenarios(problem)
    most_requests = max(effort, LEAST_SEARCH_REQUESTS)
    changes = problem.task.policies.raced_changes
    try:
        race = race_near_best(scenario_problem, best.trial.best, best.paper.level0, changes, most_requests)
    except StoppedError:
        return [], ("the others, as the time was over",)
    return race.raced, tuple(label_of(problem, policies) for policies in race.without_effort)


def _search_with_gain(problem: Problem, paper: FleetSearch, gain: RacedPolicy) -> PolicySearch | None:
    """The search on paper with policies that gained in the race; None if no fleet holds on paper."""
    return _search_from(paper, with_policies(problem, gain.policies), gain.best)


def _search_from(paper: FleetSearch, other: Problem, best: Counts | None) -> PolicySearch | None:
    """The search on paper under other policies, which begins with the fleet on paper and with `best`."""
    start = [other.oracle.fleet(paper.best), *([] if best is None else [other.oracle.fleet(best)])]
    try:
        return PolicySearch(other, find_best_fleet(other, start, walks=False))
    except InfeasibleError:
        return None
