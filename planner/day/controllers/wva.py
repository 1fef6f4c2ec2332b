"""llm-d's workload-variant-autoscaler by saturation: KV cache and queue, one worker at a time.

Source: llm-d/llm-d-workload-variant-autoscaler at b08b1c7 (2026-02-19, v0.5.1): internal/saturation/
analyzer.go (the default analyzer, by percentages) and its tests; thresholds of
config/manager/configmap-saturation-scaling.yaml; interval and HPA of charts/workload-variant-autoscaler.

Pools of one role are variants of one model. A worker is saturated at `kv_threshold` of its KV cache or
`queue_threshold` waiting prompts, each the highest of the last minute (internal/collector/registration/
saturation.go). Spare KV and spare queue are the mean distances to these thresholds over the workers that are
not saturated. If the spare KV is below `kv_spare`, or the spare queue below `queue_spare`, the cheapest pool
with workers gets one more. If both would suffice with one worker fewer, and at least two workers are not
saturated, the dearest pool loses one. Nothing is decided while workers start. The autoscaler exports the
wanted size as a metric that an HPA follows, with the chart's windows of four minutes. It does not know the
HPA's `maxReplicas`: once it wants more, wanted and present workers always differ, and it decides nothing
more.

Readings here are means over a pool, so all of its workers are saturated, or none is.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from planner.day.controllers.hpa import Behaviour, ScalingRules, external_replicas
from planner.day.controllers.knowledge import Knowledge, is_before_traffic
from planner.day.controllers.settings import setting
from planner.errors import InputError
from planner.fleet import Role
from planner.simulator.elastic import MetricsReading

LEAST_UNSATURATED = 2  # With fewer unsaturated workers none is taken away.
PEAK_S = 60.0  # The autoscaler's queries take the highest value of the last minute.
SPARE_ROUNDING = 1e-12  # Rounding errors may bring spare KV or queue below its limit by this much.


@dataclass(frozen=True, slots=True)
class WvaRules(ScalingRules):
    """How often the autoscaler decides, and the HPA that follows it with the chart's `behavior`."""

    up_window_s: float = setting(240.0, "it grows to the smallest size wanted within this time", most=3600.0)
    up_pods: int = setting(10, "most pods that are added per period")
    up_percent: float = setting(0.0, "most percent that are added per period; 0: no such limit")
    up_period_s: float = setting(150.0, "period of up_pods and up_percent", least=1.0, most=1800.0)
    down_window_s: float = setting(
        240.0, "it shrinks to the largest size wanted within this time", most=3600.0
    )
    down_pods: int = setting(10, "most pods that are taken away per period")
    down_percent: float = setting(0.0, "most percent taken away per period; 0: no such limit")
    down_period_s: float = setting(150.0, "period of down_pods and down_percent", least=1.0, most=1800.0)
    optimize_s: float = setting(
        60.0, "GLOBAL_OPT_INTERVAL: time between the autoscaler's decisions", least=1.0
    )


@dataclass(frozen=True, slots=True)
class WvaSettings(WvaRules):
    """The settings of the controller `wva`: the autoscaler's thresholds beside `WvaRules`."""

    kv_threshold_frac: float = setting(
        0.8, "a worker with this share of its KV cache in use is saturated", most=1.0
    )
    queue_threshold: float = setting(5.0, "a worker with this many waiting prompts is saturated")
    kv_spare_frac: float = setting(0.1, "a worker is added below this share of spare KV", most=1.0)
    queue_spare: float = setting(3.0, "a worker is added below this many spare places in the queue")
    optimize_s: float = setting(30.0, "time between its decisions; v0.5.1 has no other", least=1.0)

    def check(self) -> None:
        for name, spare, threshold in (
            ("kv", self.kv_spare_frac, self.kv_threshold_frac),
            ("queue", self.queue_spare, self.queue_threshold),
        ):
            if spare > threshold:
                raise InputError(f"{name}_spare: {spare:g} is above {name}_threshold, {threshold:g}")


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A worker's share of KV cache in use, and its number of waiting prompts."""

    kv_frac: float
    waiting: float


def scaling_direction(settings: WvaSettings, workers: Sequence[ReplicaLoad]) -> int:
    """By how many workers (+1, 0 or -1) the number of a model's ready workers should change."""
    if not workers:
        return 0
    kv_threshold, queue_threshold = settings.kv_threshold_frac, settings.queue_threshold
    unsaturated = [load for load in workers if load.kv_frac < kv_threshold and load.waiting < queue_threshold]
    # If all workers are saturated, nothing is spare: then one worker at both thresholds stands for them.
    counted = unsaturated or [ReplicaLoad(kv_threshold, queue_threshold)]
    count = len(counted)
    mean_kv = sum(load.kv_frac for load in counted) / count
    mean_queue = sum(load.waiting for load in counted) / count

    def is_short(load_factor: float) -> bool:
        """Whether too little is spare if every worker has `load_factor` times its load."""
        spare_kv = kv_threshold - mean_kv * load_factor
        spare_queue = queue_threshold - mean_queue * load_factor
        lacks_kv = spare_kv < settings.kv_spare_frac - SPARE_ROUNDING
        return lacks_kv or spare_queue < settings.queue_spare - SPARE_ROUNDING

    if is_short(1.0):
        return 1
    # The load of a removed worker goes to the others.
    return -1 if count >= LEAST_UNSATURATED and not is_short(count / (count - 1)) else 0


