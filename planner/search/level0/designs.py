"""Designs of level 0, and what simulations have shown about their counts of workers.

A design is one mixed option, or a prefill option with a decode option (a pair). Its fleets differ only in
their counts. The fleets of a pair with the same prefill count are a row; all fleets of a mixed option are one
row. Within a row more workers of the last pool are assumed never to hurt. So two counts hold all that
simulations have shown of a row: the largest that failed and the least that held. One row says nothing about
another, because more prefill workers hand requests over in larger bursts.

A pool is also simulated by itself, beside a perfect partner, and the answer counts for every pair with this
pool. A prefill pool that misses TTFT when every request leaves with its first token misses it in any pair. A
decode pool whose backlog grows when every prompt arrives prefilled has a growing backlog in any pair. Both
are assumptions (pruning_rules.py).

The corner of a row is its least count that is not refuted: every fleet of the row that holds has at least as
many workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from planner.documents import facts
from planner.documents.facts import PruningRule
from planner.search.level0 import pruning_rules
from planner.search.level0.one_pool import (
    BoundedOption,
    Holds,
    KnownCounts,
    Level0Search,
    least_that_holds,
    reason_by_bounds,
)
from planner.search.oracle.fleet_counts import Counts, Verdicts, objective_of

# The numbers below decide which counts are simulated first, and no answer. They are set by hand.
LEAP_FACTOR = 1.5  # The prefill count grows by this factor as long as no fleet that holds is known.
# The guess `likely` (one_pool.py) is seldom exact: the first stride from it is the guess over this number.
FIRST_STRIDE_PARTS = 8
# The search of a row goes up from its corner if counts of more than NEAR_CORNER times the corner are
# possible; a shorter range is bisected (`RowQuestion.simulate`).
NEAR_CORNER = 1.1
# If the most workers that a better fleet could have are less than this many times the guess, the most are
# simulated before the guess, because one failure with them rules the pool out.
NEAR_GUESS = 1.5

Vector = tuple[int, ...]  # Workers of each pool of a design. All numbers but the last identify a row.


class DesignQuestion(Protocol):
    """A question about a design that simulations answer: `PoolQuestion` or `RowQuestion`."""

    def simulate(self) -> None:
        """Find the answer. Several questions may do so at the same time, so this changes nothing else."""

    def record_answer(self) -> None:
        """Store the answer in the design and the search. Questions do so one after another."""


@dataclass(frozen=True, slots=True)
class DesignTerms:
    """What one worker of a pool adds to a search: its weight in the sum that is minimised, and its use of
    each shared limit. `most` is how many such workers the limits allow.
    """

    weight: float
    uses: tuple[float, ...]
    most: float


class DesignPool:
    """One option, with bounds on the least count that suffices beside a perfect partner (`learned`).

    `alone` simulates the pool by itself, beside a perfect partner; None where no such simulation exists. The
    pruning rule `assumption` says that a failure there refutes all pairs with the pool.
    """

    def __init__(
        self,
        bounded: BoundedOption,
        search: Level0Search,
        alone: Holds | None = None,
        assumption: PruningRule | None = None,
    ):
        self.bounded, self.search, self.alone, self.assumption = bounded, search, alone, assumption
        self.learned = search.learned.setdefault(bounded.option.name, KnownCounts(bounded.least - 1))
        self.designs: list[FleetDesign] = []  # Every design that has this pool.

    @property
    def least(self) -> int:
        """The smallest count that is not known to fail."""
        return self.learned.failed + 1

    def assume_few_fail(self) -> None:
        """Assume, without a simulation, that fewer than `assumed_least` fail (pruning_rules.SEATS)."""
        if self.least < self.bounded.assumed_least < self.learned.least_holding:
            self.learned.failed = self.bounded.assumed_least - 1
            self.search.assumed.add(pruning_rules.SEATS)

    @property
    def is_known(self) -> bool:
        """Whether the least count is known, or no simulation of the pool by itself exists."""
        return self.alone is None or self.learned.least_holding == self.least


def record_why_not(bounded: BoundedOption, search: Level0Search) -> None:
    """Write into `search.refuted` why an option is not in the best fleet."""
    option = bounded.option
    failed = search.learned[option.name].failed
    if search.best is not None and option in [best_option for best_option, _ in search.best]:
        search.refuted.pop(option.name, None)
    elif failed >= bounded.least:
        role: Literal["prefill", "decode"] = "prefill" if option.role == "prefill" else "decode"
        # `DesignPool.assume_few_fail` sets this number, without a simulation.
        is_assumed = failed == bounded.assumed_least - 1
        search.refuted[option.name] = (
            facts.SeatsTooFew(failed) if is_assumed else facts.AloneFails(role, failed)
        )
    elif objective_of(((option, failed + 1),)) >= search.value or bounded.least > bounded.most:
        search.refuted[option.name] = reason_by_bounds(bounded, search.value)


@dataclass(slots=True)
class PoolQuestion:
    """Do `count` workers of a pool suffice beside a perfect partner? `answer` is False until `simulate`."""

    pool: DesignPool
    count: int
    answer: bool = False

    @classmethod
    def of(cls, pool: DesignPool, most: int) -> PoolQuestion:
        """The next question about a pool: first whether any count up to `most` suffices, then how few do.

        Counts go up from a guess in growing strides until one suffices. If the guess itself suffices, they go
        down from it in the same way. Last comes bisection between a failed and a sufficient count.
        """
        failed, holding, bounded = pool.learned.failed, pool.learned.least_holding, pool.bounded
        guess, stride = bounded.likely, max(bounded.likely // FIRST_STRIDE_PARTS, 1)
        if bounded.likely_decode is not None:  # This guess is often exact, so strides begin at 1.
            guess, stride = bounded.likely_decode, 1
        if holding > most:  # No count up to `most` is known to suffice, so the counts go up from the guess.
            # At each failure the distance from the guess doubles and grows by a stride.
            count = guess if failed < guess else 2 * failed - guess + stride
            is_most_near = bounded.likely_decode is None and most < NEAR_GUESS * guess
            return cls(pool, most if is_most_near else min(count, most))
        suffices = int(holding)
        # Downwards too the distance from the guess doubles and grows by a stride. Bisection follows once this
        # leads to a count whose answer is known.
        count = 2 * suffices - guess - stride if suffices <= guess else guess
        return cls(pool, count if failed < count < suffices else (failed + suffices) // 2)

    def simulate(self) -> None:
        assert self.pool.alone is not None
        self.answer = self.pool.alone(((self.pool.bounded.option, self.count),))

    def record_answer(self) -> None:
        pool, learned, name = self.pool, self.pool.learned, self.pool.bounded.option.name
        for design in pool.designs:
            design.version += 1  # cheapest.py then reads its corners anew.
        if pool.assumption is not None:
            pool.search.assumed.add(pool.assumption)
        if self.answer:
            learned.least_holding = min(learned.least_holding, self.count)
        else:
            learned.failed = max(learned.failed, self.count)
            pool.search.most_failed[name] = learned.failed
        if pool.is_known:  # The count above the largest that failed is the least that suffices.
            pool.search.least_holding[name] = pool.least


@dataclass(slots=True, eq=False)
class FleetDesign:
    """Fleets of one mixed pool, or of a prefill and a decode pool.

    `holds` simulates fleets. A row is given by the counts of all pools but the last: `failed` maps it to the
    largest count of the last pool that failed, `least_holding` to the least that held. `leap` is the prefill
    count that is simulated next as long as no fleet that holds is known. `llm_problem` is the problem of the
    LLM that the design serves, in a joint search of several LLMs.
    """

    pools: tuple[DesignPool, ...]
    holds: Holds
    search: Level0Search
    llm_problem: object = None  # A `Problem`; nothing here looks into it.
    failed: dict[Vector, int] = field(default_factory=dict)
    least_holding: dict[Vector, int] = field(default_factory=dict)
    leap: int = 0  # 0: none so far; the search begins at the least prefill count.
    version: int = 0  # Grows with everything learned about the design or its pools.

    def __post_init__(self) -> None:
        for pool in self.pools:
            pool.designs.append(self)

    def counts(self, vector: Vector) -> Counts:
        """The fleet with these counts of workers, one for each pool."""
        return tuple((pool.bounded.option, count) for pool, count in zip(self.pools, vector, strict=True))

    def find_if_holds(self, vector: Vector) -> bool:
        """Whether these counts hold. They are simulated only if no earlier answer of their row implies it."""
        row, count = vector[:-1], vector[-1]
        if count >= self.least_holding.get(row, math.inf):
            return True
        if count <= self.failed.get(row, 0):
            return False
        answer = self.holds(self.counts(vector))
        self.learn(vector, holds=answer)
        return answer

    def learn(self, vector: Vector, *, holds: bool) -> None:
        """Record whether these counts hold, for their whole row."""
        row, count = vector[:-1], vector[-1]
        self.version += 1
        if holds:
            self.least_holding[row] = min(count, self.least_holding.get(row, count))
        else:
            self.failed[row] = max(count, self.failed.get(row, count))

    def fleets(self) -> list[Vector]:
        """The least counts known to hold, one vector per row."""
        return [(*row, count) for row, count in self.least_holding.items()]

    def corners(self, *, leaping: bool = False) -> list[Vector]:
        """The corner of each row, up to the last row that was simulated, and one corner that stands for all
        rows with more prefill workers. With `leaping` only the corner of the row that is simulated next.
        """
        least_last = self.pools[-1].least
        if len(self.pools) == 1:  # A mixed pool has one row, whose key is ().
            return [(max(least_last, self.failed.get((), 0) + 1),)]
        least_prefill = self.pools[0].least
        if leaping and self.leap:
            return [(max(self.leap, least_prefill), least_last)]
        simulated = [n for n, *_ in (*self.failed, *self.least_holding) if n >= least_prefill]
        first_unknown = max(simulated, default=least_prefill - 1) + 1
        corners = [
            (n, max(least_last, self.failed.get((n,), 0) + 1)) for n in range(least_prefill, first_unknown)
        ]
        return [*corners, (first_unknown, least_last)]

    def pool_questions(
        self, terms: Sequence[DesignTerms], most: Callable[[int], float], *, all_unknown: bool = False
    ) -> list[PoolQuestion]:
        """The pools to simulate by themselves before this design is simulated: at most one pool, or with
        `all_unknown` every pool whose least count is not known.

        `most(k)` is how many workers of the k-th pool a better fleet may have beside the least of the other
        pool. If even these might not suffice, the pool comes first, because its failure rules the design out.
        Otherwise the pool comes first whose range of possible counts costs most.
        """
        if len(self.pools) == 1:  # A mixed pool has no partner: it is simulated as a fleet.
            return []
        unknown = [
            (pool, own_terms, max(int(min(most(k), pool.bounded.too_many)), pool.least))
            for k, (pool, own_terms) in enumerate(zip(self.pools, terms, strict=True))
            if not pool.is_known
        ]
        if not unknown or all_unknown:
            return [PoolQuestion.of(pool, at_most) for pool, _, at_most in unknown]
        for pool, _, at_most in unknown:
            if pool.learned.least_holding > at_most:
                return [PoolQuestion.of(pool, at_most)]
        range_costs = [
            (pool.learned.least_holding - pool.least) * own_terms.weight for pool, own_terms, _ in unknown
        ]
        pool, _, at_most = unknown[range_costs.index(max(range_costs))]
        return [PoolQuestion.of(pool, at_most)]


@dataclass(slots=True)
class RowQuestion:
    """What is the least count of a row that holds, from its corner up to `most`? The answer is `least_fleet`:
    None before `simulate`, and if no such count holds.
    """

    design: FleetDesign
    corner: Vector
    most: float
    leaping: bool = False
    least_fleet: Counts | None = None

    def simulate(self) -> None:
        *row, corner_count = self.corner
        last_pool = self.design.pools[-1]
        # The corner is a good guess if it follows from simulations beside a perfect partner, and not from
        # failures in this row.
        is_good_guess = last_pool.alone is not None and corner_count == last_pool.least
        guess = corner_count if is_good_guess and self.most > NEAR_CORNER * corner_count else None
        n = least_that_holds(
            lambda n: self.design.find_if_holds((*row, n)), corner_count, self.most, last_pool.bounded, guess
        )
        self.least_fleet = None if n is None else self.design.counts((*row, n))

    def record_answer(self) -> None:
        """Offer the fleet to the search. If none was found, a design that leaps continues with more prefill
        workers, and `search.refuted` gets the reason why a pair has no fleet.
        """
        design, search = self.design, self.design.search
        search.assumed.add(pruning_rules.MORE_DECODE if len(design.pools) == 2 else pruning_rules.MORE_MIXED)
        if self.least_fleet is not None:
            search.offer(self.least_fleet)
            last_option, n = self.least_fleet[-1]
            search.least_holding[last_option.name] = min(n, search.least_holding.get(last_option.name, n))
            return
        label = " + ".join(pool.bounded.option.name for pool in design.pools)
        prefills = self.corner[0]
        if self.leaping:
            design.version += 1
            design.leap = math.ceil(LEAP_FACTOR * prefills)
            if design.leap > design.pools[0].bounded.too_many:
                search.refuted[label] = facts.PairFails(prefills)
                return
        if len(design.pools) == 2:
            search.refuted[label] = facts.NoDecodeBeside(prefills)


def learn_from(designs: Iterable[FleetDesign], verdicts: Verdicts) -> None:
    """Record in each design which of its fleets hold or fail by these `verdicts`, whose keys are the names
    and counts of a fleet's options.
    """
    design_by_names = {tuple(pool.bounded.option.name for pool in design.pools): design for design in designs}
    for fleet, holds in verdicts.items():
        design = design_by_names.get(tuple(name for name, _ in fleet))
        if design is not None and all(count > 0 for _, count in fleet):
            design.learn(tuple(count for _, count in fleet), holds=holds)
