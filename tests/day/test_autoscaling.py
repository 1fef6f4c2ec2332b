"""What runs a controller: numbers by hand, timetables and tables by brute force, objects that fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from autoscalers import CASES, FLEETS, PAIRS, autoscaler, objects, own_files, parameters_for, written
from hostile_names import NAMES, named
from manifest_commands import EXAMPLES, documents
from plans import mixed

from planner import manifests
from planner.day import autoscaling
from planner.day.autoscaling import (
    hpa_object,
    keda_object,
    prometheus_queries,
    recording_rules,
    scalable_pools,
)
from planner.day.controllers import table
from planner.day.controllers.knowledge import CapacityTable, History, Knowledge
from planner.day.controllers.windows import read_windows
from planner.errors import InputError
from planner.fleet import Fleet
from planner.models.engine import Engine
from planner.simulator.elastic import ElasticPool

MIXED = FLEETS["mixed"]
every_case = pytest.mark.parametrize(("fleet", "controller", "target"), CASES)


def of(files: dict[str, str], path: str) -> list[dict[str, Any]]:
    return documents(files[path])


def rendered(
    controller: str, on: str = "kubernetes", fleet: str = "mixed", /, **parameters: Any
) -> dict[str, str]:
    given = FLEETS[fleet]
    told = autoscaler(given, controller, **{**parameters_for(controller, on), **parameters})
    return autoscaling.render(given, 5000, on, told)


@every_case
def test_the_readme_names_every_file_and_who_decides(fleet: str, controller: str, target: str) -> None:
    files = written(fleet, controller, target)
    if controller == "static":
        return
    own = own_files(fleet, target)
    assert f"The controller {controller} decides" in files["README.md"]
    for path in set(files) - set(own):
        assert path in files["README.md"]
    if target != "kserve" or controller != "knative":
        assert set(own) <= set(files)


@every_case
def test_what_is_scaled_is_an_object_that_has_a_scale(fleet: str, controller: str, target: str) -> None:
    """An object of the target's own file, what its controller makes of a role or a component, or what a chart
    names after the release and the pool."""
    files = written(fleet, controller, target)
    found = objects(files)
    have = {(d["kind"], d["metadata"]["name"]) for _, d in found if "kind" in d and "metadata" in d}
    for _, d in found:
        if d.get("kind") == "DisaggregatedSet":
            external = [
                role["name"] for role in d["spec"]["roles"] if role.get("scaling") == {"mode": "External"}
            ]
            have |= {("DisaggregatedSetRoleScaler", f"{d['metadata']['name']}-{name}") for name in external}
        if d.get("kind") == "LLMInferenceService":
            name = d["metadata"]["name"]
            have.add(("Deployment", f"{name}-kserve"))
            have |= {("Deployment", f"{name}-kserve-prefill")} if "prefill" in d["spec"] else set()
        if d.get("kind") == "DynamoGraphDeployment":
            own = [c["name"] for c in d["spec"]["components"] if "scalingAdapter" in c]
            have |= {
                ("DynamoGraphDeploymentScalingAdapter", f"{d['metadata']['name']}-{name}") for name in own
            }
    scaled = [d["spec"]["scaleTargetRef"] for _, d in found if "scaleTargetRef" in d.get("spec", {})]
    if target in ("llm-d", "production-stack"):
        ending = r"-llm-d-modelservice-(prefill|decode)" if target == "llm-d" else "-deployment-vllm"
        assert all(re.fullmatch(rf"llama-3-1-70b-[a-z0-9]+{ending}", each["name"]) for each in scaled)
    else:
        assert {(each["kind"], each["name"]) for each in scaled} <= have
    if controller in ("hpa", "keda", "cron", "fleetplan") and target != "ray-serve":
        assert len({each["name"] for each in scaled}) == len(FLEETS[fleet].pools)


@every_case
def test_a_count_stands_in_one_place(fleet: str, controller: str, target: str) -> None:
    """A Deployment, group or role that another scales has no count of its own, which applying it again would
    set."""
    if controller == "static":
        return
    for path, d in objects(written(fleet, controller, target)):
        if d.get("kind") in ("Deployment", "LeaderWorkerSet") and not d["metadata"]["name"].endswith(
            "router"
        ):
            assert "replicas" not in d["spec"], path
        for role in d["spec"]["roles"] if d.get("kind") == "DisaggregatedSet" else []:
            assert "replicas" not in role["spec"]
        if d.get("kind") == "LLMInferenceService":
            assert "replicas" not in d["spec"] and "replicas" not in d["spec"].get("prefill", {})


@pytest.mark.parametrize("target", ["kubernetes", "lws", "disaggregatedset", "llm-d"])
def test_workers_end_their_requests_before_they_are_killed(target: str) -> None:
    """--shutdown-timeout 90, and Kubernetes waits 30 s longer."""
    pods = re.findall(
        r"terminationGracePeriodSeconds: (\d+)",
        (
            text := "".join(
                text
                for path, text in written("pairs", "hpa", target).items()
                if path.startswith(("llm-d/", target))
            )
        ),
    )
    assert pods.count("120") == 2 and set(pods) <= {"120", "330"}  # The router keeps its own.
    assert len(re.findall(r"- --shutdown-timeout\n\s+- '90'\n", text)) == 2


def test_a_version_without_the_flag_is_scaled_without_it() -> None:
    """--shutdown-timeout came with vLLM 0.18; an older one does not start with it."""
    engine = Engine("vllm", "0.17.1", True)
    pools = tuple(replace(pool, type=replace(pool.type, engine=engine)) for pool in MIXED.pools)
    fleet = replace(MIXED, pools=pools)
    files = autoscaling.render(fleet, 5000, "kubernetes", autoscaler(fleet, "hpa"))
    assert "shutdown-timeout" not in "".join(files.values())
    assert "aborts its requests" in files["README.md"]


@pytest.mark.parametrize("target", ["kubernetes", "lws", "disaggregatedset"])
@pytest.mark.parametrize("fleet", ["two mixed pools", "pairs"])
def test_every_monitor_finds_the_pods_of_one_pool(target: str, fleet: str) -> None:
    """By the labels of pod templates, on a port that they name."""
    if target == "disaggregatedset" and fleet != "pairs":
        return
    files = written(fleet, "hpa", target)
    pods: list[tuple[dict[str, str], list[str]]] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if "labels" in (value.get("metadata") or {}) and "containers" in (value.get("spec") or {}):
                ports = [port["name"] for c in value["spec"]["containers"] for port in c.get("ports", [])]
                pods.append((value["metadata"]["labels"], ports))
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)

    walk(of(files, f"{target}.yaml"))
    monitors = of(files, prometheus_queries.MONITORS_FILE)
    assert len(monitors) == 2
    for monitor in monitors:
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        matched = [(labels, ports) for labels, ports in pods if wanted <= labels.items()]
        assert len(matched) == 1 and endpoint["port"] in matched[0][1]
        assert endpoint["relabelings"] == [
            {"targetLabel": "fleetplan_pool", "replacement": matched[0][0]["app.kubernetes.io/component"]}
        ]


def test_the_pools_of_llm_d_and_kserve_have_a_label_of_their_own() -> None:
    """The chart's labels and KServe's are of the model and the role alone."""
    values = [d for path, d in objects(written("two mixed pools", "hpa", "llm-d")) if "modelArtifacts" in d]
    assert [d["modelArtifacts"]["labels"]["fleetplan/pool"] for d in values] == [
        "llama-3-1-70b-h",
        "llama-3-1-70b-a",
    ]
    (service,) = [
        d for _, d in objects(written("pairs", "hpa", "kserve")) if d.get("kind") == "LLMInferenceService"
    ]
    assert service["spec"]["labels"] == {"fleetplan/pool": "llama-3-1-70b-dec"}
    assert service["spec"]["prefill"]["labels"] == {"fleetplan/pool": "llama-3-1-70b-pre"}


def test_an_hpa_holds_the_numbers_of_the_controller() -> None:
    """70 % of the KV cache is 700m; 0 percent and 3 pods leave one policy; 0 and 0 leave all 9 at once."""
    files = rendered(
        "hpa",
        metric="kv",
        target=0.7,
        up_percent=0,
        up_pods=3,
        up_period_s=60.0,
        up_window_s=30.0,
        down_percent=0,
        down_window_s=599.2,
        tolerance_frac=0.05,
    )
    (found,) = of(files, hpa_object.FILE)
    assert found["spec"]["metrics"] == [
        {
            "type": "Pods",
            "pods": {
                "metric": {"name": "vllm_kv_cache_usage_perc"},
                "target": {"type": "AverageValue", "averageValue": "700m"},
            },
        }
    ]
    assert (found["spec"]["minReplicas"], found["spec"]["maxReplicas"]) == (1, 9)
    up, down = found["spec"]["behavior"]["scaleUp"], found["spec"]["behavior"]["scaleDown"]
    assert up["policies"] == [{"type": "Pods", "value": 3, "periodSeconds": 60}]
    assert down["policies"] == [{"type": "Pods", "value": 9, "periodSeconds": 15}]
    assert (up["stabilizationWindowSeconds"], down["stabilizationWindowSeconds"]) == (30, 600)
    assert up["tolerance"] == down["tolerance"] == "0.05"
    assert "1.35" in files["README.md"]


def test_an_hpa_told_nothing_has_kubernetes_own_rules() -> None:
    """4 pods or 100 % per 15 s up at once; down within 300 s; tolerance left to the cluster."""
    (found,) = of(rendered("hpa"), hpa_object.FILE)
    assert found["spec"]["behavior"] == {
        "scaleUp": {
            "stabilizationWindowSeconds": 0,
            "selectPolicy": "Max",
            "policies": [
                {"type": "Pods", "value": 4, "periodSeconds": 15},
                {"type": "Percent", "value": 100, "periodSeconds": 15},
            ],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": 300,
            "selectPolicy": "Max",
            "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
        },
    }


def test_roles_may_follow_metrics_of_their_own() -> None:
    files = rendered(
        "hpa",
        "kubernetes",
        "pairs",
        by_role={"prefill": {"metric": "queue", "target": 2}, "decode": {"metric": "kv", "target": 0.9}},
    )
    pre, dec = (d["spec"]["metrics"][0]["pods"] for d in of(files, hpa_object.FILE))
    assert (pre["metric"]["name"], pre["target"]["averageValue"]) == ("vllm_num_requests_waiting", "2")
    assert (dec["metric"]["name"], dec["target"]["averageValue"]) == ("vllm_kv_cache_usage_perc", "900m")
    (adapter,) = of(files, prometheus_queries.ADAPTER_FILE)
    assert [rule["name"]["as"] for rule in adapter["rules"]["custom"]] == [
        pre["metric"]["name"],
        dec["metric"]["name"],
    ]


@pytest.mark.parametrize(
    ("metric", "query", "rule"),
    [
        ("queue", "sum(vllm:num_requests_waiting{POOL})", "sum(vllm:num_requests_waiting{L}) by (G)"),
        ("running", "sum(vllm:num_requests_running{POOL})", "sum(vllm:num_requests_running{L}) by (G)"),
        (
            "concurrency",
            'sum({__name__=~"vllm:num_requests_waiting|vllm:num_requests_running",POOL})',
            'sum({__name__=~"vllm:num_requests_waiting|vllm:num_requests_running",L}) by (G)',
        ),
        (
            "kv",
            "sum(avg by (pod) (vllm:kv_cache_usage_perc{POOL}))",
            "avg(vllm:kv_cache_usage_perc{L}) by (G)",
        ),
    ],
)
def test_the_queries_say_what_the_metric_means(metric: str, query: str, rule: str) -> None:
    """A pool's sum for KEDA, a pod's own value for an HPA; ranks of a pod have shares of a cache each."""
    (scaled,) = of(rendered("keda", metric=metric), keda_object.FILE)
    pool = 'fleetplan_pool="llama-3-1-70b-mixed"'
    assert scaled["spec"]["triggers"][0]["metadata"]["query"] == query.replace("POOL", pool)
    (adapter,) = of(rendered("hpa", metric=metric), prometheus_queries.ADAPTER_FILE)
    assert adapter["rules"]["custom"][0]["metricsQuery"] == rule.replace("L}", "<<.LabelMatchers>>}").replace(
        "G)", "<<.GroupBy>>)"
    )


def test_keda_holds_the_numbers_of_the_controller() -> None:
    files = rendered(
        "keda", metric="concurrency", threshold=12.5, activation=3.0, poll_s=15.0, cooldown_s=600.0
    )
    (found,) = of(files, keda_object.FILE)
    spec = found["spec"]
    assert (spec["pollingInterval"], spec["cooldownPeriod"]) == (15, 600)
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 9)
    told = spec["triggers"][0]["metadata"]
    assert (told["threshold"], told["activationThreshold"], told["ignoreNullValues"]) == (
        "12.5",
        "3",
        "false",
    )
    assert [each["type"] for each in spec["triggers"]] == ["prometheus", "cron"]


def minute_of(schedule: str) -> int:
    minute, hour = (int(part) for part in schedule.split()[:2])
    return 60 * hour + minute


@pytest.mark.parametrize("seed", range(15))
def test_a_timetable_is_the_same_at_every_minute(seed: int) -> None:
    """KEDA: the most of the triggers that are on, or minReplicaCount; CronJobs: the last one that ran."""
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.choice(1440, rng.integers(1, 9), replace=False)) * 60
    timetable = tuple(
        (int(start), int(size)) for start, size in zip(starts, rng.integers(0, 4, len(starts)), strict=True)
    )
    files = rendered("cron", timetable=timetable, least=0)
    (scaled,) = of(files, keda_object.FILE)
    jobs = [d for d in of(files, "cron-jobs.yaml") if d["kind"] == "CronJob"]
    assert "its 0:00 is the beginning of the plan's traffic" in files["README.md"]
    at = sorted(((minute_of(d["spec"]["schedule"]), d) for d in jobs), key=lambda each: each[0])
    for minute in range(1440):
        wanted = next((s for start, s in reversed(timetable) if start <= 60 * minute), timetable[-1][1])
        on = [scaled["spec"]["minReplicaCount"]]
        for trigger in scaled["spec"]["triggers"]:
            told = trigger["metadata"]
            start, end = minute_of(told["start"]), minute_of(told["end"])
            if (start <= minute < end) if start < end else (minute >= start or minute < end):
                on.append(int(told["desiredReplicas"]))
        if len({size for _, size in timetable}) > 1 or wanted:  # one trigger is for a day without any change
            assert max(on) == wanted
        last = next((d for when, d in reversed(at) if when <= minute), at[-1][1])
        command = last["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["command"]
        assert command[-1] == f"--replicas={wanted}"


@pytest.mark.parametrize(
    ("timetable", "least"), [(((0, 2), (8 * 3600, 6), (20 * 3600, 2)), 2), (((0, 3),), 3), ((), 1)]
)
def test_keda_never_goes_below_the_smallest_size_of_its_timetable(
    timetable: tuple[tuple[int, int], ...], least: int
) -> None:
    """The manifest went down to the pool's least, one worker, where the simulated controller keeps two."""
    (scaled,) = of(rendered("keda", timetable=timetable), keda_object.FILE)
    assert scaled["spec"]["minReplicaCount"] == least


