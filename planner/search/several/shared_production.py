"""Several LLMs in production on one stock: each keeps its SLO in the share of its scenarios that it requires.

    alone   Each LLM gets its production fleet with all of the limits for itself. If all these fleets fit
            together, they are the answer.
    share   Otherwise one master (level0/cheapest.py) chooses among the designs (level0/designs.py) of all
            LLMs. It does so twice: first with the rule that a prefill pool which misses TTFT alone misses
            it in every pair, then without that rule. A fleet is feasible if it misses its SLO in no more of
            its LLM's scenarios than `kept_in` allows. The LLMs are also served in turn, each within what
            those before it leave, which also finds fleets of several worker types.
    refine  Each LLM is searched within what the others leave, if its fleet may have several types.
    test    Each fleet is tested in scenarios that no search has seen. The test scenarios of a fleet that
            fails join the search scenarios of its LLM, and the search continues at `share`.

Scenarios of different LLMs are drawn independently: each LLM keeps its SLO in enough of its own scenarios,
and the plan does not state how often all LLMs keep their SLOs at the same time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.documents.facts import KeptIn, NoneTogether, ProductionShared
from planner.domain import ROUNDING
from planner.errors import Change, InfeasibleError, ways_text
from planner.search.level0.cheapest import CheapestChoice, cheapest_designs, shared_limits
from planner.search.level0.designs import FleetDesign
from planner.search.level0.level0_search import designs_of
from planner.search.mixed.best_fleet import FleetSearch, PolicySearch
from planner.search.oracle.deterministic_parallel import effort_spent
from planner.search.oracle.fleet_counts import (
    Counts,
    add_workers,
    has_several_types,
    is_within,
    names_of,
    objective_of,
)
from planner.search.oracle.scenarios import next_block
from planner.search.oracle.work_clock import EFFORT_S, in_time, is_over, now_s
from planner.search.problem.options import OBJECTIVE_UNITS
from planner.search.problem.owned_first import owned_first
from planner.search.problem.plan_problem import (
    Problem,
    Progress,
    report_nothing,
    with_scenarios,
    with_search_scenarios,
)
from planner.search.production import production_fleet, three_answers
from planner.search.production.cheapest_kept import MOST_SEARCH_REQUESTS, find_cheaper_kept
from planner.search.production.scenario_test import FleetTrial, ScenarioTest, is_test_passed
from planner.search.several import joint_limits
from planner.search.several.shared_kept import CommonShare, find_common_share
from planner.search.several.shared_paper import share_deadline
from planner.solvers.master import FleetLimits
from planner.units import in_unit, show_amount

# A fleet that failed its last test is tested again with at most this many more workers per pool. Set by hand.
MOST_GROWN = 2


@dataclass(frozen=True, slots=True, eq=False)
class LlmOnPaper:
    """One LLM as it was planned on paper.

    `alone` is the result for `problem`, in which the LLM has all of the limits for itself. `paper` has the
    LLM's fleet that fits within the shared limits beside the fleets of the other LLMs.
    """

    name: str
    problem: Problem
    alone: FleetSearch
    paper: FleetSearch


@dataclass(frozen=True, slots=True, eq=False)
class SharedProduction:
    """The results of all LLMs, in their order.

    The entry of an LLM in `productions` is None if it requires no safety. `fleets` fit together; `alone` has
    the fleet of each LLM with all of the limits for itself. `llms` is the last state of each LLM's search.
    If `fleets` are those on paper, `how_chosen` is None and `llms` empty.
    """

    productions: tuple[three_answers.Production | None, ...]
    fleets: tuple[Counts, ...]
    alone: tuple[Counts, ...]
    how_chosen: ProductionShared | None
    llms: tuple[_LlmProduction, ...] = ()

    def scenario_searches(self) -> list[list[PolicySearch]]:
        """Each LLM's problem in its scenarios, with the verdicts found so far, and its search on paper. Empty
        if `fleets` are those on paper.
        """
        if not self.llms:
            return []
        return [
            [PolicySearch(_with_known_verdicts(llm, (fleet,)), llm.on_paper.alone)]
            for llm, fleet in zip(self.llms, self.fleets, strict=True)
        ]

    def passes_test(self, k: int, counts: Counts) -> bool:
        """Whether a fleet of the k-th LLM passes the LLM's test, if it has one."""
        test = self.llms[k].test
        return test is None or is_test_passed(test.decide(counts), test.safety)


