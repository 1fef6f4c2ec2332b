"""Finds the most traffic within the limits, for the objective throughput: first on paper, then in production.

A rate [requests/s] is sustained if a fleet is found for it, and refuted if none is found. Both searches climb
from a first rate until a refuted rate is near a sustained one (RateClimb).

In production a fleet must keep the SLO in enough of the scenarios that a search sees (cheapest_kept.py). The
scenarios depend on the rate, and a search for production is limited in simulated requests. So a rate that is
refuted is not proved impossible. certify.py then tests the fleet in scenarios that the search has not seen.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.documents.certificate import Throughput
from planner.errors import InfeasibleError, OutOfTimeError, PlannerError
from planner.fleet import Fleet, Policies
from planner.search.level0.level0_search import Level0, runs_mixed, search_level0
from planner.search.mixed.best_fleet import find_fleet_quickly
from planner.search.mixed.infeasible import with_relaxation
from planner.search.mixed.mixed_fleets import shares_by_work
from planner.search.mixed.mixtures import find_cheaper_pair
from planner.search.mixed.policy_race import MOST_ROUNDS, cheapest_first, race_on_fleets
from planner.search.mixed.policy_search import search_policies
from planner.search.oracle.deterministic_parallel import run_each
from planner.search.oracle.fleet_counts import Counts, counts_of
from planner.search.oracle.scenarios import next_block
from planner.search.oracle.traffic_request import requested_traffic
from planner.search.oracle.work_clock import StoppedError, ended_by, in_time, is_over
from planner.search.problem import plan_problem
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.options import split_of
from planner.search.problem.stages import Message
from planner.search.production.cheapest_kept import (
    HARDEST_SCENARIOS,
    LEAST_SEARCH_REQUESTS,
    fill_limits,
    with_search_limit,
)
from planner.search.production.production_fleet import MOST_TESTS
from planner.search.production.scenario_test import ScenarioTest, is_test_passed
from planner.traffic.scaling import same_requests

# The numbers below are set by hand.

# If the plan is on paper alone, the refuted rate is at most this share above the highest sustained one.
RATE_STEP_FRAC = 0.01
# If production is searched next, which begins from the rate on paper, the share may be this large. It saves
# refuted rates, which take longest.
COARSE_STEP_FRAC = 0.05

# Rates of the worker types of a fleet that was found grow by a stride, at most this, until the types fail.
MOST_STRIDE = 2.0
# In production the refuted rate is at most this share above the highest rate that is sustained.
KEPT_STEP_FRAC = 0.02
# In production the first rate is this share of the most traffic on paper.
FIRST_RATE_FRAC = 0.8
# The worker types of the fleet on paper are searched first, at falling rates: each is KNOWN_FALL_FRAC of the
# one before, down to KNOWN_LEAST_FRAC of the first. The range is this large because step times that were not
# measured may be three times as long in the hardest scenarios.
KNOWN_FALL_FRAC = 0.5
KNOWN_LEAST_FRAC = 1 / 16
# If a likely fleet sustains a rate in the hardest scenarios, the climb in all scenarios begins there instead,
# at rates that fall by this factor.
LIKELY_FALL_FRAC = 0.9
# If no fleet is found with these types, all types are searched, at rates that fall by this factor.
FALL_FRAC = 0.5
# At a rate that no fleet of level 0 sustains, pairs of worker types are simulated with at most this effort
# [requests].
PAIRS_EFFORT = 1_000_000
# After a failed test the rate falls by this share, as often as its scenarios require. A rate that passes is
# final if the failed one is at most twice this share above it.
LESS_RATE_FRAC = 0.03

# A trace is thinned to no fewer requests than these, because percentiles of fewer say nothing.
_FEWEST_REQUESTS = 20

FindFleetAtRate = Callable[[float, Fleet | None], Fleet | None]
"""Finds a fleet that sustains a rate [requests/s]. If a fleet is given as well, only its worker types are
used. Returns None if no fleet was found, and raises StoppedError if the time is over.
"""

FailedPools = dict[Policies, dict[str, float]]
"""For each choice of policies and each worker type the rate at which a full pool of it failed."""


@dataclass(slots=True)
class RateClimb:
    """A search for the highest sustained rate. So far `find_fleet` has found `fleet` at `holds_rps`, and none
    at `failed_rps`. The result is exact to the share `raise_frac`; no rate below `least_rps` is searched. The
    rates of a candidate fall by the factor `fall_frac`, and the first stride up is its inverse.
    """

    find_fleet: FindFleetAtRate
    raise_frac: float
    least_rps: float
    fall_frac: float = KNOWN_FALL_FRAC
    holds_rps: float = 0.0
    fleet: Fleet | None = None
    failed_rps: float = math.inf

    @property
    def refuted_rps(self) -> float | None:
        """The lowest rate at which no fleet was found; None if the time was over before."""
        return None if math.isinf(self.failed_rps) else self.failed_rps

    def climb_from(self, rate_rps: float, candidate: Fleet | None = None) -> None:
        """Climb from `rate_rps` until a refuted rate is at most `raise_frac` above a sustained one, until no
        rate above `least_rps` is left, or until the time is over.

        The worker types of a fleet that was found are searched up to their highest rate before all types are
        searched again. So each type fails once or twice, not at every rate. The types of a `candidate` come
        first, at rates that fall down to KNOWN_LEAST_FRAC of `rate_rps`. All types are searched at falling
        rates down to `least_rps`, which is tried too.
        """
        known_failed_rps = math.inf
        try:
            if candidate is not None:
                least_known_rps = max(KNOWN_LEAST_FRAC * rate_rps, self.least_rps)
                for known_rps in _falling_rates(rate_rps, self.fall_frac, least_known_rps):
                    if self._try_rate(known_rps, candidate):
                        break
                    known_failed_rps = known_rps
            if self.fleet is None:
                for all_types_rps in _falling_rates(rate_rps, FALL_FRAC, self.least_rps):
                    if self._try_rate(all_types_rps):
                        break
            stride = 1 / self.fall_frac
            while self.fleet is not None and self.failed_rps > self.holds_rps * (1 + self.raise_frac):
                self._take_further(self.fleet, stride, min(self.failed_rps, known_failed_rps))
                # All worker types are searched one raise above. Types other than the fleet's mostly sustain
                # little more, so the next stride is one raise. They may also hold at a rate at which the
                # fleet's types failed, so `known_failed_rps` is not valid for them.
                stride, known_failed_rps = 1 + self.raise_frac, math.inf
                next_rps = _round_rate(self.holds_rps * (1 + self.raise_frac))
                if not self.holds_rps < next_rps < self.failed_rps:
                    break
                self._try_rate(next_rps)
        except StoppedError:  # The time is over. The best fleet so far is the result.
            pass

    def climb_with_other_policies(self) -> bool:
        """Climb from the refuted rate on, after the caller has given `find_fleet` other policies. Returns
        whether that rate is sustained with these.
        """
        rate_rps, self.failed_rps = self.failed_rps, math.inf
        try:
            is_sustained = self._try_rate(rate_rps)
        except StoppedError:
            self.failed_rps = rate_rps
            return False
        if is_sustained:
            self.climb_from(rate_rps)
        return is_sustained

    def _try_rate(self, rate_rps: float, workers_of: Fleet | None = None) -> bool:
        """Whether a fleet with the worker types of `workers_of` (None: with any) sustains the rate; records
        the fleet, or the refuted rate. Only a search of all worker types refutes a rate.
        """
        fleet = self.find_fleet(rate_rps, workers_of)
        if fleet is not None and rate_rps > self.holds_rps:
            self.holds_rps, self.fleet = rate_rps, fleet
        elif fleet is None and workers_of is None:
            self.failed_rps = min(self.failed_rps, rate_rps)
        return fleet is not None

    def _take_further(self, fleet: Fleet, stride: float, failed_rps: float) -> None:
        """Raise the rate with the worker types of `fleet` alone, until they fail at a rate that is at most
        `raise_frac` above a rate that they sustain. The first rate is `stride` times the sustained rate, and
        strides grow as long as rates are sustained. Rates from `failed_rps` on are known to fail.
        """
        while failed_rps > self.holds_rps * (1 + self.raise_frac):
            # The next rate is a stride further, but not beyond the geometric mean of sustained and failed
            # rate.
            rate_rps = _round_rate(min(self.holds_rps * stride, math.sqrt(self.holds_rps * failed_rps)))
            if not self.holds_rps < rate_rps < failed_rps:
                break  # There is no rate of four significant digits between the two.
            if self._try_rate(rate_rps, fleet):
                stride = min(stride * stride, MOST_STRIDE)
            else:
                failed_rps = rate_rps


def _round_rate(rate_rps: float) -> float:
    """The rate with four significant digits, so that equal questions simulate equal rates."""
    return float(f"{rate_rps:.4g}")


def _falling_rates(rate_rps: float, fall_frac: float, least_rps: float) -> Iterator[float]:
    """`rate_rps`, then each rate `fall_frac` of the one before, and `least_rps` last."""
    while rate_rps > least_rps:
        yield rate_rps
        rate_rps = _round_rate(rate_rps * fall_frac)
    yield least_rps


def _climb(
    find_fleet: Callable[..., Fleet | None],
    rate_rps: float,
    candidate: Fleet | None = None,
    *,
    raise_frac: float,
    least_rps: float,
    deadline: float,
    fall_frac: float = KNOWN_FALL_FRAC,
    failed_rps: float = math.inf,
) -> RateClimb:
    """The climb from a rate with fleets of level 0 or, if these sustain no rate, with any mix of worker
    types. `find_fleet` is a FindFleetAtRate that also takes `any_mix`; `candidate` is as in `climb_from`, and
    the other parameters are as in RateClimb.
    """
    for any_mix in (False, True):
        find = partial(find_fleet, any_mix=any_mix)
        climb = RateClimb(find, raise_frac, least_rps, fall_frac, failed_rps=failed_rps)
        climb.climb_from(rate_rps, candidate)
        if climb.fleet is not None or is_over(deadline):
            break
    return climb


def find_most_traffic(inputs: SearchInputs, *, before_production: bool = False) -> tuple[Throughput, Fleet]:
    """The most requests per second that a fleet of level 0 within the limits sustains on paper, and such a
    fleet. If level 0 has no fleet at any rate, fleets of any mix of worker types are searched in the same
    way. The rate is exact to RATE_STEP_FRAC, or as far as the time allowed; if production is searched next,
    to COARSE_STEP_FRAC, and not every fleet is simulated that the search takes to fail.

    If the search of level 0 at a rate ends without a fleet, that rate is refuted, and all higher rates with
    it. This assumes that more traffic is never easier to serve, and that more workers never hurt. A fleet
    sustains a rate if it keeps the SLO on every draw that the task requires.

    Raises InfeasibleError if no rate is sustained, OutOfTimeError if the time ends before one is found.
    """
    task, trace, conditions = inputs.task, inputs.trace, inputs.conditions
    # These conditions report no progress: `find_fleet` reports the rate instead of each search's stages.
    quiet = plan_problem.Conditions(conditions.deadline, cache=conditions.cache)
    quiet_inputs = SearchInputs(task, trace, inputs.catalog, inputs.seed, quiet)
    best_fleets: list[Fleet] = []  # The last fleet found, with which the next search begins.
    failed_full: FailedPools = {}
    sustained_rps: list[float] = []
    choices = list(task.policy_choices())  # `_climb_with_raced` may replace its items.

    def problem_at(rate_rps: float) -> plan_problem.Problem:
        return plan_problem.on_all_draws(with_relaxation(at_rate(quiet_inputs, rate_rps).problem))

    def find_fleet(rate_rps: float, workers_of: Fleet | None, *, any_mix: bool) -> Fleet | None:
        """A fleet that sustains this rate on paper; None if there is none. Raises StoppedError if a search
        did not come to its end.
        """
        conditions.progress(_climb_in_words("most traffic", rate_rps, sustained_rps))
        problem, is_exhausted = problem_at(rate_rps), True
        for policies in choices:
            with_policy = plan_problem.with_policies(problem, policies)
            best = _full_pool_that_holds(with_policy, rate_rps, failed_full, best_fleets)
            if best is None and not _is_mixed_pool(workers_of):
                some_types = restrict_to_workers(with_policy, workers_of)
                level0 = search_level0(some_types, best_fleets, walks=not before_production, any_will_do=True)
                best = level0.search.best or _find_pair(some_types, workers_of, level0)
                is_exhausted &= level0.search.is_exhausted
            if best is None and any_mix:
                best = find_fleet_quickly(with_policy, best_fleets, is_mixed=True)
            if best is not None:
                best_fleets[:] = [with_policy.oracle.fleet(best)]
                sustained_rps.append(rate_rps)
                return best_fleets[0]
        if not is_exhausted:
            raise StoppedError
        return None

    climb = _climb(
        find_fleet,
        float(f"{trace.rate_rps:.3g}"),  # A round number near the rate of the trace.
        raise_frac=COARSE_STEP_FRAC if before_production else RATE_STEP_FRAC,
        least_rps=_FEWEST_REQUESTS / trace.duration_s,
        deadline=conditions.deadline,
    )
    if climb.fleet is None:
        raise _no_rate_error(climb, conditions, "", lambda: _is_refuted(problem_at(climb.failed_rps)))
    _climb_with_raced(climb, problem_at, choices, conditions.deadline)
    return Throughput(climb.holds_rps, climb.refuted_rps), climb.fleet


def find_most_kept_traffic(
    inputs: SearchInputs, on_paper: Throughput, paper_fleet: Fleet
) -> tuple[Throughput, Fleet] | None:
    """The most requests per second at which a fleet of level 0 within the limits was found that keeps the SLO
    in enough of the search's scenarios, and that fleet. If level 0 has no fleet at any rate, fleets of any
    mix of worker types are searched in the same way. The rate is exact to KEPT_STEP_FRAC, or as far as the
    time allowed. None if the time ends before a fleet is found.

    Full pools of each worker type, and the fleet on paper, climb first, in the hardest scenarios alone: that
    takes few simulations, and leaves little of the climb in all scenarios.

    `on_paper` is the most traffic on paper, and `paper_fleet` its fleet. Raises InfeasibleError if no rate
    has a fleet.
    """
    search, deadline = _KeptSearch(inputs, paper_fleet), inputs.conditions.deadline
    failed_rps = math.inf if on_paper.refuted_rps is None else on_paper.refuted_rps
    first_rps = _round_rate(FIRST_RATE_FRAC * on_paper.rate_rps)
    least_rps = _FEWEST_REQUESTS / inputs.trace.duration_s
    likely = RateClimb(search.find_likely_fleet, COARSE_STEP_FRAC, least_rps, failed_rps=failed_rps)
    likely.climb_from(first_rps)
    climb = _climb(
        search.find_fleet,
        likely.holds_rps or first_rps,
        likely.fleet or paper_fleet,
        raise_frac=KEPT_STEP_FRAC,
        fall_frac=LIKELY_FALL_FRAC if likely.fleet else KNOWN_FALL_FRAC,
        least_rps=least_rps,
        deadline=deadline,
        failed_rps=failed_rps,
    )
    if climb.fleet is None and is_over(deadline):
        return None
    if climb.fleet is None:
        raise _no_rate_error(climb, inputs.conditions, " in enough scenarios", lambda: False)
    _climb_with_raced(climb, search.limited_problem_at, search.choices, deadline)
    rates = Throughput(climb.holds_rps, climb.refuted_rps, on_paper.rate_rps, on_paper.refuted_rps)
    return rates, climb.fleet


class _KeptSearch:
    """Looks for a fleet that keeps the SLO at a rate in enough of the scenarios that a search sees. `choices`
    are the policies of fleets.
    """

    def __init__(self, inputs: SearchInputs, paper_fleet: Fleet) -> None:
        task, conditions = inputs.task, inputs.conditions
        # Only the rate is reported, as in `find_most_traffic`.
        quiet = plan_problem.Conditions(conditions.deadline)
        self._inputs = SearchInputs(task, inputs.trace, inputs.catalog, inputs.seed, quiet)
        self._conditions, self._paper_fleet = conditions, paper_fleet
        raced = [paper_fleet.policies] if task.policies.raced_changes else []
        self.choices = list(dict.fromkeys((*task.policy_choices(), *raced)))
        # The fleets found under each choice of policies, the last one first. Searches begin with them.
        self._known_fleets: dict[Policies, list[Fleet]] = {}
        # Rates draw other requests, so a pool that failed at one may hold at a higher one. Where all worker
        # types are searched, only the failures of such searches count.
        self._failed_pools: FailedPools = {}
        self._failed_of_all: FailedPools = {}
        self._sustained_rps: list[float] = []

    def find_likely_fleet(self, rate_rps: float, _: Fleet | None) -> Fleet | None:
        """A full pool of one worker type, or else the fleet on paper, that keeps enough of the hardest
        scenarios at this rate, those with the longest steps; None if there is none. As a FindFleetAtRate it
        is also given a fleet, whose worker types it does not need.
        """
        whole = self._problem_at(rate_rps)
        for policies in self.choices:
            problem = plan_problem.with_policies(whole, policies)
            most_missed = problem.oracle.may_miss
            hardest = problem.oracle.scenarios[: most_missed + HARDEST_SCENARIOS]
            hard_problem = plan_problem.with_scenarios(problem, hardest, most_missed)
            start = self._known_fleets.setdefault(policies, [self._paper_fleet])
            best = _full_pool_that_holds(hard_problem, rate_rps, self._failed_pools, start)
            if best is None and not _is_mixed_pool(self._paper_fleet):
                on_paper = counts_of(self._paper_fleet, problem.options())
                if on_paper and problem.allows(on_paper) and hard_problem.oracle.holds(on_paper):
                    best = on_paper
            if best is not None:
                start.insert(0, problem.oracle.fleet(best))
                return start[0]
        return None

    def find_fleet(self, rate_rps: float, workers_of: Fleet | None, *, any_mix: bool) -> Fleet | None:
        """A fleet that keeps enough scenarios at this rate: a full pool of one worker type, else a fleet of
        level 0, else with `any_mix` of any mix of types; None if there is none. Raises StoppedError if the
        time is up.
        """
        whole = self._problem_at(rate_rps)
        for policies in self.choices:
            problem = plan_problem.with_policies(whole, policies)
            start = self._known_fleets.setdefault(policies, [self._paper_fleet])
            failed_pools = self._failed_of_all if workers_of is None else self._failed_pools
            best = _full_pool_that_holds(problem, rate_rps, failed_pools, start)
            problem = with_search_limit(problem, LEAST_SEARCH_REQUESTS)
            if best is None and not _is_mixed_pool(workers_of):
                some_types = restrict_to_workers(problem, workers_of)
                level0 = search_level0(some_types, start, walks=False, any_will_do=True)
                best = level0.search.best or _find_pair(some_types, workers_of, level0)
            if best is None and any_mix:
                best = find_fleet_quickly(problem, start, is_mixed=True)
            if best is not None:
                start.insert(0, problem.oracle.fleet(best))
                self._sustained_rps.append(rate_rps)
                return start[0]
        if is_over(self._conditions.deadline):
            raise StoppedError
        return None

    def limited_problem_at(self, rate_rps: float) -> plan_problem.Problem:
        """The problem at this rate, with a limit on its work."""
        return with_search_limit(self._problem_at(rate_rps), LEAST_SEARCH_REQUESTS)

    def _problem_at(self, rate_rps: float) -> plan_problem.Problem:
        """The problem at this rate, whose scenarios with the longest steps come first: most fleets that fail
        miss these.
        """
        self._conditions.progress(
            _climb_in_words("most traffic in production", rate_rps, self._sustained_rps)
        )
        problem = plan_problem.on_all_draws(at_rate(self._inputs, rate_rps).problem())
        oracle = plan_problem.with_search_scenarios(problem).oracle
        scenarios = sorted(oracle.scenarios, key=lambda scenario: -sum(scenario.step_time_sigmas))
        return plan_problem.with_scenarios(problem, scenarios, oracle.may_miss)


@dataclass(frozen=True, slots=True)
class RateTested:
    """The rate at which a fleet was tested. `problem` has the scenarios at that rate; the test began at the
    scenario number `first`.
    """

    rates: Throughput
    problem: plan_problem.Problem
    first: int


def lower_until_passed(inputs: SearchInputs, rates: Throughput, fleet: Fleet) -> RateTested:
    """The highest rate found at which the fleet passes its test (scenario_test.py). If it passes at none of
    MOST_TESTS rates, or the time ends first, the last one.

    After a failed test the rate falls by LESS_RATE_FRAC, and again, until the fleet misses so few of the
    scenarios of that test that it would pass. If it then passes far below, rates between are tested, as long
    as tests are left. Each test is in scenarios that the ones before have not seen.
    """
    passed, first = None, 0
    for _ in range(MOST_TESTS):
        inputs.conditions.progress(f"most traffic in production: testing {rates.rate_rps:g} requests/s")
        problem = _problem_of_fleet(inputs, rates.rate_rps, fleet)
        test = ScenarioTest.of(problem, first)
        tested = RateTested(rates, problem, first)
        # The question may lack the fleet's worker types at this rate.
        if not (counts := counts_of(fleet, problem.options())):
            return passed or tested
        kept_in, missed, _ = test.decide_and_split(counts)
        if is_test_passed(kept_in, test.safety):
            passed = tested
        elif problem.out_of_time():
            return passed or tested
        elif passed is not None:
            passed = replace(passed, rates=replace(passed.rates, refuted_rps=rates.rate_rps))
        if passed is None:
            most_missed = int(kept_in.scenario_count * (1 - test.safety.kept_in_frac) / 2)
            numbers = [scenario.number for scenario in missed]
            next_rps = _fall_until_kept(inputs, rates.rate_rps, fleet, numbers, most_missed)
            rates = replace(rates, rate_rps=next_rps, refuted_rps=rates.rate_rps)
        else:
            passed_rps, failed_rps = passed.rates.rate_rps, passed.rates.refuted_rps
            if failed_rps is None or failed_rps <= passed_rps * (1 + 2 * LESS_RATE_FRAC):
                return passed
            rates = replace(passed.rates, rate_rps=_round_rate(math.sqrt(passed_rps * failed_rps)))
        first = next_block(first + kept_in.scenario_count)
    return passed or tested


def _fall_until_kept(
    inputs: SearchInputs, rate_rps: float, fleet: Fleet, numbers: Sequence[int], most_missed: int
) -> float:
    """The first of rates that fall by LESS_RATE_FRAC at which the fleet misses at most `most_missed` of the
    test's scenarios with these numbers.
    """
    least_rps = FALL_FRAC * rate_rps
    while True:
        rate_rps = _round_rate(rate_rps * (1 - LESS_RATE_FRAC))
        problem = _problem_of_fleet(inputs, rate_rps, fleet)
        numbers = _missed_numbers(problem, counts_of(fleet, problem.options()) or (), numbers)
        if len(numbers) <= most_missed or rate_rps < least_rps:
            return rate_rps


def _problem_of_fleet(inputs: SearchInputs, rate_rps: float, fleet: Fleet) -> plan_problem.Problem:
    """The problem at this rate, with the policies of the fleet."""
    quiet = plan_problem.Conditions(inputs.conditions.deadline)
    problem = at_rate(replace(inputs, conditions=quiet), rate_rps).problem()
    return plan_problem.with_policies(problem, fleet.policies)


def _missed_numbers(problem: plan_problem.Problem, counts: Counts, numbers: Sequence[int]) -> list[int]:
    """Those of the test's scenarios, by number, in which the fleet misses the SLO."""
    scenarios = problem.test_scenarios
    assert scenarios is not None
    kept = run_each(lambda number: problem.oracle.in_scenario(scenarios[number]).holds(counts), numbers)
    return [number for number, is_kept in zip(numbers, kept, strict=True) if not is_kept]


