"""What whole nodes cost: of nodes that are sold whole, GPUs that hold no worker are paid too.

A fleet takes as few nodes of each kind as have so many GPUs as its workers. What GPUs in use cost by
themselves is a lower bound of what is paid, and more GPUs never cost less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from planner.domain import OWNED, Gpu, market_of
from planner.models.power import shipped_power

Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", float, Floats)


@dataclass(frozen=True, slots=True)
class PricedNode:
    """A node of `gpus` GPUs at a price per GPU; `idle_electricity_usd_per_h` is that of a GPU without a
    worker, where electricity is paid beside prices. What has one `kind` may share a node.
    """

    kind: str
    gpus: int
    gpu_usd_per_h: float
    idle_electricity_usd_per_h: float

    @property
    def idle_usd_per_h(self) -> float:
        """What a GPU costs that holds no worker."""
        return self.gpu_usd_per_h + self.idle_electricity_usd_per_h


@lru_cache(maxsize=4096)
def node_of(gpu: Gpu) -> PricedNode | None:
    """The node that a GPU is rented with; None for one that is owned or sold by itself.

    A power cap is no other machine, another market is.
    """
    if not gpu.is_sold_whole or market_of(gpu.name) == OWNED:
        return None
    electricity = shipped_power().idle_w(gpu) / 1e3 * gpu.energy_usd_per_kwh
    return PricedNode(
        gpu.base + market_of(gpu.name), int(gpu.gpus_per_node), gpu.price_usd_per_h, electricity
    )


def idle_usd_per_h(pools: Iterable[tuple[PricedNode | None, Number]]) -> Number | float:
    """What is paid beside the prices of these GPUs in use, as so many of each node.

    Of several prices within one kind of node, the highest is paid for all of it.
    """
    used: dict[str, list[tuple[PricedNode, Number]]] = {}
    for node, gpus in pools:
        if node is not None:
            used.setdefault(node.kind, []).append((node, gpus))
    total: Number | float = 0.0
    for alike in used.values():
        dearest = max((node for node, _ in alike), key=lambda node: node.gpu_usd_per_h)
        gpus = sum((n for _, n in alike[1:]), start=alike[0][1])
        total = total + (-gpus % dearest.gpus) * dearest.idle_usd_per_h
        for node, n in alike:
            if node.gpu_usd_per_h < dearest.gpu_usd_per_h:
                total = total + n * (dearest.gpu_usd_per_h - node.gpu_usd_per_h)
    return total
