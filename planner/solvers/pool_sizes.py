"""The cheapest sequence of pool sizes over a day that no cut rules out. planner/day/search/day_optimum.py
simulates such sequences one by one, and adds a cut for each that fails.

Sets   t  step of the day, from edge e_t to e_(t+1)     c  pool     u  failure, explained by a cut
       q  cell of time: from one moment to the next, of all edges e_t and all e_t - s_c in order
Data   l_q  length of a cell [h]                 s_c  start-up of a worker [s]
       p_c  price of a worker [USD/h]            g_c  its GPUs,  S_k  stock of GPUs of kind k
       least_tc, most_c  sizes allowed           G_k  GPUs of a node sold whole,  i_k  price of an idle GPU
                                                 [USD/h]
       C_u  set of (t, c), with sizes n^u_tc that failed together in a simulation
       h    the unit of the bill, a second or for instance an hour; a unit that is begun is paid whole
       L    length of the day [h]                a_k  price of a GPU of kind k [USD/h]
Vars   x_tc  integer: workers ready in step t    y_qc  workers paid in cell q: starting, or ready
       m_qk  nodes of kind k                     z_abc workers ready from step a on and paid for b units
       M_k   nodes of kind k that are paid all day, or GPUs where G_k is 1

  min   sum_q l_q (sum_c p_c y_qc + sum_k i_k (G_k m_qk - sum_c g_c y_qc))                  (by seconds)
  or    sum_abc h b p_c z_abc  over pools on no whole nodes, the others as by seconds       (by units h)
  or    L sum_k a_k G_k M_k                                                                 (all day)
  s.t.  paid_qct   y_qc >= x_tc     for t that meets the cell, or begins less than s_c after it
        stock_qk    sum_c g_c y_qc + idle GPUs of whole nodes (counted as in node_qk) <= S_k
        node_qk     G_k m_qk >= sum_c g_c y_qc, and (G_k // g) m_qk >= sum of y_qc over the c with g_c >= g
                    for each size g of workers that leaves GPUs of a node unused (`fewest_nodes`)
        day_qk      the same rows of M_k           (all day alone: they take the place of node_qk)
        lives_tc    sum of z_abc over (a, b) that are paid through step t >= x_tc
        cut_u       x_tc >= n^u_tc + 1 for at least one (t, c) of C_u    (more than a sequence that fails)

A worker is started s_c before it is to be ready, and paid from its start on, so y is x extended by the
start-up. A worker that must be ready sooner than s_c after the beginning is there from the beginning. A
worker that would be given up for no longer than a start-up is kept (`ready_workers_at_no_cost`).

The model's cost is a lower bound of the bill, for two reasons. A worker is also paid while it ends its last
requests, which the model leaves out. Where nodes are sold whole, the bill rounds the life of each node up
to units, while the model charges nodes by the second.

HiGHS solves the model: a day of 144 steps billed by the second takes 0.05 s; CP-SAT took as long or did not
end. The one assumption is that more workers never hurt, so that a cut also rules out all smaller sizes.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.domain import stock_name
from planner.errors import InputError
from planner.solvers.backend import ProgramBuilder, minimise_program
from planner.solvers.whole_nodes import PricedNode, fewest_nodes, idle_gpus, packing_rows
from planner.units import HOUR_S

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# Entries (step, pool, size): for at least one entry the pool's size in the step must be larger than `size`.
Cut = tuple[tuple[int, int, int], ...]

TOLERANCE = 1e-6  # The solver keeps rows to within this share.
# For billing units no longer than this the model does not round lives up to whole units: it leaves out at
# most a minute of a worker that lives for hours.
LONG_UNIT_S = 60.0
SAME_S = 1e-6  # Two times that differ by less than this are equal but for rounding errors.


@dataclass(frozen=True, slots=True)
class PoolTerms:
    """A pool: the start-up s_c of a worker, the fewest and most workers, the price p_c and the GPUs g_c of a
    worker, the name of its GPU, and the node if nodes are sold whole.
    """

    start_s: float
    least: int
    most: int
    usd_per_h: float
    gpus: int = 1
    gpu: str = ""
    node: PricedNode | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise InputError(
                f"pool of {self.gpu or 'workers'}: least is {self.least} and most {self.most}; "
                "must be 0 <= least <= most"
            )
        if not 0 <= self.start_s < math.inf:
            raise InputError(f"pool of {self.gpu or 'workers'}: start_s is {self.start_s}, must be >= 0")


class GpuKind(NamedTuple):
    """a_k, G_k and the pools on such GPUs."""

    gpu_usd_per_h: float
    node_gpus: int
    pools: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class DayTerms:
    """A day: the `edges_s` (T + 1,) of its steps, from 0 on; the billing unit `unit_s`, paid whole once it is
    begun (0: seconds are billed, not rounded); the `stock` of GPUs by name, where the stock of "h100-80g"
    includes "h100-80g@spot". With `is_paid_all_day` the most GPUs in use at once are paid for the whole day.
    """

    edges_s: Floats
    pools: tuple[PoolTerms, ...]
    unit_s: float = 0.0
    stock: Mapping[str, int] = field(default_factory=dict)
    is_paid_all_day: bool = False

    def __post_init__(self) -> None:
        if len(self.edges_s) < 2 or self.edges_s[0] != 0 or not (np.diff(self.edges_s) > 0).all():
            raise InputError("the grid of a day must have two edges or more, rising from 0")
        if self.is_paid_all_day and self.unit_s:
            raise InputError(f"unit_s is {self.unit_s:g}, must be 0 where GPUs are paid all day")
        longest_s = max((pool.start_s for pool in self.pools), default=0.0)
        if longest_s > self.edges_s[-1]:
            raise InputError(
                f"a start-up takes {longest_s:g} s, and the day ends after {self.edges_s[-1]:g} s: no worker "
                "that starts would ever be ready; give a longer trace, or a shorter start-up"
            )

    @property
    def is_by_unit(self) -> bool:
        """Whether the billing unit is so long that the model rounds lives up to whole units."""
        return self.unit_s > LONG_UNIT_S

    def count_units(self, life_s: float) -> int:
        """How many billing units a life of this length has begun. An end that is later than the end of a unit
        by a rounding error begins no further unit. Raises InputError if nothing is billed by units.
        """
        if not self.unit_s > 0:
            raise InputError("unit_s is 0: nothing is billed by units")
        return math.ceil((life_s - SAME_S) / self.unit_s)

    @property
    def shape(self) -> tuple[int, int]:
        """(T, C): the steps of the day, and the pools."""
        return len(self.edges_s) - 1, len(self.pools)

    @property
    def most(self) -> Ints:
        """The largest sizes (T, C), as a new array at every access."""
        return np.tile([pool.most for pool in self.pools], (self.shape[0], 1)).astype(np.int64)

    @property
    def least(self) -> Ints:
        """The smallest sizes (T, C), as a new array at every access."""
        return np.tile([pool.least for pool in self.pools], (self.shape[0], 1)).astype(np.int64)

    def cells_s(self) -> Floats:
        """The edges (Q + 1,) of the cells of time."""
        moments = [self.edges_s, *(self.edges_s[1:-1] - pool.start_s for pool in self.pools)]
        distinct_s = np.unique(np.concatenate(moments))
        # A moment before 0 is no edge: such workers are there from the beginning of the day.
        distinct_s = distinct_s[distinct_s >= 0]
        return distinct_s[np.concatenate(([True], np.diff(distinct_s) > SAME_S))]

    def cells_h(self) -> Floats:
        """l_q (Q,): the lengths of the cells [h]."""
        return np.diff(self.cells_s()) / HOUR_S

    def paying_steps(self, c: int) -> list[range]:
        """For each of the Q cells, the steps whose workers of pool c are paid in it, ready or starting: from
        the step that the cell is part of to the last one that begins within a start-up.
        """
        begins = self.cells_s()[:-1]
        first = np.searchsorted(self.edges_s[1:], begins + SAME_S, "right")
        after_last = np.searchsorted(self.edges_s[:-1], begins + self.pools[c].start_s + SAME_S, "right")
        return [range(a, b) for a, b in zip(first.tolist(), after_last.tolist(), strict=True)]

    def pools_on_gpu(self, gpu: str) -> list[int]:
        """Indices of the pools whose workers take GPUs from this stock, power-capped or not."""
        return [c for c, pool in enumerate(self.pools) if gpu == stock_name(pool.gpu)]

    def are_within_stock(self, workers: Ints) -> npt.NDArray[np.bool_]:
        """Whether the stock has GPUs for each row of these workers (N, C), as `FleetLimits` counts them
        (solvers/master.py).
        """
        fit = np.ones(len(workers), bool)
        for gpu, count in self.stock.items():
            pools = [
                (self.pools[c].node, self.pools[c].gpus, workers[:, c].astype(float))
                for c in self.pools_on_gpu(gpu)
            ]
            used = sum(gpus * number for _, gpus, number in pools)
            fit &= np.asarray(used + idle_gpus(pools) <= count)
        return fit

    def pools_by_node_kind(self) -> dict[str, tuple[PricedNode, list[int]]]:
        """For each kind of node that is sold whole: the node, at its highest price, and the pools on it."""
        pools_by_node: dict[str, tuple[PricedNode, list[int]]] = {}
        for c, pool in enumerate(self.pools):
            if (node := pool.node) is not None:
                dearest, pools = pools_by_node.get(node.kind, (node, []))
                dearest = max(dearest, node, key=lambda priced: priced.gpu_usd_per_h)
                pools_by_node[node.kind] = dearest, [*pools, c]
        return pools_by_node

    def gpu_kinds(self) -> list[GpuKind]:
        """Each kind of node that is sold whole, and each other GPU, for which `node_gpus` is 1."""
        pools_by_kind: dict[tuple[str, int], list[int]] = {}
        for c, pool in enumerate(self.pools):
            kind = (pool.gpu, 1) if pool.node is None else (pool.node.kind, pool.node.gpus)
            pools_by_kind.setdefault(kind, []).append(c)
        prices = self.prices()
        return [
            GpuKind(max(float(prices[c]) / self.pools[c].gpus for c in pools), node_gpus, pools)
            for (_, node_gpus), pools in pools_by_kind.items()
        ]

    def nodes_for(self, node_gpus: int, pools: Sequence[int], workers: Ints) -> Ints:
        """How many nodes of `node_gpus` GPUs hold the workers (..., C) of these pools."""
        by_size = [(self.pools[c].gpus, workers[..., c].astype(float)) for c in pools]
        return np.asarray(fewest_nodes(node_gpus, by_size)).astype(np.int64)

    def all_day_usd(self, most_nodes: Sequence[int]) -> float:
        """What the GPUs cost all day. `most_nodes` are the most in use at once, for each of `gpu_kinds`."""
        usd_per_h = sum(
            kind.gpu_usd_per_h * kind.node_gpus * most
            for kind, most in zip(self.gpu_kinds(), most_nodes, strict=True)
        )
        return float(usd_per_h * self.edges_s[-1] / HOUR_S)

    def prices(self) -> Floats:
        """p_c (C,) [USD/h]. If nodes of one kind have several prices, workers on them pay the highest, since
        all GPUs of a node cost the same, whatever runs on them.
        """
        prices = np.array([pool.usd_per_h for pool in self.pools], float)
        for dearest, pools in self.pools_by_node_kind().values():
            for c in pools:
                node = self.pools[c].node
                assert node is not None
                prices[c] += self.pools[c].gpus * (dearest.gpu_usd_per_h - node.gpu_usd_per_h)
        return prices


@dataclass(frozen=True, slots=True, eq=False)
class CheapestSizes:
    """The cheapest `workers` (T, C) that the solver found and their cost; None and infinite if it found none.
    No sequence that keeps the cuts costs less than `bound_usd`, which is infinite if no sequence keeps them.
    """

    workers: Ints | None
    usd: float
    bound_usd: float


def count_paid_workers(day: DayTerms, workers: Ints) -> Ints:
    """y: workers paid in each cell (Q, C) so that these (T, C) are ready in the steps."""
    paid_workers = np.zeros((len(day.cells_s()) - 1, len(day.pools)), np.int64)
    for c in range(len(day.pools)):
        for q, steps in enumerate(day.paying_steps(c)):
            paid_workers[q, c] = workers[steps.start : steps.stop, c].max()
    return paid_workers


def ready_workers_at_no_cost(day: DayTerms, workers: Ints) -> Ints:
    """The workers (T, C) ready in each step if no worker is given up that would be needed again within a
    start-up: in each step the number that is paid in every cell of the start-up before the step.
    """
    paid, begins = count_paid_workers(day, workers), day.cells_s()[:-1]
    ready_workers = np.empty_like(workers)
    for c, pool in enumerate(day.pools):
        for t, edge_s in enumerate(day.edges_s[:-1].tolist()):
            is_in_start_up = (begins >= edge_s - pool.start_s - SAME_S) & (begins <= edge_s + SAME_S)
            ready_workers[t, c] = paid[is_in_start_up, c].min()
    return ready_workers


def cost_usd(day: DayTerms, workers: Ints) -> float:
    """The model's cost of these sizes (T, C), billed by the second or all day: a lower bound of the bill."""
    paid_workers = count_paid_workers(day, workers)
    if day.is_paid_all_day:
        nodes = [day.nodes_for(kind.node_gpus, kind.pools, paid_workers) for kind in day.gpu_kinds()]
        return day.all_day_usd([int(in_cells.max()) for in_cells in nodes])
    return float(day.cells_h() @ paid_workers @ day.prices()) + _idle_usd(day, paid_workers)


