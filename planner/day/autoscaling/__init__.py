"""Writes the manifests with which a controller changes the sizes of pools in a cluster.

These are the target's own manifests (planner/manifests) without fixed sizes, and the controller's objects.
The table PAIRS says which controllers can be written for which targets; other pairs are refused.
"""

from planner import manifests
from planner.day.autoscaling import (
    cronjobs,
    dynamo_planner,
    hpa_object,
    keda_object,
    knative_object,
    ray_serve_autoscaler,
    recording_rules,
    scalable_pools,
    variants,
)
from planner.day.autoscaling.autoscaler import (
    Autoscaler,
    ScaledPool,
    WrittenManifests,
    autoscaler_of,
    timetable_of,
)
from planner.day.autoscaling.scalable_pools import MEASURED, SCALABLE, SCALED_FROM_OUTSIDE, find_scale_targets
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet
from planner.manifests import engine_command, sglang_engine

__all__ = ["PAIRS", "Autoscaler", "ScaledPool", "autoscaler_of", "render", "timetable_of"]

# The objects of controllers that can be written for several targets, or under several names.
_RECORDING_RULES = dict.fromkeys(MEASURED, "KEDA ScaledObject, PrometheusRule")
_DYNAMO_PLANNER = {"dynamo": "planner component of DynamoGraphDeployment"}
# By controller and target: the objects that are written beside the target's own files.
PAIRS: dict[str, dict[str, str]] = {
    "static": dict.fromkeys(manifests.TARGETS, "nothing: the counts are the target's own"),
    "cron": dict.fromkeys(SCALED_FROM_OUTSIDE, "KEDA ScaledObject (cron), or CronJob"),
    "hpa": {
        **dict.fromkeys(MEASURED, "HorizontalPodAutoscaler, prometheus-adapter rule"),
        "ray-serve": "autoscaling_config",
    },
    "keda": {
        **dict.fromkeys(MEASURED, "KEDA ScaledObject (Prometheus, cron)"),
        "ray-serve": "autoscaling_config",
    },
    "knative": {"kserve": "InferenceService in Knative mode", "ray-serve": "autoscaling_config"},
    "wva": {
        **dict.fromkeys(
            ("kubernetes", "llm-d", "production-stack"), "VariantAutoscaling, HorizontalPodAutoscaler"
        ),
        "kserve": "scaling of LLMInferenceService",
    },
    "dynamo": _DYNAMO_PLANNER,
    "dynamo-sla": _DYNAMO_PLANNER,
    "aladdin": _RECORDING_RULES,
    "forecast": _RECORDING_RULES,
    "fleetplan": _RECORDING_RULES,
}


def render(fleet: Fleet, max_model_len: int, target: str, autoscaler: Autoscaler) -> dict[str, str]:
    """The content of every file, by its path in the folder of manifests.

    These are the target's own files, the controller's, and README.md. PAIRS must have the pair. Raises
    InputError if the manifest has no field for a setting of the controller.
    """
    if autoscaler.controller == "static":
        fleet = fleet.with_counts(pool.size for pool in autoscaler.pools)
        return manifests.render(fleet, max_model_len, target).files
    if sglang_engine.is_sglang(fleet):
        raise InputError(
            f"{autoscaler.controller}: reads the metrics of vLLM, and the plan was made for SGLang"
        )
    if autoscaler.controller in ("hpa", "keda", "knative") and target == "ray-serve":
        ray_serve_autoscaler.check(autoscaler)  # Ray Serve follows requests in flight alone.
    # A pool that begins empty gets one worker, so that manifests have it.
    fleet = fleet.with_counts(max(pool.size, 1) for pool in autoscaler.pools)
    files = dict(manifests.render(fleet, max_model_len, target).files)
    readme = files.pop("README.md")
    scale_targets = find_scale_targets(fleet, target, autoscaler)
    if autoscaler.controller == "knative" and target == "kserve":
        # Knative's services replace all files of the target, and Knative routes by itself.
        files, readme = {}, _drop_section(readme, "kserve")
    else:
        files = scalable_pools.scale_pools(files, target, scale_targets, fleet, max_model_len, autoscaler)
    written = _write_controller(fleet, max_model_len, target, autoscaler, scale_targets)
    about = f"# {autoscaler.controller}, for {engine_command.one_line(fleet.llm.name)}.\n"
    for path, documents in written.files.items():
        files[path] = about + "---\n".join(map(to_yaml, documents))
    return {"README.md": readme + _write_readme(target, autoscaler, scale_targets, written), **files}


