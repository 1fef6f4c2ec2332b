"""How robust the fleet of a plan is: the numbers on the report's first screen, computed after the search.
They come in these parts:

    workers   the plan's pools in their proportion, with fewer and more workers, in scenarios of its test
    traffic   whether the plan's fleet would pass its test with MORE_FRAC more traffic (what another fleet for
              that traffic costs is not computed here)
    headroom  how much more traffic, or how much longer steps, the fleet can bear before it misses the SLO
    prompts   how much longer all prompts may be
    losses    what the loss of a worker breaks
    prices    from which price of a GPU on another fleet is cheaper

Simulations are limited by their requests, and not by seconds alone, so that equal questions give equal
answers: by BUDGET_REQUESTS plus BUDGET_TIMES the requests of the trace, for more traffic by MORE_REQUESTS,
and for headroom by its few steps of bisection. Parts for which these limits or the clock leave no room are
named in the result.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from planner.documents.certificate import Alternative
from planner.documents.facts import Remarked
from planner.documents.robustness_facts import (
    MORE_FRAC,
    AtWorkers,
    FleetRobustness,
    HeadroomFact,
    MoreTraffic,
    PriceTurn,
    RobustnessPart,
    Share,
    WorkerLoss,
)
from planner.domain import ROUNDING, Limit
from planner.fleet import Fleet, WorkerType
from planner.search.oracle.deterministic_parallel import run_each
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import Oracle, request_effort
from planner.search.oracle.headroom import find_headroom, most_that_holds, with_traffic
from planner.search.oracle.verdict_cache import VerdictCache
from planner.search.oracle.work_clock import StoppedError
from planner.search.prefixes.pinning import Pinning
from planner.search.problem.bill import bill_fleet
from planner.search.problem.plan_problem import Problem, with_search_scenarios
from planner.search.production.scenario_test import LEAST_TEST_SCENARIOS, ScenarioTest, is_test_passed
from planner.simulator.slo_verdict import Verdict
from planner.traffic.prefixes import with_longer_prompts

Value = TypeVar("Value")

# All numbers here are set by hand.

# The simulations of all parts but "traffic" and "headroom" may have BUDGET_REQUESTS requests, which take 1.5
# CPU seconds, and BUDGET_TIMES those of the trace.
BUDGET_REQUESTS = 1_200_000
BUDGET_TIMES = 4
# Fleets with fewer and more workers are simulated in at least and at most this many scenarios.
LEAST_SCENARIOS = 4
MOST_SCENARIOS = 10
# The bisection over the length of prompts takes about this many simulations.
PROMPT_SIMULATIONS = 8
# More traffic is simulated only if its requests, in the search's scenarios and in the shortest test together,
# are no more than this.
MORE_REQUESTS = 3_000_000
# This many smaller and this many larger numbers of workers than the planned one are simulated.
WORKERS_BESIDE = 2
# Each simulated number of workers differs from the next by this share, and by one worker at least.
STEP_FRAC = 0.1
# `least_in_proportion` (for findings.py) begins with the first of these multiples of the planned workers, and
# gives up at the second.
FIRST_TIMES, MOST_TIMES = 2, 3
# Price rises of more than this share are not reported.
MOST_PRICE_RISE_FRAC = 1.0


@dataclass(slots=True)
class RobustnessSearch:
    """The simulations for all parts, of the plan's fleet `best`, with their budget and the parts that were
    left out. `priced` are other fleets with their labels; the part "prices" compares with them.
    """

    problem: Problem
    best: Counts
    priced: Sequence[tuple[str, Fleet]]
    left_out: list[RobustnessPart] = field(default_factory=list)
    is_out_of_time: bool = False  # Whether a part is left out because the time was over.
    oracles: list[Oracle] = field(default_factory=list)  # One for each scenario; without scenarios just one.
    may_miss: int = 0  # How many of these scenarios the fleet may miss by `safety: kept_in`.
    spent: float = 0.0  # Simulated requests, of those that `_budget_requests` allows.
    simulations: int = 0

    def run(self) -> FleetRobustness:
        """Compute all parts that the time and the budget allow."""
        problem = self.problem
        as_written = problem.oracle.as_written()
        scenario_count = self._scenario_count()
        # Drawing the scenarios takes time, so none are drawn if the time is over.
        test_scenarios = None if problem.out_of_time() else problem.test_scenarios
        self.oracles = [as_written]
        if test_scenarios is not None:
            self.oracles = [as_written.in_scenario(test_scenarios[i]) for i in range(scenario_count)]
        if problem.task.safety is not None:
            self.may_miss = problem.task.safety.most_missed(scenario_count)
        headroom_facts = self._in_time("headroom", self._find_headroom) or ()
        losses = self._in_time("losses", self._find_losses) or ()
        prompts = self._in_time("prompts", self._find_longest_prompts) or ()
        at_workers = self._in_time("workers", self._find_at_workers) or ()
        more_traffic = self._in_time("traffic", lambda: self._find_more_traffic(headroom_facts))
        return FleetRobustness(
            scenario_count=0 if test_scenarios is None else scenario_count,
            may_miss=self.may_miss,
            pools=tuple(pool.name for pool in problem.oracle.fleet(self.best).running_pools),
            at_workers=at_workers,
            more_traffic=more_traffic,
            holds=(*headroom_facts, *prompts),
            losses=losses,
            prices=find_price_turns(problem.oracle.fleet(self.best), self.priced),
            simulations=self.simulations,
            left_out=tuple(self.left_out),
            is_out_of_time=self.is_out_of_time,
        )

    def _scenario_count(self) -> int:
        """The number of scenarios that leave enough budget for the other parts; 1 without `safety`."""
        if self.problem.test_scenarios is None:
            return 1
        fleets = 2 * WORKERS_BESIDE + 1  # The part "workers" simulates this many in each scenario.
        per_scenario = fleets * len(self.problem.trace) * self._agents_effort()
        most_requests = self._budget_requests() / 2  # That part may take half of the budget.
        return int(np.clip(most_requests // per_scenario, LEAST_SCENARIOS, MOST_SCENARIOS))

    def _agents_effort(self) -> float:
        """How many times as long a request of described agents takes to simulate as one of other traffic."""
        problem = self.problem
        if not problem.task.is_of_agents:
            return 1.0
        return request_effort(problem.oracle.fleet(self.best), problem.trace)

    def _budget_requests(self) -> float:
        """How many requests all simulations may have but those of more traffic and of headroom."""
        return BUDGET_REQUESTS + BUDGET_TIMES * len(self.problem.trace)

    def _may_go_on(self, part: RobustnessPart, requests: float) -> bool:
        """Whether the clock and the budget allow this many requests; else the part is noted as left out."""
        if self.problem.out_of_time():
            self.is_out_of_time = True
        elif self.spent + requests <= self._budget_requests():
            return True
        self.left_out.append(part)
        return False

    def _in_time(self, part: RobustnessPart, find: Callable[[], Value]) -> Value | None:
        """The result of `find`; None if the time ends first, and the part is then noted as left out."""
        try:
            return find()
        except StoppedError:
            self.is_out_of_time = True
            self.left_out.append(part)
            return None

    def _stop_in_time(self) -> None:
        """Raises StoppedError once the time is over."""
        if self.problem.out_of_time():
            raise StoppedError

    def _count_simulation(self, oracle: Oracle) -> None:
        """Charge a simulation that is about to begin; raises StoppedError if the time is over."""
        self._stop_in_time()
        self.simulations += 1
        self.spent += len(oracle.trace)

    def _find_at_workers(self) -> tuple[AtWorkers, ...]:
        """For each number of workers near the planned one, how many requests keep each limit; empty if the
        budget is too small.
        """
        planned = [count for _, count in self.best]
        requests_of_fleet = sum(len(oracle.trace) for oracle in self.oracles)
        if not self._may_go_on("workers", (2 * WORKERS_BESIDE + 1) * requests_of_fleet):
            return ()
        rows = []
        for numbers in numbers_beside(planned):
            counts = self._with_counts(numbers)
            if self.problem.allows(counts):
                verdicts = self._worst_verdicts(counts)
                rows.append(_at_workers_fact(numbers, verdicts, self.problem.slo.limits, self.may_miss))
        return tuple(rows)

    def _worst_verdicts(self, counts: Counts) -> list[Verdict | None]:
        """For each oracle the verdict on the fleet, after the worst of the losses that it must survive, if
        any; None where a role has no worker left.
        """
        for oracle in self.oracles:
            self._count_simulation(oracle)
        return run_each(lambda oracle: oracle.worst_verdict(counts), self.oracles)

    def _with_counts(self, counts: Iterable[int]) -> Counts:
        """The plan's pools with these counts of workers."""
        return tuple((option, count) for (option, _), count in zip(self.best, counts, strict=True))

    def _find_more_traffic(self, headroom_facts: Sequence[HeadroomFact]) -> MoreTraffic | None:
        """Whether the fleet would pass as a plan with `safety: growth` of MORE_FRAC; None if that takes too
        many simulations.
        """
        problem, safety = self.problem, self.problem.task.safety
        headroom = next((fact for fact in headroom_facts if fact.strain == "traffic"), None)
        if headroom is None:  # There was no time to compute the headroom.
            return None
        # The headroom is that on the traffic as written. `with_traffic` adds other draws and losses, so a
        # fleet with enough headroom may still fail there.
        if headroom.frac < MORE_FRAC or not with_traffic(problem.oracle, MORE_FRAC).holds(self.best):
            return MoreTraffic(False)
        if safety is None or problem.search_scenarios is None or problem.test_scenarios is None:
            return MoreTraffic(True)
        requests = (1 + MORE_FRAC) * len(problem.trace)
        scenarios = problem.search_scenarios.count + LEAST_TEST_SCENARIOS
        if scenarios * requests * self._agents_effort() > MORE_REQUESTS:
            return None
        # The search's scenarios come first: they are fewer than the test's, and a fleet that fails in them
        # needs no test.
        grown = with_search_scenarios(
            replace(problem, search_scenarios=problem.search_scenarios.with_more(MORE_FRAC))
        )
        # The report shows the count, so no scenario is taken to be kept without a simulation.
        oracle = replace(grown.oracle, until=problem.deadline, infers_kept=False)
        count = problem.search_scenarios.count
        missed = oracle.missed_count(self.best, count)
        self.simulations += oracle.simulations
        if missed > oracle.may_miss:
            return MoreTraffic(
                False, kept=count - missed, scenario_count=count, asked_frac=safety.kept_in_frac
            )
        test = ScenarioTest.of(replace(problem, test_scenarios=problem.test_scenarios.with_more(MORE_FRAC)))
        kept_in = test.decide(self.best)
        self._stop_in_time()
        self.simulations += kept_in.scenario_count
        return MoreTraffic(
            is_test_passed(kept_in, safety),
            kept=kept_in.kept,
            scenario_count=kept_in.scenario_count,
            asked_frac=safety.kept_in_frac,
        )

    def _find_headroom(self) -> tuple[HeadroomFact, ...]:
        """The headroom of the fleet. It is not charged: a plan for production has simulated it already."""
        measured = find_headroom(self.problem.oracle, self.best, before_each=self._stop_in_time)
        return (
            HeadroomFact("traffic", measured.headroom.traffic_frac, measured.by_traffic),
            HeadroomFact("steps", measured.headroom.steps_frac, measured.by_steps),
        )

    def _find_losses(self) -> tuple[WorkerLoss, ...]:
        """For each pool, which limits are missed when one of its workers is lost, without the losses that the
        question asks to survive.
        """
        oracle, losses = self.problem.oracle.as_written(spare_workers=0, spare_nodes=0, spot={}), []
        if not self._may_go_on("losses", len(self.best) * len(oracle.trace)):
            return ()
        names = [pool.name for pool in oracle.fleet(self.best).running_pools]
        for k, (_, count) in enumerate(self.best):
            fewer = self._with_counts(n - 1 if i == k else n for i, (_, n) in enumerate(self.best))
            self._count_simulation(oracle)
            verdict = oracle.worst_verdict(fewer)
            missed = () if verdict is None else tuple(line.limit for line in verdict.missed)
            losses.append(WorkerLoss(names[k], count, verdict is not None and verdict.holds, missed))
        return tuple(losses)

    def _find_longest_prompts(self) -> tuple[HeadroomFact, ...]:
        """How much longer all prompts may be; empty if the budget is too small."""
        oracle = self.problem.oracle.as_written()
        if not self._may_go_on("prompts", PROMPT_SIMULATIONS * len(oracle.trace)):
            return ()

        def with_longer(more_frac: float) -> tuple[Oracle, Counts]:
            self._count_simulation(oracle)
            # Longer prompts leave less memory for pinned prefixes, so the pinning is computed anew.
            longer = with_longer_prompts(oracle.trace, more_frac)
            pinning = None if oracle.pinning is None else Pinning(longer)
            return replace(oracle, trace=longer, pinning=pinning, cache=VerdictCache()), self.best

        frac, missed = most_that_holds(with_longer)
        return (HeadroomFact("prompts", frac, missed),)


