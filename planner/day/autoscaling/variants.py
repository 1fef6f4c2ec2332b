"""llm-d's workload-variant-autoscaler: a VariantAutoscaling per pool, and the HPA that follows it.

llm-d/llm-d-workload-variant-autoscaler at b08b1c7 (v0.5.1), charts/workload-variant-autoscaler: crds (llmd.ai
v1alpha1: what to scale, the model, the cost of a replica), values.yaml (thresholds, HPA);
internal/constants/metrics.go (what was `inferno_desired_replicas` is `wva_desired_replicas` now).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.day.autoscaling import hpa_object, keda_object, prometheus_queries
from planner.day.autoscaling.autoscaler import Autoscaler, Document, WrittenManifests
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.errors import InputError
from planner.fleet import Fleet
from planner.manifests import engine_command

VERSION = "v0.5.1"
FILE, VALUES_FILE = "variant-autoscalings.yaml", "workload-variant-autoscaler.values.yaml"
DESIRED = "wva_desired_replicas"
REPOSITORY = "https://github.com/llm-d/llm-d-workload-variant-autoscaler"
KV_THRESHOLD, KV_SPARE, QUEUE_THRESHOLD, QUEUE_SPARE = 0.8, 0.1, 5.0, 3.0
EVERY_S = 60
HPA_RULES: dict[str, float] = {  # of the chart's own HPA
    "up_window_s": 240,
    "up_pods": 10,
    "up_percent": 0,
    "up_period_s": 150,
    "down_window_s": 240,
    "down_pods": 10,
    "down_percent": 0,
    "down_period_s": 150,
}


def write_variants(places: Sequence[ScaleTarget], autoscaler: Autoscaler, fleet: Fleet) -> WrittenManifests:
    """VariantAutoscalings, HPAs behind them, the adapter's rule and the controller's own settings."""
    hpa_object.refuse_zero(autoscaler, "take cron, or least 1")
    model = engine_command.plain_name(fleet, autoscaler.controller)
    files: dict[str, list[Document]] = {
        prometheus_queries.MONITORS_FILE: [prometheus_queries.pod_monitor(place) for place in places],
        prometheus_queries.ADAPTER_FILE: [prometheus_queries.adapter_values(external=[_rule()])],
        VALUES_FILE: [chart_values(autoscaler)],
        FILE: [_variant(place, model) for place in places],
        hpa_object.FILE: [
            hpa_object.hpa_document(place, keda_object.with_defaults(autoscaler, HPA_RULES), _source(place))
            for place in places
        ],
    }
    steps = (
        *prometheus_queries.monitors_step(),
        hpa_object.adapter_step(),
        *controller_steps(),
        f"    kubectl apply -f {FILE} -f {hpa_object.FILE}",
    )
    return WrittenManifests(files, steps, (*prometheus_queries.monitors_limits(), *limit_lines()))


def controller_steps() -> tuple[str, ...]:
    """How the controller itself comes to the cluster."""
    return (
        f"    git clone --depth 1 -b {VERSION} {REPOSITORY}",
        "    helm upgrade --install workload-variant-autoscaler llm-d-workload-variant-autoscaler/charts/"
        f"workload-variant-autoscaler -f {VALUES_FILE}   # into the namespace of the workers",
    )


def limit_lines() -> tuple[str, ...]:
    """What the Workload Variant Autoscaler does not do, a line of Markdown each."""
    return (
        "Nothing in it tells prefill from decode workers: it takes all variants of a model for alternatives "
        "and weighs pairs as if either could take the other's requests.",
        f"It decides every {EVERY_S} s and adds or takes one worker at a time, from the cheapest variant on.",
    )


def chart_values(autoscaler: Autoscaler) -> Document:
    """Of the chart workload-variant-autoscaler, without its example of a variant."""
    thresholds: Document = {
        "kvCacheThreshold": _share(autoscaler, "kv_threshold_frac", KV_THRESHOLD),
        "queueLengthThreshold": _count(autoscaler, "queue_threshold", QUEUE_THRESHOLD),
        "kvSpareTrigger": _share(autoscaler, "kv_spare_frac", KV_SPARE),
        "queueSpareTrigger": _count(autoscaler, "queue_spare", QUEUE_SPARE),
    }
    return {
        "wva": {
            "image": {"tag": VERSION},
            "reconcileInterval": f"{autoscaler.read_seconds('optimize_s', EVERY_S, least=1, most=3600)}s",
            "prometheus": {"monitoringNamespace": "monitoring", "baseURL": prometheus_queries.ADDRESS},
            "capacityScaling": {"default": thresholds},
        },
        "va": {"enabled": False},
        "hpa": {"enabled": False},
        "vllmService": {"enabled": False},
    }


def worker_cost_text(place: ScaleTarget) -> str:
    """Of one worker in USD/h, as the CRD's pattern wants it."""
    return f"{place.pool.type.price_usd_per_h:.2f}"


