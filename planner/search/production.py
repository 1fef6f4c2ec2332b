"""The cheapest fleet that keeps the SLO in most scenarios: a chance constraint solved with sampled scenarios.

A search draws S scenarios (scenarios.py) and lets a fleet miss the SLO in `may_miss` of them.

    grow    Workers are added to the cheapest fleet on paper until it misses no more than it may. That gives
            an incumbent, and how hard each scenario is.
    search  Level 0 is searched as on paper, below the incumbent's price, in the hardest scenarios alone. The
            scenarios that its fleet misses among the others join them, until a fleet keeps enough of all. A
            fleet that misses too many is grown too, and may be the next incumbent.

Each fleet may miss scenarios of its own. answers.py tests the fleet in fresh scenarios; if it fails there,
these join the S scenarios and the fleet grows again. A cheaper fleet that misses slightly too many is tested
too, because S is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from planner.documents.safety import Safety
from planner.fleet import Fleet
from planner.search.best_fleet import Found, search_again
from planner.search.fleets import Counts, named, objective
from planner.search.futures import Future
from planner.search.one_pool import WAVE, in_time
from planner.search.oracle import Oracle
from planner.search.owned import owned_beside, owned_first, workers_by_machine
from planner.search.problem import Problem, silent
from planner.search.waves import of_each
from planner.solvers.master import Option

# A machine grows to at most this many times its workers on paper; a fleet that misses then is taken to miss
# with any number.
GROWN_MOST = 16
# A search may simulate at least this many requests.
LEAST_SEARCH = 3_000_000
# A search may simulate 20 fleets in all of its scenarios where that is more, and at most 8 million requests.
SEARCH_FLEETS, MOST_SEARCH = 20, 8_000_000
# The price of added workers is taken to be at least this, so that free ones (owned GPUs) are preferred.
LEAST_DEARER = 1e-9
# A search begins with this many scenarios more than a fleet may miss.
HARDEST = 4


def may_miss(safety: Safety, count: int) -> int:
    """The most of `count` scenarios that a fleet may miss."""
    return int((1 - safety.kept_in_frac) * count + 1e-9)


def in_production(problem: Problem) -> Problem:
    """The same problem in the scenarios that a search sees; the problem itself without `safety`."""
    if problem.task.safety is None or problem.searched is None:
        return problem
    count = problem.searched.count
    futures = [problem.searched[i] for i in range(count)]
    return in_most(problem, futures, may_miss(problem.task.safety, count))


def in_most(problem: Problem, futures: Sequence[Future], may_miss: int) -> Problem:
    """The same problem in these scenarios too, of which a fleet may miss `may_miss`."""
    oracle = replace(problem.oracle, futures=tuple(futures), may_miss=may_miss)
    return replace(problem, oracle=oracle, progress=silent)


def refuted_below(problem: Problem, value: float) -> Problem:
    """The same problem, in which all fleets worth less than `value` are known to fail."""
    return replace(problem, oracle=replace(problem.oracle, refuted_below=value * (1 - 1e-9)))


def limited(problem: Problem, most: float) -> Problem:
    """The same problem, whose search may simulate a limited number of requests, at most `most`."""
    return replace(problem, most_effort=problem.oracle.effort() + _effort(problem, most))


def _effort(problem: Problem, most: float) -> float:
    """The requests that a search may simulate, at most `most`."""
    of_fleets = SEARCH_FLEETS * len(problem.oracle.trace) * len(problem.oracle.futures)
    return min(max(of_fleets, LEAST_SEARCH), most)


def cheapest_kept(
    problem: Problem, paper: Found, start: Sequence[Fleet] = ()
) -> tuple[Problem, Counts | None]:
    """The problem with the hardest scenarios first, and the cheapest fleet found that misses no more of them
    than it may; None where none was found. Among equal fleets those of `start` are preferred.
    """
    beside = owned_beside(problem, paper.level0, paper.best)
    ordered, best = in_time(lambda: grown(problem, paper.best, beside), (problem, None))
    if best is not None and objective(best) <= paper.value * (1 + 1e-9):
        return ordered, best
    return ordered, cheaper_kept(ordered, paper, best, start, refuted=paper.value)


def cheaper_kept(
    problem: Problem,
    paper: Found,
    best: Counts | None,
    start: Sequence[Fleet] = (),
    *,
    any_mix: bool = True,
    most: float = MOST_SEARCH,
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
    known = [*start, *([] if best is None else [oracle.fleet(best)])]
    numbers = range(len(oracle.futures))
    hard = set(numbers[: oracle.may_miss + HARDEST])
    left = _effort(problem, most)
    while True:
        some = in_most(problem, [oracle.futures[i] for i in sorted(hard)], oracle.may_miss)
        some = refuted_below(some, refuted)
        found = in_time(
            partial(search_again, replace(some, most_effort=left), known, is_mixed=is_mixed), best
        )
        left -= some.oracle.effort()
        oracle.told.update(some.oracle.told)
        if found is None or (best is not None and _is_no_cheaper(found, best)):
            return best
        missed = in_time(partial(_missed, oracle, found), None)
        if missed is None:
            return best
        if len(missed) <= oracle.may_miss:
            return found
        dearest = math.inf if best is None else objective(best)
        # The fleet keeps enough of the hardest scenarios, so it needs little growth to keep enough of all.
        more = in_time(partial(grown, problem, found, most=dearest), (problem, None))[1]
        if more is not None and (best is None or not _is_no_cheaper(more, best)):
            best = more
            known.append(oracle.fleet(best))
        hard |= set(sorted(missed - hard)[:HARDEST])


def _is_no_cheaper(found: Counts, best: Counts) -> bool:
    """Whether a fleet is `best` itself or costs more than `best`."""
    return named(found) == named(best) or objective(found) > objective(best) * (1 + 1e-9)


def grown(
    problem: Problem, least: Counts, beside: Counts = (), *, most: float = math.inf
) -> tuple[Problem, Counts | None]:
    """Add workers to a fleet until it misses no more scenarios than it may, with the scenarios ordered
    hardest first.

    The fleet is None where it leaves the limits, needs over MOST_GROWTH times as many workers, is worth more
    than `most`, or the time is over. Each step adds workers to the pool that gains most kept scenarios for
    its price, and twice as many as the step before. The pools `beside` the fleet may be added, with at most
    the given counts.
    """
    oracle, first = problem.oracle, workers_by_machine(least)
    counts, easier, step = least, list[int](), 1
    left = list(range(len(oracle.futures)))

    def ordered() -> Problem:
        return in_most(problem, [oracle.futures[i] for i in (*left, *reversed(easier))], oracle.may_miss)

    def may_be(counts: Counts) -> bool:
        return (
            objective(counts) <= most * (1 + 1e-9)
            and problem.allows(counts)
            and all(n <= GROWN_MOST * first.get(m, 1) for m, n in workers_by_machine(counts).items())
        )

    while True:
        kept = _kept(oracle, counts, left)
        easier += kept
        left = [i for i in left if i not in kept]
        if len(left) <= oracle.may_miss:
            return ordered(), counts
        if problem.is_late():
            return ordered(), None
        more = [with_more(counts, step, [k]) for k in range(len(counts))]
        idle = [(option, count) for option, count in beside if option not in dict(counts)]
        more += [_with_pool(counts, option, n) for option, own in idle for n in {min(step, own), own}]
        more = [owned_first(problem, each) for each in more]
        more = [each for each in more if may_be(each)]
        if len(more) > 1:
            some = left[: oracle.may_miss + HARDEST]
            dearer = [max(objective(each) - objective(counts), LEAST_DEARER) for each in more]
            won = [kept / dear for kept, dear in zip(_kept_by(oracle, more, some), dearer, strict=True)]
            more = (
                [more[int(np.argmax(won))]] if any(won) else [owned_first(problem, with_more(counts, step))]
            )
        if more and may_be(more[0]):
            counts, step = more[0], 2 * step
        elif step > 1:
            step = 1
        else:
            return ordered(), None


def _missed(oracle: Oracle, counts: Counts) -> set[int]:
    """The scenarios in which a fleet misses the SLO, as far as they decide whether the fleet keeps enough."""
    missed, count = set[int](), len(oracle.futures)
    for first in range(0, count, WAVE):
        if len(missed) + count - first <= oracle.may_miss or len(missed) > oracle.may_miss:
            break
        wave = range(first, min(first + WAVE, count))
        missed |= set(wave) - set(_kept(oracle, counts, wave))
    return missed


def _kept(oracle: Oracle, counts: Counts, numbers: Sequence[int]) -> list[int]:
    """Those of these scenarios in which a fleet keeps the SLO."""

    def holds(i: int) -> bool:
        oracle.stop_in_time()
        return oracle.in_future(i).holds([counts])[0]

    return [i for i, is_kept in zip(numbers, of_each(holds, numbers), strict=True) if is_kept]


def _kept_by(oracle: Oracle, fleets: Sequence[Counts], numbers: Sequence[int]) -> list[int]:
    """In how many of these scenarios each of the fleets keeps the SLO."""
    return of_each(lambda counts: len(_kept(oracle, counts, numbers)), fleets)


def with_more(counts: Counts, more: int, pools: Sequence[int] | None = None) -> Counts:
    """The counts with `more` workers added to these pools, by default to all."""
    return tuple(
        (option, count + (more if pools is None or k in pools else 0))
        for k, (option, count) in enumerate(counts)
    )


def _with_pool(counts: Counts, option: Option, count: int) -> Counts:
    """The counts with one more pool, placed after the other pools of its role."""
    at = max(k for k, (other, _) in enumerate(counts) if other.role == option.role) + 1
    return (*counts[:at], (option, count), *counts[at:])
