"""Change a target's files for pools that an autoscaler sizes: no fixed count, and workers that drain.

The files that the target writes for the fleet are parsed, and the objects that describe a pool are changed.
"""

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
from planner.manifests import dynamo, engine_command, helm_chart, kubernetes, kustomize

GRACE_S = kubernetes.LEAVE_S + engine_command.KILL_S  # The time a pod gets to stop, beside draining.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """The inputs of a `Change`; `longest_tokens` are those of the longest request."""

    fleet: Fleet
    scale_targets: Sequence[ScaleTarget]
    autoscaler: Autoscaler
    longest_tokens: int


Change = Callable[[Document, Scaling], None]
"""Changes one document of a target's files in place, so that an autoscaler may set its counts."""


@dataclass(frozen=True, slots=True)
class ScalableTarget:
    """A deployment target whose pools an autoscaler may scale.

    `find_object` returns the object with a pool's workers, which an autoscaler outside the target scales;
    None if the target scales pools itself. `is_measured`: we know how to scrape its pods. `file_of_pool` is
    the path of a pool's own file, with `{pool_name}`, if each pool has one; other files then stay as they
    are. `letters` limits the length of a pool's name. `begins_with_counts`: the files set the sizes at the
    beginning; else README.md has commands for them. `drains`: the files tell vLLM to finish its requests
    before it stops. `remark` is for README.md.
    """

    change: Change
    find_object: Callable[[Fleet, str, Pool, ScaledPool], ScaleTarget] | None
    is_measured: bool = True
    file_of_pool: str = ""
    letters: int = engine_command.POOL_LETTERS
    begins_with_counts: bool = False
    drains: bool = False
    remark: str = ""


