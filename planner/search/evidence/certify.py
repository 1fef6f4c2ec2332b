"""Makes a certified plan from a question: the search (best_fleet.py), then its evidence (findings.py)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.catalog import Catalog
from planner.documents.certificate import Alternative, Certificate, Status, Throughput
from planner.documents.facts import Binding, Finding, Neighbour, OfTraffic, Refuted, Warned, WorstHour
from planner.documents.question_warnings import llm_warnings, traffic_warnings
from planner.documents.task import PlanQuestion
from planner.domain import FleetLimit
from planner.errors import InfeasibleError
from planner.fleet import Fleet
from planner.search.evidence import findings
from planner.search.evidence.alternatives import find_alternatives, mark_on_paper
from planner.search.evidence.assumptions import list_assumptions
from planner.search.evidence.plan import Plan
from planner.search.evidence.robustness import RobustnessSearch, priced_alternatives
from planner.search.level0 import pruning_rules
from planner.search.mixed.best_fleet import FleetSearch, PolicySearch, best_of
from planner.search.mixed.bounds import checked_bound, lower_bound, shadow_prices
from planner.search.mixed.infeasible import far_beyond, with_relaxation
from planner.search.mixed.policy_search import search_policies
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.traffic_request import TrafficRequest
from planner.search.oracle.work_clock import USUAL_LIMIT_S, now_s, time_limit, wall_deadline_s
from planner.search.prefixes.keep_alive import with_keep_alive
from planner.search.prefixes.prefix_placing import PoolPrefixes, pool_prefixes
from planner.search.problem import draws
from planner.search.problem.bill import bill_fleet, commitments
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.options import OBJECTIVE_UNITS
from planner.search.problem.owned_first import objective_paid, paid_at_least
from planner.search.problem.plan_problem import Conditions, Problem, on_all_draws
from planner.search.problem.stages import Stage, Urgent
from planner.search.production.idle_scenarios import find_idle_misses, idle_misses_error
from planner.search.production.kept_policies import production_of_policies, put_policies_of_fleet_first
from planner.search.production.most_traffic import (
    at_rate,
    find_most_kept_traffic,
    find_most_traffic,
    lower_until_passed,
    name_rate_in_messages,
)
from planner.search.production.production_fleet import pick_known_fleet_and_test
from planner.search.production.three_answers import Production, not_certified_warnings, with_answers
from planner.simulator.simulation import Simulation
from planner.solvers.repeats import Repeats
from planner.traffic.described import Description
from planner.traffic.trace import Trace

# The search on paper may take this share of the work. No plan of benchmarks/plans.py takes more than a sixth
# of it. Without a limit, nothing would be left for production where requests are dear to simulate (agents).
PAPER_TIME_FRAC = 0.5
# With the objective throughput the search for the rate may take this share of the time.
RATE_TIME_FRAC = 2 / 3
# The search at the most traffic has at least this long, even if finding that rate took all of the time.
LEAST_SEARCH_S = 5.0
# Placing prefixes on a pool takes at most this long. It computes a fixed number of routings, so the clock
# rarely decides.
MOST_PREFIXES_S = 60.0
# Placing the workers on nodes has at least this long, because commitments (bills by term) need a placement.
LEAST_PLACEMENT_S = 1.0


def plan(
    task: PlanQuestion,
    trace: Trace,
    catalog: Catalog,
    *,
    seed: int = 0,
    time_limit_s: float = USUAL_LIMIT_S,
    conditions: Conditions | None = None,
    traffic_request: TrafficRequest | None = None,
    prove: bool = False,
) -> Plan:
    """The fleet that is to be run, with its certificate: the cheapest fleet found that keeps the task's SLO
    in enough scenarios (`task.safety`), or, without safety, on the traffic as it is written.

    Raises InputError for what cannot be planned, InfeasibleError if no fleet keeps the SLO.

    A search ends when the work that a plan may take (work_clock.py) is used up, or after `time_limit_s` of
    wall time; the best fleet so far is then returned with status "best found". Only where wall time ended it
    does the answer depend on the machine.

    With the objective "throughput" the traffic is first raised as far as the limits allow, in production as
    far as a fleet passes its test. `conditions` (the deadline and whom to report to) are as in
    plan_problem.py, `traffic_request` is as in `build_problem`. With `prove` every cheaper fleet of level
    0 is simulated.
    """
    with time_limit(time_limit_s) as deadline:
        conditions = conditions or Conditions()
        if math.isinf(conditions.deadline):
            conditions = replace(conditions, deadline=deadline)
        inputs = SearchInputs(task, trace, catalog, seed, conditions, traffic_request)
        return _plan(inputs, prove=prove)


def _plan(inputs: SearchInputs, *, prove: bool) -> Plan:
    """The plan, within the time limits that `plan` has set."""
    throughput: Throughput | None = None
    start: list[Fleet] = []
    if inputs.task.objective == "throughput":  # The rate is found first; then the cheapest fleet for it.
        if inputs.task.safety is not None:
            return _plan_most_traffic(inputs)
        throughput, fleet = find_most_traffic(_with_share_of_time(inputs, RATE_TIME_FRAC))
        start = [fleet]
        inputs = name_rate_in_messages(at_rate(_with_least_time(inputs), throughput.rate_rps))
    # Finding the rate may have used up both limits, on work and on the wall clock. `_with_least_time` extends
    # the first; `grace` extends the second to at least LEAST_SEARCH_S from now, and never shortens it.
    with time_limit(LEAST_SEARCH_S, grace=True) if throughput is not None else nullcontext():
        searched = search_llm(inputs, start=start, prove=prove)
        return _plan_with_evidence(searched, inputs, throughput)


def _plan_with_evidence(
    searched: Sequence[PolicySearch], inputs: SearchInputs, throughput: Throughput | None
) -> Plan:
    """The plan with the evidence for it: for the best fleet in `searched`, or with safety for the production
    fleet, which is searched here. `throughput` is the rate that was found for the objective throughput.
    """
    production = None
    if inputs.task.safety is not None:
        problem, paper = best_of(searched)
        # The caller gets the fleet on paper already now, because the search for production takes longest.
        inputs.conditions.on_paper(problem, problem.oracle.fleet(paper.best))
        searched, production = production_of_policies(searched)
    certified_plan = certify_plan(searched, inputs, throughput=throughput, production=production)
    # If no fleet for production was found, the plan is on paper and not to be deployed: its robustness is not
    # worth the time.
    is_on_paper = production is not None and production.why_on_paper is not None
    if is_on_paper or not inputs.conditions.adds_robustness:
        return certified_plan
    return add_robustness(certified_plan, best_of(searched), production)


def add_robustness(plan: Plan, search: PolicySearch, production: Production | None) -> Plan:
    """The plan with its robustness (robustness.py), as far as the remaining time allows: what more traffic,
    longer prompts and fewer workers would do to its fleet, and at which prices of GPUs a known fleet would be
    cheaper.
    """
    problem, paper = search
    problem.progress(Stage("what more traffic, longer prompts and fewer workers would do", "robustness"))
    best = paper.best if production is None else production.best
    survivor = None if production is None else production.with_loss
    # The known fleets, each with its name.
    compared = [] if survivor is None else [("with a loss", problem.oracle.fleet(survivor))]
    # The fleet with a loss has a bill under any objective. Alternatives are the best of their kind by the
    # objective. So only if the objective is cost do their prices say when they would be chosen.
    compared += priced_alternatives(plan.alternatives) if plan.certificate.objective == "cost" else []
    robustness = RobustnessSearch(problem, best, compared).run()
    return replace(plan, certificate=replace(plan.certificate, robustness=robustness))


def _plan_most_traffic(inputs: SearchInputs) -> Plan:
    """The plan for the most traffic with which a fleet keeps the SLO in enough scenarios, and passes its
    test. If no production fleet is found, the plan for the most traffic on paper.

    The search for the rate on paper ends after half of RATE_TIME_FRAC of the time, the search for the rate in
    production after RATE_TIME_FRAC.
    """
    # Both searches get shares of the time that is left now, so both calls come before the first search.
    for_production = _with_share_of_time(inputs, RATE_TIME_FRAC)
    for_paper = _with_share_of_time(inputs, 0.5 * RATE_TIME_FRAC)
    paper_rates, fleet = find_most_traffic(for_paper, before_production=True)
    kept = find_most_kept_traffic(for_production, paper_rates, fleet)
    rates, fleet = kept or (paper_rates, fleet)
    with time_limit(LEAST_SEARCH_S, grace=True):
        return _plan_at_rates(_with_least_time(inputs), rates, fleet, is_kept=kept is not None)


def _plan_at_rates(inputs: SearchInputs, rates: Throughput, fleet: Fleet, *, is_kept: bool) -> Plan:
    """The plan for the highest of falling rates at which the fleet passes its test. If it passes at none, or
    the time ends first, the plan is for the last rate and not certified.

    `is_kept` says that the fleet keeps enough of the search's scenarios; else the plan is on paper, for the
    first rate.
    """
    tested = lower_until_passed(inputs, rates, fleet) if is_kept else None
    throughput = rates if tested is None else tested.rates
    # The tests may have used up the time that the caller left.
    inputs_at_rate = name_rate_in_messages(at_rate(_with_least_time(inputs), throughput.rate_rps))
    searched = search_llm(inputs_at_rate, start=[fleet])
    if tested is not None:
        # In the scenarios of the test no simulation is repeated.
        scenarios = tested.problem.test_scenarios
        searched = [
            PolicySearch(replace(problem, test_scenarios=scenarios), paper) for problem, paper in searched
        ]
        searched = put_policies_of_fleet_first(searched, fleet)
    problem, paper = best_of(searched)
    trial = production = None
    if tested is not None:
        # A trial is a fleet for production with the result of its test (scenario_test.py).
        trial = pick_known_fleet_and_test(problem, paper, fleet, tested.first)
    if trial is not None:
        production = with_answers(problem, paper, trial)
    certified_plan = certify_plan(searched, inputs, throughput=throughput, production=production)
    # A plan on paper is here "best found", not "not for production" as in `_plan_with_evidence`. It may be
    # deployed, so its robustness is computed too.
    if not inputs.conditions.adds_robustness:
        return certified_plan
    return add_robustness(certified_plan, PolicySearch(problem, paper), production)


def _with_share_of_time(inputs: SearchInputs, share: float) -> SearchInputs:
    """The same inputs with this share of the time that is left, by the clock of work_clock.py."""
    now = now_s()
    return inputs.with_deadline(now + share * max(inputs.conditions.deadline - now, 0.0))


def _with_least_time(inputs: SearchInputs) -> SearchInputs:
    """The same inputs with enough time left to simulate and write a fleet that is already known."""
    return inputs.with_deadline(max(inputs.conditions.deadline, now_s() + LEAST_SEARCH_S))


def search_llm(
    inputs: SearchInputs, *, start: Sequence[Fleet] = (), prove: bool = False
) -> list[PolicySearch]:
    """Find a lower bound on the cost of all fleets of one LLM, then search them. LLMs that share limits are
    planned in planner/search/several. Returns the best fleet of each policy with its problem.

    Fleets of `start` that hold are upper bounds: the search looks for cheaper ones.
    """
    # If limits are out of reach, the error of `build_problem` is raised, with limits that a fleet keeps.
    problem = with_relaxation(inputs.problem)
    if inputs.task.safety is not None and (idle := find_idle_misses(problem)) is not None:
        problem.progress(Urgent(f"{idle_misses_error(idle)}; so the plan is only on paper"))
    problem.progress(Stage("lower bound over all fleets", "bound"))
    lower = 0.0 if problem.out_of_time() else lower_bound(problem)
    problem = replace(problem, bound=lower)
    if (error := far_beyond(problem)) is not None:
        raise error
    if inputs.task.safety is None or prove:
        return search_policies(problem, start, prove=prove)
    # The work that remains is for production, because that fleet will run.
    on_paper = _with_share_of_time(inputs, PAPER_TIME_FRAC)
    paper_problem = replace(problem, deadline=on_paper.conditions.deadline)
    try:
        searched = search_policies(paper_problem, start)
    except InfeasibleError:
        if not paper_problem.out_of_time():
            raise
        # With all of the time the search goes on where it stopped, because its simulations are cached.
        return search_policies(problem, start)
    return [
        search._replace(problem=replace(search.problem, deadline=problem.deadline)) for search in searched
    ]


def certify_plan(
    searched: Sequence[PolicySearch],
    inputs: SearchInputs,
    *,
    throughput: Throughput | None = None,
    deadline: float | None = None,
    production: Production | None = None,
) -> Plan:
    """The plan of the fleet that is to be run, with the evidence for it.

    The fleet is that of `production`, or else the best that the searches found. Simulations that would begin
    after `deadline`, by default that of the search, are left out, and a warning names them.
    """
    problem, fleet_search = best_of(searched)
    oracle = problem.oracle
    counts = fleet_search.best if production is None else production.best
    fleet = oracle.fleet(counts)
    problem.progress(Stage("simulating the plan and its neighbours", "neighbours"))
    # `now_s` counts simulated work (work_clock.py); solvers are timed by the clock on the wall.
    began = now_s()
    simulation, verdict = oracle.simulate_and_judge(fleet, record=True)
    deadline = problem.deadline if deadline is None else deadline
    # The last simulation may take as long as this one, so it must begin as long before the deadline.
    clock = findings.EvidenceClock(deadline - (now_s() - began))
    further = _simulate_further(searched, simulation, inputs, clock, production)
    limit_prices = shadow_prices(replace(problem, deadline=deadline))
    placement_s = min(findings.PLACEMENT_S, max(_wall_time_left_s(deadline), LEAST_PLACEMENT_S))
    placement = findings.place_workers(fleet, placement_s)
    certificate = replace(
        _certificate_of(searched, simulation, further, limit_prices, inputs.seed, production),
        commitments=commitments(fleet, placement, problem.task.offers_by_term),
    )
    # These warnings are about scenarios drawn from one trace, and a plan on paper has no scenarios.
    one_trace_warnings = () if production is None else findings.one_trace_warnings(problem)
    # The warning of the worst hour also says what a fleet that keeps every hour costs.
    simulation_warnings = [
        findings.price_holding_hours(problem, counts, warning, clock)
        if isinstance(warning, WorstHour)
        else warning
        for warning in findings.list_warnings(fleet, simulation, problem.slo, verdict)
    ]
    has_caches = problem.task.policies.prefix_cache
    uncounted_warnings = (
        () if has_caches else findings.uncounted_prefix_warnings(fleet.policies, inputs.trace)
    )
    prefixes = _pool_prefixes(oracle, fleet, simulation, inputs.seed, deadline)
    return Plan(
        status=_status_of(problem, certificate, fleet, production),
        fleet=fleet,
        slo=problem.slo,
        trace=problem.trace,
        traffic_note=problem.traffic_note,
        requested_rps=_requested_rps(problem),
        simulation=simulation,
        verdict=verdict,
        certificate=certificate,
        alternatives=_all_alternatives(problem, fleet_search, production, further),
        max_model_len=problem.longest_tokens,
        prices=findings.list_prices(problem.task, inputs.catalog, problem.gpus),
        warnings=(
            *not_certified_warnings(problem, production),
            *findings.stock_warnings(problem, fleet, bill_fleet(fleet, placement)),
            *map(OfTraffic, _question_warnings(problem, inputs.trace)),
            *one_trace_warnings,
            *simulation_warnings,
            *findings.image_warnings(fleet, problem.trace),
            *uncounted_warnings,
            *findings.tenant_queue_warnings(problem),
            *findings.roofline_warnings(problem, fleet),
            *findings.keep_alive_warnings(prefixes),
            # Read after `simulation_warnings`, which may be the first for which no time is left.
            *clock.list_warnings(),
            *further.warnings,
        ),
        throughput=throughput,
        placement=placement,
        prefixes=prefixes,
        on_paper=oracle.fleet(fleet_search.best),
        trial=production.trial if production is not None and production.is_passed else None,
    )


def _wall_time_left_s(deadline: float) -> float:
    """How long a solver may take on the clock on the wall: until the time limit, and 0 after `deadline`."""
    return max(wall_deadline_s(deadline) - time.monotonic(), 0.0)


def _pool_prefixes(
    oracle: Oracle, fleet: Fleet, simulation: Simulation, seed: int, deadline: float
) -> tuple[PoolPrefixes, ...]:
    """The prefixes of each pool, as far as they can be placed before `deadline`. With pinned prefixes: also
    which requests keep them in the caches (keep_alive.py).
    """
    left_s = _wall_time_left_s(deadline)
    if left_s <= 0:
        return ()
    prefixes = pool_prefixes(
        fleet,
        simulation,
        oracle.trace,
        time_limit_s=min(left_s, MOST_PREFIXES_S),
        rng=np.random.default_rng(seed),
        pinned=None if oracle.pinning is None else oracle.pinning.with_session_hits(fleet.pools),
    )
    return prefixes if oracle.pinning is None else with_keep_alive(prefixes, fleet, simulation, oracle.trace)


def _all_alternatives(
    problem: Problem, fleet_search: FleetSearch, production: Production | None, further: _FurtherResults
) -> tuple[Alternative, ...]:
    """The rows of alternatives, marked as fleets on paper beside a plan for production."""
    # The plan is no alternative to itself: neither its fleet on paper nor the one for production is listed.
    production_counts = () if production is None else production.best
    alternatives = find_alternatives(
        problem, fleet_search.level0, fleet_search.best, fleet_search.value, production_counts
    )
    rows = (*alternatives, *further.alternatives)
    return rows if production is None else mark_on_paper(rows)


def _status_of(
    problem: Problem, certificate: Certificate, fleet: Fleet, production: Production | None
) -> Status:
    """The status of a plan. It is "certified" only if the searches came to their ends, the fleet passed its
    test, and its step times were measured and have a spread.
    """
    if production is not None and production.why_on_paper is not None:
        return "not for production"
    if not certificate.level0_exhausted:
        return "best found"
    if production is None and problem.task.safety is None:
        return "on paper"
    if production is None or (not production.is_passed and problem.out_of_time()):
        # There is no fleet for production, or the time was over before the end of its test.
        return "best found"
    if production.trial is not None and production.trial.is_cut_short:
        return "best found"
    is_measured = (
        all(pool.type.latency.is_measured for pool in fleet.running_pools)
        and production.scenarios.have_spread
    )
    return "certified" if production.is_passed and is_measured else "not certified"


@dataclass(frozen=True, slots=True)
class _FurtherResults:
    """The results of the simulations after the search, of the best fleet and of others."""

    neighbours: tuple[Neighbour, ...]
    binding_limits: tuple[Binding, ...]
    other_facts: tuple[Binding, ...]  # Findings beside limits that bind.
    warnings: tuple[Warned, ...]
    alternatives: tuple[Alternative, ...]
    repeats: tuple[Repeats, ...]
    simulations: int  # The number of simulations beside those of the searches.


def _simulate_further(
    searched: Sequence[PolicySearch],
    simulation: Simulation,
    inputs: SearchInputs,
    clock: findings.EvidenceClock,
    production: Production | None,
) -> _FurtherResults:
    """Simulate the evidence for the plan, as far as the clock allows.

    Neighbours, and the prices of other policies and of `robust` (findings.price_insurance), explain why the
    search found nothing cheaper on paper, so they are about the best fleet on paper. One worker more, spot
    losses and other draws are about the fleet that runs. A plan for production has scenarios, so it needs
    neither other draws of the traffic nor step times at the ends of their spread.
    """
    problem, fleet_search = best_of(searched)
    oracle = problem.oracle
    counts = fleet_search.best if production is None else production.best
    fleet = oracle.fleet(counts)
    # The most important simulations come first, since the last ones are left out if the time ends.
    other_policies = findings.price_other_policies(searched, clock)
    # The search simulated only as many draws as it needed to refute a fleet.
    on_every_draw = on_all_draws(problem)
    neighbours, binding_limits = findings.simulate_neighbours(on_every_draw, fleet_search.best, clock)
    one_more, one_more_warnings = findings.simulate_one_more(on_every_draw, counts, clock)
    longer_steps = None if production else findings.simulate_longer_steps(problem, fleet, clock)
    insurance_rows, insurance_facts, insurance_warnings = findings.price_insurance(
        problem, fleet_search, inputs, clock
    )
    spot, spot_warnings = findings.simulate_spot_loss(problem, counts, clock)
    drawn: list[Repeats | None] = []
    is_same_on_every_draw = False
    if production is None and clock.allows(draws.OTHER_DRAWS):
        problem.progress("simulating the plan on other draws of its traffic")
        other_draws = draws.simulate_other_draws(
            problem, counts, inputs.trace, inputs.seed, lambda: clock.allows(draws.MORE_DRAWS)
        )
        # None: neither the traffic nor the router depends on the seed.
        is_same_on_every_draw = other_draws is None
        drawn.append(other_draws)
    # Histories say when spot workers are interrupted.
    if oracle.spot and clock.allows(draws.HISTORIES):
        drawn.append(
            draws.simulate_histories(problem, counts, inputs.seed, lambda: clock.allows(draws.MORE_DRAWS))
        )
    repeats = tuple(runs for runs in drawn if runs is not None)
    return _FurtherResults(
        neighbours=neighbours,
        binding_limits=binding_limits,
        other_facts=(
            *([longer_steps] if longer_steps else []),
            *insurance_facts,
            *spot,
            *findings.price_prefix_caches(searched),
            *findings.price_pinned_replicas(searched, clock),
            *findings.bound_pins(searched, counts, clock),
            *one_more,
            *repeats,
            *([Finding("nothing-drawn")] if is_same_on_every_draw else []),
        ),
        warnings=(
            *([] if longer_steps is None or longer_steps.outcome.holds else [longer_steps]),
            *spot_warnings,
            *draws.missed_warnings(repeats),
            *findings.shared_copies_warnings(problem),
            *findings.dying_away_warnings(problem, simulation),
            *one_more_warnings,
            *insurance_warnings,
        ),
        alternatives=(*other_policies, *insurance_rows),
        repeats=repeats,
        # The certificate counts the simulations of `problem` itself with those of the searches.
        simulations=0 if on_every_draw is problem else on_every_draw.oracle.simulations,
    )


def _question_warnings(problem: Problem, trace: Trace) -> tuple[str, ...]:
    """What is doubtful in the `trace` as it was read, in the question, and in the two together."""
    # `problem.trace` is the traffic at the rate that is planned for. Whether requests go to several LLMs is
    # looked up in the trace as it was read.
    trace_and_question = (*traffic_warnings(problem.slo, problem.trace), *llm_warnings(problem.slo, trace))
    return (*trace.warnings, *problem.task.warnings, *trace_and_question)


def _requested_rps(problem: Problem) -> float | None:
    """The rate that the question asks for the whole traffic; None if it names no rate, or a window."""
    task, described = problem.task, problem.trace.drawn_from
    if task.window not in (None, "whole"):
        return None
    if isinstance(described, Description):
        # How fast agents send requests follows from their number and the fleet.
        return described.mean_rps if described.agent_count is None else None
    return task.rate_rps


def _certificate_of(
    searched: Sequence[PolicySearch],
    simulation: Simulation,
    further: _FurtherResults,
    limit_prices: Mapping[FleetLimit, float],
    seed: int,
    production: Production | None,
) -> Certificate:
    """The certificate: what the search proved, what it ruled out and why, and what it assumed. `limit_prices`
    are the shadow prices of the limits.
    """
    problem, fleet_search = best_of(searched)
    searches = [search.result.level0.search for search in searched]
    # The cheapest fleet of level 0 under any of the policies that were searched.
    cheapest_level0 = min(searches, key=lambda search: search.value)
    is_exhausted = all(search.is_exhausted for search in searches)
    objective = problem.task.objective
    value = objective_paid(problem, fleet_search.best)
    bound = paid_at_least(problem, checked_bound(problem.bound, fleet_search.value))
    if cheapest_level0.best is None:
        level0_value = cheapest_level0.value  # Infinite.
    else:
        level0_value = objective_paid(problem, cheapest_level0.best)
    return Certificate(
        objective=objective,
        unit=OBJECTIVE_UNITS[objective],
        value=value,
        bound=min(bound, value),  # Rounding may lift the bound above the value.
        level0=level0_value,
        level0_exact=is_exhausted and all(search.is_exact for search in searches),
        beyond_exact=fleet_search.is_every_mix_simulated,
        universe=tuple(option.name for option in fleet_search.level0.options),
        refuted=(
            *(
                Refuted(item.name, item.because)
                for item in (*problem.left_out, *problem.options_not_simulated())
            ),
            *(Refuted(name, because) for name, because in sorted(fleet_search.level0.search.refuted.items())),
        ),
        neighbours=further.neighbours,
        # What binds, and what else there is to say about the fleet.
        binding=(
            *further.binding_limits,
            *findings.used_up_limits(problem.limits, fleet_search.best),
            *findings.bound_price_facts(limit_prices, objective),
            *findings.kept_hours(simulation, problem.slo),
            *further.other_facts,
            *fleet_search.race_facts,  # What other policies were worth.
        ),
        assumptions=list_assumptions(
            problem,
            problem.oracle.fleet(fleet_search.best if production is None else production.best),
            simulation,
        ),
        simulations=sum(search.problem.oracle.simulations for search in searched) + further.simulations,
        cuts=fleet_search.cuts,
        seed=seed,
        shadow_prices={limit.name: price for limit, price in limit_prices.items()},
        repeats=further.repeats,
        level0_exhausted=is_exhausted,
        cheaper=cheapest_level0.cheaper,
        cheaper_simulated=cheapest_level0.cheaper_simulated,
        assumed=pruning_rules.with_counts(
            set().union(*(search.assumed for search in searches)), problem.oracle.verdicts
        ),
        answers=() if production is None else production.answers,
        scenarios_drawn=None if production is None else production.scenarios,
    )
