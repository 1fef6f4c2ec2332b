"""Compares fleets of like price (nearly the same price): which one has the most headroom
(oracle/headroom.py), and below which price a fleet is really cheaper.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from planner.search.oracle.fleet_counts import Counts, counts_named, names_of, objective_by_gpu, objective_of
from planner.search.oracle.headroom import find_headroom, holds_with
from planner.search.oracle.work_clock import in_time
from planner.search.problem.bill import paid_whole_usd_per_h
from planner.search.problem.options import PRICE_TIES, hardware_of
from planner.search.problem.owned_first import objective_paid
from planner.search.problem.plan_problem import Problem, with_effort_limit
from planner.solvers.master import Option
from planner.traffic.scaling import SAME_FRAC

# Fleets whose prices differ by at most this share count as equally expensive: step times are known less well
# than that, so the fleet with more headroom is worth more than the difference.
LIKE_PRICE_FRAC = 0.01
# At most this many fleets of like price are compared by headroom with the best one, with at most this effort
# [requests].
MOST_LIKE_PRICE = 16
LIKE_PRICE_EFFORT = 1_000_000
# Another fleet of like price is preferred if its headroom is larger by this factor. A smaller gain is not
# worth the simulations in all scenarios. All numbers above are set by hand.
MORE_HEADROOM = 1.1


def below_like_price(problem: Problem, best: Counts) -> float:
    """The value below which a fleet is cheaper than `best` by more than LIKE_PRICE_FRAC. If the objective is
    GPUs, a fleet below it has fewer GPUs, or equally many whose price is lower by that share.
    """
    value = objective_of(best)
    if problem.task.objective == "gpus":
        # The value is the number of GPUs plus a term far below 1, the price, which orders equal numbers.
        # `objective_paid` leaves the term out (owned_first.py).
        gpus = objective_paid(problem, best)
        return gpus + (value - gpus) * (1 - LIKE_PRICE_FRAC)
    return value * (1 - LIKE_PRICE_FRAC)


def with_most_headroom(problem: Problem, options: Sequence[Option], best: Counts) -> Counts:
    """The fleet with the most headroom at about the price of `best`; `best` itself if no other fleet has
    more, or if the time ends first.
    """
    return in_time(partial(_search_most_headroom, problem, options, best), best)


def _search_most_headroom(problem: Problem, options: Sequence[Option], best: Counts) -> Counts:
    """Like `with_most_headroom`; raises StoppedError if the time ends.

    Headroom is computed first, because checking whether a fleet keeps enough scenarios takes many more
    simulations. A fleet replaces `best` only if its headroom is larger by the factor MORE_HEADROOM.
    """
    if problem.out_of_time():
        return best
    # The effort of this headroom is not limited: on a long trace it would use up the limit below, and the
    # plan shows it anyway.
    headroom = find_headroom(problem.oracle, best).headroom
    problem = with_effort_limit(problem, LIKE_PRICE_EFFORT)
    most_frac, with_more = min(headroom.traffic_frac, headroom.steps_frac), list[Counts]()
    for counts in itertools.islice(_fleets_of_like_price(problem, options, best), MOST_LIKE_PRICE):
        least_frac = most_frac * MORE_HEADROOM + SAME_FRAC  # Above `most_frac` also where that is 0.
        if problem.out_of_time() or not holds_with(problem.oracle, counts, least_frac):
            continue
        headroom = find_headroom(problem.oracle, counts, least_frac=least_frac).headroom
        with_more.append(counts)
        most_frac = min(headroom.traffic_frac, headroom.steps_frac)
    # Each fleet of `with_more` has more headroom than the one before, so the last fleet that keeps enough
    # scenarios has the most.
    return next((counts for counts in reversed(with_more) if problem.oracle.holds(counts)), best)


def _fleets_of_like_price(problem: Problem, options: Sequence[Option], best: Counts) -> Iterator[Counts]:
    """Fleets at about the price of `best`: the same GPUs with other engine settings, then the fleets that the
    search has simulated and that held.
    """
    alike = [
        [
            other
            for other in options
            if other.role == option.role and hardware_of(other) == hardware_of(option)
        ]
        for option, _ in best
    ]
    workers = [count for _, count in best]
    names_listed = {names_of(best)}
    other_settings = (tuple(zip(chosen, workers, strict=True)) for chosen in itertools.product(*alike))
    # If nodes are paid whole, fleets whose prices by GPU differ may cost the same, and fleets with equal
    # prices by GPU may not. So all prices must be near.
    prices = (
        objective_of,
        objective_by_gpu,
        *((paid_whole_usd_per_h,) if problem.task.objective in PRICE_TIES else ()),
    )
    for counts in itertools.chain(other_settings, feasible_fleets(problem, options)):
        is_near = all(abs(price(counts) - price(best)) <= LIKE_PRICE_FRAC * price(best) for price in prices)
        if names_of(counts) not in names_listed and is_near and problem.allows(counts):
            names_listed.add(names_of(counts))
            yield counts


def feasible_fleets(problem: Problem, options: Sequence[Option]) -> Iterator[Counts]:
    """The fleets within the limits that the search has simulated and that held."""
    for fleet, holds in list(problem.oracle.verdicts.items()):
        counts = counts_named(fleet, options) if holds else None
        if counts and problem.allows(counts):
            yield counts
