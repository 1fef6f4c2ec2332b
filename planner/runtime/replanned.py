"""What the plan would be with the corrected fits: does its fleet still keep the SLO, and the fewest workers.

Both are simulated on the whole traffic that was given, with its sessions, prefixes and tenants, and on the
whole fleet where a slice of it was validated. The fewest are found by the plan's own fits in the same way, so
that nothing but the fits lies between the two. Counts of the plan's own pools alone are tried; other GPUs and
settings are for `plan --catalog DIR/catalog`, which holds the corrected fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from planner.domain import Slo
from planner.fleet import Fleet
from planner.simulator import judge
from planner.simulator.replay import RequestRecords, simulate_if_kept
from planner.traffic.trace import Trace, judged_span_s

MOST_TIMES = 16  # The search ends at so many times the plan's workers.


@dataclass(frozen=True, slots=True)
class Replanned:
    """The plan's fleet, simulated with the plan's own step times and with those corrected by a run: whether
    it keeps the SLO, and the fewest workers of its pools that keep it. These are None where MOST_TIMES as
    many do not.
    """

    kept_before: bool
    kept_after: bool
    fewest_before: Fleet | None
    fewest_after: Fleet | None

    @property
    def is_exact(self) -> bool:
        """Whether no fleet of these workers is cheaper. With several pools only each pool alone was made
        smaller, so other mixes may be cheaper.
        """
        smallest = self.fewest_after or self.fewest_before
        return smallest is not None and len(smallest.running_pools) == 1


def replan(before: Fleet, after: Fleet, trace: Trace, slo: Slo) -> Replanned | None:
    """`before` and `after` are the plan's fleet with either fits; None without an SLO."""
    if not slo.limits:
        return None
    requests, before, after = RequestRecords(trace), _multiply_workers(before, 1), _multiply_workers(after, 1)

    @cache
    def holds(fleet: Fleet) -> bool:
        simulation = simulate_if_kept(
            fleet, trace, slo.limits, requests, slo.every_s, patience_s=slo.patience_s(judged_span_s(trace))
        )
        return simulation is not None and judge(simulation, slo, values=False).holds

    return Replanned(
        holds(before), holds(after), find_fewest_workers(before, holds), find_fewest_workers(after, holds)
    )


def find_fewest_workers(fleet: Fleet, holds: Callable[[Fleet], bool]) -> Fleet | None:
    """All pools grow alike until the fleet holds; then each, the dearest first, shrinks while it does.

    More workers are taken never to hurt, as everywhere in a plan.
    """
    times = 1
    while not holds(grown := _multiply_workers(fleet, times)):
        times *= 2
        if times > MOST_TIMES:
            return None
    dearest = sorted(grown.running_pools, key=lambda pool: pool.type.price_usd_per_h, reverse=True)
    for name in [pool.name for pool in dearest]:
        most = next(pool.count for pool in grown.pools if pool.name == name)
        fails = 0
        while most - fails > 1:
            middle = (most + fails) // 2
            if holds(fewer := _with_count(grown, name, middle)):
                grown, most = fewer, middle
            else:
                fails = middle
    return grown


def _multiply_workers(fleet: Fleet, times: int) -> Fleet:
    pools = tuple(replace(pool, count=times * pool.count) for pool in fleet.running_pools)
    return replace(fleet, pools=pools, disturbances=())


def _with_count(fleet: Fleet, name: str, count: int) -> Fleet:
    pools = tuple(replace(pool, count=count) if pool.name == name else pool for pool in fleet.pools)
    return replace(fleet, pools=pools)
