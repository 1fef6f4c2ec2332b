"""What a fleet costs as its machines are sold: whole nodes where these are, nothing for what is owned.

A search adds up prices per GPU. Where a node is sold whole, its idle GPUs are paid too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from planner.domain import OWNED, Gpu, market_of
from planner.fleet import Fleet
from planner.search.fleets import Counts
from planner.solvers.placement import Placement


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of one GPU that are sold whole: the price of all of them, and GPUs that hold no worker."""

    gpu: str
    count: int
    gpus_per_node: int
    idle_gpus: int
    usd_per_h: float


@dataclass(frozen=True, slots=True)
class Bill:
    """`by_gpu_usd_per_h` is what the GPUs in use cost at their prices, `usd_per_h` what is paid."""

    usd_per_h: float
    by_gpu_usd_per_h: float
    owned_gpus: int
    rented_gpus: int
    nodes: tuple[Nodes, ...]

    @property
    def idle_gpus(self) -> int:
        """GPUs that are paid and hold no worker."""
        return sum(each.idle_gpus for each in self.nodes)


def bill(fleet: Fleet, placement: Placement | None = None) -> Bill:
    """By the nodes of the placement, else by the fewest that have so many GPUs."""
    pools = [(pool.type.gpu, pool.count * pool.type.gpus) for pool in fleet.running]
    placed: dict[str, int] = {}
    for node in placement.nodes if placement else ():
        placed[node.kind] = placed.get(node.kind, 0) + 1
    nodes = _nodes(pools, placed)
    in_nodes = {each.gpu for each in nodes}
    owned = sum(gpus for gpu, gpus in pools if gpu.name.endswith(OWNED))
    singly = sum(gpu.price_usd_per_h * gpus for gpu, gpus in pools if _kind(gpu) not in in_nodes)
    return Bill(
        singly + sum(each.usd_per_h for each in nodes),
        fleet.price_usd_per_h,
        owned,
        fleet.gpus - owned,
        nodes,
    )


def paid_whole_usd_per_h(counts: Counts) -> float:
    """What these workers cost on as few nodes as have so many GPUs."""
    pools = [(option.type.gpu, count * option.type.gpus) for option, count in counts]
    nodes = _nodes(pools, {})
    kinds = {each.gpu for each in nodes}
    singly = sum(gpu.price_usd_per_h * gpus for gpu, gpus in pools if _kind(gpu) not in kinds)
    return singly + sum(each.usd_per_h for each in nodes)


def _kind(gpu: Gpu) -> str:
    """What may share a node: a power cap is no other machine, another market is."""
    return gpu.base + market_of(gpu.name)


def _nodes(pools: Iterable[tuple[Gpu, int]], placed: dict[str, int]) -> tuple[Nodes, ...]:
    used: dict[str, int] = {}
    of_kind: dict[str, Gpu] = {}
    for gpu, gpus in pools:
        if gpu.is_sold_whole and market_of(gpu.name) != OWNED:
            kind = _kind(gpu)
            used[kind] = used.get(kind, 0) + gpus
            of_kind[kind] = max(of_kind.get(kind, gpu), gpu, key=lambda each: each.price_usd_per_h)
    found = []
    for kind, gpus in used.items():
        size = int(of_kind[kind].gpus_per_node)
        count = placed.get(kind, math.ceil(gpus / size))
        price = count * size * of_kind[kind].price_usd_per_h
        found.append(Nodes(kind, count, size, count * size - gpus, price))
    return tuple(found)
