"""Level 0 with one pool: the cheapest fleet of n workers of one mixed option.

A fleet "holds" if the SLO is kept in its simulation. The search assumes that a fleet that holds also holds
with more workers (pruning_rules.py says how often that was wrong). Then the least count that holds follows by
bisection. And one simulation may rule an option out: if the most workers of it that cost less than the
incumbent (the best fleet so far) fail, all fewer fail too.

No option is simulated below the count that the SLO requires under any policy (master.least_workers). Fleets
of a prefill and a decode pool: two_pools.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from planner.documents import facts
from planner.documents.facts import PruningRule, Reason
from planner.domain import ROUNDING
from planner.search.level0 import pruning_rules
from planner.search.oracle.deterministic_parallel import run_wave
from planner.search.oracle.fleet_counts import Counts, largest_below, objective_of
from planner.solvers.master import FleetLimits, Option

Item = TypeVar("Item")

Holds = Callable[[Counts], bool]
"""Simulates a fleet and returns whether it keeps the SLO."""

WAVE = 4
"""This many searches run in parallel and are compared with the same incumbent. The number is fixed, so that
answers do not depend on the number of cores.
"""

# The numbers below are set by hand.

# The price up to which options are simulated grows by this factor until one holds. A count without a limit
# begins at its guess times this factor.
PRICE_GROWTH = 1.3
_COUNT_GROWTH = 1.5  # A count without a limit grows by this factor until it holds.
_NEAR_RATIO = 1.05  # The first incumbent costs at most 5 % more than a price at which no option held.
_TOO_MANY_RATIO = 64  # `Bounded.too_many` is this many times the least or the likely count.


@dataclass(frozen=True, slots=True)
class Bounded:
    """An option (a worker type in a role) with a proved least count and the most that stock, power and budget
    allow.

    The search begins at a guess, on which no conclusion rests: `likely` in any pool, and in a decode pool
    `busy`, the workers that keep up if each has as many requests as its KV cache holds (master.full_workers).
    Fewer than `few` decode workers are assumed to fall behind (pruning_rules.SEATS).
    """

    option: Option
    least: int
    most: float
    likely: int = 1
    busy: int | None = None
    few: int = 1

    @property
    def least_objective(self) -> float:
        """The objective of the least count."""
        return objective_of(((self.option, self.least),))

    @property
    def too_many(self) -> int:
        """The count at which a search gives up, where no limit on the count ends it before."""
        return _TOO_MANY_RATIO * max(self.least, self.likely)


@dataclass(slots=True)
class Learned:
    """What is known of the least count of a pool alone: above `failed`, at most `least_holding`."""

    failed: int
    least_holding: float = math.inf


@dataclass(slots=True)
class Search:
    """State of a level-0 search: the incumbent (`best`, with its `value`), and what was learned on the way.

    Four fields say something of each option, by its name: `least_holding` is the least count known to hold,
    `most_failed` the largest known to fail, `learned` what is known of its pool beside a perfect partner,
    `refuted` why it is not in the best fleet. `is_exhausted`: the search came to its end in time. `is_exact`:
    every cheaper fleet was simulated or has too few workers for the work. `assumed` are the pruning rules
    that were relied on. `cheaper` is how many fleets of level 0 are cheaper than the best one (None:
    infinitely many), `cheaper_simulated` how many of these were simulated. `counted` caches a value and the
    number of fleets below it.
    """

    limits: FleetLimits
    best: Counts | None = None
    value: float = math.inf
    refuted: dict[str, Reason] = field(default_factory=dict)
    least_holding: dict[str, int] = field(default_factory=dict)
    most_failed: dict[str, int] = field(default_factory=dict)
    learned: dict[str, Learned] = field(default_factory=dict)
    is_exhausted: bool = True
    is_exact: bool = False
    assumed: set[PruningRule] = field(default_factory=set)
    cheaper: int | None = None
    cheaper_simulated: int = 0
    counted: tuple[float, float] | None = None

    def offer(self, counts: Counts) -> None:
        """Record a fleet that holds; it becomes the best one if it is cheaper."""
        if len(counts) == 1:
            ((option, count),) = counts
            self.least_holding[option.name] = min(count, self.least_holding.get(option.name, count))
        value = objective_of(counts)
        if value < self.value * (1 - ROUNDING):
            self.best, self.value = counts, value


def first_incumbent(
    bounded: Sequence[Bounded], holds: Holds, search: Search, out_of_time: Callable[[], bool]
) -> None:
    """Offer the search a fleet that holds and is nearly as cheap as the best of these options.

    All options are simulated with the most workers that cost less than a price. The price grows until an
    option holds. Then it is narrowed between its value and the last price at which no option held. Fleets
    that are far too small fail within a fraction of the trace, so this costs little more than the simulations
    that succeed.
    """
    available = [item for item in bounded if item.least <= item.most]

    def any_holds_below(value: float) -> bool:
        """Whether some option holds with the most workers that cost less; such fleets are offered."""
        holding: dict[str, Counts] = {}

        def simulate_option(item: Bounded) -> None:
            option, name = item.option, item.option.name
            count = int(min(item.most, largest_below(option, value), item.too_many))
            if count < item.least or count <= search.most_failed.get(name, 0):
                return  # This many workers are known to fail.
            if holds(((option, count),)):
                holding[name] = ((option, count),)
            else:
                search.most_failed[name] = count

        try:
            for wave in _waves(available):
                run_wave([partial(simulate_option, item) for item in wave])
        finally:  # Fleets that hold are offered even if the time limit ends the wave.
            for item in available:
                if item.option.name in holding:
                    search.offer(holding[item.option.name])
        return bool(holding)

    # A price at which no option held: at first the least of any option, as below it none is simulated.
    failed = min((item.least_objective for item in available), default=0.0)
    likely_value = min((objective_of(((item.option, item.likely),)) for item in available), default=0.0)
    value = PRICE_GROWTH * max(failed, likely_value)
    highest = max((objective_of(((item.option, item.too_many),)) for item in available), default=0.0)
    while 0 < value <= highest and not any_holds_below(value):  # The price is 0 if no option is available.
        if out_of_time():
            return
        failed, value = value, PRICE_GROWTH * value
    while search.value > _NEAR_RATIO * failed > 0 and math.isfinite(search.value) and not out_of_time():
        middle = math.sqrt(failed * search.value)  # The geometric mean of the two prices.
        if not any_holds_below(middle):
            failed = middle


def search_one_pool(
    bounded: Sequence[Bounded], holds: Holds, search: Search, out_of_time: Callable[[], bool]
) -> None:
    """Search the cheapest fleet of one mixed option; the answer is in `search`. Options are simulated in the
    given order: if a good one comes first, the others are ruled out with few simulations.
    """
    for wave in _waves(bounded):
        if out_of_time():
            search.is_exhausted = False
            return
        value = search.value
        holding: dict[str, Counts] = {}

        # The defaults bind the value and the dictionary of this wave.
        def search_option(item: Bounded, value: float = value, holding: dict[str, Counts] = holding) -> None:
            """Find the fewest workers of one option that hold, at a price below `value`. Their fleet goes
            into `holding`; without any, the reason goes into `search.refuted`.
            """
            option, name = item.option, item.option.name
            most = min(item.most, largest_below(option, value))
            if most < item.least:
                search.refuted[name] = by_bound(item, value)
                return
            start = max(item.least, search.most_failed.get(name, 0) + 1)
            search.assumed.add(pruning_rules.MORE_MIXED)
            least_holding = search.least_holding.get(name, math.inf)
            least = least_that_holds(
                lambda n: holds(((option, n),)), start, most, item, least_holding=least_holding
            )
            if least is None or least > most:
                simulated = int(most) if math.isfinite(most) else item.too_many
                search.most_failed[name] = max(start - 1, simulated)
                why_no_more: Literal["not-tried", "not-available", "too-dear"] = "too-dear"
                if not math.isfinite(most):
                    why_no_more = "not-tried"
                elif most == item.most:
                    why_no_more = "not-available"
                search.refuted[name] = facts.WorkersFail(search.most_failed[name], why_no_more)
                return
            holding[name] = ((option, least),)

        try:
            run_wave([partial(search_option, item) for item in wave])
        finally:  # As above: what was found counts even if the time limit ends the wave.
            for item in wave:
                name = item.option.name
                # Reasons are taken out and put in again, so that they are in the order of the options and not
                # in that in which the parallel searches ended.
                if name in search.refuted:
                    search.refuted[name] = search.refuted.pop(name)
                if name in holding:
                    search.offer(holding[name])


def least_that_holds(
    holds: Callable[[int], bool],
    least: int,
    most: float,
    item: Bounded,
    guess: int | None = None,
    least_holding: float = math.inf,
) -> int | None:
    """The smallest n in [least, most] that holds; `most` + 1 if that is known to hold and no smaller count
    does; None if `most` fails, or with an infinite `most` if `item.too_many` fails.

    `guess` is the answer or a little less: counts from there on are simulated in growing strides.
    `least_holding` is a count known to hold, infinite if none is.
    """
    failed = least - 1  # From here on the largest count that is taken to fail.
    if guess is not None:
        stride = 1
        while guess < min(most, item.too_many):
            if holds(guess):
                least_holding = guess
                break
            failed, guess, stride = guess, guess + stride, 2 * stride
    # `holding` is the smallest count that is known to hold: the upper end of the bisection.
    if math.isfinite(least_holding) and least_holding <= most + 1:
        holding = int(least_holding)
    elif math.isfinite(most):
        holding = int(most)
        if holding <= failed or not holds(holding):
            return None
    else:
        holding = max(failed + 1, math.ceil(PRICE_GROWTH * item.likely))
        while not holds(holding):
            if holding >= item.too_many:
                return None
            failed, holding = holding, min(math.ceil(_COUNT_GROWTH * holding), item.too_many)
    middle = item.likely  # Counts that are far too small fail fast, so the bisection begins low.
    while holding - failed > 1:
        if not failed < middle < holding:
            middle = (failed + holding) // 2
        if holds(middle):
            holding = middle
        else:
            failed = middle
    return holding


def by_bound(item: Bounded, value: float) -> Reason:
    """Why an option is ruled out by its least count alone: it exceeds `most`, or costs `value` or more."""
    if item.least > item.most:
        return facts.WorkersMissing(item.least, item.most)
    return facts.WorkTooDear(item.least, item.least_objective, value)


def _waves(items: Sequence[Item]) -> list[list[Item]]:
    """The items in groups that run in parallel: two, which give the others an incumbent, then WAVE each."""
    waves = [list(items[:2])]
    waves += [list(items[i : i + WAVE]) for i in range(2, len(items), WAVE)]
    return [wave for wave in waves if wave]
