"""The three answers: the cheapest fleet on paper, in production, and with a loss.

    on paper      the fleet keeps the SLO on the traffic and with the step times as they are written
    production    the fleet keeps the SLO in the share of scenarios that `safety: kept_in` asks for
    with a loss   the fleet does so after the loss of any one worker

cheapest_kept.py searches for the production fleet in scenarios that it sees. The fleet is then tested in
other scenarios (scenario_test.py). Of fleets whose prices differ by at most LIKE_PRICE_FRAC
(cheaper_fleets.py) the one with the most headroom is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.documents import facts
from planner.documents.safety import safety_kept
from planner.domain import ROUNDING
from planner.errors import InfeasibleError, MostKept
from planner.fleet import Fleet
from planner.search.level0.owned_gpus import owned_beside, with_idle, without_needless_workers
from planner.search.mixed.best_fleet import FleetSearch, find_fleet_quickly
from planner.search.mixed.mixed_fleets import best_settings
from planner.search.mixed.polished_pins import find_lighter_fleet, is_worth_polishing, use_if_better
from planner.search.oracle.fleet_counts import (
    Counts,
    Named,
    add_workers,
    counts_named,
    counts_of,
    has_several_types,
    in_order,
    names_of,
    objective,
    objective_by_gpu,
)
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.headroom import find_headroom, holds_with
from planner.search.oracle.scenarios import drawn_by, next_block
from planner.search.oracle.stopping import StoppedError, in_time
from planner.search.problem.bill import bill_fleet, bought_pools, paid_whole_usd_per_h
from planner.search.problem.options import OBJECTIVE_UNITS, hardware
from planner.search.problem.owned_first import merge_kinds, objective_paid, one_more, owned_first
from planner.search.problem.plan_problem import (
    Problem,
    with_effort_limit,
    with_scenarios,
    with_search_scenarios,
)
from planner.search.problem.stages import Stage
from planner.search.production import cheapest_kept
from planner.search.production.cheaper_fleets import LIKE_PRICE_FRAC, below_like_price, walk_cheaper_fleets
from planner.search.production.idle_scenarios import find_idle_misses, idle_misses_error
from planner.search.production.other_roles import fleets_of_other_roles
from planner.search.production.scale_model import build_scale_model, restore_full_size
from planner.search.production.scenario_test import (
    LEAST_TEST_SCENARIOS,
    TEST_REQUESTS,
    FleetTrial,
    ScenarioTest,
    is_test_passed,
)
from planner.traffic.redraw import block_s
from planner.traffic.scaling import SAME_FRAC
from planner.units import in_unit

# The limits below bound the time of a plan.

# At most this many tests are run. After each failed test its scenarios join the search, and the fleet grows.
MOST_TESTS = 4
# A fleet grown after a failed test is searched for again if its price rose by more than this share.
SEARCH_AGAIN_FRAC = 0.15

# A near-feasible fleet misses at most this many scenarios more than it may.
NEAR_MISSES = 2
MOST_NEAR_FEASIBLE = 4  # So many near-feasible fleets are tested.
MOST_NEAR_CHECKED = 64  # So many fleets are checked for being near feasible.

MOST_LIKE_PRICE = 16  # So many fleets of like price are compared by headroom,
LIKE_PRICE_EFFORT = 1_000_000  # with this much simulation effort, in requests.
# Another fleet of like price is preferred if its headroom is larger by this factor. Less is not worth the
# simulations in all scenarios.
MORE_HEADROOM = 1.1

# A fleet with a loss is searched for in this many scenarios more than it may miss.
LOSS_SCENARIOS = 2 * cheapest_kept.HARDEST_SCENARIOS
# Each search for a fleet with a loss may simulate this many requests.
LOSS_SEARCH_REQUESTS = cheapest_kept.LEAST_SEARCH_REQUESTS / 2
# At most this many fleets with a loss are tested. The scenarios that one misses join the search for the next.
MOST_LOSS_TESTS = 2
# The neighbours of production that are looked at for a fleet with a loss have up to MOST_WORKERS_CHANGED
# workers more or fewer of each of up to MOST_MACHINES_CHANGED machines.
MOST_WORKERS_CHANGED = 2
MOST_MACHINES_CHANGED = 4
# Fleets with other worker types have up to this many workers of another type beside a pool of production.
MOST_OTHER_WORKERS = 2
MOST_OTHER_FLEETS = 4  # At most so many fleets with other worker types are simulated.
MOST_COMBINATIONS = 1_000  # At most so many neighbours, or fleets with other types, are built to choose from.


WhyOnPaper = facts.TooFewKept | facts.IdleMisses | facts.NoneTogether
"""Why there is no fleet for production, so that the plan is the fleet on paper."""


@dataclass(frozen=True, slots=True, eq=False)
class Production:
    """The fleet that is to be run, the answers beside it, and whether it passed its test.

    `with_loss` is the fleet that survives the loss of any worker; None where none was found, or where the
    question already asks for losses. `trial` keeps the scenarios of the search and of the test, so that the
    same fleet can be simulated under other routers. Where no fleet for production was found, `best` is the
    cheapest fleet on paper, `why_on_paper` is the reason, and `trial` is None.
    """

    best: Counts
    answers: tuple[facts.Answered, ...]
    scenarios: facts.ScenariosDrawn
    is_tested: bool
    trial: FleetTrial | None
    with_loss: Counts | None = None
    why_on_paper: WhyOnPaper | None = None


def find_production_fleet(
    problem: Problem, paper: FleetSearch, start: Sequence[Fleet] = ()
) -> FleetTrial | None:
    """The cheapest fleet found that passes its test, or if none does the fleet of the last test; None where
    the time was over before a test.

    Raises InfeasibleError where no fleet within the limits was found that keeps the SLO in enough scenarios.
    """
    if (idle := find_idle_misses(problem)) is not None:
        raise idle_misses_error(idle)
    model = build_scale_model(problem, paper.best)
    trial = None if model is problem else _find_production_fleet(problem, model, paper, start)
    if trial is not None or problem.out_of_time():
        return trial
    return _find_production_fleet(problem, problem, paper, start)


def _find_production_fleet(
    problem: Problem, model: Problem, paper: FleetSearch, start: Sequence[Fleet]
) -> FleetTrial | None:
    """As `find_production_fleet`, searched on the scale model `model`, which may be the problem itself; None
    also where the scale model has no fleet.
    """
    safety, scenario_problem = problem.task.safety, _in_search_scenarios(model, problem.deadline)
    first = 0  # The first scenario of the next test: those of earlier tests have joined the search.
    trial: FleetTrial | None = None
    assert safety is not None and problem.tested is not None and model.tested is not None
    scenarios = scenario_problem.oracle.scenarios
    stage = f"production: the cheapest fleet that keeps the SLO in most of {len(scenarios)} scenarios"
    # With a long trace the test takes longer than anything else, and may not end in time.
    if (requests := LEAST_TEST_SCENARIOS * len(problem.trace)) > TEST_REQUESTS:
        stage += f"; its test then simulates up to {requests:,} requests"
    problem.progress(Stage(stage, "production"))
    scenario_problem, least = cheapest_kept.find_cheapest_kept(scenario_problem, paper, start)
    is_searched = True  # Whether `least` is the result of a search; otherwise it is the last fleet, grown.
    # Fleets of other designs that keep enough of the search's scenarios. They may still fail a test.
    grown: list[Counts] = []
    for attempt in range(MOST_TESTS):
        if least is None and (model is not problem or problem.out_of_time()):
            return trial  # The problem at full size may have a fleet where its model has none.
        if least is None:
            raise unreachable_share_error(scenario_problem, paper)
        problem.progress(Stage("production: on scenarios that the search has not seen", "test"))
        best = _most_headroom(scenario_problem, paper, least) if is_searched else least
        test = ScenarioTest(problem.oracle, problem.tested, safety, first, problem.out_of_time)
        kept_in = test.decide(best)
        # A cheaper fleet may pass only in the first round: later fleets have grown because cheaper ones
        # failed. One step of a scale model is many workers, so if its fleet fails no smaller one is tested.
        may_cost_less = attempt == 0 and (
            scenario_problem.oracle.downscale == 1 or is_test_passed(kept_in, safety)
        )
        near_feasible = (
            in_time(partial(_near_feasible, scenario_problem, paper, best), []) if may_cost_less else []
        )
        best, test, kept_in = _first_passing(test, near_feasible) or (best, test, kept_in)
        best, test, kept_in = _with_fewest_workers(scenario_problem, test, best, kept_in)
        if attempt + 1 == MOST_TESTS and not is_test_passed(kept_in, safety):
            dearer = [counts for counts in grown if objective(counts) > objective(best) * (1 + ROUNDING)]
            best, test, kept_in = _first_passing(test, dearer) or (best, test, kept_in)
        trial = FleetTrial(
            best, kept_in, restore_full_size(problem, scenario_problem), test, scenario_problem
        )
        if is_test_passed(kept_in, safety) or attempt + 1 == MOST_TESTS or problem.out_of_time():
            break
        scenarios = (*scenarios, *(model.tested[first + i] for i in range(kept_in.scenario_count)))
        scenario_problem = with_scenarios(model, scenarios, safety.most_missed(len(scenarios)))
        unused_owned = owned_beside(scenario_problem, paper.level0, best)
        scenario_problem, least = in_time(
            partial(cheapest_kept.grow_until_kept, scenario_problem, best, unused_owned),
            otherwise=(scenario_problem, None),
        )
        is_searched = least is None or objective(least) > (1 + SEARCH_AGAIN_FRAC) * objective(best)
        if is_searched:
            grown = cheapest_kept.grow_other_designs(scenario_problem, paper, least)
            least = cheapest_kept.find_cheaper_kept(
                scenario_problem, paper, next(iter(grown), None), start, refuted_value=objective(best)
            )
        first = next_block(first + kept_in.scenario_count)
    if trial is None:
        return None
    return _with_polished_pins(_with_cheaper_fleets(_with_other_roles(trial, paper), paper))


def _in_search_scenarios(problem: Problem, deadline: float) -> Problem:
    """The problem in the scenarios that a search sees. Simulations end at `deadline`, even in the middle."""
    problem = with_search_scenarios(problem)
    return replace(problem, oracle=replace(problem.oracle, until=deadline))


def _with_polished_pins(trial: FleetTrial) -> FleetTrial:
    """The trial with prefixes pinned to better workers (polished_pins.py). Its fleet has fewer workers, if
    such a fleet then passes the test; otherwise it is the same fleet, if that still passes and fewer requests
    miss their limits.
    """
    while True:
        problem = trial.searched_problem
        if not is_worth_polishing(problem) or not is_test_passed(trial.kept_in, trial.test.safety):
            return trial
        fewer = in_time(partial(find_lighter_fleet, problem, trial.best), None)
        if fewer is None:
            break
        test, kept_in = trial.test.decide_picked(fewer)
        if not is_test_passed(kept_in, test.safety):
            # `find_lighter_fleet` has put a polished placement into use, which is undone here.
            assert problem.oracle.pinning is not None
            problem.oracle.pinning.use(problem.oracle.fleet(fewer).pools, is_polished=False)
            break
        # `cheaper` is about the fleets below the price of the larger fleet, so it is dropped.
        trial = replace(trial, best=fewer, test=test, kept_in=kept_in, cheaper=None)
    test, kept_in = trial.test, trial.kept_in

    def is_kept() -> bool:
        nonlocal test, kept_in
        test, kept_in = trial.test.decide_picked(trial.best)
        return is_test_passed(kept_in, test.safety)

    if in_time(partial(use_if_better, problem, trial.best, is_kept), False):
        return replace(trial, test=test, kept_in=kept_in)
    return trial


def _with_other_roles(trial: FleetTrial, paper: FleetSearch) -> FleetTrial:
    """The trial of the first fleet of other_roles.py that keeps enough of the search's scenarios and passes
    the test, repeated from that fleet; the given trial if there is none. If no pool has several worker types,
    on paper and here, the trial stays: all cheaper fleets are then simulated instead (cheaper_fleets.py).
    """
    problem = with_effort_limit(trial.searched_problem, LIKE_PRICE_EFFORT)
    is_mixed = has_several_types(paper.best) or has_several_types(trial.best)
    if problem.oracle.downscale > 1 or not is_mixed:
        return trial
    while is_test_passed(trial.kept_in, trial.test.safety):
        below = below_like_price(problem, trial.best)
        fleets = fleets_of_other_roles(problem, paper, trial.best, below)
        in_the_time = itertools.takewhile(lambda _: not problem.out_of_time(), fleets)
        kept_fleets = (
            counts for counts in in_the_time if in_time(partial(problem.oracle.holds, [counts]), [False])[0]
        )
        passing = _first_passing(trial.test, kept_fleets)
        if passing is None:
            break
        best, test, kept_in = passing
        trial = replace(trial, best=best, test=test, kept_in=kept_in, cheaper=None)
    return trial


def _with_cheaper_fleets(trial: FleetTrial, paper: FleetSearch) -> FleetTrial:
    """The trial with what is known of cheaper fleets; if a cheaper fleet is found and passes the test, the
    trial of that fleet.

    The near-feasible fleets below the new price have not been tested before, so they are tested too. Each
    round lowers the price.
    """
    if trial.model is not None and trial.model.oracle.downscale > 1:
        return trial  # A large problem has too many cheaper fleets to simulate them all.
    while True:
        cheaper_best, cheaper = walk_cheaper_fleets(trial.searched_problem, paper, trial.best)
        if cheaper_best is None:
            return replace(trial, cheaper=cheaper)
        test, kept_in = trial.test.decide_picked(cheaper_best)
        if not is_test_passed(kept_in, test.safety):
            return trial
        trial = replace(trial, best=cheaper_best, test=test, kept_in=kept_in, cheaper=cheaper)
        near_feasible = in_time(partial(_near_feasible, trial.searched_problem, paper, cheaper_best), [])
        nearer = _first_passing(test, near_feasible)
        if nearer is None:
            return trial
        best, test, kept_in = nearer
        trial = replace(trial, best=best, test=test, kept_in=kept_in, cheaper=None)


def _first_passing(
    test: ScenarioTest, fleets: Iterable[Counts]
) -> tuple[Counts, ScenarioTest, facts.KeptIn] | None:
    """The first of these fleets that passes, with its last test and that test's result; else None."""
    for counts in fleets:
        last_test, kept_in = test.decide_picked(counts)
        if is_test_passed(kept_in, test.safety):
            return counts, last_test, kept_in
    return None


