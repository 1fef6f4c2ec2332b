"""Searches the best fleet under given policies: first level 0, then fleets of several worker types.

    find_best_fleet      the best fleet, or an error
    search_or_explain    the same, and a fleet that a search under other policies may start from
    find_fleet_quickly   a shorter search, without proofs and explanations, for a stricter question

A search may start from known fleets, and reuse the simulations of other searches
(planner/studies/what_if.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.documents import facts
from planner.domain import OWNED, ROUNDING, Gpu, payment_suffix
from planner.errors import InfeasibleError
from planner.fleet import Fleet, Policies
from planner.policies import ONE_KIND
from planner.search.level0.level0_search import Level0, search_level0
from planner.search.level0.one_pool import Level0Search
from planner.search.level0.owned_gpus import owned_candidates
from planner.search.mixed.infeasible import find_wider_fleets, infeasible
from planner.search.mixed.mixed_fleets import MixedFleets, cheapest_known, search_mixed_fleets
from planner.search.oracle.fleet_counts import Counts, counts_named, counts_of_each, objective_of
from planner.search.oracle.fleet_oracle import Oracle, without_needless_workers
from planner.search.oracle.work_clock import in_time, now_s
from planner.search.problem.owned_first import objective_paid, owned_first
from planner.search.problem.plan_problem import Problem, SearchProgress
from planner.solvers.master import Option


@dataclass(frozen=True, slots=True)
class FleetSearch:
    """The result of a search: the best fleet, its value (the objective), and how far the search came.

    `cuts` is how many proposals of mixed fleets failed. `is_every_mix_simulated`: whether every cheaper fleet
    of any mix of types was simulated. `race_facts` say what other policies are worth (policy_search.py).
    """

    best: Counts
    value: float
    level0: Level0
    cuts: int
    is_every_mix_simulated: bool
    race_facts: tuple[facts.PolicyGains | facts.PoliciesRaced, ...] = ()


class PolicySearch(NamedTuple):
    """A problem under one choice of policies, and the result of its search on paper."""

    problem: Problem
    result: FleetSearch


@dataclass(frozen=True, slots=True)
class NoFleet:
    """No fleet was found: the error that says so, the state in which the search of level 0 ended, and whether
    every fleet of any mix of worker types was simulated. `wider` are fleets that keep the SLO and exceed the
    limits.
    """

    error: InfeasibleError
    level0_search: Level0Search
    is_every_mix_simulated: bool
    wider: tuple[Fleet, ...] = ()


def find_best_fleet(
    problem: Problem, start: Sequence[Fleet] = (), *, prove: bool = False, walks: bool = True
) -> FleetSearch:
    """The best fleet found, which is at least as good as the fleets of `start` that hold.

    With `prove` every cheaper fleet of level 0 is simulated, as far as the time allows. With `walks` these
    fleets are simulated if they are few (level0/walk.py), and fleets of several types are searched with all
    engine settings; without it, only with the settings that were best at level 0. Raises InfeasibleError if
    no fleet within the limits was found; the error says whether that is proved.
    """
    result, _ = search_or_explain(problem, start, prove=prove, walks=walks)
    if isinstance(result, NoFleet):
        raise result.error
    return result


def search_or_explain(
    problem: Problem, start: Sequence[Fleet], *, prove: bool = False, walks: bool = True
) -> tuple[FleetSearch | NoFleet, Fleet | None]:
    """The result of the search, and the best fleet of the same question without its budgets
    (`_without_budgets`); that fleet is None if the question has no budgets or no fleet was found.

    A search with other policies may start from that fleet, and find one within the budgets. The parameters
    are those of `find_best_fleet`.
    """
    wider, unlimited = _without_budgets(problem), None
    if wider is not None:
        result = _search(wider, start, prove=prove, walks=walks)[0]
        unlimited = None if result is None else problem.oracle.fleet(result.best)
        if result is not None and problem.allows(result.best):
            is_complete = not wider.out_of_time()
            if is_complete or problem.out_of_time():
                return _with_level0_within(problem, result, start, prove=prove, walks=walks), unlimited
            # The search was cut short. The time that remains is for a better fleet within the budgets.
            start = (*start, problem.oracle.fleet(result.best))
    within, level0, mixed_fleets = _search(problem, start, prove=prove, walks=walks)
    if within is not None:
        return within, unlimited
    wider_fleets = find_wider_fleets(problem)
    if len(wider_fleets) == 1 and problem.allows(wider_fleets[0]):
        # The search beyond the limits has found a fleet within them, which the search above had missed.
        start = (*start, problem.oracle.fleet(wider_fleets[0]))
        within, level0, mixed_fleets = _search(problem, start, prove=prove, walks=walks)
    if within is not None:
        return within, unlimited
    error = infeasible(problem, level0, mixed_fleets, wider_fleets)
    return (
        NoFleet(error, level0.search, mixed_fleets.is_exact, tuple(map(problem.oracle.fleet, wider_fleets))),
        unlimited,
    )


def _with_level0_within(
    problem: Problem, result: FleetSearch, start: Sequence[Fleet], *, prove: bool, walks: bool
) -> FleetSearch:
    """The given `result` of a search without budgets, whose fleet is within them all the same. If its best
    fleet of level 0 exceeds the budgets, its `level0` is replaced by a search within them.
    """
    best = result.level0.search.best
    if best is None or problem.allows(best):
        return result
    return replace(result, level0=search_level0(problem, start, prove=prove, walks=walks))


def _search(
    problem: Problem, start: Sequence[Fleet], *, prove: bool, walks: bool
) -> tuple[FleetSearch | None, Level0, MixedFleets]:
    """The best fleet within the limits of `problem`, None if none was found, and how the searches of level 0
    and of mixed fleets ended.
    """
    level0 = search_level0(problem, start, prove=prove, walks=walks)
    if level0.search.best is not None and not problem.out_of_time():
        _prefer_uncapped(problem, level0)
        _check_minimal(level0.search, problem.oracle)
    start_counts = counts_of_each(start, level0.options)
    start_counts += owned_candidates(problem, level0)
    mixed_fleets = search_mixed_fleets(problem, level0, start_counts, refines=walks)
    if mixed_fleets.best is None and problem.task.deploy in ONE_KIND and level0.has_pairs:
        mixed_fleets = _or_pairs(mixed_fleets, problem, level0, refines=walks)
    if mixed_fleets.best is None:
        return None, level0, mixed_fleets
    best, value = owned_first(problem, mixed_fleets.best), mixed_fleets.value
    if problem.task.owned and problem.task.objective == "cost":
        fewest = _with_fewest_gpus(problem, level0.options, best)
        best, value = fewest, value if fewest == best else objective_of(fewest)
    fleet_search = FleetSearch(
        best=best,
        value=value,
        level0=level0,
        cuts=mixed_fleets.cuts,
        is_every_mix_simulated=mixed_fleets.is_exact,
    )
    return fleet_search, level0, mixed_fleets


def _or_pairs(mixed: MixedFleets, problem: Problem, level0: Level0, *, refines: bool) -> MixedFleets:
    """The search for fleets of prefill and decode workers after that of mixed workers has found none, for a
    target that runs only one of the two kinds. If it finds none either, how both searches ended.
    """
    options = tuple(bounded.option for role in ("prefill", "decode") for bounded in level0.with_role(role))
    pairs = search_mixed_fleets(problem, replace(level0, options=options), refines=refines)
    have_ended = all(each.is_exhausted or each.is_hopeless for each in (mixed, pairs))
    return replace(pairs, cuts=mixed.cuts + pairs.cuts, is_exhausted=have_ended, is_hopeless=False)


def _with_fewest_gpus(problem: Problem, options: Sequence[Option], best: Counts) -> Counts:
    """The fleet with the fewest GPUs, and then with the most owned ones, of all that hold and cost as much as
    `best`. The objective cannot decide this, because in it an owned GPU adds more than a rented GPU
    that would idle on a paid node.
    """

    def rank(counts: Counts) -> tuple[int, int]:
        gpus = [(payment_suffix(option.type.gpu.name), option.type.gpus * count) for option, count in counts]
        return sum(count for _, count in gpus), -sum(count for market, count in gpus if market == OWNED)

    most_usd_per_h = objective_paid(problem, best) * (1 + ROUNDING)
    holding = [counts_named(fleet, options) for fleet, holds in problem.oracle.verdicts.items() if holds]
    fleets = [best, *(owned_first(problem, counts) for counts in holding if counts)]
    equal = [
        fleet
        for fleet in fleets
        if problem.allows(fleet) and objective_paid(problem, fleet) <= most_usd_per_h
    ]
    return min(equal, key=rank, default=best)


def _without_budgets(problem: Problem) -> Problem | None:
    """The same question without its budgets (the limits on money, power and the number of all GPUs), but with
    the stock of each GPU type, and half of the remaining time. None if the question has no budgets, or if a
    bound proves that no fleet is within them.

    If the best fleet without budgets is within them, it is also the best fleet with them. A search with
    budgets takes another path and may miss that fleet.
    """
    limits = replace(problem.limits, power_w=None, cost_usd_per_h=None, gpus=None)
    if problem.bound is None or limits == problem.limits:
        return None

    def watch(progress: SearchProgress) -> None:
        """Report the best fleet only if it is within the limits of the question."""
        fleet = None if progress.fleet is None else progress.fleet()
        workers = () if fleet is None else [(pool.type, pool.count) for pool in fleet.running_pools]
        is_within_limits = fleet is not None and problem.limits.first_exceeded(workers) is None
        problem.watch(progress if is_within_limits else replace(progress, best=None, fleet=None))

    now = now_s()
    return replace(problem, limits=limits, watch=watch, deadline=now + (problem.deadline - now) / 2)


def find_fleet_quickly(problem: Problem, start: Sequence[Fleet], *, is_mixed: bool) -> Counts | None:
    """The best fleet found for a question other than the user's, for instance in scenarios; None if none is
    found.

    Nothing is proved or explained, so that this takes much less time than `find_best_fleet`. It starts from
    the fleets of `start` that hold. With `is_mixed` fleets of several worker types are searched too.
    """
    wider = _without_budgets(problem)
    best = None if wider is None else _find_fleet_quickly(wider, start, is_mixed=is_mixed)
    if best is not None and problem.allows(best):
        return best
    return _find_fleet_quickly(problem, start, is_mixed=is_mixed)


def _find_fleet_quickly(problem: Problem, start: Sequence[Fleet], *, is_mixed: bool) -> Counts | None:
    """Like `find_fleet_quickly`, within the limits of this problem."""
    level0 = search_level0(problem, start, walks=False, counts_cheaper=False)
    start_counts = counts_of_each(start, level0.options)
    if is_mixed:
        candidates = start_counts or owned_candidates(problem, level0)
        return in_time(lambda: search_mixed_fleets(problem, level0, candidates).best, level0.search.best)
    return cheapest_known(problem, level0, start_counts)[0] if problem.task.owned else level0.search.best


def best_of(searches: Sequence[PolicySearch]) -> PolicySearch:
    """The cheapest search; of equally cheap ones the first with the engines' usual queue, else the first."""
    least = min(search.result.value for search in searches)
    equal = [search for search in searches if search.result.value <= least * search.problem.same_value_factor]
    return min(equal, key=lambda search: search.problem.oracle.policies.queue != Policies().queue)


