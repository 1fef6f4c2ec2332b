"""The three answers: the cheapest fleet on paper, in production, and with a loss.

on paper      the fleet keeps the SLO on the traffic and with the step times as they are written
production    the fleet keeps the SLO in the share of scenarios that `safety: kept_in` requires
              (production_fleet.py)
with a loss   the fleet keeps the SLO in that share of scenarios after the loss of any one worker
              (fleet_with_a_loss.py)
"""

from dataclasses import dataclass, replace

from planner.documents import facts
from planner.errors import InfeasibleError
from planner.search.mixed.best_fleet import FleetSearch
from planner.search.oracle.fleet_counts import Counts, add_workers, names_of, objective_of
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.headroom import find_headroom
from planner.search.oracle.scenarios import drawn_by
from planner.search.oracle.work_clock import StoppedError
from planner.search.problem.bill import bill_fleet, bought_pools
from planner.search.problem.owned_first import objective_paid
from planner.search.problem.plan_problem import Problem, with_search_scenarios
from planner.search.production.fleet_with_a_loss import (
    FleetWithALoss,
    cheaper_with_one_more,
    find_fleet_with_a_loss,
)
from planner.search.production.idle_scenarios import find_idle_misses
from planner.search.production.production_fleet import find_production_fleet, with_fewest_workers
from planner.search.production.scale_model import build_scale_model
from planner.search.production.scenario_test import FleetTrial, ScenarioTest
from planner.traffic.redraw import block_s

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
    is_passed: bool
    trial: FleetTrial | None
    with_loss: Counts | None = None
    why_on_paper: WhyOnPaper | None = None


def plan_production(problem: Problem, paper: FleetSearch) -> Production | None:
    """The three answers, where `paper` is the cheapest fleet on paper; None if the time was over first.

    Raises InfeasibleError as `find_production_fleet` does.
    """
    trial = find_production_fleet(problem, paper)
    return None if trial is None else with_answers(problem, paper, trial)


def with_answers(problem: Problem, paper: FleetSearch, trial: FleetTrial) -> Production:
    """The production fleet of the trial, with the answers on paper and with a loss.

    The fleet with a loss is searched within the limits of the trial's problem. The limits of `problem` differ
    if other LLMs share them; only a fleet with a loss that becomes the production fleet must keep these too.
    """
    # If the question itself has losses, production survives them already, and no third fleet is searched.
    searches_with_loss = not problem.oracle.has_losses and not problem.out_of_time()
    survivor: FleetWithALoss | None = None
    if searches_with_loss:
        survivor, first_found = find_fleet_with_a_loss(trial, paper)
        # `first_found` has workers to spare. Even if it fails the test with losses, it may pass production's
        # test, which is without losses, at no higher cost.
        preferred = _prefer_fleet_with_loss(problem, trial, first_found)
        if preferred is not trial:
            # `survivor` was searched around the production fleet that `preferred` now replaces.
            survivor = cheaper_with_one_more(preferred, survivor)
        trial = preferred
    on_paper = _answer(problem, "on-paper", paper.best, _kept_in_of_paper_fleet(problem, paper, trial))
    # Where a scale model was searched, only the answer "production" gets a headroom.
    if trial.searched_problem.oracle.downscale == 1:
        on_paper = _with_headroom(on_paper, problem, paper.best)
    # Every search keeps the limits. If one did not, no answer would be better than a fleet beyond them.
    assert problem.allows(trial.best), "internal error: the production fleet is not within the limits"
    production = _answer(problem, "production", trial.best, trial.kept_in)
    answers = [on_paper, _with_headroom(production, problem, trial.best)]
    if searches_with_loss:
        answers.append(_answer_with_a_loss(trial, survivor))
    assert problem.task.safety is not None
    scenarios = replace(
        _scenarios_fact(problem, trial.best, trial.searched_problem.oracle),
        cheaper=trial.cheaper,
        fewer=_one_fewer_refused(trial),
    )
    with_loss = None if survivor is None else survivor.counts
    return Production(trial.best, tuple(answers), scenarios, trial.is_passed, trial, with_loss)


def without_loss(production: Production) -> Production:
    """The same answers without a fleet with a loss."""
    none = _no_answer("with-a-loss")
    answers = tuple(none if answer.name == none.name else answer for answer in production.answers)
    return replace(production, answers=answers, with_loss=None)