def _idle_usd(day: DayTerms, paid_workers: Ints) -> float:
    """What idle GPUs of whole nodes cost by the second, with these workers (Q, C) in each cell."""
    hours, gpus, total = day.cells_h(), np.array([pool.gpus for pool in day.pools]), 0.0
    for node, pools in day.pools_by_node_kind().values():
        gpus_in_use = paid_workers[:, pools] @ gpus[pools]
        idle_gpus = node.gpus * day.nodes_for(node.gpus, pools, paid_workers) - gpus_in_use
        total += float(hours @ idle_gpus) * node.idle_usd_per_h
    return total


def fill_paid_units(day: DayTerms, workers: Ints, drain_s: float = 0.0) -> Ints:
    """At least these workers (T, C), and more where keeping a worker costs no more than giving it up and
    starting another, because each life is billed in whole units.

    The worker that was started last is given up first. So the n-th worker of a pool lives while n or more are
    needed, and each n can be decided by itself. A worker is paid until `drain_s` after it is given up.
    """
    filled_workers = np.zeros_like(workers)
    for c in range(len(day.pools)):
        for n in range(1, int(workers[:, c].max()) + 1):
            for steps, _ in _lives_of(day, c, workers[:, c] >= n, drain_s):
                filled_workers[steps.start : steps.stop, c] += 1
    return np.maximum(filled_workers, workers)