@dataclass(slots=True, eq=False)
class _LlmProduction:
    """The state of the search for one LLM.

    `problem` is the LLM's problem in its scenarios, the hardest first; `alone` its production fleet with all
    of the limits for itself; `kept_in` the result of the last test. An LLM that requires no safety has no
    test.
    """

    on_paper: LlmOnPaper
    problem: Problem
    alone: Counts
    test: ScenarioTest | None
    kept_in: KeptIn | None
    alone_holds: bool = True  # False once `alone`, or a fleet within shared limits, failed a test.

    @property
    def is_passed(self) -> bool:
        """Whether the last tested fleet passed, or the LLM needs no test."""
        return self.test is None or (
            self.kept_in is not None and is_test_passed(self.kept_in, self.test.safety)
        )

    def extend_time(self, deadline: float) -> None:
        """Set the deadline of later searches and tests, which had that of the LLM's search alone so far."""
        self.problem = replace(self.problem, deadline=deadline, progress=report_nothing)
        self.problem.oracle.until = deadline
        if self.test is not None:
            self.test.out_of_time = lambda: is_over(deadline)

    def add_test_scenarios(self) -> None:
        """Add the scenarios of the failed test to those of the search. The next test begins at the block
        after them, so that no test uses a scenario that the search has seen.
        """
        assert self.test is not None and self.kept_in is not None
        tested_count = self.kept_in.scenario_count
        first = self.test.first
        scenarios = [self.test.scenarios[i] for i in range(first, first + tested_count)]
        scenarios += self.problem.oracle.scenarios
        self.problem = with_scenarios(
            self.on_paper.problem, scenarios, self.test.safety.most_missed(len(scenarios))
        )
        self.test.first = next_block(first + tested_count)
        self.alone_holds = False


def share_production(
    llms: Sequence[LlmOnPaper], limits: FleetLimits, deadline: float, progress: Progress
) -> SharedProduction | None:
    """The cheapest fleets found that keep each SLO in enough scenarios and fit together within the limits.

    None if the time ran out first. Raises InfeasibleError if one LLM cannot keep its SLO in enough scenarios
    even with all of the limits for itself, or if no fleets were found that fit together; the message then
    names the least increase of each limit with which they would fit.
    """
    llm_productions: list[_LlmProduction] = []
    for k, on_paper in enumerate(llms):
        progress(f"{on_paper.name}: production, with all of the fleet for itself")
        try:
            llm = _plan_alone(on_paper, share_deadline(deadline, len(llms) - k))
        except InfeasibleError as error:
            raise _add_common_share(error, llms, limits, deadline, progress) from None
        if llm is None:
            return None
        llm_productions.append(llm)
    for llm in llm_productions:
        llm.extend_time(deadline)
    fleets, shared, tries = [llm.alone for llm in llm_productions], None, 0
    if not joint_limits.fit_together(limits, fleets):
        chosen = _plan_within_shared_limits(llm_productions, limits, deadline, progress)
        if chosen is None:
            return None
        fleets, shared, tries = chosen
    productions = _answer_each(llm_productions, fleets, limits, deadline)
    # An answer may have taken its fleet with a loss, which costs no more, as the fleet for production.
    fleets = [
        fleet if production is None else production.best
        for fleet, production in zip(fleets, productions, strict=True)
    ]
    how_chosen = ProductionShared(
        is_each=shared is None,
        rounds=0 if shared is None else shared.rounds,
        is_exact=shared is not None and shared.is_exact,
        tries=tries,
    )
    alone = tuple(llm.alone for llm in llm_productions)
    return SharedProduction(productions, tuple(fleets), alone, how_chosen, tuple(llm_productions))


