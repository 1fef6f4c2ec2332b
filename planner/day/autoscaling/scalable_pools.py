"""A target's own files for pools whose size another decides: no fixed count, and workers that drain.

What the target writes for the fleet is read back and changed where a pool stands; the rest stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import yaml

from planner.day.autoscaling import dynamo_planner, ray_serve_autoscaler
from planner.day.autoscaling.autoscaler import Autoscaler, Document, ScaledPool
from planner.day.autoscaling.scale_targets import (
    POOL_LABEL,
    ScaleTarget,
    disaggregatedset_target,
    dynamo_target,
    kserve_target,
    kubernetes_target,
    llm_d_target,
    lws_target,
    production_stack_target,
)
from planner.day.autoscaling.variants import kserve_scaling
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Pool
from planner.manifests import dynamo, engine_command, kustomize

GRACE_S = 30  # between the end of draining and the kill
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """What the documents of a target are changed for: the pools where they stand, and who decides."""

    fleet: Fleet
    scale_targets: Sequence[ScaleTarget]
    autoscaler: Autoscaler
    longest_tokens: int


Change = Callable[[Document, Scaling], None]
"""Takes the fixed counts out of one document of a target's files, in place."""


@dataclass(frozen=True, slots=True)
class ScalableTarget:
    """A deployment target whose pools another may scale.

    `place` says where the workers of a pool are, for objects beside the target's files; None where the target
    scales them itself. `is_measured`: we know how to scrape its pods. `file_of_pool` is the path of a pool's
    own file, with `{label}`, where each has one; other files then stay as they are. Labels have `letters` at
    most. `begins_with_counts`: its files hold the counts of the beginning. `drains`: they tell vLLM to end
    its requests before it stops. `remark` is a line for README.md.
    """

    change: Change
    place: Callable[[Fleet, str, Pool, ScaledPool], ScaleTarget] | None
    is_measured: bool = True
    file_of_pool: str = ""
    letters: int = engine_command.POOL_LETTERS
    begins_with_counts: bool = False
    drains: bool = False
    remark: str = ""


def find_scale_targets(fleet: Fleet, target: str, autoscaler: Autoscaler) -> list[ScaleTarget]:
    """One per pool, in order, none where the target scales itself; `fleet` has a worker in each."""
    row = SCALABLE.get(target)
    if row is None or row.place is None:
        return []
    scaled = {pool.name: pool for pool in autoscaler.pools}
    labels = engine_command.pool_labels(fleet, length=row.letters)
    return [
        row.place(fleet, label, pool, scaled[pool.name])
        for label, pool in zip(labels, fleet.running_pools, strict=True)
    ]


def scale_pools(
    files: Mapping[str, str],
    target: str,
    scale_targets: Sequence[ScaleTarget],
    fleet: Fleet,
    max_model_len: int,
    autoscaler: Autoscaler,
) -> dict[str, str]:
    """The target's files with scaled pools; the router's stay as they are."""
    row = SCALABLE[target]
    scaling = Scaling(fleet, scale_targets, autoscaler, engine_command.served_model_len(fleet, max_model_len))
    if not row.file_of_pool:
        return {
            path: text if _is_kustomize(path) else _edit_yaml(text, row.change, scaling)
            for path, text in files.items()
        }
    scaled = dict(files)
    for scale_target in scale_targets:
        path = row.file_of_pool.format(label=scale_target.label)
        own = replace(scaling, scale_targets=(scale_target,))
        scaled[path] = _edit_yaml(files[path], row.change, own)
    return scaled


def _is_kustomize(path: str) -> bool:
    """A base, or a component of it: it names and patches the target's objects and has no sizes."""
    return path == kustomize.BASE or path.startswith("components/")


def _edit_yaml(text: str, change: Change, scaling: Scaling) -> str:
    """YAML with comments above it, every document changed in place."""
    lines = text.splitlines(keepends=True)
    above = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    documents = [each for each in yaml.load_all("".join(lines[above:]), Loader=_LOADER) if each is not None]
    for document in documents:
        change(document, scaling)
    return "".join(lines[:above]) + "---\n".join(map(to_yaml, documents))


