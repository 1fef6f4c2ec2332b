"""KEDA's ScaledObject (keda.sh/v1alpha1), one per pool: Prometheus and cron triggers.

Fields and their ranges: kedacore/keda v2.20, config/crd/bases/keda.sh_scaledobjects.yaml; what the triggers
take: pkg/scalers/prometheus_scaler.go, cron_scaler.go. KEDA makes an HPA of it that follows the trigger which
asks for most; a cron trigger asks for `desiredReplicas` from `start` to `end`, and outside of all of them
`minReplicaCount` is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.day.autoscaling import hpa_object, prometheus_queries
from planner.day.autoscaling.autoscaler import DAY_S, MINUTE_S, Autoscaler, Document, ScaledPool, Written
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.errors import InputError

FILE = "scaled-objects.yaml"
POLL_S, COOLDOWN_S = 30, 300
MOST_S = 2**31 - 1
TIME_ZONE = "Etc/UTC"
NEEDS = "needs KEDA 2.18 or newer"
AT_ONCE = {"tolerance_frac": 0.0, "up_window_s": 0.0, "down_window_s": 0.0}
EXACT = (
    "Its trigger is a number of workers, which the HPA behind it must follow to the last one: `tolerance: 0` "
    "needs Kubernetes 1.35 (1.33 with the gate HPAConfigurableTolerance) and KEDA 2.18; older ones leave "
    "changes of less than 10 % undone."
)


def write_scaled_objects(places: Sequence[ScaleTarget], autoscaler: Autoscaler) -> Written:
    """ScaledObjects over vLLM's metrics, and the pool's timetable beside them where it has one."""
    objects = []
    for place in places:
        own = autoscaler.of_role(place.pool.role)
        pool_metric = prometheus_queries.find_metric(own)
        threshold = own.read_number("threshold", pool_metric.usual)
        if threshold <= 0:
            raise InputError(f"{own.controller}: threshold: {threshold:g}, must be > 0")
        if place.scaled.least == 0 and not place.scaled.timetable:
            hpa_object.refuse_zero(autoscaler, "give it a timetable, or least 1")
        query = prometheus_queries.sum_over_pool(pool_metric, place)
        trigger = prometheus_trigger(query, threshold, own.read_number("activation", 0.0))
        objects.append(scaled_object(place, own, [trigger, *cron_triggers(place.scaled)]))
    files = {
        prometheus_queries.MONITORS_FILE: [prometheus_queries.pod_monitor(place) for place in places],
        FILE: objects,
    }
    limits = [*prometheus_queries.monitors_limits(), *hpa_object.limit_lines(autoscaler)]
    if any(place.scaled.timetable for place in places):
        limits += timetable_limits()
    return Written(files, (*prometheus_queries.monitors_step(), apply_step()), tuple(limits))


def write_timetable(places: Sequence[ScaleTarget], autoscaler: Autoscaler) -> Written:
    """ScaledObjects with cron triggers alone."""
    objects = []
    for place in places:
        if not place.scaled.timetable:
            raise InputError(
                f"{autoscaler.controller}: pool {place.scaled.name[:100]!r}: expected a timetable, found none"
            )
        least = min(size for _, size in place.scaled.timetable)
        objects.append(
            scaled_object(
                place,
                with_defaults(autoscaler, AT_ONCE),
                cron_triggers(place.scaled) or [_constant_trigger(least)],
                least=least,
            )
        )
    return Written({FILE: objects}, (apply_step(),), timetable_limits())


def apply_step() -> str:
    return f"    kubectl apply -f {FILE}   # {NEEDS}"


def timetable_limits() -> tuple[str, ...]:
    """What a timetable is and is not."""
    return (
        f"The timetable is of every day, in the time zone {TIME_ZONE}: change the time zone where the plan's "
        "day was another. Workers are asked for at the times as written; each is ready its start-up later.",
        EXACT,
    )


def with_defaults(autoscaler: Autoscaler, parameters: dict[str, float]) -> Autoscaler:
    """The autoscaler with these parameters as defaults of those that it does not set."""
    return Autoscaler(autoscaler.controller, {**parameters, **autoscaler.parameters}, autoscaler.pools)


def scaled_object(
    place: ScaleTarget, autoscaler: Autoscaler, triggers: Sequence[Document], *, least: int | None = None
) -> Document:
    """The ScaledObject of one pool, `least` workers where that is not the pool's own."""
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": place.name},
        "spec": {
            "scaleTargetRef": place.reference,
            "pollingInterval": autoscaler.read_seconds("poll_s", POLL_S, least=1, most=MOST_S),
            "cooldownPeriod": autoscaler.read_seconds("cooldown_s", COOLDOWN_S, least=0, most=MOST_S),
            "minReplicaCount": place.scaled.least if least is None else least,
            "maxReplicaCount": place.scaled.most,
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": hpa_object.scaling_behavior(autoscaler, most=place.scaled.most)
                }
            },
            "triggers": list(triggers),
        },
    }


def prometheus_trigger(query: str, threshold: float, activation: float = 0.0) -> Document:
    """Workers so that each has `threshold` of what `query` adds up; no answer changes nothing."""
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
    """One per stretch of the timetable with more workers than its least; none where it never changes."""
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
    """The timetable without entries that change nothing, around midnight too."""
    entries: list[tuple[int, int]] = []
    last = pool.timetable[-1][1] if pool.timetable else None
    for start_s, size in pool.timetable:
        if size != last:
            entries.append((start_s, size))
        last = size
    return entries or [(start_s, size) for start_s, size in pool.timetable[:1]]


def cron_time(pool: ScaledPool, second: int) -> str:
    """A second of the day as a schedule of every day; InputError between two minutes."""
    if second % MINUTE_S:
        raise InputError(
            f"pool {pool.name[:100]!r}: timetable: second {second}: schedules begin at whole minutes"
        )
    minutes = second % DAY_S // MINUTE_S
    return f"{minutes % 60} {minutes // 60} * * *"


def _constant_trigger(size: int) -> Document:
    """A trigger that changes nothing: a ScaledObject without any trigger is invalid."""
    return _cron_trigger("0 0 * * *", "59 23 * * *", max(size, 1))


def _cron_trigger(start: str, end: str, size: int) -> Document:
    return {
        "type": "cron",
        "metadata": {"timezone": TIME_ZONE, "start": start, "end": end, "desiredReplicas": str(size)},
    }
