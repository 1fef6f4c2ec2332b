"""Where workers lie, and so which link a pair hands KV over: of fleets whose network has a topology.

Workers are dealt out to nodes of their GPU, prefill and decode workers in turns, in proportion to their
counts, so that nodes hold both; each goes to the first node with room. One of more GPUs than a node has takes
whole nodes. Two workers on the same nodes hand over by NVLink (the GPU row's link_bandwidth, no two transfers
slow each other down), stage beside stage (DistServe, arXiv:2401.09670, section 4.2); others by the NIC of the
node where the prefill worker lies (`network: bandwidth`), and between racks by the uplink of its rack where
that is the slower one. A transfer waits for those before it on its own link alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.fleet import Fleet, Pool, Topology
from planner.simulator import layout
from planner.simulator.layout import State

MOST_PLACES = 4096


def places(fleet: Fleet) -> tuple[tuple[int, ...], ...]:
    """The nodes of every running worker, in the simulator's order."""
    pools = fleet.running_pools
    nodes: list[tuple[str, int]] = []  # kind of each node, and the GPUs that are free
    found: list[list[tuple[int, ...]]] = [[] for _ in pools]
    for p in _in_turns(pools):
        kind = pools[p].type
        per_node = int(kind.gpu.gpus_per_node)
        if kind.gpus > per_node:
            more = -(-kind.gpus // per_node)
            found[p].append(tuple(range(len(nodes), len(nodes) + more)))
            nodes += [(kind.gpu.name, 0)] * more
            continue
        at = next(
            (i for i, (gpu, free) in enumerate(nodes) if gpu == kind.gpu.name and free >= kind.gpus),
            len(nodes),
        )
        if at == len(nodes):
            nodes.append((kind.gpu.name, per_node))
        nodes[at] = (kind.gpu.name, nodes[at][1] - kind.gpus)
        found[p].append((at,))
    return tuple(where for rows in found for where in rows)


def _in_turns(pools: Sequence[Pool]) -> list[int]:
    """The pool of each worker, in the order in which they are dealt out."""
    ranked = [((k + 1) / pool.count, p) for p, pool in enumerate(pools) for k in range(pool.count)]
    return [p for _, p in sorted(ranked)]


def ways(fleet: Fleet) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The place of every one of the kernel's workers (W,), and the link between two places (P, P): an index
    into the links of `rows`. Raises InputError for more places than can be held.
    """
    topology = fleet.network.topology
    assert topology is not None
    where = places(fleet)
    kinds = {each: i for i, each in enumerate(dict.fromkeys(where))}
    if len(kinds) > MOST_PLACES:
        raise InputError(f"network.topology: {len(kinds)} nodes in use, must be at most {MOST_PLACES}")
    ranks = [pool.type.dp for pool in fleet.running_pools for _ in range(pool.count)]
    place = np.repeat([kinds[each] for each in where], ranks)
    racks, count = _racks(topology, list(kinds)), len(kinds)
    is_uplink = topology.rack_bytes_per_s < fleet.network.bandwidth_bytes_per_s
    out = np.repeat(1 + count + np.arange(count)[:, None], count, axis=1)
    if is_uplink:
        uplinks = np.repeat(1 + 2 * count + racks[:, None], count, axis=1)
        out = np.where(racks[:, None] == racks[None, :], out, uplinks)
    out[np.arange(count), np.arange(count)] = 1 + np.arange(count)
    return place.astype(np.int64), out.astype(np.int64)


def with_ways(state: State, fleet: Fleet) -> State:
    """The state that knows where workers lie; the same without a topology."""
    if fleet.network.topology is None:
        return state
    place, out = ways(fleet)
    return state._replace(place=place, ways=out)


def rows(fleet: Fleet) -> npt.NDArray[np.void]:
    """The links: the network's own, and with a topology the NVLink of every place, its NIC, every uplink."""
    network, topology = fleet.network, fleet.network.topology
    if not network.bandwidth_bytes_per_s > 0:
        raise InputError(f"network.bandwidth is {network.bandwidth_bytes_per_s}, must be > 0")
    base = _link(fleet, network.bandwidth_bytes_per_s)
    if topology is None:
        return base
    pools = (pool for pool in fleet.running_pools for _ in range(pool.count))
    gpus = {each: pool.type.gpu for each, pool in zip(places(fleet), pools, strict=True)}
    within = [
        _link(fleet, topology.within_bytes_per_s or gpu.link_bytes_per_s, is_shared=False, latency_s=0.0)
        for gpu in gpus.values()
    ]
    uplinks = [_link(fleet, topology.rack_bytes_per_s)] * (1 + int(_racks(topology, list(gpus)).max()))
    return np.concatenate([base, *within, *[base] * len(gpus), *uplinks])


def _racks(topology: Topology, of: Sequence[tuple[int, ...]]) -> npt.NDArray[np.int64]:
    """Of places, by their first node."""
    first = np.array([each[0] for each in of], np.int64)
    return first // topology.nodes_per_rack if topology.nodes_per_rack else 0 * first


def _link(
    fleet: Fleet, bytes_per_s: float, *, is_shared: bool = True, latency_s: float | None = None
) -> npt.NDArray[np.void]:
    """Shape (1,)."""
    llm, network = fleet.llm, fleet.network
    link = np.zeros(1, dtype=layout.LINK)
    link["block_s"] = KV_BLOCK_TOKENS * llm.kv_bytes_per_token / bytes_per_s
    link["latency_s"] = network.latency_s if latency_s is None else latency_s
    link["overlap_frac"] = 1.0 - 1.0 / llm.layers if network.transfer == "layerwise" else 0.0
    link["overlap_tokens"] = network.layerwise_tokens
    link["is_shared"], link["slow_factor"] = network.is_shared and is_shared, 1.0
    link["free_s"] = link["last_s"] = -np.inf
    link["root"] = layout.NONE
    return link
