"""Decides by simulation whether fleets keep the SLO, also after the losses that they must survive. Answers
are cached.

A fleet must keep the SLO without the workers that may be down: any `spare_workers` of them, or whatever
workers may run on any `spare_nodes` nodes, and in addition the most spot workers that are down at once in all
but SPOT_RISK_FRAC of the time. A worker is down for the whole trace, so each loss leaves a smaller fleet,
which is simulated. Spot workers fail independently of each other: of n workers Binomial(n, down_frac) are
down.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from planner.documents.task import Spot
from planner.domain import Gpu, Limit, Slo
from planner.fleet import Fleet, Network, Policies, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.policies import QUEUE
from planner.search.oracle import deterministic_parallel
from planner.search.oracle.fleet_counts import (
    Counts,
    NamedCounts,
    can_serve,
    has_whole_pairs,
    names_of,
    objective_of,
)
from planner.search.oracle.more_workers import may_take_for_granted
from planner.search.oracle.node_losses import node_losses, splits
from planner.search.oracle.scenarios import Scenario
from planner.search.oracle.simulation_queries import QueryRunner, SimulationQuery
from planner.search.oracle.verdict_cache import SimulationKey, VerdictCache
from planner.search.oracle.work_clock import StoppedError, is_over
from planner.search.prefixes.pinning import Pinning
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import Verdict, judge_slo
from planner.solvers.master import Option
from planner.traffic.trace import Trace

# Step times of a prefill that takes no time (they must be above 0), and a link that never delays: with both,
# a fleet's latencies are those of its decode pool alone.
INSTANT = StepLatency(
    (1.0, 2.0), (1e-12, 1e-12), a_s=0.0, b_s=0.0, d_s=0.0, e_s=0.0, h_s=0.0, basis="instant"
)
NO_LINK = Network(bandwidth_bytes_per_s=1e30)
NEVER_FULL_TOKENS = 10**12  # A KV cache of this size never fills.


def instant_worker(gpu: Gpu) -> WorkerType:
    """A worker whose steps take no time and whose KV cache never fills, so that its batch limits, which are
    vLLM's defaults, do not matter.
    """
    return WorkerType(
        gpu, tp=1, latency=INSTANT, kv_tokens=NEVER_FULL_TOKENS, max_num_batched_tokens=8192, max_num_seqs=256
    )


def instant_beside(worker: WorkerType) -> WorkerType:
    """An instant worker with the drafts and adapters of `worker`, which take it no time."""
    instant = instant_worker(worker.gpu)
    if (drafts := worker.speculation) is not None:
        instant = replace(instant, speculation=replace(drafts, draft_frac=0.0, draft_s=0.0))
    if (lora := worker.lora) is not None:
        instant = replace(instant, lora=lora.without_cost())
    return instant


LEAST_EFFORT = 1_000  # Beginning a simulation costs as much as simulating this many requests.

# A request takes this many times as long to simulate on some fleets as on an ordinary one. Over whole plans
# with compiled kernels (2026-11-24) it was 2 to 4 times with prefix caches, 7 with several ranks, 8 with
# drafts. With prefix caches every block of a prompt is looked up: on four traces (2026-11-26) requests of 14,
# 24, 30 and 175 blocks took 1.8, 2.7, 2.8 and 9.4 times as long. The line through these times begins at
# NO_BLOCKS_EFFORT and rises by 1 with every BLOCKS_PER_EFFORT blocks; CACHED_EFFORT is the least.
CACHED_EFFORT = 3
NO_BLOCKS_EFFORT = 1.5
BLOCKS_PER_EFFORT = 22
RANKS_EFFORT = 7
DRAFTS_EFFORT = 8

# The names of pools in plan.yaml, by role.
POOL_NAMES = {"mixed": "mixed", "prefill": "pre", "decode": "dec"}

# More spot workers than a fleet provides for may be down in this share of the time. Set by hand.
SPOT_RISK_FRAC = 0.001

# If fleets may miss this many scenarios or more, refuting a fleet takes many simulations of the whole fleet.
# Then `prefill_meets_ttft_alone` simulates scenarios too, with less effort. Set by hand.
MANY_MISSED = 4


class JudgedRun(NamedTuple):
    """A simulation of a fleet, and the verdict on it."""

    simulation: Simulation
    verdict: Verdict


@dataclass(slots=True)
class Oracle:
    """Answers whether fleets hold: a fleet holds if its simulation on `trace` keeps `slo`.

    With `draws` it must keep the SLO on each of them too, and in all but `may_miss` of `scenarios`.
    `verdicts` has, for each fleet that was simulated so far, whether it holds, by the names and counts of its
    options. Simulations run in this process or in others (simulation_queries.py).

    `step_time_sigmas`: step times of (prefills, decodes) lie this many standard deviations of their spread
        above the medians.
    `of_pairs`: the policies of fleets with prefill and decode workers, where they differ from `policies`.
    `refuted_below`: fleets with a lower objective are not simulated and count as failing, because an earlier
        search refuted them.
    `trace_first_below`: for fleets with a lower objective `trace` is simulated before the scenarios, because
        most of them fail on it.
    `spot`: the terms of spot workers, by the GPU's name.
    `least_off_spot`: a role with fewer workers that are not on spot is served as if it had no spot workers.
    `scenario`: what is simulated in place of `trace`.
    `downscale`: `trace` holds 1 / `downscale` of the requests, and a pool is simulated with 1 / `downscale`
        of its workers, rounded down (scale_model.py).
    `until`: the time, on the clock of work_clock.py, from which on simulations of scenarios raise
        StoppedError.
    `infers_kept`: in scenarios, fleets with more workers than one that holds are not simulated
        (more_workers.py).
    """

    llm: Llm
    trace: Trace
    slo: Slo
    network: Network
    policies: Policies
    spare_workers: int = 0
    spare_nodes: int = 0
    spot: Mapping[str, Spot] = field(default_factory=dict)
    least_off_spot: int = 0
    cache: VerdictCache = field(default_factory=VerdictCache)
    draws: tuple[Trace, ...] = ()
    scenarios: tuple[Scenario, ...] = ()  # The hardest comes first.
    may_miss: int = 0
    refuted_below: float = -math.inf
    trace_first_below: float = -math.inf
    step_time_sigmas: tuple[float, float] | None = None
    of_pairs: Policies | None = None
    pinning: Pinning | None = None  # Places prefixes, where policies pin them.
    scenario: Scenario | None = None
    downscale: int = 1
    until: float = math.inf
    infers_kept: bool = False
    verdicts: dict[NamedCounts, bool] = field(default_factory=dict, init=False)
    _queried: set[Hashable] = field(default_factory=set, init=False)  # Keys of cached simulations.
    _whole_runs: int = field(default=0, init=False)  # Calls of `simulate_and_judge`, which are never cached.
    # The cost of simulations whose verdicts were cached, in requests of ordinary fleets.
    _effort: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _on_draws: tuple[Oracle, ...] = field(init=False)  # One for each of `draws`.
    _in_scenarios: tuple[Oracle, ...] = field(init=False)
    _query_runner: QueryRunner = field(init=False)

    def __post_init__(self) -> None:
        # Arrays of dozens of long scenarios would fill the memory. Only oracles of scenarios have sigmas.
        self._query_runner = QueryRunner(self._traffic, reused=self.step_time_sigmas is None)
        self._on_draws = tuple(self.as_written(trace=trace) for trace in self.draws)
        self._in_scenarios = tuple(self.in_scenario(scenario) for scenario in self.scenarios)

    @property
    def _traffic(self) -> Trace | Scenario:
        """What is simulated, and part of the cache's keys: the trace, or the scenario in its place."""
        return self.trace if self.scenario is None else self.scenario

    @property
    def queried_trace(self) -> Trace:
        """The trace that is simulated; a scenario's is drawn when it is first needed."""
        return self.trace if self.scenario is None else self.scenario.trace

    def as_written(self, **changes: Any) -> Oracle:
        """An oracle of the trace alone, without draws and scenarios, with `changes` of its fields."""
        fields = {"refuted_below": -math.inf, "trace_first_below": -math.inf, "infers_kept": False} | changes
        return replace(self, draws=(), scenarios=(), may_miss=0, **fields)

    def in_scenario(self, scenario: Scenario) -> Oracle:
        """An oracle of one scenario in place of the trace. All oracles of a scenario share its cache."""
        cache = VerdictCache(scenario.known, file=self.cache.file)
        infers_kept = self.infers_kept and may_take_for_granted(self.trace, self.policies, self.network)
        return self.as_written(
            scenario=scenario,
            step_time_sigmas=scenario.step_time_sigmas,
            cache=cache,
            infers_kept=infers_kept,
        )

    def question_key(self) -> tuple[object, ...]:
        """The part of a cache key beside the fleet and the SLO."""
        return self.llm, self.network, self.policies, self.of_pairs, self._traffic, self.step_time_sigmas

    def fleet(self, counts: Counts, *, with_pins: bool = True) -> Fleet:
        """The fleet of these counts, with the prefixes that it pins unless these are not asked for; pools of
        one role are numbered if there are several.
        """
        counts = tuple((option, count) for option, count in counts if count > 0)
        pools = []
        for option, count in counts:
            alike = [other for other, _ in counts if other.role == option.role]
            suffix = f"-{alike.index(option)}" if len(alike) > 1 else ""
            pools.append(Pool(POOL_NAMES[option.role] + suffix, option.role, option.type, count))
        is_pair = any(option.role == "prefill" for option, _ in counts)
        policies = self._pair_policies if is_pair else self.policies
        pinning = self.pinning if with_pins else None
        pinned = () if pinning is None else pinning.pinned_prefixes(pools)
        return Fleet(self.llm, tuple(pools), policies, self.network, pinned=pinned)

    @property
    def _pair_policies(self) -> Policies:
        """The policies of fleets with prefill and decode workers."""
        return self.policies if self.of_pairs is None else self.of_pairs

    def counts(self, fleet: Fleet) -> Counts:
        """A fleet as counts of options whose objectives are the workers' prices [USD/h]."""
        return tuple(
            (Option(pool.role, pool.type, pool.type.price_usd_per_h), pool.count)
            for pool in fleet.pools
            if pool.count
        )

    @property
    def simulations(self) -> int:
        """How many different simulations this search needed, also those that other searches had cached."""
        return (
            len(self._queried)
            + self._whole_runs
            + sum(other.simulations for other in (*self._on_draws, *self._in_scenarios))
        )

    def effort(self) -> int:
        """What the cached simulations that ran for this oracle have cost, in requests of ordinary fleets."""
        return self._effort + sum(other.effort() for other in (*self._on_draws, *self._in_scenarios))

    @property
    def has_losses(self) -> bool:
        """Whether a fleet must hold without some of its workers."""
        return bool(self.spare_workers or self.spare_nodes or self.spot)

    def holds(self, counts: Counts) -> bool:
        """Whether a fleet keeps the SLO, after any loss that must be survived."""
        holds = self._survives_all(counts)
        deterministic_parallel.remember_verdict(self.verdicts, names_of(counts), holds)
        return holds

    def _survives_all(self, counts: Counts) -> bool:
        """Whether a fleet holds. Scenarios are simulated before the trace, because they refute more fleets;
        but below `trace_first_below` the trace refutes most fleets, and is simulated first.
        """
        value = objective_of(counts)
        # `refuted_below` is infinite after a search that found no fleet, and minus infinity by default.
        # Neither refutes a fleet.
        if math.isfinite(self.refuted_below) and value < self.refuted_below:
            return False
        written = (self, *self._on_draws)  # On traffic as it is written, in contrast to scenarios.
        if any(oracle._is_known_to_fail(counts) for oracle in written):
            return False
        if value < self.trace_first_below and not all(oracle._survives(counts) for oracle in written):
            return False
        return self._keeps_enough(counts) and all(oracle._survives(counts) for oracle in written)

    def _keeps_enough(self, counts: Counts) -> bool:
        """Whether the fleet keeps the SLO in enough scenarios, which are simulated until that is clear."""
        missed, undecided = 0, self._in_scenarios
        # While the undecided scenarios can still decide either way.
        while missed <= self.may_miss < missed + len(undecided):
            # `to_refute` more misses refute the fleet, `to_prove` more kept scenarios prove it. Fewer
            # simulations than the smaller number cannot decide, so that many run in parallel.
            to_refute = self.may_miss + 1 - missed
            to_prove = missed + len(undecided) - self.may_miss
            least_needed = min(to_refute, to_prove)
            missed += self._missed_by(counts, undecided[:least_needed])
            undecided = undecided[least_needed:]
        return missed <= self.may_miss

    def _missed_by(self, counts: Counts, oracles: Sequence[Oracle]) -> int:
        """The number of these scenarios in which a fleet misses the SLO."""

        def survives(oracle: Oracle) -> bool:
            self.stop_in_time()
            return oracle._survives(counts)

        return len(oracles) - sum(deterministic_parallel.run_each(survives, oracles))

    def stop_in_time(self) -> None:
        """Raise StoppedError once the search's clock has reached `until`."""
        if is_over(self.until):
            raise StoppedError

    def missed_count(self, counts: Counts, most: int) -> int:
        """The number of scenarios in which a fleet misses the SLO, counted up to `most` + 1."""
        missed = simulated = 0
        while simulated < len(self._in_scenarios) and missed <= most:
            batch = self._in_scenarios[simulated : simulated + most + 1 - missed]
            missed += self._missed_by(counts, batch)
            simulated += len(batch)
        return missed

    def scenario_oracle(self, number: int) -> Oracle:
        """The oracle of one of `scenarios`, by its place among them."""
        return self._in_scenarios[number]

    def failing_loss(self, counts: Counts) -> tuple[Oracle, Counts] | None:
        """The first loss that a fleet does not survive: the oracle that refutes it (this one, or the oracle
        of a draw), and the workers that the loss leaves: all, if the fleet fails without a loss. None if the
        fleet survives all losses.
        """
        for oracle in (self, *self._on_draws):
            for remaining in self._must_hold(counts):
                if not oracle._keeps_slo(remaining):
                    return oracle, remaining
        return None

    def prefill_meets_ttft_alone(self, counts: Counts) -> bool:
        """Whether a prefill pool, ((option, count),), keeps the limits on TTFT if every request ends with its
        first token.

        Queues that sort by length still sort by the whole output. We assume that hand-offs can only delay a
        prefill pool (search/level0/pruning_rules.py). The assumption is false for sessions, because answers
        that take no time bring the next requests earlier. If MANY_MISSED or more scenarios may be missed, a
        pool also fails if it misses TTFT in each of the first `may_miss` + 1 scenarios.
        """
        ((option, count),) = counts  # A single pool.
        count = self._simulated_count(option, count)
        # The trace comes first: the search on paper has often simulated the pool on it already.
        if not self._prefill_alone(option, count):
            return False
        hardest = self._in_scenarios[: self.may_miss + 1]
        if not MANY_MISSED <= self.may_miss < len(hardest):
            return True
        return any(oracle._prefill_alone(option, count) for oracle in hardest)

    def decode_keeps_up_alone(self, counts: Counts) -> bool:
        """Whether a decode pool, ((option, count),), passes the backlog test (`slo_verdict.Verdict`) if every
        prompt is prefilled when it arrives.
        """
        ((option, count),) = counts
        return self._decode_alone(option, self._simulated_count(option, count))

    def _simulated_count(self, option: Option, count: int) -> int:
        """The number of workers with which a pool is simulated after its largest loss."""
        return self.workers_left(option, count) // self.downscale

    def workers_left(self, option: Option, count: int) -> int:
        """The fewest workers of one option that the worst loss leaves of `count`; below 0 if a loss takes
        more than there are.
        """
        # A worker that spans several nodes is lost with any of them, so a node counts as one worker at least.
        per_node = max(option.type.gpu.gpus_per_node // option.type.gpus, 1)
        return count - self.spot_down(option, count) - self.spare_workers - self.spare_nodes * per_node

    def workers_needed(self, option: Option, least: int) -> int:
        """The fewest workers of one option such that the worst loss leaves at least `least` of them."""
        count = least  # More workers may also mean more spot workers down, hence the loop.
        while self.workers_left(option, count) < least:
            count += least - self.workers_left(option, count)
        return count

    def spot_down(self, option: Option, count: int) -> int:
        """How many of `count` spot workers a fleet must do without: the smallest number that is exceeded in
        at most SPOT_RISK_FRAC of the time.
        """
        terms = self.spot.get(option.type.gpu.name)
        if terms is None or count <= 0:
            return 0
        from scipy.special import bdtr  # Importing it takes 0.2 s, which commands without spot GPUs save.

        down = np.arange(count + 1)
        chance_of_no_more = bdtr(down, count, terms.down_frac)
        return int(np.argmax(chance_of_no_more >= 1 - SPOT_RISK_FRAC))  # The first that is high enough.

    def simulate_and_judge(self, fleet: Fleet, *, record: bool) -> JudgedRun:
        """Simulate a fleet to the end of the trace, without losses. With `record` the simulation has every
        gap.
        """
        self._whole_runs += 1
        record = record or self.slo.every_s is not None  # Verdicts on windows need every gap.
        self._charge_whole(fleet)
        simulation = simulate(
            self._with_spread(fleet),
            self.queried_trace,
            limits=self.slo.limits,
            record=record,
            every_s=self.slo.every_s,
        )
        return JudgedRun(simulation, judge_slo(simulation, self.slo))

    def worst_verdict(self, counts: Counts) -> Verdict | None:
        """The verdict, without percentiles, after the worst loss; None where a loss leaves no worker of a
        role. The worst loss is one after which the SLO is missed, if there is one, and among several the one
        with the lowest share of requests within a limit.
        """
        verdicts: list[Verdict] = []
        for remaining in self._losses(counts):
            if not has_whole_pairs(option for option, count in remaining if count > 0):
                return None
            verdicts.append(self.judge_whole(remaining))
        return min(
            verdicts, key=lambda verdict: (verdict.holds, *sorted(line.kept_frac for line in verdict.lines))
        )

    def judge_whole(self, counts: Counts) -> Verdict:
        """Judge a fleet by a simulation to the end of the trace, without percentiles and without losses."""
        fleet = self.fleet(counts)
        self._charge_whole(fleet)
        return self._query_runner.judge_whole(SimulationQuery(self._with_spread(fleet), self.slo))

    def _charge_whole(self, fleet: Fleet) -> None:
        """Charge a simulation to the end of the trace. Such simulations are never cached: each is charged."""
        cost = LEAST_EFFORT + request_effort(fleet, self.queried_trace) * len(self.queried_trace)
        deterministic_parallel.charge_effort(cost)

    def _survives(self, counts: Counts) -> bool:
        """Whether a fleet keeps the SLO on this traffic after each loss, and also without any loss."""
        return all(map(self._keeps_slo, self._must_hold(counts)))

    def _must_hold(self, counts: Counts) -> list[Counts]:
        """What each loss leaves of a fleet, and last the whole fleet: with more workers the router may choose
        a slow one.
        """
        whole = tuple((option, count // self.downscale) for option, count in counts if count > 0)
        return list(dict.fromkeys((*self._losses(counts), whole))) if self.has_losses else [whole]

    def _with_spread(self, fleet: Fleet) -> Fleet:
        """The fleet with step times that lie `step_time_sigmas` above their medians."""
        return fleet if self.step_time_sigmas is None else fleet.with_step_spread(*self.step_time_sigmas)

    def _losses(self, counts: Counts) -> list[Counts]:
        """What each loss leaves of a fleet: the spot workers that may be down are gone, and any
        `spare_workers` or the workers on any `spare_nodes` nodes. Counts are those of the simulation
        (`downscale`).
        """
        counts = tuple(
            (option, count - self.spot_down(option, count))
            for option, count in self._without_lone_spot_workers(counts)
            if count > 0
        )
        lost = [(0,) * len(counts)]  # For each loss: how many workers it takes of each pool.
        if self.spare_workers:
            most = [max(count, 0) for _, count in counts]
            lost = splits(min(self.spare_workers, sum(most)), most)
        elif self.spare_nodes:
            lost = node_losses(counts, self.spare_nodes)
        return [
            tuple(
                (option, (count - lost_workers) // self.downscale)
                for (option, count), lost_workers in zip(counts, loss, strict=True)
            )
            for loss in lost
        ]

    def _without_lone_spot_workers(self, counts: Counts) -> Counts:
        """The fleet without the spot workers of a role that has fewer than `least_off_spot` other workers.

        Leaving them out makes such a fleet fail, and yet more workers never hurt.
        """
        if not self.least_off_spot:
            return counts
        off_spot = Counter[str]()
        for option, count in counts:
            if option.type.gpu.name not in self.spot:
                off_spot[option.role] += count
        too_few = {option.role for option, _ in counts if off_spot[option.role] < self.least_off_spot}
        return tuple(
            (option, 0 if option.role in too_few and option.type.gpu.name in self.spot else count)
            for option, count in counts
        )

    def _is_known_to_fail(self, counts: Counts) -> bool:
        """Whether a cached simulation shows that the fleet misses the SLO after some loss.

        This look-up spares the simulation of scenarios. Without scenarios the answer is False, because
        `_survives` comes next and looks into the same cache.
        """
        if not self._in_scenarios:
            return False
        keys = (self._key(remaining) for remaining in self._losses(counts))
        question = self.question_key()
        return any(self.cache.look_up(SimulationKey(*question, *key), self.slo) is False for key in keys)

    def _keeps_slo(self, counts: Counts) -> bool:
        """Whether exactly these workers keep the SLO on this oracle's traffic."""
        if not can_serve(option for option, count in counts if count > 0):
            return False
        key, scenario = self._key(counts), self.scenario
        if scenario is None:
            return self._simulate_once(key, lambda: self.fleet(counts), self.slo)
        pools = _fleet_key(counts)  # The last entry of each pool is its count.
        design = self.question_key(), self.slo, tuple(pool[:-1] for pool in pools)
        workers = tuple(pool[-1] for pool in pools)
        if self.infers_kept and scenario.kept_fleets.has_smaller(design, workers):
            return True
        is_kept = self._simulate_once(key, lambda: self.fleet(counts), self.slo)
        if is_kept:
            scenario.kept_fleets.add(design, workers)
        return is_kept

    def _key(self, counts: Counts) -> tuple[object, ...]:
        """A fleet as far as a simulation depends on it, its pinned prefixes included."""
        key = _fleet_key(counts) if self.network.topology is None else _placed_fleet_key(counts)
        return (*key, "polished") if self.places_polished(counts) else key

    def places_polished(self, counts: Counts) -> bool:
        """Whether this fleet's pinned prefixes are placed by `Pinning.polish` instead of quickly."""
        if self.pinning is None:
            return False
        return self.pinning.uses_polished(
            [Pool(option.role, option.role, option.type, count) for option, count in counts if count > 0]
        )

    def _prefill_alone(self, option: Option, count: int) -> bool:
        """Whether the pool keeps the limits on TTFT on this oracle's traffic, if every request ends with its
        first token. Nothing is handed over then, so the workers are simulated as mixed ones.
        """
        # A limit for one class lets all other requests wait longer, so this test then rules no pool out.
        if self.slo.selectors:
            return True
        limits = tuple(limit for limit in self.slo.limits if limit.metric == "ttft")
        slo = Slo(limits, every_s=self.slo.every_s)

        def fleet() -> Fleet:
            pools = (Pool("pre", "mixed", option.type, count),)
            # A prefill pool has more room for pinned prefixes than a mixed one, so its own are used.
            as_prefill = (replace(pools[0], role="prefill"),)
            pinned = () if self.pinning is None else self.pinning.pinned_prefixes(as_prefill)
            return Fleet(self.llm, pools, self._pair_policies, self.network, pinned=pinned)

        key = ("prefill alone", _worker_key(option), count)
        return count > 0 and self._simulate_once(key, fleet, slo, is_prompts=True)

    def _decode_alone(self, option: Option, count: int) -> bool:
        """Whether the pool passes the backlog test behind a prefill worker that takes no time."""
        if self.slo.selectors:  # As in `_prefill_alone`.
            return True
        # In this simulation a prompt reaches the pool when it arrives; behind real prefill workers it may
        # come as late as its TTFT limit. With twice the limit it may still wait here as long as the SLO
        # allows. One line with the largest limit is enough, because the backlog test goes by the largest.
        ttft_s = [limit.limit_s for limit in self.slo.limits if limit.metric == "ttft"]
        slo = Slo((Limit("ttft", 0.0, 2 * max(ttft_s)),) if ttft_s else ())

        def fleet() -> Fleet:
            beside = instant_beside(option.type)
            pools = (Pool("pre", "prefill", beside, 1), Pool("dec", "decode", option.type, count))
            # There is one prefill worker, so no choice for a router, and no prefill work for caches to save.
            policies = replace(self._pair_policies, prefix_cache=False, kv_offload=None, routing="jsq")
            if QUEUE[policies.queue].needs_caches:  # With nothing cached, such queues go by arrival.
                policies = replace(policies, queue=Policies().queue)
            return Fleet(self.llm, pools, policies, NO_LINK)

        key = ("decode alone", _worker_key(option), count)
        return count > 0 and self._simulate_once(key, fleet, slo, is_prefilled=True)

    def _simulate_once(
        self, fleet_key: tuple[object, ...], fleet: Callable[[], Fleet], slo: Slo, **flags: bool
    ) -> bool:
        """Whether a fleet keeps `slo`: from the cache, from the file of a killed run, or by a simulation, for
        which effort is charged. `flags` are those of SimulationQuery.
        """
        file, key = self.cache.file, SimulationKey(*self.question_key(), *fleet_key)
        self._queried.add(key)

        def simulate_key() -> bool:
            """The verdict by the file, or else by a simulation. In both cases the effort of the simulation is
            charged, so that a resumed run has the same search as one that was not killed.
            """
            # The file tells traffic apart by its content, so the setup has no trace.
            setup = (self.llm, self.network, self.policies, self.of_pairs, self.step_time_sigmas, fleet_key)
            remembered = None if file is None else file.look_up(setup, self._traffic, slo)
            simulated = self._with_spread(fleet())
            # A simulation ends as soon as its verdict is clear; `seen` is how many requests it simulated.
            holds, seen = remembered or self._query_runner.answer(SimulationQuery(simulated, slo, **flags))
            if remembered is None and file is not None:
                file.add(setup, self._traffic, slo, holds=holds, seen=seen)
            # For a scenario, too, the cost is computed from `trace`: the scenario's requests need not be
            # drawn here, and have about as many blocks.
            cost = LEAST_EFFORT + request_effort(simulated, self.trace) * seen
            with self._lock:
                self._effort += cost
            deterministic_parallel.charge_query((key, slo), cost)
            return holds

        return self.cache.simulate_once(key, slo, simulate_key)


def without_needless_workers(fleet: Counts, oracle: Oracle) -> Counts:
    """The fleet without needless workers: removed one by one, the dearest first, while the fleet holds."""
    counts = {option.name: count for option, count in fleet}
    options = sorted((option for option, _ in fleet), key=lambda option: (-option.objective, option.name))
    for option in options:
        while counts[option.name] > 0:
            fewer = tuple((other, counts[other.name] - (other is option)) for other, _ in fleet)
            if not oracle.holds(fewer):
                break
            counts[option.name] -= 1
    return tuple((option, counts[option.name]) for option, _ in fleet if counts[option.name])


def request_effort(fleet: Fleet, trace: Trace) -> int:
    """What simulating a request of this trace costs on this fleet, in requests on an ordinary one."""
    effort = 1
    if fleet.policies.prefix_cache:
        blocks = len(trace.prefix_ids) / len(trace)  # The mean number of a request's prompt blocks.
        effort = max(CACHED_EFFORT, round(NO_BLOCKS_EFFORT + blocks / BLOCKS_PER_EFFORT))
    if any(pool.type.dp > 1 and pool.role == "mixed" for pool in fleet.pools):
        effort = max(effort, RANKS_EFFORT)
    if any(pool.type.speculation is not None and pool.role != "prefill" for pool in fleet.pools):
        effort = max(effort, DRAFTS_EFFORT)
    return effort


def _fleet_key(counts: Counts) -> tuple[tuple[Any, ...], ...]:
    """What a simulation reads of a fleet. Neighbouring pools of the same workers count as one pool, for
    instance owned and rented ones.
    """
    pools = ((option.role, _worker_key(option), count) for option, count in counts if count > 0)
    pools_by_worker = itertools.groupby(pools, key=lambda pool: pool[:2])  # By role and worker.
    return tuple(
        (*role_and_worker, sum(count for _, _, count in alike)) for role_and_worker, alike in pools_by_worker
    )


def _placed_fleet_key(counts: Counts) -> tuple[object, ...]:
    """What a simulation reads of a fleet, for a network whose links depend on which workers share a node.
    Here owned and rented workers differ, because they run on different nodes.
    """
    return tuple(
        (option.role, _worker_key(option), gpu.name, gpu.gpus_per_node, gpu.link_bytes_per_s, count)
        for option, count in counts
        for gpu in (option.type.gpu,)
        if count > 0
    )


def _worker_key(option: Option) -> tuple[object, ...]:
    """Everything about a worker that a simulation reads. It does not read the price and the GPU's name."""
    worker = option.type
    return (
        worker.tp,
        worker.pp,
        worker.latency,
        worker.kv_tokens,
        worker.max_num_batched_tokens,
        worker.max_num_seqs,
        worker.form,
        worker.engine,
        worker.speculation,
        worker.dp,
        worker.lora,
    )
