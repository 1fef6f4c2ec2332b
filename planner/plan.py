"""The answer: a fleet, what was simulated, what was proved over what, and the alternatives it beat."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.domain import Slo
from planner.fleet import Fleet
from planner.search.prefix_placing import PoolPrefixes
from planner.simulator.energy import ExpectedPower, expected_power
from planner.simulator.metrics import Verdict
from planner.simulator.repeats import Repeats
from planner.simulator.replay import Simulation
from planner.solvers.placement import Placement
from planner.traffic.trace import Trace


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The planned fleet with one worker of one pool taken away, and why it fails."""

    pool: str
    worker_type: str
    holds: bool
    reason: str  # "ttft p90: 84.1 % of requests within 2.00 s, 90 % needed"


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to serve the same traffic, and what it would cost.

    `label` is for people: "one GPU type only", "mixed pools only", "runner-up". `fleet` is None where no
    such fleet was found; `note` then says why. `objective` is in the unit of the plan's objective.
    `at_least` marks an objective that is no price but a lower bound: none of that kind that costs less holds.
    It has no fleet, and is never to be shown as if one cost so much.
    """

    label: str
    fleet: Fleet | None
    objective: float
    note: str
    at_least: bool = False

    @property
    def is_priced(self) -> bool:
        """Whether `objective` is what a fleet costs."""
        return math.isfinite(self.objective) and not self.at_least


@dataclass(frozen=True, slots=True)
class Refuted:
    """A worker type, or pair of types, of level 0 that cannot beat the plan, and how we know."""

    label: str
    reason: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was found, what bounds it, and what was assumed. Written as certificate.json.

    `bound` is the policy-free lower bound of the master problem over all fleets; `level0` the optimum over
    fleets with one worker type per pool (infinite if none was found). `level0_exact`: each of the `cheaper`
    fleets of level 0 was simulated and fails, or has too few workers for the work that the SLO obliges, so
    nothing was taken for granted. Else, where `level0_exhausted`, the search came to its end by what it
    `assumed`, sentences with how often each was false; `cheaper_simulated` is how many were simulated all the
    same. `cheaper` is None where there are fleets without end. `shadow_prices`
    say by how much a GPU, Watt or USD/h more of a limit lowers the bound, workers not being whole: the duals
    of its linear program, in the objective's unit. Gaps are shares of the plan's objective. `universe` says
    what level 0 ranged over.
    """

    objective: str  # cost | power | gpus
    unit: str  # "USD/h", "W", "GPUs"
    value: float
    bound: float
    level0: float
    level0_exact: bool
    beyond_exact: bool  # every cheaper fleet of any mix of types was simulated
    universe: tuple[str, ...]
    refuted: tuple[Refuted, ...]
    neighbours: tuple[Neighbour, ...]
    binding: tuple[str, ...]  # sentences: what binds, and what relaxing it would save
    assumptions: tuple[str, ...]
    simulations: int
    cuts: int
    seed: int
    shadow_prices: Mapping[str, float] = field(default_factory=dict)  # by limit, of the relaxed bound
    repeats: tuple[Repeats, ...] = ()  # the plan's fleet on other draws, under histories of interruptions
    level0_exhausted: bool = True
    cheaper: int | None = 0
    cheaper_simulated: int = 0
    assumed: tuple[str, ...] = ()

    @property
    def gap_frac(self) -> float:
        return (self.value - self.bound) / self.value if self.value else 0.0

    @property
    def level0_gap_frac(self) -> float:
        """How much the plan saves against the best fleet of level 0 (0 if it is that fleet)."""
        return (self.level0 - self.value) / self.level0 if 0 < self.level0 < math.inf else 0.0


@dataclass(frozen=True, slots=True)
class Throughput:
    """The most traffic that the limits allow at level 0, and the next rate, which no fleet there carries."""

    rate_rps: float
    refuted_rps: float


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything that `plan` writes down.

    `trace` is what was simulated, after scaling and windowing; `max_model_len` holds its longest request.
    `status` is "certified" or, if the time limit came first, "best found".
    """

    status: str
    fleet: Fleet
    slo: Slo
    trace: Trace
    traffic_note: str  # "Azure conversation scaled to 20 req/s by superpose, whole trace"
    simulation: Simulation
    verdict: Verdict
    certificate: Certificate
    alternatives: tuple[Alternative, ...]
    max_model_len: int
    prices_note: str
    warnings: tuple[str, ...] = ()  # what a reader must know before trusting the figures
    throughput: Throughput | None = None  # where that was the objective; the certificate is about cost
    placement: Placement | None = None
    prefixes: tuple[PoolPrefixes, ...] = ()  # where the plan counts on prefix caches

    @property
    def power(self) -> ExpectedPower | None:
        """What the fleet draws in its simulation; None where that kept no record of its steps."""
        return expected_power(self.fleet, self.simulation)

    @property
    def usd_per_million_tokens(self) -> float:
        """Price of the fleet, for as long as it serves (`served_s`), over its tokens, prompts and answers."""
        return self._usd_per_million(self.trace.input_tokens.sum() + self.trace.output_tokens.sum())

    @property
    def usd_per_million_output_tokens(self) -> float:
        return self._usd_per_million(self.trace.output_tokens.sum())

    def _usd_per_million(self, tokens: float) -> float:
        hours = served_s(self.trace, self.simulation) / 3600
        return float(self.fleet.price_usd_per_h * hours / tokens * 1e6)


def served_s(trace: Trace, simulation: Simulation) -> float:
    """How long this traffic keeps a fleet: the trace's duration; where requests wait for others, whose
    arrivals as if answers took no time say little of it, from the first arrival to the last token.
    """
    if not trace.after.size:
        return trace.duration_s
    return float(simulation.end_s - simulation.arrival_s.min())
