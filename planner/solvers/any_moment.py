"""A lower bound on what is paid if sizes may change at any moment: the master of
day/search/any_moment_bound.py.

Sets   t  step of the day, from e_t to e_(t+1), shorter than a start-up     c  pool     k  1, 2, ... workers
       q  cell of time: between two neighbours of all e_t and all e_(t+1) - s_c     v  stretch of the day
Data   l_q  length of a cell [h]      s_c  start-up [s]      p_c  price of a worker [USD/h]
       g_c  GPUs of a worker         G_j, i_j  GPUs of a node of kind j, sold whole, and an idle one [USD/h]
       f_v, F_v  what is paid at least in stretch v, and from v on (paid_work.LeastPaid) [USD]
       C_u  set of (t, c, n): some moment of one of the steps t has more than n workers of pool c
Vars   z_tck  0 or 1: k workers or more are ready at once at some moment of t
       y_qck  k workers or more are paid all through cell q   m_qj  nodes of kind j   e_v  USD paid beyond y

  min   sum_q l_q (sum_ck p_c y_qck + sum_j i_j (G_j m_qj - sum_ck g_c y_qck)) + sum_v e_v
  s.t.  paid_qtck    y_qck >= z_tck       for q within [e_(t+1) - s_c, e_t]
        nested_tck   z_tck >= z_tc(k+1)
        cut_u        sum of z_tc(n+1) over C_u >= 1
        node_qj      G_j m_qj >= sum_ck g_c y_qck
        work_v       what y and m cost in v + e_v >= f_v,   and in v and all later stretches >= F_v

k workers that are ready at one moment of step t were asked for a start-up before that moment, or were there
from the beginning. So they are certainly paid from e_(t+1) - s_c (or 0) to e_t. There is a variable for each
k because then cuts over neighbouring steps with the same k leave little for the search over integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csc_matrix

from planner.solvers.backend import Program, minimise
from planner.solvers.paid_work import LeastPaid
from planner.solvers.pool_sizes import Cut, DayTerms

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TOLERANCE = 1e-6  # The solver keeps rows to within this share.
SAME_S = 1e-6  # Times nearer to each other than this are equal but for rounding.


@dataclass(frozen=True, slots=True, eq=False)
class LeastSizes:
    """The most workers (T, C) of each step that the program found, or None; no run that keeps the cuts costs
    less than `bound_usd`.
    """

    workers: Ints | None
    bound_usd: float


class _Columns:
    """Collects the columns of a program, with cost and range, and its rows `sum >= least`."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.is_whole: list[bool] = []
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[float] = []
        self.least: list[float] = []

    def add(self, high: float, *, low: float = 0.0, cost: float = 0.0, is_whole: bool = False) -> int:
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.is_whole.append(is_whole)
        return len(self.cost) - 1

    def at_least(self, terms: Mapping[int, float], least: float) -> None:
        """Add a row; `terms` are its coefficients by column."""
        self.row += [len(self.least)] * len(terms)
        self.column += list(terms)
        self.value += list(terms.values())
        self.least.append(least)

    def program(self) -> Program:
        shape = len(self.least), len(self.cost)
        matrix = csc_matrix((np.array(self.value), (self.row, self.column)), shape=shape)
        least, low, high = (np.array(values, float) for values in (self.least, self.low, self.high))
        return Program(np.array(self.cost), matrix, least, low, high, np.array(self.is_whole))


def cells_s(day: DayTerms) -> Floats:
    """The edges (Q + 1,) of the cells of time."""
    edges_s = day.edges_s
    moments = np.unique(np.concatenate([edges_s, *(edges_s[1:] - pool.start_s for pool in day.pools)]))
    moments = moments[moments >= 0]
    return moments[np.concatenate(([True], np.diff(moments) > SAME_S))]