def test_a_timetable_is_followed_to_the_last_worker_and_at_once() -> None:
    """12 workers are within 10 % of 13: an HPA's tolerance would leave it at that."""
    (found,) = of(rendered("cron"), keda_object.FILE)
    for way in found["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"].values():
        assert way["tolerance"] == "0" and way["stabilizationWindowSeconds"] == 0
        assert way["policies"] == [{"type": "Pods", "value": 9, "periodSeconds": 15}]  # All of its most.
    assert found["spec"]["cooldownPeriod"] == 0


def by_rule(expression: str, rate: float) -> float:
    """A rule that has one vector in it, as Prometheus computes it."""
    python = re.sub(r"sum\(fleetplan:pool_rps\{[^}]*\}\)", "rate", expression).replace("> bool", ">")
    return float(eval(python, {"rate": rate, "ceil": lambda x: np.ceil(x - 1e-12), "__builtins__": {}}))


@pytest.mark.parametrize("seed", range(15))
def test_the_rule_of_a_capacity_table_is_the_table(seed: int) -> None:
    """The sizes at the least rate that is as high; beyond it the last ones in proportion, rounded up."""
    rng = np.random.default_rng(seed)
    rates = np.unique(rng.uniform(0.5, 30, rng.integers(1, 12)))
    sizes = np.sort(rng.integers(0, 12, (len(rates), 2)), axis=0)
    told = autoscaler(PAIRS, "fleetplan", rates_rps=rates.tolist(), sizes=sizes.tolist())
    (rule,) = of(autoscaling.render(PAIRS, 5000, "kubernetes", told), prometheus_queries.RULES_FILE)
    asked = [
        each["expr"] for each in rule["spec"]["groups"][0]["rules"] if each["record"] == recording_rules.ASKED
    ]
    assert len(asked) == 2
    for rate in [*rates, *rng.uniform(0, 2 * rates[-1], 20), 0.0]:
        for pool, expression in enumerate(asked):
            row = next((k for k, each in enumerate(rates) if rate <= each * (1 + 1e-9)), None)
            if rate <= 0:
                wanted = 0.0
            elif row is None:
                wanted = np.ceil(sizes[-1, pool] * rate / rates[-1] - 1e-9)
            else:
                wanted = sizes[row, pool]
            assert by_rule(expression, rate) == wanted


