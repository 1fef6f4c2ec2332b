"""The race of policies: which policies, other than those that were searched, let a cheaper fleet hold.

Searches with every policy would cost too much. So in a round, fleets that are near the best one and cost less
are simulated with each other policy. The policy that saves most then has a search of its own, and the next
round changes one more policy, until no change saves anything. That a race overlooks nothing is an assumption
of the certificate (level0/pruning_rules.py, POLICY_RACE).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.documents import facts
from planner.documents.policy_choices import PolicyChange, name_policies
from planner.domain import ROUNDING
from planner.errors import InfeasibleError
from planner.fleet import Policies
from planner.search.level0 import pruning_rules
from planner.search.level0.level0_search import Level0
from planner.search.mixed.best_fleet import FleetSearch, PolicySearch, best_of, find_best_fleet
from planner.search.oracle.deterministic_parallel import run_each
from planner.search.oracle.fleet_counts import (
    Counts,
    add_workers,
    as_many_at_this_price,
    has_whole_pairs,
    largest_below,
    names_of,
    objective_of,
    options_of,
)
from planner.search.oracle.fleet_oracle import without_needless_workers
from planner.search.oracle.work_clock import StoppedError
from planner.search.problem.options import OBJECTIVE_UNITS, PRICE_TIES
from planner.search.problem.owned_first import objective_paid
from planner.search.problem.plan_problem import Problem, with_policies

# These limits bound the time of a race, and are set by hand. Besides, once a race has spent as much effort
# (simulated requests) as the searches before it, it begins no further wave.
MOST_ROUNDS = 4  # A race adopts at most this many policies, one per round.
NEAR_TYPES = 3  # Fleets of at most this many other worker types are raced (`near_fleets`).
RACED_AT_ONCE = 8  # This many policies are raced before the effort is compared with its limit.


def race_policies(problem: Problem, searches: Sequence[PolicySearch]) -> list[PolicySearch]:
    """The searches, and one more for each policy that won a round of the race."""
    changes, searches = list(problem.task.policies.raced_changes), list(searches)
    if not changes:
        return searches
    gain_facts: list[facts.PolicyGains | facts.PoliciesRaced] = []
    remaining_effort = float(sum(search.problem.oracle.effort() for search in searches))
    saves_nothing: list[str] = []
    not_simulated: list[str] = []
    for _ in range(MOST_ROUNDS):
        chosen, best = best_of(searches)
        race = race_near_best(chosen, best.best, best.level0, changes, remaining_effort)
        remaining_effort -= race.effort
        for raced_policy in race.raced:
            if not raced_policy.is_simulated:
                not_simulated.append(label_of(chosen, raced_policy.policies))
            elif raced_policy.best is None:
                saves_nothing.append(label_of(chosen, raced_policy.policies))
        not_simulated += [label_of(chosen, policies) for policies in race.without_effort]
        winners = cheapest_first(race.raced)
        gain_facts += gains_of(chosen, best.best, winners)
        if not winners:
            break
        with_winner = with_policies(chosen, winners[0].policies)
        problem.progress(f"policies: {label_of(chosen, winners[0].policies)}")
        assert winners[0].best is not None
        try:
            search_result = find_best_fleet(
                with_winner, [with_winner.oracle.fleet(winners[0].best)], walks=False
            )
        except InfeasibleError:  # For instance because the time ended before the race's fleet was simulated.
            break
        searches.append(PolicySearch(with_winner, search_result))
        # The winner sets the policy of one axis, such as the queue. The next round changes all other axes.
        raced_changes = [raced_policy.change for raced_policy in race.raced]
        changes = [change for change in raced_changes if change.axis != winners[0].change.axis]
        if problem.out_of_time() or not changes:
            break
    chosen, best = best_of(searches)
    usual = with_usual_queue(chosen)
    searched_policies = {search.problem.oracle.policies for search in searches}
    if usual is not None and usual.oracle.policies not in searched_policies:
        # A race adopts a policy only for a lower price. At an equal price the usual queue is taken, which is
        # the simplest.
        if (result := _search_if_best_holds(usual, best.best)) is not None:
            searches.append(PolicySearch(usual, result))
    for search in searches:
        search.result.level0.search.assumed.add(pruning_rules.POLICY_RACE)
        search.result.level0.search.is_exact = False
    searches = [
        search._replace(result=replace(search.result, is_every_mix_simulated=False)) for search in searches
    ]
    gain_facts.append(
        facts.PoliciesRaced(
            nothing=tuple(dict.fromkeys(saves_nothing)),
            rivals=(),
            unasked=tuple(dict.fromkeys(not_simulated)),
            of="on-paper",
        )
    )
    winner = best_of(searches)
    with_facts = winner._replace(result=replace(winner.result, race_facts=tuple(gain_facts)))
    return [with_facts if search is winner else search for search in searches]


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


def race_near_best(
    problem: Problem, best: Counts, level0: Level0, changes: Iterable[PolicyChange], effort: float
) -> PolicyRace:
    """Simulate fleets that are near `best` and cost less, with each change of the problem's policies."""
    return race_on_fleets(problem, near_fleets(problem, best, level0), changes, effort, best)


