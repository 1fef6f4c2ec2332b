"""Designs of level 0, and what simulations have said of their counts.

A design is one mixed option, or a prefill option with a decode option; its fleets differ in their counts.
They fall into rows: every count of prefill workers is a row of a pair, a mixed pool has one row. In a row
more workers of the last pool never hurt, so two counts say all that is known of it: the largest that failed
and the least that held. Rows say nothing of each other: more prefill workers hand over in larger bursts.

What a pool can do beside a perfect partner is known once for all pairs that it is part of: a prefill pool
that misses TTFT when every request leaves with its first token does in any pair, and a decode pool whose
backlog grows when every prompt arrives prefilled does. That is an assumption each (pruning_rules.py).

A corner of a row is the least count that is not refuted: no fleet of the row that holds has less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from planner.documents import facts
from planner.documents.facts import Shortcut
from planner.search.level0 import pruning_rules
from planner.search.level0.one_pool import Bounded, Holds, Learned, Search, by_bound, least_that_holds
from planner.search.oracle.fleet_counts import Counts, Verdicts, objective

LEAP = 1.5  # how fast the prefill count grows as long as no fleet at all is known

FAR = 8  # of a first guess at a pool's count that is seldom right, how large a part is the first stride
NEAR_CORNER = 1.1  # what does beside a perfect partner mostly does, or nearly, beside another one

CLOSE = 1.5  # times a guess that is often too low
Vector = tuple[int, ...]
"""Counts of the pools of a design; all but the last are its row."""


class DesignQuery(Protocol):
    def ask(self) -> None:
        """Simulate; may run beside others."""

    def conclude(self) -> None:
        """Put the answer where the search finds it."""


@dataclass(frozen=True, slots=True)
class DesignTerms:
    """What one worker of a pool weighs at least and takes of each limit in one question, and how many there
    may be.
    """

    weight: float
    uses: tuple[float, ...]
    most: float


class DesignPool:
    """One option, and what is known of the least count that does beside a perfect partner.

    `alone` asks for it; None: it cannot be asked for.
    """

    def __init__(
        self, item: Bounded, search: Search, alone: Holds | None = None, assumption: Shortcut | None = None
    ):
        self.item, self.search, self.alone, self.assumption = item, search, alone, assumption
        self.learned = search.learned.setdefault(item.option.name, Learned(item.least - 1))
        self.designs: list[Design] = []  # that it is part of

    @property
    def least(self) -> int:
        return self.learned.failed + 1

    def take_few_to_fail(self) -> None:
        if self.least < self.item.few < self.learned.least_holding:
            self.learned.failed = self.item.few - 1
            self.search.assumed.add(pruning_rules.SEATS)

    @property
    def is_known(self) -> bool:
        return self.alone is None or self.learned.least_holding == self.least


def explain(item: Bounded, search: Search) -> None:
    """Say what speaks against an option that is not in the best fleet."""
    option = item.option
    failed = search.learned[option.name].failed
    if search.best is not None and option in [each for each, _ in search.best]:
        search.refuted.pop(option.name, None)
    elif failed >= item.least:
        role: Literal["prefill", "decode"] = "prefill" if option.role == "prefill" else "decode"
        is_taken = failed == item.few - 1
        search.refuted[option.name] = (
            facts.SeatsTooFew(failed) if is_taken else facts.AloneFails(role, failed)
        )
    elif objective(((option, failed + 1),)) >= search.value or item.least > item.most:
        search.refuted[option.name] = by_bound(item, search.value)


@dataclass(slots=True)
class PoolQuestion:
    """Do so many workers of a pool do beside a perfect partner?"""

    pool: DesignPool
    count: int
    answer: bool = False

    @classmethod
    def of(cls, pool: DesignPool, most: int) -> PoolQuestion:
        """Ask whether any count that could pay, up to `most`, does, then how few do."""
        failed, holding, item = pool.learned.failed, pool.learned.least_holding, pool.item
        first, stride = item.likely, max(item.likely // FAR, 1)
        if item.busy is not None:
            first, stride = item.busy, 1
        if holding > most:  # from the first guess up, in growing strides
            count = first if failed < first else 2 * failed - first + stride
            is_near = item.busy is None and most < CLOSE * first  # one answer may rule it out
            return cls(pool, most if is_near else min(count, most))
        above = int(holding)
        count = 2 * above - first - stride if above <= first else first  # and down
        return cls(pool, count if failed < count < above else (failed + above) // 2)

    def ask(self) -> None:
        assert self.pool.alone is not None
        self.answer = self.pool.alone([((self.pool.item.option, self.count),)])[0]

    def conclude(self) -> None:
        pool, learned, name = self.pool, self.pool.learned, self.pool.item.option.name
        for design in pool.designs:
            design.version += 1
        if pool.assumption is not None:
            pool.search.assumed.add(pool.assumption)
        if self.answer:
            learned.least_holding = min(learned.least_holding, self.count)
        else:
            learned.failed = max(learned.failed, self.count)
            pool.search.beyond[name] = learned.failed
        if pool.is_known:
            pool.search.smallest[name] = pool.least


@dataclass(slots=True, eq=False)
class Design:
    """Fleets of one pool, or of a prefill and a decode pool.

    `holds` simulates. Of every row, the counts of all pools but the last, `failed` has the largest last count
    known to fail, `least_holding` the least known to hold. `leap` is the prefill count looked at next as
    long as no fleet is known at all. `asked_by` is the question that it belongs to.
    """

    pools: tuple[DesignPool, ...]
    holds: Holds
    search: Search
    asked_by: object = None
    failed: dict[Vector, int] = field(default_factory=dict)
    least_holding: dict[Vector, int] = field(default_factory=dict)
    leap: int = 0
    version: int = 0  # grows with whatever is learned of it or its pools

    def __post_init__(self) -> None:
        for pool in self.pools:
            pool.designs.append(self)

    def counts(self, vector: Vector) -> Counts:
        return tuple((pool.item.option, count) for pool, count in zip(self.pools, vector, strict=True))

    def ask(self, vector: Vector) -> bool:
        """Whether so many workers hold; simulated only where no earlier answer of the row implies it."""
        row, count = vector[:-1], vector[-1]
        if count >= self.least_holding.get(row, math.inf):
            return True
        if count <= self.failed.get(row, 0):
            return False
        answer = self.holds([self.counts(vector)])[0]
        self.learn(vector, holds=answer)
        return answer

    def learn(self, vector: Vector, *, holds: bool) -> None:
        row, count = vector[:-1], vector[-1]
        self.version += 1
        if holds:
            self.least_holding[row] = min(count, self.least_holding.get(row, count))
        else:
            self.failed[row] = max(count, self.failed.get(row, count))

    def fleets(self) -> list[Vector]:
        """The least counts of each row that are known to hold."""
        return [(*row, count) for row, count in self.least_holding.items()]

    def corners(self, *, leaping: bool = False) -> list[Vector]:
        """Of each row the least counts that are not refuted, and of all rows beyond those looked at.

        Where `leaping`, of the row alone that is to be looked at next.
        """
        last = self.pools[-1].least
        if len(self.pools) == 1:
            return [(max(last, self.failed.get((), 0) + 1),)]
        first = self.pools[0].least
        if leaping and self.leap:
            return [(max(self.leap, first), last)]
        looked = [row[0] for row in (*self.failed, *self.least_holding) if row[0] >= first]
        beyond = max(looked, default=first - 1) + 1
        rows = [(n, max(last, self.failed.get((n,), 0) + 1)) for n in range(first, beyond)]
        return [*rows, (beyond, last)]

    def in_doubt(
        self, terms: Sequence[DesignTerms], most: Callable[[int], float], *, each: bool = False
    ) -> list[PoolQuestion]:
        """Which pool to ask about first by itself: whether enough of it could pay at all, then how few do.

        `most`: how many of the k-th pool could pay beside the least of the other that may do. `each`: ask
        about both, whatever the other's answer.
        """
        if len(self.pools) == 1:
            return []
        doubtful = [
            (pool, own, max(int(min(most(k), pool.item.too_many)), pool.least))
            for k, (pool, own) in enumerate(zip(self.pools, terms, strict=True))
            if not pool.is_known
        ]
        if not doubtful or each:
            return [PoolQuestion.of(pool, at_most) for pool, _, at_most in doubtful]
        too_few = (one for one in doubtful if one[0].learned.least_holding > one[2])
        widest = max(doubtful, key=lambda one: (one[0].learned.least_holding - one[0].least) * one[1].weight)
        pool, _, at_most = next(too_few, widest)
        return [PoolQuestion.of(pool, at_most)]


@dataclass(slots=True)
class RowQuestion:
    """Which is the least count of a row that holds, from a corner up to `most`?"""

    design: Design
    corner: Vector
    most: float
    leaping: bool = False
    counts_in_question: Counts | None = None

    def ask(self) -> None:
        row, last, least = self.corner[:-1], self.design.pools[-1], self.corner[-1]
        is_near = last.alone is not None and least == last.least
        near = least if is_near and self.most > NEAR_CORNER * least else None
        n = least_that_holds(lambda n: self.design.ask((*row, n)), least, self.most, last.item, near)
        self.counts_in_question = None if n is None else self.design.counts((*row, n))

    def conclude(self) -> None:
        design, search = self.design, self.design.search
        search.assumed.add(pruning_rules.MORE_DECODE if len(design.pools) == 2 else pruning_rules.MORE_MIXED)
        if self.counts_in_question is not None:
            search.offer(self.counts_in_question)
            name, n = self.counts_in_question[-1][0].name, self.counts_in_question[-1][1]
            search.smallest[name] = min(n, search.smallest.get(name, n))
            return
        label = " + ".join(pool.item.option.name for pool in design.pools)
        p = self.corner[0]
        if self.leaping:
            design.version += 1
            design.leap = math.ceil(LEAP * p)
            if design.leap > design.pools[0].item.too_many:
                search.refuted[label] = facts.PairFails(p)
                return
        if len(design.pools) == 2:
            search.refuted[label] = facts.NoDecodeBeside(p)


def learn_from(designs: Iterable[Design], verdicts: Verdicts) -> None:
    """Let designs know what fleets were said to hold or fail, by the names and counts of their options."""
    named = {tuple(pool.item.option.name for pool in design.pools): design for design in designs}
    for fleet, holds in verdicts.items():
        design = named.get(tuple(name for name, _ in fleet))
        if design is not None and all(count > 0 for _, count in fleet):
            design.learn(tuple(count for _, count in fleet), holds=holds)
