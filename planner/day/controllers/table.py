"""One table of all controllers, and how a document names one.

    chosen = parse_controller("hpa", {"metric": "kv", "target": "70 %"}, "slo.yaml: day: controllers: hpa")
    controller = chosen(deployment)

A controller that runs once per pool may be set apart for prefill and decode workers: `prefill: {metric:
queue}`, `decode: {metric: kv}` within its parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from planner.day.controllers import (
    aladdin_controller,
    cron,
    dynamo_load,
    dynamo_sla,
    forecast,
    hpa,
    keda,
    knative,
    planned,
    static,
    wva,
    wva_queue,
)
from planner.day.controllers.deployment import DECODE, PREFILL, Deployment, Role
from planner.day.controllers.settings import ControllerSettings, Parameter, parameters_of, read_settings
from planner.errors import InputError
from planner.files import document_values
from planner.simulator.elastic import Controller

FIXED_BY_ROLE = ("every", "lag")  # one clock for all pools


@dataclass(frozen=True, slots=True)
class Row:
    """A controller: what it is, what it `reads` of a reading, what it `needs` to know of the deployment
    (fields of `Deployment`), the manifest `kind` that runs it, where it was read (repository at commit).

    `grid` has a few points in the parameters that matter most, as a document has them, for a study that
    tunes.
    """

    name: str
    words: str
    reads: tuple[str, ...]
    settings: type[ControllerSettings]
    build: Callable[[Sequence[Any], Deployment], Controller]
    kind: str
    source: str
    grid: tuple[Mapping[str, object], ...]
    needs: tuple[str, ...] = ()
    by_pool: bool = False

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return parameters_of(self.settings)


def _all(**given: Sequence[object]) -> tuple[Mapping[str, object], ...]:
    """Every combination of these values."""
    return tuple(dict(zip(given, point, strict=True)) for point in itertools.product(*given.values()))


_TARGETS: Mapping[str, Sequence[object]] = {
    "queue": (1, 3, 5, 10),
    "concurrency": (16, 32, 64),
    "kv": ("50 %", "70 %", "90 %"),
}
_GAUGES = ("ready", "starting", "waiting", "running", "kv_frac")
_RATE = ("arrived", "limbo")
_LENGTHS = ("input_tokens", "output_tokens")

TABLE: tuple[Row, ...] = (
    Row(
        "static",
        "the same sizes all day",
        (),
        static.StaticSettings,
        static.build,
        "Deployment replicas",
        "ours",
        (),
    ),
    Row(
        "cron",
        "sizes by the time of day",
        (),
        cron.CronSettings,
        cron.build,
        "KEDA ScaledObject (cron triggers)",
        "kedacore/keda@8b4f083, AliyunContainerService/kubernetes-cronhpa-controller",
        _all(step=("30 min", "1 h", "2 h"), headroom=("0 %", "10 %", "20 %")),
    ),
    Row(
        "hpa",
        "Kubernetes' HorizontalPodAutoscaler on a metric of the pods",
        _GAUGES,
        hpa.HpaSettings,
        hpa.build,
        "HorizontalPodAutoscaler",
        "kubernetes/kubernetes@00067268, tests@003e8629",
        tuple({"metric": name, "target": each} for name, targets in _TARGETS.items() for each in targets),
        by_pool=True,
    ),
    Row(
        "keda",
        "KEDA's ScaledObject: Prometheus and cron triggers through an HPA, and zero",
        (*_GAUGES, "limbo"),
        keda.KedaSettings,
        keda.build,
        "KEDA ScaledObject (Prometheus trigger)",
        "kedacore/keda@8b4f083",
        tuple(
            {"metric": name, "threshold": each}
            for name, targets in _TARGETS.items()
            for each in targets
            if name != "kv"
        ),
        by_pool=True,
    ),
    Row(
        "knative",
        "Knative's autoscaler on concurrency, with panic and zero",
        ("ready", "waiting", "running", "limbo"),
        knative.KnativeSettings,
        knative.build,
        "Knative Service, KServe InferenceService (autoscaling.knative.dev/target)",
        "knative/serving@98e5ef9",
        _all(target=(8, 16, 32, 64), down_delay=("0 s", "300 s")),
        by_pool=True,
    ),
    Row(
        "wva",
        "llm-d's workload-variant-autoscaler by saturation: spare KV and queue",
        (*_GAUGES, "limbo"),
        wva.WvaSettings,
        wva.build,
        "llm-d VariantAutoscaling and its HPA",
        "llm-d/llm-d-workload-variant-autoscaler@b08b1c7",
        _all(
            kv_threshold=("60 %", "80 %"),
            queue_threshold=(5, 10),
            tolerance=("0 %", "10 %"),
            up_window=("0 s", "240 s"),
        ),
    ),
    Row(
        "wva-queue",
        "the queue model that llm-d's autoscaler began with",
        (*_RATE, *_LENGTHS),
        wva_queue.WvaQueueSettings,
        wva_queue.build,
        "llm-d VariantAutoscaling and its HPA",
        "llm-d/llm-d-workload-variant-autoscaler@56a651b",
        _all(margin=(0.8, 1.0, 1.2), tolerance=("0 %", "10 %"), up_window=("0 s", "240 s")),
        needs=("engines", "ttft_s", "tpot_s"),
    ),
    Row(
        "dynamo",
        "Dynamo's planner by load: queued prompt tokens and KV in use",
        (*_GAUGES, "limbo", "input_tokens"),
        dynamo_load.DynamoSettings,
        dynamo_load.build,
        "DynamoGraphDeployment planner (optimization_target throughput or latency)",
        "ai-dynamo/dynamo@0c6da1e",
        _all(optimize=("throughput", "latency"), grace=("0 s", "60 s")),
        needs=("engines",),
    ),
    Row(
        "dynamo-sla",
        "Dynamo's planner by SLA: the next interval's load over what a worker carries",
        (*_RATE, *_LENGTHS, "ttft_s", "tpot_s", "ready"),
        dynamo_sla.DynamoSlaSettings,
        dynamo_sla.build,
        "DynamoGraphDeployment planner (optimization_target sla)",
        "ai-dynamo/dynamo@0761925, tests@002a7c3",
        _all(predictor=("constant", "seasonal"), corrected=(True, False), every=("60 s", "180 s")),
        needs=("engines", "tpot_s"),
    ),
    Row(
        "aladdin",
        "Aladdin's rule N = ceil(k r + c), with change points",
        (*_RATE, *_LENGTHS),
        aladdin_controller.AladdinSettings,
        aladdin_controller.build,
        "none: a paper's rule",
        "arXiv:2405.06856, section 5",
        _all(learn=(5, 10), threshold=(4, 8)),
        needs=("capacity",),
    ),
    Row(
        "forecast",
        "the rate forecast over what a worker carries",
        _RATE,
        forecast.ForecastSettings,
        forecast.build,
        "none: a cloud's predictive scaling",
        "Hyndman and Athanasopoulos, Forecasting: Principles and Practice, 5.2",
        _all(ahead=("300 s", "600 s", "1200 s"), hold=("300 s", "900 s")),
        needs=("capacity",),
    ),
    Row(
        "fleetplan",
        "what the plan found to be enough for such traffic, forecast for when a worker is ready",
        (*_RATE, *_LENGTHS, "ready", "waiting"),
        planned.FleetplanSettings,
        planned.build,
        "KEDA ScaledObject (Prometheus and cron triggers)",
        "ours",
        (
            *_all(headroom=("0 %", "10 %", "25 %"), hold=("120 s", "300 s"), ahead=("60 s",)),
            *_all(
                headroom=("0 %", "15 %", "30 %"), hold=("60 s", "600 s"), ahead=("60 s",), memory=("30 min",)
            ),
            *_all(headroom=("0 %", "10 %"), hold=("120 s", "600 s")),
        ),
        needs=("capacity",),
    ),
)
CONTROLLERS: Mapping[str, Row] = MappingProxyType({row.name: row for row in TABLE})


def _fields(settings: ControllerSettings) -> Iterator[tuple[str, object]]:
    return ((each.name, getattr(settings, each.name)) for each in dataclasses.fields(settings))


@dataclass(frozen=True, slots=True)
class Chosen:
    """A controller with its settings, those of prefill and decode workers apart where they were given."""

    row: Row
    settings: ControllerSettings
    by_role: Mapping[Role, ControllerSettings]

    def __call__(self, deployment: Deployment) -> Controller:
        """Raises InputError where the deployment lacks what the controller needs."""
        settings = [self.by_role.get(role, self.settings) for role in deployment.roles]
        with document_values.errors_as(InputError, f"controller {self.row.name!r}"):
            return self.row.build(settings, deployment)

    def values(self) -> dict[str, object]:
        """Every setting in the library's units, by its field; `prefill` and `decode` hold theirs."""
        apart = {str(role): dict(_fields(own)) for role, own in self.by_role.items()}
        return {**dict(_fields(self.settings)), **apart}

    def parameters(self) -> dict[str, object]:
        """What was set, unlike its default: name to value, as a document has it."""

        def unlike(settings: ControllerSettings, other: ControllerSettings) -> dict[str, object]:
            pairs = ((p, getattr(settings, p.field), getattr(other, p.field)) for p in self.row.parameters)
            return {p.name: p.shown(own) for p, own, was in pairs if own != was}

        apart = {str(role): unlike(own, self.settings) for role, own in self.by_role.items()}
        return {**unlike(self.settings, self.row.settings()), **apart}