def units_usd(day: DayTerms, workers: Ints) -> float:
    """The least that these workers (T, C) cost in whole units, if the worker that was started last is given
    up first. Workers on nodes that are sold whole are charged by the second, which is a lower bound.
    """
    prices, is_on_node = day.prices(), [pool.node is not None for pool in day.pools]
    paid_on_nodes = np.where(is_on_node, count_paid_workers(day, workers), 0)
    total = float(day.cells_h() @ paid_on_nodes @ prices)
    total += _idle_usd(day, paid_on_nodes)
    for c in np.flatnonzero(np.logical_not(is_on_node)).tolist():
        for n in range(1, int(workers[:, c].max()) + 1):
            units = sum(units for _, units in _lives_of(day, c, workers[:, c] >= n, 0.0))
            total += float(prices[c]) * units * day.unit_s / HOUR_S
    return total


def _lives_of(
    day: DayTerms, c: int, needed: npt.NDArray[np.bool_], drain_s: float
) -> list[tuple[range, int]]:
    """The lives of one worker of pool c, which is `needed` in these steps (T,), that take the fewest units in
    all: the steps of each life, and its units. Raises InputError if nothing is billed by units.
    """
    # The worker is needed in stretches of steps: stretch k is range(begins[k], ends[k]).
    padded, edges_s = np.concatenate(([False], needed, [False])), day.edges_s
    begins = np.flatnonzero(padded[1:] & ~padded[:-1]).tolist()
    ends = np.flatnonzero(padded[:-1] & ~padded[1:]).tolist()
    # Dynamic programming over the first k stretches: `fewest_units[k]` is what they cost, and `last_life[k]`
    # the first stretch and the units of the life that covers the last of them.
    fewest_units = [0] * (len(begins) + 1)
    last_life = [(0, 0)] * (len(begins) + 1)
    for last, end in enumerate(ends):
        candidates = []
        for first, begin in enumerate(begins[: last + 1]):
            order_s = max(edges_s[begin] - day.pools[c].start_s, 0.0)
            # No worker is paid beyond the end of the day.
            gone_s = edges_s[end] + (drain_s if end < len(needed) else 0.0)
            units = day.count_units(gone_s - order_s)
            candidates.append((fewest_units[first] + units, first, units))
        fewest_units[last + 1], first, units = min(candidates)
        last_life[last + 1] = first, units
    # Walk back from the last stretch, life by life.
    worker_lives, stretches_left = [], len(begins)
    while stretches_left:
        first, units = last_life[stretches_left]
        worker_lives.append((range(begins[first], ends[stretches_left - 1]), units))
        stretches_left = first
    return worker_lives