def _with_fewest_workers(
    scenario_problem: Problem, test: ScenarioTest, best: Counts, kept_in: facts.KeptIn
) -> tuple[Counts, ScenarioTest, facts.KeptIn]:
    """Remove workers, the most expensive first, while the fleet keeps the SLO in enough scenarios and passes
    its test. Returns the fleet, its last test and the result of that.

    Growth doubles its step each time, so a fleet may have grown too far. In a scale model one worker stands
    for `downscale` workers, and as many are removed at once.
    """
    step = scenario_problem.oracle.downscale
    while is_test_passed(kept_in, test.safety):
        for k in sorted(range(len(best)), key=lambda k: -best[k][0].objective):
            fewer = add_workers(best, -step, [k])
            is_last = best[k][1] <= step  # Each pool keeps a worker.
            if is_last or not in_time(partial(scenario_problem.oracle.holds, [fewer]), [False])[0]:
                continue
            fewer_test, fewer_kept_in = test.decide_picked(fewer)
            if is_test_passed(fewer_kept_in, test.safety):
                best, test, kept_in = fewer, fewer_test, fewer_kept_in
                break
        else:
            break
    return best, test, kept_in


def pick_fleet_and_test(
    scenario_problem: Problem, paper: FleetSearch, best: Counts, test: ScenarioTest
) -> tuple[Counts, ScenarioTest, facts.KeptIn]:
    """Among fleets at about the price of `best`, the one with the most headroom, reduced to as few workers as
    pass the test, with the last test of it and the result of that test.
    """
    best = _most_headroom(scenario_problem, paper, best)
    return _with_fewest_workers(scenario_problem, test, best, test.decide(best))


