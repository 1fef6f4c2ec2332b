"""Chooses on which replicas every stable prefix is cached, so that the load of the most loaded replica is
least.

Prefixes form a tree: a node is cached only where its parent is. Replicas are alike. Memory that no prefix
takes serves reuse within sessions, whose savings are a concave curve of the memory (a session stays on one
replica; sessions are spread evenly).

Sets   v  node of the prefix tree, p(v) its parent, sub(v) its subtree, path(v) from the root down to v
       u  class of requests: those whose stable prefix ends at node u           r  replica, 1 ... R
Data   l_v    KV tokens of node v                       M    KV tokens a replica has for prefixes
       w_v    prefill seconds of node v, at its place in the prompt                             [s]
       a_u    requests of class u per second                                                    [requests/s]
       W_u    work of one of them if nothing is cached: prefill and decode                      [s]
       G(m)   session work saved per second by m tokens of cache over all replicas: min_k slope_k m + saved_k
       lambda_v = sum_{u in sub(v)} a_u
Vars   x_vr in {0, 1}  v lives on r;   y_ur >= 0  rate of u sent to r;   h_vr >= 0  rate of hits of v on r
       m_r >= 0  tokens left to sessions on r;   s_r >= 0  session work saved on r;   L  the largest load

  min   L
  s.t.  served_u       sum_r y_ur = a_u
        parent_vr      x_vr <= x_p(v)r
        memory_r       sum_v l_v x_vr + m_r <= M
        hits_vr        h_vr <= sum_{u in sub(v)} y_ur
        cached_vr      h_vr <= lambda_v x_vr
        session_rk     s_r <= slope_k m_r + saved_k / R
        load_r         sum_u W_u y_ur - sum_v w_v h_vr - s_r <= L

Loads are seconds of work per second: a replica keeps up if its load is below 1, and its queues are short if
its load is well below 1.

`hot_bound` is the linear relaxation in closed form. The relaxation may store a part of a node's tokens on
each replica, so that each token is stored only once. Then the R M tokens of all replicas are best filled with
the nodes that save the most seconds per token. If memory is scarce, this bound is far too low. A better
bound, and the placements, come from prices for requests (planner/solvers/prefix_prices.py). A small problem
then goes to a solver as a whole, with the placement found so far as its start.

After Preble (Srivatsa et al. 2024, arXiv:2407.00023), which places online what is planned here.
"""

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import pulp

from planner.errors import InputError
from planner.solvers.backend import run_highs
from planner.solvers.prefix_demand import SAME_FRAC, Bools, Floats, PrefixDemand, SessionReuse
from planner.solvers.prefix_prices import PrefixPrices, RoutedPlacement, RoutingBudget

Cells = dict[tuple[int, int], pulp.LpVariable]  # The variables x by (v, r), and y by (u, r).

WHOLE_CELLS = 300  # Up to this many cells (nodes x replicas) the whole program goes to the solver.
# The solver stops when cells times subproblems of its branch and bound exceed this: 5 CPU seconds for 300
# cells.
WHOLE_WORK = 30_000
# A routing decides to which replicas each class of requests is sent. The search computes this many at most.
ROUTINGS = 1400
POLISH_ROUTINGS = 200  # Polishing computes this many routings: 2 CPU seconds for 120 nodes on 8 replicas.
OPTIMAL_FRAC = 10 * SAME_FRAC  # A load that exceeds its bound by at most this share counts as optimal.


@dataclass(frozen=True, slots=True, eq=False)
class Replication:
    """Where prefixes are cached and where requests go, and the replicas' loads [s of work per s].

    No placement has a largest load below `bound`. `is_optimal` says that this one's is at most OPTIMAL_FRAC
    above it.
    """

    placed: Bools  # x (V, R)
    routed_rps: Floats  # y (V, R)
    session_tokens: Floats  # m (R,)
    load: Floats  # (R,)
    bound: float
    is_optimal: bool

    @property
    def largest_load(self) -> float:
        """The load of the busiest replica [s/s]."""
        return float(self.load.max())

    @property
    def gap_frac(self) -> float:
        """The share of the largest load that is above the bound."""
        return 1 - self.bound / self.largest_load if self.largest_load > 0 else 0.0

    def hits_rps(self, demand: PrefixDemand) -> Floats:
        """h (V, R): requests per second that find node v on r."""
        return demand.subtree_sum(self.routed_rps) * self.placed


