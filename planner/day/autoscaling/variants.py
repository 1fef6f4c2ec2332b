"""llm-d's workload-variant-autoscaler: a VariantAutoscaling per pool, and the HPA that follows it.

Sources in llm-d/llm-d-workload-variant-autoscaler at b08b1c7 (v0.5.1):
charts/workload-variant-autoscaler: its crds (llmd.ai v1alpha1: what to scale, the model, the cost of a
replica) and values.yaml (thresholds, HPA); internal/constants/metrics.go (`wva_desired_replicas`, which
replaced `inferno_desired_replicas`); internal/engines/saturation/engine.go (a variant without ACCELERATOR
gets no decision) and internal/utils/tls.go (an address of Prometheus that is not https ends the autoscaler).
"""

from collections.abc import Sequence

from planner.day.autoscaling import hpa_object, prometheus_queries
from planner.day.autoscaling.autoscaler import Autoscaler, Document, WrittenManifests
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.day.controllers.wva import WvaSettings
from planner.fleet import Fleet
from planner.manifests import engine_command

VERSION = "v0.5.1"
FILE, VALUES_FILE = "variant-autoscalings.yaml", "workload-variant-autoscaler.values.yaml"
DESIRED = "wva_desired_replicas"  # The autoscaler's metric: how many replicas a variant should have.
ACCELERATOR = "inference.optimization/acceleratorName"
OWN_INTERVAL_S = WvaSettings().optimize_s  # The autoscaler of this version decides this often.
REPOSITORY = "https://github.com/llm-d/llm-d-workload-variant-autoscaler"


def write_variants(targets: Sequence[ScaleTarget], autoscaler: Autoscaler, fleet: Fleet) -> WrittenManifests:
    """The VariantAutoscalings, their HPAs, prometheus-adapter's rule, and values for the chart."""
    hpa_object.refuse_zero(autoscaler, "take cron, or least 1")
    model = engine_command.plain_name(fleet, autoscaler.controller)
    files: dict[str, list[Document]] = {
        prometheus_queries.MONITORS_FILE: [prometheus_queries.pod_monitor(target) for target in targets],
        prometheus_queries.ADAPTER_FILE: [prometheus_queries.adapter_values(external=[_adapter_rule()])],
        VALUES_FILE: [chart_values(autoscaler)],
        FILE: [_variant_document(target, model) for target in targets],
        hpa_object.FILE: [
            hpa_object.hpa_document(target, autoscaler, _metric_source(target)) for target in targets
        ],
    }
    steps = (
        *prometheus_queries.monitors_step(),
        hpa_object.adapter_step(),
        *controller_steps(),
        f"    kubectl apply -f {FILE} -f {hpa_object.FILE}",
    )
    return WrittenManifests(files, steps, (*prometheus_queries.monitors_limits(), *limit_lines(autoscaler)))


def controller_steps() -> tuple[str, ...]:
    """Instructions that install the autoscaler in the cluster."""
    return (
        f"    git clone --depth 1 -b {VERSION} {REPOSITORY}",
        "    helm upgrade --install workload-variant-autoscaler llm-d-workload-variant-autoscaler/charts/"
        f"workload-variant-autoscaler -f {VALUES_FILE}   # into the namespace of the workers",
    )


def limit_lines(autoscaler: Autoscaler) -> tuple[str, ...]:
    """What the Workload Variant Autoscaler does not do, a line of Markdown each."""
    return (
        "Nothing in it tells prefill from decode workers: it takes all variants of a model for alternatives "
        "and weighs pairs as if either could take the other's requests.",
        f"It decides every {OWN_INTERVAL_S:g} s, whatever `reconcileInterval` says (the plan: every "
        f"{_interval_s(autoscaler)} s), and adds or takes one worker at a time, from the cheapest variant "
        "on. Once it wants a worker more than `maxReplicas` it decides nothing more, until its object is "
        "made anew: leave room there.",
        "It ends where the address of Prometheus is not https: give Prometheus a certificate "
        "(`prometheus.prometheusSpec.web.tlsConfig`) and the adapter its https address, or write a proxy's "
        f"with TLS as `baseURL` into {VALUES_FILE}.",
    )


