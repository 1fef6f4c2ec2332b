"""Level 0 with two pools: the cheapest p workers of a prefill option with d of a decode option.

More prefill workers hand requests over in larger bursts, so a pair that holds with p of them may fail with
p + 1, and p + 1 may need more decode workers than p: the counts that hold are no staircase. What is searched
is therefore every prefill count by itself:

    for each pair of options, for each p from the least that can keep TTFT:
        do the most decode workers that could still pay hold beside p?     no: p is out for this pair
        yes: the least d that holds beside p, by bisection

It takes for granted

    MORE_DECODE   beside the same prefill pool, what holds with d decode workers holds with d + 1
    LEADS         a prefill pool that misses TTFT when every request leaves with its first token (`leads`)
                  misses it beside any decode pool, and so do smaller ones

and, if there are more than MANY_PAIRS pairs,

    FOLLOWS       a decode pool whose backlog grows when every prompt arrives prefilled (`follows`) has a
                  growing backlog behind any prefill pool, and so have smaller ones

These are assumptions (planner/search/assumed.py has how often they failed in tests). Where a decode pool can
change what prefill does by more than holding it up, `leads` is None, and p begins at what the work obliges.

The search always works on the pair whose next p has the lowest price, and ends when none is below the best
fleet's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np

from planner.documents import facts
from planner.documents.facts import Shortcut
from planner.search import assumed
from planner.search.fleets import Counts, largest_below
from planner.search.one_pool import (
    WAVE,
    Bounded,
    Holds,
    Learned,
    Search,
    StoppedError,
    by_bound,
    least_that_holds,
)
from planner.solvers.master import Option

MANY_PAIRS = 1000

LOOK = 4 * WAVE  # pairs among which the next questions are found

LEAP = 1.5  # how fast the prefill count grows as long as no fleet at all is known


def search_two_pools(
    prefills: Sequence[Bounded],
    decodes: Sequence[Bounded],
    holds: Holds,
    leads: Holds | None,
    search: Search,
    run: Callable[[Sequence[Callable[[], None]]], None],
    out_of_time: Callable[[], bool],
    allowed: Callable[[Option, Option], bool],
    follows: Holds | None = None,
) -> None:
    """Cheapest fleet of one prefill and one decode option among the `allowed` pairs; updates `search`.

    `leads` says whether a prefill pool alone keeps the limits on TTFT with unlimited decode, `follows`
    whether a decode pool alone keeps up if every prompt arrives prefilled; None: nobody knows. Of pairs with
    equal prices those named first are looked at first.
    """
    is_open = [(p, d) for p in prefills for d in decodes if allowed(p.option, d.option)]
    if len(is_open) <= MANY_PAIRS:
        follows = None
    front = {item.option: _Alone(item, search, leads, assumed.LEADS) for item in prefills}
    back = {item.option: _Alone(item, search, follows, assumed.FOLLOWS) for item in decodes}
    pairs = [_Pair(front[p.option], back[d.option], holds, search) for p, d in is_open]
    while True:
        prices = np.array([pair.least_objective for pair in pairs])
        below = np.flatnonzero(prices < search.value * (1 - 1e-9))
        if not len(below):
            break
        if out_of_time():
            search.is_exhausted = False
            return
        questions: list[_Question] = []
        for k in below[np.argsort(prices[below], kind="stable")][:LOOK].tolist():
            pair = pairs[k]
            doubtful = pair.in_doubt()
            if doubtful is None:
                questions.append(pair)
            elif all(doubtful is not question for question in questions):
                beside = pair.decode if doubtful is pair.lead else pair.lead
                doubtful.consider(search.value, beside.least_objective)
                questions.append(doubtful)
            if len(questions) == WAVE:
                break
        try:
            run([question.ask for question in questions])
        except StoppedError:
            for question in questions:
                if isinstance(question, _Pair) and question.found is not None:
                    search.offer(question.found)
            raise
        for question in questions:
            question.conclude()
    for alone in (*front.values(), *back.values()):
        alone.explain()


class _Question(Protocol):
    def ask(self) -> None:
        """Simulate; may run beside others."""

    def conclude(self) -> None:
        """Put the answer where the search finds it."""


class _Alone:
    """One option, and what is known of the least count that does beside a perfect partner.

    `alone` asks for it; None: it cannot be asked for.
    """

    def __init__(self, item: Bounded, search: Search, alone: Holds | None, assumption: Shortcut):
        self.item, self.search, self.alone, self.assumption = item, search, alone, assumption
        self.learned = search.learned.setdefault(item.option.name, Learned(item.least - 1))
        self.count, self.answer = 0, False

    @property
    def least(self) -> int:
        return self.learned.failed + 1

    @property
    def most(self) -> float:
        return min(self.item.most, self.item.too_many)

    @property
    def least_objective(self) -> float:
        return self.least * self.item.option.objective if self.least <= self.most else math.inf

    @property
    def is_known(self) -> bool:
        return self.alone is None or self.learned.held == self.least

    def most_below(self, value: float, beside: float) -> int:
        """The most workers that are within the limits and together with `beside` below the value."""
        return max(int(min(self.most, largest_below(self.item.option, value, beside))), self.least)

    def consider(self, value: float, beside: float) -> None:
        """Choose the count to ask for: whether any could pay at all, else how few it may be."""
        failed, held = self.learned.failed, self.learned.held
        self.count = self.most_below(value, beside)
        if held <= self.count:
            likely = self.item.likely  # far too few fail fast, so it pays to look low first
            self.count = likely if failed < likely < held else (failed + int(held)) // 2

    def ask(self) -> None:
        assert self.alone is not None
        self.answer = self.alone([((self.item.option, self.count),)])[0]

    def conclude(self) -> None:
        name = self.item.option.name
        self.search.assumed.add(self.assumption)
        if self.answer:
            self.learned.held = min(self.learned.held, self.count)
        else:
            self.learned.failed = max(self.learned.failed, self.count)
            self.search.beyond[name] = self.learned.failed
        if self.is_known:
            self.search.smallest[name] = self.least

    def explain(self) -> None:
        """Say what speaks against an option that is not in the best fleet."""
        option, failed = self.item.option, self.learned.failed
        if self.search.best is not None and option in [each for each, _ in self.search.best]:
            self.search.refuted.pop(option.name, None)
        elif failed >= self.item.least:
            role: Literal["prefill", "decode"] = "prefill" if option.role == "prefill" else "decode"
            self.search.refuted[option.name] = facts.AloneFails(role, failed)
        elif self.least * option.objective >= self.search.value or self.item.least > self.item.most:
            self.search.refuted[option.name] = by_bound(self.item, self.search.value)


class _Pair:
    """One prefill with one decode option, and the prefill count that is looked at next."""

    def __init__(self, lead: _Alone, decode: _Alone, holds: Holds, search: Search):
        self.lead, self.decode, self.holds, self.search = lead, decode, holds, search
        self.next, self.is_open = 0, True
        self.leaps: int | None = None  # the count looked at next as long as no fleet is known
        self.found: Counts | None = None

    @property
    def prefill_count(self) -> int:
        """p: of the next question."""
        if self.leaps is not None and self.search.best is None:
            return max(self.leaps, self.lead.least)
        return max(self.next, self.lead.least)

    @property
    def least_objective(self) -> float:
        """No count that is still open costs less."""
        p = self.prefill_count
        if not self.is_open or p > self.lead.most:
            return math.inf
        return p * self.lead.item.option.objective + self.decode.least_objective

    def in_doubt(self) -> _Alone | None:
        """Which pool to ask about first by itself: whether enough of it could pay at all, then how few do."""
        doubtful = [
            (pool, other)
            for pool, other in ((self.lead, self.decode), (self.decode, self.lead))
            if not pool.is_known
        ]
        for pool, other in doubtful:
            if pool.learned.held > pool.most_below(self.search.value, other.least_objective):
                return pool
        widths = [
            ((pool.learned.held - pool.least) * pool.item.option.objective, pool) for pool, _ in doubtful
        ]
        return max(widths, key=lambda width: width[0])[1] if widths else None

    def ask(self) -> None:
        p, item = self.prefill_count, self.decode.item
        most, least, n = self._most_beside(p), self.decode.least, None
        self.found = None
        if most >= least:
            n = least_that_holds(lambda n: self.holds([self._fleet(p, n)])[0], least, most, item)
        if n is not None:
            self.found = self._fleet(p, n)

    def conclude(self) -> None:
        p, search = self.prefill_count, self.search
        search.assumed.add(assumed.MORE_DECODE)
        label = f"{self.lead.item.option.name} + {self.decode.item.option.name}"
        if self._most_beside(p) < self.decode.least:
            self.is_open = False  # more prefill workers leave even less
        if search.best is None and self.found is None and not math.isfinite(self.lead.item.most):
            self.leaps = math.ceil(LEAP * p)
            if self.leaps > self.lead.most:
                self.is_open = False
                search.refuted[label] = facts.PairFails(p)
                search.capped = True
        else:
            self.next = p + 1
        if self.found is not None:
            search.offer(self.found)
            name, n_d = self.decode.item.option.name, self.found[1][1]
            search.smallest[name] = min(n_d, search.smallest.get(name, n_d))
        elif self.is_open:
            search.refuted[label] = facts.NoDecodeBeside(p)

    def _fleet(self, n_p: int, n_d: int) -> Counts:
        return ((self.lead.item.option, n_p), (self.decode.item.option, n_d))

    def _most_beside(self, n_p: int) -> float:
        """The most decode workers beside n_p prefill workers, below the value and within the limits."""
        p, d = self.lead.item.option, self.decode.item.option
        most = min(self.decode.item.most, largest_below(d, self.search.value, n_p * p.objective))
        for name, amount in self.search.limits.rows():
            if (use := self.search.limits.use(name, d.type)) > 0:
                left = amount * (1 + 1e-9) - n_p * self.search.limits.use(name, p.type)
                most = min(most, math.floor(left / use))
            elif n_p * self.search.limits.use(name, p.type) > amount * (1 + 1e-9):
                return -1
        return most
