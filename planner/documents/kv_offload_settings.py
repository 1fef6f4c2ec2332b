"""`policies: kv_offload` of slo.yaml, fleet.yaml and plan.yaml: CPU memory behind the prefix caches.

    policies: {prefix_cache: true, kv_offload: {size: 200 GB, bandwidth: 50 GB/s}}

    policies: {prefix_cache: true, kv_offload: {size: 200 GB, bandwidth: 50 GB/s,
                                                disk: {size: 2 TB, bandwidth: 6 GB/s}}}

`size` is each GPU's share of the host's memory, `bandwidth` that of the GPU's link to this memory
(planner/models/kv_offload.py). With `shared: true` both are those of one store for all workers.
"""

import math
from typing import Any

from planner.errors import InputError
from planner.files.document_values import Section, errors_as
from planner.models.kv_layout import kv_layout
from planner.models.kv_offload import KvOffload
from planner.models.llm import Llm
from planner.units import show_exactly

NONE = "none"
KEYS = ("size", "bandwidth", "shared", "disk")


def parse_kv_offload(policies: Section) -> KvOffload | None:
    """The memory behind the KV caches that a section `policies` describes; None for "none" or without it.

    Raises InputError with the key, what was found and what is valid.
    """
    value = policies.get("kv_offload", None)
    if value is None or value == NONE:
        return None
    section = Section.from_document(value, policies.path_of("kv_offload"), KEYS)
    if not policies.flag("prefix_cache", False):
        raise InputError(f"{section.where}: keeps what leaves prefix caches; add prefix_cache: true")
    has_disk = "disk" in section
    disk = section.subsection("disk", ("size", "bandwidth"))
    with errors_as(InputError, policies.where):
        return KvOffload(
            # With a disk there may be no memory.
            size_bytes=section.at_least("size", "bytes") if has_disk else section.positive("size", "bytes"),
            bandwidth_bytes_per_s=section.positive("bandwidth", "bytes_per_s"),
            is_shared=section.flag("shared", False),
            disk_bytes=disk.positive("size", "bytes") if has_disk else 0.0,
            disk_bandwidth_bytes_per_s=disk.positive("bandwidth", "bytes_per_s") if has_disk else math.inf,
        )


def kv_offload_document(offload: KvOffload) -> dict[str, Any]:
    """The value of `kv_offload` that `parse_kv_offload` reads as this setting."""
    document: dict[str, Any] = {
        "size": show_exactly(offload.size_bytes, "GB"),
        "bandwidth": show_exactly(offload.bandwidth_bytes_per_s, "GB/s"),
    }
    if offload.is_shared:
        document["shared"] = True
    if offload.disk_bytes:
        bandwidth = show_exactly(offload.disk_bandwidth_bytes_per_s, "GB/s")
        document["disk"] = {"size": show_exactly(offload.disk_bytes, "GB"), "bandwidth": bandwidth}
    return document


def check_can_offload(llm: Llm, where: str) -> None:
    """Raise InputError for an LLM that keeps KV or states beside its tokens' blocks: not simulated."""
    if kv_layout(llm, 1).extra.is_any:
        raise InputError(
            f"{where}: {llm.name} has layers with windows or states, which is not simulated; leave it out"
        )
