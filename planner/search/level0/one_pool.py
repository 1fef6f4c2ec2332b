"""Level 0 with one pool: the cheapest fleet of n workers of one mixed option.

A fleet "holds" if the SLO is kept in its simulation. The search assumes that a fleet that holds also holds
with more workers (pruning_rules.py says how often that was wrong). Then the least count that holds follows by
bisection. And one simulation may rule an option out: if the most workers of it that cost less than the
incumbent (the best fleet so far) fail, fewer workers fail too.

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

PRICE_GROWTH = 1.3  # The price up to which options are simulated grows by this factor until one holds.
_FIRST_COUNT_RATIO = 1.3  # A count without a limit begins at this many times its guess.
_COUNT_GROWTH = 1.5  # It then grows by this factor until it holds.
_NEAR_RATIO = 1.05  # The first incumbent costs at most 5 % more than a price at which no option held.
_TOO_MANY_RATIO = 64  # `BoundedOption.too_many` is this many times the least or the likely count.


@dataclass(frozen=True, slots=True)
class BoundedOption:
    """An option (a worker type in a role) with bounds on its count of workers.

    No fleet with fewer than `least` can do the work, by proof (master.least_workers). `most` is what stock,
    power and budget allow. Fewer than `assumed_least` decode workers are assumed to fall behind
    (pruning_rules.SEATS). The search begins at a guess, on which no conclusion rests: `likely_decode` for
    decode workers if it is given (master.full_workers), else `likely`.
    """

    option: Option
    least: int
    most: float
    likely: int = 1
    likely_decode: int | None = None
    assumed_least: int = 1

    @property
    def least_objective(self) -> float:
        """What the least count costs, in the objective's unit."""
        return objective_of(((self.option, self.least),))

    @property
    def too_many(self) -> int:
        """The count at which a search gives up, where no limit on the count ends it before."""
        return _TOO_MANY_RATIO * max(self.least, self.likely)


@dataclass(slots=True)
class KnownCounts:
    """Bounds on the least count that suffices in one pool of a pair if the other pool takes no time
    (DesignPool in designs.py): it is above `failed` and at most `least_holding`.
    """

    failed: int
    least_holding: float = math.inf


@dataclass(slots=True)
class Level0Search:
    """State of a level-0 search: the incumbent (`best`, with its `value`), and what was learned on the way.

    Four fields are by the name of an option: `least_holding` is the least count known to hold, `most_failed`
    the largest known to fail, `learned` has the bounds of its pool in a pair, and `refuted` says why the
    option is not in the best fleet. `is_exhausted`: the search came to its end in time. `is_exact`: every
    cheaper fleet was simulated or has too few workers for the work. `assumed` are the pruning rules that were
    relied on. `cheaper` is how many fleets of level 0 are cheaper than the best one (None: infinitely many),
    `cheaper_simulated` how many of these were simulated. `counted_below` is a value and how many fleets cost
    less, which is infinite if an option has no limit (walk.py counts them once).
    """

    limits: FleetLimits
    best: Counts | None = None
    value: float = math.inf
    refuted: dict[str, Reason] = field(default_factory=dict)
    least_holding: dict[str, int] = field(default_factory=dict)
    most_failed: dict[str, int] = field(default_factory=dict)
    learned: dict[str, KnownCounts] = field(default_factory=dict)
    is_exhausted: bool = True
    is_exact: bool = False
    assumed: set[PruningRule] = field(default_factory=set)
    cheaper: int | None = None
    cheaper_simulated: int = 0
    counted_below: tuple[float, float] | None = None

    def offer(self, counts: Counts) -> None:
        """Record a fleet that holds; it becomes the best one if it is cheaper."""
        if len(counts) == 1:
            ((option, count),) = counts
            self.least_holding[option.name] = min(count, self.least_holding.get(option.name, count))
        value = objective_of(counts)
        if value < self.value * (1 - ROUNDING):
            self.best, self.value = counts, value


def first_incumbent(
    bounded_options: Sequence[BoundedOption],
    holds: Holds,
    search: Level0Search,
    out_of_time: Callable[[], bool],
) -> None:
    """Offer the search a fleet that holds and is nearly as cheap as the best of these options.

    All options are simulated with the most workers that cost less than a price. The price grows until an
    option holds. Then it is narrowed between its value and the last price at which no option held. Fleets
    that are far too small fail within a fraction of the trace, so this costs little more than the simulations
    that succeed.
    """
    available = [bounded for bounded in bounded_options if bounded.least <= bounded.most]

    def any_holds_below(value: float) -> bool:
        """Whether some option holds with the most workers that cost less; such fleets are offered."""
        holding: dict[str, Counts] = {}

        def simulate_option(bounded: BoundedOption) -> None:
            option, name = bounded.option, bounded.option.name
            count = int(min(bounded.most, largest_below(option, value), bounded.too_many))
            if count < bounded.least or count <= search.most_failed.get(name, 0):
                return  # This many workers are known to fail.
            if holds(((option, count),)):
                holding[name] = ((option, count),)
            else:
                search.most_failed[name] = count

        try:
            for wave in _waves(available):
                run_wave([partial(simulate_option, bounded) for bounded in wave])
        finally:  # Fleets that hold are offered even if the time limit ends the wave.
            for bounded in available:
                if bounded.option.name in holding:
                    search.offer(holding[bounded.option.name])
        return bool(holding)

    # A price at which no option held: at first the least of any option, as below it none is simulated.
    failed_value = min((bounded.least_objective for bounded in available), default=0.0)
    likely_value = min(
        (objective_of(((bounded.option, bounded.likely),)) for bounded in available), default=0.0
    )
    value = PRICE_GROWTH * max(failed_value, likely_value)
    highest = max((objective_of(((bounded.option, bounded.too_many),)) for bounded in available), default=0.0)
    # A price of 0 cannot grow: no option is available, or one of them has only owned GPUs, which are free.
    while 0 < value <= highest and not any_holds_below(value):
        if out_of_time():
            return
        failed_value, value = value, PRICE_GROWTH * value
    can_narrow = search.best is not None and failed_value > 0
    while can_narrow and search.value > _NEAR_RATIO * failed_value and not out_of_time():
        middle = math.sqrt(failed_value * search.value)  # The geometric mean of the two prices.
        if not any_holds_below(middle):
            failed_value = middle


