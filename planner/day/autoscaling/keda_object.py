"""KEDA's ScaledObject (keda.sh/v1alpha1), one per pool: Prometheus and cron triggers.

Fields and their ranges: kedacore/keda v2.20, config/crd/bases/keda.sh_scaledobjects.yaml; parameters of the
triggers: pkg/scalers/prometheus_scaler.go, cron_scaler.go. KEDA makes an HPA of a ScaledObject. The HPA
follows the trigger that asks for most workers. A cron trigger asks for `desiredReplicas` from `start` to
`end`; while no trigger asks for any, the pool has `minReplicaCount`.
"""

from collections.abc import Sequence

from planner.day.autoscaling import hpa_object, prometheus_queries
from planner.day.autoscaling.autoscaler import (
    DAY_S,
    MINUTE_S,
    Autoscaler,
    Document,
    ScaledPool,
    WrittenManifests,
)
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.day.controllers.keda import KedaSettings
from planner.errors import InputError

FILE = "scaled-objects.yaml"
MOST_S = 2**31 - 1  # pollingInterval and cooldownPeriod are int32 fields.
TIME_ZONE = "Etc/UTC"
NEEDS = "needs KEDA 2.18 or newer"
# Settings of a ScaledObject that has exactly as many workers as its trigger asks for, without delay. 0 pods
# and 0 percent are no limit.
FOLLOW_EXACTLY = KedaSettings(
    tolerance_frac=0.0,
    up_window_s=0.0,
    up_pods=0,
    up_percent=0.0,
    down_window_s=0.0,
    down_percent=0.0,
    cooldown_s=0.0,
)
EXACT_LIMIT = (
    "Its trigger is a number of workers, which the HPA behind it must follow to the last one: `tolerance: 0` "
    "needs Kubernetes 1.35 (1.33 with the gate HPAConfigurableTolerance) and KEDA 2.18; older ones leave "
    "changes of less than 10 % undone."
)


def write_scaled_objects(targets: Sequence[ScaleTarget], autoscaler: Autoscaler) -> WrittenManifests:
    """ScaledObjects over vLLM's metrics, and the pool's timetable beside them where it has one."""
    objects = []
    for target in targets:
        role_scaler = autoscaler.of_role(target.pool.role)
        settings: KedaSettings = role_scaler.settings
        if target.scaled.least == 0 and not target.scaled.timetable:
            hpa_object.refuse_zero(autoscaler, "give it a timetable, or least 1")
        query = prometheus_queries.sum_over_pool(prometheus_queries.METRICS[settings.metric], target)
        trigger = prometheus_trigger(query, settings.per_worker, settings.activation)
        # The smallest size of a timetable has no trigger (`cron_triggers`).
        least = min((size for _, size in target.scaled.timetable), default=target.scaled.least)
        triggers = [trigger, *cron_triggers(target.scaled)]
        objects.append(scaled_object(target, role_scaler, triggers, least=least))
    files = {
        prometheus_queries.MONITORS_FILE: [prometheus_queries.pod_monitor(target) for target in targets],
        FILE: objects,
    }
    limits = [*prometheus_queries.monitors_limits(), *hpa_object.limit_lines(autoscaler)]
    if any(target.scaled.timetable for target in targets):
        limits += timetable_limits()
    return WrittenManifests(files, (*prometheus_queries.monitors_step(), apply_step()), tuple(limits))


def write_timetable(targets: Sequence[ScaleTarget], autoscaler: Autoscaler) -> WrittenManifests:
    """ScaledObjects with cron triggers alone."""
    objects = []
    for target in targets:
        least = min(size for _, size in target.scaled.timetable)
        objects.append(
            scaled_object(
                target,
                autoscaler.with_settings(FOLLOW_EXACTLY),
                cron_triggers(target.scaled) or [_constant_trigger(least)],
                least=least,
            )
        )
    return WrittenManifests({FILE: objects}, (apply_step(),), timetable_limits())