def production_or_paper_of_all(
    llms: Sequence[LlmOnPaper], limits: FleetLimits, deadline: float, progress: Progress
) -> SharedProduction | None:
    """The result of `share_production`, or if it raises InfeasibleError, the fleets on paper with the error
    as the reason.
    """
    try:
        return share_production(llms, limits, deadline, progress)
    except InfeasibleError as error:
        why = NoneTogether(str(error).rstrip("."), error.relaxation, error.most_kept)
    progress("production: in how many scenarios the fleets on paper are kept")
    productions = tuple(
        None
        if llm.problem.task.safety is None
        else three_answers.paper_in_scenarios(replace(llm.problem, deadline=deadline), llm.paper, why)
        for llm in llms
    )
    fleets = tuple(llm.paper.best for llm in llms)
    return SharedProduction(productions, fleets, tuple(llm.alone.best for llm in llms), how_chosen=None)


def _plan_alone(llm: LlmOnPaper, deadline: float) -> _LlmProduction | None:
    """The production of one LLM with all of the limits for itself; None if the time ran out first."""
    problem = replace(llm.problem, deadline=deadline)
    if problem.task.safety is None:
        return _LlmProduction(llm, problem, llm.alone.best, test=None, kept_in=None)
    try:
        trial = production_fleet.find_production_fleet(problem, llm.alone)
    except InfeasibleError as error:
        raise error.of_llm(llm.name) from None
    if trial is None:
        return None
    return _LlmProduction(
        on_paper=llm,
        problem=trial.problem,
        alone=trial.best,
        test=trial.test,
        kept_in=trial.kept_in,
        alone_holds=is_test_passed(trial.kept_in, trial.test.safety),
    )


def _add_common_share(
    error: InfeasibleError,
    llms: Sequence[LlmOnPaper],
    limits: FleetLimits,
    deadline: float,
    progress: Progress,
) -> InfeasibleError:
    """The same error, which also states the largest share of scenarios that all LLMs keep together, if it is
    found in time.
    """
    problems = [
        replace(with_search_scenarios(llm.problem), deadline=deadline, progress=report_nothing)
        for llm in llms
    ]
    common = in_time(partial(_find_common_share, llms, problems, limits, deadline, progress), None)
    if common is None:
        error.most_kept = None  # Its value is about one LLM alone, not about all LLMs together.
        return error
    return InfeasibleError(
        f"{error}; {common}",
        kind=error.kind,
        constraint=error.constraints,
        # If even idle workers miss a latency limit, no stock helps, and the error already says what does.
        relaxation=error.relaxation
        if error.kind == "latency"
        else f"{common.relaxation}, more stock, or safety: none",
        is_proved=error.is_proved,
        most_kept=common.most_kept([llm.paper.best for llm in llms]),
    )


def _find_common_share(
    llms: Sequence[LlmOnPaper],
    problems: Sequence[Problem],
    limits: FleetLimits,
    deadline: float,
    progress: Progress,
) -> CommonShare:
    """The largest share of scenarios that all LLMs are found to keep together: that of the fleets on paper,
    or a larger one.

    Raises StoppedError if the time is over before the share of the fleets on paper is known.
    """
    progress("production: the largest share of scenarios that all LLMs keep together")
    on_paper = [llm.paper.best for llm in llms]
    return find_common_share(problems, on_paper, limits, lambda: is_over(deadline))


def _plan_within_shared_limits(
    llms: Sequence[_LlmProduction], limits: FleetLimits, deadline: float, progress: Progress
) -> tuple[list[Counts], CheapestChoice, int] | None:
    """The steps `share`, `refine` and `test` of the module docstring: fleets within the shared limits, the
    result of the master, and the number of tests. None if the time ran out before any fleets were found.
    """

    def out_of_time() -> bool:
        return is_over(deadline)

    best: list[Counts] | None = None
    shared = CheapestChoice(best=None, value=float("inf"), bound=0.0, is_exact=False, rounds=0)
    for attempt in range(1, production_fleet.MOST_TESTS + 1):
        progress("production: the fleets of all LLMs within the limits that they share")
        chosen, shared = in_time(
            partial(_choose_fleets, llms, limits, deadline, progress), otherwise=(None, shared)
        )
        if chosen is None and out_of_time():
            return None if best is None else (best, shared, attempt - 1)
        assert chosen is not None  # Without fleets and with time left, _choose_fleets raises.
        progress("production: each LLM on scenarios that its search has not seen")
        best = _test_fleets(llms, chosen, limits, is_exact=shared.is_exact)
        failed = [llm for llm in llms if not llm.is_passed]
        if not failed or attempt == production_fleet.MOST_TESTS or out_of_time():
            return _grow_failed(llms, best, limits), shared, attempt
        for llm in failed:
            llm.add_test_scenarios()
            llm.problem = replace(llm.problem, deadline=deadline)
    raise AssertionError  # The last attempt returns.


