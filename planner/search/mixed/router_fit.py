"""Fits a router's settings in simulation, one after the other, on a fleet that keeps the SLO."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.fleet import Policies
from planner.policies import ROUTING
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import Oracle

MOST_DOUBLINGS = 3  # A fleet to which a router is fitted before any is known grows by so many doublings.
# A line on all requests (p100) allows no miss. Its room is divided by this in place of 0.
LEAST_ALLOWED_FRAC = 1e-3


def fitted(oracle: Oracle, counts: Counts, *, is_of_agents: bool = False) -> Policies:
    """The oracle's policies with their router's settings fitted to its trace and SLO, on these workers.
    `is_of_agents`: the traffic is that of described agents.

    Each setting gets the value with the most room (`_room`), beside the values chosen for the settings before
    it. A setting keeps its default where no other value has more room.
    """
    best = oracle.policies
    routing = ROUTING[best.routing]
    candidates = (routing.agents_grid if is_of_agents else None) or routing.setting_grid
    most = _room(oracle, best, counts) if candidates else 0.0
    for name, values in candidates.items():
        start = best
        for value in values:
            change: dict[str, Any] = {name: value}
            other = replace(start, **change)
            if other == start:
                continue
            room = _room(oracle, other, counts)
            if room > most:
                best, most = other, room
    return best


def fitted_before_search(
    oracle: Oracle, likely: Counts, *, is_of_agents: bool = False
) -> tuple[Policies, Counts | None]:
    """As `fitted`, where no fleet is known that keeps the SLO: on the workers that are `likely` to, and if
    these do not, on twice as many, up to MOST_DOUBLINGS times. Also returns the workers that do; None if none
    of these do.
    """
    for _ in range(MOST_DOUBLINGS + 1):
        policies = fitted(oracle, likely, is_of_agents=is_of_agents)
        if _room(oracle, policies, likely) >= 0:
            return policies, likely
        likely = tuple((option, 2 * count) for option, count in likely)
    return policies, None


def _room(oracle: Oracle, policies: Policies, counts: Counts) -> float:
    """How far the fleet is from missing a limit, the least over all limits: of the misses (of requests, or of
    gaps) that a limit allows, the share that did not happen. Negative where there are more than it allows.
    """
    _, verdict = oracle.verdict(replace(oracle.fleet(counts), policies=policies), record=False)
    if not verdict.is_steady:
        return -float("inf")  # The backlog grows, so the fleet misses the SLO whatever its percentiles are.
    # (share of requests within the limit, share that must be) of each line.
    shares = [(line.decides[1], line.limit.percentile_frac) for line in verdict.lines]
    if oracle.slo.attainment_frac is not None:
        worst = verdict.attainment_worst
        attained = verdict.attainment_frac if worst is None else worst.kept_frac
        shares.append((attained, oracle.slo.attainment_frac))
    return min((kept_frac - needed) / max(1 - needed, LEAST_ALLOWED_FRAC) for kept_frac, needed in shares)