def test_the_rules_of_ours_read_what_stands_before_them() -> None:
    """Prometheus evaluates the rules of a group one after the other; ours refer upwards, ranges aside."""
    for controller in ("fleetplan", "forecast", "aladdin"):
        (rule,) = of(rendered(controller, "kubernetes", "pairs"), prometheus_queries.RULES_FILE)
        recorded: set[str] = set()
        for each in rule["spec"]["groups"][0]["rules"]:
            assert set(re.findall(r"fleetplan:\w+", each["expr"])) <= recorded, each["record"]
            recorded.add(each["record"])
        scaled = of(rendered(controller, "kubernetes", "pairs"), keda_object.FILE)
        queries = [d["spec"]["triggers"][0]["metadata"]["query"] for d in scaled]
        assert all(re.match(r"fleetplan:pool_workers\{", query) for query in queries)
        assert {name for query in queries for name in re.findall(r"fleetplan:\w+", query)} <= recorded


def test_the_rate_ahead_is_looked_up_a_season_before() -> None:
    """Start-up 120 s and a look of 60 s: up to 180 s ahead, at the middle of buckets of 300 s: the highest of
    the last 300 s, 86400 - 180 - 150 s ago. Headroom 25 %, hold 900 s, and prompts that wait within 30 s."""
    files = rendered("fleetplan", headroom_frac=0.25, hold_s=900.0, drain_s=30.0, every_s=60.0)
    (rule,) = of(files, prometheus_queries.RULES_FILE)
    told = {each["record"]: each["expr"] for each in rule["spec"]["groups"][0]["rules"]}
    assert "[300s] offset 86070s)) * sum(fleetplan:season_share{" in told[recording_rules.EXPECTED]
    assert told[recording_rules.RATE].startswith("1.25 * (") and told[recording_rules.RATE].endswith(
        ", 0) / 30"
    )
    assert "[900s]" in told[recording_rules.WORKERS]
    assert rule["spec"]["groups"][0]["interval"] == "60s"


