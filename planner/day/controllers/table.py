"""The table of all controllers (autoscalers) of a day, and the parser of `controllers:` in a document.

    chosen = parse_controller("hpa", {"metric": "kv", "target": "70 %"}, "slo.yaml: day: controllers: hpa")
    controller = chosen(knowledge)

A controller that runs once per pool (`by_pool`) may have other settings for prefill than for decode workers:
`prefill: {metric: queue}`, `decode: {metric: kv}` within its parameters. Each controller's module has its
rules and settings. `PerPool` runs one scaler per pool, which sees only the metrics of its pool, as
Kubernetes' autoscalers do.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

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
from planner.day.controllers.knowledge import DECODE, PREFILL, Knowledge, is_before_traffic
from planner.day.controllers.settings import ControllerSettings, Parameter, parameters_of, read_settings
from planner.errors import InputError
from planner.files.document_values import check_mapping, did_you_mean, errors_as, show_value
from planner.fleet import Role
from planner.simulator.elastic import Controller, MetricsReading


class Scaler(Protocol):
    """Decides the size of one pool.

    `size` is `spec.replicas` of the pool's Deployment: the scaler's last decision, as `PerPool` limits it.
    """

    size: int

    def start(self, size: int) -> None: ...

    def decide(self, reading: MetricsReading) -> int: ...


class PerPool:
    """A controller made of a scaler per pool. `Knowledge.bounded_sizes` limits what the scalers decide.

    `every_s` and `lag_s` are those of `Controller` in simulator/elastic.py.
    """

    def __init__(
        self, scalers: Sequence[Scaler], knowledge: Knowledge, *, every_s: float, lag_s: float
    ) -> None:
        self.scalers, self.knowledge = tuple(scalers), knowledge
        self.every_s, self.lag_s = every_s, lag_s

    def start(self, sizes: Sequence[int]) -> None:
        for scaler, size in zip(self.scalers, sizes, strict=True):
            scaler.start(int(size))

    def sizes(self, reading: MetricsReading) -> list[int]:
        if is_before_traffic(reading):  # Without metrics a scaler changes nothing.
            return self.knowledge.bounded_sizes([scaler.size for scaler in self.scalers])
        bounded_sizes = self.knowledge.bounded_sizes([scaler.decide(reading) for scaler in self.scalers])
        for scaler, size in zip(self.scalers, bounded_sizes, strict=True):
            scaler.size = size
        return bounded_sizes


SAME_FOR_ALL_POOLS = ("every", "lag")  # All pools are decided at once, so roles cannot differ in these.


@dataclass(frozen=True, slots=True)
class ControllerRow:
    """A kind of controller, described in `words`.

    `needs` are the fields of `Knowledge` that it uses. `kind` names the manifest that runs it in production,
    `source` the repository and commit of its rules, and of their tests if another, or the paper.
    `controller(settings, knowledge)` makes one; with `by_pool` it makes a `Scaler` for one pool, and takes
    the pool's number as a third argument.

    `grid` has a few values of the parameters that matter most, as a document has them; a study that tunes
    (`settings_variants`) simulates each.
    """

    name: str
    words: str
    settings: type[ControllerSettings]
    controller: Callable[..., Any]
    kind: str
    source: str
    grid: tuple[Mapping[str, object], ...]
    needs: tuple[str, ...] = ()
    by_pool: bool = False

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return parameters_of(self.settings)


def _combinations(**values: Sequence[object]) -> tuple[Mapping[str, object], ...]:
    """Every combination of these values of parameters."""
    return tuple(dict(zip(values, each, strict=True)) for each in itertools.product(*values.values()))


# Targets of a metric per worker that tuning simulates: waiting prompts, requests, and the share of KV in use.
_TARGETS: Mapping[str, Sequence[object]] = {
    "queue": (1, 3, 5, 10),
    "concurrency": (16, 32, 64),
    "kv": ("50 %", "70 %", "90 %"),
}

TABLE: tuple[ControllerRow, ...] = (
    ControllerRow(
        name="static",
        words="the same sizes all day",
        settings=static.StaticSettings,
        controller=static.Static,
        kind="Deployment replicas",
        source="ours",
        grid=(),
    ),
    ControllerRow(
        name="cron",
        words="sizes by the time of day",
        settings=cron.CronSettings,
        controller=cron.Cron,
        kind="KEDA ScaledObject (cron triggers)",
        source="kedacore/keda@8b4f083, AliyunContainerService/kubernetes-cronhpa-controller",
        grid=_combinations(step=("30 min", "1 h", "2 h"), headroom=("0 %", "10 %", "20 %")),
    ),
    ControllerRow(
        name="hpa",
        words="Kubernetes' HorizontalPodAutoscaler on a metric of the pods",
        settings=hpa.HpaSettings,
        controller=hpa.Hpa,
        kind="HorizontalPodAutoscaler",
        source="kubernetes/kubernetes@00067268, tests@003e8629",
        grid=tuple(
            {"metric": name, "target": each} for name, targets in _TARGETS.items() for each in targets
        ),
        by_pool=True,
    ),
    ControllerRow(
        name="keda",
        words="KEDA's ScaledObject: Prometheus and cron triggers through an HPA, and zero",
        settings=keda.KedaSettings,
        controller=keda.Keda,
        kind="KEDA ScaledObject (Prometheus trigger)",
        source="kedacore/keda@8b4f083",
        grid=tuple(
            {"metric": name, "threshold": each}
            for name, targets in _TARGETS.items()
            for each in targets
            if name != "kv"
        ),
        by_pool=True,
    ),
    ControllerRow(
        name="knative",
        words="Knative's autoscaler on concurrency, with panic and zero",
        settings=knative.KnativeSettings,
        controller=knative.Knative,
        kind="Knative Service, KServe InferenceService (autoscaling.knative.dev/target)",
        source="knative/serving@98e5ef9",
        grid=_combinations(target=(8, 16, 32, 64), down_delay=("0 s", "300 s")),
        by_pool=True,
    ),
    ControllerRow(
        name="wva",
        words="llm-d's workload-variant-autoscaler by saturation: spare KV and queue",
        settings=wva.WvaSettings,
        controller=wva.Wva,
        kind="llm-d VariantAutoscaling and its HPA",
        source="llm-d/llm-d-workload-variant-autoscaler@b08b1c7",
        grid=_combinations(
            kv_threshold=("60 %", "80 %"),
            queue_threshold=(5, 10),
            tolerance=("0 %", "10 %"),
            up_window=("0 s", "240 s"),
        ),
    ),
    ControllerRow(
        name="wva-queue",
        words="the queue model that llm-d's autoscaler began with",
        settings=wva_queue.WvaQueueSettings,
        controller=wva_queue.WvaQueue,
        kind="none: llm-d's autoscaler of old",
        source="llm-d/llm-d-workload-variant-autoscaler@56a651b",
        grid=_combinations(margin=(0.8, 1.0, 1.2), tolerance=("0 %", "10 %"), up_window=("0 s", "240 s")),
        needs=("engines", "ttft_s", "tpot_s"),
    ),
    ControllerRow(
        name="dynamo",
        words="Dynamo's planner by load: queued prompt tokens and KV in use",
        settings=dynamo_load.DynamoSettings,
        controller=dynamo_load.Dynamo,
        kind="DynamoGraphDeployment planner (optimization_target throughput or latency)",
        source="ai-dynamo/dynamo@0c6da1e",
        grid=_combinations(optimize=("throughput", "latency"), grace=("0 s", "60 s")),
        needs=("engines",),
    ),
    ControllerRow(
        name="dynamo-sla",
        words="Dynamo's planner by SLA: the next interval's load over what a worker carries",
        settings=dynamo_sla.DynamoSlaSettings,
        controller=dynamo_sla.DynamoSla,
        kind="DynamoGraphDeployment planner (optimization_target sla)",
        source="ai-dynamo/dynamo@0761925, tests@002a7c3",
        grid=_combinations(
            predictor=("constant", "seasonal"), corrected=(True, False), every=("60 s", "180 s")
        ),
        needs=("engines", "tpot_s"),
    ),
    ControllerRow(
        name="aladdin",
        words="Aladdin's rule N = ceil(k r + c), with change points",
        settings=aladdin_controller.AladdinSettings,
        controller=aladdin_controller.Aladdin,
        kind="none: a paper's rule",
        source="arXiv:2405.06856, section 5",
        grid=_combinations(learn=(5, 10), threshold=(4, 8)),
        needs=("capacity",),
    ),
    ControllerRow(
        name="forecast",
        words="the rate forecast over what a worker carries",
        settings=forecast.ForecastSettings,
        controller=forecast.Forecast,
        kind="none: a cloud's predictive scaling",
        source="Hyndman and Athanasopoulos, Forecasting: Principles and Practice, 5.2",
        grid=_combinations(ahead=("300 s", "600 s", "1200 s"), hold=("300 s", "900 s")),
        needs=("capacity",),
    ),
    ControllerRow(
        name="fleetplan",
        words="what the plan found to be enough for such traffic, forecast for when a worker is ready",
        settings=planned.FleetplanSettings,
        controller=planned.Fleetplan,
        kind="KEDA ScaledObject (Prometheus and cron triggers)",
        source="ours",
        grid=(
            *_combinations(headroom=("0 %", "10 %", "25 %"), hold=("120 s", "300 s"), ahead=("60 s",)),
            *_combinations(
                headroom=("0 %", "15 %", "30 %"), hold=("60 s", "600 s"), ahead=("60 s",), memory=("30 min",)
            ),
            *_combinations(headroom=("0 %", "10 %"), hold=("120 s", "600 s")),
            *_combinations(
                headroom=("0 %",),
                hold=("60 s", "300 s"),
                ahead=("60 s",),
                floor=("50 %", "80 %", "90 %", "95 %", "100 %"),
            ),
        ),
        needs=("capacity",),
    ),
)
CONTROLLERS: Mapping[str, ControllerRow] = MappingProxyType({row.name: row for row in TABLE})


@dataclass(frozen=True, slots=True)
class ChosenController:
    """A controller with its settings; `by_role` has settings for prefill or decode workers alone, if any."""

    row: ControllerRow
    settings: ControllerSettings
    by_role: Mapping[Role, ControllerSettings]

    def __call__(self, knowledge: Knowledge) -> Controller:
        """A controller that knows `knowledge`. Raises InputError if a fact that it needs is not known."""
        row = self.row
        settings: Any = self.settings  # Any, as ControllerSettings does not declare `every_s` and `lag_s`.
        with errors_as(InputError, f"controller {row.name!r}"):
            if not row.by_pool:
                controller: Controller = row.controller(settings, knowledge)
                return controller
            scalers = [
                row.controller(self.by_role.get(role, settings), knowledge, pool)
                for pool, role in enumerate(knowledge.roles)
            ]
            return PerPool(scalers, knowledge, every_s=settings.every_s, lag_s=settings.lag_s)

    def parameters(self) -> dict[str, object]:
        """The parameters that differ from their defaults: name to value, as a document has it."""

        def changed_values(settings: ControllerSettings, base: ControllerSettings) -> dict[str, object]:
            pairs = ((p, getattr(settings, p.field), getattr(base, p.field)) for p in self.row.parameters)
            return {p.name: p.show_value(value) for p, value, base_value in pairs if value != base_value}

        by_role = {str(role): changed_values(own, self.settings) for role, own in self.by_role.items()}
        return {**changed_values(self.settings, self.row.settings()), **by_role}


def parse_controller(
    name: object, parameters: Mapping[str, object] | None, where: str = "controllers"
) -> ChosenController:
    """The controller that a document names, with its settings; `where` is its place in the document.

    Raises InputError for an unknown name (with the nearest), an unknown parameter, a value out of its range,
    a metric that no engine exports.
    """
    if not isinstance(name, str) or name not in CONTROLLERS:
        advice = did_you_mean(name, CONTROLLERS)
        raise InputError(
            f"{where}: unknown controller {show_value(name)}; {advice}Valid: {', '.join(CONTROLLERS)}"
        )
    row = CONTROLLERS[name]
    for_all = dict(check_mapping({} if parameters is None else parameters, where))
    for_role: dict[Role, Mapping[str, object]] = {}
    if row.by_pool:
        if "mixed" in for_all:
            raise InputError(
                f"{where}: mixed: only prefill and decode may be set apart; parameters without a "
                "role are of mixed pools"
            )
        for role in (PREFILL, DECODE):
            if role in for_all:
                for_role[role] = check_mapping(for_all.pop(role), f"{where}: {role}")
    settings = read_settings(row.settings, for_all, where)
    by_role = {}
    for role, role_parameters in for_role.items():
        for key in SAME_FOR_ALL_POOLS:
            if key in role_parameters:
                raise InputError(f"{where}: {role}: {key} is one for all pools; set it beside {role}")
        by_role[role] = read_settings(row.settings, role_parameters, f"{where}: {role}", base=settings)
    return ChosenController(row, settings, MappingProxyType(by_role))


def parse_controllers(value: object, where: str = "controllers") -> tuple[ChosenController, ...]:
    """The controllers that a document lists: "hpa,keda", a list, or a mapping of names to parameters.

    Raises InputError for a name that stands there twice, for no name, and as `parse_controller` does.
    """
    if isinstance(value, str):
        value = [each.strip() for each in value.split(",") if each.strip()]
    if isinstance(value, list):
        twice = next((each for i, each in enumerate(value) if each in value[:i]), None)
        if twice is not None:
            raise InputError(f"{where}: {show_value(twice)} is there twice; name it once")
        value = {each if isinstance(each, str) else str(each): None for each in value}
    parameters_by_name = check_mapping(value, where, "hpa: {metric: kv}")
    if not parameters_by_name:
        raise InputError(f"{where}: names no controller; valid: {', '.join(CONTROLLERS)}")
    chosen = []
    for name, parameters in parameters_by_name.items():
        place = f"{where}: {name}" if parameters else where
        chosen.append(parse_controller(name, parameters, place))
    return tuple(chosen)


def settings_variants(chosen: ChosenController) -> Iterator[ChosenController]:
    """The controller as it was chosen, then one for each point of its row's grid of parameters.

    Settings for prefill or decode workers alone stay as they were chosen.
    """
    yield chosen
    by_name = {each.name: each for each in chosen.row.parameters}
    yielded = [chosen.settings]
    for point in chosen.row.grid:
        changed = {by_name[name].field: by_name[name].read(value, name) for name, value in point.items()}
        try:
            settings = dataclasses.replace(chosen.settings, **changed)
        except InputError:
            # This point contradicts a chosen setting that the grid does not change.
            continue
        if settings not in yielded:
            yielded.append(settings)
            yield dataclasses.replace(chosen, settings=settings)
