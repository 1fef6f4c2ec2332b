"""Alert rules for Prometheus and a dashboard for Grafana on the metrics of `plan watch --export`; a
PodMonitor and a dashboard on the metrics of vLLM's workers.

Sources: prometheus.io/docs/prometheus/latest/configuration/alerting_rules; Grafana's dashboard JSON model.
"""

import json
from collections.abc import Mapping
from typing import Any

from planner.files.checked_files import to_yaml

RULES_FILE, DASHBOARD_FILE = "fleetplan-rules.yaml", "fleetplan-dashboard.json"
HOLDS, HEADROOM, DRIFTED = "fleetplan_plan_holds", "fleetplan_headroom_traffic_frac", "fleetplan_drifted"
_STALE_S = 3600  # An alert fires if `plan watch` has not run for this long.
_LOW_HEADROOM_FRAC = 0.1  # An alert fires below this headroom, while there is still time to add workers.
SCRAPE_S = 15  # Prometheus reads metrics this often.
MOST_UID = 40  # Most characters of a dashboard's uid in Grafana.
# Both workers of a pair count each request. So first tokens are taken from workers that prefill, outputs from
# workers that decode. Without the label (kustomize.py makes Prometheus add it) all workers match both.
_PREFILLING, _DECODING = 'fleetplan_role!="decode"', 'fleetplan_role!="prefill"'


def watch_files(llm: str) -> dict[str, str]:
    """The files with the alerts and with the dashboard, name -> text."""
    return {
        RULES_FILE: to_yaml(_alert_rules(llm)),
        DASHBOARD_FILE: json.dumps(_watch_dashboard(llm), indent=2) + "\n",
    }


def _alert_rules(llm: str) -> dict[str, Any]:
    """Four alerts: the plan no longer holds, headroom is low, traffic drifted, `plan watch` has not run."""

    def alert_rule(name: str, expression: str, severity: str, text: str, wait: str) -> dict[str, Any]:
        """A rule of Prometheus: `text` is sent once `expression` has been true for the time `wait`."""
        return {
            "alert": name,
            "expr": expression,
            "for": wait,
            "labels": {"severity": severity},
            "annotations": {
                "summary": text,
                "description": f"{llm}: run `plan watch` once for the sentences",
            },
        }

    return {
        "groups": [
            {
                "name": "fleetplan",
                "rules": [
                    alert_rule(
                        "FleetplanPlanBroken", f"{HOLDS} == 0", "critical", "the plan no longer holds", "5m"
                    ),
                    alert_rule(
                        "FleetplanHeadroomLow",
                        f"{HEADROOM} < {_LOW_HEADROOM_FRAC:g}",
                        "warning",
                        "the plan carries {{ $value | humanizePercentage }} more traffic at most",
                        "15m",
                    ),
                    alert_rule(
                        "FleetplanDrifted",
                        f"{DRIFTED} == 1",
                        "warning",
                        "{{ $labels.quantity }} is no longer what was planned",
                        "5m",
                    ),
                    alert_rule(
                        "FleetplanWatchStale",
                        # `absent_over_time`: after `plan watch` has ended, its series have no values.
                        f"time() - fleetplan_watched_timestamp_seconds > {_STALE_S} or "
                        f"absent_over_time(fleetplan_watched_timestamp_seconds[{_STALE_S}s])",
                        "warning",
                        "nothing was watched for an hour",
                        "5m",
                    ),
                ],
            }
        ]
    }


def pod_monitor(name: str, pods: Mapping[str, Any], port: str | int, **more: Any) -> dict[str, Any]:
    """A PodMonitor (monitoring.coreos.com/v1): Prometheus scrapes a port of pods every SCRAPE_S.

    `pods` is the selector of the pods, `port` a name or a number; `more` are further fields of the endpoint.
    """
    endpoint = {
        ("port" if isinstance(port, str) else "portNumber"): port,
        "path": "/metrics",
        "interval": f"{SCRAPE_S}s",
        **more,
    }
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": name},
        "spec": {"selector": dict(pods), "podMetricsEndpoints": [endpoint]},
    }