def is_within_stock(day: DayTerms, workers: Ints) -> bool:
    """Whether the stock has GPUs for these workers (T, C), including workers that are starting."""
    return bool(day.are_within_stock(count_paid_workers(day, workers)).all())


def lives_within_stock(day: DayTerms, lives: Iterable[tuple[int, float, float]]) -> bool:
    """Whether the stock has enough GPUs for these workers, given as (pool, from, to) [s], and for the idle
    GPUs of their nodes.
    """
    lives = list(lives)
    return all(most_paid_gpus(day, lives, day.pools_on_gpu(gpu)) <= count for gpu, count in day.stock.items())


def most_gpus_in_use(day: DayTerms, lives: Iterable[tuple[int, float, float]], pools: Sequence[int]) -> int:
    """The most GPUs that workers of these pools, given as (pool, from, to) [s], use at one moment."""
    gpus = {c: day.pools[c].gpus for c in pools}
    in_pools = [(gpus[c], since_s, until_s) for c, since_s, until_s in lives if c in gpus]
    return _most_at_once(
        change for n, since_s, until_s in in_pools for change in ((since_s, n), (until_s, -n))
    )


def most_paid_gpus(day: DayTerms, lives: Iterable[tuple[int, float, float]], pools: Sequence[int]) -> int:
    """Like `most_gpus_in_use`, with the idle GPUs of whole nodes. Rented and spot nodes differ in kind."""
    lives = [life for life in lives if life[0] in pools]
    changes: list[tuple[float, int]] = []
    for kind in day.gpu_kinds():
        of_kind = [life for life in lives if life[0] in kind.pools]
        for since_s, until_s in _node_lives(day, kind.node_gpus, of_kind):
            changes += [(since_s, kind.node_gpus), (until_s, -kind.node_gpus)]
    return _most_at_once(changes)