def test_every_query_is_promql() -> None:
    parser = pytest.importorskip("promql_parser")
    queries = 0
    for fleet, controller, target in CASES:
        for _, d in objects(written(fleet, controller, target)):
            spec = d.get("spec") or {}
            told = [t["metadata"]["query"] for t in spec.get("triggers", []) if t["type"] == "prometheus"]
            told += [rule["expr"] for group in spec.get("groups", []) for rule in group["rules"]]
            for query in told:
                parser.parse(query)
            queries += len(told)
    assert queries > 100


def test_wva_has_the_price_of_a_worker_and_its_thresholds() -> None:
    """4 H100 at 2.99 USD/h cost 11.96."""
    files = rendered("wva", kv_threshold_frac=0.7, queue_threshold=8.0, optimize_s=30.0)
    (variant,) = of(files, "variant-autoscalings.yaml")
    assert variant["spec"]["variantCost"] == "11.96"
    assert variant["spec"]["modelID"] == "meta-llama/Llama-3.1-70B"
    (values,) = of(files, "workload-variant-autoscaler.values.yaml")
    # Without the label it decides nothing of a variant, and without https it does not start.
    assert variant["metadata"]["labels"] == {"inference.optimization/acceleratorName": "h100-80g"}
    assert values["wva"]["prometheus"]["baseURL"].startswith("https://prometheus-kube")
    assert values["wva"]["reconcileInterval"] == "30s"
    assert "It decides every 30 s" in files["README.md"]
    assert values["wva"]["capacityScaling"]["default"] == {
        "kvCacheThreshold": 0.7,
        "queueLengthThreshold": 8,
        "kvSpareTrigger": 0.1,
        "queueSpareTrigger": 3,
    }
    (found,) = of(files, hpa_object.FILE)
    metric = found["spec"]["metrics"][0]["external"]
    assert metric["metric"]["selector"]["matchLabels"] == {"variant_name": variant["metadata"]["name"]}
    assert found["spec"]["behavior"]["scaleUp"]["stabilizationWindowSeconds"] == 240


