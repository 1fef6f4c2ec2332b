"""Chooses which prefixes each worker of a pool should keep, and estimates what that saves. The solver is
`replicate_prefixes` (solvers/prefix_replication.py). This module makes its input from a trace and a pool, and
estimates and warm-up prompts from its answer.

Stable prefixes (system prompts, tool instructions, popular documents) are used in most parts of the trace, so
they are placed on workers. All other reuse is assumed to be of sessions that come and go. Sessions use the
memory that placed prefixes leave, and hit as often as in one LRU cache of that size over all workers. This
assumes a router that keeps each session on its worker.

Seconds of work are those of the master problem (`least_seconds`): the least that a request costs a busy
worker. Memory for prefixes is what running requests leave by Little's law; it depends in turn on the hits.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS, ROUNDING
from planner.errors import InputError, TraceError
from planner.fleet import Fleet, Pool
from planner.simulator.simulation import Simulation
from planner.solvers.master import Option, cheapest_token_s, least_seconds
from planner.solvers.prefix_demand import PrefixDemand, SessionReuse
from planner.solvers.prefix_replication import Replication, hot_bound, replicate_prefixes
from planner.traffic import prefixes
from planner.traffic.trace import FloatArray, IntArray, Trace
from planner.traffic.workload import prefix_sharing

PrefillSeconds = Callable[[IntArray, npt.NDArray[np.integer[Any]]], FloatArray]
"""Seconds (n,) to prefill `tokens` (n,) tokens that come after `start` (n,) others of their prompt."""

# All constants here are set by hand.
# A prefix is stable if it is used in at least STABLE_PARTS of TRACE_PARTS equal parts of the trace's time.
# Two parts may lack it, because traces often begin or end with little traffic.
TRACE_PARTS = 10
STABLE_PARTS = 8
# At most this many nodes of the prefix tree are placed, the most used ones, which bounds the time that a
# placement takes. All other nodes count as sessions.
MOST_NODES = 100
CURVE_PIECES = 12  # Pieces of the concave curve of session hits over memory that the solver gets.
MEMORY_ITERATIONS = 10  # Memory depends on hits and hits on memory; they mostly agree after three rounds.
SAME_HIT_FRAC = 1e-3  # Hit shares that differ by less count as equal: their memory differs by about a block.
STEP_ITERATIONS = 100  # Cheap rounds for a step's time and its sequences, which depend on each other.
FULL_FRAC = 0.95  # Prefill is taken to have at most this share of a worker's time; at 1 no decode would end.
# The search for a placement ends at this gap to its bound, or after this many routings. A routing assigns
# every class of requests to workers (planner/solvers/prefix_prices.py).
GAP_FRAC = 0.02
ROUTINGS = 400
FEW_ROUTINGS = 100  # Routings for each smaller pool that `workers_for_same_load` tries.
LEAST_SEARCH_S = 0.1  # Once begun, a search for a placement gets this long at least.


@dataclass(frozen=True, slots=True, eq=False)
class StableTraffic:
    """A trace as `replicate_prefixes` sees it on one type of worker.

    `demand` has V nodes: the stable nodes of `tree`, which may be placed, and node 0, which is empty and
    stands for requests without a stable prefix. `node_of` (V,) has the number in `tree` of each node; node 0
    has -1. A cache for everything else saves `sessions` (seconds of work per second) and hits `session_hits`
    (share of input tokens), each by its size. `prefill_s` is the seconds of prefill work per second if
    nothing is cached.
    """

    tree: prefixes.PrefixTree
    demand: PrefixDemand
    node_of: IntArray
    sessions: SessionReuse
    session_hits: prefixes.HitCurve
    prefill_s: float
    input_tokens_per_s: float


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPlan:
    """Where the prefixes of a trace are kept in a pool, and the estimated effect, before any simulation.

    `memory_tokens` is each worker's memory for placed prefixes. Hit shares are of input tokens;
    `prefill_saved_frac` is of all prefill work; `uncached_load` is the seconds of work per second of one
    worker if nothing is cached.
    """

    pool: Pool
    traffic: StableTraffic
    replication: Replication
    memory_tokens: int
    stable_hit_frac: float
    session_hit_frac: float
    prefill_saved_frac: float
    uncached_load: float

    @property
    def hit_frac(self) -> float:
        """The share of input tokens that hit stable prefixes or sessions."""
        return self.stable_hit_frac + self.session_hit_frac


@dataclass(frozen=True, slots=True)
class WarmUp:
    """A prompt to prefill once on a worker before it takes traffic: the first `tokens` of a request's prompt.

    `request` counts from 0 in the trace; `block_ids` are its blocks.
    """

    worker: str
    tokens: int
    request: int
    block_ids: tuple[int, ...]
    keep_alive_s: float | None = None  # The router repeats it this long after its last use; None: never.


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Requests of the router that keep a pool's pinned prefixes in its engines' caches (keep_alive.py).

    On worker r a prefix is requested `every_s[r]` after its last use; None: no prefix leaves that cache. The
    whole pool gets `per_h` such requests, and each worker spends at most `busy_frac` of its time on them.
    """

    every_s: tuple[float | None, ...]
    per_h: float
    busy_frac: float


