"""Says on which nodes each worker is, if the network has a topology, and so which link two workers have.

Workers are dealt out to nodes with their kind of GPU. Prefill and decode workers take turns, in proportion to
their counts, so that nodes hold both; each worker goes to the first node with room. A worker with more GPUs
than a node has takes whole nodes. The nodes of a worker are its place.

Two workers at the same place hand over by NVLink: `within_bytes_per_s` of the topology, by default
`link_bandwidth` of the GPU's row in catalogs/gpus.yaml. Each pipeline stage is then beside the same stage of
the other worker (DistServe, arXiv:2401.09670, section 4.2), and transfers do not slow each other down. From
one place to another KV takes the NIC of the prefill worker's place (`network: bandwidth`), or between racks
the uplink of its rack, if that is slower. On a NIC or an uplink a transfer waits for earlier ones of the same
link.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.fleet import Fleet, Pool, Topology
from planner.models.memory import scales_bytes
from planner.simulator import layout
from planner.simulator.layout import State

MOST_PLACES = 4096  # The matrix of links between all pairs of places then has 128 MiB.


def worker_nodes(fleet: Fleet) -> tuple[tuple[int, ...], ...]:
    """The numbers of the nodes of every running worker, in the order in which the simulator numbers
    workers.
    """
    pools = fleet.running_pools
    nodes: list[tuple[str, int]] = []  # The name of each node's GPUs, and how many of these are free.
    pool_nodes: list[list[tuple[int, ...]]] = [[] for _ in pools]
    for p in _in_turns(pools):
        worker_type = pools[p].type
        gpu_name, per_node = worker_type.gpu.name, worker_type.gpu.gpus_per_node
        if worker_type.gpus > per_node:
            new_nodes = -(-worker_type.gpus // per_node)
            pool_nodes[p].append(tuple(range(len(nodes), len(nodes) + new_nodes)))
            nodes += [(gpu_name, 0)] * new_nodes  # GPUs that the worker leaves there stay idle.
            continue
        first_with_room = next(
            (i for i, (gpu, free) in enumerate(nodes) if gpu == gpu_name and free >= worker_type.gpus),
            len(nodes),
        )
        if first_with_room == len(nodes):  # No node of this GPU has room.
            nodes.append((gpu_name, per_node))
        nodes[first_with_room] = (gpu_name, nodes[first_with_room][1] - worker_type.gpus)
        pool_nodes[p].append((first_with_room,))
    return tuple(node_numbers for workers in pool_nodes for node_numbers in workers)


def _in_turns(pools: Sequence[Pool]) -> list[int]:
    """The pool of each worker, in the order in which workers are dealt out to nodes.

    The k-th of n workers of a pool comes at k / n of the order.
    """
    ranked = [((k + 1) / pool.count, p) for p, pool in enumerate(pools) for k in range(pool.count)]
    return [p for _, p in sorted(ranked)]


def link_numbers(fleet: Fleet) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The place (W,) of each of the kernel's W workers, and the link (P, P) from each of P places to each
    other. For the kernel each data-parallel rank is a worker.

    A link is an index into what `make_links` returns. Raises InputError for more than MOST_PLACES places.
    """
    topology = fleet.network.topology
    assert topology is not None
    nodes_of_workers = worker_nodes(fleet)
    numbers = {nodes: i for i, nodes in enumerate(dict.fromkeys(nodes_of_workers))}
    if len(numbers) > MOST_PLACES:
        raise InputError(f"network.topology: {len(numbers)} nodes in use, must be at most {MOST_PLACES}")
    ranks = [pool.type.dp for pool in fleet.running_pools for _ in range(pool.count)]
    place_of = np.repeat([numbers[nodes] for nodes in nodes_of_workers], ranks)
    racks, count = _rack_numbers(topology, list(numbers)), len(numbers)
    # In the order of `make_links`, where link 0 is the network's own.
    nvlinks, nics, uplinks = 1 + np.arange(count), 1 + count + np.arange(count), 1 + 2 * count + racks
    links = np.repeat(nics[:, None], count, axis=1)  # [from, to]: the NIC of the place that sends.
    # Between racks the slower of NIC and uplink is the link.
    if topology.rack_bytes_per_s < fleet.network.bandwidth_bytes_per_s:
        links = np.where(racks[:, None] == racks[None, :], links, uplinks[:, None])
    np.fill_diagonal(links, nvlinks)
    return place_of.astype(np.int64), links.astype(np.int64)


