"""Level 0: the cheapest fleet with one worker type per pool, exactly.

A fleet of level 0 is n workers of one mixed option, or p workers of a prefill option with d of a decode
option. "Holds" means that the simulator says the SLO is kept; it is monotone: what holds with some workers
holds with more (tested in the suite, named in the certificate). So

  one pool    the least count that holds is found by bisection, and an option is refuted by one failure at the
              largest count that would still be cheaper than the best fleet known (the incumbent);
  two pools   the counts that hold are the cells above a falling staircase. Its cheapest corner is found by
              walking it: the corner (most p, most d) under the incumbent refutes the whole pair if it fails;
              otherwise the least d beside most p, then for each d the least p.

Bounds that need no walk: the work that the SLO obliges under any policy (master.least_workers); for a prefill
pool the least count that keeps the limits on TTFT with unlimited decode (every request then leaves with its
first token). Where there are very many pairs, also for a decode pool the least count that holds if every
prompt arrives prefilled; that takes for granted that a queue before prefill does not help decode, which the
certificate then names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from planner.solvers.master import Limits, Option

Item = TypeVar("Item")
Counts = tuple[tuple[Option, int], ...]
"""A fleet as options with their counts."""
Holds = Callable[[Sequence[Counts]], list[bool]]
"""Simulates fleets (side by side) and says which of them keep the SLO."""
MANY_PAIRS = 200
WAVE = 4
"""Searches that run side by side against one incumbent; fixed, so that answers do not depend on the cores."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """An option with a valid lower bound on its count, and its cap from stock, power and budget.

    `likely` is a count to look at first; no conclusion rests on it.
    """

    option: Option
    least: int
    most: float
    likely: int = 1

    @property
    def least_objective(self) -> float:
        return self.least * self.option.objective

    @property
    def too_many(self) -> int:
        """Where an unlimited search gives up."""
        return _TOO_MANY * max(self.least, self.likely)


@dataclass(slots=True)
class Search:
    """State of a level-0 search: the incumbent, why each option is out, and counts learned on the way."""

    limits: Limits
    best: Counts | None = None
    value: float = math.inf
    refuted: dict[str, str] = field(default_factory=dict)
    smallest: dict[str, int] = field(default_factory=dict)  # option name -> least count known to hold (lead)
    beyond: dict[str, int] = field(default_factory=dict)  # option name -> largest count known to fail
    is_exhausted: bool = True
    trusts_separation: bool = False  # decode pools were cut by their least count behind instant prefill

    def offer(self, counts: Counts) -> None:
        if len(counts) == 1:
            ((option, count),) = counts
            self.smallest[option.name] = min(count, self.smallest.get(option.name, count))
        value = objective(counts)
        if value < self.value * (1 - 1e-9):
            self.best, self.value = counts, value


def objective(counts: Iterable[tuple[Option, int]]) -> float:
    return sum(option.objective * count for option, count in counts)


def largest_below(option: Option, value: float, fixed: float = 0.0) -> float:
    """Largest count of an option whose objective plus `fixed` is strictly less than `value`."""
    if not math.isfinite(value):
        return math.inf
    if option.objective == 0:
        return math.inf if fixed < value else -1
    return math.ceil((value * (1 - 1e-9) - fixed) / option.objective) - 1


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
        found: dict[str, Counts] = {}

        def look(item: Bounded) -> None:
            option, name = item.option, item.option.name
            count = int(min(item.most, largest_below(option, value), item.too_many))
            if count < max(item.least, search.beyond.get(name, 0) + 1):
                return
            if holds([((option, count),)])[0]:
                found[name] = ((option, count),)
            else:
                search.beyond[name] = count

        for wave in _waves(alive):
            run([lambda item=item: look(item) for item in wave])  # type: ignore[misc]
        for item in alive:
            if item.option.name in found:
                search.offer(found[item.option.name])
        return bool(found)

    failed = min((item.least_objective for item in alive), default=0.0)
    value = (
        max(failed, min((item.likely * item.option.objective for item in alive), default=0.0)) * _FIRST_PRICE
    )
    highest = max((item.too_many * item.option.objective for item in alive), default=0.0)
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
        found: dict[str, Counts] = {}

        def look(item: Bounded, value: float = value, found: dict[str, Counts] = found) -> None:
            option, name = item.option, item.option.name
            most = min(item.most, largest_below(option, value))
            if most < item.least:
                search.refuted[name] = _by_bound(item, value)
                return
            start = max(item.least, search.beyond.get(name, 0) + 1)
            least = least_that_holds(lambda n: holds([((option, n),)])[0], start, most, item)
            if least is None:
                simulated = int(most) if math.isfinite(most) else item.too_many
                search.beyond[name] = max(start - 1, simulated)
                search.refuted[name] = f"{search.beyond[name]} workers fail in simulation"
                if not math.isfinite(most):
                    search.refuted[name] += ", more were not tried"
                elif most == item.most:
                    search.refuted[name] += ", more are not available"
                else:
                    search.refuted[name] += ", one more costs as much as the best fleet"
                return
            found[name] = ((option, least),)

        run([lambda item=item: look(item) for item in wave])  # type: ignore[misc]
        for item in wave:
            if item.option.name in found:
                search.offer(found[item.option.name])


def search_two_pools(
    prefills: Sequence[Bounded],
    decodes: Sequence[Bounded],
    holds: Holds,
    leads: Holds,
    search: Search,
    run: Callable[[Sequence[Callable[[], None]]], None],
    out_of_time: Callable[[], bool],
    allowed: Callable[[Option, Option], bool],
    follows: Holds | None = None,
) -> None:
    """Cheapest fleet of one prefill and one decode option among the `allowed` pairs; updates `search`.

    `leads` says whether a prefill pool alone keeps the limits on TTFT with unlimited decode, `follows`
    whether a decode pool alone keeps the others if every prompt arrives prefilled; it is asked only where
    there are more than MANY_PAIRS pairs left.
    """
    cheapest = {
        item.option.name: min(
            (d.least_objective for d in decodes if allowed(item.option, d.option)), default=math.inf
        )
        for item in prefills
    }
    prefills = [item for item in prefills if math.isfinite(cheapest[item.option.name])]
    leading: set[str] = set()
    for wave in _waves(prefills):
        value = search.value

        def lead(item: Bounded, value: float = value) -> None:
            option, name = item.option, item.option.name
            most = min(item.most, largest_below(option, value, cheapest[name]))
            if most < item.least:
                search.refuted[name] = _by_bound(item, value)
                return
            if not math.isfinite(most):
                most = item.too_many
            if leads([((option, int(most)),)])[0]:
                leading.add(name)
                search.refuted.pop(name, None)
            else:
                search.beyond[name] = max(int(most), search.beyond.get(name, 0))
                search.refuted[name] = f"{int(most)} workers miss TTFT even with unlimited decode"

        run([lambda item=item: lead(item) for item in wave])  # type: ignore[misc]
        if out_of_time():
            search.is_exhausted = False
            return

    pairs = [
        (p, d) for p in prefills if p.option.name in leading for d in decodes if allowed(p.option, d.option)
    ]
    if follows is not None and len(pairs) > MANY_PAIRS:
        pairs = _without_short_decode_pools(pairs, follows, search, run)
    pairs.sort(key=lambda pair: pair[0].least_objective + pair[1].least_objective)
    for group in _waves(pairs):
        if out_of_time():
            search.is_exhausted = False
            return
        value = search.value
        found: dict[int, Counts] = {}

        def walk(
            index: int,
            value: float = value,
            found: dict[int, Counts] = found,
            group: list[tuple[Bounded, Bounded]] = group,
        ) -> None:
            p, d = group[index]
            label = f"{p.option.name} + {d.option.name}"
            best = _walk_staircase(p, d, value, holds, leads, search)
            if best is None:
                search.refuted[label] = "no counts below the best fleet's objective hold in simulation"
            else:
                found[index] = best

        run([lambda index=index: walk(index) for index in range(len(group))])  # type: ignore[misc]
        for index in sorted(found):
            search.offer(found[index])


def _without_short_decode_pools(
    pairs: Sequence[tuple[Bounded, Bounded]],
    follows: Holds,
    search: Search,
    run: Callable[[Sequence[Callable[[], None]]], None],
) -> list[tuple[Bounded, Bounded]]:
    """Raise each decode option's bound to what it needs behind instant prefill; drop what is too dear."""
    search.trusts_separation = True
    lead_objective = min(p.least_objective for p, _ in pairs)
    decodes = {d.option.name: d for _, d in pairs}
    least: dict[str, int | None] = {}

    def follow(item: Bounded) -> None:
        option = item.option
        most = min(item.most, largest_below(option, search.value, lead_objective))
        least[option.name] = least_that_holds(lambda n: follows([((option, n),)])[0], item.least, most, item)

    for wave in _waves(list(decodes.values())):
        run([lambda item=item: follow(item) for item in wave])  # type: ignore[misc]
    for name, count in least.items():
        if count is None:
            search.refuted[name] = (
                "too few for what is left of the best fleet's objective, even with instant prefill"
            )
    return [
        (p, replace(d, least=count)) for p, d in pairs if (count := least[d.option.name]) is not None
        and p.least_objective + count * d.option.objective < search.value
    ]  # fmt: skip


