"""The answer "with a loss": the cheapest fleet that keeps the SLO after the loss of any one worker.

A survivor is a fleet that does so. Workers of one kind do the same work, on owned or rented GPUs
(problem/owned_first.py).
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.documents.facts import KeptIn
from planner.search.level0.owned_gpus import owned_beside, with_fewest_workers, with_idle
from planner.search.mixed.best_fleet import FleetSearch
from planner.search.mixed.mixed_fleets import best_settings
from planner.search.oracle.fleet_counts import Counts, NamedCounts, in_order, names_of, objective_of
from planner.search.oracle.scenarios import next_block
from planner.search.oracle.work_clock import in_time
from planner.search.problem.options import hardware_of
from planner.search.problem.owned_first import merge_kinds, one_more, owned_first
from planner.search.problem.plan_problem import Problem, with_scenarios
from planner.search.production import cheapest_kept
from planner.search.production.like_price import feasible_fleets, with_most_headroom
from planner.search.production.scenario_test import FleetTrial, is_test_passed
from planner.traffic.scaling import SAME_FRAC

# The limits below bound the time of a plan. They are set by hand.

# A fleet with a loss is searched for in this many scenarios more than it may miss.
LOSS_SCENARIOS = 2 * cheapest_kept.HARDEST_SCENARIOS
# Each search for a fleet with a loss may simulate this many requests.
LOSS_SEARCH_REQUESTS = cheapest_kept.LEAST_SEARCH_REQUESTS / 2
# At most this many survivors are tested. The scenarios of a failed test join the search for the next one.
MOST_LOSS_TESTS = 2
# Neighbours of production, among which a survivor is searched, have up to MOST_WORKERS_CHANGED workers more
# or fewer of each of up to MOST_KINDS_CHANGED kinds.
MOST_WORKERS_CHANGED = 2
MOST_KINDS_CHANGED = 4
# Fleets with other worker types have up to this many workers of another type beside a pool of production.
MOST_OTHER_WORKERS = 2
MOST_OTHER_FLEETS = 4  # At most this many fleets with other worker types are simulated.
# At most this many neighbours, or fleets with other worker types, are built to choose from.
MOST_COMBINATIONS = 1_000


@dataclass(frozen=True, slots=True, eq=False)
class FleetWithALoss:
    """A fleet for the answer "with a loss", and in how many scenarios it keeps the SLO after a loss.

    `problem` is the one in which its headroom can be found; None beside a scale model, where the loss of a
    single worker cannot be simulated.
    """

    counts: Counts
    kept_in: KeptIn
    problem: Problem | None


def find_fleet_with_a_loss(
    production: FleetTrial, paper: FleetSearch
) -> tuple[FleetWithALoss | None, Counts | None]:
    """The fleet that survives the loss of any one worker, None if none was found; and the first survivor that
    the search found, which may have failed its test.

    The cheapest fleet found is tested as production is, in scenarios that no search has seen, each after the
    loss of any one worker. If it fails, these scenarios join the search, and of the fleets of like price the
    one with the most headroom is tested next. If MOST_LOSS_TESTS cheaper fleets fail, the answer is
    production with one more worker of each kind. This fleet need not pass a test, because after any loss all
    workers of production remain. Where it is not within the limits, the last fleet that failed is tested with
    one more worker of each kind.

    If a scale model was searched, in which one worker stands for many, the answer is production with one more
    worker of each kind.
    """
    scenario_problem = production.searched_problem
    enlarged = one_more(scenario_problem, production.best)
    can_enlarge = scenario_problem.allows(enlarged)
    test = production.test.after_a_loss()
    if scenario_problem.oracle.downscale > 1:
        if not can_enlarge:
            return None, None
        return FleetWithALoss(enlarged, test.count_kept(enlarged, test.side_scenarios), None), enlarged
    scenarios, first_survivor = scenario_problem.oracle.scenarios, None
    failed = set[NamedCounts]()  # The fleets that failed their test.
    last_failed: Counts | None = None
    for attempt in range(MOST_LOSS_TESTS + 1):
        may_miss = test.safety.most_missed(len(scenarios))
        hard = with_scenarios(scenario_problem, scenarios[: may_miss + LOSS_SCENARIOS], may_miss)
        loss_problem = _after_a_loss(hard)
        survivor = None
        if attempt < MOST_LOSS_TESTS:
            survivor = _find_survivor(loss_problem, scenario_problem, paper, production.best)
        if survivor is not None and failed:
            # The same workers may pass with other engine settings than those found first.
            survivor = with_most_headroom(loss_problem, paper.level0.options, survivor)
        if survivor is not None and names_of(survivor) in failed:
            survivor = None  # The scenarios that it missed were too few to refute it.
        if survivor is None and not can_enlarge and last_failed is not None:
            larger = one_more(scenario_problem, last_failed)
            survivor = larger if scenario_problem.allows(larger) else None
        if can_enlarge and (survivor is None or objective_of(enlarged) <= objective_of(survivor)):
            survivor = enlarged
        if survivor is None:
            break
        first_survivor = first_survivor or survivor
        if survivor is enlarged:
            # After a loss `enlarged` still has all workers of production, and no search has chosen it by the
            # scenarios of production's test. So it is counted in the same scenarios as production.
            test = production.test.after_a_loss()
        kept_in, missed, kept_scenarios = test.decide_and_split(survivor)
        if survivor is enlarged or is_test_passed(kept_in, test.safety) or scenario_problem.out_of_time():
            return FleetWithALoss(survivor, kept_in, loss_problem), first_survivor
        failed.add(names_of(survivor))
        last_failed = survivor
        scenarios = (*missed, *scenarios, *kept_scenarios)  # The hardest come first.
        test = replace(test, first=next_block(test.first + kept_in.scenario_count))
    return None, first_survivor


def cheaper_with_one_more(trial: FleetTrial, fleet: FleetWithALoss | None) -> FleetWithALoss | None:
    """Production with one more worker of each kind, if that costs less than `fleet`, which was searched
    for another production fleet, and passes its test; otherwise `fleet`.
    """
    problem, enlarged = trial.searched_problem, one_more(trial.searched_problem, trial.best)
    most = math.inf if fleet is None else objective_of(fleet.counts)
    may_cost_less = objective_of(enlarged) * problem.same_value_factor < most
    if problem.oracle.downscale > 1 or not problem.allows(enlarged) or not may_cost_less:
        return fleet
    test = trial.test.after_a_loss()
    kept_in = test.decide(enlarged)
    if not is_test_passed(kept_in, test.safety):
        return fleet
    return FleetWithALoss(enlarged, kept_in, _after_a_loss(problem))


def _after_a_loss(problem: Problem) -> Problem:
    """The problem in which a fleet must keep the SLO after the loss of any one worker."""
    return replace(problem, oracle=replace(problem.oracle, spare_workers=1))


def _find_survivor(
    loss_problem: Problem, scenario_problem: Problem, paper: FleetSearch, best: Counts
) -> Counts | None:
    """The cheapest survivor found, which keeps the SLO in enough scenarios of `loss_problem`.

    Production with one more worker of each kind survives any loss. Cheaper fleets are searched in this order:
    workers on idle owned GPUs, and known fleets; one worker type per pool; a few workers more or fewer than
    production; a few workers of other types beside production.

    The problem `strict` leaves out as many scenarios as a fleet may miss, the hardest, and allows no miss in
    the others. One missed scenario then refutes a fleet, which takes fewer simulations. A search of
    `loss_problem` itself follows, as a fleet may miss other scenarios than the hardest.
    """
    may_miss, production_value = loss_problem.oracle.may_miss, objective_of(best)
    strict = with_scenarios(loss_problem, loss_problem.oracle.scenarios[may_miss:], 0)
    cheapest = in_time(lambda: _cheapest_enlarged(strict, scenario_problem, paper, best), None)
    # No fleet that survives a loss costs less than production, so one at its price is the cheapest.
    if cheapest is None or objective_of(cheapest) > production_value * loss_problem.same_value_factor:
        for searched_problem in (strict, loss_problem):
            cheapest = cheapest_kept.find_cheaper_kept(
                searched_problem,
                paper,
                cheapest,
                any_mix=False,
                most_requests=LOSS_SEARCH_REQUESTS,
                refuted_value=production_value,
            )
        for find_cheaper in (_cheapest_neighbour, _cheapest_with_other_types):
            cheapest = in_time(partial(find_cheaper, loss_problem, paper, best, cheapest), cheapest)
    return cheapest


def _cheapest_enlarged(
    loss_problem: Problem, scenario_problem: Problem, paper: FleetSearch, best: Counts
) -> Counts | None:
    """The cheapest of these fleets that survives a loss: production with one more worker of each kind; the
    same with workers on idle owned GPUs, as few as suffice; the fleet on paper with one more worker of each
    kind; and MOST_OTHER_FLEETS known fleets that keep enough scenarios.
    """
    loss_problem = cheapest_kept.with_search_limit(loss_problem, LOSS_SEARCH_REQUESTS)
    enlarged = one_more(scenario_problem, best)
    candidates = [enlarged] if scenario_problem.allows(enlarged) else []
    filled = with_idle(scenario_problem, paper.level0, enlarged)
    uses_idle = sorted(names_of(filled)) != sorted(names_of(enlarged))
    if uses_idle and scenario_problem.allows(filled) and loss_problem.oracle.holds(filled):
        candidates.append(owned_first(scenario_problem, with_fewest_workers(filled, loss_problem)))
    below = min(map(objective_of, candidates), default=math.inf)
    known = sorted(feasible_fleets(scenario_problem, paper.level0.options), key=objective_of)
    likely = [counts for counts in known if objective_of(counts) > objective_of(best) * (1 + SAME_FRAC)]
    for counts in (one_more(scenario_problem, paper.best), *likely[:MOST_OTHER_FLEETS]):
        can_improve = objective_of(counts) < below and scenario_problem.allows(counts)
        if can_improve and not loss_problem.out_of_time() and loss_problem.oracle.holds(counts):
            candidates.append(counts)
    return min(candidates, key=objective_of, default=None)


def _cheapest_neighbour(
    problem: Problem, paper: FleetSearch, best: Counts, cheapest: Counts | None
) -> Counts | None:
    """The cheapest fleet found that survives a loss and has, of each kind, up to MOST_WORKERS_CHANGED
    workers more or fewer than production. Workers on owned GPUs that production leaves idle are kinds too.

    A largest one of the fleets that cost less than `cheapest` is simulated: no other such fleet has at least
    as many workers in every pool. If it fails, fleets that are smaller in every pool are assumed to fail too.
    """
    problem = cheapest_kept.with_search_limit(problem, LOSS_SEARCH_REQUESTS)
    pools = merge_kinds(best)
    idle = [(option, 0) for option, _ in owned_beside(problem, paper.level0, best)]
    counted_pools = [*pools, *idle[: max(MOST_KINDS_CHANGED - len(pools), 0)]]
    options = [option for option, _ in counted_pools]
    ranges = [
        range(max(count - MOST_WORKERS_CHANGED, 0), count + MOST_WORKERS_CHANGED + 1)
        for _, count in counted_pools
    ]
    fleets: dict[tuple[int, ...], Counts] = {}
    for vector in itertools.islice(itertools.product(*ranges), MOST_COMBINATIONS):
        counts = owned_first(problem, in_order(zip(options, vector, strict=True), paper.level0.options))
        if _roles_of(counts) == _roles_of(best) and problem.allows(counts):
            fleets[vector] = counts
    while not problem.out_of_time():
        below = math.inf if cheapest is None else objective_of(cheapest) * (1 - SAME_FRAC)
        fleets = {vector: counts for vector, counts in fleets.items() if objective_of(counts) < below}
        if not fleets:
            break
        vector = min(_largest_vectors([*fleets]), key=lambda vector: objective_of(fleets[vector]))
        if problem.oracle.holds(fleets[vector]):
            cheapest = owned_first(problem, with_fewest_workers(fleets[vector], problem))
        else:
            # Smaller fleets are dropped with it, so only fleets with more workers of some kind stay.
            fleets = {other: fleets[other] for other in fleets if np.any(np.array(other) > vector)}
    return cheapest


def _roles_of(counts: Counts) -> set[str]:
    return {option.role for option, _ in counts}


def _largest_vectors(vectors: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The vectors that no other vector equals or exceeds in every component."""
    array = np.array(vectors)
    # Only the vector itself is at least as large in every component.
    return [
        vector for vector, row in zip(vectors, array, strict=True) if (array >= row).all(axis=1).sum() == 1
    ]


