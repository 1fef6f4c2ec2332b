"""The Helm chart, rendered by helm where it is installed (`make .venv/helm`), against kubernetes.yaml."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_commands import FLEETS
from plans import mixed, pairs

from planner import manifests
from planner.files.checked_files import write_files
from planner.fleet import Fleet, Policies
from planner.manifests import engine_command, helm_chart, kubernetes, kustomize
from planner.models.kv_offload import KvOffload

Document = dict[str, Any]
CASES = {
    "mixed": mixed(),
    "pairs, one capped": pairs(),
    "both roles": FLEETS["both roles and mixed"],
    "a store that all share": replace(
        mixed(), policies=Policies(prefix_cache=True, kv_offload=KvOffload(200e9, 50e9, is_shared=True))
    ),
}


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    own = Path(__file__).parents[2] / ".venv" / "helm"
    program = str(own) if own.exists() else shutil.which("helm")
    if program is None:
        pytest.skip("helm is not installed")
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=60, check=False)


def chart_of(fleet: Fleet, folder: Path) -> str:
    write_files(folder, manifests.render(fleet, 5000, "kubernetes").files)
    return str(folder / helm_chart.FOLDER)


def templated(*words: str) -> dict[tuple[str, str], Document]:
    done = helm("template", "release", *words)
    assert done.returncode == 0, done.stderr
    return by_name(yaml.safe_load_all(done.stdout))


def by_name(objects: Any) -> dict[tuple[str, str], Document]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects if each is not None}


def in_namespace(objects: dict[tuple[str, str], Document]) -> dict[tuple[str, str], Document]:
    """As Helm writes it: it says in which namespace the router's account is."""
    for (kind, _), each in objects.items():
        if kind == "RoleBinding":
            each["subjects"] = [subject | {"namespace": "default"} for subject in each["subjects"]]
    return objects


@pytest.mark.parametrize("fleet", list(CASES.values()), ids=list(CASES))
def test_helm_makes_the_objects_of_kubernetes_yaml(fleet: Fleet, tmp_path: Path) -> None:
    chart = chart_of(fleet, tmp_path)
    assert helm("lint", "--strict", chart).returncode == 0
    expected = in_namespace(by_name(yaml.safe_load_all((tmp_path / "kubernetes.yaml").read_text())))
    assert templated(chart) == expected


@pytest.mark.parametrize("fleet", [mixed(), pairs()], ids=["mixed", "pairs"])
def test_every_part_can_be_enabled_and_is_valid(fleet: Fleet, tmp_path: Path) -> None:
    """The objects of Kustomize's components; workers wait for the weights and read them."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    chart, app = chart_of(fleet, tmp_path), engine_command.llm_label(fleet)
    parts = ("modelCache", "networkPolicy", "monitoring", "gateway")
    words = [f"--set={part}.enabled=true" for part in parts]
    objects = templated(chart, *words, "--set=gateway.className=envoy", "--set=modelCache.className=files")
    plain = by_name(kubernetes.documents(fleet, 5000))
    added = sorted(kind for kind, _ in objects.keys() - plain.keys())
    assert added == sorted(
        "ConfigMap Gateway HTTPRoute Job NetworkPolicy NetworkPolicy PersistentVolumeClaim PodMonitor".split()
    )
    assert objects["PersistentVolumeClaim", kustomize.claim_of(app)]["spec"]["storageClassName"] == "files"
    assert objects["Gateway", app]["spec"]["gatewayClassName"] == "envoy"
    for (kind, _), each in objects.items():
        if kind not in ("Gateway", "HTTPRoute", "PodMonitor"):
            kubernetes_validate.validate(each, "1.31", strict=True)
        if kind == "Deployment":
            pod = each["spec"]["template"]["spec"]
            is_worker = each["metadata"]["labels"][engine_command.ROLE] != "router"
            offline = {"name": "HF_HUB_OFFLINE", "value": "1"} in pod["containers"][0]["env"]
            assert ("initContainers" in pod, offline) == (is_worker, is_worker)
    without = templated(chart, "--set=modelCache.enabled=true")
    assert "storageClassName" not in without["PersistentVolumeClaim", kustomize.claim_of(app)]["spec"]


def test_pools_that_a_controller_sizes_have_no_count() -> None:
    fleet = mixed()
    files = manifests.render(fleet, 5000, "kubernetes").files
    objects = [each for each in yaml.safe_load_all(files["kubernetes.yaml"])]
    del objects[0]["spec"]["replicas"]
    written = kubernetes.chart_of(fleet, dict(files) | {"kubernetes.yaml": yaml.safe_dump_all(objects)})
    values = yaml.safe_load(written["chart/values.yaml"])
    assert "replicas" not in values["pools"]["mixed"] and values["routers"]["router"]["replicas"] == 1
    first = files["chart/values.yaml"].partition("\n")[0]
    assert first.startswith("# ") and written["chart/values.yaml"].startswith(first)


def test_values_are_checked_and_may_add_flags(tmp_path: Path) -> None:
    chart = chart_of(mixed(), tmp_path)
    assert "replicas" in helm("template", "release", chart, "--set=pools.mixed.replicas=two").stderr
    assert "gateway.className" in helm("template", "release", chart, "--set=gateway.enabled=true").stderr
    objects = templated(chart, "--set=pools.mixed.extraArgs={--seed,x7}", "--set=pools.mixed.replicas=0")
    deployment = objects["Deployment", f"{engine_command.llm_label(mixed())}-mixed"]["spec"]
    assert deployment["replicas"] == 0
    assert deployment["template"]["spec"]["containers"][0]["args"][-2:] == ["--seed", "x7"]


def test_nothing_a_name_says_is_a_template(tmp_path: Path) -> None:
    """An adapter or path may hold {{ }}: values are not templates."""
    fleet = FLEETS["drafting"]
    files = manifests.render(fleet, 5000, "kubernetes").files
    values = yaml.safe_load(files["chart/values.yaml"])
    pool = next(iter(values["pools"].values()))
    pool["args"] += ["{{ .Values.app }}", "$(HOME)"]
    write_files(tmp_path, dict(files) | {"chart/values.yaml": yaml.safe_dump(values)})
    workers = [each for (kind, _), each in templated(str(tmp_path / "chart")).items() if kind == "Deployment"]
    texts = [each["spec"]["template"]["spec"]["containers"][0]["args"] for each in workers]
    assert any(text[-2:] == ["{{ .Values.app }}", "$(HOME)"] for text in texts)
