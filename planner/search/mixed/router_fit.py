"""The settings of a router that do best in simulation: one after the other, on a fleet known to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.fleet import Policies
from planner.policies import ROUTING
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import Oracle


def fitted(oracle: Oracle, counts: Counts) -> Policies:
    """The oracle's policies with their router's settings fitted to its trace and SLO, on these workers.

    Each setting takes the value that leaves the limits most room, beside what was chosen for those before; of
    equal ones the default.
    """
    best = oracle.policies
    candidates = ROUTING[best.routing].setting_grid
    most = _room(oracle, best, counts) if candidates else 0.0
    for name, values in candidates.items():
        start = best
        for value in values:
            change: dict[str, Any] = {name: value}
            other = replace(start, **change)
            if other != start and (room := _room(oracle, other, counts)) > most:
                best, most = other, room
    return best


def _room(oracle: Oracle, policies: Policies, counts: Counts) -> float:
    """How far the fleet is from missing a limit: of the requests (or gaps) that a limit may miss, the share
    that it did not miss, least over all limits. Negative where one misses more than it may.
    """
    _, verdict = oracle.verdict(replace(oracle.fleet(counts), policies=policies), record=False)
    if not verdict.is_steady:
        return -float("inf")
    shares = [(line.decides[1], line.limit.percentile_frac) for line in verdict.lines]
    if oracle.slo.attainment_frac is not None:
        worst = verdict.attainment_worst
        attained = verdict.attainment_frac if worst is None else worst.kept_frac
        shares.append((attained, oracle.slo.attainment_frac))
    return min((kept - needed) / max(1 - needed, 1e-3) for kept, needed in shares)
