"""Manifests of a HorizontalPodAutoscaler (autoscaling/v2) per pool, which scales by a metric of the pool's
pods that prometheus-adapter gives Kubernetes.

Fields and their ranges: Kubernetes' API, k8s.io/api/autoscaling/v2. `tolerance` came with 1.33 behind the
gate HPAConfigurableTolerance, which is on from 1.35.
"""

from collections.abc import Sequence

from planner.day.autoscaling import prometheus_queries
from planner.day.autoscaling.autoscaler import Autoscaler, Document, WrittenManifests, format_quantity
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.day.controllers.hpa import ScalingRules
from planner.errors import InputError

FILE = "horizontal-pod-autoscalers.yaml"
DEFAULTS = ScalingRules()  # The defaults of Kubernetes' API and of kube-controller-manager.
MOST_WINDOW_S, MOST_PERIOD_S = 3600, 1800  # The largest values that Kubernetes' API accepts in `behavior`.
NO_METRIC_AT_ZERO = "a pool without workers exports no metric, so that nothing would start it again"


def write_hpas(targets: Sequence[ScaleTarget], autoscaler: Autoscaler) -> WrittenManifests:
    """The HPAs, the PodMonitors that let Prometheus scrape the pods, and the rules by which
    prometheus-adapter makes metrics of Kubernetes of the scraped series.
    """
    refuse_zero(autoscaler, "take cron, or least 1")
    metric_by_target = {
        target.name: prometheus_queries.find_metric(autoscaler.of_role(target.pool.role))
        for target in targets
    }
    rules = [prometheus_queries.adapter_rule(each) for each in dict.fromkeys(metric_by_target.values())]
    files = {
        prometheus_queries.MONITORS_FILE: [prometheus_queries.pod_monitor(target) for target in targets],
        prometheus_queries.ADAPTER_FILE: [prometheus_queries.adapter_values(custom=rules)],
        FILE: [_pods_hpa(target, autoscaler, metric_by_target[target.name]) for target in targets],
    }
    steps = (*prometheus_queries.monitors_step(), adapter_step(), f"    kubectl apply -f {FILE}")
    return WrittenManifests(files, steps, (*prometheus_queries.monitors_limits(), *limit_lines(autoscaler)))


def _pods_hpa(
    target: ScaleTarget, autoscaler: Autoscaler, pod_metric: prometheus_queries.PrometheusMetric
) -> Document:
    """The HPA that keeps the mean of this metric over the pool's pods at the autoscaler's `target`."""
    role_scaler = autoscaler.of_role(target.pool.role)
    value = role_scaler.read_number("target", pod_metric.usual)
    average_value = format_quantity(value, f"{role_scaler.controller}: target")
    source: Document = {
        "type": "Pods",
        "pods": {
            "metric": {"name": pod_metric.name},
            "target": {"type": "AverageValue", "averageValue": average_value},
        },
    }
    return hpa_document(target, role_scaler, source)


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
    """How fast the HPA may scale up and down.

    Parameters that the autoscaler lacks are written with Kubernetes' defaults. 0 pods and 0 percent are no
    limit: all of `most` may come or go at once.
    """
    rules: Document = {}
    for direction in ("up", "down"):
        period, window = f"{direction}_period_s", f"{direction}_window_s"
        period_s = autoscaler.read_seconds(period, getattr(DEFAULTS, period), least=1, most=MOST_PERIOD_S)
        window_s = autoscaler.read_seconds(window, getattr(DEFAULTS, window), least=0, most=MOST_WINDOW_S)
        names = {"Pods": f"{direction}_pods", "Percent": f"{direction}_percent"}
        limits = {kind: read_whole(autoscaler, name, getattr(DEFAULTS, name)) for kind, name in names.items()}
        rates = {kind: value for kind, value in limits.items() if value} or {"Pods": most}
        rules["scaleUp" if direction == "up" else "scaleDown"] = {
            "stabilizationWindowSeconds": window_s,
            "selectPolicy": "Max",
            "policies": [{"type": kind, "value": n, "periodSeconds": period_s} for kind, n in rates.items()],
        }
    # An older cluster refuses the field, so it is written only where it differs from the default.
    tolerance_frac = autoscaler.read_number("tolerance_frac", DEFAULTS.tolerance_frac)
    if tolerance_frac != DEFAULTS.tolerance_frac:
        if tolerance_frac < 0:
            raise InputError(f"{autoscaler.controller}: tolerance: {tolerance_frac:g}, must be >= 0")
        for rule in rules.values():
            rule["tolerance"] = f"{tolerance_frac:g}"
    return rules


def read_whole(autoscaler: Autoscaler, name: str, default: float) -> int:
    """A parameter of the autoscaler that must be whole. Raises InputError otherwise."""
    value = autoscaler.read_number(name, default)
    if value < 0 or value != int(value):
        raise InputError(f"{autoscaler.controller}: {name}: {value:g}, must be whole and >= 0")
    return int(value)


def limit_lines(autoscaler: Autoscaler) -> tuple[str, ...]:
    """Where a real HPA differs from the simulated one (controllers/hpa.py), a line of Markdown each."""
    lines = []
    if (sync_s := autoscaler.read_number("every_s", DEFAULTS.every_s)) != DEFAULTS.every_s:
        lines.append(
            f"The plan decides every {sync_s:g} s: that is kube-controller-manager's "
            "`--horizontal-pod-autoscaler-sync-period`, for all HPAs of the cluster at once."
        )
    if autoscaler.read_number("tolerance_frac", DEFAULTS.tolerance_frac) != DEFAULTS.tolerance_frac:
        lines.append("`tolerance` needs Kubernetes 1.35, or 1.33 with the gate HPAConfigurableTolerance.")
    lines.append(
        "It counts workers that are not ready as if they had nothing to do while it scales up, and knows "
        "nothing of the time a worker takes to start."
    )
    return tuple(lines)
