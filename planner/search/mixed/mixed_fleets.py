"""Beyond level 0: fleets of several worker types per pool.

The master problem (solvers/master.py) proposes fleets; one that fails is cut off with all smaller fleets.
The best fleet is then improved by exchanging workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.domain import ROUNDING
from planner.search.level0.level0_search import WALK_EFFORT, Level0
from planner.search.level0.one_pool import least_that_holds
from planner.search.level0.walk import every_mix
from planner.search.mixed.mixtures import improve_mixture, improve_nearby
from planner.search.oracle.deterministic_parallel import effort_spent
from planner.search.oracle.fleet_counts import Counts, in_order, largest_below, may_hand_over, objective
from planner.search.oracle.fleet_oracle import LEAST_EFFORT, Oracle, without_spare_workers
from planner.search.problem.options import breaks_gaps, by_hardware
from planner.search.problem.owned_first import owned_first
from planner.search.problem.plan_problem import Problem, SearchProgress
from planner.search.problem.stages import Stage
from planner.solvers.master import Option, busy_workers, find_promising_fleet
from planner.solvers.required_work import usual_work
from planner.traffic.trace import no_edges
from planner.traffic.workload import coarser_lengths

# If level 0 has a fleet, the master's proposals may cost about this many simulated requests, are at most so
# many, and are tried only if they are expected to carry this share of the traffic.
BEYOND_REQUESTS = 4_000_000
BEYOND_MOST = 8
BEYOND_SHARE = 0.9
# The same if level 0 has no fleet that holds: any fleet is an answer then, so more is spent.
ANY_REQUESTS = 20_000_000
ANY_MOST = 100
ANY_SHARE = 0.6
# However long the trace is, at least so many proposals are tried, and so many exchanges of a worker.
LEAST_TRIES = 4
LEAST_MOVES = 2
BETTER_FRAC = 1e-6  # A proposal is cheaper by this share at least, which is more than the solver's tolerance.
# In an estimate an option needs at least this many workers, so that one without work has a finite share.
LEAST_COUNT = 0.05
# Every cheaper fleet of any mix is simulated where that takes no more than this effort.
MIX_EFFORT = 1_000_000
# Fleets of up to four options of any settings may take this effort, and as much those near the best fleet.
REFINE_EFFORT = 300_000
# Where level 0 learned no count that holds, an option is taken to need this many times the workers that its
# work alone keeps busy.
USUAL_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class MixedFleets:
    """What fleets of any mix brought: the best fleet, None if none was found, and how the search ended.

    `is_exact`: every fleet that is within the limits and cheaper was simulated. `is_exhausted`: every fleet
    of the options that took part is below one that failed. `is_hopeless`: what is left is expected to carry
    far less than the traffic. Where all three are False, the time or the effort was used up.
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
    """Search fleets of any mix under level 0's value, or for any fleet where level 0 has none.

    A fleet of `candidates` that holds must be beaten too.

    First each GPU and TP degree takes part with the settings that did best: the master proposes the fleet
    expected to carry most for less than the incumbent; a fleet that fails is cut away with all that is below,
    one that holds is stripped to a minimal fleet and becomes the incumbent. Then come fleets of any settings
    (mixtures.py) and those around the best, where it `refines`. The effort is counted in simulated requests,
    not in seconds, so that the answer does not depend on the machine.
    """
    oracle = problem.oracle
    best, value = cheapest_known(problem, level0, candidates)
    if best is None and any(math.isinf(problem.limits.most_workers(worker)) for worker in problem.types):
        # Of some type any number of workers is allowed, and level 0 found no number that is enough.
        return MixedFleets(None, math.inf, cuts=0, is_exact=False, is_exhausted=False, is_hopeless=False)
    capacities = _stock_bound_counts(problem, level0)
    options = _that_draft_alike(best_settings(problem, level0, capacities), level0)
    shares = [expected_share(option, level0, capacities) for option in options]
    cuts: list[tuple[int, ...]] = []
    shown = ""
    is_exhausted = is_hopeless = False
    tries, wasted = int(np.clip(BEYOND_REQUESTS / len(problem.trace), LEAST_TRIES, BEYOND_MOST)), 0
    tries_for_any = int(np.clip(ANY_REQUESTS / len(problem.trace), LEAST_TRIES, ANY_MOST))
    while not problem.out_of_time():
        if wasted == (tries if best is not None else tries_for_any):
            break
        wasted += 1
        if (now := f"fleets of several worker types; {problem.best_in_words(value)}") != shown:
            problem.progress(shown := now)
        below = value * (1 - BETTER_FRAC) if math.isfinite(value) else None
        proposal = find_promising_fleet(options, shares, problem.limits, below=below, cuts=cuts)
        if proposal is None:
            is_exhausted = True
            break
        counts, share = proposal
        if share < (BEYOND_SHARE if best is not None else ANY_SHARE):
            is_hopeless = True
            break
        fleet = tuple(zip(options, counts, strict=True))
        if oracle.holds([fleet])[0]:
            # The first fleet that holds changes the goal from any fleet to a cheaper one: tries begin anew.
            wasted = wasted if best is not None else 0
            smallest = owned_first(problem, without_spare_workers(fleet, oracle))
            if objective(smallest) < value:
                best, value = smallest, objective(smallest)
        else:
            cuts.append(counts)
        problem.watch(
            SearchProgress(
                problem.without_tie_break(value) if best is not None else None,
                problem.lower or None,
                oracle.simulations,
            )
        )
    if best is not None:
        best = tuple((option, count) for option, count in best if count)
        # Exchanges may cost half as much as the proposals.
        moves = int(np.clip(BEYOND_REQUESTS / 2 / len(problem.trace), LEAST_MOVES, BEYOND_MOST))
        best = _moved(problem, best, options, level0.options, moves)
    best, is_exact = _every_mix(problem, level0, best)
    if refines and best is not None and not is_exact:
        refined = owned_first(problem, _refined(problem, level0, capacities, best))
        if objective(refined) < objective(best) * (1 - ROUNDING):
            best, is_exact = _every_mix(problem, level0, refined)
    value = math.inf if best is None else objective(best)
    return MixedFleets(best, value, len(cuts), is_exact, is_exhausted, is_hopeless)


