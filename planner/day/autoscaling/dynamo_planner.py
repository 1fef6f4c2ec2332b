"""The planner of NVIDIA Dynamo 1.6.1, a component of a Dynamo graph that scales the graph's pools.

Its keys, their ranges and the keys that exclude each other are from dynamo/planner/config/planner_config.py
and defaults.py in ai-dynamo 1.6.1 from PyPI; they are passed as JSON in `--config`. The component is written
as in ai-dynamo/dynamo, examples/backends/vllm/deploy/v1beta1/disagg_planner.yaml at 04521f4.
"""

import json
import math
from collections.abc import Sequence

from planner.day.autoscaling.autoscaler import Autoscaler, Document
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.day.controllers.dynamo_load import DynamoSettings, ScalingThresholds
from planner.errors import InputError
from planner.manifests import dynamo

IMAGE = f"nvcr.io/nvidia/ai-dynamo/dynamo-planner:{dynamo.DYNAMO_VERSION}"
NAME = "planner"
BY_LOAD, BY_SLA = "dynamo", "dynamo-sla"
CONTROLLERS = (BY_LOAD, BY_SLA)
PREDICTORS = {"constant": "constant", "seasonal": "prophet"}  # Dynamo's names by ours.


def planner_component(
    targets: Sequence[ScaleTarget], autoscaler: Autoscaler, longest_tokens: int
) -> Document:
    """The planner component of one graph, whose pools are `targets`.

    Raises InputError for several pools of a role, which Dynamo's planner cannot tell apart.
    """
    roles = sorted(target.pool.role for target in targets)
    if roles not in (["mixed"], ["decode", "prefill"]):
        raise InputError(
            f"{autoscaler.controller}: Dynamo's planner scales one prefill and one decode pool, or one mixed "
            f"pool, found {', '.join(roles)}"
        )
    # The component's name must differ from those of the pools, and a pool may be called `planner`.
    is_taken = any(target.object_name.endswith(f"-{NAME}") for target in targets)
    name = f"{NAME}-0" if is_taken else NAME
    main = {
        "name": "main",
        "image": IMAGE,
        "command": ["python3", "-m", "dynamo.planner"],
        "args": ["--config", json.dumps(planner_config(targets, autoscaler, longest_tokens))],
    }
    return {"name": name, "type": "planner", "replicas": 1, "podTemplate": {"spec": {"containers": [main]}}}


def planner_config(targets: Sequence[ScaleTarget], autoscaler: Autoscaler, longest_tokens: int) -> Document:
    """Dynamo's PlannerConfig of one graph, whose workers take requests of up to `longest_tokens`."""
    is_pair = len(targets) == 2
    config: Document = {
        "environment": "kubernetes",
        "backend": "vllm",
        "mode": "disagg" if is_pair else "agg",
        "pre_deployment_sweeping_mode": "none",
        # The GPUs of all pools at their largest sizes.
        "max_gpu_budget": sum(target.scaled.most * target.pool.type.gpus for target in targets),
        **_least_workers(targets),
    }
    for target in targets:
        side = "prefill" if target.pool.role == "prefill" else "decode"  # Mixed workers count as decode.
        config[f"{side}_engine_num_gpu"] = target.pool.type.gpus
    if autoscaler.controller == BY_SLA:
        # By default no decision changes a pool by more than 8 workers, which was not simulated.
        most = max(target.scaled.most for target in targets)
        return config | _sla_config(autoscaler) | {"max_throughput_scaling_replicas": most}
    return config | _load_config(autoscaler, longest_tokens, is_pair=is_pair)


def _least_workers(targets: Sequence[ScaleTarget]) -> Document:
    """The keys for the least sizes: one key if both roles have the same, else one for each role."""
    least = {target.pool.role: target.scaled.least for target in targets}
    if len(set(least.values())) == 1:
        return {"min_endpoint": next(iter(least.values()))}
    if 0 in least.values():
        raise InputError(
            "dynamo: its planner lets prefill and decode pools be empty together or not at all, found least "
            f"{least['prefill']} and {least['decode']}"
        )
    return {f"{role}_min_endpoint": count for role, count in sorted(least.items())}