def numbers_beside(planned: Sequence[int]) -> list[tuple[int, ...]]:
    """The counts of each pool for the planned number of workers, and for WORKERS_BESIDE smaller and larger
    numbers, in the plan's proportion.
    """
    total, pools = sum(planned), len(planned)
    step = max(1, round(STEP_FRAC * total))
    totals = range(total - WORKERS_BESIDE * step, total + WORKERS_BESIDE * step + 1, step)
    return [in_proportion(planned, workers) for workers in totals if workers >= pools]


def in_proportion(planned: Sequence[int], workers: int) -> tuple[int, ...]:
    """This many workers dealt out in the plan's proportion by largest remainders, at least one per pool."""
    quotas = np.array(planned) * (workers / sum(planned))
    counts = np.maximum(np.floor(quotas), 1).astype(int)
    while (missing := workers - counts.sum()) != 0:
        below_quota = quotas - counts
        if missing > 0:
            counts[np.argmax(below_quota)] += 1
        else:  # Pools that were raised to one worker have made the sum too large.
            counts[np.argmin(np.where(counts > 1, below_quota, np.inf))] -= 1
    return tuple(counts.tolist())


def least_in_proportion(
    planned: Sequence[int], holds: Callable[[tuple[int, ...]], bool]
) -> tuple[int, ...] | None:
    """The fewest workers in the plan's proportion that hold, by bisection, and no fewer than planned. None if
    MOST_TIMES the planned ones do not hold.
    """
    total = sum(planned)
    failing = total - 1  # Taken to be too few workers.
    enough = FIRST_TIMES * total  # Simulated next; enough after the loop.
    most = MOST_TIMES * total
    while not holds(in_proportion(planned, enough)):
        failing = enough
        if enough == most:
            return None
        enough = min(most, enough + max(1, round(STEP_FRAC * total)))
    while enough - failing > 1:
        middle = (failing + enough) // 2
        if holds(in_proportion(planned, middle)):
            enough = middle
        else:
            failing = middle
    return in_proportion(planned, enough)