def pick_known_fleet_and_test(problem: Problem, paper: FleetSearch, fleet: Fleet) -> FleetTrial | None:
    """As `pick_fleet_and_test`, for a fleet that is known to keep enough of the search's scenarios; None if
    the problem does not have its worker types.
    """
    counts = counts_of(fleet, paper.level0.options)
    if not counts:
        return None
    assert problem.task.safety is not None and problem.tested is not None
    problem.progress(Stage("production: on scenarios that the search has not seen", "test"))
    scenario_problem = _in_search_scenarios(problem, problem.deadline)
    test = ScenarioTest(problem.oracle, problem.tested, problem.task.safety, 0, problem.out_of_time)
    best, test, kept_in = pick_fleet_and_test(scenario_problem, paper, counts, test)
    return FleetTrial(best, kept_in, scenario_problem, test)


def plan_production(problem: Problem, paper: FleetSearch) -> Production | None:
    """The three answers, where `paper` is the cheapest fleet on paper; None if the time was over first.

    Raises InfeasibleError as `find_production_fleet` does.
    """
    trial = find_production_fleet(problem, paper)
    return None if trial is None else with_answers(problem, paper, trial)


def with_answers(problem: Problem, paper: FleetSearch, trial: FleetTrial) -> Production:
    """The production fleet of the trial with the two answers beside it. The fleet with a loss is searched
    within the limits of the trial's problem, which may be narrower than those of `problem`.
    """
    answer, lossy_fleet = None, None
    # If the question itself has losses to survive, production survives them already.
    if not problem.oracle.has_losses and not problem.out_of_time():
        answer, lossy_fleet, first_lossy = _answer_with_a_loss(trial, paper)
        # The first fleet with a loss has workers to spare, even if it fails its own test: it may be the
        # better fleet for production.
        preferred = _prefer_lossy_fleet(trial, first_lossy)
        if preferred is not trial:
            answer, lossy_fleet = _cheaper_with_one_more(preferred, answer, lossy_fleet)
        trial = preferred
    best, kept_in = trial.best, trial.kept_in
    paper_kept_in = _kept_in_of_paper_fleet(problem, paper, trial)
    answer_on_paper = (
        _answer_without_headroom if trial.searched_problem.oracle.downscale > 1 else _answer_with_headroom
    )
    answers = (
        answer_on_paper(problem, "on-paper", paper.best, paper_kept_in),
        _answer_with_headroom(problem, "production", best, kept_in),
        *([] if answer is None else [answer]),
    )
    assert problem.task.safety is not None
    is_tested = is_test_passed(kept_in, problem.task.safety)
    scenarios = replace(
        _scenarios_fact(problem, best, trial.searched_problem.oracle),
        cheaper=trial.cheaper,
        fewer=_one_fewer_refused(trial),
    )
    return Production(best, answers, scenarios, is_tested, trial, lossy_fleet)


