"""The price of GPUs that are sold by whole nodes, so that idle GPUs of a node are paid too.

A fleet pays for the fewest nodes of each kind that hold the GPUs of its workers. The price of the GPUs in use
alone is a lower bound of what is paid, and more GPUs never cost less.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from planner.domain import OWNED, ROUNDING, FleetLimit, Gpu, market_of, row_of
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
    if not gpu.is_sold_whole or market_of(gpu.name) == OWNED:
        return None
    return PricedNode(
        kind=gpu.base + market_of(gpu.name),  # For instance "h100-80g@spot".
        gpus=int(gpu.gpus_per_node),
        gpu_usd_per_h=gpu.price_usd_per_h,
        # `shipped_power` is the model of power that comes with the catalog; it gives watts.
        idle_electricity_usd_per_h=shipped_power().idle_w(gpu) / 1e3 * gpu.energy_usd_per_kwh,
    )


def enough_for(limit: FleetLimit, amount: float, used: float, gpus: Iterable[Gpu]) -> float:
    """The amount that a limit, now `amount`, must have for a fleet on these GPUs that uses `used` of it.

    The stock of a GPU that is sold by whole nodes is raised by whole nodes. With a part of a node in stock
    its GPUs would be sold singly (`PlanQuestion.priced_gpus`), which would be another question.
    """
    nodes = (
        node_of(gpu) for gpu in gpus if limit.of == "stock" and limit.gpu in (gpu.name, row_of(gpu.name))
    )
    node_gpus = max((node.gpus for node in nodes if node is not None), default=None)
    if node_gpus is None:
        return used
    return amount + node_gpus * math.ceil((used - amount) / node_gpus - ROUNDING)


def idle_usd_per_h(pools: Iterable[tuple[PricedNode | None, Number]]) -> Number | float:
    """What is paid beside the price of the GPUs in use [USD/h]: that of idle GPUs on the fewest nodes.
    `pools` has (node, GPUs in use) of each pool, with None for GPUs sold singly. If GPUs on nodes of one kind
    have several prices, the highest is paid for all of them.
    """
    used_by_kind: dict[str, list[tuple[PricedNode, Number]]] = {}
    for node, gpus in pools:
        if node is not None:
            used_by_kind.setdefault(node.kind, []).append((node, gpus))
    total: Number | float = 0.0
    for used in used_by_kind.values():
        dearest = max((node for node, _ in used), key=lambda node: node.gpu_usd_per_h)
        first_gpus = used[0][1]  # The sum starts with this, because the number 0 would not be of type Number.
        used_gpus = sum((gpus for _, gpus in used[1:]), start=first_gpus)
        idle_gpus = -used_gpus % dearest.gpus  # The GPUs that fill up the last node.
        total = total + idle_gpus * dearest.idle_usd_per_h
        for node, gpus in used:
            if node.gpu_usd_per_h < dearest.gpu_usd_per_h:
                total = total + gpus * (dearest.gpu_usd_per_h - node.gpu_usd_per_h)
    return total