def _choose_fleets(
    llms: Sequence[_LlmProduction], limits: FleetLimits, deadline: float, progress: Progress
) -> tuple[list[Counts] | None, CheapestChoice]:
    """The cheaper of two choices of fleets: that of the LLMs served in turn, and that of the master; and the
    result of the master. No fleets if the time ran out first.

    Raises InfeasibleError if neither finds fleets, nor the LLMs in turn with fleets of several worker types.
    """
    fleets = _serve_in_turn(llms, limits, deadline)
    known_problems = [
        _with_known_verdicts(llm, () if fleets is None else (fleets[k],)) for k, llm in enumerate(llms)
    ]
    # The master may simulate MOST_SEARCH_REQUESTS per LLM. On the search's clock a simulated request takes
    # EFFORT_S (work_clock.py).
    most_effort = effort_spent() + len(llms) * MOST_SEARCH_REQUESTS
    master_deadline = min(deadline, EFFORT_S * most_effort)
    rows, unit = shared_limits(limits, of_all=True), OBJECTIVE_UNITS[llms[0].problem.task.objective]

    def find_below(value: float, *, pools_alone: bool) -> tuple[list[list[FleetDesign]], CheapestChoice]:
        """The designs of each LLM, and the master's cheapest fleets of these below `value` in all."""
        designs = [
            designs_of(problem, llm.on_paper.alone.level0, pools_alone=pools_alone)
            for problem, llm in zip(known_problems, llms, strict=True)
        ]
        return designs, cheapest_designs(
            designs,
            rows,
            below_value=value,
            out_of_time=lambda: is_over(master_deadline),
            progress=progress,
            unit=unit,
        )

    designs, shared = find_below(math.inf, pools_alone=True)
    # Most prefill pools that miss TTFT alone miss it in every pair too; that rule (`pools_alone`) makes the
    # first search short. The second search finds the pairs for which the rule is wrong: it begins with the
    # verdicts of the first, and with its value as the upper bound.
    _, cheaper = find_below(shared.value, pools_alone=False)
    rounds = shared.rounds + cheaper.rounds
    if cheaper.best is not None:
        shared = cheaper
    shared = replace(shared, bound=min(shared.value, cheaper.bound), is_exact=cheaper.is_exact, rounds=rounds)
    candidates = [fleets] if fleets is not None else []
    if shared.best is not None:
        candidates.append([design.counts(vector) for design, vector in shared.best])
    # The master lets LLMs share nodes, which they may not if each has nodes of its own.
    candidates = [each for each in candidates if joint_limits.fit_together(limits, each)]
    if candidates:
        return min(candidates, key=lambda fleets: sum(map(objective_of, fleets))), shared
    if is_over(deadline):
        return None, shared
    now = now_s()
    # If this search finds nothing, the other half of the time is for the changes that the error proposes.
    half_time = now + (deadline - now) / 2
    progress("production: fleets of several types, the LLMs in turn")
    mixed = _serve_in_turn(llms, limits, half_time, any_mix=True)
    if mixed is not None:
        return mixed, shared
    joint_limits.require_shared_nodes(limits, len(llms))
    queries = joint_limits.SharedLimitQueries(designs, lambda: is_over(deadline), progress)
    ways = joint_limits.ways_to_fit(queries, rows)
    problems = [replace(llm.problem, deadline=deadline) for llm in llms]
    common = _find_common_share([llm.on_paper for llm in llms], problems, limits, deadline, progress)
    raise _infeasible_error(llms, limits, ways, common)


