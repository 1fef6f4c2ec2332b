"""From a question to a certified plan: the search (best_fleet.py), then its evidence (findings.py)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.catalog import Catalog
from planner.documents.certificate import Alternative, Certificate, Status, Throughput
from planner.documents.facts import Binding, Finding, Neighbour, OfTraffic, Refuted, Warned, WorstHour
from planner.documents.task import Task
from planner.domain import FleetLimit
from planner.fleet import Fleet
from planner.search import draws, findings, shortcuts
from planner.search.alternatives import alternatives, as_on_paper
from planner.search.answers import (
    TRIES,
    Production,
    is_passed,
    not_certified,
    production_or_paper,
    tested_alone,
    with_answers,
)
from planner.search.around import around, priced_others
from planner.search.asked import Asked
from planner.search.assumptions import assumptions
from planner.search.best_fleet import Found, best_of, search_policies
from planner.search.bill import commitments
from planner.search.bounds import checked_bound, lower_bound, shadow_prices
from planner.search.idle_futures import idle_misses, out_of_reach_in_futures
from planner.search.most_traffic import at_rate, falling, most_kept, most_traffic
from planner.search.options import OBJECTIVE_UNITS
from planner.search.owned import paid, paid_at_least
from planner.search.plan import Plan
from planner.search.pose import pose
from planner.search.prefix_placing import pool_prefixes
from planner.search.problem import Conditions, Problem, on_all_draws
from planner.search.stages import Stage, Urgent
from planner.simulator.repeats import Repeats
from planner.simulator.replay import Simulation
from planner.traffic.trace import Trace

# With the objective throughput the search for the rate may take this share of the time.
RATE_FRAC = 2 / 3
# A search at the rate that was found has at least this long, even if finding the rate took all of the time.
LEAST_S = 5.0
# Placing prefixes on a pool takes at most this long. It tries a fixed number of placements, so the clock
# rarely decides.
PREFIXES_S = 60.0


def plan(
    task: Task,
    trace: Trace,
    catalog: Catalog,
    *,
    seed: int = 0,
    time_limit_s: float = 120.0,
    conditions: Conditions | None = None,
    asked: Asked | None = None,
    prove: bool = False,
) -> Plan:
    """The fleet that is to be run, with its certificate: the cheapest found that keeps the task's SLO in
    enough scenarios (`task.safety`), or, without safety, on the traffic as it is written.

    Raises InputError for what cannot be planned, InfeasibleError if no fleet keeps the SLO. After
    `time_limit_s` the best fleet found so far is returned with status "best found"; only then does the answer
    depend on the clock. With the objective "throughput" the traffic is first raised as far as the limits
    allow, in production as far as a fleet passes its test. `traffic_request` is as in `build_problem`. With
    `prove` every cheaper fleet of level 0 is simulated.
    """
    deadline = time.monotonic() + time_limit_s
    conditions, throughput = replace(conditions or Conditions(), deadline=deadline), None
    start: list[Fleet] = []
    if task.objective == "throughput":
        if task.safety is not None:
            return _most_kept(task, trace, catalog, seed, conditions)
        until = _share_of_time(conditions, RATE_FRAC)
        throughput, fleet = most_traffic(task, trace, catalog, seed=seed, conditions=until)
        task, start, conditions = (
            at_rate(task, trace, throughput.rate_rps, seed),
            [fleet],
            _at_least(conditions),
        )
    searched = search_llm(
        task, trace, catalog, seed=seed, conditions=conditions, asked=asked, start=start, prove=prove
    )
    if task.safety is not None:
        problem, paper = best_of(searched)
        conditions.on_paper(problem, problem.oracle.fleet(paper.best))
    made = None if task.safety is None else production_or_paper(*best_of(searched))
    found = certified(searched, trace, catalog, seed=seed, throughput=throughput, made=made)
    is_on_paper = made is not None and made.on_paper is not None
    return with_around(found, best_of(searched), made) if conditions.around and not is_on_paper else found


def with_around(found: Plan, searched: tuple[Problem, Found], made: Production | None) -> Plan:
    """The plan with what holds around its fleet (robustness.py), computed in the time that is left."""
    problem, paper = searched
    problem.progress(Stage("what more traffic, longer prompts and fewer workers would do", "around"))
    best = paper.best if made is None else made.best
    lossy = None if made is None else made.with_loss
    priced = [] if lossy is None else [("with a loss", problem.oracle.fleet(lossy))]
    priced += priced_others(found.alternatives) if found.certificate.objective == "cost" else []
    said = around(problem, best, priced)
    return replace(found, certificate=replace(found.certificate, around=said))


def _most_kept(task: Task, trace: Trace, catalog: Catalog, seed: int, conditions: Conditions) -> Plan:
    """The plan for the most traffic that a fleet keeps in enough scenarios, with less traffic where no fleet
    passes its test; for the most traffic on paper where no production fleet is found.

    The search for the rate on paper ends after a third of the time, that for the rate in production after two
    thirds.
    """
    until = [_share_of_time(conditions, part * RATE_FRAC) for part in (0.5, 1.0)]
    on_paper, fleet = most_traffic(task, trace, catalog, seed=seed, conditions=until[0])
    kept = most_kept(task, trace, catalog, on_paper, fleet, seed=seed, conditions=until[1])
    rates, fleet = (on_paper, fleet) if kept is None else kept
    conditions, made = _at_least(conditions), None
    for attempt, throughput in enumerate(falling(rates), start=1):
        at, now = at_rate(task, trace, throughput.rate_rps, seed), _at_least(conditions)
        searched = search_llm(at, trace, catalog, seed=seed, conditions=now, start=[fleet])
        problem, paper = best_of(searched)
        known = None if kept is None else tested_alone(problem, paper, fleet)
        is_over = known is None or is_passed(known.kept_in, known.test.safety) or problem.out_of_time()
        if is_over or attempt == TRIES:
            break
    if known is not None:
        made = with_answers(problem, paper, known)
    found = certified(searched, trace, catalog, seed=seed, throughput=throughput, made=made)
    return with_around(found, (problem, paper), made) if conditions.around else found


def _share_of_time(conditions: Conditions, share: float) -> Conditions:
    """The same conditions with this share of the time that is left."""
    now_s = time.monotonic()
    return replace(conditions, deadline=now_s + share * max(conditions.deadline - now_s, 0.0))


def _at_least(conditions: Conditions) -> Conditions:
    """The same conditions with enough time left to simulate and write a fleet that is already known."""
    return replace(conditions, deadline=max(conditions.deadline, time.monotonic() + LEAST_S))


def search_llm(
    task: Task,
    trace: Trace,
    catalog: Catalog,
    *,
    seed: int,
    conditions: Conditions,
    asked: Asked | None = None,
    start: Sequence[Fleet] = (),
    prove: bool = False,
) -> list[tuple[Problem, Found]]:
    """Search for the fleets of one LLM with all of the limits for itself, after bounding their cost from
    below.

    Fleets of `start` that hold are what others must beat.
    """
    problem = pose(task, trace, catalog, seed=seed, conditions=conditions, asked=asked)
    if task.safety is not None and (idle := idle_misses(problem)) is not None:
        problem.progress(Urgent(f"{out_of_reach_in_futures(idle)}; planned is on paper alone"))
    problem.progress(Stage("lower bound over all fleets", "bound"))
    lower = 0.0 if problem.out_of_time() else lower_bound(problem)
    return search_policies(replace(problem, lower=lower), start, prove=prove)


def certified(
    searched: Sequence[tuple[Problem, Found]],
    trace: Trace,
    catalog: Catalog,
    *,
    seed: int = 0,
    throughput: Throughput | None = None,
    deadline: float | None = None,
    made: Production | None = None,
) -> Plan:
    """The plan of the fleet that is to be run, with the evidence for it; `trace` is the whole one, as it was
    read.

    The fleet is that of `production`, or the best that the searches found. Simulations that would begin after
    `deadline`, by default that of the search, are left out, and a warning names them.
    """
    problem, found = best_of(searched)
    oracle = problem.oracle
    fleet = oracle.fleet(found.best if made is None else made.best)
    problem.progress(Stage("simulating the plan and its neighbours", "neighbours"))
    began = time.monotonic()
    simulation, verdict = oracle.verdict(fleet, record=True)
    deadline = problem.deadline if deadline is None else deadline
    # The last simulation may take as long as that of the plan did, so it must begin that much earlier.
    clock = findings.Clock(deadline - (time.monotonic() - began))
    beyond = _further(searched, simulation, trace, catalog, seed, clock, made)
    of_limits = shadow_prices(replace(problem, deadline=deadline))
    left_s = max(deadline - time.monotonic(), 0.0)
    placement = findings.placement(fleet, min(findings.PLACEMENT_S, max(left_s, 1.0)))
    certificate = replace(
        _certificate(searched, simulation, beyond, of_limits, seed, made),
        commitments=commitments(fleet, placement, problem.task.terms),
    )
    return Plan(
        status=_status(problem, certificate, fleet, made),
        fleet=fleet,
        slo=problem.slo,
        trace=problem.trace,
        traffic_note=problem.traffic_note,
        simulation=simulation,
        verdict=verdict,
        certificate=certificate,
        alternatives=_alternatives(problem, found, made, beyond),
        max_model_len=problem.longest_tokens,
        prices=findings.prices(problem.task, catalog, problem.gpus),
        warnings=(
            *not_certified(problem, made),
            *map(OfTraffic, (*trace.warnings, *problem.task.doubts)),
            *(() if made is None else findings.one_trace(problem)),
            *(
                findings.holding_hours(problem, found.best if made is None else made.best, each, clock)
                if isinstance(each, WorstHour)
                else each
                for each in findings.warnings(fleet, simulation, problem.slo, verdict)
            ),
            *findings.images(fleet, problem.trace),
            *(findings.uncounted_prefixes(fleet.policies, trace) if not problem.task.prefix_cache else ()),
            *beyond.warnings,
        ),
        throughput=throughput,
        placement=placement,
        prefixes=pool_prefixes(
            fleet,
            simulation,
            problem.trace,
            time_limit_s=min(left_s, PREFIXES_S),
            rng=np.random.default_rng(seed),
            pinned=None if oracle.pinning is None else oracle.pinning.expected(fleet.pools),
        )
        if left_s > 0
        else (),
        on_paper=oracle.fleet(found.best),
        trial=made.trial if made is not None and made.is_tested else None,
    )


def _alternatives(
    problem: Problem, found: Found, made: Production | None, beyond: _Further
) -> tuple[Alternative, ...]:
    """The rows of alternatives, marked as fleets on paper beside a plan for production."""
    fleet = () if made is None else made.best
    rows = (*alternatives(problem, found.level0, found.best, found.value, fleet), *beyond.alternatives)
    return rows if made is None else as_on_paper(rows)


def _status(problem: Problem, certificate: Certificate, fleet: Fleet, made: Production | None) -> Status:
    """The status of a plan: "certified" only where the search was exhausted, the fleet passed its test, and
    its step times are measured with a spread.
    """
    if made is not None and made.on_paper is not None:
        return "not for production"
    if not certificate.level0_exhausted:
        return "best found"
    if made is None and problem.task.safety is None:
        return "on paper"
    if made is None or (not made.is_tested and problem.out_of_time()):
        return "best found"
    is_measured = all(pool.type.latency.is_measured for pool in fleet.running) and made.futures.have_spread
    return "certified" if made.is_tested and is_measured else "not certified"


@dataclass(frozen=True, slots=True)
class _Further:
    """The results of the simulations after the search, of the best fleet and of others."""

    neighbours: tuple[Neighbour, ...]
    binds: tuple[Binding, ...]
    findings: tuple[Binding, ...]
    warnings: tuple[Warned, ...]
    alternatives: tuple[Alternative, ...]
    repeats: tuple[Repeats, ...]
    simulations: int  # The number of simulations beside those of the searches.


def _further(
    searched: Sequence[tuple[Problem, Found]],
    simulation: Simulation,
    trace: Trace,
    catalog: Catalog,
    seed: int,
    clock: findings.Clock,
    made: Production | None,
) -> _Further:
    """Simulate what the clock allows beside the plan itself.

    In production the scenarios replace other draws of the traffic and step times at the ends of their spread.
    """
    problem, found = best_of(searched)
    best, oracle = found.best if made is None else made.best, problem.oracle
    fleet = oracle.fleet(best)
    other_policies = findings.other_policies(searched, clock)
    # The search simulated only as many draws as it needed to refute a fleet.
    asked = on_all_draws(problem)
    neighbours, binds = findings.neighbours(asked, found.best, clock)
    one_more, one_more_warnings = findings.one_more(asked, best, clock)
    if_longer = None if made else findings.if_steps_take_longer(problem, fleet, clock)
    insurance, insured, uninsured = findings.insurance(problem, found, trace, catalog, seed, clock)
    spot, spot_warnings = findings.on_spot(problem, best, clock)
    drawn: list[Repeats | None] = []
    is_drawn = made is None and clock.allows(draws.OTHER_DRAWS)
    if is_drawn:
        problem.progress("simulating the plan on other draws of its traffic")
        drawn.append(draws.on_other_draws(problem, best, trace, seed, lambda: clock.allows(draws.MORE_DRAWS)))
    if oracle.spot and clock.allows(draws.HISTORIES):
        drawn.append(draws.on_histories(problem, best, seed, lambda: clock.allows(draws.MORE_DRAWS)))
    repeats = tuple(each for each in drawn if each is not None)
    return _Further(
        neighbours=neighbours,
        binds=binds,
        findings=(
            *([if_longer] if if_longer else []),
            *insured,
            *spot,
            *findings.prefix_savings(searched),
            *findings.pinned_replicas(searched, clock),
            *one_more,
            *repeats,
            *([Finding("nothing-drawn")] if is_drawn and drawn[0] is None else []),
        ),
        warnings=(
            *clock.warnings(),
            *([] if if_longer is None or if_longer.outcome.holds else [if_longer]),
            *spot_warnings,
            *draws.warnings(repeats),
            *findings.shared_copies(problem),
            *findings.dying_away(problem, simulation),
            *one_more_warnings,
            *uninsured,
        ),
        alternatives=(*other_policies, *insurance),
        repeats=repeats,
        simulations=0 if asked is problem else asked.oracle.simulations,
    )


def _certificate(
    searched: Sequence[tuple[Problem, Found]],
    simulation: Simulation,
    beyond: _Further,
    of_limits: Mapping[FleetLimit, float],
    seed: int,
    made: Production | None,
) -> Certificate:
    """The certificate: what was proved and found. `of_limits` are the shadow prices of the limits."""
    problem, found = best_of(searched)
    searches = [each.level0.search for _, each in searched]
    simplest = min(searches, key=lambda search: search.value)  # The cheapest of level 0 under any policy.
    is_exhausted = all(search.is_exhausted for search in searches)
    wanted = problem.task.objective
    return Certificate(
        objective=wanted,
        unit=OBJECTIVE_UNITS[wanted],
        value=paid(problem, found.best),
        bound=min(
            paid_at_least(problem, checked_bound(problem.lower, found.value)), paid(problem, found.best)
        ),
        level0=simplest.value if simplest.best is None else paid(problem, simplest.best),
        level0_exact=is_exhausted and all(search.is_exact for search in searches),
        beyond_exact=found.beyond_exact,
        universe=tuple(option.name for option in found.level0.options),
        refuted=(
            *(Refuted(item.name, item.because) for item in problem.left),
            *(Refuted(name, because) for name, because in sorted(found.level0.search.refuted.items())),
        ),
        neighbours=beyond.neighbours,
        binding=(
            *beyond.binds,
            *findings.used_up(problem.limits, found.best),
            *findings.bound_prices(of_limits, wanted),
            *findings.kept_hours(simulation, problem.slo),
            *beyond.findings,
        ),
        assumptions=assumptions(
            problem, problem.oracle.fleet(found.best if made is None else made.best), simulation
        ),
        simulations=sum(each.oracle.simulations for each, _ in searched) + beyond.simulations,
        cuts=found.cuts,
        seed=seed,
        shadow_prices={limit.name: price for limit, price in of_limits.items()},
        repeats=beyond.repeats,
        level0_exhausted=is_exhausted,
        cheaper=simplest.cheaper,
        cheaper_simulated=simplest.cheaper_simulated,
        assumed=shortcuts.with_counts(
            set().union(*(search.assumed for search in searches)), problem.oracle.told
        ),
        answers=() if made is None else made.answers,
        futures=None if made is None else made.futures,
    )