def production_or_paper(problem: Problem, paper: FleetSearch) -> Production | None:
    """As `plan_production`; if no fleet keeps enough scenarios, the cheapest on paper with the reason."""
    try:
        return plan_production(problem, paper)
    except InfeasibleError as error:
        why: WhyOnPaper | None = find_idle_misses(problem)
        if why is None and error.most_kept is not None:
            why = facts.TooFewKept(error.most_kept)
        if why is None:
            raise
    production = paper_in_scenarios(problem, paper, why)
    return replace(production, why_on_paper=_with_share_on_paper(why, production.answers[0].kept_in))


def _with_share_on_paper(why: WhyOnPaper, kept_in: facts.KeptIn | None) -> WhyOnPaper:
    """The reason, with the fleet on paper as the one that is kept most, where its answer says so: the search
    counts fewer scenarios, and of large traffic on a model of it.
    """
    if not isinstance(why, facts.TooFewKept) or kept_in is None or not kept_in.scenario_count:
        return why
    most = why.most_kept
    is_another = most.value > most.on_paper and most.kept_frac > kept_in.kept_frac
    if is_another or kept_in.kept_frac >= most.asked_frac:
        return why
    return facts.TooFewKept(replace(most, kept_frac=kept_in.kept_frac, value=most.on_paper))


def paper_in_scenarios(problem: Problem, paper: FleetSearch, why: WhyOnPaper) -> Production:
    """The cheapest fleet on paper, with how many scenarios it keeps, if no production fleet was found."""
    assert problem.searched is not None and problem.task.safety is not None
    test = ScenarioTest(problem.oracle, problem.searched, problem.task.safety, 0, problem.out_of_time)
    # The scenarios of a large problem would be drawn at full size for this count alone, so it takes fewer.
    is_small = build_scale_model(problem, paper.best) is problem
    kept_in = test.count_kept(paper.best, problem.searched.count if is_small else test.side_scenarios)
    answers = (
        _answer_with_headroom(problem, "on-paper", paper.best, kept_in),
        facts.Answered("production", (), None, None, None),
    )
    scenarios = _scenarios_fact(problem, paper.best, with_search_scenarios(problem).oracle)
    return Production(paper.best, answers, scenarios, is_tested=False, trial=None, why_on_paper=why)


def _kept_in_of_paper_fleet(problem: Problem, paper: FleetSearch, trial: FleetTrial) -> facts.KeptIn:
    """In how many scenarios the fleet on paper keeps the SLO.

    These are the scenarios in which production was searched. Beside a scale model they are the first ones of
    the test, because the search's scenarios at full size would have to be drawn for this count alone.
    """
    assert problem.searched is not None
    if trial.searched_problem.oracle.downscale > 1:
        return trial.test.count_kept(paper.best, trial.test.side_scenarios)
    return replace(trial.test, scenarios=problem.searched, first=0).count_kept(
        paper.best, problem.searched.count
    )


