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
Work = Literal["prefill", "all", "mean pace", "every gap", "nothing"]


class RequestTimes(Protocol):
    """The times of requests, (n,) each: of a simulation, of a measured run, or of idle workers.

    NaN where a request never got that far. `tbt_max_s` is a request's longest gap.
    """

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
    With `is_of_decodes` a request of one token has no value.
    """

    key: str
    abbreviation: str
    name: str
    sentence: str
    values_s: Callable[[RequestTimes], Floats]
    obliges: Work = "nothing"
    is_of_decodes: bool = False

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
        return "gaps" if self.is_of_gaps else "requests"


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
    )
}
METRICS: Mapping[str, SloMetric] = MappingProxyType(_ROWS)


def latency_columns() -> tuple[str, ...]:
    """The latencies in a summary of a simulation, in the order of its tables."""
    return ("queue_s", *(f"{key}_s" for key in METRICS))