def least_sizes_at_any_moment(
    day: DayTerms, cuts: Sequence[Cut], work: LeastPaid, *, gap_frac: float, time_limit_s: float
) -> LeastSizes:
    """The program above, solved to `gap_frac` or until the time is up."""
    columns, edges_s = _Columns(), day.edges_s
    ready = _ready_columns(day, cuts, columns)
    all_cells_s = cells_s(day)
    begins_s, hours = all_cells_s[:-1], np.diff(all_cells_s) / 3600
    prices = day.prices()
    # Of each cell: what is paid for the least sizes, and the USD and the pool of each of its columns.
    always_usd = hours * float(prices @ np.array([pool.least for pool in day.pools]))
    usd: list[dict[int, float]] = [{} for _ in begins_s]
    pool_of: list[dict[int, int]] = [{} for _ in begins_s]
    paid: dict[tuple[int, int, int], int] = {}
    for (t, c, k), column in ready.items():
        first = int(np.searchsorted(begins_s, edges_s[t + 1] - day.pools[c].start_s - SAME_S))
        end = int(np.searchsorted(begins_s, edges_s[t] - SAME_S))
        # Fewer workers of the same step have a column of their own, which nested_tck makes 1 as well.
        below = max(
            (n for n in range(day.pools[c].least, k) if (t, c, n) in ready), default=day.pools[c].least
        )
        for q in range(first, end):
            for n in range(below + 1, k + 1):
                if (q, c, n) not in paid:
                    paid[q, c, n] = columns.add(1.0, cost=float(hours[q] * prices[c]))
                    usd[q][paid[q, c, n]] = float(hours[q] * prices[c])
                    pool_of[q][paid[q, c, n]] = c
                columns.at_least({paid[q, c, n]: 1.0, column: -1.0}, 0.0)
    _add_nodes(day, columns, hours, always_usd, usd, pool_of)
    # The terms, and the USD of the least sizes, of this and all later stretches.
    later, later_usd = dict[int, float](), 0.0
    for v in reversed(range(len(work.in_stretch_usd))):
        inside = (begins_s > work.edges_s[v] - SAME_S) & (begins_s < work.edges_s[v + 1] - SAME_S)
        terms = {columns.add(math.inf, cost=1.0): 1.0}
        for q in np.flatnonzero(inside).tolist():
            terms |= usd[q]
        own_usd = float(always_usd[inside].sum())
        columns.at_least(terms, float(work.in_stretch_usd[v]) - own_usd)
        later, later_usd = later | terms, later_usd + own_usd
        columns.at_least(later, float(work.from_stretch_usd[v]) - later_usd)
    point = minimise(columns.program(), gap_frac=gap_frac, time_limit_s=time_limit_s)
    total_usd = float(always_usd.sum())
    bound_usd = max((point.bound + total_usd) * (1 - TOLERANCE), 0.0)
    if point.x is None:
        return LeastSizes(None, bound_usd)
    sizes = day.least
    for (t, c, k), column in ready.items():
        if point.x[column] > 0.5:
            sizes[t, c] = max(sizes[t, c], k)
    return LeastSizes(sizes, bound_usd)


def _ready_columns(day: DayTerms, cuts: Sequence[Cut], columns: _Columns) -> dict[tuple[int, int, int], int]:
    """The columns z by (t, c, k) that cuts name, with cut_u and nested_tck."""
    ready: dict[tuple[int, int, int], int] = {}
    for cut in cuts:
        if any(n < day.pools[c].least for _, c, n in cut):
            continue  # The least sizes keep this cut.
        for t, c, n in cut:
            if (t, c, n + 1) not in ready:
                ready[t, c, n + 1] = columns.add(1.0, is_whole=True)
        columns.at_least({ready[t, c, n + 1]: 1.0 for t, c, n in cut}, 1.0)
    for (t, c, k), column in ready.items():
        below = max((n for n in range(day.pools[c].least + 1, k) if (t, c, n) in ready), default=None)
        if below is not None:
            columns.at_least({ready[t, c, below]: 1.0, column: -1.0}, 0.0)
    return ready


def _add_nodes(
    day: DayTerms,
    columns: _Columns,
    hours: Floats,
    always_usd: Floats,
    usd: list[dict[int, float]],
    pool_of: list[dict[int, int]],
) -> None:
    """Add node_qj where nodes are sold whole, and to each cell's USD what their idle GPUs cost."""
    for node, pools in day.pools_by_node_kind().values():
        least_gpus = sum(day.pools[c].gpus * day.pools[c].least for c in pools)
        for q, pool_by_column in enumerate(pool_of):
            idle_usd = float(hours[q] * node.idle_usd_per_h)
            gpus = {column: float(day.pools[c].gpus) for column, c in pool_by_column.items() if c in pools}
            nodes = columns.add(math.inf, cost=node.gpus * idle_usd, is_whole=True)
            usd[q][nodes] = node.gpus * idle_usd
            for column, count in gpus.items():
                columns.cost[column] -= count * idle_usd
                usd[q][column] -= count * idle_usd
            always_usd[q] -= least_gpus * idle_usd
            terms = {nodes: float(node.gpus)} | {column: -count for column, count in gpus.items()}
            columns.at_least(terms, float(least_gpus))
