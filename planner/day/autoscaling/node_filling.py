"""PromQL that puts workers on the idle GPUs of nodes that are sold whole, as `Knowledge.fill_nodes` does in
the simulation.
"""

from collections.abc import Sequence
from typing import NamedTuple

from planner.day.autoscaling.autoscaler import Autoscaler
from planner.day.autoscaling.prometheus_queries import pool_series
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.day.controllers.planned import FleetplanSettings
from planner.solvers.whole_nodes import uneven_sizes

# Sentences for the README of the manifests: what these expressions do not do.
LIMITS = (
    "Sizes are rounded up to what whole nodes hold, of the pools here that share a kind of node: that their "
    "pods fill a node before the next one is taken is up to the scheduler (`MostAllocated`) and to whoever "
    "adds nodes.",
)


class RentedNode(NamedTuple):
    """The node that a pool's workers are rented with, by its kind and GPUs, and the GPUs of a worker."""

    kind: str
    gpus: int
    worker_gpus: int


def nodes_of(autoscaler: Autoscaler) -> tuple[RentedNode | None, ...]:
    """The node of each pool, None for a pool whose GPUs are sold singly.

    Empty if idle GPUs stay idle: for other controllers, with `fill: false`, and if no pool has whole nodes.
    """
    settings, knowledge = autoscaler.settings, autoscaler.knowledge
    if not isinstance(settings, FleetplanSettings) or not settings.fill or not any(knowledge.nodes):
        return ()
    return tuple(
        None if node is None else RentedNode(*node, worker_gpus)
        for node, worker_gpus in zip(knowledge.nodes, knowledge.gpus, strict=True)
    )


def fill_nodes(
    targets: Sequence[ScaleTarget], nodes: Sequence[RentedNode | None], app: str, names: tuple[str, str]
) -> list[tuple[ScaleTarget, str]]:
    """Each pool with the PromQL of its workers, grown by the workers that fit on idle GPUs of its nodes.

    Prometheus must record the pools in the order of the returned list: a later pool counts the GPUs that
    earlier pools took. Decode pools come last, so pools that prefill take idle GPUs first. `app` labels the
    series of this deployment. `names` are two records: a pool's size before it is grown, and its size after.
    """
    sizes_before, sizes_after = (
        {target.name: f"sum({pool_series(name, app, target)})" for target in targets} for name in names
    )
    node_by_target = {target.name: node for target, node in zip(targets, nodes, strict=True)}
    grown: set[str] = set()
    filled_pools = []
    for target in sorted(targets, key=lambda target: target.pool.role == "decode"):
        rented, expr = node_by_target[target.name], sizes_before[target.name]
        if rented is not None:
            on_same_kind = [
                (pool_name, node)
                for pool_name, node in node_by_target.items()
                if node is not None and node.kind == rented.kind
            ]
            # There are as many nodes of this kind as the sizes before growth need. GPUs are idle if no worker
            # has taken them, the workers added to pools so far included.
            wanted_gpus = " + ".join(
                f"{node.worker_gpus} * {sizes_before[pool_name]}" for pool_name, node in on_same_kind
            )
            taken_gpus = " - ".join(
                f"{node.worker_gpus} * {(sizes_after if pool_name in grown else sizes_before)[pool_name]}"
                for pool_name, node in on_same_kind
            )
            idle_gpus = f"{rented.gpus} * ceil(({wanted_gpus}) / {rented.gpus}) - {taken_gpus}"
            more_workers = f"floor(({idle_gpus}) / {rented.worker_gpus})"
            if uneven_sizes(rented.gpus, (node.worker_gpus for _, node in on_same_kind)):
                # Workers differ in size, so several nodes may each have too few idle GPUs for a worker. Only
                # a pool that shares no node is grown.
                per_node = rented.gpus // rented.worker_gpus
                is_alone = len(on_same_kind) == 1
                more_workers = f"{per_node} * ceil({expr} / {per_node}) - {expr}" if is_alone else "0"
            # While another pool's record is missing, the left side of `or` has none: the size stays.
            expr = f"clamp_max({expr} + {more_workers}, {target.scaled.most}) or {expr}"
            grown.add(target.name)
        filled_pools.append((target, expr))
    return filled_pools
