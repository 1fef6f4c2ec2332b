"""What a day costs at least under a controller that changes sizes whenever it likes and knows all traffic.

A fine grid parts each window into steps that are shorter than a start-up. Let x_tc be the most workers of a
pool that a controller has ready at once within a step. If more workers never hurt (day_optimum.MORE), x keeps
every window that the controller keeps. They were ready at some moment of the step, so they are paid from a
start-up before its end to its beginning at least. The master (solvers/any_moment.py) finds the least that
is paid for an x that no cut forbids, and for the work of every window (`paid_work`); windows that its x
misses are cut as `day_optimum` does. It may be stopped after any cut: what the master proved by then holds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from planner.day.search.day_optimum import LAG_STEPS, explain_miss, least_that_holds
from planner.day.search.day_runs import DayRuns
from planner.solvers.any_moment import least_sizes_at_any_moment
from planner.solvers.pool_sizes import SAME_S, Cut, DayTerms

Ints = npt.NDArray[np.int64]

# A start-up has about so many steps, on one grid after another. The bound loses up to two steps of each
# worker's life; a finer grid has the cuts of a coarser one, and takes longer. With 12 steps no day tried got
# so far in its time (2026-11-25).
STEPS_IN_START = (3, 6)
# Finer grids are left out: their programs take longer than what they add to the bound is worth.
MOST_STEPS = 3000
# A day of 144 windows gets this long; on small days the bound grows by 1 % or less afterwards.
TIME_LIMIT_S = 20.0
# The master is solved to this share of its optimum; its bound is what counts.
GAP_FRAC = 0.002


def fine_terms(runs: DayRuns, steps_in_start: int) -> DayTerms | None:
    """The pools of these runs with every window parted into equal steps, at least so many to a start-up; None
    where that is too many.
    """
    terms = runs.terms
    step_s = min(pool.start_s for pool in terms.pools) / steps_in_start
    starts_s = np.unique(np.concatenate(([0.0], runs.windows_s)))
    if not step_s * MOST_STEPS > starts_s[-1]:
        return None
    parts = np.ceil(np.diff(starts_s) / step_s - SAME_S).astype(int)
    fine_s = [
        np.linspace(begin_s, end_s, n, endpoint=False)
        for begin_s, end_s, n in zip(starts_s[:-1], starts_s[1:], parts, strict=True)
    ]
    return replace(terms, edges_s=np.concatenate((*fine_s, starts_s[-1:])), unit_s=0.0)


def refined_cut(cut: Cut, coarse: DayTerms, fine: DayTerms) -> Cut:
    """A cut of the coarse grid on the fine one: the most of a coarse step is the most of its fine ones."""
    last = len(fine.edges_s) - 1
    edges_s = fine.edges_s
    refined = []
    for t, c, size in cut:
        first = int(np.searchsorted(edges_s, coarse.edges_s[t] + SAME_S, "right")) - 1
        end = int(np.searchsorted(edges_s[:-1], coarse.edges_s[t + 1] - SAME_S))
        refined += [(k, c, size) for k in range(max(first, 0), min(max(end, first + 1), last))]
    return tuple(refined)


def any_moment_bound(
    runs: DayRuns,
    cuts: Sequence[Cut] = (),
    *,
    most_usd: float = np.inf,
    time_limit_s: float = TIME_LIMIT_S,
    progress: Callable[[str], None] = lambda _: None,
) -> float:
    """The least USD of a controller that keeps every window, if more workers never hurt.

    `cuts` are of the grid of these runs. It is never above `most_usd`, the cost of a day that keeps all.
    """
    deadline = time.monotonic() + time_limit_s
    work = runs.least_paid()
    bound_usd, terms, known_cuts = work.usd, runs.terms, list(cuts)
    for steps_in_start in STEPS_IN_START:
        fine = fine_terms(runs, steps_in_start)
        if fine is None:
            break
        known_cuts = [refined_cut(cut, terms, fine) for cut in known_cuts]
        terms, verdicts = fine, dict[tuple[int, bytes], bool]()
        fine_runs = DayRuns(runs.fleet, runs.trace, runs.slo, runs.elastic_pools, fine)
        while bound_usd < most_usd and (left_s := deadline - time.monotonic()) > 0:
            solution = least_sizes_at_any_moment(
                fine, known_cuts, work, gap_frac=GAP_FRAC, time_limit_s=left_s
            )
            bound_usd = max(bound_usd, solution.bound_usd)
            if solution.workers is None:
                break
            new_cuts = _cuts_of_missed(fine_runs, solution.workers, verdicts, deadline)
            progress(f"at any moment: bound {bound_usd:.2f} USD, {len(new_cuts)} cuts more")
            if not new_cuts:
                break
            known_cuts += new_cuts
    return min(bound_usd, most_usd)


def _cuts_of_missed(
    runs: DayRuns, workers: Ints, verdicts: dict[tuple[int, bytes], bool], deadline: float
) -> list[Cut]:
    """Cuts for each window that these workers miss; `verdicts` remembers what was simulated."""
    cuts: list[Cut] = []
    for window in range(runs.window_count):
        own, later = runs.own_steps(window), runs.later_steps(window)
        if time.monotonic() > deadline:
            break
        first = max(own.start - LAG_STEPS[-1], 0)
        key = window, workers[first : later.stop].tobytes()
        if key not in verdicts:
            verdicts[key] = runs.misses_window(workers, window, first)
            if verdicts[key]:
                cuts += _explain(runs, workers, window, deadline)
    return [cut for cut in cuts if cut]


def _explain(runs: DayRuns, workers: Ints, window: int, deadline: float) -> list[Cut]:
    """Cuts without a step in common, as far as the window alone explains the miss; else one cut."""
    own, later = runs.own_steps(window), runs.later_steps(window)
    alone = runs.terms.most
    alone[own.start : later.stop] = workers[own.start : later.stop]
    cuts: list[Cut] = []
    while time.monotonic() < deadline and runs.misses_window(alone, window, own.start):
        cut = _shrink(runs, alone, window, range(own.start, later.stop))
        cuts.append(cut)
        for t, c, _ in cut:
            alone[t, c] = runs.terms.pools[c].most
        if not cut:
            break
    return cuts or [explain_miss(runs, workers, window, deadline)]


def _shrink(runs: DayRuns, workers: Ints, window: int, steps: range) -> Cut:
    """The cut of a miss that few of these steps explain, at sizes as large as still fail."""
    sizes, most, first = workers.copy(), runs.terms.most, runs.own_steps(window).start

    def still_fails(*raised: slice) -> bool:
        changed = sizes.copy()
        for part in raised:
            changed[part] = most[part]
        return runs.misses_window(changed, window, first)

    # As many steps as possible at the beginning and at the end get the most workers, then sizes one by one.
    begin, end, n = steps.start, steps.stop, len(steps)
    begin += least_that_holds(lambda k: still_fails(slice(begin, begin + k)), 1, n, 1) - 1
    sizes[steps.start : begin] = most[steps.start : begin]
    end -= least_that_holds(lambda k: still_fails(slice(end - k, end)), 1, end - begin, 1) - 1
    sizes[end : steps.stop] = most[end : steps.stop]
    cut = []
    for t, c in itertools.product(range(begin, end), runs.pools_of(window)):
        size = int(sizes[t, c])

        def fails_with(more: int, t: int = t, c: int = c) -> bool:
            sizes[t, c] = more
            return runs.misses_window(sizes, window, first)

        if size < most[t, c] and not fails_with(int(most[t, c])):
            sizes[t, c] = least_that_holds(fails_with, size + 1, int(most[t, c]), size + 1) - 1
            cut.append((t, c, int(sizes[t, c])))
    return tuple(cut)
