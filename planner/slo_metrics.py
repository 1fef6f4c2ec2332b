"""The metrics of an SLO, one row each, for all code that parses, judges, bounds, prints or draws them.

To add a metric, add a row with the function of its values. Then the metric is judged at the end of a
simulation, every table and chart shows it, and bounds stay valid, as they assume that it requires no work of
a fleet. Two further steps make searches faster: the kernel may count the metric while it runs
(`counted_limits.COUNTED_WHILE_RUNNING`), and `obliges` may say which work a kept limit requires
(solvers/required_work.py).
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
    """Which requests make up an agent's task, and the times of tasks (planner/traffic/tasks.py)."""

    @property
    def is_last(self) -> Booleans: ...
    def turn_s(self, e2e_s: Floats) -> Floats: ...
    def total_s(self, arrival_s: Floats, e2e_s: Floats) -> Floats: ...
    def served_s(self, e2e_s: Floats) -> Floats: ...


class RequestTimes(Protocol):
    """The times of requests, (n,) each: of a simulation, of a measured run, or on idle workers.

    A time is NaN if the request never got that far. `tbt_max_s` is a request's longest gap between two
    tokens. `tasks` is None if no request waits for the answer to another.
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

    `values_s` gives each request's value (n,). It must never fall when a time grows, because a limit that
    even an idle worker misses counts as infeasible. `obliges` is the work that must be done in time if a
    limit is kept: the prefill, the whole request, its tokens at a mean pace, every gap between tokens, or
    nothing that is known. A metric that obliges every gap is judged over all gaps, and `values_s` gives the
    longest gap of each request. With `is_of_decodes`, requests of one output token have no value. With
    `is_of_tasks`, only the last request of a task has a value. Metrics with `is_of_agents` are shown only for
    traffic with tasks.
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
        """Which requests have a value (n,); None: all. It depends on the traffic alone."""
        if self.is_of_tasks:
            no_request = times.arrival_s < times.arrival_s  # All False, without an import of NumPy.
            return no_request if times.tasks is None else times.tasks.is_last
        return times.output_tokens > 1 if self.is_of_decodes else None

    def is_shown(self, times: RequestTimes) -> bool:
        """Whether tables of all metrics show this one for the traffic of `times`."""
        return times.tasks is not None or not self.is_of_agents

    @property
    def is_of_gaps(self) -> bool:
        """Whether its values are gaps between tokens, not requests."""
        return self.obliges == "every gap"

    @property
    def is_pace(self) -> bool:
        """Whether it is a time between tokens."""
        return self.obliges in ("mean pace", "every gap")

    @property
    def has_queue(self) -> bool:
        """Whether, as `obliges` tells, its values include the wait for the first token."""
        return self.obliges in ("prefill", "all")

    @property
    def counted(self) -> str:
        """What one value belongs to, in the plural."""
        if self.is_of_gaps:
            return "gaps"
        return "tasks" if self.is_of_tasks else "requests"


def verdict_word(holds: bool, judged: int) -> Literal["kept", "missed", "not judged"]:
    """The verdict on a limit of an SLO with which `judged` values were compared."""
    if not holds:
        return "missed"
    return "kept" if judged else "not judged"


def _task_times(times: RequestTimes, *, is_served: bool) -> Floats:
    """The time of each task [s] at its last request, NaN at all others. With `is_served` it is the time of
    the requests on the longest path, without the tools between them.
    """
    tasks = times.tasks
    if tasks is None:
        return times.arrival_s + float("nan")  # An array of NaN, without an import of NumPy.
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
            values_s=lambda times: _task_times(times, is_served=False),
            is_of_tasks=True,
            is_of_agents=True,
        ),
        SloMetric(
            key="task_served",
            abbreviation="task without tools",
            name="time per task, tools left out",
            sentence="of tasks take along their longest path, without tools, at most",
            values_s=lambda times: _task_times(times, is_served=True),
            is_of_tasks=True,
            is_of_agents=True,
        ),
    )
}
METRICS: Mapping[str, SloMetric] = MappingProxyType(_ROWS)


def metric_label(name: str) -> str:
    """A metric or a limit by its name in tables: "TTFT" for ttft, "chat TTFT p90" for chat ttft p90."""
    *words, last = name.split(" ")
    if last in METRICS:
        return " ".join((*words, METRICS[last].abbreviation))
    if words and words[-1] in METRICS:
        words[-1] = METRICS[words[-1]].abbreviation
    return " ".join((*words, last))


def latency_columns() -> tuple[str, ...]:
    """The keys of the latencies in the summary of a simulation, in the order of its tables."""
    return ("queue_s", *(f"{key}_s" for key in METRICS))
