"""Level 0: the cheapest fleet with one worker type per pool, exactly.

A fleet of level 0 is n workers of one mixed option, or p workers of a prefill option with d of a decode
option. A fleet "holds" if the SLO is kept in its simulation. The search assumes that what holds with some
workers holds with more (pruning_rules.py says how often that was wrong). So

  one pool    the least count that holds is found by bisection, and an option is refuted by one failure at the
              largest count that would still be cheaper than the best fleet known (the incumbent);
  two pools   the counts that hold are the cells above a falling staircase, whose cheapest corner is found by
              walking it.

No option is tried below the count that the SLO forces under any policy (master.least_workers). Two pools are
searched in two_pools.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from planner.documents import facts
from planner.documents.facts import Reason, Shortcut
from planner.search.level0 import pruning_rules
from planner.search.oracle.fleet_counts import Counts, largest_below, objective
from planner.solvers.master import FleetLimits, Option

Item = TypeVar("Item")

Holds = Callable[[Sequence[Counts]], list[bool]]
"""Simulates fleets, in parallel where it can, and returns which of them keep the SLO."""

WAVE = 4
"""Searches that run in parallel against one incumbent; fixed, so that answers do not depend on the cores."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """An option with a proved least count and the most that stock, power and budget allow.

    Two guesses say where to look first; no conclusion rests on them: `likely` for any pool, and `busy` for a
    decode pool, the workers that keep up when every seat is taken, which is often right to a worker. Fewer
    than `few` decode workers are assumed to fall behind (pruning_rules.SEATS).
    """

    option: Option
    least: int
    most: float
    likely: int = 1
    busy: int | None = None
    few: int = 1

    @property
    def least_objective(self) -> float:
        return objective(((self.option, self.least),))

    @property
    def too_many(self) -> int:
        """The count at which a search without limits gives up."""
        return _TOO_MANY * max(self.least, self.likely)


@dataclass(slots=True)
class Learned:
    """What is known of the least count of a pool alone: above `failed`, at most `least_holding`."""

    failed: int
    least_holding: float = math.inf


@dataclass(slots=True)
class Search:
    """State of a level-0 search: the incumbent, why each option is out, and counts learned on the way.

    `smallest`, `beyond`, `learned` and `refuted` have the names of options as keys: the least count known to
    hold, the largest known to fail, what its pool does alone, and why the option is out. `is_exhausted`: the
    search came to its end in time. `is_exact`: every cheaper fleet was simulated or has too few workers for
    the work. `cheaper` counts the fleets of level 0 below the best one (None: there is no end to them),
    `cheaper_simulated` those of them that were simulated; `counted` caches a value and its count.
    """

    limits: FleetLimits
    best: Counts | None = None
    value: float = math.inf
    refuted: dict[str, Reason] = field(default_factory=dict)
    smallest: dict[str, int] = field(default_factory=dict)
    beyond: dict[str, int] = field(default_factory=dict)
    learned: dict[str, Learned] = field(default_factory=dict)
    is_exhausted: bool = True
    is_exact: bool = False
    assumed: set[Shortcut] = field(default_factory=set)
    cheaper: int | None = None
    cheaper_simulated: int = 0
    counted: tuple[float, float] | None = None

    def offer(self, counts: Counts) -> None:
        if len(counts) == 1:
            ((option, count),) = counts
            self.smallest[option.name] = min(count, self.smallest.get(option.name, count))
        value = objective(counts)
        if value < self.value * (1 - 1e-9):
            self.best, self.value = counts, value


def first_incumbent(
    bounded: Sequence[Bounded],
    holds: Holds,
    search: Search,
    run: Callable[[Sequence[Callable[[], None]]], None],
    out_of_time: Callable[[], bool],
) -> None:
    """A fleet that holds and is nearly as cheap as the best of these options.

    All options are tried at one price, which grows until one of them holds, and is then narrowed between the
    last price at which none held and that one. Fleets that are far too small fail within a fraction of the
    trace, so this costs little more than the simulations that succeed.
    """
    alive = [item for item in bounded if item.least <= item.most]

    def any_holds_below(value: float) -> bool:
        holding: dict[str, Counts] = {}

        def look(item: Bounded) -> None:
            option, name = item.option, item.option.name
            count = int(min(item.most, largest_below(option, value), item.too_many))
            if count < max(item.least, search.beyond.get(name, 0) + 1):
                return
            if holds([((option, count),)])[0]:
                holding[name] = ((option, count),)
            else:
                search.beyond[name] = count

        try:
            for wave in _waves(alive):
                run([lambda item=item: look(item) for item in wave])  # type: ignore[misc]
        finally:  # What was found counts even where the time limit ends the wave.
            for item in alive:
                if item.option.name in holding:
                    search.offer(holding[item.option.name])
        return bool(holding)

    failed = min((item.least_objective for item in alive), default=0.0)
    value = (
        max(failed, min((objective(((item.option, item.likely),)) for item in alive), default=0.0))
        * _FIRST_PRICE
    )
    highest = max((objective(((item.option, item.too_many),)) for item in alive), default=0.0)
    while 0 < value <= highest and not any_holds_below(value):
        if out_of_time():
            return
        failed, value = value, _FIRST_PRICE * value
    while search.value > _NEAR * failed > 0 and math.isfinite(search.value) and not out_of_time():
        middle = math.sqrt(failed * search.value)
        if not any_holds_below(middle):
            failed = middle


def search_one_pool(
    bounded: Sequence[Bounded],
    holds: Holds,
    search: Search,
    run: Callable[[Sequence[Callable[[], None]]], None],
    out_of_time: Callable[[], bool],
) -> None:
    """Cheapest fleet of one mixed option; updates `search`. `run` executes closures side by side.

    Options come in the order in which they should be tried; a good first one makes the rest cheap to refute.
    """
    for wave in _waves(bounded):
        if out_of_time():
            search.is_exhausted = False
            return
        value = search.value
        holding: dict[str, Counts] = {}

        def look(item: Bounded, value: float = value, holding: dict[str, Counts] = holding) -> None:
            option, name = item.option, item.option.name
            most = min(item.most, largest_below(option, value))
            if most < item.least:
                search.refuted[name] = by_bound(item, value)
                return
            start = max(item.least, search.beyond.get(name, 0) + 1)
            search.assumed.add(pruning_rules.MORE_MIXED)
            held = search.smallest.get(name, math.inf)
            least = least_that_holds(
                lambda n: holds([((option, n),)])[0], start, most, item, least_holding=held
            )
            if least is None or least > most:
                simulated = int(most) if math.isfinite(most) else item.too_many
                search.beyond[name] = max(start - 1, simulated)
                more: Literal["not-tried", "not-available", "too-dear"] = (
                    "not-tried"
                    if not math.isfinite(most)
                    else "not-available"
                    if most == item.most
                    else "too-dear"
                )
                search.refuted[name] = facts.WorkersFail(search.beyond[name], more)
                return
            holding[name] = ((option, least),)

        try:
            run([lambda item=item: look(item) for item in wave])  # type: ignore[misc]
        finally:
            for item in wave:
                if (name := item.option.name) in search.refuted:  # In the options' order.
                    search.refuted[name] = search.refuted.pop(name)
                if name in holding:
                    search.offer(holding[name])


_FIRST_PRICE = 1.3  # The price at which all options are tried grows by this factor until one holds.
_NEAR = 1.05  # The first incumbent costs at most 5 % more than a price at which none held.
_TOO_MANY = 64  # A search without limits gives up at so many times the likely count.


def least_that_holds(
    holds: Callable[[int], bool],
    least: int,
    most: float,
    item: Bounded,
    near: int | None = None,
    least_holding: float = math.inf,
) -> int | None:
    """Smallest n in [least, most] that holds; None if `most` does not, or `item.too_many` without a limit.

    `near` is a guess at or a little below the answer. `least_holding` is a count known to hold.
    """
    failed = least - 1
    if near is not None:
        stride = 1
        while near < min(most, item.too_many):
            if holds(near):
                least_holding = near
                break
            failed, near, stride = near, near + stride, 2 * stride
    if math.isfinite(least_holding) and least_holding <= most + 1:
        high = int(least_holding)
    elif math.isfinite(most):
        high = int(most)
        if high <= failed or not holds(high):
            return None
    else:
        high = max(failed + 1, math.ceil(_FIRST_PRICE * item.likely))
        while not holds(high):
            if high >= item.too_many:
                return None
            failed, high = high, min(math.ceil(1.5 * high), item.too_many)
    middle = item.likely  # Counts that are far too small fail fast, so the bisection begins low.
    while high - failed > 1:
        if not failed < middle < high:
            middle = (failed + high) // 2
        if holds(middle):
            high = middle
        else:
            failed = middle
    return high


def by_bound(item: Bounded, value: float) -> Reason:
    """Why an option is out by its least count alone: not available, or not below `value`."""
    if item.least > item.most:
        return facts.WorkersMissing(item.least, item.most)
    return facts.WorkTooDear(item.least, item.least_objective, value)


def _waves(items: Sequence[Item]) -> list[list[Item]]:
    """The first two items, which make the incumbent, then waves of WAVE."""
    waves = [list(items[:2])]
    waves += [list(items[i : i + WAVE]) for i in range(2, len(items), WAVE)]
    return [wave for wave in waves if wave]
