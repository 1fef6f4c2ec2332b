"""KServe's Knative mode: an InferenceService (serving.kserve.io/v1beta1) per pool with Knative's settings.

Knative cannot scale an LLMInferenceService, so these services replace kserve.yaml, each with an address of
its own and Knative's activator before it. Annotations and their ranges: knative/serving v1.20,
pkg/apis/autoscaling/register.go; settings of a whole cluster: config/core/configmaps/autoscaler.yaml.
"""

import math
from collections.abc import Sequence

from planner.day.autoscaling.autoscaler import Autoscaler, Document, WrittenManifests
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.day.controllers.knative import KnativeSettings
from planner.errors import InputError
from planner.fleet import Fleet
from planner.manifests import engine_command, kubernetes

FILE = "kserve-knative.yaml"
PREFIX = "autoscaling.knative.dev"
DEFAULTS = KnativeSettings()  # Knative's own defaults.
TIMEOUT_S = 600  # Knative's default configuration lets no service allow longer requests.
FEATURES = ("nodeselector", "tolerations", "affinity")  # Parts of a pod that Knative refuses until enabled.
PROBE_S = 5  # Seconds between two readiness probes.


def write_services(
    targets: Sequence[ScaleTarget], autoscaler: Autoscaler, fleet: Fleet, max_model_len: int
) -> WrittenManifests:
    """The services. InputError for prefill and decode pools: Knative cannot send a request to one of each."""
    if any(target.pool.role != "mixed" for target in targets):
        raise InputError(
            f"{autoscaler.controller}: Knative's services know no pairs of prefill and decode workers; take "
            "keda or hpa"
        )
    engine_command.refuse_several_nodes(fleet, "kserve")
    engine_command.refuse_offload(fleet, "kserve")
    services = [
        _service(target, autoscaler.of_role(target.pool.role), fleet, max_model_len) for target in targets
    ]
    patch = ", ".join(f'"kubernetes.podspec-{name}": "enabled"' for name in FEATURES)
    steps = (
        f"    {kubernetes.SECRET}",
        "    kubectl patch configmap/config-features -n knative-serving --type merge "
        f"-p '{{\"data\": {{{patch}}}}}'",
        f"    kubectl apply -f {FILE}",
    )
    return WrittenManifests({FILE: services}, steps, _limit_lines(autoscaler.settings))


def _service(target: ScaleTarget, autoscaler: Autoscaler, fleet: Fleet, max_model_len: int) -> Document:
    """The InferenceService of one pool; `autoscaler` has the parameters of the pool's role."""
    pool, scaled = target.pool, target.scaled
    args = kubernetes.escape_variables(
        [*engine_command.engine_args(pool, fleet, max_model_len), "--port", str(engine_command.HTTP_PORT)]
    )
    container = {
        "name": "kserve-container",
        "image": engine_command.engine_image(pool.type),
        "command": ["vllm", "serve"],
        "args": args,
        "env": kubernetes.worker_environment(fleet, pool),
        "ports": [{"containerPort": engine_command.HTTP_PORT, "protocol": "TCP"}],
        "resources": kubernetes.gpu_resources(pool),
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": engine_command.HTTP_PORT},
            "periodSeconds": PROBE_S,
        },
        "volumeMounts": [kubernetes.SHM_MOUNT],
    }
    settings: KnativeSettings = autoscaler.settings
    target_requests = settings.target  # Requests in flight per worker.
    annotations = _annotations(settings, scaled.size)
    predictor: Document = {
        "minReplicas": scaled.least,
        "maxReplicas": scaled.most,
        "scaleMetric": "concurrency",
    }
    if target_requests == int(target_requests):
        predictor["scaleTarget"] = int(target_requests)
    else:  # KServe's field takes only whole numbers, Knative's annotation takes any.
        annotations[f"{PREFIX}/target"] = f"{target_requests:.12g}"
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": target.name, "annotations": {"serving.kserve.io/deploymentMode": "Knative"}},
        "spec": {
            "predictor": {
                **predictor,
                "timeout": TIMEOUT_S,
                "annotations": annotations,
                **kubernetes.node_affinity(fleet, pool),
                "containers": [container],
                "volumes": [kubernetes.shared_memory(fleet, pool)],
            }
        },
    }


def _annotations(settings: KnativeSettings, size: int) -> Document:
    """Knative's settings of one service that starts with `size` workers."""
    return {
        f"{PREFIX}/class": "kpa.autoscaling.knative.dev",
        f"{PREFIX}/metric": "concurrency",
        f"{PREFIX}/target-utilization-percentage": f"{100 * settings.utilization_frac:.6g}",
        f"{PREFIX}/window": f"{math.ceil(settings.window_s)}s",
        f"{PREFIX}/panic-window-percentage": f"{100 * settings.panic_window_frac:.6g}",
        f"{PREFIX}/panic-threshold-percentage": f"{100 * settings.panic_threshold_frac:.6g}",
        f"{PREFIX}/scale-down-delay": f"{math.ceil(settings.down_delay_s)}s",
        f"{PREFIX}/initial-scale": str(max(size, 1)),
        "serving.knative.dev/progress-deadline": f"{engine_command.START_S}s",
    }


def _limit_lines(settings: KnativeSettings) -> tuple[str, ...]:
    """Lines for README.md: how Knative differs from the plan, and settings that no manifest here can set."""
    cluster_settings = {  # Knative has these for a whole cluster: value, default and unit.
        "max-scale-up-rate": (settings.max_up_rate, DEFAULTS.max_up_rate, ""),
        "max-scale-down-rate": (settings.max_down_rate, DEFAULTS.max_down_rate, ""),
        "scale-to-zero-grace-period": (settings.grace_s, DEFAULTS.grace_s, "s"),
    }
    changed = [
        f"{key}: {value:g}{unit}"
        for key, (value, default, unit) in cluster_settings.items()
        if value != default
    ]
    limit_lines = [
        "It stands in the place of kserve.yaml. Knative routes by its own rule, each service "
        "with an address of its own; the plan's routing is not kept.",
        f"Requests longer than {TIMEOUT_S} s need a larger max-revision-timeout-seconds in config-defaults, "
        "and `timeout` here.",
        "Every request in flight counts, wherever it waits; nothing is known of KV blocks or of lengths.",
    ]
    if changed:
        limit_lines.append(
            f"For all of the cluster, in config-autoscaler: {', '.join(changed)}. No service says so itself."
        )
    if settings.every_s != DEFAULTS.every_s:
        limit_lines.append(
            f"Knative decides every {DEFAULTS.every_s:g} s; the plan was made with another interval."
        )
    return tuple(limit_lines)