def _full_pool_that_holds(
    problem: plan_problem.Problem, rate_rps: float, failed_pools: FailedPools, known: Sequence[Fleet]
) -> Counts | None:
    """The first pool of mixed workers of one type, as many as the limits allow, that holds; None if none
    does. The worker types of the first `known` fleet come first. It is no part of the search's limited work:
    on a long trace that ends before all types were simulated.

    A pool that fails is added to `failed_pools`; at higher rates it is not simulated again.
    """
    failed_rps = failed_pools.setdefault(problem.oracle.policies, {})
    options = problem.options() if runs_mixed(problem.task) else []
    known_types = [pool.type.name for fleet in known[:1] for pool in fleet.pools]
    for option in sorted(options, key=lambda option: option.type.name not in known_types):
        if option.role != "mixed" or failed_rps.get(option.name, math.inf) <= rate_rps:
            continue
        if problem.out_of_time():
            raise StoppedError
        full: Counts = ((option, 1),)
        while problem.allows(full) and (more := fill_limits(problem, full, 0)) != full:
            full = more
        if problem.allows(full) and problem.oracle.holds(full):
            return full
        failed_rps[option.name] = rate_rps
    return None


def _find_pair(problem: plan_problem.Problem, workers_of: Fleet | None, level0: Level0) -> Counts | None:
    """The first fleet found that holds, of two types of mixed workers with as many as the limits allow: where
    one more worker of the best type exceeds the limits, there may be room for one of another type. None if
    none holds within PAIRS_EFFORT. Fleets of prefill and decode workers of two types belong to `level0`, the
    search in which no fleet was found.

    With `workers_of` the problem has the types of that fleet alone; these must be several mixed ones.
    """
    options = [option for option in level0.options if option.role == "mixed"]
    if not options or (workers_of is not None and len(workers_of.pools) == 1):
        return None
    problem = plan_problem.with_effort_limit(problem, PAIRS_EFFORT)
    limits, shares = problem.limits, shares_by_work(problem, level0, {}, options)
    pools = [((option, int(limits.most_workers(option.type))),) for option in options]
    best_pool = max(pools, key=lambda pool: sum(shares[option.name] * count for option, count in pool))

    def if_holds(counts: Counts) -> Counts | None:
        return counts if problem.oracle.holds(counts) else None

    def may_go_on() -> bool:
        return not problem.out_of_time()

    return in_time(
        lambda: find_cheaper_pair(best_pool, math.inf, options, shares, limits, if_holds, may_go_on), None
    )


