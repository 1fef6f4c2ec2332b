"""Finds the production fleet: the cheapest fleet that keeps the SLO in the share of scenarios that `kept_in`
requires.

cheapest_kept.py searches for it in scenarios that it sees. The fleet is then tested in other scenarios
(scenario_test.py), and grows where it fails. If fleets cost about the same, the one with the most headroom is
taken (like_price.py).
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from planner.documents.safety import strictest_safety
from planner.domain import ROUNDING
from planner.errors import InfeasibleError, MostKept
from planner.fleet import Fleet
from planner.search.level0.owned_gpus import owned_beside
from planner.search.level0.walk import every_mix
from planner.search.mixed.best_fleet import FleetSearch, find_fleet_quickly
from planner.search.mixed.mixed_fleets import best_settings, shares_by_work
from planner.search.mixed.mixtures import find_cheaper_pair
from planner.search.mixed.polished_pins import find_lighter_fleet, is_worth_polishing, use_if_better
from planner.search.oracle.deterministic_parallel import effort_spent
from planner.search.oracle.fleet_counts import (
    Counts,
    add_workers,
    counts_named,
    counts_of,
    has_several_types,
    objective_of,
    options_of,
)
from planner.search.oracle.scenarios import next_block
from planner.search.oracle.work_clock import in_time
from planner.search.problem.options import OBJECTIVE_UNITS, hardware_of
from planner.search.problem.owned_first import objective_paid
from planner.search.problem.plan_problem import (
    Problem,
    with_effort_limit,
    with_scenarios,
    with_search_scenarios,
)
from planner.search.problem.stages import Stage
from planner.search.production import cheapest_kept
from planner.search.production.cheaper_fleets import walk_cheaper_fleets
from planner.search.production.idle_scenarios import find_idle_misses, idle_misses_error
from planner.search.production.like_price import LIKE_PRICE_EFFORT, below_like_price, with_most_headroom
from planner.search.production.other_roles import fleets_of_other_roles
from planner.search.production.scale_model import build_scale_model, restore_full_size
from planner.search.production.scenario_test import (
    LEAST_TEST_SCENARIOS,
    TEST_REQUESTS,
    FleetTrial,
    ScenarioTest,
)
from planner.solvers.master import Option
from planner.units import in_unit

# The limits below bound the time of a plan. They are set by hand.

# At most this many tests are run. After each failed test its scenarios join the search, and the fleet grows.
MOST_TESTS = 4
# If a fleet's price rises by more than this share as it grows after a failed test, a cheaper fleet is
# searched.
SEARCH_AGAIN_FRAC = 0.15

# A near-feasible fleet misses at most this many scenarios more than it may.
NEAR_MISSES = 2
MOST_NEAR_FEASIBLE = 4  # This many near-feasible fleets are tested.
MOST_NEAR_CHECKED = 64  # This many fleets are checked for being near feasible.
# The work of the search for a cheaper fleet of two worker types, as `effort_spent` counts it. Of 40 random
# questions with two or three GPU types a third of it made four cheaper by 7 to 14 %, for a sixth more CPU,
# and all of it a fifth one by 18 %. Of plans for the Azure traces it takes 0 to 10 % of the CPU seconds.
PAIRS_EFFORT = 3_000_000
MOST_MIXES = 2_000  # If more mixes cost less than the fleet, none of them is simulated in scenarios.


def find_production_fleet(
    problem: Problem, paper: FleetSearch, start: Sequence[Fleet] = ()
) -> FleetTrial | None:
    """The cheapest fleet found that passes its test, or if none does the fleet of the last test; None if the
    time was over before a test.

    Raises InfeasibleError if no fleet within the limits was found that keeps the SLO in enough scenarios.
    """
    if (idle := find_idle_misses(problem)) is not None:
        raise idle_misses_error(idle)
    model = build_scale_model(problem, paper.best)
    trial = None if model is problem else _search_on_model(problem, model, paper, start)
    if trial is not None or problem.out_of_time():
        return trial
    return _search_on_model(problem, problem, paper, start)


def _search_on_model(
    problem: Problem, model: Problem, paper: FleetSearch, start: Sequence[Fleet]
) -> FleetTrial | None:
    """`find_production_fleet` on the scale model `model`, which may be the problem itself; None also where
    the scale model has no fleet.
    """
    safety, scenario_problem = problem.task.safety, _in_search_scenarios(model, problem.deadline)
    first = 0  # The first scenario of the next test: those of earlier tests have joined the search.
    trial: FleetTrial | None = None
    assert safety is not None and problem.test_scenarios is not None and model.test_scenarios is not None
    scenarios = scenario_problem.oracle.scenarios
    stage = f"production: the cheapest fleet that keeps the SLO in most of {len(scenarios)} scenarios"
    # With a long trace the test takes longer than anything else, and may not end in time.
    if (requests := LEAST_TEST_SCENARIOS * len(problem.trace)) > TEST_REQUESTS:
        stage += f"; its test then simulates up to {requests:,} requests"
    problem.progress(Stage(stage, "production"))
    scenario_problem, kept = cheapest_kept.find_cheapest_kept(scenario_problem, paper, start)
    is_searched = True  # Whether `kept` comes from a search. Otherwise it is the last tested fleet, grown.
    # Fleets of other designs that keep enough of the search's scenarios. They may still fail a test.
    grown: list[Counts] = []
    for attempt in range(MOST_TESTS):
        if kept is None and (model is not problem or problem.out_of_time()):
            return trial  # The problem at full size may have a fleet where its model has none.
        if kept is None:
            raise unreachable_share_error(scenario_problem, paper)
        problem.progress(Stage("production: on scenarios that the search has not seen", "test"))
        best = with_most_headroom(scenario_problem, paper.level0.options, kept) if is_searched else kept
        test = ScenarioTest.of(problem, first)
        full_size = restore_full_size(problem, scenario_problem)
        trial = FleetTrial(best, test.decide(best), full_size, test, scenario_problem)
        # Cheaper fleets are tested in the first round only: later fleets have grown because cheaper ones
        # failed. One worker of a scale model is many workers, so if its fleet fails no smaller one is tested.
        if attempt == 0 and (scenario_problem.oracle.downscale == 1 or trial.is_passed):
            trial = first_passing(trial, _near_feasible(trial, paper)) or trial
        trial = with_fewest_workers(trial)
        if attempt + 1 == MOST_TESTS and not trial.is_passed:
            # The fleet cannot grow any more in a further round, so dearer designs are tested now.
            least_value = objective_of(trial.best) * (1 + ROUNDING)
            dearer = [counts for counts in grown if objective_of(counts) > least_value]
            trial = first_passing(trial, dearer) or trial
        if trial.is_passed or attempt + 1 == MOST_TESTS or problem.out_of_time():
            break
        best, kept_in = trial.best, trial.kept_in
        scenarios = (*scenarios, *(model.test_scenarios[first + i] for i in range(kept_in.scenario_count)))
        scenario_problem = with_scenarios(model, scenarios, safety.most_missed(len(scenarios)))
        unused_owned = owned_beside(scenario_problem, paper.level0, best)
        scenario_problem, kept = cheapest_kept.grow_until_kept(scenario_problem, best, unused_owned)
        is_searched = kept is None or objective_of(kept) > (1 + SEARCH_AGAIN_FRAC) * objective_of(best)
        if is_searched:
            grown = cheapest_kept.grow_other_designs(scenario_problem, paper, kept)
            kept = cheapest_kept.find_cheaper_kept(
                scenario_problem, paper, next(iter(grown), None), start, refuted_value=objective_of(best)
            )
        first = next_block(first + kept_in.scenario_count)
    if trial is None:
        return None
    trial = _with_cheaper_mixes(_with_cheaper_pairs(_with_other_roles(trial, paper), paper), paper)
    return _with_polished_pins(_with_cheaper_fleets(trial, paper))


def _in_search_scenarios(problem: Problem, deadline: float) -> Problem:
    """The problem in the scenarios that a search sees. Simulations end at `deadline`, even in the middle."""
    problem = with_search_scenarios(problem)
    return replace(problem, oracle=replace(problem.oracle, until=deadline))


def _with_polished_pins(trial: FleetTrial) -> FleetTrial:
    """The trial with prefixes pinned to better workers (polished_pins.py): of a fleet with fewer workers, as
    long as such a fleet passes the test; then of the same fleet, if it still passes and comes less near to
    missing the SLO.
    """
    while True:
        problem = trial.searched_problem
        if not is_worth_polishing(problem) or not trial.is_passed:
            return trial
        fewer = in_time(partial(find_lighter_fleet, problem, trial.best), None)
        if fewer is None:
            break
        lighter = trial.retest(fewer)
        if not lighter.is_passed:
            # `find_lighter_fleet` has put a polished placement into use, which is undone here.
            assert problem.oracle.pinning is not None
            problem.oracle.pinning.use(problem.oracle.fleet(fewer).pools, is_polished=False)
            break
        trial = lighter
    polished = trial

    def is_kept() -> bool:
        nonlocal polished
        # The fleet is the same, so the fact on cheaper fleets is still true.
        polished = replace(trial.retest(trial.best), cheaper=trial.cheaper)
        return polished.is_passed

    return polished if in_time(partial(use_if_better, problem, trial.best, is_kept), False) else trial


def _with_other_roles(trial: FleetTrial, paper: FleetSearch) -> FleetTrial:
    """The trial of the first fleet of other_roles.py that keeps enough of the search's scenarios and passes
    the test, and so on from that fleet; the given trial if there is none. Fleets without a pool of several
    worker types are left to cheaper_fleets.py, which simulates all cheaper ones.
    """
    problem = with_effort_limit(trial.searched_problem, LIKE_PRICE_EFFORT)
    is_mixed = has_several_types(paper.best) or has_several_types(trial.best)
    if problem.oracle.downscale > 1 or not is_mixed:
        return trial
    while trial.is_passed:
        below = below_like_price(problem, trial.best)
        fleets = fleets_of_other_roles(problem, paper, trial.best, below)
        passing = first_passing(trial, _kept_fleets(problem, fleets))
        if passing is None:
            break
        trial = passing
    return trial


def _with_cheaper_pairs(trial: FleetTrial, paper: FleetSearch) -> FleetTrial:
    """The trial of a cheaper fleet of up to two worker types that keeps enough of the search's scenarios and
    passes the test; then one still cheaper, and so on. The given trial if none is found.

    The search in scenarios starts from fleets that are cheap on paper, so it can miss a worker of another
    type beside those of the fleet.
    """
    problem = trial.searched_problem
    if problem.oracle.downscale > 1:
        return trial
    spent, refused = 0, 0
    all_options = list(dict.fromkeys([*paper.level0.options, *options_of(trial.best)]))
    shares = shares_by_work(problem, paper.level0, {}, all_options)

    def passing_trial(counts: Counts) -> FleetTrial | None:
        """The trial of this fleet, if it keeps enough scenarios and passes the test."""
        nonlocal spent, refused
        before = effort_spent()
        is_kept = objective_of(counts) >= paper.value and problem.oracle.holds(counts)
        spent += effort_spent() - before
        tested = trial.retest(counts) if is_kept else None
        refused += tested is not None and not tested.is_passed
        return tested if tested is not None and tested.is_passed else None

    def may_go_on() -> bool:
        return not problem.out_of_time() and spent < PAIRS_EFFORT and refused < MOST_NEAR_FEASIBLE

    def cheaper_pair(options: Sequence[Option]) -> FleetTrial | None:
        below = below_like_price(problem, trial.best)
        limits = problem.limits
        return find_cheaper_pair(trial.best, below, options, shares, limits, passing_trial, may_go_on)

    def find_cheaper() -> FleetTrial | None:
        planned = {(option.role, hardware_of(option)) for option in options_of(trial.best)}
        others = [
            option
            for option in best_settings(problem, paper.level0, {})
            if (option.role, hardware_of(option)) not in planned
        ]
        return cheaper_pair([*options_of(trial.best), *others]) or cheaper_pair(all_options)

    while trial.is_passed and (cheaper := in_time(find_cheaper, None)) is not None:
        trial = with_fewest_workers(cheaper)
    return replace(trial, is_cut_short=problem.out_of_time())


def _with_cheaper_mixes(trial: FleetTrial, paper: FleetSearch) -> FleetTrial:
    """The trial of the cheapest fleet of any mix of worker types that keeps enough of the search's scenarios
    and passes the test; the given trial if there is none, or if not all mixes were simulated on paper.
    """
    problem = with_effort_limit(trial.searched_problem, LIKE_PRICE_EFFORT)
    if problem.oracle.downscale > 1 or not paper.is_every_mix_simulated or not trial.is_passed:
        return trial
    below = below_like_price(problem, trial.best)
    fleets = every_mix(paper.level0.options, problem.limits, below, most=MOST_MIXES) or []
    # The search on paper has simulated the mixes below its price: they fail on the traffic as written.
    dearer = (counts for counts in sorted(fleets, key=objective_of) if objective_of(counts) >= paper.value)
    return first_passing(trial, _kept_fleets(problem, dearer)) or trial


def _kept_fleets(problem: Problem, fleets: Iterable[Counts]) -> Iterable[Counts]:
    """The fleets that keep enough of the problem's scenarios. They are simulated one by one until the
    problem's time is over.
    """
    until_time_out = itertools.takewhile(lambda _: not problem.out_of_time(), fleets)
    return (counts for counts in until_time_out if in_time(partial(problem.oracle.holds, counts), False))


def _with_cheaper_fleets(trial: FleetTrial, paper: FleetSearch) -> FleetTrial:
    """The trial with the fact on cheaper fleets; if a cheaper fleet is found and passes the test, the trial
    of that fleet.

    The near-feasible fleets below the new price have not been tested before, so they are tested too. Each
    round lowers the price.
    """
    if trial.model is not None and trial.model.oracle.downscale > 1:
        return trial  # A large problem has too many cheaper fleets to simulate them all.
    while True:
        cheaper_best, cheaper = walk_cheaper_fleets(trial.searched_problem, paper, trial.best)
        if cheaper_best is None:
            return replace(trial, cheaper=cheaper)
        cheaper_trial = replace(trial.retest(cheaper_best), cheaper=cheaper)
        if not cheaper_trial.is_passed:
            return trial
        nearer = first_passing(cheaper_trial, _near_feasible(cheaper_trial, paper))
        if nearer is None:
            return cheaper_trial
        trial = nearer


def first_passing(trial: FleetTrial, fleets: Iterable[Counts]) -> FleetTrial | None:
    """The trial of the first of these fleets that passes the test; None if none does."""
    trials = (trial.retest(counts) for counts in fleets)
    return next((passing for passing in trials if passing.is_passed), None)


def with_fewest_workers(trial: FleetTrial) -> FleetTrial:
    """Remove workers, the most expensive first, while the fleet keeps the SLO in enough of the search's
    scenarios and passes its test.

    Growth doubles each time, so a fleet may have grown too far. In a scale model one worker stands
    for `downscale` workers, and as many are removed at once.
    """
    oracle = trial.searched_problem.oracle
    removed = oracle.downscale
    while trial.is_passed:
        best = trial.best
        dearest_first = sorted(range(len(best)), key=lambda k: -best[k][0].objective)
        for k in dearest_first:
            fewer = add_workers(best, -removed, [k])
            # Each pool keeps a worker.
            if best[k][1] <= removed or not in_time(partial(oracle.holds, fewer), False):
                continue
            smaller = trial.retest(fewer)
            if smaller.is_passed:
                trial = smaller
                break
        else:
            break
    return trial


def pick_fleet_and_test(
    scenario_problem: Problem, paper: FleetSearch, best: Counts, test: ScenarioTest
) -> FleetTrial:
    """The trial of the fleet with the most headroom at about the price of `best`, with as few workers as pass
    the test.
    """
    best = with_most_headroom(scenario_problem, paper.level0.options, best)
    return with_fewest_workers(FleetTrial(best, test.decide(best), scenario_problem, test))


def pick_known_fleet_and_test(
    problem: Problem, paper: FleetSearch, fleet: Fleet, first: int
) -> FleetTrial | None:
    """The trial of a fleet that is known to keep enough of the search's scenarios, tested from the scenario
    number `first` on; or, of the fleet with the most headroom at about its price, if that passes too. Each
    with as few workers as pass. None if the problem does not have the fleet's worker types.
    """
    counts = counts_of(fleet, paper.level0.options)
    if not counts:
        return None
    problem.progress(Stage("production: on scenarios that the search has not seen", "test"))
    scenario_problem = _in_search_scenarios(problem, problem.deadline)
    test = ScenarioTest.of(problem, first)
    trial = FleetTrial(counts, test.decide(counts), scenario_problem, test)
    likely = with_most_headroom(scenario_problem, paper.level0.options, counts)
    if likely != counts:
        trial = first_passing(trial, [likely]) or trial
    return with_fewest_workers(trial)


def _near_feasible(trial: FleetTrial, paper: FleetSearch) -> list[Counts]:
    """Cheaper fleets that hold on paper and miss slightly too many of the search's scenarios, cheapest first,
    at most MOST_NEAR_FEASIBLE; none if the time is over.
    """
    return in_time(partial(_find_near_feasible, trial.searched_problem, paper, trial.best), [])


def _find_near_feasible(scenario_problem: Problem, paper: FleetSearch, best: Counts) -> list[Counts]:
    """Like `_near_feasible`; raises StoppedError if the time ends. Only one fleet on each hardware is
    listed, because their tests usually have the same result.

    At most MOST_NEAR_CHECKED fleets are checked, the most expensive first. The search that refuted these
    fleets has simulated most of the scenarios that they miss, so the check is cheap.
    """
    scenario_problem = with_effort_limit(scenario_problem, LIKE_PRICE_EFFORT)
    below = below_like_price(scenario_problem, best)
    most_missed = scenario_problem.oracle.may_miss + NEAR_MISSES
    fleets = [counts_named(fleet, paper.level0.options) for fleet in list(scenario_problem.oracle.verdicts)]
    cheaper = [counts for counts in fleets if counts and paper.value < objective_of(counts) < below]
    as_written = scenario_problem.oracle.as_written()
    near_feasible: list[Counts] = []
    listed = set[tuple[tuple[str, Hashable, int], ...]]()
    for counts in sorted(cheaper, key=lambda counts: -objective_of(counts))[:MOST_NEAR_CHECKED]:
        if scenario_problem.out_of_time():
            break
        hardware_counts = tuple((option.role, hardware_of(option), count) for option, count in counts)
        if hardware_counts in listed:
            continue  # The list has a fleet that differs in engine settings alone.
        is_near = (
            scenario_problem.allows(counts)
            and scenario_problem.oracle.missed_count(counts, most_missed) <= most_missed
        )
        if is_near and as_written.holds(counts):
            near_feasible.append(counts)
            listed.add(hardware_counts)
    return sorted(near_feasible, key=objective_of)[:MOST_NEAR_FEASIBLE]


def unreachable_share_error(scenario_problem: Problem, paper: FleetSearch) -> InfeasibleError:
    """The error that no fleet within the limits keeps enough scenarios.

    It names the largest share that some fleet keeps, and that fleet's price. They are found by bisection over
    the number of scenarios that a fleet may miss. If the time ends first, both are those of the best fleet
    found by then.
    """
    assert scenario_problem.task.safety is not None
    count = len(scenario_problem.oracle.scenarios)
    # The bisection: no fleet was found that misses `too_few` scenarios or fewer, and `best` misses `missed`.
    best, too_few = paper.best, scenario_problem.oracle.may_miss
    # The error shows these shares, so no scenario is taken to be kept without a simulation.
    simulated = replace(scenario_problem.oracle, infers_kept=False)
    missed = in_time(lambda: simulated.missed_count(paper.best, count), count)
    while missed - too_few > 1 and not scenario_problem.out_of_time():
        middle = (too_few + missed) // 2
        weaker = with_scenarios(scenario_problem, scenario_problem.oracle.scenarios, middle)
        fleet = in_time(partial(find_fleet_quickly, weaker, [], is_mixed=False), None)
        if fleet is None:
            too_few = middle
        else:
            best = fleet
            # The search allowed `middle` misses, so the fleet has no more, but it may have fewer.
            missed = min(middle, in_time(partial(simulated.missed_count, fleet, count), middle))
    kept_frac, needed_frac = 1 - missed / count, scenario_problem.task.safety.kept_in_frac
    unit = OBJECTIVE_UNITS[scenario_problem.task.objective]
    on_paper = in_unit(objective_paid(scenario_problem, paper.best), unit)
    # No share is named for the fleet on paper, because its answer shows a share of other scenarios.
    most_text = (
        f"none keeps more than the cheapest on paper, {on_paper}"
        if best is paper.best
        else f"the most that one does is {100 * kept_frac:.0f} %, for "
        f"{in_unit(objective_paid(scenario_problem, best), unit)} (on paper: {on_paper})"
    )
    return InfeasibleError(
        f"safety: kept_in: no fleet within the limits was found that keeps the SLO in {100 * needed_frac:g} "
        f"% of scenarios; {most_text}",
        kind="capacity",
        constraint="safety: kept_in",
        relaxation=", or ".join(
            dict.fromkeys((f"{strictest_safety(kept_frac)}, more stock", "safety: none"))
        ),
        is_proved=False,
        most_kept=MostKept(
            needed_frac,
            kept_frac,
            objective_paid(scenario_problem, best),
            objective_paid(scenario_problem, paper.best),
            unit,
        ),
    )
