"""Computes what a fleet costs per hour.

Owned GPUs have no price. Where nodes are sold whole, their idle GPUs are paid too (solvers/whole_nodes.py).
Where electricity is paid in addition to prices, GPUs in use are billed at their provisioned power, as in the
search, and idle GPUs of whole nodes at their idle power.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from planner.documents.facts import Commitment, Workers
from planner.documents.offers import ProviderOffer, Term
from planner.domain import OWNED, SPOT, Gpu, payment_suffix
from planner.fleet import Fleet, WorkerType
from planner.search.oracle.fleet_counts import Counts, workers_of
from planner.simulator.energy import ExpectedPower
from planner.solvers.master import paid_usd_per_h
from planner.solvers.placement import NodePlacement
from planner.solvers.whole_nodes import PricedNode, fewest_nodes, node_of


@dataclass(frozen=True, slots=True)
class NodesSoldWhole:
    """All nodes of one GPU, where nodes are sold whole: how many they are (`count`), how many of their GPUs
    idle, and what all of them cost.
    """

    gpu: str
    count: int
    gpus_per_node: int
    idle_gpus: int
    usd_per_h: float
    idle_electricity_usd_per_h: float = 0.0


@dataclass(frozen=True, slots=True)
class Bill:
    """What is paid for a fleet [USD/h].

    `by_gpu_usd_per_h` is the price of the GPUs in use alone, `usd_per_h` what is paid. Both include
    `electricity_usd_per_h`. `expected_electricity_usd_per_h` is the electricity at the power that the
    simulation predicts; None if that is not known.
    """

    usd_per_h: float
    by_gpu_usd_per_h: float
    owned_gpus: int
    rented_gpus: int
    nodes: tuple[NodesSoldWhole, ...]
    electricity_usd_per_h: float = 0.0
    expected_electricity_usd_per_h: float | None = None

    @property
    def rent_usd_per_h(self) -> float:
        """What is paid for GPUs and nodes, without electricity."""
        return self.usd_per_h - self.electricity_usd_per_h

    @property
    def idle_gpus(self) -> int:
        """GPUs that are paid and hold no worker."""
        return sum(nodes.idle_gpus for nodes in self.nodes)


def bill_fleet(
    fleet: Fleet, placement: NodePlacement | None = None, power: ExpectedPower | None = None
) -> Bill:
    """The bill for the nodes of `placement`; without a placement for the fewest nodes with enough GPUs.
    `power` is what the simulation predicts.
    """
    used_gpus = [(pool.type.gpu, pool.count * pool.type.gpus) for pool in fleet.running_pools]
    workers = [(pool.type, pool.count) for pool in fleet.running_pools]
    placed: dict[str, int] = {}
    for node in placement.nodes if placement else ():
        placed[node.kind] = placed.get(node.kind, 0) + 1
    nodes = _nodes_sold_whole(workers, placed)
    rent_usd_per_h = sum(nodes_of_kind.usd_per_h for nodes_of_kind in nodes)
    # GPUs that `node_of` gives no node are owned, without a price, or sold singly.
    rent_usd_per_h += sum(gpu.price_usd_per_h * number for gpu, number in used_gpus if node_of(gpu) is None)
    electricity_usd_per_h = _electricity_usd_per_h(used_gpus, nodes)
    owned_gpus = sum(number for gpu, number in used_gpus if gpu.name.endswith(OWNED))
    return Bill(
        usd_per_h=rent_usd_per_h + electricity_usd_per_h,
        by_gpu_usd_per_h=fleet.price_usd_per_h,
        owned_gpus=owned_gpus,
        rented_gpus=fleet.gpus - owned_gpus,
        nodes=nodes,
        electricity_usd_per_h=electricity_usd_per_h,
        expected_electricity_usd_per_h=_expected_electricity_usd_per_h(fleet, nodes, power),
    )


def paid_whole_usd_per_h(counts: Counts) -> float:
    """What these workers cost on the fewest nodes that have enough GPUs."""
    return paid_usd_per_h(workers_of(counts))


def commitments(
    fleet: Fleet, placement: NodePlacement | None, terms: Mapping[str, Mapping[Term, ProviderOffer]]
) -> tuple[Commitment, ...]:
    """The bill of the fleet on demand and under every term at which some of its GPUs are offered.

    Empty if no GPU of the fleet is offered at a term other than on demand. `terms` maps each row of the
    catalog's GPUs to its offers, on demand included. GPUs without an offer at a term, and spot GPUs, keep the
    price of the plan; owned GPUs cost their electricity.
    """
    names = {pool.type.gpu.name for pool in fleet.running_pools}
    committable = {gpu for gpu in names if payment_suffix(gpu) not in (OWNED, SPOT)}
    if not any(term != "on-demand" for gpu in committable for term in terms.get(gpu, {})):
        return ()
    bills = []
    for term in get_args(Term):
        offers = {gpu: terms[gpu][term] for gpu in sorted(committable) if term in terms.get(gpu, {})}
        if not offers:
            continue
        prices = {gpu: offer.usd_per_h for gpu, offer in offers.items()}
        on_demand = {gpu: terms[gpu]["on-demand"].usd_per_h for gpu in offers}
        # `needed_frac` is the ratio of two rents, in which GPUs without an offer at this term cost nothing.
        free = dict.fromkeys(names, 0.0)
        term_rent, on_demand_rent = (
            _with_prices(fleet, free | offered, placement).rent_usd_per_h for offered in (prices, on_demand)
        )
        bills.append(
            Commitment(
                term,
                usd_per_h=_with_prices(fleet, prices, placement).usd_per_h,
                needed_frac=term_rent / on_demand_rent if on_demand_rent else None,
                sources=tuple(
                    f"{gpu}: {offer.provider}, {offer.usd_per_h:g} USD/h" for gpu, offer in offers.items()
                ),
                at_planned=tuple(sorted(committable - set(offers))),
            )
        )
    return tuple(bills)


def _with_prices(
    fleet: Fleet, prices_usd_per_h: Mapping[str, float], placement: NodePlacement | None
) -> Bill:
    """The bill with these prices, by the name of the GPU; all other GPUs keep their own."""

    def priced(worker: WorkerType) -> WorkerType:
        gpu = worker.gpu
        price_usd_per_h = prices_usd_per_h.get(gpu.name, gpu.price_usd_per_h)
        return replace(worker, gpu=replace(gpu, price_usd_per_h=price_usd_per_h))

    return bill_fleet(fleet.with_types(priced), placement)


def _electricity_usd_per_h(used_gpus: Iterable[tuple[Gpu, int]], nodes: Iterable[NodesSoldWhole]) -> float:
    """Electricity [USD/h] of GPUs in use at provisioned power, and of idle GPUs in whole nodes."""
    in_use_usd_per_h = sum(gpu.electricity_usd_per_h * number for gpu, number in used_gpus)
    return in_use_usd_per_h + sum(nodes_of_kind.idle_electricity_usd_per_h for nodes_of_kind in nodes)


def _expected_electricity_usd_per_h(
    fleet: Fleet, nodes: Iterable[NodesSoldWhole], power: ExpectedPower | None
) -> float | None:
    """Electricity [USD/h] at the power that each worker is expected to draw; None where it is not known."""
    if power is None:
        return None
    types = [pool.type for pool in fleet.pools for _ in range(pool.count)]
    in_use_usd_per_h = sum(
        float(watts) / 1e3 * worker.gpu.energy_usd_per_kwh
        for watts, worker in zip(power.worker_w, types, strict=True)
    )
    return in_use_usd_per_h + sum(nodes_of_kind.idle_electricity_usd_per_h for nodes_of_kind in nodes)


def _nodes_sold_whole(
    workers: Iterable[tuple[WorkerType, int]], placed: Mapping[str, int]
) -> tuple[NodesSoldWhole, ...]:
    """The nodes of each kind that is sold whole. `workers` has the type and the number of workers of each
    pool, and `placed` the number of nodes of each kind, if workers have been placed on nodes. GPUs of one
    kind with different prices are billed at the highest.
    """
    on_kind: dict[str, list[tuple[int, int]]] = {}  # (GPUs of a worker, workers), by the kind of their node.
    priced_nodes: dict[str, PricedNode] = {}
    for worker, number in workers:
        if (node := node_of(worker.gpu)) is not None:
            on_kind.setdefault(node.kind, []).append((worker.gpus, number))
            dearest = priced_nodes.get(node.kind, node)
            priced_nodes[node.kind] = max(dearest, node, key=lambda priced: priced.gpu_usd_per_h)
    nodes = []
    for kind, pools in on_kind.items():
        node, used = priced_nodes[kind], sum(gpus * number for gpus, number in pools)
        count = placed.get(kind, int(fewest_nodes(node.gpus, pools)))
        paid_gpus = count * node.gpus
        idle_gpus = paid_gpus - used
        nodes.append(
            NodesSoldWhole(
                kind,
                count,
                gpus_per_node=node.gpus,
                idle_gpus=idle_gpus,
                usd_per_h=paid_gpus * node.gpu_usd_per_h,
                idle_electricity_usd_per_h=idle_gpus * node.idle_electricity_usd_per_h,
            )
        )
    return tuple(nodes)


def bought_pools(fleet: Fleet) -> tuple[Workers, ...]:
    """The pools of a fleet as facts: what must be bought for it."""
    return tuple(
        Workers(
            pool.role,
            pool.type.gpu.name,
            pool.type.tp,
            pool.type.pp,
            pool.count,
            pool.count * pool.type.gpus,
            pool.type.max_num_batched_tokens,
        )
        for pool in fleet.running_pools
    )
