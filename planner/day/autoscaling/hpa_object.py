"""Manifests of a HorizontalPodAutoscaler (autoscaling/v2) per pool, which scales by a metric of the pool's
pods that prometheus-adapter gives Kubernetes.

Fields and their ranges: Kubernetes' API, k8s.io/api/autoscaling/v2. `tolerance` came with 1.33 behind the
gate HPAConfigurableTolerance, which is on from 1.35.
"""

import math
from collections.abc import Sequence

from planner.day.autoscaling import prometheus_queries
from planner.day.autoscaling.autoscaler import Autoscaler, Document, WrittenManifests
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.day.controllers.hpa import HpaSettings, ScalingRules
from planner.errors import InputError

FILE = "horizontal-pod-autoscalers.yaml"
DEFAULTS = ScalingRules()  # The defaults of Kubernetes' API and of kube-controller-manager.
NO_METRIC_AT_ZERO = "a pool without workers exports no metric, so that nothing would start it again"


def write_hpas(targets: Sequence[ScaleTarget], autoscaler: Autoscaler) -> WrittenManifests:
    """The HPAs, the PodMonitors that let Prometheus scrape the pods, and the rules by which
    prometheus-adapter makes metrics of Kubernetes of the scraped series.
    """
    refuse_zero(autoscaler, "take cron, or least 1")
    metrics = dict.fromkeys(autoscaler.of_role(target.pool.role).settings.metric for target in targets)
    rules = [prometheus_queries.adapter_rule(prometheus_queries.METRICS[name]) for name in metrics]
    files = {
        prometheus_queries.MONITORS_FILE: [prometheus_queries.pod_monitor(target) for target in targets],
        prometheus_queries.ADAPTER_FILE: [prometheus_queries.adapter_values(custom=rules)],
        FILE: [_pods_hpa(target, autoscaler.of_role(target.pool.role)) for target in targets],
    }
    steps = (*prometheus_queries.monitors_step(), adapter_step(), f"    kubectl apply -f {FILE}")
    return WrittenManifests(files, steps, (*prometheus_queries.monitors_limits(), *limit_lines(autoscaler)))


def _pods_hpa(target: ScaleTarget, autoscaler: Autoscaler) -> Document:
    """The HPA that keeps the mean of the metric over the pool's pods at its target per worker."""
    settings: HpaSettings = autoscaler.settings
    thousandths = round(settings.per_worker * 1000)  # Kubernetes writes quantities whole or as 1500m.
    average_value = f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)
    source: Document = {
        "type": "Pods",
        "pods": {
            "metric": {"name": prometheus_queries.METRICS[settings.metric].name},
            "target": {"type": "AverageValue", "averageValue": average_value},
        },
    }
    return hpa_document(target, autoscaler, source)


def adapter_step() -> str:
    """The command that installs prometheus-adapter with our rules."""
    return (
        "    helm upgrade --install prometheus-adapter prometheus-community/prometheus-adapter "
        f"-n monitoring -f {prometheus_queries.ADAPTER_FILE}"
    )


def refuse_zero(autoscaler: Autoscaler, instead: str) -> None:
    """Raise InputError if a pool may be empty, and so without metrics; `instead` says what to do."""
    if empty := [pool.name for pool in autoscaler.pools if pool.least == 0]:
        raise InputError(
            f"{autoscaler.controller}: pool {empty[0]!r}: least is 0: {NO_METRIC_AT_ZERO}; {instead}"
        )


def hpa_document(target: ScaleTarget, autoscaler: Autoscaler, source: Document) -> Document:
    """The HPA of one pool. It follows one metric, `source`, which is an entry of `spec.metrics`."""
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": target.name},
        "spec": {
            "scaleTargetRef": target.reference,
            "minReplicas": target.scaled.least,
            "maxReplicas": target.scaled.most,
            "metrics": [source],
            "behavior": scaling_behavior(autoscaler, most=target.scaled.most),
        },
    }


def scaling_behavior(autoscaler: Autoscaler, *, most: int) -> Document:
    """How fast the HPA may scale. With 0 pods and 0 percent all of `most` may come or go at once."""
    settings: ScalingRules = autoscaler.settings
    rules: Document = {}
    for key, direction in (("scaleUp", "up"), ("scaleDown", "down")):
        period_s = math.ceil(getattr(settings, f"{direction}_period_s"))
        names = {"Pods": f"{direction}_pods", "Percent": f"{direction}_percent"}
        limits = {kind: read_whole(autoscaler, name) for kind, name in names.items()}
        rates = {kind: value for kind, value in limits.items() if value} or {"Pods": most}
        rules[key] = {
            "stabilizationWindowSeconds": math.ceil(getattr(settings, f"{direction}_window_s")),
            "selectPolicy": "Max",
            "policies": [{"type": kind, "value": n, "periodSeconds": period_s} for kind, n in rates.items()],
        }
    # An older cluster refuses the field, so it is written only where it differs from the default.
    if settings.tolerance_frac != DEFAULTS.tolerance_frac:
        for rule in rules.values():
            rule["tolerance"] = f"{settings.tolerance_frac:g}"
    return rules


def read_whole(autoscaler: Autoscaler, name: str) -> int:
    """A setting of the autoscaler that must be whole. Raises InputError otherwise."""
    value: float = getattr(autoscaler.settings, name)
    if value != int(value):
        raise InputError(f"{autoscaler.controller}: {name}: {value:g}, must be whole and >= 0")
    return int(value)


def limit_lines(autoscaler: Autoscaler) -> tuple[str, ...]:
    """Where a real HPA differs from the simulated one (controllers/hpa.py), a line of Markdown each."""
    settings, lines = autoscaler.settings, []
    if (sync_s := settings.every_s) != DEFAULTS.every_s:
        lines.append(
            f"The plan decides every {sync_s:g} s: that is kube-controller-manager's "
            "`--horizontal-pod-autoscaler-sync-period`, for all HPAs of the cluster at once."
        )
    if settings.tolerance_frac != DEFAULTS.tolerance_frac:
        lines.append("`tolerance` needs Kubernetes 1.35, or 1.33 with the gate HPAConfigurableTolerance.")
    lines.append(
        "It counts workers that are not ready as if they had nothing to do while it scales up, and knows "
        "nothing of the time a worker takes to start."
    )
    return tuple(lines)