def race_on_fleets(
    problem: Problem,
    fleets: Sequence[Counts],
    changes: Iterable[PolicyChange],
    effort: float,
    best: Counts | None = None,
) -> PolicyRace:
    """Simulate these fleets with each change of the problem's policies.

    Policies are left out if they change nothing for `best` (without `best`, for any of the fleets), or if
    they count tenants and the trace has fewer than two. `effort` is compared only between waves of
    RACED_AT_ONCE.
    """
    candidates: dict[Policies, PolicyChange] = {}
    deciding = fleets if best is None else [best]
    has_tenants = len(problem.trace.tenants) > 1
    own = problem.oracle.policies
    for change in changes:
        if change.row is not None and change.row.counts_tenants and not has_tenants:
            continue
        policies = problem.task.changed_policies(own, change)
        if policies is not None and not all(_changes_nothing(policies, own, fleet) for fleet in deciding):
            candidates.setdefault(policies, change)
    waiting, spent_effort = list(candidates.items()), 0.0
    raced: list[RacedPolicy] = []
    while waiting and fleets and spent_effort <= effort and not problem.out_of_time():
        wave, waiting = waiting[:RACED_AT_ONCE], waiting[RACED_AT_ONCE:]
        for raced_policy, cost in run_each(lambda item: _race_one(problem, fleets, *item), wave):
            raced.append(raced_policy)
            spent_effort += cost
    if not fleets:  # No fleet costs less than `best`, so no policy can save anything.
        not_simulated = [RacedPolicy(change, policies, None) for policies, change in waiting]
        return PolicyRace(not_simulated, [], spent_effort)
    return PolicyRace(raced, [policies for policies, _ in waiting], spent_effort)


def _race_one(
    problem: Problem, fleets: Sequence[Counts], policies: Policies, change: PolicyChange
) -> tuple[RacedPolicy, float]:
    """Simulate fleets near the best one with these policies; returns the result and the effort."""
    policy_problem = with_policies(problem, policies)
    oracle = policy_problem.oracle
    fleets = [counts for counts in fleets if policy_problem.can_simulate(options_of(counts))]
    if not fleets:
        return RacedPolicy(change, policies, None, is_simulated=False), 0.0
    best: Counts | None = None
    try:
        for counts in fleets:
            if best is not None and objective_of(counts) >= objective_of(best):
                continue
            if oracle.holds(counts):
                smaller = without_needless_workers(counts, oracle)
                if best is None or objective_of(smaller) < objective_of(best):
                    best = smaller
    except StoppedError:  # The time is over. The best fleet so far counts.
        pass
    return RacedPolicy(change, policies, best), float(oracle.effort())


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


def near_fleets(problem: Problem, best: Counts, level0: Level0) -> list[Counts]:
    """The fleets near `best` that cost less, the dearest first: those with a worker fewer and, if `best` is a
    single pool, pools of the NEAR_TYPES most promising other types, each as large as costs less than `best`.
    """
    value = objective_of(best)
    candidates: list[Counts] = []
    for i in range(len(best)):
        # The fleet without one worker of pool i; a pool without workers is left out.
        fewer = tuple((option, n) for option, n in add_workers(best, -1, [i]) if n > 0)
        if has_whole_pairs(options_of(fewer)) and objective_of(fewer) < value * (1 - ROUNDING):
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


def cheapest_first(raced: Iterable[RacedPolicy]) -> list[RacedPolicy]:
    """The raced policies with which some fleet holds, the one with the cheapest fleet first."""
    return sorted((policy for policy in raced if policy.best is not None), key=lambda policy: policy.value)


def gains_of(
    problem: Problem, best: Counts, winners: Sequence[RacedPolicy], answer: facts.AnswerName = "on-paper"
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
        for gain in winners
        if gain.best is not None and (raced_value := value_of(gain.best)) < value
    ]


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


def label_of(problem: Problem, policies: Policies) -> str:
    """What sets `policies` apart from those of the problem, in words."""
    return name_policies(policies, (policies, problem.oracle.policies))