def prefill_pool(fleet: Fleet, name: str | None = None) -> Pool:
    """The pool that prefills: the only one, or the one of this name. Raises InputError if there is none, if
    there are several and no name, or if its workers have data-parallel ranks.
    """
    pools = [pool for pool in fleet.pools if pool.role != "decode" and pool.count]
    named = [pool for pool in pools if name is None or pool.name == name]
    if len(named) == 1:
        if (dp := named[0].type.dp) > 1:
            raise InputError(
                f"{named[0].name}: dp {dp}: prefixes are not placed on workers with data-parallel ranks, as "
                "the engine chooses the rank that caches a prefix; take a fleet with dp 1"
            )
        return named[0]
    names = ", ".join(pool.name for pool in pools)
    reason = (
        "the fleet has several pools that prefill" if name is None else f"no pool named {name!r} prefills"
    )
    raise InputError(f"{reason}; expected one of {names} with --pool")


@dataclass(frozen=True, slots=True, eq=False)
class PoolPrefixes:
    """Prefixes of one pool: the plan, and the result of a simulation that began with cold caches.

    Both hit shares are of the input tokens of the pool's requests; `possible_hit_frac` is that of one endless
    cache for all workers. A load is a worker's least seconds of work per second, without what hits save.
    """

    plan: PrefixPlan
    warm_up: tuple[WarmUp, ...]
    possible_hit_frac: float
    simulated_hit_frac: float
    simulated_load: tuple[float, ...]
    keep_alive: KeepAlive | None = None  # Set by keep_alive.py if the router pins prefixes.


def pool_prefixes(
    fleet: Fleet,
    simulation: Simulation,
    trace: Trace,
    *,
    time_limit_s: float,
    rng: np.random.Generator,
    pinned: Callable[[Pool], PrefixPlan] | None = None,
) -> tuple[PoolPrefixes, ...]:
    """For every pool that prefills: a placement for the requests that the simulation sent there. `pinned`
    gives the placement that was simulated, if the router pins prefixes. Nothing is placed on workers with
    data-parallel ranks: a router sends to a worker, and the engine chooses the rank that caches the prefix.
    """
    if not fleet.policies.prefix_cache or simulation.cached_tokens is None:
        return ()
    results: list[PoolPrefixes] = []
    next_worker = 0  # Workers are numbered in the order of the pools.
    for pool in fleet.pools:
        workers = range(next_worker, next_worker + pool.count)
        next_worker = workers.stop
        # The pool's requests, by their numbers in the trace.
        numbers = np.flatnonzero(np.isin(simulation.prefill_worker, workers))
        if pool.role == "decode" or pool.type.dp > 1 or not len(numbers):
            continue
        # A pool that has all requests has the trace itself.
        part = trace if len(numbers) == len(trace) else trace.select(numbers)
        if not part.duration_s > 0:
            continue  # Requests that all arrive at once have no rates.
        if pinned is None:
            plan = plan_prefixes(part, pool, time_limit_s=time_limit_s, rng=rng)
            prompts = warm_up(part, plan, numbers)
        else:
            plan = pinned(pool)
            prompts = warm_up(trace, plan)
        cached = simulation.cached_tokens[numbers]
        option = Option(pool.role, pool.type, objective=0.0)  # Work does not depend on the price.
        work_s = least_seconds(option, part.input_tokens, part.output_tokens, cached)
        load = np.bincount(simulation.prefill_worker[numbers] - workers.start, work_s, minlength=pool.count)
        results.append(
            PoolPrefixes(
                plan=plan,
                warm_up=tuple(prompts),
                possible_hit_frac=prefix_sharing(part).token_hit_frac,
                simulated_hit_frac=float(cached.sum() / part.input_tokens.sum()),
                simulated_load=tuple((load / part.duration_s).tolist()),
            )
        )
    return tuple(results)