def billed_usd(day: DayTerms, lives: Iterable[tuple[int, float, float]]) -> float:
    """The bill of workers, given as (pool, from, to) [s]. Each worker's life is paid in whole units; where
    nodes are sold whole, each node's life is. With `is_paid_all_day` the most GPUs in use at once are paid.

    The fewest nodes of each kind that hold the GPUs in use are rented, and the node that was rented last is
    given up first. A node is paid at the price of idle GPUs; what a GPU in use costs more, such as
    electricity, is paid by the second.
    """
    lives, prices, total = list(lives), day.prices(), 0.0
    if day.is_paid_all_day:
        most_nodes = []
        for kind in day.gpu_kinds():
            of_kind = [life for life in lives if life[0] in kind.pools]
            lives_s = _node_lives(day, kind.node_gpus, of_kind)
            most_nodes.append(
                _most_at_once(change for begin_s, end_s in lives_s for change in ((begin_s, 1), (end_s, -1)))
            )
        return day.all_day_usd(most_nodes)
    for c, since_s, until_s in lives:
        if day.pools[c].node is None:
            total += prices[c] * _paid_s(day, until_s - since_s) / HOUR_S
    for node, pools in day.pools_by_node_kind().values():
        on_node = [(c, since_s, until_s) for c, since_s, until_s in lives if c in pools]
        for c, since_s, until_s in on_node:
            more_usd_per_h = prices[c] - day.pools[c].gpus * node.idle_usd_per_h
            total += more_usd_per_h * (until_s - since_s) / HOUR_S
        for since_s, until_s in _node_lives(day, node.gpus, on_node):
            total += node.gpus * node.idle_usd_per_h * _paid_s(day, until_s - since_s) / HOUR_S
    return float(total)


