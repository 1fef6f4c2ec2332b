"""DistServe's placement (Zhong et al. 2024, arXiv:2401.09670, Algorithms 1 and 2), and one that chooses the
counts of both pools freely.

Sets   p, d   types of a prefill and of a decode instance: tensor x pipeline parallelism on one GPU
       x      stages of a pipeline that lie on different nodes
Data   |c|    GPUs of an instance of type c
       g(f)   goodput of a fleet f: the highest rate at which it keeps the SLO, by a rule of goodput.py [1/s]
       R      traffic [requests/s];   M  GPUs per node;   N  nodes

  high_affinity   Algorithm 1: KV may go to any node. Prefill and decode instances are measured apart; decode
                  comes after a prefill that takes no time:
                      p* = argmax g(p alone) / |p|,   d* = argmax g(d alone) / |d|
                      n = ceil(R / g(p*)),  m = ceil(R / g(d*))
  low_affinity    Algorithm 2: KV stays in its node. Each node holds one of x stages of a prefill and of a
                  decode instance, |p_x| + |d_x| <= M:
                      (p, d)* = argmax g(p + d) / (|p| + |d|),   n = m = ceil(R / g(p + d))
  free_counts     n and m are decided together with p and d, on the whole fleet at the whole rate:
                      min n |p| + m |d|   s.t.  n x p + m x d keep the SLO at R, the KV moved over the network
                  This is the planner's level 0 (glossary) with GPUs as its objective; exact among the types
                  and counts.

DistServe's program has one search: low_affinity with its own rule (benchmarks/distserve_search.py). The
program knows only pairs of one prefill and one decode instance, and moves KV in no time. Algorithm 1
multiplies the goodput of one instance and rounds up; only a simulation of the whole fleet shows whether it
holds.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from planner.documents.catalog import Catalog
from planner.domain import ROUNDING, Gpu, Slo
from planner.errors import InputError
from planner.fleet import Fleet, Network, Policies, Pool, Role, WorkerType
from planner.models.foreign_forms import DistServeSteps
from planner.models.llm import Llm
from planner.models.memory import worker_memory
from planner.models.parallelism import MAX_PP, add_pipeline
from planner.papers.goodput import GoodputRule, Steady, Traffic, find_goodput
from planner.search.level0.one_pool import BoundedOption, Level0Search
from planner.search.level0.two_pools import PairSimulations, search_two_pools
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import INSTANT, NEVER_FULL_TOKENS, NO_LINK
from planner.solvers.master import FleetLimits, Option
from planner.traffic.trace import Trace

ALMOST_NO_TIME_S = 1e-12  # The step times of DistServe's program must be above 0.
# Steps that take no time, as fleet_oracle.INSTANT, in the form of DistServe's program.
NO_TIME = DistServeSteps(
    prefill_s=(ALMOST_NO_TIME_S, 0.0, 0.0),
    decode_small_s=(ALMOST_NO_TIME_S, 0.0, 0.0),
    decode_large_s=(ALMOST_NO_TIME_S, 0.0, 0.0),
    threshold=1,
    per_rank_s=0.0,
    overhead_s=0.0,
    overhead_s_per_token=0.0,
)
# While the fleet with which `free_counts` starts fails, its counts grow by the factor GROWTH. If it still
# fails after MOST_GROWTHS, with 16 times as many instances, an error is raised.
GROWTH, MOST_GROWTHS = 1.15, 20
STEP_TOKENS = 8192  # The most tokens of a step, as in vLLM.

Measure = Callable[[Fleet, float], float]
"""Measures the goodput of a fleet [requests/s]. The second argument is a rate to beat; a goodput below it may
be returned as 0, which takes less time to find.
"""


@dataclass(frozen=True, slots=True)
class ServingSetting:
    """The LLM and how it is served: `network` carries KV between nodes, `node_network` within a node."""

    llm: Llm
    policies: Policies
    network: Network
    node_network: Network


@dataclass(frozen=True, slots=True)
class PhaseRules:
    """The rules for the rates of a whole fleet, of prefill instances alone, and of decode instances alone."""

    whole: GoodputRule
    prefill: GoodputRule
    decode: GoodputRule


@dataclass(frozen=True, slots=True)
class MeasuredFleet:
    """A fleet of one instance, or of a pair, and its goodput: 0 if it is below the rate to beat and was not
    measured further.
    """

    fleet: Fleet
    rate_rps: float

    @property
    def gpus(self) -> int:
        """The GPUs of its instances, without those of a prefill that takes no time."""
        return sum(pool.type.gpus for pool in self.fleet.pools if pool.type.latency != INSTANT)

    @property
    def gpu_rate_rps(self) -> float:
        """Requests/s per GPU, by which DistServe compares fleets."""
        return self.rate_rps / self.gpus

    @property
    def type(self) -> WorkerType:
        """The worker type of the instance that was measured; of a pair, that of its decode instance."""
        return self.fleet.pools[-1].type


@dataclass(frozen=True, slots=True)
class ProposedPlacement:
    """The `fleet` that an algorithm proposes, and the instances or pairs from which it was chosen, the best
    first.
    """

    fleet: Fleet
    measured: tuple[tuple[MeasuredFleet, ...], ...]  # The instances of each phase, or the pairs.


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
            kv_tokens = worker_memory(
                llm, gpu, tp, pp, max_num_batched_tokens=STEP_TOKENS, max_num_seqs=max_num_seqs
            ).kv_tokens
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
    setting: ServingSetting,
    prefill: WorkerType,
    decode: WorkerType,
    *,
    counts: tuple[int, int] = (1, 1),
    network: Network | None = None,
) -> Fleet:
    """A fleet of `counts` prefill and decode instances; KV goes over `network`, by default between nodes."""
    pools = (Pool("pre", "prefill", prefill, counts[0]), Pool("dec", "decode", decode, counts[1]))
    return Fleet(setting.llm, pools, setting.policies, network or setting.network)


def prefill_alone(setting: ServingSetting, prefill: WorkerType, count: int = 1) -> Fleet:
    """Instances that only prefill, if the traffic is that of `first_tokens`, which leaves none to decode."""
    return Fleet(setting.llm, (Pool("pre", "mixed", prefill, count),), setting.policies, setting.network)


def decode_alone(setting: ServingSetting, decode: WorkerType) -> Fleet:
    """An instance behind a prefill that takes no time."""
    instant = replace(decode, latency=INSTANT, form=NO_TIME, kv_tokens=NEVER_FULL_TOKENS, tp=1, pp=1)
    return pair_fleet(setting, instant, decode, network=NO_LINK)


def first_tokens(traffic: Traffic) -> Traffic:
    """The same requests, each done with its first token."""

    def one_token_each(rate_rps: float, requests: int, seed: int) -> Trace:
        trace = traffic(rate_rps, requests, seed)
        return replace(trace, output_tokens=np.ones_like(trace.output_tokens))

    return one_token_each


def split_slo(slo: Slo) -> tuple[Slo, Slo]:
    """The SLO of prefill (its TTFT limits) and that of decode (all other limits)."""
    ttft = tuple(limit for limit in slo.limits if limit.metric == "ttft")
    others = tuple(limit for limit in slo.limits if limit.metric != "ttft")
    if not ttft or not others:
        raise InputError("slo: a search of both phases needs a limit on ttft and one on tpot, tbt or e2e")
    return Slo(ttft), Slo(others)


def measured_by(rule: GoodputRule) -> Measure:
    """Measure goodput by a rule. If a fleet does not sustain the rate to beat, 0 is returned. Without a rate
    to beat the search begins at half a request/s for each GPU.
    """

    def measure(fleet: Fleet, to_beat_rps: float) -> float:
        if to_beat_rps and not rule.carries(fleet, to_beat_rps):
            return 0.0
        return find_goodput(rule, fleet, guess_rps=to_beat_rps or fleet.gpus / 2).rate_rps

    return measure


def high_affinity(
    setting: ServingSetting,
    prefills: Iterable[WorkerType],
    decodes: Iterable[WorkerType],
    rate_rps: float,
    prefill_goodput: Measure,
    decode_goodput: Measure,
) -> ProposedPlacement:
    """DistServe's Algorithm 1: the best prefill and decode instance per GPU, each as often as needed."""
    measured_prefills = _best_first(
        (prefill_alone(setting, worker_type) for worker_type in prefills), prefill_goodput
    )
    measured_decodes = _best_first(
        (decode_alone(setting, worker_type) for worker_type in decodes), decode_goodput
    )
    prefill, decode = measured_prefills[0], measured_decodes[0]
    counts = (_replicas(rate_rps, prefill), _replicas(rate_rps, decode))
    fleet = pair_fleet(setting, prefill.type, decode.type, counts=counts)
    return ProposedPlacement(fleet, (measured_prefills, measured_decodes))


