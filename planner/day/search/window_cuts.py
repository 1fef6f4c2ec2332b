"""Finds for each window of a day by itself which sizes of all its pools are too small.

Where pools can replace each other, as pools of several worker types can, no pool alone has a least size: a
window is kept with many workers of either pool. So the search (day/search/day_optimum.py) begins with cuts of
whole windows. For each window

    1  take the cheapest sizes within the stock that none of the window's cuts forbids
    2  stop if the window holds with these sizes in its own steps of the day's grid, and the most elsewhere
    3  otherwise raise one size after the other as far as the window still fails: the cut says that some pool
       must be larger than its raised size in a step of the window

Each cut rests on MORE (day/search/day_optimum.py): more workers, or less earlier work, never hurt. With
several worker types more may hurt, so a cut is tried with each pool at its first and at its raised size.
"""

import itertools
import math

import numpy as np

from planner.day.search.day_optimum import least_that_holds
from planner.day.search.day_runs import DayRuns
from planner.search.oracle.work_clock import is_over
from planner.solvers.pool_sizes import Cut, DayTerms, Ints

# Set by hand: with more combinations of sizes no cuts are sought, and a window gets at most MOST_CUTS.
MOST_COMBINATIONS, MOST_CUTS = 200_000, 40


def window_cuts(runs: DayRuns, deadline: float) -> list[Cut]:
    """The cuts of all windows, found until `deadline` on the search's clock (work_clock.py)."""
    sizes = sizes_by_price(runs.terms)
    cuts: list[Cut] = []
    for window in range(runs.window_count) if len(sizes) else ():
        is_allowed = np.ones(len(sizes), bool)
        for number in range(MOST_CUTS):  # Odd cuts raise the pools in reverse: the first can be raised most.
            if is_over(deadline):
                return cuts
            if not is_allowed.any():
                break
            too_small = sizes[int(np.argmax(is_allowed))]  # The first that is allowed is the cheapest.
            if not _misses(runs, window, too_small):
                break
            too_small = _largest_that_fail(runs, window, too_small, is_reversed=number % 2 == 1)
            # Sizes that are larger in no pool are forbidden from now on.
            is_allowed &= (sizes > too_small).any(axis=1)
            # The cut is empty if all raised sizes are the most.
            if cut := _cut_of_window(runs, window, too_small):
                cuts.append(cut)
    return cuts


def sizes_by_price(terms: DayTerms) -> Ints:
    """All combinations (N, P) of allowed sizes within the stock, the cheapest first; empty if too many."""
    ranges = [range(pool.least, pool.most + 1) for pool in terms.pools]
    if math.prod(len(each) for each in ranges) > MOST_COMBINATIONS:
        return np.zeros((0, len(ranges)), np.int64)
    sizes = np.array(list(itertools.product(*ranges)), np.int64)
    sizes = sizes[terms.are_within_stock(sizes)]
    return sizes[np.argsort(sizes @ terms.prices(), kind="stable")]


def _misses(runs: DayRuns, window: int, sizes: Ints) -> bool:
    """Whether a window is missed with these sizes (P,) in its steps, and the most in all others."""
    workers, own = runs.terms.most, runs.own_steps(window)  # `most` is a new array at every access.
    workers[own.start : own.stop] = sizes
    return runs.misses_window(workers, window, own.start)


def _largest_that_fail(runs: DayRuns, window: int, sizes: Ints, *, is_reversed: bool) -> Ints:
    """Sizes (P,) that fail, raised one after the other as far as the window is still missed.

    The window must be missed with every combination of first and raised sizes, because slow workers may hurt:
    fast workers alone may keep a window that both together miss.
    """
    corners = [sizes]  # Combinations of first and raised sizes, which all fail.
    for c in sorted(range(len(sizes)), reverse=is_reversed):
        size, most = int(sizes[c]), runs.terms.pools[c].most

        def fails(more: int, c: int = c, corners: list[Ints] = corners) -> bool:
            return all(_misses(runs, window, each) for each in _with_size(corners, c, more))

        if size == most:
            continue
        # Where `most` does not fail it holds, as `least_that_holds` requires.
        largest = most if fails(most) else least_that_holds(fails, size + 1, most, size + 1) - 1
        if largest > size:
            corners = [*corners, *_with_size(corners, c, largest)]
    return np.asarray(np.max(corners, axis=0))


def _with_size(corners: list[Ints], c: int, size: int) -> list[Ints]:
    """The corners (P,) with `size` in pool `c`, the largest corner first, which is the likeliest to hold."""
    changed = [each.copy() for each in reversed(corners)]
    for each in changed:
        each[c] = size
    return changed


def _cut_of_window(runs: DayRuns, window: int, sizes: Ints) -> Cut:
    """The cut that at least one of these sizes (P,) must be exceeded in a step of the window."""
    return tuple(
        (t, c, int(size))
        for t in runs.own_steps(window)
        for c, size in enumerate(sizes)
        if size < runs.terms.pools[c].most
    )