def _is_mixed_pool(fleet: Fleet | None) -> bool:
    """Whether a fleet is one mixed pool, of which `_full_pool_that_holds` finds the largest."""
    return fleet is not None and [pool.role for pool in fleet.pools] == ["mixed"]


def _climb_with_raced(
    climb: RateClimb,
    problem_at: Callable[[float], plan_problem.Problem],
    choices: list[Policies],
    deadline: float,
) -> None:
    """Go on with the climb as long as the policies that win a race (policy_search.py) sustain the rate that
    was refuted. The race is among the policies that the task lets the search choose. `choices` is the list
    from which the climb's `find_fleet` takes its policies; the winner of each race replaces all of them.
    """
    for _ in range(MOST_ROUNDS):
        if climb.fleet is None or climb.refuted_rps is None or is_over(deadline):
            return
        try:
            raced = _best_raced(problem_at(climb.refuted_rps), climb.fleet)
        except StoppedError:
            return
        if raced is None:
            return
        own_choices, choices[:] = list(choices), [raced]
        if not climb.climb_with_other_policies():
            choices[:] = own_choices
            return


def _best_raced(problem: plan_problem.Problem, fleet: Fleet) -> Policies | None:
    """The raced policies with which the cheapest of these fleets holds: `fleet` itself, and fleets in which
    one of its pools is enlarged to the limits. None if none holds.
    """
    changes, counts = problem.task.policies.raced_changes, counts_of(fleet, problem.options())
    if not changes or counts is None:
        return None
    fleets = dict.fromkeys((counts, *(fill_limits(problem, counts, k) for k in range(len(counts)))))
    own = plan_problem.with_policies(problem, fleet.policies)
    gains = cheapest_first(race_on_fleets(own, list(fleets), changes, math.inf).raced)
    return gains[0].policies if gains else None


