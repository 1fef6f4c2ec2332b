"""CPU memory for KV blocks in manifests: flags, shared memory, and who is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from manifest_commands import commands
from plans import mixed, pairs

from planner import manifests
from planner.fleet import Fleet
from planner.models.kv_offload import KvOffload

FLAGS: dict[str, Any] = yaml.safe_load((Path(__file__).parents[1] / "data" / "vllm_flags.yaml").read_text())[
    "flags"
]
OF_EACH_GPU = KvOffload(64 * 2.0**30, 50e9)
REFUSED = {"dynamo", "ray-serve", "kserve", "production-stack"}


def offloading(fleet: Fleet) -> Fleet:
    policies = replace(fleet.policies, prefix_cache=True, kv_offload=OF_EACH_GPU)
    return replace(fleet, policies=policies)


def test_every_engine_is_told_of_its_memory() -> None:
    """Of all its GPUs together, in GiB."""
    fleet = offloading(mixed())
    (pool,) = fleet.running
    found = manifests.render(fleet, 5000)
    assert set(found.refused) >= REFUSED
    told = commands(found.files)
    assert {"vllm", "compose", "kubernetes", "lws", "llm-d"} <= set(told)
    for target, each in told.items():
        for command in each:
            assert float(command.value("--kv-offloading-size")) == 64 * pool.type.tp, target
    assert "--kv-offloading-size" in FLAGS
    gb = 64 * 2**30 * pool.type.tp / 1e9
    assert f"keeps KV blocks in {gb:.4g} GB of CPU memory" in found.files["README.md"]
    for target in REFUSED:
        assert "kv_offload needs shared memory in its pods" in found.refused[target]


def test_pods_have_so_much_shared_memory_more() -> None:
    fleet = offloading(mixed())
    (pool,) = fleet.running
    gib = 16 + 64 * pool.type.tp
    for target in ("kubernetes", "lws", "llm-d"):
        text = "\n".join(manifests.render(fleet, 5000, target).files.values())
        assert f"sizeLimit: {gib}Gi" in text and f"memory: {gib}Gi" in text, target
        plain = "\n".join(manifests.render(mixed(), 5000, target).files.values())
        assert "sizeLimit: 16Gi" in plain and f"memory: {gib}Gi" not in plain


def test_prefill_workers_hand_over_and_keep() -> None:
    """Two connectors in one; decode workers have the first alone."""
    fleet = offloading(pairs())
    tp = next(pool.type.tp for pool in fleet.running if pool.role == "prefill")
    for target, each in commands(manifests.render(fleet, 5000).files).items():
        told = [json.loads(command.value("--kv-transfer-config")) for command in each]
        several = [one for one in told if one["kv_connector"] == "MultiConnector"]
        assert several and len(several) < len(told), target
        first, second = several[0]["kv_connector_extra_config"]["connectors"]
        assert first["kv_connector"] == "NixlConnector" and second["kv_connector"] == "OffloadingConnector"
        assert second["kv_connector_extra_config"] == {"cpu_bytes_to_use": 64 * 2**30 * tp}
        assert all("--kv-offloading-size" not in command.args for command in each)
