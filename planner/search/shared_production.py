"""Several LLMs in production on one stock: each keeps its SLO in the share of its scenarios that it requires.

    alone   Each LLM gets its production fleet with all of the limits for itself. Where all fit, that is the
            answer.
    share   Else one master (cheapest.py) covers the designs of all LLMs. A fleet holds if it misses its SLO
            in no more of its LLM's scenarios than it may. The LLMs are also served in turn on what is left,
            which finds fleets of several types too.
    refine  Each LLM is searched within what the others leave, where its fleet may have several types.
    test    Each fleet is tested in scenarios that no search has seen. Those of a fleet that fails join the
            scenarios of its LLM, and all LLMs share again.

Scenarios of different LLMs are drawn independently: each LLM keeps its own SLO in enough of them, and nothing
is claimed of all LLMs at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.documents.facts import KeptIn, ProductionShared
from planner.errors import Change, InfeasibleError, ways_text
from planner.search.answers import TRIES, Production, Test, Tried, is_passed, tested, tried, with_answers
from planner.search.best_fleet import Found
from planner.search.cheapest import Cheapest, cheapest, shared_limits
from planner.search.fleets import Counts, named, objective
from planner.search.joint_limits import Asking, beside, fit, in_turn, ways_to_fit, within
from planner.search.level0 import designs_of
from planner.search.owned import owned_first
from planner.search.problem import Problem, Progress, silent
from planner.search.production import MOST_SEARCH, cheaper_kept, in_most, in_production, may_miss
from planner.search.shared_kept import InCommon, most_in_common
from planner.search.shared_paper import slice_of
from planner.search.waves import side_by_side
from planner.solvers.master import Limits


@dataclass(frozen=True, slots=True, eq=False)
class OnPaper:
    """One LLM as it was planned on paper: its problem with all of the limits for itself, its best fleet then,
    and its fleet on paper beside those of the others.
    """

    name: str
    problem: Problem
    alone: Found
    paper: Found


@dataclass(frozen=True, slots=True, eq=False)
class SharedProduction:
    """The result for each LLM: its production, None where it requires no safety; its fleet; and the fleet
    that it takes with all of the limits for itself.
    """

    made: tuple[Production | None, ...]
    fleets: tuple[Counts, ...]
    alone: tuple[Counts, ...]
    how: ProductionShared


@dataclass(slots=True, eq=False)
class _Llm:
    """What is known of an LLM: its problem in scenarios, the hardest first, and the test of its fleets."""

    on_paper: OnPaper
    asked: Problem
    alone: Counts
    test: Test | None  # None where no safety is required.
    kept_in: KeptIn | None
    alone_holds: bool = True  # Whether no test has refuted the fleet alone.

    @property
    def is_passed(self) -> bool:
        """Whether the fleet passed its test, or needs none."""
        return self.test is None or (self.kept_in is not None and is_passed(self.kept_in, self.test.safety))

    def try_again(self) -> None:
        """Add the scenarios of the failed test to those of the search."""
        assert self.test is not None and self.kept_in is not None
        count = self.kept_in.futures
        futures = [self.test.futures[self.test.first + i] for i in range(count)]
        futures += self.asked.oracle.futures
        self.asked = in_most(self.on_paper.problem, futures, may_miss(self.test.safety, len(futures)))
        self.test.first += count
        self.alone_holds = False


def share_production(
    llms: Sequence[OnPaper], limits: Limits, deadline: float, progress: Progress
) -> SharedProduction | None:
    """The cheapest fleets found that keep each SLO in enough scenarios and fit together within the limits.

    None where the time was over. Raises InfeasibleError if one LLM cannot be served so even alone, or no
    fleets of all were found that fit together; the message names the least increase of each limit that would
    do.
    """
    known: list[_Llm] = []
    for k, one in enumerate(llms):
        progress(f"{one.name}: production, with all of the fleet for itself")
        try:
            found = _alone(one, slice_of(deadline, len(llms) - k))
        except InfeasibleError as error:
            raise _with_share(error, llms, limits, deadline, progress) from None
        if found is None:
            return None
        known.append(found)
    fleets, shared, tries = [llm.alone for llm in known], None, 0
    if not fit(limits, fleets):
        chosen = _together(known, limits, deadline, progress)
        if chosen is None:
            return None
        fleets, shared, tries = chosen
    made = _with_answers(known, fleets, limits, deadline)
    how = ProductionShared(
        shared is None, 0 if shared is None else shared.rounds, shared is not None and shared.is_exact, tries
    )
    return SharedProduction(made, tuple(fleets), tuple(llm.alone for llm in known), how)


def _alone(one: OnPaper, until: float) -> _Llm | None:
    """The production of one LLM with all of the limits for itself; None where the time was over."""
    problem = replace(one.problem, deadline=until)
    if problem.task.safety is None:
        return _Llm(one, problem, one.alone.best, None, None)
    try:
        found = tried(problem, one.alone)
    except InfeasibleError as error:
        raise error.of(f"{one.name}, even with all of the fleet for itself") from None
    if found is None:
        return None
    holds = is_passed(found.kept_in, found.test.safety)
    return _Llm(one, found.asked, found.best, found.test, found.kept_in, holds)


def _with_share(
    error: InfeasibleError, llms: Sequence[OnPaper], limits: Limits, deadline: float, progress: Progress
) -> InfeasibleError:
    """The error with the largest share of scenarios that all LLMs keep together."""
    asked = [replace(in_production(one.problem), deadline=deadline, progress=silent) for one in llms]
    common = _in_common(llms, asked, limits, deadline, progress)
    return InfeasibleError(
        f"{error}; {common}",
        kind=error.kind,
        constraint=error.constraints,
        relaxation=f"{common.relaxation}, more stock, or safety: none",
        is_proved=error.is_proved,
    )


def _in_common(
    llms: Sequence[OnPaper], asked: Sequence[Problem], limits: Limits, deadline: float, progress: Progress
) -> InCommon:
    """The largest share of scenarios that all LLMs keep together, from their fleets on paper on."""
    progress("production: the largest share of scenarios that all LLMs keep together")
    on_paper = [one.paper.best for one in llms]
    return most_in_common(asked, on_paper, limits, lambda: time.monotonic() > deadline)


def _together(
    llms: Sequence[_Llm], limits: Limits, deadline: float, progress: Progress
) -> tuple[list[Counts], Cheapest, int] | None:
    """Fleets within the shared limits, the result of the master, and the number of tests; None where the time
    was over before any fleets were found.
    """

    def out_of_time() -> bool:
        return time.monotonic() > deadline

    for llm in llms:
        llm.asked = replace(llm.asked, deadline=deadline, most_effort=float("inf"), progress=silent)
        if llm.test is not None:
            llm.test.out_of_time = out_of_time
    best: list[Counts] | None = None
    shared = Cheapest(None, float("inf"), 0.0, False, 0)
    for attempt in range(1, TRIES + 1):
        progress("production: the fleets of all LLMs within the limits that they share")
        chosen, shared = _chosen(llms, limits, deadline, progress)
        if chosen is None and out_of_time():
            return None if best is None else (best, shared, attempt - 1)
        assert chosen is not None  # Without fleets and with time left, _choose_fleets raises.
        progress("production: each LLM on scenarios that its search has not seen")
        best = _tested(llms, chosen, limits, is_exact=shared.is_exact)
        failed = [llm for llm in llms if not llm.is_passed]
        if not failed or attempt == TRIES or out_of_time():
            return best, shared, attempt
        for llm in failed:
            llm.try_again()
            llm.asked = replace(llm.asked, deadline=deadline)
    raise AssertionError


def _chosen(
    llms: Sequence[_Llm], limits: Limits, deadline: float, progress: Progress
) -> tuple[list[Counts] | None, Cheapest]:
    """The cheaper of what the LLMs take in turn and what the master finds; None where the time was over."""
    fleets = _in_turn(llms, limits, deadline)
    asked = [_with_what_is_known(llm, () if fleets is None else (fleets[k],)) for k, llm in enumerate(llms)]
    oracles = [problem.oracle for problem in asked]
    most = sum(oracle.effort() for oracle in oracles) + len(llms) * MOST_SEARCH

    def is_over() -> bool:
        return time.monotonic() > deadline or sum(oracle.effort() for oracle in oracles) > most

    designs = [
        designs_of(problem, llm.on_paper.alone.level0) for problem, llm in zip(asked, llms, strict=True)
    ]
    rows = shared_limits(limits)
    shared = cheapest(designs, rows, run=side_by_side, out_of_time=is_over, progress=progress)
    found = [fleets] if fleets is not None else []
    if shared.best is not None:
        found.append([design.counts(vector) for design, vector in shared.best])
    if found:
        return min(found, key=lambda fleets: sum(map(objective, fleets))), shared
    if (now := time.monotonic()) > deadline:
        return None, shared
    progress("production: fleets of several types, the LLMs in turn")
    mixed = _in_turn(llms, limits, now + (deadline - now) / 2, any_mix=True)
    if mixed is not None:
        return mixed, shared
    ask = Asking(designs, lambda: time.monotonic() > deadline, progress)
    ways = ways_to_fit(ask, rows)
    problems = [replace(llm.asked, deadline=deadline) for llm in llms]
    common = _in_common([llm.on_paper for llm in llms], problems, limits, deadline, progress)
    raise _infeasible(llms, limits, ways, common)


def _infeasible(
    llms: Sequence[_Llm], limits: Limits, ways: Sequence[Sequence[Change]], common: InCommon
) -> InfeasibleError:
    """The error that names what the fleets alone use of each limit, and the least increase that would do."""
    alone = [(option.type, count) for llm in llms for option, count in llm.alone]
    over = [
        f"{used:g} of {amount:g} {limit.unit} ({limit.name})"
        for limit, amount in limits.rows()
        if (used := sum(limits.use(limit, worker) * count for worker, count in alone)) > amount * (1 + 1e-9)
    ]
    more = f" Or, with one worker type per pool, raise {ways_text(ways)}." if ways else ""
    return InfeasibleError(
        "safety: kept_in: each LLM can be served in production alone, but no fleets were found that keep the "
        "SLOs of all in enough scenarios within the limits they share: those they would have alone take "
        f"{', '.join(over)}; {common}. Ask for a smaller kept_in, or safety: none.{more}",
        kind="capacity",
        constraint=[change.limit for way in ways for change in way] or "safety: kept_in",
        relaxation="" if ways else f"{common.relaxation}, more of the limits, or safety: none",
        ways=ways,
        is_proved=False,
    )


def _with_what_is_known(llm: _Llm, held: Sequence[Counts]) -> Problem:
    """The problem with its own oracle, which knows the fleets that fail on paper or in the LLM's scenarios,
    and those that hold.

    A search may have simulated some of the scenarios alone, so fleets that held there are not known to hold
    in all.
    """
    asked = llm.asked
    fails = {fleet: False for fleet, holds in llm.on_paper.problem.oracle.told.items() if not holds}
    fails |= {fleet: False for fleet, holds in asked.oracle.told.items() if not holds}
    asked = replace(asked, oracle=replace(asked.oracle))
    holds = [llm.alone] if llm.alone_holds else []
    asked.oracle.told.update(fails | {named(counts): True for counts in (*holds, *held)})
    return asked


def _in_turn(
    llms: Sequence[_Llm], limits: Limits, deadline: float, *, any_mix: bool = False
) -> list[Counts] | None:
    """The fleets of the LLMs, served one after another on what is left, as `serve_in_turn` does."""

    def serve(k: int, left: Limits) -> Counts | None:
        if time.monotonic() > deadline:
            return None
        asked = within(replace(llms[k].asked, deadline=deadline), left)
        is_known = llms[k].alone_holds and asked.allows(llms[k].alone)
        return llms[k].alone if is_known else _on_what_is_left(llms[k], asked, any_mix=any_mix)

    return in_turn(len(llms), limits, serve)


def _on_what_is_left(
    llm: _Llm, asked: Problem, known: Counts | None = None, *, any_mix: bool = False
) -> Counts | None:
    """The cheapest fleet found within the problem's limits, `known` where none is cheaper; None if there is
    none.

    Fleets of several types are searched too where the best on paper is one, or with `any_mix`.
    """
    start = [] if known is None else [asked.oracle.fleet(known)]
    found = cheaper_kept(asked, llm.on_paper.alone, known, start, any_mix=any_mix)
    return None if found is None else owned_first(asked, found)


def _tested(llms: Sequence[_Llm], chosen: list[Counts], limits: Limits, *, is_exact: bool) -> list[Counts]:
    """The fleet of each LLM within what the others leave, after its test; the LLM stores the result."""
    fleets = list(chosen)
    for k, llm in enumerate(llms):
        asked = within(llm.asked, beside(limits, fleets, k))
        roles = [option.role for option, _ in llm.on_paper.alone.best]
        if not is_exact or len(set(roles)) < len(roles):
            fleets[k] = _on_what_is_left(llm, asked, fleets[k]) or fleets[k]
        fleets[k] = owned_first(asked, fleets[k])
        if llm.test is not None:
            fleets[k], llm.kept_in = tested(asked, llm.on_paper.alone, fleets[k], llm.test)
    return fleets


def _with_answers(
    llms: Sequence[_Llm], fleets: Sequence[Counts], limits: Limits, deadline: float
) -> tuple[Production | None, ...]:
    """The answers of each LLM. A fleet with a loss must fit beside the fleets of the others, with a loss
    where they have one already.
    """
    taken, made = list(fleets), list[Production | None]()
    for k, (llm, best) in enumerate(zip(llms, fleets, strict=True)):
        if llm.test is None or llm.kept_in is None:
            made.append(None)
            continue
        problem = replace(llm.on_paper.problem, deadline=deadline)
        asked = within(replace(llm.asked, deadline=deadline), beside(limits, taken, k))
        found = Tried(best, llm.kept_in, asked, llm.test)
        made.append(one := with_answers(problem, llm.on_paper.paper, found))
        if one.with_loss is not None:
            taken[k] = one.with_loss
    return tuple(made)
