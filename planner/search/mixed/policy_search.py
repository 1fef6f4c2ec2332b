"""Searches the best fleet under each choice of policies; with `policies: any` all other policies are raced.

Each choice of policies that the question names has a search of its own. For all other policies searches would
cost too much, so they are raced in rounds. In a round, fleets that are near the best one and cost less are
simulated with each of these policies. The policy that saves most then has a search of its own, and the next
round changes one more policy, until no change saves anything. That a race overlooks nothing is an assumption
of the certificate (level0/pruning_rules.py, POLICY_RACE).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from planner.documents import facts
from planner.documents.policy_choices import PolicyChange, name_policies
from planner.domain import ROUNDING
from planner.errors import InfeasibleError, InputError
from planner.fleet import Fleet, Policies
from planner.search.level0 import pruning_rules
from planner.search.level0.level0_search import Level0, likely_fleet
from planner.search.level0.one_pool import Search
from planner.search.mixed.agents_reach import find_reachable_fleet
from planner.search.mixed.best_fleet import (
    FleetSearch,
    NoFleet,
    PolicySearch,
    best_of,
    find_best_fleet,
    search_or_explain,
)
from planner.search.mixed.polished_pins import polish_pins
from planner.search.mixed.router_fit import fit_router, fit_router_before_search, fit_router_if_near
from planner.search.oracle.deterministic_parallel import run_each
from planner.search.oracle.fleet_counts import (
    Counts,
    add_workers,
    as_many_at_this_price,
    counts_of,
    has_whole_pairs,
    largest_below,
    names_of,
    objective_of,
)
from planner.search.oracle.fleet_oracle import Oracle, without_needless_workers
from planner.search.oracle.work_clock import StoppedError
from planner.search.problem.idle_limits import requests_to_judge, unreachable_limits
from planner.search.problem.options import OBJECTIVE_UNITS, PRICE_TIES
from planner.search.problem.owned_first import objective_paid
from planner.search.problem.plan_problem import Problem, with_policies
from planner.simulator.policy_checks import check_policies
from planner.traffic.trace import Trace

# These limits bound the time of a race, and are set by hand. Besides, once a race has spent the effort of the
# searches before it (simulated requests), it begins no further wave.
MOST_ROUNDS = 4  # A race adopts at most this many policies, one per round.
NEAR_TYPES = 3  # Fleets of at most this many other worker types are raced (`near_fleets`).
MOST_CUT = 8  # If no fleet within the limits holds, at most this many of the largest ones are raced.
RACED_AT_ONCE = 8  # This many policies are raced before the effort is compared with its limit.


def search_policies(
    problem: Problem, start: Sequence[Fleet] = (), *, prove: bool = False, walks: bool = True
) -> list[PolicySearch]:
    """The search under each choice of policies of the question, for those that have a fleet.

    The SLO must be kept on all of `problem.draws`, but most draws rule out no fleet. So a search begins
    without them. If its best fleet fails on a draw, that draw is added and the search begins again. Fewer
    draws demand less, so if the best fleet then holds on all draws, it is the best with all draws. `start`
    are fleets to begin with; `prove` and `walks` are those of `find_best_fleet`. Raises InfeasibleError if no
    choice has a fleet.
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