def plan_prefixes(trace: Trace, pool: Pool, *, time_limit_s: float, rng: np.random.Generator) -> PrefixPlan:
    """Place the stable prefixes of a trace on the workers of a pool; raises TraceError without block ids."""
    traffic = stable_traffic(trace, pool)
    demand, sessions = traffic.demand, traffic.sessions
    memory_tokens = memory_for_prefixes(trace, pool).placed_tokens
    replication = replicate_prefixes(
        demand,
        pool.count,
        memory_tokens,
        sessions=sessions,
        time_limit_s=time_limit_s,
        gap_frac=GAP_FRAC,
        routings=ROUTINGS,
        rng=rng,
    )
    return estimate_plan(pool, traffic, replication, memory_tokens)


def estimate_plan(
    pool: Pool, traffic: StableTraffic, replication: Replication, memory_tokens: int
) -> PrefixPlan:
    """A placement with its estimated hits and loads."""
    demand = traffic.demand
    hits_rps = replication.hits_rps(demand).sum(axis=1)  # (V,), over all workers
    uncached = float(demand.rate_rps @ demand.work_s)
    return PrefixPlan(
        pool=pool,
        traffic=traffic,
        replication=replication,
        memory_tokens=memory_tokens,
        stable_hit_frac=float(hits_rps @ demand.tokens) / traffic.input_tokens_per_s,
        session_hit_frac=float(traffic.session_hits.at(replication.session_tokens.sum())),
        prefill_saved_frac=(uncached - float(replication.load.sum())) / traffic.prefill_s,
        uncached_load=uncached / pool.count,
    )


def warm_up(trace: Trace, plan: PrefixPlan, numbers: IntArray | None = None) -> list[WarmUp]:
    """Per worker the longest placed prefixes, which hold all shorter ones; the most used first.

    If `trace` is a part of a larger one, `numbers` (n,) are its requests' numbers in that larger trace.
    """
    prompts = []
    for r, leaves in enumerate(leaves_of(trace, plan)):
        for leaf in leaves:
            number = leaf.request if numbers is None else int(numbers[leaf.request])
            prompts.append(WarmUp(f"{plan.pool.name}-{r}", leaf.tokens, number, leaf.block_ids))
    return prompts


@dataclass(frozen=True, slots=True)
class Leaf:
    """A placed prefix with which no other placed prefix begins: the first `tokens` of a request's prompt."""

    tokens: int
    request: int
    block_ids: tuple[int, ...]


