"""The controller whose sizes never change: a plan without autoscaling."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.day.controllers.knowledge import Knowledge
from planner.day.controllers.settings import ControllerSettings, setting
from planner.day.controllers.windows import read_workers
from planner.errors import InputError
from planner.simulator.elastic import MetricsReading


@dataclass(frozen=True, slots=True)
class StaticSettings(ControllerSettings):
    """The sizes that never change; without any, those at the beginning stay."""

    workers: tuple[int, ...] = setting(
        (), "workers of all pools alike, or of each; none: those at the beginning", parse=read_workers
    )
    every_s: float = setting(3600.0, "time between looks", least=1.0)


class Static:
    """Decides the same sizes every time."""

    lag_s = 0.0  # No metrics are read.

    def __init__(self, settings: StaticSettings, knowledge: Knowledge) -> None:
        pools = len(knowledge.pools)
        if len(settings.workers) not in (0, 1, pools):
            raise InputError(
                f"workers: {list(settings.workers)} are {len(settings.workers)} numbers, "
                f"the fleet has {pools} pools; give one number, or one for each pool"
            )
        self.settings, self.knowledge, self.every_s = settings, knowledge, settings.every_s
        self.wanted: list[int] = []

    def start(self, sizes: Sequence[int]) -> None:
        given_sizes = self.settings.workers  # No number, one for all pools, or one for each.
        fixed_sizes = given_sizes * len(sizes) if len(given_sizes) == 1 else given_sizes or sizes
        self.wanted = self.knowledge.bounded_sizes(fixed_sizes)

    def sizes(self, reading: MetricsReading) -> list[int]:
        return self.wanted
