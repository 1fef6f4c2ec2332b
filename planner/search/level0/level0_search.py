"""Searches level 0: the fleets of one mixed pool, or of a prefill and a decode pool, each of one worker type.

It searches mixed pools first (one_pool.py), then pairs of pools (two_pools.py). In the end it "walks": it
simulates every fleet that costs less than the best one found (walk.py), if these are few enough. Only then
the answer is exact. A fleet "holds" if it keeps the SLO in its simulation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.documents.task import PlanQuestion
from planner.fleet import Fleet, Role
from planner.policies import ONE_KIND, ONE_POOL, ONLY_PAIRS, TARGETS_OF_ENGINE
from planner.search.level0 import pruning_rules
from planner.search.level0.designs import DesignPool, FleetDesign, learn_from
from planner.search.level0.one_pool import (
    BoundedOption,
    Holds,
    Level0Search,
    first_incumbent,
    search_one_pool,
)
from planner.search.level0.two_pools import PairSimulations, pair_up, search_two_pools
from planner.search.level0.walk import note_cheaper, walk
from planner.search.oracle.deterministic_parallel import effort_spent
from planner.search.oracle.fleet_counts import Counts, counts_of, may_hand_over, objective_of
from planner.search.oracle.fleet_oracle import LEAST_EFFORT
from planner.search.oracle.work_clock import StoppedError
from planner.search.problem import link
from planner.search.problem.options import Hardware, breaks_gaps, hardware_of
from planner.search.problem.plan_problem import Problem, SearchProgress
from planner.search.problem.stages import Stage
from planner.solvers.master import Option, fewest_decode_workers, full_workers, least_workers
from planner.solvers.required_work import SloWork, guess_slo_work
from planner.traffic.trace import judged_span_s, no_edges
from planner.traffic.workload import TraceLengths, coarser_lengths
from planner.units import count_text

WALK_EFFORT = 4_000_000  # The most effort of simulating every cheaper fleet, in requests simulated.
# Most cheaper fleets are far too small, and their simulation ends early. Until some are simulated, one of
# them is taken to cost the mean effort of the search's simulations divided by this. Set by hand.
EARLY_END_FACTOR = 8
# An option whose full step is nearly as long as the tightest limit on gaps (`breaks_gaps`) is ranked as if it
# needed this many times the guessed workers. Set by hand.
GAPS_HANDICAP = 1.5
BACKLOG_FRAC = 0.1  # The backlog test looks at the last tenth of the requests (slo_verdict.py).
# With more requests than SEATS_REQUESTS a decode pool is assumed to fail (pruning_rules.SEATS) if it has less
# than FEW_FRAC of the workers that could just admit all requests in time (master.fewest_decode_workers). The
# smallest measured pools that kept up had 0.92 of these workers.
SEATS_REQUESTS = 200_000
FEW_FRAC = 0.8


@dataclass(frozen=True, slots=True)
class Level0:
    """The search at level 0, at its end or interrupted.

    `options` are those from which the search for fleets of several types may choose, and `bounded` has the
    bounds of every option by its name. `mixed` is the best fleet of one mixed pool, and `one_gpu` the best on
    one GPU type, mixed pools included; None if none was found. `has_pairs`: pairs of a prefill and a decode
    pool were not left out.
    """

    search: Level0Search
    options: tuple[Option, ...]
    bounded: dict[str, BoundedOption]
    mixed: Counts | None
    one_gpu: Counts | None
    has_pairs: bool

    def with_role(self, role: Role) -> list[BoundedOption]:
        """The options of a role with their bounds, also those that `options` leaves out because fleets of
        another kind were best.
        """
        if role != "mixed" and not self.has_pairs:
            return []
        return [bounded for bounded in self.bounded.values() if bounded.option.role == role]

    @property
    def may_mix_all(self) -> bool:
        """Whether the search for fleets of several types may choose from all options. It may not if the link
        is too slow for pairs, or if the target takes only one kind of fleets.
        """
        return len(self.options) == len(self.bounded)


@dataclass(frozen=True, slots=True)
class _Level0Options:
    """The options of level 0 with their bounds. In `mixed` and `prefill` the most promising options come
    first; `decode` and `options` keep the order of the worker types.
    """

    mixed: list[BoundedOption]
    prefill: list[BoundedOption]
    decode: list[BoundedOption]
    options: tuple[Option, ...]
    bounded: dict[str, BoundedOption]

    @classmethod
    def of(cls, problem: Problem) -> _Level0Options:
        """Every worker type of the problem in the roles that the target and the engine can run."""
        options = problem.options()
        mixed, prefill, decode = (
            [option for option in options if option.role == role] for role in ("mixed", "prefill", "decode")
        )
        if not runs_mixed(problem.task):
            mixed = []
        if not runs_pairs(problem.task):
            prefill = decode = []
        # In a session later requests come later if answers are slow, so a proved bound must leave out their
        # work. A guess may count it, so it is made for the trace without waits (`after`), in which all
        # requests arrive at their nominal times.
        guess = guess_slo_work(problem.slo, replace(problem.trace, after=no_edges()))
        bounded = {option.name: _bounds_of(problem, option, guess) for option in (*mixed, *prefill, *decode)}

        def promising_first(option: Option) -> tuple[float, int, int]:
            """The key that sorts options by the likely price of their pool, times GAPS_HANDICAP where a step
            with the full token budget would break the tightest limit on gaps, because such an option needs
            more workers than the guess. If prices are equal, larger steps come first.
            """
            worker = option.type
            likely_price = bounded[option.name].likely * option.objective
            handicap = GAPS_HANDICAP if breaks_gaps(worker, problem.slo) else 1.0
            return likely_price * handicap, -worker.max_num_batched_tokens, -worker.max_num_seqs

        return cls(
            [bounded[option.name] for option in sorted(mixed, key=promising_first)],
            [bounded[option.name] for option in sorted(prefill, key=promising_first)],
            [bounded[option.name] for option in decode],
            (*mixed, *prefill, *decode),
            bounded,
        )


def search_level0(
    problem: Problem,
    start: Sequence[Fleet] = (),
    *,
    any_will_do: bool = False,
    prove: bool = False,
    walks: bool = True,
    counts_cheaper: bool = True,
) -> Level0:
    """Search level 0 until all is searched or the time is over; with `any_will_do` only to the first fleet
    that holds. Without `counts_cheaper` the result does not say how many fleets are cheaper.

    With `walks` every fleet cheaper than the best one is simulated in the end, if these are few enough. With
    `prove` they are simulated however many there are, and no pairs are left out by an assumption about the
    link. The fleets of `start` are simulated first.
    """
    by_role, search = _Level0Options.of(problem), Level0Search(problem.limits)
    effort_before, simulations_before = effort_spent(), problem.oracle.simulations

    def is_enough() -> bool:
        return problem.out_of_time() or (any_will_do and search.best is not None)

    holds = _with_reports(problem, search, problem.oracle.holds)
    pairs = _pairs(by_role.prefill, by_role.decode)
    too_slow = link.link_too_slow(problem)
    if reason := too_slow or (None if prove else link.link_falls_behind(problem)):
        search.refuted["prefill + decode"] = reason
        pairs = []
        if not too_slow:  # A link that falls behind proves nothing, so leaving out pairs is an assumption.
            search.assumed.add(pruning_rules.LINK)
    best_mixed = best_one_gpu = search.best
    # A fleet that holds is offered to `search` as soon as it is simulated, so none is lost if the time ends
    # the search with a StoppedError.
    try:
        _offer_known(problem, start, by_role.options, holds, search)
        problem.progress(
            Stage(f"fleets of one worker type: {count_text(len(by_role.mixed), 'type')}", "level 0")
        )
        _search_mixed(by_role.mixed, holds, search, is_enough)
        best_mixed = best_one_gpu = search.best
        if pairs:
            _search_pairs(problem, by_role, search, is_enough, of_one_gpu=True)
            best_one_gpu = search.best
            _search_pairs(problem, by_role, search, is_enough, of_one_gpu=False)
        if walks and search.is_exhausted and not is_enough():
            simulations = problem.oracle.simulations - simulations_before
            mean_effort = (effort_spent() - effort_before) / max(simulations, 1)
            most_effort = math.inf if prove else WALK_EFFORT
            _walk_cheaper(problem, search, by_role.mixed, pairs, holds, mean_effort, most_effort=most_effort)
    except StoppedError:
        search.is_exhausted = False
    if counts_cheaper:
        note_cheaper(by_role.mixed, pairs, problem.oracle.verdicts, search)
    # Without pairs, options to prefill or to decode can be used in no fleet.
    options = by_role.options
    if not pairs:
        options = tuple(option for option in options if option.role == "mixed")
    if problem.task.deploy in ONE_KIND:
        # The target deploys either mixed pools or prefill and decode pools. So the search for fleets of
        # several types may only use options of the kind that is best here; of mixed ones if no fleet holds.
        roles = {option.role for option, _ in search.best} if search.best else {"mixed"}
        options = tuple(option for option in options if ("mixed" in roles) == (option.role == "mixed"))
    if problem.task.deploy in ONE_POOL:  # There are no fleets of several types.
        options = (search.best[0][0],) if search.best else options[:1]
    return Level0(search, options, by_role.bounded, best_mixed, best_one_gpu, has_pairs=bool(pairs))


def runs_mixed(task: PlanQuestion) -> bool:
    """Whether the target runs mixed workers."""
    return task.deploy not in ONLY_PAIRS


def runs_pairs(task: PlanQuestion) -> bool:
    """Whether the target and the engine can run prefill and decode pools."""
    has_no_target = task.engine is not None and task.engine.name in TARGETS_OF_ENGINE
    return task.deploy not in ONE_POOL and not has_no_target


def can_hand_off(problem: Problem) -> bool:
    """Whether the question may have prefill and decode pools, and the link between them keeps the SLO for a
    single request.
    """
    return runs_pairs(problem.task) and link.link_too_slow(problem) is None


def likely_fleet(problem: Problem) -> Counts | None:
    """A fleet of the most promising mixed option, with as many workers as the traffic likely takes; it is not
    simulated. None if the question has no mixed options.
    """
    mixed = _Level0Options.of(problem).mixed
    return ((mixed[0].option, mixed[0].likely),) if mixed else None


def _with_reports(
    problem: Problem, search: Level0Search, simulate: Holds, *, pool_alone: bool = False
) -> Holds:
    """The function `simulate` with reports of progress, which raises StoppedError instead of simulating once
    the time is over. With `pool_alone` it simulates one pool of a pair, which is not reported as a fleet.
    """

    def simulate_in_time(counts: Counts) -> bool:
        if problem.out_of_time():
            raise StoppedError
        is_kept = simulate(counts)
        best_value = problem.without_tie_break(search.value) if search.best is not None else None
        # The best fleet so far is reported. It may be this one, which `search` does not have yet.
        holding = [counts] if is_kept and not pool_alone else []
        holding += [] if search.best is None else [search.best]
        fleet = partial(problem.oracle.fleet, min(holding, key=objective_of)) if holding else None
        problem.watch(SearchProgress(best_value, problem.bound or None, problem.oracle.simulations, fleet))
        return is_kept

    return simulate_in_time


def _search_pairs(
    problem: Problem,
    by_role: _Level0Options,
    search: Level0Search,
    is_enough: Callable[[], bool],
    *,
    of_one_gpu: bool,
) -> None:
    """Search pairs of a prefill and a decode pool, either on one GPU type or on two; updates `search`."""
    phase = f"prefill and decode pools of {'one GPU type' if of_one_gpu else 'two GPU types'}"
    problem.progress(Stage(phase, "pairs", problem.best_in_words(search.value)))
    oracle = problem.oracle
    simulations = PairSimulations(_with_reports(problem, search, oracle.holds))
    # A pool is simulated alone as if the other pool took no time. In sessions, later requests then come
    # sooner than in a pair, so a pool that fails alone may be enough in a pair. So with sessions no pool is
    # simulated alone.
    if not problem.trace.after.size:
        simulations = PairSimulations(
            simulations.holds,
            _with_reports(problem, search, oracle.prefill_meets_ttft_alone, pool_alone=True),
            _with_reports(problem, search, oracle.decode_keeps_up_alone, pool_alone=True),
        )

    def allowed(prefill: Option, decode: Option) -> bool:
        is_alike = prefill.type.gpu.name == decode.type.gpu.name
        return is_alike is of_one_gpu and may_hand_over((prefill.type, decode.type))

    search_two_pools(by_role.prefill, by_role.decode, simulations, search, is_enough, allowed)


def _pairs(
    prefills: Iterable[BoundedOption], decodes: Iterable[BoundedOption]
) -> list[tuple[BoundedOption, BoundedOption]]:
    """The pairs of a prefill and a decode option that may hand KV blocks over."""
    return [
        (prefill, decode)
        for prefill, decode in itertools.product(prefills, decodes)
        if may_hand_over((prefill.option.type, decode.option.type))
    ]


def walk_below(problem: Problem, level0: Level0, value: float, *, most_effort: float) -> Level0Search:
    """Simulate every fleet of level 0 that costs less than `value`, if that takes at most `most_effort` (in
    requests simulated). `level0` is the search of an easier problem; fleets that fail there fail in this one
    too.

    If the result has a `best` fleet, that holds. If it `is_exact`, every fleet that costs less than `best`,
    or without a best fleet less than `value`, fails.
    """
    search = Level0Search(problem.limits, value=value, assumed=level0.search.assumed & {pruning_rules.LINK})
    mixed = level0.with_role("mixed")
    pairs = _pairs(level0.with_role("prefill"), level0.with_role("decode"))
    holds = _with_reports(problem, search, problem.oracle.holds)
    try:
        _walk_cheaper(problem, search, mixed, pairs, holds, LEAST_EFFORT, most_effort=most_effort)
    except StoppedError:
        search.is_exact = False
    note_cheaper(mixed, pairs, problem.oracle.verdicts, search)
    return search


def designs_of(problem: Problem, level0: Level0, *, pools_alone: bool = True) -> list[FleetDesign]:
    """All designs of level 0 (designs.py) with what its search has learned of them, for a search that goes on
    from there.

    Without `pools_alone` nothing is taken from simulations of a pool alone: a prefill pool that misses TTFT
    alone may keep it in a pair, if few requests decide (pruning_rules.PREFILL_ALONE).
    """
    oracle, search = problem.oracle, Level0Search(problem.limits)
    prefill_alone = None
    if pools_alone and not problem.trace.after.size:
        prefill_alone = oracle.prefill_meets_ttft_alone
        for bounded in level0.with_role("prefill"):
            if (learned := level0.search.learned.get(bounded.option.name)) is not None:
                search.learned[bounded.option.name] = replace(learned)
    designs = [
        FleetDesign((DesignPool(bounded, search),), oracle.holds, search)
        for bounded in level0.with_role("mixed")
    ]
    designs += pair_up(
        level0.with_role("prefill"),
        level0.with_role("decode"),
        PairSimulations(oracle.holds, prefill_alone),
        search,
        lambda prefill, decode: may_hand_over((prefill.type, decode.type)),
    )
    learn_from(designs, oracle.verdicts)
    for design in designs:
        design.llm_problem = problem
    return designs


def _offer_known(
    problem: Problem, start: Sequence[Fleet], options: Sequence[Option], holds: Holds, search: Level0Search
) -> None:
    """Offer the search those fleets of `start` that are of level 0 and hold, so that it looks for cheaper
    fleets.
    """
    for fleet in start:
        if not (counts := counts_of(fleet, options)):
            continue  # Some of the fleet's workers are no options of the question.
        roles = sorted(option.role for option, _ in counts)
        is_of_level0 = roles in (["mixed"], ["prefill"], ["decode"], ["decode", "prefill"])
        if is_of_level0 and problem.allows(counts) and holds(counts):
            search.offer(counts)


def _search_mixed(
    ordered: list[BoundedOption], holds: Holds, search: Level0Search, is_enough: Callable[[], bool]
) -> None:
    """Search fleets of one mixed pool. `ordered` has the most promising options first, and is sorted anew
    here: once a fleet holds, the options on its hardware come first. The first of the fleets with equal
    prices stays the best.
    """
    first_of_kind: dict[Hardware, BoundedOption] = {}
    for bounded in ordered:
        first_of_kind.setdefault(hardware_of(bounded.option), bounded)
    if search.best is None:
        first_incumbent(list(first_of_kind.values()), holds, search, is_enough)
    if search.best is not None:
        best_option = search.best[0][0]
        ordered.sort(key=lambda bounded: hardware_of(bounded.option) != hardware_of(best_option))
    search_one_pool(ordered, holds, search, is_enough)


def _walk_cheaper(
    problem: Problem,
    search: Level0Search,
    mixed: Sequence[BoundedOption],
    pairs: Sequence[tuple[BoundedOption, BoundedOption]],
    holds: Holds,
    mean_effort: float,
    *,
    most_effort: float,
) -> None:
    """Simulate every fleet cheaper than the best of `search`, if that takes at most `most_effort`.
    `mean_effort` is the average effort of the search's simulations so far. Both are in requests simulated.
    Raises StoppedError if the time is over first.
    """
    before = effort_spent()
    guess = max(mean_effort / EARLY_END_FACTOR, LEAST_EFFORT)

    def may_go_on(done: int, remaining: int) -> bool:
        """Whether the `remaining` fleets fit into `most_effort`, if each takes the mean effort of the `done`
        ones. This is a fair guess, because the first fleets of a walk are a sample of all its fleets.
        """
        if problem.out_of_time():
            return False
        effort = effort_spent() - before
        effort_each = max(effort / done, LEAST_EFFORT) if done else guess
        return effort + remaining * effort_each <= most_effort

    problem.progress(Stage("every cheaper fleet, one by one", "walk"))
    walk(mixed, pairs, holds, problem.oracle.verdicts, search, may_go_on)
    if not search.is_exact and problem.out_of_time():
        # How many fleets were simulated depends on the clock, so the search counts as interrupted.
        raise StoppedError


def _bounds_of(problem: Problem, option: Option, guess: SloWork) -> BoundedOption:
    """The option with bounds on its count of workers: `least` for the work that the SLO requires, `most`
    within the limits, `likely` for the work of `guess`, and for decode options `likely_decode` and
    `assumed_least` (one_pool.BoundedOption).
    """
    oracle, lengths = problem.oracle, coarser_lengths(problem.lengths)
    least = oracle.workers_needed(option, least_workers(option, lengths, problem.slo_work))
    likely = least_workers(option, lengths, guess)
    if oracle.policies.prefix_cache and problem.hits is not None:
        # The prefix caches of `likely` workers, and the stores to which they offload KV, leave fewer tokens
        # to compute. So the guess is made again with the hits of a cache of that size.
        offload, worker = oracle.policies.kv_offload, option.type
        store_tokens = 0 if offload is None else offload.kv_tokens(problem.llm, worker.tp)
        stores = 1 if offload is not None and offload.is_shared else likely
        cache_tokens = likely * worker.dp * worker.kv_tokens + stores * store_tokens
        lengths = coarser_lengths(problem.hits.lengths(cache_tokens))
        likely = least_workers(option, lengths, guess)
    likely = oracle.workers_needed(option, likely)
    most = problem.limits.most_workers(option.type)
    # The other counts are guessed only for decode workers without speculative decoding, and only for traffic
    # without sessions.
    if option.role != "decode" or option.type.speculation is not None or problem.trace.after.size:
        return BoundedOption(option, least, most, likely)
    likely_decode = max(math.ceil(workers_for_backlog_test(problem, option, full_workers)), 1)
    assumed_least = 1
    if len(problem.trace) > SEATS_REQUESTS:
        fewest = FEW_FRAC * workers_for_backlog_test(problem, option, fewest_decode_workers)
        assumed_least = max(math.ceil(fewest), 1)
    return BoundedOption(
        option,
        least,
        most,
        likely,
        likely_decode=oracle.workers_needed(option, likely_decode),
        assumed_least=oracle.workers_needed(option, assumed_least),
    )


def workers_for_backlog_test(
    problem: Problem, option: Option, workers: Callable[[Option, TraceLengths, float], float]
) -> float:
    """About how many decode workers pass the backlog test behind a prefill that takes no time
    (`Oracle.decode_keeps_up_alone`). `workers(option, lengths, seconds)` is how many serve all requests in
    this many seconds.

    In the test half of the last tenth of the requests may wait longer than twice the SLO's patience. So the
    requests up to the middle of this tenth, `served_frac` of all, must be served no later than twice the
    patience after the last of them has arrived.
    """
    served_frac = 1 - BACKLOG_FRAC / 2
    patience_s = problem.slo.patience_s(judged_span_s(problem.trace))
    seconds = served_frac * problem.trace.duration_s + 2 * patience_s
    return served_frac * workers(option, coarser_lengths(problem.lengths), seconds)
