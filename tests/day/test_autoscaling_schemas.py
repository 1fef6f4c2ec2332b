"""What runs a controller against the schemas of those who read it."""

from __future__ import annotations

import copy
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from autoscalers import CASES, FLEETS, objects, own_files, written
from kubernetes_schemas import kubernetes_schemas

DATA = Path(__file__).parents[1] / "data"
SCHEMAS: dict[str, Any] = yaml.safe_load((DATA / "autoscaling_schemas.yaml").read_text())
BUILT_IN = (
    "ConfigMap",
    "CronJob",
    "Deployment",
    "HorizontalPodAutoscaler",
    "PodDisruptionBudget",
    "Role",
    "RoleBinding",
    "Service",
    "ServiceAccount",
)
every_case = pytest.mark.parametrize(("fleet", "controller", "target"), CASES)

Document = dict[str, Any]


def follows(document: Document, schema: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(SCHEMAS[schema]).validate(document)


def is_a_pod(spec: Document) -> None:
    kubernetes_validate = kubernetes_schemas()
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(whole, "1.35", strict=True)


@every_case
def test_every_object_beside_the_targets_own_follows_its_schema(
    fleet: str, controller: str, target: str
) -> None:
    """The first of each kind in a file; built-in kinds by Kubernetes 1.31 or 1.35."""
    kubernetes_validate = kubernetes_schemas()
    files = written(fleet, controller, target)
    own = own_files(fleet, target)
    found = objects({path: text for path, text in files.items() if path not in own})
    first = {(path, document.get("kind")): document for path, document in reversed(found)}
    for (path, kind), document in first.items():
        if kind in BUILT_IN:
            kubernetes_validate.validate(document, "1.31" if fleet == "mixed" else "1.35", strict=True)
        else:
            follows(document, path if kind is None else kind)
        if kind == "InferenceService":
            predictor = document["spec"]["predictor"]
            names = ("containers", "nodeSelector", "tolerations", "affinity", "volumes")
            is_a_pod({name: predictor[name] for name in names if name in predictor})


def unscaled(document: Document) -> Document:
    """A target's own document without what scaling added, and with a count where it took one away; what was
    added is held against its schema."""
    found = copy.deepcopy(document)
    spec = found.get("spec", {})
    if found.get("kind") in ("Deployment", "LeaderWorkerSet"):
        spec.setdefault("replicas", 1)
    for role in spec.get("roles", []):
        assert role.pop("scaling") == {"mode": "External"}
        role["spec"]["replicas"] = 1
    if found.get("kind") == "LLMInferenceService":
        for load in (spec, spec.get("prefill")):
            if load is not None:
                load["replicas"] = 1
                assert list(load.pop("labels")) == ["fleetplan/pool"]
                if (scaling := load.pop("scaling", None)) is not None:
                    follows(scaling, "scaling")
    if found.get("kind") == "DynamoGraphDeployment":
        planners = [c for c in spec["components"] if c["type"] == "planner"]
        spec["components"] = [c for c in spec["components"] if c["type"] != "planner"]
        for planner in planners:
            pod = planner["podTemplate"]["spec"]
            is_a_pod(pod)
            follows(json.loads(pod["containers"][0]["args"][1]), "planner")
        for component in spec["components"]:
            assert component.pop("scalingAdapter", {}) == {}
    if "modelArtifacts" in found:
        del found["modelArtifacts"]["labels"]["fleetplan/pool"]
    for application in found.get("applications", []):
        args = application["args"]
        for config in args.get("llm_configs") or [args["prefill_config"], args["decode_config"]]:
            if config["deployment_config"].pop("autoscaling_config", None) is not None:
                config["deployment_config"]["num_replicas"] = 1
    return found


def same_but_counts(value: Any) -> Any:
    """Without what a count, draining or a comment may change."""
    if isinstance(value, dict):
        left_out = ("replicas", "replicaCount", "num_replicas", "terminationGracePeriodSeconds")
        return {key: same_but_counts(item) for key, item in value.items() if key not in left_out}
    if isinstance(value, list):
        if "--shutdown-timeout" in value:
            at = value.index("--shutdown-timeout")
            value = [*value[:at], *value[at + 2 :]]
        return [same_but_counts(item) for item in value]
    return value


@every_case
def test_the_targets_own_files_stay_what_they_are(fleet: str, controller: str, target: str) -> None:
    """What scaling adds aside, they are those without it, which are checked by themselves."""
    if controller == "static" or (controller, target) == ("knative", "kserve"):
        return
    own = own_files(fleet, target)
    files = written(fleet, controller, target)
    before, after = objects(own), objects({path: files[path] for path in own})
    assert [path for path, _ in before] == [path for path, _ in after]
    for (_, was), (_, document) in zip(before, after, strict=True):
        assert same_but_counts(unscaled(document)) == same_but_counts(was)


def test_the_schemas_see_a_wrong_key() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for controller, path, keys in (
        ("keda", "scaled-objects.yaml", ("spec", "pollIntervall")),
        ("keda", "pod-monitors.yaml", ("spec", "selectors")),
        ("wva", "variant-autoscalings.yaml", ("spec", "cost")),
    ):
        files = written("mixed", controller, "kubernetes")
        (document,) = [document for at, document in objects(files) if at == path]
        document[keys[0]][keys[1]] = "x"
        with pytest.raises(jsonschema.ValidationError):
            follows(document, document["kind"])


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("controller", ["hpa", "keda", "knative"])
def test_ray_accepts_its_autoscaling_config(
    fleet: str, controller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own classes; with num_replicas beside it, or least above most, it would refuse."""
    reason = "Ray Serve is not installed (pip install 'ray[serve]' pyarrow)"
    pytest.importorskip("ray.serve.schema", reason=reason, exc_type=ImportError)
    llm_config = pytest.importorskip(
        "ray.llm._internal.serve.core.configs.llm_config", reason=reason, exc_type=ImportError
    )
    behind = import_module("ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router")
    monkeypatch.setitem(sys.modules, "ray.serve.llm.request_router", behind)
    config_of = import_module("ray.serve.config").AutoscalingConfig
    for _, document in objects(written(fleet, controller, "ray-serve")):
        for application in document["applications"]:
            args = application["args"]
            for each in args.get("llm_configs") or [args["prefill_config"], args["decode_config"]]:
                llm_config.LLMConfig.model_validate(each)
                told = config_of.model_validate(each["deployment_config"]["autoscaling_config"])
                assert (told.min_replicas, told.initial_replicas, told.max_replicas) == (1, 2, 9)