def leaves_of(trace: Trace, plan: PrefixPlan) -> list[list[Leaf]]:
    """The longest prefixes that are placed on each replica, the most used first."""
    demand, tree, placed = plan.traffic.demand, plan.traffic.tree, plan.replication.placed  # placed: (V, R).
    end_tokens = demand.path_sum(demand.tokens)  # A node's prefix ends at this many tokens of the prompt.
    # A node is used by its own requests and by those of longer prefixes, which lie in its subtree.
    hottest = np.argsort(-demand.subtree_sum(demand.rate_rps), kind="stable").tolist()
    leaf_of_node: dict[int, Leaf] = {}
    leaves: list[list[Leaf]] = []
    for r in range(plan.pool.count):
        inner = set(demand.parent[placed[:, r]].tolist())  # Nodes with which a longer placed prefix begins.
        leaves.append([])
        for v in hottest:
            if placed[v, r] and v not in inner and end_tokens[v] > 0:  # Node 0 is empty, and no prefix.
                if v not in leaf_of_node:
                    request = int(tree.first_request[plan.traffic.node_of[v]])
                    first_block = trace.prefix_offsets[request]
                    blocks = math.ceil(end_tokens[v] / trace.prefix_block_tokens)
                    ids = tuple(trace.prefix_ids[first_block : first_block + blocks].tolist())
                    leaf_of_node[v] = Leaf(int(end_tokens[v]), request, ids)
                leaves[-1].append(leaf_of_node[v])
    return leaves


def stable_traffic(trace: Trace, pool: Pool) -> StableTraffic:
    """The stable prefixes and the sessions of a trace, with the work of both on this pool's workers. Raises
    TraceError if all requests arrive at once.
    """
    if not trace.duration_s > 0:
        raise TraceError(
            f"{trace.name}: all requests arrive at once, so prefixes have no rates; use a longer one"
        )
    blocks = prefixes.block_uses(trace)
    tree = prefixes.prefix_tree(blocks)
    stable = stable_nodes(trace, tree)
    # For each node of the tree its number among the nodes of the demand, 0 if it is not stable. The index -1,
    # of no parent or no prefix, gives the entry at the end, which is 0 too.
    number = np.zeros(len(tree) + 1, int)
    number[stable] = np.arange(1, len(stable) + 1)
    # For every node, the deepest stable node on its path, -1 if there is none. Each round moves up one level.
    nearest = np.where(number[:-1] > 0, np.arange(len(tree)), tree.parent)
    while len(above := np.flatnonzero((nearest >= 0) & (number[nearest] == 0))):
        nearest[above] = tree.parent[nearest[above]]
    # `tree.end` is the deepest node of each request; -1 for a request without blocks.
    deepest_stable = np.where(tree.end >= 0, nearest[tree.end], -1)
    class_of = number[deepest_stable]  # (n,): the node of the demand to whose class each request belongs.

    token_s = cheapest_token_s(pool.type.latency, pool.type.max_num_batched_tokens)

    def prefill_s(start: IntArray, tokens: npt.NDArray[np.integer[Any]]) -> FloatArray:
        """Seconds to prefill `tokens` tokens that come after `start` others of their prompt: the dense layers
        in the largest steps, and attention, in which each token reads itself and all before it.
        """
        pairs = tokens * (start + (tokens + 1) / 2)  # Pairs of a token and one that it reads.
        return np.asarray(token_s * tokens + pool.type.latency.a_s * pairs)

    option = Option(pool.role, pool.type, objective=0.0)  # Work does not depend on the price.
    work_s = least_seconds(option, trace.input_tokens, trace.output_tokens)
    requests = np.bincount(class_of, minlength=len(stable) + 1)
    all_work_s = np.bincount(class_of, weights=work_s, minlength=len(requests))
    demand = PrefixDemand(
        parent=np.concatenate(([-1], number[tree.parent[stable]])),
        tokens=np.concatenate(([0], tree.tokens[stable])),
        prefill_s=np.concatenate(([0.0], prefill_s(tree.start_tokens[stable], tree.tokens[stable]))),
        rate_rps=requests / trace.duration_s,
        work_s=all_work_s / np.maximum(requests, 1),  # A class without requests has no work.
    )
    node_blocks = np.concatenate(([0], tree.blocks[stable])).astype(float)
    stable_blocks = demand.path_sum(node_blocks)[class_of]
    sessions, hits = _session_reuse(trace, blocks, stable_blocks, prefill_s)
    return StableTraffic(
        tree=tree,
        demand=demand,
        node_of=np.concatenate(([-1], stable)),
        sessions=sessions,
        session_hits=hits,
        prefill_s=float(prefill_s(np.zeros(1, np.int64), trace.input_tokens).sum()) / trace.duration_s,
        input_tokens_per_s=float(trace.input_tokens.sum()) / trace.duration_s,
    )