def _at_workers_fact(
    counts: tuple[int, ...], verdicts: Sequence[Verdict | None], limits: Sequence[Limit], may_miss: int
) -> AtWorkers:
    """What a fleet with these counts keeps. For each limit: the share of requests that keep it, over the
    scenarios: the lowest, the lowest without the `may_miss` worst scenarios, the median, and the highest. A
    verdict of None counts as a share of 0.
    """
    shares = []
    for k, limit in enumerate(limits):
        fracs = np.sort([0.0 if verdict is None else verdict.lines[k].kept_frac for verdict in verdicts])
        lowest, lowest_counted, highest = fracs[0], fracs[may_miss], fracs[-1]
        shares.append(Share(limit, *map(float, (lowest, lowest_counted, np.median(fracs), highest))))
    kept_in = sum(verdict is not None and verdict.holds for verdict in verdicts)
    return AtWorkers(counts, kept_in, tuple(shares))


def find_price_turns(fleet: Fleet, others: Sequence[tuple[str, Fleet]]) -> tuple[PriceTurn, ...]:
    """For each GPU of the plan the smallest price rise that makes another fleet cheaper.

    A bill is linear in the price of a GPU, so one doubled price gives the slope. Fleets that cost no more
    than the plan today are left out, and those that stay dearer up to MOST_PRICE_RISE_FRAC.
    """
    bill = bill_fleet(fleet).usd_per_h
    nearest: list[PriceTurn] = []
    for gpu in dict.fromkeys(pool.type.gpu.base for pool in fleet.running_pools):
        # What the fleet costs more if the price of the GPU is doubled.
        slope_usd_per_h = _doubled_bill_usd_per_h(fleet, gpu) - bill
        turns = []
        for label, other in others:
            other_bill = bill_fleet(other).usd_per_h
            other_slope_usd_per_h = _doubled_bill_usd_per_h(other, gpu) - other_bill
            # If the price rises by `frac`, each bill rises by frac times its slope. They are equal where
            # frac = (other_bill - bill) / slope_difference.
            slope_difference = slope_usd_per_h - other_slope_usd_per_h
            if slope_difference <= ROUNDING * bill or other_bill <= bill * (1 + ROUNDING):
                continue
            if (frac := (other_bill - bill) / slope_difference) <= MOST_PRICE_RISE_FRAC:
                turns.append(PriceTurn(gpu, frac, label))
        if turns:
            nearest.append(min(turns, key=lambda turn: turn.more_frac))
    return tuple(sorted(nearest, key=lambda turn: turn.more_frac))


def _doubled_bill_usd_per_h(fleet: Fleet, gpu: str) -> float:
    """The bill in USD/h if this GPU cost twice as much."""

    def at_double_price(worker: WorkerType) -> WorkerType:
        if worker.gpu.base != gpu:
            return worker
        return replace(worker, gpu=replace(worker.gpu, price_usd_per_h=2 * worker.gpu.price_usd_per_h))

    return bill_fleet(fleet.with_types(at_double_price)).usd_per_h


def priced_alternatives(alternatives: Iterable[Alternative]) -> list[tuple[str, Fleet]]:
    """The alternatives that have a fleet with a price, with their labels. An alternative that is remarked to
    hold on paper alone is left out: it is no alternative to a plan for production.
    """
    on_paper = Remarked("on-paper")
    return [
        (alternative.label, alternative.fleet)
        for alternative in alternatives
        if alternative.fleet is not None and alternative.is_priced and on_paper not in alternative.notes
    ]
