"""What manifests need to know of a plan's autoscaler: the controller, its parameters, and for each pool how
its size may change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner import units
from planner.day.controllers.windows import Window, format_clock
from planner.errors import InputError
from planner.fleet import Role
from planner.manifests import engine_command

Document = dict[str, Any]
DAY_S, MINUTE_S = int(units.DAY_S), 60  # Whole seconds, as manifests write them.
WEEK_DAYS = 7
LABEL_CHARS = 100  # An error quotes at most this much of a pool's name.
LEAST_QUANTITY = 0.001  # Kubernetes writes quantities in thousandths.


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
    timetable: tuple[tuple[int, int], ...] = ()
    start_s: float = 0.0
    drain_s: float = 90.0

    def __post_init__(self) -> None:
        # The name comes from the user's file, where it may be long or have several lines.
        label = f"pool {engine_command.one_line(self.name)[:LABEL_CHARS]}"
        if not 0 <= self.least <= self.most or self.most < 1:
            raise InputError(
                f"{label}: least {self.least} and most {self.most}: must be 0 <= least <= most, and most >= 1"
            )
        if not self.least <= self.size <= self.most:
            raise InputError(f"{label}: begins with {self.size} workers, must be {self.least} to {self.most}")
        times_s = [time_s for time_s, _ in self.timetable]
        if times_s != sorted(set(times_s)) or any(not 0 <= time_s < DAY_S for time_s in times_s):
            raise InputError(
                f"{label}: timetable: expected seconds of the day that rise, 0 to {DAY_S - 1}, "
                f"found {times_s}"
            )
        for _, size in self.timetable:
            if not self.least <= size <= self.most:
                raise InputError(f"{label}: timetable: {size} workers, must be {self.least} to {self.most}")
        for name, value_s in (("start_s", self.start_s), ("drain_s", self.drain_s)):
            if not (value_s >= 0 and math.isfinite(value_s)):
                raise InputError(f"{label}: {name} is {value_s:g}, must be finite and >= 0")


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """A controller by its name in the table of controllers, its parameters in SI units, and its pools.

    Parameters are named as the fields of the controller's settings (planner/day/controllers/). The parameters
    in a mapping under `prefill` or `decode` apply to that role only. Some controllers have more:

        fleetplan, forecast, aladdin: rates_rps, R rates, and sizes, R rows with the size of each pool, the
                                      plan's capacity table
        dynamo-sla:                   ttft_s and tpot_s, the limits of the SLO
        fleetplan:                    rules (by_load.PoolRule) and nodes (node_filling.RentedNode or None),
                                      one of each pool
    """

    controller: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    pools: tuple[ScaledPool, ...] = ()

    def of_role(self, role: Role) -> Autoscaler:
        """The same autoscaler with the parameters for pools of one role: those under the role's name override
        the others. It keeps the pools of all roles. Raises InputError where no mapping is under that name.
        """
        role_parameters = self.parameters.get(role)
        if role_parameters is None:
            return self
        if not isinstance(role_parameters, Mapping):
            raise InputError(f"{self.controller}: {role}: expected parameters, found {role_parameters!r}")
        return Autoscaler(self.controller, {**self.parameters, **role_parameters}, self.pools)

    def read_number(self, name: str, default: float) -> float:
        """The parameter `name`, or `default` where it is missing. Raises InputError unless it is a finite
        number.
        """
        value = self.parameters.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InputError(f"{self.controller}: {name}: expected a finite number, found {value!r}")
        return float(value)

    def read_text(self, name: str, default: str) -> str:
        """The parameter `name`, or `default` where it is missing. Raises InputError unless it is a text."""
        value = self.parameters.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise InputError(f"{self.controller}: {name}: expected text, found {value!r}")
        return value

    def read_seconds(self, name: str, default: float, *, least: int, most: int) -> int:
        """The parameter `name`, or `default` where it is missing, rounded up to whole seconds. Raises
        InputError unless it is from `least` to `most`, which the manifest's field allows.
        """
        value_s = math.ceil(self.read_number(name, default))
        if not least <= value_s <= most:
            raise InputError(
                f"{self.controller}: {name}: {value_s} s, and its manifest holds {least} to {most} s"
            )
        return value_s


def timetable_of(
    windows: Sequence[Window], pool: int, *, least: int, most: int
) -> tuple[tuple[int, int], ...]:
    """The timetable of pool number `pool` for `ScaledPool`: at each time the largest size among the windows
    that contain this time, clamped to `least` and `most`. Without windows it has one row, at midnight.

    Raises InputError for windows on some days of the week only, because a timetable is the same every day.
    """
    for window in windows:
        if (days := len(set(window.days))) < WEEK_DAYS:
            clocks = f"{format_clock(window.begin_s)} to {format_clock(window.end_s)}"
            raise InputError(
                f"windows: {clocks} is of {days} days of the week; manifests are written of daily windows "
                "alone"
            )
    edges_s = {int(edge_s) % DAY_S for window in windows for edge_s in (window.begin_s, window.end_s)}
    rows = []
    # Sizes change only where a window begins or ends. Windows are daily, so Monday stands for every day.
    for time_s in sorted(edges_s or {0}):
        size = max((window.workers_of(pool) for window in windows if window.contains(time_s)), default=0)
        rows.append((time_s, min(max(size, least), most)))
    return tuple(rows)


def format_quantity(value: float, what: str) -> str:
    """A Kubernetes quantity, whole or in thousandths (1500m). Raises InputError, beginning with `what`, for
    less than one thousandth.
    """
    if value < LEAST_QUANTITY:
        raise InputError(f"{what}: {value:g}, must be at least 0.001")
    thousandths = round(value * 1000)
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


@dataclass(frozen=True, slots=True)
class WrittenManifests:
    """YAML documents by path, and lines of Markdown for README.md: how to apply them, and what the simulated
    controller does that these manifests do not.
    """

    files: dict[str, list[Document]]
    instructions: tuple[str, ...] = ()
    limitations: tuple[str, ...] = ()