def _share(autoscaler: Autoscaler, name: str, default: float) -> float:
    value = autoscaler.read_number(name, default)
    if not 0 <= value <= 1:
        raise InputError(f"{autoscaler.controller}: {name}: {value:g}, must be 0 to 1")
    return value


def _count(autoscaler: Autoscaler, name: str, default: float) -> int:
    value = autoscaler.read_number(name, default)
    if value < 0 or value != int(value):
        raise InputError(f"{autoscaler.controller}: {name}: {value:g}, must be whole and >= 0")
    return int(value)


def _variant(place: ScaleTarget, model: str) -> Document:
    return {
        "apiVersion": "llmd.ai/v1alpha1",
        "kind": "VariantAutoscaling",
        "metadata": {"name": place.name},
        "spec": {"scaleTargetRef": place.reference, "modelID": model, "variantCost": worker_cost_text(place)},
    }


def _source(place: ScaleTarget) -> Document:
    return {
        "type": "External",
        "external": {
            "metric": {"name": DESIRED, "selector": {"matchLabels": {"variant_name": place.name}}},
            "target": {"type": "AverageValue", "averageValue": "1"},
        },
    }


def _rule() -> Document:
    return {
        "seriesQuery": f'{DESIRED}{{variant_name!="",exported_namespace!=""}}',
        "resources": {"overrides": {"exported_namespace": {"resource": "namespace"}}},
        "name": {"matches": f"^{DESIRED}$", "as": DESIRED},
        "metricsQuery": f"{DESIRED}{{<<.LabelMatchers>>}}",
    }


def kserve_scaling(place: ScaleTarget, autoscaler: Autoscaler) -> Document:
    """`scaling` of a workload of an LLMInferenceService (KServe 0.21), whose controller makes the rest."""
    hpa_object.refuse_zero(autoscaler, "take cron, or least 1")
    rules = hpa_object.scaling_behavior(
        keda_object.with_defaults(autoscaler, HPA_RULES), most=place.scaled.most
    )
    return {
        "minReplicas": place.scaled.least,
        "maxReplicas": place.scaled.most,
        "wva": {"variantCost": worker_cost_text(place), "hpa": {"behavior": rules}},
    }


def write_kserve(places: Sequence[ScaleTarget], autoscaler: Autoscaler) -> WrittenManifests:
    """What stands beside LLMInferenceServices that say `scaling` themselves."""
    files = {
        prometheus_queries.ADAPTER_FILE: [prometheus_queries.adapter_values(external=[_rule()])],
        VALUES_FILE: [chart_values(autoscaler)],
    }
    return WrittenManifests(
        files,
        (hpa_object.adapter_step(), *controller_steps()),
        (
            *limit_lines(),
            "KServe 0.21 makes VariantAutoscalings and HPAs of `scaling`; later ones are to take KEDA in its "
            "place.",
        ),
    )
