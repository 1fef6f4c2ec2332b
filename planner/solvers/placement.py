"""Puts workers onto nodes: on the fewest nodes, then with the least KV between nodes.

The stages of a worker's pipeline, or its data-parallel ranks, are TP groups, each of which stays inside a
node. All groups of a worker go onto one node, or in equal parts onto as few as can hold them; parts of which
a node can be full come first (two workers of 12 GPUs: six parts of 4 on three nodes of 8). Nodes of a kind
are alike, so the model only counts how often a node is filled in each possible way (a pattern). Nodes
have no numbers, so the solver does not search placements that differ in numbers alone.

Sets   p pattern of a node kind (the GPU's name without its power cap)      q pool
Data   a_pq  parts of q's workers in p (a part is what one node has of a worker);   W_q  parts of the pool
       n, m  prefill and decode workers, which make n m pairs
       l_p   pairs whose KV can stay inside p: p has P_p of the n prefill workers, which are in m P_p pairs,
             and D_p of the m decode workers, which are in n D_p pairs, so l_p = min(m P_p, n D_p)
Vars   z_p integer >= 0 uses of a pattern

  min   sum z_p   (nodes),   then   n m - sum l_p z_p   (KV between nodes)
  s.t.  placed_q     sum_p a_pq z_p = W_q

KV may go between any two nodes. The second objective assumes that every worker of a role has an equal share
of its traffic, and that the router keeps the KV of as many requests inside a node as it can. CP-SAT solves
the objectives in turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from planner.errors import InfeasibleError, PlannerError
from planner.fleet import Fleet, Pool
from planner.simulator.worker_places import worker_nodes
from planner.solvers.backend import cp_solver

if TYPE_CHECKING:  # OR-tools, which takes 0.4 s to import, is imported where it is needed.
    from ortools.sat.python import cp_model

MOST_PATTERNS = 50_000  # With more ways to fill nodes (patterns) the placement is refused. Set by hand.
ONE_DOMAIN = "all"  # The failure domain of nodes of which no racks are known.
BOUND_TOLERANCE = 1e-6  # CP-SAT's bounds are off by less than this.


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """The part of a worker that is on one node, and the numbers of the node's GPUs that it uses.

    The part has the stages of the worker from `first` to `last`, of `pp` in all. A worker with `dp` > 1 has
    ranks in place of stages.
    """

    pool: str
    worker: int
    first: int
    last: int
    pp: int
    gpus: tuple[int, ...]
    dp: int = 1

    @classmethod
    def of_pool(cls, pool: Pool, worker: int, first: int, last: int, gpus: tuple[int, ...]) -> Self:
        """The part of this worker of the pool with its TP groups from `first` to `last`."""
        return cls(pool.name, worker, first, last, pool.type.pp, gpus, pool.type.dp)

    def __str__(self) -> str:
        """The name of the worker; behind it the stages or ranks, if they are not all of the worker's."""
        whole, kind = (self.pp, "stages") if self.dp == 1 else (self.dp, "ranks")
        part = "" if self.last - self.first + 1 == whole else f" {kind} {self.first}-{self.last}"
        return f"{self.pool}-{self.worker}{part}"


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node in use: its kind, its failure domain, and the parts of workers that are on it."""

    name: str
    kind: str
    failure_domain: str
    parts: tuple[WorkerPart, ...]


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """The nodes in use. The share `cross_frac` of the KV goes between nodes; None where nothing is handed
    over. No placement by the same rules uses fewer than `bound` nodes. `is_optimal`: all objectives were
    solved to the end.
    """

    nodes: tuple[PlacedNode, ...]
    cross_frac: float | None
    bound: int
    is_optimal: bool

    def rows(self) -> list[dict[str, str | int]]:
        """One row per node, for a table."""
        return [
            {
                "node": node.name,
                "failure domain": node.failure_domain,
                "GPUs used": sum(len(part.gpus) for part in node.parts),
                "workers": ", ".join(map(str, node.parts)),
            }
            for node in self.nodes
        ]


@dataclass(frozen=True, slots=True)
class _SpreadPool:
    """A pool whose workers are spread over `span` nodes each, in equal parts of whole TP groups. A TP group
    is a pipeline stage or a data-parallel rank.
    """

    pool: Pool
    span: int

    @property
    def groups_per_node(self) -> int:
        """How many TP groups of a worker are on each of its nodes."""
        return self.pool.type.pp * self.pool.type.dp // self.span

    @property
    def part_gpus(self) -> int:
        """How many GPUs a worker takes on each of its nodes."""
        return self.groups_per_node * self.pool.type.tp

    @property
    def kind(self) -> str:
        """The kind of node: the GPU's name without its power cap."""
        return self.pool.type.gpu.base


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A way to fill a node of a kind: with `counts` parts of the workers of every pool. `local_pairs` is l_p
    of the module's docstring.
    """

    kind: str
    counts: tuple[int, ...]
    local_pairs: int


def place_fleet(fleet: Fleet, *, time_limit_s: float = 30.0) -> NodePlacement:
    """The placement that solves the model in the module's docstring.

    Raises InfeasibleError where a TP group exceeds a node; PlannerError where there are too many patterns, or
    the time ends before any placement is found.
    """
    from ortools.sat.python import cp_model

    pools = fleet.running_pools
    _check_groups(pools)
    spread_pools = [_SpreadPool(pool, _least_span(pool)) for pool in pools]
    patterns = _patterns(spread_pools)
    parts = [spread_pool.pool.count * spread_pool.span for spread_pool in spread_pools]

    model = cp_model.CpModel()
    most = sum(parts)  # No placement needs more nodes than there are parts.
    z = [model.new_int_var(0, most, f"z_{p}") for p in range(len(patterns))]
    for q, count in enumerate(parts):
        placed = sum(
            pattern.counts[q] * z_p for pattern, z_p in zip(patterns, z, strict=True) if pattern.counts[q]
        )
        model.add(placed == count).with_name(f"placed_{q}")

    pairs = math.prod(_count_workers(pools, role) for role in ("prefill", "decode"))
    local_pairs = sum(pattern.local_pairs * z_p for pattern, z_p in zip(patterns, z, strict=True))
    objectives = [sum(z), pairs - local_pairs if pairs else 0]
    solver, bounds, is_optimal = _minimise_in_turn(model, objectives, z, time_limit_s)
    return NodePlacement(
        nodes=_number_nodes(spread_pools, patterns, [solver.value(z_p) for z_p in z]),
        cross_frac=solver.value(objectives[1]) / pairs if pairs else None,
        bound=bounds[0],
        is_optimal=is_optimal,
    )


def placement_of_topology(fleet: Fleet) -> NodePlacement:
    """The placement that the simulator assumes where the network has a topology
    (simulator/worker_places.py). Nothing is solved.

    There requests are handed over without regard to nodes, so all pairs of a prefill and a decode worker have
    an equal share of the KV. That of a pair stays inside nodes if both workers are on the same ones.
    """
    topology = fleet.network.topology
    assert topology is not None
    pools = fleet.running_pools
    workers = [(pool, number) for pool in pools for number in range(pool.count)]
    nodes_of_workers = worker_nodes(fleet)
    parts: dict[int, list[WorkerPart]] = {}  # The parts on each node.
    kinds: dict[int, str] = {}  # The kind of each node.
    for (pool, number), nodes in zip(workers, nodes_of_workers, strict=True):
        groups, gpu_count = pool.type.pp * pool.type.dp, pool.type.gpus // len(nodes)
        for i, node in enumerate(nodes):
            kinds[node] = pool.type.gpu.base
            on_node = parts.setdefault(node, [])
            used_gpus = sum(len(part.gpus) for part in on_node)
            gpus = tuple(range(used_gpus, used_gpus + gpu_count))
            # The TP groups are dealt to the nodes in order: node i begins where node i - 1 ends. If a
            # group spans nodes, each of these has only a part of the group, and is shown with it.
            first, next_first = groups * i // len(nodes), groups * (i + 1) // len(nodes)
            on_node.append(WorkerPart.of_pool(pool, number, first, max(first, next_first - 1), gpus))
    nodes_per_rack = topology.nodes_per_rack or len(kinds)
    rows = tuple(
        PlacedNode(f"{kinds[node]}-{node}", kinds[node], f"rack-{node // nodes_per_rack}", tuple(parts[node]))
        for node in sorted(kinds)
    )
    places: dict[str, list[tuple[int, ...]]] = {"prefill": [], "decode": [], "mixed": []}
    for (pool, _), nodes in zip(workers, nodes_of_workers, strict=True):
        places[pool.role].append(nodes)
    pairs = list(itertools.product(places["prefill"], places["decode"]))
    local_pairs = sum(prefill_nodes == decode_nodes for prefill_nodes, decode_nodes in pairs)
    return NodePlacement(
        nodes=rows,
        cross_frac=1 - local_pairs / len(pairs) if pairs else None,
        bound=least_nodes(pools),
        is_optimal=False,
    )


def least_nodes(pools: Sequence[Pool]) -> int:
    """A lower bound on the nodes of any placement: for each kind, all GPUs used over the GPUs of a node."""
    gpus: dict[str, int] = {}
    for pool in pools:
        gpus[pool.type.gpu.base] = gpus.get(pool.type.gpu.base, 0) + pool.count * pool.type.gpus
    per_node = {pool.type.gpu.base: pool.type.gpu.gpus_per_node for pool in pools}
    return sum(math.ceil(count / per_node[kind]) for kind, count in gpus.items())


def _count_workers(pools: Sequence[Pool], role: str) -> int:
    """How many workers all pools of a role have."""
    return sum(pool.count for pool in pools if pool.role == role)


def _check_groups(pools: Sequence[Pool]) -> None:
    """Raise InfeasibleError where a TP group needs more GPUs than a node has."""
    for pool in pools:
        kind, gpus = pool.type.gpu.base, pool.type.gpu.gpus_per_node
        if pool.type.tp > gpus:
            raise InfeasibleError(
                f"a TP group of {pool.name} takes {pool.type.tp} GPUs, a node of {kind} has {gpus}; lower "
                "TP, or raise PP in its place",
                kind="capacity",
                constraint=f"node of {kind}",
                relaxation=f"TP <= {gpus}",
            )


def _least_span(pool: Pool) -> int:
    """The fewest nodes over which a worker of the pool can be spread in equal parts. If it needs several,
    parts with which nodes can be full come first, if there are such parts.
    """
    worker = pool.type
    node_gpus, groups = worker.gpu.gpus_per_node, worker.pp * worker.dp
    # One TP group fits a node (`_check_groups`), so the largest span fits.
    spans = [span for span in range(1, groups + 1) if groups % span == 0 and worker.gpus // span <= node_gpus]
    if spans[0] == 1:
        return 1
    filling_spans = [span for span in spans if node_gpus % (worker.gpus // span) == 0]
    return min(filling_spans or spans)


def _patterns(spread_pools: Sequence[_SpreadPool]) -> list[_Pattern]:
    """Every way to fill a node."""
    workers = {
        role: _count_workers([spread_pool.pool for spread_pool in spread_pools], role)
        for role in ("prefill", "decode")
    }
    patterns: list[_Pattern] = []
    for kind in dict.fromkeys(spread_pool.kind for spread_pool in spread_pools):
        of_kind = [q for q, spread_pool in enumerate(spread_pools) if spread_pool.kind == kind]
        for kind_counts in _fillings([spread_pools[q] for q in of_kind]):
            counts = [0] * len(spread_pools)
            parts_by_role = {"prefill": 0, "decode": 0, "mixed": 0}
            for q, count in zip(of_kind, kind_counts, strict=True):
                counts[q] = count
                parts_by_role[spread_pools[q].pool.role] += count
            # Where a worker has parts on other nodes, no pair's KV stays inside this node.
            is_whole = all(
                spread_pools[q].span == 1
                for q in of_kind
                if counts[q] and spread_pools[q].pool.role != "mixed"
            )
            local_pairs = min(
                parts_by_role["prefill"] * workers["decode"], parts_by_role["decode"] * workers["prefill"]
            )
            patterns.append(_Pattern(kind, tuple(counts), local_pairs if is_whole else 0))
            if len(patterns) > MOST_PATTERNS:
                raise PlannerError(
                    f"placement: a {kind} node can be filled in more than {MOST_PATTERNS} ways"
                )
    return patterns


def _fillings(spread_pools: Sequence[_SpreadPool]) -> Iterator[tuple[int, ...]]:
    """Every tuple of counts, one for each pool and not all 0, whose parts fit a node together. The pools have
    nodes of one kind.
    """

    def extend(counts: tuple[int, ...], free_gpus: int) -> Iterator[tuple[int, ...]]:
        """The tuples that begin with these counts, which leave `free_gpus` of the node."""
        if len(counts) == len(spread_pools):
            if any(counts):
                yield counts
            return
        spread_pool = spread_pools[len(counts)]
        most = min(spread_pool.pool.count * spread_pool.span, free_gpus // spread_pool.part_gpus)
        for count in range(most + 1):
            yield from extend((*counts, count), free_gpus - count * spread_pool.part_gpus)

    return extend((), spread_pools[0].pool.type.gpu.gpus_per_node)


def _deal_gpus(
    spread_pools: Sequence[_SpreadPool], counts: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """The parts on a node that has `counts` of every pool, as (index of the pool, GPUs of the part).

    Parts with the largest TP come first, so that groups of 2, 4 and 8 begin at multiples of their size, where
    GPUs have the fastest links.
    """
    parts, first = [], 0
    for q in sorted(range(len(spread_pools)), key=lambda q: -spread_pools[q].pool.type.tp):
        for _ in range(counts[q]):
            parts.append((q, tuple(range(first, first + spread_pools[q].part_gpus))))
            first += spread_pools[q].part_gpus
    return parts


def _minimise_in_turn(
    model: cp_model.CpModel,
    objectives: Sequence[cp_model.LinearExprT],
    variables: Sequence[cp_model.IntVar],
    time_limit_s: float,
) -> tuple[cp_model.CpSolver, list[int], bool]:
    """Minimise one objective after another. Returns the last solver that has a solution, the bound of each
    objective, and whether all are optimal.

    Each value that was reached becomes a limit under which the next objective is minimised, also where the
    time ended before it was optimal.
    """
    from ortools.sat.python import cp_model

    best, is_optimal = None, True
    bounds: list[int] = []
    for objective in objectives:
        model.minimize(objective)
        solver = cp_solver(time_limit_s / len(objectives))
        status = solver.solve(model)
        # Objectives are integers, so a bound is rounded up, but not for a rounding error.
        bounds.append(math.ceil(solver.best_objective_bound - BOUND_TOLERANCE))
        is_optimal &= status == cp_model.OPTIMAL
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            best = solver
            model.add(objective <= solver.value(objective))
            model.clear_hints()
            for variable in variables:
                model.add_hint(variable, solver.value(variable))
    if best is None:
        raise PlannerError(f"placement: nothing was found in {time_limit_s:g} s; allow more time")
    return best, bounds, is_optimal


def _number_nodes(
    spread_pools: Sequence[_SpreadPool], patterns: Sequence[_Pattern], uses: Sequence[int]
) -> tuple[PlacedNode, ...]:
    """The nodes with their workers, both numbered. `uses` are the z_p."""
    placed = [0] * len(spread_pools)  # How many parts of each pool have a node by now.
    nodes: list[PlacedNode] = []
    for pattern, times in zip(patterns, uses, strict=True):
        for _ in range(times):
            parts = []
            for q, gpus in _deal_gpus(spread_pools, pattern.counts):
                spread_pool = spread_pools[q]
                # The parts of a pool are numbered from worker to worker, so worker 1 begins at part
                # `spread_pool.span`.
                worker, part = divmod(placed[q], spread_pool.span)
                placed[q] += 1
                first = part * spread_pool.groups_per_node
                last = first + spread_pool.groups_per_node - 1
                parts.append(WorkerPart.of_pool(spread_pool.pool, worker, first, last, gpus))
            nodes.append(PlacedNode(f"{pattern.kind}-{len(nodes)}", pattern.kind, ONE_DOMAIN, tuple(parts)))
    return tuple(nodes)
