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
from planner.search.level0.level0_search import runs_mixed, search_level0
from planner.search.mixed.best_fleet import find_fleet_quickly
from planner.search.mixed.infeasible import with_relaxation
from planner.search.mixed.policy_race import MOST_ROUNDS, cheapest_first, race_on_fleets
from planner.search.mixed.policy_search import search_policies
from planner.search.oracle.fleet_counts import Counts, counts_of
from planner.search.oracle.traffic_request import requested_traffic
from planner.search.oracle.work_clock import StoppedError, ended_by, is_over
from planner.search.problem import plan_problem
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.options import split_of
from planner.search.problem.stages import Message
from planner.search.production.cheapest_kept import LEAST_SEARCH_REQUESTS, fill_limits, with_search_limit
from planner.traffic.scaling import same_requests

# The numbers below are set by hand.

# If the plan is on paper alone, the refuted rate is at most this share above the highest sustained one.
RATE_STEP_FRAC = 0.01
# If production is searched next, which begins from the rate on paper, the share may be this large. It saves
# refuted rates, which take longest.
COARSE_STEP_FRAC = 0.05

# The rate of the first fleet found is multiplied by this, the stride, until the fleet's worker types fail.
FIRST_STRIDE = 2.0
# In production the refuted rate is at most this share above the highest rate that is sustained.
KEPT_STEP_FRAC = 0.02
# In production the first rate is this share of the most traffic on paper.
FIRST_RATE_FRAC = 0.8
# In production the worker types of the fleet on paper are searched first, at falling rates: each is
# KNOWN_FALL_FRAC of the one before, down to KNOWN_LEAST_FRAC of the first. The range is so large because step
# times that were not measured may be three times as long in the hardest scenarios.
KNOWN_FALL_FRAC = 0.5
KNOWN_LEAST_FRAC = 1 / 16
# If no fleet is found with these types, all types are searched, at rates that fall by this factor.
FALL_FRAC = 0.5
# After a failed test the traffic is lowered by this share, after each further one by twice as much as before:
# the tests are few, and a rate that passes is worth more than one that is near to the first.
LESS_RATE_FRAC = 0.03

# A trace is thinned to no fewer requests than these, because percentiles of fewer say nothing.
_FEWEST_REQUESTS = 20

FindFleetAtRate = Callable[[float, Fleet | None], Fleet | None]
"""Finds a fleet that sustains a rate [requests/s]. If a fleet is given as well, only its worker types are
used. Returns None if no fleet was found, and raises StoppedError if the time is over.
"""