def _paid_s(day: DayTerms, life_s: float) -> float:
    """How many seconds are paid for a life of `life_s`: whole units, or just the life where unit_s is 0."""
    return life_s if day.unit_s == 0 else day.count_units(life_s) * day.unit_s


def _most_at_once(changes: Iterable[tuple[float, int]]) -> int:
    """The most in use at one moment, from changes (time [s], how many more). At equal times a change down
    sorts before one up, so a life that ends when another begins does not overlap with it.
    """
    return max(itertools.accumulate((more for _, more in sorted(changes)), initial=0))


def _node_lives(
    day: DayTerms, node_gpus: int, lives: Sequence[tuple[int, float, float]]
) -> Iterator[tuple[float, float]]:
    """(from, to) [s] of each node that is rented to hold these workers, given as (pool, from, to)."""
    changes = Counter[tuple[float, int]]()  # More workers, by time and GPUs of a worker.
    for c, since_s, until_s in lives:
        changes[since_s, day.pools[c].gpus] += 1
        changes[until_s, day.pools[c].gpus] -= 1
    workers = Counter[int]()  # By GPUs of a worker.
    # The time since which each node is rented, for the nodes that are rented now; the latest is at the end.
    rented_since_s: list[float] = []
    for time_s, at_once in itertools.groupby(sorted(changes.items()), key=lambda change: change[0][0]):
        for (_, gpus), more in at_once:
            workers[gpus] += more
        nodes = int(fewest_nodes(node_gpus, list(workers.items())))
        rented_since_s += [time_s] * (nodes - len(rented_since_s))
        while len(rented_since_s) > nodes:
            yield rented_since_s.pop(), time_s


def cheapest_sizes(
    day: DayTerms, cuts: Sequence[Cut] = (), excluded: Sequence[Ints] = (), *, time_limit_s: float = 30.0
) -> CheapestSizes:
    """The cheapest sequence that keeps the cuts and is none of the `excluded` ones, each (T, C)."""
    least, most = least_sizes(day, cuts), day.most
    # An empty cut names no pool that must be larger, so no sequence keeps it.
    if not all(cuts) or (least > most).any():
        return CheapestSizes(None, math.inf, math.inf)
    program = _DayProgram(day, least)
    paid_columns = _add_paid_rows(program)
    if day.is_paid_all_day:
        _add_day_rows(program, paid_columns)
    else:
        _add_node_rows(program, paid_columns)
    if day.is_by_unit:
        _add_life_rows(program)
    if not day.is_paid_all_day:
        hours, prices = day.cells_h(), day.prices()
        for (q, c), column in np.ndenumerate(paid_columns):
            if not day.is_by_unit or day.pools[c].node is not None:
                program.cost[int(column)] += float(hours[q] * prices[c])
    for cut in cuts:
        is_kept_anyway = any(size < least[t, c] for t, c, size in cut)
        if len(cut) > 1 and not is_kept_anyway:  # `least` already keeps the cuts of one entry.
            program.add_any_of(
                [program.column_if_larger(t, c, size) for t, c, size in cut if size < most[t, c]]
            )
    for workers in excluded:
        if ((workers >= least) & (workers <= most)).all():
            program.exclude(workers)
    point = minimise_program(program.to_program(), time_limit_s=time_limit_s)
    if point.status == "infeasible":
        return CheapestSizes(None, math.inf, math.inf)
    bound = max(point.bound * (1 - TOLERANCE), 0.0)
    if point.x is None:
        return CheapestSizes(None, math.inf, bound)
    workers = point.x[program.size_columns].astype(np.int64)
    usd = float(np.array(program.cost) @ point.x)
    return CheapestSizes(workers, usd, min(bound, usd))


def least_sizes(day: DayTerms, cuts: Sequence[Cut]) -> Ints:
    """The smallest sizes (T, C), raised by the cuts of a single (step, pool)."""
    least = day.least
    for cut in cuts:
        if len(cut) == 1:
            ((t, c, size),) = cut
            least[t, c] = max(least[t, c], size + 1)
    return least