def serving_dashboard(llm: str, app: str) -> str:
    """A Grafana dashboard, as JSON, of the metrics of an LLM's workers; `app` makes its uid."""
    uid = f"fleetplan-{app}"[:MOST_UID]
    return json.dumps(_dashboard_document(llm, uid, _serving_panels(llm, 0)), indent=2) + "\n"


def _watch_dashboard(llm: str) -> dict[str, Any]:
    """The dashboard of a watched plan: whether it holds, its headroom, its drift, then vLLM's own metrics."""
    panels = [
        _panel_document(0, "stat", "Plan holds", {"holds": f"min({HOLDS})"}, "bool_yes_no"),
        _panel_document(
            1, "timeseries", "Headroom of traffic", {"headroom": f"min({HEADROOM})"}, "percentunit"
        ),
        _panel_document(
            2, "timeseries", "Away from the plan", {"{{quantity}}": "fleetplan_drift_frac"}, "percentunit"
        ),
        _panel_document(
            3,
            "timeseries",
            "Requests/s: live, and until where the plan holds",
            {"live": "min(fleetplan_live_rps)", "holds until": "min(fleetplan_holds_until_rps)"},
            "reqps",
        ),
    ]
    return _dashboard_document(llm, "fleetplan-watch", [*panels, *_serving_panels(llm, len(panels))])


def _serving_panels(llm: str, first: int) -> list[dict[str, Any]]:
    """Panels of vLLM's own metrics of this LLM, numbered from `first` on."""
    own = f"model_name={json.dumps(llm, ensure_ascii=False)}"  # PromQL quotes text as JSON does.
    prefilling, decoding = (f"{{{own},{role}}}[$__rate_interval]" for role in (_PREFILLING, _DECODING))
    lengths = {
        name: f"sum(rate(vllm:request_{part}_tokens_sum{decoding})) / "
        f"sum(rate(vllm:request_{part}_tokens_count{decoding}))"
        for name, part in (("prompt", "prompt"), ("output", "generation"))
    }
    ttft = {
        f"p{percent}": f"histogram_quantile({percent / 100:g}, sum by (le) "
        f"(rate(vllm:time_to_first_token_seconds_bucket{prefilling})))"
        for percent in (50, 95, 99)
    }
    requests = {name: f"sum(vllm:num_requests_{name}{{{own}}})" for name in ("running", "waiting")}
    rows: tuple[tuple[str, dict[str, str], str], ...] = (
        ("Mean lengths", lengths, "short"),
        ("TTFT", ttft, "s"),
        ("Running and waiting", requests, "short"),
        ("KV cache in use", {"mean": f"avg(vllm:kv_cache_usage_perc{{{own}}})"}, "percentunit"),
    )
    return [
        _panel_document(number, "timeseries", title, queries, unit)
        for number, (title, queries, unit) in enumerate(rows, start=first)
    ]


def _dashboard_document(llm: str, uid: str, panels: list[dict[str, Any]]) -> dict[str, Any]:
    """A dashboard in Grafana's JSON model; its variable `source` selects the Prometheus server."""
    return {
        "title": f"fleetplan: {llm}",
        "uid": uid,
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "tags": ["fleetplan", "vllm"],
        "time": {"from": "now-24h", "to": "now"},
        "refresh": "1m",
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel_document(
    number: int, kind: str, title: str, queries: Mapping[str, str], unit: str
) -> dict[str, Any]:
    """Panel `number`, counted from 0 in rows of two (Grafana's grid is 24 units wide); `queries` are PromQL
    by legend.
    """
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number + 1,
        "type": kind,
        "title": title,
        "datasource": source,
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {},
        "targets": [
            {"refId": chr(ord("A") + k), "datasource": source, "expr": expression, "legendFormat": legend}
            for k, (legend, expression) in enumerate(queries.items())
        ],
    }