def _prefer_uncapped(problem: Problem, level0: Level0) -> None:
    """Replace power-capped GPUs in the best fleet of level 0 by uncapped ones, which are never slower, if the
    fleet then costs as much.
    """
    search = level0.search
    assert search.best is not None
    by_name = {option.name: option for option in level0.options}
    pools = []
    for option, count in search.best:
        uncapped = _uncapped_gpu(option, level0)
        if uncapped is not None:
            name = f"{option.role} {replace(option.type, gpu=uncapped).name}"
            option = by_name.get(name, option)
        pools.append((option, count))
    counts = tuple(pools)
    costs_as_much = abs(objective_of(counts) - search.value) <= ROUNDING * search.value
    if counts == search.best or not costs_as_much:
        return
    if problem.allows(counts) and problem.oracle.holds(counts):
        search.best = counts


def _uncapped_gpu(option: Option, level0: Level0) -> Gpu | None:
    """The uncapped variant of this option's GPU, if some option has it; None for a GPU without a cap."""
    base = option.type.gpu.base + payment_suffix(option.type.gpu.name)
    gpus = {other.type.gpu.name: other.type.gpu for other in level0.options}
    return gpus.get(base) if base != option.type.gpu.name else None


def _check_minimal(search: Level0Search, oracle: Oracle) -> None:
    """Simulate the best fleet of level 0 with fewer workers. If a smaller fleet holds, it becomes the best.

    The search assumes that more workers never make a fleet fail. A smaller fleet that holds contradicts this,
    so the search then does not count as exhausted.
    """
    assert search.best is not None
    smaller = without_needless_workers(search.best, oracle)
    if objective_of(smaller) < search.value * (1 - ROUNDING):
        search.offer(smaller)
        search.is_exhausted = False
        # No option has this name: the certificate lists the finding among what was ruled out.
        search.refuted["monotonicity"] = facts.SmallerHolds()