def planner_of(files: dict[str, str]) -> dict[str, Any]:
    (found,) = [
        c for d in of(files, "dynamo.yaml") for c in d["spec"]["components"] if c["type"] == "planner"
    ]
    config: dict[str, Any] = json.loads(found["podTemplate"]["spec"]["containers"][0]["args"][1])
    return config


def test_dynamos_planner_is_told_in_its_own_units() -> None:
    """At most 9 x 2 + 9 x 4 GPUs; 2 s and 200 ms in milliseconds; 10 % of 5,120 tokens are 512."""
    sla = planner_of(rendered("dynamo-sla", "dynamo", "pairs", every_s=120.0, predictor="seasonal"))
    assert (sla["max_gpu_budget"], sla["mode"], sla["min_endpoint"]) == (54, "disagg", 1)
    assert (sla["ttft_ms"], sla["itl_ms"], sla["load_predictor"]) == (2000.0, 200.0, "prophet")
    assert (sla["enable_throughput_scaling"], sla["throughput_adjustment_interval_seconds"]) == (True, 120)
    plain = planner_of(rendered("dynamo", "dynamo", optimize="latency"))
    assert (plain["mode"], plain["optimization_target"]) == ("agg", "latency")
    assert "decode_scale_up_kv_rate" not in plain
    load = planner_of(rendered("dynamo", "dynamo", "pairs", kv_up_frac=0.9))
    assert load["optimization_target"] == "load"
    assert (load["decode_scale_up_kv_rate"], load["decode_scale_down_kv_rate"]) == (90.0, 60.0)
    assert (load["prefill_scale_up_queue_tokens"], load["prefill_scale_down_queue_tokens"]) == (5120, 512)


