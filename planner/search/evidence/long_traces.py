"""Plans a trace that is too long to be searched whole: the search uses its busiest part, and the plan is
simulated on all of it.

A search simulates hundreds of fleets, and a search for production simulates each fleet in dozens of
scenarios. So the search uses the part of the trace with the most tokens. The fleet that it finds is then
simulated once on the whole trace. If it fails there, the part in which most requests are late is planned
instead, and so on: at most MOST_ROUNDS parts are planned.

A trace is too long if it has more than LONG_REQUESTS requests (for production, a share of these), or if
WHOLE_SIMULATIONS simulations of it would take longer than the time limit. How long a simulation takes is
estimated and not measured, so that equal questions get equal answers.

A fleet that keeps a percentile in the busiest part may be larger than the whole trace needs, because over the
whole trace the late requests of a busy hour are few among many. So, without `safety`, smaller fleets are then
simulated on the whole trace while time is left, and the report says what the smallest that holds would save.
The plan stays the fleet of the busiest part.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.facts import OverTheWhole
from planner.documents.task import PlanQuestion
from planner.domain import Slo
from planner.fleet import Fleet
from planner.search.evidence.findings import outcome_of
from planner.search.evidence.plan import Plan
from planner.search.oracle.deterministic_parallel import charge_effort
from planner.search.oracle.work_clock import is_over, now_s, wall_deadline_s
from planner.search.problem.bill import bill_fleet, bought_pools
from planner.search.problem.plan_problem import Progress
from planner.simulator.replay import simulate_until
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import judge_slo, keeps_all
from planner.simulator.streaming_requests import OutOfTime
from planner.traffic.scaling import find_busiest_window
from planner.traffic.trace import Trace, window_numbers
from planner.units import show_clock, show_s, show_span

# Traces with more requests are planned by their busiest part. (LONG_REQUESTS of streaming_requests.py is
# another limit, above which a simulation reads its requests piece by piece.)
LONG_REQUESTS = 2_000_000
# For production the limit is this share of LONG_REQUESTS: every fleet is simulated in dozens of scenarios.
IN_SCENARIOS_FRAC = 0.25
# A part has at most this many requests at the trace's mean rate; the busiest part has more.
PART_REQUESTS = 200_000
# At most this many parts are planned, one after the other.
MOST_ROUNDS = 3
# An estimate of the seconds per request that simulating and recording the whole trace takes.
REQUEST_S = 2e-6
# A trace is searched whole only if the time limit allows this many simulations of it. A part is so short that
# there is time for twice as many simulations of the part.
WHOLE_SIMULATIONS = 20
# The time kept for the simulation on the whole trace is this many times its estimate, because the machine may
# do other work.
CHECK_TIMES = 1.5
# A part has at least this many requests at the trace's mean rate, however short the time limit is.
LEAST_REQUESTS = 20_000

PlanPart = Callable[[Trace, float], Plan]
"""Plans a trace within the given seconds."""


@dataclass(frozen=True, slots=True)
class _BusyPart:
    """A part of the trace, with its arrivals counted from `from_s`, where it begins in the whole."""

    trace: Trace
    from_s: float


def part_requests(seconds: float) -> int:
    """How many requests a part has at the trace's mean rate, if the search has a time limit of `seconds`."""
    most_in_time = seconds / (2 * WHOLE_SIMULATIONS * REQUEST_S)
    # If PART_REQUESTS is below LEAST_REQUESTS, PART_REQUESTS decides.
    return max(int(min(most_in_time, PART_REQUESTS)), min(LEAST_REQUESTS, PART_REQUESTS))


