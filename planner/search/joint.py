"""Several LLMs on one stock: the cheapest fleet of each, all of them within limits that they share.

A shape of a fleet is a worker type, or a prefill and a decode type. A corner of a shape is counts of its
workers, of which the last is the least that is not refuted beside the others. Each LLM takes one corner of
one of its shapes (solvers/multiple_choice.py), all of them within the limits.

This is the master of a logic-based Benders decomposition. LLMs share no worker, so the subproblem falls
apart: does each fleet that was chosen keep the SLO of its LLM (the simulator says). A shape has a row for
every count of its prefill workers (one row if it has one pool): more of them hand over in larger bursts, so
counts that fail say nothing of other rows. In its row they cut off all smaller counts of the last pool, and
the corner of the row moves up; counts that hold are a fleet to be had. Rows beyond those looked at have one
corner in common, the next row with the least workers. A shape begins at the least counts that the SLO obliges
(master.least_workers), so the optimum of the master bounds every choice of shapes and counts, given that in a
row more workers never hurt and that `lead` is right. Once all its corners hold it is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.domain import FleetLimit
from planner.search.fleets import Counts
from planner.search.one_pool import Bounded, least_that_holds
from planner.solvers.master import Limits, Option
from planner.solvers.multiple_choice import Choice, choose

Vector = tuple[int, ...]
Weigh = Callable[[Option], float]
"""What one worker adds to something that is minimised or limited."""
Run = Callable[[Sequence[Callable[[], None]]], None]
"""Executes closures, side by side or not."""
SLACK = 1e-9  # relative, as at level 0


@dataclass(frozen=True, slots=True)
class Row:
    """A limit on what the workers of all LLMs take together; on their value where `limit` is None."""

    limit: FleetLimit | None
    amount: float
    use: Weigh


def rows_of(limits: Limits) -> tuple[Row, ...]:
    """Every limit that is set."""

    def row(limit: FleetLimit, amount: float) -> Row:
        return Row(limit, amount, lambda option: limits.use(limit, option.type))

    return tuple(row(limit, amount) for limit, amount in limits.rows())


@dataclass(slots=True, eq=False)
class Shape:
    """Fleets of one worker type, or of a pair, and what is known of them from whichever question.

    `holds` says whether counts keep the SLO. `lead` is the prefill pool alone, which must keep the limits on
    TTFT with unlimited decode; the pairs of one prefill type have it in common. `kind` is the caller's.
    Of every row, the counts of all pools but the last, `failed` has the largest last count known to fail, and
    `held` the least known to hold.
    """

    pools: tuple[Bounded, ...]
    holds: Callable[[Counts], bool]
    lead: Shape | None = None
    kind: object = None
    failed: dict[Vector, int] = field(default_factory=dict)
    held: dict[Vector, int] = field(default_factory=dict)
    version: int = 0  # grows with whatever is learned

    def counts(self, vector: Vector) -> Counts:
        return tuple((pool.option, count) for pool, count in zip(self.pools, vector, strict=True))

    def ask(self, vector: Vector) -> bool:
        """Whether so many workers hold; simulated only where no earlier answer of the row implies it."""
        row, count = vector[:-1], vector[-1]
        if count >= self.held.get(row, math.inf):
            return True
        if count <= self.failed.get(row, 0):
            return False
        answer = self.holds(self.counts(vector))
        self.learn(vector, holds=answer)
        return answer

    def learn(self, vector: Vector, *, holds: bool) -> None:
        row, count = vector[:-1], vector[-1]
        self.version += 1
        if holds:
            self.held[row] = min(count, self.held.get(row, count))
        else:
            self.failed[row] = max(count, self.failed.get(row, count))

    @property
    def known(self) -> int:
        """Grows with whatever is learned of this shape or its lead."""
        return self.version + (0 if self.lead is None else self.lead.version)

    def fleets(self) -> list[Vector]:
        """The least counts of each row that are known to hold."""
        return [(*row, count) for row, count in self.held.items()]

    def corners(self) -> list[Vector]:
        """Of each row the least counts that are not refuted, and of all rows beyond."""
        last = self.pools[-1].least
        if len(self.pools) == 1:
            return [(max(last, self.failed.get((), 0) + 1),)]
        first = self.pools[0].least
        if self.lead is not None:
            first = max(first, self.lead.corners()[0][0])
        looked = [row[0] for row in (*self.failed, *self.held) if row[0] >= first]
        beyond = max(looked, default=first - 1) + 1
        rows = [(n, max(last, self.failed.get((n,), 0) + 1)) for n in range(first, beyond)]
        return [*rows, (beyond, last)]


@dataclass(frozen=True, slots=True)
class Shared:
    """The best choice found, None if there is none; no choice of these shapes has a value below `bound`.

    `is_exact`: the search came to its end. Then `bound` is the value, or what the value had to stay below.
    """

    best: tuple[tuple[Shape, Vector], ...] | None
    value: float
    bound: float
    is_exact: bool
    rounds: int


def one_by_one(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        task()


def share(
    llms: Sequence[Sequence[Shape]],
    rows: Sequence[Row],
    *,
    weigh: Weigh = lambda option: option.objective,
    below: float = math.inf,
    run: Run = one_by_one,
    out_of_time: Callable[[], bool] = lambda: False,
    progress: Callable[[str], None] = lambda _: None,
) -> Shared:
    """Solve the model above over the shapes of each LLM, for a value strictly `below`.

    `run` executes closures, one for each LLM, which simulate. What they learn stays in the shapes, so that
    another question about the same shapes costs little.
    """
    tables = [_Table(shapes, rows, weigh) for shapes in llms]
    least = [0.0] * len(tables)  # of what each LLM adds, in any choice better than `upper`
    best: list[_Column] | None = None
    upper, bound, rounds, said = below, 0.0, 0, ""

    def ended(*, is_exact: bool) -> Shared:
        choice = None if best is None else tuple((column.shape, column.vector) for column in best)
        return Shared(choice, math.inf if best is None else upper, bound, is_exact, rounds)

    while True:
        ready = [[column for column in table.columns(math.inf) if column.holds] for table in tables]
        known = _master(ready, rows)[0] if all(ready) else None
        if known is not None and (value := sum(column.weight for column in known)) < upper * (1 - SLACK):
            best, upper = known, value
        ceilings = [upper - (sum(least) - one) for one in least]
        columns = [table.columns(ceiling) for table, ceiling in zip(tables, ceilings, strict=True)]
        if not all(columns):
            bound = upper
            return ended(is_exact=True)
        least = [min(column.weight for column in each) for each in columns]
        chosen, at_least = _master(columns, rows)
        if chosen is None or at_least >= upper * (1 - SLACK):
            bound = upper
            return ended(is_exact=True)
        bound = max(bound, at_least)
        unknown = [i for i, column in enumerate(chosen) if not column.holds]
        if not unknown:
            best, upper = chosen, sum(column.weight for column in chosen)
            is_optimal = upper <= bound + SLACK * abs(upper)
            bound = upper if is_optimal else bound
            return ended(is_exact=is_optimal)
        if out_of_time():
            return ended(is_exact=False)
        rounds += 1
        if (standing := f"several LLMs: at least {bound:.6g}, best {upper:.6g}") != said:
            progress(said := standing)

        def refine(i: int, chosen: list[_Column] = chosen, ceilings: list[float] = ceilings) -> None:
            tables[i].refine(chosen[i], ceilings[i])

        run([lambda i=i: refine(i) for i in unknown])  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class _Column(Choice):
    """Counts of a shape, and whether they are known to hold."""

    shape: Shape
    vector: Vector
    holds: bool


class _Table:
    """The shapes of one LLM under one question: what their workers weigh, and what they take."""

    def __init__(self, shapes: Sequence[Shape], rows: Sequence[Row], weigh: Weigh) -> None:
        self.amounts = [row.amount * (1 + SLACK) for row in rows]
        self.weights = {s: [weigh(pool.option) for pool in s.pools] for s in shapes}
        self.uses = {s: [[row.use(pool.option) for pool in s.pools] for row in rows] for s in shapes}
        self.known: dict[Shape, tuple[int, list[_Column]]] = {}

    def columns(self, ceiling: float) -> list[_Column]:
        """Corners, and fleets that hold, within the limits and of a weight strictly below `ceiling`.

        Of alike ones the first that holds, else the first; none that a fleet which holds makes superfluous.
        """
        first: dict[tuple[float, ...], _Column] = {}
        for shape in self.weights:
            for column in self._of(shape):
                key = (column.weight, *column.uses)
                if column.weight < ceiling * (1 - SLACK) or math.isinf(ceiling):
                    if key not in first or (column.holds and not first[key].holds):
                        first[key] = column
        columns, costs = list(first.values()), np.array(list(first))
        keep = np.ones(len(columns), bool)
        for k, column in enumerate(columns):
            if column.holds and keep[k]:
                keep &= (costs < costs[k]).any(axis=1)
                keep[k] = True
        return [column for column, is_kept in zip(columns, keep, strict=True) if is_kept]

    def _of(self, shape: Shape) -> list[_Column]:
        """The columns of one shape, made anew where something was learned."""
        known = self.known.get(shape)
        if known is None or known[0] != shape.known:
            fleets = shape.fleets()
            found = [(vector, True) for vector in fleets]
            found += [
                (vector, False)
                for vector in shape.corners()
                if vector not in fleets
                and all(count <= pool.too_many for count, pool in zip(vector, shape.pools, strict=True))
            ]
            columns = [
                _Column(_dot(self.weights[shape], v), self._used(shape, v), shape, v, holds)
                for v, holds in found
            ]
            columns = [
                column
                for column in columns
                if all(used <= amount for used, amount in zip(column.uses, self.amounts, strict=True))
            ]
            known = self.known[shape] = (shape.known, columns)
        return known[1]

    def refine(self, column: _Column, ceiling: float) -> None:
        """Find out whether a corner holds; if it does not, which is the least of its row below `ceiling`."""
        shape, corner = column.shape, column.vector
        pools, last = shape.pools, len(corner) - 1
        if (lead := shape.lead) is not None and not lead.ask(corner[:1]):
            most = self._most(shape, 0, corner, ceiling)
            least_that_holds(lambda n: lead.ask((n,)), corner[0] + 1, most, pools[0])
            return
        if not shape.ask(corner):
            most = self._most(shape, last, corner, ceiling)
            least_that_holds(lambda n: shape.ask((*corner[:-1], n)), corner[-1] + 1, most, pools[last])

    def _most(self, shape: Shape, k: int, vector: Vector, ceiling: float) -> float:
        """Most workers of one pool beside those of the other, within the limits and below `ceiling`."""
        others = (*vector[:k], 0, *vector[k + 1 :])
        most = math.inf
        for amount, uses, used in zip(self.amounts, self.uses[shape], self._used(shape, others), strict=True):
            if uses[k] > 0:
                most = min(most, math.floor((amount - used) / uses[k] + SLACK))
        if self.weights[shape][k] > 0 and math.isfinite(ceiling):
            room = ceiling * (1 - SLACK) - _dot(self.weights[shape], others)
            most = min(most, math.ceil(room / self.weights[shape][k]) - 1)
        return most

    def _used(self, shape: Shape, vector: Vector) -> tuple[float, ...]:
        return tuple(_dot(uses, vector) for uses in self.uses[shape])


def _dot(each: Sequence[float], vector: Vector) -> float:
    return sum(one * count for one, count in zip(each, vector, strict=True))


def _master(columns: Sequence[Sequence[_Column]], rows: Sequence[Row]) -> tuple[list[_Column] | None, float]:
    """The column chosen for each LLM, None if no choice is within the limits; and what any choice weighs."""
    taken, bound = choose(columns, [row.amount for row in rows])
    if taken is None:
        return None, bound
    return [each[f] for each, f in zip(columns, taken, strict=True)], bound