def cheapest_known(
    problem: Problem, level0: Level0, candidates: Sequence[Counts]
) -> tuple[Counts | None, float]:
    """The cheapest fleet that holds and its value: that of level 0, on owned GPUs first, or one of
    `candidates`; None where none holds.
    """
    best, value = level0.search.best, level0.search.value
    for counts in (*([] if best is None else [owned_first(problem, best)]), *candidates):
        if (
            problem.allows(counts)
            and objective(counts) < value * (1 - ROUNDING)
            and problem.oracle.holds([counts])[0]
        ):
            best, value = counts, objective(counts)
    return best, value


def _refined(problem: Problem, level0: Level0, capacities: Mapping[str, int], best: Counts) -> Counts:
    """The best of fleets of up to four options of any settings, and of those near it."""
    oracle = problem.oracle
    options = list(dict.fromkeys([*level0.options, *(option for option, _ in best)]))
    shares = _fine_shares(problem, level0, capacities, options)
    before = effort_spent()

    def may_go_on() -> bool:
        return not problem.out_of_time() and effort_spent() - before < REFINE_EFFORT

    shown = f"fleets of up to four worker types; {problem.best_in_words(objective(best))}"
    problem.progress(Stage(shown, "beyond"))
    best = improve_mixture(best, options, shares, problem.limits, oracle, may_go_on)
    before = effort_spent()
    return improve_nearby(best, problem.limits, oracle, may_go_on)


def _fine_shares(
    problem: Problem, level0: Level0, capacities: Mapping[str, int], options: Sequence[Option]
) -> dict[str, float]:
    """Shares of the traffic that one worker of each option is expected to carry, by its work.

    Level 0 has shown how many times the workers that the work keeps busy are needed. A least count n that
    holds says that between n - 1 and n workers are needed, so n - 1/2 is taken. The ratio is the median over
    options of the same role, or over all where none of that role is known.
    """
    guess = usual_work(problem.slo, replace(problem.trace, after=no_edges()))
    lengths = coarser_lengths(problem.lengths)
    needed = {**capacities, **level0.search.least_holding}
    busy = {option.name: busy_workers(option, lengths, guess) for option in options}
    ratios: dict[str, list[float]] = {}
    for option in options:
        if option.name in needed and busy[option.name] > 0:
            ratios.setdefault(option.role, []).append((needed[option.name] - 0.5) / busy[option.name])
    ratios_of_all = [ratio for each in ratios.values() for ratio in each]
    shares = {}
    for option in options:
        ratio = float(np.median(ratios.get(option.role, ratios_of_all) or [USUAL_RATIO]))
        failed = level0.search.most_failed.get(option.name, 0)
        count = max(ratio * busy[option.name], failed + 0.1, LEAST_COUNT)  # More than what failed.
        shares[option.name] = 1 / min(count, needed.get(option.name, math.inf))
    return shares