def _search_each_choice(
    problem: Problem, start: Sequence[Fleet], *, prove: bool, walks: bool
) -> list[PolicySearch]:
    """A search for each choice of policies, and the race. Each search begins with the best fleets of the
    searches before it, those within the budgets and those without.
    """
    searches: list[PolicySearch] = []
    failures: list[tuple[Problem, NoFleet]] = []
    unlimited_best: list[Fleet] = []
    choices = problem.task.policy_choices()
    if _needs_caches(problem):
        choices = tuple(policies for policies in choices if policies.prefix_cache)
    for policies in choices:
        policy_problem = with_policies(problem, policies)
        best_counts = best_of(searches)[1].best if searches else None
        if best_counts is not None and not policy_problem.can_route(*dict(best_counts)):
            best_counts = None
        if policies.prefix_cache and best_counts is not None:
            # The router's settings are fitted to the best fleet so far.
            policy_problem = with_policies(problem, fit_router(policy_problem.oracle, best_counts))
        elif policies.prefix_cache:
            try:
                policy_problem, start = _with_fitted_router(policy_problem, start)
            except InfeasibleError as error:
                failures.append(
                    (policy_problem, NoFleet(error, Search(problem.limits), is_every_mix_simulated=False))
                )
                continue
        if len(choices) > 1:
            problem.progress(name_policies(policies, choices))
        known_best = [result.best for _, result in searches if policy_problem.can_route(*dict(result.best))]
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
        searches += [(policy_problem, result), *_with_refitted_router(policy_problem, result)]
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


def _as_sure_as_all(searches: Sequence[PolicySearch], failures: Sequence[NoFleet]) -> list[PolicySearch]:
    """The searches, changed so that none claims more than all searches together have proved.

    Searches without a fleet (`failures`) count too: if such a search was cut short, a cheaper fleet may hold
    with its policies.
    """
    results: list[FleetSearch | NoFleet] = [*failures, *(result for _, result in searches)]
    is_every_mix_simulated = all(result.is_every_mix_simulated for result in results)
    for _, result in searches:
        search = result.level0.search
        for failure in failures:
            search.assumed |= failure.level0_search.assumed
            search.is_exact &= failure.level0_search.is_exact
            search.is_exhausted &= failure.level0_search.is_exhausted
    return [
        (problem, replace(result, is_every_mix_simulated=is_every_mix_simulated))
        for problem, result in searches
    ]


def _race_within_limits(
    problem: Problem, failures: Sequence[tuple[Problem, NoFleet]], start: Sequence[Fleet]
) -> list[PolicySearch]:
    """Race the other policies, if no fleet within the limits holds with those that were searched. Returns a
    search with the policy under which the cheapest fleet holds; nothing if there is none.

    The race simulates the fleets of `start`, and the fleets that hold beyond the limits (`NoFleet.wider`)
    without as many workers as exceed the limits.
    """
    options = problem.options()
    start_counts = [
        counts for fleet in start if (counts := counts_of(fleet, options)) and problem.allows(counts)
    ]
    effort = float(sum(each.oracle.effort() for each, _ in failures))
    for chosen, failure in failures:
        wider = [counts for fleet in failure.wider if (counts := counts_of(fleet, options))]
        cut = (fleet for counts in wider for fleet in _cut_to_limits(problem, counts))
        near = list(dict.fromkeys((*start_counts, *cut)))
        race = race_near(chosen, near, chosen.task.policies.raced_changes, effort)
        effort -= race.effort
        gains = cheapest_first(race.raced)
        if not gains:
            continue
        assert gains[0].best is not None
        with_winner = with_policies(chosen, gains[0].policies)
        problem.progress(f"policies: {label_of(chosen, gains[0].policies)}")
        result, _ = search_or_explain(with_winner, [with_winner.oracle.fleet(gains[0].best)], walks=False)
        if isinstance(result, FleetSearch):
            return [(with_winner, result)]
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
    if not (first.is_proved and problem.task.policies.raced_changes) or problem.lower is None:
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


def _with_fitted_router(problem: Problem, start: Sequence[Fleet]) -> tuple[Problem, Sequence[Fleet]]:
    """The problem with its router fitted to a fleet of a likely size, because no fleet is known yet that
    keeps the SLO; and the fleets to start from.

    A router whose settings do not suit the prefixes may send all requests to one worker, and then no number
    of workers keeps the SLO. Raises InfeasibleError if the traffic is of described agents, and no fleet keeps
    the SLO even with fitted settings (agents_reach.py).
    """
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


