"""The cheapest fleet that keeps the SLO in most scenarios: a chance constraint solved with sampled scenarios.

A search draws S scenarios (scenarios.py) and lets a fleet miss the SLO in `may_miss` of them.

    grow    Workers are added to the cheapest fleet on paper until it misses no more than it may. That gives
            an incumbent, and how hard each scenario is.
    search  Level 0 is searched as on paper, below the incumbent's price, in the hardest scenarios alone. If
            the fleet that is found misses too many of all scenarios, some that it misses join the hardest,
            and the search runs again. The fleet is also grown, which may give the next incumbent.

Each fleet may miss scenarios of its own. three_answers.py tests the fleet in fresh scenarios; if it fails
there, these join the S scenarios and the fleet grows again. A cheaper fleet that misses slightly too many is
tested too, because S is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from planner.domain import ROUNDING
from planner.fleet import Fleet
from planner.search.level0.one_pool import WAVE
from planner.search.level0.owned_gpus import owned_beside
from planner.search.mixed.best_fleet import FleetSearch, search_again
from planner.search.oracle.deterministic_parallel import run_each
from planner.search.oracle.fleet_counts import Counts, counts_named, names_of, objective
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.stopping import in_time
from planner.search.problem.owned_first import owned_first, workers_by_kind
from planner.search.problem.plan_problem import Problem, with_effort_limit, with_scenarios
from planner.solvers.master import Option

# The workers of a kind (owned_first.py) grow to at most this many times their number on paper; a fleet that
# still misses is taken to miss with any number.
MOST_GROWTH = 16
# The requests that a search may simulate are those of SEARCH_FLEETS fleets in all of its scenarios, and no
# fewer and no more than these.
SEARCH_FLEETS = 20
LEAST_SEARCH_REQUESTS = 3_000_000
MOST_SEARCH_REQUESTS = 8_000_000
# The price of added workers is taken to be at least this (in the objective's unit), so that free ones, on
# owned GPUs, are preferred to all others and nothing is divided by zero.
LEAST_PRICE_STEP = 1e-9
# A search begins with this many scenarios more than a fleet may miss.
HARDEST_SCENARIOS = 4


def refuted_below(problem: Problem, value: float) -> Problem:
    """The same problem, in which all fleets worth less than `value` are known to fail."""
    return replace(problem, oracle=replace(problem.oracle, refuted_below=value * (1 - ROUNDING)))


def with_search_limit(problem: Problem, most: float) -> Problem:
    """The same problem, whose search may simulate a limited number of requests, at most `most`."""
    of_fleets = SEARCH_FLEETS * len(problem.oracle.trace) * len(problem.oracle.scenarios)
    return with_effort_limit(problem, min(max(of_fleets, LEAST_SEARCH_REQUESTS), most))


def find_cheapest_kept(
    problem: Problem, paper: FleetSearch, start: Sequence[Fleet] = ()
) -> tuple[Problem, Counts | None]:
    """The problem with the hardest scenarios first, and the cheapest fleet found that misses no more of them
    than it may; None where none was found. Among equal fleets those of `start` are preferred.
    """
    unused_owned = owned_beside(problem, paper.level0, paper.best)
    ordered, best = in_time(
        lambda: grow_until_kept(problem, paper.best, unused_owned), otherwise=(problem, None)
    )
    if best is not None and objective(best) <= paper.value * (1 + ROUNDING):
        return ordered, best  # No cheaper fleet holds even on paper.
    return ordered, find_cheaper_kept(ordered, paper, best, start, refuted=paper.value)


def find_cheaper_kept(
    problem: Problem,
    paper: FleetSearch,
    best: Counts | None,
    start: Sequence[Fleet] = (),
    *,
    any_mix: bool = True,
    most: float = MOST_SEARCH_REQUESTS,
    refuted: float = -math.inf,
) -> Counts | None:
    """The cheapest fleet found, or `best` where none is cheaper. The hardest scenarios come first in
    `problem`. Fleets worth less than `refuted` are known to miss too many scenarios, because none of them
    holds on paper.

    With `any_mix` fleets of several worker types per pool are searched too, where the cheapest fleet on paper
    is such a fleet or no other fleet is known.
    """
    roles = [option.role for option, _ in paper.best]
    is_mixed = any_mix and (len(set(roles)) < len(roles) or best is None)
    oracle = problem.oracle
    start_fleets = [*start, *([] if best is None else [oracle.fleet(best)])]
    numbers = range(len(oracle.scenarios))
    hard_scenarios = set(numbers[: oracle.may_miss + HARDEST_SCENARIOS])
    # All rounds share one limit. It is a point on the search's clock, which counts simulated requests.
    deadline = with_search_limit(problem, most).deadline
    while True:
        hard_problem = with_scenarios(
            problem, [oracle.scenarios[i] for i in sorted(hard_scenarios)], oracle.may_miss
        )
        hard_problem = refuted_below(hard_problem, refuted)
        fleet = in_time(
            partial(search_again, replace(hard_problem, deadline=deadline), start_fleets, is_mixed=is_mixed),
            otherwise=None,
        )
        _remember_verdicts(oracle, hard_problem.oracle, paper.level0.options, refuted)
        if fleet is None or (best is not None and _is_no_cheaper(fleet, best)):
            return best
        missed = in_time(partial(_missed_scenarios, oracle, fleet), otherwise=None)
        if missed is None:  # The time is over.
            return best
        if len(missed) <= oracle.may_miss:
            return fleet
        dearest = math.inf if best is None else objective(best)
        # The fleet keeps enough of the hardest scenarios, so it needs little growth to keep enough of all.
        _, grown = in_time(partial(grow_until_kept, problem, fleet, most=dearest), otherwise=(problem, None))
        if grown is not None and (best is None or not _is_no_cheaper(grown, best)):
            best = grown
            start_fleets.append(oracle.fleet(best))
        hard_scenarios |= set(sorted(missed - hard_scenarios)[:HARDEST_SCENARIOS])


def grow_other_designs(problem: Problem, paper: FleetSearch, best: Counts | None) -> list[Counts]:
    """Fleets that keep enough scenarios, the cheapest first: `best`, and cheaper ones that grow from the best
    mixed pool on paper and the best fleet of one GPU type. The hardest scenarios come first in `problem`.

    Where a test has added hundreds of scenarios, the search's effort ends before it comes to other GPU types
    than those of `best`: gpt-oss-120b on any GPU was 63.84 USD/h, and on H100 alone 47.84.
    """
    oracle = problem.oracle
    hard_scenarios = oracle.scenarios[: oracle.may_miss + HARDEST_SCENARIOS]
    hard_problem = with_scenarios(problem, hard_scenarios, oracle.may_miss)
    kept = [] if best is None else [best]
    for start, _ in (paper.level0.mixed, paper.level0.one_gpu):
        if start is None or names_of(start) == names_of(paper.best):
            continue
        dearest = objective(kept[0]) if kept else math.inf
        fleet: Counts | None = start
        for each in (hard_problem, problem):
            if fleet is not None:
                _, fleet = in_time(
                    partial(grow_until_kept, each, fleet, most=dearest), otherwise=(each, None)
                )
        if fleet is not None and not (kept and _is_no_cheaper(fleet, kept[0])):
            kept.insert(0, fleet)
    return kept


def _remember_verdicts(oracle: Oracle, hard: Oracle, options: Sequence[Option], refuted: float) -> None:
    """Remember which fleets a search of the hardest scenarios has simulated.

    A fleet that misses too many of them fails. One that keeps enough of them is only worth a look,
    so it leaves a failure that is known as it is. Fleets worth less than `refuted` were not simulated.
    """
    for fleet, holds in hard.verdicts.items():
        counts = counts_named(fleet, options)
        if holds:
            oracle.verdicts.setdefault(fleet, True)
        elif counts is not None and objective(counts) >= refuted * (1 - ROUNDING):
            oracle.verdicts[fleet] = False


def _is_no_cheaper(fleet: Counts, best: Counts) -> bool:
    """Whether a fleet is `best` itself or costs more than `best`."""
    return names_of(fleet) == names_of(best) or objective(fleet) > objective(best) * (1 + ROUNDING)


def grow_until_kept(
    problem: Problem, least: Counts, unused_owned: Counts = (), *, most: float = math.inf
) -> tuple[Problem, Counts | None]:
    """Add workers to a fleet until it misses no more scenarios than it may, with the scenarios ordered
    hardest first.

    The fleet is None where it leaves the limits, needs over MOST_GROWTH times as many workers, is worth more
    than `most`, or the time is over. Each step adds workers to the pool that gains most kept scenarios for
    its price, to all pools if none gains any, and twice as many as the step before. Pools of `unused_owned`
    GPUs may be added, with at most the given counts.
    """
    oracle, workers_at_first = problem.oracle, workers_by_kind(least)
    counts, kept_scenarios, step = least, list[int](), 1
    missed_scenarios = list(range(len(oracle.scenarios)))

    def ordered_problem() -> Problem:
        return with_scenarios(
            problem,
            [oracle.scenarios[i] for i in (*missed_scenarios, *reversed(kept_scenarios))],
            oracle.may_miss,
        )

    def is_allowed(counts: Counts) -> bool:
        return (
            objective(counts) <= most * (1 + ROUNDING)
            and problem.allows(counts)
            # A kind that was added counts as one worker at first.
            and all(
                n <= MOST_GROWTH * workers_at_first.get(kind, 1)
                for kind, n in workers_by_kind(counts).items()
            )
        )

    while True:
        newly_kept = _kept_scenarios(oracle, counts, missed_scenarios)
        kept_scenarios += newly_kept
        missed_scenarios = [i for i in missed_scenarios if i not in newly_kept]
        if len(missed_scenarios) <= oracle.may_miss:
            return ordered_problem(), counts
        if problem.out_of_time():
            return ordered_problem(), None
        larger = [add_workers(counts, step, [k]) for k in range(len(counts))]
        for option, unused in unused_owned:
            if option not in dict(counts):
                larger += [_add_pool(counts, option, n) for n in {min(step, unused), unused}]
        larger = [owned_first(problem, each) for each in larger]
        larger = [each for each in larger if is_allowed(each)]
        if len(larger) > 1:
            some = missed_scenarios[: oracle.may_miss + HARDEST_SCENARIOS]
            prices = [max(objective(each) - objective(counts), LEAST_PRICE_STEP) for each in larger]
            kept_counts = _count_kept(oracle, larger, some)
            gains = [kept / price for kept, price in zip(kept_counts, prices, strict=True)]
            best = int(np.argmax(gains))
            larger = [larger[best] if gains[best] else owned_first(problem, add_workers(counts, step))]
        if larger and is_allowed(larger[0]):
            counts, step = larger[0], 2 * step
        elif step > 1:
            step = 1  # One worker may still fit into the limits that `step` workers exceed.
        else:
            return ordered_problem(), None


def _missed_scenarios(oracle: Oracle, counts: Counts) -> set[int]:
    """The scenarios in which a fleet misses the SLO, as far as they decide whether the fleet keeps enough."""
    missed, count = set[int](), len(oracle.scenarios)
    for first in range(0, count, WAVE):
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
        return oracle.scenario_oracle(i).holds([counts])[0]

    return [i for i, is_kept in zip(numbers, run_each(keeps, numbers), strict=True) if is_kept]


def _count_kept(oracle: Oracle, fleets: Sequence[Counts], numbers: Sequence[int]) -> list[int]:
    """For each fleet, the number of these scenarios in which it keeps the SLO."""
    return run_each(lambda counts: len(_kept_scenarios(oracle, counts, numbers)), fleets)


def add_workers(counts: Counts, more: int, pools: Sequence[int] | None = None) -> Counts:
    """The counts with `more` workers added to these pools, by default to all."""
    return tuple(
        (option, count + (more if pools is None or k in pools else 0))
        for k, (option, count) in enumerate(counts)
    )


def _add_pool(counts: Counts, option: Option, count: int) -> Counts:
    """The counts with one more pool, placed after the other pools of its role."""
    place = max(k for k, (other, _) in enumerate(counts) if other.role == option.role) + 1
    return (*counts[:place], (option, count), *counts[place:])
