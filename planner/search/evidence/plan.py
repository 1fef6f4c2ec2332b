"""The plan: a fleet, its simulation, the certificate of what was proved over which fleets, alternatives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from planner.documents.certificate import Alternative, Certificate, Status, Throughput
from planner.documents.facts import Answered, KeptIn, Price, Warned
from planner.documents.robustness_facts import PlanOrigin
from planner.domain import Slo
from planner.fleet import Fleet
from planner.search.prefixes.prefix_placing import PoolPrefixes
from planner.search.problem.bill import Bill, bill_fleet
from planner.search.production.scenario_test import FleetTrial
from planner.simulator.energy import ExpectedPower, expected_power
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import Verdict
from planner.solvers.placement import NodePlacement
from planner.traffic.described import Description, WrittenDescription
from planner.traffic.sessions import session_numbers
from planner.traffic.trace import Trace
from planner.units import HOUR_S


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything that `plan` writes to a folder.

    `trace` is the simulated traffic, after scaling and windowing; `max_model_len` holds its longest request.
    `on_paper` is the cheapest fleet on the traffic and the step times as written, whose value the certificate
    has; it is None if the plan was read from a folder. `trial` keeps the scenarios in which the fleet passed
    its test, until the fleet has been simulated with the routers of the deployment targets.
    """

    status: Status
    fleet: Fleet
    slo: Slo
    trace: Trace
    traffic_note: str  # "Azure conversation scaled to 20 req/s by superpose, whole trace"
    simulation: Simulation
    verdict: Verdict
    certificate: Certificate
    alternatives: tuple[Alternative, ...]
    max_model_len: int
    prices: tuple[Price, ...]
    warnings: tuple[Warned, ...] = ()  # What a reader must know before trusting the figures.
    throughput: Throughput | None = None  # Set if it is the objective; even then `certificate` is about cost.
    placement: NodePlacement | None = None
    prefixes: tuple[PoolPrefixes, ...] = ()  # One per pool if the plan counts on prefix caches.
    on_paper: Fleet | None = None
    # The request rate that the task asks for; the rate of the drawn requests differs from it a little.
    requested_rps: float | None = None
    made: PlanOrigin | None = None  # When the plan was made, and by which version.
    trial: FleetTrial | None = field(default=None, repr=False)
    # `power` is computed once and stored here: a list, because a frozen dataclass cannot set a field later.
    _power: list[ExpectedPower | None] = field(default_factory=list, init=False, repr=False)

    @property
    def value(self) -> float:
        """The objective of the fleet that is deployed, in the objective's unit. `certificate.value` is of the
        fleet on paper.
        """
        if self.production is None or self.production.value is None:
            return self.certificate.value
        return self.production.value

    @property
    def production(self) -> Answered | None:
        """The answer that is deployed; None if the plan is on paper alone."""
        return self.certificate.find_answer("production")

    @property
    def kept_in(self) -> KeptIn | None:
        """In how many of the test's scenarios the fleet keeps the SLO; None without safety."""
        return None if self.production is None else self.production.kept_in

    @property
    def power(self) -> ExpectedPower | None:
        """The power that the fleet draws in its simulation; None if the simulation recorded no steps."""
        if not self._power:
            self._power.append(expected_power(self.fleet, self.simulation))
        return self._power[0]

    @property
    def bill(self) -> Bill:
        """What is paid for the fleet, including idle GPUs of nodes that are sold whole. Owned GPUs cost
        nothing, or their electricity if that is counted.
        """
        pays_energy = any(pool.type.gpu.energy_usd_per_kwh for pool in self.fleet.running_pools)
        return bill_fleet(self.fleet, self.placement, self.power if pays_energy else None)

    @property
    def usd_per_million_tokens(self) -> float:
        """USD per million tokens of prompts and answers, of finished requests: the bill, idle GPUs included,
        over the time that the fleet serves this traffic (`served_s`).
        """
        return self._usd_per_million(sum(self.simulation.served_tokens))

    @property
    def usd_per_million_output_tokens(self) -> float:
        """USD per million tokens of answers: the whole bill, divided by the answers' tokens only."""
        return self._usd_per_million(self.simulation.served_tokens[1])

    @property
    def agent_figures(self) -> AgentFigures | None:
        """Tasks per hour and USD per task; None for traffic without tasks."""
        return agent_figures(self.trace, self.simulation, self.bill.usd_per_h)

    def _usd_per_million(self, tokens: float) -> float:
        """The bill for the time that the fleet serves its traffic, in USD per million tokens if it serves
        `tokens` tokens in that time.
        """
        hours = served_s(self.trace, self.simulation) / HOUR_S
        return self.bill.usd_per_h * hours / tokens * 1e6 if tokens else math.inf


@dataclass(frozen=True, slots=True)
class AgentFigures:
    """What a fleet achieves for agents: the number of agents that it serves (None if the traffic does not
    say), the tasks that end per hour, and the fleet's bill per task in USD.
    """

    agents: int | None
    tasks_per_h: float
    usd_per_task: float


def agent_figures(trace: Trace, simulation: Simulation, usd_per_h: float) -> AgentFigures | None:
    """Tasks per hour and USD per task at this bill; None for traffic without tasks.

    The rate of a described agent is its tasks over the time from its first request to its last answer, and
    the fleet's rate is the sum over agents. If the traffic names no agents, the fleet's rate is all tasks
    whose requests finished, over the time that it serves the trace (`served_s`).
    """
    if simulation.tasks is None:
        return None
    described = trace.drawn_from
    agents = described.agent_count if isinstance(described, Description | WrittenDescription) else None
    if agents is None:
        total_s = simulation.tasks.total_s(simulation.arrival_s, simulation.e2e_s)
        tasks_per_s = int(np.isfinite(total_s).sum()) / served_s(trace, simulation)
    else:
        agent_of = session_numbers(trace)  # The agent of each request.
        ends_s, begins_s = np.full(agents, -np.inf), np.full(agents, np.inf)
        # A request without a last token (NaN) never ends, so its agent counts for a rate of 0.
        np.maximum.at(ends_s, agent_of, np.nan_to_num(simulation.arrival_s + simulation.e2e_s, nan=np.inf))
        np.minimum.at(begins_s, agent_of, simulation.arrival_s)
        task_counts = np.bincount(agent_of[simulation.tasks.last], minlength=agents)
        tasks_per_s = float((task_counts / (ends_s - begins_s)).sum())
    tasks_per_h = HOUR_S * tasks_per_s
    usd_per_task = usd_per_h / tasks_per_h if tasks_per_s > 0 else np.inf
    return AgentFigures(agents, tasks_per_h, usd_per_task)


def served_s(trace: Trace, simulation: Simulation) -> float:
    """How many seconds a fleet serves this traffic: the trace's duration.

    If requests wait for the answers of others, the trace has arrivals as if answers took no time. Then it is
    the simulated time from the first arrival to the last token.
    """
    if not trace.after.size:
        return trace.duration_s
    return float(simulation.end_s - simulation.arrival_s.min())