def _no_answer(name: facts.AnswerName) -> facts.Answered:
    """The answer where no fleet was found."""
    return facts.Answered(name, workers=(), value=None, usd_per_h=None, kept_in=None)


def _answer_with_a_loss(trial: FleetTrial, survivor: FleetWithALoss | None) -> facts.Answered:
    """The answer "with a loss", which names no fleet where none was found."""
    if survivor is None:
        return _no_answer("with-a-loss")
    assert trial.problem.allows(survivor.counts), (
        "internal error: the fleet with a loss is not within the limits"
    )
    answer = _answer(survivor.problem or trial.problem, "with-a-loss", survivor.counts, survivor.kept_in)
    # `problem` is None if production was searched in a scale model: then no headroom can be found.
    return answer if survivor.problem is None else _with_headroom(answer, survivor.problem, survivor.counts)


def production_or_paper(problem: Problem, paper: FleetSearch) -> Production | None:
    """Like `plan_production`; if no fleet keeps the SLO in enough scenarios, the cheapest fleet on paper,
    with the reason.
    """
    try:
        return plan_production(problem, paper)
    except InfeasibleError as error:
        # The first reason that applies; without one the error stands.
        why: WhyOnPaper | None = find_idle_misses(problem)
        if why is None and error.most_kept is not None:
            why = facts.TooFewKept(error.most_kept)
        if why is None:
            raise
    production = paper_in_scenarios(problem, paper, why)
    return replace(production, why_on_paper=_with_share_on_paper(why, production.answers[0].kept_in))


def _with_share_on_paper(why: WhyOnPaper, kept_in: facts.KeptIn | None) -> WhyOnPaper:
    """The reason `why`, with `kept_in`, the share of scenarios that the answer on paper states.

    The search counted the fleet on paper in fewer scenarios, and for large traffic in a scale model, so its
    share may differ from the answer's. The reason stays as it is if another fleet, of a higher value, keeps a
    larger share, or if the answer's share would be enough.
    """
    if not isinstance(why, facts.TooFewKept) or kept_in is None or not kept_in.scenario_count:
        return why
    most = why.most_kept
    is_another_better = most.value > most.on_paper and most.kept_frac > kept_in.kept_frac
    if is_another_better or kept_in.kept_frac >= most.asked_frac:
        return why
    return facts.TooFewKept(replace(most, kept_frac=kept_in.kept_frac, value=most.on_paper))


def paper_in_scenarios(problem: Problem, paper: FleetSearch, why: WhyOnPaper) -> Production:
    """The cheapest fleet on paper, with the number of scenarios in which it keeps the SLO, where no
    production fleet was found.
    """
    assert problem.search_scenarios is not None and problem.task.safety is not None
    test = ScenarioTest(
        problem.oracle,
        problem.search_scenarios,
        problem.task.safety,
        first=0,
        out_of_time=problem.out_of_time,
    )
    # `build_scale_model` returns the problem itself if it is small. The scenarios of a large problem would be
    # drawn at full size for this count alone, so fewer are counted.
    is_small = build_scale_model(problem, paper.best) is problem
    scenario_count = problem.search_scenarios.count if is_small else test.side_scenarios
    kept_in = test.count_kept(paper.best, scenario_count)
    on_paper = _with_headroom(_answer(problem, "on-paper", paper.best, kept_in), problem, paper.best)
    answers = (on_paper, _no_answer("production"))
    scenarios = _scenarios_fact(problem, paper.best, with_search_scenarios(problem).oracle)
    return Production(paper.best, answers, scenarios, is_passed=False, trial=None, why_on_paper=why)


def _kept_in_of_paper_fleet(problem: Problem, paper: FleetSearch, trial: FleetTrial) -> facts.KeptIn:
    """In how many scenarios the fleet on paper keeps the SLO.

    The scenarios are those in which production was searched. If that was done in a scale model, the first
    scenarios of the test are used, because those of the search would be drawn at full size for this alone.
    """
    assert problem.search_scenarios is not None
    if trial.searched_problem.oracle.downscale > 1:
        return trial.test.count_kept(paper.best, trial.test.side_scenarios)
    return replace(trial.test, scenarios=problem.search_scenarios, first=0).count_kept(
        paper.best, problem.search_scenarios.count
    )