def with_link_numbers(state: State, fleet: Fleet) -> State:
    """The state with the places of its workers and the links between them; the same state if the network has
    no topology.
    """
    if fleet.network.topology is None:
        return state
    place_of, links = link_numbers(fleet)
    return state._replace(place=place_of, link_between=links)


def make_links(fleet: Fleet) -> npt.NDArray[np.void]:
    """The records of all links, all idle: the network's own and, with a topology, the NVLink of every place,
    then the NIC of every place, then the uplink of every rack. Raises InputError without a bandwidth.

    With a topology nothing crosses the network's own link, but its record has the heap of all transfers and
    the factor by which disturbances slow down all links (transfer.py).
    """
    network, topology = fleet.network, fleet.network.topology
    if not network.bandwidth_bytes_per_s > 0:
        raise InputError(f"network.bandwidth is {network.bandwidth_bytes_per_s}, must be > 0")
    base = _idle_link(fleet, network.bandwidth_bytes_per_s)
    if topology is None:
        return base
    pools = (pool for pool in fleet.running_pools for _ in range(pool.count))
    gpu_at = {nodes: pool.type.gpu for nodes, pool in zip(worker_nodes(fleet), pools, strict=True)}
    nvlinks = [
        _idle_link(fleet, topology.within_bytes_per_s or gpu.link_bytes_per_s, is_shared=False, latency_s=0.0)
        for gpu in gpu_at.values()
    ]
    rack_count = 1 + int(_rack_numbers(topology, list(gpu_at)).max())
    uplinks = [_idle_link(fleet, topology.rack_bytes_per_s)] * rack_count
    # A NIC has the network's bandwidth, as `base` has.
    return np.concatenate([base, *nvlinks, *[base] * len(gpu_at), *uplinks])


def _rack_numbers(topology: Topology, places: Sequence[tuple[int, ...]]) -> npt.NDArray[np.int64]:
    """The rack (P,) of each place, which is that of its first node; rack 0 if there are no racks."""
    first_nodes = np.array([nodes[0] for nodes in places], np.int64)
    return first_nodes // topology.nodes_per_rack if topology.nodes_per_rack else 0 * first_nodes


def _idle_link(
    fleet: Fleet, bytes_per_s: float, *, is_shared: bool = True, latency_s: float | None = None
) -> npt.NDArray[np.void]:
    """The record (1,) of an idle link with this bandwidth. Its latency is the network's unless another is
    given. Unless `is_shared` its transfers do not slow each other down.
    """
    llm, network = fleet.llm, fleet.network
    link = np.zeros(1, dtype=layout.LINK)
    # The scales of KV in 8 bits, of the GPU that needs the most.
    scales_bytes_per_token = max((scales_bytes(llm, pool.type.gpu) for pool in fleet.pools), default=0.0)
    link["block_s"] = KV_BLOCK_TOKENS * (llm.kv_bytes_per_token + scales_bytes_per_token) / bytes_per_s
    link["latency_s"] = network.latency_s if latency_s is None else latency_s
    # With layerwise transfer the KV of all layers but the last is sent while the prompt is computed.
    link["overlap_frac"] = 1.0 - 1.0 / llm.layers if network.transfer == "layerwise" else 0.0
    link["overlap_tokens"] = network.layerwise_tokens
    link["is_shared"], link["slow_factor"] = network.is_shared and is_shared, 1.0
    link["free_s"] = link["last_s"] = -np.inf  # Never used yet.
    link["root"] = layout.NONE
    return link
