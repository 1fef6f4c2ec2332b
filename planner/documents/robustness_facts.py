"""How robust a plan's fleet is: with fewer and more workers, with more traffic, and what breaks it.

The search computes these facts (search/evidence/robustness.py), certificate.json has them as `robustness`,
and the report draws them.
"""

from dataclasses import dataclass
from typing import Literal

from planner.domain import Limit

Strain = Literal["traffic", "steps", "prompts"]
"""What grows: the rate of requests, the time of each step, or the length of each prompt."""
RobustnessPart = Literal["workers", "traffic", "prompts", "losses", "headroom"]
"""A part of `FleetRobustness`: `at_workers`, `more_traffic`, longer prompts in `holds`, `losses`, and
headroom: more traffic and longer steps in `holds`."""
# The first screen says whether the plan's fleet carries this much more traffic; set by hand.
MORE_FRAC = 0.2


@dataclass(frozen=True, slots=True)
class PlanOrigin:
    """When and by which version a plan was made."""

    date: str  # For instance 2026-11-22.
    version: str


@dataclass(frozen=True, slots=True)
class Share:
    """The share of requests (of gaps, for a limit on TBT) within a limit, over scenarios.

    `needed_frac` is that of the worst scenario among those that must be kept; the others are of the worst,
    the median and the best of all scenarios.
    """

    limit: Limit
    least_frac: float
    needed_frac: float
    median_frac: float
    most_frac: float


@dataclass(frozen=True, slots=True)
class AtWorkers:
    """A fleet with `counts` workers per pool: in how many scenarios the SLO is kept, and shares by limit."""

    counts: tuple[int, ...]
    kept: int
    shares: tuple[Share, ...]

    @property
    def workers(self) -> int:
        """The workers of all pools."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class MoreTraffic:
    """Whether the plan's fleet keeps its SLO with MORE_FRAC more traffic.

    It must do so on the traffic as written. If the question wants scenarios, it must also do so in at least
    `asked_frac` of those of the search, and, beyond chance, of those of the test. The verdict is from `kept`
    of `scenario_count` scenarios; 0 of 0 if the traffic as written decided.
    """

    is_carried: bool
    kept: int = 0
    scenario_count: int = 0
    asked_frac: float | None = None


@dataclass(frozen=True, slots=True)
class HeadroomFact:
    """On the traffic as written, the plan's fleet keeps the SLO with up to `frac` more of a strain.

    With more than that it misses the limits `missed`.
    """

    strain: Strain
    frac: float
    missed: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """The plan's fleet on the traffic as written, after the loss of one of a pool's `workers`. No spot worker
    is interrupted.
    """

    pool: str
    workers: int
    holds: bool
    missed: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class PriceTurn:
    """If a GPU's price rises by more than `more_frac` (falls, if negative), another fleet is cheaper."""

    gpu: str
    more_frac: float
    instead: str  # The label of the answer or alternative that is then cheaper.


@dataclass(frozen=True, slots=True)
class FleetRobustness:
    """How the plan's fleet does where workers, traffic, steps, prompts or prices differ from the plan's.

    The plan's test had `scenario_count` scenarios, of which it may miss `may_miss`; 0 if only the traffic as
    written counts. `more_traffic` is None if not simulated. `left_out` names parts that were not simulated:
    because time ran out (`is_out_of_time`), or because they would take too many requests.
    """

    scenario_count: int
    may_miss: int
    pools: tuple[str, ...]
    at_workers: tuple[AtWorkers, ...]
    more_traffic: MoreTraffic | None
    holds: tuple[HeadroomFact, ...]
    losses: tuple[WorkerLoss, ...]
    prices: tuple[PriceTurn, ...]
    simulations: int
    left_out: tuple[RobustnessPart, ...] = ()
    is_out_of_time: bool = False