def _prefer_lossy_fleet(trial: FleetTrial, lossy_fleet: Counts | None) -> FleetTrial:
    """The trial of the fleet with a loss, where that fleet costs no more than the production fleet and passes
    the test; else the given trial.

    If it costs less, it is reduced to the workers that it needs for the test. If it costs the same it keeps
    all, since the nodes on which they run are paid for anyway.
    """
    same_value = trial.problem.same_value
    if lossy_fleet is None or objective(lossy_fleet) > objective(trial.best) * same_value:
        return trial
    if names_of(lossy_fleet) == names_of(trial.best):
        return trial
    costs_less = objective(lossy_fleet) * same_value < objective(trial.best)
    test, kept_in = trial.test.decide_picked(lossy_fleet)
    if not is_test_passed(kept_in, test.safety):
        return trial
    best = lossy_fleet
    if costs_less:
        best, test, kept_in = _with_fewest_workers(trial.searched_problem, test, best, kept_in)
    return replace(trial, best=best, test=test, kept_in=kept_in)


def _cheaper_with_one_more(
    trial: FleetTrial, answer: facts.Answered, lossy_fleet: Counts | None
) -> tuple[facts.Answered, Counts | None]:
    """The answer "with a loss" and its fleet: the given ones, which were searched for another production
    fleet, or production with one more worker of each machine, if that is cheaper and passes.
    """
    problem, more = trial.searched_problem, one_more(trial.searched_problem, trial.best)
    most = math.inf if lossy_fleet is None else objective(lossy_fleet)
    if (
        problem.oracle.downscale > 1
        or not problem.allows(more)
        or objective(more) * problem.same_value >= most
    ):
        return answer, lossy_fleet
    test = trial.test.after_a_loss()
    kept_in = test.decide(more)
    if not is_test_passed(kept_in, test.safety):
        return answer, lossy_fleet
    lossy = replace(problem, oracle=replace(problem.oracle, spare_workers=1))
    return _answer_with_headroom(lossy, "with-a-loss", more, kept_in), more


def _near_feasible(scenario_problem: Problem, paper: FleetSearch, best: Counts) -> list[Counts]:
    """Cheaper fleets that hold on paper and miss slightly too many of the search's scenarios, cheapest first,
    at most MOST_NEAR_FEASIBLE. Of fleets on the same hardware one stands for all, as their tests end alike.

    At most MOST_NEAR_CHECKED fleets are checked, the most expensive first. The search that refuted these
    fleets has simulated most of the scenarios that they miss, so the check is cheap.
    """
    scenario_problem = with_effort_limit(scenario_problem, LIKE_PRICE_EFFORT)
    below, most = below_like_price(scenario_problem, best), scenario_problem.oracle.may_miss + NEAR_MISSES
    fleets = [counts_named(fleet, paper.level0.options) for fleet in list(scenario_problem.oracle.verdicts)]
    cheaper = [counts for counts in fleets if counts and paper.value < objective(counts) < below]
    as_written = scenario_problem.oracle.as_written()
    near_feasible: list[Counts] = []
    machines_listed = set[tuple[tuple[str, Hashable, int], ...]]()
    for counts in sorted(cheaper, key=lambda counts: -objective(counts))[:MOST_NEAR_CHECKED]:
        if scenario_problem.out_of_time():
            break
        machines = tuple((option.role, hardware(option), count) for option, count in counts)
        if machines in machines_listed:
            continue  # The list has a fleet that differs in engine settings alone.
        is_near = (
            scenario_problem.allows(counts) and scenario_problem.oracle.missed_count(counts, most) <= most
        )
        if is_near and as_written.holds([counts])[0]:
            near_feasible.append(counts)
            machines_listed.add(machines)
    return sorted(near_feasible, key=objective)[:MOST_NEAR_FEASIBLE]


def not_certified_warnings(
    problem: Problem, production: Production | None
) -> tuple[facts.NotCertified | WhyOnPaper, ...]:
    """A warning where production was required and the plan cannot be called certified."""
    if (safety := problem.task.safety) is None:
        return ()
    if production is None:  # The time was over and nothing was tested, so the spread does not matter.
        return (facts.NotCertified(None, safety.kept_in_frac, have_spread=True),)
    if production.why_on_paper is not None:
        return (production.why_on_paper,)
    if production.is_tested and production.scenarios.have_spread:
        return ()
    kept_in = next(each.kept_in for each in production.answers if each.name == "production")
    return (facts.NotCertified(kept_in, safety.kept_in_frac, production.scenarios.have_spread),)


def unreachable_share_error(scenario_problem: Problem, paper: FleetSearch) -> InfeasibleError:
    """The error that no fleet within the limits keeps enough scenarios, with the largest share that some
    fleet keeps and the price of that fleet, found by bisection over the number of scenarios that a fleet may
    miss. If the time ends first, both are those of the best fleet found by then.
    """
    assert scenario_problem.task.safety is not None
    count = len(scenario_problem.oracle.scenarios)
    # The bisection: no fleet was found that misses `too_few` scenarios or fewer, and `best` misses `missed`.
    best, too_few = paper.best, scenario_problem.oracle.may_miss
    missed = in_time(lambda: scenario_problem.oracle.missed_count(paper.best, count), count)
    while missed - too_few > 1 and not scenario_problem.out_of_time():
        middle = (too_few + missed) // 2
        weaker = with_scenarios(scenario_problem, scenario_problem.oracle.scenarios, middle)
        fleet = in_time(partial(find_fleet_quickly, weaker, [], is_mixed=False), None)
        if fleet is None:
            too_few = middle
        else:
            best = fleet
            # The search allowed `middle` misses, so the fleet has no more, but it may have fewer.
            exactly = in_time(partial(weaker.oracle.missed_count, fleet, count), middle)
            missed = min(middle, exactly)
    kept_frac, wanted = 1 - missed / count, scenario_problem.task.safety.kept_in_frac
    unit = OBJECTIVE_UNITS[scenario_problem.task.objective]
    on_paper = in_unit(objective_paid(scenario_problem, paper.best), unit)
    # The answer on paper has its own share, of other scenarios than the search's.
    most = (
        f"none keeps more than the cheapest on paper, {on_paper}"
        if best is paper.best
        else f"the most that one does is {100 * kept_frac:.0f} %, for "
        f"{in_unit(objective_paid(scenario_problem, best), unit)} (on paper: {on_paper})"
    )
    return InfeasibleError(
        f"safety: kept_in: no fleet within the limits was found that keeps the SLO in {100 * wanted:g} % of "
        f"scenarios; {most}",
        kind="capacity",
        constraint="safety: kept_in",
        relaxation=", or ".join(dict.fromkeys((f"{safety_kept(kept_frac)}, more stock", "safety: none"))),
        is_proved=False,
        most_kept=MostKept(
            wanted,
            kept_frac,
            objective_paid(scenario_problem, best),
            objective_paid(scenario_problem, paper.best),
            unit,
        ),
    )


