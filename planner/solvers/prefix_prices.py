"""Chooses which prefixes to cache on which replica: a bound and a search, both by prices for requests.

A replica caches a set x of nodes of the prefix tree (prefix_demand.py). At prices mu_u [s] per request of
class u one replica is worth at most

  T(mu) = max_x  sum_u b_u max(0, mu_u - c_u(x)) + s(x)

Here c_u(x) is the work [s] of a request of u if the nodes of its path that are in x are cached; s(x) is the
work of sessions that the remaining memory saves; b_u are the requests/s of u that one replica can serve: all
a_u of them, or as many as it has time for. If its parent is cached, a cached node saves its own seconds for
every class below it. So every node has a gain of its own, and T is a knapsack over a tree, solved by dynamic
programming (`PrefixPrices.best_replica`).

Bound: if R replicas serve all traffic with largest load L, then  L >= sum_u mu_u a_u / R - T(mu)  for every
mu, by Lagrange's relaxation of the rows served_u (prefix_replication.py). b_u follows from a guess at L, and
a bound above the guess refutes it. The guess is found by bisection, and mu by subgradient steps
(`PrefixPrices.load_bound`).

Search: the duals of the linear program that routes requests to a placement are prices pi_r of replicas. One
replica r is filled anew for the prices at which the other replicas r' would serve, mu_u = min over r' of
pi_r' c_ur' / pi_r. The fillings that gain most at these prices are routed, and this is repeated until no
filling gains. Then up to MOST_EMPTIED replicas are emptied and filled one by one, and the search goes on from
that placement (`PrefixPrices.search_placements`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.errors import PlannerError
from planner.files.code_cache import cached_jit
from planner.solvers.prefix_demand import SAME_FRAC, Bools, Floats, Ints, PrefixDemand, SessionReuse

# These numbers decide how near the search and the bound come to each other, and how long that takes; any
# numbers give a valid bound. They were set by hand.
CELLS = 2000  # The knapsack counts memory in this many cells.
BISECTIONS = 8  # The guess at the largest load is bisected this often, to 1/256 of the first interval.
# The climb to the best mu takes at most CLIMB_STEPS steps along a mean of slopes, in which the newest slope
# has the weight SMOOTHING. A rise by less than PROGRESS_FRAC is no progress; after PATIENCE steps without
# progress steps become shorter by the factor SHORTER, down to the length SHORTEST.
CLIMB_STEPS = 300
SMOOTHING = 0.3
PROGRESS_FRAC = 1e-5
PATIENCE = 20
SHORTER, SHORTEST = 0.7, 0.003
BEYOND_FACTOR = 1.05  # Steps aim at this many times the value that is to be exceeded.
SAME_S = 1e-12  # Seconds that differ by less are equal but for rounding.
NO_SLOPE = 1e-15  # Added to a squared slope that may be 0, because the step is divided by it.
EVENED = (0.0, 0.5)  # Before a replica is filled anew, prices are moved towards their mean by these shares.
LEAST_PRICE = 0.05  # The least price of a replica, as a share of the mean.
MOST_ROUTED = 2  # This many of the most promising fillings are routed.
GAIN_FRAC = 1e-4  # A change that lowers the largest load by less than this share is no gain.
WORSE_FRAC = 0.003  # The search goes on from a placement whose largest load is worse by less than this share.
MOST_EMPTIED = 3  # To leave a local optimum at most this many replicas are emptied at once.
# While replicas are filled again, rates are multiplied by lognormal noise with this standard deviation of the
# logarithm.
NOISE = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class RoutedPlacement:
    """A placement x (V, R) with its best routing: rates y (V, R) by class and replica, the loads (R,) in
    seconds of work per second, and the prices pi (R,) of the replicas, whose sum is 1.
    """

    placed: Bools
    rates_rps: Floats
    load: Floats
    price: Floats

    @property
    def largest_load(self) -> float:
        """The load of the busiest replica [s/s]."""
        return float(self.load.max())


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPrices:
    """An instance of the placement problem with V nodes and R replicas. Class u is the requests whose prefix
    ends at node u. There are P pairs of a class and a node of its path.
    """

    demand: PrefixDemand
    replicas: int
    memory_tokens: int
    sessions: SessionReuse
    order: Ints = field(init=False)  # (V,) All nodes, each followed by its subtree.
    size: Ints = field(init=False)  # (V,) How many nodes the subtree of each node has, itself included.
    on_path: tuple[Ints, Ints] = field(init=False)  # The classes (P,) and the nodes (P,) of all pairs.
    hit_s: Floats = field(init=False)  # (P,) c of the class if its path is cached down to this node.

    def __post_init__(self) -> None:
        demand = self.demand
        size = demand.subtree_sum(np.ones(len(demand))).astype(np.int64)
        # The children of each node. The parent of a root is -1, so the last list holds the roots.
        children: list[list[int]] = [[] for _ in range(len(demand) + 1)]
        for v, parent in enumerate(demand.parent.tolist()):
            children[parent].append(v)
        order: list[int] = []
        stack = children[-1][::-1]
        while stack:
            order.append(stack.pop())
            stack += children[order[-1]][::-1]
        pairs = [(u, v) for u in np.flatnonzero(demand.rate_rps).tolist() for v in demand.path(u)]
        classes, nodes = np.array(pairs, np.int64).reshape(-1, 2).T
        hit_s = demand.work_s[classes] - demand.path_sum(demand.prefill_s)[nodes]
        for name, value in (  # The class is frozen, so its own fields are set past `__setattr__`.
            ("order", np.array(order)),
            ("size", size),
            ("on_path", (classes, nodes)),
            ("hit_s", hit_s),
        ):
            object.__setattr__(self, name, value)

    def cost_s(self, placed: Bools) -> Floats:
        """c (V,): the work of one request of each class if the nodes `placed` (V,) are cached."""
        classes, nodes = self.on_path
        saved_s = self.demand.prefill_s[nodes] * placed[nodes]
        return self.demand.work_s - np.bincount(classes, weights=saved_s, minlength=len(self.demand))

    def session_s(self, placed: Bools) -> Floats:
        """s(x) [s/s] on each replica of x (V, R), or on one replica with x (V,)."""
        return self._saved_s_per_s(self.memory_tokens - self.demand.tokens @ placed)

    def _saved_s_per_s(self, free_tokens: Ints) -> Floats:
        """The work of sessions that a replica's free memory saves: an equal share of what all replicas would
        save if each had as much free memory.
        """
        return self.sessions.at(self.replicas * free_tokens) / self.replicas

    def best_replica(self, most_rps: Floats, price_s: Floats, *, fits: bool = True) -> tuple[float, Bools]:
        """T(mu) and the x (V,) that attains it, for b `most_rps` (V,) and mu `price_s` (V,). Tokens are
        counted in cells of memory: rounded up so that x `fits`, or rounded down so that T is a bound.
        """
        demand, (classes, nodes) = self.demand, self.on_path
        # What a node adds to the worth of each class below it, if its parent is cached too.
        parent_hit_s = self.hit_s + demand.prefill_s[nodes]
        offered_s = price_s[classes]
        gain_s = np.maximum(offered_s - self.hit_s, 0.0) - np.maximum(offered_s - parent_hit_s, 0.0)
        gain = np.asarray(np.bincount(nodes, most_rps[classes] * gain_s, len(demand)), float)
        cell_tokens = max(-(-self.memory_tokens // CELLS), 1)  # Rounded up, as -(-a // b) is.
        cells = self.memory_tokens // cell_tokens
        need = -(-demand.tokens // cell_tokens) if fits else demand.tokens // cell_tokens
        spare_tokens = self.memory_tokens - cell_tokens * cells
        session_s = self._saved_s_per_s(cell_tokens * np.arange(cells + 1) + spare_tokens)
        worth, placed = _knapsack(self.order, self.size, need, gain, session_s)
        worth_uncached = float(most_rps @ np.maximum(price_s - demand.work_s, 0.0))
        return worth_uncached + worth, placed

    def load_bound(self, low: float, high: float) -> float:
        """A lower bound of the largest load, which is known to be between `low` and `high`: the largest guess
        that was refuted, or `low`.
        """
        demand = self.demand
        path_fits = demand.path_sum(demand.tokens) <= self.memory_tokens
        # The least work of a request, and the most work of sessions that memory can save on a replica.
        cached_s = demand.work_s - demand.path_sum(demand.prefill_s * path_fits)
        spared_s = float(self.sessions.saved_s_per_s[-1]) / self.replicas
        start = cached_s
        for _ in range(BISECTIONS):  # Each one halves the interval from `low` to `high`.
            if high <= low * (1 + SAME_FRAC):
                break
            guess = (low + high) / 2
            # b: the requests/s of each class for which a replica has time if its load is the guess.
            most_rps = np.divide(
                guess + spared_s, cached_s, out=np.full(len(demand), np.inf), where=cached_s > 0
            )
            bound, price_s = self._raise_prices(start, np.minimum(demand.rate_rps, most_rps), guess)
            if bound > guess * (1 + SAME_FRAC):
                low, start = guess, price_s
            else:
                high = guess
        return low

    def _raise_prices(self, price_s: Floats, most_rps: Floats, beyond: float) -> tuple[float, Floats]:
        """Raise sum_u mu_u a_u / R - T(mu) from mu `price_s` until it is above `beyond` or rises no more;
        returns the value and its mu. Steps are Polyak's for a target just above `beyond`, along a mean of the
        last slopes.
        """
        rate_rps, replicas = self.demand.rate_rps, self.replicas
        has_rate = rate_rps > 0
        # The step of a class is divided by its rate; a class without requests has no step.
        scale = np.divide(1.0, rate_rps, out=np.zeros(len(has_rate)), where=has_rate)
        best_value, best_price_s, step_length, stalled = -np.inf, price_s, 1.0, 0
        mean_slope: Floats | None = None
        for _ in range(CLIMB_STEPS):
            worth, placed = self.best_replica(most_rps, price_s, fits=False)
            value = float(rate_rps @ price_s) / replicas - worth
            stalled = 0 if value > best_value + PROGRESS_FRAC * abs(best_value) else stalled + 1
            if value > best_value:
                best_value, best_price_s = value, price_s
            if best_value > beyond * (1 + SAME_FRAC):
                break
            if stalled >= PATIENCE:
                step_length *= SHORTER
                if step_length < SHORTEST:
                    break
                stalled, price_s, mean_slope = 0, best_price_s, None
                continue
            # The slope in mu. T rises with the price of every class that is worth serving on the best
            # replica: its price is above its work there.
            slope = rate_rps / replicas - most_rps * (price_s > self.cost_s(placed) + SAME_S)
            mean_slope = slope if mean_slope is None else SMOOTHING * slope + (1 - SMOOTHING) * mean_slope
            missing_s = max(BEYOND_FACTOR * beyond - value, 0.0)
            step = step_length * missing_s / (float(scale @ mean_slope**2) + NO_SLOPE)
            price_s = np.maximum(price_s + step * scale * mean_slope, 0.0)
        return best_value, best_price_s

    def best_routing(self, placed: Bools) -> RoutedPlacement:
        """The routing of a placement with the smallest largest load L; of equal ones that with the least
        work. A linear program is solved.
        """
        from scipy.optimize import linprog  # Importing it takes 0.3 s, which most commands need not spend.
        from scipy.sparse import csr_array

        demand, replicas = self.demand, placed.shape[1]
        used_classes = np.flatnonzero(demand.rate_rps)
        cost_s = np.stack([self.cost_s(placed[:, r]) for r in range(replicas)], axis=1)
        session_s = self.session_s(placed)
        rates_rps = np.zeros(placed.shape)
        if not len(used_classes):  # Loads are then negative: memory saves work of sessions, and adds none.
            return RoutedPlacement(placed, rates_rps, -session_s, np.full(replicas, 1 / replicas))
        # Columns: the rate of each class on each replica, class after class, and L at the end.
        rates = len(used_classes) * replicas
        rate_column, rate_replica = np.arange(rates), np.tile(np.arange(replicas), len(used_classes))
        rate_cost_s = cost_s[used_classes].ravel()
        loads = csr_array(
            (
                np.concatenate((rate_cost_s, -np.ones(replicas))),
                (
                    np.concatenate((rate_replica, np.arange(replicas))),
                    np.concatenate((rate_column, np.full(replicas, rates))),
                ),
            ),
            shape=(replicas, rates + 1),
        )
        served = csr_array(
            (np.ones(rates), (np.repeat(np.arange(len(used_classes)), replicas), rate_column)),
            shape=(len(used_classes), rates + 1),
        )
        # L, and beside it the work with a weight so small that it decides only between equal L.
        answer = linprog(
            np.append(SAME_FRAC / replicas * rate_cost_s, 1.0),
            A_ub=loads,
            b_ub=session_s,
            A_eq=served,
            b_eq=demand.rate_rps[used_classes],
            bounds=[(0, None)] * rates + [(None, None)],
            method="highs",
        )
        if not answer.success:
            raise PlannerError(f"prefixes: no routing was found ({answer.message}); ask for fewer nodes")
        rates_rps[used_classes] = answer.x[:-1].reshape(len(used_classes), replicas)
        load = (cost_s * rates_rps).sum(axis=0) - session_s
        price = np.maximum(-answer.ineqlin.marginals, 0.0)
        return RoutedPlacement(placed, rates_rps, load, price / price.sum())

    def fill_replicas(self, placed: Bools, empty: Sequence[int], most_rps: Floats) -> Bools:
        """x (V, R) with the replicas `empty` filled one after another. At each filling the price mu of a
        class is its least work on any other replica.
        """
        placed = placed.copy()
        placed[:, empty] = False
        cost_s = np.stack([self.cost_s(placed[:, r]) for r in range(self.replicas)], axis=1)
        for r in empty:
            others_s = np.delete(cost_s, r, axis=1).min(axis=1, initial=np.inf)
            price_s = np.minimum(others_s, self.demand.work_s)
            placed[:, r] = self.best_replica(most_rps, price_s)[1]
            cost_s[:, r] = self.cost_s(placed[:, r])
        return placed

    def refill_while_better(self, placed: Bools, enough: float, budget: RoutingBudget) -> RoutedPlacement:
        """Fill single replicas anew as long as that gains, at most until the largest load is `enough`."""
        routing = self.best_routing(placed)
        budget.spent += 1
        while routing.largest_load > enough and not budget.is_spent():
            for candidate in self._promising_placements(routing):
                budget.spent += 1
                other = self.best_routing(candidate)
                if other.largest_load < routing.largest_load * (1 - GAIN_FRAC):
                    routing = other
                    break
            else:
                break
        return routing

    def _promising_placements(self, routing: RoutedPlacement) -> list[Bools]:
        """Placements with one replica filled anew, the most promising first. Any prices of replicas give a
        lower bound of a placement's largest load. A placement whose bound is not below the largest load of
        `routing` cannot be better, and is left out.
        """
        demand, replicas = self.demand, self.replicas
        cost_s = np.stack([self.cost_s(routing.placed[:, r]) for r in range(replicas)], axis=1)
        session_s = self.session_s(routing.placed)
        even = np.full(replicas, 1 / replicas)
        # Three prices that each give a bound; a placement's bound is the largest of them.
        bounding_prices = (routing.price, even, (routing.price + even) / 2)
        candidates: list[tuple[float, int, Bools]] = []
        for r in range(replicas):
            others = np.arange(replicas) != r
            for evened in EVENED:
                price = np.maximum((1 - evened) * routing.price + evened * even, LEAST_PRICE / replicas)
                offer_s = (price[others] * cost_s[:, others]).min(axis=1, initial=np.inf) / price[r]
                # A single replica has no others, so its offers are infinite; a price that is finite and high
                # does the same.
                _, column = self.best_replica(
                    demand.rate_rps, np.minimum(offer_s, demand.work_s.max() * replicas)
                )
                if (column == routing.placed[:, r]).all():
                    continue
                new_cost_s, new_session_s = cost_s.copy(), session_s.copy()
                new_cost_s[:, r], new_session_s[r] = self.cost_s(column), self.session_s(column)
                bound = max(
                    float(demand.rate_rps @ (pi * new_cost_s).min(axis=1) - pi @ new_session_s)
                    for pi in bounding_prices
                )
                if bound < routing.largest_load * (1 - GAIN_FRAC):
                    candidates.append((bound, r, column))
        placements = []
        for _, r, column in sorted(candidates, key=lambda candidate: candidate[:2])[:MOST_ROUTED]:
            placements.append(routing.placed.copy())
            placements[-1][:, r] = column
        return placements

    def search_placements(
        self, routing: RoutedPlacement, enough: float, budget: RoutingBudget, rng: np.random.Generator
    ) -> RoutedPlacement:
        """Empty and refill replicas at random, from `routing` on, until the largest load is `enough` or the
        budget is spent; returns the best placement.
        """
        best = current = routing
        while best.largest_load > enough and not budget.is_spent():
            count = int(rng.integers(1, min(MOST_EMPTIED, self.replicas) + 1))
            empty = rng.permutation(self.replicas)[:count].tolist()
            most_rps = self.demand.rate_rps * rng.lognormal(0.0, NOISE, len(self.demand))
            other = self.refill_while_better(
                self.fill_replicas(current.placed, empty, most_rps), enough, budget
            )
            if other.largest_load < current.largest_load * (1 + WORSE_FRAC):
                current = other
            best = min(best, current, key=lambda routed: routed.largest_load)
        return best


@dataclass(slots=True)
class RoutingBudget:
    """How many routings a search may compute, so that its result does not depend on the clock, and a time
    limit for the case that they take too long.
    """

    routings: int
    ends_s: float  # On time.monotonic's clock.
    spent: int = 0

    def left_s(self) -> float:
        """Seconds until the time limit, at least one, so that a solver can begin."""
        return max(self.ends_s - time.monotonic(), 1.0)

    def is_spent(self) -> bool:
        """Whether the routings or the time are used up."""
        return self.spent >= self.routings or time.monotonic() > self.ends_s


@cached_jit(nogil=True)
def _knapsack(order: Ints, size: Ints, need: Ints, gain: Floats, last: Floats) -> tuple[float, Bools]:
    """The largest gain, and the nodes (V,) that give it, none without its parent. A node takes `need` cells
    and gains `gain`; `last` (cells + 1,) is what free cells are worth.

    best[i, m] is the most that order[i:] can gain with m cells free.
    """
    nodes, cells = len(order), len(last) - 1
    best = np.empty((nodes + 1, cells + 1))
    best[nodes] = last
    for i in range(nodes - 1, -1, -1):
        v = order[i]
        after_subtree = i + size[v]  # Without node v all of its subtree is skipped.
        for m in range(cells + 1):
            best[i, m] = best[after_subtree, m]
            if m >= need[v] and best[i + 1, m - need[v]] + gain[v] > best[i, m]:
                best[i, m] = best[i + 1, m - need[v]] + gain[v]
    placed = np.zeros(nodes, np.bool_)
    i, m = 0, cells
    # From the first node on: v is placed where that is better than to skip it.
    while i < nodes:
        v = order[i]
        if best[i, m] > best[i + size[v], m]:
            placed[v] = True
            m -= need[v]
            i += 1
        else:
            i += size[v]
    return best[0, cells], placed
