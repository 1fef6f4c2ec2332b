"""Simulates a plan's fleet, and larger and smaller ones, under other traffic, step times and limits, for the
sliders of a page.

Each fleet is simulated once for every factor on the traffic and on the step times, and judged by the plan's
limits times every factor on them. More traffic is the same requests in less time, as in `headroom`.
There is no search, no other draw of the traffic and no loss of a worker: this is what the fleets do on paper.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.domain import ROUNDING, Limit, Slo
from planner.fleet import Fleet
from planner.reports.words import describe_fleet, limit_text
from planner.search.problem.bill import bill_fleet
from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import Verdict, judge_slo
from planner.traffic.scaling import with_times_the_traffic
from planner.traffic.trace import Trace

# Factors on the request rate, step times, limits of the SLO, and workers of each pool (rounded up). Each list
# contains 1.0, the plan as it is. All combinations are simulated, so the lists are short; chosen by hand.
TRAFFIC = (0.5, 0.75, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
STEPS = (0.9, 1.0, 1.1, 1.25)
LIMITS = (0.5, 0.75, 1.0, 1.5, 2.0)
SIZES = (0.75, 1.0, 1.25, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class SizeVerdicts:
    """A fleet at all T traffic, S step time and L limit factors.

    `kept_frac` (T, S, L, limits) is the share of requests, or gaps, within each limit; `holds` (T, S, L) is
    whether the SLO is kept. Where there was no time to simulate they are NaN and False.
    """

    text: str
    usd_per_h: float
    kept_frac: np.ndarray
    holds: np.ndarray


@dataclass(frozen=True, slots=True)
class Sliders:
    """Fleets, the cheapest first; `plan` is the index of the plan's own among them.

    `is_whole` is False if the time limit came before some of the simulations.
    """

    sizes: tuple[SizeVerdicts, ...]
    plan: int
    rate_rps: float
    limits: tuple[str, ...]
    wanted_frac: tuple[float, ...]  # The share of requests, or gaps, that each limit requires.
    is_whole: bool


def simulate_neighbours(fleet: Fleet, trace: Trace, slo: Slo, *, time_limit_s: float) -> Sliders:
    """Simulate a fleet and its neighbours; an SLO for every window is judged over the whole trace."""
    until_s = time.monotonic() + time_limit_s
    whole_slo = replace(slo, every_s=None)
    traces = [with_times_the_traffic(trace, factor) for factor in TRAFFIC]
    sizes = [_simulate_fleet(neighbour, traces, whole_slo, until_s) for neighbour in _neighbour_fleets(fleet)]
    order = sorted(range(len(sizes)), key=lambda k: sizes[k].usd_per_h)
    plan_index = next(k for k, size in enumerate(sizes) if size.text == describe_fleet(fleet))
    return Sliders(
        sizes=tuple(sizes[k] for k in order),
        plan=order.index(plan_index),
        rate_rps=trace.rate_rps,
        limits=tuple(limit_text(limit) for limit in slo.limits),
        wanted_frac=tuple(limit.percentile_frac for limit in slo.limits),
        is_whole=time.monotonic() < until_s,
    )


def _neighbour_fleets(fleet: Fleet) -> list[Fleet]:
    """The fleet with all pools scaled by each of SIZES, and first of all as it is, in case time runs out."""
    own_usd_per_h = bill_fleet(fleet).usd_per_h
    fleets: dict[tuple[int, ...], Fleet] = {}
    for factor in sorted(SIZES, key=lambda factor: factor != 1):
        counts = tuple(math.ceil(factor * pool.count - ROUNDING) for pool in fleet.running_pools)
        other = replace(fleet, pools=fleet.running_pools).with_counts(counts)
        # A smaller fleet that costs the same, because nodes are paid whole, is left out.
        if factor >= 1 or bill_fleet(other).usd_per_h < own_usd_per_h:
            fleets.setdefault(counts, other)
    return list(fleets.values())


def _simulate_fleet(fleet: Fleet, traces: Sequence[Trace], slo: Slo, until_s: float) -> SizeVerdicts:
    """Simulate one fleet at every factor on steps and traffic, as long as there is time."""
    shape = (len(TRAFFIC), len(STEPS), len(LIMITS))
    kept_frac, holds = np.full((*shape, len(slo.limits)), np.nan), np.zeros(shape, dtype=bool)
    for s, factor in enumerate(STEPS):
        slower_pools = tuple(
            replace(pool, type=pool.type.with_longer_steps(factor - 1)) for pool in fleet.pools
        )
        for t, trace in enumerate(traces):
            if time.monotonic() >= until_s:
                break
            for k, verdict in enumerate(_judge_at_limits(replace(fleet, pools=slower_pools), trace, slo)):
                kept_frac[t, s, k] = [line.kept_frac for line in verdict.lines]
                holds[t, s, k] = verdict.holds
    return SizeVerdicts(describe_fleet(fleet), bill_fleet(fleet).usd_per_h, kept_frac, holds)


def _judge_at_limits(fleet: Fleet, trace: Trace, slo: Slo) -> Iterator[Verdict]:
    """The verdicts for every factor on the limits, all from one simulation."""
    scaled_slos = []
    for factor in LIMITS:
        limits = tuple(replace(limit, limit_s=factor * limit.limit_s) for limit in slo.limits)
        scaled_slos.append(replace(slo, limits=limits))
    all_limits: list[Limit] = [limit for scaled_slo in scaled_slos for limit in scaled_slo.limits]
    simulation = simulate(fleet, trace, limits=all_limits, record=False)
    for k, scaled_slo in enumerate(scaled_slos):
        # The simulation has the limits of all SLOs, one after another.
        part = slice(k * len(slo.limits), (k + 1) * len(slo.limits))
        counted, violations = simulation.counted[part], simulation.violations[part]
        simulated = replace(simulation, limits=scaled_slo.limits, counted=counted, violations=violations)
        yield judge_slo(simulated, scaled_slo, with_percentiles=False)
