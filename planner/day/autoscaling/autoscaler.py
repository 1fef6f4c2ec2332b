"""A controller that was simulated, as manifests deploy it: its settings, what it knew, and for each pool how
its size may change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner import units
from planner.day.controllers.cron import Cron
from planner.day.controllers.keda import KedaSettings
from planner.day.controllers.knowledge import Knowledge
from planner.day.controllers.settings import ControllerSettings
from planner.day.controllers.static import Static
from planner.day.controllers.table import ChosenController
from planner.day.controllers.windows import Window, format_clock
from planner.errors import InputError
from planner.fleet import Fleet, Role

Document = dict[str, Any]
DAY_S, MINUTE_S = int(units.DAY_S), 60  # Whole seconds, as manifests write them.
WEEK_DAYS = 7
USUAL_DRAIN_S = 3600.0  # Manifests need a limit on draining; this one if the simulation had none.


@dataclass(frozen=True, slots=True)
class ScaledPool:
    """How one pool of the fleet may change: `least` to `most` workers, `size` at the beginning.

    `timetable` has pairs (second of the day, workers from then on), in order; the last one applies until the
    first of the next day. A worker is ready `start_s` after the autoscaler requests it; a removed worker has
    `drain_s` to finish its requests.
    """

    name: str
    role: Role
    least: int
    most: int
    size: int
    timetable: tuple[tuple[int, int], ...]
    start_s: float
    drain_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Autoscaler:
    """A controller, what it knew in the simulation, and the pools that it scales, in the fleet's order."""

    chosen: ChosenController
    knowledge: Knowledge
    pools: tuple[ScaledPool, ...]

    @property
    def controller(self) -> str:
        """The controller's name in the table of controllers."""
        return self.chosen.row.name

    @property
    def settings(self) -> Any:
        """The settings of this controller, of a class of its own (planner/day/controllers)."""
        return self.chosen.settings

    def with_settings(self, settings: ControllerSettings) -> Autoscaler:
        """The same autoscaler with these settings."""
        return replace(self, chosen=replace(self.chosen, settings=settings))

    def of_role(self, role: Role) -> Autoscaler:
        """The same autoscaler with the settings for pools of one role."""
        return self.with_settings(self.chosen.by_role.get(role, self.chosen.settings))

    def whole_seconds(self, name: str, value_s: float, *, least: int, most: int) -> int:
        """The value of the setting `name`, rounded up to whole seconds. Raises InputError unless it is from
        `least` to `most`, which the manifest's field allows.
        """
        whole_s = math.ceil(value_s)
        if not least <= whole_s <= most:
            raise InputError(
                f"{self.controller}: {name}: {whole_s} s, and its manifest holds {least} to {most} s"
            )
        return whole_s


@dataclass(frozen=True, slots=True)
class WrittenManifests:
    """YAML documents by path, and lines of Markdown for README.md: how to apply them, and what the simulated
    controller does that these manifests do not.
    """

    files: dict[str, list[Document]]
    instructions: tuple[str, ...] = ()
    limitations: tuple[str, ...] = ()


def autoscaler_of(chosen: ChosenController, knowledge: Knowledge, fleet: Fleet) -> Autoscaler:
    """The autoscaler that does what a chosen controller does; the pools of `fleet` have their first sizes.

    Raises InputError where the controller lacks what it needs, or has windows for some days of a week alone.
    """
    sizes: Sequence[int] = [pool.count for pool in fleet.pools]
    controller = chosen(knowledge)  # A ChosenController makes a controller when it is called.
    if isinstance(controller, Static):
        # A static controller asks for its sizes at once, so its autoscaler begins with them.
        controller.start(sizes)
        sizes = controller.wanted
    # `cron` makes windows of earlier days if none were given.
    timetable = controller.windows if isinstance(controller, Cron) else ()
    pools = []
    for i, (pool, elastic, size) in enumerate(zip(fleet.pools, knowledge.pools, sizes, strict=True)):
        settings = chosen.by_role.get(pool.role, chosen.settings)
        windows = settings.cron if isinstance(settings, KedaSettings) else timetable
        pools.append(
            ScaledPool(
                pool.name,
                pool.role,
                elastic.least,
                elastic.most,
                int(size),
                timetable_of(windows, i, least=elastic.least, most=elastic.most) if windows else (),
                start_s=elastic.start_s,
                drain_s=elastic.drain_limit_s if math.isfinite(elastic.drain_limit_s) else USUAL_DRAIN_S,
            )
        )
    return Autoscaler(chosen, knowledge, tuple(pools))


def timetable_of(
    windows: Sequence[Window], pool: int, *, least: int, most: int
) -> tuple[tuple[int, int], ...]:
    """The timetable of pool number `pool` for `ScaledPool`: at each time the largest size among the windows
    that contain this time, clamped to `least` and `most`.

    Raises InputError for windows on some days of the week only, because a timetable is the same every day.
    """
    for window in windows:
        if (days := len(set(window.days))) < WEEK_DAYS:
            clocks = f"{format_clock(window.begin_s)} to {format_clock(window.end_s)}"
            raise InputError(
                f"windows: {clocks} is of {days} days of the week; manifests are written of daily windows "
                "alone"
            )
    # Sizes change only where a window begins or ends. Windows are daily, so Monday stands for every day.
    edges_s = {int(edge_s) % DAY_S for window in windows for edge_s in (window.begin_s, window.end_s)}
    rows = []
    for time_s in sorted(edges_s):
        size = max((window.workers_of(pool) for window in windows if window.contains(time_s)), default=0)
        rows.append((time_s, min(max(size, least), most)))
    return tuple(rows)
