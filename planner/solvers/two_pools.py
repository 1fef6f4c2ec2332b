"""Level 0 with two pools: the cheapest p workers of a prefill option with d of a decode option, exactly.

The counts that hold are the cells above a falling staircase. Two relaxations bound a pair from below, pool by
pool: a prefill pool that misses TTFT when every request leaves with its first token (`leads`) misses it
beside any decode pool; a decode pool that fails when every prompt arrives prefilled (`follows`) is taken to
fail behind any prefill pool. The second takes for granted that a queue before prefill does not help decode,
so it is asked only where there are more than MANY_PAIRS pairs, and the certificate then names it. Where
requests wait for others, so does the first: that later requests do not help prefill.

So every pool has a least count that lies between one known to fail and one known to hold, and the sum of the
least objectives bounds a pair. The search always works on the pair with the lowest bound: it asks whether the
most workers that could still pay do (one failure then ends the pair, and all that are dearer), narrows their
count by bisection, and where both are known walks the staircase from there. It ends when no bound is below
the best fleet's objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from planner.solvers.level0 import (
    WAVE,
    Bounded,
    Counts,
    Holds,
    Learned,
    Search,
    by_bound,
    largest_below,
    least_that_holds,
    objective,
)
from planner.solvers.master import Option

MANY_PAIRS = 200
LOOK = 4 * WAVE  # pairs among which the next questions are found


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
    *,
    leads_prove: bool = True,
) -> None:
    """Cheapest fleet of one prefill and one decode option among the `allowed` pairs; updates `search`.

    `leads` says whether a prefill pool alone keeps the limits on TTFT with unlimited decode, `follows`
    whether a decode pool alone keeps the others if every prompt arrives prefilled. Unless `leads_prove`, the
    first is taken for granted as the second is. Of pairs with equal bounds those named first are looked at
    first.
    """
    is_open = np.array([[allowed(p.option, d.option) for d in decodes] for p in prefills], dtype=bool)
    if not is_open.any():
        return
    if is_open.sum() <= MANY_PAIRS:
        follows = None
    search.trusts_separation |= follows is not None
    proof = leads if leads_prove or follows is not None else None
    front = [_Pool(item, search, proof) for item in prefills]
    back = [_Pool(item, search, follows) for item in decodes]
    while True:
        bounds = np.add.outer(
            np.array([pool.least_objective for pool in front], float),
            np.array([pool.least_objective for pool in back], float),
        )
        bounds[~is_open] = math.inf
        pairs = np.argwhere(bounds < search.value * (1 - 1e-9))
        if not len(pairs):
            break
        if out_of_time():
            search.is_exhausted = False
            return
        ordered = pairs[np.argsort(bounds[tuple(pairs.T)], kind="stable")]
        questions: list[_Question] = []
        for i, j in ordered[:LOOK].tolist():
            p, d = front[i], back[j]
            asked = _in_doubt(p, d, search.value)
            if asked is None:
                questions.append(_Walk(p, d, holds, search))
                is_open[i, j] = False
            elif all(asked is not question for question in questions):
                asked.consider(search.value, (d if asked is p else p).least_objective)
                questions.append(asked)
            if len(questions) == WAVE:
                break
        run([question.ask for question in questions])
        for question in questions:
            question.conclude()
    for pool in (*front, *back):
        pool.explain()


class _Question(Protocol):
    def ask(self) -> None:
        """Simulate; may run beside others."""

    def conclude(self) -> None:
        """Put the answer where the search finds it."""


class _Pool:
    """One option, what is known of its least count, and how to ask for more; None: nobody to ask."""

    def __init__(self, item: Bounded, search: Search, alone: Holds | None):
        self.item, self.search, self.alone = item, search, alone
        self.learned = search.learned.setdefault(item.option.name, Learned(item.least - 1))
        self.count, self.answer = 0, False

    @property
    def least(self) -> int:
        return self.learned.failed + 1

    @property
    def least_objective(self) -> float:
        within = self.least <= min(self.item.most, self.item.too_many)
        return self.least * self.item.option.objective if within else math.inf

    @property
    def is_known(self) -> bool:
        return self.alone is None or self.learned.held == self.least

    def most_below(self, value: float, beside: float) -> int:
        """The most workers that are within the limits and together with `beside` below the value."""
        most = min(self.item.most, largest_below(self.item.option, value, beside), self.item.too_many)
        return max(int(most), self.least)

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
        elif failed < self.item.least:
            self.search.refuted[option.name] = by_bound(self.item, self.search.value)
        elif option.role == "prefill":
            self.search.refuted[option.name] = f"{failed} workers miss TTFT even with unlimited decode"
        else:
            self.search.refuted[option.name] = f"{failed} workers fail even with instant prefill"


def _in_doubt(p: _Pool, d: _Pool, value: float) -> _Pool | None:
    """Which of the two to ask next, None if both are known."""
    doubtful = [(pool, beside) for pool, beside in ((p, d), (d, p)) if not pool.is_known]
    for pool, beside in doubtful:
        if pool.learned.held > pool.most_below(value, beside.least_objective):
            return pool
    widths = [((pool.learned.held - pool.least) * pool.item.option.objective, pool) for pool, _ in doubtful]
    return max(widths, key=lambda width: width[0])[1] if widths else None


class _Walk:
    """The staircase of one pair, from the least counts that are known of its pools."""

    def __init__(self, p: _Pool, d: _Pool, holds: Holds, search: Search):
        self.p = replace(p.item, least=p.least, likely=p.least) if p.alone else p.item
        self.d = replace(d.item, least=d.least, likely=d.least + 1) if d.alone else d.item
        self.starts_at_corner = d.alone is None
        self.holds, self.search, self.value = holds, search, search.value
        self.best: Counts | None = None

    def ask(self) -> None:
        least = self._fleet(self.p.least, self.d.least)
        if not self.starts_at_corner and self._pays(least) and self.holds([least])[0]:
            self.best = least
        else:
            self.best = self._walk()

    def conclude(self) -> None:
        if self.best is not None:
            self.search.offer(self.best)
        else:
            label = f"{self.p.option.name} + {self.d.option.name}"
            self.search.refuted[label] = "no counts below the best fleet's objective hold in simulation"

    def _fleet(self, n_p: int, n_d: int) -> Counts:
        return ((self.p.option, n_p), (self.d.option, n_d))

    def _pays(self, counts: Counts) -> bool:
        within = self.search.limits.broken([(option.type, count) for option, count in counts]) is None
        return within and objective(counts) < self.value * (1 - 1e-9)

    def _most_p(self, n_d: int) -> int:
        """Largest prefill pool beside n_d decode workers, below the value and within the limits."""
        p, d = self.p, self.d
        most = int(min(p.most, largest_below(p.option, self.value, n_d * d.option.objective), p.too_many))
        while most > 0 and self.search.limits.broken([(p.option.type, most), (d.option.type, n_d)]):
            most -= 1
        return most

    def _most_d(self, n_p: int) -> int:
        p, d = self.p, self.d
        return int(min(d.most, largest_below(d.option, self.value, n_p * p.option.objective), d.too_many))

    def _holds_beside(self, n_d: int) -> Callable[[int], bool]:
        return lambda n_p: self.holds([self._fleet(n_p, n_d)])[0]

    def _walk(self) -> Counts | None:
        """The corner of most prefill and most decode workers dominates every pair below the value, so its
        failure refutes them all. Else the least d beside most p, then for each d the least p."""
        p, d = self.p, self.d
        corner = self._fleet(self._most_p(d.least), self._most_d(p.least))
        if corner[0][1] < p.least or corner[1][1] < d.least or not self.holds([corner])[0]:
            return None
        high = corner[0][1]
        widest = high
        n_d = least_that_holds(
            lambda n: self.holds([self._fleet(widest, n)])[0], d.least, self._most_d(p.least), d
        )
        if n_d is None:
            return None
        best: Counts | None = None
        while n_d <= self._most_d(p.least):
            high = min(high, self._most_p(n_d))
            n_p = None
            if high >= p.least:
                n_p = least_that_holds(self._holds_beside(n_d), p.least, high, p)
            if n_p is not None:
                best = self._fleet(n_p, n_d)
                self.value = objective(best)
                high = n_p - 1
            if high < p.least:
                break
            n_d += 1
        return best
