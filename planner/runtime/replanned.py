"""Plans again with the step times that a validation corrected: whether the fleet still keeps the SLO, and
which is the smallest fleet that does.

Both questions are also answered with the plan's own step times, in the same way, so that the two results
differ by the step times alone. The whole trace, with its sessions, prefixes and tenants, is simulated on
the whole fleet, even if only a slice of it was validated. Only the numbers of workers in the plan's pools
change. To plan with other GPUs and settings, use `plan --catalog DIR/catalog`, which holds the corrected step
times.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from planner.domain import Slo
from planner.fleet import Fleet
from planner.simulator import judge_slo
from planner.simulator.replay import RequestRecords, simulate_if_kept
from planner.traffic.trace import Trace, judged_span_s

# If even this many times the plan's workers miss the SLO, the search ends without a fleet; chosen by hand.
MOST_TIMES = 16


@dataclass(frozen=True, slots=True)
class Replanned:
    """Results with the plan's own step times (`before`) and with the corrected ones (`after`): whether the
    plan's fleet keeps the SLO, and the smallest fleet that does, None if MOST_TIMES as many workers do not.
    """

    kept_before: bool
    kept_after: bool
    fewest_before: Fleet | None
    fewest_after: Fleet | None

    @property
    def is_exact(self) -> bool:
        """Whether no smaller fleet holds.

        This is known for a single pool only: of several, each was made smaller by itself, so another mix may
        be cheaper.
        """
        smallest = self.fewest_after or self.fewest_before
        return smallest is not None and len(smallest.running_pools) == 1


def replan(before: Fleet, after: Fleet, trace: Trace, slo: Slo) -> Replanned | None:
    """Compare the plan's fleet with its own and with corrected step times; None without an SLO."""
    if not slo.limits:
        return None
    requests = RequestRecords(trace)
    before, after = _multiply_workers(before, 1), _multiply_workers(after, 1)  # Without disturbances.

    @cache
    def holds(fleet: Fleet) -> bool:
        """Whether this fleet keeps the SLO on the trace that was measured."""
        simulation = simulate_if_kept(
            fleet, trace, slo.limits, requests, slo.every_s, patience_s=slo.patience_s(judged_span_s(trace))
        )
        return simulation is not None and judge_slo(simulation, slo, with_percentiles=False).holds

    return Replanned(
        holds(before), holds(after), find_fewest_workers(before, holds), find_fewest_workers(after, holds)
    )


def find_fewest_workers(fleet: Fleet, holds: Callable[[Fleet], bool]) -> Fleet | None:
    """Double all pools until the fleet holds; then make each pool as small as possible, the dearest first.

    Each pool is made smaller by bisection, which assumes that more workers never hurt.
    """
    times = 1
    while not holds(grown := _multiply_workers(fleet, times)):
        times *= 2
        if times > MOST_TIMES:
            return None
    dearest = sorted(grown.running_pools, key=lambda pool: pool.type.price_usd_per_h, reverse=True)
    for name in [pool.name for pool in dearest]:
        # The fleet holds with `good` workers of the pool, not with `bad`. Each pool keeps at least one.
        good = next(pool.count for pool in grown.pools if pool.name == name)
        bad = 0
        while good - bad > 1:
            middle = (good + bad) // 2
            counts = (middle if pool.name == name else pool.count for pool in grown.pools)
            if holds(fewer := grown.with_counts(counts)):
                grown, good = fewer, middle
            else:
                bad = middle
    return grown


def _multiply_workers(fleet: Fleet, times: int) -> Fleet:
    """The fleet's running pools with `times` the workers, and without disturbances, which name workers."""
    pools = tuple(replace(pool, count=times * pool.count) for pool in fleet.running_pools)
    return replace(fleet, pools=pools, disturbances=())
