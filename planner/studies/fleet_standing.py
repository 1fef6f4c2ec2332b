"""The safety of a given fleet: how many scenarios keep the SLO, its headroom, and the limits missed first.

`plan` reports the same of its answers (search/production/scenario_test.py); this module does so for a fleet
that no search proposed. Fleets that are compared are simulated in the same scenarios.
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
    """`kept_in` is None without scenarios, and `ends` where the fleet misses the SLO on the given traffic.
    `required_frac` is the share of scenarios that `safety: kept_in` requires.
    """

    kept_in: KeptIn | None
    ends: Ends | None
    required_frac: float = 0.0

    @property
    def is_kept_in_enough(self) -> bool:
        """Whether enough of the simulated scenarios keep the SLO. Their number is fixed in advance."""
        return self.kept_in is not None and self.kept_in.kept_frac >= self.required_frac - 1e-9


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
        test, required_frac = ScenarioTest(oracle, scenarios, safety, 0, lambda: False), safety.kept_in_frac
        kept_in = test.count_kept(counts, test.side_scenarios)
    return FleetStanding(
        kept_in, find_headroom(oracle, counts) if oracle.holds([counts])[0] else None, required_frac
    )


def scenarios_for(task: PlanQuestion, trace: Trace, seed: int) -> Scenarios | None:
    """The scenarios in which fleets are compared; None with `safety: none`. `trace` is the whole trace as it
    was read.
    """
    return None if task.safety is None else Scenarios(task, trace, seed, TESTED, requests=len(trace))