def _every_mix(problem: Problem, level0: Level0, best: Counts | None) -> tuple[Counts | None, bool]:
    """Simulate every cheaper fleet of any mix, if few: the best, and whether the walk came to its end."""
    oracle = problem.oracle
    budget = WALK_EFFORT if best is None else MIX_EFFORT
    value = math.inf if best is None else objective(best)
    fleets = every_mix(level0.options, problem.limits, value, most=budget // LEAST_EFFORT)
    if fleets is None or problem.out_of_time():
        return best, False
    problem.progress(f"all {len(fleets)} cheaper fleets of several worker types, one by one")
    before = effort_spent()
    for counts in sorted(fleets, key=objective):  # The first that holds is the cheapest.
        if problem.out_of_time() or effort_spent() - before > budget:
            return best, False
        if oracle.holds([counts])[0]:
            return counts, True
    return best, True


def _moved(
    problem: Problem, best: Counts, options: Sequence[Option], pools: Sequence[Option], tries: int
) -> Counts:
    """Exchange one worker for a cheaper one of its role, the largest saving first, while the fleet holds."""
    oracle = problem.oracle
    failed: set[frozenset[tuple[str, int]]] = set()
    while tries > 0 and not problem.out_of_time():
        swaps = sorted(
            (
                (objective(best) - objective(counts), old.name, new.name, counts)
                for old, _ in best
                for new in options
                if new.role == old.role and new != old
                for counts in [_swapped(best, old, new)]
                if objective(counts) < objective(best) * (1 - ROUNDING)
            ),
            key=lambda swap: (-swap[0], *swap[1:3]),
        )
        for *_, counts in swaps:
            fleet = in_order(counts, pools)
            key = frozenset((option.name, count) for option, count in fleet)
            if key in failed or not problem.allows(fleet):
                continue
            tries -= 1
            if oracle.holds([fleet])[0]:
                best = without_spare_workers(fleet, oracle)
                break
            failed.add(key)
            if tries <= 0 or problem.out_of_time():
                return best
        else:
            return best
    return best


def _swapped(counts: Counts, old: Option, new: Option) -> Counts:
    """The fleet with one worker of `new` in place of one of `old`."""
    swapped = dict(counts)
    swapped[old] -= 1
    swapped[new] = swapped.get(new, 0) + 1
    return tuple(swapped.items())


def _stock_bound_counts(problem: Problem, level0: Level0) -> dict[str, int]:
    """The least counts with which mixed options would serve all traffic alone, where stock has too few.

    They are simulated as if there were more. The counts say what share of the traffic one worker carries in a
    fleet of several types, and which settings suit these workers.
    """
    search, limits = level0.search, problem.limits
    if not limits.rows():
        return {}
    bound_counts: dict[str, int] = {}
    for alike in by_hardware(option for option in level0.options if option.role == "mixed").values():
        most = limits.most_workers(alike[0].type)
        if any(o.name in search.least_holding for o in alike) or not 1 <= most < math.inf:
            continue  # The search knows a count that holds, or stock is not what is short.
        if largest_below(alike[0], search.value) <= most:
            continue  # Its price rules it out before its stock does.
        least = math.inf
        for option in sorted(alike, key=lambda o: _rank_late(problem, o)):
            if problem.out_of_time():
                return bound_counts
            unlimited = replace(level0.bounded[option.name], most=math.inf)
            failed = max(unlimited.least - 1, search.most_failed.get(option.name, 0))
            n = least_that_holds(_holds_alone(problem.oracle, option), failed + 1, least - 1, unlimited)
            if n is not None:
                bound_counts[option.name], least = n, n
    return bound_counts


def _holds_alone(oracle: Oracle, option: Option) -> Callable[[int], bool]:
    """Whether so many workers of the option alone hold, as a function of the count."""
    return lambda count: oracle.holds([((option, count),)])[0]


def best_settings(problem: Problem, level0: Level0, capacities: Mapping[str, int]) -> list[Option]:
    """One option per role, GPU, TP and PP: the settings that need fewest workers, as far as known.

    Where nothing is known, the largest steps that keep the limits on gaps.
    """
    smallest = level0.search.least_holding

    def rank(option: Option) -> tuple[float, bool, int]:
        workers = smallest.get(option.name, capacities.get(option.name, math.inf))
        return workers, *_rank_late(problem, option)

    return [min(alike, key=rank) for alike in by_hardware(level0.options).values()]


def _that_draft_alike(options: list[Option], level0: Level0) -> list[Option]:
    """The mixed options, and all others that draft as the decode pool of level 0's best fleet does, or as
    the first decode option where it has none. KV cannot move between workers that draft differently.
    """
    best = [option for option, _ in level0.search.best or ()]
    decodes = [option for option in (*best, *options) if option.role == "decode"]
    return [
        option
        for option in options
        if option.role == "mixed" or may_hand_over((option.type, decodes[0].type))
    ]


def _rank_late(problem: Problem, option: Option) -> tuple[bool, int]:
    """Whether a full step of a mixed worker breaks the tightest limit on gaps; larger budgets first."""
    is_late = option.role == "mixed" and breaks_gaps(option.type, problem.slo, mean=True)
    return is_late, -option.type.max_num_batched_tokens


def expected_share(option: Option, level0: Level0, capacities: Mapping[str, int]) -> float:
    """Share of the traffic one worker is expected to carry, from what level 0 learned."""
    search, bounded = level0.search, level0.bounded
    if (workers := search.least_holding.get(option.name, capacities.get(option.name))) is not None:
        return 1.0 / workers
    ratios = [search.least_holding[name] / bounded[name].likely for name in search.least_holding]
    typical = float(np.median(ratios)) if ratios else USUAL_RATIO
    least = max(typical * bounded[option.name].likely, search.most_failed.get(option.name, 0) + 0.5)
    return 1.0 / least