def _with_refitted_router(problem: Problem, found: FleetSearch) -> list[PolicySearch]:
    """Searches with the router's settings fitted anew, each to a fleet that costs less than the best one of
    the search before it, and that keeps the SLO with these settings alone.

    The settings that suit one fleet may let all requests with one prefix wait for the same worker of another
    fleet, so a search with one fit overlooks fleets that a second fit would keep.
    """
    searches: list[PolicySearch] = []
    for _ in range(MOST_ROUNDS if problem.oracle.policies.prefix_cache else 0):
        cheaper = sorted(near_fleets(problem, found.best, found.level0), key=objective_of)
        try:
            fits = ((fit_router_if_near(problem.oracle, counts), counts) for counts in cheaper)
            fitted = next(((policies, counts) for policies, counts in fits if policies is not None), None)
            if fitted is None:
                break
            policies, counts = fitted
            problem = with_policies(problem, policies)
            found = find_best_fleet(problem, [problem.oracle.fleet(counts)], walks=False)
        except (InfeasibleError, StoppedError):  # The time is over.
            break
        searches.append((problem, found))
    return searches


def with_usual_queue(problem: Problem) -> Problem | None:
    """The same question with the engines' default queue. None if the problem has that queue already, or if
    it is not among the raced ones.
    """
    task, policies = problem.task, problem.oracle.policies
    change = PolicyChange("queue", Policies().queue)
    if policies.queue == change.value or change not in task.policies.raced_changes:
        return None
    usual = task.changed_policies(policies, change)
    return None if usual is None else with_policies(problem, usual)


def _search_if_best_holds(problem: Problem, best: Counts) -> FleetSearch | None:
    """The search with this problem's policies if `best`, the best fleet under other policies, holds with
    these too: as it is, or with more workers on idle GPUs of its paid nodes. None if neither holds.
    """
    try:
        for counts in dict.fromkeys((best, as_many_at_this_price(best))):
            if problem.allows(counts) and problem.oracle.holds(counts):
                return find_best_fleet(problem, [problem.oracle.fleet(counts)], walks=False)
    except (InfeasibleError, StoppedError):  # The time was over.
        pass
    return None


# -- the race ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RacedPolicy:
    """Policies that were raced, and the `change` by which they differ from the best ones so far. `best` is
    the cheapest fleet that holds with these policies, among those near the best one that cost less; None if
    none holds. `is_simulated` is False if the simulator refuses these policies for such a fleet.
    """

    change: PolicyChange
    policies: Policies
    best: Counts | None
    is_simulated: bool = True

    @property
    def value(self) -> float:
        """The objective of the cheapest fleet that holds; infinite if none does."""
        return math.inf if self.best is None else objective_of(self.best)


class PolicyRace(NamedTuple):
    """The policies that were raced, those for which no effort was left, and the effort spent [simulated
    requests].
    """

    raced: list[RacedPolicy]
    without_effort: list[Policies]
    effort: float


def cheapest_first(raced: Iterable[RacedPolicy]) -> list[RacedPolicy]:
    """The raced policies with which some fleet holds, the one with the cheapest fleet first."""
    return sorted((policy for policy in raced if policy.best is not None), key=lambda policy: policy.value)


