"""On which replicas every stable prefix lives, so that the most loaded replica has the least to do.

Prefixes form a tree: a node is cached only where its parent is. Replicas are alike. Memory that no prefix
takes serves reuse within sessions, whose savings are a concave curve of it (a session stays on one replica;
sessions are spread evenly).

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

Loads are seconds of work per second: a replica keeps up below 1, and its queues stay short well below.

Two lower bounds. `hot_bound` is the linear relaxation in closed form: a node spread evenly over the replicas
costs its tokens once, so the R M tokens are filled by seconds saved per token, hottest first. `count_bound`
asks for whole copies n_v = sum_r x_vr and forgets on which replica they are. With theta = 1 / L and
z_ud = theta times the rate of class u that hits the first d nodes of its path (c_ud its work),

  max   theta
  s.t.  share_u        sum_d z_ud = a_u theta
        copies_v       sum_{(u, d) that hit v} c_ud z_ud <= n_v + theta G(R M),    n_v <= n_p(v)
        work           sum_{u, d} c_ud z_ud <= R + theta G(R M)
        memory         sum_v l_v n_v <= R M

Placements come from a greedy fill and from filling replica after replica (`_fill_one`, a MIP without
symmetry); with x fixed the routing is an LP. The better of the two is improved by the MIP above, warm-started
with x free on two replicas for the traffic they have, or on one for all traffic, until no such step gains.
A small problem also goes to it as a whole.

After Preble (Srivatsa et al. 2024, arXiv:2407.00023), which places online what is planned here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pulp

from planner.errors import InputError, PlannerError
from planner.solvers.backend import run

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Cells = dict[tuple[int, int], pulp.LpVariable]

WHOLE_CELLS = 300  # nodes x replicas up to which the MIP is solved as a whole
STEP_S, STEP_GAP_FRAC = 1.0, 0.002  # for a MIP of one or two replicas
ROUTING_S = 120.0
FILL_FRAC, BOUND_FRAC = 0.2, 0.1  # of the time: filling replicas one by one, bounding at the end
SAME_FRAC = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """A prefix tree with its traffic; arrays (V,), parents before their children, -1 the parent of a root.

    Every node is also the class of requests that end there (`rate_rps` may be 0). Requests without any stable
    prefix end at a root of 0 tokens and 0 s.
    """

    parent: Ints
    tokens: Ints  # l
    prefill_s: Floats  # w
    rate_rps: Floats  # a
    work_s: Floats  # W

    def __post_init__(self) -> None:
        nodes = len(self.parent)
        if not nodes or not all(
            len(column) == nodes for column in (self.tokens, self.prefill_s, self.rate_rps, self.work_s)
        ):
            raise InputError(f"prefix tree: {nodes} nodes, but other columns have another length")
        if (self.parent >= np.arange(nodes)).any() or (self.parent < -1).any():
            raise InputError("prefix tree: every parent must stand before its children, roots have -1")
        if min(self.tokens.min(), self.prefill_s.min(), self.rate_rps.min()) < 0:
            raise InputError("prefix tree: tokens, prefill_s and rate_rps must be >= 0")
        is_used = self.rate_rps > 0
        if (self.work_s < self.path_sum(self.prefill_s) * (1 - SAME_FRAC))[is_used].any():
            raise InputError("prefix tree: a request's work_s must hold the prefill of its own prefix")

    def __len__(self) -> int:
        return len(self.parent)

    def path_sum(self, each: Floats | Ints) -> Floats:
        """Sum over the nodes from the root down to each node."""
        total = np.array(each, dtype=float)
        for v in range(len(self)):
            if self.parent[v] >= 0:
                total[v] += total[self.parent[v]]
        return total

    def subtree_sum(self, each: Floats | Ints) -> Floats:
        """Sum over the subtree of each node; (V,) or (V, R)."""
        total = np.array(each, dtype=float)
        for v in range(len(self) - 1, -1, -1):
            if self.parent[v] >= 0:
                total[self.parent[v]] += total[v]
        return total

    def path(self, v: int) -> list[int]:
        """The nodes from the root down to v."""
        nodes = []
        while v >= 0:
            nodes.append(v)
            v = int(self.parent[v])
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class SessionReuse:
    """G: seconds of work per second that sessions save with so many tokens of cache over all replicas.

    Corners of a concave, piecewise linear curve from (0, 0); beyond the last it is flat.
    """

    cache_tokens: tuple[float, ...] = (0.0,)
    saved_s: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        tokens, saved = np.array(self.cache_tokens), np.array(self.saved_s)
        if len(tokens) != len(saved) or not len(tokens) or tokens[0] or saved[0]:
            raise InputError("session reuse: expected corners (tokens, seconds saved) from (0, 0)")
        slopes = np.diff(saved) / np.diff(tokens)
        if (
            not (np.diff(tokens) > 0).all()
            or (np.diff(slopes, append=0.0) > SAME_FRAC * max(slopes, default=0)).any()
        ):
            raise InputError("session reuse: cache_tokens must rise, and the savings must be concave")

    @property
    def corners(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.cache_tokens, self.saved_s

    def pieces(self) -> list[tuple[float, float]]:
        """(slope, seconds saved at 0 tokens) of every piece, the last one flat."""
        slopes = [*(np.diff(self.saved_s) / np.diff(self.cache_tokens)).tolist(), 0.0]
        return [(k, y - k * x) for k, x, y in zip(slopes, self.cache_tokens, self.saved_s, strict=True)]

    def at(self, tokens: Floats | Ints) -> Floats:
        return np.asarray(np.interp(tokens, self.cache_tokens, self.saved_s))


@dataclass(frozen=True, slots=True, eq=False)
class Replication:
    """Where prefixes live and where requests go; `load` (R,) is what that costs.

    No placement has a largest load below `bound`; `is_optimal` says that this one is the best there is.
    """

    placed: Bools  # x (V, R)
    routed_rps: Floats  # y (V, R)
    session_tokens: Floats  # m (R,)
    load: Floats  # (R,)
    bound: float
    is_optimal: bool

    @property
    def replicas(self) -> Ints:
        """Copies of every node, (V,)."""
        copies: Ints = self.placed.sum(axis=1)
        return copies

    @property
    def largest_load(self) -> float:
        return float(self.load.max())

    @property
    def gap_frac(self) -> float:
        return 1 - self.bound / self.largest_load if self.largest_load > 0 else 0.0

    def hits_rps(self, demand: Demand) -> Floats:
        """h (V, R): requests per second that find node v on r."""
        return demand.subtree_sum(self.routed_rps) * self.placed


def hot_bound(demand: Demand, replicas: int, memory_tokens: int, sessions: SessionReuse) -> float:
    """No placement has a largest load below this: the linear relaxation in closed form, see the module."""
    saved_s = demand.subtree_sum(demand.rate_rps) * demand.prefill_s
    tokens = np.concatenate((demand.tokens, np.diff(sessions.cache_tokens)))
    saved_s = np.concatenate((saved_s, np.diff(sessions.saved_s)))
    density = np.divide(saved_s, tokens, out=np.full(len(tokens), np.inf), where=tokens > 0)
    order = np.argsort(-density, kind="stable")
    room = replicas * memory_tokens - (np.cumsum(tokens[order]) - tokens[order])
    taken = np.clip(np.divide(room, tokens[order], out=np.ones(len(order)), where=tokens[order] > 0), 0, 1)
    uncached_s = float(demand.rate_rps @ demand.work_s)
    return max(uncached_s - float(taken @ saved_s[order]), 0.0) / replicas


def replicate(
    demand: Demand,
    replicas: int,
    memory_tokens: int,
    *,
    sessions: SessionReuse | None = None,
    time_limit_s: float = 20.0,
    gap_frac: float = 0.01,
    rng: np.random.Generator,
) -> Replication:
    """Place prefixes on `replicas` workers with `memory_tokens` for prefixes each; see the module.

    Stops at `gap_frac` above the bound, when no step gains, or at the time limit.
    """
    if replicas < 1 or memory_tokens < 0:
        raise InputError(f"prefixes: {replicas} replicas of {memory_tokens} tokens, need >= 1 and >= 0")
    ends_s = time.monotonic() + time_limit_s
    problem = _Problem(demand, replicas, memory_tokens, sessions or SessionReuse())
    bound = hot_bound(demand, replicas, memory_tokens, problem.sessions)
    best = problem.greedy(bound)
    if best.largest_load > bound * (1 + gap_frac):
        filled = problem.one_by_one(bound, best.largest_load, ends_s - (1 - FILL_FRAC) * time_limit_s)
        best = min(best, filled, key=lambda one: one.largest_load)
        best = problem.improved(best, bound, gap_frac, ends_s - BOUND_FRAC * time_limit_s, rng)
    if best.largest_load > bound * (1 + gap_frac):
        left_s = max(ends_s - time.monotonic(), BOUND_FRAC * time_limit_s)
        bound = max(bound, problem.count_bound(time_limit_s=left_s, gap_frac=gap_frac / 2))
    if len(demand) * replicas <= WHOLE_CELLS and best.largest_load > bound * (1 + SAME_FRAC):
        whole, proven = problem.placed_again(
            best, range(replicas), time_limit_s=max(ends_s - time.monotonic(), 1.0)
        )
        best, bound = min(best, whole, key=lambda one: one.largest_load), max(bound, proven)
    is_optimal = best.largest_load <= bound * (1 + 10 * SAME_FRAC)
    return Replication(best.placed, best.routed_rps, best.session_tokens, best.load,
                       min(bound, best.largest_load), is_optimal)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """An instance, and the steps that `replicate` takes on it."""

    demand: Demand
    replicas: int
    memory_tokens: int
    sessions: SessionReuse
    paths: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        paths: list[list[int]] = []
        for parent in self.demand.parent.tolist():
            paths.append([*(paths[parent] if parent >= 0 else ()), len(paths)])
        object.__setattr__(self, "paths", paths)

    def count_bound(self, *, time_limit_s: float, gap_frac: float) -> float:
        """The bound of whole copies; 0 where the solver could prove none."""
        demand, replicas = self.demand, self.replicas
        problem = pulp.LpProblem("count_bound", pulp.LpMaximize)
        theta = problem.add_variable("theta", 0)
        n = [problem.add_variable(f"n_{v}", 0, replicas, cat="Integer") for v in range(len(demand))]
        session_s = float(self.sessions.saved_s[-1])
        all_work: list[pulp.LpAffineExpression] = []
        work_on: list[list[pulp.LpAffineExpression]] = [[] for _ in n]
        for u in np.flatnonzero(demand.rate_rps).tolist():
            shares = []
            work_s = float(demand.work_s[u])
            for d, v in enumerate([-1, *self.paths[u]]):
                work_s -= float(demand.prefill_s[v]) if v >= 0 else 0.0
                shares.append(problem.add_variable(f"z_{u}_{d}", 0))
                all_work.append(work_s * shares[-1])
                for hit in self.paths[u][:d]:
                    work_on[hit].append(work_s * shares[-1])
            problem += pulp.lpSum(shares) == float(demand.rate_rps[u]) * theta, f"share_{u}"
        for v, parent in enumerate(demand.parent.tolist()):
            problem += pulp.lpSum(work_on[v]) <= n[v] + session_s * theta, f"copies_{v}"
            if parent >= 0:
                problem += n[v] <= n[parent], f"parent_{v}"
        problem += pulp.lpSum(all_work) <= replicas + session_s * theta, "work"
        memory = pulp.lpSum(int(l) * n_v for l, n_v in zip(demand.tokens, n, strict=True))
        problem += memory <= replicas * self.memory_tokens, "memory"
        problem.setObjective(theta)
        largest = run(problem, time_limit_s=time_limit_s, gap_frac=gap_frac).bound
        return 1 / largest if largest else 0.0

    def greedy(self, low: float) -> Replication:
        """Class by class to where it costs least, at the smallest largest load above `low` that works."""
        demand = self.demand
        heat = demand.subtree_sum(demand.rate_rps * demand.work_s)
        depth_first = sorted(range(len(demand)), key=lambda u: [(-heat[v], v) for v in self.paths[u]])
        by_load = np.argsort(-demand.rate_rps * demand.work_s, kind="stable").tolist()
        high = float(demand.rate_rps @ demand.work_s) / self.replicas
        best = self.routed(np.zeros((len(demand), self.replicas), bool))
        for _ in range(12):
            load = (low + high) / 2
            filled = [self._greedy_fill(order, load) for order in (depth_first, by_load)]
            fits = [placed for placed, left_s in filled if left_s <= 0]
            if fits:
                high = load
            else:
                low = load
            routed = [self.routed(placed) for placed in fits]
            best = min([best, *routed], key=lambda one: one.largest_load)
        return best

    def _greedy_fill(self, order: Sequence[int], largest_load: float) -> tuple[Bools, float]:
        """x, and the work that found no replica below `largest_load` (sessions not counted)."""
        demand = self.demand
        placed = np.zeros((len(demand), self.replicas), bool)
        room = np.full(self.replicas, float(self.memory_tokens))
        headroom = np.full(self.replicas, largest_load)
        for u in order:
            path, left = self.paths[u], float(demand.rate_rps[u])
            tokens, saved_s = demand.tokens[path], demand.prefill_s[path]
            while left > 1e-12:
                new = np.cumsum(np.where(placed[path], 0, tokens[:, None]), axis=0)  # (path, R)
                fits = new <= room
                work_s = demand.work_s[u] - (fits * saved_s[:, None]).sum(axis=0)
                new_tokens = (fits * np.diff(new, axis=0, prepend=0)).sum(axis=0)
                open_ = np.flatnonzero(headroom > 1e-12)
                if not len(open_):
                    return placed, left * float(demand.work_s[u])
                r = open_[np.lexsort((-headroom[open_], new_tokens[open_], work_s[open_]))[0]]
                placed[np.array(path)[fits[:, r]], r] = True
                room[r] -= new_tokens[r]
                served = min(left, headroom[r] / max(work_s[r], 1e-12))
                headroom[r] -= served * work_s[r]
                left -= served
        return placed, 0.0

    def one_by_one(self, low: float, high: float, ends_s: float) -> Replication:
        """Replica after replica filled to a largest load, which is searched between the two."""
        trials = []
        for _ in range(8):
            load = (low + high) / 2
            left_rps = self.demand.rate_rps.copy()
            placed = np.zeros((len(self.demand), self.replicas), bool)
            for r in range(self.replicas):
                if time.monotonic() > ends_s:
                    break
                placed[:, r], served_rps = self._fill_one(left_rps, load)
                left_rps = np.maximum(left_rps - served_rps, 0.0)
            trials.append(self.routed(placed))
            high = min(high, trials[-1].largest_load)
            if left_rps.sum() > SAME_FRAC * self.demand.rate_rps.sum():
                low = load
            if time.monotonic() > ends_s or high - low < 0.01 * high:
                break
        return min(trials, key=lambda trial: trial.largest_load)

    def _fill_one(self, left_rps: Floats, load: float) -> tuple[Bools, Floats]:
        """One replica that takes over as much uncached work as it can within `load`: its x and y."""
        demand = self.demand
        problem = pulp.LpProblem("fill_one", pulp.LpMaximize)
        x, y, loads = self._carry(problem, left_rps, (0,))
        problem.setObjective(pulp.lpSum(float(demand.work_s[u]) * y_u for (u, _), y_u in y.items()))
        problem += loads[0] <= load, "load"
        run(problem, time_limit_s=STEP_S, gap_frac=0.01)
        placed, served_rps = np.zeros(len(demand), bool), np.zeros(len(demand))
        for (v, _), x_v in x.items():
            placed[v] = (x_v.value() or 0.0) > 0.5
        for (u, _), y_u in y.items():
            served_rps[u] = y_u.value() or 0.0
        return placed, served_rps

    def placed_again(
        self, best: Replication, free: Sequence[int], *, time_limit_s: float, gap_frac: float = 0.0
    ) -> tuple[Replication, float]:
        """`best` with the replicas of `free` placed anew by the MIP, and a bound on L of such placements."""
        solved = self._solve(best.placed, free, time_limit_s, gap_frac)
        if solved is None:
            return best, 0.0
        placed, _, bound = solved
        return self.routed(placed), bound

    def routed(self, placed: Bools) -> Replication:
        """The best routing of a placement: the LP that is left."""
        solved = self._solve(placed, (), ROUTING_S, 0.0)
        if solved is None:
            raise PlannerError(f"prefixes: no routing was found in {ROUTING_S:g} s; ask for fewer nodes")
        _, routed_rps, _ = solved
        work_s, session_s = self._fixed(placed)
        load = (work_s * routed_rps).sum(axis=0) - session_s
        left_tokens = (self.memory_tokens - self.demand.tokens @ placed).astype(float)
        return Replication(placed, routed_rps, left_tokens, load, 0.0, False)

    def _solve(
        self, start: Bools, free: Sequence[int], time_limit_s: float, gap_frac: float
    ) -> tuple[Bools, Floats, float] | None:
        """x, y and a bound on L by the MIP with x free on some replicas and as in `start` elsewhere.

        Of the routings with the smallest L, one with the least work in all. None: no answer in time.
        """
        demand, replicas = self.demand, range(self.replicas)
        classes = np.flatnonzero(demand.rate_rps).tolist()
        problem = pulp.LpProblem("prefixes", pulp.LpMinimize)
        largest = problem.add_variable("L")
        x, y, loads = self._carry(problem, demand.rate_rps, free)
        work_s, session_s = self._fixed(start)
        for r in sorted(set(replicas) - set(free)):
            for u in classes:
                y[u, r] = problem.add_variable(f"y_{u}_{r}", 0)
            loads[r] = pulp.lpSum(float(work_s[u, r]) * y[u, r] for u in classes) - float(session_s[r])
        for u in classes:
            served = pulp.lpSum(y[u, r] for r in replicas)
            problem += served == float(demand.rate_rps[u]), f"served_{u}"
        for r, load in loads.items():
            problem += load <= largest, f"load_{r}"
        problem.setObjective(largest + SAME_FRAC / self.replicas * pulp.lpSum(loads.values()))
        for (v, r), x_vr in x.items():
            x_vr.setInitialValue(int(start[v, r]))
        outcome = run(problem, time_limit_s=time_limit_s, gap_frac=gap_frac, start=bool(x))
        if outcome.status not in ("optimal", "feasible"):
            return None
        placed = start.copy()
        placed[:, list(free)] = False
        for (v, r), x_vr in x.items():
            placed[v, r] = (x_vr.value() or 0.0) > 0.5
        routed_rps = np.zeros(placed.shape)
        for (u, r), y_ur in y.items():
            routed_rps[u, r] = max(y_ur.value() or 0.0, 0.0)
        return placed, routed_rps, (outcome.bound or 0.0) / (1 + SAME_FRAC)

    def _fixed(self, placed: Bools) -> tuple[Floats, Floats]:
        """With this x: work of a request of u on r (V, R), and what sessions save on r (R,)."""
        demand = self.demand
        left_tokens = self.memory_tokens - demand.tokens @ placed
        session_s = self.sessions.at(self.replicas * left_tokens) / self.replicas
        return demand.work_s[:, None] - demand.path_sum(placed * demand.prefill_s[:, None]), session_s

    def _carry(
        self, problem: pulp.LpProblem, rate_rps: Floats, replicas: Sequence[int]
    ) -> tuple[Cells, Cells, dict[int, pulp.LpAffineExpression]]:
        """x, y and loads of replicas with x free; with parent, memory, session, hits and cached."""
        demand = self.demand
        through_rps = demand.subtree_sum(rate_rps)
        nodes, classes = np.flatnonzero(through_rps).tolist(), np.flatnonzero(rate_rps).tolist()
        below: dict[int, list[int]] = {v: [] for v in nodes}
        for u in classes:
            for v in self.paths[u]:
                below[v].append(u)
        x, y, loads = {}, {}, {}
        for r in replicas:
            for v in nodes:
                x[v, r] = problem.add_variable(f"x_{v}_{r}", 0, 1, cat="Integer")
            for u in classes:
                y[u, r] = problem.add_variable(f"y_{u}_{r}", 0, float(rate_rps[u]))
            m = problem.add_variable(f"m_{r}", 0)
            s = problem.add_variable(f"s_{r}", 0)
            saved = []
            for v in nodes:
                h = problem.add_variable(f"h_{v}_{r}", 0)
                saved.append(float(demand.prefill_s[v]) * h)
                problem += h <= pulp.lpSum(y[u, r] for u in below[v]), f"hits_{v}_{r}"
                problem += h <= float(through_rps[v]) * x[v, r], f"cached_{v}_{r}"
                if demand.parent[v] >= 0:
                    problem += x[v, r] <= x[int(demand.parent[v]), r], f"parent_{v}_{r}"
            tokens = pulp.lpSum(int(demand.tokens[v]) * x[v, r] for v in nodes)
            problem += tokens + m <= self.memory_tokens, f"memory_{r}"
            for k, (slope, saved_s) in enumerate(self.sessions.pieces()):
                problem += s <= slope * m + saved_s / self.replicas, f"session_{r}_{k}"
            work = pulp.lpSum(float(demand.work_s[u]) * y[u, r] for u in classes)
            loads[r] = work - pulp.lpSum(saved) - s
        return x, y, loads

    def improved(
        self, best: Replication, bound: float, gap_frac: float, ends_s: float, rng: np.random.Generator
    ) -> Replication:
        """Two replicas placed anew for what they serve, or one with all routing free, until no step gains."""
        untried = self._steps(rng)
        while untried and best.largest_load > bound * (1 + gap_frac) and time.monotonic() < ends_s:
            free = untried.pop()
            if len(free) == 1:
                other, _ = self.placed_again(best, free, time_limit_s=STEP_S, gap_frac=STEP_GAP_FRAC)
            else:
                other = self._pair_again(best, free)
            if other.largest_load < best.largest_load * (1 - 1e-4):
                best, untried = other, self._steps(rng)
        return best

    def _steps(self, rng: np.random.Generator) -> list[list[int]]:
        """Every replica, then all pairs, each in random order: to be taken from the end."""
        pairs = [list(pair) for pair in combinations(range(self.replicas), 2)]
        order = rng.permutation(len(pairs))
        return [[r] for r in rng.permutation(self.replicas).tolist()] + [pairs[i] for i in order]

    def _pair_again(self, best: Replication, pair: list[int]) -> Replication:
        """`best` with two replicas placed anew for the traffic they have, which keeps the MIP small."""
        share = len(pair) / self.replicas
        sessions = SessionReuse(*(tuple(share * x for x in axis) for axis in self.sessions.corners))
        demand = replace(self.demand, rate_rps=best.routed_rps[:, pair].sum(axis=1))
        alone = _Problem(demand, len(pair), self.memory_tokens, sessions)
        solved = alone._solve(best.placed[:, pair], range(len(pair)), STEP_S, STEP_GAP_FRAC)
        if solved is None:
            return best
        placed = best.placed.copy()
        placed[:, pair] = solved[0]
        return self.routed(placed)