def stable_nodes(trace: Trace, tree: prefixes.PrefixTree) -> IntArray:
    """The most used nodes that occur in STABLE_PARTS or more of TRACE_PARTS equal parts of the trace;
    parents first. A parent is used wherever its children are, so it is stable too.
    """
    through_frac = (trace.arrival_s - trace.arrival_s[0]) / trace.duration_s
    part = np.minimum(through_frac * TRACE_PARTS, TRACE_PARTS - 1).astype(int)  # The last arrival is at 1.
    is_used = np.zeros((len(tree), TRACE_PARTS), bool)
    # Each round marks one node of every request and moves up one level, from its deepest node to the root.
    node = tree.end.copy()
    while len(below_root := np.flatnonzero(node >= 0)):
        is_used[node[below_root], part[below_root]] = True
        node[below_root] = tree.parent[node[below_root]]
    stable = np.flatnonzero(is_used.sum(axis=1) >= STABLE_PARTS)
    hottest = stable[np.argsort(-tree.requests[stable], kind="stable")][:MOST_NODES]
    return np.sort(hottest)


def _session_reuse(
    trace: Trace, blocks: prefixes.Blocks, stable_blocks: FloatArray, prefill_s: PrefillSeconds
) -> tuple[SessionReuse, prefixes.HitCurve]:
    """The reuse of blocks beyond the first `stable_blocks` (n,) of every prompt, by the size of the cache:
    the work that it saves, seconds per second, and the share of input tokens that hit.
    """
    owner = blocks.owner  # The request of each block.
    within = np.arange(len(owner)) - blocks.offsets[owner]  # Each block's number in its prompt.
    is_of_session = within >= stable_blocks[owner]
    offsets = np.concatenate(([0], np.cumsum(np.bincount(owner[is_of_session], minlength=len(trace)))))
    reuse = prefixes.stack_distances(offsets, blocks.node[is_of_session], len(blocks.parent))
    tokens = blocks.tokens[is_of_session]
    seconds = prefill_s(within[is_of_session] * trace.prefix_block_tokens, tokens)
    size, saved_s = prefixes.hit_curve(trace, seconds, reuse).concave()
    # The corners lie at equal steps of what is saved; corners that coincide become one.
    corners = np.unique(np.searchsorted(saved_s, np.linspace(0, saved_s[-1], CURVE_PIECES + 1)))
    sessions = SessionReuse(
        tuple(size[corners].tolist()), tuple((saved_s[corners] / trace.duration_s).tolist())
    )
    return sessions, prefixes.hit_curve(trace, tokens, reuse)


@dataclass(frozen=True, slots=True)
class PrefixMemory:
    """The memory of a worker for prefixes, in KV tokens of whole blocks.

    `placed_tokens` is for prefixes that are never dropped, so the longest request must fit beside them.
    `lru_tokens` is the mean memory beside the running requests, `sequences` of which decode.
    """

    placed_tokens: int
    lru_tokens: int
    sequences: float


def memory_for_prefixes(trace: Trace, pool: Pool, workers: int | None = None) -> PrefixMemory:
    """The memory of each worker for prefixes, beside its running requests, if `workers`, by default those of
    the pool, share all requests.

    Hits free memory, which brings more hits. So memory and hits are computed in turn until they agree,
    beginning with the hits of an endless cache. Hits are those of one LRU cache as large as `placed_tokens`
    of all workers, the smaller of the two amounts, so hits are not overstated.
    """
    workers = workers or pool.count
    blocks = prefixes.block_uses(trace)
    curve = prefixes.hit_curve(
        trace, blocks.tokens, prefixes.stack_distances(blocks.offsets, blocks.node, len(blocks.parent))
    )
    hit_frac = curve.infinite_frac
    for _ in range(MEMORY_ITERATIONS):
        memory = _memory_with_hits(trace, pool, workers, hit_frac)
        previous_frac, hit_frac = hit_frac, float(curve.at(memory.placed_tokens * workers))
        if abs(hit_frac - previous_frac) < SAME_HIT_FRAC:
            break
    return memory


