"""Decides which prefixes the workers of a simulated fleet pin, which routing `pinned-prefix` must know before
the simulation begins.

A fleet pins the stable prefixes of the trace on which the plan is made (prefix_placing.py). Each pool that
prefills places them on its workers; other draws and scenarios of the traffic are simulated with the same
placement. After a loss the prefixes are placed again, as if the remaining workers were warmed up again.

A search simulates hundreds of fleets, so each placement is made quickly. For the few best fleets, `polish`
searches a placement with a smaller largest load, and a lower bound on that load.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from planner.fleet import Fleet, PinnedPrefix, Pool, WorkerType
from planner.search.prefixes.prefix_placing import (
    PrefixMemory,
    PrefixPlan,
    StableTraffic,
    estimate_plan,
    leaves_of,
    memory_for_prefixes,
    stable_traffic,
)
from planner.search.prefixes.prefix_replay import replayed_hits
from planner.solvers.prefix_demand import SAME_FRAC
from planner.solvers.prefix_replication import polish_replication, replicate_quickly
from planner.traffic.trace import Trace

NO_MEMORY = PrefixMemory(placed_tokens=0, lru_tokens=0, sequences=0.0)  # Decode workers keep no prefixes.
# A quick placement computes only this many routings, because a search makes hundreds of placements. A routing
# assigns every class of requests to workers (planner/solvers/prefix_prices.py).
QUICK_ROUTINGS = 10
POLISH_SEED = 0  # Fixed, so that a placement depends only on the fleet and the traffic.


class PlacementKey(NamedTuple):
    """On what a placement depends: a pool's worker type, its role, how many `workers` it has, and how many
    workers share all requests (those of all pools that prefill).
    """

    type: WorkerType
    role: str
    workers: int
    sharing_workers: int


@dataclass(frozen=True, slots=True, eq=False)
class PolishedPins:
    """A pool's quick placement, which a search simulates, and the best placement known. Both have a lower
    bound on the largest load (`replication.bound`).
    """

    quick: PrefixPlan
    best: PrefixPlan

    @property
    def is_better(self) -> bool:
        """Whether the largest load of the best placement is smaller, by more than rounding."""
        load, quick = self.best.replication.largest_load, self.quick.replication.largest_load
        return load < quick * (1 - SAME_FRAC)


@dataclass(frozen=True, slots=True, eq=False)
class Pinning:
    """Places the stable prefixes of `trace`, and caches each placement. `use` decides whether later
    simulations have the quick or the polished placement of some pools.
    """

    trace: Trace
    _traffic: dict[tuple[WorkerType, str], StableTraffic] = field(default_factory=dict, init=False)
    _placed: dict[PlacementKey, PrefixPlan] = field(default_factory=dict, init=False)
    _polished: dict[PlacementKey, PolishedPins] = field(default_factory=dict, init=False)
    # The polished placements that `placed` returns instead of the quick ones.
    _used: dict[PlacementKey, PrefixPlan] = field(default_factory=dict, init=False)

    def pinned_prefixes(self, pools: Sequence[Pool]) -> tuple[PinnedPrefix, ...]:
        """The pinned prefixes of these pools, whose workers are numbered in the order of the pools."""
        workers = sum(pool.count for pool in pools if pool.role != "decode")
        holders: dict[tuple[int, ...], list[int]] = {}  # The workers that hold a prefix, by its block ids.
        first = 0  # The number of a pool's first worker.
        for pool in pools:
            if pool.role != "decode" and pool.count:
                # A worker's leaves are its longest placed prefixes, which hold all shorter ones.
                for worker, leaves in enumerate(leaves_of(self.trace, self.placed(pool, workers)), first):
                    for leaf in leaves:
                        holders.setdefault(leaf.block_ids, []).append(worker)
            first += pool.count
        return tuple(
            PinnedPrefix(ids, self.trace.prefix_block_tokens, tuple(holding_workers))
            for ids, holding_workers in holders.items()
        )

    def with_session_hits(self, pools: Sequence[Pool]) -> Callable[[Pool], PrefixPlan]:
        """A function that returns the placement of each of these pools, with the hits of sessions that a
        quick replay of the trace estimates (prefix_replay.py).
        """
        workers = sum(pool.count for pool in pools if pool.role != "decode")
        memories = [
            NO_MEMORY if pool.role == "decode" else memory_for_prefixes(self.trace, pool, workers)
            for pool in pools
        ]
        hits = replayed_hits(self.trace, pools, memories, self.pinned_prefixes(pools))
        hit_frac = {pool.name: hit for pool, hit in zip(pools, hits, strict=True)}

        def placed_with_hits(pool: Pool) -> PrefixPlan:
            # The placement was cached for equal workers, whose pool may have had another name.
            plan = replace(self.placed(pool, workers), pool=pool)
            # The replay counts all hits, also those of pinned prefixes, whose separate estimate may be
            # larger.
            return replace(plan, session_hit_frac=max(hit_frac[pool.name] - plan.stable_hit_frac, 0.0))

        return placed_with_hits

    def hit_frac(self, fleet: Fleet) -> float:
        """The share of input tokens that hit pinned prefixes: the mean over the workers that prefill. Hits of
        sessions do not count.
        """
        pools = [pool for pool in fleet.pools if pool.role != "decode"]
        workers = sum(pool.count for pool in pools)
        return sum(pool.count * self.placed(pool, workers).stable_hit_frac for pool in pools) / workers

    def placed(self, pool: Pool, workers: int) -> PrefixPlan:
        """The placement of prefixes on one pool, if `workers` workers of all pools share the requests."""
        key = PlacementKey(pool.type, pool.role, pool.count, workers)
        if (polished := self._in_use(key)) is not None:
            return polished
        if key not in self._placed:
            type_and_role = pool.type, pool.role
            if type_and_role not in self._traffic:
                self._traffic[type_and_role] = stable_traffic(self.trace, pool)
            traffic = self._traffic[type_and_role]
            memory_tokens = memory_for_prefixes(self.trace, pool, workers).placed_tokens
            replication = replicate_quickly(
                traffic.demand, pool.count, memory_tokens, sessions=traffic.sessions, routings=QUICK_ROUTINGS
            )
            plan = estimate_plan(pool, traffic, replication, memory_tokens)
            self._placed[key] = replace(plan, stable_hit_frac=_hit_frac(plan))
        return self._placed[key]

    def polish(self, pools: Sequence[Pool], *, time_limit_s: float = math.inf) -> dict[str, PolishedPins]:
        """For each pool that prefills, by name, its quick placement and the best one found.

        Simulations use the quick placement until `use` is called. The effort is fixed, so the result depends
        on the clock only if `time_limit_s` ends the work.
        """
        answers = {}
        for pool, key in _prefill_pools(pools):
            if key not in self._polished:
                # Looked up first, because `placed` returns a polished placement where one is in use.
                quick = self._placed.get(key) or self.placed(pool, key.sharing_workers)
                demand, sessions = quick.traffic.demand, quick.traffic.sessions
                best = polish_replication(
                    demand,
                    quick.replication,
                    quick.memory_tokens,
                    sessions=sessions,
                    rng=np.random.default_rng(POLISH_SEED),
                    time_limit_s=time_limit_s,
                )
                plan = estimate_plan(pool, quick.traffic, best, quick.memory_tokens)
                plan = replace(plan, stable_hit_frac=_hit_frac(plan))
                # The bound holds for every placement, so it also bounds the load of the quick one.
                bound = min(best.bound, quick.replication.largest_load)
                quick = replace(quick, replication=replace(quick.replication, bound=bound))
                self._placed[key], self._polished[key] = quick, PolishedPins(quick, plan)
            answers[pool.name] = self._polished[key]
        return answers

    def use(self, pools: Sequence[Pool], *, is_polished: bool = True) -> None:
        """Use the polished placement of these pools from now on, or the quick one again."""
        for _, key in _prefill_pools(pools):
            if is_polished:
                self._used[key] = self._polished[key].best
            else:
                self._used.pop(key, None)

    def uses_polished(self, pools: Sequence[Pool]) -> bool:
        """Whether a simulation of these pools uses a polished placement."""
        return bool(self._used) and any(self._in_use(key) is not None for _, key in _prefill_pools(pools))

    def _in_use(self, key: PlacementKey) -> PrefixPlan | None:
        """The polished placement of these workers if it is in use, else None. Workers that differ only in
        their step times count as the same: a scenario with longer steps keeps the placement.
        """
        for used_key, plan in self._used.items():
            if key._replace(type=replace(key.type, latency=used_key.type.latency)) == used_key:
                return plan
        return None


def _prefill_pools(pools: Sequence[Pool]) -> list[tuple[Pool, PlacementKey]]:
    """The pools that prefill, with the keys of their placements."""
    serving = [pool for pool in pools if pool.role != "decode" and pool.count]
    workers = sum(pool.count for pool in serving)
    return [(pool, PlacementKey(pool.type, pool.role, pool.count, workers)) for pool in serving]


def _hit_frac(plan: PrefixPlan) -> float:
    """The share of input tokens that are pinned on the worker to which the router sends the request, which is
    the one with the longest part of its prompt.

    The estimate of prefix_placing.py assumes another routing: it splits requests over workers so that the
    largest load is least.
    """
    demand, placed = plan.traffic.demand, plan.replication.placed  # `placed` is (nodes, workers).
    pinned_tokens = [demand.path_sum(demand.tokens * placed[:, r]) for r in range(placed.shape[1])]
    longest_tokens = np.max(pinned_tokens, axis=0)
    return float(demand.rate_rps @ longest_tokens) / plan.traffic.input_tokens_per_s