def _infeasible_error(
    llms: Sequence[_LlmProduction], limits: FleetLimits, ways: Sequence[Sequence[Change]], common: CommonShare
) -> InfeasibleError:
    """The error that no fleets fit together: which limits the fleets `alone` exceed, and `ways`, the least
    increases with which fleets of one worker type per pool fit.
    """
    alone = [(option.type, count) for llm in llms for option, count in llm.alone]
    used_texts = [
        f"{show_amount(used, limit.unit)} of {in_unit(amount, limit.unit)} ({limit.name})"
        for limit, amount in limits.rows()
        if (used := limits.used(limit, alone)) > amount * (1 + ROUNDING)
    ]
    more = f" Or, with one worker type per pool, raise {ways_text(ways)}." if ways else ""
    return InfeasibleError(
        "safety: kept_in: each LLM can be served in production alone, but no fleets were found that keep the "
        "SLOs of all in enough scenarios within the limits they share: those they would have alone take "
        f"{', '.join(used_texts)}; {common}. Ask for a smaller kept_in, or safety: none.{more}",
        kind="capacity",
        constraint=[change.limit for way in ways for change in way] or "safety: kept_in",
        relaxation="" if ways else f"{common.relaxation}, more of the limits, or safety: none",
        ways=ways,
        is_proved=False,
        most_kept=common.most_kept([llm.on_paper.paper.best for llm in llms]),
    )


def _with_known_verdicts(llm: _LlmProduction, feasible: Sequence[Counts]) -> Problem:
    """The LLM's problem with a copy of its oracle, which records as failing the fleets that failed on paper
    or in the LLM's scenarios, and as feasible those in `feasible`, and `llm.alone` unless it failed a test.

    No other feasible fleets are recorded, because the search may have simulated them in some scenarios only.
    """
    problem = llm.problem
    fails = {fleet: False for fleet, holds in llm.on_paper.problem.oracle.verdicts.items() if not holds}
    fails |= {fleet: False for fleet, holds in problem.oracle.verdicts.items() if not holds}
    problem = replace(problem, oracle=replace(problem.oracle))
    holds = [llm.alone] if llm.alone_holds else []
    problem.oracle.verdicts.update(fails | {names_of(counts): True for counts in (*holds, *feasible)})
    return problem


def _serve_in_turn(
    llms: Sequence[_LlmProduction], limits: FleetLimits, deadline: float, *, any_mix: bool = False
) -> list[Counts] | None:
    """The fleets of the LLMs by `joint_limits.serve_in_turn`: each LLM takes its fleet `alone` if that is
    within the remaining limits, or else a fleet that a search finds within them.
    """

    def serve(k: int, remaining: FleetLimits) -> Counts | None:
        """The fleet of LLM k within the limits that remain; None if none is found in time."""
        if is_over(deadline):
            return None
        problem = joint_limits.problem_within(replace(llms[k].problem, deadline=deadline), remaining)
        takes_alone = llms[k].alone_holds and problem.allows(llms[k].alone)
        return llms[k].alone if takes_alone else _find_fleet_within(llms[k], problem, any_mix=any_mix)

    return joint_limits.serve_in_turn(len(llms), limits, serve)


def _find_fleet_within(
    llm: _LlmProduction, problem: Problem, candidate: Counts | None = None, *, any_mix: bool = False
) -> Counts | None:
    """The cheapest fleet found within the problem's limits: `candidate` if none is cheaper, None if none is
    found.

    Fleets of several worker types are searched too if the best fleet on paper has several, or with `any_mix`.
    """
    start = [] if candidate is None else [problem.oracle.fleet(candidate)]
    fleet = find_cheaper_kept(problem, llm.on_paper.alone, candidate, start, any_mix=any_mix)
    return None if fleet is None else owned_first(problem, fleet)


