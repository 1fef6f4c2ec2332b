"""Level 0: the best fleet with one worker type per pool, over one pool and pairs of pools."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.fleet import Fleet
from planner.search import assumed, link
from planner.search.fleets import Counts, counts_of
from planner.search.one_pool import Bounded, Holds, Search, StoppedError, first_incumbent, search_one_pool
from planner.search.options import decode_options, hardware, mixed_options, prefill_options
from planner.search.oracle import LEAST_EFFORT, side_by_side
from planner.search.problem import Problem, Standing
from planner.search.two_pools import search_two_pools
from planner.search.walk import known, note_cheaper, walk
from planner.solvers.master import Option, least_workers
from planner.solvers.required_work import Obliged, usual
from planner.traffic.trace import no_edges
from planner.traffic.workload import coarser

WALK_EFFORT = 4_000_000  # simulated requests that it may cost to simulate every cheaper fleet of level 0

FAR_SOONER = 8


@dataclass(frozen=True, slots=True)
class Level0:
    """The exhausted (or interrupted) search at level 0, and the best of each kind on the way."""

    search: Search
    options: tuple[Option, ...]
    bounded: dict[str, Bounded]
    mixed: tuple[Counts | None, float]
    one_gpu: tuple[Counts | None, float]


def search_level0(
    problem: Problem, start: Sequence[Fleet] = (), *, any_will_do: bool = False, prove: bool = False
) -> Level0:
    """Search level 0, to its end or, where `any_will_do`, to the first fleet that holds.

    With `prove` every cheaper fleet is simulated, however many there are.
    """
    task = problem.task
    mixed = mixed_options(problem.types, task.objective)
    prefill = prefill_options(problem.types, task.objective)
    decode = decode_options(problem.types, task.objective)
    # for guesses no whole session is let go because its first request may be late
    guess = usual(problem.slo, replace(problem.trace, after=no_edges()))
    bounded = {option.name: _bounded(problem, option, guess) for option in (*mixed, *prefill, *decode)}

    def promising_first(option: Option) -> tuple[float, int, int]:
        """By the lower bound; token budgets that would break the tightest limit on gaps last."""
        worker = option.type
        full_step_s = float(worker.latency.step_s(worker.max_num_batched_tokens))
        gaps_s = [limit.limit_s for limit in problem.slo.limits if limit.metric == "tbt"]
        late = full_step_s > 0.9 * min(gaps_s, default=math.inf)
        likely = bounded[option.name].likely * option.objective
        return likely * (1.5 if late else 1.0), -worker.max_num_batched_tokens, -worker.max_num_seqs

    oracle, search = problem.oracle, Search(problem.limits)

    def enough() -> bool:
        return problem.out_of_time() or (any_will_do and search.best is not None)

    def timed(ask: Holds) -> Holds:
        """Simulations one by one, none of which begins once the time is over."""

        def answer(fleets: Sequence[Counts]) -> list[bool]:
            answers: list[bool] = []
            for counts in fleets:
                if problem.out_of_time():
                    raise StoppedError
                answers += ask([counts])
            best = search.value if search.best is not None else None
            problem.watch(Standing(best, problem.lower, oracle.simulations))
            return answers

        return answer

    holds = timed(oracle.holds)
    ordered = [bounded[option.name] for option in sorted(mixed, key=promising_first)]
    ordered_prefill = [bounded[option.name] for option in sorted(prefill, key=promising_first)]
    ordered_decode = [bounded[option.name] for option in decode]
    pairs = list(itertools.product(ordered_prefill, ordered_decode))
    too_slow = link.too_slow(problem)
    if reason := too_slow or (None if prove else link.falls_behind(problem)):
        search.refuted["prefill + decode"] = reason
        search.assumed |= set() if too_slow else {assumed.LINK}
        pairs = []
    best_mixed = best_one_gpu = (search.best, search.value)
    try:
        _offer_known(problem, start, (*mixed, *prefill, *decode), holds, search)
        problem.progress(f"level 0: {len(mixed)} mixed pools")
        _search_mixed(ordered, holds, search, enough)
        best_mixed = best_one_gpu = (search.best, search.value)
        # answers that take no time bring the next requests of a session earlier: nothing to learn from them
        is_open_loop = not problem.trace.after.size
        leads, follows = (timed(oracle.leads), timed(oracle.follows)) if is_open_loop else (None, None)
        for label, compare in (("one GPU type", operator.eq), ("two GPU types", operator.ne)):
            if not pairs:
                break
            problem.progress(f"level 0: prefill and decode pools of {label}; best so far {search.value:.6g}")

            def allowed(p: Option, d: Option, compare: Callable[[str, str], bool] = compare) -> bool:
                return compare(p.type.gpu.name, d.type.gpu.name)

            search_two_pools(
                ordered_prefill, ordered_decode, holds, leads, search, side_by_side, enough, allowed, follows
            )
            if label == "one GPU type":
                best_one_gpu = (search.best, search.value)
        if search.is_exhausted and not enough():
            _walk(problem, search, ordered, pairs, holds, prove=prove)
    except StoppedError:
        search.is_exhausted = False
    note_cheaper(ordered, pairs, oracle.told, search)
    options = (*mixed, *prefill, *decode) if pairs else tuple(mixed)
    return Level0(search, options, bounded, best_mixed, best_one_gpu)


def _offer_known(
    problem: Problem, start: Sequence[Fleet], options: Sequence[Option], holds: Holds, search: Search
) -> None:
    """Those fleets of level 0 that still hold are what others must beat."""
    for fleet in start:
        counts = counts_of(fleet, options)
        if (
            counts
            and len({option.role for option, _ in counts}) == len(counts) <= 2
            and not any(len(counts) == 2 and option.role == "mixed" for option, _ in counts)
        ):
            within = problem.limits.broken([(option.type, count) for option, count in counts]) is None
            if within and holds([counts])[0]:
                search.offer(counts)


def _search_mixed(ordered: list[Bounded], holds: Holds, search: Search, enough: Callable[[], bool]) -> None:
    """One mixed pool; `ordered` begins with the most promising, of equal offers the first stays."""
    first_of_kind: dict[tuple[str, int, int], Bounded] = {}
    for item in ordered:
        first_of_kind.setdefault(hardware(item.option), item)
    if search.best is None:
        first_incumbent(list(first_of_kind.values()), holds, search, side_by_side, enough)
    if search.best is not None:
        leader = search.best[0][0]
        ordered.sort(key=lambda item: hardware(item.option) != hardware(leader))
    search_one_pool(ordered, holds, search, side_by_side, enough)


def _walk(
    problem: Problem,
    search: Search,
    mixed: Sequence[Bounded],
    pairs: Sequence[tuple[Bounded, Bounded]],
    holds: Holds,
    *,
    prove: bool,
) -> None:
    """Simulate every cheaper fleet, where they are few enough or `prove` is asked for."""
    oracle = problem.oracle
    spent = oracle.effort()
    # those far too small end sooner than what a search looks at
    guess = max(spent / max(oracle.simulations, 1) / FAR_SOONER, LEAST_EFFORT)

    def may_go_on(done: int, left: int) -> bool:
        """By what the fleets so far have cost, the first of them being a sample of all."""
        if prove or problem.out_of_time():
            return not problem.out_of_time()
        effort = oracle.effort() - spent
        return effort + left * (max(effort / done, LEAST_EFFORT) if done else guess) <= WALK_EFFORT

    problem.progress("level 0: every cheaper fleet, one by one")
    walk(mixed, pairs, holds, known(oracle.told), search, side_by_side, may_go_on)
    if not search.is_exact and problem.out_of_time():
        raise StoppedError  # what was begun depends on the clock


def _bounded(problem: Problem, option: Option, guess: Obliged) -> Bounded:
    """With the least count that the SLO obliges, and a likely one from what it takes by that guess."""
    oracle, lengths = problem.oracle, coarser(problem.lengths)
    least = oracle.enough(option, least_workers(option, lengths, problem.obliged))
    likely = least_workers(option, lengths, guess)
    if oracle.policies.prefix_cache and problem.hits is not None:  # with the hits that so many can keep
        lengths = coarser(problem.hits.lengths(likely * option.type.kv_tokens))
        likely = least_workers(option, lengths, guess)
    likely = oracle.enough(option, likely)
    return Bounded(option, least, problem.limits.most(option.type), likely)