def race_policies(problem: Problem, searches: Sequence[PolicySearch]) -> list[PolicySearch]:
    """The searches, and one more for each policy that won a round of the race."""
    changes, searches = list(problem.task.policies.raced_changes), list(searches)
    if not changes:
        return searches
    gain_facts: list[facts.PolicyGains | facts.PoliciesRaced] = []
    effort = float(sum(each.oracle.effort() for each, _ in searches))
    saves_nothing: list[str] = []
    not_simulated: list[str] = []
    for _ in range(MOST_ROUNDS):
        chosen, best = best_of(searches)
        race = race_near_best(chosen, best.best, best.level0, changes, effort)
        effort -= race.effort
        for raced_policy in race.raced:
            if not raced_policy.is_simulated:
                not_simulated.append(label_of(chosen, raced_policy.policies))
            elif raced_policy.best is None:
                saves_nothing.append(label_of(chosen, raced_policy.policies))
        not_simulated += [label_of(chosen, policies) for policies in race.without_effort]
        gains = cheapest_first(race.raced)
        gain_facts += gains_of(chosen, best.best, gains)
        if not gains:
            break
        with_winner = with_policies(chosen, gains[0].policies)
        problem.progress(f"policies: {label_of(chosen, gains[0].policies)}")
        assert gains[0].best is not None
        try:
            search_result = find_best_fleet(
                with_winner, [with_winner.oracle.fleet(gains[0].best)], walks=False
            )
        except InfeasibleError:  # For instance because the time ended before the race's fleet was simulated.
            break
        searches.append((with_winner, search_result))
        # The winner sets the policy of one axis, such as the queue. The next round changes all other axes.
        raced_changes = [raced_policy.change for raced_policy in race.raced]
        changes = [change for change in raced_changes if change.axis != gains[0].change.axis]
        if problem.out_of_time() or not changes:
            break
    chosen, best = best_of(searches)
    usual = with_usual_queue(chosen)
    if usual is not None and not any(each.oracle.policies == usual.oracle.policies for each, _ in searches):
        # A race adopts a policy only for a lower price. At an equal price the usual queue is taken, which is
        # the simplest.
        if (result := _search_if_best_holds(usual, best.best)) is not None:
            searches.append((usual, result))
    for _, result in searches:
        result.level0.search.assumed.add(pruning_rules.POLICY_RACE)
        result.level0.search.is_exact = False
    searches = [(each, replace(result, is_every_mix_simulated=False)) for each, result in searches]
    gain_facts.append(
        facts.PoliciesRaced(
            nothing=tuple(dict.fromkeys(saves_nothing)),
            rivals=(),
            unasked=tuple(dict.fromkeys(not_simulated)),
            of="on-paper",
        )
    )
    _, winner = best_of(searches)
    with_facts = replace(winner, race_facts=tuple(gain_facts))
    return [(each, with_facts if result is winner else result) for each, result in searches]


def race_near_best(
    problem: Problem, best: Counts, level0: Level0, changes: Iterable[PolicyChange], effort: float
) -> PolicyRace:
    """Simulate fleets that are near `best` and cost less, with each change of the problem's policies."""
    return race_near(problem, near_fleets(problem, best, level0), changes, effort, best)


def race_near(
    problem: Problem,
    near_best: Sequence[Counts],
    changes: Iterable[PolicyChange],
    effort: float,
    best: Counts | None = None,
) -> PolicyRace:
    """The same as `race_near_best`, among the fleets `near_best`.

    Policies are left out if they change nothing for `best` (without `best`, for any of `near_best`), or if
    they count tenants and the trace has fewer than two. `effort` is compared only between waves of
    RACED_AT_ONCE.
    """
    candidates: dict[Policies, PolicyChange] = {}
    fleets = near_best if best is None else [best]
    has_tenants = len(problem.trace.tenants) > 1
    own = problem.oracle.policies
    for change in changes:
        if change.row is not None and change.row.counts_tenants and not has_tenants:
            continue
        policies = problem.task.changed_policies(own, change)
        if policies is not None and not all(_changes_nothing(policies, own, fleet) for fleet in fleets):
            candidates.setdefault(policies, change)
    waiting, spent_effort = list(candidates.items()), 0.0
    raced: list[RacedPolicy] = []
    while waiting and near_best and spent_effort <= effort and not problem.out_of_time():
        wave, waiting = waiting[:RACED_AT_ONCE], waiting[RACED_AT_ONCE:]
        for raced_policy, cost in run_each(lambda item: _race_one(problem, near_best, *item), wave):
            raced.append(raced_policy)
            spent_effort += cost
    if not near_best:  # No fleet costs less than `best`, so no policy can save anything.
        not_simulated = [RacedPolicy(change, policies, None) for policies, change in waiting]
        return PolicyRace(not_simulated, [], spent_effort)
    return PolicyRace(raced, [policies for policies, _ in waiting], spent_effort)