def is_too_long(task: PlanQuestion, trace: Trace, seconds: float = math.inf) -> bool:
    """Whether a trace is planned by its busiest part.

    Yes if the trace is too long to be searched whole within `seconds`, and its requests are used as they
    are: not drawn from a description, not scaled to a rate, not cut to a window, not scaled by the search for
    the most traffic, and without sessions and prefixes.
    """
    most_requests = LONG_REQUESTS * (1.0 if task.safety is None else IN_SCENARIOS_FRAC)
    takes_too_long = len(trace) * REQUEST_S * WHOLE_SIMULATIONS > seconds
    # A part of more than half of the trace would save little.
    is_worth_a_part = len(trace) > 2 * part_requests(seconds)
    return (
        (len(trace) > most_requests or (takes_too_long and is_worth_a_part))
        and task.described is None
        and task.rate_rps is None
        and (task.window or "whole") == "whole"
        and task.objective != "throughput"
        and not (trace.after.size or trace.has_prefixes)
    )


def searched_requests(task: PlanQuestion, trace: Trace, seconds: float) -> int:
    """About how many requests one simulation of the search has: those of a part or of the whole trace."""
    return part_requests(seconds) if is_too_long(task, trace, seconds) else len(trace)


def plan_by_parts(
    task: PlanQuestion, trace: Trace, plan_part: PlanPart, *, seconds: float, progress: Progress
) -> Plan:
    """The plan for a trace that `is_too_long`; `plan_part` plans one part of it. This takes at most `seconds`
    on the search's clock, unless `plan_part` exceeds its time.

    If no plan keeps the SLO on the whole trace, or there was no time to simulate it, the last plan is
    returned as "best found", with a warning that says so.
    """
    deadline = now_s() + seconds
    length_s = trace.duration_s * part_requests(seconds) / len(trace)
    progress(f"looking for the busiest {show_span(length_s)} of {len(trace):,} requests")
    part = _part_from(trace, float(trace.arrival_s[find_busiest_window(trace, length_s)]), length_s)
    for attempt in range(1, MOST_ROUNDS + 1):
        left_s = max(deadline - now_s(), 0.0)
        check_s = min(CHECK_TIMES * len(trace) * REQUEST_S, left_s / 2)
        plan = plan_part(part.trace, left_s - check_s)
        over_whole = OverTheWhole(
            requests=len(trace),
            part_requests=len(part.trace),
            part_from_s=part.from_s,
            part_s=part.trace.duration_s,
            attempts=attempt,
        )
        progress(f"simulating the plan on all {len(trace):,} requests")
        simulation = _simulate_whole(plan.fleet, trace, plan.slo, deadline)
        if simulation is None:
            break
        outcome = outcome_of(judge_slo(simulation, plan.slo), plan.slo)
        over_whole = replace(over_whole, outcome=outcome)
        # Where the next part begins, if the plan does not hold.
        from_s = part.from_s if outcome.holds else _worst_part_start_s(simulation, plan.slo, length_s)
        # The next simulation needs as much memory as this one, so this one is freed first.
        del simulation
        if outcome.holds:
            if task.safety is None:
                progress("simulating smaller fleets on all requests")
                over_whole = _find_smaller_fleet(plan, trace, over_whole, deadline)
            certificate = replace(plan.certificate, binding=(over_whole, *plan.certificate.binding))
            return replace(plan, certificate=certificate, traffic_note=_traffic_note(trace, over_whole))
        if from_s == part.from_s:
            break  # The next part would be the one that was just planned.
        part = _part_from(trace, from_s, length_s)
    note, warnings = _traffic_note(trace, over_whole), (*plan.warnings, over_whole)
    return replace(plan, status="best found", warnings=warnings, traffic_note=note)


def _traffic_note(trace: Trace, over_whole: OverTheWhole) -> str:
    """The line of a report on the part that was planned, and on whether the plan kept the SLO on the whole
    trace.
    """
    outcome_text = {None: "not simulated", True: "simulated too and kept", False: "simulated too and MISSED"}
    holds = None if over_whole.outcome is None else over_whole.outcome.holds
    return (
        f"{trace.name}, the busiest part, from {show_clock(over_whole.part_from_s)} on: "
        f"{over_whole.part_requests:,} requests in {show_s(over_whole.part_s)} (all {over_whole.requests:,}: "
        f"{outcome_text[holds]})"
    )