class HpaFollowed(ABC):
    """A controller in two stages: an autoscaler that exports its wanted sizes as a metric, and an HPA for
    each pool that follows the metric. `wanted` are the autoscaler's sizes, `current` those of the HPAs.
    """

    def __init__(self, rules: WvaRules, knowledge: Knowledge) -> None:
        self.rules, self.knowledge = rules, knowledge
        # Metrics are read every `every_s` and are `lag_s` old (planner/simulator/elastic.py).
        self.every_s, self.lag_s = rules.every_s, rules.lag_s
        self.behaviours = [Behaviour.from_rules(rules) for _ in knowledge.pools]
        self.start([0] * len(knowledge.pools))

    def start(self, sizes: Sequence[int]) -> None:
        """Begin a run with pools of these sizes."""
        self.current = [int(size) for size in sizes]
        self.wanted = list(self.current)
        self.due_s = 0.0
        for behaviour, size in zip(self.behaviours, self.current, strict=True):
            behaviour.start(size)

    @abstractmethod
    def optimal_sizes(self, reading: MetricsReading) -> list[int]:
        """The sizes that the autoscaler wants, for the HPAs to limit; called every `optimize_s`."""

    def sizes(self, reading: MetricsReading) -> list[int]:
        """The sizes of all pools after a reading of the metrics."""
        if is_before_traffic(reading):
            return list(self.current)
        if reading.time_s >= self.due_s:
            self.due_s = reading.time_s + self.rules.optimize_s
            self.wanted = self.optimal_sizes(reading)
        desired_sizes = []
        for i, behaviour in enumerate(self.behaviours):
            size, pool = self.current[i], self.knowledge.pools[i]
            # The HPA's target is 1 per worker, as the metric is the wanted size.
            replicas = external_replicas(self.wanted[i], size, 1.0, self.rules.tolerance_frac)
            if size:
                desired_sizes.append(behaviour.decide(reading.time_s, size, replicas, pool))
            else:  # An HPA does not act on an empty pool; the autoscaler itself wakes it.
                desired_sizes.append(self.wanted[i])
        self.current = self.knowledge.bounded_sizes(desired_sizes)
        return list(self.current)


class Wva(HpaFollowed):
    """Changes at most one pool of a role by one worker, by how saturated its workers are."""

    def __init__(self, settings: WvaSettings, knowledge: Knowledge) -> None:
        self.settings = settings
        super().__init__(settings, knowledge)

    def start(self, sizes: Sequence[int]) -> None:
        super().start(sizes)
        self.last_readings: deque[MetricsReading] = deque()  # The readings of the last PEAK_S.

    def sizes(self, reading: MetricsReading) -> list[int]:
        self.last_readings.append(reading)
        while self.last_readings[0].time_s <= reading.time_s - PEAK_S:
            self.last_readings.popleft()
        return super().sizes(reading)

    def optimal_sizes(self, reading: MetricsReading) -> list[int]:
        """The sizes that the autoscaler wants: at most one pool of a role changes, by one worker."""
        sizes = list(self.current)
        for role in dict.fromkeys(self.knowledge.roles):
            self._change_by_one(reading, role, sizes)
        return sizes

    def _change_by_one(self, reading: MetricsReading, role: Role, sizes: list[int]) -> None:
        """Change the size of one pool of this role by one worker, or leave all as they are."""
        pools = self.knowledge.pools_of_role(role)
        # Requests in limbo wait because no pool has a worker; the cheapest pool gets one for them.
        if any(self.knowledge.limbo_of(reading, i) for i in pools) and not any(sizes[i] for i in pools):
            sizes[min(pools, key=self.knowledge.price_of)] = 1
            return
        # The autoscaler decides only when its wanted size, the size of the Deployment and the number of ready
        # workers agree; until then its wanted sizes stay.
        if any(self.wanted[i] != self.current[i] or reading.ready[i] != self.current[i] for i in pools):
            for i in pools:
                sizes[i] = self.wanted[i]
            return
        change = scaling_direction(
            self.settings, [load for i in pools for load in self._peak_loads(reading, i)]
        )
        if change > 0:
            sizes[min((i for i in pools if sizes[i]), key=self.knowledge.price_of)] += 1
        elif change < 0 and (
            removable := [i for i in pools if sizes[i] > max(self.knowledge.pools[i].least, 1)]
        ):
            sizes[max(removable, key=self.knowledge.price_of)] -= 1

    def _peak_loads(self, reading: MetricsReading, pool: int) -> list[ReplicaLoad]:
        """The highest load of each worker of a pool in the readings of the last minute with as many ready
        workers as now. A reading has means over a pool, so all its workers get the same load.
        """
        ready = int(reading.ready[pool])
        if not ready:
            return []
        comparable = [each for each in self.last_readings if each.ready[pool] == ready]
        waiting = max(int(each.waiting[pool]) for each in comparable) / ready
        return [ReplicaLoad(max(float(each.kv_frac[pool]) for each in comparable), waiting)] * ready