def test_knative_has_percents_and_windows() -> None:
    files = rendered(
        "knative", "kserve", target=24.5, utilization_frac=0.8, panic_threshold_frac=1.5, max_down_rate=4.0
    )
    (service,) = of(files, "kserve-knative.yaml")
    told = service["spec"]["predictor"]["annotations"]
    assert "scaleTarget" not in service["spec"]["predictor"]
    assert told["autoscaling.knative.dev/target"] == "24.5"
    assert told["autoscaling.knative.dev/target-utilization-percentage"] == "80"
    assert told["autoscaling.knative.dev/panic-threshold-percentage"] == "150"
    assert "max-scale-down-rate: 4" in files["README.md"] and "kserve.yaml" not in files
    assert "kubectl apply -f kserve.yaml" not in files["README.md"]


def test_ray_serve_aims_at_the_share_of_knatives_target() -> None:
    """70 % of 40 requests per replica."""
    (config,) = of(rendered("knative", "ray-serve", target=40.0), "ray-serve.yaml")
    told = config["applications"][0]["args"]["llm_configs"][0]["deployment_config"]
    assert told["autoscaling_config"]["target_ongoing_requests"] == pytest.approx(28)
    assert "num_replicas" not in told


def test_static_is_the_plan_itself() -> None:
    assert rendered("static") == manifests.render(EXAMPLES["mixed"], 5000, "kubernetes").files


BAD: list[tuple[str, str, dict[str, Any], str]] = [
    ("hpa", "kubernetes", {"up_percent": 1.5}, "up_percent: 1.5, must be whole"),
    ("wva", "kubernetes", {"queue_threshold": 7.5}, "queue_threshold: 7.5, must be whole"),
    ("wva", "kubernetes", {"optimize_s": 3601}, "optimize_s: 3601 s, and its manifest holds 1 to 3600 s"),
    ("hpa", "ray-serve", {"metric": "kv"}, "Ray Serve follows requests in flight alone.*found 'kv'"),
    ("keda", "ray-serve", {}, "keda: cron: Ray Serve has no timetable"),
    ("dynamo", "dynamo", {"kv_up_frac": 1.2}, "kv_up and kv_down: Dynamo takes"),
    ("fleetplan", "kubernetes", {"hold_s": 5.0}, "hold: 5 s, must be 0 or at least the time between"),
    ("fleetplan", "kubernetes", {"bucket_s": 10.0}, "bucket: 10 s, must be at least the time between"),
    ("fleetplan", "kubernetes", {"season_s": 600, "ahead_s": 500}, "must be below a season of 600 s"),
    ("aladdin", "kubernetes", {"rates_rps": [1.0], "sizes": [[1]]}, "needs pairs at two rates"),
]


@pytest.mark.parametrize(("controller", "target", "parameters", "words"), BAD)
def test_bad_input_is_one_line(controller: str, target: str, parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        rendered(controller, target, **parameters)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("controller", ["hpa", "wva", "fleetplan", "keda"])
def test_nobody_starts_an_empty_pool_that_exports_nothing(controller: str) -> None:
    if controller == "keda":  # its timetable wakes it
        rendered(controller, least=0)
    with pytest.raises(InputError, match="a pool without workers exports no metric"):
        rendered(controller, least=0, timetable=())


def test_a_plan_without_a_limit_on_ttft_has_no_sla_planner() -> None:
    told = autoscaler(MIXED, "dynamo-sla")
    told = replace(told, knowledge=replace(told.knowledge, ttft_s=None))
    with pytest.raises(InputError, match="ttft_s: expected the SLO's target in seconds"):
        autoscaling.render(MIXED, 5000, "dynamo", told)


def test_a_schedule_begins_at_a_whole_minute() -> None:
    with pytest.raises(InputError, match="second 90: schedules begin at whole minutes"):
        rendered("cron", timetable=((0, 2), (90, 3)))


@pytest.mark.long
@pytest.mark.parametrize(("controller", "step"), [("wva", 3), ("fleetplan", 8), ("hpa", 16), ("cron", 16)])
def test_hostile_names_change_no_structure_and_no_query(controller: str, step: int) -> None:
    """An LLM's name stands in comments and as the model of a variant; a pool's becomes a label."""

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(item) for key, item in value.items()}
        return [shape(item) for item in value] if isinstance(value, list) else type(value)

    told = autoscaler(MIXED, controller)
    tame = autoscaling.render(named(MIXED, "tame"), 5000, "kubernetes", told)
    taken = 0
    for name in NAMES[::step]:
        try:
            files = autoscaling.render(named(MIXED, name), 5000, "kubernetes", told)
        except InputError as error:
            assert len(str(error)) < 6000
            continue
        taken += 1
        for path, text in files.items():
            if path.startswith("chart/templates/"):
                assert text == tame[path]
            elif path.endswith(".yaml"):
                assert shape(documents(text)) == shape(documents(tame[path])), (name, path)
                assert text.count("\n#") == tame[path].count("\n#")
        for query in re.findall(r'fleetplan_(?:pool|llm)="([^"]*)"', "".join(files.values())):
            assert re.fullmatch(r"[a-z][-a-z0-9]*", query)
    assert taken > 2


