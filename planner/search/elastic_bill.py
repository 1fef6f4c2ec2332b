"""What a fleet whose pools change has cost: each worker from the moment it is asked for until it is gone.

Providers bill by the second or by the started hour, with a least time. Where nodes are sold whole, a node is
rented as soon as the GPUs in use need one more, and given back when they need one fewer; each rental is
billed by itself. Electricity, where it is paid beside the prices, is that of GPUs in use at provisioned power
and of idle GPUs of whole nodes at idle power, for the time that they run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.errors import InputError
from planner.fleet import Fleet
from planner.simulator.elastic import ElasticRun, Span
from planner.solvers.nodes import Node, node_of

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Billing:
    """Time is billed in units of `unit_s`, every started one whole, and for `least_s` at least.

    AWS and GCP bill by the second and for a minute at least, others by the hour.
    """

    unit_s: float = 1.0
    least_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.unit_s < math.inf or not 0 <= self.least_s < math.inf:
            raise InputError(
                f"billing: unit_s {self.unit_s} and least_s {self.least_s}, must be > 0 and >= 0 seconds"
            )

    def billed_s(self, seconds: float) -> float:
        """What is billed for so many seconds; nothing for none."""
        if seconds <= 0:
            return 0.0
        units = math.ceil(max(seconds, self.least_s) / self.unit_s - 1e-9)
        return max(units, 1) * self.unit_s


BY_SECOND, BY_HOUR = Billing(), Billing(HOUR_S)


@dataclass(frozen=True, slots=True)
class ElasticBill:
    """`gpu_h` are GPU hours that are paid, those of idle GPUs of whole nodes among them; `used_gpu_h` those
    from asked for to gone. `usd_per_h` is the mean over the run, which lasted `hours`.
    """

    usd: float
    gpu_h: float
    used_gpu_h: float
    hours: float
    electricity_usd: float = 0.0  # of `usd`

    @property
    def usd_per_h(self) -> float:
        return self.usd / self.hours if self.hours > 0 else 0.0


def elastic_bill(fleet: Fleet, run: ElasticRun, billing: Billing = BY_SECOND) -> ElasticBill:
    """The bill of a run on `fleet`, whose pools are those of the spans."""
    usd = gpu_s = used_gpu_s = electricity = 0.0
    of_node: dict[str, list[tuple[Node, Span, int]]] = {}
    for span in run.spans:
        worker_type = fleet.pools[span.pool].type
        gpu, seconds = worker_type.gpu, span.gone_s - span.asked_s
        used_gpu_s += worker_type.gpus * seconds
        electricity += worker_type.gpus * seconds * gpu.electricity_usd_per_h
        node = node_of(gpu)
        if node is not None:
            of_node.setdefault(node.kind, []).append((node, span, worker_type.gpus))
            continue
        billed_s = billing.billed_s(seconds)
        gpu_s += worker_type.gpus * billed_s
        usd += worker_type.gpus * billed_s * gpu.price_usd_per_h
    for rented in of_node.values():
        node = max((each for each, _, _ in rented), key=lambda each: each.gpu_usd_per_h)
        rentals = rentals_s([(span.asked_s, span.gone_s, gpus) for _, span, gpus in rented], node.gpus)
        billed_s = node.gpus * sum(billing.billed_s(end_s - start_s) for start_s, end_s in rentals)
        held_s = node.gpus * sum(end_s - start_s for start_s, end_s in rentals)
        idle_s = held_s - sum(gpus * (span.gone_s - span.asked_s) for _, span, gpus in rented)
        gpu_s += billed_s
        usd += billed_s * node.gpu_usd_per_h
        electricity += idle_s * node.idle_electricity_usd_per_h
    return ElasticBill(
        (usd + electricity) / HOUR_S,
        gpu_s / HOUR_S,
        used_gpu_s / HOUR_S,
        run.end_s / HOUR_S,
        electricity / HOUR_S,
    )


def rentals_s(used: Iterable[tuple[float, float, int]], node_gpus: int) -> Sequence[tuple[float, float]]:
    """When each node is rented: (start, end). `used` are (start, end, GPUs); at any time there are as few
    nodes as have so many GPUs. What ends at a moment makes room for what begins then.
    """
    changes: dict[float, int] = {}
    for start_s, end_s, gpus in used:
        if end_s > start_s:
            changes[start_s] = changes.get(start_s, 0) + gpus
            changes[end_s] = changes.get(end_s, 0) - gpus
    open_s: list[float] = []  # since when, the node rented last at the end
    found, gpus = [], 0
    for time_s in sorted(changes):
        gpus += changes[time_s]
        nodes = -(-gpus // node_gpus)
        while len(open_s) > nodes:
            found.append((open_s.pop(), time_s))
        while len(open_s) < nodes:
            open_s.append(time_s)
    return found