def _walk_staircase(
    p: Bounded, d: Bounded, value: float, holds: Holds, leads: Holds, search: Search
) -> Counts | None:
    """Cheapest (p, d) that holds and is strictly below `value`, or None."""

    def fleet(n_p: int, n_d: int) -> Counts:
        return ((p.option, n_p), (d.option, n_d))

    def most_p(n_d: int) -> int:
        """Largest prefill pool beside n_d decode workers, below the value and within the limits."""
        most = min(p.most, largest_below(p.option, value, n_d * d.option.objective))
        most = int(min(most, p.too_many))
        while most > 0 and search.limits.broken([(p.option.type, most), (d.option.type, n_d)]):
            most -= 1
        return most

    def most_d(n_p: int) -> int:
        most = min(d.most, largest_below(d.option, value, n_p * p.option.objective))
        return int(min(most, d.too_many))

    corner = fleet(most_p(d.least), most_d(p.least))
    if corner[0][1] < p.least or corner[1][1] < d.least or not holds([corner])[0]:
        return None
    # the pair is not hopeless: find out how many prefill workers it takes at least
    least_p = least_that_holds(lambda n: leads([((p.option, n),)])[0], p.least, corner[0][1], p)
    if least_p is None:
        return None
    search.smallest[p.option.name] = least_p
    least_d = least_that_holds(lambda n: holds([fleet(corner[0][1], n)])[0], d.least, most_d(least_p), d)
    if least_d is None:
        return None
    best: Counts | None = None
    n_d, high = least_d, corner[0][1]
    while n_d <= most_d(least_p):
        high = min(high, most_p(n_d))
        n_p = None
        if high >= least_p:
            n_p = least_that_holds(lambda n, n_d=n_d: holds([fleet(n, n_d)])[0], least_p, high, p)  # type: ignore[misc]
        if n_p is not None:
            best = fleet(n_p, n_d)
            value = objective(best)
            high = n_p - 1
        if high < least_p:
            break
        n_d += 1
    return best


