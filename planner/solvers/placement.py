"""Puts workers onto nodes: on the fewest nodes, then with the least KV between nodes, then spread the widest
over failure domains.

The stages of a worker's pipeline, or its data-parallel ranks, are TP groups, each of which stays inside a
node. All groups of a worker go onto one node, or in equal parts onto as few as can hold them; parts of which
a node can be full come first (two workers of 12 GPUs: six parts of 4 on three nodes of 8). Nodes of a kind
are alike, so the model only counts how often a node is filled in each possible way (a pattern). Nodes
have no numbers, so the solver does not search placements that differ in numbers alone.

Sets   p pattern of a node kind, for s_p nodes at once      q pool      f failure domain
       g node kind (the GPU's name without its power cap)
Data   a_pq  parts of q's workers in p (a part is what one node has of a worker);   W_q  parts of the pool
       N_gf  nodes of kind g in domain f
       l_p   pairs of a prefill and a decode worker, of n m in all, whose KV can stay inside p. If p has P_p
             of the n prefill and D_p of the m decode workers, its prefill workers make the KV of m P_p pairs
             and its decode workers take that of n D_p, so l_p = min(m P_p, n D_p)
Vars   z_pf integer >= 0 uses of a pattern;   t_q parts of q in its fullest failure domain
       e_gf missing nodes

  min   sum e_gf (above 0 there is no placement),   then   sum s_p z_pf   (nodes),
        then   n m - sum l_p z_pf   (KV between nodes),   then   sum t_q   (spread)
  s.t.  placed_q     sum_pf a_pq z_pf = W_q
        nodes_gf     sum_{p of g} s_p z_pf <= N_gf + e_gf
        spread_qf    sum_p a_pq z_pf <= t_q

High affinity (DistServe, arXiv:2401.09670, Alg. 1): KV may go between any two nodes. Low affinity (Alg. 2):
every node with a prefill worker has a decode worker and vice versa, stage beside stage. A pair too large for
one node is spread over s_p nodes, the fewest that divide its PP; these hold nothing else. The KV objective
assumes that every worker of a role has an equal share of its traffic. CP-SAT solves the objectives in turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from planner.errors import InfeasibleError, PlannerError
from planner.fleet import Fleet, Pool
from planner.simulator.worker_places import worker_nodes
from planner.solvers.backend import cp_solver

if TYPE_CHECKING:  # OR-tools, which takes 0.4 s to import, is imported where it is needed.
    from ortools.sat.python import cp_model

Affinity = Literal["high", "low"]
MOST_PATTERNS = 50_000  # With more ways to fill nodes (patterns) the placement is refused. Set by hand.
BOUND_TOLERANCE = 1e-6  # CP-SAT's bounds are off by less than this.


@dataclass(frozen=True, slots=True)
class FailureDomain:
    """Nodes that fail together, also called a rack. `nodes` is how many there are of each kind (the GPU's
    name without its power cap); None: any number.
    """

    name: str
    nodes: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """The part of a worker that is on one node: of its `pp` stages those from `first` to `last`, or with `dp`
    > 1 the ranks from `first` to `last`, and the numbers of the node's GPUs that they use.
    """

    pool: str
    worker: int
    first: int
    last: int
    pp: int
    gpus: tuple[int, ...]
    dp: int = 1

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
    """A pool whose workers are spread over `span` nodes each, with `stages` TP groups on each of these. A TP
    group is a pipeline stage or a data-parallel rank.
    """

    pool: Pool
    span: int

    @property
    def stages(self) -> int:
        """How many TP groups of a worker are on each of its nodes."""
        return self.pool.type.pp * self.pool.type.dp // self.span

    @property
    def part_gpus(self) -> int:
        """How many GPUs a worker takes on each of its nodes."""
        return self.stages * self.pool.type.tp

    @property
    def kind(self) -> str:
        """The kind of node: the GPU's name without its power cap."""
        return self.pool.type.gpu.base


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A way to fill `span` nodes of a kind: each holds `counts` parts of the workers of every pool.
    `local_pairs` is l_p of the module's docstring.
    """

    kind: str
    span: int
    counts: tuple[int, ...]
    local_pairs: int


def place_fleet(
    fleet: Fleet,
    *,
    affinity: Affinity = "high",
    failure_domains: Sequence[FailureDomain] = (),
    time_limit_s: float = 30.0,
) -> NodePlacement:
    """The placement that solves the model in the module's docstring. Without failure domains there is one, of
    any number of nodes.

    Raises InfeasibleError where a TP group exceeds a node, pairs do not fit, or nodes run out; PlannerError
    where there are too many patterns, or the time ends before any placement on these nodes is found.
    """
    from ortools.sat.python import cp_model

    pools = fleet.running_pools
    kinds = list(dict.fromkeys(pool.type.gpu.base for pool in pools))
    racks = failure_domains or (FailureDomain("all", dict.fromkeys(kinds)),)
    _check_groups(pools)
    spread_pools = _spread_pools(pools, affinity)
    patterns = _patterns(spread_pools, affinity)
    parts = [spread_pool.pool.count * spread_pool.span for spread_pool in spread_pools]

    model = cp_model.CpModel()
    most = sum(parts)  # No placement needs more nodes than there are parts.
    z = [[model.new_int_var(0, most, f"z_{p}_{f}") for f in range(len(racks))] for p in range(len(patterns))]
    uses = [
        (pattern, f, z_pf) for pattern, row in zip(patterns, z, strict=True) for f, z_pf in enumerate(row)
    ]
    # Keys of `e` and `nodes` are (kind of node, number of the failure domain). `nodes` are sums of variables.
    e, nodes = {}, {}
    for kind, (f, rack) in itertools.product(kinds, enumerate(racks)):
        nodes[kind, f] = sum(p.span * z_pf for p, domain, z_pf in uses if (p.kind, domain) == (kind, f))
        if (node_count := rack.nodes.get(kind, 0)) is not None:
            e[kind, f] = model.new_int_var(0, most, f"e_{kind}_{f}")
            model.add(nodes[kind, f] <= node_count + e[kind, f]).with_name(f"nodes_{kind}_{f}")
    t = []
    for q, count in enumerate(parts):
        count_terms = [(f, p.counts[q] * p.span * z_pf) for p, f, z_pf in uses if p.counts[q]]
        model.add(sum(term for _, term in count_terms) == count).with_name(f"placed_{q}")
        t.append(model.new_int_var(0, count, f"t_{q}"))
        for f in range(len(racks)):
            model.add(sum(term for domain, term in count_terms if domain == f) <= t[q]).with_name(
                f"spread_{q}_{f}"
            )

    pairs = math.prod(_count_workers(pools, role) for role in ("prefill", "decode"))
    local_pairs = sum(pattern.local_pairs * z_pf for pattern, _, z_pf in uses)
    objectives = [sum(e.values()), sum(nodes.values()), pairs - local_pairs if pairs else 0, sum(t)]
    solver, bounds, is_optimal = _minimise_in_turn(
        model, objectives, [z_pf for _, _, z_pf in uses], time_limit_s
    )
    if solver is None:
        raise InfeasibleError(
            "low affinity: no filling of nodes puts every prefill worker beside a decode worker at these "
            f"counts ({', '.join(f'{pool.count} {pool.name}' for pool in pools)})",
            kind="capacity",
            constraint="affinity",
            relaxation="other counts, or high affinity",
        )
    missing = {kind: sum(solver.value(e[k, f]) for k, f in e if k == kind) for kind in kinds}
    if any(missing.values()) and bounds[0] <= 0:  # The first objective is the number of missing nodes.
        raise PlannerError(
            f"placement: nothing that fits the nodes was found in {time_limit_s:g} s; allow more time"
        )
    _refuse_missing(missing)
    counts = [[solver.value(z_pf) for z_pf in row] for row in z]
    return NodePlacement(
        nodes=_number_nodes(spread_pools, patterns, counts, racks),
        cross_frac=solver.value(objectives[2]) / pairs if pairs else None,
        bound=bounds[1],  # The second objective is the number of nodes.
        is_optimal=is_optimal,
    )


def _refuse_missing(missing: Mapping[str, int]) -> None:
    """Raise InfeasibleError where nodes of some kind are missing. `missing` has their number by kind."""
    if short := {kind: count for kind, count in missing.items() if count}:
        more = " and ".join(f"{count} more nodes of {kind}" for kind, count in short.items())
        raise InfeasibleError(
            f"the workers do not fit the nodes; {more} would do",
            kind="capacity",
            constraint="nodes of " + ", ".join(short),
            relaxation=more,
        )


def placement_of_topology(fleet: Fleet) -> NodePlacement:
    """The placement that the simulator assumes where the network has a topology
    (simulator/worker_places.py). Nothing is solved.
    """
    pools = fleet.running_pools
    owners = [(pool, number) for pool in pools for number in range(pool.count)]
    parts: dict[int, list[WorkerPart]] = {}
    topology = fleet.network.topology
    assert topology is not None
    nodes_of_workers = worker_nodes(fleet)
    for (pool, number), nodes in zip(owners, nodes_of_workers, strict=True):
        worker_type, stages = pool.type, pool.type.pp * pool.type.dp
        for i, node in enumerate(nodes):
            # Node i of the worker's nodes has its stages from `first` to before `end`.
            first, end = (stages * k // len(nodes) for k in (i, i + 1))
            used_gpus = sum(len(part.gpus) for part in parts.get(node, []))
            gpus = tuple(range(used_gpus, used_gpus + worker_type.gpus // len(nodes)))
            # If a TP group spans nodes, a node has only a part of a stage, and is shown with that stage.
            last = max(end, first + 1) - 1
            parts.setdefault(node, []).append(
                WorkerPart(
                    pool=pool.name,
                    worker=number,
                    first=first,
                    last=last,
                    pp=worker_type.pp,
                    gpus=gpus,
                    dp=worker_type.dp,
                )
            )
    kinds = {
        node: pool.type.gpu.base
        for (pool, _), nodes in zip(owners, nodes_of_workers, strict=True)
        for node in nodes
    }
    nodes_per_rack = topology.nodes_per_rack or len(kinds)
    rows = tuple(
        PlacedNode(f"{kinds[node]}-{node}", kinds[node], f"rack-{node // nodes_per_rack}", tuple(parts[node]))
        for node in sorted(kinds)
    )
    prefill_nodes = [nodes_of_workers[k] for k, (pool, _) in enumerate(owners) if pool.role == "prefill"]
    decode_nodes = [nodes_of_workers[k] for k, (pool, _) in enumerate(owners) if pool.role == "decode"]
    local_pairs = sum(nodes == others for nodes in prefill_nodes for others in decode_nodes)
    pairs = len(prefill_nodes) * len(decode_nodes)
    return NodePlacement(
        nodes=rows,
        cross_frac=1 - local_pairs / pairs if prefill_nodes else None,
        bound=least_nodes(pools),
        is_optimal=False,
    )


def least_nodes(pools: Sequence[Pool]) -> int:
    """A lower bound on the nodes of any placement: for each kind, all GPUs used over the GPUs of a node."""
    gpus: dict[str, int] = {}
    for pool in pools:
        gpus[pool.type.gpu.base] = gpus.get(pool.type.gpu.base, 0) + pool.count * pool.type.gpus
    per_node = {pool.type.gpu.base: int(pool.type.gpu.gpus_per_node) for pool in pools}
    return sum(math.ceil(count / per_node[kind]) for kind, count in gpus.items())


def _count_workers(pools: Sequence[Pool], role: str) -> int:
    """How many workers all pools of a role have."""
    return sum(pool.count for pool in pools if pool.role == role)


def _check_groups(pools: Sequence[Pool]) -> None:
    """Raise InfeasibleError where a TP group needs more GPUs than a node has."""
    for pool in pools:
        kind, gpus = pool.type.gpu.base, int(pool.type.gpu.gpus_per_node)
        if pool.type.tp > gpus:
            raise InfeasibleError(
                f"a TP group of {pool.name} takes {pool.type.tp} GPUs, a node of {kind} has {gpus}; lower "
                "TP, or raise PP in its place",
                kind="capacity",
                constraint=f"node of {kind}",
                relaxation=f"TP <= {gpus}",
            )


def _spread_pools(pools: Sequence[Pool], affinity: Affinity) -> list[_SpreadPool]:
    """Each pool with the nodes over which its workers are spread: as few as can hold them. With low affinity
    prefill and decode workers are spread over as many nodes, so that each pair shares its nodes.
    """
    pairs = [pool for pool in pools if pool.role != "mixed"] if affinity == "low" else []
    if len(kinds := sorted({pool.type.gpu.base for pool in pairs})) > 1:
        raise InfeasibleError(
            f"low affinity puts prefill and decode workers on one node, but they use {' and '.join(kinds)}",
            kind="capacity",
            constraint="affinity",
            relaxation="high affinity, or one kind of GPU for both roles",
        )

    def fits(group: Sequence[Pool], span: int) -> bool:
        """Whether a node can hold its part of one worker of each pool."""
        return _fit_node([_SpreadPool(pool, span) for pool in group], [1] * len(group))

    def least_span(groups: Sequence[Sequence[Pool]]) -> int:
        """The fewest nodes over which every group of workers can be spread in equal parts. For a pool by
        itself that needs several nodes, parts with which nodes can be full come first, if there are such
        parts.
        """
        stages = math.gcd(*(pool.type.pp * pool.type.dp for group in groups for pool in group))
        divisors = [span for span in range(1, stages + 1) if stages % span == 0]
        spans = [span for span in divisors if all(fits(group, span) for group in groups)]
        if spans[:1] != [1] and sum(map(len, groups)) == 1:
            worker = groups[0][0].type
            node_gpus = int(worker.gpu.gpus_per_node)
            spans = [span for span in spans if node_gpus % (worker.gpus // span) == 0] or spans
        if spans:
            return spans[0]
        largest = max(groups, key=lambda group: sum(pool.type.gpus for pool in group))
        raise InfeasibleError(
            f"{' beside '.join(f'{pool.name} ({pool.type.gpus} GPUs)' for pool in largest)} does not fit a "
            f"node of {int(largest[0].type.gpu.gpus_per_node)} GPUs, nor {stages} of them in equal parts",
            kind="capacity",
            constraint="affinity" if len(largest) > 1 else "node",
            relaxation="a larger PP (of both roles), a smaller TP"
            + ", or high affinity" * (len(largest) > 1),
        )

    prefills = [pool for pool in pairs if pool.role == "prefill"]
    decodes = [pool for pool in pairs if pool.role == "decode"]
    pair_groups = list(itertools.product(prefills, decodes))
    pair_span = least_span(pair_groups) if pair_groups else 1
    return [_SpreadPool(pool, pair_span if pool in pairs else least_span([[pool]])) for pool in pools]


def _patterns(spread_pools: Sequence[_SpreadPool], affinity: Affinity) -> list[_Pattern]:
    """Every way to fill a node; with low affinity also the nodes over which a pair is spread."""
    workers = {
        role: _count_workers([spread_pool.pool for spread_pool in spread_pools], role)
        for role in ("prefill", "decode")
    }
    patterns: list[_Pattern] = []
    for kind in dict.fromkeys(spread_pool.kind for spread_pool in spread_pools):
        of_kind = [q for q, spread_pool in enumerate(spread_pools) if spread_pool.kind == kind]
        in_pairs = [q for q in of_kind if spread_pools[q].pool.role != "mixed"]
        pair_span = max((spread_pools[q].span for q in in_pairs), default=1) if affinity == "low" else 1
        if pair_span == 1:
            groups = [(of_kind, 1)]
        else:
            groups = [(in_pairs, pair_span), ([q for q in of_kind if q not in in_pairs], 1)]
        for group, span in groups:
            for group_counts in _fillings([spread_pools[q] for q in group]):
                counts = [0] * len(spread_pools)
                parts_by_role = {"prefill": 0, "decode": 0, "mixed": 0}
                for q, count in zip(group, group_counts, strict=True):
                    counts[q] = count
                    parts_by_role[spread_pools[q].pool.role] += count
                prefills, decodes = parts_by_role["prefill"], parts_by_role["decode"]
                if affinity == "low" and bool(prefills) != bool(decodes):
                    continue
                # Where a worker has parts on other nodes, no pair's KV stays inside this node.
                is_whole = all(spread_pools[q].span == span for q in in_pairs if counts[q])
                local_pairs = min(prefills * workers["decode"], decodes * workers["prefill"])
                patterns.append(_Pattern(kind, span, tuple(counts), local_pairs if is_whole else 0))
                if len(patterns) > MOST_PATTERNS:
                    raise PlannerError(
                        f"placement: a {kind} node can be filled in more than {MOST_PATTERNS} ways"
                    )
    return patterns


def _fillings(spread_pools: Sequence[_SpreadPool]) -> Iterator[tuple[int, ...]]:
    """Every tuple of counts, one for each pool and not all 0, whose parts fit a node together."""

    def extend(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(counts) == len(spread_pools):
            if any(counts):
                yield counts
            return
        spread_pool = spread_pools[len(counts)]
        for count in range(spread_pool.pool.count * spread_pool.span + 1):
            if not _fit_node(spread_pools[: len(counts) + 1], (*counts, count)):
                return
            yield from extend((*counts, count))

    return extend(())


def _fit_node(spread_pools: Sequence[_SpreadPool], counts: Sequence[int]) -> bool:
    """Whether a node holds `counts` parts of the workers of these pools together."""
    gpus = sum(count * spread_pool.part_gpus for count, spread_pool in zip(counts, spread_pools, strict=True))
    return gpus <= int(spread_pools[0].pool.type.gpu.gpus_per_node)


def _deal_gpus(
    spread_pools: Sequence[_SpreadPool], counts: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """The GPUs of every part on a node, as (index of its pool, GPUs). Parts with the largest TP come first.
    So groups of 2, 4 and 8 begin at multiples of their size, where GPUs have the fastest links.
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
) -> tuple[cp_model.CpSolver | None, list[int], bool]:
    """Minimise one objective after another. Returns the last solver that has a solution (None: infeasible),
    the bound of each objective, and whether all are optimal.

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
        if status == cp_model.INFEASIBLE:
            return None, bounds, False
        # Objectives are integers, so a bound is rounded up, but not for a rounding error.
        bounds.append(math.ceil(solver.best_objective_bound - BOUND_TOLERANCE))
        is_optimal &= status == cp_model.OPTIMAL
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            best = solver
            model.add(objective <= solver.value(objective))
            model.clear_hints()
            for variable in variables:
                model.add_hint(variable, solver.value(variable))
        elif best is None:
            raise PlannerError(f"placement: nothing was found in {time_limit_s:g} s; allow more time")
    return best, bounds, is_optimal


def _number_nodes(
    spread_pools: Sequence[_SpreadPool],
    patterns: Sequence[_Pattern],
    counts: Sequence[Sequence[int]],
    racks: Sequence[FailureDomain],
) -> tuple[PlacedNode, ...]:
    """The nodes with their workers, both numbered. `counts` (patterns, domains) are the z_pf.

    Each use of a pattern fills `span` nodes. Node i holds part i of a worker that is spread over them.
    """
    dealt = [0] * len(spread_pools)  # How many parts of each pool have a node; workers get theirs in order.
    nodes: list[PlacedNode] = []
    for f, rack in enumerate(racks):
        for pattern, uses in zip(patterns, counts, strict=True):
            on_node = [q for q, count in enumerate(pattern.counts) if count]
            pools_here, counts_here = [spread_pools[q] for q in on_node], [pattern.counts[q] for q in on_node]
            for _ in range(uses[f]):
                for i in range(pattern.span):
                    next_part, parts = dict.fromkeys(on_node, 0), []
                    for index, gpus in _deal_gpus(pools_here, counts_here):
                        q, spread_pool = on_node[index], spread_pools[on_node[index]]
                        # The parts of a pool are numbered from worker to worker, so worker 1 begins at part
                        # `spread_pool.span`. Parts of a pool on one node are of different workers.
                        worker, part = divmod(dealt[q] + next_part[q] * pattern.span + i, spread_pool.span)
                        next_part[q] += 1
                        first = part * spread_pool.stages
                        worker_type, last = spread_pool.pool.type, first + spread_pool.stages - 1
                        parts.append(
                            WorkerPart(
                                pool=spread_pool.pool.name,
                                worker=worker,
                                first=first,
                                last=last,
                                pp=worker_type.pp,
                                gpus=gpus,
                                dp=worker_type.dp,
                            )
                        )
                    nodes.append(
                        PlacedNode(f"{pattern.kind}-{len(nodes)}", pattern.kind, rack.name, tuple(parts))
                    )
                for q in on_node:
                    dealt[q] += pattern.counts[q] * pattern.span
    return tuple(nodes)