def _answer_with_a_loss(
    production: FleetTrial, paper: FleetSearch
) -> tuple[facts.Answered, Counts | None, Counts | None]:
    """The answer "with a loss", its fleet, and the first fleet that the search found, which may have failed
    its test.

    The cheapest fleet found is tested as production is, in scenarios that no search has seen, each after the
    loss of any one worker. If it fails, these scenarios join the search. Production with one more worker of
    each machine may be taken without passing, because after any loss all workers of production are left. It
    is the answer where MOST_LOSS_TESTS cheaper fleets fail.

    In a scale model one worker stands for many, so the loss of a single one cannot be simulated. If a scale
    model was searched, the answer is production with one more worker of each machine, without its headroom.
    """
    scenario_problem = production.searched_problem
    more = one_more(scenario_problem, production.best)
    missing = facts.Answered("with-a-loss", (), None, None, None)
    test = production.test.after_a_loss()
    if scenario_problem.oracle.downscale > 1:
        if not scenario_problem.allows(more):
            return missing, None, None
        kept_in = test.count_kept(more, test.side_scenarios)
        return _answer_without_headroom(production.problem, "with-a-loss", more, kept_in), more, more
    scenarios, first_lossy = scenario_problem.oracle.scenarios, None
    failed = set[Named]()  # The fleets that failed their test.
    for attempt in range(MOST_LOSS_TESTS + 1):
        may_miss = test.safety.most_missed(len(scenarios))
        hard = with_scenarios(scenario_problem, scenarios[: may_miss + LOSS_SCENARIOS], may_miss)
        lossy = replace(hard, oracle=replace(hard.oracle, spare_workers=1))
        lossy_best = None
        if attempt < MOST_LOSS_TESTS:
            lossy_best = _find_lossy_fleet(lossy, scenario_problem, paper, production.best)
        if lossy_best is not None and names_of(lossy_best) in failed:
            lossy_best = None  # The scenarios that it missed were too few to refute it.
        if scenario_problem.allows(more) and (lossy_best is None or objective(more) <= objective(lossy_best)):
            lossy_best = more
        if lossy_best is None:
            break
        first_lossy = first_lossy or lossy_best
        if lossy_best is more:
            # After a loss `more` still has all workers of production, and no search has chosen it by the
            # scenarios of production's test. So it is counted in the same scenarios as production.
            test = production.test.after_a_loss()
        kept_in, missed, kept_scenarios = test.decide_and_split(lossy_best)
        if lossy_best is more or is_test_passed(kept_in, test.safety) or scenario_problem.out_of_time():
            return _answer_with_headroom(lossy, "with-a-loss", lossy_best, kept_in), lossy_best, first_lossy
        failed.add(names_of(lossy_best))
        scenarios = (*missed, *scenarios, *kept_scenarios)  # The hardest come first.
        test = replace(test, first=next_block(test.first + kept_in.scenario_count))
    return missing, None, first_lossy


def _find_lossy_fleet(
    lossy: Problem, scenario_problem: Problem, paper: FleetSearch, best: Counts
) -> Counts | None:
    """The cheapest fleet found that keeps the SLO in enough scenarios of `lossy` after the loss of any one
    worker.

    Production with one more worker of each machine survives any loss. We look for cheaper fleets in this
    order: fewer workers on owned GPUs that idle, and known fleets; one worker type per pool; a few workers
    more or fewer than production; a few workers of other types beside production.

    `strict` leaves out the hardest scenarios, as many as a fleet may miss, and allows no miss in the others.
    One missed scenario then refutes a fleet, which takes fewer simulations. A search of `lossy` itself
    follows, as a fleet may miss other scenarios than those.
    """
    may_miss, least = lossy.oracle.may_miss, objective(best)
    strict = with_scenarios(lossy, lossy.oracle.scenarios[may_miss:], 0)  # The hardest come first in `lossy`.
    cheapest = in_time(lambda: _cheapest_n_plus_one(strict, scenario_problem, paper, best), None)
    # No fleet that survives a loss is cheaper than production, so one at its price is the cheapest.
    if cheapest is None or objective(cheapest) > least * lossy.same_value:
        for lossy_problem in (strict, lossy):
            cheapest = cheapest_kept.find_cheaper_kept(
                lossy_problem,
                paper,
                cheapest,
                any_mix=False,
                most_requests=LOSS_SEARCH_REQUESTS,
                refuted_value=least,
            )
        for find_cheaper in (_cheapest_neighbour, _cheapest_with_other_types):
            cheapest = in_time(partial(find_cheaper, lossy, paper, best, cheapest), cheapest)
    return cheapest


