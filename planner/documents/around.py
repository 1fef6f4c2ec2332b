"""What holds around a plan: fewer and more workers, more traffic, what breaks it. As values.

The search finds them (search/around.py), certificate.json holds them as `around`, and the report draws them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.domain import Limit

Strain = Literal["traffic", "steps", "prompts"]
Part = Literal["workers", "traffic", "prompts", "losses", "ends"]
MORE_FRAC = 0.2  # more traffic, of which the first screen says whether the plan's fleet carries it


@dataclass(frozen=True, slots=True)
class Made:
    """When and by which version a plan was made."""

    date: str  # 2026-11-22
    version: str


@dataclass(frozen=True, slots=True)
class Share:
    """Share of requests (of gaps, for a limit on these) within a limit, over the futures: in the worst, in
    the worst of those in which the SLO must be kept, in the middle one, and in the best.
    """

    limit: Limit
    least_frac: float
    needed_frac: float
    median_frac: float
    most_frac: float


@dataclass(frozen=True, slots=True)
class AtWorkers:
    """So many workers of each pool of the plan: in how many futures they keep the SLO, and each limit."""

    counts: tuple[int, ...]
    kept: int
    shares: tuple[Share, ...]

    @property
    def workers(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class MoreTraffic:
    """Whether the plan's fleet keeps its whole promise with MORE_FRAC more traffic: on what is written and,
    where futures are asked for, in the test and in enough of those that a search sees, as a plan for it would
    ask. `kept` of `futures` are those that decided; 0 of 0 where what is written did.
    """

    is_carried: bool
    kept: int = 0
    futures: int = 0


@dataclass(frozen=True, slots=True)
class Holds:
    """The plan's fleet holds with up to `frac` more of something, on what is written; then it misses."""

    strain: Strain
    frac: float
    missed: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The plan's fleet on what is written, without one worker of a pool that has `workers`, and with all the
    others: spare workers and spot workers are there.
    """

    pool: str
    workers: int
    holds: bool
    missed: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class PriceTurns:
    """From this price rise of a GPU on (a fall where below 0) another fleet costs less than the plan."""

    gpu: str
    more_frac: float
    instead: str  # label of the answer or alternative


@dataclass(frozen=True, slots=True)
class Around:
    """`futures` are of those that test a plan, of which `may_miss` may be missed; 0 futures: what is written.
    `more_traffic` is None where it was not simulated. `left_out` is what there was no time for.
    """

    futures: int
    may_miss: int
    pools: tuple[str, ...]
    at_workers: tuple[AtWorkers, ...]
    more_traffic: MoreTraffic | None
    holds: tuple[Holds, ...]
    losses: tuple[Lost, ...]
    prices: tuple[PriceTurns, ...]
    simulations: int
    left_out: tuple[Part, ...] = ()
