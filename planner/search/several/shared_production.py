"""Several LLMs in production on one stock: each keeps its SLO in the share of its scenarios that it requires.

    alone   Each LLM gets its production fleet with all of the limits for itself. Where all fit, that is the
            answer.
    share   Otherwise one master (level0/cheapest.py) chooses among the designs of all LLMs. A fleet holds if
            it misses its SLO in no more of its LLM's scenarios than it may. The LLMs are also served in turn,
            each on what those before it leave, which finds fleets of several types too.
    refine  Each LLM is searched within what the others leave, where its fleet may have several types.
    test    Each fleet is tested in scenarios that no search has seen. The test scenarios of a fleet that
            fails join the search scenarios of its LLM, and `share` begins again.

Scenarios of different LLMs are drawn independently: each LLM keeps its own SLO in enough of them, and nothing
is claimed of all LLMs at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.documents.facts import KeptIn, NoneTogether, ProductionShared
from planner.domain import ROUNDING
from planner.errors import Change, InfeasibleError, ways_text
from planner.search.level0.cheapest import Cheapest, cheapest, shared_limits
from planner.search.level0.level0_search import designs_of
from planner.search.mixed.best_fleet import FleetSearch
from planner.search.oracle.deterministic_parallel import effort_spent, side_by_side
from planner.search.oracle.fleet_counts import Counts, names_of, objective
from planner.search.oracle.work_clock import EFFORT_S, is_over, now_s
from planner.search.problem.owned_first import owned_first
from planner.search.problem.plan_problem import (
    Problem,
    Progress,
    report_nothing,
    with_scenarios,
    with_search_scenarios,
)
from planner.search.production import three_answers
from planner.search.production.cheapest_kept import MOST_SEARCH_REQUESTS, find_cheaper_kept
from planner.search.production.scenario_test import FleetTrial, ScenarioTest, is_test_passed
from planner.search.several import joint_limits
from planner.search.several.shared_kept import CommonShare, find_common_share
from planner.search.several.shared_paper import slice_of
from planner.solvers.master import FleetLimits


@dataclass(frozen=True, slots=True, eq=False)
class LlmOnPaper:
    """One LLM as it was planned on paper: its problem with all of the limits for itself, its best fleet then,
    and its fleet on paper beside those of the others.
    """

    name: str
    problem: Problem
    alone: FleetSearch
    paper: FleetSearch


@dataclass(frozen=True, slots=True, eq=False)
class SharedProduction:
    """The result for each LLM: its production, None if it requires no safety; its fleet; and the fleet that
    it takes with all of the limits for itself. `how_chosen` is None if the fleets are those on paper.
    """

    productions: tuple[three_answers.Production | None, ...]
    fleets: tuple[Counts, ...]
    alone: tuple[Counts, ...]
    how_chosen: ProductionShared | None


@dataclass(slots=True, eq=False)
class _LlmProduction:
    """What is known of an LLM: its problem in scenarios, the hardest first, and the test of its fleets."""

    on_paper: LlmOnPaper
    problem: Problem
    alone: Counts
    test: ScenarioTest | None  # None where no safety is required.
    kept_in: KeptIn | None
    alone_holds: bool = True  # Whether no test has refuted the fleet alone.

    @property
    def is_passed(self) -> bool:
        """Whether the fleet passed its test, or needs none."""
        return self.test is None or (
            self.kept_in is not None and is_test_passed(self.kept_in, self.test.safety)
        )

    def add_test_scenarios(self) -> None:
        """Add the scenarios of the failed test to those of the search."""
        assert self.test is not None and self.kept_in is not None
        count = self.kept_in.futures  # How many scenarios were simulated.
        scenarios = [self.test.scenarios[self.test.first + i] for i in range(count)]
        scenarios += self.problem.oracle.scenarios
        self.problem = with_scenarios(
            self.on_paper.problem, scenarios, self.test.safety.most_missed(len(scenarios))
        )
        self.test.first += count
        self.alone_holds = False


def share_production(
    llms: Sequence[LlmOnPaper], limits: FleetLimits, deadline: float, progress: Progress
) -> SharedProduction | None:
    """The cheapest fleets found that keep each SLO in enough scenarios and fit together within the limits.

    None where the time was over. Raises InfeasibleError if one LLM cannot be served so even alone, or no
    fleets of all were found that fit together; its message names the least increase of each limit with which
    they would.
    """
    llm_productions: list[_LlmProduction] = []
    for k, one in enumerate(llms):
        progress(f"{one.name}: production, with all of the fleet for itself")
        try:
            llm = _plan_alone(one, slice_of(deadline, len(llms) - k))
        except InfeasibleError as error:
            raise _add_common_share(error, llms, limits, deadline, progress) from None
        if llm is None:
            return None
        llm_productions.append(llm)
    fleets, shared, tries = [llm.alone for llm in llm_productions], None, 0
    if not joint_limits.fit_together(limits, fleets):
        chosen = _plan_within_shared_limits(llm_productions, limits, deadline, progress)
        if chosen is None:
            return None
        fleets, shared, tries = chosen
    productions = _answer_each(llm_productions, fleets, limits, deadline)
    how_chosen = ProductionShared(
        is_each=shared is None,
        rounds=0 if shared is None else shared.rounds,
        is_exact=shared is not None and shared.is_exact,
        tries=tries,
    )
    return SharedProduction(
        productions, tuple(fleets), tuple(llm.alone for llm in llm_productions), how_chosen
    )


def production_or_paper_of_all(
    llms: Sequence[LlmOnPaper], limits: FleetLimits, deadline: float, progress: Progress
) -> SharedProduction | None:
    """As `share_production`; the fleets on paper, with the reason, where the LLMs cannot all be kept."""
    try:
        return share_production(llms, limits, deadline, progress)
    except InfeasibleError as error:
        why = NoneTogether(str(error).rstrip("."), error.relaxation)
    progress("production: in how many scenarios the fleets on paper are kept")
    productions = tuple(
        None
        if one.problem.task.safety is None
        else three_answers.paper_in_scenarios(replace(one.problem, deadline=deadline), one.paper, why)
        for one in llms
    )
    fleets = tuple(one.paper.best for one in llms)
    return SharedProduction(productions, fleets, tuple(one.alone.best for one in llms), how_chosen=None)


def _plan_alone(one: LlmOnPaper, until: float) -> _LlmProduction | None:
    """The production of one LLM with all of the limits for itself; None where the time was over."""
    problem = replace(one.problem, deadline=until)
    if problem.task.safety is None:
        return _LlmProduction(one, problem, one.alone.best, test=None, kept_in=None)
    try:
        trial = three_answers.find_production_fleet(problem, one.alone)
    except InfeasibleError as error:
        raise error.of_llm(f"{one.name}, even with all of the fleet for itself") from None
    if trial is None:
        return None
    return _LlmProduction(
        on_paper=one,
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
    """The error with the largest share of scenarios that all LLMs keep together."""
    problems = [
        replace(with_search_scenarios(one.problem), deadline=deadline, progress=report_nothing)
        for one in llms
    ]
    common = _find_common_share(llms, problems, limits, deadline, progress)
    return InfeasibleError(
        f"{error}; {common}",
        kind=error.kind,
        constraint=error.constraints,
        relaxation=f"{common.relaxation}, more stock, or safety: none",
        is_proved=error.is_proved,
    )


def _find_common_share(
    llms: Sequence[LlmOnPaper],
    problems: Sequence[Problem],
    limits: FleetLimits,
    deadline: float,
    progress: Progress,
) -> CommonShare:
    """The largest share of scenarios that all LLMs keep together, from their fleets on paper on."""
    progress("production: the largest share of scenarios that all LLMs keep together")
    on_paper = [one.paper.best for one in llms]
    return find_common_share(problems, on_paper, limits, lambda: is_over(deadline))


def _plan_within_shared_limits(
    llms: Sequence[_LlmProduction], limits: FleetLimits, deadline: float, progress: Progress
) -> tuple[list[Counts], Cheapest, int] | None:
    """Fleets within the shared limits, the result of the master, and the number of tests; None where the time
    was over before any fleets were found.
    """

    def out_of_time() -> bool:
        return is_over(deadline)

    for llm in llms:
        llm.problem = replace(llm.problem, deadline=deadline, progress=report_nothing)
        if llm.test is not None:
            llm.test.out_of_time = out_of_time
    best: list[Counts] | None = None
    shared = Cheapest(best=None, value=float("inf"), bound=0.0, is_exact=False, rounds=0)
    for attempt in range(1, three_answers.MOST_TESTS + 1):
        progress("production: the fleets of all LLMs within the limits that they share")
        chosen, shared = _choose_fleets(llms, limits, deadline, progress)
        if chosen is None and out_of_time():
            return None if best is None else (best, shared, attempt - 1)
        assert chosen is not None  # Without fleets and with time left, _choose_fleets raises.
        progress("production: each LLM on scenarios that its search has not seen")
        best = _test_fleets(llms, chosen, limits, is_exact=shared.is_exact)
        failed = [llm for llm in llms if not llm.is_passed]
        if not failed or attempt == three_answers.MOST_TESTS or out_of_time():
            return best, shared, attempt
        for llm in failed:
            llm.add_test_scenarios()
            llm.problem = replace(llm.problem, deadline=deadline)
    raise AssertionError  # The last attempt returns.


def _choose_fleets(
    llms: Sequence[_LlmProduction], limits: FleetLimits, deadline: float, progress: Progress
) -> tuple[list[Counts] | None, Cheapest]:
    """The cheaper of what the LLMs take in turn and what the master finds; None where the time was over."""
    fleets = _serve_in_turn(llms, limits, deadline)
    known_problems = [
        _with_known_verdicts(llm, () if fleets is None else (fleets[k],)) for k, llm in enumerate(llms)
    ]
    # The search may simulate so many requests per LLM. On its clock a request takes EFFORT_S (work_clock.py).
    most_effort = effort_spent() + len(llms) * MOST_SEARCH_REQUESTS
    until = min(deadline, EFFORT_S * most_effort)
    designs = [
        designs_of(problem, llm.on_paper.alone.level0)
        for problem, llm in zip(known_problems, llms, strict=True)
    ]
    rows = shared_limits(limits)
    shared = cheapest(designs, rows, run=side_by_side, out_of_time=lambda: is_over(until), progress=progress)
    candidates = [fleets] if fleets is not None else []
    if shared.best is not None:
        candidates.append([design.counts(vector) for design, vector in shared.best])
    if candidates:
        return min(candidates, key=lambda fleets: sum(map(objective, fleets))), shared
    if is_over(deadline):
        return None, shared
    now = now_s()
    half_time = now + (deadline - now) / 2  # The rest is for what would help, if this finds nothing.
    progress("production: fleets of several types, the LLMs in turn")
    mixed = _serve_in_turn(llms, limits, half_time, any_mix=True)
    if mixed is not None:
        return mixed, shared
    queries = joint_limits.SharedLimitQueries(designs, lambda: is_over(deadline), progress)
    ways = joint_limits.ways_to_fit(queries, rows)
    problems = [replace(llm.problem, deadline=deadline) for llm in llms]
    common = _find_common_share([llm.on_paper for llm in llms], problems, limits, deadline, progress)
    raise _infeasible_error(llms, limits, ways, common)


def _infeasible_error(
    llms: Sequence[_LlmProduction], limits: FleetLimits, ways: Sequence[Sequence[Change]], common: CommonShare
) -> InfeasibleError:
    """The error that names what the fleets alone use of each limit, and the least increase that would do."""
    alone = [(option.type, count) for llm in llms for option, count in llm.alone]
    used_texts = [
        f"{used:g} of {amount:g} {limit.unit} ({limit.name})"
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
    )


def _with_known_verdicts(llm: _LlmProduction, feasible: Sequence[Counts]) -> Problem:
    """The problem with its own oracle, which knows the fleets that fail on paper or in the LLM's scenarios,
    and those that hold.

    A search may have simulated some of the scenarios alone, so fleets that held there are not known to hold
    in all.
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
    """The fleets of the LLMs, served one after another on what is left, as `serve_in_turn` does."""

    def serve(k: int, left: FleetLimits) -> Counts | None:
        if is_over(deadline):
            return None
        problem = joint_limits.problem_within(replace(llms[k].problem, deadline=deadline), left)
        is_known = llms[k].alone_holds and problem.allows(llms[k].alone)
        return llms[k].alone if is_known else _find_fleet_within(llms[k], problem, any_mix=any_mix)

    return joint_limits.serve_in_turn(len(llms), limits, serve)


