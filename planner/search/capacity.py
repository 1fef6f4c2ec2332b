"""How much traffic so many workers carry: the table that controllers of the plan's own read.

Along a ladder of rates the least sizes of a fleet's pools that keep the SLO on a sample of the traffic at
that rate: the sample is the busiest part of it, thinned or with copies laid over it. Of several pools the
cheapest sizes are taken. Nothing here knows when the traffic comes, so whoever reads the table sees no future.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.domain import Slo
from planner.fleet import Fleet
from planner.simulator.metrics import judge
from planner.simulator.replay import Requests, keeps
from planner.traffic.scaling import rescale, window
from planner.traffic.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SAMPLE = "busiest 10 min"
RUNGS = 12
ABOVE_FRAC = 0.3  # of the highest rate seen: so far beyond it the ladder goes
LEAST_REQUESTS = 200  # of a sample: of fewer no percentile is known


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """Least sizes (K, P) of the pools at rates (K,) of requests/s, both rising. The first rate is 0."""

    rate_rps: Floats
    sizes: Ints

    def least(self, rate_rps: float) -> Ints:
        """The sizes (P,) for a rate: those of the first rung at or above it; beyond the last as many more as
        the rate is higher.
        """
        rung = int(np.searchsorted(self.rate_rps, rate_rps * (1 - 1e-9)))
        if rung < len(self.rate_rps):
            return np.asarray(self.sizes[rung])
        return np.ceil(self.sizes[-1] * rate_rps / self.rate_rps[-1]).astype(np.int64)


def resized(fleet: Fleet, sizes: Sequence[int]) -> Fleet:
    """The same fleet with other counts of workers, by pool."""
    pools = (replace(pool, count=int(n)) for pool, n in zip(fleet.pools, sizes, strict=True))
    return replace(fleet, pools=tuple(pools))


def capacity(fleet: Fleet, trace: Trace, slo: Slo, *, highest_rps: float, most: Sequence[int]) -> Capacity:
    """The table for this fleet's pools, up to somewhat above `highest_rps`. It ends at the rung below the
    first that `most` (P,) workers do not carry.
    """
    sample = window(trace, SAMPLE)
    slo = replace(slo, every_s=None)
    prices = [pool.type.price_usd_per_h for pool in fleet.pools]
    rates, found = [0.0], [np.ones(len(prices), np.int64)]
    for rung in range(1, RUNGS + 1):
        rate_rps = highest_rps * (1 + ABOVE_FRAC) * rung / RUNGS
        if rate_rps * sample.duration_s < LEAST_REQUESTS:
            continue
        asked = rescale(sample, rate_rps, rng=np.random.default_rng(rung))
        requests = Requests(asked)

        def holds(sizes: Sequence[int], asked: Trace = asked, requests: Requests = requests) -> bool:
            run = keeps(resized(fleet, sizes), asked, slo.limits, requests)
            return run is not None and judge(run, slo, values=False).holds

        sizes = least_sizes(holds, prices, found[-1].tolist(), most)
        if sizes is None:
            break
        rates.append(rate_rps)
        found.append(np.asarray(sizes))
    return Capacity(np.array(rates), np.array(found))


def least_sizes(
    holds: Callable[[Sequence[int]], bool], prices: Sequence[float], least: Sequence[int], most: Sequence[int]
) -> tuple[int, ...] | None:
    """The cheapest sizes from `least` to `most` that hold, where more workers never hurt; None if none do.

    Each pool is first made as small as holds with all others at their most: no sizes below hold. From there
    sizes are tried in order of their price.
    """
    if not holds(most):
        return None
    floor = list(least)
    for p in range(len(floor)):
        low, high = least[p] - 1, most[p]
        while high - low > 1:
            middle = (low + high) // 2
            sizes = [*most[:p], middle, *most[p + 1 :]]
            low, high = (low, middle) if middle > 0 and holds(sizes) else (middle, high)
        floor[p] = high
    queue = [(0.0, tuple(floor))]
    seen = {tuple(floor)}
    while queue:
        _, sizes = heapq.heappop(queue)
        if holds(sizes):
            return sizes
        for p in range(len(sizes)):
            more = (*sizes[:p], sizes[p] + 1, *sizes[p + 1 :])
            if more[p] <= most[p] and more not in seen:
                seen.add(more)
                usd = sum(price * n for price, n in zip(prices, more, strict=True))
                heapq.heappush(queue, (usd, more))
    return None
