"""The controller "cron": pools have the sizes that a timetable gives for the time of day.

A timetable is a set of windows of time with a number of workers each, as in CronHPA
(AliyunContainerService/kubernetes-cronhpa-controller) and in KEDA's cron trigger. KEDA's HPA keeps a size for
five minutes more, which the controller "keda" simulates.

Without given windows there is one for every hour (`step`) of the day. Its sizes are those of the plan's
capacity table for the highest rate of this hour on any earlier day, times 1 + `headroom`. An hour that no
earlier day covers gets the sizes of the busiest hour.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.day.controllers.knowledge import CapacityTable, History, Knowledge
from planner.day.controllers.settings import ControllerSettings, setting
from planner.day.controllers.windows import Window, check_windows, read_windows, workers_at
from planner.errors import InputError
from planner.simulator.elastic import MetricsReading
from planner.units import DAY_S


@dataclass(frozen=True, slots=True)
class CronSettings(ControllerSettings):
    """The windows of the timetable, or how to make them of earlier days."""

    windows: tuple[Window, ...] = setting(
        (),
        "{from, to, workers, days}, where traffic begins on Monday at 0:00; none: made of earlier days",
        parse=read_windows,
    )
    step_s: float = setting(3600.0, "length of the windows it makes", least=60.0, most=DAY_S)
    headroom_frac: float = setting(0.0, "more traffic than on earlier days", most=10.0)
    lead_s: float = setting(600.0, "windows that it makes begin this much earlier", most=7200.0)
    every_s: float = setting(60.0, "time between looks", least=1.0, most=3600.0)

    def check(self) -> None:
        if DAY_S % self.step_s:  # Steps would begin at other times on each day.
            raise InputError(f"step: {self.step_s:g} s is no whole part of a day; 1 h and 30 min are")


def windows_from_history(
    settings: CronSettings, history: History, capacity: CapacityTable, end_s: float
) -> tuple[Window, ...]:
    """A window per step of the day, with sizes as in the module's docstring. It begins `lead_s` before the
    step, because workers take time to start. The history ends at second `end_s` of the week.
    """
    rates = history.rates_rps
    # When each bucket of the history begins, and in which step of the day.
    begins_s = end_s - history.bucket_s * np.arange(len(rates), 0, -1)
    steps = np.floor_divide(begins_s % DAY_S, settings.step_s).astype(int)
    windows = []
    for step in range(round(DAY_S / settings.step_s)):
        rates_in_step = rates[steps == step]
        # A step without history has the highest of all rates.
        highest_rps = float((rates_in_step if len(rates_in_step) else rates).max())
        sizes = capacity.sizes_for_rate(highest_rps * (1 + settings.headroom_frac))
        begin_s_of_day = (step * settings.step_s - settings.lead_s) % DAY_S
        end_s_of_day = ((step + 1) * settings.step_s) % DAY_S
        if settings.step_s + settings.lead_s >= DAY_S:  # Such a window would begin before its own end.
            begin_s_of_day, end_s_of_day = 0.0, DAY_S
        windows.append(Window(begin_s_of_day, end_s_of_day, tuple(int(size) for size in sizes)))
    return tuple(windows)


class Cron:
    """The controller: each pool has the largest size of the open windows, or else its least size."""

    lag_s = 0.0  # Cron reads only the clock, and no metrics that could be old.

    def __init__(self, settings: CronSettings, knowledge: Knowledge) -> None:
        self.every_s, self.knowledge, self.windows = settings.every_s, knowledge, settings.windows
        check_windows(settings.windows, knowledge)
        if not settings.windows:
            knowledge.require_facts("cron", "history", "capacity")
            assert knowledge.history is not None and knowledge.capacity is not None
            self.windows = windows_from_history(
                settings, knowledge.history, knowledge.capacity, knowledge.clock_s + knowledge.history.end_s
            )

    def start(self, sizes: Sequence[int]) -> None:
        """Sizes follow from the clock alone, so there is nothing to begin."""

    def sizes(self, reading: MetricsReading) -> list[int]:
        return self.knowledge.bounded_sizes(workers_at(self.windows, self.knowledge, reading.time_s))