def _part_from(trace: Trace, start_s: float, length_s: float) -> _BusyPart:
    """The requests that arrive in [start_s, start_s + length_s), with arrivals counted from start_s."""
    ends_s = (start_s, start_s + length_s)
    rows = np.arange(*np.searchsorted(trace.arrival_s, ends_s, "left"))
    arrival_s = trace.arrival_s[rows] - start_s
    note = f"the part from {start_s:.6g} s on, {len(rows)} of {len(trace)} requests"
    return _BusyPart(replace(trace.select(rows, arrival_s=arrival_s), notes=(*trace.notes, note)), start_s)


def _simulate_whole(
    fleet: Fleet, trace: Trace, slo: Slo, deadline: float, *, stop_early: bool = False
) -> Simulation | None:
    """A simulation of the fleet on the whole trace; None if it cannot end before the `deadline` on the
    search's clock. With `stop_early` it ends once the SLO is missed, and records no runs of steps.
    """
    if is_over(deadline):
        return None
    try:
        charge_effort(len(trace))
        return simulate_until(
            wall_deadline_s(deadline),
            fleet,
            trace,
            limits=slo.limits,
            record=not stop_early,
            stop_early=stop_early,
            every_s=slo.every_s,
        )
    except OutOfTime:
        return None


def _worst_part_start_s(simulation: Simulation, slo: Slo, length_s: float) -> float:
    """The start of the part in which most requests miss a limit. The parts follow each other from the first
    arrival on. A request that was not served counts as late, and so does one whose longest gap exceeds the
    limit on TBT.
    """
    edges_s = np.arange(simulation.arrival_s[0], simulation.arrival_s[-1] + length_s, length_s)
    part_numbers = window_numbers(simulation.arrival_s[~keeps_all(simulation, slo)], edges_s)
    return float(edges_s[int(np.bincount(part_numbers, minlength=1).argmax())])


def _find_smaller_fleet(plan: Plan, trace: Trace, over_whole: OverTheWhole, deadline: float) -> OverTheWhole:
    """`over_whole`, completed by the smallest fleet found in time that keeps the SLO on the whole trace.

    Workers are removed from one pool after another, first from the pool with the most expensive workers. One
    worker is removed, and if the fleet still keeps the SLO, more by bisection.
    """
    counts = [pool.count for pool in plan.fleet.pools]
    dearest_first = sorted(range(len(counts)), key=lambda k: -plan.fleet.pools[k].type.price_usd_per_h)

    def keeps_slo(fewer: list[int]) -> bool:
        fleet = plan.fleet.with_counts(fewer)
        simulation = _simulate_whole(fleet, trace, plan.slo, deadline, stop_early=True)
        return simulation is not None and judge_slo(simulation, plan.slo, with_percentiles=False).holds

    for pool_number in dearest_first:
        # Workers of this pool: the most that are known to be too few, and the fewest known to be enough.
        too_few, enough = 0, counts[pool_number]
        while enough - too_few > 1 and not is_over(deadline):
            is_first = enough == counts[pool_number]
            workers = enough - 1 if is_first else (too_few + enough) // 2
            if keeps_slo([*counts[:pool_number], workers, *counts[pool_number + 1 :]]):
                enough = workers
            else:
                too_few = workers
        counts[pool_number] = enough
    smaller = plan.fleet.with_counts(counts)
    if counts == [pool.count for pool in plan.fleet.pools]:
        return over_whole
    return replace(
        over_whole,
        smaller=bought_pools(smaller),
        smaller_usd_per_h=bill_fleet(smaller).usd_per_h,
        planned_usd_per_h=bill_fleet(plan.fleet).usd_per_h,
    )