def _cheapest_with_other_types(
    problem: Problem, paper: FleetSearch, best: Counts, cheapest: Counts | None
) -> Counts | None:
    """The cheapest fleet below the price of `cheapest` that survives a loss and is production with something
    added for each pool: one more of its workers, or up to MOST_OTHER_WORKERS workers of another GPU or
    parallelism in its role. At most MOST_OTHER_FLEETS are simulated.
    """
    settings = best_settings(problem, paper.level0, {})
    # By pool of production: what may be added for it, as an option with a number of workers.
    added_for_pool = [
        [
            (option, 1),
            *(
                (other, count)
                for other in settings
                if other.role == option.role and hardware_of(other) != hardware_of(option)
                for count in range(1, MOST_OTHER_WORKERS + 1)
            ),
        ]
        for option, _ in best
    ]
    below = math.inf if cheapest is None else objective_of(cheapest) * (1 - SAME_FRAC)
    fleets: list[Counts] = []
    for added in itertools.islice(itertools.product(*added_for_pool), MOST_COMBINATIONS):
        workers = dict(best)
        for option, count in added:
            workers[option] = workers.get(option, 0) + count
        fleets.append(owned_first(problem, in_order(workers.items(), paper.level0.options)))
    fleets = [counts for counts in fleets if objective_of(counts) < below and problem.allows(counts)]
    for counts in sorted(fleets, key=objective_of)[:MOST_OTHER_FLEETS]:
        if problem.out_of_time():
            break
        if problem.oracle.holds(counts):
            return counts
    return cheapest
