"""PromQL queries for vLLM's metrics per pool, and objects that bring these into Kubernetes' API of metrics.

A PodMonitor per pool puts the label `fleetplan_pool` on the series of its workers. vLLM (0.32, v1/metrics)
exports gauges of the requests that wait and run and of the share of KV blocks in use, and counters of
finished requests. It does not count arrivals, so the rate of arrivals is the rate of ends plus the growth of
the requests in flight.

Recording rules (recording_rules.py, by_load.py) also take their labels from here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.day.autoscaling.autoscaler import Document
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.day.controllers import scaler_metrics
from planner.manifests import monitoring

POOL, LLM = "fleetplan_pool", "fleetplan_llm"  # Labels of series.
# The address of the chart kube-prometheus-stack, released as `prometheus` in the namespace `monitoring`.
HOST = "http://prometheus-kube-prometheus-prometheus.monitoring.svc.cluster.local"
PORT = 9090
ADDRESS = f"{HOST}:{PORT}"
ADAPTER_FILE, MONITORS_FILE, RULES_FILE = (
    "prometheus-adapter.values.yaml",
    "pod-monitors.yaml",
    "prometheus-rules.yaml",
)
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
ENDED = "vllm:request_success_total"
PROMPT_TOKENS, OUTPUT_TOKENS = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
FIRST_TOKENS = "vllm:time_to_first_token_seconds_count"  # Rises with PROMPT_TOKENS, by one per prompt.
RATE_S = 60  # Rates are means over a minute, which holds several scrapes.
# Set by hand: a rule has a term for each of its edges, and Prometheus reads the whole expression each time.
MOST_STEPS = 200


@dataclass(frozen=True, slots=True)
class PrometheusMetric:
    """A metric with its `name` in Kubernetes' API, and the `series` that vLLM exports. `over_ranks` is
    PromQL's operator over the data-parallel ranks of a pod.
    """

    name: str
    series: tuple[str, ...]
    over_ranks: str = "sum"


_NAMES = {"concurrency": "vllm_requests_in_flight"}  # Names of metrics that are sums of several series.
METRICS = {
    row.name: PrometheusMetric(
        name=_NAMES.get(row.name, row.exported[0].replace(":", "_")),
        series=row.exported,
        over_ranks="avg" if row.is_share else "sum",
    )
    for row in scaler_metrics.METRICS.values()
}


def instant_vector(series: Sequence[str], matchers: str) -> str:
    """PromQL that selects the latest values of one or several series (an instant vector)."""
    if len(series) == 1:
        return f"{series[0]}{{{matchers}}}"
    return f'{{__name__=~"{"|".join(series)}",{matchers}}}'


def sum_over_pool(pool_metric: PrometheusMetric, target: ScaleTarget) -> str:
    """PromQL of the metric's sum over the workers of a pool; without a value while the pool is empty."""
    vector = instant_vector(pool_metric.series, _pool_matcher(target.name))
    return (
        f"sum({vector})"
        if pool_metric.over_ranks == "sum"
        else f"sum({pool_metric.over_ranks} by (pod) ({vector}))"
    )


def arrivals_rps(pools: Sequence[str]) -> str:
    """PromQL of the requests that arrive at these pools per second, over the last minute."""
    matcher = _pool_matcher(*pools)
    in_flight = f"sum({instant_vector((_RUNNING, _WAITING), matcher)})"
    in_flight_before = f"sum({instant_vector((_RUNNING, _WAITING), matcher)} offset {RATE_S}s)"
    ended_rps = f"sum(rate({ENDED}{{{matcher}}}[{RATE_S}s]))"
    return f"clamp_min({ended_rps} + ({in_flight} - {in_flight_before}) / {RATE_S}, 0)"


def per_s(counter: str, pools: Sequence[str], range_s: int) -> str:
    """PromQL of the rise of a counter per second, summed over these pools, over the last `range_s`."""
    return f"sum(rate({counter}{{{_pool_matcher(*pools)}}}[{range_s}s]))"


def waiting_beyond_one(pools: Sequence[str]) -> str:
    """PromQL of the prompts that wait at these pools, less one per worker (as in controllers/planned.py)."""
    waiting = f"{_WAITING}{{{_pool_matcher(*pools)}}}"
    return f"sum({waiting}) - count(count by (pod) ({waiting}))"


def _pool_matcher(*pools: str) -> str:
    """The label matcher of these pools, whose names are RFC 1123 labels and need no escapes."""
    return f'{POOL}="{pools[0]}"' if len(pools) == 1 else f'{POOL}=~"{"|".join(pools)}"'


def pod_monitor(target: ScaleTarget) -> Document:
    """A PodMonitor (monitoring.coreos.com/v1) of one pool."""
    endpoint: Document = {"relabelings": [{"targetLabel": POOL, "replacement": target.name}]}
    if target.scheme == "https":  # The service signed its certificate itself.
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    return monitoring.pod_monitor(target.name, {"matchLabels": dict(target.pods)}, target.port, **endpoint)


def adapter_rule(pod_metric: PrometheusMetric) -> Document:
    """The rule by which prometheus-adapter serves the metric per pod."""
    matchers = "<<.LabelMatchers>>"
    return {
        "seriesQuery": f'{pod_metric.series[0]}{{{POOL}!="",namespace!="",pod!=""}}',
        "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
        "name": {"matches": "", "as": pod_metric.name},
        "metricsQuery": f"{pod_metric.over_ranks}({instant_vector(pod_metric.series, matchers)}) by "
        "(<<.GroupBy>>)",
    }


def adapter_values(*, custom: Sequence[Document] = (), external: Sequence[Document] = ()) -> Document:
    """Values of the chart prometheus-adapter."""
    rules: Document = {"default": False}
    rules |= {"custom": list(custom)} if custom else {}
    rules |= {"external": list(external)} if external else {}
    return {"prometheus": {"url": HOST, "port": PORT}, "rules": rules}


def monitors_step() -> tuple[str, ...]:
    """The command that makes Prometheus scrape the workers."""
    return (f"    kubectl apply -f {MONITORS_FILE}   # the Prometheus operator's PodMonitors",)


def monitors_limits() -> tuple[str, ...]:
    """Lines for README.md: what autoscalers that read these metrics assume of Prometheus."""
    return (
        f"Metrics are read every {monitoring.SCRAPE_S} s by a Prometheus that looks at PodMonitors "
        "everywhere: kube-prometheus-stack does with "
        "`prometheus.prometheusSpec.podMonitorSelectorNilUsesHelmValues=false` (and `rule` for `podMonitor` "
        f"where there are rules). Its address is taken to be {ADDRESS}: change it where yours is another.",
        f"Queries know pools by the label {POOL} alone, in every namespace that this Prometheus looks at: "
        "where two namespaces have the same LLM, add `namespace` to the queries.",
    )


def recording_rule(name: str, expr: str, labels: dict[str, str]) -> Document:
    """One Prometheus recording rule: its name, its expression and its labels."""
    return {"record": name, "expr": expr, "labels": labels}


def llm_series(name: str, app: str) -> str:
    """The instant vector of a record of the whole LLM."""
    return f'{name}{{{LLM}="{app}"}}'


def pool_series(name: str, app: str, target: ScaleTarget) -> str:
    """The instant vector of a record of one pool."""
    return f'{name}{{{LLM}="{app}",{POOL}="{target.name}"}}'
