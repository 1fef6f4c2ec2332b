"""Prices for requests: what a replica is best filled with, the bound that follows, and the search by both.

At prices mu_u per request of class u one replica is worth at most

  T(mu) = max_x  sum_u b_u max(0, mu_u - c_u(x)) + s(x)

where c_u(x) is the work of a request that hits what of its path is in x, s(x) the session work that the
memory left saves, and b_u what one replica can serve of u: a_u, and no more than it has time for. Whether a
node is in x moves c_u by the node's own seconds for all classes below it, once its parent is there; so every
node has a gain of its own, and T is a knapsack over a tree, solved by dynamic programming
(`Prices.best_replica`).

Bound: whoever serves all traffic on R replicas with largest load L has  L >= sum_u mu_u a_u / R - T(mu)  for
every mu, by Lagrange's relaxation of served_u. With b_u from a guess at L, a bound above the guess refutes
it; the guess is bisected, mu climbs by subgradients (`Prices.bound`).

Search: the routing LP of a placement has prices pi_r of replicas. With the others' cheapest offers
mu_u = min_r' pi_r' c_ur' / pi_r a replica is filled anew; what gains most at these prices is routed, until
nothing gains; then up to three replicas are emptied, filled one by one, and so on (`Prices.search`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.errors import PlannerError
from planner.files.code_cache import cached_jit
from planner.solvers.prefix_demand import SAME_FRAC, Bools, Floats, Ints, PrefixDemand, SessionReuse

CELLS = 2000  # that memory is cut into
CLIMB_STEPS, BISECTIONS = 300, 8  # of the bound
SMOOTHING, PATIENCE, SHORTER, SHORTEST = 0.3, 20, 0.7, 0.003  # of a climb
EVENED = (0.0, 0.5)  # how far the prices of replicas are pulled to their mean before one is filled anew
LEAST_PRICE = 0.05  # of a replica, as a share of the mean
MOST_ROUTED = 2  # of the fillings that look best
GAIN_FRAC = 1e-4
WORSE_FRAC = 0.003  # that a placement may be and still be searched on from
MOST_EMPTIED = 3
NOISE = 0.5  # of the logarithm of rates while replicas are filled again


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """A placement x (V, R) with its best routing: y (V, R), the loads (R,), and the replicas' prices (R,)."""

    placed: Bools
    rates_rps: Floats
    load: Floats
    price: Floats

    @property
    def largest_load(self) -> float:
        return float(self.load.max())


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPrices:
    """An instance of the placement problem, laid out for the above."""

    demand: PrefixDemand
    replicas: int
    memory_tokens: int
    sessions: SessionReuse
    order: Ints = field(init=False)  # (V,) nodes, each followed by its subtree
    size: Ints = field(init=False)  # (V,) of the subtree
    on_path: tuple[Ints, Ints] = field(init=False)  # (class, node) for all nodes of its path
    hit_s: Floats = field(init=False)  # of each of those: c if the path is cached down to the node

    def __post_init__(self) -> None:
        demand = self.demand
        size = demand.subtree_sum(np.ones(len(demand))).astype(np.int64)
        below: list[list[int]] = [[] for _ in range(len(demand) + 1)]  # the last: roots
        for v, parent in enumerate(demand.parent.tolist()):
            below[parent].append(v)
        order: list[int] = []
        stack = below[-1][::-1]
        while stack:
            order.append(stack.pop())
            stack += below[order[-1]][::-1]
        pairs = [(u, v) for u in np.flatnonzero(demand.rate_rps).tolist() for v in demand.path(u)]
        classes, nodes = np.array(pairs, np.int64).reshape(-1, 2).T
        hit_s = demand.work_s[classes] - demand.path_sum(demand.prefill_s)[nodes]
        for name, value in (
            ("order", np.array(order)),
            ("size", size),
            ("on_path", (classes, nodes)),
            ("hit_s", hit_s),
        ):
            object.__setattr__(self, name, value)

    def cost_s(self, placed: Bools) -> Floats:
        """c: work of one request of each class where these nodes are cached; (V,)."""
        classes, nodes = self.on_path
        saved_s = self.demand.prefill_s[nodes] * placed[nodes]
        return self.demand.work_s - np.bincount(classes, weights=saved_s, minlength=len(self.demand))

    def session_s(self, placed: Bools) -> Floats:
        """What the memory left saves for sessions on each replica of x (V, R), or on one of x (V,)."""
        left_tokens = self.memory_tokens - self.demand.tokens @ placed
        return self.sessions.at(self.replicas * left_tokens) / self.replicas

    def best_replica(self, most_rps: Floats, price_s: Floats, *, fits: bool = True) -> tuple[float, Bools]:
        """T and the x (V,) that has it. Tokens are counted in cells: rounded up so that x `fits`, else down,
        so that nothing is worth more.
        """
        demand, (classes, nodes) = self.demand, self.on_path
        without_s = self.hit_s + demand.prefill_s[nodes]
        offered = price_s[classes]
        gain_s = np.maximum(offered - self.hit_s, 0.0) - np.maximum(offered - without_s, 0.0)
        gain = np.asarray(np.bincount(nodes, most_rps[classes] * gain_s, len(demand)), float)
        cell = max(-(-self.memory_tokens // CELLS), 1)
        cells = self.memory_tokens // cell
        need = -(-demand.tokens // cell) if fits else demand.tokens // cell
        spare = self.memory_tokens - cell * cells
        last = self.sessions.at(self.replicas * (cell * np.arange(cells + 1) + spare)) / self.replicas
        worth, placed = _knapsack(self.order, self.size, need, gain, last)
        uncached = float(most_rps @ np.maximum(price_s - demand.work_s, 0.0))
        return uncached + worth, placed

    def load_bound(self, low: float, high: float) -> float:
        """The largest guess at L between the two that was refuted; `low` if none was."""
        demand = self.demand
        within = demand.path_sum(demand.tokens) <= self.memory_tokens
        cached_s = demand.work_s - demand.path_sum(demand.prefill_s * within)
        spared_s = float(self.sessions.saved_s[-1]) / self.replicas
        start = cached_s
        for _ in range(BISECTIONS):
            if high <= low * (1 + SAME_FRAC):
                break
            guess = (low + high) / 2
            most_rps = np.divide(
                guess + spared_s, cached_s, out=np.full(len(demand), np.inf), where=cached_s > 0
            )
            reached, price_s = self._climb(start, np.minimum(demand.rate_rps, most_rps), guess)
            if reached > guess * (1 + SAME_FRAC):
                low, start = guess, price_s
            else:
                high = guess
        return low

    def _climb(self, price_s: Floats, most_rps: Floats, beyond: float) -> tuple[float, Floats]:
        """Raise sum_u mu_u a_u / R - T(mu) until it is `beyond` or climbs no more; the value and its mu."""
        rate_rps, replicas = self.demand.rate_rps, self.replicas
        used = rate_rps > 0
        scale = np.divide(1.0, rate_rps, out=np.zeros(len(used)), where=used)
        best, best_s, length, stalled = -np.inf, price_s, 1.0, 0
        average: Floats | None = None
        for _ in range(CLIMB_STEPS):
            worth, placed = self.best_replica(most_rps, price_s, fits=False)
            value = float(rate_rps @ price_s) / replicas - worth
            stalled = 0 if value > best + 1e-5 * abs(best) else stalled + 1
            if value > best:
                best, best_s = value, price_s
            if best > beyond * (1 + SAME_FRAC):
                break
            if stalled >= PATIENCE:
                length, stalled, price_s, average = length * SHORTER, 0, best_s, None
                if length < SHORTEST:
                    break
                continue
            slope = rate_rps / replicas - most_rps * (price_s > self.cost_s(placed) + 1e-12)
            average = slope if average is None else SMOOTHING * slope + (1 - SMOOTHING) * average
            step = length * max(1.05 * beyond - value, 0.0) / (float(scale @ average**2) + 1e-15)
            price_s = np.maximum(price_s + step * scale * average, 0.0)
        return best, best_s

    def best_routing(self, placed: Bools) -> Routed:
        """The best routing of a placement, by the LP that is left: min L; of equal ones the least work."""
        from scipy.optimize import linprog  # here: a third of a second, for every command
        from scipy.sparse import csr_array

        demand, replicas = self.demand, placed.shape[1]
        used = np.flatnonzero(demand.rate_rps)
        cost_s = np.stack([self.cost_s(placed[:, r]) for r in range(replicas)], axis=1)
        session_s = self.session_s(placed)
        rates_rps = np.zeros(placed.shape)
        if not len(used):
            return Routed(placed, rates_rps, -session_s, np.full(replicas, 1 / replicas))
        cells = len(used) * replicas
        cell, replica = np.arange(cells), np.tile(np.arange(replicas), len(used))
        each_s = cost_s[used].ravel()
        loads = csr_array(
            (
                np.concatenate((each_s, -np.ones(replicas))),
                (
                    np.concatenate((replica, np.arange(replicas))),
                    np.concatenate((cell, np.full(replicas, cells))),
                ),
            ),
            shape=(replicas, cells + 1),
        )
        served = csr_array(
            (np.ones(cells), (np.repeat(np.arange(len(used)), replicas), cell)), shape=(len(used), cells + 1)
        )
        answer = linprog(
            np.append(SAME_FRAC / replicas * each_s, 1.0),
            A_ub=loads,
            b_ub=session_s,
            A_eq=served,
            b_eq=demand.rate_rps[used],
            bounds=[(0, None)] * cells + [(None, None)],
            method="highs",
        )
        if not answer.success:
            raise PlannerError(f"prefixes: no routing was found ({answer.message}); ask for fewer nodes")
        rates_rps[used] = answer.x[:-1].reshape(len(used), replicas)
        load = (cost_s * rates_rps).sum(axis=0) - session_s
        price = np.maximum(-answer.ineqlin.marginals, 0.0)
        return Routed(placed, rates_rps, load, price / price.sum())

    def fill_replicas(self, placed: Bools, empty: Sequence[int], most_rps: Floats) -> Bools:
        """x with the replicas of `empty` filled in turn, each for what the others do not spare."""
        placed = placed.copy()
        placed[:, empty] = False
        cost_s = np.stack([self.cost_s(placed[:, r]) for r in range(self.replicas)], axis=1)
        for r in empty:
            others_s = np.delete(cost_s, r, axis=1).min(axis=1, initial=np.inf)
            price_s = np.minimum(others_s, self.demand.work_s)
            placed[:, r] = self.best_replica(most_rps, price_s)[1]
            cost_s[:, r] = self.cost_s(placed[:, r])
        return placed

    def descend(self, placed: Bools, enough: float, budget: RoutingBudget) -> Routed:
        """A placement from which no replica filled anew at the prices of its routing gains."""
        routing = self.best_routing(placed)
        budget.spent += 1
        while routing.largest_load > enough and not budget.is_spent():
            for candidate in self._promising(routing):
                budget.spent += 1
                other = self.best_routing(candidate)
                if other.largest_load < routing.largest_load * (1 - GAIN_FRAC):
                    routing = other
                    break
            else:
                break
        return routing

    def _promising(self, routing: Routed) -> list[Bools]:
        """Placements with one replica filled anew; at the prices known they gain, the best first."""
        demand, replicas = self.demand, self.replicas
        cost_s = np.stack([self.cost_s(routing.placed[:, r]) for r in range(replicas)], axis=1)
        session_s = self.session_s(routing.placed)
        even = np.full(replicas, 1 / replicas)
        seen = (routing.price, even, (routing.price + even) / 2)
        candidates: list[tuple[float, int, Bools]] = []
        for r in range(replicas):
            others = np.arange(replicas) != r
            for evened in EVENED:
                price = np.maximum((1 - evened) * routing.price + evened * even, LEAST_PRICE / replicas)
                offer_s = (price[others] * cost_s[:, others]).min(axis=1, initial=np.inf) / price[r]
                _, column = self.best_replica(
                    demand.rate_rps, np.minimum(offer_s, demand.work_s.max() * replicas)
                )
                if (column == routing.placed[:, r]).all():
                    continue
                cost, session = cost_s.copy(), session_s.copy()
                cost[:, r], session[r] = self.cost_s(column), self.session_s(column)
                at_least = max(float(demand.rate_rps @ (pi * cost).min(axis=1) - pi @ session) for pi in seen)
                if at_least < routing.largest_load * (1 - GAIN_FRAC):
                    candidates.append((at_least, r, column))
        placements = []
        for _, r, column in sorted(candidates, key=lambda one: one[:2])[:MOST_ROUTED]:
            placements.append(routing.placed.copy())
            placements[-1][:, r] = column
        return placements

    def search(
        self, routing: Routed, enough: float, budget: RoutingBudget, rng: np.random.Generator
    ) -> Routed:
        """Placements around `routing`, until one has a largest load of `enough` or the budget is spent."""
        best = here = routing
        while best.largest_load > enough and not budget.is_spent():
            count = int(rng.integers(1, min(MOST_EMPTIED, self.replicas) + 1))
            empty = rng.permutation(self.replicas)[:count].tolist()
            most_rps = self.demand.rate_rps * rng.lognormal(0.0, NOISE, len(self.demand))
            other = self.descend(self.fill_replicas(here.placed, empty, most_rps), enough, budget)
            if other.largest_load < here.largest_load * (1 + WORSE_FRAC):
                here = other
            best = min(best, here, key=lambda one: one.largest_load)
        return best


@dataclass(slots=True)
class RoutingBudget:
    """Routings that a search may try, which no clock decides, and a time limit all the same."""

    routings: int
    ends_s: float  # on time.monotonic's clock
    spent: int = 0

    def is_spent(self) -> bool:
        return self.spent >= self.routings or time.monotonic() > self.ends_s


@cached_jit(nogil=True)
def _knapsack(order: Ints, size: Ints, need: Ints, gain: Floats, last: Floats) -> tuple[float, Bools]:
    """Nodes of most gain that fit, none without its parent; `last` (cells + 1,) is what free cells are worth.

    best[i, m] is the most that order[i:] can gain with m cells left.
    """
    nodes, cells = len(order), len(last) - 1
    best = np.empty((nodes + 1, cells + 1))
    best[nodes] = last
    for i in range(nodes - 1, -1, -1):
        v = order[i]
        after = i + size[v]
        for m in range(cells + 1):
            best[i, m] = best[after, m]
            if m >= need[v] and best[i + 1, m - need[v]] + gain[v] > best[i, m]:
                best[i, m] = best[i + 1, m - need[v]] + gain[v]
    placed = np.zeros(nodes, np.bool_)
    i, m = 0, cells
    while i < nodes:
        v = order[i]
        if best[i, m] > best[i + size[v], m]:
            placed[v] = True
            m -= need[v]
            i += 1
        else:
            i += size[v]
    return best[0, cells], placed