def _climb_in_words(what: str, rate_rps: float, sustained_rps: Sequence[float]) -> str:
    """The text of progress: the rate that is searched now, and the highest rate known to be sustained."""
    best_text = f"best so far {max(sustained_rps):g}" if sustained_rps else "none found yet"
    return f"{what}: trying {rate_rps:g} requests/s, {best_text}"


def name_rate_in_messages(inputs: SearchInputs) -> SearchInputs:
    """The same inputs, but each message of progress begins with the rate of the task: the user asked for the
    most traffic, while the messages show costs of fleets for this rate.
    """
    conditions, prefix = inputs.conditions, f"{inputs.task.rate_rps:g} requests/s found; "

    def report(message: str) -> None:
        conditions.progress(message.with_prefix(prefix) if isinstance(message, Message) else prefix + message)

    return replace(inputs, conditions=replace(conditions, progress=report))


def restrict_to_workers(problem: plan_problem.Problem, fleet: Fleet | None) -> plan_problem.Problem:
    """The same problem with the worker types of `fleet` alone; the problem itself without a fleet.

    `prefill_options` and `decode_options` choose one of the types that differ only in seats or token budget.
    The type that they choose in the whole problem stays in here, so that a fleet of these types is also a
    fleet of the whole problem, in which it is tested later.
    """
    if fleet is None:
        return problem
    names = {pool.type.name for pool in fleet.pools}
    budgets = {(split_of(pool.type), pool.type.max_num_batched_tokens) for pool in fleet.pools}
    splits = {split for split, _ in budgets}
    for option in problem.options():
        split, budget_tokens = split_of(option.type), option.type.max_num_batched_tokens
        is_prefill_alike = option.role == "prefill" and (split, budget_tokens) in budgets
        if is_prefill_alike or (option.role == "decode" and split in splits):
            names.add(option.type.name)
    return replace(problem, types=tuple(worker for worker in problem.types if worker.name in names))