def _sla_config(autoscaler: Autoscaler) -> Document:
    """The keys of scaling by Dynamo's predictions of TTFT and ITL (its word for TPOT). Raises InputError if
    the SLO has no limit on TTFT; a controller without one on TPOT cannot be made.
    """
    settings, knowledge = autoscaler.settings, autoscaler.knowledge
    if knowledge.ttft_s is None:
        raise InputError(
            f"{autoscaler.controller}: ttft_s: expected the SLO's target in seconds, above 0, found 0"
        )
    assert knowledge.tpot_s is not None
    return {
        "optimization_target": "sla",
        "ttft_ms": 1000 * knowledge.ttft_s,
        "itl_ms": 1000 * knowledge.tpot_s,
        "enable_throughput_scaling": True,
        "enable_load_scaling": False,
        "throughput_adjustment_interval_seconds": math.ceil(settings.every_s),
        "load_predictor": PREDICTORS[settings.predictor],
    }


def _load_config(autoscaler: Autoscaler, longest_tokens: int, *, is_pair: bool) -> Document:
    """The keys of scaling by load. Dynamo's `optimization_target` is the controller's `optimize`, or "load"
    with thresholds if the controller sets any; the others then come from `optimize`.
    """
    settings: DynamoSettings = autoscaler.settings
    load_config: Document = {
        "optimization_target": settings.optimize,
        "enable_throughput_scaling": False,
        "enable_load_scaling": True,
        "load_adjustment_interval_seconds": math.ceil(settings.every_s),
    }
    if all(getattr(settings, name) is None for name in ScalingThresholds._fields):
        return load_config
    prefill_up_frac, prefill_down_frac, kv_up_frac, kv_down_frac = settings.thresholds
    if not 0 <= kv_down_frac < kv_up_frac <= 1:
        raise InputError(
            f"{autoscaler.controller}: kv_up and kv_down: Dynamo takes 0 <= down < up <= 100 %, found "
            f"{100 * kv_down_frac:g} % and {100 * kv_up_frac:g} %"
        )
    load_config |= {
        "optimization_target": "load",
        "decode_scale_up_kv_rate": 100 * kv_up_frac,
        "decode_scale_down_kv_rate": 100 * kv_down_frac,
    }
    if is_pair:  # Dynamo scales mixed workers by their KV alone.
        # Ours are shares of the longest request, Dynamo's are queued prompt tokens.
        up_tokens = round(prefill_up_frac * longest_tokens)
        down_tokens = round(prefill_down_frac * longest_tokens)
        if not 0 <= down_tokens < up_tokens:
            raise InputError(
                f"{autoscaler.controller}: prefill_up and prefill_down: expected 0 <= down < up, found "
                f"{100 * prefill_down_frac:g} % and {100 * prefill_up_frac:g} %"
            )
        load_config |= {
            "prefill_scale_up_queue_tokens": up_tokens,
            "prefill_scale_down_queue_tokens": down_tokens,
        }
    return load_config


def limit_lines(autoscaler: Autoscaler) -> tuple[str, ...]:
    """Lines for README.md: what the simulated controller did that Dynamo's planner does not do."""
    if autoscaler.controller == BY_SLA:
        lines = [
            "It predicts TTFT and ITL by a model of its own, fitted to what it sees; it does not use the "
            "plan's step times, and has no correction factors any more."
        ]
        if autoscaler.settings.predictor == "seasonal":
            lines.append("For the seasonal predictor it has Prophet, which learns the season by itself.")
        return (*lines, *_LIMITS)
    if autoscaler.settings.grace_s:
        return ("It has no time of grace after a change; the plan was made with one.", *_LIMITS)
    return _LIMITS


_LIMITS = (
    "It knows the most GPUs of all pools together (max_gpu_budget), and of each pool only the least workers.",
    "It reads the frontend's metrics from Prometheus: PROMETHEUS_ENDPOINT of the component where that is not "
    "http://prometheus-kube-prometheus-prometheus.monitoring.svc.cluster.local:9090.",
)
