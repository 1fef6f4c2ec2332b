"""The Kustomize base and its components: built by kubectl where it is installed, run as far as a test can."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from plans import LLM, mixed, pairs
from typer.testing import CliRunner

from planner import manifests
from planner.cli import app
from planner.files.checked_files import write_files
from planner.fleet import Fleet
from planner.manifests import engine_command, kubernetes, kustomize

Document = dict[str, Any]


def built(fleet: Fleet, folder: Path) -> list[Document]:
    """What the README's overlay makes of a fleet's files."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    write_files(folder / "manifests", manifests.render(fleet, 5000, "kubernetes").files)
    (folder / "prod").mkdir()
    (folder / "prod" / "kustomization.yaml").write_text(
        "\n".join(line.strip() for line in kustomize.overlay_lines(fleet))
    )
    done = subprocess.run(
        ["kubectl", "kustomize", folder / "prod"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("fleet", [mixed(), pairs()], ids=["mixed", "pairs"])
def test_an_overlay_with_every_component_is_valid(fleet: Fleet, tmp_path: Path) -> None:
    """Every worker waits for the weights and reads them; routers and Services stay as they were."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    objects = built(fleet, tmp_path)
    for each in objects:
        kubernetes_validate.validate(each, "1.31", strict=True)
    plain = kubernetes.documents(fleet, 5000)
    added = sorted(each["kind"] for each in objects)
    for each in plain:
        added.remove(each["kind"])
    assert added == ["Job", "NetworkPolicy", "NetworkPolicy", "PersistentVolumeClaim"]
    deployments = [each["spec"]["template"] for each in objects if each["kind"] == "Deployment"]
    for template in deployments:
        is_worker = template["metadata"]["labels"][engine_command.ROLE] != "router"
        assert ("initContainers" in template["spec"]) == is_worker
        main = template["spec"]["containers"][0]
        offline = {"name": "HF_HUB_OFFLINE", "value": "1"} in main["env"]
        mounted = any(mount["name"] == "models" and mount["readOnly"] for mount in main["volumeMounts"])
        assert not is_worker or kubernetes.SHM_MOUNT in main["volumeMounts"]
        assert (offline, mounted) == (is_worker, is_worker)
        assert is_worker or main["image"] == f"REGISTRY/{engine_command.ROUTER_IMAGE}"
    assert len(deployments) == len(fleet.running_pools) + 1


@pytest.mark.parametrize("fleet", [mixed(), pairs()], ids=["mixed", "pairs"])
def test_the_gateway_leads_to_the_routers_service_and_prometheus_to_the_workers(fleet: Fleet) -> None:
    files = manifests.render(fleet, 5000, "kubernetes").files
    plain = {(each["kind"], each["metadata"]["name"]): each for each in kubernetes.documents(fleet, 5000)}
    gateway, *routes = yaml.safe_load_all(files["components/gateway/gateway.yaml"])
    for route in routes:
        assert route["spec"]["parentRefs"] == [{"name": gateway["metadata"]["name"]}]
        (rule,) = route["spec"]["rules"]
        (backend,) = rule["backendRefs"]
        assert backend["port"] in [
            port["port"] for port in plain["Service", backend["name"]]["spec"]["ports"]
        ]
    monitor = yaml.safe_load(files["components/monitoring/workers.yaml"])["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (only,) = monitor["selector"]["matchExpressions"]
    for (kind, _), each in plain.items():
        if kind != "Deployment":
            continue
        labels = each["spec"]["template"]["metadata"]["labels"]
        is_scraped = labels[only["key"]] in only["values"]
        assert is_scraped == (labels[engine_command.ROLE] != "router")
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        ports = each["spec"]["template"]["spec"]["containers"][0]["ports"]
        assert not is_scraped or endpoint["port"] in [port["name"] for port in ports]
    dashboard = yaml.safe_load(files["components/monitoring/dashboard.yaml"])
    (panels,) = (json.loads(text)["panels"] for text in dashboard["data"].values())
    queries = [target["expr"].replace("fleetplan_role", "") for each in panels for target in each["targets"]]
    assert queries and not any("fleetplan_" in query for query in queries)


def test_the_routers_image_is_of_its_release_and_of_no_root() -> None:
    """One file for all targets with this router, of the Python that the planner's own image has."""
    files = manifests.render(mixed(), 5000).files
    lines = files["router-image/Dockerfile"].splitlines()
    assert any(engine_command.ROUTER_PACKAGE in line for line in lines if line.startswith("RUN "))
    assert f"USER {engine_command.ROUTER_USER}:{engine_command.ROUTER_USER}" in lines
    ours = (Path(__file__).parents[2] / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("ARG ")] == [
        line for line in ours if line.startswith("ARG ")
    ]
    for path in ("kubernetes.yaml", "lws.yaml", "compose/compose.yaml"):
        assert files[path].count(f"image: {engine_command.ROUTER_IMAGE}\n") == 1
    assert manifests.render(mixed(), 5000, "vllm").files.keys() & {"router-image/Dockerfile"} == set()


def test_the_download_is_not_scraped() -> None:
    """It has no port of metrics; so a selector that takes it would keep a target that never answers."""
    files = kustomize.kustomize_files(mixed())
    _, job = yaml.safe_load_all(files["components/model-cache/cache.yaml"])
    (only,) = yaml.safe_load(files["components/monitoring/workers.yaml"])["spec"]["selector"][
        "matchExpressions"
    ]
    assert only["operator"] == "In"
    assert job["spec"]["template"]["metadata"]["labels"][only["key"]] not in only["values"]


def test_an_llm_with_two_routers_has_a_path_to_each() -> None:
    fleet = replace(mixed(), pools=(*mixed().pools, *pairs().pools))
    _, *routes = yaml.safe_load_all(kustomize.kustomize_files(fleet)["components/gateway/gateway.yaml"])
    paths = [route["spec"]["rules"][0]["matches"][0]["path"]["value"] for route in routes]
    assert len(paths) == len(set(paths)) == 2


def test_nothing_is_added_without_an_overlay() -> None:
    files = manifests.render(mixed(), 5000, "kubernetes").files
    assert yaml.safe_load(files["kustomization.yaml"])["resources"] == ["kubernetes.yaml"]
    kinds = [each["kind"] for each in yaml.safe_load_all(files["kubernetes.yaml"])]
    assert not {"NetworkPolicy", "PersistentVolumeClaim", "Job"} & set(kinds)


def test_an_llm_of_a_path_has_no_download() -> None:
    fleet = mixed()
    files = manifests.render(replace(fleet, llm=replace(LLM, name="/models/ours")), 5000, "kubernetes").files
    assert not any(path.startswith(kustomize.CACHE) for path in files)
    assert any(path.startswith(kustomize.POLICIES) for path in files)


def test_the_volume_holds_the_weights() -> None:
    """70.6 billion parameters of 2 bytes are 131 GiB; a fifth more, and 10 GiB."""
    (path,) = [path for path in kustomize.kustomize_files(mixed()) if path.endswith("cache.yaml")]
    claim, _ = yaml.safe_load_all(kustomize.kustomize_files(mixed())[path])
    asked_gib = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))
    assert 160 <= asked_gib <= 175