def _cheapest_n_plus_one(
    lossy: Problem, scenario_problem: Problem, paper: FleetSearch, best: Counts
) -> Counts | None:
    """The cheapest of these fleets that survives a loss: production with one more worker of each machine;
    that fleet with idle owned GPUs put to use, as few as suffice; the fleet on paper with one more worker of
    each machine; and MOST_OTHER_FLEETS known fleets that keep enough scenarios.
    """
    lossy = cheapest_kept.with_search_limit(lossy, LOSS_SEARCH_REQUESTS)
    more = one_more(scenario_problem, best)
    candidates = [more] if scenario_problem.allows(more) else []
    filled = with_idle(scenario_problem, paper.level0, more)
    uses_idle = sorted(names_of(filled)) != sorted(names_of(more))
    if uses_idle and scenario_problem.allows(filled) and lossy.oracle.holds([filled])[0]:
        candidates.append(owned_first(scenario_problem, without_needless_workers(filled, lossy)))
    below = min(map(objective, candidates), default=math.inf)
    cheapest = sorted(_feasible_fleets(scenario_problem, paper), key=objective)
    likely = [each for each in cheapest if objective(each) > objective(best) * (1 + SAME_FRAC)]
    for counts in (one_more(scenario_problem, paper.best), *likely[:MOST_OTHER_FLEETS]):
        is_open = objective(counts) < below and scenario_problem.allows(counts) and not lossy.out_of_time()
        if is_open and lossy.oracle.holds([counts])[0]:
            candidates.append(counts)
    return min(candidates, key=objective, default=None)


def _cheapest_neighbour(
    lossy: Problem, paper: FleetSearch, best: Counts, cheapest: Counts | None
) -> Counts | None:
    """The cheapest fleet found that survives a loss and has, of each machine, up to MOST_WORKERS_CHANGED
    workers more or fewer than production. Owned GPUs that production leaves idle are machines too.

    Of the fleets that cost less than `cheapest` we simulate a largest one, to which no other of them adds
    workers. If it fails, all fleets that are smaller in every pool fail too.
    """
    lossy = cheapest_kept.with_search_limit(lossy, LOSS_SEARCH_REQUESTS)
    machines = merge_kinds(best)
    idle = [(option, 0) for option, _ in owned_beside(lossy, paper.level0, best)]
    counted_pools = [*machines, *idle[: max(MOST_MACHINES_CHANGED - len(machines), 0)]]
    options = [option for option, _ in counted_pools]
    ranges = [
        range(max(count - MOST_WORKERS_CHANGED, 0), count + MOST_WORKERS_CHANGED + 1)
        for _, count in counted_pools
    ]
    fleets: dict[tuple[int, ...], Counts] = {}
    for vector in itertools.islice(itertools.product(*ranges), MOST_COMBINATIONS):
        counts = owned_first(lossy, in_order(zip(options, vector, strict=True), paper.level0.options))
        if _roles_of(counts) == _roles_of(best) and lossy.allows(counts):
            fleets[vector] = counts
    while not lossy.out_of_time():
        below = math.inf if cheapest is None else objective(cheapest) * (1 - SAME_FRAC)
        fleets = {vector: counts for vector, counts in fleets.items() if objective(counts) < below}
        if not fleets:
            break
        vector = min(_largest_vectors([*fleets]), key=lambda vector: objective(fleets[vector]))
        if lossy.oracle.holds([fleets[vector]])[0]:
            cheapest = owned_first(lossy, without_needless_workers(fleets[vector], lossy))
        else:
            # Every smaller fleet fails too, so only those stay that have more of some machine.
            fleets = {each: fleets[each] for each in fleets if np.any(np.array(each) > vector)}
    return cheapest


def _roles_of(counts: Counts) -> set[str]:
    return {option.role for option, _ in counts}