def _test_fleets(
    llms: Sequence[_LlmProduction], chosen: list[Counts], limits: FleetLimits, *, is_exact: bool
) -> list[Counts]:
    """The steps `refine` and `test`: a fleet for each LLM within what the others leave. Each LLM stores its
    test and its result.
    """
    fleets = list(chosen)
    for k, llm in enumerate(llms):
        problem = joint_limits.problem_within(llm.problem, joint_limits.limits_beside(limits, fleets, k))
        if not is_exact or has_several_types(llm.on_paper.alone.best):
            fleets[k] = _find_fleet_within(llm, problem, fleets[k]) or fleets[k]
        fleets[k] = owned_first(problem, fleets[k])
        if llm.test is not None:
            trial = production_fleet.pick_fleet_and_test(problem, llm.on_paper.alone, fleets[k], llm.test)
            fleets[k], llm.test, llm.kept_in = trial.best, trial.test, trial.kept_in
    return fleets


def _grow_failed(llms: Sequence[_LlmProduction], fleets: list[Counts], limits: FleetLimits) -> list[Counts]:
    """The fleets, but for each that failed its last test the cheapest one that passes it and fits beside the
    others, among those with up to MOST_GROWN more workers in one pool or in all pools. A fleet stays as it is
    if none passes.
    """
    grown = list(fleets)
    for k, llm in enumerate(llms):
        if llm.is_passed or llm.test is None or llm.kept_in is None:
            continue
        problem = joint_limits.problem_within(llm.problem, joint_limits.limits_beside(limits, grown, k))
        pools = range(len(grown[k]))
        larger = [
            add_workers(grown[k], more, grown_pools)
            for more in range(1, MOST_GROWN + 1)
            for grown_pools in dict.fromkeys((*((pool,) for pool in pools), tuple(pools)))
        ]
        candidates = sorted(filter(problem.allows, larger), key=objective_of)
        trial = FleetTrial(grown[k], llm.kept_in, problem, llm.test)
        if (passing := production_fleet.first_passing(trial, candidates)) is not None:
            grown[k], llm.test, llm.kept_in = passing.best, passing.test, passing.kept_in
    return grown


def _answer_each(
    llms: Sequence[_LlmProduction], fleets: Sequence[Counts], limits: FleetLimits, deadline: float
) -> tuple[three_answers.Production | None, ...]:
    """The three answers (three_answers.py) for each LLM, None if it requires no safety.

    An LLM's fleet with a loss must fit beside one fleet of each other LLM: for an earlier LLM the fleet with
    a loss, if one was found, else the production fleet.
    """
    in_production, fleets_to_fit_beside = list(fleets), list(fleets)
    productions: list[three_answers.Production | None] = []
    for k, (llm, best) in enumerate(zip(llms, fleets, strict=True)):
        if llm.test is None or llm.kept_in is None:
            productions.append(None)
            continue
        # `with_answers` may replace the production fleet, so its problem has the limits that are left beside
        # the other production fleets.
        problem = joint_limits.problem_within(
            replace(llm.on_paper.problem, deadline=deadline),
            joint_limits.limits_beside(limits, in_production, k),
        )
        within_others = joint_limits.problem_within(
            replace(llm.problem, deadline=deadline),
            joint_limits.limits_beside(limits, fleets_to_fit_beside, k),
        )
        trial = FleetTrial(best, llm.kept_in, within_others, llm.test)
        production = three_answers.with_answers(problem, llm.on_paper.paper, trial)
        if production.with_loss is not None:
            others = (fleet for i, fleet in enumerate(fleets_to_fit_beside) if i != k)
            if not _is_within_budget(limits, (*others, production.with_loss)):
                production = three_answers.without_loss(production)
        productions.append(production)
        in_production[k] = production.best
        fleets_to_fit_beside[k] = production.best if production.with_loss is None else production.with_loss
    return tuple(productions)


def _is_within_budget(limits: FleetLimits, fleets: Iterable[Counts]) -> bool:
    """Whether the bill of these fleets, on whole nodes that they share, is within the limit on cost."""
    budget = FleetLimits(dict.fromkeys(limits.stock), cost_usd_per_h=limits.cost_usd_per_h)
    return is_within(budget, itertools.chain.from_iterable(fleets))