def apply_step() -> str:
    """The command that applies the ScaledObjects."""
    return f"    kubectl apply -f {FILE}   # {NEEDS}"


def timetable_limits() -> tuple[str, ...]:
    """What a user must know of a timetable: its time zone, when its workers are ready, and EXACT_LIMIT."""
    return (
        f"The timetable is of every day, in the time zone {TIME_ZONE}, and its 0:00 is the beginning of the "
        "plan's traffic: shift the times where that began at another hour, and change the time zone where "
        "its day was another. Workers are requested at the times as written; each is ready its start-up "
        "later.",
        EXACT_LIMIT,
    )


def scaled_object(
    target: ScaleTarget, autoscaler: Autoscaler, triggers: Sequence[Document], *, least: int | None = None
) -> Document:
    """The ScaledObject of one pool; `least`, if given, takes the place of the pool's own least workers."""
    settings: KedaSettings = autoscaler.settings
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": target.name},
        "spec": {
            "scaleTargetRef": target.reference,
            "pollingInterval": autoscaler.whole_seconds("poll_s", settings.poll_s, least=1, most=MOST_S),
            "cooldownPeriod": autoscaler.whole_seconds(
                "cooldown_s", settings.cooldown_s, least=0, most=MOST_S
            ),
            "minReplicaCount": target.scaled.least if least is None else least,
            "maxReplicaCount": target.scaled.most,
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": hpa_object.scaling_behavior(autoscaler, most=target.scaled.most)
                }
            },
            "triggers": list(triggers),
        },
    }


def prometheus_trigger(query: str, threshold: float, activation: float = 0.0) -> Document:
    """The trigger that asks for so many workers that the value of `query` is `threshold` per worker.

    While Prometheus has no value for the query, the pool keeps its size (`ignoreNullValues: false`).
    """
    return {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": prometheus_queries.ADDRESS,
            "query": query,
            "threshold": f"{threshold:.12g}",
            "activationThreshold": f"{activation:.12g}",
            "ignoreNullValues": "false",
        },
    }


def cron_triggers(pool: ScaledPool) -> list[Document]:
    """A trigger for each stretch of the day, except at the smallest size, which `minReplicaCount` keeps."""
    stretches = merge_entries(pool)
    if len(stretches) < 2:
        return []
    least = min(size for _, size in stretches)
    ends = [*(start_s for start_s, _ in stretches[1:]), stretches[0][0]]
    return [
        _cron_trigger(cron_time(pool, start_s), cron_time(pool, end_s), size)
        for (start_s, size), end_s in zip(stretches, ends, strict=True)
        if size > least
    ]


def merge_entries(pool: ScaledPool) -> list[tuple[int, int]]:
    """The timetable without entries that change nothing; if the size never changes, its first entry alone."""
    entries: list[tuple[int, int]] = []
    # The last entry applies until the first of the next day.
    size_before = pool.timetable[-1][1] if pool.timetable else None
    for start_s, size in pool.timetable:
        if size != size_before:
            entries.append((start_s, size))
        size_before = size
    return entries or list(pool.timetable[:1])


def cron_time(pool: ScaledPool, second: int) -> str:
    """A daily schedule of cron for this second of the day; InputError if it is within a minute."""
    if second % MINUTE_S:
        raise InputError(
            f"pool {pool.name[:100]!r}: timetable: second {second}: schedules begin at whole minutes"
        )
    minutes = second % DAY_S // MINUTE_S
    return f"{minutes % 60} {minutes // 60} * * *"


def _constant_trigger(size: int) -> Document:
    """A trigger for a size that never changes: a ScaledObject must have a trigger.

    KEDA refuses a trigger for 0 workers. In the last minute of a day `minReplicaCount` keeps the size.
    """
    return _cron_trigger("0 0 * * *", "59 23 * * *", max(size, 1))


def _cron_trigger(start: str, end: str, size: int) -> Document:
    return {
        "type": "cron",
        "metadata": {"timezone": TIME_ZONE, "start": start, "end": end, "desiredReplicas": str(size)},
    }
