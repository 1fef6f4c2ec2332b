"""Measures the safety of a given fleet: in how many scenarios it keeps the SLO, its headroom, and the limits
that it misses first.

`plan` reports the same for its answers (search/production/scenario_test.py); this module serves fleets that
no search proposed. Fleets that are compared go through the same scenarios, each until its test decides.
"""

from dataclasses import dataclass

from planner.documents.facts import KeptIn
from planner.documents.task import PlanQuestion
from planner.domain import Slo
from planner.fleet import Fleet
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.headroom import find_headroom
from planner.search.oracle.scenarios import TESTED, Scenarios
from planner.search.oracle.verdict_cache import MeasuredHeadroom
from planner.search.production.scenario_test import ScenarioTest, is_test_passed
from planner.traffic.trace import Trace

MOST_REQUESTS = 300_000  # Scenarios of a longer trace would take minutes, so they are not simulated.


@dataclass(frozen=True, slots=True)
class FleetSafety:
    """How safe a fleet is. `kept_in` is the result of the test in scenarios, None without scenarios, and
    `is_kept_in_enough` says whether the fleet passes this test. `measured_headroom` is None if the fleet
    misses the SLO on the given traffic.
    """

    kept_in: KeptIn | None
    measured_headroom: MeasuredHeadroom | None
    is_kept_in_enough: bool = False


def measure_safety(fleet: Fleet, trace: Trace, slo: Slo, scenarios: Scenarios | None) -> FleetSafety | None:
    """Simulate a fleet on `trace`, as scaled and cut by the question, and in `scenarios` if given.

    The result is None with more than MOST_REQUESTS requests, and for a fleet with disturbances or pinned
    prefixes, because scenarios have neither.
    """
    # Disturbances (workers that stop for a time) and pinned prefixes belong to this one trace.
    if len(trace) > MOST_REQUESTS or fleet.disturbances or fleet.pinned:
        return None
    oracle = Oracle(fleet.llm, trace, slo, fleet.network, fleet.policies)
    counts = oracle.counts(fleet)
    kept_in, is_kept = None, False
    safety = None if scenarios is None else scenarios.task.safety
    if scenarios is not None and safety is not None:
        # No search has seen a scenario of the kind TESTED for this fleet, so the test begins with the first.
        test = ScenarioTest(oracle, scenarios, safety, first=0, out_of_time=lambda: False)
        kept_in = test.decide(counts)
        is_kept = is_test_passed(kept_in, safety)
    measured_headroom = find_headroom(oracle, counts) if oracle.holds(counts) else None
    return FleetSafety(kept_in, measured_headroom, is_kept)


def scenarios_for(task: PlanQuestion, trace: Trace, seed: int) -> Scenarios | None:
    """The scenarios in which fleets are compared; None with `safety: none`.

    `trace` must be the whole trace: scenarios draw from it, and are about as long.
    """
    return None if task.safety is None else Scenarios(task, trace, seed, TESTED, requests=len(trace))