def _largest_vectors(vectors: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The vectors that no other vector reaches in every component."""
    every = np.array(vectors)
    return [
        vector for vector, row in zip(vectors, every, strict=True) if (every >= row).all(axis=1).sum() == 1
    ]


def _cheapest_with_other_types(
    lossy: Problem, paper: FleetSearch, best: Counts, cheapest: Counts | None
) -> Counts | None:
    """The cheapest fleet below the price of `cheapest` that survives a loss and is production with something
    added for each pool: one more of its workers, or up to MOST_OTHER_WORKERS workers of another GPU or
    parallelism in its role. At most MOST_OTHER_FLEETS are simulated.
    """
    settings = best_settings(lossy, paper.level0, {})
    # By pool of production: what may be added for it, as an option with a number of workers.
    added_for_pool = [
        [
            (option, 1),
            *(
                (other, count)
                for other in settings
                if other.role == option.role and hardware(other) != hardware(option)
                for count in range(1, MOST_OTHER_WORKERS + 1)
            ),
        ]
        for option, _ in best
    ]
    below = math.inf if cheapest is None else objective(cheapest) * (1 - SAME_FRAC)
    fleets: list[Counts] = []
    for added in itertools.islice(itertools.product(*added_for_pool), MOST_COMBINATIONS):
        workers = dict(best)
        for option, more in added:
            workers[option] = workers.get(option, 0) + more
        fleets.append(owned_first(lossy, in_order(workers.items(), paper.level0.options)))
    fleets = [counts for counts in fleets if objective(counts) < below and lossy.allows(counts)]
    for counts in sorted(fleets, key=objective)[:MOST_OTHER_FLEETS]:
        if lossy.out_of_time():
            break
        if lossy.oracle.holds([counts])[0]:
            return counts
    return cheapest


def _answer_with_headroom(
    problem: Problem, name: facts.AnswerName, counts: Counts, kept_in: facts.KeptIn
) -> facts.Answered:
    """An answer with the fleet's headroom, which is left out where the time is over."""
    answer = _answer_without_headroom(problem, name, counts, kept_in)
    try:
        end = find_headroom(problem.oracle, counts, before_each=lambda: _stop_in_time(problem))
    except StoppedError:
        return answer
    return replace(
        answer, headroom=end.headroom, breaks_by_traffic=end.by_traffic, breaks_by_steps=end.by_steps
    )


def _stop_in_time(problem: Problem) -> None:
    if problem.out_of_time():
        raise StoppedError


def _answer_without_headroom(
    problem: Problem, name: facts.AnswerName, counts: Counts, kept_in: facts.KeptIn
) -> facts.Answered:
    """An answer with the fleet's price and bill, without its headroom."""
    fleet = problem.oracle.fleet(counts)
    value, paid_usd_per_h = objective_paid(problem, counts), bill_fleet(fleet).usd_per_h
    return facts.Answered(
        name, bought_pools(fleet), value, fleet.price_usd_per_h, kept_in, paid_usd_per_h=paid_usd_per_h
    )


def _one_fewer_refused(trial: FleetTrial) -> facts.FewerTested | None:
    """The fleet with one worker less that did not pass a test; of several the one that keeps most."""
    asked_frac = trial.test.safety.kept_in_frac
    refused = [
        facts.FewerTested(tuple(count for _, count in fewer), kept_in, asked_frac)
        for k in range(len(trial.best))
        if (kept_in := trial.test.refused.get(names_of(fewer := add_workers(trial.best, -1, [k]))))
    ]
    return max(refused, key=lambda each: each.kept_in.kept_frac, default=None)


def _scenarios_fact(problem: Problem, best: Counts, searched: Oracle) -> facts.ScenariosDrawn:
    """The fact that says how the scenarios were drawn and how many the search, whose oracle is `searched`,
    saw.
    """
    assert problem.task.safety is not None and problem.searched is not None
    trace = problem.searched.trace
    way = drawn_by(problem.task, trace)
    return facts.ScenariosDrawn(
        way,
        block_s(trace) if way == "blocks" else 0.0,
        problem.task.safety.growth_frac,
        all(option.type.latency.spread is not None for option, _ in best),
        len(searched.scenarios),
        searched.downscale,
        problem.task.safety.prefix_drift_frac,
    )


def _most_headroom(problem: Problem, paper: FleetSearch, best: Counts) -> Counts:
    """Of fleets at about this price the one with the most headroom; `best` where no other has more, and if
    the time ends first.
    """
    return in_time(partial(_search_most_headroom, problem, paper, best), best)


def _search_most_headroom(problem: Problem, paper: FleetSearch, best: Counts) -> Counts:
    """As `_most_headroom`; raises StoppedError if the time ends.

    Headroom is computed first, because checking whether a fleet keeps enough scenarios takes many more
    simulations. A fleet replaces `best` only if its headroom is larger by the factor MORE_HEADROOM.
    """
    if problem.out_of_time():
        return best
    problem = with_effort_limit(problem, LIKE_PRICE_EFFORT)
    headroom = find_headroom(problem.oracle, best).headroom
    most_frac, ever_more = min(headroom.traffic_frac, headroom.steps_frac), list[Counts]()
    for counts in itertools.islice(_fleets_of_like_price(problem, paper, best), MOST_LIKE_PRICE):
        least_frac = most_frac * MORE_HEADROOM + SAME_FRAC
        if problem.out_of_time() or not holds_with(problem.oracle, counts, least_frac):
            continue
        headroom = find_headroom(problem.oracle, counts, least_frac=least_frac).headroom
        ever_more.append(counts)
        most_frac = min(headroom.traffic_frac, headroom.steps_frac)
    # Each has more headroom than the one before, so the last one that keeps enough scenarios has the most.
    return next((counts for counts in reversed(ever_more) if problem.oracle.holds([counts])[0]), best)


def _feasible_fleets(problem: Problem, paper: FleetSearch) -> Iterator[Counts]:
    """The fleets within the limits that the search has simulated and that held."""
    for fleet, holds in list(problem.oracle.verdicts.items()):
        counts = counts_named(fleet, paper.level0.options) if holds else None
        if counts and problem.allows(counts):
            yield counts


def _fleets_of_like_price(problem: Problem, paper: FleetSearch, best: Counts) -> Iterator[Counts]:
    """Fleets at about the price of `best`: the same GPUs with other engine settings, then the fleets that the
    search has simulated and that held.
    """
    options = paper.level0.options
    alike = [
        [each for each in options if each.role == option.role and hardware(each) == hardware(option)]
        for option, _ in best
    ]
    counted = [count for _, count in best]
    names_listed = {names_of(best)}
    other_settings = (tuple(zip(each, counted, strict=True)) for each in itertools.product(*alike))
    # Nodes are paid whole, so fleets may differ in their GPUs' prices and cost the same, or the other way
    # round: all prices must be alike.
    prices = (
        objective,
        objective_by_gpu,
        *((paid_whole_usd_per_h,) if problem.task.objective == "gpus" else ()),
    )
    for counts in itertools.chain(other_settings, _feasible_fleets(problem, paper)):
        is_near = all(abs(price(counts) - price(best)) <= LIKE_PRICE_FRAC * price(best) for price in prices)
        if names_of(counts) not in names_listed and is_near and problem.allows(counts):
            names_listed.add(names_of(counts))
            yield counts