def parse_controller(
    name: object, parameters: Mapping[str, object] | None, where: str = "controllers"
) -> Chosen:
    """What a document says of one controller; `where` leads to it.

    Raises InputError for an unknown name (with the nearest), an unknown parameter, a value out of its range,
    a metric that no engine exports.
    """
    if not isinstance(name, str) or name not in CONTROLLERS:
        hint = document_values.nearest_names(name, CONTROLLERS, 1)
        advice = f"did you mean {hint[0]!r}? " if hint else ""
        raise InputError(
            f"{where}: unknown controller {document_values.show_value(name)}; {advice}Valid: "
            f"{', '.join(CONTROLLERS)}"
        )
    row = CONTROLLERS[name]
    given = dict(document_values.check_mapping({} if parameters is None else parameters, where))
    apart: dict[Role, Mapping[str, object]] = {}
    if row.by_pool:
        for role in (PREFILL, DECODE):
            if role in given:
                apart[role] = document_values.check_mapping(given.pop(role), f"{where}: {role}")
    settings = read_settings(row.settings, given, where)
    by_role = {}
    for role, own in apart.items():
        for key in FIXED_BY_ROLE:
            if key in own:
                raise InputError(f"{where}: {role}: {key} is one for all pools; set it beside {role}")
        by_role[role] = read_settings(row.settings, own, f"{where}: {role}", over=settings)
    return Chosen(row, settings, MappingProxyType(by_role))