def _prefer_fleet_with_loss(problem: Problem, trial: FleetTrial, with_loss: Counts | None) -> FleetTrial:
    """The trial of the fleet with a loss, if that fleet is within the limits of `problem`, costs no more than
    the production fleet and passes the test; else the given trial.

    If the fleet costs less, it is reduced to the workers that it needs for the test. If it costs the same, it
    keeps all workers, since their nodes are paid for anyway. `retest` and `with_fewest_workers` reset
    `cheaper`, the fact on cheaper fleets. It is restored, because the fleet costs no more.
    """
    # If the higher of two costs is at most this factor times the lower, they are equal but for rounding.
    same_value_factor = trial.problem.same_value_factor
    if with_loss is None or objective_of(with_loss) > objective_of(trial.best) * same_value_factor:
        return trial
    if not problem.allows(with_loss):
        return trial
    if names_of(with_loss) == names_of(trial.best):
        return trial
    costs_less = objective_of(with_loss) * same_value_factor < objective_of(trial.best)
    preferred = replace(trial.retest(with_loss), cheaper=trial.cheaper)
    if not preferred.is_passed:
        return trial
    return replace(with_fewest_workers(preferred), cheaper=trial.cheaper) if costs_less else preferred


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
    if production.is_passed and production.scenarios.have_spread:
        return ()
    kept_in = next(answer.kept_in for answer in production.answers if answer.name == "production")
    return (facts.NotCertified(kept_in, safety.kept_in_frac, production.scenarios.have_spread),)


def _answer(
    problem: Problem, name: facts.AnswerName, counts: Counts, kept_in: facts.KeptIn
) -> facts.Answered:
    """An answer with the fleet's value, the price of its GPUs and what is paid, without its headroom."""
    fleet = problem.oracle.fleet(counts)
    value, paid_usd_per_h = objective_paid(problem, counts), bill_fleet(fleet).usd_per_h
    return facts.Answered(
        name, bought_pools(fleet), value, fleet.price_usd_per_h, kept_in, paid_usd_per_h=paid_usd_per_h
    )


def _with_headroom(answer: facts.Answered, problem: Problem, counts: Counts) -> facts.Answered:
    """The answer with the headroom of its fleet, which is left out where the time is over."""

    def stop_in_time() -> None:
        if problem.out_of_time():
            raise StoppedError

    try:
        measured = find_headroom(problem.oracle, counts, before_each=stop_in_time)
    except StoppedError:
        return answer
    return replace(
        answer,
        headroom=measured.headroom,
        breaks_by_traffic=measured.by_traffic,
        breaks_by_steps=measured.by_steps,
    )


def _one_fewer_refused(trial: FleetTrial) -> facts.FewerTested | None:
    """The fleet with one worker fewer that was tested and did not pass; of several such fleets the one that
    keeps the SLO in the largest share of scenarios."""
    asked_frac = trial.test.safety.kept_in_frac
    refused = []
    for k in range(len(trial.best)):
        fewer = add_workers(trial.best, -1, [k])
        if kept_in := trial.test.refused.get(names_of(fewer)):
            refused.append(facts.FewerTested(tuple(count for _, count in fewer), kept_in, asked_frac))
    return max(refused, key=lambda fewer_tested: fewer_tested.kept_in.kept_frac, default=None)


def _scenarios_fact(problem: Problem, best: Counts, searched: Oracle) -> facts.ScenariosDrawn:
    """How the scenarios were drawn, and how many of them the search saw, whose oracle was `searched`."""
    assert problem.task.safety is not None and problem.search_scenarios is not None
    trace = problem.search_scenarios.trace
    source = drawn_by(problem.task, trace)
    return facts.ScenariosDrawn(
        traffic=source,
        block_s=block_s(trace) if source == "blocks" else 0.0,
        growth_frac=problem.task.safety.growth_frac,
        have_spread=all(option.type.latency.spread is not None for option, _ in best),
        searched=len(searched.scenarios),
        downscale=searched.downscale,
        prefix_drift_frac=problem.task.safety.prefix_drift_frac,
    )