def find_scale_targets(fleet: Fleet, target: str, autoscaler: Autoscaler) -> list[ScaleTarget]:
    """The scale target of each pool of `fleet` (none is empty); [] if the target scales pools itself."""
    row = SCALABLE.get(target)
    if row is None or row.find_object is None:
        return []
    scaled = {pool.name: pool for pool in autoscaler.pools}
    labels = engine_command.pool_labels(fleet, length=row.letters)
    return [
        row.find_object(fleet, label, pool, scaled[pool.name])
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
    """The target's files with scaled pools; objects that are no pool, such as the router, do not change."""
    row = SCALABLE[target]
    scaling = Scaling(fleet, scale_targets, autoscaler, engine_command.served_model_len(fleet, max_model_len))
    if not row.file_of_pool:
        edited = {
            path: text if _has_no_sizes(path) else _edit_yaml(text, row.change, scaling)
            for path, text in files.items()
        }
        return edited | kubernetes.chart_of(fleet, edited) if target == "kubernetes" else edited
    scaled = dict(files)
    for scale_target in scale_targets:
        path = row.file_of_pool.format(pool_name=scale_target.pool_name)
        pool_scaling = replace(scaling, scale_targets=(scale_target,))
        scaled[path] = _edit_yaml(files[path], row.change, pool_scaling)
    return scaled


_WITHOUT_SIZES = (kustomize.COMPONENTS, f"{helm_chart.FOLDER}/", engine_command.ROUTER_FOLDER)


def _has_no_sizes(path: str) -> bool:
    """Whether a file belongs to Kustomize, the router's image, or the Helm chart (which is written anew)."""
    return path == kustomize.BASE or path.startswith(_WITHOUT_SIZES)


def _edit_yaml(text: str, change: Change, scaling: Scaling) -> str:
    """Apply a change to every document of a text. Comments at the top stay, other comments are lost."""
    lines = text.splitlines(keepends=True)
    header_lines = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    documents = [
        each for each in yaml.load_all("".join(lines[header_lines:]), Loader=_LOADER) if each is not None
    ]
    for document in documents:
        change(document, scaling)
    return "".join(lines[:header_lines]) + "---\n".join(map(to_yaml, documents))


def _scale_kubernetes(document: Document, scaling: Scaling) -> None:
    """Leave the count of a Deployment or LeaderWorkerSet to its autoscaler, and let its workers drain."""
    targets = {(target.kind, target.object_name): target for target in scaling.scale_targets}
    target = targets.get((document["kind"], document["metadata"]["name"]))
    if target is None:
        return
    del document["spec"]["replicas"]
    if target.kind == "Deployment":
        _let_vllm_drain(document["spec"]["template"]["spec"], target)
    else:  # The only other kind here is a LeaderWorkerSet.
        _drain_group(document["spec"]["leaderWorkerTemplate"], target)


def _scale_disaggregatedset(document: Document, scaling: Scaling) -> None:
    """Leave the counts of a DisaggregatedSet's roles to their autoscalers."""
    if document["kind"] != "DisaggregatedSet":
        return
    targets = {target.object_name: target for target in scaling.scale_targets}
    for role in document["spec"]["roles"]:
        target = targets[f"{document['metadata']['name']}-{role['name']}"]
        role["scaling"] = {"mode": "External"}  # The role's DisaggregatedSetRoleScaler has the count.
        del role["spec"]["replicas"]
        _drain_group(role["spec"]["leaderWorkerTemplate"], target)


def _drain_group(template: Document, target: ScaleTarget) -> None:
    """`_let_vllm_drain` for the pods of a LeaderWorkerSet: one worker on several nodes."""
    for name in ("leaderTemplate", "workerTemplate"):
        if name in template:
            _let_vllm_drain(template[name]["spec"], target)


def _let_vllm_drain(pod: Document, target: ScaleTarget) -> None:
    """Let vLLM finish its requests before it stops, and Kubernetes wait for that."""
    drain_s = math.ceil(target.scaled.drain_s)
    pod["terminationGracePeriodSeconds"] = drain_s + GRACE_S
    usual_args, own_args = (
        engine_command.drain_args(target.pool.type, each_s) for each_s in (engine_command.DRAIN_S, drain_s)
    )
    for container in pod["containers"]:
        # Only the engine's container ends in these arguments; a router beside it does not.
        if usual_args and container["args"][-len(usual_args) :] == usual_args:
            container["args"][-len(usual_args) :] = own_args


def _scale_llm_d(document: Document, scaling: Scaling) -> None:
    """Set the chart's count, which cannot be left out, and label the pods by their pool."""
    (target,) = scaling.scale_targets
    document["modelArtifacts"]["labels"][POOL_LABEL] = target.name
    # Each pool has its own values file, in which one role is created.
    workers = next(document[role] for role in ("prefill", "decode") if document[role]["create"])
    workers["replicas"] = target.scaled.size
    _let_vllm_drain(workers, target)


def _scale_production_stack(document: Document, scaling: Scaling) -> None:
    """Set the chart's counts to the sizes at the start; it always writes them."""
    # The chart finds a pool's pods by their label `model`, which is the name in modelSpec.
    targets = {target.pods["model"]: target for target in scaling.scale_targets}
    for model in document["servingEngineSpec"]["modelSpec"]:
        model["replicaCount"] = targets[model["name"]].scaled.size


def _scale_kserve(document: Document, scaling: Scaling) -> None:
    """Without `replicas` KServe does not set a Deployment's count.

    Its Workload Variant Autoscaler ("wva") is configured in the service itself.
    """
    if document["kind"] != "LLMInferenceService":
        return
    name, spec = document["metadata"]["name"], document["spec"]
    for target in scaling.scale_targets:
        # KServe makes the Deployments' names with these suffixes.
        for workload, suffix in ((spec, "-kserve"), (spec.get("prefill"), "-kserve-prefill")):
            if workload is not None and target.object_name == f"{name}{suffix}":
                del workload["replicas"]
                workload["labels"] = {POOL_LABEL: target.name}  # manifests/kserve.py writes no labels here.
                if scaling.autoscaler.controller == "wva":
                    workload["scaling"] = kserve_scaling(target, scaling.autoscaler)


def _scale_dynamo(document: Document, scaling: Scaling) -> None:
    """Set the counts of a graph's components to the sizes at the start, and add what scales them."""
    autoscaler = scaling.autoscaler
    targets = {target.object_name: target for target in scaling.scale_targets}
    scale_targets: list[ScaleTarget] = []
    for component in document["spec"]["components"]:
        target = targets.get(f"{document['metadata']['name']}-{component['name']}")
        if target is not None:
            scale_targets.append(target)
            component["replicas"] = target.scaled.size
            # The adapter lets an autoscaler outside of Dynamo set the count; Dynamo's planner needs none.
            if autoscaler.controller not in dynamo_planner.CONTROLLERS:
                component["scalingAdapter"] = {}
    if autoscaler.controller in dynamo_planner.CONTROLLERS:
        document["spec"]["components"].append(
            dynamo_planner.planner_component(scale_targets, autoscaler, scaling.longest_tokens)
        )


def _scale_ray_serve(document: Document, scaling: Scaling) -> None:
    ray_serve_autoscaler.add_autoscaling(document, scaling.fleet, scaling.autoscaler)


_CHART_SETS_COUNTS = (
    "`helm upgrade` sets the chart's count again, until the autoscaler's next decision; the values "
    "have those of the beginning."
)
SCALABLE: Mapping[str, ScalableTarget] = MappingProxyType(
    {
        "kubernetes": ScalableTarget(_scale_kubernetes, kubernetes_target, drains=True),
        "lws": ScalableTarget(_scale_kubernetes, lws_target, drains=True),
        "disaggregatedset": ScalableTarget(
            _scale_disaggregatedset,
            disaggregatedset_target,
            drains=True,
            remark="`scaling: {mode: External}` and its DisaggregatedSetRoleScaler need LWS 0.10 or newer.",
        ),
        "llm-d": ScalableTarget(
            _scale_llm_d,
            llm_d_target,
            file_of_pool="llm-d/{pool_name}.values.yaml",
            begins_with_counts=True,
            drains=True,
            remark=_CHART_SETS_COUNTS,
        ),
        "kserve": ScalableTarget(
            _scale_kserve,
            kserve_target,
            remark="Applying the service again leaves the Deployments' counts: the spec has none.",
        ),
        "dynamo": ScalableTarget(
            _scale_dynamo,
            dynamo_target,
            is_measured=False,
            letters=dynamo.COMPONENT_NAME_LETTERS,
            begins_with_counts=True,
        ),
        "production-stack": ScalableTarget(
            _scale_production_stack,
            production_stack_target,
            begins_with_counts=True,
            remark=_CHART_SETS_COUNTS,
        ),
        "ray-serve": ScalableTarget(_scale_ray_serve, None, is_measured=False),
    }
)
"""The targets whose pools can be scaled; each name is one of `manifests.TARGETS`."""
# Targets that an autoscaler of Kubernetes can scale; the others do it themselves.
SCALED_FROM_OUTSIDE = tuple(name for name, row in SCALABLE.items() if row.find_object is not None)
MEASURED = tuple(name for name in SCALED_FROM_OUTSIDE if SCALABLE[name].is_measured)
