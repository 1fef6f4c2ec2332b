"""Asks the simulator whether fleets keep the SLO, after whatever losses they must survive; remembers answers.

A fleet must hold without its workers that may be down: the spare ones of any one pool, whatever can lie on
the spare nodes, and as many spot workers as are down at once in all but `SPOT_RISK_FRAC` of the time. A
worker that is down for the whole window is a worker that is not there, so each loss is a smaller fleet. Spot
workers fail independently of each other: of n, Binomial(n, down_frac) are down.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from planner.documents.facts import Headroom
from planner.documents.task import Spot
from planner.domain import Limit, Slo
from planner.fleet import Fleet, Network, Policies, Pool, Role, WorkerType
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.search.oracle import deterministic_parallel
from planner.search.oracle.fleet_counts import Counts, Named, may_hand_over, names_of, objective
from planner.search.oracle.pinning import Pinning
from planner.search.oracle.resuming import Decided, answer_name
from planner.search.oracle.scenarios import Scenario
from planner.search.oracle.simulation_queries import KEPT_REQUESTS, Asker, SimulationQuery
from planner.search.oracle.stopping import StoppedError
from planner.search.oracle.work_clock import is_over
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import Verdict, judge
from planner.solvers.master import Option
from planner.traffic.trace import Trace


def without_spare_workers(fleet: Counts, oracle: Oracle) -> Counts:
    """Take workers away, the dearest first, while the fleet still holds."""
    counts = {option.name: count for option, count in fleet}
    options = sorted((option for option, _ in fleet), key=lambda option: (-option.objective, option.name))
    for option in options:
        while counts[option.name] > 0:
            fewer = tuple((o, counts[o.name] - (o is option)) for o, _ in fleet)
            if not oracle.holds([fewer])[0]:
                break
            counts[option.name] -= 1
    return tuple((option, counts[option.name]) for option, _ in fleet if counts[option.name])


# Stands for prefill that takes no time and a link that never delays.
INSTANT = StepLatency((1.0, 2.0), (1e-12, 1e-12), 0.0, 0.0, 0.0, 0.0, 0.0, basis="instant")

NO_LINK = Network(bandwidth_bytes_per_s=1e30)

LEAST_EFFORT = 1_000  # what beginning a simulation costs, in requests

# What a request costs in the kernels of some fleets, beside that of an ordinary one. Over whole plans with
# compiled kernels (2026-11-24) it was 2 to 4 times with prefix caches, 7 with several ranks, 8 with drafts.
CACHED_EFFORT, RANKS_EFFORT, DRAFTS_EFFORT = 3, 7, 8

POOL_NAMES = {"mixed": "mixed", "prefill": "pre", "decode": "dec"}

SPOT_RISK_FRAC = 0.001

MANY_MISSED = 4


@dataclass(frozen=True, slots=True)
class Ends:
    """How far a fleet holds, and the limits that it misses first beyond."""

    headroom: Headroom
    by_traffic: tuple[Limit, ...]
    by_steps: tuple[Limit, ...]


@dataclass(slots=True)
class Answers:
    """What simulations said, for questions to come: per fleet and traffic the SLOs asked, and the answers.

    A fleet that keeps an SLO keeps every looser one, a fleet that misses it misses every stricter one. Prices
    are no part of a fleet here. Traces are told apart by identity, so a trace should be scaled once.
    """

    known: dict[tuple[object, ...], list[tuple[Slo, bool]]] = field(default_factory=dict)
    ends: dict[tuple[object, ...], Ends] = field(default_factory=dict)  # how far fleets hold
    faster: dict[tuple[Trace, float], tuple[Trace, Answers]] = field(default_factory=dict)  # a trace, sped up
    decided: Decided | None = None  # where they are kept for a run that goes on (resuming.py)
    _asking: dict[tuple[object, Slo], threading.Event] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def fresh(self) -> Answers:
        """No answers yet, for other traffic; a run that goes on keeps them in the same place as these."""
        return Answers(decided=self.decided)

    def answer_once(self, key: tuple[object, ...], slo: Slo, find: Callable[[], bool]) -> bool:
        """The answer; of several who ask the same at a time one finds it."""
        query = key, slo
        while True:
            with self._lock:
                known = self.look_up(key, slo)
                if known is not None:
                    deterministic_parallel.charge_effort(query, None)
                    return known
                if (begun := self._asking.get(query)) is None:
                    self._asking[query] = ended = threading.Event()
                    break
            begun.wait()
        try:
            holds = find()
            with self._lock:
                self.add(key, slo, holds=holds)
        finally:
            with self._lock:
                del self._asking[query]
            ended.set()
        return holds

    def look_up(self, key: tuple[object, ...], slo: Slo) -> bool | None:
        for other, holds in self.known.get(key, ()):
            if is_looser(slo, other) if holds else is_looser(other, slo):
                return holds
        return None

    def add(self, key: tuple[object, ...], slo: Slo, *, holds: bool) -> None:
        self.known.setdefault(key, []).append((slo, holds))


def is_looser(slo: Slo, other: Slo) -> bool:
    """Whether what keeps `other` keeps `slo`: the same percentiles, each at the same or a larger limit, over
    the whole or in the same windows, with the same guarantees to tenants or none. Windows of another length
    need not be made of whole ones of this.
    """
    if slo.every_s is not None and slo.every_s != other.every_s:
        return False
    if slo.guarantees and slo.guarantees != other.guarantees:
        return False
    limits = {replace(limit, limit_s=0.0): limit.limit_s for limit in slo.limits}
    others = {replace(limit, limit_s=0.0): limit.limit_s for limit in other.limits}
    if limits.keys() != others.keys() or (slo.attainment_frac or 0.0) > (other.attainment_frac or 0.0):
        return False
    return all(limit_s >= others[key] for key, limit_s in limits.items())


@dataclass(slots=True)
class Oracle:
    """The subproblem of the decomposition: a fleet holds if its simulation on `trace` keeps `slo`.

    With `draws` it must keep it on each of them too, and in all but `may_miss` of `scenarios`. With `z` step
    times are so many standard deviations of their spread above the medians, those of prefills and of decodes.
    `of_pairs` are the policies of fleets with prefill and decode workers, where they differ.
    Fleets that are worth less than `refuted_below` are not asked about: another search has refuted them.
    Those worth less than `doubted_below` are asked about what is written first, where most of them fail.
    `spot` holds the terms of spot workers by the GPU's name, `verdicts` what was said of fleets, by the
    names of their options. Simulations run where the workers are (simulation_queries.py). With `future` they
    are asked of that, and `trace` is what is written. With `downscale` all traffic is one request in so many,
    and a pool is simulated with one worker in so many, rounded down (scale_model.py).
    """

    llm: Llm
    trace: Trace
    slo: Slo
    network: Network
    policies: Policies
    spare_workers: int = 0
    spare_nodes: int = 0
    spot: Mapping[str, Spot] = field(default_factory=dict)
    answers: Answers = field(default_factory=Answers)
    draws: tuple[Trace, ...] = ()
    scenarios: tuple[Scenario, ...] = ()  # the hardest first
    may_miss: int = 0
    refuted_below: float = -math.inf
    doubted_below: float = -math.inf
    step_time_sigmas: tuple[float, float] | None = None
    of_pairs: Policies | None = None
    pinning: Pinning | None = None  # places prefixes, where policies route by what is pinned
    scenario: Scenario | None = None
    downscale: int = 1
    until: float = math.inf  # on the search's clock: beyond, scenarios are not asked: StoppedError
    verdicts: dict[Named, bool] = field(default_factory=dict, init=False)
    _queried: set[tuple[object, ...]] = field(default_factory=set, init=False)
    _verdicts: int = field(default=0, init=False)
    _effort: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _on_draws: tuple[Oracle, ...] = field(init=False)  # one for each of `draws`
    _in_scenarios: tuple[Oracle, ...] = field(init=False)
    _asker: Asker = field(init=False)

    def __post_init__(self) -> None:
        is_kept = self.step_time_sigmas is None or len(self.trace) <= KEPT_REQUESTS
        self._asker = Asker(self._traffic, kept=is_kept)
        self._on_draws = tuple(self.as_written(trace=trace) for trace in self.draws)
        self._in_scenarios = tuple(self.in_scenario(future) for future in self.scenarios)

    @property
    def _traffic(self) -> Trace | Scenario:
        return self.trace if self.scenario is None else self.scenario

    @property
    def queried_trace(self) -> Trace:
        """The trace that queries are about; a scenario has its own, drawn when it is first needed."""
        return self.trace if self.scenario is None else self.scenario.trace

    def as_written(self, **changes: Any) -> Oracle:
        """The same question without draws and futures: of what is written, or of `changes` in its place."""
        own = {"refuted_below": -math.inf, "doubted_below": -math.inf} | changes
        return replace(self, draws=(), scenarios=(), may_miss=0, **own)

    def in_scenario(self, future: Scenario) -> Oracle:
        """The same question of one scenario in place of what is written."""
        known = Answers(future.known, decided=self.answers.decided)
        return self.as_written(scenario=future, step_time_sigmas=future.z, answers=known)

    def of_question(self) -> tuple[object, ...]:
        """What the answers of simulations depend on beside the fleet and the SLO."""
        return self.llm, self.network, self.policies, self.of_pairs, self._traffic, self.step_time_sigmas

    def fleet(self, counts: Counts) -> Fleet:
        """The fleet of these options; pools of one role are numbered if there are several."""
        counts = tuple((option, count) for option, count in counts if count > 0)
        pools = []
        for option, count in counts:
            alike = [other for other, _ in counts if other.role == option.role]
            suffix = f"-{alike.index(option)}" if len(alike) > 1 else ""
            pools.append(Pool(POOL_NAMES[option.role] + suffix, option.role, option.type, count))
        is_pair = any(option.role == "prefill" for option, _ in counts)
        policies = self._of_pairs if is_pair else self.policies
        pinned = () if self.pinning is None else self.pinning.of(pools)
        return Fleet(self.llm, tuple(pools), policies, self.network, pinned=pinned)

    @property
    def _of_pairs(self) -> Policies:
        return self.policies if self.of_pairs is None else self.of_pairs

    def counts(self, fleet: Fleet) -> Counts:
        """A fleet as options with their counts; objectives are its prices."""
        return tuple(
            (Option(pool.role, pool.type, pool.type.price_usd_per_h), pool.count)
            for pool in fleet.pools
            if pool.count
        )

    @property
    def simulations(self) -> int:
        """How many different simulations were asked for, whoever had asked for them before."""
        return (
            len(self._queried)
            + self._verdicts
            + sum(other.simulations for other in (*self._on_draws, *self._in_scenarios))
        )

    def effort(self) -> int:
        """What the simulations have cost that were asked for here first, in requests of ordinary fleets."""
        return self._effort + sum(other.effort() for other in (*self._on_draws, *self._in_scenarios))

    @property
    def has_losses(self) -> bool:
        """Whether a fleet must hold without some of its workers."""
        return bool(self.spare_workers or self.spare_nodes or self.spot)

    def holds(self, fleets: Sequence[Counts]) -> list[bool]:
        """Whether fleets keep the SLO, after any loss that must be survived."""
        answers = [self._holds(counts) for counts in fleets]
        for counts, answer in zip(fleets, answers, strict=True):
            deterministic_parallel.remember_answer(self.verdicts, names_of(counts), answer)
        return answers

    def _holds(self, counts: Counts) -> bool:
        """Futures are asked first: a fleet for which they matter mostly holds on what is written."""
        written = (self, *self._on_draws)
        return (
            not (math.isfinite(self.refuted_below) and objective(counts) < self.refuted_below)
            and not any(oracle._is_known_to_fail(counts) for oracle in written)
            and (objective(counts) >= self.doubted_below or all(each._survives(counts) for each in written))
            and self._keeps_enough(counts)
            and all(oracle._survives(counts) for oracle in written)
        )

    def _keeps_enough(self, counts: Counts) -> bool:
        """Whether the fleet keeps the SLO in enough of the scenarios, which are simulated until that is
        decided.
        """
        missed, at, count = 0, 0, len(self._in_scenarios)
        while missed <= self.may_miss < missed + count - at:
            # so many are asked whatever they say
            sure = min(self.may_miss + 1 - missed, missed + count - at - self.may_miss)
            missed += self._missed_by(counts, self._in_scenarios[at : at + sure])
            at += sure
        return missed <= self.may_miss

    def _missed_by(self, counts: Counts, oracles: Sequence[Oracle]) -> int:
        """The number of these scenarios in which a fleet misses the SLO."""

        def survives(oracle: Oracle) -> bool:
            self.stop_in_time()
            return oracle._survives(counts)

        return len(oracles) - sum(deterministic_parallel.run_each(survives, oracles))

    def stop_in_time(self) -> None:
        if is_over(self.until):
            raise StoppedError

    def missed_count(self, counts: Counts, most: int) -> int:
        """The number of scenarios in which a fleet misses the SLO, counted up to `most` + 1."""
        missed = at = 0
        while at < len(self._in_scenarios) and missed <= most:
            sure = self._in_scenarios[at : at + most + 1 - missed]
            missed, at = missed + self._missed_by(counts, sure), at + len(sure)
        return missed

    def in_future(self, number: int) -> Oracle:
        """What asks about one of the scenarios."""
        return self._in_scenarios[number]

    def failing_loss(self, counts: Counts) -> tuple[Oracle, Counts] | None:
        """What is left of a fleet by the first loss that it does not survive, and who says so: this oracle,
        or that of another draw; None if it survives all.
        """
        return next(
            (
                (oracle, left)
                for oracle in (self, *self._on_draws)
                for left in self._losses(counts)
                if not oracle._simulated(left)
            ),
            None,
        )

    def prefill_meets_ttft_alone(self, fleets: Sequence[Counts]) -> list[bool]:
        """Whether prefill pools keep the limits on TTFT if every request leaves with its first token.

        Queues are ordered as if it stayed. That hand-offs can only hold a prefill pool up is an assumption
        (search/level0/pruning_rules.py), and a false one where requests wait for others, as answers that
        take no time bring the next ones earlier. Where MANY_MISSED scenarios may be missed, so that it takes
        many simulations to refute a fleet, a pool fails too that misses TTFT in all of so many and one more,
        those asked first.
        """
        return [self._leads_enough(option, self._modelled(option, count)) for ((option, count),) in fleets]

    def decode_keeps_up_alone(self, fleets: Sequence[Counts]) -> list[bool]:
        """Whether decode pools keep up if every prompt arrives prefilled at once: the backlog test alone."""
        return [self._decode_alone(option, self._modelled(option, count)) for ((option, count),) in fleets]

    def _modelled(self, option: Option, count: int) -> int:
        """The number of workers with which a pool is simulated, where some of its workers may be lost."""
        return self.workers_left(option, count) // self.downscale

    def workers_left(self, option: Option, count: int) -> int:
        """Fewest workers of one option that may be left of `count`."""
        on_node = max(int(option.type.gpu.gpus_per_node) // option.type.gpus, 1)
        return count - self.spot_down(option, count) - self.spare_workers - self.spare_nodes * on_node

    def workers_needed(self, option: Option, least: int) -> int:
        """Fewest workers of one option of which `least` are left."""
        count = least
        while self.workers_left(option, count) < least:
            count += least - self.workers_left(option, count)
        return count

    def spot_down(self, option: Option, count: int) -> int:
        """How many of so many workers may be down at once: more are in SPOT_RISK_FRAC of the time at most."""
        terms = self.spot.get(option.type.gpu.name)
        if terms is None or count <= 0:
            return 0
        from scipy.special import bdtr  # here: a fifth of a second, for every command

        down = np.arange(count + 1)
        return int(np.argmax(bdtr(down, count, terms.down_frac) >= 1 - SPOT_RISK_FRAC))

    def verdict(self, fleet: Fleet, *, record: bool) -> tuple[Simulation, Verdict]:
        """The whole simulation, to the end, with its judgement."""
        self._verdicts += 1
        record = record or self.slo.every_s is not None  # gaps of each window
        self._charge_whole(fleet)
        simulation = simulate(
            self._at(fleet),
            self.queried_trace,
            limits=self.slo.limits,
            record=record,
            every_s=self.slo.every_s,
        )
        return simulation, judge(simulation, self.slo)

    def worst_verdict(self, counts: Counts) -> Verdict | None:
        """The judgement, without percentiles, after the loss that leaves the fewest limits kept, and of these
        the least share of some; None where a loss leaves no worker of a role.
        """
        worst: list[Verdict] = []
        for left in self._losses(counts):
            roles = {option.role for option, count in left if count > 0}
            if not roles or ("prefill" in roles) != ("decode" in roles):
                return None
            worst.append(self.judgement(left))
        return min(worst, key=lambda said: (said.holds, *sorted(line.kept_frac for line in said.lines)))

    def judgement(self, counts: Counts) -> Verdict:
        """What the whole simulation of what is left of a fleet says, without percentiles."""
        fleet = self.fleet(counts)
        self._charge_whole(fleet)
        return self._asker.judge_whole(SimulationQuery(self._at(fleet), self.slo))

    def _charge_whole(self, fleet: Fleet) -> None:
        """A simulation to the end, which is not remembered."""
        cost = LEAST_EFFORT + request_effort(fleet) * len(self.queried_trace)
        deterministic_parallel.charge_effort(object(), cost)

    def _survives(self, counts: Counts) -> bool:
        return all(self._simulated(left) for left in self._losses(counts))

    def _at(self, fleet: Fleet) -> Fleet:
        """The fleet with the step times that this oracle asks about."""
        return fleet if self.step_time_sigmas is None else fleet.with_step_spread(*self.step_time_sigmas)

    def _losses(self, counts: Counts) -> list[Counts]:
        """What may be left of a fleet: without the spot workers that are down, and one spare pool or node."""
        counts = tuple(
            (option, count - self.spot_down(option, count)) for option, count in counts if count > 0
        )
        lost = [(0,) * len(counts)]
        if self.spare_workers:
            lost = [
                tuple(self.spare_workers * (i == k) for i in range(len(counts))) for k in range(len(counts))
            ]
        elif self.spare_nodes:
            lost = self._nodes(counts)
        return [
            tuple(
                (option, (count - gone) // self.downscale)
                for (option, count), gone in zip(counts, each, strict=True)
            )
            for each in lost
        ]

    def _nodes(self, counts: Counts) -> list[tuple[int, ...]]:
        """The fullest ways in which workers can share the spare nodes, wherever they are placed."""
        node_mixes: list[tuple[int, ...]] = []
        for kind in dict.fromkeys(option.type.gpu.base for option, _ in counts):
            room = self.spare_nodes * max(
                int(option.type.gpu.gpus_per_node) for option, _ in counts if option.type.gpu.base == kind
            )
            ranges = [
                range(min(count, max(room // option.type.gpus, 1)) + 1 if option.type.gpu.base == kind else 1)
                for option, count in counts
            ]
            gpus = [min(option.type.gpus, room) for option, _ in counts]
            fits = [
                node
                for node in itertools.product(*ranges)
                if sum(g * n for g, n in zip(gpus, node, strict=True)) <= room
            ]
            node_mixes += [
                node
                for node in fits
                if not any(other != node and all(map(int.__ge__, other, node)) for other in fits)
            ]
        return node_mixes

    def _is_known_to_fail(self, counts: Counts) -> bool:
        """Whether an earlier simulation says that it misses the SLO after some loss."""
        if not self._in_scenarios:
            return False
        keys = (self._key(left) for left in self._losses(counts))
        return any(self.answers.look_up((*self.of_question(), *key), self.slo) is False for key in keys)

    def _simulated(self, counts: Counts) -> bool:
        roles = {option.role for option, count in counts if count > 0}
        if not roles or ("prefill" in roles) != ("decode" in roles):
            return False
        if not may_hand_over(option.type for option, count in counts if count > 0 and option.role != "mixed"):
            return False
        return self._answer(self._key(counts), lambda: self.fleet(counts), self.slo)

    def _key(self, counts: Counts) -> tuple[object, ...]:
        """A fleet as far as a simulation depends on it, its pins included."""
        key = _key(counts)
        return (*key, "polished") if self.places_polished(counts) else key

    def places_polished(self, counts: Counts) -> bool:
        """Whether the pins of this fleet are others than those that a search places."""
        if self.pinning is None:
            return False
        return self.pinning.uses_polished(
            [Pool(option.role, option.role, option.type, count) for option, count in counts if count > 0]
        )

    def _leads_enough(self, option: Option, count: int) -> bool:
        hardest = self._in_scenarios[: self.may_miss + 1]
        if not MANY_MISSED <= self.may_miss < len(hardest):
            return self._prefill_alone(option, count)
        return any(oracle._prefill_alone(option, count) for oracle in hardest) and self._prefill_alone(
            option, count
        )

    def _prefill_alone(self, option: Option, count: int) -> bool:
        if self.slo.selectors:
            return True  # What may wait for whom is up to the classes, so nothing is ruled out.
        limits = tuple(limit for limit in self.slo.limits if limit.metric == "ttft")
        slo = Slo(limits, every_s=self.slo.every_s)

        def fleet() -> Fleet:
            pools = (Pool("pre", "mixed", option.type, count),)
            as_prefill = (replace(pools[0], role="prefill"),)
            pinned = () if self.pinning is None else self.pinning.of(as_prefill)
            return Fleet(self.llm, pools, self._of_pairs, self.network, pinned=pinned)

        key = ("leads", _machine(option), count)
        return count > 0 and self._answer(key, fleet, slo, is_prompts=True)

    def _decode_alone(self, option: Option, count: int) -> bool:
        if self.slo.selectors:
            return True  # As above.
        # a prompt that keeps TTFT comes so much later, so the backlog test may see that much less of a wait
        slo = Slo(
            tuple(
                Limit("ttft", 0.0, 2 * limit.limit_s) for limit in self.slo.limits if limit.metric == "ttft"
            )
        )

        def fleet() -> Fleet:
            drafts = option.type.speculation
            drafts = drafts and replace(drafts, draft_frac=0.0, draft_s=0.0)
            instant = WorkerType(option.type.gpu, 1, INSTANT, 10**12, 8192, 256, speculation=drafts)
            if (lora := option.type.lora) is not None:
                instant = replace(instant, lora=lora.without_cost())
            pools = (Pool("pre", "prefill", instant, 1), Pool("dec", "decode", option.type, count))
            policies = replace(self._of_pairs, prefix_cache=False, kv_offload=None, routing="jsq")
            return Fleet(self.llm, pools, policies, NO_LINK)

        key = ("follows", _machine(option), count)
        return count > 0 and self._answer(key, fleet, slo, is_prefilled=True)

    def _answer(self, own: tuple[object, ...], fleet: Callable[[], Fleet], slo: Slo, **query: bool) -> bool:
        decided, key = self.answers.decided, (*self.of_question(), *own)
        self._queried.add(key)

        def find() -> bool:
            name, kept = None, None
            if decided is not None:
                question = (self.llm, self.network, self.policies, self.of_pairs, self.step_time_sigmas, own)
                name = answer_name(question, self._traffic, slo)
                kept = None if name is None else decided.look_up(name)
            asked = self._at(fleet())
            holds, seen = kept or self._asker.answer(SimulationQuery(asked, slo, **query))
            if kept is None and decided is not None and name is not None:
                decided.add(name, holds=holds, seen=seen)
            cost = LEAST_EFFORT + request_effort(asked) * seen
            with self._lock:
                self._effort += cost
            deterministic_parallel.charge_effort((key, slo), cost)
            return holds

        return self.answers.answer_once(key, slo, find)


def request_effort(fleet: Fleet) -> int:
    """What simulating a request costs on this fleet, in requests on an ordinary one."""
    effort = CACHED_EFFORT if fleet.policies.prefix_cache else 1
    if any(pool.type.dp > 1 and pool.role == "mixed" for pool in fleet.pools):
        effort = max(effort, RANKS_EFFORT)
    if any(pool.type.speculation is not None and pool.role != "prefill" for pool in fleet.pools):
        effort = max(effort, DRAFTS_EFFORT)
    return effort


def _key(counts: Counts) -> tuple[object, ...]:
    """A fleet as far as a simulation depends on it."""
    return tuple(_alike((option.role, _machine(option), count) for option, count in counts if count > 0))


def _alike(pools: Iterable[tuple[Role, Any, int]]) -> Iterator[tuple[Role, Any, int]]:
    """Neighbours that are alike as one pool: owned or rented is no matter to a simulation."""
    for (role, machine), each in itertools.groupby(pools, key=lambda pool: pool[:2]):
        yield role, machine, sum(count for _, _, count in each)


def _machine(option: Option) -> tuple[object, ...]:
    """All of a worker that a simulation depends on: not its price, nor the name of its GPU."""
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
