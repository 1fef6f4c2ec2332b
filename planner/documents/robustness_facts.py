"""How robust a plan's fleet is: with fewer and more workers, with more traffic, and what breaks it.

The search computes these facts (search/evidence/robustness.py), certificate.json has them as `robustness`,
and the report draws them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.domain import Limit

Strain = Literal["traffic", "steps", "prompts"]
"""What grows: the rate of requests, the time of each step, or the length of each prompt."""
RobustnessPart = Literal["workers", "traffic", "prompts", "losses", "headroom"]
"""A part of `FleetRobustness`: its `at_workers`, `more_traffic`, prompts in `holds`, `losses`, and headroom
for traffic and longer steps, which is the rest of `holds`."""
# The first screen says whether the plan's fleet carries this much more traffic.
MORE_FRAC = 0.2


@dataclass(frozen=True, slots=True)
class Made:
    """When and by which version a plan was made."""

    date: str  # For instance 2026-11-22.
    version: str


@dataclass(frozen=True, slots=True)
class Share:
    """Share of requests (of gaps, for a limit on TBT) within a limit: in the worst scenario, in the worst of
    those that must be kept, in the median and in the best one.
    """

    limit: Limit
    least_frac: float
    needed_frac: float
    median_frac: float
    most_frac: float


@dataclass(frozen=True, slots=True)
class AtWorkers:
    """A fleet with `counts` workers per pool of the plan: the scenarios in which it keeps the SLO and each
    limit."""

    counts: tuple[int, ...]
    kept: int
    shares: tuple[Share, ...]

    @property
    def workers(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class MoreTraffic:
    """Whether the plan's fleet keeps its SLO with MORE_FRAC more traffic: on the traffic as written and, if
    the question wants scenarios, in enough of those of the test and of the search. The verdict is from `kept`
    of `scenario_count` scenarios; 0 of 0 if the traffic as written decided. The SLO has to be kept in
    `asked_frac` of scenarios; a fleet that keeps hardly more does not pass either.
    """

    is_carried: bool
    kept: int = 0
    scenario_count: int = 0
    asked_frac: float | None = None


@dataclass(frozen=True, slots=True)
class HeadroomFact:
    """The plan's fleet keeps the SLO with up to `frac` more of a strain, on the traffic as written; with more
    than that it misses the limits `missed`."""

    strain: Strain
    frac: float
    missed: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The plan's fleet on the traffic as written, without one worker of a pool that has `workers`; spare and
    spot workers are all up.
    """

    pool: str
    workers: int
    holds: bool
    missed: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class PriceTurns:
    """If a GPU's price rises by more than `more_frac` (falls, if negative), another fleet is cheaper."""

    gpu: str
    more_frac: float
    instead: str  # The label of the answer or alternative that is then cheaper.


@dataclass(frozen=True, slots=True)
class FleetRobustness:
    """How the plan's fleet does where workers, traffic, steps, prompts or prices differ from the plan's.

    `scenario_count` is the number of scenarios of a plan's test, of which `may_miss` may be missed; 0: only
    the traffic as written counts. `more_traffic` is None if not simulated. `left_out` names the parts for
    which the time was too short, or that take more requests than may be simulated for them in any time;
    `is_out_of_time` says that the time was over for one of them.
    """

    scenario_count: int
    may_miss: int
    pools: tuple[str, ...]
    at_workers: tuple[AtWorkers, ...]
    more_traffic: MoreTraffic | None
    holds: tuple[HeadroomFact, ...]
    losses: tuple[Lost, ...]
    prices: tuple[PriceTurns, ...]
    simulations: int
    left_out: tuple[RobustnessPart, ...] = ()
    is_out_of_time: bool = False