class _DayProgram(ProgramBuilder):
    """The integer program. `size_columns` (T, C) are the columns of x_tc, whose values lie between `least`
    and `most` (T, C).
    """

    def __init__(self, day: DayTerms, least: Ints):
        super().__init__()
        self.day, self.least, self.most = day, least, day.most
        # The 0/1 columns that say on which side of a size x_tc is, by (step, pool, size, whether larger):
        # several cuts may need the same column.
        self._side_columns: dict[tuple[int, int, int, bool], int] = {}
        self.size_columns = np.zeros(day.shape, np.int64)
        for t, c in np.ndindex(*day.shape):
            self.size_columns[t, c] = self.add_variable(float(self.most[t, c]), low=float(least[t, c]))

    def exclude(self, workers: Ints) -> None:
        """Add a row: at least one size must be larger or smaller than in `workers` (T, C)."""
        sizes = [(t, c, int(workers[t, c])) for t, c in np.ndindex(*self.day.shape)]
        larger = [self.column_if_larger(t, c, size) for t, c, size in sizes if size < self.most[t, c]]
        smaller = [self.column_if_smaller(t, c, size) for t, c, size in sizes if size > self.least[t, c]]
        self.add_any_of([*larger, *smaller])

    def column_if_larger(self, t: int, c: int, size: int) -> int:
        """A 0/1 column that may be 1 only if x_tc > size."""
        if (t, c, size, True) not in self._side_columns:
            is_larger = self._side_columns[t, c, size, True] = self.add_variable(1.0)
            least = float(self.least[t, c])
            # x >= least + (size + 1 - least) is_larger.
            self.add_row({int(self.size_columns[t, c]): 1.0, is_larger: least - size - 1}, least)
        return self._side_columns[t, c, size, True]

    def column_if_smaller(self, t: int, c: int, size: int) -> int:
        """A 0/1 column that may be 1 only if x_tc < size."""
        if (t, c, size, False) not in self._side_columns:
            is_smaller = self._side_columns[t, c, size, False] = self.add_variable(1.0)
            most = float(self.most[t, c])
            # x <= most - (most + 1 - size) is_smaller.
            self.add_row({int(self.size_columns[t, c]): -1.0, is_smaller: size - 1 - most}, -most)
        return self._side_columns[t, c, size, False]


def _add_paid_rows(program: _DayProgram) -> Ints:
    """Add paid_qct and stock_qk; returns the columns of y (Q, C)."""
    day = program.day
    paid_columns = np.zeros((len(day.cells_s()) - 1, len(day.pools)), np.int64)
    for c, pool in enumerate(day.pools):
        for q, steps in enumerate(day.paying_steps(c)):
            if len(steps) == 1:  # A single step is paid in the cell, so y_qc is that step's x_tc.
                paid_columns[q, c] = program.size_columns[steps.start, c]
                continue
            paid_columns[q, c] = program.add_variable(float(pool.most), low=float(pool.least))
            for t in steps:
                program.add_row({int(paid_columns[q, c]): 1.0, int(program.size_columns[t, c]): -1.0}, 0.0)
    # Where the largest pools together are within the stock, the rows always hold and are left out.
    if not day.are_within_stock(day.most[:1]).all():
        _add_stock_rows(program, paid_columns)
    return paid_columns


def _add_stock_rows(program: _DayProgram, paid_columns: Ints) -> None:
    """Add stock_qk. `paid_columns` (Q, C) are those of y."""
    day = program.day
    for gpu, count in day.stock.items():
        pools = day.pools_on_gpu(gpu)
        nodes_of_stock = [
            (node.gpus, [c for c in of_kind if c in pools])
            for node, of_kind in day.pools_by_node_kind().values()
        ]
        for in_cell in paid_columns:
            taken = {int(in_cell[c]): -float(day.pools[c].gpus) for c in pools if day.pools[c].node is None}
            for node_gpus, node_pools in nodes_of_stock:
                nodes = program.add_variable(int(day.nodes_for(node_gpus, node_pools, day.most[0])))
                _add_packing_rows(program, nodes, node_gpus, in_cell, node_pools)
                taken[nodes] = -float(node_gpus)
            program.add_row(taken, -float(count))