def _find_fleet_within(
    llm: _LlmProduction, problem: Problem, candidate: Counts | None = None, *, any_mix: bool = False
) -> Counts | None:
    """The cheapest fleet found within the problem's limits, `candidate` where none is cheaper; None if there
    is none.

    Fleets of several types are searched too where the best on paper is one, or with `any_mix`.
    """
    start = [] if candidate is None else [problem.oracle.fleet(candidate)]
    fleet = find_cheaper_kept(problem, llm.on_paper.alone, candidate, start, any_mix=any_mix)
    return None if fleet is None else owned_first(problem, fleet)


def _test_fleets(
    llms: Sequence[_LlmProduction], chosen: list[Counts], limits: FleetLimits, *, is_exact: bool
) -> list[Counts]:
    """The fleet of each LLM within what the others leave, after its test; the LLM stores the result."""
    fleets = list(chosen)
    for k, llm in enumerate(llms):
        problem = joint_limits.problem_within(llm.problem, joint_limits.limits_beside(limits, fleets, k))
        roles = [option.role for option, _ in llm.on_paper.alone.best]
        # Two pools of one role: the best fleet on paper has several types.
        has_several_types = len(set(roles)) < len(roles)
        if not is_exact or has_several_types:
            fleets[k] = _find_fleet_within(llm, problem, fleets[k]) or fleets[k]
        fleets[k] = owned_first(problem, fleets[k])
        if llm.test is not None:
            fleets[k], llm.test, llm.kept_in = three_answers.pick_fleet_and_test(
                problem, llm.on_paper.alone, fleets[k], llm.test
            )
    return fleets


def _answer_each(
    llms: Sequence[_LlmProduction], fleets: Sequence[Counts], limits: FleetLimits, deadline: float
) -> tuple[three_answers.Production | None, ...]:
    """The answers of each LLM. A fleet with a loss must fit beside the fleets of the others, with a loss
    where they have one already.
    """
    fleets_or_loss_proof = list(fleets)
    productions: list[three_answers.Production | None] = []
    for k, (llm, best) in enumerate(zip(llms, fleets, strict=True)):
        if llm.test is None or llm.kept_in is None:
            productions.append(None)
            continue
        problem = replace(llm.on_paper.problem, deadline=deadline)
        within_others = joint_limits.problem_within(
            replace(llm.problem, deadline=deadline),
            joint_limits.limits_beside(limits, fleets_or_loss_proof, k),
        )
        trial = FleetTrial(best, llm.kept_in, within_others, llm.test)
        production = three_answers.with_answers(problem, llm.on_paper.paper, trial)
        productions.append(production)
        if production.with_loss is not None:
            fleets_or_loss_proof[k] = production.with_loss
    return tuple(productions)
