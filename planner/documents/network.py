"""The network of a fleet, in fleet.yaml and in slo.yaml: read and written.

{bandwidth: 50 GB/s, latency: 0 ms, transfer: layerwise, layerwise_from: 512, shared: false}
"""

from __future__ import annotations

from typing import Any, Literal, cast

from planner.fleet import Network
from planner.io.values import Section
from planner.units import exactly

KEYS = ("bandwidth", "latency", "transfer", "layerwise_from", "shared")
ASKED_KEYS = KEYS[:3]  # what a plan may be asked for
TRANSFERS = ("serialised", "layerwise")
MOST_TOKENS = 10**9


def parse_network(section: Section) -> Network:
    default = Network()
    return Network(
        section.positive("bandwidth", "bytes_per_s", default.bandwidth_bytes_per_s),
        section.at_least("latency", "s", default.latency_s),
        cast(Literal["serialised", "layerwise"], section.one_of("transfer", TRANSFERS, default.transfer)),
        section.whole("layerwise_from", default.layerwise_tokens, least=0, most=MOST_TOKENS),
        section.flag("shared", default.is_shared),
    )


def network_document(network: Network) -> dict[str, Any]:
    document: dict[str, Any] = {
        "bandwidth": exactly(network.bandwidth_bytes_per_s, "GB/s"),
        "latency": exactly(network.latency_s, "ms"),
        "transfer": network.transfer,
    }
    if network.layerwise_tokens:
        document["layerwise_from"] = network.layerwise_tokens
    if not network.is_shared:
        document["shared"] = False
    return document