def chart_values(autoscaler: Autoscaler) -> Document:
    """Values of the chart workload-variant-autoscaler. The chart's example of a VariantAutoscaling, of an HPA
    and of a service of vLLM are off: our manifests take their place.
    """
    settings: WvaSettings = autoscaler.settings
    thresholds: Document = {
        "kvCacheThreshold": settings.kv_threshold_frac,
        "queueLengthThreshold": hpa_object.read_whole(autoscaler, "queue_threshold"),
        "kvSpareTrigger": settings.kv_spare_frac,
        "queueSpareTrigger": hpa_object.read_whole(autoscaler, "queue_spare"),
    }
    return {
        "wva": {
            "image": {"tag": VERSION},
            "reconcileInterval": f"{_interval_s(autoscaler)}s",
            "prometheus": {
                "monitoringNamespace": "monitoring",
                "baseURL": prometheus_queries.ADDRESS.replace("http:", "https:", 1),
            },
            "capacityScaling": {"default": thresholds},
        },
        "va": {"enabled": False},
        "hpa": {"enabled": False},
        "vllmService": {"enabled": False},
    }


def worker_cost_text(target: ScaleTarget) -> str:
    """The price of one worker in USD/h, with the two decimals that the CRD's pattern for a cost has."""
    return f"{target.pool.type.price_usd_per_h:.2f}"


def _interval_s(autoscaler: Autoscaler) -> int:
    """The time between two decisions of the autoscaler."""
    return autoscaler.whole_seconds("optimize_s", autoscaler.settings.optimize_s, least=1, most=3600)


def _variant_document(target: ScaleTarget, model: str) -> Document:
    """The object that names a pool to llm-d's autoscaler: what to scale, its LLM, and a worker's price."""
    return {
        "apiVersion": "llmd.ai/v1alpha1",
        "kind": "VariantAutoscaling",
        "metadata": {
            "name": target.name,
            "labels": {ACCELERATOR: engine_command.dns_label(target.pool.type.gpu.base)},
        },
        "spec": {
            "scaleTargetRef": target.reference,
            "modelID": model,
            "variantCost": worker_cost_text(target),
        },
    }


def _metric_source(target: ScaleTarget) -> Document:
    """The metric of an HPA: how many workers of this pool the autoscaler wants."""
    return {  # With a target of 1 per worker the HPA wants as many workers as the metric says.
        "type": "External",
        "external": {
            "metric": {"name": DESIRED, "selector": {"matchLabels": {"variant_name": target.name}}},
            "target": {"type": "AverageValue", "averageValue": "1"},
        },
    }


def _adapter_rule() -> Document:
    """The rule by which prometheus-adapter serves DESIRED to HPAs."""
    return {
        "seriesQuery": f'{DESIRED}{{variant_name!="",exported_namespace!=""}}',
        "resources": {"overrides": {"exported_namespace": {"resource": "namespace"}}},
        "name": {"matches": f"^{DESIRED}$", "as": DESIRED},
        "metricsQuery": f"{DESIRED}{{<<.LabelMatchers>>}}",
    }


def kserve_scaling(target: ScaleTarget, autoscaler: Autoscaler) -> Document:
    """The key `scaling` of a workload of an LLMInferenceService. KServe 0.21 makes the HPA from it."""
    hpa_object.refuse_zero(autoscaler, "take cron, or least 1")
    rules = hpa_object.scaling_behavior(autoscaler, most=target.scaled.most)
    return {
        "minReplicas": target.scaled.least,
        "maxReplicas": target.scaled.most,
        "wva": {"variantCost": worker_cost_text(target), "hpa": {"behavior": rules}},
    }


def write_kserve(targets: Sequence[ScaleTarget], autoscaler: Autoscaler) -> WrittenManifests:
    """The files that are needed beside LLMInferenceServices with the key `scaling` (`kserve_scaling`)."""
    files = {
        prometheus_queries.ADAPTER_FILE: [prometheus_queries.adapter_values(external=[_adapter_rule()])],
        VALUES_FILE: [chart_values(autoscaler)],
    }
    return WrittenManifests(
        files,
        (hpa_object.adapter_step(), *controller_steps()),
        (
            *limit_lines(autoscaler),
            "KServe 0.21 makes VariantAutoscalings and HPAs of `scaling`; later ones are to use KEDA "
            "instead.",
        ),
    )
