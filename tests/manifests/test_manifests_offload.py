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
REFUSED = {"dynamo", "ray-serve", "kserve", "production-stack", "skypilot"}


def offloading(fleet: Fleet) -> Fleet:
    policies = replace(fleet.policies, prefix_cache=True, kv_offload=OF_EACH_GPU)
    return replace(fleet, policies=policies)


def test_a_plan_with_a_disk_is_written_without_manifests() -> None:
    """Rendering raised, after the search: the plan that was found was lost."""
    fleet = offloading(mixed())
    disk = replace(OF_EACH_GPU, disk_bytes=500e9, disk_bandwidth_bytes_per_s=5e9)
    found = manifests.render(replace(fleet, policies=replace(fleet.policies, kv_offload=disk)), 5000)
    assert set(found.files) == {"README.md"} and set(found.refused) == set(manifests.TARGETS)
    assert "on a disk is not written here" in found.files["README.md"]


def test_every_engine_is_told_of_its_memory() -> None:
    """Of all its GPUs together, in GiB."""
    fleet = offloading(mixed())
    (pool,) = fleet.running_pools
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
    (pool,) = fleet.running_pools
    gib = 16 + 64 * pool.type.tp
    for target in ("kubernetes", "lws", "llm-d"):
        text = "\n".join(manifests.render(fleet, 5000, target).files.values())
        asked_gib = gib if target == "llm-d" else gib + 8 * pool.type.tp
        assert f"sizeLimit: {gib}Gi" in text and f"memory: {asked_gib}Gi" in text, target
        plain = "\n".join(manifests.render(mixed(), 5000, target).files.values())
        assert "sizeLimit: 16Gi" in plain and f"memory: {gib}Gi" not in plain


def test_prefill_workers_hand_over_and_keep() -> None:
    """Two connectors in one; decode workers have the first alone."""
    fleet = offloading(pairs())
    tp = next(pool.type.tp for pool in fleet.running_pools if pool.role == "prefill")
    for target, each in commands(manifests.render(fleet, 5000).files).items():
        told = [json.loads(command.value("--kv-transfer-config")) for command in each]
        several = [one for one in told if one["kv_connector"] == "MultiConnector"]
        assert several and len(several) < len(told), target
        first, second = several[0]["kv_connector_extra_config"]["connectors"]
        assert first["kv_connector"] == "NixlConnector" and second["kv_connector"] == "OffloadingConnector"
        assert second["kv_connector_extra_config"] == {"cpu_bytes_to_use": 64 * 2**30 * tp}
        assert all("--kv-offloading-size" not in command.args for command in each)


STORE = KvOffload(200e9, 50e9, is_shared=True)


def storing(fleet: Fleet) -> Fleet:
    return replace(fleet, policies=replace(fleet.policies, prefix_cache=True, kv_offload=STORE))


def test_workers_that_prefill_are_told_of_a_shared_store() -> None:
    """vLLM 0.32's MooncakeStoreConnector, beside the one that hands over; decode workers have none."""
    rendered = manifests.render(storing(pairs()), 5000)
    assert set(rendered.files) > {"kubernetes.yaml", "vllm/kv-store.sh", "vllm/kv-store.json"}
    for each in commands(rendered.files).values():
        told = [json.loads(command.value("--kv-transfer-config")) for command in each]
        several = [one for one in told if one["kv_connector"] == "MultiConnector"]
        assert several and len(several) < len(told)
        first, second = several[0]["kv_connector_extra_config"]["connectors"]
        assert first["kv_connector"] == "NixlConnector"
        assert second == {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    for target in ("compose", "lws", "llm-d"):
        assert "take vllm or kubernetes" in rendered.refused[target]
    for target in REFUSED:
        assert target in rendered.refused


def test_a_store_has_its_own_processes() -> None:
    """In scripts and in a pod: a master, and an owner of as many bytes as the plan says."""
    rendered = manifests.render(storing(mixed()), 5000)
    owner = "--global_segment_size=200000000000"
    assert owner in rendered.files["vllm/kv-store.sh"]
    objects = list(yaml.safe_load_all(rendered.files["kubernetes.yaml"]))
    named = {each["kind"]: each for each in objects if each["metadata"]["name"].endswith("-kv-store")}
    assert set(named) == {"ConfigMap", "Deployment", "Service"}
    containers = named["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert [each["command"][0] for each in containers] == ["mooncake_master", "mooncake_client"]
    assert owner in containers[1]["command"]
    told = json.loads(named["ConfigMap"]["data"]["kv-store.json"])
    assert told["mode"] == "standalone-store" and told["global_segment_size"] == 0
    assert told["master_server_address"] == f"{named['Service']['metadata']['name']}:50051"
    workers = [each for each in objects if each["kind"] == "Deployment" and each not in named.values()]
    main = workers[0]["spec"]["template"]["spec"]["containers"][0]
    path = next(each["value"] for each in main["env"] if each["name"] == "MOONCAKE_CONFIG_PATH")
    assert path == "/etc/mooncake/kv-store.json"


def test_workers_of_two_degrees_cut_their_blocks_alike() -> None:
    fleet = storing(mixed())
    (pool,) = fleet.pools
    other = replace(pool, name="other", type=replace(pool.type, tp=2))
    told = commands(manifests.render(replace(fleet, pools=(pool, other)), 5000, "vllm").files)["vllm"]
    for command in told:
        extra = json.loads(command.value("--kv-transfer-config"))["kv_connector_extra_config"]
        assert extra == {"enable_store_tp_lcm": True, "prefill_tp_sizes": [2, 4]}
