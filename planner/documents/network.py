"""Reads and writes the section `network` of fleet.yaml and slo.yaml.

{bandwidth: 50 GB/s, latency: 0 ms, transfer: layerwise, layerwise_from: 512, shared: false,
 topology: {within: 450 GB/s, nodes_per_rack: 4, rack_bandwidth: 200 GB/s}}

`planner.fleet.Network` and `Topology` explain the keys.
"""

import math
from typing import Any, Literal, cast

from planner.files.document_values import Section
from planner.fleet import Network, Topology
from planner.units import show_exactly

PLAN_KEYS = ("bandwidth", "latency", "transfer", "topology")  # Keys that slo.yaml may have.
KEYS = (*PLAN_KEYS, "layerwise_from", "shared")
TOPOLOGY_KEYS = ("within", "nodes_per_rack", "rack_bandwidth")
TRANSFERS = ("serialised", "layerwise")
MOST_COUNT = 10**9  # More tokens than any prompt has, and more nodes than any rack.


def parse_network(section: Section) -> Network:
    """The network of a section with KEYS. Raises InputError."""
    default = Network()
    return Network(
        section.positive("bandwidth", "bytes_per_s", default.bandwidth_bytes_per_s),
        section.at_least("latency", "s", default.latency_s),
        cast(Literal["serialised", "layerwise"], section.one_of("transfer", TRANSFERS, default.transfer)),
        section.whole_number("layerwise_from", default.layerwise_tokens, least=0, most=MOST_COUNT),
        section.flag("shared", default.is_shared),
        _parse_topology(section.subsection("topology", TOPOLOGY_KEYS)) if "topology" in section else None,
    )


def _parse_topology(section: Section) -> Topology:
    """The section `topology`: how nodes and racks are linked."""
    return Topology(
        section.positive("within", "bytes_per_s", None),
        section.whole_number("nodes_per_rack", 0, most=MOST_COUNT),
        section.positive("rack_bandwidth", "bytes_per_s", math.inf),  # The default is no limit.
    )


def network_document(network: Network) -> dict[str, Any]:
    """The section that `parse_network` reads as this network."""
    document: dict[str, Any] = {
        "bandwidth": show_exactly(network.bandwidth_bytes_per_s, "GB/s"),
        "latency": show_exactly(network.latency_s, "ms"),
        "transfer": network.transfer,
    }
    if network.layerwise_tokens:
        document["layerwise_from"] = network.layerwise_tokens
    if not network.is_shared:
        document["shared"] = False
    if (topology := network.topology) is not None:
        keys = document["topology"] = {}
        if topology.within_bytes_per_s is not None:
            keys["within"] = show_exactly(topology.within_bytes_per_s, "GB/s")
        if topology.nodes_per_rack:
            keys["nodes_per_rack"] = topology.nodes_per_rack
        if topology.rack_bytes_per_s < math.inf:
            keys["rack_bandwidth"] = show_exactly(topology.rack_bytes_per_s, "GB/s")
    return document
