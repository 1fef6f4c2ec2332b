"""Searches the best fleet under each choice of policies; with `policies: any` all other policies are raced.

Each choice of policies that the question names has a search of its own, from the best fleets of the searches
before it. For all other policies there is a race (policy_race.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from planner.documents.policy_choices import name_policies
from planner.errors import InfeasibleError, InputError
from planner.fleet import Fleet, Policies
from planner.search.level0.level0_search import likely_fleet
from planner.search.level0.one_pool import Level0Search
from planner.search.mixed.agents_reach import find_reachable_fleet
from planner.search.mixed.best_fleet import (
    FleetSearch,
    NoFleet,
    PolicySearch,
    best_of,
    find_best_fleet,
    search_or_explain,
)
from planner.search.mixed.policy_race import (
    MOST_ROUNDS,
    cheapest_first,
    label_of,
    near_fleets,
    race_on_fleets,
    race_policies,
)
from planner.search.mixed.polished_pins import polish_pins
from planner.search.mixed.router_fit import fit_router, fit_router_before_search, fit_router_if_near
from planner.search.oracle.fleet_counts import Counts, add_workers, counts_of_each, objective_of, options_of
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.work_clock import StoppedError
from planner.search.problem.idle_limits import requests_to_judge, unreachable_limits
from planner.search.problem.plan_problem import Problem, with_policies
from planner.search.problem.reasons import reason_text
from planner.traffic.trace import Trace

# If no fleet within the limits holds, at most this many of the largest ones are raced. Set by hand.
MOST_CUT = 8


def search_policies(
    problem: Problem, start: Sequence[Fleet] = (), *, prove: bool = False, walks: bool = True
) -> list[PolicySearch]:
    """The search under each choice of policies of the question, for those that have a fleet.

    The SLO must be kept on all of `problem.draws` (the traffic drawn anew, or at other rates), but most draws
    rule out no fleet. So a search begins without them. If its best fleet fails on a draw, that draw is added
    and the search begins again. Fewer draws demand less, so if the best fleet then holds on all draws, it is
    the best with all draws.

    `start` are fleets to begin with; `prove` and `walks` are those of `find_best_fleet`. Raises
    InfeasibleError if no choice has a fleet.
    """
    while True:
        searches = _search_each_choice(problem, start, prove=prove, walks=walks)
        chosen, results = best_of(searches)
        failed = (draw for draw in problem.draws if not _holds_on(chosen.oracle, results.best, draw))
        first_failed = next(failed, None)
        if first_failed is None:
            return searches
        draws = (*problem.oracle.draws, first_failed)
        problem.progress(
            f"the best fleet fails on another draw or rate of the traffic; now with {len(draws)} more"
        )
        problem = replace(problem, oracle=replace(problem.oracle, draws=draws))


def _holds_on(oracle: Oracle, best: Counts, draw: Trace) -> bool:
    """Whether the best fleet holds on a draw of the traffic."""
    # The oracle has simulated the best fleet on its own draws, and it held.
    is_known = any(draw is own_draw for own_draw in oracle.draws)
    return is_known or replace(oracle, trace=draw, draws=()).holds(best)


def simulated_choices(problem: Problem) -> tuple[Policies, ...]:
    """The choices of policies that are searched. Raises InputError for one with which no worker type of the
    question is simulated.
    """
    choices = problem.task.policy_choices()
    if _needs_caches(problem):
        choices = tuple(policies for policies in choices if policies.prefix_cache)
    for policies in choices:
        policy_problem = with_policies(problem, policies)
        if not policy_problem.options() and (left_out := policy_problem.options_not_simulated()):
            raise InputError(reason_text(left_out[0].because))
    return choices


def _search_each_choice(
    problem: Problem, start: Sequence[Fleet], *, prove: bool, walks: bool
) -> list[PolicySearch]:
    """A search for each choice of policies, and the race. Each search begins with the best fleets of the
    searches before it, those within the budgets and those without.
    """
    searches: list[PolicySearch] = []
    failures: list[tuple[Problem, NoFleet]] = []
    unlimited_best: list[Fleet] = []
    choices = simulated_choices(problem)
    for policies in choices:
        policy_problem = with_policies(problem, policies)
        if policies.prefix_cache:
            best_so_far = best_of(searches).result.best if searches else None
            try:
                policy_problem, start = _with_fitted_router(policy_problem, best_so_far, start)
            except InfeasibleError as error:
                failures.append(
                    (
                        policy_problem,
                        NoFleet(error, Level0Search(problem.limits), is_every_mix_simulated=False),
                    )
                )
                continue
        if len(choices) > 1:
            problem.progress(name_policies(policies, choices))
        known_best = [
            search.result.best
            for search in searches
            if policy_problem.can_simulate(options_of(search.result.best))
        ]
        start_fleets = [*start, *map(policy_problem.oracle.fleet, known_best), *unlimited_best]
        result, unlimited = search_or_explain(policy_problem, start_fleets, prove=prove, walks=walks)
        # The best fleet beyond the budgets, if one is known, is still a start for the next choices.
        if unlimited is not None:
            unlimited_best.append(unlimited)
        if isinstance(result, NoFleet):
            failures.append((policy_problem, result))
            continue
        # These policies pin prefixes to workers (search/prefixes/pinning.py).
        if policy_problem.oracle.pinning is not None:
            result = polish_pins(
                policy_problem, result, partial(find_best_fleet, policy_problem, prove=prove, walks=walks)
            )
        searches += [PolicySearch(policy_problem, result), *_with_refitted_router(policy_problem, result)]
    if not searches:
        searches = _race_within_limits(problem, failures, start)
    if not searches:
        raise _no_fleet_error(problem, [failure.error for _, failure in failures])
    return race_policies(problem, _as_sure_as_all(searches, [failure for _, failure in failures]))


def _needs_caches(problem: Problem) -> bool:
    """Whether the question offers prefix caches, and without them some requests would miss the SLO even
    alone on an idle worker.
    """
    if problem.hits is None:
        return False
    return bool(unreachable_limits(problem.slo, problem.types, requests_to_judge(problem.slo, problem.trace)))


def _with_fitted_router(
    problem: Problem, best_so_far: Counts | None, start: Sequence[Fleet]
) -> tuple[Problem, Sequence[Fleet]]:
    """The problem with its router fitted to the best fleet so far, or to a fleet of a likely size while none
    is known that keeps the SLO; and the fleets to start from.

    A router whose settings do not suit the prefixes may send all requests to one worker, and then no number
    of workers keeps the SLO. Raises InfeasibleError if the traffic is of described agents, and no fleet keeps
    the SLO even with fitted settings (agents_reach.py).
    """
    if best_so_far is not None and problem.can_simulate(options_of(best_so_far)):
        return with_policies(problem, fit_router(problem.oracle, best_so_far)), start
    likely = likely_fleet(problem)
    if likely is None:
        return problem, start
    policies, kept = fit_router_before_search(problem.oracle, likely)
    problem = with_policies(problem, policies)
    if kept is None and not start and problem.task.is_of_agents:
        reachable = find_reachable_fleet(problem)
        if reachable is not None:
            problem, kept = reachable
            start = [problem.oracle.fleet(kept)]
    return problem, start


def _with_refitted_router(problem: Problem, result: FleetSearch) -> list[PolicySearch]:
    """Searches after the one with this `result`, with the router's settings fitted anew: each time to a fleet
    that costs less than the best one of the search before, and that keeps the SLO with these settings alone.

    The settings that suit one fleet may let all requests with one prefix wait for the same worker of another
    fleet, so a search with one fit overlooks fleets that a second fit would keep.
    """
    searches: list[PolicySearch] = []
    if not problem.oracle.policies.prefix_cache:
        return searches
    for _ in range(MOST_ROUNDS):
        try:
            for counts in sorted(near_fleets(problem, result.best, result.level0), key=objective_of):
                policies = fit_router_if_near(problem.oracle, counts)
                if policies is not None:
                    break
            else:
                return searches
            problem = with_policies(problem, policies)
            result = find_best_fleet(problem, [problem.oracle.fleet(counts)], walks=False)
        except (InfeasibleError, StoppedError):  # The time is over.
            return searches
        searches.append(PolicySearch(problem, result))
    return searches


def _as_sure_as_all(searches: Sequence[PolicySearch], failures: Sequence[NoFleet]) -> list[PolicySearch]:
    """The searches, changed in place so that none claims more than all searches together have proved.

    Searches without a fleet (`failures`) count too: if such a search was cut short, a cheaper fleet may hold
    with its policies.
    """
    results: list[FleetSearch | NoFleet] = [*failures, *(search.result for search in searches)]
    is_every_mix_simulated = all(result.is_every_mix_simulated for result in results)
    for search in searches:
        level0_search = search.result.level0.search
        for failure in failures:
            level0_search.assumed |= failure.level0_search.assumed
            level0_search.is_exact &= failure.level0_search.is_exact
            level0_search.is_exhausted &= failure.level0_search.is_exhausted
    return [
        search._replace(result=replace(search.result, is_every_mix_simulated=is_every_mix_simulated))
        for search in searches
    ]


def _race_within_limits(
    problem: Problem, failures: Sequence[tuple[Problem, NoFleet]], start: Sequence[Fleet]
) -> list[PolicySearch]:
    """Race the other policies, if no fleet within the limits holds with those that were searched. Returns a
    search with the policy under which the cheapest fleet holds; nothing if there is none.

    The race simulates the fleets of `start`, and the fleets that hold beyond the limits (`NoFleet.wider`)
    without as many workers as exceed the limits. All races together may take as much effort (simulated
    requests) as the searches that failed.
    """
    options = problem.options()
    start_counts = list(filter(problem.allows, counts_of_each(start, options)))
    remaining_effort = float(sum(policy_problem.oracle.effort() for policy_problem, _ in failures))
    for chosen, failure in failures:
        wider = counts_of_each(failure.wider, options)
        cut = (fleet for counts in wider for fleet in _cut_to_limits(problem, counts))
        near = list(dict.fromkeys((*start_counts, *cut)))
        race = race_on_fleets(chosen, near, chosen.task.policies.raced_changes, remaining_effort)
        remaining_effort -= race.effort
        winners = cheapest_first(race.raced)
        if not winners:
            continue
        assert winners[0].best is not None
        with_winner = with_policies(chosen, winners[0].policies)
        problem.progress(f"policies: {label_of(chosen, winners[0].policies)}")
        result, _ = search_or_explain(with_winner, [with_winner.oracle.fleet(winners[0].best)], walks=False)
        if isinstance(result, FleetSearch):
            return [PolicySearch(with_winner, result)]
    return []


def _cut_to_limits(problem: Problem, wider: Counts) -> list[Counts]:
    """The largest fleets within the limits that remain if workers are taken away from a fleet beyond them;
    at most MOST_CUT.
    """
    larger, within = [wider], list[Counts]()
    while larger and not within:
        # One worker fewer in one pool, but no pool less.
        smaller = dict.fromkeys(
            add_workers(counts, -1, [k]) for counts in larger for k, (_, n) in enumerate(counts) if n > 1
        )
        within = [counts for counts in smaller if problem.allows(counts)]
        larger = list(smaller)[:MOST_CUT]
    return within[:MOST_CUT]


def _no_fleet_error(problem: Problem, errors: Sequence[InfeasibleError]) -> InfeasibleError:
    """The error if no choice of policies has a fleet. It is proved if a bound shows that no policies have
    one, or if the search with each choice proves it and no other policies were merely raced.
    """
    first = next((error for error in errors if not error.is_proved), errors[0])
    is_proved_by_bound = problem.bound is None
    if is_proved_by_bound or not first.is_proved or not problem.task.policies.raced_changes:
        return first
    return InfeasibleError(
        f"with the policies that were searched: {first}; with others at most the largest fleets near the "
        "limits were simulated, which miss it: name a policy under policies to have it searched",
        kind=first.kind,
        constraint=first.constraints,
        relaxation=first.relaxation,
        ways=first.ways,
        is_proved=False,
    )
