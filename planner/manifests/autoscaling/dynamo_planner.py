"""The planner of NVIDIA Dynamo 1.6.1: a component of the graph, told everything by `--config`.

Keys, ranges and what excludes what: dynamo/planner/config/planner_config.py and defaults.py of ai-dynamo
1.6.1 from PyPI. The component: ai-dynamo/dynamo, examples/backends/vllm/deploy/v1beta1/disagg_planner.yaml at
04521f4.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from planner.errors import InputError
from planner.manifests import dynamo
from planner.manifests.autoscaling.autoscaler import Autoscaler, Document
from planner.manifests.autoscaling.places import Place

IMAGE = f"nvcr.io/nvidia/ai-dynamo/dynamo-planner:{dynamo.DYNAMO_VERSION}"
NAME = "planner"
PREDICTORS = ("constant", "arima", "kalman", "prophet")


def component(places: Sequence[Place], autoscaler: Autoscaler) -> Document:
    """The planner of one graph. InputError where it could not tell components apart."""
    roles = sorted(place.pool.role for place in places)
    if roles not in (["mixed"], ["decode", "prefill"]):
        raise InputError(
            f"{autoscaler.controller}: Dynamo's planner scales one prefill and one decode pool, or one mixed "
            f"pool, found {', '.join(roles)}"
        )
    name = NAME if all(not place.object_name.endswith(f"-{NAME}") for place in places) else f"{NAME}-0"
    main = {
        "name": "main",
        "image": IMAGE,
        "command": ["python3", "-m", "dynamo.planner"],
        "args": ["--config", json.dumps(config(places, autoscaler))],
    }
    return {"name": name, "type": "planner", "replicas": 1, "podTemplate": {"spec": {"containers": [main]}}}


def config(places: Sequence[Place], autoscaler: Autoscaler) -> Document:
    """PlannerConfig: `target` is sla (by TTFT and ITL) or load (by queue and KV use)."""
    is_pair = len(places) == 2
    told: Document = {
        "environment": "kubernetes",
        "backend": "vllm",
        "mode": "disagg" if is_pair else "agg",
        "pre_deployment_sweeping_mode": "none",
        "max_gpu_budget": sum(place.scaled.most * place.pool.type.gpus for place in places),
        **_least(places),
    }
    for place in places:
        side = "prefill" if place.pool.role == "prefill" else "decode"
        told[f"{side}_engine_num_gpu"] = place.pool.type.gpus
    target = autoscaler.text("target", "sla")
    if target == "sla":
        return told | _sla(autoscaler)
    if target == "load":
        return told | _load(autoscaler, is_pair=is_pair)
    raise InputError(f"{autoscaler.controller}: target: must be sla or load, found {target[:100]!r}")


def _least(places: Sequence[Place]) -> Document:
    least = {place.pool.role: place.scaled.least for place in places}
    if len(set(least.values())) == 1 or "mixed" in least:
        return {"min_endpoint": next(iter(least.values()))}
    if 0 in least.values():
        raise InputError(
            "dynamo: its planner lets prefill and decode pools be empty together or not at all, found least "
            f"{least['prefill']} and {least['decode']}"
        )
    return {f"{role}_min_endpoint": count for role, count in sorted(least.items())}


def _sla(autoscaler: Autoscaler) -> Document:
    predictor = autoscaler.text("predictor", "constant")
    if predictor not in PREDICTORS:
        raise InputError(
            f"{autoscaler.controller}: predictor: must be one of {', '.join(PREDICTORS)}, found "
            f"{predictor[:100]!r}"
        )
    for name in ("ttft_s", "itl_s"):
        if autoscaler.number(name, 0.0) <= 0:
            raise InputError(
                f"{autoscaler.controller}: {name}: Dynamo's planner needs a target above 0 s, found "
                f"{autoscaler.number(name, 0.0):g} s"
            )
    return {
        "optimization_target": "sla",
        "ttft_ms": 1000 * autoscaler.number("ttft_s", 0.0),
        "itl_ms": 1000 * autoscaler.number("itl_s", 0.0),
        "enable_throughput_scaling": True,
        "enable_load_scaling": False,
        "throughput_adjustment_interval_seconds": autoscaler.seconds("every_s", 180, least=1, most=86_400),
        "load_predictor": predictor,
    }


def _load(autoscaler: Autoscaler, *, is_pair: bool) -> Document:
    told: Document = {
        "optimization_target": "load",
        "enable_throughput_scaling": False,
        "enable_load_scaling": True,
        "load_adjustment_interval_seconds": autoscaler.seconds("every_s", 5, least=1, most=86_400),
    }
    percent = {
        "decode_scale_up_kv_rate": 100 * autoscaler.number("kv_up_frac", 0.8),
        "decode_scale_down_kv_rate": 100 * autoscaler.number("kv_down_frac", 0.5),
    }
    if not 0 <= percent["decode_scale_down_kv_rate"] < percent["decode_scale_up_kv_rate"] <= 100:
        raise InputError(
            f"{autoscaler.controller}: kv_up and kv_down: expected 0 <= down < up <= 100 %, found "
            f"{percent['decode_scale_down_kv_rate']:g} % and {percent['decode_scale_up_kv_rate']:g} %"
        )
    told |= percent
    if is_pair:
        up, down = (
            round(autoscaler.number(f"queue_{way}_tokens", usual))
            for way, usual in (("up", 4096), ("down", 1024))
        )
        if not 0 <= down < up:
            raise InputError(
                f"{autoscaler.controller}: queue_up_tokens and queue_down_tokens: expected 0 <= down < up, "
                f"found {down} and {up}"
            )
        told |= {"prefill_scale_up_queue_tokens": up, "prefill_scale_down_queue_tokens": down}
    return told


LIMITS = (
    "It knows the GPUs of all pools together (max_gpu_budget) and the least of each, no most of each.",
    "It predicts TTFT and ITL by a model of its own, fitted to what it sees; it is not told of the plan's "
    "step times.",
    "It reads the frontend's metrics from Prometheus: PROMETHEUS_ENDPOINT of the component where that is not "
    "http://prometheus-kube-prometheus-prometheus.monitoring.svc.cluster.local:9090.",
)
