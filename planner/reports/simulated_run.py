"""Simulates a fleet on given requests to the end, judges it by an SLO, and sums the results up."""

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
        """The output of `plan simulate --json`: plain values; the time of what never happened is null."""
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
    """Simulate `requests` on `fleet` with every step recorded; `record_parts` also keeps which prompts a step
    computes and which requests are preempted. With `closed_loop` that many requests are in flight, whenever
    they arrive.

    `seed` is added to the seed of the fleet's policies, so that runs with other seeds route differently.
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
