"""Pinned replicas of prefixes as part of a fleet: for every fleet that a search asks about, where they go.

What `routing: pinned-prefix` needs to know before the first request. The prefixes are the stable ones of the
trace on which the plan is made (prefix_placing.py); each pool that prefills places them on its workers, and
other draws and scenarios of the traffic meet the same placement. After a loss prefixes are placed anew, as if
the workers that are left were warmed up again.

A search asks about hundreds of fleets, so each is placed quickly. Few of them are worth more: `polish` looks
for a placement with a smaller largest load, and for a bound that no placement is below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.fleet import Fleet, PinnedPrefix, Pool, WorkerType
from planner.search.oracle.prefix_placing import (
    PrefixPlan,
    Room,
    StableTraffic,
    leaves_of,
    planned,
    room_of,
    stable_traffic,
)
from planner.search.oracle.prefix_replay import replayed_hits
from planner.solvers.prefix_demand import SAME_FRAC
from planner.solvers.prefix_replication import polish_replication, replicate_quickly
from planner.traffic.trace import Trace

NO_ROOM = Room(0, 0, 0.0)  # decode workers keep no prefixes
ROUTINGS = 10  # of each placement, so that a search can ask for hundreds
POLISH_SEED = 0  # of the search by prices, so that a placement depends on the fleet and the traffic alone

Pins = tuple[WorkerType, str, int, int]
"""What a placement is of: a worker type, its role, its workers, and how many workers share all requests."""


@dataclass(frozen=True, slots=True, eq=False)
class PolishedPins:
    """The placement of a pool that a search made quickly, and the best one that is known, with a bound."""

    quick: PrefixPlan
    best: PrefixPlan

    @property
    def is_better(self) -> bool:
        load, quick = self.best.replication.largest_load, self.quick.replication.largest_load
        return load < quick * (1 - SAME_FRAC)


@dataclass(frozen=True, slots=True, eq=False)
class Pinning:
    """Places the stable prefixes of `trace`; what was asked once is remembered."""

    trace: Trace
    _traffic: dict[tuple[WorkerType, str], StableTraffic] = field(default_factory=dict, init=False)
    _placed: dict[Pins, PrefixPlan] = field(default_factory=dict, init=False)
    _polished: dict[Pins, PolishedPins] = field(default_factory=dict, init=False)
    _used: dict[Pins, PrefixPlan] = field(default_factory=dict, init=False)  # in place of what was placed

    def of(self, pools: Sequence[Pool]) -> tuple[PinnedPrefix, ...]:
        """What the workers of these pools, counted in their order, hold from the start on."""
        workers = sum(pool.count for pool in pools if pool.role != "decode")
        holders: dict[tuple[int, ...], list[int]] = {}
        first = 0
        for pool in pools:
            if pool.role != "decode" and pool.count:
                for r, paths in enumerate(leaves_of(self.trace, self.placed(pool, workers))):
                    for leaf in paths:
                        holders.setdefault(leaf.block_ids, []).append(first + r)
            first += pool.count
        return tuple(
            PinnedPrefix(ids, self.trace.prefix_block_tokens, tuple(workers))
            for ids, workers in holders.items()
        )

    def expected(self, pools: Sequence[Pool]) -> Callable[[Pool], PrefixPlan]:
        """Where each of these pools keeps prefixes, with the hits that are to be expected of it there."""
        workers = sum(pool.count for pool in pools if pool.role != "decode")
        rooms = [NO_ROOM if pool.role == "decode" else room_of(self.trace, pool, workers) for pool in pools]
        hits = replayed_hits(self.trace, pools, rooms, self.of(pools))
        hit_frac = {pool.name: hit for pool, hit in zip(pools, hits, strict=True)}

        def of(pool: Pool) -> PrefixPlan:
            found = self.placed(pool, workers)
            return replace(found, session_hit_frac=max(hit_frac[pool.name] - found.stable_hit_frac, 0.0))

        return of

    def hit_frac(self, fleet: Fleet) -> float:
        """The share of input tokens that hit what is pinned, sessions left out, by workers."""
        pools = [pool for pool in fleet.pools if pool.role != "decode"]
        workers = sum(pool.count for pool in pools)
        return sum(pool.count * self.placed(pool, workers).stable_hit_frac for pool in pools) / workers

    def placed(self, pool: Pool, workers: int) -> PrefixPlan:
        """Where one pool keeps prefixes if `workers` share all requests."""
        key = pool.type, pool.role, pool.count, workers
        if (polished := self._in_use(key)) is not None:
            return polished
        if key not in self._placed:
            of_type = pool.type, pool.role
            if of_type not in self._traffic:
                self._traffic[of_type] = stable_traffic(self.trace, pool)
            traffic = self._traffic[of_type]
            memory_tokens = room_of(self.trace, pool, workers).placed_tokens
            placed_by_pool = replicate_quickly(
                traffic.demand, pool.count, memory_tokens, sessions=traffic.sessions, routings=ROUTINGS
            )
            plan = planned(pool, traffic, placed_by_pool, memory_tokens)
            self._placed[key] = replace(plan, stable_hit_frac=_hit_frac(plan))
        return self._placed[key]

    def polish(self, pools: Sequence[Pool], *, time_limit_s: float = math.inf) -> dict[str, PolishedPins]:
        """By the names of the pools that prefill: a placement with a smaller largest load where one is found,
        and a bound. It is not placed so until `use` says so. The clock decides only where the limit ends it.
        """
        answers = {}
        for pool, key in _pins(pools):
            if key not in self._polished:
                quick = self._placed.get(key) or self.placed(pool, key[-1])
                demand, sessions = quick.traffic.demand, quick.traffic.sessions
                best = polish_replication(
                    demand,
                    quick.replication,
                    quick.memory_tokens,
                    sessions=sessions,
                    rng=np.random.default_rng(POLISH_SEED),
                    time_limit_s=time_limit_s,
                )
                plan = planned(pool, quick.traffic, best, quick.memory_tokens)
                plan = replace(plan, stable_hit_frac=_hit_frac(plan))
                # What was proven of the one is true of the other.
                bound = min(best.bound, quick.replication.largest_load)
                quick = replace(quick, replication=replace(quick.replication, bound=bound))
                self._placed[key], self._polished[key] = quick, PolishedPins(quick, plan)
            answers[pool.name] = self._polished[key]
        return answers

    def use(self, pools: Sequence[Pool], *, is_polished: bool = True) -> None:
        """Place prefixes on these pools as they were polished, or quickly again."""
        for _, key in _pins(pools):
            if is_polished:
                self._used[key] = self._polished[key].best
            else:
                self._used.pop(key, None)

    def uses_polished(self, pools: Sequence[Pool]) -> bool:
        """Whether a simulation of these pools is another than that of the placement made quickly."""
        return bool(self._used) and any(self._in_use(key) is not None for _, key in _pins(pools))

    def _in_use(self, key: Pins) -> PrefixPlan | None:
        """Prefixes stay where they are while steps take longer than they should."""
        worker, *rest = key
        for (other, *others), plan in self._used.items():
            if others == rest and replace(worker, latency=other.latency) == other:
                return plan
        return None


def _pins(pools: Sequence[Pool]) -> list[tuple[Pool, Pins]]:
    """The pools that prefill, and what their placements are of."""
    serving = [pool for pool in pools if pool.role != "decode" and pool.count]
    workers = sum(pool.count for pool in serving)
    return [(pool, (pool.type, pool.role, pool.count, workers)) for pool in serving]


def _hit_frac(plan: PrefixPlan) -> float:
    """The share of input tokens that are pinned where the router sends them: to the replica that has most."""
    demand, placed = plan.traffic.demand, plan.replication.placed
    longest = np.stack(
        [demand.path_sum(demand.tokens * placed[:, r]) for r in range(placed.shape[1])], axis=1
    ).max(axis=1)
    return float(demand.rate_rps @ longest) / plan.traffic.input_tokens_per_s
