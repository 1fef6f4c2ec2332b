"""Measures the safety of a given fleet: in how many scenarios it keeps the SLO, its headroom, and the limits
that it misses first.

`plan` reports the same for its answers (search/production/scenario_test.py); this module serves fleets that
no search proposed. Fleets that are compared are simulated in the same scenarios.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.documents.facts import KeptIn
from planner.documents.task import PlanQuestion
from planner.domain import Slo
from planner.fleet import Fleet
from planner.search.oracle.fleet_oracle import Ends, Oracle
from planner.search.oracle.headroom import find_headroom
from planner.search.oracle.scenarios import TESTED, Scenarios
from planner.search.production.scenario_test import ScenarioTest
from planner.traffic.trace import Trace

MOST_REQUESTS = 300_000  # Scenarios of a longer trace would take minutes, so they are not simulated.


@dataclass(frozen=True, slots=True)
class FleetStanding:
    """How safe a fleet is. `kept_in` is None without scenarios. `ends`, the headroom with the limits missed
    beyond it, is None if the fleet misses the SLO on the given traffic. `required_frac` is the share of
    scenarios that `safety: kept_in` requires.
    """

    kept_in: KeptIn | None
    ends: Ends | None
    required_frac: float = 0.0

    @property
    def is_kept_in_enough(self) -> bool:
        """Whether the fleet keeps the SLO in enough of the simulated scenarios."""
        rounding = 1e-9
        return self.kept_in is not None and self.kept_in.kept_frac >= self.required_frac - rounding


def measure_standing(
    fleet: Fleet, requests: Trace, slo: Slo, scenarios: Scenarios | None
) -> FleetStanding | None:
    """Simulate a fleet on `requests`, whose rate and part are already chosen, and in `scenarios` if given.
    The result is None with more than MOST_REQUESTS requests, and for a fleet with disturbances or pinned
    prefixes, because scenarios have neither.
    """
    if len(requests) > MOST_REQUESTS or fleet.disturbances or fleet.pinned:
        return None
    oracle = Oracle(fleet.llm, requests, slo, fleet.network, fleet.policies)
    counts = oracle.counts(fleet)
    kept_in, required_frac = None, 0.0
    if scenarios is not None and (safety := scenarios.task.safety) is not None:
        required_frac = safety.kept_in_frac
        test = ScenarioTest(oracle, scenarios, safety, 0, lambda: False)  # There is no time limit.
        kept_in = test.count_kept(counts, test.side_scenarios)
    ends = find_headroom(oracle, counts) if oracle.holds([counts])[0] else None
    return FleetStanding(kept_in, ends, required_frac)


def scenarios_for(task: PlanQuestion, trace: Trace, seed: int) -> Scenarios | None:
    """The scenarios in which fleets are compared; None with `safety: none`. `trace` must be the whole trace,
    from which scenarios draw.
    """
    return None if task.safety is None else Scenarios(task, trace, seed, TESTED, requests=len(trace))