def _write_controller(
    fleet: Fleet, max_model_len: int, target: str, autoscaler: Autoscaler, scale_targets: list[ScaleTarget]
) -> WrittenManifests:
    """The controller's documents, with instructions and limits for README.md. Ray Serve and Dynamo have no
    documents: `scale_pools` writes the controller's settings into the target's own files.
    """
    controller, app = autoscaler.controller, engine_command.llm_label(fleet)
    if target == "ray-serve":
        return WrittenManifests({}, (), ray_serve_autoscaler.LIMITS)
    if controller == "cron":
        jobs = cronjobs.write_cronjobs(scale_targets, app)
        objects = keda_object.write_timetable(scale_targets, autoscaler)
        return WrittenManifests(
            objects.files | jobs.files, objects.instructions + jobs.instructions, objects.limitations
        )
    if controller == "hpa":
        return hpa_object.write_hpas(scale_targets, autoscaler)
    if controller == "keda":
        return keda_object.write_scaled_objects(scale_targets, autoscaler)
    if controller == "knative":
        return knative_object.write_services(scale_targets, autoscaler, fleet, max_model_len)
    if controller == "wva" and target == "kserve":
        return variants.write_kserve(scale_targets, autoscaler)
    if controller == "wva":
        return variants.write_variants(scale_targets, autoscaler, fleet)
    if target == "dynamo":
        return WrittenManifests({}, (), dynamo_planner.limit_lines(autoscaler))
    return recording_rules.write_recording_rules(scale_targets, autoscaler, app)


def _write_readme(
    target: str, autoscaler: Autoscaler, scale_targets: list[ScaleTarget], written: WrittenManifests
) -> str:
    """The section of README.md that follows the target's own."""
    lines = [
        "",
        "## Sizes that change",
        "",
        f"The controller {autoscaler.controller} decides how many workers there are: "
        f"{PAIRS[autoscaler.controller][target]}.",
        "",
        "| pool | role | least | most | at the beginning |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {engine_command.dns_label(pool.name)} | {pool.role} | {pool.least} | {pool.most} | "
            f"{pool.size} |"
            for pool in autoscaler.pools
        ),
    ]
    if written.instructions:
        replaces_target = knative_object.FILE in written.files
        when = "In place of the target's own:" if replaces_target else "After the target's own:"
        lines += ["", when, "", *written.instructions]
    initial_counts = _initial_count_lines(target, scale_targets, autoscaler)
    if initial_counts:
        lines += ["", "Once, for the sizes at the beginning:", "", *initial_counts]
    limitations = (*written.limitations, *_limit_lines(target, autoscaler.controller, scale_targets))
    lines += ["", "What it does not do:", "", *(f"- {limitation}" for limitation in limitations)]
    return "\n".join(lines) + "\n"


def _drop_section(readme: str, heading: str) -> str:
    """The README without its section of level 2 (##) that has this heading."""
    first, *sections = readme.split("\n## ")
    others = [section for section in sections if section.split("\n", 1)[0] != heading]
    return "\n## ".join([first, *others]).rstrip("\n") + "\n"


def _initial_count_lines(target: str, scale_targets: list[ScaleTarget], autoscaler: Autoscaler) -> list[str]:
    """The commands that set the sizes at the beginning; empty if the manifests set them.

    Kubernetes starts an object without a count with one worker, which may be too few.
    """
    if SCALABLE[target].begins_with_counts or autoscaler.controller == "knative":
        return []
    lines = []
    for each in scale_targets:
        group = each.api_version.rpartition("/")[0]  # "apps" of "apps/v1".
        name = f"{each.kind.lower()}.{group}/{each.object_name}"
        lines.append(f"    kubectl scale {name} --replicas={each.scaled.size}")
    return lines


def _limit_lines(target: str, controller: str, scale_targets: list[ScaleTarget]) -> list[str]:
    """Limits of scaling on this target under any controller."""
    lines = [
        "Sizes are bounded by least and most, not by the GPUs that there are: a pod that finds no node "
        "waits, and counts."
    ]
    row = SCALABLE[target]
    if row.drains and all(engine_command.drain_args(each.pool.type) for each in scale_targets):
        drains = ", ".join(sorted({f"{each.scaled.drain_s:g} s" for each in scale_targets}))
        lines.append(
            f"A worker that is given up ends its requests for {drains} (`--shutdown-timeout`) and is then "
            "killed. Kubernetes chooses which one: pods that are not ready, then those that were ready for "
            "the shortest time, whatever they have in flight."
        )
    else:
        lines.append(
            "How a worker ends what it has is the target's own matter: vLLM by default aborts its requests "
            "when it gets the signal to stop."
        )
    if row.remark and controller != "knative":  # Knative's objects replace those that the remark is about.
        lines.append(row.remark)
    lines.append(
        "Prefill and decode pools are scaled apart: nothing here keeps their ratio."
        if any(each.pool.role != "mixed" for each in scale_targets)
        else "Prefix caches of new workers are empty, and nothing warms them."
    )
    return lines