@pytest.mark.parametrize("number", range(0, len(NAMES), 10))
def test_hostile_names_of_pools_are_labels(number: int) -> None:
    fleet = mixed()
    hostile = replace(fleet, pools=(replace(fleet.pools[0], name=NAMES[number]),))
    files = autoscaling.render(hostile, 5000, "kubernetes", autoscaler(hostile, "keda"))
    for _, d in objects(files):
        if d["kind"] not in ("Kustomization", "Component"):  # which have no names
            assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", d["metadata"]["name"])
    assert len(files["README.md"].split("## Sizes that change")) == 2


def test_the_table_of_pairs_holds_targets_alone() -> None:
    assert {target for targets in autoscaling.PAIRS.values() for target in targets} <= set(manifests.TARGETS)


def test_each_target_that_a_controller_is_written_for_has_its_row() -> None:
    """A fixed fleet needs none."""
    scaled = {target for name, targets in autoscaling.PAIRS.items() if name != "static" for target in targets}
    assert scaled == set(scalable_pools.SCALABLE) <= set(manifests.TARGETS)


@pytest.mark.long
def test_every_controllers_defaults_have_a_manifest() -> None:
    """The settings as the table of controllers has them, by the names of their fields."""
    assert set(autoscaling.PAIRS) <= set(table.CONTROLLERS)
    for controller, targets in autoscaling.PAIRS.items():
        row = table.CONTROLLERS[controller]
        for point in ({}, *row.grid):
            settings = table.parse_controller(controller, point).settings
            told = autoscaler(MIXED, controller).with_settings(settings)
            for target in {"kubernetes", "kserve", "dynamo"} & set(targets):
                autoscaling.render(MIXED, 5000, target, told)


def test_windows_become_a_timetable() -> None:
    """8:00 to 20:00 six workers, 12:00 to 14:00 eight; over midnight three; 1 to 7 are held."""
    windows = read_windows(
        [
            {"from": "8:00", "to": "20:00", "workers": 6},
            {"from": "12:00", "to": "14:00", "workers": [8, 2]},
            {"from": "22:00", "to": "2:00", "workers": 3},
        ],
        "x",
    )
    hours = {0: 3, 2: 1, 8: 6, 12: 7, 14: 6, 20: 1, 22: 3}
    found = autoscaling.timetable_of(windows, 0, least=1, most=7)
    assert {second / 3600: size for second, size in found} == {k: v for k, v in hours.items() if k}
    with pytest.raises(InputError, match="08:00 to 20:00 is of 2 days of the week"):
        weekend = [{"from": "8:00", "to": "20:00", "workers": 6, "days": ["sat", "sun"]}]
        autoscaling.timetable_of(read_windows(weekend, "x"), 0, least=1, most=7)


def test_the_manual_has_the_table_of_pairs() -> None:
    """docs/tables/autoscalers.md: each controller, and each of its targets."""
    text = (Path(__file__).parents[2] / "docs" / "tables" / "autoscalers.md").read_text()
    text = text.split("## Flags of vLLM")[0]
    rows: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| controller"):
            names, _, targets = (cell.strip() for cell in line.strip("| ").split(" | "))
            for name in names.split(", "):
                rows[name] = rows["hpa"] if targets == "as hpa" else targets
    assert set(rows) == set(autoscaling.PAIRS)
    for name, given in autoscaling.PAIRS.items():
        named = set(re.findall(r"[a-z][-a-z]+", re.sub(r"\(.*?\)", "", rows[name])))
        assert named == set(given) or rows[name] == "every target"


