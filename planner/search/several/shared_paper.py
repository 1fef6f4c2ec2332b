"""Plans several LLMs on one stock on paper: the stages `alone`, `share`, `plans` and `prices` of
several_llms.py.

Each LLM is first searched alone, as if it had the limits for itself; later stages reuse these simulations. An
LLM that requires safety keeps the policies with which its production alone costs least. No LLM costs less
beside the others than alone, so the certificate can say what each LLM pays for sharing (`gives_way_facts`).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from planner.documents.catalog import Catalog
from planner.documents.facts import Binding, Finding, GivesWay, OthersLeave, Remainder
from planner.documents.several_llms_question import LlmQuestion
from planner.domain import ROUNDING, FleetLimit
from planner.errors import InfeasibleError, OutOfTimeError, PlannerError
from planner.search.evidence.certify import search_llm
from planner.search.level0.cheapest import CheapestChoice, cheapest_designs, shared_limits
from planner.search.level0.designs import FleetDesign, learn_from
from planner.search.level0.level0_search import WALK_EFFORT, designs_of, search_level0
from planner.search.level0.one_pool import Level0Search
from planner.search.level0.walk import cheaper_fleets, count_cheaper
from planner.search.mixed.best_fleet import FleetSearch, PolicySearch, best_of, find_best_fleet
from planner.search.mixed.bounds import lower_bound
from planner.search.oracle.deterministic_parallel import effort_spent
from planner.search.oracle.fleet_counts import Counts, names_of, objective_of, workers_of
from planner.search.oracle.fleet_oracle import LEAST_EFFORT, Oracle
from planner.search.oracle.verdict_cache import VerdictCache
from planner.search.oracle.work_clock import is_over, now_s
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.options import OBJECTIVE_UNITS
from planner.search.problem.owned_first import objective_paid, paid_at_least
from planner.search.problem.plan_problem import Conditions, Problem, Progress, on_all_draws
from planner.search.problem.stages import Message, phase_of
from planner.search.production.kept_policies import choose_policies
from planner.search.several import joint_limits
from planner.solvers.master import FleetLimits

# At most this many choices of fleets for the nodes of the least bill are tested. Set by hand.
MOST_BILL_TESTS = 4
LlmSearches = list[PolicySearch]
"""The searches for one LLM, under each choice of policies."""


@dataclass(frozen=True, slots=True)
class SharedPaper:
    """The fleets of all LLMs on paper: for each LLM its search (`searched`), and what the other LLMs leave it
    of the limits (`left_to_each`; None if no LLM is in another's way).

    `level0` is the result of level 0 over all LLMs; with `is_walked` every cheaper fleet was simulated.
    `binding` says which limits bind; `oracles` are those used besides the oracles of the searches of each LLM
    alone, to count their simulations too.
    """

    searched: Sequence[LlmSearches]
    left_to_each: Sequence[OthersLeave | None]
    level0: CheapestChoice
    is_walked: bool
    binding: tuple[Binding, ...]
    oracles: Sequence[Oracle]


def plan_on_paper(
    entries: Sequence[LlmQuestion],
    catalog: Catalog,
    limits: FleetLimits,
    *,
    seed: int,
    deadline: float,
    progress: Progress,
    keeps_half: bool,
) -> tuple[list[LlmSearches], SharedPaper]:
    """The searches of each LLM alone, and the fleets of all LLMs together.

    With `keeps_half` the search of all LLMs together may take half of the time that the searches alone leave;
    the other half is for production.
    """
    alone: list[LlmSearches] = []
    cache = VerdictCache()
    for k, entry in enumerate(entries):
        progress(f"{entry.name}, with all of the fleet for itself")
        until = share_deadline(deadline, len(entries) - k)
        own_conditions = Conditions(
            until, _progress_of_llm(entry.name, progress), cache=cache, by_gpu=limits.by_gpu
        )
        searched = _search_alone(entry, catalog, seed, own_conditions)
        if entry.task.safety is not None:
            # All fleets of the LLM get the policies with which its production alone costs least.
            searched, trial = choose_policies(searched)
            searched = searched if trial is None else searched[:1]
        alone.append(searched)
    if not joint_limits.fit_together(limits, (best_search(searched).best for searched in alone)):
        until = share_deadline(deadline, 1) if keeps_half else deadline
        return alone, _plan_shared(entries, alone, limits, until, progress)
    is_walked = all(best.level0.search.is_exact for searched in alone for _, best in searched)
    nothing_left_out = (None,) * len(entries)
    level0 = _level0_where_all_fit(alone, limits)
    binding = (Finding("no-shared-limit"),)
    return alone, SharedPaper(alone, nothing_left_out, level0, is_walked, binding, oracles=())


def _progress_of_llm(name: str, progress: Progress) -> Progress:
    """A function that reports the progress of one LLM's search under the LLM's name, and not as a stage of
    the whole plan.
    """

    def report(message: str) -> None:
        best_so_far = message.best_so_far if isinstance(message, Message) else ""
        progress(Message(f"{name}: {phase_of(message)}", best_so_far))

    return report


def best_search(searched: LlmSearches) -> FleetSearch:
    """The search with the best fleet of all policies."""
    _, search = best_of(searched)
    return search


def best_value(searched: LlmSearches) -> float:
    """The objective of the best fleet of all policies, in its unit."""
    problem, best = best_of(searched)
    return objective_paid(problem, best.best)


def _plan_shared(
    entries: Sequence[LlmQuestion],
    searched_alone: Sequence[LlmSearches],
    limits: FleetLimits,
    deadline: float,
    progress: Progress,
) -> SharedPaper:
    """The fleets of LLMs whose fleets alone exceed the limits together: the best choice for all LLMs, then
    each LLM searched within what the others leave.
    """
    searched = _on_all_draws(searched_alone)
    until = share_deadline(deadline, 1)
    rows = shared_limits(limits, of_all=True)
    _simulate_in_turn(searched, limits, share_deadline(until, 1), progress)
    llms = _designs_of_all(searched)
    queries = joint_limits.SharedLimitQueries(llms, lambda: is_over(deadline), progress)
    unit = OBJECTIVE_UNITS[entries[0].task.objective]
    shared = cheapest_designs(llms, rows, out_of_time=lambda: is_over(until), progress=progress, unit=unit)
    oracles = [problem.oracle for llm_searches in searched for problem, _ in llm_searches]
    alone_values = list(map(best_value, searched_alone))
    if shared.best is None:
        is_proved = _fewest_are_too_many(searched, limits)
        mixed = None if is_proved else _serve_any_mix(searched, limits, share_deadline(deadline, 1), progress)
        if mixed is None:
            joint_limits.require_shared_nodes(limits, len(entries))
            raise joint_limits.infeasible_error(queries, rows, is_exact=shared.is_exact, is_proved=is_proved)
        together, left_to_each = _search_within_others(entries, *mixed, deadline)
        least = sum(map(_level0_value, together))
        level0 = CheapestChoice(None, least, 0.0, is_exact=False, rounds=shared.rounds)
        paid_for_sharing = gives_way_facts(entries, alone_values, list(map(best_value, together)), unit)
        return SharedPaper(together, left_to_each, level0, False, paid_for_sharing, oracles)
    is_walked = shared.is_exact and _simulate_all_cheaper(searched, llms, shared, deadline)
    if is_walked:
        # If a simulated fleet holds although a larger one fails, there may be a better choice.
        better = queries.find_cheapest(rows, below_value=shared.value)
        if better.best is not None:
            is_walked, shared = False, better
    assert shared.best is not None
    problems, chosen = [], []
    for design, vector in shared.best:
        assert isinstance(design.llm_problem, Problem)
        problems.append(design.llm_problem)
        chosen.append(design.counts(vector))
    if not joint_limits.fit_together(limits, chosen):  # The master lets LLMs share nodes.
        joint_limits.require_shared_nodes(limits, len(entries))
    together, left_to_each = _search_within_others(entries, problems, chosen, deadline)
    paid_for_sharing = gives_way_facts(entries, alone_values, list(map(best_value, together)), unit)
    binding = paid_for_sharing
    # The queries count nodes that LLMs share, so for nodes of their own they give no prices.
    if limits.by_gpu:
        binding += joint_limits.price_limits(queries, rows, shared, entries[0].task.objective)
    shared = _without_tie_breaks(shared, zip(problems, chosen, strict=True))
    # Where more workers hurt, the search of one LLM may find a smaller fleet that the master's cuts excluded.
    if (least := sum(map(_level0_value, together))) < shared.value * (1 - ROUNDING):
        shared = replace(shared, value=least, bound=min(shared.bound, least), is_exact=False)
    return SharedPaper(together, left_to_each, shared, is_walked, binding, oracles)


def _on_all_draws(searched: Sequence[LlmSearches]) -> list[LlmSearches]:
    """The searches of each LLM, with their problems on all draws of the traffic."""
    return [
        [search._replace(problem=on_all_draws(search.problem)) for search in searches]
        for searches in searched
    ]


def _designs_of_all(searched: Sequence[LlmSearches]) -> list[list[FleetDesign]]:
    """The designs of each LLM under all choices of its policies."""
    return [
        [design for problem, best in llm_searches for design in designs_of(problem, best.level0)]
        for llm_searches in searched
    ]


def find_nodes_of_least_bill(
    searched_alone: Sequence[LlmSearches],
    limits: FleetLimits,
    below_usd_per_h: float,
    deadline: float,
    progress: Progress,
    passes_test: Callable[[int, Counts], bool],
) -> dict[str, int] | None:
    """How many GPUs of each stock are paid for the fleets of the least bill, including the idle GPUs of whole
    nodes. None if no fleets with one worker type per pool and a bill below `below_usd_per_h` are found.

    `passes_test` tests the fleet of an LLM, given by its number. All fleets passed, unless MOST_BILL_TESTS
    choices of fleets failed or the time ran out.
    """
    searches = _on_all_draws(searched_alone)
    for _ in range(MOST_BILL_TESTS):
        cheapest = cheapest_designs(
            _designs_of_all(searches),
            shared_limits(limits, of_all=True),
            below_value=below_usd_per_h,
            out_of_time=lambda: is_over(deadline),
            progress=progress,
            unit=OBJECTIVE_UNITS["cost"],
            weigh="bill",
        )
        if cheapest.best is None:
            return None
        failed = []
        for k, (design, vector) in enumerate(cheapest.best):  # One design per LLM, in their order.
            counts = design.counts(vector)
            if not passes_test(k, counts):
                failed.append((design, counts))
        if not failed or is_over(deadline):
            break
        for design, counts in failed:
            assert isinstance(design.llm_problem, Problem)
            design.llm_problem.oracle.verdicts[names_of(counts)] = False
    workers = workers_of(joint_limits.chosen_workers(cheapest))
    whole = replace(limits, by_gpu=False)
    return {gpu: int(whole.used(FleetLimit("stock", gpu), workers)) for gpu in limits.stock}


def _serve_any_mix(
    searched: Sequence[LlmSearches], limits: FleetLimits, deadline: float, progress: Progress
) -> tuple[list[Problem], list[Counts]] | None:
    """Fleets of all LLMs within the limits, which may have several worker types, and the problems that they
    solve. The LLMs are served in turn: each takes its fleet alone if that fits into what is left, or else the
    fleet that a search finds there. None if no order serves all LLMs.
    """
    problem_of: dict[int, Problem] = {}

    def serve(k: int, remaining: FleetLimits) -> Counts | None:
        if is_over(deadline):
            return None
        progress("LLMs one after another on what is left, with fleets of several types")
        problem, alone = best_of(searched[k])
        until = share_deadline(deadline, 1)
        within = joint_limits.problem_within(replace(problem, deadline=until), remaining)
        problem_of[k] = problem
        return alone.best if within.allows(alone.best) else _find_any_mix(within)

    fleets = joint_limits.serve_in_turn(len(searched), limits, serve)
    return None if fleets is None else ([problem_of[k] for k in range(len(searched))], fleets)


def _find_any_mix(problem: Problem) -> Counts | None:
    """The best fleet, of any mix of worker types, that is found within the problem's limits; None if none
    is found.
    """
    try:
        return find_best_fleet(replace(problem, bound=lower_bound(problem)), []).best
    except (InfeasibleError, OutOfTimeError):
        return None


def _level0_value(searched: LlmSearches) -> float:
    """The objective of the best fleet with one worker type per pool; infinite if there is none."""
    problem, best = best_of(searched)
    level0 = best.level0.search
    return level0.value if level0.best is None else objective_paid(problem, level0.best)


def _level0_where_all_fit(searched_alone: Sequence[LlmSearches], limits: FleetLimits) -> CheapestChoice:
    """The result of level 0 if the best fleets of all LLMs, which may have several types, fit together.

    Its value is the sum of the least values of level 0, or infinite if no fleets with this sum are known.
    They are known if the best fleets are not cheaper, or if the fleets of level 0 fit together too.
    """
    best = list(map(best_search, searched_alone))
    cheapest = [min(searched, key=lambda pair: pair[1].level0.search.value) for searched in searched_alone]
    level0 = [result.level0.search for _, result in cheapest]
    least = sum(search.value for search in level0)
    all_searches = list(itertools.chain.from_iterable(searched_alone))
    is_exact = all(result.level0.search.is_exhausted for _, result in all_searches)
    # Only the best fleets were simulated on all draws, so with draws those of level 0 are not known to hold.
    has_draws = any(problem.draws for problem, _ in all_searches)
    are_known = least <= sum(search.value for search in best) * (1 + ROUNDING)
    are_known |= not has_draws and joint_limits.fit_together(limits, (search.best for search in level0))
    value = least if are_known else math.inf
    bound = least if is_exact else 0.0
    fleets = [(problem, result.level0.search.best or ()) for problem, result in cheapest]
    return _without_tie_breaks(CheapestChoice(None, value, bound, is_exact, rounds=0), fleets)


def _without_tie_breaks(level0: CheapestChoice, fleets: Iterable[tuple[Problem, Counts]]) -> CheapestChoice:
    """The same result without the prices that the search adds to break ties (`Problem.without_tie_break`,
    `objective_paid`). `fleets` are those with the result's value. A bound below that value is rounded down to
    whole Watts where the objective is power.
    """
    fleets = list(fleets)
    problem, _ = fleets[0]
    bound = paid_at_least(problem, problem.without_tie_break(level0.bound))
    if not math.isfinite(level0.value):
        return replace(level0, bound=bound)
    value = sum(objective_paid(llm_problem, counts) for llm_problem, counts in fleets)
    is_tight = level0.bound >= level0.value * (1 - ROUNDING)
    return replace(level0, value=value, bound=value if is_tight else bound)


def _fewest_are_too_many(searched: Sequence[LlmSearches], limits: FleetLimits) -> bool:
    """Whether some limit is too small for one worker of each LLM, of the type that uses least of it."""
    # The worker types of an LLM are the same under all of its policies, so its first problem is enough.
    types_by_llm = [problem.types for (problem, _), *_ in searched]

    def least_use(limit: FleetLimit) -> float:
        return sum(min(limits.use_per_worker(limit, worker) for worker in types) for types in types_by_llm)

    return any(least_use(limit) > amount * (1 + ROUNDING) for limit, amount in limits.rows())


def _simulate_all_cheaper(
    searched: Sequence[LlmSearches],
    llms: Sequence[Sequence[FleetDesign]],
    shared: CheapestChoice,
    deadline: float,
) -> bool:
    """Simulate every fleet of level 0 that a choice cheaper than `shared` could contain, and record in the
    designs (`llms` has those of each LLM) which fleets are feasible.

    In a better choice an LLM costs at most the value of `shared` minus the least values of the others alone,
    which must be exact. Returns whether all such fleets were simulated.
    """
    alone_values = [
        min(result.level0.search.value for _, result in llm_searches) for llm_searches in searched
    ]
    for problem, fleet_search in itertools.chain.from_iterable(searched):
        if not fleet_search.level0.search.is_exact or problem.draws:
            return False
    effort = 0
    for k, llm_searches in enumerate(searched):
        ceiling = shared.value - (sum(alone_values) - alone_values[k])
        for problem, fleet_search in llm_searches:
            level0 = fleet_search.level0
            mixed = level0.with_role("mixed")
            pairs = list(itertools.product(level0.with_role("prefill"), level0.with_role("decode")))
            search = Level0Search(problem.limits)
            count = count_cheaper(mixed, pairs, search, ceiling)
            if not math.isfinite(count) or effort + count * LEAST_EFFORT > WALK_EFFORT:
                return False
            effort_before = effort_spent()
            for counts in cheaper_fleets(mixed, pairs, search, ceiling):
                if is_over(deadline) or effort + effort_spent() - effort_before > WALK_EFFORT:
                    return False
                problem.oracle.holds(counts)
            feasible = {fleet: True for fleet, holds in problem.oracle.verdicts.items() if holds}
            learn_from([design for design in llms[k] if design.llm_problem is problem], feasible)
            effort += effort_spent() - effort_before
    return True


def _search_within_others(
    entries: Sequence[LlmQuestion], problems: Sequence[Problem], chosen: Sequence[Counts], deadline: float
) -> tuple[list[LlmSearches], list[OthersLeave]]:
    """Search for each LLM within what the other LLMs leave, starting from its fleet in `chosen`; the fleets
    of `chosen` fit together. LLMs are searched in turn, so one may take GPUs with which a later one would
    save more. So if some LLM changes its fleet, the searches are repeated with each later LLM as the first,
    and the cheapest fleets of all orders are returned.
    """
    last = len(entries)
    best = _search_in_order(entries, problems, chosen, range(last), deadline)
    searched, _ = best
    fleets = [names_of(best_search(llm_searches).best) for llm_searches in searched]
    changed = (k for k, fleet in enumerate(fleets) if fleet != names_of(chosen[k]))
    for first in range(next(changed, last) + 1, last):
        if is_over(deadline):
            break
        order = (*range(first, last), *range(first))
        other = _search_in_order(entries, problems, chosen, order, deadline)
        best = min(best, other, key=lambda searched_and_left: sum(map(best_value, searched_and_left[0])))
    return best


def _search_in_order(
    entries: Sequence[LlmQuestion],
    problems: Sequence[Problem],
    chosen: Sequence[Counts],
    order: Sequence[int],
    deadline: float,
) -> tuple[list[LlmSearches], list[OthersLeave]]:
    """The searches of `_search_within_others` in one order of the LLMs, and what the others leave to each."""
    fleets = list(chosen)
    searched: dict[int, LlmSearches] = {}
    left_to_each: dict[int, OthersLeave] = {}
    for searched_count, k in enumerate(order):
        remaining = joint_limits.limits_beside(problems[k].limits, fleets, k)
        until = share_deadline(deadline, len(entries) - searched_count)
        problem = replace(problems[k], task=entries[k].task, deadline=until)
        searched[k] = search_within(problem, remaining, fleets[k])
        fleets[k] = best_search(searched[k]).best
        left_to_each[k] = others_leave_fact(remaining)
    return [searched[k] for k in sorted(order)], [left_to_each[k] for k in sorted(order)]


def search_within(problem: Problem, remaining: FleetLimits, start: Counts) -> LlmSearches:
    """Search for an LLM within the limits that the other LLMs leave, starting from the fleet `start`."""
    problem = joint_limits.problem_within(problem, remaining)
    problem = replace(problem, bound=lower_bound(problem))
    result = find_best_fleet(problem, [problem.oracle.fleet(start)])
    # The search counts GPUs in use, but beside the other LLMs its fleet may take one node too many.
    if not problem.allows(result.best):
        value = objective_of(start)
        search = replace(result.level0.search, best=start, value=value, is_exhausted=False, is_exact=False)
        result = replace(result, best=start, value=value, level0=replace(result.level0, search=search))
    return [PolicySearch(problem, result)]


def others_leave_fact(remaining: FleetLimits) -> OthersLeave:
    """What the other LLMs leave of each limit, as a fact for the certificate."""
    return OthersLeave(tuple(Remainder(limit, amount) for limit, amount in remaining.rows()))


def gives_way_facts(
    entries: Sequence[LlmQuestion], alone: Sequence[float], values: Sequence[float], unit: str
) -> tuple[Binding, ...]:
    """What each LLM pays for not having all of the fleet to itself."""
    return tuple(
        GivesWay(entry.name, value, value - least, unit)
        for entry, least, value in zip(entries, alone, values, strict=True)
        if value - least > joint_limits.CHEAPER_FRAC * least
    )


def share_deadline(deadline: float, shares: int) -> float:
    """The end of the first of `shares` equal shares of the remaining time, when one more share is kept back
    for what follows.
    """
    now = now_s()
    return now + max(deadline - now, 0.0) / (shares + 1)


def _search_alone(entry: LlmQuestion, catalog: Catalog, seed: int, conditions: Conditions) -> LlmSearches:
    """The search for one LLM with all of the fleet for itself; errors name the LLM."""
    try:
        return search_llm(SearchInputs(entry.task, entry.trace, catalog, seed, conditions))
    except InfeasibleError as error:
        raise error.of_llm(entry.name) from None
    except PlannerError as error:  # Unlike InfeasibleError, the other errors hold nothing but a message.
        raise type(error)(f"{entry.name}: {error}") from None


def _simulate_in_turn(
    searched: Sequence[LlmSearches], limits: FleetLimits, until: float, progress: Progress
) -> None:
    """Search the LLMs one after another, each within what those before it leave, in the orders of
    `serve_in_turn`, until one order serves all LLMs.

    Nothing is returned: the oracles record the verdicts, and the master problem begins with them.
    """

    def serve(k: int, remaining: FleetLimits) -> Counts | None:
        # The value of the best fleet under each choice of policies, by fleet.
        value_of: dict[Counts, float] = {}
        for problem, _ in searched[k]:
            if is_over(until):
                return None
            progress("LLMs one after another on what is left")
            level0 = search_level0(replace(problem, limits=remaining, deadline=until)).search
            if level0.best is not None:
                value_of.setdefault(level0.best, level0.value)
        return min(value_of, key=value_of.__getitem__, default=None)

    joint_limits.serve_in_turn(len(searched), limits, serve)