def search_one_pool(
    bounded_options: Sequence[BoundedOption],
    holds: Holds,
    search: Level0Search,
    out_of_time: Callable[[], bool],
) -> None:
    """Search the cheapest fleet of one mixed option; the answer is in `search`. Options are simulated in the
    given order: if a good one comes first, the other options are ruled out with few simulations.
    """
    for wave in _waves(bounded_options):
        if out_of_time():
            search.is_exhausted = False
            return
        value = search.value
        holding: dict[str, Counts] = {}

        # The defaults bind the value and the dictionary of this wave.
        def search_option(
            bounded: BoundedOption, value: float = value, holding: dict[str, Counts] = holding
        ) -> None:
            """Find the fewest workers of one option that hold, at a price below `value`. Their fleet goes
            into `holding`; without any, the reason goes into `search.refuted`.
            """
            option, name = bounded.option, bounded.option.name
            most = min(bounded.most, largest_below(option, value))
            if most < bounded.least:
                search.refuted[name] = reason_by_bounds(bounded, value)
                return
            start = max(bounded.least, search.most_failed.get(name, 0) + 1)
            search.assumed.add(pruning_rules.MORE_MIXED)
            least_holding = search.least_holding.get(name, math.inf)
            least = least_that_holds(
                lambda n: holds(((option, n),)), start, most, bounded, least_holding=least_holding
            )
            if least is None or least > most:
                simulated = int(most) if math.isfinite(most) else bounded.too_many
                search.most_failed[name] = max(start - 1, simulated)
                why_no_more: Literal["not-tried", "not-available", "too-dear"] = "too-dear"
                if not math.isfinite(most):
                    why_no_more = "not-tried"
                elif most == bounded.most:
                    why_no_more = "not-available"
                search.refuted[name] = facts.WorkersFail(search.most_failed[name], why_no_more)
                return
            holding[name] = ((option, least),)

        try:
            run_wave([partial(search_option, bounded) for bounded in wave])
        finally:  # As above, what was found counts even if the time limit ends the wave.
            for bounded in wave:
                name = bounded.option.name
                # Reasons are taken out and put in again, so that their order is that of the options and does
                # not depend on which parallel search ended first.
                if name in search.refuted:
                    search.refuted[name] = search.refuted.pop(name)
                if name in holding:
                    search.offer(holding[name])


def least_that_holds(
    holds: Callable[[int], bool],
    least: int,
    most: float,
    bounded: BoundedOption,
    guess: int | None = None,
    least_holding: float = math.inf,
) -> int | None:
    """The smallest n in [least, most] that holds; `most` + 1 if that is known to hold and no smaller count
    does; None if `most` fails, or with an infinite `most` if `bounded.too_many` fails.

    `guess` is the answer or a little less: counts from there on are simulated in growing strides.
    `least_holding` is a count known to hold, infinite if none is.
    """
    failed = least - 1  # The largest count that is known or taken to fail.
    if guess is not None:
        stride = 1
        while guess < min(most, bounded.too_many):
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
        holding = max(failed + 1, math.ceil(_FIRST_COUNT_RATIO * bounded.likely))
        while not holds(holding):
            if holding >= bounded.too_many:
                return None
            failed, holding = holding, min(math.ceil(_COUNT_GROWTH * holding), bounded.too_many)
    middle = bounded.likely  # Counts that are far too small fail fast, so the bisection begins low.
    while holding - failed > 1:
        if not failed < middle < holding:
            middle = (failed + holding) // 2
        if holds(middle):
            holding = middle
        else:
            failed = middle
    return holding


def reason_by_bounds(bounded: BoundedOption, value: float) -> Reason:
    """Why the bounds rule an option out: its least count exceeds `most`, or costs `value` or more."""
    if bounded.least > bounded.most:
        return facts.WorkersMissing(bounded.least, bounded.most)
    return facts.WorkTooDear(bounded.least, bounded.least_objective, value)


def _waves(items: Sequence[Item]) -> list[list[Item]]:
    """The items in groups that run in parallel: first two, to find an incumbent, then WAVE at a time."""
    waves = [list(items[:2])]
    waves += [list(items[i : i + WAVE]) for i in range(2, len(items), WAVE)]
    return [wave for wave in waves if wave]
