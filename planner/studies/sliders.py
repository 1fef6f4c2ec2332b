"""A plan's fleet and its neighbours in size, under more and less of everything: what a page's sliders read.

Each fleet is simulated once for every amount of traffic and every length of steps, and judged by the plan's
limits times every factor. More traffic is the same requests by a faster clock, as in `headroom`. Nothing is
searched, drawn anew or lost here: it is what the fleets do on paper.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.domain import Limit, Slo
from planner.fleet import Fleet
from planner.reports.words import describe, limit_text
from planner.search.problem.bill import bill_fleet
from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import Verdict, judge
from planner.traffic.scaling import sped_up
from planner.traffic.trace import Trace

TRAFFIC = (0.5, 0.75, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
STEPS = (0.9, 1.0, 1.1, 1.25)
LIMITS = (0.5, 0.75, 1.0, 1.5, 2.0)
SIZES = (0.75, 1.0, 1.25, 1.5, 2.0)  # Factors on the size of the plan's pools; results are rounded up.


@dataclass(frozen=True, slots=True)
class SizeVerdicts:
    """A fleet: `kept_frac` (T, S, L, limits) is the share of requests, or gaps, within each limit, `holds`
    (T, S, L) whether the SLO is kept. NaN, and no, where there was no time to simulate.
    """

    text: str
    usd_per_h: float
    kept_frac: np.ndarray
    holds: np.ndarray


@dataclass(frozen=True, slots=True)
class Sliders:
    """Fleets, the cheapest first, at factors `TRAFFIC`, `STEPS` and `LIMITS`; `plan` is the plan's own.

    `is_whole` is False where `time_limit_s` ended it.
    """

    sizes: tuple[SizeVerdicts, ...]
    plan: int
    rate_rps: float
    limits: tuple[str, ...]
    wanted_frac: tuple[float, ...]  # The share of requests, or gaps, that each limit requires.
    is_whole: bool


def simulate_neighbours(fleet: Fleet, trace: Trace, slo: Slo, *, time_limit_s: float) -> Sliders:
    """Simulate a fleet and its neighbours; an SLO for every window is judged over the whole trace."""
    until = time.monotonic() + time_limit_s
    whole_slo = replace(slo, every_s=None)
    traces = [sped_up(trace, factor) for factor in TRAFFIC]
    sizes = [_simulate_fleet(each, traces, whole_slo, until) for each in _neighbour_fleets(fleet)]
    order = sorted(range(len(sizes)), key=lambda k: sizes[k].usd_per_h)
    own = next(k for k, each in enumerate(sizes) if each.text == describe(fleet))
    return Sliders(
        tuple(sizes[k] for k in order),
        order.index(own),
        trace.rate_rps,
        tuple(limit_text(limit) for limit in slo.limits),
        tuple(limit.percentile_frac for limit in slo.limits),
        time.monotonic() < until,
    )


def _neighbour_fleets(fleet: Fleet) -> list[Fleet]:
    """The fleets in the order of simulation: the plan's own comes first, in case time runs out."""
    own_usd_per_h = bill_fleet(fleet).usd_per_h
    fleets: dict[tuple[int, ...], Fleet] = {}
    for factor in sorted(SIZES, key=lambda factor: factor != 1):
        counts = tuple(math.ceil(factor * pool.count - 1e-9) for pool in fleet.running_pools)
        pools = tuple(
            replace(pool, count=count) for pool, count in zip(fleet.running_pools, counts, strict=True)
        )
        other = replace(fleet, pools=pools)
        if (
            factor >= 1 or bill_fleet(other).usd_per_h < own_usd_per_h
        ):  # fewer workers on nodes paid whole spare nothing
            fleets.setdefault(counts, other)
    return list(fleets.values())


def _simulate_fleet(fleet: Fleet, traces: Sequence[Trace], slo: Slo, until: float) -> SizeVerdicts:
    shape = (len(TRAFFIC), len(STEPS), len(LIMITS))
    kept, holds = np.full((*shape, len(slo.limits)), np.nan), np.zeros(shape, dtype=bool)
    for s, factor in enumerate(STEPS):
        slow = tuple(replace(pool, type=pool.type.with_longer_steps(factor - 1)) for pool in fleet.pools)
        for t, trace in enumerate(traces):
            if time.monotonic() >= until:
                break
            for k, verdict in enumerate(_judge_at_limits(replace(fleet, pools=slow), trace, slo)):
                kept[t, s, k] = [line.kept_frac for line in verdict.lines]
                holds[t, s, k] = verdict.holds
    return SizeVerdicts(describe(fleet), bill_fleet(fleet).usd_per_h, kept, holds)


def _judge_at_limits(fleet: Fleet, trace: Trace, slo: Slo) -> Iterator[Verdict]:
    """The verdicts for every factor on the limits, all from one simulation."""
    queries = [
        replace(slo, limits=tuple(replace(limit, limit_s=factor * limit.limit_s) for limit in slo.limits))
        for factor in LIMITS
    ]
    every: list[Limit] = [limit for each in queries for limit in each.limits]
    simulation = simulate(fleet, trace, limits=every, record=False)
    for k, each in enumerate(queries):
        part = slice(k * len(slo.limits), (k + 1) * len(slo.limits))
        counted, violations = simulation.counted[part], simulation.violations[part]
        own = replace(simulation, limits=each.limits, counted=counted, violations=violations)
        yield judge(own, each, values=False)