def parse_controllers(value: object, where: str = "controllers") -> tuple[Chosen, ...]:
    """Names ("hpa,keda", or a list), or names with parameters; each once."""
    if isinstance(value, str):
        value = [each.strip() for each in value.split(",") if each.strip()]
    if isinstance(value, list):
        twice = next((each for i, each in enumerate(value) if each in value[:i]), None)
        if twice is not None:
            raise InputError(f"{where}: {document_values.show_value(twice)} is there twice; name it once")
        value = {each if isinstance(each, str) else str(each): None for each in value}
    named = document_values.check_mapping(value, where, "hpa: {metric: kv}")
    if not named:
        raise InputError(f"{where}: names no controller; valid: {', '.join(CONTROLLERS)}")
    chosen = []
    for name, parameters in named.items():
        place = f"{where}: {name}" if parameters else where
        chosen.append(parse_controller(name, parameters, place))
    return tuple(chosen)


def settings_variants(chosen: Chosen) -> Iterator[Chosen]:
    """The settings as given, then the controller at every point of its grid, over what was given; settings of
    prefill or decode workers alone stay."""
    yield chosen
    known = {each.name: each for each in chosen.row.parameters}
    seen = [chosen.settings]
    for point in chosen.row.grid:
        changed = {known[name].field: known[name].read(value, name) for name, value in point.items()}
        try:
            settings = dataclasses.replace(chosen.settings, **changed)
        except InputError:  # at odds with what was given beside the grid
            continue
        if settings not in seen:
            seen.append(settings)
            yield dataclasses.replace(chosen, settings=settings)