def _changes_nothing(policies: Policies, chosen: Policies, best: Counts) -> bool:
    """Whether `policies` differ from `chosen` only in how prefill workers hand requests to decode workers,
    and the fleet has no prefill workers.
    """
    if any(option.role == "prefill" for option, _ in best):
        return False
    with_own_hand_offs = replace(
        policies,
        decode_routing=chosen.decode_routing,
        pools=chosen.pools,
        repurpose_after_s=chosen.repurpose_after_s,
    )
    return with_own_hand_offs == chosen


def _race_one(
    problem: Problem, near_fleets: Sequence[Counts], policies: Policies, change: PolicyChange
) -> tuple[RacedPolicy, float]:
    """Simulate fleets near the best one with these policies; returns the result and the effort."""
    policy_problem = with_policies(problem, policies)
    oracle = policy_problem.oracle
    near_fleets = [counts for counts in near_fleets if policy_problem.can_route(*dict(counts))]
    refused = RacedPolicy(change, policies, None, is_simulated=False)
    if not near_fleets:
        return refused, 0.0
    try:
        check_policies(oracle.fleet(near_fleets[0]))
    except InputError:
        return refused, 0.0
    best: Counts | None = None
    try:
        for counts in near_fleets:
            if best is not None and objective_of(counts) >= objective_of(best):
                continue
            if oracle.holds(counts):
                smaller = without_needless_workers(counts, oracle)
                if best is None or objective_of(smaller) < objective_of(best):
                    best = smaller
    except StoppedError:  # The time is over. The best fleet so far counts.
        pass
    return RacedPolicy(change, policies, best), float(oracle.effort())


def near_fleets(problem: Problem, best: Counts, level0: Level0) -> list[Counts]:
    """The fleets near `best` that cost less, the dearest first: those with a worker fewer and, if `best` is a
    single pool, pools of the NEAR_TYPES most promising other types, each as large as costs less than `best`.
    """
    value = objective_of(best)
    candidates: list[Counts] = []
    for i in range(len(best)):
        # The fleet without one worker of pool i; a pool without workers is left out.
        fewer = tuple((option, n) for option, n in add_workers(best, -1, [i]) if n > 0)
        if has_whole_pairs(option for option, _ in fewer) and objective_of(fewer) < value * (1 - ROUNDING):
            candidates.append(fewer)
    if len(best) == 1:
        ((own_option, _),) = best
        others = [other for other in level0.with_role(own_option.role) if other.option != own_option]
        others.sort(key=lambda other: (other.likely * other.option.objective, other.option.name))
        for other in others[:NEAR_TYPES]:
            most = min(largest_below(other.option, value), other.most)
            if max(other.least, 1) <= most < math.inf:
                candidates.append(((other.option, int(most)),))
    candidates = [counts for counts in candidates if problem.allows(counts)]
    unique = {names_of(counts): counts for counts in candidates}
    return sorted(unique.values(), key=lambda counts: -objective_of(counts))


def gains_of(
    problem: Problem, best: Counts, gains: Sequence[RacedPolicy], answer: facts.AnswerName = "on-paper"
) -> list[facts.PolicyGains]:
    """What each policy saves, in the unit of the objective. With the objectives "gpus" and "power", a
    policy that only takes cheaper GPUs saves nothing.
    """
    unit, is_tied = OBJECTIVE_UNITS[problem.task.objective], problem.task.objective in PRICE_TIES

    def value_of(counts: Counts) -> float:
        return objective_paid(problem, counts) if is_tied else objective_of(counts)

    value = value_of(best)
    return [
        facts.PolicyGains(label_of(problem, gain.policies), raced_value, value - raced_value, unit, answer)
        for gain in gains
        if gain.best is not None and (raced_value := value_of(gain.best)) < value
    ]


def label_of(problem: Problem, policies: Policies) -> str:
    """What sets `policies` apart from those of the problem, in words."""
    return name_policies(policies, (policies, problem.oracle.policies))
