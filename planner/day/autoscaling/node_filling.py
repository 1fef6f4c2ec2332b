"""Workers on the idle GPUs of nodes that are sold whole (Deployment.filled), in PromQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.day.autoscaling.autoscaler import Autoscaler
from planner.day.autoscaling.records import of_pool
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.errors import InputError

LIMITS = (
    "Sizes are rounded up to what whole nodes hold, of the pools here that share a kind of node: that their "
    "pods fill a node before the next one is taken is up to the scheduler (`MostAllocated`) and to whoever "
    "adds nodes.",
)


@dataclass(frozen=True, slots=True)
class RentedNode:
    """The node that a pool's workers are rented with, by its kind and GPUs, and the GPUs of a worker."""

    kind: str
    gpus: int
    worker_gpus: int

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.worker_gpus < 1:
            raise InputError(
                f"fleetplan: nodes: {self.kind[:100]!r} has {self.gpus} GPUs and its workers "
                f"{self.worker_gpus}, both must be at least 1"
            )


def nodes_of(autoscaler: Autoscaler, pools: int) -> tuple[RentedNode | None, ...]:
    """One per pool; none at all where idle GPUs stay idle."""
    nodes_setting = autoscaler.parameters.get("nodes")
    if (
        autoscaler.controller != "fleetplan"
        or not autoscaler.parameters.get("fill", True)
        or not nodes_setting
    ):
        return ()
    if not isinstance(nodes_setting, Sequence) or not all(
        each is None or isinstance(each, RentedNode) for each in nodes_setting
    ):
        raise InputError(f"{autoscaler.controller}: nodes: expected a node per pool, found {nodes_setting!r}")
    if len(nodes_setting) != pools:
        raise InputError(
            f"{autoscaler.controller}: nodes: {len(nodes_setting)} nodes of {pools} pools, one for each"
        )
    return tuple(nodes_setting) if any(nodes_setting) else ()


def fill_nodes(
    places: Sequence[ScaleTarget], nodes: Sequence[RentedNode | None], app: str, names: tuple[str, str]
) -> list[tuple[ScaleTarget, str]]:
    """Each pool with its workers, in an order in which they can be recorded: pools at the front take the idle
    GPUs first.

    `names` are the records of sizes within least and most, and of what is returned; it reads both.
    """
    expr_by_place, workers = (
        {place.name: f"sum({of_pool(name, app, place)})" for place in places} for name in names
    )
    node_by_place = {place.name: node for place, node in zip(places, nodes, strict=True)}
    done: set[str] = set()
    filled_pools = []
    for place in sorted(places, key=lambda each: each.pool.role == "decode"):
        own, expr = node_by_place[place.name], expr_by_place[place.name]
        if own is not None:
            on = [
                (name, node)
                for name, node in node_by_place.items()
                if node is not None and node.kind == own.kind
            ]
            wanted = " + ".join(f"{node.worker_gpus} * {expr_by_place[name]}" for name, node in on)
            taken = " - ".join(
                f"{node.worker_gpus} * {(workers if name in done else expr_by_place)[name]}"
                for name, node in on
            )
            idle = f"{own.gpus} * ceil(({wanted}) / {own.gpus}) - {taken}"
            more = f"floor(({idle}) / {own.worker_gpus})"
            expr = f"clamp_max({expr} + {more}, {place.scaled.most}) or {expr}"
            done.add(place.name)
        filled_pools.append((place, expr))
    return filled_pools