_FIRST_PRICE = 1.3  # how fast the price of the first incumbent grows,
_NEAR = 1.05  # and how far it is narrowed afterwards
_TOO_MANY = 64  # times the likely count: where an unlimited search gives up


def least_that_holds(holds: Callable[[int], bool], least: int, most: float, item: Bounded) -> int | None:
    """Smallest n in [least, most] that holds, None if `most` does not (or far too many do not)."""
    failed = least - 1
    if math.isfinite(most):
        high = int(most)
        if high < least or not holds(high):
            return None
    else:
        high = max(least, math.ceil(_FIRST_PRICE * item.likely))
        while not holds(high):
            if high >= item.too_many:
                return None
            failed, high = high, min(math.ceil(1.5 * high), item.too_many)
    middle = item.likely  # far too few fail fast, so it pays to look low first
    while high - failed > 1:
        if not failed < middle < high:
            middle = (failed + high) // 2
        if holds(middle):
            high = middle
        else:
            failed = middle
    return high


def _by_bound(item: Bounded, value: float) -> str:
    if item.least > item.most:
        return f"needs at least {item.least} workers (work alone), {item.most:g} are available"
    least = f"needs at least {item.least} workers (work alone)"
    return f"{least}: {item.least_objective:.4g} or more, best is {value:.4g}"


def _waves(items: Sequence[Item]) -> list[list[Item]]:
    """The first two items (they make the incumbent), then waves of WAVE."""
    waves = [list(items[:2])]
    waves += [list(items[i : i + WAVE]) for i in range(2, len(items), WAVE)]
    return [wave for wave in waves if wave]