def sized(*counts: int) -> Fleet:
    """The prefill and decode pools with these sizes at the beginning."""
    return PAIRS.with_counts(counts)


def some_knowledge(**known: Any) -> Knowledge:
    """Workers that start in 100 s and 200 s; two requests/s more need one worker more in each pool."""
    pools = (ElasticPool(100.0, least=1, most=6), ElasticPool(200.0, least=2, most=8, drain_limit_s=45.0))
    table_of = CapacityTable(np.array([2.0, 4.0, 6.0]), np.array([[1, 2], [2, 3], [3, 4]]), "by hand")
    return Knowledge(pools, ("prefill", "decode"), capacity=table_of, ttft_s=2.0, tpot_s=0.2, **known)


def test_what_was_simulated_is_what_is_deployed() -> None:
    """Sizes, start-ups and limits on draining of the pools; settings by role; the table of the plan."""
    chosen = table.parse_controller("hpa", {"metric": "queue", "decode": {"metric": "kv", "target": "60 %"}})
    told = autoscaling.autoscaler_of(chosen, some_knowledge(), sized(2, 3))
    pre, dec = told.pools
    assert (pre.least, pre.most, pre.size, pre.start_s, pre.drain_s) == (1, 6, 2, 100.0, 3600.0)
    assert (dec.least, dec.most, dec.size, dec.start_s, dec.drain_s) == (2, 8, 3, 200.0, 45.0)
    files = autoscaling.render(PAIRS, 5000, "kubernetes", told)
    metrics = [d["spec"]["metrics"][0]["pods"] for d in of(files, hpa_object.FILE)]
    assert [each["metric"]["name"] for each in metrics] == [
        "vllm_num_requests_waiting",
        "vllm_kv_cache_usage_perc",
    ]
    assert metrics[1]["target"]["averageValue"] == "600m"
    ours = autoscaling.autoscaler_of(table.parse_controller("fleetplan", {}), some_knowledge(), sized(2, 3))
    (rule,) = of(autoscaling.render(PAIRS, 5000, "kubernetes", ours), prometheus_queries.RULES_FILE)
    expected = [
        each["expr"]
        for each in rule["spec"]["groups"][0]["rules"]
        if each["record"] == recording_rules.EXPECTED
    ]
    for start_s, expression in zip(
        (100, 200), expected, strict=True
    ):  # a look of 15 s, half a bucket of 300 s
        assert f"offset {86_400 - start_s - 15 - 150}s" in expression


def test_a_timetable_made_of_earlier_days_is_deployed() -> None:
    """3 requests/s from 8 to 20 o'clock, else 1: two and three workers by day, one and two by night; ten
    minutes ahead."""
    rates = np.array([3.0 if 8 <= hour < 20 else 1.0 for hour in range(24)])
    knowledge = some_knowledge(history=History(3600.0, rates))
    told = autoscaling.autoscaler_of(table.parse_controller("cron", {}), knowledge, sized(1, 2))
    (pre, dec) = of(autoscaling.render(PAIRS, 5000, "kubernetes", told), keda_object.FILE)
    for scaled, least in ((pre, 1), (dec, 2)):
        (trigger,) = scaled["spec"]["triggers"]
        assert trigger["metadata"] == {
            "timezone": "Etc/UTC",
            "start": "50 7 * * *",
            "end": "0 20 * * *",
            "desiredReplicas": str(least + 1),
        }
        assert scaled["spec"]["minReplicaCount"] == least


def test_a_role_has_the_cron_windows_that_it_was_given() -> None:
    """Windows of `prefill` alone are in the manifest of the prefill pool alone; they were in none."""
    windows = [{"from": "08:00", "to": "20:00", "workers": 3}]
    chosen = table.parse_controller("keda", {"prefill": {"cron": windows}})
    told = autoscaling.autoscaler_of(chosen, some_knowledge(), sized(1, 2))
    (pre, dec) = of(autoscaling.render(PAIRS, 5000, "kubernetes", told), keda_object.FILE)
    assert [each["type"] for each in pre["spec"]["triggers"]] == ["prometheus", "cron"]
    assert [each["type"] for each in dec["spec"]["triggers"]] == ["prometheus"]


def test_static_deploys_the_workers_it_was_told() -> None:
    chosen = table.parse_controller("static", {"workers": [3, 4]})
    told = autoscaling.autoscaler_of(chosen, some_knowledge(), sized(1, 2))
    text = autoscaling.render(PAIRS, 5000, "kubernetes", told)["kubernetes.yaml"]
    assert re.findall(r"^  replicas: (\d+)$", text, re.M) == ["3", "4", "1"]  # and a router
