"""DistServe's placement (Zhong et al. 2024, arXiv:2401.09670, Algorithms 1 and 2), and a freer one.

Sets   p, d   types of a prefill and of a decode instance: tensor x pipeline parallelism on one GPU
       x      stages of a pipeline that lie on different nodes
Data   |c|    GPUs of an instance of type c
       g(f)   goodput of a fleet f: the highest rate it carries (goodput.py says by which rule)  [requests/s]
       R      traffic [requests/s];   M  GPUs per node;   N  nodes

  high_affinity   Algorithm 1: KV may go to any node. The phases are measured apart, decode behind a prefill
                  that takes no time:
                      p* = argmax g(p alone) / |p|,   d* = argmax g(d alone) / |d|
                      n = ceil(R / g(p*)),  m = ceil(R / g(d*))
  low_affinity    Algorithm 2: KV stays in its node. Each node holds one of x stages of a prefill and of a
                  decode instance, |p_x| + |d_x| <= M:
                      (p, d)* = argmax g(p + d) / (|p| + |d|),   n = m = ceil(R / g(p + d))
  free_counts     n and m are decided together with p and d, on the whole fleet at the whole rate:
                      min n |p| + m |d|   s.t.  n x p + m x d keep the SLO at R, the KV moved over the network
                  level 0 of the planner with GPUs for an objective; exact among the types and counts.

DistServe's program has one search, low_affinity with its own rule (benchmarks/distserve_search.py): it knows
only pairs of one prefill and one decode instance, and moves KV in no time. Algorithm 1 multiplies the goodput
of one instance and rounds up; only a simulation of the whole fleet shows whether it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from planner.documents.catalog import Catalog
from planner.domain import ROUNDING, Gpu, Slo
from planner.errors import InputError
from planner.fleet import Fleet, Network, Policies, Pool, Role, WorkerType
from planner.models.foreign_forms import DistServeSteps
from planner.models.llm import Llm
from planner.models.memory import kv_cache_tokens
from planner.models.parallelism import MAX_PP, add_pipeline
from planner.papers.goodput import GoodputRule, Steady, Traffic, find_goodput
from planner.search.level0.one_pool import Bounded, Search
from planner.search.level0.two_pools import AskPairs, search_two_pools
from planner.search.oracle.deterministic_parallel import side_by_side
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import INSTANT, NO_LINK
from planner.solvers.master import FleetLimits, Option
from planner.traffic.trace import Trace

# Steps that take no time: as fleet_oracle.INSTANT, in the form of DistServe's program.
NO_TIME = DistServeSteps(
    prefill_s=(1e-12, 0.0, 0.0),
    decode_small_s=(1e-12, 0.0, 0.0),
    decode_large_s=(1e-12, 0.0, 0.0),
    threshold=1,
    per_rank_s=0.0,
    overhead_s=0.0,
    overhead_s_per_token=0.0,
)
GROWTH = 1.15  # A start that fails grows by 15 % until it holds.
MOST_GROWTHS = 20  # A start that fails after so many growths is refused.

Measure = Callable[[Fleet, float], float]
"""The goodput of a fleet [requests/s]. Its second argument is a rate to beat: a goodput below may be given as
0.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """The LLM and how it is served: `network` carries KV between nodes, `node_network` within a node."""

    llm: Llm
    policies: Policies
    network: Network
    node_network: Network


@dataclass(frozen=True, slots=True)
class Rules:
    """When a rate is carried by a whole fleet, by prefill alone, by decode alone."""

    whole: GoodputRule
    prefill: GoodputRule
    decode: GoodputRule


@dataclass(frozen=True, slots=True)
class Measured:
    """A fleet of one instance, or of a pair, and its goodput; 0 where it was only seen to be worse."""

    fleet: Fleet
    rate_rps: float

    @property
    def gpus(self) -> int:
        """The GPUs of its instances; those of a prefill that takes no time do not count."""
        return sum(pool.type.gpus for pool in self.fleet.pools if pool.type.latency != INSTANT)

    @property
    def gpu_rate_rps(self) -> float:
        return self.rate_rps / self.gpus

    @property
    def type(self) -> WorkerType:
        """The worker type of the instance that was measured; of a pair, that of its decode instance."""
        return self.fleet.pools[-1].type


@dataclass(frozen=True, slots=True)
class ProposedPlacement:
    """`fleet` as an algorithm proposes it for `rate_rps`, and what it was chosen from, best first."""

    fleet: Fleet
    rate_rps: float
    measured: tuple[tuple[Measured, ...], ...]  # The instances of each phase, or the pairs.


STEP_TOKENS = 8192  # The most tokens of a step, as in vLLM.


