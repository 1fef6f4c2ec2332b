"""A target's own files for pools whose size another decides: no fixed count, and workers that drain.

What the target writes for the fleet is read back and changed where a pool stands; the rest stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import yaml

from planner.day.autoscaling import dynamo_planner, ray_serve_autoscaler
from planner.day.autoscaling.autoscaler import Autoscaler, Document
from planner.day.autoscaling.scale_targets import POOL_LABEL, ScaleTarget
from planner.day.autoscaling.variants import kserve_scaling
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet
from planner.manifests import engine_command

GRACE_S = 30  # between the end of draining and the kill
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Change = Callable[[Document], None]


def scale_pools(
    files: Mapping[str, str],
    target: str,
    places: Sequence[ScaleTarget],
    fleet: Fleet,
    max_model_len: int,
    autoscaler: Autoscaler,
) -> dict[str, str]:
    """The target's files with scaled pools; the router's stay as they are."""
    named = {f"llm-d/{place.label}.values.yaml": place for place in places}
    changes: dict[str, Change] = {
        "kubernetes": partial(_kubernetes, places=places),
        "lws": partial(_kubernetes, places=places),
        "disaggregatedset": partial(_disaggregatedset, places=places),
        "production-stack": partial(_production_stack, places=places),
        "kserve": partial(_kserve, places=places, autoscaler=autoscaler),
        "ray-serve": partial(ray_serve_autoscaler.add_autoscaling, fleet=fleet, autoscaler=autoscaler),
        "dynamo": partial(
            _dynamo,
            places=places,
            autoscaler=autoscaler,
            longest_tokens=engine_command.served_model_len(fleet, max_model_len),
        ),
    }
    if target == "llm-d":  # a file for each pool
        return {
            path: _edit_yaml(text, partial(_llm_d, place=named[path])) if path in named else text
            for path, text in files.items()
        }
    return {path: _edit_yaml(text, changes[target]) for path, text in files.items()}


def _edit_yaml(text: str, change: Change) -> str:
    """YAML with comments above it, every document changed in place."""
    lines = text.splitlines(keepends=True)
    above = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    documents = [each for each in yaml.load_all("".join(lines[above:]), Loader=_LOADER) if each is not None]
    for document in documents:
        change(document)
    return "".join(lines[:above]) + "---\n".join(map(to_yaml, documents))


def _kubernetes(document: Document, places: Sequence[ScaleTarget]) -> None:
    own = {(place.kind, place.object_name): place for place in places}
    place = own.get((document["kind"], document["metadata"]["name"]))
    if place is None:
        return
    del document["spec"]["replicas"]
    if place.kind == "Deployment":
        _let_vllm_drain(document["spec"]["template"]["spec"], place)
    else:
        _drain_group(document["spec"]["leaderWorkerTemplate"], place)


def _disaggregatedset(document: Document, places: Sequence[ScaleTarget]) -> None:
    if document["kind"] != "DisaggregatedSet":
        return
    own = {place.object_name: place for place in places}
    for role in document["spec"]["roles"]:
        place = own[f"{document['metadata']['name']}-{role['name']}"]
        role["scaling"] = {"mode": "External"}
        del role["spec"]["replicas"]
        _drain_group(role["spec"]["leaderWorkerTemplate"], place)


def _drain_group(template: Document, place: ScaleTarget) -> None:
    for name in ("leaderTemplate", "workerTemplate"):
        if name in template:
            _let_vllm_drain(template[name]["spec"], place)


def _let_vllm_drain(pod: Document, place: ScaleTarget) -> None:
    """vLLM ends what it has before it stops, and Kubernetes waits for that."""
    drain_s = math.ceil(place.scaled.drain_s)
    pod["terminationGracePeriodSeconds"] = drain_s + GRACE_S
    for container in pod["containers"]:
        if container.get("command") == ["vllm", "serve"]:
            container["args"] += ["--shutdown-timeout", str(drain_s)]


def _llm_d(document: Document, place: ScaleTarget) -> None:
    """The chart has a fixed count in any case; the pool's own label keeps its pods apart from others'."""
    document["modelArtifacts"]["labels"][POOL_LABEL] = place.name
    workers = next(document[role] for role in ("prefill", "decode") if document[role]["create"])
    workers["replicas"] = place.scaled.size
    _let_vllm_drain(workers, place)


def _production_stack(document: Document, places: Sequence[ScaleTarget]) -> None:
    own = {place.pods["model"]: place for place in places}
    for model in document["servingEngineSpec"]["modelSpec"]:
        model["replicaCount"] = own[model["name"]].scaled.size


def _kserve(document: Document, places: Sequence[ScaleTarget], autoscaler: Autoscaler) -> None:
    """Without `replicas` KServe leaves a Deployment's count alone; the WVA is told in the service itself."""
    if document["kind"] != "LLMInferenceService":
        return
    name, spec = document["metadata"]["name"], document["spec"]
    for place in places:
        for load, suffix in ((spec, "-kserve"), (spec.get("prefill"), "-kserve-prefill")):
            if load is not None and place.object_name == f"{name}{suffix}":
                del load["replicas"]
                load["labels"] = {POOL_LABEL: place.name}
                if autoscaler.controller == "wva":
                    load["scaling"] = kserve_scaling(place, autoscaler)


def _dynamo(
    document: Document, places: Sequence[ScaleTarget], autoscaler: Autoscaler, longest_tokens: int
) -> None:
    own = {place.object_name: place for place in places}
    scale_targets: list[ScaleTarget] = []
    for component in document["spec"]["components"]:
        place = own.get(f"{document['metadata']['name']}-{component['name']}")
        if place is not None:
            scale_targets.append(place)
            component["replicas"] = place.scaled.size
            if autoscaler.controller not in dynamo_planner.CONTROLLERS:
                component["scalingAdapter"] = {}
    if autoscaler.controller in dynamo_planner.CONTROLLERS:
        document["spec"]["components"].append(
            dynamo_planner.planner_component(scale_targets, autoscaler, longest_tokens)
        )
