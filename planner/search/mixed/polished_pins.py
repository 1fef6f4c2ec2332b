"""Finds better placements of pinned prefixes for the best fleet, and for fleets with one worker fewer.

A search places the pinned prefixes of each fleet quickly (prefixes/pinning.py). For the best fleet and its
smaller neighbours the placement is polished (solvers/prefix_replication.py): a fixed amount of work is spent
on reducing the load of the busiest worker. Simulation decides whether that helps: a polished placement is
used if a fleet with fewer workers holds with it, or if the same fleet comes less near to missing the SLO
(`_nearness_to_missing`). A pinned prefix stays in the KV cache of the workers that it is placed on.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from planner.fleet import Fleet, Pool
from planner.search.mixed.best_fleet import FleetSearch
from planner.search.oracle.fleet_counts import Counts, add_workers
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.work_clock import in_time, wall_deadline_s
from planner.search.prefixes.pinning import PolishedPins
from planner.search.problem.plan_problem import Problem

# A line at p100 allows no misses. Where misses are divided by the share that a line allows, this small share
# stands for none.
P100_ALLOWED_FRAC = 1e-9
LEAST_POLISH_S = 1.0  # Polishing gets at least this time, even if the plan's time is over; set by hand.


def polish_pins(
    problem: Problem, fleet_search: FleetSearch, search_from: Callable[[Sequence[Fleet]], FleetSearch]
) -> FleetSearch:
    """The best fleet with polished placements, which costs no more than that of `fleet_search`.

    If a fleet with one worker fewer holds with a polished placement, `search_from` searches again from it.
    """
    while is_worth_polishing(problem):
        fewer = in_time(partial(find_lighter_fleet, problem, fleet_search.best), None)
        if fewer is None:  # No lighter fleet holds, or the time was over first.
            break
        lighter = search_from([problem.oracle.fleet(fewer)])
        if lighter.value >= fleet_search.value:
            break
        fleet_search = lighter
    # In production a better placement must also hold in scenarios: production_fleet.py uses it after a test.
    if problem.task.safety is None and is_worth_polishing(problem):
        in_time(partial(use_if_better, problem, fleet_search.best), None)
    return fleet_search


def is_worth_polishing(problem: Problem) -> bool:
    """Whether prefixes are pinned, there is time, and the simulated fleet is the planned one: simulations
    after a loss and in a scale model are of smaller fleets, which have other placements.
    """
    oracle = problem.oracle
    is_whole = oracle.downscale == 1 and not oracle.has_losses
    return oracle.pinning is not None and is_whole and not problem.out_of_time()


def polish_placements(problem: Problem, pools: Sequence[Pool]) -> dict[str, PolishedPins]:
    """The polished placements of these pools, by pool name. Polishing ends after an amount of work that is
    the same on any machine; earlier only if the plan's time limit comes first.
    """
    assert problem.oracle.pinning is not None
    left_s = max(wall_deadline_s(problem.deadline) - time.monotonic(), LEAST_POLISH_S)
    return problem.oracle.pinning.polish(pools, time_limit_s=left_s)


def find_lighter_fleet(problem: Problem, counts: Counts) -> Counts | None:
    """A fleet with one worker fewer that holds with a polished placement, which is then in use; None if no
    such fleet holds. The most expensive worker is removed first.
    """
    oracle, pinning = problem.oracle, problem.oracle.pinning
    assert pinning is not None
    by_price = sorted(range(len(counts)), key=lambda k: -counts[k][0].objective)
    for k in by_price:
        fewer = add_workers(counts, -1, [k])
        if fewer[k][1] < 1 or not problem.allows(fewer):
            continue
        pools = oracle.fleet(fewer).pools
        if not _polish_finds_better(problem, pools):
            continue
        # The oracle's answers for the polished and for the quick placement are remembered apart.
        pinning.use(pools)
        if oracle.holds(fewer):
            return fewer
        pinning.use(pools, is_polished=False)
    return None


def use_if_better(problem: Problem, counts: Counts, is_kept: Callable[[], bool] = lambda: True) -> bool:
    """Use the polished placement of a fleet if the fleet holds with it, comes less near to missing the SLO on
    the trace, and `is_kept()`, which simulates the fleet in scenarios. Returns whether it is used.
    """
    oracle, pinning = problem.oracle, problem.oracle.pinning
    assert pinning is not None
    pools = oracle.fleet(counts).pools
    if not _polish_finds_better(problem, pools):
        return False
    before = _nearness_to_missing(oracle, counts)
    pinning.use(pools)
    if oracle.holds(counts) and _nearness_to_missing(oracle, counts) < before and is_kept():
        return True
    pinning.use(pools, is_polished=False)
    return False


def _polish_finds_better(problem: Problem, pools: Sequence[Pool]) -> bool:
    """Whether the quick placement of these pools is in use, and polishing finds a better one."""
    pinning = problem.oracle.pinning
    assert pinning is not None
    if pinning.uses_polished(pools):
        return False
    return any(pins.is_better for pins in polish_placements(problem, pools).values())


def _nearness_to_missing(oracle: Oracle, counts: Counts) -> tuple[float, float]:
    """How near a fleet comes to missing the SLO, for comparison: the misses per allowed miss of its worst
    line, and among fleets with equal misses the mean TTFT [s] (infinite if no request got a token).
    """
    simulation, verdict = oracle.simulate_and_judge(oracle.fleet(counts), record=False)
    # `deciding_frac` is the share of requests within the limit.
    misses = [
        (1 - line.deciding_frac) / max(1 - line.limit.percentile_frac, P100_ALLOWED_FRAC)
        for line in verdict.lines
    ]
    mean_s = float(np.nanmean(simulation.ttft_s))
    return max(misses, default=0.0), mean_s if math.isfinite(mean_s) else math.inf
