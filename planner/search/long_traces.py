"""A trace too long to be searched whole: its busiest part is planned, and the plan simulated on all of it.

A search simulates hundreds of fleets, and production as many futures, so a fleet is looked for on the part of
the trace with the most tokens, and simulated once on the whole trace. Where it fails there, the part in which
the most requests are late is planned in place of the first, ROUNDS times at most. Too long are more than
LONG_REQUESTS, for production a share of these, as every fleet is simulated in dozens of futures; or so many
that WHOLE_SIMULATIONS of them would take longer than the time limit: that goes by the limit as it is given,
not by the clock, so that equal questions give equal answers.

A fleet that keeps a percentile in the busiest part may be more than the whole trace asks for: there the late
requests of a busy hour are few among many. So on paper the plan is then made smaller, as long as the whole
trace allows and time is left, and what that saves is said. The plan stays what the busiest part asks for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.facts import OverTheWhole
from planner.documents.task import Task
from planner.domain import Limit, Slo
from planner.fleet import Fleet
from planner.search.bill import bill, bought
from planner.search.findings import outcome_of
from planner.search.plan import Plan
from planner.search.problem import Progress
from planner.simulator.metrics import judge
from planner.simulator.passing import OutOfTime
from planner.simulator.replay import Simulation, simulate_until
from planner.traffic.scaling import busiest
from planner.traffic.trace import Trace, window_numbers
from planner.units import clock, show_s, show_span

LONG_REQUESTS = 2_000_000  # traces with more are planned by their busiest part,
IN_FUTURES_FRAC = 0.25  # for production those with more than this share: every fleet has dozens of futures
PART_REQUESTS = 200_000  # on average: the busiest part has more
ROUNDS = 3
REQUEST_S = 2e-6  # of simulating the whole trace, with what is recorded
WHOLE_SIMULATIONS = 20  # that there must be time for, else a part is searched for which there is twice that
CHECK_TIMES = 1.5  # as long as that a simulation of the whole may take beside other work of the machine
LEAST_REQUESTS = 20_000  # of a part, unless the trace is short

Planned = Callable[[Trace, float], Plan]
"""The plan for a trace, within so many seconds."""


@dataclass(frozen=True, slots=True)
class _Part:
    trace: Trace
    from_s: float


def part_requests(seconds: float) -> int:
    """On average, of a part that is searched under this time limit."""
    fits = int(min(seconds / (2 * WHOLE_SIMULATIONS * REQUEST_S), PART_REQUESTS))
    return max(fits, min(LEAST_REQUESTS, PART_REQUESTS))


def is_too_long(task: Task, trace: Trace, seconds: float = math.inf) -> bool:
    """Whether a trace is planned by its busiest part: one that is long, also for so many seconds, and meant
    as it is.
    """
    most = LONG_REQUESTS * (1.0 if task.safety is None else IN_FUTURES_FRAC)
    is_long_for = len(trace) * REQUEST_S * WHOLE_SIMULATIONS > seconds
    return (
        (len(trace) > most or (is_long_for and len(trace) > 2 * part_requests(seconds)))
        and task.described is None
        and task.rate_rps is None
        and (task.window or "whole") == "whole"
        and task.objective != "throughput"
        and not (trace.after.size or trace.has_prefixes)
    )


def searched_requests(task: Task, trace: Trace, seconds: float) -> int:
    """About how many requests a plan is of: those of its part, where it is planned by one."""
    return part_requests(seconds) if is_too_long(task, trace, seconds) else len(trace)


def plan_by_parts(
    task: Task,
    trace: Trace,
    planned: Planned,
    *,
    seconds: float,
    progress: Progress,
    limit_s: float = math.inf,
) -> Plan:
    """The plan. All of it takes at most so many seconds, what is left of the time limit `limit_s`, but for
    what a search takes beyond its own.
    """
    deadline = time.monotonic() + seconds
    length_s = trace.duration_s * part_requests(limit_s) / len(trace)
    progress(f"looking for the busiest {show_span(length_s)} of {len(trace):,} requests")
    part = _from(trace, float(trace.arrival_s[busiest(trace, length_s)]), length_s)
    for attempt in range(1, ROUNDS + 1):
        left_s = max(deadline - time.monotonic(), 0.0)
        check_s = min(CHECK_TIMES * len(trace) * REQUEST_S, left_s / 2)
        found = planned(part.trace, left_s - check_s)
        said = OverTheWhole(len(trace), len(part.trace), part.from_s, part.trace.duration_s, attempt)
        progress(f"simulating the plan on all {len(trace):,} requests")
        simulation = _on_all(found.fleet, trace, found.slo, deadline)
        if simulation is None:
            note, warnings = _note(trace, said), (*found.warnings, said)
            return replace(found, status="best found", warnings=warnings, traffic_note=note)
        outcome = outcome_of(judge(simulation, found.slo), found.slo)
        said = replace(said, outcome=outcome)
        from_s = part.from_s if outcome.holds else _worst(simulation, found.slo.limits, length_s)
        del simulation  # the next one needs as much memory
        if outcome.holds:
            if task.safety is None:
                progress("simulating smaller fleets on all requests")
                said = _smaller(found, trace, said, deadline)
            certificate = replace(found.certificate, binding=(said, *found.certificate.binding))
            return replace(found, certificate=certificate, traffic_note=_note(trace, said))
        if from_s == part.from_s:
            break
        part = _from(trace, from_s, length_s)
    note, warnings = _note(trace, said), (*found.warnings, said)
    return replace(found, status="best found", warnings=warnings, traffic_note=note)


def _note(trace: Trace, said: OverTheWhole) -> str:
    checked = {None: "not simulated", True: "simulated too and kept", False: "simulated too and MISSED"}
    holds = None if said.outcome is None else said.outcome.holds
    return (
        f"{trace.name}, the busiest part, from {clock(said.part_from_s)} on: {said.part_requests:,} requests "
        f"in {show_s(said.part_s)} (all {said.requests:,}: {checked[holds]})"
    )


def _from(trace: Trace, start_s: float, length_s: float) -> _Part:
    """The requests in [start, start + length), counted from its start."""
    ends_s = (start_s, start_s + length_s)
    rows = np.arange(*np.searchsorted(trace.arrival_s, ends_s, "left"))
    arrival_s = trace.arrival_s[rows] - start_s
    note = f"the part from {start_s:.6g} s on, {len(rows)} of {len(trace)} requests"
    return _Part(replace(trace.select(rows, arrival_s=arrival_s), notes=(*trace.notes, note)), start_s)


def _on_all(
    fleet: Fleet, trace: Trace, slo: Slo, deadline: float, *, stop_early: bool = False
) -> Simulation | None:
    """The fleet on the whole trace; None where the time is over."""
    if time.monotonic() > deadline:
        return None
    try:
        return simulate_until(
            deadline,
            fleet,
            trace,
            limits=slo.limits,
            record=not stop_early,
            stop_early=stop_early,
            every_s=slo.every_s,
        )
    except OutOfTime:
        return None


def _worst(simulation: Simulation, limits: tuple[Limit, ...], length_s: float) -> float:
    """Where the part begins in which the most requests miss some limit; of gaps their longest."""
    edges_s = np.arange(simulation.arrival_s[0], simulation.arrival_s[-1] + length_s, length_s)
    values_s = {
        "ttft": simulation.ttft_s,
        "tpot": simulation.tpot_s,
        "e2e": simulation.e2e_s,
        "tbt": simulation.tbt_max_s,
    }
    late = simulation.status != 0
    for limit in limits:
        late |= values_s[limit.metric] > limit.limit_s
    of = window_numbers(simulation.arrival_s[late], edges_s)
    return float(edges_s[int(np.bincount(of, minlength=1).argmax())])


def _smaller(found: Plan, trace: Trace, said: OverTheWhole, deadline: float) -> OverTheWhole:
    """What is said, with the smallest fleet that still keeps the SLO over the whole, as far as time allows:
    workers go from one pool after the other, the dearest first. One worker less is tried first, then halves.
    """
    counts = [pool.count for pool in found.fleet.pools]
    order = sorted(range(len(counts)), key=lambda i: -found.fleet.pools[i].type.price_usd_per_h)

    def fleet_of(counts: list[int]) -> Fleet:
        pools = found.fleet.pools
        return replace(
            found.fleet,
            pools=tuple(replace(pool, count=count) for pool, count in zip(pools, counts, strict=True)),
        )

    def keeps(counts: list[int]) -> bool:
        simulation = _on_all(fleet_of(counts), trace, found.slo, deadline, stop_early=True)
        return simulation is not None and judge(simulation, found.slo, values=False).holds

    for i in order:
        fails, holds = 0, counts[i]
        while holds - fails > 1 and time.monotonic() < deadline:
            tried = [*counts]
            tried[i] = holds - 1 if holds == counts[i] else (fails + holds) // 2
            if keeps(tried):
                holds = tried[i]
            else:
                fails = tried[i]
        counts[i] = holds
    smaller = fleet_of(counts)
    if counts == [pool.count for pool in found.fleet.pools]:
        return said
    return replace(
        said,
        smaller=bought(smaller),
        smaller_usd_per_h=bill(smaller).usd_per_h,
        planned_usd_per_h=bill(found.fleet).usd_per_h,
    )