def _is_refuted(problem: plan_problem.Problem) -> bool:
    """Whether a search as for a plan at this rate proves that no fleet of any mix of worker types holds."""
    try:
        search_policies(problem)
    except InfeasibleError as error:
        return error.is_proved
    return False


def _no_rate_error(
    climb: RateClimb, conditions: plan_problem.Conditions, where: str, is_proved: Callable[[], bool]
) -> PlannerError:
    """The error that no rate is sustained (`where`), or that the time was over before one was found."""
    if math.isinf(climb.failed_rps) or is_over(conditions.deadline):
        return OutOfTimeError(f"the most traffic was not found: {ended_by()} came first; raise --time-limit")
    proved = is_proved()
    return InfeasibleError(
        f"capacity: no fleet within the limits {'keeps' if proved else 'was found that keeps'} the SLO even "
        f"at {climb.failed_rps:.3g} requests/s{where}; raise limits or stock, or relax the SLO",
        kind="capacity",
        constraint="limits",
        relaxation="more of what limits: and fleet: gpus allow",
        is_proved=proved,
    )


def at_rate(inputs: SearchInputs, rate_rps: float) -> SearchInputs:
    """The inputs of a search for the cheapest fleet at a rate. If two draws of the traffic are the same
    requests, as at the trace's own rate, the task has one draw.
    """
    task = replace(inputs.task, objective="cost", rate_rps=rate_rps)
    if task.draws > 1 and task.scale != "compress":
        first, second = (requested_traffic(inputs.trace, task, seed=inputs.seed + k).requests for k in (0, 1))
        if same_requests(first, second):
            task = replace(task, draws=1)
    return replace(inputs, task=task, traffic_request=None)
