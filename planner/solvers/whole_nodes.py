"""Prices GPUs that are sold by whole nodes, so that idle GPUs of a node are paid too.

A fleet pays for the fewest nodes of each kind that hold its workers (`fewest_nodes`). The price of the GPUs
in use alone is a lower bound of what is paid, and more workers never cost less.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from planner.domain import OWNED, ROUNDING, FleetLimit, Gpu, payment_suffix, stock_name
from planner.fleet import WorkerType
from planner.models.power import shipped_power

Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", float, Floats)  # The count of one fleet, or of many fleets.


@dataclass(frozen=True, slots=True)
class PricedNode:
    """A node of `gpus` GPUs, with the price of each of them. `idle_electricity_usd_per_h` is the electricity
    of a GPU without a worker, 0 unless electricity is paid beside the price. Workers whose nodes have the
    same `kind` may share a node.
    """

    kind: str
    gpus: int
    gpu_usd_per_h: float
    idle_electricity_usd_per_h: float

    @property
    def idle_usd_per_h(self) -> float:
        """What a GPU of the node without a worker costs, with its electricity."""
        return self.gpu_usd_per_h + self.idle_electricity_usd_per_h


@lru_cache(maxsize=4096)
def node_of(gpu: Gpu) -> PricedNode | None:
    """The node that a GPU is rented with; None for a GPU that is owned or sold singly. GPUs with different
    power caps may be on one node, those of different markets may not.
    """
    if not gpu.is_sold_whole or payment_suffix(gpu.name) == OWNED:
        return None
    return PricedNode(
        kind=gpu.base + payment_suffix(gpu.name),  # For instance "h100-80g@spot".
        gpus=gpu.gpus_per_node,
        gpu_usd_per_h=gpu.price_usd_per_h,
        # `shipped_power` is the model of power that comes with the catalog; it gives watts.
        idle_electricity_usd_per_h=shipped_power().idle_w(gpu) / 1e3 * gpu.energy_usd_per_kwh,
    )


def enough_for(
    limit: FleetLimit, used: float, workers: Iterable[tuple[WorkerType, int]], owned: int
) -> float:
    """The amount that a limit must have in slo.yaml for these workers, which use `used` of it. The stock that
    is written there includes the GPUs that are `owned`.

    A stock of GPUs that are sold by whole nodes has owned GPUs and whole nodes to rent. So the amount is
    rounded up to whole nodes: with a part of a node in stock, GPUs would be sold singly
    (`PlanQuestion.priced_gpus`), at other prices.
    """
    gpus = [worker.gpu for worker, _ in workers if limit == FleetLimit("stock", stock_name(worker.gpu.name))]
    node_gpus = max((node.gpus for gpu in gpus if (node := node_of(gpu)) is not None), default=None)
    rented = used if node_gpus is None else node_gpus * math.ceil(used / node_gpus - ROUNDING)
    return owned + rented


def whole_stock(stock: int, owned: int, node_gpus: int) -> int:
    """The stock without the part of a node that there may be beside the `owned` GPUs."""
    return stock - max(stock - owned, 0) % node_gpus


def uneven_sizes(node_gpus: int, sizes: Iterable[int]) -> list[int]:
    """The sizes [GPUs] of workers that leave GPUs of a node unused when it is full of them, in order."""
    return sorted({size for size in sizes if size <= node_gpus and node_gpus % size})


@lru_cache(maxsize=1024)
def packing_rows(node_gpus: int, sizes: tuple[int, ...]) -> tuple[tuple[npt.NDArray[np.int64], int], ...]:
    """The workers of these sizes [GPUs] that fit on nodes of `node_gpus` GPUs, as rows (w, k): with n_g
    workers of g GPUs, sum_g w[g] n_g <= k * nodes. w is indexed by the size. The first row counts GPUs.

    Each size s gives two more rows if some size does not divide the node (Martello and Toth 1990, bound L2).
    A worker of more than half a node counts as its whole node, less the GPUs beside it that workers of s GPUs
    to half a node can use. One row counts GPUs, the other workers of s GPUs.
    """
    all_gpus = np.arange(max(sizes, default=0) + 1)
    rows = [(all_gpus, node_gpus)]
    for size in sizes if uneven_sizes(node_gpus, sizes) else ():
        if not 0 < size <= node_gpus:
            continue
        is_counted = (all_gpus >= size) & (all_gpus <= node_gpus)
        is_large, left_gpus = 2 * all_gpus > node_gpus, node_gpus - all_gpus
        by_gpus = np.where(is_large, node_gpus - left_gpus * (left_gpus >= size), all_gpus)
        by_workers = np.where(is_large, node_gpus // size - left_gpus // size, 1)
        rows += [(by_gpus * is_counted, node_gpus), (by_workers * is_counted, node_gpus // size)]
    return tuple(rows)


def fewest_nodes(
    node_gpus: int, workers: Sequence[tuple[Any, Number]], sizes: Sequence[int] | None = None
) -> Number | float:
    """How many nodes of `node_gpus` GPUs hold these workers, given as (GPUs of one, how many). For many
    fleets at once both may be arrays (n,); then `sizes` are all sizes of workers [GPUs].

    Workers do not always use all GPUs of their nodes: a node of 8 holds two workers of 3 GPUs, or one of 6.
    The number is the least that keeps `packing_rows`. It is exact for one size and for sizes that divide the
    node. On nodes of 8 GPUs, 1 in 670 random fleets of up to three sizes needs one node more.
    """
    known_sizes = sorted({int(gpus) for gpus, _ in workers}) if sizes is None else sizes
    nodes: Any = -(-sum(gpus * number for gpus, number in workers) // node_gpus)  # The first row.
    for weights, per_node in packing_rows(node_gpus, tuple(known_sizes))[1:]:
        nodes = np.maximum(nodes, -(-sum(weights[gpus] * number for gpus, number in workers) // per_node))
    return cast("Number | float", nodes)


def idle_gpus(pools: Iterable[tuple[PricedNode | None, int, Number]]) -> Number | float:
    """The GPUs without a worker on the fewest nodes that hold these pools, each given as (node, GPUs of a
    worker, workers) with None for GPUs sold singly.
    """
    return sum((_idle_of_kind(kind_pools) for kind_pools in _by_kind(pools)), 0.0)


def _by_kind(
    pools: Iterable[tuple[PricedNode | None, int, Number]],
) -> Iterable[list[tuple[PricedNode, int, Number]]]:
    """The pools that share a kind of node, for each kind."""
    by_kind: dict[str, list[tuple[PricedNode, int, Number]]] = {}
    for node, gpus, workers in pools:
        if node is not None:
            by_kind.setdefault(node.kind, []).append((node, gpus, workers))
    return by_kind.values()


def _idle_of_kind(kind_pools: Sequence[tuple[PricedNode, int, Number]]) -> Number | float:
    """Like `idle_gpus`, for pools on one kind of node."""
    node_gpus, used = kind_pools[0][0].gpus, sum(gpus * workers for _, gpus, workers in kind_pools)
    return fewest_nodes(node_gpus, [(gpus, workers) for _, gpus, workers in kind_pools]) * node_gpus - used


def idle_usd_per_h(pools: Iterable[tuple[PricedNode | None, int, Number]]) -> Number | float:
    """What is paid beside the price of the GPUs in use [USD/h]: the price of `idle_gpus(pools)`. If GPUs in
    use on nodes of one kind have several prices, the highest is paid for all of them.
    """
    total: Any = 0.0
    for kind_pools in _by_kind(pools):
        first, idle = kind_pools[0][0], _idle_of_kind(kind_pools)
        idle_usd: Any = first.idle_usd_per_h
        if all(node.gpu_usd_per_h == first.gpu_usd_per_h for node, _, _ in kind_pools):
            total = total + idle * idle_usd
            continue
        dearest: Any = 0.0
        for node, _, workers in sorted(kind_pools, key=lambda pool: pool[0].gpu_usd_per_h):
            # Pools are in the order of their prices, so the last one that has workers is the dearest.
            dearest = np.where(workers > 0, node.gpu_usd_per_h, dearest)
            idle_usd = np.where(workers > 0, node.idle_usd_per_h, idle_usd)
        total = total + idle * idle_usd
        for node, gpus, workers in kind_pools:
            total = total + gpus * workers * (dearest - node.gpu_usd_per_h)
    return cast("Number | float", total)