@pytest.mark.parametrize(
    ("listed", "left_out"), [(["a.safetensors", "b.bin"], True), (["b.bin"], False)], ids=["both", "bin"]
)
def test_the_job_downloads_one_format_and_leaves_its_mark(
    listed: list[str], left_out: bool, tmp_path: Path
) -> None:
    (tmp_path / "huggingface_hub.py").write_text(
        f"def list_repo_files(name): return {listed!r}\n"
        "def snapshot_download(name, ignore_patterns): print(name, '*.bin' in ignore_patterns)\n"
    )
    mark = tmp_path / "done"
    done = subprocess.run(
        [sys.executable, "-c", kustomize.DOWNLOAD, str(mark), "one/llm", "its/drafter"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == [f"one/llm {left_out}", f"its/drafter {left_out}"]
    assert mark.exists()


def test_quiet_tells_only_what_is_missing(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("llm: meta-llama/Llama-3.1-8B\nworkers: [{gpu: h100-80g}]\nmax_model_len: 4096\n")
    asked = ["manifests", str(fleet), "--target", "kubernetes", "-o", str(tmp_path / "out")]
    loud = CliRunner().invoke(app, asked)
    quiet = CliRunner().invoke(app, [*asked, "-q"])
    assert loud.exit_code == quiet.exit_code == 0
    assert "written to" in loud.output and quiet.output == ""
