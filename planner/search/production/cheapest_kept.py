"""Searches the cheapest fleet that keeps the SLO in most scenarios: a chance constraint on sampled scenarios.

A search draws S scenarios (scenarios.py) and lets a fleet miss the SLO in `may_miss` of them.

    grow    Workers are added to the cheapest fleet on paper until it misses no more than it may. That gives
            an incumbent, and shows which scenarios are the hardest. If it costs far more than on paper,
            fleets of other designs grow too (`grow_other_designs`), and the cheapest is the incumbent.
    search  Level 0 is searched as on paper, below the incumbent's price, in the hardest scenarios alone. If
            the fleet found misses too many of all scenarios, some of these join the hardest, and the search
            runs again. The fleet also grows, which may give the next incumbent.

Different fleets may miss different scenarios. production_fleet.py tests the fleet in fresh scenarios. If the
fleet fails, these join the S scenarios and the fleet grows again. A cheaper fleet that misses slightly too
many is tested too, because S is small.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from planner.domain import ROUNDING
from planner.fleet import Fleet
from planner.search.level0.one_pool import WAVE
from planner.search.level0.owned_gpus import owned_beside
from planner.search.mixed.best_fleet import FleetSearch, find_fleet_quickly
from planner.search.oracle.deterministic_parallel import run_each
from planner.search.oracle.fleet_counts import (
    Counts,
    add_workers,
    counts_named,
    has_several_types,
    names_of,
    objective_of,
)
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.work_clock import StoppedError, in_time
from planner.search.problem.owned_first import owned_first, workers_by_kind
from planner.search.problem.plan_problem import Problem, refuted_below, with_effort_limit, with_scenarios
from planner.solvers.master import Option

# The workers of a kind (owned_first.py) grow to at most this many times their number on paper. A fleet that
# still misses too many scenarios then is assumed to miss them with any number. Set by hand.
MOST_GROWTH = 16
# A search may simulate the requests of SEARCH_FLEETS fleets in all of its scenarios, but at least and at most
# the numbers below, which take about 4 and 10 CPU seconds.
SEARCH_FLEETS = 20
LEAST_SEARCH_REQUESTS = 3_000_000
MOST_SEARCH_REQUESTS = 8_000_000
# Gains are divided by the price of the added workers, but at least by this (in the objective's unit), so that
# workers on owned GPUs, which are free, come before all others.
LEAST_PRICE_RISE = 1e-9
# If the grown fleet costs more than this many times its price on paper, fleets of other designs grow too: the
# search goes up from the price on paper, and often runs out of time far below the grown price. Llama-3.1-70B
# at 30 requests/s on B300 or B200 cost 191.36 USD/h (twice its price on paper), and 167.76 on B300 alone.
FAR_ABOVE_PAPER = 1.5
MOST_OTHER_DESIGNS_REQUESTS = 4_000_000  # Growing other designs simulates at most this many: 5 CPU seconds.
# A search begins with this many more of the hardest scenarios than a fleet may miss. Set by hand.
HARDEST_SCENARIOS = 4


def with_search_limit(problem: Problem, most_requests: float) -> Problem:
    """The same problem with a limit on its simulated requests: those of SEARCH_FLEETS fleets, but at least
    LEAST_SEARCH_REQUESTS, and at most `most_requests`.
    """
    requests = SEARCH_FLEETS * len(problem.oracle.trace) * len(problem.oracle.scenarios)
    return with_effort_limit(problem, min(max(requests, LEAST_SEARCH_REQUESTS), most_requests))


def find_cheapest_kept(
    problem: Problem, paper: FleetSearch, start: Sequence[Fleet] = ()
) -> tuple[Problem, Counts | None]:
    """The problem with the hardest scenarios first, and the cheapest fleet found that misses no more
    scenarios than it may; None if none was found. `paper` is the search for the fleet on paper. A fleet of
    `start` is preferred to another that costs the same.
    """
    unused_owned = owned_beside(problem, paper.level0, paper.best)
    ordered, best = grow_until_kept(problem, paper.best, unused_owned)
    if best is not None and objective_of(best) <= paper.value * (1 + ROUNDING):
        return ordered, best  # No cheaper fleet holds even on paper.
    if best is not None and objective_of(best) > FAR_ABOVE_PAPER * paper.value:
        best = grow_other_designs(ordered, paper, best)[0]
    # No fleet of a lower value than the fleet on paper holds even on paper, so none holds in scenarios.
    return ordered, find_cheaper_kept(ordered, paper, best, start, refuted_value=paper.value)


def find_cheaper_kept(
    problem: Problem,
    paper: FleetSearch,
    best: Counts | None,
    start: Sequence[Fleet] = (),
    *,
    any_mix: bool = True,
    most_requests: float = MOST_SEARCH_REQUESTS,
    refuted_value: float = -math.inf,
) -> Counts | None:
    """The cheapest fleet found that keeps enough scenarios, or `best` if none is cheaper. The hardest
    scenarios come first in `problem`. Fleets of a lower objective than `refuted_value` are known to miss too
    many. The search simulates at most `most_requests` requests.

    With `any_mix` fleets of several worker types are searched too, if the cheapest fleet on paper has several
    or `best` is None.
    """
    is_mixed = any_mix and (has_several_types(paper.best) or best is None)
    oracle = problem.oracle
    start_fleets = [*start, *([] if best is None else [oracle.fleet(best)])]
    hard_numbers = set(range(min(oracle.may_miss + HARDEST_SCENARIOS, len(oracle.scenarios))))
    # All rounds share one limit. It is a point on the search's clock, which counts simulated requests.
    deadline = with_search_limit(problem, most_requests).deadline
    while True:
        scenarios = [oracle.scenarios[i] for i in sorted(hard_numbers)]
        hard_problem = refuted_below(with_scenarios(problem, scenarios, oracle.may_miss), refuted_value)
        hard_problem = replace(hard_problem, deadline=deadline)
        search = partial(find_fleet_quickly, hard_problem, start_fleets, is_mixed=is_mixed)
        fleet = in_time(search, otherwise=None)
        _remember_verdicts(oracle, hard_problem.oracle, paper.level0.options, refuted_value)
        # The pools of a fleet may together need more whole nodes than the stock has.
        if fleet is None or not problem.allows(fleet) or (best and _is_no_cheaper(fleet, best)):
            return best
        missed = in_time(partial(_missed_scenarios, oracle, fleet), otherwise=None)
        if missed is None:  # The time is over.
            return best
        if len(missed) <= oracle.may_miss:
            return fleet
        most_value = math.inf if best is None else objective_of(best)
        # The fleet keeps enough of the hardest scenarios, so a little growth may let it keep enough of all.
        _, grown = grow_until_kept(problem, fleet, most_value=most_value)
        if grown is not None and (best is None or not _is_no_cheaper(grown, best)):
            best = grown
            start_fleets.append(oracle.fleet(best))
        hard_numbers |= set(sorted(missed - hard_numbers)[:HARDEST_SCENARIOS])


def grow_other_designs(problem: Problem, paper: FleetSearch, best: Counts | None) -> list[Counts]:
    """Fleets that keep enough scenarios, the cheapest first: `best`, and cheaper ones grown from fleets of
    other designs (the options of a fleet, without counts). These are the best fleet on paper, the best mixed
    pool, the best fleet of one GPU type, and for every GPU type and degree of tensor parallelism the mixed
    pool that looks cheapest. The hardest scenarios come first in `problem`.

    If a test has added hundreds of scenarios, a search uses up its effort on the GPU types of `best`. Without
    this function, plans that could choose among all GPUs cost more than plans on H100 alone: 63.84 and 47.84
    USD/h for gpt-oss-120b; 191.36 and 95.68 USD/h for Llama-3.1-70B with a limit on TTFT only.
    """
    problem = with_effort_limit(problem, MOST_OTHER_DESIGNS_REQUESTS)
    oracle = problem.oracle
    hard_scenarios = oracle.scenarios[: oracle.may_miss + HARDEST_SCENARIOS]
    hard_problem = with_scenarios(problem, hard_scenarios, oracle.may_miss)
    kept_fleets = [] if best is None else [best]
    grown_designs = [{option for option, _ in best or ()}]
    likely_fleets = _likely_fleet_of_each_gpu_and_tp(problem, paper)
    for start in (paper.best, paper.level0.mixed, paper.level0.one_gpu, *likely_fleets):
        design = {option for option, _ in start or ()}
        # `paper.level0` may be a search without budgets, so its fleets may exceed the limits.
        if start is None or design in grown_designs or not problem.allows(start):
            continue
        if kept_fleets and _is_no_cheaper(start, kept_fleets[0]):
            continue
        grown_designs.append(design)
        most_value = objective_of(kept_fleets[0]) if kept_fleets else math.inf
        # Growth in the hardest scenarios takes few simulations, and growth in all of them then few steps.
        _, fleet = grow_until_kept(hard_problem, start, most_value=most_value)
        if fleet is not None:
            _, fleet = grow_until_kept(problem, fleet, most_value=most_value)
        if fleet is not None and not (kept_fleets and _is_no_cheaper(fleet, kept_fleets[0])):
            kept_fleets.insert(0, fleet)
    return kept_fleets


def _likely_fleet_of_each_gpu_and_tp(problem: Problem, paper: FleetSearch) -> list[Counts]:
    """For every GPU type and degree of tensor parallelism one mixed pool within the limits: with the likely
    count of workers of each option (`BoundedOption.likely`) it is the cheapest.
    """
    likely: dict[tuple[str, int], Counts] = {}
    for bounded in paper.level0.with_role("mixed"):
        fleet = owned_first(problem, ((bounded.option, bounded.likely),))
        key = bounded.option.type.gpu.name, bounded.option.type.tp
        if problem.allows(fleet) and (key not in likely or objective_of(fleet) < objective_of(likely[key])):
            likely[key] = fleet
    return sorted(likely.values(), key=objective_of)


def _remember_verdicts(oracle: Oracle, hard: Oracle, options: Sequence[Option], refuted_value: float) -> None:
    """Add to `oracle` the verdicts of a search of the hardest scenarios (`hard`).

    A fleet that misses too many of the hardest scenarios fails. One that keeps enough of them may still fail
    in other scenarios, so its verdict does not replace a failure that is known. Fleets of a lower objective
    than `refuted_value` were not simulated, so their verdicts are left out.
    """
    for fleet, holds in hard.verdicts.items():
        counts = counts_named(fleet, options)
        if holds:
            oracle.verdicts.setdefault(fleet, True)
        elif counts is not None and objective_of(counts) >= refuted_value * (1 - ROUNDING):
            oracle.verdicts[fleet] = False


def _is_no_cheaper(fleet: Counts, best: Counts) -> bool:
    """Whether a fleet is `best` itself or costs more. Another fleet at the same price may replace `best`."""
    return names_of(fleet) == names_of(best) or objective_of(fleet) > objective_of(best) * (1 + ROUNDING)


def fill_limits(problem: Problem, counts: Counts, k: int) -> Counts:
    """The fleet with as many workers of pool `k` as the limits allow, at most MOST_GROWTH times those of
    `counts`.
    """
    _, at_first = counts[k]
    for more in range((MOST_GROWTH - 1) * at_first, 0, -1):
        larger = owned_first(problem, add_workers(counts, more, [k]))
        if problem.allows(larger):
            return larger
    return counts


def grow_until_kept(
    problem: Problem, start: Counts, unused_owned: Counts = (), *, most_value: float = math.inf
) -> tuple[Problem, Counts | None]:
    """The fleet `start` with workers added until it keeps the SLO on the trace as written and misses no more
    scenarios than it may, and the problem with the hardest scenarios first.

    The fleet is None if it would exceed the limits, need over MOST_GROWTH times as many workers, or have an
    objective above `most_value`, or if the time is over. Each round adds twice as many workers as the round
    before (`_more_workers`). They join the pool where they gain the most kept scenarios for their price, or
    all pools if no pool gains any. Pools of `unused_owned` GPUs may be added, with at most the given counts.
    """
    oracle, workers_at_first = problem.oracle, workers_by_kind(start)
    counts, growth = start, 1
    missed_scenarios = list(range(len(oracle.scenarios)))
    # The later a growing fleet keeps a scenario, the harder the scenario is.
    kept_scenarios: list[int] = []

    def ordered_problem() -> Problem:
        hardest_first = [*missed_scenarios, *reversed(kept_scenarios)]
        return with_scenarios(problem, [oracle.scenarios[i] for i in hardest_first], oracle.may_miss)

    def is_allowed(counts: Counts) -> bool:
        return (
            objective_of(counts) <= most_value * (1 + ROUNDING)
            and problem.allows(counts)
            # A kind that `start` does not have counts as if it had one worker there.
            and all(
                n <= MOST_GROWTH * workers_at_first.get(kind, 1)
                for kind, n in workers_by_kind(counts).items()
            )
        )

    try:
        while True:
            newly_kept = _kept_scenarios(oracle, counts, missed_scenarios)
            kept_scenarios += newly_kept
            missed_scenarios = [i for i in missed_scenarios if i not in newly_kept]
            if len(missed_scenarios) <= oracle.may_miss and oracle.holds(counts):
                return ordered_problem(), counts
            if problem.out_of_time():
                return ordered_problem(), None
            grown = [
                add_workers(counts, _more_workers(oracle, *counts[k], growth), [k])
                for k in range(len(counts))
            ]
            for option, unused in unused_owned:
                if option not in dict(counts):  # A large gain may need all the unused GPUs at once.
                    grown += [_add_pool(counts, option, n) for n in {min(growth, unused), unused}]
            candidates = [
                fleet for fleet in (owned_first(problem, each) for each in grown) if is_allowed(fleet)
            ]
            larger = candidates[0] if candidates else None
            if len(candidates) > 1:
                # A few of the missed scenarios show which pool gains most.
                sample = missed_scenarios[: oracle.may_miss + HARDEST_SCENARIOS]
                values = [objective_of(fleet) for fleet in candidates]
                prices = [max(value - objective_of(counts), LEAST_PRICE_RISE) for value in values]
                larger = _best_gain(oracle, candidates, prices, sample)
                if larger is None:  # No pool gains a scenario, so all of them grow.
                    larger = owned_first(problem, add_workers(counts, growth))
            if larger is not None and is_allowed(larger):
                counts, growth = larger, 2 * growth
            elif growth > 1:
                growth = 1  # One worker may be within the limits that `growth` workers exceed.
            else:
                return ordered_problem(), None
    except StoppedError:  # The time ended within a simulation.
        return problem, None


def _more_workers(oracle: Oracle, option: Option, count: int, growth: int) -> int:
    """How many workers to add to a pool of `count` so that the worst loss leaves `growth` more of them.

    With one more spot worker, one more may be down at once: then adding a single worker gains nothing.
    """
    return oracle.workers_needed(option, oracle.workers_left(option, count) + growth) - count


def _missed_scenarios(oracle: Oracle, counts: Counts) -> set[int]:
    """The scenarios in which a fleet misses the SLO. They are simulated only until it is clear whether the
    fleet keeps enough of them.
    """
    missed, count = set[int](), len(oracle.scenarios)
    for first in range(0, count, WAVE):
        # It is clear once all further scenarios may be missed, or too many are missed already.
        may_miss_all_left = len(missed) + count - first <= oracle.may_miss
        if may_miss_all_left or len(missed) > oracle.may_miss:
            break
        wave = range(first, min(first + WAVE, count))
        missed |= set(wave) - set(_kept_scenarios(oracle, counts, wave))
    return missed


def _kept_scenarios(oracle: Oracle, counts: Counts, numbers: Sequence[int]) -> list[int]:
    """The numbers of those scenarios, among `numbers`, in which a fleet keeps the SLO."""

    def keeps(i: int) -> bool:
        oracle.stop_in_time()
        return oracle.scenario_oracle(i).holds(counts)

    return [i for i, is_kept in zip(numbers, run_each(keeps, numbers), strict=True) if is_kept]


def _best_gain(
    oracle: Oracle, fleets: Sequence[Counts], prices: Sequence[float], numbers: Sequence[int]
) -> Counts | None:
    """The fleet that keeps most of these scenarios for its price, the first of equal ones; None if no fleet
    keeps any. A fleet is not simulated if its price would be too high even for all of the scenarios.
    """
    best_gain, best_k = 0.0, len(fleets)
    for k in sorted(range(len(fleets)), key=lambda k: (prices[k], k)):
        most_gain = len(numbers) / prices[k]
        if most_gain < best_gain or (most_gain == best_gain and k > best_k):
            continue
        gain = len(_kept_scenarios(oracle, fleets[k], numbers)) / prices[k]
        if gain > best_gain or (gain == best_gain and k < best_k):
            best_gain, best_k = gain, k
    return fleets[best_k] if best_gain else None


def _add_pool(counts: Counts, option: Option, count: int) -> Counts:
    """The counts with one more pool, placed after the other pools of its role."""
    place = max(k for k, (other, _) in enumerate(counts) if other.role == option.role) + 1
    return (*counts[:place], (option, count), *counts[place:])