def instance_types(
    llm: Llm, gpu: Gpu, catalog: Catalog, *, nodes: int, max_num_seqs: int = 256
) -> tuple[WorkerType, ...]:
    """Every TP within a node by which the LLM's heads divide, times every PP that divides its layers, on up
    to `nodes` nodes, if the instance holds the weights.
    """
    types = []
    for tp in filter(llm.splits_over, range(1, gpu.gpus_per_node + 1)):
        for pp in range(1, min(MAX_PP, llm.layers, nodes * gpu.gpus_per_node // tp) + 1):
            if llm.layers % pp:
                continue
            kv_tokens = kv_cache_tokens(
                llm, gpu, tp, pp, max_num_batched_tokens=STEP_TOKENS, max_num_seqs=max_num_seqs
            )
            if kv_tokens:
                latency = add_pipeline(catalog.step_latency(llm, gpu, tp), llm, gpu, tp, pp)
                worker_type = WorkerType(
                    gpu=gpu,
                    tp=tp,
                    latency=latency,
                    kv_tokens=kv_tokens,
                    max_num_batched_tokens=STEP_TOKENS,
                    max_num_seqs=max_num_seqs,
                    pp=pp,
                ).with_llm(llm)
                types.append(worker_type)
    if not types:
        raise InputError(
            f"{llm.name} fits no instance of up to {nodes} nodes of {gpu.name}; take more, or larger GPUs"
        )
    return tuple(types)


def pair_fleet(
    setting: Setting,
    prefill: WorkerType,
    decode: WorkerType,
    *,
    counts: tuple[int, int] = (1, 1),
    network: Network | None = None,
) -> Fleet:
    pools = (Pool("pre", "prefill", prefill, counts[0]), Pool("dec", "decode", decode, counts[1]))
    return Fleet(setting.llm, pools, setting.policies, network or setting.network)


def prefill_alone(setting: Setting, prefill: WorkerType, count: int = 1) -> Fleet:
    """Instances that only prefill, if the traffic is that of `first_tokens`."""
    return Fleet(setting.llm, (Pool("pre", "mixed", prefill, count),), setting.policies, setting.network)


def decode_alone(setting: Setting, decode: WorkerType) -> Fleet:
    """An instance behind a prefill that takes no time."""
    # Its KV cache never fills.
    instant = replace(decode, latency=INSTANT, form=NO_TIME, kv_tokens=10**12, tp=1, pp=1)
    return pair_fleet(setting, instant, decode, counts=(1, 1), network=NO_LINK)


def first_tokens(traffic: Traffic) -> Traffic:
    """The same requests, each done with its first token."""

    def one_token_each(rate_rps: float, requests: int, seed: int) -> Trace:
        trace = traffic(rate_rps, requests, seed)
        return replace(trace, output_tokens=trace.output_tokens * 0 + 1)

    return one_token_each


def split_slo(slo: Slo) -> tuple[Slo, Slo]:
    """The SLO of prefill (its TTFT limits) and that of decode (all other limits)."""
    ttft = tuple(limit for limit in slo.limits if limit.metric == "ttft")
    rest = tuple(limit for limit in slo.limits if limit.metric != "ttft")
    if not ttft or not rest:
        raise InputError("slo: a search of both phases needs a limit on ttft and one on tpot, tbt or e2e")
    return Slo(ttft), Slo(rest)


def measured_by(rule: GoodputRule) -> Measure:
    """Measures goodput by a rule. A fleet that does not carry the rate to beat is not measured, and counts as
    0. Without a rate to beat the search begins at half a request/s for each GPU.
    """

    def measure(fleet: Fleet, to_beat_rps: float) -> float:
        if to_beat_rps and not rule.carries(fleet, to_beat_rps):
            return 0.0
        return find_goodput(rule, fleet, guess_rps=to_beat_rps or fleet.gpus / 2).rate_rps

    return measure


def high_affinity(
    setting: Setting,
    prefills: Iterable[WorkerType],
    decodes: Iterable[WorkerType],
    rate_rps: float,
    prefill_goodput: Measure,
    decode_goodput: Measure,
) -> ProposedPlacement:
    """Algorithm 1."""
    measured_prefills = _best_first((prefill_alone(setting, type_) for type_ in prefills), prefill_goodput)
    measured_decodes = _best_first((decode_alone(setting, type_) for type_ in decodes), decode_goodput)
    prefill, decode = measured_prefills[0], measured_decodes[0]
    counts = (_replicas(rate_rps, prefill), _replicas(rate_rps, decode))
    fleet = pair_fleet(setting, prefill.type, decode.type, counts=counts)
    return ProposedPlacement(fleet, rate_rps, (measured_prefills, measured_decodes))


def low_affinity(
    setting: Setting,
    prefills: Sequence[WorkerType],
    decodes: Sequence[WorkerType],
    rate_rps: float,
    pair_goodput: Measure,
    *,
    nodes: int,
) -> ProposedPlacement:
    """Algorithm 2."""
    pairs = [
        pair_fleet(setting, prefill, decode, network=setting.node_network)
        for prefill in prefills
        for decode in decodes
        if any(_fits_node(prefill, decode, stages) for stages in range(1, nodes + 1))
    ]
    if not pairs:
        raise InputError("no prefill and decode instance fit a node together; take more nodes or other types")
    measured_pairs = _best_first(pairs, pair_goodput)
    n = _replicas(rate_rps, measured_pairs[0])
    prefill, decode = (pool.type for pool in measured_pairs[0].fleet.pools)
    fleet = pair_fleet(setting, prefill, decode, counts=(n, n), network=setting.node_network)
    return ProposedPlacement(fleet, rate_rps, (measured_pairs,))


def steady_rules(slo: Slo, traffic: Traffic, *, seeds: int = 3) -> Rules:
    """Steady state for a whole fleet, and for each phase against its own limits."""
    ttft, rest = split_slo(slo)
    return Rules(
        whole=Steady(slo, traffic, seeds),
        prefill=Steady(ttft, first_tokens(traffic), seeds),
        decode=Steady(rest, traffic, seeds),
    )


def free_counts(
    setting: Setting,
    prefills: Iterable[WorkerType],
    decodes: Iterable[WorkerType],
    rate_rps: float,
    rules: Rules,
    start: Fleet,
) -> Fleet:
    """The fleet of fewest GPUs that carries `rate_rps`.

    `start`, a prefill and a decode pool, is made larger until it holds; from then on only smaller fleets are
    looked at.
    """

    @cache
    def holds(counts: Counts) -> bool:
        return rules.whole.carries(_fleet(setting, counts), rate_rps)

    @cache
    def prefill_holds(counts: Counts) -> bool:
        ((option, n),) = counts
        return rules.prefill.carries(prefill_alone(setting, option.type, n), rate_rps)

    def for_each(ask: Callable[[Counts], bool]) -> Callable[[Sequence[Counts]], list[bool]]:
        """The question of one fleet as one of many, which the search asks."""
        return lambda fleets: [ask(counts) for counts in fleets]

    search = Search(FleetLimits(stock={}))
    counts: Counts = tuple((_option(pool.role, pool.type), pool.count) for pool in start.pools)
    for _ in range(MOST_GROWTHS):
        if holds(counts):
            search.offer(counts)
            break
        counts = tuple((option, math.ceil(GROWTH * count)) for option, count in counts)
    if search.best is None:
        gpus = sum(option.type.gpus * count for option, count in counts)
        raise InputError(
            f"a fleet of {gpus} GPUs misses the SLO at {rate_rps:g} requests/s; start with others"
        )
    bounded_prefills = [Bounded(_option("prefill", type_), 1, math.inf) for type_ in prefills]
    bounded_decodes = [Bounded(_option("decode", type_), 1, math.inf) for type_ in decodes]
    ask = AskPairs(for_each(holds), for_each(prefill_holds))
    # Here no time limit ends the search.
    search_two_pools(bounded_prefills, bounded_decodes, ask, search, side_by_side, lambda: False)
    return _fleet(setting, search.best)


def _fleet(setting: Setting, counts: Counts) -> Fleet:
    """The fleet of a prefill and a decode pool with these counts."""
    (prefill, n), (decode, m) = counts
    return pair_fleet(setting, prefill.type, decode.type, counts=(n, m))


def smaller_neighbours(fleet: Fleet, rule: GoodputRule, rate_rps: float) -> tuple[tuple[Fleet, bool], ...]:
    """For each pool with more than one instance the fleet with one less, and whether it carries the rate.

    Beside a fleet of the fewest GPUs none does: that is checked here, not taken for granted.
    """
    neighbours = []
    for k, pool in enumerate(fleet.pools):
        if pool.count > 1:
            pools = list(fleet.pools)
            pools[k] = replace(pool, count=pool.count - 1)
            neighbour = replace(fleet, pools=tuple(pools))
            neighbours.append((neighbour, rule.carries(neighbour, rate_rps)))
    return tuple(neighbours)


def _option(role: Role, type_: WorkerType) -> Option:
    """The option with GPUs as its objective."""
    return Option(role, type_, objective=type_.gpus)


def _fits_node(prefill: WorkerType, decode: WorkerType, stages: int) -> bool:
    """Whether a node holds one of `stages` equal parts of both instances."""
    node_gpus = (prefill.gpus + decode.gpus) / stages
    return not (prefill.pp % stages or decode.pp % stages) and node_gpus <= prefill.gpu.gpus_per_node


def _best_first(fleets: Iterable[Fleet], measure: Measure) -> tuple[Measured, ...]:
    """The fleets with their goodput, the best goodput per GPU first. Each has to beat the best before it."""
    rows: list[Measured] = []
    best = 0.0  # The best goodput per GPU so far.
    for fleet in fleets:
        gpus = Measured(fleet, rate_rps=0.0).gpus
        row = Measured(fleet, measure(fleet, best * gpus))
        best = max(best, row.gpu_rate_rps)
        rows.append(row)
    rows.sort(key=lambda row: -row.gpu_rate_rps)
    if not best:
        raise InputError("no instance keeps the SLO at any rate; relax it, or take other types")
    return tuple(rows)


def _replicas(rate_rps: float, best: Measured) -> int:
    """How many instances, or pairs, carry the rate if their goodputs add up."""
    return math.ceil(rate_rps / best.rate_rps - ROUNDING)
