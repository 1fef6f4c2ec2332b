"""The search after level 0: fleets with several worker types in one pool.

The master problem (solvers/master.py), an integer program over counts of options, proposes fleets; the
simulator decides whether they hold. A fleet that fails is cut: no later proposal may have at most as many
workers of every option. The best fleet is then improved by exchanging workers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.domain import ROUNDING
from planner.search.level0.level0_search import GAPS_HANDICAP, WALK_EFFORT, Level0
from planner.search.level0.one_pool import least_that_holds
from planner.search.level0.walk import every_mix
from planner.search.mixed.mixtures import improve_mixture, improve_nearby
from planner.search.oracle.deterministic_parallel import charge_effort, effort_spent
from planner.search.oracle.fleet_counts import (
    Counts,
    in_order,
    largest_below,
    may_hand_over,
    names_of,
    objective_of,
    options_of,
)
from planner.search.oracle.fleet_oracle import LEAST_EFFORT, Oracle, without_needless_workers
from planner.search.problem.options import breaks_gaps, by_hardware
from planner.search.problem.owned_first import owned_first
from planner.search.problem.plan_problem import Problem, SearchProgress
from planner.search.problem.stages import Message, Stage
from planner.solvers.master import Option, busy_workers, find_promising_fleet
from planner.solvers.required_work import guess_slo_work
from planner.traffic.trace import no_edges
from planner.traffic.workload import coarser_lengths

# Numbers for which no measurement is named are set by hand: they bound the time of a search.

# If a fleet that holds is known, the master proposes cheaper ones. At most CHEAPER_PROPOSALS of them are
# simulated, and no more than CHEAPER_REQUESTS requests in all of them together. The search ends at a proposal
# that is expected to serve less than CHEAPER_SHARE of the traffic.
CHEAPER_REQUESTS = 4_000_000
CHEAPER_PROPOSALS = 8
CHEAPER_SHARE = 0.9
# The same limits if no fleet is known. More is spent then, because any fleet is an answer.
FIRST_REQUESTS = 20_000_000
FIRST_PROPOSALS = 100
FIRST_FLEET_SHARE = 0.6
# An iteration of the master's simplex takes as long as this many simulated requests: 80 us at EFFORT_S
# (work_clock.py). The proposals of one search end after MASTER_ITERATIONS, some 8 s.
ITERATION_REQUESTS = 70
MASTER_ITERATIONS = 100_000
# However long the trace is, at least this many proposals, and exchanges of one worker, are simulated.
LEAST_PROPOSALS = 4
LEAST_EXCHANGES = 2
BETTER_FRAC = 1e-6  # A proposal is cheaper by this share at least, which is more than the solver's tolerance.
# The share of the traffic that one worker serves is estimated as 1 over the workers that all traffic needs.
# At least this many workers are assumed, so that the share is finite even where an option has no work.
LEAST_COUNT = 0.05
# Every cheaper fleet of any mix is simulated if that takes no more than this effort [requests].
MIX_EFFORT = 1_000_000
# The search of fleets with up to four options of any engine settings may take this effort [requests], and the
# search near the best fleet as much again.
REFINE_EFFORT = 300_000
# If level 0 found no count that holds, an option is assumed to need this many times the workers that its work
# alone keeps busy.
USUAL_RATIO = 1.5
# If a count failed, at least this many more workers are assumed to be needed, in an estimate by work and in
# an estimate for an option alone.
LEAST_MORE_BY_WORK, LEAST_MORE_ALONE = 0.1, 0.5
# Before the search of REFINE_EFFORT, fleets with one engine setting per role and hardware are searched with
# this effort [requests]. By work alone the largest steps look best. So in this first search a worker whose
# full step breaks a limit on gaps is expected to carry GAPS_HANDICAP times less traffic than its work says.
# For Azure's code trace with Llama-3.1-70B on A100 and H100, 10 simulated fleets lead to 39.04 USD/h with
# this handicap, and to 47.84 USD/h without it.
ONE_SETTING_EFFORT = 100_000


@dataclass(frozen=True, slots=True)
class MixedFleets:
    """The result of the search for mixed fleets: the `best` fleet, None if none was found; its `value` in the
    objective's unit, infinite without a fleet; the number of `cuts`; and how the search ended.

    `is_exact`: every cheaper fleet within the limits was simulated. `is_exhausted`: the master has no more
    proposals of the options that it was given. `is_hopeless`: its best proposal is expected to serve far less
    than the traffic. If all three are False, the time or the effort was used up.
    """

    best: Counts | None
    value: float
    cuts: int
    is_exact: bool
    is_exhausted: bool
    is_hopeless: bool


def search_mixed_fleets(
    problem: Problem, level0: Level0, candidates: Sequence[Counts] = (), *, refines: bool = True
) -> MixedFleets:
    """Search for a mixed fleet that is cheaper than the cheapest known one: that of level 0, or one of the
    `candidates` that holds. If none is known, any fleet that holds is searched.

    At first each GPU and TP degree has only its best engine settings. Among the fleets that cost less than
    the incumbent the master proposes the one that is expected to serve most. A fleet that fails is cut. A
    fleet that holds becomes the incumbent, without its needless workers. With `refines`, fleets of any
    settings follow (mixtures.py), and fleets near the best one. The effort is counted in simulated requests,
    not in seconds, so that the answer does not depend on the machine.
    """
    oracle = problem.oracle
    best, value = cheapest_known(problem, level0, candidates)
    if best is None and any(math.isinf(problem.limits.most_workers(worker)) for worker in problem.types):
        # There is no limit on the workers of some type, and no number of them was enough at level 0.
        return MixedFleets(None, math.inf, cuts=0, is_exact=False, is_exhausted=False, is_hopeless=False)
    beyond_stock = _counts_beyond_stock(problem, level0)
    options = _without_other_drafts(best_settings(problem, level0, beyond_stock), level0)
    shares = [expected_share(option, level0, beyond_stock) for option in options]
    cuts: list[tuple[int, ...]] = []
    shown = ""
    is_exhausted = is_hopeless = False
    request_count = len(problem.trace)
    cheaper_proposals = int(np.clip(CHEAPER_REQUESTS / request_count, LEAST_PROPOSALS, CHEAPER_PROPOSALS))
    first_proposals = int(np.clip(FIRST_REQUESTS / request_count, LEAST_PROPOSALS, FIRST_PROPOSALS))
    proposals = iterations = 0

    def count_iterations(more: int) -> None:
        nonlocal iterations
        iterations += more
        charge_effort(ITERATION_REQUESTS * more)

    while not problem.out_of_time():
        most_proposals = first_proposals if best is None else cheaper_proposals
        if proposals == most_proposals or iterations > MASTER_ITERATIONS:
            break
        proposals += 1
        message = Message("fleets of several worker types", problem.best_in_words(value))
        if message != shown:  # It changes with the best fleet; the same text is not shown again.
            problem.progress(message)
            shown = message
        below = value * (1 - BETTER_FRAC) if math.isfinite(value) else None
        proposal = find_promising_fleet(
            options, shares, problem.limits, below_value=below, cuts=cuts, count_iterations=count_iterations
        )
        if proposal is None:
            is_exhausted = True
            break
        counts, share = proposal
        if share < (FIRST_FLEET_SHARE if best is None else CHEAPER_SHARE):
            is_hopeless = True
            break
        fleet = tuple(zip(options, counts, strict=True))
        if oracle.holds(fleet):
            if best is None:
                proposals = 0  # The first fleet that holds: from now on the limits for a cheaper one count.
            smallest = owned_first(problem, without_needless_workers(fleet, oracle))
            if objective_of(smallest) < value:
                best, value = smallest, objective_of(smallest)
        else:
            cuts.append(counts)
        problem.watch(
            SearchProgress(
                problem.without_tie_break(value) if best is not None else None,
                problem.bound or None,  # 0 is the bound before one is computed.
                oracle.simulations,
            )
        )
    if best is not None:
        best = tuple((option, count) for option, count in best if count)
        best = _best_after_exchanges(problem, best, candidates, options, level0.options)
    best, is_exact = _simulate_every_mix(problem, level0, best)
    if refines and best is not None and not is_exact:
        refined = owned_first(problem, _refine(problem, level0, beyond_stock, best))
        if objective_of(refined) < objective_of(best) * (1 - ROUNDING):
            best, is_exact = _simulate_every_mix(problem, level0, refined)
    value = math.inf if best is None else objective_of(best)
    return MixedFleets(best, value, len(cuts), is_exact, is_exhausted, is_hopeless)


def cheapest_known(
    problem: Problem, level0: Level0, candidates: Sequence[Counts]
) -> tuple[Counts | None, float]:
    """The cheapest known fleet that holds, and its value: that of level 0, the same with workers on owned
    GPUs first, or one of `candidates`; None if none holds.
    """
    best, value = level0.search.best, level0.search.value
    for counts in (*([] if best is None else [owned_first(problem, best)]), *candidates):
        is_cheaper = problem.allows(counts) and objective_of(counts) < value * (1 - ROUNDING)
        if is_cheaper and problem.oracle.holds(counts):
            best, value = counts, objective_of(counts)
    return best, value


def _refine(problem: Problem, level0: Level0, beyond_stock: Mapping[str, int], best: Counts) -> Counts:
    """The best fleet found of up to four options with any engine settings, or a cheaper one near it; `best`
    itself if there is none.
    """
    oracle = problem.oracle
    options = list(dict.fromkeys([*level0.options, *options_of(best)]))
    shares = shares_by_work(problem, level0, beyond_stock, options)
    best_so_far = problem.best_in_words(objective_of(best))
    problem.progress(Stage("fleets of up to four worker types", "mixed fleets", best_so_far))
    cautious_shares = {}  # See ONE_SETTING_EFFORT.
    for option in options:
        breaks_limit, _ = _rank_by_gaps(problem, option)
        cautious_shares[option.name] = shares[option.name] / (GAPS_HANDICAP if breaks_limit else 1)
    may_go_on = _until_spent(problem, ONE_SETTING_EFFORT)
    best = improve_mixture(
        best, options, cautious_shares, problem.limits, oracle, may_go_on, one_setting=True
    )
    may_go_on = _until_spent(problem, REFINE_EFFORT)
    best = improve_mixture(best, options, shares, problem.limits, oracle, may_go_on)
    return improve_nearby(best, problem.limits, oracle, _until_spent(problem, REFINE_EFFORT))


def _until_spent(problem: Problem, effort: float) -> Callable[[], bool]:
    """A function that says whether there is time, and less than `effort` [requests] was spent since this call
    of `_until_spent`.
    """
    before = effort_spent()
    return lambda: not problem.out_of_time() and effort_spent() - before < effort


def shares_by_work(
    problem: Problem, level0: Level0, beyond_stock: Mapping[str, int], options: Sequence[Option]
) -> dict[str, float]:
    """The share of the traffic that one worker of each option is expected to serve, by the option's name. It
    follows from the number of workers that the work of all traffic keeps busy.

    More workers are needed than are busy. Level 0 has shown the ratio for some options: if n is the least
    count that holds, between n - 1 and n workers are needed, and n - 1/2 is taken. An option gets the median
    ratio over options of its role, or over all options if no option of its role has a ratio.
    """
    # The work is guessed as if no request waited for another one.
    slo_work = guess_slo_work(problem.slo, replace(problem.trace, after=no_edges()))
    lengths = coarser_lengths(problem.lengths)
    needed = {**beyond_stock, **level0.search.least_holding}
    busy = {option.name: busy_workers(option, lengths, slo_work) for option in options}
    ratios_of_role: dict[str, list[float]] = {}
    for option in options:
        if option.name in needed and busy[option.name] > 0:
            ratio = (needed[option.name] - 0.5) / busy[option.name]
            ratios_of_role.setdefault(option.role, []).append(ratio)
    all_ratios = [ratio for ratios in ratios_of_role.values() for ratio in ratios]
    shares = {}
    for option in options:
        ratio = float(np.median(ratios_of_role.get(option.role, all_ratios) or [USUAL_RATIO]))
        failed = level0.search.most_failed.get(option.name, 0)
        count = max(ratio * busy[option.name], failed + LEAST_MORE_BY_WORK, LEAST_COUNT)
        shares[option.name] = 1 / min(count, needed.get(option.name, math.inf))
    return shares


def _simulate_every_mix(problem: Problem, level0: Level0, best: Counts | None) -> tuple[Counts | None, bool]:
    """Simulate every cheaper fleet of any mix of `level0.options`, if these are few enough. Returns the best
    fleet, and whether all cheaper fleets of all options were simulated.
    """
    oracle = problem.oracle
    most_effort = WALK_EFFORT if best is None else MIX_EFFORT  # More if no fleet is known: any is an answer.
    value = math.inf if best is None else objective_of(best)
    most_fleets = most_effort // LEAST_EFFORT  # Each simulation costs LEAST_EFFORT at least.
    fleets = every_mix(level0.options, problem.limits, value, most=most_fleets)
    if fleets is None or problem.out_of_time():
        return best, False
    problem.progress(f"all {len(fleets)} cheaper fleets of several worker types, one by one")
    before = effort_spent()
    for counts in sorted(fleets, key=objective_of):  # The first that holds is the cheapest.
        if problem.out_of_time() or effort_spent() - before > most_effort:
            return best, False
        if oracle.holds(counts):
            return counts, level0.may_mix_all
    return best, level0.may_mix_all


def _best_after_exchanges(
    problem: Problem,
    best: Counts,
    candidates: Sequence[Counts],
    options: Sequence[Option],
    all_options: Sequence[Option],
) -> Counts:
    """The best fleet after exchanges (`_exchange_workers`) that begin with `best`, or with one of the
    `candidates` that holds and has the same value: exchanges from it may lead to fewer GPUs.
    """
    value = objective_of(best)
    tied = [
        counts
        for counts in candidates
        if abs(objective_of(counts) - value) <= ROUNDING * value
        and problem.allows(counts)
        and problem.oracle.verdicts.get(names_of(counts))
    ]
    # Exchanges may cost half as much as proposals of a cheaper fleet.
    most = int(np.clip(CHEAPER_REQUESTS / 2 / len(problem.trace), LEAST_EXCHANGES, CHEAPER_PROPOSALS))
    fleets = dict.fromkeys((best, *tied))
    return min(
        (_exchange_workers(problem, fleet, options, all_options, most) for fleet in fleets), key=objective_of
    )


def _exchange_workers(
    problem: Problem, best: Counts, options: Sequence[Option], all_options: Sequence[Option], most: int
) -> Counts:
    """The best fleet after exchanges of one worker for a cheaper worker of its role, the exchange that saves
    most first. At most `most` fleets are simulated. New workers are of `options`; a fleet's pools are in the
    order of `all_options`.
    """
    oracle = problem.oracle
    failed: set[frozenset[tuple[str, int]]] = set()
    remaining = most
    while remaining > 0 and not problem.out_of_time():
        for counts in _cheaper_exchanges(best, options):
            fleet = in_order(counts, all_options)
            key = frozenset((option.name, count) for option, count in fleet)
            if key in failed or not problem.allows(fleet):
                continue
            remaining -= 1
            if oracle.holds(fleet):
                best = without_needless_workers(fleet, oracle)
                break  # From this fleet other exchanges are possible.
            failed.add(key)
            if remaining <= 0 or problem.out_of_time():
                return best
        else:  # No exchange holds.
            return best
    return best


def _cheaper_exchanges(best: Counts, options: Sequence[Option]) -> list[Counts]:
    """The cheaper fleets in which one worker of the best fleet is replaced by a worker of another option of
    its role; the fleet that saves most comes first.
    """
    exchanges = []
    for old, _ in best:
        for new in options:
            if new.role != old.role or new == old:
                continue
            counts = dict(best)
            counts[old] -= 1
            counts[new] = counts.get(new, 0) + 1
            fleet = tuple(counts.items())
            if objective_of(fleet) < objective_of(best) * (1 - ROUNDING):
                exchanges.append((objective_of(fleet) - objective_of(best), old.name, new.name, fleet))
    exchanges.sort(key=lambda exchange: exchange[:3])  # Names decide between equal savings.
    return [fleet for *_, fleet in exchanges]


def _counts_beyond_stock(problem: Problem, level0: Level0) -> dict[str, int]:
    """The least counts with which mixed options would serve all traffic alone, by the option's name. Only
    options whose stock is too small for that are listed. Empty without a limit on the fleet.

    They are simulated as if the stock were larger. The counts say what share of the traffic one worker serves
    in a fleet of several types, and which engine settings suit it.
    """
    search, limits = level0.search, problem.limits
    if not limits.rows():
        return {}
    least_counts: dict[str, int] = {}
    for alike in by_hardware(option for option in level0.options if option.role == "mixed").values():
        most = limits.most_workers(alike[0].type)
        if any(option.name in search.least_holding for option in alike) or not 1 <= most < math.inf:
            continue  # A count that holds is known, or there is no stock at all, or no limit on it.
        if largest_below(alike[0], search.value) <= most:
            continue  # The price rules these options out before their stock does.
        least = math.inf
        for option in sorted(alike, key=partial(_rank_by_gaps, problem)):
            if problem.out_of_time():
                return least_counts
            unlimited = replace(level0.bounded[option.name], most=math.inf)
            # Counts below the bound `least` need no simulation to fail.
            failed = max(unlimited.least - 1, search.most_failed.get(option.name, 0))
            # Only a smaller count than that of the settings before is of interest.
            n = least_that_holds(_holds_alone(problem.oracle, option), failed + 1, least - 1, unlimited)
            if n is not None:
                least_counts[option.name], least = n, n
    return least_counts


def _holds_alone(oracle: Oracle, option: Option) -> Callable[[int], bool]:
    """A function that says whether a fleet of this many workers of the option, and of no other, holds."""
    return lambda count: oracle.holds(((option, count),))


def best_settings(problem: Problem, level0: Level0, beyond_stock: Mapping[str, int]) -> list[Option]:
    """One option for each role, GPU, TP and PP: the one whose engine settings need the fewest workers, as far
    as that is known; otherwise the one with the largest steps that keep the limits on gaps.
    """
    smallest = level0.search.least_holding

    def rank(option: Option) -> tuple[float, bool, int]:
        workers = smallest.get(option.name, beyond_stock.get(option.name, math.inf))
        return workers, *_rank_by_gaps(problem, option)

    return [min(alike, key=rank) for alike in by_hardware(level0.options).values()]


def _without_other_drafts(options: list[Option], level0: Level0) -> list[Option]:
    """The mixed options, and those prefill and decode options whose workers speculate with the same drafter,
    because KV cannot move between workers with different ones.

    The drafter is that of the decode pool of level 0's best fleet; if this fleet has none, that of the first
    decode option. If there are prefill options, there are decode options too.
    """
    best = [option for option, _ in level0.search.best or ()]
    decodes = [option for option in (*best, *options) if option.role == "decode"]
    return [
        option
        for option in options
        if option.role == "mixed" or may_hand_over((option.type, decodes[0].type))
    ]


def _rank_by_gaps(problem: Problem, option: Option) -> tuple[bool, int]:
    """A key that sorts options: those whose full step keeps the tightest limit on gaps come first, and among
    these the larger token budgets.
    """
    breaks_limit = option.role == "mixed" and breaks_gaps(option.type, problem.slo, mean=True)
    return breaks_limit, -option.type.max_num_batched_tokens


def expected_share(option: Option, level0: Level0, beyond_stock: Mapping[str, int]) -> float:
    """The share of the traffic that one worker is expected to serve: the inverse of the least count that
    holds alone, or of a guess at it.
    """
    search, bounded = level0.search, level0.bounded
    if (workers := search.least_holding.get(option.name, beyond_stock.get(option.name))) is not None:
        return 1.0 / workers
    # `likely` is the count that the option's work alone suggests. It is corrected by how many times as many
    # workers other options have needed.
    ratios = [search.least_holding[name] / bounded[name].likely for name in search.least_holding]
    typical_ratio = float(np.median(ratios)) if ratios else USUAL_RATIO
    guess = typical_ratio * bounded[option.name].likely
    return 1.0 / max(guess, search.most_failed.get(option.name, 0) + LEAST_MORE_ALONE)