def low_affinity(
    setting: ServingSetting,
    prefills: Sequence[WorkerType],
    decodes: Sequence[WorkerType],
    rate_rps: float,
    pair_goodput: Measure,
    *,
    nodes: int,
) -> ProposedPlacement:
    """DistServe's Algorithm 2: the best pair that shares `nodes` nodes at most, as often as needed."""
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
    return ProposedPlacement(fleet, (measured_pairs,))


def steady_rules(slo: Slo, traffic: Traffic, *, seeds: int = 3) -> PhaseRules:
    """The rule `Steady` with all limits for a whole fleet, and with its own limits for each phase."""
    of_prefill, of_decode = split_slo(slo)
    return PhaseRules(
        whole=Steady(slo, traffic, seeds),
        prefill=Steady(of_prefill, first_tokens(traffic), seeds),
        decode=Steady(of_decode, traffic, seeds),
    )


def free_counts(
    setting: ServingSetting,
    prefills: Iterable[WorkerType],
    decodes: Iterable[WorkerType],
    rate_rps: float,
    rules: PhaseRules,
    start: Fleet,
) -> Fleet:
    """The fleet of fewest GPUs that keeps the SLO at `rate_rps`.

    `start`, a prefill and a decode pool, grows until it holds. Then the search looks for fleets with fewer
    GPUs.
    """

    @cache
    def holds(counts: Counts) -> bool:
        return rules.whole.carries(_fleet(setting, counts), rate_rps)

    @cache
    def prefill_holds(counts: Counts) -> bool:
        ((option, n),) = counts
        return rules.prefill.carries(prefill_alone(setting, option.type, n), rate_rps)

    # The search of planner/search/level0, without limits. It keeps the best fleet that is offered (`best`).
    search = Level0Search(FleetLimits(stock={}))
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
    # Each option with its least and its largest count.
    bounded_prefills = [
        BoundedOption(_option("prefill", worker_type), 1, math.inf) for worker_type in prefills
    ]
    bounded_decodes = [BoundedOption(_option("decode", worker_type), 1, math.inf) for worker_type in decodes]
    simulations = PairSimulations(holds, prefill_holds)

    def out_of_time() -> bool:
        return False  # No time limit ends this search.

    search_two_pools(bounded_prefills, bounded_decodes, simulations, search, out_of_time)
    return _fleet(setting, search.best)