def _memory_with_hits(trace: Trace, pool: Pool, workers: int, hit_frac: float) -> PrefixMemory:
    """The memory of each worker for prefixes if `hit_frac` of the input tokens hit. Tokens that hit take this
    memory, not that of the request that uses them.

    Sequences in decode by Little's law: arrivals x tokens to come x the time between two tokens, which is a
    step of that many sequences, made longer by the share of time that prefill takes.
    """
    sequences = 0.0
    worker, rate_rps = pool.type, len(trace) / trace.duration_s / workers
    longest = float((trace.input_tokens + trace.output_tokens).max())
    own_tokens = (1 - hit_frac) * trace.input_tokens  # Tokens of each prompt that do not hit.
    running_tokens = float(own_tokens.mean())  # A worker has one prompt in prefill at a time.
    if pool.role == "mixed":
        prefill = Option("prefill", worker, objective=0.0)
        prompts_s = least_seconds(
            prefill, trace.input_tokens, trace.output_tokens, hit_frac * trace.input_tokens
        )
        busy_frac = min(rate_rps * float(prompts_s.mean()), FULL_FRAC)
        # The context of a sequence in decode, with and without the tokens that hit. Both are means over all
        # decode steps of all requests, so that long answers weigh more.
        gaps = trace.output_tokens - 1.0  # The prefill makes the first token.
        all_gaps = max(float(gaps.sum()), 1.0)  # If no request decodes, 0 is divided by 1.
        context = float((gaps * (trace.input_tokens + gaps / 2)).sum()) / all_gaps
        own_context = float((gaps * (own_tokens + gaps / 2)).sum()) / all_gaps
        for _ in range(STEP_ITERATIONS):
            step_s = worker.latency.step_s(
                tokens=max(sequences, 1.0), decodes=sequences, kv_tokens=sequences * context
            )
            sequences = min(
                rate_rps * float(gaps.mean()) * float(step_s) / (1 - busy_frac), worker.max_num_seqs
            )
        running_tokens += sequences * own_context

    def tokens_beside(taken_tokens: float) -> int:
        blocks = int((worker.kv_tokens - taken_tokens) // KV_BLOCK_TOKENS)
        return max(blocks, 0) * KV_BLOCK_TOKENS

    return PrefixMemory(tokens_beside(max(running_tokens, longest)), tokens_beside(running_tokens), sequences)


def workers_for_same_load(
    trace: Trace, plan: PrefixPlan, *, time_limit_s: float, rng: np.random.Generator
) -> int:
    """The size of the smallest pool found whose largest load is at most the load per worker without any
    cache; the pool's own size if no smaller pool is found in time.

    This is an estimate by work alone. Only `plan` with `policies: {prefix_cache: true}` says whether an SLO
    holds then.
    """
    demand, sessions = plan.traffic.demand, plan.traffic.sessions
    target = plan.uncached_load * (1 + ROUNDING)
    deadline_s = time.monotonic() + time_limit_s
    for workers in range(1, plan.pool.count):
        memory_tokens = memory_for_prefixes(trace, plan.pool, workers).placed_tokens
        if hot_bound(demand, workers, memory_tokens, sessions) > target:
            continue  # No placement on so few workers has a largest load that is low enough.
        if time.monotonic() > deadline_s:
            break
        fewer = replicate_prefixes(
            demand,
            workers,
            memory_tokens,
            sessions=sessions,
            time_limit_s=max(deadline_s - time.monotonic(), LEAST_SEARCH_S),
            routings=FEW_ROUTINGS,
            rng=rng,
        )
        if fewer.largest_load <= target:
            return workers
    return plan.pool.count