def _kubernetes(document: Document, scaling: Scaling) -> None:
    own = {(place.kind, place.object_name): place for place in scaling.scale_targets}
    place = own.get((document["kind"], document["metadata"]["name"]))
    if place is None:
        return
    del document["spec"]["replicas"]
    if place.kind == "Deployment":
        _let_vllm_drain(document["spec"]["template"]["spec"], place)
    else:
        _drain_group(document["spec"]["leaderWorkerTemplate"], place)


def _disaggregatedset(document: Document, scaling: Scaling) -> None:
    if document["kind"] != "DisaggregatedSet":
        return
    own = {place.object_name: place for place in scaling.scale_targets}
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


def _llm_d(document: Document, scaling: Scaling) -> None:
    """The chart has a fixed count in any case; the pool's own label keeps its pods apart from others'."""
    (place,) = scaling.scale_targets
    document["modelArtifacts"]["labels"][POOL_LABEL] = place.name
    workers = next(document[role] for role in ("prefill", "decode") if document[role]["create"])
    workers["replicas"] = place.scaled.size
    _let_vllm_drain(workers, place)


def _production_stack(document: Document, scaling: Scaling) -> None:
    own = {place.pods["model"]: place for place in scaling.scale_targets}
    for model in document["servingEngineSpec"]["modelSpec"]:
        model["replicaCount"] = own[model["name"]].scaled.size


def _kserve(document: Document, scaling: Scaling) -> None:
    """Without `replicas` KServe leaves a Deployment's count alone; the WVA is told in the service itself."""
    if document["kind"] != "LLMInferenceService":
        return
    name, spec = document["metadata"]["name"], document["spec"]
    for place in scaling.scale_targets:
        for load, suffix in ((spec, "-kserve"), (spec.get("prefill"), "-kserve-prefill")):
            if load is not None and place.object_name == f"{name}{suffix}":
                del load["replicas"]
                load["labels"] = {POOL_LABEL: place.name}
                if scaling.autoscaler.controller == "wva":
                    load["scaling"] = kserve_scaling(place, scaling.autoscaler)


def _dynamo(document: Document, scaling: Scaling) -> None:
    autoscaler = scaling.autoscaler
    own = {place.object_name: place for place in scaling.scale_targets}
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
            dynamo_planner.planner_component(scale_targets, autoscaler, scaling.longest_tokens)
        )


def _ray_serve(document: Document, scaling: Scaling) -> None:
    ray_serve_autoscaler.add_autoscaling(document, scaling.fleet, scaling.autoscaler)


_CHART_SETS_COUNTS = (
    "`helm upgrade` sets the chart's count again, until the autoscaler's next decision; the values "
    "have those of the beginning."
)
SCALABLE: Mapping[str, ScalableTarget] = MappingProxyType(
    {
        "kubernetes": ScalableTarget(_kubernetes, kubernetes_target, drains=True),
        "lws": ScalableTarget(_kubernetes, lws_target, drains=True),
        "disaggregatedset": ScalableTarget(
            _disaggregatedset,
            disaggregatedset_target,
            drains=True,
            remark="`scaling: {mode: External}` and its DisaggregatedSetRoleScaler need LWS 0.10 or newer.",
        ),
        "llm-d": ScalableTarget(
            _llm_d,
            llm_d_target,
            file_of_pool="llm-d/{label}.values.yaml",
            begins_with_counts=True,
            drains=True,
            remark=_CHART_SETS_COUNTS,
        ),
        "kserve": ScalableTarget(
            _kserve,
            kserve_target,
            remark="Applying the service again leaves the Deployments' counts: the spec has none.",
        ),
        "dynamo": ScalableTarget(
            _dynamo, dynamo_target, is_measured=False, letters=dynamo.COMPONENT_NAME, begins_with_counts=True
        ),
        "production-stack": ScalableTarget(
            _production_stack, production_stack_target, begins_with_counts=True, remark=_CHART_SETS_COUNTS
        ),
        "ray-serve": ScalableTarget(_ray_serve, None, is_measured=False),
    }
)
"""The targets whose pools can be scaled; each name is one of `manifests.TARGETS`."""
SCALED = tuple(name for name, row in SCALABLE.items() if row.place is not None)
MEASURED = tuple(name for name in SCALED if SCALABLE[name].is_measured)