def _fleet(setting: ServingSetting, counts: Counts) -> Fleet:
    """The fleet of a prefill and a decode pool with these counts."""
    (prefill, n), (decode, m) = counts
    return pair_fleet(setting, prefill.type, decode.type, counts=(n, m))


def smaller_neighbours(fleet: Fleet, rule: GoodputRule, rate_rps: float) -> tuple[tuple[Fleet, bool], ...]:
    """For each pool with more than one instance the fleet with one instance less, and whether it sustains the
    rate. No neighbour does if no fleet of fewer GPUs does.
    """
    neighbours = []
    for number, pool in enumerate(fleet.pools):
        if pool.count > 1:
            pools = list(fleet.pools)
            pools[number] = replace(pool, count=pool.count - 1)
            neighbour = replace(fleet, pools=tuple(pools))
            neighbours.append((neighbour, rule.carries(neighbour, rate_rps)))
    return tuple(neighbours)


def _option(role: Role, worker_type: WorkerType) -> Option:
    """An option that costs as many units as it has GPUs, because the paper minimises GPUs."""
    return Option(role, worker_type, objective=worker_type.gpus)


def _fits_node(prefill: WorkerType, decode: WorkerType, stages: int) -> bool:
    """Whether a node holds one of `stages` equal parts of both instances."""
    node_gpus = (prefill.gpus + decode.gpus) / stages
    return not (prefill.pp % stages or decode.pp % stages) and node_gpus <= prefill.gpu.gpus_per_node


def _best_first(fleets: Iterable[Fleet], measure: Measure) -> tuple[MeasuredFleet, ...]:
    """The fleets with their goodput, the best per GPU first. The next fleet must beat the best goodput
    per GPU so far; if it does not, its own may be given as 0.
    """
    rows: list[MeasuredFleet] = []
    best = 0.0  # The best goodput per GPU so far.
    for fleet in fleets:
        gpus = MeasuredFleet(fleet, rate_rps=0.0).gpus
        row = MeasuredFleet(fleet, measure(fleet, best * gpus))
        best = max(best, row.gpu_rate_rps)
        rows.append(row)
    rows.sort(key=lambda row: -row.gpu_rate_rps)
    if not best:
        raise InputError("no instance keeps the SLO at any rate; relax it, or take other types")
    return tuple(rows)


def _replicas(rate_rps: float, best: MeasuredFleet) -> int:
    """How many instances, or pairs, sustain the rate if their goodputs add up."""
    return math.ceil(rate_rps / best.rate_rps - ROUNDING)