def hot_bound(demand: PrefixDemand, replicas: int, memory_tokens: int, sessions: SessionReuse) -> float:
    """A lower bound on the largest load [s/s]: the linear relaxation in closed form (module docstring).

    `memory_tokens` is M, the memory of one replica.
    """
    # The items that may be cached are the nodes of the tree and the pieces of the sessions' curve. An item
    # has tokens, and saves seconds of work per second.
    saved_s = demand.subtree_sum(demand.rate_rps) * demand.prefill_s
    tokens = np.concatenate((demand.tokens, np.diff(sessions.cache_tokens)))
    saved_s = np.concatenate((saved_s, np.diff(sessions.saved_s_per_s)))
    # An item without tokens takes no memory, so it comes first.
    saved_per_token = np.divide(saved_s, tokens, out=np.full(len(tokens), np.inf), where=tokens > 0)
    order = np.argsort(-saved_per_token, kind="stable")
    # The memory that the items before leave for each item, and the share of the item that fits.
    free = replicas * memory_tokens - (np.cumsum(tokens[order]) - tokens[order])
    fitting = np.clip(np.divide(free, tokens[order], out=np.ones(len(order)), where=tokens[order] > 0), 0, 1)
    uncached_s = float(demand.rate_rps @ demand.work_s)
    return max(uncached_s - float(fitting @ saved_s[order]), 0.0) / replicas


def replicate_prefixes(
    demand: PrefixDemand,
    replicas: int,
    memory_tokens: int,
    *,
    sessions: SessionReuse | None = None,
    time_limit_s: float = 60.0,
    gap_frac: float = 0.01,
    routings: int = ROUTINGS,
    rng: np.random.Generator,
) -> Replication:
    """Place prefixes on `replicas` workers with `memory_tokens` for prefixes each (module docstring).

    A small problem goes to the solver, which stops after WHOLE_WORK. The search for a larger one stops when
    the largest load is at most `gap_frac` above its bound, or after `routings` routings. The answer depends
    on the clock only if the time limit comes first. Raises InputError for fewer than one replica, and for
    negative memory.
    """
    if replicas < 1 or memory_tokens < 0:
        raise InputError(f"prefixes: {replicas} replicas of {memory_tokens} tokens, need >= 1 and >= 0")
    budget = RoutingBudget(routings, time.monotonic() + time_limit_s)
    sessions = sessions or SessionReuse()
    prices = PrefixPrices(demand, replicas, memory_tokens, sessions)
    relaxed_load = hot_bound(demand, replicas, memory_tokens, sessions)
    empty = np.zeros((len(demand), replicas), bool)
    start = prices.fill_replicas(empty, range(replicas), demand.rate_rps)
    best = prices.refill_while_better(start, relaxed_load * (1 + gap_frac), budget)
    bound = prices.load_bound(relaxed_load, best.largest_load)
    if len(demand) * replicas <= WHOLE_CELLS:
        best, proven = _solve_whole_program(prices, best, time_limit_s=budget.left_s())
        bound = max(bound, proven)
    elif best.largest_load > bound * (1 + gap_frac):
        best = prices.search_placements(best, bound * (1 + gap_frac), budget, rng)
        bound = prices.load_bound(bound, best.largest_load)
    return _as_replication(prices, best, bound)


def replicate_quickly(
    demand: PrefixDemand, replicas: int, memory_tokens: int, *, sessions: SessionReuse, routings: int
) -> Replication:
    """A placement without a search: replicas are filled one after another, then filled anew as long as that
    lowers the largest load, with at most `routings` routings. It depends on no clock and no random number.
    Its bound is `hot_bound`.
    """
    prices = PrefixPrices(demand, replicas, memory_tokens, sessions)
    bound = hot_bound(demand, replicas, memory_tokens, sessions)
    start = prices.fill_replicas(np.zeros((len(demand), replicas), bool), range(replicas), demand.rate_rps)
    return _as_replication(
        prices, prices.refill_while_better(start, bound, RoutingBudget(routings, math.inf)), bound
    )


def polish_replication(
    demand: PrefixDemand,
    start: Replication,
    memory_tokens: int,
    *,
    sessions: SessionReuse,
    rng: np.random.Generator,
    time_limit_s: float = math.inf,
) -> Replication:
    """The placement `start`, or one with a smaller largest load; with the highest bound that was proved.

    A small problem goes to the solver as a whole, a larger one to the search by prices, each with a fixed
    amount of work. So the answer is the same on every machine, unless the time limit comes first.
    """
    prices = PrefixPrices(demand, start.placed.shape[1], memory_tokens, sessions)
    best = prices.best_routing(start.placed)
    budget = RoutingBudget(POLISH_ROUTINGS, time.monotonic() + time_limit_s)
    known_bound = max(start.bound, hot_bound(demand, prices.replicas, memory_tokens, sessions))
    if best.placed.size <= WHOLE_CELLS:
        best, proven = _solve_whole_program(prices, best, time_limit_s=budget.left_s())
        # Rounding may leave `proven` above the load, which is the highest bound that `load_bound` accepts.
        known_bound = max(known_bound, min(proven, best.largest_load))
    bound = prices.load_bound(known_bound, best.largest_load)
    if best.largest_load > bound * (1 + OPTIMAL_FRAC):
        best = prices.search_placements(best, bound * (1 + OPTIMAL_FRAC), budget, rng)
    replication = _as_replication(prices, best, bound)
    if replication.largest_load < start.largest_load:
        return replication
    is_optimal = start.largest_load <= bound * (1 + OPTIMAL_FRAC)
    return replace(start, bound=min(bound, start.largest_load), is_optimal=is_optimal)


