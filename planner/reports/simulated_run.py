"""Simulates a fleet on given requests to the end, judges it by an SLO, and summarises the results."""

from dataclasses import asdict, dataclass, replace

from planner.domain import Slo
from planner.fleet import Fleet
from planner.reports import output
from planner.simulator import Simulation, Verdict, judge_slo, simulate
from planner.simulator.energy import ExpectedPower, expected_power
from planner.simulator.utilisation import PoolUse, pool_uses
from planner.traffic.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedOutcome:
    """A simulation and its results. `verdict` is None without an SLO, `power` if no engine made a step."""

    simulation: Simulation
    verdict: Verdict | None
    power: ExpectedPower | None
    uses: tuple[PoolUse, ...]

    def summary(self) -> output.Document:
        """The output of `plan simulate --json`: plain values, with null for times of what never happened."""
        power = output.power_document(self.power)
        values = output.simulation_summary(self.simulation, self.verdict)
        return values | {"power": power, "pools": [output.plain_value(asdict(use)) for use in self.uses]}


def simulate_recorded(
    fleet: Fleet,
    requests: Trace,
    slo: Slo | None = None,
    *,
    seed: int = 0,
    closed_loop: int = 0,
    record_parts: bool = False,
) -> SimulatedOutcome:
    """Simulate `requests` on `fleet` and record every engine step.

    With `record_parts` the prompts that each step computes and the preempted requests are recorded too. A
    positive `closed_loop` keeps that many requests in flight, whatever their arrival times. `seed` is added
    to the seed of the fleet's policies, so that runs with other seeds route differently.
    """
    fleet = replace(fleet, policies=replace(fleet.policies, seed=fleet.policies.seed + seed))
    limits = slo.limits if slo is not None else ()
    every_s = None if slo is None else slo.every_s
    simulation = simulate(
        fleet,
        requests,
        limits=limits,
        record=True,
        record_parts=record_parts,
        closed_loop=closed_loop,
        every_s=every_s,
    )
    verdict = judge_slo(simulation, slo) if slo is not None else None
    return SimulatedOutcome(
        simulation, verdict, expected_power(fleet, simulation), pool_uses(fleet, simulation)
    )
