"""Fits a router's settings one after another, by simulating a fleet that keeps the SLO."""

import math
from dataclasses import replace
from typing import Any

from planner.fleet import Policies
from planner.policies import ROUTING
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import Oracle

# If no fleet that holds is known yet, a likely one is doubled at most this often: if eight times the likely
# workers miss the SLO, more workers do not help.
MOST_DOUBLINGS = 3
# Settings are fitted anew only to fleets whose slack is above this: those that miss a limit at most twice as
# often as it allows. Other settings seldom save a fleet that misses more.
LEAST_SLACK_TO_FIT = -1.0
# A line on all requests (p100) allows no miss. Its slack is divided by this instead of 0.
LEAST_ALLOWED_FRAC = 1e-3


def fit_router(oracle: Oracle, counts: Counts) -> Policies:
    """The oracle's policies with their router's settings fitted to its trace and SLO, for a fleet of these
    workers.

    Each setting gets the value with the most slack (`_slack`), given the values of the settings before it. It
    keeps its default if no other value has more slack.
    """
    has_settings = bool(ROUTING[oracle.policies.routing].setting_grid)
    return _fit(oracle, counts)[0] if has_settings else oracle.policies


def _fit(oracle: Oracle, counts: Counts, least_slack: float = -math.inf) -> tuple[Policies, float]:
    """The policies of `fit_router` and their slack. Nothing is fitted if the oracle's own policies have less
    than `least_slack`.
    """
    best = oracle.policies
    most_slack = _slack(oracle, best, counts)
    if most_slack < least_slack:
        return best, most_slack
    for name, values in ROUTING[best.routing].setting_grid.items():
        start = best
        for value in values:
            change: dict[str, Any] = {name: value}
            changed = replace(start, **change)
            if changed == start:
                continue
            slack = _slack(oracle, changed, counts)
            if slack > most_slack:
                best, most_slack = changed, slack
    return best, most_slack


def fit_router_before_search(oracle: Oracle, likely_fleet: Counts) -> tuple[Policies, Counts | None]:
    """Like `fit_router`, while no fleet that keeps the SLO is known: begin with `likely_fleet`, and as long
    as the fleet fails, double its workers, up to MOST_DOUBLINGS times.

    Returns the policies and the first of these fleets that keeps the SLO, or None if all fail.
    """
    for _ in range(MOST_DOUBLINGS + 1):
        policies, slack = _fit(oracle, likely_fleet)
        if slack >= 0:
            return policies, likely_fleet
        likely_fleet = tuple((option, 2 * count) for option, count in likely_fleet)
    return policies, None


def fit_router_if_near(oracle: Oracle, counts: Counts) -> Policies | None:
    """The policies of `fit_router` if a fleet of these workers keeps the SLO with them; None if it does not,
    or if it misses a limit so often that no settings are tried (LEAST_SLACK_TO_FIT).
    """
    if not ROUTING[oracle.policies.routing].setting_grid:
        return None
    fitted, slack = _fit(oracle, counts, LEAST_SLACK_TO_FIT)
    return fitted if fitted != oracle.policies and slack >= 0 else None


def _slack(oracle: Oracle, policies: Policies, counts: Counts) -> float:
    """How far the fleet is from missing a limit: 1 - misses / misses that the limit allows, the least over
    all limits. A miss is a request, or a gap between tokens, beyond the limit.
    """
    _, verdict = oracle.simulate_and_judge(replace(oracle.fleet(counts), policies=policies), record=False)
    if not verdict.is_steady:
        return -float("inf")  # The backlog grows, so the fleet misses the SLO whatever its percentiles are.
    # For each limit the share of requests within it, in the worst window if the SLO has windows
    # (simulator/slo_verdict.py), and the share that must be.
    shares = [(line.deciding_frac, line.limit.percentile_frac) for line in verdict.lines]
    if oracle.slo.attainment_frac is not None:
        worst = verdict.attainment_worst
        attained = verdict.attainment_frac if worst is None else worst.kept_frac
        shares.append((attained, oracle.slo.attainment_frac))
    return min((kept_frac - needed) / max(1 - needed, LEAST_ALLOWED_FRAC) for kept_frac, needed in shares)