def _as_replication(prices: PrefixPrices, best: RoutedPlacement, bound: float) -> Replication:
    """The placement as a Replication. Rounding may leave `bound` above the largest load; then the bound is
    that load.
    """
    return Replication(
        best.placed,
        best.rates_rps,
        (prices.memory_tokens - prices.demand.tokens @ best.placed).astype(float),
        best.load,
        min(bound, best.largest_load),
        best.largest_load <= bound * (1 + OPTIMAL_FRAC),
    )


def _solve_whole_program(
    prices: PrefixPrices, best: RoutedPlacement, *, time_limit_s: float
) -> tuple[RoutedPlacement, float]:
    """Solve the program of this module, with the placement `best` as the solver's start. Returns the solver's
    placement or `best`, whichever has the smaller largest load; and a lower bound on L, 0 if nothing was
    proved.
    """
    demand, replicas, sessions = prices.demand, range(prices.replicas), prices.sessions
    problem = pulp.LpProblem("prefixes", pulp.LpMinimize)
    largest = problem.add_variable("L")
    subtree_rps = demand.subtree_sum(demand.rate_rps)  # lambda (V,)
    nodes = np.flatnonzero(subtree_rps).tolist()  # Nodes through which some request passes.
    classes = np.flatnonzero(demand.rate_rps).tolist()
    classes_below: dict[int, list[int]] = {v: [] for v in nodes}  # For each node v the classes in sub(v).
    for u in classes:
        for v in demand.path(u):
            classes_below[v].append(u)
    x: Cells = {}
    y: Cells = {}
    for r in replicas:
        for v in nodes:
            x[v, r] = problem.add_variable(f"x_{v}_{r}", 0, 1, cat="Integer")
            x[v, r].setInitialValue(int(best.placed[v, r]))
        for u in classes:
            y[u, r] = problem.add_variable(f"y_{u}_{r}", 0, float(demand.rate_rps[u]))
        m, s = problem.add_variable(f"m_{r}", 0), problem.add_variable(f"s_{r}", 0)
        saved_by_nodes = []  # w_v h_vr for each node v.
        for v in nodes:
            h = problem.add_variable(f"h_{v}_{r}", 0)
            saved_by_nodes.append(float(demand.prefill_s[v]) * h)
            problem += h <= pulp.lpSum(y[u, r] for u in classes_below[v]), f"hits_{v}_{r}"
            problem += h <= float(subtree_rps[v]) * x[v, r], f"cached_{v}_{r}"
            if demand.parent[v] >= 0:
                problem += x[v, r] <= x[int(demand.parent[v]), r], f"parent_{v}_{r}"
        tokens = pulp.lpSum(int(demand.tokens[v]) * x[v, r] for v in nodes)
        problem += tokens + m <= prices.memory_tokens, f"memory_{r}"
        for k, (slope, saved_s) in enumerate(sessions.pieces()):
            problem += s <= slope * m + saved_s / prices.replicas, f"session_{r}_{k}"
        work = pulp.lpSum(float(demand.work_s[u]) * y[u, r] for u in classes)
        problem += work - pulp.lpSum(saved_by_nodes) - s <= largest, f"load_{r}"
    for u in classes:
        problem += pulp.lpSum(y[u, r] for r in replicas) == float(demand.rate_rps[u]), f"served_{u}"
    problem.setObjective(largest + 0)  # PuLP takes an expression, not a variable.
    most_subproblems = max(WHOLE_WORK // best.placed.size, 1)
    outcome = run_highs(problem, time_limit_s=time_limit_s, start=True, most_nodes=most_subproblems)
    if outcome.status not in ("optimal", "feasible"):
        return best, 0.0
    placed = np.zeros_like(best.placed)
    for (v, r), x_vr in x.items():
        placed[v, r] = (x_vr.value() or 0.0) > 0.5  # The solver's 0s and 1s may be off by its tolerance.
    bound = 0.0 if outcome.bound is None or math.isinf(outcome.bound) else outcome.bound
    return min(best, prices.best_routing(placed), key=lambda routed: routed.largest_load), bound
