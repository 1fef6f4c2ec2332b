"""A lower bound on what a day costs if the pools' sizes may change at any moment.

planner/day/search/any_moment_bound.py solves this program, simulates the sizes of its solution, and adds a
cut where they fail.

Sets   c  pool     k  1, 2, ... workers: "level" (c, k) is up while k or more workers of c are ready
       v  stretch of the day     u  cut: needs (a, b, c, n), of which at least one must be met
       i  point in time of a level: every a and b of a need on it, in order, from t_0 = 0 on
Data   s_c  start-up [s]     p_ck  what the k-th worker adds to the price of all below it [USD/h]
       l_i  from t_i to t_(i+1) [h]     f_v, F_v  paid at least in stretch v, and from v on [USD] (LeastPaid)
       need (a, b, c, n)  at some moment from a to b [s] level (c, n+1) is up: more than n workers of c are
       ready
Vars   y_i  0 or 1: the level is up from t_i to t_(i+1)     y_-1  0 or 1: it is up at time zero
       w_i  0 or 1: it comes up at t_i                      e_v  USD paid in v beyond what levels cost

  min   sum over levels of p_ck (sum_i l_i y_i + s_c sum_i w_i)  +  sum_v e_v
  s.t.  comes_i   y_i <= y_(i-1) + w_i,   w_i = 0 where t_i < s_c
        cut_u     sum over needs of ( y_(i-1), where t_i = a, + sum of the w_j with a <= t_j <= b )  >= 1
        work_v    what y and w pay in v + e_v >= f_v,   and in v and all later stretches >= F_v

No run that meets every cut costs less than the optimum, because every run gives a point of the program that
costs no more:

  1. What a level costs. Let Z be the times at which k or more workers are ready. Each of these workers was
     started s_c earlier, or is there from time zero, so k workers are paid from s_c before each time of Z on.
     Two stretches of Z that are no more than s_c apart are paid as if they were one. So level (c, k) costs
     p_ck times the length of each stretch and a start-up, and a level that is not up at time zero comes up at
     s_c at the earliest.
  2. Stretches may begin and end at points in time t_i. Let b be the first end of the needs that a stretch
     meets, and a their last beginning. First case, b <= a: the part of the stretch from b to a meets the same
     needs and costs no more. Second case, a < b and one of the two lies in the stretch: it is enough to be up
     at that moment alone (w_i = 1, y_i = 0). Third case, all others: no t_i of the level lies in the stretch,
     and coming up at the next t_i meets all of its needs.
  3. The rows work_v. In the first two cases of 2 the program's solution pays in each v at most what the run
     pays. In the third case the run may pay earlier or later than the solution, so work_v counts w_i as paid
     from s_c before t_(i-1) to t_(i+1), which is longer than s_c. The rest of what the run pays is e_v.

In a run a level is up only while all levels below it are. The program has no rows for this: cuts on the
lower levels have the same effect. Where a level costs nothing, a need on it counts as one on the level below,
or the program would meet it for nothing.

Billing by whole units (an hour, say) has a program of its own, without the rows work_v. As in
`simulator/elastic.py`, a pool first gives up the worker that it started last. So there are k or more workers,
ready or starting, exactly while the k-th worker lives: level (c, k) pays for this worker, or for the node on
which it is the first, in whole units of U seconds. The day is cut into slots of U / UNIT_PARTS.

Vars   q_mj  lives of the level, ordered in slot m, of which unit j is paid     a_n  0 to 1: alive in slot n
  s.t.  paid_m    sum of the w_i with t_i - s_c in slot m, and y_-1 if m = 0  <= q_m1
        unit_mj   q_mj <= q_m(j-1)
        alive_n   a_n <= sum over m of q_mj, with the first j whose unit may still last in slot n
        up_i      y_i <= a_n,  where slot n has t_(i+1)

A life that is ordered in slot m ends less than j units after the slot does, so its unit j is paid in every
slot n in which it is alive. The changes of point 2 make no life longer.

Where nodes are sold whole and only one pool is on a kind of node, the first worker of a node pays the whole
node with its GPUs idle, and each worker also pays what its GPUs cost more in use than idle. p_ck is never
more than what is paid (`prices_by_level`). Where several pools share a kind of node, idle GPUs count as free,
so the bound stays a lower bound.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.solvers.backend import ProgramBuilder, minimise_program
from planner.solvers.paid_work import LeastPaid
from planner.solvers.pool_sizes import SAME_S, DayTerms
from planner.solvers.whole_nodes import fewest_nodes
from planner.units import HOUR_S

Floats = npt.NDArray[np.float64]
Need = tuple[float, float, int, int]
"""(a, b, pool, n): at some moment from a to b [s] more than n workers of the pool are ready."""
Needs = tuple[Need, ...]
"""A cut: at least one of these needs must be met."""
Stretches = list[tuple[float, float]]


class LevelStretches(dict[tuple[int, int], Stretches]):
    """For each level (pool, k) that costs something the stretches (begin, end) [s] in which k or more workers
    are up, in order. Levels that cost nothing (`priced_sizes`) are up while the one below them is.
    """


# Slots in a billing unit. More slots make the program larger and the bound higher, by up to a slot per life.
UNIT_PARTS = 12
LEAST_PRICE_USD = 1e-9  # A level that costs less per unit and hour costs nothing but rounding.
TOLERANCE = 1e-6  # The bound is lowered by this share, because the solver keeps rows only this exactly.


@dataclass(frozen=True, slots=True, eq=False)
class CheapestLevels:
    """When levels are up, None if no run was found. A run that meets all cuts costs at least `bound_usd`."""

    up: LevelStretches | None
    bound_usd: float


@dataclass(slots=True, eq=False)
class _Level:
    """The numbers of one level's columns in the program. Its I points in time are `points_s`. `up` (I + 1,)
    are the columns of y_-1, y_0, ...; `comes` (I,) those of w_i, or -1 where w_i is always 0 and has no
    column.
    """

    points_s: Floats
    up: list[int]
    comes: list[int]

    def met_by(self, begin_s: float, end_s: float) -> dict[int, float]:
        """What a need from `begin_s` to `end_s` adds to the row of its cut: the coefficient 1 by column, for
        all columns that meet it.
        """
        first = int(np.searchsorted(self.points_s, begin_s - SAME_S))
        after_last = int(np.searchsorted(self.points_s, end_s + SAME_S))
        # `up` begins with y_-1, so up[first] is y of the point before the need.
        columns = [self.up[first], *(w for w in self.comes[first:after_last] if w >= 0)]
        return dict.fromkeys(columns, 1.0)

    def stretches(self, x: Floats) -> Stretches:
        """When the level is up in the solution `x` of the program. Its 0s and 1s may be off by the solver's
        tolerance, so they are compared with 0.5.
        """
        stretches_up: Stretches = []
        begin_s = 0.0 if x[self.up[0]] > 0.5 else None
        for i, at_s in enumerate(self.points_s.tolist()):
            if begin_s is None and self.comes[i] >= 0 and x[self.comes[i]] > 0.5:
                begin_s = at_s
            if begin_s is not None and x[self.up[i + 1]] < 0.5:
                stretches_up.append((begin_s, at_s))
                begin_s = None
        return stretches_up


def prices_by_level(day: DayTerms, c: int) -> Floats:
    """The least price [USD/h] of 0, 1, ... `most` workers of pool `c`, whatever sizes other pools have. The
    differences are the p_ck of its levels.
    """
    pool = day.pools[c]
    counts = np.arange(pool.most + 1)
    usd_per_h = counts * float(day.prices()[c])
    for node, pools in day.pools_by_node_kind().values():
        if pools == [c]:
            # GPUs that fill up the last node.
            idle_gpus = -(counts * pool.gpus) % node.gpus
            usd_per_h = usd_per_h + idle_gpus * node.idle_usd_per_h
    # One more worker lowers the price only if its GPUs cost less in use than idle. So that no p_ck is
    # negative, each price is lowered to the least of all larger counts.
    return np.minimum.accumulate(usd_per_h[::-1])[::-1]


def usd_per_h_by_level(day: DayTerms, c: int) -> Floats:
    """p_ck [USD/h] of the levels of pool `c`, k from 0 on."""
    return np.diff(prices_by_level(day, c), prepend=0.0)


def usd_by_unit(day: DayTerms, c: int) -> tuple[Floats, Floats]:
    """What the k-th worker of pool `c` pays for each unit of its life [USD], and in addition for each hour of
    its life [USD/h]; k from 0 on.

    Pools that share nodes pay only by the hour, which is a lower bound.
    """
    pool, counts = day.pools[c], np.arange(day.pools[c].most + 1)
    per_unit, usd_per_h = day.unit_s / HOUR_S * float(day.prices()[c]), np.zeros(pool.most + 1)
    if pool.node is None:
        return np.where(counts > 0, per_unit, 0.0), usd_per_h
    node, pools = day.pools_by_node_kind()[pool.node.kind]
    more_usd_per_h = float(day.prices()[c]) - pool.gpus * node.idle_usd_per_h
    if pools != [c] or more_usd_per_h < 0:
        return usd_per_h, usd_per_h_by_level(day, c)
    nodes = np.asarray(fewest_nodes(node.gpus, [(pool.gpus, counts.astype(float))]))
    node_usd = node.gpus * node.idle_usd_per_h * day.unit_s / HOUR_S
    return np.diff(nodes, prepend=0.0) * node_usd, np.where(counts > 0, more_usd_per_h, 0.0)


def usd_by_level(day: DayTerms, c: int) -> tuple[Floats, Floats]:
    """What level (c, k) pays for each unit of a life [USD], 0 by the second, and for each hour of it [USD/h];
    k from 0 on.
    """
    if day.is_by_unit:
        return usd_by_unit(day, c)
    usd_per_h = usd_per_h_by_level(day, c)
    return np.zeros_like(usd_per_h), usd_per_h


def priced_sizes(day: DayTerms, c: int) -> list[int]:
    """The sizes of pool `c`, from its least on, at which one more worker costs something, and its most.

    All other sizes cost what the next of these does: on a node that is sold whole, workers beside the first
    may be free.
    """
    pool, (unit_usd, hour_usd) = day.pools[c], usd_by_level(day, c)
    is_priced = (unit_usd + hour_usd)[pool.least + 1 :] > LEAST_PRICE_USD
    return [*(np.flatnonzero(is_priced) + pool.least).tolist(), pool.most]


def priced_sizes_by_pool(day: DayTerms) -> list[list[int]]:
    """The `priced_sizes` of each pool."""
    return [priced_sizes(day, c) for c in range(len(day.pools))]


def cheapest_levels(
    day: DayTerms, cuts: Sequence[Needs], work: LeastPaid, *, gap_frac: float, time_limit_s: float
) -> CheapestLevels:
    """The program above, solved to `gap_frac` or until the time is up. `day` has the pools and their prices
    (pool_sizes.py), `work` what must be paid at least in each stretch (paid_work.py). By whole units where
    `day` is billed so; `work` then does not count.
    """
    builder, paid = ProgramBuilder(), _PaidByStretch.unpaid(work)
    unit_usd, hour_usd = zip(*(usd_by_level(day, c) for c in range(len(day.pools))), strict=True)
    # The `least` workers of each pool are always up, so they have no levels.
    always = [slice(pool.least + 1) for pool in day.pools]
    always_usd_per_h = sum(float(usd[workers].sum()) for usd, workers in zip(hour_usd, always, strict=True))
    always_unit_usd = sum(float(usd[workers].sum()) for usd, workers in zip(unit_usd, always, strict=True))
    needed = _priced_needs(day, cuts)
    points: dict[tuple[int, int], set[float]] = {}
    for begin_s, end_s, c, n in (need for cut in needed for need in cut):
        points.setdefault((c, n + 1), set()).update((begin_s, end_s))
    levels: dict[tuple[int, int], _Level] = {}
    for c, k in sorted(points):
        points_s, start_s = _distinct_times_s(points[c, k]), day.pools[c].start_s
        levels[c, k] = _add_level(builder, paid, points_s, start_s, float(hour_usd[c][k]))
        if unit_usd[c][k] > 0:
            _add_units(builder, day, levels[c, k], start_s, float(unit_usd[c][k]))
    for cut in needed:
        terms: dict[int, float] = {}
        for begin_s, end_s, c, n in cut:
            # A column that meets two needs of the cut counts once.
            terms |= levels[c, n + 1].met_by(begin_s, end_s)
        builder.add_row(terms, 1.0)
    if not day.is_by_unit:
        _add_work_rows(day, builder, work, paid.usd_of, always_usd_per_h)
    elif not levels:  # The solver refuses a program without columns and rows.
        builder.add_row({builder.add_variable(0.0): 1.0}, 0.0)
    point = minimise_program(builder.to_program(), gap_frac=gap_frac, time_limit_s=time_limit_s)
    last_s = float(day.edges_s[-1])
    always_usd = always_usd_per_h * last_s / HOUR_S
    if day.is_by_unit:
        always_usd += always_unit_usd * day.count_units(last_s)
    bound_usd = max((point.bound + always_usd) * (1 - TOLERANCE), 0.0)
    if point.x is None:
        return CheapestLevels(None, bound_usd)
    x = point.x
    up = LevelStretches((key, level.stretches(x)) for key, level in levels.items())
    return CheapestLevels(up, bound_usd)


@dataclass(frozen=True, slots=True, eq=False)
class _PaidByStretch:
    """What the columns of all levels pay in each stretch v of the rows work_v: `usd_of[v]` has the USD by
    column, for a variable of 1. Stretch v goes from `starts_s[v]` to `ends_s[v]`.
    """

    starts_s: Floats
    ends_s: Floats
    usd_of: list[dict[int, float]]

    @classmethod
    def unpaid(cls, work: LeastPaid) -> _PaidByStretch:
        """The stretches of `work`, in which nothing is paid yet."""
        stretches = len(work.in_stretch_usd)
        # The last stretch needs no end, since every level ends with the day.
        ends_s = np.append(work.edges_s[1:stretches], math.inf)
        return cls(work.edges_s, ends_s, [{} for _ in range(stretches)])

    def add_payment(self, column: int, from_s: float, to_s: float, usd_per_h: float) -> None:
        """Count a column as paid at `usd_per_h` between these times, in every stretch that overlaps with
        them.
        """
        first = max(int(np.searchsorted(self.starts_s, from_s, "right")) - 1, 0)
        for v in range(first, len(self.usd_of)):
            if self.starts_s[v] >= to_s:
                break
            inside_s = min(to_s, float(self.ends_s[v])) - max(from_s, float(self.starts_s[v]))
            self.usd_of[v][column] = self.usd_of[v].get(column, 0.0) + inside_s / HOUR_S * usd_per_h


def _add_level(
    builder: ProgramBuilder, paid: _PaidByStretch, points_s: Floats, start_s: float, usd_per_h: float
) -> _Level:
    """Add the columns and the rows comes_i of one level, and to `paid` what its columns pay in each stretch.
    `usd_per_h` is p_ck of the level, `start_s` the start-up of its pool.
    """
    # The points with the first and the last one repeated, so that each has a neighbour on both sides.
    padded_s = np.concatenate((points_s[:1], points_s, points_s[-1:]))
    up = [builder.add_variable(1.0)]
    comes: list[int] = []
    for i, at_s in enumerate(points_s.tolist()):
        before_s, after_s = float(padded_s[i]), float(padded_s[i + 2])
        comes.append(-1)
        if at_s >= start_s - SAME_S:
            comes[-1] = builder.add_variable(1.0, cost=start_s / HOUR_S * usd_per_h)
            paid.add_payment(comes[-1], max(before_s - start_s, 0.0), after_s, usd_per_h)
        length_s = after_s - at_s
        # After the last point nothing is needed, so the level is not up there: that y is fixed at 0.
        is_last = i + 1 == len(points_s)
        usd = length_s / HOUR_S * usd_per_h
        up.append(builder.add_variable(0.0 if is_last else 1.0, cost=usd, is_integer=not is_last))
        if not is_last:
            paid.add_payment(up[-1], at_s, at_s + length_s, usd_per_h)
        w_i = {comes[-1]: 1.0} if comes[-1] >= 0 else {}
        builder.add_row({up[-1]: -1.0, up[-2]: 1.0} | w_i, 0.0)  # comes_i
    return _Level(points_s, up, comes)


def _add_units(
    builder: ProgramBuilder, day: DayTerms, level: _Level, start_s: float, unit_usd: float
) -> None:
    """Add the columns q and a of one level, and its rows paid_m, unit_mj, alive_n and up_i. `unit_usd` is the
    price of one unit of its worker.
    """
    last_s, slot_s = float(day.edges_s[-1]), day.unit_s / UNIT_PARTS
    slots = int(last_s // slot_s) + 1
    # For each slot m: the terms of the row paid_m but q_m1, by column.
    coming: list[dict[int, float]] = [{} for _ in range(slots)]
    coming[0][level.up[0]] = -1.0
    for at_s, w in zip(level.points_s.tolist(), level.comes, strict=True):
        if w >= 0:
            coming[int(max(at_s - start_s, 0.0) // slot_s)][w] = -1.0
    alive: list[dict[int, float]] = [
        {} for _ in range(slots)
    ]  # For each slot n: the q_mj of the row alive_n.
    for m, columns in enumerate(coming):
        if not columns:
            continue
        unit = -1
        for j in range(1, max(day.count_units(last_s - m * slot_s), 1) + 1):
            before, unit = unit, builder.add_variable(math.inf, cost=unit_usd)
            builder.add_row({unit: 1.0} | columns if j == 1 else {before: 1.0, unit: -1.0}, 0.0)
            # In these slots j is the first unit that may still last for a life that was ordered in slot m.
            first = m if j == 1 else m + 1 + (j - 1) * UNIT_PARTS
            for n in range(first, min(m + 1 + j * UNIT_PARTS, slots)):
                alive[n][unit] = 1.0
    alive_columns: dict[int, int] = {}
    for after_s, y in zip(level.points_s[1:].tolist(), level.up[1:-1], strict=True):
        n = int((after_s - SAME_S) // slot_s)
        if n not in alive_columns:
            alive_columns[n] = builder.add_variable(1.0, is_integer=False)
            builder.add_row(alive[n] | {alive_columns[n]: -1.0}, 0.0)
        builder.add_row({alive_columns[n]: 1.0, y: -1.0}, 0.0)


def _priced_needs(day: DayTerms, cuts: Sequence[Needs]) -> list[Needs]:
    """These cuts, with each need on a level that costs something; cuts that are always met are left out.

    A level that costs nothing is up whenever the one below it is, so a need on it becomes one on the next
    level below that costs something. Where there is none above the pool's least, the need is always met.
    """
    sizes = priced_sizes_by_pool(day)
    priced: list[Needs] = []
    for cut in cuts:
        counts = [bisect.bisect(sizes[c], n) for _, _, c, n in cut]
        if all(counts):
            priced.append(
                tuple((a, b, c, sizes[c][i - 1]) for (a, b, c, _), i in zip(cut, counts, strict=True))
            )
    return shortest_needs(priced)


def shortest_needs(cuts: Sequence[Needs]) -> list[Needs]:
    """These cuts, each once. A cut of a single need is left out if the stretch of its need contains that of
    another such cut on the same level, which implies it.
    """
    several = [cut for cut in cuts if len(cut) > 1]
    alone: dict[tuple[int, int], set[tuple[float, float]]] = {}
    for ((begin_s, end_s, c, n),) in (cut for cut in cuts if len(cut) == 1):
        alone.setdefault((c, n), set()).add((begin_s, end_s))
    shortest: list[Needs] = []
    for (c, n), stretches in alone.items():
        first_end_s = math.inf
        # From the latest beginning to the earliest: a stretch contains an earlier one of this order if it
        # ends no earlier.
        for begin_s, end_s in sorted(stretches, key=lambda stretch: (-stretch[0], stretch[1])):
            if end_s < first_end_s:
                first_end_s = end_s
                shortest.append(((begin_s, end_s, c, n),))
    return [*shortest, *dict.fromkeys(several)]


def _distinct_times_s(times_s: set[float]) -> Floats:
    """The time 0 and these times, in order; of times that differ by rounding alone, the first."""
    ordered = np.array(sorted({0.0, *times_s}))
    return ordered[np.concatenate(([True], np.diff(ordered) > SAME_S))]


def _add_work_rows(
    day: DayTerms,
    builder: ProgramBuilder,
    work: LeastPaid,
    usd_of: list[dict[int, float]],
    always_usd_per_h: float,
) -> None:
    """Add the columns e_v and the rows work_v. `usd_of[v]` is what each column of a level pays in stretch v
    [USD]; `always_usd_per_h` is the price of the workers that are always up, which have no columns.
    """
    last_s = float(day.edges_s[-1])
    bounds_s = np.minimum(np.append(work.edges_s[: len(usd_of)], last_s), last_s)
    later: dict[int, float] = {}  # What each column, those of e_v included, pays from stretch v on.
    later_always_usd = 0.0
    for v in reversed(range(len(usd_of))):
        always_usd = always_usd_per_h * float(bounds_s[v + 1] - bounds_s[v]) / HOUR_S
        terms = {builder.add_variable(math.inf, cost=1.0, is_integer=False): 1.0} | usd_of[v]
        builder.add_row(terms, float(work.in_stretch_usd[v]) - always_usd)
        for column, usd in terms.items():
            later[column] = later.get(column, 0.0) + usd
        later_always_usd += always_usd
        builder.add_row(later, float(work.from_stretch_usd[v]) - later_always_usd)
