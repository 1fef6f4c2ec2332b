"""The metrics of an SLO, one row each. Who parses, judges, bounds, prints or draws a metric reads its row.

A metric is added by a row with the function of its values. What follows from nothing else then holds: it is
judged when a simulation has ended, it obliges a fleet to no work (so that bounds stay bounds), and every
table and chart shows it. Two things make a search quicker and are written where they are computed: the kernel
counts it while it runs (`replay.COUNTED_WHILE_RUNNING`), and `obliges` tells `required_work` what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Floats: TypeAlias = "npt.NDArray[np.float64]"
Booleans: TypeAlias = "npt.NDArray[np.bool_]"
Work = Literal["prefill", "all", "mean pace", "every gap", "nothing"]


class TaskTimes(Protocol):
    """Which requests make a task, and the times of these (planner/traffic/tasks.py)."""

    @property
    def is_last(self) -> Booleans: ...
    def turn_s(self, e2e_s: Floats) -> Floats: ...
    def total_s(self, arrival_s: Floats, e2e_s: Floats) -> Floats: ...
    def served_s(self, e2e_s: Floats) -> Floats: ...


class RequestTimes(Protocol):
    """The times of requests, (n,) each: of a simulation, of a measured run, or of idle workers.

    NaN where a request never got that far. `tbt_max_s` is a request's longest gap. `tasks` is None where no
    request waits for another.
    """

    @property
    def arrival_s(self) -> Floats: ...
    @property
    def tasks(self) -> TaskTimes | None: ...

    @property
    def input_tokens(self) -> npt.NDArray[np.int64]: ...
    @property
    def output_tokens(self) -> npt.NDArray[np.int64]: ...
    @property
    def ttft_s(self) -> Floats: ...
    @property
    def tbt_max_s(self) -> Floats: ...
    @property
    def tpot_s(self) -> Floats: ...
    @property
    def e2e_s(self) -> Floats: ...


@dataclass(frozen=True, slots=True)
class SloMetric:
    """One metric, in seconds.

    `values_s` gives each request's value (n,) and never falls when a time grows: the limits that no idle
    worker keeps rest on that. `obliges` is the work that a kept limit proves to be done in time: the prefill,
    all of a request, its tokens at a mean pace, every gap between them, or nothing that we know of. A metric
    that obliges every gap is judged over all gaps of the window, and `values_s` is then the longest.
    With `is_of_decodes` a request of one token has no value; with `is_of_tasks` only the last one of a task
    has, and where the traffic has no tasks none. Metrics `is_of_agents` are shown only where it has.
    """

    key: str
    abbreviation: str
    name: str
    sentence: str
    values_s: Callable[[RequestTimes], Floats]
    obliges: Work = "nothing"
    is_of_decodes: bool = False
    is_of_tasks: bool = False
    is_of_agents: bool = False

    def has_value(self, times: RequestTimes) -> Booleans | None:
        """(n,): which requests have a value, None for all; no gap is looked at."""
        if self.is_of_tasks:
            return times.arrival_s < times.arrival_s if times.tasks is None else times.tasks.is_last
        return times.output_tokens > 1 if self.is_of_decodes else None

    def is_shown(self, times: RequestTimes) -> bool:
        """Whether tables of all metrics have it."""
        return times.tasks is not None or not self.is_of_agents

    @property
    def is_of_gaps(self) -> bool:
        """Whether its values are gaps between tokens, not requests."""
        return self.obliges == "every gap"

    @property
    def is_pace(self) -> bool:
        """Whether it limits the time between tokens."""
        return self.obliges in ("mean pace", "every gap")

    @property
    def has_queue(self) -> bool:
        """Whether it is known to contain the wait for the first token."""
        return self.obliges in ("prefill", "all")

    @property
    def counted(self) -> str:
        """What one value belongs to, in the plural."""
        return "gaps" if self.is_of_gaps else "tasks" if self.is_of_tasks else "requests"


def _of_tasks(times: RequestTimes, *, is_served: bool) -> Floats:
    """Seconds of each task at its last request, NaN at all others."""
    tasks = times.tasks
    if tasks is None:
        return times.arrival_s + float("nan")
    return tasks.served_s(times.e2e_s) if is_served else tasks.total_s(times.arrival_s, times.e2e_s)


_ROWS = {
    row.key: row
    for row in (
        SloMetric(
            key="ttft",
            abbreviation="TTFT",
            name="time to first token",
            sentence="of requests get their first token within",
            values_s=lambda times: times.ttft_s,
            obliges="prefill",
        ),
        SloMetric(
            key="tbt",
            abbreviation="TBT",
            name="gap between tokens",
            sentence="of the gaps between tokens are at most",
            values_s=lambda times: times.tbt_max_s,
            obliges="every gap",
            is_of_decodes=True,
        ),
        SloMetric(
            key="tpot",
            abbreviation="TPOT",
            name="mean gap of a request",
            sentence="of requests have a mean gap between tokens of at most",
            values_s=lambda times: times.tpot_s,
            obliges="mean pace",
            is_of_decodes=True,
        ),
        SloMetric(
            key="e2e",
            abbreviation="E2E",
            name="end-to-end time",
            sentence="of requests are complete within",
            values_s=lambda times: times.e2e_s,
            obliges="all",
        ),
        SloMetric(
            key="turn",
            abbreviation="turn",
            name="time per turn, tools included",
            sentence="of turns end, with the tools before them, within",
            values_s=lambda times: times.e2e_s if times.tasks is None else times.tasks.turn_s(times.e2e_s),
            is_of_agents=True,
        ),
        SloMetric(
            key="task",
            abbreviation="task",
            name="time per task, tools included",
            sentence="of tasks are done within",
            values_s=lambda times: _of_tasks(times, is_served=False),
            is_of_tasks=True,
            is_of_agents=True,
        ),
        SloMetric(
            key="task_served",
            abbreviation="task without tools",
            name="time per task, tools left out",
            sentence="of tasks take along their longest path, without tools, at most",
            values_s=lambda times: _of_tasks(times, is_served=True),
            is_of_tasks=True,
            is_of_agents=True,
        ),
    )
}
METRICS: Mapping[str, SloMetric] = MappingProxyType(_ROWS)


def latency_columns() -> tuple[str, ...]:
    """The latencies in a summary of a simulation, in the order of its tables; some may be None."""
    return ("queue_s", *(f"{key}_s" for key in METRICS))