def _add_node_rows(program: _DayProgram, paid_columns: Ints) -> None:
    """Add node_qk, and to the objective what the idle GPUs of nodes cost. `paid_columns` (Q, C) are those of
    y.
    """
    hours = program.day.cells_h()
    for node, pools in program.day.pools_by_node_kind().values():
        gpus = {c: float(program.day.pools[c].gpus) for c in pools}
        most_nodes = int(program.day.nodes_for(node.gpus, pools, program.day.most[0]))
        for q, in_cell in enumerate(paid_columns):
            idle_usd = float(hours[q] * node.idle_usd_per_h)
            terms = {int(in_cell[c]): -count for c, count in gpus.items()}
            for column, weight in terms.items():
                program.cost[column] += weight * idle_usd
            nodes = program.add_variable(most_nodes, cost=node.gpus * idle_usd)
            _add_packing_rows(program, nodes, node.gpus, in_cell, pools)


def _add_day_rows(program: _DayProgram, paid_columns: Ints) -> None:
    """Add day_qk, and to the objective what is paid all day. `paid_columns` (Q, C) are those of y."""
    day, hours = program.day, float(program.day.edges_s[-1]) / HOUR_S
    for gpu_usd_per_h, node_gpus, pools in day.gpu_kinds():
        most_nodes = int(day.nodes_for(node_gpus, pools, day.most[0]))
        nodes = program.add_variable(most_nodes, cost=gpu_usd_per_h * node_gpus * hours)
        for in_cell in paid_columns:
            _add_packing_rows(program, nodes, node_gpus, in_cell, pools)


def _add_packing_rows(
    program: _DayProgram, nodes: int, node_gpus: int, in_cell: Ints, pools: Sequence[int]
) -> None:
    """Add the rows by which the column `nodes` holds the workers of these pools, as `fewest_nodes` counts.
    `in_cell` (C,) are the columns of y in a cell.
    """
    gpus = {int(in_cell[c]): program.day.pools[c].gpus for c in pools}
    for weights, per_node in packing_rows(node_gpus, tuple(sorted(set(gpus.values())))):
        row = {column: -float(weights[size]) for column, size in gpus.items() if weights[size]}
        program.add_row(row | {nodes: float(per_node)}, 0.0)


def _add_life_rows(program: _DayProgram) -> None:
    """Add lives_tc, and to the objective what the lives cost, for the pools whose GPUs are sold singly."""
    day, prices = program.day, program.day.prices()
    for c, pool in enumerate(day.pools):
        if pool.node is not None:
            continue
        step_terms: list[dict[int, float]] = [{int(column): -1.0} for column in program.size_columns[:, c]]
        for _, units, steps in possible_worker_lives(day, pool.start_s):
            usd = float(units * day.unit_s / HOUR_S * prices[c])
            z = program.add_variable(float(pool.most), cost=usd)
            for t in steps:
                step_terms[t][z] = 1.0
        for terms in step_terms:
            program.add_row(terms, 0.0)


def possible_worker_lives(day: DayTerms, start_s: float) -> list[tuple[int, int, range]]:
    """(a, b, the steps that are paid to their end) of the lives z_abc: ready from step a on and paid for b
    units. If several lives from step a pay the same steps, only the shortest is listed.
    """
    possible_lives, edges_s = [], day.edges_s
    for a, edge_s in enumerate(edges_s[:-1].tolist()):
        if 0 < a and edge_s < start_s - SAME_S:
            continue  # A worker that is ready by then is there from the beginning (a = 0).
        order_s = max(edge_s - start_s, 0.0) if a else 0.0
        longest_end = a  # The first step after those of the longest life so far.
        for units in range(1, day.count_units(edges_s[-1] - order_s) + 1):
            # `count_units` forgives SAME_S at the end of a life. Twice as much is forgiven here, so that the
            # last life reaches the day's end though this sum is rounded.
            paid_until_s = order_s + units * day.unit_s + 2 * SAME_S
            end = int(np.searchsorted(edges_s, paid_until_s, "right")) - 1
            if end > longest_end:
                possible_lives.append((a, units, range(a, end)))
                longest_end = end
    return possible_lives