@dataclass(slots=True)
class RateClimb:
    """A search for the highest sustained rate. So far `find_fleet` has found `fleet` at `holds_rps`, and none
    at `failed_rps`. The result is exact to the share `raise_frac`; no rate below `least_rps` is searched.
    """

    find_fleet: FindFleetAtRate
    raise_frac: float
    least_rps: float
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
        first, at falling rates down to KNOWN_LEAST_FRAC of `rate_rps`. All types are searched at falling
        rates down to `least_rps`, which is tried too.
        """
        known_failed_rps = math.inf
        try:
            if candidate is not None:
                least_known_rps = max(KNOWN_LEAST_FRAC * rate_rps, self.least_rps)
                for known_rps in _falling_rates(rate_rps, KNOWN_FALL_FRAC, least_known_rps):
                    if self._try_rate(known_rps, candidate):
                        break
                    known_failed_rps = known_rps
            if self.fleet is None:
                for all_types_rps in _falling_rates(rate_rps, FALL_FRAC, self.least_rps):
                    if self._try_rate(all_types_rps):
                        break
            stride = FIRST_STRIDE
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
                stride = min(stride * stride, FIRST_STRIDE)
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
    failed_rps: float = math.inf,
) -> RateClimb:
    """The climb from a rate with fleets of level 0 or, if these sustain no rate, with any mix of worker
    types. `find_fleet` is a FindFleetAtRate that also takes `any_mix`; `candidate` is as in `climb_from`, and
    the other parameters are as in RateClimb.
    """
    for any_mix in (False, True):
        climb = RateClimb(partial(find_fleet, any_mix=any_mix), raise_frac, least_rps, failed_rps=failed_rps)
        climb.climb_from(rate_rps, candidate)
        if climb.fleet is not None or is_over(deadline):
            break
    return climb


def find_most_traffic(inputs: SearchInputs, raise_frac: float = RATE_STEP_FRAC) -> tuple[Throughput, Fleet]:
    """The most requests per second that a fleet of level 0 within the limits sustains on paper, and such a
    fleet. If level 0 has no fleet at any rate, fleets of any mix of worker types are searched in the same
    way. The rate is exact to `raise_frac`, or as far as the time allowed.

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
    sustained_rps: list[float] = []
    choices = list(task.policy_choices())  # `_climb_with_raced` may replace its items.

    def problem_at(rate_rps: float) -> plan_problem.Problem:
        return plan_problem.on_all_draws(with_relaxation(at_rate(quiet_inputs, rate_rps).problem))

    def find_fleet(rate_rps: float, workers_of: Fleet | None, *, any_mix: bool) -> Fleet | None:
        """A fleet that sustains this rate on paper; None if there is none. Raises StoppedError if a search
        did not come to its end.
        """
        conditions.progress(_climb_in_words("most traffic", rate_rps, sustained_rps))
        problem = restrict_to_workers(problem_at(rate_rps), workers_of)
        is_exhausted = True
        for policies in choices:
            with_policy = plan_problem.with_policies(problem, policies)
            level0 = search_level0(with_policy, best_fleets, any_will_do=True)
            best = level0.search.best
            if best is None and any_mix:
                best = find_fleet_quickly(with_policy, best_fleets, is_mixed=True)
            if best is not None:
                best_fleets[:] = [with_policy.oracle.fleet(best)]
                sustained_rps.append(rate_rps)
                return best_fleets[0]
            is_exhausted &= level0.search.is_exhausted
        if not is_exhausted:
            raise StoppedError
        return None

    climb = _climb(
        find_fleet,
        float(f"{trace.rate_rps:.3g}"),  # A round number near the rate of the trace.
        raise_frac=raise_frac,
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

    `on_paper` is the most traffic on paper, and `paper_fleet` its fleet. Raises InfeasibleError if no rate
    has a fleet.
    """
    task, trace, conditions = inputs.task, inputs.trace, inputs.conditions
    # Only the rate is reported, as in `find_most_traffic`.
    quiet = plan_problem.Conditions(conditions.deadline)
    quiet_inputs = SearchInputs(task, trace, inputs.catalog, inputs.seed, quiet)
    # The fleets found under each choice of policies, the last one first. Searches begin with them.
    known_fleets: dict[Policies, list[Fleet]] = {}
    failed_full: dict[Policies, dict[str, float]] = {}  # As in `_full_pool_that_holds`.
    sustained_rps: list[float] = []
    raced = [paper_fleet.policies] if task.policies.raced_changes else []
    choices = list(dict.fromkeys((*task.policy_choices(), *raced)))

    def problem_at(rate_rps: float) -> plan_problem.Problem:
        return plan_problem.on_all_draws(at_rate(quiet_inputs, rate_rps).problem())

    def in_scenarios(problem: plan_problem.Problem) -> plan_problem.Problem:
        scenario_problem = _slowest_scenarios_first(plan_problem.with_search_scenarios(problem))
        return with_search_limit(scenario_problem, LEAST_SEARCH_REQUESTS)

    def find_fleet(rate_rps: float, workers_of: Fleet | None, *, any_mix: bool) -> Fleet | None:
        """A fleet that keeps enough scenarios at this rate; None if there is none. Raises StoppedError if the
        time is up.
        """
        conditions.progress(_climb_in_words("most traffic in production", rate_rps, sustained_rps))
        problem = restrict_to_workers(problem_at(rate_rps), workers_of)
        for policies in choices:
            scenario_problem = in_scenarios(plan_problem.with_policies(problem, policies))
            start = known_fleets.setdefault(policies, [paper_fleet])
            best = None
            if workers_of is None:
                failed = failed_full.setdefault(policies, {})
                best = _full_pool_that_holds(scenario_problem, rate_rps, failed)
            if best is None:
                best = search_level0(scenario_problem, start, walks=False, any_will_do=True).search.best
            if best is None and any_mix:
                best = find_fleet_quickly(scenario_problem, start, is_mixed=True)
            if best is not None:
                start.insert(0, scenario_problem.oracle.fleet(best))
                sustained_rps.append(rate_rps)
                return start[0]
        if is_over(conditions.deadline):
            raise StoppedError
        return None

    refuted_rps = math.inf if on_paper.refuted_rps is None else on_paper.refuted_rps
    least_rps = _FEWEST_REQUESTS / trace.duration_s
    climb = _climb(
        find_fleet,
        _round_rate(FIRST_RATE_FRAC * on_paper.rate_rps),
        paper_fleet,
        raise_frac=KEPT_STEP_FRAC,
        least_rps=least_rps,
        deadline=conditions.deadline,
        failed_rps=refuted_rps,
    )
    if climb.fleet is None and is_over(conditions.deadline):
        return None
    if climb.fleet is None:
        raise _no_rate_error(climb, conditions, " in enough scenarios", lambda: False)
    _climb_with_raced(climb, lambda rps: in_scenarios(problem_at(rps)), choices, conditions.deadline)
    rates = Throughput(climb.holds_rps, climb.refuted_rps, on_paper.rate_rps, on_paper.refuted_rps)
    return rates, climb.fleet


def _full_pool_that_holds(
    problem: plan_problem.Problem, rate_rps: float, failed_rps: dict[str, float]
) -> Counts | None:
    """The first pool of mixed workers of one type, as many as the limits allow, that keeps the SLO in enough
    scenarios; None if none does. It is no part of the search's limited work: on a long trace that ends before
    all types were simulated.

    `failed_rps` has for each worker type the rate at which such a pool failed, and is added to; at higher
    rates it is not simulated again.
    """
    for option in problem.options() if runs_mixed(problem.task) else ():
        if option.role != "mixed" or failed_rps.get(option.name, math.inf) <= rate_rps:
            continue
        full: Counts = ((option, 1),)
        while problem.allows(full) and (more := fill_limits(problem, full, 0)) != full:
            full = more
        if problem.allows(full) and problem.oracle.holds(full):
            return full
        failed_rps[option.name] = rate_rps
    return None


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


def _slowest_scenarios_first(problem: plan_problem.Problem) -> plan_problem.Problem:
    """The same problem with the scenarios of the longest steps first, because most fleets that fail miss
    these.
    """
    oracle = problem.oracle
    scenarios = sorted(oracle.scenarios, key=lambda scenario: -sum(scenario.step_time_sigmas))
    return plan_problem.with_scenarios(problem, scenarios, oracle.may_miss)


def falling_rates(throughput: Throughput) -> Iterator[Throughput]:
    """The given throughput, then lower ones without end, each with the one before as refuted: LESS_RATE_FRAC
    lower, then twice as much each time.
    """
    less_frac = LESS_RATE_FRAC
    while True:
        yield throughput
        lower_rps = _round_rate(throughput.rate_rps * max(1 - less_frac, FALL_FRAC))
        throughput = replace(throughput, rate_rps=lower_rps, refuted_rps=throughput.rate_rps)
        less_frac *= 2


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
